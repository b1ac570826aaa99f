"""Adapters and calls that the tests of daily use share."""

from __future__ import annotations

from typing import Any

import torch

from h3opt.reference import full_inputs


def make_lora(transformer: torch.nn.Module, part: str, rank: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """A LoRA for every linear layer whose path contains ``part``, as a file of diffusers holds it."""
    draw = torch.Generator().manual_seed(seed)
    state = {}
    for path, module in transformer.named_modules():
        name = path.removesuffix(".base_layer")
        if isinstance(module, torch.nn.Linear) and part in name and ".lora_" not in name:
            state[f"transformer.{name}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=draw) * 0.1
            state[f"transformer.{name}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=draw) * 0.3
    return state


def call_inputs(transformer: Any) -> dict[str, Any]:
    """The arguments of one small call of the transformer."""
    return full_inputs("64x96x124", text_tokens=5, device="cpu", dtype=torch.float32, config=transformer.config)


@torch.no_grad()
def run(transformer: Any, inputs: dict[str, Any], **more: Any) -> torch.Tensor:
    """The velocities of video and audio of one call, in one vector."""
    video, audio = transformer(**{**inputs, **more})
    return torch.cat([video.flatten(), audio.flatten()])


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the error relative to that of the expected values."""
    return float((actual - expected).norm() / expected.norm())
