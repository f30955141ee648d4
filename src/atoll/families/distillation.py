"""What methods share whose clients have different networks: the messages, and both halves.

The server asks for a public batch, step by step; the message that brings one batch's target asks
for the next batch's logits, so a step is one exchange. All draws of order and augmentation come
from the key that the server sends, so that every client sees the same images.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from atoll.core.annotations import Outputs
from atoll.core.errors import BadMessageError, ClientFailedError, UserError
from atoll.core.federation import Admit, ClientId, Clients, Moment, Working
from atoll.core.messages import Checked, Empty, Tensors, Weights
from atoll.core.record import Look
from atoll.core.rng import Stream
from atoll.core.rows import Public, Rows
from atoll.jobs.public_step import Again, PublicJob, PublicResult, StepLoss
from atoll.jobs.train import Optimiser, Phase, TrainJob, TrainResult, hits
from atoll.learning.augment import strongly, varied
from atoll.learning.distill import correlation, said, taught_loss
from atoll.learning.models import features, skeleton
from atoll.learning.weights import copied, mean, prefixed, without

__all__ = [
    "Again",
    "Align",
    "Aligned",
    "Join",
    "Joined",
    "Learner",
    "Lessons",
    "Plan",
    "Roll",
    "Trained",
    "average",
    "collaborate",
    "epochs_at",
    "filled",
    "matrix_look",
    "met",
    "prepared",
    "shared",
]

BATCHES = 4  # of public images that are kept: of this step and the one before, two kinds
SEEN = 2048  # rows of the correlations that a site looks at
FEATURES, COMPONENTS = 40, 20  # rows of each domain, and numbers of each, that a site looks at


@dataclass(frozen=True)
class Join:
    """What all must agree on before the first round: the public data and the classes."""

    fingerprint: str  # of the public images, content and order
    rows: int  # how many they are
    classes: list[str]  # their names, in the order of the logits


@dataclass(frozen=True)
class Joined:
    """What a client has of that."""

    fingerprint: str
    rows: int
    classes: list[str]


@dataclass(frozen=True)
class Align:
    """The target of the step before, and the request for this step's logits."""

    key: int  # of the stream that orders and varies the public images in this round
    step: int  # which batch of the round is asked for; after the last one nothing is
    count: int  # how many clients the target comes from
    target: Tensor  # of the batch before; empty at the first step


@dataclass(frozen=True)
class Aligned:
    """Logits of this step's public batch, and the loss of the step before."""

    logits: Annotated[Tensor, Outputs()]  # (rows, classes); empty after the last step
    loss: float


@dataclass(frozen=True)
class Trained:
    """The mean loss of local training."""

    loss: float


@dataclass(frozen=True)
class Plan:
    """How the public images are gone through in a round."""

    batch: int
    epochs: int
    varied: bool  # moved, mirrored, turned: the same for all clients

    def steps(self, public: Public) -> int:
        """Batches of a round; a last one that is not full is dropped."""
        return self.epochs * (len(public) // self.batch)

    def rows(self, public: Public, key: int, step: int) -> Tensor:
        """The numbers of the images of a step."""
        epoch, place = divmod(step, len(public) // self.batch)
        order = Stream(key).child("epoch", epoch).permutation(len(public), public.x.device)
        return order[place * self.batch : (place + 1) * self.batch]

    def images(self, public: Public, key: int, step: int, strong: bool = False) -> Tensor:
        """The images of a step, as networks read them; made once for all clients of a process."""
        wanted = (self, key, step, strong)
        if wanted not in public.made:
            while len(public.made) >= BATCHES:
                public.made.pop(next(iter(public.made)))
            public.made[wanted] = self._images(public, key, step, strong)
        return public.made[wanted]

    def _images(self, public: Public, key: int, step: int, strong: bool) -> Tensor:
        x, stream = public.x[self.rows(public, key, step)], Stream(key).child("vary", step)
        if strong:
            x = strongly(x, stream)
        elif self.varied:
            x = varied(x, stream)
        return (x - public.mean) / public.deviation


@dataclass(frozen=True)
class Lessons:
    """How private rows are gone through."""

    batch: int
    epochs: int
    stream: Stream


def epochs_at(each: Sequence[int], usual: int, clients: Sequence[ClientId], id: ClientId) -> int:
    """How often a client goes through its rows in a round."""
    if each and len(each) != len(clients):
        what = f"epochs_each has {len(each)} numbers for {len(clients)} clients"
        raise UserError(what, "method.epochs_each", "give one for each")
    return each[list(clients).index(id)] if each else usual


class Learner:
    """A client's network: learns alone, answers for public images, follows what comes back.

    Beside its weights it keeps those of the last round and those before any exchange.
    """

    def __init__(self, model: nn.Module, public: Public | None = None, plan: Plan | None = None):
        self._public, self._plan = public, plan
        self.training, self.testing = skeleton(model, True), skeleton(model, False)
        self.moves = tuple(name for name, _ in model.named_parameters())
        self.weights = self.last = self.solo = copied(model.state_dict())
        self._solo_scores: dict[tuple[int, int], tuple[int, float]] = {}  # a cache: it never moves
        self._solo_said: tuple[Tensor, Tensor] | None = None  # rows, and what it says of them
        self.moments: Tensors = {}  # of the public steps, where they are kept within a round
        self._waiting: Any = None  # a forward pass whose target has not come yet: a cache alone

    @property
    def public(self) -> Public:
        """The public images."""
        assert self._public is not None  # methods without public images never ask
        return self._public

    @property
    def plan(self) -> Plan:
        """How they are gone through."""
        assert self._plan is not None
        return self._plan

    def alone(self, lessons: Lessons, rows: Rows, rate: float) -> TrainJob:
        """Training by the labels alone, before any exchange: the same for all methods."""
        work = self.work(lessons, rows, self.loss(), Optimiser("adam", rate))
        return replace(work, common=True)

    def loss(self, **how: Any) -> Callable[..., Tensor]:
        """The loss of local training: cross-entropy, and what `taught_loss` is told beside it."""
        return partial(taught_loss, network=self.training, **how)

    def begun(self, done: TrainResult) -> Trained:
        """Become what training alone has made."""
        self.weights = self.last = self.solo = done.weights
        self._solo_scores, self._solo_said = {}, None
        return Trained(done.losses["loss"])

    def ended(self, done: TrainResult) -> Trained:
        """Become what a round's local training has made, unless that went astray."""
        numbers = [w.flatten() for w in done.weights.values() if w.is_floating_point()]
        if bool(torch.cat(numbers).isfinite().all()):
            self.weights = self.last = done.weights
        return Trained(done.losses["loss"])

    def receive(self, weights: Tensors) -> None:
        """Take over the mean of all clients' weights, where there is one."""
        if weights:
            device = next(iter(self.weights.values())).device
            self.weights = {n: w.to(device) for n, w in weights.items()}

    def rewind(self) -> None:
        """Begin a round: a client that was left out of its last one forgets what it did there."""
        self.weights, self.moments = self.last, {}

    def step(  # noqa: PLR0913 - all that a step is made of
        self,
        moment: Moment,
        request: Align,
        loss: StepLoss,
        given: Tensors,
        how: Optimiser,
        *,
        fresh: bool = True,
        penalty: Callable[[Tensors], Tensor] | None = None,
    ) -> PublicJob:
        """One exchange: a step of all parameters by what came back for the batch before, if there
        was one, and the logits of the batch that is asked for, if there is one.

        `given` is what the loss reads beside the logits; `fresh`: Adam forgets after every step.
        """
        number, last = request.step, self.plan.steps(self.public)
        return PublicJob(
            self.training,
            self.moves,
            self.weights,
            self.moments,
            partial(self.plan.images, self.public, request.key),
            (moment.stage, moment.round, request.key),
            number - 1 if number else None,
            number if number < last else None,
            given if number else {},
            loss,
            how,
            fresh,
            penalty,
            self._waiting,
        )

    def stepped(self, done: PublicResult) -> Aligned:
        """Become what a step has made; what is told of it."""
        self.weights, self.moments, self._waiting = done.weights, done.moments, done.waiting
        loss = 0.0 if done.loss is None else float(done.loss)
        return Aligned(torch.zeros(0) if done.logits is None else done.logits, loss)

    def work(
        self, lessons: Lessons, rows: Rows, loss: Callable[..., Tensor], how: Optimiser
    ) -> TrainJob:
        """Local training of this network by a loss of weights and batch."""
        phase = Phase("loss", self.moves, loss, how)
        batch, epochs, stream = lessons.batch, lessons.epochs, lessons.stream
        return TrainJob(self.weights, {}, (phase,), rows, batch, epochs, stream)

    def says(self, weights: Tensors, x: Tensor) -> Tensor:
        """The logits for many rows in testing."""
        return said(self.testing, weights, x)

    def kept(self, variant: str) -> Tensors:
        """The model of a variant: the one before any exchange, or that of now."""
        return self.solo if variant.split()[:1] == ["solo"] else self.weights

    def solo_says(self, x: Tensor) -> Tensor:
        """What the model before any exchange says; asked for the same rows again, it is known."""
        if self._solo_said is None or self._solo_said[0] is not x:
            self._solo_said = x, self.says(self.solo, x)
        return self._solo_said[1]

    def checked(self, name: str, task: int, rows: Rows, top: int) -> Checked:
        """How the model, and the one before any exchange, do on the test rows of a domain.

        Where the likeliest few count, the likeliest alone is told too.
        """
        correct, f1 = {}, {}
        for k in sorted({1, top}):
            end = "" if k == top else " top-1"
            if (task, k) not in self._solo_scores:
                self._solo_scores[task, k] = hits(self.says(self.solo, rows.x), rows.y, k)
            now = hits(self.says(self.weights, rows.x), rows.y, k)
            for model, (count, score) in ((name, now), ("solo", self._solo_scores[task, k])):
                correct[model + end], f1[model + end] = count, score
        return Checked(len(rows), correct, f1)

    def look(self, part: str, stage: int, tests: Mapping[str, Rows], own: str) -> list[Look]:
        """What a site sees of its network, for pictures: correlations of classes, features.

        `tests` are its test rows by domain, `own` the domain that it learns from.
        """
        found = []
        if own in tests and len(tests[own]):
            m = correlation(*[self.says(self.weights, tests[own].x[:SEEN])] * 2)
            found.append(matrix_look(part, stage, "correlation, own test rows", m))
        some = {name: rows.at(slice(0, FEATURES)) for name, rows in tests.items() if len(rows)}
        if not some:
            return found
        x = torch.cat([rows.x for rows in some.values()])
        read = features(self.testing, self.weights, x)
        if read is not None and len(x) > 2:
            labels = [f"{name}|{int(y)}" for name, rows in some.items() for y in rows.y]
            points = principal(read)
            columns = tuple(f"component {i + 1}" for i in range(points.shape[1]))
            values = tuple(tuple(round(v, 4) for v in row) for row in points.tolist())
            found.append(Look(stage, part, "features", tuple(labels), columns, values))
        return found

    def state(self) -> Tensors:
        """The weights with their buffers, those of before, and the moments."""
        parts = {"weights": self.weights, "last": self.last, "solo": self.solo}
        parts["moments"] = self.moments
        return {n: t for part, named in parts.items() for n, t in prefixed(part, named).items()}

    def restore(self, state: Tensors) -> None:
        """Become what `state` described."""
        self.weights, self.last, self.solo, self.moments = (
            copied(without(part, state)) for part in ("weights", "last", "solo", "moments")
        )
        self._waiting, self._solo_scores, self._solo_said = None, {}, None


def matrix_look(part: str, stage: int, name: str, m: Tensor) -> Look:
    """A matrix of classes by classes, to be looked at."""
    names = tuple(str(number) for number in range(len(m)))
    values = tuple(tuple(round(value, 4) for value in row) for row in m.tolist())
    return Look(stage, part, name, names, names, values)


def principal(x: Tensor, count: int = COMPONENTS) -> Tensor:
    """The first principal components of rows, each turned so that its largest value is positive.

    Of values that are equally large but for roundings the first decides.
    """
    centred = (x - x.mean(0)).double()
    u, size, _ = torch.linalg.svd(centred, full_matrices=False)
    points: Tensor = (u * size)[:, :count]
    sizes = points.abs()
    largest = (sizes >= (1 - 1e-9) * sizes.amax(0)).byte().argmax(0, keepdim=True)
    turn = points.gather(0, largest).sign()
    return points.mul(torch.where(turn == 0, 1, turn))


def met(request: Join, public: Public, classes: Sequence[str], sender: ClientId) -> Joined:
    """A client's answer to what all must agree on; it refuses public data that are not its own."""
    mine = Joined(public.fingerprint, len(public), list(classes))
    if (request.fingerprint, request.rows) != (mine.fingerprint, mine.rows):
        reason = f"its public data are other ones ({request.rows} images, not {mine.rows})"
        raise ClientFailedError(sender, "join", f"{reason}: all parts must have the same")
    return mine


class Roll:
    """Who takes part in a round; so many as the options allow may fail, and are left out of it."""

    def __init__(self, clients: Clients, absent: int) -> None:
        self.clients, self.absent = clients, absent
        self.ids = sorted(clients.ids)
        self.excluded: dict[ClientId, str] = {}  # who, and why

    def ask(
        self,
        action: Callable[..., Any],
        requests: Mapping[ClientId, Any],
        admit: Admit | None = None,
    ) -> dict[ClientId, Any]:
        """One exchange with all who are left; `admit` refuses a reply by raising."""
        asked = {id: requests[id] for id in self.ids}
        if self.absent:
            replies = self.clients.ask_each(action, asked, self._exclude, admit)
        else:
            replies = self.clients.ask(action, asked, admit=admit)
        self.ids = [id for id in self.ids if id in replies]
        return replies

    def _exclude(self, id: ClientId, error: Exception) -> None:
        self.excluded[id] = str(error)
        self.ids.remove(id)
        if len(self.excluded) > self.absent or not self.ids:
            raise error

    @property
    def notes(self) -> dict[str, float]:
        """Who was left out, for the record."""
        return {f"excluded {id}": 1.0 for id in sorted(self.excluded)}

    def agree(self, action: Callable[..., Any], wanted: Join) -> None:
        """Refuse a client whose public data or classes are not those of the server."""

        def admit(id: ClientId, reply: Joined) -> None:
            if (reply.fingerprint, reply.rows) != (wanted.fingerprint, wanted.rows):
                raise ClientFailedError(id, "join", "its public data are other ones")
            if reply.classes != wanted.classes:
                shown = ", ".join(reply.classes[:20])
                raise ClientFailedError(id, "join", f"its classes are others: {shown}")

        self.ask(action, dict.fromkeys(self.ids, wanted), admit)


def filled(public: Public, batch: int) -> None:
    """Refuse public data that do not fill one batch."""
    if len(public) < batch:
        what = f"{len(public)} public images do not fill a batch of {batch}"
        raise UserError(what, "method.public_batch", "make it smaller, or raise public.rows")


def prepared(roll: "Roll", action: Callable[..., Any]) -> dict[str, float]:
    """Let every client train alone before the first round; the mean loss, for the record."""
    replies = roll.ask(action, dict.fromkeys(roll.ids, Empty()))
    return {"prepared": sum(reply.loss for reply in replies.values()) / len(replies)}


def shared(roll: "Roll", action: Callable[..., Any]) -> Weights:
    """The mean of all weights and buffers, where all clients have the same network."""
    replies = roll.ask(action, dict.fromkeys(roll.ids, Empty()))
    return Weights(mean([reply.weights for reply in replies.values()]))


def average(answers: dict[ClientId, Tensor]) -> dict[ClientId, Tensor]:
    """The same target for all: the mean of all logits, summed in double precision."""
    stacked = torch.stack([answers[id] for id in sorted(answers)])
    target = stacked.double().mean(0).to(stacked.dtype)
    return dict.fromkeys(answers, target)


Combine = Callable[[dict[ClientId, Tensor]], dict[ClientId, Tensor]]


def collaborate(
    roll: Roll,
    action: Callable[[Any, Align, Moment], Working[Aligned]],
    key: int,
    steps: int,
    shape: tuple[int, int],
    combine: Combine,
) -> float:
    """The collaborative phase of a round; the mean loss of its steps."""
    nothing = torch.zeros(0)
    targets: dict[ClientId, Tensor] = dict.fromkeys(roll.ids, nothing)
    losses: list[float] = []
    for step in range(steps + 1):
        wanted = shape if step < steps else (0,)

        def admit(id: ClientId, reply: Aligned, wanted: tuple[int, ...] = wanted) -> None:
            if tuple(reply.logits.shape) != wanted:
                what = f"logits of shape {tuple(reply.logits.shape)}, not {wanted}"
                raise BadMessageError(id, what)

        replies = roll.ask(action, _requests(key, step, targets), admit)
        if step:
            losses += [reply.loss for reply in replies.values()]
        if step < steps:
            targets = combine({id: reply.logits for id, reply in replies.items()})
    return sum(losses) / max(1, len(losses))


def _requests(key: int, step: int, targets: Mapping[ClientId, Tensor]) -> dict[ClientId, Align]:
    """One message for all whose target is the same, so that it is packed once."""
    made: dict[int, Align] = {}
    for target in targets.values():
        made.setdefault(id(target), Align(key, step, len(targets), target))
    return {client: made[id(target)] for client, target in targets.items()}
