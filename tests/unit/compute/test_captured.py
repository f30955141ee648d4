"""Captured steps give what the loop gives, batch norm and dropout included."""

from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch

from atoll.compute.captured import Captured, replicas, run_captured
from atoll.compute.compare import max_relative_error
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.train import Optimiser, Phase, TrainJob, step_key
from atoll.learning.distill import distillation_loss
from atoll.learning.image_nets import build
from atoll.learning.losses import plain
from atoll.learning.models import ModelOptions, network, skeleton

pytestmark = pytest.mark.numerics


def job(name: str, rows: int = 21, seed: int = 0, device: str = "cpu") -> TrainJob:
    """Three batches of 8 an epoch, the last of them smaller, towards one teacher."""
    model = build(name, (1, 8, 8), 3, Stream.of(seed, "model"))
    draws = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 1, 8, 8, generator=draws), torch.arange(rows) % 3
    data = Rows(*(t.to(device) for t in (x, torch.randn(rows, 3, generator=draws), y)))
    loss = partial(distillation_loss, network=skeleton(model, True), strengths=(0.5,))
    moves = tuple(n for n, _ in model.named_parameters())
    phase = Phase("loss", moves, loss, Optimiser("adam", 0.01))
    weights = {n: w.to(device) for n, w in model.state_dict().items()}
    return TrainJob(weights, {}, (phase,), data, 8, 3, Stream.of(seed, "order"))


def in_double(work: TrainJob) -> TrainJob:
    weights = {n: w.double() if w.is_floating_point() else w for n, w in work.weights.items()}
    rows = replace(work.rows, x=work.rows.x.double(), own=work.rows.own.double())
    return replace(work, weights=weights, rows=rows)


def same(one: TrainJob, other: Captured) -> float:
    expected, ((found,),) = one.run(), run_captured([other], [[one]])
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.moments.keys() == expected.moments.keys()
    assert int(found.moments["steps/loss"]) == int(expected.moments["steps/loss"])
    return max_relative_error(expected.weights, found.weights)


@pytest.mark.parametrize("name", ["small-resnet", "efficientnet", "cnn-plain"])
def test_they_are_the_loops_bit_for_bit_and_again_in_later_rounds(name: str) -> None:
    first = job(name)
    captured = Captured([first])
    assert same(first, captured) == 0.0
    after = first.run()
    later = replace(
        first, weights=after.weights, moments=after.moments, stream=Stream.of(1, "order")
    )
    later = replace(later, rows=replace(first.rows, own=first.rows.own + 1))  # another teacher
    assert same(later, captured) == 0.0
    assert int(later.run().moments["steps/loss"]) == 2 * 9


@pytest.mark.parametrize("count", [1, 3])
def test_rows_count_by_their_weights(count: int) -> None:
    works = [in_double(job("cnn-plain", 21, seed)) for seed in range(count)]
    shares = [1.0 + (torch.arange(21) + seed) % 4 for seed in range(count)]
    jobs = [
        replace(work, rows=replace(work.rows, share=share.double()))
        for work, share in zip(works, shares, strict=True)
    ]
    (results,) = run_captured([Captured(jobs)], [jobs])
    for work, one, result in zip(works, jobs, results, strict=True):
        expected = one.run()
        assert result.losses == pytest.approx(expected.losses, rel=1e-9)
        assert max_relative_error(expected.weights, result.weights) < 1e-9
        assert max_relative_error(work.run().weights, result.weights) > 1e-6


def test_running_statistics_move_and_the_given_weights_stay() -> None:
    work = job("small-resnet")
    before = {n: w.clone() for n, w in work.weights.items()}
    ((found,),) = run_captured([Captured([work])], [[work]])
    assert all(torch.equal(w, work.weights[n]) for n, w in before.items())
    moved = [n for n in before if "running" in n and not torch.equal(found.weights[n], before[n])]
    assert len(moved) == sum("running" in n for n in before)


def test_clients_side_by_side_do_not_disturb_each_other() -> None:
    works = [job("small-resnet", 21, 0), job("cnn", 30, 1), job("cnn", 30, 2)]
    found = run_captured([Captured([work]) for work in works], [[work] for work in works])
    for work, (one,) in zip(works, found, strict=True):
        assert max_relative_error(work.run().weights, one.weights) == 0.0


# The shift of a narrow layer of MobileNet is taken off by the next batch norm: its true gradient is
# 0, and Adam would follow the sign of a rounding error. So plain steps there.
@pytest.mark.parametrize(
    ("name", "kind"),
    [("small-resnet", "adam"), ("cnn-plain", "adam"), ("small-mobilenet", "sgd")],
)
def test_replicas_in_one_step_have_statistics_of_their_own(
    name: str, kind: Literal["adam", "sgd"]
) -> None:
    """Batch norm under stacking, against the loop, in double precision; two rounds."""
    works = [in_double(job(name, 21, seed)) for seed in range(3)]
    phases = (replace(works[0].phases[0], optimiser=Optimiser(kind, 0.01)),)
    works = [replace(work, phases=phases) for work in works]
    together = Captured(works)
    for _ in range(2):
        (found,) = run_captured([together], [works])
        for work, one in zip(works, found, strict=True):
            expected = work.run()
            assert one.losses == pytest.approx(expected.losses, rel=1e-9)
            for key, tensor in expected.weights.items():
                torch.testing.assert_close(one.weights[key], tensor, atol=1e-9, rtol=1e-9)
            assert one.moments.keys() == expected.moments.keys()
        works = [
            replace(w, weights=f.weights, moments=f.moments, stream=w.stream.child("next"))
            for w, f in zip(works, found, strict=True)
        ]
    if kind == "adam":
        assert int(found[0].moments["steps/loss"]) == 2 * 9


@pytest.mark.parametrize("count", [1, 2])
def test_captured_steps_merge_a_last_row_alone_as_the_loop_does(count: int) -> None:
    """17 rows in batches of 8 and 9; batch norm of one row has no spread."""
    works = [in_double(job("small-resnet", 17, seed)) for seed in range(count)]
    phases = (replace(works[0].phases[0], optimiser=Optimiser("sgd", 0.01)),)
    works = [replace(work, phases=phases) for work in works]
    assert works[0].batch_sizes == [8, 9]
    (results,) = run_captured([Captured(works)], [works])
    for work, result in zip(works, results, strict=True):
        expected = work.run()
        assert result.losses == pytest.approx(expected.losses, rel=1e-10)
        for name, tensor in expected.weights.items():
            torch.testing.assert_close(result.weights[name], tensor, atol=1e-10, rtol=1e-10)


def test_only_works_that_go_together_are_replicas() -> None:
    works = [job("cnn", 21, seed) for seed in range(2)]
    assert replicas(works)
    assert not replicas([works[0], replace(works[1], epochs=5)])
    assert not replicas([works[0], replace(works[1], moments=works[1].run().moments)])


def test_works_that_differ_in_more_than_values_are_not_alike() -> None:
    one = job("cnn")
    assert (
        step_key(one) == step_key(job("cnn", rows=22, seed=1)) == step_key(replace(one, epochs=9))
    )
    assert step_key(job("efficientnet")) != step_key(job("efficientnet", seed=1))  # other masks
    others = [replace(one, batch=4), job("cnn-deep")]
    phase = one.phases[0]
    others.append(replace(one, phases=(replace(phase, optimiser=Optimiser("adam", 0.1)),)))
    others.append(
        replace(one, phases=(replace(phase, loss=partial(phase.loss, truth=2.0)),))  # type: ignore[call-arg]
    )
    for other in others:
        assert step_key(one) != step_key(other)


def test_a_loss_that_cannot_be_told_from_others_is_not_captured() -> None:
    one = job("cnn")
    for loss in (lambda w, b: w["head.bias"].sum(), partial(plain, [])):  # type: ignore[arg-type]
        assert step_key(replace(one, phases=(replace(one.phases[0], loss=loss),))) is None


@pytest.mark.gpu
def test_graphs_on_a_gpu_give_what_the_loop_gives_in_double_precision() -> None:
    work = replace(in_double(job("resnet10", 64, device="cuda")), epochs=6)
    captured = Captured([work])
    for _ in range(2):
        assert same(work, captured) < 1e-8
    assert set(captured.graphs) == {8}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["efficientnet", "mobilenet"])
def test_graphs_on_a_gpu_learn_what_the_loop_learns_where_rounding_errors_grow(name: str) -> None:
    """Losses, and what the networks say in the end, after 16 steps.

    Not the weights: those before a batch norm may have a true gradient of 0, and Adam follows the
    sign of a rounding error there, which changes nothing that the network says. Not more steps: a
    disturbance of 1e-15 in the first weights changes the loss by a percent in 48.
    """
    work = replace(in_double(job(name, 64, device="cuda")), epochs=2)
    captured, network = Captured([work]), skeleton(build(name, (1, 8, 8), 3, Stream.of(0)), False)
    for _ in range(2):
        expected, ((found,),) = work.run(), run_captured([captured], [[work]])
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        logits = [network(one.weights, work.rows.x) for one in (expected, found)]
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert set(captured.graphs) == {8}


@pytest.mark.parametrize("layout", ["plain", "channels-last"])
def test_layout_changes_nothing_and_bfloat16_little(layout: str) -> None:
    x = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    said = {}
    for precision in ("float32", "bfloat16"):
        options = ModelOptions("cnn", precision=precision, layout=layout)  # type: ignore[arg-type]
        model = network((3, 32, 32), 10, options, Stream.of(0))
        said[precision] = skeleton(model, True)(dict(model.state_dict()), x)
    usual = network((3, 32, 32), 10, ModelOptions("cnn"), Stream.of(0))(x)
    torch.testing.assert_close(said["float32"], usual)
    assert said["bfloat16"].dtype == torch.float32
    assert not torch.equal(said["bfloat16"], usual)
    torch.testing.assert_close(said["bfloat16"], usual, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["cnn", "small-resnet"])
def test_networks_in_a_stack_may_have_channels_last(name: str, channels: int) -> None:
    shape = (channels, 8, 8)
    options = ModelOptions(name, layout="channels-last")
    models = [network(shape, 3, options, Stream.of(seed)) for seed in (0, 1)]
    weights = {n: torch.stack([m.state_dict()[n] for m in models]) for n in models[0].state_dict()}
    x = torch.randn(2, 5, *shape, generator=torch.Generator().manual_seed(0))
    alone = skeleton(models[0], False)
    expected = torch.stack([alone(m.state_dict(), part) for m, part in zip(models, x, strict=True)])
    torch.testing.assert_close(torch.vmap(alone)(weights, x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone(weights, x), expected, rtol=1e-4, atol=1e-5)


def test_channels_last_is_the_memory_format_of_that_name() -> None:
    seen: list[tuple[int, ...]] = []
    model = network((3, 8, 8), 3, ModelOptions("cnn", layout="channels-last"), Stream.of(0))
    made = skeleton(model, False)
    made.model.register_forward_pre_hook(lambda layer, given: seen.append(given[0].stride()))
    x = torch.randn(5, 3, 8, 8)
    made(model.state_dict(), x)
    assert seen == [x.contiguous(memory_format=torch.channels_last).stride()]


def test_precisions_and_layouts_are_told_apart() -> None:
    made = [
        skeleton(network((3, 32, 32), 10, ModelOptions("cnn", **more), Stream.of(0)), True)  # type: ignore[arg-type]
        for more in ({}, {"precision": "bfloat16"}, {"layout": "channels-last"})
    ]
    assert len(set(made)) == 3
