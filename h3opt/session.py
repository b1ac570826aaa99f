"""``h3opt.optimize``: install passes on a pipeline in place, and take every one of them back."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.fx import GraphModule

from h3opt._torch_private import size_hint
from h3opt.capture import CapturedGraph, Region
from h3opt.errors import H3OptError, PassFailedError, PassOptionError, PipelineError, ProfileError, nearest
from h3opt.executors import EXECUTORS
from h3opt.kernels import kernel_names
from h3opt.lowering import GraphOutcome, Lowering
from h3opt.pass_api.base import FormatPass, GraphFacts, GraphPass, No, Pass, SchedulePass
from h3opt.pass_api.ordering import in_order
from h3opt.pass_api.registry import make_pass
from h3opt.pipeline.hooks import around
from h3opt.pipeline.view import PipelineView
from h3opt.profiles.schema import Profile
from h3opt.profiles.selection import detect_profile, load_profile
from h3opt.report import PassReport, Report

# By component. A session refers to its components, so holding it here would keep a dropped pipeline for ever.
_active: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()


def _session_of(module: torch.nn.Module) -> Session | None:
    held = _active.get(module)
    return held() if held is not None else None


def optimize(
    target: Any,
    passes: Iterable[str | Pass] | None = None,
    profile: str | Profile = "auto",
    *,
    executor: str | None = None,
    scope: str | None = None,
    on_shortfall: str | None = None,
    probe: bool | None = None,
    tokens: int | None = None,
    world_size: int = 1,
    restorable: bool = True,
) -> Optimized:
    """Make a MiniMax-H3 pipeline, or one of its models, run through h3opt. It is changed in place.

    Calling it again on the same pipeline replaces what the earlier call installed. Graphs are captured at the first
    generation: what is only known then (how often a pass fired, a shortfall, a probe) is in ``report`` after it.

    Args:
        target: a diffusers MiniMax-H3 pipeline with components loaded, its transformer, or one of its VAEs.
        passes: pass names or instances, in any order; ``None`` for what the profile turns on, ``[]`` for none. A name
            takes its options from the profile's row for it, if there is one.
        profile: a shipped name, a path, a :class:`~h3opt.profiles.schema.Profile`, or ``"auto"`` to go by the device.
        executor: ``"direct"`` or ``"inductor"``; overrides the profile, as the next three do.
        scope: ``"block"`` or ``"model"``: what one graph spans.
        on_shortfall: ``"error"`` or ``"warn"``.
        probe: whether rewrites are proven again on this machine.
        tokens: length of the packed sequence, for profile rows that depend on it.
        world_size: number of GPUs, likewise.
        restorable: ``False`` frees weights that FP8 replaces instead of keeping them in host memory, 40 GB of H3's
            transformer. The pipeline then cannot be restored or optimized again, nor used in a ``with`` block.

    Returns:
        A handle with ``report`` and ``restore()``; also a context manager.

    Raises:
        H3OptError: and the pipeline is as it was; with ``restorable=False`` a note says if weights are gone already.
    """
    session, instances = prepare(
        target,
        passes,
        profile,
        executor=executor,
        scope=scope,
        on_shortfall=on_shortfall,
        probe=probe,
        tokens=tokens,
        world_size=world_size,
        restorable=restorable,
    )
    with displaced(session.view):
        session.install(instances)
    return Optimized(session)


def prepare(
    target: Any,
    passes: Iterable[str | Pass] | None,
    profile: str | Profile,
    *,
    executor: str | None = None,
    scope: str | None = None,
    on_shortfall: str | None = None,
    probe: bool | None = None,
    tokens: int | None = None,
    world_size: int = 1,
    restorable: bool = True,
) -> tuple[Session, tuple[Pass, ...]]:
    """Resolve what :func:`optimize` was asked for, and touch nothing yet.

    Returns:
        A session, and the passes to install in it.

    Raises:
        H3OptError: anything asked for is unknown or contradictory.
    """
    view = PipelineView.of(target)
    chosen, notice = _choose_profile(profile, view)
    settings = {
        "executor": executor or chosen.executor,
        "scope": scope or chosen.scope,
        "on_shortfall": on_shortfall or chosen.on_shortfall,
    }
    _check_choices(settings)
    session = Session(
        PipelineView.of(target, settings["scope"], restorable),
        profile=chosen.name,
        executor=settings["executor"],
        on_shortfall=settings["on_shortfall"],
        probe=chosen.probe if probe is None else probe,
    )
    if notice:
        session.notices.append(notice)
    return session, in_order(_choose_passes(passes, chosen, tokens, world_size))


@contextmanager
def displaced(view: PipelineView, always_back: bool = False) -> Iterator[None]:
    """Take off what is installed on these components, and put it back if the body fails (or in any case).

    Not where the body may have freed the weights that it would need: a note on the error says so.

    Raises:
        PipelineError: a component belongs to another optimized pipeline, or to one that cannot be restored.
    """
    earlier = {session for module in view.modules if (session := _session_of(module)) is not None}
    for session in earlier:
        session.check_restorable()
        if session.view.pipe is not None and session.view.pipe is not view.pipe:
            raise PipelineError(
                "A component of this pipeline is part of another optimized pipeline. Call restore() on that one "
                "first, or give each pipeline its own copy."
            )
    for session in earlier:
        session.uninstall()
    back = True
    try:
        yield
        back = always_back
    finally:
        if back and view.restorable:
            for session in earlier:
                session.install(session.passes)


_WEIGHTS_ARE_GONE = (
    "All passes have been taken off again, but with restorable=False weights that became FP8 stay so: "
    "load the pipeline again."
)


class Optimized:
    """A pipeline with passes installed. Leave the ``with`` block, or call :meth:`restore`, to take them back."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def report(self) -> Report:
        """What each pass did so far."""
        return self._session.report()

    @property
    def active(self) -> bool:
        """Whether the passes are still installed."""
        return self._session.installed

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes asked for, in the order they run."""
        return self._session.passes

    def restore(self) -> None:
        """Give back the unmodified pipeline, bit for bit. A second call does nothing.

        Raises:
            PipelineError: it was optimized with ``restorable=False``; it stays as it is.
        """
        self._session.check_restorable()
        self._session.uninstall()

    def __enter__(self) -> Optimized:
        self._session.check_restorable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


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
        self._regions: list[Region] = []
        self._declined: dict[str, str] = {}
        self._installed_sites: dict[str, tuple[int, int]] = {}
        self._outcomes: dict[tuple[int, Any], dict[str, GraphOutcome]] = {}
        self._graphs: dict[tuple[int, Any], GraphModule] = {}
        self._undo_modules = ExitStack()
        self._undo_capture = ExitStack()

    def install(self, passes: Sequence[Pass]) -> None:
        """Install passes and capture entries.

        Raises:
            H3OptError: a pass refused or fell short; everything is taken back.
        """
        try:
            self._regions = self._regions or self.view.regions()
            if self.view.transformer is not None:
                around(self.view.transformer, _OneThread(), self._undo_modules)
            self._install_passes(passes)
            for region in self._regions:
                self._undo_capture.callback(region.install(self))
            for module in self.view.modules if not self._regions else ():
                around(module, _Holder(self), self._undo_capture, innermost=True)
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
            if _session_of(module) is self:
                del _active[module]

    def check_restorable(self) -> None:
        """Raise a PipelineError if this is installed and cannot be taken back."""
        if self.installed and not self.view.restorable:
            raise PipelineError(
                "This pipeline was optimized with restorable=False, so nothing keeps its original weights. "
                "Go on using it as it is, or load it again."
            )

    @property
    def regions(self) -> Sequence[Region]:
        """What is captured."""
        return tuple(self._regions)

    def applies(self, one: Pass) -> bool:
        """Whether a pass can run here."""
        return not isinstance(one.applies(self.device, self.view), No)

    @property
    def plan_key(self) -> Any:
        """Graphs are rewritten once per set of passes that apply and that a graph can tell: schedules it cannot."""
        return tuple(one for one in self._applicable() if not isinstance(one, SchedulePass))

    def build(self, captured: CapturedGraph) -> Callable[..., Any]:
        """Rewrite a captured graph under the current passes; see :class:`h3opt.capture.Planner`."""
        region = captured.region
        facts = GraphFacts(region.name, region.holds or {region.name: 1}, passes=self.plan_key)
        graph_passes = [one for one in self.plan_key if isinstance(one, GraphPass)]
        graph, outcomes = self._lowering.run(captured.graph, graph_passes, facts)
        self._outcomes[id(captured), self.plan_key] = outcomes
        self._graphs[id(captured), self.plan_key] = graph
        return EXECUTORS[self._executor](graph, captured.example_inputs)

    def operators_run(self) -> Counter[str]:
        """How often each h3opt operator has run so far: calls of each captured graph times its count in the graph."""
        counts: Counter[str] = Counter()
        for region in self._regions:
            for captured in region.captured:
                graph = self._graphs.get((id(captured), self.plan_key))
                for node in graph.graph.nodes if graph is not None else ():
                    if getattr(node.target, "namespace", None) == "h3opt":
                        counts[node.target._opname.rpartition("_v")[0]] += captured.calls
        return counts

    def bytes_moved(self) -> int:
        """Bytes of all operands and results of the h3opt kernels run so far, each counted once per call."""
        total = 0
        for region in self._regions:
            for captured in region.captured:
                graph = self._graphs.get((id(captured), self.plan_key))
                for node in graph.graph.nodes if graph is not None else ():
                    if getattr(node.target, "namespace", None) != "h3opt":
                        continue
                    if node.target._opname.rpartition("_v")[0] in kernel_names:
                        tensors = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
                        total += captured.calls * sum(map(_bytes, tensors))
        return total

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
        probed = 0
        for region in self._regions:
            found = {
                captured: outcome[entry.name]
                for captured in region.captured
                if (outcome := self._outcomes.get((id(captured), self.plan_key))) is not None
            }
            if not found:
                continue
            outcomes = list(found.values())
            probed += sum(outcome.probed for outcome in outcomes)
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
                f"probe: bits equal at {probed} sites" if str(entry.promise) == "exact" else f"{probed} probes"
            )

    def _install_passes(self, passes: Sequence[Pass]) -> None:
        self.passes = in_order(passes)
        self._declined, self._installed_sites = {}, {}
        for one in self.passes:
            answer = one.applies(self.device, self.view)
            if isinstance(answer, No):
                self._declined[one.name] = answer.reason
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


class StandalonePlanner:
    """Plans for ``torch.compile(backend="h3opt")``: fixed graph passes, no expectations."""

    def __init__(self, passes: Iterable[str | Pass] = (), executor: str = "direct", probe: bool = True) -> None:
        _check_choices({"executor": executor})
        chosen = in_order(make_pass(one) if isinstance(one, str) else one for one in passes)
        for one in chosen:
            if not isinstance(one, GraphPass):
                raise PassOptionError(
                    f"Pass {one.name!r} is a {one.kind} pass, and the backend alone runs graph passes. "
                    "Use h3opt.optimize for the others."
                )
        self.plan_key: Any = chosen
        self._executor = executor
        self._lowering = Lowering("warn", probe)

    def build(self, captured: CapturedGraph) -> Callable[..., Any]:
        """See :class:`h3opt.capture.Planner`."""
        graph, _ = self._lowering.run(captured.graph, self.plan_key, GraphFacts(passes=self.plan_key))
        return EXECUTORS[self._executor](graph, captured.example_inputs)

    def failed(self, error: H3OptError) -> None:
        """Nothing was installed, so nothing is taken back."""


def _choose_profile(profile: str | Profile, view: PipelineView) -> tuple[Profile, str | None]:
    if isinstance(profile, Profile):
        return profile, None
    if profile == "auto":
        return detect_profile(next(view.modules[0].parameters()).device)
    return load_profile(profile), None


def _choose_passes(
    passes: Iterable[str | Pass] | None, profile: Profile, tokens: int | None, world_size: int
) -> list[Pass]:
    if isinstance(passes, str):
        raise PassOptionError(f"passes is one name, not a list. Write passes=[{passes!r}].")
    rows = {row.name: row for row in profile.rows_for(tokens, world_size)}
    if passes is None:
        passes = [name for name, row in rows.items() if row.enabled]
    instances = []
    for one in passes:
        if isinstance(one, Pass):
            instances.append(one)
            continue
        if not isinstance(one, str):
            hint = f"Make an instance: {one.__name__}()." if isinstance(one, type) else "Give its name or an instance."
            raise PassOptionError(f"{one!r} is not a pass. {hint}")
        row = rows.get(one)
        try:
            instances.append(make_pass(one, row.options if row else None))
        except PassOptionError as error:
            raise PassOptionError(f"{profile.locate(row)}: {error}" if row else str(error)) from error
        except H3OptError as error:
            if row is None:
                raise
            raise ProfileError(f"{profile.locate(row, 'pass')}: {error}") from error
    return instances


def _check_choices(settings: dict[str, str]) -> None:
    choices = {"executor": tuple(EXECUTORS), "scope": ("block", "model"), "on_shortfall": ("error", "warn")}
    for name, chosen in settings.items():
        if chosen not in choices[name]:
            listed = " or ".join(repr(choice) for choice in choices[name])
            raise PassOptionError(
                f"{name}={chosen!r} is not a choice{nearest(str(chosen), choices[name])}. Use {listed}."
            )


__all__ = ["Optimized", "Session", "StandalonePlanner", "optimize"]
