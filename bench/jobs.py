"""Whole runs for the yardsticks: a config and its data go in, seconds and scores come out."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll.compute.executor import Executor
from atoll.core.record import Score, read_events
from atoll.data.dataset import Dataset
from atoll.engines.local import LocalEngine
from atoll.runs.config import RunConfig, resolve
from atoll.runs.execute import prepare
from atoll.runs.loop import go
from atoll.runs.parts import Parts


@dataclass
class Clock:
    """An executor that counts the seconds of its jobs."""

    executor: Executor
    seconds: float = 0.0
    wait: Callable[[], None] = field(default=lambda: None)

    def do(self, jobs: Any, moment: Any = None) -> dict[str, Any]:
        """What the executor does."""
        self.wait()
        began = time.perf_counter()
        done = self.executor.do(jobs, moment)
        self.wait()
        self.seconds += time.perf_counter() - began
        return done


@dataclass(frozen=True)
class Timed:
    """What a run took, and what it learned."""

    seconds: float  # of all rounds and tests, from the first to the end
    work: float  # of these, in the clients' local training; 0 where it was not asked for
    accuracy: float  # at the end
    weights: dict[str, torch.Tensor]
    checks: float = 0.0  # seconds that the engine held results to the loop's


def config(values: dict[str, Any]) -> RunConfig:
    """A run without anything that is kept for later: no checkpoints, no pictures."""
    plain = {"checkpoints": False, "looks": False}
    return resolve({**plain, **values}, "bench")


def wait(device: str) -> Callable[[], None]:
    """Waits until the device has done all that it was given."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def warm(device: str) -> None:
    """Load what torch loads when it is first used, so that no way pays for it."""
    weight = torch.zeros((2, 2), device=device, requires_grad=True)
    for kind in (torch.optim.SGD, torch.optim.Adam):
        optimiser = kind([weight], lr=0.1)
        (torch.ones((2, 2), device=device) @ weight).sum().backward()
        optimiser.step()
    wait(device)()


def run(
    given: RunConfig, dataset: Dataset | None = None, inside: bool = False, cpu: bool = False
) -> Timed:
    """Run a config and time it; its data may be given, else they are loaded by name.

    `inside` also times the clients' local training, `cpu` counts CPU seconds of this process.
    """
    now = time.process_time if cpu else time.perf_counter
    loaded = {} if dataset is None else {json.dumps(given.data, sort_keys=True): dataset}
    options = given.engine_options()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "run"
        os.environ["XDG_CACHE_HOME"] = folder  # what earlier runs found faster is not known here
        made, record = prepare(given, home, False, loaded)
        pause = wait(str(made.site(made.scenario.clients[0]).device))
        rounds = given.rounds * made.scenario.stages
        how: Any = {"tf32": options.tf32, "rounds": rounds, "verify": options.verify, "clock": now}
        bench: Any = Executor(options.mode, home, **how)
        clock = Clock(bench, wait=pause)
        deferred = options.device == "cuda" and not inside
        engine = LocalEngine(made, clock if inside else bench, deferred)
        pause()
        began = now()
        server = _go(made, engine, record)
        pause()
        seconds = now() - began
        scores = [e for e in read_events(home) if isinstance(e, Score)]
        last = [s for s in scores if (s.stage, s.round) == (scores[-1].stage, scores[-1].round)]
        accuracy = sum(s.correct for s in last) / sum(s.rows for s in last)
        return Timed(seconds, clock.seconds, accuracy, server.state(), bench.verifier.spent)


def _go(made: Parts, engine: LocalEngine, record: Any) -> Any:
    """The run; its server, which knows the weights."""
    servers: list[Any] = []
    build = made.server

    def server() -> Any:
        servers.append(build())
        return servers[-1]

    object.__setattr__(made, "server", server)
    go(made, engine, record, lambda progress: None, lambda: False)
    return servers[0]
