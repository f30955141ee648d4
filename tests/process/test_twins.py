"""Every method between processes over mutual TLS ends as it does in one process, bit for bit."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll import methods
from atoll.core.record import Message, read_events
from atoll.engines import egress
from atoll.engines.local import execute
from atoll.runs.config import RunConfig, change, resolve, to_toml

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
        "method": {"name": name}, "model": {"widths": [16, 8]},
        "engine": {"mode": "loop", "threads": 1}, "checkpoint_seconds": 0,
    }  # fmt: skip
    values |= {} if split == "domains" else {"scenario": {"clients": 3}}
    return resolve(change(values, {}), "twins")


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One job that does a run of every method, and the same runs on the local engine."""
    with federation(tmp_path_factory.mktemp("twins")) as made:
        made.allow(methods.names())
        made.join()
        for name in methods.names():
            (made.folder / f"{name}.toml").write_text(to_toml(small(name)))
        serving = made.serve(*(f"{name}.toml" for name in methods.names()))
        for name in methods.names():
            execute(small(name), made.folder / "local" / name)
        _, complaint = serving.communicate(timeout=400)
        assert serving.returncode == 0, complaint[-3000:]
        yield made


def network(twins: Federation, name: str) -> Path:
    return twins.folder / "runs" / f"{name}-1"


every_method = pytest.mark.parametrize("name", methods.names())


@every_method
def test_a_network_run_has_the_record_of_a_local_run(name: str, twins: Federation) -> None:
    here, there = twins.folder / "local" / name, network(twins, name)
    for file in ("config.toml", "events.jsonl", "result.json"):
        assert (there / file).read_bytes() == (here / file).read_bytes(), file


def store(twins: Federation, site: str, name: str) -> Path:
    (found,) = (twins.kit(site) / "store").glob(f"{name}-*")
    return found


@every_method
def test_weights_are_equal_and_each_sites_own_stay_there(name: str, twins: Federation) -> None:
    here = twins.folder / "local" / name / "checkpoint.safetensors"
    there = network(twins, name) / "checkpoint.safetensors"
    assert tensors(there) == {f"server/{n}": value for n, value in tensors(here, "server/").items()}
    for site, client in zip(SITES, CLIENTS, strict=True):
        last = max(store(twins, site, name).glob("state-*.safetensors"))
        assert tensors(last) == tensors(here, f"client/{client}/")


@every_method
def test_the_egress_log_has_every_byte_that_the_server_counted(
    name: str, twins: Federation
) -> None:
    events = [e for e in read_events(network(twins, name)) if isinstance(e, Message)]
    for site, client in zip(SITES, CLIENTS, strict=True):
        run = store(twins, site, name).name
        log = [x for x in egress.lines(twins.kit(site) / "store" / "egress.jsonl") if x.run == run]
        counted = [e for e in events if e.sender == client]
        assert sum(line.bytes for line in log) == sum(e.bytes for e in counted)
        assert len(log) == sum(e.count for e in counted)
        assert {line.action for line in log} == {e.action for e in counted}
        assert all(re.match(r"answered '\w+' at stage \d+, round \d+: ", x.words) for x in log)


def test_the_command_shows_the_log_and_that_its_chain_is_whole(twins: Federation) -> None:
    ended = twins.call("egress", "kits/basel/store")
    assert ended.returncode == 0
    assert "the chain is whole and ends in" in ended.stdout
    path = twins.kit("bern") / "store" / "egress.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    body = json.loads(lines[1])
    path.write_bytes(b"".join([lines[0], json.dumps({**body, "bytes": 1}).encode() + b"\n"]))
    ended = twins.call("egress", "kits/bern/store")
    assert ended.returncode == 2
    assert "broken at line 2" in ended.stderr
    path.write_bytes(b"".join(lines))
