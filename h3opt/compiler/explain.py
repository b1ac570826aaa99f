"""``h3opt explain``: what a pass looks for, what it puts there, and where it fired or nearly did."""

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
from h3opt.pipeline.steps import hide_progress_bars
from h3opt.pipeline.view import PipelineView


def explain(name: str) -> str:
    """Docstring, promise, options, order, and for a graph pass each pattern with its replacement and guard.

    Raises:
        UnknownPassError: there is no such pass.
    """
    found = describe(name)
    options = ", ".join(f"{option} = {value!r}" for option, value in found["options"].items())
    parts = [f"{name}: {found['kind']} pass, promise {found['promise']}", found["doc"]]
    parts.append(f"defaults: {options}" if options else "options: none")
    if found["after"]:
        parts.append("runs after: " + ", ".join(found["after"]))
    if found["conflicts"]:
        parts.append("excludes: " + ", ".join(found["conflicts"]))
    if found["happens_before"]:
        parts.append("happens before:\n" + _indented("\n".join(found["happens_before"])))
    shown: dict[str, str] = {}
    for number, rule in enumerate(found["rules"], 1):
        title = f"rule {number} of {len(found['rules'])}"
        for role, source in rule.items():
            if source is not None:
                same = f"that of {shown[source]}" if source in shown else source
                parts.append(f"{title}, {role}\n{_indented(same)}")
                shown.setdefault(source, title)
    parts += [f"{helper}, used above\n{_indented(source)}" for helper, source in found["helpers"].items()]
    parts.append("mutants the tests must catch:\n" + _indented("\n".join(found["mutants"])))
    return "\n\n".join(parts)


def describe(name: str) -> dict[str, Any]:
    """What :func:`explain` says, as JSON-ready types.

    ``rules`` holds the source text of each pattern, replacement and guard (``None`` without one), ``helpers`` that of
    the functions these call in the pass's own file and in :mod:`h3opt.pass_api.patterns`.

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
    """Run one generation with the pass, and the passes it builds on, and report where it fired and nearly fired.

    Args:
        pipe: a MiniMax-H3 pipeline with all components loaded; it is left as it was found.
        name: of the pass.
        settings: what to generate; the shortest clip if left out.

    Raises:
        UnknownPassError: there is no such pass.
    """
    one = make_pass(name)
    # by name it takes the profile's options; a trial says that these may not fit the canvas
    tried: list[str | Pass] = [
        name if one.test_instance() == one else one.test_instance(),
        *_with_what_it_builds_on(name)[1:],
    ]
    with optimize(pipe, passes=tried, on_shortfall="warn") as opt, ExitStack() as undo:
        hide_progress_bars(pipe, undo)
        generate(pipe, settings or GenerationSettings(num_inference_steps=2))
        return opt.report[name]


def has_plan(name: str) -> bool:
    """Whether the pass cuts work into pieces, so that :func:`explain_plan` has something to show."""
    return find_pass(name).plan is not Pass.plan


def explain_plan(name: str, view: PipelineView, latents: tuple[int, int, int]) -> Plan | None:
    """How the pass, with its default options, cuts up the work of one generation; ``None`` if it does not.

    Args:
        name: of the pass.
        view: a pipeline, or its parts on the meta device: nothing is computed.
        latents: frames, rows and columns of the video's latents.

    Raises:
        UnknownPassError: there is no such pass.
        H3OptError: the pass does not fit a video of this size.
    """
    return make_pass(name).plan(view, latents)


def sites_text(entry: PassReport) -> str:
    """A report entry as lines."""
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


def _with_what_it_builds_on(name: str) -> list[str]:
    known = {cls.name: cls for cls in list_passes()}
    names, todo = [], [name]
    while todo:
        one = todo.pop()
        if one not in names and one in known:
            names.append(one)
            todo.extend(known[one].after)
    return names


def _roles(rule: Rule) -> dict[str, Callable[..., Any] | None]:
    return {"pattern": rule.pattern, "replacement": rule.replacement, "guard": rule.guard}


def _helpers(rules: Sequence[Rule]) -> list[FunctionType]:
    """What the functions of rules call, directly or not, in their own file and among the shared patterns and guards."""
    shown = [function for rule in rules for function in _roles(rule).values() if function is not None]
    found: list[FunctionType] = []
    todo = list(shown)
    while todo:
        for called in _called(todo.pop(0)):
            if called not in shown and called not in found:
                found.append(called)
                todo.append(called)
    return found


def _called(function: Callable[..., Any]) -> Iterator[FunctionType]:
    if not isinstance(function, FunctionType):
        return
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if isinstance(called, FunctionType) and called.__module__ in (
            function.__module__,
            patterns.__name__,
            guards.__name__,
        ):
            yield called


def _source(function: Callable[..., Any] | None) -> str | None:
    if function is None:
        return None
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip()
    except (OSError, TypeError):  # typed in by hand, or not a plain function
        return repr(function)


def _indented(text: str) -> str:
    return textwrap.indent(text, "  ")
