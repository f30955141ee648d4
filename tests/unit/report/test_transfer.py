"""The transfer map says what the looks say."""

import math
from pathlib import Path

import pytest

from atoll.core.record import Snapshot
from atoll.engines.local import local_engine
from atoll.report import page, tables, transfer
from atoll.runs.config import change, read, resolve
from atoll.runs.execute import execute

NAN = math.nan
SNAPSHOTS = (
    Snapshot(1, "server", "slot", ("a", "b"), ("a task 0", "b task 0"), ((1.0, 0.0), (NAN, 0.0))),
    Snapshot(1, "server", "similarity", ("a", "b"), ("a task 0", "b task 0"),
             ((0.2, 0.7), (NAN, 0.4))),
    Snapshot(1, "a", "attention", ("conv3", "conv4", "merge"), ("0", "1"), ((3.0, -1.0), (3.0, 1.0),
                                                                       (9.0, 0.0))),
    Snapshot(1, "a", "left out", ("loss on validation rows", "accuracy on test rows"),
         ("nothing", "0", "1"), ((0.5, 0.75, 0.25), (0.9, 0.8, 0.95))),
    Snapshot(1, "b", "attention", ("conv3",), ("0", "1"), ((0.0, 0.0),)),
    Snapshot(1, "b", "left out", ("loss on validation rows", "accuracy on test rows"),
         ("nothing", "0", "1"), ((NAN, NAN, NAN), (0.9, 0.9, 0.9))),
)  # fmt: skip


def test_links_are_the_tasks_that_were_given_with_their_use() -> None:
    own, other, third = transfer.links(SNAPSHOTS)
    assert (own.client, own.source, own.source_stage, own.similarity) == ("a", "a", 0, 0.2)
    assert own.attention == pytest.approx(0.25)  # 1 of 3 + 1, in both sizes of filters
    assert (own.gain, own.points) == pytest.approx((-0.25, -0.05))  # better without it
    assert other.source == "b"
    assert other.attention == pytest.approx(0.75)
    assert (other.gain, other.points) == pytest.approx((0.25, 0.1))
    assert (third.client, third.source, third.points) == ("b", "b", 0.0)
    assert math.isnan(third.gain)
    assert third.used == 0.0


def test_without_snapshots_there_is_no_section(tmp_path: Path) -> None:
    values = {"rounds": 1, "data": "synthetic-text", "model.widths": [4], "looks": False}
    execute(
        resolve(change(read("fedseit"), {**values, "method.epochs": 1}), "x"),
        tmp_path / "r",
        local_engine,
    )
    (group,) = tables.gather([tmp_path / "r"])
    assert transfer.section(group, 1) is None


@pytest.mark.parametrize("transfer_by", ["previous", "sit"])
def test_a_page_has_the_map_the_curves_and_a_row_for_each_link(
    transfer_by: str, tmp_path: Path
) -> None:
    values = {
        "rounds": 2, "data": "synthetic-text", "model.widths": [4], "method.epochs": 1,
        "stages": 3, "score_every": 1, "method.transfer": transfer_by, "method.keep": 2,
    }  # fmt: skip
    execute(resolve(change(read("fedseit"), values), "x"), tmp_path / "run", local_engine)
    (group,) = tables.gather([tmp_path / "run"])
    section = transfer.section(group, 1)
    assert section is not None
    found = transfer.links(group.first.snapshots)
    assert len(found) == 2 * 3 * (2 if transfer_by == "sit" else 3)  # tasks, clients, slots
    assert all(link.source_stage < link.stage for link in found)
    assert len(section.tables[0].rows) == len(found)
    assert [picture.name for picture in section.pictures] == ["transfer-1", "course-1"]
    assert section.pictures[0].svg.count("<path") >= len(found)
    shown = page.page([group])
    assert "Transfer between sites" in shown
    assert shown == page.page([group])
    course = transfer._tests(group)["site-0"]
    assert [len(course[task]) for task in range(3)] == [6, 4, 2]  # after each round
