"""The schema of profiles: models, validation rules and conversion back to plain data."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from h3opt.profiles.messages import FieldPath, format_path, nearest_line


@dataclass(frozen=True)
class Span:
    """Whole numbers from ``lowest`` to ``highest``, both included and at least 1; ``None`` for no upper end.

    In YAML: ``4096``, ``">=4096"``, ``">4096"``, ``"<=4096"``, ``"<4096"`` or ``"4096..40000"``.
    """

    lowest: int
    highest: int | None

    def __contains__(self, number: int) -> bool:
        return number >= self.lowest and (self.highest is None or number <= self.highest)

    def covers(self, other: Span) -> bool:
        """Return whether every number of ``other`` is in this span."""
        return other.lowest in self and (self.highest is None or (other.highest or math.inf) <= self.highest)

    def to_yaml(self) -> int | str:
        """Return the canonical form: ``4096``, ``">=4096"`` or ``"1..4096"``."""
        if self.highest is None:
            return f">={self.lowest}"
        return self.lowest if self.lowest == self.highest else f"{self.lowest}..{self.highest}"


def _to_span(value: object) -> Span:
    if isinstance(value, Span):
        return value
    # Nine digits: a longer number is a typing error, and Python refuses to convert very long numbers.
    parts = re.fullmatch(r"(>=|<=|>|<|) *([0-9]{1,9})(?: *\.\. *([0-9]{1,9}))?", str(value).strip())
    if isinstance(value, bool) or not isinstance(value, int | str) or not parts or (parts[1] and parts[3]):
        raise _expected("a whole number or a range like '>=4096', '<4096' or '4096..40000'")
    number = int(parts[2])
    highest: int | None
    match parts[1]:
        case ">=":
            lowest, highest = number, None
        case ">":
            lowest, highest = number + 1, None
        case "<=":
            lowest, highest = 1, number
        case "<":
            lowest, highest = 1, number - 1
        case _:
            lowest, highest = number, int(parts[3] or number)
    # tokens and world_size start at 1, so ">=0" holds for every number, but a bare 0 or "<1" for none.
    lowest = max(lowest, 1)
    if highest is not None and highest < lowest:
        raise _expected("a range that some number of 1 or more lies in, lower end first")
    return Span(lowest, highest)


def _to_switch(value: object) -> bool:
    if value not in ("on", "off"):
        raise _expected("on or off")
    return value == "on"


def _none_to_null(value: object) -> object:
    if value != "none" and not isinstance(value, dict | Measurement):
        raise _expected("none or a mapping")
    return None if value == "none" else value


def _check_date(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
        raise _expected("a date YYYY-MM-DD")
    try:
        return datetime.date.fromisoformat(value)
    except ValueError:
        raise _expected("a date that exists") from None


def _has_torch(versions: Mapping[str, str]) -> Mapping[str, str]:
    if "torch" not in versions:
        raise _rule("must name the version of torch", field="torch")
    return versions


def _expected(what: str) -> PydanticCustomError:
    """Report a value of the wrong type or form: "must be <what>, found ..."."""
    return PydanticCustomError("expected", "{what}", {"what": what})


def _rule(message: str, *, field: str) -> PydanticCustomError:
    """Report values that contradict each other; ``field`` is relative to the model or field that raises it."""
    return PydanticCustomError("rule", "{message}", {"message": message, "field": field})


Text = Annotated[str, Field(pattern=r"\S")]
PositiveSpan = Annotated[Span, BeforeValidator(_to_span)]


@dataclass(frozen=True)
class SourcePlace:
    """The place in a file from which a profile or row was read. Comparisons ignore it: they are by content."""

    path: str = dataclasses.field(default="<no file>", compare=False)
    start: FieldPath = dataclasses.field(default=(), compare=False)
    lines: Mapping[FieldPath, int] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def line(self, steps: FieldPath) -> int:
        """Return the line of a value, by the path from this place; 0 without a file."""
        return nearest_line(self.lines, (*self.start, *steps))


class StrictModel(BaseModel):
    """Base of the models: immutable, without type conversion, unknown keys or empty values."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _no_key_is_left_empty(cls, data: Any) -> Any:
        known = {info.alias or name for name, info in cls.model_fields.items()}
        for key, value in data.items() if isinstance(data, dict) else ():
            if value is None and key in known:
                raise _rule("is empty", field=key)
        return data


class DeviceMatch(StrictModel):
    """The device for which a profile is written."""

    type: Literal["cuda", "cpu"] = Field(examples=["type: cuda"])
    match: tuple[Text, ...] = Field(default=(), strict=False, examples=["match: [H200]"])
    """Words of the name that the driver gives the GPU, an entry per product."""
    capability: str | None = Field(default=None, pattern=r"^[0-9]{1,2}\.[0-9]$", examples=['capability: "9.0"'])
    """CUDA compute capability, "major.minor"; in quotes, because a bare 12.0 is a number."""

    @pydantic.model_validator(mode="after")
    def _cuda_names_a_gpu(self) -> Self:
        for field in ("match", "capability"):
            given = bool(getattr(self, field))
            if given and self.type == "cpu":
                raise _rule("has no meaning for type cpu. Remove it", field=field)
            if not given and self.type == "cuda":
                raise _rule("is needed for type cuda", field=field)
        return self

    @property
    def sm(self) -> tuple[int, int]:
        """Compute capability as (major, minor); (0, 0) for a CPU."""
        major, minor = (self.capability or "0.0").split(".")
        return int(major), int(minor)


class Condition(StrictModel):
    """The condition of a row: every key that is given must hold. Without keys it always holds."""

    tokens: PositiveSpan | None = Field(default=None, examples=['tokens: ">=4096"'])
    """Length of the transformer's sequence: video, audio and text tokens of a sample."""
    world_size: PositiveSpan | None = Field(default=None, examples=["world_size: 1"])
    """Number of GPUs that work on a sample."""

    def holds(self, tokens: int | None, world_size: int) -> bool:
        """Return whether the condition holds; a condition on ``tokens`` does not while their number is ``None``."""
        if self.tokens is not None and (tokens is None or tokens not in self.tokens):
            return False
        return self.world_size is None or world_size in self.world_size

    def covers(self, other: Condition) -> bool:
        """Return whether this condition holds wherever ``other`` does."""
        return all(
            mine is None or (theirs is not None and mine.covers(theirs))
            for mine, theirs in ((self.tokens, other.tokens), (self.world_size, other.world_size))
        )

    def to_dict(self) -> dict[str, int | str]:
        """Return the keys that are given, in canonical form."""
        spans = {"tokens": self.tokens, "world_size": self.world_size}
        return {key: span.to_yaml() for key, span in spans.items() if span is not None}


class Measurement(StrictModel):
    """The measured gain of a pass and its effect on the output, with what is needed to repeat the measurement."""

    device: Text = Field(examples=["device: NVIDIA H200"])
    versions: Annotated[Mapping[str, Text], AfterValidator(_has_torch)] = Field(
        examples=['versions: {torch: "2.11.0"}']
    )
    """Version of each library; torch must be among them."""
    date: Annotated[datetime.date, BeforeValidator(_check_date)] = Field(examples=["date: 2026-01-31"])
    command: Text = Field(examples=["command: h3opt bench norm_modulate"])
    gain: Text = Field(examples=["gain: 1.00x over without"])
    """The gain and the baseline, in words with units."""
    promise: Text = Field(examples=["promise: exact"])
    """The promise that was checked: exact, or the bound of a rounding or perceptual promise."""
    result: Text = Field(examples=["result: 0 elements differ"])
    """The result of the check."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data, the date as YYYY-MM-DD."""
        return {**dict(self), "versions": dict(self.versions), "date": self.date.isoformat()}


class PassRow(StrictModel):
    """A row of ``passes``: whether a pass is on, with which options, under which condition, and the measurement."""

    name: str = Field(alias="pass", pattern=r"^[a-z][a-z0-9_]*$", examples=["pass: norm_modulate"])
    """Registered name of the pass. The registry, not the schema, checks that there is such a pass."""
    enabled: bool = Field(default=True, examples=["enabled: true"])
    options: Mapping[str, Any] = Field(default_factory=dict, examples=["options: {name: value}"])
    """Fields of the pass to set. The pass, not the schema, checks names and values."""
    when: Condition = Field(default=Condition(), examples=['when: {tokens: ">=4096"}'])
    reason: Text | None = Field(default=None, examples=["reason: why the pass is off"])
    """The reason for the row. Required where the pass is off: the report shows it."""
    evidence: Annotated[Measurement | None, BeforeValidator(_none_to_null)] = Field(
        default=None, examples=["evidence: none"]
    )
    """The measurement; ``None``, in YAML ``none``, for a row that has not been measured."""

    _place: SourcePlace = PrivateAttr(default_factory=SourcePlace)

    @pydantic.model_validator(mode="after")
    def _off_has_a_reason(self) -> Self:
        if not self.enabled and self.reason is None:
            raise _rule("is needed where enabled is false", field="reason")
        return self

    @property
    def measured(self) -> bool:
        """Whether the row has a measurement."""
        return self.evidence is not None

    @property
    def path(self) -> str:
        """The file from which the row was read."""
        return self._place.path

    @property
    def line(self) -> int:
        """The first line of the row, from 1; 0 for a row that was not read from a file."""
        return self._place.line(())

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data that reads back as the same row; keys with default values are left out."""
        row: dict[str, Any] = {"pass": self.name, "enabled": self.enabled}
        if self.options:
            row["options"] = _to_lists(self.options)
        if when := self.when.to_dict():
            row["when"] = when
        if self.reason is not None:
            row["reason"] = self.reason
        row["evidence"] = self.evidence.to_dict() if self.evidence else "none"
        return row


def _every_row_can_be_picked(rows: tuple[PassRow, ...]) -> tuple[PassRow, ...]:
    for index, row in enumerate(rows):
        for earlier_index, earlier in enumerate(rows[:index]):
            if earlier.name != row.name or not row.when.covers(earlier.when):
                continue
            if row.when == earlier.when:
                raise _rule(
                    f"pass {row.name!r} already has a row with the same condition, passes[{earlier_index}]. "
                    "Remove one, or tell them apart with 'when'",
                    field=f"{index}.when",
                )
            raise _rule(
                f"the row always gives way to passes[{index}], since the last row that holds is picked. "
                "Put the wider condition first",
                field=f"{earlier_index}.when",
            )
    return rows


class Profile(StrictModel):
    """The settings and passes for a GPU. Immutable: do not change the plain mappings in ``options`` either."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", examples=["name: h200"])
    device: DeviceMatch = Field(examples=['device: {type: cuda, match: [H200], capability: "9.0"}'])
    executor: Literal["direct", "inductor"] = Field(default="direct", examples=["executor: direct"])
    """The executor of rewritten graphs: the code that torch.fx generates, or Inductor."""
    scope: Literal["block", "model"] = Field(default="block", examples=["scope: block"])
    """The extent of a captured graph: a transformer block, or the whole model."""
    on_shortfall: Literal["error", "warn"] = Field(default="error", examples=["on_shortfall: error"])
    """The consequence when a pass matches fewer sites than it must."""
    probe: Annotated[bool, BeforeValidator(_to_switch)] = Field(default=True, examples=["probe: on"])
    """Whether exact passes are checked on this machine, bit by bit, before use; ``on`` or ``off`` in YAML."""
    # Not strict, so that a list of YAML is accepted as a tuple; the rows are strict. Rows are compared in pairs, so
    # the number of rows is bounded.
    passes: Annotated[
        tuple[PassRow, ...],
        Field(strict=False, max_length=512),
        AfterValidator(_every_row_can_be_picked),
    ] = Field(examples=["passes: [{pass: norm_modulate, evidence: none}]"])

    _place: SourcePlace = PrivateAttr(default_factory=SourcePlace)

    @property
    def path(self) -> str:
        """The file from which the profile was read."""
        return self._place.path

    def set_place(self, path: str, lines: Mapping[FieldPath, int]) -> None:
        """Record the file from which the profile was read, and the line of each path in it."""
        self._place = SourcePlace(path, (), lines)
        for index, row in enumerate(self.passes):
            row._place = SourcePlace(path, ("passes", index), lines)

    def rows_for(self, tokens: int | None, world_size: int) -> list[PassRow]:
        """Select the row that applies to each pass, off or on, in the order in which the file first names the passes.

        Of the rows of a pass with a condition that holds, the last in the file is selected. A pass without such a row
        is not in the list.

        Args:
            tokens: length of the transformer's sequence, ``None`` while unknown.
            world_size: GPUs per sample.
        """
        selected: dict[str, PassRow | None] = {}
        for row in self.passes:
            if row.when.holds(tokens, world_size):
                selected[row.name] = row
            else:
                selected.setdefault(row.name, None)
        return [row for row in selected.values() if row is not None]

    def locate(self, row: PassRow, field: str = "options") -> str:
        """Return ``<file>:<line>: passes[2].<field>``, the prefix for the message of an error in that row.

        Args:
            row: a row of this profile.
            field: a key of the row, or a dotted path (``"options.keep_first"``); ``""`` is the row itself. A key that
                the file does not have gets the line of the innermost enclosing value.
        """
        steps = tuple(field.split(".")) if field else ()
        place = row._place
        return f"{place.path}:{place.line(steps)}: {format_path((*place.start, *steps))}"

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data that, written as YAML, reads back as the same profile."""
        device: dict[str, Any] = {"type": self.device.type}
        if self.device.type == "cuda":
            device |= {"match": list(self.device.match), "capability": self.device.capability}
        return {
            "name": self.name,
            "device": device,
            "executor": self.executor,
            "scope": self.scope,
            "on_shortfall": self.on_shortfall,
            "probe": "on" if self.probe else "off",
            "passes": [row.to_dict() for row in self.passes],
        }


def _to_lists(value: Any) -> Any:
    """Copy nested mappings and sequences as dictionaries and lists, the types that YAML reads."""
    if isinstance(value, Mapping):
        return {key: _to_lists(item) for key, item in value.items()}
    return [_to_lists(item) for item in value] if isinstance(value, list | tuple) else value
