"""The coordinator's half of the answer: who is asked, what the record has, what is withheld."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.core.messages import Packet, opened, pack, unpack
from atoll.core.record import Message, Record
from atoll.engines.local import local_engine
from atoll.engines.network.collection import collect, reason_for_none
from atoll.engines.network.comparison import compared
from atoll.engines.network.requests import Compare
from atoll.learning.weights import without
from atoll.metrics.release import Release
from atoll.runs.answer import write_assembled
from atoll.runs.config import change, resolve
from atoll.runs.execute import execute
from atoll.runs.parts import Parts, parts
from atoll.runs.predict.model import ended_state
from atoll.runs.result import Run, write_result

VALUES = {
    "data": "breast-cancer", "rounds": 2, "clients": 4, "tests": "own", "rows": "even",
    "widths": [4], "epochs": 1, "engine.mode": "loop", "threads": 1,
}  # fmt: skip


def run_parts(method: str = "fedavg", **changes: Any) -> Parts:
    return parts(resolve(change({"method": method}, VALUES | changes), "test"))


class Fake:
    """Sites in this process: two that release, one that has too few rows, one that is away."""

    def __init__(self, of: Parts, folder: Path, few: Callable[[], str] = lambda: "") -> None:
        self.parts, self.folder, self.few = of, folder, few
        self.present = list(of.scenario.clients[:3])
        self.asked = 0

    def willing(self, id: str) -> bool:
        raise AssertionError("only parties are asked")

    def alone(self, id: str) -> None:
        raise AssertionError("only parties train alone")

    def carry(self, *arguments: Any) -> Any:
        raise AssertionError("the rounds are done")

    def compare(self, request: Packet) -> dict[str, Packet | str]:
        self.asked += 1
        state = unpack(request, Compare, "server")
        replies: dict[str, Packet | str] = {}
        for id in self.present[:2]:
            leaves, _ = compared(self.parts, id, {}, state, self.folder)
            packet = pack(leaves)
            replies[id] = opened(packet.header, packet.block, Release, id)
        if self.few():
            replies[self.present[2]] = self.few()
        return replies


def collected(
    folder: Path, few: Callable[[], str] = lambda: "", **changes: Any
) -> tuple[Fake, dict[str, Any]]:
    """A local run whose last lines are those of a comparison."""
    of = run_parts(**changes)
    execute(of.config, folder, local_engine)
    for name in ("result.json", "digests.json"):
        (folder / name).unlink()
    sites = Fake(of, folder, few)
    with Record.reopen(folder) as record:
        record.resume()
        body = collect(sites, of, folder, record)
        write_result(folder, record.extents)
    return sites, write_assembled(folder, body)


def test_every_site_is_asked_once_and_the_others_are_withheld(tmp_path: Path) -> None:
    sites, body = collected(tmp_path / "run")
    assert sites.asked == 1
    assert list(body["sites"]) == ["site-0", "site-1"]
    assert body["withheld"] == {
        "site-2": "the contract of the site does not allow it",
        "site-3": "the site was away",
    }
    assert Run(tmp_path / "run").answer == body
    assert any("interval has a level of 98.75 %" in note for note in body["notes"])


def test_the_reason_of_a_site_that_failed_is_in_the_answer(tmp_path: Path) -> None:
    _, body = collected(tmp_path / "run", lambda: "lost: silent for 30 s")
    assert body["withheld"]["site-2"] == "lost: silent for 30 s"


def test_the_ledger_has_the_messages_and_the_folder_stays_usable(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    collected(folder)
    events = [e for e in Run(folder).events if isinstance(e, Message) and e.action == "compare"]
    assert [(e.sender, e.receiver, e.kind) for e in events] == [
        ("server", "site-0", "Compare"), ("site-0", "server", "Release"),
        ("server", "site-1", "Compare"), ("site-1", "server", "Release"),
    ]  # fmt: skip
    assert all((e.stage, e.round, e.count) == (0, 1, 1) for e in events)
    weights = without("server", ended_state(folder))  # the checkpoint is of the run's end
    assert events[0].payload == sum(tensor.nbytes for tensor in weights.values())
    assert events[1].payload == 0 < events[1].bytes < 4000


def test_shared_test_rows_have_a_note(tmp_path: Path) -> None:
    _, apart = collected(tmp_path / "one")
    _, shared = collected(tmp_path / "two", tests="shared")
    note = "sites share test rows; overall, standard errors are added"
    assert (note in apart["notes"], note in shared["notes"]) == (False, True)


@pytest.mark.parametrize(
    ("method", "changes", "willing", "words"),
    [
        ("fedavg", {}, 1, ""),
        ("fedavg", {}, 0, "no site's contract allows it"),
        ("fedavg", {"checkpoints": False}, 1, "keeps no checkpoint"),
    ],
)
def test_why_nobody_is_asked(
    method: str, changes: dict[str, Any], willing: int, words: str
) -> None:
    reason = reason_for_none(run_parts(method, **changes), willing)
    assert words in reason
    assert bool(reason) is bool(words)
