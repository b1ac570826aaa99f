"""Parse and validate the YAML text of a profile."""

from __future__ import annotations

from typing import Any

import pydantic

from h3opt.errors import ProfileError, nearest
from h3opt.profiles.messages import FieldPath, Problem, describe_value, format_path, nearest_line, raise_first
from h3opt.profiles.schema import Condition, DeviceMatch, Measurement, PassRow, Profile, StrictModel
from h3opt.profiles.yaml_source import SourceTree, read_tree

MAX_BYTES = 256 * 1024
"""Largest file that is read. Shipped profiles are a few KiB; the limit refuses a wrong file, such as a checkpoint."""


def parse_profile(source: bytes | str, path: str) -> Profile:
    """Read a profile from YAML text.

    Args:
        source: text, or bytes in UTF-8.
        path: the file name for error messages.

    Raises:
        ProfileError: ``<path>:<line>: <field>: <what is wrong> <what to write>`` for the first problem by line (missing
            keys after all others), with the number of further problems.
    """
    text = _decode(source, path) if isinstance(source, bytes) else source
    tree = read_tree(text, path)
    problems = list(tree.problems)
    try:
        profile = Profile.model_validate(tree.data)
    except pydantic.ValidationError as error:
        problems += [_explain(details, tree) for details in error.errors(include_url=False)]
    if problems:
        raise_first(problems, path)
    profile.set_place(path, tree.lines)
    return profile


def _decode(data: bytes, path: str) -> str:
    if len(data) > MAX_BYTES:
        raise ProfileError(f"{path}: is larger than {MAX_BYTES // 1024} KiB, so it is no profile. Check the path.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ProfileError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8 text. Save the file as UTF-8."
        ) from None


_EXPECTED = {
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "mapping_type": "a mapping",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def _explain(error: Any, tree: SourceTree) -> Problem:
    """Convert an error of pydantic to a message about the YAML file."""
    path: FieldPath = error["loc"]
    context = error.get("ctx", {})
    if error["type"] == "rule":
        path += tuple(int(step) if step.isdigit() else step for step in context["field"].split("."))
    line, field = nearest_line(tree.lines, path), format_path(path)
    example, siblings = _lookup(path)
    write = f" Write '{example}'." if example else ""

    match error["type"]:
        case "missing":
            return Problem(line, field, f"is missing.{write}", absent=True)
        case "extra_forbidden":
            known = ", ".join(siblings)
            hint = nearest(str(path[-1])[:80], siblings)
            return Problem(line, field, f"unknown key{hint}. Known here: {known}.")
        case "rule":
            message = context["message"]
            return Problem(line, field, f"{message}.{'' if '. ' in message else write}")
        case "expected":
            expected = context["what"]
        case "literal_error":
            expected = context["expected"].replace("'", "")
        case "string_pattern_mismatch":
            value = tree.at(path)
            what = f"cannot be {describe_value(value)}" if str(value).strip() else "must not be empty"
            return Problem(line, field, f"{what}.{write}")
        case "too_long":
            return Problem(line, field, f"has more than {context['max_length']} entries. Remove some.")
        case kind:
            expected = _EXPECTED.get(kind, f"something else ({error['msg']})")
    return Problem(line, field, f"must be {expected}, found {describe_value(tree.at(path))}.{write}")


_MODELS: dict[str, type[StrictModel]] = {
    "device": DeviceMatch,
    "passes": PassRow,
    "when": Condition,
    "evidence": Measurement,
}


def _lookup(path: FieldPath) -> tuple[str | None, list[str]]:
    """Return the example of the innermost schema field on a path, and the names of all fields at that level."""
    model: type[StrictModel] | None = Profile
    example, known = None, list[str]()
    for step in path:
        if isinstance(step, int) or model is None:
            continue
        fields = {info.alias or name: info for name, info in model.model_fields.items()}
        known = list(fields)
        if step not in fields:
            return None, known
        example = str((fields[step].examples or [""])[0])
        # "device" is a model in a profile, but text in a measurement.
        model = None if model is Measurement else _MODELS.get(step)
    return example, known
