"""Distillation: clients with different networks exchange logits on public images.

This family holds the messages and both halves of a round. The message that brings the target of one
public batch asks for the logits of the next, so a step is one exchange. Order and augmentation of
the images follow from a key that the server sends, so all clients read the same images. `Learner`
is the client's half, `Exchange` the server's. A method adds the loss of a public step, the rule
that combines logits into targets, and the loss of local training. The functions at the end are
methods that the classes of a method bind as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor

from atoll.core.annotations import Outputs
from atoll.core.errors import BadMessageError, ClientFailedError, UserError
from atoll.core.federation import SERVER, Admit, ClientId, Clients, Moment, Working, scores
from atoll.core.messages import Check, Checked, Empty, Tensors, Weights
from atoll.core.record import Score, Snapshot
from atoll.core.rng import Stream
from atoll.core.rows import Public, Rows
from atoll.data.site import Site
from atoll.families.distillation_snapshots import features_snapshot, matrix_snapshot
from atoll.jobs.public_step import Again, PublicJob, PublicResult, StepLoss
from atoll.jobs.train import Optimiser, Phase, TrainJob, hits, scored
from atoll.learning.distill import correlation, distillation_loss, logits
from atoll.learning.models import skeleton
from atoll.learning.weights import copied, mean, prefixed, without

__all__ = [
    "Again",
    "Align",
    "Aligned",
    "Exchange",
    "Join",
    "Joined",
    "Learner",
    "Plan",
    "Trained",
    "aligned",
    "check",
    "evaluate",
    "final_model",
    "join",
    "mean_logits",
    "mean_loss",
    "predict",
    "prepare",
    "restore",
    "sends",
    "share",
    "snapshot",
    "state",
]

CACHED = 4  # public batches in the cache: this step and the last, each with two augmentations
CORRELATED = 2048  # test rows of a snapshot of correlations
Augment = Callable[[Tensor, Stream], Tensor]
Combine = Callable[[dict[ClientId, Tensor]], dict[ClientId, Tensor]]  # logits -> targets


@dataclass(frozen=True)
class Settings:
    """The options that all methods of the family have, under the names they have there."""

    rate: float
    batch: int
    epochs: int
    epochs_each: tuple[int, ...]
    pretrain_epochs: int
    average: bool
    absent: int
    top: int

    @classmethod
    def of(cls, options: object) -> "Settings":
        """The shared options among those of a method."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Plan:
    """How a round goes through the public images."""

    batch: int
    epochs: int
    augment: Augment | None = None

    def steps(self, public: Public) -> int:
        """Batches of a round; an incomplete last batch is dropped."""
        return self.epochs * (len(public) // self.batch)

    def rows(self, public: Public, key: int, step: int) -> Tensor:
        """The indices of the images of a step."""
        epoch, place = divmod(step, len(public) // self.batch)
        order = Stream(key).child("epoch", epoch).permutation(len(public), public.x.device)
        return order[place * self.batch : (place + 1) * self.batch]

    def images(self, public: Public, key: int, step: int) -> Tensor:
        """The images of a step as networks read them; all clients of a process share a cache."""
        entry = (self, key, step)
        if entry not in public.cache:
            while len(public.cache) >= CACHED:
                public.cache.pop(next(iter(public.cache)))
            x = public.x[self.rows(public, key, step)]
            if self.augment:
                x = self.augment(x, Stream(key).child("vary", step))
            public.cache[entry] = (x - public.mean) / public.deviation
        return public.cache[entry]


@dataclass(frozen=True)
class Join:
    """What all parts must agree on before the first round: the public images and the classes."""

    fingerprint: str  # of the public images, content and order
    rows: int  # the number of public images
    classes: list[str]  # their names, in the order of the logits


@dataclass(frozen=True)
class Joined:
    """The same, as a client has it."""

    fingerprint: str
    rows: int
    classes: list[str]


@dataclass(frozen=True)
class Align:
    """The target of the last step, and a request for the logits of the next."""

    key: int  # of the stream that orders and augments the public images of this round
    step: int  # the requested batch; after the last batch there is none
    count: int  # the number of clients that the target comes from
    target: Tensor  # of the last step; empty at the first


@dataclass(frozen=True)
class Aligned:
    """The logits of the requested public batch, and the loss of the last step."""

    logits: Annotated[Tensor, Outputs(common=True)]  # (rows, classes); empty after the last step
    loss: float


@dataclass(frozen=True)
class Trained:
    """The mean loss of local training."""

    loss: float


class Learner:
    """The client's half: trains on its own rows, and follows targets on public images.

    It keeps the current weights, those of the last round, and those before any exchange (`solo`).
    """

    def __init__(self, name: str, options: object, site: Site, plan: Plan | None = None) -> None:
        """Draw the network; `name` is the variant under which it is tested."""
        self.name, self.settings, self.site = name, Settings.of(options), site
        self.plan = plan or Plan(1, 0)
        if plan:
            site.public()  # raises before the run if there are no public images
        model, settings = site.model(), self.settings
        self.training, self.testing = skeleton(model, True), skeleton(model, False)
        self.moves = tuple(parameter for parameter, _ in model.named_parameters())
        self.weights = self.last = self.solo = copied(model.state_dict())
        self.moments: Tensors = {}  # of the public steps of a round, where they are kept
        self.adam = Optimiser("adam", settings.rate)
        self.epochs = epochs_at(settings.epochs_each, settings.epochs, site.clients, site.id)
        self._forward: Any = None  # a cache: the forward pass whose target has not come yet
        self._solo_scores: dict[tuple[int, int], tuple[int, float]] = {}  # a cache

    def prepare(self, rows: Rows) -> Working[Trained]:
        """Train on the own rows before any exchange; all methods do the same."""
        loss = partial(distillation_loss, network=self.training)
        phase = Phase("loss", self.moves, loss, self.adam)
        job = self._job(phase, rows, self.settings.pretrain_epochs, self.site.stream("prepare"))
        result = yield replace(job, common=True)
        self.weights = self.last = self.solo = result.weights
        self._solo_scores = {}
        return Trained(result.losses["loss"])

    def fit(
        self,
        rows: Rows,
        loss: Callable[..., Tensor],
        moment: Moment,
        optimiser: Optimiser | None = None,
    ) -> Working[Trained]:
        """Train on the own rows in a round."""
        phase = Phase("loss", self.moves, loss, optimiser or self.adam)
        result = yield self._job(phase, rows, self.epochs, self.site.stream("fit", moment))
        self.finish(result.weights)
        return Trained(result.losses["loss"])

    def _job(self, phase: Phase, rows: Rows, epochs: int, stream: Stream) -> TrainJob:
        return TrainJob(self.weights, {}, (phase,), rows, self.settings.batch, epochs, stream)

    def finish(self, weights: Tensors) -> None:
        """End a round with these weights, or with the current ones if these are not finite."""
        values = [w.flatten() for w in weights.values() if w.is_floating_point()]
        if bool(torch.cat(values).isfinite().all()):
            self.weights = self.last = weights

    def receive(self, weights: Tensors) -> None:
        """Load the mean of all clients' weights, where the method takes one."""
        if weights:
            self.weights = {n: w.to(self.site.device) for n, w in weights.items()}

    def rewind(self) -> None:
        """Begin a round at the weights of the last one that this client finished."""
        self.weights, self.moments = self.last, {}

    def step(  # noqa: PLR0913 - all that a step consists of
        self,
        request: Align,
        moment: Moment,
        loss: StepLoss,
        constants: Tensors,
        *,
        optimiser: Optimiser | None = None,
        fresh: bool = True,
        penalty: Callable[[Tensors], Tensor] | None = None,
    ) -> Working[PublicResult]:
        """One exchange: a step towards the target of the last batch, then logits of the next.

        The loss reads `constants` besides the logits; with `fresh`, Adam restarts at every step.
        """
        public, number = self.site.public(), request.step
        result: PublicResult = yield PublicJob(
            self.training,
            self.moves,
            self.weights,
            self.moments,
            images=partial(self.plan.images, public, request.key),
            place=(moment.stage, moment.round, request.key),
            follow=number - 1 if number else None,
            answer=number if number < self.plan.steps(public) else None,
            constants=constants if number else {},
            loss=loss,
            optimiser=optimiser or self.adam,
            fresh=fresh,
            penalty=penalty,
            waiting=self._forward,
        )
        self.weights, self.moments, self._forward = result.weights, result.moments, result.waiting
        return result

    def logits(self, weights: Tensors, x: Tensor) -> Tensor:
        """The logits of many rows, without gradient."""
        return logits(self.testing, weights, x)

    def check(self, task: int) -> Checked:
        """Test the current and the solo model on a domain; where `top` is above 1, top-1 too."""
        rows, top, correct, f1 = self.site.test(task), self.settings.top, {}, {}
        if self.site.regression:
            models = {self.name: self.weights, "solo": self.solo}
            outputs = {name: self.logits(weights, rows.x) for name, weights in models.items()}
            return scored(outputs, rows.y, self.site.target.deviation)
        for k in sorted({1, top}):
            end = "" if k == top else " top-1"
            if (task, k) not in self._solo_scores:
                self._solo_scores[task, k] = hits(self.logits(self.solo, rows.x), rows.y, k)
            current = hits(self.logits(self.weights, rows.x), rows.y, k)
            correct[self.name + end], f1[self.name + end] = current
            correct["solo" + end], f1["solo" + end] = self._solo_scores[task, k]
        return Checked(len(rows), correct, f1)

    def probe(self, cause: Literal["own", "others"], moment: Moment) -> None:
        """Test the current model for attribution, where the run asks for it."""
        self.site.probe(cause, moment, self.check, self.name)

    def state(self) -> Tensors:
        """The current weights, those of the last round, the solo ones, and the moments."""
        weights = prefixed("weights", self.weights) | prefixed("last", self.last)
        return weights | prefixed("solo", self.solo) | prefixed("moments", self.moments)

    def restore(self, state: Tensors) -> None:
        """Continue from a state."""
        self.weights, self.last = copied(without("weights", state)), copied(without("last", state))
        self.solo, self.moments = copied(without("solo", state)), copied(without("moments", state))
        self._forward, self._solo_scores = None, {}


def aligned(result: PublicResult) -> Aligned:
    """The reply to a public step."""
    loss = 0.0 if result.loss is None else float(result.loss)
    return Aligned(torch.zeros(0) if result.logits is None else result.logits, loss)


def epochs_at(each: Sequence[int], usual: int, clients: Sequence[ClientId], id: ClientId) -> int:
    """A client's passes over its rows in a round."""
    if each and len(each) != len(clients):
        what = f"epochs_each has {len(each)} numbers for {len(clients)} clients"
        raise UserError(what, "method.epochs_each", "give one for each")
    return each[list(clients).index(id)] if each else usual


class Exchange:
    """The server's half of a round; up to `absent` clients may fail and are left out of it."""

    def __init__(self, options: object, site: Site, clients: Clients, client: Any) -> None:
        """Start a round with all clients; `client` is the method's class of clients."""
        self.settings, self.site = Settings.of(options), site
        self.clients, self.client = clients, client
        self.ids = sorted(clients.ids)
        self.excluded: list[ClientId] = []
        self.answers: dict[ClientId, Tensor] = {}  # the logits of the last public step

    def ask(
        self,
        action: Callable[..., Any],
        requests: Mapping[ClientId, Any],
        admit: Admit | None = None,
    ) -> dict[ClientId, Any]:
        """One message to each remaining client; `admit` raises for an impossible reply."""
        requests = {id: requests[id] for id in self.ids}
        if self.settings.absent:
            replies = self.clients.ask_each(action, requests, self._exclude, admit)
        else:
            replies = self.clients.ask(action, requests, admit=admit)
        self.ids = [id for id in self.ids if id in replies]
        return replies

    def ask_all(
        self, action: Callable[..., Any], request: Any, admit: Admit | None = None
    ) -> dict[ClientId, Any]:
        """The same message to all remaining clients."""
        return self.ask(action, dict.fromkeys(self.ids, request), admit)

    def _exclude(self, id: ClientId, error: Exception) -> None:
        self.excluded.append(id)
        self.ids.remove(id)
        if len(self.excluded) > self.settings.absent or not self.ids:
            raise error

    @property
    def notes(self) -> dict[str, float]:
        """The excluded clients, for the record."""
        return {f"excluded {id}": 1.0 for id in sorted(self.excluded)}

    def begin(self, plan: Plan | None = None) -> dict[str, float]:
        """Before the first round, agree on the public images and let all clients prepare."""
        moment = self.clients.moment
        if moment.stage or not moment.first:
            return {}
        if plan:
            self._agree(plan)
        return {"prepared": mean_loss(self.ask_all(self.client.prepare, Empty()))}

    def _agree(self, plan: Plan) -> None:
        """Raise for a client whose public images or classes differ from the server's."""
        public = self.site.public()
        if len(public) < plan.batch:
            what = f"{len(public)} public images do not fill a batch of {plan.batch}"
            raise UserError(what, "method.public_batch", "make it smaller, or raise public.rows")
        join = Join(public.fingerprint, len(public), list(self.site.classes))

        def admit(id: ClientId, reply: Joined) -> None:
            if (reply.fingerprint, reply.rows) != (join.fingerprint, join.rows):
                raise ClientFailedError(id, "join", "its public data are other ones")
            if reply.classes != join.classes:
                shown = ", ".join(reply.classes[:20])
                raise ClientFailedError(id, "join", f"its classes are others: {shown}")

        self.ask_all(self.client.join, join, admit)

    def align(self, plan: Plan, combine: Combine) -> float:
        """The collaborative phase: logits up, targets down; the mean loss of its steps."""
        public, key = self.site.public(), self.site.stream("public", self.clients.moment).key
        steps = plan.steps(public)
        targets, losses = dict.fromkeys(self.ids, torch.zeros(0)), list[float]()
        for step in range(steps + 1):
            shape = (plan.batch, len(self.site.classes)) if step < steps else (0,)
            requests = _requests(key, step, targets)
            replies = self.ask(self.client.align, requests, partial(_admit_logits, shape))
            if step:
                losses += [reply.loss for reply in replies.values()]
            if step < steps:
                self.answers = {id: reply.logits for id, reply in replies.items()}
                targets = combine(self.answers)
        return sum(losses) / max(1, len(losses))

    def mean_weights(self) -> Weights:
        """The mean of all weights and buffers, where the options ask for it; else none."""
        if not self.settings.average:
            return Weights({})
        replies = self.ask_all(self.client.share, Empty())
        return Weights(mean([reply.weights for reply in replies.values()]))

    def fit(self) -> float:
        """The local phase; its mean loss."""
        return mean_loss(self.ask_all(self.client.fit, self.mean_weights()))


def _admit_logits(shape: tuple[int, ...], id: ClientId, reply: Aligned) -> None:
    if tuple(reply.logits.shape) != shape:
        raise BadMessageError(id, f"logits of shape {tuple(reply.logits.shape)}, not {shape}")


def _requests(key: int, step: int, targets: Mapping[ClientId, Tensor]) -> dict[ClientId, Align]:
    """One message for all clients with the same target, so that it is packed once."""
    messages: dict[int, Align] = {}
    for target in targets.values():
        messages.setdefault(id(target), Align(key, step, len(targets), target))
    return {client: messages[id(target)] for client, target in targets.items()}


def mean_loss(replies: Mapping[ClientId, Any]) -> float:
    """The mean of the losses that clients report."""
    return float(sum(reply.loss for reply in replies.values()) / len(replies))


def mean_logits(answers: dict[ClientId, Tensor]) -> dict[ClientId, Tensor]:
    """The same target for all clients: the mean of all logits, summed in double precision."""
    stacked = torch.stack([answers[id] for id in sorted(answers)])
    target = stacked.double().mean(0).to(stacked.dtype)
    return dict.fromkeys(answers, target)


class Participant(Protocol):
    """A client of the family, as the actions and hooks below see it."""

    site: Site
    learner: Learner


def join(self: Participant, request: Join, moment: Moment) -> Joined:
    """Report this site's public images and classes; raise if the server's images are others."""
    site, public = self.site, self.site.public()
    if (request.fingerprint, request.rows) != (public.fingerprint, len(public)):
        reason = f"its public data are other ones ({request.rows} images, not {len(public)})"
        raise ClientFailedError(site.id, "join", f"{reason}: all parts must have the same")
    return Joined(public.fingerprint, len(public), list(site.classes))


def prepare(self: Participant, request: Empty, moment: Moment) -> Working[Trained]:
    """Train on the own rows before any exchange."""
    return self.learner.prepare(self.site.before(moment.stage))


def share(self: Participant, request: Empty, moment: Moment) -> Weights:
    """All weights and buffers, where all clients have the same network and `average` is set."""
    if not self.learner.settings.average:
        raise BadMessageError(SERVER, "weights of this site's own network, which stay here")
    return Weights(self.learner.weights)


def sends(options: object) -> tuple[str, ...]:
    """The networks whose weights clients send: their own where `average` is set."""
    return ("own",) if Settings.of(options).average else ()


def check(self: Participant, request: Check, moment: Moment) -> Checked:
    """Test the current and the solo model on a domain."""
    return self.learner.check(request.task)


def evaluate(self: object, clients: Clients, moment: Moment) -> list[Score]:
    """The scores of every client on every domain; the server's method."""
    return scores(clients, check, {}, moment)


def snapshot(self: Participant, moment: Moment) -> list[Snapshot]:
    """Correlations of logits on the own domain, and features of all domains."""
    learner, site = self.learner, self.site
    tests = [site.test(task) for task in range(len(site.tasks))]
    own = tests[site.clients.index(site.id) % len(tests)].x[:CORRELATED]
    snapshots = features_snapshot(site, moment, learner.testing, learner.weights, tests)
    if len(own):
        z = learner.logits(learner.weights, own)
        m = matrix_snapshot(site, moment, "correlation, own test rows", correlation(z, z))
        snapshots.insert(0, m)
    return snapshots


def state(self: Participant) -> Tensors:
    """The state of the learner."""
    return self.learner.state()


def restore(self: Participant, state: Tensors) -> None:
    """Continue from a state."""
    self.learner.restore(state)


def final_model(self: Participant, shared: Tensors, variant: str, task: int) -> Tensors:
    """The current weights, or those before any exchange."""
    learner = self.learner
    return learner.solo if variant.split()[:1] == ["solo"] else learner.weights


def predict(self: Participant, model: Tensors, rows: Rows) -> Tensor:
    """The logits of a final model."""
    return self.learner.logits(model, rows.x)
