"""Small computations of the core beside plain ones: hashes, exit codes, errors, refusals."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from atoll.core import errors
from atoll.core.errors import BadMessageError, UserError
from atoll.core.federation import Moment, kinds
from atoll.core.messages import Empty, Tensors, pack, unpack
from atoll.core.options import AtLeastOne, build
from atoll.core.outputs import may_write
from atoll.core.record import Snapshot, read_snapshots
from atoll.core.rng import Stream, hashes, normals, permutations, uniforms
from atoll.core.rows import Rows

MASK = (1 << 64) - 1


def splitmix(key: int, number: int) -> int:
    """The finaliser in whole numbers of Python, as an unsigned number."""
    bits = (key + (number + 1) * 0x9E3779B97F4A7C15) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


@pytest.mark.parametrize("key", [0, 1, 12345, -1, (1 << 63) - 1])
def test_hashes_are_those_of_whole_numbers_in_python(key: int) -> None:
    found = hashes(torch.tensor(key), torch.arange(5)).tolist()
    assert [bits & MASK for bits in found] == [splitmix(key & MASK, n) for n in range(5)]


def test_draws_are_made_of_the_hashes() -> None:
    key = torch.tensor(7)
    plain = [((splitmix(7, n) >> 11) + 0.5) / 2**53 for n in range(4)]
    assert uniforms(key, (4,)).tolist() == pytest.approx(plain, rel=1e-6)
    lengths, angles = plain[:2], plain[2:]
    expected = [
        math.sqrt(-2 * math.log(r)) * math.cos(2 * math.pi * a)
        for r, a in zip(lengths, angles, strict=True)
    ]
    assert normals(key, (2,)).tolist() == pytest.approx(expected, rel=1e-5)
    signed = [b - (1 << 64) if b >> 63 else b for b in (splitmix(7, n) for n in range(6))]
    order = sorted(range(6), key=signed.__getitem__)
    assert Stream(7).permutation(6).tolist() == order
    assert permutations(torch.tensor([7, 8]), 6)[0].tolist() == order


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), True),
        (RuntimeError("the shapes do not fit"), False),
    ],
)
def test_an_error_is_about_memory_by_its_kind_or_its_words(
    error: Exception, is_memory: bool
) -> None:
    assert errors.out_of_memory(error) is is_memory


def test_rows_have_all_columns_side_by_side_for_several_members_too() -> None:
    x, own, y = torch.zeros(4, 3, 2), torch.ones(4, 3, 1), torch.zeros(4, 3, dtype=torch.int64)
    rows = Rows(x, own, y)
    assert len(rows) == 3
    assert rows.all.shape == (4, 3, 3)
    assert rows.all[0, 0].tolist() == [0, 0, 1]
    assert Rows(x, own[..., :0], y).all is x


def test_exit_codes_are_those_that_scripts_rely_on() -> None:
    codes = {name: getattr(errors, name) for name in errors.__all__ if name.startswith("EXIT_")}
    assert codes == {
        "EXIT_DONE": 0,
        "EXIT_OUR_FAULT": 1,
        "EXIT_USER": 2,
        "EXIT_DATA_MISSING": 3,
        "EXIT_SITE_FAILED": 4,
        "EXIT_INTERRUPTED": 130,
    }


@dataclasses.dataclass(frozen=True)
class Choice:
    count: AtLeastOne = 1


def test_a_complaint_begins_with_a_small_letter_and_is_whole() -> None:
    with pytest.raises(UserError) as caught:
        build(Choice, {"count": 0}, "[method]")
    remedy = "input should be greater than or equal to 1"
    assert str(caught.value) == f"option 'count' cannot be 0 ([method]): {remedy}"


@dataclasses.dataclass(frozen=True)
class Said:
    share: float
    flags: torch.Tensor
    weights: Tensors


def said(share: float = 0.5, weight: float = 1.0) -> Said:
    return Said(share, torch.tensor([True, False]), {"w": torch.tensor([weight])})


def test_truth_values_of_0_and_1_pass_and_others_are_refused() -> None:
    found = unpack(pack(said()), Said, "site")
    assert found.flags.tolist() == [True, False]
    broken = said()
    broken.flags.view(torch.uint8)[1] = 2
    with pytest.raises(BadMessageError, match="truth values beyond 0 and 1"):
        unpack(pack(broken), Said, "site")


def test_numbers_that_are_not_finite_are_refused_and_large_ones_are_not() -> None:
    with pytest.raises(BadMessageError, match="not finite"):
        unpack(pack(said(weight=math.inf)), Said, "site")
    large = unpack(pack(said(weight=3e38)), Said, "site")
    assert large.weights["w"].item() == pytest.approx(3e38)


GOOD: dict[str, object] = {
    "stage": 0,
    "part": "s",
    "name": "n",
    "rows": ["a"],
    "columns": ["b"],
    "values": [[1]],
}


@pytest.mark.parametrize("wrong", [{"stage": -1}, {"rows": [1]}, {"values": [["1"]]}])
def test_a_snapshot_with_one_fault_is_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "looks.jsonl").write_text(json.dumps(GOOD) + "\n")
    assert list(read_snapshots(tmp_path)) == [Snapshot(0, "s", "n", ("a",), ("b",), ((1,),))]
    (tmp_path / "looks.jsonl").write_text(json.dumps(GOOD | wrong) + "\n")
    with pytest.raises(UserError):
        list(read_snapshots(tmp_path))


def test_a_file_is_written_where_none_is_or_an_empty_or_an_earlier_one(tmp_path: Path) -> None:
    def refused(out: Path, *inputs: Path) -> str:
        try:
            may_write(out, inputs, [tmp_path / "run"], lambda old: old.startswith(b"ours"))
        except UserError as error:
            return str(error).split(" (")[0]
        return ""

    (tmp_path / "run").mkdir()
    new, empty, ours, other = (tmp_path / name for name in ("new", "empty", "ours", "other"))
    empty.write_bytes(b"")
    ours.write_bytes(b"ours and more")
    other.write_bytes(b"a thesis")
    assert [refused(path) for path in (new, empty, ours)] == ["", "", ""]
    assert refused(other) == "the file is there already"
    assert refused(tmp_path / "run").startswith("a folder")
    assert refused(ours, ours) == "the file to be written is one that is read"
    assert refused(tmp_path / "run" / "config.toml") == (
        "the file to be written is one of the run's own"
    )
    assert refused(tmp_path / "config.toml") == ""


def test_what_takes_no_message_is_no_action() -> None:
    def snapshot(moment: Moment) -> Empty:
        return Empty()

    def fit(request: Said, moment: Moment) -> Empty:
        return Empty()

    assert kinds(fit) == (Said, Empty)
    with pytest.raises(BadMessageError, match="'snapshot' is not an action"):
        kinds(snapshot)


def test_of_a_file_that_may_be_ours_the_first_mebibyte_is_looked_at(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    out.write_bytes(b"x" * (3 << 20))
    may_write(out, [], [], lambda old: len(old) == 1_048_576)
