"""The family of split learning with a toy method: one computation equals the exchange."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from atoll.compute.split_rounds import SplitStack
from atoll.core.errors import BadMessageError, UserError
from atoll.core.federation import SERVER, Clients, Moment, answer
from atoll.core.messages import Packet, Tensors
from atoll.core.rng import normals
from atoll.data.vertical_site import VerticalSite
from atoll.families.vertical import (
    Embed,
    Embedded,
    Head,
    Learn,
    Learned,
    Learner,
    Settings,
    masked_logits,
    scores,
)
from atoll.jobs.split_round import Lent, SplitJob, SplitResult, Step, draws
from atoll.learning.models import Architecture
from atoll.learning.split import Agg
from atoll.learning.split_nets import NetName
from atoll.runs.config import change, resolve
from atoll.runs.parts import Parts, parts

pytestmark = pytest.mark.numerics

MOMENT = Moment(0, 0, 1)
CLASSES = 10


@dataclass(frozen=True)
class Options:
    """The shared options, and four of the toy's own."""

    rate: float = 0.02
    batch: int = 24
    epochs: int = 2
    network: NetName = "dense"
    width: int = 5
    dropout: float = 0.3
    agg: Agg = "sum"
    protocol: Literal["P1", "P2"] = "P1"
    seen_mask: bool = False
    declared: int = 0
    undeclared: Literal["refuse", "widen"] = "refuse"
    pixel_mean: tuple[float, ...] = (0.4,)
    pixel_std: tuple[float, ...] = (0.5,)
    clip: float = 0.0
    noise: float = 0.0
    secret: bool = False
    digits: int = 0
    frozen: float = 0.0  # share of entries that keep their value
    penalty: float = 0.0  # weight of the distance to embeddings by reference weights
    views: bool = False  # whether each image is also shown upside down
    drift: bool = False  # whether clients also send embeddings by reference weights


def flipped(x: Tensor) -> Tensor:
    return x.flip(-2)


def squared(
    network: Architecture, weights: Mapping[str, Tensor], given: Mapping[str, Tensor], step: Step
) -> dict[str, Tensor]:
    """Squared distance of noisy logits to the class, plus the size of the drift."""
    logits = network(weights, step.joint)
    noise = given["noise"] * normals(draws(step.key, 1), tuple(logits.shape)).to(logits)
    wanted = (step.y[:, None] == torch.arange(logits.shape[1], device=step.y.device)).to(logits)
    fit = ((logits + noise - wanted) ** 2).mean()
    drift = ((step.joint - step.before) ** 2).mean() if len(step.before) else 0 * fit
    return {"loss": fit + 0.1 * drift, "fit": fit, "drift": drift}


def drawn(site: VerticalSite, name: str, like: Tensor) -> Tensor:
    return normals(torch.tensor(site.stream(name).key), tuple(like.shape)).to(like)


class Client:
    """A toy client: masks and reference weights come from its random streams."""

    def __init__(self, options: Options, site: VerticalSite) -> None:
        self.options = options
        self.learner = Learner(options, site, (flipped,) if options.views else ())
        weights = self.learner.half.weights
        uses_reference = options.penalty or options.drift
        self.learner.before = {
            n: w + 0.1 * drawn(site, n, w) for n, w in (weights if uses_reference else {}).items()
        }
        self.frozen = {
            n: drawn(site, f"mask {n}", w).abs() < options.frozen for n, w in weights.items()
        }
        if options.frozen == 1:
            self.frozen = {n: torch.ones_like(mask) for n, mask in self.frozen.items()}

    @property
    def _masks(self) -> Tensors | None:
        return self.frozen if self.options.frozen else None

    def embed(self, request: Embed, moment: Moment) -> Embedded:
        return self.learner.embed(request)

    def learn(self, request: Learn, moment: Moment) -> Learned:
        embedding = self.learner.learn(request, moment, self._masks, self.options.penalty)
        none = request.gradient.new_zeros((0, self.options.width))
        before = self.learner.reference(request, moment) if self.options.drift else none
        return Learned(embedding, before)

    def lend(self, moment: Moment, job: SplitJob) -> Lent:
        return self.learner.lend(moment, job, self._masks, self.options.penalty)


ACTIONS = (Client.embed, Client.learn)


class PlainClient:
    """A client whose replies hold no reference embeddings."""

    def __init__(self, options: Options, site: VerticalSite) -> None:
        self.learner = Learner(options, site)

    def embed(self, request: Embed, moment: Moment) -> Embedded:
        return self.learner.embed(request)

    def learn(self, request: Learn, moment: Moment) -> Embedded:
        return Embedded(self.learner.learn(request, moment))

    def lend(self, moment: Moment, job: SplitJob) -> Lent:
        return self.learner.lend(moment, job)


@dataclass
class Engine:
    """Carries messages, or runs a round as one computation."""

    clients: dict[str, Any]
    together: bool
    jobs: list[SplitJob] = field(default_factory=list)

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        return {id: answer(self.clients[id], action, moment, p) for id, p in packets.items()}

    def whole(self, job: SplitJob, moment: Moment) -> SplitResult | None:
        if not self.together:
            return None
        job = replace(job, lent=tuple(self.clients[id].lend(moment, job) for id in job.ids))
        self.jobs.append(job)
        (result,) = SplitStack([job], "grouped").run([job])
        for id, half in zip(job.ids, result.halves, strict=True):
            self.clients[id].learner.take(half, moment, job.steps)
        return result


def made(**scenario: Any) -> Parts:
    values = {
        "dtype": "float64",
        "data": "digits",
        "scenario": {"split": "parties", "clients": 2, "cut": "strips", "train": 0.06, **scenario},
        "method": "splitnn",
        "engine.device": "cpu",
    }
    return parts(resolve(change({}, values), "test"))


def trained(options: Options, together: bool, kind: Any = Client) -> tuple[Head, Engine, Any, Any]:
    found = made()
    engine = Engine({id: kind(options, found.site(id)) for id in found.scenario.clients}, together)
    head = Head(
        options, found.site(SERVER), (kind.embed, kind.learn), (flipped,) if options.views else ()
    )
    clients = Clients(found.scenario.clients, engine, MOMENT)
    head.begin(MOMENT)
    given = {"noise": torch.tensor(0.01, dtype=torch.float64)}
    sums = 0 if options.views else CLASSES
    loss = partial(squared, head.network)
    job = head.job(MOMENT, loss, given, sends_before=options.drift, class_sums=sums)
    return head, engine, head.train(clients, job), clients


CASES: dict[str, Options] = {
    "plain": Options(),
    "mean": Options(agg="mean"),
    "concatenated": Options(agg="concat"),
    "dropout": Options(network="mlp"),
    "guarded": Options(clip=0.001, noise=0.001, digits=3),
    "some frozen": Options(frozen=0.3),
    "all frozen": Options(frozen=1.0),
    "penalty": Options(penalty=0.7),
    "views": Options(views=True),
    "drift": Options(drift=True),
    "everything": Options(agg="concat", frozen=0.3, penalty=0.7, drift=True, views=True),
}


@pytest.mark.parametrize("name", CASES)
def test_one_computation_equals_the_exchange_message_by_message(name: str) -> None:
    head, engine, totals, clients = trained(CASES[name], together=False)
    other, fast, results, ledger = trained(CASES[name], together=True)
    assert len(fast.jobs) == 1
    assert not engine.jobs
    for key, weight in head.weights.items():
        torch.testing.assert_close(other.weights[key], weight, rtol=1e-10, atol=1e-10)
    for id, client in engine.clients.items():
        learner, twin = client.learner, fast.clients[id].learner
        for key, weight in learner.half.weights.items():
            torch.testing.assert_close(twin.half.weights[key], weight, rtol=1e-10, atol=1e-10)
        assert twin.place == learner.place == (0, 0, fast.jobs[0].steps - 1)
    assert results.totals == pytest.approx(totals.totals, rel=1e-10)
    if totals.sums.numel():
        torch.testing.assert_close(results.sums, totals.sums, rtol=1e-10, atol=1e-10)
    assert ledger.traffic == clients.traffic


def test_a_reply_without_reference_embeddings_has_the_same_ledger() -> None:
    *_, clients = trained(Options(), False, PlainClient)
    *_, ledger = trained(Options(), True, PlainClient)
    assert ledger.traffic == clients.traffic
    assert {message.kind for message in ledger.traffic} == {"Learn", "Embedded"}


def test_each_addition_of_a_method_changes_the_result() -> None:
    def weights(options: Options) -> Tensor:
        _, engine, _, _ = trained(options, together=False)
        return torch.cat([c.learner.half.weights["weight"] for c in engine.clients.values()], 1)

    plain = weights(Options())
    for name in ("some frozen", "all frozen", "penalty", "views", "drift"):
        assert (weights(CASES[name]) - plain).abs().max() > 1e-6, name


def test_frozen_entries_keep_their_value() -> None:
    options = Options(frozen=0.3)
    first = {id: Client(options, made().site(id)) for id in made().scenario.clients}
    _, engine, _, _ = trained(options, together=False)
    for id, client in engine.clients.items():
        for name, mask in client.frozen.items():
            before = first[id].learner.half.weights[name]
            after = client.learner.half.weights[name]
            assert torch.equal(before[mask], after[mask])
            assert not torch.equal(before[~mask], after[~mask])


def test_class_sums_are_the_embeddings_summed_by_class() -> None:
    options = Options(epochs=1, frozen=1.0)  # clients that do not move: one pass suffices
    head, engine, totals, _ = trained(options, together=False)
    rows = [c.learner.embeddings(c.learner.site.train(0).x) for c in engine.clients.values()]
    y = head.site.train(0).y
    expected = torch.stack([sum(rows)[y == kind].sum(0) for kind in range(CLASSES)])
    torch.testing.assert_close(totals.sums, expected)


def test_a_concatenation_has_zeros_for_absent_clients_and_gradients_for_present_ones() -> None:
    found = made()
    head = Head(Options(agg="concat"), found.site(SERVER), ACTIONS)
    part = torch.ones(3, 5, dtype=torch.float64)
    joint = head.joined({"site-1": part})
    assert joint.shape == (3, 10)
    assert torch.equal(joint[:, :5], 0 * part)
    assert torch.equal(joint[:, 5:], part)
    assert torch.equal(head.parts(2 * joint, ["site-1"])["site-1"], 2 * part)
    mean = Head(Options(agg="mean"), found.site(SERVER), ACTIONS)
    assert torch.equal(mean.parts(part, ["site-0", "site-1"])["site-1"], part / 2)


def test_labels_of_views_are_classes_of_their_own() -> None:
    y, (_, engine, _, _) = torch.tensor([0, 3]), trained(Options(), together=True)
    job = engine.jobs[0]
    assert torch.equal(job.labels(y), y)
    assert replace(job, views=(flipped, flipped)).labels(y).tolist() == [0, 9, 1, 10, 2, 11]


def test_reference_embeddings_of_other_rows_name_their_sender() -> None:
    found = made()
    options = Options(drift=True)
    engine = Engine({id: Client(options, found.site(id)) for id in found.scenario.clients}, False)
    engine.clients["site-1"].learner.before = {}
    head = Head(options, found.site(SERVER), ACTIONS)
    clients = Clients(found.scenario.clients, engine, MOMENT)
    given = {"noise": torch.tensor(0.0, dtype=torch.float64)}
    job = head.job(MOMENT, partial(squared, head.network), given, sends_before=True)
    with pytest.raises(BadMessageError, match=r"from site-1 refused: .*rows not aligned"):
        head.train(clients, job)


def test_a_loss_that_is_not_finite_ends_the_round_both_ways() -> None:
    for together in (False, True):
        with pytest.raises(UserError, match="smaller rate"):
            trained(Options(rate=1e200), together)


def test_a_learner_and_a_head_go_on_from_their_states() -> None:
    options, found = Options(drift=True), made()
    head, engine, _, _ = trained(options, together=False)
    client = engine.clients["site-0"]
    twin = Learner(options, found.site("site-0"))
    twin.restore(dict(sorted(client.learner.state().items())))
    assert list(twin.half.weights) == list(client.learner.half.weights)
    other = Head(options, found.site(SERVER), ACTIONS)
    other.restore(head.state())
    for one, two in ((twin.state(), client.learner.state()), (other.state(), head.state())):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_masked_logits_leave_out_classes_that_no_stage_has_had() -> None:
    seen = torch.tensor([True, False, True])
    network: Any = lambda weights, rows: rows  # noqa: E731
    rows = torch.ones(2, 3)
    assert torch.equal(masked_logits(network, {}, rows, seen, False), rows)
    assert masked_logits(network, {}, rows, seen, True)[0].tolist() == [1, -torch.inf, 1]


def test_scores_are_of_each_task_and_of_the_union_of_fresh_rows() -> None:
    right, wrong = torch.eye(2), 1 - torch.eye(2)
    y = torch.tensor([0, 1])
    predictions = {0: (right, y), 1: (wrong, y)}
    found = scores(Moment(1, 0, 1), predictions, lambda task: torch.tensor([True, task == 0]))
    assert [(s.task, s.variant, s.rows, s.correct) for s in found] == [
        (0, "", 2, 2), (1, "", 2, 0), (1, "union", 3, 2),
    ]  # fmt: skip
    assert [s.variant for s in scores(MOMENT, predictions, None, "odd")] == ["odd", "odd"]


def test_settings_are_the_shared_options_of_a_method() -> None:
    settings = Settings.of(Options(rate=0.5, agg="mean"))
    assert (settings.rate, settings.agg, settings.width) == (0.5, "mean", 5)
