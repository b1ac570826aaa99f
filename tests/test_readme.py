"""README.md, CONTRIBUTING.md and docs/ are true: tables, commands, code, links and file names are checked."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_architecture import LAYERS

import h3opt
from h3opt.cli import app as cli
from h3opt.pass_api import registry
from h3opt.profiles.parse import parse_profile
from h3opt.reference import tiny_pipeline
from h3opt.render.tables import MARKERS, passes_markdown

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "reference/README.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in FILES}
BLOCKS = [
    (page, language, block)
    for page, text in PAGES.items()
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
]
PYTHON = [(page, block) for page, language, block in BLOCKS if language == "python"]
YAML = [(page, block) for page, language, block in BLOCKS if language == "yaml"]
# Pages whose code runs in a second; that of the others would generate whole clips.
EXECUTED = ["CONTRIBUTING.md", "docs/passes.md", "docs/profiles.md"]
# `h3opt <command>` in fenced blocks and in inline code; `h3opt.x`, `h3opt/` and `h3opt` alone are something else.
LINES = [(page, line) for page, _, block in BLOCKS for line in block.splitlines() if line.startswith("h3opt ")]
INLINE = [(page, line) for page, text in PAGES.items() for line in re.findall(r"`(h3opt [^`]+)`", text)]
COMMANDS = {command.callback.__name__: command for command in cli.app.registered_commands if command.callback}
LINKS = sorted(
    {
        (page, link or image)
        for page, text in PAGES.items()
        for link, image in re.findall(r'\]\(([^)\s]+)\)|<img src="([^"]+)"', text)
        if "://" not in link
    }
)
NAMED_FILES = sorted(
    {
        (page, name)
        for page, text in PAGES.items()
        for name in re.findall(r"`((?:h3opt|passes|configs|reference|tests|docs|\.ci)/[\w./-]*)`", text)
    }
)
ARCHITECTURE = PAGES["docs/architecture.md"]
TOP_FOLDERS = ("passes", "configs", "reference")


# ------------------------------------------------------------------------------------------------- tables, commands


def test_the_pass_table_is_the_one_of_the_registry() -> None:
    text = PAGES["docs/passes.md"]
    start, end = MARKERS
    assert (text.count(start), text.count(end)) == (1, 1)
    table = text.partition(start)[2].partition(end)[0]
    assert table == f"\n{passes_markdown()}\n", "paste the output of `h3opt passes --markdown` between the markers"


@pytest.mark.parametrize(("page", "line"), [*LINES, *INLINE])
def test_a_command_line_is_a_real_one(page: str, line: str) -> None:
    name, *words = line.partition("#")[0].split()[1:]
    if name == "COMMAND":  # stands for any of them
        return
    assert name in COMMANDS, f"{page} has `{line}`, which is no command"
    options = {*_options(name), "--help"}
    for word in words:
        assert not word.startswith("--") or word in options, f"{page} has `{line}`, and {word} is no option of it"


def test_every_command_is_in_the_page_of_the_command_line() -> None:
    shown = {line.split()[1] for page, line in LINES if page == "docs/cli.md"}
    assert shown == set(COMMANDS)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z-]+)", "\n".join(PAGES.values())))))
def test_a_make_target_is_a_real_one(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE), f"there is no make {target}"


# ------------------------------------------------------------------------------------------------------------- code


def test_the_pages_show_commands_and_code() -> None:
    assert {"README.md", *EXECUTED} <= {page for page, _ in PYTHON}
    assert LINES and INLINE and YAML and LINKS and NAMED_FILES


@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_python_code_compiles(page: str, code: str) -> None:
    compile(code, page, "exec")


@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_python_code_uses_public_names_and_arguments_that_exist(page: str, code: str) -> None:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            for alias in node.names:
                where = f"{page} imports {alias.name} from {node.module}"
                assert _public(node.module, alias.name), f"{where}, which is private"
                assert hasattr(module, alias.name), f"{where}, which does not have it"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert _public(alias.name)
                importlib.import_module(alias.name)
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "verdict":
                assert node.attr in {*dir(h3opt.Verdict), *h3opt.Verdict.__dataclass_fields__}
            elif isinstance(node.value, ast.Name) and node.value.id == "opt":
                assert hasattr(h3opt.Optimized, node.attr)
            elif (name := _dotted(node)) is not None:
                _look_up(page, name)
        elif isinstance(node, ast.Call) and (name := _dotted(node.func)) is not None:
            given = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
            inspect.signature(_look_up(page, name)).bind(*node.args, **given)


@pytest.mark.parametrize("page", PAGES)
def test_dotted_names_of_a_page_exist(page: str) -> None:
    for name in re.findall(r"(?<![\w./])h3opt\.\w+(?:\.\w+)*", PAGES[page]):
        _look_up(page, name)


@pytest.mark.parametrize("page", EXECUTED)
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))  # the example registers a pass
    monkeypatch.chdir(tmp_path)
    for _, block in (found for found in YAML if found[0] == page):
        (tmp_path / "my_gpu.yaml").write_text(block)
    names: dict[str, Any] = {"__name__": "example", "pipe": tiny_pipeline(), "module": torch.nn.Linear(4, 4)}
    for _, code in (found for found in PYTHON if found[0] == page):
        exec(compile(code, page, "exec"), names)


@pytest.mark.parametrize(("page", "text"), YAML)
def test_a_profile_is_a_valid_one(page: str, text: str) -> None:
    for row in parse_profile(text, page).passes:
        registry.make_pass(row.name, row.options)


# ------------------------------------------------------------------------------------------------- links and folders


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_a_link_leads_to_a_file_and_a_heading(page: str, link: str) -> None:
    target, _, heading = link.partition("#")
    file = (ROOT / page).parent / target if target else ROOT / page
    assert file.exists(), f"{page} links to {target}, which is not there"
    if heading:
        assert heading in _headings(file.read_text("utf-8")), f"{page} links to {link}, which has no such heading"


@pytest.mark.parametrize(("page", "name"), NAMED_FILES)
def test_a_file_that_is_named_is_there(page: str, name: str) -> None:
    assert (ROOT / name).exists(), f"{page} names {name}, which is not there"


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for page, link in LINKS if page == "README.md"}
    assert set(PAGES) - {"README.md"} <= linked


def test_the_architecture_page_shows_the_layers_that_imports_are_held_to() -> None:
    layers = [{folder.removeprefix("h3opt.") for folder in folders} for folders in LAYERS]
    rows = re.findall(r"^\| (?:`(\w+)`|root files) \| (.*) \|$", ARCHITECTURE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)` \(", rows[0][1])) == layers[0]
    assert [name for name, _ in rows[1:]] == [name for layer in LAYERS[1:] for name in _short(layer)]
    level = {name: number for number, names in enumerate(layers) for name in names} | {"root files": 0}
    diagram = next(block for page, language, block in BLOCKS if language == "mermaid" and page.endswith("ture.md"))
    label = dict(re.findall(r'(\w+)\["<b>([\w ]+)</b>', diagram))
    assert set(label.values()) == set().union(*layers[1:]) | {"root files"}
    edges = set()
    for chain in re.findall(r"^ *(\w+(?: --> \w+)+)$", diagram, re.MULTILINE):
        nodes = [label[node] for node in chain.split(" --> ")]
        edges.update(itertools.pairwise(nodes))
    assert edges == {(upper, lower) for upper in level for lower in label.values() if level[upper] == level[lower] + 1}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"<code>([\w./]+)</code>", ARCHITECTURE))))
def test_the_architecture_page_names_real_files(name: str) -> None:
    assert (ROOT / name if name.startswith(TOP_FOLDERS) else ROOT / "h3opt" / name).exists()


def _options(name: str) -> list[str]:
    import typer.main

    command: Any = typer.main.get_command(cli.app)
    found = command.commands[name]
    return [option for parameter in found.params for option in [*parameter.opts, *parameter.secondary_opts]]


def _public(*dotted: str) -> bool:
    return not any(part.startswith("_") and not part.endswith("__") for one in dotted for part in one.split("."))


def _dotted(node: ast.expr) -> str | None:
    """``h3opt.a.b`` of an expression of that form; ``None`` for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (
        ".".join(["h3opt", *reversed(names)]) if isinstance(node, ast.Name) and node.id == "h3opt" and names else None
    )


def _look_up(page: str, dotted: str) -> Any:
    """A module, or a name in one; an entry-point group (``h3opt.passes``) is a module too."""
    assert _public(dotted), f"{page} has {dotted}, which is private"
    parts = dotted.split(".")
    found: Any = importlib.import_module("h3opt")
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:number]))  # raises where there is no such thing
        found = getattr(found, part)
    return found


def _headings(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _short(layer: tuple[str, ...]) -> list[str]:
    return [folder.removeprefix("h3opt.") for folder in layer]
