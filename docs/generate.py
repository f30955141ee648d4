"""Writes the reference pages of the site from the code: API, options, events, messages.

`make docs` calls `write`; the pages lie in docs/reference and are not committed.
"""

import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import atoll
from atoll import data, methods, testing
from atoll.core.federation import Clients, Moment, actions, kinds
from atoll.core.influence import RobustOptions
from atoll.core.method import Method
from atoll.core.options import describe
from atoll.core.record import KINDS
from atoll.data import splits
from atoll.data.own.profiles import TableOptions
from atoll.data.public import PublicOptions
from atoll.data.site import Site
from atoll.engines.network.contract import Contract
from atoll.jobs.train import EvalJob, Optimiser, Phase, TrainJob, TrainResult
from atoll.learning.models import ModelOptions
from atoll.runs.config import EngineOptions, ReportOptions, RunConfig

__all__ = ["PAGES", "write"]

OF_METHODS = (Method, Site, Clients, Moment, TrainJob, Phase, Optimiser, TrainResult, EvalJob)
WIDTH = 88  # characters of a line that a reader need not scroll for
NOTE = "This page is generated from the code.\n"


def write(folder: Path) -> None:
    """Write all reference pages; a page that is the same is left alone, so builds stay quick."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        path, text = folder / f"{name}.md", page()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [
        " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows
    ]
    return "\n".join(
        f"| {line} |" for line in (" | ".join(head), " | ".join("---" for _ in head), *lines)
    )


def first_line(thing: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def api() -> str:
    """Every public name with its signature and docstring."""
    parts = ["# Python API", NOTE, "Guide: [use atoll from Python](../python.md).", "## atoll"]
    names = [name for name in atoll.__all__ if not name.startswith("_")]
    parts += [entry(name, getattr(atoll, name)) for name in names]
    parts += ["## atoll.testing", (inspect.getdoc(testing) or "").partition("\n")[0]]
    parts += [entry(name, getattr(testing, name)) for name in testing.__all__]
    parts += ["## In the file of a method", "Tutorial: [your own method](../method.md)."]
    parts += [described(kind) for kind in OF_METHODS]
    return "\n\n".join(parts) + "\n"


def described(kind: type) -> str:
    """A class that the file of a method imports: its module, its fields, its methods."""
    parts = [entry(kind.__name__, kind), f"From `{kind.__module__}`."]
    if dataclasses.is_dataclass(kind):
        rows = [[f"`{one.name}`", one.kind, one.remark] for one in describe(kind)]
        parts += [table(["field", "type", "what it is"], rows)]
    return "\n\n".join(parts)


def entry(name: str, thing: Any) -> str:
    """A function, or a class with its public members."""
    parts = [f"### {name}", *signed(name, thing)]
    if inspect.isclass(thing):
        for own, member in vars(thing).items():
            function = getattr(member, "fget", None) or getattr(member, "func", None) or member
            if own.startswith("_") or not inspect.isfunction(function):
                continue
            is_value = function is not member
            heading = f"`{name}.{own}`" if is_value else f"`{name}.{own}{signature(function)}`"
            parts.append(f"{heading}\\\n{first_line(function)}")
    return "\n\n".join(parts)


def signed(name: str, thing: Any) -> list[str]:
    """The signature in a block, the docstring as text, its example as a block."""
    text = inspect.getdoc(thing) or ""
    words, mark, example = text.partition(">>>")
    parts = [f"```python\n{folded(name + signature(thing))}\n```", words.strip()]
    return parts + ([f"```pycon\n{mark}{textwrap.dedent(example).rstrip()}\n```"] if mark else [])


def signature(thing: Any) -> str:
    """The signature of a function or class, without `self` and without modules of types."""
    try:
        shown = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    parameters = [one for name, one in shown.parameters.items() if name != "self"]
    line = str(shown.replace(parameters=parameters))
    line = re.sub(r"\b(?:[a-z_]\w*\.)+(?=\w)", "", line)
    line = re.sub(r"<factory>|<function .*? at 0x\w+>", "...", line)
    line = re.sub(r"-> '(\w+)'$", r"-> \1", line)
    return line.removesuffix(" -> None") if inspect.isclass(thing) else line


def folded(line: str) -> str:
    """A long signature with a parameter in each line."""
    if len(line) <= WIDTH or "(" not in line:
        return line
    head, _, rest = line.partition("(")
    inside, end, result = rest.rpartition(")")
    depth, text = 0, ""
    for character, following in pairwise(f"{inside} "):
        depth += (character in "([{") - (character in ")]}")
        between = not depth and character == "," and following == " "
        text += ",\n   " if between else character
    return f"{head}(\n    {text},\n{end}{result}"


def options() -> str:
    """Every table of a config and of a site's contract."""
    parts = ["# Options", NOTE]
    parts += ["`atoll show METHOD` prints those of one method in a terminal."]
    for title, kind in (
        ("A run", RunConfig), ("[data]: own tables", TableOptions), ("[model]", ModelOptions),
        ("[public]", PublicOptions), ("[engine]", EngineOptions), ("[robust]", RobustOptions),
        ("[report]", ReportOptions), ("[contract] of a site", Contract),
    ):  # fmt: skip
        parts += [f"## {title}", first_line(kind), options_table(kind)]
    parts += ["## [scenario]: splits"]
    for name in splits.names():
        kind = splits.load(name).options
        about = (sys.modules[kind.__module__].__doc__ or "").splitlines()[0]
        parts += [f"### split {name}", about, options_table(kind)]
    parts += ["## [method]"]
    for name in methods.names():
        link = f"[The page of {name}](../methods/{name}.md)."
        parts += [f"### method {name}", link, options_table(methods.load(name).options)]
    parts += ["## [data]: data sets"]
    parts += [
        table(["data set", "what it is"], [[f"`{n}`", data.about(n).line] for n in data.names()])
    ]
    return "\n\n".join(parts) + "\n"


def options_table(kind: type) -> str:
    """Every option of a class with type, default, range and remark."""
    rows = [
        [
            f"`{one.name}`",
            one.kind,
            f"`{json.dumps(one.default, default=str)}`",
            one.range,
            one.remark,
        ]
        for one in describe(kind)
    ]
    return table(["option", "type", "default", "range", "what it is"], rows)


def events() -> str:
    """Every event of a record."""
    parts = ["# Events", NOTE]
    page = "[Files of a run](../record.md) explains them."
    parts += [f"A run's `events.jsonl` has one JSON object per line. {page}"]
    for name, kind in KINDS.items():
        rows = [[f"`{one.name}`", one.kind, one.remark] for one in describe(kind)]
        parts += [f"## {name}", first_line(kind), table(["field", "type", "what it is"], rows)]
    return "\n\n".join(parts) + "\n"


def messages() -> str:
    """Every action of every method with its request and reply."""
    parts = ["# Messages on the wire", NOTE]
    parts += [
        "A server asks its clients for an action; request and reply are frozen dataclasses. They "
        "travel as a JSON header and one safetensors block; nothing is ever unpickled. A mark "
        "tells a site's policy what a field holds."
    ]
    for name in methods.names():
        parts += [f"## {name}", f"[The page of {name}](../methods/{name}.md)."]
        for action, function in sorted(actions(methods.load(name).client).items()):
            request, reply = kinds(function)
            rows = [*fields("request", request), *fields("reply", reply)]
            parts += [f"### {name}: {action}", first_line(function)]
            parts += [table(["", "message", "field", "type", "mark"], rows)]
    return "\n\n".join(parts) + "\n"


def fields(side: str, kind: type) -> list[list[str]]:
    """The fields of a message."""
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    return [[side, f"`{kind.__name__}`", f"`{n}`", *type_and_mark(hints[n])] for n in names] or [
        [side, f"`{kind.__name__}`", "", "", ""]
    ]


def type_and_mark(hint: Any) -> tuple[str, str]:
    """A field's type and its marks in words."""
    marks = [str(one) for one in getattr(hint, "__metadata__", ())]
    plain = hint.__origin__ if marks else hint
    if "Mapping[str, torch.Tensor]" in str(plain):
        return "named tensors", ", ".join(marks)
    shown = (
        plain.__name__ if isinstance(plain, type) and not hasattr(plain, "__args__") else str(plain)
    )
    return shown.replace("typing.", "").replace("torch.", ""), ", ".join(marks)


PAGES: dict[str, Callable[[], str]] = {
    "api": api, "options": options, "events": events, "messages": messages,
}  # fmt: skip

if __name__ == "__main__":
    write(Path(__file__).parent / "reference")
