"""Private alignment: what is common, in one order, and what the messages say."""

import sys
from pathlib import Path

import numpy as np
import pytest

from atoll import cli
from atoll.core.errors import UserError
from atoll.data.own.alignment import Sent, align, assume_aligned, normalised, read_ids

TABLES = {
    "bank": ["b-17", "a-03", "c-99", "secret-bank"],
    "phone": ["C-99 ", "secret-phone", "b-17", "a-03"],
    "shop": [" b-17", "c-99", "secret-shop"],
}


def needs_psi() -> None:
    pytest.importorskip("private_set_intersection", reason="the extra 'psi' is not installed")


def test_rows_are_aligned_at_every_party_whatever_their_order() -> None:
    needs_psi()
    made = align(TABLES, "bank")
    found = {
        name: [normalised(TABLES[name])[row] for row in rows] for name, rows in made.rows.items()
    }
    assert found == {name: ["b-17", "c-99"] for name in TABLES}
    for hub in ("phone", "shop"):
        other = align(TABLES, hub)
        assert all(np.array_equal(other.rows[name], rows) for name, rows in made.rows.items())


def content(sent: list[Sent], *parts: str) -> bytes:
    return b"".join(s.content for s in sent if {s.sender, s.receiver} & set(parts))


def test_no_message_has_an_id_in_it_common_or_not() -> None:
    needs_psi()
    sent = align(TABLES, "bank").sent
    assert [s.kind for s in sent] == ["setup", "request", "response"] * 2 + ["common"] * 2
    everything = content(sent, "bank")
    for table in TABLES.values():
        for id in table:
            for text in (id, id.strip().casefold()):
                assert text.encode() not in everything
    assert {s.receiver for s in sent} | {s.sender for s in sent} == set(TABLES)
    assert not [s for s in sent if "bank" not in (s.sender, s.receiver)]  # only with the hub


def test_what_a_party_is_told_in_the_end_is_the_result_and_no_more() -> None:
    needs_psi()
    common = [s.content for s in align(TABLES, "bank").sent if s.kind == "common"]
    assert all(len(told) == 32 + 2 * 32 for told in common)  # a salt and two digests


def test_ids_are_compared_exactly_where_asked() -> None:
    needs_psi()
    made = align({"a": ["X", "y"], "b": ["x", "y"]}, "a", exact=True)
    assert made.rows["a"].tolist() == made.rows["b"].tolist() == [1]


def test_nothing_in_common_is_said() -> None:
    needs_psi()
    with pytest.raises(UserError, match="no id is common"):
        align({"a": ["1"], "b": ["2"]}, "a")


def test_ids_are_normalised_by_space_case_and_unicode_form() -> None:
    assert normalised([" Ab", "\uff21b", "stra\u00dfe"]) == ["ab", "ab", "strasse"]
    assert normalised([" Ab"], exact=True) == [" Ab"]


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        (["1", "", " "], "2 empty ids, in rows 1, 2"),
        (["1", "2", "1 "], "1 ids come more than once: '1'"),
    ],
)
def test_bad_ids_are_named(ids: list[str], what: str) -> None:
    with pytest.raises(UserError, match=what):
        assume_aligned({"a": ids, "b": ids})


def test_bad_ids_are_named_before_anything_is_sent() -> None:
    needs_psi()
    with pytest.raises(UserError, match=r"come more than once.*shop"):
        align({"bank": ["1"], "shop": ["2", "2"]}, "bank")


def test_without_the_extra_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "private_set_intersection.python", None)
    with pytest.raises(UserError, match=r"pip install 'atoll\[psi\]'.*--assume-aligned"):
        align(TABLES, "bank")


def test_tables_that_are_aligned_are_taken_as_they_are_and_others_refused() -> None:
    made = assume_aligned({"a": ["1", "2"], "b": ["1 ", "2"]})
    assert made.rows["b"].tolist() == [0, 1]
    assert made.sent == []
    with pytest.raises(UserError, match=r"3 rows, but 'a' has 2.*b"):
        assume_aligned({"a": ["1", "2"], "b": ["1", "2", "3"]})
    with pytest.raises(UserError, match="row 0 has another id than in 'a'"):
        assume_aligned({"a": ["1", "2"], "b": ["2", "1"]})


def test_ids_are_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "bank.csv"
    path.write_text("id,age\n007,3\n7,4\n")
    assert read_ids(path, "id") == ["007", "7"]
    with pytest.raises(UserError, match=r"no column 'key'.*columns: id, age"):
        read_ids(path, "key")
    with pytest.raises(UserError, match="no such file"):
        read_ids(tmp_path / "none.csv", "id")


def test_ids_are_read_of_every_file_that_own_tables_may_be(tmp_path: Path) -> None:
    path = tmp_path / "bank.csv"
    for encoding in ("latin-1", "utf-16", "utf-8-sig"):
        path.write_text("kön; pid ;x\nmän; 7 ;1,5\nmän;Å8;2\n", encoding=encoding)
        assert read_ids(path, "pid") == [" 7 ", "Å8"]


def write(folder: Path) -> list[str]:
    paths = []
    for name, ids in TABLES.items():
        path = folder / f"{name}.csv"
        path.write_text("id,value\n" + "".join(f"{id},1\n" for id in ids))
        paths.append(str(path))
    return paths


def test_the_command_writes_an_index_file_for_each_party(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_psi()
    paths = write(tmp_path)
    out = tmp_path / "out"
    cli.app(["align", *paths, "--hub", paths[0], "--out", str(out)], standalone_mode=False)
    found = {path.name: path.read_text().split() for path in sorted(out.iterdir())}
    assert found["bank.index.csv"] == ["row", "0", "2"]
    assert found["phone.index.csv"] == ["row", "2", "0"]
    assert found["shop.index.csv"] == ["row", "0", "1"]


def test_the_command_refuses_tables_that_are_not_aligned_as_said(tmp_path: Path) -> None:
    paths = write(tmp_path)
    with pytest.raises(UserError, match=r"3 rows, but 'bank' has 4|row 0 has another id"):
        cli.app(["align", *paths, "--hub", paths[0], "--assume-aligned"], standalone_mode=False)


def test_many_ids_are_matched() -> None:
    """How long a hundred thousand take stands in docs/methods/vleto.md."""
    needs_psi()
    one = [f"customer-{n}" for n in range(4_000)]
    other = [f"customer-{n}" for n in range(2_000, 6_000)]
    made = align({"bank": one, "shop": other}, "bank")
    assert len(made.rows["bank"]) == len(made.rows["shop"]) == 2_000
    for mine, theirs in zip(made.rows["bank"], made.rows["shop"], strict=True):
        assert one[mine] == other[theirs]
