"""Where a pass moved the output first: the module, which call of it, and the site inside, with tensors that show it.

The pipeline runs without the pass and with it, and checksums of what every module outside the captured blocks, and
every block, reads and returns are compared: the first call whose result differs is where to look. Inside it, a graph
pass is applied at one site at a time to the graph that ran, on the tensors it ran with; for other passes the module is
called by itself and its submodules are compared. The tensors of the culprit are saved
(:mod:`h3opt.verification.evidence`) and can be replayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from h3opt.compiler.capture import CapturedGraph
from h3opt.compiler.lowering import Lowering
from h3opt.compiler.session import Session
from h3opt.errors import PipelineError
from h3opt.graph.matcher import Match
from h3opt.graph.rewriter import apply_rules
from h3opt.metrics.bits import bits_equal
from h3opt.pass_api.base import GraphFacts, GraphPass, Pass
from h3opt.pass_api.ordering import in_order
from h3opt.pipeline.generation import GenerationSettings, generate
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.view import PipelineView
from h3opt.verification.evidence import Evidence, flatten, tensors_in, write_evidence
from h3opt.verification.faults import Finding, find_head_faults

Call = tuple[str, int]
"""(path of a module, which call of it)."""


@dataclass(frozen=True)
class Culprit:
    """What moved first.

    Attributes:
        module: its path from the pipeline, e.g. ``transformer.transformer_blocks.0``; empty if nothing moved again.
        call: which call of it, from 0.
        inputs_equal: whether it read equal bits; if not, what feeds it moved, and is no module.
        site: the site inside, in words, or the submodule; ``None`` where no single one moves the output.
        moved: how far, in words.
        alone: whether the module moves when it is called by itself too; if not, what was kept between calls moved it.
        faults: faults that the site's tensors show by name.
        folder: where the tensors were saved.
        unsaved: why they were not.
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

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types."""
        return {**vars(self), "faults": [one.to_dict() for one in self.faults]}

    def __str__(self) -> str:
        if not self.module:
            return self.moved
        inputs = "" if self.inputs_equal else ", which already read other bits"
        inputs += "" if self.alone else ", by what was kept between calls"
        site = f", at {self.site}" if self.site else ""
        replay = f"; h3opt replay {self.folder}" if self.folder else ""
        unsaved = f"; no evidence was saved: {self.unsaved}" if self.unsaved else ""
        named = "".join(f"; {one}" for one in self.faults)
        return f"{self.module}, call {self.call}{inputs}{site}: {self.moved}{named}{replay}{unsaved}"


def bisect_pass(
    session: Session, installed: Sequence[Pass], clips: Sequence[GenerationSettings], folder: Path
) -> Culprit:
    """Find what the last of ``installed`` moved first, and save it.

    Args:
        session: of a whole pipeline; any passes may be on, and what is on afterwards is not said.
        installed: the passes; the last is the one that moved the output.
        clips: generated in this order; the last one moved.
        folder: where the evidence goes. It appears whole or not at all; what was found is returned in any case.
    """
    *others, moved = installed
    before, after = (_Recording() for _ in range(2))
    for passes, recording in ((others, before), (installed, after)):
        _replayed(session, passes, clips, recording)
    first = after.first_moved(before)
    if first is None:
        return Culprit("", 0, True, None, "nothing moved when it was run again: the change depends on chance")
    path, number = first
    inputs_equal = before.read[first] == after.read[first]
    for recording in (before, after):
        recording.wanted = first
    for passes, recording in ((others, before), (installed, after)):
        _replayed(session, passes, clips, recording)
    evidence = Evidence(
        moved.name,
        moved.options(),
        "module",
        path,
        number,
        [(one.name, one.options()) for one in others],
        dtype=session.view.dtype,
        device=session.device.type,
    )
    evidence.inputs, evidence.arguments = flatten(before.arguments)
    evidence.expected, evidence.found = before.returned, after.returned
    site, alone = None, True
    if isinstance(moved, GraphPass) and before.graph is not None:
        site = _graph_site(session, others, moved, before.graph, evidence)
    elif not isinstance(moved, GraphPass) and inputs_equal:
        site, alone = _submodule(session, others, moved, path, before.arguments, evidence)
    evidence.site = site
    unsaved = None
    try:
        write_evidence(folder, evidence)
    except PipelineError as error:  # a full disk must not cost the verdict that it comes with
        unsaved = str(error)
    heads = getattr(getattr(session.view.transformer, "config", None), "num_attention_heads", 0)
    faults = [
        fault
        for one, other in zip(evidence.expected, evidence.found, strict=False)
        for fault in find_head_faults(site or path, one, other, heads)
    ]
    return Culprit(
        path, number, inputs_equal, site, evidence.moved, alone, faults, None if unsaved else str(folder), unsaved
    )


def call_submodules(
    view: PipelineView, passes: Sequence[Pass], path: str, arguments: tuple[Any, ...], wanted: Call | None = None
) -> tuple[Any, _Recording]:
    """Call the module at ``path`` by itself under module passes, nothing captured; what it and its parts returned.

    Args:
        wanted: the call whose tensors are kept.
    """
    recording = _Recording(wanted)
    with ExitStack() as undo, torch.no_grad():
        for one in in_order(passes):
            if not isinstance(one, GraphPass) and one.applies(view.device, view) is None:
                one.install(view, undo)  # type: ignore[attr-defined]
        component, _, rest = path.partition(".")
        module = getattr(view, component).get_submodule(rest)
        recording.watch({f"{path}.{name}" if name else path: part for name, part in module.named_modules()}, undo)
        args, kwargs = arguments
        return module(*args, **kwargs), recording


class _Recording:
    """Checksums of what modules read and returned in one run, and the tensors of the one call that is wanted."""

    def __init__(self, wanted: Call | None = None) -> None:
        self.read: dict[Call, Any] = {}
        self.gave: dict[Call, Any] = {}
        self.wanted = wanted
        self.arguments: tuple[Any, ...] = ((), {})
        self.returned: list[torch.Tensor] = []
        self.graph: tuple[CapturedGraph, tuple[Any, ...]] | None = None
        self._counts: dict[str, itertools.count[int]] = {}

    def watch(self, modules: Mapping[str, torch.nn.Module], undo: ExitStack) -> None:
        """Record every call of ``modules``."""
        self._counts = {}
        for path, module in modules.items():
            wrap_calls(module, self._watcher(path), undo)

    def first_moved(self, before: _Recording) -> Call | None:
        """The first call, in the order they ended, that returned other bits than in ``before``.

        A call that returned other shapes is one that the pass regrouped, and tells only where no other does.
        """
        moved = [call for call in self.gave if before.gave.get(call, self.gave[call]) != self.gave[call]]
        comparable = (call for call in moved if _shapes(before.gave[call]) == _shapes(self.gave[call]))
        return next(comparable, moved[0] if moved else None)

    def _watcher(self, path: str) -> Callable[..., Any]:
        def watched(proceed: Any, *args: Any, **kwargs: Any) -> Any:
            call = path, next(self._counts.setdefault(path, itertools.count()))
            self.read[call] = _checksums((args, kwargs))
            if call == self.wanted:
                self.arguments = _copied((args, kwargs))  # now: the module may write to them
            result = proceed(*args, **kwargs)
            self.gave[call] = _checksums(result)
            if call == self.wanted:
                self.returned = [one.clone() for one in tensors_in(result)]
            return result

        return watched


def _replayed(
    session: Session, passes: Sequence[Pass], clips: Sequence[GenerationSettings], recording: _Recording
) -> None:
    """Generate under ``passes`` and record the last clip."""
    session.change_passes(passes)
    for clip in clips[:-1]:
        generate(session.view.pipe, clip)
    with ExitStack() as undo:
        modules = _outside_regions(session)
        recording.watch(modules, undo)
        if recording.wanted is not None:
            _listen(session, modules[recording.wanted[0]], recording, undo)
        generate(session.view.pipe, clips[-1])


def _outside_regions(session: Session) -> dict[str, torch.nn.Module]:
    """Modules by path, without those inside a captured one: their calls are no calls any more."""
    captured = {id(module) for region in session.regions for module in region.modules}
    found: dict[str, torch.nn.Module] = {}

    def add(path: str, module: torch.nn.Module) -> None:
        found[path] = module
        if id(module) not in captured:
            for name, child in module.named_children():
                add(f"{path}.{name}", child)

    for name in ("transformer", "vae", "audio_vae"):
        component = getattr(session.view, name)
        if component is not None:
            add(name, component)
    return found


def _listen(session: Session, module: torch.nn.Module, recording: _Recording, undo: ExitStack) -> None:
    """Keep the graph, and what it ran with, that the wanted call of ``module`` runs."""
    region = next((one for one in session.regions if any(module is other for other in one.modules)), None)
    if region is None or recording.wanted is None:
        return
    path, number = recording.wanted

    def heard(captured: CapturedGraph, args: tuple[Any, ...]) -> None:
        if (path, number) in recording.read and (path, number) not in recording.gave:  # this very call runs
            recording.graph = captured, _copied(args)

    recording.read.clear()
    recording.gave.clear()
    region.listener = heard
    undo.callback(setattr, region, "listener", None)


def _graph_site(
    session: Session,
    others: Sequence[Pass],
    moved: GraphPass,
    ran: tuple[CapturedGraph, tuple[Any, ...]],
    evidence: Evidence,
) -> str | None:
    """The first site of ``moved`` that changes what the graph returns; its own tensors go into ``evidence``."""
    captured, args = ran
    region = captured.owner.region
    graph_passes = [one for one in in_order([*others, moved]) if isinstance(one, GraphPass)]
    graph_passes = [one for one in graph_passes if session.applies(one)]
    facts = GraphFacts(region.name, region.holds or {region.name: 1}, passes=tuple(graph_passes))

    def lowered(chosen: int | None) -> GraphModule:
        seen = itertools.count()

        def veto(one: GraphPass, match: Match) -> str | None:
            return "bisecting" if one is moved and next(seen) != chosen else None

        return Lowering("warn", probe=False, veto=veto).run(captured.graph, graph_passes, facts)[0]

    early = graph_passes[: graph_passes.index(moved)]
    stage, _ = Lowering("warn", probe=False).run(captured.graph, early, facts)
    matches: list[Match] = []
    apply_rules(tuple(moved.rules()), stage, lambda match: matches.append(match) or "bisecting")  # type: ignore[func-returns-value]
    with torch.no_grad():
        usual = tensors_in(lowered(None)(*args))
        for number, match in enumerate(matches):
            if all(map(bits_equal, usual, tensors_in(lowered(number)(*args)))):
                continue
            values = _Values(stage, match).of(args)
            arguments = {name: _real(bound, values) for name, bound in match.bound.items()}
            rules = list(moved.rules())
            evidence.kind = "site"
            evidence.rule = next(n for n, rule in enumerate(rules) if rule.pattern is match.rule.pattern)
            evidence.inputs, evidence.arguments = flatten(((), arguments))
            evidence.expected = tensors_in(match.rule.pattern(**arguments))
            evidence.found = tensors_in(match.rule.replacement(**arguments))
            return match.site
    return None


def _submodule(
    session: Session,
    others: Sequence[Pass],
    moved: Pass,
    path: str,
    arguments: tuple[Any, ...],
    evidence: Evidence,
) -> tuple[str | None, bool]:
    """The first submodule of the one at ``path`` that returns other bits, called by itself with what it read; and
    whether there is any."""
    session.uninstall()
    _, before = call_submodules(session.view, others, path, arguments)
    _, after = call_submodules(session.view, [*others, moved], path, arguments)
    first = after.first_moved(before)
    if first is None or first[0] == path:
        return None, first is not None
    _, before = call_submodules(session.view, others, path, arguments, first)
    _, after = call_submodules(session.view, [*others, moved], path, arguments, first)
    evidence.expected, evidence.found = before.returned, after.returned
    evidence.module, evidence.call = first[0], 0
    evidence.inputs, evidence.arguments = flatten(before.arguments)
    return first[0], True


class _Values(Interpreter):
    """The values that a match's parameters had."""

    def __init__(self, graph: GraphModule, match: Match) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self._wanted = set(_nodes(list(match.bound.values())))
        self._found: dict[Node, Any] = {}

    def of(self, args: tuple[Any, ...]) -> dict[Node, Any]:
        self.run(*args)
        return self._found

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self._wanted:
            self._found[n] = result
        return result


def _nodes(bound: Any) -> Iterator[Node]:
    if isinstance(bound, Node):
        yield bound
    elif isinstance(bound, (list, tuple)):
        for item in bound:
            yield from _nodes(item)


def _real(bound: Any, values: Mapping[Node, Any]) -> Any:
    if isinstance(bound, Node):
        return values[bound]
    return [_real(item, values) for item in bound] if isinstance(bound, (list, tuple)) else bound


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, (list, tuple)) else value


def _checksums(value: Any) -> tuple[Any, ...]:
    return tuple((tuple(one.shape), str(one.dtype), _checksum(one)) for one in tensors_in(value))


def _shapes(checksums: tuple[Any, ...]) -> list[Any]:
    return [one[:-1] for one in checksums]


def _checksum(tensor: torch.Tensor) -> int:
    """A sum over all elements' bits, weighted by place, modulo 2**64; NaNs count alike."""
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point():
        flat = flat.double() if flat.element_size() == 1 else flat
        flat = flat.masked_fill(flat.isnan(), float("nan")).view(_INTEGER[flat.element_size()])
    total = 0
    for start in range(0, flat.numel(), 1 << 22):
        part = flat[start : start + (1 << 22)].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=part.device) * _ODD + 1
        total += int((part * (place ^ (place >> 29))).sum())
    return total % 2**64


_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2**64 over the golden ratio: neighbouring places get unlike weights
