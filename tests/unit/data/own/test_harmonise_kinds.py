"""Texts and tables of parties are harmonised as tables of sites are, and predicted so."""

import csv
import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
import pytest

from atoll import data
from atoll.core.errors import UserError
from atoll.data.splits import split
from atoll.engines.local import local_engine
from atoll.runs.config import resolve
from atoll.runs.execute import execute
from atoll.runs.parts import parts

MONTHS = ("January", "February")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def notes(path: str, names: tuple[str, str], words: tuple[str, str], rows: int = 60) -> None:
    """Notes of doctors; names of the columns of texts and labels, the words for yes and no."""
    draw, lines = random.Random(path), []
    for number in range(rows):
        ill = draw.random() < 0.5
        text = f"{'pain and fever' if ill else 'all is well'} {draw.choice(['today', 'again'])}"
        lines.append({
            names[0]: text, names[1]: words[0] if ill else words[1],
            "month": MONTHS[number % 2], "doctor": f"d{number // 6}", "note": f"n{number}",
        })  # fmt: skip
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


TEXTS: dict[str, Any] = {"files": ["a.jsonl", "b.jsonl"], "text": "text", "label": "ill"}
HARMONISED: dict[str, Any] = {
    **TEXTS, "stage": "month", "order": [*MONTHS], "id": "note", "group": "doctor",
    "labels": {"1": "yes", "0": "no"},
    "sites": {"b": {"rename": {"body": "text", "Ill": "ill"}}},
}  # fmt: skip


@pytest.fixture
def two_files() -> None:
    notes("a.jsonl", ("text", "ill"), ("yes", "no"))
    notes("b.jsonl", ("body", "Ill"), ("1", "0"))


def test_texts_of_two_sites_have_one_name_and_one_spelling(two_files: None) -> None:
    with pytest.raises(UserError, match="no column 'text'"):
        data.load("", **TEXTS)
    renamed = {**TEXTS, "sites": HARMONISED["sites"]}
    with pytest.raises(UserError, match="look like the same class"):
        data.load("", **renamed)
    assert data.load("", **renamed, labels="as-is").classes == ("0", "1", "no", "yes")
    made = data.load("", **HARMONISED)
    assert made.classes == ("no", "yes")
    assert made.stages == MONTHS


def test_texts_of_one_person_are_never_dealt_apart(two_files: None) -> None:
    made = data.load("", **HARMONISED)
    assert made.people is not None
    assert len(np.unique(made.people)) == 20  # ten at each site, whatever their names
    config = resolve({"data": HARMONISED, "method": "fedseit"}, "test")
    dealt = split(made, config.scenario_options(), 0, config.split)
    for id in dealt.clients:
        held = dealt.holdings[id]
        rows = [
            np.concatenate([one.train for one in held]),
            np.concatenate([one.valid for one in held]),
            np.concatenate(dealt.tests[id]),
        ]
        groups = [{*made.people[part].tolist()} for part in rows]
        assert not (groups[0] & groups[1])
        assert not (groups[0] & groups[2])
        assert not (groups[1] & groups[2])
        assert all(groups)


def test_texts_are_predicted_with_their_ids_and_the_names_of_the_site(
    two_files: None, call: Callable[..., int]
) -> None:
    values = {
        "data": {**HARMONISED, "length": 8}, "model": {"vectors": "random-8", "widths": [8]},
        "rounds": 1, "method": {"name": "fedseit", "epochs": 2, "rate": 0.01},
        "engine": {"mode": "loop"},
    }  # fmt: skip
    execute(resolve(values, "test"), Path("run"), local_engine)
    Path("new.csv").write_text("note,body,Ill\nx1,pain again,1\nx2,all is well,\n")
    assert call("predict", "run", "new.csv", "--site", "b") == 0
    with Path("predictions.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["row", "note", "prediction", "p no", "p yes"]
    assert [row[:2] for row in rows] == [["1", "x1"], ["2", "x2"]]


def test_init_and_inspect_suggest_labels_and_order_of_texts(
    call: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    notes("a.jsonl", ("text", "ill"), ("yes", "no"))
    notes("b.jsonl", ("text", "ill"), ("1", "0"))
    assert call("init", "a.jsonl", "b.jsonl", "--label", "ill", "--stage", "month") == 0
    text = Path("run.toml").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("# labels")]
    assert tomllib.loads(line[2:])["labels"] == {"1": "yes", "0": "no"}
    assert tomllib.loads(text)["data"]["order"] == [*MONTHS]
    capfd.readouterr()
    assert call("inspect", "run.toml") == 0
    shown = capfd.readouterr().out
    assert "write labels = { " in shown
    assert "b has 12 test rows" in shown  # sites are called by their files
    assert call("run", "run.toml", "--quiet") == 2
    assert "look like the same class" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_init_and_inspect_suggest_id_and_group_of_texts(
    kind: str, call: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    for site in ("a", "b"):
        notes(f"{site}.jsonl", ("text", "ill"), ("yes", "no"))
        table = pyarrow.json.read_json(f"{site}.jsonl")
        constant = table.append_column("year", pyarrow.array([2024] * 60))
        if kind == "csv":
            pyarrow.csv.write_csv(constant, f"{site}.csv")
        elif kind == "parquet":
            pyarrow.parquet.write_table(constant, f"{site}.parquet")
    files = (f"a.{kind}", f"b.{kind}")
    assert call("init", *files, "--label", "ill", "--text", "text") == 0
    text = Path("run.toml").read_text()
    assert {"id": "note", "group": "doctor"}.items() <= tomllib.loads(text)["data"].items()
    assert "year" not in text
    capfd.readouterr()
    assert call("inspect", "run.toml") == 0
    assert "write id" not in capfd.readouterr().out  # it is there already
    Path("run.toml").write_text(
        "".join(line for line in text.splitlines(True) if not line.startswith(("id", "group")))
    )
    assert call("inspect", "run.toml") == 0
    shown = capfd.readouterr().out
    assert 'write id = "note"' in shown
    assert 'write group = "doctor"' in shown


def test_an_id_that_one_site_has_is_suggested_for_that_site(call: Callable[..., int]) -> None:
    notes("a.jsonl", ("text", "ill"), ("yes", "no"))
    rows = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    short = [{"text": row["text"], "ill": row["ill"], "tags": ["x"]} for row in rows]
    Path("b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    assert call("init", "a.jsonl", "b.jsonl", "--label", "ill") == 0
    values = tomllib.loads(Path("run.toml").read_text())["data"]
    assert values["sites"] == {"a": {"id": "note", "group": "doctor"}}
    assert "id" not in values
    assert call("inspect", "run.toml") == 0


def bank_and_shop(suffix: str = "", rows: int = 120, seed: int = 0) -> None:
    """A bank with labels, visits of people, codes for missing values; a shop with units, dates."""
    draw, bank, shop = random.Random(seed), ["nr,person,income,card"], ["nr,spent,since,kind"]
    for number in range(rows):
        a, b = draw.gauss(0, 1), draw.gauss(0, 1)
        card = "Yes" if a + b > 0 else "No"
        income = "999" if number % 15 == 0 else f"{a:.2f}"
        bank.append(f"{number},p{number // 4},{income},{card}")
        day = f"{draw.randrange(1, 29):02}.{draw.randrange(1, 13):02}.2023"
        shop.append(f"{number},{100 * b:.1f} ct,{day},{draw.randrange(4)}")
    Path(f"bank{suffix}.csv").write_text("\n".join(bank) + "\n")
    Path(f"shop{suffix}.csv").write_text("\n".join(shop) + "\n")


PARTIES: dict[str, Any] = {
    "parties": ["bank.csv", "shop.csv"], "label": "card", "id": "customer", "assume_aligned": True,
    "rename": {"nr": "customer"}, "group": "person", "labels": {"Yes": "gold", "No": "none"},
    "missing": {"income": ["999"]}, "categorical": ["kind"],
    "sites": {"shop": {
        "units": {"spent": {"suffix": "ct", "factor": 0.01}},
        "dates": {"since": {"format": "day first", "since": "2023-01-01"}},
    }},
}  # fmt: skip


def test_parties_are_harmonised() -> None:
    bank_and_shop()
    made = data.load("", **PARTIES)
    assert made.classes == ("gold", "none")
    columns = {name: made.x[:, place] for place, name in enumerate(made.columns)}
    assert [*columns] == [
        "0-bank: income", "0-bank: income missing", "1-shop: spent", "1-shop: since",
        *(f"1-shop: kind={level}" for level in range(4)),
    ]  # fmt: skip
    assert np.isnan(columns["0-bank: income"]).sum() == 8
    assert np.abs(columns["1-shop: spent"]).max() < 5
    assert 0 <= columns["1-shop: since"].min() <= columns["1-shop: since"].max() < 365
    config = resolve({"data": PARTIES, "method": "splitnn"}, "test")
    dealt = parts(config).scenario
    held, tested = dealt.holdings["0-bank"][0], dealt.tests["0-bank"][0]
    assert made.people is not None
    groups = [{*made.people[rows].tolist()} for rows in (held.train, held.valid, tested)]
    assert not (groups[0] & groups[1])
    assert not (groups[0] & groups[2])
    assert not (groups[1] & groups[2])
    assert all(groups)


def test_rules_of_parties_that_cannot_hold_are_refused() -> None:
    bank_and_shop()
    for change, words in (
        ({"sites": {"bakery": {}}}, "no party 'bakery'"),
        ({"sites": {"bank": {"weights": "income"}}}, "parties have no weights"),
        ({"group": "persona"}, "no party has a column 'persona'"),
    ):
        with pytest.raises(UserError, match=words):
            data.load("", **{**PARTIES, **change})
    with pytest.raises(UserError, match="no column 'kind' for the group"):
        data.load("", **{**PARTIES, "group": "kind"})


def test_parties_are_predicted_as_they_were_read(
    call: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    bank_and_shop()
    bank_and_shop("-new", 30, 1)
    values = {"data": PARTIES, "rounds": 4, "engine": {"mode": "loop"},
              "method": {"name": "splitnn", "rate": 0.1, "batch": 16}}  # fmt: skip
    execute(resolve(values, "test"), Path("run"), local_engine)
    given = ("--data", "bank-new.csv", "--data", "shop-new.csv")
    assert call("predict", "run", *given) == 0
    said = capfd.readouterr().out
    assert "30 predictions" in said
    assert float(said.split(", ")[1].split()[0]) > 0.7
    with Path("predictions.csv").open(newline="") as file:
        assert next(csv.reader(file)) == ["customer", "prediction", "p gold", "p none"]
    for seed in (0, 1):
        execute(resolve({**values, "seed": seed}, "test"), Path(f"seeds/{seed}"), local_engine)
    assert call("predict", "seeds", *given, "-o", "mean.csv") == 0
    one, other = (_probabilities(call, given, seed) for seed in (0, 1))
    with Path("mean.csv").open(newline="") as file:
        mean = np.array([[float(p) for p in row[2:]] for row in [*csv.reader(file)][1:]])
    assert np.allclose(mean, (one + other) / 2, atol=2e-6)


def _probabilities(call: Callable[..., int], given: tuple[str, ...], seed: int) -> Any:
    assert call("predict", "seeds", *given, "--seed", str(seed), "-o", f"{seed}.csv") == 0
    with Path(f"{seed}.csv").open(newline="") as file:
        return np.array([[float(p) for p in row[2:]] for row in [*csv.reader(file)][1:]])


def test_inspect_suggests_for_parties(
    call: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    bank_and_shop()
    lines = Path("bank.csv").read_text().splitlines()
    told = [f"{line},{'1' if line.endswith('Yes') else '0'}" for line in lines[1:]]
    Path("bank.csv").write_text("\n".join([f"{lines[0]},granted", *told]) + "\n")
    plain = {"parties": ["bank.csv", "shop.csv"], "label": "card", "id": "nr",
             "assume_aligned": True, "ignore": ["since", "spent"]}  # fmt: skip
    entries = ", ".join(f"{key} = {json.dumps(value)}" for key, value in plain.items())
    Path("run.toml").write_text(f'method = "splitnn"\ndata = {{ {entries} }}\n')
    assert call("inspect", "run.toml") == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert 'write group = "person"' in shown
    assert 'write missing = { income = ["999"] }' in shown
    assert 'write categorical = ["kind"]' in shown
    assert "'granted' at bank predicts the label almost alone" in shown


def test_the_training_files_have_no_value_that_was_never_seen(
    call: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    bank_and_shop()
    small = {"rounds": 1, "engine": {"mode": "loop"}}
    party = {**PARTIES, "most_levels": 2}
    values = {**small, "data": party, "method": {"name": "splitnn", "batch": 16}}
    execute(resolve(values, "test"), Path("parties"), local_engine)
    assert call("predict", "parties", "--data", "bank.csv", "--data", "shop.csv") == 0
    assert "never seen" not in capfd.readouterr().err
    own = {"files": ["shop.csv", "shop2.csv"], "label": "kind", "most_levels": 3,
           "ignore": ["nr", "spent"], "categorical": ["since"], "keep": ["since"]}  # fmt: skip
    Path("shop2.csv").write_text(Path("shop.csv").read_text())
    execute(resolve({**small, "data": own, "method": "fedavg"}, "test"), Path("run"), local_engine)
    assert call("predict", "run", "shop.csv", "--site", "shop", "-o", "p.csv") == 0
    assert "never seen" not in capfd.readouterr().err
    other = Path("shop.csv").read_text().replace(".2023", ".2024")
    Path("new.csv").write_text(other)
    assert call("predict", "run", "new.csv", "--site", "shop", "-o", "p.csv") == 0
    assert "120 values of 'since' were never seen" in capfd.readouterr().err
