"""A first config for somebody's own tables, with a remark on every line that may be changed."""

import json
from collections.abc import Sequence

from atoll import methods
from atoll.core.errors import UserError

__all__ = ["draft"]

REMARKS = {
    "chfl": "common columns learned together, own columns at home",
    "fedavg": "one model of the common columns for all sites",
    "alone": "every site for itself: the yardstick",
}


def draft(files: Sequence[str], label: str, method: str, site: str = "", stage: str = "") -> str:
    """The text of a run.toml; a file may be NAME=FILE,FILE: a site with one file for each stage."""
    methods.load(method)  # an unknown one is refused with the nearest
    quoted = {name: json.dumps(value, ensure_ascii=False) for name, value in (
        ("label", label), ("site", site), ("stage", stage))}  # fmt: skip
    lines = [
        "# Written by atoll init. See it before it trains: atoll inspect; then: atoll run, report.",
        "rounds = 20            # of a stage, at most",
        "seed = 0               # of the rows kept for tests, the first weights, the order of rows",
        'scale = "local"        # each site scales by its own training rows: no statistics cross',
        "",
        "[data]",
        f"files = {_files(files)}",
        f"label = {quoted['label']}   # the column to be predicted",
    ]
    lines += [f"site = {quoted['site']}   # the column that names a row's site"] if site else []
    staged = bool(stage) or any("," in file for file in files if "=" in file)
    lines[4:4] = ["attribution = true     # also tell whose doing forgetting is"] if staged else []
    lines += [f"stage = {quoted['stage']}   # the column that names a row's stage"] if stage else []
    lines += [
        "# ignore = []          # columns to leave out",
        "# keep = []            # columns to keep though they look like identifiers",
        "# categorical = []     # columns of digits to be read as words, such as codes",
        '# levels = "local"     # no level of a text column crosses; they become own columns',
        "",
        "[model]",
        "widths = [64, 32]      # hidden layers",
        "",
        "[method]",
        f'name = "{method}"          # {REMARKS.get(method, "see atoll list methods")}',
        "batch = 32             # rows in a step",
        "epochs = 2             # passes over the rows in a round",
    ]
    return "\n".join(lines) + "\n"


def _files(given: Sequence[str]) -> str:
    """A list of files, or a table of sites with one file for each stage."""
    if not any("=" in file for file in given):
        return json.dumps(list(given), ensure_ascii=False)
    sites = []
    for file in given:
        name, equals, paths = file.partition("=")
        if not (equals and name and paths):
            what = f"'{file}' is not NAME=FILE,FILE"
            raise UserError(what, "atoll init", "name every site, or none: basel=2023.csv,2024.csv")
        listed = json.dumps(paths.split(","), ensure_ascii=False)
        sites.append(f"{json.dumps(name, ensure_ascii=False)} = {listed}")
    return "{ " + ", ".join(sites) + " }"
