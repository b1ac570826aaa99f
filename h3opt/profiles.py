"""GPU profiles: which passes run on which GPU, with which options, and what was measured to decide it.

A profile is one YAML file. h3opt ships one per GPU (package `h3opt.configs`); a user may write another. The
head of `configs/h200.yaml` shows every key with a comment. The schema is strict: a key nobody reads, a value
of the wrong type or a row that can never be picked is a `ProfileError` that names file, line and field.

YAML is read as YAML 1.2 reads it, because 1.1 is full of traps: only `true` and `false` are booleans (`on`,
`off`, `yes` and `no` are text), `1e-3` is a number, and a date is text until the schema says otherwise. Tags,
aliases, duplicate keys and second documents are refused, so no file can build objects or expand beyond its
own size.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

import pydantic
import torch
import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from h3opt.errors import DeviceError, PassOptionError, ProfileError, UnknownPassError, nearest

__all__ = [
    "Condition",
    "DeviceMatch",
    "Evidence",
    "PassRow",
    "Profile",
    "Span",
    "detect_profile",
    "list_profiles",
    "load_profile",
    "match_profile",
    "parse_profile",
]


def load_profile(name_or_path: str | os.PathLike[str]) -> Profile:
    """Read one profile.

    `name_or_path`: the name of a shipped profile ("h200"), or a YAML file. A string is a path when it holds a
    path separator or ends in .yaml or .yml; an `os.PathLike` always is.

    Raises `ProfileError` when there is no such profile, when the file cannot be read, for everything
    `parse_profile` refuses, and for options that a pass refuses. A row of a pass that is not installed is let
    through: it may be meant for another machine, and `optimize` refuses it where it is picked.
    """
    if isinstance(name_or_path, str) and not _looks_like_path(name_or_path):
        profile = _load_shipped(name_or_path)
    else:
        path = Path(name_or_path)
        profile = parse_profile(_read_file(path), _printable(str(path)))
    _check_options(profile)
    return profile


def list_profiles() -> list[Profile]:
    """Every shipped profile, in order of name. Raises `ProfileError` if a shipped file is damaged."""
    return [_load_shipped(name) for name in _shipped_files()]


def detect_profile(device: torch.device | str | None = None) -> tuple[Profile, str | None]:
    """The shipped profile for a device, and a sentence for the user when it is not an exact fit (else None).

    `device`: "cpu", "cuda", "cuda:1", ...; None is the current CUDA device where there is one, else the CPU.

    Raises `DeviceError` for a device that is absent, or for which there are no profiles (anything but CPU and
    NVIDIA).
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"{device!r} is not a device torch knows. Write 'cpu', 'cuda' or 'cuda:0'.") from error
    if device.type == "cpu":
        return _load_shipped("cpu"), None
    if device.type != "cuda":
        raise DeviceError(
            f"There are no profiles for {device.type!r} devices. Use 'cpu' or 'cuda', or name a profile yourself."
        )
    # ROCm calls its devices "cuda" too, and its gfx numbers would pass for NVIDIA capabilities.
    if torch.version.hip is not None:
        raise DeviceError("There are no profiles for AMD GPUs. Name a profile yourself, or use a CUDA build of torch.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise DeviceError(
            f"torch sees {count} CUDA devices, so there is no '{device}'. Use another index, or device='cpu'."
        )
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return match_profile(list_profiles(), name, capability)


def match_profile(profiles: Iterable[Profile], name: str, capability: tuple[int, int]) -> tuple[Profile, str | None]:
    """The CUDA profile that fits a GPU best, and a notice when it is not an exact fit (else None).

    `name`: as `torch.cuda.get_device_name` gives it. `capability`: (major, minor).

    First choice: a profile with a `device.match` entry that occurs in `name` as whole words, whatever the
    case; of several, the longest entry. So "NVIDIA H200 NVL" is an H200; "NVIDIA GH200 480GB" is not, and
    goes by capability, because some GH200 carry the memory of an H100 and some that of an H200.
    Second choice: the highest capability at or below the GPU's; of several, the one with most measured rows,
    then the first by name. A GPU older than every profile gets the profile of the lowest capability.

    Raises `ProfileError` when `profiles` holds none for CUDA.
    """
    candidates = sorted((p for p in profiles if p.device.type == "cuda"), key=_trust)
    if not candidates:
        raise ProfileError("None of the profiles is for CUDA. Add one with 'device: {type: cuda, ...}'.")
    version = f"{capability[0]}.{capability[1]}"

    lengths = [(max((len(m) for m in p.device.match if _has_words(name, m)), default=0), p) for p in candidates]
    length, named = max(lengths, key=lambda pair: pair[0])
    if length:
        if named.device.sm == capability:
            return named, None
        return named, (
            f"{name!r} reports capability {version}, but profile {named.name!r}, which names it, is for "
            f"{named.device.capability}: using that profile."
        )

    below = [p for p in candidates if p.device.sm <= capability]
    if below:
        nearest_below = max(below, key=lambda p: p.device.sm)
        return nearest_below, (
            f"No profile names {name!r} (capability {version}): using {nearest_below.name!r}, the nearest at "
            "or below that capability. Its rows were chosen for another GPU."
        )
    lowest = min(candidates, key=lambda p: p.device.sm)
    return lowest, (
        f"No profile is for capability {version} or lower ({name!r}): using {lowest.name!r}, the lowest "
        "there is. Passes that need newer hardware will decline."
    )


def parse_profile(source: bytes | str, path: str) -> Profile:
    """Read a profile from YAML text (bytes must be UTF-8); `path` is the file that messages shall name.

    Raises `ProfileError`, `<path>:<line>: <field>: <what is wrong> <what to write>`, for the first problem by
    line (missing keys after all others), with the number of further ones.
    """
    text = _decode(source, path) if isinstance(source, bytes) else source
    tree = _read_tree(text, path)
    problems = list(tree.problems)
    try:
        profile = Profile.model_validate(tree.data)
    except pydantic.ValidationError as error:
        problems += [_explain(details, tree) for details in error.errors(include_url=False)]
    if problems:
        _raise_first(problems, path)
    profile._place = _Place(path, (), tree.lines)
    for index, row in enumerate(profile.passes):
        row._place = _Place(path, ("passes", index), tree.lines)
    return profile


# ----------------------------------------------------------------------------------------------------- schema


@dataclass(frozen=True)
class Span:
    """Whole numbers from `lowest` to `highest`, both included; `highest` None is without end. Both are ≥ 1.

    In YAML: `4096`, `">=4096"`, `">4096"`, `"<=4096"`, `"<4096"` or `"4096..40000"`.
    """

    lowest: int
    highest: int | None

    def __contains__(self, number: int) -> bool:
        return number >= self.lowest and (self.highest is None or number <= self.highest)

    def covers(self, other: Span) -> bool:
        """Whether every number of `other` is in this span."""
        return other.lowest in self and (self.highest is None or (other.highest or math.inf) <= self.highest)

    def to_yaml(self) -> int | str:
        """The canonical spelling: `4096`, `">=4096"` or `"1..4096"`."""
        if self.highest is None:
            return f">={self.lowest}"
        return self.lowest if self.lowest == self.highest else f"{self.lowest}..{self.highest}"


def _to_span(value: object) -> Span:
    if isinstance(value, Span):
        return value
    # Nine digits: a longer number is a typing error here, and Python refuses to convert very long ones.
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
    # tokens and world_size start at 1, so ">=0" is everything, but a bare 0 or "<1" is nothing.
    lowest = max(lowest, 1)
    if highest is not None and highest < lowest:
        raise _expected("a range that some number of 1 or more lies in, lower end first")
    return Span(lowest, highest)


def _to_switch(value: object) -> bool:
    if value not in ("on", "off"):
        raise _expected("on or off")
    return value == "on"


def _none_to_null(value: object) -> object:
    if value != "none" and not isinstance(value, dict | Evidence):
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
    """A value of the wrong type or form: "must be <what>, found ..."."""
    return PydanticCustomError("expected", "{what}", {"what": what})


def _rule(message: str, *, field: str) -> PydanticCustomError:
    """Values that do not go together; `field` is relative to where it is raised."""
    return PydanticCustomError("rule", "{message}", {"message": message, "field": field})


Text = Annotated[str, Field(pattern=r"\S")]
PositiveSpan = Annotated[Span, BeforeValidator(_to_span)]
_Path = tuple[str | int, ...]


@dataclass(frozen=True)
class _Place:
    """Where a profile or row was read. Takes no part in comparisons: equal means equal in content."""

    path: str = dataclasses.field(default="<no file>", compare=False)
    start: _Path = dataclasses.field(default=(), compare=False)
    lines: Mapping[_Path, int] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def line(self, steps: _Path) -> int:
        return _nearest_line(self.lines, (*self.start, *steps))


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _no_key_is_left_empty(cls, data: Any) -> Any:
        known = {info.alias or name for name, info in cls.model_fields.items()}
        for key, value in data.items() if isinstance(data, dict) else ():
            if value is None and key in known:
                raise _rule("is empty", field=key)
        return data


class DeviceMatch(_Model):
    """The device a profile is for."""

    type: Literal["cuda", "cpu"] = Field(examples=["type: cuda"])
    match: tuple[Text, ...] = Field(default=(), strict=False, examples=["match: [H200]"])
    """Words of the name the driver gives the GPU, one entry per product."""
    capability: str | None = Field(default=None, pattern=r"^[0-9]{1,2}\.[0-9]$", examples=['capability: "9.0"'])
    """CUDA compute capability, "major.minor"; quoted, as a bare 12.0 is a number."""

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
        """The capability as (major, minor); (0, 0) for a CPU."""
        major, minor = (self.capability or "0.0").split(".")
        return int(major), int(minor)


class Condition(_Model):
    """When a row holds: every key given must hold. No key at all: always."""

    tokens: PositiveSpan | None = Field(default=None, examples=['tokens: ">=4096"'])
    """Length of the sequence the transformer sees: video, audio and text tokens of one sample."""
    world_size: PositiveSpan | None = Field(default=None, examples=["world_size: 1"])
    """GPUs that work on one sample."""

    def holds(self, tokens: int | None, world_size: int) -> bool:
        """Whether the condition holds; one on `tokens` does not while their number is unknown (None)."""
        if self.tokens is not None and (tokens is None or tokens not in self.tokens):
            return False
        return self.world_size is None or world_size in self.world_size

    def covers(self, other: Condition) -> bool:
        """Whether this condition holds wherever `other` does."""
        return all(
            mine is None or (theirs is not None and mine.covers(theirs))
            for mine, theirs in ((self.tokens, other.tokens), (self.world_size, other.world_size))
        )

    def to_dict(self) -> dict[str, int | str]:
        """The keys given, in canonical spelling."""
        spans = {"tokens": self.tokens, "world_size": self.world_size}
        return {key: span.to_yaml() for key, span in spans.items() if span is not None}


class Evidence(_Model):
    """One measurement: what a pass gained and what it did to the output, for someone else to repeat."""

    device: Text = Field(examples=["device: NVIDIA H200"])
    versions: Annotated[Mapping[str, Text], AfterValidator(_has_torch)] = Field(
        examples=['versions: {torch: "2.11.0"}']
    )
    """Version by library; torch at least."""
    date: Annotated[datetime.date, BeforeValidator(_check_date)] = Field(examples=["date: 2026-01-31"])
    command: Text = Field(examples=["command: h3opt bench norm_modulate"])
    gain: Text = Field(examples=["gain: 1.00x over without"])
    """What was gained, over what, in words with units."""
    promise: Text = Field(examples=["promise: exact"])
    """The promise that was checked: exact, or the bound of a rounding or perceptual one."""
    result: Text = Field(examples=["result: 0 elements differ"])
    """What the check of the promise found."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the date as YYYY-MM-DD."""
        return {**dict(self), "versions": dict(self.versions), "date": self.date.isoformat()}


class PassRow(_Model):
    """One row of `passes`: a pass, whether it is on, its options, when the row holds, and its evidence."""

    name: str = Field(alias="pass", pattern=r"^[a-z][a-z0-9_]*$", examples=["pass: norm_modulate"])
    """The pass's registered name. Whether there is such a pass is for the registry to say."""
    enabled: bool = Field(default=True, examples=["enabled: true"])
    options: Mapping[str, Any] = Field(default_factory=dict, examples=["options: {name: value}"])
    """Fields of the pass to set. Which there are, and of what type, is for the pass to say."""
    when: Condition = Field(default=Condition(), examples=['when: {tokens: ">=4096"}'])
    reason: Text | None = Field(default=None, examples=["reason: why the pass is off"])
    """Why the row says what it says. Must be given where the pass is off: the report shows it."""
    evidence: Annotated[Evidence | None, BeforeValidator(_none_to_null)] = Field(
        default=None, examples=["evidence: none"]
    )
    """None, written `none`: nobody has measured this row."""

    _place: _Place = PrivateAttr(default_factory=_Place)

    @pydantic.model_validator(mode="after")
    def _off_has_a_reason(self) -> Self:
        if not self.enabled and self.reason is None:
            raise _rule("is needed where enabled is false", field="reason")
        return self

    @property
    def measured(self) -> bool:
        """Whether the row carries evidence."""
        return self.evidence is not None

    @property
    def path(self) -> str:
        """The file the row was read from."""
        return self._place.path

    @property
    def line(self) -> int:
        """The line the row starts on, from 1; 0 for a row that was not read from a file."""
        return self._place.line(())

    def to_dict(self) -> dict[str, Any]:
        """Plain data that reads back as the same row; keys that say nothing are left out."""
        row: dict[str, Any] = {"pass": self.name, "enabled": self.enabled}
        if self.options:
            row["options"] = _plain(self.options)
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


class Profile(_Model):
    """What to do on one GPU. Immutable; `options` are plain mappings and must not be changed either."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", examples=["name: h200"])
    device: DeviceMatch = Field(examples=['device: {type: cuda, match: [H200], capability: "9.0"}'])
    executor: Literal["direct", "inductor"] = Field(default="direct", examples=["executor: direct"])
    """What runs the rewritten graph: its own code, or Inductor's."""
    scope: Literal["block", "model"] = Field(default="block", examples=["scope: block"])
    """What is captured as one graph: a transformer block, or the whole model."""
    on_shortfall: Literal["error", "warn"] = Field(default="error", examples=["on_shortfall: error"])
    """What a pass that matched fewer sites than it must leads to."""
    probe: Annotated[bool, BeforeValidator(_to_switch)] = Field(default=True, examples=["probe: on"])
    """Whether an exact pass is checked on this machine, bit by bit, before its use; `on` or `off` in YAML."""
    # Not strict, so that YAML's list is taken for a tuple; the rows in it are. They are compared in pairs, so
    # their number is bounded.
    passes: Annotated[
        tuple[PassRow, ...],
        Field(strict=False, max_length=512),
        AfterValidator(_every_row_can_be_picked),
    ] = Field(examples=["passes: [{pass: norm_modulate, evidence: none}]"])

    _place: _Place = PrivateAttr(default_factory=_Place)

    @property
    def path(self) -> str:
        """The file the profile was read from."""
        return self._place.path

    def rows_for(self, tokens: int | None, world_size: int) -> list[PassRow]:
        """The row that applies to each pass, off or on, in the order in which the file first names the
        passes.

        `tokens`: length of the transformer's sequence, None while unknown; `world_size`: GPUs per sample.
        Of the rows of one pass whose condition holds, the last in the file wins. A pass none of whose rows
        holds is not in the list.
        """
        picked: dict[str, PassRow | None] = {}
        for row in self.passes:
            if row.when.holds(tokens, world_size):
                picked[row.name] = row
            else:
                picked.setdefault(row.name, None)
        return [row for row in picked.values() if row is not None]

    def locate(self, row: PassRow, field: str = "options") -> str:
        """`<file>:<line>: passes[2].<field>`, to put before the message of an error in that row.

        `field`: a key of the row, or a dotted path into it ("options.keep_first"); a key the file does not
        have gets the line of the nearest one around it. "" is the row itself.
        """
        steps = tuple(field.split(".")) if field else ()
        place = row._place
        return f"{place.path}:{place.line(steps)}: {_spell((*place.start, *steps))}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data that, dumped as YAML, reads back as the same profile."""
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


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


# -------------------------------------------------------------------------------------------- files and names


def _looks_like_path(name: str) -> bool:
    separators = os.sep + (os.altsep or "")
    return any(s in name for s in separators) or name.lower().endswith((".yaml", ".yml"))


def _shipped_files() -> dict[str, Traversable]:
    files = (f for f in resources.files("h3opt.configs").iterdir() if f.name.endswith(".yaml"))
    return {f.name.removesuffix(".yaml"): f for f in sorted(files, key=lambda f: f.name)}


def _load_shipped(name: str) -> Profile:
    files = _shipped_files()
    if name not in files:
        raise ProfileError(
            f"There is no profile {_clip(name)}{nearest(name[:80], files)}. Shipped: {', '.join(files)}. "
            "For a file of your own, give its path, ending in .yaml."
        )
    return parse_profile(files[name].read_bytes(), str(files[name]))


# The shipped profiles are a few KiB. The bound keeps a wrong file (a checkpoint) from being read for minutes.
_MAX_BYTES = 256 * 1024


def _read_file(path: Path) -> bytes:
    shown = _printable(str(path))
    try:
        if path.is_dir():
            raise ProfileError(f"{shown}: is a directory. Name the .yaml file in it.")
        if not path.exists():
            shipped = _shipped_files()
            raise ProfileError(
                f"{shown}: there is no such file. Check the path, or name a shipped profile"
                f"{nearest(path.stem[:80], shipped)}: {', '.join(shipped)}."
            )
        # A pipe would block, and a device never end.
        if not path.is_file():
            raise ProfileError(f"{shown}: is not a regular file. Name a .yaml file.")
        with path.open("rb") as file:
            return file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL or a lone surrogate in the path
        reason = (error.strerror if isinstance(error, OSError) else None) or "the path is malformed"
        raise ProfileError(f"{shown}: cannot be read ({reason}). Check the path and its permissions.") from error


def _decode(data: bytes, path: str) -> str:
    if len(data) > _MAX_BYTES:
        raise ProfileError(f"{path}: is larger than {_MAX_BYTES // 1024} KiB, so it is no profile. Check the path.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ProfileError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8 text. Save the file as UTF-8."
        ) from None


def _check_options(profile: Profile) -> None:
    from h3opt.pass_api.registry import make_pass

    for row in profile.passes:
        try:
            make_pass(row.name, row.options)
        except UnknownPassError:
            continue
        except PassOptionError as error:
            raise ProfileError(f"{profile.locate(row)}: {error}") from error


def _trust(profile: Profile) -> tuple[int, str]:
    """Sort key among profiles that fit equally well."""
    return -sum(row.measured for row in profile.passes), profile.name


def _has_words(name: str, words: str) -> bool:
    return re.search(rf"(?<![0-9a-z]){re.escape(words)}(?![0-9a-z])", name, re.IGNORECASE) is not None


# ------------------------------------------------------------------------------------------------------- YAML


@dataclass(frozen=True)
class _Problem:
    line: int
    field: str
    message: str  # what is wrong and what to do, without the place
    absent: bool = False  # about a key that is not there, so the line is that of the mapping


@dataclass(frozen=True)
class _Tree:
    """A document as plain data, with the line of each path into it, and what had to be left out."""

    data: dict[str, Any]
    lines: dict[_Path, int]
    problems: list[_Problem]

    def at(self, path: _Path) -> Any:
        value: Any = self.data
        for step in path:
            value = value[step]
        return value


class _Refused(Exception):
    def __init__(self, mark: Any, path: _Path, message: str) -> None:
        self.problem = _Problem(mark.line + 1, _spell(path), message)


class _Loader(yaml.SafeLoader):
    """PyYAML's composer with YAML 1.2's scalars; refuses all that can run code or grow."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own declaration)
    MAX_DEPTH = 16  # a profile needs six; PyYAML recurses once per level

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.steps: list[str | int] = []
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        # The index is a position in a list, the key node of a mapping's value, or None (the root, and keys).
        step = index.value if isinstance(index, yaml.ScalarNode) else index
        if isinstance(step, str | int):
            self.steps.append(step)
        self.depth += 1
        path = tuple(self.steps)
        if isinstance(event, yaml.AliasEvent):
            raise _Refused(event.start_mark, path, "aliases (*name) are not read. Write the value out.")
        if getattr(event, "tag", None) is not None:
            raise _Refused(event.start_mark, path, f"tags ({_clip(str(event.tag))}) are not read. Remove the tag.")
        if self.depth > self.MAX_DEPTH:
            raise _Refused(event.start_mark, path[:3], f"is nested deeper than {self.MAX_DEPTH}. Flatten it.")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(step, str | int):
            self.steps.pop()
        return node


_TAG = "tag:yaml.org,2002:"
_Loader.add_implicit_resolver(_TAG + "null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(_TAG + "bool", re.compile(r"(?:[Tt]rue|TRUE|[Ff]alse|FALSE)\Z"), list("tTfF"))
_Loader.add_implicit_resolver(_TAG + "int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _TAG + "float",
    re.compile(
        r"(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
    list("-+0123456789."),
)


def _read_tree(text: str, path: str) -> _Tree:
    """YAML text to plain data with lines. Raises `ProfileError` where it is not one YAML mapping."""
    if bad := re.search(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", text):
        line = text.count("\n", 0, bad.start()) + 1
        raise ProfileError(f"{path}:{line}: the character U+{ord(bad[0]):04X} is not allowed in YAML. Remove it.")
    loader = _Loader(text)
    try:
        root = loader.get_node() if loader.check_node() else None
        if loader.check_node():
            mark, message = loader.peek_event().start_mark, "a second one starts here. Keep one per file."
            raise _Refused(mark, (), message)
    except _Refused as refused:
        _raise_first([refused.problem], path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        what = _printable(" ".join(filter(None, (error.context, error.problem))))
        fix = "Check indentation (spaces only), quotes and brackets here and on the line above."
        if error.context == "while scanning a block scalar":
            fix = "Put text that starts with '>' or '|' in quotes: '\">=4096\"'."
        raise ProfileError(f"{path}:{mark.line + 1}: YAML syntax: {what}. {fix}") from None
    except ValueError:  # PyYAML passes on what int() and chr() raise for "\U00110000" and the like
        line = loader.get_mark().line + 1
        raise ProfileError(f"{path}:{line}: YAML syntax: a number or an escape is out of range. Remove it.") from None
    finally:
        loader.dispose()

    if root is None or (root.tag == _TAG + "null" and not root.value):
        raise ProfileError(
            f"{path}:1: document: is empty. Write at least 'name', 'device' and 'passes'; "
            "`h3opt profiles` lists profiles to copy from."
        )
    lines: dict[_Path, int] = {(): root.start_mark.line + 1}
    problems: list[_Problem] = []
    data = _to_plain(root, (), lines, problems)
    if not isinstance(data, dict):
        raise ProfileError(
            f"{path}:{lines[()]}: document: must be a mapping, found {_describe(data)}. "
            "Write 'name: ...', 'device: ...' and 'passes: ...', one a line."
        )
    return _Tree(data, lines, problems)


def _to_plain(node: yaml.Node, path: _Path, lines: dict[_Path, int], problems: list[_Problem]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_to_plain(item, (*path, i), lines, problems) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = _to_plain(key_node, (*path, "?"), {}, problems)
            if not isinstance(key, str):
                message = f"a key must be text, found {_describe(key)}. Write a name, in quotes if need be."
                problems.append(_Problem(line, _spell(path) or "document", message))
            elif key in mapping:
                message = f"is given twice, first on line {lines[*path, key]}. Remove one."
                problems.append(_Problem(line, _spell((*path, key)), message))
            else:
                lines[*path, key] = line
                mapping[key] = _to_plain(value_node, (*path, key), lines, problems)
        return mapping
    return _scalar(node, path, problems)


def _scalar(node: yaml.Node, path: _Path, problems: list[_Problem]) -> Any:
    text: str = node.value
    line = node.start_mark.line + 1
    match node.tag.removeprefix(_TAG):
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            # Longer than 64 bits is a typing error, and Python refuses to convert very long ones.
            if len(text) <= 20 and -(2**63) <= int(text) < 2**63:
                return int(text)
            problems.append(_Problem(line, _spell(path), "does not fit 64 bits. Write a smaller number."))
            return 0
        case "float":
            # float() spells infinity without YAML's dot
            value = float(re.sub(r"\.(?=[inIN])", "", text))
            if math.isfinite(value):
                return value
            problems.append(_Problem(line, _spell(path), f"{_clip(text)} is not finite. Write a finite number."))
            return 0.0
    if re.search(r"[\ud800-\udfff]", text):
        problems.append(_Problem(line, _spell(path), "holds half a surrogate pair. Remove the \\u escape."))
        return "?"
    return text


# --------------------------------------------------------------------------------------------------- messages


def _raise_first(problems: Sequence[_Problem], path: str) -> NoReturn:
    # A missing key comes last: where another is misspelled, that one is the news.
    first = min(problems, key=lambda problem: (problem.absent, problem.line))
    more = len(problems) - 1
    tail = f" ({more} more problem{'s' if more > 1 else ''} in this file)" if more else ""
    raise ProfileError(f"{path}:{first.line}: {first.field or 'document'}: {first.message}{tail}")


_EXPECTED = {
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "mapping_type": "a mapping",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def _explain(error: Any, tree: _Tree) -> _Problem:
    """One of pydantic's errors, in words a user of the YAML file can act on."""
    path: _Path = error["loc"]
    context = error.get("ctx", {})
    if error["type"] == "rule":
        path += tuple(int(step) if step.isdigit() else step for step in context["field"].split("."))
    line, field = _nearest_line(tree.lines, path), _spell(path)
    example, siblings = _lookup(path)
    write = f" Write '{example}'." if example else ""

    match error["type"]:
        case "missing":
            return _Problem(line, field, f"is missing.{write}", absent=True)
        case "extra_forbidden":
            known = ", ".join(siblings)
            hint = nearest(str(path[-1])[:80], siblings)
            return _Problem(line, field, f"unknown key{hint}. Known here: {known}.")
        case "rule":
            message = context["message"]
            return _Problem(line, field, f"{message}.{'' if '. ' in message else write}")
        case "expected":
            expected = context["what"]
        case "literal_error":
            expected = context["expected"].replace("'", "")
        case "string_pattern_mismatch":
            found = _describe(tree.at(path))
            what = "must not be empty" if not str(tree.at(path)).strip() else f"cannot be {found}"
            return _Problem(line, field, f"{what}.{write}")
        case "too_long":
            return _Problem(line, field, f"has more than {context['max_length']} entries. Remove some.")
        case kind:
            expected = _EXPECTED.get(kind, f"something else ({error['msg']})")
    return _Problem(line, field, f"must be {expected}, found {_describe(tree.at(path))}.{write}")


_MODELS: dict[str, type[_Model]] = {
    "device": DeviceMatch,
    "passes": PassRow,
    "when": Condition,
    "evidence": Evidence,
}


def _lookup(path: _Path) -> tuple[str | None, list[str]]:
    """The example of the innermost schema field on a path, and the keys known beside it."""
    model: type[_Model] | None = Profile
    example, known = None, list[str]()
    for step in path:
        if isinstance(step, int) or model is None:
            continue
        fields = {info.alias or name: info for name, info in model.model_fields.items()}
        known = list(fields)
        if step not in fields:
            return None, known
        example = str((fields[step].examples or [""])[0])
        # "device" is a model in a profile, but text in evidence.
        model = None if model is Evidence else _MODELS.get(step)
    return example, known


def _nearest_line(lines: Mapping[_Path, int], path: _Path) -> int:
    """The line of a path, or of the innermost thing around it that the file has."""
    return next((lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in lines), 0)


def _spell(path: _Path) -> str:
    return "".join(_spell_steps(path)).removeprefix(".")


def _spell_steps(path: _Path) -> Iterator[str]:
    for step in path:
        if isinstance(step, int):
            yield f"[{step}]"
        else:
            yield f".{step}" if re.fullmatch(r"[\w-]{1,60}", step) else f"[{_clip(step)}]"


def _describe(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {_clip(value)}"
        case list():
            return "a list"
    return "a mapping"


def _clip(text: str) -> str:
    """Text of the file as a one-line message quotes it: short, control characters escaped."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _printable(text: str) -> str:
    """Text of our own making, or a path, with whatever a terminal cannot show escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
