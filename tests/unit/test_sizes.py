"""Sizes of files, methods and functions of the package, in lines."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "atoll"
FILE = 600
FUNCTION = 40  # from `def` to its last line; decorators do not count
METHODS = {
    "fedseit": 550,
    "chfl": 450,
    "vleto": 350,
    "fccl": 250,
    "splitnn": 250,
    "analytic": 250,
    "target": 250,
    "lowrank": 200,
}
BASELINE = 180  # any other method


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions(source: str) -> dict[str, int]:
    """The lines of each function, methods and nested ones included."""
    return {
        f"{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_no_file_is_too_long() -> None:
    sizes = {str(path.relative_to(SOURCE)): lines(path) for path in sorted(SOURCE.rglob("*.py"))}
    assert {name: size for name, size in sizes.items() if size > FILE} == {}


@pytest.mark.parametrize(
    "path", sorted((SOURCE / "methods").glob("[!_]*.py")), ids=lambda path: path.stem
)
def test_no_method_is_too_long(path: Path) -> None:
    assert lines(path) <= METHODS.get(path.stem, BASELINE)


def test_no_function_is_too_long() -> None:
    long = [
        f"{path.relative_to(SOURCE)}:{name} has {size} lines"
        for path in sorted(SOURCE.rglob("*.py"))
        for name, size in functions(path.read_text()).items()
        if size > FUNCTION
    ]
    assert long == []


def test_the_lines_of_a_function_are_counted_from_def_to_its_end() -> None:
    source = (
        "@decorated\ndef one(\n    x,\n):\n    async def two():\n        return x\n    return two\n"
    )
    assert functions(source) == {"2 one": 6, "5 two": 2}
