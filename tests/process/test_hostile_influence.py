"""A real site that lies: the run goes on without it, and the coordinator names it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.core.record import Exclusion, Score, read_events
from atoll.engines.local import local_engine
from atoll.runs.config import read, resolve
from atoll.runs.execute import execute

from .federation import SITES, Federation, federation

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = pytest.mark.process

ROUNDS = 4
CONFIG = f"""\
rounds = {ROUNDS}
data = "wine"
scenario = {{ clients = 3 }}
model = {{ widths = [8] }}
method = {{ name = "fedavg", epochs = 4, rate = 0.01, batch = 8 }}
engine = {{ mode = "loop", threads = 1 }}
checkpoint_seconds = 0
"""


@pytest.fixture
def alps(tmp_path: Path) -> Iterator[Federation]:
    with federation(tmp_path) as made:
        made.allow(["fedavg"])
        (made.folder / "run.toml").write_text(CONFIG)
        yield made


def test_a_lying_site_is_left_out_and_named_and_the_others_are_as_good(alps: Federation) -> None:
    path = str(alps.folder / "run.toml")
    execute(resolve(read(path), path), alps.folder / "honest", local_engine)
    alps.join("basel", "bern")
    alps.join("geneva", ATOLL_REHEARSAL="times=-100")
    serving = alps.serve("run.toml", "--out", "run")
    printed, said = serving.communicate(timeout=300)
    assert serving.returncode == 0, said[-3000:]
    events = read_events(alps.folder / "run")
    out = [event for event in events if isinstance(event, Exclusion)]
    assert {(e.client, e.action) for e in out} == {("site-2", "fit")}
    assert [e.round for e in out] == list(range(ROUNDS))
    assert "geneva" in said
    assert "left out of stage 1 round" in said
    assert f"site-2 was left out of {ROUNDS} rounds (fit): its 'weights' are" in " ".join(
        printed.split()
    )
    lost = accuracy(alps, "honest") - accuracy(alps, "run")
    assert lost <= 0.03


def accuracy(made: Federation, name: str) -> float:
    """Of the two honest sites, at the end."""
    scores = [e for e in read_events(made.folder / name) if isinstance(e, Score)]
    honest = [e.accuracy for e in scores if e.client != f"site-{len(SITES) - 1}"]
    assert len(honest) == 2
    return sum(honest) / 2
