"""Answers of runs: the file, what it is made of, and when it is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import atoll
from atoll import engines
from atoll.core.errors import UserError
from atoll.data.scenario import ABSENT, Holding, Scenario
from atoll.engines.local import local_engine
from atoll.metrics.answer import ALONE, JOINED
from atoll.report import tables
from atoll.report.answer import primary_scores
from atoll.report.tables import gather
from atoll.runs.alone import alone_parts
from atoll.runs.answer import answer_folder, write_answer
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.outcomes import own_tasks, without_classes
from atoll.runs.parts import Parts, parts
from atoll.runs.result import Run, table

NONE = np.empty(0, dtype=np.int64)
TINY: dict[str, Any] = {"data": "wine", "clients": 2, "rounds": 2, "engine.mode": "loop"}


def config(changes: Mapping[str, Any] = MappingProxyType({}), method: str = "fedavg") -> RunConfig:
    values = {"name": method, "method": {"name": method}}
    return resolve(change(values, {**TINY, **changes}), "test")


def of_domains(changes: Mapping[str, Any]) -> RunConfig:
    values = {"name": "fccl", "method": {"name": "fccl"}, "data": "synthetic-images", "rounds": 1}
    return resolve(change(values, changes), "test")


def finished(folder: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> Path:
    execute(config(changes), folder, local_engine)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = finished(tmp_path_factory.mktemp("answer") / "run", {"model.widths": [4]})
    write_answer([folder], engines.load)
    return folder


def test_the_file_says_what_was_compared(run: Path) -> None:
    body = json.loads((run / "answer.json").read_text())
    assert (body["format"], body["metric"], body["margin"]) == (1, "accuracy", 0.02)
    assert (body["seeds"], body["unit"], body["variant"]) == ([0], "rows", "")
    assert body["baseline"] == "fedavg at each site alone"
    assert sorted(body["sites"]) == ["site-0", "site-1"]
    assert Run(run).answer["sites"] == body["sites"]


def test_the_joined_scores_are_those_of_the_record(run: Path) -> None:
    recorded = {score.client: score.accuracy for score in Run(run).scores}
    sites = Run(run).answer["sites"]
    assert {id: site["scores"]["joined"] for id, site in sites.items()} == recorded


def test_outcomes_are_kept_with_the_run(run: Path) -> None:
    tensors = load_file(run / "outcomes.safetensors")
    rows, labels = tensors["site-0/rows"], tensors["site-0/labels"]
    made = parts(config({"model.widths": [4]}))
    assert np.array_equal(rows, made.scenario.tests["site-0"][0])
    assert np.array_equal(labels, made.dataset.y[rows])
    predicted = tensors[f"site-0/outputs/{JOINED}"].argmax(1)
    score = Run(run).answer["sites"]["site-0"]["scores"]["joined"]
    assert (predicted == labels).mean() == pytest.approx(score)
    assert tensors[f"site-0/outputs/{ALONE}"].shape == (len(rows), 3)


def test_the_record_is_not_changed_by_its_answer(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_answer([folder], engines.load)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"answer.json", "outcomes.safetensors"}
    execute(config(), folder, local_engine, resume=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == after


def test_an_answer_is_computed_once(run: Path) -> None:
    watched: list[str] = []
    first = write_answer([run], engines.load, watched.append)
    assert watched == []
    assert first == Run(run).answer


def test_a_changed_answer_is_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for path in run.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    text = (copy / "answer.json").read_text()
    (copy / "answer.json").write_text(text.replace('"margin": 0.02', '"margin": 0.01'))
    with pytest.raises(UserError, match="damaged"):
        _ = Run(copy).answer
    (copy / "answer.json").write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        _ = Run(copy).answer


def test_an_answer_of_another_run_is_none(run: Path, tmp_path: Path) -> None:
    other = finished(tmp_path / "run", {"seed": 5})
    (other / "answer.json").write_bytes((run / "answer.json").read_bytes())
    assert Run(other).answer == {}


def test_the_margin_and_the_metric_are_set_before_the_run(tmp_path: Path) -> None:
    two = {"data": "breast-cancer", "report.margin": 5.0, "report.metric": "auroc"}
    folder = finished(tmp_path / "run", two)
    body = write_answer([folder], engines.load)
    assert (body["metric"], body["margin"]) == ("auroc", 0.05)
    assert all(site["scores"]["majority"] == 0.5 for site in body["sites"].values())
    joined = [site["scores"]["joined"] for site in body["sites"].values()]
    header, rows = table([Run(folder)], body)
    assert header[1:3] == ["auroc", "accuracy"]
    assert rows[0][1] == f"{np.mean(joined):.4f}"
    (group,) = gather([folder])
    shown = tables.results([group], primary_scores([group]))
    assert shown.header[1] == "auroc, %"
    assert shown.rows[0][1].value == pytest.approx(np.mean(joined))


def test_auroc_of_three_classes_is_refused_before_the_run() -> None:
    with pytest.raises(UserError, match="auroc is for two classes and 'wine' has 3"):
        parts(config({"report.metric": "auroc"}))


@pytest.mark.parametrize("margin", [0, -1, 101])
def test_a_margin_is_a_number_of_points(margin: float) -> None:
    with pytest.raises(UserError, match="margin"):
        config({"report.margin": margin})


def test_a_run_without_checkpoints_has_no_answer(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", {"checkpoints": False})
    with pytest.raises(UserError):
        write_answer([folder], engines.load)
    assert Run(folder).answer == {}


def test_seeds_have_one_answer_above_their_folders(tmp_path: Path) -> None:
    folders = [finished(tmp_path / f"seed-{seed}", {"seed": seed}) for seed in (0, 1, 2)]
    body = write_answer(folders, engines.load)
    assert body["seeds"] == [0, 1, 2]
    assert body["unit"] == "splits"
    assert json.loads((tmp_path / "answer.json").read_text())["sites"] == body["sites"]
    assert list(body["runs"]) == ["seed-0", "seed-1", "seed-2"]
    singles = [Run(folder).scores[0].accuracy for folder in folders]
    assert body["sites"]["site-0"]["scores"]["joined"] == pytest.approx(np.mean(singles))


def test_runs_that_differ_in_more_than_the_seed_have_no_common_answer(tmp_path: Path) -> None:
    folders = [finished(tmp_path / "a"), finished(tmp_path / "b", {"seed": 1, "rounds": 1})]
    with pytest.raises(UserError, match="another 'rounds'"):
        write_answer(folders, engines.load)
    twice = [finished(tmp_path / "c"), folders[0]]
    with pytest.raises(UserError, match="the same seed"):
        write_answer(twice, engines.load)


def test_runs_in_different_folders_have_no_common_answer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="different folders"):
        answer_folder([tmp_path / "a" / "one", tmp_path / "b" / "two"])


def test_python_answers_a_finished_run(run: Path) -> None:
    assert atoll.answer(run) == Run(run).answer


def test_where_nothing_is_shared_all_sites_gain_exactly_nothing(tmp_path: Path) -> None:
    """Columns are scaled by each site's own rows; else scaling would be shared."""
    values = {"scale": "local", "scenario.split": "columns", "clients": 3}
    execute(config(values, "alone"), tmp_path / "run", local_engine)
    body = write_answer([tmp_path / "run"], engines.load)
    tensors = load_file(tmp_path / "run" / "outcomes.safetensors")
    for id, site in body["sites"].items():
        joined, alone = (tensors[f"{id}/outputs/{model}"] for model in (JOINED, ALONE))
        assert np.array_equal(joined, alone)
        assert (site["gain"]["gain"], site["verdict"]["kind"]) == (0, "no difference")
    assert len(body["sites"]) == 3


def test_scaling_over_all_sites_is_noted(run: Path) -> None:
    assert any("scaled by the training rows of all" in note for note in Run(run).answer["notes"])


def test_with_a_group_column_the_group_is_the_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    for name in ("north", "south"):
        lines = ["patient,age,outcome"]
        for patient in range(80):
            age = draws.normal(60, 10)
            for _ in range(3):  # three visits of each
                lines.append(f"p{patient},{age + draws.normal():.1f},{int(age > 60)}")
        Path(f"{name}.csv").write_text("\n".join(lines) + "\n")
    own = {"files": ["north.csv", "south.csv"], "label": "outcome", "group": "patient"}
    values = {"name": "fedavg", "method": {"name": "fedavg"}, "data": own, "rounds": 2}
    execute(resolve(change(values, {"engine.mode": "loop"}), "test"), Path("run"), local_engine)
    body = write_answer([Path("run")], engines.load)
    assert body["unit"] == "groups"
    for site in body["sites"].values():
        assert site["test_rows"] == 3 * site["gain"]["units"]


# ---------------------------------------------------------------- a federation of one


def test_one_site_has_its_own_rows_and_all_of_its_columns() -> None:
    made = parts(config({"scenario.split": "columns"}))
    one = alone_parts(made, "site-1")
    held = made.scenario.holdings["site-1"][0]
    assert one.scenario.clients == ("site-1",)
    assert np.array_equal(one.scenario.holdings["site-1"][0].train, held.train)
    assert sorted(one.scenario.common) == sorted([*made.scenario.common, *held.own])
    assert len(one.scenario.holdings["site-1"][0].own) == 0
    assert one.site("site-1").train(0).x.shape[1] == len(made.scenario.common) + len(held.own)
    rows = one.site("site-1").train(0)
    assert rows.x.mean(0).abs().max() < 1e-5  # scaled by its own rows alone


def test_a_method_that_reads_own_columns_keeps_them_apart() -> None:
    made = parts(config(method="chfl"))
    one = alone_parts(made, "site-0")
    assert np.array_equal(one.scenario.common, made.scenario.common)
    held = made.scenario.holdings["site-0"][0]
    assert np.array_equal(one.scenario.holdings["site-0"][0].own, held.own)


def test_options_for_each_client_keep_that_of_the_site() -> None:
    settings = {"epochs_each": [1, 2], "models": ["mlp", "cnn"]}
    made = parts(of_domains(settings))
    one = alone_parts(made, made.scenario.clients[1])
    assert one.config.method["epochs_each"] == [2]
    assert one.config.models == ("cnn",)
    assert one.config.options().epochs_each == (2,)


def test_a_party_that_joins_late_begins_with_its_first_stage() -> None:
    held = Holding(np.arange(3), NONE, np.array([1]))
    holdings = {"a": (held, held), "b": (ABSENT, held)}
    tests = dict.fromkeys(("a", "b"), (np.arange(3, 6),))
    scenario = Scenario(("a", "b"), holdings, NONE, tests, ("all",), (0,), labels_at_server=True)
    made = Parts(config(), parts(config()).dataset, scenario)
    one = alone_parts(made, "b").scenario
    assert one.stages == 1
    assert one.known_at == (0,)
    assert alone_parts(made, "a").scenario.stages == 2


def test_domains_are_judged_on_their_own() -> None:
    scenario = parts(of_domains({})).scenario
    assert [own_tasks(scenario, id) for id in scenario.clients] == [[0], [1]]
    by_class = parts(config({"scenario.split": "classes", "stages": 3})).scenario
    assert own_tasks(by_class, "site-0") == [0, 1, 2]


def test_simple_models_know_the_classes_of_a_task_as_the_joined_model_does() -> None:
    outputs = np.array([[2.0, 1.0, 0.0], [2.0, -np.inf, -np.inf]])
    excluded = np.array([[True, False, False], [True, False, False]])
    masked = without_classes(outputs, excluded)
    assert masked[0].tolist() == [-np.inf, 1.0, 0.0]
    assert masked[1].tolist() == [-np.inf, 0.0, 0.0]  # nothing is known: all that remain are equal
