"""Which weights stand for a task, and what is silenced; worked out by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.core.rng import Stream
from atoll.learning.task_weights import (
    ALIGNS,
    Layout,
    arranged,
    first_base,
    read,
    weights_of_task,
    without_slot,
)

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


def test_the_width_before_the_head_is_that_of_the_last_layer() -> None:
    """Two convolutions and a wide layer of 500; with banks, two of them are merged into one."""
    model: Any = SimpleNamespace(
        layers={"conv3": (20, 1, 5, 5), "conv2": (50, 20, 5, 5), "full": (500, 200)}
    )
    plain = arranged(model, slots=3, banks=False, dense=True, shared=True)
    assert plain.width == 500
    assert plain.shapes["merge"] == (500, 500)
    assert plain.layers == ("conv3", "conv2", "full", "merge")
    banks = arranged(model, slots=3, banks=True, dense=False, shared=False)
    assert banks.shapes["merge"] == (500, 1000)
    assert banks.shapes["align3"] == (20, 60)
    assert banks.private == (*ALIGNS, "merge")


def test_projections_begin_with_a_deviation_of_one_over_the_root_of_their_inputs() -> None:
    """100 inputs: a deviation of 0.1; the network's own layers are copied."""
    shapes = {"conv": (2, 2), "merge": (400, 100)}
    layout = Layout(shapes, ("conv",), ("conv", "merge"), 100, 3, False)
    conv = torch.ones(2, 2)
    base = first_base(layout, {"conv": conv}, Stream.of)
    assert torch.equal(base["conv"], conv)
    assert base["conv"] is not conv
    assert float(base["merge"].std()) == pytest.approx(0.1, rel=0.02)
