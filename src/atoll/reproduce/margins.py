"""What counts as reproduced: margins, units of replication and differing inputs of each paper.

The table is fixed before the measurements that it judges, and one rule uses it for all papers. A
cell's margin is `margin` plus the deviation that the paper prints for that cell. The base margin is
the one with which atoll answers whether joining helps (`atoll.metrics.verdicts.MARGIN`): a smaller
difference does not matter. Where a paper prints no deviation, its mean is taken as exact.
"""

from dataclasses import dataclass

from atoll.metrics.verdicts import MARGIN

__all__ = ["ABOUT", "RULES", "SIMILAR", "SIZE", "Rule"]

SIMILAR = 0.01  # accuracy; what a paper calls similar or the same
ABOUT = 0.05  # accuracy; what the specifications call about, or near
SIZE = 0.02  # of a gain that a paper prints, in accuracy or relative to the other method


@dataclass(frozen=True)
class Rule:
    """How the cells and claims of a paper are judged."""

    deviation: str  # what the paper prints beside a mean
    unit: str  # what is drawn anew from one independent value to the next
    margin: float = MARGIN  # accuracy; the cell's printed deviation is added
    differs: str = ""  # an input of all cells that is not the paper's: their levels are undecidable


RULES = {
    "chfl": Rule(
        "a deviation for each cell, over 3 feature splits x 5 runs",
        "feature split (the mean of its runs, whose row splits and seeds differ)",
    ),
    "fccl": Rule("no deviation", "seed (private rows, first weights, batches)"),
    "fedseit": Rule(
        "a deviation for each cell, over 3 seeds",
        "seed (order of tasks, first weights, batches; the rows of a task are fixed)",
        differs="word vectors of spaCy or word2vec stand in for GloVe 840B",
    ),
    "vleto": Rule("no deviation", "seed (first weights, batches; the rows are fixed)"),
}
