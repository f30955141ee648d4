"""A site that the answer withholds has no results on the page, and is in no mean of it."""

from pathlib import Path

import pytest

from atoll.core.record import Record, Snapshot
from atoll.report import page
from atoll.report.progress import progress
from atoll.report.story import Story, stories
from atoll.report.tables import Group, Table, gather
from tests.unit.report.records import answer, answered, record

REASON = "too few test rows"
DASH = "\N{EN DASH}"
HITS = {"a": 8, "b": 6, "five": 4}
SITES = {"a": (0.1, 0.05, "helps"), "b": (0.0, 0.05, "cannot tell")}
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
