"""A renamed pass keeps its former name for one version: in lists of passes, in profiles and on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import h3opt
from h3opt.cli.options import parse_pass_names
from h3opt.errors import PassDefinitionError, ProfileError
from h3opt.pass_api import registry
from h3opt.pass_api.registry import current_name, find_pass, list_passes, make_pass, register
from h3opt.profiles import load_profile

OLD, NEW = "memory_query_reuse", "tile_buffer_reuse"
WARNING = f"The pass '{OLD}' is now called '{NEW}'"


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what the test registers."""
    list_passes()
    for name in ("_registered", "_renamed"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


def profile(folder: Path, *rows: str) -> Path:
    path = folder / "own.yaml"
    path.write_text("name: own\ndevice: {type: cpu}\npasses:\n" + "".join(f"  - {{{row}}}\n" for row in rows), "utf-8")
    return path


def test_the_registry_resolves_a_former_name_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=WARNING):
        assert find_pass(OLD) is find_pass(NEW)
    with pytest.warns(DeprecationWarning, match=WARNING):
        assert make_pass(OLD) == make_pass(NEW)
    assert OLD not in [cls.name for cls in list_passes()]


@pytest.mark.filterwarnings("error")
def test_current_and_unknown_names_are_resolved_without_a_warning() -> None:
    assert current_name(NEW) == NEW and current_name("no_such_pass") == "no_such_pass"


def test_optimize_takes_a_former_name(pipe: Any) -> None:
    with pytest.warns(DeprecationWarning, match=WARNING), h3opt.optimize(pipe.vae, [OLD], "cpu") as opt:
        assert [one.name for one in opt.passes] == [NEW] and opt.report[NEW].matched == 1


def test_a_profile_may_name_a_pass_by_a_former_name(pipe: Any, tmp_path: Path) -> None:
    path = profile(tmp_path, f"pass: {OLD}")
    for passes in (None, [NEW], [OLD]):
        with pytest.warns(DeprecationWarning, match=WARNING), h3opt.optimize(pipe.vae, passes, path) as opt:
            assert [one.name for one in opt.passes] == [NEW]


def test_the_options_of_a_row_with_a_former_name_are_used(own_registry: None, pipe: Any, tmp_path: Path) -> None:
    @register
    @dataclass(frozen=True)
    class Batches(find_pass("tile_batch")):  # type: ignore[misc]
        """Batches of another name."""

        name = "batches"
        former_names = ("old_batches",)

    path = profile(tmp_path, "pass: old_batches, options: {max_tiles: 3}")
    with h3opt.optimize(pipe.vae, ["batches"], path) as opt:
        assert opt.passes[0].options()["max_tiles"] == 3


def test_a_profile_with_both_names_of_a_pass_is_refused(pipe: Any, tmp_path: Path) -> None:
    path = profile(tmp_path, f"pass: {OLD}", f"pass: {NEW}")
    load_profile(path)
    with pytest.raises(ProfileError, match=f"'{NEW}' and '{OLD}' are names of the same pass. Keep"):
        h3opt.optimize(pipe.vae, None, path)


def test_the_command_line_takes_a_former_name() -> None:
    with pytest.warns(DeprecationWarning, match=WARNING):
        assert parse_pass_names(f"{OLD},tile_graph") == [NEW, "tile_graph"]


def test_a_former_name_that_is_taken_is_refused(own_registry: None) -> None:
    cls = find_pass("tile_batch")
    for taken in ("tile_graph", OLD):
        members = {"__doc__": "Batches.", "name": "batches", "former_names": (taken,)}
        with pytest.raises(PassDefinitionError, match=f"pass name '{taken}' is taken by .*Tile"):
            register(dataclass(frozen=True)(type("Batches", (cls,), members)))
