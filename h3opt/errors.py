"""Errors a user can act on: each message is one sentence on what is wrong and one on what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class H3OptError(Exception):
    """Base of every error h3opt raises on purpose. The pipeline is as it was before the call that raised it."""


class UnknownPassError(H3OptError):
    """A pass name that no registered pass has."""


class PassOptionError(H3OptError):
    """An option that the pass does not have, or a value it cannot take."""


class PassOrderError(H3OptError):
    """`after` declarations that form a cycle."""


class PassConflictError(H3OptError):
    """Two passes that cannot be on together, or one pass named twice."""


class PassDefinitionError(H3OptError):
    """A pass class that does not follow the protocol (no name, no promise, name taken)."""


class PipelineError(H3OptError):
    """A pipeline in which h3opt knows no component, or that is in the wrong state for the call."""


class DeviceError(H3OptError):
    """A device that is missing or that a requested feature does not support."""


class ProfileError(H3OptError):
    """A profile that cannot be found or read; the message names file, line and field."""


class ShortfallError(H3OptError):
    """A pass matched fewer sites than it must; the message shows the nearest non-match."""


class PassFailedError(H3OptError):
    """A pass produced a graph that is not valid (dead inputs, wrong shapes or dtypes, unordered nodes)."""


class CheckpointError(H3OptError):
    """Weights that are missing, truncated, or of the wrong keys, shapes or dtypes."""


class MemoryBudgetError(H3OptError):
    """A memory budget that the work does not fit into; the message has the least that does."""


class MissingDependencyError(H3OptError):
    """An optional package that the call needs is not installed."""


class H3OptWarning(UserWarning):
    """Base of every warning h3opt gives on purpose."""


class ShortfallWarning(H3OptWarning):
    """A pass matched fewer sites than it must, in a profile that says ``on_shortfall: warn``."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The clause ` (did you mean 'x'?)` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
