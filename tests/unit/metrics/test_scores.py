"""The metrics, on records of a few scores, against results worked out by hand."""

import math
import subprocess
import sys

import numpy as np
import pytest

from atoll.core.errors import UserError
from atoll.core.record import Event, Message, Round, Score
from atoll.metrics import scores as metrics


def score(
    client: str,
    task: int,
    stage: int,
    percent: int,
    *,
    round: int = 0,
    variant: str = "",
    part: str = "test",
    f1: float | None = None,
) -> Score:
    return Score(
        stage,
        round,
        client,
        task,
        variant,
        part,
        100,
        percent,
        percent / 200 if f1 is None else f1,
    )


def sent(sender: str, receiver: str, count: int, size: int) -> Message:
    return Message(0, 0, sender, receiver, "fit", "Weights", (), count, 0, size)


# two clients, three tasks learned one a stage; percent hits
TABLE: dict[str, list[list[int | None]]] = {
    "a": [[90, 95, 60], [None, 80, 70], [None, None, 50]],
    "b": [[70, 60, 50], [None, 60, 80], [None, None, 90]],
}


def events() -> list[Event]:
    return [
        score(client, task, stage, percent)
        for client, rows in TABLE.items()
        for task, row in enumerate(rows)
        for stage, percent in enumerate(row)
        if percent is not None
    ]


def test_the_primary_result_has_one_cell_for_each_client_task_and_stage() -> None:
    result = metrics.primary(events())
    assert (result.clients, result.tasks, result.stages) == (("a", "b"), (0, 1, 2), (0, 1, 2))
    expected = np.array([TABLE["a"], TABLE["b"]], dtype=float) / 100
    np.testing.assert_array_equal(result.accuracy, expected)
    np.testing.assert_allclose(result.macro_f1, expected / 2)


def test_a_cell_that_was_never_tested_is_not_a_number() -> None:
    assert np.isnan(metrics.primary(events()).accuracy[0, 1, 0])


def test_a_test_on_no_rows_is_not_a_number() -> None:
    empty = Score(0, 0, "a", 1, "", "test", 0, 0, 0.0)
    result = metrics.primary([score("a", 0, 0, 80), empty])
    assert np.isnan(result.accuracy[0, 1, 0])
    assert np.isnan(result.macro_f1[0, 1, 0])
    assert metrics.final_accuracy(result) == 0.8


def test_the_highest_round_of_a_stage_counts_whatever_the_order_of_events() -> None:
    result = metrics.primary(
        [score("a", 0, 0, 30, round=9), score("a", 0, 0, 10, round=0), score("a", 0, 1, 20)]
    )
    np.testing.assert_array_equal(result.accuracy, [[[0.3, 0.2]]])


def test_scores_on_validation_rows_and_other_variants_are_left_out() -> None:
    mixed: list[Event] = [
        score("a", 0, 0, 50),
        score("a", 0, 0, 99, round=1, part="valid"),
        score("a", 0, 0, 98, round=1, variant="own"),
        score("b", 0, 0, 97, variant="own"),
        Round(0, 0, {"loss": 1.0}),
    ]
    result = metrics.primary(mixed)
    assert result.clients == ("a",)
    assert result.accuracy.tolist() == [[[0.5]]]


def test_variants_are_those_with_test_scores_sorted() -> None:
    mixed = [
        score("a", 0, 0, 1, variant="b"),
        score("a", 0, 0, 1, variant="a"),
        score("a", 0, 0, 1, variant="c", part="valid"),
    ]
    assert metrics.variants(mixed) == ["a", "b"]


def test_an_unknown_variant_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        metrics.primary([score("a", 0, 0, 1, variant="common")], "comon")
    assert "comon" in caught.value.what
    assert "'common'" in caught.value.remedy


def test_final_accuracy_is_the_mean_after_the_last_stage() -> None:
    assert metrics.final_accuracy(metrics.primary(events())) == pytest.approx((60 + 220 / 3) / 200)


def test_clients_weigh_the_same_however_many_tasks_they_have() -> None:
    result = metrics.primary([score("a", 0, 0, 100), score("a", 1, 0, 100), score("b", 0, 0, 0)])
    assert metrics.final_accuracy(result) == 0.5


def test_average_accuracy_is_the_mean_over_stages_of_the_tasks_known_then() -> None:
    after = [(90 + 70) / 2, (87.5 + 60) / 2, (60 + 220 / 3) / 2]
    result = metrics.primary(events())
    assert metrics.average_accuracy(result) == pytest.approx(sum(after) / 300)


def test_macro_f1_is_read_after_the_last_stage() -> None:
    result = metrics.primary([score("a", 0, 0, 50, f1=0.9), score("a", 0, 1, 50, f1=0.4)])
    assert metrics.macro_f1(result) == 0.4


def test_the_three_forgettings_are_three_different_numbers() -> None:
    known_at = (1, 1, 2)  # task 0 was tested a stage before it was learned
    result = metrics.primary(events(), known_at=known_at)
    # a: task 0 from 90, 95, 95 to 60; task 1 from 80 to 70. b: 70, 70, 60 to 50; 60, 80, 60 to 80
    assert metrics.forgetting_first_last(result) == pytest.approx((20 + 0) / 200)
    assert metrics.forgetting_best_last(result) == pytest.approx((22.5 + 10) / 200)
    assert metrics.forgetting_diagonal_last(result) == pytest.approx((22.5 - 5) / 200)


def test_the_last_task_is_not_averaged_into_forgetting() -> None:
    result = metrics.primary([score("a", 0, 0, 80), score("a", 0, 1, 60), score("a", 1, 1, 90)])
    for forgetting in (
        metrics.forgetting_first_last,
        metrics.forgetting_best_last,
        metrics.forgetting_diagonal_last,
    ):
        assert forgetting(result) == pytest.approx(0.2)


def test_a_missing_last_score_is_left_out_and_not_taken_for_zero() -> None:
    seen = [
        score("a", 0, 0, 80),
        score("a", 1, 0, 70),
        score("a", 1, 1, 60),
        score("b", 0, 0, 90),
        score("b", 0, 1, 60),
    ]
    result = metrics.primary(seen)
    # a: task 0 has no last score, task 1 lost 10; b: task 0 lost 30, task 1 was never tested
    assert metrics.forgetting_first_last(result) == pytest.approx(0.2)
    assert metrics.forgetting_best_last(result) == pytest.approx(0.2)
    assert metrics.forgetting_diagonal_last(result) == pytest.approx(0.2)


def test_best_accuracy_does_not_take_missing_cells_for_zero_or_for_best() -> None:
    seen = [score("a", 0, 0, 50), score("a", 0, 2, 40), score("b", 0, 1, 1), score("b", 0, 2, 1)]
    assert metrics.forgetting_best_last(metrics.primary(seen)) == pytest.approx(0.05)


def test_forgetting_is_unknown_where_no_old_task_was_tested_again() -> None:
    result = metrics.primary([score("a", 0, 0, 80), score("a", 1, 1, 60)])
    assert math.isnan(metrics.forgetting_first_last(result))


def test_a_client_that_came_late_has_no_diagonal_but_a_first_score() -> None:
    seen = [
        score("a", 0, 0, 80),
        score("a", 0, 2, 80),
        score("b", 0, 1, 90),
        score("b", 0, 2, 70),
    ]
    result = metrics.primary(seen)
    assert metrics.forgetting_diagonal_last(result) == 0.0  # of a alone
    assert metrics.forgetting_first_last(result) == pytest.approx(0.1)  # of both


def test_a_stage_after_which_nothing_was_tested_has_no_diagonal() -> None:
    result = metrics.primary([score("a", 0, 1, 80), score("a", 0, 2, 60)], known_at=(0,))
    assert math.isnan(metrics.forgetting_diagonal_last(result))
    assert metrics.forgetting_first_last(result) == pytest.approx(0.2)


@pytest.mark.parametrize("domains", [1, 4])
def test_one_stage_forgets_nothing(domains: int) -> None:
    result = metrics.primary([score("a", task, 0, 50) for task in range(domains)])
    assert metrics.forgetting_first_last(result) == 0.0
    assert metrics.forgetting_best_last(result) == 0.0
    assert metrics.forgetting_diagonal_last(result) == 0.0
    assert str(metrics.backward_transfer(result)) == "0.0"


def test_backward_transfer_is_what_later_stages_added() -> None:
    result = metrics.primary(events())
    # client a lost 30 and 10, client b lost 20 and won 20
    assert metrics.backward_transfer(result) == pytest.approx((-20 + 0) / 200)


def test_forward_transfer_compares_with_chance_just_before_learning() -> None:
    seen = [
        score("a", 1, 0, 30),
        score("a", 2, 0, 99),  # two stages ahead: not just before
        score("a", 2, 1, 20),
        score("a", 2, 2, 95),
        score("a", 0, 0, 90),
    ]
    result = metrics.primary(seen, known_at=(0, 1, 2))
    assert metrics.forward_transfer(result, 0.1) == pytest.approx((0.2 + 0.1) / 2)
    assert metrics.forward_transfer(result, [0.0, 0.3, 0.1]) == pytest.approx((0.0 + 0.1) / 2)


def test_forward_transfer_is_averaged_over_tasks_first_and_then_over_clients() -> None:
    """The last task is to come after the last stage: it too was tested just before."""
    seen = [score("a", 0, 0, 90), score("a", 1, 0, 30), score("a", 2, 1, 70)]
    seen += [score("b", 1, 0, 50), score("b", 0, 1, 90)]
    result = metrics.primary(seen, known_at=(0, 1, 2))
    assert metrics.forward_transfer(result, 0.1) == pytest.approx(((0.2 + 0.6) / 2 + 0.4) / 2)


def test_forward_transfer_is_unknown_where_nothing_was_tested_ahead() -> None:
    assert math.isnan(metrics.forward_transfer(metrics.primary(events()), 0.5))
    assert math.isnan(metrics.forward_transfer(metrics.primary(events(), known_at=(0, 1, 2)), 0.5))


def test_tasks_tested_ahead_do_not_enter_the_accuracy_of_known_ones() -> None:
    seen = [score("a", 0, 0, 80), score("a", 1, 0, 10)]
    assert metrics.final_accuracy(metrics.primary(seen, known_at=(0, 1))) == 0.8


def test_spread_over_clients_is_the_population_deviation_and_names_the_worst() -> None:
    seen = [score("a", 0, 0, 90), score("b", 0, 0, 50), score("c", 0, 0, 70)]
    found = metrics.spread_over_clients(metrics.primary(seen))
    assert found.deviation == pytest.approx(math.sqrt(800 / 3) / 100)
    assert (found.worst, found.worst_accuracy) == ("b", 0.5)


def test_a_client_without_final_scores_is_not_the_worst() -> None:
    seen = [score("a", 0, 0, 90), score("b", 0, 0, 50), score("a", 0, 1, 70)]
    found = metrics.spread_over_clients(metrics.primary(seen))
    assert (found.deviation, found.worst) == (0.0, "a")


def test_bytes_go_up_to_the_server_and_down_from_it() -> None:
    ledger = [sent("server", "b", 2, 100), sent("b", "server", 2, 40), sent("server", "a", 1, 7)]
    assert metrics.bytes_up(ledger) == {"a": 0, "b": 40}
    assert metrics.bytes_down(ledger) == {"a": 7, "b": 100}
    assert metrics.messages(ledger) == {"a": 1, "b": 4}
    assert list(metrics.messages(ledger)) == ["a", "b"]


def test_a_summary_has_every_metric_that_is_defined_and_no_other() -> None:
    found = metrics.summary([*events(), sent("server", "b", 2, 100), sent("a", "server", 1, 40)])
    assert list(found) == list(metrics.DEFINITIONS)
    assert (found["bytes_up"], found["bytes_down"], found["messages"]) == (40, 100, 3)
    assert found["final_accuracy"] == pytest.approx((60 + 220 / 3) / 200)
    assert found["worst_client"] == pytest.approx(0.6)
    assert all(type(value) is float for value in found.values())


def test_a_summary_reads_events_that_can_be_read_once() -> None:
    found = metrics.summary(iter([*events(), sent("server", "b", 2, 100)]))
    assert found["bytes_down"] == 100


def test_a_record_without_scores_has_unknown_accuracy_and_no_forgetting() -> None:
    found = metrics.summary([sent("server", "b", 2, 100)])
    assert math.isnan(found["final_accuracy"])
    assert math.isnan(found["average_accuracy"])
    assert math.isnan(found["worst_client"])
    assert found["forgetting_best_last"] == 0.0


def test_every_definition_is_one_line() -> None:
    assert all(text and "\n" not in text for text in metrics.DEFINITIONS.values())


def test_no_metric_changes_the_arrays_it_reads() -> None:
    result = metrics.primary(events(), known_at=(0, 5, 2))
    accuracy, f1 = result.accuracy.copy(), result.macro_f1.copy()
    for name in metrics.DEFINITIONS.keys() & vars(metrics).keys() - {"bytes_up", "bytes_down"}:
        if name == "forward_transfer":
            metrics.forward_transfer(result, 0.1)
        elif name != "messages":
            getattr(metrics, name)(result)
    np.testing.assert_array_equal(result.accuracy, accuracy)
    np.testing.assert_array_equal(result.macro_f1, f1)


def test_spread_is_the_mean_and_the_population_deviation() -> None:
    assert metrics.spread([1.0, 3.0]) == (2.0, 1.0)
    assert metrics.spread([5.0]) == (5.0, 0.0)
    assert all(math.isnan(value) for value in metrics.spread([]))
    assert math.isnan(metrics.spread([1.0, math.nan]).mean)


def test_metrics_need_no_torch() -> None:
    program = "import sys, atoll.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def domains(known_at: tuple[int, ...] | None = (0, 0, 0), clients: str = "abc") -> metrics.Primary:
    """Hits out of 10 of each client on each domain; the rows of a domain differ."""
    hits = [[9, 2, 4], [1, 8, 3], [5, 0, 7]]
    rows = [10, 100, 1000]
    return metrics.primary(
        [
            Score(0, 0, client, task, "", "test", rows[task], h * rows[task] // 10, 0.5)
            for client, line in zip(clients, hits, strict=False)
            for task, h in enumerate(line)
        ],
        known_at=known_at,
    )


def test_own_and_other_domains_are_the_diagonal_and_the_rest_whatever_their_rows() -> None:
    assert metrics.intra_accuracy(domains()) == pytest.approx((0.9 + 0.8 + 0.7) / 3)
    assert metrics.inter_accuracy(domains()) == pytest.approx((0.3 + 0.2 + 0.25) / 3)


def test_other_domains_are_averaged_by_client_first() -> None:
    table: dict[str, list[int | None]] = {
        "a": [90, 20, None],
        "b": [40, 90, 60],
        "c": [80, 100, 90],
    }
    found = [
        score(client, task, 0, percent)
        for client, row in table.items()
        for task, percent in enumerate(row)
        if percent is not None
    ]
    result = metrics.primary(found, known_at=(0, 0, 0))
    assert metrics.inter_accuracy(result) == pytest.approx((0.2 + 0.5 + 0.9) / 3)


def test_two_domains_are_enough_and_one_is_none() -> None:
    def few(count: int) -> metrics.Primary:
        ids = "ab"[:count]
        found = [
            score(client, task, 0, 90 if own == task else 20)
            for own, client in enumerate(ids)
            for task in range(count)
        ]
        return metrics.primary(found, known_at=(0,) * count)

    assert metrics.intra_accuracy(few(2)) == pytest.approx(0.9)
    assert metrics.inter_accuracy(few(2)) == pytest.approx(0.2)
    assert math.isnan(metrics.intra_accuracy(few(1)))


@pytest.mark.parametrize(
    ("known_at", "clients"), [(None, "abc"), ((0, 1, 2), "abc"), ((0, 0, 0), "ab")]
)
def test_domains_are_not_guessed(known_at: tuple[int, ...] | None, clients: str) -> None:
    result = domains(known_at, clients)
    assert math.isnan(metrics.intra_accuracy(result))
    assert math.isnan(metrics.inter_accuracy(result))


def test_what_was_lost_is_averaged_over_tasks_first_and_then_over_clients() -> None:
    table: dict[str, list[list[int]]] = {"a": [[80, 60], [80, 40]], "b": [[90, 30]]}
    found = [
        score(client, task, stage, percent)
        for client, rows in table.items()
        for task, row in enumerate(rows)
        for stage, percent in enumerate(row)
    ]
    lost = metrics.forgetting_first_last(metrics.primary(found))
    assert lost == pytest.approx((0.3 + 0.6) / 2)  # a lost 0.2 and 0.4, b 0.6


def test_each_clients_own_accuracy_is_its_mean_over_the_tasks_known_in_the_end() -> None:
    found = metrics.client_accuracy(metrics.primary(events()))
    assert found == pytest.approx({"a": (0.6 + 0.7 + 0.5) / 3, "b": (0.5 + 0.8 + 0.9) / 3})
