"""Runs `interpreted_cases.py`, one process per kernel family: triton picks its interpreter when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = Path(__file__).with_name("interpreted_cases.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ("norm", "wide_norm", "quantize", "swiglu", "rope", "resample", "fp8_attention", "attention_tiles")
)
def test_kernels_equal_the_cuda_order_reference_in_the_interpreter(family):
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            str(CASES),
            "-k",
            f"test_{family}",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"},
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
