"""Executes a run from a config and an engine, and writes its record."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from atoll.compute.deterministic import deterministic_torch
from atoll.core.record import Record
from atoll.core.storage import FolderLock
from atoll.data.dataset import Dataset
from atoll.runs.config import RunConfig, to_toml
from atoll.runs.facts import facts, same_data
from atoll.runs.loop import Engine, Progress, go
from atoll.runs.parts import Parts, parts
from atoll.runs.result import Run, write_result

__all__ = ["OpenEngine", "execute", "prepare"]

# Opens an engine for the parts of a run. The second argument rebuilds the same parts for an engine
# that measures with a few clients before the run; the third is the folder of the run.
OpenEngine = Callable[[Parts, Callable[[], Parts], Path], AbstractContextManager[Engine]]


def execute(  # noqa: PLR0913 - what a caller may set, by keyword
    config: RunConfig,
    folder: Path,
    open_engine: OpenEngine,
    *,
    resume: bool = False,
    watch: Callable[[Progress], None] = lambda progress: None,
    stopping: Callable[[], bool] = lambda: False,
    loaded: dict[str, Dataset] | None = None,
) -> None:
    """Run a config in a folder, or continue the run in the folder.

    `loaded` caches the data, so that several runs load them once.
    """
    data: dict[str, Dataset] = {} if loaded is None else loaded
    with deterministic_torch(config.engine_options().deterministic):
        run_parts, record = prepare(config, folder, resume, data)
        with record:
            if resume and record.ended(config.checkpoints):
                return
            with open_engine(run_parts, lambda: parts(config, data), folder) as engine:
                go(run_parts, engine, record, watch, stopping)
            write_result(folder, record.extents)


def prepare(
    config: RunConfig,
    folder: Path,
    resume: bool,
    data: dict[str, Dataset] | None = None,
    patience: float = 0.0,
) -> tuple[Parts, Record]:
    """The parts of a run and its open record; raises every config error before it writes anything.

    This process locks the record; `patience`: seconds to wait for another process to release it.
    """
    if not patience:
        FolderLock.check(folder)
    threads = config.engine_options().threads
    if threads:
        torch.set_num_threads(threads)
    run_parts = parts(config, data)
    run_parts.client(run_parts.scenario.clients[0])
    if resume and (folder / "config.toml").exists():
        same_data(run_parts, Run(folder).facts, str(folder))
        return run_parts, Record.reopen(folder, patience)
    text = to_toml(run_parts.config)
    return run_parts, Record.create(folder, text, facts(run_parts), patience)
