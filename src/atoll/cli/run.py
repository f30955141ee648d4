"""Commands that train: run, sweep, reproduce."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from atoll.cli.terminal import (
    Watching,
    aside,
    err,
    guarded,
    out,
    size,
    traceback_file,
)
from atoll.core.errors import (
    EXIT_SITE_FAILED,
    BadMessageError,
    ClientFailedError,
    UserError,
    printable,
)
from atoll.core.record import disk_errors, write_whole
from atoll.engines.local import LocalEngine, local_engine
from atoll.runs.config import RunConfig, assignment, change, read, resolve
from atoll.runs.execute import execute
from atoll.runs.folders import recorded, refuse_absent, run_folder
from atoll.runs.result import Run, plain, table
from atoll.runs.sweep import Point, points, sweep
from atoll.runs.track import known, tracked

__all__ = ["numbers", "print_result", "register"]

MOST_SEEDS = 10_000


def run_command(
    what: Annotated[
        str, typer.Argument(help="a preset, a method, or a .toml file", metavar="CONFIG")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, e.g. data=covertype or method.rate=0.01"),
    ] = None,
    seeds: Annotated[str, typer.Option(help="several seeds, e.g. 0,1,2 or 0..4")] = "",
    engine: Annotated[str, typer.Option(help="local")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "",
    to: Annotated[
        Path | None, typer.Option("--out", help="the run's folder; default runs/NAME-N")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with a run that was cut")] = False,
    track: Annotated[
        list[str] | None, typer.Option("--track", help="tensorboard, mlflow or trackio")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the result as JSON and nothing else")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="print the table only")] = False,
) -> None:
    """Run a method and print what it found."""
    changes = dict(assignment(text) for text in set_ or [])
    changes |= {"engine.name": engine} if engine else {}
    changes |= {"engine.device": device} if device else {}
    config = resolve(change(read(what), changes), what)
    trackers = known(track or [])
    chosen = numbers(seeds, "--seeds") if seeds else []
    with run_folder(config.name, to, resume) as folder:
        todo = [(dataclasses.replace(config, seed=n), folder / f"seed-{n}") for n in chosen]
        todo = todo or [(config, folder)]
        if resume:
            refuse_absent(part for _, part in todo)
            for part_config, part in todo:
                _same_config(part_config, part)
        for part_config, part in todo:
            with (
                Watching(part_config, quiet or as_json) as seen,
                tracked(trackers, part_config, part, seen, aside) as watch,
            ):
                job = partial(execute, part_config, part, local_engine, resume=resume, watch=watch)
                guarded(part, lambda stopping, job=job: job(stopping=stopping))  # type: ignore[misc]
        print_result([Run(part) for _, part in todo], folder, as_json)


def sweep_command(
    what: Annotated[
        str, typer.Argument(help="a preset, a method, or a .toml file", metavar="CONFIG")
    ],
    axis: Annotated[
        list[str], typer.Option("--axis", help="key=values, e.g. seed=0..4 or rate=0.001,0.003")
    ],
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "",
    to: Annotated[
        Path | None, typer.Option("--out", help="the sweep's folder; default runs/NAME-sweep-N")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with a sweep that was cut")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON and nothing else")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="print the table only")] = False,
) -> None:
    """Run every combination of some values, those of equal shape as one computation."""
    changes = {"engine.packing": False} | dict(assignment(text) for text in set_ or [])
    changes |= {"engine.device": device} if device else {}
    values = change(read(what), changes)
    name = f"{resolve(values, what).name}-sweep"
    axes = [_axis(text) for text in axis]
    if len(dict(axes)) < len(axes):
        raise UserError("two axes of one option", "--axis", "write one, with the values of both")
    with run_folder(name, to, resume) as folder:
        found = points(values, dict(axes), folder)
        if resume:
            refuse_absent(point.folder for point in found)
            for point in found:
                _same_config(point.config, point.folder)
        with Watching(found[0].config, quiet or as_json) as watch:
            job = partial(sweep, found, folder, LocalEngine, resume=resume, watch=watch)
            runs = guarded(folder, lambda stopping: job(stopping=stopping))
        _print_sweep(found, runs, folder, as_json)


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


def _print_sweep(found: list[Point], runs: list[Run], folder: Path, as_json: bool) -> None:
    """One row for each place on the axes beside the seed: mean and deviation over seeds."""
    if as_json:
        body = [
            {"axes": p.axes, "folder": str(p.folder), "metrics": run.metrics}
            for p, run in zip(found, runs, strict=True)
        ]
        print(json.dumps(plain({"points": body}), allow_nan=False))
        return
    groups: dict[str, list[Run]] = {}
    for point, run in zip(found, runs, strict=True):
        place = ", ".join(f"{k}={v}" for k, v in point.axes.items() if k != "seed")
        groups.setdefault(place, []).append(run)
    shown = Table(title=f"{len(runs)} runs of {runs[0].config['method']['name']}")
    for name in ("", *table(next(iter(groups.values())))[0][:2]):
        shown.add_column(name)
    for place, members in groups.items():
        for row in table(members)[1]:
            shown.add_row(place, row[0], row[1])
    out.print(shown)
    out.print(f"{len(runs)} records are in {folder}", soft_wrap=True)


def reproduce_command(
    paper: Annotated[str, typer.Argument(help="whose tables, e.g. chfl")],
    table_: Annotated[str, typer.Option("--table", help="e.g. 2 or figure4; default all")] = "",
    only: Annotated[str, typer.Option("--only", help="a setting by name; several: a; b")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="a miniature: few and short runs")] = False,
    tf32: Annotated[bool, typer.Option("--tf32", help="rounded products, faster on a GPU")] = False,
    studies: Annotated[bool, typer.Option("--studies", help="also what options change")] = False,
    render: Annotated[
        bool, typer.Option("--render", help="run nothing: only what was measured before")
    ] = False,
    jobs: Annotated[int, typer.Option(help="settings at a time, each in a process", min=1)] = 1,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="how much is run: key=value, e.g. seeds=[0] or rounds=5"),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", hidden=True)] = False,
    to: Annotated[
        Path | None,
        typer.Option("--out", help="where results are kept; default reproduction/PAPER[-quick]"),
    ] = None,
) -> None:
    """Run a paper's tables again and print ours beside theirs."""
    # Figures need matplotlib, which takes a second to import and writes a cache of fonts.
    from atoll.reproduce.ledger import as_json, as_markdown  # noqa: PLC0415
    from atoll.reproduce.papers import Asked, again  # noqa: PLC0415

    plan = tuple(set_ or ())
    to = to or Path("reproduction") / (f"{paper}-quick" if quick else paper)
    asked = Asked(to, table_, only, device, quick, tf32, studies, render, jobs, plan)
    failed: list[Exception] = []
    made, figures = again(paper, asked, err.print, failed)
    ledger = json.dumps(as_json(made), indent=1).encode()
    files = {"ledger.json": ledger, "ledger.md": as_markdown(made).encode(), **figures}
    with disk_errors(to):
        to.mkdir(parents=True, exist_ok=True)
    for name, content in files.items() if not measure else ():  # else its starter writes them
        write_whole(to / name, content)
    for error in failed:
        raise _of_a_measurement(error)
    if not measure:
        out.print(as_markdown(made), soft_wrap=True)
        out.print(f"the ledger is in {to}", soft_wrap=True)


def _of_a_measurement(error: Exception) -> Exception:
    """A failed site named as what a user can mend; its run's folder is gone."""
    if not isinstance(error, ClientFailedError | BadMessageError):
        return error
    remedy = "mend what failed and call it again: what was measured is kept"
    return UserError(str(error), traceback_file(error, None), remedy, EXIT_SITE_FAILED)


def numbers(text: str, where: str) -> list[int]:
    """0,1,2 or 0..4 as numbers, each once."""
    found: list[int] = []
    for piece in text.split(","):
        first, _, last = piece.strip().partition("..")
        last = last if ".." in piece else first
        if not (_whole(first) and _whole(last) and 0 <= int(last) - int(first) < MOST_SEEDS):
            raise UserError(f"'{text}' is not a list of numbers", where, "write 0,1,2 or 0..4")
        found.extend(range(int(first), int(last) + 1))
    if len(set(found)) < len(found):
        raise UserError(f"'{text}' has a number twice", where, "name each number once")
    return found


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _same_config(given: RunConfig, folder: Path) -> None:
    """Refuse to go on with another config than the run in the folder has, where there is one."""
    with disk_errors(folder):
        if not (folder / "config.toml").exists():
            return
    found = recorded(folder)
    if given != found:
        keys = [key for key in vars(given) if getattr(given, key) != getattr(found, key)]
        raise UserError(
            f"the run in this folder has another '{keys[0]}'",
            str(folder),
            "resume with the config it was started with",
        )


def print_result(runs: list[Run], folder: Path, as_json: bool) -> None:
    if as_json:
        body = [
            {
                "folder": str(run.folder),
                "seed": run.config["seed"],
                "data": run.facts["data"],
                "accuracy": run.accuracy,
                "seconds": run.seconds,
                "metrics": run.metrics,
                **({"memory": run.memory} if run.memory else {}),
                **({"exclusions": run.exclusions} if run.exclusions else {}),
            }
            for run in runs
        ]
        print(json.dumps(plain({"runs": body}), allow_nan=False))
        return
    header, rows = table(runs)
    method, facts = runs[0].config["method"]["name"], runs[0].facts
    shown = Table(title=f"{method} on {facts['data']['title']}, {len(facts['clients'])} clients")
    for i, name in enumerate(header):
        shown.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        shown.add_row(*row)
    out.print(shown)
    for sentence in dict.fromkeys(line for run in runs for line in run.exclusions):
        out.print(Text(printable(sentence)), soft_wrap=True)
    metrics = [run.metrics[run.headline] for run in runs]
    moved = sum(m["bytes_up"] + m["bytes_down"] for m in metrics)
    line = f"{size(moved)} moved between the sites and the server; the record is in {folder}"
    out.print(line, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("run")(run_command)
    app.command("sweep")(sweep_command)
    app.command("reproduce")(reproduce_command)
