"""Faults of the released code of FedSeIT, each alone or all at once.

A run names one of REPLACEMENTS: replace = "atoll.reproduce.faults.fedseit:released". A fault of a
part that the run's options leave out changes nothing. J2 to J23 are numbers of the specification.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.federation import Moment
from atoll.core.method import Method
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.learning.decomposed import Plan, penalty, row_losses
from atoll.learning.image_nets import LeNet
from atoll.learning.task_weights import ALIGNS, Layout
from atoll.learning.textcnn import TextCNN, Words
from atoll.methods.fedseit import Options, Rules

__all__ = ["FAULTS", "METHODS", "REPLACEMENTS", "Fault", "brought_back"]

METHODS = ("fedseit",)  # whose parts are replaced
Shape = tuple[int, ...]
Names = Callable[[Sequence[str]], Iterable[str]]  # names of all weights -> some of them


def _unmoved(names: Names, banks: bool, rules: Rules) -> Rules:
    """Rules by which these weights do not move; `banks`: only where foreign filters are banks."""

    def moves(every: Sequence[str], options: Options, task: int) -> tuple[str, ...]:
        moving = rules.moves(every, options, task)
        still = set(names(every)) if options.combine == "banks" or not banks else set()
        return tuple(name for name in moving if name not in still)

    return replace(rules, moves=moves)


def _masks(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith("now/mask/")]


def _head(names: Sequence[str]) -> list[str]:
    return ["now/dense/head", "now/bias/head"]


def _attention(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith("now/alpha/conv")]


def _projections(names: Sequence[str]) -> list[str]:
    """All private projections that align but the first."""
    private = [layer for layer in ALIGNS[1:] if f"now/dense/{layer}" in names]
    return [f"now/{kind}/{layer}" for kind in ("dense", "bias") for layer in private]


def _zeros(words: Words, x: Tensor, banks: Sequence[Tensor]) -> Tensor:
    """The responses of foreign filters that are zeros."""
    return banks[0].new_zeros((len(x), 2 * sum(bank.shape[0] * bank.shape[1] for bank in banks)))


def _first_rows(rows: Rows, valid: int, options: Options) -> Rows:
    """Rows by class, and only as many whole batches as the validation rows fill."""
    count = -(-valid // options.batch) * options.batch
    return rows.at(torch.argsort(rows.y, stable=True)[:count])


def _past(rules: Rules) -> Rules:
    def moves(every: Sequence[str], options: Options, task: int) -> tuple[str, ...]:
        masks = [name for name in every if name.startswith("past/mask/")]
        return tuple(sorted([*rules.moves(every, options, task), *masks]))

    return replace(rules, moves=moves)


def _dls(rules: Rules) -> Rules:
    def layout(options: Options, model: TextCNN | LeNet, clients: int) -> Layout:
        plain = rules.layout(options, model, clients)
        if not options.dls:
            return plain
        merge = (plain.width, plain.width * (1 + plain.slots))
        shapes: Mapping[str, Shape] = {**model.layers, "merge": merge}
        return replace(plain, shapes=shapes, layers=tuple(shapes))

    return replace(rules, layout=layout)


def row_objectives(weights: Mapping[str, Tensor], batch: Rows, *, plan: Plan) -> Tensor:
    """The loss of each row with the penalty added to it: (..., rows)."""
    each = row_losses(weights, batch, plan=plan)
    return each + penalty(weights, plan, each.dim() - 1).unsqueeze(-1)


def _same_draws(site: Site, task: int, name: str, shape: Shape) -> Stream:
    return Stream.of(0, "released", *shape)


def _one_order(site: Site, moment: Moment, epoch: int) -> Stream:
    return site.stream("fit", moment.stage)


def _weighted(options: Options) -> Options:
    if options.channel_sparse:
        remedy = "set channel_sparse = 0, or name a replacement without the fault 'weighting'"
        raise UserError("channel_sparse has no weighted mean", "replace", remedy)
    return replace(options, weighting="rows")


@dataclass(frozen=True)
class Fault:
    """How a fault changes the method's rules and options."""

    rules: Callable[[Rules], Rules] = lambda rules: rules
    options: Callable[[Options], Options] = lambda options: options


FAULTS: dict[str, Fault] = {
    # J2: masks do not learn
    "masks": Fault(partial(_unmoved, _masks, False)),
    # J3: nor does the head
    "head": Fault(partial(_unmoved, _head, False)),
    # J4, banks: foreign filters are zeros, and alpha does not learn
    "foreign": Fault(lambda rules: replace(_unmoved(_attention, True, rules), features=_zeros)),
    # J5, banks: of three private projections that align, one learns
    "projections": Fault(partial(_unmoved, _projections, False)),
    # J6: of the test rows by class, the first few count
    "tests": Fault(lambda rules: replace(rules, tested=_first_rows)),
    # J7: the mean is weighted by rows
    "weighting": Fault(options=_weighted),
    # J9: masks of past tasks learn too
    "past": Fault(_past),
    # J11, sit: cosines up to 0.7 count as zero
    "similarity": Fault(options=lambda options: replace(options, similarity="rectified")),
    # J12, dls: one layer on all that filters find, no projections that align
    "dls": Fault(_dls),
    # J13, banks or dense: lambda1 pulls private projections to zero
    "sparse": Fault(lambda rules: replace(rules, sparse_private=("align3", "merge"))),
    # J19: penalties count on validation rows, and Adam begins anew at a cut
    "stop": Fault(
        lambda rules: replace(rules, valid_loss=row_objectives, unread=(), fresh_moments=True)
    ),
    # J20: tensors of equal shape begin with equal values
    "draws": Fault(lambda rules: replace(rules, stream=_same_draws)),
    # J23: the order of rows is drawn once for a task
    "order": Fault(lambda rules: replace(rules, order=_one_order)),
}


def brought_back(method: Method, names: Iterable[str]) -> Method:
    """The method with these faults."""
    faults = [FAULTS[name] for name in names]
    rules = Rules()
    for fault in faults:
        rules = fault.rules(rules)

    def faulty(build: Callable[..., Any], options: Options, site: Site) -> Any:
        for fault in faults:
            options = fault.options(options)
        return build(options, site, rules)

    parts = {"client": partial(faulty, method.client), "server": partial(faulty, method.server)}
    return replace(method, **parts)  # type: ignore[arg-type]


REPLACEMENTS: dict[str, Callable[[Method], Method]] = {
    **{name: partial(brought_back, names=(name,)) for name in FAULTS},
    "released": partial(brought_back, names=tuple(FAULTS)),  # as the authors' code behaves
    "all_but_tests": partial(brought_back, names=tuple(n for n in FAULTS if n != "tests")),
}
