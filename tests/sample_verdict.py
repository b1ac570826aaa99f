"""A verdict with everything in it, for tests that show or write verdicts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from h3opt.compiler.report import Report
from h3opt.environment import environment
from h3opt.pass_api.promises import Exact, Perceptual
from h3opt.pipeline.generation import GenerationSettings, Media
from h3opt.verification.difference import Difference
from h3opt.verification.latents import LatentTrace
from h3opt.verification.noise_floors import Floor
from h3opt.verification.verdict import PassVerdict, Verdict

MOVED = Difference(5, 7, 0.0123, 40.0, 61.1, 0.03, 0.98, 0.002, 61.0, 0.3, 0.0)
FLOOR = Difference(5, 7, 0.02, 45.0, 60.0, 0.04)
COMPILED = Floor("compile", Difference(5, 7, 0.03, 45.0, 60.0, 0.04), None, {"graphs": 5, "max_autotune": False})
REFUSED = "only flash takes its calls on <cpu>"
FLOORS = [
    Floor("ulp", FLOOR),
    COMPILED,
    Floor("attention", None, REFUSED),
    Floor("seed", Difference(9, 9, 0.4, 9.0, -1.0, 0.5)),
]
PROMPT = 'A <b>fox</b> & "snow" </script><script>alert(1)</script>'


def clip(seed: int) -> Media:
    """Two seconds of moving stripes and a tone."""
    frames, rate = 48, 16000
    time, x = torch.arange(frames).view(-1, 1, 1, 1), torch.arange(96).view(1, 1, 1, -1)
    video = (0.5 + 0.4 * torch.sin((x + 2 * time) / 7 + seed)).expand(frames, 3, 64, 96)
    tone = 0.3 * torch.sin(2 * math.pi * (330 + seed) * torch.arange(2 * rate) / rate)
    return Media(video[None].contiguous(), tone.expand(1, 2, -1).contiguous(), rate)


def trace() -> LatentTrace:
    """A trace of three steps with constant final latents."""
    steps = [{"video": 1.0, "audio": 1.0, "video_motion": 0.1 * n, "audio_motion": 0.2} for n in range(3)]
    return LatentTrace(final=torch.ones(1, 24, 2, 4, 6), steps=steps)


def verdict(clips: int = 2, **changed: Any) -> Verdict:
    """A verdict on an Exact, a Perceptual and a declined pass over several clips; ``changed`` replaces attributes."""
    pairs = [(clip(seed), clip(seed + 1)) for seed in range(clips)]
    differences = [dataclasses.replace(MOVED, lpips=0.0123 - 0.001 * n) for n in range(clips)]
    passes = [
        PassVerdict(
            "fused_swiglu",
            "graph",
            Exact(),
            "12/12",
            Difference(),
            True,
            None,
            1.2,
            [Difference()] * clips,
            {"ulp": 0.0, "compile": 0.0, "seed": 0.0},
        ),
        PassVerdict(
            "fp8_linear",
            "format",
            Perceptual(0.03, 40),
            "8/8",
            MOVED,
            True,
            None,
            1.5,
            differences,
            {"ulp": 0.6, "compile": 0.4, "seed": 0.03},
            MOVED,
        ),
        PassVerdict("tile_batch", "schedule", Exact(), "–", Difference(), None, "needs <SM89>", 0.5),
    ]
    found = Verdict(
        passes, Difference(), Difference(), ["fused_swiglu"], MOVED, FLOORS, *pairs[0], 2.0, 1.0,
        Report("cpu", "cpu", "direct", "block", notices=["A notice."]),
        [GenerationSettings(prompt=PROMPT, seed=seed) for seed in range(clips)],
        differences, 0, pairs, (trace(), trace()),
        environment={**environment("cpu"), "floors": {"compile": dict(COMPILED.facts)}},
    )  # fmt: skip
    return dataclasses.replace(found, **changed)
