"""Which prototypes are rehearsed and how they are kept: rules on small numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.core.federation import Moment
from atoll.methods import splitnn


class BareServer(splitnn.Server):
    """A server that has what a rule reads, and no more."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def old(counts: list[int], here: list[int], stage: int) -> list[int]:
    head = SimpleNamespace(class_counts=lambda moment: torch.tensor(here))
    server = BareServer(head=head, counts=torch.tensor(counts))
    return [int(kind) for kind in server._old(Moment(stage, 0, 1))]


def test_classes_that_are_gone_are_rehearsed_or_all_that_are_known() -> None:
    assert old([1, 0, 3, 2], [0, 4, 0, 1], stage=1) == [0, 2]
    assert old([1, 0, 3, 2], [1, 4, 1, 1], stage=1) == [0, 2, 3]
    assert old([1, 0, 3, 2], [0, 4, 0, 1], stage=0) == []


@pytest.mark.parametrize(
    ("replay", "kept"),
    [
        ("pass", [[4.0], [7.0], [0.0], [2.0], [5.0]]),
        ("fedprok", [[(1 * 4 + 3 * 8) / 4], [7.0], [0.0], [2.0], [(5 + 6) / 2]]),
        ("fedspace", [[0.9 * 4 + 0.1 * 8], [7.0], [0.0], [2.0], [0.9 * 5 + 0.1 * 6]]),
    ],
)
def test_a_prototype_of_a_single_row_is_one_that_is_known(
    replay: str, kept: list[list[float]]
) -> None:
    """Of those known by one row, 0 comes again in three, 4 in one, and 3 does not; 1 is new."""
    rows, y = torch.tensor([[8.0], [8.0], [8.0], [7.0], [6.0]]), torch.tensor([0, 0, 0, 1, 4])
    server = BareServer(
        head=SimpleNamespace(training_rows=lambda clients, moment: (rows, y)),
        options=SimpleNamespace(replay=replay),
        counts=torch.tensor([1, 0, 0, 1, 1]),
        means=torch.tensor([[4.0], [0.0], [0.0], [2.0], [5.0]]),
        radius=None,
    )
    clients: Any = None
    server._keep(clients, Moment(1, 0, 1))
    torch.testing.assert_close(server.means, torch.tensor(kept))
    assert server.counts.tolist() == [4, 1, 0, 1, 2]
    assert server.radius is None  # that of the first stage stays
    server._keep(clients, Moment(0, 0, 1))
    assert float(server.radius) == 0.0  # equal rows of a class


@pytest.mark.parametrize(
    ("options", "moment", "calls"),
    [
        ({}, Moment(0, 0, 2), ["begin"]),
        ({}, Moment(1, 0, 2), ["begin"]),
        ({}, Moment(1, 1, 2), []),
        ({"fresh": True}, Moment(0, 0, 2), ["begin"]),
        ({"fresh": True}, Moment(1, 0, 2), ["begin", "start 1"]),
        ({"fresh": True}, Moment(1, 1, 3), []),
        ({"replay": "fedprok"}, Moment(0, 0, 2), ["begin"]),
        ({"replay": "fedprok"}, Moment(1, 0, 2), ["begin", "rows"]),
        ({"replay": "pass"}, Moment(1, 1, 2), ["keep", "settle"]),
        ({"replay": "none"}, Moment(1, 1, 2), []),
    ],
)
def test_a_round_begins_and_ends_its_stage(
    options: dict[str, Any], moment: Moment, calls: list[str]
) -> None:
    seen: list[str] = []

    def training_rows(clients: Any, moment: Moment) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append("rows")
        return torch.ones(1, 1), torch.tensor([0])

    head = SimpleNamespace(
        begin=lambda moment: seen.append("begin"),
        start=lambda stage: seen.append(f"start {stage}"),
        training_rows=training_rows,
        job=lambda *parts: SimpleNamespace(y=torch.zeros(5)),
        train=lambda clients, job: SimpleNamespace(totals={"loss": 60.0}),
        learners=lambda moment: ["a"],
        outputs=2,
    )
    usual = {"fresh": False, "replay": "none", "epochs": 3}
    server = BareServer(
        head=head, options=SimpleNamespace(**{**usual, **options}), counts=torch.zeros(2)
    )
    parts = {"_loss": lambda moment: None, "_constants": lambda moment: None}
    server.__dict__.update(parts, _keep=lambda clients, moment: seen.append("keep"))
    clients: Any = SimpleNamespace(ask=lambda action, requests: seen.append(action.__name__))
    assert server.round(clients, moment) == {"loss": 60.0 / (3 * 5 * 2)}
    assert seen == calls


@pytest.mark.parametrize(
    ("by_columns", "fresh", "fil_eval", "ids"),
    [
        (True, False, "sum", ["a", "b", "c"]),
        (True, False, "current", ["c"]),
        (True, True, "sum", ["c"]),
        (True, True, "current", ["c"]),
        (False, False, "sum", ["a", "b", "c"]),
        (False, False, "current", ["a", "b", "c"]),
        (False, True, "sum", ["a", "b", "c"]),
    ],
)
def test_only_with_columns_by_stage_can_the_newest_client_answer_alone(
    by_columns: bool, fresh: bool, fil_eval: str, ids: list[str]
) -> None:
    """Three clients have joined by stage 2; each stage brings one."""
    server = BareServer(
        options=SimpleNamespace(fresh=fresh, fil_eval=fil_eval),
        site=SimpleNamespace(
            by_columns=by_columns, parties=lambda stage: ["a", "b", "c", "d"][: stage + 1]
        ),
    )
    assert server._answering(2) == ids
