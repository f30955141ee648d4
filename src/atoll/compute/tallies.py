"""The counts of many clients in one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.compute.buffers import Bundle, stacked
from atoll.compute.probe import Probe
from atoll.jobs.train import EvalJob
from atoll.learning.weights import sent

__all__ = ["Tally", "tally"]

CELLS = 1 << 17  # rows of all members in one pass without gradient


class Tally:
    """Counts without buffers: every pass stacks its weights and rows anew."""

    def fits(self, jobs: Sequence[EvalJob]) -> bool:
        """Always."""
        return True

    def run(self, jobs: Sequence[EvalJob], probe: Probe | None = None) -> list[Tensor]:
        """Count; checks see the counts themselves."""
        return tally(jobs)


@torch.no_grad()
def tally(jobs: Sequence[EvalJob]) -> list[Tensor]:
    """The counts of many members in one pass; padding is masked."""
    weights = {name: stacked([job.weights[name] for job in jobs]) for name in jobs[0].weights}
    data = Bundle.of([job.rows for job in jobs])
    device, longest = data.y.device, max(len(job.rows) for job in jobs)
    sizes, first = sent([[len(job.rows) for job in jobs], data.first], device)
    total, chunk = None, max(1, CELLS // len(jobs))
    for start in range(0, max(1, longest), chunk):
        place = torch.arange(start, min(start + chunk, longest), device=device).expand(
            len(jobs), -1
        )
        real = place < sizes[:, None]
        batch = data.at(torch.where(real, place + first[:, None], 0), real.to(torch.float32))
        values = jobs[0].function(weights, batch)
        while real.dim() < values.dim():
            real = real.unsqueeze(-2)
        counts = (values * real).sum(-1)
        total = counts if total is None else total + counts
    assert total is not None
    return list(total.cpu())
