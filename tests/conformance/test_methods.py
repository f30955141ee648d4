"""Every method against the conformance suite that atoll ships; a method is added by its name."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from atoll import methods
from atoll.core.messages import Packet
from atoll.data.site import Site
from atoll.engines.local import local_engine
from atoll.metrics.answer import ALONE, JOINED
from atoll.metrics.answer import answer as answered
from atoll.runs.outcomes import outcomes
from atoll.runs.parts import Parts, parts
from atoll.runs.predict.model import ended_state
from atoll.runs.result import Run
from atoll.testing import Case, Check, check_method, checks
from atoll.testing.network import network_equals_local
from atoll.testing.privacy import leaks
from atoll.testing.samples import RecordingEngine, run, run_on

MARKS = {"stacked_equals_loop_with_uneven_rows": [pytest.mark.numerics]}


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=check.name, marks=MARKS.get(check.name, [])) for check in checks()],
)
@pytest.mark.parametrize("name", methods.names())
def test_a_method_conforms(name: str, check: Check, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=check.name, marks=MARKS.get(check.name, [])) for check in checks()],
)
@pytest.mark.parametrize("name", [n for n in methods.names() if methods.load(n).regression])
def test_a_method_conforms_where_the_label_is_a_number(
    name: str, check: Check, tmp_path: Path
) -> None:
    check(Case(name, {"data.task": "regression"}), tmp_path)


@pytest.mark.process
@pytest.mark.parametrize("name", ["chfl"])  # tests/process/test_twins.py has the others
def test_the_network_engine_gives_the_record_of_the_local_engine(name: str, tmp_path: Path) -> None:
    network_equals_local(Case(name), tmp_path)


def test_the_suite_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import atoll.testing as t; t.checks()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_check_method_says_what_passed() -> None:
    results = check_method(Case("analytic", {"clients": 2}))
    assert list(results) == [check.name for check in checks()]
    assert set(results.values()) == {"passed"}


def test_every_rule_has_a_letter_of_the_architecture() -> None:
    letters = {check.words[1] for check in checks(network_engine=True)}
    assert letters == set("abcdefghijk")


def sent(tmp_path: Path) -> tuple[Parts, tuple[str, str, Packet]]:
    """The first answer of a small run."""
    made = parts(Case("fedavg").config())
    engine = RecordingEngine(made)
    run_on(made, engine, tmp_path)
    return made, engine.packets[1]


def planted(packet: Packet, values: torch.Tensor) -> Packet:
    """The packet with another tensor in it."""
    return dataclasses.replace(packet, block=save({**load(packet.block), "more": values}))


HIDDEN: dict[str, Callable[[Site], torch.Tensor]] = {
    "a row": lambda site: site.train(0).x[3],
    "rows in double precision": lambda site: site.train(0).x.double(),
    "rows by columns": lambda site: site.train(0).x.T.contiguous(),
    "validation rows": lambda site: site.valid(0).x,
    "test rows": lambda site: site.test(0).x,
    "labels": lambda site: site.train(0).y,
    "labels in bytes": lambda site: site.train(0).y.to(torch.uint8),
    "some labels": lambda site: site.train(0).y[:16].clone(),
    "labels in another order": lambda site: site.train(0).y.flip(0).sort().values,
    "labels of tests": lambda site: site.test(0).y,
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_the_probe_for_private_rows_finds_what_was_sent(kind: str, tmp_path: Path) -> None:
    made, (sender, action, packet) = sent(tmp_path)
    hidden = HIDDEN[kind](made.site(made.scenario.clients[0]))
    assert leaks(made, [(sender, action, planted(packet, hidden.contiguous()))])


def test_the_probe_for_private_rows_reads_lists_in_headers(tmp_path: Path) -> None:
    made, (sender, action, packet) = sent(tmp_path)
    header = json.loads(packet.header)
    header["values"]["more"] = made.site(made.scenario.clients[0]).train(0).y.tolist()
    packet = dataclasses.replace(packet, header=json.dumps(header).encode())
    assert leaks(made, [(sender, action, packet)])


SILENT: dict[str, dict[str, Any]] = {  # options with which nothing of other sites is used
    "alone": {"scale": "local"},
    "chfl": {"variants": ["local"], "scale": "local"},
    "fccl": {"collaborate": False},
    "fedmatch": {"lambda_iccs": 0.0},
    "fedmd": {"loss": "none"},
    "fedseit": {"combine": "none", "average": False, "transfer": "sit"},
    "fml": {"alpha": 1.0},
}


@pytest.mark.parametrize("name", SILENT)
def test_where_nothing_is_exchanged_the_gain_is_exactly_zero(name: str, tmp_path: Path) -> None:
    """Random streams are named after sites, so the same training gives the same bits."""
    config = Case(name, SILENT[name]).config()
    run(config, tmp_path / "run")
    headline = Run(tmp_path / "run").headline
    results = outcomes(parts(config), ended_state(tmp_path / "run"), headline, local_engine)
    assert len(results) > 1
    for outcome in results.values():
        assert np.array_equal(outcome.outputs[JOINED], outcome.outputs[ALONE])
    body: dict[str, Any] = answered({id: [outcome] for id, outcome in results.items()})
    assert {site["gain"]["gain"] for site in body["sites"].values()} == {0.0}
    assert {site["verdict"]["kind"] for site in body["sites"].values()} == {"no difference"}


def test_where_something_is_exchanged_the_outputs_differ(tmp_path: Path) -> None:
    config = Case("fccl").config()
    run(config, tmp_path / "run")
    results = outcomes(parts(config), ended_state(tmp_path / "run"), "fccl", local_engine)
    for outcome in results.values():
        assert not np.array_equal(outcome.outputs[JOINED], outcome.outputs[ALONE])
