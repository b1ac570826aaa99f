"""Read YAML text as plain data with line numbers, by the rules of YAML 1.2."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import yaml

from h3opt.errors import ProfileError
from h3opt.profiles.messages import (
    FieldPath,
    Problem,
    describe_value,
    escape_unprintable,
    format_path,
    quote_clipped,
    raise_first,
)


@dataclass(frozen=True)
class SourceTree:
    """A document as plain data.

    Attributes:
        data: the root mapping; values that had to be left out have a placeholder.
        lines: the line of each path.
        problems: what is wrong with the values that were left out.
    """

    data: dict[str, Any]
    lines: dict[FieldPath, int]
    problems: list[Problem]

    def at(self, path: FieldPath) -> Any:
        """Return the value at a path."""
        value: Any = self.data
        for step in path:
            value = value[step]
        return value


class _Refused(Exception):
    """YAML that is valid, but that profiles do not allow."""

    def __init__(self, mark: Any, path: FieldPath, message: str) -> None:
        self.problem = Problem(mark.line + 1, format_path(path), message)


class _Loader(yaml.SafeLoader):
    """PyYAML's composer with the scalars of YAML 1.2; refuses tags, aliases and deep nesting."""

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
            raise _Refused(
                event.start_mark, path, f"tags ({quote_clipped(str(event.tag))}) are not read. Remove the tag."
            )
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


def read_tree(text: str, path: str) -> SourceTree:
    """Read YAML text as plain data with line numbers.

    Raises:
        ProfileError: the text is not a single YAML mapping.
    """
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
        raise_first([refused.problem], path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        what = escape_unprintable(" ".join(filter(None, (error.context, error.problem))))
        fix = "Check indentation (spaces only), quotes and brackets here and on the line above."
        if error.context == "while scanning a block scalar":
            fix = "Put text that starts with '>' or '|' in quotes: '\">=4096\"'."
        raise ProfileError(f"{path}:{mark.line + 1}: YAML syntax: {what}. {fix}") from None
    except ValueError:  # from int() and chr() inside PyYAML, for an escape such as "\U00110000"
        line = loader.get_mark().line + 1
        raise ProfileError(f"{path}:{line}: YAML syntax: a number or an escape is out of range. Remove it.") from None
    finally:
        loader.dispose()

    if root is None or (root.tag == _TAG + "null" and not root.value):
        raise ProfileError(
            f"{path}:1: document: is empty. Write at least 'name', 'device' and 'passes'; "
            "`h3opt profiles` lists profiles to copy from."
        )
    lines: dict[FieldPath, int] = {(): root.start_mark.line + 1}
    problems: list[Problem] = []
    data = _to_plain(root, (), lines, problems)
    if not isinstance(data, dict):
        raise ProfileError(
            f"{path}:{lines[()]}: document: must be a mapping, found {describe_value(data)}. "
            "Write 'name: ...', 'device: ...' and 'passes: ...', one a line."
        )
    return SourceTree(data, lines, problems)


def _to_plain(node: yaml.Node, path: FieldPath, lines: dict[FieldPath, int], problems: list[Problem]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_to_plain(item, (*path, i), lines, problems) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = _to_plain(key_node, (*path, "?"), {}, problems)
            if not isinstance(key, str):
                message = f"a key must be text, found {describe_value(key)}. Write a name, in quotes if need be."
                problems.append(Problem(line, format_path(path) or "document", message))
            elif key in mapping:
                message = f"is given twice, first on line {lines[*path, key]}. Remove one."
                problems.append(Problem(line, format_path((*path, key)), message))
            else:
                lines[*path, key] = line
                mapping[key] = _to_plain(value_node, (*path, key), lines, problems)
        return mapping
    return _scalar(node, path, problems)


def _scalar(node: yaml.Node, path: FieldPath, problems: list[Problem]) -> Any:
    text: str = node.value
    line = node.start_mark.line + 1
    match node.tag.removeprefix(_TAG):
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            # More than 64 bits is a typing error, and Python refuses to convert very long numbers.
            if len(text) <= 20 and -(2**63) <= int(text) < 2**63:
                return int(text)
            problems.append(Problem(line, format_path(path), "does not fit 64 bits. Write a smaller number."))
            return 0
        case "float":
            # float() accepts infinity and NaN without the dot of YAML
            value = float(re.sub(r"\.(?=[inIN])", "", text))
            if math.isfinite(value):
                return value
            problems.append(
                Problem(line, format_path(path), f"{quote_clipped(text)} is not finite. Write a finite number.")
            )
            return 0.0
    if re.search(r"[\ud800-\udfff]", text):
        problems.append(Problem(line, format_path(path), "holds half a surrogate pair. Remove the \\u escape."))
        return "?"
    return text
