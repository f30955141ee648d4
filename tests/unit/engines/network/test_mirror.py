"""A log that goes, is cut or exchanged is missed, since its end is known elsewhere."""

import json
import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.core.federation import Moment
from atoll.core.messages import pack
from atoll.data.own.agreement import Offer
from atoll.engines.network.contract import Contract
from atoll.engines.network.egress import Counted, EgressLog, accept, audited, lines
from atoll.engines.network.kits import Kit
from atoll.engines.network.mirror import End, Mirror, append_only
from atoll.engines.network.site import _standing

MOMENT = Moment(0, 0, 1)
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    (tmp_path / "basel").mkdir()
    (tmp_path / "basel-store").mkdir()
    return tmp_path / "basel"


def log(kit: Path) -> EgressLog:
    return EgressLog(kit.with_name("basel-store") / "egress.jsonl", Mirror.of_kit(kit))


def filled(kit: Path, count: int = 3) -> EgressLog:
    made = log(kit)
    for _ in range(count):
        made.left("run-1", "fit", MOMENT, pack(Offer("key")))
    return made


def test_the_copy_lies_beside_the_kit_and_has_the_logs_end(kit: Path) -> None:
    made = filled(kit)
    path = kit.with_name("basel-egress.json")
    assert json.loads(path.read_text()) == vars(made.end)
    size = made.path.stat().st_size
    assert made.end == End(3, made.last, made.total(), size)
    assert log(kit).end == made.end


def test_a_log_without_the_copy_of_its_end_stops_the_site(kit: Path) -> None:
    made = filled(kit)
    Mirror.of_kit(kit).path.unlink()
    with pytest.raises(UserError, match="no copy of the egress log's end is here") as caught:
        log(kit)
    assert "--accept-log" in caught.value.remedy
    with pytest.raises(UserError, match="no copy of the egress log's end is here"):
        made.refused("run-1", "fit", "something")  # a site that is at work meanwhile
    with pytest.raises(UserError, match="no copy of the egress log's end is here"):
        Mirror.of_kit(kit).watch(made.path)
    assert not Mirror.of_kit(kit).path.exists()
    assert len(audited(kit.with_name("basel-store"))) == 3


def test_a_log_without_the_copy_of_its_end_is_accepted_in_its_own_words(kit: Path) -> None:
    made = filled(kit)
    accept(made.path, Mirror.of_kit(kit))  # there is nothing to accept
    assert log(kit).count == 3
    Mirror.of_kit(kit).path.unlink()
    accept(made.path, Mirror.of_kit(kit))
    last = audited(kit.with_name("basel-store"))[-1]
    assert last.words == "accepted at this site: 3 lines without a copy of their end"
    assert log(kit).end == Mirror.of_kit(kit).read()
    assert (log(kit).count, log(kit).total()) == (4, made.total())


def test_what_is_spent_of_the_budgets_is_in_the_copy_and_shown(kit: Path) -> None:
    made = log(kit)
    made.left("run-1", "fit", MOMENT, pack(Offer("key")), Counted("wine", 1, 2))
    made.left("run-2", "fit", MOMENT, pack(Offer("key")), Counted("wine", 1, 2))
    made.left("run-2", "compare", MOMENT, pack(Offer("key")), Counted("digits"))
    assert Mirror.of_kit(kit).read() == log(kit).end
    assert log(kit).end.spent == {"wine": [2, 4, 2, 0], "digits": [0, 0, 1, 1]}
    (kit / "kit.json").write_text('{"name": "basel", "server": "localhost", "port": 8102}')
    shown = _standing(Kit(kit), Contract(epochs_in_all=9), made.end, appended=False)[1:]
    assert shown == [
        f"basel: {spent} are spent"
        for spent in (
            "2 of 1,000 rounds, 4 of 9 epochs, 2 of 200,000 answers, 0 of 5 comparisons"
            " on the data wine",
            "0 of 1,000 rounds, 0 of 9 epochs, 1 of 200,000 answers, 1 of 5 comparisons"
            " on the data digits",
        )
    ]


def test_a_log_that_is_ahead_of_its_copy_is_taken(kit: Path) -> None:
    """A site that is killed between the two has the line and not yet its copy."""
    filled(kit, 2)
    before = Mirror.of_kit(kit).read()
    filled(kit, 1)
    Mirror.of_kit(kit).write(before)
    assert log(kit).count == 3


@pytest.mark.parametrize(
    ("keep", "words"), [(0, "has 0 lines and had 3"), (1, "has 1 lines and had 3")]
)
def test_a_log_that_was_cut_stops_the_site(kit: Path, keep: int, words: str) -> None:
    path = filled(kit).path
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]))
    with pytest.raises(UserError, match=f"the egress log {words}") as caught:
        log(kit)
    assert "move the store and basel-egress.json away together" in caught.value.remedy
    with pytest.raises(UserError, match="vanished or become shorter"):
        Mirror.of_kit(kit).watch(path)


def test_a_log_that_is_gone_stops_the_site(kit: Path) -> None:
    path = filled(kit).path
    path.unlink()
    with pytest.raises(UserError, match="the egress log has 0 lines and had 3"):
        log(kit)


def test_another_log_in_its_place_stops_the_site(kit: Path, tmp_path: Path) -> None:
    path = filled(kit).path
    other = EgressLog(tmp_path / "other.jsonl")
    for _ in range(5):
        other.left("run-2", "fit", MOMENT, pack(Offer("another key")))
    path.write_bytes(other.path.read_bytes())
    with pytest.raises(UserError, match="line 3 of the egress log is not the one"):
        log(kit)


def test_a_log_that_goes_while_it_is_open_is_not_begun_anew(kit: Path) -> None:
    made = filled(kit)
    made.path.unlink()
    with pytest.raises(UserError, match="another process changed the egress log"):
        made.refused("run-1", "fit", "something")
    assert not made.path.exists()


def test_a_copy_that_is_damaged_is_said(kit: Path) -> None:
    filled(kit)
    Mirror.of_kit(kit).path.write_text("{")
    with pytest.raises(UserError, match="the copy of the egress log's end is damaged"):
        log(kit)


def test_a_log_that_can_only_be_appended_to(kit: Path) -> None:
    made = filled(kit)
    if not append_only(made.path, True):
        pytest.skip("needs a system that lets this user make files append-only")
    try:
        with pytest.raises(PermissionError):
            made.path.unlink()
        with pytest.raises(PermissionError):
            made.path.write_bytes(b"")
        made.left("run-1", "fit", MOMENT, pack(Offer("key")))
        assert log(kit).count == 4
    finally:
        append_only(made.path, False)


def test_an_audit_of_a_store_compares_the_log_with_the_copy_of_its_end(kit: Path) -> None:
    made, store = filled(kit), kit.with_name("basel-store")
    for place in (store, made.path):
        assert [line.hash for line in audited(place)][-1] == made.last
    whole = made.path.read_bytes()
    made.path.write_bytes(b"".join(whole.splitlines(keepends=True)[:1]))
    with pytest.raises(UserError, match="the egress log has 1 lines and had 3"):
        audited(store)
    made.path.write_bytes(b"")
    with pytest.raises(UserError, match="the egress log has 0 lines and had 3"):
        audited(store)
    made.path.unlink()
    with pytest.raises(UserError, match="the egress log has 0 lines and had 3"):
        audited(store)
    Mirror.of_kit(kit).path.unlink()
    with pytest.raises(UserError, match="no egress log here"):
        audited(store)
    with pytest.raises(UserError, match="no egress log here") as caught:
        audited(kit.with_name("nowhere"))
    assert caught.value.remedy.endswith("the first atoll join makes it")


def test_an_audit_of_a_store_elsewhere_knows_no_copy(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    made = EgressLog(tmp_path / "other" / "egress.jsonl")
    made.refused("run-1", "fit", "something")
    assert len(audited(tmp_path / "other")) == 1
    made.path.write_bytes(b"")
    assert audited(tmp_path / "other") == []


def _writes(path: Path, count: int, ready: Event) -> None:
    """A process that writes lines, and opens the log anew whenever another one was faster."""
    log_here = EgressLog(path)
    ready.wait(60)
    for number in range(count):
        try:
            log_here.refused("run", "fit", f"question {number}")
        except UserError:
            log_here = EgressLog(path)


def test_two_jobs_of_one_site_do_not_break_the_chain(tmp_path: Path) -> None:
    """A coordinator can start two jobs at once: both write the log, one line after the other."""
    path, ready = tmp_path / "egress.jsonl", FORK.Event()
    processes = [FORK.Process(target=_writes, args=(path, 200, ready)) for _ in range(2)]
    for process in processes:
        process.start()
    ready.set()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert len(list(lines(path))) > 200


def test_refusals_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count goes on in a new process; answers are written down in any case."""
    monkeypatch.setattr("atoll.engines.network.egress.MOST_REFUSALS", 5)
    path = tmp_path / "egress.jsonl"
    for _ in range(3):
        log_here = EgressLog(path)
        for number in range(4):
            log_here.refused("run", "fit", f"question {number}")
    log_here.left("run", "fit", MOMENT, pack(Offer("key")), Counted("wine", 1, 2))
    words = [line.words for line in lines(path)]
    assert [line.startswith("refused 'fit'") for line in words] == [True] * 5 + [False] * 2
    assert words[5] == "5 refusals are written down here; further ones are in nvflare.log alone"
    assert words[6].startswith("answered 'fit'")
