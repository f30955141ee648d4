"""Every public name has a docstring with an example that runs."""

import doctest
from pathlib import Path
from types import ModuleType

import pytest

import atoll
from atoll import testing

NAMES = [(home, name) for home in (atoll, testing) for name in home.__all__ if name[0] != "_"]


@pytest.mark.parametrize(("home", "name"), NAMES, ids=[name for _, name in NAMES])
def test_the_example_of_a_public_name(
    home: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    public = getattr(home, name)
    module = __import__(public.__module__, fromlist=["*"])
    finder = doctest.DocTestFinder(recurse=False)
    tests = finder.find(public, name, module=module, globs=dict(vars(module)))
    assert sum(len(test.examples) for test in tests) > 0, f"{name} has no example"
    runner = doctest.DocTestRunner()
    for test in tests:
        assert runner.run(test).failed == 0
