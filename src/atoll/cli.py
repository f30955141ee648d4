"""The command: parse, call, print, nothing else."""

import dataclasses
import errno
import json
import os
import platform
import signal
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from atoll import __version__, cli_network, data, methods
from atoll.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_OUR_FAULT,
    EXIT_SITE_FAILED,
    EXIT_USER,
    BadMessageError,
    ClientFailedError,
    InterruptedRunError,
    UserError,
    memory_error,
    out_of_memory,
    printable,
)
from atoll.core.influence import RobustOptions
from atoll.core.options import describe, nearest
from atoll.core.record import Message, Round, Score, disk_errors, write_whole
from atoll.data import align, fetch, tables
from atoll.data.splits import ScenarioOptions, own_sizes
from atoll.engines.local import execute, recorded, refuse_absent, run_folder
from atoll.engines.sweep import Point, points, sweep
from atoll.learning.models import ModelOptions
from atoll.runs.config import EngineOptions, RunConfig, assignment, change, presets, read, resolve
from atoll.runs.draft import draft
from atoll.runs.loop import Progress, holdings
from atoll.runs.onnx import write as write_onnx
from atoll.runs.parts import parts
from atoll.runs.predict import Predicted, Predictor, export, predict
from atoll.runs.predict_images import PicturePredictor, predict_images, reads_images
from atoll.runs.predict_parties import Lacking, predict_parties
from atoll.runs.result import Run, plain, table
from atoll.runs.track import known, tracked

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Federated continual learning: sites learn together, keep their data, and do not forget.",
)


def _console(stderr: bool) -> Console:
    """As wide as the terminal; in a file or a pipe so wide that hardly a line is broken."""
    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() else PLAIN_WIDTH
    return Console(stderr=stderr, width=wide, markup=False, emoji=False, highlight=False)


T = TypeVar("T")
PLAIN_WIDTH = 240  # characters
MOST_SEEDS = 10_000
# what a print may fail with; other errors of the system without a file are not of printing
UNWRITABLE = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE)
out, err = _console(stderr=False), _console(stderr=True)


@app.command("run")
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
                _watching(part_config, quiet or as_json) as seen,
                tracked(trackers, part_config, part, seen, _aside) as watch,
            ):
                job = partial(execute, part_config, part, resume=resume, watch=watch)
                _guarded(part, lambda stopping, job=job: job(stopping=stopping))  # type: ignore[misc]
        _print_result([Run(part) for _, part in todo], folder, as_json)


def _aside(words: str) -> None:
    err.print(words, soft_wrap=True)


@app.command("sweep")
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
        with _watching(found[0].config, quiet or as_json) as watch:
            job = partial(sweep, found, folder, resume=resume, watch=watch)
            runs = _guarded(folder, lambda stopping: job(stopping=stopping))
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


@app.command("reproduce")
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
    return UserError(str(error), _traceback_file(error, None), remedy, EXIT_SITE_FAILED)


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


def _guarded(folder: Path, work: Callable[[Callable[[], bool]], T]) -> T:
    """Do it; the first Ctrl-C ends the round and saves, the second stops at once."""
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        err.print("stopping after this round; press Ctrl-C again to stop at once", soft_wrap=True)

    before = signal.signal(signal.SIGINT, stop)
    try:
        return work(lambda: bool(asked))
    except KeyboardInterrupt as error:
        raise _stopped("interrupted, state of the last checkpoint kept", folder) from error
    except InterruptedRunError as error:
        raise _stopped("interrupted, state saved", folder) from error
    except UserError:
        raise
    except Exception as error:
        error.add_note(_traceback_file(error, folder))
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _stopped(what: str, folder: Path) -> UserError:
    return UserError(what, str(folder), "go on with --resume", EXIT_INTERRUPTED)


def _traceback_file(error: Exception, folder: Path | None) -> str:
    """The file with all that is known of a fault: in the run's folder, else a temporary one."""
    content = "".join(traceback.format_exception(error))
    try:
        whole = folder is not None and (folder / "config.toml").exists()
        home = folder if folder and whole else Path(tempfile.mkdtemp(prefix="atoll-"))
        path = home / "traceback.txt"
        path.write_text(content)
        return str(path)
    except OSError as refused:
        return f"no traceback file, {refused.strerror}: {error}"


class _watching:  # noqa: N801 - reads as a phrase: with _watching(...) as watch
    """Shows a run as it goes: live on a terminal, plain lines in a log, nothing when quiet."""

    def __init__(self, config: RunConfig, quiet: bool) -> None:
        self.config, self.quiet = config, quiet
        self.bytes, self.seconds, self.done = 0, 0.0, 0
        self.live = Live(console=err, transient=True) if err.is_terminal and not quiet else None

    def __enter__(self) -> Callable[[Progress], None]:
        if self.live:
            self.live.start()
        return self.watch

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def watch(self, progress: Progress) -> None:
        self.bytes += sum(e.bytes for e in progress.events if isinstance(e, Message))
        self.seconds += progress.seconds
        self.done += 1
        if self.quiet:
            return
        line = self._line(progress)
        if self.live:
            self.live.update(Text(line))
        else:
            err.print(line, soft_wrap=True)

    def _line(self, progress: Progress) -> str:
        left = (progress.stages - progress.stage) * progress.rounds - progress.round - 1
        pieces = [
            f"{self.config.method['name']} seed {self.config.seed}",
            f"stage {progress.stage + 1}/{progress.stages}",
            f"round {progress.round + 1}/{progress.rounds}",
            *_progress_numbers(progress),
            f"{_size(self.bytes)} moved",
            f"{self.seconds / self.done * left:.0f} s left at most",
        ]
        return "  ".join(pieces)


def _progress_numbers(progress: Progress) -> list[str]:
    tests = [e.accuracy for e in progress.events if isinstance(e, Score)]
    notes = next((e.notes for e in progress.events if isinstance(e, Round)), {})
    found = [f"loss {notes['loss']:.4f}"] if "loss" in notes else []
    valid = [value for name, value in notes.items() if name.startswith("valid ")]
    if valid:
        found.append(f"valid {max(valid):.4f}")
    if tests:
        found.append(f"accuracy {sum(tests) / len(tests):.4f}")
    return found


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _print_result(runs: list[Run], folder: Path, as_json: bool) -> None:
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
    line = f"{_size(moved)} moved between the sites and the server; the record is in {folder}"
    out.print(line, soft_wrap=True)


@app.command("list")
def list_command(
    what: Annotated[str, typer.Argument(help="methods, data or presets")] = "methods",
) -> None:
    """List methods, data sets or presets."""
    kinds: dict[str, Callable[[], list[tuple[str, str]]]] = {
        "methods": lambda: [(name, _first_line(name)) for name in methods.names()],
        "data": lambda: [(name, _data_line(name)) for name in data.names()],
        "presets": lambda: [
            (name, path.read_text().splitlines()[0].lstrip("# "))
            for name, path in presets().items()
        ],
    }
    if what not in kinds:
        raise UserError(f"cannot list '{what}'", "atoll list", nearest(what, kinds))
    _print_pairs(kinds[what]())


def _print_pairs(pairs: list[tuple[str, str]], title: str | None = None) -> None:
    shown = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for pair in pairs:
        shown.add_row(*map(Text, pair))
    out.print(shown)


def _first_line(method: str) -> str:
    module = sys.modules[methods.load(method).client.__module__]
    return (module.__doc__ or "").splitlines()[0]


@app.command("show")
def show_command(
    what: Annotated[str, typer.Argument(help="a preset or a method", metavar="PRESET|METHOD")],
) -> None:
    """Show every option of a preset or method: default, range, remark."""
    config = resolve(read(what), what)
    method = methods.load(config.method["name"])
    out.print(f"{what}: {_first_line(config.method['name'])}", soft_wrap=True)
    for title, kind, chosen in (
        ("run", RunConfig, vars(config)),
        ("scenario", ScenarioOptions, config.scenario),
        ("model", ModelOptions, config.model),
        ("method", method.options, config.method),
        ("engine", EngineOptions, config.engine),
        ("robust", RobustOptions, config.robust),
    ):
        _print_options("run" if kind is RunConfig else f"[{title}]", kind, chosen)


def _print_options(title: str, kind: type, chosen: Mapping[str, Any]) -> None:
    shown = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for name in ("option", "value", "type", "range", "what it is"):
        shown.add_column(name, overflow="fold")
    for option in describe(kind):
        value = chosen.get(option.name, option.default)
        if option.name == "data" or not isinstance(value, dict):  # other tables have their own
            cells = (option.name, json.dumps(value), option.kind, option.range, option.remark)
            shown.add_row(*map(Text, cells))
    out.print(shown)


@app.command("doctor")
def doctor_command() -> None:
    """Say what is installed, what is found, and what mends what is missing."""
    packages = ("torch", "numpy", "pydantic", "safetensors", "scikit-learn", "pyarrow")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    _print_pairs(
        [
            ("atoll", __version__),
            ("python", platform.python_version()),
            *((name, _version(name)) for name in packages),
            ("device", device),
            ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores"),
            ("data folder", f"{fetch.folder()} (set ATOLL_DATA to change it)"),
        ]
    )
    _print_pairs([(name, _data_line(name)) for name in data.names()], "data sets")


def _data_line(name: str) -> str:
    about = data.about(name)
    return " - ".join(part for part in (about.presence, about.line, about.where) if part)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"missing: pip install {name}"


@app.command("align")
def align_command(
    files: Annotated[list[Path], typer.Argument(help="one CSV or Parquet file for each party")],
    hub: Annotated[Path, typer.Option(help="the file of the party that has the labels")],
    column: Annotated[str, typer.Option("--id", help="the column of ids")] = "id",
    to: Annotated[Path, typer.Option("--out", help="folder for the index files")] = Path("aligned"),
    exact: Annotated[bool, typer.Option(help="compare ids as they are written")] = False,
    assume: Annotated[
        bool, typer.Option("--assume-aligned", help="rows already match: check ids, hide nothing")
    ] = False,
) -> None:
    """Find the rows that several tables share without showing the others."""
    tables = {path.stem: align.read_ids(path, column) for path in files}
    if len(tables) < max(2, len(files)):
        raise UserError("two files of one name, or one alone", "align", "name each party's file")
    made = align.assume_aligned(tables, exact) if assume else align.align(tables, hub.stem, exact)
    with disk_errors(to):
        to.mkdir(parents=True, exist_ok=True)
    for name, rows in made.rows.items():
        lines = "".join(f"{row}\n" for row in rows)
        write_whole(to / f"{name}.index.csv", f"row\n{lines}".encode())
    moved = sum(len(message.content) for message in made.sent)
    count = len(next(iter(made.rows.values())))
    out.print(f"{count} rows in common, {_size(moved)} moved; index files in {to}", soft_wrap=True)


cli_network.register(app, out, err, _print_result)


def main() -> None:
    """Run the command; every error ends in at most three lines and an exit code."""
    try:
        if app(standalone_mode=False) == EXIT_INTERRUPTED:  # Ctrl-C where no run was going on
            _complain("interrupted", "atoll", "start it again", EXIT_INTERRUPTED)
        sys.stdout.flush()
    except UserError as error:
        _complain(error.what, error.where, error.remedy, error.exit_code)
    except (ClientFailedError, BadMessageError) as error:
        _complain(str(error), _notes(error), _remedy(error), EXIT_SITE_FAILED)
    except Exception as error:
        _usage(error)
        _unwritable(error)
        if out_of_memory(error):
            short = memory_error(_notes(error) or "atoll")
            _complain(short.what, short.where, short.remedy, short.exit_code)
        what = f"a fault of atoll's own: {type(error).__name__}"
        where = _notes(error) or _traceback_file(error, None)
        _complain(what, where, "please report it with that file", EXIT_OUR_FAULT)


def _remedy(error: Exception) -> str:
    """What to do about a client that failed: a run goes on only with the config it has."""
    if "not finite" in str(error):
        return "training diverged: lower the rate, and start a new run in another folder"
    return "mend what failed, then go on with --resume"


def _usage(error: Exception) -> None:
    """The command line's own complaints, in our form."""
    message = getattr(error, "format_message", None)
    if message is None:
        return
    lines = str(message()).splitlines()
    if not lines:  # called without a command: the help has been printed
        raise SystemExit(EXIT_USER)
    _complain(lines[0], "command line", "see atoll --help", EXIT_USER)


def _unwritable(error: Exception) -> None:
    """What was to be printed could not be; the rest is thrown away, so that Python ends quietly."""
    if not isinstance(error, OSError) or error.filename or _notes(error):
        return
    if error.errno in UNWRITABLE:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reason = f"cannot print: {str(error.strerror).lower()}"
        _complain(reason, "standard output", "send it to another place", EXIT_USER)


def _notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", []))


def _complain(what: str, where: str, remedy: str, exit_code: int) -> None:
    """Three lines on what is wrong, where, and what to do; then the end."""
    for name, text in (("error", what), ("where", where), ("to do", remedy)):
        print(f"{name}: {printable(text)}", file=sys.stderr)
    raise SystemExit(exit_code)


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs", metavar="RUN...")],
    to: Annotated[
        Path | None, typer.Option("-o", "--out", help="the page; default report.html in the run")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="a folder for the figures as SVG files")
    ] = None,
) -> None:
    """Write one HTML page about one or several runs."""
    from atoll.report import page  # noqa: PLC0415 - matplotlib takes a second to import

    home = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    out.print(f"the report is in {page.write(runs, to or home, figures)}", soft_wrap=True)


@app.command("watch")
def watch_command(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs", metavar="RUN...")],
    port: Annotated[int, typer.Option(help="of this machine; 0 for any that is free")] = 8200,
) -> None:
    """Serve the report of runs that go on, live, to this machine alone."""
    from atoll.report import watch  # noqa: PLC0415 - matplotlib takes a second to import

    def ready(address: str) -> None:
        out.print(f"watching at {address} until Ctrl-C", soft_wrap=True)
        sys.stdout.flush()

    watch.serve(watch.Watch(runs), port, ready)


DEALT = ("train", "valid", "test", "common", "own")


@app.command("inspect")
def inspect_command(
    what: Annotated[
        str, typer.Argument(help="a preset, a method, or a .toml file", metavar="CONFIG")
    ],
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value")] = None,
) -> None:
    """Show what each site holds and what will be done with it, before anything trains."""
    changes = dict(assignment(text) for text in set_ or [])
    config = resolve(change(read(what), changes), what)
    if config.scenario["split"] == "files":
        given = {key: value for key, value in config.data.items() if key != "name"}
        found = tables.survey(**given)
        _print_survey(found)
        rows = _to_be_dealt(found, config)
    else:
        made = parts(config)
        if made.dataset.layout is not None and made.dataset.layout.told:
            _print_pairs(list(made.dataset.layout.told), "worth knowing")
        held = holdings(made)
        rows = [
            [
                id,
                *(f"{sum(site[part]):,}" for part in DEALT[:3]),
                str(held["common"]),
                str(site["own"]),
            ]
            for id, site in held["sites"].items()
        ]
    _print_grid("rows and columns of numbers, as dealt", ["site", *DEALT], rows)


def _to_be_dealt(found: tables.Survey, config: RunConfig) -> list[list[str]]:
    """What each site will have, from the numbers of its rows: the file is not read again."""
    common, own = tables.widths(found)
    rows = []
    for site in found.sites:
        stages = {stage: site.stages.get(stage, 0) for stage in found.stages or ("",)}
        sizes = own_sizes(site.name, stages, config.scenario_options()).sum(0)
        rows.append([site.name, *(f"{n:,}" for n in sizes), str(common), str(own[site.name])])
    return rows


def _print_survey(found: tables.Survey) -> None:
    sites = [
        [site.name, site.file, f"{site.rows:,}", _counted(site.classes), _counted(site.stages)]
        for site in found.sites
    ]
    header = (
        ["site", "file", "rows", "classes", "stages"]
        if found.stages
        else ["site", "file", "rows", "classes"]
    )
    _print_grid("sites", header, [row[: len(header)] for row in sites])
    columns = [
        [
            column.name,
            column.kind,
            column.where,
            ", ".join(column.sites) if column.where != "common" else "all",
            _counted(column.missing),
            column.done,
        ]
        for column in found.columns
    ]
    _print_grid("columns", ["column", "type", "", "sites", "missing", "what is done"], columns)
    if found.findings:
        _print_pairs([(one.what, one.done) for one in found.findings], "worth knowing")
    _print_pairs([("", line) for line in found.crossing], "sites tell each other before training")


def _counted(counts: Mapping[str, int]) -> str:
    shown = [f"{name}: {count:,}" if name else f"{count:,}" for name, count in counts.items()]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")


def _print_grid(title: str, header: list[str], rows: list[list[str]]) -> None:
    shown = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for name in header:
        shown.add_column(name, overflow="fold")
    for row in rows:
        shown.add_row(*map(Text, row))
    out.print(shown)


@app.command("init")
def init_command(
    files: Annotated[list[str] | None, typer.Argument(help="one table a site")] = None,
    label: Annotated[str, typer.Option(help="the column to be predicted")] = "",
    site: Annotated[str, typer.Option(help="one file: the column of a row's site")] = "",
    stage: Annotated[str, typer.Option(help="the column of a row's stage")] = "",
    method: Annotated[str, typer.Option(help="chfl, fedavg or alone")] = "",
    to: Annotated[Path, typer.Option("-o", "--out", help="the config to write")] = Path("run.toml"),
) -> None:
    """Write a commented config for your own tables; what you do not give, you are asked."""
    if to.exists():
        raise UserError("the file is there already", str(to), "choose another with -o")
    asking = sys.stdin.isatty()
    if not (files and label) and not asking:
        raise UserError("no files or no label", "atoll init", "atoll init A.csv B.csv --label NAME")
    given = files or str(typer.prompt("Files, one for each site, with blanks between")).split()
    label = label or str(typer.prompt("The column to be predicted"))
    method = method or (str(typer.prompt("Method", default="chfl")) if asking else "chfl")
    text = draft(given, label, method, site, stage)
    tables.survey(**tomllib.loads(text)["data"])  # a mistake in the files is found now
    with disk_errors(to):
        to.write_text(text, encoding="utf-8")
    out.print(f"wrote {to}; next: atoll inspect {to}, then atoll run {to}", soft_wrap=True)


@app.command("predict")
def predict_command(
    run: Annotated[Path, typer.Argument(help="the folder of a run", metavar="RUN")],
    file: Annotated[
        Path | None,
        typer.Argument(help="rows: CSV or Parquet; images: a folder, .npz or Parquet"),
    ] = None,
    site: Annotated[str, typer.Option(help="whose model")] = "",
    to: Annotated[Path, typer.Option("-o", "--out", help="the predictions")] = Path(
        "predictions.csv"
    ),
    model: Annotated[str, typer.Option(help="a variant; default the method's headline")] = "",
    held_out: Annotated[
        bool, typer.Option("--held-out", help="only the rows that the run kept for its tests")
    ] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(help="parties: the file of each, in their order or as PARTY=FILE"),
    ] = None,
    lacking: Annotated[
        str, typer.Option(help="parties, an id that one lacks: drop it, or fill its columns")
    ] = "drop",
) -> None:
    """Predict rows or images with the model of one site, or rows with a file of each party."""
    if data:
        done = _predict_parties(Predictor(run, site, model), file, data, lacking, to, held_out)
    elif file is None or not site:
        what = "no file" if file is None else "it is not said whose model"
        remedy = "give FILE --site SITE; where parties hold columns, --data for each party"
        raise UserError(what, "atoll predict", remedy)
    elif reads_images(run):
        done = predict_images(PicturePredictor(run, site, model), file, to, held_out)
    else:
        done = predict(Predictor(run, site, model), file, to, held_out)
    _remark(done)
    out.print(f"{done.rows:,} predictions in {to}{_share(done)}", soft_wrap=True)


def _remark(done: Predicted) -> None:
    """Say what was odd in a file."""
    for name in done.absent:
        err.print(f"the file has no column '{name}': taken as missing", soft_wrap=True)
    for name, count in done.unseen.items():
        err.print(f"{count} values of '{name}' were never seen: taken as unknown", soft_wrap=True)
    if done.unlabelled:
        err.print(f"{done.unlabelled:,} have no label: neither right nor wrong", soft_wrap=True)
    if done.foreign:
        why = "a label that is no class of the model: neither right nor wrong"
        err.print(f"{done.foreign:,} have {why}", soft_wrap=True)


def _share(done: Predicted) -> str:
    """How many were right, of those whose label is known."""
    if done.right is None:
        return ""
    whom = "them" if done.judged == done.rows else f"the {done.judged:,} with a known label"
    return f", {done.right / done.judged:.4f} of {whom} right"


def _predict_parties(
    predictor: Predictor, file: Path | None, data: list[str], lacking: str, to: Path, held_out: bool
) -> Predicted:
    if file is not None or "parties" not in predictor.recipe:
        remedy = "give FILE --site SITE; --data is for parties that hold columns of the same rows"
        raise UserError("--data does not fit", str(file or predictor.folder), remedy)
    if lacking not in ("drop", "fill"):
        raise UserError(f"unknown way '{lacking}'", "--lacking", "use drop or fill")
    how: Lacking = "fill" if lacking == "fill" else "drop"
    done = predict_parties(predictor, data, to, how, held_out)
    became = "left out" if how == "drop" else "its columns taken as missing"
    for name, ids in done.lacking.items():
        shown = ", ".join(ids[: align.SHOWN]) + (", ..." if len(ids) > align.SHOWN else "")
        err.print(f"{len(ids):,} ids are not in {name}, {became}: {shown}", soft_wrap=True)
    return done


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="the folder of a run", metavar="RUN")],
    site: Annotated[str, typer.Option(help="whose model")],
    to: Annotated[Path | None, typer.Option("-o", "--out", help="a folder")] = None,
    model: Annotated[str, typer.Option(help="a variant; default the method's headline")] = "",
    onnx: Annotated[bool, typer.Option("--onnx", help="as ONNX too; needs the extra onnx")] = False,
) -> None:
    """Write one site's model as safetensors with a card in JSON."""
    from atoll.report.tables import departures  # noqa: PLC0415

    if reads_images(run):
        if onnx:
            remedy = "leave --onnx out: the weights are written as safetensors"
            raise UserError("networks for images are not written as ONNX", "--onnx", remedy)
        shown: PicturePredictor | Predictor = PicturePredictor(run, site, model)
    else:
        shown = predictor = Predictor(run, site, model)
    told = {one.client: one.sentence for one in departures(Run(run))}
    found = export(shown, to or run / f"export-{site}", told.get(shown.site, "nothing"))
    if onnx:
        write_onnx(predictor, found / "model.onnx")
    out.print(f"the model and its card are in {found}", soft_wrap=True)
