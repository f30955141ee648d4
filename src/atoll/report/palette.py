"""The colours of the report, distinguishable with and without colour vision deficiency.

Each theme has seven colours for marks, at least 3:1 against the background of figures, and colours
for text, at least 4.5:1. `tests/unit/report/test_palette.py` simulates deuteranopia and protanopia.
"""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["COLOURS", "DARK", "LIGHT", "ON_DARK", "variables"]

COLOURS = ("#2375cb", "#e26917", "#1d7c5a", "#1a3a55", "#7a2f8f", "#6a5700", "#868d97")
ON_DARK = ("#80b7ff", "#df7d34", "#3ac49f", "#bad7f2", "#9364c6", "#e3cf4a", "#7d8b9c")

LIGHT: Mapping[str, str] = MappingProxyType(
    {
        "paper": "#fbfcfd", "card": "#ffffff", "ink": "#1d2733", "soft": "#566374",
        "line": "#d5dce4", "accent": "#1b65a4", "tint": "#eaf3fb",
        "good": "#14664a", "warn": "#8f4300", "none": "#4d5a69",
        "good-tint": "#e6f4ee", "warn-tint": "#fdf0e4", "none-tint": "#eff2f5",
    }
)  # fmt: skip
DARK: Mapping[str, str] = MappingProxyType(
    {
        "paper": "#11161c", "card": "#19212a", "ink": "#e4eaf1", "soft": "#a3b0bf",
        "line": "#33404e", "accent": "#79baf2", "tint": "#1a2a3a",
        "good": "#5fd3ab", "warn": "#f5a35c", "none": "#b3bfcc",
        "good-tint": "#15302a", "warn-tint": "#35261a", "none-tint": "#222c37",
    }
)  # fmt: skip


def variables(theme: Mapping[str, str]) -> str:
    """The CSS custom properties of a theme."""
    marks = COLOURS if theme is LIGHT else ON_DARK
    colours = [f"--{name}:{colour}" for name, colour in theme.items()]
    numbered = [f"--mark-{number}:{colour}" for number, colour in enumerate(marks)]
    return "; ".join([*colours, *numbered])
