"""Which papers can be run again, and what a module must offer for it.

A paper is a module of this package with: `SETTINGS` and `STUDIES`, what can be measured, each with
a `name`; `Plan(folder, device, tf32=...)` and `Plan.quick(folder, device)`, how much is run;
`chosen(only, table)`, the settings that a command asks for; `known(setting, plan)`, what was
measured before; `replaced(setting, plan)`, the files of other measurements that would be lost;
`measure(setting, plan, say)`, which measures and keeps it as one small file;
`ledger(measured, missing)` and `figures(measured)`, what came out. It may offer `QUICK`, the
settings of a miniature where all of them would take too long, and `partly(setting, plan)`: what
there is of a measurement that is not whole yet, to be shown where nothing is run; and
`together(settings)` with `measure_together(settings, plan, say)`: which settings are best measured
at once, and how.
"""

import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import nearest
from atoll.reproduce.ledger import Ledger
from atoll.runs.config import assignment

__all__ = ["PAPERS", "Asked", "again"]

PAPERS = (
    "chfl",
    "fccl",
    "fedseit",
    "vleto",
)


@dataclass(frozen=True)
class Asked:
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


def again(
    paper: str,
    asked: Asked,
    say: Callable[[str], None] = lambda text: None,
    failed: list[Exception] | None = None,
) -> tuple[Ledger, dict[str, bytes]]:
    """The ledger of a paper and its figures by file name; measures what was not measured yet.

    What is measured is what was asked for; the ledger is made of all that is in the folder. An
    error of a measurement ends measuring; it is put into `failed`, or raised where that is None.
    """
    if paper not in PAPERS:
        raise UserError(f"no tables of '{paper}'", "atoll reproduce", nearest(paper, PAPERS))
    if asked.render and not asked.folder.is_dir():
        remedy = "leave --render out, or name the folder of measurements with --out"
        raise UserError("there is nothing to render", str(asked.folder), remedy)
    module = importlib.import_module(f"atoll.reproduce.{paper}")
    made, chosen = _plan(module, asked), _chosen(module, asked)
    missing: dict[str, str] = {}  # by setting, why there is nothing
    if not asked.render:
        fresh = [s for s in chosen if module.known(s, made) is None]
        _refuse_to_replace([path for s in fresh for path in module.replaced(s, made)])
        try:
            _measure(module, paper, asked, fresh, missing, say)
        except Exception as error:
            if failed is None:
                raise
            failed.append(error)
    return _shown(module, paper, asked, missing)


def _shown(
    module: Any, paper: str, asked: Asked, missing: dict[str, str]
) -> tuple[Ledger, dict[str, bytes]]:
    """The ledger and the figures of all that is in the folder."""
    measured: dict[str, Any] = {}
    made, chosen = _plan(module, asked), _chosen(module, asked)
    usual = _plan(module, replace(asked, plan=()))
    command = f"atoll reproduce {paper}{' --quick' if asked.quick else ''}"
    for setting in (*module.SETTINGS, *module.STUDIES):
        found = _there(module, setting, [made] if setting in chosen else [made, usual])
        if found is not None:
            measured[setting.name] = found
        elif setting in chosen or setting in module.SETTINGS:
            missing.setdefault(setting.name, _absence(module, command, setting, made))
    return module.ledger(measured, missing), module.figures(measured)


def _there(module: Any, setting: Any, plans: list[Any]) -> Any:
    """What was measured of a setting, by the plan with the most runs; None if nothing was.

    Runs of several plans stand in one ledger only where a paper pairs them seed by seed.
    """
    partly = getattr(module, "partly", None)
    if partly is None:
        return module.known(setting, plans[0])
    found = [module.known(setting, plan) or partly(setting, plan) for plan in plans]
    return max((one for one in found if one), key=lambda one: len(one["runs"]), default=None)


def _absence(module: Any, command: str, setting: Any, plan: Any) -> str:
    """Why there is nothing to show of a setting."""
    other = module.replaced(setting, plan)
    if other:
        return f"measured with another config: {other[0].name}"
    return f"not run yet: {command} --only '{setting.name}'"


def _measure(
    module: Any,
    paper: str,
    asked: Asked,
    settings: list[Any],
    missing: dict[str, str],
    say: Callable[[str], None],
) -> None:
    """Measure settings; `missing` is filled with what those need whose data are not here."""
    plan = _plan(module, asked)
    _ahead(module, paper, asked, plan, settings, say)
    for setting in settings:
        try:
            if module.known(setting, plan) is None:
                module.measure(setting, plan, say)
        except UserError as error:
            if error.exit_code != EXIT_DATA_MISSING:
                raise
            missing[setting.name] = f"not here: {error.remedy}"


def _plan(module: Any, asked: Asked) -> Any:
    """How much is run: what the paper asks for, or a miniature, but for what was set."""
    made = (
        module.Plan.quick(asked.folder, asked.device)
        if asked.quick
        else module.Plan(asked.folder, asked.device, tf32=asked.tf32)
    )
    free = [f.name for f in fields(made) if f.name not in ("folder", "device", "tf32", "changes")]
    for text in asked.plan:
        key, value = assignment(text)
        value = tuple(value) if isinstance(value, list) else value
        if key not in free:
            raise UserError(f"the plan has no '{key}'", "--set", nearest(key, free))
        if type(value) is not type(getattr(made, key)):
            shown = f"{key} is {getattr(made, key)!r} by default"
            raise UserError(f"{value!r} is not of its kind", f"--set {key}", shown)
        made = replace(made, **{key: value})
    return made


def _chosen(module: Any, asked: Asked) -> list[Any]:
    names = [name.strip() for name in asked.only.split(";")]  # several are separated so
    found = [setting for name in names for setting in module.chosen(name, asked.table)]
    if asked.quick and not (asked.only or asked.table):
        found = list(getattr(module, "QUICK", found))
    return [*found, *(s for s in (module.STUDIES if asked.studies else ()) if s not in found)]


def _refuse_to_replace(paths: list[Path]) -> None:
    if paths:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        what = "a measurement made with another config is here, and would be replaced"
        raise UserError(what, f"{paths[0]}{more}", "choose another --out, or move it away")


def _ahead(
    module: Any,
    paper: str,
    asked: Asked,
    plan: Any,
    settings: list[Any],
    say: Callable[[str], None],
) -> None:
    """Measure what is best measured at once, or in several processes; the rest is left."""
    together = getattr(module, "together", lambda settings: [[s] for s in settings])(settings)
    if asked.jobs > 1:
        _side_by_side(paper, asked, ["; ".join(s.name for s in part) for part in together])
        return
    for part in together:
        try:
            if len(part) > 1:
                module.measure_together(part, plan, say)
        except UserError as error:
            if error.exit_code != EXIT_DATA_MISSING:
                raise


def _side_by_side(paper: str, asked: Asked, names: list[str]) -> None:
    """Measure settings in processes, `jobs` at a time; each keeps what it found as a file.

    One process leaves a GPU idle while its Python works. What cannot be measured because data are
    missing is left to the caller, who says so.
    """
    waiting, running = list(names), dict[str, subprocess.Popen[bytes]]()
    failed: dict[str, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < asked.jobs:
                name = waiting.pop(0)
                running[name] = subprocess.Popen(_command(paper, asked, name))
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


def _command(paper: str, asked: Asked, name: str) -> list[str]:
    start = [sys.executable, "-c", "from atoll.cli import main; main()", "reproduce", paper]
    switches = [f"--{key}" for key in ("quick", "tf32") if getattr(asked, key)]
    where = ["--only", name, "--device", asked.device, "--out", str(asked.folder)]
    plan = [part for text in asked.plan for part in ("--set", text)]
    return [*start, *where, *switches, *plan, "--measure"]
