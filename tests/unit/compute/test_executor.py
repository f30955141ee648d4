"""The executor proves the fast path against the plain one and records its choice."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.compute import shared_training
from atoll.compute.choice_files import choices
from atoll.compute.compare import max_relative_error
from atoll.compute.executor import Executor
from atoll.compute.kinds import STACKED
from atoll.compute.kinds.train import TRAIN_STACKS
from atoll.compute.stacking import Stack
from atoll.core.errors import UserError
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.train import Optimiser, Phase, TrainJob, TrainResult
from atoll.kernels import batched_layers
from atoll.learning import image_nets
from atoll.learning.losses import cross_entropy, plain
from atoll.learning.models import outputs, skeleton


def honest(weights: Mapping[str, Tensor], batch: Rows, *, depth: int) -> Tensor:
    return cross_entropy(outputs(weights, batch.x, depth)[-1], batch)


def mixing(weights: Mapping[str, Tensor], batch: Rows, *, depth: int) -> Tensor:
    """A loss that mixes the members of a stack: right for one, wrong for many."""
    logits = outputs(weights, batch.x, depth)[-1]
    return (logits - logits.mean()).pow(2).mean((-1, -2))


def hidden(weights: Mapping[str, Tensor], batch: Rows, *, depth: int) -> Tensor:
    """The same, with a number that torch.func cannot follow: nothing but the loop does it right."""
    logits = outputs(weights, batch.x, depth)[-1]
    return (logits - float(logits.detach().mean())).pow(2).mean((-1, -2))


def jobs(loss: Callable[..., Tensor], count: int = 4) -> dict[str, TrainJob]:
    found = {}
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        x, y = (
            torch.randn(24, 4, generator=generator),
            torch.randint(0, 3, (24,), generator=generator),
        )
        weights = {"weight0": torch.randn(3, 4, generator=generator), "bias0": torch.zeros(3)}
        phase = Phase("loss", tuple(weights), partial(loss, depth=1), Optimiser("adam", 0.1))
        rows = Rows(x, torch.zeros(24, 0), y)
        found[f"site-{number}"] = TrainJob(weights, {}, (phase,), rows, 8, 1, Stream.of(number))
    return found


def test_a_stack_that_differs_is_refused_with_a_reason_and_the_loop_is_used(tmp_path: Path) -> None:
    executor, asked = Executor("auto", tmp_path), jobs(hidden)
    done = executor.do(asked)
    (choice,) = choices(tmp_path).values()
    assert choice.mode == "loop"
    assert "batched: the result differs" in choice.reason
    assert "mapped: RuntimeError" in choice.reason
    assert choice.difference > choice.tolerance > 0
    for id, job in asked.items():
        assert max_relative_error(job.run().weights, done[id].weights) == 0


@pytest.mark.parametrize("loss", [honest, mixing])
def test_a_loss_for_one_client_alone_is_mapped_over_many(
    loss: Callable[..., Tensor], tmp_path: Path
) -> None:
    """Asked for or not, a stack is taken only in a way that was seen to be right."""
    executor, asked = Executor("stacked", tmp_path), jobs(loss)
    done = executor.do(asked)
    (choice,) = choices(tmp_path).values()
    assert (choice.mode, choice.way) == ("stacked", "batched" if loss is honest else "mapped")
    for id, job in asked.items():
        assert max_relative_error(job.run().weights, done[id].weights) < 1e-5


class Scarce(Stack):
    """A stack that finds memory for two members only."""

    def __init__(self, works: Sequence[TrainJob], mapped: bool = False) -> None:
        if len(works) > 2 and len(works[0].rows) == 24:  # the trials are shorter
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().__init__(works, mapped=mapped)


def test_a_stack_without_memory_is_done_in_halves_and_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = replace(TRAIN_STACKS, build=lambda jobs, way: Scarce(jobs))
    monkeypatch.setitem(STACKED, TrainJob, scarce)
    executor, asked = Executor("stacked", tmp_path), jobs(honest, 7)
    for _ in range(2):
        done = executor.do(asked)
        for id, job in asked.items():
            assert max_relative_error(job.run().weights, done[id].weights) < 1e-5
    (choice,) = choices(tmp_path).values()
    assert choice.parts == 4
    assert choice.reason.endswith("out of memory")
    assert choice.reason.count("out of memory") == 1
    again = Executor("stacked", tmp_path)  # a run that is resumed knows it from the beginning
    again.do(asked)
    assert again.choices == executor.choices


@pytest.mark.parametrize(("seconds", "parts"), [({4: 1.0, 2: 0.4}, 2), ({4: 1.0, 2: 0.6}, 1)])
def test_members_are_dealt_to_stacks_that_fit_a_cache_where_that_is_faster(
    seconds: dict[int, float], parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clock(call: Any) -> float:
        return seconds[len(call.args[0])] if isinstance(call, partial) else 100.0  # the loop

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("atoll.compute.kinds.train.CACHE", 1)
    monkeypatch.setattr("atoll.compute.autotune.timed", clock)
    executor, asked = Executor("auto", tmp_path), jobs(honest)
    done = executor.do(asked)
    (choice,) = choices(tmp_path).values()
    assert (choice.mode, choice.parts) == ("stacked", parts)
    for id, job in asked.items():
        assert max_relative_error(job.run().weights, done[id].weights) < 1e-5


def test_the_way_of_a_convolution_is_kept_with_the_run_and_for_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = {
        f"site-{n}": replace(picture(n), rows=picture(n).rows.at(slice(0, rows)))
        for n, rows in enumerate((10, 7))
    }
    executor = Executor("stacked", tmp_path)
    executor.do(asked)
    found = [c for c in choices(tmp_path).values() if c.work.startswith("convolution")]
    assert found
    assert {c.reason for c in found} <= set(batched_layers.WAYS)
    first = {key: timing.way for key, timing in executor._timings.by_shape.items()}
    for folder in (tmp_path, tmp_path / "other"):  # resumed; another run on the same machine
        folder.mkdir(exist_ok=True)
        known = Executor("stacked", folder)._timings.by_shape
        assert {key: timing.way for key, timing in known.items()} == first
    without = tmp_path / "without"
    without.mkdir()
    Executor("stacked", without).do(jobs(honest))
    assert not [c for c in choices(without).values() if c.work.startswith("convolution")]
    Executor("stacked", tmp_path / "other").do(asked)  # what was found before is told again
    assert [c.work for c in choices(tmp_path / "other").values()].count(found[0].work) == 1
    (tmp_path / "cache" / "atoll" / "choices" / "batched_layers.json").write_text("[")
    assert Executor("stacked")._timings.by_shape == {}


def picture(number: int) -> TrainJob:
    model = image_nets.build("cnn-plain", (1, 6, 6), 3, Stream.of(number))
    weights = {n: w.detach().clone() for n, w in model.state_dict().items()}
    phase = Phase(
        "loss", tuple(weights), partial(plain, skeleton(model, True)), Optimiser("sgd", 0.1)
    )
    x = torch.randn(10, 1, 6, 6, generator=torch.Generator().manual_seed(number))
    rows = Rows(x, torch.zeros(10, 0), torch.arange(10) % 3)
    return TrainJob(weights, {}, (phase,), rows, 4, 1, Stream.of(number))


def test_stacks_keep_their_buffers_until_there_are_too_many() -> None:
    executor, asked = Executor("stacked"), jobs(honest, 2)
    counts = []
    for rows in range(24, 14, -1):
        executor.do({id: replace(j, rows=j.rows.at(slice(0, rows))) for id, j in asked.items()})
        (pool,) = executor._stacks.values()
        counts.append(len(pool))
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]
    newest = pool[-1]
    executor.do({id: replace(j, rows=j.rows.at(slice(0, 15))) for id, j in asked.items()})
    assert pool[-1] is newest


def test_an_error_that_is_not_for_want_of_memory_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Stack, works: Sequence[TrainJob]) -> list[Any]:
        raise RuntimeError("something else")

    executor, asked = Executor("stacked", tmp_path), jobs(honest)
    executor.do(asked)
    monkeypatch.setattr(Stack, "run", broken)
    with pytest.raises(RuntimeError, match="something else"):
        executor.do(asked)


def test_a_stack_that_is_equal_is_judged_by_time_alone(tmp_path: Path) -> None:
    executor, asked = Executor("auto", tmp_path), jobs(honest)
    done = executor.do(asked)
    (choice,) = choices(tmp_path).values()
    assert choice.reason in ("equal and faster", "the stack is not faster")
    assert choice.difference <= choice.tolerance
    for id, job in asked.items():
        assert max_relative_error(job.run().weights, done[id].weights) < 1e-5


@pytest.mark.parametrize(("rounds", "tried"), [(0, True), (1, False), (1000, True)])
def test_works_that_end_sooner_than_a_trial_are_done_one_by_one(
    rounds: int, tried: bool, tmp_path: Path
) -> None:
    executor, asked = Executor("auto", tmp_path, rounds=rounds), jobs(honest)
    done = executor.do(asked)
    (choice,) = choices(tmp_path).values()
    assert (choice.tolerance > 0) is tried
    if not tried:
        assert (choice.mode, choice.reason) == ("loop", "too little to try both ways")
    for id, job in asked.items():
        assert max_relative_error(job.run().weights, done[id].weights) < 1e-5


def test_a_choice_that_was_kept_is_not_made_again(tmp_path: Path) -> None:
    Executor("auto", tmp_path).do(jobs(honest))
    ((name, choice),) = choices(tmp_path).items()
    other = replace(choice, mode="stacked" if choice.mode == "loop" else "loop", reason="kept")
    again = Executor("auto", tmp_path)
    again.choices[name] = other
    again.do(jobs(honest))
    assert again.choices == {name: other}


def test_work_that_cannot_be_stacked_is_done_alone_and_the_reason_is_told(tmp_path: Path) -> None:
    def inner(weights: Mapping[str, Tensor], batch: Rows, *, depth: int) -> Tensor:
        return honest(weights, batch, depth=depth)

    executor, asked = Executor("stacked", tmp_path), jobs(inner)
    done = executor.do(asked)
    assert {c.mode for c in choices(tmp_path).values()} == {"loop"}
    assert all("not a function of a module" in c.reason for c in choices(tmp_path).values())
    for id, job in asked.items():
        assert max_relative_error(job.run().weights, done[id].weights) == 0


class Other:
    """A job that a plug-in brings along."""

    def key(self) -> str:
        return "other"

    def run(self) -> int:
        return 7


def test_a_job_of_an_unknown_type_runs_and_the_record_says_so(tmp_path: Path) -> None:
    assert Executor("auto", tmp_path).do({"a": Other(), "b": Other()}) == {"a": 7, "b": 7}
    (choice,) = choices(tmp_path).values()
    assert (choice.mode, choice.reason) == ("loop", "no acceleration for Other")


def test_a_damaged_file_of_choices_is_named(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text("{")
    with pytest.raises(UserError, match=r"engine\.json"):
        Executor("auto", tmp_path)


def test_captured_steps_give_what_the_loop_gives_and_keep_their_buffers() -> None:
    executor, asked = Executor("captured"), jobs(honest, 2)
    for _ in range(2):
        done = executor.do(asked)
        for id, job in asked.items():
            assert max_relative_error(job.run().weights, done[id].weights) == 0.0
    buffers = dict(executor._captured)
    assert len(buffers) == 2
    executor.do({"site-0": asked["site-0"]})
    assert set(executor._captured) < set(buffers)  # the memory of the other one is given back


def test_replicas_of_one_client_are_found_and_tried(tmp_path: Path) -> None:
    asked = jobs(mixing, 3)  # no stack may be made of these, but each has batches of its own
    alike = {id: replace(j, phases=asked["site-0"].phases) for id, j in asked.items()}
    done = Executor("stacked", tmp_path)._capture(alike)
    for id, job in alike.items():
        assert max_relative_error(job.run().weights, done[id].weights) < 1e-5
    executor = Executor("auto", tmp_path / "auto")
    (tmp_path / "auto").mkdir()
    executor._capture(alike)
    (choice,) = executor.choices.values()
    assert choice.work == "replicas"
    assert choice.difference <= choice.tolerance


def test_streams_give_the_same() -> None:
    asked = jobs(honest, 3)
    done = Executor("captured", streams=True).do(asked)
    assert all(
        max_relative_error(job.run().weights, done[id].weights) == 0.0 for id, job in asked.items()
    )


# What several runs have in common is done once


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    done: list[int] = []
    plain = TrainJob.run

    def call(self: TrainJob) -> TrainResult:
        done.append(1)
        return plain(self)

    monkeypatch.setattr(TrainJob, "run", call)
    return done


def test_a_common_work_is_done_once_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {id: replace(job, common=True) for id, job in jobs(honest, 2).items()}
    calls = counted(monkeypatch)
    first = Executor("loop", keep=tmp_path).do(asked)
    again = Executor("loop", keep=tmp_path).do(asked)
    assert len(calls) == 2
    for id in asked:
        assert max_relative_error(first[id].weights, again[id].weights) == 0.0
        assert first[id].losses == again[id].losses
        assert first[id].moments.keys() == again[id].moments.keys()


def test_who_wants_the_same_at_the_same_time_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {id: replace(job, common=True) for id, job in jobs(honest, 2).items()}
    calls = counted(monkeypatch)
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda _: Executor("loop", keep=tmp_path / "kept").do(asked), range(3))
        )
    assert len(calls) == 2
    for other in found[1:]:
        assert all(
            max_relative_error(found[0][id].weights, other[id].weights) == 0.0 for id in asked
        )
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_lanes_are_shared_only_by_what_runs_in_turn() -> None:
    """In turn: local steps of all on one lane; side by side: each client has one of its own."""
    asked = jobs(honest, 2)
    for streams in (False, True):
        executor = Executor("captured", streams=streams)
        executor.do(asked)
        lanes = {id(one.lane) for one in executor._captured.values()}
        assert len(lanes) == (2 if streams else 1)
        assert list(executor._lanes) == (list(asked) if streams else [""])


def test_an_exchange_without_work_leaves_buffers_alone() -> None:
    executor, asked = Executor("captured"), jobs(honest, 2)
    executor.do(asked)
    before = dict(executor._captured)
    assert executor.do({}) == {}
    assert executor._captured == before


def test_any_other_work_is_another_one(tmp_path: Path) -> None:
    one = replace(next(iter(jobs(honest, 1).values())), common=True)
    others = {
        "epochs": replace(one, epochs=2),
        "weights": replace(one, weights={n: w + 1 for n, w in one.weights.items()}),
        "stream": replace(one, stream=one.stream.child("x")),
        "rows": replace(one, rows=replace(one.rows, y=one.rows.y.flip(0))),
        "one": one,
    }
    assert len(set(shared_training.files_of(others, tmp_path, "loop").values())) == 5
    assert shared_training.files_of({"one": one}, tmp_path, "a") != shared_training.files_of(
        {"one": one}, tmp_path, "b"
    )


def test_what_is_not_common_is_not_kept(tmp_path: Path) -> None:
    Executor("loop", keep=tmp_path).do(jobs(honest, 1))
    assert not list(tmp_path.iterdir())
    assert (
        shared_training.files_of(
            {id: replace(j, common=True) for id, j in jobs(honest, 1).items()}, None, ""
        )
        == {}
    )
