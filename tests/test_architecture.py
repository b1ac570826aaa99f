"""The folders and what may import what: one direction, no cycle, and the packages that setuptools installs."""

from __future__ import annotations

import ast
import graphlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up: a folder imports from itself and from folders above it in this list. Names without a folder are
# the modules beside them. ``passes`` and ``bench`` stand on the same floor as ``verification`` or above it; the last
# part of the check below says what ``passes`` may not reach.
LAYERS = (
    ("h3opt._torch_private", "h3opt.errors", "h3opt.environment", "h3opt.device", "h3opt.files", "h3opt.reference"),
    ("h3opt.graph",),
    ("h3opt.metrics",),
    ("h3opt.pipeline",),
    ("h3opt.kernels",),
    ("h3opt.pass_api",),
    ("h3opt.profiles", "h3opt.passes"),
    ("h3opt.compiler",),
    ("h3opt.verification",),
    ("h3opt.bench",),
    ("h3opt.render",),
    ("h3opt.cli",),
)
LEVEL = {folder: level for level, folders in enumerate(LAYERS) for folder in folders}


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Every module of the package with its dotted name; the top-level folders are subpackages of ``h3opt``."""
    for folder, name in (("h3opt", "h3opt"), ("passes", "h3opt.passes"), ("reference", "h3opt.reference")):
        for file in sorted((root / folder).rglob("*.py")):
            parts = file.relative_to(root / folder).with_suffix("").parts
            yield ".".join((name, *(part for part in parts if part != "__init__"))), file


def folder_of(module: str) -> str:
    """``h3opt.graph.matcher`` → ``h3opt.graph``; ``h3opt`` itself, the public face, has no folder."""
    return ".".join(module.split(".")[:2])


def imports(file: Path, names: set[str], at_import_time: bool = False) -> set[str]:
    """The modules of h3opt that a file imports, at its top level or anywhere in it."""
    tree = ast.parse(file.read_text("utf-8"))
    nodes = ast.walk(tree) if not at_import_time else iter(tree.body)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "h3opt":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in names else node.module)
    return found


def upward_imports(root: Path) -> list[str]:
    """Imports that go against the order of :data:`LAYERS`, in words."""
    found = dict(modules(root))
    wrong = []
    for module, file in found.items():
        if module == "h3opt":
            continue
        for imported in sorted(imports(file, set(found))):
            if imported == "h3opt":
                continue
            here, there = folder_of(module), folder_of(imported)
            if here != there and LEVEL[there] >= LEVEL[here] and LEVEL[here] > 0:
                wrong.append(f"{module} ({here}) imports {imported} ({there}), which stands above it or beside it")
            if LEVEL[here] == 0 and LEVEL[there] > 0:
                wrong.append(f"{module} ({here}) imports {imported} ({there}), which stands above it")
    return wrong


def import_cycle(root: Path) -> list[str] | None:
    """Modules that import one another in a circle when they are imported; ``None`` if there is no circle."""
    found = dict(modules(root))
    graph = {}
    for module, file in found.items():
        # a package's __init__ re-exports its modules: they may import their neighbours, not the package itself
        graph[module] = imports(file, set(found), at_import_time=True) - {module}
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return None


def test_a_folder_imports_only_from_folders_below_it() -> None:
    assert upward_imports(ROOT) == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert import_cycle(ROOT) is None


def test_every_module_is_in_a_layer() -> None:
    assert {folder_of(module) for module, _ in modules(ROOT)} - {"h3opt"} == set(LEVEL)


@pytest.mark.parametrize(
    ("files", "upward", "circle"),
    [
        ({"h3opt/graph/a.py": "from h3opt.compiler import capture", "h3opt/compiler/capture.py": ""}, True, False),
        ({"passes/a.py": "from h3opt.compiler.capture import x", "h3opt/compiler/capture.py": ""}, True, False),
        ({"h3opt/errors.py": "def f():\n    from h3opt.graph.a import x", "h3opt/graph/a.py": ""}, True, False),
        ({"h3opt/graph/a.py": "import h3opt.graph.b", "h3opt/graph/b.py": "from h3opt.graph import a"}, False, True),
        ({"h3opt/compiler/a.py": "from h3opt.graph.b import x", "h3opt/graph/b.py": ""}, False, False),
    ],
)
def test_the_rules_notice_what_breaks_them(files: dict[str, str], upward: bool, circle: bool, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert bool(upward_imports(tmp_path)) is upward
    assert (import_cycle(tmp_path) is not None) is circle


def test_setuptools_installs_every_folder() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    folders = {module for module, file in modules(ROOT) if file.name == "__init__.py"} | {"h3opt.configs"}
    assert set(settings["packages"]) == folders
    plain = {file.parent for _, file in modules(ROOT)} - {
        file.parent for _, file in modules(ROOT) if file.name == "__init__.py"
    }
    assert not plain, f"folders with modules but without __init__.py: {sorted(map(str, plain))}"
