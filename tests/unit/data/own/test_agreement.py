"""Tables that stay at their sites agree on columns, and a run on them is the run in one place."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.core.errors import UserError
from atoll.core.federation import Moment
from atoll.core.messages import LARGEST_HEADER, Packet, Tensors, opened, pack, unpack
from atoll.core.record import Record, Score, Snapshot, read_checkpoint, read_events
from atoll.data.own import agreement
from atoll.data.own.agreement import Agree, Agreed, Offer, Offered, Plan, common, elsewhere, planned
from atoll.data.own.tables import TableOptions
from atoll.engines.local import local_engine
from atoll.engines.network.contract import RefusedError, SiteFile
from atoll.engines.network.egress import lines
from atoll.engines.network.policy import Gate
from atoll.engines.network.requests import Finish
from atoll.runs.config import RunConfig, change, resolve, to_toml
from atoll.runs.execute import execute
from atoll.runs.facts import facts
from atoll.runs.loop import go
from atoll.runs.parts import Parts
from atoll.runs.predict.model import Predictor
from atoll.runs.predict.tables import predict

SITES = ("basel", "bern", "geneva")


def tables(folder: Path, people: bool = False, numbers: bool = False) -> None:
    """Three files: common columns in another order each, own columns, gaps, a text column.

    With `people`, rows belong to people and have weights; with `numbers` the label is a number.
    """
    draws = np.random.default_rng(3)
    for place, name in enumerate(SITES):
        rows = 60 + 10 * place
        age, weight, own = (draws.normal(size=rows) for _ in range(3))
        kind = draws.choice(["red", "blue", "green"][: 2 + (place > 0)], size=rows)
        label = np.where(age + own + (kind == "red") > 0.4, "yes", "no")
        if numbers:
            label = np.array([f"{v:.4f}" for v in 40 + 3 * age + own + (kind == "red")])
        columns: dict[str, Any] = {
            "years": [f"{v:.3f}" for v in age],
            "kilos": [f"{v:.3f}" if i % 9 else "" for i, v in enumerate(weight)],
            "colour": kind,
            f"own_{name}": [f"{v:.3f}" for v in own],
            "outcome": label,
        }
        if people:
            columns["person"] = [f"p{number // 3}" for number in range(rows)]
            columns["counts"] = [str(1 + number % 4) for number in range(rows)]
        if name == "bern":
            columns = dict(reversed(columns.items()))
        lines = [",".join(columns), *(",".join(row) for row in zip(*columns.values(), strict=True))]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def config(folder: Path, method: str, **changes: Any) -> RunConfig:
    values = {
        "method": method, "rounds": 2, "checkpoint_seconds": 0,
        "data": {"files": [str(folder / f"{n}.csv") for n in SITES], "label": "outcome"},
    }  # fmt: skip
    small = {"widths": [8], "epochs": 1, "engine.mode": "loop", "threads": 1}
    return resolve(change(values, {**small, **changes}), "test")


def gates(folder: Path, method: str, **more: Any) -> dict[str, Gate]:
    made = {}
    for name in SITES:
        home = folder / "sites" / name
        home.mkdir(parents=True)
        (folder / f"{name}.csv").rename(home / "mine.csv")  # nobody else has it
        contract = {
            "methods": [method],
            "actions": ["offer", "agree", "fit", "check"]
            + (["settle", "keep"] * (method == "chfl")),
            "steps": 1,  # a round is one short epoch, and a site has few rows
            "columns": 2,  # years and kilos
            "unit_rows": 1,
            "shown_rows": "allow",
        }
        data = {"files": [str(home / "mine.csv")], "label": "outcome", **more}
        made[name] = Gate(SiteFile(store=str(home / "store"), data=data, contract=contract))
    return made


@dataclasses.dataclass
class Near:
    """An engine whose sites are gates in this process; it sees every packet."""

    gates: Mapping[str, Gate]
    at_least: int = 0
    number: int = 0
    left: list[bytes] = dataclasses.field(default_factory=list)

    def agreement(self, made: RunConfig) -> Plan:
        options = TableOptions(tuple(made.data["files"]), made.data["label"])
        offers: dict[str, Offered] = {}
        agreed: dict[str, Agreed] = {}
        for name, gate in self.gates.items():
            reply = gate.offer("run", to_toml(made), name, pack(Offer("run")))
            offers[name] = self._message(reply, Offered, name)
        for name, gate in self.gates.items():
            reply = gate.agree(pack(Agree(common(offers, options))))
            agreed[name] = self._message(reply, Agreed, name)
        return planned("run", offers, agreed, options)

    def _message(self, reply: Packet, kind: type, name: str) -> Any:
        self.left.append(reply.header + reply.block)
        return opened(reply.header, reply.block, kind, name).message

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        self.number += 1
        replies = {
            n: self.gates[n].handle(self.number, action, moment, packets[n]) for n in packets
        }
        self.left += [reply.header + reply.block for reply in replies.values()]
        return replies

    def states(self, place: str) -> dict[str, Tensors]:
        return {}

    def restore(self, states: Mapping[str, Tensors], place: str) -> None:
        raise AssertionError("these runs are not resumed")

    def snapshots(self, moment: Moment) -> list[Snapshot]:
        return []


@pytest.mark.parametrize("people", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "chfl", "alone"])
def test_a_run_on_tables_at_their_sites_is_the_run_in_one_place(
    method: str, people: bool, tmp_path: Path
) -> None:
    tables(tmp_path, people)
    named = {"group": "person", "weights": "counts"} if people else {}
    made = config(tmp_path, method, **{f"data.{key}": name for key, name in named.items()})
    execute(made, tmp_path / "local", local_engine)
    near = Near(gates(tmp_path, method, **named))
    plan = near.agreement(made)
    for name, gate in near.gates.items():
        text = json.dumps(dataclasses.asdict(plan))
        gate.prepare("run", to_toml(made), name, SITES, text)
    parts = Parts(made, *elsewhere(plan, SITES, made.data["files"]))
    record = Record.create(tmp_path / "network", to_toml(made), {})
    go(parts, near, record, lambda progress: None, lambda: False)
    events = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("local", "network")]
    assert events[0] == events[1]
    crossed = b"|".join(near.left)
    for name in ("own_basel", "own_bern", "own_geneva", "years", "kilos", "colour"):
        assert name.encode() not in crossed
    assert b"green" in crossed  # levels of a common text column are told
    log = (tmp_path / "sites" / "bern" / "store" / "egress.jsonl").read_text()
    assert "answered 'offer'" in log
    assert "answered 'agree'" in log


@pytest.mark.parametrize("method", ["fedavg", "chfl", "alone"])
def test_a_number_is_learned_at_the_sites_as_in_one_place_and_no_label_leaves(
    method: str, tmp_path: Path
) -> None:
    tables(tmp_path, numbers=True)
    labels = [
        line.split(",")[0 if name == "bern" else -1]
        for name in SITES
        for line in (tmp_path / f"{name}.csv").read_text().splitlines()[1:]
    ]
    made = config(tmp_path, method)
    execute(made, tmp_path / "local", local_engine)
    near = Near(gates(tmp_path, method))
    plan = near.agreement(made)
    assert plan.classes == ("outcome",)
    for name, gate in near.gates.items():
        text = json.dumps(dataclasses.asdict(plan))
        gate.prepare("run", to_toml(made), name, SITES, text)
    parts = Parts(made, *elsewhere(plan, SITES, made.data["files"]))
    assert parts.dataset.regression
    record = Record.create(tmp_path / "network", to_toml(made), {})
    go(parts, near, record, lambda progress: None, lambda: False)
    events = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("local", "network")]
    assert events[0] == events[1]
    crossed = b"|".join(near.left)
    assert not [label for label in labels if label.encode() in crossed]
    assert b'"variance"' in crossed  # what a test sends


def test_sites_that_read_the_label_differently_are_told_to_set_the_task(tmp_path: Path) -> None:
    tables(tmp_path, numbers=True)
    path = tmp_path / "basel.csv"
    lines = path.read_text().splitlines()
    few = [f"{line.rpartition(',')[0]},{place % 4}" for place, line in enumerate(lines[1:])]
    path.write_text("\n".join([lines[0], *few]) + "\n")
    made = config(tmp_path, "fedavg")
    near = Near(gates(tmp_path, "fedavg"))
    with pytest.raises(UserError, match="is a number at bern and has classes at basel") as error:
        near.agreement(made)
    assert "set task" in error.value.remedy


def test_a_plan_with_classes_for_a_number_is_refused(tmp_path: Path) -> None:
    tables(tmp_path, numbers=True)
    made = config(tmp_path, "fedavg")
    near = Near(gates(tmp_path, "fedavg"))
    plan = near.agreement(made)
    for classes in (("no", "yes"), ("other",)):
        text = json.dumps(dataclasses.asdict(dataclasses.replace(plan, classes=classes)))
        with pytest.raises(RefusedError, match="classes"):
            near.gates["bern"].prepare("run", to_toml(made), "bern", SITES, text)


def test_a_site_predicts_by_itself_what_it_would_in_one_place(tmp_path: Path) -> None:
    tables(tmp_path)
    made = config(tmp_path, "chfl")
    execute(made, tmp_path / "local", local_engine)
    rows = tmp_path / "rows.csv"
    rows.write_text((tmp_path / "bern.csv").read_text())
    near = Near(gates(tmp_path, "chfl"))
    plan = near.agreement(made)
    for name, gate in near.gates.items():
        gate.prepare("run", to_toml(made), name, SITES, json.dumps(dataclasses.asdict(plan)))
    parts = Parts(made, *elsewhere(plan, SITES, made.data["files"]))
    record = Record.create(tmp_path / "network", to_toml(made), facts(parts))
    go(parts, near, record, lambda progress: None, lambda: False)
    scores = [e for e in read_events(tmp_path / "network") if isinstance(e, Score)]
    lines = [json.dumps({"event": "score", **vars(e)}) for e in scores if e.client == "bern"]
    own = "".join(f"{line}\n" for line in [*[lines[0]] * 10_000, *lines])  # more than a header has
    assert len(own) > LARGEST_HEADER
    state = read_checkpoint(tmp_path / "network")[0]
    shared = {n.removeprefix("server/"): torch.from_numpy(a) for n, a in state.items()}
    about = (tmp_path / "network" / "facts.json").read_text()
    near.gates["bern"].finish(pack(Finish.of(shared, own, about)))
    here = tmp_path / "sites" / "bern" / "store" / "run"
    for folder, out in ((tmp_path / "local", "one.csv"), (here, "other.csv")):
        predict(Predictor(folder, "bern", ""), rows, tmp_path / out)
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "other.csv").read_bytes()


def test_a_site_whose_contract_has_no_offer_refuses_it(tmp_path: Path) -> None:
    tables(tmp_path)
    made = config(tmp_path, "fedavg")
    site = SiteFile(
        store=str(tmp_path / "store"),
        data={"files": [str(tmp_path / "bern.csv")], "label": "outcome"},
        contract={"methods": ["fedavg"], "actions": ["fit", "check"]},
    )  # fmt: skip
    with pytest.raises(RefusedError, match="'offer' is not in the contract"):
        Gate(site).offer("run", to_toml(made), "bern", pack(Offer("run")))


def test_columns_without_a_match_at_every_site_are_no_common_ones() -> None:
    offers = {
        "a": Offered({"x": "number", "y": "text", "z": "number", "w": "left out"}, ["0"], []),
        "b": Offered({"z": "text", "x": "number", "y": "text", "w": "number"}, ["1"], []),
    }
    agreed = {"a": Agreed({"x": False, "y": True}, {"y": ["2", "10"]}),
              "b": Agreed({"x": True, "y": False}, {"y": ["1"]})}  # fmt: skip
    assert common(offers, TableOptions()) == ["x", "y"]
    assert common(offers, TableOptions(levels="local")) == ["x"]
    plan = planned("key", offers, agreed, TableOptions())
    assert [(c.hash, c.gaps, c.levels) for c in plan.columns] == [
        ("x", True, ()), ("y", True, ("1", "2", "10")),
    ]  # fmt: skip
    assert plan.left_out == ("w",)
    assert plan.classes == ("0", "1")
    with pytest.raises(UserError, match="has 3 levels") as failed:
        planned("key", offers, agreed, TableOptions(most_levels=2))
    assert failed.value.where == "2 of them at a"
    with pytest.raises(UserError, match="no common column"):
        common({"a": offers["a"], "b": Offered({}, [], [])}, TableOptions())


def test_a_site_that_lacks_what_all_others_have_is_named() -> None:
    all_three, two = {"x": "number", "y": "number", "z": "text"}, {"x": "number", "y": "number"}
    offers = {id: Offered(all_three, [], []) for id in SITES}
    assert agreement.narrowing(offers, TableOptions()) == ""
    offers["geneva"] = Offered({"x": "number", "y": "left out", "z": "number"}, [], [])
    words = agreement.narrowing(offers, TableOptions())
    assert words == "1 columns are common, and 3 without geneva"
    assert agreement.narrowing(offers, TableOptions(levels="local")).endswith("2 without geneva")
    offers["bern"] = Offered(two, [], [])  # without it, geneva still takes two
    assert agreement.narrowing(offers, TableOptions()).endswith("and 2 without geneva")
    offers["basel"] = Offered({"w": "number"}, [], [])  # with two such sites none stands out
    assert (
        agreement.narrowing(offers, TableOptions()) == "0 columns are common, and 1 without basel"
    )
    del offers["basel"]
    assert agreement.narrowing(offers, TableOptions()) == ""  # either of two may be the odd one


def test_global_scaling_would_need_rows_of_others(tmp_path: Path) -> None:
    tables(tmp_path)
    made = config(tmp_path, "fedavg", scale="global")
    near = Near(gates(tmp_path, "fedavg"))
    text = json.dumps(dataclasses.asdict(near.agreement(made)))
    with pytest.raises(RefusedError, match="scale"):
        near.gates["bern"].prepare("run", to_toml(made), "bern", SITES, text)


PEOPLE = "name,ssn,ward,age,diagnosis\n" + "".join(
    f"Person {n},{900 + 7 * n},{'AB'[n % 2]},{40 + n % 17}.5,{'ill' if n % 3 else 'well'}\n"
    for n in range(60)
)


def own(folder: Path, **data: Any) -> Gate:
    """A site with a table of people, whose contract lets a run choose the label and the stage."""
    (folder / "people.csv").write_text(PEOPLE)
    columns = {"one_of": ["name", "ssn", "diagnosis"]}
    limits = {"data.name": "tables", "data.label": columns, "data.stage": columns}
    actions = ["offer", "agree", "fit", "check"]
    contract = {"methods": ["fedavg"], "actions": actions, "options": {"fedavg": limits}}
    given = {"files": [str(folder / "people.csv")], **data}
    return Gate(SiteFile(store=str(folder / "store"), data=given, contract=contract))


def asked(**data: Any) -> str:
    given = {"files": ["a.csv", "b.csv"], "label": "diagnosis", **data}
    values = {"method": {"name": "fedavg"}, "data": given, "model": {"widths": [8]}}
    return to_toml(resolve(values, "test"))


@pytest.mark.parametrize("column", ["name", "ssn"])
def test_a_column_of_names_or_numbers_of_people_is_not_told_as_label_or_stage(
    column: str, tmp_path: Path
) -> None:
    site = own(tmp_path)
    for data in ({"label": column}, {"stage": column}):
        wide = {**data, "most_levels": 1000, "keep": [column]}  # what the coordinator would like
        with pytest.raises(RefusedError, match="does not disclose so much"):
            site.offer("run", asked(**wide), "a", pack(Offer("key")))
    *_, last = lines(tmp_path / "store" / "egress.jsonl")
    assert f"'{column}' has 60 values in 60 rows" in last.words
    assert not last.bytes


def test_a_quantity_of_whole_numbers_needs_the_word_of_the_site(tmp_path: Path) -> None:
    """Whole numbers that differ from row to row may be numbers of people."""
    site = own(tmp_path, label="ssn", task="regression")
    packet = site.offer("run", asked(label="ssn"), "a", pack(Offer("key")))
    assert opened(packet.header, packet.block, Offered, "a").message.classes == []


def test_levels_of_a_column_that_is_left_out_are_not_told_whatever_the_run_says(
    tmp_path: Path,
) -> None:
    site = own(tmp_path)
    config_ = asked(keep=["name"], most_levels=1000)
    told = unpack(site.offer("run", config_, "a", pack(Offer("key"))), Offered, "a")
    names = {name: agreement._hash(name, "key") for name in ("name", "ward")}
    assert told.columns[names["name"]] == agreement.LEFT_OUT
    with pytest.raises(RefusedError, match="does not disclose so much"):
        site.agree(pack(Agree([*names.values()])))
    said = unpack(site.agree(pack(Agree([names["ward"]]))), Agreed, "a")
    assert said.levels == {names["ward"]: ["A", "B"]}


def test_a_site_may_tell_more_by_its_own_file(tmp_path: Path) -> None:
    site = own(tmp_path, keep=["name"], most_levels=100)
    site.offer("run", asked(), "a", pack(Offer("key")))
    hashed = agreement._hash("name", "key")
    assert len(unpack(site.agree(pack(Agree([hashed]))), Agreed, "a").levels[hashed]) == 60
