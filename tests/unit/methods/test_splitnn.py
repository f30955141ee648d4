"""Split learning: equal to a network that was never cut, one exchange a batch, nothing twice."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.errors import BadMessageError, ClientFailedError, UserError
from atoll.core.federation import SERVER, Clients, Moment
from atoll.core.messages import Tensors
from atoll.core.record import Message, Round, Score, read_events
from atoll.engines.local import LocalEngine, local_engine
from atoll.families.vertical import Learn
from atoll.learning.split import Batches
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.parts import Parts, parts

SMALL: dict[str, Any] = {
    "name": "splitnn",
    "rounds": 2,
    "data": {"name": "digits"},
    "scenario": {"split": "parties", "clients": 4, "cut": "quadrants", "train": 0.2},
    "method": {"name": "splitnn", "rate": 0.1, "batch": 32, "width": 12},
    "engine": {"mode": "loop"},
}
CLASSES = {"scenario.mode": "classes", "scenario.window": 4, "scenario.stages": 4}
STRIPS = {"scenario.mode": "columns", "scenario.cut": "strips"}


def config(**changes: Any) -> RunConfig:
    return resolve(change(SMALL, changes), "test")


def events(folder: Path, **changes: Any) -> list[Any]:
    execute(config(**changes), folder, local_engine)
    return list(read_events(folder))


def accuracies(found: list[Any], variant: str = "") -> dict[tuple[int, int], float]:
    """By task and stage."""
    scores = [e for e in found if isinstance(e, Score) and e.variant == variant]
    return {(e.task, e.stage): e.accuracy for e in scores}


def trained(made: Parts, rounds: int = 2) -> tuple[Any, dict[str, Any]]:
    """The server and the clients after some rounds of the first stage."""
    server, engine = made.server(), LocalEngine(made)
    for number in range(rounds):
        moment = Moment(0, number, rounds)
        server.round(Clients(made.scenario.clients, engine, moment), moment)
    return server, {id: engine._client(id) for id in made.scenario.clients}


def centralised(made: Parts, rounds: int, agg: str) -> tuple[Tensors, dict[str, Tensors]]:
    """One network that reads all columns, trained on the same batches by autograd alone."""
    server = made.server()
    halves = {id: made.client(id).learner.half for id in made.scenario.clients}
    labels, options = server.site.train(0).y, made.config.options()
    top = {n: w.clone().requires_grad_() for n, w in server.head.weights.items()}
    below = {
        id: {n: w.clone().requires_grad_() for n, w in half.weights.items()}
        for id, half in halves.items()
    }
    everything = [*top.values(), *(w for weights in below.values() for w in weights.values())]
    for number in range(rounds):
        moment = Moment(0, number, rounds)
        batches = Batches(len(labels), options.batch, server.site.stream("order", moment).key)
        for step in range(len(batches) * options.epochs):
            rows = batches.at(step, labels.device)
            parts_ = [
                half.function(below[id], made.site(id).train(0).x[rows])
                for id, half in halves.items()
            ]
            joint = torch.cat(parts_, 1) if agg == "concat" else sum(parts_)
            if agg == "mean":
                joint = joint / len(parts_)
            loss = F.cross_entropy(server.head.network(top, joint), labels[rows])
            for weight, gradient in zip(
                everything, torch.autograd.grad(loss, everything), strict=True
            ):
                weight.data -= options.rate * gradient
    return top, below


@pytest.mark.parametrize("agg", ["sum", "mean", "concat"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6)])
def test_a_split_network_is_the_network_that_was_never_cut(
    agg: str, dtype: str, tolerance: float
) -> None:
    made = parts(config(agg=agg, dtype=dtype, epochs=2))
    server, clients = trained(made)
    top, below = centralised(made, 2, agg)
    for name, weight in top.items():
        assert (server.head.weights[name] - weight).abs().max() < tolerance
    for id, weights in below.items():
        for name, weight in weights.items():
            assert (clients[id].learner.half.weights[name] - weight).abs().max() < tolerance
    first = made.client("site-0").learner.half.weights
    assert any(not torch.equal(first[n], clients["site-0"].learner.half.weights[n]) for n in first)


def test_a_batch_costs_one_exchange_and_a_round_one_more(tmp_path: Path) -> None:
    found = events(tmp_path, epochs=2)
    made = parts(config())
    steps = 2 * -(-len(made.site(SERVER).train(0)) // 32)
    for id in made.scenario.clients:
        asked = [e for e in found if isinstance(e, Message) and e.receiver == id]
        learn = sum(e.count for e in asked if e.action == "learn" and e.round == 0)
        assert learn == steps + 1


def test_embeddings_and_gradients_have_the_bytes_of_the_formula(tmp_path: Path) -> None:
    """4 * d * rows * epochs each way in a round of training."""
    found = events(tmp_path, epochs=3)
    rows = len(parts(config()).site(SERVER).train(0))
    for sender, receiver in (("site-1", SERVER), (SERVER, "site-1")):
        moved = [e for e in found if isinstance(e, Message) and e.action == "learn"]
        payload = [e.payload for e in moved if (e.sender, e.receiver) == (sender, receiver)]
        assert sum(payload) == 2 * 4 * 12 * rows * 3  # two rounds


@dataclasses.dataclass
class Repeating:
    """An engine that brings every message twice, as after a reply that was lost."""

    inner: LocalEngine

    def carry(self, action: str, moment: Moment, packets: Any) -> Any:
        first = self.inner.carry(action, moment, packets)
        assert self.inner.carry(action, moment, packets) == first
        return first


@pytest.mark.parametrize("replay", ["none", "pass"])
def test_a_message_that_comes_twice_is_applied_once(replay: str) -> None:
    made = parts(config(replay=replay, rate=0.01))
    once, _ = trained(made)
    server, engine = made.server(), Repeating(LocalEngine(made))
    for number in range(2):
        moment = Moment(0, number, 2)
        server.round(Clients(made.scenario.clients, engine, moment), moment)
    assert all(torch.equal(once.head.weights[n], server.head.weights[n]) for n in once.head.weights)


@dataclasses.dataclass
class Failing:
    """An engine in which one client stops answering at some exchange."""

    inner: LocalEngine
    left: int

    def carry(self, action: str, moment: Moment, packets: Any) -> Any:
        self.left -= 1
        answers = dict(self.inner.carry(action, moment, packets))
        if self.left == 0:
            del answers["site-2"]
        return answers


def test_a_client_that_stops_in_the_middle_of_a_batch_is_named() -> None:
    made = parts(config())
    moment = Moment(0, 0, 1)
    clients = Clients(made.scenario.clients, Failing(LocalEngine(made), 4), moment)
    with pytest.raises(ClientFailedError, match="site-2"):
        made.server().round(clients, moment)


def test_fine_tuning_forgets_classes_that_are_gone(tmp_path: Path) -> None:
    """Invariant 17, on digits: below 5 % on task 0 once none of its classes is there."""
    found = events(tmp_path, **CLASSES, rounds=10, rate=0.1, batch=16)
    scores = accuracies(found)
    assert scores[0, 0] > 0.9
    assert scores[0, 3] < 0.05
    assert scores[3, 3] > 0.85


def test_standalone_begins_anew_and_is_tested_on_its_own_task(tmp_path: Path) -> None:
    found = events(tmp_path, **CLASSES, fresh=True)
    assert set(accuracies(found)) == {(stage, stage) for stage in range(4)}
    made = parts(config(**CLASSES, fresh=True))
    one, two = made.client("site-0"), made.client("site-0")
    for stage, client in ((0, one), (2, two)):
        request = Learn(7, 0, True, torch.zeros(0, 12))
        client.learn(request, Moment(stage, 0, 2))
    assert not torch.equal(one.learner.half.weights["weight"], two.learner.half.weights["weight"])


def learners(found: list[Any], stage: int) -> set[str]:
    moved = [e for e in found if isinstance(e, Message) and e.action == "learn"]
    return {e.sender for e in moved if e.stage == stage and e.sender != SERVER}


def test_with_columns_by_stage_the_new_client_trains_alone_or_with_all_before(
    tmp_path: Path,
) -> None:
    alone = events(tmp_path / "a", **STRIPS, rounds=1)
    together = events(tmp_path / "b", **STRIPS, rounds=1, protocol="P2")
    assert [learners(alone, stage) for stage in (0, 2)] == [{"site-0"}, {"site-2"}]
    assert learners(together, 2) == {"site-0", "site-1", "site-2"}
    assert set(accuracies(alone)) == {(0, stage) for stage in range(4)}


@pytest.mark.parametrize("agg", ["mean", "concat"])
def test_columns_by_stage_can_be_joined_in_every_way(agg: str, tmp_path: Path) -> None:
    assert len(accuracies(events(tmp_path, **STRIPS, rounds=1, agg=agg))) == 4


def test_a_class_that_was_not_declared_is_refused_or_widens_the_head(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="class '5' of stage 1 is not among the 4 declared"):
        execute(config(**CLASSES, declared=4), tmp_path / "a", local_engine)
    scores = accuracies(events(tmp_path / "b", **CLASSES, declared=4, undeclared="widen", rounds=8))
    assert scores[3, 3] > 0.7


@pytest.mark.parametrize(
    ("replay", "rate"), [("pass", 0.003), ("fedspace", 0.03), ("fedprok", 0.1)]
)
def test_every_rehearsal_keeps_more_than_none(replay: str, rate: float, tmp_path: Path) -> None:
    """PASS and FedSpace divide logits by 0.1, so their steps are smaller; none has its best."""
    how = {**CLASSES, "rounds": 6, "batch": 16, "width": 32}
    kept = accuracies(events(tmp_path / "a", **how, replay=replay, rate=rate), "union")
    lost = accuracies(events(tmp_path / "b", **how, rate=0.1), "union")
    assert kept[3, 3] > lost[3, 3] + 0.1


@pytest.mark.parametrize("stages", [[[0, 1], [2]], [[2], [0, 1]]], ids=["last", "first"])
@pytest.mark.parametrize("replay", ["none", "pass", "fedspace", "fedprok"])
def test_a_stage_with_one_class_is_learned(
    replay: str, stages: list[list[int]], tmp_path: Path
) -> None:
    """First or last, with every rehearsal: no term becomes a NaN, and without one it is right."""
    how = {"scenario.mode": "classes", "scenario.stage_classes": stages, "rounds": 6}
    rate = 0.1 if replay in ("none", "fedprok") else 0.01
    found = events(tmp_path, **how, replay=replay, rate=rate, batch=16)
    stage = stages.index([2])
    losses = [e.notes["loss"] for e in found if isinstance(e, Round) and e.stage == stage]
    masked = replay == "fedspace" and stage == 0  # one class is allowed: nothing is left to learn
    assert losses[-1] == 0 if masked else losses[-1] < losses[0]
    if replay == "none":
        assert accuracies(found)[stage, stage] == 1


def test_pass_turns_images_and_doubles_the_outputs_but_not_those_of_tables() -> None:
    made = parts(config(replay="pass"))
    assert len(made.server().head.weights["bias1"]) == 20
    client = made.client("site-0")
    reply = client.learn(Learn(7, 0, True, torch.zeros(0, 12)), Moment(0, 0, 2))
    assert reply.embedding.shape == (64, 12)
    table = {"data": "digits-table", "scenario.cut": "contiguous"}
    assert len(parts(config(replay="pass", **table)).server().head.weights["bias1"]) == 10


def test_a_loss_that_is_no_number_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no longer finite.*smaller rate"):
        execute(config(rate=1e6, packing=False), tmp_path / "trusted", local_engine)
    # where sites may lie, nobody can tell a lie from training that diverges
    with pytest.raises(BadMessageError, match=r"site-0 refused: values as large as.*smaller rate"):
        execute(config(rate=1e6), tmp_path / "checked", local_engine)


def test_classes_that_no_stage_has_had_are_not_guessed_with_the_mask(tmp_path: Path) -> None:
    made = parts(config(**CLASSES, seen_mask=True))
    server, engine = made.server(), LocalEngine(made)
    moment = Moment(0, 0, 1)
    clients = Clients(made.scenario.clients, engine, moment)
    server.round(clients, moment)
    parts_of_rows = server.head.embedded(clients, made.scenario.clients, "test", 0)
    logits = server.head.logits(server.head.joined(parts_of_rows))
    assert torch.isneginf(logits[:, 4:]).all()
    assert torch.isfinite(logits[:, :4]).all()


def columns_of(made: Parts, id: str) -> Tensor:
    columns: Tensor = made.site(id).train(0).x
    return columns


def test_no_client_has_the_columns_of_another() -> None:
    made = parts(config())
    pixels = [set(made.scenario.holdings[id][0].own.tolist()) for id in made.scenario.clients]
    assert sum(map(len, pixels)) == len(set.union(*pixels)) == 64
    assert columns_of(made, "site-0").shape[1:] == (1, 4, 4)
