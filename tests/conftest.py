"""One thread for all tests: equal runs are then equal bit for bit, and small ones quicker.

`make numerics` sets ATOLL_TEST_THREADS=2 for one of its settings.

A cache of their own, so that no choice made before has a say.
"""

import os
import tempfile

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(int(os.environ.get("ATOLL_TEST_THREADS", "1")))
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and the command honours it
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="atoll-tests-")

# The same examples on every machine; ATOLL_EXAMPLES=new looks for others.
settings.register_profile("same", derandomize=True, deadline=None)
if os.environ.get("ATOLL_EXAMPLES") != "new":
    settings.load_profile("same")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests for a GPU are skipped where there is none, unless Triton is told to stand in."""
    stands_in = os.environ.get("TRITON_INTERPRET") == "1"
    if item.get_closest_marker("gpu") and not (torch.cuda.is_available() or stands_in):
        pytest.skip("needs a GPU")
