"""Commands on finished runs: answer, report, watch, predict, export."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.arguments import AsJson, Quiet
from atoll.cli.console import err, out
from atoll.cli.terminal import compute_answer, print_answer
from atoll.core.errors import UserError
from atoll.data.own import alignment
from atoll.runs.predict import images, onnx, parties, tables, texts
from atoll.runs.predict.export import export, has_means
from atoll.runs.predict.model import Predictor, predictor_of
from atoll.runs.predict.output import Predicted
from atoll.runs.result import Run, absent_run, runs_in

__all__ = ["register"]

Model = Annotated[str, typer.Option(help="a variant; default: the method's headline variant")]
Task = Annotated[str, typer.Option(help="the task, if each has a model; default: the last")]
Seed = Annotated[int | None, typer.Option(help="the model of this seed, for a folder of seeds")]
PREDICT = {"table": tables.predict, "image": images.predict, "text": texts.predict}


def report_command(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs", metavar="RUN")],
    to: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="the page; default: report.html in the run's folder"),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="a folder for the figures as SVG files")
    ] = None,
) -> None:
    """Write one HTML page about one or several runs."""
    from atoll.report import page  # noqa: PLC0415 - matplotlib takes a second to import

    home = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    out.print(f"the report is in {page.write(runs, to or home, figures)}", soft_wrap=True)


def answer_command(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs", metavar="RUN")],
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Decide whether joining helps, site by site."""
    for folder in runs:
        folders = runs_in(folder)
        if not folders:
            raise absent_run(folder)
        answer = compute_answer(folders, quiet or as_json)
        if as_json:
            print(json.dumps(answer, allow_nan=False))
        else:
            print_answer(answer)


def watch_command(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs", metavar="RUN")],
    port: Annotated[int, typer.Option(help="the port; 0: any free port")] = 8200,
) -> None:
    """Serve a live report of running runs to this machine alone."""
    from atoll.report import watch  # noqa: PLC0415 - matplotlib takes a second to import

    def ready(address: str) -> None:
        out.print(f"watching at {address} until Ctrl-C", soft_wrap=True)
        sys.stdout.flush()

    watch.serve(watch.Watch(runs), port, ready)


def predict_command(
    run: Annotated[
        Path,
        typer.Argument(help="a run, or a folder of seeds (predicts their mean)", metavar="RUN"),
    ],
    file: Annotated[
        Path | None,
        typer.Argument(help="rows or texts: CSV or Parquet; images: a folder, .npz or Parquet"),
    ] = None,
    site: Annotated[str, typer.Option(help="the site whose model predicts")] = "",
    to: Annotated[Path, typer.Option("-o", "--out", help="the predictions")] = Path(
        "predictions.csv"
    ),
    model: Model = "",
    task: Task = "",
    held_out: Annotated[bool, typer.Option("--held-out", help="only the run's test rows")] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="parties: one file each, in their order or as PARTY=FILE"
        ),
    ] = None,
    seed: Seed = None,
    lacking: Annotated[
        str, typer.Option(help="parties: drop ids that one party lacks, or fill their columns")
    ] = "drop",
) -> None:
    """Predict rows, images or texts with the model of one site, or with a file of each party."""
    predictor = predictor_of(run, site, model, task, seed)
    _refuse_seeds(predictor, "--held-out" if held_out else "")
    if data:
        result = _predict_parties(predictor, file, data, lacking, to, held_out)
    elif file is None or not site:
        what = "missing FILE" if file is None else "missing --site: choose whose model to use"
        remedy = "give FILE --site SITE; where parties hold columns, --data for each party"
        raise UserError(what, "atoll predict", remedy)
    else:
        result = PREDICT[predictor.kind](predictor, file, to, held_out)
    _remark(result)
    out.print(f"{result.rows:,} predictions in {to}{_share(result)}", soft_wrap=True)


def _refuse_seeds(predictor: Predictor, option: str) -> None:
    """Refuse an option that is for one run where the folder has several seeds."""
    if predictor.others and option:
        what = f"the folder has runs of {len(predictor.others) + 1} seeds"
        remedy = f"choose one, for example --seed {predictor.config.seed}"
        raise UserError(what, option, remedy)


def _remark(result: Predicted) -> None:
    """Say what was odd in a file."""
    for name in result.absent:
        err.print(f"the file has no column '{name}': taken as missing", soft_wrap=True)
    for name, count in result.unseen.items():
        err.print(f"{count} values of '{name}' were never seen: taken as unknown", soft_wrap=True)
    if result.unlabelled:
        err.print(f"{result.unlabelled:,} have no label: neither right nor wrong", soft_wrap=True)
    if result.foreign:
        why = "a label that is no class of the model: neither right nor wrong"
        err.print(f"{result.foreign:,} have {why}", soft_wrap=True)


def _share(result: Predicted) -> str:
    """How many were right, of those whose label is known; in regression how far off they were."""
    if result.right is None and not result.judged:
        return ""
    whom = "them" if result.judged == result.rows else f"the {result.judged:,} with a known label"
    if result.right is None:
        errors = result.absolute / result.judged, result.squared / result.judged
        return f", MAE {errors[0]:.4g} and MSE {errors[1]:.4g} of {whom}"
    return f", {result.right / result.judged:.4f} of {whom} right"


def _predict_parties(
    predictor: Predictor, file: Path | None, data: list[str], lacking: str, to: Path, held_out: bool
) -> Predicted:
    if file is not None or "parties" not in predictor.recipe:
        remedy = "give FILE --site SITE; --data is for parties that hold columns of the same rows"
        raise UserError("--data does not fit", str(file or predictor.folder), remedy)
    if lacking not in ("drop", "fill"):
        raise UserError(f"unknown way '{lacking}'", "--lacking", "use drop or fill")
    treatment: parties.Lacking = "fill" if lacking == "fill" else "drop"
    result = parties.predict(predictor, data, to, treatment, held_out)
    became = "left out" if treatment == "drop" else "its columns taken as missing"
    for name, ids in result.lacking.items():
        listed = ", ".join(ids[: alignment.SHOWN]) + (", ..." if len(ids) > alignment.SHOWN else "")
        err.print(f"{len(ids):,} ids are not in {name}, {became}: {listed}", soft_wrap=True)
    return result


def export_command(
    run: Annotated[Path, typer.Argument(help="a run, or a folder of its seeds", metavar="RUN")],
    site: Annotated[str, typer.Option(help="the site; server: its half of a split network")],
    to: Annotated[Path | None, typer.Option("-o", "--out", help="a folder")] = None,
    model: Model = "",
    task: Task = "",
    seed: Seed = None,
    with_onnx: Annotated[
        bool, typer.Option("--onnx", help="also write ONNX; needs the extra onnx")
    ] = False,
) -> None:
    """Write one site's model as safetensors with a card in JSON."""
    from atoll.report.departures import departures  # noqa: PLC0415

    predictor = predictor_of(run, site, model, task, seed)
    _refuse_seeds(predictor, "atoll export")
    chosen = predictor.site  # refuses a folder without a run, and an unknown site
    sentences = {one.client: one.sentence for one in departures(Run(predictor.folder))}
    place = to or predictor.folder / f"export-{site}"
    home = export(predictor, place, sentences.get(chosen, "nothing"))
    if with_onnx:
        onnx.write(predictor, home / "model.onnx")
    out.print(f"the model and its card are in {home}", soft_wrap=True)
    if has_means(predictor):
        whose = "all sites'" if predictor.config.scale == "global" else "this site's"
        have, it = ("and model.onnx have", "them") if with_onnx else ("has", "it")
        what = f"card.json {have} means of {whose} training rows: pass {it} on only if you may"
        out.print(what, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("answer")(answer_command)
    app.command("report")(report_command)
    app.command("watch")(watch_command)
    app.command("predict")(predict_command)
    app.command("export")(export_command)
