"""Zip archives of pictures as their authors give them, read without unpacking them."""

import io
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.data.own.images import ENDINGS, Shape, picture
from atoll.data.sources.fetch import reading, refused

__all__ = ["Pictures", "labelled", "pictures", "text"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Pictures:
    """Pictures of an archive by what their paths say: which part, which class, which file."""

    parts: tuple[str, ...]
    labels: tuple[str, ...]
    members: tuple[str, ...]

    def of(self, part: str) -> list[str]:
        """The classes of a part's pictures, in their order."""
        return [label for p, label in zip(self.parts, self.labels, strict=True) if p == part]


def labelled(path: Path, pattern: str) -> Pictures:
    """The pictures whose paths match a pattern with the groups part, label and file.

    Sorted by these; a picture that an archive holds twice, in folders beside each other, is taken
    once.
    """
    members: dict[tuple[str, str, str], str] = {}
    with reading(path), zipfile.ZipFile(path) as archive:
        for member in sorted(archive.namelist(), key=lambda name: (name.count("/"), name)):
            match = re.search(pattern, member)
            hidden = "__MACOSX" in member or member.rsplit("/", 1)[-1].startswith(".")
            if match and not hidden and member.lower().endswith(ENDINGS):
                members.setdefault((match["part"], match["label"], match["file"]), member)
    if not members:
        raise refused(path, "holds no pictures in the folders that it should have")
    keys = sorted(members)
    return Pictures(
        tuple(k[0] for k in keys), tuple(k[1] for k in keys), tuple(members[k] for k in keys)
    )


def pictures(path: Path, members: Sequence[str], shape: Shape) -> Array:
    """These pictures of an archive, scaled: (rows, channels, height, width) uint8."""
    images = np.empty((len(members), *shape), dtype=np.uint8)
    with reading(path), zipfile.ZipFile(path) as archive:
        for number, member in enumerate(members):
            content = archive.read(member)
            images[number] = picture(path / member, lambda c=content: io.BytesIO(c), shape)[0]  # type: ignore[misc]
    return images


def text(path: Path, end: str) -> str:
    """The text file of an archive whose path ends like this."""
    with reading(path), zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(end)]
        if not names:
            raise refused(path, f"holds no file {end}")
        return archive.read(names[0]).decode()
