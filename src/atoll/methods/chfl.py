"""CHFL: clients with common and own columns; the common ones are learned together, the own at home.

Mori, Teranishi, Furukawa, Continual Horizontal Federated Learning for Heterogeneous Data, 2022.

Column one is an MLP on the common columns, trained by FedAvg. Column two is an MLP on a client's
own columns that reads the hidden layers of column one through lateral weights of strength mu, and
adds its logits to those of column one. No gradient ever runs from column two into column one, so
one federated run carries a bank of second columns (one for each mu, one for the concatenation
baseline, one network trained alone) which are all exactly paired. Letters follow section b of the
specification: z are layer outputs, U the lateral weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from atoll.core.annotations import RowCount, SharedWeights, Update
from atoll.core.errors import BadMessageError, UserError
from atoll.core.federation import Clients, Moment, Working, possible, scores, shares
from atoll.core.messages import Check, Checked, Empty, Tensors
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, NotNegative, Positive
from atoll.core.record import Score
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.jobs.train import EvalJob, Optimiser, Phase, TrainJob, hits, in_chunks
from atoll.learning.losses import cross_entropy
from atoll.learning.models import MLP, draw_linear, linear, outputs
from atoll.learning.weights import copied, mean, placed, prefixed, sent, without

Variant = Literal["common", "local", "mu=0", "mu>0", "concat", "auto"]
VARIANTS: tuple[Variant, ...] = ("common", "local", "mu=0", "mu>0", "concat", "auto")
Variants = Annotated[tuple[Variant, ...], Field(min_length=1)]
Strengths = Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)]
ROUNDING = 1e-12  # by which means of accuracies may differ that are equal
GRID = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
# Weights whose inputs end with the own columns.
OWN = frozenset({"unique/weight0", "concat/weight0", *(f"local{n}/weight0" for n in range(10))})
Rates = Annotated[tuple[Positive, ...], Field(max_length=10)]
Source = Literal["local_updated", "round_start"]


@dataclass(frozen=True)
class Options:
    """The options of `chfl`; sections f and j of the specification."""

    rate: Positive = 0.001  # size of a step of column one (eta)
    rate_unique: NotNegative = 0.0  # of column two and its lateral weights; 0 for the same
    decay_unique: NotNegative = 0.0  # weight decay of column two and its lateral weights
    rate_local: Rates = ()  # of the network trained alone: a client keeps the best
    batch: AtLeastOne = 64  # rows in a local step; the last, smaller batch is kept
    epochs: AtLeastOne = 5  # passes over the rows in a round
    mu: Strengths = GRID  # strengths each client chooses from on its validation rows
    variants: Variants = VARIANTS  # models to train and report; auto: mu may be 0
    each_mu: bool = False  # report every strength by itself too; for studies, as the server sees it
    patience: AtLeastOne = 20  # rounds without gain on validation rows that end the stage
    select: Literal["best", "last"] = "best"  # keep the best round on validation rows, or the last
    common_opt_state: Literal["reset", "keep"] = "reset"  # Adam's moments of column one by round
    lateral_source: Source = "local_updated"  # the column one that column two reads in training
    eval_common: Literal["global", "local"] = "global"  # the column one used for predictions
    u_init: Literal["default", "zeros"] = "default"  # first lateral weights
    concat_input: Literal["prob", "logit"] = "prob"  # what concatenation reads of column one
    weighting: Literal["equal", "rows"] = "equal"  # how much each client counts in the mean


def reported(options: Options) -> list[str]:
    """The names of the models that are reported; those of single strengths last."""
    each = [f"mu={mu:g}" for mu in options.mu] if options.each_mu else []
    return [*options.variants, *each]


@dataclass(frozen=True)
class Fit:
    """Column one, and the variants whose last models were the best so far."""

    weights: Annotated[Tensors, SharedWeights()]
    keep: list[str]


@dataclass(frozen=True)
class Fitted:
    """Column one as a client trained it, and the last round's hits on validation rows."""

    weights: Annotated[Tensors, Update(of="weights")]
    loss: float
    rows: Annotated[int, RowCount()]  # training rows, the client's share in a mean weighted by rows
    valid_rows: int
    valid: dict[str, int]  # hits by variant, empty in the first round


@dataclass(frozen=True)
class Settle:
    """The last column one."""

    weights: Annotated[Tensors, SharedWeights()]
    keep: list[str]


@dataclass(frozen=True)
class Settled:
    """How the last models did on validation rows."""

    valid_rows: int
    valid: dict[str, int]


@dataclass(frozen=True)
class Keep:
    """The variants whose last models were the best."""

    keep: list[str]


def lateral_column(
    weights: Mapping[str, Tensor], own: Tensor, z_c: list[Tensor], mu: Tensor
) -> Tensor:
    """z_u of the last layer: the logits that column two adds; a bank gives those of each member.

    weights: weight0, bias0, ..., and lateral1, ... (U of layers 2..L, here counted from 0).
    """
    z_u, depth = own, len(z_c)
    for i in range(depth):
        z = linear(z_u, weights[f"weight{i}"], weights[f"bias{i}"])
        if i > 0:
            z = linear(mu * _beside(z_c[i - 1], mu), weights[f"lateral{i}"], plus=z)
        z_u = torch.relu(z) if i < depth - 1 else z
    return z_u


def _beside(z: Tensor, mu: Tensor) -> Tensor:
    """What column one says, with an axis for the bank where there is one."""
    return z.unsqueeze(-3) if mu.dim() > 2 else z


def joint_logits(weights: Mapping[str, Tensor], own: Tensor, z_c: list[Tensor]) -> Tensor:
    """z_c + z_u: what a client says that has both columns."""
    z_u = lateral_column(without("unique", weights), own, z_c, weights["mu"])
    return _beside(z_c[-1], weights["mu"]) + z_u


def concat_logits(weights: Mapping[str, Tensor], own: Tensor, z: Tensor, how: str) -> Tensor:
    """What the concatenation baseline says: an MLP on F_theta_c(x_c) and the own columns."""
    read = torch.softmax(z, -1) if how == "prob" else z
    column = without("concat", weights)
    return outputs(column, torch.cat([read, own], -1), len(column) // 2)[-1]


def common_loss(weights: Mapping[str, Tensor], batch: Rows, *, depth: int) -> Tensor:
    """Lc."""
    return cross_entropy(outputs(without("common", weights), batch.x, depth)[-1], batch)


def joint_loss(
    weights: Mapping[str, Tensor], batch: Rows, *, depth: int, source: str, concat: str
) -> Tensor:
    """Lj of every member of the bank, and the loss of the concatenation baseline.

    Column one is read and never moved; `source` says which.
    """
    with torch.no_grad():
        z_c = outputs(without(source, weights), batch.x, depth)
    losses = []
    if "mu" in weights:
        losses.append(cross_entropy(joint_logits(weights, batch.own, z_c), batch).sum(-1))
    if concat:
        losses.append(cross_entropy(concat_logits(weights, batch.own, z_c[-1], concat), batch))
    return torch.stack(losses).sum(0)


def local_loss(weights: Mapping[str, Tensor], batch: Rows, *, depth: int, name: str) -> Tensor:
    """The loss of a network that is trained alone."""
    return cross_entropy(outputs(without(name, weights), batch.all, depth)[-1], batch)


def right(
    weights: Mapping[str, Tensor], rows: Rows, *, depth: int, concat: str, alone: tuple[str, ...]
) -> Tensor:
    """Which rows each model gets right: column one, the bank, concatenation, those alone.

    (models, rows); where own columns are read, the column one named `said` is read beside them.
    """
    z_c = outputs(without("said", weights), rows.x, depth)
    found = [outputs(without("common", weights), rows.x, depth)[-1].unsqueeze(-3)]
    if "mu" in weights:
        found.append(joint_logits(weights, rows.own, z_c))
    if concat:
        found.append(concat_logits(weights, rows.own, z_c[-1], concat).unsqueeze(-3))
    for name in alone:
        found.append(outputs(without(name, weights), rows.all, depth)[-1].unsqueeze(-3))
    return torch.cat(found, -3).argmax(-1) == rows.y.unsqueeze(-2)


class Client:
    """Trains column one for all, and its own networks for itself."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        model = site.model()
        if not isinstance(model, MLP):
            raise UserError("chfl needs an MLP", "model", "set model.name = 'mlp'")
        self.depth = model.depth
        self.concat = options.concat_input if "concat" in options.variants else ""
        rates = range(max(1, len(options.rate_local)) if "local" in options.variants else 0)
        self.alone = tuple(f"local{number}" for number in rates)
        self.bank = any(v.startswith(("mu", "auto")) for v in reported(options))
        strengths = torch.tensor([0.0, *options.mu], dtype=site.dtype, device=site.device)
        self.mu = strengths[:, None, None]
        self.weights = prefixed("common", copied(model.state_dict())) | self._first_weights(model)
        self.moments: Tensors = {}
        self.candidate: Tensors = {}  # what the models of the last round are made of
        self.chosen: dict[str, int] = {}  # which member of the bank stands for a variant
        self.best: dict[str, Tensors] = {}  # the models to be used, by variant
        self.best_local = torch.tensor(-1)  # validation hits of the best network trained alone

    def _first_weights(self, model: MLP) -> Tensors:
        sizes = [getattr(model, f"bias{i}").shape[0] for i in range(self.depth)]
        own, classes = self.site.inputs(own=True)[0] - self.site.inputs()[0], sizes[-1]
        found: Tensors = {}
        if self.bank:
            found |= prefixed("unique", self._bank(own, sizes)) | {"mu": self.mu}
        if self.concat:
            found |= prefixed("concat", self._column("concat", classes + own, sizes))
        for name in self.alone:
            found |= prefixed(name, copied(self.site.model(own=True).state_dict()))
        return {n: tensor.to(self.site.device, self.site.dtype) for n, tensor in found.items()}

    def _column(self, name: str, inputs: int, sizes: list[int]) -> Tensors:
        found = {}
        for i, size in enumerate(sizes):
            below = sizes[i - 1] if i else inputs
            drawn = draw_linear(size, below, self.site.stream(name, "layer", i))
            found[f"weight{i}"], found[f"bias{i}"] = drawn
        return found

    def _bank(self, own: int, sizes: list[int]) -> Tensors:
        """Second columns for every mu, all with the same first weights."""
        column = self._column("unique", own, sizes)
        for i in range(1, len(sizes)):
            stream = self.site.stream("lateral", i)
            (drawn,) = draw_linear(sizes[i], sizes[i - 1], stream, bias=False)
            column[f"lateral{i}"] = drawn * 0 if self.options.u_init == "zeros" else drawn
        count = len(self.mu)
        return {n: w.expand(count, *w.shape).contiguous() for n, w in column.items()}

    def fit(self, request: Fit, moment: Moment) -> Working[Fitted]:
        """Judge the models of the last round on validation rows, then train a round."""
        options = self.options
        self._keep(request.keep)
        received = placed(request.weights, self.site.device)
        self._witness("others", received, moment)
        valid: dict[str, int] = {}
        if moment.first:
            self.best_local = torch.tensor(-1)
        else:
            valid = yield from self._judge(received, moment)
        weights, rows = self._received(received), self.site.train(moment.stage)
        kept = options.common_opt_state == "keep"
        moments = {n: m for n, m in self.moments.items() if kept or "/common" not in n}
        stream = self.site.stream("fit", moment)
        done = yield TrainJob(
            weights, moments, self._phases(), rows, options.batch, options.epochs, stream, OWN
        )
        self.weights, self.moments = done.weights, done.moments
        self._witness("own", without("common", self.weights), moment)
        valid_rows = len(self.site.valid(moment.stage))
        common, loss = without("common", self.weights), done.losses["common"]
        return Fitted(common, loss, len(rows), valid_rows, valid)

    def settle(self, request: Settle, moment: Moment) -> Working[Settled]:
        """Judge the models of the last round."""
        self._keep(request.keep)
        received = placed(request.weights, self.site.device)
        self._witness("others", received, moment)
        valid = yield from self._judge(received, moment)
        return Settled(len(self.site.valid(moment.stage)), valid)

    def keep(self, request: Keep, moment: Moment) -> Empty:
        """Keep the models that were the best."""
        self._keep(request.keep)
        return Empty()

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test every variant's kept model on a task."""
        return self._checked(self.best, request.task)

    def _checked(self, models: Mapping[str, Tensors], task: int) -> Checked:
        rows, found = self.site.test(task), {}
        for variant, model in sorted(models.items()):
            found[variant] = hits(in_chunks(partial(self._logits, model), rows), rows.y)
        correct = {variant: count for variant, (count, _) in found.items()}
        return Checked(len(rows), correct, {variant: f1 for variant, (_, f1) in found.items()})

    def _witness(self, doing: Literal["own", "others"], common: Tensors, moment: Moment) -> None:
        """The network as it stands, of the strength that was chosen last; before that column one.

        Which strength is chosen is the site's own doing: it goes by its validation rows.
        """
        model = prefixed("common", common)
        if "auto" in self.chosen:
            member = self.chosen["auto"]
            model |= {n: w[member] for n, w in self.weights.items() if n.startswith("unique/")}
            model["mu"] = self.mu[member, 0, 0]
        self.site.witness(doing, moment, partial(self._checked, {"": model}))

    def _phases(self) -> tuple[Phase, ...]:
        """Column one by its own loss, then what reads it: disjoint weights, an optimiser each."""
        options, depth = self.options, self.depth
        source = "common" if options.lateral_source == "local_updated" else "start"
        joint = partial(joint_loss, depth=depth, source=source, concat=self.concat)
        adam = Optimiser("adam", options.rate)
        second = Optimiser("adam", options.rate_unique or options.rate, options.decay_unique)
        plans: list[tuple[str, tuple[str, ...], Any, Optimiser]] = [
            ("common", ("common/",), partial(common_loss, depth=depth), adam),
            ("joint", ("unique/", "concat/"), joint, second),
        ]
        for name, rate in zip(self.alone, options.rate_local or (options.rate,), strict=False):
            alone = partial(local_loss, depth=depth, name=name)
            plans.append((name, (f"{name}/",), alone, Optimiser("adam", rate)))
        found = []
        for name, starts, loss, how in plans:
            moves = tuple(n for n in self.weights if n.startswith(starts))
            if moves:
                found.append(Phase(name, moves, loss, how))
        return tuple(found)

    def _logits(self, model: Tensors, rows: Rows) -> Tensor:
        """What a kept model says of rows; the names of its weights tell which kind it is."""
        if without("local", model):
            return outputs(without("local", model), rows.all, self.depth)[-1]
        z_c = outputs(without("common", model), rows.x, self.depth)
        if without("concat", model):
            return concat_logits(model, rows.own, z_c[-1], self.options.concat_input)
        return joint_logits(model, rows.own, z_c) if without("unique", model) else z_c[-1]

    def _received(self, common: Tensors) -> Tensors:
        """The weights to train in this round: column one as received, the rest as they were."""
        weights = {**self.weights, **prefixed("common", common)}
        if self.options.lateral_source == "round_start":
            weights |= prefixed("start", common)
        return weights

    def _judge(self, received: Tensors, moment: Moment) -> Working[dict[str, int]]:
        """Hits on validation rows of the models as they stand; they become the candidates.

        A client without such rows has no hits: it takes mu = 0, and its last network alone.
        """
        drifted = without("common", self.weights)
        said = received if self.options.eval_common == "global" else drifted
        weights = {**self._received(received), **prefixed("said", said)}
        how = partial(right, depth=self.depth, concat=self.concat, alone=self.alone)
        rows, members = self.site.valid(moment.stage), len(self.mu) if self.bank else 0
        counts = [0] * (1 + members + bool(self.concat) + len(self.alone))
        if len(rows):
            counts = (yield EvalJob(weights, rows, how, OWN)).tolist()
        bank, rest = counts[1 : 1 + members], counts[1 + members :]
        self.chosen = self._chosen(bank)
        found = {"common": counts[0], **{v: bank[member] for v, member in self.chosen.items()}}
        parts = [prefixed("common", received), prefixed("said", said)]
        if self.concat:
            found["concat"] = rest.pop(0)
        if self.alone:
            parts.append(prefixed("local", without(self.alone[rest.index(max(rest))], weights)))
        own = {n: w for n, w in weights.items() if n.startswith(("unique/", "concat/"))}
        self.candidate = {name: w for part in (*parts, own) for name, w in part.items()}
        self._keep_local(max(rest, default=-1), always=not len(rows))
        return {v: found[v] for v in reported(self.options) if v != "local"}

    def _chosen(self, bank: list[int]) -> dict[str, int]:
        """Which member of the bank stands for a variant, by hits; ties go to the smaller mu."""
        if not bank:
            return {}
        chosen = {"mu=0": 0, "mu>0": 1 + bank[1:].index(max(bank[1:]))}
        chosen |= {f"mu={mu:g}": 1 + place for place, mu in enumerate(self.options.mu)}
        return {**chosen, "auto": bank.index(max(bank))}

    def _keep_local(self, count: int, always: bool) -> None:
        """The network trained alone is nobody else's business: the client keeps its best itself."""
        if count > int(self.best_local) or always or self.options.select == "last":
            self.best_local = torch.tensor(count)
            self._keep(["local"])

    def _keep(self, variants: list[str]) -> None:
        """Copy the models of the last round that these variants are to use."""
        source = self.candidate
        wanted = [v for v in variants if v in reported(self.options)] if source else []
        if "common" in wanted:
            self.best["common"] = prefixed("common", copied(without("common", source)))
        if "local" in wanted:
            self.best["local"] = prefixed("local", copied(without("local", source)))
        if set(wanted) <= {"common", "local"}:
            return
        said = prefixed("common", copied(without("said", source)))
        if "concat" in wanted:
            self.best["concat"] = said | prefixed("concat", copied(without("concat", source)))
        self._keep_members([v for v in wanted if v in self.chosen], said)

    def _keep_members(self, variants: list[str], said: Tensors) -> None:
        """Copy the members of the bank that stand for variants, each once."""
        numbers = sorted({self.chosen[v] for v in variants})
        if not numbers:
            return
        places = sent(numbers, self.mu.device)
        bank = {n: w for n, w in self.candidate.items() if n.startswith("unique/")}
        columns = {n: w.index_select(0, places).unbind(0) for n, w in bank.items()}
        for variant in variants:
            place = numbers.index(self.chosen[variant])
            unique = {n: parts[place] for n, parts in columns.items()}
            self.best[variant] = {**said, **unique, "mu": self.mu[self.chosen[variant], 0, 0]}

    def state(self) -> Tensors:
        found = prefixed("weights", self.weights) | prefixed("moments", self.moments)
        found |= prefixed("candidate", self.candidate)
        found |= {f"chosen/{v}": torch.tensor(member) for v, member in self.chosen.items()}
        for variant, model in self.best.items():
            found |= prefixed(f"best/{variant}", model)
        return {**found, "best_local": self.best_local}

    def restore(self, state: Tensors) -> None:
        self.weights = copied(without("weights", state))
        self.moments = copied(without("moments", state))
        self.best_local = state["best_local"].clone()
        self.candidate = copied(without("candidate", state))
        self.chosen = {v: int(member) for v, member in without("chosen", state).items()}
        found = {v: copied(without(f"best/{v}", state)) for v in reported(self.options)}
        self.best = {variant: model for variant, model in found.items() if model}

    def final_model(self, shared: Tensors, variant: str) -> Tensors:
        """The best model of a variant on this client's validation rows."""
        return self.best[variant]

    def predict(self, model: Tensors, rows: Rows) -> Tensor:
        """The logits of a final model."""
        return self._logits(model, rows)


class Server:
    """Holds column one, and remembers which round was the best for which variant."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options = options
        self.weights: Tensors = copied(site.model().state_dict())
        self.variants = [v for v in reported(options) if v != "local"]
        self.counting = len([v for v in options.variants if v != "local"])  # for patience
        self.best = torch.full((len(self.variants),), -1.0, dtype=torch.float64)
        self.keep = torch.zeros(len(self.variants), dtype=torch.bool)
        self.idle = torch.tensor(0)  # rounds since any variant gained
        self.judged = torch.tensor(False)  # whether a test has already judged the last round

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Send column one out, take the mean of what comes back."""
        if moment.first:
            self.best.fill_(-1)
            self.idle.fill_(0)
        request = Fit(self.weights, self._kept())
        told = clients.ask_all(Client.fit, request, None if moment.first else self._admit)
        replies, rows = list(told.values()), {id: reply.rows for id, reply in told.items()}
        weights = shares(rows) if self.options.weighting == "rows" else None
        self.weights = mean([reply.weights for reply in replies], weights)
        notes = {"loss": sum(reply.loss for reply in replies) / len(replies)}
        if not moment.first:
            notes |= self._compare(told)
        self.judged = torch.tensor(False)
        notes["finished"] = float(self.idle >= self.options.patience)
        return notes

    def _kept(self) -> list[str]:
        return [v for v, keep in zip(self.variants, self.keep.tolist(), strict=True) if keep]

    def _admit(self, id: str, reply: Fitted | Settled) -> None:
        """Refuse hits on validation rows that cannot be."""
        possible(reply.valid, reply.valid_rows, id)
        if set(self.variants) - set(reply.valid):
            raise BadMessageError(id, "hits on validation rows of other variants")

    def _compare(self, told: Mapping[str, Fitted | Settled]) -> dict[str, float]:
        """Mean accuracy on validation rows by variant, all clients alike; what gained is kept.

        Where no client has such rows the last round is kept, and patience never ends.
        """
        replies = [(reply.valid, reply.valid_rows) for reply in told.values()]
        accuracy = torch.tensor(
            [
                sum(valid[v] / max(1, rows) for valid, rows in replies) / len(replies)
                for v in self.variants
            ],
            dtype=torch.float64,
        )
        if not self.judged:
            self.keep = accuracy > self.best + ROUNDING
            gained = bool(self.keep[: self.counting].any())
            blind = not any(rows for _, rows in replies)
            self.idle = torch.tensor(0) if gained or blind else self.idle + 1
            self.best = torch.maximum(self.best, accuracy)
            if blind or self.options.select == "last":
                self.keep = torch.ones_like(self.keep)
        return {f"valid {v}": float(a) for v, a in zip(self.variants, accuracy, strict=True)}

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Judge the last round's models too, then test the best of every variant."""
        request = Settle(self.weights, self._kept())
        self._compare(clients.ask_all(Client.settle, request, self._admit))
        clients.ask_all(Client.keep, Keep(self._kept()))
        self.keep, self.judged = torch.zeros_like(self.keep), torch.tensor(True)
        return scores(clients, Client.check, {}, moment)

    def state(self) -> Tensors:
        memory = {"best": self.best, "keep": self.keep, "idle": self.idle, "judged": self.judged}
        return prefixed("weights", self.weights) | prefixed("memory", memory)

    def restore(self, state: Tensors) -> None:
        self.weights = copied(without("weights", state))
        memory = copied(without("memory", state))
        self.best, self.keep = memory["best"], memory["keep"]
        self.idle, self.judged = memory["idle"], memory["judged"]


METHOD = Method(
    *(Options, Server, Client),
    split="columns",
    headline="auto",
    first=lambda server: {"shared": server.weights},
    quorum=True,
)
