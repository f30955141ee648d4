"""Lanes capture in one place; here with a device that only writes down what it is asked."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from atoll.compute.graphs import Lane, available

GPU = torch.device("cuda")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of torch's CUDA functions, in order."""
    calls: list[Any] = []

    class Graph:
        def capture_begin(self, *pool: Any) -> None:
            calls.append(("begin", *pool))

        def capture_end(self) -> None:
            calls.append("end")

        def pool(self) -> str:
            return "pool"

    def note(name: str) -> Callable[[], None]:
        return lambda: calls.append(name)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", note("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", note("release"))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: calls.append("first"))
    return calls


def test_all_graphs_of_a_lane_share_the_pool_of_its_first(log: list[Any]) -> None:
    lane = Lane(GPU)
    lane.captured(lambda: log.append("step"))
    begin = ["synchronize", "release"]
    assert log == [*begin, ("begin",), "first", "end", *begin, ("begin", "pool"), "step", "end"]


def test_a_lane_may_keep_spare_memory(log: list[Any]) -> None:
    Lane(GPU, release=False).captured(lambda: None)
    assert "release" not in log


def test_a_step_that_fails_ends_the_capture(log: list[Any]) -> None:
    def failing() -> None:
        raise ZeroDivisionError

    lane = Lane(GPU)
    with pytest.raises(ZeroDivisionError):
        lane.captured(failing)
    assert log[-1] == "end"


def test_without_a_gpu_nothing_is_captured() -> None:
    lane = Lane(torch.device("cpu"))
    assert not lane.captures
    assert not available(torch.device("cpu"))
    lane.open()
    with lane.on_stream():
        pass
    lane.close()
