"""A number to predict in own tables, from the files to the answer, the report and predictions."""

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atoll
from atoll import engines, methods
from atoll.core.errors import UserError
from atoll.core.record import Score
from atoll.engines.local import local_engine
from atoll.metrics.answer import MEAN, RIDGE
from atoll.report.page import page
from atoll.report.tables import gather
from atoll.runs.answer import write_answer
from atoll.runs.baselines import regressors
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.parts import parts
from atoll.runs.predict import onnx
from atoll.runs.predict.export import export
from atoll.runs.predict.model import Predictor
from atoll.runs.predict.tables import predict
from atoll.runs.result import Run, text_table

SITES = {"basel": 90, "bern": 60}


def write_tables(folder: Path) -> list[str]:
    """Two hospitals; days in hospital are linear in two columns, and noise."""
    draws, paths = np.random.default_rng(0), []
    for name, rows in SITES.items():
        age, severity = draws.normal(60, 10, rows), draws.normal(size=rows)
        days = 8 + 0.1 * (age - 60) + 2 * severity + 0.3 * draws.normal(size=rows)
        path = folder / f"{name}.csv"
        columns = zip(age, severity, days, strict=True)
        lines = [f"{a:.2f},{s:.3f},{d:.2f}" for a, s, d in columns]
        path.write_text("\n".join(["age,severity,los", *lines]) + "\n")
        paths.append(str(path))
    return paths


def config(files: list[str], method: str = "fedavg", **changes: Any) -> RunConfig:
    values = {
        "name": "stay",
        "rounds": 8,
        "data": {"files": files, "label": "los"},
        "method": {"name": method, "batch": 16, "rate": 0.01},
        "model": {"widths": [8]},
        "engine": {"mode": "loop"},
    }
    return resolve(change(values, changes), "test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("regression")
    execute(config(write_tables(home)), home / "run", local_engine)
    write_answer([home / "run"], engines.load)
    return home / "run"


def test_the_record_has_errors_and_the_table_shows_them(folder: Path) -> None:
    run = Run(folder)
    assert run.regression
    assert run.facts["data"]["task"] == "regression"
    for score in run.scores:
        assert isinstance(score, Score)
        assert set(score.errors) == {"mse", "mae", "variance"}
        assert score.r2 > 0.5  # the columns explain nearly all
    values = run.metrics[""]
    assert values["r2"] == run.accuracy == values["final_accuracy"]
    assert values["mse"] == pytest.approx(np.mean([s.errors["mse"] for s in run.scores]))
    header = text_table([run]).splitlines()[1].split()
    assert header[2:5] == ["R2", "MSE", "MAE"]
    result = json.loads((folder / "result.json").read_text())
    assert "R2" in result["definitions"]["accuracy"]


def test_the_answer_compares_with_the_mean_and_ridge_regression(folder: Path) -> None:
    body = json.loads((folder / "answer.json").read_text())
    assert (body["metric"], body["margin"]) == ("mae", 0.02)
    for id, site in body["sites"].items():
        assert list(site["scores"]) == [
            "joined",
            "alone",
            MEAN,
            RIDGE,
            "gradient boosting",
            "pooled",
        ]
        assert site["scores"]["joined"] < site["scores"][MEAN]
        deviation = json.loads((folder / "recipe.json").read_text())["sites"][id]["target"][1]
        assert site["margin"] == pytest.approx(0.02 * deviation)
        recorded = next(s for s in Run(folder).scores if s.client == id)
        assert site["scores"]["joined"] == pytest.approx(recorded.errors["mae"], rel=1e-3)


def test_the_report_speaks_of_errors_and_never_of_classes(folder: Path) -> None:
    text = page(gather([folder]))
    story = text.split('id="definitions"')[0]
    for words in ("2 % of the label&#39;s standard deviation", "Predicting the mean", "ridge"):
        assert words in story
    for words in ("majority", "logistic", "macro-F1", "right on", " classes", "Accuracy"):
        assert words not in story.split("</style>")[1].replace("key tick majority", ""), words


def read_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_predictions_are_in_the_unit_of_the_label(folder: Path, tmp_path: Path) -> None:
    path = folder.parent / "basel.csv"
    result = predict(Predictor(folder, "basel"), path, tmp_path / "out.csv", held_out=True)
    rows = read_rows(tmp_path / "out.csv")
    assert list(rows[0]) == ["row", "prediction"]
    labels = [float(line.split(",")[2]) for line in path.read_text().splitlines()[1:]]
    errors = [float(row["prediction"]) - labels[int(row["row"]) - 1] for row in rows]
    score = next(s for s in Run(folder).scores if s.client == "basel")
    assert len(errors) == score.rows == result.judged
    assert np.mean(np.abs(errors)) == pytest.approx(score.errors["mae"], rel=1e-3)
    assert result.squared / result.judged == pytest.approx(score.errors["mse"], rel=1e-3)


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in onnx.NEEDED), reason="ONNX is not installed"
)
def test_the_exported_graph_and_its_script_predict_the_same_numbers(
    folder: Path, tmp_path: Path
) -> None:
    predictor, path = Predictor(folder, "bern"), folder.parent / "bern.csv"
    home = export(predictor, tmp_path / "model", "nothing")
    card = json.loads((home / "card.json").read_text())
    assert (card["task"], card["target"]) == ("regression", predictor.about["target"])
    assert 0 < card["r2"] <= 1
    onnx.write(predictor, home / "model.onnx")
    theirs = tmp_path / "theirs.csv"
    command = [sys.executable, str(home / "predict.py"), str(path), "-o", str(theirs)]
    subprocess.run(command, check=True, capture_output=True)
    predict(predictor, path, tmp_path / "ours.csv")
    ours, other = (
        [float(row["prediction"]) for row in read_rows(one)]
        for one in (tmp_path / "ours.csv", theirs)
    )
    assert other == pytest.approx(ours, rel=1e-5)


def test_the_python_interface_gives_errors(folder: Path) -> None:
    result = atoll.load(folder)
    assert "R2" in repr(result)
    assert result.metrics[""]["mae"] > 0
    table = result.to_arrow()
    assert table.column_names[-3:] == ["mse", "mae", "r2"]


def test_a_method_that_cannot_names_those_that_can(tmp_path: Path) -> None:
    files = write_tables(tmp_path)
    for name in set(methods.names()) - {"fccl", "fedmatch", "fedseit", "splitnn", "vleto"}:
        if methods.load(name).regression:
            continue
        with pytest.raises(UserError, match=f"'{name}' predicts classes") as error:
            parts(resolve(change({"method": {"name": name}}, {
                "data": {"files": files, "label": "los"}}), "test"))  # fmt: skip
        assert "use one of alone, chfl, fedavg" in error.value.remedy


def test_lwf_and_metrics_of_classes_are_refused(tmp_path: Path) -> None:
    files = write_tables(tmp_path)
    made = parts(config(files, penalty="lwf"))
    with pytest.raises(UserError, match="lwf distils the logits of classes"):
        made.client("basel")
    with pytest.raises(UserError, match="auroc does not judge predictions of a number"):
        parts(config(files, **{"report.metric": "auroc"}))
    wine = resolve({"data": "wine", "method": "fedavg", "report": {"metric": "mae"}}, "test")
    with pytest.raises(UserError, match="mae does not judge predictions of a class"):
        parts(wine)


def test_simple_regressors_by_hand() -> None:
    x = np.array([[0.0], [1.0], [2.0], [3.0]] * 10)
    y = 1 + 2 * x[:, 0]
    found = regressors(x, y, np.array([[1.5]]))
    assert found[MEAN] == pytest.approx(np.array([[4.0]]))
    assert found[RIDGE] == pytest.approx(np.array([[4.0]]))
    skipped = regressors(x[:1], y[:1], x)
    assert skipped[RIDGE] == "one training row"


@pytest.mark.parametrize("method", ["alone", "fedavg"])
@pytest.mark.parametrize("metric", ["mae", "mse"])
def test_a_federation_that_exchanges_nothing_gains_exactly_nothing(
    method: str, metric: str, tmp_path: Path
) -> None:
    """One site alone is its own federation."""
    files = write_tables(tmp_path)[:1] if method == "fedavg" else write_tables(tmp_path)
    execute(config(files, method, **{"report.metric": metric}), tmp_path / "run", local_engine)
    body = write_answer([tmp_path / "run"], engines.load)
    assert body["metric"] == metric
    assert {site["gain"]["gain"] for site in body["sites"].values()} == {0.0}
    assert body["overall"]["verdict"]["kind"] == "no difference"


def test_several_seeds_and_stages_have_an_answer(tmp_path: Path) -> None:
    files = write_tables(tmp_path)
    for file in files:
        lines = Path(file).read_text().splitlines()
        staged = [f"{lines[0]},year"]
        staged += [f"{line},{2020 + number % 2}" for number, line in enumerate(lines[1:])]
        Path(file).write_text("\n".join(staged) + "\n")
    folders = []
    for seed in (0, 1):
        folders.append(tmp_path / f"seed-{seed}")
        changes: dict[str, Any] = {"data.stage": "year", "rounds": 2, "attribution": True}
        execute(config(files, seed=seed, **changes), folders[-1], local_engine)
    body = write_answer(folders, engines.load)
    assert body["unit"] == "splits"
    assert "Forgetting" in page(gather([tmp_path]))
