"""Which runs send weights that no check for single rows covers, method by method."""

from pathlib import Path
from typing import Any

import pytest

from atoll import methods
from atoll.core.federation import actions
from atoll.engines.network.contract import RefusedError, SiteFile
from atoll.engines.network.drafts import drafted_contract
from atoll.engines.network.egress import lines
from atoll.engines.network.policy import Gate
from atoll.engines.network.unchecked import kind_of, uncovered
from atoll.runs.config import RunConfig, change, resolve, to_toml

TABLE = {"data": "synthetic-table"}
IMAGES = {"data": "synthetic-images"}
TEXTS = {"data": "synthetic-text"}
ONE, TWO = {"widths": [8]}, {"widths": [16, 8]}
AVERAGED = ("chfl", "fedavg", "fot", "lowrank", "replay", "target")  # send the weights of a network
DISTILLED = ("fccl", "fedmatch", "fedmd")  # send logits, and weights with `average`
NO_WEIGHTS = ("alone", "analytic", "splitnn", "vleto")  # send sums, embeddings or scores
PLUGIN = """
from dataclasses import dataclass
from atoll.core.messages import Tensors
from atoll.methods import fedavg
from atoll.core.federation import Moment
from atoll.core.messages import Weights
from atoll.core.method import Method

@dataclass(frozen=True)
class Free:
    control: Tensors

class Client(fedavg.Client):
    def more(self, request: Weights, moment: Moment) -> Free:
        return Free({})

METHOD = Method(fedavg.Options, fedavg.Server, Client)
"""


def config(method: str, **changes: Any) -> RunConfig:
    return resolve(change({"method": method, "engine": {"mode": "loop"}}, changes), "test")


def reason(method: str, **changes: Any) -> str:
    run = config(method, **changes)
    assert (drafted_contract(run).unchecked_networks == "allow") is bool(
        uncovered(run, kind_of(run))
    )
    return uncovered(run, kind_of(run))


@pytest.mark.parametrize("method", AVERAGED)
def test_one_hidden_layer_on_a_table_is_covered_and_two_are_not(method: str) -> None:
    assert reason(method, **TABLE, **ONE) == ""
    assert reason(method, **TABLE, widths=[]) == ""
    assert reason(method, **TABLE, **TWO) == "an mlp with 2 hidden layers"


@pytest.mark.parametrize("method", sorted({*AVERAGED} - {"chfl", "fot"}))
def test_images_and_their_networks_are_not_covered(method: str) -> None:
    assert reason(method, **IMAGES, **ONE) == "a network that reads images"
    assert reason(method, **IMAGES, name="cnn") == "a network that reads images"


@pytest.mark.parametrize("method", NO_WEIGHTS)
def test_a_method_that_sends_no_weights_is_covered_whatever_its_network(method: str) -> None:
    wide = {} if method in ("splitnn", "vleto") else TWO
    assert reason(method, **TABLE, **wide) == ""
    assert reason(method, **IMAGES, **wide) == ""


@pytest.mark.parametrize("method", DISTILLED)
def test_logits_are_covered_and_averaged_weights_are_not(method: str) -> None:
    assert reason(method, **IMAGES, **TWO) == ""
    assert reason(method, **IMAGES, **TWO, average=True) == "a network that reads images"
    assert reason(method, **TABLE, **TWO, average=True) == "an mlp with 2 hidden layers"
    assert reason(method, **TABLE, **ONE, average=True) == ""


def test_mutual_learning_sends_the_shared_network_and_the_own_one_with_average() -> None:
    assert reason("fml", **TABLE, **ONE) == ""
    assert reason("fml", **TABLE, **TWO) == "an mlp with 2 hidden layers"
    assert reason("fml", **TABLE, **ONE, models=["cnn", "mlp", "cnn"]) == ""
    own = {"models": ["cnn", "cnn", "cnn"], "average": True}
    assert reason("fml", **TABLE, **ONE, **own) == "the network 'cnn'"


def test_fedseit_always_sends_weights_that_no_check_covers() -> None:
    assert reason("fedseit", **TEXTS) == "a network that reads texts"


def test_every_method_stands_in_one_of_these_lists() -> None:
    listed = {*AVERAGED, *DISTILLED, *NO_WEIGHTS, "fml", "fedseit"}
    assert listed == set(methods.names())


def test_a_network_of_a_plug_in_is_not_covered(tmp_path: Path) -> None:
    assert reason("fedavg", **TABLE, **{"model.name": "./own.py:net"}) == (
        "the network './own.py:net'"
    )


def test_tensors_without_a_mark_are_not_covered_where_a_method_is_a_plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("free.py").write_text(PLUGIN)
    found = reason("./free.py:METHOD", **TABLE, **ONE)
    assert found == "tensors without a mark, which sites of './free.py:METHOD' send"


@pytest.mark.parametrize(
    ("method", "changes"),
    [("fedavg", {**TABLE, **TWO}), ("fedseit", TEXTS), ("fedmd", {**IMAGES, "average": True})],
)
def test_a_site_refuses_such_a_run_before_anything_is_trained(
    method: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    run = to_toml(config(method, **changes))
    terms = {"methods": [method], "actions": sorted(actions(methods.load(method).client))}
    gate = Gate(SiteFile(store=str(tmp_path), contract=terms))
    with pytest.raises(RefusedError, match=r"no check looks for single rows in .*unchecked_net"):
        gate.prepare("run-1", run, "site-0")
    assert gate._parts is None
    (line,) = lines(tmp_path / "egress.jsonl")
    assert line.words.startswith("refused 'prepare': no check looks for single rows in a")


def test_a_data_set_outside_of_atoll_is_judged_when_it_is_loaded() -> None:
    run = config("fedavg", **ONE, data="./mine.py:scans")
    assert kind_of(run) == ""
    assert uncovered(run, kind_of(run)) == ""
    assert uncovered(run, "image") == "a network that reads images"
