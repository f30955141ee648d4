"""FedSeIT's server: the mean of bases and the likeness of tasks, worked out by hand."""

from typing import Any

import pytest
import torch

from atoll.core.messages import Tensors
from atoll.learning.task_weights import renumbered
from atoll.methods.fedseit import Options, Server
from atoll.runs.config import change, resolve
from atoll.runs.parts import parts

SMALL: dict[str, Any] = {
    "data": {"name": "synthetic-text", "rows": 60, "classes": 4, "length": 5},
    "scenario": {"split": "tasks", "clients": 2, "stages": 2, "task_classes": 2},
    "model": {"widths": [2]},
    "method": {"name": "fedseit"},
}


def server(**options: Any) -> Server:
    return Server(Options(**options), parts(resolve(change(SMALL, {}), "test")).site("server"))


def averaged(one: list[float], other: list[float], rows: tuple[int, int], **options: Any) -> Any:
    found = server(**options)
    bases: dict[str, Tensors] = {
        id: {"w": torch.tensor(values)[:, None]} for id, values in (("a", one), ("b", other))
    }
    found.base, found.bases = bases["a"], bases
    found.rows = dict(zip("ab", rows, strict=True))
    return found._mean(["a", "b"])["w"].flatten().tolist()


@pytest.mark.parametrize(
    ("weighting", "rows", "mean"),
    [
        ("equal", (1, 3), 2.0),
        ("rows", (1, 3), 3.0),
        ("rows", (0, 1), 4.0),
        ("rows", (1, 0), 0.0),
        ("rows", (0, 0), 2.0),  # nobody has rows: all count alike
    ],
)
def test_bases_count_alike_or_by_rows(weighting: str, rows: tuple[int, int], mean: float) -> None:
    assert averaged([0.0], [4.0], rows, weighting=weighting) == [mean]


def test_a_filter_that_was_not_sent_does_not_count_in_its_mean() -> None:
    one, other = [2.0, 0.0, 0.0], [4.0, 6.0, 0.0]
    assert averaged(one, other, (0, 0), channel_sparse=0.3) == [3.0, 6.0, 0.0]
    assert averaged(one, other, (0, 0)) == [3.0, 3.0, 0.0]


@pytest.mark.parametrize(("similarity", "scores"), [("mean", (0.5, 0.6)), ("rectified", (0.5, 0))])
def test_tasks_are_as_like_as_their_centres(similarity: str, scores: tuple[float, float]) -> None:
    found = server(transfer="sit", similarity=similarity)
    east = torch.tensor([[1.0, 0.0]])
    compare = found.index.compare
    assert compare is not None
    found.index.described = {(1, "a"): east, (0, "a"): torch.tensor([[2.0, 0.0], [0.0, 2.0]])}
    found.index.described[0, "b"] = torch.tensor([[0.6, 0.8]])  # below 0.7
    assert compare(east, found.index.described[0, "a"]) == pytest.approx(scores[0])
    assert compare(east, found.index.described[0, "b"]) == pytest.approx(scores[1])


def test_without_a_class_to_learn_every_label_is_beyond_the_head() -> None:
    assert renumbered(torch.tensor([3, 0]), torch.tensor([], dtype=torch.int64)).tolist() == [1, 1]
