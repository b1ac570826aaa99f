"""Find where a pass changed the output first: the module, the number of the call, and the site inside.

The pipeline runs without the pass and with it. Checksums of the inputs and outputs of every block, and of every module
outside the captured blocks, are compared, and the first call with another output is examined further: a graph pass is
applied at one site at a time to the graph that ran, with the tensors that it ran with; for other passes the module is
called by itself and its submodules are compared. A Perceptual graph pass changes every call a little, so the call and
the site with the largest relative error of their own are examined, not the first. The tensors of the difference are
saved (:mod:`h3opt.verification.evidence`) and can be replayed (:mod:`h3opt.verification.replay`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from h3opt.compiler.capture import CapturedGraph
from h3opt.compiler.executors import direct
from h3opt.compiler.lowering import Lowering
from h3opt.compiler.session import Session
from h3opt.errors import PipelineError
from h3opt.graph.matcher import Match
from h3opt.graph.rewriter import apply_rules
from h3opt.metrics.bits import bits_equal
from h3opt.pass_api.base import GraphFacts, GraphPass, Pass
from h3opt.pass_api.ordering import in_order
from h3opt.pass_api.promises import Perceptual
from h3opt.pipeline.generation import GenerationSettings, generate
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.view import PipelineView
from h3opt.verification.evidence import CallEvidence, encode_arguments, tensors_in, write_evidence
from h3opt.verification.faults import Finding, find_head_faults

Call = tuple[str, int]
"""(path of a module, number of the call of that module, from 0)."""


@dataclass(frozen=True)
class Culprit:
    """The first call that a pass changed, or for a Perceptual graph pass the call that it changed most.

    Attributes:
        module: path of the module from the pipeline, e.g. ``transformer.transformer_blocks.0``; empty if nothing
            changed in a second run.
        call: number of the call, from 0.
        inputs_equal: whether the inputs of the call were equal; if not, code outside the modules changed them.
        site: the site inside, in words, or the submodule; ``None`` where no single site changes the output.
        moved: how the outputs differ, in words.
        alone: whether the module changes its output when it is called by itself too; if not, a value that was kept
            between calls changed it.
        faults: faults by name that the tensors of the site show.
        folder: where the tensors were saved.
        unsaved: why they were not saved.
        error: ``‖with − without‖ / ‖without‖`` of the call, on the inputs that it has without the pass, if it was
            measured.
    """

    module: str
    call: int
    inputs_equal: bool
    site: str | None
    moved: str
    alone: bool = True
    faults: list[Finding] = field(default_factory=list)
    folder: str | None = None
    unsaved: str | None = None
    error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The culprit as JSON-ready types."""
        return {**vars(self), "faults": [fault.to_dict() for fault in self.faults]}

    def __str__(self) -> str:
        if not self.module:
            return self.moved
        inputs = "" if self.inputs_equal else ", which already read other bits"
        inputs += "" if self.alone else ", by what was kept between calls"
        site = f", at {self.site}" if self.site else ""
        replay = f"; h3opt replay {self.folder}" if self.folder else ""
        unsaved = f"; no evidence was saved: {self.unsaved}" if self.unsaved else ""
        faults = "".join(f"; {fault}" for fault in self.faults)
        error = "" if self.error is None else f", relative error {self.error:.3g}"
        return f"{self.module}, call {self.call}{inputs}{site}: {self.moved}{error}{faults}{replay}{unsaved}"


def bisect_pass(
    session: Session, installed: Sequence[Pass], requests: Sequence[GenerationSettings], folder: Path
) -> Culprit:
    """Find the call that the last of ``installed`` changed first, or most, and save its tensors.

    Args:
        session: the session of a whole pipeline. Any passes may be on; other passes may be on afterwards.
        installed: the passes; the last pass changed the output.
        requests: clips to generate in this order; the last clip changed.
        folder: where the evidence goes. It appears whole or not at all; the culprit is returned in any case.
    """
    *others, tested = installed
    without, with_pass = _CallTrace(), _CallTrace()
    runs = ((others, without), (installed, with_pass))
    for passes, trace in runs:
        _generate_traced(session, passes, requests, trace)
    first = with_pass.first_changed(without)
    if first is None:
        return Culprit("", 0, True, None, "nothing moved when it was run again: the change depends on chance")
    relative = None
    if isinstance(tested, GraphPass) and isinstance(tested.promise, Perceptual):
        first, relative = _worst_call(session, others, tested, requests) or (first, None)
    path, number = first
    inputs_equal = without.inputs[first] == with_pass.inputs[first]
    for passes, trace in runs:
        trace.wanted = first
        _generate_traced(session, passes, requests, trace)
    evidence = CallEvidence(
        tested.name,
        tested.options(),
        "module",
        path,
        number,
        [(other.name, other.options()) for other in others],
        dtype=session.view.dtype,
        device=session.device.type,
    )
    evidence.inputs, evidence.arguments = encode_arguments(without.arguments)
    evidence.expected, evidence.actual = without.returned, with_pass.returned
    site, alone = None, True
    if isinstance(tested, GraphPass) and without.graph is not None:
        site = _first_site(session, others, tested, without.graph, evidence)
    elif not isinstance(tested, GraphPass) and inputs_equal:
        site, alone = _first_submodule(session, others, tested, path, without.arguments, evidence)
    evidence.site = site
    unsaved = None
    try:
        write_evidence(folder, evidence)
    except PipelineError as error:  # a full disk must not cost the verdict
        unsaved = str(error)
    heads = getattr(getattr(session.view.transformer, "config", None), "num_attention_heads", 0)
    faults = [
        fault
        for expected, actual in zip(evidence.expected, evidence.actual, strict=False)
        for fault in find_head_faults(site or path, expected, actual, heads)
    ]
    saved_in = None if unsaved else str(folder)
    return Culprit(path, number, inputs_equal, site, evidence.difference, alone, faults, saved_in, unsaved, relative)


def call_submodules(
    view: PipelineView, passes: Sequence[Pass], path: str, arguments: tuple[Any, ...], wanted: Call | None = None
) -> tuple[Any, _CallTrace]:
    """Call the module at ``path`` by itself with format and schedule passes installed and nothing captured.

    Args:
        view: the pipeline.
        passes: the passes; graph passes among them do nothing.
        path: path of the module from the pipeline.
        arguments: (positional arguments, keyword arguments).
        wanted: the call with tensors to keep.

    Returns:
        the output of the module, and a trace of the calls of all its submodules.
    """
    trace = _CallTrace(wanted)
    with ExitStack() as undo, torch.no_grad():
        for item in in_order(passes):
            if not isinstance(item, GraphPass):
                for part in view.views:
                    if item.applies(view.device, part) is None:
                        item.install(part, undo)  # type: ignore[attr-defined]
        component, _, rest = path.partition(".")
        module = getattr(view, component).get_submodule(rest)
        trace.watch({f"{path}.{name}" if name else path: part for name, part in module.named_modules()}, undo)
        args, kwargs = arguments
        return module(*args, **kwargs), trace


class _CallTrace:
    """Checksums of the inputs and outputs of module calls in one run, and the tensors of the wanted call.

    Attributes:
        wanted: the call with tensors to keep.
        inputs: call → checksums of the tensors that it read.
        outputs: call → checksums of the tensors that it returned, in the order in which the calls ended.
        arguments: copies of the arguments of the wanted call, positional and by keyword.
        returned: copies of the tensors that the wanted call returned.
        graph: the captured graph that the wanted call ran, and the graph's arguments.
    """

    def __init__(self, wanted: Call | None = None) -> None:
        self.wanted = wanted
        self.inputs: dict[Call, Any] = {}
        self.outputs: dict[Call, Any] = {}
        self.arguments: tuple[Any, ...] = ((), {})
        self.returned: list[torch.Tensor] = []
        self.graph: tuple[CapturedGraph, tuple[Any, ...]] | None = None
        self._counts: dict[str, itertools.count[int]] = {}

    def watch(self, modules: Mapping[str, torch.nn.Module], undo: ExitStack) -> None:
        """Trace every call of ``modules``."""
        self._counts = {}
        for path, module in modules.items():
            wrap_calls(module, self._tracer(path), undo)

    def first_changed(self, before: _CallTrace) -> Call | None:
        """The first call, in the order in which calls ended, that returned other bits than in ``before``.

        Calls with outputs of the same shapes come first: where shapes differ, the pass has grouped the work otherwise.
        """
        changed = [call for call in self.outputs if before.outputs.get(call, self.outputs[call]) != self.outputs[call]]
        comparable = (call for call in changed if _shapes(before.outputs[call]) == _shapes(self.outputs[call]))
        return next(comparable, changed[0] if changed else None)

    def _tracer(self, path: str) -> Callable[..., Any]:
        def traced(proceed: Any, *args: Any, **kwargs: Any) -> Any:
            call = path, next(self._counts.setdefault(path, itertools.count()))
            self.inputs[call] = _checksums((args, kwargs))
            if call == self.wanted:
                self.arguments = _copy_tensors((args, kwargs))  # before the call, which may write to its arguments
            result = proceed(*args, **kwargs)
            self.outputs[call] = _checksums(result)
            if call == self.wanted:
                self.returned = [tensor.clone() for tensor in tensors_in(result)]
            return result

        return traced


def _generate_traced(
    session: Session, passes: Sequence[Pass], requests: Sequence[GenerationSettings], trace: _CallTrace
) -> None:
    """Generate all clips with ``passes`` and trace the last clip."""
    session.change_passes(passes)
    for request in requests[:-1]:
        generate(session.view.pipe, request)
    with ExitStack() as undo:
        modules = _uncaptured_modules(session)
        trace.watch(modules, undo)
        if trace.wanted is not None:
            _keep_graph(session, modules[trace.wanted[0]], trace, undo)
        generate(session.view.pipe, requests[-1])


def _uncaptured_modules(session: Session) -> dict[str, torch.nn.Module]:
    """Modules by path, with captured modules but without the modules inside them, which are not called any more."""
    captured = {id(module) for region in session.regions for module in region.modules}
    modules: dict[str, torch.nn.Module] = {}

    def add(path: str, module: torch.nn.Module) -> None:
        modules[path] = module
        if id(module) not in captured:
            for name, child in module.named_children():
                add(f"{path}.{name}", child)

    for name in ("transformer", "transformer_ref", "vae", "audio_vae"):
        component = getattr(session.view, name)
        if component is not None:
            add(name, component)
    return modules


def _keep_graph(session: Session, module: torch.nn.Module, trace: _CallTrace, undo: ExitStack) -> None:
    """Keep the graph that the wanted call of ``module`` runs, with the graph's arguments."""
    regions = (region for region in session.regions if any(module is member for member in region.modules))
    region = next(regions, None)
    if region is None or trace.wanted is None:
        return
    wanted = trace.wanted

    def keep(captured: CapturedGraph, args: tuple[Any, ...]) -> None:
        if wanted in trace.inputs and wanted not in trace.outputs:  # the wanted call has begun and not ended
            trace.graph = captured, _copy_tensors(args)

    trace.inputs.clear()
    trace.outputs.clear()
    region.listener = keep
    undo.callback(setattr, region, "listener", None)


def _worst_call(
    session: Session, others: Sequence[Pass], tested: GraphPass, requests: Sequence[GenerationSettings]
) -> tuple[Call, float] | None:
    """Find the call of a captured module with the largest relative error by ``tested``, on inputs without the pass.

    Returns:
        the call and the error; ``None`` if no call changes.
    """
    counts: Counter[str] = Counter()
    graphs: dict[CapturedGraph, list[Callable[..., Any]]] = {}
    worst: tuple[Call, float] | None = None

    def measure(captured: CapturedGraph, args: tuple[Any, ...]) -> None:
        nonlocal worst
        path = paths[captured.owner.running]
        call = path, counts[path]
        counts[path] += 1
        if captured not in graphs:
            graphs[captured] = [direct(_lower(session, captured, passes), []) for passes in (others, [*others, tested])]
        with torch.no_grad():
            without, with_pass = (tensors_in(run(*_copy_tensors(args))) for run in graphs[captured])
        error = max(map(_relative_error, without, with_pass), default=0.0)
        if error > (0.0 if worst is None else worst[1]):
            worst = call, error

    session.change_passes(others)
    for request in requests[:-1]:
        generate(session.view.pipe, request)
    paths = {id(module): path for path, module in _uncaptured_modules(session).items()}
    with ExitStack() as undo:
        for region in session.regions:
            region.listener = measure
            undo.callback(setattr, region, "listener", None)
        generate(session.view.pipe, requests[-1])
    return worst


def _graph_passes(session: Session, passes: Sequence[Pass]) -> list[GraphPass]:
    return [item for item in in_order(passes) if isinstance(item, GraphPass) and session.applies(item)]


def _lower(session: Session, captured: CapturedGraph, passes: Sequence[Pass]) -> GraphModule:
    """Rewrite a captured graph with the graph passes among ``passes``, without probes."""
    chosen = _graph_passes(session, passes)
    return Lowering("warn", probe=False).run(captured.graph, chosen, _facts(captured, chosen))[0]


def _facts(captured: CapturedGraph, passes: Sequence[GraphPass]) -> GraphFacts:
    region = captured.owner.region
    return GraphFacts(region.name, region.holds or {region.name: 1}, passes=tuple(passes))


def _relative_error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """``‖actual − expected‖ / ‖expected‖``; infinite where it is not a number."""
    if not expected.is_floating_point() or bits_equal(expected, actual):
        return 0.0
    size = float(torch.linalg.vector_norm(expected.float()))
    change = float(torch.linalg.vector_norm(actual.float() - expected.float()))
    return change / size if size and change == change else math.inf


def _first_site(
    session: Session,
    others: Sequence[Pass],
    tested: GraphPass,
    ran: tuple[CapturedGraph, tuple[Any, ...]],
    evidence: CallEvidence,
) -> str | None:
    """Find the first site of ``tested`` that changes the output of the graph; its tensors go into ``evidence``.

    For a Perceptual pass, the site that changes the output most is found.
    """
    captured, args = ran
    graph_passes = _graph_passes(session, [*others, tested])
    facts = _facts(captured, graph_passes)

    def lower(chosen: int | None) -> GraphModule:
        """Rewrite the graph with ``tested`` at the chosen site alone, or at no site."""
        numbers = itertools.count()

        def veto(item: GraphPass, match: Match) -> str | None:
            return "bisecting" if item is tested and next(numbers) != chosen else None

        return Lowering("warn", probe=False, veto=veto).run(captured.graph, graph_passes, facts)[0]

    earlier = graph_passes[: graph_passes.index(tested)]
    stage, _ = Lowering("warn", probe=False).run(captured.graph, earlier, facts)
    matches: list[Match] = []
    apply_rules(tuple(tested.rules()), stage, lambda match: matches.append(match) or "bisecting")  # type: ignore[func-returns-value]
    with torch.no_grad():
        expected = tensors_in(direct(lower(None), [])(*args))
        chosen, largest = None, 0.0
        for number, match in enumerate(matches):
            actual = tensors_in(direct(lower(number), [])(*args))
            if all(map(bits_equal, expected, actual)):
                continue
            error = max(map(_relative_error, expected, actual))
            if chosen is None or error > largest:
                chosen, largest = match, error
            if not isinstance(tested.promise, Perceptual):
                break
        if chosen is None:
            return None
        values = _BoundValues(stage, chosen).of(args)
        arguments = {name: tree_map_only(Node, values.__getitem__, bound) for name, bound in chosen.bound.items()}
        rules = list(tested.rules())
        evidence.kind = "site"
        evidence.rule = next(n for n, rule in enumerate(rules) if rule.pattern is chosen.rule.pattern)
        evidence.inputs, evidence.arguments = encode_arguments(((), arguments))
        evidence.expected = tensors_in(chosen.rule.pattern(**arguments))
        evidence.actual = tensors_in(chosen.rule.replacement(**arguments))
        return chosen.site


def _first_submodule(
    session: Session,
    others: Sequence[Pass],
    tested: Pass,
    path: str,
    arguments: tuple[Any, ...],
    evidence: CallEvidence,
) -> tuple[str | None, bool]:
    """Call the module at ``path`` by itself and find its first submodule with another output.

    Returns:
        the path of the submodule, or ``None`` if it is the module itself; and whether any output differs.
    """
    session.uninstall()
    _, without = call_submodules(session.view, others, path, arguments)
    _, with_pass = call_submodules(session.view, [*others, tested], path, arguments)
    first = with_pass.first_changed(without)
    if first is None or first[0] == path:
        return None, first is not None
    _, without = call_submodules(session.view, others, path, arguments, first)
    _, with_pass = call_submodules(session.view, [*others, tested], path, arguments, first)
    evidence.expected, evidence.actual = without.returned, with_pass.returned
    evidence.module, evidence.call = first[0], 0
    evidence.inputs, evidence.arguments = encode_arguments(without.arguments)
    return first[0], True


class _BoundValues(Interpreter):
    """Runs a graph and keeps the values of the nodes that a match binds to its parameters."""

    def __init__(self, graph: GraphModule, match: Match) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self._wanted = {leaf for leaf in tree_leaves(dict(match.bound)) if isinstance(leaf, Node)}
        self._values: dict[Node, Any] = {}

    def of(self, args: tuple[Any, ...]) -> dict[Node, Any]:
        self.run(*args)
        return self._values

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self._wanted:
            self._values[n] = result
        return result


def _copy_tensors(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)


def _checksums(value: Any) -> tuple[Any, ...]:
    return tuple((tuple(tensor.shape), str(tensor.dtype), _checksum(tensor)) for tensor in tensors_in(value))


def _shapes(checksums: tuple[Any, ...]) -> list[Any]:
    return [(shape, dtype) for shape, dtype, _ in checksums]


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHT_STEP = 0x9E3779B97F4A7C15 - 2**64  # 2**64 over the golden ratio: neighbouring places get unlike weights


def _checksum(tensor: torch.Tensor) -> int:
    """Sum the bits of all elements, weighted by their place, modulo 2**64; every NaN counts the same."""
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point():
        flat = flat.double() if flat.element_size() == 1 else flat
        flat = flat.masked_fill(flat.isnan(), float("nan")).view(_INTEGERS[flat.element_size()])
    total = 0
    for start in range(0, flat.numel(), 1 << 22):
        part = flat[start : start + (1 << 22)].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=part.device) * _WEIGHT_STEP + 1
        total += int((part * (place ^ (place >> 29))).sum())
    return total % 2**64
