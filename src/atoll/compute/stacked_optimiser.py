"""The optimiser of all members of a stack: rates and counts of steps may differ."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from atoll.compute.buffers import Buffer, by_member, load
from atoll.core.messages import Tensors
from atoll.jobs.train import TrainJob, descend
from atoll.kernels import adam
from atoll.learning.weights import sent

__all__ = ["StackedOptimiser"]

GROUPS = 8  # above this many distinct rates and step counts, fall back to one formula for all


class StackedOptimiser:
    """The optimiser of one phase for all members; rates and counts of steps may differ."""

    def __init__(
        self, number: int, weights: Mapping[str, Buffer], jobs: Sequence[TrainJob]
    ) -> None:
        self.number, self.phase = number, jobs[0].phases[number]
        self.rates: list[float] = []
        self.adaptive = self.phase.optimiser.kind == "adam"
        moved = [weights[name].whole for name in self.phase.moves]
        moments = self.phase.moves if self.adaptive else ()
        self.first, self.second = (
            [Buffer([job.weights[name] for job in jobs]) for name in moments] for _ in range(2)
        )
        self.buffers = {f"first/{n}": b for n, b in zip(moments, self.first, strict=True)}
        self.buffers |= {f"second/{n}": b for n, b in zip(moments, self.second, strict=True)}
        self.outputs: list[Tensors] = []  # moments as last returned
        device = moved[0].device
        self.rate = torch.zeros(len(jobs), dtype=torch.float64, device=device)
        self.steps = torch.zeros(len(jobs), dtype=torch.float64, device=device)
        self.kernel = self.adaptive and adam.usable(moved)
        self.free = False  # rates change on the device; below zero: the member stays as it is
        self.groups: list[tuple[int, int, float]] = []  # first member, last + 1, rate
        self.counts: list[list[Tensor]] = []  # steps of each group, one tensor for each weight
        self.before: list[int] = []

    def load(self, jobs: Sequence[TrainJob]) -> bool:
        """Take the members' moments in; whether that changed how they are grouped."""
        device, rates = self.rate.device, [job.phases[self.number].optimiser.rate for job in jobs]
        if rates != self.rates:
            self.rates = rates
            self.rate.copy_(sent(rates, device, torch.float64))
        self.before = [int(job.moments.get(f"steps/{self.phase.name}", 0)) for job in jobs]
        if self.adaptive:
            load(self.buffers, [job.moments for job in jobs], self.outputs)
            self.steps.copy_(sent(self.before, device, torch.float64))
        return False if self.kernel or self.free else self._group(jobs)

    def _group(self, jobs: Sequence[TrainJob]) -> bool:
        """Neighbours with one rate and one count of steps share a step; whether groups changed."""
        keys = [(r, b, j.steps) for r, b, j in zip(self.rates, self.before, jobs, strict=True)]
        starts = [i for i in range(len(keys)) if i == 0 or keys[i] != keys[i - 1]]
        ends = [*starts[1:], len(keys)]
        groups = [(a, b, self.rates[a]) for a, b in zip(starts, ends, strict=True)]
        changed = groups != self.groups
        if changed:
            self.groups = groups
            self.counts = [
                [torch.zeros((), device=b.whole.device) for b in self.first] for _ in groups
            ]
        for (start, _, _), counts in zip(self.groups, self.counts, strict=True):
            for count in counts:
                count.fill_(self.before[start])
        return changed

    def descend(self, active: int, weights: list[Tensor], gradients: list[Tensor]) -> None:
        """One step of the first members, in place."""
        firsts, seconds = ([b.whole[:active] for b in part] for part in (self.first, self.second))
        if self.kernel:
            steps, moments = self.steps[:active], (firsts, seconds)
            rates, optimiser = self.rate[:active], self.phase.optimiser
            adam.adam(
                weights, gradients, moments, rates, steps, (optimiser.decay, optimiser.epsilon)
            )
            steps += rates >= 0
            return
        if self.free or len(self.groups) > GROUPS:
            self._by_formula(active, weights, gradients, (firsts, seconds))
            return
        for (start, stop, rate), counts in zip(self.groups, self.counts, strict=True):
            if start >= active:
                break
            part = slice(start, min(stop, active))
            optimiser = replace(self.phase.optimiser, rate=rate)
            descend(
                [w[part] for w in weights],
                [g[part] for g in gradients],
                ([m[part] for m in firsts], [m[part] for m in seconds], counts),
                optimiser,
            )

    def _by_formula(
        self,
        active: int,
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: tuple[list[Tensor], list[Tensor]],
    ) -> None:
        """The same with a rate and a count of steps for each member (Kingma and Ba 2015)."""
        live, decay = (self.rate[:active] >= 0).double(), self.phase.optimiser.decay
        rate, epsilon = self.rate[:active].clamp(min=0), self.phase.optimiser.epsilon
        if decay:
            gradients = [g + decay * w for g, w in zip(gradients, weights, strict=True)]
        if not self.adaptive:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(gradient * _column(rate, gradient))
            return
        steps = self.steps[:active].add_(live).clamp(min=1)
        size, root = rate / (1 - 0.9**steps), (1 - 0.999**steps).sqrt()
        for weight, gradient, first, second in zip(weights, gradients, *moments, strict=True):
            first.lerp_(gradient, _column(0.1 * live, gradient))
            second.lerp_(gradient * gradient, _column(0.001 * live, gradient))
            below = (second.sqrt() / _column(root, gradient)).add_(epsilon)
            weight.sub_(_column(size, gradient) * first / below)

    def unload(self, jobs: Sequence[TrainJob]) -> list[Tensors]:
        """The moments of each member."""
        if not self.adaptive:
            return [{} for _ in jobs]
        steps = [before + job.steps for before, job in zip(self.before, jobs, strict=True)]
        if self.free:
            steps = [int(count) for count in self.steps.tolist()]
        columns: dict[str, list[Tensor]] = {
            f"steps/{self.phase.name}": [torch.tensor(count) for count in steps],
            **{name: buffer.copies() for name, buffer in self.buffers.items()},
        }
        self.outputs = by_member(columns, len(jobs))
        return self.outputs


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(-1, *[1] * (like.dim() - 1))
