"""Base, mask and adaptive part, by hand."""

import torch

from atoll.learning.decomposed import pruned, restored


def test_an_entry_must_be_larger_than_the_threshold_to_stay() -> None:
    adaptive = torch.tensor([0.5, -0.5, 0.25, -0.75, 0.0])
    assert pruned(adaptive, 0.5).tolist() == [0, 0, 0, -0.75, 0]
    assert pruned(adaptive, 0.0).tolist() == adaptive.tolist()


def test_a_layer_is_the_base_times_one_gate_for_each_output_plus_the_adaptive_part() -> None:
    base, adaptive = torch.full((2, 3), 4.0), torch.ones(2, 3)
    found = restored(base, torch.tensor([0.0, 100.0]), adaptive)
    assert found.tolist() == [[3.0] * 3, [5.0] * 3]
