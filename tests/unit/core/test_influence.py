"""The rule that judges answers: what is left out, what is remembered, what the options do."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch

from atoll.core.annotations import Bounded, Outputs, RowCount, Update
from atoll.core.errors import BadMessageError
from atoll.core.federation import Clients, Moment
from atoll.core.influence import Guard, RobustOptions, _flatness, implausible_state
from atoll.core.messages import Empty, Packet, Tensors, Weights, pack
from atoll.core.record import Exclusion
from atoll.families.vertical import Embedded

NOW = Moment(0, 1, 3)


@dataclass(frozen=True)
class Fitted:
    weights: Annotated[Tensors, Update(of="weights")]
    rows: Annotated[int, RowCount()]


@dataclass(frozen=True)
class Answered:
    logits: Annotated[torch.Tensor, Outputs()]
    trust: Annotated[torch.Tensor, Bounded(0.0, 1.0)]


class Client:
    """Its actions are asked for; its answers are written by the tests."""

    def fit(self, request: Weights, moment: Moment) -> Fitted:
        raise AssertionError

    def answer(self, request: Empty, moment: Moment) -> Answered:
        raise AssertionError

    def embed(self, request: Empty, moment: Moment) -> Embedded:
        raise AssertionError

    def share(self, request: Empty, moment: Moment) -> Weights:
        raise AssertionError


BASE = {"w": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)}


class Sent:
    """A transport that brings written answers."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.asked = answers, list[str]()

    def carry(self, action: str, moment: Moment, packets: Any) -> dict[str, Packet]:
        self.asked = sorted(packets)
        return {id: pack(self.answers[id]) for id in packets}


def fitted(length: float, rows: int = 10) -> Fitted:
    """An update of a length."""
    return Fitted({**BASE, "w": BASE["w"] + torch.tensor([length, 0.0])}, rows)


def guard(quorum: bool = True, rows: Any = None, **options: Any) -> Guard:
    return Guard(RobustOptions(**options), quorum, rows)


def clients(answers: dict[str, Any], judge: Guard | None = None) -> Clients:
    return Clients(sorted(answers), Sent(answers), NOW, guard=judge or guard())


def out(answers: dict[str, Any], judge: Guard | None = None) -> dict[str, str]:
    """Who is left out of an exchange of updates, and why."""
    asked = clients(answers, judge)
    replies = asked.ask_all(Client.fit, Weights(BASE))
    assert sorted(replies) == sorted(answers.keys() - {e.client for e in asked.exclusions})
    return {e.client: e.reason for e in asked.exclusions}


def honest(count: int = 3) -> dict[str, Any]:
    return {f"site-{i}": fitted(1 + 0.1 * i) for i in range(count)}


def test_honest_answers_are_those_that_arrived() -> None:
    answers = honest()
    asked = clients(answers)
    replies = asked.ask_all(Client.fit, Weights(BASE))
    assert list(replies) == sorted(answers)
    for id, reply in replies.items():
        assert torch.equal(reply.weights["w"], answers[id].weights["w"])
    assert not asked.exclusions


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (fitted(-100), "its 'weights' are 90.9 times as large as the round's median"),
        (fitted(6), "times as large"),
        (fitted(math.nan), "not finite"),
        (fitted(math.inf), "not finite"),
        (fitted(1e30), "values as large as 1e+30"),
        (fitted(1, rows=-1), "-1 rows"),
        (fitted(1, rows=10**15), "1000000000000000 rows"),
        (Fitted({"w": BASE["w"]}, 1), "'count'"),
        (Fitted({**BASE, "more": BASE["w"]}, 1), "'more'"),
        (Fitted({**BASE, "w": torch.zeros(3)}, 1), "(3,)"),
        (Fitted({**BASE, "w": BASE["w"].double()}, 1), "float64"),
        (Fitted({**BASE, "count": torch.tensor(1 << 60)}, 1), "values as large as"),
        (Empty(), "Empty"),
    ],
)
def test_one_answer_that_cannot_be_is_left_out_by_name(lie: Any, words: str) -> None:
    found = out({**honest(), "site-3": lie})
    assert list(found) == ["site-3"]
    assert words in found["site-3"]


def test_an_answer_below_the_factor_is_not_left_out() -> None:
    assert not out({**honest(), "site-3": fitted(-5)})  # the median is 1.1: 4.5 times
    assert out({**honest(), "site-3": fitted(-5)}, guard(factor=4.0))


def test_a_client_that_is_left_out_is_not_asked_again_in_the_round() -> None:
    asked = clients({**honest(), "site-3": fitted(100)})
    asked.ask_all(Client.fit, Weights(BASE))
    asked.ask_all(Client.fit, Weights(BASE))
    assert asked.transport.asked == ["site-0", "site-1", "site-2"]  # type: ignore[attr-defined]
    later = asked.at(Moment(0, 2, 3), (0,))
    later.ask_all(Client.fit, Weights(BASE))
    assert "site-3" in later.transport.asked  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("answers", "judge", "stops"),
    [
        (2, guard(), True),  # one would remain
        (3, guard(), False),
        (4, guard(at_least=4), True),
        (4, guard(quorum=False), True),
        (4, None, True),  # no guard: an answer that is not finite ends the run, as ever
    ],
)
def test_too_few_remaining_sites_end_the_run_and_name_the_liar(
    answers: int, judge: Guard | None, stops: bool
) -> None:
    sent = {**honest(answers - 1), "site-9": fitted(math.nan)}
    asked = Clients(sorted(sent), Sent(sent), NOW, guard=judge)
    if not stops:
        asked.ask_all(Client.fit, Weights(BASE))
        assert [e.client for e in asked.exclusions] == ["site-9"]
        return
    with pytest.raises(BadMessageError, match="site-9"):
        asked.ask_all(Client.fit, Weights(BASE))
    assert not asked.exclusions


def test_two_liars_of_four_leave_no_majority() -> None:
    sent = {**honest(2), "site-8": fitted(1e20), "site-9": fitted(1e20)}
    with pytest.raises(BadMessageError, match="site-8"):
        clients(sent).ask_all(Client.fit, Weights(BASE))


def test_sites_that_send_no_update_do_not_make_the_others_too_long() -> None:
    sent = {"a": fitted(0), "b": fitted(0), "c": fitted(0), "d": fitted(2), "e": fitted(3)}
    assert not out(sent)
    lie = {**sent, "f": fitted(2), "g": fitted(200)}
    assert list(out(lie)) == ["g"]


def test_of_two_sites_each_is_compared_with_itself() -> None:
    """A median of two would let one of them choose it, and name the other."""
    judge = guard()
    assert not out({"a": fitted(1e-6), "b": fitted(1)}, judge)
    assert not out({"a": fitted(1e-6), "b": fitted(4)}, judge)
    with pytest.raises(BadMessageError, match=r"from b refused: .* its largest before"):
        out({"a": fitted(1e-6), "b": fitted(40)}, judge)


def test_rows_are_those_that_the_coordinator_knows_or_that_were_told_first() -> None:
    known = guard(rows={f"site-{i}": [10] for i in range(4)})
    assert out({**honest(), "site-3": fitted(1, rows=11)}, known)
    judge = guard()
    assert not out({**honest(), "site-3": fitted(1, rows=500)}, judge)
    assert not out({**honest(), "site-3": fitted(1, rows=400)}, judge)
    assert "501 rows" in out({**honest(), "site-3": fitted(1, rows=501)}, judge)["site-3"]
    assert out({**honest(), "site-3": fitted(1, rows=10_001)})  # 1000 times the median


def test_a_site_with_more_rows_may_send_a_longer_update() -> None:
    """It takes more steps; what only the site itself tells counts up to a limit."""
    rows = {"site-0": [10], "site-1": [10], "site-2": [10], "site-3": [1000]}
    sent = {f"site-{i}": fitted(1) for i in range(3)}
    assert not out({**sent, "site-3": fitted(45, rows=1000)}, guard(rows=rows))
    assert out({**sent, "site-3": fitted(55, rows=1000)}, guard(rows=rows))
    assert not out({**sent, "site-3": fitted(19, rows=1000)})
    assert out({**sent, "site-3": fitted(21, rows=1000)})


def answered(size: float, trust: float = 0.5, **form: Any) -> Answered:
    return Answered(torch.full((4, 3), float(size), **form), torch.tensor([trust]))


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (answered(-100), "its 'logits' are 100 times"),
        (answered(1, trust=1.5), "'trust' is not between 0 and 1"),
        (answered(1, dtype=torch.float64), "other names, types or shapes"),
        (Answered(torch.ones(4, 2), torch.tensor([0.5])), "other names, types or shapes"),
    ],
)
def test_outputs_are_bounded_too(lie: Answered, words: str) -> None:
    asked = clients({"a": answered(1), "b": answered(1.5), "c": answered(1), "d": lie})
    assert sorted(asked.ask_all(Client.answer, Empty())) == ["a", "b", "c"]
    assert words in asked.exclusions[0].reason


def test_a_single_large_row_is_no_lie_where_rows_may_have_tails() -> None:
    """A table may have a row that is far from all others; a party that scales all rows lies."""
    rows = torch.ones(16, 2)
    tail, wild, scaled = rows.clone(), rows.clone(), -10 * rows
    tail[3], wild[3] = 90.0, 110.0
    for lie, excluded in ((tail, []), (wild, ["d"]), (scaled, ["d"])):
        sent: dict[str, Any] = {name: Embedded(rows) for name in "abc"}
        asked = clients({**sent, "d": Embedded(lie)})
        asked.ask_all(Client.embed, Empty())
        assert [event.client for event in asked.exclusions] == excluded


@dataclass(frozen=True)
class Aligned:
    logits: Annotated[torch.Tensor, Outputs(common=True)]


def drawn(seed: int, rows: int = 64, classes: int = 10) -> torch.Tensor:
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed))


SIGNAL = drawn(0)


def noisy(last: torch.Tensor, others: torch.Tensor = SIGNAL) -> list[str]:
    """Who is left out where three sites agree but for some noise, and a fourth sends `last`."""
    sent = {name: Aligned(others + 0.5 * drawn(i, *others.shape)) for i, name in enumerate("abc")}
    judge = guard()
    faults = judge.faults("align", 0, {}, {**sent, "d": Aligned(last)})
    assert all("are noise" in error.reason for error in faults.values())
    return list(faults)


def test_noise_in_place_of_outputs_for_common_rows_is_left_out() -> None:
    assert noisy(drawn(7)) == ["d"]
    assert noisy(3 * torch.rand(64, 10, generator=torch.Generator().manual_seed(7))) == ["d"]


@pytest.mark.parametrize(
    ("last", "others"),
    [
        (SIGNAL + 2 * drawn(7), SIGNAL),  # flat, and it agrees a little
        (-SIGNAL, SIGNAL),  # it disagrees, and noise does not do that either
        (drawn(7)[:, :3] @ drawn(8)[:3], SIGNAL),  # agrees with nobody, but uses few directions
        (torch.zeros(64, 10), SIGNAL),
        (drawn(7, 64, 5), drawn(0, 64, 5)),  # too few classes to tell
        (drawn(7, 30, 10), drawn(0, 30, 10)),  # too few rows
        (torch.zeros(0, 10), torch.zeros(0, 10)),
    ],
)
def test_outputs_that_are_not_noise_are_not_left_out(
    last: torch.Tensor, others: torch.Tensor
) -> None:
    assert noisy(last, others) == []


@dataclass(frozen=True)
class Views:
    embedding: Annotated[torch.Tensor, Outputs(tails=True, aligned=True)]


def unlike(last: torch.Tensor, rows: int = 16) -> list[str]:
    """Who is left out where three parties see the same objects, each in coordinates of its own."""
    objects = drawn(0, rows, 4)
    sent = {n: Views(objects @ drawn(i + 1, 4, 12) + 0.1 * drawn(i + 9, rows, 12))
            for i, n in enumerate("abc")}  # fmt: skip
    return list(guard().faults("learn", 0, {}, {**sent, "d": Views(last)}))


def test_noise_in_place_of_embeddings_of_aligned_rows_is_left_out() -> None:
    assert unlike(drawn(20, 16, 12)) == ["d"]
    assert unlike(drawn(21, 64, 12), 64) == ["d"]


@pytest.mark.parametrize(
    ("last", "rows"),
    [
        (drawn(0, 16, 4) @ drawn(20, 4, 12), 16),  # the same objects
        (drawn(20, 16, 4) @ drawn(21, 4, 12), 16),  # unrelated objects, in few directions
        (torch.zeros(16, 12), 16),
        (drawn(20, 8, 12), 8),  # too few rows to tell
    ],
)
def test_embeddings_that_are_not_noise_are_not_left_out(last: torch.Tensor, rows: int) -> None:
    assert unlike(last, rows) == []


def test_flat_embeddings_that_agree_with_the_others_are_not_noise() -> None:
    """Wide tables with independent columns: a flat spectrum, but the rows are the same."""
    shared = drawn(0, 64, 12)
    sent = {
        name: Views(shared @ torch.linalg.qr(drawn(i, 12, 12)).Q) for i, name in enumerate("abcd")
    }
    assert guard().faults("learn", 0, {}, sent) == {}


def test_whole_weights_are_compared_with_the_median_of_all() -> None:
    sent: dict[str, Any] = {n: Weights({"w": torch.tensor([5.0 + i])}) for i, n in enumerate("abc")}
    asked = clients({**sent, "d": Weights({"w": torch.tensor([-50.0])})})
    assert sorted(asked.ask_all(Client.share, Empty())) == ["a", "b", "c"]


def test_a_sender_cannot_command_a_terminal_by_its_words() -> None:
    lie = Fitted({**BASE, "\x1b[31mred": BASE["w"]}, 1)
    asked = clients({**honest(), "site-3": lie})
    asked.ask_all(Client.fit, Weights(BASE))
    (event,) = asked.exclusions
    assert event == Exclusion(0, 1, "site-3", "fit", event.reason)
    assert event.reason.isprintable()


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("exclude", [1.0, 2.0, 3.0, -8.0]),
        ("clip", [1.0, 2.0, 2.0, -2.0]),
        ("trimmed-mean", [1.5] * 4),
        ("median", [1.5] * 4),
    ],
)
def test_the_options_bound_what_remains(rule: Any, wanted: list[float]) -> None:
    sent = {name: fitted(size) for name, size in zip("abcd", (1, 2, 3, -8), strict=True)}
    replies = clients(sent, guard(rule=rule)).ask_all(Client.fit, Weights(BASE))
    assert [float(r.weights["w"][0] - 1) for r in replies.values()] == pytest.approx(wanted)
    assert all(float(r.weights["w"][1]) == 2.0 for r in replies.values())
    assert all(int(r.weights["count"]) == 3 for r in replies.values())


def test_a_state_that_no_accepted_update_can_have_made_is_found() -> None:
    judge = guard()
    out({"a": fitted(1), "b": fitted(2), "c": fitted(2)}, judge)
    near = {**BASE, "w": BASE["w"] + torch.tensor([9.9, 0.0])}
    far = {**BASE, "w": BASE["w"] + torch.tensor([10.1, 0.0])}
    for prefix in ("", "weights/"):
        assert not judge.beyond({prefix + n: t for n, t in near.items()})
        assert "moved by 10.1" in judge.beyond({prefix + n: t for n, t in far.items()})


@pytest.mark.parametrize(
    ("tensor", "wrong"),
    [
        (torch.ones(3), False),
        (torch.zeros(0), False),
        (torch.tensor([True]), False),
        (torch.tensor([math.nan]), True),
        (torch.tensor([math.inf]), True),
        (torch.tensor([2.5e29]), True),
    ],
)
def test_a_state_with_absurd_numbers_is_found(tensor: torch.Tensor, wrong: bool) -> None:
    assert bool(implausible_state({"x": tensor})) is wrong


def test_an_answer_that_is_too_large_is_named_for_that_though_it_is_noise_too() -> None:
    """It is judged once, and has no say in what the others agree on."""
    sent = {name: Aligned(SIGNAL + 0.5 * drawn(i, 64, 10)) for i, name in enumerate("abc")}
    faults = guard().faults("align", 0, {}, {**sent, "d": Aligned(100 * drawn(7))})
    assert list(faults) == ["d"]
    assert "times as large as the round's median" in faults["d"].reason


def doubly_centred(seed: int) -> torch.Tensor:
    """26 rows of 6 classes without means of rows and columns, of norm 1."""
    found = drawn(seed, 26, 6).double()
    found = found - found.mean(1, keepdim=True)
    found = found - found.mean(0, keepdim=True)
    length: torch.Tensor = found.norm()
    return found / length


@pytest.mark.parametrize(("correlation", "noise"), [(0.354, True), (0.361, False)])
def test_chance_is_four_deviations_of_the_correlation_of_random_numbers(
    correlation: float, noise: bool
) -> None:
    """Of 26 rows and 6 classes 4 / sqrt(25 * 5) = 0.358; three others send the same."""
    common, other = doubly_centred(0), doubly_centred(1)
    other = other - (other * common).sum() * common
    own = correlation * common + math.sqrt(1 - correlation**2) * other / other.norm()
    sent = {**{name: Aligned(common) for name in "abc"}, "d": Aligned(own)}
    assert list(guard().faults("align", 0, {}, sent)) == (["d"] if noise else [])


@pytest.mark.parametrize(
    ("scales", "flatness"),
    [
        ([1.0, 1.0], 1 + 2 / 3),  # (1 + 1)^2 / (2 * (1 + 1)) = 1
        ([3.0, 1.0], 100 / 164 * (1 + 2 / 3)),  # (9 + 1)^2 / (2 * (81 + 1))
        ([1.0, 0.0], 0.5 * (1 + 2 / 3)),
    ],
)
def test_flatness_is_the_participation_ratio_of_the_spectrum(
    scales: list[float], flatness: float
) -> None:
    """Two orthogonal columns of length 2 in four rows, so three degrees of freedom."""
    columns = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    columns = columns.double() * torch.tensor(scales)
    assert _flatness(columns, 2) == pytest.approx(flatness)
