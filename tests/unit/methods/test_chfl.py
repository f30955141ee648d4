"""The invariants I1 to I17 of CHFL's specification."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.errors import UserError
from atoll.core.federation import Clients, Moment
from atoll.core.messages import Tensors
from atoll.core.record import Message, Score, Stage, read_events
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.data.correlation import common_sets, correlation, scores_of_sets
from atoll.engines.local import LocalEngine, local_engine
from atoll.jobs.train import Optimiser, Phase, TrainJob
from atoll.learning import lateral
from atoll.learning.models import MLP, outputs
from atoll.learning.weights import mean, without
from atoll.methods import chfl
from atoll.metrics import scores as metrics
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.parts import Parts, parts

SMALL: dict[str, Any] = {
    "name": "chfl",
    "rounds": 3,
    "data": {"name": "synthetic-table", "rows": 240},
    "scenario": {"split": "columns", "clients": 3, "ratio": 0.4},
    "model": {"widths": [12, 8, 6]},
    "method": {"name": "chfl", "epochs": 2, "batch": 16, "mu": [0.1, 1.0]},
}


def config(**changes: Any) -> RunConfig:
    return resolve(change(SMALL, changes), "test")


def trajectory(made: Parts, rounds: int = 3) -> tuple[list[Tensors], LocalEngine]:
    """The shared weights after every round, and the clients as they ended."""
    server, engine = made.server(), LocalEngine(made)
    found = []
    for number in range(rounds):
        moment = Moment(0, number, rounds)
        server.round(Clients(made.scenario.clients, engine, moment), moment)
        found.append({name: tensor.clone() for name, tensor in server.weights.items()})
    return found, engine


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def client(**changes: Any) -> chfl.Client:
    made = parts(config(**changes))
    found = made.client(made.scenario.clients[0])
    assert isinstance(found, chfl.Client)
    return found


def batch_of(one: chfl.Client, count: int = 16) -> Rows:
    return one.site.train(0).at(slice(0, count))


def joint_loss(one: chfl.Client, weights: Tensors, batch: Rows) -> Tensor:
    (phase,) = [phase for phase in one._phases() if phase.name == "joint"]
    return phase.loss(weights, batch)


def perform(steps: Any) -> Any:
    """What an action returns once its work is done."""
    try:
        job = next(steps)
        while True:
            job = steps.send(job.run())
    except StopIteration as end:
        return end.value


def other_own_columns(made: Parts, client: int) -> Parts:
    """The same run with other values in the own columns of one client."""
    x = made.dataset.x.copy()
    own = made.scenario.holdings[made.scenario.clients[client]][0].own
    x[:, own] = np.random.default_rng(5).normal(size=(len(x), len(own)))
    return Parts(made.config, dataclasses.replace(made.dataset, x=x), made.scenario)


@pytest.mark.parametrize(
    "changes",
    [{}, {"mu": [0.5]}, {"rate_unique": 0.05}, {"variants": ["common"]}, {"u_init": "zeros"}],
)
def test_i1_column_one_moves_as_in_plain_fedavg_bit_for_bit(changes: dict[str, Any]) -> None:
    plain = {"name": "fedavg", "epochs": 2, "batch": 16, "rate": 0.001}
    expected, _ = trajectory(parts(config(method=plain)))
    found, _ = trajectory(parts(config(**changes)))
    assert len(found) == 3
    assert all(equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not equal(found[0], found[1])


def test_i1_column_one_does_not_see_the_own_columns() -> None:
    made = parts(config())
    expected, _ = trajectory(made)
    found, _ = trajectory(other_own_columns(made, 0))
    assert all(equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("source", ["local_updated", "round_start"])
def test_i2_the_joint_loss_has_no_gradient_in_column_one(source: str) -> None:
    one = client(lateral_source=source)
    weights = one._received(without("common", one.weights))
    common = [n for n in weights if n.startswith(("common/", "start/"))]
    for weight in weights.values():
        weight.requires_grad_(True)
    loss = joint_loss(one, weights, batch_of(one))
    assert loss.requires_grad
    found = torch.autograd.grad(loss, [weights[n] for n in common], allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in found)
    loss = joint_loss(one, weights, batch_of(one))
    moved = torch.autograd.grad(loss, [weights["unique/weight0"]])
    assert moved[0].any()


def test_i3_with_mu_zero_the_lateral_weights_stay_as_they_were_drawn() -> None:
    made = parts(config())
    first = made.client("site-0").weights
    _, engine = trajectory(made)
    trained = engine._clients["site-0"].weights
    for i in (1, 2, 3):
        before, after = first[f"unique/lateral{i}"], trained[f"unique/lateral{i}"]
        assert torch.equal(before[0], after[0])  # mu = 0 stands first in the bank
        assert not torch.equal(before[1], after[1])
    assert not torch.equal(first["unique/weight1"][0], trained["unique/weight1"][0])


def test_i3_with_mu_zero_predictions_do_not_depend_on_the_lateral_weights() -> None:
    one = client()
    model = _member(one, 0)
    changed = {n: w * 7 + 1 if "lateral" in n else w for n, w in model.items()}
    rows = batch_of(one)
    assert torch.equal(one.predict(model, rows), one.predict(changed, rows))
    assert not torch.equal(
        one.predict({**model, "mu": torch.tensor(0.5)}, rows), one.predict(changed, rows)
    )


def _member(one: chfl.Client, number: int) -> Tensors:
    """One model of the bank by itself."""
    unique = {n: w[number] for n, w in one.weights.items() if n.startswith("unique/")}
    common = {n: w for n, w in one.weights.items() if n.startswith("common/")}
    return {**common, **unique, "mu": one.weights["mu"][number, 0, 0]}


@pytest.mark.parametrize(("member", "zero_lateral"), [(0, False), (1, True)])
def test_i4_a_silent_second_column_leaves_the_common_prediction(
    member: int, zero_lateral: bool
) -> None:
    one = client()
    model = _member(one, member)
    silent = {"unique/weight3", "unique/bias3"} | ({"unique/lateral3"} if zero_lateral else set())
    model = {n: torch.zeros_like(w) if n in silent else w for n, w in model.items()}
    rows = batch_of(one)
    common = outputs(without("common", model), rows.x, one.depth)[-1]
    assert torch.equal(torch.softmax(one.predict(model, rows), -1), torch.softmax(common, -1))


def test_i5_joint_logits_are_the_common_ones_plus_those_of_column_two() -> None:
    one = client()
    model, rows = _member(one, 1), batch_of(one)
    z_c = outputs(without("common", model), rows.x, one.depth)
    z_u = lateral.lateral_column(without("unique", model), rows.own, z_c, model["mu"])
    joint = one.predict(model, rows)
    torch.testing.assert_close(joint - z_c[-1], z_u)
    shifted = {**model, "unique/bias3": model["unique/bias3"] + 3.5}
    torch.testing.assert_close(
        torch.softmax(one.predict(shifted, rows), -1), torch.softmax(joint, -1)
    )
    assert torch.equal(one.predict(shifted, rows).argmax(-1), joint.argmax(-1))


def test_i6_other_own_columns_of_one_client_change_nothing_elsewhere() -> None:
    made = parts(config())
    changed = other_own_columns(made, 1)
    (_, before), (_, after) = trajectory(made), trajectory(changed)
    rows = made.site("site-0").test(0)
    for id, same in (("site-0", True), ("site-1", False), ("site-2", True)):
        one, other = before._clients[id], after._clients[id]
        assert equal(one.weights, other.weights) is same
    one, other = before._clients["site-0"], after._clients["site-0"]
    assert torch.equal(one.predict(_member(one, 1), rows), other.predict(_member(other, 1), rows))


def test_i7_with_one_client_the_mean_is_that_client_and_training_is_central() -> None:
    made = parts(config(clients=1))
    found, _ = trajectory(made)
    site = made.site("site-0")
    model = site.model()
    assert isinstance(model, MLP)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in range(3):
        phase = Phase(
            "loss",
            tuple(weights),
            lambda w, b: F.cross_entropy(outputs(w, b.x, 4)[-1], b.y),
            Optimiser("adam", 0.001),
        )
        stream = site.stream("fit", Moment(0, number, 3))
        weights = (
            TrainJob(weights, {}, (phase,), site.train(0), 16, 2, stream).run().weights
        )  # a new Adam
        assert equal(weights, found[number])


def test_i8_the_mean_of_equal_copies_is_the_copy() -> None:
    drawn = {"a": torch.randn(50, generator=torch.Generator().manual_seed(0))}
    for count in (1, 2, 4, 8):
        assert torch.equal(mean([drawn] * count)["a"], drawn["a"])
    for count in (3, 5, 7):
        copy = mean([drawn] * count)["a"]
        one_ulp = torch.nextafter(drawn["a"].abs(), torch.tensor(torch.inf)) - drawn["a"].abs()
        assert bool(((copy - drawn["a"]).abs() <= one_ulp).all())
    three = [{"a": drawn["a"] * i} for i in (1, 2, 3)]
    for order in itertools.permutations(three):
        torch.testing.assert_close(mean(order)["a"], drawn["a"] * 2)


@pytest.mark.parametrize("ratio", [0.3, 0.6])
def test_i9_messages_hold_the_eight_tensors_of_column_one_and_nothing_else(
    ratio: float, tmp_path: Path
) -> None:
    execute(config(ratio=ratio), tmp_path, local_engine)
    made = parts(config(ratio=ratio))
    ledger = [e for e in read_events(tmp_path) if isinstance(e, Message)]
    common, clients, rounds = made.site("server").model().state_dict(), 3, 3
    size = 4 * sum(w.numel() for w in common.values())
    weighty = [e for e in ledger if e.payload]
    assert {e.kind for e in weighty} == {"Fit", "Fitted", "Settle"}
    for event in weighty:
        shapes = {name.removeprefix("weights/"): tuple(shape) for name, _, shape in event.tensors}
        assert shapes == {name: tuple(w.shape) for name, w in common.items()}
        assert len(shapes) == 8
        assert event.payload == size
    assert sum(e.payload for e in ledger) == size * clients * (2 * rounds + 1)


def test_i9_the_size_of_messages_does_not_depend_on_own_columns(tmp_path: Path) -> None:
    sizes = set()
    for clients in (2, 4):  # twice the clients: half the own columns, the same common ones
        execute(config(clients=clients), tmp_path / str(clients), local_engine)
        ledger = [e for e in read_events(tmp_path / str(clients)) if isinstance(e, Message)]
        sizes.add(frozenset(e.payload for e in ledger if e.kind == "Fit"))
    assert len(sizes) == 1


def test_i10_the_scenario_deals_every_column_once_and_shares_the_test_rows() -> None:
    made = parts(config(clients=4))
    holdings = [made.scenario.holdings[id][0] for id in made.scenario.clients]
    own = [set(h.own.tolist()) for h in holdings]
    pieces = [set(made.scenario.common.tolist()), *own]
    assert sum(map(len, pieces)) == len(set().union(*pieces)) == made.dataset.x.shape[1]
    assert max(map(len, own)) - min(map(len, own)) <= 1
    tests = [made.scenario.tests[id][0].tolist() for id in made.scenario.clients]
    assert all(test == tests[0] for test in tests)
    rows = [set(part.tolist()) for h in holdings for part in (h.train, h.valid)] + [set(tests[0])]
    assert sum(map(len, rows)) == len(set().union(*rows))


@pytest.mark.parametrize("name", ["lateral1", "lateral3", "weight0"])
def test_i11_gradients_of_the_second_column_match_finite_differences(name: str) -> None:
    one = client(dtype="float64", variants=["mu>0"])
    batch = batch_of(one, 8)
    tensor = one.weights[f"unique/{name}"]
    tensor.requires_grad_(True)
    (gradient,) = torch.autograd.grad(joint_loss(one, one.weights, batch), [tensor])
    tensor.requires_grad_(False)
    step = 1e-6
    for place in [(1, 0, 0), (1, 2, 1), (2, 3, 2)]:
        kept = tensor[place].item()
        losses = []
        for sign in (1, -1):
            tensor[place] = kept + sign * step
            losses.append(float(joint_loss(one, one.weights, batch)))
        tensor[place] = kept
        assert abs((losses[0] - losses[1]) / (2 * step) - float(gradient[place])) < 1e-7


def test_i12_twice_the_mu_and_half_the_lateral_weights_is_the_same_model() -> None:
    one = client()
    model, rows = _member(one, 1), batch_of(one)
    other = {n: w / 2 if "lateral" in n else w for n, w in model.items()}
    other["mu"] = model["mu"] * 2
    assert torch.equal(one.predict(model, rows), one.predict(other, rows))


def test_i13_concatenation_reads_own_columns_and_what_column_one_says() -> None:
    one = client()
    own, classes = one.site.inputs(own=True)[0] - one.site.inputs()[0], len(one.site.classes)
    assert one.weights["concat/weight0"].shape[1] == own + classes
    rows = batch_of(one)
    model = {n: w for n, w in one.weights.items() if n.startswith(("common/", "concat/"))}
    deaf = dict(model)
    deaf["concat/weight0"] = model["concat/weight0"].clone()
    deaf["concat/weight0"][:, :classes] = 0
    alone = without("concat", deaf)
    alone["weight0"] = alone["weight0"][:, classes:]
    torch.testing.assert_close(one.predict(deaf, rows), outputs(alone, rows.own, one.depth)[-1])
    assert not torch.allclose(one.predict(model, rows), one.predict(deaf, rows))


@pytest.mark.parametrize(
    ("columns", "classes", "count"),
    [(16, 7, 173_831), (14, 11, 173_323), (38, 1000, 313_192), (8, 100, 181_732), (16, 4, 173_444)],
)
def test_i14_column_one_has_the_specified_number_of_weights(
    columns: int, classes: int, count: int
) -> None:
    model = MLP((columns,), (512, 256, 128), classes, Stream.of(0))
    assert sum(w.numel() for w in model.parameters()) == count
    assert len(list(model.parameters())) == 8


def test_i15_a_set_of_columns_scores_as_its_complement() -> None:
    matrix = correlation(np.random.default_rng(0).normal(size=(40, 6)))
    sets, scores = scores_of_sets(matrix, 2)
    others, other_scores = scores_of_sets(matrix, 4)
    by_set = {tuple(s): score for s, score in zip(others.tolist(), other_scores, strict=True)}
    for chosen, score in zip(sets.tolist(), scores, strict=True):
        rest = [i for i in range(6) if i not in chosen]
        assert score == pytest.approx(sum(matrix[i, j] for i in chosen for j in rest))
        assert score == pytest.approx(by_set[tuple(rest)])
    assert len(sets) == 15
    extremes = common_sets(matrix, 2, count=1)
    assert extremes["maximum"][0].tolist() == sets[scores.argmax()].tolist()
    assert extremes["minimum"][0].tolist() == sets[scores.argmin()].tolist()


@pytest.mark.numerics
def test_a_round_that_is_as_good_as_the_best_gains_nothing() -> None:
    """Means of 0.1 and 0.7 and of 0.4 and 0.4 are equal, though their sums are rounded apart."""
    server = parts(config()).server()
    for first, second, gained in ((1, 7, True), (4, 4, False), (4, 5, True)):
        told = {
            id: chfl.Settled(10, dict.fromkeys(server.variants, hits))
            for id, hits in (("site-0", first), ("site-1", second))
        }
        server._compare(told)
        assert server.keep.tolist() == [gained] * len(server.variants)


@pytest.mark.numerics
def test_i15_constant_columns_correlate_with_nothing_also_when_their_mean_is_rounded() -> None:
    x = np.random.default_rng(0).normal(size=(50, 4))
    x[:, 1], x[:, 3] = 0.1, 0.7
    assert not correlation(x)[[1, 3]].any()


@pytest.mark.numerics
def test_i15_of_sets_with_equal_scores_the_first_comes_first() -> None:
    """Half of the columns score as the other half, whatever the last digit says."""
    for seed in range(5):
        matrix = correlation(np.random.default_rng(seed).normal(size=(40, 8)))
        for name, sets in common_sets(matrix, 4, count=2).items():
            first, second = (set(chosen) for chosen in sets.tolist())
            assert name == "median" or first == set(range(8)) - second
            assert name == "median" or 0 in first


def test_i15_there_are_2220075_sets_of_eight_of_27_columns() -> None:
    assert len(scores_of_sets(np.eye(27), 8)[0]) == 2_220_075


def test_i16_a_client_saved_and_reloaded_goes_on_as_if_nothing_had_been() -> None:
    made = parts(config())
    request = chfl.Fit(made.server().weights, [])
    kept, other = made.client("site-1"), made.client("site-1")
    for one in (kept, other):
        perform(one.fit(request, Moment(0, 0, 3)))
    reloaded = made.client("site-1")
    reloaded.restore({name: tensor.clone() for name, tensor in other.state().items()})
    again = chfl.Fit(request.weights, ["common", "auto"])
    for number in (1, 2):
        moment = Moment(0, number, 3)
        reply, same = (perform(each.fit(again, moment)) for each in (kept, reloaded))
        assert equal(reply.weights, same.weights)
        assert reply.valid == same.valid
        assert equal(kept.state(), reloaded.state())


def sanity(rule: str, tmp_path: Path) -> dict[str, float]:
    """Test accuracy of each variant when the labels follow a rule."""
    found = config(
        data={"name": "synthetic-table", "rows": 3000, "columns": 12, "classes": 2, "rule": rule},
        scenario={"split": "columns", "clients": 2, "common": list(range(6))},
        rounds=12, epochs=4, batch=64, model={"widths": [32, 16, 8]}, rate=0.005, mu=[0.3, 1.0],
    )  # fmt: skip
    execute(found, tmp_path, local_engine)
    events = read_events(tmp_path)
    return {v: metrics.summary(events, v)["final_accuracy"] for v in metrics.variants(events)}


def test_i17_where_labels_need_both_blocks_together_laterals_help(tmp_path: Path) -> None:
    accuracy = sanity("interaction", tmp_path)
    assert accuracy["mu>0"] > accuracy["mu=0"] + 0.02
    assert accuracy["mu>0"] > accuracy["common"] + 0.05


def test_i17_where_labels_need_the_common_block_alone_nothing_is_lost(tmp_path: Path) -> None:
    accuracy = sanity("common", tmp_path)
    assert accuracy["common"] > 0.8
    assert abs(accuracy["auto"] - accuracy["common"]) < 0.03


def test_i17_where_labels_need_the_own_block_alone_it_is_found(tmp_path: Path) -> None:
    accuracy = sanity("unique", tmp_path)
    assert accuracy["auto"] > accuracy["common"] + 0.1
    assert accuracy["auto"] > accuracy["local"] - 0.04


def candidates(one: Any) -> dict[str, Tensors]:
    """The models of a client's last round, by variant."""
    source = one.candidate
    said = {n.replace("said/", "common/"): w for n, w in source.items() if n.startswith("said/")}
    found = {"common": {n: w for n, w in source.items() if n.startswith("common/")}}
    found["concat"] = said | {n: w for n, w in source.items() if n.startswith("concat/")}
    for variant, member in one.chosen.items():
        bank = {n: w[member] for n, w in source.items() if n.startswith("unique/")}
        found[variant] = {**said, **bank, "mu": one.weights["mu"][member, 0, 0]}
    return found


def test_validation_chooses_mu_for_each_client_and_zero_is_not_among_the_positive() -> None:
    made = parts(config())
    _, engine = trajectory(made)
    for id in made.scenario.clients:
        one = engine._clients[id]
        assert float(candidates(one)["mu=0"]["mu"]) == 0
        assert round(float(candidates(one)["mu>0"]["mu"]), 6) in (0.1, 1.0)


def test_a_kept_model_is_the_one_of_its_best_round_not_of_the_last(tmp_path: Path) -> None:
    """The server keeps what gained on validation rows; a client's copy does not move afterwards."""
    made = parts(config(rounds=6))
    server, engine = made.server(), LocalEngine(made)
    best: dict[str, float] = {}
    snapshots: dict[str, Tensors] = {}
    for number in range(6):
        moment = Moment(0, number, 6)
        notes = server.round(Clients(made.scenario.clients, engine, moment), moment)
        for variant in ("common", "mu=0", "mu>0", "concat", "auto"):
            valid = notes.get(f"valid {variant}", -1.0)
            if number and valid > best.get(variant, -1.0):
                best[variant] = valid
                candidate = candidates(engine._clients["site-0"])[variant]
                snapshots[variant] = {n: w.clone() for n, w in candidate.items()}
    moment = Moment(0, 5, 6)
    server.evaluate(Clients(made.scenario.clients, engine, moment), moment)
    kept = engine._clients["site-0"].best
    final = candidates(engine._clients["site-0"])
    judged = dict(zip(server.variants, server.best.tolist(), strict=True))
    for variant, snapshot in snapshots.items():
        gained = judged[variant] > best[variant]  # the last round, which only the test judges
        assert equal(kept[variant], final[variant] if gained else snapshot)
        assert judged[variant] >= best[variant]
    assert any(judged[v] == best[v] for v in snapshots)  # else the last round is always the best


def test_without_validation_rows_the_last_round_is_kept_and_mu_is_0(tmp_path: Path) -> None:
    """Nothing can be judged then: not the strength, not the round, not when to end."""
    made = parts(config(**{"scenario.valid": 0.0, "rounds": 3, "method.patience": 1}))
    server, engine = made.server(), LocalEngine(made)
    for number in range(3):
        moment = Moment(0, number, 3)
        notes = server.round(Clients(made.scenario.clients, engine, moment), moment)
        assert not notes["finished"]
    server.evaluate(Clients(made.scenario.clients, engine, moment), moment)
    one = engine._clients["site-0"]
    for variant in server.variants:
        assert equal(one.best[variant], candidates(one)[variant])
    assert float(one.best["auto"]["mu"]) == 0


def test_local_sends_nothing_and_chooses_for_itself(tmp_path: Path) -> None:
    execute(config(variants=["local", "common"]), tmp_path, local_engine)
    events = read_events(tmp_path)
    assert metrics.variants(events) == ["common", "local"]
    text = (tmp_path / "events.jsonl").read_text()
    assert "valid local" not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_common": "local"}, {"concat_input": "logit"}, {"common_opt_state": "keep"},
        {"lateral_source": "round_start"}, {"u_init": "zeros"}, {"select": "last"},
    ],
)  # fmt: skip
def test_every_option_changes_the_run(changes: dict[str, Any], tmp_path: Path) -> None:
    execute(config(rounds=4), tmp_path / "plain", local_engine)
    execute(config(rounds=4, **changes), tmp_path / "changed", local_engine)
    states = [(tmp_path / p / "checkpoint.safetensors").read_bytes() for p in ("plain", "changed")]
    assert states[0] != states[1]
    assert (tmp_path / "changed" / "result.json").exists()


def test_clients_of_unequal_size_count_equally_unless_rows_are_asked_for() -> None:
    items = [{"a": torch.tensor([0.0])}, {"a": torch.tensor([4.0])}]
    assert mean(items)["a"].item() == 2
    assert mean(items, [3, 1])["a"].item() == 1


def test_a_stage_ends_when_nothing_has_gained_for_as_long_as_patience_says(tmp_path: Path) -> None:
    execute(config(rounds=12, patience=3, rate=1e-12), tmp_path, local_engine)
    (stage,) = [event for event in read_events(tmp_path) if isinstance(event, Stage)]
    assert stage.rounds == 5  # the first gains over nothing, three do not, judged one round later


def test_testing_in_between_does_not_change_the_run(tmp_path: Path) -> None:
    """`score_every` tests more often; what is learned, kept and when it ends stays the same."""
    for every in (0, 1):
        changes = {"rounds": 8, "patience": 2, "rate": 0.02, "score_every": every}
        execute(config(**changes), tmp_path / str(every), local_engine)
    plain, often = (read_events(tmp_path / str(every)) for every in (0, 1))
    last = max(e.round for e in plain if isinstance(e, Score))
    assert [e for e in plain if isinstance(e, Score)] == [
        e for e in often if isinstance(e, Score) and e.round == last
    ]
    assert [e for e in plain if isinstance(e, Stage)] == [e for e in often if isinstance(e, Stage)]


@pytest.mark.parametrize("changes", [{"mu": []}, {"mu": [0.0]}, {"mu": [2.0]}, {"variants": []}])
def test_strengths_and_variants_that_mean_nothing_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot be"):
        config(**changes)
