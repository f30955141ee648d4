"""The page about networks names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[3]


def test_every_test_that_the_threat_model_names_exists() -> None:
    page = (TESTS.parent / "docs" / "network.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    defined = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"(?m)^def (test_\w+)", path.read_text())
    }
    assert len(named) > 40
    assert named <= defined, named - defined
