"""A round of split learning as one computation, where one process holds the halves of all parts.

`SplitStack` runs the steps of one run, or of several runs of one form, on the device. It stacks
halves of one shape, and runs, along a leading axis of weights and rows. It computes the output of a
half whose weights are all frozen once. On a GPU it captures a step in a CUDA graph. The numbers
equal those of the exchange message by message up to rounding.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from atoll.compute.graphs import Lane, available
from atoll.compute.probe import Probe
from atoll.core.messages import Tensors
from atoll.core.rng import Stream, permutations
from atoll.jobs.split_round import Lent, SplitJob, SplitResult, Step, View, draws, viewed
from atoll.learning.split import distance_gradient, dropout, guarded, rounded

__all__ = ["WAYS", "SplitStack", "Way", "trial_key"]

Way = Literal["each", "grouped", "unfolded"]  # how halves of one shape do their forward pass
WAYS: tuple[Way, ...] = ("each", "grouped", "unfolded")
EAGER = 2  # steps before a CUDA graph is captured
CELLS = 1 << 14  # rows of all halves in one pass without gradient


def trial_key(job: SplitJob) -> Hashable:
    """The key of the fastest way: the halves that train, not how many rows there are."""
    moving = [lent for lent in job.lent if not lent.still]
    shapes = [(half.function, tuple(half.x.shape[1:]), str(half.x.dtype)) for half in moving]
    return ("passes", tuple(shapes), job.batches.size * (1 + len(job.views)))


def split_signature(jobs: Sequence[SplitJob]) -> Hashable:
    """Rounds on the same rows with the same masks can reuse one stack."""
    return tuple(
        (job.y.data_ptr(), *((lent.x.data_ptr(), _place(lent.frozen)) for lent in job.lent))
        for job in jobs
    )


def _place(tensors: Tensors | None) -> int:
    return next(iter(tensors.values())).data_ptr() if tensors else 0


def _copy(buffers: Tensors, values: Mapping[str, Tensor]) -> bool:
    """Copy values into persistent buffers; returns whether anything changed."""
    changed = False
    for name, value in values.items():
        if name not in buffers:
            buffers[name], changed = value.clone(), True
        elif not torch.equal(buffers[name], value):
            buffers[name].copy_(value)
            changed = True
    return changed


def _stacked(items: Sequence[Mapping[str, Tensor]]) -> Tensors:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


class _Halves:
    """Halves of one form in all runs; the leading axis of weights and rows is runs x clients."""

    def __init__(self, lent: Sequence[Lent], places: Sequence[int], runs: int, way: Way) -> None:
        self.half, self.places, self.runs, self.way = lent[0], list(places), runs, way
        self.count = len(places)
        self.x = torch.stack([half.x for half in lent])
        self.weights: Tensors = {}
        self.frozen = _stacked([half.frozen for half in lent if half.frozen is not None] or [{}])
        self.before: Tensors = {}
        self.now: list[Tensor] = []  # embeddings of all rows by frozen halves, one table per view
        self.past: list[Tensor] = []  # the same by the reference weights
        self.keys = torch.zeros((0, len(lent)), dtype=torch.int64, device=self.x.device)
        self.members = torch.arange(len(lent), device=self.x.device)[:, None]
        self.leaves: Tensors = {}
        self.graph: tuple[Tensor, Tensor] | None = None  # embedding, and its part that is sent

    def load(self, lent: Sequence[Lent], views: Sequence[View]) -> None:
        """Load the weights of a round."""
        if _copy(self.weights, _stacked([half.weights for half in lent])):
            if self.half.still:
                self._fill(self.now, self.weights, views)
            self.leaves = {n: w.detach().requires_grad_() for n, w in self.weights.items()}
        if self.half.before and _copy(self.before, _stacked([half.before for half in lent])):
            self._fill(self.past, self.before, views)
        if self.half.dropped:
            keys = torch.tensor([half.keys for half in lent], device=self.x.device).T
            self.keys = keys if not len(self.keys) else self.keys.copy_(keys)

    @torch.no_grad()
    def _fill(self, tables: list[Tensor], weights: Tensors, views: Sequence[View]) -> None:
        """Fill tables with the embeddings of all rows, one table per view."""
        size = max(1, CELLS // len(self.x))
        for number, x in enumerate([self.x, *(view(self.x) for view in views)]):
            parts = [self._embed(weights, part) for part in x.split(size, 1)]
            if number < len(tables):  # a captured graph reads them at this address
                tables[number].copy_(torch.cat(parts, 1))
            else:
                tables.append(torch.cat(parts, 1))

    def _embed(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """(members, rows, ...) -> (members, rows, width), by the chosen way."""
        function = self.half.function
        if self.way == "each" or len(x) == 1:
            parts = [function({n: w[i] for n, w in weights.items()}, x[i]) for i in range(len(x))]
            return torch.stack(parts)
        if self.way == "grouped":  # vmap makes grouped convolutions of convolutions
            return function(weights, x)
        return function.model.unfolded(weights, x)  # type: ignore[no-any-return, operator]

    def forward(self, rows: Tensor, step: Tensor, views: Sequence[View]) -> Tensor:
        """The embeddings that clients send: (runs, batch) -> (runs, clients, batch, width)."""
        indices = rows.repeat_interleave(self.count, 0)
        if self.half.still:
            embedding = torch.cat([table[self.members, indices] for table in self.now], 1)
        else:
            x = viewed(self.x[self.members, indices], views, 1)
            embedding = self._embed(self.leaves, x)
        if self.half.dropped:
            keys = self.keys.index_select(0, step.view(1))[0]
            shape = tuple(embedding.shape[1:])
            masks = [dropout(self.half.dropped, shape, key, embedding) for key in keys.unbind()]
            embedding = embedding * torch.stack([mask for mask in masks if mask is not None])
        self.graph = (embedding, indices)
        return self._apart(rounded(embedding.detach(), self.half.digits))

    def reference(self, rows: Tensor) -> Tensor:
        """The embeddings by the reference weights, as clients send them."""
        indices = rows.repeat_interleave(self.count, 0)
        parts = [table[self.members, indices] for table in self.past]
        return self._apart(rounded(torch.cat(parts, 1), self.half.digits))

    def _apart(self, embedding: Tensor) -> Tensor:
        return embedding.view(self.runs, self.count, *embedding.shape[1:])

    def descend(self, gradient: Tensor) -> None:
        """One step by the gradient of the embeddings: (runs, clients, batch, width)."""
        if self.half.still:
            return
        assert self.graph is not None  # forward() comes first
        embedding, indices = self.graph
        gradient = gradient.flatten(0, 1)
        if self.half.penalty and self.past:
            past = torch.cat([table[self.members, indices] for table in self.past], 1)
            gradient = gradient + self.half.penalty * distance_gradient(embedding.detach(), past)
        gradients = torch.autograd.grad(embedding, list(self.leaves.values()), gradient)
        with torch.no_grad():
            for (name, weight), by in zip(self.weights.items(), gradients, strict=True):
                moved = weight - self.half.rate * by
                frozen = self.frozen.get(name)
                weight.copy_(moved if frozen is None else torch.where(frozen, weight, moved))
        self.graph = None


@contextmanager
def _exact_as_products(device: torch.device) -> Iterator[None]:
    """On a GPU, give convolutions the TF32 setting of matrix products."""
    before = torch.backends.cudnn.allow_tf32
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = before


def _first(value: Any) -> Any:
    """The values of the first run; runs are the leading axis."""
    if isinstance(value, dict):
        return {name: tensor[0] for name, tensor in value.items()}
    return Step(*(tensor[0] for tensor in value)) if isinstance(value, Step) else value[0]


class SplitStack:
    """Rounds of one form in lockstep; built once for a stage, loaded and run each round."""

    def __init__(self, jobs: Sequence[SplitJob], way: Way, graph: bool = True) -> None:
        first = jobs[0]
        self.job, self.runs = first, len(jobs)
        self.device = first.y.device
        self.signature = split_signature(jobs)
        self.jobs = list(jobs)  # keeps the memory of their rows allocated
        self.y = torch.stack([job.y for job in jobs])
        self.groups = self._grouped(jobs, way)
        self.weights: Tensors = {}
        self.leaves: Tensors = {}
        self.constants: Tensors = {}
        epochs = first.steps // len(first.batches)
        self.epochs = epochs
        zeros = partial(torch.zeros, dtype=torch.int64, device=self.device)
        self.order = zeros((self.runs, epochs * first.batches.rows))
        self.keys = zeros((first.steps, self.runs))
        self.step, self.start = zeros(()), zeros(())
        self.totals: Tensors = {}
        self.sums = torch.zeros((self.runs, first.class_sums, 0), device=self.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.lane = Lane(self.device) if graph and available(self.device) else None
        self.eager: dict[int, int] = {}

    def _grouped(self, jobs: Sequence[SplitJob], way: Way) -> list[_Halves]:
        forms: dict[Hashable, list[int]] = {}
        for place, lent in enumerate(jobs[0].lent):
            forms.setdefault(lent.form, []).append(place)
        return [
            _Halves([job.lent[p] for job in jobs for p in places], places, self.runs, way)
            for places in forms.values()
        ]

    def fits(self, jobs: Sequence[SplitJob]) -> bool:
        """Whether these are on the same rows with the same masks."""
        return split_signature(jobs) == self.signature

    def run(self, jobs: Sequence[SplitJob], probe: Probe | None = None) -> list[SplitResult]:
        """Run the steps of a round; a probe sees its run after the first of them."""
        sizes = [size for size, count in self._sizes() for _ in range(count)]
        first = probe.steps if probe else 0
        with _exact_as_products(self.device):
            self._load(jobs)
            for size in sizes[:first]:
                self._advance(size)
            if probe:
                self._show(probe)
            for size in sizes[first:]:
                self._advance(size)
        return self._unload(jobs)

    def begin(self, jobs: Sequence[SplitJob], probe: Probe) -> None:
        """Run only the steps that a probe asks for."""
        sizes = [size for size, count in self._sizes() for _ in range(count)]
        with _exact_as_products(self.device):
            self._load(jobs)
            for size in sizes[: probe.steps]:
                self._advance(size)
        self._show(probe)

    def _show(self, probe: Probe) -> None:
        """Give a probe the weights of a run: its top, and the halves of all clients."""
        run = probe.member
        weights = {f"top/{n}": w[run] for n, w in self.weights.items()}
        for number, group in enumerate(self.groups):
            members = slice(run * group.count, (run + 1) * group.count)
            weights |= {f"{number}/{n}": w[members] for n, w in group.weights.items()}
        probe.take(weights, {n: total[run] for n, total in self.totals.items()})

    def _load(self, jobs: Sequence[SplitJob]) -> None:
        """Copy the inputs of a round into persistent buffers."""
        _copy(self.weights, _stacked([job.weights for job in jobs]))
        if not self.leaves:
            self.leaves = {n: w.detach().requires_grad_() for n, w in self.weights.items()}
        _copy(self.constants, _stacked([job.constants for job in jobs]))
        for group in self.groups:
            places = group.places
            group.load([job.lent[p] for job in jobs for p in places], self.job.views)
        keys = [
            Stream(j.batches.key).child("epoch", e).key for j in jobs for e in range(self.epochs)
        ]
        orders = permutations(torch.tensor(keys, device=self.device), self.job.batches.rows)
        self.order.copy_(orders.view(self.runs, -1))
        steps = range(self.job.steps)
        self.keys.copy_(torch.tensor([[j.stream.child(s).key for j in jobs] for s in steps]))
        self.step.zero_()
        self.start.zero_()
        for total in self.totals.values():
            total.zero_()
        self.sums.zero_()

    def _sizes(self) -> list[tuple[int, int]]:
        """(rows of a batch, how many of them), in order."""
        rows, size = self.job.batches.rows, self.job.batches.size
        epoch = [(size, rows // size), (rows % size, 1 if rows % size else 0)]
        return [part for part in epoch if part[1]] * self.epochs

    def _advance(self, size: int) -> None:
        """One step; on a GPU, a replay once it has run a few times."""
        if size in self.graphs:
            self.graphs[size].replay()
        elif self.lane is None:
            self._step(size)
        else:
            self.lane.open()
            with self.lane.on_stream():
                self._step(size)
            self.lane.close()
            self.eager[size] = self.eager.get(size, 0) + 1
            if self.eager[size] >= EAGER:  # on the thread that has just run one
                self.graphs[size] = self.lane.captured(partial(self._step, size))

    def _step(self, size: int) -> None:
        """One step of all halves, entirely on the device."""
        job = self.job
        places = self.start + torch.arange(size, device=self.device)
        rows = self.order.index_select(1, places)
        y = job.labels(self.y.gather(1, rows))
        joint = self._joined([g.forward(rows, self.step, job.views) for g in self.groups])
        joint.requires_grad_()
        key = self.keys.index_select(0, self.step.view(1))[0]
        step = Step(joint, self._before(rows, joint), y, key)
        terms = self._each(job.loss, self.leaves, self.constants, step)
        inputs = [joint, *self.leaves.values()]
        by_joint, *gradients = torch.autograd.grad(terms["loss"].sum(), inputs)
        with torch.no_grad():
            for weight, by in zip(self.weights.values(), gradients, strict=True):
                weight.sub_(job.rate * by)
            self._count(terms, joint, y)
            by_joint = self._each(
                lambda g, k: guarded(g, job.clip, job.noise, draws(k, 3)), by_joint, key
            )
        for group in self.groups:
            group.descend(self._part(by_joint, group))
        self.step += 1
        self.start += size

    def _each(self, function: Callable[..., Any], *values: Any) -> Any:
        """Apply a function of one run to all runs."""
        if self.runs > 1:
            return torch.vmap(function)(*values)
        alone = [_first(value) for value in values]
        result = function(*alone)
        if isinstance(result, dict):
            return {name: tensor[None] for name, tensor in result.items()}
        return result[None]

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The joined embeddings: (runs, batch, width)."""
        job = self.job
        if job.agg != "concat":
            total = torch.stack([part.sum(1) for part in parts]).sum(0)
            return total if job.agg == "sum" else total / len(job.ids)
        like = torch.zeros_like(parts[0][:, 0])
        pieces = [like] * job.parties
        for group, part in zip(self.groups, parts, strict=True):
            for number, place in enumerate(group.places):
                pieces[job.places[place]] = part[:, number]
        return torch.cat(pieces, -1)

    def _before(self, rows: Tensor, joint: Tensor) -> Tensor:
        """The joined embeddings by the reference weights; no rows unless clients send them."""
        if not self.job.sends_before:
            return joint.detach()[:, :0]
        return self._joined([group.reference(rows) for group in self.groups])

    def _part(self, by_joint: Tensor, group: _Halves) -> Tensor:
        """The gradient of the embeddings of each client of a group."""
        job = self.job
        if job.agg == "concat":
            pieces = by_joint.chunk(job.parties, -1)
            return torch.stack([pieces[job.places[place]] for place in group.places], 1)
        part = by_joint if job.agg == "sum" else by_joint / len(job.ids)
        return part[:, None].expand(-1, group.count, -1, -1)

    def _count(self, terms: Mapping[str, Tensor], joint: Tensor, y: Tensor) -> None:
        for name, term in terms.items():
            if name not in self.totals:
                self.totals[name] = torch.zeros(self.runs, dtype=torch.float64, device=self.device)
            self.totals[name] += term.detach().double() * y.shape[1]
        if self.job.class_sums:
            if not self.sums.shape[2]:
                shape = (self.runs, self.job.class_sums, joint.shape[2])
                self.sums = torch.zeros(shape, dtype=torch.float64, device=self.device)
            where = y[..., None].expand(-1, -1, joint.shape[2])
            self.sums.scatter_add_(1, where, joint.detach().double())

    def _unload(self, jobs: Sequence[SplitJob]) -> list[SplitResult]:
        """The result of each run."""
        halves: list[list[Tensors]] = [[{} for _ in self.job.ids] for _ in jobs]
        for group in self.groups:
            for run in range(self.runs):
                for number, place in enumerate(group.places):
                    member = run * group.count + number
                    halves[run][place] = {n: w[member].clone() for n, w in group.weights.items()}
        totals = {name: total.tolist() for name, total in self.totals.items()}
        return [
            SplitResult(
                {n: w[run].clone() for n, w in self.weights.items()},
                tuple(halves[run]),
                {name: total[run] for name, total in totals.items()},
                self.sums[run].clone(),
            )
            for run in range(self.runs)
        ]
