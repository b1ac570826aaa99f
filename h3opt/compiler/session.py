"""The session of a pipeline: install passes in place, rewrite captured graphs, and uninstall everything again."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from h3opt._torch_private import size_hint
from h3opt.compiler.capture import CapturedGraph, CapturedRegion
from h3opt.compiler.definition_check import check_graph
from h3opt.compiler.executors import EXECUTORS
from h3opt.compiler.lowering import GraphOutcome, LoweredGraph, Lowering
from h3opt.compiler.report import PassReport, Report
from h3opt.errors import H3OptError, PassFailedError, PipelineError
from h3opt.kernels import kernel_names
from h3opt.pass_api.base import FormatPass, GraphFacts, GraphPass, Pass, SchedulePass
from h3opt.pass_api.ordering import in_order
from h3opt.pass_api.promises import Exact
from h3opt.pipeline.adapters import layers_with_adapters
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.minimax_h3 import PROJECTIONS, transformer_blocks
from h3opt.pipeline.view import PipelineView

# Component → installed session. The references are weak: a session refers to its components, so a strong reference
# would keep a pipeline alive that nobody uses any more.
_active: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()

_WEIGHTS_ARE_GONE = (
    "All passes have been taken off again, but with restorable=False weights that became FP8 stay so: "
    "load the pipeline again."
)


def session_of(module: torch.nn.Module) -> Session | None:
    """The session that is installed on a component, if there is one."""
    reference = _active.get(module)
    return reference() if reference is not None else None


class Session:
    """The passes on a pipeline; the public handle is :class:`h3opt.compiler.optimize.Optimized`.

    Attributes:
        view: the components of the pipeline.
        device: the device of the components.
        passes: the passes that were asked for, in running order.
        notices: sentences for the user.
        installed: whether the passes are installed.
    """

    def __init__(self, view: PipelineView, *, profile: str, executor: str, on_shortfall: str, probe: bool) -> None:
        self.view = view
        self.device = view.device
        self.passes: tuple[Pass, ...] = ()
        self.notices: list[str] = []
        self.installed = False
        self._profile, self._executor = profile, executor
        self._lowering = Lowering(on_shortfall, probe)
        self._regions: list[CapturedRegion] = []
        self._declined: dict[str, str] = {}
        self._installed_sites: dict[str, tuple[int, int]] = {}
        self._undo_modules = ExitStack()
        self._undo_capture = ExitStack()

    def install(self, passes: Sequence[Pass]) -> None:
        """Install passes, and wrap the calls of all modules to capture.

        Raises:
            H3OptError: a pass refused or fell short; everything is uninstalled.
        """
        try:
            self._regions = self._regions or [CapturedRegion(region) for region in self.view.regions()]
            for view in self.view.views:
                if view.transformer is not None:
                    wrap_calls(view.transformer, _SingleThread(), self._undo_modules)
            self._install_passes(passes)
            for region in self._regions:
                self._undo_capture.callback(region.install(self))
            for module in self.view.modules if not self._regions else ():
                wrap_calls(module, _KeepAlive(self), self._undo_capture, innermost=True)
            self.installed = True
            for module in self.view.modules:
                _active[module] = weakref.ref(self)
        except BaseException as error:
            self.uninstall()
            if not self.view.restorable:
                error.add_note(_WEIGHTS_ARE_GONE)
            raise

    def change_passes(self, passes: Sequence[Pass]) -> None:
        """Replace the installed passes. Captured graphs stay, and are rewritten again if the passes differ.

        Raises:
            H3OptError: a pass refused or fell short; the pipeline is restored.
        """
        self._undo_capture.close()
        self._undo_modules.close()
        self.install(passes)

    def uninstall(self) -> None:
        """Undo all changes, the last change first."""
        self._undo_capture.close()
        self._undo_modules.close()
        self.installed = False
        for module in self.view.modules:
            if session_of(module) is self:
                del _active[module]

    def check_restorable(self) -> None:
        """Check that the passes can be uninstalled.

        Raises:
            PipelineError: they are installed with ``restorable=False``.
        """
        if self.installed and not self.view.restorable:
            raise PipelineError(
                "This pipeline was optimized with restorable=False, so nothing keeps its original weights. "
                "Go on using it as it is, or load it again."
            )

    @property
    def regions(self) -> Sequence[CapturedRegion]:
        """The captured regions."""
        return tuple(self._regions)

    def applies(self, candidate: Pass) -> bool:
        """Whether a pass can run on this device and pipeline."""
        return any(candidate.applies(self.device, view) is None for view in self.view.views)

    @property
    def plan_key(self) -> Any:
        """The passes that apply, without schedule passes, which do not change what a graph is rewritten to."""
        return tuple(item for item in self._applicable() if not isinstance(item, SchedulePass))

    def build(self, captured: CapturedGraph) -> LoweredGraph:
        """Rewrite a captured graph under the current passes; see :class:`h3opt.compiler.capture.Planner`."""
        region = captured.owner.region
        blocks = transformer_blocks(self.view.transformer) if region.holds else region.modules
        adapted = layers_with_adapters(blocks, PROJECTIONS)
        facts = GraphFacts(region.name, region.holds or {region.name: 1}, passes=self.plan_key, adapted=adapted)
        quantized = adapted & frozenset().union(*(facts.quantized_layers(kind) for kind in facts.holds))
        if quantized:
            notice = (
                f"{region.name}: adapters read the unquantized inputs of {', '.join(sorted(quantized))}. "
                "These inputs stay in memory beside their FP8 copies, and passes do not count on fusing them."
            )
            if notice not in self.notices:
                self.notices.append(notice)
        graph_passes = [item for item in self.plan_key if isinstance(item, GraphPass)]
        if self._lowering.probe:
            self._check_formats(captured)
        graph, outcomes = self._lowering.run(captured.graph, graph_passes, facts)
        return LoweredGraph(graph, outcomes, EXECUTORS[self._executor](graph, captured.example_inputs))

    def _check_formats(self, captured: CapturedGraph) -> None:
        """Notice where an operator that a format pass installed is off its definition: it is too late to decline."""
        for measured in check_graph(captured.graph):
            notice = (
                f"{captured.owner.region.name}: {measured.refusal()}. Choose another `accumulate` for these layers."
            )
            if not measured.holds and notice not in self.notices:
                self.notices.append(notice)

    def operators_run(self) -> Counter[str]:
        """How often each h3opt operator has run so far: calls of a captured graph times nodes in the graph, summed."""
        counts: Counter[str] = Counter()
        for region in self._regions:
            for captured in region.captured:
                for node in self._nodes_run(captured):
                    if (name := _operator_name(node)) is not None:
                        counts[name] += captured.calls
        return counts

    def bytes_moved(self) -> int:
        """Bytes of all operands and results of the h3opt kernels that have run so far, each counted once per call."""
        total = 0
        for region in self._regions:
            for captured in region.captured:
                for node in self._nodes_run(captured):
                    if _operator_name(node) in kernel_names:
                        values = [operand.meta.get("val") for operand in (node, *node.all_input_nodes)]
                        total += captured.calls * _count_bytes(values)
        return total

    def _nodes_run(self, captured: CapturedGraph) -> Iterable[Node]:
        lowered = captured.lowered(self.plan_key)
        return lowered.graph.graph.nodes if lowered is not None else ()

    def failed(self, error: H3OptError) -> None:
        """Uninstall everything after an error of h3opt, so that the pipeline still runs; a note tells the user."""
        self.uninstall()
        restored = "The pipeline has been restored to what it was before h3opt.optimize."
        error.add_note(restored if self.view.restorable else _WEIGHTS_ARE_GONE)

    def report(self) -> Report:
        """Report what each pass did, summed over the modules of every region."""
        report = Report(self._profile, self.device.name, self._executor, self.view.scope, notices=list(self.notices))
        report.captured = {region.name: len(region.captured) for region in self._regions}
        for item in self.passes:
            entry = PassReport(item.name, item.kind, item.promise)
            report.passes[item.name] = entry
            if item.name in self._declined:
                entry.state, entry.reason = "declined", self._declined[item.name]
            elif item.name in self._installed_sites:
                entry.state = "on"
                entry.matched, entry.expected = self._installed_sites[item.name]
                if not entry.matched:
                    entry.state, entry.reason = "idle", "nothing in the pipeline was changed"
            else:
                self._sum_graphs(entry)
        return report

    def _sum_graphs(self, entry: PassReport) -> None:
        """Fill in the entry of a graph pass from the outcomes in all captured graphs."""
        probed, measured = 0, []
        for region in self._regions:
            by_graph = {
                captured: lowered.outcomes[entry.name]
                for captured in region.captured
                if (lowered := captured.lowered(self.plan_key)) is not None
            }
            if not by_graph:
                continue
            outcomes = list(by_graph.values())
            probed += sum(outcome.probed for outcome in outcomes)
            measured += [outcome.definition for outcome in outcomes if outcome.definition is not None]
            entry.state = "on"
            fewest = min(outcomes, key=lambda outcome: outcome.matched)
            entry.per_region[region.name] = (fewest.matched, fewest.expected)
            for module in region.modules:
                # A module may run several graphs, one per structure of inputs; the graph with the fewest sites counts.
                of_module = [outcome for captured, outcome in by_graph.items() if id(module) in captured.modules]
                counted = min(of_module, key=lambda outcome: outcome.matched, default=None)
                if counted is not None:
                    entry.matched = (entry.matched or 0) + counted.matched
                    if counted.expected is not None:
                        entry.expected = (entry.expected or 0) + counted.expected
            entry.sites += [f"{region.name}: {site}" for site in outcomes[0].sites]
            entry.refused += [f"{region.name}: {site}" for outcome in outcomes for site in outcome.refused]
            entry.near_misses += [f"{region.name}: {miss}" for miss in outcomes[0].near_misses]
        if entry.refused and not entry.matched:
            entry.state, entry.reason = "declined", entry.refused[0]
        elif entry.state == "on" and not entry.matched:
            nearest = f"; nearest non-match: {entry.near_misses[0]}" if entry.near_misses else ""
            entry.state, entry.reason = "idle", f"no site in {', '.join(entry.per_region)}{nearest}"
        if probed:
            entry.proof = (
                f"probe: bits equal at {probed} sites" if isinstance(entry.promise, Exact) else f"{probed} probes"
            )
        if measured:
            worst = str(max(measured, key=lambda one: one.ratio))
            entry.proof = f"{entry.proof}; {worst}" if probed else worst

    def _install_passes(self, passes: Sequence[Pass]) -> None:
        self.passes = in_order(passes)
        self._declined, self._installed_sites = {}, {}
        applies = {item.name: [item.applies(self.device, view) for view in self.view.views] for item in self.passes}
        self._declined = {name: reasons[0] for name, reasons in applies.items() if reasons[0] and None not in reasons}
        for item in self._applicable():
            if isinstance(item, (FormatPass, SchedulePass)):
                views = [
                    view for view, reason in zip(self.view.views, applies[item.name], strict=True) if reason is None
                ]
                expected = sum(item.expect(view) for view in views)
                try:
                    matched = sum(item.install(view, self._undo_modules) for view in views)
                except H3OptError:
                    raise
                except Exception as error:
                    raise PassFailedError(
                        f"{item.name} could not be installed: {type(error).__name__}: {error}. "
                        "The pipeline is as it was; leave the pass out."
                    ) from error
                self._installed_sites[item.name] = (matched, expected)
                if matched < expected:
                    self._lowering.fall_short(item.name, "the pipeline", GraphOutcome(matched, expected))

    def _applicable(self) -> tuple[Pass, ...]:
        return tuple(item for item in self.passes if item.name not in self._declined)


class _SingleThread:
    """A call wrapper of the transformer that refuses a second thread: passes keep state of a single generation."""

    def __init__(self) -> None:
        self.busy: int | None = None

    def __call__(self, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.busy not in (None, threading.get_ident()):
            raise PipelineError(
                "Two threads are generating with one optimized pipeline. Let one wait for the other, or give each its "
                "own pipeline."
            )
        self.busy, before = threading.get_ident(), self.busy
        try:
            return proceed(*args, **kwargs)
        finally:
            self.busy = before


class _KeepAlive:
    """A call wrapper that keeps a session alive as long as a module without captured regions."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __call__(self, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return proceed(*args, **kwargs)


def _operator_name(node: Node) -> str | None:
    """The name of an h3opt operator without its version; ``None`` for any other node."""
    operator: Any = node.target
    if getattr(operator, "namespace", None) != "h3opt":
        return None
    return str(operator._opname).rpartition("_v")[0]


def _count_bytes(values: Any) -> int:
    """The bytes of all tensors in nested lists and tuples."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return sum(math.prod(size_hint(size) for size in tensor.shape) * tensor.element_size() for tensor in tensors)
