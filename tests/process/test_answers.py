"""The answer of a run between sites is that of a run in one process, less what stays at sites."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from atoll import engines
from atoll.core.messages import Packet, pack
from atoll.core.record import Message, read_events
from atoll.engines.local import local_engine
from atoll.engines.network import egress
from atoll.engines.network.requests import Compare
from atoll.metrics.release import Release
from atoll.runs.answer import write_answer
from atoll.runs.config import RunConfig, change, resolve, to_toml
from atoll.runs.execute import execute
from atoll.runs.parts import parts
from atoll.runs.result import Run

from .federation import CLIENTS, SITES, Federation, federation
from .test_twins import own_tables, private

pytest.importorskip("nvflare", reason="needs the extra nvflare")

from nvflare.collab import CollabCallError

from atoll.engines.network.remote import Party, Remote, packet_bytes

pytestmark = pytest.mark.process

NAMES = ("shared", "own")
CLIENTS_OF = {"shared": CLIENTS, "own": SITES}


def on_shared_data() -> RunConfig:
    """Three sites of one data set with test rows of their own."""
    values = {
        "name": "shared", "rounds": 4, "data": "breast-cancer", "clients": 3, "tests": "own",
        "rows": "even", "widths": [8], "epochs": 2, "engine.mode": "loop", "threads": 1,
    }  # fmt: skip
    return resolve(change({"method": "fedavg"}, values), "answers")


def on_columns() -> RunConfig:
    """Three parties with columns of the same rows; the coordinator has the labels."""
    values = {
        "name": "columns", "rounds": 2, "data": "breast-cancer", "clients": 3, "width": 6,
        "batch": 64, "engine.mode": "loop", "threads": 1,
    }  # fmt: skip
    return resolve(change({"method": "splitnn"}, values), "answers")


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Two runs between sites, and the same two in one process."""
    with federation(tmp_path_factory.mktemp("answers")) as there:
        runs = {"shared": on_shared_data(), "own": own_tables(there.folder)}
        runs["columns"] = on_columns()
        there.allow(["fedavg", "chfl", "splitnn"], answer=True)
        for site in SITES:
            there.join(site, ATOLL_REHEARSAL=f"copy={there.folder / 'left' / site}")
        for name, config in runs.items():
            (there.folder / f"{name}.toml").write_text(to_toml(config))
        serving = there.serve(*(f"{name}.toml" for name in runs))
        for name, config in runs.items():
            alone = replace(config, report={**config.report, "pooled": False})  # not between sites
            execute(alone, there.folder / "local" / name, local_engine)
            write_answer([there.folder / "local" / name], engines.load)
        printed, complaint = serving.communicate(timeout=300)
        assert serving.returncode == 0, complaint[-3000:]
        (there.folder / "printed").write_text(printed)
        yield there


def both(answered: Federation, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer of one process, and that between sites."""
    here = Run(answered.folder / "local" / name).answer
    there = Run(answered.folder / "runs" / f"{name}-1").answer
    assert here
    assert there
    return here, there


COUNTS = ("units", "test_rows", "smallest_class", "rows_needed")


def without_counts(value: Any) -> Any:
    """What is neither a number of rows, nor words with one, nor kept by sites."""
    dropped = (*COUNTS, "text", "quality", "notes", "runs", "classes")
    if isinstance(value, dict):
        return {key: without_counts(item) for key, item in value.items() if key not in dropped}
    return value


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_that_of_one_process_up_to_row_counts(
    name: str, answered: Federation
) -> None:
    here, there = both(answered, name)
    for body in (here, there):  # the degrees of freedom come from rounded counts
        for part in ("gain", "joined_over_guessing", "alone_over_guessing"):
            body["overall"][part].pop("p")
    assert without_counts(there) == without_counts(here)
    assert there["sites"].keys() == set(CLIENTS_OF[name])
    for id, entry in there["sites"].items():
        full = here["sites"][id]
        assert entry.keys() == full.keys() - {"quality"}
        assert entry["test_rows"] == full["test_rows"] // 10 * 10
        assert entry["smallest_class"] == (full["smallest_class"] // 10 * 10 or None)


@pytest.mark.parametrize("name", NAMES)
def test_a_site_keeps_everything_in_its_own_file(name: str, answered: Federation) -> None:
    here, _ = both(answered, name)
    for site, client in zip(SITES, CLIENTS_OF[name], strict=True):
        (home,) = answered.store(site).glob(f"{name}-*")
        assert Run(home).answer["sites"] == {client: here["sites"][client]}
        kept = load((home / "outcomes.safetensors").read_bytes())
        whole = load((answered.folder / "local" / name / "outcomes.safetensors").read_bytes())
        for key in ("labels", "outputs/joined", "outputs/alone"):
            assert np.array_equal(kept[f"{client}/{key}"], whole[f"{client}/{key}"])


@pytest.mark.parametrize("name", NAMES)
def test_the_log_and_the_ledger_have_its_bytes(name: str, answered: Federation) -> None:
    events = read_events(answered.folder / "runs" / f"{name}-1")
    lines = [e for e in events if isinstance(e, Message) and e.action == "compare"]
    for site, client in zip(SITES, CLIENTS_OF[name], strict=True):
        (home,) = answered.store(site).glob(f"{name}-*")
        log = egress.lines(answered.store(site) / "egress.jsonl")
        (left,) = [x for x in log if x.run == home.name and x.action == "compare"]
        (entered,) = [e for e in lines if e.sender == client]
        assert (entered.kind, entered.bytes, entered.payload) == ("Release", left.bytes, 0)
        assert 0 < left.bytes < 4000
        assert [e.kind for e in lines if e.receiver == client] == ["Compare"]


def test_no_row_label_output_or_count_is_in_what_left(answered: Federation) -> None:
    """The copies of all packets of comparisons, against rows, labels and what the site keeps."""
    run = parts(on_shared_data())
    for site, client in zip(SITES, CLIENTS, strict=True):
        copies = [path.read_bytes() for path in sorted((answered.folder / "left" / site).iterdir())]
        releases = [copy for copy in copies if b'"kind":"Release"' in copy]
        assert len(releases) == len(NAMES)
        found = [one for kind in private(run, client).values() for one in kind]
        assert found
        assert not any(one in copy for one in found for copy in releases)
        (home,) = answered.store(site).glob("shared-*")
        kept = load((home / "outcomes.safetensors").read_bytes())
        assert not any(array.tobytes() in releases[0] for array in kept.values())
        header, _ = json.JSONDecoder().raw_decode(releases[0].decode("latin-1"))
        whole = [value for value in header["values"].values() if type(value) is int]
        assert len(whole) == 5
        assert all(value % 10 == 0 for value in whole)
        assert "quality" not in header["values"]


def test_parties_with_columns_are_compared_by_the_coordinator(answered: Federation) -> None:
    here, there = both(answered, "columns")
    assert there["sites"].keys() == set(CLIENTS)
    for id, entry in there["sites"].items():
        for model in ("joined", "alone", "majority"):
            assert entry["scores"][model] == here["sites"][id]["scores"][model]
        assert entry["gain"] == here["sites"][id]["gain"]
        assert entry["scores"]["logistic regression"] is None
    lines = [e for e in read_events(answered.folder / "runs" / "columns-1")
             if isinstance(e, Message) and e.action == "compare"]  # fmt: skip
    assert {line.kind for line in lines} == {"Embed", "Embedded", "Learn"}
    for site, client in zip(SITES, CLIENTS, strict=True):
        (home,) = answered.store(site).glob("columns-*")
        assert (home / "alone").is_dir()
        log = [x for x in egress.lines(answered.store(site) / "egress.jsonl") if x.run == home.name]
        assert [x.action for x in log].count("compare") == 1
        compared = sum(e.bytes for e in lines if e.sender == client)
        begun = next(place for place, x in enumerate(log) if x.action == "compare")
        embedded = sum(x.bytes for x in log[begun:] if x.action in ("embed", "learn"))
        assert compared > embedded > 0  # the test rows of the joined model come before


def test_serve_prints_the_verdicts(answered: Federation) -> None:
    printed = (answered.folder / "printed").read_text()
    for name in NAMES:
        _, there = both(answered, name)
        for id, entry in there["sites"].items():
            assert f"  {id}: {entry['verdict']['text']}; " in printed
        assert f"runs/{name}-1:" in printed
    assert "test rows" in printed


def test_the_record_is_whole_and_has_a_report(answered: Federation) -> None:
    folder = answered.folder / "runs" / "shared-1"
    ended = answered.call("report", str(folder), "-o", "page.html")
    assert ended.returncode == 0, ended.stderr
    assert (answered.folder / "page.html").exists()
    _, there = both(answered, "shared")
    again = answered.call("answer", str(folder), "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == there


def site(reply: Any) -> Party:
    """A site that allows a comparison, and replies with this or raises it."""

    class Proxy:
        def __call__(self, timeout: float) -> Any:
            return self

        def compare(self, **arguments: Any) -> Any:
            if isinstance(reply, Exception):
                raise reply
            return reply

        def ping(self) -> None:
            if isinstance(reply, Exception):
                raise reply

    return Party("basel", "site-0", Proxy(), compares=True)


GOOD = pack(Release("too few test rows"))


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"ok": True, **packet_bytes(GOOD)}, ""),
        ({"ok": True, "header": b"{}", "block": GOOD.block}, "its header has other fields"),
        ({"ok": True, "header": 3, "block": None}, "not made of bytes"),
        ({"ok": True, **packet_bytes(pack(Release("", test_rows=7)))}, "not of the agreed form"),
        ({"ok": True, **packet_bytes(pack(Release("", 10, scores={"x" * 20_000: 1.0})))}, "form"),
        ({"ok": False, "kind": "refused", "reason": "\x1b[2J no"}, "refused there: ?[2J no"),
        (7, "not of the agreed form"),
        (CollabCallError("basel", "compare", OSError("gone")), "lost: CollabCallError in compare"),
    ],
    ids=range(8),
)
def test_a_site_that_fails_in_its_comparison_stops_nobody(reply: Any, words: str) -> None:
    parties = {"site-0": site(reply), "site-1": Party("bern", "site-1", site(0).proxy)}
    remote = Remote(on_shared_data(), parties, 5.0, 5.0, tell=lambda: None)
    replies = remote.compare(pack(Compare("", {})))
    assert list(replies) == ["site-0"]
    (one,) = replies.values()
    if words:
        assert isinstance(one, str)
        assert words in one
    else:
        assert isinstance(one, Packet)
        assert one.message == Release("too few test rows")
