"""Harmonising twice is harmonising once; rows of one person are never dealt apart."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.data import splits
from atoll.data.dataset import Dataset, Layout
from atoll.data.own.harmonise import DateRule, Rules, Unit, harmonise
from atoll.data.partition import cut_people

CELLS = st.one_of(
    st.none(),
    st.sampled_from(["1", "1.0", "999", "-9", "45%", "yes", "Yes", "31.12.2023", "12/31/23", "?"]),
    st.dates().map(lambda day: day.strftime("%d.%m.%Y")),
    st.dates().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(str),
    st.text(max_size=5),
)
COLUMNS = ("a", "b", "y")
RULES = st.builds(
    Rules,
    labels=st.sampled_from([{}, {"1": "yes", "Yes": "yes"}, {"0": "no"}]),
    values=st.dictionaries(
        st.sampled_from(COLUMNS[:2]), st.sampled_from([{"1": "yes"}, {"Yes": "yes", "?": "no"}])
    ),
    units=st.dictionaries(
        st.sampled_from(COLUMNS[:2]),
        st.builds(Unit, st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.sampled_from(["", "%"])),
    ),
    missing=st.dictionaries(
        st.sampled_from(COLUMNS[:2]), st.lists(st.sampled_from(["999", "-9", "?"])).map(tuple)
    ),
    dates=st.dictionaries(
        st.sampled_from(COLUMNS[:2]),
        st.builds(
            DateRule,
            st.sampled_from(["", "day first", "month first", "%d.%m.%Y", "%Y%m%d"]),
            st.sampled_from(["", "2020-02-02", "b"]),
        ),
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=12), RULES, st.booleans())
def test_harmonising_is_idempotent(
    rows: list[tuple[str | None, ...]], rules: Rules, comma: bool
) -> None:
    columns = [pa.array(list(cells), pa.string()) for cells in zip(*rows, strict=True)]
    batch = pa.RecordBatch.from_arrays(columns, names=list(COLUMNS))
    once = harmonise(batch, rules, "y", comma)
    assert harmonise(once, rules, "y", comma).equals(once)
    if not rules.units:  # the others are by value, without a mark
        bare = once.replace_schema_metadata(None)
        assert harmonise(bare, rules, "y", comma).equals(once)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=200),
    st.sampled_from([(0.6, 0.2), (0.5, 0.0), (0.8, 0.2), (0.1, 0.1)]),
    st.integers(0, 1000),
)
def test_people_are_never_dealt_apart(
    rows: list[tuple[int, int]], shares: tuple[float, float], seed: int
) -> None:
    people, strata = np.array(rows).T
    parts = cut_people(strata, people, *shares, np.random.default_rng(seed))
    for person in np.unique(people):
        assert len({*parts[people == person].tolist()}) == 1
    possible = {0, 1, 2} if sum(shares) < 1 and shares[1] else {0, 1} if shares[1] else {0, 2}
    assert {*parts.tolist()} <= possible
    if len(np.unique(people)) >= 10:
        assert {*parts.tolist()} == possible


def _own_tables(rows: list[tuple[int, int, int]], sites: int, shared: bool) -> Dataset:
    """Rows of people at sites and stages; `shared`: a person may be at several sites."""
    people, stage, y = np.array(rows).T
    group = np.arange(len(rows)) % sites
    recipe: dict[str, Any] = {}
    held, numbers = np.ones((sites, 1), dtype=bool), np.ones(1, dtype=bool)
    layout = Layout(held, numbers, stage, ("one", "two"), recipe)
    x = np.zeros((len(rows), 1), dtype=np.float32)
    names = tuple(f"s{number}" for number in range(sites))
    return Dataset(
        "own", "table", x, y, ("x",), ("a", "b"), "drawn", group=group, groups=names,
        layout=layout, people=people if shared else people * sites + group,
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 1), st.integers(0, 1)),
        min_size=60, max_size=200,
    ),
    st.integers(1, 3), st.integers(0, 1000), st.sampled_from(["files", "parties"]), st.booleans(),
)  # fmt: skip
def test_no_person_of_own_tables_is_in_two_parts_whatever_the_stage(
    rows: list[tuple[int, int, int]], sites: int, seed: int, kind: str, shared: bool
) -> None:
    made = _own_tables(rows, sites, shared)
    if kind == "parties":
        assert made.layout is not None
        made = replace(made, group=None, layout=replace(made.layout, held=np.ones((1, 1), bool)))
        made = replace(made, groups=("p",))
    splitting = splits.load(kind)
    try:
        dealt = splitting.deal(made, splitting.options(), seed)
    except UserError:
        return  # too few people for a part of some stage: refused
    assert made.people is not None
    groups: list[set[int]] = [set(), set(), set()]
    for id in dealt.clients:
        held = dealt.holdings[id]
        parts = [
            np.concatenate([one.train for one in held]),
            np.concatenate([one.valid for one in held]),
            np.concatenate(dealt.tests[id]),
        ]
        for group, part in zip(groups, parts, strict=True):
            group.update(made.people[part].tolist())
    assert not groups[0] & groups[1]
    assert not groups[0] & groups[2]
    assert not groups[1] & groups[2]


@settings(max_examples=50, deadline=None)
@given(st.integers(30, 200), st.integers(0, 1000))
def test_people_with_a_row_each_are_dealt_in_proportion_by_class(count: int, seed: int) -> None:
    strata = np.arange(count) % 3
    parts = cut_people(strata, np.arange(count), 0.6, 0.2, np.random.default_rng(seed))
    for label in range(3):
        mine = parts[strata == label]
        for part, share in enumerate((0.6, 0.2, 0.2)):
            assert abs((mine == part).sum() - share * len(mine)) <= 1.5
