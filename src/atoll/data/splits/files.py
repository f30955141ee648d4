"""Every client is a site of your own tables or of `hospitals`, tested on its rows and columns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from atoll.core.options import Fraction
from atoll.core.rng import Stream
from atoll.data import partition
from atoll.data.dataset import Dataset, Layout
from atoll.data.partition import Array
from atoll.data.scenario import Holding, Scenario, Split

__all__ = ["SPLIT", "Options", "own_sizes", "part_sizes"]
Draws = Callable[[str | int], Stream]  # the stream of a purpose or stage
FEWEST: Final = 5  # rows of a site at a stage: to train, to validate and to test on


@dataclass(frozen=True)
class Options:
    """How the rows of each site are divided."""

    train: Fraction = 0.6  # share of the rows to train on; train and valid leave the test rows
    valid: Fraction = 0.2  # share of the rows to validate on


def deal(dataset: Dataset, options: Options, seed: int) -> Scenario:
    """One client for each site; its rows of each stage are partition.cut by class."""
    partition.check_shares(options.train, options.valid)
    layout, stream = dataset.layout, Stream.of(seed, "split", "files")
    if layout is None:
        raise partition.refusal(
            f"'{dataset.name}' is not made of files", "give data = { files = [...] } or 'hospitals'"
        )
    common, stages = layout.held.all(0), layout.stages or ("all",)
    holdings, tests, dealt = [], [], dict[int, int]()
    for number, (name, rows) in enumerate(partition.group_rows(dataset).items()):
        for stage, at in enumerate(stages):
            _enough(name, at if layout.stages else "", int((layout.stage[rows] == stage).sum()))
        draws = partial(stream.child, name)
        if dataset.people is None:
            parts = _by_row(dataset, layout, rows, options, draws)
        else:
            parts = _by_person(dataset, layout, rows, options, draws, dealt)
        own = np.flatnonzero(layout.held[number] & ~common)
        holdings.append([Holding(part.train, part.valid, own) for part in parts])
        tests.append([part.test for part in parts])
    return partition.build_scenario(
        dataset.groups, holdings, tests, tuple(stages), np.flatnonzero(common)
    )


def _by_row(
    dataset: Dataset, layout: Layout, rows: Array, options: Options, draws: Draws
) -> list[partition.Parts]:
    """The parts of each stage; rows are dealt one by one."""
    parts = []
    for stage in range(len(layout.stages) or 1):
        take = partition.by_class(dataset.strata, draws(stage).numpy())
        chosen = rows[layout.stage[rows] == stage]
        parts.append(partition.cut(chosen, options.train, options.valid, take))
    return parts


def _by_person(
    dataset: Dataset,
    layout: Layout,
    rows: Array,
    options: Options,
    draws: Draws,
    dealt_before: dict[int, int],
) -> list[partition.Parts]:
    """The parts of each stage; all rows of a person, of whatever stage, are in one part.

    A person of several sites, in one file with a column of sites, has the same part at all.
    """
    assert dataset.people is not None
    stage, people = layout.stage[rows], dataset.people[rows]
    strata = stage * len(dataset.classes) + dataset.strata[rows]
    dealt = partition.cut_people(
        strata, people, options.train, options.valid, draws("people").numpy(), dealt_before
    )
    dealt_before.update(zip(people.tolist(), dealt.tolist(), strict=True))
    return partition.parts_by_stage(rows, stage, dealt, len(layout.stages) or 1)


def _enough(site: str, stage: str, count: int) -> None:
    if count < FEWEST:
        when = f" at stage '{stage}'" if stage else ""
        raise partition.refusal(
            f"site '{site}' has too few rows{when}: {count}",
            f"a site needs {FEWEST} or more: add rows, or leave it out",
        )


def own_sizes(site: str, stages: Mapping[str, int], options: Options) -> Array:
    """The numbers of training, validation and test rows of a site: (stages, 3).

    As `deal` divides them, computed from the numbers of rows without reading the file.
    """
    partition.check_shares(options.train, options.valid)
    sizes = []
    for number, (stage, count) in enumerate(stages.items()):
        _enough(site, stage, count)
        pool, train = round((options.train + options.valid) * count), round(options.train * count)
        partition.check_training(site, number, train)
        partition.check_tests(site, stage or "all", count - pool)
        sizes.append((train, pool - train, count - pool))
    return np.array(sizes)


def part_sizes(scenario: Scenario, site: str) -> Array:
    """The numbers of training, validation and test rows of a site over all stages."""
    holdings = scenario.holdings[site]
    parts = ([h.train for h in holdings], [h.valid for h in holdings], scenario.tests[site])
    return np.array([sum(len(rows) for rows in part) for part in parts])


SPLIT = Split(Options, deal)
