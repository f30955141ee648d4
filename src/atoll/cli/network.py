"""The commands of a federation between real sites: parse, call, print."""

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from atoll.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_SITE_FAILED,
    InterruptedRunError,
    UserError,
    printable,
)
from atoll.engines.network import coordinator, egress, explain, rehearsal, signing
from atoll.engines.network import site as site_end
from atoll.engines.network.kits import Kit, init, renew
from atoll.engines.network.policy import read_site
from atoll.engines.network.tls import PASSPHRASE
from atoll.runs.config import RunConfig, read, resolve
from atoll.runs.folders import recorded, refuse_absent, run_folder
from atoll.runs.result import Run

__all__ = ["register"]

Show = Callable[[list[Run], Path, bool], None]
Passphrase = Annotated[
    bool, typer.Option("--passphrase", help=f"ask for the private key's; or set {PASSPHRASE}")
]
AGAIN_SECONDS = 10.0  # after which an unchanged line is printed again in a log


def register(app: typer.Typer, out: Console, err: Console, show: Show) -> None:
    """Add the commands to the app."""
    commands = _Commands(out, err, show)
    own = typer.Typer(no_args_is_help=True, help="Make and look after the kits of a federation.")
    own.command("init")(commands.init)
    own.command("request")(commands.request)
    own.command("sign")(commands.sign)
    own.command("install")(commands.install)
    own.command("renew")(commands.renew)
    own.command("show")(commands.show_kits)
    app.add_typer(own, name="network")
    terms = typer.Typer(no_args_is_help=True, help="Look at the contract of a site.")
    terms.command("explain")(commands.explain)
    app.add_typer(terms, name="contract")
    app.command("serve")(commands.serve)
    app.command("join")(commands.join)
    app.command("egress")(commands.egress)
    app.command("rehearse")(commands.rehearse)


class _Commands:
    """What the commands share: where to print."""

    def __init__(self, out: Console, err: Console, show: Show) -> None:
        self.out, self.err, self.show = out, err, show

    def init(
        self,
        project: Annotated[Path, typer.Argument(help="the project's file, .toml")],
        to: Annotated[Path, typer.Option("--out", help="a folder for the kits")] = Path("kits"),
        run: Annotated[
            str, typer.Option("--run", help="a run: its actions go into the sites' contracts")
        ] = "",
        by_request: Annotated[
            bool, typer.Option("--by-request", help="sites make their own keys: network request")
        ] = False,
    ) -> None:
        """Make a kit for every party that has none; the others' kits are not touched."""
        config = resolve(read(run), run) if run else None
        made = init(project, to, config, by_request)
        if run and by_request:
            self._say("sites draft their contracts themselves: atoll network install ... --run RUN")
        for name in made["new"]:
            kit = Kit(to / name)
            self._say(f"made {to / name}, certificate until {kit.until:%Y-%m-%d}")
            self._say(f"  key {kit.fingerprint}")
        for name in made["awaited"]:
            self._say(f"waiting for the request of {name}: atoll network request {name}, there")
        for name in made["revoked"]:
            self._say(f"revoked {name}: the server hears no more of it")
        if not made["new"] and not made["revoked"] and not made["awaited"]:
            self._say("nothing to do: every party has its kit")
        if any(name != "coordinator" for name in made["new"]):
            self._say("the private keys of sites were made here: use --by-request if they may not")
            self._say("give each site its own kit alone")
        self._say(f"authority {Kit(to / 'coordinator').authority}")
        self._say(f"keep {to / 'authority'} to yourself")

    def request(
        self,
        name: Annotated[str, typer.Argument(help="this site's name in the project")],
        to: Annotated[Path | None, typer.Option("--out", help="the kit; default NAME")] = None,
        passphrase: Passphrase = False,
    ) -> None:
        """Make this site's private key, and a request that the project's owner signs."""
        _ask(passphrase, confirm=True)
        folder = to or Path(name)
        asked, fingerprint = signing.request(name, folder)
        self._say(f"made {folder} with a private key, which stays here")
        self._say(f"send {asked} to the project's owner, and read this out by telephone:")
        self._say(f"  key {fingerprint}")

    def sign(
        self,
        project: Annotated[Path, typer.Argument(help="the project's file, .toml")],
        asked: Annotated[Path, typer.Argument(help="a site's request, .csr", metavar="REQUEST")],
        to: Annotated[Path, typer.Option("--out", help="the folder of the kits")] = Path("kits"),
        replace: Annotated[
            bool, typer.Option("--replace", help="let a site have another key than before")
        ] = False,
    ) -> None:
        """Sign a site's request, at the project's owner."""
        path, key, own = signing.sign(project, asked, to, replace)
        self._say(f"signed {asked}; send {path} back if the site reads out the same key:")
        self._say(f"  key {key}")
        self._say(f"  authority {own}")

    def install(
        self,
        kit: Annotated[Path, typer.Argument(help="the folder that network request made")],
        signed: Annotated[Path, typer.Argument(help="the owner's answer, .signed.json")],
        run: Annotated[
            str, typer.Option("--run", help="a run: its actions go into the contract")
        ] = "",
        passphrase: Passphrase = False,
    ) -> None:
        """Complete this site's kit with what the project's owner has signed."""
        _ask(passphrase)
        config = resolve(read(run), run) if run else None
        drafted = not (kit / "site.toml").exists()
        made = signing.install(kit, signed, config)
        self._say(f"{made.name}: certificate until {made.until:%Y-%m-%d}, for {made.server}")
        self._say(f"  key {made.fingerprint}")
        self._say(f"  authority {made.authority}")
        if run and not drafted:
            self._say("site.toml was there and stays as it is: --run was not used")
        if drafted and not run:
            self._say("the contract in site.toml allows nothing yet: name methods and actions")
        self._say("the owner reads out the same authority? then read site.toml, and atoll join")

    def renew(
        self,
        project: Annotated[Path, typer.Argument(help="the project's file, .toml")],
        name: Annotated[str, typer.Argument(help="a site, or coordinator")],
        to: Annotated[Path, typer.Option("--out", help="the folder of the kits")] = Path("kits"),
    ) -> None:
        """Give one party a new certificate; all other kits stay as they are."""
        folder = renew(project, to, name)
        until = Kit(folder).until
        self._say(f"renewed {folder}, certificate until {until:%Y-%m-%d}")

    def show_kits(
        self,
        kits: Annotated[list[Path], typer.Argument(help="folders of parties")],
    ) -> None:
        """Say of every kit whose it is, until when it is valid, and what is wrong with it."""
        for folder in kits:
            kit = Kit(folder)
            try:
                wrong = kit.check() or "in order"
            except UserError as error:
                wrong = error.what
            self._say(f"{kit.name}: until {kit.until:%Y-%m-%d}, {wrong}")
            self._say(f"  key {kit.fingerprint}")
            self._say(f"  authority {kit.authority}")

    def serve(
        self,
        kit: Annotated[Path, typer.Argument(help="the coordinator's kit")],
        what: Annotated[
            list[str], typer.Argument(help="runs: .toml files or presets", metavar="RUN...")
        ],
        to: Annotated[
            Path | None, typer.Option("--out", help="the run's folder; default runs/NAME-N")
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="go on with a run that was cut")
        ] = False,
        at_least: Annotated[
            int, typer.Option(help="sites that must be there, where the method can do without some")
        ] = 0,
        deadline: Annotated[float, typer.Option(help="seconds that one exchange may take")] = 3600,
        silence: Annotated[
            float, typer.Option(help="seconds without a sign of life: the site is lost")
        ] = 30,
        patience: Annotated[
            float, typer.Option(help="seconds to wait for a site before going on without it")
        ] = 120,
        as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
        quiet: Annotated[bool, typer.Option("--quiet", help="print the result only")] = False,
    ) -> None:
        """Coordinate a run between sites that have joined, to its end."""
        configs = [resolve(read(name), name) for name in what]
        if to and len(configs) > 1:
            raise UserError("one --out for several runs", "--out", "leave it out, or give one run")
        terms = coordinator.Terms(deadline, silence, patience, at_least)
        with ExitStack() as folders:
            todo = [
                (config, folders.enter_context(run_folder(config.name, to, resume)))
                for config in configs
            ]
            self._serve(kit, todo, terms, resume, quiet)
            runs = [Run(folder) for _, folder in todo]
            self.show(runs, todo[0][1], as_json)
            for line in [] if quiet else _called(Kit(kit), runs):
                self.err.print(line, soft_wrap=True)

    def _serve(
        self,
        kit: Path,
        todo: list[tuple[RunConfig, Path]],
        terms: coordinator.Terms,
        resume: bool,
        quiet: bool,
    ) -> None:
        for config, folder in todo:
            _begun(config, folder, resume)
        warning = Kit(kit).check()
        if warning:
            self.err.print(warning, soft_wrap=True)
        with self._stoppable("stopping after this round") as stopping, self._lines(quiet) as tell:
            try:
                coordinator.serve(
                    Kit(kit), todo, terms,
                    lambda said, views: tell(coordinator.lines(said, views)), stopping,
                    self._note(quiet),
                )  # fmt: skip
            except InterruptedRunError as error:
                where = str(todo[0][1])
                raise UserError(
                    "interrupted, state saved", where, "go on with --resume", EXIT_INTERRUPTED
                ) from error

    def join(
        self,
        kit: Annotated[Path, typer.Argument(help="this site's kit")],
        site: Annotated[Path, typer.Argument(help="this site's own file, .toml")],
        passphrase: Passphrase = False,
        quiet: Annotated[bool, typer.Option("--quiet", help="print mistakes only")] = False,
    ) -> None:
        """Take part with this site's data until stopped with Ctrl-C."""
        _ask(passphrase)
        warning = Kit(kit).check()
        if warning:
            self.err.print(warning, soft_wrap=True)

        with self._stoppable("leaving") as stopping, self._lines(quiet) as tell:
            site_end.join(Kit(kit), site, lambda line: tell([line]), stopping, self._note(quiet))

    def rehearse(
        self,
        project: Annotated[Path, typer.Argument(help="the project's file, .toml")],
        run: Annotated[str, typer.Argument(help="a run: a .toml file or a preset", metavar="RUN")],
        kits: Annotated[Path, typer.Option(help="the folder of the kits")] = Path("kits"),
        to: Annotated[
            Path | None, typer.Option("--out", help="keep everything in this folder")
        ] = None,
    ) -> None:
        """Try a federation on this machine, first undisturbed, then with faults: go or no go."""
        config = resolve(read(run), run)
        with tempfile.TemporaryDirectory(prefix="atoll-") as temporary:
            folder = to or Path(temporary) / "rehearsal"
            if folder.exists():
                raise UserError("the folder is there already", str(folder), "choose another --out")
            found = rehearsal.rehearse(project, kits, config, folder, self._say)
        failed = [item for item in found if not item.passed]
        self._say("go" if not failed else f"NO GO: {len(failed)} of {len(found)}")
        if failed:
            raise UserError(
                f"no go: {failed[0].what}", str(project), failed[0].words, EXIT_SITE_FAILED
            )

    def explain(
        self,
        site: Annotated[Path, typer.Argument(help="a site's own file, .toml")],
    ) -> None:
        """Say in words what a site's contract allows, and the worst case that it implies."""
        for line in explain.explained(read_site(site).terms()):
            self._say(line)

    def egress(
        self,
        store: Annotated[Path, typer.Argument(help="a site's store, or its egress.jsonl")],
        run: Annotated[str, typer.Option(help="of one run alone")] = "",
    ) -> None:
        """Say what has left a site, after checking that the log is whole."""
        found = egress.audited(store)
        if not egress.mirrored(store):
            self._say("no copy of the log's end is here: a log that was cut would not be noticed")
        asked = [line for line in found if not run or line.run == run]
        for line in asked:
            self._say(f"{line.time}  {line.run}  {line.words}")
        total, count = sum(line.bytes for line in asked), sum(bool(line.bytes) for line in asked)
        if not found:
            self._say("the log is empty: nothing has left this site")
        else:
            end = f"the chain is whole and ends in {found[-1].hash}"
            self._say(f"{count:,} answers, {total:,} bytes; {end}")

    def _note(self, quiet: bool) -> Callable[[str], None]:
        """How a line is shown that stays on the screen."""

        def note(line: str) -> None:
            if not quiet:
                self.err.print(Text(line), soft_wrap=True)

        return note

    def _say(self, text: str) -> None:
        self.out.print(printable(text), soft_wrap=True)

    @contextmanager
    def _stoppable(self, words: str) -> Iterator[Callable[[], bool]]:
        """The first Ctrl-C asks to stop, the second stops at once."""
        asked: list[int] = []

        def stop(number: int, frame: FrameType | None) -> None:
            if asked:
                raise KeyboardInterrupt
            asked.append(number)
            self.err.print(f"{words}; press Ctrl-C again to stop at once", soft_wrap=True)

        before = [signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)]
        try:
            yield lambda: bool(asked)
        finally:
            for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
                signal.signal(number, handler)

    @contextmanager
    def _lines(self, quiet: bool) -> Iterator[Callable[[list[str]], None]]:
        """One line for each party: live on a terminal; in a log when something has changed."""
        live = (
            Live(console=self.err, transient=True) if self.err.is_terminal and not quiet else None
        )
        shown: dict[str, Any] = {"what": "", "when": 0.0}

        def tell(told: list[str]) -> None:
            lines = list(map(printable, told))
            if quiet:
                return
            if live:
                live.update(Text("\n".join(lines)))
                return
            now, what = time.monotonic(), _gist(lines)
            if what != shown["what"] or now - shown["when"] > AGAIN_SECONDS:
                shown.update(what=what, when=now)
                for line in lines:
                    self.err.print(line, soft_wrap=True)

        if live:
            live.start()
        try:
            yield tell
        finally:
            if live:
                live.stop()


def _called(kit: Kit, runs: list[Run]) -> list[str]:
    """Which site is which client of the records, where their names differ."""
    found = dict[str, None]()
    for run in runs:
        pairs = zip(kit.sites, run.facts["clients"], strict=True)
        named = [f"{site} is {client}" for site, client in pairs if site != client]
        if named:
            found[f"in the record {', '.join(named)}"] = None
    return list(found)


def _ask(wanted: bool, confirm: bool = False) -> None:
    """Ask for a passphrase; NVFlare's processes have it from the environment."""
    if wanted:
        typed = typer.prompt("passphrase", hide_input=True, confirmation_prompt=confirm, err=True)
        os.environ[PASSPHRASE] = typed


def _gist(lines: list[str]) -> list[str]:
    """What is worth a new line in a log: who is there and who is not, not every step."""
    said = [re.sub(r"(stage \S+ round \S+ done|running)", "at work", line) for line in lines]
    return [re.sub(r"working on \w+", "connected", line.partition(",")[0]) for line in said]


def _begun(config: RunConfig, folder: Path, resume: bool) -> None:
    """Refuse to overwrite a run, or to go on with another one than is there."""
    if resume:
        refuse_absent([folder])
    if not (folder / "config.toml").exists():
        return
    if not resume:
        raise UserError("there is a run in this folder", str(folder), "go on with --resume")
    if recorded(folder) != config:
        remedy = "resume with the config it was started with"
        raise UserError("the run in this folder has another config", str(folder), remedy)
