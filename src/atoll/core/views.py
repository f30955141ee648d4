"""Tensors that lie one behind another in memory."""

from collections.abc import Sequence

from torch import Tensor

__all__ = ["stacked_view"]


def stacked_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose rows these are, in order and complete; None where there is no such tensor.

    `torch.stack` gives the same values, but reads and writes all of them.

    >>> import torch
    >>> whole = torch.ones(3, 2)
    >>> stacked_view(whole.unbind(0)) is whole
    True
    >>> stacked_view(whole.unbind(0)[:2]) is None
    True
    """
    whole = tensors[0]._base
    if whole is None or whole.dim() == 0 or len(whole) != len(tensors):
        return None
    if any(tensor._base is not whole for tensor in tensors):
        return None
    step = whole.stride(0) * whole.element_size()
    first = whole.data_ptr()
    places = [first + place * step for place in range(len(tensors))]
    if [tensor.data_ptr() for tensor in tensors] != places:
        return None
    rows = whole.shape[1:], whole.stride()[1:], whole.dtype
    if any((t.shape, t.stride(), t.dtype) != rows for t in tensors):
        return None
    return whole
