"""Steps on public images: captured ones give what plain ones give."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.compute import captured, public_steps
from atoll.compute.executor import Executor
from atoll.compute.kinds import CAPTURED
from atoll.compute.kinds.captured import PUBLIC
from atoll.compute.proof import prove
from atoll.compute.public_steps import CapturedStep, capturable, stepped
from atoll.core.federation import Moment
from atoll.core.messages import Tensors
from atoll.core.record import read_events
from atoll.core.rng import Stream
from atoll.engines.local import local_engine
from atoll.jobs.public_step import PublicJob, PublicResult
from atoll.jobs.train import Optimiser
from atoll.learning.image_nets import build
from atoll.learning.models import skeleton
from atoll.learning.weights import into
from atoll.methods import fccl, fedmatch, fedmd
from atoll.runs.config import resolve
from atoll.runs.execute import execute

STEPS, ROWS, CLASSES = 6, 12, 3
LOSSES: dict[str, Callable[..., Tensor]] = {
    "fccl": partial(fccl.public_loss, strength=0.0051, off_diagonal=-1.0),
    "fedmd": partial(fedmd.public_loss, kind="l1", own=0.0),
    "rcfl": partial(fedmd.public_loss, kind="l1", own=0.3),
    "feddf": partial(fedmd.public_loss, kind="kl", own=0.0),
    "fedmatch": partial(fedmatch.public_loss, confidence=0.3, weight=0.5),
}


def images(step: int, device: str = "cpu") -> Tensor:
    draws = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 1, 8, 8, generator=draws).to(device)


def given(step: int, device: str = "cpu") -> Tensors:
    draws = torch.Generator().manual_seed(100 + step)
    target = torch.randn(ROWS, CLASSES, generator=draws)
    helpers, strong = torch.randn(2, ROWS, CLASSES, generator=draws), images(50 + step)
    named = {"target": target, "helpers": helpers, "strong": strong}
    return {name: tensor.to(device) for name, tensor in named.items()}


def first(name: str, loss: str, device: str = "cpu") -> PublicJob:
    model = build(name, (1, 8, 8), CLASSES, Stream.of(0, "model"))
    return PublicJob(
        skeleton(model, True),
        tuple(n for n, _ in model.named_parameters()),
        {n: w.to(device) for n, w in model.state_dict().items()},
        {},
        partial(images, device=device),
        (0, 0, 7),
        None,
        0,
        {},
        LOSSES[loss],
        Optimiser("adam", 0.01),
    )


def following(job: PublicJob, done: PublicResult, step: int) -> PublicJob:
    """The step that comes after what was done."""
    more = {"weights": done.weights, "moments": done.moments, "waiting": done.waiting}
    answer = step if step < STEPS else None
    told = given(step, str(next(iter(done.weights.values())).device))
    return replace(job, follow=step - 1, answer=answer, constants=told, **more)


def a_round(job: PublicJob, do: Callable[[PublicJob], PublicResult]) -> list[PublicResult]:
    found = [do(job)]
    for step in range(1, STEPS + 1):
        found.append(do(following(job, found[-1], step)))
    return found


def by(one: CapturedStep) -> Callable[[PublicJob], PublicResult]:
    return lambda job: stepped([one], [job])[0]


def assert_same(expected: list[PublicResult], found: list[PublicResult], atol: float = 0.0) -> None:
    close = partial(torch.testing.assert_close, atol=atol, rtol=atol)
    for plain, quick in zip(expected, found, strict=True):
        for name, weight in plain.weights.items():
            close(quick.weights[name], weight)
        for kind in ("followed", "loss", "logits"):
            one, other = getattr(plain, kind), getattr(quick, kind)
            assert (one is None) == (other is None)
            if one is not None:
                close(other, one)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["small-resnet", "cnn"])
def test_they_are_the_plain_ones_bit_for_bit_and_again_in_later_rounds(
    name: str, loss: str
) -> None:
    job = first(name, loss)
    one = CapturedStep(job)
    for _ in range(2):
        expected = a_round(job, lambda job: job.run())
        assert_same(expected, a_round(job, by(one)))
        job = replace(job, weights=expected[-1].weights, place=(0, 1, 8))


class Replay:
    """A graph that does its step when it is replayed, as a CUDA graph does; capturing does not."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


class Taped:
    """A lane as on a GPU, without one."""

    captures = True

    def __init__(self) -> None:
        self.graphs: list[Replay] = []
        self.opened = 0
        self.owner: CapturedStep | None = None

    def captured(self, step: Callable[[], None]) -> Replay:
        self.graphs.append(Replay(step))
        assert self.owner is not None
        assert self.owner.z is not None
        self.owner.z = self.owner.z.detach() * math.nan  # its outputs have no values yet
        return self.graphs[-1]

    def open(self) -> None:
        self.opened += 1

    def close(self) -> None:
        self.opened -= 1

    def on_stream(self) -> AbstractContextManager[None]:
        assert self.opened  # nothing is sent to a stream that does not wait for its inputs
        return nullcontext()


def test_once_captured_they_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    job, lane = first("small-resnet", "fedmatch"), Taped()
    lane.owner = one = CapturedStep(job, lane)  # type: ignore[arg-type]
    for _ in range(2):
        expected = a_round(job, lambda job: job.run())
        assert_same(expected, a_round(job, by(one)))
        job = replace(job, weights=expected[-1].weights, place=(0, 1, 8))
    assert len(lane.graphs) == 2  # one for each half, made once
    assert one.eager_steps == captured.EAGER
    assert lane.opened == 0


def test_dropout_and_statistics_move_once_for_a_batch_and_given_weights_stay() -> None:
    job = first("efficientnet", "fccl")
    before = {n: w.clone() for n, w in job.weights.items()}
    assert_same(a_round(job, lambda job: job.run()), a_round(job, by(CapturedStep(job))))
    assert all(torch.equal(w, job.weights[n]) for n, w in before.items())


def test_a_pass_that_was_lost_is_done_again() -> None:
    """A client that was rebuilt, a question that is asked twice, another way of doing it."""
    job = first("small-resnet", "fccl")
    expected, one = a_round(job, lambda job: job.run()), CapturedStep(job)
    do = by(one)
    do(job)
    found = [do(job)]  # asked twice: running statistics have moved once
    for step in range(1, STEPS + 1):
        forgetful = replace(following(job, found[-1], step), waiting=None)
        rebuilt = {n: w.clone() for n, w in forgetful.weights.items()}
        found.append((do, PublicJob.run)[step % 2](replace(forgetful, weights=rebuilt)))
    assert_same(expected, found)


def test_clients_side_by_side_do_not_disturb_each_other() -> None:
    jobs = [first(name, "fedmd") for name in ("small-resnet", "cnn", "cnn-plain")]
    made = [CapturedStep(job) for job in jobs]
    found = [stepped(made, jobs)]
    for step in range(1, STEPS + 1):
        asked = [following(job, done, step) for job, done in zip(jobs, found[-1], strict=True)]
        found.append(stepped(made, asked))
    for place, job in enumerate(jobs):
        assert_same(a_round(job, lambda job: job.run()), [several[place] for several in found])


def test_moments_that_are_kept_and_penalties_are_not_captured() -> None:
    job = first("cnn", "fedmd")
    assert capturable(job)
    kept = replace(job, fresh=False)
    for other in (kept, replace(job, penalty=lambda w: w["head.bias"].sum())):
        assert not capturable(other)
    assert_same([kept.run()], [Executor("captured").do({"a": kept})["a"]])


def test_what_comes_with_a_step_may_change_its_shape() -> None:
    """FedMatch has fewer helpers where clients have failed."""
    job, executor = first("cnn", "fedmatch"), Executor("captured")

    def do(job: PublicJob) -> PublicResult:
        if job.follow == 3:
            job = replace(job, constants={**job.constants, "helpers": job.constants["helpers"][:1]})
        found: PublicResult = executor.do({"a": job})["a"]
        return found

    def plain(job: PublicJob) -> PublicResult:
        if job.follow == 3:
            job = replace(job, constants={**job.constants, "helpers": job.constants["helpers"][:1]})
        return job.run()

    assert_same(a_round(job, plain), a_round(job, do))


def run(method: str, mode: str, folder: Path) -> list[Any]:
    values = {
        "rounds": 3,
        "data": {"name": "synthetic-images", "rows": 120},
        "public": {"name": "patterns", "rows": 130},
        "models": ["cnn", "small-resnet"],
        "method": {"name": method, "pretrain_epochs": 1, "epochs": 1, "batch": 32},
        "engine": {"mode": mode, "packing": False},
    }
    values["method"] |= {} if method == "fml" else {"public_batch": 32}  # type: ignore[operator]
    execute(resolve(values, "test"), folder, local_engine)
    return list(read_events(folder))


@pytest.mark.parametrize("method", ["fccl", "fedmd", "fedmatch", "fml"])
def test_whole_runs_are_the_same_and_buffers_are_made_once(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(method, "loop", tmp_path / "loop")
    made: list[str] = []
    for job, kind in [*CAPTURED.items()]:

        def counted(*given: Any, name: str = job.__name__, build: Any = kind.build) -> Any:
            made.append(name)
            return build(*given)

        monkeypatch.setitem(CAPTURED, job, replace(kind, build=counted))
    assert run(method, "captured", tmp_path / "captured") == plain
    phases = 2 if method in ("fccl", "fedmatch", "fml") else 1  # FedMD trains alone as in rounds
    assert made.count("TrainJob") == 2 * phases
    assert made.count("PublicJob") == (0 if method == "fml" else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", LOSSES)
def test_graphs_on_a_gpu_give_what_the_plain_steps_give_in_double_precision(loss: str) -> None:
    job = first("small-resnet", loss, "cuda")
    double = lambda t: t.double() if t.is_floating_point() else t  # noqa: E731
    job = replace(job, weights={n: double(w) for n, w in job.weights.items()})
    job = replace(job, images=lambda step: images(step, "cuda").double())
    one = CapturedStep(job)

    def doubled(do: Callable[[PublicJob], PublicResult]) -> Callable[[PublicJob], PublicResult]:
        return lambda job: do(
            replace(job, constants={n: double(t) for n, t in job.constants.items()})
        )

    for _ in range(2):
        expected = a_round(job, doubled(lambda job: job.run()))
        assert_same(expected, a_round(job, doubled(by(one))), 1e-6)
        job = replace(job, weights=expected[-1].weights, place=(0, 1, 8))
    assert len(one.graphs) == 2


@pytest.mark.parametrize("loss", LOSSES)
def test_captured_steps_are_proved(loss: str) -> None:
    job = first("small-resnet", loss)
    assert prove(PUBLIC, [following(job, job.run(), 1)]).way == "captured"


def test_buffers_that_keep_their_running_statistics_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The statistics of a network that is not trained yet are all alike: nothing would show."""
    job = first("small-resnet", "fccl")
    step = following(job, job.run(), 1)

    def partly(buffers: Tensors, values: Tensors) -> None:
        into(buffers, {n: v for n, v in values.items() if "running" not in n})

    monkeypatch.setattr(public_steps, "into", partly)
    begin = CapturedStep.__init__

    def fresh(self: CapturedStep, job: PublicJob, *lane: Any) -> None:
        begin(self, job, *lane)
        for name, buffer in self.weights.items():
            if "running" in name:
                buffer.detach().fill_(float("var" in name))

    monkeypatch.setattr(CapturedStep, "__init__", fresh)
    assert not prove(PUBLIC, [step]).holds


def test_a_step_that_is_not_proved_is_done_plainly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no other test reads the verdict
    monkeypatch.setattr(public_steps.CapturedStep, "_backward", lambda self: None)
    job, executor = first("cnn", "fedmd"), Executor("captured", tmp_path)
    expected = a_round(job, lambda job: job.run())
    assert_same(expected, a_round(job, lambda job: executor.do({"a": job})["a"]))
    (choice,) = executor.choices.values()
    assert (choice.work, choice.mode) == ("public step", "loop")


def test_steps_that_go_wrong_are_caught_and_done_plainly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job, executor = first("cnn", "fedmd"), Executor("captured", tmp_path, verify="always")
    expected = a_round(job, lambda job: job.run())

    def do(step: PublicJob) -> PublicResult:
        if step.follow == 3:
            monkeypatch.setattr(public_steps.CapturedStep, "_backward", lambda self: None)
        done: PublicResult = executor.do({"a": step}, Moment(0, step.follow or 0, STEPS))["a"]
        return done

    assert_same(expected, a_round(job, do))
    (choice,) = executor.choices.values()
    assert choice.mode == "loop"
    assert choice.refuted.startswith("round 4 of stage 1")
    assert not executor._captured
