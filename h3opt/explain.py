"""``h3opt explain``: what a pass looks for, what it puts there, and where it fired or nearly did."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from h3opt import patterns
from h3opt.components import PipelineView
from h3opt.generation import GenerationSettings, generate
from h3opt.protocol import GraphPass, Pass, SchedulePass
from h3opt.registry import find_pass, list_passes, make_pass
from h3opt.report import PassReport
from h3opt.session import optimize


def explain(name: str) -> str:
    """Docstring, promise, options, order, and for a graph pass each pattern with its replacement.

    Raises:
        UnknownPassError: there is no such pass.
    """
    cls = find_pass(name)
    instance = make_pass(name)
    parts = [f"{name}: {cls.kind} pass, promise {cls.promise}", inspect.cleandoc(cls.__doc__ or "")]
    options = instance.options()
    parts.append("options: " + (", ".join(f"{key} = {value!r}" for key, value in options.items()) or "none"))
    if cls.after:
        parts.append("runs after: " + ", ".join(cls.after))
    if cls.conflicts:
        parts.append("excludes: " + ", ".join(cls.conflicts))
    if isinstance(instance, SchedulePass):
        parts.append("happens before:\n" + "\n".join(f"  {sentence}" for sentence in instance.happens_before))
    if isinstance(instance, GraphPass):
        parts += _rules(instance)
    parts.append("mutants the tests must catch:\n" + "\n".join(f"  {mutant.why}" for mutant in instance.mutants()))
    return "\n\n".join(parts)


def explain_sites(pipe: Any, name: str, settings: GenerationSettings | None = None) -> PassReport:
    """Run one generation with the pass, and the passes it builds on, and report where it fired and nearly fired.

    Raises:
        UnknownPassError: there is no such pass.
    """
    find_pass(name)
    with optimize(pipe, passes=_with_what_it_builds_on(name), on_shortfall="warn") as opt, ExitStack() as undo:
        PipelineView.of(pipe).hide_step_bars(undo)
        generate(pipe, settings or GenerationSettings())
        return opt.report[name]


def sites_text(entry: PassReport) -> str:
    """A report entry as lines."""
    lines = [f"sites: {entry.counts}"]
    if entry.declined:
        lines.append(f"declined: {entry.declined}")
    lines += [f"  matched {site}" for site in entry.sites]
    lines += [f"  refused {site}" for site in entry.refused]
    lines += [f"  nearly  {miss}" for miss in entry.near_misses]
    return "\n".join(lines)


def _with_what_it_builds_on(name: str) -> list[str]:
    known = {cls.name: cls for cls in list_passes()}
    names, todo = [], [name]
    while todo:
        one = todo.pop()
        if one not in names and one in known:
            names.append(one)
            todo.extend(known[one].after)
    return names


def _rules(instance: Pass) -> list[str]:
    assert isinstance(instance, GraphPass)
    rules = instance.rules()
    parts = []
    shared: dict[str, str] = {}
    for number, rule in enumerate(rules, 1):
        title = f"rule {number} of {len(rules)}"
        parts.append(f"{title}, pattern\n{_source(rule.pattern)}\n\n{title}, replacement\n{_source(rule.replacement)}")
        for helper, function in inspect.getmembers(patterns, inspect.isfunction):
            called = rule.pattern is not function and helper in rule.pattern.__code__.co_names
            if called and function.__module__ == patterns.__name__:
                shared[helper] = _source(function)
        if rule.guard is not None:
            parts[-1] += f"\n\n{title}, guard\n{_source(rule.guard)}"
    return parts + [f"used above\n{source}" for source in shared.values()]


def _source(function: Callable[..., Any]) -> str:
    return "\n".join(f"  {line}" for line in textwrap.dedent(inspect.getsource(function)).splitlines())
