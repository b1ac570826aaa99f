"""Exceptions and warnings. Each message has a sentence on what is wrong and a sentence on what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class H3OptError(Exception):
    """Base of all errors that h3opt raises. The pipeline is as it was before the call that raised the error."""


class UnknownPassError(H3OptError):
    """A name under which no pass is registered."""


class PassOptionError(H3OptError):
    """An unknown option or value."""


class PassOrderError(H3OptError):
    """`after` declarations that form a cycle."""


class PassConflictError(H3OptError):
    """Two passes that cannot be on together, or a pass that is given twice."""


class PassDefinitionError(H3OptError):
    """A pass class that violates the protocol: without a name or a promise, or under the name of another pass."""


class PipelineError(H3OptError):
    """A pipeline without a component that h3opt supports, or in the wrong state; also files that cannot be written."""


class DeviceError(H3OptError):
    """A device that is absent, or that does not support a requested feature."""


class ProfileError(H3OptError):
    """A profile that does not exist or is not valid; the message names file, line and field."""


class ShortfallError(H3OptError):
    """A pass that matched fewer sites than it must; the message shows the nearest miss."""


class PassFailedError(H3OptError):
    """A pass that produced an invalid graph: wrong shapes or dtypes, or nodes out of order."""


class CheckpointError(H3OptError):
    """Weights that are missing or truncated, or have wrong keys, shapes or dtypes."""


class MemoryBudgetError(H3OptError):
    """A memory budget that is too small; the message gives the smallest sufficient budget."""


class MissingDependencyError(H3OptError):
    """An optional package that is needed, but not installed."""


class H3OptWarning(UserWarning):
    """Base of all warnings of h3opt."""


class ShortfallWarning(H3OptWarning):
    """A pass that matched fewer sites than it must, in a profile with ``on_shortfall: warn``."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
