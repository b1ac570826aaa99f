"""The registry, the order of passes, and the errors about wrong pass classes and packages."""

from __future__ import annotations

import importlib.metadata
import itertools
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from h3opt.errors import (
    PassConflictError,
    PassDefinitionError,
    PassOptionError,
    PassOrderError,
    UnknownPassError,
)
from h3opt.pass_api import registry
from h3opt.pass_api.base import FormatPass, GraphPass, SchedulePass
from h3opt.pass_api.ordering import in_order
from h3opt.pass_api.promises import Exact, Rounding
from h3opt.pass_api.registry import find_pass, list_passes, make_pass, register


@pytest.fixture
def own_registry(monkeypatch):
    """What the test registers is forgotten afterwards."""
    list_passes()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_loaded", set(registry._loaded))


def a_pass(name: str, kind: type = GraphPass, after: tuple[str, ...] = (), conflicts: tuple[str, ...] = ()) -> Any:
    """An unregistered pass that does nothing."""
    members = {
        "__doc__": "Does nothing, fast.",
        "name": name,
        "promise": Exact(),
        "after": after,
        "conflicts": conflicts,
        "happens_before": ("Nothing before anything.",),
        "rules": lambda self: (),
        "example": lambda self, draw: None,
        "expect": lambda self, facts: 0,
        "install": lambda self, view, undo: 0,
        "mutants": lambda self: (),
    }
    return dataclass(frozen=True)(type(name.title(), (kind,), members))


# --- listing ---------------------------------------------------------------------------------------------------


def test_every_file_of_the_package_is_a_pass():
    (folder,) = importlib.import_module("h3opt.passes").__path__
    files = {path.stem for path in Path(folder).glob("*.py")}
    assert {cls.name for cls in list_passes()} == files - {"__init__"}


def test_passes_are_listed_by_kind_then_name():
    listed = [(cls.kind, cls.name) for cls in list_passes()]
    assert listed == sorted(listed, key=lambda row: (["format", "graph", "schedule"].index(row[0]), row[1]))


def test_a_pass_is_made_with_its_options():
    assert make_pass("tile_batch", {"max_tiles": 3}).options() == {"max_tiles": 3, "memory_budget": "8GiB"}
    assert make_pass("tile_batch") == make_pass("tile_batch", {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("residual_fole", "did you mean 'residual_fold'"),
        ("FP8_LINEAR", "There is no pass called 'FP8_LINEAR'"),
        ("", "There is no pass called ''"),
    ],
)
def test_an_unknown_name_is_met_with_the_nearest(name, message):
    with pytest.raises(UnknownPassError, match=message):
        find_pass(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tile": 3}, "did you mean 'max_tiles'.*Its options are: max_tiles"),
        ({"max_tiles": 0}, "at least 1, got 0"),
        ({"max_tiles": "8"}, "whole number"),
        ({"max_tiles": True}, "whole number"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options, message):
    with pytest.raises(PassOptionError, match=message):
        make_pass("tile_batch", options)


def test_an_option_of_a_pass_without_options_is_refused():
    with pytest.raises(PassOptionError, match="It has no options"):
        make_pass("fused_swiglu", {"fast": True})


# --- order -----------------------------------------------------------------------------------------------------


def names(*passes: Any) -> list[str]:
    return [item.name for item in in_order(passes)]


def test_a_pass_runs_after_those_it_names_whatever_the_order_given():
    first, second, third = a_pass("zz")(), a_pass("mm", after=("zz",))(), a_pass("aa", after=("mm",))()
    for given in ((first, second, third), (third, second, first), (second, third, first)):
        assert names(*given) == ["zz", "mm", "aa"]


def test_ties_go_by_kind_then_name():
    given = [
        a_pass("schedule_a", SchedulePass)(),
        a_pass("graph_b")(),
        a_pass("graph_a")(),
        a_pass("format_z", FormatPass)(),
    ]
    assert names(*given) == ["format_z", "graph_a", "graph_b", "schedule_a"]


def test_after_a_pass_that_is_off_means_nothing():
    assert names(a_pass("b", after=("not_there",))(), a_pass("a")()) == ["a", "b"]


def test_after_beats_kind():
    assert names(a_pass("late", FormatPass, after=("early",))(), a_pass("early", SchedulePass)()) == ["early", "late"]


def test_passes_that_wait_for_each_other_are_named():
    free, left, right = a_pass("free")(), a_pass("left", after=("right",))(), a_pass("right", after=("left",))()
    with pytest.raises(PassOrderError, match="left → right → left") as error:
        in_order([free, left, right])
    assert "free" not in str(error.value)


def test_the_cycle_is_shown_without_the_passes_that_wait_for_it():
    """``early`` comes before the cycle and ``late`` after it: neither is part of it."""
    passes = [
        a_pass("late", after=("first",))(),
        a_pass("second", after=("third",))(),
        a_pass("first", after=("second", "early"))(),
        a_pass("third", after=("first", "absent"))(),
        a_pass("early")(),
    ]
    for given in itertools.permutations(passes):
        with pytest.raises(PassOrderError, match="another: first → second → third → first. Remove"):
            in_order(given)


def test_a_pass_given_twice_is_refused():
    with pytest.raises(PassConflictError, match="'tile_batch' is given twice"):
        in_order([make_pass("tile_batch"), make_pass("tile_batch", {"max_tiles": 2})])


@pytest.mark.parametrize("given", [(0, 1), (1, 0)])
def test_passes_that_exclude_each_other_are_refused_either_way_round(given):
    pair = [a_pass("left", conflicts=("right",))(), a_pass("right")()]
    with pytest.raises(PassConflictError, match="'left' and 'right' exclude each other"):
        in_order([pair[number] for number in given])
    assert names(pair[0]) == ["left"]


# --- what a class has to have ----------------------------------------------------------------------------------


def violation(change: str) -> type:
    """A pass class that violates the protocol in a single point."""
    if change == "not a pass":
        return type("Thing", (), {"name": "thing", "promise": Exact()})
    cls = a_pass("thing", SchedulePass if change == "no ordering" else GraphPass)
    if change == "no name":
        del cls.name
    elif change == "unusable name":
        cls.name = "my-pass"
    elif change == "no promise":
        del cls.promise
    elif change == "promise of another kind":
        cls.promise = "exact"
    elif change == "no bound at its sites":
        cls.promise = Rounding(None)
    elif change == "no docstring":
        cls.__doc__ = None
    elif change == "no ordering":
        cls.happens_before = ()
    elif change == "no rules":
        members = {"__doc__": "x", "name": "thing", "promise": Exact(), "mutants": lambda self: ()}
        cls = dataclass(frozen=True)(type("Thing", (GraphPass,), members))
    elif change == "not frozen":

        class Thing(cls):
            """A subclass that is not frozen."""

        Thing.__dataclass_params__ = type("P", (), {"frozen": False})
        cls = Thing
    return cls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("not a pass", "is not a FormatPass, GraphPass or SchedulePass"),
        ("no name", "has no usable name"),
        ("unusable name", "has no usable name"),
        ("no promise", "makes no promise"),
        ("promise of another kind", "makes no promise"),
        ("no bound at its sites", "promises rounding without a bound at its sites"),
        ("no docstring", "has no docstring"),
        ("no ordering", "states no ordering"),
        ("no rules", "leaves out example, rules"),
        ("not frozen", "is not a frozen dataclass"),
    ],
)
def test_a_class_that_breaks_the_protocol_is_told_how_to_mend_it(own_registry, change, message):
    with pytest.raises(PassDefinitionError, match=message):
        register(violation(change))
    assert "thing" not in registry._registered


def test_a_class_that_keeps_the_protocol_is_registered(own_registry):
    cls = register(a_pass("thing"))
    assert find_pass("thing") is cls and cls in list_passes()


def test_a_name_that_is_taken_is_refused_and_says_by_whom(own_registry):
    register(a_pass("thing"))
    other = type("Other", (a_pass("thing"),), {"__doc__": "Another."})
    with pytest.raises(PassDefinitionError, match="'thing' is taken by .*Thing"):
        register(dataclass(frozen=True)(other))


def test_the_same_class_may_be_registered_again_as_a_reload_does(own_registry):
    register(a_pass("thing"))
    again = register(a_pass("thing"))
    assert find_pass("thing") is again


# --- passes of other packages ----------------------------------------------------------------------------------

OUTSIDE = '''
"""One file: a pass of somebody else's."""

from dataclasses import dataclass

import torch

from h3opt.pass_api.promises import Exact, Rounding
from h3opt.graph.matcher import Rule
from h3opt.pass_api.base import GraphPass, Mutant
from h3opt.pass_api.examples import Decline, Example
from h3opt.pass_api.registry import register
from h3opt.pass_api.testing import with_replacement

aten = torch.ops.aten


def twice(x):
    return aten.neg(aten.neg(x))


def once(x):
    return aten.clone(x)


@register
@dataclass(frozen=True)
class DoubleNegation(GraphPass):
    """Two negations are none."""

    name = "double_negation"
    after = ("norm_modulate",)
    promise = Exact()

    def rules(self):
        return (Rule(twice, once),)

    def example(self, draw):
        return Example(lambda x: -(-x), (draw.tensor(draw.tokens, draw.channels),))

    def declines(self):
        return (Decline("one negation", lambda draw: Example(lambda x: -x, (draw.tensor(3),))),)

    def mutants(self):
        def negated(x):
            return aten.neg(x)

        return (Mutant("one is left", with_replacement(self, negated)),)
'''

USES_IT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import h3opt
from h3opt.pass_api.ordering import in_order
from h3opt.pass_api.registry import make_pass
from h3opt.pass_api.testing import check_pass

assert "double_negation" in [cls.name for cls in h3opt.list_passes()]
check_pass(make_pass("double_negation"))
assert in_order([make_pass("double_negation"), make_pass("norm_modulate")])[1].name == "double_negation"
from h3opt.compiler import executors
graphs, direct = [], executors.EXECUTORS["direct"]
executors.EXECUTORS["direct"] = lambda graph, inputs: graphs.append(graph) or direct(graph, inputs)
compiled = torch.compile(lambda x: -(-x) + 1.0, backend="h3opt", options={"passes": ["double_negation"]})
with torch.no_grad():
    assert torch.equal(compiled(torch.arange(4.0)), torch.arange(4.0) + 1)
assert "neg" not in str(graphs[0].graph), graphs[0].graph
print("used")
"""


@pytest.fixture
def installed(tmp_path):
    """A directory that holds an installed package with one pass in one file."""
    (tmp_path / "outside_passes.py").write_text(OUTSIDE)
    info = tmp_path / "outside_passes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-passes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[h3opt.passes]\ndouble_negation = outside_passes\n")
    return tmp_path


def test_one_file_in_another_package_is_listed_checked_and_run(installed):
    script = installed / "uses_it.py"
    script.write_text(USES_IT)
    done = subprocess.run(
        [sys.executable, str(script), str(installed)], capture_output=True, text=True, timeout=120, cwd=installed
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "used"


def test_a_pass_of_another_package_is_explained_on_the_command_line(installed):
    pytest.importorskip("h3opt.cli")
    code = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv.pop(1))
        from h3opt.cli.app import main
        sys.argv[0] = "h3opt"
        main()
        """
    )
    for command in (["passes"], ["explain", "double_negation"]):
        done = subprocess.run(
            [sys.executable, "-c", code, str(installed), *command], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert "double_negation" in done.stdout


def test_a_broken_pass_package_is_named(own_registry, monkeypatch):
    entry = importlib.metadata.EntryPoint("broken", "h3opt_no_such_module", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(PassDefinitionError, match=r"pass package 'broken' \(h3opt_no_such_module\) cannot be imported"):
        list_passes()


def test_a_pass_that_does_nothing_at_all_still_follows_the_protocol():
    instance = a_pass("thing", FormatPass)()
    assert instance.install(None, ExitStack()) == 0 and instance.applies(None, None) is None
