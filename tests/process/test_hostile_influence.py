"""A real site that lies: the run goes on without it, and the coordinator names it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from atoll.core.errors import BadMessageError
from atoll.core.federation import Moment
from atoll.core.messages import Empty, pack
from atoll.core.record import Exclusion, Score, read_events
from atoll.engines.local import local_engine
from atoll.runs.config import change, read, resolve, to_toml
from atoll.runs.execute import execute

from .federation import Federation, federation, wait_for

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = pytest.mark.process

# Four sites in one scene; oslo does to its answers what its file says at that moment.

FOUR = ("basel", "bern", "geneva", "oslo")
LIES = {  # what oslo does -> a part of why it is left out
    "value=1e30": "values as large as",
    "nan": "not finite",
    "shape": "not torch.float32",
    "unknown": "unknown tensor",
    "unreadable": "not a whole safetensors block",
    "times=-100": "times as large as the round's median",
}
LYING: dict[str, dict[str, Any]] = {
    "fedavg": {
        "rounds": 3 * len(LIES), "data": "digits-table", "model": {"widths": [32]},
        "method": {"name": "fedavg", "rate": 0.005, "epochs": 3, "weighting": "rows"},
        "scenario": {"split": "rows", "clients": 4},
    },
    "chfl": {
        "rounds": 3, "data": "digits-table", "model": {"widths": [16]},
        "method": {"name": "chfl", "rate": 0.003, "epochs": 1, "batch": 32},
        "scenario": {"split": "columns", "clients": 4, "ratio": 0.4},
    },
    "fedmd": {
        "rounds": 2, "data": {"name": "synthetic-images", "domains": 4, "rows": 600},
        "method": {"name": "fedmd"}, "model": {"widths": [16, 8]},
    },
    "splitnn": {
        "rounds": 3, "data": "digits", "model": {},
        "method": {"name": "splitnn", "batch": 64, "width": 12},
        "scenario": {"split": "parties", "clients": 4, "cut": "quadrants", "train": 0.2},
    },
}  # fmt: skip
ENGINE = {"engine": {"mode": "loop", "threads": 1}, "checkpoint_seconds": 0}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with federation(tmp_path_factory.mktemp("scene"), FOUR) as made:
        made.allow(list(LYING), FOUR)
        for name, values in LYING.items():
            config = resolve(change({"name": name, **values, **ENGINE}, {}), "test")
            (made.folder / f"{name}.toml").write_text(to_toml(config))
        made.join("bern", "geneva")
        for site in ("basel", "oslo"):
            lie(made, "", site)
            made.join(site, ATOLL_REHEARSAL=f"@{made.folder / site}.lie")
        yield made


def lie(made: Federation, how: str, site: str = "oslo") -> None:
    part = made.folder / f"{site}.part"
    part.write_text(how)
    part.replace(made.folder / f"{site}.lie")


def rounds(folder: Path) -> int:
    path = folder / "times.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def reached(folder: Path, count: int, serving: Any) -> bool:
    return rounds(folder) >= count or serving.poll() is not None


def excluded(folder: Path) -> list[Exclusion]:
    return [event for event in read_events(folder) if isinstance(event, Exclusion)]


def test_whatever_a_site_sends_the_run_completes_and_names_it(scene: Federation) -> None:
    """One run of `fedavg` in which oslo tries one lie after another, then two other methods."""
    run = scene.folder / "runs" / "fedavg-1"
    lie(scene, next(iter(LIES)))
    lie(scene, "slow=0.3", "basel")  # so that there is time for one lie after another
    serving = scene.serve("fedavg.toml", "chfl.toml", "fedmd.toml")
    path = str(scene.folder / "fedavg.toml")
    execute(resolve(read(path), path), scene.folder / "honest", local_engine)
    for number, how in enumerate([*LIES, "shape"]):  # of which each has one whole round at least
        lie(scene, how)
        wait_for(f"two rounds of {how}", partial(reached, run, 2 * number + 2, serving), 300)
    printed, said = serving.communicate(timeout=200)
    assert serving.returncode == 0, said[-3000:]
    for name in ("fedavg", "chfl", "fedmd"):
        found = excluded(scene.folder / "runs" / f"{name}-1")
        assert {event.client.rpartition("-")[2] for event in found} == {"3"}, found
        assert {event.round for event in found} == set(range(LYING[name]["rounds"])), found
    reasons = {event.reason for event in excluded(run)}
    for words in LIES.values():
        assert any(words in reason for reason in reasons), (words, reasons)
    assert "oslo connected (left out of stage 1 round" in said
    assert "oslo is site-3" in said
    assert "site-3 was left out of" in printed
    assert honest(scene.folder / "honest") - honest(run) <= 0.03


def honest(folder: Path) -> float:
    """The accuracy of the three honest sites at the end."""
    scores = [e for e in read_events(folder) if isinstance(e, Score) and e.client != "site-3"]
    last = [e.accuracy for e in scores if e.round == max(one.round for one in scores)]
    assert len(last) == 3
    return sum(last) / 3


def test_a_vertical_run_stops_names_the_party_and_resumes_unpoisoned(scene: Federation) -> None:
    run = scene.folder / "split"
    lie(scene, "")
    lie(scene, "", "basel")
    serving = scene.serve("splitnn.toml", "--out", "split")
    wait_for("a round", partial(reached, run, 1, serving), 120)
    lie(scene, "nan")
    _, said = serving.communicate(timeout=120)
    assert serving.returncode == 4, said[-3000:]
    assert "message from oslo refused" in said
    assert "not finite" in said
    done = rounds(run)
    assert 1 <= done < LYING["splitnn"]["rounds"]
    kept = load((run / "checkpoint.safetensors").read_bytes())
    assert all(np.isfinite(array).all() for array in kept.values())
    lie(scene, "")
    again = scene.serve("splitnn.toml", "--out", "split", "--resume")
    path = str(scene.folder / "splitnn.toml")
    execute(resolve(read(path), path), scene.folder / "whole", local_engine)
    _, said = again.communicate(timeout=200)
    assert again.returncode == 0, said[-3000:]
    for file in ("events.jsonl", "result.json"):
        assert (run / file).read_bytes() == (scene.folder / "whole" / file).read_bytes(), file


@pytest.mark.parametrize("reply", [None, [], "x", {}, {"ok": True}, {"ok": True, "header": 7}])
def test_a_reply_of_no_form_at_all_is_one_that_cannot_be_read(reply: Any) -> None:
    from atoll.engines.network import remote  # noqa: PLC0415 - only where it is installed

    class Site:
        """A site's end that answers what it likes."""

        def __call__(self, timeout: float) -> "Site":
            return self

        def handle(self, **arguments: object) -> Any:
            return {"ok": True, **reply} if isinstance(reply, dict) else reply

        def prepare(self, **arguments: object) -> Any:
            return self.handle()

    run = resolve(change({"method": "fedavg"}, {}), "test")
    party = remote.Party("basel", "site-0", Site())
    engine = remote.Remote(run, {"site-0": party}, 60.0, 60.0, lambda: None)
    answers = engine.carry("fit", Moment(0, 0, 1), {"site-0": pack(Empty())})
    assert (answers["site-0"].header, answers["site-0"].block) == (b"", b"")
    with pytest.raises(BadMessageError, match="message from site-0 refused: its answer is not of"):
        engine.prepare("run-1", None)
