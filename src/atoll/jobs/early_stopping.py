"""Early-stopped training: after each epoch the validation loss decides on the learning rate.

The reference trains one client, epoch by epoch (`parts`). `compute/early_stopping.py` runs all
epochs of a round for many clients without the host.
"""

from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atoll.core.messages import Tensors
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.train import EvalJob, TrainJob

__all__ = [
    "BEST",
    "KEY",
    "PATIENCE",
    "RATE",
    "STOPPED",
    "EarlyStoppedJob",
    "EarlyStoppedResult",
    "Rule",
    "stepped",
]

RATE, BEST, PATIENCE, STOPPED = range(4)  # places in a course
KEY = "noise"  # the weight that changes with each epoch


@dataclass(frozen=True)
class Rule:
    """When the rate is cut, and when training ends."""

    patience: int  # epochs without gain before the rate is cut
    cut: float  # divisor of the rate at a cut
    least: float  # with a smaller rate training ends
    fresh: bool = False  # whether a cut resets the optimiser


def stepped(course: Tensor, loss: Tensor | float, rule: Rule) -> Tensor:
    """Rate, best loss, patience, stopped after an epoch with this loss: (..., 4)."""
    rate, best, patience, stopped = course.unbind(-1)
    gain = best > loss
    patience = torch.where(gain, rule.patience, patience - 1)
    cut = patience <= 0
    lower = torch.where(cut, rate / rule.cut, rate)
    ended = torch.where(cut, (lower < rule.least).to(rate), stopped)
    patience = torch.where(cut, rule.patience, patience)
    best = torch.where(gain, loss, best)
    after = torch.stack([lower, best, patience, ended], -1)
    return torch.where(stopped[..., None] > 0, course, after)


@dataclass(frozen=True)
class EarlyStoppedResult:
    """The result of early-stopped training."""

    weights: Tensors
    moments: Tensors
    course: Tensor  # (4,) on the CPU


@dataclass(frozen=True)
class EarlyStoppedJob:
    """A client's epochs of a round, until early stopping ends them. Changes nothing."""

    work: TrainJob  # one epoch; its rate and its stream are not used
    streams: tuple[Stream, ...]  # of the order of rows, one for each epoch
    keys: tuple[int, ...]  # of an epoch's noise
    valid: Rows  # without any, the training loss decides
    function: Callable[[Mapping[str, Tensor], Rows], Tensor]  # -> the loss of each of these rows
    reads: tuple[str, ...]  # the weights that it reads
    course: Tensor  # (4,) in double precision, on the CPU
    rule: Rule

    def key(self) -> Hashable | None:
        """The keys of training and of validation, and the rule."""
        read = {name: self.work.weights[name] for name in self.reads}
        validation = EvalJob(read, self.valid, self.function).key()
        training = self.first.key()
        if training is None or validation is None:
            return None
        own = self.valid.own.shape[1]
        return ("watched", training, validation, own, self.rule, len(self.streams))

    @property
    def functions(self) -> tuple[Callable[..., Tensor], ...]:
        """The loss of training, and the one of validation."""
        return (*self.work.functions, self.function)

    def run(self) -> EarlyStoppedResult:
        """Train epoch by epoch."""
        parts = self.parts(alone=True)
        try:
            job = next(parts)
            while True:
                job = parts.send(job.run())
        except StopIteration as end:
            result: EarlyStoppedResult = end.value
            return result

    def parts(self, alone: bool = False) -> Generator[TrainJob | EvalJob, Any, EarlyStoppedResult]:
        """Its training and evaluation jobs, in order; alone, each reuses the memory of the last."""
        weights, moments, course = self.work.weights, self.work.moments, self.course
        first = weights
        for stream, key in zip(self.streams, self.keys, strict=True):
            if course[STOPPED]:
                break
            noise = torch.tensor(key, device=self.work.rows.y.device)
            job = replace(
                self.epoch(float(course[RATE]), stream), ours=alone and weights is not first
            )
            result = yield replace(job, weights={**weights, KEY: noise}, moments=moments)
            weights, moments = result.weights, result.moments
            loss = float(result.losses[job.phases[0].name])
            if len(self.valid):
                read = {name: weights[name] for name in self.reads}
                loss = float((yield EvalJob(read, self.valid, self.function))) / len(self.valid)
            before, course = course, stepped(course, loss, self.rule)
            if self.rule.fresh and course[RATE] != before[RATE]:
                moments = {}
        return EarlyStoppedResult(weights, moments, course)

    def epoch(self, rate: float, stream: Stream) -> TrainJob:
        """The training job of an epoch."""
        (phase,) = self.work.phases
        phases = (replace(phase, optimiser=replace(phase.optimiser, rate=rate)),)
        return replace(self.work, phases=phases, stream=stream)

    @property
    def first(self) -> TrainJob:
        """The training job of the first epoch."""
        key = torch.tensor(self.keys[0], device=self.work.rows.y.device)
        job = self.epoch(float(self.course[RATE]), self.streams[0])
        return replace(job, weights={**self.work.weights, KEY: key})
