"""Looks of split learning: embeddings for pictures, and what its messages give away."""

import torch
from torch import Tensor

from atoll.core.federation import SERVER, Moment
from atoll.core.messages import Tensors
from atoll.core.record import Look
from atoll.data.site import Site
from atoll.families.vertical import Head, Learner
from atoll.learning.knowledge import share
from atoll.learning.leakage import labels_from_gradients, reconstruction
from atoll.learning.split import guarded, rounded

__all__ = ["columns_look", "embeddings_look", "frozen_look", "labels_look"]

AUDITED = 1000  # training rows that an audit reads
FEWEST = 30  # an audit of fewer rows reports nothing


def embeddings_look(site: Site, moment: Moment, name: str, rows: Tensor, y: Tensor) -> Look:
    """Embeddings with the names of their classes, as short numbers."""
    classes = tuple(str(site.classes[kind]) for kind in y.tolist())
    columns = tuple(f"e{number}" for number in range(rows.shape[1]))
    values = tuple(tuple(float(f"{value:.4g}") for value in row) for row in rows.tolist())
    return Look(moment.stage, SERVER, name, classes, columns, values)


def frozen_look(site: Site, moment: Moment, masks: Tensors) -> Look:
    """The share of frozen entries of each weight, and its size."""
    values = tuple((share({name: mask}), float(mask.numel())) for name, mask in masks.items())
    columns = ("share", "weights")
    return Look(moment.stage, site.id, "held back", tuple(masks), columns, values)


def columns_look(learner: Learner, moment: Moment) -> list[Look]:
    """How well embeddings give a site's columns away to who knows two thirds of the rows."""
    x, where = learner.site.train(moment.stage).x[:AUDITED], (moment.stage, learner.site.id)
    if len(x) < FEWEST:  # the site has not joined yet, or has too few rows
        return []
    embeddings, known = learner.half.embed(learner.scaled(x)), len(x) * 2 // 3
    digits = {"as set": learner.settings.digits, "digits = 1": 1}
    sent = [rounded(embeddings, count) for count in digits.values()]
    values = tuple((reconstruction(rows, x, known),) for rows in sent)
    return [Look(*where, "columns from embeddings", tuple(digits), ("explained",), values)]


def labels_look(head: Head, moment: Moment, joint: Tensor, y: Tensor) -> list[Look]:
    """How well gradients give labels away to a client that knows three rows of each class."""
    joint, y, settings = joint[:AUDITED], y[:AUDITED], head.settings
    known = torch.cat([torch.nonzero(y == kind).flatten()[:3] for kind in y.unique()] or [y])
    if len(y) < FEWEST or len(known) == len(y):
        return []
    gradients = head.row_gradients(joint, y, settings.batch)
    size = float(gradients.norm(dim=1).mean())
    amounts = {"as set": (settings.clip, settings.noise),
               "clip and noise 0.3": (size, 0.3 * size),
               "clip and noise 1": (size, size)}  # fmt: skip
    key = torch.tensor(head.site.stream("audit", moment).key, device=y.device)
    sent = [guarded(gradients, clip, noise, key) for clip, noise in amounts.values()]
    values = tuple((labels_from_gradients(g, y, known), 1 / len(y.unique())) for g in sent)
    where, columns = (moment.stage, SERVER), ("guessed", "chance")
    return [Look(*where, "labels from gradients", tuple(amounts), columns, values)]
