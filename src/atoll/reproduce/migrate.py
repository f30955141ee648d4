"""Moves stored measurements to the present spelling of their settings; nothing is measured again.

A measurement counts for a setting by the fingerprint of the setting's values. Where an option is
spelled anew the fingerprint changes, though the runs are the same. For each file this module
computes the fingerprint of the old spelling, checks that it is the stored one, and writes the new.

    python -m atoll.reproduce.migrate docs/reproduction/fedseit
    python -m atoll.reproduce.migrate docs/reproduction/vleto
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError
from atoll.core.record import write_whole
from atoll.reproduce import fedseit, vleto
from atoll.reproduce.measured import file_name, fingerprint
from atoll.reproduce.paper import Paper

__all__ = ["migrate", "old_fedseit", "old_vleto"]

# All faults but `tests`, in the order in which the option `faults` listed them.
MOST = [
    "masks", "head", "foreign", "projections", "weighting", "past", "similarity", "dls", "sparse",
    "stop", "draws", "order",
]  # fmt: skip


def old_fedseit(setting: fedseit.Setting, plan: fedseit.Plan) -> str:
    """The fingerprint from when `profile` and `faults` were options of the method."""
    values, *rest = fedseit.PAPER.identity(setting, plan)
    values = {key: value for key, value in values.items() if key != "replace"}
    faults = MOST if setting.fault == "all but tests" else [setting.fault]
    more: dict[str, Any] = {"profile": setting.profile}
    more |= {"faults": faults} if setting.fault else {}
    return fingerprint([{**values, "method": {**values["method"], **more}}, *rest])


def old_vleto(setting: vleto.Setting, plan: vleto.Plan) -> str:
    """The fingerprint from when `label_oracle` was a value of the option `fil_eval`."""
    values, *rest = vleto.PAPER.identity(setting, plan)
    values = dict(values)
    if values.pop("replace", "") == vleto.ORACLE:
        values["method"] = {**values["method"], "fil_eval": "label_oracle"}
    return fingerprint([values, *rest])


# paper -> its tables, the plan that its files were measured with, the old fingerprint
PAPERS: dict[str, tuple[Paper[Any, Any], Callable[[Path], Any], Callable[[Any, Any], str]]] = {
    "fedseit": (fedseit.PAPER, fedseit.Plan, old_fedseit),
    "vleto": (vleto.PAPER, vleto.Plan, old_vleto),
}


def migrate(folder: Path, name: str, plan: Any = None) -> list[Path]:
    """Move a paper's measurements in a folder to the present spelling; the files that changed.

    A file that has neither the old nor the new fingerprint is an error, before any is written.
    """
    paper, usual, old_config = PAPERS[name]
    plan = plan or usual(folder)
    moved: dict[Path, bytes] = {}
    for setting in (*paper.settings, *paper.studies):
        path = folder / f"{file_name(setting.name)}.json"
        old, new = old_config(setting, plan), paper.config(setting, plan)
        stored = json.loads(path.read_text())["config"] if path.exists() else new
        if stored not in (old, new):
            remedy = "give the plan that it was measured with, or move it away"
            raise UserError("a measurement of something else is here", str(path), remedy)
        if stored == old != new:
            text = path.read_text()
            moved[path] = text.replace(f'"config": "{old}"', f'"config": "{new}"', 1).encode()
    for path, content in moved.items():
        write_whole(path, content)
    return list(moved)


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        migrate(folder, folder.name)
