"""The verdict of a run as HTML for a notebook, without scripts or page styles."""

from importlib.resources import files
from zlib import crc32

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from atoll.report import palette, verdict
from atoll.report.tables import Group
from atoll.runs.result import title

__all__ = ["display"]

TONES = {"good": palette.COLOURS[2], "warn": palette.COLOURS[1], "none": palette.COLOURS[6]}


def display(group: Group) -> str:
    """The verdict card and the gain plot of a group of runs."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = (files("atoll") / "report" / "notebook.html").read_text(encoding="utf-8")
    card = verdict.card(group)
    folder = group.first.folder
    picture = verdict.picture(group, f"gain-{crc32(str(folder).encode()):08x}")
    return environment.from_string(template).render(
        card=card,
        colour=TONES[card.tone],
        picture=picture,
        svg=Markup(picture.svg) if picture else "",
        title=title(group.first),
        folder=folder if len(group.runs) == 1 else folder.parent,
    )
