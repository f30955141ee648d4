"""A fast path that becomes wrong while a run goes on is found, and its round is done again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.compute import proof, verify
from atoll.compute.accelerated import Candidate
from atoll.compute.captured import Captured
from atoll.compute.choice_files import choices
from atoll.compute.compare import max_relative_error
from atoll.compute.executor import Executor, Mode
from atoll.compute.kinds.train import TRAIN
from atoll.compute.probe import Seen
from atoll.compute.proof import Verdict
from atoll.compute.verify import Verifier
from atoll.core.federation import Moment
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.train import EvalJob, Optimiser, Phase, TrainJob, TrainResult
from atoll.learning.losses import cross_entropy
from atoll.learning.models import outputs

MOVES = ("weight0", "bias0")
ROUNDS = 6
SWITCHED = 3  # the fourth round


class Clock:
    """A clock that goes on by so much whenever it is looked at."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def switched(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """Right, until a constant is larger than any proof makes it: then members are mixed."""
    right = cross_entropy(outputs(weights, batch.x, 1)[-1], batch)
    mixed = weights["weight0"].square().sum()
    return torch.where(weights["flag"] > 100, right + mixed, right)


def works(number: int, start: Mapping[str, Tensor], kind: str = "sgd") -> dict[str, TrainJob]:
    """The clients' works of a round."""
    found = {}
    for client in range(4):
        draw = torch.Generator().manual_seed(client)
        x = torch.randn(20 + client, 4, generator=draw)
        y = torch.randint(0, 3, (20 + client,), generator=draw)
        flag = torch.tensor(200.0 if number >= SWITCHED else 1.0)
        how = Optimiser("adam" if kind == "adam" else "sgd", 0.05)
        phase = Phase("loss", MOVES, switched, how)
        rows, stream = Rows(x, torch.zeros(len(y), 0), y), Stream.of(client, number)
        found[str(client)] = TrainJob({**start, "flag": flag}, {}, (phase,), rows, 8, 1, stream)
    return found


def trained(
    do: Callable[[dict[str, TrainJob], Moment], dict[str, Any]], kind: str = "sgd"
) -> dict[str, Tensor]:
    """Rounds of averaging."""
    weights = {"weight0": torch.full((3, 4), 0.1), "bias0": torch.zeros(3)}
    for number in range(ROUNDS):
        done = do(works(number, weights, kind), Moment(0, number, ROUNDS))
        several = [one.weights for one in done.values()]
        weights = {n: torch.stack([w[n] for w in several]).mean(0) for n in MOVES}
    return weights


def by_loop(jobs: dict[str, TrainJob], moment: Moment) -> dict[str, Any]:
    return {id: job.run() for id, job in jobs.items()}


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("how", ["always", "sampled"])
def test_a_loss_that_becomes_wrong_in_round_4_is_caught(
    how: verify.Verify, kind: str, tmp_path: Path
) -> None:
    expected = trained(by_loop, kind)
    executor = Executor("stacked", tmp_path, verify=how, clock=Clock(1e-6))
    if how == "sampled":  # elapsed time allows for a check in every round
        executor.verifier.began = -1e6
    found = trained(executor.do, kind)
    assert max_relative_error(expected, found) < 1e-5
    (choice,) = choices(tmp_path).values()
    assert (choice.mode, choice.way) == ("loop", "batched")
    assert choice.refuted.startswith("round 4 of stage 1: the first steps of a member differ")
    again = Executor("stacked", tmp_path, verify="off")  # resumed, it stays with the loop
    assert max_relative_error(trained(by_loop, kind), trained(again.do, kind)) < 1e-5


def test_without_checks_the_same_loss_goes_wrong(tmp_path: Path) -> None:
    """So the test above could fail."""
    found = trained(Executor("stacked", tmp_path, verify="off").do)
    assert max_relative_error(trained(by_loop), found) > 1e-2
    (choice,) = choices(tmp_path).values()
    assert (choice.mode, choice.refuted) == ("stacked", "")


def test_later_runs_on_this_machine_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("atoll.compute.autotune.GAIN", 1e9)  # the stack is fast enough
    for how in ("always", "off"):
        found = trained(Executor("auto", verify=how).do)
        assert max_relative_error(trained(by_loop), found) < 1e-5


@pytest.mark.parametrize("mode", ["stacked", "captured"])
def test_checks_change_nothing_in_a_run_that_is_right(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SWITCHED", ROUNDS)
    results, checks = [], []
    for how in ("off", "always"):
        executor = Executor(mode, verify=how)
        results.append(trained(executor.do, "adam"))
        checks.append(sum(s.checks for s in executor.verifier._states.values()))
        assert all(c.mode != "loop" for c in executor.choices.values())
    assert all(torch.equal(results[0][n], results[1][n]) for n in MOVES)
    assert checks[0] == 0
    assert checks[1] >= ROUNDS


def test_captured_steps_that_go_wrong_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Captured._load

    def stale(self: Captured, jobs: list[TrainJob]) -> None:
        """From the fourth round on other weights come into the buffers; a proof is in double."""
        flag = jobs[0].weights["flag"]
        more = float(flag > 100 and flag.dtype == torch.float32)
        load(self, [replace(job, weights=moved(job.weights, more)) for job in jobs])

    def moved(weights: dict[str, Tensor], more: float) -> dict[str, Tensor]:
        return {**weights, "weight0": weights["weight0"] + more}

    monkeypatch.setattr(Captured, "_load", stale)
    executor = Executor("captured", tmp_path, verify="always")
    assert max_relative_error(trained(by_loop), trained(executor.do)) == 0
    assert not executor._captured
    assert any(c.refuted.startswith("round 4") for c in choices(tmp_path).values())


def hits(weights: Mapping[str, Tensor], rows: Rows) -> Tensor:
    logits = outputs(weights, rows.x, 1)[-1]
    mixed = logits + (weights["flag"] > 100) * 50 * (weights["weight0"].sum() - 1.2).tanh()
    return torch.where(torch.arange(3) == 0, mixed, logits).argmax(-1) == rows.y


def test_counts_that_go_wrong_are_caught(tmp_path: Path) -> None:
    weights = {"weight0": torch.full((3, 4), 0.1), "bias0": torch.tensor([0.0, 1.0, 0.0])}
    executor = Executor("stacked", tmp_path, verify="always")
    for number in range(ROUNDS):
        asked = {
            id: EvalJob({**job.weights, "flag": job.weights["flag"][None, None]}, job.rows, hits)
            for id, job in works(number, weights).items()
        }
        done = executor.do(asked, Moment(0, number, ROUNDS))
        assert all(torch.equal(job.run(), done[id]) for id, job in asked.items())
    (choice,) = choices(tmp_path).values()
    assert choice.refuted.startswith("round 4")


def test_what_is_checked_when() -> None:
    clock = Clock(0.0)
    verifier = Verifier("sampled", clock)
    rounds = []
    for stage in range(2):
        for number in range(300):
            moment = Moment(stage, number, 300)
            member = verifier.due("key", moment, 3)
            if member is not None:
                with verifier.checking("key", moment):
                    clock.now += 1.0  # a check takes a second
                rounds.append((stage, number, member))
                assert verifier.due("key", moment, 3) is None  # once a round
            clock.now += 1.0  # a round too
    assert [r[:2] for r in rounds[:2]] == [(0, 0), (0, 1)]
    assert (1, 0) in [r[:2] for r in rounds]
    assert [r[2] for r in rounds] == [n % 3 for n in range(len(rounds))]
    late = [r for r in rounds if r[:2] not in ((0, 0), (0, 1), (1, 0))]
    assert 1 <= len(late) <= 4  # 1 % of 600 seconds, less what came before
    assert Verifier("off").due("key", None, 3) is None
    assert Verifier("always").due("key", None, 3) == 0


def test_rounding_is_measured_in_the_proof_and_allowed_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = {"weight0": torch.full((3, 4), 0.1), "bias0": torch.zeros(3)}
    jobs = list(works(0, start).values())

    def rough(several: Sequence[TrainJob]) -> list[TrainResult]:
        """Equal in double precision; in single precision every step is off by a thousandth."""
        found = []
        for job in several:
            done, single = job.run(), job.weights["weight0"].dtype == torch.float32
            moved = {n: w + single * 1e-3 * (w - job.weights[n]) for n, w in done.weights.items()}
            found.append(replace(done, weights=moved))
        return found

    inexact = replace(TRAIN, candidates=lambda way: [Candidate("rough", rough)])
    verdict = proof.prove(inexact, jobs)
    assert verdict.way == "rough"
    assert verdict.rounding == pytest.approx(1e-3, rel=1e-2)

    def checked(off: float, rounding: float) -> str:
        done = jobs[0].run_steps(verify.STEPS)
        moved = {n: done.weights[n] + off * (done.weights[n] - start[n]) for n in MOVES}
        rows = torch.tensor(float(len(jobs[0].rows)))
        seen = Seen(moved, {n: rows * x for n, x in done.losses.items()})
        wrong = Verdict("", 1.0, "")
        return verify.disagreement(TRAIN, jobs[0], seen, rounding, lambda: wrong)

    assert not checked(5e-3, verdict.rounding)
    assert checked(5e-3, 0.0)
    assert checked(5e-2, verdict.rounding)
