"""The bounds of a contract one by one: options, rows, steps, weights, moments, budgets, words."""

import dataclasses
import hashlib
import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from atoll.cli import app
from atoll.core.errors import UserError
from atoll.core.federation import Moment
from atoll.core.messages import Check, Empty, Tensors, Weights, pack, unpack
from atoll.engines.network import egress, ranges
from atoll.engines.network.audit import plain_step, shown_rows, singling_units
from atoll.engines.network.bounds import Trail
from atoll.engines.network.contract import Contract, RefusedError, SiteFile
from atoll.engines.network.drafts import drafted_contract, drafted_file, written
from atoll.engines.network.explain import explained, loose_terms, warnings
from atoll.engines.network.policy import Gate
from atoll.engines.network.steps import fewest_rows, refused_counts, unfit
from atoll.families import averaging
from atoll.families.vertical import Embed, Learn
from atoll.methods import chfl, fedavg
from atoll.runs.config import EngineOptions, RunConfig, change, resolve, to_toml
from atoll.runs.parts import parts

TERMS = {"methods": ["alone", "chfl", "fedavg", "splitnn"],
         "actions": ["fit", "check", "settle", "learn"]}  # fmt: skip


def config(method: str = "fedavg", **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "data": "wine", "rounds": 6, "clients": 3, "engine.mode": "loop", "threads": 1,
    }  # fmt: skip
    values |= {} if method == "splitnn" else {"widths": [8], "epochs": 2}
    return resolve(change({"method": method}, values | changes), "test")


def gate(folder: Path, run: str = "run-1", method: str = "fedavg", **terms: Any) -> Gate:
    made = Gate(SiteFile(store=str(folder / "store"), contract={**TERMS, **terms}))
    made.prepare(run, to_toml(config(method)), "site-1")
    return made


def log(folder: Path) -> list[egress.Line]:
    """What was written down of a method's questions, and what was refused."""
    found = egress.lines(folder / "store" / "egress.jsonl")
    return [line for line in found if line.action != "prepare" or not line.bytes]


def first(made: Gate) -> Tensors:
    return {n: w.clone() for n, w in made._client.site.model().state_dict().items()}


def fit(made: Gate, number: int, weights: Tensors, stage: int = 0) -> Tensors:
    """The round with this number of `fedavg`."""
    packet = made.handle(number + 1, "fit", Moment(stage, number, 6), pack(Weights(weights)))
    found: Tensors = unpack(packet, averaging.Fitted, "site-1").weights
    return found


# Options


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("analytic", {"width": 100_000}, "'method.width' = 100000: the contract allows at least 1"),
        ("analytic", {"floor": 1}, "'method.floor' = 1: the contract allows at least 10"),
        ("analytic", {"projection": 1}, "'method.projection' = 1"),
        ("analytic", {"bits": 0}, "'method.bits' = 0: the contract allows at least 1"),
        ("fot", {"floor": 1, "widths": [8]}, "'method.floor' = 1"),
        ("target", {"synthetic": 10**9, "widths": [8]}, "'method.synthetic' = 1000000000"),
        ("target", {"latent": 10**9, "widths": [8]}, "'method.latent' = 1000000000"),
        ("fedseit", {"data": "synthetic-text", "least_cluster": 1}, "'method.least_cluster' = 1"),
    ],
)
def test_sizes_and_floors_of_later_methods_have_limits_too(
    method: str, changes: dict[str, Any], words: str
) -> None:
    run = resolve(change({"method": method}, {"data": "wine", **changes}), "test")
    assert words in ranges.violation({}, run)
    usual = resolve(change({"method": method}, {"data": run.data["name"]}), "test")
    assert ranges.violation({}, usual) == ""
    own = {method: {"rounds": {"least": 1, "most": 200}}}
    assert "the contract allows" in ranges.violation(own, run)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float64"}, '\'dtype\' = "float64": the contract allows "float32"'),
        ({"scale": "none"}, '\'scale\' = "none": the contract allows "local" or "global"'),
        ({"rate": 1e7}, "'method.rate' = 10000000.0: the contract allows at least 0.0 and at most"),
        ({"batch": 10**6}, "'method.batch' = 1000000: the contract allows at least 8 and at most"),
        ({"batch": 1}, "'method.batch' = 1: the contract allows at least 8"),
        ({"epochs": 51}, "'method.epochs' = 51"),
        ({"optimiser": "sgd"}, '\'method.optimiser\' = "sgd": the contract allows "adam"'),
        ({"widths": [8, 4096]}, r"'model.widths' = \[8, 4096\]"),
        ({"rounds": 201}, "'rounds' = 201"),
        ({"seed": 100}, "'seed' = 100"),
        ({"scenario.train": 0.1}, "'scenario.train' = 0.1"),
        ({"threads": 1024}, "'engine.threads' = 1024: the contract allows at least 0 and at most"),
    ],
)
def test_an_option_outside_of_default_limits_is_refused_and_logged(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    made = Gate(SiteFile(store=str(tmp_path / "store"), contract=TERMS))
    with pytest.raises(RefusedError, match=words):
        made.prepare("run-1", to_toml(config(**changes)), "site-1")
    (line,) = log(tmp_path)
    assert line.words.startswith("refused 'prepare': option ")
    with pytest.raises(RefusedError, match="no run has been prepared"):
        made.handle(1, "fit", Moment(0, 0, 6), pack(Empty()))


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": 0.002}, {"batch": 32}, {"epochs": 3}, {"widths": [9]}, {"rounds": 7},
        {"seed": 1}, {"scenario.train": 0.5}, {"clients": 4}, {"cohort": 2}, {"scale": "local"},
        {"penalty": "proximal"}, {"data.name": "digits-table"}, {"threads": 2},
        {"engine.device": "cuda"}, {"attribution": True}, {"score_every": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_drafted_contract_allows_its_run_and_no_other_options(changes: dict[str, Any]) -> None:
    options = drafted_contract(config()).options
    assert ranges.violation(options, config()) == ""
    assert ranges.violation(options, config(rounds=3)) == ""
    name = next(iter(changes)).split(".")[-1]
    assert f"{name}'" in ranges.violation(options, config(**changes))


def test_every_option_of_a_run_is_limited_or_has_no_effect_at_a_site() -> None:
    """An option that is added to the config fails here until somebody decides what it may do."""
    limited = {*ranges.PLAIN, *ranges.TABLES, "data", "engine"}
    assert {name.partition(".")[0] for name in ranges.values_of(config())} == limited - {"public"}
    every = {field.name for field in dataclasses.fields(RunConfig)}
    assert limited | set(ranges.COORDINATORS) == every
    assert limited.isdisjoint(ranges.COORDINATORS)
    engine = {field.name for field in dataclasses.fields(EngineOptions)}
    no_effect = {"name", "mode", "streams", "packing", "tf32", "tune", "deterministic", "verify"}
    refused = {"keep"}  # a folder of the site's machine
    assert engine == {*ranges.ENGINE} | no_effect | refused


def test_a_sites_own_engine_is_its_own_business(tmp_path: Path) -> None:
    """What its own file sets is neither limited nor changed by a run."""
    terms = {**TERMS, "options": drafted_contract(config()).options}
    site = SiteFile(store=str(tmp_path / "store"), engine={"threads": 2}, contract=terms)
    made, before = Gate(site), torch.get_num_threads()
    try:
        made.prepare("run-1", to_toml(config()), "site-1")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_threads_outside_of_the_contract_are_never_set(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    made = Gate(SiteFile(store=str(tmp_path / "store"), contract=TERMS))
    with pytest.raises(RefusedError, match=r"engine\.threads"):
        made.prepare("run-1", to_toml(config(threads=1024)), "site-1")
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "changes", [{"epochs": 1}, {"batch": 4}, {"rate": 0.05}, {"optimiser": "sgd", "rate": 5.0}]
)
def test_no_term_of_a_draft_is_looser_than_by_default(changes: dict[str, Any]) -> None:
    """A run that needs a looser term is refused until the site's owner loosens it knowingly."""
    assert list(loose_terms(drafted_contract(config(**changes)))) == []


def test_a_drafted_file_is_one_that_can_be_read(tmp_path: Path) -> None:
    for run in (config(), config("chfl"), config("splitnn"), None):
        values = tomllib.loads(drafted_file(run))
        if run:
            assert SiteFile(contract=values["contract"]).terms() == drafted_contract(run)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fedavgg": {}}, "limits for 'fedavgg'"),
        ({"fedavg": {"method.rat": 1}}, "unknown option 'method.rat'"),
        ({"fedavg": {"method.rate": {"atmost": 1}}}, "not a limit"),
        ({"fedavg": {"method.rate": {"most": "a"}}}, "not a limit"),
        ({"fedavg": {"method.rate": {"one_of": 1}}}, "not a limit"),
    ],
)
def test_a_limit_that_means_nothing_is_found_at_once(options: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        SiteFile(contract={**TERMS, "options": options}).terms()


# Rows and steps


@pytest.fixture
def unforeseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose training the site does not foresee: it sees each piece of work when it comes."""
    monkeypatch.setattr("atoll.engines.network.policy.unfit", lambda *_: "")


@pytest.mark.usefixtures("unforeseen")
@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"step_rows": 36}, "35 rows in a step; the contract wants at least 36"),
        ({"steps": 3}, "2 steps behind an answer; the contract wants at least 3"),
        ({"epochs_in_all": 1}, "more than 1 epochs on this data"),
    ],
)
def test_work_with_less_than_the_contract_wants_is_refused(
    terms: dict[str, Any], words: str, tmp_path: Path
) -> None:
    made = gate(tmp_path, **terms)
    with pytest.raises(RefusedError, match=words):
        fit(made, 0, first(made))
    assert words in log(tmp_path)[-1].words


@pytest.mark.usefixtures("unforeseen")
@pytest.mark.parametrize(("batch", "rest"), [(34, 1), (32, 3), (28, 7), (9, 8), (16, 3)])
def test_the_last_step_of_an_epoch_has_enough_rows_too(
    batch: int, rest: int, tmp_path: Path
) -> None:
    """35 rows: a last batch of one row is that row, and the coordinator knows the order."""
    made = Gate(SiteFile(store=str(tmp_path / "store"), contract=TERMS))
    made.prepare("run-1", to_toml(config(batch=batch)), "site-1")
    if rest >= 8:
        fit(made, 0, first(made))
        return
    with pytest.raises(RefusedError, match=f"{rest} rows in the last step .* at least 8"):
        fit(made, 0, first(made))


@pytest.mark.usefixtures("unforeseen")
@pytest.mark.parametrize(("epochs", "terms"), [(1, {}), (2, {}), (3, {}), (1, {"steps": 1})])
def test_an_update_of_parts_of_the_rows_has_five_steps(
    epochs: int, terms: dict[str, Any], tmp_path: Path
) -> None:
    """35 rows in two steps of 24 and 11: a few steps on known parts give the parts away."""
    made = Gate(SiteFile(store=str(tmp_path / "store"), contract={**TERMS, **terms}))
    made.prepare("run-1", to_toml(config(batch=24, epochs=epochs)), "site-1")
    if epochs == 3 or terms:
        fit(made, 0, first(made))
        return
    with pytest.raises(RefusedError, match=f"{2 * epochs} steps on parts of the rows .* least 5"):
        fit(made, 0, first(made))


@pytest.mark.parametrize(
    ("changes", "terms", "words"),
    [
        ({"epochs": 1}, {}, "1 steps behind an answer; the contract wants at least 2"),
        ({"batch": 24}, {}, "4 steps on parts of the rows behind an answer; the .* at least 5"),
        ({"batch": 34}, {}, "1 rows in the last step of an epoch; the contract .* at least 8"),
        ({"batch": 8, "epochs": 9}, {"step_rows": 9}, "8 rows in a step; the .* at least 9"),
        ({"epochs": 3}, {"steps": 4}, "3 steps behind an answer; the contract wants at least 4"),
    ],
)
def test_training_that_would_be_refused_is_refused_before_a_run_begins(
    changes: dict[str, Any], terms: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """The refusal names a batch size and a number of epochs with which the run can be done."""
    made = Gate(SiteFile(store=str(tmp_path / "store"), contract={**TERMS, **terms}))
    with pytest.raises(RefusedError, match=f"{words}, at stage 1 of 35 rows") as caught:
        made.prepare("run-1", to_toml(config(**changes)), "site-1")
    assert str(caught.value) in log(tmp_path)[-1].words
    named = re.search(r"method.batch = (\d+) with method.epochs = (\d+) fits", str(caught.value))
    assert named
    batch, epochs = map(int, named.groups())
    made.prepare("run-1", to_toml(config(batch=batch, epochs=epochs)), "site-1")
    fit(made, 0, first(made))


@pytest.mark.parametrize("split", ["rows", "classes"])
def test_a_site_foresees_what_it_would_refuse_in_training(split: str, tmp_path: Path) -> None:
    """At all stages, with every batch size; the work itself is looked at all the same."""
    refused = set[bool]()
    for batch in range(8, 38, 3):
        run = config(batch=batch, split=split, epochs=2)
        made = Gate(SiteFile(store=str(tmp_path / str(batch)), contract=TERMS))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("atoll.engines.network.policy.unfit", lambda *_: "")
            made.prepare("run-1", to_toml(run), "site-1")
        foreseen = unfit(made._known, "site-1", made.terms)
        assert bool(foreseen) == (not all(_trains(made, stage) for stage in _stages(made)))
        refused.add(bool(foreseen))
    assert refused == {True, False}


def _stages(made: Gate) -> list[int]:
    """The stages that have training rows of the site."""
    held = made._known.scenario.holdings["site-1"]
    return [stage for stage, rows in enumerate(held) if len(rows.train)]


def _trains(made: Gate, stage: int) -> bool:
    """Whether the site takes the work of a stage's first round."""
    bounds, moment = made._checked, Moment(stage, 0, 6)
    bounds.begin(moment, fedavg.Client.fit)
    working = made._client.fit(Weights(first(made)), moment)
    try:
        bounds.on_job(next(working))
    except RefusedError:
        return False
    return True


def test_row_counts_that_a_run_cannot_be_done_with() -> None:
    """Those are what `unfit` refuses, as ranges."""
    run, terms = config(batch=64, epochs=2), Contract()
    assert refused_counts(run, terms, 200) == [(65, 135), (193, 199)]
    assert refused_counts(config(batch=64, epochs=5), terms, 100) == [(65, 71)]
    assert refused_counts(config(batch=200), terms, 200) == []
    assert refused_counts(config("splitnn"), terms, 200) == []


def test_no_unit_shrinks_so_far_that_one_step_turns_it(tmp_path: Path) -> None:
    made = gate(tmp_path)
    weights = first(made)
    fit(made, 0, weights)
    small = {**weights, "weight0": weights["weight0"].clone()}
    small["weight0"][0] *= 0.11
    fit(made, 1, small)
    small["weight0"][0] *= 0.9
    with pytest.raises(RefusedError, match="'weight0' have almost vanished"):
        fit(made, 2, small)


@pytest.mark.parametrize(
    ("sizes", "fewest"),
    [([50], 50), ([49, 1], 1), ([8] * 15 + [1], 1), ([8] * 16 + [1], 8), ([8] * 16 + [8], 8)],
)
def test_a_small_last_step_may_stand_beside_sixteen_full_ones(
    sizes: list[int], fewest: int
) -> None:
    assert fewest_rows(sizes) == fewest


def test_a_site_with_too_few_rows_takes_no_part(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="35 training rows at stage 1; the contract wants 36"):
        gate(tmp_path, rows=36)


# Weights


def test_the_first_weights_are_derived_here_bit_for_bit(tmp_path: Path) -> None:
    made = gate(tmp_path)
    weights = first(made)
    weights["bias0"][0] = weights["bias0"][0].nextafter(torch.tensor(9.0))
    with pytest.raises(RefusedError, match="the first weights are not those"):
        fit(made, 0, weights)
    fit(made, 0, first(made))
    any_weights = gate(tmp_path, "run-2", initial_weights="any")
    fit(any_weights, 0, weights)


def moved(weights: Tensors, name: str, by: float) -> Tensors:
    tensor = weights[name]
    return {**weights, name: tensor + by * tensor.norm() * torch.ones_like(tensor)
            / tensor.numel() ** 0.5}  # fmt: skip


def test_later_weights_stay_near_those_that_came_before(tmp_path: Path) -> None:
    made = gate(tmp_path, unit_rows=1)
    back = fit(made, 0, first(made))
    with pytest.raises(RefusedError, match=r"'weight0' moved by .* the contract allows 0.5"):
        fit(made, 1, moved(first(made), "weight0", 0.6))
    with pytest.raises(RefusedError, match="another network"):
        fit(made, 1, {**back, "more": back["bias0"]})
    with pytest.raises(RefusedError, match="another network"):
        fit(made, 1, {**back, "bias0": back["bias0"].double()})
    fit(made, 1, moved(first(made), "weight0", 0.4))


def test_two_own_updates_are_near_in_any_case(tmp_path: Path) -> None:
    made = gate(tmp_path, move=1e-6, unit_rows=1)
    weights = first(made)
    back = fit(made, 0, weights)
    far = {n: w + 2.2 * (back[n] - w) for n, w in weights.items()}
    with pytest.raises(RefusedError, match="moved by"):
        fit(made, 1, far)
    fit(made, 1, {n: w + 1.9 * (back[n] - w) for n, w in weights.items()})


def test_all_moves_together_have_a_limit(tmp_path: Path) -> None:
    made = gate(tmp_path, drift=0.7, unit_rows=1)
    weights = first(made)
    fit(made, 0, weights)
    fit(made, 1, moved(weights, "weight1", 0.45))
    with pytest.raises(RefusedError, match="norms from the first"):
        fit(made, 2, moved(weights, "weight1", 0.9))


def test_a_short_vector_that_begins_small_may_grow_to_the_size_of_the_others(
    tmp_path: Path,
) -> None:
    """The first values of a bias may happen to be tiny; long honest runs move it far from them."""
    bounds = gate(tmp_path)._bounds
    assert bounds is not None
    tiny = torch.full((2,), 1e-3)
    bounds._drifts("bias", torch.full((2,), 4.9), tiny, usual=0.1)
    for key, new, first in (
        ("bias", torch.full((2,), 5.1), tiny),
        ("weight", torch.full((2, 2), 0.1), torch.full((2, 2), 1e-3)),
    ):
        with pytest.raises(RefusedError, match=f"'{key}' are .* norms from the first"):
            bounds._drifts(key, new, first, usual=0.1)


def test_weights_do_not_vanish(tmp_path: Path) -> None:
    made = gate(tmp_path, move=2, unit_rows=1)
    weights = first(made)
    fit(made, 0, weights)
    with pytest.raises(RefusedError, match="'weight1' have almost vanished"):
        fit(made, 1, {**weights, "weight1": weights["weight1"] * 0.05})


def test_a_test_is_bound_by_the_same_weights(tmp_path: Path) -> None:
    made = gate(tmp_path)
    weights = first(made)
    made.handle(1, "check", Moment(0, 0, 6), pack(Check(0, weights)))
    far = {n: w * 0 for n, w in weights.items()}
    with pytest.raises(RefusedError, match="moved by"):
        made.handle(2, "check", Moment(0, 0, 6), pack(Check(0, far)))


def test_tests_move_nothing_and_one_round_is_tested_with_one_set(tmp_path: Path) -> None:
    made = gate(tmp_path)
    weights = first(made)
    fit(made, 0, weights)
    near = moved(weights, "weight0", 0.4)

    def check(number: int, weights: Tensors, round: int = 0) -> None:
        made.handle(number, "check", Moment(0, round, 6), pack(Check(0, weights)))

    check(2, near)
    check(3, near)
    with pytest.raises(RefusedError, match="other weights for a second test in one round"):
        check(4, moved(weights, "weight0", 0.3))
    with pytest.raises(RefusedError, match="moved by"):
        check(5, moved(weights, "weight0", 0.8), 1)
    fit(made, 5, near)


def test_where_a_run_stands_outlives_the_process(tmp_path: Path) -> None:
    made = gate(tmp_path)
    weights = first(made)
    back = fit(made, 0, weights)
    made.keep("0-1")
    again = gate(tmp_path)
    with pytest.raises(RefusedError, match="goes on from its last checkpoint"):
        fit(again, 1, back)
    assert again.restore("0-1")
    with pytest.raises(RefusedError, match="moved by"):
        fit(again, 1, moved(weights, "weight0", 3.0))
    fit(again, 1, back)


def test_a_run_that_died_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    made = gate(tmp_path)
    one = fit(made, 0, first(made))
    again = gate(tmp_path)
    two = fit(again, 0, first(again))
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_one_round_has_one_update(tmp_path: Path) -> None:
    made = gate(tmp_path)
    back = fit(made, 2, first(made))
    for number in (1, 2):
        with pytest.raises(RefusedError, match="a second update of one round"):
            made.handle(4 + number, "fit", Moment(0, number, 6), pack(Weights(back)))


def test_a_round_that_comes_again_after_a_restore_has_the_same_weights(tmp_path: Path) -> None:
    """The site went back to an earlier place, so its own memory of the round is gone."""
    made = gate(tmp_path)
    back = fit(made, 0, first(made))
    made.keep("0-1")
    one = fit(made, 1, back)
    spent = made.egress.spent("wine").rounds
    other = moved(back, "weight0", 0.1)
    for renewed in (False, True):  # in the same process, and in a new one
        again = gate(tmp_path) if renewed else made
        again.restore("0-1")
        for number, weights in ((3, other), (4, first(made))):
            with pytest.raises(RefusedError, match="had other weights when it came first"):
                again.handle(number, "fit", Moment(0, 1, 6), pack(Weights(weights)))
        reply = again.handle(5, "fit", Moment(0, 1, 6), pack(Weights(back)))
        two: Tensors = unpack(reply, averaging.Fitted, "site-1").weights
        assert all(torch.equal(one[n], two[n]) for n in one)
    assert again.egress.spent("wine").rounds == spent + 2
    assert sum("had other weights" in line.words for line in log(tmp_path)) == 4


def test_a_run_that_begins_again_has_the_same_weights_in_every_round(tmp_path: Path) -> None:
    made = gate(tmp_path)
    fit(made, 1, fit(made, 0, first(made)))
    again = gate(tmp_path)
    back = fit(again, 0, first(again))
    with pytest.raises(RefusedError, match="round 2 of stage 1 had other weights"):
        fit(again, 1, moved(back, "weight0", 0.1))
    fit(again, 1, back)


def test_a_test_that_comes_again_after_a_restore_has_the_same_weights(tmp_path: Path) -> None:
    made = gate(tmp_path)
    back = fit(made, 0, first(made))
    made.keep("0-1")
    packet = pack(Check(0, back))
    made.handle(7, "check", Moment(0, 1, 6), packet)
    made.restore("0-1")
    with pytest.raises(RefusedError, match="had other weights when it came first"):
        made.handle(8, "check", Moment(0, 1, 6), pack(Check(0, moved(back, "weight0", 0.1))))
    made.handle(9, "check", Moment(0, 1, 6), packet)


def test_a_contract_may_allow_some_answers_again_with_other_weights(tmp_path: Path) -> None:
    """As a run with fewer sites needs that goes on after one of them was lost."""
    made = gate(tmp_path, repeats=1)
    back = fit(made, 0, first(made))
    made.keep("0-1")
    fit(made, 1, back)
    for by in (0.1, 0.2):
        made.restore("0-1")
        made._last = None
        if by == 0.1:
            fit(made, 1, moved(back, "weight0", by))
        else:
            with pytest.raises(RefusedError, match="had other weights when it came first"):
                fit(made, 1, moved(back, "weight0", by))
    fit(made, 1, back)


def test_a_damaged_list_of_answers_is_told(tmp_path: Path) -> None:
    made = gate(tmp_path)
    fit(made, 0, first(made))
    (tmp_path / "store" / "run-1" / "answered.json").write_text("{")
    with pytest.raises(UserError, match="the list of answered rounds is damaged"):
        gate(tmp_path)


def test_a_run_keeps_its_config(tmp_path: Path) -> None:
    made = gate(tmp_path)
    with pytest.raises(RefusedError, match="with another config"):
        made.prepare("run-1", to_toml(config(seed=1)), "site-1")


def test_a_damaged_trail_is_told(tmp_path: Path) -> None:
    made = gate(tmp_path)
    fit(made, 0, first(made))
    (tmp_path / "store" / "run-1" / "shared.safetensors").write_bytes(b"damage")
    with pytest.raises(UserError, match="the record of shared weights is damaged"):
        gate(tmp_path)


def test_a_trail_is_read_as_it_was_written(tmp_path: Path) -> None:
    weights = {"a/b": torch.ones(2), "c": torch.zeros(1)}
    trail = Trail({"own": weights}, {"shared": weights}, (1, 2), {"0-loss": 5},
                  {"shared": {"a/b": 0.5}}, {"shared": (0, 1, 2**55 + 1)})  # fmt: skip
    trail.write(tmp_path / "trail")
    again = Trail.read(tmp_path / "trail")
    assert (again.place, again.steps, again.reach) == ((1, 2), {"0-loss": 5}, trail.reach)
    assert again.tested == trail.tested
    for one, two in ((again.first["own"], weights), (again.last["shared"], weights)):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[n], two[n]) for n in one)


def test_moments_that_were_forgotten_are_refused(tmp_path: Path) -> None:
    made = gate(tmp_path, method="chfl")
    weights = first(made)

    def one(number: int) -> None:
        made.handle(number + 1, "fit", Moment(0, number, 6), pack(chfl.Fit(weights, [])))

    one(0)
    one(1)
    made._client.moments = {}
    with pytest.raises(RefusedError, match="moments of the optimiser do not advance"):
        one(2)


@pytest.mark.parametrize("method", ["fedavg", "splitnn"])
def test_no_task_and_no_stage_before_its_time(method: str, tmp_path: Path) -> None:
    """A contract for one stage gives neither test rows nor embeddings of the others away."""
    changes = {"data": "synthetic-table", "clients": 3, "stages": 2}
    changes |= {"split": "classes"} if method == "fedavg" else {"scenario.mode": "classes"}
    run = config(method, **changes)
    terms = {**TERMS, "actions": ["check", "embed", "learn", "fit"], "stages": 1}
    made = Gate(SiteFile(store=str(tmp_path), contract=terms))
    client = parts(run).scenario.clients[1]
    made.prepare("run-1", to_toml(run), client)
    weights = first(made) if method == "fedavg" else {}

    numbers = itertools.count(1)

    def ask(number: int, part: Any) -> None:
        vertical = method == "splitnn"
        message = Embed(part, number, 0, 0, 4) if vertical else Check(number, weights)
        action = "embed" if vertical else "check"
        made.handle(next(numbers), action, Moment(0, 0, 6), pack(message))

    for part in ("test", "train"):
        ask(0, part)
        for number in (1, 2, -1):
            with pytest.raises(RefusedError, match="rows of a task or stage that stage 1 does not"):
                ask(number, part)
    refused = [line for line in egress.lines(tmp_path / "egress.jsonl") if not line.bytes]
    assert len(refused) == 6


def test_a_gradient_has_a_limit_where_gradients_cross(tmp_path: Path) -> None:
    made = gate(tmp_path, method="splitnn")
    moment = Moment(0, 0, 6)
    reply = made.handle(1, "learn", moment, pack(Learn(1, 0, True, torch.zeros(0, 50))))
    rows = {n: shape for n, _, shape in reply.tensors}["embedding"][0]
    with pytest.raises(RefusedError, match=r"gradient of a row has the norm 70.7"):
        made.handle(2, "learn", moment, pack(Learn(1, 1, True, torch.full((rows, 50), 10.0))))
    made.handle(3, "learn", moment, pack(Learn(1, 1, True, torch.full((rows, 50), 0.1))))


# Budgets


@pytest.mark.parametrize("run", ["run-1", "run-2"])
def test_rounds_are_counted_over_all_runs_on_the_same_data(run: str, tmp_path: Path) -> None:
    made = gate(tmp_path, rounds_in_all=2)
    back = fit(made, 0, first(made))
    fit(made, 1, back)
    made.handle(9, "check", Moment(0, 1, 6), pack(Check(0, back)))  # of the same round
    made = gate(tmp_path, run, rounds_in_all=2)
    with pytest.raises(RefusedError, match="more than 2 rounds on this data"):
        fit(made, 0, first(made))
    other = Gate(SiteFile(store=str(tmp_path / "store"), contract={**TERMS, "rounds_in_all": 2}))
    other.prepare("run-3", to_toml(config(data="synthetic-table")), "site-1")
    fit(other, 0, first(other))


def test_epochs_and_answers_are_counted_over_all_runs(tmp_path: Path) -> None:
    made = gate(tmp_path)
    fit(made, 0, first(made))
    made = gate(tmp_path, "run-2", epochs_in_all=3)
    with pytest.raises(RefusedError, match="more than 3 epochs on this data"):
        fit(made, 0, first(made))
    made = gate(tmp_path, "run-3", answers_in_all=1)
    with pytest.raises(RefusedError, match="more than 1 answers on this data"):
        fit(made, 0, first(made))


def test_counts_are_in_the_chain_and_cannot_be_changed_unseen(tmp_path: Path) -> None:
    made = gate(tmp_path)
    fit(made, 0, first(made))
    (line,) = log(tmp_path)
    assert (line.data, line.rounds, line.epochs) == ("wine", 1, 2)
    path = tmp_path / "store" / "egress.jsonl"
    path.write_text(path.read_text().replace('"rounds":1,', ""))
    with pytest.raises(UserError, match="broken at line 2"):
        log(tmp_path)


def test_a_log_from_before_budgets_is_still_whole(tmp_path: Path) -> None:
    path = tmp_path / "egress.jsonl"
    body: dict[str, Any] = {
        "time": "2026-01-01T00:00:00+00:00", "run": "a", "words": "answered", "action": "fit",
        "bytes": 3, "digest": "d", "before": egress.FIRST,
    }  # fmt: skip
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    hashed = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    path.write_text(json.dumps({**body, "hash": hashed}) + "\n")
    assert egress.EgressLog(path).total() == 3


# Looks at weights and updates


def layer(units: int = 6, columns: int = 6) -> tuple[Tensors, torch.Tensor]:
    draws = torch.Generator().manual_seed(3)
    rows = torch.randn(50, columns, generator=draws)
    return {"weight0": torch.randn(units, columns, generator=draws),
            "bias0": torch.zeros(units)}, rows  # fmt: skip


def test_a_unit_that_one_row_reaches_singles_it_out() -> None:
    weights, rows = layer()
    assert singling_units(weights, rows, 3) == 0
    highest = (rows @ weights["weight0"][2]).sort(descending=True).values
    for reached, count in ((1, 1), (2, 1), (3, 0)):
        weights["bias0"][2] = -(highest[reached - 1] + highest[reached]) / 2
        assert singling_units(weights, rows, 3) == count
        assert singling_units(weights, rows, 1) == 0
    assert singling_units(weights, rows[:, :4], 3) == 0  # of other columns: not this layer


def test_two_units_that_differ_by_one_row_single_it_out() -> None:
    weights, rows = layer()
    weights["weight0"][1] = weights["weight0"][0]
    order = (rows @ weights["weight0"][0]).sort().values
    weights["bias0"][0], weights["bias0"][1] = (-(order[n] + order[n + 1]) / 2 for n in (20, 21))
    assert singling_units(weights, rows, 3) == 1


def test_an_update_shows_a_row_that_two_units_hold_in_any_proportion() -> None:
    weights, rows = layer()
    draws = torch.Generator().manual_seed(4)
    share = torch.rand(6, 50, generator=draws)
    ends = torch.cat([rows, torch.ones(50, 1)], 1)

    def after(share: torch.Tensor) -> Tensors:
        made = share @ ends * 1e-2
        return {
            "weight0": weights["weight0"] + made[:, :-1],
            "bias0": weights["bias0"] + made[:, -1],
        }

    assert shown_rows(weights, after(share), rows) == 0
    alone = share.clone()
    alone[3] = 0
    alone[3, 17] = 0.2
    assert shown_rows(weights, after(alone), rows) == 1
    both = share.clone()
    both[4] = 0.37 * both[1]
    both[4, 17] += 2.0
    assert shown_rows(weights, after(both), rows) == 1


def test_a_step_of_adam_becomes_a_plain_step() -> None:
    gradient = torch.tensor([3e-9, -2e-8, 1e-7], dtype=torch.float64)
    before = {"a": torch.zeros(3, dtype=torch.float64)}
    after = {"a": -0.001 * gradient / (gradient.abs() + 1e-8)}
    assert torch.allclose(plain_step(before, after, 0.001, 1e-8)["a"], -gradient, rtol=1e-6)


# Words


def test_a_contract_is_explained_by_the_command(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(drafted_file(config()))
    ended = CliRunner().invoke(app, ["contract", "explain", str(path)])
    assert ended.exit_code == 0
    said = " ".join(ended.output.split())
    assert "Methods: fedavg. Actions: check, fit." in said
    assert "6 rounds in a stage of a run, each of 2 epochs at most" in said
    assert "behind an update: 8 training rows, 2 steps and 8 rows in a step" in said
    assert "(membership)" in said
    assert "every other option has its default. The contract does not limit name," in said
    assert "looser than the default" not in said
    path.write_text(path.read_text().replace('"derived"', '"any"'))
    said = " ".join(CliRunner().invoke(app, ["contract", "explain", str(path)]).output.split())
    assert "looser than the default" in said
    assert "initial_weights = any: " in said


LOOSER: dict[str, Any] = {
    "rows": 7, "step_rows": 7, "steps": 1, "unit_rows": 1, "columns": 4,
    "initial_weights": "any", "move": 0.0, "drift": 0.0, "gradient": 0.0, "shown_rows": "allow",
    "networks": ("mine.nets:small",), "plugins": ("mine.data:rows",),
    "replacements": ("atoll.reproduce.faults.fedseit:released",), "repeats": 1,
    "sums": "allow",
}  # fmt: skip


@pytest.mark.parametrize("name", LOOSER)
def test_every_looser_term_is_named(name: str) -> None:
    value = LOOSER[name]
    (warning,) = warnings(Contract(**{name: value}))
    assert warning.startswith(f"{name} = {value[0] if isinstance(value, tuple) else value}: ")


LIMITS: dict[str, Any] = {
    "dtype": "float64", "scale": "none", "rounds": 201, "seed": {"most": 1000},
    "scenario.train": {"least": 0.01, "most": 1.0}, "model.widths": [4096],
    "method.optimiser": {"one_of": ["adam", "sgd"]}, "method.rate": {"most": 1e7},
    "method.batch": {"least": 8, "most": 10**6}, "method.epochs": 100,
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_every_looser_option_is_named(name: str) -> None:
    contract = Contract(methods=("fedavg",), options={"fedavg": {name: LIMITS[name]}})
    (warning,) = warnings(contract)
    assert warning.startswith(f"fedavg {name} ")


def test_a_vertical_contract_says_that_embeddings_leave() -> None:
    said = " ".join(explained(drafted_contract(config("splitnn"))))
    assert "an embedding of every single row" in said
    assert "norm of at most 10 for a row" in said


def test_tensors_without_a_mark_are_named() -> None:
    words = " ".join(explained(Contract(methods=("target",), actions=("fit", "receive"))))
    assert "Requests of 'receive' (target) have tensors that no term bounds: generator" in words
    assert "no term bounds" not in " ".join(explained(drafted_contract(config("fedavg"))))


def test_a_written_contract_has_every_term_with_a_remark() -> None:
    lines = written(Contract()).splitlines()
    assert all("  # " in line for line in lines if line)
