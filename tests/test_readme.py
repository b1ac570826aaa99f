"""README.md says what is so: its table, its commands and its code are checked against the package."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from h3opt.cli import app as cli
from h3opt.render.tables import MARKERS, passes_markdown

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
PYTHON = [block for language, block in BLOCKS if language == "python"]
# `h3opt <command>` in fenced blocks and in inline code; `h3opt.x`, `h3opt/` and `h3opt` alone are something else.
LINES = [line for _, block in BLOCKS for line in block.splitlines() if line.startswith("h3opt ")]
INLINE = re.findall(r"`(h3opt [^`]+)`", TEXT)
COMMANDS = {command.callback.__name__: command for command in cli.app.registered_commands if command.callback}


def test_the_pass_table_is_the_one_of_the_registry() -> None:
    start, end = MARKERS
    assert (TEXT.count(start), TEXT.count(end)) == (1, 1)
    table = TEXT.partition(start)[2].partition(end)[0]
    assert table == f"\n{passes_markdown()}\n", "paste the output of `h3opt passes --markdown` between the markers"


@pytest.mark.parametrize("line", [*LINES, *INLINE])
def test_a_command_line_is_a_real_one(line: str) -> None:
    name, *words = line.partition("#")[0].split()[1:]
    assert name in COMMANDS, f"README.md has `{line}`, which is no command"
    options = set(_options(name))
    for word in words:
        assert not word.startswith("--") or word in options, f"README.md has `{line}`, and {word} is no option of it"


def test_the_readme_shows_commands_and_code() -> None:
    assert LINES and PYTHON


@pytest.mark.parametrize("code", PYTHON)
def test_python_code_compiles(code: str) -> None:
    compile(code, "README.md", "exec")


@pytest.mark.parametrize("code", PYTHON)
def test_python_code_uses_public_names_that_exist(code: str) -> None:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            for alias in node.names:
                where = f"README.md imports {alias.name} from {node.module}"
                assert _public(node.module, alias.name), f"{where}, which is private"
                assert hasattr(module, alias.name), f"{where}, which does not have it"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert _public(alias.name)
                importlib.import_module(alias.name)
        elif isinstance(node, ast.Attribute):
            _check_chain(node)
    for name in re.findall(r"\bh3opt\.\w+(?:\.\w+)*", TEXT):
        _look_up(name)


@pytest.mark.parametrize("target", sorted({link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link}))
def test_a_link_leads_to_a_file(target: str) -> None:
    assert (README.parent / target).exists(), f"README.md links to {target}, which is not there"


def _options(name: str) -> list[str]:
    import typer.main

    command: Any = typer.main.get_command(cli.app)
    found = command.commands[name]
    return [option for parameter in found.params for option in [*parameter.opts, *parameter.secondary_opts]]


def _public(*dotted: str) -> bool:
    return not any(part.startswith("_") and not part.endswith("__") for one in dotted for part in one.split("."))


def _check_chain(node: ast.Attribute) -> None:
    """``h3opt.a.b`` as an expression."""
    names: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name) and inner.id == "h3opt":
        _look_up(".".join(["h3opt", *reversed(names)]))


def _look_up(dotted: str) -> None:
    """A module, or a name in one; an entry-point group (``h3opt.passes``) is a module too."""
    assert _public(dotted), f"README.md has {dotted}, which is private"
    parts = dotted.split(".")
    found: Any = importlib.import_module("h3opt")
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:number]))  # raises where there is no such thing
        found = getattr(found, part)
