"""The commands of a federation between real sites: parse, call, print."""

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.text import Text

from atoll.cli.arguments import Answer, AsJson, Folder, Kits, Project, Quiet, Resume
from atoll.cli.console import err, out
from atoll.cli.terminal import print_answer, print_result, stoppable
from atoll.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_SITE_FAILED,
    BadMessageError,
    ClientFailedError,
    InterruptedRunError,
    UserError,
    printable,
)
from atoll.engines.network import coordinator, egress, explain, rehearsal, signing
from atoll.engines.network import site as site_end
from atoll.engines.network.contract import read_site
from atoll.engines.network.drafts import drafted_contract
from atoll.engines.network.kits import Kit, init, renew
from atoll.engines.network.steps import refused_counts
from atoll.engines.network.tls import PASSPHRASE
from atoll.engines.network.unchecked import kind_of, uncovered
from atoll.runs.config import RunConfig, read, resolve
from atoll.runs.folders import refuse_absent, refuse_other_config, run_folder
from atoll.runs.result import Run

__all__ = ["Changes", "register"]

Passphrase = Annotated[
    bool, typer.Option("--passphrase", help=f"ask for the key's passphrase; or set {PASSPHRASE}")
]
MOST_ROWS = 5000  # row counts of a site for which a run is checked in advance
PROGRESS_SECONDS = 10.0  # minimum seconds between two log lines that differ only in progress


def init_command(
    project: Project,
    to: Kits = Path("kits"),
    run: Annotated[str, typer.Option("--run", help="draft the sites' contracts for this run")] = "",
    by_request: Annotated[
        bool, typer.Option("--by-request", help="sites create their own keys with network request")
    ] = False,
) -> None:
    """Create a kit for every party that has none; other kits do not change."""
    config = resolve(read(run), run) if run else None
    parties = init(project, to, config, by_request)
    if run and by_request:
        _say("sites draft their contracts themselves: atoll network install ... --run RUN")
    for name in parties["new"]:
        kit = Kit(to / name)
        _say(f"made {to / name}, certificate until {kit.until:%Y-%m-%d}")
        _say(f"  key {kit.fingerprint}")
    for name in parties["awaited"]:
        _say(f"waiting for the request of {name}: atoll network request {name}, there")
    for name in parties["revoked"]:
        _say(f"revoked {name}: the server hears no more of it")
    if not parties["new"] and not parties["revoked"] and not parties["awaited"]:
        _say("nothing to do: every party has its kit")
    if any(name != "coordinator" for name in parties["new"]):
        _say("the private keys of sites were made here: use --by-request if they may not")
        _say("give each site its own kit alone")
    coordinator = Kit(to / "coordinator")
    if len(coordinator.sites) == 2:
        _say("with two sites each knows the other's update: it is the mean without its own")
    _say_row_counts(config)
    _say_unchecked(config)
    _say(f"authority {coordinator.authority}")
    _say(f"keep {to / 'authority'} to yourself")


def _say_row_counts(config: RunConfig | None) -> None:
    """Print the row counts at which a site's drafted contract refuses its run."""
    ranges = refused_counts(config, drafted_contract(config), MOST_ROWS) if config else []
    if ranges:
        shown = [str(a) if a == b else f"{a:,} to {b:,}" for a, b in ranges]
        listed = ", ".join(shown[:3]) + (" and so on" if len(shown) > 3 else "")
        _say(f"a site with {listed} training rows in a stage refuses this run, as too few rows or")
        _say(
            "steps stand behind its update: method.batch and method.epochs decide (docs/network.md)"
        )


def _say_unchecked(config: RunConfig | None) -> None:
    """Warn of a run whose network no check for single rows covers."""
    reason = uncovered(config, kind_of(config)) if config else ""
    if reason:
        _say(f"no check looks for single rows in {reason}: rows can be read there")
        _say('the contract is loosened for it: unchecked_networks = "allow" (docs/network.md);')
        _say("a network with one hidden layer, on tables, does without")


def request_command(
    name: Annotated[str, typer.Argument(help="this site's name in the project")],
    to: Annotated[Path | None, typer.Option("--out", help="the kit; default NAME")] = None,
    passphrase: Passphrase = False,
) -> None:
    """Create this site's private key, and a request for the project's owner to sign."""
    _ask(passphrase, confirm=True)
    folder = to or Path(name)
    asked, fingerprint = signing.request(name, folder)
    _say(f"made {folder} with a private key, which stays here")
    _say(f"send {asked} to the project's owner, and read this out by telephone:")
    _say(f"  key {fingerprint}")


def sign_command(
    project: Project,
    request: Annotated[Path, typer.Argument(help="a site's request, .csr", metavar="REQUEST")],
    to: Kits = Path("kits"),
    replace: Annotated[
        bool, typer.Option("--replace", help="accept another key than before")
    ] = False,
) -> None:
    """Sign a site's request, as the project's owner."""
    path, key, own = signing.sign(project, request, to, replace)
    _say(f"signed {request}; send {path} back if the site reads out the same key:")
    _say(f"  key {key}")
    _say(f"  authority {own}")


def install_command(
    kit: Annotated[Path, typer.Argument(help="the folder that network request made")],
    signed: Annotated[Path, typer.Argument(help="the owner's answer, .signed.json")],
    run: Annotated[str, typer.Option("--run", help="draft the contract for this run")] = "",
    passphrase: Passphrase = False,
) -> None:
    """Complete this site's kit with the signed answer of the project's owner."""
    _ask(passphrase)
    config = resolve(read(run), run) if run else None
    drafted = not (kit / "site.toml").exists()
    installed = signing.install(kit, signed, config)
    _say(f"{installed.name}: certificate until {installed.until:%Y-%m-%d}, for {installed.server}")
    _say(f"  key {installed.fingerprint}")
    _say(f"  authority {installed.authority}")
    if run and not drafted:
        _say("site.toml exists and is kept: --run was not used")
        _say("to draft the contract again, move site.toml away and install once more")
    _say_row_counts(config if drafted else None)
    _say_unchecked(config if drafted else None)
    if drafted and not run:
        _say("the contract in site.toml allows nothing yet: name methods and actions")
    _say("the owner reads out the same authority? then read site.toml, and atoll join")


def renew_command(
    project: Project,
    name: Annotated[str, typer.Argument(help="a site, or coordinator")],
    to: Kits = Path("kits"),
) -> None:
    """Give one party a new certificate; all other kits stay unchanged."""
    folder = renew(project, to, name)
    until = Kit(folder).until
    _say(f"renewed {folder}, certificate until {until:%Y-%m-%d}")


def show_kits_command(
    kits: Annotated[list[Path], typer.Argument(help="folders of parties")],
) -> None:
    """Show the party, the expiry date and the problems of every kit."""
    for folder in kits:
        kit = Kit(folder)
        try:
            wrong = kit.check() or "in order"
        except UserError as error:
            wrong = error.what
        _say(f"{kit.name}: until {kit.until:%Y-%m-%d}, {wrong}")
        _say(f"  key {kit.fingerprint}")
        _say(f"  authority {kit.authority}")


def serve_command(
    kit: Annotated[Path, typer.Argument(help="the coordinator's kit")],
    what: Annotated[list[str], typer.Argument(help="runs: .toml files or presets", metavar="RUN")],
    to: Folder = None,
    resume: Resume = False,
    at_least: Annotated[
        int, typer.Option(help="fewest sites, if the method allows absent sites")
    ] = 0,
    deadline: Annotated[float, typer.Option(help="time limit of one exchange in seconds")] = 3600,
    silence: Annotated[
        float, typer.Option(help="seconds without a sign of life until a site counts as lost")
    ] = 30,
    patience: Annotated[
        float, typer.Option(help="seconds to wait for a site before continuing without it")
    ] = 120,
    answer: Answer = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Coordinate a run between sites that have joined, to its end."""
    configs = [resolve(read(name), name) for name in what]
    if to and len(configs) > 1:
        raise UserError("one --out for several runs", "--out", "leave it out, or give one run")
    terms = coordinator.Terms(deadline, silence, patience, at_least, answer)
    with ExitStack() as folders:
        todo = [
            (config, folders.enter_context(run_folder(config.name, to, resume)))
            for config in configs
        ]
        _serve(kit, todo, terms, resume, quiet)
        runs = [Run(folder) for _, folder in todo]
        print_result(runs, todo[0][1], as_json, runs[0].answer if len(runs) == 1 else None)
        for run in runs if len(runs) > 1 and not as_json else []:
            if run.answer:
                _say(f"{run.folder}:")
                print_answer(run.answer)
        for line in [] if quiet else _called(Kit(kit), runs):
            err.print(line, soft_wrap=True)


def _serve(
    kit: Path,
    todo: list[tuple[RunConfig, Path]],
    terms: coordinator.Terms,
    resume: bool,
    quiet: bool,
) -> None:
    for config, folder in todo:
        if resume:
            refuse_absent([folder])
            refuse_other_config(config, folder)
        elif (folder / "config.toml").exists():
            raise UserError("there is a run in this folder", str(folder), "continue with --resume")
    warning = Kit(kit).check()
    if warning:
        err.print(warning, soft_wrap=True)
    with (
        stoppable("stopping after this round", signal.SIGTERM) as stopping,
        _lines(quiet) as tell,
    ):
        try:
            coordinator.serve(
                Kit(kit), todo, terms,
                lambda states, views: tell(coordinator.lines(states, views)), stopping,
                _note(quiet),
            )  # fmt: skip
        except InterruptedRunError as error:
            raise _interrupted(todo[0][1]) from error
        except (ClientFailedError, BadMessageError) as error:
            unfinished = (str(f) for _, f in todo if not (f / "result.json").exists())
            error.add_note(next(unfinished, str(kit)))
            raise


def join_command(
    kit: Annotated[Path, typer.Argument(help="this site's kit")],
    site: Annotated[Path, typer.Argument(help="this site's own file, .toml")],
    passphrase: Passphrase = False,
    accept_log: Annotated[
        bool, typer.Option("--accept-log", help="continue without the copy of the log's end")
    ] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="print only errors")] = False,
) -> None:
    """Take part with this site's data until stopped with Ctrl-C."""
    _ask(passphrase)
    warning = Kit(kit).check()
    if warning:
        err.print(warning, soft_wrap=True)

    with stoppable("leaving", signal.SIGTERM) as stopping, _lines(quiet) as tell:
        site_end.join(Kit(kit), site, lambda line: tell([line]), stopping, _note(quiet), accept_log)


def rehearse_command(
    project: Project,
    run: Annotated[str, typer.Argument(help="a run: a .toml file or a preset", metavar="RUN")],
    kits: Annotated[Path, typer.Option(help="the folder of the kits")] = Path("kits"),
    to: Annotated[Path | None, typer.Option("--out", help="keep everything in this folder")] = None,
) -> None:
    """Try a federation on this machine, without and with faults: go or no go."""
    config = resolve(read(run), run)
    with _terminable(), tempfile.TemporaryDirectory(prefix="atoll-") as temporary:
        folder = to or Path(temporary) / "rehearsal"
        if folder.exists():
            raise UserError("the folder is there already", str(folder), "choose another --out")
        items = rehearsal.rehearse(project, kits, config, folder, _say)
    failed = [item for item in items if not item.passed]
    _say("go" if not failed else f"NO GO: {len(failed)} of {len(items)}")
    if failed:
        raise UserError(f"no go: {failed[0].what}", str(project), failed[0].words, EXIT_SITE_FAILED)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM interrupt like Ctrl-C, so that child processes are ended."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def explain_command(site: Annotated[Path, typer.Argument(help="a site's own file, .toml")]) -> None:
    """Explain what a site's contract allows, and the worst case that this implies."""
    for line in explain.explained(read_site(site).terms()):
        _say(line)


def egress_command(
    store: Annotated[Path, typer.Argument(help="a site's store, or its egress.jsonl")],
    run: Annotated[str, typer.Option(help="only this run")] = "",
) -> None:
    """Show what has left a site, after verifying its log."""
    lines = egress.audited(store)
    if not egress.mirrored(store):
        _say("no copy of the log's end is here: a log that was cut would not be noticed")
    selected = [line for line in lines if not run or line.run == run]
    for line in selected:
        _say(f"{line.time}  {line.run}  {line.words}")
    total, count = sum(line.bytes for line in selected), sum(bool(line.bytes) for line in selected)
    if not lines:
        _say("the log is empty: nothing has left this site")
    else:
        end = f"the chain is whole and ends in {lines[-1].hash}"
        _say(f"{count:,} answers, {total:,} bytes; {end}")


def _note(quiet: bool) -> Callable[[str], None]:
    """Return a function that shows a persistent line on the screen."""

    def note(line: str) -> None:
        if not quiet:
            err.print(Text(line), soft_wrap=True)

    return note


def _say(text: str) -> None:
    out.print(printable(text), soft_wrap=True)


@contextmanager
def _lines(quiet: bool) -> Iterator[Callable[[list[str]], None]]:
    """One line per party: live on a terminal; in a log when something has changed."""
    live = Live(console=err, transient=True) if err.is_terminal and not quiet else None
    log = Changes()

    def tell(lines: list[str]) -> None:
        lines = list(map(printable, lines))
        if quiet:
            return
        if live:
            live.update(Text("\n".join(lines)))
            return
        if log.changed(lines):
            for line in lines:
                err.print(line, soft_wrap=True)

    if live:
        live.start()
    try:
        yield tell
    finally:
        if live:
            live.stop()


def _called(kit: Kit, runs: list[Run]) -> list[str]:
    """Map sites to clients of the records, if their names differ."""
    sentences = dict[str, None]()
    for run in runs:
        pairs = zip(kit.sites, run.facts["clients"], strict=True)
        aliases = [f"{site} is {client}" for site, client in pairs if site != client]
        if aliases:
            sentences[f"in the record {', '.join(aliases)}"] = None
    return list(sentences)


def _ask(with_passphrase: bool, confirm: bool = False) -> None:
    """Ask for a passphrase; NVFlare's processes read it from the environment."""
    if with_passphrase:
        typed = typer.prompt("passphrase", hide_input=True, confirmation_prompt=confirm, err=True)
        os.environ[PASSPHRASE] = typed


class Changes:
    """Decides which lines about the parties are new enough for a log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.shown, self.when = clock, list[str](), 0.0

    def changed(self, lines: list[str]) -> bool:
        """Whether a party came, went or was refused, or a round ended some seconds ago.

        Ignores times and byte counts, which change all the time.
        """
        fixed = [" ".join(re.sub(r"\d[\d,]* (s|bytes)\b", "", line).split()) for line in lines]
        late = self.clock() - self.when > PROGRESS_SECONDS
        if fixed == self.shown or (not late and _parties(fixed) == _parties(self.shown)):
            return False
        self.shown, self.when = fixed, self.clock()
        return True


def _parties(lines: list[str]) -> list[str]:
    """The connection state of each party, without its activity."""
    states = [re.sub(r"(stage \S+ round \S+ done|running)", "at work", line) for line in lines]
    return [
        re.sub(r"working on \w+|idle for", "connected", line).partition(",")[0] for line in states
    ]


def _interrupted(folder: Path) -> UserError:
    """What remains of a run that was stopped with Ctrl-C."""
    if (folder / "checkpoint.safetensors").exists():
        what, remedy = "interrupted; the state is saved", "continue with --resume"
    else:
        begun = (folder / "config.toml").exists()
        what = "interrupted before the first checkpoint: nothing was saved"
        remedy = "start it anew with --resume" if begun else "start it again"
    return UserError(what, str(folder), remedy, EXIT_INTERRUPTED)


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    own = typer.Typer(no_args_is_help=True, help="Create and maintain the kits of a federation.")
    own.command("init")(init_command)
    own.command("request")(request_command)
    own.command("sign")(sign_command)
    own.command("install")(install_command)
    own.command("renew")(renew_command)
    own.command("show")(show_kits_command)
    app.add_typer(own, name="network")
    terms = typer.Typer(no_args_is_help=True, help="Explain the contract of a site.")
    terms.command("explain")(explain_command)
    app.add_typer(terms, name="contract")
    app.command("serve")(serve_command)
    app.command("join")(join_command)
    app.command("egress")(egress_command)
    app.command("rehearse")(rehearse_command)
