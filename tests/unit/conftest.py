"""The command, as its tests call it."""

import sys
from collections.abc import Callable

import pytest

from atoll import cli


@pytest.fixture(scope="session")
def call() -> Callable[..., int]:
    """Calls the command with these words; its exit code."""

    def called(*words: str) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["atoll", *words])
            try:
                cli.main()
            except SystemExit as ended:
                return int(ended.code or 0)
        return 0

    return called
