"""Client i has the training rows of domain i; all are tested on every domain (FCCL)."""

from dataclasses import dataclass

import numpy as np

from atoll.core.options import Fraction
from atoll.core.rng import Stream
from atoll.data import partition
from atoll.data.dataset import Dataset
from atoll.data.partition import Array
from atoll.data.scenario import Holding, Scenario, Split

__all__ = ["SPLIT", "Options"]


@dataclass(frozen=True)
class Options:
    """How the rows of each domain are divided."""

    sizes: tuple[int, ...] = ()  # training rows of each client; empty: all
    stratified: bool = False  # keep the proportions of the classes in every cut
    train: Fraction = 0.6  # share of the rows to train on; train and valid leave the test rows
    valid: Fraction = 0.2  # share of the rows to validate on; with official test rows: train:valid
    official_test: bool = True  # test on the data set's own test rows, if it has some
    paper_compat: bool = False  # as FCCL's published code: test on training rows too
    drawn_twice: bool = False  # as there: other rows before the first round, with sizes


def deal(dataset: Dataset, options: Options, seed: int) -> Scenario:
    """One client for each domain, one task for each domain."""
    stream = Stream.of(seed, "split", "domains")
    if dataset.group is None:
        raise partition.refusal(
            f"the data set '{dataset.name}' has no domains",
            "choose one that has: data = digits-domains (MNIST, USPS, SVHN and one more), "
            "digits-shifted, office-caltech10, office-home, or images of your own",
        )
    groups = partition.group_rows(dataset)
    if options.sizes and len(options.sizes) != len(groups):
        raise partition.refusal(
            f"sizes has {len(options.sizes)} numbers for {len(groups)} domains",
            f"give one for each of {', '.join(groups)}",
        )
    if options.drawn_twice and not options.sizes:
        raise partition.refusal(
            "drawn_twice has nothing to draw: without sizes all rows are taken",
            "give sizes, or leave drawn_twice out",
        )
    holdings, tests = [], []
    for number, (name, rows) in enumerate(groups.items()):
        size = options.sizes[number] if options.sizes else None
        holding, test = _of_domain(dataset, options, (name, rows), size, stream.child(name))
        holdings.append([holding])
        tests.append(test)
    ids, remark = partition.client_ids(len(groups)), " (tested on training rows too)"
    tasks = tuple(f"{name}{remark * options.paper_compat}" for name in groups)
    return partition.build_scenario(ids, holdings, [tests], tasks, partition.all_columns(dataset))


def _of_domain(
    dataset: Dataset,
    options: Options,
    domain: tuple[str, Array],  # name, rows
    size: int | None,
    stream: Stream,
) -> tuple[Holding, Array]:
    """What the client of a domain holds, and the test rows of the domain.

    With `drawn_twice` the rows before the first round are drawn anew from the same pool (J8 of the
    FCCL specification); both draws may have rows in common.
    """
    (name, rows), generator = domain, stream.numpy()
    again = stream.child("before").numpy()
    take, retake = (
        partition.by_class(dataset.strata, draws)
        if options.stratified
        else partition.at_random(draws)
        for draws in (generator, again)
    )
    before = None
    if options.paper_compat:
        most = len(rows) if size is None else size
        train = _as_published(dataset, rows, most, generator)
        if options.drawn_twice:
            before = _as_published(dataset, rows, most, again)
        return Holding(train, partition.NONE, partition.NONE, before), rows
    part = partition.cut_rows(dataset, options, rows, take)
    if size is None:
        return Holding(part.train, part.valid, partition.NONE), part.test
    train = _private(part.train, name, size, take)
    if options.drawn_twice:
        before = _private(part.train, name, size, retake)
    return Holding(train, part.valid, partition.NONE, before), part.test


def _as_published(
    dataset: Dataset, rows: Array, size: int, generator: np.random.Generator
) -> Array:
    """The training rows of FCCL's published code for Office-Home, for diagnosis only.

    30 % of each class are set aside at random, and the first rows of the rest are taken class by
    class, so that later classes may be absent; the test set is the whole domain.
    """
    aside = partition.by_class(dataset.strata, generator)(rows, round(0.3 * len(rows)))[0]
    rest = np.setdiff1d(rows, aside)
    return np.sort(rest[np.argsort(dataset.strata[rest], kind="stable")][:size])


def _private(rows: Array, domain: str, size: int, take: partition.Take) -> Array:
    """`size` of a domain's training rows."""
    if not 1 <= size <= len(rows):
        raise partition.refusal(
            f"domain '{domain}' has {len(rows)} training rows, not {size}",
            "ask for 1 or more rows of those it has, or raise train",
        )
    return take(rows, size)[0]


SPLIT = Split(Options, deal)
