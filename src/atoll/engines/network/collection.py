"""The coordinator's part of the answer: asks sites once, logs messages, assembles the answer.

If parties have columns of the same rows, the coordinator compares, because it has the labels, and
`atoll.engines.network.party_comparison` has each party train with the server alone.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from atoll.core.federation import SERVER
from atoll.core.messages import Packet, pack
from atoll.core.record import Message, Record, read_checkpoint
from atoll.data.scenario import Scenario
from atoll.engines.network.party_comparison import AWAY, REFUSED, Parties, compare_parties
from atoll.engines.network.requests import COMPARE, Compare
from atoll.learning.weights import without
from atoll.metrics.release import Release, assemble
from atoll.runs.parts import Parts
from atoll.runs.result import Run

__all__ = ["Sites", "collect", "reason_for_none"]


class Sites(Parties, Protocol):
    """The interface to the engine between sites."""

    def compare(self, request: Packet) -> dict[str, Packet | str]:
        """The releases of the sites, or the reasons why there is none."""
        ...


def reason_for_none(parts: Parts, willing: int) -> str:
    """Why sites are not asked; empty if they are."""
    if not parts.config.checkpoints:
        return "the run keeps no checkpoint"
    if not willing:
        return "no site's contract allows it (answer = true)"
    if parts.scenario.labels_at_server and not hasattr(parts.server(), "head"):
        return "the method's server has no half that embeddings of one party could be given to"
    return ""


def collect(
    sites: Sites,
    parts: Parts,
    folder: Path,
    record: Record,
    stopping: Callable[[], bool] = lambda: False,
    comparing: Callable[[str], None] = lambda id: None,
) -> dict[str, Any]:
    """Ask the sites of a run after its rounds; return the answer, to be written with the result.

    The messages become lines of the record's ledger before the end of the run is written. If
    parties train alone, `stopping` ends that, and `comparing` receives the party that trains.
    """
    arrays, head = read_checkpoint(folder)
    if parts.scenario.labels_at_server:
        body, lines = compare_parties(
            sites, parts, Run(folder).headline, arrays, stopping=stopping, comparing=comparing
        )
        record.add(lines)
        record.checkpoint(arrays, head["progress"])
        return body
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    request = pack(Compare(Run(folder).headline, without("server", state)))
    replies = sites.compare(request)
    packets = {id: reply for id, reply in replies.items() if isinstance(reply, Packet)}
    record.add(_ledger(request, packets, parts))
    record.checkpoint(arrays, head["progress"])
    releases: dict[str, Release] = {id: packet.message for id, packet in packets.items()}
    withheld = {}
    for id in parts.scenario.clients:
        if id not in releases:
            reply = replies.get(id, REFUSED if id in sites.present else AWAY)
            withheld[id] = str(reply)
    margin, shared = parts.config.report_options().margin / 100, _shares_rows(parts.scenario)
    return assemble(releases, withheld, parts.metric, margin, shared)


def _ledger(request: Packet, packets: Mapping[str, Packet], parts: Parts) -> list[Message]:
    """The messages to and from each site that has released something."""
    lines = []
    for id, packet in packets.items():
        for sender, receiver, one, kind in (
            (SERVER, id, request, Compare),
            (id, SERVER, packet, Release),
        ):
            line = Message(
                stage=parts.scenario.stages - 1,
                round=parts.config.rounds - 1,
                sender=sender,
                receiver=receiver,
                action=COMPARE,
                kind=kind.__name__,
                tensors=one.tensors,
                count=1,
                payload=one.payload,
                bytes=one.size,
            )
            lines.append(line)
    return lines


def _shares_rows(scenario: Scenario) -> bool:
    """Whether sites share test rows; own tables, which are not available here, do not."""
    rows = []
    for several in scenario.tests.values():
        rows.append(np.unique(np.concatenate([*several, np.empty(0, np.int64)])))
    return len(np.unique(np.concatenate(rows))) < sum(map(len, rows))
