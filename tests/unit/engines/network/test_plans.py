"""Plans for own tables, one term at a time; and what a run may set of `data` at a site."""

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import UserError
from atoll.core.messages import pack, unpack
from atoll.data.own.agreement import Agree, Agreed, Common, Offer, Offered, OwnTable, Plan
from atoll.engines.network import plans, ranges
from atoll.engines.network.contract import RefusedError, SiteFile
from atoll.engines.network.drafts import drafted_contract, drafted_file
from atoll.engines.network.egress import lines
from atoll.engines.network.plans import most_of_all
from atoll.engines.network.policy import Gate
from atoll.runs.config import RunConfig, change, resolve, to_toml
from tests.attacks.plan_recovery import as_text

SITES = ("a", "b")
PEOPLE = "name,case,ward,age,size,diagnosis\n" + "".join(
    f"Person {n},{900 + n},{'AB'[n % 2]},{40 + n % 17}.5,{n % 13}.1,{('ill', 'well')[n % 3 == 0]}\n"
    for n in range(60)
)


def config(**changes: Any) -> RunConfig:
    data = {"files": ["a.csv", "b.csv"], "label": "diagnosis"}
    values: dict[str, Any] = {"method": "fedavg", "data": data, "rounds": 2}
    return resolve(change(values, {"widths": [8], "threads": 1, **changes}), "test")


def gate(folder: Path, data: dict[str, Any] | None = None, **terms: Any) -> Gate:
    (folder / "people.csv").write_text(PEOPLE)
    terms = {"columns": 2, **terms}  # age and size; ward and diagnosis have few values
    contract = {"methods": ["fedavg"], "actions": ["offer", "agree", "fit", "check"], **terms}
    given = {"files": [str(folder / "people.csv")], "label": "diagnosis", **(data or {})}
    return Gate(SiteFile(store=str(folder / "store"), data=given, contract=contract))


def agree(site: Gate, text: str) -> tuple[dict[str, Common], Plan]:
    """The plan of two sites with the same columns, and its columns by name."""
    told = unpack(site.offer("run", text, "a", pack(Offer("run"))), Offered, "a")
    columns = [hashed for hashed, kind in told.columns.items() if kind != "left out"]
    left = [hashed for hashed, kind in told.columns.items() if kind == "left out"]
    agreed = unpack(site.agree(pack(Agree(columns))), Agreed, "a")
    made = [
        Common(h, told.columns[h], tuple(agreed.levels.get(h, [])), agreed.gaps[h]) for h in columns
    ]
    named = dict(zip(("ward", "age", "size"), made, strict=True))
    return named, Plan("run", tuple(made), tuple(left), ("ill", "well"), ())


Change = Callable[[dict[str, Common], Plan], Plan]


def of(column: str, **changes: Any) -> Change:
    """The plan with another column in the place of one."""

    def changed(named: dict[str, Common], plan: Plan) -> Plan:
        one = dataclasses.replace(named[column], **changes)
        columns = [one if old == named[column] else old for old in plan.columns]
        return dataclasses.replace(plan, columns=tuple(columns))

    return changed


def with_left_out(named: dict[str, Common], plan: Plan) -> Plan:
    added = Common(plan.left_out[1], "number", (), False)
    return dataclasses.replace(plan, columns=(*plan.columns, added))


def twice(named: dict[str, Common], plan: Plan) -> Plan:
    return dataclasses.replace(plan, columns=(*plan.columns, named["age"]))


def plain(**changes: Any) -> Change:
    return lambda named, plan: dataclasses.replace(plan, **changes)


def words(count: int) -> tuple[str, ...]:
    return tuple(f"word {number}" for number in range(count))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (of("age", hash="0" * 32), "column 2 of the plan is none that this site has agreed to"),
        (of("age", kind="text", levels=("40.5",)), "another type than at this site"),
        (of("age", kind="date"), "another type than at this site, where it is of type number"),
        (of("ward", kind="number", levels=()), "another type than at this site"),
        (of("age", levels=("40.5",)), "has levels, and is no text"),
        (of("ward", levels=words(51)), "has 51 levels; 50 are allowed"),
        (of("ward", levels=("A", "B", "A")), "has a level twice"),
        (twice, "a column twice"),
        (with_left_out, "column 4 of the plan is none that this site has agreed to"),
        (plain(left_out=()), "does not leave out a column that this site leaves out"),
        (plain(key="another"), "another key than that of the offer"),
        (plain(classes=("ill",)), "lacks classes that this site has"),
        (plain(classes=("ill", "well", "ill")), "the same name twice among the classes"),
        (plain(classes=("ill", "well", *words(999))), "1,001 classes; 1,000 are allowed"),
        (plain(stages=("one",)), "stages in the plan, and none at this site"),
    ],
)
def test_a_plan_that_is_not_what_the_site_has_agreed_to_is_refused(
    change: Change, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a line in the log, and before anything is built."""
    monkeypatch.setattr(OwnTable, "dataset", lambda table, plan: pytest.fail("it was built"))
    site, text = gate(tmp_path), to_toml(config())
    plan = change(*agree(site, text))
    with pytest.raises(RefusedError, match=reason):
        site.prepare("run", text, "a", SITES, as_text(plan))
    *_, last = lines(tmp_path / "store" / "egress.jsonl")
    assert last.words.startswith("refused 'prepare': ")
    assert reason in last.words


def test_a_left_out_number_that_agree_described_is_no_column(tmp_path: Path) -> None:
    """`agree` tells of a number that is left out whether values are missing, and no more."""
    site, text = gate(tmp_path), to_toml(config())
    told = unpack(site.offer("run", text, "a", pack(Offer("run"))), Offered, "a")
    case = [*told.columns][1]
    assert told.columns[case] == "left out"
    assert unpack(site.agree(pack(Agree([case]))), Agreed, "a") == Agreed({case: False}, {})
    left = tuple(hashed for hashed, kind in told.columns.items() if kind == "left out")
    plan = Plan("run", (Common(case, "number", (), False),), left, ("ill", "well"), ())
    with pytest.raises(RefusedError, match="column 1 of the plan is left out at this site"):
        site.prepare("run", text, "a", SITES, as_text(plan))


def test_levels_and_classes_of_other_sites_are_allowed(tmp_path: Path) -> None:
    site, text = gate(tmp_path), to_toml(config())
    named, plan = agree(site, text)
    plan = of("ward", levels=("A", "B", *words(48)))(named, plan)
    plan = dataclasses.replace(plan, classes=("ill", "unknown", "well"))
    assert site.prepare("run", text, "a", SITES, as_text(plan))


def test_too_many_clients_are_refused(tmp_path: Path) -> None:
    site, text = gate(tmp_path), to_toml(config())
    _, plan = agree(site, text)
    with pytest.raises(RefusedError, match="1,001 clients"):
        site.prepare("run", text, "a", ("a", *words(1000)), as_text(plan))


def test_a_plan_that_is_too_long_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "TypeAdapter", lambda kind: pytest.fail("it was read"))
    site, text = gate(tmp_path), to_toml(config())
    named, plan = agree(site, text)
    long = as_text(of("ward", levels=words(1_000_000))(named, plan))
    with pytest.raises(RefusedError, match=r"a plan of [\d,]+ bytes; 8,388,608 are allowed"):
        site.prepare("run", text, "a", SITES, long)


def test_a_network_for_a_wide_plan_is_refused_before_the_table_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 units, 52 inputs and 2 classes have 442 parameters."""
    monkeypatch.setattr(OwnTable, "dataset", lambda table, plan: pytest.fail("it was built"))
    site, text = gate(tmp_path, parameters=441), to_toml(config())
    named, plan = agree(site, text)
    wide = of("ward", levels=("A", "B", *words(48)))(named, plan)
    with pytest.raises(RefusedError, match="a network of 442 parameters; 441 are allowed"):
        site.prepare("run", text, "a", SITES, as_text(wide))


def test_a_damaged_agreement_is_named(tmp_path: Path) -> None:
    site, text = gate(tmp_path), to_toml(config())
    _, plan = agree(site, text)
    (tmp_path / "store" / "run" / "agreement.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        site.prepare("run", text, "a", SITES, as_text(plan))


def test_a_site_that_keeps_levels_to_itself_tells_none(tmp_path: Path) -> None:
    site, text = gate(tmp_path, {"levels": "local"}), to_toml(config())
    told = unpack(site.offer("run", text, "a", pack(Offer("run"))), Offered, "a")
    with pytest.raises(RefusedError, match="does not disclose so much"):
        site.agree(pack(Agree([h for h, kind in told.columns.items() if kind == "text"])))


def test_names_of_few_people_are_not_told_either(tmp_path: Path) -> None:
    """Nothing is suspected of a column with fewer than 20 values; its levels are not told."""
    site, text = gate(tmp_path), to_toml(config())
    (tmp_path / "people.csv").write_text("".join(PEOPLE.splitlines(keepends=True)[:16]))
    told = unpack(site.offer("run", text, "a", pack(Offer("run"))), Offered, "a")
    name, _, ward, *_ = told.columns
    assert told.columns[name] == "text"
    with pytest.raises(RefusedError, match="does not disclose so much"):
        site.agree(pack(Agree([name])))
    assert unpack(site.agree(pack(Agree([ward]))), Agreed, "a").levels == {ward: ["A", "B"]}
    site = gate(tmp_path, {"keep": ["name"]})
    (tmp_path / "people.csv").write_text("".join(PEOPLE.splitlines(keepends=True)[:16]))
    site.offer("run", text, "a", pack(Offer("run")))
    assert len(unpack(site.agree(pack(Agree([name]))), Agreed, "a").levels[name]) == 15


# What a run may set of `data`, and lists


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"data.label": "ward"}, ""),  # the site's own file wins
        ({"data.stage": "ward"}, "data.stage"),
        ({"data.categorical": ["age"]}, "data.categorical"),
        ({"data.missing": ["40.5"]}, "data.missing"),
        ({"data.encoding": "utf-16"}, "data.encoding"),
        ({"data.rename": {"age": "years"}}, "data.rename"),
        ({"data.units": {"age": {"factor": 1e6}}}, "data.units"),
        ({"data.group": "ward"}, "data.group"),
        ({"data.sites": {"a": {"rename": {"age": "years"}}}}, "data.sites"),
        ({"data.ignore": ["size"]}, ""),
        ({"data.levels": "local"}, ""),
    ],
    ids=str,
)
def test_a_run_does_not_decide_how_a_site_reads_its_file(
    changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    site, text = gate(tmp_path), to_toml(config(**changes))
    if name:
        with pytest.raises(RefusedError, match=f"option '{name}'"):
            site.offer("run", text, "a", pack(Offer("run")))
    else:
        told = unpack(site.offer("run", text, "a", pack(Offer("run"))), Offered, "a")
        assert told.classes == ["ill", "well"]


def test_a_label_that_neither_file_nor_contract_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text(PEOPLE)
    terms = {"methods": ["fedavg"], "actions": ["offer", "agree", "fit", "check"]}
    data = {"files": [str(tmp_path / "people.csv")]}
    site = Gate(SiteFile(store=str(tmp_path / "store"), data=data, contract=terms))
    with pytest.raises(RefusedError, match="names it") as refused:
        site.offer("run", to_toml(config()), "a", pack(Offer("run")))
    assert "option 'data.label' = \"diagnosis\"" in str(refused.value)


HARMONISED: dict[str, Any] = {
    "data.rename": {"Alter in Jahren": "age"}, "data.labels": {"krank": "ill"},
    "data.units": {"age": {"factor": 0.1}}, "data.missing": {"age": ["-9"]},
    "data.sites": {"b": {"rename": {"Grösse": "size"}}}, "data.ignore": ["case"],
}  # fmt: skip


def test_a_drafted_contract_lists_the_rules_of_its_run_and_no_others() -> None:
    run = config(**HARMONISED)
    terms = SiteFile(contract=tomllib.loads(drafted_file(run))["contract"]).terms()
    assert terms == drafted_contract(run)
    sent = resolve(tomllib.loads(to_toml(run)), "as it travels")
    assert ranges.violation(terms.options, sent) == ""
    other = config(**{**HARMONISED, "data.units": {"age": {"factor": 10.0}}})
    assert "'data.units'" in ranges.violation(terms.options, other)


@pytest.mark.parametrize(("changes", "stages"), [({}, 1), ({"data.stage": "ward"}, 20)])
def test_a_draft_counts_stages_only_where_the_run_names_their_column(
    changes: dict[str, Any], stages: int
) -> None:
    """Two rounds, five times; no other run can name a column of stages under that draft."""
    run = config(**changes)
    terms = drafted_contract(run)
    assert terms.rounds_in_all == 5 * 2 * stages
    assert terms.epochs_in_all == terms.rounds_in_all * run.method["epochs"]
    staged = config(**{"data.stage": "size"})
    assert "'data.stage'" in ranges.violation(terms.options, staged)


def test_a_list_has_at_most_a_hundred_items_unless_the_contract_spells_it_out() -> None:
    deep = config(widths=[1] * 101)
    for options in ({}, {"fedavg": {"model.widths": {"least": 1, "most": 8}, "data.name": "tables",
                                    "data.label": "diagnosis", "engine.threads": 1}}):  # fmt: skip
        assert "'model.widths' has 101 items" in ranges.violation(options, deep, {"data.label"})
    assert ranges.violation({}, config(widths=[1] * 100), {"data.label"}) == ""
    spelled = drafted_contract(deep).options
    assert ranges.violation(spelled, deep) == ""


@pytest.mark.parametrize("what", ["classes", "stages"])
def test_a_site_that_offers_too_many_names_is_the_one_that_is_named(what: str) -> None:
    """The honest sites refuse the plan that would come of it."""
    few, many = ["no", "yes"], [f"n{number}" for number in range(1_000)]
    names = {"basel": few, "bern": many, "geneva": few}
    offers = {id: Offered({"h": "number"}, **_both(what, own)) for id, own in names.items()}
    assert most_of_all(offers) == (
        "bern", f"it offers 1,000 {what}; all have 1,002 {what}; 1,000 are allowed"
    )  # fmt: skip
    del offers["bern"]
    assert most_of_all(offers) == ("", "")


def _both(what: str, names: list[str]) -> dict[str, list[str]]:
    return {"classes": [], "stages": [], what: names}
