"""A coordinator with a real kit whose plan for own tables is made up: sites refuse it.

It is `atoll serve` with another plan than the sites' answers give. The sites stay joined, and their
honest runs before and after it are those of one process.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.engines.local import local_engine
from atoll.engines.network import egress
from atoll.engines.network.drafts import drafted_contract, written
from atoll.runs.config import to_toml
from atoll.runs.execute import execute
from tests.attacks.plan_recovery import FIRST, PLANS, run_config, table

from .federation import Federation, federation
from .hostile import INSIDE, said

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = pytest.mark.process

SITES = ("basel", "bern")
ROOT = Path(__file__).parents[2]
FORGED = [kind for kind in PLANS if kind != "honest"]


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Two sites with a table of people each, under a contract drafted for the honest run."""
    with federation(tmp_path_factory.mktemp("people"), SITES) as made:
        for site in SITES:
            table(made.folder / f"{site}.csv")
            data = f'data = {{ files = ["../../{site}.csv"], label = "label" }}'
            head = f'store = "../{site}-store"\nengine = {{ threads = 1 }}\n{data}\n'
            text = head + written(drafted_contract(run_config()))
            (made.kit(site) / "site.toml").write_text(text)
        config = run_config(files=[str(made.folder / f"{site}.csv") for site in SITES])
        (made.folder / "run.toml").write_text(to_toml(config))
        execute(config, made.folder / "local", local_engine)
        made.join(*SITES)
        honest(made, "before")
        yield made


def honest(made: Federation, name: str) -> None:
    """A run of an honest coordinator, which is the run of one process."""
    done = made.call("serve", "kits/coordinator", "run.toml", "--out", name, "--quiet")
    assert done.returncode == 0, done.stderr[-3000:]
    for file in ("events.jsonl", "result.json"):
        own = (made.folder / name / file).read_bytes()
        assert own == (made.folder / "local" / file).read_bytes(), file


def refusals(made: Federation, site: str) -> list[str]:
    log = egress.lines(made.store(site) / "egress.jsonl")
    return [line.words for line in log if line.words.startswith("refused")]


@pytest.mark.parametrize(
    "kind", [FORGED[0], *(pytest.param(kind, marks=pytest.mark.long) for kind in FORGED[1:])]
)
def test_a_plan_of_a_coordinators_own_making_is_refused(people: Federation, kind: str) -> None:
    before = {site: len(refusals(people, site)) for site in SITES}
    path = os.pathsep.join([str(INSIDE), str(ROOT)])
    serving = people.start(
        "serve", "kits/coordinator", "run.toml", "--out", f"forged-{FORGED.index(kind)}", "--quiet",
        PYTHONPATH=path, ATOLL_FORGED_PLAN=kind,
    )  # fmt: skip
    _, complaint = serving.communicate(timeout=120)
    assert serving.returncode, complaint
    assert "refused there: column" in " ".join(complaint.split())
    new = {site: refusals(people, site)[before[site] :] for site in SITES}
    words = [line for lines in new.values() for line in lines]
    assert words
    assert all(line.startswith("refused 'prepare': column ") for line in words)
    for site in (site for site in SITES if new[site]):
        assert "prepare: column" in said(people, site)
    gone = [
        line.action
        for site in SITES
        for line in egress.lines(people.store(site) / "egress.jsonl")
        if line.run == people.kept(site).name and line.bytes
    ]
    assert set(gone) <= {"offer", "agree"}


def test_the_honest_run_beside_them_is_as_in_one_process(people: Federation) -> None:
    honest(people, "after")
    told = said(people, "coordinator")
    assert not any(name in told for name in FIRST)
