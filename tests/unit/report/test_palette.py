"""The colours: told apart with colour vision deficiency, and legible on both themes."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from atoll.report import palette
from atoll.report.palette import COLOURS, DARK, LIGHT, ON_DARK

Array = np.ndarray[Any, Any]
# Machado, Oliveira and Fernandes, 2009: full deuteranopia and protanopia, linear RGB
VISION: Mapping[str, Any] = {
    "normal": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
}  # fmt: skip
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip
APART = 19.0  # CIE76; 2.3 can just be noticed side by side


def linear(colour: str) -> Array:
    """sRGB to linear RGB."""
    share = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def lab(rgb: Array) -> Array:
    """Linear RGB to CIELAB with the white of sRGB."""
    ratio = XYZ @ np.clip(rgb, 0, 1) / (XYZ @ np.ones(3))
    root = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    x, y, z = root
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    light, dark = sorted((float(XYZ[1] @ linear(c)) for c in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_black_on_white_has_the_highest_contrast_and_grey_confuses_nobody() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)
    for matrix in VISION.values():
        assert np.array(matrix) @ np.ones(3) == pytest.approx(np.ones(3), abs=1e-5)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("colours", [COLOURS, ON_DARK], ids=["light", "dark"])
def test_marks_are_apart_for_every_reader(colours: tuple[str, ...], vision: str) -> None:
    seen = [lab(np.array(VISION[vision]) @ linear(colour)) for colour in colours]
    for (one, first), (other, second) in combinations(zip(colours, seen, strict=True), 2):
        assert float(np.linalg.norm(first - second)) >= APART, (one, other)


def test_colours_that_were_too_close_would_be_noticed() -> None:
    seen = [lab(np.array(VISION["deuteranopia"]) @ linear(c)) for c in ("#3b82c4", "#8a6fc9")]
    assert float(np.linalg.norm(seen[0] - seen[1])) < APART


@pytest.mark.parametrize(("theme", "marks"), [(LIGHT, COLOURS), (DARK, ON_DARK)])
def test_marks_stand_out_from_the_background(
    theme: Mapping[str, str], marks: tuple[str, ...]
) -> None:
    for mark in marks:
        assert contrast(mark, theme["card"]) >= 3, mark


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read(theme: Mapping[str, str]) -> None:
    grounds = {
        "ink": ("paper", "card", "tint", "good-tint", "warn-tint", "none-tint"),
        "soft": ("paper", "card", "tint", "good-tint", "warn-tint", "none-tint"),
        "accent": ("paper", "card", "good-tint", "warn-tint", "none-tint"),
        "good": ("card", "good-tint"), "warn": ("card", "warn-tint"), "none": ("card", "none-tint"),
        "card": ("accent",),  # the chosen tab
    }  # fmt: skip
    for text, behind in grounds.items():
        for ground in behind:
            assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
    assert contrast("#ffffff", "#12466d") >= 4.5  # the header


def test_each_theme_defines_every_colour() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert palette.variables(LIGHT).count("--mark-") == len(COLOURS) == len(ON_DARK)
