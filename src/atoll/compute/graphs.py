"""CUDA graphs: the one place that captures them.

A graph is captured and replayed on a lane: a stream and a pool of memory for activations. Graphs of
one lane share this memory, so they must run one after another; graphs that run side by side need a
lane each. Without a GPU nothing is captured, and the same steps run eagerly.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

__all__ = ["Lane", "available", "common_lane"]


def available(device: torch.device) -> bool:
    """Whether steps on this device can be captured."""
    return device.type == "cuda"


class Lane:
    """A CUDA stream, and a memory pool for the graphs that are captured and replayed on it.

    torch keeps memory of different streams apart, also within one pool. It releases a pool with its
    last graph, so a lane holds a small graph as long as it lives.
    """

    def __init__(self, device: torch.device, stream: Any = None, release: bool = True) -> None:
        """A lane on a stream of its own, or on one that it shares with other lanes.

        `release`: give spare memory back to the device before each capture.
        """
        self.captures, self.release, self.stream = available(device), release, stream
        self._pool: tuple[Any, ...] = ()
        if self.captures:
            self.stream = stream or torch.cuda.Stream(device)
            self._first = self.captured(lambda: torch.zeros(1, device=device))
            self._pool = (self._first.pool(),)

    def captured(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """A graph of a step; capturing runs nothing.

        Capture right after an eager step in the same thread: libraries have handles for threads.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        if self.release:
            torch.cuda.empty_cache()
        with self.on_stream():
            graph.capture_begin(*self._pool)
            try:
                step()
            finally:
                graph.capture_end()
        return graph

    def open(self) -> None:
        """Let what is sent here from now on wait for what the current stream does before."""
        if self.captures:
            self.stream.wait_stream(torch.cuda.current_stream())

    def close(self) -> None:
        """Let the current stream wait for what was sent here."""
        if self.captures:
            torch.cuda.current_stream().wait_stream(self.stream)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Send what happens within to this stream."""
        return torch.cuda.stream(self.stream) if self.captures else nullcontext()


@cache
def common_lane() -> Lane:
    """The lane of all graphs that never run at the same time and replay on the current stream.

    Memory stays with it for good, so it need not be asked for again at every capture.
    """
    return Lane(torch.device("cuda"), release=False)
