"""What TAB completes: sketches of the commands with their options, and values. Needs no torch.

A sketch has the options of a command and no body, so that completion imports nothing heavy. A test
compares the sketches with the commands.
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

Complete = Callable[[str], list[str]]


class Sketch(NamedTuple):
    """The arguments and options of a command."""

    arguments: str  # what each names: config, run, list, or - for anything
    options: str  # those that take a value
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
    "inspect": Sketch("config", "--set", ""),
    "show": Sketch("config", "", "--all"),
    "list": Sketch("list", "", ""),
    "answer": Sketch("run", "", "--json -q --quiet"),
    "report": Sketch("run", "-o --out --figures", ""),
    "watch": Sketch("run", "--port", ""),
    "predict": Sketch(
        "run -", "--site -o --out --model --task --data --seed --lacking", "--held-out"
    ),
    "export": Sketch("run", "--site -o --out --model --task --seed", "--onnx"),
}  # fmt: skip


def sketch(name: str) -> Callable[[], None]:
    """A function with the parameters of a command, for typer to make a command of."""

    def command() -> None:
        """Complete, and do nothing."""

    parameters = []
    for number, kind in enumerate(SKETCHES[name].arguments.split()):
        many = list[str] if name in ("answer", "report", "watch") else str
        argument = typer.Argument(autocompletion=_completer(kind))
        parameters.append(_parameter(f"argument_{number}", Annotated[many, argument]))
    for option in SKETCHES[name].options.split():
        choose = typer.Option(option, autocompletion=_completer(option))
        parameters.append(_parameter(option.strip("-"), Annotated[list[str], choose]))
    for flag in SKETCHES[name].flags.split():
        name_of_flag = f"flag_{flag.strip('-').replace('-', '_')}"
        parameters.append(_parameter(name_of_flag, Annotated[bool, typer.Option(flag)]))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


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
        "--set": _settings,
        "--axis": _settings,
        "--device": lambda word: ("auto", "cpu", "cuda"),
        "--engine": lambda word: ("local",),
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
    """Join what bash has cut at a =, so that key=value is one word; complete what follows the =."""
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
