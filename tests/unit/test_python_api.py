"""The Python API: frames and arrays go in, one result for all seeds comes out."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import atoll
from atoll.api.errors import keyword_errors
from atoll.core.errors import UserError

SMALL: dict[str, Any] = {
    "rounds": 2, "widths": [4], "epochs": 1, "mu": [0.1], "engine": {"mode": "loop"},
}  # fmt: skip
SITES = {"basel": 0, "bern": 3}


class Frame:
    """What DataFrames are to atoll: an object that exports an Arrow stream."""

    def __init__(self, **columns: Any) -> None:
        self.table = pa.table(columns)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.table.__arrow_c_stream__(requested_schema)


def columns(shift: int, count: int = 60) -> dict[str, list[Any]]:
    age = [(7 * i + shift) % 31 + 0.5 for i in range(count)]
    return {"age": age, "sick": ["yes" if value > 15 else "no" for value in age]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


@pytest.fixture(scope="module")
def run(home: Path) -> atoll.Result:
    data = {site: Frame(**columns(shift)) for site, shift in SITES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        return atoll.run("chfl", out="frames", data=data, label="sick", seeds=range(2), **SMALL)


def test_frames_by_site_run_once_for_each_seed(run: atoll.Result) -> None:
    assert run.seeds == (0, 1)
    assert run.sites == ("basel", "bern")
    assert [one.folder for one in run.runs] == [Path("frames/seed-0"), Path("frames/seed-1")]
    assert run.accuracy == pytest.approx(sum(one.accuracy for one in run.runs) / 2)
    assert run.table().splitlines()[1].startswith("2 seeds")
    assert len(run.scores) == sum(len(one.scores) for one in run.runs)


def test_arrays_give_the_run_of_the_same_table(run: atoll.Result) -> None:
    arrays = {}
    for site, shift in SITES.items():
        own = columns(shift)
        arrays[site] = (np.array(own["age"])[:, None], np.array(own["sick"]))
    again = atoll.run("chfl", out="arrays", data=arrays, answer=False, **SMALL)
    assert again.config["data"]["label"] == "label"
    assert again.accuracy == run.runs[0].accuracy


def test_one_frame_with_a_column_of_sites(run: atoll.Result) -> None:
    parts = [(site, columns(shift)) for site, shift in SITES.items()]
    whole = {name: [value for _, own in parts for value in own[name]] for name in ("age", "sick")}
    whole["where"] = [site for site, own in parts for _ in own["age"]]
    again = atoll.run(
        "chfl", out="one", data=Frame(**whole), site="where", label="sick", answer=False, **SMALL
    )
    assert again.sites == ("basel", "bern")
    assert again.accuracy == run.runs[0].accuracy


def test_scores_as_a_table_for_other_libraries(run: atoll.Result) -> None:
    table = run.to_arrow()
    assert table.column_names[:6] == ["seed", "stage", "round", "site", "task", "variant"]
    rows = table.to_pylist()
    assert len(rows) == len(run.scores)
    assert {row["site"] for row in rows} == {"basel", "bern"}
    assert {row["seed"] for row in rows} == {0, 1}
    final = [row["accuracy"] for row in rows if row["variant"] == run.headline]
    assert sum(final) / len(final) == pytest.approx(run.accuracy)


def test_a_missing_pandas_is_named(run: atoll.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"pandas is not installed .*atoll\[pandas\]"):
        run.to_pandas()


def test_pandas_has_the_same_rows(run: atoll.Result) -> None:
    pytest.importorskip("pandas")
    assert run.to_pandas().to_dict("records") == run.to_arrow().to_pylist()


def test_the_answer_and_how_it_is_shown(run: atoll.Result) -> None:
    assert run.answer["seeds"] == [0, 1]
    assert run.answer == atoll.answer(run)
    lines = repr(run).splitlines()
    assert lines[0] == "chfl on own tables: 2 sites, 2 seeds"
    assert re.fullmatch(r"accuracy of 'auto' 0\.\d{4} ± 0\.\d{4}", lines[1])
    assert lines[2] == f"verdict on joining: {run.answer['overall']['verdict']['text']}"
    assert lines[3] == "record: frames"
    html = run._repr_html_()
    assert "<svg" in html
    assert "basel" in html
    assert "<script" not in html
    assert "<style" not in html.partition("<svg")[0]  # nothing that changes the notebook's page
    axes = run.plot.gain().axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert sorted(name.split()[1] for name in names) == ["basel", "bern"]


def test_without_an_answer_nothing_is_claimed() -> None:
    run = atoll.run("fedavg", out="bare", data="wine", clients=2, rounds=1, answer=False)
    assert run.answer == {}
    assert "No verdict yet" in run._repr_html_()
    assert repr(run).splitlines()[0] == "fedavg on wine: 2 sites, 1 seed"
    with pytest.raises(UserError, match="no answer for these runs"):
        run.plot.gain()


def test_a_result_is_loaded_from_its_folder(run: atoll.Result) -> None:
    again = atoll.load("frames")
    assert again == run
    assert again.metrics == run.metrics
    assert atoll.load("frames/seed-1").seeds == (1,)
    with pytest.raises(UserError, match="no run in this folder"):
        atoll.load("nowhere")
    for clients in (2, 3):
        out = f"mixed/{clients}"
        atoll.run("fedavg", out=out, data="wine", clients=clients, rounds=1, answer=False)
    with pytest.raises(UserError, match="this folder holds"):
        atoll.load("mixed")  # runs of several configs


def test_report_predict_and_export(run: atoll.Result) -> None:
    assert run.report("report.html") == Path("report.html")
    assert "Should these sites join?" in Path("report.html").read_text()
    rows = Frame(age=[1.5, 30.5])
    probabilities = run.predict_proba(rows, site="basel")
    assert probabilities.shape == (2, 2)
    assert probabilities.sum(1) == pytest.approx([1, 1], abs=1e-5)
    each = [atoll.load(one.folder).predict_proba(rows, site="basel") for one in run.runs]
    assert probabilities == pytest.approx(sum(each) / 2, abs=2e-6)  # the mean over seeds
    labels = run.predict(rows, site="basel")
    assert labels.tolist() == [["no", "yes"][place] for place in probabilities.argmax(1)]
    homes = run.export("model")
    assert homes == {site: Path("model") / site for site in SITES}
    assert all((path / "model.safetensors").exists() for path in homes.values())


def test_a_label_that_is_a_number_is_predicted_as_one() -> None:
    age = [20.5 + 7 * i % 31 for i in range(60)]
    table = {"age": age, "cost": [100.25 + value + i % 5 for i, value in enumerate(age)]}
    small: dict[str, Any] = {"rounds": 1, "widths": [4], "answer": False, "seeds": range(2)}
    data = {"a": Frame(**table), "b": Frame(**table)}
    result = atoll.run("fedavg", data=data, label="cost", **small)
    numbers = result.predict(Frame(age=[20.0, 79.0]), site="a")
    assert numbers.shape == (2,)
    assert ((numbers > 50) & (numbers < 250)).all()  # in the unit of the label
    each = [atoll.load(one.folder).predict(Frame(age=[20.0, 79.0]), "a") for one in result.runs]
    assert numbers == pytest.approx(sum(each) / 2, rel=1e-4)
    with pytest.raises(UserError, match="use predict"):
        result.predict_proba(Frame(age=[20.0]), site="a")


def test_a_missing_column_and_an_unknown_word_are_warnings() -> None:
    words = ["f" if i % 3 else "m" for i in range(60)]
    table = {"age": [float(i % 31) for i in range(60)], "sex": words, "sick": ["yes", "no"] * 30}
    small: dict[str, Any] = {"rounds": 1, "widths": [4], "answer": False}
    data = {"a": Frame(**table), "b": Frame(**table)}
    result = atoll.run("fedavg", data=data, label="sick", **small)
    with pytest.warns(UserWarning, match="no column 'sex': taken as missing"):
        result.predict(Frame(age=[1.5]), site="a")
    with pytest.warns(UserWarning, match="1 values of 'sex' were never seen"):
        result.predict(Frame(age=[1.5], sex=["x"]), site="a")


def test_two_results_side_by_side(run: atoll.Result) -> None:
    other = atoll.run("fedavg", out="other", data=run.config["data"], seeds=range(2), rounds=2,
                      widths=[4], epochs=1, engine={"mode": "loop"}, answer=False)  # fmt: skip
    both = atoll.compare(run, "other")
    assert "chfl" in repr(both)
    assert "fedavg" in repr(both)
    assert "better, equal, worse" in repr(both)  # what the last column means
    assert both.differences is not None
    assert both._repr_html_().count("<table>") == len(both.tables)
    assert repr(both) == repr(atoll.compare(run, other))
    with pytest.raises(UserError, match="nothing to compare"):
        atoll.compare(run, run)


def test_rounds_are_iterated_over_as_they_happen() -> None:
    options: dict[str, Any] = {"data": "wine", "clients": 2, "rounds": 3, "widths": [4]}
    events = atoll.stream("fedavg", out="stream", **options)
    assert not Path("stream").exists()  # nothing is trained before the first round is asked for
    assert [(event.stage, event.round) for event in events] == [(0, 0), (0, 1), (0, 2)]
    assert events.result is not None
    plain = atoll.run("fedavg", out="plain", answer=False, **options)
    assert events.result.accuracy == plain.accuracy


def test_a_loop_that_is_left_stops_the_run() -> None:
    events = atoll.stream("fedavg", out="left", data="wine", clients=2, rounds=50, widths=[4])
    for event in events:
        if event.round == 1:
            break
    assert events.result is None
    assert len(atoll.load("left").runs[0].times) <= 3  # of 50 rounds


def test_an_error_of_a_stream_reaches_its_loop() -> None:
    with pytest.raises(UserError, match="did you mean 'clients'"):
        atoll.stream("fedavg", data="wine", klients=2)
    Path("full").mkdir()
    Path("full/file").touch()
    with pytest.raises(UserError, match="not empty"):
        list(atoll.stream("fedavg", out="full", data="wine", clients=2))


def test_watch_is_called_after_each_round() -> None:
    rounds = []
    atoll.run("fedavg", out="watched", data="wine", clients=2, rounds=2, widths=[4], answer=False,
              watch=lambda progress: rounds.append(progress.round))  # fmt: skip
    assert rounds == [0, 1]


def test_a_sweep_over_lists_of_values() -> None:
    sweep = atoll.sweep("chfl", out="sweep", data="wine", clients=2, rounds=1, widths=[[4]],
                        mu=[[0.01], [0.1]], seeds=range(2), engine={"mode": "loop"})  # fmt: skip
    assert [setting.axes for setting in sweep.settings] == [
        {"model.widths": [4], "method.mu": [0.01]}, {"model.widths": [4], "method.mu": [0.1]},
    ]  # fmt: skip
    assert [setting.result.seeds for setting in sweep.settings] == [(0, 1), (0, 1)]
    assert repr(sweep).splitlines()[0] == "4 runs of chfl"
    both = atoll.compare(*(setting.result for setting in sweep.settings))
    models = {row[0].text.partition(":")[0] for row in both.results.rows}
    assert models == {"chfl mu=[0.01]", "chfl mu=[0.1]"}
    rows = sweep.to_arrow().to_pylist()
    of_second = [
        row["final_accuracy"] for row in rows
        if row["method.mu"] == "[0.1]" and row["variant"] == "auto"
    ]  # fmt: skip
    assert sum(of_second) / 2 == pytest.approx(sweep.settings[1].result.accuracy)
    with pytest.raises(UserError, match=r"an axis without values \(keyword arguments\)"):
        atoll.sweep("chfl", data="wine")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"klients": 2}, r"unknown option 'klients' \(keyword arguments\): did you mean 'clients'"),
        ({"label": "sick"}, r"unknown option 'label' \(keyword arguments\)"),
        ({"name.x": 1}, r"\(keyword argument name\.x\)"),
        ({"lable": "sick"}, "did you mean 'label'"),
        ({"seeds": []}, "give each once"),
        ({"seeds": 3}, r"seeds=3 has no numbers \(seeds\): give whole numbers: seeds=range\(5\)"),
        ({"seeds": ["a"]}, "give whole numbers"),
        ({"seeds": [0], "seed": 1}, "both seed and seeds"),
        ({"data": {"basel": 3}}, "the table of 'basel' has the type int"),
        ({"data": (np.zeros(3), np.zeros(3))}, "arrays of the shapes"),
    ],
)
def test_errors_speak_of_keyword_arguments(call: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        atoll.run("fedavg", **{"data": "wine", **call})
    assert "--" not in str(raised.value)


def test_an_error_of_the_command_in_the_words_of_python(run: atoll.Result) -> None:
    with pytest.raises(UserError, match=r"no site 'basle' in this run \(site=\)"):
        run.predict(Frame(age=[1.5]), site="basle")
    with pytest.raises(UserError, match="could be") as raised, keyword_errors():
        raise UserError("'a' could be b.a or c.a", "--set", "write it in full")
    assert "{'table.option': value}" in raised.value.remedy


def test_an_entry_of_a_config_in_a_remedy_is_a_keyword_argument() -> None:
    ages = [(7 * row) % 31 + 0.5 for row in range(40)]
    data = {"a": Frame(age=ages, sick=["no", "yes"] * 20), "b": Frame(age=ages, sick=[0, 1] * 20)}
    with pytest.raises(UserError, match="look like the same class") as raised:
        atoll.run("fedavg", data=data, label="sick")
    words = "write labels={'0': 'no', '1': 'yes'}, or labels=\"as-is\" if they differ"
    assert raised.value.remedy == words
    example = "write ignore = [...] or dates = 'days'"
    with pytest.raises(UserError) as raised, keyword_errors():
        raise UserError("dates", "[data]", example)
    assert raised.value.remedy == "write ignore = [...] or dates='days'"


def test_an_error_in_a_folder_that_is_used_names_resume_as_an_argument(run: atoll.Result) -> None:
    with pytest.raises(UserError) as raised:
        atoll.run("fedavg", out=run.folder / "seed-0", data="wine")
    assert raised.value.remedy == "choose another out=, or resume=True to go on with the run in it"


def test_calls_without_runs_or_values() -> None:
    for call in (atoll.compare, atoll.answer):
        with pytest.raises(UserError, match="no runs"):
            call()
    with pytest.raises(UserError, match=r"an axis without values \(rate\): give a value: rate="):
        atoll.sweep("fedavg", data="wine", rate=[])


def test_a_config_may_be_a_path(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('data = "wine"\nrounds = 1\nmethod = "fedavg"\nmodel = { widths = [4] }\n')
    assert atoll.run(file, clients=2, answer=False).config["name"] == "own"
    with pytest.raises(UserError, match="'3' is not a preset"):
        atoll.run(3)  # type: ignore[arg-type]


def test_importing_atoll_imports_nothing_heavy() -> None:
    code = "import atoll, sys; dir(atoll); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {name.partition(".")[0] for name in ended.stdout.split()}
    assert not {"torch", "numpy", "pyarrow", "matplotlib", "pydantic"} & modules
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        atoll.nothing  # noqa: B018
