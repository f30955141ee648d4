"""Penalties worked out by hand."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.learning import penalties
from atoll.learning.losses import plain, proximal
from atoll.learning.models import MLP, Architecture
from atoll.learning.penalties import Past, Penalty

LINEAR = Architecture(MLP((1,), [], 2, Stream.of(0)).eval())
X = torch.tensor([[1.0], [2.0]])
BATCH = Rows(X, X[:, :0], torch.tensor([0, 1]))
WEIGHTS = {"weight0": torch.tensor([[0.0], [1.0]]), "bias0": torch.zeros(2)}  # logits (0, x)
MOVED = {"weight0": torch.tensor([[1.0], [1.0]]), "bias0": torch.tensor([0.0, 2.0])}
BY_HAND = (math.log(1 + math.e) + math.log(1 + math.exp(-2))) / 2
P = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))]  # of class 1, for both rows


def past(penalty: Penalty, strength: float = 2.0) -> Past:
    return Past(penalty, strength, LINEAR)


def test_distances_count_by_importance() -> None:
    given = {
        **WEIGHTS,
        "anchor/weight0": torch.tensor([[2.0], [1.0]]),  # 2 and 0 away
        "anchor/bias0": torch.tensor([0.0, -1.0]),  # 0 and 1 away
        "importance/weight0": torch.tensor([[0.5], [9.0]]),
        "importance/bias0": torch.tensor([9.0, 3.0]),
        "strength": torch.tensor(0.6),
    }
    loss = float(penalties.weighted(LINEAR, given, BATCH))
    assert loss == pytest.approx(BY_HAND + 0.3 * (0.5 * 4 + 3 * 1))


def test_importance_one_everywhere_is_the_proximal_loss() -> None:
    anchor = {f"anchor/{n}": w for n, w in MOVED.items()}
    ones = {f"importance/{n}": torch.ones_like(w) for n, w in MOVED.items()}
    given = {**WEIGHTS, **anchor, "strength": torch.tensor(0.7)}
    expected = proximal(LINEAR, given, BATCH)
    torch.testing.assert_close(penalties.weighted(LINEAR, {**given, **ones}, BATCH), expected)


def test_the_fisher_diagonal_is_the_mean_of_squared_row_gradients() -> None:
    """The gradient of a row by the logit of class 1 is p - y, by its weight x times that."""
    first, second = P[0], P[1] - 1
    fisher = penalties.fisher_diagonal(LINEAR, WEIGHTS, BATCH, ("weight0", "bias0"))
    bias, weight = (first**2 + second**2) / 2, (first**2 + (2 * second) ** 2) / 2
    torch.testing.assert_close(fisher["bias0"], torch.tensor([bias, bias]))
    torch.testing.assert_close(fisher["weight0"], torch.tensor([[weight], [weight]]))


def test_the_fisher_diagonal_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = penalties.fisher_diagonal(LINEAR, WEIGHTS, BATCH, ("bias0",))
    monkeypatch.setattr(penalties, "CHUNK", 1)
    parts = penalties.fisher_diagonal(LINEAR, WEIGHTS, BATCH, ("bias0",))
    torch.testing.assert_close(parts, whole)


def test_path_terms_sum_to_the_decrease_of_a_quadratic_loss() -> None:
    """Of w^2 from 3 to 1: the trapezoidal rule is exact, 9 - 1; a term that rises is negative."""
    before, after = {"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([1.0, 2.0])}
    first, last = {"w": torch.tensor([6.0, 2.0])}, {"w": torch.tensor([2.0, 4.0])}
    terms = penalties.path_terms(before, after, first, last)
    assert terms["w"].tolist() == [8.0, -3.0]


def test_ewc_adds_up_the_fisher_of_each_stage_at_the_end_of_its_last_round() -> None:
    one = past("ewc")
    one.begin(WEIGHTS, 0)
    assert one.terms(WEIGHTS, BATCH)[0] is plain
    one.end(WEIGHTS, MOVED, BATCH, last=False)
    assert one.importance == {}
    one.end(WEIGHTS, MOVED, BATCH, last=True)
    fisher = penalties.fisher_diagonal(LINEAR, MOVED, BATCH, ("weight0", "bias0"))
    torch.testing.assert_close(one.importance, fisher)
    one.begin(MOVED, 1)
    loss, constants, rows = one.terms(WEIGHTS, BATCH)
    assert loss is penalties.weighted
    assert rows is BATCH
    assert torch.equal(constants["anchor/bias0"], MOVED["bias0"])
    one.end(WEIGHTS, MOVED, BATCH, last=True)
    torch.testing.assert_close(one.importance, {n: 2 * f for n, f in fisher.items()})


def test_the_anchor_is_the_first_of_a_stage() -> None:
    one = past("ewc")
    one.begin(WEIGHTS, 0)
    one.begin(MOVED, 0)
    assert torch.equal(one.anchor["bias0"], WEIGHTS["bias0"])
    one.begin(MOVED, 1)
    assert torch.equal(one.anchor["bias0"], MOVED["bias0"])


def test_si_divides_the_positive_terms_by_the_squared_way_of_the_stage() -> None:
    one = past("si")
    one.begin(WEIGHTS, 0)
    one.path = {"weight0": torch.tensor([[4.0], [-1.0]]), "bias0": torch.tensor([0.0, 6.0])}
    one.begin(MOVED, 1)  # ways: 1 and 0, 0 and 2
    expected = {
        "weight0": torch.tensor([[4 / 1.001], [0.0]]),
        "bias0": torch.tensor([0.0, 6 / 4.001]),
    }
    torch.testing.assert_close(one.importance, expected)
    assert one.path == {}


def test_si_adds_up_the_terms_of_rounds() -> None:
    one = past("si")
    one.begin(WEIGHTS, 0)
    for _ in range(2):
        one.end(WEIGHTS, MOVED, BATCH, last=False)
    ends = [penalties.gradient(LINEAR, w, BATCH, ("bias0",))["bias0"] for w in (WEIGHTS, MOVED)]
    term = -(ends[0] + ends[1]) / 2 * torch.tensor([0.0, 2.0])
    torch.testing.assert_close(one.path["bias0"], 2 * term)


def test_the_gradient_is_that_of_the_mean_loss() -> None:
    """By the bias of class 1: the mean of p - y."""
    found = penalties.gradient(LINEAR, WEIGHTS, BATCH, ("bias0",))["bias0"]
    assert float(found[1]) == pytest.approx((P[0] + P[1] - 1) / 2)


THREE = Architecture(MLP((1,), [], 3, Stream.of(0)).eval())
TEACHER = {"weight0": torch.tensor([[0.0], [2.0], [5.0]]), "bias0": torch.zeros(3)}
STUDENT = {"weight0": torch.tensor([[1.0], [1.0], [7.0]]), "bias0": torch.zeros(3)}
ONE_ROW = Rows(torch.tensor([[1.0]]), torch.zeros(1, 0), torch.tensor([2]))


def test_lwf_teaches_the_classes_that_the_rows_do_not_have() -> None:
    """Teacher (0, 2) and student (1, 1) at temperature 2: KL((1, e) / (1 + e) || (1, 1) / 2)."""
    one = Past("lwf", 0.5, THREE)
    one.begin(TEACHER, 0)
    assert one.terms(STUDENT, ONE_ROW)[0] is plain  # nothing was learned before the first stage
    one.begin(TEACHER, 1)
    loss, constants, rows = one.terms(STUDENT, ONE_ROW)
    assert rows.own.tolist() == [[0.0, 2.0, penalties.HIDDEN]]
    q = 1 / (1 + math.e)
    apart = q * math.log(2 * q) + (1 - q) * math.log(2 * (1 - q))
    truth = float(F.cross_entropy(torch.tensor([[1.0, 1.0, 7.0]]), torch.tensor([2])))
    assert float(loss(THREE, constants, rows)) == pytest.approx(truth + 0.5 * 4 * apart)


def test_lwf_teaches_all_classes_where_the_rows_have_all() -> None:
    one = past("lwf")
    one.begin(WEIGHTS, 1)
    assert one.terms(WEIGHTS, BATCH)[2].own.tolist() == [[0.0, 1.0], [0.0, 2.0]]


def test_rows_without_a_share_are_not_taught() -> None:
    own = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 9.0]])
    both = Rows(torch.ones(2, 1), own, torch.tensor([2, 2]), torch.tensor([1.0, 0.0]))
    given: dict[str, Tensor] = {**STUDENT, "strength": torch.tensor(1.0)}
    alone = Rows(torch.ones(1, 1), own[:1], torch.tensor([2]))
    expected = penalties.distilled(THREE, given, alone)
    torch.testing.assert_close(penalties.distilled(THREE, given, both), expected)


@pytest.mark.parametrize("penalty", ["none", "proximal"])
def test_what_does_not_remember_has_no_state(penalty: Penalty) -> None:
    one = past(penalty)
    one.begin(WEIGHTS, 0)
    one.end(WEIGHTS, MOVED, BATCH, last=True)
    assert one.state() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("penalty", ["none", "proximal", "ewc"])
def test_a_loss_is_composed_without_waiting_for_the_device(penalty: Penalty) -> None:
    rows = Rows(X.cuda(), X[:, :0].cuda(), BATCH.y.cuda())
    weights = {name: weight.cuda() for name, weight in WEIGHTS.items()}
    memory = past(penalty)
    memory.begin(weights, 0)
    try:
        torch.cuda.set_sync_debug_mode("error")
        memory.terms(weights, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
