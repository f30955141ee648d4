"""Formats numbers: shares in percent, differences in percentage points, dashes for NaN."""

import math
from dataclasses import dataclass

__all__ = ["DASH", "SHARE", "Unit", "percent", "points", "size", "unit_of"]

DASH = "\u2013"  # an undefined value
PLAIN = ("mse", "rmse", "mae", "r2", "log loss", "log_loss", "brier", "brier score")


@dataclass(frozen=True)
class Unit:
    """The unit of a metric: the factors for values and differences, and their names."""

    factor: float = 100.0
    digits: int = 1
    value_name: str = " %"
    difference_name: str = " points"

    def value(self, number: float) -> str:
        """Format a value with its unit."""
        text = self.bare(number)
        return text if text == DASH else f"{text}{self.value_name}"

    def difference(self, number: float) -> str:
        """Format a difference with its sign and its unit."""
        text = self.signed(number)
        return text if text == DASH else f"{text}{self.difference_name}"

    def bare(self, number: float) -> str:
        """Format a value without its unit, for a column with the unit in its header."""
        if not math.isfinite(number):
            return DASH
        return f"{self._rounded(number):.{self.digits}f}"

    def signed(self, number: float) -> str:
        """Format a difference with its sign, without its unit."""
        if not math.isfinite(number):
            return DASH
        return f"{self._rounded(number):+.{self.digits}f}"

    def interval(self, low: float, high: float) -> str:
        """Format the limits of an interval of differences."""
        return f"{self.signed(low)} to {self.signed(high)}"

    def _rounded(self, number: float) -> float:
        return round(self.factor * number, self.digits) + 0.0  # avoid negative zero


SHARE = Unit()


def unit_of(metric: str, margin: float = math.nan) -> Unit:
    """Percent and points for shares; regression errors and losses stay as they are.

    With a margin, they have one digit more than it has zeros: labels may be small or large.
    """
    if metric.lower() not in PLAIN:
        return SHARE
    digits = 3
    if math.isfinite(margin) and margin > 0:
        digits = max(0, 1 - math.floor(math.log10(margin)))
    return Unit(1.0, digits, "", "")


def percent(share: float) -> str:
    """A share in percent."""
    return SHARE.value(share)


def points(difference: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return SHARE.difference(difference)


def size(count: float) -> str:
    """Bytes in human-readable units."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
