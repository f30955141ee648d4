"""Which papers can be run again, and what a module must offer for it.

A paper is a module of this package with: `SETTINGS` and `STUDIES`, what can be measured, each with
a `name`; `Plan(folder, device, tf32=...)` and `Plan.quick(folder, device)`, how much is run;
`chosen(only, table)`, the settings that a command asks for; `known(setting, plan)`, what was
measured before; `measure(setting, plan, say)`, which measures and keeps it as one small file;
`ledger(measured, missing)` and `figures(measured)`, what came out. It may have `partly(setting,
plan)`: what there is of a measurement that is not whole yet, to be shown where nothing is run.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import nearest
from atoll.reproduce.ledger import Ledger

__all__ = ["PAPERS", "Asked", "again"]

PAPERS = (
    "chfl",
    "fccl",
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


def again(
    paper: str, asked: Asked, say: Callable[[str], None] = lambda text: None
) -> tuple[Ledger, dict[str, bytes]]:
    """The ledger of a paper and its figures by file name; measures what was not measured yet."""
    if paper not in PAPERS:
        raise UserError(f"no tables of '{paper}'", "atoll reproduce", nearest(paper, PAPERS))
    module = importlib.import_module(f"atoll.reproduce.{paper}")
    made = (
        module.Plan.quick(asked.folder, asked.device)
        if asked.quick
        else module.Plan(asked.folder, asked.device, tf32=asked.tf32)
    )
    measured: dict[str, Any] = {}
    missing: dict[str, str] = {}
    chosen = module.chosen(asked.only, asked.table)
    for setting in [*chosen, *(module.STUDIES if asked.studies and not asked.only else ())]:
        found = module.known(setting, made)
        if found is None and asked.render:
            found = getattr(module, "partly", lambda setting, plan: None)(setting, made)
        if found is None and asked.render:
            missing[setting.name] = f"not run yet: atoll reproduce {paper} --only '{setting.name}'"
            continue
        try:
            measured[setting.name] = found or module.measure(setting, made, say)
        except UserError as error:
            if error.exit_code != EXIT_DATA_MISSING:
                raise
            missing[setting.name] = f"not here: {error.remedy}"
    return module.ledger(measured, missing), module.figures(measured)
