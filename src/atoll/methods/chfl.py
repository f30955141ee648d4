"""CHFL: clients with common and own columns; the common ones are learned together, the own at home.

Mori, Teranishi, Furukawa, Continual Horizontal Federated Learning for Heterogeneous Data, 2022.

Column one is an MLP on the common columns, trained by FedAvg. Column two is an MLP on a client's
own columns that reads the hidden layers of column one through lateral weights of strength mu, and
adds its logits to those of column one. No gradient runs from column two into column one, so one
federated run carries a bank of second columns (one for each mu), the concatenation baseline and the
networks trained alone; all are exactly paired. Letters follow section b of the specification: z are
layer outputs, U the lateral weights.
"""

import math
from collections.abc import Callable, Iterable, Mapping
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
from atoll.jobs.train import EvalJob, Optimiser, Phase, TrainJob, in_chunks, scored
from atoll.learning import lateral
from atoll.learning.lateral import READ
from atoll.learning.losses import label_loss
from atoll.learning.models import MLP, draw_layers, outputs
from atoll.learning.weights import copied, mean, placed, prefixed, without
from atoll.metrics.selection import selection_score

Variant = Literal["common", "local", "mu=0", "mu>0", "concat", "auto"]
VARIANTS: tuple[Variant, ...] = ("common", "local", "mu=0", "mu>0", "concat", "auto")
Variants = Annotated[tuple[Variant, ...], Field(min_length=1)]
Strengths = Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)]
ROUNDING = 1e-12  # means of equal accuracies differ by less
GRID = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
Rates = Annotated[tuple[Positive, ...], Field(max_length=10)]
Source = Literal["local_updated", "round_start"]


@dataclass(frozen=True)
class Options:
    """The options of `chfl`; sections f and j of the specification."""

    rate: Positive = 0.001  # learning rate of column one
    rate_unique: NotNegative = 0.0  # learning rate of column two and its laterals; 0: as rate
    decay_unique: NotNegative = 0.0  # weight decay of column two and its laterals
    rate_local: Rates = ()  # of the network trained alone: the client selects the best
    batch: AtLeastOne = 64  # batch size; the last, smaller batch is kept
    epochs: AtLeastOne = 5  # local epochs per round
    mu: Strengths = GRID  # strengths from which each client selects on its validation rows
    variants: Variants = VARIANTS  # models to train and report; auto: mu may be 0
    each_mu: bool = False  # also report every strength, which shows it to the server; for studies
    patience: AtLeastOne = 20  # rounds without improvement on validation rows that end a stage
    select: Literal["best", "last"] = "best"  # keep the best round on validation rows, or the last
    common_opt_state: Literal["reset", "keep"] = "reset"  # Adam's moments of column one by round
    lateral_source: Source = "local_updated"  # the column one that column two reads in training
    eval_common: Literal["global", "local"] = "global"  # the column one used for predictions
    u_init: Literal["default", "zeros"] = "default"  # initial lateral weights
    concat_input: Literal["prob", "logit"] = "prob"  # what concatenation reads of column one
    weighting: Literal["equal", "rows"] = "equal"  # weight of each client in the mean


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
    """Column one as a client trained it, and its validation hits with the last round's models."""

    weights: Annotated[Tensors, Update(of="weights")]
    loss: float
    rows: Annotated[int, RowCount()]  # training rows, the client's share in a mean weighted by rows
    valid_rows: int  # 0 where they do not define the run's metric
    valid: dict[str, int | float]  # hits, or score times rows, by variant; empty in the first round


@dataclass(frozen=True)
class Settle:
    """The last column one."""

    weights: Annotated[Tensors, SharedWeights()]
    keep: list[str]


@dataclass(frozen=True)
class Settled:
    """The validation hits of the last models."""

    valid_rows: int
    valid: dict[str, int | float]


@dataclass(frozen=True)
class Keep:
    """The variants whose last models were the best."""

    keep: list[str]


def common_loss(weights: Mapping[str, Tensor], batch: Rows, *, depth: int) -> Tensor:
    """Lc: the loss of column one, cross-entropy or the squared error of numbers."""
    return label_loss(outputs(without("common", weights), batch.x, depth)[-1], batch)


def joint_loss(
    weights: Mapping[str, Tensor], batch: Rows, *, depth: int, source: str, concat: str
) -> Tensor:
    """Lj, summed over the bank, plus the loss of the concatenation baseline.

    Column one, the weights under `source`, is a constant.
    """
    with torch.no_grad():
        z_c = outputs(without(source, weights), batch.x, depth)
    losses = []
    if "mu" in weights:
        losses.append(label_loss(lateral.joint_logits(weights, batch.own, z_c), batch).sum(-1))
    if concat:
        losses.append(label_loss(lateral.concat_logits(weights, batch.own, z_c[-1], concat), batch))
    return torch.stack(losses).sum(0)


def local_loss(weights: Mapping[str, Tensor], batch: Rows, *, depth: int, name: str) -> Tensor:
    """The loss of a network trained alone."""
    return label_loss(outputs(without(name, weights), batch.all, depth)[-1], batch)


class Client:
    """Trains column one for all, and its own networks for itself."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        model = site.model()
        if not isinstance(model, MLP):
            raise UserError("chfl needs an MLP", "model", "set model.name = 'mlp'")
        self.depth = model.depth
        self.bank = any(v.startswith(("mu", "auto")) for v in reported(options))
        # a number has no probability
        self.reads = "logit" if site.regression else options.concat_input
        self.concat = self.reads if "concat" in options.variants else ""
        count = max(1, len(options.rate_local)) if "local" in options.variants else 0
        self.local = tuple(f"local{number}" for number in range(count))
        self.weights = prefixed("common", copied(model.state_dict())) | self._own_weights(model)
        first_layers = ("unique/weight0", "concat/weight0", *(f"{n}/weight0" for n in self.local))
        self.own_inputs = frozenset(first_layers)  # weights whose inputs end with the own columns
        self.moments: Tensors = {}
        self.candidate: Tensors = {}  # what the models of the last round consist of
        self.chosen: dict[str, int] = {}  # the member of the bank that each variant uses
        self.best: dict[str, Tensors] = {}  # the best checkpoint of each variant
        self.best_local = torch.tensor(-1)  # validation hits of the best network trained alone

    def _own_weights(self, model: MLP) -> Tensors:
        """The first weights of all that this client trains besides column one."""
        site, sizes = self.site, [len(model.get_parameter(f"bias{i}")) for i in range(self.depth)]
        own, weights = site.inputs(own=True)[0] - site.inputs()[0], dict[str, Tensor]()
        if self.bank:
            column = draw_layers(own, sizes, partial(site.stream, "unique", "layer"))
            laterals = lateral.draw_laterals(sizes, partial(site.stream, "lateral"))
            zeros = self.options.u_init == "zeros"
            column |= {n: u * 0 if zeros else u for n, u in laterals.items()}
            weights |= lateral.bank_of(column, (0.0, *self.options.mu))
        if self.concat:
            stream = partial(site.stream, "concat", "layer")
            weights |= prefixed("concat", draw_layers(sizes[-1] + own, sizes, stream))
        for name in self.local:
            weights |= prefixed(name, copied(site.model(own=True).state_dict()))
        return {n: tensor.to(site.device, site.dtype) for n, tensor in weights.items()}

    def fit(self, request: Fit, moment: Moment) -> Working[Fitted]:
        """Judge the models of the last round on validation rows, then train a round."""
        options, judged = self.options, Settled(len(self.site.valid(moment.stage)), {})
        self._save_best(request.keep)
        received = placed(request.weights, self.site.device)
        self._probe("others", received, moment)
        if moment.first:
            self.best_local = torch.tensor(-1)
        else:
            judged = yield from self._judge(received, moment)
        weights, rows = self._received(received), self.site.train(moment.stage)
        keep = options.common_opt_state == "keep"
        moments = {n: m for n, m in self.moments.items() if keep or "/common" not in n}
        sizes, stream = (options.batch, options.epochs), self.site.stream("fit", moment)
        result = yield TrainJob(
            weights, moments, self._phases(), rows, *sizes, stream, self.own_inputs
        )
        self.weights, self.moments = result.weights, result.moments
        common = without("common", self.weights)
        self._probe("own", common, moment)
        loss = result.losses["common"]
        return Fitted(common, loss, len(rows), judged.valid_rows, judged.valid)

    def settle(self, request: Settle, moment: Moment) -> Working[Settled]:
        """Judge the models of the last round."""
        self._save_best(request.keep)
        received = placed(request.weights, self.site.device)
        self._probe("others", received, moment)
        return (yield from self._judge(received, moment))

    def keep(self, request: Keep, moment: Moment) -> Empty:
        """Save the models that were the best."""
        self._save_best(request.keep)
        return Empty()

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the best checkpoint of every variant on a task."""
        return self._checked(self.best, request.task)

    def _checked(self, models: Mapping[str, Tensors], task: int) -> Checked:
        rows, logits = self.site.test(task), {}
        for variant, model in sorted(models.items()):
            logits[variant] = in_chunks(partial(self.predict, model), rows)
        return scored(logits, rows.y, self.site.target.deviation)

    def _probe(self, cause: Literal["own", "others"], common: Tensors, moment: Moment) -> None:
        """Test column one with the member of the bank that `auto` chose last, if any.

        The client chooses it by its own validation rows, so the choice counts as its own doing.
        """
        model = prefixed("common", common)
        if "auto" in self.chosen:
            model |= lateral.member(self.weights, self.chosen["auto"])
        self.site.probe(cause, moment, partial(self._checked, {"": model}))

    def _phases(self) -> tuple[Phase, ...]:
        """Column one by its own loss, then what reads it: disjoint weights, an optimiser each."""
        options, depth = self.options, self.depth
        source = "common" if options.lateral_source == "local_updated" else "start"
        joint = partial(joint_loss, depth=depth, source=source, concat=self.concat)
        adam = Optimiser("adam", options.rate)
        second = Optimiser("adam", options.rate_unique or options.rate, options.decay_unique)
        plans: list[tuple[str, tuple[str, ...], Callable[..., Tensor], Optimiser]] = [
            ("common", ("common/",), partial(common_loss, depth=depth), adam),
            ("joint", ("unique/", "concat/"), joint, second),
        ]
        for name, rate in zip(self.local, options.rate_local or (options.rate,), strict=False):
            alone = partial(local_loss, depth=depth, name=name)
            plans.append((name, (f"{name}/",), alone, Optimiser("adam", rate)))
        phases = []
        for name, prefixes, loss, optimiser in plans:
            moves = tuple(n for n in self.weights if n.startswith(prefixes))
            if moves:
                phases.append(Phase(name, moves, loss, optimiser))
        return tuple(phases)

    def _received(self, common: Tensors) -> Tensors:
        """The weights to train in this round: column one as received, the rest as they were."""
        weights = self.weights | prefixed("common", common)
        if self.options.lateral_source == "round_start":
            weights |= prefixed("start", common)
        return weights

    def _measured(self, weights: Tensors, rows: Rows) -> Working[list[float]]:
        """The hits of each model, or its score times rows; empty where the rows define none."""
        settings: dict[str, Any] = {"depth": self.depth, "concat": self.concat, "local": self.local}
        if not len(rows):
            return []
        if self.site.metric == "accuracy":
            job = EvalJob(weights, rows, partial(lateral.correct_rows, **settings), self.own_inputs)
            return list((yield job).tolist())
        logits = in_chunks(partial(lateral.every_logits, weights, **settings), rows).cpu().double()
        y = rows.y.cpu().numpy()
        scores = [selection_score(self.site.metric, y, z) for z in logits.numpy()]
        return [] if any(map(math.isnan, scores)) else [score * len(rows) for score in scores]

    def _judge(self, received: Tensors, moment: Moment) -> Working[Settled]:
        """Score the models as they stand on validation rows; these become the candidates.

        Without scores, mu = 0 and the last network alone are chosen.
        """
        local_column = self.options.eval_common == "local"
        read = without("common", self.weights) if local_column else received
        weights = self._received(received) | prefixed(READ, read)
        rows, members = self.site.valid(moment.stage), len(self.weights.get("mu", ()))
        counts = yield from self._measured(weights, rows)
        judged = len(rows) if counts else 0
        counts = counts or [0] * (1 + members + bool(self.concat) + len(self.local))
        bank, rest = counts[1 : 1 + members], counts[1 + members :]
        self.chosen = self._choose(bank)
        hits_of = {"common": counts[0]} | {v: bank[number] for v, number in self.chosen.items()}
        own = ("common/", f"{READ}/", "unique/", "concat/")
        self.candidate = {n: w for n, w in weights.items() if n.startswith(own)}
        if self.concat:
            hits_of["concat"] = rest.pop(0)
        if self.local:
            best = self.local[rest.index(max(rest))]
            self.candidate |= prefixed("local", without(best, weights))
        count = max(rest, default=-1)  # only the client itself judges its networks trained alone
        if count > float(self.best_local) or not judged or self.options.select == "last":
            self.best_local = torch.tensor(count)
            self._save_best(["local"])
        return Settled(judged, {v: hits_of[v] for v in reported(self.options) if v != "local"})

    def _choose(self, bank: list[float]) -> dict[str, int]:
        """The member of the bank that each variant uses, by score; ties go to the smaller mu."""
        if not bank:
            return {}
        chosen = {"mu=0": 0, "mu>0": 1 + bank[1:].index(max(bank[1:]))}
        chosen |= {f"mu={mu:g}": number for number, mu in enumerate(self.options.mu, 1)}
        return chosen | {"auto": bank.index(max(bank))}

    def _save_best(self, variants: Iterable[str]) -> None:
        """Copy the candidates of these variants."""
        candidate = self.candidate
        names = [v for v in variants if candidate and v in reported(self.options)]
        reading = set(names) - {"common", "local"}
        read = prefixed("common", copied(without(READ, candidate))) if reading else {}
        for variant in names:
            if variant in self.chosen:
                bank = candidate | {"mu": self.weights["mu"]}
                self.best[variant] = read | lateral.member(bank, self.chosen[variant])
            else:
                own = prefixed(variant, copied(without(variant, candidate)))
                self.best[variant] = read | own if variant == "concat" else own

    def state(self) -> Tensors:
        state = prefixed("weights", self.weights) | prefixed("moments", self.moments)
        state |= prefixed("candidate", self.candidate)
        state |= {f"chosen/{v}": torch.tensor(number) for v, number in self.chosen.items()}
        for variant, model in self.best.items():
            state |= prefixed(f"best/{variant}", model)
        return state | {"best_local": self.best_local}

    def restore(self, state: Tensors) -> None:
        self.weights = copied(without("weights", state))
        self.moments = copied(without("moments", state))
        self.best_local = state["best_local"].clone()
        self.candidate = copied(without("candidate", state))
        self.chosen = {v: int(number) for v, number in without("chosen", state).items()}
        models = {v: copied(without(f"best/{v}", state)) for v in reported(self.options)}
        self.best = {variant: model for variant, model in models.items() if model}

    def final_model(self, shared: Tensors, variant: str, task: int) -> Tensors:
        """The best checkpoint of a variant on this client's validation rows."""
        return self.best[variant]

    def predict(self, model: Tensors, rows: Rows) -> Tensor:
        """The logits of a model; the names of its weights tell its kind."""
        if without("local", model):
            return outputs(without("local", model), rows.all, self.depth)[-1]
        z_c = outputs(without("common", model), rows.x, self.depth)
        if without("concat", model):
            return lateral.concat_logits(model, rows.own, z_c[-1], self.reads)
        return lateral.joint_logits(model, rows.own, z_c) if without("unique", model) else z_c[-1]


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
        """Send column one out, take the mean of what comes back (eq. 1)."""
        if moment.first:
            self.best.fill_(-1)
            self.idle.fill_(0)
        request = Fit(self.weights, self._best_variants())
        replies = clients.ask_all(Client.fit, request, None if moment.first else self._admit)
        rows = {id: reply.rows for id, reply in replies.items()}
        weights = shares(rows) if self.options.weighting == "rows" else None
        self.weights = mean([reply.weights for reply in replies.values()], weights)
        notes = {"loss": sum(reply.loss for reply in replies.values()) / len(replies)}
        if not moment.first:
            notes |= self._compare(replies)
        self.judged = torch.tensor(False)
        notes["finished"] = float(self.idle >= self.options.patience)
        return notes

    def _best_variants(self) -> list[str]:
        return [v for v, keep in zip(self.variants, self.keep.tolist(), strict=True) if keep]

    def _admit(self, id: str, reply: Fitted | Settled) -> None:
        """Refuse impossible hits on validation rows."""
        possible(reply.valid, reply.valid_rows, id)
        if set(self.variants) - set(reply.valid):
            raise BadMessageError(id, "hits on validation rows of other variants")

    def _compare(self, replies: Mapping[str, Fitted | Settled]) -> dict[str, float]:
        """The mean validation score of each variant, all clients alike; better models are kept.

        If no client has validation rows, the last round is kept and patience never ends.
        """
        valid = [(reply.valid, reply.valid_rows) for reply in replies.values()]
        means = [sum(hits[v] / max(1, rows) for hits, rows in valid) for v in self.variants]
        accuracy = torch.tensor([total / len(valid) for total in means], dtype=torch.float64)
        if not self.judged:
            self.keep = accuracy > self.best + ROUNDING
            gained = bool(self.keep[: self.counting].any())
            blind = not any(rows for _, rows in valid)
            self.idle = torch.tensor(0) if gained or blind else self.idle + 1
            self.best = torch.maximum(self.best, accuracy)
            if blind or self.options.select == "last":
                self.keep = torch.ones_like(self.keep)
        return {f"valid {v}": float(a) for v, a in zip(self.variants, accuracy, strict=True)}

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Judge the last round's models too, then test the best of every variant."""
        request = Settle(self.weights, self._best_variants())
        self._compare(clients.ask_all(Client.settle, request, self._admit))
        clients.ask_all(Client.keep, Keep(self._best_variants()))
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
    *("columns", "auto"),  # split, headline
    regression=True,
    first=lambda server: {"shared": server.weights},
    quorum=True,
    weighted=True,
    selects=True,
)
