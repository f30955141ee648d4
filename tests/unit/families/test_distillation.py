"""What a round on public images is made of, and the pictures of features beside it."""

import pytest
import torch

from atoll.core.errors import UserError
from atoll.core.federation import Clients, Moment
from atoll.core.messages import Weights, wrap
from atoll.families.distillation import Roll, average, epochs_at, principal, shared
from atoll.methods import fccl


def test_all_get_the_mean_of_all_logits_summed_in_double_precision() -> None:
    answers = {"b": torch.tensor([2.0**24, 1.0]), "a": torch.tensor([1.0, 3.0])}
    answers |= {"c": torch.tensor([-(2.0**24), 8.0])}
    found = average(answers)
    assert list(found) == ["b", "a", "c"]
    for target in found.values():
        assert target.dtype == torch.float32
        assert target.tolist() == pytest.approx([1 / 3, 4.0])


def test_epochs_are_the_usual_ones_or_each_clients_own_in_their_order() -> None:
    assert epochs_at((), 7, ["a", "b"], "b") == 7
    assert [epochs_at((3, 5), 7, ["a", "b"], id) for id in ("a", "b")] == [3, 5]
    with pytest.raises(UserError, match="3 numbers for 2 clients"):
        epochs_at((3, 5, 1), 7, ["a", "b"], "a")


class Fixed:
    """A transport at whose end each client has one weight."""

    def carry(self, action, moment, packets):  # type: ignore[no-untyped-def]
        weights = {"a": 1.0, "b": 4.0}
        return {id: wrap(Weights({"w": torch.tensor([weights[id]])})) for id in packets}


def test_shared_weights_are_the_mean_over_those_who_are_left() -> None:
    clients = Clients(["a", "b"], Fixed(), Moment(0, 0, 1), packing=False)
    assert shared(Roll(clients, 0), fccl.Client.share).weights["w"].tolist() == [2.5]
    left = Roll(clients, 0)
    left.ids.remove("b")
    assert shared(left, fccl.Client.share).weights["w"].tolist() == [1.0]


def test_with_one_exchange_a_round_the_own_share_of_the_target_is_that_of_now() -> None:
    z, target = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0])
    assert fccl.wanted(z, {"target": target}) is target
    earlier = {"earlier": torch.tensor([5.0, 10.0]), "count": torch.tensor(4.0)}
    assert fccl.wanted(z, {"target": target, **earlier}).tolist() == [6.0, 8.0]


@pytest.mark.parametrize(("decay", "rates"), [("linear", [0.1, 0.055]), ("none", [0.1, 0.1])])
def test_the_rate_falls_to_a_tenth_over_the_rounds_or_not_at_all(
    decay: str, rates: list[float]
) -> None:
    options = fccl.Options(rate=0.1, rate_decay=decay)  # type: ignore[arg-type]
    found = [fccl.rate(options, Moment(0, number, 10)) for number in (0, 5)]
    assert found == pytest.approx(rates)


@pytest.mark.numerics
def test_the_first_of_equally_large_values_is_the_positive_one() -> None:
    """The second row is longer by one rounding, which must not turn the picture."""
    rows = torch.tensor([[-3.0], [3.0 + 4.5e-16], [0.0]], dtype=torch.float64)
    assert torch.equal(principal(rows).sign()[:2], torch.tensor([[1.0], [-1.0]]).double())
    assert float(principal(torch.tensor([[1.0], [0.0], [-2.0]]))[2, 0]) > 0
