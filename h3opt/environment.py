"""The environment of a measurement: versions, device, precision settings, autotuning and compiler caches."""

from __future__ import annotations

import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that measurements depend on."""
    installed = {}
    for package in ("h3opt", "torch", "triton", "diffusers", "transformers", "lpips"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def environment(device: str) -> dict[str, Any]:
    """Describe versions, device and settings as JSON-ready types.

    Autotuning and the caches of compilers can decide which of several kernels runs. Call this before the first
    compilation: later the caches are never cold.
    """
    inductor = Path(
        os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    )
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return {
        "device": device,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "autotune": os.environ.get("TORCHINDUCTOR_MAX_AUTOTUNE", "0") == "1",
        "inductor_cache": _cache_state(inductor),
        "triton_cache": _cache_state(triton),
        "versions": versions(),
    }


def _cache_state(folder: Path) -> str:
    try:
        return "warm" if any(folder.iterdir()) else "cold"
    except OSError:
        return "cold"


def _user() -> str:
    import getpass
    import re

    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())  # the name that Inductor gives the folder
    except (KeyError, OSError):  # a user without a name
        return ""
