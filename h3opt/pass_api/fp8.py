"""Linear layers stored and multiplied as FP8, and the passes that make layers of a model's blocks such layers."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from h3opt.device import to_host
from h3opt.errors import PassOptionError, PipelineError
from h3opt.kernels import ops
from h3opt.kernels.ops.linear import ACCUMULATE
from h3opt.pass_api.base import FormatPass, QuantizedBlocks
from h3opt.pipeline.adapters import adapter_layers, base_layer, before_merges
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.minimax_h3 import PROJECTIONS
from h3opt.pipeline.staleness import TensorSnapshot, is_managed

if TYPE_CHECKING:
    from h3opt.pipeline.view import PipelineView


_EVERY = "every layer"


class FP8Linear(torch.nn.Linear):
    """The class that a linear layer has while it multiplies in FP8: e4m3 weights, one float32 scale per output row.

    The layer stays the object that it was, with its ``weight`` and ``bias``: checkpoints, casts and adapters find what
    they find in a linear layer. On a GPU the weight waits in host memory. ``forward`` quantizes its input per token and
    multiplies in FP8, with sums as ``accumulate`` says; an adapter around the layer adds its own side branch, which
    reads the unquantized input. The quantize is an operator of its own, so that a graph pass can merge equal ones and
    move them into their producer.

    Attributes:
        weight_fp8: e4m3 ``[out, in]``, quantized from ``weight``.
        weight_scale: float32 ``[out, 1]``.
        accumulate: ``"precise"`` or ``"fast"``, see :func:`h3opt.kernels.ops.linear.scaled_linear_definition`.
        freed: whether the weight was freed, because the pipeline need not be restorable.
    """

    weight_fp8: torch.Tensor
    weight_scale: torch.Tensor
    accumulate: str
    freed: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self, FP8Linear):  # a library's hook has kept this method, and the pass is off again
            return type(self).forward(self, x)
        quantized, scale = ops.quantize_rows(x)
        return ops.scaled_linear(
            quantized, scale, self.weight_fp8, self.weight_scale, self.bias, x.dtype, self.accumulate
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PipelineError(
            "A copy would not notice changes of the weights that its FP8 weights were made from. "
            "Call restore() before copying or pickling."
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Cast and move the layer; FP8 weights are moved only, and a weight that waits in host memory stays there."""
        kept = {name: self._buffers[name] for name in ("weight_fp8", "weight_scale")}
        waits = self.weight.device != self.weight_fp8.device
        result = super()._apply(fn, recurse)
        for name, tensor in kept.items():
            moved = self._buffers[name]
            assert tensor is not None and moved is not None
            self._buffers[name] = tensor.to(moved.device)
        if waits and self.weight.device.type == "cuda":
            self.weight.data = to_host(self.weight.data)
        return result

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._check_not_freed(f"{prefix}weight cannot be saved")
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}weight" in state_dict:
            self._check_not_freed(f"{prefix}weight cannot be loaded")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _check_not_freed(self, what: str) -> None:
        if self.freed:
            raise PipelineError(
                f"{what}: it was freed when it became FP8, because of restorable=False. Load the pipeline again. "
                "Load adapters before optimize in such a pipeline."
            )


@dataclass(frozen=True)
class FP8BlocksPass(FormatPass):
    """Base of the passes that make linear layers of repeated blocks FP8.

    The originals wait in host memory, or are freed where the pipeline need not be restorable. Where a weight is changed
    later (a checkpoint is loaded, a cast), the layer is quantized again before the next call of the model.

    Options:
        layers: which linear layers of a block, by their path in it.
        keep_first, keep_last: how many blocks at either end stay as they are.
        accumulate: how products are summed, ``"precise"`` or ``"fast"`` for all layers, or a mapping from layers to
            these; a layer that it does not name is precise.

    Precise is the default of every layer. Measured on an H200, with operands whose channels have offsets as trained
    networks' have: at 14,336 inputs (``ff.net.2``) fast accumulation has an error of 0.066 where precise has 0.003, and
    saves 3 % of the product's time; at 5,376 inputs 0.024 and 0.003, for 10 %. At both the limit that quantization sets
    is below 0.003, so fast loses more than FP8 itself does there.
    """

    block_kind: ClassVar[str]
    layers: tuple[str, ...] = PROJECTIONS
    keep_first: int = 0
    keep_last: int = 0
    accumulate: Any = "precise"

    def __post_init__(self) -> None:
        if not isinstance(self.layers, (list, tuple)) or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers must be a list that names each layer once, got {self.layers!r}")
        if not self.layers:
            raise ValueError("layers is empty, so nothing would become FP8. Name layers, or turn the pass off")
        object.__setattr__(self, "layers", tuple(self.layers))
        unknown = [layer for layer in self.layers if layer not in PROJECTIONS]
        if unknown:
            raise ValueError(f"layers has {unknown[0]!r}, which is none of {', '.join(PROJECTIONS)}")
        if any(type(kept) is not int or kept < 0 for kept in (self.keep_first, self.keep_last)):
            raise ValueError("keep_first and keep_last must be whole numbers and must not be negative")
        if not isinstance(self.accumulate, str):  # pairs in order, so that equal passes are equal and can be hashed
            object.__setattr__(self, "accumulate", tuple(sorted(dict(self.accumulate).items())))
        for layer, choice in self._choices():
            if choice not in ACCUMULATE:
                raise ValueError(f"accumulate must be {' or '.join(ACCUMULATE)}, got {choice!r} for {layer}")
            if layer not in (*self.layers, _EVERY):
                raise ValueError(f"accumulate has {layer!r}, which is none of the layers {', '.join(self.layers)}")

    def accumulate_of(self, layer: str) -> str:
        """How the products of a layer, named by its path in a block, are summed."""
        choices = dict(self._choices())
        return choices.get(_EVERY) or choices.get(layer, "precise")

    def _choices(self) -> tuple[tuple[str, str], ...]:
        return ((_EVERY, self.accumulate),) if isinstance(self.accumulate, str) else self.accumulate

    @abc.abstractmethod
    def blocks(self, view: PipelineView) -> Sequence[torch.nn.Module]:
        """All repeated blocks of the model, none if it is missing."""

    @abc.abstractmethod
    def model(self, view: PipelineView) -> Any:
        """The module that calls the blocks; it is there where there are blocks."""

    def quantized_blocks(self) -> QuantizedBlocks:
        return QuantizedBlocks(self.block_kind, frozenset(self.layers), self.keep_first + self.keep_last)

    def expect(self, view: PipelineView) -> int:
        return max(len(self.blocks(view)) - self.keep_first - self.keep_last, 0) * len(self.layers)

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        blocks = self.blocks(view)
        if self.keep_first + self.keep_last >= len(blocks):
            raise PassOptionError(
                f"{self.name}: keep_first {self.keep_first} and keep_last {self.keep_last} keep all {len(blocks)} "
                "blocks, so nothing would become FP8. Keep fewer, or turn the pass off."
            )
        converted = []
        sites = list(self._sites(view))
        self.check_unmanaged(linear for linear, _ in sites)
        for linear, layer in sites:
            if view.restorable:
                undo.callback(_restore, linear)
            converted.append(self._convert(linear, layer, view.restorable))
        model = self.model(view)
        # innermost: the wrapper only looks at weights, so a caller may replay this model without it
        wrap_calls(model, _FollowWeights(self, model, converted), undo, innermost=True)
        for owner in (model, view.pipe):  # the pipeline does not always ask the model
            before_merges(owner, _refuse_merge, undo)
        return len(converted)

    def check_unmanaged(self, layers: Iterable[torch.nn.Module]) -> None:
        """Check that no other library moves or casts the weights of these layers around every call.

        Raises:
            PipelineError: a library does.
        """
        if any(is_managed(layer) for layer in layers):
            raise PipelineError(
                f"Another library moves or casts weights around every call of layers that {self.name} makes FP8. "
                "Take the offload or the casting off (after restore() if the pass is on), or leave the pass out."
            )

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize a weight ``[out, in]`` row by row, scale = amax / 448: e4m3 ``[out, in]``, float32 ``[out, 1]``."""
        quantized: tuple[torch.Tensor, torch.Tensor] = ops.quantize_rows(weight)
        return quantized

    def _convert(self, linear: Any, layer: str, restorable: bool) -> FP8Linear:
        weight_fp8, scale = self.quantize(linear.weight.detach())
        linear.__class__ = FP8Linear
        linear.register_buffer("weight_fp8", weight_fp8, persistent=False)
        linear.register_buffer("weight_scale", scale, persistent=False)
        linear.accumulate, linear.freed = self.accumulate_of(layer), not restorable
        linear.weight.data = to_host(linear.weight.data) if restorable else linear.weight.data.new_empty(0)
        return linear

    def _sites(self, view: PipelineView) -> Iterator[tuple[torch.nn.Linear, str]]:
        """The linear layers, also those below adapters, with their path in the block."""
        blocks = self.blocks(view)
        for block in blocks[self.keep_first : max(len(blocks) - self.keep_last, 0)]:
            for layer in self.layers:
                linear: Any = base_layer(block.get_submodule(layer))
                if type(linear) is torch.nn.Linear:
                    yield linear, layer


class _FollowWeights:
    """A call wrapper of a model that quantizes layers again where their weights were changed since."""

    def __init__(self, fp8: FP8BlocksPass, model: torch.nn.Module, layers: Sequence[FP8Linear]) -> None:
        self._pass, self._model, self._layers = fp8, model, layers
        self._quantized_from = [TensorSnapshot([layer.weight]) for layer in layers]

    def __call__(self, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        self._pass.check_unmanaged(self._layers)
        for number, layer in enumerate(self._layers):
            if not layer.freed and not self._quantized_from[number].matches([layer.weight]):
                self._quantize_again(layer)
                self._quantized_from[number] = TensorSnapshot([layer.weight])
        if getattr(self._model, "peft_config", None):
            _move_adapters(self._model)
        return proceed(*args, **kwargs)

    def _quantize_again(self, layer: FP8Linear) -> None:
        with torch.no_grad():
            weight, scale = self._pass.quantize(layer.weight.detach().to(layer.weight_fp8.device))
            layer.weight_fp8.copy_(weight)  # in place: recorded CUDA graphs read these tensors
            layer.weight_scale.copy_(scale)
            if layer.weight.device.type == "cuda":
                layer.weight.data = to_host(layer.weight.data)


def _move_adapters(model: torch.nn.Module) -> None:
    """Move adapters to the device of their FP8 layer: PEFT creates them on that of the weight, which is the host's."""
    for adapter in adapter_layers(model):
        layer = base_layer(adapter)
        if isinstance(layer, FP8Linear):
            for parameter in adapter.parameters():
                if parameter is not layer.weight and parameter.device != layer.weight_fp8.device:
                    parameter.data = parameter.data.to(layer.weight_fp8.device)


def _refuse_merge(name: str) -> None:
    raise PipelineError(
        f"{name} would change weights that are FP8 now, and the base weights would lose the adapter's small changes. "
        "Keep the adapter as a side branch, or call restore() first, merge, and optimize again."
    )


def _restore(linear: Any) -> None:
    """Make an FP8 layer the linear layer that it was, with the weight on the device of the FP8 weight."""
    if isinstance(linear, FP8Linear):
        device = linear.weight_fp8.device
        setattr(linear, "__class__", torch.nn.Linear)  # noqa: B010  a type checker takes it for an FP8Linear
        for name in ("weight_fp8", "weight_scale"):
            delattr(linear, name)
        del linear.accumulate, linear.freed
        linear.weight.data = linear.weight.data.to(device)
