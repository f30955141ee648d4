"""The command that compares methods against forgetting."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.arguments import Device, GpusPerBlock, On
from atoll.cli.console import err, out
from atoll.core.errors import UserError
from atoll.core.options import build
from atoll.core.record import write_whole
from atoll.runs.config import assignment

__all__ = ["register"]


def fcl_command(
    to: Annotated[
        Path, typer.Option("--out", help="folder of the measurements; the page is beside it, .md")
    ] = Path("benchmark"),
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help='how much, e.g. seeds=3 or data=["mnist"]'),
    ] = None,
    device: Device = "auto",
    minutes: Annotated[
        float, typer.Option(help="stop in time; the next call goes on; 0: no limit", min=0)
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="a miniature on digits")] = False,
    render: Annotated[
        bool, typer.Option("--render", help="run nothing: write the page of what is measured")
    ] = False,
    on: On = "",
    gpus_per_block: GpusPerBlock = None,
) -> None:
    """Tune and measure methods against forgetting at equal cost, and write a page about it."""
    from atoll.benchmark.measure import Clock, Ledger, names  # noqa: PLC0415 - torch, matplotlib
    from atoll.benchmark.protocol import QUICK, Plan  # noqa: PLC0415
    from atoll.cli.cluster import on_cluster  # noqa: PLC0415

    if on and render:
        raise UserError("--render does not run on a cluster", "--render", "leave --on out")
    if not render:
        base = QUICK if quick else Plan()
        changes = dict(assignment(text) for text in set_ or [])
        plan = replace(base, **{k: getattr(build(Plan, changes, "--set"), k) for k in changes})
        names(plan)
        clock, whole = Clock(minutes), True
        with on_cluster(on, gpus_per_block, count_steps=True) as sweeper:
            for name in plan.data:
                ledger = Ledger.open(to / f"{name}.json", name, plan)
                whole = whole and ledger.measure(device, clock, err.print, sweeper)
        if not whole:
            err.print("time is over: start the same command again to go on")
            return
    _write(to)


def _write(to: Path) -> None:
    """Write the page and its figure from the files of a folder."""
    from atoll.benchmark.figure import figure  # noqa: PLC0415
    from atoll.benchmark.measure import Ledger  # noqa: PLC0415
    from atoll.benchmark.page import page  # noqa: PLC0415

    ledgers = [Ledger.read(path) for path in sorted(to.glob("*.json"))]
    if not ledgers:
        raise UserError("nothing is measured", str(to), "run atoll bench fcl first")
    write_whole(to / "figure.svg", figure(ledgers))
    target = to.with_name(f"{to.name}.md")
    write_whole(target, page(ledgers, f"{to.name}/figure.svg").encode())
    out.print(f"the page is {target}", soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    own = typer.Typer(no_args_is_help=True, help="Compare methods against forgetting.")
    own.command("fcl")(fcl_command)
    app.add_typer(own, name="bench")
