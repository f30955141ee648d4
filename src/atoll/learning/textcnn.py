"""The text CNN: frozen word vectors, three banks of filters, the largest value over time.

Texts are rows of tokens, 0 for padding at the end. A batch is cut where its longest text ends, one
window of padding left: that window stands for all others of padding, so nothing is changed by it.
A filter is multiplied once with the vector of each different word of a batch; what it says of a
window is then a sum of numbers that are looked up, so padding and repeated words cost next to
nothing. A stack of networks has one more axis in front of every weight and row, as in models.py.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from atoll.core.rng import Stream
from atoll.learning.models import draw_linear, linear

__all__ = [
    "KERNELS",
    "TextCNN",
    "Words",
    "document_means",
    "extremes",
    "highest",
    "normal",
    "trimmed",
]

KERNELS: Final = (3, 4, 5)  # words in a window
CELLS = {"cpu": 1 << 15, "cuda": 1 << 21}  # tokens of one pass without gradient
TRUNCATED: Final = 0.87962566103423978  # deviation of a normal draw cut at two deviations

Fold = Callable[[Tensor], Tensor]  # (..., windows, filters) -> what is kept of it
_Found = tuple[Tensor, Tensor]  # vectors, and where each token has its own among them


class Words:
    """A frozen table of word vectors; losses on tables of equal content are the same loss."""

    def __init__(self, name: str, table: Tensor, known: Tensor) -> None:
        self.name, self.table, self.known = name, table, known
        content = table.detach().cpu().contiguous().numpy().tobytes()
        self.mark = hashlib.blake2b(content, digest_size=8).hexdigest()

    def __repr__(self) -> str:
        """The name and the size."""
        return f"Words({self.name}, {len(self.table)} x {self.dimension})"

    def __eq__(self, other: object) -> bool:
        """Whether it is the same table: runs of a sweep have one each, of equal content."""
        return isinstance(other, Words) and self.mark == other.mark

    def __hash__(self) -> int:
        """Equal tables have equal hashes."""
        return hash(repr(self))

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        return self.table.shape[1]


def trimmed(x: Tensor, reach: int) -> Tensor:
    """Tokens without the columns in which all texts have ended, but for the next `reach` of them.

    So one window of padding is left wherever there was one; a text shorter than a window is filled.
    """
    if not _capturing(x):
        used = (x != 0).flatten(0, -2).any(0).nonzero()
        longest = int(used[-1]) + 1 if len(used) else 0
        x = x[..., : longest + reach]
    return F.pad(x, (0, reach - x.shape[-1])) if x.shape[-1] < reach else x


def _capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being recorded: then no shape may depend on what tensors hold."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _different(table: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors that hold those of all tokens, and where each token has its own among them.

    (words, D) for all members, or (members, words, D) where each has its own.
    """
    if not _capturing(x):
        tokens, places = x.unique(return_inverse=True)
        return F.embedding(tokens, table), places
    cells = x.shape[-2:].numel()
    if cells >= len(table):
        return table, x.long()
    places = torch.arange(cells, device=x.device).view(x.shape[-2:]).expand(x.shape)
    return F.embedding(x.flatten(-2), table), places


def _windows(vectors: Tensor, places: Tensor, filters: Tensor) -> Tensor:
    """Each filter on each window: (filters, D, size) -> (rows, windows, filters).

    With members: (members, filters, D, size) -> one axis more in front.
    """
    outputs, dimension, size = filters.shape[-3:]
    by_word = filters.movedim(-3, -1).reshape(-1, dimension, size * outputs)
    said = torch.matmul(vectors.to(filters.dtype), by_word)  # (members or 1, words, size x outputs)
    step = torch.arange(size, device=places.device)
    rows = places.unfold(-1, size, 1) * size + step  # (..., rows, windows, size)
    if filters.dim() == 4:
        first = torch.arange(len(filters), device=places.device) * (said.shape[-2] * size)
        rows = rows + first.view(-1, 1, 1, 1)
    sums = F.embedding_bag(rows.reshape(-1, size), said.view(-1, outputs), mode="sum")
    return sums.view(*rows.shape[:-1], outputs)


class _Largest(torch.autograd.Function):
    """The largest value of each filter over time, whose gradient is taken at that window alone.

    The gradient of a filter is a sum over rows of the vectors of the window it was largest at: a
    weighted sum of table rows. That is less work than the gradient of all windows.
    """

    @staticmethod
    def forward(ctx: Any, filters: Tensor, words: _Found, x: Tensor, table: Tensor) -> Tensor:
        values, at = _windows(*words, filters).max(-2)
        ctx.save_for_backward(x, at, table)
        ctx.shape = filters.shape
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, at, table = ctx.saved_tensors
        count, size = at.shape[-1], ctx.shape[-1]
        places = at.unsqueeze(-1) + torch.arange(size, device=at.device)
        tokens = x.gather(-1, places.flatten(-2)).unflatten(-1, (count, size))
        tokens = tokens.movedim(-3, -1)  # (..., filters, size, rows)
        share = gradient.transpose(-1, -2).unsqueeze(-2).expand(tokens.shape)
        sums = F.embedding_bag(
            tokens.flatten(0, -2),
            table.to(gradient.dtype),
            per_sample_weights=share.flatten(0, -2),
            mode="sum",
        )
        by_filter = sums.view(*tokens.shape[:-1], -1).transpose(-1, -2)
        return by_filter.contiguous(), None, None, None


def _over_time(words: Words, x: Tensor, banks: Sequence[Tensor], fold: Fold | None) -> list[Tensor]:
    """What `fold` keeps of each bank's windows; without one the largest, with a gradient."""
    x = trimmed(x, max(bank.shape[-1] for bank in banks))
    found = _different(words.table, x)
    if fold is None:
        return [_Largest.apply(bank, found, x, words.table) for bank in banks]
    return [fold(_windows(*found, bank)) for bank in banks]


def _in_buckets(
    words: Words, x: Tensor, banks: Sequence[Tensor], fold: Fold | None
) -> list[Tensor]:
    """The same without gradient: texts of like length together, a bounded number at a time."""
    lengths = (x != 0).sum(-1)
    longest = lengths if x.dim() == 2 else lengths.amax(0)
    order = torch.argsort(longest, stable=True)
    sizes = [(length + 8) * (x.shape[0] if x.dim() == 3 else 1) for length in longest.tolist()]
    borders = _borders([sizes[i] for i in order.tolist()], CELLS[x.device.type])
    pieces = [_over_time(words, x[..., order[begin:end], :], banks, fold) for begin, end in borders]
    back = torch.argsort(order)
    return [torch.cat(parts, -2)[..., back, :] for parts in zip(*pieces, strict=True)]


def _borders(sizes: Sequence[int], cells: int) -> list[tuple[int, int]]:
    """Where to cut rows of rising size so that a piece, filled up to its largest, has few cells."""
    found, begin = [], 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or (end + 1 - begin) * sizes[end] > cells:
            found.append((begin, end))
            begin = end
    return found


def _pooled(words: Words, x: Tensor, banks: Sequence[Tensor], fold: Fold | None) -> list[Tensor]:
    few = x.shape[-2] <= 1 or x.numel() <= CELLS[x.device.type]
    how = _over_time if few or torch.is_grad_enabled() else _in_buckets
    return how(words, x, banks, fold)


def _largest_and_smallest(windows: Tensor) -> Tensor:
    return torch.cat([windows.amax(-2), windows.amin(-2)], -1)


def highest(words: Words, x: Tensor, banks: Sequence[Tensor]) -> list[Tensor]:
    """For each bank of filters the largest value over time: (..., rows, filters)."""
    return _pooled(words, x, banks, None)


@torch.no_grad()
def extremes(words: Words, x: Tensor, banks: Sequence[Tensor]) -> list[Tensor]:
    """For each bank the largest values over time, then the smallest: (rows, 2 x filters)."""
    return _pooled(words, x, banks, _largest_and_smallest)


def document_means(words: Words, x: Tensor) -> Tensor:
    """The mean vector of each text over its known words; zero where it has none: (rows, D)."""
    known = words.known[x.long()].to(words.table.dtype)
    sums = F.embedding_bag(x.long(), words.table, mode="sum", per_sample_weights=known)
    return sums / known.sum(-1, keepdim=True).clamp(min=1)


def normal(shape: Sequence[int], deviation: float, stream: Stream) -> Tensor:
    """Draws of a normal distribution cut at two deviations, with this deviation after the cut."""
    low, high = (0.5 * (1 + math.erf(side / math.sqrt(2))) for side in (-2.0, 2.0))
    draw = torch.from_numpy(stream.numpy().uniform(low, high, tuple(shape)))
    cut: Tensor = torch.special.ndtri(draw)
    return (cut * (deviation / TRUNCATED)).float()


class TextCNN(nn.Module):
    """Three banks of filters on word vectors, the largest value over time, a linear layer."""

    def __init__(self, words: Words, filters: int, classes: int, stream: Stream) -> None:
        """Draw the first weights; the word vectors are no weights and are never sent."""
        super().__init__()
        self.words, self.filters = words, filters
        for size in KERNELS:
            shape = (filters, words.dimension, size)
            draw = normal(shape, 1 / math.sqrt(words.dimension * size), stream.child("conv", size))
            self.register_parameter(f"conv{size}", nn.Parameter(draw))
            self.register_parameter(f"bias{size}", nn.Parameter(torch.zeros(filters)))
        weight, bias = draw_linear(classes, filters * len(KERNELS), stream.child("head"))
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def extra_repr(self) -> str:
        """The word vectors, so that networks on others are told apart."""
        return repr(self.words)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.logits(dict(self.named_parameters()), x)

    def logits(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The logits under other weights."""
        said = highest(self.words, x, [weights[f"conv{size}"] for size in KERNELS])
        biases = [weights[f"bias{size}"].unsqueeze(-2) for size in KERNELS]
        z = torch.cat([torch.relu(s + b) for s, b in zip(said, biases, strict=True)], -1)
        return linear(z, weights["weight"], weights["bias"])
