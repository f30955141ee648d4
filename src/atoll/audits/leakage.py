"""Two plain attacks on split learning by a participant that reads the messages it receives.

A run of `vleto` or `splitnn` measures both at the end of each stage, as snapshots, if it names the
audit: replace = "atoll.audits.leakage:snapshots". Labels are guessed from the gradients of training
rows that the server asks for: `splitnn` asks for them only where it rehearses. The success of an
attack is a lower bound: an attacker with more time does better.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.federation import SERVER, Clients, Moment
from atoll.core.method import Method
from atoll.core.record import Snapshot
from atoll.data.site import Site
from atoll.families.vertical import Head, Learner
from atoll.learning.split import guarded, rounded

__all__ = ["METHODS", "REPLACEMENTS", "labels_from_gradients", "reconstruction"]

METHODS = ("splitnn", "vleto")  # whose parts are audited
AUDITED = 1000  # training rows that an audit reads
FEWEST = 30  # an audit of fewer rows reports nothing


def labels_from_gradients(gradients: Tensor, y: Tensor, revealed: Tensor) -> float:
    """The share of rows whose label a client guesses that knows the labels of a few.

    It takes the label of the known row whose gradient points most nearly the same way. Chance is
    one by the number of classes.
    """
    unit = F.normalize(gradients.double(), dim=1)
    near = unit @ unit[revealed].T
    guess = y[revealed][near.argmax(1)]
    others = torch.ones(len(y), dtype=torch.bool, device=y.device)
    others[revealed] = False
    return float((guess == y)[others].double().mean())


def reconstruction(embeddings: Tensor, x: Tensor, fitted: int, ridge: float = 1e-3) -> float:
    """The share of the variance of a client's columns that a linear map from embeddings explains.

    The map is fitted on the first rows, whose columns the server is assumed to know, and judged on
    the others. 0 is no better than the mean; it can be below.
    """
    e, x = embeddings.double(), x.double().flatten(1)
    e = torch.cat([e, e.new_ones((len(e), 1))], 1)
    gram = e[:fitted].T @ e[:fitted] + ridge * fitted * torch.eye(e.shape[1]).to(e)
    wrong = x[fitted:] - e[fitted:] @ torch.linalg.solve(gram, e[:fitted].T @ x[:fitted])
    left = (wrong**2).sum()
    spread = ((x[fitted:] - x[:fitted].mean(0)) ** 2).sum()
    return float(1 - left / spread)


def columns_snapshot(learner: Learner, moment: Moment) -> list[Snapshot]:
    """How well embeddings reveal a site's columns to an attacker with two thirds of the rows."""
    x, where = learner.site.train(moment.stage).x[:AUDITED], (moment.stage, learner.site.id)
    if len(x) < FEWEST:  # the site has not joined yet, or has too few rows
        return []
    embeddings, split = learner.half.embed(learner.scaled(x)), len(x) * 2 // 3
    digits = {"as set": learner.settings.digits, "digits = 1": 1}
    sent = [rounded(embeddings, count) for count in digits.values()]
    values = tuple((reconstruction(rows, x, split),) for rows in sent)
    return [Snapshot(*where, "columns from embeddings", tuple(digits), ("explained",), values)]


def labels_snapshot(head: Head, moment: Moment, joint: Tensor, y: Tensor) -> list[Snapshot]:
    """How well gradients reveal labels to a client that knows three rows of each class."""
    joint, y, settings = joint[:AUDITED], y[:AUDITED], head.settings
    revealed = torch.cat([torch.nonzero(y == kind).flatten()[:3] for kind in y.unique()] or [y])
    if len(y) < FEWEST or len(revealed) == len(y):
        return []
    gradients = head.row_gradients(joint, y, settings.batch)
    size = float(gradients.norm(dim=1).mean())
    amounts = {"as set": (settings.clip, settings.noise),
               "clip and noise 0.3": (size, 0.3 * size),
               "clip and noise 1": (size, size)}  # fmt: skip
    key = torch.tensor(head.site.stream("audit", moment).key, device=y.device)
    sent = [guarded(gradients, clip, noise, key) for clip, noise in amounts.values()]
    values = tuple((labels_from_gradients(g, y, revealed), 1 / len(y.unique())) for g in sent)
    where, columns = (moment.stage, SERVER), ("guessed", "chance")
    return [Snapshot(*where, "labels from gradients", tuple(amounts), columns, values)]


def audited_client(method: Method, options: Any, site: Site) -> Any:
    """A client whose snapshots also measure what its embeddings reveal."""
    client = method.client(options, site)
    own: Any = getattr(client, "snapshot", lambda moment: [])
    client.snapshot = lambda moment: [*columns_snapshot(client.learner, moment), *own(moment)]
    return client


def audited_server(method: Method, options: Any, site: Site) -> Any:
    """A server whose snapshots also measure what the gradients of its training rows reveal."""
    server = method.server(options, site)
    own: Any = getattr(server, "snapshot", lambda moment: [])
    training_rows = server.head.training_rows
    last = [(torch.zeros((0, server.head.width)), torch.zeros(0, dtype=torch.int64))]

    def observed(clients: Clients, moment: Moment) -> tuple[Tensor, Tensor]:
        last[0] = training_rows(clients, moment)
        return last[0]

    server.head.training_rows = observed
    server.snapshot = lambda moment: [*own(moment), *labels_snapshot(server.head, moment, *last[0])]
    return server


def audited(method: Method) -> Method:
    """The method with snapshots of both attacks."""
    return replace(
        method,
        client=lambda options, site: audited_client(method, options, site),
        server=lambda options, site: audited_server(method, options, site),
    )


REPLACEMENTS: dict[str, Callable[[Method], Method]] = {"snapshots": audited}
