"""FCCL and its yardsticks: invariants 6 to 15 of the specification, traffic, bad input."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.core.errors import BadMessageError, ClientFailedError, UserError
from atoll.core.federation import Clients, Moment, answer
from atoll.core.messages import Empty, Packet, Tensors, Weights, pack, unpack
from atoll.core.record import Message, Round, Score, read_events
from atoll.core.rows import Rows
from atoll.engines.local import local_engine
from atoll.families.distillation import Align, Aligned, Exchange, Join, Plan
from atoll.learning.augment import varied
from atoll.learning.distill import correlation, divergence
from atoll.methods import fccl, fedmatch, fedmd
from atoll.metrics import scores as metrics
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.parts import Parts, parts

CLASSES, BATCH, ROWS = 4, 64, 200  # three public batches, the fourth is not full and dropped
IMAGES = {"name": "synthetic-images", "rows": 200}
FIRST = Moment(0, 0, 2)


def config(name: str = "fccl", **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "name": name,
        "rounds": 2,
        "data": IMAGES,
        "public": {"name": "patterns", "rows": ROWS},
        "models": ["cnn", "cnn-deep"],
        "method": {"name": name},
        "engine": {"mode": "loop"},
        "pretrain_epochs": 2,
        "epochs": 2,
        "batch": 32,
    }
    plain = {k: v for k, v in values.items() if k not in ("pretrain_epochs", "epochs", "batch")}
    steps = {f"method.{k}": values[k] for k in ("pretrain_epochs", "epochs", "batch")}
    if name != "fml":
        steps["method.public_batch"] = BATCH
    return resolve(change(plain, {**steps, **changes}), "test")


def aligned(client: Any, request: Align) -> Aligned:
    """A client's answer in the first round."""
    return unpack(answer(client, "align", FIRST, pack(request)), Aligned, client.site.id)


def hashed(weights: Tensors) -> str:
    digest = hashlib.sha256()
    for key in sorted(weights):
        digest.update(key.encode() + weights[key].numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Watched:
    """A transport that keeps every packet; some answers may be spoiled on the way."""

    parts: Parts
    spoil: dict[tuple[str, str], str] = field(default_factory=dict)  # (client, action) -> how
    packets: list[tuple[str, str, str, Packet]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clients = {id: self.parts.client(id) for id in self.parts.scenario.clients}

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        answers = {}
        for id, packet in packets.items():
            how = self.spoil.get((id, action), "")
            if how == "fails":
                raise ClientFailedError(id, action, "its machine is gone")
            if how == "nan" and action == "align":
                weights = self.clients[id].learner.weights
                self.clients[id].learner.last = {
                    n: w * float("nan") if w.is_floating_point() else w for n, w in weights.items()
                }
            answers[id] = answer(self.clients[id], action, moment, packet)
            self.packets += [("server", id, action, packet), (id, "server", action, answers[id])]
        return answers


def rounds(made: Parts, transport: Watched, count: int = 2) -> list[Mapping[str, float]]:
    server = made.server()
    found: list[Mapping[str, float]] = []
    for number in range(count):
        moment = Moment(0, number, count)
        clients = Clients(made.scenario.clients, transport, moment, (0, 1))
        found.append(dict(server.round(clients, moment)))
    return found


@cache
def two_rounds() -> tuple[Watched, list[Mapping[str, float]]]:
    made = parts(config())
    watched = Watched(made)
    return watched, rounds(made, watched)


def weights_after(name: str = "fccl", **changes: Any) -> dict[str, Tensors]:
    made = parts(config(name, **changes))
    watched = Watched(made)
    rounds(made, watched)
    return {id: dict(client.learner.weights) for id, client in watched.clients.items()}


def same(one: dict[str, Tensors], other: dict[str, Tensors]) -> bool:
    return {id: hashed(w) for id, w in one.items()} == {id: hashed(w) for id, w in other.items()}


def test_only_public_logits_and_keys_cross() -> None:
    """Invariant 10: tensors of (batch, classes) in single precision, and nothing with own rows."""
    watched, _ = two_rounds()
    made = watched.parts
    shapes = {tensor[1:] for *_, packet in watched.packets for tensor in packet.tensors}
    assert shapes == {("float32", (BATCH, CLASSES)), ("float32", (0,))}
    assert {action for *_, action, _ in watched.packets} == {"join", "prepare", "align", "fit"}
    private = [made.site(id).train(0) for id in made.scenario.clients]
    blocks = b"".join(packet.block + packet.header for *_, packet in watched.packets)
    for rows in private:
        assert not any(row.numpy().tobytes() in blocks for row in rows.x)
        assert rows.y.numpy().tobytes() not in blocks


def test_bytes_are_those_of_the_formula() -> None:
    """4 * batch * classes * batches * epochs each way, for each client and round."""
    watched, _ = two_rounds()
    expected = 2 * 4 * BATCH * CLASSES * (ROWS // BATCH)
    for id in watched.clients:
        for end in (0, 1):
            payload = sum(p[3].payload for p in watched.packets if p[end] == id)
            assert payload == expected


def test_a_step_is_one_exchange() -> None:
    watched, _ = two_rounds()
    asked = [p for p in watched.packets if p[0] == "server" and p[2] == "align"]
    assert len(asked) == 2 * 2 * (ROWS // BATCH + 1)  # rounds, clients, batches and the last word


def test_the_first_teacher_never_changes_and_the_second_is_the_last_rounds_model() -> None:
    """Invariant 9, buffers of batch norm included."""
    made = parts(config())
    watched, server = Watched(made), made.server()
    solo: dict[str, str] = {}
    last: dict[str, str] = {}
    for number in range(3):
        moment = Moment(0, number, 3)
        server.round(Clients(made.scenario.clients, watched, moment, (0, 1)), moment)
        for id, client in watched.clients.items():
            assert hashed(client.learner.solo) == solo.setdefault(id, hashed(client.learner.solo))
            assert hashed(client.learner.last) == hashed(client.learner.weights)
            assert hashed(client.learner.last) not in (solo[id], last.get(id))
            assert any("running_mean" in name for name in client.learner.solo)
            last[id] = hashed(client.learner.last)


def test_teachers_that_answer_leave_no_trace() -> None:
    client = parts(config()).client("site-0")
    before = hashed(client.learner.solo)
    rows: Rows = client.site.train(0)
    first, second = client._taught(rows).own, client._taught(rows).own
    assert torch.equal(first, second)
    assert hashed(client.learner.solo) == before


def test_in_the_first_round_both_teachers_say_the_same() -> None:
    """Invariant 7; and a student in testing that has not moved yet is not pulled at all."""
    made = parts(config())
    watched = Watched(made)
    clients = Clients(made.scenario.clients, watched, FIRST, (0, 1))
    server = made.server()
    Exchange(server.options, server.site, clients, fccl.Client).begin(fccl.plan(server.options))
    client = watched.clients["site-0"]
    rows = client._taught(client.site.train(0))
    inter, intra = rows.own.split(CLASSES, -1)
    assert torch.equal(inter, intra)
    z = client.learner.logits(client.learner.weights, rows.x)
    assert float(divergence(inter, z)) == 0.0
    trained = client.learner.training(dict(client.learner.weights), rows.x)
    assert float(divergence(inter, trained)) > 0  # batch statistics: expected, not a fault


def test_without_the_continual_part_it_is_plain_training_bit_for_bit() -> None:
    """Invariant 8: lambda_loc = 0, whatever the teachers' options say."""
    off = weights_after(lambda_loc=0.0)
    assert same(off, weights_after(lambda_loc=0.0, teachers="inter", temperature=3.0))
    assert not same(off, weights_after())


def test_without_both_parts_it_is_training_alone_and_so_is_every_other_method() -> None:
    """Invariants 8 and 14."""
    alone = weights_after(lambda_loc=0.0, collaborate=False)
    assert same(alone, weights_after("fedmd", loss="none"))
    client = parts(config()).client("site-0")
    for number in range(3):
        moment = Moment(0, max(0, number - 1), 2)
        action, request = ("prepare", Empty()) if number == 0 else ("fit", Weights({}))
        client.options = replace(client.options, lambda_loc=0.0)
        answer(client, action, moment, pack(request))
    assert hashed(client.learner.weights) == hashed(alone["site-0"])


@pytest.mark.parametrize(
    "changes",
    [
        {"teachers": "inter"},
        {"teachers": "intra"},
        {"off_diagonal": 0},
        {"own_target": "progressive"},
        {"public_optimiser": "persistent"},
        {"rate_decay": "linear"},
        {"weight_decay": 0.01},
        {"augment": False},
        {"temperature": 3.0},
        {"lambda_col": 0.5},
        {"collaborate": False},
        {"exchange": "round"},
        {"epochs_each": [1, 3]},
        {"public_epochs": 2},
    ],
    ids=str,
)
def test_every_option_changes_the_models(changes: dict[str, Any]) -> None:
    watched, _ = two_rounds()
    usual = {id: dict(client.learner.weights) for id, client in watched.clients.items()}
    assert not same(usual, weights_after(**changes))


def test_one_exchange_a_round_carries_all_logits_once() -> None:
    made = parts(config(exchange="round"))
    watched = Watched(made)
    rounds(made, watched, 1)
    shapes = [t[2] for p in watched.packets if p[2] == "align" for t in p[3].tensors]
    assert sorted(set(shapes)) == [(0,), (ROWS, CLASSES)]
    up = sum(p[3].payload for p in watched.packets if p[0] == "site-0")
    assert up == 4 * ROWS * CLASSES


def test_all_clients_see_the_same_public_images_and_others_in_the_next_step() -> None:
    made = parts(config())
    plan = Plan(BATCH, 1, varied)
    public = [made.site(id).public() for id in made.scenario.clients]
    seen = [plan.images(p, 5, 0) for p in public]
    assert torch.equal(*seen)
    assert not torch.equal(seen[0], plan.images(public[0], 5, 1))
    assert not torch.equal(seen[0], plan.images(public[0], 6, 0))
    plain = Plan(BATCH, 1).images(public[0], 5, 0)
    assert not torch.equal(seen[0], plain)


def test_a_gradient_does_not_depend_on_who_moved_first() -> None:
    """Invariant 6: answers are taken before any of the updates that follow from them."""
    made = parts(config())
    found = []
    for order in (1, -1):
        transport = Watched(made)
        clients = Clients(made.scenario.clients[::order], transport, FIRST, (0, 1))
        made.server().round(clients, FIRST)
        found.append({id: dict(c.learner.weights) for id, c in transport.clients.items()})
    assert same(*found)


def test_equal_clients_stay_equal_and_lose_nothing() -> None:
    """Invariant 13: one network, one data set, one start: M is Z's own correlation."""
    made = parts(config(models=["cnn", "cnn"]))
    one, other = (made.client(id) for id in made.scenario.clients)
    key = made.server().site.stream("public", FIRST).key
    z, same_z = (aligned(c, Align(key, 0, 2, torch.zeros(0))).logits for c in (one, other))
    assert torch.equal(z, same_z)
    target = torch.stack([z, same_z]).mean(0)
    torch.testing.assert_close(
        correlation(z, target).diagonal(), torch.ones(CLASSES), atol=1e-5, rtol=0
    )
    for c in (one, other):
        aligned(c, Align(key, 1, 2, target))
    assert hashed(one.learner.weights) == hashed(other.learner.weights)


@pytest.mark.parametrize("loss", ["l1", "mse", "kl"])
def test_equal_clients_have_no_distance_to_their_mean(loss: str) -> None:
    made = parts(config("fedmd", models=["cnn", "cnn"], **{"method.loss": loss}))
    client = made.client("site-0")
    z = aligned(client, Align(5, 0, 2, torch.zeros(0))).logits
    assert aligned(client, Align(5, 1, 2, z)).loss == pytest.approx(0.0, abs=1e-6)


def test_the_homogeneous_mode_averages_weights_and_buffers_before_training() -> None:
    made = parts(config(models=[], average=True, **{"model.name": "cnn"}))
    watched = Watched(made)
    rounds(made, watched, 1)
    shared = [unpack(p[3], Weights, "x") for p in watched.packets if p[0] != "server"
              and p[2] == "share"]  # fmt: skip
    sent = [unpack(p[3], Weights, "x") for p in watched.packets if p[0] == "server"
            and p[2] == "fit"]  # fmt: skip
    assert len(shared) == len(sent) == 2
    for name, tensor in sent[0].weights.items():
        both = torch.stack([s.weights[name].double() for s in shared]).mean(0)
        torch.testing.assert_close(tensor, both.to(tensor.dtype))
    assert any("running_var" in name for name in sent[0].weights)


def test_rcfl_weighs_each_class_by_who_is_reliable() -> None:
    trust = {"a": torch.tensor([1.0, 0.25]), "b": torch.tensor([0.5, 0.75])}
    answers = {"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([[0.0, 8.0]])}
    target = fedmd.by_class(trust, answers)
    torch.testing.assert_close(target["a"], torch.tensor([[2.0, 7.0]]))
    made = parts(config("fedmd", **{"method.loss": "rcfl"}))
    watched = Watched(made)
    notes = rounds(made, watched, 1)
    assert notes[0]["aligned"] > 0
    rated = [p[3] for p in watched.packets if p[2] == "rate" and p[0] != "server"]
    assert [packet.tensors[0][2] for packet in rated] == [(CLASSES,)] * 2


def test_helpers_are_the_nearest_and_their_logits_come_down() -> None:
    z = {"a": torch.tensor([[4.0, 0.0]]), "b": torch.tensor([[0.0, 4.0]]),
         "c": torch.tensor([[3.0, 0.0]])}  # fmt: skip
    assert fedmatch.nearest(z, 1) == {"a": ["c"], "b": ["c"], "c": ["a"]}
    assert fedmatch.nearest(z, 2)["b"] == ["c", "a"]
    made = parts(config("fedmatch", data={**IMAGES, "domains": 3}, models=["cnn"] * 3, helpers=2))
    watched = Watched(made)
    server = made.server()
    server.round(Clients(made.scenario.clients, watched, FIRST, (0, 1, 2)), FIRST)
    down = {p[3].tensors[0][2] for p in watched.packets if p[2] == "align" and p[0] == "server"}
    assert down == {(0,), (2, BATCH, CLASSES)}
    again = made.server()
    again.restore(server.state())
    assert again.helpers == server.helpers


def test_fedmatch_counts_only_images_that_a_client_is_sure_of() -> None:
    weak = torch.tensor([[5.0, 0.0, 0.0], [0.1, 0.0, 0.0]])
    strong = torch.tensor([[1.0, 2.0, 0.0], [9.0, 0.0, 0.0]])
    helpers = torch.tensor([[[0.0, 3.0, 0.0], [1.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]] * 2])
    agree = [float(divergence(h[:1], weak[:1])) for h in helpers]
    vote = float(torch.nn.functional.cross_entropy(strong[:1], torch.tensor([1])))
    found = fedmatch.consistency(weak, strong, helpers, 0.75)
    assert float(found) == pytest.approx(sum(agree) / 2 + vote)
    assert float(fedmatch.consistency(weak[1:], strong[1:], helpers[:, 1:], 0.75)) == 0.0


def test_with_disjoint_weights_labels_leave_psi_and_public_images_leave_sigma() -> None:
    options = {"disjoint": True, "lambda_l1": 0.01, "lambda_l2": 0.5}
    made = parts(config("fedmatch", **options))
    client = made.client("site-0")
    learner = client.learner
    before = {n: learner.weights[n].clone() for n in learner.moves}
    z = aligned(client, Align(5, 0, 2, torch.zeros(0))).logits
    aligned(client, Align(5, 1, 2, z[None]))
    for n in learner.moves:  # psi took the whole step, sigma is what theta was
        torch.testing.assert_close(learner.weights[n] - client.psi[n], before[n])
    assert any(psi.abs().max() > 0 for psi in client.psi.values())
    psi = {n: p.clone() for n, p in client.psi.items()}
    answer(client, "fit", FIRST, pack(Weights({})))
    assert all(torch.equal(client.psi[n], psi[n]) for n in psi)
    sigma, theta = {"w": torch.tensor([2.0, 1.0])}, {"w": torch.tensor([3.0, 0.0])}
    assert float(client._penalty(sigma, theta)) == pytest.approx(0.01 * 2 + 0.5 * (1 + 4))
    again = made.client("site-0")
    again.restore(client.state())
    assert hashed(again.psi) == hashed(client.psi)
    assert not same(weights_after("fedmatch", **options), weights_after("fedmatch"))


def test_fml_sends_the_shared_network_and_never_the_own() -> None:
    made = parts(config("fml", **{"model.name": "cnn-plain"}))
    watched = Watched(made)
    rounds(made, watched, 1)
    shared = {f"weights/{n}" for n in made.server().weights}
    for *_, action, packet in watched.packets:
        if action == "fit":
            assert {tensor[0] for tensor in packet.tensors} == shared
    own = set(watched.clients["site-0"].learner.weights)
    assert own != {name.removeprefix("weights/") for name in shared}


# Who fails, and what is refused


def test_a_client_with_nan_logits_is_named_and_left_out_of_the_round() -> None:
    made = parts(config(data={**IMAGES, "domains": 3}, models=["cnn"] * 3, absent=1))
    watched = Watched(made, {("site-1", "align"): "nan"})
    server = made.server()
    notes = server.round(Clients(made.scenario.clients, watched, FIRST, (0, 1, 2)), FIRST)
    assert notes["excluded site-1"] == 1.0
    for id in ("site-0", "site-2"):
        weights = watched.clients[id].learner.weights
        assert all(torch.isfinite(w).all() for w in weights.values())
    asked = [p for p in watched.packets if p[2] == "fit" and p[0] == "server"]
    assert [p[1] for p in asked] == ["site-0", "site-2"]


def test_the_mean_is_taken_over_those_who_are_left() -> None:
    made = parts(config(data={**IMAGES, "domains": 3}, models=["cnn"] * 3, absent=1))
    watched = Watched(made, {("site-1", "align"): "fails"})
    made.server().round(Clients(made.scenario.clients, watched, FIRST, (0, 1, 2)), FIRST)
    said = [unpack(p[3], Aligned, "x").logits for p in watched.packets
            if p[2] == "align" and p[0] != "server"][:2]  # fmt: skip
    asked = [unpack(p[3], Align, "x") for p in watched.packets
             if p[2] == "align" and p[0] == "server"]  # fmt: skip
    second = next(request for request in asked if request.step == 1)
    assert second.count == 2
    torch.testing.assert_close(second.target, torch.stack(said).mean(0))


def test_without_leave_a_bad_client_stops_the_run_and_is_named() -> None:
    made = parts(config())
    watched = Watched(made, {("site-1", "align"): "nan"})
    with pytest.raises(BadMessageError, match=r"site-1.*not finite"):
        made.server().round(Clients(made.scenario.clients, watched, FIRST, (0, 1)), FIRST)
    with pytest.raises(ClientFailedError, match=r"site-0.*machine is gone"):
        rounds(made, Watched(made, {("site-0", "fit"): "fails"}), 1)


def test_more_failures_than_allowed_stop_the_run() -> None:
    made = parts(config(data={**IMAGES, "domains": 3}, models=["cnn"] * 3, absent=1))
    spoil = {("site-0", "align"): "nan", ("site-2", "fit"): "fails"}
    with pytest.raises(ClientFailedError, match="site-2"):
        rounds(made, Watched(made, spoil), 1)


def test_a_client_that_was_left_out_takes_part_again() -> None:
    made = parts(config(data={**IMAGES, "domains": 3}, models=["cnn"] * 3, absent=1))
    watched, server = Watched(made, {("site-1", "fit"): "fails"}), made.server()
    first = server.round(Clients(made.scenario.clients, watched, FIRST, (0, 1, 2)), FIRST)
    watched.spoil.clear()
    second = Moment(0, 1, 2)
    again = server.round(Clients(made.scenario.clients, watched, second, (0, 1, 2)), second)
    assert "excluded site-1" in first
    assert "excluded site-1" not in again


@pytest.mark.parametrize("name", ["fccl", "fedmd", "fedmatch", "fml"])
def test_a_client_that_fails_is_left_out_by_every_method(name: str) -> None:
    """Named in the notes, absent from the mean, and back in the next round."""
    changes: dict[str, Any] = {"data": {**IMAGES, "domains": 3}, "models": ["cnn"] * 3, "absent": 1}
    if name == "fml":
        changes["model.name"] = "cnn-plain"
    made = parts(config(name, **changes))
    watched, server = Watched(made, {("site-1", "fit"): "fails"}), made.server()
    first = server.round(Clients(made.scenario.clients, watched, FIRST, (0, 1, 2)), FIRST)
    assert first["excluded site-1"] == 1.0
    watched.spoil.clear()
    second = Moment(0, 1, 2)
    again = server.round(Clients(made.scenario.clients, watched, second, (0, 1, 2)), second)
    assert "excluded site-1" not in again
    for client in watched.clients.values():
        assert all(torch.isfinite(w).all() for w in client.learner.weights.values())


def test_a_helper_that_fails_is_replaced_by_the_next_nearest() -> None:
    changes: dict[str, Any] = {"data": {**IMAGES, "domains": 3}, "models": ["cnn"] * 3}
    made = parts(config("fedmatch", **changes, helpers=2, absent=1))
    watched, server = Watched(made), made.server()
    server.round(Clients(made.scenario.clients, watched, FIRST, (0, 1, 2)), FIRST)
    assert {len(helpers) for helpers in server.helpers.values()} == {2}
    watched.spoil[("site-1", "align")] = "fails"
    second = Moment(0, 1, 2)
    notes = server.round(Clients(made.scenario.clients, watched, second, (0, 1, 2)), second)
    assert notes["excluded site-1"] == 1.0
    assert server.helpers == {"site-0": ["site-2"], "site-2": ["site-0"]}


def test_constant_logits_poison_nobody() -> None:
    """A network that says the same of every image correlates 0 with all, and nothing is NaN."""
    made = parts(config())
    watched = Watched(made)
    learner = watched.clients["site-0"].learner
    learner.weights = {n: w * 0 if n.startswith("head") else w for n, w in learner.weights.items()}
    learner.last = learner.weights
    key = made.server().site.stream("public", FIRST).key
    client = watched.clients["site-0"]
    z = aligned(client, Align(key, 0, 2, torch.zeros(0))).logits
    assert float(z.std(0).max()) == 0.0
    answered = aligned(client, Align(key, 1, 2, z + torch.randn_like(z)))
    assert answered.loss == pytest.approx(CLASSES + 0.0051 * CLASSES * (CLASSES - 1), abs=1e-4)
    assert all(torch.isfinite(w).all() for w in learner.weights.values())
    assert torch.isfinite(answered.logits).all()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"public": {"name": "patterns", "rows": ROWS + 1}}, "public data are other ones"),
        ({"seed": 1}, "public data are other ones"),
        ({"data": {**IMAGES, "classes": 5}}, "its classes are others"),
    ],
    ids=str,
)
def test_a_client_with_other_public_data_or_classes_is_refused(
    changes: dict[str, Any], told: str
) -> None:
    made, foreign = parts(config()), parts(config(**changes))
    watched = Watched(made)
    watched.clients["site-1"] = foreign.client("site-1")
    with pytest.raises(ClientFailedError, match=f"site-1 failed in join: .*{told}"):
        rounds(made, watched, 1)
    assert not [p for p in watched.packets if p[2] == "align"]


def test_a_client_refuses_public_data_that_are_not_its_own() -> None:
    client = parts(config()).client("site-1")
    mine = client.site.public().fingerprint
    assert client.join(Join(mine, ROWS, []), FIRST).fingerprint == mine
    with pytest.raises(ClientFailedError, match="site-1"):
        client.join(Join(mine[::-1], ROWS, []), FIRST)


def test_logits_of_the_wrong_width_are_refused() -> None:
    made, foreign = parts(config()), parts(config(data={**IMAGES, "classes": 5}))
    watched = Watched(made)
    watched.clients["site-1"].learner = foreign.client("site-1").learner
    with pytest.raises(BadMessageError, match=r"site-1.*logits of shape"):
        rounds(made, watched, 1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"models": ["cnn"]}, "1 models for 2 clients"),
        ({"models": ["cnn", "cnm"]}, "unknown network 'cnm'"),
        ({"epochs_each": [1, 2, 3]}, "epochs_each has 3 numbers for 2 clients"),
        ({"data": "wine", "split": "rows", "models": []}, "public data are images"),
        ({"public": "wine"}, "'wine' has no images"),
        ({"public": {"name": "digits", "rows": 5000}}, "1797 images to draw from, not 5000"),
    ],
    ids=str,
)
def test_mistakes_are_found_before_the_run(changes: dict[str, Any], told: str) -> None:
    def built() -> None:
        made = parts(config(**changes))
        for id in made.scenario.clients:
            made.client(id)

    with pytest.raises(UserError, match=told):
        built()


# Data, streams and scores


def test_private_rows_have_their_sizes_and_are_not_tested_on() -> None:
    """Invariant 15; pretraining and federation read the same rows, those of the one holding."""
    made = parts(config(data={**IMAGES, "rows": 400}, sizes=[30, 20]))
    held = [made.scenario.holdings[id][0].train for id in made.scenario.clients]
    assert [len(np.unique(rows)) for rows in held] == [30, 20]
    tested = np.concatenate(made.scenario.tests["site-0"])
    assert not np.isin(np.concatenate(held), tested).any()


def test_rows_drawn_twice_are_learnt_from_before_the_first_round_alone() -> None:
    """J8: otherwise pretraining and federation read the same rows."""
    images = {**IMAGES, "rows": 400}
    for twice in (False, True):
        made = parts(config(data=images, sizes=[30, 20], drawn_twice=twice))
        for id in made.scenario.clients:
            client = made.client(id)
            alone, fit = (
                next(client.prepare(Empty(), FIRST)),
                next(client.fit(Weights({}), FIRST)),
            )
            assert torch.equal(alone.rows.x, fit.rows.x) != twice
            assert alone.rows.x.shape == fit.rows.x.shape
            assert torch.equal(fit.rows.x, client.site.train(0).x)


def test_inter_accuracy_is_the_mean_of_the_rows_without_their_diagonal(tmp_path: Path) -> None:
    """Invariant 12."""
    execute(
        config(rounds=1, data={**IMAGES, "domains": 3}, models=["cnn"] * 3), tmp_path, local_engine
    )
    events = read_events(tmp_path)
    scores = [e for e in events if isinstance(e, Score) and e.variant == "fccl"]
    matrix = np.zeros((3, 3))
    for score in scores:
        matrix[int(score.client[-1]), score.task] = score.accuracy
    found = metrics.summary(events, "fccl", (0, 0, 0))
    assert found["intra_accuracy"] == pytest.approx(matrix.trace() / 3)
    assert found["inter_accuracy"] == pytest.approx((matrix.sum() - matrix.trace()) / 6)
    assert {e.variant for e in events if isinstance(e, Score)} == {"fccl", "solo"}


def test_top_counts_the_likeliest_few_and_tells_the_likeliest_too(tmp_path: Path) -> None:
    for top in (1, CLASSES):
        execute(config(rounds=1, top=top), tmp_path / str(top), local_engine)
    one, all_ = (read_events(tmp_path / str(top)) for top in (1, CLASSES))
    assert metrics.summary(one, "fccl")["final_accuracy"] < 1
    assert metrics.summary(all_, "fccl")["final_accuracy"] == 1
    plain, beside = (metrics.summary(e, v) for e, v in ((one, "fccl"), (all_, "fccl top-1")))
    assert plain["final_accuracy"] == beside["final_accuracy"]
    assert metrics.variants(all_) == ["fccl", "fccl top-1", "solo", "solo top-1"]


def test_a_record_says_which_public_images_it_had(tmp_path: Path) -> None:
    execute(config(rounds=1), tmp_path, local_engine)
    events = read_events(tmp_path)
    notes = next(e for e in events if isinstance(e, Round)).notes
    assert notes.keys() == {"prepared", "aligned", "loss", "diagonal", "off diagonal"}
    assert {e.kind for e in events if isinstance(e, Message)} >= {"Align", "Aligned"}
    text = (tmp_path / "facts.json").read_text()
    assert parts(config()).public.fingerprint in text
