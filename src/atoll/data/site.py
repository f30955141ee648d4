"""A site: all that one part of a method may see."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.federation import Moment
from atoll.core.messages import Checked
from atoll.core.record import Snapshot
from atoll.core.rng import Stream
from atoll.core.rows import Public, Rows
from atoll.data.dataset import Dataset
from atoll.data.scaling import Scale, Target, colours
from atoll.data.scenario import Scenario

__all__ = [
    "AttributionProbe", "Shelf", "Site", "View", "balanced_weights", "filled", "moments",
    "standardised", "varied",
]  # fmt: skip

Array = np.ndarray[Any, Any]
Network = Callable[[tuple[int, ...], int, Stream], nn.Module]  # input shape, classes, initial draw


class Shelf:
    """The data of a run, on the device once, shared by the sites of one process."""

    def __init__(
        self, dataset: Dataset, scale: Scale, train: Array, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Fit the scaling on the training rows alone; `local` is left to each site."""
        self.scale, self.dtype, self.image = scale, dtype, dataset.kind == "image"
        x = torch.from_numpy(np.ascontiguousarray(dataset.x))
        if dataset.kind == "image":
            self.mean, self.deviation = (
                torch.tensor(value, dtype=dtype, device=device)
                for value in colours(scale, x.shape[1])
            )
        elif dataset.kind == "table":
            x = x.to(dtype)
            if scale == "global" and dataset.layout is None:
                x = standardised(x, x[torch.from_numpy(train)])
        self.x = x.to(device)  # images as bytes: four times smaller, and few are taken
        self.train, self.layout, self._weights = train, dataset.layout, dataset.weights
        self.y = torch.from_numpy(dataset.y).to(device)
        self._taken: dict[bytes, Tensor] = {}
        self._changed: tuple[tuple[int, int], Tensor] | None = None  # of the last round
        self.outlines: dict[tuple[Network, tuple[int, ...], bool], nn.Module] = {}

    def inputs(self, rows: Array, columns: Array | None) -> Tensor:
        """Rows and columns of the inputs; a request made before gives the same tensor."""
        key = rows.tobytes() + b"|" + (b"all" if columns is None else columns.tobytes())
        if key not in self._taken:
            inputs = self.x[torch.from_numpy(rows).to(self.x.device)]
            if self.image:
                inputs = self._coloured(inputs)
            if columns is not None:  # of an image: places in the flattened image
                inputs = inputs.flatten(1)[:, torch.from_numpy(columns).to(self.x.device)]
            self._taken[key] = inputs.contiguous()
        return self._taken[key]

    def _coloured(self, images: Tensor) -> Tensor:
        return (images.to(self.dtype) / 255 - self.mean) / self.deviation

    def changed(self, rows: Array, columns: Array, stream: Stream) -> Tensor:
        """Columns of whole images that were moved and mirrored, the same for all who ask.

        `stream` is one for all sites; only what was asked for last is kept.
        """
        key = (stream.key, len(rows))
        if self._changed is None or self._changed[0] != key:
            images = varied(self.x[torch.from_numpy(rows).to(self.x.device)], stream)
            self._changed = (key, self._coloured(images).flatten(1))
        return self._changed[1][:, torch.from_numpy(columns).to(self.x.device)].contiguous()

    def labels(self, rows: Array) -> Tensor:
        """The labels of these rows."""
        return self.y[torch.from_numpy(rows).to(self.y.device)]

    def weights(self, rows: Array) -> Tensor | None:
        """How much each of these rows counts in training; None: all the same."""
        if self._weights is None:
            return None
        return torch.from_numpy(self._weights[rows]).to(self.x.device, self.dtype)


def varied(images: Tensor, stream: Stream) -> Tensor:
    """Images moved by up to an eighth of their sides, every other one mirrored; black comes in."""
    draws, (rows, _, height, width) = stream.numpy(), images.shape
    most = (height // 8, width // 8)
    down, right = (torch.from_numpy(draws.integers(0, 2 * m + 1, rows)) for m in most)
    mirrored = torch.from_numpy(draws.random(rows) < 0.5).to(images.device)
    images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    padded = nn.functional.pad(images, (most[1], most[1], most[0], most[0]))
    i, j = (
        (torch.arange(size) + by[:, None]).to(images.device)
        for size, by in ((height, down), (width, right))
    )
    place = torch.arange(rows, device=images.device)
    crops: Tensor = padded[place[:, None, None], :, i[:, :, None], j[:, None, :]]
    return crops.permute(0, 3, 1, 2)


def standardised(x: Tensor, fit: Tensor) -> Tensor:
    """Columns with the mean 0 and deviation 1 that they have in `fit`; constant ones are left.

    Values that are missing (NaN) count nothing and stay missing.
    """
    if not len(fit):
        return x
    mean, deviation = moments(fit)
    return ((x - mean) / deviation).to(x.dtype)


def balanced_weights(y: Tensor, classes: int) -> Tensor:
    """rows / (classes that occur * rows of the class), as scikit-learn; 1 for absent classes."""
    counts = torch.bincount(y, minlength=classes).double()
    present = counts > 0
    return torch.where(present, len(y) / (present.sum() * counts.clamp(min=1)), 1.0)


def moments(fit: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of columns, NaN left out; 0 and 1 for constant ones."""
    deviation, mean = torch.std_mean(fit.double(), 0, correction=0)
    if bool(torch.isnan(mean).any()):
        mean = fit.double().nanmean(0)
        deviation = (fit.double() - mean).square().nanmean(0).sqrt()
        mean, deviation = mean.nan_to_num(0.0), deviation.nan_to_num(0.0)
    moving = deviation > 0
    return torch.where(moving, mean, 0), torch.where(moving, deviation, 1)


def _fitted(fit: Tensor, moved: Tensor) -> Tensor:
    """Fill, mean and deviation of columns, NaN left out; 0 and 1 for those that are not `moved`."""
    valid = ~torch.isnan(fit)
    count = valid.sum(0).clamp(min=1)
    values = torch.where(valid, fit, 0).double()
    mean = values.sum(0) / count
    deviation = ((torch.where(valid, values - mean, 0) ** 2).sum(0) / count).sqrt()
    deviation = torch.where(moved & (deviation > 0), deviation, 1)
    return torch.stack([mean, torch.where(moved, mean, 0), deviation])


def filled(x: Tensor, scaling: Tensor) -> Tensor:
    """Columns with their missing values filled in, scaled."""
    fill, mean, deviation = scaling
    whole = torch.where(torch.isnan(x), fill, x.double())
    moved: Tensor = (whole - mean) / deviation
    return moved.to(x.dtype)


@dataclass
class AttributionProbe:
    """Snapshots of the models at the sites of one process since the last collection."""

    enabled: bool = False
    seen: list[Snapshot] = field(default_factory=list)

    def collect(self) -> list[Snapshot]:
        """The snapshots since the last call."""
        snapshots, self.seen = self.seen, []
        return snapshots


@dataclass(frozen=True)
class View:
    """What the sites of both kinds are made of: a participant, the data, and the run's seed."""

    id: str
    shelf: Shelf
    dataset: Dataset
    scenario: Scenario
    seed: int
    balanced: bool = False  # whether training rows count inversely to the size of their class

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input of the data set."""
        return tuple(self.dataset.x.shape[1:])

    def stream(self, *names: str | int | Moment) -> Stream:
        """A random stream of this site; a moment stands for its stage and round."""
        flat: list[str | int] = []
        for name in names:
            flat.extend((name.stage, name.round) if isinstance(name, Moment) else (name,))
        return Stream.of(self.seed, self.id, *flat)


class Site:
    """What a participant with rows of its own may see: data, networks, random streams, device.

    `VerticalSite` is for participants that hold columns of the same rows.
    """

    def __init__(
        self,
        view: View,
        network: Network,
        *,
        special: Network | None = None,
        public: Callable[[], Public] | None = None,
        probe: AttributionProbe | None = None,
        metric: Any = "accuracy",
    ) -> None:
        """Store references; data is copied on first use.

        `special` is this site's own kind of network, where sites have different ones; `metric` is
        what models are selected by on validation rows.
        """
        self.metric = metric
        self._shelf, self._scenario, self._seed = view.shelf, view.scenario, view.seed
        self._special, self._public = special or network, public
        self._probe = probe or AttributionProbe()
        self._network, self._shape, self.stream = network, view.shape, view.stream
        self.id, self.classes, self.clients = view.id, view.dataset.classes, view.scenario.clients
        self.device, self.dtype = view.shelf.x.device, view.shelf.dtype
        self._table, self._balanced = view.dataset.kind == "table", view.balanced
        self.regression = view.dataset.regression
        self._kept: dict[tuple[str, int], Rows] = {}

    def train(self, stage: int) -> Rows:
        """The training rows of a stage."""
        return self._rows("train", stage)

    def before(self, stage: int) -> Rows:
        """The training rows before the first round: those of the stage, unless drawn anew."""
        return self._rows("before", stage)

    def valid(self, stage: int) -> Rows:
        """The validation rows of a stage."""
        return self._rows("valid", stage)

    def test(self, task: int) -> Rows:
        """The test rows of a task."""
        return self._rows("test", task)

    def inputs(self, own: bool = False, stage: int = 0) -> tuple[int, ...]:
        """The shape of a row: the common columns, with `own` this site's further ones too."""
        if not self._table:
            return self._shape
        further = len(self._scenario.holdings[self.id][stage].own) if own else 0
        return (len(self._scenario.common) + further,)

    def model(self, own: bool = False) -> nn.Module:
        """A network for the common columns, with `own` for this site's further ones too.

        Its first weights depend on the run's seed alone, so all parts have the same; a network
        that also reads own columns is drawn for this site.
        """
        stream = self.stream("model") if own else Stream.of(self._seed, "model")
        model = self._special(self.inputs(own), len(self.classes), stream)
        return model.to(self.device, self.dtype)

    def outline(self, training: bool = True) -> nn.Module:
        """The network of `model()` without weights, made once for all sites that have the same.

        It is to be read, not to be trained: what it computes is a function of weights given to it.
        """
        key = (self._special, self.inputs(), training)
        if key not in self._shelf.outlines:
            self._shelf.outlines[key] = self.model().to("meta").train(training)
        return self._shelf.outlines[key]

    def shared_model(self) -> nn.Module:
        """The network that is the same at all parts, also where each site has its own kind."""
        stream = Stream.of(self._seed, "model")
        model = self._network(self.inputs(), len(self.classes), stream)
        return model.to(self.device, self.dtype)

    def public(self) -> Public:
        """The images without labels that all parts have."""
        if self._public is None:
            raise UserError("no public data here", "public", "give public = { name = ... }")
        return self._public()

    def probe(
        self,
        doing: Literal["own", "others"],
        moment: Moment,
        check: Callable[[int], Checked],
        variant: str = "",
        tasks: Iterable[int] | None = None,
    ) -> None:
        """Where the run asks for it, test the model that the site would use now.

        `doing` says whose doing it is that the model is another than the last time: the site's own
        training, or what it received from others. What is seen stays here, for pictures.
        """
        if not self._probe.enabled:
            return
        chosen = self._scenario.tasks_at(moment.stage) if tasks is None else tasks
        scores = {task: check(task) for task in chosen}
        tested = {task: reply.accuracy(variant) for task, reply in scores.items()}
        tested = {task: value for task, value in tested.items() if math.isfinite(value)}
        values = ((float(moment.round), value) for value in tested.values())
        names, columns = tuple(map(str, tested)), ("round", "accuracy")
        snapshot = Snapshot(moment.stage, self.id, f"after {doing}", names, columns, tuple(values))
        self._probe.seen.append(snapshot)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of what is tested: domains, or tasks of the stages."""
        return self._scenario.tasks

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self._scenario.stages

    def _rows(self, part: str, number: int) -> Rows:
        if (part, number) not in self._kept:
            holdings = self._scenario.holdings[self.id]
            if part == "before" and holdings[number].before is None:
                return self._rows("train", number)
            rows = (
                self._scenario.tests[self.id][number]
                if part == "test"
                else getattr(holdings[number], part)
            )
            holding = holdings[min(number, len(holdings) - 1)]
            scaled = self._scaled(self._taken(rows, holding.own), holding.train)
            if part in ("train", "before"):
                scaled = replace(scaled, share=self._weights(rows, scaled.y))
            self._kept[part, number] = scaled
        return self._kept[part, number]

    def _weights(self, rows: Array, y: Tensor) -> Tensor | None:
        """How much training rows count: by a column of weights, by their class, or by both."""
        weights = self._shelf.weights(rows)
        if not self._balanced or not len(rows):
            return weights
        by_class = balanced_weights(y, len(self.classes)).to(self.dtype)[y]
        return by_class if weights is None else by_class * weights

    def _taken(self, rows: Array, own: Array) -> Rows:
        common = self._scenario.common if self._table else None
        x = self._shelf.inputs(rows, common)
        none = torch.zeros((len(rows), 0), dtype=self.dtype, device=self.device)
        further = self._shelf.inputs(rows, own) if self._table else none
        return Rows(x, further, self._labels(rows))

    def _labels(self, rows: Array) -> Tensor:
        """The classes of rows; in regression numbers with mean 0 and deviation 1 in training."""
        labels = self._shelf.labels(rows)
        return self.target.standardise(labels, self.dtype) if self.regression else labels

    @cached_property
    def target(self) -> Target:
        """How the labels of regression are scaled, as the columns are.

        By the training rows of this site's first stage, with `global` scaling by those of all
        sites; with `none` they stay as they are. Nothing of it leaves the site.
        """
        if not self.regression or self._shelf.scale == "none":
            return Target(0.0, 1.0)
        if self._shelf.scale == "global":
            return Target.of(self._shelf.labels(self._shelf.train))
        holdings = self._scenario.holdings[self.id]
        rows = next((one.train for one in holdings if len(one.train)), holdings[0].train)
        return Target.of(self._shelf.labels(rows))

    def scaling(self) -> tuple[Tensor, Tensor]:
        """Own tables: what a missing value becomes, and by what common and own columns are scaled.

        Each (3, columns): fill, mean, deviation. Fitted on the training rows of this site's first
        stage; with `global` scaling the common columns on those of all sites and stages.
        """
        layout, holding = self._shelf.layout, self._scenario.holdings[self.id][0]
        assert layout is not None  # only own tables are asked for it
        everywhere = self._shelf.scale == "global"
        scales = []
        for columns, shared in ((self._scenario.common, everywhere), (holding.own, False)):
            fit = self._shelf.inputs(self._shelf.train if shared else holding.train, columns)
            numbers = torch.from_numpy(layout.numbers[columns]).to(fit.device)
            scales.append(_fitted(fit, numbers & (self._shelf.scale != "none")))
        return scales[0], scales[1]

    def _scaled(self, rows: Rows, train: Array) -> Rows:
        """With `local` scaling, the rows as this site's own training rows scale them."""
        if self._shelf.layout is not None:
            common, own = self.scaling()
            return Rows(filled(rows.x, common), filled(rows.own, own), rows.y)
        if self._shelf.scale != "local" or not self._table:
            return rows
        holding = self._scenario.holdings[self.id][0]
        fit = self._taken(train if len(train) else holding.train, holding.own)
        return Rows(standardised(rows.x, fit.x), standardised(rows.own, fit.own), rows.y)
