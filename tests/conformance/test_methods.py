"""What every method must keep to; a new method is taken up by its name alone."""

import dataclasses
import importlib.util
import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from atoll import methods
from atoll.core.errors import ClientFailedError, InterruptedRunError
from atoll.core.federation import SERVER, Moment, actions, answer, kinds
from atoll.core.messages import Empty, Packet, Tensors, contents, pack, unpack
from atoll.core.options import build, describe
from atoll.core.record import Message, Record, Score, Snapshot, read_events
from atoll.data import splits
from atoll.data.site import Site
from atoll.engines.local import LocalEngine, local_engine
from atoll.jobs.train import hits, in_chunks
from atoll.metrics import scores as metrics
from atoll.metrics.answer import ALONE, GUESS, JOINED, LOGISTIC
from atoll.metrics.answer import answer as answered
from atoll.runs.alone import alone_parts, train_parts
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.facts import facts
from atoll.runs.loop import go
from atoll.runs.outcomes import outcomes, own_tasks
from atoll.runs.parts import Parts, parts
from atoll.runs.predict import onnx
from atoll.runs.predict.export import export
from atoll.runs.predict.model import Predictor, ended_state
from atoll.runs.predict.parties import Halves
from atoll.runs.result import Run

DATA = {"tasks": "synthetic-text", "domains": "synthetic-images"}
ROUNDS = 3
every_method = pytest.mark.parametrize("name", methods.names())
DOCS = Path(__file__).parents[2] / "docs" / "methods"


def small(name: str, **changes: Any) -> RunConfig:
    """A run of a method, small enough to be run many times."""
    split = methods.load(name).split
    values: dict[str, Any] = {
        "name": name,
        "rounds": ROUNDS,
        "data": {"name": DATA.get(split, "synthetic-table")},
        "method": {"name": name},
        "model": {} if split == "parties" else {"widths": [16, 8]},
        "engine": {"mode": "loop"},
        "checkpoint_seconds": 0,
    }
    return resolve(change(values, changes), "conformance")


def run_with(made: Parts, engine: Any, folder: Path) -> bytes:
    """The events of a run on an engine of the test's own."""
    record = Record.create(folder, "", facts(made))
    go(made, engine, record, lambda progress: None, lambda: False)
    return (folder / "events.jsonl").read_bytes()


def run(config: RunConfig, folder: Path) -> bytes:
    execute(config, folder, local_engine)
    return (folder / "events.jsonl").read_bytes()


@dataclasses.dataclass
class Spy:
    """An engine that sees every packet; clients may be rebuilt, answers may come in any order."""

    parts: Parts
    rebuild: bool = False
    backwards: bool = False
    packets: list[tuple[str, str, Packet]] = dataclasses.field(default_factory=list)
    at_least: int = 0
    jobs: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.clients = {id: self.parts.client(id) for id in self.parts.scenario.clients}

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        answers = {}
        for id in sorted(packets, reverse=self.backwards):
            if self.rebuild:
                memory = {name: tensor.clone() for name, tensor in self.clients[id].state().items()}
                self.clients[id] = self.parts.client(id)
                self.clients[id].restore(memory)
            answers[id] = answer(self.clients[id], action, moment, packets[id], self)
            self.packets += [("server", action, packets[id]), (id, action, answers[id])]
        return answers

    def on_request(self, request: Any) -> None: ...

    def on_job(self, job: Any) -> None:
        self.jobs.append(job)

    def on_reply(self, reply: Any) -> None: ...

    def states(self, place: str) -> dict[str, Tensors]:
        return {id: client.state() for id, client in self.clients.items()}

    def restore(self, states: Mapping[str, Tensors], place: str) -> None:
        raise AssertionError("these runs are not resumed")

    def snapshots(self, moment: Moment) -> list[Snapshot]:
        return []


@every_method
def test_every_message_survives_packing(name: str, tmp_path: Path) -> None:
    made = parts(small(name))
    spy = Spy(made)
    run_with(made, spy, tmp_path)
    client = next(iter(spy.clients.values()))
    assert spy.packets
    for sender, action, packet in spy.packets:
        request, reply = kinds(actions(type(client))[action])
        message: Any = unpack(packet, request if sender == "server" else reply, sender)
        again = pack(message)
        assert again == packet
        assert {n for n, _, _ in packet.tensors} == set(contents(message))


@every_method
def test_the_same_seed_gives_the_same_record_and_another_seed_another(
    name: str, tmp_path: Path
) -> None:
    first, second = (run(small(name), tmp_path / part) for part in ("a", "b"))
    other = run(small(name, seed=1), tmp_path / "c")
    assert first == second
    assert first != other


@every_method
def test_clients_rebuilt_before_every_message_give_the_same_record(
    name: str, tmp_path: Path
) -> None:
    made = parts(small(name))
    rebuilt = run_with(made, Spy(made, rebuild=True), tmp_path / "a")
    assert rebuilt == run(small(name), tmp_path / "b")


@every_method
def test_the_order_in_which_clients_answer_does_not_matter(name: str, tmp_path: Path) -> None:
    made = parts(small(name))
    backwards = run_with(made, Spy(made, backwards=True), tmp_path / "a")
    assert backwards == run(small(name), tmp_path / "b")


@every_method
def test_a_run_without_packing_has_the_same_record_and_the_same_bytes(
    name: str, tmp_path: Path
) -> None:
    packed = run(small(name), tmp_path / "a")
    assert packed == run(small(name, packing=False), tmp_path / "b")


ROW, LABELS = 4, 12  # numbers in a line by which a row is known, and labels


def windows(values: np.ndarray, width: int) -> np.ndarray:
    """A hash of every so many numbers in a line of the last axis; equal numbers say nothing."""
    lines = np.ascontiguousarray(values, dtype=np.float32) + np.float32(0)  # no minus zero
    if lines.ndim == 0 or lines.shape[-1] < width:
        return np.empty(0, dtype=np.uint64)
    found = np.lib.stride_tricks.sliding_window_view(lines, width, axis=-1).reshape(-1, width)
    found = np.ascontiguousarray(found[(found != found[:, :1]).any(1)])
    odd = np.random.default_rng(0).integers(2**63, size=width // 2, dtype=np.uint64) * 2 + 1
    words = found.view(np.uint64)
    words = (words ^ (words >> np.uint64(29))) * odd
    return np.unique((words ^ (words >> np.uint64(32))).sum(-1, dtype=np.uint64))


def private(made: Parts) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Pieces of all rows of all clients, raw and scaled; labels in a line, and sorted.

    Of training, validation and test rows: none of them has to cross.
    """
    rows, lines, sorts = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for id in made.scenario.clients:
        site = made.site(id)
        parts_ = [
            (rows_of(stage), places)
            for stage, holding in enumerate(made.scenario.holdings[id])
            for rows_of, places in ((site.train, holding.train), (site.valid, holding.valid))
        ]
        tests = made.scenario.tests[id]
        parts_ += [(site.test(task), places) for task, places in enumerate(tests)]
        for part, places in parts_:
            raw = made.dataset.x[places].reshape(len(places), -1)
            blocks = (part.x.flatten(1), part.own, part.all.flatten(1), torch.from_numpy(raw))
            rows += [windows(block.numpy(), ROW) for block in blocks]
            labels = made.dataset.y[places]  # a site may lack them
            lines.append(windows(labels, LABELS))
            if len(labels) >= LABELS and len({*labels.tolist()}) > 1:
                sorts.append(np.sort(labels))
    return np.concatenate(rows), np.concatenate(lines), sorts


def numbers(packet: Packet) -> list[np.ndarray]:
    """All that a packet has in a line: tensors, and tables of them by columns; lists in headers."""
    found = list[np.ndarray]()
    for tensor in load(packet.block).values() if packet.block else ():
        values = tensor.double().numpy()
        found += [values.reshape(-1)]
        found += [values.reshape(len(values), -1).T] if values.ndim > 1 and values.size else []
    return [*found, *_lists(json.loads(packet.header))]


def _lists(value: Any) -> list[np.ndarray]:
    if isinstance(value, dict):
        return [one for each in value.values() for one in _lists(each)]
    if isinstance(value, list) and value:
        if all(isinstance(each, int | float) for each in value):
            return [np.asarray(value, dtype=np.float64)]
        return [one for each in value for one in _lists(each)]
    return []


def leaks(made: Parts, packets: list[tuple[str, str, Packet]]) -> list[str]:
    """What is private in the packets."""
    (rows, lines, sorts), own_names = private(made), set()
    for holdings in made.scenario.holdings.values():
        own_names |= {
            made.dataset.columns[i] for h in holdings for i in h.own if made.dataset.columns
        }
    found = []
    for sender, action, packet in packets:
        for line in numbers(packet):
            if np.isin(windows(line, ROW), rows).any():
                found.append(f"a row in {action} from {sender}")
            if np.isin(windows(line, LABELS), lines).any():
                found.append(f"labels in {action} from {sender}")
            flat = np.sort(line.reshape(-1))
            if any(len(flat) == len(one) and np.array_equal(flat, one) for one in sorts):
                found.append(f"labels in another order in {action} from {sender}")
        found += [f"{n} in {action}" for n in own_names if f'"{n}"'.encode() in packet.header]
    return found


@every_method
def test_no_packet_contains_a_private_row(name: str, tmp_path: Path) -> None:
    made = parts(small(name))
    spy = Spy(made)
    run_with(made, spy, tmp_path)
    assert leaks(made, spy.packets) == []


def planted(packet: Packet, values: torch.Tensor) -> Packet:
    """The packet with another tensor in it."""
    return dataclasses.replace(packet, block=save({**load(packet.block), "more": values}))


HIDDEN: dict[str, Callable[[Site], torch.Tensor]] = {
    "a row": lambda site: site.train(0).x[3],
    "rows in double precision": lambda site: site.train(0).x.double(),
    "rows by columns": lambda site: site.train(0).x.T.contiguous(),
    "validation rows": lambda site: site.valid(0).x,
    "test rows": lambda site: site.test(0).x,
    "labels": lambda site: site.train(0).y,
    "labels in bytes": lambda site: site.train(0).y.to(torch.uint8),
    "some labels": lambda site: site.train(0).y[:16].clone(),
    "labels in another order": lambda site: site.train(0).y.flip(0).sort().values,
    "labels of tests": lambda site: site.test(0).y,
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_the_probe_for_private_rows_finds_what_was_sent(kind: str, tmp_path: Path) -> None:
    made = parts(small("fedavg"))
    spy = Spy(made)
    run_with(made, spy, tmp_path)
    sender, action, packet = spy.packets[1]
    sent = HIDDEN[kind](made.site(made.scenario.clients[0]))
    assert leaks(made, [(sender, action, planted(packet, sent.contiguous()))])


def test_the_probe_for_private_rows_reads_lists_in_headers(tmp_path: Path) -> None:
    made = parts(small("fedavg"))
    spy = Spy(made)
    run_with(made, spy, tmp_path)
    sender, action, packet = spy.packets[1]
    header = json.loads(packet.header)
    header["values"]["more"] = made.site(made.scenario.clients[0]).train(0).y.tolist()
    packet = dataclasses.replace(packet, header=json.dumps(header).encode())
    assert leaks(made, [(sender, action, packet)])


@every_method
def test_randomness_of_the_process_is_neither_seeded_nor_drawn_from(
    name: str, tmp_path: Path
) -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()  # noqa: NPY002

    before = states()
    run(small(name), tmp_path)
    assert states() == before


def files(folder: Path) -> dict[str, bytes]:
    """All that must be equal in two equal runs: everything but the seconds."""
    names = ("config.toml", "events.jsonl", "looks.jsonl", "result.json", "checkpoint.safetensors")
    found = {name: (folder / name).read_bytes() for name in names}
    found["checkpoint.safetensors"] = _without_times(found["checkpoint.safetensors"])
    return found


def _without_times(checkpoint: bytes) -> bytes:
    """A checkpoint's tensors; its header also has the length of the file of seconds."""
    length = int.from_bytes(checkpoint[:8], "little")
    header = json.loads(checkpoint[8 : 8 + length])
    del header["__metadata__"]
    return json.dumps(header, sort_keys=True).encode() + checkpoint[8 + length :]


def stop_after(count: int) -> Callable[[], bool]:
    calls = []

    def stopping() -> bool:
        calls.append(1)
        return len(calls) == count

    return stopping


@every_method
@pytest.mark.parametrize("after", [1, 2])
def test_cut_and_resumed_equals_uncut(name: str, after: int, tmp_path: Path) -> None:
    config = small(name)
    execute(config, tmp_path / "whole", local_engine)
    with pytest.raises(InterruptedRunError):
        execute(config, tmp_path / "cut", local_engine, stopping=stop_after(after))
    execute(config, tmp_path / "cut", local_engine, resume=True)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


@every_method
def test_it_learns(name: str, tmp_path: Path) -> None:
    """Ten points better than always saying the commonest class, after fifteen rounds."""
    config = small(name, rounds=15)
    execute(config, tmp_path, local_engine)
    events = read_events(tmp_path)
    made = parts(config)
    labels = np.concatenate(
        [made.dataset.y[rows] for rows in made.scenario.tests[made.scenario.clients[0]]]
    )
    commonest = np.bincount(labels).max() / len(labels)
    for variant in metrics.variants(events):
        accuracy = metrics.summary(events, variant)["final_accuracy"]
        assert accuracy > commonest + 0.1, variant


@every_method
def test_defaults_are_valid_and_every_option_has_a_remark_and_a_page(name: str) -> None:
    kind = methods.load(name).options
    assert build(kind, {}, name) == kind()
    assert [option.name for option in describe(kind) if not option.remark] == []
    page = DOCS / f"{name}.md"
    assert page.exists(), f"write {page}"
    text = page.read_text()
    assert [o.name for o in describe(kind) if f"`{o.name}`" not in text] == []


@every_method
def test_bytes_in_the_ledger_are_those_that_travelled(name: str, tmp_path: Path) -> None:
    made = parts(small(name))
    spy = Spy(made)
    run_with(made, spy, tmp_path)
    ledger = [e for e in read_events(tmp_path) if isinstance(e, Message)]
    assert sum(e.bytes for e in ledger) == sum(
        len(p.header) + len(p.block) for *_, p in spy.packets
    )
    assert sum(e.count for e in ledger) == len(spy.packets)


@every_method
def test_a_method_runs_through_the_local_engine_with_only_the_actions_it_declares(
    name: str,
) -> None:
    made = parts(small(name))
    engine = LocalEngine(made)
    id = made.scenario.clients[0]
    for action in ("state", "restore", "_keep", "__init__", "nothing"):
        with pytest.raises(
            ClientFailedError, match=f"client {id} failed in {action}.*not an action"
        ):
            engine.carry(action, Moment(0, 0, 1), {id: pack(Empty())})


def predicted(folder: Path, made: Parts, score: Score) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the final model on the test rows of a score, and the labels."""
    task = made.scenario.tasks[score.task]
    tested = {id: made.site(id).test(score.task) for id in [*made.scenario.clients, score.client]}
    if score.client == SERVER:
        labels = tested.pop(SERVER).y
        return Halves(folder, score.variant).logits(tested), labels
    predictor = Predictor(folder, score.client, score.variant, task)
    with torch.no_grad():
        return in_chunks(predictor.outputs, tested[score.client]), tested[score.client].y


@every_method
def test_final_models_predict_the_recorded_scores_and_are_exported(
    name: str, tmp_path: Path
) -> None:
    """Exported are weights and a card; ONNX too where it is installed."""
    client, folder = methods.load(name).client, tmp_path / "run"
    module = sys.modules[client.__module__]
    built_in = Path(str(module.__file__)).parent == Path(str(methods.__file__)).parent
    if not built_in and not hasattr(client, "predict"):
        pytest.skip("a method of somebody else need not predict")
    config = small(name, **({"stages": 2} if methods.load(name).split == "tasks" else {}))
    run(config, folder)
    made, scores = parts(config), Run(folder).scores
    end = [s for s in scores if (s.stage, s.round) == (scores[-1].stage, scores[-1].round)]
    assert {score.client for score in end} >= {*made.scenario.clients} or end[0].client == SERVER
    for score in end:
        logits, labels = predicted(folder, made, score)
        assert (len(labels), *hits(logits, labels)) == (score.rows, score.correct, score.macro_f1)
    for id in {made.scenario.clients[0], end[0].client}:
        predictor = Predictor(folder, id)
        home = export(predictor, tmp_path / id, "nothing")
        weights = load((home / "model.safetensors").read_bytes())
        assert weights.keys() == predictor.model.keys()
        assert all(torch.equal(weights[n], predictor.model[n]) for n in weights)
        card = json.loads((home / "card.json").read_text())
        assert (card["site"], card["classes"]) == (id, list(made.dataset.classes))
        if all(importlib.util.find_spec(package) for package in onnx.NEEDED):
            onnx.write(predictor, home / "model.onnx")  # refuses a graph with other outputs


@every_method
def test_a_federation_of_one_site_gains_exactly_nothing(name: str, tmp_path: Path) -> None:
    """The baseline of joining is this federation, so nothing may differ, not even a bit."""
    whole = parts(small(name, **({"stages": 2} if methods.load(name).split == "tasks" else {})))
    one = alone_parts(whole, whole.scenario.clients[-1])
    if not hasattr(one.client(one.scenario.clients[0]), "predict"):
        pytest.skip("a method of somebody else need not predict")
    state = train_parts(one, tmp_path / "one", local_engine, lambda: False)
    headline = Run(tmp_path / "one").headline
    results = outcomes(one, state, headline, local_engine)
    for outcome in results.values():
        assert np.isfinite(outcome.outputs[JOINED]).any(1).all()
        assert np.array_equal(outcome.outputs[JOINED], outcome.outputs[ALONE])
    body = answered({id: [outcome] for id, outcome in results.items()})
    assert body["overall"]["gain"]["gain"] == 0


@every_method
def test_every_site_has_an_outcome_of_the_models_that_are_compared(
    name: str, tmp_path: Path
) -> None:
    """The joined model scores what the record says; the fair baseline learns, too."""
    config = small(name)
    run(config, tmp_path / "run")
    made, record = parts(config), Run(tmp_path / "run")
    if not hasattr(made.client(made.scenario.clients[0]), "predict"):
        pytest.skip("a method of somebody else need not predict")
    results = outcomes(made, ended_state(record.folder), record.headline, local_engine)
    assert list(results) == list(made.scenario.clients)
    last = {(s.client, s.task): s.correct for s in record.scores if s.variant == record.headline}
    for id, outcome in results.items():
        tasks = own_tasks(made.scenario, id)
        right = int((outcome.outputs[JOINED].argmax(1) == outcome.y).sum())
        whose = id if (id, tasks[0]) in last else SERVER
        assert right == sum(last[whose, task] for task in tasks)
        assert {JOINED, ALONE, GUESS, LOGISTIC} <= outcome.outputs.keys()
        for values in outcome.outputs.values():
            assert values.shape == (len(outcome.rows), len(made.dataset.classes))


def test_fccl_without_collaboration_gains_exactly_nothing(tmp_path: Path) -> None:
    """Random streams are named after sites, so the same training gives the same bits."""
    config = small("fccl", collaborate=False)
    run(config, tmp_path / "run")
    results = outcomes(parts(config), ended_state(tmp_path / "run"), "fccl", local_engine)
    for outcome in results.values():
        assert np.array_equal(outcome.outputs[JOINED], outcome.outputs[ALONE])
    body = answered({id: [outcome] for id, outcome in results.items()})
    assert {site["gain"]["gain"] for site in body["sites"].values()} == {0.0}


def stacked(folder: Path) -> bool:
    """Whether a run trained clients in stacks; one that refused a stack fails."""
    path = folder / "engine.json"
    choices = json.loads(path.read_text()).values() if path.exists() else []
    assert [choice["reason"] for choice in choices if choice["mode"] != "stacked"] == []
    return any(choice["work"] in ("work", "passes") for choice in choices)


def hands_over_jobs(name: str, folder: Path) -> bool:
    """Whether clients of a method hand work to the engine: one that trains nothing does not."""
    made = parts(small(name))
    spy = Spy(made)
    run_with(made, spy, folder)
    return bool(spy.jobs)


@every_method
@pytest.mark.parametrize("ragged", [False, pytest.param(True, marks=pytest.mark.numerics)])
def test_clients_in_one_stack_give_what_they_give_one_by_one(
    name: str, ragged: bool, tmp_path: Path
) -> None:
    """To 1e-10 in double precision; ragged: other numbers of rows, batches that are not full."""
    dealt = {"clients": 4} | ({"rows": "dirichlet", "alpha": 1.0} if ragged else {})
    known = splits.option_names(methods.load(name).split)
    scenario = {f"scenario.{key}": value for key, value in dealt.items() if key in known}
    how = {"dtype": "float64"} | scenario
    if "batch" in {option.name for option in describe(methods.load(name).options)}:
        how["batch"] = 16
    states = {}
    for mode in ("loop", "stacked"):
        execute(small(name, **{**how, "engine.mode": mode}), tmp_path / mode, local_engine)
        states[mode] = load((tmp_path / mode / "checkpoint.safetensors").read_bytes())
    assert states["loop"].keys() == states["stacked"].keys()
    for key, tensor in states["loop"].items():
        torch.testing.assert_close(states["stacked"][key], tensor, rtol=1e-10, atol=1e-10)
    assert stacked(tmp_path / "stacked") or not hands_over_jobs(name, tmp_path / "jobs")
    one, other = (read_events(tmp_path / mode) for mode in ("loop", "stacked"))
    assert [e for e in one if isinstance(e, Score)] == [e for e in other if isinstance(e, Score)]
