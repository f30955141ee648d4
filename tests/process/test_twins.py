"""Every method between processes over mutual TLS ends as it does in one process, bit for bit."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll import methods
from atoll.core.record import Message, read_events
from atoll.engines.local import local_engine
from atoll.engines.network import egress
from atoll.runs.config import RunConfig, change, resolve, to_toml
from atoll.runs.execute import execute
from atoll.runs.parts import Parts, parts

from .federation import CLIENTS, SITES, Federation, federation, tensors

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = pytest.mark.process

DATA: dict[str, dict[str, Any]] = {
    "tasks": {"name": "synthetic-text"},
    "domains": {"name": "synthetic-images", "domains": 3, "rows": 600},
}


def small(name: str) -> RunConfig:
    """The run of the conformance suite, with three clients."""
    split = methods.load(name).split
    values: dict[str, Any] = {
        "name": name, "rounds": 2, "data": DATA.get(split, {"name": "synthetic-table"}),
        "method": {"name": name}, "model": {} if split == "parties" else {"widths": [16, 8]},
        "engine": {"mode": "loop", "threads": 1}, "checkpoint_seconds": 0,
    }  # fmt: skip
    values |= {} if split == "domains" else {"scenario": {"clients": 3}}
    return resolve(change(values, {}), "twins")


def own_tables(folder: Path) -> RunConfig:
    """A file for each site, and the run on all of them."""
    draws = np.random.default_rng(5)
    for site in SITES:
        rows = 80
        age, size, own = (draws.normal(size=rows) for _ in range(3))
        label = np.where(age + own > 0.2, "yes", "no")
        lines = [f"age,size,own_{site},outcome"]
        lines += [
            f"{a:.3f},{s:.3f},{o:.3f},{y}" for a, s, o, y in zip(age, size, own, label, strict=True)
        ]
        (folder / f"{site}.csv").write_text("\n".join(lines) + "\n")
    data = {"files": [str(folder / f"{site}.csv") for site in SITES], "label": "outcome"}
    small = {"widths": [8], "epochs": 1, "engine.mode": "loop", "threads": 1}
    values = {"name": "own", "rounds": 2, "method": "chfl", "data": data, "checkpoint_seconds": 0}
    return resolve(change(values, small), "twins")


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One job that does a run of every method, and the same runs on the local engine."""
    with federation(tmp_path_factory.mktemp("twins")) as made:
        runs = {name: small(name) for name in methods.names()}
        runs["own"] = own_tables(made.folder)
        # small tables have fewer rows than features, and networks two hidden layers or convolutions
        made.allow(methods.names(), sums="allow", unchecked_networks="allow")
        for site in SITES:
            made.join(site, ATOLL_REHEARSAL=f"copy={made.folder / 'left' / site}")
        for name, config in runs.items():
            (made.folder / f"{name}.toml").write_text(to_toml(config))
        serving = made.serve(*(f"{name}.toml" for name in runs))
        for name, config in runs.items():
            execute(config, made.folder / "local" / name, local_engine)
        _, complaint = serving.communicate(timeout=400)
        assert serving.returncode == 0, complaint[-3000:]
        yield made


def network(twins: Federation, name: str) -> Path:
    return twins.folder / "runs" / f"{name}-1"


every_method = pytest.mark.parametrize("name", methods.names())


@pytest.mark.parametrize("name", [*methods.names(), "own"])
def test_a_network_run_has_the_record_of_a_local_run(name: str, twins: Federation) -> None:
    here, there = twins.folder / "local" / name, network(twins, name)
    for file in ("config.toml", "events.jsonl", "result.json"):
        assert (there / file).read_bytes() == (here / file).read_bytes(), file


def store(twins: Federation, site: str, name: str) -> Path:
    (found,) = twins.store(site).glob(f"{name}-*")
    return found


@every_method
def test_weights_are_equal_and_each_sites_own_stay_there(name: str, twins: Federation) -> None:
    here = twins.folder / "local" / name / "checkpoint.safetensors"
    there = network(twins, name) / "checkpoint.safetensors"
    assert tensors(there) == {f"server/{n}": value for n, value in tensors(here, "server/").items()}
    for site, client in zip(SITES, CLIENTS, strict=True):
        last = max(store(twins, site, name).glob("state-*.safetensors"))
        assert tensors(last) == tensors(here, f"client/{client}/")


def answers(twins: Federation, site: str) -> list[egress.Line]:
    """What left a site for a method; beside that, for every run, the fingerprint of its data."""
    log = list(egress.lines(twins.store(site) / "egress.jsonl"))
    told = [line for line in log if line.words.endswith(" bytes, the fingerprint of its data")]
    assert {line.run for line in told} == {line.run for line in log}
    return [line for line in log if line not in told]


@every_method
def test_the_egress_log_has_every_byte_that_the_server_counted(
    name: str, twins: Federation
) -> None:
    events = [e for e in read_events(network(twins, name)) if isinstance(e, Message)]
    for site, client in zip(SITES, CLIENTS, strict=True):
        run = store(twins, site, name).name
        log = [x for x in answers(twins, site) if x.run == run]
        counted = [e for e in events if e.sender == client]
        assert sum(line.bytes for line in log) == sum(e.bytes for e in counted)
        assert len(log) == sum(e.count for e in counted)
        assert {line.action for line in log} == {e.action for e in counted}
        assert all(re.match(r"answered '\w+' at stage \d+, round \d+: ", x.words) for x in log)


def test_the_command_shows_the_log_and_that_its_chain_is_whole(twins: Federation) -> None:
    ended = twins.call("egress", "kits/basel-store")
    assert ended.returncode == 0
    assert "the chain is whole and ends in" in ended.stdout
    path = twins.store("bern") / "egress.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    body = json.loads(lines[1])
    changed = json.dumps({**body, "bytes": 1}).encode() + b"\n"
    twins.rewrite_log("bern", b"".join([lines[0], changed, *lines[2:]]))
    ended = twins.call("egress", "kits/bern-store")
    assert ended.returncode == 2
    assert "broken at line 2" in ended.stderr
    twins.rewrite_log("bern", b"".join(lines))


def left(twins: Federation, site: str, name: str) -> list[bytes]:
    """Every packet that left a site for a method's run: the copy that the log's digest is of."""
    run = store(twins, site, name).name
    copies = [path.read_bytes() for path in sorted((twins.folder / "left" / site).iterdir())]
    log = answers(twins, site)
    assert len(copies) == len(log)
    for copy, line in zip(copies, log, strict=True):
        assert hashlib.blake2b(copy, digest_size=16).hexdigest() == line.digest
    return [copy for copy, line in zip(copies, log, strict=True) if line.run == run]


def private(made: Parts, id: str) -> dict[str, list[bytes]]:
    """What must not leave a site: rows as they are and as they are scaled, labels, own names."""
    site, rows, labels = made.site(id), list[bytes](), list[bytes]()
    for stage, holding in enumerate(made.scenario.holdings[id]):
        seen = site.train(stage)
        for block in (seen.x.flatten(1), seen.own, seen.all.flatten(1)):
            if block.shape[1] >= 3:  # shorter rows could be found by chance
                rows += [row.numpy().tobytes() for row in block]
        raw = made.dataset.x[holding.train].reshape(len(holding.train), -1)
        rows += [np.ascontiguousarray(row).tobytes() for row in raw]
        for kind in (np.int64, np.int32, np.uint8, np.float32):
            if len(holding.train) >= 16:
                labels.append(made.dataset.y[holding.train].astype(kind).tobytes())
    own = {i for holding in made.scenario.holdings[id] for i in holding.own}
    names = [made.dataset.columns[i].encode() for i in own if made.dataset.columns]
    return {"row": [r for r in rows if len(r) >= 12], "label": labels, "name": names}


def memory(path: Path) -> list[bytes]:
    """The optimiser's moments in what a site keeps."""
    return [
        content
        for name, (_, _, content) in tensors(path).items()
        if "moments" in name and len(content) >= 16 and any(content)
    ]


@every_method
def test_nothing_private_is_in_any_packet_that_left_a_site(name: str, twins: Federation) -> None:
    made = parts(small(name))
    for site, client in zip(SITES, CLIENTS, strict=True):
        crossed = b"|".join(left(twins, site, name))
        assert crossed
        found = private(made, client)
        last = max(store(twins, site, name).glob("state-*.safetensors"))
        found["optimiser"] = memory(last)
        assert {what: sum(one in crossed for one in all) for what, all in found.items()} == (
            dict.fromkeys(found, 0)
        )
    row = found["row"][0]
    assert row in b"|".join([crossed, row])  # the probe itself finds what is there


def test_a_site_predicts_from_its_own_store_what_the_local_run_predicts(twins: Federation) -> None:
    for run, out in ((twins.folder / "local" / "own", "one"), (store(twins, "bern", "own"), "two")):
        ended = twins.call("predict", str(run), "bern.csv", "--site", "bern", "-o", f"{out}.csv")
        assert ended.returncode == 0, ended.stderr
    one, two = ((twins.folder / f"{name}.csv").read_bytes() for name in ("one", "two"))
    assert one == two


def test_no_name_of_an_own_column_has_left_a_site(twins: Federation) -> None:
    for site in SITES:
        crossed = b"".join(left(twins, site, "own"))
        assert crossed
        assert b"own_" not in crossed
        assert b"size" not in crossed
