"""Generic compute knows no single method, no paper and no network of one."""

import re
from pathlib import Path

import pytest

import atoll.compute
from atoll import methods
from atoll.reproduce.papers import PAPERS

FOLDER = Path(atoll.compute.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
# a name that is also an English word counts where it is quoted or imported
WORDS = {"alone", "replay", "target"}  # CUDA graphs are replayed, losses have targets
OTHERS = {"fedweit", "fedprox", "scaffold", "ewc", "feddf", "rcfl", "v-leto", "textcnn", "cohort"}


def pattern(name: str) -> str:
    if name in WORDS:
        return rf"methods\.{name}\b|import {name}\b|[\"']{name}[\"']\]"
    return rf"\b{re.escape(name)}\b"


@pytest.mark.parametrize("name", sorted({*methods.names(), *PAPERS, *OTHERS}))
def test_compute_does_not_name(name: str) -> None:
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern(name), line, re.IGNORECASE)
    ]
    assert found == []


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 10


@pytest.mark.parametrize("name", ["executor", "proof", "verify", "autotune", "deterministic"])
def test_no_type_of_job_is_tested_for(name: str) -> None:
    """The registry is looked up by type; generic modules name none."""
    text = (FOLDER / f"{name}.py").read_text()
    assert not re.search(r"isinstance\([a-z_]*job", text)
    assert not re.search(r"(Train|Eval|Split|Public|EarlyStopped)Job", text)
