"""Benchmark every kernel at MiniMax-H3's real geometry, on a CUDA device.

    python -m h3opt.bench.kernels [--tokens N] [--only NAME ...] [--no-compile] [--tune] [--json PATH]

Each kernel is compared with eager bit for bit, then timed against eager, torch.compile, and the time in which a copy
moves the same number of bytes (the *floor*). ``--tune`` also times the launch parameters of each kernel and checks
their bits; the constants at the top of norm.py, quantize.py, swiglu.py and rope.py come from it. A kernel that fails is
reported, and the others still run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from h3opt.bench.kernel_inputs import DTYPES, SPECIALS, differing, op_inputs
from h3opt.bench.rates import copy_rate
from h3opt.kernels import DEFINITIONS, OPERATORS, kernel_names, ops

# MiniMax-H3: hidden size, heads, head_dim, feed-forward size, rows of a modulation table (3 timesteps x 3 modalities).
HIDDEN, HEADS, HEAD_DIM, FEED_FORWARD, TABLE_ROWS = 5376, 56, 128, 14336, 9

EXACT = [name for name in kernel_names if name not in ops.CLOSE]
"""The operators with kernels that give the bits of their definitions."""

DECODER_OPS = (
    "scaled_residual",
    "scaled_residual_norm",
    "scaled_residual_norm_quantize",
    "wide_norm",
    "wide_norm_quantize",
)
"""The operators of the video decoder, which has other widths than the transformer."""

COLUMNS = {
    "quantize_rows": HEADS * HEAD_DIM,
    "swiglu": FEED_FORWARD,
    "swiglu_quantize": FEED_FORWARD,
    "head_norm_rope": HEAD_DIM,
    "head_norm_rope_quantize": HEAD_DIM,
    "unweighted_norm_rope": HEAD_DIM,
    **dict.fromkeys(DECODER_OPS, 2048),
    "quantize_heads": HEAD_DIM,
    "quantize_values": HEAD_DIM,
    "hadamard": HEAD_DIM,
    "dynamic_head_scale": HEAD_DIM,
}
"""Operator → columns of the input, where they are not :data:`HIDDEN`."""


def real_inputs(name: str, tokens: int) -> tuple:
    """Random bf16 arguments of an operator at real geometry."""
    return op_inputs(name, tokens, COLUMNS.get(name, HIDDEN), TABLE_ROWS, device="cuda", heads=HEADS)


def launch_variants(name: str) -> dict[str, Callable]:
    """The launch parameters to try for a kernel: label → callable with the arguments of the operator."""
    from h3opt.kernels.ops import attention
    from h3opt.kernels.triton_kernels import norm, quantize, rope, swiglu, wide_norm

    def options(launch: Callable, choices: list[dict]) -> dict[str, Callable]:
        return {
            " ".join(f"{k}={v}" for k, v in choice.items()): lambda *args, choice=choice: launch(*args, **choice)
            for choice in choices
        }

    if name == "quantize_rows":
        return options(
            quantize.quantize_rows,
            [{"num_warps": w, "lane": e} for w, e in ((2, 8), (4, 4), (4, 8), (4, 16), (8, 4), (8, 8))],
        )
    if name == "swiglu":
        grid = [(4, 8, True), (4, 16, True), (8, 8, True), (8, 16, True), (16, 8, True), (8, 8, False)]
        return options(swiglu.swiglu, [{"num_warps": w, "lane": e, "branchless": b} for w, e, b in grid])
    if name == "swiglu_quantize":
        blocks = [(4, 8), (8, 4), (8, 8), (8, 16), (16, 4), (16, 8), (32, 4), (32, 8)]
        choices = [{"num_warps": w, "lane": e} for w, e in blocks]
        choices.append({"num_warps": 8, "lane": 8, "branchless": False})
        return options(swiglu.swiglu_quantize, choices)
    if name == "quantize_heads":
        return options(
            quantize.quantize_heads,
            [{"block": b, "num_warps": w} for b, w in ((8, 4), (16, 2), (16, 4), (32, 4), (64, 8))],
        )
    if name == "quantize_values":
        launches = [
            (8, 4, 32, 4),
            (8, 2, 32, 4),
            (4, 4, 32, 4),
            (8, 8, 32, 4),
            (8, 4, 16, 2),
            (8, 4, 64, 8),
            (8, 4, 64, 4),
        ]
        names = ("num_warps", "unroll", "rows", "cast_warps")
        return options(quantize.quantize_values, [dict(zip(names, one, strict=True)) for one in launches])
    if name == "hadamard":
        return options(rope.hadamard, [{"block": b, "num_warps": w} for b, w in ((8, 1), (16, 2), (64, 8))])
    if name == "head_norm_rope_quantize":
        steps = ((8, 1, 7), (4, 1, 14), (4, 1, 7), (2, 1, 28), (8, 1, 1), (16, 2, 1))
        in_pairs = [{"block": b, "num_warps": w, "steps": s} for b, w, s in steps]
        alone: dict[str, Any] = {"block": 8, "num_warps": 1, "pairs": False}
        return options(rope.head_norm_rope_quantize, [*in_pairs, alone])
    if name in ("head_norm_rope", "unweighted_norm_rope"):
        blocks = [(4, 1), (8, 1), (16, 1), (8, 2), (16, 2), (16, 4), (64, 8)]
        choices = [{"block": b, "num_warps": w, "shuffle": s} for s in (True, False) for b, w in blocks]
        return options(getattr(rope, name), choices)
    if name == "dynamic_head_scale":

        def scale(x, per_head, **choice):
            return attention.scale_from(quantize.heads_amax(x, **choice), per_head)

        return options(scale, [{"rows_per_program": r, "block": b} for b in (8, 16) for r in (8, 16, 32, 64)])
    family = wide_norm if name in DECODER_OPS else norm
    return options(getattr(family, name), [{"num_warps": w} for w in (1, 2, 4, 8)])


def bytes_moved(args: tuple, out: Any) -> int:
    """Count the bytes that a kernel must move: every argument is read once, every result is written once."""
    outputs = out if isinstance(out, tuple) else (out,)
    tensors = [t for t in (*args, *outputs) if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def time_variants(variants: dict[str, Callable[[], Any]], samples: int = 11) -> dict[str, float]:
    """Median milliseconds of each variant, interleaved; a spin on the device before each call hides launch overhead."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for sample in range(samples + 2):
        for name, call in variants.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(400_000)
            start.record()
            call()
            end.record()
            end.synchronize()
            if sample >= 2:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def edge_mismatches(name: str) -> int:
    """Count differing elements over small odd shapes, all dtypes, and rows with NaN and infinities."""
    widths = (20, 64, 128) if COLUMNS.get(name) == HEAD_DIM else (36, 1028, HIDDEN)
    total = 0
    for columns, dtype, special in itertools.product(widths, DTYPES, SPECIALS):
        args = op_inputs(name, 17, columns, 2, 2, dtype, "cuda", special, heads=5)
        total += differing(OPERATORS[name](*args), DEFINITIONS[name](*args))
    return total


def measure(name: str, tokens: int, rate: float, compiled: bool) -> dict[str, Any]:
    """Compare and time a kernel; ``rate`` is that of a copy in bytes per second. Returns a row of the table."""
    args = real_inputs(name, tokens)
    op, definition = OPERATORS[name], DEFINITIONS[name]
    expected = definition(*args)
    row: dict[str, Any] = {"floor_ms": bytes_moved(args, expected) / rate * 1e3}
    row["mismatches"] = differing(op(*args), expected)
    row["elements"] = sum(t.numel() for t in (expected if isinstance(expected, tuple) else (expected,)))
    del expected
    row["edge_mismatches"] = edge_mismatches(name)
    variants = {"fused": lambda: op(*args), "eager": lambda: definition(*args)}
    if compiled:
        try:
            inductor = torch.compile(definition, dynamic=False)
            inductor(*args)
            variants["compile"] = lambda: inductor(*args)
        except Exception as error:
            print(f"{name}: torch.compile failed: {last_line(error)}", flush=True)
    times = time_variants(variants)
    row |= {f"{variant}_ms": ms for variant, ms in times.items()}
    row["over_floor"] = times["fused"] / row["floor_ms"]
    return row


def tune(name: str, tokens: int, floor_ms: float) -> list[dict[str, Any]]:
    """Compare and time all launch parameters of a kernel; prints and returns them, fastest first."""
    args = real_inputs(name, tokens)
    expected = DEFINITIONS[name](*args)
    variants: dict[str, Callable[[], Any]] = {}
    rows: list[dict[str, Any]] = []
    for label, call in launch_variants(name).items():
        try:
            rows.append({"choice": label, "mismatches": differing(call(*args), expected)})
            variants[label] = partial(call, *args)
        except Exception as error:
            print(f"{name} {label}: failed: {last_line(error)}", flush=True)
    del expected
    times = time_variants(variants, samples=7)
    for row in rows:
        row["ms"] = times[row["choice"]]
    rows.sort(key=lambda row: row["ms"])
    for row in rows:
        wrong = f"  MISMATCHES {row['mismatches']}" if row["mismatches"] else ""
        over = row["ms"] / floor_ms
        print(f"  {name:32s} {row['choice']:40s} {row['ms']:.3f} ms  {over:.2f}x floor{wrong}", flush=True)
    return rows


def last_line(error: BaseException) -> str:
    """The type of an error and the last line of its message, which names the cause in compiler errors."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1][:200]}"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Render the rows as text."""
    head = f"{'kernel':32s} {'fused':>7s} {'floor':>7s} {'x floor':>7s} {'eager':>7s} {'compile':>7s}  differing"
    lines = [head]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"{name:32s} FAILED {row['error']}")
            continue
        compiled = f"{row['compile_ms']:7.3f}" if "compile_ms" in row else "      -"
        lines.append(
            f"{name:32s} {row['fused_ms']:7.3f} {row['floor_ms']:7.3f} {row['over_floor']:7.2f} "
            f"{row['eager_ms']:7.3f} {compiled}  "
            f"{row['mismatches']} of {row['elements']}, edges {row['edge_mismatches']}"
        )
    return "\n".join(lines)


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a kernel failed or has other bits, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m h3opt.bench.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=19328, help="19328 is 544x960, 124 frames")
    parser.add_argument("--only", nargs="+", choices=EXACT, default=EXACT, metavar="NAME", help="kernels to run")
    parser.add_argument("--no-compile", action="store_true", help="do not time torch.compile")
    parser.add_argument("--tune", action="store_true", help="also time all launch parameters")
    parser.add_argument("--json", metavar="PATH", help="write the figures here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("h3opt.bench.kernels needs a CUDA device; torch sees none.", file=sys.stderr)
        return 2

    import triton

    began = time.time()
    rate = copy_rate(torch.device("cuda")) * 1e12
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}, copy {rate / 1e12:.2f} TB/s", flush=True)
    rows: dict[str, dict[str, Any]] = {}
    for name in options.only:
        try:
            rows[name] = measure(name, options.tokens, rate, not options.no_compile)
        except Exception as error:
            rows[name] = {"error": last_line(error)}
        print(f"{time.time() - began:4.0f} s  {name}: {rows[name]}", flush=True)
        torch.cuda.empty_cache()
        if options.tune:
            try:
                rows[name]["tune"] = tune(name, options.tokens, rows[name].get("floor_ms", float("nan")))
            except Exception as error:
                print(f"{name}: tuning failed: {last_line(error)}", flush=True)
            torch.cuda.empty_cache()
    if options.json:
        result = {
            "device": device,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "copy_bytes_per_second": rate,
            "tokens": options.tokens,
            "kernels": rows,
        }
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
    print(f"{options.tokens} tokens, ms, {time.time() - began:.0f} s in all\n{table(rows)}", flush=True)
    wrong = [n for n, r in rows.items() if "error" in r or r["mismatches"] or r["edge_mismatches"]]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
