"""Rounds that begin before the numbers of the one before are read: nothing else changes."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.compute.executor import Executor
from atoll.core.errors import BadMessageError, InterruptedRunError
from atoll.core.federation import Clients, Moment, Working
from atoll.core.messages import Packet, Weights, wrap
from atoll.core.record import Record, Round, read_checkpoint, read_events, read_snapshots
from atoll.engines.local import LocalEngine
from atoll.families import averaging
from atoll.learning.weights import copied
from atoll.methods import fedavg
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.facts import facts
from atoll.runs.loop import go
from atoll.runs.parts import Parts, parts


def config(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "data": "wine", "rounds": 5, "clients": 3, "widths": [4], "epochs": 1, "score_every": 3,
        "engine.packing": False, "checkpoint_seconds": 3600,
    }  # fmt: skip
    method = changes.pop("method", "fedavg")
    return resolve(change({"method": method}, {**values, **changes}), "test")


def run(
    made: Parts, folder: Path, engine: LocalEngine, stopping: Callable[[], bool] = lambda: False
) -> list[Any]:
    record = Record(folder) if folder.exists() else Record.create(folder, "", facts(made))
    go(made, engine, record, lambda progress: None, stopping)
    return list(read_events(folder))


def engine(made: Parts, ahead: bool = True) -> LocalEngine:
    return LocalEngine(made, Executor("stacked"), deferred=ahead)


def test_the_record_is_the_same(tmp_path: Path) -> None:
    made = parts(config())
    for name, ahead in (("waiting", False), ("ahead", True)):
        run(made, tmp_path / name, engine(made, ahead))
    files = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("waiting", "ahead")]
    assert files[0] == files[1]


@pytest.mark.gpu
def test_the_record_is_the_same_on_a_gpu(tmp_path: Path) -> None:
    made = parts(config(rounds=12, score_every=5, **{"engine.device": "cuda"}))
    for name, ahead in (("waiting", False), ("ahead", True)):
        run(made, tmp_path / name, engine(made, ahead))
    files = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("waiting", "ahead")]
    assert files[0] == files[1]


class Noting(LocalEngine):
    """Notes after each exchange how many rounds the record has."""

    def __init__(self, made: Parts, folder: Path) -> None:
        super().__init__(made, Executor("stacked"), deferred=True)
        self.folder, self.seen = folder, list[int]()

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        answers = super().carry(action, moment, packets)
        if action == "fit":
            self.seen.append(sum(isinstance(e, Round) for e in read_events(self.folder)))
        return answers


@pytest.mark.parametrize("method", ["fedavg", "alone"])
def test_a_round_is_entered_when_the_next_one_is_under_way_or_scores_are_wanted(
    method: str, tmp_path: Path
) -> None:
    noting = Noting(parts(config(method=method)), tmp_path / "run")
    run(noting._parts, tmp_path / "run", noting)
    assert noting.seen == [0, 0, 1, 3, 3]  # scores after the third, and at the end


class Ailing(fedavg.Client):
    """A client whose training fails in the second round."""

    def fit(self, request: Weights, moment: Moment) -> Working[averaging.Fitted]:
        done = yield from super().fit(request, moment)
        if moment.round == 1 and self.site.id == "site-1":
            broken = {n: torch.full_like(done.weights[n], float("nan")) for n in done.weights}
            done = averaging.Fitted(broken, done.loss, done.rows)
        return done


@pytest.mark.parametrize("ahead", [False, True])
def test_numbers_that_are_not_finite_are_refused_before_anything_is_kept(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = parts(config(score_every=0, checkpoint_seconds=0))
    sick = engine(made, ahead)
    options = made.config.options()
    monkeypatch.setattr(type(made), "client", lambda self, id: Ailing(options, self.site(id)))
    with pytest.raises(BadMessageError) as error:
        run(made, tmp_path / "run", sick)
    assert error.value.sender == "site-1"
    assert "not finite" in str(error.value)
    assert [e.round for e in read_events(tmp_path / "run") if isinstance(e, Round)] == [0]
    _, head = read_checkpoint(tmp_path / "run")
    assert head["progress"] == {"stage": 0, "round": 1}


@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_is_kept_of_what_was_seen_in_a_round_that_is_refused(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = parts(config(score_every=0, attribution=True))
    options = made.config.options()
    monkeypatch.setattr(type(made), "client", lambda self, id: Ailing(options, self.site(id)))
    with pytest.raises(BadMessageError, match="site-1"):
        run(made, tmp_path / "run", engine(made, ahead))
    seen = read_snapshots(tmp_path / "run")
    assert len(seen) == 6  # of three clients in the first round: others' weights, and their own


def test_a_round_that_was_done_is_entered_when_the_run_is_broken_off(tmp_path: Path) -> None:
    made = parts(config(score_every=0))

    class Breaking(LocalEngine):
        def carry(
            self, action: str, moment: Moment, packets: Mapping[str, Packet]
        ) -> Mapping[str, Packet]:
            if moment.round == 3:
                raise KeyboardInterrupt
            return super().carry(action, moment, packets)

    with pytest.raises(KeyboardInterrupt):
        run(made, tmp_path / "run", Breaking(made, Executor("stacked"), deferred=True))
    events = read_events(tmp_path / "run")
    assert [e.round for e in events if isinstance(e, Round)] == [0, 1, 2]


class Reading:
    """An executor whose device counts how often the host reads one of its numbers."""

    mode = "stacked"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executor, self.reads, self.counting = Executor("stacked"), 0, False
        for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__"):
            self._count(name, monkeypatch)

    def _count(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, *given: Any) -> Any:
            self.reads += self.counting
            return original(tensor, *given)

        monkeypatch.setattr(torch.Tensor, name, counted)

    def do(self, jobs: Any, moment: Moment | None = None) -> dict[str, Any]:
        return self.executor.do(jobs, moment)


@pytest.mark.parametrize("weighting", ["equal", "rows"])
def test_a_round_reads_no_number_from_the_device(
    weighting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = parts(config(weighting=weighting))
    reading, server = Reading(monkeypatch), made.server()
    clients = LocalEngine(made, reading, deferred=True)
    for number in range(3):
        moment = Moment(0, number, 3)
        reading.counting = number > 0  # the first round proves the stack and draws rows
        asked = Clients(made.scenario.clients, clients, moment, (0,), packing=False)
        notes = server.round(asked, moment)
        assert reading.reads == 0
        reading.counting = False
        clients.settle()
        assert math.isfinite(notes["loss"])
        assert sum(message.bytes for message in asked.traffic) > 0


def test_a_client_that_is_asked_alone_is_refused_alone_and_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = parts(config())
    options = made.config.options()
    monkeypatch.setattr(type(made), "client", lambda self, id: Ailing(options, self.site(id)))
    clients, moment = engine(made), Moment(0, 1, 3)
    asked = Clients(made.scenario.clients, clients, moment, (0,), packing=False)
    request = Weights(made.site("server").model().state_dict())
    failed: dict[str, str] = {}
    replies = asked.ask_each(
        *(fedavg.Client.fit, dict.fromkeys(asked.ids, request)),
        lambda id, error: failed.update({id: str(error)}),
    )
    assert [*replies] == ["site-0", "site-2"]
    assert [*failed] == ["site-1"]
    clients.settle()  # nothing is left to refuse


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["request", "loss", "weights"])
def test_whatever_is_not_finite_is_refused_when_checks_are_finished(
    where: str, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = parts(config())
    clients, moment = engine(made), Moment(0, 0, 3)
    weights = copied(made.site("server").model().state_dict())

    class Broken(fedavg.Client):
        def fit(self, request: Weights, moment: Moment) -> averaging.Fitted:  # type: ignore[override]
            own = number if self.site.id == "site-1" else 0.0
            change = {"w": torch.tensor(own if where == "weights" else 0.0), "z": torch.zeros(0)}
            return averaging.Fitted(change, own if where == "loss" else 0.0, 1)

    options = made.config.options()
    if where == "request":
        next(iter(weights.values())).view(-1)[0] = number
    monkeypatch.setattr(type(made), "client", lambda self, id: Broken(options, self.site(id)))
    packets = dict.fromkeys(made.scenario.clients, wrap(Weights(weights)))
    clients.carry("fit", moment, packets)
    with pytest.raises(BadMessageError, match="not finite") as error:
        clients.settle()
    assert error.value.sender == ("server" if where == "request" else "site-1")


def test_numbers_as_large_as_their_type_allows_are_finite() -> None:
    made = parts(config(method="alone"))
    largest = torch.tensor([torch.finfo(torch.float64).max] * 2, dtype=torch.float64)
    checking = engine(made)
    checking._check([("site-0", wrap(Weights({"w": largest, "v": torch.tensor(3e38)})))])
    checking.settle()


def test_such_numbers_end_the_run_at_the_latest_when_the_next_round_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = parts(config(score_every=0))
    options = made.config.options()
    monkeypatch.setattr(type(made), "client", lambda self, id: Ailing(options, self.site(id)))
    noting = Noting(made, tmp_path / "run")
    with pytest.raises(BadMessageError, match="site-1"):
        run(made, tmp_path / "run", noting)
    assert noting.seen == [0, 0, 1]  # of five rounds three were begun, one was entered
    assert sum(isinstance(e, Round) for e in read_events(tmp_path / "run")) == 1


@pytest.mark.parametrize("seconds", [0, 3600])
def test_a_run_that_was_stopped_goes_on_to_the_same_record(seconds: int, tmp_path: Path) -> None:
    made = parts(config(checkpoint_seconds=seconds))
    whole = run(made, tmp_path / "whole", engine(made))
    asked: list[int] = []

    def second() -> bool:
        asked.append(1)
        return len(asked) == 2

    with pytest.raises(InterruptedRunError):
        run(made, tmp_path / "cut", engine(made), second)
    assert sum(isinstance(e, Round) for e in read_events(tmp_path / "cut")) == 2
    assert run(made, tmp_path / "cut", engine(made)) == whole
