"""Sizes of files, methods and functions of the package, and repeated lines."""

import ast
import re
from collections import defaultdict
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
    "analytic": 265,  # it declares its sums for contracts
    "target": 260,
    "lowrank": 200,
}
BASELINE = 180  # any other method
REPEATED = 10  # equal lines in a row that two places may not share


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions(source: str) -> dict[str, int]:
    """The lines of each function, methods and nested ones included."""
    return {
        f"{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def repeated(sources: dict[str, str], count: int = REPEATED) -> list[str]:
    """Pairs of places that share so many lines in a row, as "name:line ~ name:line".

    White space is folded. Blank lines, comments, imports and lone punctuation do not count.
    """
    places: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, source in sources.items():
        folded = [(n, " ".join(x.split())) for n, x in enumerate(source.splitlines(), start=1)]
        code = [
            (number, line)
            for number, line in folded
            if re.search(r"\w", line) and not re.match(r"#|import |from ", line)
        ]
        for start in range(len(code) - count + 1):
            window = code[start : start + count]
            places[tuple(line for _, line in window)].append(f"{name}:{window[0][0]}")
    return [" ~ ".join(equal) for equal in places.values() if len(equal) > 1]


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


def test_no_two_places_share_ten_lines() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert repeated({str(path.relative_to(SOURCE)): path.read_text() for path in paths}) == []


def test_repeated_lines_are_counted_without_blank_lines_comments_and_imports() -> None:
    lines = [f"x{number} = {number}" for number in range(REPEATED)]
    one = "\n".join(["import a", *lines])
    two = "\n\n# why\n".join(["def f():", *(f"    {line}" for line in lines), ")"])
    assert repeated({"one": one, "two": two}) == ["one:2 ~ two:4"]
    assert repeated({"one": one, "two": "\n".join(lines[1:])}) == []
    assert repeated({"one": f"{one}\ny = 1\n{one}"}) == ["one:2 ~ one:14"]
