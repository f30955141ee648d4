"""Which weights stand for a task, and what is silenced; worked out by hand."""

import torch

from atoll.learning.task_weights import read, weights_of_task, without_slot

BASE, MASK, ADAPTIVE = torch.tensor([1.0, 2.0]), torch.tensor([0.5]), torch.tensor([0.1, -3.0])
WEIGHTS = {
    "base/conv": BASE,
    "now/mask/conv": MASK,
    "now/adaptive/conv": ADAPTIVE,
    "now/alpha/conv": torch.tensor([0.7]),
    "foreign/conv": torch.tensor([[5.0, 5.0], [6.0, 6.0]]),
    "past/mask/conv": torch.tensor([[0.1], [0.2]]),
    "past/adaptive/conv": torch.tensor([[4.0, 0.2], [-0.3, 5.0]]),
    "past/target/conv": torch.tensor([[9.0, 9.0], [8.0, 8.0]]),
    "kept/1/now/alpha/conv": torch.tensor([0.4]),
    "kept/1/foreign/conv": torch.tensor([[7.0, 7.0]]),
}


def test_the_present_task_has_what_it_has_now_pruned_with_the_base() -> None:
    found = weights_of_task(WEIGHTS, ["conv"], 2, 2, 0.5)
    names = {"now/mask/conv", "now/adaptive/conv", "now/alpha/conv", "foreign/conv", "base/conv"}
    assert found.keys() == names
    assert found["now/adaptive/conv"].tolist() == [0.0, -3.0]
    assert found["base/conv"] is BASE


def test_a_past_task_has_its_place_among_past_ones_and_what_was_kept_of_it() -> None:
    found = weights_of_task(WEIGHTS, ["conv"], 1, 2, 0.5)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "base/conv": [1.0, 2.0],
        "now/mask/conv": WEIGHTS["past/mask/conv"][1].tolist(),
        "now/adaptive/conv": [0.0, 5.0],
        "now/alpha/conv": WEIGHTS["kept/1/now/alpha/conv"].tolist(),
        "foreign/conv": [[7.0, 7.0]],
    }


def test_what_was_kept_of_past_tasks_and_layers_that_are_not_read_are_left_out() -> None:
    found = read({**WEIGHTS, "foreign/head": torch.ones(1)}, ["conv"])
    assert found.keys() == {
        name for name in WEIGHTS if not name.startswith(("kept/", "foreign/"))
    } | {"foreign/head"}


def test_a_slot_that_is_left_out_is_zero_and_the_original_stays() -> None:
    found = without_slot(WEIGHTS, 1)
    assert found["foreign/conv"].tolist() == [[5.0, 5.0], [0.0, 0.0]]
    assert WEIGHTS["foreign/conv"].tolist() == [[5.0, 5.0], [6.0, 6.0]]
    assert all(found[name] is WEIGHTS[name] for name in WEIGHTS if name != "foreign/conv")
