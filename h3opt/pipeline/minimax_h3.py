"""MiniMax-H3 as diffusers implements it: every fact about this model that h3opt depends on.

The rest of h3opt names no class, pipeline step, layer path or private method of the model: it asks this module. A
second model would need the same sections with other contents: components, blocks and layers, captured regions,
conditioning, pipeline steps, the tiled video autoencoder, the audio decoder, and the limits of a generation.

Importing this module is cheap: torch and diffusers are imported inside the functions that need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from h3opt.pipeline.region import Region

if TYPE_CHECKING:
    import torch

# --- components ------------------------------------------------------------------------------------------------


def pipeline_class() -> type:
    """Return the class of the modular pipeline."""
    from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline

    return MiniMaxH3ModularPipeline


def component_classes() -> dict[str, type]:
    """Return the classes of the components that passes may change, by attribute of ``PipelineView``."""
    from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel

    return {
        "transformer": MiniMaxH3Transformer3DModel,
        "vae": AutoencoderKLMiniMaxH3,
        "audio_vae": AutoencoderKLMiniMaxH3Audio,
    }


SECOND_TRANSFORMER = "transformer_ref"
"""Component with the denoiser of runs with references; the other runs use the component ``transformer``."""

OPTIONAL_COMPONENTS = frozenset({"transformer_ref", "processor"})
"""Components that only runs with reference videos and runs with images need."""


# --- repeated blocks and their layers --------------------------------------------------------------------------

QUERY_KEY_VALUE = ("attn.to_q", "attn.to_k", "attn.to_v")
ATTENTION_OUTPUT = "attn.to_out.0"
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")
PROJECTIONS = (*QUERY_KEY_VALUE, ATTENTION_OUTPUT, *FEED_FORWARD)
"""Paths of the linear layers of a block, the same in the transformer and in the video decoder."""

ADALN_PROJECTION = "adaln_proj"
"""Attribute of a transformer block: the module that computes the AdaLN tables from the timestep embedding."""


def transformer_blocks(transformer: Any) -> Any:
    """Return the repeated blocks of the denoiser, a ``ModuleList``."""
    return transformer.transformer_blocks


def refiner_blocks(transformer: Any) -> Any:
    """Return the repeated blocks that refine the prompt's tokens, a ``ModuleList``."""
    return transformer.token_refiner.refiner_blocks


def decoder_blocks(vae: Any) -> Any:
    """Return the repeated blocks of the video decoder, a ``ModuleList``."""
    return video_decoder(vae).transformer_blocks


def video_decoder(vae: Any) -> Any:
    """Return the module that runs the repeated blocks of the video decoder."""
    return vae.decoder


# --- captured regions ------------------------------------------------------------------------------------------

_BATCH, _TOKENS, _ROWS = 0, 1, 0  # dimensions of [batch, tokens, channels] and of [rows, ...]


def regions(transformer: Any, vae: Any, scope: str, name: str = "transformer") -> list[Region]:
    """Return what is captured: each class of repeated blocks, or the transformer as a whole.

    Args:
        transformer, vae: the components; ``None`` for a missing component.
        scope: ``"block"``, or ``"model"`` for the transformer as a whole.
        name: name of the transformer, with which the names of its regions begin.
    """
    captured = []
    if transformer is not None:
        captured += (
            [_whole_transformer(transformer, name)] if scope == "model" else _transformer_blocks(transformer, name)
        )
    if vae is not None:
        dynamic = {"hidden_states": (_BATCH, _TOKENS), "rotary_emb": (_BATCH, _TOKENS)}
        captured.append(Region("vae.block", list(decoder_blocks(vae)), dynamic))
    return [region for region in captured if region.modules]


def _whole_transformer(transformer: Any, name: str) -> Region:
    tokens = ("hidden_states", "audio_hidden_states", "encoder_hidden_states")
    rows = (
        "timestep", "timestep_indices", "token_tags", "position_ids", "video_indices", "audio_indices", "text_indices",
    )  # fmt: skip
    return Region(
        name,
        [transformer],
        dict.fromkeys(tokens, (_BATCH, _TOKENS)) | dict.fromkeys(rows, (_ROWS,)),
        {
            "transformer.block": len(transformer_blocks(transformer)),
            "transformer.refiner": len(refiner_blocks(transformer)),
            "transformer.head": 1,
        },
    )


def _transformer_blocks(transformer: Any, name: str) -> list[Region]:
    dynamic = {
        "hidden_states": (_BATCH, _TOKENS),
        "temb": (_ROWS,),
        "adaln_indices": (_ROWS,),
        "rotary_emb": (_ROWS,),
    }
    kinds: dict[str, tuple[Any, Mapping[str, tuple[int, ...]]]] = {
        "block": (transformer_blocks(transformer), dynamic),
        "refiner": (refiner_blocks(transformer), {"hidden_states": (_BATCH, _TOKENS)}),
    }
    return [
        Region(f"{name}.{kind}", list(blocks), dims, {} if name == "transformer" else {f"transformer.{kind}": 1})
        for kind, (blocks, dims) in kinds.items()
    ]


# --- conditioning of the transformer ---------------------------------------------------------------------------

MAX_TIMESTEPS = 4
"""Distinct timesteps in one forward: those of video, audio, keyframes and references."""

STEP_INVARIANTS = {
    "context_embedder": "encoder_hidden_states",
    "token_refiner": "encoder_hidden_states",
    "rope": "position_ids",
}
"""Modules whose result is the same in every denoising step → the argument of ``forward`` that they depend on."""


def forward_timestep(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the timesteps ``[distinct timesteps]`` among the arguments of one call of the transformer."""
    return kwargs["timestep"] if "timestep" in kwargs else args[3]


def time_embedder(transformer: Any) -> torch.nn.Module:
    """Return the module with the weights that :func:`embed_timestep` uses."""
    return transformer.time_embedder


def embed_timestep(transformer: Any, timestep: torch.Tensor) -> torch.Tensor:
    """Embed timesteps as the transformer's forward does: ``[timesteps]`` → ``[timesteps, hidden_size]``."""
    dtype = next(time_embedder(transformer).parameters()).dtype
    return transformer.time_embedder(transformer.time_proj(timestep).to(dtype))


# --- pipeline steps, by class name, and the values in the pipeline's state -------------------------------------

SET_TIMESTEPS_STEP = "MiniMaxH3SetTimestepsStep"
PREPARE_LATENTS_STEP = "MiniMaxH3PrepareLatentsStep"
LOOP_SCHEDULER_STEP = "MiniMaxH3LoopSchedulerStep"
AFTER_DENOISE_STEP = "MiniMaxH3AfterDenoiseStep"
VIDEO_DECODE_STEP = "MiniMaxH3VideoDecodeStep"
AUDIO_DECODE_STEP = "MiniMaxH3AudioDecodeStep"

DECODE_STEPS = {VIDEO_DECODE_STEP: "vae", AUDIO_DECODE_STEP: "audio_vae"}
"""Step → the component that it decodes with."""

VIDEO, AUDIO = "videos", "audio"
"""State values that hold the decoded media."""

LATENTS = {"video": "latents", "audio": "audio_latents"}
"""Modality → the state value that holds its latents."""

SCHEDULERS = {"scheduler": "timesteps", "audio_scheduler": "audio_timesteps"}
"""Scheduler component → the state value that holds its timesteps."""

ROW_TIMESTEPS = "row_timestep_plan"
"""State value that SET_TIMESTEPS_STEP makes: per denoising step, (distinct timesteps, index of each row's timestep)."""

ROW_INDICES = ("video_indices", "audio_indices")
"""State values that SET_TIMESTEPS_STEP reads on the host: the rows of each modality, int64."""


# --- the tiled video autoencoder -------------------------------------------------------------------------------

TILED_METHODS = ("_decode", "_encode")
"""Methods of the video VAE that cut into chunks and tiles, run them and merge the results."""


@dataclass(frozen=True)
class VideoGeometry:
    """How the video VAE cuts time into chunks and space into tiles.

    Attributes:
        temporal_ratio: frames per latent frame.
        spatial_ratio: pixels per latent, along height and along width.
        chunk_frames: frames that are encoded at a time.
        chunk_latents: latent frames of a chunk.
        dropped_latents: latent frames at the end of each encoded chunk that are not kept.
        overlap_latents: latent frames that two decoded chunks share.
        skipped_frames: frames at the start of a decoded chunk that are not kept.
        faded_frames: frames that two decoded chunks share and that are cross-faded.
        tiled: whether frames are cut into tiles.
        tile: height and width of a tile, in pixels.
        overlap: least overlap of neighbouring tiles along height and along width, in pixels.
    """

    temporal_ratio: int
    spatial_ratio: int
    chunk_frames: int
    chunk_latents: int
    dropped_latents: int
    overlap_latents: int
    skipped_frames: int
    faded_frames: int
    tiled: bool
    tile: tuple[int, int]
    overlap: tuple[int, int]


def video_geometry(vae: Any) -> VideoGeometry:
    """Read the geometry of a video VAE, which may be on the meta device."""
    return VideoGeometry(
        temporal_ratio=vae.temporal_compression_ratio,
        spatial_ratio=vae.spatial_compression_ratio,
        chunk_frames=vae.config.clip_length,
        chunk_latents=vae.tokens_chunk_size,
        dropped_latents=vae.config.token_drop,
        overlap_latents=vae.token_overlap,
        skipped_frames=vae.frame_pre_padding,
        faded_frames=vae.frame_overlap,
        tiled=vae.use_tiling,
        tile=(vae.tile_sample_min_height, vae.tile_sample_min_width),
        overlap=(vae.tile_sample_min_overlap_height, vae.tile_sample_min_overlap_width),
    )


def split_tiles(vae: Any, length: int, tile: int, overlap: int) -> tuple[list[int], list[int], list[int]]:
    """Lay tiles over ``length`` pixels: the start and the size of each tile, and its overlap with the next tile."""
    return vae._split_tiles(length, tile, overlap)


def blend_tiles(vae: Any, before: torch.Tensor, after: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the transition from ``before`` to ``after`` along ``dim``; both hold only the overlap of two tiles."""
    return vae._blend(before, after, after.shape[dim], dim)


def decode_tiles(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Decode a batch of tiles: latents ``[tiles, channels, ...]`` → pixels ``[tiles, 3, ...]``."""
    return vae.decoder(vae.post_quant_conv(latents))


def encode_tiles(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode a batch of tiles: pixels ``[tiles, 3, ...]`` → moments of the latents ``[tiles, 2 * channels, ...]``."""
    return vae.quant_conv(vae.encoder(pixels))


def modules_of_decoding(vae: Any) -> list[torch.nn.Module]:
    """Return every module that :func:`decode_tiles` may run, and the VAE itself."""
    return [vae, *vae.decoder.modules(), *vae.post_quant_conv.modules()]


def latent_channels(vae: Any) -> int:
    """Return the channels of the video latents."""
    return vae.config.latent_channels


def decoded_bytes(vae: Any) -> int:
    """Return the bytes of one decoded pixel, all channels."""
    return vae.config.out_channels * vae.decoder.proj_out.weight.dtype.itemsize


def encoded_bytes(vae: Any) -> int:
    """Return the bytes of the moments of one latent, all channels."""
    return vae.quant_conv.weight.shape[0] * vae.quant_conv.weight.dtype.itemsize


def decoder_activation_bytes(vae: Any, latents: int) -> int:
    """Estimate the bytes alive at once in the widest place of a decoder block, for one tile of ``latents`` latents.

    Always alive: two copies of the residual stream in float32 (the input of the block and the sum so far) and the
    result of the norm. Besides, in the feed-forward layer: both halves of the projection, the activated gate and the
    product. In attention: up to eight tensors of the size of the query while the key is rotated.
    """
    decoder, block = vae.decoder, decoder_blocks(vae)[0]
    itemsize = decoder.proj_out.weight.dtype.itemsize
    gate_and_value, channels = block.ff.net[0].proj.weight.shape
    query_channels = block.attn.to_q.weight.shape[0]
    tokens = latents + decoder.num_register_tokens + 1
    return tokens * (2 * 4 * channels + itemsize * channels + itemsize * max(2 * gate_and_value, 8 * query_channels))


def encoder_activation_bytes(vae: Any, frames: int, area: int) -> int:
    """Estimate the bytes alive at once in the first level of the encoder, for one tile of ``area`` pixels a frame.

    Alive are the residual, the activation, its copy inside the norm, and both paddings of the convolution.
    """
    return vae.config.block_out_channels[0] * area * vae.quant_conv.weight.dtype.itemsize * (6 * frames + 2)


# --- the audio decoder -----------------------------------------------------------------------------------------


def is_audio_activation(module: torch.nn.Module) -> bool:
    """Return whether ``module`` upsamples, applies SnakeBeta and downsamples, as activations of the decoder do."""
    from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import (
        MiniMaxH3AudioActivation1d,
        MiniMaxH3AudioSnakeBeta,
    )

    return type(module) is MiniMaxH3AudioActivation1d and type(module.act) is MiniMaxH3AudioSnakeBeta


def audio_decoder_dtype(audio_vae: Any) -> torch.dtype:
    """Return the dtype of the audio decoder's weights."""
    return audio_vae.decoder.conv_post.weight_g.dtype


def audio_layer_counts(audio_vae: Any) -> tuple[int, int]:
    """Count the activations and the weight-normed convolutions of the audio decoder, from its configuration."""
    config = audio_vae.config
    pairs = len(config.decoder_rates) * sum(len(dilations) for dilations in config.resblock_dilation_sizes)
    activations = 2 * pairs + 1  # two per dilation, and the last activation
    convolutions = 2 * pairs + len(config.decoder_rates) + 2  # two per dilation, the upsampling, conv_pre and conv_post
    return activations, convolutions


# --- limits of a generation ------------------------------------------------------------------------------------

CANVAS_MULTIPLE = 32
"""Height and width are multiples of this, in pixels."""

MIN_FRAMES, MAX_FRAMES = 124, 345
FRAME_PERIOD, FRAME_OFFSET = 17, 5
FRAME_RULE = f"{FRAME_PERIOD} n + {FRAME_OFFSET}, from {MIN_FRAMES} to {MAX_FRAMES}"
"""Frames of a video, in words; at 24 frames a second."""

MIN_STEPS = 2
"""Points of the schedule; the transformer runs once less."""


def is_frame_count(frames: int) -> bool:
    """Return whether a video of ``frames`` frames can be generated."""
    return MIN_FRAMES <= frames <= MAX_FRAMES and frames % FRAME_PERIOD == FRAME_OFFSET
