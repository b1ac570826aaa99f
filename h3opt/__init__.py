"""h3opt: faster MiniMax-H3 with a promise per pass, each one checked against the unmodified pipeline."""

from __future__ import annotations

from h3opt.errors import H3OptError

__version__ = "0.1.0"
__all__ = ["H3OptError", "__version__"]
