"""`atoll reproduce PAPER`: plan what is run, measure what is missing, render what there is."""

import importlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import nearest
from atoll.reproduce.costs import costs
from atoll.reproduce.ledger import Ledger, as_json
from atoll.reproduce.measured import Measurement
from atoll.reproduce.origin import describe
from atoll.reproduce.pages import as_markdown
from atoll.reproduce.paper import Paper, Say, silent
from atoll.reproduce.verify import Check, verify
from atoll.runs.config import assignment

__all__ = ["PAPERS", "Selection", "again", "load", "pages", "verified"]

PAPERS = ("chfl", "fccl", "fedseit", "vleto")
AnyPaper = Paper[Any, Any]


@dataclass(frozen=True)
class Selection:
    """What of a paper is to be run, where, and how much of it."""

    folder: Path
    table: str = ""
    only: str = ""
    device: str = "auto"
    quick: bool = False
    tf32: bool = False
    studies: bool = False
    render: bool = False  # run nothing, show what was measured before
    jobs: int = 1  # settings that are measured at the same time, each by a process of its own
    plan: tuple[str, ...] = ()  # key=value: what is otherwise in the plan, e.g. seeds=[0]


def load(name: str) -> AnyPaper:
    """The paper with this name."""
    if name not in PAPERS:
        raise UserError(f"no tables of '{name}'", "atoll reproduce", nearest(name, PAPERS))
    paper: AnyPaper = importlib.import_module(f"atoll.reproduce.{name}").PAPER
    return paper


def again(
    name: str, selection: Selection, say: Say = silent, failed: list[Exception] | None = None
) -> tuple[Ledger, dict[str, bytes]]:
    """Measure what was asked for; the ledger of all that is in the folder, and its figures.

    An error ends measuring. It is appended to `failed`, or raised where that is None.
    """
    paper = load(name)
    if selection.render and not selection.folder.is_dir():
        remedy = "leave --render out, or name the folder of measurements with --out"
        raise UserError("there is nothing to render", str(selection.folder), remedy)
    plan, selected = _plan(paper, selection), _select(paper, selection)
    missing: dict[str, str] = {}  # by setting, why there is no measurement
    if not selection.render:
        fresh = [s for s in selected if not _is_measured(paper, selection, s, plan)]
        _refuse_to_replace([path for s in fresh for path in paper.conflicts(s, plan)])
        try:
            _measure(paper, selection, fresh, missing, say)
        except Exception as error:
            if failed is None:
                raise
            failed.append(error)
    return _rendered(paper, selection, missing)


def _is_measured(paper: AnyPaper, selection: Selection, setting: Any, plan: Any) -> bool:
    """Whether a setting has a file; one with other seeds counts, unless --set asks for some."""
    if paper.complete(setting, plan) is not None:
        return True
    whole = not paper.storage.pairs_seeds  # else single seeds may be missing
    return whole and not selection.plan and paper.stored(setting, plan) is not None


def pages(ledger: Ledger, figures: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a ledger, by name."""
    plain = json.dumps(as_json(ledger), indent=1).encode()
    return {"ledger.json": plain, "ledger.md": as_markdown(ledger).encode(), **figures}


def verified(name: str, selection: Selection, count: int, say: Say = silent) -> list[Check]:
    """Measure random cells of the folder again; nothing in it changes."""
    paper = load(name)
    return verify(paper, _plan(paper, selection), count, say)


def _rendered(
    paper: AnyPaper, selection: Selection, missing: dict[str, str]
) -> tuple[Ledger, dict[str, bytes]]:
    """The ledger and the figures of all that is in the folder."""
    measured: dict[str, Measurement] = {}
    plan, selected = _plan(paper, selection), _select(paper, selection)
    usual = _plan(paper, replace(selection, plan=()))
    command = f"atoll reproduce {paper.name}{' --quick' if selection.quick else ''}"
    for setting in (*paper.settings, *paper.studies):
        partial = selection.plan and (setting in selected or not paper.storage.pairs_seeds)
        one = paper.partly(setting, plan) if partial else paper.stored(setting, usual)
        if one:
            measured[setting.name] = one
        elif setting in selected or setting in paper.settings:
            missing.setdefault(setting.name, _absence(paper, command, setting, plan))
    ledger = paper.ledger(measured, missing)
    return _completed(paper, ledger, measured), paper.figures(measured)


def _completed(paper: AnyPaper, ledger: Ledger, measured: dict[str, Measurement]) -> Ledger:
    """The ledger with margins, with the cost of what was not measured, and with origins."""
    listed = costs((*paper.settings, *paper.studies), measured)
    cells = []
    for cell in ledger.cells:
        cost = None if cell.ours else listed.get(cell.setting)
        seconds = cost["seconds"] if cost else None
        cells.append(replace(cell, base_margin=ledger.rule.margin, seconds=seconds))
    origins = {name: describe(one) for name, one in measured.items()}
    return replace(ledger, cells=tuple(cells), origins=origins, costs=listed)


def _absence(paper: AnyPaper, command: str, setting: Any, plan: Any) -> str:
    """Why a setting has no measurement."""
    other = paper.conflicts(setting, plan)
    if other:
        return f"measured with another config: {other[0].name}"
    return f"not run yet: {command} --only '{setting.name}'"


def _measure(
    paper: AnyPaper, selection: Selection, settings: list[Any], missing: dict[str, str], say: Say
) -> None:
    """Measure settings, those of one form as one sweep; `missing` gets those without data."""
    plan, groups = _plan(paper, selection), paper.together(settings)
    if selection.jobs > 1:
        _side_by_side(paper.name, selection, ["; ".join(s.name for s in group) for group in groups])
    for group in groups:
        try:
            paper.measure(group, plan, say)
        except UserError as error:
            if error.exit_code != EXIT_DATA_MISSING:
                raise
            missing |= {setting.name: f"not here: {error.remedy}" for setting in group}


def _plan(paper: AnyPaper, selection: Selection) -> Any:
    """The paper's plan or its miniature, with what `--set` changes."""
    plan = (
        paper.quick(selection.folder, selection.device)
        if selection.quick
        else paper.plan(selection.folder, selection.device, tf32=selection.tf32)
    )
    free = [f.name for f in fields(plan) if f.name not in ("folder", "device", "tf32", "changes")]
    for text in selection.plan:
        key, value = assignment(text)
        value = tuple(value) if isinstance(value, list) else value
        if key not in free:
            raise UserError(f"the plan has no '{key}'", "--set", nearest(key, free))
        if type(value) is not type(getattr(plan, key)):
            default = f"{key} is {getattr(plan, key)!r} by default"
            raise UserError(f"{value!r} is not of its kind", f"--set {key}", default)
        plan = replace(plan, **{key: value})
    return plan


def _select(paper: AnyPaper, selection: Selection) -> list[Any]:
    """The settings that a command asks for, studies last."""
    names = [name.strip() for name in selection.only.split(";")]  # "a; b" names two settings
    settings = [setting for name in names for setting in paper.select(name, selection.table)]
    if selection.quick and not (selection.only or selection.table):
        settings = list(paper.miniature or settings)
    return [
        *settings,
        *(s for s in (paper.studies if selection.studies else ()) if s not in settings),
    ]


def _refuse_to_replace(paths: list[Path]) -> None:
    if paths:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        what = "a measurement made with another config is here, and would be replaced"
        raise UserError(what, f"{paths[0]}{more}", "choose another --out, or move it away")


def _side_by_side(paper: str, selection: Selection, names: list[str]) -> None:
    """Measure groups of settings in processes, `jobs` at a time; each stores its measurements.

    One process leaves a GPU idle while its Python works. Missing data are reported by the caller.
    """
    waiting, running = list(names), dict[str, subprocess.Popen[bytes]]()
    failed: dict[str, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < selection.jobs:
                name = waiting.pop(0)
                running[name] = subprocess.Popen(_command(paper, selection, name))
            time.sleep(0.2)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                if code not in (0, EXIT_DATA_MISSING):
                    failed[name] = code
    finally:
        for process in running.values():
            process.terminate()
    if failed:  # the others are kept, and are not run again
        what = ", ".join(f"'{name}' ended with exit code {code}" for name, code in failed.items())
        raise UserError(f"measuring {what}", f"atoll reproduce {paper}", "see the errors above")


def _command(paper: str, selection: Selection, name: str) -> list[str]:
    start = [sys.executable, "-c", "from atoll.cli import main; main()", "reproduce", paper]
    switches = [f"--{key}" for key in ("quick", "tf32") if getattr(selection, key)]
    where = ["--only", name, "--device", selection.device, "--out", str(selection.folder)]
    plan = [part for text in selection.plan for part in ("--set", text)]
    return [*start, *where, *switches, *plan, "--measure"]
