"""Points are dealt into blocks of one shape and about one size."""

from pathlib import Path
from typing import Any

import pytest

from atoll.cluster.blocks import Block, Table, blocks
from atoll.cluster.options import cluster_options
from atoll.core.errors import UserError
from atoll.runs.sweep import Point, points

VALUES: dict[str, Any] = {
    "data": {"name": "wine"},
    "scenario": {"split": "rows", "clients": 2},
    "method": {"name": "fedavg"},
}


def members(**axes: list[Any]) -> list[Point]:
    return points(VALUES, axes, Path("nowhere"))


def test_every_point_is_in_one_block_and_a_block_has_one_shape() -> None:
    every = members(seed=list(range(10)), rate=[0.1, 0.2], clients=[2, 3])
    dealt = blocks(every, range(40), slots=2, most=0, gpus=False)
    assert sorted(n for block in dealt for n in block.points) == list(range(40))
    for block in dealt:
        assert len({every[n].config.scenario["clients"] for n in block.points}) == 1
    assert [len(block.points) for block in dealt] == [5] * 8  # 4 for each of the slots
    assert [block.number for block in dealt] == list(range(8))


def test_a_gpu_has_one_block_as_large_as_possible() -> None:
    every = members(seed=list(range(10)))
    assert [len(b.points) for b in blocks(every, range(10), 2, 0, gpus=True)] == [5, 5]
    assert [len(b.points) for b in blocks(every, range(10), 1, 4, gpus=True)] == [4, 4, 2]


def test_points_that_have_ended_are_left_out() -> None:
    dealt = blocks(members(seed=[0, 1, 2, 3]), [1, 3], 1, 0, gpus=False)
    assert [block.points for block in dealt] == [(1,), (3,)]


def test_the_share_of_a_table_counts_points() -> None:
    done = Block(0, (0, 1, 2), "done")
    half = Block(1, (3,), "running", rounds=5, of=10)
    table = Table([done, half])
    assert table.share == pytest.approx(3.5 / 4)
    table.began -= 70.0
    assert table.seconds_left == pytest.approx(10.0, rel=0.01)
    assert Table([Block(0, (0,))]).seconds_left is None


@pytest.mark.parametrize(
    "on", ["slurm", "ray:", "ray://", "ray://head", "ray://head:port", "ray://a:1/b", "Ray"]
)
def test_what_is_no_cluster_is_refused(on: str) -> None:
    with pytest.raises(UserError, match="no cluster"):
        cluster_options(on)


def test_an_address_and_parts_of_a_gpu() -> None:
    assert cluster_options("ray").address == ""
    assert cluster_options("ray://head-1.lan:6379", 0.5).address == "head-1.lan:6379"
    assert cluster_options("ray://[::1]:6379").name == "ray://[::1]:6379"
    for gpus in (-1.0, 1.5):
        with pytest.raises(UserError, match="cannot have"):
            cluster_options("ray", gpus)
    with pytest.raises(UserError, match="cannot have -1 points"):
        cluster_options("ray", points=-1)
