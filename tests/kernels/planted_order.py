"""The norm kernels with another order of summation planted: what the probe is for, made on purpose."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

IN_ORDER = ("fma(x0, x0, total)", "fma(x1, x1, total)", "fma(x2, x2, total)", "fma(x3, x3, total)")


def reordered_norm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of norm kernels with each lane's four squares added last to first; the rest of its text is unchanged.

    Triton compiles from source files and hashes what a kernel calls, so nothing is patched: two files in ``folder``.
    """
    from h3opt.kernels.triton_kernels import device, norm

    functions = Path(device.__file__).read_text("utf-8")
    for number, term in enumerate(IN_ORDER):
        assert functions.count(term) == 1, f"add_squares has changed: {term}"
        functions = functions.replace(term, f"PLANTED_{number}")
    for number, term in enumerate(reversed(IN_ORDER)):
        functions = functions.replace(f"PLANTED_{number}", term)
    kernels = Path(norm.__file__).read_text("utf-8")
    assert kernels.count("from h3opt.kernels.triton_kernels.device import") == 1
    (folder / "reordered_device.py").write_text(functions, "utf-8")
    (folder / "reordered_norm.py").write_text(
        kernels.replace("from h3opt.kernels.triton_kernels.device import", "from reordered_device import"), "utf-8"
    )
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module("reordered_norm")
