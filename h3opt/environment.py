"""What a figure depends on besides the code: versions, device, precision switches, autotuning, caches."""

from __future__ import annotations

import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def versions() -> dict[str, str]:
    """Installed versions of the packages that a figure depends on."""
    found = {}
    for package in ("h3opt", "torch", "triton", "diffusers", "transformers", "lpips"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def environment(device: str) -> dict[str, Any]:
    """Versions, device and switches, as JSON-ready types.

    Autotuning and compilers' caches decide which of several kernels runs: they are recorded as they are found, before
    anything has compiled.
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
        "inductor_cache": _warmth(inductor),
        "triton_cache": _warmth(triton),
        "versions": versions(),
    }


def _warmth(folder: Path) -> str:
    try:
        return "warm" if any(folder.iterdir()) else "cold"
    except OSError:
        return "cold"


def _user() -> str:
    import getpass
    import re

    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())  # as Inductor spells it
    except (KeyError, OSError):  # a user without a name
        return ""
