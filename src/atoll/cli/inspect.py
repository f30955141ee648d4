"""The command `inspect`: what each site holds, before anything trains."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.cli.arguments import Config, Set
from atoll.cli.terminal import counted, print_grid, print_pairs
from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import build
from atoll.data import splits
from atoll.data.dataset import Dataset
from atoll.data.own import parties, tables, texts
from atoll.data.own.images import broken_images, file_sizes
from atoll.data.own.profiles import Contents
from atoll.data.own.suggestions import (
    Suggestion,
    repeated_rows,
    suggest,
    suggest_for_parties,
    suggest_for_texts,
)
from atoll.data.own.survey import read_contents, survey_of
from atoll.data.splits.files import own_sizes, part_sizes
from atoll.runs.config import RunConfig, assignment, change, read, resolve
from atoll.runs.facts import holdings
from atoll.runs.parts import Parts, parts
from atoll.runs.recipe import site_names

__all__ = ["check", "inspect_command"]

Array = np.ndarray[Any, Any]
RESERVED = 2  # tokens that are not words: padding and unknown
FEW_TESTS = 30  # test rows of a site below which its result is unreliable
MOST_SIZES = 3  # number of images shown per site
DEALT = ("train", "valid", "test", "common", "own")


def inspect_command(what: Config, set_: Set = None) -> None:
    """Show what each site holds, before anything trains."""
    changes = dict(assignment(text) for text in set_ or [])
    config = resolve(change(read(what), changes), what)
    remarks: list[tuple[str, str]] = []
    if config.split == "files" and "files" in config.data:
        values = {key: value for key, value in config.data.items() if key != "name"}
        contents = read_contents(build(tables.TableOptions, values, "[data]"), duplicates=True)
        suggested = [(one.why, f"write {one.text}") for one in suggest(contents)]
        survey = _survey_or_suggestions(contents, suggested)
        findings = [(finding.what, finding.action) for finding in survey.findings]
        remarks = [*findings, *suggested, *repeated_rows(contents)]
        _print_survey(survey)
        rows = _to_be_dealt(survey, config)
        crossing = survey.crossing
        regression = survey.options.task == "regression"
    else:
        _refuse_broken_images(config)
        run_parts = parts(_not_refusing(config))
        if run_parts.dataset.layout is not None:
            remarks += run_parts.dataset.layout.findings
        remarks += _suggested(config)
        _print_dataset(run_parts)
        rows, crossing, regression = _dealt(run_parts), (), run_parts.dataset.regression
    for site, _, _, tests, *_ in rows:
        if int(tests.replace(",", "")) < FEW_TESTS:
            remarks.append(_few_tests(site, int(tests), regression))
    if remarks:
        print_pairs(remarks, "worth knowing")
    if crossing:
        print_pairs([("", line) for line in crossing], "disclosed between sites before training")
    print_grid("rows and input columns of each site", ["site", *DEALT], rows)


def _survey_or_suggestions(contents: Contents, suggested: list[tuple[str, str]]) -> tables.Survey:
    """The survey; where files cannot be used as they are, the suggestions are shown at least."""
    try:
        return survey_of(contents)
    except UserError:
        if suggested:
            print_pairs(suggested, "worth knowing")
        raise


def check(config: RunConfig) -> None:
    """Raise the errors of `inspect` for the data of a config, without output."""
    if config.split == "files" and "files" in config.data:
        values = {key: value for key, value in config.data.items() if key != "name"}
        contents = read_contents(build(tables.TableOptions, values, "[data]"))
        _to_be_dealt(survey_of(contents, leaks=False), config)
    else:
        parts(_not_refusing(config))


def _few_tests(site: str, rows: int, regression: bool) -> tuple[str, str]:
    """The consequences of few test rows, and the remedy."""
    points = f"each is {100 / rows:.0f} points of its accuracy"
    words = "its errors are uncertain" if regression else points
    return f"{site} has {rows} test rows: {words}", "add rows, or use atoll run --seeds"


def _not_refusing(config: RunConfig) -> RunConfig:
    """The config for a look at data whose labels may disagree, which a run refuses."""
    data = config.data
    if not ("parties" in data or "text" in data) or "labels" in data:
        return config
    return replace(config, data={**data, "labels": "as-is"})


def _suggested(config: RunConfig) -> list[tuple[str, str]]:
    """Suggestions for own texts and for tables of parties, and columns that give labels away."""
    values = {key: value for key, value in config.data.items() if key != "name"}
    findings: list[tuple[str, str]] = []
    suggestions: list[Suggestion] = []
    if "parties" in values:
        contents = parties.read_contents(**values)
        findings += parties.leaks(contents)
        suggestions += suggest_for_parties(contents)
    elif "text" in values:
        suggestions += suggest_for_texts(texts.examine(**values))
    return findings + [(suggestion.why, f"write {suggestion.text}") for suggestion in suggestions]


def _refuse_broken_images(config: RunConfig) -> None:
    """List all image files that cannot be read, not only the first."""
    folders = [str(one) for one in config.data.get("images", ())]
    broken = broken_images(folders)
    if broken:
        print_pairs(broken, "images that cannot be read")
        what = f"{len(broken)} image files cannot be read"
        remedy = "export them again from their source, or leave them out"
        raise UserError(what, "data.images", remedy, EXIT_DATA_MISSING)


def _dealt(run_parts: Parts) -> list[list[str]]:
    """The data of each site: rows of all stages, and columns."""
    dealt_rows, called = holdings(run_parts), site_names(run_parts)
    rows = []
    for id, site in dealt_rows["sites"].items():
        sizes = [f"{sum(site[part]):,}" for part in DEALT[:3]]
        rows.append([called[id], *sizes, str(dealt_rows["common"]), str(site["own"])])
    return rows


def _print_dataset(run_parts: Parts) -> None:
    """Print the content of own texts, images and parties: classes by site, sizes, columns."""
    dataset = run_parts.dataset
    if dataset.kind == "text":
        _print_groups(dataset, "files", _text_lengths)
    elif dataset.kind == "image" and dataset.group is not None:
        _print_groups(dataset, "sites", _image_sizes)
        _print_file_sizes(run_parts)
    elif dataset.layout is not None:
        _print_parties(dataset)
    stages = dataset.stages or (dataset.layout.stages if dataset.layout else ())
    stage = dataset.stage if dataset.layout is None else dataset.layout.stage
    if stages and stage is not None:
        rows = []
        for number, name in enumerate(stages):
            labels = dataset.y[stage == number]
            rows.append([name, f"{len(labels):,}", counted(_class_counts(dataset, labels))])
        print_grid("stages", ["stage", "rows", "classes"], rows)


def _class_counts(dataset: Dataset, labels: Array) -> dict[str, int]:
    if dataset.regression:
        return {dataset.classes[0]: len(labels)}
    counts = np.bincount(labels, minlength=len(dataset.classes))
    pairs = zip(dataset.classes, counts.tolist(), strict=True)
    return {name: count for name, count in pairs if count}


def _print_groups(dataset: Dataset, title: str, measure: Callable[[Array], list[str]]) -> None:
    """Rows, classes and sizes of each site's file or folder."""
    assert dataset.group is not None
    rows = []
    for number, name in enumerate(dataset.groups):
        members = np.flatnonzero(dataset.group == number)
        counts = counted(_class_counts(dataset, dataset.y[members]))
        rows.append([name, f"{len(members):,}", counts, *measure(dataset.x[members])])
    last = ["tokens", "words"] if dataset.kind == "text" else ["read as"]
    print_grid(title, ["site", "rows", "classes", *last], rows)
    if dataset.kind == "text":
        print_pairs([("vocabulary", f"{len(dataset.words) - RESERVED:,} words")])


def _text_lengths(tokens: Array) -> list[str]:
    """Median and maximum number of tokens per text, and distinct words; 0 is padding."""
    lengths = (tokens != 0).sum(1)
    return [
        f"{int(np.median(lengths))}, at most {lengths.max()}",
        f"{len(np.unique(tokens[tokens > 0])):,}",
    ]


def _image_sizes(images: Array) -> list[str]:
    channels, height, width = images.shape[1:]
    return [f"{height} x {width}, {channels} channel{'s' * (channels > 1)}"]


def _print_file_sizes(run_parts: Parts) -> None:
    """The sizes of own images as they are in the files, the most frequent first."""
    data = run_parts.config.data
    rows = []
    for site, path in zip(run_parts.dataset.groups, data.get("images", ()), strict=False):
        sizes = file_sizes(Path(path), data.get("image", "image")).most_common()
        shown = counted(dict(sizes[:MOST_SIZES]))
        more = f", and {len(sizes) - MOST_SIZES} more" if len(sizes) > MOST_SIZES else ""
        rows.append([site, shown + more])
    if rows:
        print_grid("images in the files", ["site", "height x width x channels"], rows)


def _print_parties(dataset: Dataset) -> None:
    """Columns by party, who has the label, and how many rows all have."""
    assert dataset.layout is not None
    recipe = dataset.layout.recipe
    if "parties" not in recipe:
        return
    rows = []
    for party, blocks in recipe["parties"].items():
        names = ", ".join(block["column"] for block in blocks)
        rows.append([party, "label" if party == recipe["active"] else "", names])
    print_grid("parties", ["party", "", "columns"], rows)
    read = sum(count for _, count, _ in recipe["files"])
    what = f"{len(dataset):,} of {read:,} rows of the party with the label"
    print_pairs([("rows that all parties share", what), ("id", recipe["id"])])


def _to_be_dealt(survey: tables.Survey, config: RunConfig) -> list[list[str]]:
    """What each site will have; without groups from numbers of rows, and no file is read again."""
    common, own = tables.widths(survey)
    options, rows = config.scenario_options(), []
    scenario = None
    if tables.grouped(survey.options):  # who goes where depends on the rows of each person
        scenario = splits.split(tables.dataset(survey), options, config.seed, config.split)
    for site in survey.sites:
        stages = {stage: site.stages.get(stage, 0) for stage in survey.stages or ("",)}
        if scenario is None:
            sizes = own_sizes(site.name, stages, options).sum(0)
        else:
            sizes = part_sizes(scenario, site.name)
        rows.append([site.name, *(f"{n:,}" for n in sizes), str(common), str(own[site.name])])
    return rows


def _print_survey(survey: tables.Survey) -> None:
    sites = [
        [
            site.name,
            site.file,
            f"{site.rows:,}",
            str(site.numbers) if site.numbers else counted(site.classes),
            counted(site.stages),
        ]
        for site in survey.sites
    ]
    label = "label" if survey.options.task == "regression" else "classes"
    header = ["site", "file", "rows", label, *(["stages"] if survey.stages else [])]
    print_grid("sites", header, [row[: len(header)] for row in sites])
    columns = [
        [
            column.name,
            column.kind,
            column.where,
            ", ".join(column.sites) if column.where != "common" else "all",
            counted(column.missing),
            column.treatment,
        ]
        for column in survey.columns
    ]
    print_grid("columns", ["column", "type", "", "sites", "missing", "treatment"], columns)
    if survey.stages:
        _print_stages(survey)


def _print_stages(survey: tables.Survey) -> None:
    """Print which classes and columns arrive at which stage."""
    used = [column.name for column in survey.columns if column.where != "left out"]
    seen, rows = set[str](), []
    for stage in survey.stages:
        arrival = survey.arrivals[stage]
        new = [name for name in used if name in arrival.columns and name not in seen]
        dropped = [name for name in used if name in seen and name not in arrival.columns]
        changes = "all" if not seen and len(new) == len(used) else ", ".join(f"+ {n}" for n in new)
        changes = ", ".join([*([changes] if changes else []), *(f"- {n}" for n in dropped)])
        seen = (seen | {*new}) - {*dropped}
        regression = survey.options.task == "regression"
        classes = {} if regression else dict(sorted(arrival.classes.items()))
        rows.append(
            [stage, f"{arrival.classes.total():,}", counted(classes), changes or "the same"]
        )
    print_grid("stages", ["stage", "rows", "classes", "columns with values"], rows)
