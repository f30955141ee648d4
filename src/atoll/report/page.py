"""Renders records as one self-contained HTML page."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from atoll.core.outputs import may_write
from atoll.core.record import disk_errors, write_whole
from atoll.metrics import scores as metrics
from atoll.report import palette, tables, verdict
from atoll.report.figures import BEGINNING, Picture
from atoll.report.story import stories
from atoll.report.tables import Group

__all__ = ["page", "pictures", "resource", "style_sheet", "write"]

TITLE = " · atoll</title>"  # marks a page as a report


def write(folders: Sequence[Path], out: Path, figure_folder: Path | None = None) -> Path:
    """Write the page of some runs, and its figures as files if a folder is given."""
    groups = tables.gather(folders)
    may_write(out, [], folders, lambda head: TITLE.encode() in head)
    if figure_folder:
        with disk_errors(figure_folder):
            figure_folder.mkdir(parents=True, exist_ok=True)
        drawings = {figure_folder / f"{one.name}.svg": one.svg for one in pictures(groups)}
        start = BEGINNING.encode()
        for path in drawings:
            may_write(path, [], folders, lambda head: head.startswith(start), "--figures")
        for path, content in drawings.items():
            write_whole(path, content.replace("currentColor", "#1d2733").encode())
    write_whole(out, page(groups).encode())
    return out


def resource(name: str) -> str:
    """A file in this package: a template, a style sheet or a script."""
    return (files("atoll") / "report" / name).read_text(encoding="utf-8")


def page(groups: Sequence[Group]) -> str:
    """Render the page: a pure function of the records."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = _inline
    return environment.from_string(resource("page.html")).render(
        title=_title(groups),
        stories=stories(groups),
        definitions=_definitions(groups),
        style=Markup(style_sheet()),
        script=Markup(resource("page.js")),
    )


def _definitions(groups: Sequence[Group]) -> dict[str, str]:
    """The definition of each metric; includes those of regression if a run has them."""
    numbers = any(group.first.regression for group in groups)
    return {**metrics.DEFINITIONS, **(metrics.REGRESSION if numbers else {})}


def style_sheet() -> str:
    """The style of the page: the colours of both themes, and the rules."""
    light, dark = palette.variables(palette.LIGHT), palette.variables(palette.DARK)
    themes = (
        f":root {{ {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )
    return themes + resource("page.css")


def _inline(picture: Picture) -> Markup:
    """An inline figure; its colours follow the theme."""
    drawing = picture.svg
    for number, colour in enumerate(palette.COLOURS):
        drawing = drawing.replace(colour, f"var(--mark-{number})")
    return Markup(drawing)


def pictures(groups: Sequence[Group]) -> list[Picture]:
    """All figures of the page, including the gain plot."""
    pictures = [verdict.picture(group, f"gain-{n}") for n, group in enumerate(groups, 1)]
    for story in stories(groups):
        pictures += story.pictures
    return [picture for picture in pictures if picture]


def _title(groups: Sequence[Group]) -> str:
    names = ", ".join(dict.fromkeys(group.method for group in groups))
    data = ", ".join(dict.fromkeys(str(g.first.facts["data"]["title"]) for g in groups))
    return f"{names} on {data}"
