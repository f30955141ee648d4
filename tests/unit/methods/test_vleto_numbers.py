"""V-LETO's stages, number by number, beside a plain loop without messages."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.errors import UserError
from atoll.core.federation import SERVER, Clients, Moment
from atoll.core.messages import Tensors
from atoll.engines.local import LocalEngine
from atoll.families.vertical import Embed, Learn
from atoll.jobs.split_round import draws
from atoll.learning.knowledge import combined, frozen
from atoll.learning.replay import noisy
from atoll.learning.split import Batches
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.parts import Parts, parts

WIDTH, BATCH, SAMPLES = 3, 12, 10
SMALL: dict[str, Any] = {
    "name": "vleto",
    "rounds": 2,
    "data": {"name": "digits"},
    "scenario": {"split": "parties", "clients": 2, "cut": "strips", "train": 0.04,
                 "mode": "classes", "stage_classes": [[0, 1, 2], [2, 3]]},
    "method": {"name": "vleto", "rate": 0.1, "batch": BATCH, "width": WIDTH,
               "fisher_rows": SAMPLES},
    "engine": {"mode": "loop"},
}  # fmt: skip
COLUMNS = {"scenario": {"split": "parties", "clients": 2, "cut": "strips", "train": 0.04,
                        "mode": "columns"}}  # fmt: skip
NONE = torch.zeros(0, WIDTH, dtype=torch.float64)


def config(**changes: Any) -> RunConfig:
    return resolve(change(SMALL, {"dtype": "float64", **changes}), "test")


def class_means(joint: Tensor, y: Tensor) -> Tensor:
    """The mean embedding of each class, 0 where it has no row."""
    means = torch.zeros(10, WIDTH, dtype=torch.float64)
    for kind in y.unique():
        means[kind] = joint[y == kind].mean(0)
    return means


@dataclass
class Plain:
    """One network that reads the columns of all who learn; what it keeps lies in the open."""

    made: Parts
    notes: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        server = self.made.server()
        self.options, self.site, self.network = self.made.config.options(), server.site, server
        self.columns = self.site.by_columns
        self.top = server.head.weights
        self.halves = {id: self.made.client(id).learner.half for id in self.made.scenario.clients}
        self.below = {id: half.weights for id, half in self.halves.items()}
        self.before: dict[str, Tensors] = {}
        self.masks: dict[str, Tensors] = {}
        self.fisher: dict[str, Tensors] = {}
        self.means = torch.zeros(10, WIDTH, dtype=torch.float64)
        self.known: set[int] = set()
        self.streamed = torch.zeros_like(self.means)

    def ids(self, stage: int) -> list[str]:
        return [f"site-{stage}"] if self.columns else ["site-0", "site-1"]

    def joint(self, stage: int, rows: Any = slice(None), below: Any = None) -> Tensor:
        found: Tensor = sum(
            self.halves[id].function(
                (below or self.below)[id], self.made.site(id).train(stage).x[rows]
            )
            for id in self.ids(stage)
        )
        return found

    def entropy(self, weights: Tensors, rows: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.network.head.network(weights, rows), y)

    def mixed(self, new: Tensor, y: Tensor) -> Tensor:
        """Half of the new mean and half of the old one; one alone where there is no other."""
        found = self.means.clone()
        for kind in y.unique().tolist():
            old = self.means[kind] if kind in self.known else new[kind]
            found[kind] = 0.5 * new[kind] + 0.5 * old
        return found

    def terms(self, weights: Tensors, joint: Tensor, given: tuple[Any, ...]) -> dict[str, Tensor]:
        rows, y, key, stage, mixed = given
        found = {"loss_ce": self.entropy(weights, joint, y)}
        if stage and self.columns:
            found["loss_f"] = self.entropy(weights, mixed[y], y)
        elif stage:
            old = torch.tensor([0] * len(y) + [1] * len(y))
            means = self.means
            if self.before:
                now, then = joint.detach(), self.joint(stage, rows, self.before).detach()
                ways = [now[y == k].mean(0) - then[y == k].mean(0) for k in y.unique()]
                means = means + self.options.gamma * torch.stack(ways).mean(0)
            found["loss_a"] = self.entropy(weights, noisy(means[old], 0.01, draws(key, 1)), old)
        return found

    def step(self, given: tuple[Any, ...]) -> dict[str, float]:
        rows, _, _, stage, _ = given
        weights = {n: w.detach().requires_grad_() for n, w in self.top.items()}
        below = {
            id: {n: w.detach().requires_grad_() for n, w in self.below[id].items()}
            for id in self.ids(stage)
        }
        joint = self.joint(stage, rows, below)
        found = self.terms(weights, joint, given)
        share = {"loss_ce": 0.5 if stage else 1.0}
        loss = torch.stack([share.get(name, 0.5) * t for name, t in found.items()]).sum()
        loss.backward()
        self.top = {n: (w - 0.1 * w.grad).detach() for n, w in weights.items()}
        for id, own in below.items():
            still = self.masks.get(id, {n: torch.zeros(w.shape).bool() for n, w in own.items()})
            self.below[id] = {
                n: torch.where(still[n], w, w - 0.1 * w.grad).detach() for n, w in own.items()
            }
        if self.options.stream:
            self.streamed.index_add_(0, given[1], joint.detach())
        terms = {"loss": loss, **found}
        return {name: float(term.detach()) for name, term in terms.items()}

    def round(self, moment: Moment) -> None:
        y, totals = self.site.train(moment.stage).y, dict[str, float]()
        new = class_means(self.joint(moment.stage).detach(), y)
        if self.options.stream and moment.round:
            new = self.streamed / torch.bincount(y, minlength=10).clamp(min=1)[:, None]
        mixed = self.mixed(new, y)
        self.streamed = torch.zeros_like(self.means)
        batches = Batches(len(y), BATCH, self.site.stream("order", moment).key)
        for step in range(-(-len(y) // BATCH)):
            rows = batches.at(step, y.device)
            key = torch.tensor(self.site.stream("step", moment).child(step).key)
            for name, value in self.step((rows, y[rows], key, moment.stage, mixed)).items():
                totals[name] = totals.get(name, 0.0) + value * len(rows) / len(y)
        self.notes.append(totals)

    def settle(self, moment: Moment) -> None:
        stage, y = moment.stage, self.site.train(moment.stage).y
        after = self.mixed(class_means(self.joint(stage).detach(), y), y)
        for kind in sorted(self.known & set(y.tolist())):
            self.notes[-1][f"moved class {kind}"] = float((after - self.means)[kind].norm())
        self.means, self.known = after, self.known | set(y.tolist())
        for id in self.ids(stage):
            held = torch.cat([m.flatten() for m in self.masks.get(id, {}).values()] or [NONE])
            self.notes[-1][f"frozen {id}"] = float(held.double().mean()) if len(held) else 0.0
        self.measure(y, moment)
        if self.options.gamma:
            self.before = dict(self.below)

    def measure(self, y: Tensor, moment: Moment) -> None:
        """The mean over samples of the square of each sample's own gradient."""
        order = Batches(len(y), len(y), self.site.stream("fisher", moment).key).at(0, y.device)
        for row in order[:SAMPLES]:
            below = {
                id: {n: w.detach().requires_grad_() for n, w in own.items()}
                for id, own in self.below.items()
            }
            at = row[None]
            self.entropy(self.top, self.joint(moment.stage, at, below), y[at]).backward()
            for id in self.ids(moment.stage):
                found = self.fisher.setdefault(
                    id, {n: torch.zeros_like(w) for n, w in below[id].items()}
                )
                for n, w in below[id].items():
                    found[n] += w.grad**2 / SAMPLES


def close(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "how",
    [
        {"lmo_rule": "quantile", "rho": 0.6, "gamma": 0.5, "drift": "vector"},
        COLUMNS,
        {**COLUMNS, "stream": True},
    ],
    ids=["classes", "columns", "streamed"],
)
def test_two_stages_of_messages_are_those_of_a_plain_loop(how: dict[str, Any]) -> None:
    made = parts(config(**how))
    plain, server, engine = Plain(made), made.server(), LocalEngine(made)
    for stage in range(2):
        for number in range(2):
            moment = Moment(stage, number, 2)
            notes = server.round(Clients(made.scenario.clients, engine, moment), moment)
            plain.round(moment)
            if moment.last:
                plain.settle(moment)
            assert notes == pytest.approx(plain.notes[-1], rel=1e-8, abs=1e-10)
        for id in plain.ids(stage):
            client = engine._client(id)
            close(plain.below[id], client.learner.half.weights)
            close(plain.fisher[id], client.fisher)
            if "rho" in how:
                plain.masks[id] = frozen(client.fisher, "quantile", 0.0, 0.6)
    close(plain.top, server.head.weights)
    torch.testing.assert_close(server.means, plain.means, rtol=1e-8, atol=1e-10)
    assert server.known.nonzero().flatten().tolist() == sorted(plain.known)


def test_mixing_weighs_the_newest_by_beta_and_all_before_by_the_rest() -> None:
    parts_ = [torch.tensor([[8.0]]), torch.tensor([[4.0]]), torch.tensor([[2.0]])]
    assert combined(parts_, "mix", 0.25).item() == 0.25 * 2 + 0.75 * (0.25 * 4 + 0.75 * 8)
    assert combined(parts_, "sum", 0.25).tolist() == [[14.0]]
    assert combined(parts_, "current", 0.25).item() == 2
    two = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 20.0], [30.0, 40.0]])]
    assert combined(two, "sum", 0.5).tolist() == [[11.0, 22.0], [33.0, 44.0]]


def learn(client: Any, step: int, gradient: Tensor, more: bool = True) -> Any:
    return client.learn(Learn(7, step, more, gradient), Moment(0, 0, 1))


def test_a_client_steps_down_the_gradient_of_the_batch_before_once() -> None:
    """E = relu(x W + b) with gradient 1 for each embedding: W loses rate * sum of active rows."""
    client = parts(config()).client("site-0")
    assert client.state()["done"].tolist() == [-1, -1, -1, -1, -1]
    reply = learn(client, 0, NONE)
    assert reply.before.shape == (0, WIDTH)
    x, weight = client.site.train(0).x, client.learner.half.weights["weight"]
    flat = x[Batches(len(x), BATCH, 7).at(0, x.device)].flatten(1)
    active = (flat @ weight.T + client.learner.half.weights["bias"] > 0).double()
    for _ in range(2):  # it comes again
        learn(client, 1, torch.ones_like(reply.embedding))
        moved = weight - 0.1 * active.T @ flat
        torch.testing.assert_close(client.learner.half.weights["weight"], moved)
    end = learn(client, 2, torch.zeros_like(reply.embedding), more=False)
    assert end.embedding.shape == end.before.shape == (0, WIDTH)
    assert client.state()["done"].tolist() == [0, 0, 1, -1, -1]


def test_a_client_that_was_rebuilt_between_two_messages_makes_the_same_step() -> None:
    made = parts(config())
    one, other = made.client("site-0"), made.client("site-0")
    ones = torch.ones_like(learn(one, 0, NONE).embedding)
    other.restore(one.state())
    assert torch.equal(learn(one, 1, ones).embedding, learn(other, 1, ones).embedding)
    assert torch.equal(one.state()["done"], other.state()["done"])
    again = made.client("site-0")
    again.restore(one.state())
    assert torch.equal(again.state()["done"], one.state()["done"])


def test_what_an_engine_has_done_for_a_client_is_not_done_again_by_a_message() -> None:
    client = parts(config()).client("site-0")
    weights = {name: w + 1 for name, w in client.learner.half.weights.items()}
    client.take(weights, Moment(0, 0, 1), 3)
    assert client.state()["done"].tolist() == [0, 0, 2, -1, -1]
    learn(client, 3, torch.ones(BATCH, WIDTH).double(), more=False)
    assert all(torch.equal(client.learner.half.weights[name], w) for name, w in weights.items())


def test_rows_are_embedded_in_the_order_of_the_seed_and_without_one_as_they_lie() -> None:
    client = parts(config()).client("site-0")
    x, moment = client.site.train(0).x, Moment(0, 0, 1)
    every, order = client.learner.half.embed(x), Batches(len(x), len(x), 5).at(0, x.device)
    plain = client.embed(Embed("train", 0, 0, 2, 3), moment).embedding
    drawn = client.embed(Embed("train", 0, 5, 2, 3), moment).embedding
    torch.testing.assert_close(plain, every[2:5])
    torch.testing.assert_close(drawn, every[order[2:5]])


def test_a_secret_server_draws_what_no_client_can_draw() -> None:
    def keys(**how: Any) -> list[int]:
        made, moment = parts(config(**how)), Moment(1, 0, 2)
        return [made.server().head.draws("step", moment).key for _ in range(2)]

    one, other = keys()
    assert one == other == parts(config()).site(SERVER).stream("step", Moment(1, 0, 2)).key
    one, other = keys(secret=True)
    assert one != other


def test_a_server_before_its_first_stage_shows_no_prototype() -> None:
    snapshots = parts(config()).server().snapshot(Moment(0, 0, 1))
    assert [(snapshot.name, snapshot.rows, snapshot.values) for snapshot in snapshots] == [
        ("prototypes", (), ()),
        ("embeddings", (), ()),
    ]


def test_a_head_is_widened_to_the_highest_class_and_a_restored_server_has_it() -> None:
    made = parts(config(declared=3, undeclared="widen"))
    server = made.server()
    before = server.head.weights["weight1"].clone()
    assert server.head.classes == len(before) == 3
    server.head.begin(Moment(1, 0, 2))
    assert server.head.classes == len(server.head.weights["bias1"]) == 4
    torch.testing.assert_close(server.head.weights["weight1"][:3], before)
    other = made.server()
    other.restore(server.state())
    assert other.head.classes == 4
    assert torch.equal(other.head.weights["weight1"], server.head.weights["weight1"])
    assert other.head.seen.nonzero().flatten().tolist() == [2, 3]


def test_the_oracle_predicts_no_new_rows_and_other_tests_do() -> None:
    rows = dict.fromkeys(("site-0", "site-1"), torch.ones(2, WIDTH).double())
    oracle = "atoll.reproduce.faults.vleto:label_oracle"
    honest: list[dict[str, Any]] = [COLUMNS, {}, {**COLUMNS, "protocol": "P2"}]
    with pytest.raises(UserError, match="label_oracle reads labels"):
        parts(config(**COLUMNS, replace=oracle)).server().predict({}, rows)
    for other in honest[1:]:
        with pytest.raises(UserError, match="label_oracle is for columns by stage"):
            parts(config(**other, replace=oracle)).server()
    for how in honest:
        server = parts(config(**how)).server()
        one = rows["site-0"]
        joint = one if how is COLUMNS else 2 * one  # the mean of equals, or their sum
        torch.testing.assert_close(
            server.predict(server.final_model({}, "", 0), rows),
            server.head.network(server.head.weights, joint),
        )


def test_a_class_with_a_single_row_is_there() -> None:
    server = parts(config()).server()
    server.head.site = SimpleNamespace(
        train=lambda stage: SimpleNamespace(y=torch.tensor([3, 5, 5]))
    )
    server.known[3] = server.known[4] = True
    assert server.head.class_counts(Moment(0, 0, 1)).tolist() == [0, 0, 0, 1, 0, 2, 0, 0, 0, 0]
    assert server._old(Moment(1, 0, 1)).tolist() == [4]


def test_the_first_message_of_a_round_brings_no_gradient() -> None:
    made, heard = parts(config()), list[Learn]()
    engine, moment = LocalEngine(made), Moment(0, 0, 1)
    clients = Clients(made.scenario.clients, engine, moment)
    asked = clients.ask

    def ask(action: Any, requests: Any, **how: Any) -> Any:
        heard.extend(r for r in requests.values() if isinstance(r, Learn))
        return asked(action, requests, **how)

    clients.ask = ask  # type: ignore[method-assign, assignment]
    made.server().round(clients, moment)
    assert heard[0].gradient.shape == (0, WIDTH)
    assert [r.step for r in heard[::2]] == list(range(len(heard) // 2))
    assert [r.more for r in heard[::2]] == [True] * (len(heard) // 2 - 1) + [False]


def test_a_snapshot_shows_each_embedding_of_the_last_test_beside_its_class() -> None:
    made = parts(config())
    server, engine, moment = made.server(), LocalEngine(made), Moment(0, 1, 2)
    clients = Clients(made.scenario.clients, engine, moment, (0,))
    for _ in range(2):  # the second replaces the first
        server.evaluate(clients, moment)
    shown = next(snapshot for snapshot in server.snapshot(moment) if snapshot.name == "embeddings")
    y = server.site.test(0).y[:120]
    assert list(shown.rows) == [str(server.site.classes[kind]) for kind in y.tolist()]
    rows = sum(engine._client(id).learner.half.embed(made.site(id).test(0).x) for id in clients.ids)
    torch.testing.assert_close(torch.tensor(shown.values), rows[:120].float(), rtol=1e-3, atol=1e-3)


def test_a_mask_of_weights_outlives_a_rebuilt_client_with_its_stage() -> None:
    made = parts(config())
    one, other = made.client("site-0"), made.client("site-0")
    one._mask = (1, {name: w > 0 for name, w in one.learner.half.weights.items()})
    other.restore(one.state())
    assert other._mask[0] == 1
    assert all(torch.equal(other._mask[1][n], w > 0) for n, w in one.learner.half.weights.items())
