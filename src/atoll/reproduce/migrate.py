"""Moves stored measurements to the present spelling of their settings; nothing is measured again.

A measurement counts for a setting by the fingerprint of the setting's values. Where an option is
spelled anew the fingerprint changes, though the runs are the same. For each file this module
computes the fingerprint of the old spelling, checks that it is the stored one, and writes the new.

    python -m atoll.reproduce.migrate docs/reproduction/fedseit
"""

import json
import sys
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError
from atoll.core.record import write_whole
from atoll.reproduce.fedseit import PAPER, Plan, Setting
from atoll.reproduce.measured import file_name, fingerprint

__all__ = ["migrate", "old_config"]

# All faults but `tests`, in the order in which the option `faults` listed them.
MOST = [
    "masks", "head", "foreign", "projections", "weighting", "past", "similarity", "dls", "sparse",
    "stop", "draws", "order",
]  # fmt: skip


def old_config(setting: Setting, plan: Plan) -> str:
    """The fingerprint from when `profile` and `faults` were options of the method."""
    values, *rest = PAPER.asked(setting, plan)
    values = {key: value for key, value in values.items() if key != "replace"}
    faults = MOST if setting.fault == "all but tests" else [setting.fault]
    more: dict[str, Any] = {"profile": setting.profile}
    more |= {"faults": faults} if setting.fault else {}
    return fingerprint([{**values, "method": {**values["method"], **more}}, *rest])


def migrate(folder: Path, plan: Plan | None = None) -> list[Path]:
    """The files of FedSeIT's measurements in a folder that were moved to the present spelling.

    A file that has neither the old nor the new fingerprint is an error, before any is written.
    """
    plan = plan or Plan(folder)
    moved: dict[Path, bytes] = {}
    for setting in (*PAPER.settings, *PAPER.studies):
        path = folder / f"{file_name(setting.name)}.json"
        old, new = old_config(setting, plan), PAPER.config(setting, plan)
        stored = json.loads(path.read_text())["config"] if path.exists() else new
        if stored not in (old, new):
            remedy = "give the plan that it was measured with, or move it away"
            raise UserError("a measurement of something else is here", str(path), remedy)
        if stored == old:
            text = path.read_text()
            moved[path] = text.replace(f'"config": "{old}"', f'"config": "{new}"', 1).encode()
    for path, content in moved.items():
        write_whole(path, content)
    return list(moved)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        migrate(Path(name))
