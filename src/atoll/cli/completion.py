"""Shell completion: sketches of the commands with their options, and values. Needs no torch.

Every command has a sketch with its options and no body, so that completion imports nothing heavy.
A test compares the sketches with the commands.
"""

import inspect
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from atoll.cli.option_values import configs, option_values, source_names

__all__ = ["SKETCHES", "Sketch", "joined_words", "sketch"]

PAPERS = ("chfl", "fccl", "fedseit", "vleto")  # of `atoll reproduce`
Complete = Callable[[str], list[str]]


class Sketch(NamedTuple):
    """The arguments and options of a command."""

    arguments: str  # what each names: config, run, list, or - for anything; * after a list
    options: str  # options with values
    flags: str


SKETCHES: Mapping[str, Sketch] = {
    "run": Sketch(
        "config", "--set --seeds --engine --device --out --track",
        "--resume --answer --no-answer --json -q --quiet -v --verbose",
    ),
    "sweep": Sketch(
        "config",
        "--axis --set --device --out --on --gpus-per-block --points-per-block",
        "--resume --shared-folder --no-shared-folder --json -q --quiet",
    ),
    "reproduce": Sketch(
        "paper",
        "--table --only --device --jobs --set --verify --on --gpus-per-block --out",
        "--quick --tf32 --studies --render --measure",
    ),
    "bench fcl": Sketch(
        "", "--out --set --device --minutes --on --gpus-per-block", "--quick --render"
    ),
    "inspect": Sketch("config", "--set", ""),
    "show": Sketch("config", "", "--all"),
    "list": Sketch("list", "", ""),
    "init": Sketch("-*", "--label --site --stage --text --id --method -o --out", ""),
    "align": Sketch("-*", "--hub --id --out", "--exact --no-exact --assume-aligned"),
    "new method": Sketch("-", "-o --out", ""),
    "new project": Sketch("-", "-o --out", ""),
    "doctor": Sketch("", "", ""),
    "answer": Sketch("run*", "", "--json -q --quiet"),
    "report": Sketch("run*", "-o --out --figures", ""),
    "watch": Sketch("run*", "--port", ""),
    "predict": Sketch(
        "run -", "--site -o --out --model --task --data --seed --lacking", "--held-out"
    ),
    "export": Sketch("run", "--site -o --out --model --task --seed", "--onnx"),
    "network init": Sketch("-", "--out --run", "--by-request"),
    "network request": Sketch("-", "--out", "--passphrase"),
    "network sign": Sketch("- -", "--out", "--replace"),
    "network install": Sketch("- -", "--run", "--passphrase"),
    "network renew": Sketch("- -", "--out", ""),
    "network show": Sketch("-*", "", ""),
    "contract explain": Sketch("-", "", ""),
    "serve": Sketch(
        "- config*", "--out --at-least --deadline --silence --patience",
        "--resume --answer --no-answer --json -q --quiet",
    ),
    "join": Sketch("- -", "", "--passphrase --accept-log -q --quiet"),
    "egress": Sketch("-", "--run", ""),
    "rehearse": Sketch("- config", "--kits --out", ""),
}  # fmt: skip


def sketch(name: str) -> typer.Typer:
    """An app with the parameters of one command, or of a group of commands such as `network`."""
    app = typer.Typer()
    if name in SKETCHES:
        app.command(name)(_empty(SKETCHES[name]))
        return app
    group = typer.Typer()
    for path, parts in SKETCHES.items():
        if path.startswith(f"{name} "):
            group.command(path.partition(" ")[2])(_empty(parts))
    app.add_typer(group, name=name)
    return app


def _empty(parts: Sketch) -> Callable[[], None]:
    """A function with the parameters of a command, for typer."""

    def command() -> None:
        """Complete, without side effects."""

    parameters = []
    for number, kind in enumerate(parts.arguments.split()):
        argument = typer.Argument(autocompletion=_completer(kind.rstrip("*")))
        several = list[str] if kind.endswith("*") else str
        parameters.append(_parameter(f"argument_{number}", Annotated[several, argument]))
    for option in parts.options.split():
        value = typer.Option(option, autocompletion=_completer(option))
        parameters.append(_parameter(_identifier("option", option), Annotated[list[str], value]))
    for flag in parts.flags.split():
        switch = typer.Option(flag)
        parameters.append(_parameter(_identifier("flag", flag), Annotated[bool, switch]))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _identifier(kind: str, option: str) -> str:
    return f"{kind}_{option.strip('-').replace('-', '_')}"


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    default: Any = False if name.startswith("flag_") else None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _completer(kind: str) -> Complete:
    completers: dict[str, Callable[[str], Iterable[str]]] = {
        "config": lambda word: configs(),
        "run": lambda word: _run_folders(),
        "list": lambda word: ("methods", "data", "splits", "presets", "runs"),
        "paper": lambda word: PAPERS,
        "--set": _settings,
        "--axis": _settings,
        "--device": lambda word: ("auto", "cpu", "cuda"),
        "--engine": lambda word: ("local",),
        "--on": lambda word: ("ray",),
        "--track": lambda word: ("tensorboard", "mlflow", "trackio"),
        "--out": lambda word: _run_folders(),
        "--method": lambda word: source_names("methods"),
    }
    words = completers.get(kind, lambda word: ())

    def complete(incomplete: str) -> list[str]:
        return [word for word in words(incomplete) if word.startswith(incomplete)]

    return complete


def _settings(word: str) -> Iterable[str]:
    """Keys with a =, or after it the values of a key."""
    typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    config = typed.split()[2:3]  # atoll run CONFIG; ctx has none, as --set lacks its value
    options = option_values("".join(config))
    key, equals, _ = word.partition("=")
    if equals:
        return [f"{key}={value}" for value in options.get(key, ())]
    return [f"{name}=" for name in options]


def _run_folders() -> list[str]:
    """The runs below `runs`, and folders of several seeds."""
    homes = {path.parent for path in Path("runs").glob("*/config.toml")}
    homes |= {path.parent.parent for path in Path("runs").glob("*/*/config.toml")}
    return sorted(str(home) for home in homes)


@contextmanager
def joined_words() -> Iterator[None]:
    """Join words that bash has split at =, so that key=value is one word; complete the value."""
    words, place = os.environ.get("COMP_WORDS", ""), int(os.environ.get("COMP_CWORD", "0"))
    joined = _joined(words.replace("\n", " ").split(" "), place)
    if os.environ.get("_ATOLL_COMPLETE") != "complete_bash" or len(joined) > place:
        yield
        return
    os.environ |= {"COMP_WORDS": " ".join(joined), "COMP_CWORD": str(len(joined) - 1)}
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        before = joined[-1].rpartition("=")[0] + "="
        for line in printed.getvalue().splitlines():
            print(line.removeprefix(before))


def _joined(words: Sequence[str], place: int) -> list[str]:
    """The words up to a place, with those before and after a = as one."""
    joined: list[str] = []
    for word in [*words, *[""] * (place + 1 - len(words))][: place + 1]:
        after = bool(joined) and joined[-1].endswith("=") and not joined[-1].startswith("-")
        if joined and (word == "=" or after):
            joined[-1] += word
        else:
            joined.append(word)
    return joined
