"""Outcomes of a run: for each site the outputs of several models on the same test rows.

They are computed at the data's location, stored in the run's folder, and never sent.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy import sparse

from atoll.core.errors import UserError
from atoll.core.federation import SERVER
from atoll.core.messages import Tensors
from atoll.core.rows import Rows
from atoll.data.scenario import Scenario
from atoll.jobs.train import in_chunks
from atoll.learning.weights import without
from atoll.metrics.answer import ALONE, GUESS, JOINED, POOLED, Outcome
from atoll.runs.alone import alone_parts, pooled_parts, train_parts
from atoll.runs.baselines import class_shares, classifiers, regressors
from atoll.runs.execute import OpenEngine
from atoll.runs.parts import Parts

__all__ = ["outcome_of", "outcomes", "own_tasks", "with_pooled", "with_variants", "without_classes"]

Array = np.ndarray[Any, Any]
_Predict = Callable[[Literal["test", "valid"], int], Array]  # rows of a part and task -> logits


def outcomes(
    parts: Parts,
    state: Tensors,
    variant: str,
    open_engine: OpenEngine,
    watch: Callable[[str], None] = lambda id: None,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Outcome]:
    """The outcomes of each site; `state` contains the final states of the run's parts.

    `watch` receives the id of each site before its training alone.
    """
    results = {}
    for id in parts.scenario.clients:
        watch(id)
        results[id] = outcome_of(id, parts, state, variant, open_engine, stopping)
    return results


def with_variants(
    results: Mapping[str, Outcome], parts: Parts, state: Tensors, variants: Sequence[str]
) -> dict[str, Outcome]:
    """Outcomes with the outputs of all variants of the method, for tables."""
    extended = {}
    for id, one in results.items():
        tasks, outputs = own_tasks(parts.scenario, id), {}
        for name in variants:
            predict = _predictor(parts, state, name, id)
            outputs[name] = np.concatenate([predict("test", task) for task in tasks])
        extended[id] = dataclasses.replace(one, variants=outputs)
    return extended


def outcome_of(
    id: str,
    parts: Parts,
    state: Tensors,
    variant: str,
    open_engine: OpenEngine,
    stopping: Callable[[], bool] = lambda: False,
) -> Outcome:
    """The outcome of one site; trains the site alone for the comparison."""
    joined = _predictor(parts, state, variant, id)
    one = alone_parts(parts, id)
    with tempfile.TemporaryDirectory(prefix="atoll-alone-") as folder:
        alone_state = train_parts(one, Path(folder), open_engine, stopping)
    alone = _predictor(one, alone_state, variant, id)
    tasks = own_tasks(parts.scenario, id)
    return _outcome(one, id, tasks, {JOINED: joined, ALONE: alone})


def own_tasks(scenario: Scenario, id: str) -> list[int]:
    """The tasks that evaluate a site: all known tasks at the end, or its own domain."""
    place, count = scenario.clients.index(id), len(scenario.clients)
    domains = 1 < count == len(scenario.tasks) and scenario.stages == 1
    if domains and not any(scenario.known_at):
        return [place]
    return scenario.tasks_at(scenario.stages - 1)


def _outcome(one: Parts, id: str, tasks: Sequence[int], networks: dict[str, _Predict]) -> Outcome:
    """The labels, and the outputs of networks and simple models."""
    scenario, classes = one.scenario, len(one.dataset.classes)
    outputs = {}
    for model, predict in networks.items():
        outputs[model] = np.concatenate([predict("test", task) for task in tasks])
    rows = np.concatenate([scenario.tests[id][task] for task in tasks])
    train = np.concatenate([holding.train for holding in scenario.holdings[id]])
    _, first = np.unique(train, return_index=True)  # a row can occur at several stages
    y = one.dataset.y[train[first]]
    site = one.site(id)
    learned = _inputs([site.train(stage) for stage in range(scenario.stages)], one)[first]
    tested = _inputs([site.test(task) for task in tasks], one)
    people = one.dataset.people
    groups = None if people is None else people[rows]
    if one.dataset.regression:
        simple = regressors(learned, y, tested)
        return dataclasses.replace(_of_numbers(one, rows, outputs, simple, y), groups=groups)
    excluded = np.isneginf(outputs[JOINED])
    models = {**outputs, GUESS: without_classes(class_shares(y, classes, len(rows)), excluded)}
    skipped = {}
    for name, result in classifiers(learned, y, tested, classes).items():
        if isinstance(result, str):
            skipped[name] = result
        else:
            models[name] = without_classes(result, excluded)
    valid = scenario.holdings[id][-1].valid
    chosen = {}
    if len(valid) and classes == 2:  # thresholds apply to two classes
        chosen = {model: predict("valid", tasks[-1]) for model, predict in networks.items()}
    return Outcome(
        *(rows, one.dataset.y[rows], models, len(first), skipped, one.dataset.y[valid], chosen),
        groups=groups,
    )


def with_pooled(
    results: Mapping[str, Outcome],
    parts: Parts,
    variant: str,
    open_engine: OpenEngine,
    stopping: Callable[[], bool],
) -> dict[str, Outcome]:
    """Outcomes with the outputs of a model trained on the rows of all sites."""
    pooled = pooled_parts(parts)
    with tempfile.TemporaryDirectory(prefix="atoll-pooled-") as folder:
        state = train_parts(pooled, Path(folder), open_engine, stopping)
    extended = {}
    for id, one in results.items():
        tests = {POOLED: parts.scenario.tests[id]}
        here = dataclasses.replace(pooled.scenario, tests=tests)
        predict = _predictor(Parts(pooled.config, pooled.dataset, here), state, variant, POOLED)
        tasks = own_tasks(parts.scenario, id)
        outputs = np.concatenate([predict("test", task) for task in tasks])
        extended[id] = dataclasses.replace(one, outputs={**one.outputs, POOLED: outputs})
    return extended


def _of_numbers(
    one: Parts, rows: Array, outputs: Mapping[str, Array], simple: Mapping[str, Any], y: Array
) -> Outcome:
    """The outcome of regression; `y` are the training labels that scale the margin."""
    models = {**outputs, **{n: z for n, z in simple.items() if not isinstance(z, str)}}
    skipped = {name: reason for name, reason in simple.items() if isinstance(reason, str)}
    deviation = float(y.std()) or 1.0
    return Outcome(rows, one.dataset.y[rows], models, len(y), skipped, deviation=deviation)


def without_classes(outputs: Array, excluded: Array) -> Array:
    """Outputs without the classes that the joined model excludes for a row's task.

    Otherwise a method that knows the task would be compared with models that do not.
    """
    masked = np.where(excluded, -np.inf, outputs)
    nothing = np.isneginf(masked).all(1)
    masked[nothing] = np.where(excluded[nothing], -np.inf, 0.0)
    return masked


def _inputs(several: Sequence[Rows], parts: Parts) -> Any:
    """Rows as a matrix: columns, pixels, or word counts of texts."""
    if parts.dataset.kind != "text":
        whole = torch.cat([rows.all.flatten(1) for rows in several])
        return np.nan_to_num(whole.cpu().numpy().astype(np.float64))
    tokens = torch.cat([rows.x for rows in several]).cpu().numpy()
    place = np.repeat(np.arange(len(tokens)), tokens.shape[1])
    width = max(len(parts.dataset.words), int(parts.dataset.x.max()) + 1)
    ones = np.ones(tokens.size)
    counts = sparse.coo_array((ones, (place, tokens.ravel())), (len(tokens), width)).tocsr()
    return counts[:, 1:]  # 0 is the padding token


def _predictor(parts: Parts, state: Tensors, variant: str, id: str) -> _Predict:
    """A function that returns the logits of a site's test or validation rows of a task.

    It uses the site's final model, or the models of all parties if the network is split.
    """
    where = parts.site(id).device
    shared = {name: tensor.to(where) for name, tensor in without("server", state).items()}
    vertical = parts.scenario.labels_at_server
    ids = parts.scenario.clients if vertical else (id,)
    sites = {one: parts.site(one) for one in ids}
    clients = {one: _restored(parts.client(one), f"client/{one}", state, where) for one in ids}
    server = _restored(parts.server(), "server", state, where) if vertical else None

    @torch.no_grad()
    def predict(part: Literal["test", "valid"], task: int) -> Array:
        halves = {}
        for one, site in sites.items():
            model = clients[one].final_model(shared, variant, task)
            rows = site.test(task) if part == "test" else site.valid(parts.scenario.stages - 1)
            halves[one] = in_chunks(partial(clients[one].predict, model), rows)
        logits = halves[id]
        if server is not None:
            logits = server.predict(server.final_model(shared, variant, task), halves)
        if parts.dataset.regression:
            logits = parts.site(SERVER if vertical else id).target.restore(logits)
        return np.asarray(logits.double().cpu().numpy())

    return predict


def _restored(part: Any, prefix: str, state: Tensors, where: torch.device) -> Any:
    """A client or the server in its final state."""
    if not hasattr(part, "predict"):
        what = "the method has no model to predict with"
        raise UserError(what, "answer", "its client needs final_model and predict")
    mine = {name: tensor.to(where) for name, tensor in without(prefix, state).items()}
    if mine:
        part.restore(mine)
    elif part.state():
        what = f"the model of '{prefix}' is not in the run's folder"
        raise UserError(what, "answer", "it stayed at its site")
    return part
