"""Every client has rows of its own, the common columns, and columns of its own (CHFL)."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from atoll.core.options import AtLeastOne, Fraction, NotNegativeInt, Positive
from atoll.data import partition
from atoll.data.dataset import Dataset
from atoll.data.partition import Array
from atoll.data.scenario import Scenario, Split

__all__ = ["SPLIT", "Options"]


@dataclass(frozen=True)
class Options:
    """How rows and columns of a table are dealt to clients."""

    clients: AtLeastOne = 3  # number of clients
    ratio: Fraction = 0.3  # share of the columns that are common
    common: tuple[int, ...] = ()  # the common columns; empty: drawn by ratio
    feature_seed: NotNegativeInt = 0  # seed of the order of columns
    train: Fraction = 0.6  # share of the rows to train on; train and valid leave the test rows
    valid: Fraction = 0.2  # share of the rows to validate on; with official test rows: train:valid
    official_test: bool = True  # test on the data set's own test rows, if it has some
    tests: Literal["shared", "own"] = "shared"  # own: every client has test rows of its own
    rows: Literal["even", "dirichlet"] = "even"  # equal parts without remainder, or uneven classes
    alpha: Positive = 0.5  # Dirichlet concentration; smaller is more uneven
    least: AtLeastOne = 1  # fewest training rows of a client, with Dirichlet shares


def deal(dataset: Dataset, options: Options, seed: int) -> Scenario:
    """Rows of all classes at one stage; a column that is not common belongs to one client."""
    if dataset.kind != "table":
        raise partition.refusal(
            f"'{dataset.name}' has no columns", "use split = 'rows', or a table"
        )
    dealt = partition.horizontal(
        dataset, options, seed, [np.arange(len(dataset.classes))], ("all",)
    )
    order, count = _common_first(partition.column_order(dataset, options.feature_seed), options)
    common, own = partition.columns_common_and_own(order, count, options.clients)
    holdings = {
        id: tuple(replace(holding, own=columns) for holding in dealt.holdings[id])
        for id, columns in zip(dealt.clients, own, strict=True)
    }
    return replace(dealt, holdings=holdings, common=common)


def _common_first(order: Array, options: Options) -> tuple[Array, int]:
    """An order that begins with the common columns, and their number."""
    count = round(options.ratio * len(order))
    if options.common:
        common = np.array(options.common, dtype=np.int64)
        if len(np.unique(common)) < len(common) or not np.isin(common, order).all():
            raise partition.refusal(
                f"common lists {list(options.common)}",
                f"give some of the columns 0 to {len(order) - 1}, each of them once",
            )
        order, count = np.concatenate([common, order[~np.isin(order, common)]]), len(common)
    if count == 0:
        raise partition.refusal(
            f"ratio = {options.ratio:g} of {len(order)} columns leaves no common column",
            "choose a larger ratio",
        )
    return order, count


SPLIT = Split(Options, deal)
