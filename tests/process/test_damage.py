"""A run's folder that is damaged anywhere: every command says so, or it does not matter."""

import random
from collections import Counter
from pathlib import Path

import pytest

from atoll.core.integrity import Integrity
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
        ended = damage.ask(name)
        said = damage.verdict(expected, ended)
        if what == "run/answer.json deleted":
            assert b"No verdict yet" in ended["report"].files["page.html"]
            said["report"] = "detected"
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


def test_without_digests_the_trial_finds_damage_that_nobody_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial itself is tried: it must be able to fail."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Integrity, "check", lambda *given: None)
    with pytest.raises(AssertionError, match="silent"):
        survive("fedavg", 0, 25)


def test_a_damaged_run_that_was_cut_is_told_or_goes_on_to_the_same_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage before the last checkpoint is told; what came after it is cut anyway."""
    monkeypatch.chdir(tmp_path)
    damage.write_data()
    damage.write_run("chfl")
    whole = {name: Path("pristine", name).read_bytes() for name in damage.SAME}
    damage.cut_run("chfl", rounds=1)
    draw, codes = random.Random(3), Counter[int]()
    for _ in range(25):
        damage.restore()
        what = damage.damage(draw)
        code, _, err = damage.call(*damage.RESUME)
        codes[code] += 1
        if code:
            assert damage.Ended(code, "", err, {}).refused, (what, err)
        else:
            assert {name: Path("run", name).read_bytes() for name in damage.SAME} == whole, what
    assert codes.keys() == {0, 2}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("name", damage.EXAMPLES)
def test_many_damages_are_told_or_do_not_matter(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    counts = survive(name, seed, 25)
    assert counts["detected"] > 25
