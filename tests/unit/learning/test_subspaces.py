"""Protected subspaces, worked out by hand."""

import torch

from atoll.core.rng import Stream
from atoll.learning import subspaces
from atoll.learning.models import MLP, outputs

NONE = torch.zeros((3, 0), dtype=torch.float64)
GRAM = torch.diag(torch.tensor([1.0, 90.0, 9.0], dtype=torch.float64))


def spans(basis: torch.Tensor, *axes: int) -> None:
    """The basis is orthonormal and spans these axes."""
    expected = torch.zeros(3, dtype=torch.float64)
    expected[list(axes)] = 1
    torch.testing.assert_close(basis @ basis.T, torch.diag(expected))
    assert basis.shape[1] == len(axes)


def test_a_basis_grows_until_it_holds_the_energy() -> None:
    spans(subspaces.enlarged(NONE, GRAM, 0.85), 1)  # 90 of 100
    spans(subspaces.enlarged(NONE, GRAM, 0.95), 1, 2)
    spans(subspaces.enlarged(NONE, GRAM, 0.995), 0, 1, 2)


def test_what_the_basis_holds_already_counts() -> None:
    first = subspaces.enlarged(NONE, GRAM, 0.85)
    spans(subspaces.enlarged(first, GRAM, 0.85), 1)
    turned = torch.diag(torch.tensor([90.0, 9.0, 1.0], dtype=torch.float64))
    spans(subspaces.enlarged(first, turned, 0.85), 0, 1)


def test_sites_without_activations_add_nothing() -> None:
    assert subspaces.enlarged(NONE, torch.zeros_like(GRAM), 0.9).shape == (3, 0)


def test_gram_matrices_are_those_of_the_inputs_of_layers() -> None:
    model = MLP((2,), (1,), 2, Stream.of("test"))
    weights = model.state_dict() | {"weight0": torch.tensor([[1.0, 2.0]]), "bias0": torch.zeros(1)}
    grams = subspaces.input_grams(model, weights, torch.tensor([[1.0, 1.0], [0.0, -5.0]]))
    assert grams["0"].tolist() == [[1, 1, 1], [1, 26, -4], [1, -4, 2]]
    assert grams["1"].tolist() == [[9, 3], [3, 2]]  # hidden 3 and 0


def test_a_projected_update_changes_no_output_on_the_subspace() -> None:
    model = MLP((2,), (3,), 2, Stream.of("test")).double()
    before = model.state_dict()
    after = {name: weight + 1.5 for name, weight in before.items()}
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    bases = {}
    for layer, gram in subspaces.input_grams(model, before, x).items():
        bases[layer] = subspaces.enlarged(gram.new_zeros((len(gram), 0)), gram, 0.999)
    moved = subspaces.projected(before, after, bases)
    torch.testing.assert_close(outputs(moved, x, 2), outputs(before, x, 2))
    other = torch.tensor([[-2.0, 1.0]], dtype=torch.float64)
    assert not torch.allclose(outputs(moved, other, 2)[-1], outputs(before, other, 2)[-1])


def test_without_bases_nothing_is_projected() -> None:
    after = {"weight0": torch.ones(1, 1), "bias0": torch.ones(1)}
    assert subspaces.projected({}, after, {}) == after
