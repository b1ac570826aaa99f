"""``h3opt.optimize``: install passes on a pipeline in place, and take every one of them back."""

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
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.view import PipelineView

# By component. A session refers to its components, so holding it here would keep a dropped pipeline for ever.
_active: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()


def session_of(module: torch.nn.Module) -> Session | None:
    held = _active.get(module)
    return held() if held is not None else None


_WEIGHTS_ARE_GONE = (
    "All passes have been taken off again, but with restorable=False weights that became FP8 stay so: "
    "load the pipeline again."
)


class Session:
    """The passes installed on one pipeline. :class:`Optimized` is its public face."""

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
        """Install passes and capture entries.

        Raises:
            H3OptError: a pass refused or fell short; everything is taken back.
        """
        try:
            self._regions = self._regions or [CapturedRegion(region) for region in self.view.regions()]
            if self.view.transformer is not None:
                wrap_calls(self.view.transformer, _OneThread(), self._undo_modules)
            self._install_passes(passes)
            for region in self._regions:
                self._undo_capture.callback(region.install(self))
            for module in self.view.modules if not self._regions else ():
                wrap_calls(module, _Holder(self), self._undo_capture, innermost=True)
            self.installed = True
            for module in self.view.modules:
                _active[module] = weakref.ref(self)
        except BaseException as error:
            self.uninstall()
            if not self.view.restorable:
                error.add_note(_WEIGHTS_ARE_GONE)
            raise

    def change_passes(self, passes: Sequence[Pass]) -> None:
        """Swap the installed passes. Captured graphs stay, and are rewritten anew where the passes differ.

        Raises:
            H3OptError: a pass refused or fell short; the pipeline is restored.
        """
        self._undo_capture.close()
        self._undo_modules.close()
        self.install(passes)

    def uninstall(self) -> None:
        """Take everything back, last change first."""
        self._undo_capture.close()
        self._undo_modules.close()
        self.installed = False
        for module in self.view.modules:
            if session_of(module) is self:
                del _active[module]

    def check_restorable(self) -> None:
        """Raise a PipelineError if this is installed and cannot be taken back."""
        if self.installed and not self.view.restorable:
            raise PipelineError(
                "This pipeline was optimized with restorable=False, so nothing keeps its original weights. "
                "Go on using it as it is, or load it again."
            )

    @property
    def regions(self) -> Sequence[CapturedRegion]:
        """What is captured."""
        return tuple(self._regions)

    def applies(self, one: Pass) -> bool:
        """Whether a pass can run here."""
        return one.applies(self.device, self.view) is None

    @property
    def plan_key(self) -> Any:
        """Graphs are rewritten once per set of passes that apply and that a graph can tell: schedules it cannot."""
        return tuple(one for one in self._applicable() if not isinstance(one, SchedulePass))

    def build(self, captured: CapturedGraph) -> LoweredGraph:
        """Rewrite a captured graph under the current passes; see :class:`h3opt.compiler.capture.Planner`."""
        region = captured.owner.region
        facts = GraphFacts(region.name, region.holds or {region.name: 1}, passes=self.plan_key)
        graph_passes = [one for one in self.plan_key if isinstance(one, GraphPass)]
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
        """How often each h3opt operator has run so far: calls of each captured graph times its count in the graph."""
        counts: Counter[str] = Counter()
        for region in self._regions:
            for captured in region.captured:
                for node in self._nodes_run(captured):
                    if getattr(node.target, "namespace", None) == "h3opt":
                        counts[node.target._opname.rpartition("_v")[0]] += captured.calls
        return counts

    def bytes_moved(self) -> int:
        """Bytes of all operands and results of the h3opt kernels run so far, each counted once per call."""
        total = 0
        for region in self._regions:
            for captured in region.captured:
                for node in self._nodes_run(captured):
                    if getattr(node.target, "namespace", None) != "h3opt":
                        continue
                    if node.target._opname.rpartition("_v")[0] in kernel_names:
                        tensors = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
                        total += captured.calls * sum(map(_bytes, tensors))
        return total

    def _nodes_run(self, captured: CapturedGraph) -> Iterable[Node]:
        lowered = captured.lowered(self.plan_key)
        return lowered.graph.graph.nodes if lowered is not None else ()

    def failed(self, error: H3OptError) -> None:
        """A capture failed for a reason of ours: take everything back, so that the pipeline still runs."""
        self.uninstall()
        restored = "The pipeline has been restored to what it was before h3opt.optimize."
        error.add_note(restored if self.view.restorable else _WEIGHTS_ARE_GONE)

    def report(self) -> Report:
        """What each pass did, summed over the modules of every region."""
        report = Report(self._profile, self.device.name, self._executor, self.view.scope, notices=list(self.notices))
        report.captured = {region.name: len(region.captured) for region in self._regions}
        for one in self.passes:
            entry = PassReport(one.name, one.kind, one.promise)
            report.passes[one.name] = entry
            if one.name in self._declined:
                entry.state, entry.reason = "declined", self._declined[one.name]
            elif one.name in self._installed_sites:
                entry.state = "on"
                entry.matched, entry.expected = self._installed_sites[one.name]
            else:
                self._sum_graphs(entry)
        return report

    def _sum_graphs(self, entry: PassReport) -> None:
        probed, measured = 0, []
        for region in self._regions:
            found = {
                captured: lowered.outcomes[entry.name]
                for captured in region.captured
                if (lowered := captured.lowered(self.plan_key)) is not None
            }
            if not found:
                continue
            outcomes = list(found.values())
            probed += sum(outcome.probed for outcome in outcomes)
            measured += [outcome.definition for outcome in outcomes if outcome.definition is not None]
            entry.state = "on"
            fewest = min(outcomes, key=lambda outcome: outcome.matched)
            entry.per_region[region.name] = (fewest.matched, fewest.expected)
            for module in region.modules:
                # a module runs several graphs, one per structure of its inputs: the one with fewest sites counts
                its = [outcome for captured, outcome in found.items() if id(module) in captured.modules]
                least = min(its, key=lambda outcome: outcome.matched, default=None)
                if least is not None:
                    entry.matched = (entry.matched or 0) + least.matched
                    if least.expected is not None:
                        entry.expected = (entry.expected or 0) + least.expected
            entry.sites += [f"{region.name}: {site}" for site in outcomes[0].sites]
            entry.refused += [f"{region.name}: {site}" for outcome in outcomes for site in outcome.refused]
            entry.near_misses += [f"{region.name}: {miss}" for miss in outcomes[0].near_misses]
        if entry.refused and not entry.matched:
            entry.state, entry.reason = "declined", entry.refused[0]
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
        for one in self.passes:
            reason = one.applies(self.device, self.view)
            if reason is not None:
                self._declined[one.name] = reason
        for one in self._applicable():
            if isinstance(one, (FormatPass, SchedulePass)):
                expected = one.expect(self.view)
                try:
                    matched = one.install(self.view, self._undo_modules)
                except H3OptError:
                    raise
                except Exception as error:
                    raise PassFailedError(
                        f"{one.name} could not be installed: {type(error).__name__}: {error}. "
                        "The pipeline is as it was; leave the pass out."
                    ) from error
                self._installed_sites[one.name] = (matched, expected)
                if matched < expected:
                    self._lowering.fall_short(one.name, "the pipeline", GraphOutcome(matched, expected))

    def _applicable(self) -> tuple[Pass, ...]:
        return tuple(one for one in self.passes if one.name not in self._declined)


class _OneThread:
    """Around the transformer: passes keep the state of one generation."""

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


class _Holder:
    """Keeps a session for as long as a module of which nothing is captured; captured ones keep theirs."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __call__(self, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return proceed(*args, **kwargs)


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return math.prod(size_hint(size) for size in tensors.shape) * tensors.element_size()
    return sum(map(_bytes, tensors)) if isinstance(tensors, (tuple, list)) else 0
