"""Stacks give what their members give one by one."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.compute.compare import max_relative_error
from atoll.compute.kinds.train import TRAIN_STACKS
from atoll.compute.stacking import (
    Stack,
)
from atoll.compute.tallies import tally
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.identity import no_identity
from atoll.jobs.train import EvalJob, Optimiser, Phase, TrainJob, descend
from atoll.learning.losses import cross_entropy
from atoll.learning.models import linear, outputs

pytestmark = pytest.mark.numerics


def loss(weights: Mapping[str, Tensor], batch: Rows, *, depth: int) -> Tensor:
    return cross_entropy(outputs(weights, batch.all, depth)[-1], batch)


def right(weights: Mapping[str, Tensor], rows: Rows) -> Tensor:
    return (outputs(weights, rows.all, 2)[-1].argmax(-1) == rows.y).unsqueeze(-2)


def member(
    number: int, rows: int = 20, own: int = 3, how: Optimiser | None = None, steps: int = 0
) -> TrainJob:
    generator = torch.Generator().manual_seed(number)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 2

    weights = {
        "weight0": draw(5, 4 + own),
        "bias0": draw(5),
        "weight1": draw(3, 5),
        "bias1": draw(3),
    }
    data = Rows(draw(rows, 4), draw(rows, own), torch.randint(0, 3, (rows,), generator=generator))
    phase = Phase("loss", tuple(weights), partial(loss, depth=2), how or Optimiser("adam", 0.01))
    work = TrainJob(weights, {}, (phase,), data, 8, 2, Stream.of(number), frozenset({"weight0"}))
    if not steps:
        return work
    before = replace(work, rows=data.at(slice(0, 8)), epochs=steps).run()
    return replace(work, weights=before.weights, moments=before.moments)


def same(jobs: list[TrainJob]) -> None:
    """Equal to 1e-10, in the order in which the jobs were given, and again when loaded anew."""
    stack = Stack(jobs)
    for _ in range(2):
        for one, other in zip([job.run() for job in jobs], stack.run(jobs), strict=True):
            assert max_relative_error(one.weights, other.weights) < 1e-10
            assert one.losses["loss"] == pytest.approx(other.losses["loss"], abs=1e-12)
            assert one.moments.keys() == other.moments.keys()
            for name, moment in one.moments.items():
                torch.testing.assert_close(other.moments[name], moment, rtol=1e-9, atol=1e-12)


def test_members_with_other_numbers_of_rows_and_own_columns_stack() -> None:
    same(
        [member(0, rows=20), member(1, rows=7, own=2), member(2, rows=33, own=1), member(3, own=0)]
    )


def weighted(job: TrainJob, number: int) -> TrainJob:
    """The job with rows that count 1, 2, 3, ... times, beginning with another one in each."""
    share = 1.0 + (torch.arange(len(job.rows), dtype=torch.float64) + number) % 5
    return replace(job, rows=replace(job.rows, share=share))


@pytest.mark.parametrize("mapped", [False, True])
def test_members_whose_rows_have_weights_stack(mapped: bool) -> None:
    plain = [member(number, rows=rows, own=2) for number, rows in enumerate((20, 7, 33))]
    jobs = [weighted(job, number) for number, job in enumerate(plain)]
    assert jobs[0].key() != plain[0].key()
    stack = Stack(jobs, mapped=mapped)
    others = [weighted(job, number + 1) for number, job in enumerate(plain)]
    for round_jobs in (jobs, others):
        pairs = zip(round_jobs, plain, stack.run(round_jobs), strict=True)
        for job, unweighted, result in pairs:
            expected = job.run()
            assert max_relative_error(expected.weights, result.weights) < 1e-10
            assert expected.losses["loss"] == pytest.approx(result.losses["loss"], abs=1e-12)
            assert max_relative_error(unweighted.run().weights, result.weights) > 1e-6


def histories() -> list[TrainJob]:
    """Members with other rates, rows and counts of steps."""
    rates = (0.01, 0.1, 0.03, 0.03, 0.1)
    return [
        member(n, rows=20 - 3 * n, how=Optimiser("adam", rate), steps=n)
        for n, rate in enumerate(rates)
    ]


def test_members_with_other_rates_and_histories_stack() -> None:
    same(histories())


@pytest.mark.gpu
def test_a_stack_on_a_gpu_gives_the_same() -> None:
    """The kernel of Adam, its rates and counts by member, and a CUDA graph."""
    same([on_gpu(job) for job in histories()])


def on_gpu(job: TrainJob) -> TrainJob:
    """The same work, its tensors on the GPU; counts of steps stay on the CPU."""
    moments = {n: m if n.startswith("steps/") else m.cuda() for n, m in job.moments.items()}
    rows = Rows(job.rows.x.cuda(), job.rows.own.cuda(), job.rows.y.cuda())
    weights = {n: w.cuda() for n, w in job.weights.items()}
    return replace(job, weights=weights, moments=moments, rows=rows)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_stack_goes_on_with_what_it_gave_out_at_other_rates(kind: str) -> None:
    """Rates that part, meet again and are changed for all need no new stack."""
    jobs = [member(n, rows=20 - n % 2, how=Optimiser(kind, 0.01)) for n in range(4)]  # type: ignore[arg-type]
    stack, alone = Stack(jobs), jobs
    for number, cuts in enumerate(((1, 1, 1, 1), (1, 3, 1, 1), (3, 3, 3, 3), (9, 3, 3, 27))):
        jobs, alone = (
            [
                replace(job, phases=(at_rate(job.phases[0], 0.01 / cut),), stream=Stream.of(number))
                for job, cut in zip(some, cuts, strict=True)
            ]
            for some in (jobs, alone)
        )
        done, wanted = stack.run(jobs), [job.run() for job in alone]
        for one, other in zip(wanted, done, strict=True):
            assert max_relative_error(one.weights, other.weights) < 1e-10
        jobs, alone = (
            [
                replace(j, weights=w.weights, moments=w.moments)
                for j, w in zip(some, works, strict=True)
            ]
            for some, works in ((jobs, done), (alone, wanted))
        )


def at_rate(phase: Phase, rate: float) -> Phase:
    return replace(phase, optimiser=replace(phase.optimiser, rate=rate))


def test_a_change_of_the_rate_asks_for_no_other_stack() -> None:
    one = member(0)
    slower = replace(one, phases=(at_rate(one.phases[0], 0.001),))
    assert Stack([one]).fits([slower])
    assert not Stack([one]).fits([replace(one, epochs=3)])


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_many_members_of_different_histories_go_by_one_formula(kind: str) -> None:
    hows = [Optimiser(kind, 0.01 * (n + 1), decay=0.1) for n in range(20)]  # type: ignore[arg-type]
    same([member(n, how=how, steps=n % 4) for n, how in enumerate(hows)])


def alone(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """A loss as one writes it for one client: no members, no rows that count nothing."""
    logits = outputs(weights, batch.all, 2)[-1]
    return F.cross_entropy(logits, batch.y) + 0.1 * (logits - logits.mean()).pow(2).mean()


def test_a_loss_written_for_one_client_is_mapped_over_members_with_other_numbers_of_rows() -> None:
    jobs = []
    for number, rows in enumerate((20, 7, 33, 20, 24)):
        job = member(number, rows=rows)
        jobs.append(replace(job, phases=(replace(job.phases[0], loss=alone),)))
    stack = Stack(jobs, mapped=True)
    for _ in range(2):
        for one, other in zip([job.run() for job in jobs], stack.run(jobs), strict=True):
            assert max_relative_error(one.weights, other.weights) < 1e-10
            assert one.losses["loss"] == pytest.approx(other.losses["loss"], abs=1e-12)


def test_a_result_that_is_no_number_is_infinitely_far_from_one_that_is() -> None:
    done = member(0).run()
    lost = replace(done, weights={n: w * math.nan for n, w in done.weights.items()})
    assert max_relative_error(done.weights, lost.weights) == math.inf


def test_weight_decay_is_part_of_the_key() -> None:
    plain, decayed = member(0), member(0, how=Optimiser("adam", 0.01, decay=0.1))
    assert plain.key() == member(5, rows=9, own=1).key()
    assert plain.key() != decayed.key()
    same([decayed, member(1, how=Optimiser("adam", 0.01, decay=0.1))])


def test_a_loss_that_is_not_a_function_of_a_module_does_not_stack() -> None:
    (phase,) = member(0).phases
    closure = replace(phase, loss=lambda weights, batch: loss(weights, batch, depth=2))
    job = replace(member(0), phases=(closure,))
    assert job.key() is None
    assert "lambda" in no_identity(job.functions)


def test_work_of_very_many_batches_is_not_drawn_ahead() -> None:
    assert "too many" in TRAIN_STACKS.obstacle(replace(member(0), epochs=1_000_000))


def test_counts_of_a_stack_are_those_of_its_members() -> None:
    works = [member(0, rows=20), member(1, rows=7, own=2), member(2, rows=33)]
    jobs = [EvalJob(w.weights, w.rows, right, w.own) for w in works]
    assert [t.tolist() for t in tally(jobs)] == [job.run().tolist() for job in jobs]
    assert sum(sum(job.run().tolist()) for job in jobs) > 0


def test_a_gradient_that_lies_otherwise_in_memory_is_stepped_right() -> None:
    """torch's fused kernels do not look at strides: a transposed gradient must be laid out anew."""
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).T
    expected = weight.clone().requires_grad_()
    expected.grad = gradient.clone(memory_format=torch.contiguous_format)
    torch.optim.Adam([expected], lr=0.1).step()
    memory = ([torch.zeros(6, 4)], [torch.zeros(6, 4)], [torch.zeros(())])
    found = weight.clone()
    descend([found], [gradient], memory, Optimiser("adam", 0.1))
    torch.testing.assert_close(found, expected.detach())


def test_the_product_of_a_bank_has_the_gradients_of_its_members() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, plus = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 7, 4), (2, 5, 4), (2, 5), (2, 7, 5))
    )
    bank = linear(x, weight, bias, plus)
    single = torch.stack([F.linear(x[i], weight[i], bias[i]) + plus[i] for i in range(2)])
    torch.testing.assert_close(bank, single)
    slope = torch.randn(bank.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(bank, [x, weight, bias, plus], slope, retain_graph=True),
        torch.autograd.grad(single, [x, weight, bias, plus], slope),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
