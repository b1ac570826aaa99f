"""h3opt: optimization passes for MiniMax-H3, each with a promise that is checked against the unmodified pipeline."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from h3opt.errors import H3OptError

if TYPE_CHECKING:
    from h3opt.compiler.optimize import Optimized, optimize
    from h3opt.pass_api.registry import list_passes
    from h3opt.profiles.selection import load_profile
    from h3opt.verification.verdict import Verdict
    from h3opt.verification.verify import verify

__version__ = "0.1.0"
__all__ = [
    "H3OptError",
    "Optimized",
    "Verdict",
    "__version__",
    "list_passes",
    "load_profile",
    "optimize",
    "verify",
]

_MODULES = {
    "optimize": "h3opt.compiler.optimize",
    "Optimized": "h3opt.compiler.optimize",
    "load_profile": "h3opt.profiles.selection",
    "list_passes": "h3opt.pass_api.registry",
    "verify": "h3opt.verification.verify",
    "Verdict": "h3opt.verification.verdict",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use: the command line needs a fast ``import h3opt``."""
    if name not in _MODULES:
        if name == "reference":
            return importlib.import_module("h3opt.reference")
        raise AttributeError(f"module 'h3opt' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
