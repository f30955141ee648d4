"""The work of many clients in one computation: one more axis in front of every weight and row.

Members of a stack have works of one form: the same losses, the same shapes (own columns may be
fewer: they are padded with zeros, which move nothing), the same batch size. Members are sorted by
the number of their steps, so those that are not done yet are always the first ones; a batch that
is not full is filled with rows that count nothing. On a GPU the step is captured once in a CUDA
graph and replayed; the stack keeps its buffers, so later rounds use the same graph. A graph has
fixed shapes, so for texts the stack knows how much room any batch of a round needs.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.compute.graphs import available, common_lane
from atoll.compute.probe import Probe
from atoll.compute.vmapped import each, size
from atoll.core.late import Arriving, Losses
from atoll.core.messages import Part, Tensors, Wholes
from atoll.core.rng import Stream, permutations
from atoll.core.rows import Bounds, Rows
from atoll.jobs.identity import no_identity, rowwise
from atoll.jobs.split_round import SplitJob
from atoll.jobs.train import EvalJob, Phase, TrainJob, TrainResult, descend
from atoll.kernels import adam
from atoll.learning.textcnn import different, pieces
from atoll.learning.weights import sent

__all__ = [
    "Bundle",
    "Stack",
    "obstacle",
    "signature",
    "tally",
]

GROUPS = 8  # members with other rates or step counts than this many are stepped one formula for all
EAGER = 2  # steps before a CUDA graph is captured
CELLS = 1 << 17  # rows of all members in one pass without gradient
MOST_DRAWN = 1 << 24  # rows of all batches of a member, which a stack draws at once


def obstacle(job: Any) -> str:
    """Why a job cannot be part of a stack; empty if it can."""
    if not isinstance(job, TrainJob | EvalJob | SplitJob):
        return f"no stacks of {type(job).__name__}"
    if not rowwise(job.functions):
        return "padding would change its batch statistics"
    if isinstance(job, TrainJob) and job.steps * job.batch > MOST_DRAWN:
        return "too many batches to be drawn before the first"
    return no_identity(job.functions)


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with the last axis of the longest, zeros at its end."""
    widest = max(t.shape[-1] for t in tensors) if tensors[0].dim() else 0
    return [
        torch.nn.functional.pad(t, (0, widest - t.shape[-1]))
        if t.dim() and t.shape[-1] < widest
        else t
        for t in tensors
    ]


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(_padded(tensors))


class _Buffer:
    """One tensor of all members; those with a shorter last axis have zeros at its end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.whole = torch.zeros_like(_stacked(tensors))
        widths = [t.shape[-1] if t.dim() else 0 for t in tensors]
        self.widths = widths if len(set(widths)) > 1 else []
        self.places = self.parts(self.whole)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Each member's part of such a tensor."""
        found = whole.unbind(0)
        if not self.widths:
            return list(found)
        return [part[..., :width] for part, width in zip(found, self.widths, strict=True)]

    def copies(self) -> list[Tensor]:
        """What each member has now, apart from what comes later."""
        return self.parts(self.whole.clone())


def _put(
    buffers: Mapping[str, _Buffer],
    brought: Sequence[Mapping[str, Tensor]],
    given: Sequence[Mapping[str, Tensor]],
) -> None:
    """Copy what the members bring into the buffers, in few kernels; zeros for what is missing.

    What the stack gave out last and comes back as the same objects is in the buffers already.
    """
    places, tensors = [], []
    for name, buffer in buffers.items():
        new = [one.get(name) for one in brought]
        if given and all(n is g for n, g in zip(new, _given_before(given, name), strict=True)):
            continue
        shared = new[0]
        if shared is not None and not buffer.widths and all(one is shared for one in new):
            buffer.whole.copy_(shared)  # all members bring the very same tensor
            continue
        if any(one is None for one in new):
            buffer.whole.zero_()
        there = [(p, one) for p, one in zip(buffer.places, new, strict=True) if one is not None]
        places += [place for place, _ in there]
        tensors += [one for _, one in there]
    if places:
        torch._foreach_copy_(places, tensors)


def _given_before(given: Sequence[Mapping[str, Tensor]], name: str) -> Sequence[Tensor | None]:
    """The very tensors of a name that the members were given; none that nobody has wanted."""
    first = given[0]
    if not isinstance(first, Part):
        return [one.get(name) for one in given]
    if name in first.wholes.tensors:
        return first.wholes.apart.get(name, [None] * len(given))
    return [one.rest.get(name) if isinstance(one, Part) else None for one in given]


def _members(columns: Mapping[str, Sequence[Tensor]], count: int) -> list[Tensors]:
    """By name each member's tensor -> for each member its tensors by name."""
    rows = zip(*columns.values(), strict=True) if columns else ([()] * count)
    return [dict(zip(columns, row, strict=True)) for row in rows]


@dataclass(frozen=True)
class Bundle:
    """The rows of all members end to end; members that share rows share them here."""

    x: Tensor
    own: Tensor
    y: Tensor
    first: tuple[int, ...]  # where each member's rows begin

    @staticmethod
    def of(rows: Sequence[Rows], into: "Bundle | None" = None) -> "Bundle":
        """These rows; in the tensors of a bundle that is given, if they are laid out as there."""
        places: dict[tuple[int, ...], int] = {}
        first, kept, count = [], [], 0
        for one in rows:
            key = _place(one)
            if key not in places:
                places[key], count = count, count + len(one)
                kept.append(one)
            first.append(places[key])
        x, own, y = [r.x for r in kept], _padded([r.own for r in kept]), [r.y for r in kept]
        shape = (count, *x[0].shape[1:]), (count, own[0].shape[-1])
        if into is None or (into.first, into.x.shape, into.own.shape) != (tuple(first), *shape):
            return Bundle(torch.cat(x), torch.cat(own), torch.cat(y), tuple(first))
        for parts, whole in ((x, into.x), (own, into.own), (y, into.y)):
            torch.cat(parts, out=whole)
        return into

    def at(self, index: Tensor, share: Tensor, bounds: Bounds | None = None) -> Rows:
        """The rows with these numbers: (members, batch)."""
        flat, lead = index.flatten(), index.shape
        x, own, y = self.x[flat], self.own[flat], self.y[flat]
        return Rows(
            x.view(*lead, *x.shape[1:]), own.view(*lead, -1), y.view(lead), share, bounds=bounds
        )

    @property
    def texts(self) -> bool:
        """Whether rows are tokens."""
        return not self.x.is_floating_point()


@dataclass(frozen=True)
class _Lot:
    """Members with as many rows."""

    rows: int  # of each member
    steps: int  # of an epoch
    members: list[int]
    where: slice | Tensor  # the same, as an index


def _place(rows: Rows) -> tuple[int, ...]:
    """Where rows lie in memory."""
    return rows.x.data_ptr(), rows.own.data_ptr(), rows.y.data_ptr(), len(rows)


class Stack:
    """Works of one form, done together; made once, loaded and run each round.

    With `mapped`, losses see one member at a time and torch.func makes one computation of them.
    """

    def __init__(
        self,
        jobs: Sequence[TrainJob],
        graph: bool = True,
        mapped: bool = False,
        epochs: int = 0,  # that all members begin together, where there are any
        fixed: bool = False,  # shapes are fixed without a graph too
    ) -> None:
        steps = [job.steps for job in jobs]
        rates = [tuple(p.optimiser.rate for p in job.phases) for job in jobs]
        self.order = sorted(range(len(jobs)), key=lambda i: (-steps[i], rates[i]))
        jobs = [jobs[i] for i in self.order]
        self.steps = [job.steps for job in jobs]
        self.rows = [len(job.rows) for job in jobs]
        self.held = [job.rows for job in jobs]  # so that no other rows come to lie where they are
        self.places = [_place(one) for one in self.held]
        self.data = Bundle.of(self.held)
        self.phases, self.batch = jobs[0].phases, jobs[0].batch
        self.buffers = {n: _Buffer([j.weights[n] for j in jobs]) for n in jobs[0].weights}
        self.weights: Tensors = {name: buffer.whole for name, buffer in self.buffers.items()}
        self.given: list[Mapping[str, Tensor]] = []  # the members' weights as it last gave them out
        device = self.data.y.device
        self.mapped, self.done = mapped, 0
        uneven = mapped and any(count % self.batch for count in self.rows)
        self.graph = graph and available(device) and not uneven
        self.optimisers = [
            _Optimiser(number, self.buffers, jobs) for number in range(len(self.phases))
        ]
        self.bounds: dict[int, Bounds] = {}  # of texts, by the number of members not done
        self.counts = pieces(self.data.x) if self.data.texts else self.data.y
        self.fixed = self.graph or fixed
        self.captured: dict[int, torch.cuda.CUDAGraph] = {}
        self.eager: dict[int, int] = {}  # steps of so many members that were taken without a graph
        longest, members = max(self.steps, default=0) * max(1, epochs), len(jobs)
        self.index = torch.zeros((longest, members, self.batch), dtype=torch.int64, device=device)
        self.share = torch.zeros(
            (longest, members, self.batch),
            dtype=self.data.x.dtype if self.data.x.is_floating_point() else torch.float32,
            device=device,
        )
        self.now = torch.zeros((), dtype=torch.int64, device=device)
        self.losses = torch.zeros((len(self.phases), members), dtype=torch.float64, device=device)
        self.lots = self._lots()
        self.shared: dict[int, tuple[int, int]] = {}  # by rows: how shares of a batch are laid out

    def __call__(self, jobs: Sequence[TrainJob], probe: Probe | None = None) -> list[TrainResult]:
        """Do the works of a round; a probe is shown its member after the first steps."""
        jobs = [jobs[i] for i in self.order]
        self.take([job.rows for job in jobs])
        self.load(jobs)
        self.schedule([[job.stream.child("epoch", e) for e in range(job.epochs)] for job in jobs])
        self.go(probe, self.order.index(probe.member) if probe else 0)
        found = dict(zip(self.order, self.unload(jobs), strict=True))
        return [found[place] for place in range(len(jobs))]

    def go(self, probe: Probe | None = None, place: int = 0) -> None:
        """All steps of an epoch or a round; a probe is shown the member at this place."""
        shown = min(probe.steps, self.steps[place]) if probe else 0
        done = 0
        for active, count in self.blocks():
            first = shown - done if done < shown <= done + count else 0
            if first and probe:
                self.run(active, first)
                self._show(probe, place)
            self.run(active, count - first)
            done += count

    def _show(self, probe: Probe, place: int) -> None:
        """Give a probe what a member has now."""
        moved = {name: self.buffers[name] for phase in self.phases for name in phase.moves}
        weights = {name: buffer.places[place] for name, buffer in moved.items()}
        names = [phase.name for phase in self.phases]
        probe.take(weights, dict(zip(names, self.losses[:, place].unbind(), strict=True)))

    def take(self, rows: list[Rows]) -> None:
        """Take other rows than those of last time into the same buffers."""
        places = [_place(one) for one in rows]
        if places == self.places:
            return
        fresh = Bundle.of(rows, into=self.data)
        if fresh is not self.data:
            self.data = fresh
            self.captured.clear()
        if self.data.texts:
            self.counts = pieces(self.data.x)
        self.held, self.places = rows, places

    def load(self, jobs: Sequence[TrainJob]) -> None:
        """Copy weights and moments into the stack's own buffers."""
        _put(self.buffers, [job.weights for job in jobs], self.given)
        if any([optimiser.load(jobs) for optimiser in self.optimisers]):  # noqa: C419 - load all
            self.captured.clear()

    def _lots(self) -> list[_Lot]:
        """Members with as many rows."""
        device, found = self.index.device, []
        for rows in sorted(set(self.rows)):
            members = [i for i, count in enumerate(self.rows) if count == rows]
            every = len(members) == len(self.rows)
            where = slice(None) if every else torch.tensor(members, device=device)
            found.append(_Lot(rows, -(-rows // self.batch), members, where))
        return found

    def schedule(self, streams: Sequence[Sequence[Stream]], together: bool = False) -> None:
        """Which rows each member takes at each step of its epochs, drawn on the device.

        Where members begin every epoch `together`, those with fewer steps wait for the others.
        """
        device, longest = self.index.device, max(self.steps, default=0)
        for lot in self.lots:
            epochs, full = len(streams[lot.members[0]]), lot.steps * self.batch
            keys = [stream.key for i in lot.members for stream in streams[i]]
            first = [self.data.first[i] for i in lot.members for _ in range(epochs)]
            drawn = sent([keys, first], device)
            order = torch.nn.functional.pad(permutations(drawn[0], lot.rows), (0, full - lot.rows))
            order = (order + drawn[1, :, None]).view(-1, epochs, lot.steps, self.batch)
            stride = longest if together else lot.steps
            index, share = (
                whole[: epochs * stride].view(epochs, stride, len(self.rows), self.batch)
                for whole in (self.index, self.share)
            )
            index[:, : lot.steps, lot.where] = order.permute(1, 2, 0, 3)
            if self.shared.get(lot.rows) != (epochs, stride):  # else it is as it was
                self.shared[lot.rows] = (epochs, stride)
                real = torch.arange(full, device=device).view(lot.steps, -1) < lot.rows
                share[:, : lot.steps, lot.where] = real.to(share.dtype)[:, None]
        self.now.zero_()
        self.losses.zero_()
        self.done = 0
        if self.fixed and self.data.texts:
            self._make_room(len(streams[0]) if together else 1)

    def _make_room(self, epochs: int) -> None:
        """How much room the texts of any step need; steps that had less are captured anew."""
        index = self.index.view(epochs, -1, len(self.rows), self.batch)
        known = int(self.data.x.amax()) + 1
        lengths = self.counts[index].sum(-1).cumsum(-1)
        words = torch.stack([different(self.data.x[rows], known).sum(-1) for rows in index])
        begin, wanted = 0, []
        for active, count in self.blocks():
            steps = slice(begin, begin + count)
            wanted += [lengths[:, steps, active - 1].amax(), words[:, steps, :active].amax()]
            begin += count
        most = torch.stack(wanted).tolist() if wanted else []
        for number, (active, _) in enumerate(self.blocks()):
            needed, had = most[2 * number : 2 * number + 2], self.bounds.get(active, Bounds(0, 0))
            if needed[0] > had.pieces or needed[1] > had.words:
                self.bounds[active] = Bounds(*(-(-17 * n // 16) for n in needed))  # and for later
                self.captured.pop(active, None)

    def blocks(self) -> list[tuple[int, int]]:
        """(members that are not done, steps that they share), in order."""
        found, done = [], 0
        for count in sorted(set(self.steps)):
            active = sum(steps >= count for steps in self.steps)
            if count > done:
                found.append((active, count - done))
            done = count
        return found

    def run(self, active: int, count: int) -> None:
        """So many steps of the first members."""
        if active not in self.captured:
            step = self._step_of(active)
            while count and (not self.graph or self.eager.get(active, 0) < EAGER):
                step(True)
                self.eager[active] = self.eager.get(active, 0) + 1
                count -= 1
            if not count:
                return
            self._capture(active, step)
        for _ in range(count):
            self.captured[active].replay()

    def _capture(self, active: int, step: Callable[[bool], None]) -> None:
        """Record a step; just before, one that moves nothing makes this thread's cuBLAS ready."""
        step(False)
        self.captured[active] = common_lane().captured(partial(step, True))

    def _step_of(self, active: int) -> Callable[[bool], None]:
        """One step of the first members, all of it on the device; or the same without moving."""
        weights = {name: tensor[:active] for name, tensor in self.weights.items()}
        moved = [[weights[name].detach().requires_grad_() for name in p.moves] for p in self.phases]
        for phase, leaves in zip(self.phases, moved, strict=True):
            weights |= dict(zip(phase.moves, leaves, strict=True))

        def step(moving: bool) -> None:
            index = self.index.index_select(0, self.now.view(1))[0, :active]
            share = self.share.index_select(0, self.now.view(1))[0, :active]
            batch = self.data.at(index, share, self.bounds.get(active))
            count = share.sum(-1)
            for number, phase in enumerate(self.phases):
                loss = self._loss(phase, weights, batch, active)
                gradients = list(torch.autograd.grad(loss.sum(), moved[number]))
                if not moving:
                    continue
                with torch.no_grad():
                    self.optimisers[number].descend(active, moved[number], gradients)
                    self.losses[number, :active].addcmul_(loss.detach(), count)
            self.now += moving
            self.done += moving

        return step

    def _loss(self, phase: Phase, weights: Tensors, batch: Rows, active: int) -> Tensor:
        """The loss of each of the first members."""
        if not self.mapped:
            return phase.loss(weights, batch).view(active, -1).sum(-1)
        sizes = [size(count, self.batch, self.done) for count in self.rows[:active]]
        return each(phase.loss, weights, batch, sizes)

    def unload(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        """What each member has now; works in the order of members."""
        names = [phase.name for phase in self.phases]
        moved = {name for phase in self.phases for name in phase.moves}
        moments = [optimiser.unload(jobs) for optimiser in self.optimisers]
        self.given = self._given(jobs, sorted(moved))
        memory = [{**job.moments} for job in jobs]
        for part in moments:
            for all_moments, own in zip(memory, part, strict=True):
                all_moments.update(own)
        sums, found = Arriving(self.losses), []
        for place, job in enumerate(jobs):
            losses = Losses(sums, names, place, max(1, job.epochs * self.rows[place]))
            found.append(TrainResult(self.given[place], memory[place], losses))
        return found

    def _given(self, jobs: Sequence[TrainJob], moved: Sequence[str]) -> list[Mapping[str, Tensor]]:
        """The members' weights, copied: parts of wholes, but where members' own are narrower."""
        if any(self.buffers[name].widths for name in moved):
            own = _members({name: self.buffers[name].copies() for name in moved}, len(jobs))
            return [{**job.weights, **mine} for job, mine in zip(jobs, own, strict=True)]
        wholes = Wholes({name: self.buffers[name].whole.clone() for name in moved})
        kept = [name for name in self.buffers if name not in moved]
        return [
            Part(wholes, place, {name: job.weights[name] for name in kept})
            for place, job in enumerate(jobs)
        ]


def signature(jobs: Sequence[TrainJob]) -> Hashable:
    """A stack fits jobs of its key on as many rows, whatever their weights and rates are."""
    return tuple([(len(job.rows), job.rows.own.shape[-1], job.epochs) for job in jobs])


class _Optimiser:
    """The optimiser of one phase for all members; rates and counts of steps may differ."""

    def __init__(
        self, number: int, weights: Mapping[str, _Buffer], jobs: Sequence[TrainJob]
    ) -> None:
        self.number, self.phase = number, jobs[0].phases[number]
        self.rates: list[float] = []
        self.adaptive = self.phase.optimiser.kind == "adam"
        moved = [weights[name].whole for name in self.phase.moves]
        moments = self.phase.moves if self.adaptive else ()
        self.first, self.second = (
            [_Buffer([job.weights[name] for job in jobs]) for name in moments] for _ in range(2)
        )
        self.buffers = {f"first/{n}": b for n, b in zip(moments, self.first, strict=True)}
        self.buffers |= {f"second/{n}": b for n, b in zip(moments, self.second, strict=True)}
        self.given: list[Tensors] = []  # moments as they were last given out
        device = moved[0].device
        self.rate = torch.zeros(len(jobs), dtype=torch.float64, device=device)
        self.taken = torch.zeros(len(jobs), dtype=torch.float64, device=device)
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
            _put(self.buffers, [job.moments for job in jobs], self.given)
            self.taken.copy_(sent(self.before, device, torch.float64))
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
            taken, moments = self.taken[:active], (firsts, seconds)
            rates, how = self.rate[:active], self.phase.optimiser
            adam.adam(weights, gradients, moments, rates, taken, (how.decay, how.epsilon))
            taken += rates >= 0
            return
        if self.free or len(self.groups) > GROUPS:
            self._by_formula(active, weights, gradients, (firsts, seconds))
            return
        for (start, stop, rate), counts in zip(self.groups, self.counts, strict=True):
            if start >= active:
                break
            part = slice(start, min(stop, active))
            how = replace(self.phase.optimiser, rate=rate)
            descend(
                [w[part] for w in weights],
                [g[part] for g in gradients],
                ([m[part] for m in firsts], [m[part] for m in seconds], counts),
                how,
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
        steps = self.taken[:active].add_(live).clamp(min=1)
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
        taken = [before + job.steps for before, job in zip(self.before, jobs, strict=True)]
        if self.free:
            taken = [int(count) for count in self.taken.tolist()]
        columns: dict[str, list[Tensor]] = {
            f"steps/{self.phase.name}": [torch.tensor(count) for count in taken],
            **{name: buffer.copies() for name, buffer in self.buffers.items()},
        }
        self.given = _members(columns, len(jobs))
        return self.given


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


@torch.no_grad()
def tally(jobs: Sequence[EvalJob]) -> list[Tensor]:
    """The counts of many members in one pass; rows that fill up count nothing."""
    weights = {name: _stacked([job.weights[name] for job in jobs]) for name in jobs[0].weights}
    data = Bundle.of([job.rows for job in jobs])
    device, longest = data.y.device, max(len(job.rows) for job in jobs)
    sizes, first = sent([[len(job.rows) for job in jobs], data.first], device)
    total, chunk = None, max(1, CELLS // len(jobs))
    for start in range(0, max(1, longest), chunk):
        place = torch.arange(start, min(start + chunk, longest), device=device).expand(
            len(jobs), -1
        )
        real = place < sizes[:, None]
        batch = data.at(torch.where(real, place + first[:, None], 0), real.to(torch.float32))
        said = jobs[0].function(weights, batch)
        while real.dim() < said.dim():
            real = real.unsqueeze(-2)
        counts = (said * real).sum(-1)
        total = counts if total is None else total + counts
    assert total is not None
    return list(total.cpu())
