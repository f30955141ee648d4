"""Emulated CPUs: environments that make the numerical libraries take another CPU's kernels.

ATen, oneDNN, OpenBLAS, NumPy and glibc choose kernels by variables. MKL asks for the CPU's maker
first; a small library that is loaded before it (`mkl_vendor.c`) answers in its place.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

__all__ = ["QUICK", "SETTINGS", "Setting", "environment", "obstacle", "vendor_library"]

Vendor = Literal["amd", "intel", ""]  # empty: MKL takes the kernels that are common to all CPUs
SOURCE = Path(__file__).with_name("mkl_vendor.c")
ONEDNN = {"sse": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}
ATEN = {"sse": "default", "avx2": "avx2", "avx512": "avx512"}
OPENBLAS = {
    "sse": "Prescott",
    "avx2": "Haswell",
    "avx512": "SkylakeX",
}
OWN = (
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)


@dataclass(frozen=True)
class Setting:
    """One emulated CPU."""

    vendor: Vendor
    instructions: Literal["sse", "avx2", "avx512"]
    threads: int = 1


SETTINGS: Mapping[str, Setting] = {
    "oldest": Setting("", "sse"),
    "intel-avx2": Setting("intel", "avx2"),
    "two-threads": Setting("amd", "avx2", threads=2),
    "amd-avx2": Setting("amd", "avx2"),
    "amd-avx512": Setting("amd", "avx512"),
    "intel-avx512": Setting("intel", "avx512"),
}
QUICK = ("oldest", "intel-avx2", "two-threads")


def vendor_library(vendor: Vendor, folder: Path) -> Path | None:
    """Compile the library that answers for a vendor; None where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    target = folder / f"libvendor-{vendor}.so"
    answer = f"-DINTEL={int(vendor == 'intel')}"
    command = [compiler, "-shared", "-fPIC", answer, "-o", str(target), str(SOURCE)]
    subprocess.run(command, check=True)
    return target


def obstacle(setting: Setting, flags: frozenset[str], library: Path | None) -> str:
    """Why a setting cannot be emulated here; empty where it can."""
    needed = {"sse": "sse4_1", "avx2": "avx2", "avx512": "avx512f"}[setting.instructions]
    if needed not in flags:
        return f"this CPU has no {needed}"
    if setting.vendor and library is None:
        return "there is no C compiler"
    return ""


def environment(setting: Setting, library: Path | None) -> dict[str, str]:
    """The variables of a process under a setting; those of this process that say otherwise go."""
    own = {name: value for name, value in os.environ.items() if name not in OWN}
    level = setting.instructions
    own |= {
        "ATEN_CPU_CAPABILITY": ATEN[level],
        "ONEDNN_MAX_CPU_ISA": ONEDNN[level],
        "OPENBLAS_CORETYPE": OPENBLAS[level],
        "OMP_NUM_THREADS": str(setting.threads),
        "ATOLL_TEST_THREADS": str(setting.threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait leave the core to the other process
    }
    if hidden := " ".join(_hidden(level)):
        own["NPY_DISABLE_CPU_FEATURES"] = hidden
    if level == "sse":
        own["GLIBC_TUNABLES"] = "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4"  # exp, log and the like
    if not setting.vendor:
        own["MKL_CBWR"] = "COMPATIBLE"
    elif setting.vendor == "intel":
        own["MKL_ENABLE_INSTRUCTIONS"] = level.upper()
    if setting.vendor and library is not None:
        own["LD_PRELOAD"] = str(library)
    return own


def _hidden(level: str) -> list[str]:
    """NumPy's names of this CPU's extensions that the emulated one does not have."""
    there: list[str] = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    if level == "avx512":
        return []
    return [n for n in there if level == "sse" or n.startswith("AVX512") or n == "X86_V4"]
