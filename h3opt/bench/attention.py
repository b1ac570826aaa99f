"""How far attention is from exact arithmetic, by kind of data and length, in every library; and how fast it is.

FP8 tensor cores of Hopper keep about 14 bits of a sum. Whether that shows depends on the data: see
:mod:`h3opt.kernels.data_kinds`. Errors are relative to float64 attention of the unquantized operands, on sampled
queries. The *limit* of a variant is the error of its quantized operands in float64 arithmetic, with the result rounded
to bfloat16 as every variant must: what the number format costs by itself. Probabilities are not rounded for the limit.

Variants are named by their library. ``one call`` attends to all keys in one sum, as libraries are usually called.
``chunked`` takes from V the mean of each chunk of keys, and merges the results of the chunks in float32. ``hopper`` is
h3opt's own kernel, which takes from V the mean of all keys and adds up in float32.
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
from h3opt.kernels.data_kinds import ATTENTION_KINDS, draw_attention
from h3opt.kernels.ops import attention
from h3opt.kernels.ops.definition_trials import attention_exact, quantized_operands
from h3opt.metrics.bits import relative_error

TOKENS = (2048, 19456, 38400, 104192)
HEAD_DIM = 128
_ERROR_HEADS, _SPEED_HEADS, _QUERIES = 4, 56, 256


@dataclass
class AttentionError:
    """One variant on one kind of data at one length.

    Attributes:
        variant, kind, tokens: which.
        limit: the error of the variant's operands in exact arithmetic, with a bfloat16 result.
        error: relative error on sampled queries, ``None`` if the library failed.
        failure: why there is no error.
    """

    variant: str
    kind: str
    tokens: int
    limit: float | None = None
    error: float | None = None
    failure: str | None = None

    @property
    def ratio(self) -> float | None:
        """``error / limit``."""
        return self.error / self.limit if self.error is not None and self.limit else None


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
            f"{self.device}: attention with heads of {self.head_dim}; error (over limit) on {self.error_heads} heads, "
            f"TFLOP/s on {self.speed_heads}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types."""
        errors = [{**asdict(one), "ratio": one.ratio} for one in self.errors]
        return {**asdict(self), "errors": errors, "versions": versions()}

    def markdown(self) -> str:
        """A table per length: a row per kind, with the error of every variant and, in brackets, that over its limit."""
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
        rows = [["kind", *variants]]
        for kind in dict.fromkeys(one.kind for one in here):
            rows.append([kind, *(_cell(found[kind, variant]) for variant in variants)])
        rates = {one.variant: one.tflops for one in self.speeds if one.tokens == tokens}
        if rates:
            rows.append(["TFLOP/s", *(f"{rates[one]:.0f}" if one in rates else "–" for one in variants)])
        return rows


def bench_attention(
    device: str | torch.device = "cuda",
    tokens: Sequence[int] = TOKENS,
    *,
    kinds: Sequence[str] = ATTENTION_KINDS,
    chunk: int = attention.CHUNK,
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


@dataclass
class Prepared:
    """A variant with its operands.

    Attributes:
        run: attends.
        operands: Q, K and V as the variant has them: after quantization, in float64.
    """

    run: Callable[[], Tensor]
    operands: Callable[[], tuple[Tensor, Tensor, Tensor]]


Variant = Callable[[Tensor, Tensor, Tensor], Prepared]
"""Quantizes Q, K and V of bfloat16 and returns what attends."""


def _variants(device: torch.device, chunk: int) -> dict[str, Variant]:
    here = Device.of(device)
    on_cpu = device.type == "cpu"
    variants: dict[str, Variant] = {}
    for backend in ("triton",) if on_cpu else attention.FP8_BACKENDS:
        if attention.missing(backend, here, fp8=True) is not None:
            continue
        if backend == "hopper":
            variants["hopper FP8"] = partial(_fp8, backend=backend, chunk=attention.ALL_KEYS)
            continue
        label = "definition" if on_cpu else f"{backend} FP8"
        variants[f"{label}, one call"] = partial(_fp8, backend=backend, chunk=None)
        variants[f"{label}, chunked"] = partial(_fp8, backend=backend, chunk=chunk)
    for backend in attention.BF16_BACKENDS:
        if attention.missing(backend, here, fp8=False) is None:
            variants[f"{backend} bf16"] = partial(_bf16, backend=backend)
    return variants


def _fp8(q: Tensor, k: Tensor, v: Tensor, backend: str, chunk: int | None) -> Prepared:
    codes: dict[str, Any] = quantized_operands(q, k, v, True, chunk)
    batch, tokens, heads, head_dim = v.shape
    if chunk is None:  # one chunk that has all keys, and no mean taken off
        codes["v_scale"] = codes["v_scale"].expand(batch, 1, heads).contiguous()
        codes["v_mean"] = torch.zeros(batch, 1, heads, head_dim, device=v.device)
    length = tokens if chunk is None else chunk
    names = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "v_mean")

    def operands() -> tuple[Tensor, Tensor, Tensor]:
        query, key = (codes[name].double() / codes[f"{name}_scale"].double()[:, None] for name in "qk")
        of_token = torch.arange(tokens, device=v.device) // length
        scale, mean = codes["v_scale"].double()[:, of_token], codes["v_mean"].double()[:, of_token]
        return query, key, codes["v"].double() / scale[..., None] + mean

    arguments = [codes[name] for name in names]
    return Prepared(lambda: attention.fp8_attention(*arguments, length, torch.bfloat16, backend), operands)


def _bf16(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Prepared:
    return Prepared(lambda: attention.attention(q, k, v, backend), lambda: (q.double(), k.double(), v.double()))


def _errors(variants: dict[str, Variant], kind: str, tokens: int, device: torch.device) -> list[AttentionError]:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (one.bfloat16() for one in draw_attention(kind, (1, tokens, _ERROR_HEADS, HEAD_DIM), generator))
    rows = torch.linspace(0, tokens - 1, min(tokens, _QUERIES), device=device).long()
    exact = attention_exact(q[:, rows], k, v)
    errors = []
    for name, variant in variants.items():
        measured = AttentionError(name, kind, tokens)
        try:
            prepared = variant(q, k, v)
            measured.error = relative_error(exact, prepared.run()[:, rows].double())
            query, key, value = prepared.operands()
            measured.limit = relative_error(exact, attention_exact(query[:, rows], key, value).bfloat16().double())
        except Exception as error:  # a library that refuses a shape must not cost the others their figures
            measured.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        errors.append(measured)
    return errors


def _speeds(variants: dict[str, Variant], tokens: int, device: torch.device) -> list[AttentionSpeed]:
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, tokens, _SPEED_HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3))
    runs = {name: variant(q, k, v).run for name, variant in variants.items()}
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


def _cell(measured: AttentionError) -> str:
    if measured.error is None or measured.ratio is None:
        return "–"
    return f"{measured.error:.4f} ({measured.ratio:.2f})"


def _ruled(rows: list[list[str]]) -> list[list[str]]:
    return [rows[0], ["---"] * len(rows[0]), *rows[1:]]
