"""The first thing on the page: whether joining helps, with the numbers that carry the verdict."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from atoll.core.record import Stage
from atoll.report.answer import Answer, SiteAnswer, answer_of, home_of
from atoll.report.figures import COLOURS, INK, Picture, quiet, style, svg
from atoll.report.tables import ALONE, Cell, Group, Table
from atoll.report.units import DASH, Unit, unit_of

__all__ = [
    "Card",
    "GainPlot",
    "GainRow",
    "card",
    "comparison",
    "gain_figure",
    "gain_plot",
    "picture",
    "site_table",
]

TONES = {"helps": "good", "hurts": "warn", "no difference": "none", "cannot tell": "none"}
SYMBOLS = {"helps": "▲", "hurts": "▼", "no difference": "=", "cannot tell": "?"}
JOINED, SINGLE = "joined", "alone"
POOLED = "pooled"  # trained with the rows, or columns, of all sites in one place
MOST_NAMED = 6  # maximum number of sites that a note names; others are only counted
EDGE = 0.04  # margins at both ends of the axis, as a fraction of it


@dataclass(frozen=True)
class Card:
    """The verdict of one group of runs; without an answer it makes no claim."""

    label: str
    tone: str  # good, warn or none: a colour
    symbol: str  # the same, independent of colour
    headline: str
    words: str
    numbers: tuple[tuple[str, str], ...] = ()  # name, value
    notes: tuple[str, ...] = ()
    command: str = ""  # command that computes a missing verdict


def card(group: Group) -> Card:
    """The verdict card of a group."""
    answer = answer_of(group)
    if answer is not None:
        return _answered(group, answer)
    if group.method == ALONE:
        words = "Each site trains alone in this run, and nothing is exchanged. It is a baseline."
        return Card(group.label, "none", DASH, "Baseline: no site joins another", words)
    finished = sum(isinstance(event, Stage) for event in group.first.events)
    if finished < int(group.first.facts["stages"]):
        words = "The run has not ended. There is a verdict after the last stage."
        return Card(group.label, "none", "…", "No verdict yet", words)
    home = home_of(group)
    where = str(home) if home else " ".join(str(run.folder) for run in group.runs)
    words = (
        "This page makes no claim about joining until the gain over training alone is tested. "
        "This command tests it and writes answer.json; then write the report again:"
    )
    command = f"atoll answer {where}"
    return Card(group.label, "none", "?", "No verdict yet", words, command=command)


def _answered(group: Group, answer: Answer) -> Card:
    overall, unit = answer.overall, _unit(answer)
    tone = TONES[overall.verdict.kind]
    if overall.hurts:
        tone = "warn"
    elif overall.helps:
        tone = "good"
    symbol = {"good": SYMBOLS["helps"], "warn": SYMBOLS["hurts"]}.get(
        tone, SYMBOLS[overall.verdict.kind]
    )
    if overall.helps and overall.hurts:
        symbol = SYMBOLS["helps"] + SYMBOLS["hurts"]
    return Card(
        group.label, tone, symbol, _headline(answer), _sentence(answer, unit),
        tuple(_numbers(answer, unit, _held(group))),
        (*_remarks(answer), *map(_as_sentence, answer.notes)),
    )  # fmt: skip


def _held(group: Group) -> str:
    """What the sites divide: rows or columns."""
    parties = group.first.config["scenario"].get("split") == "parties"
    return "columns" if parties else "rows"


def _unit(answer: Answer) -> Unit:
    return unit_of(answer.metric, answer.margin if answer.regression else math.nan)


def _as_sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:].rstrip('.')}."


def _headline(answer: Answer) -> str:
    overall, count = answer.overall, answer.site_count
    sites = f"{count} site{'s' * (count != 1)}"
    if overall.helps and overall.hurts:
        return f"Joining: helps at {overall.helps} of {sites}, hurts at {overall.hurts}"
    if overall.helps:
        return f"Joining: helps at {overall.helps} of {sites}"
    if overall.hurts:
        return f"Joining: hurts at {overall.hurts} of {sites}"
    return f"Joining: {overall.verdict.kind}"


def _sentence(answer: Answer, unit: Unit) -> str:
    text = answer.overall.verdict.text.rstrip(".").replace(": ", "; ", 1)
    gain = answer.overall.gain
    if gain is None:
        return f"Overall: {text}."
    interval = unit.interval(gain.low, gain.high)
    over = "sites that are not withheld" if answer.withheld else "sites"
    return (
        f"Overall: {text}. The mean gain over {over} is {unit.difference(gain.gain)}, "
        f"with a {100 * answer.level:g} % interval of {interval}."
    )


def _numbers(answer: Answer, unit: Unit, held: str) -> Iterable[tuple[str, str]]:
    """The numbers that the verdict depends on."""
    margin = unit.difference(answer.margin).lstrip("+")
    counts = "smallest gain that counts"
    if answer.regression:
        of = "variance" if answer.metric == "mse" else "standard deviation"
        counts += f", {100 * answer.margin_share:g} % of the label's {of}"
    yield "Margin", f"{margin} ({counts})"
    joined = [site.score(JOINED) for site in answer.sites]
    yield f"{_metric(answer)}, joined", _range(joined, unit)
    guessing = [site.score(answer.references[0]) for site in answer.sites]
    name = "Predicting the mean" if answer.regression else "Chance level (majority class)"
    yield name, _range(guessing, unit)
    shown = [site.beats_linear for site in answer.sites if site.beats_linear is not None]
    if shown:
        count = f"{shown.count(True)} of {len(shown)} site{'s' * (len(shown) != 1)}"
        yield f"Sites where joining is shown to beat their own {answer.references[1]}", count
    pooled = [site.score(POOLED) for site in answer.sites]
    if any(map(math.isfinite, pooled)):
        words = f"only a comparison: in practice {held} may not leave a site"
        yield f"Trained on the {held} of all sites together", f"{_range(pooled, unit)}; {words}"
    if answer.sites:
        smallest = min(answer.sites, key=lambda site: (site.test_rows, site.site))
        rows = f"{smallest.test_rows:,} rows ({smallest.site})"
        classes = [s.smallest_class for s in answer.sites if s.smallest_class is not None]
        rare = f"; rarest class {min(classes):,}" if classes else ""
        yield "Smallest test set", rows + rare
    yield "Compared with", answer.baseline
    seeds = ", ".join(map(str, answer.seeds))
    unit_name = answer.unit.replace("rows", "test rows")
    yield "Unit of the intervals", f"{unit_name}; seed{'s' * (len(answer.seeds) > 1)} {seeds}"


def _metric(answer: Answer) -> str:
    """The name of the metric at the beginning of a sentence."""
    return answer.metric.upper() if answer.regression else answer.metric.capitalize()


def _range(values: Sequence[float], unit: Unit) -> str:
    """The mean, minimum and maximum over sites."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return DASH
    mean = unit.value(sum(finite) / len(finite))
    low, high = unit.bare(min(finite)), unit.bare(max(finite))
    return mean if low == high else f"{mean} (sites: {low} to {high})"


def _remarks(answer: Answer) -> Iterable[str]:
    """Sentences on simple models that do as well, and on sites that are excluded."""
    linear = answer.references[1]
    better = [site.site for site in answer.sites if site.linear_beats]
    as_good = [site.site for site in answer.sites if site.beats_linear is False]
    as_good = [site for site in as_good if site not in better]
    for sites, words in ((better, "beats the joined model"), (as_good, "may do as well")):
        if sites:
            names = ", ".join(sorted(sites)) if len(sites) <= MOST_NAMED else f"{len(sites)} sites"
            yield f"{linear.capitalize()} trained at the site alone {words}: {names}."
    by_reason: dict[str, list[str]] = {}
    for site, reason in sorted(answer.withheld.items()):
        by_reason.setdefault(reason, []).append(site)
    for reason, sites in by_reason.items():
        yield f"Withheld, {reason}: {', '.join(sites)}."


@dataclass(frozen=True)
class Tick:
    """The position of another predictor on the axis of gains."""

    name: str
    place: float  # percent of the width
    text: str
    beyond: bool  # its value lies outside the axis


@dataclass(frozen=True)
class GainRow:
    """One site in the gain plot; positions are in percent of the width."""

    site: str
    rows: str
    gain: str
    interval: str
    kind: str
    symbol: str
    tone: str
    verdict: str
    place: float
    low: float
    high: float
    hover: str
    ticks: tuple[Tick, ...] = ()


@dataclass(frozen=True)
class GainPlot:
    """The gains of all sites on one axis."""

    label: str
    unit: str
    level: str
    axis: tuple[tuple[float, str], ...]  # position, text
    zero: float
    band: tuple[float, float]  # the margin on both sides of 0
    rows: tuple[GainRow, ...]
    withheld: tuple[tuple[str, str], ...] = field(default=())  # site, reason
    references: tuple[str, str] = ("majority", "logistic regression")
    held: str = "rows"  # what the sites divide: rows or columns


@dataclass(frozen=True)
class Axis:
    """A linear axis from `low` to `high`."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """The position in percent of the width, clipped to the axis."""
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)

    def beyond(self, value: float) -> bool:
        """Whether a value lies outside the axis."""
        return not self.low <= value <= self.high

    def ticks(self, unit: Unit) -> tuple[tuple[float, str], ...]:
        """A few round numbers."""
        span = unit.factor * (self.high - self.low)
        step = 10.0 ** math.floor(math.log10(span / 8))
        step *= next(m for m in (1, 2, 5, 10) if span / (m * step) <= 8)
        first = math.ceil(unit.factor * self.low / step)
        last = math.floor(unit.factor * self.high / step)
        values = [number * step for number in range(first, last + 1)]
        return tuple((self.place(v / unit.factor), f"{v:+g}" if v else "0") for v in values)


def _axis(answer: Answer) -> Axis:
    """An axis that includes every interval, 0 and the margin."""
    values = [0.0, answer.margin, -answer.margin]
    for site in answer.sites:
        values += [site.gain.low, site.gain.high, site.gain.gain]
    finite = [value for value in values if math.isfinite(value)]
    room = EDGE * (max(finite) - min(finite)) or 0.01
    return Axis(min(finite) - room, max(finite) + room)


def gain_plot(group: Group) -> GainPlot | None:
    """The gain of each site, the largest first; None without an answer."""
    answer = answer_of(group)
    if answer is None or not answer.sites:
        return None
    unit, axis = _unit(answer), _axis(answer)
    return GainPlot(
        group.label,
        (unit.difference_name.strip() or _metric(answer)),
        f"{100 * answer.level:g} %",
        axis.ticks(unit),
        axis.place(0.0),
        (axis.place(-answer.margin), axis.place(answer.margin)),
        tuple(_gain_row(site, axis, unit, answer) for site in answer.sites),
        tuple(sorted(answer.withheld.items())),
        answer.references,
        _held(group),
    )


def _gain_row(site: SiteAnswer, axis: Axis, unit: Unit, answer: Answer) -> GainRow:
    gain = site.gain
    hover = f"{site.site}: {unit.difference(gain.gain)}, {unit.interval(gain.low, gain.high)}"
    if site.unadjusted:
        hover += f"; unadjusted {unit.interval(*site.unadjusted)}"
    finite = math.isfinite(gain.low) and math.isfinite(gain.high)
    return GainRow(
        site.site,
        f"{site.test_rows:,} test rows",
        unit.signed(gain.gain),
        unit.interval(gain.low, gain.high),
        site.verdict.kind,
        SYMBOLS[site.verdict.kind],
        TONES[site.verdict.kind],
        site.verdict.text,
        axis.place(gain.gain) if math.isfinite(gain.gain) else axis.place(0.0),
        axis.place(gain.low) if finite else axis.place(gain.gain),
        axis.place(gain.high) if finite else axis.place(gain.gain),
        hover,
        tuple(_ticks(site, axis, unit, answer)),
    )


def _over_alone(site: SiteAnswer, name: str, lower: bool) -> float:
    """How much better a predictor is than training alone."""
    difference = site.score(name) - site.score(SINGLE)
    return 0.0 - difference if lower else difference


def _ticks(site: SiteAnswer, axis: Axis, unit: Unit, answer: Answer) -> Iterable[Tick]:
    for name in (*answer.references, POOLED):
        value = _over_alone(site, name, answer.lower_is_better)
        if math.isfinite(value):
            text = f"{name}: {unit.value(site.score(name))}, {unit.difference(value)} over alone"
            yield Tick(name, axis.place(value), text, axis.beyond(value))


def _p_value(p: float) -> str:
    if not math.isfinite(p):
        return DASH
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def site_table(group: Group) -> Table | None:
    """Every score and interval of the answer, site by site."""
    answer = answer_of(group)
    if answer is None:
        return None
    unit = _unit(answer)
    names = list(dict.fromkeys(name for site in answer.sites for name in site.scores))
    of_values, of_gains = unit.value_name.strip(), unit.difference_name.strip()
    scores = [f"{name}, {of_values}" if of_values else name for name in names]
    gains = [f"{name}, {of_gains}" if of_gains else name
             for name in ("gain", "interval", "unadjusted interval")]  # fmt: skip
    rows = []
    for site in answer.sites:
        alone = unit.interval(*site.unadjusted) if site.unadjusted else DASH
        values = [site.score(name) for name in names]
        rows.append((
            Cell(site.site), Cell(f"{site.test_rows:,}", site.test_rows),
            *(Cell(unit.bare(value), value) for value in values),
            Cell(unit.signed(site.gain.gain), site.gain.gain),
            Cell(unit.interval(site.gain.low, site.gain.high), site.gain.low),
            Cell(alone, site.unadjusted[0] if site.unadjusted else math.nan),
            Cell(_p_value(site.gain.p), site.gain.p),
            Cell("; ".join([site.verdict.text, *site.remarks])),
        ))  # fmt: skip
    header = ("site", "test rows", *scores, *gains, "p-value", "verdict")
    undefined = [Cell(DASH, math.nan)] * (len(header) - 2)
    for name, reason in sorted(answer.withheld.items()):
        rows.append((Cell(name), *undefined, Cell(f"withheld: {reason}")))
    caption = (
        f"{_metric(answer)} on the same test rows. The interval holds for all sites "
        f"together at {100 * answer.level:g} %, and the verdict uses it; the unadjusted one holds "
        "for one site. Row counts may be rounded."
    )
    return Table(caption, header, tuple(rows))


def comparison(groups: Sequence[Group]) -> Table | None:
    """Runs of the same task side by side; None if fewer than two have an answer."""
    answers = [(group, answer_of(group)) for group in groups]
    complete = [(group, answer) for group, answer in answers if answer is not None]
    if len(complete) < 2 or len({answer.metric for _, answer in complete}) > 1:
        return None
    unit = _unit(complete[0][1])
    rows = []
    for group, answer in complete:
        gain = answer.overall.gain
        joined = [site.score(JOINED) for site in answer.sites]
        rows.append((
            Cell(group.label), Cell(_range(joined, unit)),
            Cell(unit.difference(gain.gain) if gain else DASH, gain.gain if gain else math.nan),
            Cell(unit.interval(gain.low, gain.high) if gain else DASH),
            Cell(f"{answer.overall.helps} of {answer.site_count}", answer.overall.helps),
            Cell(f"{answer.overall.hurts} of {answer.site_count}", answer.overall.hurts),
            Cell(answer.overall.verdict.text),
        ))  # fmt: skip
    header = ("run", f"{complete[0][1].metric}, joined", "mean gain", "interval",
              "helps at", "hurts at", "overall")  # fmt: skip
    caption = (
        "The same data and split. Each gain is against the run's own baseline; the table does not "
        "test one run against another."
    )
    if any(answer.withheld for _, answer in complete):
        caption += " Means leave out withheld sites."
    return Table(caption, header, tuple(rows))


def gain_figure(group: Group, name: str = "gain") -> Figure | None:
    """The gain plot as a Matplotlib figure; None without an answer."""
    answer = answer_of(group)
    if answer is None or not answer.sites:
        return None
    unit = _unit(answer)
    with style(name):
        figure = Figure(figsize=(6.4, 0.9 + 0.34 * len(answer.sites)))
        axes = figure.add_subplot()
        quiet(axes)
        margin = unit.factor * answer.margin
        axes.axvspan(-margin, margin, color=INK, alpha=0.06, linewidth=0)
        axes.axvline(0, color=INK, alpha=0.6, linewidth=1)
        for place, site in enumerate(answer.sites):
            _draw_gain(axes, place, site, unit, answer)
        names = [f"{SYMBOLS[s.verdict.kind]} {s.site} ({s.test_rows:,})" for s in answer.sites]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel(
            f"gain over training alone, {unit.difference_name.strip() or _metric(answer)}"
        )
    return figure


def _draw_gain(axes: Axes, place: int, site: SiteAnswer, unit: Unit, answer: Answer) -> None:
    """Draw one site: its gain, the interval, and the references."""
    colours = {"good": COLOURS[2], "warn": COLOURS[1], "none": COLOURS[6]}
    gain, colour = site.gain, colours[TONES[site.verdict.kind]]
    limits = [unit.factor * gain.low, unit.factor * gain.high]
    axes.plot(limits, [place, place], color=colour, linewidth=2.5)
    axes.plot([unit.factor * gain.gain], [place], "o", color=colour, markersize=7)
    for reference, mark in zip((*answer.references, POOLED), ("|", "x", "^"), strict=True):
        value = _over_alone(site, reference, answer.lower_is_better)
        if math.isfinite(value):
            axes.plot([unit.factor * value], [place], mark, color=INK, markersize=7)


def picture(group: Group, name: str) -> Picture | None:
    """The gain plot as a figure for a file."""
    figure, answer = gain_figure(group, name), answer_of(group)
    if figure is None or answer is None:
        return None
    guess, linear = answer.references
    guess = guess if answer.regression else "majority class"
    words = (
        f"Dot and {100 * answer.level:g} % interval per site, test rows in brackets; | is the "
        f"{guess}, x {linear}, a triangle the {_held(group)} of all sites in one place; the "
        "band is the margin."
    )
    with style(name):
        return Picture(name, f"Gain by site: {group.label}", words, svg(figure, name))
