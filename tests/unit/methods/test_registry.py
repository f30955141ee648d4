"""Methods are found by name."""

import sys
from pathlib import Path

import pytest

from atoll import methods
from atoll.core.errors import UserError


def test_every_module_of_the_folder_is_a_method_listed_in_order() -> None:
    folder = Path(methods.__file__).parent
    assert methods.names() == sorted(path.stem for path in folder.glob("[a-z]*.py"))
    assert all(methods.load(name).options.__name__ == "Options" for name in methods.names())


def test_a_method_is_imported_when_it_is_first_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "atoll.methods.alone", raising=False)
    assert methods.load("alone").options.__name__ == "Options"


def test_an_unknown_method_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="unknown method 'fedavgg'") as caught:
        methods.load("fedavgg")
    assert "fedavg" in str(caught.value)


def test_every_method_says_whether_its_rounds_can_do_without_a_site() -> None:
    able = {name for name in methods.names() if methods.load(name).quorum}
    public = {"fccl", "fedmatch", "fedmd", "fml"}
    shared = {"alone", "analytic", "chfl", "fedavg", "fot", "lowrank", "replay", "target"}
    assert able == public | shared
