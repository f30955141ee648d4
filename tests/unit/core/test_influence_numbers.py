"""Bounded influence in numbers: sizes, references and bounds, worked out by hand."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from atoll.core.annotations import Bounded, Outputs, RowCount, SharedWeights, Update
from atoll.core.influence import Guard, RobustOptions, implausible_state
from atoll.core.messages import Tensors, Weights
from atoll.families.vertical import Embedded

ROW = torch.float64


@dataclass(frozen=True)
class Fitted:
    weights: Annotated[Tensors, Update(of="weights")]


@dataclass(frozen=True)
class Counted:
    rows: Annotated[int, RowCount()]


@dataclass(frozen=True)
class Both:
    weights: Annotated[Tensors, Update(of="weights")]
    rows: Annotated[int, RowCount()]


@dataclass(frozen=True)
class Said:
    logits: Annotated[Tensors, Outputs()]


@dataclass(frozen=True)
class Answered:
    logits: Annotated[Tensor, Outputs()]


@dataclass(frozen=True)
class Trusted:
    trust: Annotated[Tensor, Bounded(-1.0, 2.0)]


@dataclass(frozen=True)
class Shared:
    weights: Annotated[Tensors, SharedWeights()]


def guard(quorum: bool = True, rows: Any = None, **options: Any) -> Guard:
    return Guard(RobustOptions(**options), quorum, rows)


def update(*values: float) -> Fitted:
    return Fitted({"w": torch.tensor(values, dtype=ROW)})


def zeros(like: Tensors) -> Weights:
    return Weights({name: torch.zeros_like(tensor) for name, tensor in like.items()})


def wrong(judge: Guard, *replies: Any, stage: int = 0) -> dict[str, str]:
    """Who is left out, and why; clients are a, b, c and so on, and updates begin at zero."""
    named = dict(zip("abcdefgh", replies, strict=False))
    requests = {id: zeros(getattr(reply, "weights", {})) for id, reply in named.items()}
    return {id: e.reason for id, e in judge.faults("act", stage, requests, named).items()}


@pytest.mark.parametrize(("asked", "least"), [(1, 2), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4)])
def test_more_than_half_and_at_least_two_must_remain_or_as_many_as_the_option_says(
    asked: int, least: int
) -> None:
    assert guard().least(asked) == least
    assert guard(at_least=7).least(asked) == 7


def test_nobody_answers_and_nobody_is_judged() -> None:
    assert guard().faults("fit", 0, {}, {}) == {}
    assert guard(rule="clip").bounded({}, {}) == {}


def test_an_update_is_compared_with_the_lower_median_of_those_that_move() -> None:
    """Lengths are over all tensors: (3, 4) and 12 give 13."""
    judge = guard()
    one = Fitted({"v": torch.tensor([3.0, 4.0]), "w": torch.tensor([12.0])})
    others = [Fitted({"v": torch.tensor([0.0, s]), "w": torch.zeros(1)}) for s in (4.0, 5.0, 0.0)]
    last = Fitted({"v": torch.tensor([0.0, 50.0]), "w": torch.zeros(1)})
    assert not wrong(judge, one, *others)  # of 4, 5 and 13 the median is 5
    assert judge.ratios == {"act.weights": pytest.approx(13 / 5)}
    assert wrong(judge, one, *others, last) == {
        "e": "its 'weights' are 10 times as large as the round's median"  # of 4, 5, 13, 50: 5
    }


def test_an_update_of_exactly_the_factor_is_allowed() -> None:
    assert not wrong(guard(), *[update(1.0)] * 3, update(5.0))
    assert list(wrong(guard(), *[update(1.0)] * 3, update(5.5))) == ["d"]


def test_two_moving_updates_have_no_median_and_three_have() -> None:
    assert not wrong(guard(), update(1.0), update(100.0), update(0.0))
    assert list(wrong(guard(), update(1.0), update(1.0), update(100.0))) == ["c"]


def test_without_a_median_the_largest_that_a_site_sent_before_is_the_reference() -> None:
    judge = guard()
    for size in (2.0, 10.0, 1.0, 50.0):  # each at most five times the largest so far
        assert not wrong(judge, update(1.0), update(size))
    assert list(wrong(judge, update(1.0), update(251.0))) == ["b"]
    assert not wrong(judge, update(1.0), update(250.0))  # what was refused is not remembered
    assert judge.ratios["act.weights"] == pytest.approx(251 / 50)


def test_the_median_of_updates_is_that_of_the_round() -> None:
    judge = guard()
    assert not wrong(judge, *[update(4.0)] * 3)
    assert list(wrong(judge, *[update(1.0)] * 3, update(20.0))) == ["d"]


def test_a_first_answer_has_no_ratio_and_a_later_one_that_to_the_largest_before() -> None:
    judge = guard()
    assert not wrong(judge, update(2.0))
    assert judge.ratios == {"act.weights": 0.0}
    assert not wrong(judge, update(1.0))
    assert judge.ratios == {"act.weights": 0.5}


def test_an_answer_without_tensors_has_no_length() -> None:
    judge = guard()
    assert not wrong(judge, *[Shared({})] * 3)
    assert judge.ratios == {"act.weights": 0.0}


def test_sizes_are_remembered_by_field_and_by_site() -> None:
    judge = guard()
    assert not wrong(judge, update(1.0), update(100.0))
    assert list(wrong(judge, update(100.0), update(100.0))) == ["a"]
    requests, replies = {"a": Weights({"w": torch.zeros(1, dtype=ROW)})}, {"a": update(100.0)}
    assert judge.faults("other", 0, requests, replies) == {}


def both(length: float, rows: int) -> Both:
    return Both({"w": torch.tensor([length], dtype=ROW)}, rows)


def test_an_update_may_be_longer_by_the_root_of_the_rows_above_the_median() -> None:
    """Four times the rows: twice the length. Fewer rows than the median: no less."""
    rows = {"a": [10], "b": [10], "c": [40], "d": [1]}
    usual = (both(1.0, 10), both(1.0, 10))
    assert not wrong(guard(rows=rows), *usual, both(10.0, 40), both(5.0, 1))
    assert list(wrong(guard(rows=rows), *usual, both(10.5, 40), both(1.0, 1))) == ["c"]
    assert list(wrong(guard(rows=rows), *usual, both(1.0, 40), both(5.5, 1))) == ["d"]


def test_a_median_of_one_row_is_one_row() -> None:
    rows = {"a": [1], "b": [1], "c": [1], "d": [4]}
    usual = [both(1.0, 1)] * 3
    assert not wrong(guard(rows=rows), *usual, both(9.9, 4))


def test_answers_that_are_left_out_have_no_say_in_the_median() -> None:
    """Of 1, 1, 1, 8 the median is 1; with three of 100, which have impossible rows, it is 8."""
    replies = [both(1.0, 5)] * 3 + [both(8.0, 5)] + [both(100.0, -1)] * 3
    reasons = wrong(guard(), *replies)
    assert sorted(reasons) == ["d", "e", "f", "g"]
    assert "times as large" in reasons["d"]


def test_answers_that_are_left_out_have_no_say_in_the_usual_form() -> None:
    def named(name: str, rows: int) -> Both:
        return Both({name: torch.ones(1, dtype=ROW)}, rows)

    reasons = wrong(guard(), *[named("v", 5)] * 2, *[named("w", -1)] * 3)
    assert sorted(reasons) == ["c", "d", "e"]


def test_answers_of_another_form_have_no_say_in_the_median() -> None:
    replies = [Answered(torch.full((2, 1), size)) for size in (1.0, 1.0, 1.0, 8.0)]
    others = [Answered(torch.full((2, 2), 100.0))] * 3
    reasons = wrong(guard(), *replies, *others)
    assert sorted(reasons) == ["d", "e", "f", "g"]
    assert "times as large" in reasons["d"]


def test_a_state_is_measured_by_the_updates_that_were_accepted_last() -> None:
    """d once sent a length of 4; now it is left out, and the longest accepted one is 1."""
    judge = guard()
    assert not wrong(judge, *[update(1.0)] * 3, update(4.0))
    assert judge.beyond({"w": torch.tensor([20.0], dtype=ROW)}) == ""
    assert list(wrong(judge, *[update(1.0)] * 3, update(100.0))) == ["d"]
    assert judge.beyond({"w": torch.tensor([5.0], dtype=ROW)}) == ""  # exactly the factor
    assert judge.beyond({"w": torch.tensor([5.5], dtype=ROW)})


def test_rows_that_a_site_tells_lengthen_its_update_four_times_at_most() -> None:
    usual = [both(1.0, 10)] * 3
    assert not wrong(guard(), *usual, both(19.5, 160))
    assert not wrong(guard(), *usual, both(19.5, 9000))
    assert list(wrong(guard(), *usual, both(20.5, 9000))) == ["d"]
    known = {"d": [9000]}  # 30 times the root
    assert not wrong(guard(rows=known), *usual, both(149.0, 9000))


def test_rows_of_a_stage_are_those_of_that_stage() -> None:
    rows = {"a": [10, 20]}
    judge = guard(rows=rows)
    assert not wrong(judge, Counted(20), stage=1)
    assert "21 rows, more than the 20" in wrong(judge, Counted(21), stage=1)["a"]
    assert "11 rows, more than the 10" in wrong(judge, Counted(11), stage=0)["a"]
    assert not wrong(judge, Counted(10**9), stage=2)  # not known: any plausible number


@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ([0, 0, 1000], []),
        ([0, 0, 1001], ["c"]),  # a median of 0 counts as 1
        ([3, 3, 3000], []),
        ([3, 3, 3001], ["c"]),
        ([3, 3001], []),  # of two neither has a median to be compared with
        ([10**9], []),
        ([10**9 + 1], ["a"]),
        ([0], []),
        ([-1], ["a"]),
    ],
)
def test_rows_of_one_site_are_at_most_a_thousand_times_the_median(
    told: list[int], refused: list[str]
) -> None:
    assert list(wrong(guard(), *map(Counted, told))) == refused


def test_a_site_never_has_more_rows_than_it_told_first_in_a_stage() -> None:
    judge = guard()
    assert not wrong(judge, Counted(7))
    assert not wrong(judge, Counted(5))
    assert "8 rows, more than the 7" in wrong(judge, Counted(8))["a"]
    assert not wrong(judge, Counted(8), stage=1)


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ([-1.0, 2.0], True),
        ([], True),
        ([-1.5, 0.0], False),
        ([0.0, 2.5], False),
        ([0.5], True),
    ],
)
def test_a_bounded_field_may_be_at_its_bounds(values: list[float], fits: bool) -> None:
    reasons = wrong(guard(), Trusted(torch.tensor(values)))
    assert reasons == ({} if fits else {"a": "'trust' is not between -1 and 2"})


@pytest.mark.parametrize(
    ("tensor", "fits"),
    [
        (torch.tensor([1e12], dtype=ROW), True),
        (torch.tensor([1.1e12], dtype=ROW), False),
        (torch.tensor([0.8e12, 0.8e12], dtype=ROW), False),  # together 1.13e12
        (torch.tensor([10**12]), True),
        (torch.tensor([-(10**12), 5]), True),
        (torch.tensor([5, -(10**12) - 1]), False),
        (torch.tensor([True, False]), True),
        (torch.zeros(0, dtype=torch.int64), True),
        (torch.tensor([math.nan, 1.0]), False),
    ],
)
def test_values_are_at_most_a_million_million(tensor: Tensor, fits: bool) -> None:
    assert bool(wrong(guard(), Shared({"x": tensor}))) is not fits
    assert bool(implausible_state({"fine": torch.ones(1), "x": tensor})) is not fits


def test_whole_numbers_beside_floats_that_are_not_numbers_hide_nothing() -> None:
    state = {"w": torch.tensor([math.nan])}
    reply = Shared({**state, "count": torch.tensor([10**13])})
    assert wrong(guard(), reply)["a"].startswith("values as large as nan")
    assert implausible_state(state) == "'w' has values that are not finite or as large as nan"


def test_outputs_are_compared_by_the_root_mean_square_of_all_floats() -> None:
    judge = guard()
    small = Said({"x": torch.tensor([[3.0], [4.0]]), "n": torch.tensor([900])})
    large = Said({"x": torch.tensor([[6.0], [8.0]]), "n": torch.tensor([1])})
    assert not wrong(judge, small, small, small, large)
    assert judge.ratios == {"act.logits": pytest.approx(2.0)}
    rows = guard()
    assert not wrong(rows, *[Answered(torch.full((n, 1), 3.0)) for n in (1, 1, 1, 8)])
    assert rows.ratios == {"act.logits": pytest.approx(1.0)}  # however many rows there are


def test_outputs_with_tails_are_as_large_as_their_median_row_or_a_twentieth_of_the_largest() -> (
    None
):
    """Rows (3, 4) have a root mean square of 3.54, however many there are."""
    judge = guard()
    usual, double = torch.tensor([[3.0, 4.0]] * 3), torch.tensor([[6.0, 8.0]] * 3)
    spread = torch.tensor([[0.0, 0.0], [6.0, 8.0], [60.0, 80.0]])  # the median row counts
    assert not wrong(judge, *[Embedded(rows) for rows in (usual, usual, usual, double, spread)])
    assert judge.ratios == {"act.embedding": pytest.approx(2.0)}
    tail = torch.tensor([[3.0, 4.0], [3.0, 4.0], [180.0, 240.0]])  # 60 times: 3 of 20
    assert not wrong(judge, *[Embedded(rows) for rows in (usual, usual, usual, tail)])
    assert judge.ratios == {"act.embedding": pytest.approx(3.0)}


def test_with_tails_the_largest_median_so_far_is_the_reference() -> None:
    judge = guard()
    rows = torch.ones(3, 2)
    assert not wrong(judge, *[Embedded(4 * rows)] * 3)
    assert not wrong(judge, *[Embedded(rows)] * 3, Embedded(20 * rows))  # a last, small batch
    assert list(wrong(judge, *[Embedded(rows)] * 3, Embedded(21 * rows))) == ["d"]
    assert list(wrong(guard(), *[Embedded(rows)] * 3, Embedded(6 * rows))) == ["d"]
    small = [Embedded(0.1 * rows)] * 3
    assert list(wrong(guard(), *small, Embedded(0.6 * rows))) == ["d"]


def test_rows_without_numbers_have_no_size() -> None:
    judge = guard()
    half = Embedded(torch.full((2, 2), 0.5))
    assert not wrong(judge, half, half, half, Embedded(torch.ones(0, 2)))
    assert judge.ratios == {"act.embedding": pytest.approx(1.0)}


def test_a_single_row_is_a_row_however_wide_and_a_single_number_is_one_too() -> None:
    judge = guard()
    ones = Embedded(torch.ones(3, 2))
    assert not wrong(judge, ones, ones, ones, Embedded(torch.tensor([[3.0, 4.0]])))
    assert judge.ratios == {"act.embedding": pytest.approx(5 / math.sqrt(2))}
    wider = guard()
    for rows in (torch.ones(2, 2), torch.ones(2, 8), torch.ones(5, 8)):
        assert not wrong(wider, Embedded(rows))
    assert wider.ratios == {"act.embedding": pytest.approx(1.0)}
    number = guard()
    for value in (3.0, 6.0):
        assert not wrong(number, Embedded(torch.tensor(value)))
    assert number.ratios == {"act.embedding": pytest.approx(2.0)}


def shared(value: float) -> Shared:
    return Shared({"w": torch.tensor([value], dtype=ROW)})


def test_whole_weights_are_measured_from_the_middle_of_three_and_from_zero_for_two() -> None:
    judge = guard()
    assert list(wrong(judge, *map(shared, (100.0, 101.0, 99.0, 103.0, 120.0)))) == ["e"]
    assert judge.ratios == {"act.weights": pytest.approx(19 / 2)}  # of 1, 2, 2 and 19 from 101
    three = guard()
    assert not wrong(three, *map(shared, (100.0, 101.0, 130.0)))  # two are not at the middle
    assert three.ratios == {"act.weights": 0.0}
    two = guard()
    assert not wrong(two, shared(100.0), shared(101.0))
    assert list(wrong(two, shared(100.0), shared(600.0))) == ["b"]


def form(names: str, shape: tuple[int, ...] = (2,), dtype: torch.dtype = ROW) -> Shared:
    return Shared({name: torch.ones(shape, dtype=dtype) for name in names})


@pytest.mark.parametrize(
    ("replies", "refused"),
    [
        ([form("v"), form("v"), form("w")], ["c"]),
        ([form("v"), form("w")], []),  # two alone: neither is in the right
        ([form("v"), form("v"), form("w"), form("w")], []),  # no form has most
        ([form("vw"), form("wv"), form("v")], ["c"]),  # the order of names says nothing
        ([form("v"), form("v"), form("v", (3,))], ["c"]),
        ([form("v"), form("v"), form("v", dtype=torch.float32)], ["c"]),
        ([form("v")] * 3 + [form("w")] * 2, ["d", "e"]),
    ],
)
def test_tensors_must_have_the_form_that_most_have(replies: list[Any], refused: list[str]) -> None:
    reasons = wrong(guard(), *replies)
    assert list(reasons) == refused
    assert all("other names, types or shapes" in reason for reason in reasons.values())


@pytest.mark.parametrize("name", ["values", "bits", "places"])
def test_sparse_tensors_have_a_form_of_their_own(name: str) -> None:
    sparse = [Said({f"layer/{name}": torch.ones(count)}) for count in (2, 3, 4)]
    assert not wrong(guard(), *sparse)
    mixed = [Said({f"layer/{name}": torch.ones(n), "rate": torch.ones(1)}) for n in (2, 2, 4)]
    assert not wrong(guard(), *mixed)
    other = [Said({f"{name}/layer": torch.ones(count)}) for count in (2, 2, 4)]
    assert list(wrong(guard(), *other)) == ["c"]


def bounded(rule: Any, values: list[float], **options: Any) -> list[float]:
    replies = {id: update(v) for id, v in zip("abcdefgh", values, strict=False)}
    requests = {id: Weights({"w": torch.zeros(1, dtype=ROW)}) for id in replies}
    found = guard(rule=rule, **options).bounded(requests, replies)
    assert list(found) == list(replies)
    return [float(reply.weights["w"]) for reply in found.values()]


def test_each_rule_bounds_the_updates() -> None:
    assert bounded("none", [1.0, -9.0, 2.0]) == [1.0, -9.0, 2.0]
    assert bounded("exclude", [1.0, -9.0, 2.0]) == [1.0, -9.0, 2.0]
    assert bounded("clip", [1.0, -9.0, 2.0]) == [1.0, -2.0, 2.0]
    assert bounded("clip", [1.0, -9.0, 2.0, 4.0]) == [1.0, -2.0, 2.0, 2.0]  # the lower median
    assert bounded("median", [1.0, -9.0, 2.0]) == [1.0] * 3
    assert bounded("median", [1.0, -9.0, 2.0, 4.0]) == [1.5] * 4
    assert bounded("median", [5.0]) == [5.0]
    assert bounded("trimmed-mean", [1.0, 2.0, 9.0, -8.0, 3.0, 4.0, 5.0, 0.0]) == [2.5] * 8
    assert bounded("trimmed-mean", [1.0, 2.0, 9.0], trim=0.0) == [4.0] * 3
    assert bounded("trimmed-mean", [1.0, 2.0, 9.0], trim=0.25) == [4.0] * 3  # no whole one to cut
    assert bounded("trimmed-mean", [1.0, 2.0, 9.0], trim=0.34) == [2.0] * 3


def test_a_bounded_update_begins_where_the_request_did_and_keeps_its_type() -> None:
    base = {"w": torch.tensor([10.0]), "count": torch.tensor(3)}
    sizes = {"a": 1.0, "b": 2.0, "c": 8.0}
    replies = {id: Fitted({**base, "w": base["w"] + size}) for id, size in sizes.items()}
    found = guard(rule="clip").bounded(dict.fromkeys(replies, Weights(base)), replies)
    assert [float(found[id].weights["w"]) for id in "abc"] == [11.0, 12.0, 12.0]
    assert found["c"].weights["w"].dtype == torch.float32
    assert int(found["c"].weights["count"]) == 3


def test_a_state_may_be_as_far_from_the_base_as_the_longest_update_times_the_factor() -> None:
    judge = guard()
    base = {"v": torch.tensor([3.0], dtype=ROW), "w": torch.tensor([4.0], dtype=ROW)}
    sizes = {"a": 1.0, "b": 2.0, "c": 2.0, "d": 1000.0}
    replies = {id: Fitted({**base, "w": base["w"] + size}) for id, size in sizes.items()}
    assert list(judge.faults("fit", 0, dict.fromkeys(replies, Weights(base)), replies)) == ["d"]

    def beyond(prefix: str, by: float, **more: Tensor) -> bool:
        state = {f"{prefix}v": base["v"] + by, f"{prefix}w": base["w"]}
        return bool(judge.beyond({**state, **more}))

    assert not beyond("", 10.0)
    assert beyond("", 10.01)
    assert beyond("weights/", 10.01)
    assert not beyond("x", 99.0)  # no part of the name
    assert beyond("weights/", 10.01, other=torch.ones(1))
    assert not judge.beyond({"v": base["v"] + 99})  # not all of the base
    assert not judge.beyond({})


def test_tensors_with_the_names_of_weights_are_no_weights_where_the_method_names_its_own() -> None:
    """Control variates of SCAFFOLD are small; their distance to the weights says nothing."""
    judge = guard()
    base = {"w": torch.tensor([30.0, 40.0], dtype=ROW)}
    replies = {id: Fitted({"w": base["w"] + 1}) for id in "abc"}
    assert not judge.faults("fit", 0, dict.fromkeys(replies, Weights(base)), replies)
    control = {"control/w": torch.tensor([0.1, 0.1], dtype=ROW)}
    honest, exploded = {"w": base["w"] + 1}, {"w": base["w"] + 99}
    assert not judge.beyond({"weights/w": honest["w"], **control})  # one of both is the weights
    assert judge.beyond({"weights/w": exploded["w"], **control})
    assert not judge.beyond({"weights/w": honest["w"], **control}, {"shared": honest})
    assert judge.beyond({"weights/w": exploded["w"], **control}, {"shared": exploded})
    assert judge.beyond({"weights/w": exploded["w"], "old/w": base["w"]}, {"shared": exploded})
    other = {"w": base["w"] - 7}  # weights that the state does not have: all are looked at
    assert judge.beyond({"weights/w": exploded["w"], **control}, {"shared": other})


def test_a_base_of_large_numbers_is_allowed_its_roundings() -> None:
    """1e-5 of the norm of the base: 5 of it, so 1e-5 times 5 beyond five updates of 1e-6."""
    judge = guard()
    base = {"w": torch.tensor([3.0, 4.0], dtype=ROW)}
    replies = {id: Fitted({"w": base["w"] + torch.tensor([1e-6, 0.0])}) for id in "abc"}
    assert not judge.faults("fit", 0, dict.fromkeys(replies, Weights(base)), replies)
    assert not judge.beyond({"w": base["w"] + torch.tensor([5.4e-5, 0.0], dtype=ROW)})
    assert judge.beyond({"w": base["w"] + torch.tensor([5.7e-5, 0.0], dtype=ROW)})


def test_where_no_client_may_miss_a_round_a_state_says_nothing_of_its_answers() -> None:
    judge = guard(quorum=False)
    assert not wrong(judge, *[update(1.0)] * 3)
    assert not judge.beyond({"w": torch.tensor([1e6], dtype=ROW)})
    assert not guard().beyond({"w": torch.tensor([1e6], dtype=ROW)})  # nothing was asked for yet
