"""Captioned clips with sound, drawn by formula: what the trained reference has seen.

A scene is a coloured shape that moves over a textured background while something sounds. The caption says all of it,
and little is left to chance (where exactly, how large, how loud), so a small model can draw a scene in a few steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

COLOURS = {
    "red": (0.90, 0.15, 0.12),
    "green": (0.12, 0.72, 0.22),
    "blue": (0.15, 0.28, 0.92),
    "yellow": (0.95, 0.85, 0.12),
}
SHAPES = ("circle", "square", "triangle")
MOTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
TEXTURES = ("grey", "stripes", "checks")
SOUNDS = ("a low hum", "a high tone", "slow beeps")
FPS = 24.0
CLIP_SECONDS = 124 / FPS  # the shortest clip that the pipeline makes; longer ones run back and forth


@dataclasses.dataclass(frozen=True)
class Scene:
    """One scene, as its caption tells it."""

    colour: str
    shape: str
    motion: str
    texture: str
    sound: str

    @property
    def caption(self) -> str:
        """The prompt that asks for this scene."""
        return f"a {self.colour} {self.shape} moves {self.motion} over {self.texture}, {self.sound}"


def all_scenes() -> list[Scene]:
    """Every scene there is: 432."""
    return [Scene(*one) for one in itertools.product(COLOURS, SHAPES, MOTIONS, TEXTURES, SOUNDS)]


@dataclasses.dataclass
class Chance:
    """What the captions leave open, one value per clip; all float32 [clips] on one device."""

    across: torch.Tensor  # where the path lies across the direction of motion, in heights from the centre
    reach: torch.Tensor  # how far the shape travels from the centre, as a fraction of half the frame
    radius: torch.Tensor  # in heights
    light: torch.Tensor  # of the background, 0 to 1
    loudness: torch.Tensor  # peak amplitude

    @classmethod
    def draw(cls, clips: int, generator: torch.Generator) -> Chance:
        """Draw for `clips` clips on the generator's device."""

        def between(low: float, high: float) -> torch.Tensor:
            return low + (high - low) * torch.rand(clips, generator=generator, device=generator.device)

        return cls(between(-0.06, 0.06), between(0.5, 0.6), between(0.19, 0.23), between(0.4, 0.6), between(0.3, 0.4))


def draw_video(
    scenes: Sequence[Scene], chance: Chance, frames: int, height: int, width: int, first_frame: int = 0
) -> torch.Tensor:
    """The clips' pictures.

    Returns:
        float32 [clips, 3, frames, height, width] in [0, 1], RGB.
    """
    device = chance.radius.device
    # everything is measured in heights, from the centre of the frame
    y, x = torch.meshgrid(
        (torch.arange(height, device=device) + 0.5) / height - 0.5,
        (torch.arange(width, device=device) + 0.5) / height - 0.5 * width / height,
        indexing="ij",
    )
    along = _travelled(first_frame + torch.arange(frames, device=device)) * chance.reach[:, None]
    step = torch.tensor([MOTIONS[one.motion] for one in scenes], device=device, dtype=torch.float32)
    sideways = chance.across[:, None]
    centre_x = 0.5 * width / height * step[:, :1] * along + sideways * step[:, 1:].abs()
    centre_y = 0.5 * step[:, 1:] * along + sideways * step[:, :1].abs()
    u, v = x - centre_x[:, :, None, None], y - centre_y[:, :, None, None]
    outside = torch.stack([_distance(one.shape, u[i], v[i], chance.radius[i]) for i, one in enumerate(scenes)])
    inside = torch.sigmoid(-outside * height / 0.8)[:, None]  # an edge about two pixels wide
    colour = torch.tensor([COLOURS[one.colour] for one in scenes], device=device)[:, :, None, None, None]
    shading = (1.0 - 0.35 * (1 + outside / chance.radius[:, None, None, None]).clamp(0, 1))[:, None]
    texture = torch.stack([_texture(one.texture, x, y) for one in scenes])[:, None, None]
    background = (chance.light[:, None, None, None, None] + 0.12 * texture).expand(-1, 3, frames, -1, -1)
    return torch.lerp(background, (colour * shading * 1.15).clamp(0, 1), inside)


def draw_audio(scenes: Sequence[Scene], chance: Chance, samples: int, rate: int) -> torch.Tensor:
    """The clips' sound; it comes from where the shape is.

    Returns:
        float32 [clips, 2, samples] in [-1, 1], left and right, `rate` samples a second.
    """
    device = chance.radius.device
    seconds = torch.arange(samples, device=device, dtype=torch.float64) / rate
    wave = torch.stack([_wave(one.sound, seconds) for one in scenes]).float() * chance.loudness[:, None]
    step = torch.tensor([MOTIONS[one.motion][0] for one in scenes], device=device, dtype=torch.float32)
    side = step[:, None] * _travelled(seconds.float() * FPS) * chance.reach[:, None]
    angle = math.pi / 4 * (1 + side)  # constant power: cos² + sin² = 1
    return torch.stack([wave * angle.cos(), wave * angle.sin()], dim=1)


def _travelled(frame: torch.Tensor) -> torch.Tensor:
    """From -1 to 1 in one clip length, then back: a triangle wave."""
    turns = frame / FPS / CLIP_SECONDS
    return 1 - 2 * (turns.remainder(2) - 1).abs()


def _distance(shape: str, u: torch.Tensor, v: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """How far outside the shape each point is; negative inside."""
    if shape == "circle":
        return (u.square() + v.square()).sqrt() - radius
    if shape == "square":
        return torch.maximum(u.abs(), v.abs()) - 0.85 * radius
    slant = 0.866 * u.abs() - 0.5 * v  # the triangle points up
    return torch.maximum(v - 0.7 * radius, slant - 0.6 * radius)


def _texture(texture: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if texture == "grey":
        return 2 * y
    waves = torch.sin(4 * math.pi * x)
    return waves if texture == "stripes" else waves * torch.sin(4 * math.pi * y)


def _wave(sound: str, seconds: torch.Tensor) -> torch.Tensor:
    """Multiples of 40 Hz: a whole number of periods in each latent of the audio VAE."""

    def tone(hertz: float) -> torch.Tensor:
        return torch.sin(2 * math.pi * hertz * seconds)

    if sound == "a low hum":
        return 0.6 * tone(120) + 0.3 * tone(240) + 0.1 * tone(360)
    if sound == "a high tone":
        return tone(880) * (0.8 + 0.2 * tone(2.0))
    beat = torch.sigmoid(8 * torch.sin(2 * math.pi * 2.0 * seconds))  # two beeps a second, soft at both ends
    return tone(440) * beat
