"""Two plain attacks on split learning by a participant that reads the messages it receives.

Their success is a lower bound: an attacker with more time does better.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.learning.split import guarded, rounded

__all__ = [
    "AUDITED",
    "columns_by_digits",
    "labels_by_noise",
    "labels_from_gradients",
    "reconstruction",
]

AUDITED = 1000  # training rows that an audit reads
FEWEST = 30  # an audit of fewer rows reports nothing


def labels_from_gradients(gradients: Tensor, y: Tensor, known: Tensor) -> float:
    """The share of rows whose label a client guesses that knows the labels of a few.

    It takes the label of the known row whose gradient points most nearly the same way. Chance is
    one by the number of classes.
    """
    unit = F.normalize(gradients.double(), dim=1)
    near = unit @ unit[known].T
    guess = y[known][near.argmax(1)]
    others = torch.ones(len(y), dtype=torch.bool, device=y.device)
    others[known] = False
    return float((guess == y)[others].double().mean())


def reconstruction(embeddings: Tensor, x: Tensor, fitted: int, ridge: float = 1e-3) -> float:
    """The share of the variance of a client's columns that a linear map from embeddings explains.

    The map is fitted on the first rows, whose columns the server is taken to know, and judged on
    the others. 0 is no better than the mean; it can be below.
    """
    e, x = embeddings.double(), x.double().flatten(1)
    e = torch.cat([e, e.new_ones((len(e), 1))], 1)
    gram = e[:fitted].T @ e[:fitted] + ridge * fitted * torch.eye(e.shape[1]).to(e)
    wrong = x[fitted:] - e[fitted:] @ torch.linalg.solve(gram, e[:fitted].T @ x[:fitted])
    left = (wrong**2).sum()
    spread = ((x[fitted:] - x[:fitted].mean(0)) ** 2).sum()
    return float(1 - left / spread)


def columns_by_digits(embeddings: Tensor, x: Tensor, digits: int) -> dict[str, float]:
    """What `reconstruction` explains with these and with one decimal; empty for too few rows.

    The attacker knows two thirds of the rows.
    """
    if len(x) < FEWEST:
        return {}
    known, decimals = len(x) * 2 // 3, {"as set": digits, "digits = 1": 1}
    return {
        how: reconstruction(rounded(embeddings, count), x, known) for how, count in decimals.items()
    }


def labels_by_noise(
    gradients: Tensor, y: Tensor, clip: float, noise: float, key: Tensor
) -> dict[str, float]:
    """What `labels_from_gradients` guesses at this clip and noise and at larger ones.

    The attacker knows three rows of each class. Empty for too few rows.
    """
    known = torch.cat([torch.nonzero(y == kind).flatten()[:3] for kind in y.unique()] or [y])
    if len(y) < FEWEST or len(known) == len(y):
        return {}
    size = float(gradients.norm(dim=1).mean())
    amounts = {
        "as set": (clip, noise),
        "clip and noise 0.3": (size, 0.3 * size),
        "clip and noise 1": (size, size),
    }
    return {
        how: labels_from_gradients(guarded(gradients, *amount, key), y, known)
        for how, amount in amounts.items()
    }
