"""Random losses for one client: the engine never accepts a stack that differs from the loop.

A random loss is a program: a classification loss plus terms, each of them an operand, a reduction
and a factor. Many pieces are right for one client and wrong for a stack (they reduce over the wrong
axis, broadcast against the wrong axis, or count the padding of a batch). Many constants are zero in
the first round, when the engine decides, and not later.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.compute import autotune, proof
from atoll.compute.accelerated import Candidate
from atoll.compute.compare import max_relative_error
from atoll.compute.kinds.train import TRAIN
from atoll.compute.stacking import Stack
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.train import Optimiser, Phase, TrainJob, TrainResult
from atoll.learning.losses import cross_entropy
from atoll.learning.models import outputs

EXAMPLES = int(os.environ.get("ATOLL_LOSSES", "200"))
TOLERANCE = 1e-8  # relative, in double precision
ROUNDS = 2  # in the second, no constant is zero and rows are others
RATE = 0.05

Weights = Mapping[str, Tensor]
Rounds = list[tuple[list[TrainJob], list[TrainResult]]]
WayName = Literal["batched", "mapped"]
WAYS: tuple[WayName, ...] = ("batched", "mapped")


# The language of losses. Names with "aware" are right for a stack of members, too.


def _logits(weights: Weights, batch: Rows, network: str) -> Tensor:
    depth = sum(name.startswith("weight") for name in weights)
    if network == "aware":
        return outputs(weights, batch.x, depth)[-1]
    x = batch.x
    for layer in range(depth):
        x = x @ weights[f"weight{layer}"].mT + weights[f"bias{layer}"]
        x = torch.relu(x) if layer < depth - 1 else x
    return x


def _log_likelihood(logits: Tensor, batch: Rows) -> Tensor:
    return logits.log_softmax(-1).gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)


BASES: dict[str, Callable[[Tensor, Rows], Tensor]] = {
    "aware": cross_entropy,
    "torch": lambda logits, batch: F.cross_entropy(logits, batch.y),
    "flat": lambda logits, batch: F.cross_entropy(logits.flatten(0, -2), batch.y.flatten()),
    "all rows": lambda logits, batch: -_log_likelihood(logits, batch).mean(),
    "padding": lambda logits, batch: -_log_likelihood(logits, batch).mean(-1),
}


@dataclass(frozen=True)
class Scope:
    """What an operand may read."""

    weights: Weights
    batch: Rows
    logits: Tensor
    name: str  # of one of the weights that move

    @property
    def w(self) -> Tensor:
        return self.weights[self.name]

    def constant(self, kind: str) -> Tensor:
        """A constant of this client, of the shape of the weight."""
        return self.weights[f"{kind}/{self.name}"]

    @property
    def drift(self) -> Tensor:
        return self.w - self.constant("anchor")

    @property
    def share(self) -> Tensor:
        """How much each row counts."""
        share = self.batch.share
        return torch.ones_like(self.logits[..., 0]) if share is None else share


OPERANDS: dict[str, Callable[[Scope], Tensor]] = {
    # of the weights and constants, elementwise: right for a stack if the reduction is
    "weight": lambda s: s.w,
    "square": lambda s: s.w**2,
    "drift": lambda s: s.drift.tanh(),
    "squared drift": lambda s: s.drift**2,
    "importance": lambda s: s.constant("importance") * s.drift**2,
    "shift": lambda s: s.w * s.constant("shift"),
    "control": lambda s: s.w * (s.constant("control") - s.constant("shift")),
    "shift of drift": lambda s: s.constant("shift") * s.drift.abs(),
    "softmax of last axis": lambda s: s.w.softmax(-1) * s.constant("shift"),
    "centred last axis": lambda s: (s.w - s.w.mean(-1, keepdim=True)) ** 2,
    # of the first axis, which is another one in a stack
    "softmax of first axis": lambda s: s.w.softmax(0) * s.constant("shift"),
    "centred first axis": lambda s: (s.w - s.w.mean(0)) ** 2,
    "rolled": lambda s: s.w * s.constant("shift").roll(1, 0),
    "flipped": lambda s: s.w * s.constant("control").flip(0),
    "cumulated": lambda s: s.drift.cumsum(0) ** 2,
    "first entry": lambda s: s.drift[0] ** 2,
    # of all entries, which are those of all members in a stack
    "normalised": lambda s: s.w / (1 + s.w.norm()) * s.constant("shift"),
    "scaled by drift": lambda s: s.w**2 * s.drift.norm(),
    "scaled by importance": lambda s: s.w**2 * s.constant("importance").mean(),
    "scaled by maximum": lambda s: s.drift**2 * s.constant("shift").abs().max(),
    # broadcasts: a scalar of each client is a vector in a stack
    "times strength": lambda s: s.drift**2 * s.weights["strength"],
    "plus strength": lambda s: (s.w + s.weights["strength"]) ** 2,
    "times bias": lambda s: s.weights["weight0"] * s.weights["bias0"][:, None],
    "times bias aware": lambda s: s.weights["weight0"] * s.weights["bias0"].unsqueeze(-1),
    "plus bias shift": lambda s: (s.weights["weight0"].mT + s.weights["shift/bias0"]) ** 2,
    # of the batch
    "row mean": lambda s: s.weights["weight0"] * s.batch.x.mean(0),
    "row mean with padding": lambda s: s.weights["weight0"] * s.batch.x.mean(-2, keepdim=True),
    "label share": lambda s: s.w**2 * (s.batch.y == 1).double().mean(),
    "count of rows": lambda s: s.w**2 / len(s.batch),
    "logits": lambda s: s.logits**2 / 8,
    "logits aware": lambda s: s.logits**2 * s.share.unsqueeze(-1) / 8,
    "centred logits": lambda s: (s.logits - s.logits.mean(0)) ** 2 / 8,
    "centred logits with padding": lambda s: (s.logits - s.logits.mean(-2, keepdim=True)) ** 2 / 8,
    "logits by spread": lambda s: s.logits / (1 + s.logits.var(correction=0)),
    "inputs by strength": lambda s: (s.logits * s.weights["strength"]).tanh(),
}

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "aware": lambda value, loss: value.reshape(*loss.shape, -1).sum(-1),
    "aware mean": lambda value, loss: value.reshape(*loss.shape, -1).mean(-1),
    "sum": lambda value, _: value.sum(),
    "mean": lambda value, _: value.mean(),
    "max": lambda value, _: value.max(),
    "norm": lambda value, _: value.norm(),
    "sum of first axis": lambda value, _: value.sum(0).square().mean(),
    "mean of first axis": lambda value, _: value.mean(0).sum(),
    "norm of first axis": lambda value, _: value.norm(dim=0).sum(),
    "largest of first axis": lambda value, _: value.amax(0).sum(),
    "sum of last axis": lambda value, _: value.sum(-1).mean(),
    "two last axes": lambda value, _: value.sum(-1).sum(-1),
    "sum of last axis, first entry": lambda value, _: value.sum(-1).flatten()[0],
    "logarithm of exponentials": lambda value, _: value.flatten().logsumexp(0),
}

FACTORS: dict[str, Callable[[Weights, Tensor], Tensor | float]] = {
    "one": lambda weights, loss: 1.0,
    "strength": lambda weights, loss: weights["strength"],
    "flag": lambda weights, loss: weights["flag"],
    "strength and flag": lambda weights, loss: weights["strength"] * weights["flag"],
    "squared strength": lambda weights, loss: weights["strength"] ** 2,
    "loss": lambda weights, loss: loss.tanh(),
    "loss and strength": lambda weights, loss: loss.tanh() * weights["strength"],
    "mean strength": lambda weights, loss: weights["strength"].mean(),
    "positive strength": lambda weights, loss: weights["strength"].clamp(min=0),
    "branch": lambda weights, loss: 1.0 if weights["flag"] > 0 else 0.5,
    "branch on any": lambda weights, loss: 1.0 if (weights["flag"] > 0).any() else 0.5,
}
MIXED = ("mean strength", "branch", "branch on any")  # factors that mix members


@dataclass(frozen=True)
class Term:
    """One addend of a loss."""

    scale: float
    factor: str
    operand: str
    reduction: str
    place: int  # which of the weights that move


@dataclass(frozen=True)
class Program:
    """A loss."""

    network: str
    base: str
    terms: tuple[Term, ...]


def composed(weights: Weights, batch: Rows, *, program: Program) -> Tensor:
    """The loss that a program describes."""
    logits = _logits(weights, batch, program.network)
    loss = BASES[program.base](logits, batch)
    moving = sorted(name for name in weights if name.startswith(("weight", "bias")))
    for term in program.terms:
        scope = Scope(weights, batch, logits, moving[term.place % len(moving)])
        value = REDUCTIONS[term.reduction](OPERANDS[term.operand](scope), loss)
        loss = loss + term.scale * FACTORS[term.factor](weights, loss) * value
    return loss


# Random programs, and the clients that train by them.

ELEMENTWISE = (*tuple(OPERANDS)[:10], "times bias aware", "logits aware")
CONSTANTS = ("anchor", "importance", "shift", "control", "strength", "flag")


@dataclass(frozen=True)
class World:
    """Clients, their sizes, and the constants that are zero in the first round."""

    members: int
    features: int
    classes: int
    hidden: int  # 0: a linear network
    batch: int
    rows: tuple[int, ...]  # of each member
    later: tuple[int, ...]  # the same in the last round
    asleep: frozenset[str]  # zero in the first round; an anchor: equal to the weights
    shared: bool  # members begin every round with the same weights
    optimiser: Literal["adam", "sgd"]
    seed: int


def terms(aware: bool) -> st.SearchStrategy[Term]:
    """Terms that are right for a stack, or any."""
    factors = [name for name in FACTORS if not (aware and name in MIXED)]
    reductions = ["aware"] if aware else list(REDUCTIONS)
    return st.builds(
        Term,
        scale=st.sampled_from([0.5, 0.1, -0.1]),
        factor=st.sampled_from(factors),
        operand=st.sampled_from(ELEMENTWISE if aware else list(OPERANDS)),
        reduction=st.sampled_from(reductions),
        place=st.integers(0, 3),
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A third of all losses is right for a stack by design, the others may be."""
    kind = draw(st.sampled_from(["aware", "one term of any kind", "anything"]))
    if kind == "anything":
        some = st.lists(terms(aware=False), min_size=1, max_size=3).map(tuple)
        bases = st.one_of(st.just("aware"), st.sampled_from(list(BASES)))
        networks = st.one_of(st.just("aware"), st.sampled_from(["aware", "plain"]))
        return Program(draw(networks), draw(bases), draw(some))
    right = draw(st.lists(terms(aware=True), min_size=1, max_size=3))
    odd = [draw(terms(aware=False))] if kind == "one term of any kind" else []
    return Program("aware", "aware", tuple(odd + right))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Small sizes, so that an axis of members is often as long as another axis."""
    members, batch = draw(st.integers(2, 4)), draw(st.integers(2, 5))
    sizes = st.one_of(st.just(batch), st.integers(1, 3 * batch))
    rows, later = (tuple(draw(sizes) for _ in range(members)) for _ in range(2))
    return World(
        members,
        features=draw(st.integers(2, 4)),
        classes=draw(st.integers(2, 4)),
        hidden=draw(st.sampled_from([0, 3, 4])),
        batch=batch,
        rows=rows,
        later=later,
        asleep=frozenset(draw(st.sets(st.sampled_from(CONSTANTS)))),
        shared=draw(st.booleans()),
        optimiser=draw(st.sampled_from(["sgd", "adam"])),
        seed=draw(st.integers(0, 2**16)),
    )


def start(world: World) -> dict[str, Tensor]:
    """First weights."""
    sizes = [world.features, *([world.hidden] if world.hidden else []), world.classes]
    generator = torch.Generator().manual_seed(world.seed)
    found = {}
    for layer, (below, above) in enumerate(pairwise(sizes)):
        for name, shape in ((f"weight{layer}", (above, below)), (f"bias{layer}", (above,))):
            found[name] = torch.randn(shape, generator=generator, dtype=torch.float64) / 2
    return found


def job(
    world: World, program: Program, number: int, member: int, moved: Mapping[str, Tensor]
) -> TrainJob:
    """The work of a member in a round, from these weights on."""
    key = 1000 * (world.seed + 1) + 10 * number + member
    generator = torch.Generator().manual_seed(key)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / 2

    weights = dict(moved)
    for kind in CONSTANTS:
        asleep = number == 0 and kind in world.asleep
        like = {kind: torch.zeros(())} if kind in ("strength", "flag") else moved
        for name, tensor in like.items():
            drawn = draw(*tensor.shape)
            if asleep:
                drawn = tensor.clone() if kind == "anchor" else torch.zeros_like(drawn)
            weights[name if name == kind else f"{kind}/{name}"] = drawn
    size = (world.later if number == ROUNDS - 1 else world.rows)[member]
    labels = torch.randint(0, world.classes, (size,), generator=generator)
    rows = Rows(draw(size, world.features), draw(size, 0), labels)
    loss = partial(composed, program=program)
    phase = Phase("loss", tuple(moved), loss, Optimiser(world.optimiser, RATE))
    return TrainJob(weights, {}, (phase,), rows, world.batch, 1, Stream.of(key))


def loop(world: World, program: Program) -> Rounds:
    """The rounds of a run, one client after another: the jobs and their results."""
    starts, found = [start(world)] * world.members, []
    for number in range(ROUNDS):
        jobs = [job(world, program, number, m, weights) for m, weights in enumerate(starts)]
        done = [one.run() for one in jobs]
        found.append((jobs, done))
        starts = [{name: one.weights[name] for name in starts[0]} for one in done]
        if world.shared:
            mean = {n: torch.stack([one[n] for one in starts]).mean(0) for n in starts[0]}
            starts = [mean] * world.members
    return found


def difference(wanted: Sequence[TrainResult], got: Sequence[TrainResult]) -> float:
    pairs = zip(wanted, got, strict=True)
    return max(max_relative_error(one.weights, other.weights) for one, other in pairs)


def accepted(jobs: Sequence[TrainJob], monkeypatch: pytest.MonkeyPatch) -> dict[WayName, bool]:
    """Which ways the engine accepts by the jobs of the first round, each by itself.

    `auto` asks the same and then takes the faster one.
    """
    first_equal, holds = FIRST_EQUAL, dict.fromkeys(WAYS, False)

    def each(kind: Any, cases: Any, candidates: Sequence[Candidate]) -> proof.Verdict:
        verdicts = [first_equal(kind, cases, [one]) for one in candidates]
        for way in WAYS:
            holds[way] = any(verdict.way == way for verdict in verdicts)
        return next((one for one in verdicts if one.holds), verdicts[-1])

    monkeypatch.setattr(proof, "_first_equal", each)
    choice = autotune.proved(TRAIN, "work", jobs)
    assert choice.way == next((way for way in WAYS if holds[way]), "")
    assert choice.mode == ("stacked" if choice.way else "loop")
    return holds


FIRST_EQUAL = proof._first_equal
TRUTHS = ("fails", "equal", "wrong at once", "wrong later")
UNSTABLE = "unstable"  # the loop alone would differ


def unproved(rounds: Rounds, way: WayName) -> str:
    """What a stack gives that nobody has proved, over all rounds of a run."""
    equal, stacks = [], list[Stack]()
    for jobs, wanted in rounds:
        try:
            if not any(stack.fits(jobs) for stack in stacks):
                stacks.append(Stack(jobs, mapped=way == "mapped"))
            done = next(stack for stack in stacks if stack.fits(jobs)).run(jobs)
        except Exception:  # a loss may fail in any way on what it was not written for
            return TRUTHS[0]
        equal.append(difference(wanted, done) <= TOLERANCE)
    return TRUTHS[1] if all(equal) else TRUTHS[3 if equal[0] else 2]


def stable(rounds: Rounds) -> bool:
    """Whether the loop gives the same from weights that differ by rounding.

    Where two entries are exactly as large, the gradient of their maximum is that of either.
    """
    generator = torch.Generator().manual_seed(0)
    for jobs, wanted in rounds:
        for one, result in zip(jobs, wanted, strict=True):
            near = {
                n: w + 1e-14 * torch.randn(w.shape, generator=generator, dtype=w.dtype)
                for n, w in one.weights.items()
            }
            if difference([result], [replace(one, weights=near).run()]) > TOLERANCE:
                return False
    return True


@dataclass
class Census:
    """Counts of losses: by way, by what a stack gives without a proof, by verdict."""

    losses: set[Program]
    verdicts: Counter[tuple[WayName, str, bool]]

    def share(self, way: WayName, *truths: str, accepted: bool | None = None) -> float:
        """The share of losses of which a stack of this way has these truths and this verdict."""
        of_way = {key[1:]: count for key, count in self.verdicts.items() if key[0] == way}
        counts = [
            count
            for (truth, verdict), count in of_way.items()
            if truth in (truths or (*TRUTHS, UNSTABLE)) and accepted in (None, verdict)
        ]
        return sum(counts) / sum(of_way.values())


def census(monkeypatch: pytest.MonkeyPatch) -> Census:
    """Check the property for many losses, and count them."""
    found = Census(set(), Counter())

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(programs(), worlds())
    def check(program: Program, world: World) -> None:
        rounds = loop(world, program)
        weights = [w for _, done in rounds for one in done for w in one.weights.values()]
        assume(all(bool(w.isfinite().all()) for w in weights))
        for way, verdict in accepted(rounds[0][0], monkeypatch).items():
            truth = unproved(rounds, way)
            if verdict and truth != "equal" and not stable(rounds):
                truth = UNSTABLE
            assert truth in ("equal", UNSTABLE) or not verdict, f"{way}: accepted, and {truth}"
            found.verdicts[way, truth, verdict] += 1
        found.losses.add(program)

    check()
    return found


def test_no_stack_is_accepted_that_differs_from_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The census guards the property: it would be empty if the proof refused all losses, or if no
    random loss was wrong in a stack."""
    found = census(monkeypatch)
    assert len(found.losses) > 0.4 * EXAMPLES  # others come again with other clients
    assert found.share("batched", accepted=True) > 0.2
    assert found.share("batched", accepted=False) > 0.3
    assert found.share("mapped", accepted=True) > 0.7
    assert found.share("batched", "wrong later") > 0.02
    assert found.share("batched", "wrong at once") > 0.1
    for way in WAYS:
        assert found.share(way, "equal", accepted=False) < 0.1
        assert found.share(way, UNSTABLE) < 0.01
