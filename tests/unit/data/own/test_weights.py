"""Weights of rows: they count in the loss, and nowhere else."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import atoll
from atoll import data, methods
from atoll.core.errors import UserError
from atoll.core.rows import Rows
from atoll.data.own import tables
from atoll.learning.losses import cross_entropy
from atoll.runs.predict.model import Predictor


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def table(name: str, rows: int, weight: str = "w") -> str:
    draw = random.Random(name)
    lines = [f"age,lab,{weight},outcome"]
    for _ in range(rows):
        age, lab = draw.gauss(60, 10), draw.gauss(0, 1)
        label = "ill" if (age - 60) / 10 + lab > 0 else "well"
        lines.append(f"{age:.1f},{lab:.2f},{draw.choice(['1', '2', '0.5', '40'])},{label}")
    Path(f"{name}.csv").write_text("\n".join(lines) + "\n")
    return f"{name}.csv"


def test_weights_are_read_by_site_and_are_no_input() -> None:
    files = [table("a", 40), table("b", 40, "weight"), table("c", 40)]
    sites = {"a": {"weights": "w"}, "b": {"weights": "weight"}, "c": {}}
    whole = data.load("", files=files, label="outcome", sites=sites, ignore=[])
    assert whole.weights is not None
    assert {*whole.weights[:80].tolist()} == {0.5, 1.0, 2.0, 40.0}
    assert {*whole.weights[80:].tolist()} == {1.0}
    survey = tables.survey(files=[table("d", 40), table("e", 40)], label="outcome", weights="w")
    treatments = {column.name: column.treatment for column in survey.columns}
    assert treatments["w"] == "weight of a row in training; no input"
    plain = data.load("", files=["d.csv", "e.csv"], label="outcome", ignore=["w"])
    weighted = data.load("", files=["d.csv", "e.csv"], label="outcome", weights="w")
    assert np.array_equal(plain.x, weighted.x)
    assert plain.fingerprint != weighted.fingerprint


@pytest.mark.parametrize("value", ["0", "-1", "", "heavy", "nan"])
def test_a_weight_that_is_none_is_refused_with_its_line(value: str) -> None:
    rows = [f"{40 + i}.5,1,{'xy'[i % 2]}" for i in range(20)]
    Path("a.csv").write_text("\n".join(["age,w,outcome", *rows, f"50,{value},x"]) + "\n")
    with pytest.raises(UserError) as error:
        tables.survey(files=["a.csv"], label="outcome", weights="w")
    assert "is no weight" in error.value.what
    assert "line 22" in error.value.where


def test_a_weight_of_two_is_the_row_twice() -> None:
    stream = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=stream, dtype=torch.float64)
    y, weights = torch.tensor([0, 1, 2, 1, 0]), torch.tensor([2.0, 1, 3, 1, 1])
    none = torch.zeros(5, 0)
    loss = cross_entropy(logits, Rows(none, none, y, weights.double()))
    places = torch.repeat_interleave(torch.arange(5), weights.long())
    twice = cross_entropy(logits[places], Rows(none[places], none[places], y[places]))
    assert torch.allclose(loss, twice)


def trained(method: str, out: str, mode: str = "loop", **given: Any) -> dict[str, torch.Tensor]:
    small: dict[str, Any] = {"rounds": 2, "widths": [4], "epochs": 1, "engine": {"mode": mode}}
    own = {"files": ["a.csv", "b.csv"], "label": "outcome", **given}
    atoll.run(method, out=out, data=own, **small)
    return Predictor(Path(out), "a").model


@pytest.mark.parametrize("method", ["alone", "chfl", "fedavg"])
def test_rows_count_by_their_weights_in_training(method: str) -> None:
    for name in ("a", "b"):
        text = Path(table(name, 60)).read_text().splitlines()
        even = [text[0].replace("w", "even"), *(",".join(_even(line)) for line in text[1:])]
        Path(f"{name}.csv").write_text("\n".join(_joined(text, even)) + "\n")
    without = trained(method, "without", ignore=["w", "even"])
    even_weights = trained(method, "even", weights="even", ignore=["w"])
    weighted = trained(method, "weighted", weights="w", ignore=["even"])
    stacked = trained(method, "stacked", "auto", weights="w", ignore=["even"])
    assert all(torch.allclose(without[n], even_weights[n], atol=1e-6) for n in without)
    assert any(not torch.allclose(without[n], weighted[n], atol=1e-4) for n in without)
    assert all(torch.allclose(stacked[n], weighted[n], atol=1e-5) for n in weighted)


def _even(line: str) -> list[str]:
    cells = line.split(",")
    return [*cells[:2], "3", cells[3]]


def _joined(text: list[str], even: list[str]) -> list[str]:
    """The lines with one more column, of equal weights."""
    return [f"{b.split(',')[2]},{a}" for a, b in zip(text, even, strict=True)]


def test_a_method_that_ignores_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table("a", 40), table("b", 40)
    own = {"files": ["a.csv", "b.csv"], "label": "outcome", "weights": "w"}
    load = methods.load
    deaf = lambda name: replace(load(name), weighted=name == "alone")  # noqa: E731
    monkeypatch.setattr(methods, "load", deaf)
    with pytest.raises(UserError, match="'analytic' does not use the weights of rows") as error:
        atoll.run("analytic", data=own, rounds=1)
    assert error.value.remedy == "use alone, or leave data.weights out"
    with pytest.raises(UserError, match="'analytic' does not use the weights of classes"):
        atoll.run("analytic", data={**own, "weights": ""}, rounds=1, class_weight="balanced")
