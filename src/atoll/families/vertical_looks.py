"""Looks of split learning: embeddings for pictures, and what its messages give away."""

import torch
from torch import Tensor

from atoll.core.federation import SERVER, Moment
from atoll.core.messages import Tensors
from atoll.core.record import Look
from atoll.data.site import Site
from atoll.families.vertical import Head, Learner
from atoll.learning.knowledge import share
from atoll.learning.leakage import AUDITED, columns_by_digits, labels_by_noise

__all__ = ["columns_look", "embeddings_look", "frozen_look", "labels_look"]


def embeddings_look(site: Site, moment: Moment, name: str, rows: Tensor, y: Tensor) -> Look:
    """Embeddings with the names of their classes, as short numbers."""
    classes = tuple(str(site.classes[kind]) for kind in y.tolist())
    columns = tuple(f"e{number}" for number in range(rows.shape[1]))
    values = tuple(tuple(float(f"{value:.4g}") for value in row) for row in rows.tolist())
    return Look(moment.stage, SERVER, name, classes, columns, values)


def columns_look(learner: Learner, moment: Moment) -> list[Look]:
    """How well a site's embeddings give its columns away; nothing for too few rows."""
    x, site = learner.site.train(moment.stage).x[:AUDITED], learner.site
    embeddings = learner.half.embed(learner.scaled(x))
    guesses = columns_by_digits(embeddings, x, learner.settings.digits)
    values = tuple((value,) for value in guesses.values())
    look = Look(
        moment.stage, site.id, "columns from embeddings", tuple(guesses), ("explained",), values
    )
    return [look] if guesses else []


def frozen_look(site: Site, moment: Moment, masks: Tensors) -> Look:
    """The share of frozen entries of each weight, and its size."""
    values = tuple((share({name: mask}), float(mask.numel())) for name, mask in masks.items())
    columns = ("share", "weights")
    return Look(moment.stage, site.id, "held back", tuple(masks), columns, values)


def labels_look(head: Head, moment: Moment, joint: Tensor, y: Tensor) -> list[Look]:
    """How well the gradients of these rows give labels away; nothing for too few rows."""
    settings = head.settings
    key = torch.tensor(head.site.stream("audit", moment).key, device=y.device)
    gradients = head.row_gradients(joint, y, settings.batch)
    guesses = labels_by_noise(gradients, y, settings.clip, settings.noise, key)
    values = tuple((guessed, 1 / len(y.unique())) for guessed in guesses.values())
    columns = ("guessed", "chance")
    look = Look(moment.stage, SERVER, "labels from gradients", tuple(guesses), columns, values)
    return [look] if guesses else []
