"""Adam for the members of a stack in one kernel a weight, each member with its own rate and count.

For CUDA, in Triton, which torch's CUDA builds bring along; without it the stack uses torch's own
fused kernel, which needs one rate and one count for all. That one gives each block of threads
65,536 numbers, so a small stack leaves most of a GPU idle; here a block has 1,024.
"""

from collections.abc import Sequence

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

__all__ = ["adam", "usable"]

BLOCK = 1024


def usable(weights: Sequence[Tensor]) -> bool:
    """Whether the kernel can be used for these weights."""
    return triton is not None and all(w.is_cuda and w.is_floating_point() for w in weights)


def adam(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: tuple[Sequence[Tensor], Sequence[Tensor]],
    rate: Tensor,  # (members,), double precision; below zero: the member stays as it is
    taken: Tensor,  # (members,), double precision: steps before this one
    terms: tuple[float, float],  # weight decay and epsilon
) -> None:
    """One step in place; the first axis of every tensor is the members'."""
    decay, epsilon = terms
    for weight, gradient, first, second in zip(weights, gradients, *moments, strict=True):
        members, size = weight.shape[0], weight[0].numel()
        grid = (triton.cdiv(size, BLOCK), members)
        if size:
            _step[grid](
                weight, gradient.contiguous(), first, second, rate, taken, size,
                decay=decay, epsilon=epsilon, block=BLOCK,
            )  # fmt: skip


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _step(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917 - Triton reads it
        weights, gradients, firsts, seconds, rates, taken, size,
        decay: tl.constexpr, epsilon: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """Kingma and Ba 2015, with the bias corrections in double precision."""
        member = tl.program_id(1)
        place = tl.program_id(0) * block + tl.arange(0, block)
        rate = tl.load(rates + member)
        inside = place < tl.where(rate >= 0, size, 0)
        place = member.to(tl.int64) * size + place
        count = tl.load(taken + member) + 1
        rate = rate / (1 - tl.exp(count * -0.10536051565782628))  # ln 0.9
        root = tl.sqrt(1 - tl.exp(count * -0.0010005003335835344))  # ln 0.999
        weight = tl.load(weights + place, mask=inside)
        gradient = tl.load(gradients + place, mask=inside) + decay * weight
        first = tl.load(firsts + place, mask=inside)
        second = tl.load(seconds + place, mask=inside)
        first += (gradient - first) * 0.1
        second = second * 0.999 + gradient * gradient * 0.001
        below = tl.sqrt(second) / root.to(second.dtype) + epsilon
        tl.store(weights + place, weight - rate.to(weight.dtype) * first / below, mask=inside)
        tl.store(firsts + place, first, mask=inside)
        tl.store(seconds + place, second, mask=inside)
