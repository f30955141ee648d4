"""Weights of a site's own network leave only where a run averages them, and show no row."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import BadMessageError
from atoll.core.federation import Moment
from atoll.core.messages import Empty, Tensors, Weights, unpack
from atoll.engines.network import egress
from atoll.engines.network.drafts import drafted_contract, written

from .row_recovery import HONEST, Coordinator, run_config, site


def opened(folder: Path, **changes: Any) -> Coordinator:
    config = run_config({**HONEST, "pretrain_epochs": 2, **changes}, "fml")
    coordinator = Coordinator(site(folder, written(drafted_contract(config))))
    assert coordinator.open("attack", config), coordinator.refusals
    assert coordinator.ask("prepare", Moment(0, 0, 40), Empty()) is not None
    return coordinator


def test_a_network_that_no_run_averages_stays_at_its_site(tmp_path: Path) -> None:
    coordinator = opened(tmp_path)
    with pytest.raises(BadMessageError, match="own network, which stay here"):
        coordinator.ask("share", Moment(0, 0, 40), Empty())


def test_whole_weights_that_show_a_row_stay_too(tmp_path: Path) -> None:
    coordinator = opened(tmp_path, average=True)
    reply = coordinator.ask("share", Moment(0, 0, 40), Empty())
    assert reply is not None
    before: Tensors = unpack(reply, Weights, "basel").weights
    row = coordinator.rows()[7]
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["weight0"][3] -= 0.01 * row
    after["bias0"][3] -= 0.01
    coordinator.gate._client.learner.weights = after
    assert coordinator.ask("share", Moment(0, 1, 40), Empty()) is None
    log = egress.lines(coordinator.path.parent / "store" / "egress.jsonl")
    assert any("would show training rows" in line.words for line in log)
    coordinator.gate._checked.terms = replace(coordinator.gate.terms, shown_rows="allow")
    assert coordinator.ask("share", Moment(0, 1, 40), Empty()) is not None
