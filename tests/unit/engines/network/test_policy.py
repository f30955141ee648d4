"""The gate of a site: what is answered, what is refused, what is written down, what is kept."""

import dataclasses
import hashlib
import json
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core.errors import BadMessageError, UserError
from atoll.core.federation import Moment
from atoll.core.messages import Check, Empty, Packet, Weights, pack
from atoll.engines.local import LocalEngine
from atoll.engines.network import egress
from atoll.engines.network.contract import RefusedError, SiteFile, read_site
from atoll.engines.network.policy import Gate
from atoll.engines.network.replies import error_kind, handle_request
from atoll.engines.network.requests import Finish
from atoll.runs.config import change, resolve, to_toml
from atoll.runs.facts import facts
from atoll.runs.parts import parts

FIRST = Moment(0, 0, 2)
TERMS = {"methods": ["alone", "fedavg"], "actions": ["fit", "check"], "steps": 1}


def config(method: str = "alone") -> str:
    values = {
        "data": "wine", "rounds": 4, "clients": 3, "widths": [4], "epochs": 1,
        "engine.mode": "loop", "threads": 1,
    }  # fmt: skip
    return to_toml(resolve(change({"method": method}, values), "test"))


def gate(folder: Path, method: str = "alone", **terms: Any) -> Gate:
    made = Gate(SiteFile(store=str(folder / "store"), contract={**TERMS, **terms}))
    made.prepare("run-1", config(method), "site-1")
    return made


def log(folder: Path) -> list[egress.Line]:
    """What was written down of a method's questions, and what was refused."""
    found = egress.lines(folder / "store" / "egress.jsonl")
    return [line for line in found if line.action != "prepare" or not line.bytes]


def test_a_gate_answers_as_the_local_engine_does(tmp_path: Path) -> None:
    made = parts(resolve(change({"method": "alone"}, {"data": "wine", "rounds": 2, "clients": 3,
        "widths": [4], "epochs": 1, "engine.mode": "loop"}), "test"))  # fmt: skip
    here = LocalEngine(made).carry("fit", FIRST, {"site-1": pack(Empty())})["site-1"]
    assert gate(tmp_path).handle(1, "fit", FIRST, pack(Empty())) == here


def test_a_question_that_comes_twice_is_done_once(tmp_path: Path) -> None:
    made = gate(tmp_path)
    first = made.handle(7, "fit", FIRST, pack(Empty()))
    state = {n: t.clone() for n, t in made._client.state().items()}
    assert made.handle(7, "fit", FIRST, pack(Empty())) is first
    for name, tensor in made._client.state().items():
        assert torch.equal(state[name], tensor)
    with pytest.raises(RefusedError, match="from before"):
        made.handle(6, "fit", FIRST, pack(Empty()))


def test_an_answer_that_leaves_again_is_logged_again(tmp_path: Path) -> None:
    """The log counts all bytes that left; budgets of rounds, epochs and answers are spent once."""
    made = gate(tmp_path, "fedavg", largest=2000)
    weights = pack(Weights(made._client.site.model().state_dict()))
    reply = made.handle(7, "fit", FIRST, weights)
    spent = dataclasses.replace(made.egress.spent("wine"))
    made.handle(7, "fit", FIRST, weights)
    one, two = log(tmp_path)
    assert one.words.startswith("answered 'fit' at stage 1, round 1: ")
    assert two.words == one.words.replace("answered", "answered again")
    assert (two.bytes, two.digest) == (one.bytes, one.digest) == (reply.size, one.digest)
    assert made.egress.spent("wine") == spent
    assert (spent.rounds, spent.answers) == (1, 1)
    restarted = egress.EgressLog(tmp_path / "store" / "egress.jsonl")
    assert restarted.spent("wine") == spent
    assert restarted.total() == made.egress.total()


def test_an_answer_that_leaves_again_has_the_byte_budget_of_others(tmp_path: Path) -> None:
    made = gate(tmp_path)
    size = made.handle(7, "fit", FIRST, pack(Empty())).size
    made.terms = dataclasses.replace(made.terms, total=made.egress.total() + size)
    made.handle(7, "fit", FIRST, pack(Empty()))
    with pytest.raises(RefusedError, match="bytes in all are not in the contract"):
        made.handle(7, "fit", FIRST, pack(Empty()))
    assert log(tmp_path)[-1].words.startswith("refused 'fit': more than")


def test_an_answer_is_given_again_for_the_same_question_alone(tmp_path: Path) -> None:
    """Who asks for a number without the question that goes with it gets nothing that was kept."""
    made = gate(tmp_path)
    first = made.handle(7, "fit", FIRST, pack(Empty()), made.run)
    assert made.handle(7, "fit", FIRST, pack(Empty()), made.run) is first
    others = (
        ("check", FIRST, pack(Empty())),
        ("fit", Moment(0, 1, 2), pack(Empty())),
        ("fit", FIRST, pack(Check(0, {}))),
        ("fit", FIRST, Packet(b"", b"", 0, 0, ())),
    )
    for action, moment, packet in others:
        with pytest.raises(RefusedError, match="another question under the number"):
            made.handle(7, action, moment, packet, made.run)
    with pytest.raises(RefusedError, match="a question of another run"):
        made.handle(7, "fit", FIRST, pack(Empty()), "run-2")


@pytest.mark.parametrize(
    ("terms", "action", "moment", "words"),
    [
        ({"actions": ["check"]}, "fit", FIRST, "the action 'fit' is not in the contract"),
        ({}, "state", FIRST, "the action 'state' is not in the contract"),
        ({}, "__init__", FIRST, "the action '__init__' is not in the contract"),
        ({}, "fit", Moment(1, 0, 2), "a moment that is not in the run"),
        ({}, "fit", Moment(-1, 0, 2), "a moment that is not in the run"),
        ({"question": 10}, "fit", FIRST, "a question of"),
        ({"largest": 10}, "fit", FIRST, "is larger than the contract allows"),
        ({"total": 10}, "fit", FIRST, "more than 10 bytes in all"),
    ],
)
def test_what_is_not_in_the_contract_is_refused_and_written_down(
    terms: dict[str, Any], action: str, moment: Moment, words: str, tmp_path: Path
) -> None:
    made = gate(tmp_path, **terms)
    with pytest.raises(RefusedError, match=words):
        made.handle(1, action, moment, pack(Empty()))
    (line,) = log(tmp_path)
    assert line.words.startswith(f"refused '{action}': ")
    assert words in line.words
    assert line.bytes == 0


def test_the_fingerprint_that_prepare_tells_is_written_down_before_it_leaves(
    tmp_path: Path,
) -> None:
    made = Gate(SiteFile(store=str(tmp_path / "store"), contract=TERMS))
    told = made.prepare("run-1", config(), "site-1")
    (line,) = egress.lines(tmp_path / "store" / "egress.jsonl")
    size = len(told.encode())
    assert line.words == f"answered 'prepare': {size} bytes, the fingerprint of its data"
    assert (line.run, line.action, line.bytes) == ("run-1", "prepare", size)
    assert line.digest == hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def test_words_of_the_coordinator_cannot_command_a_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, seen = gate(tmp_path), list[str]()
    made._tell = lambda: seen.append(made.doing)  # type: ignore[method-assign]
    reply = handle_request(made, 1, "\x1b[2J\nfit", [0, 0, 2], pack(Empty()), made.run)
    assert reply["kind"] == "refused"
    (line,) = log(tmp_path)
    assert line.words == "refused '?[2J fit': the action '?[2J fit' is not in the contract"
    assert seen[0] == "?[2J fit"
    assert caplog.messages == ["?[2J fit: the action '?[2J fit' is not in the contract"]


def test_stages_beyond_the_contract_are_refused(tmp_path: Path) -> None:
    made = gate(tmp_path, stages=1)
    made.handle(1, "fit", FIRST, pack(Empty()))
    with pytest.raises(RefusedError, match="stage 2 is not in the contract"):
        made.handle(2, "fit", Moment(1, 0, 2), pack(Empty()))


def test_the_total_counts_what_left_before_a_restart(tmp_path: Path) -> None:
    size = gate(tmp_path).handle(1, "fit", FIRST, pack(Empty())).size
    made = gate(tmp_path, total=2 * size - 1)
    with pytest.raises(RefusedError, match="in all"):
        made.handle(1, "fit", FIRST, pack(Empty()))


@pytest.mark.parametrize(
    ("run", "text", "client", "words"),
    [
        ("run-1", config("splitnn"), "site-0", "'splitnn' is not in the contract"),
        ("run-1", "data = [", "site-0", "not TOML"),
        ("run-1", config(), "site-9", "no client 'site-9'"),
        ("../run", config(), "site-0", "a run's name"),
        ("r" * 101, config(), "site-0", "a run's name"),
        ("run-1", "x" * (1 << 20) + "x", "site-0", "too long"),
        ("run-1", 'method = "alone"\ndata = { files = ["/a.csv"], label = "y" }', "a", "own files"),
    ],
)
def test_a_run_that_the_site_did_not_agree_to_is_refused(
    run: str, text: str, client: str, words: str, tmp_path: Path
) -> None:
    made = Gate(SiteFile(store=str(tmp_path), contract=TERMS))
    with pytest.raises(RefusedError, match=words):
        made.prepare(run, text, client)
    with pytest.raises(RefusedError, match="no run has been prepared"):
        made.handle(1, "fit", FIRST, pack(Empty()))


def test_a_site_takes_no_part_in_what_needs_whole_images(tmp_path: Path) -> None:
    values = {"data": "digits", "scenario.joint_aug": True, "threads": 1}
    text = to_toml(resolve(change({"method": "splitnn"}, values), "test"))
    made = Gate(
        SiteFile(store=str(tmp_path), contract={"methods": ["splitnn"], "actions": ["learn"]})
    )
    with pytest.raises(RefusedError, match="joint_aug is for simulation"):
        made.prepare("run-1", text, "site-0")


def test_a_site_goes_back_to_either_of_its_last_two_places(tmp_path: Path) -> None:
    made, states = gate(tmp_path), {}
    for number in range(3):
        made.handle(number + 1, "fit", Moment(0, number, 4), pack(Empty()))
        made.keep(f"0-{number + 1}")
        states[number + 1] = {n: t.clone() for n, t in made._client.state().items()}
    kept = sorted(path.name for path in (tmp_path / "store" / "run-1").glob("state-*"))
    assert kept == ["state-0-2.safetensors", "state-0-3.safetensors"]
    for number in (3, 2):
        again = gate(tmp_path)
        assert again.restore(f"0-{number}")
        for name, tensor in again._client.state().items():
            assert torch.equal(tensor, states[number][name])
    again = gate(tmp_path)
    assert not again.restore("0-1")  # it goes on with the newest it has, and says so
    for name, tensor in again._client.state().items():
        assert torch.equal(tensor, states[3][name])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"images": ["/etc", "/home"]}}, "names files"),
        ({"data": {"parties": ["/etc/passwd", "b.csv"]}}, "names files"),
        ({"public": {"images": "/home"}}, "names files"),
        ({"model": {"vectors": "/home/secret.txt"}}, "names files"),
        ({"engine": {"keep": "/home"}}, "names files"),
        ({"model": {"name": "webbrowser:open"}}, "names code"),
        ({"models": ["mlp", "os.path:join"]}, "names code"),
        ({"replace": "atoll.reproduce.faults.fedseit:head"}, "replaces parts of its method"),
        ({"replace": "os:system"}, "replaces parts of its method"),
        ({"replace": ["os:system"]}, "replaces parts of its method"),
        ({"data": ["files"]}, "agreed form"),
        ({"models": "a:b"}, "agreed form"),
    ],
)
def test_a_run_names_no_file_and_no_code_of_this_machine(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    made = Gate(SiteFile(store=str(tmp_path / "store"), contract=TERMS))
    values = {**tomllib.loads(config()), **changes}
    text = "\n".join(f"{key} = {_toml(value)}" for key, value in values.items())
    with pytest.raises(RefusedError, match=words):
        made.prepare("run-1", text, "site-1")


def test_a_run_replaces_parts_of_its_method_only_as_the_contract_lists(tmp_path: Path) -> None:
    """What is listed goes through to the method, which refuses that of another."""
    head, released = (f"atoll.reproduce.faults.fedseit:{name}" for name in ("head", "released"))
    terms = {**TERMS, "replacements": [head]}
    made = Gate(SiteFile(store=str(tmp_path / "store"), contract=terms))
    with pytest.raises(RefusedError, match="replaces parts of its method"):
        made.prepare("run-1", config().replace('replace = ""', f'replace = "{released}"'), "site-1")
    with pytest.raises(UserError, match="replaces parts of 'fedseit', not of"):
        made.prepare("run-1", config().replace('replace = ""', f'replace = "{head}"'), "site-1")
    with pytest.raises(UserError, match="'os:system' is not a replacement") as error:
        SiteFile(contract={**TERMS, "replacements": ["os:system"]}).terms()
    assert error.value.where == "[contract] replacements"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def test_all_runs_together_have_a_limit_too(tmp_path: Path) -> None:
    made = gate(tmp_path)
    made.handle(1, "fit", FIRST, pack(Empty()))
    terms = {**TERMS, "in_all": 2 * made.egress.total()}  # the fingerprint and an answer, twice
    made = Gate(SiteFile(store=str(tmp_path / "store"), contract=terms))
    made.prepare("run-2", config(), "site-1")
    made.handle(1, "fit", FIRST, pack(Empty()))
    made.prepare("run-3", config(), "site-1")
    with pytest.raises(RefusedError, match="of all runs"):
        made.handle(1, "fit", FIRST, pack(Empty()))


def test_a_site_keeps_places_and_snapshots_of_the_run_alone(tmp_path: Path) -> None:
    made = gate(tmp_path)
    with pytest.raises(RefusedError, match="not a stage and a round"):
        made.keep("abc")
    for stage in (1, "a name"):
        with pytest.raises(RefusedError, match="not in the run"):
            made.snapshot(Moment(stage, 0, 1))  # type: ignore[arg-type]


def test_a_place_is_no_path(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="a place"):
        gate(tmp_path).keep("../../x")


def test_an_answer_is_written_down_in_words(tmp_path: Path) -> None:
    made = gate(tmp_path, "fedavg")
    weights = dict(made._client.site.model().state_dict())
    reply = made.handle(1, "fit", FIRST, pack(Weights(weights)))
    made.handle(2, "check", FIRST, pack(Check(0, weights)))
    one, two = log(tmp_path)
    assert one.words.startswith(f"answered 'fit' at stage 1, round 1: {reply.size:,} bytes, ")
    assert "tensors (weights/" in one.words
    assert one.words.endswith("; values: loss, rows")
    assert two.words.endswith("no tensors; values: correct, macro_f1, rows")
    assert two.before == one.hash


@pytest.mark.parametrize("damage", ["change", "take out", "swap", "cut a hash"])
def test_a_log_that_was_touched_does_not_pass(damage: str, tmp_path: Path) -> None:
    made = gate(tmp_path)
    for number in range(3):
        made.handle(number + 1, "fit", Moment(0, number, 4), pack(Empty()))
    path = tmp_path / "store" / "egress.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "change":
        lines[1] = lines[1].replace(b"answered", b"refused")
    elif damage == "take out":
        del lines[1]
    elif damage == "swap":
        lines[1], lines[2] = lines[2], lines[1]
    else:
        body = json.loads(lines[1])
        lines[1] = json.dumps({**body, "hash": ""}).encode() + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match="broken at line 2"):
        list(egress.lines(path))


def test_a_last_line_that_was_cut_off_is_mended(tmp_path: Path) -> None:
    made = gate(tmp_path)
    made.handle(1, "fit", FIRST, pack(Empty()))
    path = tmp_path / "store" / "egress.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"time": "20')
    gate(tmp_path).handle(1, "fit", FIRST, pack(Empty()))
    assert len(log(tmp_path)) == 2


def test_of_an_error_only_fixed_words_leave() -> None:
    secret = "patient 17 of basel"
    for error in (UserError(secret, secret, secret), ValueError(secret), KeyError(secret)):
        assert secret not in "".join(error_kind(error))
    assert error_kind(UserError("the disk is full", secret, secret)) == (
        "failed",
        "the disk is full there",
    )
    assert error_kind(RefusedError("not in the contract"))[0] == "refused"


def test_a_message_that_is_damaged_is_one_typed_error(tmp_path: Path) -> None:
    made, packet = gate(tmp_path, "fedavg"), pack(Weights({"a": torch.zeros(2)}))
    for wrong in (
        dataclasses.replace(packet, header=b"{"),
        dataclasses.replace(packet, block=packet.block[:-3]),
        Packet(b"", b"", 0, 0, ()),
    ):
        with pytest.raises(BadMessageError):
            made.handle(1, "fit", FIRST, wrong)
    written = log(tmp_path)
    assert [line.words.partition(":")[0] for line in written] == ["refused 'fit'"] * 3
    assert not any(line.bytes for line in written)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the contract allows nothing"),
        ("stor = 1", "unknown option 'stor'"),
        ('[contract]\nmethods = ["fedavgg"]', "unknown method 'fedavgg'"),
        ('[contract]\nmethods = ["fedavg"]\nactions = ["embed"]', "no method .* 'embed'"),
        ("x", "not TOML"),
    ],
)
def test_a_mistake_in_a_sites_file_is_said(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_site(path)


def test_more_than_four_questions_do_not_wait_at_once(tmp_path: Path) -> None:
    """Each of them is within the contract and has its memory; what is refused has none."""
    made, replies = gate(tmp_path), list[Any]()

    def ask(number: int) -> None:
        replies.append(handle_request(made, number, "check", [0, 0, 2], pack(Empty()), made.run))

    with made._lock:  # as a question that takes long
        waiting = [threading.Thread(target=ask, args=(number,)) for number in range(1, 10)]
        for thread in waiting:
            thread.start()
        for _ in range(200):
            if len(replies) == 5:
                break
            time.sleep(0.05)
        assert [reply["reason"] for reply in replies] == ["too many questions at once"] * 5
    for thread in waiting:
        thread.join()
    assert sum("at once" in str(reply.get("reason")) for reply in replies) == 5
    made.handle(99, "fit", FIRST, pack(Empty()))  # and then it is free again


def end(made: Gate, value: float) -> None:
    """The end of a run whose server holds this value."""
    about = json.dumps(facts(made._known))
    made.finish(pack(Finish.of({"shared": torch.full((3,), value)}, "", about)))


def fit(made: Gate, round: int) -> None:
    """A round with the first weights."""
    weights = {n: w.clone() for n, w in made._client.site.model().state_dict().items()}
    made.handle(round, "fit", Moment(0, round, 4), pack(Weights(weights)))


def test_a_run_ends_once_and_keeps_what_it_ended_with(tmp_path: Path) -> None:
    made, home = gate(tmp_path, "fedavg"), tmp_path / "store" / "run-1"
    fit(made, 0)
    fit(made, 1)
    end(made, 1.0)
    kept = {path.name: path.read_bytes() for path in home.iterdir()}
    end(made, 1.0)  # repeated by a coordinator whose line has failed
    with pytest.raises(RefusedError, match="a second end of a run, with other content"):
        end(made, 2.0)
    made.prepare("run-1", config("fedavg"), "site-1")
    fit(made, 0)  # and a round that it has answered before
    with pytest.raises(RefusedError, match="a second end of a run, with other content"):
        end(made, 2.0)
    assert "a second end of a run" in (tmp_path / "store" / "egress.jsonl").read_text()
    for name in ("checkpoint.safetensors", "facts.json", "events.jsonl", "result.json"):
        assert (home / name).read_bytes() == kept[name], name


def test_an_end_that_is_repeated_changes_nothing(tmp_path: Path) -> None:
    """After a new start the client has forgotten its training: it is not saved over the end."""
    made, home = gate(tmp_path, "fedavg"), tmp_path / "store" / "run-1"
    end(made, 1.0)
    (home / "checkpoint.safetensors").write_bytes(b"of the end")
    made.prepare("run-1", config("fedavg"), "site-1")
    end(made, 1.0)
    assert (home / "checkpoint.safetensors").read_bytes() == b"of the end"


def test_a_test_in_a_later_round_does_not_let_a_run_end_again(tmp_path: Path) -> None:
    made = gate(tmp_path, "fedavg")
    fit(made, 0)
    end(made, 1.0)
    weights = {n: w.clone() for n, w in made._client.site.model().state_dict().items()}
    made.handle(9, "check", Moment(0, 1, 4), pack(Check(0, weights)))
    with pytest.raises(RefusedError, match="a second end of a run, with other content"):
        end(made, 2.0)
    made.handle(10, "fit", Moment(0, 2, 4), pack(Weights(weights)))
    end(made, 2.0)


def test_a_run_that_was_stopped_and_goes_on_ends_again(tmp_path: Path) -> None:
    made = gate(tmp_path, "fedavg")
    for number in range(2):
        fit(made, number)
        end(made, float(number))


def test_a_run_whose_last_round_comes_again_after_a_restore_ends_as_it_did(tmp_path: Path) -> None:
    """A coordinator that dies while it ends a run goes back to a checkpoint and ends it again."""
    made = gate(tmp_path, "fedavg")
    fit(made, 0)
    made.keep("0-1")
    fit(made, 1)
    end(made, 1.0)
    made.prepare("run-1", config("fedavg"), "site-1")
    assert made.restore("0-1")
    fit(made, 1)
    end(made, 1.0)


def test_a_coordinator_fills_no_disk_by_the_end_of_runs(tmp_path: Path) -> None:
    """What `finish`, `keep` and `prepare` write is bounded for a run and for all runs."""
    made = gate(tmp_path, "fedavg", stored=100_000, stored_in_all=150_000)
    about = json.dumps(facts(made._known))

    def finish(size: int) -> None:
        made.finish(pack(Finish.of({"shared": torch.zeros(size // 4)}, "", about)))

    def next_run(number: int) -> None:
        made.prepare(f"run-{number}", config("fedavg"), "site-1")
        finish(40_000)

    with pytest.raises(RefusedError, match=r"bytes of this run .* allows 100,000"):
        finish(100_000)
    finish(40_000)
    made.keep("0-1")
    next_run(2)
    next_run(3)
    with pytest.raises(RefusedError, match=r"allows 100,000 and 150,000"):
        next_run(4)
    sizes = [path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert sum(sizes) < 160_000
    assert "bytes of this run" in (tmp_path / "store" / "egress.jsonl").read_text()
