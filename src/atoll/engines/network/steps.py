"""The training behind an update: how many rows and steps a contract wants, and what gives them."""

from collections.abc import Sequence
from typing import Any

from atoll import methods
from atoll.core.annotations import Update, marked
from atoll.core.federation import actions, kinds
from atoll.core.method import Method
from atoll.engines.network.contract import Contract
from atoll.learning.models import Architecture
from atoll.runs.config import RunConfig
from atoll.runs.parts import Parts

__all__ = ["PARTS", "fewest_rows", "refused_counts", "sends_updates", "shortfall", "unfit"]

DILUTED = 16  # full steps of an epoch, beside which a last one may have fewer rows
PARTS = 5  # fewest steps behind an update, if a step has not all rows: two give the parts away
SIZES = (512, 256, 128, 64, 32, 16)  # batch sizes to name where the one of a run does not fit
MOST_BATCH = 1024  # the largest that a contract allows by default


def fewest_rows(sizes: Sequence[int]) -> int:
    """The rows of an epoch's smallest step; a small last one may stand beside many full ones.

    Beside few steps it is read off the update: the coordinator knows which rows are in which step.
    """
    return min(sizes[:-1] if len(sizes) > DILUTED else sizes)


def shortfall(sizes: Sequence[int], epochs: int, terms: Contract) -> str:
    """What is too little behind an update, by the rows of each step of an epoch; else empty."""
    steps = epochs * len(sizes)
    checks = [
        ("rows in a step", sizes[0], terms.step_rows),
        ("rows in the last step of an epoch", fewest_rows(sizes), terms.step_rows),
        ("steps behind an answer", steps, terms.steps),
    ]
    if len(sizes) > 1 and terms.steps > 1:
        checks.append(("steps on parts of the rows behind an answer", steps, PARTS))
    for what, count, least in checks:
        if count < least:
            return f"{count} {what}; the contract wants at least {least}"
    return ""


def sends_updates(method: str) -> bool:
    """Whether the clients of a method answer with updates of shared weights."""
    client = methods.load(method).client
    return any(marked(kinds(action)[1], Update) for action in actions(client).values())


def unfit(parts: Parts, client: str, terms: Contract) -> str:
    """Why this client's updates would be refused in training, with a remedy; else empty.

    It is known before the first round, by the rows of each stage, the batch size and the epochs.
    A method that adds rows to those of later stages is refused by its first stage alone.
    """
    options, method = parts.config.options(), methods.load(str(parts.config.method["name"]))
    setting = _batch_and_epochs(options, parts.scenario.clients.index(client))
    if setting is None or not sends_updates(str(parts.config.method["name"])):
        return ""
    merges = Architecture(parts.site(client).outline()).batch_statistics
    counts = {
        stage: len(holding.train) for stage, holding in enumerate(parts.scenario.holdings[client])
    }
    stages = [stage for stage, rows in counts.items() if rows]
    stages = stages[:1] if method.own_share else stages
    for stage in stages:
        reason = shortfall(_sizes(counts[stage], setting[0], merges), setting[1], terms)
        if reason:
            remedy = _remedy([counts[stage] for stage in stages], *setting, terms, merges)
            return f"{reason}, at stage {stage + 1} of {counts[stage]} rows{remedy}"
    return _diluted(method, options, list(counts.values()), terms) if method.own_share else ""


def _diluted(method: Method, options: Any, counts: list[int], terms: Contract) -> str:
    """In which later stage steps have too few own rows beside those that a method adds."""
    assert method.own_share is not None  # the caller has looked
    batch = options.batch
    for stage, rows in enumerate(counts):
        own = int(batch * method.own_share(options, rows, sum(counts[:stage]))) if rows else 0
        if rows and own < min(terms.step_rows, batch):
            what = f"{own} own rows in a step beside others; the contract wants at least"
            remedy = "a larger method.batch, or fewer rows beside them, fits here"
            return f"{what} {terms.step_rows}, at stage {stage + 1} of {rows} rows; {remedy}"
    return ""


def _remedy(counts: list[int], batch: int, epochs: int, terms: Contract, merges: bool) -> str:
    """A batch size and epochs that fit all stages: more epochs, or one step of all rows, or less.

    Nothing of it is tried beyond the batch sizes that a contract allows by default.
    """
    enough = max(epochs, terms.steps)
    sizes = [size for size in (batch, max(counts), *SIZES) if size <= MOST_BATCH]
    for size, times in [(batch, max(enough, PARTS)), *((size, enough) for size in sizes)]:
        if not any(shortfall(_sizes(rows, size, merges), times, terms) for rows in counts):
            return f"; method.batch = {size} with method.epochs = {times} fits here"
    return ""


def refused_counts(config: RunConfig, terms: Contract, most: int) -> list[tuple[int, int]]:
    """The ranges of row counts, up to `most`, with which a site's updates would be refused."""
    setting = _batch_and_epochs(config.options())
    if setting is None or not sends_updates(str(config.method["name"])):
        return []
    batch, epochs = setting
    ranges, last = list[tuple[int, int]](), -1
    for rows in range(terms.rows, most + 1):
        if not shortfall(_sizes(rows, batch), epochs, terms):
            continue
        if rows == last + 1:
            ranges[-1] = (ranges[-1][0], rows)
        else:
            ranges.append((rows, rows))
        last = rows
    return ranges


def _batch_and_epochs(options: Any, number: int = 0) -> tuple[int, int] | None:
    """The batch size and the epochs of a round of a client; None of a method without them."""
    each = getattr(options, "epochs_each", ())
    batch, epochs = getattr(options, "batch", None), getattr(options, "epochs", None)
    epochs = each[number] if number < len(each) else epochs
    return (batch, epochs) if type(batch) is int and type(epochs) is int else None


def _sizes(rows: int, batch: int, merges: bool = False) -> list[int]:
    """The rows of each step of an epoch; as in training, a last row alone may join the others."""
    full, rest = divmod(rows, batch)
    sizes = [batch] * full + [rest] * (rest > 0)
    return [*sizes[:-2], batch + 1] if merges and rest == 1 and full else sizes
