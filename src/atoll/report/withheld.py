"""Runs without the test results that an answer withholds, for the page.

The record on this machine stays complete; only the input of the page is reduced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from atoll.core.integrity import Integrity
from atoll.core.record import Event, Score, Snapshot
from atoll.report.answer import answer_of
from atoll.report.leakage import ATTACKS
from atoll.report.tables import Group, comparable
from atoll.runs.result import Run, left_out

__all__ = ["by_task", "without_withheld"]


@dataclass(frozen=True)
class ShownRun(Run):
    """A run without the test results of some sites."""

    whole: Run
    withheld: frozenset[str]

    @cached_property
    def integrity(self) -> Integrity:
        """That of the whole run."""
        return self.whole.integrity

    @cached_property
    def events(self) -> list[Event]:
        """All events but the scores of withheld sites."""
        return [
            event
            for event in self.whole.events
            if not (isinstance(event, Score) and event.client in self.withheld)
        ]

    @cached_property
    def snapshots(self) -> list[Snapshot]:
        """All snapshots but those of withheld sites that are no attacks."""
        return [
            snapshot
            for snapshot in self.whole.snapshots
            if snapshot.part not in self.withheld or snapshot.name in ATTACKS
        ]


def by_task(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups of the same task together, in the order of their first groups."""
    tasks: list[list[Group]] = []
    for group in groups:
        same = next((task for task in tasks if comparable(task[0], group)), None)
        if same is None:
            tasks.append([group])
        else:
            same.append(group)
    return tasks


def without_withheld(groups: Sequence[Group]) -> list[Group]:
    """Groups of one task without the results that their answers withhold.

    A group without an answer follows the answers of the others: it has the same test rows.
    """
    answers = [answer_of(group) for group in groups]
    every: dict[str, str] = {}
    for answer in answers:
        every |= answer.withheld if answer else {}
    return [
        _without(group, answer.withheld if answer else every)
        for group, answer in zip(groups, answers, strict=True)
    ]


def _without(group: Group, withheld: Mapping[str, str]) -> Group:
    if not withheld:
        return group
    sites = frozenset(withheld)
    runs = tuple(ShownRun(run.folder, run, sites) for run in group.runs)
    words = left_out(group.runs, withheld)
    return replace(group, runs=runs, withheld=dict(sorted(withheld.items())), left_out=words)
