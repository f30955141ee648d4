"""Every client has columns of the same rows, and the server has the labels (V-LETO)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from atoll.core.options import AtLeastOne, Fraction, NotNegativeInt
from atoll.core.rng import Stream
from atoll.data import partition
from atoll.data.dataset import Dataset
from atoll.data.partition import Array
from atoll.data.scenario import ABSENT, Holding, Scenario, Split

__all__ = [
    "SPLIT",
    "Options",
    "columns_by_stage",
    "columns_of_parties",
    "image_quadrants",
    "image_strips",
]


@dataclass(frozen=True)
class Options:
    """How columns are cut among clients, and what arrives by stage."""

    clients: AtLeastOne = 3  # number of clients; with data.parties: one for each of them
    cut: Literal["contiguous", "permuted", "strips", "quadrants"] = "contiguous"  # images: last two
    feature_seed: NotNegativeInt = 0  # seed of the order of columns, with cut = permuted
    mode: Literal["none", "classes", "columns"] = "none"  # what arrives by stage
    stages: AtLeastOne = 1  # number of stages, with mode = classes
    window: NotNegativeInt = 0  # classes of a stage; 0: an even partition of all classes
    stride: AtLeastOne = 2  # classes from the start of one window to the next
    stage_classes: partition.ClassLists = ()  # instead: lists of classes, overlap4 or disjoint2
    joint_aug: bool = False  # shift and mirror whole images before the cut; simulation only
    train: Fraction = 0.6  # share of the rows to train on; train and valid leave the test rows
    valid: Fraction = 0.2  # share of the rows to validate on; with official test rows: train:valid
    official_test: bool = True  # test on the data set's own test rows, if it has some


def deal(dataset: Dataset, options: Options, seed: int) -> Scenario:
    """The same rows for every client; with own tables, the columns of each file."""
    if options.joint_aug and dataset.kind != "image":
        what = "joint_aug changes images that are cut among parties"
        raise partition.refusal(what, "use it with images, or leave it out")
    pieces = _party_columns(dataset, options)
    ids = partition.client_ids(options.clients) if dataset.layout is None else dataset.groups
    tasks, inside = _party_stages(dataset, options)
    parts = _parts(dataset, options, inside, Stream.of(seed, "split"))
    train, valid, tests = (
        [rows[there[rows]] for there in inside] for rows in (parts.train, parts.valid, parts.test)
    )
    holdings = [
        [Holding(*rows, piece) for rows in zip(train, valid, strict=True)] for piece in pieces
    ]
    if options.mode == "columns":
        present = Holding(train[0], valid[0], partition.NONE)
        holdings = [
            [replace(present, own=own) if len(own) else ABSENT for own in client]
            for client in columns_by_stage(pieces)
        ]
    partition.check_stages(options.stages, len(holdings[0]))
    scenario = partition.build_scenario(ids, holdings, [tests], tasks, common=partition.NONE)
    return replace(scenario, labels_at_server=True, joint_aug=options.joint_aug)


def _parts(
    dataset: Dataset, options: Options, inside: list[Array], stream: Stream
) -> partition.Parts:
    """Training, validation and test rows; rows of one person are all in one of them."""
    people = dataset.people
    if people is None:
        return partition.cut_all(dataset, options, stream)
    partition.check_shares(options.train, options.valid)
    stage = np.stack(inside).argmax(0)
    strata = stage * len(dataset.classes) + dataset.strata
    draws = stream.child("people").numpy()
    dealt = partition.cut_people(strata, people, options.train, options.valid, draws)
    return partition.Parts(*(np.flatnonzero(dealt == part) for part in range(3)))


def _party_stages(dataset: Dataset, options: Options) -> tuple[tuple[str, ...], list[Array]]:
    """The tasks, and for each which rows of the data set belong to it."""
    layout = dataset.layout
    if options.mode == "classes":
        classes, lists = len(dataset.classes), options.stage_classes
        stages = partition.class_stages(
            classes, options.stages, options.window, options.stride, lists
        )
        return partition.task_names(len(stages)), [
            np.isin(dataset.strata, kinds) for kinds in stages
        ]
    if layout is not None and layout.stages:
        if options.mode == "columns":
            raise partition.refusal(
                "rows come by stage, and columns too", "leave the stage out, or mode = 'columns'"
            )
        return layout.stages, [layout.stage == number for number in range(len(layout.stages))]
    return ("all",), [np.ones(len(dataset), dtype=bool)]


def _party_columns(dataset: Dataset, options: Options) -> list[Array]:
    """The columns of each client where rows are common to all."""
    if dataset.layout is not None:
        return [np.flatnonzero(mask) for mask in dataset.layout.held]
    order = partition.column_order(dataset, options.feature_seed)
    if options.clients > len(order):
        raise partition.refusal(
            f"{len(order):,} columns are too few for {options.clients:,} clients",
            "ask for fewer clients",
        )
    if options.cut in ("strips", "quadrants"):
        return _image_columns(dataset, options)
    return columns_of_parties(
        order if options.cut == "permuted" else np.sort(order), options.clients
    )


def _image_columns(dataset: Dataset, options: Options) -> list[Array]:
    """The pixels of each client, by their places in the flattened image."""
    if dataset.kind != "image":
        raise partition.refusal(
            f"cut = '{options.cut}' is for images and '{dataset.name}' is a {dataset.kind}",
            "choose cut = 'contiguous' or 'permuted'",
        )
    channels, height, width = dataset.x.shape[1:]
    if options.cut == "strips":
        if options.clients > width:
            raise partition.refusal(
                f"images {width} wide cannot be cut into {options.clients} strips",
                "ask for fewer clients",
            )
        return image_strips(channels, height, width, options.clients)
    if options.clients != 4 or min(height, width) < 2:
        raise partition.refusal(
            f"quadrants of {height} x {width} images are not for {options.clients} clients",
            "ask for 4 clients, and images of 2 x 2 or more",
        )
    return image_quadrants(channels, height, width)


def columns_of_parties(order: Array, clients: int) -> list[Array]:
    """Contiguous pieces of an order of columns, whose sizes differ by 1 at most."""
    return partition.columns_common_and_own(order, 0, clients)[1]


def image_strips(channels: int, height: int, width: int, clients: int) -> list[Array]:
    """Strips from left to right, of equal width but for the last, which takes the remainder."""
    pixels = np.arange(channels * height * width).reshape(channels, height, width)
    borders = [number * (width // clients) for number in range(1, clients)]
    return [strip.ravel() for strip in np.split(pixels, borders, axis=2)]


def image_quadrants(channels: int, height: int, width: int) -> list[Array]:
    """Upper left, upper right, lower left, lower right; the latter ones take the remainder."""
    pixels = np.arange(channels * height * width).reshape(channels, height, width)
    halves = np.split(pixels, [height // 2], axis=1)
    return [part.ravel() for half in halves for part in np.split(half, [width // 2], axis=2)]


def columns_by_stage(pieces: Sequence[Array]) -> list[list[Array]]:
    """For each client its columns at each stage: client k has none before stage k."""
    stages = range(len(pieces))
    return [
        [piece if stage >= number else partition.NONE for stage in stages]
        for number, piece in enumerate(pieces)
    ]


SPLIT = Split(Options, deal, vertical=True)
