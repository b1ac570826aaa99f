"""Attention operators: FP8 attention and bf16 attention, each from the library that the caller names.

A library is a *backend*: what is installed and what this GPU can run differs, so :func:`missing` says in words why a
backend cannot be used, and a pass declines with that. Nothing falls back to another backend by itself.

All take ``[batch, tokens, heads, head_dim]``, the layout projections write, so nothing is transposed in between.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3opt.device import Device
from h3opt.errors import DeviceError
from h3opt.kernels.ops.definition_trials import ATTENTION_CHECK, FP8_ATTENTION_CHECK
from h3opt.kernels.ops.registry import DTYPES, E4M3, E4M3_MAX, SCALE_AMAX_MIN, launch, register_op

PROBABILITY_SCALE = 256.0
"""Probabilities are at most 1: times 2⁸ they use e4m3's range, as FlashAttention-3 and cuDNN have it too."""


FP8_BACKENDS = ("fa3", "cudnn", "triton")


BF16_BACKENDS = ("fa3", "cudnn", "flash")


_SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


_PACKAGES = {"fa3": ("fa3_fwd_interface", "fa3-fwd"), "cudnn": ("cudnn", "nvidia-cudnn-frontend")}


_CHUNK = 1024


def missing(backend: str, device: Device, fp8: bool) -> str | None:
    """Why ``backend`` cannot be used on ``device``; ``None`` if it can.

    On the CPU every FP8 backend is emulated by one definition, so none is missing there.
    """
    if device.type == "cpu":
        return None if fp8 or backend == "flash" else f"{backend} attention needs a CUDA device"
    if backend == "fa3" and device.capability[0] != 9:
        return f"FlashAttention-3 needs Hopper (SM90), and {device.name} is SM{device.capability[0]}"
    if fp8 and device.capability < (8, 9):
        return f"{device.name} has no FP8; SM89 or newer does"
    if fp8 and backend == "cudnn" and device.capability[0] < 9:
        return f"cuDNN's FP8 attention needs SM90 or newer, and {device.name} is SM{device.capability[0]}"
    module, package = _PACKAGES.get(backend, ("torch", "torch"))
    if (backend == "fa3" or fp8) and importlib.util.find_spec(module) is None:
        return f"{backend} attention needs the package {package}; run `pip install {package}`"
    return None


def norm_head_scale_definition(x: Tensor, weight: Tensor) -> Tensor:
    """What to multiply RMS-normed and rotated heads by so that none can leave e4m3: ``448 / (√D · max|weight|)``.

    x [..., heads, D] gives the number of heads only; weight [D] is that of the norm -> float32 [heads]. RMSNorm bounds
    a head's length by √D before the weight, and a rotation keeps the length of each pair: no data has to be seen.
    """
    heads, head_dim = x.shape[-2:]
    bound = torch.linalg.vector_norm(weight.float(), float("inf")) * head_dim**0.5
    return (E4M3_MAX / bound.clamp(min=SCALE_AMAX_MIN)).expand(heads).contiguous()


def dynamic_head_scale_definition(x: Tensor, per_head: bool) -> Tensor:
    """``448 / amax|x|`` for each head, or one for all: x [batch, tokens, heads, D] -> float32 [heads]."""
    if not x.numel():
        return x.new_ones(x.shape[2:3], dtype=torch.float32)
    return scale_from(torch.linalg.vector_norm(x, float("inf"), dim=(0, 1, 3)).float(), per_head)


def quantize_heads_definition(x: Tensor, head_scale: Tensor) -> Tensor:
    """x [..., heads, D] times head_scale float32 [heads], clamped to ±448, as e4m3; NaN stays NaN."""
    return (x.float() * head_scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).contiguous()


def fp8_attention_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """Softmax attention on e4m3 operands: q, k, v [batch, tokens, heads, D] -> [batch, tokens, heads, D].

    Each operand was multiplied by its scale, float32 [heads]. Logits and sums are float32. Probabilities are taken
    relative to the largest of their row, times 256, and rounded to e4m3 before they meet v; the row's sum is that of
    the unrounded ones. Libraries do the same in blocks with a running maximum: close to this, not equal to it.
    """
    query, key, value = (
        (one.float() / scale[:, None]).transpose(1, 2)
        for one, scale in ((q, q_scale), (k, k_scale), (v, torch.ones_like(v_scale)))
    )
    out = torch.empty_like(query)
    for start in range(0, query.shape[2], _CHUNK):  # a whole [tokens, tokens] would not fit for long sequences
        logits = query[:, :, start : start + _CHUNK] @ key.transpose(-1, -2) * q.shape[-1] ** -0.5
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        rounded = (weights * PROBABILITY_SCALE).to(E4M3).float()
        total = weights.sum(-1, keepdim=True) * PROBABILITY_SCALE
        out[:, :, start : start + _CHUNK] = (rounded @ value) / total / v_scale[:, None, None]
    return out.transpose(1, 2).to(out_dtype).contiguous()


def fp8_attention_quantized_definition(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    """As ``fp8_attention``, rounded to e4m3 at v's largest step: (e4m3 [batch, tokens, heads·D], float32 [.., 1]).

    An output is an average of v's rows, so what no v exceeds, no output exceeds: the scale needs no second pass.
    """
    out = fp8_attention_definition(q, k, v, q_scale, k_scale, v_scale, torch.float32, backend).flatten(2)
    scale = v_scale.amin()
    quantized = (out * scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return quantized, (1.0 / scale).expand(*out.shape[:2], 1).contiguous()


def attention_definition(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    """Softmax attention without a mask: q, k, v [batch, tokens, heads, D] -> contiguous, the same shape and dtype."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def scale_from(amax: Tensor, per_head: bool) -> Tensor:
    """``448 / amax`` of each head, or of the largest: float32 [heads] -> float32 [heads]."""
    if not per_head:
        amax = amax.amax().expand(amax.shape)
    return (E4M3_MAX / amax.clamp(min=SCALE_AMAX_MIN)).contiguous()


def _dynamic_head_scale_cuda(x: Tensor, per_head: bool) -> Tensor:
    if not x.numel() or x.dtype not in DTYPES:
        return dynamic_head_scale_definition(x, per_head)
    return scale_from(launch("quantize", "heads_amax", x), per_head)


def _quantize_heads_cuda(x: Tensor, head_scale: Tensor) -> Tensor:
    if x.ndim < 2 or not x.numel() or x.dtype not in DTYPES:
        return quantize_heads_definition(x, head_scale)
    return launch("quantize", "quantize_heads", x, head_scale)


def _fp8_attention_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    _must_have(backend, q.device, fp8=True)
    if not q.numel():
        return q.new_empty(q.shape, dtype=out_dtype)
    if backend == "fa3":
        descales = [(1.0 / one).expand(q.shape[0], -1).contiguous() for one in (q_scale, k_scale, v_scale)]
        out = _fa3()(q, k, v, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2])
        return (out[0] if isinstance(out, tuple) else out).to(out_dtype)
    if backend == "cudnn" and torch.cuda.get_device_capability(q.device)[0] == 9:  # on Hopper it writes FP8 alone
        codes, descale = _fp8_attention_quantized_cuda(q, k, v, q_scale, k_scale, v_scale, backend)
        return (codes.view(q.shape).float() * descale[..., None]).to(out_dtype)
    if backend == "cudnn":
        return _cudnn_fp8(q, k, v, q_scale, k_scale, v_scale, None).to(out_dtype)
    return launch("attention", "fp8_attention", q, k, v, q_scale, k_scale, v_scale).to(out_dtype)


def _fp8_attention_quantized_cuda(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    _must_have(backend, q.device, fp8=True)
    scale = v_scale.amin()
    if backend == "cudnn":
        quantized = _cudnn_fp8(q, k, v, q_scale, k_scale, v_scale, scale).flatten(2)
    elif backend == "triton":
        quantized = launch("attention", "fp8_attention", q, k, v, q_scale, k_scale, v_scale, scale).flatten(2)
    else:
        raise DeviceError(f"{backend} attention cannot write FP8. Use cudnn or triton.")
    return quantized, (1.0 / scale).expand(*q.shape[:2], 1).contiguous()


def _attention_cuda(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    _must_have(backend, q.device, fp8=False)
    if backend == "fa3":
        out = _fa3()(q, k, v)
        return out[0] if isinstance(out, tuple) else out
    return _attention_sdpa(q, k, v, backend)


def _attention_sdpa(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))  # all fused kernels ask for it
    with sdpa_kernel(_SDPA[backend]):
        return attention_definition(q, k, v, backend)


def _must_have(backend: str, device: torch.device, fp8: bool) -> None:
    reason = missing(backend, Device.of(device), fp8)
    if reason is not None:
        raise DeviceError(f"{reason}. Or name another backend.")


@functools.cache
def _fa3() -> Any:
    return importlib.import_module("fa3_fwd_interface").flash_attn_func


def _cudnn_fp8(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, out_scale: Tensor | None
) -> Tensor:
    """cuDNN's ``sdpa_fp8``: one scale per tensor, so every head must have the same. e4m3 out with ``out_scale``."""
    graph = _cudnn_graph(tuple(q.shape), out_scale is not None, q.device)
    one = torch.ones(1, device=q.device)
    out = torch.empty(q.shape, dtype=torch.bfloat16 if out_scale is None else E4M3, device=q.device)
    descales = [1.0 / scale[:1] for scale in (q_scale, k_scale, v_scale)]
    graph.run([q, k, v], descales, one if out_scale is None else out_scale.reshape(1), out)
    return out


class _CudnnGraph:
    """A built cuDNN graph for one shape; building takes a second, running it microseconds."""

    def __init__(self, shape: tuple[int, ...], fp8_out: bool, device: torch.device) -> None:
        cudnn = importlib.import_module("cudnn")
        kinds = cudnn.data_type
        self.handle, self.cudnn, self.device = cudnn.create_handle(), cudnn, device
        graph = cudnn.pygraph(
            io_data_type=kinds.FP8_E4M3,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self.handle,
        )
        batch, tokens, heads, width = shape
        dim, stride = [batch, heads, tokens, width], [tokens * heads * width, width, heads * width, 1]

        def scalar(name: str) -> Any:
            return graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=kinds.FLOAT)

        operands = [graph.tensor(name=name, dim=dim, stride=stride, data_type=kinds.FP8_E4M3) for name in "qkv"]
        scales = [scalar(f"descale_{name}") for name in "qkv"]
        probability = [scalar("descale_s"), scalar("scale_s")]
        scale_o = scalar("scale_o")
        out, _, amax_s, amax_o = graph.sdpa_fp8(
            q=operands[0],
            k=operands[1],
            v=operands[2],
            descale_q=scales[0],
            descale_k=scales[1],
            descale_v=scales[2],
            descale_s=probability[0],
            scale_s=probability[1],
            scale_o=scale_o,
            attn_scale=width**-0.5,
            generate_stats=False,
            use_causal_mask=False,
        )
        out.set_output(True).set_dim(dim).set_stride(stride)
        out.set_data_type(kinds.FP8_E4M3 if fp8_out else kinds.BFLOAT16)
        for amax in (amax_s, amax_o):
            amax.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(kinds.FLOAT)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self.graph, self.inputs, self.out = graph, [*operands, *scales, scale_o], out
        times, per = torch.full((1,), PROBABILITY_SCALE, device=device), torch.empty(2, device=device)
        self.constants = {probability[0]: 1 / times, probability[1]: times, amax_s: per[:1], amax_o: per[1:]}
        self.workspace = torch.empty(max(graph.get_workspace_size(), 1), device=device, dtype=torch.uint8)

    def run(self, operands: list[Tensor], descales: list[Tensor], scale_o: Tensor, out: Tensor) -> None:
        """Enqueue on the current stream; operands are contiguous e4m3."""
        given = [*(one.contiguous() for one in operands), *descales, scale_o]
        pack = {**dict(zip(self.inputs, given, strict=True)), **self.constants, self.out: out}
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream(self.device).cuda_stream)
        self.graph.execute(pack, self.workspace, handle=self.handle)


@functools.lru_cache(maxsize=16)
def _cudnn_graph(shape: tuple[int, ...], fp8_out: bool, device: torch.device) -> _CudnnGraph:
    try:
        return _CudnnGraph(shape, fp8_out, device)
    except Exception as error:  # cudnnGraphNotSupportedError, of a module that need not be there
        raise DeviceError(
            f"cuDNN has no FP8 attention for [batch, tokens, heads, head_dim] {list(shape)} here: "
            f"{type(error).__name__}. Name another backend of fp8_attention."
        ) from error


atexit.register(_cudnn_graph.cache_clear)  # while cudnn is still there to be told


def _norm_head_scale_fake(x, weight):
    return x.new_empty(x.shape[-2:-1], dtype=torch.float32)


def _dynamic_head_scale_fake(x, per_head):
    return x.new_empty(x.shape[2:3], dtype=torch.float32)


def _quantize_heads_fake(x, head_scale):
    return x.new_empty(x.shape, dtype=E4M3)


def _fp8_attention_fake(q, k, v, q_scale, k_scale, v_scale, out_dtype, backend):
    return q.new_empty(q.shape, dtype=out_dtype)


def _fp8_attention_quantized_fake(q, k, v, q_scale, k_scale, v_scale, backend):
    batch, tokens, heads, width = q.shape
    return q.new_empty((batch, tokens, heads * width)), q.new_empty((batch, tokens, 1), dtype=torch.float32)


def _attention_fake(q, k, v, backend):
    return q.new_empty(q.shape)


_OPERANDS = "(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, "


norm_head_scale = register_op(
    "norm_head_scale",
    "(Tensor x, Tensor weight) -> Tensor",
    norm_head_scale_definition,
    norm_head_scale_definition,
    _norm_head_scale_fake,
    None,
)


dynamic_head_scale = register_op(
    "dynamic_head_scale",
    "(Tensor x, bool per_head) -> Tensor",
    dynamic_head_scale_definition,
    _dynamic_head_scale_cuda,
    _dynamic_head_scale_fake,
    "heads_amax_kernel",
)


quantize_heads = register_op(
    "quantize_heads",
    "(Tensor x, Tensor head_scale) -> Tensor",
    quantize_heads_definition,
    _quantize_heads_cuda,
    _quantize_heads_fake,
    "quantize_heads_kernel",
)


fp8_attention = register_op(
    "fp8_attention",
    _OPERANDS + "ScalarType out_dtype, str backend) -> Tensor",
    fp8_attention_definition,
    _fp8_attention_cuda,
    _fp8_attention_fake,
    None,
    check=FP8_ATTENTION_CHECK,
)


fp8_attention_quantized = register_op(
    "fp8_attention_quantized",
    _OPERANDS + "str backend) -> (Tensor, Tensor)",
    fp8_attention_quantized_definition,
    _fp8_attention_quantized_cuda,
    _fp8_attention_quantized_fake,
    None,
    check=FP8_ATTENTION_CHECK,
)


attention = register_op(
    "attention",
    "(Tensor q, Tensor k, Tensor v, str backend) -> Tensor",
    attention_definition,
    _attention_cuda,
    _attention_fake,
    None,
    cpu=_attention_sdpa,
    check=ATTENTION_CHECK,
)
