"""Surveys own tables before training: sites, classes, columns, findings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from atoll.core.errors import UserError
from atoll.core.options import build, nearest
from atoll.data.own.columns import ENOUGH, Column, ColumnPlan, Finding
from atoll.data.own.encoding import Block
from atoll.data.own.labels import MOST_CLASSES, Spread, spread, task_of, task_statement
from atoll.data.own.profiles import (
    Arrival,
    Contents,
    Repeats,
    TableOptions,
    in_order,
    known_columns,
    natural,
    open_sheet,
    profile_sheet,
    refuse_unknown_columns,
    site_name,
    unusable,
)
from atoll.data.own.sheets import Sheet
from atoll.data.own.spellings import same_classes

__all__ = ["SiteSurvey", "Survey", "holds", "read_contents", "survey", "survey_of", "widths"]


@dataclass(frozen=True)
class SiteSurvey:
    """The data of one site."""

    name: str
    file: str
    rows: int
    classes: dict[str, int]  # rows per class; in regression the number of labels
    stages: dict[str, int]  # rows per stage
    numbers: Spread | None = None  # statistics of the label, in regression


@dataclass(frozen=True)
class Survey:
    """The content of `atoll inspect`, and the recipe that `load` follows."""

    options: TableOptions
    sheets: tuple[Sheet, ...]
    sites: tuple[SiteSurvey, ...]
    classes: tuple[str, ...]  # in regression the name of the label: one output
    stages: tuple[str, ...]
    columns: tuple[Column, ...]
    findings: tuple[Finding, ...]
    crossing: tuple[str, ...]  # sentences on what sites disclose to each other before training
    blocks: tuple[Block, ...]
    rare: Mapping[str, Sequence[str]] = field(default_factory=dict)  # levels without a column
    arrivals: Mapping[str, Arrival] = field(default_factory=dict)  # data that arrive at each stage


def survey(**values: Any) -> Survey:
    """Read the files once; raises every mistake in them as an error."""
    return survey_of(read_contents(build(TableOptions, values, "[data]")))


def read_contents(options: TableOptions, duplicates: bool = False) -> Contents:
    """The first pass over the files; on request it also searches for duplicate rows."""
    _refuse_contradictions(options)
    sheets = tuple(_sheets(options))
    _refuse_repeated(sheets)
    refuse_unknown_columns(known_columns(sheets), options, "site")
    options = options.renamed()
    contents = Contents(options, sheets, repeats=Repeats() if duplicates else None)
    for sheet in sheets:
        profile_sheet(contents, sheet)
    return contents


def survey_of(contents: Contents, leaks: bool = True) -> Survey:
    """The survey of files already read; a run does not search for leaks of the label again."""
    sites = tuple(sorted(contents.profiles))
    _refuse_unknown_sites(contents.options, sites)
    task = task_of(contents)
    statement = task_statement(contents, task)
    options = replace(contents.options, task=task)
    contents = replace(contents, options=options)
    classes = sorted(set().union(*contents.classes.values()), key=natural)
    _refuse_label(contents, classes)
    if task == "regression":
        classes = [options.label]
    stages = set[str]().union(*contents.stages.values())
    plan = ColumnPlan(contents, sites, leaks)
    plan.make()
    findings = [Finding(*statement)] if statement else []
    return Survey(
        options,
        contents.sheets,
        tuple(_site(contents, name) for name in sites),
        tuple(classes),
        in_order(stages, options.order) if stages != {""} else (),
        tuple(plan.columns),
        tuple(findings + _findings(contents, sites, classes) + plan.findings),
        tuple(plan.crossing(classes)),
        tuple(plan.blocks),
        plan.rare,
        contents.arrivals,
    )


def _refuse_contradictions(options: TableOptions) -> None:
    if not options.files or not options.label:
        lacking = "files" if not options.files else "label"
        remedy = 'write for example data = { files = ["a.csv", "b.csv"], label = "outcome" }'
        raise UserError(f"no {lacking}", "[data]", remedy)
    if options.label == options.site:
        what = f"'{options.label}' is the label and the site"
        raise UserError(what, "[data]", "choose another column for one of the two")
    if options.site and (len(options.files) > 1 or isinstance(options.files, dict)):
        raise UserError("a site column and several files", "[data]", "give one of the two")


def _refuse_unknown_sites(options: TableOptions, sites: Sequence[str]) -> None:
    for name in options.sites:
        if name not in sites:
            raise UserError(f"no site '{name}'", f"[data.sites.{name}]", nearest(name, sites))


def _sheets(options: TableOptions) -> Iterator[Sheet]:
    """The files, each with its site and stage if the options name them."""
    if not isinstance(options.files, dict):
        for file in options.files:
            yield open_sheet(file, options)
        return
    counts = {name: len(files) for name, files in options.files.items()}
    few, many = min(counts, key=lambda n: counts[n]), max(counts, key=lambda n: counts[n])
    if counts[few] != counts[many] or not counts[few]:
        what = f"site '{few}' has {counts[few]} files and '{many}' has {counts[many]}"
        raise UserError(what, "[data]", "give each site one file for each stage")
    if options.stage and counts[few] > 1:
        raise UserError("a stage column and a file a stage", "[data]", "give one of the two")
    for name, files in options.files.items():
        for number, file in enumerate(files, 1):
            sheet = open_sheet(file, options, site_name(name))
            yield replace(sheet, site=name, stage=str(number) if len(files) > 1 else "")


def _refuse_repeated(sheets: Sequence[Sheet]) -> None:
    """Refuse a file given twice: the same rows would be used for training and testing."""
    seen = set()
    for sheet in sheets:
        path = sheet.path.resolve()
        if path in seen:
            what = "the same file is given twice"
            if not sheet.site:
                what = f"two parts would be called '{site_name(sheet.path.stem)}'"
            raise unusable(what, sheet.path, "give each site, and each stage, a file of its own")
        seen.add(path)


def _refuse_label(contents: Contents, classes: Sequence[str]) -> None:
    """Refuse a label that cannot be learned."""
    where = f"column '{contents.options.label}'"
    total = sum(counts.total() for counts in contents.classes.values())
    if len(classes) < 2:
        what = f"every row has the same label '{classes[0]}'"
        raise unusable(what, where, "choose another label, or more rows")
    most = min(MOST_CLASSES, max(ENOUGH, total // 2))
    if contents.options.task == "classification" and len(classes) > most:
        what = f"the label has {len(classes):,} different values in {total:,} rows"
        raise unusable(what, where, "choose or make a column of classes, or one of numbers")


def _site(contents: Contents, name: str) -> SiteSurvey:
    classes, stages = (
        dict(sorted(counts[name].items(), key=lambda item: natural(item[0])))
        for counts in (contents.classes, contents.stages)
    )
    files = ", ".join(str(sheet.path) for sheet in contents.files[name])
    rows = sum(classes.values())
    if contents.options.task != "regression":
        return SiteSurvey(name, files, rows, classes, stages)
    numbers = spread(classes, any(sheet.comma for sheet in contents.files[name]))
    return SiteSurvey(name, files, rows, {contents.options.label: rows}, stages, numbers)


def _findings(contents: Contents, sites: Sequence[str], classes: Sequence[str]) -> list[Finding]:
    """Findings on files, classes and the sizes of sites."""
    findings = []
    for sheet in contents.sheets:
        if sheet.encoding not in ("", "utf-8") or sheet.delimiter not in ("", ","):
            sign = {"\t": "tab"}.get(sheet.delimiter, sheet.delimiter)
            comma = "; decimal commas are read as points" if sheet.comma else ""
            what = f"{sheet.path.name} has the encoding {sheet.encoding} and the delimiter '{sign}'"
            findings.append(Finding(what, f"detected{comma}"))
    spelled = contents.options.task == "regression"  # it has no classes to compare
    spelled = spelled or bool(same_classes(contents.classes))  # or they are to be mapped first
    for name in () if spelled else sites:
        absent = [c for c in classes if c not in contents.classes[name]]
        if absent:
            what = f"{name} has no row of the class {', '.join(absent[:5])}"
            findings.append(Finding(what, "its model can still predict that class"))
    findings += [] if spelled else _disjoint(contents, sites)
    rows = [contents.classes[name].total() for name in sites]
    if max(rows) > 10 * min(rows):
        what = f"sites differ in size: {min(rows):,} to {max(rows):,} rows"
        findings.append(Finding(what, "all count the same; set weighting = 'rows' to change that"))
    return findings


def _disjoint(contents: Contents, sites: Sequence[str]) -> Iterator[Finding]:
    """A site that shares no class with any other site."""
    for name in sites if len(sites) > 1 else ():
        others = [contents.classes[site].keys() for site in sites if site != name]
        classes = contents.classes[name].keys()
        if not classes & set[str]().union(*others):
            what = f"{name} shares no class with any other site: {', '.join(sorted(classes)[:5])}"
            yield Finding(what, "classes are kept; if they mean the same, map them with labels")


def holds(plan: Survey) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """(sites, blocks): whether a site has a block."""
    sites_of = {column.name: column.sites for column in plan.columns}
    rows = [
        [site.name == b.site if b.site else site.name in sites_of[b.column] for b in plan.blocks]
        for site in plan.sites
    ]
    return np.array(rows)


def widths(plan: Survey) -> tuple[int, dict[str, int]]:
    """The number of common columns, and of own columns per site, as numeric columns."""
    columns = holds(plan)
    size, common = np.array([block.width for block in plan.blocks]), columns.all(0)
    own = {
        s.name: int(size[has & ~common].sum()) for s, has in zip(plan.sites, columns, strict=True)
    }
    return int(size[common].sum()), own
