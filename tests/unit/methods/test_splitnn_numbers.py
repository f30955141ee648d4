"""Split learning with every rehearsal, number by number, beside a plain loop without messages."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.federation import SERVER, Clients, Moment
from atoll.core.messages import Tensors
from atoll.engines.local import LocalEngine
from atoll.families.vertical import Embed, Learn
from atoll.jobs.split_round import Step, draws
from atoll.learning.replay import contrast, noisy, picked
from atoll.learning.split import Batches
from atoll.learning.split_nets import bottom, top
from atoll.methods.splitnn import LossConfig, losses
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.parts import Parts, parts

WIDTH = 3
SMALL: dict[str, Any] = {
    "name": "splitnn",
    "rounds": 2,
    "data": {"name": "digits"},
    "scenario": {"split": "parties", "clients": 2, "cut": "strips", "train": 0.04,
                 "mode": "classes", "stage_classes": [[0, 1, 2], [2, 3]]},
    "method": {"name": "splitnn", "rate": 0.02, "batch": 12, "width": WIDTH},
    "engine": {"mode": "loop"},
}  # fmt: skip
NONE = torch.zeros(0, WIDTH, dtype=torch.float64)
REHEARSALS = ["none", "pass", "fedspace", "fedprok"]


def config(**changes: Any) -> RunConfig:
    return resolve(change(SMALL, {"dtype": "float64", **changes}), "test")


def added(parts_: Tensors) -> Tensor:
    """The joint embedding."""
    return torch.stack(list(parts_.values())).sum(0)


@dataclass
class Plain:
    """One network that reads all columns, with the rehearsal in the same loss."""

    made: Parts
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        server = self.made.server()
        self.options, self.site, self.network = self.made.config.options(), server.site, server
        self.turns = 2 if self.options.replay == "pass" else 1
        self.top = server.head.weights
        self.halves = {id: self.made.client(id).learner.half for id in self.made.scenario.clients}
        self.below = {id: half.weights for id, half in self.halves.items()}
        self.before: dict[str, Tensors] = {}
        self.means = torch.zeros(10, WIDTH, dtype=torch.float64)
        self.counts, self.radius = torch.zeros(10), 0.0

    def parts(self, stage: int, rows: Any = slice(None), below: Any = None) -> dict[str, Tensor]:
        """Each client's embeddings of rows, turned rows last."""
        found = {}
        for id, half in self.halves.items():
            x = self.made.site(id).train(stage).x[rows]
            if self.turns == 2 and not isinstance(rows, slice):
                x = torch.cat([x, x.flip(2).flip(3)])
            found[id] = half.function((below or self.below)[id], x)
        return found

    def class_means(self, stage: int) -> tuple[Tensor, Tensor]:
        """The mean embedding of each class, 0 where it has no row, and its count."""
        joint, y = added(self.parts(stage)).detach(), self.site.train(stage).y
        means = torch.zeros_like(self.means)
        for kind in y.unique():
            means[kind] = joint[y == kind].mean(0)
        return means, torch.bincount(y, minlength=10)

    def entropy(self, weights: Tensors, rows: Tensor, labels: Tensor, stage: int) -> Tensor:
        logits = self.network.head.network(weights, rows)
        if self.options.replay == "fedspace":
            seen = {0, 1, 2} if stage == 0 else {0, 1, 2, 3}
            unseen = [kind for kind in range(10) if kind not in seen]
            logits = logits.index_fill(1, torch.tensor(unseen), -torch.inf)
        heat = 0.1 if self.options.replay in ("pass", "fedspace") else 1.0
        return F.cross_entropy(logits / heat, labels)

    def loss(self, weights: Tensors, joint: Tensor, y: Tensor, key: Tensor, stage: int) -> Tensor:
        """The cross-entropy and the rehearsal; classes 0 and 1 are gone at the second stage."""
        replay, labels = self.options.replay, y
        if replay == "pass":
            labels = torch.cat([2 * y, 2 * y + 1])
        loss = self.entropy(weights, joint, labels, stage)
        if stage == 0 or replay == "none":
            return loss
        wanted = picked(torch.tensor([0, 1]), len(labels), draws(key, 1))
        if replay == "fedprok":
            moved = joint.detach() - self.current[y] + self.means[wanted]
            return loss + self.entropy(weights, moved, wanted, stage)
        rows = noisy(self.means[wanted], self.radius, draws(key, 2))
        if replay == "pass":
            return loss + 10 * self.entropy(weights, rows, 2 * wanted, stage)
        apart = contrast(torch.cat([joint, rows]), torch.cat([y, wanted]), len(y))
        return loss + 0.01 * self.entropy(weights, rows, wanted, stage) + 0.01 * apart

    def begin(self, stage: int) -> None:
        if self.options.fresh and stage:
            stream = self.site.stream("top", stage)
            made = top("dense", WIDTH, 10, stream).double()
            self.top = {name: w.detach() for name, w in made.state_dict().items()}
            for id in self.halves:
                site = self.made.site(id)
                new = bottom("dense", site.inputs(), WIDTH, site.stream("bottom", stage)).double()
                self.below[id] = {name: w.detach() for name, w in new.state_dict().items()}

    def round(self, moment: Moment) -> None:
        y, total = self.site.train(moment.stage).y, 0.0
        here, counts = self.class_means(moment.stage)
        self.current = torch.where((counts > 0)[:, None], here, self.means)
        batches = Batches(len(y), 12, self.site.stream("order", moment).key)
        for step in range(-(-len(y) // 12)):
            rows = batches.at(step, y.device)
            key = torch.tensor(self.site.stream("step", moment).child(step).key)
            total += self.step(rows, y[rows], key, moment.stage) * len(rows)
        self.losses.append(total / len(y))

    def step(self, rows: Tensor, y: Tensor, key: Tensor, stage: int) -> float:
        weights = {n: w.detach().requires_grad_() for n, w in self.top.items()}
        below = {
            id: {n: w.detach().requires_grad_() for n, w in own.items()}
            for id, own in self.below.items()
        }
        now = self.parts(stage, rows, below)
        loss = self.loss(weights, added(now), y, key, stage)
        pull = torch.tensor(0.0, dtype=torch.float64)
        if self.options.replay == "pass" and stage:
            then = self.parts(stage, rows, self.before)
            pull = 10 * sum((now[id] - then[id].detach()).norm() for id in now)
        (loss + pull).backward()
        rate = self.options.rate
        self.top = {n: (w - rate * w.grad).detach() for n, w in weights.items()}
        self.below = {
            id: {n: (w - rate * w.grad).detach() for n, w in own.items()}
            for id, own in below.items()
        }
        return float(loss.detach())

    def settle(self, stage: int) -> None:
        """Prototypes at the end of a stage; class 2 has one before the second."""
        self.before = dict(self.below)
        if self.options.replay == "none":
            return
        means, counts = self.class_means(stage)
        if stage == 0:
            joint, y = added(self.parts(0)).detach(), self.site.train(0).y
            inside = [((joint[y == k] - means[k]) ** 2).mean() for k in range(3)]
            self.radius = float((sum(inside) / 3) ** 0.5)
            self.means, self.counts = means, counts
            return
        old, (one, two) = self.means[2].clone(), (self.counts[2], counts[2])
        self.means[3] = means[3]
        if self.options.replay == "fedspace":
            self.means[2] = 0.9 * old + 0.1 * means[2]
        if self.options.replay == "fedprok":
            self.means[2] = (one * old + two * means[2]) / (one + two)
        self.counts = self.counts + counts


def run_plain(made: Parts) -> Plain:
    plain = Plain(made)
    for stage in range(2):
        plain.begin(stage)
        for number in range(2):
            plain.round(Moment(stage, number, 2))
        plain.settle(stage)
    return plain


def run_split(made: Parts) -> tuple[Any, LocalEngine, list[float]]:
    server, engine, losses = made.server(), LocalEngine(made), []
    for stage in range(2):
        for number in range(2):
            moment = Moment(stage, number, 2)
            notes = server.round(Clients(made.scenario.clients, engine, moment), moment)
            losses.append(notes["loss"])
    return server, engine, losses


def close(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("how", [*({"replay": name} for name in REHEARSALS), {"fresh": True}])
def test_two_stages_of_messages_are_those_of_a_plain_loop(how: dict[str, Any]) -> None:
    made = parts(config(**how))
    plain, (server, engine, losses) = run_plain(made), run_split(made)
    assert losses == pytest.approx(plain.losses, rel=1e-7)  # the radius has single precision
    close(plain.top, server.head.weights)
    for id, weights in plain.below.items():
        close(weights, engine._client(id).learner.half.weights)
    torch.testing.assert_close(server.means, plain.means, rtol=1e-6, atol=1e-7)
    assert float(server.radius) == pytest.approx(plain.radius, rel=1e-5)
    assert server.head.seen.tolist() == [True] * 4 + [False] * 6
    if how.get("replay", "none") != "none":
        assert server.counts.tolist() == plain.counts.tolist()


@pytest.mark.parametrize("how", [{}, {"replay": "pass"}, {"agg": "concat"}])
def test_the_test_counts_the_rows_whose_largest_logit_is_their_class(how: dict[str, Any]) -> None:
    made = parts(config(**how))
    server, engine, _ = run_split(made)
    moment = Moment(1, 1, 2)
    scores = server.evaluate(Clients(made.scenario.clients, engine, moment, (0, 1)), moment)
    tables = []
    for task in (0, 1):
        rows = [
            engine._client(id).learner.half.embed(made.site(id).test(task).x)
            for id in made.scenario.clients
        ]
        joint = torch.cat(rows, 1) if how.get("agg") == "concat" else rows[0] + rows[1]
        logits = server.head.network(server.head.weights, joint)[:, :: 2 if "replay" in how else 1]
        tables.append(logits.argmax(1) == server.site.test(task).y)
    new = server.site.fresh(1)
    expected = [tables[0], tables[1], torch.cat([tables[0], tables[1][new]])]
    assert [(s.task, s.variant) for s in scores] == [(0, ""), (1, ""), (1, "union")]
    assert [(s.rows, s.correct) for s in scores] == [(len(t), int(t.sum())) for t in expected]


def learn(client: Any, step: int, gradient: Tensor, more: bool = True) -> Tensor:
    reply: Tensor = client.learn(Learn(7, step, more, gradient), Moment(0, 0, 1)).embedding
    return reply


def test_a_client_steps_down_the_gradient_of_the_batch_before_once() -> None:
    """E = relu(x W + b) with gradient 1 for each embedding: W loses rate * sum of active rows."""
    client = parts(config()).client("site-0")
    first = learn(client, 0, NONE)
    assert client.state()["done"].tolist() == [-1, -1, -1]
    x = client.site.train(0).x
    rows = Batches(len(x), 12, 7)
    flat, weight = x[rows.at(0, x.device)].flatten(1), client.learner.half.weights["weight"]
    active = (flat @ weight.T + client.learner.half.weights["bias"] > 0).double()
    torch.testing.assert_close(
        first, torch.relu(flat @ weight.T + client.learner.half.weights["bias"])
    )
    second = learn(client, 1, torch.ones_like(first))
    moved = weight - 0.02 * active.T @ flat
    torch.testing.assert_close(client.learner.half.weights["weight"], moved)
    flat = x[rows.at(1, x.device)].flatten(1)
    torch.testing.assert_close(
        second, torch.relu(flat @ moved.T + client.learner.half.weights["bias"])
    )
    assert client.state()["done"].tolist() == [0, 0, 0]
    assert torch.equal(learn(client, 1, torch.ones_like(first)), second)  # it comes again
    torch.testing.assert_close(client.learner.half.weights["weight"], moved)
    assert len(learn(client, 2, torch.ones_like(second), more=False)) == 0
    assert client.state()["done"].tolist() == [0, 0, 1]


def test_a_client_that_was_rebuilt_between_two_messages_makes_the_same_step() -> None:
    made = parts(config())
    one, other = made.client("site-0"), made.client("site-0")
    first = learn(one, 0, NONE)
    other.restore(one.state())
    ones = torch.ones_like(first)
    assert torch.equal(learn(one, 1, ones), learn(other, 1, ones))
    assert torch.equal(one.state()["done"], other.state()["done"])


def test_rows_are_embedded_in_the_order_of_the_seed_and_without_one_as_they_lie() -> None:
    client = parts(config()).client("site-0")
    x, moment = client.site.train(0).x, Moment(0, 0, 1)
    every = client.learner.half.embed(x)
    order = Batches(len(x), len(x), 5).at(0, x.device)
    plain = client.embed(Embed("train", 0, 0, 2, 3), moment).embedding
    drawn = client.embed(Embed("train", 0, 5, 2, 3), moment).embedding
    torch.testing.assert_close(plain, every[2:5])
    torch.testing.assert_close(drawn, every[order[2:5]])


def test_what_an_engine_has_done_for_a_client_is_not_done_again_by_a_message() -> None:
    client = parts(config()).client("site-0")
    weights = {name: w + 1 for name, w in client.learner.half.weights.items()}
    client.take(weights, Moment(0, 0, 1), 3)
    assert client.state()["done"].tolist() == [0, 0, 2]
    learn(client, 3, torch.ones(12, WIDTH).double(), more=False)
    assert all(torch.equal(client.learner.half.weights[name], w) for name, w in weights.items())


def test_a_secret_server_draws_what_no_client_can_draw() -> None:
    def keys(**how: Any) -> list[int]:
        made, moment = parts(config(**how)), Moment(1, 0, 2)
        return [made.server().head.draws("step", moment).key for _ in range(2)]

    one, other = keys()
    assert one == other == parts(config()).site(SERVER).stream("step", Moment(1, 0, 2)).key
    one, other = keys(secret=True)
    assert one != other


def test_a_head_is_widened_to_the_highest_class_and_keeps_its_old_outputs() -> None:
    made = parts(config(declared=3, undeclared="widen"))
    server = made.server()
    before = {name: w.clone() for name, w in server.head.weights.items()}
    assert server.head.classes == len(before["bias1"]) == 3
    server.head.begin(Moment(1, 0, 2))
    assert server.head.classes == len(server.head.weights["bias1"]) == 4
    torch.testing.assert_close(server.head.weights["weight1"][:3], before["weight1"])
    other = made.server()
    other.restore(server.state())
    assert other.head.classes == 4


def rehearsed(replay: str) -> tuple[float, Tensor, Tensor]:
    """The loss of two rows with this rehearsal, their cross-entropy, and what is rehearsed."""
    joint, y, key = torch.tensor([[1.0, 0.5], [0.2, 0.3]]), torch.tensor([2, 2]), torch.tensor(3)
    given = {
        "means": torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]]),
        "current": torch.tensor([[9.0, 9.0], [9.0, 9.0], [0.25, 0.75]]),
        "old": torch.tensor([0, 1]),
        "radius": torch.tensor(0.5),
        "seen": torch.tensor([True, True, True]),
    }
    weights = {"w": torch.tensor([[0.3, -0.2, 0.1], [0.4, 0.6, -0.5]])}
    config = LossConfig(lambda w, rows: rows @ w["w"], replay, 1, False, 0.5)  # type: ignore[arg-type]
    found = float(losses(config, weights, given, Step(joint, joint[:0], y, key))["loss"])
    wanted = picked(given["old"], 2, draws(key, 1))
    if replay == "fedprok":
        rows = joint - given["current"][y] + given["means"][wanted]
    else:
        rows = noisy(given["means"][wanted], 0.5, draws(key, 2))
    entropies = [
        F.cross_entropy(r @ weights["w"] / 0.5, k) for r, k in ((joint, y), (rows, wanted))
    ]
    apart = contrast(torch.cat([joint, rows]), torch.cat([y, wanted]), 2)
    return found, torch.stack(entropies), apart


def test_a_rehearsal_is_weighed_as_published() -> None:
    found, (own, old), _ = rehearsed("pass")
    assert found == pytest.approx(float(own + 10 * old))
    found, (own, old), apart = rehearsed("fedspace")
    assert found == pytest.approx(float(own + 0.01 * (old + apart)))
    found, (own, old), _ = rehearsed("fedprok")
    assert found == pytest.approx(float(own + old))
    found, (own, _), _ = rehearsed("none")
    assert found == pytest.approx(float(own))


@pytest.mark.parametrize(
    ("replay", "mixed"), [("pass", 4.0), ("fedspace", 0.9 * 4 + 0.1 * 8), ("fedprok", 5.0)]
)
def test_a_prototype_is_kept_or_mixed_by_the_rule_of_its_rehearsal(
    replay: str, mixed: float
) -> None:
    """Class 2 had three rows at 4 and has one at 8; class 1 is gone, class 3 is new at 6."""
    made = parts(config(replay=replay))
    server = made.server()
    how = server._loss(Moment(0, 0, 1)).args[0]
    assert (how.tau, how.masked) == {
        "pass": (0.1, False), "fedspace": (0.1, True), "fedprok": (1.0, False),
    }[replay]  # fmt: skip
    server.head.site = server.site = SimpleNamespace(
        train=lambda stage: SimpleNamespace(y=torch.tensor([2, 3])),
        parties=lambda stage: ["site-0"],
        by_columns=False,
    )
    server.head.embedded = lambda *asked: {"site-0": torch.tensor([[8.0] * 3, [6.0] * 3]).double()}
    server.means[1], server.means[2] = 7.0, 4.0
    server.counts[1], server.counts[2] = 5, 3
    server._keep(None, Moment(1, 1, 2))
    assert server.means[:, 0].tolist() == pytest.approx([0, 7, mixed, 6, *[0] * 6])
    assert server.counts.tolist() == [0, 5, 4, 1, *[0] * 6]
    assert float(server.radius) == 0


def test_a_pass_is_done_again_where_another_batch_was_kept() -> None:
    half = parts(config()).client("site-0").learner.half
    one, other = torch.rand(2, 3, 1, 8, 4, dtype=torch.float64)
    half.forward("one", one, None)
    torch.testing.assert_close(half.again("other", lambda: (other, None)), half.embed(other))
    kept = half.again("other", lambda: (one, None))  # it is there: nothing is read
    torch.testing.assert_close(kept, half.embed(other))
