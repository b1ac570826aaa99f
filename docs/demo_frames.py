"""Write docs/demo_frames.png, the frames in README.md: ``python docs/demo_frames.py``.

The trained reference generates the clip of ``h3opt demo`` without passes, and with the passes of the CPU profile.
"""

from __future__ import annotations

from pathlib import Path

import torch

import h3opt
from h3opt.pipeline.generation import GenerationSettings, generate, reference_pipeline
from h3opt.render.media import write_frame_strip

if __name__ == "__main__":
    pipe = reference_pipeline(dtype=torch.float32)
    unmodified = generate(pipe, GenerationSettings())
    with h3opt.optimize(pipe, profile="cpu"):
        optimized = generate(pipe, GenerationSettings())
    videos = {"unmodified": unmodified.video, "optimized": optimized.video}
    write_frame_strip(Path(__file__).with_suffix(".png"), videos, frames=3)
