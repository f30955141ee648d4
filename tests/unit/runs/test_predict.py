"""Own tables from files to predictions, as somebody new would do it."""

import csv
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file

import atoll
from atoll.core.errors import UserError
from atoll.data.own import sheets, tables
from atoll.engines.local import local_engine
from atoll.runs.config import change, read, resolve
from atoll.runs.execute import execute
from atoll.runs.predict import model as predict_module
from atoll.runs.predict.model import Predictor, predictor_of
from atoll.runs.predict.output import Predicted
from atoll.runs.predict.tables import blocks, numbers, predict
from atoll.runs.result import Run

Files = Callable[..., list[str]]
TINY: dict[str, Any] = {"rounds": 3, "widths": [8], "epochs": 1, "engine.mode": "loop"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def files() -> Files:
    """Four sites: other columns, mixed types, gaps; one in Latin 1 with semicolons and commas."""

    def make(rows: int = 60) -> list[str]:
        draw = random.Random(3)
        plans: dict[str, tuple[list[str], str]] = {
            "a": (["ecg"], ","), "b": (["lab", "visit"], ";"), "c": (["lab"], ","), "d": ([], "\t"),
        }  # fmt: skip
        for name, (own, sign) in plans.items():
            lines = [["patient id", "age", "kön", "smoker", *own, "outcome"]]
            for number in range(rows):
                age, sex = draw.gauss(60, 9), draw.choice(["män", "kvinna"])
                extra, risk = [], (age - 60) / 9 + (sex == "män") - 0.5
                for column in own:
                    value = draw.gauss(0, 1)
                    risk += value
                    day = f"2024-02-{1 + int(14 + 5 * value) % 28:02d}"
                    extra.append(day if column == "visit" else f"{value:.2f}")
                smoker = draw.choice(["yes", "no", ""])
                cells = [str(number), f"{age:.1f}", sex, smoker, *extra]
                lines.append([*cells, "ill" if risk > 0 else "well"])
            text = "\n".join(sign.join(line) for line in lines) + "\n"
            text = text.replace(".", ",") if sign == ";" else text
            Path(f"{name}.csv").write_text(text, encoding="latin-1" if sign == ";" else "utf-8")
        return [f"{name}.csv" for name in plans]

    return make


def own(files: list[str], **options: Any) -> dict[str, Any]:
    return {"files": files, "label": "outcome", **options}


def run(method: str, files: list[str], folder: str = "run", **more: Any) -> Run:
    values = change({"name": method, "method": method, "data": own(files)}, {**TINY, **more})
    execute(resolve(values, method), Path(folder), local_engine)
    return Run(Path(folder))


def test_somebody_new_goes_from_files_to_predictions(
    files: Files, capfd: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    names = files(rows=1000)
    assert call("init", *names, "--label", "outcome") == 0
    assert call("inspect", "run.toml") == 0
    shown = capfd.readouterr().out
    assert "b.csv has the encoding cp1252 and the delimiter ';'" in shown
    assert "id: copied to predictions; no input" in shown
    assert call("run", "run.toml", "--set", "rounds=6", "--quiet", "--out", "out") == 0
    assert call("report", "out") == 0
    assert "a.csv, b.csv, c.csv, d.csv" in Path("out/report.html").read_text()
    capfd.readouterr()
    scores = {s.client: s for s in Run(Path("out")).scores if s.variant == "auto"}
    for name in "abcd":
        arguments = ["out", f"{name}.csv", "--site", name, "-o", "p.csv", "--held-out"]
        assert call("predict", *arguments) == 0
        right, rows = scored(name)
        assert (right, rows) == (scores[name].correct, scores[name].rows)
        assert f"{right / rows:.4f} of them right" in capfd.readouterr().out
    assert np.mean([s.accuracy for s in scores.values()]) > 0.7  # chance is about 0.5


def scored(site: str) -> tuple[int, int]:
    """How many predictions of the file p.csv are right, by the site's file itself."""
    sign = {"b": ";", "d": "\t"}.get(site, ",")
    encoding = "latin-1" if site == "b" else "utf-8"
    with Path(f"{site}.csv").open(encoding=encoding) as file:
        truth = [row["outcome"] for row in csv.DictReader(file, delimiter=sign)]
    with Path("p.csv").open() as file:
        said = list(csv.DictReader(file))
    for row in said:
        assert float(row["p ill"]) + float(row["p well"]) == pytest.approx(1, abs=1e-5)
        assert row["prediction"] == ("ill" if float(row["p ill"]) > 0.5 else "well")
    return sum(truth[int(row["row"]) - 1] == row["prediction"] for row in said), len(said)


@pytest.mark.parametrize("method", ["alone", "fedavg", "chfl"])
@pytest.mark.parametrize("scale", ["local", "global", "none"])
def test_predictions_score_what_the_run_did(method: str, scale: str, files: Files) -> None:
    found = run(method, files(), scale=scale, batch=16)
    for variant in found.variants:
        for score in (s for s in found.scores if s.variant == variant):
            predictor = Predictor(Path("run"), score.client, variant)
            done = predict(predictor, Path(f"{score.client}.csv"), Path("p.csv"), held_out=True)
            assert (done.right, done.rows) == (score.correct, score.rows)


def test_one_file_for_all_sites_and_stages_predicts_too() -> None:
    draw = random.Random(0)
    lines = ["x,z,place,year,outcome"]
    for number in range(160):
        x = draw.gauss(0, 1)
        z = f"{x + draw.gauss(0, 1):.2f}" if number % 2 else ""
        lines.append(f"{x:.3f},{z},{'uv'[number % 2]},{2020 + number // 80},{'pq'[x > 0]}")
    Path("all.csv").write_text("\n".join(lines) + "\n")
    data = own(["all.csv"], site="place", stage="year")
    execute(
        resolve(change({"name": "t", "method": "chfl", "data": data}, TINY), "t"),
        Path("run"),
        local_engine,
    )
    found = Run(Path("run"))
    assert found.facts["tasks"] == ["2020", "2021"]
    last = [s for s in found.scores if s.stage == 1 and s.variant == "auto" and s.client == "u"]
    predictor = Predictor(Path("run"), "u", "")
    done = predict(predictor, Path("all.csv"), Path("p.csv"), held_out=True)
    assert (done.right, done.rows) == (sum(s.correct for s in last), sum(s.rows for s in last))


def test_a_file_is_read_with_the_delimiter_and_encoding_of_the_config() -> None:
    draw, lines = random.Random(0), ["age:město:outcome"]
    for _ in range(60):
        town = draw.choice(["Plzeň", "Zlín"])
        lines.append(f"{draw.gauss(60, 9):.1f}:{town}:{'pq'[town == 'Zlín']}")
    for name in "ab":
        Path(f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="cp1250")
    found = run("alone", [], data=own(["a.csv", "b.csv"], delimiter=":", encoding="cp1250"))
    score = next(s for s in found.scores if s.client == "a")
    predictor = Predictor(Path("run"), "a", "")
    done = predict(predictor, Path("a.csv"), Path("p.csv"), held_out=True)
    assert (done.right, done.rows, done.unseen) == (score.correct, score.rows, {})
    del predictor.recipe["delimiter"], predictor.recipe["encoding"]  # as an older run has it
    Path("new.csv").write_text("age,město\n61,Plzeň\n")
    assert predict(predictor, Path("new.csv"), Path("q.csv")).unseen == {}


def reversed_copy(name: str, to: str) -> Path:
    head, *rows = Path(name).read_text().splitlines()
    Path(to).write_text("\n".join([head, *rows[::-1]]) + "\n")
    return Path(to)


def test_held_out_rows_need_the_file_that_the_run_read(files: Files) -> None:
    run("alone", files())
    predictor = Predictor(Path("run"), "a", "")
    Path("copy.csv").write_bytes(Path("a.csv").read_bytes())
    done = predict(predictor, Path("copy.csv"), Path("p.csv"), held_out=True)
    for other in (reversed_copy("a.csv", "turned.csv"), Path("c.csv")):
        with pytest.raises(UserError, match="is not the one that the run read"):
            predict(predictor, other, Path("p.csv"), held_out=True)
    del predictor.recipe["fingerprints"]  # as an older run has it
    assert predict(predictor, Path("turned.csv"), Path("p.csv"), held_out=True).rows == done.rows


def test_files_of_one_name_are_told_apart_by_what_is_in_them() -> None:
    given: dict[str, list[str]] = {}
    for site in ("basel", "lund"):
        for year in (2023, 2024):
            Path(str(year)).mkdir(exist_ok=True)
            given.setdefault(site, []).append(f"{year}/{site}.csv")
            Path(yearly(site, year)).rename(given[site][-1])
    found = run("alone", [], data={"files": given, "label": "outcome"})
    last = [s for s in found.scores if s.stage == 1 and s.client == "lund"]
    for score, file in zip(last, given["lund"], strict=True):
        done = predict(Predictor(Path("run"), "lund", ""), Path(file), Path("p.csv"), held_out=True)
        assert (done.right, done.rows) == (score.correct, score.rows)
    turned = reversed_copy(given["lund"][0], "lund.csv")
    with pytest.raises(UserError, match="is not the one that the run read"):
        predict(Predictor(Path("run"), "lund", ""), turned, Path("p.csv"), held_out=True)


def test_scaling_is_fitted_on_training_rows_alone(files: Files) -> None:
    """A test row that becomes absurd must not move what is learned from the others."""
    names = files()
    run("alone", names)
    before = json.loads(Path("run/recipe.json").read_text())["sites"]["a"]
    lines = Path("a.csv").read_text().splitlines()
    place = before["held_out"][0][0] + 1
    cells = lines[place].split(",")
    lines[place] = ",".join([cells[0], "9999", *cells[2:]])
    Path("a.csv").write_text("\n".join(lines) + "\n")
    run("alone", names, folder="again")
    after = json.loads(Path("again/recipe.json").read_text())["sites"]["a"]
    assert after["held_out"] == before["held_out"]
    assert after["scaling"] == before["scaling"]


def test_unseen_levels_and_lacking_columns_are_answered(files: Files) -> None:
    run("chfl", files())
    Path("new.csv").write_text("age,kön,smoker\n61,annan,yes\n,män,\n")
    done = predict(Predictor(Path("run"), "a", ""), Path("new.csv"), Path("p.csv"))
    assert (done.rows, done.right) == (2, None)
    assert done.unseen == {"kön": 1}
    assert done.absent == ("ecg",)
    rows = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    assert [row["row"] for row in rows] == ["1", "2"]
    assert all(np.isfinite(float(row["p ill"])) for row in rows)


def test_only_rows_whose_label_is_known_are_right_or_wrong(
    files: Files, capfd: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    run("alone", files())
    lines = Path("d.csv").read_text().splitlines()
    bare = [line.rsplit("\t", 1)[0] for line in lines]
    for name, labels in {
        "some.csv": [*["ill", "well"] * 5, *["", "NA"] * 10, *["dead"] * 30],
        "none.csv": [""] * 60,
        "other.csv": ["dead"] * 60,
    }.items():
        rows = (f"{line}\t{label}" for line, label in zip(bare[1:], labels, strict=True))
        Path(name).write_text("\n".join([lines[0], *rows]) + "\n")
    assert call("predict", "run", "some.csv", "--site", "d", "-o", "p.csv") == 0
    told = capfd.readouterr()
    with Path("p.csv").open() as file:
        said = [row["prediction"] for row in csv.DictReader(file)]
    right = sum(a == b for a, b in zip(said, ["ill", "well"] * 5, strict=False))
    assert f"60 predictions in p.csv, {right / 10:.4f} of the 10 with a known label right" in (
        told.out
    )
    assert "20 have no label: neither right nor wrong" in told.err
    assert "30 have a label that is no class of the model: neither right nor wrong" in told.err
    for name, what in (("none.csv", "60 have no label"), ("other.csv", "60 have a label that is")):
        assert call("predict", "run", name, "--site", "d", "-o", "p.csv") == 0
        told = capfd.readouterr()
        assert told.out == "60 predictions in p.csv\n"
        assert what in told.err


def test_a_site_needs_only_its_own_columns(files: Files) -> None:
    run("chfl", files())
    columns = {block.column for block in blocks(Predictor(Path("run"), "d"))}
    assert columns == {"age", "kön", "smoker"}
    columns = {block.column for block in blocks(Predictor(Path("run"), "b"))}
    assert columns == {"age", "kön", "smoker", "lab", "visit"}


def test_mistakes_of_a_prediction_are_answered(files: Files) -> None:
    run("fedavg", files())
    atoll.run("fedavg", out="wine", **{**TINY, "data": "wine", "clients": 2})
    Path("word.csv").write_text("age,kön\n61,män\nold,män\n")
    Path("huge.csv").write_text("age,kön\n61,män\n1e39,män\n")
    Path("other.csv").write_text("q\n1\n")
    Path("none.csv").write_text("age\n")
    cases: list[tuple[tuple[str, str, str], str, bool, str]] = [
        (("nowhere", "a", ""), "a.csv", False, "no run in this folder"),
        (("wine", "site-0", ""), "a.csv", False, "was not made on your own tables"),
        (("run", "e", ""), "a.csv", False, "no site 'e' in this run"),
        (("run", "a", "auto"), "a.csv", False, "this run has no model 'auto'"),
        (("run", "a", ""), "other.csv", False, "none of the columns"),
        (("run", "a", ""), "word.csv", False, "'old' in the column 'age' is no number"),
        (("run", "a", ""), "huge.csv", False, "'1e39' in the column 'age' is too large a number"),
        (("run", "a", ""), "none.csv", False, "no rows to predict"),
        (("run", "a", ""), "word.csv", True, "the file has 2 rows, the run read 60"),
        (("run", "a", ""), "lost.csv", False, "no such file"),
    ]
    for (folder, site, variant), file, held_out, what in cases:
        with pytest.raises(UserError, match=what):
            predict(Predictor(Path(folder), site, variant), Path(file), Path("p.csv"), held_out)
    assert not Path("p.csv").exists()
    Path("run/result.json").unlink()
    with pytest.raises(UserError, match="the run has not ended"):
        predict(Predictor(Path("run"), "a", ""), Path("a.csv"), Path("p.csv"))


@pytest.mark.parametrize(
    "options", [{"transfer": "sit", "vocabulary": "local"}, {"combine": "sum"}]
)
def test_texts_are_predicted_with_the_model_of_a_task(
    options: dict[str, str], capfd: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    """On the held-out rows of a task predictions give the score that the run recorded."""
    for name in "ab":
        draw = random.Random(name)
        lines = ["text,label,year"]
        for number in range(80):
            label, year = draw.choice("sgw"), 2023 + number % 2
            kept = label if draw.random() < 0.8 else draw.choice("sgw")
            words = {"s": "the ship sails", "g": "gold coins", "w": "wheat and corn"}[kept]
            lines.append(f"{words} {draw.choice(['here', 'there', name])},{label},{year}")
        Path(f"{name}.csv").write_text("\n".join(lines) + "\n")
    values = {
        "data": {"files": ["a.csv", "b.csv"], "text": "text", "stage": "year", "length": 8},
        "model": {"vectors": "random-8", "widths": [8]},
        "rounds": 2,
        "method": {"name": "fedseit", "epochs": 3, "rate": 0.01, **options},
        "engine": {"mode": "loop"},
    }
    execute(resolve(values, "test"), Path("run"), local_engine)
    scores = {(s.client, s.task): s for s in Run(Path("run")).scores if s.stage == 1}
    for number, task in enumerate(("2023", "2024")):
        score = scores["site-1", number]
        asked = ("predict", "run", "b.csv", "--site", "b", "--task", task, "--held-out")
        assert call(*asked) == 0
        told = f"{score.rows} predictions in predictions.csv, {score.accuracy:.4f} of them right"
        assert told in capfd.readouterr().out
    Path("new.jsonl").write_text('{"text": "Gold!"}\n{"text": "never seen"}\n{"text": ""}\n')
    assert call("predict", "run", "new.jsonl", "--site", "site-0") == 0
    assert "3 predictions in predictions.csv\n" in capfd.readouterr().out
    assert call("predict", "run", "new.jsonl", "--site", "a", "--task", "2025") == 2
    assert "no task '2025'" in capfd.readouterr().err
    assert call("export", "run", "--site", "a", "--task", "2023") == 0
    card = json.loads(Path("run/export-a/card.json").read_text())
    assert (card["task"], card["vectors"]["name"]) == ("2023", "random-8")
    assert card["words"][:2] == ["", "<unknown>"]


def test_word_vectors_that_changed_since_the_run_are_refused() -> None:
    lines = [f"{('the ship', 'wheat')[n % 2]} {n},{'sg'[n % 2]}" for n in range(30)]
    Path("a.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    np.savez("own.npz", words=np.array(["ship", "wheat"]), vectors=np.eye(2, 4))
    values = {
        "data": {"files": ["a.csv"], "text": "text", "length": 8},
        "model": {"vectors": "own.npz", "widths": [8]},
        "rounds": 1,
        "method": {"name": "fedseit", "epochs": 1},
    }
    execute(resolve(values, "test"), Path("run"), local_engine)
    assert Predictor(Path("run"), "a").probabilities(np.ones((1, 8), dtype=np.int32)).shape == (
        1,
        2,
    )
    np.savez("own.npz", words=np.array(["ship"]), vectors=np.eye(1, 4))
    with pytest.raises(UserError, match="'own' are not those that the run read"):
        Predictor(Path("run"), "a").model  # noqa: B018


def test_predictions_are_not_written_over_data_or_the_run(
    files: Files, capfd: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    run("alone", files())
    Path("link.csv").symlink_to("a.csv")
    Path("folder").mkdir()
    Path("note.txt").write_text("mine\n")
    Path("empty.csv").touch()
    cases = {
        "a.csv": "the file to be written is one that is read",
        "./folder/../a.csv": "the file to be written is one that is read",
        "link.csv": "the file to be written is one that is read",
        "b.csv": "the file is there already",
        "note.txt": "the file is there already",
        "run/checkpoint.safetensors": "the file to be written is one of the run's own",
        "run/traceback.txt": "the file to be written is one of the run's own",
        ".": "a folder, or no file that can be written",
        "folder": "a folder, or no file that can be written",
    }
    for out, what in cases.items():
        before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
        assert call("predict", "run", "a.csv", "--site", "a", "-o", out) == 2
        assert f"error: {what}\n" in capfd.readouterr().err
        assert before == {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for out in ("p.csv", "p.csv", "empty.csv", "run/p.csv"):  # what was predicted may be replaced
        assert call("predict", "run", "a.csv", "--site", "a", "-o", out) == 0
    Path("p.csv").write_text(Path("p.csv").read_text().replace("p ill", "p healthy"))
    assert call("predict", "run", "a.csv", "--site", "a", "-o", "p.csv") == 2


def test_a_run_does_not_go_on_with_files_that_have_changed(files: Files) -> None:
    names = files()
    run("fedavg", names)
    Path("a.csv").write_text(Path("a.csv").read_text() + "60,50.0,män,yes,0.1,ill\n")
    values = change({"name": "fedavg", "method": "fedavg", "data": own(names)}, TINY)
    with pytest.raises(UserError, match="have changed since the run began"):
        execute(resolve(values, "t"), Path("run"), local_engine, resume=True)


def test_an_exported_model_is_what_predicts_and_says_what_it_is(
    files: Files, call: Callable[..., int]
) -> None:
    found = run("chfl", files())
    assert call("export", "run", "--site", "b", "-o", "model") == 0
    weights = load_file("model/model.safetensors")
    card = json.loads(Path("model/card.json").read_text())
    model = Predictor(Path("run"), "b", "").model
    assert weights.keys() == model.keys()
    assert all(np.array_equal(weights[name], model[name].numpy()) for name in weights)
    (score,) = (s for s in found.scores if s.client == "b" and s.variant == "auto")
    assert card["accuracy"] == pytest.approx(score.accuracy)
    assert (card["site"], card["variant"], card["classes"]) == ("b", "auto", ["ill", "well"])
    assert "messages" in card["what_left_the_site"]
    assert call("export", "run", "--site", "a", "-o", "model") == 0  # an earlier one is replaced


@pytest.mark.parametrize(
    ("scale", "means"),
    [("local", "this site's"), ("none", "this site's"), ("global", "all sites'")],
)
def test_an_export_says_that_its_card_has_means_of_training_rows(
    scale: str,
    means: str,
    files: Files,
    call: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
) -> None:
    run("fedavg", files(), scale=scale)
    capfd.readouterr()
    assert call("export", "run", "--site", "b", "-o", "model") == 0
    line = f"card.json has means of {means} training rows: pass it on only if you may"
    assert line in capfd.readouterr().out.splitlines()
    fill = json.loads(Path("model/card.json").read_text())["scaling"]["common"][0]
    assert any(mean != 0 for mean in fill)


@pytest.mark.parametrize("name", ["model.safetensors", "model.onnx", "card.json"])
def test_an_export_goes_over_nothing_that_is_not_one(
    name: str, files: Files, call: Callable[..., int]
) -> None:
    run("chfl", files())
    Path("model").mkdir()
    Path("model", name).write_text("somebody's own")
    assert call("export", "run", "--site", "b", "-o", "model") == 2
    assert [p.name for p in Path("model").iterdir()] == [name]
    assert Path("model", name).read_text() == "somebody's own"


def test_nothing_of_own_columns_is_in_what_is_sent(files: Files) -> None:
    """Column one's first layer is as wide as the common columns, and no message is wider."""
    found = run("chfl", files())
    width = found.facts["holdings"]["common"]
    shapes = {
        shape
        for event in found.events
        for name, _, shape in getattr(event, "tensors", ())
        if name.endswith("weight0")
    }
    assert shapes == {(8, width)}


def test_a_model_that_stayed_at_its_site_is_not_guessed(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("chfl", files())
    there = predict_module.ended_state(Path("run"))
    kept = {name: tensor for name, tensor in there.items() if not name.startswith("client/b/")}
    assert len(kept) < len(there)
    monkeypatch.setattr(predict_module, "ended_state", lambda folder: kept)
    with pytest.raises(UserError, match="the model of 'b' is not in this folder"):
        predict(Predictor(Path("run"), "b", ""), Path("b.csv"), Path("p.csv"))
    assert not Path("p.csv").exists()


def test_init_does_not_overwrite_and_finds_mistakes_at_once(
    files: Files, call: Callable[..., int]
) -> None:
    names = files()
    assert call("init", *names, "--label", "nothing") == 3
    assert not Path("run.toml").exists()
    assert call("init", "--label", "outcome") == 2
    assert call("init", *names, "--label", "outcome", "--method", "chfll") == 2
    assert call("init", *names, "--label", "outcome", "--method", "alone") == 0
    assert resolve(read("run.toml"), "run.toml").method["name"] == "alone"
    assert call("init", *names, "--label", "outcome") == 2


def test_real_data_in_four_files_beat_being_alone_at_the_small_sites() -> None:
    """UCI Adult: two larger sites, two small ones, own columns; two seeds."""
    path = Path(os.environ.get("ATOLL_DATA", "")) / "tabular" / "adult.parquet"
    if not path.exists():
        pytest.skip("needs tabular/adult.parquet in the folder that ATOLL_DATA names")
    people = pyarrow.parquet.read_table(path).to_pylist()
    order = iter(np.random.default_rng(0).permutation(len(people)))
    common = ["age", "education-num", "hours-per-week", "sex", "marital-status", "income"]
    sizes = {"a": 1500, "b": 800, "c": 300, "d": 150}
    further = [["occupation", "workclass"], ["relationship", "capital-gain"]]
    for (name, size), mine in zip(sizes.items(), [*further, ["occupation"], ["race"]], strict=True):
        with Path(f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*common, *mine], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(people[next(order)] for _ in range(size))
    gains = []
    data = {"files": [f"{name}.csv" for name in sizes], "label": "income"}
    assert len(tables.survey(**data).sites) == 4
    for seed in range(2):
        found = run(
            "chfl", [], f"run-{seed}", data=data, seed=seed, rounds=8, widths=[32, 16], epochs=2,
            batch=32, mu=[0.1, 1.0], variants=["local", "auto"],
        )  # fmt: skip
        by = {(s.client, s.variant): s.accuracy for s in found.scores}
        gains += [by[site, "auto"] - by[site, "local"] for site in ("c", "d")]
    assert np.mean(gains) > 0


@pytest.mark.parametrize("method", ["alone", "fedavg", "chfl"])
def test_onnx_answers_as_our_own_model_does(
    method: str, files: Files, call: Callable[..., int]
) -> None:
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name, reason="needs the extra onnx")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    run(method, files(), batch=16)
    assert call("export", "run", "--site", "b", "--onnx") == 0
    session = runtime.InferenceSession("run/export-b/model.onnx")
    predictor = Predictor(Path("run"), "b", "")
    sheet, done = sheets.opened(Path("b.csv")), Predicted()
    (batch,) = sheets.batches(sheet, predictor.recipe["missing"])
    x = numbers(blocks(predictor), sheet, batch, 0, done)
    (theirs,) = session.run(None, {"x": x})
    assert theirs.shape == (60, 2)
    np.testing.assert_allclose(theirs, predictor.probabilities(x), atol=1e-5)
    card = json.loads(Path("run/export-b/card.json").read_text())
    assert len(card["columns"]) == x.shape[1]


def test_onnx_without_its_extra_is_refused_with_what_to_do(
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    call: Callable[..., int],
) -> None:
    run("alone", files(), batch=16)
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert call("export", "run", "--site", "b", "--onnx") == 2
    assert "pip install 'atoll[onnx]'" in capfd.readouterr().err


def yearly(name: str, year: int, rows: int = 40) -> str:
    """A site's file of one year."""
    draw, lines = random.Random(f"{name}{year}"), ["x,z,outcome"]
    for _ in range(rows):
        x = draw.gauss(0, 1)
        lines.append(f"{x:.3f},{draw.gauss(0, 1):.3f},{'pq'[x > 0]}")
    Path(f"{name}-{year}.csv").write_text("\n".join(lines) + "\n")
    return f"{name}-{year}.csv"


def test_one_file_a_stage_makes_it_continual_and_predicts_each(
    capfd: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    sites = [f"{n}={yearly(n, 2023)},{yearly(n, 2024, 30)}" for n in ("basel", "lund")]
    assert call("init", *sites, "--label", "outcome") == 0
    assert "attribution = true" in Path("run.toml").read_text()
    assert call("inspect", "run.toml") == 0
    assert "1: 40, 2: 30" in capfd.readouterr().out
    changes = ["--set", "rounds=2", "--set", "widths=[4]", "--set", "engine.mode=loop"]
    assert call("run", "run.toml", *changes, "--quiet", "--out", "out") == 0
    found = Run(Path("out"))
    assert found.facts["tasks"] == ["1", "2"]
    last = [s for s in found.scores if s.stage == 1 and s.variant == "auto" and s.client == "lund"]
    for score, year in zip(last, (2023, 2024), strict=True):
        done = predict(Predictor(Path("out"), "lund", ""), Path(f"lund-{year}.csv"),
                       Path("p.csv"), held_out=True)  # fmt: skip
        assert (done.right, done.rows) == (score.correct, score.rows)
    with pytest.raises(UserError, match="did not read a file of this name"):
        predict(Predictor(Path("out"), "lund", ""), Path("basel-2023.csv"), Path("p.csv"), True)


def test_sites_with_files_for_other_stages_are_refused(call: Callable[..., int]) -> None:
    a, b = yearly("a", 1), yearly("a", 2)
    for options, what in (
        ({"files": {"a": [a, b], "b": [a]}}, "site 'b' has 1 files and 'a' has 2"),
        ({"files": {"a": [a, b]}, "stage": "x"}, "a stage column and a file a stage"),
        ({"files": {"a": [a]}, "site": "x"}, "a site column and several files"),
    ):
        with pytest.raises(UserError, match=what):
            tables.survey(label="outcome", **options)
    assert call("init", f"a={a}", b, "--label", "outcome") == 2
    assert [site.name for site in tables.survey(label="outcome", files={"a b": [a]}).sites] == [
        "a-b"
    ]


def test_a_word_among_numbers_is_told_with_the_file_that_has_it() -> None:
    a, b = yearly("a", 1), yearly("a", 2)
    lines = Path(a).read_text().splitlines()
    lines[5] = "one,0.5,p"
    Path(a).write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="the text 'one'") as error:
        tables.survey(label="outcome", files={"a": [a, b]})
    assert error.value.where == "a-1.csv, line 6"


def test_a_folder_of_seeds_predicts_the_mean_of_their_models(files: Files) -> None:
    given = files(30)
    for seed in range(3):
        run("fedavg", given, f"all/seed-{seed}", seed=seed)
    means = predictor_of(Path("all"), "a")
    assert len(means.others) == 2
    assert predict(means, Path("a.csv"), Path("mean.csv")).rows == 30
    tables_ = []
    for seed in range(3):
        out = Path(f"{seed}.csv")
        predict(Predictor(Path(f"all/seed-{seed}"), "a"), Path("a.csv"), out)
        tables_.append(np.loadtxt(out, delimiter=",", skiprows=1, usecols=(2, 3)))
    mean = np.loadtxt("mean.csv", delimiter=",", skiprows=1, usecols=(2, 3))
    np.testing.assert_allclose(mean, np.mean(tables_, axis=0), atol=2e-6)
    run("alone", given, "all/other")
    with pytest.raises(UserError, match="this folder holds 4 runs"):
        predictor_of(Path("all"), "a")


def test_the_model_of_one_seed_is_chosen_by_its_number(
    files: Files, capfd: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    given = files(30)
    for seed in (4, 7):
        run("fedavg", given, f"all/{seed}", seed=seed)
    asked = ("predict", "all", "a.csv", "--site", "a")
    assert call(*asked, "--held-out") == 2
    assert "choose one, for example --seed 4" in capfd.readouterr().err
    assert call(*asked, "--seed", "7", "-o", "chosen.csv") == 0
    assert call("predict", "all/7", "a.csv", "--site", "a", "-o", "own.csv") == 0
    assert call(*asked, "-o", "mean.csv") == 0
    assert Path("chosen.csv").read_text() == Path("own.csv").read_text()
    assert Path("chosen.csv").read_text() != Path("mean.csv").read_text()
    assert call(*asked, "--seed", "5") == 2
    assert "possible: 4, 7" in capfd.readouterr().err
    assert call("export", "all", "--site", "a") == 2
    assert "choose one, for example --seed 4" in capfd.readouterr().err
    assert call("export", "all", "--site", "a", "--seed", "7") == 0
    assert Path("all/7/export-a/card.json").exists()


def test_folders_of_other_runs_have_no_mean(files: Files) -> None:
    given = files(30)
    run("fedavg", given, "all/one")
    run("alone", given, "all/other")
    with pytest.raises(UserError, match="this folder holds 2 runs"):
        predictor_of(Path("all"), "a")
