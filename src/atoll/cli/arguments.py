"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Answer", "AsJson", "Config", "Device", "Folder", "GpusPerBlock", "Kits", "On",
    "PointsPerBlock", "Project", "Quiet", "Resume", "Set", "SharedFolder", "Verbose",
]  # fmt: skip

Config = Annotated[
    str, typer.Argument(help="a preset, a method, or a .toml file", metavar="CONFIG")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="e.g. data=covertype or method.rate=0.01"),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Folder = Annotated[
    Path | None, typer.Option("--out", help="the run's folder; default: runs/NAME-N")
]
Resume = Annotated[bool, typer.Option("--resume", help="continue an interrupted run")]
AsJson = Annotated[bool, typer.Option("--json", help="print only the result, as JSON")]
Answer = Annotated[
    bool, typer.Option("--answer/--no-answer", help="compare with each site alone at the end")
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="print only the result")]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="also print every round and how jobs were computed")
]
Project = Annotated[Path, typer.Argument(help="the project's file, .toml")]
Kits = Annotated[Path, typer.Option("--out", help="the folder of the kits")]
On = Annotated[str, typer.Option("--on", help="a Ray cluster: ray, or ray://HOST:PORT")]
GpusPerBlock = Annotated[
    float | None,
    typer.Option(help="with --on: GPUs of a block, e.g. 1 or 0.5; default 1 where there are any"),
]
PointsPerBlock = Annotated[
    int,
    typer.Option(help="with --on: maximum points per block (0: chosen from the cluster's size)"),
]
SharedFolder = Annotated[
    bool,
    typer.Option(
        "--shared-folder/--no-shared-folder",
        help="with --on: nodes write into the folder where they see it, or always send",
    ),
]
