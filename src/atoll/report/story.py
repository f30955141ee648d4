"""Groups runs into stories: runs of one task belong together, unrelated tasks do not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.core.record import Stage
from atoll.metrics import scores as metrics
from atoll.report import (
    attribution,
    departures,
    domains,
    figures,
    leakage,
    models,
    quality,
    tables,
    transfer,
    verdict,
    vertical,
)
from atoll.report.answer import primary_scores
from atoll.report.figures import Picture
from atoll.report.leakage import Badge
from atoll.report.section import Section
from atoll.report.tables import Group, Table
from atoll.report.units import percent, size
from atoll.report.verdict import Card, GainPlot
from atoll.report.withheld import by_task, without_withheld

__all__ = ["Part", "Story", "stories"]

SECTIONS = (domains.section, transfer.section, vertical.section)  # for groups of some methods


@dataclass(frozen=True)
class Part:
    """The part of a story for one group of runs."""

    label: str
    seeds: tuple[int, ...]
    joins: bool  # whether sites exchange messages; False for a baseline
    card: Card
    badge: Badge
    plot: GainPlot | None
    summary: str
    heat: Picture | None
    attributed: Section | None
    sections: list[Section]
    flow: Picture | None
    merged: list[departures.Merged]
    guarantee: str
    before: str
    exclusions: list[str]
    answered: Table | None
    quality: Section | None
    sites: Table
    holdings: Table | None
    rows: Picture | None
    config: str
    command: str
    score: str  # name of the scores at the start of a sentence

    @property
    def pictures(self) -> list[Picture]:
        """Every figure of the group."""
        pictures = [self.heat, *(self.attributed.pictures if self.attributed else [])]
        for section in [*self.sections, *([self.quality] if self.quality else [])]:
            pictures += section.pictures
        return [picture for picture in (*pictures, self.flow, self.rows) if picture]


@dataclass(frozen=True)
class Story:
    """Runs of one task: the same data with the same split."""

    number: int  # counted from 1
    title: str
    facts: str  # sites, stages and seeds in one line
    data: str  # the data set with its fingerprint
    environment: str  # versions and device
    parts: list[Part]
    comparison: Table | None
    results: Table
    models: dict[str, str]  # name -> description
    differences: Table | None
    forgetting: Table | None
    traffic: Table
    curves: list[Picture]
    overall: list[Picture]  # figures over several runs

    @property
    def suffix(self) -> str:
        """Suffix of the ids of this story's sections, which makes them unique on the page."""
        return "" if self.number == 1 else f"-{self.number}"

    @property
    def pictures(self) -> list[Picture]:
        """Every figure of the story."""
        pictures = [picture for part in self.parts for picture in part.pictures]
        return [*self.curves, *self.overall, *pictures]

    @property
    def has_results(self) -> bool:
        """Whether a model was tested, or there is another figure to show."""
        shown = any(part.heat or part.sections for part in self.parts)
        return bool(self.results.rows) or shown


def stories(groups: Sequence[Group]) -> list[Story]:
    """Group runs of the same task into stories, in the order of their first runs.

    Excludes results that an answer withholds.
    """
    result, first = [], 1
    for number, task in enumerate(by_task(groups), 1):
        task.sort(key=lambda group: group.method == tables.ALONE)  # baselines last
        result.append(_story(number, first, without_withheld(task)))
        first += len(task)
    return result


def _story(number: int, first: int, groups: Sequence[Group]) -> Story:
    parts = [_part(place, group) for place, group in enumerate(groups, first)]
    names = ", ".join(dict.fromkeys(group.method for group in groups))
    data = groups[0].first.facts["data"]
    overall = domains.overall(groups) + vertical.overall(groups)
    classes = "a number to predict" if groups[0].first.regression else f"{data['classes']} classes"
    if number > 1:
        overall = [_renamed(picture, number) for picture in overall]
    return Story(
        number,
        f"{names} on {data['title']}",
        _facts(groups),
        f"{data['title']}, {data['rows']:,} rows, {classes}. {_capitalised(data['source'])}. "
        f"Fingerprint {data['fingerprint'][:16]}.",
        _environment(groups[0]),
        parts,
        verdict.comparison(groups),
        tables.results(groups, primary_scores(groups)),
        models.explanations(groups),
        tables.differences(groups),
        tables.forgetting(groups),
        tables.traffic(groups),
        figures.curves(groups, first),
        overall,
    )


def _capitalised(words: str) -> str:
    return words[:1].upper() + words[1:]


def _renamed(picture: Picture, number: int) -> Picture:
    """A figure over several runs of a later story, with a unique name."""
    name = f"{picture.name}-story-{number}"
    drawing = picture.svg.replace(f'id="{picture.name}-', f'id="{name}-')
    drawing = drawing.replace(f"#{picture.name}-", f"#{name}-")
    return Picture(name, picture.title, picture.words, drawing)


def _facts(groups: Sequence[Group]) -> str:
    facts = groups[0].first.facts
    sites, stages = len(facts["clients"]), int(facts["stages"])
    seeds = sorted({int(run.config["seed"]) for group in groups for run in group.runs})
    listed = ", ".join(map(str, seeds))
    return (
        f"{sites} site{'s' * (sites != 1)} · {stages} stage{'s' * (stages != 1)} · "
        f"seed{'s' * (len(seeds) != 1)} {listed}"
    )


def _environment(group: Group) -> str:
    facts = group.first.facts
    threads = int(facts["threads"])
    return (
        f"atoll {facts['atoll']}, Python {facts['python']}, torch {facts['packages']['torch']}, "
        f"device {facts['device']}, {threads} thread{'s' * (threads != 1)}."
    )


def _part(number: int, group: Group) -> Part:
    path = group.first.folder / "config.toml"
    config = (group.first.integrity.read(path) or b"").decode(errors="replace")
    sections = [section(group, number) for section in SECTIONS]
    merged = departures.merged(departures.departures(group.first))
    return Part(
        group.label,
        tuple(int(run.config["seed"]) for run in group.runs),
        group.method != tables.ALONE,
        verdict.card(group),
        leakage.badge(group),
        verdict.gain_plot(group),
        _summary(group),
        figures.heat(group, f"accuracy-{number}"),
        _attributed(number, group),
        [section for section in sections if section is not None],
        departures.flow(group.first, group.label, f"flow-{number}"),
        merged,
        departures.guarantee(merged),
        departures.before_training(group.first),
        group.first.exclusions,
        verdict.site_table(group),
        quality.section(group, f"calibration-{number}"),
        tables.sites(group),
        tables.holdings(group),
        figures.rows(group, f"rows-{number}"),
        config,
        _command(number, group),
        "R2" if group.first.regression else "Accuracy",
    )


def _command(number: int, group: Group) -> str:
    """The command that repeats a group for all seeds."""
    seeds = [int(run.config["seed"]) for run in group.runs]
    several = f" --seeds {','.join(map(str, seeds))}" if len(seeds) > 1 else ""
    return f"atoll run {group.first.folder}/config.toml{several} --out again-{number}"


def _attributed(number: int, group: Group) -> Section | None:
    """The causes of forgetting, or why they are unknown; None if nothing can be forgotten."""
    if not tables.forgets(group):
        return None
    table = attribution.table(group)
    if table is None:
        return Section(group.label, _unattributed(group))
    picture = attribution.picture(group, f"attribution-{number}")
    return Section(group.label, attribution.sentence(group), [picture] if picture else [], [table])


def _unattributed(group: Group) -> str:
    if group.first.config["scenario"].get("split") == "parties":
        return (
            "All sites train one network together in every step, so no training belongs to "
            "one site alone."
        )
    return (
        "Not in the record of this run: with attribution = true a run also tests models before and "
        "after own training."
    )


def mean_accuracy(group: Group) -> float:
    """Final test accuracy of the headline, averaged over sites and seeds; NaN before a test."""
    accuracies = [run.accuracy for run in group.runs if run.variants]
    return sum(accuracies) / len(accuracies) if accuracies else math.nan


def _summary(group: Group) -> str:
    """Sentences on the run and its measurements; the card states the gain."""
    words = [_ran(group), _scored(group), _forgot(group), _left(group)]
    words.append(_checked(group))
    return " ".join(word for word in words if word)


def _ran(group: Group) -> str:
    facts, seeds = group.first.facts, len(group.runs)
    stages = f" in {facts['stages']} stages" if facts["stages"] > 1 else ""
    ended = sum(isinstance(event, Stage) for event in group.first.events)
    where = f"on {facts['data']['title']} at {len(facts['clients'])} sites{stages}"
    count = f"with {seeds} seed{'s' * (seeds > 1)}"
    if ended < facts["stages"]:
        progress = f"{ended} of {facts['stages']} stages are finished"
        return f"{group.label} has not ended: it runs {where}, {count}; {progress}."
    return f"{group.label} ran {where}, {count}."


def _scored(group: Group) -> str:
    if not group.first.variants and group.withheld:
        return "The test results of all sites are withheld."
    if not group.first.variants:
        return "It has not been tested yet."
    headline = group.first.headline
    name = f"Its model '{headline}'" if headline else "Its model"
    accuracy = percent(mean_accuracy(group))
    if group.first.regression:
        return (
            f"{name} explains {accuracy} of the variance of test labels, the mean over "
            f"{group.over_sites}."
        )
    rows = "the test rows of all domains" if domains.has_domains(group) else "the test rows"
    return f"{name} predicts {accuracy} of {rows} correctly, the mean over {group.over_sites}."


def _lost(group: Group) -> float:
    """Forgetting of the headline model, or of the first other model if it has no old tasks."""
    for variant in (group.first.headline, *group.first.variants):
        results = [run.metrics[variant] for run in group.runs if variant in run.metrics]
        values = [result.get("forgetting_best_last", math.nan) for result in results]
        if values and all(map(math.isfinite, values)):
            return sum(values) / len(values)
    return math.nan


def _forgot(group: Group) -> str:
    if not tables.forgets(group):
        return ""
    value = _lost(group)
    if not math.isfinite(value):
        return ""
    verb = "ended" if _ended(group) else "are"
    words = (
        f"Earlier tasks {verb} {100 * value:.1f} points below their best {group.first.score_name}."
    )
    return f"{words} {attribution.sentence(group)}".strip()


def _left(group: Group) -> str:
    sent = metrics.bytes_up(group.first.events)
    if not sent:
        return "Nothing has left any site."
    low, high = size(min(sent.values())), size(max(sent.values()))
    amount = low if low == high else f"{low} to {high}"
    verb = "sent" if _ended(group) else "has so far sent"
    return f"Each site {verb} {amount} (seed {group.first.config['seed']})."


def _ended(group: Group) -> bool:
    """Whether every stage of the first run is finished."""
    finished = sum(isinstance(event, Stage) for event in group.first.events)
    return finished >= int(group.first.facts["stages"])


def _checked(group: Group) -> str:
    """Whether a check refuted a fast path during a run."""
    reasons = sorted({words for run in group.runs for words in run.refuted})
    if not reasons:
        return ""
    return (
        f"A check of the engine failed, and the clients were run one by one: {'; '.join(reasons)}."
    )
