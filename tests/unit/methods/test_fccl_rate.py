"""How FCCL's step shrinks over rounds."""

import pytest

from atoll.core.federation import Moment
from atoll.methods.fccl import Options, rate


def test_a_linear_rate_falls_to_a_tenth_and_a_constant_one_stays() -> None:
    falling = Options(rate=2.0, rate_decay="linear")
    rates = [rate(falling, Moment(0, number, 10)) for number in (0, 5, 9)]
    assert rates == pytest.approx([2.0, 2.0 * 0.55, 2.0 * 0.19])
    assert rate(Options(rate=2.0, rate_decay="none"), Moment(0, 5, 10)) == 2.0
