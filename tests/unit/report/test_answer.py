"""answer.json: read strictly, shown as a verdict card and a gain plot that claim no more."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import UserError
from atoll.report import page, quality, verdict
from atoll.report.answer import answer_of
from atoll.report.tables import Group, gather
from tests.unit.report.records import answer, answered, many_sites, record

SITES = {"a": (-0.06, 0.04, "hurts"), "b": (0.1, 0.09, "helps"), "c": (0.01, 0.05, "cannot tell")}
HITS: dict[str, dict[str, int]] = {"": {"a": 8, "b": 8}}


def group(folder: Path, **changes: Any) -> Group:
    (only,) = gather([answered(record(folder, "fedavg", 0, HITS), answer(SITES, **changes))])
    return only


def overall(kind: str, helps: int, hurts: int) -> dict[str, Any]:
    body = answer(SITES)["overall"]
    text = f"{kind}, in short"
    return {**body, "verdict": {"kind": kind, "text": text}, "helps": helps, "hurts": hurts}


def test_an_answer_is_read_whole_and_sorted_by_gain(tmp_path: Path) -> None:
    body = answer_of(group(tmp_path / "run", withheld={"east": "too few test rows"}))
    assert body is not None
    assert [site.site for site in body.sites] == ["b", "c", "a"]
    assert body.site_count == 4
    assert body.sites[0].gain.low == pytest.approx(0.01)
    assert body.sites[0].unadjusted == pytest.approx((0.055, 0.145))
    assert math.isnan(body.sites[0].score("gradient boosting"))
    assert math.isnan(body.sites[0].score("no such model"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": 2}, "has format 2"),
        ({"margin": "2"}, "not a number"),
        ({"sites": {"a": {}}}, "lacks 'unadjusted'"),
        ({"seeds": [0.5]}, "not a count"),
        ({"notes": "none"}, "not a list"),
        ({"overall": None}, "not subscriptable"),
        ({"overall": overall("wins", 1, 0)}, "unknown verdict 'wins'"),
        ({"metric": 3}, "not text"),
    ],
)
def test_a_malformed_answer_is_a_user_error(tmp_path: Path, change: Any, word: str) -> None:
    run = record(tmp_path / "run", "fedavg", 0, HITS)
    answered(run, {**answer(SITES), **change})
    with pytest.raises(UserError, match=word) as error:
        answer_of(gather([run])[0])
    assert error.value.where == str(run / "answer.json")
    assert error.value.remedy == f"remove it and run atoll answer {run}"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": 1}'])
def test_a_file_that_is_no_answer_is_a_user_error(tmp_path: Path, content: bytes) -> None:
    run = record(tmp_path / "run", "fedavg", 0, HITS)
    (run / "answer.json").write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        answer_of(gather([run])[0])


def test_an_answer_without_a_digest_is_a_user_error(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "fedavg", 0, HITS)
    (run / "answer.json").write_text(json.dumps(answer(SITES, runs={"run": ""})))
    with pytest.raises(UserError, match="is damaged"):
        answer_of(gather([run])[0])


def test_an_answer_for_other_seeds_is_not_shown(tmp_path: Path) -> None:
    folders = [record(tmp_path / f"seed-{n}", "fedavg", n, HITS) for n in (0, 1)]
    answered(tmp_path, answer(SITES, seeds=[0], runs={"seed-0": ""}))
    (both,) = gather(folders)
    assert answer_of(both) is None
    assert verdict.card(both).command == f"atoll answer {tmp_path}"
    answered(tmp_path, answer(SITES, seeds=[0, 1]))
    assert answer_of(both) is not None
    (one,) = gather(folders[:1])
    assert answer_of(one) is None


@pytest.mark.parametrize(
    ("kind", "counts", "headline", "tone", "symbol"),
    [
        ("helps", (2, 0), "Joining: helps at 2 of 3 sites", "good", "▲"),
        ("hurts", (0, 1), "Joining: hurts at 1 of 3 sites", "warn", "▼"),
        ("cannot tell", (1, 1), "Joining: helps at 1 of 3 sites, hurts at 1", "warn", "▲▼"),
        ("cannot tell", (1, 0), "Joining: helps at 1 of 3 sites", "good", "▲"),
        ("no difference", (0, 0), "Joining: no difference", "none", "="),
        ("cannot tell", (0, 0), "Joining: cannot tell", "none", "?"),
        ("helps", (0, 0), "Joining: helps", "good", "▲"),
    ],
)
def test_the_card_claims_what_the_answer_has(
    tmp_path: Path, kind: str, counts: tuple[int, int], headline: str, tone: str, symbol: str
) -> None:
    card = verdict.card(group(tmp_path / "run", overall=overall(kind, *counts)))
    assert (card.headline, card.tone, card.symbol) == (headline, tone, symbol)
    assert card.words == (
        f"Overall: {kind}, in short. The mean gain over sites is +3.2 points, "
        "with a 95 % interval of +0.5 to +5.9."
    )


def test_the_card_has_margin_chance_level_and_smallest_test_set(tmp_path: Path) -> None:
    notes = ["the test rows are the same for every seed"]
    card = verdict.card(group(tmp_path / "run", notes=notes, withheld={"d": "too few test rows"}))
    assert dict(card.numbers) == {
        "Margin": "2.0 points (smallest gain that counts)",
        "Accuracy, joined": "71.7 % (sites: 64.0 to 80.0)",
        "Chance level (majority class)": "60.0 %",
        "Sites where joining is shown to beat their own logistic regression": "1 of 3 sites",
        "Smallest test set": "40 rows (a); rarest class 3",
        "Compared with": "fedavg at each site alone",
        "Unit of the intervals": "test rows; seed 0",
    }
    assert card.notes == (
        "Logistic regression trained at the site alone beats the joined model: a.",
        "Logistic regression trained at the site alone may do as well: c.",
        "Withheld, too few test rows: d.",
        "The test rows are the same for every seed.",
    )


def test_a_loss_is_not_written_in_percent(tmp_path: Path) -> None:
    card = verdict.card(group(tmp_path / "run", metric="mae", margin=0.05))
    words = "0.050 (smallest gain that counts, 5 % of the label's standard deviation)"
    assert dict(card.numbers)["Margin"] == words
    assert "+0.032, with a 95 % interval of +0.005 to +0.059" in card.words


def test_the_gain_plot_uses_the_interval_of_the_verdict(tmp_path: Path) -> None:
    plot = verdict.gain_plot(group(tmp_path / "run", withheld={"d": "too few test rows"}))
    assert plot is not None
    assert [row.site for row in plot.rows] == ["b", "c", "a"]
    first = plot.rows[0]
    assert (first.gain, first.interval, first.rows) == ("+10.0", "+1.0 to +19.0", "50 test rows")
    assert first.hover == "b: +10.0 points, +1.0 to +19.0; unadjusted +5.5 to +14.5"
    # the axis runs from -10 to 19 points, with 4 % of its length at both ends
    low, length = -0.10 - 0.04 * 0.29, 1.08 * 0.29
    assert plot.zero == pytest.approx(100 * (0 - low) / length, abs=0.01)
    assert first.place == pytest.approx(100 * (0.1 - low) / length, abs=0.01)
    assert first.high == pytest.approx(100 * (0.19 - low) / length, abs=0.01)
    majority, logistic = first.ticks
    assert majority.text == "majority: 60.0 %, -10.0 points over alone"
    assert majority.place == pytest.approx(100 * (-0.1 - low) / length, abs=0.01)
    assert logistic.text == "logistic regression: 72.0 %, +2.0 points over alone"
    assert not majority.beyond
    assert [text for _, text in plot.axis] == ["-10", "-5", "0", "+5", "+10", "+15", "+20"]
    assert plot.withheld == (("d", "too few test rows"),)


def test_runs_of_one_task_are_compared_and_others_get_a_tab(tmp_path: Path) -> None:
    folders = []
    for name in ("fedavg", "chfl"):
        run = record(tmp_path / name, name, 0, {"": {"a": 8, "b": 8}})
        folders.append(answered(run, answer(SITES)))
    text = page.page(gather(folders))
    assert 'role="tab"' not in text
    assert text.count('<article class="card') == 2
    assert "The same data and split." in text
    facts = json.loads((folders[1] / "facts.json").read_text())
    facts["data"]["fingerprint"] = "0" * 64
    (folders[1] / "facts.json").write_text(json.dumps(facts))
    text = page.page(gather(folders))
    assert text.count('role="tab"') == 2
    assert "The same data and split." not in text


def test_a_page_of_many_sites_has_every_one_of_them(tmp_path: Path) -> None:
    text = page.page(gather([many_sites(tmp_path / "run")]))
    assert "Joining: helps at 6 of 24 sites, hurts at 5" in text
    assert text.count('data-site="hospital-23"') >= 2
    assert "data-filter" in text
    assert "24 sites" in text


def test_an_answer_of_earlier_runs_or_one_that_was_changed_is_not_shown(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "fedavg", 0, HITS)
    answered(run, answer(SITES, runs={"run": ""}))
    assert answer_of(gather([run])[0]) is not None
    answered(run, answer(SITES, runs={"run": "0" * 64}))
    assert answer_of(gather([run])[0]) is None
    answered(run, answer(SITES, digest="0" * 64))
    with pytest.raises(UserError, match="is damaged"):
        answer_of(gather([run])[0])


def test_a_smaller_brier_score_is_better(tmp_path: Path) -> None:
    """Logistic regression has 0.72, alone 0.70, joined 0.64, 0.80 and 0.71."""
    lossy = group(tmp_path / "run", metric="brier score")
    plot = verdict.gain_plot(lossy)
    assert plot is not None
    assert plot.rows[0].ticks[1].text == "logistic regression: 0.720, -0.020 over alone"


def test_calibration_has_a_table_and_a_diagram(tmp_path: Path) -> None:
    body = answer(SITES)
    body["sites"]["b"]["quality"] = {
        model: {"accuracy": 0.8, "auroc": area, "auprc": None, "brier score": 0.125,
                "confusion": [[1]], "reliability": [[0.1, 0.2, 5], [0.9, 0.8, 5], [0.5, None, 0]]}
        for model, area in (("joined", None), ("alone", 0.7))
    }  # fmt: skip
    body["sites"]["b"]["remarks"] = ["the joined model is not shown to beat logistic regression"]
    (only,) = gather([answered(record(tmp_path / "run", "fedavg", 0, HITS), body)])
    made = quality.section(only, "calibration-1")
    assert made is not None
    (table,) = made.tables
    # what is undefined everywhere, such as AUROC and AUPRC of three classes, has no column
    assert table.header == ("site", "model", "accuracy, %", "auroc, %", "brier score")
    rows = [[cell.text for cell in row] for row in table.rows]
    assert rows[0] == ["b", "joined", "80.0", "\N{EN DASH}", "0.125"]
    assert len(made.pictures) == 1
    text = page.page([only])
    assert "Calibration and other metrics: fedavg" in text
    assert "helps at b; the joined model is not shown to beat logistic regression" in text
