"""h3opt: faster MiniMax-H3 with a promise per pass, each one checked against the unmodified pipeline."""

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

_HOME = {
    "optimize": "h3opt.compiler.optimize",
    "Optimized": "h3opt.compiler.optimize",
    "load_profile": "h3opt.profiles.selection",
    "list_passes": "h3opt.pass_api.registry",
    "verify": "h3opt.verification.verify",
    "Verdict": "h3opt.verification.verify",
}


def __getattr__(name: str) -> Any:
    """Load the public names on first use: ``import h3opt`` alone must stay quick for the command line."""
    if name not in _HOME:
        if name == "reference":
            return importlib.import_module("h3opt.reference")
        raise AttributeError(f"module 'h3opt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
