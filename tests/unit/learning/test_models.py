"""Networks: their first weights, and one layer for many members."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from atoll.core.rng import Stream
from atoll.learning.models import (
    MLP,
    Architecture,
    ModelOptions,
    draw_linear,
    linear,
    network,
    outputs,
)

STREAM = Stream.of(0, "model")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_first_weights_fill_their_bounds_and_no_more() -> None:
    weight, bias = draw_linear(50, 16, STREAM)
    assert weight.shape == (50, 16)
    assert bias.shape == (50,)
    for drawn in (weight, bias):
        assert drawn.dtype == torch.float32
        assert float(drawn.abs().max()) <= 1 / math.sqrt(16)
        assert float(drawn.max()) > 0.2
        assert float(drawn.min()) < -0.2
    assert abs(float(weight.mean())) < 0.02


def test_equal_streams_draw_equal_weights_and_others_others() -> None:
    one, same, other = (
        draw_linear(3, 4, stream) for stream in (STREAM, Stream.of(0, "model"), STREAM.child("a"))
    )
    assert torch.equal(one[0], same[0])
    assert torch.equal(one[1], same[1])
    assert not torch.equal(one[0], other[0])


def test_a_draw_leaves_the_global_state_of_torch_alone() -> None:
    before = torch.random.get_rng_state()
    network((3,), 2, ModelOptions(widths=(4,)), STREAM)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_layer_without_inputs_draws_nothing() -> None:
    weight, bias = draw_linear(3, 0, STREAM)
    assert weight.shape == (3, 0)
    assert bias.tolist() == [0.0, 0.0, 0.0]


def test_a_layer_without_bias_has_none() -> None:
    assert [tuple(drawn.shape) for drawn in draw_linear(3, 2, STREAM, bias=False)] == [(3, 2)]


@pytest.mark.parametrize(("biased", "added"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shared", [True, False])
def test_a_bank_of_layers_equals_its_members_one_by_one(
    biased: bool, added: bool, shared: bool
) -> None:
    """`shared`: all members read the same rows; `added`: something is added to the product."""
    weight, x = draw(5, 4, 3), draw(7, 3) if shared else draw(5, 7, 3)
    bias, plus = draw(5, 4) if biased else None, draw(5, 7, 4) if added else None
    found = linear(x, weight, bias, plus)
    for i in range(5):
        one = (x if shared else x[i]) @ weight[i].T
        one = one + bias[i] if bias is not None else one
        torch.testing.assert_close(found[i], one + plus[i] if plus is not None else one)


def test_a_stack_of_banks_equals_its_members_one_by_one() -> None:
    weight, bias, x = draw(2, 5, 4, 3), draw(2, 5, 4), draw(2, 7, 3)
    found = linear(x, weight, bias)
    assert found.shape == (2, 5, 7, 4)
    for i in range(2):
        for j in range(5):
            torch.testing.assert_close(found[i, j], F.linear(x[i], weight[i, j], bias[i, j]))


def test_a_network_is_linear_layers_with_relu_between_them() -> None:
    model = MLP((2, 3), [5, 4], 3, STREAM)
    weights, x = dict(model.named_parameters()), draw(7, 2, 3)
    one = torch.relu(F.linear(x.flatten(1), weights["weight0"], weights["bias0"]))
    two = torch.relu(F.linear(one, weights["weight1"], weights["bias1"]))
    three = F.linear(two, weights["weight2"], weights["bias2"])
    torch.testing.assert_close(model(x), three)
    for found, expected in zip(outputs(weights, x.flatten(1), 3), (one, two, three), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_network_without_hidden_layers_is_linear() -> None:
    model = network((3,), 2, ModelOptions(widths=()), STREAM)
    x = draw(4, 3)
    torch.testing.assert_close(model(2 * x) - model(x), model(x) - model(0 * x))


def test_an_architecture_is_a_function_of_the_weights_it_is_given() -> None:
    model, other = MLP((3,), [4], 2, STREAM), MLP((3,), [4], 2, STREAM.child("other"))
    x, architecture = draw(5, 3), Architecture(model)
    weights = dict(other.named_parameters())
    torch.testing.assert_close(architecture(weights, x), other(x))
    assert not torch.allclose(architecture(weights, x), model(x))


class Doubled(nn.Module):
    """A network that is no MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * F.linear(x, self.weight)


def test_a_stack_of_any_network_equals_its_members_one_by_one() -> None:
    architecture, x = Architecture(Doubled()), draw(3, 5, 2)
    weights = draw(3, 1, 2)
    found = architecture({"weight": weights}, x)
    for i in range(3):
        torch.testing.assert_close(found[i], 2 * F.linear(x[i], weights[i]))


def test_architectures_are_equal_when_they_compute_the_same_function() -> None:
    one, other = MLP((3,), [4], 2, STREAM), MLP((3,), [4], 2, STREAM.child("other"))
    assert Architecture(one) == Architecture(other)
    assert hash(Architecture(one)) == hash(Architecture(other))
    assert Architecture(one) != Architecture(MLP((3,), [5], 2, STREAM))
    assert Architecture(one) != Architecture(Doubled())
