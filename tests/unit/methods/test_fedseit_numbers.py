"""FedSeIT's shapes, first weights, what moves and what is left out; worked out by hand."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from atoll.core.errors import BadMessageError, UserError
from atoll.core.federation import Moment
from atoll.core.rng import Stream
from atoll.learning.centres import nearest_tasks, normalised
from atoll.learning.decomposed import logits, row_losses
from atoll.learning.sparse import coded, mean_of_sent, widened
from atoll.learning.task_weights import first_draws, renumbered, retired, silenced, with_base
from atoll.learning.textcnn import normal
from atoll.methods.fedseit import METHOD, Client, Foreign, Options, Server, checked_options
from atoll.reproduce.faults.fedseit import brought_back
from atoll.runs.config import change, resolve
from atoll.runs.parts import Parts, parts

SMALL: dict[str, Any] = {
    "data": {"name": "synthetic-text", "rows": 60, "classes": 4, "length": 5},
    "scenario": {"split": "tasks", "clients": 2, "stages": 2, "task_classes": 2},
    "model": {"widths": [2]},
    "method": {"name": "fedseit"},
}
CONVS = {"conv3": (2, 16, 3), "conv4": (2, 16, 4), "conv5": (2, 16, 5)}
NARROW = dict.fromkeys(("align3", "align4", "align5"), (2, 4))


def small() -> Parts:
    return parts(resolve(change(SMALL, {}), "test"))


def built(faults: Sequence[str] = (), **options: Any) -> tuple[Client, Server]:
    """A client and the server, with faults of the authors' code."""
    made, method = small(), brought_back(METHOD, faults)
    chosen = Options(**options)
    return method.client(chosen, made.site("site-0")), method.server(chosen, made.site("server"))


def begun(faults: Sequence[str] = (), **options: Any) -> Client:
    """A client at the beginning of its first task; its base is that of the server."""
    client, server = built(faults, **options)
    base = server.base
    client.weights = {f"base/{name}": tensor for name, tensor in base.items()}
    client._begin(0)
    return client


@pytest.mark.parametrize(
    ("options", "more", "private"),
    [
        ({}, {**NARROW, "merge": (6, 12)}, [*NARROW, "merge"]),
        ({"combine": "none"}, {**NARROW, "merge": (6, 12)}, [*NARROW, "merge"]),
        ({"dls": True}, {**NARROW, "merge": (6, 12)}, []),
        ({"dls": True, "faults": ("dls",)}, {"merge": (6, 18)}, []),
        ({"combine": "sum"}, {}, []),
        ({"combine": "sum", "dense": True}, {"merge": (6, 6)}, ["merge"]),
        (
            {"transfer": "sit", "keep": 5},
            {**dict.fromkeys(NARROW, (2, 10)), "merge": (6, 12)},
            [*NARROW, "merge"],
        ),
    ],
)
def test_layers_have_the_shapes_of_two_filters_by_window_and_a_slot_for_each_client(
    options: dict[str, Any], more: dict[str, tuple[int, int]], private: list[str]
) -> None:
    client, _ = built(**options)
    assert client.layout.shapes == {**CONVS, **more}
    assert list(client.layout.private) == private
    assert client.layout.slots == options.get("keep", 2)
    assert client.layout.width == 6


def test_first_weights_are_drawn_with_one_by_the_root_of_their_inputs() -> None:
    half, found = 1 / math.sqrt(2), first_draws(begun().layout)
    expected: dict[str, Any] = {}
    for layer in CONVS:
        expected[f"mask/{layer}"] = expected[f"alpha/{layer}"] = ((2,), half)
        expected[f"bias/{layer}"], expected[f"foreign_bias/{layer}"] = ((2,), half), ((2, 2), half)
    expected |= {f"dense/{layer}": ((2, 4), 1 / 2) for layer in NARROW}
    expected["dense/merge"] = ((6, 12), 1 / math.sqrt(12))
    assert found == expected
    wide = first_draws(begun(transfer="sit", keep=5).layout)
    assert wide["alpha/conv3"] == ((5,), 1 / math.sqrt(5))
    assert wide["foreign_bias/conv3"] == ((5, 2), half)
    assert "foreign_bias/conv3" not in first_draws(begun(combine="sum").layout)


def test_a_task_begins_with_its_rate_a_share_of_the_base_and_a_head_within_glorots_bound() -> None:
    client = begun(rate=0.25, start=0.5)
    assert client.course.tolist() == [0.25, math.inf, 0, 0]
    base = client.weights["base/conv3"]
    torch.testing.assert_close(client.weights["now/adaptive/conv3"], 0.5 * base)
    classes = len(client.site.train(0).y.unique())
    draw = client.site.stream("task", 0, "head").numpy().uniform(-1, 1, (classes, 6))
    head = torch.from_numpy(draw * math.sqrt(6 / (classes + 6))).float()
    torch.testing.assert_close(client.weights["now/dense/head"], head)
    assert client.weights["now/bias/merge"].tolist() == [0] * 6
    assert client.weights["now/bias/head"].tolist() == [0] * classes
    mask = normal((2,), 1 / math.sqrt(2), client.site.stream("task", 0, "mask/conv3"))
    assert torch.equal(client.weights["now/mask/conv3"], mask)


def test_the_released_code_draws_equal_shapes_alike() -> None:
    client = begun(faults=("draws",))
    assert (
        client.rules.stream(client.site, 0, "a", (2, 3)).key == Stream.of(0, "released", 2, 3).key
    )
    assert torch.equal(client.weights["now/mask/conv3"], client.weights["now/alpha/conv3"])


def test_only_the_fault_of_projections_holds_two_of_three_private_ones() -> None:
    def aligned(**options: Any) -> set[str]:
        return {name for name in begun(**options)._moves() if "/align" in name}

    every = {f"now/{kind}/{layer}" for kind in ("dense", "bias") for layer in NARROW}
    assert aligned() == every
    assert aligned(faults=("projections",)) == {"now/dense/align3", "now/bias/align3"}
    kept = aligned(dls=True, faults=("projections",))  # they are shared: none is private
    assert {"now/bias/align3", "now/bias/align4", "now/bias/align5"} <= kept


def test_attention_rests_in_the_first_task_and_where_nothing_comes_from_others() -> None:
    def alphas(task: int, **options: Any) -> int:
        client = begun(**options)
        client.task = task
        return sum(name.startswith("now/alpha/") for name in client._moves())

    assert [alphas(0), alphas(1), alphas(1, combine="none")] == [0, 3, 0]
    assert alphas(1, faults=("foreign",)) == 0
    assert not [n for n in begun(faults=("masks",))._moves() if "mask" in n]
    assert not [n for n in begun(faults=("head",))._moves() if n.endswith("/head")]


@pytest.mark.parametrize("whole", [False, True])
def test_validation_reads_penalties_only_with_the_fault_that_counts_them(whole: bool) -> None:
    client = begun(epochs=3, faults=("stop",) if whole else ())
    client.weights["past/mask/conv3"] = torch.zeros(1, 2)
    job = client._training(client._rows("train", 0), Moment(0, 1, 2))
    penal = {"past/mask/conv3", "lambda2"}
    assert penal <= set(job.work.weights)
    assert (penal & set(job.reads)) == (penal if whole else set())
    assert "base/conv3" in job.reads
    assert "now/mask/conv3" in job.reads
    site, moment = client.site, Moment(0, 1, 2)
    assert [s.key for s in job.streams] == [site.stream("fit", moment, e).key for e in range(3)]
    assert list(job.keys) == [site.stream("noise", moment, e).key for e in range(3)]


def test_with_the_fault_of_order_rows_come_alike_in_every_epoch_and_round() -> None:
    client = begun(epochs=2, faults=("order",))
    job = client._training(client._rows("train", 0), Moment(0, 1, 2))
    assert {stream.key for stream in job.streams} == {client.site.stream("fit", 0).key}


def test_foreign_parts_fill_their_slots_in_order_and_scores_become_attention() -> None:
    client = begun(transfer="sit", keep=3)
    size = 2 * 16 * (3 + 4 + 5)
    flat = [torch.zeros(size), torch.zeros(size)]
    flat[0][0], flat[1][size - 1] = 2.0, 3.0
    codes = {f"{n}/{k}": t for n, part in enumerate(flat) for k, t in coded(part).items()}
    client.receive(Foreign(codes, torch.tensor([0.75, 0.25])), Moment(0, 0, 1))
    bank = client.weights["foreign/conv3"]
    assert bank.shape == (3, 2, 16, 3)
    assert bank.nonzero().tolist() == [[0, 0, 0, 0]]
    assert client.weights["foreign/conv5"].nonzero().tolist() == [[1, 1, 15, 4]]
    assert client.weights["now/alpha/conv4"].tolist() == [0.75, 0.25, 0.0]
    before = client.weights["now/alpha/conv4"]
    client.receive(Foreign(codes, torch.zeros(0)), Moment(0, 0, 1))
    assert torch.equal(client.weights["now/alpha/conv4"], before)
    with pytest.raises(BadMessageError, match="2 foreign parts for 3 slots"):
        client.receive(Foreign(codes, torch.tensor([1.0])), Moment(0, 0, 1))
    narrow = begun(transfer="sit", keep=1)
    with pytest.raises(BadMessageError, match="2 foreign parts for 1 slots"):
        narrow.receive(Foreign(codes, torch.zeros(0)), Moment(0, 0, 1))


def test_a_slot_that_is_left_out_finds_nothing_and_the_others_find_what_they_did() -> None:
    client = begun()
    flat = torch.linspace(-1, 1, 2 * 16 * 12)
    codes = {f"{n}/{k}": t for n in range(2) for k, t in coded(flat * (n + 1)).items()}
    client.receive(Foreign(codes, torch.zeros(0)), Moment(0, 0, 1))
    rows = client._rows("valid", 0)
    found = rows.own[:, 1:].reshape(len(rows), 2, 3, 2, 2)  # sides, windows, slots, filters
    assert (found != 0).any(0).all()
    found = found.clone()
    found[:, :, :, 1] = 0
    left = silenced(rows, 1, 2).own
    assert torch.equal(left, torch.cat([rows.own[:, :1], found.flatten(1)], 1))


def test_without_foreign_parts_all_slots_are_empty() -> None:
    client = begun(transfer="sit", keep=3)
    client.receive(Foreign({}, torch.zeros(0)), Moment(0, 0, 1))
    assert client.weights["foreign/conv3"].shape == (3, 2, 16, 3)
    assert not client.weights["foreign/conv3"].any()


def test_only_the_first_task_is_planned_as_the_first() -> None:
    client = begun()
    assert client._plan().first
    client._begin(1)
    assert not client._plan().first


def test_a_restored_client_reads_its_rows_with_the_foreign_parts_of_its_state() -> None:
    flat = torch.linspace(-1, 1, 2 * 16 * 12)
    clients = [begun(), begun()]
    for number, client in enumerate(clients):
        code = {f"0/{k}": t for k, t in coded((number + 1) * flat).items()}
        client.receive(Foreign(code, torch.zeros(0)), Moment(0, 0, 1))
    one, other = (client._rows("valid", 0).own for client in clients)
    assert not torch.equal(one, other)
    clients[0].restore(clients[1].state())
    assert torch.equal(clients[0]._rows("valid", 0).own, other)


def test_with_nothing_left_out_a_client_says_what_it_says_and_without_a_slot_another_thing() -> (
    None
):
    client = begun()
    flat = torch.linspace(-9, 9, 2 * 16 * 12)
    codes = {f"{n}/{k}": t for n in range(2) for k, t in coded(flat * (n + 1)).items()}
    client.receive(Foreign(codes, torch.zeros(0)), Moment(0, 0, 1))
    weights, valid, test = client._weights_of(0), client._rows("valid", 0), client._rows("test", 0)
    loss, accuracy = client._left_out(None)
    assert loss == pytest.approx(float(row_losses(weights, valid, plan=client._plan()).mean()))
    right = (logits(weights, test, plan=client._plan()).argmax(-1) == test.y).sum()
    assert accuracy == float(right) / len(test)
    assert client._left_out(0)[0] != pytest.approx(loss)


def test_past_masks_and_adaptive_parts_are_kept_in_the_order_of_tasks_and_held() -> None:
    client = begun()
    masks = [client.weights["now/mask/conv3"]]
    client._begin(1)
    masks.append(client.weights["now/mask/conv3"])
    client.weights = retired(client.weights, client.layout.layers, 1)
    assert torch.equal(client.weights["past/mask/conv3"], torch.stack(masks))
    base, adaptive = client.weights["base/conv3"], client.weights["past/adaptive/conv3"]
    held = base * torch.sigmoid(torch.stack(masks))[:, :, None, None] + adaptive
    torch.testing.assert_close(client.weights["past/target/conv3"], held)
    assert "kept/0/now/alpha/conv3" in client.weights
    assert "kept/1/now/alpha/conv3" in client.weights


def test_the_mean_base_is_taken_where_it_is_not_zero() -> None:
    client = begun()
    ours = {name: client.weights[f"base/{name}"].clone() for name in CONVS}
    theirs = {name: torch.ones_like(base) for name, base in ours.items()}
    theirs["conv3"][0] = 0
    found = with_base(client.weights, client.layout.layers, theirs)["base/conv3"]
    assert torch.equal(found[0], ours["conv3"][0])
    assert torch.equal(found[1], theirs["conv3"][1])


def test_the_mean_of_filters_is_over_those_who_sent_them() -> None:
    one, other = torch.zeros(3, 2, 2), torch.zeros(3, 2, 2)
    one[0], one[1, 0, 0], other[0] = 2.0, 5.0, 4.0
    expected = torch.zeros(3, 2, 2)
    expected[0], expected[1, 0, 0] = 3.0, 5.0
    assert torch.equal(mean_of_sent([one, other]), expected)


def test_the_nearest_tasks_come_first_and_of_equals_the_newer_and_then_the_lower_client() -> None:
    scored = {(0, "a"): 0.5, (1, "b"): 0.5, (1, "a"): 0.5, (0, "b"): 0.9}
    order = [(0, "b"), (1, "a"), (1, "b")]
    assert nearest_tasks(scored, 3) == (order, [0.9, 0.5, 0.5])


@pytest.mark.parametrize(
    ("scores", "shares"),
    [([3.0, 1.0], [0.75, 0.25]), ([-1.0, 2.0], [0, 1]), ([-1.0, 0.0], [0.5, 0.5]), ([], [])],
)
def test_scores_become_shares_that_sum_to_one(scores: list[float], shares: list[float]) -> None:
    assert normalised(scores).tolist() == shares


def test_filters_that_were_sent_stand_at_the_places_of_their_bits() -> None:
    like, values = torch.zeros(9, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    bits = torch.tensor([0b01000000, 0b10000000], dtype=torch.uint8)  # filters 1 and 8
    found = widened("w", {"w/values": values, "w/bits": bits}, like, "a")
    assert found[[1, 8]].tolist() == values.tolist()
    assert found.count_nonzero() == 4
    for wrong in ({"w/values": values}, {"w/bits": bits}, {"w/values": values, "w/bits": bits[:1]}):
        with pytest.raises(BadMessageError, match="without the bits that identify"):
            widened("w", wrong, like, "a")
    with pytest.raises(BadMessageError, match="of shape"):
        widened("w", {"w/values": values[:1], "w/bits": bits}, like, "a")


def test_a_class_is_its_place_among_the_labels_and_others_are_beyond() -> None:
    labels = torch.tensor([2, 5, 7])
    assert renumbered(torch.tensor([7, 2, 9, 3, 5, 0]), labels).tolist() == [2, 0, 3, 3, 1, 3]


def test_options_that_cannot_be_had_together_are_refused() -> None:
    for wrong, what in (
        ({"dls": True, "combine": "sum"}, "dls needs"),
        ({"dense": True}, "dense is"),
        ({"channel_sparse": 0.1, "weighting": "rows"}, "channel_sparse has"),
        (
            {"transfer": "sit", "similarity": "rectified", "representation": "mean_unit"},
            "rectified similarity",
        ),
    ):
        with pytest.raises(UserError, match=what):
            checked_options(Options(**wrong))
    for right in ({"dls": True}, {"dense": True, "combine": "sum"}, {"channel_sparse": 0.1}):
        checked_options(Options(**right))


def test_the_released_code_weighs_by_rows_and_rectifies() -> None:
    def chosen(*faults: str) -> tuple[str, str]:
        client, server = built(faults)
        assert client.options == server.options
        return client.options.weighting, client.options.similarity

    assert chosen() == ("equal", "mean")
    assert chosen("weighting", "similarity") == ("rows", "rectified")
    assert chosen("weighting") == ("rows", "mean")


def test_a_restored_server_knows_bases_rows_and_who_has_stopped() -> None:
    made = small()
    one, other = (Server(Options(), made.site("server")) for _ in range(2))
    one.bases = {"site-0": {"conv3": torch.ones(1)}, "site-1": {"conv3": torch.zeros(1)}}
    one.rows, one.stopped = {"site-0": 3, "site-1": 0}, {"site-1"}
    one.index.adaptive = {(0, "site-0"): {"values": torch.ones(2)}}
    one.index.described = {(1, "site-1"): torch.ones(1, 2)}
    other.restore(one.state())
    assert (other.rows, other.stopped) == (one.rows, {"site-1"})
    assert other.bases["site-0"]["conv3"].tolist() == [1]
    assert other.index.adaptive[0, "site-0"]["values"].tolist() == [1, 1]
    assert other.index.described[1, "site-1"].tolist() == [[1, 1]]
    assert list(other.ids) == ["site-0", "site-1"]
