"""What left each site, from the ledger of messages: in words, and as a flow to the server."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path as Outline

from atoll.core.record import Message
from atoll.report.figures import COLOURS, INK, SIZE, Picture, style, svg
from atoll.report.tables import names_of
from atoll.report.units import size
from atoll.runs.result import Run

__all__ = [
    "Departure",
    "Merged",
    "before_training",
    "departures",
    "flow",
    "guarantee",
    "merged",
]

SERVER = "server"
Tensor = tuple[str, str, tuple[int, ...]]  # name, type, shape
FIELDS: Mapping[str, str] = {  # by the message field of the tensor
    "weights": "weights", "base": "weights", "own": "weights", "adaptive": "weights",
    "channels": "weights", "embedding": "embeddings", "before": "embeddings",
    "centres": "embeddings", "prototypes": "embeddings", "logits": "logits",
    "gradient": "gradients", "labels": "labels", "y": "labels",
}  # fmt: skip
PLAIN, OTHER = "headers and plain values", "other tensors"
KINDS: Mapping[str, str] = {
    "weights": COLOURS[0], "embeddings": COLOURS[1], "logits": COLOURS[5], "gradients": COLOURS[2],
    "labels": COLOURS[4], OTHER: COLOURS[3], PLAIN: COLOURS[6],
}  # fmt: skip
MOST = 12  # bands of a flow; smaller ones are merged


@dataclass(frozen=True)
class Departure:
    """What left one site, from the ledger of one run."""

    client: str
    count: int  # number of messages
    bytes: int
    payload: int  # bytes of tensors
    tensors: tuple[Tensor, ...]
    strange: tuple[Tensor, ...]  # tensors of a form that the server had not sent to this site
    kinds: tuple[str, ...]  # of message
    plain_each: float  # maximum bytes of a message besides its tensors
    by_kind: Mapping[str, float]  # content type -> bytes
    before: str  # what sites disclose to each other before training

    @property
    def sentence(self) -> str:
        """Describe it in words."""
        first = f"{self.count} messages, {size(self.bytes)}."
        return f"{first} {self.details}{self.before}"

    @property
    def details(self) -> str:
        """Describe the content of the messages."""
        rest = (
            f"{size(self.bytes - self.payload)} were headers and plain values (numbers such as "
            f"losses, counts of rows and hits), at most {self.plain_each:.0f} bytes a message; "
            f"kinds of message: {', '.join(self.kinds)}."
        )
        if not self.tensors:
            return f"No tensor at all: only headers and plain values. {rest}"
        listed = f"{size(self.payload)} of this are tensors: {_shapes(self.tensors)}."
        return f"{listed} {self._origin} {rest}"

    @property
    def _origin(self) -> str:
        if self.strange:
            return (
                f"The server had sent no tensor like these to this site: {_shapes(self.strange)}."
            )
        all_weights = all(_kind(tensor) == "weights" for tensor in self.tensors)
        what = "weights of the shared model, as the site trained them. " if all_weights else ""
        return (
            "Each has the name, type and shape of a tensor that the server had sent to this site"
            f"{': ' if what else '. '}{what}No other tensor left: no table of rows, no list of "
            "labels."
        )


def departures(run: Run) -> list[Departure]:
    """For each site what it sent, as far as the ledger shows it."""
    ledger = [event for event in run.events if isinstance(event, Message)]
    clients = sorted({event.sender for event in ledger} - {SERVER})
    before = before_training(run)
    return [_departure(client, ledger, f" {before}" if before else "") for client in clients]


def before_training(run: Run) -> str:
    """What sites with own tables disclose to each other before the first message, if they do."""
    sites = run.recipe.get("sites", {})
    own = {place for site in sites.values() for place in site.get("own", ())}
    blocks = [block for block in run.recipe.get("blocks", ()) if not block["site"]]
    common = [block for block in blocks if block["start"] not in own]
    if not common or len(sites) < 2:
        return ""
    names = list(dict.fromkeys(block["column"] for block in common))
    texts = list(dict.fromkeys(block["column"] for block in common if block["levels"]))
    levels = f", and each level (value) of the text columns {names_of(texts)}" if texts else ""
    separator = "," if texts else ", and"
    label = f"the names of the {len(run.recipe['classes'])} classes"
    if run.regression:
        label = "that the label is a number"
    return (
        f"Before training, so that the tables agree, sites tell each other the names and types of "
        f"the common columns ({names_of(names)}){separator} {label}{levels}."
    )


def _departure(client: str, ledger: Sequence[Message], before: str) -> Departure:
    sent = [event for event in ledger if event.sender == client]
    received = {shape for event in ledger if event.receiver == client for shape in event.tensors}
    tensors = sorted({shape for event in sent for shape in event.tensors})
    return Departure(
        client,
        sum(event.count for event in sent),
        sum(event.bytes for event in sent),
        sum(event.payload for event in sent),
        tuple(tensors),
        tuple(shape for shape in tensors if shape not in received),
        tuple(sorted({event.kind for event in sent})),
        max((event.bytes - event.payload) / max(1, event.count) for event in sent),
        _by_kind(sent),
        before,
    )


def _by_kind(sent: Sequence[Message]) -> dict[str, float]:
    """Bytes by content type; the tensors of a message share its payload by size."""
    totals = dict.fromkeys(KINDS, 0.0)
    for event in sent:
        sizes = [_width(kind) * math.prod(shape) for _, kind, shape in event.tensors]
        for tensor, count in zip(event.tensors, sizes, strict=True):
            totals[_kind(tensor)] += event.payload * count / max(1, sum(sizes))
        totals[PLAIN] += event.bytes - (event.payload if sum(sizes) else 0)
    return {kind: total for kind, total in totals.items() if total > 0}


def _kind(tensor: Tensor) -> str:
    """The content type of a tensor, from its message field."""
    return FIELDS.get(tensor[0].split("/", 1)[0], OTHER)


def _width(kind: str) -> int:
    """Bytes per element of a type such as float32 or int64."""
    digits = "".join(letter for letter in kind if letter.isdigit())
    return max(1, int(digits or 8) // 8)


def _shapes(tensors: Sequence[Tensor], most: int = 12) -> str:
    sides: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for name, kind, shape in tensors:  # merge tensors that differ only in rows
        sides.setdefault((name, kind, shape[1:]), []).extend(shape[:1])
    listed = []
    for (name, _, rest), rows in sides.items():
        first = [f"{min(rows)} to {max(rows)}" if len(rows) > 1 else f"{rows[0]}"] if rows else []
        listed.append(f"{name} ({' x '.join([*first, *map(str, rest)]) or 'one number'})")
    return names_of(listed, most)


@dataclass(frozen=True)
class Merged:
    """Sites that sent the same kinds of messages and tensors."""

    sites: tuple[str, ...]
    departure: Departure  # departure of the first site, representing all
    low: int  # minimum bytes sent by a site
    high: int
    total: Mapping[str, float]  # content type -> bytes of all sites together

    @property
    def title(self) -> str:
        """The names of the sites."""
        count = f" ({len(self.sites)} sites)" if len(self.sites) > 1 else ""
        return f"{names_of(self.sites, 6)}{count}"

    @property
    def amount(self) -> str:
        """How many bytes left each site."""
        low, high = size(self.low), size(self.high)
        each = " per site" if len(self.sites) > 1 else ""
        return (low if low == high else f"{low} to {high}") + each

    @property
    def sentence(self) -> str:
        """Describe once what left each site."""
        example = f" At {self.sites[0]}: " if self.low != self.high else " "
        return f"{self.departure.count} messages, {self.amount}.{example}{self.departure.details}"


def merged(every: Sequence[Departure]) -> list[Merged]:
    """Merge sites that sent the same."""
    alike: dict[Any, list[Departure]] = {}
    for one in every:
        alike.setdefault((one.count, one.kinds, one.tensors, one.strange), []).append(one)
    groups = []
    for members in alike.values():
        kinds = [kind for kind in KINDS if any(kind in one.by_kind for one in members)]
        total = {kind: sum(one.by_kind.get(kind, 0.0) for one in members) for kind in kinds}
        sizes = [member.bytes for member in members]
        sites = tuple(one.client for one in members)
        groups.append(Merged(sites, members[0], min(sizes), max(sizes), total))
    return sorted(groups, key=lambda group: (-sum(group.total.values()), group.sites))


def guarantee(groups: Sequence[Merged]) -> str:
    """The guarantee for tensors that left: none; empty if no tensor left."""
    kinds = [kind for kind in KINDS if any(kind in group.total for group in groups)]
    tensors = [kind for kind in kinds if kind != PLAIN]
    if not tensors:
        return ""
    return (
        f"What left ({', '.join(tensors)}) depends on the rows of the sites, so whoever receives "
        "it may learn about them: atoll adds no differential privacy and no secure aggregation, "
        "and there is no privacy guarantee. docs/privacy.md says what can be learned."
    )


@dataclass(frozen=True)
class _Band:
    """One ribbon group of a flow."""

    label: str
    kinds: Mapping[str, float]

    @property
    def bytes(self) -> float:
        """All kinds together."""
        return sum(self.kinds.values())


def _bands(groups: Sequence[Merged]) -> list[_Band]:
    """The largest groups; the others are merged."""
    shown = groups if len(groups) <= MOST else groups[: MOST - 1]
    bands = [_Band(f"{_short(group)}\n{group.amount}", group.total) for group in shown]
    rest = groups[len(shown) :]
    if rest:
        kinds = [kind for kind in KINDS if any(kind in group.total for group in rest)]
        total = {kind: sum(group.total.get(kind, 0.0) for group in rest) for kind in kinds}
        count = sum(len(group.sites) for group in rest)
        bands.append(_Band(f"{count} more sites\n{size(sum(total.values()))} in all", total))
    return bands


def _short(group: Merged) -> str:
    if len(group.sites) > 3:
        return f"{len(group.sites)} sites"
    return ", ".join(group.sites)


GAP, TALL, THIN = 0.06, 1.0, 0.004  # of the height of the flow


def flow(run: Run, label: str, name: str) -> Picture | None:
    """Ribbons from sites to the server: width is bytes, colour is content type."""
    groups = merged(departures(run))
    if not groups:
        return None
    bands = _bands(groups)
    every = sum(band.bytes for band in bands)
    kinds = [kind for kind in KINDS if any(kind in band.kinds for band in bands)]
    with style(name):
        figure = Figure(figsize=(4.3, max(1.6, 0.9 + 0.42 * len(bands))))
        axes = figure.add_axes((0.3, 0.02, 0.58, 0.8))
        titles = _ribbons(axes, bands, every)
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        handles = []
        for kind in kinds:
            share = sum(band.kinds.get(kind, 0.0) for band in bands) / every
            handles.append(Patch(color=KINDS[kind], label=f"{kind} {_share(share)}"))
        figure.legend(handles=handles, loc="upper left", ncols=2, fontsize=SIZE - 1,
                      bbox_to_anchor=(0, 1.12), handlelength=1.1)  # fmt: skip
        shares = ", ".join(str(handle.get_label()) for handle in handles)
        words = f"{size(every)} in all: {shares}. The width of a band is its number of bytes."
        return Picture(name, f"From sites to the server: {label}", words, svg(figure, name, titles))


def _share(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "under 1 %"


def _ribbons(axes: Axes, bands: Sequence[_Band], every: float) -> dict[str, str]:
    """Draw all bands; returns the hover text of each ribbon."""
    titles: dict[str, str] = {}
    total = TALL + GAP * (len(bands) - 1)
    left, right = 0.0, (total - TALL) / 2
    axes.add_patch(Rectangle((0.97, right), 0.03, TALL, color=INK, alpha=0.75, linewidth=0))
    axes.text(1.03, right + TALL / 2, "server", va="center", ha="left", weight="bold")
    for number, band in enumerate(bands):
        tall = TALL * band.bytes / every
        axes.text(-0.03, left + tall / 2, band.label, va="center", ha="right", fontsize=SIZE - 0.5)
        for kind, count in band.kinds.items():
            high = TALL * count / every
            id = f"band-{number}-{list(KINDS).index(kind)}"
            ribbon = _ribbon(left, right, max(high, THIN), KINDS[kind])
            ribbon.set_gid(id)
            axes.add_patch(ribbon)
            titles[id] = f"{band.label.splitlines()[0]}: {kind}, {size(count)}"
            left += high
            right += high
        left += GAP
    axes.set_ylim(total + 0.02, -0.02)
    return titles


def _ribbon(left: float, right: float, high: float, colour: str) -> PathPatch:
    """A band of constant height from the left edge to the right one."""
    points = [
        (0.0, left), (0.45, left), (0.5, right), (0.97, right),
        (0.97, right + high), (0.5, right + high), (0.45, left + high), (0.0, left + high),
        (0.0, left),
    ]  # fmt: skip
    curve = [Outline.CURVE4] * 3
    codes = [Outline.MOVETO, *curve, Outline.LINETO, *curve, Outline.CLOSEPOLY]
    return PathPatch(Outline(points, codes), facecolor=colour, linewidth=0, alpha=0.85)
