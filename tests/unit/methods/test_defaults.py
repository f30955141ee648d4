"""Every method's defaults: a changed one changes the results of everybody who did not set it."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from atoll import methods

KEPT = Path(__file__).with_name("defaults.json")


def defaults(name: str) -> object:
    return json.loads(json.dumps(asdict(methods.load(name).options())))


def test_every_method_has_its_defaults_written_down() -> None:
    if os.environ.get("ATOLL_GOLDEN") == "renew":
        every = {name: defaults(name) for name in methods.names()}
        KEPT.write_text(json.dumps(every, indent=1) + "\n")
    assert sorted(json.loads(KEPT.read_text())) == methods.names()


@pytest.mark.parametrize("name", methods.names())
def test_the_defaults_of_a_method_are_those_that_are_written_down(name: str) -> None:
    assert defaults(name) == json.loads(KEPT.read_text())[name]
