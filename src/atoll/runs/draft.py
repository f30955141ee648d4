"""Drafts a config for the user's data, with a comment on every line that the user may change."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from atoll import methods
from atoll.core.errors import UserError
from atoll.data.own.suggestions import Suggestion, in_toml, key_in_toml

__all__ = ["Wish", "draft"]

REMARKS = {
    "chfl": "sites train a model of the common columns together; own columns stay local",
    "fedavg": "all sites train one model of the common columns",
    "alone": "each site trains alone: the baseline",
    "fccl": "each site trains its own model and learns from the predictions of the others",
    "vleto": "the parties' networks send embeddings; the party with the labels combines them",
    "splitnn": "the parties' networks send embeddings; the party with the labels combines them",
    "fedseit": "each client learns its own sequence of tasks",
}
SCALE = (
    'scale = "local"        # each site scales with its own training rows; no statistics leave it'
)
HINTS = {
    "ignore": "# ignore = []          # columns to exclude",
    "keep": "# keep = []            # columns to keep although they look like identifiers",
    "categorical": "# categorical = []     # numeric columns to read as categories, such as codes",
    "levels": '# levels = "local"     # text columns become own columns; their levels stay local',
}


@dataclass(frozen=True)
class Wish:
    """The arguments of `atoll init`."""

    files: tuple[str, ...]  # one for each site; NAME=FILE,FILE: a site with one for each stage
    label: str
    method: str
    site: str = ""  # the column of a row's site
    stage: str = ""  # the column of a row's stage
    text: str = ""  # the column of texts; empty: tables
    images: bool = False  # folders of images
    id: str = ""  # the column of ids
    ids: tuple[str, ...] = ()  # parties: what each calls it
    parties: bool = False  # files have other columns of the same rows
    aligned: bool = False  # parties: all have the same ids in the same order

    @property
    def paths(self) -> list[list[str]]:
        """The files of each site or party, one per stage."""
        return [file.partition("=")[2].split(",") if "=" in file else [file] for file in self.files]


def draft(wish: Wish, suggestions: Sequence[Suggestion] = (), problem: str = "") -> str:
    """The text of a run.toml; `problem` is the error of `atoll inspect`."""
    methods.load(wish.method)  # unknown values are refused with the nearest name
    staged = bool(wish.stage) or any("," in file for file in wish.files if "=" in file)
    lines = [
        "# Written by atoll init. Check it with atoll inspect, then start atoll run.",
        *([f"# Fix this first: {_one_line(problem)}"] if problem else []),
        "rounds = 20            # maximum per stage",
        "seed = 0               # for the split, the initial weights and the order of rows",
    ]
    table = not (wish.text or wish.images or wish.parties)
    if table:
        lines.append(SCALE)
    if table and staged:
        lines.append("attribution = true     # also measure what causes forgetting")
    lines += ["", "[data]", *_data(wish)]
    lines += _entries([suggestion for suggestion in suggestions if not suggestion.site])
    if table or wish.parties:
        suggested = {one.option for one in suggestions if not one.site}
        options = [option for option in HINTS if table or option != "levels"]
        lines += [HINTS[option] for option in options if option not in suggested]
    for site in sorted({one.site for one in suggestions if one.site}):
        own = [one for one in suggestions if one.site == site]
        lines += ["", f"[data.sites.{key_in_toml(site)}]", *_entries(own)]
    return "\n".join([*lines, "", *_method(wish)]) + "\n"


def _data(wish: Wish) -> list[str]:
    """The lines for the data."""
    key = "images" if wish.images else "files"
    lines = _parties(wish) if wish.parties else [f"{key} = {_files(wish.files)}"]
    if wish.id:
        lines.append(f"id = {in_toml(wish.id)}   # the column of ids")
    if wish.text:
        lines.append(f"text = {in_toml(wish.text)}   # the column of texts")
    if wish.label:
        lines.append(f"label = {in_toml(wish.label)}   # the column to predict")
    if wish.site:
        lines.append(f"site = {in_toml(wish.site)}   # the column with the site of each row")
    if wish.stage:
        lines.append(f"stage = {in_toml(wish.stage)}   # the column with the stage of each row")
    return lines


def _parties(wish: Wish) -> list[str]:
    """The files of parties, and how to match their rows."""
    files = [path if len(path) > 1 else path[0] for path in wish.paths]
    index = 'index = "aligned"   # the folder that atoll align writes'
    if wish.aligned:
        index = "assume_aligned = true   # every file has the same ids in the same order"
    return [f"parties = {in_toml(files)}   # files with different columns of the same rows", index]


def _method(wish: Wish) -> list[str]:
    remark = REMARKS.get(wish.method, "see atoll list methods")
    lines = ["[method]", f'name = "{wish.method}"          # {remark}']
    if wish.images or wish.text:
        return lines
    if wish.parties:
        return [*lines, "batch = 32             # batch size"]
    return [
        "[model]",
        "widths = [64, 32]      # sizes of the hidden layers",
        "",
        *lines,
        "batch = 32             # batch size",
        "epochs = 2             # passes over the training rows per round",
    ]


def _entries(suggestions: Sequence[Suggestion]) -> list[str]:
    """One line per option: active if all its entries are safe, else commented out."""
    by_option: dict[str, list[Suggestion]] = {}
    for one in suggestions:
        by_option.setdefault(one.option, []).append(one)
    lines = []
    for option, same in by_option.items():
        if option == "ignore":
            lines += _ignored(same)
            continue
        entry = same[0].entry
        for one in same[1:]:
            if isinstance(entry, dict):
                entry = {**entry, **one.entry}
            elif isinstance(entry, list):
                entry = list(dict.fromkeys([*entry, *one.entry]))
        sign = "" if all(one.safe for one in same) else "# "
        uncomment = "; uncomment if correct" if sign else ""
        why = _one_line("; ".join(dict.fromkeys(one.why for one in same)))
        lines.append(f"{sign}{option} = {in_toml(entry)}   # {why}{uncomment}")
    return lines


def _ignored(suggestions: Sequence[Suggestion]) -> list[str]:
    """The columns to exclude, in one list; columns that need a decision are commented out."""
    active, reason = _excluded([suggestion for suggestion in suggestions if suggestion.safe])
    commented, question = _excluded([one for one in suggestions if not one.safe])
    if not commented:
        return [f"ignore = [{active}]   # {reason}"]
    if not active:
        return [f"# ignore = [{commented}]   # {question} uncomment if not"]
    return [
        f"ignore = [{active},   # {reason}",
        f"# {commented},   # {question} uncomment if not",
        "]",
    ]


def _excluded(suggestions: Sequence[Suggestion]) -> tuple[str, str]:
    """Columns to exclude, as a TOML list, with the reason."""
    names = dict.fromkeys(name for suggestion in suggestions for name in suggestion.entry)
    reasons = dict.fromkeys(one.why for one in suggestions)
    return ", ".join(in_toml(name) for name in names), _one_line("; ".join(reasons))


def _one_line(text: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f\x85\u2028\u2029]+", " ", text)


def _files(files: Sequence[str]) -> str:
    """A list of files, or a table of sites with one file per stage."""
    if not any("=" in file for file in files):
        return in_toml(list(files))
    sites = []
    for file in files:
        name, equals, paths = file.partition("=")
        if not (equals and name and paths):
            what = f"'{file}' is not NAME=FILE,FILE"
            raise UserError(what, "atoll init", "name every site, or none: basel=2023.csv,2024.csv")
        sites.append(f"{json.dumps(name, ensure_ascii=False)} = {in_toml(paths.split(','))}")
    return "{ " + ", ".join(sites) + " }"
