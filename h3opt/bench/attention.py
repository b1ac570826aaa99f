"""How far attention is from exact arithmetic, by kind of data and length, in every library; and how fast it is.

FP8 tensor cores of Hopper keep about 14 bits of a sum. Whether that shows depends on the data: see
:mod:`h3opt.kernels.data_kinds`. The errors are relative, against float64 attention of the unquantized operands on
sampled queries. The limit that they are divided by is what the number format costs by itself: e4m3 operands and
probabilities, an output in bfloat16, and sums in float64.

Variants are named by their library. ``one call`` attends to all keys in one sum, as libraries are usually called;
``chunked`` is h3opt's: V without the mean of each chunk of keys, and the chunks' results merged in float32.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from h3opt.bench.harness import Progress
from h3opt.device import Device
from h3opt.environment import versions
from h3opt.kernels import OPERATORS
from h3opt.kernels.data_kinds import ATTENTION_KINDS, draw_attention
from h3opt.kernels.ops import attention
from h3opt.kernels.ops.definition_trials import attention_exact, quantized_operands
from h3opt.metrics.bits import relative_error

TOKENS = (2048, 19456, 38400, 104192)
HEAD_DIM = 128
CHUNK = 3072
"""Keys a chunk: 2400 to 3300 measured best on an H200, at 1.10 times the time of one call."""

_ERROR_HEADS, _SPEED_HEADS, _QUERIES = 4, 56, 256


@dataclass
class AttentionError:
    """One variant on one kind of data at one length.

    Attributes:
        variant, kind, tokens: which.
        error: relative error on sampled queries, ``None`` if the library failed.
        limit: the error that the number format alone costs.
        failure: why there is no error.
    """

    variant: str
    kind: str
    tokens: int
    limit: float
    error: float | None = None
    failure: str | None = None

    @property
    def ratio(self) -> float | None:
        """``error / limit``."""
        return self.error / self.limit if self.error is not None else None


@dataclass
class AttentionSpeed:
    """One variant's time at one length on zero-mean data; casts to FP8 are not part of it."""

    variant: str
    tokens: int
    milliseconds: float
    tflops: float


@dataclass
class AttentionBench:
    """The result of :func:`bench_attention`."""

    device: str
    head_dim: int
    error_heads: int
    speed_heads: int
    errors: list[AttentionError] = field(default_factory=list)
    speeds: list[AttentionSpeed] = field(default_factory=list)

    @property
    def title(self) -> str:
        return (
            f"{self.device}: attention with heads of {self.head_dim}; error over limit on {self.error_heads} heads, "
            f"TFLOP/s on {self.speed_heads}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types."""
        errors = [{**asdict(one), "ratio": one.ratio} for one in self.errors]
        return {**asdict(self), "errors": errors, "versions": versions()}

    def markdown(self) -> str:
        """A table per length: a row per kind with the limit, and the error over it of every variant."""
        return "\n\n".join(
            f"{tokens} tokens\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in _ruled(self._rows(tokens)))
            for tokens in self._lengths()
        )

    def __str__(self) -> str:
        parts = [self.title]
        for tokens in self._lengths():
            rows = self._rows(tokens)
            widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
            lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
            parts.append(f"{tokens} tokens\n" + "\n".join(lines))
        failures = {one.failure: one.variant for one in self.errors if one.failure is not None}
        parts += [f"{variant}: {failure}" for failure, variant in failures.items()]
        return "\n\n".join(parts)

    def _lengths(self) -> list[int]:
        return list(dict.fromkeys(one.tokens for one in self.errors))

    def _rows(self, tokens: int) -> list[list[str]]:
        here = [one for one in self.errors if one.tokens == tokens]
        variants = list(dict.fromkeys(one.variant for one in here))
        found = {(one.kind, one.variant): one for one in here}
        rows = [["kind", "limit", *variants]]
        for kind in dict.fromkeys(one.kind for one in here):
            limit = next(one.limit for one in here if one.kind == kind)
            cells = [found[kind, variant].ratio for variant in variants]
            rows.append([kind, f"{limit:.4f}", *("–" if cell is None else f"{cell:.2f}" for cell in cells)])
        rates = {one.variant: one.tflops for one in self.speeds if one.tokens == tokens}
        if rates:
            rows.append(["TFLOP/s", "", *(f"{rates[one]:.0f}" if one in rates else "–" for one in variants)])
        return rows


def bench_attention(
    device: str | torch.device = "cuda",
    tokens: Sequence[int] = TOKENS,
    *,
    kinds: Sequence[str] = ATTENTION_KINDS,
    chunk: int = CHUNK,
    progress: Progress | None = None,
    on_length: Callable[[AttentionBench], None] | None = None,
) -> AttentionBench:
    """Measure every library that this device has.

    Args:
        device: on a CPU all FP8 libraries are one definition, which is measured once and not timed.
        tokens: the lengths.
        kinds: of data.
        chunk: keys a chunk of the chunked variants.
        progress: told before each kind.
        on_length: gets the result so far after each length, so that a run that is cut short leaves what it found.
    """
    device = torch.device(device)
    variants = _variants(device, chunk)
    result = AttentionBench(Device.of(device).name, HEAD_DIM, _ERROR_HEADS, _SPEED_HEADS)
    with torch.no_grad():
        for place, length in enumerate(tokens):
            for number, kind in enumerate(kinds):
                if progress is not None:
                    progress(f"{length} tokens, {kind}", place * len(kinds) + number, len(tokens) * len(kinds))
                result.errors += _errors(variants, kind, length, device)
            if device.type == "cuda":
                failed = {one.variant for one in result.errors if one.failure is not None and one.tokens == length}
                result.speeds += _speeds(
                    {name: v for name, v in variants.items() if name not in failed}, length, device
                )
            if on_length is not None:
                on_length(result)
    return result


Variant = Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]
"""Quantizes Q, K and V of bfloat16 and returns what attends."""


def _variants(device: torch.device, chunk: int) -> dict[str, Variant]:
    here = Device.of(device)
    on_cpu = device.type == "cpu"
    found: dict[str, Variant] = {}
    for backend in ("triton",) if on_cpu else attention.FP8_BACKENDS:
        if attention.missing(backend, here, fp8=True) is None:
            label = "definition" if on_cpu else f"{backend} FP8"
            found[f"{label}, one call"] = partial(_fp8, backend=backend, chunk=None)
            if _has_chunks():
                found[f"{label}, chunked"] = partial(_fp8, backend=backend, chunk=chunk)
    for backend in attention.BF16_BACKENDS:
        if attention.missing(backend, here, fp8=False) is None:
            found[f"{backend} bf16"] = partial(_bf16, backend=backend)
    return found


def _has_chunks() -> bool:
    return "v_mean" in _argument_names()


def _argument_names() -> list[str]:
    return [argument.name for argument in OPERATORS["fp8_attention"]._schema.arguments]


def _fp8(q: Tensor, k: Tensor, v: Tensor, backend: str, chunk: int | None) -> Callable[[], Tensor]:
    operands: dict[str, Any] = quantized_operands(q, k, v, backend != "cudnn", chunk)
    if chunk is None and _has_chunks():  # one chunk that has all keys, and no mean taken off
        batch, tokens, heads, head_dim = v.shape
        operands["v_scale"] = operands["v_scale"].expand(batch, 1, heads).contiguous()
        operands["v_mean"] = torch.zeros(batch, 1, heads, head_dim, device=v.device)
        chunk = tokens
    operands |= {"chunk": chunk, "out_dtype": torch.bfloat16, "backend": backend}
    arguments = [operands[name] for name in _argument_names()]
    return lambda: OPERATORS["fp8_attention"](*arguments)


def _bf16(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Callable[[], Tensor]:
    return lambda: attention.attention(q, k, v, backend)


def _errors(variants: dict[str, Variant], kind: str, tokens: int, device: torch.device) -> list[AttentionError]:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (one.bfloat16() for one in draw_attention(kind, (1, tokens, _ERROR_HEADS, HEAD_DIM), generator))
    rows = torch.linspace(0, tokens - 1, min(tokens, _QUERIES), device=device).long()
    exact = attention_exact(q[:, rows], k, v)
    limit = relative_error(exact, _format_alone(q, k, v, rows))
    found = []
    for name, variant in variants.items():
        measured = AttentionError(name, kind, tokens, limit)
        try:
            measured.error = relative_error(exact, variant(q, k, v)()[:, rows].double())
        except Exception as error:  # a library that refuses a shape must not cost the others their figures
            measured.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        found.append(measured)
    return found


def _format_alone(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Attention of ``rows`` with e4m3 operands and probabilities and a bfloat16 output, but sums in float64."""
    codes = quantized_operands(q, k, v, True, None)
    query, key, value = (codes[name].double() / codes[f"{name}_scale"].double()[:, None] for name in "qkv")
    out = []
    for head in range(q.shape[2]):
        logits = query[:, rows, head] @ key[:, :, head].transpose(-1, -2) * q.shape[-1] ** -0.5
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        rounded = (weights.float() * attention.PROBABILITY_SCALE).to(torch.float8_e4m3fn).double()
        out.append(rounded @ value[:, :, head] / attention.PROBABILITY_SCALE / weights.sum(-1, keepdim=True))
    return torch.stack(out, 2).bfloat16().double()


def _speeds(variants: dict[str, Variant], tokens: int, device: torch.device) -> list[AttentionSpeed]:
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, tokens, _SPEED_HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3))
    runs = {name: variant(q, k, v) for name, variant in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for sample in range(6):
        for name, run in runs.items():  # in turn: clocks that drift with power drift for all
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            run()
            end.record()
            end.synchronize()
            if sample:
                times[name].append(start.elapsed_time(end))
    flop = 4.0 * tokens**2 * _SPEED_HEADS * HEAD_DIM
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    return [AttentionSpeed(name, tokens, ms, flop / ms / 1e9) for name, ms in medians.items()]


def _ruled(rows: list[list[str]]) -> list[list[str]]:
    return [rows[0], ["---"] * len(rows[0]), *rows[1:]]
