"""A site's contract: the terms that its owner writes, and the refusal that enforces them."""

from dataclasses import dataclass, field
from typing import Any, Literal

from atoll.core.options import AtLeastOne, NotNegative, NotNegativeInt

__all__ = ["TELLING", "Contract", "RefusedError"]

TELLING = ("offer", "agree")  # what sites with own tables tell before training


class RefusedError(Exception):
    """Something that the site's contract does not allow."""


@dataclass(frozen=True)
class Contract:
    """What may leave a site; what is not in it is refused."""

    methods: tuple[str, ...] = ()  # that may be run here
    actions: tuple[str, ...] = ()  # that may be answered
    stages: NotNegativeInt = 0  # that may be answered, counted from the first; 0 for all
    largest: AtLeastOne = 50_000_000  # bytes of one answer
    total: AtLeastOne = 5_000_000_000  # bytes of all answers of a run
    in_all: AtLeastOne = 50_000_000_000  # bytes of all answers of all runs, ever
    networks: tuple[str, ...] = ()  # package.module:function that a run may name: code that is here
    replacements: tuple[str, ...] = ()  # module:function that a run may swap parts of methods with
    question: AtLeastOne = 200_000_000  # bytes of one question that is read at all
    parameters: AtLeastOne = 50_000_000  # of the largest network that a run may build here
    rows: AtLeastOne = 8  # training rows behind an answer, at least
    step_rows: AtLeastOne = 8  # rows in a training step, at least; a last, smaller batch is free
    steps: AtLeastOne = 2  # training steps behind an answer, at least
    unit_rows: AtLeastOne = 3  # rows that reach a unit of the first layer, if any does; 1: any
    initial_weights: Literal["derived", "any"] = "derived"  # any: a coordinator's own first weights
    move: NotNegative = 0.5  # of their norm, that shared weights may move in a round; 0: any
    drift: NotNegative = 50.0  # norms between the first weights and any later ones; 0: any
    gradient: NotNegative = 10.0  # norm of one row's gradient that may come in; 0: any
    shown_rows: Literal["refuse", "allow"] = "refuse"  # an update that a training row is read off
    rounds_in_all: AtLeastOne = 1000  # rounds of all runs on the same data, ever
    epochs_in_all: AtLeastOne = 20_000  # epochs of all runs on the same data, ever
    answers_in_all: AtLeastOne = 200_000  # answers of all runs on the same data, ever
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # by method: what it may set
