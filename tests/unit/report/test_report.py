"""The report: its numbers worked out by hand, its words no more than the record shows."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.core.record import Record, Snapshot
from atoll.methods.chfl import VARIANTS
from atoll.report import attribution, page, tables
from atoll.report.departures import departures, merged
from atoll.report.figures import curves
from atoll.report.story import stories
from atoll.report.tables import Group, gather
from atoll.runs.result import Run, event_digests
from tests.unit.report.records import answer, answered, record


@pytest.fixture
def groups(tmp_path: Path) -> list[Group]:
    """Two seeds of a method, and of the method alone."""
    found = []
    for seed in (0, 1):
        found.append(record(tmp_path / f"m{seed}", "fedavg", seed, {"": {"a": 8, "b": 6 + seed}}))
        found.append(record(tmp_path / f"n{seed}", "alone", seed, {"": {"a": 7, "b": 7}}))
    return gather(found)


def texts(table: tables.Table | None) -> list[list[str]]:
    assert table is not None
    return [[cell.text for cell in row] for row in table.rows]


def test_runs_that_differ_in_their_seed_alone_are_one_group(groups: list[Group]) -> None:
    assert [(group.label, len(group.runs)) for group in groups] == [("fedavg", 2), ("alone", 2)]


def test_the_table_has_mean_and_spread_over_seeds(groups: list[Group]) -> None:
    rows = texts(tables.results(groups))
    # seed 0: (0.8 + 0.6) / 2 = 0.70, seed 1: (0.8 + 0.7) / 2 = 0.75
    assert rows[0][:2] == ["fedavg", "72.5 ± 2.5"]
    assert rows[0][3] == "65.0 ± 5.0"  # the worst site
    assert rows[1][:2] == ["alone", "70.0 ± 0.0"]
    table = tables.results(groups)
    assert table.header == ("model", "accuracy, %", "macro-F1, %", "worst site, %", "seeds")


def two_methods(folder: Path, device: str, *engines: str) -> list[Group]:
    """A method with its own yardstick and the method alone, one seed, each on its engine."""
    variants = [{"solo": {"a": 5, "b": 5}, "fccl": {"a": 8, "b": 6}}, {"": {"a": 7, "b": 7}}]
    return gather([
        record(folder / method, method, 0, hits, device=device, engine=engine)
        for method, hits, engine in zip(("fccl", "alone"), variants, engines, strict=True)
    ])  # fmt: skip


UNPAIRED = "unpaired: kernels were chosen by timing; set engine.deterministic = true"
FIXED, TIMED = "deterministic = true", "deterministic = false"


@pytest.mark.parametrize(
    ("device", "engines", "unpaired"),
    [
        ("cuda:0", (TIMED, TIMED), True),
        ("cuda", (FIXED, ""), True),  # a record of an older release does not say
        ("cuda:0", (FIXED, FIXED), False),
        ("cpu", (TIMED, TIMED), False),
    ],
)
def test_methods_on_a_gpu_are_unpaired_unless_their_kernels_are_fixed(
    tmp_path: Path, device: str, engines: tuple[str, str], unpaired: bool
) -> None:
    groups = two_methods(tmp_path, device, *engines)
    table = tables.differences(groups)
    names = [row[0] for row in texts(table)]
    # within a run both models begin with the same training; only the runs are apart
    assert names == ["fccl: fccl", "fccl: fccl" + " (unpaired)" * unpaired]
    assert table is not None
    assert (UNPAIRED in table.caption) == unpaired
    assert page.page(groups).count(UNPAIRED) == unpaired


def test_differences_are_paired_by_seed_and_site(groups: list[Group]) -> None:
    (row,) = texts(tables.differences(groups))
    # site a gains 0.1 twice; site b loses 0.1, then nothing
    assert row == ["fedavg", "alone", "+2.5 ± 2.5", "-5.0", "+10.0", "2/1/1"]


def test_without_an_answer_the_page_makes_no_claim(groups: list[Group]) -> None:
    """Not with one seed, not with several, not beside a run of the method alone."""
    for some in (groups, groups[:1]):
        text = page.page(some)
        assert "No verdict yet" in text
        assert "atoll answer " in text
        for word in ("gained", "lost", "gain over being alone", "No site"):
            assert word not in text


def test_a_site_that_was_away_in_one_seed_has_the_mean_of_the_others(tmp_path: Path) -> None:
    hits = [{"a": 8, "b": 6}, {"a": 8}]
    found = [record(tmp_path / str(n), "fedavg", n, {"": told}) for n, told in enumerate(hits)]
    assert texts(tables.sites(gather(found)[0])) == [
        ["a", "80.0 ± 0.0"], ["b", "60.0"],
    ]  # fmt: skip


def test_a_check_of_the_engine_that_failed_is_told(tmp_path: Path) -> None:
    """Of a run by itself, and of a sweep, whose runs have one engine."""
    choices = {"1": {"mode": "stacked"}, "2": {"mode": "loop", "refuted": "round 4 of stage 1: no"}}
    one = record(tmp_path / "one", "fedavg", 0, {"": {"a": 8, "b": 8}})
    assert "check of the engine" not in page.page(gather([one]))
    (one / "engine.json").write_text(json.dumps(choices))
    point = record(tmp_path / "sweep" / "point-0000", "fedavg", 0, {"": {"a": 8, "b": 8}})
    (tmp_path / "sweep" / "sweep.json").write_text("[]")
    (tmp_path / "sweep" / "engine.json").write_text(json.dumps(choices))
    for folder in (one, point):
        assert "were run one by one: round 4 of stage 1: no." in page.page(gather([folder]))


def test_other_data_are_not_compared(tmp_path: Path) -> None:
    one = record(tmp_path / "one", "fedavg", 0, {"": {"a": 8, "b": 8}})
    two = record(tmp_path / "two", "alone", 0, {"": {"a": 1, "b": 1}})
    facts = json.loads((two / "facts.json").read_text())
    facts["data"]["fingerprint"] = "0" * 64
    (two / "facts.json").write_text(json.dumps(facts))
    found = gather([one, two])
    assert tables.differences(found) is None
    assert len(stories(found)) == 2  # two tasks, not one comparison


def test_models_of_a_run_are_compared_with_the_one_trained_alone(tmp_path: Path) -> None:
    hits = {"local": {"a": 5, "b": 5}, "auto": {"a": 7, "b": 6}}
    (row,) = texts(tables.differences(gather([record(tmp_path / "run", "chfl", 0, hits)])))
    assert row == ["chfl: auto", "chfl: local", "+15.0", "+10.0", "+20.0", "2/0/0"]


def test_models_of_chfl_are_explained_and_others_are_not(tmp_path: Path) -> None:
    hits = {str(name): {"a": 5, "b": 5} for name in VARIANTS}
    groups = gather([record(tmp_path / "run", "chfl", 0, hits)])
    assert sorted(stories(groups)[0].models) == sorted(VARIANTS)
    assert "<b>mu&gt;0</b> is as mu=0, and" in page.page(groups)
    other = gather([record(tmp_path / "other", "fedavg", 0, {"": {"a": 5, "b": 5}})])
    assert stories(other)[0].models == {}
    assert "Models: " not in page.page(other)


def test_forgetting_is_told_in_each_definition(tmp_path: Path) -> None:
    found = gather([record(tmp_path / "run", "fedavg", 0, {"": {"a": 8, "b": 8}}, stages=2)])
    assert texts(tables.forgetting(found)) == [
        ["fedavg", "30.0", "30.0", "30.0", "-30.0"]
    ]  # fmt: skip
    assert "Earlier tasks ended 30.0 points below their best accuracy." in page.page(found)
    assert "Not in the record of this run: with attribution = true" in page.page(found)


def seen(stage: int, doing: str, *accuracy: float) -> Snapshot:
    rows = tuple((0.0, value) for value in accuracy)
    names = tuple(str(task) for task in range(len(accuracy)))
    return Snapshot(stage, "a", f"after {doing}", names, ("round", "accuracy"), rows)


def by_hand(folder: Path) -> Path:
    """Site a: 0.8 on the first task when it was learned, 0.5 in the end."""
    record(folder, "fedavg", 0, {"": {"a": 8, "b": 8}}, stages=2)
    snapshots = [
        seen(0, "own", 0.3), seen(0, "others", 0.8),
        seen(1, "others", 0.8, 0.1), seen(1, "own", 0.4, 0.9), seen(1, "others", 0.5, 0.8),
    ]  # fmt: skip
    Record(folder).write_snapshots(snapshots)
    return folder


def test_every_change_is_put_down_to_what_was_done_last(tmp_path: Path) -> None:
    folder = by_hand(tmp_path / "run")
    # 0.8 -> 0.8 others, -> 0.4 own, -> 0.5 others, and the score after the stage is 0.5 too
    (share,) = attribution.shares(Run(folder)).values()
    assert share.own == pytest.approx(-0.4)
    assert share.others == pytest.approx(0.1)
    assert share.choice == 0
    table = attribution.table(gather([folder])[0])
    assert table is not None
    assert table.header == (
        "site", "own training, points", "from other sites, points", "together, points",
    )  # fmt: skip
    assert [cell.text for cell in table.rows[0]] == ["a", "-40.0", "+10.0", "-30.0"]
    text = page.page(gather([folder]))
    assert (
        "changed by -40.0 points through own training and by +10.0 points through what came from"
        in text
    )
    assert "What causes forgetting: fedavg" in text


def test_what_left_is_what_the_ledger_has(groups: list[Group]) -> None:
    (a, b) = departures(groups[0].first)
    assert (a.client, b.client) == ("a", "b")
    assert a.sentence.startswith("2 messages, 1.0 KB. 48 B of this are tensors: weights/w (2 x 3).")
    assert "No other tensor left: no table of rows, no list of labels." in a.sentence
    assert "952 B were headers and plain values" in a.sentence


def test_a_tensor_that_the_server_sent_too_is_no_weight_by_that(tmp_path: Path) -> None:
    """SCAFFOLD's control variates go both ways and are no weights."""
    sent = (("control/w", "float32", (6,)), ("weights/w", "float32", (6,)))
    folder = record(tmp_path / "run", "fedavg", 0, {"": {"a": 8, "b": 8}}, tensors=sent)
    (a, _) = departures(gather([folder])[0].first)
    assert "weights of the shared model" not in a.sentence
    assert {"weights", "other tensors"} <= set(a.by_kind)


def test_what_sites_tell_before_training_is_said_where_they_have_own_tables(
    tmp_path: Path,
) -> None:
    folder = record(tmp_path / "run", "fedavg", 0, {"": {"a": 8, "b": 8}})
    block = {"kind": "text", "levels": ["f", "m"], "missing": False, "start": 0, "site": ""}
    mine = {**block, "column": "ward", "site": "a"}
    some = {**block, "column": "scan", "start": 4}  # columns that some sites have are own there
    blocks = [{**block, "column": "sex"}, mine, some]
    recipe = {"classes": ["ill", "well"], "blocks": blocks}
    sites = {"a": {"own": [4]}, "b": {}}
    (folder / "recipe.json").write_text(json.dumps({**recipe, "sites": sites}))
    sentence = departures(gather([folder])[0].first)[0].sentence
    assert sentence.endswith(
        "the names and types of the common columns (sex), the names of the 2 classes, and each "
        "level (value) of the text columns sex."
    )
    (folder / "recipe.json").write_text(json.dumps({**recipe, "sites": {"a": {}}}))
    assert "Before training" not in departures(gather([folder])[0].first)[0].sentence


def test_sites_that_sent_the_same_have_one_paragraph(groups: list[Group]) -> None:
    (both,) = merged(departures(groups[0].first))
    assert both.title == "a, b (2 sites)"
    assert both.sentence.startswith(
        "2 messages, 1.0 KB per site. 48 B of this are tensors: weights/w (2 x"
    )
    assert both.total == {"weights": 96, "headers and plain values": 1904}
    assert page.page(groups[:1]).count("No other tensor left") == 1


def test_the_page_says_that_nothing_is_guaranteed_about_tensors_that_left(tmp_path: Path) -> None:
    hits = {"": {"a": 8, "b": 8}}
    weights = record(tmp_path / "weights", "fedavg", 0, hits)
    logits = record(tmp_path / "logits", "fedmd", 0, hits, tensors=(("logits", "float32", (2, 3)),))
    alone = record(tmp_path / "alone", "alone", 0, hits, tensors=())
    (story,) = stories(gather([weights, logits, alone]))
    words = {part.label: part.guarantee for part in story.parts}
    assert words["fedavg"].startswith("What left (weights) depends on the rows")
    assert words["fedmd"].startswith("What left (logits) depends on the rows")
    assert "no differential privacy and no secure aggregation" in words["fedavg"]
    assert words["alone"] == ""
    text = page.page(gather([weights, logits, alone]))
    assert text.count("there is no privacy guarantee. docs/privacy.md says") == 2
    assert "guarantee" not in page.page(gather([alone]))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("weights/1.bias", "weights"), ("embedding", "embeddings"), ("logits", "logits"),
     ("gradient", "gradients"), ("labels", "labels"), ("something", "other tensors")],
)  # fmt: skip
def test_a_tensor_is_of_the_kind_of_its_field(tmp_path: Path, name: str, kind: str) -> None:
    sent = ((name, "float32", (6,)), ("weights/w", "float64", (3,)))
    folder = record(tmp_path / "run", "fedavg", 0, {"": {"a": 8, "b": 8}}, tensors=sent)
    by_kind = dict(departures(Run(folder))[0].by_kind)
    assert by_kind.pop("headers and plain values") == 952
    assert by_kind == ({"weights": 48} if kind == "weights" else {"weights": 24, kind: 24})


def test_a_command_runs_every_seed_again_and_names_every_data_set(tmp_path: Path) -> None:
    folders = [record(tmp_path / f"m{n}", "fedavg", n, {"": {"a": 8, "b": 8}}) for n in (0, 3)]
    other = record(tmp_path / "other", "splitnn", 1, {"": {"a": 8, "b": 8}})
    facts = json.loads((other / "facts.json").read_text())
    facts["data"] |= {"title": "elsewhere", "fingerprint": "0123456789abcdef" * 4}
    (other / "facts.json").write_text(json.dumps(facts))
    text = page.page(gather([*folders, other]))
    assert f"atoll run {folders[0]}/config.toml --seeds 0,3 --out again-1" in text
    assert f"atoll run {other}/config.toml --out again-2" in text
    assert "Fingerprint ffffffffffffffff." in text
    assert "elsewhere, 20 rows, 2 classes. Here. Fingerprint 0123456789abcdef." in text


def test_forgetting_is_a_dash_where_it_is_undefined(tmp_path: Path) -> None:
    staged = record(tmp_path / "two", "chfl", 0, {"": {"a": 8, "b": 8}}, stages=2)
    single = record(tmp_path / "one", "fedavg", 0, {"": {"a": 8, "b": 8}})
    rows = texts(tables.results(gather([staged, single])))
    assert [row[5] for row in rows] == ["30.0", "\N{EN DASH}"]
    assert tables.forgetting(gather([single])) is None
    lines = (staged / "events.jsonl").read_text().splitlines(keepends=True)
    cut = next(n for n, line in enumerate(lines) if '"event":"stage"' in line)
    (staged / "events.jsonl").write_text("".join(lines[: cut + 1]))
    assert tables.forgetting(gather([staged])) is None  # it is still at its first stage
    assert "points below their best" not in page.page(gather([staged]))


def test_every_run_has_its_own_panel_and_its_own_stage_lines(tmp_path: Path) -> None:
    staged = record(tmp_path / "two", "chfl", 0, {"": {"a": 8, "b": 8}}, stages=2)
    longer = record(tmp_path / "three", "fedavg", 0, {"": {"a": 8, "b": 8}}, stages=3)
    single = record(tmp_path / "one", "splitnn", 0, {"": {"a": 8, "b": 8}})
    drawn = {one.name: one for one in curves(gather([staged, longer, single]), 1)}
    assert sorted(drawn) == ["loss-1", "loss-2", "test-1", "test-2"]  # one round has no curve
    assert drawn["loss-1"].title == "Training loss: chfl"
    dotted = [drawn[name].svg.count("stroke-dasharray") for name in ("loss-1", "loss-2")]
    assert dotted == [1, 2]


def test_a_tensor_that_no_server_sent_is_named_and_nothing_is_promised(tmp_path: Path) -> None:
    odd = (("rows", "float32", (200, 3)),)
    folder = record(tmp_path / "run", "fedavg", 0, {"": {"a": 8, "b": 8}}, tensors=odd)
    sentence = departures(gather([folder])[0].first)[0].sentence
    assert "The server had sent no tensor like these to this site: rows (200 x 3)." in sentence
    assert "no table of rows" not in sentence


def test_names_are_escaped_and_nothing_is_fetched(groups: list[Group]) -> None:
    text = page.page(groups)
    assert "&lt;b&gt;" in text
    assert not re.search(r'(?:src|href)="(?!#|data:)', text)
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(text.encode()) < 3_000_000


def test_the_page_is_a_pure_function_of_the_records(groups: list[Group]) -> None:
    assert page.page(groups) == page.page(groups)


def test_a_run_that_has_not_been_tested_yet_has_a_page(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", "fedavg", 0, {"": {"a": 8, "b": 8}})
    (folder / "events.jsonl").write_text("")
    text = page.page(gather([folder]))
    assert "fedavg has not ended: it runs on made" in text
    assert "0 of 1 stages are finished." in text
    assert "The run has not ended. There is a verdict after the last stage." in text
    assert "It has not been tested yet." in text


def test_figures_come_as_files_too(tmp_path: Path, groups: list[Group]) -> None:
    folders = [run.folder for group in groups for run in group.runs]
    runs = event_digests(groups[0].runs)  # the answer is that of the first group alone
    answered(tmp_path, answer({"a": (0.1, 0.05, "helps")}, seeds=[0, 1], runs=runs))
    page.write(folders, tmp_path / "page.html", tmp_path / "figures")
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names == [
        "accuracy-1.svg", "accuracy-2.svg", "flow-1.svg", "flow-2.svg", "gain-1.svg",
        "rows-1.svg", "rows-2.svg",
    ]  # fmt: skip
    assert "currentColor" not in (tmp_path / "figures" / "gain-1.svg").read_text()
    page.write(folders, tmp_path / "page.html", tmp_path / "figures")  # earlier ones are replaced
    (tmp_path / "figures" / "gain-1.svg").write_text("<svg>somebody's own</svg>")
    with pytest.raises(UserError, match="the file is there already"):
        page.write(folders, tmp_path / "page.html", tmp_path / "figures")


def test_a_folder_without_a_run_is_said_to_have_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in this folder"):
        gather([tmp_path])


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", "fedavg", 0, {"": {"a": 8, "b": 8}})
    code = (
        "import sys; from pathlib import Path; from atoll.report import page\n"
        "page.write([Path(sys.argv[1])], Path(sys.argv[1]) / 'page.html')\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert done.returncode == 0
