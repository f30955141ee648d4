"""Watched training: all epochs of a stack on the device give what they give one by one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.compute.early_stopping import EarlyStoppedStack
from atoll.compute.executor import Executor
from atoll.compute.kinds import STACKED
from atoll.compute.kinds.early_stopping import EARLY_STOPPED, EARLY_STOPPED_STACKS
from atoll.compute.proof import prove
from atoll.compute.stacking import Stack
from atoll.core.federation import Moment
from atoll.core.messages import Empty
from atoll.jobs import early_stopping
from atoll.jobs.early_stopping import (
    BEST,
    RATE,
    STOPPED,
    EarlyStoppedJob,
    EarlyStoppedResult,
    Rule,
    stepped,
)
from atoll.methods.fedseit import Fit, Foreign
from atoll.runs.config import change, resolve
from atoll.runs.parts import parts

RUN: dict[str, Any] = {
    "name": "fedseit",
    "rounds": 2,
    "data": {"name": "synthetic-text", "rows": 200, "classes": 6, "length": 30},
    "scenario": {"split": "tasks", "clients": 4, "stages": 3, "task_classes": 3},
    "dtype": "float64",
    "model": {"widths": [6]},
    "method": {"name": "fedseit", "epochs": 4, "batch": 8, "rate": 0.05, "patience": 1},
    "engine": {"mode": "loop"},
}


def jobs(stage: int = 1, **changes: Any) -> list[EarlyStoppedJob]:
    """What the clients of a run would train in the first round of a task."""
    made = parts(resolve(change(RUN, changes), "test"))
    server = made.server()
    clients = [made.client(id) for id in made.scenario.clients]
    found, shared = list[EarlyStoppedJob](), dict[str, torch.Tensor]()
    for now in range(stage + 1):
        moment, found = Moment(now, 0, 2), []
        for client in clients:
            if now:
                client.receive(Foreign(shared, torch.zeros(0)), moment)
            fit = client.fit(Fit(server.base), moment)
            found.append(next(fit))
            if now < stage:
                with pytest.raises(StopIteration):
                    fit.send(found[-1].run())
        for slot, client in enumerate(clients):
            code = client.share(Empty(), moment).adaptive
            shared |= {f"{slot}/{name}": tensor for name, tensor in code.items()}
    return found


def same(one: EarlyStoppedResult, other: EarlyStoppedResult, apart: float = 1e-10) -> None:
    torch.testing.assert_close(one.course, other.course, rtol=10 * apart, atol=0)
    assert one.moments.keys() == other.moments.keys()
    pairs = [(one.weights, other.weights), (one.moments, other.moments)]
    for here, there in pairs:
        for name in there.keys() - {"noise"}:
            torch.testing.assert_close(here[name], there[name], rtol=10 * apart, atol=apart)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"combine": "sum"},
        {"dls": True},
        {"replace": "atoll.reproduce.faults.fedseit:released"},
        {"replace": "atoll.reproduce.faults.fedseit:past"},
        {"method.least_rate": 0.01, "method.rate_cut": 2.0},
    ],
    ids=["FedSeIT", "FedWeIT", "DLS", "released", "faults", "stops"],
)
def test_a_stack_gives_what_its_members_give_alone(changes: dict[str, Any], fixed: bool) -> None:
    members = jobs(**changes)
    if "method.least_rate" in changes:  # the first has no gain, and its rate is near the least
        course = torch.tensor([0.011, -1.0, 1, 0], dtype=torch.float64)
        members[0] = replace(members[0], course=course)
    watch = EarlyStoppedStack(members, fixed=fixed)
    alone = [job.run() for job in members]
    for one, other in zip(watch.run(members), alone, strict=True):
        same(one, other)
    if "method.least_rate" in changes:
        assert [float(one.course[STOPPED]) for one in alone] == [1, 0, 0, 0]
    again = [_next(job, one) for job, one in zip(members, alone, strict=True)]
    for one, other in zip(watch.run(again), [job.run() for job in again], strict=True):
        same(one, other)


def _next(job: EarlyStoppedJob, done: EarlyStoppedResult) -> EarlyStoppedJob:
    """The same member in the next round."""
    course = done.course.clone()
    course[BEST] = torch.inf
    weights = {n: w for n, w in done.weights.items() if n != early_stopping.KEY}
    streams = tuple(stream.child("next") for stream in job.streams)
    work = replace(job.work, weights=weights, moments=done.moments)
    return replace(job, work=work, course=course, streams=streams)


def test_members_that_do_not_come_stay_as_they_are() -> None:
    members = jobs()
    watch = EarlyStoppedStack(members)
    done = watch.run(members)
    again = [_next(job, one) for job, one in zip(members, done, strict=True)]
    assert watch.fits([again[3], again[0], again[1]])
    assert not watch.fits(again[:2])  # so few are a stack of their own
    assert not watch.fits([again[0], again[0], again[1]])
    for few in ([again[3], again[0], again[1]], again):
        for one, job in zip(watch.run(few), few, strict=True):
            same(one, job.run())


def test_without_validation_rows_the_training_loss_decides() -> None:
    members = jobs()
    members[1] = replace(members[1], valid=members[1].valid.at(slice(0, 0)))
    for one, job in zip(EarlyStoppedStack(members, fixed=True).run(members), members, strict=True):
        same(one, job.run())


def test_a_stack_whose_members_have_all_stopped_ends() -> None:
    members = [
        replace(job, rule=Rule(1, 1e6, 1e-3), course=torch.tensor([0.01, -1.0, 1, 0]).double())
        for job in jobs()
    ]
    watch = EarlyStoppedStack(members)
    watch.run(members)
    assert int(watch.epoch) == 2  # the host asks after the epoch that follows


def test_a_member_that_has_stopped_does_not_change() -> None:
    course = torch.tensor([[0.1, 0.5, 1, 0], [0.1, 0.5, 1, 1]], dtype=torch.float64)
    found = stepped(course, torch.tensor([0.6, 0.4]).double(), Rule(2, 2.0, 0.01))
    assert found.tolist() == [[0.05, 0.5, 2, 0], [0.1, 0.5, 1, 1]]


def test_a_loss_that_is_no_number_is_no_gain() -> None:
    course = torch.tensor([0.1, 0.5, 1, 0], dtype=torch.float64)
    assert float(stepped(course, torch.nan, Rule(2, 2.0, 0.01))[RATE]) == 0.05


def test_an_executor_does_the_epochs_of_all_side_by_side() -> None:
    members = {f"site-{number}": job for number, job in enumerate(jobs())}
    found = Executor("stacked").do(members)
    for id, job in members.items():
        same(found[id], job.run())


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"combine": "sum"}, {"dls": True}])
def test_on_a_gpu_a_stack_gives_what_its_members_give_alone(changes: dict[str, Any]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator")
    how: dict[str, Any] = {**changes, "engine.device": "cuda", "method.epochs": 8}
    members = jobs(**how)
    watch = EarlyStoppedStack(members)
    done = watch.run(members)
    for one, job in zip(done, members, strict=True):
        same(one, job.run(), 1e-7)
    again = [_next(job, one) for job, one in zip(members, done, strict=True)]
    for one, job in zip(watch.run(again[:3]), again[:3], strict=True):
        same(one, job.run(), 1e-7)
    assert watch.judgement is not None
    assert watch.stack.captured


def test_all_epochs_in_one_computation_are_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    members = jobs()
    assert prove(EARLY_STOPPED, members).way == "batched"
    load = Stack.load

    def forgetful(self: Any, works: Any) -> None:
        load(self, [replace(work, moments={}) for work in works])

    monkeypatch.setattr(Stack, "load", forgetful)  # nothing shows while moments are zero
    assert not prove(EARLY_STOPPED, members).holds


def test_members_that_stop_leave_the_others_in_their_stack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    anywhere = replace(EARLY_STOPPED_STACKS, worth=lambda jobs: True)  # without a GPU too
    monkeypatch.setitem(STACKED, EarlyStoppedJob, anywhere)
    members = {str(number): job for number, job in enumerate(jobs())}
    executor, built = Executor("stacked"), []
    make = EarlyStoppedStack.__init__

    def counted(self: Any, *given: Any, **named: Any) -> None:
        built.append(len(given[0]))
        make(self, *given, **named)

    monkeypatch.setattr(EarlyStoppedStack, "__init__", counted)
    executor.do(members)
    before, fewer = len(built), dict(list(members.items())[:3])
    assert 2 * len(fewer) > len(members) > 3
    for id, result in executor.do(fewer).items():
        same(result, fewer[id].run())
    assert len(built) == before


def test_a_round_that_goes_wrong_is_done_by_the_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no other test reads the verdict
    anywhere = replace(EARLY_STOPPED_STACKS, worth=lambda jobs: True)  # without a GPU too
    monkeypatch.setitem(STACKED, EarlyStoppedJob, anywhere)
    members = {str(number): job for number, job in enumerate(jobs())}
    executor = Executor("stacked", verify="always")
    for id, result in executor.do(members).items():
        same(result, members[id].run())
    assert {choice.work: choice.mode for choice in executor.choices.values()} == {
        "work": "stacked",
        "watched": "stacked",
    }
    load = Stack.load

    def moved(self: Any, works: Any) -> None:
        load(self, works)
        self.weights[self.phases[0].moves[0]] += 1.0

    monkeypatch.setattr(Stack, "load", moved)
    for id, result in executor.do(members).items():
        same(result, members[id].run(), apart=0.0)
    assert {choice.mode for choice in executor.choices.values()} == {"loop"}
    assert all(choice.refuted for choice in executor.choices.values())
