"""Adapters change the weights that they should, and merge as least squares do."""

import pytest
import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.learning import adapters
from atoll.learning.models import MLP, shared

RANDOM = torch.Generator().manual_seed(3)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM, dtype=torch.float64)


def layer(factor: str, sites: int = 3, past: bool = True) -> adapters.Layer:
    """One factor of rank 2 as sites trained it, of a layer with 4 outputs and 5 inputs."""
    up, down = drawn(4, 2), drawn(2, 5)
    trained = [drawn(4, 2) if factor == "up" else drawn(2, 5) for _ in range(sites)]
    squares = [drawn(5).square() + 0.1 for _ in range(sites)]
    change, total = drawn(4, 2) @ drawn(2, 5), drawn(5).square() + 0.1
    shared = down if factor == "up" else up
    return adapters.Layer(trained, shared, squares, change * past, total * past)


def product(factor: str, trained: Tensor, one: adapters.Layer) -> Tensor:
    return trained @ one.shared if factor == "up" else one.shared @ trained


def mismatch(factor: str, merged: Tensor, one: adapters.Layer) -> float:
    """Squared differences of outputs, summed over sites and earlier stages."""
    change = product(factor, merged, one)
    total = ((change - one.past_change).square() * one.past_squares).sum()
    for own, squares in zip(one.trained, one.squares, strict=True):
        total = total + ((change - product(factor, own, one)).square() * squares).sum()
    return float(total)


@pytest.mark.parametrize("past", [True, False])
def test_merged_factors_have_the_least_mismatch(past: bool) -> None:
    for factor, merge in (("up", adapters.merge_up), ("down", adapters.merge_down)):
        one = layer(factor, past=past)
        best = merge(one)
        least = mismatch(factor, best, one)
        mean = torch.stack(list(one.trained)).mean(0)
        for other in [mean, *(best + 0.01 * drawn(*best.shape) for _ in range(20))]:
            assert mismatch(factor, other, one) > least


def test_down_of_two_sites_is_the_mean_by_squares_of_each_input() -> None:
    up = torch.tensor([[1.0]], dtype=torch.float64)
    downs = [torch.tensor([values], dtype=torch.float64) for values in ([1.0, 5.0], [3.0, 9.0])]
    squares = [torch.tensor(values, dtype=torch.float64) for values in ([3.0, 0.0], [1.0, 0.0])]
    nothing = torch.zeros(1, 2, dtype=torch.float64)
    one = adapters.Layer(downs, up, squares, nothing, nothing[0])
    # (3 * 1 + 1 * 3) / 4; an input that is 0 everywhere has the plain mean
    assert torch.equal(adapters.merge_down(one), torch.tensor([[1.5, 7.0]], dtype=torch.float64))


def test_squares_of_one_site_weigh_at_most_ten_times_the_median() -> None:
    squares = [torch.tensor(values) for values in ([1.0, 1.0], [0.5, 1.5], [1e6, 3e6], [0.0, 0.0])]
    weighted = adapters.weighted_squares(squares, [1.0, 3.0, 2.0, 2.0])
    torch.testing.assert_close(weighted[0], torch.tensor([0.5, 0.5]))  # half the mean weight
    torch.testing.assert_close(weighted[1], torch.tensor([0.75, 2.25]))
    torch.testing.assert_close(weighted[2], torch.tensor([5.0, 15.0]))  # 20, as the median is 2
    assert torch.equal(weighted[3], torch.zeros(2))


def test_equal_factors_merge_to_themselves() -> None:
    for factor, merge in (("up", adapters.merge_up), ("down", adapters.merge_down)):
        one = layer(factor, sites=1, past=False)
        torch.testing.assert_close(merge(one), one.trained[0], rtol=1e-12, atol=1e-12)


def test_merged_weights_are_those_of_the_sum() -> None:
    model = MLP((3,), (4,), 2, Stream.of(0, "model")).double()
    base = dict(model.state_dict())
    trained = adapters.draw_adapters(model, 2, Stream.of(0, "adapters"))
    assert trained.keys() == {"down/weight0", "up/weight0"}
    assert all(torch.equal(adapters.merged(base, trained)[name], base[name]) for name in base)
    trained["up/weight0"] = drawn(4, 2)
    output = {"weight1": drawn(2, 4), "bias1": drawn(2)}
    whole = adapters.merged(base, trained | output)
    change = trained["up/weight0"] @ trained["down/weight0"]
    torch.testing.assert_close(whole["weight0"], base["weight0"] + change)
    assert torch.equal(whole["bias0"], base["bias0"])
    assert torch.equal(whole["weight1"], output["weight1"])
    assert adapters.output_layer(model) == ("weight1", "bias1")


def test_a_convolution_is_a_matrix_of_its_filters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 2), nn.Flatten(), nn.Linear(6, 2))
    trained = adapters.draw_adapters(model, 50, Stream.of(0))
    assert trained["down/0.weight"].shape == (6, 12)  # at most the size of the layer
    trained["up/0.weight"] = torch.ones(6, 6)
    weights = adapters.merged(dict(model.state_dict()), trained)
    change = (weights["0.weight"] - model.state_dict()["0.weight"]).flatten(1)
    torch.testing.assert_close(change, trained["down/0.weight"].sum(0).expand(6, 12))


def test_classes_that_the_mask_hides_have_no_gradient() -> None:
    model = MLP((3,), (4,), 3, Stream.of(0, "model")).double()
    trained = adapters.draw_adapters(model, 2, Stream.of(0, "adapters"))
    output = {name: model.get_parameter(name).detach() for name in ("weight1", "bias1")}
    mask = torch.tensor([0.0, adapters.HIDDEN, 0.0], dtype=torch.float64)
    weights = {f"base/{name}": w.detach() for name, w in model.state_dict().items()}
    weights |= trained | output | {"constant/mask": mask}
    weights["bias1"] = weights["bias1"].clone().requires_grad_()
    x, y = drawn(6, 3), torch.tensor([0, 2, 0, 2, 2, 0])
    loss = adapters.masked_loss(shared(model), weights, Rows(x, x[:, :0], y))
    (gradient,) = torch.autograd.grad(loss, [weights["bias1"]])
    assert gradient[1] == 0
    assert (gradient[[0, 2]] != 0).all()


def test_squares_are_those_of_the_inputs_of_each_layer() -> None:
    model = MLP((2,), (2, 2), 2, Stream.of(0)).double()
    weights = {
        "weight0": torch.tensor([[1.0, 0.0], [0.0, -1.0]]), "bias0": torch.zeros(2),
        "weight1": torch.eye(2), "bias1": torch.zeros(2),
        "weight2": torch.eye(2), "bias2": torch.zeros(2),
    }  # fmt: skip
    x = torch.tensor([[1.0, 2.0], [3.0, -4.0]])
    squares = adapters.input_squares(model, weights, x)
    assert {name: values.tolist() for name, values in squares.items()} == {
        "weight0": [5.0, 10.0],
        "weight1": [5.0, 8.0],  # after ReLU: (1, 0) and (3, 4)
    }


def test_networks_without_matrices_or_known_layers_are_refused() -> None:
    with pytest.raises(UserError, match="nothing to adapt"):
        adapters.adapted_layers(nn.BatchNorm1d(3))
    with pytest.raises(UserError, match="only the layers of an MLP") as caught:
        adapters.input_squares(nn.Linear(3, 2), {}, torch.zeros(1, 3))
    assert caught.value.remedy == "use 'mlp', or merging = \"mean\""
