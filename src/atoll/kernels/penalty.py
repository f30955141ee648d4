"""The penalty that keeps the weights of past tasks, with gradients, in one pass over memory.

For stacks on CUDA, in Triton, which torch's CUDA builds bring along; `decomposed` has the same in
torch's own operations, a dozen passes. The adaptive parts of past tasks are most of what a client
has to read at each step once there are a few tasks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

__all__ = ["drift", "usable"]

BLOCK = 1024


def usable(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel can be used for these."""
    return triton is not None and all(t.is_cuda for t in tensors)


def drift(
    base: Tensor,  # (members, outputs, ...)
    gate: Tensor,  # (members, tasks, outputs), by what the base counts
    past: Tensor,  # (members, tasks, outputs, ...): the adaptive parts
    target: Tensor,  # as `past`: the targets of the weights
    strength: Tensor,  # (members,)
    one: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each member the sums of squared distances and of absolute values of adaptive parts.

    And the gradients of strength / 2 * the one + `one` * the other, with regard to base and past.
    """
    members, tasks, outputs = gate.shape
    size = base[0].numel()
    blocks = triton.cdiv(size, BLOCK)
    of_base, of_past = torch.empty_like(base), torch.empty_like(past)
    squares, absolutes = base.new_empty((2, members, blocks))
    _hold[blocks, members](
        base.contiguous(), gate.contiguous(), past.contiguous(), target.contiguous(),
        strength.to(base.dtype), of_base, of_past, squares, absolutes,
        size, size // outputs, outputs, tasks,
        one=one, block=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return squares.sum(-1), absolutes.sum(-1), of_base, of_past


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _hold(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917 - Triton reads it
        bases, gates, pasts, targets, strengths, of_bases, of_pasts, squares, absolutes,
        size, inner, outputs, tasks, one: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """A block of a member's base through all tasks; products are rounded before sums."""
        member = tl.program_id(1).to(tl.int64)
        place = tl.program_id(0) * block + tl.arange(0, block)
        inside = place < size
        output = place // inner
        base = tl.load(bases + member * size + place, mask=inside, other=0)
        strength = tl.load(strengths + member)
        of_base, far, near = tl.zeros_like(base), tl.zeros_like(base), tl.zeros_like(base)
        for task in range(tasks):
            row = member * tasks + task
            gate = tl.load(gates + row * outputs + output, mask=inside, other=0)
            past = tl.load(pasts + row * size + place, mask=inside, other=0)
            moved = base * gate + past
            moved -= tl.load(targets + row * size + place, mask=inside, other=0)
            far += moved * moved
            near += tl.abs(past)
            pull = moved * strength
            of_base += gate * pull
            sign = (past > 0).to(past.dtype) - (past < 0).to(past.dtype)
            tl.store(of_pasts + row * size + place, pull + sign * one, mask=inside)
        tl.store(of_bases + member * size + place, of_base, mask=inside)
        number = member * tl.num_programs(0) + tl.program_id(0)
        tl.store(squares + number, tl.sum(far))
        tl.store(absolutes + number, tl.sum(near))
