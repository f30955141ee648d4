"""What V-LETO freezes, mixes and keeps: its rules on small numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.core.federation import Moment
from atoll.learning import knowledge
from atoll.learning.split import Batches
from atoll.methods import vleto
from atoll.runs.config import resolve
from atoll.runs.parts import parts

FISHER = {"w": torch.tensor([0.0, 1.9, 2.3, 9.0])}  # mean 3.3, deviation 3.4


class BareClient(vleto.Client):
    """A client that has what a rule reads, and no more."""

    def __init__(self, by_columns: bool = False, **options: Any) -> None:
        usual = {"lmo_rule": "quantile", "rho": 0.5, "k0": 0.0, "alpha": 0.3}
        self.options: Any = SimpleNamespace(**{**usual, **options})
        self.site: Any = SimpleNamespace(by_columns=by_columns)
        self.fisher, self._mask = dict(FISHER), (-1, None)

    def frozen(self, stage: int) -> list[bool] | None:
        masks = self._frozen(Moment(stage, 0, 1))
        return None if masks is None else [bool(value) for value in masks["w"]]


class BareServer(vleto.Server):
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def test_by_a_quantile_the_entries_that_matter_most_are_frozen() -> None:
    assert BareClient().frozen(1) == [False, False, True, True]
    assert BareClient(by_columns=True).frozen(1) == [False, False, True, True]
    assert BareClient(lmo_rule="off").frozen(1) is None


def test_with_columns_by_stage_every_other_rule_freezes_all() -> None:
    assert BareClient(by_columns=True, lmo_rule="paper").frozen(1) == [True] * 4
    assert BareClient(lmo_rule="paper", alpha=0.0).frozen(1) == [False, False, False, True]


@pytest.mark.parametrize(
    ("stage", "frozen"),
    [
        (0, [False, False, False, True]),  # above 3.3 - 0.3 log 2 * 3.4 = 2.6
        (1, [False, False, True, True]),  # above 2.2
        (2, [False, True, True, True]),  # above 1.9
    ],
)
def test_the_threshold_falls_with_the_number_of_tasks(stage: int, frozen: list[bool]) -> None:
    assert BareClient(lmo_rule="paper").frozen(stage) == frozen


def test_the_mask_of_a_stage_stays_though_the_stage_adds_to_what_is_known() -> None:
    client = BareClient()
    first = client.frozen(1)
    client.fisher = {"w": FISHER["w"].flip(0)}
    assert client.frozen(1) == first
    assert client.frozen(2) == [True, True, False, False]


@pytest.mark.parametrize(
    ("by_columns", "stage", "lambda_f", "mixes"),
    [(True, 1, 0.5, True), (True, 1, 0.0, False), (True, 0, 0.5, False), (False, 1, 0.5, False)],
)
def test_prototypes_are_mixed_with_columns_by_stage_after_the_first_unless_they_weigh_nothing(
    by_columns: bool, stage: int, lambda_f: float, mixes: bool
) -> None:
    mode = {"mode": "columns"} if by_columns else {"mode": "classes", "stages": 2}
    assert kept_terms(stage, {"clients": 2, **mode}, lambda_f, "classification") == "f" * mixes


def kept_terms(stage: int, scenario: dict[str, Any], lambda_f: float, task: str) -> str:
    """Which prototypes the loss of a stage keeps."""
    data = {"name": "synthetic-table", "rows": 60, "task": task}
    method = {"name": "vleto", "lambda_f": lambda_f, "lambda_a": 0}
    server = parts(resolve({"data": data, "method": method, "scenario": scenario}, "test")).server()
    kept: str = server._loss(Moment(stage, 0, 1)).args[0].replay
    return kept


def test_a_number_has_no_prototypes() -> None:
    assert kept_terms(1, {"clients": 2, "mode": "columns"}, 0.5, "regression") == ""


def test_the_end_of_a_stage_mixes_known_prototypes_and_adds_those_of_single_rows() -> None:
    """Class x is known and moves half the way to (8, 0); y is new, with one row; z is away."""
    rows, y = torch.tensor([[8.0, 0.0], [1.0, 2.0]]), torch.tensor([0, 1])
    server = BareServer(
        head=SimpleNamespace(
            training_rows=lambda clients, moment: (rows, y), learners=lambda moment: ["a"]
        ),
        options=SimpleNamespace(beta=0.5, lmo_rule="off"),
        site=SimpleNamespace(classes=["x", "y", "z"], regression=False),
        means=torch.tensor([[2.0, 8.0], [0.0, 0.0], [5.0, 5.0]]),
        known=torch.tensor([True, False, True]),
    )
    clients: Any = SimpleNamespace(ask=lambda action, requests: {"a": vleto.Settled(0.25)})
    notes = server._end(clients, Moment(1, 0, 1))
    assert notes == {"moved class 0": 5.0, "frozen a": 0.25}
    assert server._moved == {"x": 5.0}
    assert server.means.tolist() == [[5.0, 4.0], [1.0, 2.0], [5.0, 5.0]]
    assert server.known.tolist() == [True, True, True]


@pytest.mark.parametrize(("most", "count"), [(2, 2), (9, 3)])
def test_importance_is_measured_on_some_rows_with_their_own_labels(most: int, count: int) -> None:
    """The server takes labels, and a client its rows, in the order of one seed."""
    y, sent, asked = torch.tensor([5, 6, 7]), list[Any](), list[Any]()

    def gradients(joint: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        asked.append(labels.tolist())
        return joint

    def embedded(clients: Any, ids: Any, part: str, stage: int, sample: Any) -> dict[str, Any]:
        asked.append((part, stage, sample))
        return {"a": torch.ones(count, 1)}

    server = BareServer(
        options=SimpleNamespace(fisher_rows=most, batch=4, clip=0.0, noise=0.0),
        site=SimpleNamespace(
            train=lambda stage: SimpleNamespace(y=y), stream=lambda *_: SimpleNamespace(key=17)
        ),
        head=SimpleNamespace(
            learners=lambda moment: ["a"],
            embedded=embedded,
            joined=lambda parts: parts["a"],
            row_gradients=gradients,
            draws=lambda *_: SimpleNamespace(key=3),
            parts=lambda gradient, ids: {"a": gradient},
        ),
    )
    clients: Any = SimpleNamespace(ask=lambda action, requests: sent.append(requests))
    server._measure(clients, Moment(1, 0, 1))
    order = Batches(3, 3, 17).at(0, torch.device("cpu"))
    assert asked == [("train", 1, (17, count)), y[order[:count]].tolist()]
    assert sent[0]["a"].seed == 17
    assert len(sent[0]["a"].gradient) == count


def test_a_client_measures_the_rows_that_the_server_has_labels_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[Any] = []

    def fisher(network: Any, weights: Any, x: torch.Tensor, g: torch.Tensor) -> Any:
        read.append((x.flatten().tolist(), g.flatten().tolist()))
        return {"w": torch.ones(4)}

    monkeypatch.setattr(knowledge, "fisher", fisher)
    client = BareClient()
    x = torch.tensor([[5.0], [6.0], [7.0]])
    client.site.train, client.site.device = lambda stage: SimpleNamespace(x=x), torch.device("cpu")
    half = SimpleNamespace(network=None, weights=None)
    client.learner = SimpleNamespace(half=half, scaled=lambda x: 10 * x)  # type: ignore[assignment]
    client.measured = 0
    request = vleto.Measure(17, torch.tensor([[1.0], [2.0]]))
    for _ in range(2):  # a message that comes twice counts once
        client.measure(request, Moment(1, 0, 1))
    order = Batches(3, 3, 17).at(0, torch.device("cpu"))
    assert read == [((10 * x[order[:2]]).flatten().tolist(), [1.0, 2.0])]
    assert client.fisher["w"].tolist() == (FISHER["w"] + 1).tolist()


def test_the_final_model_of_the_server_is_that_of_its_head() -> None:
    top = {"weight": torch.ones(2, 2), "seen": torch.tensor([True, False])}
    server = BareServer(head=SimpleNamespace(final_model=lambda: top))
    assert server.final_model({}, "union", 0) == top
