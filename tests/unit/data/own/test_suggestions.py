"""What files suggest: each kind of mess is found, and clean files suggest nothing."""

import random
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import UserError
from atoll.core.options import build
from atoll.data.own import evidence
from atoll.data.own.profiles import TableOptions
from atoll.data.own.spellings import same_classes
from atoll.data.own.suggestions import Suggestion, examine, repeated_rows, suggest
from atoll.data.own.survey import read_contents, survey_of

MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
ZONED = "%Y-%m-%dT%H:%M:%S%z"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


Columns = dict[str, list[Any]]


def base(rows: int = 100, seed: int = 0) -> Columns:
    """Clean columns: a real number, levels, a random label."""
    draw = random.Random(seed)
    return {
        "age": [f"{draw.gauss(60, 10):.1f}" for _ in range(rows)],
        "sex": [draw.choice("fm") for _ in range(rows)],
        "outcome": [draw.choice(["ill", "well"]) for _ in range(rows)],
    }


def write(name: str, columns: Columns) -> str:
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    Path(name).write_text("\n".join(lines) + "\n")
    return name


def look(*sites: Columns, **options: Any) -> dict[tuple[str, str], Suggestion]:
    """The suggestions for some sites, a, b, ..., by option and site."""
    files = [write(f"{'abcd'[place]}.csv", columns) for place, columns in enumerate(sites)]
    given = {"files": files, "label": "outcome", **options}
    return {(one.option, one.site): one for one in examine(**given)}


def test_clean_files_suggest_nothing() -> None:
    assert look(base(seed=1), base(seed=2), base(seed=3)) == {}


def test_names_that_differ_in_case_punctuation_or_a_letter_are_suggested_to_be_one() -> None:
    one, other = base(seed=1), base(seed=2)
    one |= {"trestbps": [120 + i % 31 for i in range(100)], "lab1": one["age"]}
    other = {"Age": other["age"], "SEX ": other["sex"], "trest_bps": one["trestbps"],
             "lab2": other["age"], "outcome": other["outcome"]}  # fmt: skip
    found = look(one, other)
    assert found["rename", ""].entry == {"Age": "age", "SEX": "sex", "trest_bps": "trestbps"}
    assert not found["rename", ""].safe


def test_a_misspelled_name_is_one_only_if_its_values_are_alike() -> None:
    one, other = base(seed=1), base(seed=2)
    one["cholesterol"] = [200 + i % 50 for i in range(100)]
    other["cholestrol"] = [210 + i % 50 for i in range(100)]
    assert look(one, other)["rename", ""].entry == {"cholestrol": "cholesterol"}
    other["cholestrol"] = [0.5 + i / 1000 for i in range(100)]
    assert ("rename", "") not in look(one, other)


def test_a_name_with_shorter_words_is_one_if_its_values_are_alike() -> None:
    one, other = base(seed=1), base(seed=2)
    one |= {"creat": [60 + i % 41 for i in range(100)], "chol": [200 + i % 41 for i in range(100)]}
    one["adm_date"] = [f"{1 + i % 28:02}.03.2023" for i in range(100)]
    other |= {"creatinine": [61 + i % 37 for i in range(100)], "cholecystitis": [0, 1] * 50}
    other["admission_date"] = [f"2024-03-{1 + i % 28:02}" for i in range(100)]
    renames = look(one, other)["rename", ""].entry
    assert {frozenset(pair) for pair in renames.items()} == {
        frozenset({"creat", "creatinine"}), frozenset({"adm_date", "admission_date"}),
    }  # fmt: skip


def test_a_label_in_another_spelling_is_renamed_at_its_site() -> None:
    other = base(seed=2)
    other["Outcome"] = other.pop("outcome")
    found = look(base(), other)
    assert found == {("rename", "b"): found["rename", "b"]}
    assert found["rename", "b"].entry == {"Outcome": "outcome"}
    assert found["rename", "b"].safe
    with pytest.raises(UserError, match="no column 'outcom' for the label"):
        examine(files=["a.csv"], label="outcom")


def test_labels_are_mapped_to_the_names_of_one_site() -> None:
    """Not yes for one class and 0 for the other, whatever the numbers of rows are."""
    classes = {"a": {"yes": 92, "no": 88}, "b": {"0": 97, "1": 83}, "c": {"No": 96, "Yes": 84}}
    names = {"0": "no", "No": "no", "1": "yes", "Yes": "yes"}
    assert same_classes(classes) == names


def test_labels_that_look_like_spellings_are_mapped() -> None:
    one, other = base(seed=1), base(30, seed=2)
    one["outcome"] = ["yes", "no"] * 50
    other["outcome"] = [1, 0] * 15
    assert look(one, other)["labels", ""].entry == {"1": "yes", "0": "no"}
    assert ("labels", "") not in look(one, other, labels="as-is")


def test_identifiers_are_known_by_behaviour_whatever_they_are_called() -> None:
    draw = random.Random(4)
    one, other = base(seed=1), base(seed=2)
    one["mrn"] = draw.sample(range(100_000, 999_999), 100)
    other["mrn"] = draw.sample(range(100_000, 999_999), 100)
    assert look(one, other)["id", ""].entry == "mrn"
    other["case"] = other.pop("mrn")
    other["extra"] = [f"k{i:05}" for i in draw.sample(range(9999), 100)]
    found = look(one, other)
    assert (found["id", "a"].entry, found["id", "b"].entry) == ("mrn", "case")
    assert found["ignore", ""].entry == ["extra"]


def test_keys_that_repeat_are_a_group() -> None:
    one = base(120, seed=1)
    one["zz"] = [100_000 + 7 * (row // 3) for row in range(120)]  # in blocks
    assert look(one)["group", ""].entry == "zz"
    draw = random.Random(1)
    one["zz"] = [100_000 + 7 * draw.randrange(60) for _ in range(120)]
    assert ("group", "") not in look(one)  # a postal code, perhaps
    one["patient_nbr"] = one.pop("zz")
    assert look(one)["group", ""].entry == "patient_nbr"


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ([0] * 5 + list(range(150, 300)), ["0"]),  # cholesterol
        ([999] * 3 + list(range(30, 80)), ["999"]),  # age
        ([-9] * 5 + [-99] * 5 + list(range(10, 60)), ["-99", "-9"]),
        ([0, 1] * 30 + [9] * 4, ["9"]),
        ([0, 1, -1] * 20, []),
        (list(range(60)), []),  # numbers of visits
        ([0] * 90 + list(range(150, 200)), []),  # most rows have it
        ([99, *range(30, 80)], []),  # once
        ([0] * 20 + list(range(1, 60)), []),
        ([88] * 5 + [-8] * 4 + [1, 2, 3, 4, 5] * 9, ["-8", "88"]),  # of questionnaires
        ([777] * 5 + list(range(20, 80)), ["777"]),
    ],
)
def test_codes_for_missing_values(values: list[int], codes: list[str]) -> None:
    distinct, counts = np.unique(np.array(values, dtype=float), return_counts=True)
    assert evidence.missing_codes(distinct, counts) == codes


def test_missing_codes_are_suggested_once_for_all_sites_that_have_the_same() -> None:
    one, other = base(seed=1), base(seed=2)
    for columns in (one, other):
        columns["chol"] = [0 if i % 20 == 0 else 180 + i for i in range(100)]
    found = look(one, other)
    assert found["missing", ""].entry == {"chol": ["0"]}
    assert found["missing", ""].safe
    other["chol"] = [-9 if i % 20 == 0 else 180 + i for i in range(100)]
    found = look(one, other)
    assert found["missing", "a"].entry == {"chol": ["0"]}
    assert found["missing", "b"].entry == {"chol": ["-9"]}


def test_words_among_numbers_are_missing_values_or_codes() -> None:
    one = base(seed=1)
    one["lab"] = ["unknown" if i == 7 else f"{i * 1.7:.1f}" for i in range(100)]
    one["sbp"] = ["n.d." if i % 8 == 0 else 100 + i % 37 for i in range(100)]
    one["grade"] = ["low" if i % 8 == 0 else 1 + i % 4 for i in range(100)]  # levels
    one["icd"] = [f"{250 + i % 7}.8" for i in range(100)]
    one["icd"][::20] = ["V27", "E90", "E91", "E92", "V27"]
    one["zip"] = [f"0{3000 + i % 9}" for i in range(100)]
    one["cp"] = [i % 4 for i in range(100)]
    one["flag"] = [i % 2 for i in range(100)]
    found = look(one)
    missing = [s.entry for s in examine(files=["a.csv"], label="outcome") if s.option == "missing"]
    assert missing == [{"lab": ["unknown"]}, {"sbp": ["n.d."]}]
    assert found["missing", ""].entry == {"sbp": ["n.d."]}
    assert not found["missing", ""].safe  # 13 of 100 may mean something
    assert found["categorical", ""].entry == ["grade", "icd", "zip", "cp"]


@pytest.mark.parametrize(("words", "safe"), [(10, True), (11, False), (25, False)])
def test_words_are_missing_values_without_a_question_in_few_rows_alone(
    words: int, safe: bool
) -> None:
    one, other = base(seed=1), base(seed=2)
    one["quit"] = ["never" if i < words else f"{i * 1.7:.1f}" for i in range(100)]
    other["quit"] = ["never" if i < 5 else f"{i * 1.3:.1f}" for i in range(100)]
    found = look(other, one)["missing", ""]
    assert (found.entry, found.safe) == ({"quit": ["never"]}, safe)


@pytest.mark.parametrize(
    ("form", "option", "entry"),
    [
        ("{day:02}.{month:02}.2023", "dates", {"seen": {"format": "day first"}}),
        ("{day}/{month}/2023", "dates", {"seen": {"format": "day first"}}),
        ("{month:02}/{day:02}/2023", "dates", {"seen": {"format": "month first"}}),
        ("{month:02}/{month:02}/2023", "ignore", ["seen"]),  # which is the day?
        ("2023/{month:02}/{day:02}", "dates", {"seen": {"format": "%Y/%m/%d"}}),
        ("2023{month:02}{day:02}", "dates", {"seen": {"format": "%Y%m%d"}}),
        ("{day:02}-{name}-2023", "dates", {"seen": {"format": "%d-%b-%Y"}}),
        ("{day:02}{name}2023", "dates", {"seen": {"format": "%d%b%Y"}}),
        ("{day} May 2023", "dates", {"seen": {"format": "%d %b %Y"}}),  # also %B
        ("{name} {day}", "ignore", None),  # no year: words
        ("{month:02}/{day:02}/2023 07:28 PM", "dates", {"seen": {"format": "month first"}}),
        ("2023-{month:02}-{day:02}T07:28:00+01:00", "dates", {"seen": {"format": ZONED}}),
        ("2023-{month:02}-{day:02}", "dates", None),
        ("2023/{month:02}/{day:02} or so", "ignore", ["seen"]),
    ],
)
def test_dates_of_other_forms(form: str, option: str, entry: Any) -> None:
    one = base()
    one["seen"] = [
        form.format(day=1 + i % 28, month=1 + i % 12, name=MONTHS[i % 12]) for i in range(100)
    ]
    found = look(one)
    assert found[option, ""].entry == entry if entry else (option, "") not in found


@pytest.mark.parametrize(("slashes", "option"), [(0, "dates"), (25, "ignore"), (99, "ignore")])
def test_dots_say_that_the_day_is_first_only_if_all_dates_have_them(
    slashes: int, option: str
) -> None:
    one = base()
    one["seen"] = ["03/04/2021"] * slashes + ["05.06.2021"] * (100 - slashes)
    assert {option for option, _ in look(one)} == {option}


@pytest.mark.parametrize(
    ("odd", "option", "entry"),
    [
        ("17/04/2021", "dates", {"seen": {"format": "day first"}}),
        ("04/05/2021", "ignore", ["seen"]),
        ("2021-02-31", "ignore", ["seen"]),
    ],
)
def test_dates_of_another_form_may_stand_among_usual_ones(
    odd: str, option: str, entry: Any
) -> None:
    one = base()
    one["seen"] = [f"2021-03-{1 + i % 28:02}" if i % 3 else odd for i in range(100)]
    suggestion = look(one)[option, ""]
    assert suggestion.entry == entry
    options = build(
        TableOptions, {"files": ["a.csv"], "label": "outcome", option: suggestion.entry}, ""
    )
    columns = {column.name: column for column in survey_of(read_contents(options)).columns}
    assert (columns["seen"].kind == "date") == (option == "dates")


@pytest.mark.parametrize("form", ["{:%d/%m/%Y}", "{:%Y%m%d}", "{:%Y-%m-%dT00:00:00+01:00}"])
@pytest.mark.parametrize("rows", [1, 3])  # of a person
def test_dates_name_neither_rows_nor_people(form: str, rows: int) -> None:
    one, start = base(), date(1930, 1, 1)
    one["born"] = [form.format(start + timedelta(days=241 * (i // rows))) for i in range(100)]
    assert {option for option, _ in look(one)} == {"dates"}


def test_digits_that_are_no_dates_stay_numbers() -> None:
    one = base()
    one["platelets"] = [20230100 + i % 90 for i in range(100)]  # the 32nd of January and so on
    assert ("dates", "") not in look(one)


def test_numbers_with_a_unit_and_numbers_in_another_unit() -> None:
    one, other, third = base(seed=1), base(seed=2), base(seed=3)
    draw = random.Random(2)
    one |= {"chol": [f"{draw.gauss(220, 30):.0f}" for _ in range(100)], "ef": ["0.45"] * 100}
    third |= {"chol": [f"{draw.gauss(215, 30):.0f}" for _ in range(100)], "ef": ["0.5"] * 100}
    other["chol"] = [f"{draw.gauss(5.6, 0.8):.2f}" for _ in range(100)]
    other["ef"] = [f"{30 + i % 40}%" for i in range(100)]
    look(one, other, third)
    units = [one for one in examine(files=["a.csv", "b.csv", "c.csv"], label="outcome")
             if one.option == "units"]  # fmt: skip
    assert [one.site for one in units] == ["b", "b"]
    assert units[0].entry == {"chol": {"factor": 38.67}}
    assert "cholesterol, mmol/l to mg/dl" in units[0].why
    assert units[1].entry == {"ef": {"suffix": "%", "factor": 0.01}}
    assert not any(one.safe for one in units)


def test_values_that_are_spellings_are_mapped_and_the_columns_are_one() -> None:
    one, other = base(seed=1), base(seed=2)
    one |= {"smoker": [i % 2 for i in range(100)], "ward": ["ENT", "eye"] * 50}
    other |= {"smoker": ["yes", "no"] * 50, "ward": ["ent", "Eye"] * 50}
    found = look(one, other)
    assert not found["values", ""].safe
    given = {"values": {"smoker": {"1": "yes", "0": "no"}, "ward": {"ent": "ENT", "Eye": "eye"}}}
    values = [s.entry for s in examine(files=["a.csv", "b.csv"], label="outcome")]
    assert {"smoker": given["values"]["smoker"]} in values
    options = build(TableOptions, {"files": ["a.csv", "b.csv"], "label": "outcome", **given}, "")
    contents = read_contents(options)
    assert suggest(contents) == []
    kinds = {column.name: (column.kind, column.where) for column in survey_of(contents).columns}
    assert kinds["smoker"] == kinds["ward"] == ("text", "common")


def test_values_and_units_name_a_column_once_though_it_has_two_names() -> None:
    one, other, third = base(seed=1), base(seed=2), base(seed=3)
    one |= {"ward": ["ENT", "eye"] * 50, "chol": [200 + i % 41 for i in range(100)]}
    third["chol"] = one["chol"]
    other |= {"Ward": ["ent", "Eye"] * 50, "Chol": [f"{5 + i % 41 / 38:.2f}" for i in range(100)]}
    found = look(one, other, third)
    assert found["rename", ""].entry == {"Ward": "ward", "Chol": "chol"}
    assert [*found["values", ""].entry] == ["ward"]
    assert [*found["units", "b"].entry] == ["chol"]


def test_suffixes_are_removed_before_sites_are_compared() -> None:
    one, other = base(seed=1), base(seed=2)
    one["weight"] = [f"{60 + i % 40} kg" for i in range(100)]
    other["weight"] = [f"{60_000 + 1000 * (i % 40)} g" for i in range(100)]
    one["hb"] = [f"{12 + i % 3}.{i % 10} g/dl" for i in range(100)]
    other["hb"] = [120 + i % 30 for i in range(100)]
    one["height"] = [150 + i % 41 for i in range(100)]
    other["height"] = [f"{1.5 + (i % 41) / 100:.2f}" for i in range(100)]
    look(one, other)
    rules: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    for suggestion in examine(files=["a.csv", "b.csv"], label="outcome"):
        assert suggestion.option == "units"
        assert not suggestion.entry.keys() & rules[suggestion.site].keys()
        rules[suggestion.site] |= suggestion.entry
    assert rules["a"] == {"weight": {"suffix": "kg"}, "hb": {"suffix": "g/dl"}}
    assert rules["b"] == {
        "weight": {"suffix": "g", "factor": 0.001}, "hb": {"factor": 0.1},
        "height": {"factor": 100.0},
    }  # fmt: skip
    given = {site: {"units": entries} for site, entries in rules.items()}
    values = {"files": ["a.csv", "b.csv"], "label": "outcome", "sites": given}
    assert suggest(read_contents(build(TableOptions, values, ""))) == []


@pytest.mark.parametrize(
    ("ratio", "factor"),
    [(98.0, 100.0), (90.0, 88.4), (0.0265, 0.0258598), (37.0, 38.67), (3e4, 3e4)],
)
def test_the_nearest_factor_is_suggested(ratio: float, factor: float) -> None:
    assert evidence.conversion(ratio)[0] == pytest.approx(factor)


def test_months_come_in_the_order_of_the_calendar() -> None:
    one = base()
    one["month"] = ["January" if i % 2 else "February" for i in range(100)]
    assert look(one, stage="month")["order", ""].entry == ["January", "February"]
    one["month"] = [f"visit {1 + i % 11}" for i in range(100)]
    assert look(one, stage="month")["order", ""].entry[:2] == ["visit 1", "visit 2"]
    one["month"] = [2019 + i % 3 for i in range(100)]
    assert ("order", "") not in look(one, stage="month")


def test_rows_that_are_there_twice_are_told_unless_chance_explains_them() -> None:
    one, other = base(seed=1), base(seed=2)
    for place, columns in enumerate((one, other)):
        draw = random.Random(place)
        columns |= {f"x{n}": [f"{draw.gauss(0, 1):.3f}" for _ in range(100)] for n in range(4)}
    for name in one:
        one[name] = one[name] + one[name][:3]
        other[name] = other[name] + one[name][10:12]
    files = [write("a.csv", one), write("b.csv", other)]
    options = build(TableOptions, {"files": files, "label": "outcome"}, "")
    told = [what for what, _ in repeated_rows(read_contents(options, duplicates=True))]
    assert told == ["a has 3 duplicate rows", "a and b have 2 rows in common"]
    write("a.csv", {"sex": ["f", "m"] * 50, "outcome": ["x", "y"] * 50})
    few = build(TableOptions, {"files": ["a.csv"], "label": "outcome"}, "")
    assert repeated_rows(read_contents(few, duplicates=True)) == []


@pytest.mark.parametrize("shared", [0, 7])
def test_rows_of_another_site_are_found_by_four_measurements(shared: int) -> None:
    draw = random.Random(5)
    spread = {"age": (60, 9, 1), "chol": (200, 30, 0), "pressure": (130, 15, 0), "k": (5, 1, 2)}
    sites = []
    for rows in (200, 150):
        columns: Columns = {}
        for name, (mean, deviation, digits) in spread.items():
            columns[name] = [f"{draw.gauss(mean, deviation):.{digits}f}" for _ in range(rows)]
        sites.append(columns | {"outcome": ["ill", "well"] * (rows // 2)})
    for name in sites[0]:
        sites[1][name] = sites[1][name] + sites[0][name][:shared]
    files = [write(f"{name}.csv", columns) for name, columns in zip("ab", sites, strict=True)]
    options = build(TableOptions, {"files": files, "label": "outcome"}, "")
    told = [what for what, _ in repeated_rows(read_contents(options, duplicates=True))]
    assert told == ([f"a and b have {shared} rows in common"] if shared else [])


def test_what_the_options_say_is_not_suggested_again() -> None:
    one = base()
    one["chol"] = [0 if i % 20 == 0 else 180 + i for i in range(100)]
    one["mrn"] = [100_000 + 7 * i for i in range(100)]
    one["cp"] = [i % 4 for i in range(100)]
    first = look(one)
    assert {option for option, _ in first} == {"missing", "id", "categorical"}
    given = {option: suggestion.entry for (option, _), suggestion in first.items()}
    options = build(TableOptions, {"files": ["a.csv"], "label": "outcome", **given}, "")
    assert suggest(read_contents(options)) == []


def test_numbers_with_a_point_are_not_spellings_of_whole_ones() -> None:
    assert same_classes({"a": {"1.1": 3, "2": 1}, "b": {"11": 2, "2": 4}}) == {}
    assert same_classes({"a": {"1,5": 3, "2": 1}, "b": {"1.5": 9, "2": 4}}) != {}


@pytest.mark.parametrize(
    ("one", "other"),
    [("<=50K", ">50K"), ("-1", "1"), ("-1", "+1"), ("A+", "A-"), ("HER2+", "HER2-"), ("c", "c++"),
     ("0-10", "010"), ("50%", "50"), ("1.2.3", "123"), ("10 20", "1020"), ("<5", "5")],
)  # fmt: skip
def test_classes_that_differ_in_a_sign_are_two(one: str, other: str) -> None:
    assert same_classes({"a": {one: 30, other: 20}, "b": {one: 3, other: 40}}) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [("Yes", "yes"), ("self-employed", "Self employed"), ("not_in_family", "Not-in-family"),
     ("St. Gallen", "st gallen"), ("n/a", "N.A."), ("type 2", "Type_2"), ("type-2", "type 2"),
     (" ill", "ill"), ("I'm ill", "Im ill"), ("<= 50K", "<=50k")],
)  # fmt: skip
def test_classes_that_differ_in_case_blanks_or_punctuation_look_like_one(
    one: str, other: str
) -> None:
    assert same_classes({"a": {one: 30, "x": 20}, "b": {other: 3, "x": 40}}) in (
        {one: other},
        {other: one},
    )
