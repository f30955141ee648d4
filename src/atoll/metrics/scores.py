"""Metrics derived from a record, each with its definition. Needs no torch.

The primary result is accuracy[client, task, stage]. A cell without a test, or tested on no
rows, is NaN and excluded from every mean: it never counts as 0. Means over clients weight every
client equally, whatever its number of rows.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from atoll.core.errors import UserError
from atoll.core.record import Event, Message, Score

__all__ = [
    "DEFINITIONS",
    "REGRESSION",
    "ClientSpread",
    "Primary",
    "Spread",
    "average_accuracy",
    "backward_transfer",
    "bytes_down",
    "bytes_up",
    "client_accuracy",
    "final_accuracy",
    "forgetting_best_last",
    "forgetting_diagonal_last",
    "forgetting_first_last",
    "forward_transfer",
    "inter_accuracy",
    "intra_accuracy",
    "macro_f1",
    "messages",
    "primary",
    "spread",
    "spread_over_clients",
    "summary",
    "variants",
]

Array = np.ndarray[Any, Any]
SERVER = "server"

DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {
        "final_accuracy": "after the last stage, the mean over the tasks known then, "
        "then over clients",
        "average_accuracy": "the mean over stages of the accuracy after each stage: the mean over "
        "the tasks known then, then over clients",
        "macro_f1": "after the last stage, the mean over the tasks known then of the mean F1 of "
        "the classes, then over clients",
        "forgetting_first_last": "accuracy when a task was first tested minus accuracy after the "
        "last stage: the mean over tasks known before the last stage, then over clients",
        "forgetting_best_last": "the best accuracy a task ever had (the last stage included, so "
        "never below 0) minus accuracy after the last stage: the mean over tasks known before the "
        "last stage, then over clients",
        "forgetting_diagonal_last": "accuracy after the stage at which a task was learned minus "
        "accuracy after the last stage: the mean over tasks known before the last stage, "
        "then over clients",
        "backward_transfer": "accuracy after the last stage minus accuracy after the stage at "
        "which a task was learned: the mean over tasks known before the last stage, "
        "then over clients",
        "forward_transfer": "accuracy on a task after the last stage before it was learned minus "
        "the chance level: the mean over the tasks tested so, then over clients; NaN if none was",
        "spread_over_clients": "the population standard deviation over clients of each client's "
        "own final accuracy",
        "worst_client": "the final accuracy of the client that has the lowest",
        "intra_accuracy": "after the last stage, the mean over clients of client i's accuracy on "
        "task i; NaN unless there is one task for each client, all known from the start (domains)",
        "inter_accuracy": "after the last stage, the mean over clients of client i's plain mean "
        "accuracy on all tasks but task i, whatever their numbers of rows; NaN where "
        "intra_accuracy is",
        "bytes_up": "bytes that travelled from clients to the server, headers and tests included; "
        "a summary adds up all clients",
        "bytes_down": "bytes that travelled from the server to clients, headers and tests "
        "included; a summary adds up all clients",
        "messages": "messages between clients and the server, both ways, tests included; "
        "a summary adds up all clients",
    }
)


REGRESSION: Mapping[str, str] = MappingProxyType(
    {
        "accuracy": "in regression every metric of accuracy is one of R2: 1 minus the mean squared "
        "error divided by the variance of the test labels; undefined where they are all equal",
        "r2": "R2 after the last stage, the mean over the tasks known then, then over clients",
        "mse": "the mean squared error after the last stage, likewise, in the unit of the label "
        "squared",
        "mae": "the mean absolute error after the last stage, likewise, in the unit of the label",
    }
)


@dataclass(frozen=True)
class Primary:
    """The primary result of a run: each client's score on each task after each stage.

    In regression the score is R2, and `errors` contains the mean squared and absolute errors.
    """

    clients: tuple[str, ...]
    tasks: tuple[int, ...]
    stages: tuple[int, ...]
    accuracy: Array  # (clients, tasks, stages), NaN where never tested
    macro_f1: Array  # (clients, tasks, stages), NaN where never tested
    known_at: tuple[int, ...] = ()  # for each task the stage that teaches it; empty: first tested
    errors: Mapping[str, Array] = field(default_factory=dict)  # mse and mae, in regression

    @property
    def learned(self) -> Array:
        """For each task, the index in `stages` at which it becomes known: (tasks,)."""
        if self.known_at:
            return np.searchsorted(np.array(self.stages), np.array(self.known_at))
        untested = np.all(np.isnan(self.accuracy), axis=0)  # (tasks, stages)
        return np.asarray(np.cumprod(untested, axis=1).sum(axis=1))  # earlier stages


class Spread(NamedTuple):
    """Values of several seeds with their mean and population standard deviation."""

    mean: float
    deviation: float


@dataclass(frozen=True)
class ClientSpread:
    """The spread of the clients' final accuracies, and the client with the lowest."""

    deviation: float
    worst: str  # the first by id among equals, "" if there is none
    worst_accuracy: float


def variants(events: Iterable[Event]) -> list[str]:
    """The variants with test scores in a record, sorted."""
    return sorted({e.variant for e in events if isinstance(e, Score) and e.part == "test"})


def primary(
    events: Iterable[Event], variant: str = "", known_at: Sequence[int] | None = None
) -> Primary:
    """One variant's test scores as arrays; for each stage the score of its last round counts.

    `known_at` maps each task number to the stage that teaches it (a scenario provides it);
    without it a task counts as learned at the first stage at which any client is tested on it.
    """
    tested = [e for e in events if isinstance(e, Score) and e.part == "test"]
    chosen = [e for e in tested if e.variant == variant]
    if tested and not chosen:
        raise UserError(
            f"unknown variant '{variant}'",
            "the scores of this record",
            f"known: {', '.join(repr(name) for name in variants(tested))}",
        )
    last: dict[tuple[str, int, int], Score] = {}
    for score in sorted(chosen, key=lambda score: score.round):
        last[score.client, score.task, score.stage] = score
    clients = tuple(sorted({client for client, _, _ in last}))
    tasks = tuple(sorted({task for _, task, _ in last}))
    stages = tuple(sorted({stage for _, _, stage in last}))
    accuracy = np.full((len(clients), len(tasks), len(stages)), np.nan)
    f1 = accuracy.copy()
    regression = any(score.errors for score in last.values())
    errors = {name: accuracy.copy() for name in ("mse", "mae") if regression}
    for (client, task, stage), score in last.items():
        if score.rows:  # no rows, no measurement
            cell = clients.index(client), tasks.index(task), stages.index(stage)
            accuracy[cell], f1[cell] = score.accuracy, math.nan if regression else score.macro_f1
            for name, cells in errors.items():
                cells[cell] = score.errors[name]
    starts = () if known_at is None else tuple(known_at[task] for task in tasks)
    return Primary(clients, tasks, stages, accuracy, f1, starts, errors)


def _mean(values: Array, axis: int | None = None) -> Array:
    """The mean of the values that are not NaN; NaN if there are none."""
    valid = ~np.isnan(values)
    count = valid.sum(axis=axis)
    total = np.where(valid, values, 0.0).sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _after(result: Primary, cells: Array, stage: int) -> Array:
    """Each client's mean score after a stage, over the tasks known at that stage: (clients,)."""
    return _mean(cells[:, result.learned <= stage, stage], axis=1)


def _finally(result: Primary, cells: Array) -> Array:
    if not result.stages:
        return np.full(len(result.clients), np.nan)
    return _after(result, cells, len(result.stages) - 1)


def final_accuracy(result: Primary) -> float:
    """Accuracy after the last stage: the mean over the tasks known then, then over clients."""
    return float(_mean(_finally(result, result.accuracy)))


def client_accuracy(result: Primary) -> dict[str, float]:
    """Each client's own accuracy after the last stage: the mean over the tasks known then."""
    return dict(zip(result.clients, _finally(result, result.accuracy).tolist(), strict=True))


def average_accuracy(result: Primary) -> float:
    """The mean over stages of the accuracy after each stage, over known tasks and clients."""
    after = [_mean(_after(result, result.accuracy, stage)) for stage in range(len(result.stages))]
    return float(_mean(np.array(after)))


def macro_f1(result: Primary) -> float:
    """Macro-F1 after the last stage: the mean over tasks known then, then over clients."""
    return float(_mean(_finally(result, result.macro_f1)))


def _lost(result: Primary, reference: Callable[[Primary], Array]) -> float:
    """The reference minus the last score, over tasks known before the last stage, then clients.

    0.0 without such a task: a task of the last stage cannot be forgotten yet and is never
    included. NaN if there are such tasks but none has both scores.
    """
    old = result.learned < len(result.stages) - 1
    if not old.any():
        return 0.0
    lost = reference(result) - result.accuracy[:, :, -1]
    return float(_mean(_mean(lost[:, old], axis=1)))


def _first(result: Primary) -> Array:
    """The first score of each client and task; NaN if there is none."""
    position = np.isnan(result.accuracy).argmin(axis=2)  # index of the first cell that is not NaN
    return np.take_along_axis(result.accuracy, position[:, :, None], axis=2)[:, :, 0]


def _best(result: Primary) -> Array:
    """The best score of each client and task; NaN if there is none."""
    best: Array = np.fmax.reduce(result.accuracy, axis=2)
    return best


def _diagonal(result: Primary) -> Array:
    """The score of each client and task after the stage that taught the task."""
    position = np.minimum(result.learned, len(result.stages) - 1)
    diagonal = result.accuracy[:, np.arange(len(result.tasks)), position]
    if result.known_at:  # a stage without tests has no scores
        diagonal[:, ~np.isin(result.known_at, result.stages)] = np.nan
    return diagonal


def forgetting_first_last(result: Primary) -> float:
    """Accuracy when a task was first tested minus accuracy after the last stage."""
    return _lost(result, _first)


def forgetting_best_last(result: Primary) -> float:
    """The best accuracy on a task minus its accuracy after the last stage; never below 0."""
    return _lost(result, _best)


def forgetting_diagonal_last(result: Primary) -> float:
    """Accuracy after the stage that taught a task minus accuracy after the last stage."""
    return _lost(result, _diagonal)


def backward_transfer(result: Primary) -> float:
    """Accuracy after the last stage minus accuracy after the stage that taught a task.

    Lopez-Paz and Ranzato, 2017: the negative of forgetting_diagonal_last.
    """
    return 0.0 - _lost(result, _diagonal)  # not -x: that would print as -0.0


def forward_transfer(result: Primary, chance: float | Sequence[float]) -> float:
    """Accuracy on a task just before it is learned minus chance: one value, or one per task.

    Lopez-Paz and Ranzato, 2017. Needs scores on future tasks, and `known_at` to
    distinguish them from known tasks; NaN if there are none.
    """
    ahead = np.flatnonzero((result.learned > 0) & (result.learned <= len(result.stages)))
    before = result.accuracy[:, ahead, result.learned[ahead] - 1]
    level = np.broadcast_to(np.asarray(chance, dtype=float), (len(result.tasks),))[ahead]
    return float(_mean(_mean(before - level, axis=1)))


def spread_over_clients(result: Primary) -> ClientSpread:
    """The population standard deviation over clients of their final accuracy, and the worst."""
    final = _finally(result, result.accuracy)
    valid = np.flatnonzero(~np.isnan(final))
    if not len(valid):
        return ClientSpread(math.nan, "", math.nan)
    worst = valid[final[valid].argmin()]
    return ClientSpread(float(final[valid].std()), result.clients[worst], float(final[worst]))


def _by_domain(result: Primary) -> Array | None:
    """The last accuracies (clients, tasks) if client i belongs to task i; else empty."""
    count = len(result.clients)
    if count < 2 or len(result.tasks) != count or len(result.stages) != 1:
        return None
    if not result.known_at or any(result.known_at):  # tasks that arrive by stage are not domains
        return None
    matrix: Array = result.accuracy[:, :, -1]
    return matrix


def intra_accuracy(result: Primary) -> float:
    """The accuracy of each client on its own domain, averaged over clients."""
    matrix = _by_domain(result)
    return math.nan if matrix is None else float(_mean(np.diagonal(matrix)))


def inter_accuracy(result: Primary) -> float:
    """Each client's mean accuracy on the other domains, averaged over clients."""
    matrix = _by_domain(result)
    if matrix is None:
        return math.nan
    others = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
    return float(_mean(_mean(others, axis=1)))


def bytes_up(events: Iterable[Event]) -> dict[str, int]:
    """The bytes that each client sent to the server, including headers and tests."""
    return _ledger(events, lambda e: e.bytes if e.receiver == SERVER else 0)


def bytes_down(events: Iterable[Event]) -> dict[str, int]:
    """The bytes that the server sent to each client, including headers and tests."""
    return _ledger(events, lambda e: 0 if e.receiver == SERVER else e.bytes)


def messages(events: Iterable[Event]) -> dict[str, int]:
    """The number of messages between each client and the server, in both directions."""
    return _ledger(events, lambda e: e.count)


def _ledger(events: Iterable[Event], amount: Callable[[Message], int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for event in events:
        if isinstance(event, Message):
            client = event.sender if event.receiver == SERVER else event.receiver
            totals[client] = totals.get(client, 0) + amount(event)
    return {client: totals[client] for client in sorted(totals)}


def summary(
    events: Iterable[Event],
    variant: str = "",
    known_at: Sequence[int] | None = None,
    chance: float | Sequence[float] = math.nan,
) -> dict[str, float]:
    """Every metric of DEFINITIONS for one variant, and in regression of REGRESSION.

    Traffic is that of the whole run.
    """
    events = list(events)
    result = primary(events, variant, known_at)
    clients = spread_over_clients(result)
    return {
        "final_accuracy": final_accuracy(result),
        "average_accuracy": average_accuracy(result),
        "macro_f1": macro_f1(result),
        "forgetting_first_last": forgetting_first_last(result),
        "forgetting_best_last": forgetting_best_last(result),
        "forgetting_diagonal_last": forgetting_diagonal_last(result),
        "backward_transfer": backward_transfer(result),
        "forward_transfer": forward_transfer(result, chance),
        "spread_over_clients": clients.deviation,
        "worst_client": clients.worst_accuracy,
        "intra_accuracy": intra_accuracy(result),
        "inter_accuracy": inter_accuracy(result),
        "bytes_up": float(sum(bytes_up(events).values())),
        "bytes_down": float(sum(bytes_down(events).values())),
        "messages": float(sum(messages(events).values())),
        **_regression(result),
    }


def _regression(result: Primary) -> dict[str, float]:
    """R2 and the errors after the last stage; empty for classification."""
    if not result.errors:
        return {}
    errors = {name: float(_mean(_finally(result, cells))) for name, cells in result.errors.items()}
    return {"r2": final_accuracy(result), **errors}


def spread(values: Iterable[float]) -> Spread:
    """The mean and the population standard deviation over seeds; NaN propagates."""
    array = np.array(list(values), dtype=float)
    if not len(array):
        return Spread(math.nan, math.nan)
    return Spread(float(array.mean()), float(array.std()))
