"""The comparison at the end of a run: a site computes it and sends a release of it.

The site trains the same method alone and compares both models on its own test rows. Outcomes,
qualities and exact counts stay in its store; `atoll.metrics.release` defines what may leave.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from atoll import methods
from atoll.compute.deterministic import deterministic_torch
from atoll.core.integrity import read_json
from atoll.core.messages import Tensors
from atoll.engines.local import local_engine
from atoll.engines.network import ranges
from atoll.engines.network.contract import Contract, RefusedError
from atoll.engines.network.drafts import epochs_of_round
from atoll.engines.network.egress import Spent
from atoll.engines.network.requests import Compare
from atoll.learning.weights import prefixed
from atoll.metrics.release import Release, release
from atoll.runs.alone import alone_parts
from atoll.runs.answer import own_answer
from atoll.runs.outcomes import outcome_of
from atoll.runs.parts import Parts

__all__ = [
    "ALONE", "Cost", "alone_half", "compared", "cost_of", "excess", "joined_model", "obstacle",
    "over_budget", "read_release", "written_release",
]  # fmt: skip

RELEASE = "release.json"
ALONE = "alone"  # folder of what a party trains with the server alone, inside the run's folder


@dataclass(frozen=True)
class Cost:
    """What training alone costs of the budgets over all runs on the same data."""

    rounds: int
    epochs: int


def obstacle(parts: Parts) -> str:
    """Why no site of a run can compare; empty if all can."""
    if parts.scenario.labels_at_server:
        return "where sites hold columns of the same rows, no site can predict by itself"
    return ""


def alone_half(parts: Parts, id: str) -> Parts:
    """The parts of a federation of one party, for the server that compares: it has the labels."""
    if not parts.scenario.labels_at_server:
        raise RefusedError("where sites hold whole rows, each compares by itself")
    return alone_parts(parts, id)


def cost_of(parts: Parts, id: str) -> Cost:
    """The rounds and epochs of the same method at a single site."""
    config = parts.config
    stages = sum(len(holding.train) > 0 for holding in parts.scenario.holdings[id])
    rounds = config.rounds * stages
    pretrained = int(config.method.get("pretrain_epochs", 0))
    return Cost(rounds, rounds * epochs_of_round(config) + pretrained)


def over_budget(cost: Cost, spent: Spent, terms: Contract) -> str:
    """The budget over all runs that a comparison would exceed; empty if none."""
    counts = (
        ("comparisons", spent.comparisons + 1, terms.comparisons_in_all),
        ("rounds", spent.rounds + cost.rounds, terms.rounds_in_all),
        ("epochs", spent.epochs + cost.epochs, terms.epochs_in_all),
    )
    for what, count, most in counts:
        if count > most:
            return f"more than {most:,} {what} on this data are not in the contract"
    return ""


def excess(parts: Parts, cost: Cost, spent: Spent, terms: Contract) -> str:
    """Why a comparison exceeds the contract; empty if it does not."""
    refused = over_budget(cost, spent, terms) or obstacle(parts)
    return refused or ranges.metric_violation(terms.options, parts.config, parts.metric)


def joined_model(parts: Parts, request: Compare) -> tuple[Compare, dict[str, Tensors]]:
    """The request with a server's state, and its shared weights by their mark.

    Only a server at this site reads the state, so nothing else in it reaches a model. The state of
    a method without shared weights is empty: its models are the clients'.
    """
    method = methods.load(str(parts.config.method["name"]))
    if method.first is None:
        return replace(request, state={}), {}
    server = parts.server()
    try:
        server.restore(request.state)
        return replace(request, state=server.state()), dict(method.first(server))
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise RefusedError("a server's state that is not of this method") from error


def compared(
    parts: Parts, id: str, state: Tensors, request: Compare, home: Path
) -> tuple[Release, dict[str, bytes]]:
    """The release that leaves the site, and the files with all details.

    `state` is the final state of the site's own client.
    """
    config, sites = parts.config, len(parts.scenario.clients)
    whole = prefixed("server", request.state) | prefixed(f"client/{id}", state)
    with deterministic_torch(config.engine_options().deterministic):
        outcome = outcome_of(id, parts, whole, request.variant, local_engine)
    leaves = release(outcome, parts.metric, config.report_options().margin / 100, sites)
    return leaves, own_answer(home, parts, request.variant, {id: outcome}, sites)


def written_release(digest: str, leaves: Release) -> tuple[str, bytes]:
    """The name and content of the file that records the release for a request."""
    return RELEASE, json.dumps({"request": digest, "release": asdict(leaves)}).encode()


def read_release(home: Path) -> tuple[str, Release] | None:
    """The request and release of a run that has been compared; None if it has not."""
    path = home / RELEASE
    if not path.exists():
        return None
    parse = TypeAdapter(Release).validate_python
    return read_json(path, lambda body: (str(body["request"]), parse(body["release"])))
