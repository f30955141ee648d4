"""What the report says of split networks, from records of small runs."""

from pathlib import Path
from typing import Any

import pytest

from atoll.core.record import Snapshot
from atoll.engines.local import LocalEngine, local_engine
from atoll.report import leakage, page, tables, vertical
from atoll.report.departures import departures
from atoll.runs.config import change, resolve
from atoll.runs.execute import execute
from atoll.runs.sweep import points, sweep

SMALL: dict[str, Any] = {
    "name": "vleto",
    "rounds": 2,
    "data": {"name": "digits"},
    "scenario": {"split": "parties", "clients": 4, "cut": "quadrants", "train": 0.3,
                 "mode": "classes", "window": 4, "stages": 2},
    "method": {"name": "vleto", "rate": 0.1, "batch": 32, "width": 12, "fisher_rows": 64},
    "engine": {"mode": "loop"},
    "replace": "atoll.audits.leakage:snapshots",
}  # fmt: skip


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> tables.Group:
    folder = tmp_path_factory.mktemp("run") / "vleto"
    execute(resolve(SMALL, "test"), folder, local_engine)
    return tables.gather([folder])[0]


def cells(table: tables.Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def snapshots(group: tables.Group, name: str, stage: int) -> list[Snapshot]:
    return [
        snapshot
        for snapshot in group.first.snapshots
        if (snapshot.name, snapshot.stage) == (name, stage)
    ]


def test_tasks_prototypes_weights_held_back_and_leaks_have_a_table_each(
    group: tables.Group,
) -> None:
    found = vertical.section(group, 1)
    assert found is not None
    tasks, held, ancestry, leaks = (cells(table) for table in found.tables)
    assert [row[0] for row in tasks] == ["task-0", "task-1", "all classes so far"]
    assert tasks[1][1] == "\N{EN DASH}"  # not tested before its stage
    assert [row[1:] for row in held] == [["0.0", "100.0"]] * 4
    fates = {row[0]: row[1:] for row in ancestry}
    assert fates["0"] == ["made", "kept"]
    assert fates["2"] == ["made", "mixed, moved 0.0 %"]  # all weights were held back
    assert fates["5"] == ["", "made"]
    assert [row[1] for row in leaks[:3]] == ["as set", "clip and noise 0.3", "clip and noise 1"]
    guessed = [float(row[2].removesuffix(" %")) for row in leaks[:3]]
    assert guessed[0] > 75  # chance is 25
    assert guessed[2] < guessed[0]
    assert len(leaks) == 3 + 2 * 4


def test_embeddings_are_drawn_with_prototypes_on_top(group: tables.Group) -> None:
    found = vertical.section(group, 1)
    assert found is not None
    assert [picture.name for picture in found.pictures] == ["map-1"]
    drawn = snapshots(group, "embeddings", 1)[0]
    assert set(drawn.rows) == set("012345")
    assert snapshots(group, "prototypes", 1)[0].rows == tuple("012345")
    assert "after stage 2" in found.pictures[0].svg
    html = page.page([group])
    assert "Stage by stage" in html


def test_what_sites_see_of_their_columns_stays_at_their_own_look(group: tables.Group) -> None:
    found = snapshots(group, "columns from embeddings", 0)
    assert [snapshot.part for snapshot in found] == list(group.first.facts["clients"])
    assert all(snapshot.rows == ("as set", "digits = 1") for snapshot in found)


def test_other_methods_have_no_such_section(group: tables.Group) -> None:
    class Other:
        method = "fedavg"

    assert vertical.section(Other(), 1) is None  # type: ignore[arg-type]


def test_runs_that_differ_in_one_number_are_drawn_over_it(tmp_path: Path) -> None:
    values = change(SMALL, {"rounds": 1, "scenario.clients": 4})
    made = points(values, {"lambda_a": [0.2, 0.5, 0.8]}, tmp_path)
    sweep(made, tmp_path, LocalEngine)
    groups = tables.gather([point.folder for point in made])
    tasks, picture = vertical.overall(groups)
    assert picture.title == "Sensitivity to lambda_a"
    assert "after stage 2" in picture.svg
    for label in [group.label for group in groups]:
        assert label in tasks.svg
    assert tasks.svg.count(">all<") == 2  # after each of two stages
    assert vertical.overall(groups[:1]) == []
    assert [made.title for made in vertical.overall(groups[:2])] == [tasks.title]
    assert {tasks.name, picture.name} <= {one.name for one in page.pictures(groups)}


def test_runs_that_differ_in_a_pair_of_numbers_are_drawn_over_the_pair(tmp_path: Path) -> None:
    folders = []
    for rule, deviations in ((5.0, 1.0), (15.0, 3.0), (25.0, 5.0)):
        changes = {"rounds": 1, "method.k0": rule, "method.alpha": deviations}
        folders.append(tmp_path / f"{rule:g}")
        execute(resolve(change(SMALL, changes), "test"), folders[-1], local_engine)
    _, picture = vertical.overall(tables.gather(folders))
    assert picture.title == "Sensitivity to alpha / k0"
    for pair in ("1 / 5", "3 / 15", "5 / 25"):
        assert pair in picture.svg


def test_the_page_tells_what_each_task_lost_and_compares_no_unlike_rows(
    group: tables.Group,
) -> None:
    html = page.page([group])
    assert "nan" not in html.split("</header>")[0]
    lost = group.first.metrics[""]["forgetting_best_last"]
    assert f"Earlier tasks ended {100 * lost:.1f} points below" in html
    assert tables.differences([group]) is None  # the union has other rows than the tasks
    (heat,) = [made for made in page.pictures([group]) if made.name == "accuracy-1"]
    first = [e for e in group.first.scores if (e.variant, e.task, e.stage) == ("", 0, 1)]
    assert f">{100 * first[0].accuracy:.0f}<" in heat.svg  # an old task after the last stage


def test_what_left_a_site_is_told_in_few_words(group: tables.Group) -> None:
    (sentence, *_) = [one.sentence for one in departures(group.first)]
    assert sentence.count("embedding (") == 2  # once among all, once among what was not sent to it
    assert " to " in sentence.split("embedding (")[1].split(")")[0]


def test_prototypes_that_did_not_move_have_no_flat_chart(group: tables.Group) -> None:
    found = vertical.section(group, 1)
    assert found is not None
    assert "prototypes-1" not in [picture.name for picture in found.pictures]


def test_the_privacy_finding_is_in_the_summary(group: tables.Group) -> None:
    badge = leakage.badge(group)
    assert badge.tone == "warn"
    table = leakage.table(group)
    assert table is not None
    columns = [float(row[2].value or 0) for row in table.rows if "columns" in row[0].text
               and row[1].text == "as set"]  # fmt: skip
    assert f"{100 * min(columns):.1f} to {100 * max(columns):.1f} %" in badge.words
    html = page.page([group])
    assert html.index(badge.words.split(".")[0]) < html.index('id="learned"')
