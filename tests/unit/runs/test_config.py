"""Configs: read, changed, resolved, written, and read again."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from atoll import methods
from atoll.core.errors import UserError
from atoll.runs.config import RunConfig, change, place, presets, read, resolve, to_toml

FEDAVG = {"method": {"name": "fedavg"}}


def again(config: RunConfig) -> RunConfig:
    return resolve(tomllib.loads(to_toml(config)), "again")


@pytest.mark.parametrize("name", sorted({*presets(), *methods.names()}))
def test_every_preset_and_method_resolves_and_reads_back_as_it_was(name: str) -> None:
    config = resolve(read(name), name)
    assert config.name == name
    assert again(config) == config
    assert resolve(read(name), name) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Klinik-Süd 2"},
        {"data": {"name": "synthetic-table", "rows": 40}},
        {"data": {"name": "x", "text": 'a "quoted" \\ line\nand \x7f \t tab'}},
        {"data": {"name": "x", "deep": {"a b": [1, {"c": True}], "d": []}}},
        {"model.widths": []},
        {"split": "classes", "stage_classes": [[0, 1], [2]]},
        {"method.rate": 1e-7},
        {"checkpoint_seconds": 0, "seed": 2**70},
    ],
)
def test_a_config_reads_back_as_it_was(changes: dict[str, Any]) -> None:
    config = resolve(change(FEDAVG, changes), "test")
    assert again(config) == config
    assert to_toml(again(config)) == to_toml(config)


def test_every_default_is_written_out() -> None:
    config = resolve(FEDAVG, "test")
    assert config.data == {"name": "synthetic-table"}
    assert config.method["rate"] == 0.001
    assert config.model["name"] == "mlp"
    assert config.engine["name"] == "local"
    assert config.scenario["split"] == "rows"
    assert config.scenario["clients"] == 3


def test_another_split_keeps_the_options_that_both_have() -> None:
    values = {"method": "chfl", "scenario": {"split": "columns", "ratio": 0.4, "clients": 4}}
    for changes in ({"split": "classes", "stages": 2}, {"stages": 2, "split": "classes"}):
        scenario = resolve(change(values, changes), "test").scenario
        assert (scenario["split"], scenario["clients"], scenario["stages"]) == ("classes", 4, 2)
        assert "ratio" not in scenario
    with pytest.raises(UserError, match="split 'rows' has no option 'ratio'"):
        resolve(change(values, {"split": "rows", "ratio": 0.2}), "test")


def test_parties_of_own_tables_are_counted() -> None:
    values: dict[str, Any] = {"method": "splitnn", "data": {"parties": ["a.csv", "b.csv"]}}
    assert resolve(values, "test").scenario["clients"] == 2
    with pytest.raises(UserError, match="clients = 3 for 2 tables"):
        resolve({**values, "scenario": {"clients": 3}}, "test")


def test_a_scenario_is_of_the_kind_the_method_is_made_for_unless_it_says_otherwise() -> None:
    assert resolve(read("alone"), "test").scenario["split"] == "columns"
    assert resolve({"method": "chfl"}, "test").scenario["split"] == "columns"
    given = {"method": "chfl", "scenario": {"split": "rows"}}
    assert resolve(given, "test").scenario["split"] == "rows"


def test_options_come_out_as_their_classes_have_them() -> None:
    config = resolve(change(FEDAVG, {"widths": [4], "clients": 7, "threads": 2}), "test")
    assert config.model_options().widths == (4,)
    assert config.scenario_options().clients == 7
    assert config.engine_options().threads == 2
    assert config.options().rate == 0.001


@pytest.mark.parametrize(
    ("key", "whole"),
    [
        ("seed", "seed"),
        ("rounds", "rounds"),
        ("data", "data"),
        ("clients", "scenario.clients"),
        ("rate", "method.rate"),
        ("widths", "model.widths"),
        ("threads", "engine.threads"),
        ("method.rate", "method.rate"),
        ("anything.at.all", "anything.at.all"),
    ],
)
def test_a_short_key_belongs_where_it_is_known(key: str, whole: str) -> None:
    assert place(key, FEDAVG) == whole


def test_a_short_key_is_looked_up_in_the_method_that_was_chosen() -> None:
    assert place("mu", {"method": "chfl"}) == "method.mu"
    with pytest.raises(UserError, match="unknown option 'mu'"):
        place("mu", FEDAVG)
    changed = change(FEDAVG, {"method": "chfl", "mu": [0.5]})
    assert changed["method"] == {"name": "chfl", "mu": [0.5]}


def test_an_unknown_key_is_answered_with_the_nearest_and_none_twice() -> None:
    with pytest.raises(UserError, match="did you mean 'clients'"):
        place("klients", FEDAVG)
    with pytest.raises(UserError) as caught:
        place("zzzzzz", FEDAVG)
    known = caught.value.remedy.removeprefix("known: ").split(", ")
    assert len(set(known)) == len(known)


def test_a_change_leaves_the_values_it_was_made_from() -> None:
    values: dict[str, Any] = {"method": {"name": "fedavg", "rate": 1.0}, "data": "wine"}
    changed = change(values, {"rate": 0.5, "clients": 2, "data": "digits"})
    assert changed["method"] == {"name": "fedavg", "rate": 0.5}
    assert changed["scenario"] == {"clients": 2}
    assert changed["data"] == {"name": "digits"}
    assert values == {"method": {"name": "fedavg", "rate": 1.0}, "data": "wine"}


def test_a_name_alone_stands_for_a_table() -> None:
    config = resolve({"method": "fedavg", "data": "wine"}, "test")
    assert config.method["name"] == "fedavg"
    assert config.data == {"name": "wine"}


@pytest.mark.parametrize("key", ["seed.x", "nothing.x"])
def test_a_dotted_key_needs_a_table(key: str) -> None:
    with pytest.raises(UserError, match="is not a table"):
        change(FEDAVG, {key: 1})


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({}, "no method"),
        ({"method": {"rate": 1.0}}, "no method"),
        ({"method": "fedavgg"}, "did you mean 'fedavg'"),
        ({"method": 3}, "option 'method' cannot be 3"),
        ({**FEDAVG, "ronds": 3}, "did you mean 'rounds'"),
        ({**FEDAVG, "rounds": "3"}, "option 'rounds'"),
        ({**FEDAVG, "rounds": True}, "option 'rounds'"),
        ({**FEDAVG, "scenario": {"klients": 3}}, "did you mean 'clients'"),
        ({**FEDAVG, "engine": {"name": "cloud"}}, "option 'name'"),
        ({**FEDAVG, "name": "../x"}, "cannot be called"),
        ({**FEDAVG, "name": ".."}, "cannot be called"),
        ({**FEDAVG, "name": ""}, "cannot be called"),
        ({**FEDAVG, "name": "a/b"}, "cannot be called"),
        ({**FEDAVG, "name": "a[b"}, "cannot be called"),
    ],
)
def test_a_mistake_is_found_when_the_config_is_resolved(values: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        resolve(values, "test")


def test_a_file_is_read_with_its_own_name_as_the_runs(tmp_path: Path) -> None:
    path = tmp_path / "my run (1).toml"
    path.write_text("seed = 3\nmethod = 'fedavg'\n")
    assert read(str(path)) == {"name": "my-run-1-", "seed": 3, "method": "fedavg"}
    path.write_text("name = 'other'\n")
    assert read(str(path))["name"] == "other"


def test_presets_are_run_by_the_methods_they_name() -> None:
    assert {"demo", "chfl", "fedavg", "alone"} <= presets().keys()
    for path in presets().values():
        assert path.read_text().startswith("# ")  # the line that atoll list shows


def test_a_config_cannot_be_changed() -> None:
    config = resolve(FEDAVG, "test")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(("data", "split"), [("digits", "rows"), ("digits-table", "columns")])
def test_alone_needs_no_split_of_its_own(data: str, split: str) -> None:
    values = change(read("alone"), {"data": data})
    assert resolve(values, "alone").split == split


def test_a_short_key_with_two_homes_is_to_be_written_in_full() -> None:
    """`mode` is an option of the engine, and of the split `parties` where a run has it."""
    assert place("mode", read("fedavg")) == "engine.mode"
    assert place("mode", {**read("fedavg"), "scenario": {"split": "rows"}}) == "engine.mode"
    with pytest.raises(UserError, match=r"scenario\.mode or engine\.mode.*in full"):
        place("mode", {**read("fedavg"), "scenario": {"split": "parties"}})
    config = resolve(change(read("fedavg"), {"mode": "loop"}), "test")
    assert config.engine_options().mode == "loop"


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("categorical", "did you mean 'data.categorical'?"),
        ("categoricl", "did you mean 'data.categorical'?"),
        ("rate", "did you mean 'method.rate'?"),
        ("lr", "did you mean 'method.rate'?"),
        ("round", "did you mean 'rounds'?"),
    ],
)
def test_an_option_outside_its_table_is_answered_with_the_table(key: str, remedy: str) -> None:
    with pytest.raises(UserError, match=f"unknown option '{key}'") as error:
        resolve({"method": "chfl", key: 1}, "run.toml")
    assert (error.value.where, error.value.remedy) == ("run.toml", remedy)


def test_a_misspelled_option_of_files_is_found_with_set() -> None:
    with pytest.raises(UserError) as error:
        change({"method": "chfl"}, {"categoricl": ["cp"]})
    assert error.value.remedy == "did you mean 'data.categorical'?"
