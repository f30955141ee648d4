"""Own images from files to predictions: the numbers are those of the run's own tests."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.numpy import load_file

from atoll import data
from atoll.core.errors import UserError
from atoll.engines.local import local_engine
from atoll.runs.config import change, resolve
from atoll.runs.execute import execute
from atoll.runs.predict.images import predict
from atoll.runs.predict.model import Predictor
from atoll.runs.result import Run

CLASSES = ("class 0", "class 1", "class 2", "class 3")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites: a folder, an npz file and a Parquet file; and some images without labels."""
    home = tmp_path_factory.mktemp("images")
    made = data.load("synthetic-images", rows=240)
    x, y = made.x[:, 0], made.y
    for number in range(80):
        folder = home / "paper" / CLASSES[y[number]]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[number]).save(folder / f"{number}.png")
    np.savez(home / "slate.npz", x=x[80:160], y=y[80:160], classes=CLASSES)
    pngs = []
    for image in x[160:]:
        file = io.BytesIO()
        Image.fromarray(image).save(file, format="PNG")
        pngs.append(file.getvalue())
    labels = [CLASSES[n] for n in y[160:]]
    pq.write_table(pa.table({"image": pngs, "label": labels}), home / "dim.parquet")
    (home / "new").mkdir()
    for number in range(5):
        Image.fromarray(x[number]).save(home / "new" / f"{number}.png")
    return home


def ran(home: Path, method: str, folder: str, **more: Any) -> Path:
    files = [str(home / name) for name in ("paper", "slate.npz", "dim.parquet")]
    values = {
        "rounds": 2,
        "data": {"images": files, "size": 8, "channels": 1},
        "public": {"name": "patterns", "rows": 32},
        "models": ["cnn", "cnn-deep", "small-resnet"],
        "method": {"name": method, "epochs": 2, "batch": 16, "pretrain_epochs": 4},
        "engine": {"mode": "loop"},
    }
    if method != "fml":
        values["method"]["public_batch"] = 32  # type: ignore[index]
    path = home / folder
    if not path.exists():
        execute(resolve(change(values, more), "test"), path, local_engine)
    return path


def written(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("method", ["fccl", "fedmd", "fedmatch", "fml"])
def test_what_was_kept_for_tests_is_predicted_as_the_run_tested_it(
    home: Path, tmp_path: Path, method: str
) -> None:
    more = {"model.name": "cnn"} if method == "fml" else {}
    folder = ran(home, method, method, **more)
    run, names = Run(folder), ("paper", "slate.npz", "dim.parquet")
    for number, name in enumerate(names):
        for variant in (method, "solo"):
            predictor = Predictor(folder, Path(name).stem, variant)
            done = predict(predictor, home / name, tmp_path / "p.csv", held_out=True)
            (score,) = (
                s for s in run.scores
                if (s.client, s.task, s.variant) == (f"site-{number}", number, variant)
                and s.round == 1
            )  # fmt: skip
            assert (done.right, done.rows) == (score.correct, score.rows)
            assert len(written(tmp_path / "p.csv")) == score.rows


def test_images_without_labels_are_predicted_too(home: Path, tmp_path: Path) -> None:
    folder = ran(home, "fccl", "fccl")
    done = predict(Predictor(folder, "site-0", ""), home / "new", tmp_path / "p.csv")
    assert (done.rows, done.right) == (5, None)
    rows = written(tmp_path / "p.csv")
    assert [row["image"] for row in rows] == [f"{n}.png" for n in range(5)]
    for row in rows:
        probabilities = {name: float(row[f"p {name}"]) for name in CLASSES}
        assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
        assert max(probabilities, key=lambda n: probabilities[n]) == row["prediction"]
    whole = predict(Predictor(folder, "paper", ""), home / "paper", tmp_path / "q")
    assert whole.rows == 80
    by_name = {Path(row["image"]).name: row for row in written(tmp_path / "q")}
    for row in rows:  # the same images, whatever folder they are in
        assert by_name[row["image"]]["prediction"] == row["prediction"]


def test_the_commands_write_predictions_and_a_model(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    folder, out = ran(home, "fccl", "fccl"), tmp_path / "p.csv"
    assert call("predict", str(folder), str(home / "new"), "--site", "paper", "-o", str(out)) == 0
    assert "5 predictions in" in capfd.readouterr().out
    assert len(written(out)) == 5
    assert call("export", str(folder), "--site", "slate", "-o", str(tmp_path / "model")) == 0
    assert "means of" not in capfd.readouterr().out  # images are scaled by fixed numbers
    card = json.loads((tmp_path / "model" / "card.json").read_text())
    assert (card["site"], card["called"], card["network"]) == ("site-1", "slate", "cnn-deep")
    assert card["shape"] == [1, 8, 8]
    assert tuple(card["classes"]) == CLASSES
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert weights["head.bias"].shape == (4,)


def test_mistakes_are_named(home: Path, tmp_path: Path) -> None:
    folder = ran(home, "fccl", "fccl")
    with pytest.raises(UserError, match="no site 'papier'") as caught:
        predict(Predictor(folder, "papier", ""), home / "new", tmp_path / "p")
    assert "paper" in caught.value.remedy
    with pytest.raises(UserError, match="no model 'sol'"):
        predict(Predictor(folder, "paper", "sol"), home / "new", tmp_path / "p")
    with pytest.raises(UserError, match="the file has 5 rows, the run read 80"):
        predict(Predictor(folder, "paper", ""), home / "new", tmp_path / "p", True)
    with np.load(home / "slate.npz") as held:
        np.savez(tmp_path / "slate.npz", **{**held, "x": held["x"][::-1], "y": held["y"][::-1]})
    predictor = Predictor(folder, "slate", "")
    with pytest.raises(UserError, match="is not the one that the run read"):
        predict(predictor, tmp_path / "slate.npz", tmp_path / "p", True)
    with pytest.raises(UserError, match="no file or folder"):
        predict(Predictor(folder, "paper", ""), home / "none", tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_images_whose_label_is_no_class_are_neither_right_nor_wrong(
    home: Path, tmp_path: Path
) -> None:
    folder = ran(home, "fccl", "fccl")
    table = pq.read_table(home / "dim.parquet")
    labels = ["other"] * 30 + table.column("label").to_pylist()[30:]
    changed = table.set_column(1, "label", pa.array(labels))
    pq.write_table(changed, tmp_path / "some.parquet")
    predictor = Predictor(folder, "dim", "")
    done = predict(predictor, tmp_path / "some.parquet", tmp_path / "p")
    assert (done.rows, done.foreign, done.judged) == (80, 30, 50)
    said = [row["prediction"] for row in written(tmp_path / "p")]
    assert done.right == sum(a == b for a, b in zip(said, labels, strict=True))


def test_no_file_of_images_is_written_over(home: Path) -> None:
    folder, file = ran(home, "fccl", "fccl"), home / "slate.npz"
    before = file.read_bytes()
    with pytest.raises(UserError, match="is one that is read"):
        predict(Predictor(folder, "slate", ""), file, file)
    with pytest.raises(UserError, match="the file is there already"):
        predict(Predictor(folder, "paper", ""), home / "new", home / "new" / "0.png")
    assert file.read_bytes() == before


def test_a_model_that_stayed_at_its_site_is_not_guessed(home: Path, tmp_path: Path) -> None:
    folder = ran(home, "fccl", "fccl")
    predictor = Predictor(folder, "paper", "")
    predictor.__dict__["_state"] = {}  # as in the server's folder of a network
    with pytest.raises(UserError, match="is not in this folder"):
        predict(predictor, home / "new", tmp_path / "p")


def test_a_shared_network_predicts_for_every_site(home: Path, tmp_path: Path) -> None:
    values = {
        "rounds": 2,
        "data": {"name": "synthetic-images", "rows": 120},
        "model": {"name": "cnn"},
        "method": {"name": "fedavg"},
        "engine": {"mode": "loop"},
    }
    execute(resolve(values, "test"), tmp_path / "run", local_engine)
    done = predict(Predictor(tmp_path / "run", "site-0", ""), home / "paper", tmp_path / "p.csv")
    assert done.rows == 80
    assert done.right is not None
    with pytest.raises(UserError, match="does not say which of your rows"):
        predict(Predictor(tmp_path / "run", "site-0", ""), home / "paper", tmp_path / "q", True)
