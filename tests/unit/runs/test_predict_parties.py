"""Predictions where parties hold columns of the same rows: one file of each, matched by ids."""

import csv
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.core.record import Score
from atoll.engines.local import local_engine
from atoll.runs.config import resolve
from atoll.runs.execute import execute
from atoll.runs.result import Run

NAMES = ("bank", "phone", "shop")
HOW = {"rate": 0.1, "batch": 16, "width": 12}
CLASSES = {"mode": "classes", "stage_classes": [[0, 1], [1, 2]]}


def write(name: str, header: list[str], rows: list[list[Any]]) -> None:
    lines = [";".join(map(str, line)) for line in [header, *rows]]
    Path(name).write_text("\n".join(lines) + "\n")


def people(first: int, count: int, seed: int, suffix: str = "") -> None:
    """The files of three parties; the label is the bank's, and minutes are missing here and there.

    What decides about a card is spread over all three.
    """
    draw = random.Random(seed)
    bank, phone, shop = [], [], []
    for number in range(first, first + count):
        a, b, c = (draw.gauss(0, 1) for _ in range(3))
        plan = draw.choice(["x", "y"])
        card = ["basic", "black", "gold"][(a + b > 0) + (a + b > 0 and c + (plan == "x") > 0.5)]
        bank.append([f"C{number}", f"{5 + 9 * a:.2f}".replace(".", ","), card])
        phone.append([f" c{number} ", f"{b:.2f}" if number % 9 else "", plan])
        shop.append([f"c{number}", f"{c:.2f}"])
    write(f"bank{suffix}.csv", ["customer", "income", "card"], bank)
    write(f"phone{suffix}.csv", ["customer", "minutes", "plan"], draw.sample(phone, len(phone)))
    write(f"shop{suffix}.csv", ["customer", "spent"], shop)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    prepare()
    return tmp_path


def prepare() -> None:
    """Tables to learn from, aligned already, and tables of new people, which are not."""
    people(0, 200, 1)
    people(500, 60, 2, "-new")
    lines = Path("phone.csv").read_text().splitlines()
    ordered = sorted(lines[1:], key=lambda line: int(line.split(";")[0].strip(" c")))
    Path("phone.csv").write_text("\n".join([lines[0], *ordered]) + "\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and files of new people in each of which something is wrong."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare()
        run("splitnn")
        for name in NAMES:
            text = Path(f"{name}-new.csv").read_text()
            lines = text.splitlines()
            again = next(line for line in lines if line.strip().lower().startswith("c500"))
            Path(f"{name}-twice.csv").write_text("\n".join([*lines, again]))
            Path(f"{name}-bare.csv").write_text(lines[0] + "\n")
            Path(f"{name}-renamed.csv").write_text(text.replace("customer", "client"))
            other = text if name == "bank" else text.replace("c5", "d5").replace("C5", "D5")
            Path(f"{name}-other.csv").write_text(other)
    return folder


def run(
    method: str = "vleto", scenario: dict[str, Any] | None = None, replace: str = "", **more: Any
) -> Run:
    own = {"parties": [f"{name}.csv" for name in NAMES], "label": "card", "id": "customer",
           "assume_aligned": True}  # fmt: skip
    values = {"rounds": 6, "data": own, "scenario": scenario or {}, "engine": {"mode": "loop"},
              "replace": replace, "method": {"name": method, **HOW, **more}}  # fmt: skip
    execute(resolve(values, "test"), Path("run"), local_engine)
    return Run(Path("run"))


@pytest.fixture
def call(call: Callable[..., int]) -> Callable[..., int]:
    """Calls `atoll predict run` with these words."""
    return partial(call, "predict", "run")


def given(suffix: str = "", names: tuple[str, ...] = NAMES) -> list[str]:
    return [word for name in names for word in ("--data", f"{name}{suffix}.csv")]


def answers(file: str = "predictions.csv") -> dict[str, list[str]]:
    with Path(file).open(newline="", encoding="utf-8") as text:
        header, *rows = csv.reader(text)
    assert header == ["customer", "prediction", "p basic", "p black", "p gold"]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize(
    ("method", "scenario", "more"),
    [
        ("vleto", CLASSES, {"lmo_rule": "quantile"}),
        ("vleto", CLASSES, {"digits": 1, "agg": "mean"}),
        ("vleto", {"mode": "columns"}, {}),
        ("vleto", {"mode": "columns"}, {"protocol": "P2"}),
        ("splitnn", {}, {"agg": "concat"}),
        ("splitnn", CLASSES, {"seen_mask": True, "replay": "fedprok"}),
        ("splitnn", {"mode": "columns"}, {"fil_eval": "current"}),
    ],
)
def test_held_out_rows_are_predicted_as_the_run_tested_them(
    method: str,
    scenario: dict[str, Any],
    more: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    call: Callable[..., int],
) -> None:
    made = run(method, scenario, **more)
    scores = [e for e in made.events if isinstance(e, Score) and e.variant == made.headline]
    assert call(*given(), "--held-out") == 0
    assert f"{scores[-1].accuracy:.4f} of them right" in capsys.readouterr().out
    assert len(answers()) == scores[-1].rows


def test_new_rows_are_matched_by_ids_and_answered_better_than_by_chance(
    capsys: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    run("vleto", CLASSES)
    assert call(*given("-new")) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert float(told.out.split(", ")[1].split()[0]) > 0.6
    found = answers()
    assert list(found) == [f"C{number}" for number in range(500, 560)]  # as the bank has them
    for said, *shares in found.values():
        assert abs(sum(map(float, shares)) - 1) < 1e-5
        assert said == ["basic", "black", "gold"][shares.index(max(shares))]
    lines = Path("shop-new.csv").read_text().splitlines()
    Path("shop-new.csv").write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    assert call("--data", "shop=shop-new.csv", "--data", "1-phone=phone-new.csv",
                "--data", "bank=bank-new.csv", "-o", "other.csv") == 0  # fmt: skip
    assert answers("other.csv") == found  # neither the order of rows nor of files matters


def test_ids_that_a_party_lacks_are_told_and_left_out_or_filled(
    capsys: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    run("vleto", CLASSES)
    assert call(*given("-new")) == 0
    whole = answers()
    lines = Path("shop-new.csv").read_text().splitlines()
    Path("shop-new.csv").write_text("\n".join([*lines[:1], *lines[8:], "c999;0.1"]) + "\n")
    capsys.readouterr()
    assert call(*given("-new")) == 0
    told = capsys.readouterr()
    assert (
        "7 ids are not in shop-new.csv, left out: C500, C501, C502, C503, C504, ...\n" in told.err
    )
    assert "1 ids are not in bank-new.csv, left out: c999\n" in told.err
    assert "53 predictions" in told.out
    assert answers() == {id: row for id, row in whole.items() if int(id[1:]) > 506}
    assert call(*given("-new"), "--lacking", "fill") == 0
    told = capsys.readouterr()
    assert "7 ids are not in shop-new.csv, its columns taken as missing: C500" in told.err
    assert "1 have no label: neither right nor wrong" in told.err  # c999
    assert "of the 60 with a known label right" in told.out
    filled = answers()
    assert {id for id in whole if filled[id] != whole[id]} == {f"C{n}" for n in range(500, 507)}
    Path("shop-new.csv").write_text("\n".join([lines[0], *(f"c{n};" for n in range(500, 560))]))
    assert call(*given("-new"), "-o", "empty.csv") == 0
    assert call("--data", "bank=bank-new.csv", "--data", "phone=phone-new.csv", "--lacking",
                "fill", "-o", "absent.csv") == 0  # fmt: skip
    assert answers("empty.csv") == answers("absent.csv")
    assert all(filled[f"C{n}"] == answers("absent.csv")[f"C{n}"] for n in range(500, 507))
    assert "no column '2-shop: spent': taken as missing" in capsys.readouterr().err


def test_columns_are_checked_by_name_and_unseen_words_are_counted(
    capsys: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    run("splitnn")
    text = Path("phone-new.csv").read_text()
    Path("phone-new.csv").write_text(text.replace(";x\n", ";z\n").replace("minutes", "calls"))
    assert call(*given("-new")) == 0
    told = capsys.readouterr().err
    assert "no column '1-phone: minutes': taken as missing" in told
    assert f"{text.count(';x')} values of '1-phone: plan' were never seen" in told
    Path("phone-new.csv").write_text(text.replace("customer;minutes;plan", "customer;plan;minutes"))
    assert call(*given("-new")) == 3
    assert "in the column 'minutes' is no number" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (given("-new", NAMES[:2]), 2, "2 files for 3 parties"),
        (given("-new", ("phone", "bank", "shop")), 3, "none of the columns of '0-bank'"),
        (["--data", "bank=bank-new.csv"], 2, "no file of '1-phone'"),
        (["--data", "banc=bank-new.csv"], 2, "no party 'banc'"),
        (["--data", "bank=bank-new.csv"] * 2, 2, "two files of '0-bank'"),
        ([*given("-new"), "--lacking", "guess"], 2, "unknown way 'guess'"),
        ([*given("-new"), "--held-out"], 2, "the run did not read a file of this name"),
        (["bank-new.csv", "--site", "0-bank"], 2, "parties hold columns of the same rows"),
        (["bank-new.csv", *given("-new")], 2, "--data does not fit"),
        ([], 2, "missing FILE"),
        (given("-twice"), 2, "1 ids come more than once: 'c500'"),
        (given("-other"), 3, "no rows to predict"),
        (given("-bare"), 3, "a header and no rows"),
        (given("-renamed"), 3, "no column 'customer' for the ids"),
    ],
)  # fmt: skip
def test_mistakes_are_answered(  # noqa: PLR0917 - fixtures
    words: list[str],
    code: int,
    said: str,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    call: Callable[..., int],
) -> None:
    monkeypatch.chdir(trained)
    assert call(*words) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert not Path("predictions.csv").exists()


def test_labels_that_are_numbers_with_a_point_are_told_as_the_run_did(
    capsys: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    text = Path("bank.csv").read_text()
    for name, number in (("basic", "0.0"), ("black", "1.0"), ("gold", "2.0")):
        text = text.replace(name, number)
    Path("bank.csv").write_text(text)
    made = run("splitnn")
    scores = [e for e in made.events if isinstance(e, Score) and e.variant == made.headline]
    assert scores[-1].accuracy > 0
    assert call(*given(), "--held-out") == 0
    assert f"{scores[-1].accuracy:.4f} of them right" in capsys.readouterr().out
    shown = set()
    for ending in (".0\n", "\n", ".00\n"):
        Path("bank.csv").write_text(text.replace(".0\n", ending))
        assert call(*given()) == 0
        shown.add(capsys.readouterr().out)
    assert len(shown) == 1


@pytest.mark.parametrize("name", NAMES)
def test_held_out_rows_need_the_files_that_the_run_read(
    name: str, capsys: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    run("splitnn")
    head, *rows = Path(f"{name}.csv").read_text().splitlines()
    Path(f"{name}.csv").write_text("\n".join([head, *rows[::-1]]) + "\n")
    assert call(*given(), "--held-out") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "is not the one that the run read, or has changed since" in told
    assert f"where: {name}.csv" in told


def test_no_partys_file_is_written_over(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    call: Callable[..., int],
) -> None:
    monkeypatch.chdir(trained)
    for name in NAMES:
        before = Path(f"{name}-new.csv").read_bytes()
        assert call(*given("-new"), "-o", f"{name}-new.csv") == 2
        assert "the file to be written is one that is read" in capsys.readouterr().err
        assert Path(f"{name}-new.csv").read_bytes() == before


def test_the_oracle_that_reads_labels_predicts_nothing(
    capsys: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    run("vleto", {"mode": "columns"}, replace="atoll.reproduce.faults.vleto:label_oracle")
    assert call(*given("-new")) == 2
    assert "label_oracle reads labels" in " ".join(capsys.readouterr().err.split())


def test_a_party_with_labels_alone_needs_no_file_but_may_give_one(
    capsys: pytest.CaptureFixture[str], call: Callable[..., int]
) -> None:
    for suffix in ("", "-new"):
        lines = [line.split(";") for line in Path(f"bank{suffix}.csv").read_text().splitlines()]
        Path(f"bank{suffix}.csv").write_text("".join(f"{i};{y}\n" for i, _, y in lines))
    made = run("splitnn")
    assert made.facts["clients"] == ["1-phone", "2-shop"]
    assert call(*given("-new", NAMES[1:])) == 0
    assert "60 predictions in predictions.csv\n" in capsys.readouterr().out
    without = answers()
    assert call(*given("-new")) == 0
    assert "of them right" in capsys.readouterr().out
    assert {id.lower(): row for id, row in answers().items()} == without
