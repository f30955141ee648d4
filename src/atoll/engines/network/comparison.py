"""The comparison at the end of a run: a site computes it, and a release of it leaves.

The site trains the same method alone and compares both models on its own test rows. Outcomes,
qualities and exact counts stay in its store; `atoll.metrics.release` has the rule of what leaves.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from atoll.compute.deterministic import deterministic_torch
from atoll.core.integrity import damaged
from atoll.core.messages import Tensors
from atoll.core.record import disk_errors
from atoll.engines.local import local_engine
from atoll.engines.network.drafts import epochs_of_round
from atoll.engines.network.requests import Compare
from atoll.learning.weights import prefixed
from atoll.metrics.release import Release, release
from atoll.runs.answer import own_answer
from atoll.runs.outcomes import outcome_of
from atoll.runs.parts import Parts

__all__ = ["Cost", "compared", "cost_of", "obstacle", "read_release", "written_release"]

RELEASE = "release.json"


@dataclass(frozen=True)
class Cost:
    """What training alone uses up of the budgets over all runs on the same data."""

    rounds: int
    epochs: int


def obstacle(parts: Parts) -> str:
    """Why no site of a run can compare; empty where each can."""
    if parts.scenario.labels_at_server:
        return "where sites hold columns of the same rows, no site can predict by itself"
    return ""


def cost_of(parts: Parts, id: str) -> Cost:
    """The rounds and epochs of the same method at a site alone."""
    config = parts.config
    stages = sum(len(held.train) > 0 for held in parts.scenario.holdings[id])
    rounds = config.rounds * stages
    pretrained = int(config.method.get("pretrain_epochs", 0))
    return Cost(rounds, rounds * epochs_of_round(config) + pretrained)


def compared(
    parts: Parts, id: str, state: Tensors, request: Compare, home: Path
) -> tuple[Release, dict[str, bytes]]:
    """What leaves the site, and the files with everything that it keeps.

    `state` is that of the site's own client at the end of the run.
    """
    config, sites = parts.config, len(parts.scenario.clients)
    whole = prefixed("server", request.state) | prefixed(f"client/{id}", state)
    with deterministic_torch(config.engine_options().deterministic):
        outcome = outcome_of(id, parts, whole, request.variant, local_engine)
    report = config.report_options()
    leaves = release(outcome, report.metric, report.margin / 100, sites)
    return leaves, own_answer(home, config, request.variant, {id: outcome}, sites)


def written_release(asked: str, leaves: Release) -> tuple[str, bytes]:
    """The file that says what has left for which request: its name and content."""
    return RELEASE, json.dumps({"request": asked, "release": asdict(leaves)}).encode()


def read_release(home: Path) -> tuple[str, Release] | None:
    """The request and the release of a run that has had its comparison; None of another."""
    path = home / RELEASE
    if not path.exists():
        return None
    with disk_errors(path):
        content = path.read_bytes()
    try:
        body = json.loads(content)
        leaves = TypeAdapter(Release).validate_python(body["release"])
        return str(body["request"]), leaves
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path) from error
