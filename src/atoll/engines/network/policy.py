"""The gate of a site: checks requests, runs the client, checks and logs answers.

It owns the site's client, data and state, and does not depend on the network.
"""

import json
import logging
import math
import re
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from atoll.core.errors import BadMessageError, UserError, printable
from atoll.core.federation import SERVER, Moment, actions, answer
from atoll.core.messages import Empty, Packet, Tensors, pack, unpack
from atoll.core.record import Snapshot, disk_errors, write_whole
from atoll.data.own.agreement import Agree, Offer, OwnTable, UntoldError
from atoll.data.vectors import KINDS as VECTOR_KINDS
from atoll.engines.network import plans, ranges
from atoll.engines.network.bounds import Bounds, too_little
from atoll.engines.network.comparison import (
    ALONE,
    alone_half,
    compared,
    cost_of,
    excess,
    joined_model,
    over_budget,
    read_release,
    written_release,
)
from atoll.engines.network.contract import RefusedError, SiteFile
from atoll.engines.network.egress import Counted, EgressLog
from atoll.engines.network.finished import go_on, has_ended, other_end, write_end
from atoll.engines.network.mirror import Mirror
from atoll.engines.network.named import foreign_names
from atoll.engines.network.own import data_key, own_parts, own_table, sparing
from atoll.engines.network.requests import COMPARE, LARGEST, Compare, Finish
from atoll.engines.network.size import parameters
from atoll.engines.network.steps import unfit
from atoll.engines.network.stored import age, arrays_of, bytes_in, question_digest
from atoll.engines.network.unchecked import kind_of, refused
from atoll.learning.weights import copied, prefixed
from atoll.runs.config import RunConfig, resolve
from atoll.runs.parts import Parts, parts

__all__ = ["Gate", "log"]

MOST_AT_ONCE = 4  # questions: one is answered, and asked again up to three times if it takes long
KEPT = 2  # number of stored checkpoints: the server may have died before it wrote its own
MOST_CONFIG = 1 << 20  # maximum bytes of a run's config
MOST_REASON = 300  # maximum characters of a method's refusal in the log: it may quote the request
log = logging.getLogger("atoll.site")
BEFORE = Moment(0, 0, 1)


class Gate:
    """One site's half of a run."""

    def __init__(self, site: SiteFile, mirror: Mirror | None = None) -> None:
        self.site, self.terms, self.store = site, site.terms(), Path(site.store)
        with disk_errors(self.store):
            self.store.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.egress = EgressLog(self.store / "egress.jsonl", mirror)
        self.run, self.id, self.doing = "", "", ""
        self._client: Any = None
        self._parts: Parts | None = None
        self._bounds: Bounds | None = None
        self._data = ""  # key of the data, by which budgets over all runs are counted
        self._table: OwnTable | None = None
        self._agreement: plans.Agreement | None = None  # set together with the table
        self._method = ""
        self._lock = threading.Lock()  # a question that was given up goes on: the next one waits
        self._places = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._last: tuple[int, str, Packet] | None = None  # number, its digest, the answer

    def offer(self, run: str, config: str, client: str, packet: Packet) -> Packet:
        """Describe this site's own table, so that sites can agree on columns."""
        with self._alone("offer"):
            run_config = self._begin(run, config)
            self._may("offer")
            self._fits("offer", packet)
            request = unpack(packet, Offer, SERVER)
            table = own_table(client, run_config)
            with self._untold("offer"):
                reply = pack(table.offered(request))
            self._let_out("offer", BEFORE, reply)
            self._table = table
            self._agreement = plans.Agreement.begun(request.key, config, client, self._data)
            return reply

    def agree(self, packet: Packet) -> Packet:
        """Describe the common columns of all sites."""
        with self._alone("agree"):
            self._may("agree")
            self._fits("agree", packet)
            if self._table is None or self._agreement is None:
                raise RefusedError("nothing was offered")
            with self._untold("agree"):
                agreed = self._table.agreed(unpack(packet, Agree, SERVER), self._agreement.key)
            agreement = replace(self._agreement, columns=tuple(agreed.gaps))
            self._reserve("agree", plans.agreement_size(agreement))
            reply = pack(agreed)
            self._let_out("agree", BEFORE, reply)
            with disk_errors(self._home):
                plans.keep(self._home, agreement)
            return reply

    @contextmanager
    def _untold(self, action: str) -> Iterator[None]:
        """Refuse a column that the site does not disclose; only the site's log names it."""
        try:
            yield
        except UntoldError as error:
            self.egress.refused(self.run, action, error.what)
            log.warning("%s", printable(f"{action}: {error}"))
            reason = "this site does not disclose so much of a column; its own log names it"
            raise RefusedError(reason) from error

    def _fits(self, action: str, packet: Packet) -> None:
        """Refuse a request larger than the contract allows."""
        size = len(packet.header) + len(packet.block)
        if size > self.terms.question:
            reason = f"a question of {size:,} bytes"
            self.egress.refused(self.run, action, reason)
            raise RefusedError(reason)

    def _reserve(self, action: str, size: int) -> None:
        """Refuse to store more than the contract allows for a run, or for all runs."""
        used = {path.name: bytes_in(path) for path in self.store.iterdir() if path.is_dir()}
        own, every = used.get(self.run, 0) + size, sum(used.values()) + size
        terms = self.terms
        if own > terms.stored or every > terms.stored_in_all:
            reason = f"{own:,} bytes of this run and {every:,} of all runs in the store"
            most = f"{terms.stored:,} and {terms.stored_in_all:,}"
            self._refuse(action, f"{reason}; the contract allows {most}")

    def _may(self, action: str) -> None:
        if action not in self.terms.actions:
            reason = f"the action '{action}' is not in the contract"
            self.egress.refused(self.run, action, reason)
            raise RefusedError(reason)

    def prepare(
        self, run: str, config: str, client: str, clients: Sequence[str] = (), plan: str = ""
    ) -> str:
        """Prepare a run with the data of this site; return the fingerprint of the data.

        For own tables, `clients` are the clients' names and `plan` is what the sites agreed on.
        """
        with self._alone("prepare"):
            run_config = self._begin(run, config)
            own = "files" in run_config.data
            arguments = (run_config, config, client, clients, plan)
            self._parts = self._on_own_table(*arguments) if own else parts(run_config)
            dataset, fingerprint = self._parts.dataset, self._parts.dataset.fingerprint
            self._refuse("prepare", self._unchecked(run_config, dataset.kind))
            self._affordable(run_config, math.prod(dataset.x.shape[1:]), len(dataset.classes))
            if client not in self._parts.scenario.clients:
                raise RefusedError(f"no client '{client[:80]}' in this run")
            if self._parts.scenario.joint_aug:
                raise RefusedError("joint_aug is for simulation: no site has whole images")
            little = too_little(self._parts, client, self.terms)
            self._refuse("prepare", little or unfit(self._parts, client, self.terms))
            self._refuse("prepare", self._changed(config))
            self._reserve("prepare", len(config))
            with disk_errors(self._home):
                self._home.mkdir(parents=True, exist_ok=True)
            spent, probed = self.egress.spent(self._data), lambda: self.egress.probes
            self._bounds = Bounds(self.terms, self._parts, client, self._home, spent, probed)
            self._refuse("prepare", self._bounds.unfit())
            self.id = client
            self._client = self._parts.client(client)
            write_whole(self._home / "config.toml", config.encode())
            self.egress.disclosure(self.run, "prepare", "the fingerprint of its data", fingerprint)
            return fingerprint

    def _on_own_table(
        self, run_config: RunConfig, config: str, client: str, clients: Sequence[str], text: str
    ) -> Parts:
        """The parts of a run on this site's own table; refuses a plan beyond what it disclosed."""
        with self._refusals_logged("prepare"):
            agreement, plan = plans.read(self._home, text)
        self._refuse("prepare", agreement.stale(config, client, self._data))
        table = own_table(client, run_config)
        with self._untold("prepare"):
            self._refuse("prepare", plans.violation(plan, agreement, table, clients))
        self._affordable(run_config, table.width(plan), len(plan.classes))
        return own_parts(run_config, table, client, clients, plan)

    def _refuse(self, action: str, reason: str) -> None:
        """Log and raise a refusal if there is a reason."""
        if reason:
            self.egress.refused(self.run, action, reason)
            raise RefusedError(reason)

    @contextmanager
    def _refusals_logged(self, action: str) -> Iterator[None]:
        """Log refusals raised inside, including those of the method."""
        try:
            yield
        except RefusedError as error:
            self.egress.refused(self.run, action, str(error))
            raise
        except BadMessageError as error:
            self.egress.refused(self.run, action, error.reason[:MOST_REASON])
            raise

    @property
    def _checked(self) -> Bounds:
        assert self._bounds is not None  # set together with the client
        return self._bounds

    def _changed(self, config: str) -> str:
        """Why an earlier run with this name cannot continue with this config."""
        path = self._home / "config.toml"
        same = not path.exists() or path.read_bytes() == config.encode()
        return "" if same else "a run of this name was here with another config"

    def _begin(self, run: str, config: str) -> RunConfig:
        """The config of a run, if the contract allows the run."""
        self._client, self._last, self._table, self._bounds = None, None, None, None
        run_config = self._resolved(config)
        self._method = str(run_config.method["name"])
        if self._method not in self.terms.methods:
            raise RefusedError(f"the method '{self._method[:80]}' is not in the contract")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", run) or not run.strip("-_"):
            raise RefusedError("a run's name that is not 1 to 100 letters, digits, - and _")
        self.run = run
        self._refuse("prepare", ranges.violation(self.terms.options, run_config, self._own_options))
        self._refuse("prepare", self._unchecked(run_config, kind_of(run_config)))
        self._data = data_key(run_config)
        self._affordable(run_config)
        if run_config.engine_options().threads:
            torch.set_num_threads(run_config.engine_options().threads)
        return run_config

    def _unchecked(self, config: RunConfig, kind: str) -> str:
        """Why weights that no check for single rows covers may not leave."""
        return "" if self.terms.unchecked_networks == "allow" else refused(config, kind)

    @property
    def _own_options(self) -> set[str]:
        """The options that this site's own file sets; runs cannot change them."""
        tables = {"data": self.site.data, "engine": self.site.engine}
        return {f"{table}.{name}" for table, values in tables.items() for name in values}

    def _affordable(self, config: RunConfig, inputs: int = 1, classes: int = 1) -> None:
        """Refuse a network larger than the contract allows before building it."""
        size = parameters(config, inputs, classes)
        if size > self.terms.parameters:
            reason = f"a network of {size:,} parameters; {self.terms.parameters:,} are allowed"
            self.egress.refused(self.run, "prepare", reason)
            raise RefusedError(reason)

    def _resolved(self, config: str) -> RunConfig:
        if len(config) > MOST_CONFIG:
            raise RefusedError("a config that is too long")
        try:
            values = tomllib.loads(config)
        except ValueError as error:
            raise RefusedError("a config that is not TOML") from error
        self._only_ours(values)
        if "files" in values.get("data", {}):
            if "files" not in self.site.data:
                raise RefusedError("the run wants own files, and this site's file names none")
            values["data"] = {**values["data"], **sparing(values["data"]), **self.site.data}
        values["engine"] = {**values.get("engine", {}), **self.site.engine}
        return resolve(values, "the run's config")

    @property
    def _allowed(self) -> dict[str, tuple[str, ...]]:
        """The plug-ins that this site's own file lists, by group."""
        terms = self.terms
        return {
            "atoll.methods": terms.methods,
            "atoll.models": terms.networks,
            "atoll.datasets": terms.plugins,
            "atoll.splits": terms.plugins,
        }

    def _only_ours(self, values: dict[str, Any]) -> None:
        """Refuse a run that names files or code that only this site's own file may name."""
        tables = {key: values.get(key, {}) for key in ("data", "public", "model", "engine")}
        if not all(isinstance(table, dict) for table in tables.values()) or not isinstance(
            values.get("models", []), list
        ):
            raise RefusedError("a config that is not of the agreed form")
        data, public, model, engine = tables.values()
        wordy = Path(str(model.get("vectors", ""))).suffix in VECTOR_KINDS
        if {"images", "parties"} & data.keys() or "images" in public or engine.get("keep") or wordy:
            raise RefusedError("the run names files or folders of this site's machine")
        foreign = foreign_names(values)
        if foreign is None:
            raise RefusedError("a config that is not of the agreed form")
        for group, name in foreign:
            if name not in self._allowed[group]:
                raise RefusedError("the run names code of this site's machine")
        replacement = values.get("replace", "")
        if replacement and replacement not in self.terms.replacements:
            raise RefusedError("the run replaces parts of its method, which is not in the contract")

    def handle(
        self, number: int, action: str, moment: Moment, packet: Packet, run: str = ""
    ) -> Packet:
        """Answer a request; a repeated request is not executed twice.

        An answer is repeated only for the same question: the same run, number, action,
        moment and content.
        """
        with self._alone(action):
            if run and run != self.run:
                raise RefusedError("a question of another run")
            digest = question_digest(action, moment, packet)
            if self._last and self._last[0] == number:
                if self._last[1] != digest:
                    raise RefusedError("another question under the number of the last one")
                self._let_out(action, moment, self._last[2], again=True)
                return self._last[2]
            if self._last and number < self._last[0]:
                raise RefusedError("a question from before the last one")
            self._admit(action, moment, packet)
            reply = self._bounded(action, moment, packet)
            self._last = (number, digest, reply)
            return reply

    def _bounded(self, action: str, moment: Moment, packet: Packet) -> Packet:
        """Answer within the limits of weights, work and budgets, and log the answer."""
        bounds = self._checked
        bounds.begin(moment, actions(type(self._client)).get(action))
        with self._refusals_logged(action):
            reply = answer(self._client, action, moment, packet, bounds)
        self._let_out(action, moment, reply, bounds.rounds, bounds.epochs)
        bounds.end()
        if bounds.updates or bounds.trained is not None:  # a test alone does not advance a run
            go_on(self._home, moment)
        return reply

    def _admit(self, action: str, moment: Moment, packet: Packet) -> None:
        if self._client is None:
            raise RefusedError("no run has been prepared")
        reason = ""
        if action not in self.terms.actions:
            reason = f"the action '{action[:80]}' is not in the contract"
        elif self.terms.stages and moment.stage >= self.terms.stages:
            reason = f"stage {moment.stage + 1} is not in the contract"
        elif not 0 <= moment.stage < self._known.scenario.stages or not (
            0 <= moment.round < self._known.config.rounds
        ):
            reason = "a moment that is not in the run"
        elif self._bounds:
            reason = self._bounds.exhausted(moment)
        self._refuse(action, reason)
        self._fits(action, packet)

    def _let_out(
        self,
        action: str,
        moment: Moment,
        reply: Packet,
        rounds: int = 0,
        epochs: int = 0,
        again: bool = False,
    ) -> None:
        """Refuse an answer beyond the contract, or log it; `again`: for a retry of the server."""
        reason = ""
        if reply.size > self.terms.largest:
            reason = f"an answer of {reply.size:,} bytes is larger than the contract allows"
        elif self.egress.total(self.run) + reply.size > self.terms.total:
            reason = f"more than {self.terms.total:,} bytes in all are not in the contract"
        elif self.egress.total() + reply.size > self.terms.in_all:
            reason = f"more than {self.terms.in_all:,} bytes of all runs are not in the contract"
        elif not again and self.egress.spent(self._data).answers >= self.terms.answers_in_all:
            most = f"{self.terms.answers_in_all:,}"
            reason = f"more than {most} answers on this data are not in the contract"
        self._refuse(action, reason)
        counted = Counted() if again else Counted(self._data, rounds, epochs)
        self.egress.left(self.run, action, moment, reply, counted, again)

    @property
    def _known(self) -> Parts:
        assert self._parts is not None  # _admit has refused that
        return self._parts

    @property
    def _home(self) -> Path:
        return self.store / self.run

    def keep(self, place: str) -> None:
        """Save the client's state at a place; keeps the last two."""
        with self._alone("keep"):
            self._of_the_run("keep")
            content = save(arrays_of(self._ready.state()))
            self._reserve("keep", len(content))
            write_whole(self._file(place), content)
            checkpoints = sorted(self._home.glob("state-*.safetensors"), key=age)
            for path in checkpoints[:-KEPT]:
                path.unlink(missing_ok=True)
            if self._bounds:
                self._bounds.keep(place, KEPT)

    def restore(self, place: str) -> bool:
        """Restore the client's state at a place; returns whether it was available.

        A client that was away at that checkpoint continues with its current state.
        """
        with self._alone("restore"):
            self._of_the_run("restore")
            client, path = self._ready, self._file(place)
            there = path.exists()
            if not there:
                checkpoints = sorted(self._home.glob("state-*.safetensors"), key=age)
                if not checkpoints:
                    if self._bounds:
                        self._bounds.restore(place)
                    return False
                path = checkpoints[-1]
            try:
                arrays = load_file(path)
            except (SafetensorError, OSError, ValueError) as error:
                raise UserError(
                    "a checkpoint is damaged", str(path), "restore it from a copy"
                ) from error
            where = self._known.site(self.id).device
            state = {name: torch.from_numpy(array).to(where) for name, array in arrays.items()}
            if state:
                client.restore(copied(state))
            if self._bounds:
                self._bounds.restore(path.stem.removeprefix("state-"))
            return there

    def finish(self, packet: Packet) -> None:
        """Complete the folder of this run in the store, so that `predict` can use it.

        Repeats of the request, for example after a server fault, change nothing.
        """
        with self._alone("finish"):
            self._of_the_run("finish")
            self._fits("finish", packet)
            self._refuse("finish", other_end(self._home, packet))
            if has_ended(self._home):
                return
            self._reserve("finish", len(packet.block))
            request = unpack(packet, Finish, SERVER)
            state = prefixed("server", request.state)
            state |= prefixed(f"client/{self.id}", self._ready.state())
            write_end(
                self._home, self._known, packet, request, arrays_of(state), self._checked.place
            )

    def compare(self, packet: Packet) -> Packet:
        """Release how the joined model compares with this site alone, once per run.

        Repeats of the request, for example after a server fault, get the same answer.
        """
        with self._alone(COMPARE):
            self._refuse(COMPARE, "" if self.terms.answer else "an answer is not in the contract")
            self._fits(COMPARE, packet)
            state = self._ready.state()
            stages, rounds = self._known.scenario.stages, self._known.config.rounds
            end = Moment(stages - 1, rounds - 1, rounds)
            digest, before = question_digest(COMPARE, end, packet), read_release(self._home)
            if before is not None:
                other = "" if before[0] == digest else "a second comparison of one run"
                self._refuse(COMPARE, other)
                reply = pack(before[1])
                self._let_out(COMPARE, end, reply, again=True)
                return reply
            cost, spent = cost_of(self._known, self.id), self.egress.spent(self._data)
            self._refuse(COMPARE, excess(self._known, cost, spent, self.terms))
            with self._refusals_logged(COMPARE):
                request, shared = joined_model(self._known, unpack(packet, Compare, SERVER))
                self._checked.on_compare(end, shared)
            reply, (name, content) = self._compared(request, digest, state)
            self._let_out(COMPARE, end, reply, cost.rounds, cost.epochs)
            write_whole(self._home / name, content)
            self._checked.end()
            return reply

    def alone(self) -> Packet:
        """Restart as the only party for the server's comparison, once per run."""
        with self._alone(COMPARE):
            self._refuse(COMPARE, "" if self.terms.answer else "an answer is not in the contract")
            self._refuse(COMPARE, "" if self._client else "no run has been prepared")
            with self._refusals_logged(COMPARE):
                home, half = self._home / ALONE, alone_half(self._known, self.id)
            # a server that lost the reply asks again, until the first exchange
            again = self._checked.home == home and self._last is None
            second = home.exists() and not again
            self._refuse(COMPARE, "a second comparison of one run" if second else "")
            cost, spent = cost_of(self._known, self.id), self.egress.spent(self._data)
            self._refuse(COMPARE, "" if again else over_budget(cost, spent, self.terms))
            rounds = half.config.rounds
            end, reply = Moment(self._known.scenario.stages - 1, rounds - 1, rounds), pack(Empty())
            over = again or self._checked.place == (end.stage, end.round)
            self._refuse(COMPARE, "" if over else "the run is not at its end")
            self._let_out(COMPARE, end, reply, again=again)
            with disk_errors(home):
                home.mkdir(exist_ok=True)
            probed, self._last = lambda: self.egress.probes, None
            self._parts, self._client = half, half.client(self.id)
            spent = self.egress.spent(self._data)
            self._bounds = Bounds(self.terms, half, self.id, home, spent, probed)
            return reply

    def _compared(
        self, request: Compare, digest: str, state: Tensors
    ) -> tuple[Packet, tuple[str, bytes]]:
        """The answer, and the file that says that it has left; all other files are kept here."""
        leaves, files = compared(self._known, self.id, copied(state), request, self._home)
        reply = pack(leaves)
        if reply.size > LARGEST:
            self._refuse(COMPARE, f"a comparison of {reply.size:,} bytes")
        mark = written_release(digest, leaves)
        self._reserve(COMPARE, len(mark[1]) + sum(map(len, files.values())))
        for name, content in files.items():
            write_whole(self._home / name, content)
        return reply, mark

    def _of_the_run(self, action: str) -> None:
        """Refuse to save or restore a client that trains alone as the run's own client."""
        alone = self._bounds is not None and self._bounds.home != self._home
        self._refuse(action, "this site trains alone to compare" if alone else "")

    def snapshot(self, moment: Moment) -> None:
        """Write the client's snapshots to the store; never sends them."""
        with self._alone("snapshot"):
            self._of_the_run("snapshot")
            if moment.stage not in range(self._known.scenario.stages):
                raise RefusedError("a moment that is not in the run")
            seen: list[Snapshot] = getattr(self._ready, "snapshot", lambda moment: [])(moment)
            lines = [json.dumps(vars(snapshot), default=list) for snapshot in seen]
            content = "".join(f"{line}\n" for line in lines).encode()
            write_whole(self._home / f"looks-{moment.stage}.jsonl", content)

    @property
    def _ready(self) -> Any:
        if self._client is None:
            raise RefusedError("no run has been prepared")
        return self._client

    def _file(self, place: str) -> Path:
        if not re.fullmatch(r"[0-9]{1,9}-[0-9]{1,9}", place):
            raise RefusedError("a place that is not a stage and a round")
        return self._home / f"state-{place}.safetensors"

    @contextmanager
    def _alone(self, doing: str) -> Iterator[None]:
        """Handle one request at a time and show it in the status; few requests may wait."""
        if not self._places.acquire(blocking=False):
            raise RefusedError("too many questions at once")
        try:
            with self._lock:
                self.doing = printable(doing[:80])
                self._tell()
                try:
                    yield
                finally:
                    self.doing = ""
                    self._tell()
        finally:
            self._places.release()

    def _tell(self) -> None:
        """Write the status that `join` shows."""
        body = {
            "time": time.time(), "run": self.run, "method": self._method, "doing": self.doing,
            "bytes": self.egress.total(self.run), "log": self.egress.last,
        }  # fmt: skip
        path = self.store / "status.json"
        try:
            part = path.with_name(".status.json.part")
            part.write_text(json.dumps(body))
            part.replace(path)
        except OSError:  # a full disk raises an error where data would be lost
            pass
