"""A federation's file, and what is said of its parties; what needs NVFlare is in tests/process."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.engines.network.coordinator import Terms, View, lines, serve
from atoll.engines.network.drafts import drafted_file
from atoll.engines.network.kits import Kit, Project, read_project
from atoll.engines.network.process import shorten
from atoll.engines.network.rehearsal import _extend_budgets
from atoll.runs.config import change, resolve


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sites = []", "no sites"),
        ('sites = ["a", "A"]', "one twice"),
        ('sites = ["server"]', "nothing can be called 'server'"),
        ('sites = ["a b"]', "nothing can be called 'a b'"),
        ('sites = ["../x"]', "nothing can be called"),
        ('name = ""\nsites = ["a"]', "nothing can be called ''"),
        ('sites = ["a"]\nport = 50000', "port 50000 may be taken"),
        ('sites = ["a"]\nprot = 1', "unknown option 'prot'"),
        ("sites", "not TOML"),
    ],
)
def test_a_mistake_in_a_projects_file_is_said(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "project.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_project(path)


def test_a_projects_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "project.toml"
    path.write_text('name = "alps"\nserver = "fl.example.org"\nsites = ["basel", "bern"]\n')
    assert read_project(path) == Project("alps", "fl.example.org", 8102, ("basel", "bern"))


def test_every_party_has_a_line_of_its_own() -> None:
    views = [
        View("basel", "working", "fit", 1.2, 900, 500),
        View("bern", "away", "", 40.0),
        View("geneva", "away"),
    ]
    assert lines("waiting for 2 of 3", views) == [
        "waiting for 2 of 3: basel working on fit, last seen 1 s ago, 900 bytes to it, 500 from it",
        "waiting for 2 of 3: bern away, last seen 40 s ago",
        "waiting for 2 of 3: geneva away, not seen yet",
    ]


def test_a_draft_of_a_contract_names_what_its_run_asks_for() -> None:
    run = resolve(change({"method": "fedavg"}, {}), "test")
    assert 'methods = ["fedavg"]' in drafted_file(run)
    assert 'actions = ["check", "fit"]' in drafted_file(run)
    assert "actions = []" in drafted_file(None)
    assert "networks = []" in drafted_file(run)
    foreign = dataclasses.replace(run, model={"name": "mine:net"})
    assert 'networks = ["mine:net"]' in drafted_file(foreign)
    assert "replacements = []" in drafted_file(run)
    faulty = dataclasses.replace(run, replace="atoll.reproduce.faults.fedseit:head")
    assert f'replacements = ["{faulty.replace}"]' in drafted_file(faulty)
    own = resolve(change({"method": "fedavg", "data": {"files": ["a.csv"], "label": "y"}}, {}), "t")
    assert 'actions = ["check", "fit", "offer", "agree"]' in drafted_file(own)


def test_a_method_that_needs_every_site_takes_no_quorum(tmp_path: Path) -> None:
    run = resolve(change({"method": "splitnn"}, {}), "test")
    with pytest.raises(UserError, match="'splitnn' cannot do without a site") as caught:
        serve(Kit(tmp_path), [(run, tmp_path)], Terms(at_least=2), print, lambda: False)
    able = "alone, analytic, chfl, fccl, fedavg, fedmatch, fedmd, fml, fot, lowrank, replay, target"
    assert caught.value.remedy == f"leave it out; {able} can"


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"name": "a", "server": "b", "port": "c"}'])
def test_a_kit_that_is_damaged_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "kit.json").write_text(text)
    (tmp_path / "sites.json").write_text(text)
    with pytest.raises(UserError, match="the kit is damaged"):
        _ = Kit(tmp_path).name
    with pytest.raises(UserError, match="the list of sites is damaged"):
        _ = Kit(tmp_path).sites


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (Terms(at_least=-1), "option 'at_least' cannot be -1"),
        (Terms(silence=-1), "option 'silence' cannot be -1"),
        (Terms(patience=math.nan), "option 'patience' cannot be NaN"),
        (Terms(patience=-1), "option 'patience' cannot be -1"),
        (Terms(deadline=0), "option 'deadline' cannot be 0"),
        (Terms(deadline=math.inf), "option 'deadline' cannot be Infinity"),
        (Terms(at_least=4), "4 sites must be there and the project has 3"),
    ],
)
def test_terms_that_cannot_be_kept_are_refused(terms: Terms, words: str, tmp_path: Path) -> None:
    body = {"name": "coordinator", "server": "localhost", "port": 8102}
    (tmp_path / "kit.json").write_text(json.dumps(body))
    (tmp_path / "sites.json").write_text(json.dumps({"sites": ["a", "b", "c"]}))
    run = resolve(change({"method": "fedavg"}, {}), "test")
    with pytest.raises(UserError, match=words):
        serve(Kit(tmp_path), [(run, tmp_path)], terms, print, lambda: False)


def test_a_rehearsal_has_a_budget_for_all_its_runs_and_changes_no_other_term(
    tmp_path: Path,
) -> None:
    path = tmp_path / "site.toml"
    path.write_text(
        'store = "x"\n[contract]\nrounds_in_all = 10\ncomparisons_in_all = 5\nin_all = 7\n'
    )
    _extend_budgets(path)
    assert path.read_text() == (
        'store = "x"\n[contract]\nrounds_in_all = 100\ncomparisons_in_all = 50\nin_all = 7\n'
    )


def test_a_long_log_is_moved_and_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "nvflare.log"
    shorten(log, most=10)
    with log.open("ab", buffering=0) as writer:
        writer.write(b"a few words\n")
        shorten(log, most=100)
        assert log.read_bytes() == b"a few words\n"
        shorten(log, most=10)
        writer.write(b"more\n")
    assert log.read_bytes() == b"more\n"
    assert (tmp_path / "nvflare.log.1").read_bytes() == b"a few words\n"
