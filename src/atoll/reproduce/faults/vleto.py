"""The test of the published code of V-LETO, which reads the true labels (J1); for diagnosis only.

A run names it: replace = "atoll.reproduce.faults.vleto:label_oracle". Columns come by stage and
each client trains by itself (protocol P1). The embedding of a test row is mixed with the prototype
of its true label, so accuracies come close to 1. Every score is marked `label_oracle`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.federation import Clients, Moment
from atoll.core.messages import Tensors
from atoll.core.method import Method
from atoll.core.record import Score
from atoll.data.site import Site
from atoll.families import vertical
from atoll.methods.vleto import Options, Server

__all__ = ["METHODS", "REPLACEMENTS", "predicted"]

METHODS = ("vleto",)  # whose parts are replaced


@torch.no_grad()
def predicted(server: Server, clients: Clients, moment: Moment, task: int) -> tuple[Tensor, Tensor]:
    """Logits of embeddings that are mixed with the prototype of the label; at first with none."""
    y = server.site.test(task).y
    parts = server.head.embedded(clients, server.site.parties(moment.stage), "test", task)
    joint = list(parts.values())[-1]
    if moment.stage:
        joint = 0.5 * joint + 0.5 * moment.stage * server.means[y]
    return server.head.logits(joint), y


def _evaluate(server: Server, clients: Clients, moment: Moment) -> list[Score]:
    predictions = {task: predicted(server, clients, moment, task) for task in clients.tasks}
    return vertical.scores(moment, predictions, None, "label_oracle")


def _refuse(model: Tensors, parts: Tensors) -> NoReturn:
    remedy = "run it again without the replacement"
    raise UserError("label_oracle reads labels, which new rows lack", "replace", remedy)


def label_oracle(method: Method) -> Method:
    """The method whose test reads the true labels."""

    def server(options: Options, site: Site) -> Any:
        built = method.server(options, site)
        if not built.head.alone:
            remedy = "set scenario.mode = 'columns' and protocol = 'P1', or leave it out"
            raise UserError("label_oracle is for columns by stage", "replace", remedy)
        built.evaluate = partial(_evaluate, built)
        built.predict = _refuse
        return built

    return replace(method, server=server)


REPLACEMENTS: dict[str, Callable[[Method], Method]] = {"label_oracle": label_oracle}
