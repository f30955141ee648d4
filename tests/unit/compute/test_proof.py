"""Losses that are right for one client and wrong for many, and vanish when a run begins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.compute import proof
from atoll.compute.captured import Captured
from atoll.compute.choice_files import choices
from atoll.compute.compare import max_relative_error
from atoll.compute.executor import Executor, Mode
from atoll.compute.kinds.captured import CAPTURED_TRAIN
from atoll.compute.kinds.evaluate import TALLY
from atoll.compute.kinds.train import TRAIN, exact_member
from atoll.compute.perturb import DRAWS
from atoll.compute.proof import Verdict, prove
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.train import EvalJob, Optimiser, Phase, TrainJob
from atoll.learning.losses import cross_entropy
from atoll.learning.models import outputs

MOVES = ("weight0", "bias0")


def prove_stack(jobs: Sequence[TrainJob]) -> Verdict:
    return prove(TRAIN, jobs)


def plain(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    return cross_entropy(outputs(weights, batch.x, 1)[-1], batch)


def scaffold(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """Control variates as one client writes them: the sum runs over all members of a stack."""
    shifts = (weights[name] * weights[f"shift/{name}"] for name in MOVES)
    return plain(weights, batch) + torch.stack([shift.sum() for shift in shifts]).sum()


def anchored(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """FedProx as one client writes it."""
    apart = [((weights[n] - weights[f"anchor/{n}"]) ** 2).sum() for n in MOVES]
    return plain(weights, batch) + 0.5 * torch.stack(apart).sum()


def elastic(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """EWC as one client writes it."""
    apart = [
        (weights[f"importance/{n}"] * (weights[n] - weights[f"anchor/{n}"]) ** 2).sum()
        for n in MOVES
    ]
    return plain(weights, batch) + 5.0 * torch.stack(apart).sum()


def rooted(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """A loss that bears no negative importance: the proof must not give it one."""
    return plain(weights, batch) + weights["importance/bias0"].sqrt().sum(-1)


def impossible(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """Finite at the start alone."""
    return (
        plain(weights, batch) + torch.where(weights["importance/bias0"] == 0, 0.0, torch.inf).sum()
    )


def work(
    number: int, loss: Callable[..., Tensor], kind: str = "sgd", later: float = 0.0
) -> TrainJob:
    """A client's work; `later`: how far constants are from what they are in the first round."""
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(20 + number, 4, generator=draw)
    y = torch.randint(0, 3, (20 + number,), generator=draw)
    weights = {"weight0": torch.full((3, 4), 0.1), "bias0": torch.zeros(3)}
    constants = {f"anchor/{n}": w + later * _noise(w, draw) for n, w in weights.items()}
    for name in ("shift", "importance"):
        constants |= {f"{name}/{n}": later * _noise(w, draw) for n, w in weights.items()}
    how = Optimiser("adam" if kind == "adam" else "sgd", 0.1)
    phases = (Phase("loss", MOVES, loss, how),)
    rows = Rows(x, torch.zeros(len(y), 0), y)
    return TrainJob({**weights, **constants}, {}, phases, rows, 8, 2, Stream.of(number))


def _noise(like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=draw)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("loss", [scaffold, anchored, elastic])
def test_a_term_that_vanishes_in_the_first_round_cannot_hide_a_wrong_stack(
    loss: Callable[..., Tensor], kind: str, tmp_path: Path
) -> None:
    """Before values were perturbed, `batched` was chosen with a difference of 1e-16."""
    modes: tuple[Mode, ...] = ("auto", "stacked")
    for mode in modes:
        folder = tmp_path / mode
        folder.mkdir()
        executor = Executor(mode, folder)
        executor.do({str(n): work(n, loss, kind) for n in range(4)})
        (choice,) = choices(folder).values()
        assert choice.way != "batched"
        later = {str(n): work(n, loss, kind, later=1.0) for n in range(4)}
        done = executor.do(later)
        for id, job in later.items():
            assert max_relative_error(job.run().weights, done[id].weights) < 1e-5


def gated(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """A wrong term that is there for a positive strength alone."""
    return plain(weights, batch) + weights["strength"].clamp(min=0) * weights["weight0"].sum()


def branched(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """A branch for one client, which one member of a stack takes for all."""
    factor = 2.0 if (weights["strength"] > 0).any() else 1.0
    return factor * plain(weights, batch)


@pytest.mark.parametrize("loss", [gated, branched])
@pytest.mark.parametrize("strengths", [(0.0, 0.0), (0.5, 0.5), (-0.5, -0.5), (0.5, -0.5)])
@pytest.mark.parametrize("seed", range(2))
def test_a_term_behind_a_sign_is_there_in_some_members_of_a_proof(
    loss: Callable[..., Tensor], strengths: tuple[float, float], seed: int
) -> None:
    jobs = [work(n + 2 * seed, loss) for n in range(2)]
    given = [
        replace(job, weights={**job.weights, "strength": torch.tensor(strength)})
        for job, strength in zip(jobs, strengths, strict=True)
    ]
    assert prove_stack(given).way != "batched"


def farthest(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """All entries are equally far at the start: torch.vmap has another gradient of that maximum."""
    return plain(weights, batch) + (weights["weight0"] - weights["anchor/weight0"]).max()


def test_a_way_must_be_right_for_the_values_that_there_are_too() -> None:
    jobs = [work(n, farthest) for n in range(3)]
    assert prove_stack(jobs).way == ""
    assert prove_stack([work(n, farthest, later=1.0) for n in range(3)]).way == "mapped"


def with_padding(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """The mean over all rows of a batch, those that pad it included."""
    logits = outputs(weights, batch.x, 1)[-1]
    return -logits.log_softmax(-1).gather(-1, batch.y.unsqueeze(-1)).squeeze(-1).mean(-1)


@pytest.mark.parametrize("rows", [1, 2, 5, 20])
@pytest.mark.parametrize("batch", [2, 3, 8])
def test_a_mean_that_counts_padding_is_not_stacked(rows: int, batch: int) -> None:
    """Whatever the order of rows is, and though clients may have one row alone."""
    for seed in range(4):
        jobs = [work(2 * seed + n, with_padding) for n in range(2)]
        short = [replace(job, rows=job.rows.at(slice(0, rows)), batch=batch) for job in jobs]
        assert prove_stack(short).way == "mapped"


def test_a_constant_that_must_not_be_negative_stays_so() -> None:
    assert prove_stack([work(n, rooted) for n in range(4)]).way == "batched"


def test_a_loss_that_is_finite_at_the_start_alone_is_not_stacked(tmp_path: Path) -> None:
    executor, asked = Executor("stacked", tmp_path), {str(n): work(n, impossible) for n in range(3)}
    done = executor.do(asked)
    (choice,) = choices(tmp_path).values()
    assert choice.mode == "loop"
    assert "perturbed values give numbers that are not finite" in choice.reason
    assert all(
        max_relative_error(job.run().weights, done[id].weights) == 0 for id, job in asked.items()
    )


def test_moments_variances_and_whole_numbers_stay_what_they_must_be() -> None:
    job = work(0, plain, "adam")
    job = replace(job, weights={**job.weights, "count": torch.tensor(3), "var": torch.ones(2)})
    exact = exact_member(job, 0, DRAWS[0])
    moments = exact.moments
    assert moments.keys() == {f"{k}/{n}" for k in ("first", "second") for n in MOVES} | {
        "steps/loss"
    }
    assert all(bool((m != 0).all()) for m in moments.values())
    assert all(bool((m > 0).all()) for n, m in moments.items() if n.startswith("second/"))
    assert int(exact.weights["count"]) == 3
    assert bool((exact.weights["var"] > 0).all())
    assert {t.dtype for t in exact.weights.values()} == {torch.float64, torch.int64}
    assert bool((exact.weights["shift/bias0"] != 0).all())
    other = exact_member(job, 1, DRAWS[0])
    assert not torch.equal(exact.weights["var"], other.weights["var"])


def correct(weights: Mapping[str, Tensor], rows: Rows) -> Tensor:
    return outputs(weights, rows.x, 1)[-1].argmax(-1) == rows.y


def shared_count(weights: Mapping[str, Tensor], rows: Rows) -> Tensor:
    """Right for one client, and for many as long as no shift is there."""
    logits = outputs(weights, rows.x, 1)[-1]
    return (logits + weights["shift/bias0"].sum() * torch.eye(3)[0]).argmax(-1) == rows.y


@pytest.mark.parametrize(("function", "holds"), [(correct, True), (shared_count, False)])
def test_counts_are_proved(function: Callable[..., Tensor], holds: bool, tmp_path: Path) -> None:
    tallies = {
        str(n): EvalJob(job.weights, job.rows, function)
        for n, job in ((n, work(n, plain)) for n in range(4))
    }
    assert prove(TALLY, list(tallies.values())).holds is holds
    executor = Executor("stacked", tmp_path)
    done = executor.do(tallies)
    (choice,) = choices(tmp_path).values()
    assert choice.mode == ("stacked" if holds else "loop")
    assert all(torch.equal(job.run(), done[id]) for id, job in tallies.items())


class Forgetful(Captured):
    """Buffers that are not filled with moments: nothing shows while these are zero."""

    def _load(self, jobs: Sequence[TrainJob]) -> None:
        super()._load([replace(job, moments={}) for job in jobs])


@pytest.mark.parametrize("count", [1, 3])
def test_captured_steps_are_proved_with_moments(
    count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs = [replace(work(0, plain, "adam"), stream=Stream.of(n)) for n in range(count)]
    assert prove(CAPTURED_TRAIN, jobs).holds
    monkeypatch.setattr("atoll.compute.kinds.captured.Captured", Forgetful)
    assert not prove(CAPTURED_TRAIN, jobs).holds
    executor = Executor("captured", tmp_path)
    executor.do({"a": jobs[0]})
    assert not executor._captured  # asked for, and not used
    (choice,) = choices(tmp_path).values()
    assert (choice.mode, choice.tolerance) == ("loop", proof.TOLERANCE)
