"""Converts the config of an older run folder to the current options when atoll reads it.

`facts.json` contains the format of a folder. CONFIGS lists the conversions from each format to the
next; the files stay as they are. To rename an option, append a function to the last entry. It takes
and returns the values of config.toml. It leaves values in the new spelling unchanged:
releases between two formats wrote some.
"""

from collections.abc import Callable, Mapping
from typing import Any

from atoll.core.errors import UserError
from atoll.core.integrity import FORMAT
from atoll.data import splits

__all__ = ["convert_config"]

Conversion = Callable[[dict[str, Any]], dict[str, Any]]

FAULTS = "atoll.reproduce.faults.fedseit"
OTHERS = 12  # faults of FedSeIT's published code beside `tests`


def faults_as_replacement(values: dict[str, Any]) -> dict[str, Any]:
    """Replace FedSeIT's options `profile` and `faults` with the run's `replace`."""
    method = dict(values.get("method", {}))
    profile, faults = method.pop("profile", "default"), method.pop("faults", [])
    if method.get("name") != "fedseit":
        return values
    converted = {**values, "method": method}
    if profile == "released":
        converted["replace"] = f"{FAULTS}:released"
    elif len(faults) == 1:
        converted["replace"] = f"{FAULTS}:{faults[0]}"
    elif faults:
        converted["replace"] = f"{FAULTS}:all_but_tests"
        if len(faults) != OTHERS or "tests" in faults:
            what = f"this run combines the faults {', '.join(faults)}, which replace cannot name"
            raise UserError(
                what, "[method] faults", "read this folder with the release that wrote it"
            )
    return converted


def options_of_one_split(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of other splits, which older records list although the split ignored them.

    Own texts used `tasks`, and own tables of parties ignored `clients`.
    """
    data, scenario = values.get("data"), values.get("scenario")
    if not isinstance(data, dict) or not isinstance(scenario, dict):
        return values
    split = scenario.get("split")
    if split not in splits.names():
        return values
    split = "streams" if split == "tasks" and "files" in data else split
    own = splits.option_names(split) - ({"clients"} if "parties" in data else set())
    other = splits.option_names() - own
    options = {name: value for name, value in scenario.items() if name not in other}
    return {**values, "scenario": {**options, "split": split}}


def oracle_as_replacement(values: dict[str, Any]) -> dict[str, Any]:
    """Replace V-LETO's `fil_eval = "label_oracle"` with `replace`; it had no other effect."""
    method = dict(values.get("method", {}))
    if method.get("fil_eval") != "label_oracle":
        return values
    del method["fil_eval"]
    converted = {**values, "method": method}
    columns = values.get("scenario", {}).get("mode") == "columns"
    if columns and method.get("protocol", "P1") == "P1":
        converted["replace"] = "atoll.reproduce.faults.vleto:label_oracle"
    return converted


CONFIGS: Mapping[int, tuple[Conversion, ...]] = {  # from this format to the next, in order
    2: (faults_as_replacement, oracle_as_replacement, options_of_one_split),
}


def convert_config(values: dict[str, Any], version: int, where: str) -> dict[str, Any]:
    """The values of a config.toml of this format in the current spelling."""
    if version > FORMAT:
        what = f"a newer release wrote this run: format {version}, this one reads up to {FORMAT}"
        raise UserError(what, where, "upgrade atoll, or use the release in facts.json")
    for step in range(version, FORMAT):
        for conversion in CONFIGS.get(step, ()):
            values = conversion(values)
    return values
