"""The report of an optimized pipeline: an entry for each pass with sites, promise and state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from h3opt.pass_api.promises import Promise


@dataclass
class PassReport:
    """What one pass did.

    Attributes:
        name, kind: as registered.
        promise: the promise of the pass.
        state: ``"on"``, ``"declined"`` (see ``reason``), ``"idle"`` (it changed nothing in all that ran, see
            ``reason``) or ``"waiting"`` (nothing captured yet).
        reason: why the pass declined or was idle.
        matched, expected: sites over all modules; ``None`` while unknown.
        per_region: region → (matched, expected) sites in a captured graph, e.g. ``{"transformer.block": (1, 1)}``.
        sites: the sites that were rewritten, for the first graph of each region.
        near_misses: sites that match in part, with what differs.
        refused: sites that the probe refused on this machine, with the reason.
        proof: the checks on this machine, in words.
    """

    name: str
    kind: str
    promise: Promise
    state: str = "waiting"
    reason: str | None = None
    matched: int | None = None
    expected: int | None = None
    per_region: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    sites: list[str] = field(default_factory=list)
    near_misses: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    proof: str = "none yet"

    @property
    def declined(self) -> str | None:
        """The reason the pass declined, ``None`` if it did not."""
        return self.reason if self.state == "declined" else None

    @property
    def idle(self) -> str | None:
        """The reason the pass changed nothing in all that ran, ``None`` if it changed something or nothing ran."""
        return self.reason if self.state == "idle" else None

    @property
    def counts(self) -> str:
        """``matched/expected`` for a table."""
        if self.state == "declined":
            return "–"
        matched = "?" if self.matched is None else str(self.matched)
        return f"{matched}/{'?' if self.expected is None else self.expected}"

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON-ready types."""
        return {**asdict(self), "promise": str(self.promise)}


@dataclass
class Report:
    """The passes of an optimized pipeline.

    Attributes:
        profile: name of the profile.
        device: name of the device.
        executor, scope: how graphs run, and whether a graph spans a block or a model.
        passes: name of a pass → the entry, in running order.
        captured: region → number of captured graphs.
        notices: sentences for the user.
    """

    profile: str
    device: str
    executor: str
    scope: str
    passes: dict[str, PassReport] = field(default_factory=dict)
    captured: dict[str, int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> PassReport:
        return self.passes[name]

    def __iter__(self) -> Iterator[PassReport]:
        return iter(self.passes.values())

    def __contains__(self, name: str) -> bool:
        return name in self.passes

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready types."""
        return {
            "profile": self.profile,
            "device": self.device,
            "executor": self.executor,
            "scope": self.scope,
            "captured": dict(self.captured),
            "notices": list(self.notices),
            "passes": [entry.to_dict() for entry in self],
        }

    def __str__(self) -> str:
        rows = [("pass", "kind", "sites", "promise", "state")]
        rows += [
            (
                entry.name,
                entry.kind,
                entry.counts,
                str(entry.promise),
                entry.declined or (f"idle: {entry.idle}" if entry.idle else f"{entry.state}; {entry.proof}"),
            )
            for entry in self
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [f"profile {self.profile} on {self.device}, executor {self.executor}, scope {self.scope}"]
        lines += [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
        ]
        return "\n".join([*lines, *self.notices])
