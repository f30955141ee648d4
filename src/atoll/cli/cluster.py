"""Sweeps on a cluster: the connection for `--on`, and the live table of blocks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from atoll.cli.console import err
from atoll.cluster.blocks import STATES, Block, Table
from atoll.cluster.driver import ClusterSweep
from atoll.cluster.options import cluster_options, ray_installed
from atoll.core.errors import EXIT_SITE_FAILED, UserError, printable
from atoll.runs.pace import duration, one_line

__all__ = ["BlockTable", "on_cluster", "points_failed"]

MOST_ROWS = 20  # maximum blocks in the live table; running and failed ones come first


class BlockTable:
    """Shows running blocks: live on a terminal, one line per change in a log."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.last = quiet, ""
        self.live = Live(console=err, transient=True) if err.is_terminal and not quiet else None

    def __enter__(self) -> "BlockTable":
        if self.live:
            self.live.start()
            self.live.update(one_line(err, "checking the nodes of the cluster"))
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, table: Table) -> None:
        """Show the state of all blocks."""
        if self.quiet:
            return
        counts = _counts(table)
        if self.live:
            self.live.update(Group(_grid(table), one_line(err, f"{counts}  {_left(table)}")))
        elif counts != self.last:
            self.last = counts
            err.print(f"{counts}  {_left(table)}", soft_wrap=True)


def _counts(table: Table) -> str:
    listed = [f"{count} {state}" for state in STATES if (count := table.count(state))]
    before = f", {table.finished} points had ended before" if table.finished else ""
    return f"{len(table.blocks)} blocks: {', '.join(listed)}{before}"


def _left(table: Table) -> str:
    left = table.seconds_left
    return f"{duration(left)} left" if left is not None else ""


def _grid(table: Table) -> Grid:
    """One row per block; for a large sweep running, failed and next blocks."""
    order = {"running": 0, "failed": 1, "interrupted": 2, "waiting": 3, "done": 4}
    rows = sorted(table.blocks, key=lambda block: (order[block.state], block.number))
    grid = Grid(box=None, pad_edge=False)
    for name in ("block", "points", "state", "node", "rounds", "attempts"):
        grid.add_column(name)
    for block in sorted(rows[:MOST_ROWS], key=lambda block: block.number):
        grid.add_row(*map(Text, _cells(block)))
    return grid


def _cells(block: Block) -> list[str]:
    rounds = f"{block.rounds}/{block.of}" if block.of else ""
    attempts = str(block.attempts) if block.attempts else ""
    where = printable(block.where)
    return [str(block.number), str(len(block.points)), block.state, where, rounds, attempts]


@contextmanager
def on_cluster(
    on: str,
    gpus: float | None = None,
    points: int = 0,
    shared: bool = True,
    quiet: bool = False,
    count_steps: bool = False,
) -> Iterator[ClusterSweep | None]:
    """The function that runs sweeps on the cluster named by `--on`; None without `--on`."""
    if not on:
        asked = {"--gpus-per-block": gpus is not None, "--points-per-block": points > 0}
        for flag, is_set in (asked | {"--no-shared-folder": not shared}).items():
            if is_set:
                raise UserError(f"{flag} without a cluster", flag, "add --on ray")
        yield None
        return
    options = cluster_options(on, gpus, points, shared)
    with ray_installed():
        from atoll.cluster.ray import cluster_sweep  # noqa: PLC0415 - only where it is asked for
    with (
        BlockTable(quiet) as blocks,
        cluster_sweep(options, blocks.show, count_steps) as sweeper,
    ):
        yield sweeper


def points_failed(failed: Mapping[int, BaseException], names: list[str], again: str) -> UserError:
    """Points that failed, by name, with the first reason and the command that runs them again."""
    numbers = sorted(failed)
    first = f"{names[numbers[0]]}: {printable(str(failed[numbers[0]]))}"
    what = f"{len(failed)} of {len(names)} points failed; {first}"
    where = ", ".join(names[number] for number in numbers)
    return UserError(what, where, f"fix the cause, then run them again: {again}", EXIT_SITE_FAILED)
