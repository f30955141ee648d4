"""Records become one HTML page that needs nothing else: no network, no other file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from atoll.core.outputs import may_write
from atoll.core.record import Stage, disk_errors, write_whole
from atoll.metrics import scores as metrics
from atoll.report import attribution, domains, figures, tables, transfer, vertical
from atoll.report.figures import BEGINNING, Picture
from atoll.report.section import Section
from atoll.report.tables import Group, Pair, Table

__all__ = ["page", "pictures", "write"]

TITLE = " · atoll</title>"  # by which a page is known to be a report
SECTIONS = (domains.section, transfer.section, vertical.section)  # for groups of some methods


@dataclass(frozen=True)
class Run:
    """What the page says of one group of runs."""

    label: str
    folder: str
    seeds: str
    config: str
    sites: Table
    holdings: Table | None
    departures: list[tables.Departure]
    exclusions: list[str]
    pictures: list[Picture]
    sections: list[Section]


def write(folders: Sequence[Path], out: Path, figure_folder: Path | None = None) -> Path:
    """Write the page of some runs, and its figures as files where a folder for them is given."""
    groups = tables.gather(folders)
    may_write(out, [], folders, lambda head: TITLE.encode() in head)
    if figure_folder:
        with disk_errors(figure_folder):
            figure_folder.mkdir(parents=True, exist_ok=True)
        drawings = {figure_folder / f"{one.name}.svg": one.svg for one in pictures(groups)}
        drawn = BEGINNING.encode()
        for path in drawings:
            may_write(path, [], folders, lambda head: head.startswith(drawn), "--figures")
        for path, content in drawings.items():
            write_whole(path, content.replace("currentColor", "#1d2733").encode())
    write_whole(out, page(groups).encode())
    return out


def page(groups: Sequence[Group]) -> str:
    """The page: a pure function of the records."""
    source = (files("atoll") / "report" / "page.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = lambda picture: Markup(picture.svg)  # made here
    gained = tables.gains(groups)
    return environment.from_string(source).render(
        title=_title(groups),
        tiles=_tiles(groups, gained),
        summary=_summary(groups, gained),
        results=tables.results(groups),
        differences=tables.differences(groups),
        forgetting=tables.forgetting(groups),
        attributed=[_attributed(number, group) for number, group in enumerate(groups, 1)],
        traffic=tables.traffic(groups),
        lead=_lead(groups, gained),
        runs=[_run(number, group, gained) for number, group in enumerate(groups, 1)],
        definitions=metrics.DEFINITIONS,
        facts=groups[0].first.facts,
    )


def pictures(groups: Sequence[Group]) -> list[Picture]:
    """Every figure of the page."""
    drawn = _lead(groups, tables.gains(groups))
    for number, group in enumerate(groups, 1):
        drawn += _pictures(number, group) + _attributed(number, group).pictures
        drawn += [p for section in _sections(number, group) for p in section.pictures]
    return drawn


def _lead(groups: Sequence[Group], gained: dict[str, Pair]) -> list[Picture]:
    """The figures at the top: what each site gained, and the curves."""
    drawn = [
        figures.gain(group, gained[group.label], f"gain-{number}")
        for number, group in enumerate(groups, 1)
        if group.label in gained
    ]
    shared = figures.curves(groups, "curves")
    drawn += [shared] if shared else []
    return drawn + domains.overall(groups) + vertical.overall(groups)


def _pictures(number: int, group: Group) -> list[Picture]:
    drawn = [figures.heat(group, f"accuracy-{number}"), figures.rows(group, f"rows-{number}")]
    return [picture for picture in drawn if picture]


def _attributed(number: int, group: Group) -> Section:
    """Whose doing forgetting is, or why that is not known."""
    table = attribution.table(group) if int(group.first.facts["stages"]) > 1 else None
    if table is None:
        return Section(group.label, _unattributed(group))
    picture = attribution.picture(group, f"attribution-{number}")
    return Section(group.label, attribution.sentence(group), [picture] if picture else [], [table])


def _unattributed(group: Group) -> str:
    if int(group.first.facts["stages"]) < 2:
        return ""
    if group.first.config["scenario"].get("split") == "parties":
        return (
            "All sites train one network together in every step, so no training belongs to "
            "one site alone."
        )
    return (
        "Not in the record of this run: with attribution = true a run also tests models before and "
        "after own training."
    )


def _sections(number: int, group: Group) -> list[Section]:
    sections = [section(group, number) for section in SECTIONS]
    return [section for section in sections if section is not None]


def _run(number: int, group: Group, gained: dict[str, Pair]) -> Run:
    path = group.first.folder / "config.toml"
    config = (group.first.integrity.read(path) or b"").decode(errors="replace")
    return Run(
        group.label,
        str(group.first.folder),
        ", ".join(str(run.config["seed"]) for run in group.runs),
        config,
        tables.sites(group, gained.get(group.label)),
        tables.holdings(group),
        tables.departures(group.first),
        group.first.exclusions,
        _pictures(number, group),
        _sections(number, group),
    )


def _title(groups: Sequence[Group]) -> str:
    names = ", ".join(dict.fromkeys(group.method for group in groups))
    data = ", ".join(dict.fromkeys(str(g.first.facts["data"]["title"]) for g in groups))
    return f"{names} on {data}"


def _tiles(groups: Sequence[Group], gained: dict[str, Pair]) -> list[tuple[str, str]]:
    """The few numbers at the top, of the first run that is not a baseline."""
    group = next((g for g in groups if g.label in gained), groups[0])
    tiles = [(f"{len(group.first.facts['clients'])}", "sites")]
    accuracy = _accuracy(group)
    if math.isfinite(accuracy):
        tiles.append((_percent(accuracy), f"test rows right, {group.title(group.first.headline)}"))
    if group.label in gained:
        mean = tables.number(gained[group.label].seeds).value
        tiles.append((f"{100 * (mean or 0):+.1f} points", "mean gain over being alone"))
    lost = _lost(group)
    if math.isfinite(lost):
        tiles.append((f"{100 * lost:.1f} points", "forgotten (best to last)"))
    sent = metrics.bytes_up(group.first.events)
    if sent:
        tiles.append((tables.size(max(sent.values())), "left a site at most"))
    return tiles


def _lost(group: Group) -> float:
    """What was forgotten, by the headline; by the first other model where it has no old tasks."""
    if int(group.first.facts["stages"]) < 2:
        return math.nan
    for variant in [group.first.headline, *group.first.variants]:
        results = [run.metrics.get(variant, {}) for run in group.runs]
        values = [one.get("forgetting_best_last", math.nan) for one in results]
        if values and all(map(math.isfinite, values)):
            return sum(values) / len(values)
    return math.nan


def _accuracy(group: Group) -> float:
    accuracies = [run.accuracy for run in group.runs if run.variants]
    return sum(accuracies) / len(accuracies) if accuracies else math.nan


def _points(share: float) -> float:
    """A difference in points as it is printed, without a negative zero."""
    return round(100 * share, 1) + 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _summary(groups: Sequence[Group], gained: dict[str, Pair]) -> list[str]:
    """What was run and found, in sentences."""
    paragraphs = []
    for group in groups:
        words = [_ran(group), _scored(group), _gained(group, gained), _forgot(group), _left(group)]
        words.append(_checked(group))
        paragraphs.append(" ".join(word for word in words if word))
    return paragraphs


def _ran(group: Group) -> str:
    facts, seeds = group.first.facts, len(group.runs)
    stages = f" in {facts['stages']} stages" if facts["stages"] > 1 else ""
    past = sum(isinstance(event, Stage) for event in group.first.events)
    words = (
        f"{group.label} ran on {facts['data']['title']} at {len(facts['clients'])} sites{stages}, "
        f"with {seeds} seed{'s' * (seeds > 1)}."
    )
    if past < facts["stages"]:
        words += f" The run has not ended: {past} of {facts['stages']} stages are done."
    return words


def _scored(group: Group) -> str:
    if not group.first.variants:
        return "It has not been tested yet."
    headline = group.first.headline
    name = f"Its model {headline}" if headline else "Its model"
    return f"{name} is right on {_percent(_accuracy(group))} of the test rows, the mean over sites."


def _gained(group: Group, gained: dict[str, Pair]) -> str:
    if group.method == tables.ALONE:
        return "No site learned from another: this is the yardstick."
    if group.label not in gained:
        return (
            "What the sites gained over being alone is not known from these runs: report it "
            "together with a run of the method alone on the same data, scenario and seed."
        )
    pair = gained[group.label]
    clients = {c: d for c, d in pair.clients.items() if math.isfinite(d)}
    if not clients:
        return ""
    best, worst = max(clients, key=lambda c: clients[c]), min(clients, key=lambda c: clients[c])
    mean = _points(sum(clients.values()) / len(clients))
    lost = sum(_points(difference) < 0 for difference in clients.values())
    words = (
        f"Against {pair.against}, which each site trains by itself, sites "
        f"{'lost' if mean < 0 else 'gained'} {abs(mean):.1f} points on average: from "
        f"{_points(clients[worst]):+.1f} ({worst}) to {_points(clients[best]):+.1f} ({best})."
    )
    ends = ["No site lost.", "One site lost."]
    caution = _caution(group) + tables.unpaired_note(pair)
    return f"{words} {ends[lost] if lost < 2 else f'{lost} sites lost.'}{caution}"


def _caution(group: Group) -> str:
    if len(group.runs) > 1:
        return ""
    return " This is one seed: differences this size may come from the draw of rows and weights."


def _forgot(group: Group) -> str:
    if group.first.facts["stages"] < 2:
        return "There was one stage, so nothing could be forgotten."
    value = _lost(group)
    if not math.isfinite(value):
        return ""
    words = f"Earlier tasks ended {100 * value:.1f} points below their best accuracy."
    return f"{words} {attribution.sentence(group)}".strip()


def _left(group: Group) -> str:
    sent = metrics.bytes_up(group.first.events)
    if not sent:
        return "Nothing has left any site."
    low, high = tables.size(min(sent.values())), tables.size(max(sent.values()))
    amount = low if low == high else f"{low} to {high}"
    return f"Each site sent {amount} (seed {group.first.config['seed']}); see below what it was."


def _checked(group: Group) -> str:
    """Whether a fast path was found wrong while a run went on."""
    reasons = sorted({words for run in group.runs for words in run.refuted})
    if not reasons:
        return ""
    return (
        f"A check of the engine failed, and the clients were run one by one: {'; '.join(reasons)}."
    )
