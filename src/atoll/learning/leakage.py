"""Two plain attacks on split learning by a participant that reads the messages it receives.

Their success is a lower bound: an attacker with more time does better.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

__all__ = ["labels_from_gradients", "reconstruction"]


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
