"""A section of the report: what the page adds about runs of some methods."""

from dataclasses import dataclass, field

from atoll.report.figures import Picture
from atoll.report.tables import Table

__all__ = ["Section"]


@dataclass(frozen=True)
class Section:
    """What the page adds about one group of runs, because of the method that they ran.

    A module with a section has `section(group, number)`, which returns one or None; `number`
    makes the names of its pictures unique.
    """

    title: str
    words: str
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
