"""Print one digest for each library whose arithmetic depends on the CPU, as JSON.

The runner starts this under every setting: two settings with equal digests test the same thing.
"""

import hashlib
import json
import math
import os
import sys

import numpy as np
import torch
from torch import Tensor


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draws that are the same on every CPU: integers, divided, which IEEE 754 rounds in one way."""
    drawn = np.random.default_rng(seed).integers(-(2**20), 2**20, size=shape)
    return torch.from_numpy(drawn / 3.0e5).to(dtype)


def digest(*results: Tensor) -> str:
    """Eight hexadecimal digits of the results' bits."""
    state = hashlib.sha256()
    for result in results:
        state.update(result.contiguous().numpy().tobytes())
    return state.hexdigest()[:8]


def digests() -> dict[str, str]:
    """MKL by products, ATen by reductions, oneDNN by a convolution, OpenBLAS by NumPy."""
    rows, columns = noise(1, 371, 91), noise(2, 91, 53)
    images, kernels = (noise(3, 8, 3, 28, 28), noise(4, 8, 3, 5, 5))
    return {
        "mkl": digest(rows @ columns, rows.float() @ columns.float(), torch.linalg.qr(rows)[0]),
        "aten": digest(rows.log_softmax(1), rows.float().log_softmax(1), noise(5, 400_000).sum()),
        "onednn": digest(torch.nn.functional.conv2d(images.float(), kernels.float())),
        "libm": digest(torch.from_numpy(np.array([math.exp(n / 7) for n in range(2000)]))),
        "numpy": digest(torch.from_numpy(rows.numpy() @ columns.numpy())),
    }


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("ATOLL_TEST_THREADS", "1")))
    json.dump(digests(), sys.stdout)
