"""The invariants I1 to I17 of FedSeIT's specification; I13 is held by the tests of splits."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from atoll import data
from atoll.core.errors import BadMessageError, InterruptedRunError, UserError
from atoll.core.federation import Clients, Moment, answer
from atoll.core.messages import Check, Empty, Packet, Tensors, contents, pack, unpack
from atoll.core.record import Message, Score, read_events
from atoll.data.scenario import Holding, Scenario
from atoll.engines.local import local_engine
from atoll.jobs.early_stopping import BEST, RATE, STOPPED, Rule, stepped
from atoll.learning import decomposed
from atoll.learning.centres import nearest_tasks, normalised
from atoll.learning.decomposed import (
    Plan,
    composed,
    dropped,
    logits,
    objective,
    penalty,
    pruned,
    restored,
)
from atoll.learning.image_nets import LeNet
from atoll.learning.sparse import above_share, coded, mean_of_sent, widened
from atoll.learning.task_weights import renumbered, with_base
from atoll.learning.textcnn import KERNELS, Words, document_means, normal
from atoll.learning.weights import without
from atoll.methods.fedseit import CONVS, METHOD, Client, Fit, Foreign, Options, Server
from atoll.reproduce.faults.fedseit import FAULTS, brought_back
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.parts import Parts, parts

ROUNDS = 2
FAULTS_OF = "atoll.reproduce.faults.fedseit"
SMALL: dict[str, Any] = {
    "name": "fedseit",
    "rounds": ROUNDS,
    "data": {"name": "synthetic-text", "rows": 300, "classes": 6, "length": 10},
    "scenario": {"split": "tasks", "clients": 3, "stages": 3, "task_classes": 3},
    "model": {"widths": [6]},
    "method": {"name": "fedseit", "epochs": 1, "batch": 16, "rate": 0.01},
    "engine": {"mode": "loop"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "FedSeIT": {},
    "SIT": {"transfer": "sit", "keep": 2},
    "DLS": {"dls": True},
    "DLS and SIT": {"dls": True, "transfer": "sit", "keep": 2},
    "FedWeIT": {"combine": "sum"},
    "FedWeIT-Dense": {"combine": "sum", "dense": True},
    "Local": {"combine": "none", "average": False},
    "released": {"replace": f"{FAULTS_OF}:released"},
    "released FedWeIT": {"replace": f"{FAULTS_OF}:released", "combine": "sum"},
    "released DLS": {"replace": f"{FAULTS_OF}:released", "dls": True},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def config(**changes: Any) -> RunConfig:
    full = {"method.keep" if key == "keep" else key: value for key, value in changes.items()}
    return resolve(change(SMALL, full), "test")  # an engine has a `keep` too


@dataclasses.dataclass
class Play:
    """A run step by step, whose packets and clients can be looked at."""

    parts: Parts
    rebuild: bool = False
    packets: list[tuple[str, str, str, Packet]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.server: Server = self.parts.server()
        self.clients: dict[str, Client] = {
            id: self.parts.client(id) for id in self.parts.scenario.clients
        }

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        answers = {}
        for id, packet in packets.items():
            if self.rebuild:
                memory = {name: tensor.clone() for name, tensor in self.clients[id].state().items()}
                self.clients[id] = self.parts.client(id)
                self.clients[id].restore(memory)
            answers[id] = answer(self.clients[id], action, moment, packet)
            self.packets += [("server", id, action, packet), (id, "server", action, answers[id])]
        return answers

    def at(self, moment: Moment) -> Clients:
        ids, tasks = self.parts.scenario.clients, self.parts.scenario.tasks_at(moment.stage)
        return Clients(ids, self, moment, tasks)

    def round(self, stage: int, number: int, rounds: int = ROUNDS) -> Mapping[str, float]:
        moment = Moment(stage, number, rounds)
        return self.server.round(self.at(moment), moment)

    def through(self, stages: int) -> "Play":
        for stage in range(stages):
            for number in range(ROUNDS):
                self.round(stage, number)
        return self

    def scores(self, stage: int) -> list[Score]:
        moment = Moment(stage, ROUNDS - 1, ROUNDS)
        return self.server.evaluate(self.at(moment), moment)


def play(stages: int = 0, faults: Any = (), **changes: Any) -> Play:
    """A run up to a stage, with faults of the authors' code beside those that the config names."""
    made = parts(config(**changes))
    if faults:
        vars(made)["method"] = brought_back(METHOD, faults)
    return Play(made).through(stages)


def in_second_task(**changes: Any) -> tuple[Play, Client]:
    """A client after the first round of its second task."""
    one = play(1, **changes)
    one.round(1, 0)
    return one, one.clients["site-0"]


def drawn(client: Client, name: str, count: int) -> list[float]:
    """The first values of a tensor of the client's task."""
    stream = client.rules.stream(client.site, client.task, name, (count,))
    found: list[float] = normal((count,), 1.0, stream).tolist()
    return found


def words_of(client: Client) -> Words:
    assert client.words is not None  # its data are texts
    return client.words


def said(client: Client, weights: Tensors, count: int = 20) -> Tensor:
    rows = client._rows("train", client.task).at(slice(0, count))
    return logits(weights, rows, client._plan())


def gradients(client: Client) -> Tensors:
    """Of cross-entropy alone, by every weight of the current task."""
    weights = {
        name: w.clone().requires_grad_(w.is_floating_point())
        for name, w in client._trained().items()
    }
    rows = client._rows("train", client.task)
    loss = torch.nn.functional.cross_entropy(logits(weights, rows, client._plan()), rows.y)
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return {n: g for n, g in zip(weights, found, strict=True) if g is not None}


# I1


def test_without_foreign_parts_the_local_branch_is_left() -> None:
    client = play(1).clients["site-0"]  # the first task has none
    weights = client._trained()
    for size in KERNELS:
        for name in (f"now/foreign_bias/conv{size}", f"now/bias/align{size}"):
            weights[name] = torch.zeros_like(weights[name])
    rows, width = client._rows("train", 0).at(slice(0, 9)), client.layout.width
    local = dict(weights)
    local["now/dense/merge"] = weights["now/dense/merge"].clone()
    local["now/dense/merge"][:, width:] = 7.0  # what would read the foreign branch
    plan = client._plan()
    torch.testing.assert_close(logits(weights, rows, plan), logits(local, rows, plan))
    local["now/bias/align3"] = local["now/bias/align3"] + 1.0
    assert not torch.equal(logits(weights, rows, plan), logits(local, rows, plan))


def test_fedweit_without_attention_or_without_foreign_parts_is_base_mask_and_adaptive() -> None:
    _, client = in_second_task(combine="sum")
    weights = client._trained()
    plain = {n: w for n, w in weights.items() if not n.startswith("foreign/")}
    dull = {n: torch.zeros_like(w) if "/alpha/" in n else w for n, w in weights.items()}
    empty = {n: torch.zeros_like(w) if n.startswith("foreign/") else w for n, w in weights.items()}
    assert not torch.equal(said(client, weights), said(client, plain))
    assert torch.equal(said(client, dull), said(client, plain))
    assert torch.equal(said(client, empty), said(client, plain))
    theta = composed(plain, "conv3", client._plan())
    wanted = plain["base/conv3"] * torch.sigmoid(plain["now/mask/conv3"])[:, None, None]
    assert torch.equal(theta, wanted + plain["now/adaptive/conv3"])


# I2


@pytest.mark.parametrize("variant", ["FedSeIT", "SIT", "DLS", "FedWeIT"])
def test_a_foreign_part_that_changes_changes_the_output(variant: str) -> None:
    _, client = in_second_task(**VARIANTS[variant])
    before = said(client, client._trained())
    client.weights["foreign/conv4"] = client.weights["foreign/conv4"].clone()
    client.weights["foreign/conv4"][1] *= 3.0
    client._cache.clear()
    assert not torch.equal(said(client, client._trained()), before)


@pytest.mark.parametrize("variant", ["FedSeIT", "SIT", "DLS"])
def test_mask_attention_all_projections_and_the_head_learn_from_the_labels(variant: str) -> None:
    _, client = in_second_task(**VARIANTS[variant])
    found, moves = gradients(client), client._moves()
    wanted = [f"now/{kind}/{layer}" for kind in ("mask", "alpha", "adaptive") for layer in CONVS]
    wanted += ["now/dense/head", "now/bias/head", *(f"base/{layer}" for layer in CONVS)]
    kind = "now/adaptive" if client.options.dls else "now/dense"
    wanted += [f"{kind}/align{size}" for size in KERNELS] + [f"{kind}/merge"]
    for name in wanted:
        assert found[name].any(), name
        assert name in moves, name


def test_one_round_moves_all_that_the_table_says() -> None:
    one = play(2)
    client = one.clients["site-0"]
    client._begin(2)
    before = {name: tensor.clone() for name, tensor in client.weights.items()}
    one.round(2, 0)
    moved = {n for n in before if not torch.equal(before[n], client.weights[n])}
    frozen = {n for n in before if n.startswith(("kept/", "past/mask", "past/target"))}
    assert not moved & frozen
    assert moved == set(before) - frozen


# I3


@every_variant
def test_what_is_frozen_stays_bit_for_bit(variant: str) -> None:
    one = play(2, **VARIANTS[variant])
    client = one.clients["site-1"]
    table = words_of(client).table.clone()
    one.round(2, 0)
    start: tuple[str, ...] = ("kept/", "foreign/", "past/target/")
    start += () if variant.startswith("released") else ("past/mask/",)
    before = {n: w.clone() for n, w in client.weights.items() if n.startswith(start)}
    assert before
    one.round(2, 1)
    for name, tensor in before.items():
        assert torch.equal(client.weights[name], tensor), name
    assert torch.equal(words_of(client).table, table)


# I4, I5


def held(plan: Plan, weights: Tensors) -> Tensor:
    """The lambda2 term alone."""
    quiet = dataclasses.replace(plan, lambda1=0.0, lambda_m=0.0, decay=0.0)
    none = {**weights, "lambda2": torch.zeros_like(weights["lambda2"])}
    return penalty(weights, quiet) - penalty(none, quiet)


def test_past_weights_cost_nothing_at_first_and_something_once_the_base_has_moved() -> None:
    one = play(1)
    client = one.clients["site-0"]
    assert float(held(client._plan(), client._trained())) == 0
    client._begin(1)
    assert float(held(client._plan(), client._trained())) == 0
    base = {name: base + 0.1 for name, base in one.server.base.items()}
    client.weights = with_base(client.weights, client.layout.layers, base)
    assert float(held(client._plan(), client._trained())) > 0


@pytest.mark.parametrize("combine", ["banks", "none"])
def test_the_snapshot_is_taken_before_the_next_base_comes(combine: str) -> None:
    one = play(1, combine=combine)
    client = one.clients["site-0"]
    own = {layer: client.weights[f"base/{layer}"].clone() for layer in CONVS}
    masks = {layer: client.weights[f"now/mask/{layer}"].clone() for layer in CONVS}
    parts_ = {layer: client.weights[f"now/adaptive/{layer}"].clone() for layer in CONVS}
    assert not torch.equal(own["conv3"], one.server.base["conv3"])
    one.round(1, 0)
    for layer in CONVS:
        target = client.weights[f"past/target/{layer}"][0]
        assert torch.equal(target, restored(own[layer], masks[layer], parts_[layer]))


def test_gradients_of_the_term_that_holds_past_weights() -> None:
    one = play(2, lambda2=0.7)
    client = one.clients["site-0"]
    client._begin(2)
    weights = client._trained()
    weights["base/conv3"] = (weights["base/conv3"] + 0.05).requires_grad_()
    past = weights["past/adaptive/conv3"] = weights["past/adaptive/conv3"].clone().requires_grad_()
    term = held(client._plan(), weights)
    by_past, by_base = torch.autograd.grad(term, [past, weights["base/conv3"]])
    gate = torch.sigmoid(weights["past/mask/conv3"])[..., None, None]
    away = weights["base/conv3"] * gate + past - weights["past/target/conv3"]
    assert len(past) == 2
    torch.testing.assert_close(by_past, 0.7 * away)
    torch.testing.assert_close(by_base, (0.7 * away * gate).sum(0))


def test_past_weights_return_to_where_they_were() -> None:
    """lambda1 = 0, large lambda2, past adaptive parts free; the base is held still."""
    one = play(1, lambda1=0.0, lambda2=100.0)
    client = one.clients["site-0"]
    client._begin(1)
    weights = client._trained()
    weights["base/conv3"] = weights["base/conv3"] + 0.1
    past = weights["past/adaptive/conv3"].clone()
    for _ in range(50):
        weights["past/adaptive/conv3"] = past = past.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(held(client._plan(), weights), past)
        past = past - gradient / 200
    now = restored(weights["base/conv3"], weights["past/mask/conv3"], past)
    torch.testing.assert_close(now, weights["past/target/conv3"], atol=1e-6, rtol=1e-5)


def test_old_predictions_do_not_move_where_the_base_does_not() -> None:
    one = play(1, lambda1=0.0, average=False, combine="none")
    client = one.clients["site-0"]
    rows = client._rows("test", 0)
    before = logits(client._weights_of(0), rows, client._plan())
    base = without("base", client.weights)
    client._begin(1)
    for _ in range(3):
        work = client._training(client._rows("train", 1), Moment(1, 0, ROUNDS)).first
        (phase,) = work.phases
        still = tuple(name for name in phase.moves if not name.startswith("base/"))
        done = dataclasses.replace(work, phases=(dataclasses.replace(phase, moves=still),)).run()
        client.weights |= {name: done.weights[name] for name in still}
    assert all(torch.equal(client.weights[f"base/{n}"], base[n]) for n in base)
    torch.testing.assert_close(
        logits(client._weights_of(0), rows, client._plan()), before, atol=1e-6, rtol=0
    )


# I6


def test_pruning_keeps_what_is_larger_than_the_threshold() -> None:
    adaptive = torch.tensor([0.0, 0.001, -0.0011, 0.5, -0.0005])
    assert pruned(adaptive, 0.001).tolist() == pytest.approx([0, 0, -0.0011, 0.5, 0])
    once = pruned(adaptive, 0.001)
    assert torch.equal(pruned(once, 0.001), once)
    counts = [int(pruned(adaptive, t).count_nonzero()) for t in (0.0, 0.0007, 0.002, 1.0)]
    assert counts == [4, 3, 1, 0]


def test_what_is_shared_exceeds_the_threshold_and_falls_with_lambda1() -> None:
    counts = []
    for lambda1 in (0.0001, 0.01):
        one = play(1, lambda1=lambda1)
        for code in one.server.index.adaptive.values():
            assert float(code["values"].abs().min()) > lambda1
        counts.append(sum(len(code["values"]) for code in one.server.index.adaptive.values()))
    assert counts[1] < counts[0]


# I7


def test_a_zero_in_the_mean_base_keeps_the_local_value() -> None:
    client = play(1).clients["site-0"]
    own = client.weights["base/conv3"].clone()
    theirs = {layer: torch.ones_like(client.weights[f"base/{layer}"]) for layer in CONVS}
    theirs["conv3"][0] = 0.0
    client.weights = with_base(client.weights, client.layout.layers, theirs)
    assert torch.equal(client.weights["base/conv3"][0], own[0])
    assert bool((client.weights["base/conv3"][1:] == 1).all())


def test_one_client_alone_has_its_own_base_back() -> None:
    one = play(clients=1)
    one.round(0, 0)
    own = one.clients["site-0"].weights["base/conv3"]
    assert torch.equal(one.server.base["conv3"], own)


def test_clients_of_equal_size_count_alike_by_rows() -> None:
    equal, by_rows = (play(weighting=how) for how in ("equal", "rows"))
    holdings = by_rows.parts.scenario.holdings
    size = min(len(holdings[id][0].train) for id in holdings)
    for one in (equal, by_rows):
        for id, client in one.clients.items():
            rows = client._rows("train", 0) if client.task >= 0 else one.parts.site(id).train(0)
            client.site._kept["train", 0] = rows.at(slice(0, size))
        one.round(0, 0)
    for name in equal.server.base:
        torch.testing.assert_close(equal.server.base[name], by_rows.server.base[name])


# I8, I9


def test_foreign_slots_may_change_places() -> None:
    _, client = in_second_task()
    weights, order = client._trained(), torch.tensor([2, 0, 1])
    before = said(client, weights)
    for size in KERNELS:
        for name in (f"now/alpha/conv{size}", f"now/foreign_bias/conv{size}"):
            weights[name] = weights[name][order]
        blocks = weights[f"now/dense/align{size}"].unflatten(1, (3, -1))
        weights[f"now/dense/align{size}"] = blocks[:, order].flatten(1)
        client.weights[f"foreign/conv{size}"] = client.weights[f"foreign/conv{size}"][order]
    client._cache.clear()
    torch.testing.assert_close(said(client, weights), before)


def test_the_kept_extremes_give_what_the_convolution_gives() -> None:
    _, client = in_second_task()
    weights, plan, rows = client._trained(), client._plan(), client._rows("train", 1)
    vectors = words_of(client).table[rows.x.long()].transpose(1, 2)
    wanted = []
    for size in KERNELS:
        alpha = weights[f"now/alpha/conv{size}"] = torch.tensor([-0.7, 0.0, 1.3])
        kernels = alpha[:, None, None, None] * client.weights[f"foreign/conv{size}"]
        found = [torch.conv1d(vectors, kernel).max(-1).values for kernel in kernels]
        g = torch.stack(found, 1) + weights[f"now/foreign_bias/conv{size}"]
        projected = g.flatten(1) @ weights[f"now/dense/align{size}"].T
        wanted.append(torch.relu(projected + weights[f"now/bias/align{size}"]))
    torch.testing.assert_close(
        decomposed._foreign(weights, rows, plan), torch.cat(wanted, 1), atol=1e-5, rtol=1e-5
    )


# I10, I11


def test_the_nearest_tasks_are_chosen_and_ties_go_to_the_newer_then_the_lower_client() -> None:
    scored = {(0, "b"): 0.5, (1, "b"): 0.5, (1, "a"): 0.5, (0, "a"): 0.9, (0, "c"): -0.1}
    order, found = nearest_tasks(scored, 3)
    assert order == [(0, "a"), (1, "a"), (1, "b")]
    assert found == [0.9, 0.5, 0.5]
    backwards = dict(reversed(scored.items()))
    assert nearest_tasks(backwards, 3)[0] == order
    assert nearest_tasks(scored, 99)[0] == [*order, (0, "b"), (0, "c")]


@pytest.mark.parametrize("representation", ["centres", "mean_unit"])
def test_a_task_is_given_the_tasks_that_are_most_like_it(representation: str) -> None:
    server = Server(
        Options(transfer="sit", keep=2, representation=representation),  # type: ignore[arg-type]
        play().parts.site("server"),
    )
    east, north = torch.tensor([[1.0, 0.1]]), torch.tensor([[0.1, 1.0]])
    server.index.described = {(0, "a"): north, (0, "b"): east, (1, "a"): east, (1, "b"): north}
    server.index.described |= {(2, "a"): torch.tensor([[1.0, 0.0]]), (2, "b"): north}
    server.index.adaptive = {task: {} for task in server.index.described if task[0] < 2}
    chosen, found = server.index.chosen(("a", "b"), "a", 2)
    assert chosen == [(1, "a"), (0, "b")]
    assert server.index.chosen(("a", "b"), "b", 2)[0] == [(1, "b"), (0, "a")]
    assert found[0] > 0.9


def test_no_current_or_future_task_is_chosen_and_as_many_as_there_are() -> None:
    one = play(3, transfer="sit", keep=4)
    given = [
        (receiver, unpack(packet, Foreign, "server"))
        for sender, receiver, action, packet in one.packets
        if action == "receive" and sender == "server"
    ]
    counts = [len({name.split("/")[0] for name in message.adaptive}) for _, message in given]
    assert counts == [3, 3, 3, 4, 4, 4]  # min(K, C * (t - 1))
    for _, message in given:
        assert float(message.scores.sum()) == pytest.approx(1)
    for id in one.clients:
        for stage in (1, 2):
            chosen, _ = one.server.index.chosen(list(one.clients), id, stage)
            assert all(task < stage for task, _ in chosen)


def test_at_the_second_task_selection_takes_what_all_are_given_without_it() -> None:
    one = play(1, transfer="sit", keep=3)
    one.round(1, 0)
    for id in one.clients:
        chosen, _ = one.server.index.chosen(list(one.clients), id, 1)
        assert sorted(chosen) == [(0, other) for other in sorted(one.clients)]


def test_attention_begins_at_the_scores() -> None:
    one = play(1, transfer="sit", keep=4)
    client = one.clients["site-0"]
    part = one.server.index.adaptive[0, "site-0"]
    codes = {f"{slot}/{name}": tensor for slot in (0, 1) for name, tensor in part.items()}
    client.receive(Foreign(codes, torch.tensor([0.75, 0.25])), Moment(1, 0, ROUNDS))
    assert client.weights["now/alpha/conv3"].tolist() == [0.75, 0.25, 0, 0]
    assert not client.weights["foreign/conv3"][2:].any()


def test_scores_that_are_not_above_zero_become_equal_shares() -> None:
    assert normalised([-0.2, 0.0]).tolist() == [0.5, 0.5]
    assert normalised([0.3, -0.2, 0.1]).tolist() == pytest.approx([0.75, 0, 0.25])
    assert normalised([]).tolist() == []


# I12


def ledger(folder: Path, **changes: Any) -> list[Message]:
    execute(config(**changes), folder, local_engine)
    return [event for event in read_events(folder) if isinstance(event, Message)]


@pytest.mark.parametrize("variant", ["FedSeIT", "SIT", "FedWeIT", "FedWeIT-Dense"])
def test_only_what_may_cross_crosses_and_bytes_are_as_specified(
    variant: str, tmp_path: Path
) -> None:
    events = ledger(tmp_path, **VARIANTS[variant])
    count = 6 * 16 * sum(KERNELS)  # filters x dimension x window sizes
    for event in events:
        names = {name.split("/")[-1] for name, _, _ in event.tensors}
        if event.action == "fit":
            assert names == set(CONVS)
            assert event.payload == 4 * count * event.count
        elif event.action in ("share", "receive"):
            assert names <= {"values", "places", "bits", "scores"}
        elif event.action == "describe":
            assert names <= {"centres"}
        else:
            assert not names
    for event in (e for e in events if e.action == "share" and e.sender != "server"):
        nonzero = next(shape[0] for n, _, shape in event.tensors if n.endswith("values"))
        assert event.payload == min(8 * nonzero, count / 8 + 4 * nonzero)


def test_with_dense_layer_sharing_the_projections_cross_and_nothing_else_does(
    tmp_path: Path,
) -> None:
    events = ledger(tmp_path, dls=True)
    for event in (e for e in events if e.action == "fit"):
        names = {name.split("/")[-1] for name, _, _ in event.tensors}
        assert names == {*CONVS, *(f"align{size}" for size in KERNELS), "merge"}


def test_one_vector_stands_for_a_task_where_that_is_asked_for(tmp_path: Path) -> None:
    events = ledger(tmp_path, transfer="sit", representation="mean_unit")
    sent = [e for e in events if e.action == "describe" and e.sender != "server"]
    assert {shape for e in sent for _, _, shape in e.tensors} == {(1, 16)}


def test_the_ranking_by_one_vector_is_that_by_all_centres() -> None:
    chosen = {}
    for how in ("centres", "mean_unit"):
        one = play(3, transfer="sit", keep=4, representation=how)
        chosen[how] = [one.server.index.chosen(list(one.clients), id, 2)[0] for id in one.clients]
    assert chosen["centres"] == chosen["mean_unit"]


def foreign_bytes(**changes: Any) -> dict[int, float]:
    """By task the mean number of bytes of foreign parts that a client is sent."""
    one = play(0, **changes)
    found = {}
    for stage in range(one.parts.scenario.stages):
        before = len(one.packets)
        one.round(stage, 0, 1)
        sent = [
            p.payload for s, _, a, p in one.packets[before:] if a == "receive" and s == "server"
        ]
        found[stage] = sum(sent) / max(1, len(sent))
    return found


def test_what_selection_sends_does_not_grow_with_tasks_or_clients() -> None:
    """Nor does what training reads of it: as many slots as are kept. Without it both grow."""
    small = {"data.rows": 800, "data.length": 6, "model.widths": [3], "batch": 64}
    sit = {**small, "transfer": "sit", "keep": 3, "scenario.stages": 10}
    few = foreign_bytes(**sit, clients=3)
    many = foreign_bytes(**{**sit, "data.rows": 2400}, clients=20)
    assert few[9] == pytest.approx(few[1], rel=0.1)
    assert many[9] == pytest.approx(many[1], rel=0.1)  # task 10 as task 2, with 20 clients
    assert many[9] == pytest.approx(few[9], rel=0.1)
    short = {**small, "scenario.stages": 2}
    every = {clients: foreign_bytes(**short, clients=clients)[1] for clients in (3, 8)}
    assert every[8] == pytest.approx(every[3] * 8 / 3, rel=0.1)
    slots = [play(0, **how, clients=8).clients["site-0"].layout.slots for how in (sit, short)]
    assert slots == [3, 8]


# What may not cross


def private(one: Play) -> dict[str, list[Tensor]]:
    """All that may not cross, as tensors that a packet's tensors can be compared with."""
    found: dict[str, list[Tensor]] = {"text": [], "tokens": [], "labels": [], "weights": []}
    for id, client in one.clients.items():
        for stage in range(one.parts.scenario.stages):
            rows = one.parts.site(id).train(stage)
            found["text"] += list(document_means(words_of(client), rows.x))
            found["tokens"] += [row[row > 0] for row in rows.x]
            found["labels"] += [rows.y, torch.bincount(rows.y)]
        words = ("mask", "bias", "head", "alpha", "dense")
        found["weights"] += [
            w for n, w in client.weights.items() if any(word in n for word in words) and w.dim()
        ]
    return found


def numbers(packet: Packet) -> dict[str, Tensor]:
    return {n: t.double().flatten() for n, t in load(packet.block).items() if t.numel()}


def holds(tensor: Tensor, part: Tensor) -> bool:
    """Whether the numbers of a part stand anywhere in a tensor, in a row."""
    part = part.double().flatten()
    if len(part) < 3 or len(part) > len(tensor):
        return False
    windows = tensor.unfold(0, len(part), 1)
    return bool(((windows - part).abs() < 1e-6).all(-1).any())


def crossing(one: Play) -> list[str]:
    """What crossed and may not have."""
    secret, classes = private(one), one.parts.dataset.classes
    found = []
    for sender, _, action, packet in one.packets:
        found += [f"label name in {action}" for name in classes if name.encode() in packet.header]
        header = json.loads(packet.header)["values"]
        found += [f"list in {action}" for value in header.values() if isinstance(value, list)]
        for name, tensor in numbers(packet).items():
            for kind, items in secret.items():
                if any(holds(tensor, item) for item in items):
                    found.append(f"{kind} in {action}/{name} from {sender}")
    return found


def test_a_probe_of_every_packet_finds_nothing_that_may_not_cross() -> None:
    one = play(2, transfer="sit", clients=2)
    assert {action for _, _, action, _ in one.packets} == {"describe", "receive", "fit", "share"}
    assert crossing(one) == []
    for sender, _, action, packet in one.packets:
        if action == "describe" and sender != "server":
            sent = load(packet.block)["centres"].double()
            client = one.clients[sender]
            for stage in (0, 1):
                x = one.parts.site(sender).train(stage).x
                texts = document_means(words_of(client), x).double()
                assert float(torch.cdist(sent, texts).min()) > 1e-4


def test_the_probe_finds_what_was_planted() -> None:
    one = play(1, transfer="sit", clients=2, least_cluster=1)  # the paper's own choice
    assert any("text in describe" in line for line in crossing(one))
    one = play(1, clients=2)
    client, sender, base = one.clients["site-0"], "site-0", one.server.base
    planted = {**base, "conv3": base["conv3"].clone()}
    planted["conv3"].view(-1)[5:11] = client.weights["now/mask/conv3"]
    one.packets.append((sender, "server", "fit", pack(Fit(planted))))
    assert any("weights in fit" in line for line in crossing(one))


def test_the_number_of_rows_crosses_only_where_the_mean_is_weighted() -> None:
    for weighting, wanted in (("equal", {0}), ("rows", None)):
        one = play(1, weighting=weighting)
        replies = [
            json.loads(packet.header)["values"]["rows"]
            for sender, _, action, packet in one.packets
            if action == "fit" and sender != "server"
        ]
        assert (set(replies) == wanted) if wanted else (0 not in replies)


# I14


def test_every_test_row_is_scored_and_their_order_does_not_matter() -> None:
    one = play(2)
    scores = {(s.client, s.task): s for s in one.scores(1)}
    assert len(scores) == 6
    for (id, task), score in scores.items():
        assert score.rows == len(one.parts.scenario.tests[id][task])
        client = one.clients[id]
        rows = client._rows("test", task)
        client._cache["test", task] = rows.at(torch.arange(len(rows)).flip(0))
        again = client.check(Check(task, {}), Moment(1, 1, ROUNDS))
        assert again.correct == {"own": score.correct}


# I15 and the contract, over several tasks


@pytest.mark.parametrize("variant", ["FedSeIT", "DLS and SIT", "FedWeIT", "released"])
def test_clients_rebuilt_before_every_message_give_the_same(variant: str) -> None:
    made = parts(config(**VARIANTS[variant]))
    kept, rebuilt = Play(made).through(3), Play(made, rebuild=True).through(3)
    assert [p for *_, p in kept.packets] == [p for *_, p in rebuilt.packets]
    assert kept.scores(2) == rebuilt.scores(2)


@pytest.mark.parametrize("variant", ["SIT", "FedWeIT"])
@pytest.mark.parametrize("after", [2, 3])
def test_a_run_that_was_cut_anywhere_ends_as_if_it_had_not_been(
    variant: str, after: int, tmp_path: Path
) -> None:
    made = config(**VARIANTS[variant], checkpoint_seconds=0)
    execute(made, tmp_path / "whole", local_engine)
    calls = iter(range(1, 99))
    with pytest.raises(InterruptedRunError):
        execute(made, tmp_path / "cut", local_engine, stopping=lambda: next(calls) == after)
    execute(made, tmp_path / "cut", local_engine, resume=True)
    one, other = (
        load((tmp_path / part / "checkpoint.safetensors").read_bytes()) for part in ("whole", "cut")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    events = [(tmp_path / part / "events.jsonl").read_bytes() for part in ("whole", "cut")]
    assert events[0] == events[1]


@pytest.mark.parametrize(
    "variant", ["FedSeIT", "DLS and SIT", "FedWeIT-Dense", "Local", "released", "released DLS"]
)
def test_clients_in_a_stack_give_what_they_give_one_by_one(variant: str, tmp_path: Path) -> None:
    """Over three tasks, with rates that fall at different times."""
    how = {**VARIANTS[variant], "dtype": "float64", "patience": 1, "rate": 0.05, "epochs": 2}
    states, scores = {}, {}
    for mode in ("loop", "stacked"):
        execute(config(**{**how, "engine.mode": mode}), tmp_path / mode, local_engine)
        states[mode] = load((tmp_path / mode / "checkpoint.safetensors").read_bytes())
        scores[mode] = [e for e in read_events(tmp_path / mode) if isinstance(e, Score)]
    chosen = json.loads((tmp_path / "stacked" / "engine.json").read_text()).values()
    assert any(c["mode"] == "stacked" and c["members"] == 3 for c in chosen)
    assert states["loop"].keys() == states["stacked"].keys()
    for key, tensor in states["loop"].items():
        torch.testing.assert_close(states["stacked"][key], tensor, rtol=1e-8, atol=1e-8)
    assert scores["loop"] == scores["stacked"]


# I16


def test_the_rate_is_cut_thirteen_times_and_then_the_client_stops() -> None:
    rule = Rule(3, 3.0, 1e-10)
    course = torch.tensor([1e-4, math.inf, 3, 0], dtype=torch.float64)
    course = stepped(course, 1.0, rule)
    cuts, epochs = 0, 0
    while not course[STOPPED]:
        before = float(course[RATE])
        course, epochs = stepped(course, 1.0, rule), epochs + 1
        cuts += float(course[RATE]) != before
    assert (cuts, epochs) == (13, 39)
    assert float(course[RATE]) < 1e-10


def test_a_gain_resets_patience_and_a_round_resets_patience_but_not_the_rate() -> None:
    course = torch.tensor([1e-4, 0.5, 1, 0], dtype=torch.float64)
    rule = Rule(3, 3.0, 1e-10)
    assert stepped(course, 0.4, rule).tolist() == [1e-4, 0.4, 3, 0]
    assert stepped(course, 0.5, rule).tolist() == [1e-4 / 3, 0.5, 3, 0]
    one = play(patience=2, epochs=2)
    one.round(0, 0)
    client = one.clients["site-0"]
    client.course = torch.tensor([1e-5, -1.0, 1, 0], dtype=torch.float64)  # nothing is a gain
    one.round(0, 1)
    assert float(client.course[RATE]) == 1e-5
    one.round(1, 0)
    assert float(client.course[RATE]) == 0.01  # a new task


def test_clients_that_are_done_are_not_asked_and_count_with_their_last_base() -> None:
    one = play(least_rate=0.009, patience=1, rate_cut=2.0, epochs=9, rounds=9)
    client = one.clients["site-0"]
    one.round(0, 0, 9)
    one.server.stopped = {"site-0"}
    own = one.server.bases["site-0"]
    before, count = client.weights["base/conv3"].clone(), len(one.packets)
    one.round(0, 1, 9)
    asked = {receiver for _, receiver, action, _ in one.packets[count:] if action == "fit"}
    assert asked == {"server", "site-1", "site-2"}
    assert torch.equal(client.weights["base/conv3"], before)
    wanted = torch.stack([own["conv3"], *(one.server.bases[f"site-{i}"]["conv3"] for i in (1, 2))])
    torch.testing.assert_close(one.server.base["conv3"], wanted.mean(0))


def test_a_task_ends_when_all_clients_are_done() -> None:
    one = play(least_rate=0.009, patience=1, epochs=30, rate=0.05, rate_cut=1e6)
    notes: Mapping[str, float] = {}
    for number in range(8):
        notes = one.round(0, number, 9)
        if notes["finished"]:
            break
    assert notes["finished"] == 1
    assert set(one.server.index.adaptive) == {(0, id) for id in one.clients}


# I17


def test_as_released_the_foreign_parts_and_the_head_do_nothing() -> None:
    one = play(1, replace=f"{FAULTS_OF}:released")
    client = one.clients["site-0"]
    client._begin(1)
    head = client.weights["now/dense/head"].clone()
    mask = client.weights["now/mask/conv3"].clone()
    aligned = {size: client.weights[f"now/dense/align{size}"].clone() for size in KERNELS}
    one.round(1, 0)
    assert torch.equal(client.weights["now/dense/head"], head)
    assert torch.equal(client.weights["now/mask/conv3"], mask)
    moved = [not torch.equal(client.weights[f"now/dense/align{s}"], aligned[s]) for s in KERNELS]
    assert moved == [True, False, False]
    before = said(client, client._trained())
    client.weights["foreign/conv4"] = client.weights["foreign/conv4"] + 5.0
    client._cache.clear()
    assert torch.equal(said(client, client._trained()), before)


def test_as_released_dense_layer_sharing_is_one_layer_on_all_that_filters_find() -> None:
    """J12: no projections that align; the layer's own foreign parts are live (J4)."""
    one, client = in_second_task(**VARIANTS["released DLS"])
    width, slots = 3 * 6, 3
    assert client.layout.shapes["merge"] == (width, width * (1 + slots))
    assert not [name for name in client.weights if "align" in name]
    assert set(one.server.base) == {*CONVS, "merge"}
    assert client.layout.private == ()
    before = said(client, client._trained())
    client.weights["foreign/merge"] = client.weights["foreign/merge"] + 5.0
    assert not torch.equal(said(client, client._trained()), before)
    found = gradients(client)
    assert all(bool(found[f"now/{kind}/merge"].any()) for kind in ("adaptive", "alpha", "bias"))
    count = next(p.payload for s, r, a, p in one.packets if a == "fit" and s == "server")
    assert count == 4 * (6 * 16 * 12 + width * width * (1 + slots))


def test_as_released_only_a_few_test_rows_count() -> None:
    one = play(1, replace=f"{FAULTS_OF}:released", **{"data.rows": 2000})
    for score in one.scores(0):
        valid = len(one.parts.scenario.holdings[score.client][0].valid)
        tested = len(one.parts.scenario.tests[score.client][0])
        assert score.rows == min(tested, math.ceil(valid / 16) * 16)
    assert any(s.rows < len(one.parts.scenario.tests[s.client][0]) for s in one.scores(0))


# Single faults


STILL = {  # what stays as it was drawn
    "masks": tuple(f"now/mask/{layer}" for layer in CONVS),
    "head": ("now/dense/head", "now/bias/head"),
    "foreign": tuple(f"now/alpha/{layer}" for layer in CONVS),
    "projections": tuple(f"now/{k}/align{size}" for k in ("dense", "bias") for size in (4, 5)),
}


def state(one: Play) -> dict[str, Tensor]:
    return {f"{id}/{n}": w for id, c in one.clients.items() for n, w in c.state().items()}


def same(one: Play, other: Play) -> bool:
    """Whether all that was sent, and all that clients keep, is equal bit for bit."""
    here, there = state(one), state(other)
    equal = here.keys() == there.keys() and all(torch.equal(here[n], there[n]) for n in here)
    return equal and [p for *_, p in one.packets] == [p for *_, p in other.packets]


def shown(one: Play) -> set[str]:
    """The faults that the behaviour of a run in its second task shows."""
    client, moment = one.clients["site-0"], Moment(1, 1, ROUNDS)
    rows, moves = client._rows("train", 1), client._moves()
    job, width = client._training(rows, moment), client.layout.width
    replies = [p for s, _, action, p in one.packets if action == "fit" and s != "server"]
    aligned = [size for size in KERNELS if f"now/dense/align{size}" in moves]
    found = {
        "masks": not any(name.startswith("now/mask/") for name in moves),
        "head": not {"now/dense/head", "now/bias/head"} & set(moves),
        "foreign": not rows.own[:, 1:].any() and "now/alpha/conv3" not in moves,
        "projections": aligned == [3],
        "tests": client._checked(1).rows < len(client.site.test(1)),
        "weighting": any(json.loads(p.header)["values"]["rows"] for p in replies),
        "past": "past/mask/conv3" in moves,
        "similarity": one.server.options.similarity == "rectified",
        "dls": client.layout.shapes["merge"] != (width, 2 * width),
        "sparse": bool(client._plan().sparse_private),
        "stop": job.rule.fresh and "past/target/conv3" in job.reads,
        "draws": drawn(client, "a", 9) == drawn(client, "b", 9),
        "order": job.streams[0] == job.streams[1],
    }
    assert set(found) == set(FAULTS)
    return {fault for fault, there in found.items() if there}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_alone_is_that_fault_and_no_other(fault: str) -> None:
    how = {"transfer": "sit", "epochs": 2, "batch": 4, "dls": fault == "dls"}
    assert shown(in_second_task(replace=f"{FAULTS_OF}:{fault}", **how)[0]) == {fault}
    assert shown(in_second_task(**how)[0]) == set()


@pytest.mark.parametrize("fault", [*STILL, "past"])
def test_with_a_fault_its_weights_stay_or_move_and_all_others_as_ever(fault: str) -> None:
    one = play(2, replace=f"{FAULTS_OF}:{fault}")
    client = one.clients["site-0"]
    client._begin(2)
    before = {name: tensor.clone() for name, tensor in client.weights.items()}
    one.round(2, 0)
    moved = {n for n in before if not torch.equal(before[n], client.weights[n])}
    frozen = ("kept/", "past/target", *([] if fault == "past" else ["past/mask"]))
    assert set(STILL.get(fault, ())) <= set(before)
    assert moved == {n for n in before if not n.startswith(frozen)} - set(STILL.get(fault, ()))


def test_with_the_fault_foreign_the_output_does_not_depend_on_others() -> None:
    for faults, equal in ((["foreign"], True), (["head", "masks", "projections"], False)):
        _, client = in_second_task(faults=faults)
        before = said(client, client._trained())
        client.weights["foreign/conv4"] = client.weights["foreign/conv4"] + 5.0
        client._cache.clear()
        assert torch.equal(said(client, client._trained()), before) is equal


def test_with_the_fault_tests_fewer_rows_are_scored_and_training_is_the_same() -> None:
    one, other = (play(2, faults=faults, batch=4) for faults in (["tests"], []))
    assert same(one, other)
    pairs = list(zip(one.scores(1), other.scores(1), strict=True))
    for few, every in pairs:
        valid = len(one.parts.scenario.holdings[few.client][1].valid)  # of the current task
        assert few.rows == min(every.rows, math.ceil(valid / 4) * 4)
    assert sum(few.rows for few, _ in pairs) < sum(every.rows for _, every in pairs)


def test_with_the_fault_sparse_private_projections_are_pulled() -> None:
    client = play(1, faults=["sparse"]).clients["site-0"]
    weights, plan = client._trained(), client._plan()
    more = penalty(weights, plan) - penalty(weights, dataclasses.replace(plan, sparse_private=()))
    size = sum(weights[f"now/dense/{n}"].abs().sum() for n in ("align3", "merge"))
    torch.testing.assert_close(more, 0.001 * torch.as_tensor(size))


def test_fedweit_has_no_faults_of_banks() -> None:
    none = ["foreign", "projections", "similarity", "dls", "sparse"]
    assert same(play(2, combine="sum", faults=none), play(2, combine="sum"))


@pytest.mark.parametrize("variant", ["FedSeIT", "DLS and SIT", "FedWeIT", "FedWeIT-Dense"])
def test_all_faults_together_are_released(variant: str) -> None:
    how = {**VARIANTS[variant], "epochs": 2, "patience": 1}
    one, other = play(3, list(FAULTS), **how), play(3, replace=f"{FAULTS_OF}:released", **how)
    assert same(one, other)
    assert one.scores(2) == other.scores(2)
    assert not same(one, play(3, **how))


def test_options_of_before_are_refused_with_what_to_write_now() -> None:
    for key, value, name in (("profile", "released", "released"), ("faults", ["head"], "head")):
        for spelled in (key, f"method.{key}"):
            with pytest.raises(UserError, match=f"no option '{key}' any more") as error:
                config(**{spelled: value})
            assert f"replace = '{FAULTS_OF}:{name}'" in error.value.remedy
    plain = config(**{"method.profile": "default", "method.faults": []})  # as records have them
    assert plain == config()


def test_the_page_has_every_fault() -> None:
    page = (Path(__file__).parents[3] / "docs" / "methods" / "fedseit.md").read_text()
    assert all(f"| `{fault}` | J" in page for fault in FAULTS)


# Draws, labels, dropout


def test_every_tensor_of_every_task_and_client_has_a_draw_of_its_own() -> None:
    one = play(2)
    values = []
    for client in one.clients.values():
        for task in (0, 1):
            client.task = task
            values += [drawn(client, name, 50) for name in ("mask/conv3", "bias/conv3")]
    assert len({tuple(one) for one in values}) == len(values)


def test_first_weights_have_the_deviations_of_the_specification() -> None:
    one = play(0, **{"model.widths": [64]})
    assert float(one.server.base["conv4"].std()) == pytest.approx(1 / math.sqrt(16 * 4), rel=0.05)
    client = one.clients["site-0"]
    client.weights = {f"base/{n}": b for n, b in one.server.base.items()}
    client._begin(0)
    weights = client.weights
    torch.testing.assert_close(weights["now/adaptive/conv3"], one.server.base["conv3"] / 5)
    assert float(weights["now/mask/conv3"].std()) == pytest.approx(1 / 8, rel=0.3)
    width = 3 * 64
    spread = float(weights["now/dense/merge"].std())
    assert spread == pytest.approx(1 / math.sqrt(2 * width), rel=0.05)
    head = weights["now/dense/head"]
    assert float(head.abs().max()) <= math.sqrt(6 / (3 + width))
    assert float(head.std()) == pytest.approx(math.sqrt(2 / (3 + width)), rel=0.1)
    assert not weights["now/bias/head"].any()


def test_labels_are_renumbered_by_rising_class() -> None:
    labels = torch.tensor([1, 4, 7])
    assert renumbered(torch.tensor([7, 1, 4, 1]), labels).tolist() == [2, 0, 1, 0]
    assert renumbered(torch.tensor([5, 7, 9]), labels).tolist() == [3, 2, 3]


def test_dropout_leaves_out_its_share_and_is_another_for_every_row_and_epoch() -> None:
    ones, rows = torch.ones((400, 50)), torch.arange(400)
    first, second = (dropped(ones, torch.tensor(key), rows, 0.3) for key in (1, 2))
    assert float((first == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(first.mean()) == pytest.approx(1, abs=0.02)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(dropped(ones[:5], torch.tensor(1), rows[:5], 0.3), first[:5])


def test_the_objective_is_cross_entropy_and_penalties() -> None:
    client = play(1, dropout=0.0).clients["site-0"]
    rows, plan, weights = client._rows("train", 0), client._plan(), client._trained()
    loss = torch.nn.functional.cross_entropy(logits(weights, rows, plan), rows.y)
    torch.testing.assert_close(objective(weights, rows, plan=plan), loss + penalty(weights, plan))
    by_hand = sum(
        0.001 * weights[f"now/adaptive/{n}"].abs().sum()
        + 0.00005 * (weights[f"now/adaptive/{n}"] ** 2).sum()
        + 0.00005 * (weights[f"now/mask/{n}"] ** 2).sum()
        + 0.00005 * (weights[f"base/{n}"] ** 2).sum()
        for n in CONVS
    )
    private_ = sum(0.00005 * (weights[f"now/dense/{n}"] ** 2).sum() for n in client.layout.private)
    torch.testing.assert_close(penalty(weights, plan), by_hand + private_)


# Variants


def test_alone_means_that_nothing_of_others_is_used() -> None:
    one = play(2, combine="none", average=False)
    assert {action for _, _, action, _ in one.packets} == {"fit"}
    other = play(combine="none", average=False)
    moment = Moment(0, 0, ROUNDS)
    first = other.server.base
    other.server.round(Clients(["site-0"], other, moment), moment)
    assert all(torch.equal(other.server.base[n], first[n]) for n in first)
    fresh = play(combine="none", average=False)
    fresh.round(0, 0)
    here, there = (p.clients["site-0"].weights["base/conv3"] for p in (other, fresh))
    assert torch.equal(here, there)


def test_the_mean_base_is_tested_too_where_that_is_asked_for() -> None:
    one = play(1, test_global=True)
    assert {score.variant for score in one.scores(0)} == {"own", "global"}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"dls": True, "combine": "sum"}, "dls"),
        ({"dense": True}, "dense"),
        ({"transfer": "sit", "representation": "mean_unit", "similarity": "rectified"}, "centres"),
        ({"channel_sparse": 0.3, "weighting": "rows"}, "channel_sparse"),
        ({"channel_sparse": 0.3, "replace": f"{FAULTS_OF}:released"}, "channel_sparse"),
        ({"channel_sparse": 0.3, "replace": f"{FAULTS_OF}:weighting"}, "channel_sparse"),
        ({"data": "wine", "scenario.split": "rows"}, "texts"),
        ({"vectors": "nowhere"}, "no word vectors 'nowhere'"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=what):
        execute(config(**changes), tmp_path / "run", local_engine)
    assert not (tmp_path / "run").exists()


def test_a_damaged_foreign_part_is_refused() -> None:
    client = play(1).clients["site-0"]
    moment, count = Moment(1, 0, ROUNDS), 6 * 16 * sum(KERNELS)
    good = {f"0/{n}": t for n, t in coded(torch.ones(count)).items()}
    client.receive(Foreign(good, torch.zeros(0)), moment)
    bad = {**good, "0/values": good["0/values"][1:]}
    with pytest.raises(BadMessageError, match="damaged"):
        client.receive(Foreign(bad, torch.zeros(0)), moment)
    many = {n.replace("0/", f"{slot}/"): t for slot in range(4) for n, t in good.items()}
    with pytest.raises(BadMessageError, match="4 foreign parts for 3 slots"):
        client.receive(Foreign(many, torch.zeros(0)), moment)


# Options of FedWeIT's code and of deployment


def test_with_channel_sparse_only_the_filters_with_large_masks_are_sent() -> None:
    one = play(1, channel_sparse=0.3, **{"model.widths": [10]})
    sent = [p for s, _, action, p in one.packets if action == "fit_channels" and s != "server"]
    assert not [action for _, _, action, _ in one.packets if action == "fit"]
    assert {packet.payload for packet in sent} == {7 * 16 * 12 * 4 + 3 * 2}  # 7 of 10, and bits
    client = one.clients["site-0"]
    found = load(sent[3].block)  # the first client in the last round
    masks = client.weights["now/mask/conv3"].abs()
    kept = torch.from_numpy(np.unpackbits(found["channels/conv3/bits"].numpy())[:10].astype(bool))
    assert float(masks[kept].min()) > float(masks[~kept].max())
    torch.testing.assert_close(
        found["channels/conv3/values"], client.weights["base/conv3"][kept], rtol=0, atol=0
    )


@pytest.mark.numerics
def test_filters_are_above_the_quantile_also_where_no_number_lies_between_two() -> None:
    sizes = 0.5 + torch.arange(10) / 2**24  # neighbours in single precision
    assert above_share(sizes, 0.3).tolist() == [False] * 3 + [True] * 7
    assert above_share(torch.ones(10), 0.3).sum() == 0


def test_a_filter_is_averaged_over_those_that_sent_it() -> None:
    layers = [torch.zeros(3, 2, 1) for _ in range(3)]
    layers[0][0], layers[1][0], layers[2][1] = 1.0, 4.0, 5.0
    wanted = torch.tensor([2.5, 5.0, 0.0]).view(3, 1, 1).expand(3, 2, 1)
    assert torch.equal(mean_of_sent(layers), wanted)  # a zero keeps the local value


@pytest.mark.parametrize(
    "changed",
    [
        {"conv3/bits": None},
        {"conv3/bits": torch.zeros(2, dtype=torch.uint8)},
        {"conv3/values": None},
    ],
)
def test_filters_that_do_not_fit_are_refused(changed: dict[str, Tensor | None]) -> None:
    like = torch.ones(10, 4, 3)
    good: dict[str, Tensor | None] = {
        "conv3/values": torch.ones(1, 4, 3),
        "conv3/bits": torch.tensor([128, 0], dtype=torch.uint8),
    }
    whole = {name: tensor for name, tensor in good.items() if tensor is not None}
    assert float(widened("conv3", whole, like, "site-0").sum()) == 12
    bad = {name: tensor for name, tensor in {**good, **changed}.items() if tensor is not None}
    with pytest.raises(BadMessageError, match="site-0"):
        widened("conv3", bad, like, "site-0")


def test_with_a_vocabulary_of_its_own_a_client_reads_words_of_its_own_texts_alone() -> None:
    one = play(1, vocabulary="local")
    client = one.clients["site-0"]
    own, asked = client.site.train(0).x, client.site.test(0).x
    read = client._rows("test", 0).x
    known = torch.isin(asked, torch.cat([own.flatten(), torch.tensor([0, 1])]))
    assert torch.equal(read, torch.where(known, asked, 1))
    assert not bool(known.all())  # else this would say nothing
    assert torch.equal(client._rows("train", 0).x, own)
    assert torch.equal(play(1).clients["site-0"]._rows("test", 0).x, asked)


# FedWeIT on images


IMAGES: dict[str, Any] = {
    "data": {"name": "synthetic-images", "rows": 240, "classes": 6},
    "model.name": "lenet", "combine": "sum", "scenario.stages": 2,
}  # fmt: skip


def test_on_images_the_network_is_a_lenet_of_base_mask_adaptive_and_foreign_parts() -> None:
    one, client = in_second_task(**IMAGES)
    assert client.layout.layers == ("conv1", "conv2", "full1", "full2")
    assert set(one.server.base) == set(client.layout.layers)
    weights, plan = client._trained(), client._plan()
    model = LeNet((1, 8, 8), len(weights["now/dense/head"]))
    state = {f"{n}.weight": composed(weights, n, plan) for n in client.layout.layers}
    state |= {f"{n}.bias": weights[f"now/bias/{n}"] for n in (*client.layout.layers, "head")}
    model.load_state_dict({**state, "head.weight": weights["now/dense/head"]})
    rows = client._rows("train", 1)
    torch.testing.assert_close(logits(weights, rows, plan), model(rows.x))
    found = gradients(client)
    for layer in client.layout.layers:
        for kind in ("base", "now/mask", "now/adaptive", "now/alpha", "now/bias"):
            assert bool(found[f"{kind}/{layer}"].any()), (kind, layer)
    before = said(client, weights)
    weights["foreign/conv2"] = weights["foreign/conv2"] + 0.1
    assert not torch.equal(said(client, weights), before)


def test_on_images_fedweit_learns_and_a_stack_gives_the_same(tmp_path: Path) -> None:
    how = {**IMAGES, "dtype": "float64", "epochs": 2, "rate": 0.003, "batch": 32}
    how |= {"checkpoints": False, "looks": False}
    scores = {}
    for mode in ("loop", "stacked"):
        execute(config(**{**how, "engine.mode": mode}), tmp_path / mode, local_engine)
        scores[mode] = [e for e in read_events(tmp_path / mode) if isinstance(e, Score)]
    assert scores["loop"] == scores["stacked"]
    own = [score.accuracy for score in scores["loop"] if score.stage == 1]
    assert sum(own) / len(own) > 0.6  # of three classes
    chosen = json.loads((tmp_path / "stacked" / "engine.json").read_text()).values()
    assert any(c["mode"] == "stacked" and c["members"] == 3 for c in chosen)


@pytest.mark.parametrize(
    "changed", [{"combine": "banks"}, {"transfer": "sit"}, {"vocabulary": "local"}]
)
def test_on_images_what_is_made_for_texts_is_refused(changed: dict[str, str]) -> None:
    with pytest.raises(UserError, match="is for texts"):
        play(**{**IMAGES, **changed})


# Snapshots


@pytest.mark.parametrize("variant", ["FedSeIT", "SIT", "DLS", "FedWeIT"])
def test_a_snapshot_says_who_was_given_what_and_what_is_lost_without_it(variant: str) -> None:
    one = play(2, **VARIANTS[variant])
    moment = Moment(1, ROUNDS - 1, ROUNDS)
    slots, similar = one.server.snapshot(moment)
    assert slots.columns == ("site-0 task 0", "site-1 task 0", "site-2 task 0")
    notes = one.parts.scenario.clients
    assert slots.rows == notes == similar.rows
    kept = one.clients["site-0"].layout.slots
    for row, scores in zip(slots.values, similar.values, strict=True):
        given = sorted(value for value in row if math.isfinite(value))
        assert given == [float(slot) for slot in range(min(kept, 3))]
        assert sum(math.isfinite(score) for score in scores) == (2 if variant == "SIT" else 0)
    client = one.clients["site-1"]
    attention, left = client.snapshot(moment)
    torch.testing.assert_close(
        torch.tensor(attention.values[0]), client.weights["now/alpha/conv3"], rtol=1e-6, atol=0
    )
    assert left.columns == ("nothing", *(str(slot) for slot in range(kept)))
    changed = dict(client._weights_of(1))
    for name in [name for name in changed if name.startswith("foreign/")]:
        changed[name] = changed[name].clone()
        changed[name][0] = 0
    fresh = one.parts.client("site-1")
    fresh.restore({**client.state(), **{f"weights/{n}": w for n, w in changed.items()
                                        if n.startswith("foreign/")}})  # fmt: skip
    rows = fresh._rows("valid", 1)
    wanted = decomposed.row_losses(fresh._weights_of(1), rows, plan=fresh._plan()).mean()
    assert left.values[0][1] == pytest.approx(float(wanted), rel=1e-5)
    assert left.values[0][1] != left.values[0][0]


def test_there_is_nothing_to_look_at_in_the_first_task_or_alone() -> None:
    one = play(1)
    assert one.server.snapshot(Moment(0, 1, ROUNDS)) == []
    assert one.clients["site-0"].snapshot(Moment(0, 1, ROUNDS)) == []
    alone = play(2, **VARIANTS["Local"])
    assert alone.server.snapshot(Moment(1, 1, ROUNDS)) == []
    assert alone.clients["site-0"].snapshot(Moment(1, 1, ROUNDS)) == []


def test_looking_changes_nothing() -> None:
    _, client = in_second_task(transfer="sit", keep=2)
    before = {name: tensor.clone() for name, tensor in client.state().items()}
    client.snapshot(Moment(1, 0, ROUNDS))
    after = client.state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# Bad input


def by_hand(train: list[list[int]], test: list[list[int]], **changes: Any) -> Play:
    """One client, whose tasks have these rows of a small set; row 0 is an empty text."""
    dataset = data.load("synthetic-text", rows=40, classes=4, length=8)
    dataset.x[0] = 0
    dataset.x[1] = 1  # unknown words alone
    dataset.y[:] = np.arange(40) % 4
    none = np.empty(0, dtype=np.int64)
    holdings = tuple(Holding(np.array(rows, dtype=np.int64), none, none) for rows in train)
    made = Scenario(
        clients=("site-0",),
        holdings={"site-0": holdings},
        common=none,
        tests={"site-0": tuple(np.array(rows, dtype=np.int64) for rows in test)},
        tasks=tuple(f"task-{number}" for number in range(len(train))),
        known_at=tuple(range(len(train))),
    )
    return Play(Parts(config(**{"transfer": "sit", **changes}), dataset, made)).through(len(train))


def test_an_empty_text_and_one_of_unknown_words_are_texts_like_any_other() -> None:
    one = by_hand([list(range(20)), list(range(20, 40))], [[0, 1], list(range(40))])
    assert [score.rows for score in one.scores(1)] == [2, 40]
    for tensor in one.clients["site-0"].weights.values():
        assert bool(torch.isfinite(tensor).all())


def test_a_task_of_one_class_is_learned_and_always_right() -> None:
    one = by_hand([[0, 4, 8, 12], [1, 2, 3, 5]], [[16, 20], [6, 7]])
    assert next((s.rows, s.correct) for s in one.scores(1)) == (2, 2)


def test_a_class_that_was_not_trained_counts_as_wrong() -> None:
    one = by_hand([[0, 1, 4, 5, 8, 9]], [[2, 3, 6, 7]])
    (score,) = one.scores(0)
    assert (score.rows, score.correct, score.macro_f1) == (4, 0, 0.0)


def test_a_task_of_one_row_is_learned_and_nothing_is_said_of_its_text() -> None:
    one = by_hand([[6], [1, 2, 3, 5]], [[6], [6, 7]])
    sent = [
        load(packet.block)["centres"]
        for sender, _, action, packet in one.packets
        if action == "describe" and sender != "server"
    ]
    assert sent[0].shape == (0, 16)
    assert len(sent[1]) >= 1


def test_a_client_without_rows_for_a_stage_sends_its_base_as_it_came_and_no_part() -> None:
    one = by_hand([list(range(20)), [], list(range(20, 40))], [[21, 22], [21, 22], [1, 2]])
    assert [
        len(one.server.index.adaptive[stage, "site-0"]["values"]) > 0 for stage in range(3)
    ] == ([True, False, True])
    assert [score.rows for score in one.scores(2)] == [2, 2, 2]
    assert one.scores(2)[1].correct == 0


def test_rows_that_fill_no_batch_and_no_validation_rows_are_enough() -> None:
    one = by_hand([[1, 2, 3]], [[5, 6, 7]], epochs=3, batch=2)
    assert float(one.clients["site-0"].course[BEST]) < math.inf


def test_describe_reads_training_rows_alone() -> None:
    one = play()
    client = one.clients["site-0"]
    before = client.describe(Empty(), Moment(0, 0, 1)).centres
    client.site._kept["valid", 0] = client.site.test(0)
    assert torch.equal(client.describe(Empty(), Moment(0, 0, 1)).centres, before)


def test_messages_have_the_tensors_that_were_said() -> None:
    one = play(1)
    sent = {action: packet for sender, _, action, packet in one.packets if sender == "server"}
    assert set(contents(unpack(sent["fit"], Fit, "server"))) == {f"base/{n}" for n in CONVS}
