"""What a pass is.

A pass is a frozen dataclass in a file of its own. Its fields are the options a profile may set; its class attributes
say what it promises and in which order it runs. There are three kinds:

* :class:`FormatPass` changes what weights are stored as;
* :class:`GraphPass` rewrites the semantic graph of a captured block;
* :class:`SchedulePass` changes when and where work runs.

All three carry examples that must fire, examples that must be left alone, and *mutants*: deliberately wrong versions
of themselves that the generic tests (:mod:`h3opt.pass_api.testing`) have to catch.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from h3opt.device import Device
from h3opt.graph.matcher import Rule
from h3opt.pass_api.examples import Decline, Draw, Example
from h3opt.pass_api.promises import Promise

if TYPE_CHECKING:
    import torch

    from h3opt.pipeline.view import PipelineView


class Plan(Protocol):
    """What ``h3opt explain`` prints of a pass that cuts work into pieces; ``str`` gives its lines."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types."""


@dataclass(frozen=True)
class GraphFacts:
    """What is known about a semantic graph when passes run on it.

    Attributes:
        region: the name of the captured region, e.g. ``"transformer.block"``; ``""`` for a graph that was not
            captured from a known component.
        holds: repeated blocks by kind, e.g. ``{"transformer.block": 1}``, or the model's depth with
            ``scope: model``; empty when unknown.
        operators: how often each operator occurs before any pass has run.
        passes: the graph and format passes that are on, so that a pass can tell what its neighbours leave for it.
        results: the (fake) tensors that each operator gives before any pass has run, for passes that serve only some
            dtypes or shapes; empty for a graph that is not captured yet.
    """

    region: str = ""
    holds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    operators: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    passes: tuple[Pass, ...] = ()
    results: Mapping[Any, Sequence[torch.Tensor]] = dataclasses.field(default_factory=dict)

    def find(self, name: str) -> Pass | None:
        """The pass called ``name`` if it is on."""
        return next((one for one in self.passes if one.name == name), None)

    def per(self, **sites: int) -> int | None:
        """Expected sites from sites per block, e.g. ``per(transformer_block=2)``; ``None`` in an unknown graph."""
        if not self.holds:
            return None
        return sum(count * self.holds.get(kind.replace("_", ".", 1), 0) for kind, count in sites.items())


@dataclass(frozen=True)
class Mutant:
    """A wrong version of a pass. The generic tests fail if they cannot tell it from the right one."""

    why: str
    instance: Pass


@dataclass(frozen=True)
class Pass(abc.ABC):
    """Base of all passes. Subclass one of the three kinds, not this.

    A pass runs after those in ``after`` that are on. Some of these it may build on (``builds_on``): without them it has
    nothing to do, and what an Exact pass keeps the bits of is a pipeline that has them on.

    A pass that was renamed lists its ``former_names``: they keep working for one version, with a DeprecationWarning.
    """

    name: ClassVar[str]
    former_names: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[str]
    promise: ClassVar[Promise]
    after: ClassVar[tuple[str, ...]] = ()
    builds_on: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()

    def applies(self, device: Device, view: PipelineView) -> str | None:
        """Return why the pass cannot run on this device and pipeline, as the report shows it; ``None`` if it can."""
        return None

    @abc.abstractmethod
    def mutants(self) -> Sequence[Mutant]:
        """Wrong versions of this pass, at least one."""

    def test_instance(self) -> Pass:
        """This pass as the generic tests install it on the tiny pipeline, where its defaults may not fit the canvas."""
        return self

    def plan(self, view: PipelineView, latents: tuple[int, int, int]) -> Plan | None:
        """How the pass cuts up the work of one generation; ``None`` when it cuts nothing.

        Args:
            view: a pipeline, or its parts on the meta device.
            latents: frames, rows and columns of the video's latents.

        Raises:
            H3OptError: the options do not fit a video of this size.
        """
        return None

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0] if cls.__doc__ else ""

    def options(self) -> dict[str, Any]:
        """The options and their current values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True)
class GraphPass(Pass):
    """Rewrites the semantic graph of each captured region through :meth:`rules`."""

    kind: ClassVar[str] = "graph"

    @abc.abstractmethod
    def rules(self) -> Sequence[Rule]:
        """The rewrites, tried in this order at every site."""

    def expect(self, facts: GraphFacts) -> int | None:
        """How many sites a graph with these facts must have; ``None`` when that cannot be known."""
        return None

    @abc.abstractmethod
    def example(self, draw: Draw) -> Example:
        """A function with exactly one site, with arguments of drawn shapes, dtypes, strides and values."""

    def declines(self) -> Sequence[Decline]:
        """Examples that must be left alone, one condition each."""
        return ()


@dataclass(frozen=True)
class _ModulePass(Pass):
    """Shared by the kinds that change modules rather than graphs."""

    @abc.abstractmethod
    def install(self, view: PipelineView, undo: ExitStack) -> int:
        """Change the pipeline and register on ``undo`` how to take every change back, bit for bit.

        Args:
            view: the components of the pipeline.
            undo: closed, last change first, on restore and when a later step fails. Large tensors that only it needs
                are dropped instead where ``view.restorable`` is false.

        Returns:
            How many sites were changed.
        """

    @abc.abstractmethod
    def expect(self, view: PipelineView) -> int:
        """How many sites this pipeline must have."""


@dataclass(frozen=True)
class FormatPass(_ModulePass):
    """Changes what weights are stored as, and the modules that read them."""

    kind: ClassVar[str] = "format"


@dataclass(frozen=True)
class SchedulePass(_ModulePass):
    """Changes when and where work runs, never what is computed.

    ``happens_before`` states the orderings the pass relies on or adds, one sentence each; ``h3opt explain`` shows it.
    """

    kind: ClassVar[str] = "schedule"
    happens_before: ClassVar[tuple[str, ...]] = ()
