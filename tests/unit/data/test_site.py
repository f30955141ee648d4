"""Sites of a vertical scenario: columns at the clients, labels at the server."""

from typing import Any

import numpy as np
import pytest
import torch

from atoll.core.federation import SERVER
from atoll.core.rng import Stream
from atoll.data import load
from atoll.data.site import Shelf, Site, block
from atoll.data.splits import ScenarioOptions, scenario


def sites(name: str, **options: Any) -> dict[str, Site]:
    """The sites of all clients, and of the server, by id."""
    dataset = load(name)
    made = scenario(dataset, ScenarioOptions("parties", **options), 0)
    train = made.holdings[made.clients[0]][0].train
    shelf = Shelf(dataset, "global", train, torch.device("cpu"), torch.float32)

    def network(shape: tuple[int, ...], classes: int, stream: Stream) -> torch.nn.Module:
        raise AssertionError("a vertical method builds its own networks")

    return {id: Site(id, shelf, dataset, made, 0, network) for id in (*made.clients, SERVER)}


def test_a_party_sees_no_label_and_the_server_no_column() -> None:
    found = sites("synthetic-table", clients=3)
    server = found.pop(SERVER)
    for part in ("train", "valid", "test"):
        labels = getattr(server, part)(0)
        assert labels.x.numel() == labels.own.numel() == 0
        assert set(labels.y.tolist()) == set(range(len(server.classes)))
        for site in found.values():
            rows = getattr(site, part)(0)
            assert (rows.y == -1).all()
            assert len(rows) == len(labels)
            assert rows.x.shape[1:] == site.inputs()


def test_strips_side_by_side_are_the_image() -> None:
    found = sites("digits", clients=3, cut="strips")
    del found[SERVER]
    strips = [site.test(0).x for site in found.values()]
    assert [strip.shape[1:] for strip in strips] == [(1, 8, 2), (1, 8, 2), (1, 8, 4)]
    whole, rows = load("digits"), next(iter(found.values()))._scenario.tests["site-0"][0]
    image = torch.from_numpy(whole.x[rows]).float() / 127.5 - 1
    assert torch.equal(torch.cat(strips, -1), image)


def test_quadrants_keep_their_sides() -> None:
    found = sites("digits", clients=4, cut="quadrants")
    assert found["site-2"].train(0).x.shape[1:] == (1, 4, 4)


def test_a_party_that_has_not_joined_has_no_rows_to_learn_from() -> None:
    found = sites("digits", clients=4, cut="strips", mode="columns")
    late, server = found["site-2"], found[SERVER]
    assert [len(late.train(stage)) > 0 for stage in range(4)] == [False, False, True, True]
    assert len(late.test(0)) == len(server.test(0))  # tested only once it is there
    assert server.parties(1) == ["site-0", "site-1"]
    assert server.by_columns
    assert server.stages == 4
    assert not sites("digits", clients=4, cut="strips")[SERVER].by_columns


@pytest.mark.parametrize(
    ("columns", "shape"),
    [
        ([0, 1, 4, 5], (1, 2, 2)),  # a rectangle
        ([0, 1, 4], (3,)),
        ([1, 0, 4, 5], (4,)),  # in another order
        ([], (0,)),
    ],
)
def test_only_a_rectangle_keeps_its_sides(columns: list[int], shape: tuple[int, ...]) -> None:
    assert block(np.array(columns, dtype=np.int64), (1, 3, 4)) == shape


def test_the_outline_of_a_network_is_made_once_and_has_no_weights() -> None:
    dataset = load("synthetic-table")
    made = scenario(dataset, ScenarioOptions("rows", clients=3), 0)
    shelf = Shelf(
        dataset, "global", made.holdings["site-0"][0].train, torch.device("cpu"), torch.float32
    )
    drawn = []

    def network(shape: tuple[int, ...], classes: int, stream: Stream) -> torch.nn.Module:
        drawn.append(stream)
        return torch.nn.Sequential(torch.nn.Linear(shape[0], classes), torch.nn.Dropout())

    first, second = (Site(id, shelf, dataset, made, 0, network) for id in ("site-0", "site-1"))
    outline = first.outline()
    assert outline is second.outline()
    assert len(drawn) == 1
    assert {w.device.type for w in outline.parameters()} == {"meta"}
    assert [n for n, _ in outline.named_parameters()] == [
        n for n, _ in first.model().named_parameters()
    ]
    assert outline.training
    assert not first.outline(training=False).training
