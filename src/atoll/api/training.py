"""Runs from Python: one run or several seeds, a run whose rounds are iterated over, a sweep."""

import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from atoll import engines
from atoll.api.errors import keyword_errors
from atoll.api.inputs import config_of, named_objects, seed_numbers, values_of
from atoll.api.progress import Bar
from atoll.api.result import Result
from atoll.api.sweeps import Sweep, grouped
from atoll.cluster.options import cluster_options, ray_installed
from atoll.core.errors import EXIT_INTERRUPTED, UserError
from atoll.core.plugins import objects_in_memory
from atoll.data.dataset import Dataset
from atoll.engines.local import LocalEngine
from atoll.runs.answer import write_answer
from atoll.runs.config import RunConfig, change
from atoll.runs.execute import execute
from atoll.runs.folders import fresh_folder
from atoll.runs.loop import Progress
from atoll.runs.result import Run, absent_run, runs_in
from atoll.runs.sweep import Point, points
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
    objects: Mapping[str, Any] = field(default_factory=dict)  # networks of this session, by name
    resume: bool = False

    def execute(
        self, watch: Watch, stopping: Callable[[], bool], answered: bool, bar: Bar
    ) -> Result:
        """Run every config, and answer whether joining helps."""
        name = self.configs[0].name
        place = nullcontext(self.out) if self.out is not None else fresh_folder(name)
        loaded: dict[str, Dataset] = {}
        with place as folder, objects_in_memory(self.objects), bar:
            folders = []
            for number, config in enumerate(self.configs):
                bar.pace.run = number
                folders.append(folder / f"seed-{config.seed}" if self.several else folder)
                engine = engines.load(config.engine_options().name)
                kwargs: Any = {"watch": watch, "stopping": stopping, "loaded": loaded}
                execute(config, folders[-1], engine, resume=self.resume, **kwargs)
            if answered:
                _answer_or_warn(folders, bar)
        return Result(folder, tuple(Run(one) for one in folders), self.objects)


def _plan(
    what: str | Path,
    out: str | Path | None,
    seeds: Iterable[int] | None,
    changes: Mapping[str, Any],
) -> _Plan:
    """Check a call before anything is trained."""
    changes, objects = named_objects(changes)
    config = config_of(what, changes)
    numbers = [config.seed] if seeds is None else seed_numbers(seeds, changes)
    configs = tuple(dataclasses.replace(config, seed=number) for number in numbers)
    return _Plan(configs, seeds is not None, None if out is None else Path(out), objects)


def _answer_or_warn(folders: list[Path], bar: Bar) -> None:
    """Compute the answer; a warning says why where that cannot be done."""
    if len(Run(folders[0]).facts["clients"]) > MOST_SITES:
        reason = f"more than {MOST_SITES} sites; compute it with atoll.answer(result)"
        warnings.warn(f"no answer: {reason}", stacklevel=4)
        return
    try:
        write_answer(folders, engines.load, lambda words: bar.say(f"answer: {words}"))
    except UserError as error:
        if error.exit_code == EXIT_INTERRUPTED:
            raise
        warnings.warn(f"no answer: {error.what}; {error.remedy}", stacklevel=4)


def run(  # noqa: PLR0913 - what a caller may set, by keyword
    what: str | Path,
    out: str | Path | None = None,
    *,
    seeds: Iterable[int] | None = None,
    answer: bool = True,
    resume: bool = False,
    progress: bool = True,
    watch: Watch = lambda progress: None,
    **changes: Any,
) -> Result:
    """Run a preset, a method or a TOML file with some options changed.

    A keyword is an option (`clients=5`, `rate=0.01`) or a name of the run (`data="wine"`); where
    two tables have it, pass a dictionary: `method={"name": "chfl", "rate": 0.01}`. `data` may be
    tables by site: `data={"basel": frame, "bern": other}, label="sick"`, of anything that exports
    an Arrow stream, or arrays `(x, y)`; they are kept as Parquet files in runs/tables.

    `model` may be a torch.nn.Module, or a function of (shape, classes) that returns one.

    `seeds` runs the config once for each seed. `answer=False` leaves out the baselines that
    decide whether joining helps. `resume` continues a run that was cut in the folder `out`, with
    the same arguments. `watch` is called after each round. `progress=False` shows no progress bar;
    there is one on a terminal and in a notebook.

    >>> result = run("fedavg", data="wine", clients=2, rounds=3, widths=[8], answer=False)
    >>> result.sites
    ('site-0', 'site-1')
    >>> 0 < result.accuracy <= 1
    True
    """
    with keyword_errors():
        if resume and out is None:
            raise UserError("no folder to resume in", "out", "give out, the folder of the run")
        plan = dataclasses.replace(_plan(what, out, seeds, changes), resume=resume)
        bar = Bar(progress, len(plan.configs))
        return plan.execute(_both(bar.watch, watch), lambda: False, answer, bar)


def _both(first: Watch, second: Watch) -> Watch:
    """Call two watchers one after the other."""

    def watch(progress: Progress) -> None:
        first(progress)
        second(progress)

    return watch


def answer(*runs: str | Path | Result) -> dict[str, Any]:
    """Decide whether joining helps in finished runs that differ in their seed alone.

    It trains the same method at each site alone, and writes `answer.json`; see docs/answer.md.

    >>> result = run("fedavg", data="wine", clients=2, rounds=2, widths=[4], answer=False)
    >>> sorted(answer(result)["sites"])
    ['site-0', 'site-1']
    """
    folders: list[Path] = []
    objects: dict[str, Any] = {}
    for one in runs:
        folders += [r.folder for r in one.runs] if isinstance(one, Result) else _runs_in(Path(one))
        objects |= one.objects if isinstance(one, Result) else {}
    if not folders:
        raise UserError("no runs", "atoll.answer", "give a result, or the folder of a run")
    with keyword_errors(), objects_in_memory(objects):
        return write_answer(folders, engines.load)


def _runs_in(folder: Path) -> list[Path]:
    """The runs of a folder: its own, or those of its seeds."""
    folders = runs_in(folder)
    if not folders:
        raise absent_run(folder)
    return folders


class Stream:
    """A run that trains one round each time the next one is asked for.

    `result` is the result once the rounds have ended. A loop that is left early stops the run;
    its record can be continued with `atoll run --resume`.

    >>> rounds = stream("fedavg", data="wine", clients=2, rounds=2, widths=[4])
    >>> [progress.round for progress in rounds]
    [0, 1]
    >>> rounds.result.sites
    ('site-0', 'site-1')
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
                hidden = Bar(shown=False)  # the caller shows the rounds
                self.result = self._plan.execute(watch, stop.is_set, False, hidden)
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


def stream(what: str | Path, out: str | Path | None = None, **changes: Any) -> Stream:
    """Run as `atoll.run` does, and iterate over its rounds as they happen.

    Each item has `stage`, `round`, the `events` of the round and its `seconds`.

    >>> for progress in stream("fedavg", data="wine", clients=2, rounds=2, widths=[4]):
    ...     print(f"round {progress.round} of {progress.rounds}")
    round 0 of 2
    round 1 of 2
    """
    with keyword_errors():
        return Stream(_plan(what, out, None, changes))


def sweep(
    what: str | Path,
    out: str | Path | None = None,
    *,
    seeds: Iterable[int] | None = None,
    progress: bool = True,
    on: str = "",
    gpus_per_block: float | None = None,
    **changes: Any,
) -> Sweep:
    """Run every combination of some values, as one computation where possible.

    A keyword with a list, a tuple or a range is an axis: `rate=[0.01, 0.1]`, `mu=[[0.01], [0.1]]`.
    Any other value holds for all runs. An option that is a list itself and does not vary is an
    axis with one value: `widths=[[8]]`. `progress=False` shows no progress bar.

    `on="ray"` or `on="ray://HOST:PORT"` runs blocks of points on a Ray cluster, each with
    `gpus_per_block` GPUs; with the same `out`, a second call runs what is missing.

    >>> every = sweep("fedavg", data="wine", clients=2, rounds=1, widths=[[4]], rate=[0.01, 0.1])
    >>> [setting.axes["method.rate"] for setting in every.settings]
    [0.01, 0.1]
    """
    changes, objects = named_objects(changes)
    axes, fixed = _axes(changes)
    with keyword_errors(), objects_in_memory(objects):
        if seeds is not None:
            axes["seed"] = seed_numbers(seeds, changes)
        values = change(values_of(what, fixed), {})
        values["engine"] = {"packing": False, **values.get("engine", {})}
        name = f"{values.get('name', 'run')}-sweep"
        place = nullcontext(Path(out)) if out is not None else fresh_folder(name)
        with place as folder, Bar(progress and not on) as bar:
            members = points(values, axes, folder)
            runs = _swept(members, folder, on, gpus_per_block, bar)
            return grouped(members, runs, folder, objects)


def _axes(changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments with several values, and those with one."""
    axes: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for name, value in changes.items():
        of_axis = isinstance(value, list | range) or (name != "data" and isinstance(value, tuple))
        if of_axis and not len(value):
            raise UserError("an axis without values", name, f"give a value: {name}=[...]")
        (axes if of_axis else fixed)[name] = value
    return axes, fixed


def _swept(
    members: Sequence[Point], folder: Path, on: str, gpus: float | None, bar: Bar
) -> list[Run]:
    """The runs of a sweep, in this process or on a cluster, which shows no bar."""
    if not on and gpus is not None:
        raise UserError("GPUs of a block without a cluster", "gpus_per_block", "add on='ray'")
    if not on:
        return run_sweep(members, folder, LocalEngine, watch=bar.watch)
    options = cluster_options(on, gpus)
    with ray_installed():
        from atoll.cluster.ray import cluster_sweep  # noqa: PLC0415 - only where it is asked for
    with cluster_sweep(options) as sweeper:
        return sweeper(members, folder)
