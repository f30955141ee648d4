"""docs/errors.md has a line for each message in the source, with its exit code.

With ATOLL_GOLDEN=renew the table is written from the source.
"""

import ast
import os
import re
from pathlib import Path

from atoll.core import errors

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"
MARK = "<!-- from the source: make golden -->\n"
# functions that make an error of their arguments: the place of the message, the exit code
MAKERS = {
    "UserError": (0, errors.EXIT_USER),
    "_wrong": (0, errors.EXIT_DATA_MISSING),
    "unusable": (0, errors.EXIT_DATA_MISSING),
    "refused": (0, errors.EXIT_DATA_MISSING),
    "refusal": (0, errors.EXIT_USER),
    "_stopped": (0, errors.EXIT_INTERRUPTED),
}


def words(node: ast.AST, scope: ast.AST) -> list[str]:
    """A message as it reads, what varies as a sign; a name stands for what was given to it."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )]  # fmt: skip
    if isinstance(node, ast.IfExp):
        return words(node.body, scope) + words(node.orelse, scope)
    if isinstance(node, ast.Name):
        given = [
            value
            for one in ast.walk(scope)
            if isinstance(one, ast.Assign)
            for target, value in pairs(one)
            if isinstance(target, ast.Name) and target.id == node.id
        ]
        return [text for value in given for text in words(value, scope)]
    return []


def pairs(one: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Each name of an assignment with its value."""
    (target,) = one.targets
    if isinstance(target, ast.Tuple) and isinstance(one.value, ast.Tuple):
        return list(zip(target.elts, one.value.elts, strict=True))
    return [(target, one.value)]


def code(call: ast.Call, usual: int) -> int:
    """The exit code of an error."""
    given = [*call.args[3:4], *(k.value for k in call.keywords if k.arg == "exit_code")]
    return int(getattr(errors, given[0].id)) if given and isinstance(given[0], ast.Name) else usual


def messages() -> dict[str, set[int]]:
    """Every message of the source with its exit codes."""
    found: dict[str, set[int]] = {}
    for path in sorted((ROOT / "src" / "atoll").rglob("*.py")):
        tree = ast.parse(path.read_text())
        scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for scope in scopes:
            for call in (node for node in ast.walk(scope) if isinstance(node, ast.Call)):
                name = getattr(call.func, "id", getattr(call.func, "attr", ""))
                if name not in MAKERS or not call.args:
                    continue
                place, usual = MAKERS[name]
                for text in words(call.args[place], scope):
                    if re.search(r"\w{3}", text):
                        found.setdefault(text.strip(), set()).add(code(call, usual))
    return found


def rows() -> list[str]:
    made = messages()
    return [
        f"| {text.replace('|', chr(92) + '|')} | {', '.join(map(str, sorted(codes)))} |"
        for text, codes in sorted(made.items(), key=lambda item: item[0].casefold())
    ]


def test_every_message_of_the_source_is_found() -> None:
    made = messages()
    assert len(made) > 80
    assert made["the file is empty"] == {errors.EXIT_DATA_MISSING}
    assert made["unknown option '…'"] == {errors.EXIT_USER}
    assert made["interrupted; the state is saved"] == {errors.EXIT_INTERRUPTED}


def test_the_page_has_a_line_for_each_message() -> None:
    text = PAGE.read_text()
    head, _, tail = text.partition(MARK)
    assert MARK in text, "the mark is gone"
    table = "\n".join(["| message | code |", "|---|---|", *rows()]) + "\n"
    if os.environ.get("ATOLL_GOLDEN") == "renew":
        PAGE.write_text(f"{head}{MARK}\n{table}")
    else:
        assert tail.strip().splitlines() == table.strip().splitlines(), "renew with make golden"
