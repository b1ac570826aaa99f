"""Explain a pass: the source of patterns and replacements, the sites in a pipeline, and the plan of its work."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import FunctionType
from typing import Any

from h3opt.compiler.optimize import optimize
from h3opt.compiler.report import PassReport
from h3opt.graph.matcher import Rule
from h3opt.pass_api import guards, patterns
from h3opt.pass_api.base import GraphPass, Pass, Plan, SchedulePass
from h3opt.pass_api.registry import find_pass, list_passes, make_pass
from h3opt.pipeline.generation import GenerationSettings, generate
from h3opt.pipeline.sequence_length import sequence_length
from h3opt.pipeline.steps import hide_progress_bars
from h3opt.pipeline.view import PipelineView


def explain(name: str) -> str:
    """Describe a pass in text: documentation, promise, options, order, and the source of all rules.

    Raises:
        UnknownPassError: there is no such pass.
    """
    facts = describe(name)
    options = ", ".join(f"{option} = {value!r}" for option, value in facts["options"].items())
    parts = [f"{name}: {facts['kind']} pass, promise {facts['promise']}", facts["doc"]]
    parts.append(f"defaults: {options}" if options else "options: none")
    if facts["after"]:
        parts.append("runs after: " + ", ".join(facts["after"]))
    if facts["conflicts"]:
        parts.append("excludes: " + ", ".join(facts["conflicts"]))
    if facts["happens_before"]:
        parts.append("happens before:\n" + _indented("\n".join(facts["happens_before"])))
    shown: dict[str, str] = {}
    for number, rule in enumerate(facts["rules"], 1):
        title = f"rule {number} of {len(facts['rules'])}"
        for role, source in rule.items():
            if source is not None:
                same = f"that of {shown[source]}" if source in shown else source
                parts.append(f"{title}, {role}\n{_indented(same)}")
                shown.setdefault(source, title)
    parts += [f"{helper}, used above\n{_indented(source)}" for helper, source in facts["helpers"].items()]
    parts.append("mutants the tests must catch:\n" + _indented("\n".join(facts["mutants"])))
    return "\n\n".join(parts)


def describe(name: str) -> dict[str, Any]:
    """Describe a pass as JSON-ready types.

    ``rules`` has the source text of each pattern, replacement and guard (``None`` without a guard), ``helpers`` the
    source text of the functions that these call in the file of the pass, in :mod:`h3opt.pass_api.patterns` and in
    :mod:`h3opt.pass_api.guards`.

    Raises:
        UnknownPassError: there is no such pass.
    """
    cls, instance = find_pass(name), make_pass(name)
    rules = instance.rules() if isinstance(instance, GraphPass) else ()
    return {
        "name": name,
        "kind": cls.kind,
        "promise": str(cls.promise),
        "doc": inspect.cleandoc(cls.__doc__ or ""),
        "options": instance.options(),
        "after": list(cls.after),
        "conflicts": list(cls.conflicts),
        "happens_before": list(instance.happens_before) if isinstance(instance, SchedulePass) else [],
        "rules": [{role: _source(function) for role, function in _roles(rule).items()} for rule in rules],
        "helpers": {helper.__name__: _source(helper) for helper in _helpers(rules)},
        "mutants": [mutant.why for mutant in instance.mutants()],
    }


def explain_sites(pipe: Any, name: str, settings: GenerationSettings | None = None) -> PassReport:
    """Run a generation with the pass and the passes that it builds on, and report where it matched and nearly matched.

    Args:
        pipe: a MiniMax-H3 pipeline with all components loaded; it is unmodified again at the end.
        name: name of the pass.
        settings: what to generate; by default the shortest clip.

    Raises:
        UnknownPassError: there is no such pass.
    """
    default = make_pass(name)
    # A pass given by name takes the options of the profile. Those may not fit a small canvas; a test instance does.
    explained = name if default.test_instance() == default else default.test_instance()
    passes: list[str | Pass] = [explained, *_with_prerequisites(name)[1:]]
    settings = settings or GenerationSettings(num_inference_steps=2)
    tokens = sequence_length(pipe, settings)
    with optimize(pipe, passes=passes, on_shortfall="warn", tokens=tokens) as optimized, ExitStack() as undo:
        hide_progress_bars(pipe, undo)
        generate(pipe, settings)
        return optimized.report[name]


def has_plan(name: str) -> bool:
    """Whether the pass divides work into pieces, so that :func:`explain_plan` has a plan to show."""
    return find_pass(name).plan is not Pass.plan


def explain_plan(name: str, view: PipelineView, latents: tuple[int, int, int]) -> Plan | None:
    """Plan how the pass, with default options, divides the work of a generation; ``None`` if it does not.

    Args:
        name: name of the pass.
        view: a pipeline, or parts of it on the meta device; nothing is computed.
        latents: frames, rows and columns of the video's latents.

    Raises:
        UnknownPassError: there is no such pass.
        H3OptError: the pass does not fit a video of this size.
    """
    return make_pass(name).plan(view, latents)


def sites_text(entry: PassReport) -> str:
    """Render the sites of a report entry as lines of text."""
    per_graph = ", ".join(
        f"{region} {matched}/{'?' if expected is None else expected}"
        for region, (matched, expected) in entry.per_region.items()
    )
    lines = [f"sites: {entry.counts}" + (f" over all modules; in one graph: {per_graph}" if per_graph else "")]
    if entry.declined:
        lines.append(f"declined: {entry.declined}")
    lines += [f"  matched {site}" for site in entry.sites]
    lines += [f"  refused {site}" for site in entry.refused]
    lines += [f"  nearly  {miss}" for miss in entry.near_misses]
    return "\n".join(lines)


def _with_prerequisites(name: str) -> list[str]:
    """The name of a pass, and the names of all passes that it comes after, directly or through others."""
    known = {cls.name: cls for cls in list_passes()}
    names, todo = [], [name]
    while todo:
        current = todo.pop()
        if current not in names and current in known:
            names.append(current)
            todo.extend(known[current].after)
    return names


def _roles(rule: Rule) -> dict[str, Callable[..., Any] | None]:
    return {"pattern": rule.pattern, "replacement": rule.replacement, "guard": rule.guard}


def _helpers(rules: Sequence[Rule]) -> list[FunctionType]:
    """Functions that rules call, directly or through others, in their file and among shared patterns and guards."""
    shown = [function for rule in rules for function in _roles(rule).values() if function is not None]
    helpers: list[FunctionType] = []
    todo = list(shown)
    while todo:
        for called in _called(todo.pop(0)):
            if called not in shown and called not in helpers:
                helpers.append(called)
                todo.append(called)
    return helpers


def _called(function: Callable[..., Any]) -> Iterator[FunctionType]:
    if not isinstance(function, FunctionType):
        return
    shown_modules = (function.__module__, patterns.__name__, guards.__name__)
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if isinstance(called, FunctionType) and called.__module__ in shown_modules:
            yield called


def _source(function: Callable[..., Any] | None) -> str | None:
    if function is None:
        return None
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip()
    except (OSError, TypeError):  # a function without a file, or another kind of callable
        return repr(function)


def _indented(text: str) -> str:
    return textwrap.indent(text, "  ")
