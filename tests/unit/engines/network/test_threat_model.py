"""The page about networks names tests that exist, in the files that it names."""

import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[3]
PAGE = (TESTS.parent / "docs" / "network.md").read_text()
DEFAULT = ("tests/process/test_hostile.py", "tests/process/test_keys.py")  # as the page says


def defined(paths: Iterator[Path]) -> set[str]:
    names = set[str]()
    for path in paths:
        names |= set(re.findall(r"(?m)^def (test_\w+)", path.read_text()))
    return names


def files(place: str) -> Iterator[Path]:
    """The tests of a file or of a folder."""
    path = TESTS.parent / place
    yield from [path] if path.is_file() else path.rglob("test_*.py")


def test_every_test_that_the_threat_model_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 40
    assert named <= defined(TESTS.rglob("test_*.py"))


def test_every_row_of_the_threat_model_names_tests_in_the_files_it_names() -> None:
    model = PAGE.partition("## Threat model")[2].partition("\n## ")[0]
    rows = [line for line in model.splitlines() if re.search(r"`test_\w+`", line)]
    rows = [row for row in rows if row.startswith("|")]
    assert len(rows) > 40
    for row in rows:
        places = re.findall(r"`(tests/[\w/.]+)`", row) or DEFAULT
        known = set[str]().union(*(defined(files(place)) for place in places))
        assert set(re.findall(r"`(test_\w+)`", row)) <= known, row


def test_every_row_about_an_attack_names_a_test() -> None:
    table = PAGE.partition("| attack | by | what happens | test |")[2].partition("\n\n")[0]
    rows = table.strip().splitlines()[1:]
    assert len(rows) > 40
    for row in rows:
        assert re.search(r"`test_\w+`", row.split("|")[-2]), row
