"""A section of the report for runs of certain methods."""

from dataclasses import dataclass, field

from atoll.report.figures import Picture
from atoll.report.tables import Table

__all__ = ["Section"]


@dataclass(frozen=True)
class Section:
    """The additional content for one group of runs, depending on their method.

    A module with a section defines `section(group, number)`, which returns one or None; `number`
    makes the names of its pictures unique.
    """

    title: str
    words: str
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
