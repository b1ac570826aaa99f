"""MiniMax-H3's models at their real size with random weights, and inputs as the pipeline lays them out.

For benchmarks and for checks at real geometry: 33.1 billion parameters (66 GB in bfloat16) are drawn on the
device they stay on, so nothing is downloaded and no second copy is ever held.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import AutoencoderKLMiniMaxH3Audio
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
)
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3DecodeStep
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    MINIMAX_H3_AUDIO_CHANNELS,
    MINIMAX_H3_AUDIO_TAG,
    MINIMAX_H3_TEXT_TAG,
    MINIMAX_H3_VIDEO_TAG,
    MiniMaxH3ModularPipeline,
    align_num_frames,
    audio_latent_num_frames,
    video_latent_num_frames,
)
from diffusers.schedulers.scheduling_minimax_h3 import MiniMaxH3Scheduler

from .random_weights import fill_random, loaded_dtype
from .weight_statistics import apply_statistics

# The released video VAE: 16 pixels a latent, 17 frames a chunk of 5 latents.
VAE_SPATIAL_COMPRESSION = 16
VAE_FRAMES_PER_CHUNK = 17
VAE_LATENTS_PER_CHUNK = 5

KEYFRAME_TIMESTEP = 0.999


@dataclass(frozen=True)
class Canvas:
    """The size of a request: `height` and `width` in pixels (multiples of 32), `frames` at 24 a second."""

    height: int
    width: int
    frames: int

    def __post_init__(self) -> None:
        if self.height % 32 or self.width % 32 or min(self.height, self.width) < 32:
            raise ValueError(f"height and width must be positive multiples of 32, got {self.height}x{self.width}")
        if align_num_frames(self.frames, VAE_FRAMES_PER_CHUNK, VAE_LATENTS_PER_CHUNK) != self.frames:
            raise ValueError(f"frames must be of the form 17 * n + 5, got {self.frames}")

    @property
    def latents(self) -> tuple[int, int, int]:
        """Latent frames, height and width of the video."""
        frames = video_latent_num_frames(self.frames, VAE_FRAMES_PER_CHUNK, VAE_LATENTS_PER_CHUNK)
        return frames, self.height // VAE_SPATIAL_COMPRESSION, self.width // VAE_SPATIAL_COMPRESSION

    @property
    def audio_latents(self) -> int:
        """Latents of each of the two audio channels."""
        return audio_latent_num_frames(self.frames)

    @property
    def video_rows(self) -> int:
        """Rows of the packed sequence that are video: one for each 2x2 patch of each latent frame."""
        frames, height, width = self.latents
        return frames * (height // 2) * (width // 2)

    @property
    def audio_rows(self) -> int:
        """Rows of the packed sequence that are audio, both channels."""
        return self.audio_latents * MINIMAX_H3_AUDIO_CHANNELS


CANVASES: dict[str, Canvas] = {
    "64x96x124": Canvas(64, 96, 124),
    "544x960x124": Canvas(544, 960, 124),
    "768x1344x124": Canvas(768, 1344, 124),
    "768x1344x209": Canvas(768, 1344, 209),
    # The longest that the pipeline accepts (15 s at the largest canvas): 104 thousand tokens.
    "768x1344x345": Canvas(768, 1344, 345),
}


def full_transformer(
    layers: int = 50,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    statistics: str = "plain",
    **config: Any,
) -> MiniMaxH3Transformer3DModel:
    """The unmodified transformer at its released geometry with random weights drawn on `device`.

    Args:
        layers: blocks; 50 in the released model. Each is 0.64 billion parameters.
        device: where the weights are made and stay.
        dtype: as `from_pretrained(torch_dtype=dtype)`: input and output projections and the timestep embedder
            stay float32.
        seed: of the weights; another device type draws other numbers. The global random state is left alone.
        statistics: "plain", or "trained": V's channel offsets, outlier channels and norm weights as they were measured
            on the trained reference, see `reference/weight_statistics.py`.
        config: further arguments of the class, to shrink it.

    Returns:
        the model in eval mode, its parameters without gradients.

    Raises:
        ValueError: for other statistics.
    """
    if statistics not in ("plain", "trained"):
        raise ValueError(f"statistics must be 'plain' or 'trained', got {statistics!r}")
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel(num_layers=layers, **config)
    for name, parameter in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        empty = torch.empty(parameter.shape, dtype=loaded_dtype(model, name, dtype), device=device)
        setattr(module, name.rpartition(".")[2], torch.nn.Parameter(empty, requires_grad=False))
    # Not a weight: the rotary frequencies are computed when the module is built, in float32 and on the CPU.
    rope = type(model.rope)(model.config.rope_freq_dim, model.config.rope_theta)
    model.rope = rope.to(device)
    if any(buffer.is_meta for buffer in model.buffers()):
        raise RuntimeError("this diffusers version computes a buffer that full_transformer does not know")
    generator = torch.Generator(device).manual_seed(seed)
    fill_random(model, generator)
    if statistics == "trained":
        apply_statistics(model, generator)
    return model.eval()


def full_vae(
    device: str | torch.device = "cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: Any
) -> AutoencoderKLMiniMaxH3:
    """The unmodified video VAE at its released geometry (2.4 billion parameters) with random weights.

    Args:
        device: where the weights are made and stay; on `"meta"` there are none.
        dtype: as `from_pretrained(torch_dtype=dtype)`: encoder and norms stay float32.
        seed: of the weights, drawn on `device`. The global random state is left alone.
        config: further arguments of the class, to shrink it.

    Returns:
        the model in eval mode, its parameters without gradients.
    """
    with torch.device("meta"):
        model = AutoencoderKLMiniMaxH3(**config)
    for name, parameter in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        empty = torch.empty(parameter.shape, dtype=loaded_dtype(model, name, dtype), device=device)
        setattr(module, name.rpartition(".")[2], torch.nn.Parameter(empty, requires_grad=False))
    if torch.device(device).type != "meta":
        # Not a weight: the rotary frequencies are computed when the module is built, in float32 and on the CPU.
        ratio, head_dim = model.config.decoder_rope_dim_ratio, model.config.decoder_attention_head_dim
        rope = type(model.decoder.rope)(int(head_dim * ratio), theta=model.config.decoder_rope_theta)
        model.decoder.rope = rope.to(device)
        if any(buffer.is_meta for buffer in model.buffers()):
            raise RuntimeError("this diffusers version computes a buffer that full_vae does not know")
        fill_random(model, torch.Generator(device).manual_seed(seed))
    return model.eval()


def full_audio_vae(device: str | torch.device = "cuda", seed: int = 0, **config: Any) -> AutoencoderKLMiniMaxH3Audio:
    """The unmodified audio VAE at its released geometry with random weights, float32 as it is always loaded.

    Args:
        device: where the weights go. They are drawn on the CPU, so they are the same on every device.
        seed: of the weights. The global random state is left alone.
        config: further arguments of the class, to shrink it; latents are neither scaled nor shifted by default.

    Returns:
        the model in eval mode, its parameters without gradients.
    """
    channels = config.get("latent_channels", 32)
    config = {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels, **config}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoencoderKLMiniMaxH3Audio(**config)
    fill_random(model, torch.Generator().manual_seed(seed))
    return model.eval().requires_grad_(False).to(device)


def decode_pipeline(vae: AutoencoderKLMiniMaxH3, audio_vae: AutoencoderKLMiniMaxH3Audio) -> MiniMaxH3ModularPipeline:
    """The part of the unmodified pipeline that decodes video and then sound, with these models."""
    pipeline = cast(MiniMaxH3ModularPipeline, MiniMaxH3DecodeStep().init_pipeline())
    pipeline.update_components(vae=vae, audio_vae=audio_vae)
    return pipeline


def decode_inputs(
    canvas: str | Canvas = "544x960x124", *, device: str | torch.device = "cuda", seed: int = 0, channels: int = 24
) -> dict[str, torch.Tensor]:
    """What `decode_pipeline` is called with: random latents as denoising leaves them, float32.

    Args:
        canvas: as for `full_inputs`.
        device: of the tensors. They are drawn on the CPU, so they are the same on every device.
        seed: of the latents.
        channels: of the video latents.

    Returns:
        `latents` [1, channels, frames, rows, columns] and `audio_latents` [2, 32, frames].

    Raises:
        ValueError: for a canvas the pipeline would refuse.
    """
    if isinstance(canvas, str):
        canvas = parse_canvas(canvas)
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, channels, *canvas.latents, generator=generator)
    audio = torch.randn(MINIMAX_H3_AUDIO_CHANNELS, 32, canvas.audio_latents, generator=generator)
    return {"latents": latents.to(device), "audio_latents": audio.to(device)}


def full_inputs(
    canvas: str | Canvas = "544x960x124",
    *,
    text_tokens: int = 200,
    tokens: int | None = None,
    timesteps: int = 2,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of one transformer forward, as the pipeline's denoising loop passes them.

    The packed sequence is `[text | keyframe | audio left | audio right | video]`; layout, positions and
    timestep indices come from the pipeline's own steps, the latents and the text embedding are random.

    Args:
        canvas: a `Canvas`, a name from `CANVASES`, or any "HEIGHTxWIDTHxFRAMES".
        text_tokens: rows of text.
        tokens: length of the whole sequence; sets `text_tokens` to what the media rows leave.
        timesteps: distinct timesteps. 1 is the first step, 2 a later one (audio and video have different
            schedules), 3 a later one with a first-frame keyframe in the sequence.
        device, dtype: of the tensors; the latents are float32, the text embedding is `dtype`.
        seed: of the latents and the text embedding.
        config: the transformer's config where it is not the released one (`model.config`).

    Returns:
        `hidden_states` [1, video rows, 96] and `audio_hidden_states` [1, audio rows, 32] float32,
        `encoder_hidden_states` [1, text rows, 5120] `dtype`, `timestep` [timesteps] float32,
        `timestep_indices` and `token_tags` [tokens] int64, `position_ids` [tokens, 3] float64,
        `video_indices`, `audio_indices` and `text_indices` int64, `attention_kwargs` None, `return_dict`
        False.

    Raises:
        ValueError: for a canvas the pipeline would refuse, or `tokens` that leave no room for text.
    """
    if isinstance(canvas, str):
        canvas = parse_canvas(canvas)
    if timesteps not in (1, 2, 3):
        raise ValueError(f"a denoising step has 1, 2 or 3 distinct timesteps, got {timesteps}")
    config = _released_config() if config is None else config
    patch_size = tuple(config["patch_size"])
    keyframe_anchors = ("first",) if timesteps == 3 else ()
    latent_frames, latent_height, latent_width = canvas.latents
    media_rows = canvas.video_rows + canvas.audio_rows + len(keyframe_anchors) * canvas.video_rows // latent_frames
    if tokens is not None:
        text_tokens = tokens - media_rows
    if text_tokens < 1:
        raise ValueError(f"{canvas} takes {media_rows} rows and one of text at least; got tokens={tokens}")

    position_ids, token_tags, video_indices, audio_indices, text_indices, keyframe_rows, _ = (
        MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.full((text_tokens,), MINIMAX_H3_TEXT_TAG),
            latent_frames,
            latent_height,
            latent_width,
            canvas.audio_latents,
            patch_size,
            MINIMAX_H3_AUDIO_CHANNELS,
            MINIMAX_H3_AUDIO_TAG,
            MINIMAX_H3_VIDEO_TAG,
            keyframe_anchors,
        )
    )
    video_timestep, audio_timestep = _schedule_pair(step=0 if timesteps == 1 else 2)
    timestep, timestep_indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video_indices,
        audio_indices,
        keyframe_rows,
        0,
        text_tokens,
        video_timestep,
        audio_timestep,
        max(video_timestep, KEYFRAME_TIMESTEP),
        1.0,
    )

    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, channels: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(1, rows, channels, generator=generator, device=device, dtype=torch.float32).to(dtype)

    patch_channels = config["in_channels"] * patch_size[0] * patch_size[1] * patch_size[2]
    return {
        "hidden_states": normal(video_indices.numel(), patch_channels),
        "audio_hidden_states": normal(audio_indices.numel(), config["audio_in_channels"]),
        "encoder_hidden_states": normal(text_tokens, config["text_dim"], dtype),
        "timestep": timestep.to(device),
        "timestep_indices": timestep_indices.to(device),
        "token_tags": token_tags.to(device),
        "position_ids": position_ids.to(device),
        "video_indices": video_indices.to(device),
        "audio_indices": audio_indices.to(device),
        "text_indices": text_indices.to(device),
        "attention_kwargs": None,
        "return_dict": False,
    }


def parse_canvas(text: str) -> Canvas:
    """The canvas written as "HEIGHTxWIDTHxFRAMES", such as "544x960x124".

    Raises:
        ValueError: when the text is not three integers, or the size is not one the model generates.
    """
    try:
        height, width, frames = (int(part) for part in text.split("x"))
    except ValueError:
        raise ValueError(f"a canvas is HEIGHTxWIDTHxFRAMES, such as {', '.join(CANVASES)}; got {text!r}") from None
    return Canvas(height, width, frames)


def _released_config() -> dict[str, Any]:
    parameters = inspect.signature(MiniMaxH3Transformer3DModel.__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}


def _schedule_pair(step: int) -> tuple[float, float]:
    """The video and audio timestep of step `step` of the released eight-step schedules."""
    pair = []
    for shift in (12.0, 3.0):
        scheduler = MiniMaxH3Scheduler(shift=shift)
        scheduler.set_timesteps(8)
        pair.append(float(scheduler.timesteps[step]))
    return pair[0], pair[1]
