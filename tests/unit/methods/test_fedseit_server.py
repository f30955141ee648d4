"""FedSeIT's server: the mean of bases and the likeness of tasks, worked out by hand."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from atoll.core.federation import Clients, Moment
from atoll.core.messages import Empty, Packet, Tensors, wrap
from atoll.learning.sparse import coded
from atoll.learning.task_weights import renumbered
from atoll.methods.fedseit import Described, Fitted, Options, Server, Shared
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


class Scripted:
    """A transport whose clients train at once and give what is written."""

    def __init__(self, likeness: dict[str, list[float]], stops: str = "") -> None:
        self.likeness, self.stops = likeness, stops
        self.asked: list[tuple[str, str]] = []
        self.sent: dict[str, Any] = {}

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        self.asked += [(action, id) for id in packets]
        found = {}
        for id, packet in packets.items():
            message: Any = packet.message
            if action == "describe":
                reply: Any = Described(torch.tensor([self.likeness[id]]))
            elif action == "receive":
                self.sent[id], reply = message, Empty()
            elif action == "fit":
                reply = Fitted(message.base, 4, 0.5, id in self.stops)
            else:
                reply = Shared(coded(torch.tensor([0.0, {"a": 1.0, "b": 2.0}[id]])))
            found[id] = wrap(reply)
        return found


def round_of(judge: Server, transport: Scripted, moment: Moment) -> dict[str, float]:
    clients = Clients(["a", "b"], transport, moment, packing=False)
    return dict(judge.round(clients, moment))


def test_a_new_task_is_given_the_likest_parts_and_who_took_whose_is_noted() -> None:
    judge = server(transfer="sit", keep=1)
    first = Scripted({"a": [1.0, 0.0], "b": [0.0, 1.0]})
    notes = round_of(judge, first, Moment(0, 0, 1))
    assert notes == {
        "rate a": 0.5,
        "rate b": 0.5,
        "nonzero a": 1.0,
        "nonzero b": 1.0,
        "finished": 0.0,
    }
    assert "receive" not in {action for action, _ in first.asked}
    second = Scripted({"a": [0.0, 1.0], "b": [0.6, 0.8]})  # a is now what b was
    notes = round_of(judge, second, Moment(1, 0, 1))
    assert notes["a takes b task 0"] == pytest.approx(1.0)
    assert notes["b takes b task 0"] == pytest.approx(0.8)
    assert second.sent["a"].adaptive["0/values"].tolist() == [2.0]
    assert second.sent["a"].scores.tolist() == [1.0]


def test_a_client_that_has_stopped_is_asked_again_with_the_next_task() -> None:
    judge = server(combine="none")
    for moment, stops, asked, finished in (
        (Moment(0, 0, 3), "b", ["a", "b"], 0.0),
        (Moment(0, 1, 3), "a", ["a"], 1.0),
        (Moment(1, 0, 3), "", ["a", "b"], 0.0),
    ):
        transport = Scripted({}, stops)
        assert round_of(judge, transport, moment)["finished"] == finished
        assert transport.asked == [("fit", id) for id in asked]
