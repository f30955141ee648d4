"""Sites of a vertical scenario: columns at the clients, labels at the server."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from atoll.core.federation import SERVER, Moment
from atoll.core.rng import Stream
from atoll.data import load
from atoll.data.scaling import Target
from atoll.data.site import Shelf, Site, View, balanced_weights, varied
from atoll.data.splits import columns, parties, rows, split
from atoll.data.vertical_site import VerticalSite, block


def sites(name: str, **options: Any) -> dict[str, VerticalSite]:
    """The sites of all clients, and of the server, by id."""
    dataset = load(name)
    made = split(dataset, parties.Options(**options), 0)
    train = made.holdings[made.clients[0]][0].train
    shelf = Shelf(dataset, "global", train, torch.device("cpu"), torch.float32)
    ids = (*made.clients, SERVER)
    return {id: VerticalSite(View(id, shelf, dataset, made, 0)) for id in ids}


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


def test_with_joint_aug_whole_images_are_changed_before_the_cut_anew_in_each_round() -> None:
    found = sites("digits", clients=4, cut="strips", joint_aug=True)
    server = found.pop(SERVER)
    assert server.lesson(Moment(0, 0, 2)) is server.train(0)
    lessons = [
        torch.cat([site.lesson(Moment(0, number, 2)).x for site in found.values()], -1)
        for number in (0, 1, 0)
    ]
    first = next(iter(found.values()))
    rows = first._scenario.holdings["site-0"][0].train
    images = torch.from_numpy(load("digits").x[rows])
    changed = varied(images, Stream.of(0, "joint_aug", 0, 0)).float() / 127.5 - 1
    assert torch.equal(lessons[0], changed)  # the strips are those of one changed image
    assert torch.equal(lessons[0], lessons[2])
    assert not torch.equal(lessons[0], lessons[1])
    plain = sites("digits", clients=4, cut="strips")
    for id, site in found.items():
        assert torch.equal(site.test(0).x, plain[id].test(0).x)
        assert torch.equal(site.train(0).x, plain[id].train(0).x)  # prototypes are of plain rows
        assert plain[id].lesson(Moment(0, 0, 2)) is plain[id].train(0)


def test_images_are_moved_whole_and_every_other_one_is_mirrored() -> None:
    image = torch.arange(1, 65, dtype=torch.uint8).reshape(1, 1, 8, 8).repeat(60, 2, 1, 1)
    found = varied(image, Stream.of(3))
    known = set()
    for one in found:
        assert torch.equal(one[0], one[1])  # channels go together
        for flip in (0, 1):
            whole = image[0, 0].flip(-1) if flip else image[0, 0]
            padded = torch.nn.functional.pad(whole, (1, 1, 1, 1))
            known |= {
                (flip, i, j) for i in range(3) for j in range(3)
                if torch.equal(one[0], padded[i : i + 8, j : j + 8])
            }  # fmt: skip
    assert len(known) == 18  # every move by a pixel, mirrored and not, and nothing else was needed
    assert torch.equal(found, varied(image, Stream.of(3)))


def test_a_test_row_is_fresh_in_the_first_task_that_has_it() -> None:
    server = sites("digits", clients=4, cut="strips", mode="classes", window=4, stages=3)[SERVER]
    assert server.fresh(0).all()
    for task in (1, 2):
        y = server.test(task).y
        assert torch.equal(server.fresh(task), y >= 2 * task + 2)  # 2 and 3, 4 and 5 came before


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
    made = split(dataset, rows.Options(clients=3), 0)
    shelf = Shelf(
        dataset, "global", made.holdings["site-0"][0].train, torch.device("cpu"), torch.float32
    )
    drawn = []

    def network(shape: tuple[int, ...], classes: int, stream: Stream) -> torch.nn.Module:
        drawn.append(stream)
        return torch.nn.Sequential(torch.nn.Linear(shape[0], classes), torch.nn.Dropout())

    views = [View(id, shelf, dataset, made, 0) for id in ("site-0", "site-1")]
    first, second = (Site(view, network) for view in views)
    outline = first.outline()
    assert outline is second.outline()
    assert len(drawn) == 1
    assert {w.device.type for w in outline.parameters()} == {"meta"}
    assert [n for n, _ in outline.named_parameters()] == [
        n for n, _ in first.model().named_parameters()
    ]
    assert outline.training
    assert not first.outline(training=False).training


def test_the_two_kinds_of_site_have_what_their_methods_need_and_no_more() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    both = {"train", "valid", "test", "inputs", "scaling", "target"}
    assert public(Site) & public(VerticalSite) == both
    assert public(VerticalSite) - both == {
        *("lesson", "fresh", "parties", "by_columns", "shape_of", "class_weights")
    }
    networks = {"model", "outline", "shared_model", "public", "probe"}
    assert public(Site) - both == {"before", "tasks", "stages"} | networks


@pytest.mark.parametrize("scale", ["local", "global", "none"])
def test_labels_of_regression_are_scaled_as_the_columns_are(scale: Any) -> None:
    """Local: by the site's own training rows; so nothing of the labels has to cross."""
    dataset = load("synthetic-table", rows=200, task="regression")
    scenario = split(dataset, columns.Options(clients=2), 0, "columns")
    train = np.concatenate([held[0].train for held in scenario.holdings.values()])
    shelf = Shelf(dataset, scale, train, torch.device("cpu"), torch.float64)
    for id, (held,) in scenario.holdings.items():
        site = Site(View(id, shelf, dataset, scenario, 0), lambda *_: torch.nn.Linear(1, 1))
        fit = dataset.y[{"local": held.train, "global": train}.get(scale, held.train)]
        mean, deviation = (0.0, 1.0) if scale == "none" else (fit.mean(), fit.std())
        assert (site.target.mean, site.target.deviation) == pytest.approx((mean, deviation))
        labels = site.train(0).y
        expected = (dataset.y[held.train] - mean) / deviation
        assert labels.tolist() == pytest.approx(expected.tolist())
        restored = site.target.restore(labels)
        assert restored.tolist() == pytest.approx(dataset.y[held.train].tolist())


def test_equal_labels_are_not_divided_by_zero() -> None:
    target = Target.of(torch.full((3,), 7.0))
    assert (target.mean, target.deviation) == (7.0, 1.0)
    assert Target.of(torch.zeros(0)) == Target(0.0, 1.0)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    y = torch.tensor([0, 0, 0, 2, 2, 4])
    expected = compute_class_weight("balanced", classes=np.array([0, 2, 4]), y=y.numpy())
    weights = balanced_weights(y, 5)
    assert weights[[0, 2, 4]].tolist() == pytest.approx(expected.tolist())
    assert weights[[1, 3]].tolist() == [1.0, 1.0]
