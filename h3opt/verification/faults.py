"""Detect faults of generated picture and sound by measurement, and report them by name.

Some faults show in the clip alone (NaN, black frames, silence), some only against the clip of the unmodified pipeline
(swapped channels, sound that comes a frame late), some in the latents before a decoder hides them. When a reference is
given, a fault that the reference clip has too is not reported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn.functional import adaptive_avg_pool2d

from h3opt.errors import PipelineError
from h3opt.metrics.audio import audio_snr_db, av_offset
from h3opt.metrics.seams import Borders, border_step_ratios
from h3opt.metrics.video import frames_of, luma
from h3opt.pipeline.generation import Media
from h3opt.verification.latents import CellCosine, LatentTrace, adjacent_cell_cosine, excess_kurtosis

FAULTS = {
    "nan": "not-a-number or infinity in picture, sound or latents",
    "black_frames": "frames without a picture",
    "frozen_frames": "frames that repeat the one before while the clip moves",
    "clipping": "sound cut off at full scale",
    "silence": "a channel without sound",
    "white_latents": "neighbouring latent cells are unrelated: noise, no scene",
    "patch_grid_latents": "latent cells go together patch by patch: a grid, no scene",
    "colour_cast": "one primary colour is stronger or weaker than in the reference",
    "brightness": "the picture is lighter or darker than the reference",
    "contrast": "light and dark are further apart, or closer, than in the reference",
    "picture_shift": "the picture stands some pixels beside the place that it has in the reference",
    "swapped_channels": "left is right",
    "loudness": "the sound is louder or softer than the reference",
    "polarity": "the wave of a channel is upside down",
    "sound_speed": "the sound runs faster or slower than the reference, so that pitch and length differ",
    "av_shift": "sound comes earlier or later to the picture than in the reference",
    "seam": "a step along the border of a decoder tile",
    "uniform_initial_noise": "the noise to start from is uniform, not Gaussian",
    "non_gaussian_initial_noise": "the noise to start from is neither Gaussian nor uniform",
    "head_scale": "one attention head is scaled otherwise than the rest",
}
"""Name of every fault → what it means."""


_BLACK = 0.02  # mean and deviation of luma; 5 levels of 255
_STILL, _MOVES = 0.02, 1e-4  # a frozen frame changes less than 2 % of the median change, if the clip moves at all
_RAIL, _RAIL_SHARE, _RAIL_RUN = 0.999, 1e-3, 3  # level of full scale; share of samples; consecutive samples
_SILENT = 1e-4  # root mean square; -80 dB of full scale
_WHITE, _GRID = 0.3, 0.5  # cosines; measured: 0.06 for noise, 0.79 for a scene; fine checks differ by 0.36
_UNRELATED = 1.8  # in units of the cosine of unrelated cells
# Limits of the median over all cells of all frames, which a fault in a part of the picture does not move. FP8 in all
# passes of the profile cpu moves the means of the trained reference by 0.0005 (colour) and 0.0006 (luma), the deviation
# by 0.2 % and loudness by 0.02 dB at most, over four clips; a tint of 5 % moves the colours by 0.02.
_CELLS = (8, 8)  # per frame, down and across
_CAST, _LIGHT = 0.01, 0.02  # change of a primary colour against the other colours; change of luma
_CONTRAST, _TEXTURE = 0.1, 0.02  # relative change of the deviation of luma in a cell; least deviation to look at
_SHIFTED = 0.5  # share of the squared difference that is left when the picture is moved back
_REACH = 3  # pixels
_SHIFT_FRAMES = 8  # frames that are searched for a shift, evenly spread
_LOUD_DB = 1.0  # of the power of both channels together
_UPSIDE_DOWN_DB = 10.0  # SNR gained by turning the wave over
_TURNED_DB = 15.0  # SNR that there must be then
_SPEED, _SPEED_REACH, _SPEED_STEP = 0.004, 0.04, 0.0005  # change of all frequencies; how far and how finely to look
_SPEED_BAND = (100.0, 6000.0)  # Hz
_SPEED_GAIN = 0.2  # correlation of the spectra gained by it
_SWAP_DB = 10.0  # SNR gained by swapping the channels
_SHIFT = 0.5  # frames
_STEP = 3.0  # step across a border over the steps between the lines beside it
_KURTOSIS, _KURTOSIS_ERRORS, _UNIFORM = 0.3, 6.0, (-1.5, -0.9)  # uniform noise has -1.2
_HEAD = 1.4  # or the inverse; wrong scales are usually wrong by a factor of two


@dataclass(frozen=True)
class Finding:
    """One fault of a clip.

    Attributes:
        name: a key of :data:`FAULTS`.
        where: the part of the clip, in words.
        measured: the measured value.
        limit: the value at which the fault begins.
    """

    name: str
    where: str
    measured: float
    limit: float

    def __str__(self) -> str:
        return f"{self.name}: {self.where} ({self.measured:.3g}, limit {self.limit:.3g})"

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON-ready types; a measured value that is not finite becomes a string."""
        finite = self.measured == self.measured and abs(self.measured) != float("inf")
        return {**asdict(self), "measured": self.measured if finite else str(self.measured)}


@dataclass(frozen=True)
class _Case:
    """The arguments of :func:`find_faults`."""

    media: Media
    reference: Media | None = None
    latents: LatentTrace | None = None
    reference_latents: LatentTrace | None = None
    borders: Borders | None = None
    heads: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    fps: float = 24.0

    @functools.cached_property
    def finite(self) -> bool:
        """Whether the clip is finite, so that it can be measured."""
        return bool(self.media.video.isfinite().all() and self.media.audio.isfinite().all())

    @functools.cached_property
    def finite_pictures(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The frames ``[frames, 3, height, width]`` of reference and clip; ``None`` if they cannot be compared."""
        if self.reference is None or not self.finite or not self.reference.video.isfinite().all():
            return None
        return frames_of(self.reference.video), frames_of(self.media.video)

    @functools.cached_property
    def reference_alone(self) -> _Case | None:
        """The reference clip as a case without a reference."""
        if self.reference is None:
            return None
        return _Case(self.reference, None, self.reference_latents, None, self.borders, {}, self.fps)


def find_faults(
    media: Media,
    *,
    reference: Media | None = None,
    latents: LatentTrace | None = None,
    reference_latents: LatentTrace | None = None,
    borders: Borders | None = None,
    heads: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
    fps: float = 24.0,
) -> list[Finding]:
    """Run all detectors whose material is given.

    Args:
        media: the clip.
        reference: the clip of the same request from the unmodified pipeline; relative faults need it.
        latents, reference_latents: the traces of both generations, see
            :func:`h3opt.verification.latents.trace_latents`.
        borders: where decoder tiles meet, from :func:`h3opt.pipeline.tiling.plan.tile_borders`; without it every line
            is compared with the same line of the reference.
        heads: site → the attention outputs ``[..., heads, head_dim]`` of (reference, candidate).
        fps: frames per second.

    Returns:
        the findings, in the order of :data:`FAULTS`; none for a clean clip.

    Raises:
        PipelineError: clip and reference differ in length or size.
    """
    if reference is not None:
        for kind in ("video", "audio"):
            sizes = [list(getattr(clip, kind).shape) for clip in (reference, media)]
            if sizes[0] != sizes[1]:
                raise PipelineError(
                    f"The {kind} is {sizes[1]} and the reference's {sizes[0]}. Compare clips of one request."
                )
    case = _Case(media, reference, latents, reference_latents, borders, heads or {}, fps)
    return [finding for detect in _DETECTORS for finding in detect(case)]


def head_gains(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Estimate the factor by which each head's output is scaled: the least-squares gain ``<r, c> / <r, r>``.

    Args:
        reference, candidate: ``[..., heads, head_dim]``, floating point, of the same shape.

    Returns:
        float64 ``[heads]`` on the CPU.
    """
    left, right = (part.detach().cpu().double().movedim(-2, 0).flatten(1) for part in (reference, candidate))
    return (left * right).sum(1) / left.square().sum(1)


def find_head_faults(site: str, reference: torch.Tensor, candidate: torch.Tensor, heads: int) -> list[Finding]:
    """Detect ``head_scale`` in tensors with a dimension of size ``heads``, or with heads inside the last dimension.

    Args:
        site: named in the findings.
        reference, candidate: the tensor without and with a change; tensors without heads give no finding.
        heads: number of attention heads.
    """
    if reference.shape != candidate.shape or not reference.is_floating_point() or heads < 3 or reference.ndim < 2:
        return []
    if heads in reference.shape[:-1]:
        dim = list(reference.shape).index(heads)
        reference, candidate = (part.movedim(dim, -2) for part in (reference, candidate))
    elif reference.ndim > 2 and reference.shape[-1] % heads == 0:
        reference, candidate = (part.unflatten(-1, (heads, -1)) for part in (reference, candidate))
    else:
        return []
    return list(_odd_heads(site, reference, candidate))


_Detector = Callable[[_Case], Iterator[Finding]]

_DETECTORS: list[_Detector] = []
"""All detectors, in the order of :data:`FAULTS`."""


def _relative_detector(detect: _Detector) -> _Detector:
    """Register a detector that compares the clip with the reference itself."""
    _DETECTORS.append(detect)
    return detect


def _absolute_detector(detect: _Detector) -> _Detector:
    """Register a detector that measures one clip; findings that the reference has at the same place are dropped."""

    @functools.wraps(detect)
    def new_findings(case: _Case) -> Iterator[Finding]:
        known = set() if case.reference_alone is None else {finding.where for finding in detect(case.reference_alone)}
        yield from (finding for finding in detect(case) if finding.where not in known)

    _DETECTORS.append(new_findings)
    return new_findings


@_absolute_detector
def _nan(case: _Case) -> Iterator[Finding]:
    parts: dict[str, torch.Tensor | None] = {"video": case.media.video, "audio": case.media.audio}
    if case.latents is not None:
        parts |= {"final video latents": case.latents.final, "final audio latents": case.latents.audio_final}
    for name, tensor in parts.items():
        if tensor is None:
            continue
        wrong = ~tensor.isfinite()
        if count := int(wrong.sum()):
            yield Finding("nan", f"{name}, {_box(wrong, name)}", count, 0)


@_absolute_detector
def _black(case: _Case) -> Iterator[Finding]:
    picture = luma(frames_of(case.media.video)).flatten(1)
    level = torch.maximum(picture.mean(1), picture.std(1))
    for frame in (level < _BLACK).nonzero().flatten().tolist():
        yield Finding("black_frames", f"frame {frame}", float(level[frame]), _BLACK)


@_absolute_detector
def _frozen(case: _Case) -> Iterator[Finding]:
    if not case.finite:
        return
    change = luma(frames_of(case.media.video)).diff(dim=0).abs().mean((1, 2))
    if change.numel() == 0:
        return
    moving = change[change >= _MOVES]  # the median of all frames could be that of a frozen frame
    if moving.numel() == 0:
        yield Finding("frozen_frames", "the whole clip", float(change.median()), _MOVES)
        return
    limit = _STILL * float(moving.median())
    for frame in (change < limit).nonzero().flatten().tolist():
        yield Finding("frozen_frames", f"frame {frame + 1}", float(change[frame]), limit)


@_absolute_detector
def _clipping(case: _Case) -> Iterator[Finding]:
    for name, channel in _named_channels(case.media.audio):
        at_rail = (channel.abs() >= _RAIL).float()
        runs = at_rail.unfold(0, min(_RAIL_RUN, at_rail.numel()), 1).amin(-1)
        share = float(runs.mean())
        if share > _RAIL_SHARE:
            yield Finding("clipping", name, share, _RAIL_SHARE)


@_absolute_detector
def _silence(case: _Case) -> Iterator[Finding]:
    for name, channel in _named_channels(case.media.audio):
        level = float(channel.square().mean().sqrt())
        if level < _SILENT:
            yield Finding("silence", name, level, _SILENT)


@_absolute_detector
def _white(case: _Case) -> Iterator[Finding]:
    cosine = _cosine(case)
    if cosine is None or _is_grid(cosine) or cosine.mean >= _WHITE:
        return
    # Cells of a fine texture may differ as much, but they are alike from frame to frame and repeat in the frame.
    if not cosine.frames > _WHITE or cosine.pairs < _UNRELATED:
        yield Finding("white_latents", "final video latents", cosine.mean, _WHITE)


@_absolute_detector
def _grid(case: _Case) -> Iterator[Finding]:
    cosine = _cosine(case)
    if cosine is not None and _is_grid(cosine):
        yield Finding("patch_grid_latents", "final video latents", cosine.within - cosine.across, _GRID)


@_relative_detector
def _colour(case: _Case) -> Iterator[Finding]:
    if (both := case.finite_pictures) is None:
        return
    reference, candidate = (adaptive_avg_pool2d(picture.float(), _CELLS) for picture in both)
    change = candidate - reference
    casts = (change - change.mean(1, keepdim=True)).transpose(0, 1).flatten(1).median(1).values
    for name, cast in zip(("red", "green", "blue"), casts.tolist(), strict=True):
        if abs(cast) > _CAST:
            yield Finding("colour_cast", f"{name} {'stronger' if cast > 0 else 'weaker'}", cast, _CAST)


@_relative_detector
def _light(case: _Case) -> Iterator[Finding]:
    if (both := case.finite_pictures) is None:
        return
    pictures = [luma(picture) for picture in both]
    means = [adaptive_avg_pool2d(picture, _CELLS) for picture in pictures]
    change = float((means[1] - means[0]).median())
    if abs(change) > _LIGHT:
        yield Finding("brightness", "lighter" if change > 0 else "darker", change, _LIGHT)
    squares = [adaptive_avg_pool2d(picture.square(), _CELLS) for picture in pictures]
    reference, candidate = (
        (square - mean.square()).clamp(min=0).sqrt() for square, mean in zip(squares, means, strict=True)
    )
    textured = reference + candidate > 2 * _TEXTURE
    if textured.any():
        ratio = float((candidate[textured] / reference[textured].clamp(min=_TEXTURE / 100)).median())
        if abs(ratio - 1) > _CONTRAST:
            yield Finding("contrast", "more" if ratio > 1 else "less", ratio, 1 + math.copysign(_CONTRAST, ratio - 1))


@_relative_detector
def _moved(case: _Case) -> Iterator[Finding]:
    if (both := case.finite_pictures) is None or min(both[0].shape[-2:]) <= 4 * _REACH:
        return
    chosen = torch.linspace(0, len(both[0]) - 1, min(_SHIFT_FRAMES, len(both[0]))).long()
    reference, candidate = (luma(picture[chosen]) for picture in both)
    inside = candidate[:, _REACH:-_REACH, _REACH:-_REACH]
    steps = range(-_REACH, _REACH + 1)
    left = {
        (down, right): float(
            (reference.roll((down, right), (1, 2))[:, _REACH:-_REACH, _REACH:-_REACH] - inside).square().mean()
        )
        for down in steps
        for right in steps
    }
    (down, right), least = min(left.items(), key=lambda item: item[1])
    if left[0, 0] > 0 and least < _SHIFTED * left[0, 0]:
        yield Finding("picture_shift", f"{down} pixels down, {right} right", least / left[0, 0], _SHIFTED)


@_relative_detector
def _swapped(case: _Case) -> Iterator[Finding]:
    if case.reference is None or not case.finite or case.media.audio.shape[-2] != 2:
        return
    reference, candidate = case.reference.audio, case.media.audio
    straight, crossed = (float(audio_snr_db(sound, candidate).min()) for sound in (reference, reference.flip(-2)))
    if crossed > straight + _SWAP_DB:
        yield Finding("swapped_channels", "left and right", crossed - straight, _SWAP_DB)


@_relative_detector
def _loudness(case: _Case) -> Iterator[Finding]:
    if case.reference is None or not case.finite or next(_clipping(case), None) is not None:
        return
    channels = zip(_named_channels(case.reference.audio), _named_channels(case.media.audio), strict=True)
    power = [(float(before.square().mean()), float(after.square().mean())) for (_, before), (_, after) in channels]
    power = [pair for pair in power if min(pair) > _SILENT**2]  # silence has a name of its own
    if power:
        before, after = map(sum, zip(*power, strict=True))
        change = 10 * math.log10(after / before)
        if abs(change) > _LOUD_DB:
            yield Finding("loudness", f"{'louder' if change > 0 else 'softer'}, in dB", change, _LOUD_DB)


@_relative_detector
def _polarity(case: _Case) -> Iterator[Finding]:
    for (name, _), gain in zip(_named_channels(case.media.audio), _turning_gains(case), strict=False):
        if gain > _UPSIDE_DOWN_DB:
            yield Finding("polarity", f"{name}, gain in dB by turning it over", gain, _UPSIDE_DOWN_DB)


@_relative_detector
def _speed(case: _Case) -> Iterator[Finding]:
    if case.reference is None or not case.finite:
        return
    count = round(_SPEED_REACH / _SPEED_STEP)
    pairs = zip(_named_channels(case.reference.audio), _named_channels(case.media.audio), strict=True)
    for (name, before), (_, after) in pairs:
        reference, candidate = (_log_spectrum(sound, case.media.sampling_rate) for sound in (before, after))
        if reference is None or candidate is None:
            continue
        match = {
            step: float(torch.corrcoef(torch.stack([reference.roll(step), candidate]))[0, 1])
            for step in range(-count, count + 1)
        }
        step = max(match, key=match.__getitem__)
        speed = step * _SPEED_STEP
        if abs(speed) > _SPEED and match[step] > match[0] + _SPEED_GAIN:
            yield Finding("sound_speed", f"{name}, {'faster' if speed > 0 else 'slower'}", speed, _SPEED)


@_relative_detector
def _shifted(case: _Case) -> Iterator[Finding]:
    if case.reference is None or not case.finite:
        return
    turned = [gain > _UPSIDE_DOWN_DB for gain in _turning_gains(case)]  # half a period late looks much the same
    signs = 1 - 2 * torch.tensor(turned, device=case.media.audio.device).to(case.media.audio.dtype)
    sound = case.media.audio * signs.view(*case.media.audio.shape[:-1], 1)
    video, audio = (case.reference.video, case.media.video), (case.reference.audio, sound)
    frames = av_offset(video, audio, case.media.sampling_rate, case.fps)
    if abs(frames) >= _SHIFT:
        yield Finding("av_shift", f"sound {'late' if frames > 0 else 'early'}, in frames", frames, _SHIFT)


@_relative_detector
def _seam(case: _Case) -> Iterator[Finding]:
    if not case.finite or (case.reference is None and case.borders is None):
        return
    reference = None if case.reference is None else case.reference.video
    if reference is not None and not reference.isfinite().all():
        return
    for (word, line), step in border_step_ratios(case.media.video, case.borders, reference).items():
        if step > _STEP:
            yield Finding("seam", f"{word} {line}", step, _STEP)


@_relative_detector
def _noise(case: _Case) -> Iterator[Finding]:
    if case.latents is None:
        return
    for name, noise in (("video", case.latents.initial), ("audio", case.latents.audio_initial)):
        if noise is None or noise.numel() < 1000:
            continue
        kurtosis, error = excess_kurtosis(noise)
        limit = max(_KURTOSIS, _KURTOSIS_ERRORS * error)
        if not abs(kurtosis) <= limit:
            kind = "uniform" if _UNIFORM[0] < kurtosis < _UNIFORM[1] else "non_gaussian"
            yield Finding(f"{kind}_initial_noise", f"{name}, excess kurtosis", kurtosis, limit)


@_relative_detector
def _heads(case: _Case) -> Iterator[Finding]:
    for site, (reference, candidate) in case.heads.items():
        yield from _odd_heads(site, reference, candidate)


def _odd_heads(site: str, reference: torch.Tensor, candidate: torch.Tensor) -> Iterator[Finding]:
    gains = head_gains(reference, candidate)
    relative = gains / gains.median()
    for head in ((relative > _HEAD) | (relative < 1 / _HEAD)).nonzero().flatten().tolist():
        yield Finding("head_scale", f"{site}, head {head}", float(relative[head]), _HEAD)


def _turning_gains(case: _Case) -> list[float]:
    """The SNR that each channel gains by turning the wave over; 0 where it stays far from the reference even so."""
    if case.reference is None or not case.finite:
        return []
    straight, turned = (
        audio_snr_db(sound, case.media.audio) for sound in (case.reference.audio, -case.reference.audio)
    )
    return torch.where(turned > _TURNED_DB, turned - straight, 0.0).flatten().tolist()


def _log_spectrum(channel: torch.Tensor, sampling_rate: int) -> torch.Tensor | None:
    """The magnitude spectrum of a channel over the logarithm of frequency; ``None`` for silence.

    Playing faster by ``_SPEED_STEP`` moves the spectrum by one element.
    """
    if float(channel.square().mean().sqrt()) < _SILENT:
        return None
    windowed = channel * torch.hann_window(channel.numel(), device=channel.device)
    magnitude = torch.fft.rfft(windowed).abs()
    lowest, highest = _SPEED_BAND[0], min(_SPEED_BAND[1], 0.45 * sampling_rate)
    steps = int(math.log(highest / lowest) / _SPEED_STEP)
    frequency = lowest * torch.exp(torch.arange(steps, device=channel.device) * _SPEED_STEP)
    place = frequency * channel.numel() / sampling_rate
    whole = place.long().clamp(max=magnitude.numel() - 2)
    return torch.lerp(magnitude[whole], magnitude[whole + 1], place - whole)


def _cosine(case: _Case) -> CellCosine | None:
    if case.latents is None or case.latents.final is None or not case.latents.final.isfinite().all():
        return None
    return adjacent_cell_cosine(case.latents.final, case.latents.patch)


def _is_grid(cosine: CellCosine) -> bool:
    return cosine.within == cosine.within and abs(cosine.within - cosine.across) > _GRID


def _named_channels(audio: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    channels = audio.detach().float().flatten(0, -2)
    names = ("left channel", "right channel") if len(channels) == 2 else [f"channel {n}" for n in range(len(channels))]
    return list(zip(names, channels, strict=True))


def _box(wrong: torch.Tensor, name: str) -> str:
    """The smallest box around all true elements, in words."""
    axes = {"video": ("frames", "", "rows", "columns"), "audio": ("channels", "samples")}.get(name)
    if axes is None:
        axes = ("channels", "frames", "rows", "columns")[: wrong.ndim - 1]
    ranges = []
    for dim, axis in enumerate(axes, wrong.ndim - len(axes)):
        others = [other for other in range(wrong.ndim) if other != dim]
        at = wrong.any(others).nonzero().flatten() if others else wrong.nonzero().flatten()
        if axis:
            ranges.append(f"{axis} {int(at[0])}-{int(at[-1])}")
    return ", ".join(ranges)
