"""With engine.deterministic no clock has a say, and methods begin with the same bits."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from atoll.compute import autotune, deterministic
from atoll.compute.choice_files import choices
from atoll.compute.executor import Executor
from atoll.compute.kinds.captured import CAPTURED_TRAIN
from atoll.compute.kinds.train import TRAIN
from atoll.compute.proof import Verdict
from atoll.core.errors import UserError
from atoll.core.record import Score
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.engines.local import LocalEngine, local_engine
from atoll.jobs.train import Optimiser, Phase, TrainJob, TrainResult
from atoll.kernels import batched_layers
from atoll.kernels.batched_layers import Sizes
from atoll.learning.distill import distillation_loss
from atoll.learning.image_nets import build
from atoll.learning.models import skeleton
from atoll.runs.config import RunConfig, read, resolve
from atoll.runs.execute import execute
from atoll.runs.result import Run
from atoll.runs.sweep import Point, sweep

METHODS = ("fccl", "fedmd", "fml", "fedmatch")
SHAPE, CLASSES = (1, 8, 8), 3
Arrays = dict[str, np.ndarray[Any, Any]]


class Clock:
    """A stopwatch whose seconds get longer, or shorter, from one reading to the next."""

    def __init__(self, factor: float) -> None:
        self.factor, self.step, self.now, self.readings = factor, 1.0, 0.0, 0

    def __call__(self) -> float:
        self.step *= self.factor
        self.now += self.step
        self.readings += 1
        return self.now


LONGER, SHORTER = 2.0, 0.5  # what is timed last looks slow, or fast


@contextmanager
def fresh_process(clock: Clock, cache: Path) -> Iterator[None]:
    """Run as a new process would: an empty cache and this clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(time, "perf_counter", clock)
        yield


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three sites, and public ones."""
    folder, draws = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(3):
        y = np.arange(60) % CLASSES
        x = draws.integers(0, 90, (60, 8, 8)) + 50 * y[:, None, None] + 10 * number
        np.savez(folder / f"site{number}.npz", x=x.astype(np.uint8), y=y)
    np.savez(folder / "public.npz", x=draws.integers(0, 255, (40, 8, 8)).astype(np.uint8))
    return folder


def config(images: Path, method: str, deterministic: bool, *, seed: int = 0) -> RunConfig:
    """One round of a method on these images; the same small network at all sites."""
    own = [str(images / f"site{number}.npz") for number in range(3)]
    public = {} if method == "fml" else {"public_batch": 20}
    values = {
        "rounds": 1,
        "seed": seed,
        "data": {"images": own, "size": 8, "channels": 1},
        "public": {"images": str(images / "public.npz"), "rows": 40},
        "models": ["cnn"] * 3,
        "method": {"name": method, "batch": 8, "epochs": 1, "pretrain_epochs": 3, **public},
        "engine": {"deterministic": deterministic, "device": "cpu"},
        "looks": False,
    }
    return resolve(values, "test")


def solo(folder: Path) -> tuple[Arrays, list[Score]]:
    """The weights before any exchange, and how they do."""
    tensors = load_file(folder / "checkpoint.safetensors")
    scores = [e for e in Run(folder).events if isinstance(e, Score) and e.variant == "solo"]
    return (
        {name: tensor for name, tensor in tensors.items() if "/solo/" in name},
        scores,
    )


def equal(one: Arrays, other: Arrays) -> bool:
    assert one
    assert one.keys() == other.keys()
    return all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_without_it_the_stopwatch_decides_the_last_bits(images: Path, tmp_path: Path) -> None:
    weights = []
    for factor in (LONGER, SHORTER):
        with fresh_process(Clock(factor), tmp_path / f"cache {factor}"):
            execute(config(images, "fml", False), tmp_path / f"run {factor}", local_engine)
        weights.append(solo(tmp_path / f"run {factor}")[0])
    assert not equal(*weights)


def test_methods_begin_with_the_same_bits_whatever_the_clock_says(
    images: Path, tmp_path: Path
) -> None:
    found, clocks = [], [Clock(factor) for factor in (LONGER, SHORTER, SHORTER, LONGER)]
    for method, clock in zip(METHODS, clocks, strict=True):
        with fresh_process(clock, tmp_path / f"cache {method}"):
            execute(config(images, method, True), tmp_path / method, local_engine)
        found.append(solo(tmp_path / method))
        reasons = [choice.reason for choice in choices(tmp_path / method).values()]
        assert deterministic.EQUAL in reasons  # something was stacked, and by the rule
    for weights, scores in found[1:]:
        assert equal(found[0][0], weights)
        assert scores == found[0][1]


def test_a_whole_run_is_the_same_whatever_the_clock_says(images: Path, tmp_path: Path) -> None:
    for factor in (LONGER, SHORTER):
        with fresh_process(Clock(factor), tmp_path / f"cache {factor}"):
            execute(config(images, "fedmd", True), tmp_path / f"run {factor}", local_engine)
    one, other = (tmp_path / f"run {factor}" / "events.jsonl" for factor in (LONGER, SHORTER))
    assert one.read_bytes() == other.read_bytes()


def test_common_work_is_the_same_in_a_sweep_and_alone(images: Path, tmp_path: Path) -> None:
    with fresh_process(Clock(LONGER), tmp_path / "cache"):
        execute(config(images, "fml", True), tmp_path / "alone", local_engine)
        points = [
            Point(
                {"seed": seed}, config(images, "fml", True, seed=seed), tmp_path / f"point-{seed}"
            )
            for seed in (0, 1)
        ]
        sweep(points, tmp_path / "sweep", LocalEngine)
    assert equal(solo(tmp_path / "alone")[0], solo(tmp_path / "point-0")[0])
    assert not equal(solo(tmp_path / "alone")[0], solo(tmp_path / "point-1")[0])


def test_the_common_work_of_all_methods_is_one_and_the_same(images: Path, tmp_path: Path) -> None:
    for method in METHODS:
        given = config(images, method, True)
        keep = {**given.engine, "keep": str(tmp_path / "common")}
        execute(replace(given, engine=keep), tmp_path / method, local_engine)
    assert len([*(tmp_path / "common").iterdir()]) == 3  # by a hash of its content: one a site


def pretraining(number: int) -> TrainJob:
    model = build("cnn", SHAPE, CLASSES, Stream.of(number))
    draws = torch.Generator().manual_seed(number)
    x, y = torch.randn(20, *SHAPE, generator=draws), torch.arange(20) % CLASSES
    loss = partial(distillation_loss, network=skeleton(model, True))
    moves = tuple(name for name, _ in model.named_parameters())
    phase = Phase("loss", moves, loss, Optimiser("adam", 0.01))
    rows, stream = Rows(x, torch.zeros(20, 0), y), Stream.of(number, "prepare")
    weights = dict(model.state_dict())
    return TrainJob(weights, {}, (phase,), rows, 8, 2, stream, common=True)


def same(one: TrainResult, other: TrainResult) -> bool:
    return all(torch.equal(w, other.weights[name]) for name, w in one.weights.items())


def test_common_work_does_not_depend_on_who_else_works() -> None:
    jobs = {f"site-{number}": pretraining(number) for number in range(3)}
    together = Executor("auto", deterministic=True).do(jobs)
    for id, job in jobs.items():
        assert same(Executor("auto", deterministic=True).do({id: job})[id], together[id])
        assert same(job.run(), together[id])


def on_gpu(job: TrainJob) -> TrainJob:
    rows = Rows(job.rows.x.cuda(), job.rows.own.cuda(), job.rows.y.cuda())
    return replace(job, weights={n: w.cuda() for n, w in job.weights.items()}, rows=rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_common_work_does_not_depend_on_who_else_works_either() -> None:
    jobs = {f"site-{number}": on_gpu(pretraining(number)) for number in range(3)}
    others = {id: replace(job, common=False) for id, job in jobs.items()}
    with deterministic.deterministic_torch(True):
        together = Executor("auto", deterministic=True).do(jobs)
        for id, job in jobs.items():
            executor = Executor("auto", deterministic=True)
            executor.do(others)
            assert same(executor.do({id: job})[id], together[id])


def test_other_work_is_still_done_together(tmp_path: Path) -> None:
    jobs = {f"site-{n}": replace(pretraining(n), common=False) for n in range(3)}
    clock = Clock(LONGER)
    with fresh_process(clock, tmp_path / "cache"):
        Executor("auto", tmp_path, deterministic=True).do(jobs)
    assert [choice.mode for choice in choices(tmp_path).values() if choice.members == 3] == [
        "stacked"
    ]
    assert not clock.readings


def test_what_was_kept_without_it_is_not_used(tmp_path: Path) -> None:
    job = pretraining(0)
    Executor("auto", keep=tmp_path / "common").do({"site-0": job})
    Executor("auto", keep=tmp_path / "common", deterministic=True).do({"site-0": job})
    assert len([*(tmp_path / "common").iterdir()]) == 2


def convolution(groups: int = 1) -> tuple[torch.Tensor, torch.Tensor, Sizes]:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 4, 6, 6, generator=draws)
    weight = torch.randn(3, 8, 4 // groups, 3, 3, generator=draws)
    return x, weight, Sizes((1, 1), (1, 1), (1, 1), groups)


def fixed_way(groups: int = 1) -> batched_layers.Way:
    """The way that is chosen for such a convolution; its result is what comes out."""
    x, weight, sizes = convolution(groups)
    ways: dict[str, batched_layers.Way] = {}
    with batched_layers.fixed_ways(ways):
        result = batched_layers.convolve(x, weight, None, sizes)
    (way,) = ways.values()
    assert torch.equal(result, batched_layers.WAYS[way](x, weight, None, sizes))
    return way


def test_convolutions_follow_the_order_of_their_device_and_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timings = batched_layers.Timings()
    with batched_layers.timed_ways(timings):
        assert fixed_way() == "grouped"
    monkeypatch.setitem(batched_layers.PREFERRED, "cpu", batched_layers.PREFERRED["cuda"])
    with batched_layers.timed_ways(timings):
        assert fixed_way() == "near"  # `direct` is no other way without a GPU
        assert fixed_way(groups=2) == "grouped"
    assert not timings.by_shape


def test_a_preferred_convolution_that_is_wrong_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = lambda *given: batched_layers.near(*given) * 1.01  # noqa: E731
    monkeypatch.setattr(batched_layers, "WAYS", {**batched_layers.WAYS, "near": wrong})
    monkeypatch.setitem(batched_layers.PREFERRED, "cpu", batched_layers.PREFERRED["cuda"])
    assert fixed_way() == "unfolded"


def settings() -> tuple[object, ...]:
    cudnn = torch.backends.cudnn
    memory = torch._C._get_deterministic_fill_uninitialized_memory()
    workspace = os.environ.get(deterministic.WORKSPACE)
    mode = torch.get_deterministic_debug_mode()
    return mode, cudnn.deterministic, cudnn.benchmark, memory, workspace


def _fail_with(found: tuple[object, ...], expected: tuple[object, ...]) -> None:
    assert found == expected
    raise ZeroDivisionError


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_settings_of_torch_are_restored_after_an_error(
    workspace: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(deterministic.WORKSPACE, raising=False)
    if workspace:
        monkeypatch.setenv(deterministic.WORKSPACE, workspace)
    before = settings()
    with pytest.raises(ZeroDivisionError), deterministic.deterministic_torch(True):
        _fail_with(settings(), (1, True, False, False, workspace or ":4096:8"))
    assert settings() == before
    with deterministic.deterministic_torch(False):
        assert settings() == before


def test_cudnn_may_not_time_its_kernels_then() -> None:
    values = {"method": "fedavg", "engine": {"deterministic": True, "tune": True}}
    with pytest.raises(UserError, match=r"engine\.tune chooses kernels by timing"):
        resolve(values, "test")


def test_split_networks_are_not_timed_either(tmp_path: Path) -> None:
    given = resolve({**read("demo-vertical"), "rounds": 1}, "test")
    given = replace(given, engine={**given.engine, "deterministic": True, "device": "cpu"})
    clock = Clock(LONGER)
    with fresh_process(clock, tmp_path / "cache"):
        execute(given, tmp_path / "run", local_engine)
    fixed = [c for c in choices(tmp_path / "run").values() if c.reason == deterministic.EQUAL]
    assert fixed
    for choice in fixed:
        assert (choice.mode, choice.way) == ("stacked", "grouped")
        assert 0 <= choice.difference <= choice.tolerance
    assert not any(
        choice.reason.startswith("the fastest") for choice in choices(tmp_path / "run").values()
    )


def test_what_differs_is_done_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [pretraining(0), pretraining(1)]
    tune = partial(autotune.tune, deterministic.FIXED, CAPTURED_TRAIN, "work")
    assert [tune(some).mode for some in (jobs[:1], jobs)] == ["captured", "stacked"]
    assert {tune(some).reason for some in (jobs[:1], jobs)} == {deterministic.EQUAL}
    refused = Verdict("", 2.0, "the result differs")
    monkeypatch.setattr(autotune, "prove", lambda kind, jobs, way: refused)
    for choice in (tune(jobs[:1]), tune(jobs)):
        assert (choice.mode, choice.reason) == ("loop", "the result differs")


def mixing(weights: Mapping[str, torch.Tensor], batch: Rows) -> torch.Tensor:
    """A loss that reads a number of the whole stack: right for one member, wrong for many."""
    away = batch.x @ weights["w"].mT - float(weights["w"].detach().mean())
    return away.pow(2).mean((-1, -2))


def test_a_stack_that_is_not_proved_is_refused() -> None:
    phase = Phase("loss", ("w",), mixing, Optimiser("adam", 0.1))
    jobs = [
        TrainJob({"w": torch.full((2, 3), 1.0 + n)}, {}, (phase,), rows, 4, 1, Stream.of(n))
        for n, rows in enumerate([Rows(torch.rand(8, 3), torch.zeros(8, 0), torch.zeros(8))] * 2)
    ]
    choice = autotune.tune(deterministic.FIXED, TRAIN, "work", jobs)
    assert choice.mode == "loop"
    assert "differs" in choice.reason
