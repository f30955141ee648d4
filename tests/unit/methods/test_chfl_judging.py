"""What a CHFL client says of its models on validation rows, from hits that are made up."""

from typing import Any

import pytest
import torch

from atoll.core.federation import Moment
from atoll.core.messages import Tensors
from atoll.jobs.train import EvalJob
from atoll.methods import chfl
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


def judged(judge: chfl.Client, counts: list[int]) -> dict[str, int]:
    """The hits that a client reports where its models have these, in the order of `chfl.right`."""
    received: Tensors = {n.removeprefix("common/"): w for n, w in judge.weights.items()}
    received = {n: w + 1 for n, w in received.items() if "/" not in n and n != "mu"}
    steps = judge._judge(received, Moment(0, 1, 2))
    try:
        job = next(steps)
        assert isinstance(job, EvalJob)
        steps.send(torch.tensor(counts))
    except StopIteration as end:
        reported: dict[str, int] = end.value
        return reported
    raise AssertionError("it asks for more than one count")


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
    assert end.value.value == {v: 0 for v in variants if v != "local"}
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
    monkeypatch.setattr(judge, "_keep", copied.append)
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
