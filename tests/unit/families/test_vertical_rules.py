"""Who learns, what is seen and what is covered: the small rules of split learning."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.core.errors import UserError
from atoll.core.federation import Moment
from atoll.families.vertical import Head, Learner, _covers
from atoll.families.vertical_snapshots import embeddings_snapshot

LATER = Moment(2, 0, 1)


class BareHead(Head):
    """A head that has what a rule reads, and no more."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(views=(), **parts)


class BareLearner(Learner):
    def __init__(self, **settings: Any) -> None:
        self.settings: Any = SimpleNamespace(**settings)


@pytest.mark.parametrize(
    ("by_columns", "protocol", "alone"),
    [(True, "P1", True), (True, "P2", False), (False, "P1", False), (False, "P2", False)],
)
def test_with_columns_by_stage_and_protocol_1_the_newest_client_learns_alone(
    by_columns: bool, protocol: str, alone: bool
) -> None:
    site = SimpleNamespace(by_columns=by_columns, parties=lambda stage: list("abcd")[: stage + 2])
    head = BareHead(site=site, settings=SimpleNamespace(protocol=protocol))
    assert head.alone is alone
    assert head.learners(LATER) == (["d"] if alone else ["a", "b", "c", "d"])


def test_each_view_of_a_class_that_was_seen_has_an_output_that_was_seen() -> None:
    head = BareHead(seen=torch.tensor([True, False, True]), classes=2)
    assert head.seen_outputs.tolist() == [True, False]
    head.views = (torch.clone,)
    assert head.seen_outputs.tolist() == [True, True, False, False]


def test_a_stage_marks_its_classes_and_the_first_that_was_not_declared_is_refused() -> None:
    def begun(*y: int) -> list[bool]:
        site = SimpleNamespace(
            classes=["x", "y", "z"], train=lambda stage: SimpleNamespace(y=torch.tensor(y))
        )
        undeclared = SimpleNamespace(undeclared="refuse")
        seen = torch.tensor([False, False, True])
        head = BareHead(site=site, settings=undeclared, classes=2, seen=seen)
        head.begin(LATER)
        assert head.seen is not seen
        return [bool(known) for known in head.seen]

    assert begun(0, 0) == [True, False, True]
    assert begun(1, 0) == [True, True, True]
    with pytest.raises(UserError, match="z"):
        begun(2, 0)


def test_a_rows_gradient_is_that_of_its_own_cross_entropy_by_the_size_of_a_batch() -> None:
    head = BareHead(logits=lambda joint: joint)
    rows, y = torch.zeros(2, 2), torch.tensor([0, 1])
    assert head.row_gradients(rows, y).tolist() == [[-0.5, 0.5], [0.5, -0.5]]
    assert head.row_gradients(rows, y, 4).tolist() == [[-0.125, 0.125], [0.125, -0.125]]


def test_classes_are_counted_to_the_last_one_there_is() -> None:
    site = SimpleNamespace(train=lambda stage: SimpleNamespace(y=torch.tensor([1, 1, 0])))
    head = BareHead(site=site, seen=torch.zeros(4))
    assert head.class_counts(LATER).tolist() == [1, 2, 0, 0]


def test_a_restored_head_has_as_many_classes_as_its_outputs_by_its_views() -> None:
    head = BareHead(site=SimpleNamespace(device=torch.device("cpu")))
    head.views = (torch.clone,)
    state = {"weights/weight0": torch.zeros(6, 2), "weights/bias0": torch.zeros(6)}
    rest = head.restore({**state, "seen": torch.ones(3), "more": torch.ones(1)})
    assert (head.classes, list(rest)) == (3, ["more"])


@pytest.mark.parametrize("ids", [("a",), ("a", "b")])
def test_a_joint_gradient_is_one_message_for_all(ids: tuple[str, ...]) -> None:
    head = BareHead(settings=SimpleNamespace(agg="sum"))
    job: Any = SimpleNamespace(ids=ids, agg="sum", steps=2, batches=SimpleNamespace(key=7))
    requests = head._requests(job, 1, torch.ones(3, 2))
    assert list(requests) == list(ids)
    assert len({id(request) for request in requests.values()}) == 1
    assert requests["a"].gradient.tolist() == [[1.0, 1.0]] * 3
    assert (requests["a"].step, requests["a"].more) == (1, True)
    assert not head._requests(job, 2, torch.ones(3, 2))["a"].more


def test_masks_cover_where_every_entry_is_frozen() -> None:
    full, part = torch.ones(3, dtype=torch.bool), torch.tensor([True, False])
    assert _covers({"v": full, "w": full}) is True
    assert _covers({"v": full, "w": part}) is False
    assert _covers({"v": ~full}) is False
    assert _covers(None) is False


@pytest.mark.parametrize(("network", "share"), [("mlp", 0.3), ("dense", 0.0), ("lenet3", 0.0)])
def test_only_an_mlp_drops_units(network: str, share: float) -> None:
    assert BareLearner(network=network, dropout=0.3)._dropped == share


def test_embeddings_are_shown_with_a_name_for_each_column_in_four_digits() -> None:
    site: Any = SimpleNamespace(classes=("cat", "dog"))
    rows = torch.tensor([[1.23456, 0.0, -2.0], [3.0, 123456.0, 0.5]])
    found = embeddings_snapshot(site, LATER, "embeddings", rows, torch.tensor([1, 0]))
    assert found.rows == ("dog", "cat")
    assert found.columns == ("e0", "e1", "e2")
    assert found.values == ((1.235, 0.0, -2.0), (3.0, 123500.0, 0.5))
    assert found.stage == 2
