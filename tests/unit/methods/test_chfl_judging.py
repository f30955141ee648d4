"""What a CHFL client says of its models on validation rows, from hits that are made up."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from atoll.core.errors import BadMessageError
from atoll.core.federation import Clients, Moment
from atoll.core.messages import Checked, Empty, Tensors, wrap
from atoll.core.rows import Rows
from atoll.jobs.train import EvalJob
from atoll.learning.losses import cross_entropy
from atoll.methods import chfl
from atoll.metrics.selection import selection_score
from atoll.runs.config import change, resolve
from atoll.runs.parts import parts

SMALL: dict[str, Any] = {
    "data": {"name": "synthetic-table", "rows": 120},
    "scenario": {"split": "columns", "clients": 2, "ratio": 0.4},
    "model": {"widths": [4]},
    "method": {"name": "chfl", "epochs": 1, "batch": 64, "mu": [0.1, 1.0]},
}


def client(**changes: Any) -> chfl.Client:
    found = parts(resolve(change(SMALL, changes), "test")).client("site-0")
    assert isinstance(found, chfl.Client)
    return found


def judged(judge: chfl.Client, counts: list[int]) -> dict[str, float]:
    """The hits that a client reports for these counts, in the order of `lateral.every_logits`."""
    received: Tensors = {n.removeprefix("common/"): w for n, w in judge.weights.items()}
    received = {n: w + 1 for n, w in received.items() if "/" not in n and n != "mu"}
    steps = judge._judge(received, Moment(0, 1, 2))
    try:
        job = next(steps)
        assert isinstance(job, EvalJob)
        steps.send(torch.tensor(counts))
    except StopIteration as end:
        reported: dict[str, float] = end.value.valid
        return reported
    raise AssertionError("it asks for more than one count")


def scored(judge: chfl.Client) -> chfl.Settled:
    """What a client reports of its models as they stand, where no job is needed."""
    received = {n.removeprefix("common/"): w for n, w in judge.weights.items()}
    received = {n: w for n, w in received.items() if "/" not in n and n != "mu"}
    with pytest.raises(StopIteration) as end:
        next(judge._judge(received, Moment(0, 1, 2)))
    settled: chfl.Settled = end.value.value
    return settled


METRICS = ["auroc", "auprc", "balanced accuracy", "brier score", "log loss"]
REFERENCES: dict[str, Callable[[Any, Any], float]] = {
    "auroc": lambda y, p: float(reference.roc_auc_score(y, p[:, 1])),
    "auprc": lambda y, p: float(reference.average_precision_score(y, p[:, 1])),
    "balanced accuracy": lambda y, p: float(reference.balanced_accuracy_score(y, p.argmax(1))),
    "brier score": lambda y, p: 1 - float(reference.brier_score_loss(y, p[:, 1])) / 2,
    "log loss": lambda y, p: math.exp(-float(reference.log_loss(y, p))),
}


@pytest.mark.parametrize("metric", METRICS)
def test_another_metric_selects_the_member_of_the_bank(metric: str) -> None:
    judge = client(**{"data": {"name": "breast-cancer"}, "report.metric": metric, "rate": 0.01})
    settled, rows = scored(judge), judge.site.valid(0)
    judge._save_best(chfl.reported(judge.options))
    probabilities = {
        variant: judge.predict(model, rows).double().softmax(-1).numpy()
        for variant, model in judge.best.items()
    }
    y = rows.y.numpy()
    expected = {v: REFERENCES[metric](y, p) for v, p in probabilities.items() if v != "local"}
    assert settled.valid_rows == len(rows)
    scores = {variant: total / len(rows) for variant, total in settled.valid.items()}
    assert scores == pytest.approx(expected, abs=1e-6)
    assert scores["auto"] == max(scores["mu=0"], scores["mu>0"])
    best = max(REFERENCES[metric](y, p) for v, p in probabilities.items() if v == "local")
    assert float(judge.best_local) / len(rows) == pytest.approx(best, abs=1e-6)


def test_the_metric_and_accuracy_may_choose_different_members() -> None:
    """Hits prefer the second member of the bank, AUROC the third."""
    y = torch.tensor([0, 0, 0, 1, 1])
    by_hits = [0.1, 0.2, 0.95, 0.9, 0.8]  # 4 hits; 2 of 6 pairs are in the wrong order
    by_order = [0.6, 0.7, 0.8, 0.9, 0.95]  # 2 hits; every pair is in order
    outputs = [np.log(np.stack([1 - np.array(p), p], 1)) for p in (by_hits, by_order)]
    accuracies = [selection_score("accuracy", y.numpy(), one) for one in outputs]
    areas = [selection_score("auroc", y.numpy(), one) for one in outputs]
    assert accuracies == [0.8, 0.4]
    assert areas == pytest.approx([4 / 6, 1.0])


def test_validation_rows_that_do_not_define_the_metric_count_as_none() -> None:
    judge = client(**{"data": {"name": "breast-cancer"}, "report.metric": "auroc"})
    rows = judge.site.valid(0)
    judge.site._kept["valid", 0] = rows.at(rows.y == 1)
    settled = scored(judge)
    assert settled.valid_rows == 0
    assert set(settled.valid.values()) == {0}
    assert judge.chosen["auto"] == 0


def test_each_variant_reports_its_own_hits_and_the_best_concatenation_is_no_strength() -> None:
    # column one, mu = 0, 0.1 and 1, concatenation, alone
    judge = client()
    found = judged(judge, [5, 1, 2, 3, 9, 8])
    assert found == {"common": 5, "mu=0": 1, "mu>0": 3, "concat": 9, "auto": 3}
    assert judge.chosen["auto"] == 2
    assert int(judge.best_local) == 8


def test_the_best_of_the_networks_trained_alone_counts() -> None:
    judge = client(rate_local=[0.01, 0.02, 0.03])
    judged(judge, [0, 0, 0, 0, 0, 4, 7, 2])
    assert int(judge.best_local) == 7


def test_without_a_bank_the_counts_behind_column_one_belong_to_the_others() -> None:
    judge = client(variants=["common", "concat", "local"])
    assert judged(judge, [5, 9, 8]) == {"common": 5, "concat": 9}
    assert int(judge.best_local) == 8
    assert judge.chosen == {}


@pytest.mark.parametrize("variants", [["common"], ["common", "mu=0"], ["concat", "local"]])
def test_without_validation_rows_every_variant_reports_no_hit(variants: list[str]) -> None:
    judge = client(variants=variants, valid=0.0)
    steps = judge._judge({}, Moment(0, 1, 2))
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value == chfl.Settled(0, {v: 0 for v in variants if v != "local"})
    assert set(judge.best) <= set(variants)
    assert int(judge.best_local) == (0 if "local" in variants else -1)


def test_where_no_network_is_trained_alone_there_are_no_hits_of_one() -> None:
    judge = client(variants=["common", "mu=0"])
    judged(judge, [5, 1, 2, 3])
    assert int(judge.best_local) == -1
    assert "local" not in judge.best


def test_every_single_strength_reports_the_hits_of_its_own_member() -> None:
    judge = client(each_mu=True)
    found = judged(judge, [5, 1, 2, 3, 9, 8])
    assert (found["mu=0"], found["mu=0.1"], found["mu=1"]) == (1, 2, 3)


@pytest.mark.parametrize(("counts", "calls"), [([4, 4], 1), ([4, 5], 2), ([4, 3], 1)])
def test_the_network_trained_alone_is_copied_at_a_gain_and_not_at_a_tie(
    counts: list[int], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, copied = client(), list[list[str]]()
    monkeypatch.setattr(judge, "_save_best", copied.append)
    for count in counts:
        judged(judge, [0, 0, 0, 0, 0, count])
    assert copied == [["local"]] * calls


def test_a_candidate_has_the_bank_and_the_concatenation_and_nothing_that_is_trained_alone() -> None:
    judge = client(rate_local=[0.01, 0.02])
    judged(judge, [0, 0, 0, 0, 0, 1, 2])
    kinds = {name.split("/")[0] for name in judge.candidate}
    assert kinds == {"common", "said", "local", "unique", "concat"}


def test_accuracy_on_validation_rows_is_a_mean_over_clients_however_few_rows_they_have() -> None:
    server = parts(resolve(change(SMALL, {"variants": ["common"]}), "test")).server()
    told = {"a": chfl.Settled(1, {"common": 1}), "b": chfl.Settled(4, {"common": 1})}
    told["c"] = chfl.Settled(0, {"common": 0})
    assert server._compare(told) == {"valid common": pytest.approx((1 + 0.25 + 0) / 3)}


@pytest.mark.parametrize(("eval_common", "moved"), [("global", 1.0), ("local", 0.0)])
def test_predictions_read_the_received_column_one_or_the_clients_own(
    eval_common: str, moved: float
) -> None:
    judge = client(eval_common=eval_common)
    own = judge.weights["common/weight0"]
    judged(judge, [0, 0, 0, 0, 0, 0])  # what it receives is its own plus 1
    torch.testing.assert_close(judge.candidate["said/weight0"], own + moved)
    torch.testing.assert_close(judge.candidate["common/weight0"], own + 1)


def test_kept_models_outlive_a_client_that_is_rebuilt() -> None:
    judge, again = client(), client()
    again.restore(judge.state())
    assert again.best == {}
    judged(judge, [5, 1, 2, 3, 9, 8])
    judge._save_best(["common", "auto"])
    again.restore(judge.state())
    assert again.best.keys() == {"common", "auto", "local"}
    assert again.chosen == judge.chosen
    for variant, model in judge.best.items():
        assert all(torch.equal(again.best[variant][name], w) for name, w in model.items())


def test_a_network_alone_loses_by_its_last_layer_however_many_it_has() -> None:
    """One layer of ones: the logits of (1, 2) and own 3 are 6 and 0."""
    weights = {"local0/weight0": torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])}
    weights |= {"local0/bias0": torch.zeros(2)}
    batch = Rows(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]), torch.tensor([1]))
    one = chfl.local_loss(weights, batch, depth=1, name="local0")
    assert float(one) == pytest.approx(6.0, abs=0.01)
    eye, zero = torch.eye(2), torch.zeros(2)
    for layer in (1, 2):
        weights |= {f"local0/weight{layer}": layer * eye, f"local0/bias{layer}": zero}
    three = chfl.local_loss(weights, batch, depth=3, name="local0")
    assert float(three) == float(cross_entropy(torch.tensor([[12.0, 0.0]]), batch))


class Answers:
    """A transport that brings an answer for each action and client, else an empty one."""

    def __init__(self, **answers: dict[str, Any]) -> None:
        self.answers = answers

    def carry(self, action: str, moment: Moment, packets: Any) -> Any:
        found = self.answers.get(action, {})
        return {id: wrap(found.get(id, Empty())) for id in packets}


def server(**changes: Any) -> Any:
    return parts(resolve(change(SMALL, {"variants": ["common"], **changes}), "test")).server()


def fitted(judge: Any, value: float, rows: int, hits: int | None = None) -> chfl.Fitted:
    weights = {n: torch.full_like(w, value) for n, w in judge.weights.items()}
    return chfl.Fitted(weights, value, rows, 10, {} if hits is None else {"common": hits})


@pytest.mark.parametrize(("weighting", "mean"), [("rows", 2.5), ("equal", 2.0)])
def test_the_mean_weighs_clients_equally_or_by_their_rows(weighting: str, mean: float) -> None:
    judge = server(weighting=weighting)
    told = {"a": fitted(judge, 1.0, 10), "b": fitted(judge, 3.0, 30)}
    first = Moment(0, 0, 9)
    notes = judge.round(Clients(["a", "b"], Answers(fit=told), first, packing=False), first)
    assert {float(v) for w in judge.weights.values() for v in w.flatten()} == {mean}
    assert notes == {"loss": 2.0, "finished": 0.0}


def test_a_stage_begins_without_idle_rounds_and_without_a_best() -> None:
    judge = server(patience=2)
    judge.idle, judge.best = torch.tensor(7), torch.tensor([0.9], dtype=torch.float64)
    finished = []
    for number, hits in enumerate([None, 5, 5, 5]):
        moment, told = Moment(1, number, 9), {"a": fitted(judge, 1.0, 10, hits)}
        notes = judge.round(Clients(["a"], Answers(fit=told), moment, packing=False), moment)
        finished.append(notes["finished"])
        if moment.first:
            assert int(judge.idle) == 0
            assert judge.best.tolist() == [-1.0]
    assert finished == [0.0, 0.0, 0.0, 1.0]  # a gain, then two rounds without


@pytest.mark.parametrize("valid", [{"common": 11}, {"common": -1}, {}, {"auto": 3}])
def test_hits_that_cannot_be_are_refused(valid: dict[str, float]) -> None:
    judge = server()
    judge._admit("a", chfl.Settled(10, {"common": 10}))
    with pytest.raises(BadMessageError) as caught:
        judge._admit("a", chfl.Settled(10, valid))
    assert caught.value.sender == "a"


def test_a_test_judges_the_last_round_and_keeps_nothing_for_the_next() -> None:
    judge, moment = server(), Moment(0, 1, 9)
    tested = {"a": Checked(4, {"common": 2}, {"common": 0.5})}
    answers = Answers(settle={"a": chfl.Settled(10, {"common": 5})}, check=tested)
    (score,) = judge.evaluate(Clients(["a"], answers, moment, packing=False), moment)
    assert (score.variant, score.correct) == ("common", 2)
    assert judge._best_variants() == []
    assert bool(judge.judged)
    assert judge.best.tolist() == [0.5]


def test_a_client_shows_what_it_would_say_before_and_after_its_own_training() -> None:
    judge, shown = client(), list[tuple[str, Any]]()
    record: Any = lambda doing, moment, check: shown.append((doing, check(0)))  # noqa: E731
    judge.site.probe = record  # type: ignore[method-assign]
    common = {n.removeprefix("common/"): w for n, w in judge.weights.items() if "common/" in n}
    judge._probe("others", common, Moment(0, 0, 1))
    ((doing, checked),) = shown
    assert doing == "others"
    assert list(checked.correct) == [""]


def test_the_prediction_of_a_network_trained_alone_is_its_last_layer() -> None:
    """Three layers that each add one to every unit: ReLU of -1 is 0, then 1, then 2."""
    judge = client(widths=[2, 2])
    assert judge.depth == 3
    model = {}
    for layer in range(3):
        model[f"local/weight{layer}"] = torch.eye(2)
        model[f"local/bias{layer}"] = torch.ones(2)
    x = torch.tensor([[-2.0, 5.0]])
    rows = Rows(x, x[:, :0], torch.tensor([0]))
    assert judge.predict(model, rows).tolist() == [[2.0, 8.0]]
