"""Runs from Python: one run or several seeds, a run whose rounds are iterated over, a sweep."""

import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from atoll import engines
from atoll.api.errors import keyword_errors
from atoll.api.inputs import config_of, seed_numbers, values_of
from atoll.api.result import Result
from atoll.api.sweeps import Sweep, grouped
from atoll.core.errors import EXIT_INTERRUPTED, UserError
from atoll.data.dataset import Dataset
from atoll.engines.local import LocalEngine
from atoll.runs.answer import write_answer
from atoll.runs.config import RunConfig, change
from atoll.runs.execute import execute
from atoll.runs.folders import fresh_folder
from atoll.runs.loop import Progress
from atoll.runs.result import Run
from atoll.runs.sweep import points
from atoll.runs.sweep import sweep as run_sweep

__all__ = ["Stream", "answer", "run", "stream", "sweep"]

MOST_SITES = 50  # each of which is also trained alone for the answer
Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class _Plan:
    """Configs that differ in their seed, and where their records go."""

    configs: tuple[RunConfig, ...]
    several: bool  # each seed has a folder of its own
    out: Path | None

    def execute(self, watch: Watch, stopping: Callable[[], bool], answered: bool) -> Result:
        """Run every config, and answer whether joining helps."""
        name = self.configs[0].name
        place = nullcontext(self.out) if self.out is not None else fresh_folder(name)
        loaded: dict[str, Dataset] = {}
        with place as folder:
            folders = []
            for config in self.configs:
                folders.append(folder / f"seed-{config.seed}" if self.several else folder)
                engine = engines.load(config.engine_options().name)
                execute(
                    *(config, folders[-1], engine), watch=watch, stopping=stopping, loaded=loaded
                )
            if answered:
                _answer_or_warn(folders)
        return Result(folder, tuple(Run(one) for one in folders))


def _plan(
    what: str, out: str | Path | None, seeds: Iterable[int] | None, changes: Mapping[str, Any]
) -> _Plan:
    """Check a call before anything is trained."""
    config = config_of(what, changes)
    numbers = [config.seed] if seeds is None else seed_numbers(seeds, changes)
    configs = tuple(dataclasses.replace(config, seed=number) for number in numbers)
    return _Plan(configs, seeds is not None, None if out is None else Path(out))


def _answer_or_warn(folders: list[Path]) -> None:
    """Compute the answer; a warning says why where that cannot be done."""
    if len(Run(folders[0]).facts["clients"]) > MOST_SITES:
        reason = f"more than {MOST_SITES} sites; compute it with atoll.answer(result)"
        warnings.warn(f"no answer: {reason}", stacklevel=4)
        return
    try:
        write_answer(folders, engines.load)
    except UserError as error:
        if error.exit_code == EXIT_INTERRUPTED:
            raise
        warnings.warn(f"no answer: {error.what}; {error.remedy}", stacklevel=4)


def run(
    what: str,
    out: str | Path | None = None,
    *,
    seeds: Iterable[int] | None = None,
    answer: bool = True,
    watch: Watch = lambda progress: None,
    **changes: Any,
) -> Result:
    """Run a preset, a method or a TOML file with some options changed.

    A keyword is an option (`clients=5`, `rate=0.01`) or a name of the run (`data="wine"`); where
    two tables have it, pass a dictionary: `method={"name": "chfl", "rate": 0.01}`. `data` may be
    tables by site: `data={"basel": frame, "bern": other}, label="sick"`, of anything that exports
    an Arrow stream, or arrays `(x, y)`; they are kept as Parquet files in runs/tables.

    `seeds` runs the config once for each seed. `answer=False` leaves out the baselines that
    decide whether joining helps. `watch` is called after each round.
    """
    with keyword_errors():
        plan = _plan(what, out, seeds, changes)
        return plan.execute(watch, lambda: False, answer)


def answer(*runs: str | Path | Result) -> dict[str, Any]:
    """Decide whether joining helps in finished runs that differ in their seed alone.

    It trains the same method at each site alone, and writes `answer.json`; see docs/answer.md.
    """
    folders: list[Path] = []
    for one in runs:
        folders += [r.folder for r in one.runs] if isinstance(one, Result) else [Path(one)]
    with keyword_errors():
        return write_answer(folders, engines.load)


class Stream:
    """A run that trains one round each time the next one is asked for.

    `result` is the result once the rounds have ended. A loop that is left early stops the run;
    its record can be continued with `atoll run --resume`.
    """

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self.result: Result | None = None

    def __iter__(self) -> Iterator[Progress]:
        """Train; the run waits while the caller has a round."""
        rounds: SimpleQueue[Progress | BaseException | None] = SimpleQueue()
        proceed, stop = threading.Semaphore(0), threading.Event()

        def watch(progress: Progress) -> None:
            rounds.put(progress)
            proceed.acquire()

        def train() -> None:
            try:
                self.result = self._plan.execute(watch, stop.is_set, answered=False)
                rounds.put(None)
            except BaseException as error:  # raised again in the caller's thread
                rounds.put(error)

        thread = threading.Thread(target=copy_context().run, args=(train,), daemon=True)
        thread.start()
        try:
            yield from _until_end(rounds, proceed)
        finally:
            stop.set()
            proceed.release()
            thread.join()


def _until_end(
    rounds: "SimpleQueue[Progress | BaseException | None]", proceed: threading.Semaphore
) -> Iterator[Progress]:
    """The rounds of a run in another thread, which waits for the caller after each."""
    while True:
        item = rounds.get()
        if item is None:
            return
        if isinstance(item, BaseException):
            with keyword_errors():
                raise item
        yield item
        proceed.release()


def stream(what: str, out: str | Path | None = None, **changes: Any) -> Stream:
    """Run as `atoll.run` does, and iterate over its rounds as they happen.

    Each item has `stage`, `round`, the `events` of the round and its `seconds`.
    """
    with keyword_errors():
        return Stream(_plan(what, out, None, changes))


def sweep(
    what: str,
    out: str | Path | None = None,
    *,
    seeds: Iterable[int] | None = None,
    **changes: Any,
) -> Sweep:
    """Run every combination of some values, as one computation where possible.

    A keyword with a list, a tuple or a range is an axis: `rate=[0.01, 0.1]`, `mu=[[0.01], [0.1]]`.
    Any other value holds for all runs. An option that is a list itself and does not vary is an
    axis with one value: `widths=[[8]]`.
    """
    axes: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for name, value in changes.items():
        of_axis = isinstance(value, list | range) or (name != "data" and isinstance(value, tuple))
        (axes if of_axis else fixed)[name] = value
    with keyword_errors():
        if seeds is not None:
            axes["seed"] = seed_numbers(seeds, changes)
        values = change(values_of(what, fixed), {})
        values["engine"] = {"packing": False, **values.get("engine", {})}
        name = f"{values.get('name', 'run')}-sweep"
        place = nullcontext(Path(out)) if out is not None else fresh_folder(name)
        with place as folder:
            members = points(values, axes, folder)
            return grouped(members, run_sweep(members, folder, LocalEngine), folder)
