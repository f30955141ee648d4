"""A run's folder that is damaged anywhere: every command says so, or it does not matter."""

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.process import damage

pytestmark = pytest.mark.process


def survive(name: str, seed: int, count: int) -> Counter[str]:
    """Damage an example in many ways; what the commands made of it."""
    damage.write_data()
    damage.write_run(name)
    expected = damage.ask(name)
    assert all(ended.code == 0 and ended.files for ended in expected.values()), expected
    draw, counts, wrong = random.Random(f"{name} {seed}"), Counter[str](), []
    for _ in range(count):
        damage.restore()
        what = damage.damage(draw)
        said = damage.verdict(expected, damage.ask(name))
        counts.update(said.values())
        wrong += [(what, command, word) for command, word in said.items() if len(word) > 8]
    assert not wrong, "\n".join(map(str, wrong))
    return counts


@pytest.mark.parametrize("name", damage.EXAMPLES)
def test_a_damaged_folder_is_told_or_it_does_not_matter(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    counts = survive(name, 0, 25)
    assert counts["detected"] > 25


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("name", damage.EXAMPLES)
def test_many_damages_are_told_or_do_not_matter(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    counts = survive(name, seed, 25)
    assert counts["detected"] > 25
