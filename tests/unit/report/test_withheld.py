"""A site that the answer withholds has no results on the page, and is in no mean of it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from atoll.api.comparison import compare
from atoll.api.result import load
from atoll.cli.terminal import print_result
from atoll.core.record import Record, Score, Snapshot
from atoll.report import page
from atoll.report.progress import progress
from atoll.report.story import Story, stories
from atoll.report.tables import Group, Table, gather
from atoll.runs.result import Run, left_out, shown_metrics
from tests.unit.report.records import answer, answered, record

REASON = "too few test rows"
DASH = "\N{EN DASH}"
HITS = {"a": 8, "b": 6, "five": 4}
SITES = {"a": (0.1, 0.05, "helps"), "b": (0.0, 0.05, "cannot tell")}
PARTIES = 'seed = 0\n[scenario]\nsplit = "parties"\n[method]\nname = "splitnn"\n'
FACTS = {
    "tasks": ["0"], "stages": 1, "known_at": [0], "data": {"title": "made", "classes": 2},
    "clients": ["a", "b"],
}  # fmt: skip
NOTE = f"Withheld, shown as a dash and in no mean: five ({REASON})."


def group(folder: Path, stages: int = 1) -> Group:
    """A run of three sites whose answer withholds one of them."""
    run = record(folder, "fedavg", 0, {"local": HITS, "auto": HITS}, stages)
    return gather([answered(run, answer(SITES, withheld={"five": REASON}))])[0]


def row(table: Table | None, site: str) -> list[str]:
    assert table is not None
    (only,) = [cells for cells in table.rows if cells[0].text == site]
    return [cell.text for cell in only[1:]]


def only(groups: list[Group]) -> Story:
    (story,) = stories(groups)
    return story


def test_tables_by_site_have_a_dash_and_the_reason(tmp_path: Path) -> None:
    (part,) = only([group(tmp_path / "run")]).parts
    assert row(part.sites, "a") == ["80.0", "80.0"]
    assert row(part.sites, "five") == [DASH, DASH]
    assert part.sites.caption.endswith(NOTE)
    verdicts = row(part.answered, "five")
    assert set(verdicts[:-1]) == {DASH}
    assert verdicts[-1] == f"withheld: {REASON}"


@pytest.mark.parametrize("stages", [1, 2])
def test_heat_maps_have_a_dash(tmp_path: Path, stages: int) -> None:
    (part,) = only([group(tmp_path / "run", stages=stages)]).parts
    assert part.heat is not None
    assert part.heat.words.endswith(NOTE)
    assert ">five<" in part.heat.svg
    assert part.heat.svg.count(f">{DASH}<") == (2 if stages == 1 else 4)  # models; task by stage
    assert ">40<" not in part.heat.svg  # what the record has of it
    assert ">80<" in part.heat.svg


def test_means_and_their_sentences_leave_it_out(tmp_path: Path) -> None:
    story = only([group(tmp_path / "run")])
    (part,) = story.parts
    # (0.8 + 0.6) / 2; with the withheld site 60.0
    assert "70.0 % of the test rows correctly, the mean over sites that are not withheld" in (
        part.summary
    )
    assert story.results.rows[0][1].text == "70.0"
    assert story.results.rows[0][3].text == "60.0"  # the worst site
    assert "the mean over sites that are not withheld" in story.results.caption
    assert "The mean gain over sites that are not withheld is" in part.card.words
    assert story.differences is not None
    assert story.differences.rows[0][-1].text == "0/2/0"


def test_every_sentence_on_the_page_with_a_mean_over_sites_is_plain(tmp_path: Path) -> None:
    text = page.page([group(tmp_path / "run", stages=2)])
    for place in range(text.count("mean over")):
        words = text.split("mean over")[place + 1][:60]
        assert not words.startswith((" sites,", " sites.", " sites and", " seeds and sites.")), (
            words
        )


def test_a_run_without_an_answer_beside_it_shows_no_more(tmp_path: Path) -> None:
    alone = gather([record(tmp_path / "alone", "alone", 0, {"": HITS})])[0]
    story = only([group(tmp_path / "run"), alone])
    assert [row(part.sites, "five")[0] for part in story.parts] == [DASH, DASH]
    assert [cells[1].text for cells in story.results.rows] == ["70.0"] * 3


def test_curves_say_what_they_are_the_mean_of(tmp_path: Path) -> None:
    several = group(tmp_path / "run", stages=2)
    words = {picture.name: picture.words for picture in only([several]).curves}
    assert words["loss-1"].startswith("The mean over seeds and all sites, withheld ones included")
    assert words["test-1"].startswith("The mean over seeds and sites that are not withheld.")


def seen(stage: int, site: str, *accuracy: float) -> Snapshot:
    """A test of each task after own training."""
    rows = tuple(str(task) for task in range(len(accuracy)))
    values = tuple((0.0, value) for value in accuracy)
    return Snapshot(stage, site, "after own", rows, ("round", "accuracy"), values)


def test_what_a_site_saw_of_its_model_is_left_out_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    record(folder, "fedavg", 0, {"": HITS}, stages=2)
    snapshots = [
        seen(stage, site, *accuracy)
        for stage, accuracy in ((0, (0.8,)), (1, (0.6, 0.8)))
        for site in HITS
    ]
    Record(folder).write_snapshots(snapshots)
    whole = gather([answered(folder, answer(SITES, withheld={"five": REASON}))])[0]
    (part,) = only([whole]).parts
    assert part.attributed is not None
    (table,) = part.attributed.tables
    assert row(table, "five") == [DASH] * len(table.header[1:])
    # a: score 0.8, own training 0.6, score 0.5; b: 0.6, 0.6, 0.3; five, left out: 0.4, 0.6, 0.1
    assert row(table, "all sites that are not withheld") == ["-10.0", "+0.0", "-20.0", "-30.0"]
    assert len(whole.first.snapshots) == 6  # the record has everything


def test_where_all_sites_are_withheld_nothing_is_shown(tmp_path: Path) -> None:
    body = answer({}, withheld=dict.fromkeys(HITS, REASON))
    run = record(tmp_path / "run", "fedavg", 0, {"": HITS}, stages=2)
    every = gather([answered(run, body)])
    story = only(every)
    assert "The test results of all sites are withheld." in story.parts[0].summary
    assert story.results.rows == ()
    assert set(row(story.parts[0].sites, "a")) <= {DASH}
    assert page.page(every)


def test_without_withheld_sites_nothing_changes(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "fedavg", 0, {"": HITS})
    story = only(gather([answered(run, answer(SITES))]))
    assert "60.0 % of the test rows correctly, the mean over sites." in story.parts[0].summary
    assert row(story.parts[0].sites, "five") == ["40.0"]


def test_means_over_domains_leave_it_out(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", "fedavg", 0, {"": {"a": 9, "b": 8, "five": 7}}, stages=3)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("[scenario]", '[scenario]\nsplit = "domains"'))
    (part,) = only(gather([answered(folder, answer(SITES, withheld={"five": REASON}))])).parts
    (section,) = part.sections
    (table,) = section.tables
    rows = {cells[1].text: [cell.text for cell in cells[2:]] for cells in table.rows}
    # hits of ten on domains 0, 1, 2; a: 3, 6, 9; b: 2, 5, 8; five, left out: 1, 4, 7
    assert rows == {
        "a (task-0)": ["30.0", "75.0"], "b (task-1)": ["50.0", "50.0"],
        "five (task-2)": [DASH, DASH], "mean": ["40.0", "62.5"],
    }  # fmt: skip
    assert table.caption.endswith(NOTE)
    assert section.pictures[0].svg.count(f">{DASH}<") == 3


def test_the_live_page_has_no_line_of_it(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "fedavg", 0, {"": HITS}, stages=2)
    config = run / "config.toml"
    config.write_text("rounds = 1\n" + config.read_text())
    assert [spark.name for spark in progress(run).sparks] == ["a", "b", "five"]
    answered(run, answer(SITES, withheld={"five": REASON}))
    assert [spark.name for spark in progress(run).sparks] == ["a", "b"]


def printed(runs: list[Run], verdict: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    print_result(runs, runs[0].folder, False, verdict)
    return " ".join(capsys.readouterr().out.split())


def test_terminal_python_and_page_have_the_same_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = group(tmp_path / "run").first
    assert first.accuracy == pytest.approx(0.6)  # of the whole record, which stays at the site
    words = printed([first], first.answer, capsys)
    assert "│ auto │ 0.7000 │ 0.5000 │ 0.6000 │" in words
    assert "Means leave out 1 of 3 sites, whose results are withheld." in words
    print_result([first], first.folder, True, first.answer)
    (body,) = json.loads(capsys.readouterr().out)["runs"]
    assert body["accuracy"] == pytest.approx(0.7)
    assert body["metrics"]["auto"]["worst_client"] == pytest.approx(0.6)

    result = load(first.folder)
    assert result.accuracy == pytest.approx(0.7)
    assert result.metrics["local"]["worst_client"] == pytest.approx(0.6)
    assert "auto    0.7000" in result.table()
    for text in (result.table(), repr(result)):
        assert "0.7000" in text
        assert "Means leave out 1 of 3 sites, whose results are withheld." in text

    story = only([group(tmp_path / "page")])
    assert story.results.rows[0][1].text == "70.0"
    assert "Means leave out 1 of 3 sites, whose results are withheld." in story.results.caption


def test_a_comparison_in_python_leaves_it_out(tmp_path: Path) -> None:
    group(tmp_path / "run")
    record(tmp_path / "other", "alone", 0, {"": {"a": 7, "b": 5, "five": 0}})
    both = compare(tmp_path / "run", tmp_path / "other")
    assert [row[1].text for row in both.results.rows] == ["70.0", "70.0", "60.0"]
    assert "Means leave out 1 of 3 sites, whose results are withheld." in both.results.caption
    assert both.differences is not None
    assert both.differences.rows[-1][2].text == "+10.0"  # with the withheld site +20.0
    assert both.differences.rows[-1][-1].text == "2/0/0"


def test_a_comparison_of_different_tasks_leaves_out_the_sites_of_each(tmp_path: Path) -> None:
    group(tmp_path / "run")
    other = record(tmp_path / "other", "alone", 0, {"": {"a": 7, "b": 5, "five": 0}})
    facts = json.loads((other / "facts.json").read_text())
    facts["data"]["fingerprint"] = "e" * 64
    (other / "facts.json").write_text(json.dumps(facts))
    both = compare(tmp_path / "run", other)
    assert [row[1].text for row in both.results.rows] == ["70.0", "70.0", "40.0"]


def test_where_all_sites_are_withheld_no_mean_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(tmp_path / "run", "fedavg", 0, {"": {"a": 8, "b": 6}})
    answered(run, answer({}, withheld={"a": REASON, "b": REASON}))
    result = load(run)
    verdict = result.answer | {"overall": {**result.answer["overall"], "gain": None}}
    words = printed(list(result.runs), verdict, capsys)
    assert "│ fedavg │ not known │ not known │ not known │" in words
    assert math.isnan(result.accuracy)
    assert "no results that are not withheld" in repr(result)
    assert "Means leave out 2 of 2 sites" in repr(result)


def test_the_results_of_parties_are_the_servers_and_stay(tmp_path: Path) -> None:
    run = Record.create(tmp_path / "run", PARTIES, FACTS)
    run.add([Score(0, 0, "server", 0, "", "test", 10, 8, 0.5)])
    run.close()
    runs = [Run(tmp_path / "run")]
    assert left_out(runs, {"a": REASON}) == ""
    assert shown_metrics(runs[0], {"a": REASON})[""]["final_accuracy"] == pytest.approx(0.8)
