"""The sweeps that measurements are made of, shared by all papers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from atoll.engines.local import LocalEngine
from atoll.reproduce.measured import workplace
from atoll.runs.loop import Progress
from atoll.runs.result import Run
from atoll.runs.sweep import Sweeper, points, sweep

__all__ = ["on_cluster", "sweeping_with", "swept", "swept_together"]

_SWEEPER: ContextVar[Sweeper | None] = ContextVar("sweeper", default=None)


@contextmanager
def sweeping_with(sweeper: Sweeper | None) -> Iterator[None]:
    """Run the sweeps of measurements on a cluster; with None in this process."""
    token = _SWEEPER.set(sweeper)
    try:
        yield
    finally:
        _SWEEPER.reset(token)


def on_cluster() -> bool:
    """Whether sweeps run on a cluster."""
    return _SWEEPER.get() is not None


def swept(
    values: dict[str, Any],
    axes: Mapping[str, Sequence[Any]],
    folder: Path,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> list[Run]:
    """The runs of a sweep, read from a folder that is not kept."""
    (runs,), _ = swept_together([values], axes, folder, watch)
    return runs


def swept_together(
    several: Sequence[dict[str, Any]],
    axes: Mapping[str, Sequence[Any]],
    folder: Path,
    watch: Callable[[Progress], None] = lambda progress: None,
    accepted: Callable[[BaseException], bool] = lambda error: False,
    store: Callable[[Run], None] = lambda run: None,
) -> tuple[list[list[Run]], dict[int, BaseException]]:
    """Sweeps of several configs as one, so that works of one form are one stack.

    For each config its runs. One with a run that failed has none; its error is given by number if
    it is `accepted`, and raised if it is not. `store` gets each run before an error is raised.
    """
    with workplace(
        folder, [list(several), {key: list(items) for key, items in axes.items()}]
    ) as own:
        parts = [points(v, axes, own / str(n)) for n, v in enumerate(several)]
        failed: dict[int, BaseException] = {}
        every = [point for part in parts for point in part]
        sweeper = _SWEEPER.get() or partial(sweep, engine=LocalEngine)
        runs = sweeper(every, own, resume=True, watch=watch, failed=failed)
        for run in runs:
            run.read()  # before the folder goes
            store(run)
        size = len(parts[0])
        errors = {number // size: error for number, error in sorted(failed.items(), reverse=True)}
        for error in errors.values():
            if not accepted(error):
                raise error
    runs_of = {n: [r for r in runs if r.folder.parent.name == str(n)] for n in range(len(parts))}
    return [[] if n in errors else runs_of[n] for n in runs_of], errors
