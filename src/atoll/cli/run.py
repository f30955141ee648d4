"""Commands that train: run, sweep, reproduce."""

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from atoll import engines
from atoll.cli.arguments import (
    Answer,
    AsJson,
    Config,
    Device,
    Folder,
    GpusPerBlock,
    On,
    PointsPerBlock,
    Quiet,
    Resume,
    Set,
    SharedFolder,
    Verbose,
)
from atoll.cli.cluster import on_cluster, points_failed
from atoll.cli.console import aside, err, out, traceback_file
from atoll.cli.terminal import Watching, compute_answer, guarded, print_choices, print_result
from atoll.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_SITE_FAILED,
    BadMessageError,
    ClientFailedError,
    UserError,
)
from atoll.core.record import disk_errors, write_whole
from atoll.engines.local import LocalEngine
from atoll.runs.config import RunConfig, assignment, change, read, resolve
from atoll.runs.execute import execute
from atoll.runs.folders import refuse_absent, refuse_other_config, run_folder
from atoll.runs.result import Run, plain, table
from atoll.runs.sweep import Point, Sweeper, points, sweep
from atoll.runs.track import checked, tracked

__all__ = ["numbers", "register"]

MOST_SEEDS = 10_000
MOST_SITES = 50  # maximum sites that are also trained alone after a run


def run_command(
    what: Config,
    set_: Set = None,
    seeds: Annotated[str, typer.Option(help="several seeds, e.g. 0,1,2 or 0..4")] = "",
    engine: Annotated[str, typer.Option(help="local")] = "",
    device: Device = "",
    to: Folder = None,
    resume: Resume = False,
    track: Annotated[
        list[str] | None,
        typer.Option("--track", metavar="TRACKER", help="tensorboard, mlflow or trackio"),
    ] = None,
    answer: Answer = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a method and print its results."""
    changes = dict(assignment(text) for text in set_ or [])
    changes |= {"engine.name": engine} if engine else {}
    changes |= {"engine.device": device} if device else {}
    config = resolve(change(read(what), changes), what)
    trackers = checked(track or [])
    chosen = numbers(seeds, "--seeds") if seeds else []
    with run_folder(config.name, to, resume) as folder:
        todo = [(dataclasses.replace(config, seed=n), folder / f"seed-{n}") for n in chosen]
        todo = todo or [(config, folder)]
        if resume:
            _refuse_others(todo)
        for part_config, part in todo:
            with (
                Watching(part_config, quiet or as_json, part, verbose) as seen,
                tracked(trackers, part_config, part, seen, aside) as watch,
            ):
                open_engine = engines.load(part_config.engine_options().name)
                job = partial(execute, part_config, part, open_engine, resume=resume, watch=watch)
                guarded(part, lambda stopping, job=job: job(stopping=stopping))  # type: ignore[misc]
        verdict = _answered([part for _, part in todo], quiet or as_json) if answer else None
        print_result([Run(part) for _, part in todo], folder, as_json, verdict)
        _print_end(Run(todo[0][1]), folder, verbose, quiet or as_json)


def _print_end(run: Run, folder: Path, verbose: bool, quiet: bool) -> None:
    """Print how jobs were computed, if requested, and the next step."""
    if verbose:
        print_choices(run)
    if not quiet:
        aside(f"next: atoll report {shlex.quote(str(folder))}")


def _refuse_others(todo: Sequence[tuple[RunConfig, Path]]) -> None:
    """Refuse to resume if there is no run, or one with another config."""
    refuse_absent(part for _, part in todo)
    for config, part in todo:
        refuse_other_config(config, part)


def _answered(folders: list[Path], quiet: bool) -> dict[str, Any] | None:
    """Whether joining helps; a line with the reason if it is not computed."""
    if len(Run(folders[0]).facts["clients"]) > MOST_SITES:
        aside(f"no answer for more than {MOST_SITES} sites; compute it with atoll answer")
        return None
    try:
        return compute_answer(folders, quiet)
    except UserError as error:
        if error.exit_code == EXIT_INTERRUPTED:
            raise
        aside(f"no answer: {error.what}; {error.remedy}")
        return None


Axis = Annotated[
    list[str],
    typer.Option("--axis", metavar="KEY=VALUES", help="e.g. seed=0..4 or rate=0.001,0.003"),
]


def sweep_command(
    what: Config,
    axis: Axis,
    set_: Set = None,
    device: Device = "",
    to: Annotated[
        Path | None, typer.Option("--out", help="the sweep's folder; default runs/NAME-sweep-N")
    ] = None,
    resume: Resume = False,
    on: On = "",
    gpus_per_block: GpusPerBlock = None,
    points_per_block: PointsPerBlock = 0,
    shared_folder: SharedFolder = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run every combination of some values, as one computation where possible."""
    changes = {"engine.packing": False} | dict(assignment(text) for text in set_ or [])
    changes |= {"engine.device": device} if device else {}
    values = change(read(what), changes)
    name = f"{resolve(values, what).name}-sweep"
    axes = [_axis(text) for text in axis]
    if len(dict(axes)) < len(axes):
        raise UserError("two axes of one option", "--axis", "write one, with the values of both")
    with run_folder(name, to, resume) as folder:
        members = points(values, dict(axes), folder)
        if resume:
            _refuse_others([(point.config, point.folder) for point in members])
        limits = (gpus_per_block, points_per_block, shared_folder)
        with on_cluster(on, *limits, quiet or as_json) as sweeper:
            ended = None if sweeper is None else _sweep_on(sweeper, members, folder)
        if ended is not None:  # after the live table ends, which would erase the output
            _print_ended(members, *ended, folder, as_json)
            return
        with Watching(members[0].config, quiet or as_json, members[0].folder) as watch:
            job = partial(sweep, members, folder, LocalEngine, resume=resume, watch=watch)
            runs = guarded(folder, lambda stopping: job(stopping=stopping))
        _print_sweep(members, runs, folder, as_json)


def _sweep_on(
    sweeper: Sweeper, members: list[Point], folder: Path
) -> tuple[list[Run], dict[int, BaseException]]:
    """Run a sweep on a cluster; returns the finished runs, and the errors of the others."""
    failed: dict[int, BaseException] = {}
    job = partial(sweeper, members, folder, failed=failed)
    return guarded(folder, lambda stopping: job(stopping=stopping)), failed


def _print_ended(
    members: list[Point],
    runs: list[Run],
    failed: dict[int, BaseException],
    folder: Path,
    as_json: bool,
) -> None:
    """Print the finished points, then name the failed ones."""
    if runs:
        ended = [point for number, point in enumerate(members) if number not in failed]
        _print_sweep(ended, runs, folder, as_json)
    if failed:
        names = [point.folder.name for point in members]
        raise points_failed(failed, names, _again(folder))


def _again(folder: Path) -> str:
    """The command that continues in this folder with the missing points."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    place = [] if any(word.split("=")[0] == "--out" for word in words) else ["--out", str(folder)]
    return shlex.join(["atoll", *words, *place])


def _axis(text: str) -> tuple[str, list[Any]]:
    """key=0..4 or key=a,b,c; each value as TOML, a bare word is a string."""
    if not text.partition("=")[0].strip() or "=" not in text:
        remedy = "write for example --axis seed=0..4"
        raise UserError(f"'{text}' is not key=value", "--axis", remedy)
    key, value = assignment(text)
    if not isinstance(value, str):
        return key, list(value) if isinstance(value, list) else [value]
    if ".." in value:
        return key, list(numbers(value, "--axis"))
    return key, [assignment(f"{key}={piece}")[1] for piece in value.split(",")]


def _print_sweep(members: list[Point], runs: list[Run], folder: Path, as_json: bool) -> None:
    """One row for each place on the axes beside the seed: mean and deviation over seeds."""
    if as_json:
        body = [
            {"axes": p.axes, "folder": str(p.folder), "metrics": run.metrics}
            for p, run in zip(members, runs, strict=True)
        ]
        print(json.dumps(plain({"points": body}), allow_nan=False))
        return
    groups: dict[str, list[Run]] = {}
    for point, run in zip(members, runs, strict=True):
        place = ", ".join(f"{k}={v}" for k, v in point.axes.items() if k != "seed")
        groups.setdefault(place, []).append(run)
    grid = Table(title=f"{len(runs)} runs of {runs[0].config['method']['name']}")
    for name in ("", *table(next(iter(groups.values())))[0][:2]):
        grid.add_column(name)
    for place, several in groups.items():
        for row in table(several)[1]:
            grid.add_row(place, row[0], row[1])
    out.print(grid)
    out.print(f"{len(runs)} records are in {folder}", soft_wrap=True)


Render = Annotated[bool, typer.Option("--render", help="run nothing: render stored measurements")]
Verify = Annotated[
    int, typer.Option("--verify", help="measure this many random cells again and compare", min=0)
]
PlanSet = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change the plan, e.g. seeds=[0] or rounds=5"),
]


def reproduce_command(
    paper: Annotated[str, typer.Argument(help="the paper, e.g. chfl")],
    table_: Annotated[str, typer.Option("--table", help="e.g. 2 or figure4; default: all")] = "",
    only: Annotated[str, typer.Option("--only", help="one setting by name; several: a; b")] = "",
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="a miniature of short runs")] = False,
    tf32: Annotated[bool, typer.Option("--tf32", help="TensorFloat-32, faster on a GPU")] = False,
    studies: Annotated[bool, typer.Option("--studies", help="also our studies of options")] = False,
    render: Render = False,
    jobs: Annotated[int, typer.Option(help="settings at the same time", min=1)] = 1,
    set_: PlanSet = None,
    verify: Verify = 0,
    on: On = "",
    gpus_per_block: GpusPerBlock = None,
    measure: Annotated[bool, typer.Option("--measure", hidden=True)] = False,
    to: Annotated[
        Path | None, typer.Option("--out", help="the folder; default: reproduction/PAPER[-quick]")
    ] = None,
) -> None:
    """Reproduce a paper's tables and print ours beside theirs."""
    # Figures need matplotlib, which takes a second to import and writes a cache of fonts.
    from atoll.reproduce.papers import Selection, verified  # noqa: PLC0415

    to = to or Path("reproduction") / (f"{paper}-quick" if quick else paper)
    plan = tuple(set_ or ())
    request = Selection(to, table_, only, device, quick, tf32, studies, render, jobs, plan)
    _refuse_on(on, {"--render": render, "--verify": verify > 0})
    if verify:
        _report_checks(verified(paper, request, verify, err.print))
        return
    failed: list[Exception] = []
    files = _measured(paper, request, on, gpus_per_block, failed)
    if not measure:  # else the process that started this one writes and prints
        _write_ledger(files, to)
    for error in failed:
        raise _of_a_measurement(error)
    if not measure:
        out.print(files["ledger.md"].decode(), soft_wrap=True)
        out.print(f"the ledger is in {to}", soft_wrap=True)


def _refuse_on(on: str, flags: dict[str, bool]) -> None:
    """Refuse a cluster together with flags that use none."""
    for flag, is_set in flags.items():
        if on and is_set:
            raise UserError(f"{flag} does not run on a cluster", flag, "leave --on out")


def _measured(
    paper: str, request: Any, on: str, gpus: float | None, failed: list[Exception]
) -> dict[str, bytes]:
    """Measure here or on a cluster; returns the files of the ledger."""
    from atoll.reproduce.papers import again, pages  # noqa: PLC0415
    from atoll.reproduce.sweeps import sweeping_with  # noqa: PLC0415

    if on and request.jobs > 1:
        remedy = "leave --jobs out: the cluster decides how much runs at the same time"
        raise UserError("--jobs is for processes of this machine", "--jobs", remedy)
    with on_cluster(on, gpus) as sweeper, sweeping_with(sweeper):
        return pages(*again(paper, request, err.print, failed))


def _report_checks(checks: Sequence[Any]) -> None:
    """Print repeated measurements; raises an error if a cell differs."""
    for check in checks:
        out.print(str(check), soft_wrap=True)
    failures = [check for check in checks if not check.passed]
    if failures:
        what = f"{len(failures)} of {len(checks)} cells are not what is stored"
        remedy = "compare commit, machine and data of the file with those here"
        raise UserError(what, failures[0].setting, remedy)
    out.print(f"{len(checks)} cells are what is stored")


def _write_ledger(files: dict[str, bytes], to: Path) -> None:
    """Write the ledger and its figures, and the summary beside it where there is one."""
    from atoll.reproduce.summary import SUMMARY, update  # noqa: PLC0415

    with disk_errors(to):
        to.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_whole(to / name, content)
    if (to.parent / SUMMARY).exists():
        update(to.parent)


def _of_a_measurement(error: Exception) -> Exception:
    """A failed site as a user error; the folder of its run is gone."""
    if not isinstance(error, ClientFailedError | BadMessageError):
        return error
    remedy = "fix what failed and start the command again: it keeps what it measured"
    return UserError(str(error), traceback_file(error, None), remedy, EXIT_SITE_FAILED)


def numbers(text: str, where: str) -> list[int]:
    """Parse 0,1,2 or 0..4 as numbers, without duplicates."""
    listed: list[int] = []
    for piece in text.split(","):
        first, _, last = piece.strip().partition("..")
        last = last if ".." in piece else first
        if not (_whole(first) and _whole(last) and 0 <= int(last) - int(first) < MOST_SEEDS):
            raise UserError(f"'{text}' is not a list of numbers", where, "write 0,1,2 or 0..4")
        listed.extend(range(int(first), int(last) + 1))
    if len(set(listed)) < len(listed):
        raise UserError(f"'{text}' has a number twice", where, "name each number once")
    return listed


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("run")(run_command)
    app.command("sweep")(sweep_command)
    app.command("reproduce")(reproduce_command)
