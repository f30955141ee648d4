"""Every client is one of your own files of texts, and its tasks are the stages of the file."""

from dataclasses import dataclass

from atoll.core.options import Fraction
from atoll.core.rng import Stream
from atoll.data import partition
from atoll.data.dataset import Dataset
from atoll.data.partition import Array
from atoll.data.scenario import Holding, Scenario, Split

__all__ = ["SPLIT", "Options"]


@dataclass(frozen=True)
class Options:
    """How the rows of each task are divided."""

    train: Fraction = 0.6  # share of the rows to train on; train and valid leave the test rows
    valid: Fraction = 0.2  # share of the rows to validate on


def deal(dataset: Dataset, options: Options, seed: int) -> Scenario:
    """One client for each file, one task for each of its stages; rows are cut by class."""
    partition.check_shares(options.train, options.valid)
    if dataset.stage is None:
        what = f"'{dataset.name}' is not made of your own texts"
        raise partition.refusal(
            what, "give data = { files = [...], text = ... }, or use split = 'tasks'"
        )
    groups = list(partition.group_rows(dataset).values())
    stream, ids = Stream.of(seed, "split", "streams"), partition.client_ids(len(groups))
    test_share = 1 - options.train - options.valid
    holdings: list[list[Holding]] = []
    tests: list[list[Array]] = []
    for id, all_rows in zip(ids, groups, strict=True):
        every = []
        for number, name in enumerate(dataset.stages):
            rows = all_rows[dataset.stage[all_rows] == number]
            if not len(rows):
                what = f"client '{id}' has no rows for stage '{name}'"
                raise partition.refusal(
                    what, "give every file rows of every stage, or leave the stage out"
                )
            take = partition.by_class(dataset.strata, stream.child(id, name).numpy(), keep=1)
            test, pool = take(rows, round(test_share * len(rows)))
            valid, train = take(pool, round(options.valid * len(rows)))
            every.append(partition.Parts(train, valid, test))
        if dataset.people is not None:
            every = _by_person(dataset, all_rows, options, stream.child(id, "people"))
        holdings.append([Holding(part.train, part.valid, partition.NONE) for part in every])
        tests.append([part.test for part in every])
    return partition.build_scenario(
        ids, holdings, tests, dataset.stages, partition.all_columns(dataset)
    )


def _by_person(
    dataset: Dataset, rows: Array, options: Options, stream: Stream
) -> list[partition.Parts]:
    """The parts of each task; all texts of a person, of whatever task, are in one part."""
    assert dataset.people is not None
    assert dataset.stage is not None
    stage = dataset.stage[rows]
    strata = stage * len(dataset.classes) + dataset.y[rows]
    shares = (options.train, options.valid)
    dealt = partition.cut_people(strata, dataset.people[rows], *shares, stream.numpy())
    return partition.parts_by_stage(rows, stage, dealt, len(dataset.stages))


SPLIT = Split(Options, deal)
