"""What clients and servers of vertical methods leave to their halves."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from atoll.core.federation import Moment
from atoll.core.messages import Tensors
from atoll.families import vertical_delegates
from atoll.families.vertical_snapshots import frozen_snapshots, moved_snapshots
from atoll.learning import knowledge
from atoll.learning.split import Batches

MOMENT = Moment(1, 0, 2)


class FakeServer:
    """A server with two attributes that belong to its state."""

    stored = ("means", "counts")
    state, restore = vertical_delegates.server_state, vertical_delegates.restore_server

    def __init__(self, scale: float) -> None:
        self.head: Any = SimpleNamespace(
            state=lambda: {"weights/w": torch.ones(1)},
            restore=lambda state: {n: t for n, t in state.items() if n != "weights/w"},
        )
        self.site: Any = None
        self.options: Any = None
        self.means, self.counts = torch.full((2,), scale), torch.full((3,), 2 * scale)


def test_the_state_of_a_server_is_its_half_and_the_attributes_that_it_names() -> None:
    first, second = FakeServer(1.0), FakeServer(5.0)
    state = first.state()
    assert sorted(state) == ["counts", "means", "weights/w"]
    second.restore(state)
    assert second.means.tolist() == [1.0, 1.0]
    assert second.counts.tolist() == [2.0, 2.0, 2.0]


def test_a_fisher_diagonal_reads_the_first_rows_in_the_order_of_the_seed(
    monkeypatch: Any,
) -> None:
    read: list[Tensor] = []

    def fisher(network: Any, weights: Any, x: Tensor, g: Tensor) -> Tensors:
        read.extend([x, g])
        return {"w": torch.ones(1)}

    monkeypatch.setattr(knowledge, "fisher", fisher)
    half = SimpleNamespace(network=None, weights=None)
    learner: Any = SimpleNamespace(half=half, scaled=lambda x: 10 * x)
    x, gradient = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.5], [0.25]])
    vertical_delegates.row_fisher(learner, x, 17, gradient)
    order = Batches(3, 3, 17).at(0, torch.device("cpu"))
    assert read[0].flatten().tolist() == (10 * x[order[:2]]).flatten().tolist()
    assert read[1].flatten().tolist() == [0.5, 0.25]


def test_snapshots_of_nothing_are_none() -> None:
    site: Any = SimpleNamespace(id="a")
    assert frozen_snapshots(site, MOMENT, {}) == []
    assert moved_snapshots(MOMENT, {}) == []
    (frozen,) = frozen_snapshots(site, MOMENT, {"w": torch.tensor([True, False])})
    assert (frozen.rows, frozen.values) == (("w",), ((0.5, 2.0),))
    (moved,) = moved_snapshots(MOMENT, {"cat": 3.0})
    assert (moved.stage, moved.rows, moved.values) == (1, ("cat",), ((3.0,),))
