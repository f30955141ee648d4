"""The bounds on one run at a site: shared weights, steps, moments and budgets.

The policy, not the method, keeps the last received shared weights. It checks every request, every
job and every answer, and refuses what the contract does not allow.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from atoll import methods
from atoll.core.annotations import (
    RowGradient,
    RowSums,
    SharedWeights,
    Task,
    TestedWeights,
    Update,
    marked,
)
from atoll.core.errors import UserError
from atoll.core.federation import Moment, kinds
from atoll.core.messages import Tensors
from atoll.core.record import disk_errors, write_whole
from atoll.core.rows import Rows
from atoll.engines.network.answered import Answered
from atoll.engines.network.audit import (
    FEWEST,
    plain_step,
    shown_rows,
    singling_units,
    varied_columns,
)
from atoll.engines.network.contract import Contract, RefusedError
from atoll.engines.network.egress import SHOWN, SINGLED, Spent
from atoll.engines.network.mixture import own_rows
from atoll.engines.network.requests import FEW_COLUMNS
from atoll.engines.network.steps import shortfall
from atoll.engines.network.sums import too_few, unfit_sums
from atoll.engines.network.unchecked import is_built_in, sent_networks
from atoll.jobs.train import Optimiser, TrainJob
from atoll.learning.weights import placed, prefixed, without
from atoll.runs.parts import Parts

__all__ = ["Bounds", "Trail", "too_little"]

STRIDE = 2.0  # number of own updates that shared weights may always move
MOST_PROBES = 10  # refusals that depend on rows, of all runs: each says something about them
SHRUNK = 0.1  # minimum norm of a matrix of shared weights, or a unit, relative to its first


@dataclass
class Trail:
    """The first and the last shared weights that a run received, by name."""

    first: dict[str, Tensors] = field(default_factory=dict)
    last: dict[str, Tensors] = field(default_factory=dict)
    place: tuple[int, int] = (-1, -1)  # stage and round of the last update sent
    steps: dict[str, int] = field(default_factory=dict)  # of optimisers that remember, by phase
    reach: dict[str, dict[str, float]] = field(default_factory=dict)  # norms of the last own update
    # stage, round and digest of the last tested weights
    tested: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Save the trail atomically."""
        tensors = {"place": torch.tensor(self.place)}
        tensors |= {f"steps/{phase}": torch.tensor(n) for phase, n in self.steps.items()}
        tensors |= {f"tested/{name}": torch.tensor(one) for name, one in self.tested.items()}
        reach = {n: {k: torch.tensor(v) for k, v in own.items()} for n, own in self.reach.items()}
        for kind, state in (("first", self.first), ("last", self.last), ("reach", reach)):
            for name, weights in state.items():
                tensors |= prefixed(f"{kind}/{name}", weights)
        whole = {
            name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()
        }
        write_whole(path, save(whole))

    @classmethod
    def read(cls, path: Path) -> "Trail":
        """Read what `write` saved; empty if there is no file."""
        if not path.exists():
            return cls()
        with disk_errors(path):
            content = path.read_bytes()
        try:
            tensors = load(content)
        except (SafetensorError, ValueError) as error:
            what = "the record of shared weights is damaged"
            raise UserError(what, str(path), "restore it from a copy") from error
        stage, number = tensors["place"].tolist()
        steps = {phase: int(n) for phase, n in without("steps", tensors).items()}
        first, last, own = (_by_name(without(kind, tensors)) for kind in ("first", "last", "reach"))
        reach = {name: {k: float(v) for k, v in norms.items()} for name, norms in own.items()}
        tested = {name: _three(one) for name, one in without("tested", tensors).items()}
        return cls(first, last, (stage, number), steps, reach, tested)


def _three(tensor: Tensor) -> tuple[int, int, int]:
    one, two, three = tensor.tolist()
    return one, two, three


def _by_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    names = sorted({key.partition("/")[0] for key in tensors})
    return {name: without(name, dict(tensors)) for name in names}


def too_little(parts: Parts, client: str, terms: Contract) -> str:
    """The stage with too few training rows, or columns, of this client; empty if none."""
    for stage, holding in enumerate(parts.scenario.holdings[client]):
        rows, where = len(holding.train), f"at stage {stage + 1}"
        if 0 < rows < terms.rows:
            return f"{rows} training rows {where}; the contract wants {terms.rows}"
        table = parts.dataset.kind == "table" and not is_built_in(parts.config)
        if rows and table and sent_networks(parts.config):
            reason = _too_few_columns(parts.site(client).train(stage).x, terms.columns)
            if reason:
                return f"{reason} {where}"
    return ""


def _too_few_columns(rows: Tensor, least: int) -> str:
    """Why there are too few common columns for the checks for single rows; else empty."""
    count = varied_columns(rows.detach().cpu(), least)
    few = f"{count} {FEW_COLUMNS}; the contract wants at least {least}"
    return few if count < least and least > 1 else ""


@dataclass
class Bounds:
    """The observer of all exchanges of one prepared run."""

    terms: Contract
    parts: Parts
    client: str
    home: Path  # the run's folder in the store
    spent: Spent
    probed: Callable[[], int]  # number of refusals that depend on rows, over all runs
    fresh: bool = True  # whether the client has neither trained nor been restored since `prepare`
    answered: tuple[int, int] = (-1, -1)  # stage and round of the last answer since then
    epochs: int = 0  # epochs in this exchange
    trained: Tensor | None = None  # this site's own rows in the jobs of this exchange
    single: Optimiser | None = None  # Adam, if the jobs of this exchange are one Adam step
    request: Any = None
    dirty: bool = False  # whether the trail must be written
    updates: bool = False  # whether the answer of this exchange is an update of shared weights
    sums: bool = False  # whether the answer is a sum over training rows
    moment: Moment = field(default_factory=lambda: Moment(0, 0, 1))

    def __post_init__(self) -> None:
        self.trail = Trail.read(self._path())
        self.history = Answered.read(self.home / "answered.json")
        self.asked: dict[str, str] = {}  # digests of the weights of this exchange
        method = methods.load(str(self.parts.config.method["name"]))
        derived = method.first(self.parts.server()) if method.first else {}
        self.derived: dict[str, Tensors] = {n: _plain(w) for n, w in derived.items()}

    def _path(self, place: str = "") -> Path:
        return self.home / f"shared{'-' if place else ''}{place}.safetensors"

    def begin(self, moment: Moment, action: Callable[..., Any] | None) -> None:
        """Start a new exchange."""
        self.moment, self.epochs, self.trained, self.request = moment, 0, None, None
        self.single, self.asked = None, {}
        reply = kinds(action)[1] if action else type(None)
        self.updates, self.sums = bool(marked(reply, Update)), bool(marked(reply, RowSums))

    def exhausted(self, moment: Moment) -> str:
        """Why no further round may begin on this data; empty if one may."""
        most = self.terms.rounds_in_all
        over = self.spent.rounds + self.counts(moment) > most
        return f"more than {most:,} rounds on this data are not in the contract" if over else ""

    def counts(self, moment: Moment) -> int:
        """1 if an answer now is the first of its round since `prepare` or `restore`; else 0."""
        return int((moment.stage, moment.round) != self.answered)

    @property
    def rounds(self) -> int:
        """The number of rounds in this exchange."""
        return self.counts(self.moment)

    def on_request(self, request: Any) -> None:
        """Refuse weights and gradients beyond the bounds.

        Refuses a second update of a round before anything depends on rows: whether its weights
        would single out rows is information too.
        """
        self.request = request
        self._admit_task(request)
        if self.updates and marked(type(request), SharedWeights):
            self._refuse_second()
        for field_name, mark in marked(type(request), SharedWeights).items():
            weights = getattr(request, field_name)
            if weights:
                self._admit(mark.name, weights)
                if self.updates and not self._second:
                    self._repeated(mark.name, weights)
        tested = {name: getattr(request, name) for name in marked(type(request), TestedWeights)}
        if tested:
            self._tested("tested", tested)
        for field_name in marked(type(request), RowGradient):
            self._admit_gradient(getattr(request, field_name))
        if self.sums and marked(type(request), SharedWeights):
            self._admit_sums()

    def _admit_task(self, request: Any) -> None:
        """Refuse rows of a task or stage that an honest run has not reached."""
        stage = self.moment.stage
        for name, mark in marked(type(request), Task).items():
            trained = mark.part and getattr(request, mark.part) == "train"
            known = range(stage + 1) if trained else self.parts.scenario.tasks_at(stage)
            if getattr(request, name) not in known:
                raise RefusedError(f"rows of a task or stage that stage {stage + 1} does not have")

    def unfit(self) -> str:
        """Why sums over rows would be refused later in this run; empty if they would not."""
        return "" if self.terms.sums == "allow" else unfit_sums(self.parts, self.client)

    def _admit_sums(self) -> None:
        """Refuse sums of outputs of shared weights, except for one set of weights per stage."""
        if not self.moment.last:
            raise RefusedError("sums over rows are for the last round of a stage")
        self._mixed(self.parts.site(self.client).train(self.moment.stage).x)

    def _rows(self, stage: int) -> int:
        return len(self.parts.scenario.holdings[self.client][stage].train)

    def on_job(self, job: Any) -> None:
        """Refuse jobs with too few rows, too few steps, or beyond the budget of epochs."""
        work = getattr(job, "work", job)
        if not isinstance(work, TrainJob) or not len(work.rows):
            return
        terms = self.terms
        epochs = len(getattr(job, "streams", ())) or work.epochs
        steps = epochs * len(work.batch_sizes)
        own = self._own(work.rows)
        if len(own) < terms.rows:
            little = f"{len(own)} training rows behind an answer"
            raise RefusedError(f"{little}; the contract wants at least {terms.rows}")
        sizes = [size * len(own) // len(work.rows) for size in work.batch_sizes]
        reason = shortfall(sizes, epochs, terms) if self.updates else ""
        if reason:
            raise RefusedError(reason)
        if self.spent.epochs + self.epochs + epochs > terms.epochs_in_all:
            most = f"{terms.epochs_in_all:,}"
            raise RefusedError(f"more than {most} epochs on this data are not in the contract")
        self._advance(work)
        self._mixed(own)
        self.epochs, self.trained = self.epochs + epochs, own
        adam = work.phases[0].optimiser if work.phases[0].optimiser.kind == "adam" else None
        self.single = adam if steps == 1 else None

    def _own(self, rows: Rows) -> Tensor:
        """This site's own rows of a job; other rows lengthen steps but protect nothing."""
        stage = self.moment.stage
        if not self.updates or rows.sequences or len(rows) <= self._rows(stage):
            return rows.x
        site = self.parts.site(self.client)
        return own_rows(rows.x, [site.train(before).x for before in range(stage + 1)])

    def _advance(self, work: TrainJob) -> None:
        """Refuse an optimiser whose step count decreased within this stage."""
        stage = self.moment.stage
        for phase in work.phases:
            key = f"{stage}-{phase.name}"
            taken = int(work.moments.get(f"steps/{phase.name}", torch.tensor(0)))
            if taken < self.trail.steps.get(key, 0):
                raise RefusedError("the moments of the optimiser do not advance")
            if taken:
                self.trail.steps[key], self.dirty = taken, True

    def _mixed(self, rows: Tensor) -> None:
        """Refuse weights that single out rows here, before training with them.

        Each such refusal says something about the rows, so there are few of them, over all runs.
        """
        if not self.updates and not self.sums:
            return
        if self.probed() >= MOST_PROBES:
            probes = f"{MOST_PROBES} refusals of weights that show rows of this site"
            raise RefusedError(f"{probes}: it trains no more until a person has looked at its log")
        for field_name in marked(type(self.request), SharedWeights):
            weights = self._whole(getattr(self.request, field_name), rows)
            count = singling_units(weights, rows, self.terms.unit_rows)
            if count:
                raise RefusedError(f"{SINGLED} rows of this site in {count} units")

    def _whole(self, weights: Tensors, rows: Tensor) -> Tensors:
        """The network's weights composed of these; rows that are not checked need none."""
        whole = methods.load(str(self.parts.config.method["name"])).whole
        if whole is None or rows.dim() != 2:
            return weights
        site = self.parts.site(self.client)
        network: Tensors = whole(site, placed(weights, site.device))
        return network

    def on_reply(self, reply: Any) -> None:
        """Refuse a second update of one round, and an update that reveals a training row."""
        updates = marked(type(reply), Update)
        reason = too_few(reply, self.moment, self._rows) if self.terms.sums == "refuse" else ""
        if reason:
            raise RefusedError(reason)
        if updates:
            self._once()
        for field_name, mark in updates.items():
            self._look(mark.of, getattr(self.request, mark.of), getattr(reply, field_name))
        for field_name, whole in marked(type(reply), SharedWeights).items():
            self._look_at_whole(whole.name, getattr(reply, field_name))
            self.trail.last[whole.name], self.dirty = _plain(getattr(reply, field_name)), True

    def _look_at_whole(self, name: str, weights: Tensors) -> None:
        """Refuse whole weights that reveal a row, relative to the last weights received here."""
        before = self.trail.last.get(name)
        if before is None or self.terms.shown_rows == "allow":
            return
        rows = self.parts.site(self.client).train(self.moment.stage).x
        if (
            before.keys() == weights.keys()
            and rows.dim() == 2
            and shown_rows(before, weights, rows)
        ):
            raise RefusedError(SHOWN)

    def _look(self, of: str, before: Tensors, after: Mapping[str, Tensor]) -> None:
        """Refuse an update that reveals a row; store its norm."""
        rows = self.trained if self.terms.shown_rows == "refuse" else None
        seen = [after]
        if self.single is not None:
            seen.append(plain_step(before, after, self.single.rate, self.single.epsilon))
        if rows is not None and any(shown_rows(before, one, rows) for one in seen):
            raise RefusedError(SHOWN)
        name = marked(type(self.request), SharedWeights)[of].name
        self.trail.reach[name] = {
            key: float((after[key].detach().double().cpu() - old.double().cpu()).norm())
            for key, old in before.items()
            if old.is_floating_point()
        }

    @property
    def place(self) -> tuple[int, int]:
        """Stage and round of the last answer."""
        return max(self.answered, self.trail.place)

    @property
    def _here(self) -> tuple[int, int]:
        return self.moment.stage, self.moment.round

    @property
    def _second(self) -> bool:
        """Whether an update now would be the second one of its round."""
        return self._here <= self.trail.place and not (self.fresh and self._here == (0, 0))

    def _refuse_second(self) -> None:
        if self.fresh and self._here > (0, 0) and self.trail.place > (-1, -1):
            raise RefusedError("a run goes on from its last checkpoint, or from its first round")
        if self._second:
            raise RefusedError("a second update of one round is not in the contract")

    def _once(self) -> None:
        self._refuse_second()
        self.trail.place, self.dirty = self._here, True

    def end(self) -> None:
        """Store the weights of an update after its answer is logged.

        Weights of a test are not stored, or many tests in one round would allow as many moves.
        """
        for field_name, mark in marked(type(self.request), SharedWeights).items():
            weights = getattr(self.request, field_name)
            if weights and self.updates:
                self.trail.last[mark.name], self.dirty = _plain(weights), True
            if weights and mark.name not in self.derived:
                self.trail.first.setdefault(mark.name, _plain(weights))
        self.fresh, self.answered = self.fresh and not self.updates, self._here
        self.history.add(self.asked)
        if self.dirty:
            self.trail.write(self._path())
            self.dirty = False

    def keep(self, place: str, files: int) -> None:
        """Save this state beside a checkpoint of the client; keeps only the newest files."""
        self.trail.write(self._path(place))
        for path in sorted(self.home.glob("shared-*.safetensors"), key=_age)[:-files]:
            path.unlink(missing_ok=True)

    def restore(self, place: str) -> None:
        """Restore the state of a checkpoint; without one, continue from the last weights."""
        if self._path(place).exists():
            self.trail = Trail.read(self._path(place))
        self.fresh, self.answered = False, (-1, -1)

    def _admit(self, name: str, weights: Tensors) -> None:
        """Refuse shared weights that an honest coordinator would not send now."""
        derived, last = self.derived.get(name), self.trail.last.get(name)
        if derived and _equal(weights, derived):
            return
        free = self.terms.initial_weights == "any"
        if free and last is None:
            return
        begins = self.updates and bool(derived) and self._here == (0, 0) and not free
        known = last or derived
        if begins or not known:
            raise RefusedError("the first weights are not those that this site derives itself")
        _same_form(weights, known)
        first = self.trail.first.get(name, derived or known)
        reach = self.trail.reach.get(name, {})
        usual = _mean_square(first)
        for key, tensor in weights.items():
            self._near(key, tensor, known[key], first[key], reach.get(key, 0.0))
            self._drifts(key, tensor, first[key], usual)
        if not self.updates:
            self._tested(name, weights)

    def on_compare(self, moment: Moment, shared: Mapping[str, Tensors]) -> None:
        """Refuse to compare a model that no honest run of this site can end with."""
        self.begin(moment, None)
        for name, weights in shared.items():
            if name not in self.trail.last:
                raise RefusedError("this site took no part in training the model to compare")
            self._admit(name, weights)

    def _repeated(self, name: str, weights: Tensors) -> None:
        """Refuse a request that was answered before a restore if its weights now differ."""
        stage, number = self._here
        key = f"{'update' if self.updates else 'test'} {name} {stage}-{number}"
        self.asked[key] = f"{_digest(weights, 16):032x}"
        if self.history.other(key, self.asked[key]) and self.history.repeats >= self.terms.repeats:
            place = f"round {number + 1} of stage {stage + 1}"
            raise RefusedError(f"{place} had other weights when it came first")

    def _tested(self, name: str, weights: Tensors) -> None:
        """Refuse a second set of weights for tests in one round if moves are bounded."""
        digest = _digest(weights)
        stage, number, before = self.trail.tested.get(name, (-1, -1, digest))
        if (stage, number) == self._here and before != digest:
            raise RefusedError("other weights for a second test in one round")
        self._repeated(name, weights)
        self.trail.tested[name], self.dirty = (*self._here, digest), True

    def _near(self, key: str, new: Tensor, last: Tensor, first: Tensor, own: float) -> None:
        """Refuse weights that are far from the last ones."""
        if not new.is_floating_point() or not new.numel():
            return
        new, last, first = (t.detach().double().cpu() for t in (new, last, first))
        begun = float(first.norm()) or math.sqrt(first.numel())
        distance, size = float((new - last).norm()), max(begun, float(last.norm()))
        moved = distance / size if distance > STRIDE * own else 0.0
        if self.terms.move and moved > self.terms.move:
            reason = f"moved by {moved:.3g} of their norm; the contract allows {self.terms.move:g}"
            raise RefusedError(f"weights '{key[:80]}' {reason}")

    def _drifts(self, key: str, new: Tensor, first: Tensor, usual: float) -> None:
        """Refuse weights that are far from the first ones, or a matrix that has almost vanished.

        The initial values of a short vector, such as a bias, may all be small. The drift of
        a vector is therefore measured relative to at least the norm that `usual` entries have.
        """
        most = self.terms.drift
        if not most or not new.is_floating_point() or not new.numel():
            return
        new, first = new.detach().double().cpu(), first.detach().double().cpu()
        size = float(first.norm()) or math.sqrt(first.numel())
        if new.dim() < 2:
            size = max(size, usual * math.sqrt(first.numel()))
        drifted = float((new - first).norm()) / size
        if drifted > most:
            reason = f"are {drifted:.3g} norms from the first; the contract allows {most:g}"
            raise RefusedError(f"weights '{key[:80]}' {reason}")
        if new.dim() > 1 and _vanished(new, first):
            raise RefusedError(f"weights '{key[:80]}' have almost vanished")

    def _admit_gradient(self, gradient: Tensor) -> None:
        most = self.terms.gradient
        length = float(gradient.double().flatten(1).norm(dim=1).amax()) if len(gradient) else 0.0
        if most and length > most:
            reason = f"the gradient of a row has the norm {length:.3g}"
            raise RefusedError(f"{reason}; the contract allows {most:g}")


def _vanished(new: Tensor, first: Tensor) -> bool:
    """Whether a matrix, or a unit of it, is so small that one step can turn it in any direction."""
    units, begun = (t.flatten(1).norm(dim=1) for t in (new, first))
    small = units < SHRUNK * begun if new[0].numel() >= FEWEST else units < 0
    return bool(small.any()) or float(new.norm()) < SHRUNK * float(first.norm())


def _mean_square(weights: Mapping[str, Tensor]) -> float:
    """The root mean square of all entries."""
    floats = [t.detach().double().cpu() for t in weights.values() if t.is_floating_point()]
    count = sum(t.numel() for t in floats)
    return math.sqrt(sum(float(t.square().sum()) for t in floats) / max(1, count))


def _plain(weights: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}


def _equal(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    """Whether weights are equal, bit for bit."""
    return one.keys() == two.keys() and all(_bits(one[n]) == _bits(two[n]) for n in one)


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().cpu().contiguous()
    return plain.dtype, plain.shape, plain.flatten().view(torch.uint8).numpy().tobytes()


def _digest(weights: Mapping[str, Tensor], size: int = 7) -> int:
    """A hash of weights as an integer; seven bytes, to fit a tensor."""
    digest = hashlib.blake2b(digest_size=size)
    for name in sorted(weights):
        dtype, shape, content = _bits(weights[name])
        digest.update(f"{name}{dtype}{tuple(shape)}".encode() + content)
    return int.from_bytes(digest.digest())


def _same_form(weights: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
    if {n: (t.dtype, t.shape) for n, t in weights.items()} != {
        n: (t.dtype, t.shape) for n, t in known.items()
    }:
        raise RefusedError("weights of another network than this run began with")


def _age(path: Path) -> tuple[int, int]:
    stage, _, number = path.stem.removeprefix("shared-").partition("-")
    return int(stage), int(number)
