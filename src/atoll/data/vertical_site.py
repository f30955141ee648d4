"""A site that holds columns of the rows of all participants; the server holds the labels."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.federation import SERVER, Moment
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.data.scaling import Target
from atoll.data.site import View, balanced_weights, filled, moments, standardised

__all__ = ["VerticalSite", "block"]

Array = np.ndarray[Any, Any]
_NONE = np.empty(0, dtype=np.int64)


def block(columns: Array, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a party's columns: a rectangle of an image keeps its sides, else one axis."""
    if len(shape) == 1 or not len(columns):
        return (len(columns),)
    places = [np.unique(axis) for axis in np.unravel_index(columns, shape)]
    whole = np.ravel_multi_index(np.ix_(*places), shape).ravel()
    sides = tuple(len(axis) for axis in places)
    return sides if np.array_equal(whole, columns) else (len(columns),)


class VerticalSite:
    """What a participant with columns of its own may see: data, random streams, device.

    A client's rows are its columns as `x`, a rectangle of an image as (channels, height, width),
    and every label is -1; the server's rows are labels without columns.
    """

    def __init__(self, view: View) -> None:
        """Store references; data is copied on first use."""
        self._shelf, self._scenario, self._seed = view.shelf, view.scenario, view.seed
        self._shape, self.stream = view.shape, view.stream
        self.id, self.classes, self.clients = view.id, view.dataset.classes, view.scenario.clients
        self.device, self.dtype = view.shelf.x.device, view.shelf.dtype
        self._balanced, self.regression = view.balanced, view.dataset.regression
        self._table, self.stages = view.dataset.kind == "table", view.scenario.stages
        self._kept: dict[tuple[str, int], Rows] = {}
        self._lesson: tuple[tuple[int, int], Rows] | None = None  # of the last round

    def train(self, stage: int) -> Rows:
        """The training rows of a stage."""
        return self._rows("train", stage)

    def lesson(self, moment: Moment) -> Rows:
        """The training rows of a round: those of the stage.

        With joint_aug, a client's part of whole images that change in each round.
        """
        plain = self.train(moment.stage)
        if not self._scenario.joint_aug or self.id == SERVER or not len(plain):
            return plain
        if self._lesson is None or self._lesson[0] != (moment.stage, moment.round):
            rows = self._scenario.holdings[self.id][moment.stage].train
            stream = Stream.of(self._seed, "joint_aug", moment.stage, moment.round)
            x = self._shelf.changed(rows, self._columns, stream).reshape(plain.x.shape)
            self._lesson = ((moment.stage, moment.round), Rows(x, plain.own, plain.y))
        return self._lesson[1]

    def class_weights(self, stage: int) -> Tensor | None:
        """At the server: how much rows of each class count in training; None: all the same."""
        y = self.train(stage).y
        if not self._balanced or not len(y):
            return None
        return balanced_weights(y, len(self.classes)).to(self.dtype)

    def valid(self, stage: int) -> Rows:
        """The validation rows of a stage."""
        return self._rows("valid", stage)

    def test(self, task: int) -> Rows:
        """The test rows of a task."""
        return self._rows("test", task)

    def fresh(self, task: int) -> Tensor:
        """Which test rows of a task no earlier task has."""
        tests = self._scenario.tests[self.clients[0] if self.id == SERVER else self.id]
        seen = np.concatenate([_NONE, *tests[:task]])
        return torch.from_numpy(~np.isin(tests[task], seen)).to(self.device)

    def inputs(self) -> tuple[int, ...]:
        """The shape of a row."""
        return block(self._columns, self._shape)

    def parties(self, stage: int) -> list[str]:
        """The clients that hold columns at a stage, in the order in which they came."""
        holdings = self._scenario.holdings
        return [id for id in self.clients if len(holdings[id][stage].own)]

    @property
    def by_columns(self) -> bool:
        """Whether columns, and not classes, come by stage."""
        return self.parties(0) != list(self.clients)

    def shape_of(self, client: str) -> tuple[int, ...]:
        """The shape of a client's rows where clients hold columns; known to all, unlike values."""
        return block(self._scenario.holdings[client][-1].own, self._shape)

    @property
    def _columns(self) -> Array:
        """The columns of a party: none at the server, and those of the last stage at a client."""
        holdings = self._scenario.holdings
        return holdings[self.id][-1].own if self.id in holdings else np.empty(0, dtype=np.int64)

    def _rows(self, part: str, number: int) -> Rows:
        if (part, number) not in self._kept:
            self._kept[part, number] = self._of_party(part, number)
        return self._kept[part, number]

    def _of_party(self, part: str, number: int) -> Rows:
        """A party's columns without labels, or the server's labels without columns."""
        scenario, first = self._scenario, self.clients[0]
        whose = self.id if self.id != SERVER else first
        if part == "test":
            rows = scenario.tests[whose][number]
        else:  # a client that has not joined yet has no rows; the first one is always there
            rows = getattr(scenario.holdings[whose][number], part)
        columns = self._columns
        x = self._shelf.inputs(rows, columns)
        if self._shelf.layout is not None:
            x = filled(x, self.scaling())
        elif self._table and self._shelf.scale == "local" and len(columns):
            x = standardised(x, self._first_rows())
        y = self._shelf.labels(rows)
        if self.regression:
            y = self.target.standardise(y, self.dtype)
        if self.id != SERVER:
            y = torch.full_like(y, -1)
        return Rows(
            x.reshape(len(rows), *block(columns, self._shape)), x.new_zeros((len(rows), 0)), y
        )

    @cached_property
    def target(self) -> Target:
        """At the server: how the labels of regression are scaled, by the first training rows."""
        if not self.regression or self.id != SERVER or self._shelf.scale == "none":
            return Target(0.0, 1.0)
        holdings = self._scenario.holdings[self.clients[0]]
        rows = next((one.train for one in holdings if len(one.train)), holdings[0].train)
        return Target.of(self._shelf.labels(rows))

    def _first_rows(self) -> Tensor:
        """A party's columns of the training rows of the first stage at which it has some."""
        holdings = self._scenario.holdings[self.id]
        since = next(holding for holding in holdings if len(holding.train))
        return self._shelf.inputs(since.train, self._columns)

    def scaling(self) -> Tensor:
        """Own tables of parties: fill, mean and deviation of each of its columns.

        A missing value becomes the mean, and 0 where nothing is scaled.
        """
        width = len(self._columns)
        scaling = torch.zeros((3, width), dtype=torch.float64, device=self.device)
        scaling[2] = 1
        if self._shelf.scale == "local" and width:
            mean, deviation = moments(self._first_rows())
            scaling = torch.stack([mean, mean, deviation])
        return scaling
