"""A site's comparison: asked for once, within the contract, with the files that stay there."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from atoll.core.errors import UserError
from atoll.core.federation import Moment
from atoll.core.messages import Check, Empty, Packet, Weights, pack, unpack
from atoll.engines.network import egress, ranges
from atoll.engines.network.contract import Contract, RefusedError, SiteFile
from atoll.engines.network.drafts import drafted_contract
from atoll.engines.network.explain import explained, warnings
from atoll.engines.network.policy import Gate
from atoll.engines.network.ranges import metric_violation
from atoll.engines.network.requests import LARGEST, Compare
from atoll.families.averaging import Fitted
from atoll.metrics.release import Release, fault
from atoll.runs.config import RunConfig, change, resolve, to_toml
from atoll.runs.result import Run

TERMS: dict[str, Any] = {
    "methods": ["alone", "fedavg", "splitnn"], "actions": ["fit", "check"], "steps": 1,
    "answer": True,
}  # fmt: skip


def config(method: str = "fedavg", **changes: Any) -> RunConfig:
    values = {
        "data": "breast-cancer", "rounds": 2, "clients": 3, "widths": [4], "epochs": 1,
        "engine.mode": "loop", "threads": 1,
    }  # fmt: skip
    return resolve(change({"method": method}, values | changes), "test")


def gate(folder: Path, run: RunConfig | None = None, name: str = "run-1", **terms: Any) -> Gate:
    opened = Gate(SiteFile(store=str(folder / "store"), contract={**TERMS, **terms}))
    opened.prepare(name, to_toml(run or config()), "site-1")
    return opened


def trained(folder: Path, run: RunConfig | None = None, **terms: Any) -> Gate:
    """A gate that has answered the first round of its run."""
    opened = gate(folder, run, **terms)
    rounds = opened._known.config.rounds
    first = opened._known.server().state()
    opened.handle(1, "fit", Moment(0, 0, rounds), pack(Weights(first)))
    return opened


def request(opened: Gate) -> Packet:
    """The request of an honest server whose mean is this site's own first model."""
    server = opened._known.server()
    return pack(Compare("", server.state()))


def released(packet: Packet) -> Release:
    return unpack(packet, Release, "site-1")


def log(folder: Path) -> list[egress.Line]:
    lines = egress.lines(folder / "store" / "egress.jsonl")
    return [line for line in lines if line.action not in ("prepare", "fit")]


def test_a_site_releases_its_comparison_and_keeps_everything(tmp_path: Path) -> None:
    opened = trained(tmp_path)
    reply = opened.compare(request(opened))
    one = released(reply)
    assert fault(one) == ""
    assert one.test_rows >= 10
    home = tmp_path / "store" / "run-1"
    body = Run(home).answer
    entry = body["sites"]["site-1"]
    assert entry["quality"]["joined"]["confusion"]
    assert entry["test_rows"] // 10 * 10 == one.test_rows
    for name in ("gain", "error", "low", "high", "p"):
        assert entry["gain"][name] == one.comparisons["gain"][name]
    tensors = load((home / "outcomes.safetensors").read_bytes())
    assert len(tensors["site-1/labels"]) == entry["test_rows"]


def test_where_the_label_is_a_number_errors_are_released(tmp_path: Path) -> None:
    data = {"name": "synthetic-table", "rows": 400, "task": "regression"}
    limits = {"data.name": "synthetic-table", "data.rows": 400, "data.task": "regression"}
    opened = trained(tmp_path / "strict", config(data=data), options={"fedavg": limits})
    with pytest.raises(RefusedError, match='= "mae": the contract allows "accuracy"'):
        opened.compare(request(opened))  # errors have all digits of a number
    terms = {"options": {"fedavg": {**limits, "report.metric": "mae"}}}
    opened = trained(tmp_path, config(data=data), **terms)
    one = released(opened.compare(request(opened)))
    assert fault(one) == ""
    assert list(one.scores)[:4] == ["joined", "alone", "mean", "ridge regression"]
    assert one.smallest_class == 0
    assert 3 < one.scale < 7  # labels are 4 apart, with four steps
    body = Run(tmp_path / "store" / "run-1").answer
    assert body["metric"] == "mae"
    entry = body["sites"]["site-1"]
    assert set(entry["quality"]["joined"]) == {"mse", "mae", "r2"}
    assert entry["gain"]["gain"] == pytest.approx(one.comparisons["gain"]["gain"])


def test_the_log_has_its_bytes_and_budgets_its_training(tmp_path: Path) -> None:
    opened = trained(tmp_path)
    reply = opened.compare(request(opened))
    assert reply.size < LARGEST
    (line,) = log(tmp_path)
    assert line.words.startswith(f"answered 'compare' at stage 1, round 2: {reply.size:,} bytes, ")
    assert "scores" in line.words
    assert (line.bytes, line.rounds, line.epochs) == (reply.size, 2, 2)
    spent = egress.Spent(rounds=3, epochs=3, answers=2, comparisons=1)  # with the one of `fit`
    assert opened.egress.spent("breast-cancer") == spent
    again = egress.EgressLog(opened.egress.path)
    assert again.spent("breast-cancer") == spent
    assert again.end.spent == {"breast-cancer": [3, 3, 2, 1]}


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"answer": False}, "an answer is not in the contract"),
        ({"question": 10}, "a question of"),
        ({"largest": 10}, "is larger than the contract allows"),
        ({"rounds_in_all": 2}, "more than 2 rounds on this data"),
        ({"epochs_in_all": 2}, "more than 2 epochs on this data"),
        ({"stored": 5000}, "bytes of this run"),
    ],
)
def test_what_the_contract_does_not_allow_is_refused_and_written_down(
    terms: dict[str, Any], words: str, tmp_path: Path
) -> None:
    opened = trained(tmp_path)
    opened.terms = dataclasses.replace(opened.terms, **terms)
    with pytest.raises(RefusedError, match=words):
        opened.compare(request(opened))
    (line,) = log(tmp_path)
    assert line.words.startswith("refused 'compare': ")
    assert words in line.words
    assert line.bytes == 0


def test_a_release_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = trained(tmp_path)
    huge = Release("", scores={"x" * LARGEST: 1.0})
    monkeypatch.setattr(
        "atoll.engines.network.policy.compared", lambda *arguments: (huge, {"answer.json": b""})
    )
    with pytest.raises(RefusedError, match="a comparison of"):
        opened.compare(request(opened))
    assert not (tmp_path / "store" / "run-1" / "answer.json").exists()


def test_a_run_has_one_comparison(tmp_path: Path) -> None:
    """A repeated request gets the same bytes, also from a new process; another one nothing."""
    opened = trained(tmp_path)
    asked = request(opened)
    first = opened.compare(asked)
    spent = dataclasses.replace(opened.egress.spent("breast-cancer"))
    again = gate(tmp_path)
    assert again.compare(asked).header == first.header
    other = {name: 2 * tensor for name, tensor in unpack(asked, Compare, "server").state.items()}
    with pytest.raises(RefusedError, match="a second comparison of one run"):
        again.compare(pack(Compare("", other)))
    assert [line.words.partition(":")[0] for line in log(tmp_path)] == [
        "answered 'compare' at stage 1, round 2",
        "answered again 'compare' at stage 1, round 2",
        "refused 'compare'",
    ]
    assert again.egress.spent("breast-cancer") == spent


def test_nothing_is_compared_before_a_run_is_prepared(tmp_path: Path) -> None:
    opened = Gate(SiteFile(store=str(tmp_path / "store"), contract=TERMS))
    with pytest.raises(RefusedError, match="no run has been prepared"):
        opened.compare(pack(Compare("", {})))


def test_the_joined_model_is_that_of_the_request(tmp_path: Path) -> None:
    run = config(rounds=40)
    opened = trained(tmp_path, run)
    first = opened._known.server().state()
    untrained = released(opened.compare(pack(Compare("", first))))
    state, server = dict(first), opened._known.server()
    opened = gate(tmp_path, run, "run-2")
    for number in range(40):
        fitted = opened.handle(number, "fit", Moment(0, number, 40), pack(Weights(state)))
        state = unpack(fitted, Fitted, "site-1").weights
    server.restore(state)
    learned = released(opened.compare(pack(Compare("", server.state()))))
    assert learned.scores["joined"] > untrained.scores["joined"] + 0.1
    assert learned.scores["alone"] == untrained.scores["alone"]


def test_below_ten_test_rows_only_the_reason_leaves(tmp_path: Path) -> None:
    run = config(data="wine", tests="own", rows="even")
    opened = trained(tmp_path, run)
    tests = opened._known.scenario.tests
    few = {id: tuple(rows[:9] for rows in several) for id, several in tests.items()}
    scenario = dataclasses.replace(opened._known.scenario, tests=few)
    opened._parts = dataclasses.replace(opened._known, scenario=scenario)
    reply = opened.compare(request(opened))
    assert released(reply) == Release("too few test rows")
    body = json.loads(reply.header)
    assert body["values"]["comparisons"] == body["values"]["scores"] == {}
    assert body["values"]["test_rows"] == 0


def test_a_contract_is_silent_on_answers_unless_its_owner_says_so(tmp_path: Path) -> None:
    assert Contract().answer is False
    assert drafted_contract(config()).answer is False
    quiet, open_one = drafted_contract(config()), dataclasses.replace(drafted_contract(config()),
                                                                      answer=True)  # fmt: skip
    assert not any("Accuracy times rows" in line for line in explained(quiet))
    words = "\n".join(explained(open_one))
    assert "Accuracy times rows reveals a count" in words
    assert "fewer than 10 test rows" in words
    (line,) = set(warnings(open_one)) - set(warnings(quiet))
    assert line.startswith("answer = true: ")


def test_a_damaged_release_is_a_user_error(tmp_path: Path) -> None:
    opened = trained(tmp_path)
    asked = request(opened)
    opened.compare(asked)
    (tmp_path / "store" / "run-1" / "release.json").write_text("{}")
    with pytest.raises(UserError):
        opened.compare(asked)


def test_a_party_with_columns_cannot_compare(tmp_path: Path) -> None:
    run = resolve(change({"method": "splitnn"}, {"data": "breast-cancer", "rounds": 2}), "test")
    opened = Gate(SiteFile(store=str(tmp_path / "store"), contract=TERMS))
    opened.prepare("run-1", to_toml(run), "site-1")
    with pytest.raises(RefusedError, match="no site can predict by itself"):
        opened.compare(pack(Empty()))


def test_a_model_that_this_site_did_not_train_is_not_compared(tmp_path: Path) -> None:
    opened = gate(tmp_path)
    with pytest.raises(RefusedError, match="took no part in training"):
        opened.compare(request(opened))
    opened = trained(tmp_path)
    far = {name: 2 * tensor for name, tensor in opened._known.server().state().items()}
    with pytest.raises(RefusedError, match=r"moved by 1 of their norm; the contract allows 0\.5"):
        opened.compare(pack(Compare("", far)))
    with pytest.raises(RefusedError, match="weights of another network"):
        opened.compare(pack(Compare("", {"weight0": far["weight0"]})))
    assert [line.bytes for line in log(tmp_path)] == [0, 0, 0]


def test_the_model_is_the_one_that_the_last_round_was_tested_with(tmp_path: Path) -> None:
    opened = trained(tmp_path)
    near = {name: 1.1 * tensor for name, tensor in opened._known.server().state().items()}
    nearer = {name: 1.05 * tensor for name, tensor in opened._known.server().state().items()}
    opened.handle(2, "check", Moment(0, 1, 2), pack(Check(0, near)))
    with pytest.raises(RefusedError, match="other weights for a second test"):
        opened.compare(pack(Compare("", nearer)))
    assert released(opened.compare(pack(Compare("", near)))).scores


def test_comparisons_are_counted_over_all_runs_on_the_same_data(tmp_path: Path) -> None:
    for number in range(2):
        opened = gate(tmp_path, name=f"run-{number}", comparisons_in_all=1)
        first = opened._known.server().state()
        opened.handle(1, "fit", Moment(0, 0, 2), pack(Weights(first)))
        if not number:
            opened.compare(request(opened))
    with pytest.raises(RefusedError, match="more than 1 comparisons on this data"):
        opened.compare(request(opened))


def test_a_metric_of_probabilities_is_for_the_contract_to_name(tmp_path: Path) -> None:
    run = config(**{"report.metric": "brier score"})
    opened = trained(tmp_path / "one", run)
    with pytest.raises(RefusedError, match=r"option 'report\.metric'"):
        opened.compare(request(opened))
    drafted = drafted_contract(run)
    assert any("report.metric" in line for line in warnings(drafted))
    terms = {"methods": ["fedavg"], "options": drafted.options}
    opened = trained(tmp_path / "two", run, **terms)
    assert released(opened.compare(request(opened))).scores


def test_a_method_that_selects_by_the_metric_is_refused_before_the_run() -> None:
    """The scores of validation rows leave the site in every round of chfl."""
    values = {"method": {"name": "chfl"}, "data": {"name": "breast-cancer"}}
    run = resolve(change(values, {"report.metric": "log loss"}), "test")
    assert "option 'report.metric'" in ranges.violation({}, run)
    assert not ranges.violation({}, resolve(change(values, {"report.metric": "auroc"}), "test"))


def test_errors_of_regression_are_for_the_contract_to_name() -> None:
    """A config that names no metric means mae where the label is a number."""
    files = {"files": ["basel.csv", "bern.csv"], "label": "size"}
    plain = resolve({"method": "fedavg", "data": files}, "test")
    numbers = resolve({"method": "fedavg", "data": {**files, "task": "regression"}}, "test")
    assert not metric_violation({}, plain, "accuracy")
    assert "'report.metric' = \"mae\"" in metric_violation({}, numbers, "mae")
    drafted = drafted_contract(plain).options
    assert "'report.metric' = \"mae\"" in metric_violation(drafted, plain, "mae")
    assert not metric_violation(drafted_contract(numbers).options, numbers, "mae")
