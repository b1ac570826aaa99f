"""Base classes of passes.

A pass is a frozen dataclass in a file of its own. The fields of the class are the options that a profile may set; the
class attributes state the promise and the order relative to other passes. There are three kinds:

* :class:`FormatPass` changes the number format in which weights are stored;
* :class:`GraphPass` rewrites the semantic graph of a captured region;
* :class:`SchedulePass` changes when and where work runs.

Every pass carries *mutants*: deliberately wrong versions of itself, which the generic tests
(:mod:`h3opt.pass_api.testing`) must detect. A graph pass also carries an example that it must rewrite and examples that
it must leave unchanged.
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
    """The tiles or pieces into which a pass divides work, for ``h3opt explain``; ``str`` gives the lines to print."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON-ready types."""


@dataclass(frozen=True)
class QuantizedBlocks:
    """The linear layers of a repeated block that a format pass makes read FP8 activations.

    Attributes:
        kind: the kind of block, as in :attr:`GraphFacts.holds`, e.g. ``"transformer.block"``.
        layers: paths of the layers in the block, e.g. ``"attn.to_q"``.
        excluded: how many of a model's blocks keep the format of the model.
    """

    kind: str
    layers: frozenset[str]
    excluded: int = 0


@dataclass(frozen=True)
class GraphFacts:
    """Facts about a semantic graph that are known when passes run on it.

    Attributes:
        region: the name of the captured region, e.g. ``"transformer.block"``; ``""`` for a graph that was not
            captured from a known component.
        holds: the number of repeated blocks of each kind, e.g. ``{"transformer.block": 1}``, or the depth of the model
            with ``scope: model``; empty when unknown.
        operators: how often each operator occurs before any pass has run.
        passes: the graph and format passes that are on: they determine which sites are left for a later pass.
        results: the (fake) tensors that each operator returns before any pass has run, for passes that support only
            some dtypes or shapes; empty for a graph that is not captured yet.
        adapted: paths of the layers of a block that have an adapter, such as a LoRA, in some block. The side branch of
            the adapter reads the input of the layer too, so that no pass can leave this input out.
    """

    region: str = ""
    holds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    operators: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    passes: tuple[Pass, ...] = ()
    results: Mapping[Any, Sequence[torch.Tensor]] = dataclasses.field(default_factory=dict)
    adapted: frozenset[str] = frozenset()

    def find(self, name: str) -> Pass | None:
        """Return the pass called ``name`` if it is on."""
        return next((candidate for candidate in self.passes if candidate.name == name), None)

    def quantized(self, kind: str) -> tuple[QuantizedBlocks, ...]:
        """Return what the format passes that are on declare about blocks of ``kind``."""
        declared = [item.quantized_blocks() for item in self.passes if isinstance(item, FormatPass)]
        return tuple(blocks for blocks in declared if blocks is not None and blocks.kind == kind)

    def quantized_layers(self, kind: str) -> frozenset[str]:
        """Return the layers that read FP8 activations in a block of ``kind`` that is not excluded."""
        return frozenset().union(*(blocks.layers for blocks in self.quantized(kind)))

    def count(self, blocks: QuantizedBlocks) -> int:
        """Return how many blocks of this graph are in FP8; excluded ones are known in a graph of the whole model only.

        A graph of a single block is taken to be of a block in FP8.
        """
        excluded = 0 if self.region == blocks.kind else blocks.excluded
        return max(self.holds.get(blocks.kind, 0) - excluded, 0)

    def per(self, **sites: int) -> int | None:
        """Compute the expected sites from sites per block, e.g. ``per(transformer_block=2)``.

        Returns:
            ``None`` for an unknown graph.
        """
        if not self.holds:
            return None
        return sum(count * self.holds.get(kind.replace("_", ".", 1), 0) for kind, count in sites.items())


@dataclass(frozen=True)
class Mutant:
    """A wrong version of a pass. The generic tests fail if they do not detect the error.

    Attributes:
        why: what is wrong with it.
        instance: the wrong pass.
    """

    why: str
    instance: Pass


@dataclass(frozen=True)
class Pass(abc.ABC):
    """Base of all passes. Subclass one of the three kinds, not this class.

    Attributes:
        name: the identifier of the pass in profiles and on the command line.
        former_names: names that the pass had before. They keep working for one version, with a DeprecationWarning.
        kind: ``"format"``, ``"graph"`` or ``"schedule"``.
        promise: the bound on how the pass may change the output.
        after: names of passes that run before this pass if they are on.
        builds_on: passes without which this pass has no site. An Exact pass that builds on others reproduces the bits
            of a pipeline in which they are on.
        conflicts: names of passes that cannot be on together with this pass.
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
        """Return wrong versions of this pass, at least one."""

    def test_instance(self) -> Pass:
        """Return the pass that the generic tests install on the tiny pipeline.

        Override it where the default options do not fit the small canvas of that pipeline.
        """
        return self

    def plan(self, view: PipelineView, latents: tuple[int, int, int]) -> Plan | None:
        """Describe how the pass divides the work of one generation; ``None`` when it divides nothing.

        Args:
            view: a pipeline, or components on the meta device.
            latents: frames, rows and columns of the video latents.

        Raises:
            H3OptError: the options do not fit a video of this size.
        """
        return None

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0] if cls.__doc__ else ""

    def options(self) -> dict[str, Any]:
        """Return the options and their current values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True)
class GraphPass(Pass):
    """Base of passes that rewrite the semantic graph of each captured region by :meth:`rules`."""

    kind: ClassVar[str] = "graph"

    @abc.abstractmethod
    def rules(self) -> Sequence[Rule]:
        """Return the rewrites, in the order in which they are tried at every site."""

    def expect(self, facts: GraphFacts) -> int | None:
        """Return how many sites a graph with these facts must have; ``None`` when that cannot be known."""
        return None

    @abc.abstractmethod
    def example(self, draw: Draw) -> Example:
        """Return a function with exactly one site, with arguments of the drawn shapes, dtypes, strides and values."""

    def declines(self) -> Sequence[Decline]:
        """Return examples that must be left unchanged, each for a single condition."""
        return ()


@dataclass(frozen=True)
class _ModulePass(Pass):
    """Base of the kinds that change modules rather than graphs."""

    @abc.abstractmethod
    def install(self, view: PipelineView, undo: ExitStack) -> int:
        """Change the pipeline and register on ``undo`` how to reverse every change, bit for bit.

        Args:
            view: the components of the pipeline.
            undo: closed on restore, and when a later step fails; it reverses the last change first. Where
                ``view.restorable`` is false, do not keep large tensors for it.

        Returns:
            The number of sites that were changed.
        """

    @abc.abstractmethod
    def expect(self, view: PipelineView) -> int:
        """Return how many sites this pipeline must have."""


@dataclass(frozen=True)
class FormatPass(_ModulePass):
    """Base of passes that change the number format of weights, and the modules that read these weights."""

    kind: ClassVar[str] = "format"

    def quantized_blocks(self) -> QuantizedBlocks | None:
        """Declare which layers read FP8 activations, for the graph passes that fuse the quantization.

        Returns:
            ``None`` when this format quantizes no activation.
        """
        return None


@dataclass(frozen=True)
class SchedulePass(_ModulePass):
    """Base of passes that change when and where work runs, never what is computed.

    Attributes:
        happens_before: the orderings that the pass relies on or adds, one sentence each, for ``h3opt explain``.
    """

    kind: ClassVar[str] = "schedule"
    happens_before: ClassVar[tuple[str, ...]] = ()
