"""Both attacks as snapshots of a run that names the audit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from atoll.audits import leakage
from atoll.audits.leakage import labels_from_gradients, labels_snapshot, reconstruction
from atoll.core.federation import Moment
from atoll.core.record import read_snapshots
from atoll.engines.local import local_engine
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.parts import parts

AUDIT = "atoll.audits.leakage:snapshots"
WIDTH = 6
SMALL: dict[str, Any] = {
    "rounds": 1,
    "data": {"name": "digits"},
    "scenario": {"split": "parties", "clients": 2, "cut": "strips", "train": 0.2},
    "method": {"name": "vleto", "rate": 0.1, "batch": 32, "width": WIDTH},
    "dtype": "float64",
    "engine": {"mode": "loop"},
}


def config(**changes: Any) -> RunConfig:
    return resolve(change(SMALL, changes), "test")


def test_labels_are_guessed_from_gradients_by_who_knows_three_rows_of_each_class() -> None:
    head = parts(config()).server().head
    y = torch.arange(36) % 3
    joint = F.one_hot(y, WIDTH).double() + torch.arange(36)[:, None] / 100
    (snapshot,) = labels_snapshot(head, Moment(0, 0, 1), joint, y)
    rows = joint.requires_grad_()
    loss = F.cross_entropy(head.network(head.weights, rows), y, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, [rows])
    known = torch.tensor([0, 3, 6, 1, 4, 7, 2, 5, 8])
    assert snapshot.columns == ("guessed", "chance")
    assert snapshot.values[0] == (labels_from_gradients(gradient, y, known), 1 / 3)
    assert [value[1] for value in snapshot.values] == [1 / 3] * 3
    few = leakage.FEWEST - 1
    assert labels_snapshot(head, Moment(0, 0, 1), joint[:few], y[:few]) == []


def test_a_client_measures_how_well_a_third_of_its_rows_is_guessed_from_the_others() -> None:
    client = parts(config(replace=AUDIT)).client("site-0")
    x = client.site.train(0).x
    (snapshot,) = client.snapshot(Moment(0, 0, 1))
    embedding = client.learner.half.embed(x)
    expected = [
        reconstruction(torch.round(embedding, decimals=1) if cut else embedding, x, len(x) * 2 // 3)
        for cut in (False, True)
    ]
    assert [value for (value,) in snapshot.values] == pytest.approx(expected)


@pytest.mark.parametrize("method", ["splitnn", "vleto"])
def test_an_audit_adds_snapshots_and_changes_no_event(method: str, tmp_path: Path) -> None:
    names, replay = {}, {"replay": "fedprok"} if method == "splitnn" else {}
    for replacement in ("", AUDIT):
        folder = tmp_path / (replacement or "plain")
        changes = {"method.name": method, **replay, "replace": replacement}
        execute(config(**changes), folder, local_engine)
        names[replacement] = {snapshot.name for snapshot in read_snapshots(folder)}
    plain, audited = (tmp_path / name / "events.jsonl" for name in ("plain", AUDIT))
    assert plain.read_bytes() == audited.read_bytes()
    added = {"columns from embeddings", "labels from gradients"}
    assert names[AUDIT] - names[""] == added
    assert names[""] == names[AUDIT] - added
