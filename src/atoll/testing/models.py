"""Rules about final models: they predict, are exported, and are compared with training alone."""

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load

from atoll.core.federation import SERVER
from atoll.core.record import Score
from atoll.engines.local import local_engine
from atoll.jobs.train import in_chunks, scored
from atoll.metrics.answer import ALONE, JOINED, Outcome, metric_of, models_of
from atoll.metrics.answer import answer as answered
from atoll.runs.alone import alone_parts, train_parts
from atoll.runs.config import RunConfig
from atoll.runs.outcomes import outcomes, own_tasks
from atoll.runs.parts import Parts, parts
from atoll.runs.predict import onnx
from atoll.runs.predict.export import export
from atoll.runs.predict.model import Predictor, ended_state
from atoll.runs.predict.parties import Halves
from atoll.runs.result import Run
from atoll.testing.rules import require, skip_without_predict
from atoll.testing.samples import Case, run

__all__ = [
    "every_site_has_an_outcome",
    "exports_its_models",
    "one_site_alone_gains_nothing",
    "predicts_its_scores",
]


def _config(case: Case) -> RunConfig:
    return case.config(**({"stages": 2} if case.split == "tasks" else {}))


def predicts_its_scores(case: Case, folder: Path) -> None:
    """(k) Final models predict the scores of the record."""
    skip_without_predict(case)
    config = _config(case)
    run(config, folder)
    run_parts, scores = parts(config), Run(folder).scores
    end = [s for s in scores if (s.stage, s.round) == (scores[-1].stage, scores[-1].round)]
    tested = {score.client for score in end}
    complete = tested >= {*run_parts.scenario.clients} or SERVER in tested
    require(case, complete, "not every client has a score at the end")
    for score in end:
        logits, labels = _predicted(folder, run_parts, score)
        target = run_parts.site(score.client).target
        unit = float(target.deviation) if run_parts.dataset.regression else 1.0
        again = scored({"": logits}, labels, unit)
        same = (again.rows, again.correct.get("", 0)) == (score.rows, score.correct)
        same &= again.macro_f1.get("", 0.0) == score.macro_f1
        same &= again.errors.get("", {}) == score.errors
        words = f"predictions of {score.client} do not have its score: check final_model, predict"
        require(case, same, words)


def _predicted(folder: Path, run_parts: Parts, score: Score) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the final model on the test rows of a score, and the labels."""
    task = run_parts.scenario.tasks[score.task]
    tested = {
        id: run_parts.site(id).test(score.task)
        for id in [*run_parts.scenario.clients, score.client]
    }
    if score.client == SERVER:
        labels = tested.pop(SERVER).y
        return Halves(folder, score.variant).logits(tested), labels
    predictor = Predictor(folder, score.client, score.variant, task)
    with torch.no_grad():
        return in_chunks(predictor.outputs, tested[score.client]), tested[score.client].y


def exports_its_models(case: Case, folder: Path) -> None:
    """(k) Final models are exported with a card; as ONNX too where it is installed."""
    skip_without_predict(case)
    config = _config(case)
    run(config, folder / "run")
    run_parts, last = parts(config), Run(folder / "run").scores[-1]
    for id in {run_parts.scenario.clients[0], last.client}:
        predictor = Predictor(folder / "run", id)
        home = export(predictor, folder / id, "nothing")
        weights = load((home / "model.safetensors").read_bytes())
        same = weights.keys() >= predictor.model.keys()  # frozen layers are exported, too
        same = same and all(torch.equal(weights[n], t) for n, t in predictor.model.items())
        require(case, same, f"the exported model of {id} has other weights")
        card = json.loads((home / "card.json").read_text())
        same = (card["site"], card["classes"]) == (id, list(run_parts.dataset.classes))
        require(case, same, f"the card of {id} has another site or other classes")
        if all(importlib.util.find_spec(package) for package in onnx.NEEDED):
            onnx.write(predictor, home / "model.onnx")  # refuses a graph with other outputs


def one_site_alone_gains_nothing(case: Case, folder: Path) -> None:
    """(k) In a federation of one site, joining and training alone are equal to the last bit."""
    skip_without_predict(case)
    whole = parts(_config(case))
    one = alone_parts(whole, whole.scenario.clients[-1])
    state = train_parts(one, folder / "one", local_engine, lambda: False)
    results = outcomes(one, state, Run(folder / "one").headline, local_engine)
    for id, outcome in results.items():
        joined = outcome.outputs[JOINED]
        require(case, bool(np.isfinite(joined).any(1).all()), f"{id} has rows without a prediction")
        same = np.array_equal(joined, outcome.outputs[ALONE])
        require(case, same, f"alone, {id} differs from a federation of itself: name streams by it")
    metric = metric_of("accuracy", whole.dataset.regression)
    body = answered({id: [outcome] for id, outcome in results.items()}, metric)
    require(case, body["overall"]["gain"]["gain"] == 0, "a federation of one site has a gain")


def every_site_has_an_outcome(case: Case, folder: Path) -> None:
    """(k) The joined model of every site has its score, beside those of the baselines."""
    skip_without_predict(case)
    config = case.config()
    run(config, folder / "run")
    run_parts, record = parts(config), Run(folder / "run")
    results = outcomes(run_parts, ended_state(record.folder), record.headline, local_engine)
    require(
        case, list(results) == list(run_parts.scenario.clients), "not every site has an outcome"
    )
    last = {(s.client, s.task): s for s in record.scores if s.variant == record.headline}
    for id, outcome in results.items():
        tasks = own_tasks(run_parts.scenario, id)
        whose = id if (id, tasks[0]) in last else SERVER
        same = _has_score(outcome, [last[whose, task] for task in tasks])
        require(case, same, f"the joined model of {id} does not have the score of the record")
        complete = {*models_of(record.metric)[:4]} <= outcome.outputs.keys()
        require(case, complete, f"{id} lacks a baseline: {sorted(outcome.outputs)}")
        shape = (len(outcome.rows), len(run_parts.dataset.classes))
        same = all(values.shape == shape for values in outcome.outputs.values())
        require(case, same, f"outputs of {id} do not have one value per row and class")


def _has_score(outcome: Outcome, scores: Sequence[Score]) -> bool:
    """Whether the joined model has these scores on its rows; squared errors have four digits."""
    joined = outcome.outputs[JOINED]
    if not scores[0].errors:
        return int((joined.argmax(1) == outcome.y).sum()) == sum(s.correct for s in scores)
    recorded = sum(score.rows * score.errors["mse"] for score in scores)
    return math.isclose(float(((joined[:, 0] - outcome.y) ** 2).sum()), recorded, rel_tol=1e-3)
