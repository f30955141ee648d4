"""The text CNN: frozen word vectors, three banks of filters, the largest value over time.

Texts are rows of tokens, padded with 0 at the end. The windows of a text, up to the first one of
padding alone, are cut into pieces of equal size, and the pieces of all texts are concatenated, so
that padding costs little and changes nothing. A filter is multiplied once with the vector of each
distinct word of a batch; its response to a window is then a sum of looked-up numbers. A stack of
networks has one more axis in front of every weight and row, as in models.py.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from atoll.core.rng import Stream
from atoll.core.rows import PIECE, Bounds, distinct, pieces
from atoll.learning.models import draw_linear, linear

__all__ = [
    "KERNELS",
    "TextCNN",
    "Words",
    "document_means",
    "extremes",
    "highest",
    "known_words",
    "normal",
    "restricted",
]

KERNELS: Final = (3, 4, 5)  # words in a window
UNKNOWN: Final = 1  # the token of a word that is not in the vocabulary
REACH: Final = max(KERNELS)
CELLS = {"cpu": 1 << 15, "cuda": 1 << 21}  # windows of one pass without gradient
TRUNCATED: Final = 0.87962566103423978  # deviation of a normal draw cut at two deviations


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


def _capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being recorded: then no shape may depend on what tensors hold."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class _Texts(NamedTuple):
    """Texts cut into pieces, those of all texts (and members) end to end."""

    x: Tensor  # (texts, length)
    text: Tensor  # (pieces,) which text each is of
    start: Tensor  # (pieces,) its first window
    windows: Tensor  # (pieces, PIECE) all of them; those of the last piece may be beyond the end
    order: Tensor  # (texts, most) the pieces of each text; the last stands in for missing ones
    vectors: Tensor  # (members, words, D) of the different words of each member's texts
    cells: Tensor  # (texts, length) where each token has its vector among those of all members


def _cut(words: Words, x: Tensor, bounds: Bounds | None) -> _Texts:
    """The pieces of texts; `bounds` give the sizes that they and their words need, if known."""
    members = x.shape[0] if x.dim() == 3 else 1
    flat, fixed = x.flatten(0, -2), bounds is not None or _capturing(x)
    counts = pieces(flat)
    if fixed:
        most = x.shape[-1] // PIECE + 1
        total = len(flat) * most if bounds is None else bounds.pieces
    else:
        total, most = torch.stack([counts.sum(), counts.amax()]).tolist()
        flat = flat[:, : most * PIECE + REACH]
    ends = counts.cumsum(0)
    number = torch.arange(total, device=x.device)
    text = torch.searchsorted(ends, number, right=True).clamp_(max=len(flat) - 1)
    first = ends - counts
    within = torch.arange(most, device=x.device)
    order = first[:, None] + torch.minimum(within, counts[:, None] - 1)
    start = (number - first[text]) * PIECE
    windows = start[:, None] + torch.arange(PIECE, device=x.device)
    return _Texts(flat, text, start, windows, order, *_words(words, flat, members, bounds))


def _words(words: Words, x: Tensor, members: int, bounds: Bounds | None) -> tuple[Tensor, Tensor]:
    """The vectors of each member's different words, and where each token has its own among all."""
    by_member, size = x.unflatten(0, (members, -1)), len(words.table)
    used = distinct(by_member, size)
    if bounds is not None:
        room = bounds.tokens
    elif _capturing(x):
        room = min(size, x.numel() // members)
    else:
        room = int(used.sum(-1).amax())
    place = used.cumsum(-1) - 1
    token = torch.arange(size, device=x.device).expand(members, -1)
    tokens = token.new_zeros((members, room + 1))  # one more for all that do not occur
    tokens.scatter_(1, torch.where(used > 0, place, room), token)
    first = torch.arange(members, device=x.device)[:, None] * room
    cells = (place + first).gather(1, by_member.flatten(1).long())
    return F.embedding(tokens[:, :room], words.table), cells.view(x.shape)


def _windows(texts: _Texts, filters: Tensor) -> Tensor:
    """Each filter on each window: (filters, D, size) -> (pieces, PIECE, filters).

    With members: (members, filters, D, size); pieces are of all members.
    """
    outputs, dimension, size = filters.shape[-3:]
    by_word = filters.movedim(-3, -1).reshape(-1, dimension, size * outputs)
    # (.., words, size x outputs)
    responses = torch.matmul(texts.vectors.to(filters.dtype), by_word)
    length, step = texts.x.shape[1], torch.arange(size, device=texts.x.device)
    starts = texts.windows.clamp(max=length - size) + texts.text[:, None] * length
    rows = texts.cells.flatten()[starts[..., None] + step] * size + step
    sums: Tensor = F.embedding_bag(rows.view(-1, size), responses.view(-1, outputs), mode="sum")
    return sums.view(-1, PIECE, outputs)


class _Largest(torch.autograd.Function):
    """The largest value of each filter over time, whose gradient is taken at that window alone.

    The gradient of a filter is a sum over rows of the vectors of the window it was largest at: a
    weighted sum of table rows. That is less work than the gradient of all windows.
    """

    @staticmethod
    def forward(ctx: Any, filters: Tensor, texts: _Texts, table: Tensor) -> Tensor:
        values, within = _windows(texts, filters).max(1)  # in each piece
        largest, number = values[texts.order].max(1)  # in each text
        piece = texts.order.gather(1, number)
        starts = (texts.start[:, None] + within).clamp_(max=texts.x.shape[1] - filters.shape[-1])
        members = filters.shape[:-3]
        ctx.save_for_backward(texts.x.unflatten(0, (*members, -1)), starts.gather(0, piece), table)
        ctx.shape = filters.shape
        by_member: Tensor = largest.unflatten(0, (*members, -1))
        return by_member

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, at, table = ctx.saved_tensors
        at = at.view(*x.shape[:-1], -1)
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
        return by_filter.contiguous(), None, None


def _in_parts(
    what: Callable[[Tensor], list[Tensor]], x: Tensor, bounds: Bounds | None
) -> list[Tensor]:
    """The same of texts a bounded number of windows at a time, where no gradient is wanted."""
    limit = max(1, CELLS[x.device.type] // PIECE)
    few = bounds is not None or x.shape[-2] <= 1 or x.numel() <= limit * PIECE
    if few or torch.is_grad_enabled() or _capturing(x):
        return what(x)
    counts = pieces(x) if x.dim() == 2 else pieces(x).sum(0)
    borders = _borders(counts.tolist(), limit)
    parts = [what(x[..., begin:end, :]) for begin, end in borders]
    return [torch.cat(of_bank, -2) for of_bank in zip(*parts, strict=True)]


def _borders(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Where to cut rows so that those between two cuts have no more than this, if one has not."""
    borders, begin, total = [], 0, 0
    for end, size in enumerate(sizes):
        if end > begin and total + size > most:
            borders.append((begin, end))
            begin, total = end, 0
        total += size
    return [*borders, (begin, len(sizes))]


def _filled(x: Tensor) -> Tensor:
    """Texts no shorter than the largest window."""
    return F.pad(x, (0, REACH - x.shape[-1])) if x.shape[-1] < REACH else x


def _plain(words: Words, x: Tensor, filters: Tensor) -> Tensor:
    """Each filter on each window, padding included: (rows, windows, filters).

    The same values as those of pieces, in operations whose shapes do not depend on the texts: for
    graphs that leave the library.
    """
    vectors = F.embedding(_filled(x).long(), words.table).to(filters.dtype)
    return F.conv1d(vectors.transpose(1, 2), filters).transpose(1, 2)


def highest(
    words: Words, x: Tensor, banks: Sequence[Tensor], bounds: Bounds | None = None
) -> list[Tensor]:
    """For each bank of filters the largest value over time: (..., rows, filters)."""

    def largest(x: Tensor) -> list[Tensor]:
        texts = _cut(words, x, bounds)
        return [_Largest.apply(bank, texts, words.table) for bank in banks]

    if torch.compiler.is_exporting():
        return [_plain(words, x, bank).amax(1) for bank in banks]
    if not x.shape[-2]:
        return [bank.new_zeros((*x.shape[:-1], bank.shape[-3])) for bank in banks]
    return _in_parts(largest, _filled(x), bounds)


@torch.no_grad()
def extremes(words: Words, x: Tensor, banks: Sequence[Tensor]) -> list[Tensor]:
    """For each bank the largest values over time, then the smallest: (rows, 2 x filters)."""

    def both(x: Tensor) -> list[Tensor]:
        texts, extremes = _cut(words, x, None), []
        for bank in banks:
            windows = _windows(texts, bank)
            top, bottom = windows.amax(1)[texts.order], windows.amin(1)[texts.order]
            extremes.append(torch.cat([top.amax(1), bottom.amin(1)], -1))
        return extremes

    if torch.compiler.is_exporting():
        plain = (_plain(words, x, bank) for bank in banks)
        return [torch.cat([each.amax(1), each.amin(1)], -1) for each in plain]
    if not len(x):
        return [bank.new_zeros((0, 2 * len(bank))) for bank in banks]
    return _in_parts(both, _filled(x), None)


def document_means(words: Words, x: Tensor) -> Tensor:
    """The mean vector of each text over its known words; zero where it has none: (rows, D)."""
    mask = words.known[x.long()].to(words.table.dtype)
    sums = F.embedding_bag(x.long(), words.table, mode="sum", per_sample_weights=mask)
    return sums / mask.sum(-1, keepdim=True).clamp(min=1)


def known_words(texts: Sequence[Tensor], words: int) -> Tensor:
    """Which words of a vocabulary occur in texts: (words,); padding and the unknown word do."""
    mask = torch.zeros(words, dtype=torch.bool, device=texts[0].device)
    mask[: UNKNOWN + 1] = True
    for text in texts:
        mask[text.long()] = True
    return mask


def restricted(x: Tensor, vocabulary: Tensor | None) -> Tensor:
    """The tokens of x; those of words that are not known become the unknown one; None: all are."""
    return x if vocabulary is None else torch.where(vocabulary[x.long()], x, UNKNOWN)


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

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """The shape of every bank of filters."""
        return {f"conv{size}": (self.filters, self.words.dimension, size) for size in KERNELS}

    def extra_repr(self) -> str:
        """The word vectors, which distinguish networks."""
        return repr(self.words)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.logits(dict(self.named_parameters()), x)

    def logits(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The logits under other weights."""
        responses = highest(self.words, x, [weights[f"conv{size}"] for size in KERNELS])
        biases = [weights[f"bias{size}"].unsqueeze(-2) for size in KERNELS]
        z = torch.cat([torch.relu(s + b) for s, b in zip(responses, biases, strict=True)], -1)
        return linear(z, weights["weight"], weights["bias"])
