"""The wheel: built, installed without dependencies into a folder of its own, and used from there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

USES_THE_WHEEL = """
import sys
from importlib.metadata import entry_points

import torch

import h3opt

assert h3opt.__file__.startswith(sys.argv[1]), h3opt.__file__
assert {"norm_modulate", "fp8_linear"} <= {cls.name for cls in h3opt.list_passes()}
assert h3opt.load_profile("h200").name == "h200"
assert "h3opt" in torch._dynamo.list_backends(exclude_tags=())


class Gate(torch.nn.Module):
    def forward(self, x):
        value, gate = x.chunk(2, dim=-1)
        return value * torch.nn.functional.silu(gate)


x, gate = torch.randn(3, 8), Gate()
compiled = torch.compile(gate, backend="h3opt", options={"passes": ["fused_swiglu"]})
with torch.no_grad():
    assert torch.equal(compiled(x), gate(x))

from h3opt.reference import trained_pipeline  # the weights travel in the wheel
from h3opt.render.page import _template

assert trained_pipeline().transformer is not None
assert _template("report.html") is not None
console = [entry for entry in entry_points(group="console_scripts") if entry.name == "h3opt"]
assert console[0].load().__module__ == "h3opt.cli.app"
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("h3opt", "passes", "reference", "configs", "pyproject.toml", "README.md"):
        (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return next(out.glob("h3opt-*.whl"))


def test_the_wheel_has_every_module_and_data_file(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    inside = [file for file in (ROOT / "h3opt").rglob("*") if file.suffix in (".py", ".html", ".cu")]
    expected = {str(file.relative_to(ROOT)) for file in inside}
    for folder in ("passes", "reference", "configs"):
        inside = [file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".yaml", ".safetensors")]
        expected |= {f"h3opt/{file.relative_to(ROOT)}" for file in inside}
    assert expected <= packed, sorted(expected - packed)


def test_an_installed_wheel_runs_as_a_backend_of_torch_compile(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    installed = subprocess.run(command, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    script = tmp_path / "uses_the_wheel.py"
    script.write_text(USES_THE_WHEEL)
    # PYTHONPATH stands before an editable install of the same name.
    ran = subprocess.run(
        [sys.executable, str(script), str(site)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert ran.returncode == 0, ran.stderr
