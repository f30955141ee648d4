"""What a run found, read from its record."""

import json
from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.core.record import Exclusion, Record, Score, Stage
from atoll.runs.result import Run, plain, table, write_result

CONFIG = 'seed = 0\n[method]\nname = "chfl"\nvariants = ["mu=0", "auto", "common"]\n'
FACTS = {
    "tasks": ["0"],
    "stages": 1,
    "known_at": [0],
    "data": {"title": "wine", "classes": 3},
    "clients": ["a", "b"],
}


def score(client: str, variant: str, correct: int) -> Score:
    return Score(0, 0, client, 0, variant, "test", 10, correct, correct / 20)


def run(folder: Path, shift: int = 0) -> Run:
    record = Record.create(folder, CONFIG, FACTS)
    for variant, (one, two) in {"common": (2, 4), "auto": (6, 8), "mu=0": (1, 1)}.items():
        record.add([score("a", variant, one + shift), score("b", variant, two + shift)])
    record.add([Stage(0, 1)])
    return Run(folder)


def test_variants_stand_in_the_methods_own_order(tmp_path: Path) -> None:
    assert run(tmp_path / "run").variants == ["mu=0", "auto", "common"]


def test_accuracy_is_that_of_the_variant_that_stands_for_the_method(tmp_path: Path) -> None:
    assert run(tmp_path / "run").accuracy == pytest.approx(0.7)


def test_a_table_over_seeds_has_mean_and_deviation(tmp_path: Path) -> None:
    header, rows = table([run(tmp_path / "a"), run(tmp_path / "b", shift=1)])
    assert header == ["2 seeds", "accuracy", "macro-F1", "worst client"]
    assert rows[1] == ["auto", "0.7500 ± 0.0500", "0.3750 ± 0.0250", "0.6500 ± 0.0500"]


def test_a_text_table_has_a_line_for_each_variant(tmp_path: Path) -> None:
    assert run(tmp_path / "run").table().splitlines() == [
        "chfl on wine",
        "1 seed  accuracy  macro-F1  worst client",
        "mu=0    0.1000    0.0500    0.1000",
        "auto    0.7000    0.3500    0.6000",
        "common  0.3000    0.1500    0.2000",
    ]


def test_a_client_that_was_left_out_has_its_most_frequent_reasons_with_counts(
    tmp_path: Path,
) -> None:
    reasons = ["not finite", "too long", "not finite", "other shape", "no rows", "too long"]
    left_out = [Exclusion(0, n, "b", "fit", reason) for n, reason in enumerate(reasons)]
    record = Record.create(tmp_path / "run", CONFIG, FACTS)
    record.add(
        [*left_out, Exclusion(0, 0, "a", "fit", "absurd"), Exclusion(0, 1, "a", "fit", "absurd")]
    )
    record.add([Stage(0, 1)])
    assert Run(tmp_path / "run").exclusions == [
        "a was left out of 2 rounds (fit): absurd",
        "b was left out of 6 rounds (fit): not finite (2 of 6); too long (2 of 6);"
        " other shape (1 of 6); 1 further reason",
    ]


def test_no_run_makes_no_table() -> None:
    with pytest.raises(UserError, match="no run"):
        table([])


def test_the_result_is_client_by_task_by_stage(tmp_path: Path) -> None:
    run(tmp_path / "run")
    write_result(tmp_path / "run")
    body = json.loads((tmp_path / "run" / "result.json").read_text())
    auto = body["variants"]["auto"]
    assert auto["clients"] == ["a", "b"]
    assert auto["tasks"] == ["0"]
    assert auto["accuracy"] == [[[0.6]], [[0.8]]]
    assert auto["metrics"]["forward_transfer"] is None
    assert body["definitions"].keys() >= {"final_accuracy", "forgetting_best_last"}


def test_a_number_that_is_none_is_null_in_json() -> None:
    value = {"a": [float("nan"), 1.5, (float("inf"), 2)], "b": "text", "c": True}
    assert plain(value) == {"a": [None, 1.5, [None, 2]], "b": "text", "c": True}


@pytest.mark.parametrize("name", ["config.toml", "facts.json"])
@pytest.mark.parametrize("content", [b"= [", b"\xff", b"3"])
def test_a_damaged_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    damaged = run(tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        _ = damaged.config if name == "config.toml" else damaged.facts
    assert caught.value.where == str(tmp_path / "run" / name)
