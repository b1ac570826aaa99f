"""How far one output is from another: exact bits, ulps, LPIPS of video frames, PSNR, SNR of audio; seams of one."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from h3opt.errors import CheckpointError, MissingDependencyError, PipelineError

LPIPS_MIN_SIZE = 31
"""Smallest frame height and width in pixels that reach the last AlexNet layer with anything left."""

_CHUNK = 1 << 24  # elements compared at a time: int64 keys of a whole video would take gigabytes
_UNCOUNTABLE = torch.iinfo(torch.int64).max

# The integer type to view a floating point type as. All are sign-magnitude with the sign in the top bit.
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
}
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


@dataclass(frozen=True)
class Comparison:
    """The outcome of `bits_equal`; true when no bit differs.

    Attributes:
        elements: compared.
        differing: elements whose bits differ. NaNs are equal whatever their payload; +0 and -0 differ.
        max_abs: the largest absolute difference; infinite where one side alone is NaN, or infinities differ.
        max_ulps: the largest `ulp_distance`.
    """

    elements: int
    differing: int
    max_abs: float
    max_ulps: int

    @property
    def equal(self) -> bool:
        return self.differing == 0

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        if self.equal:
            return f"equal bits ({self.elements} elements)"
        ulps = "uncountable" if self.max_ulps == _UNCOUNTABLE else self.max_ulps
        return (
            f"{self.differing} of {self.elements} elements differ ({self.differing / self.elements:.2%}), "
            f"by up to {self.max_abs:.3g} ({ulps} ulps)"
        )


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> Comparison:
    """Compare two tensors bit for bit, NaN payloads and signs aside.

    Args:
        a, b: of one shape and dtype, any strides: float64, float32, float16, bfloat16, float8_e4m3fn,
            float8_e5m2, bool or an integer type. `b` is moved to `a`'s device where they differ.

    Raises:
        PipelineError: when shapes or dtypes differ, or the dtype is another one.
    """
    _require_same(a, b)
    elements = differing = max_ulps = 0
    max_abs = 0.0
    for part_a, part_b in _chunks(a, b):
        elements += part_a.numel()
        differs = _bits(part_a) != _bits(part_b)
        if a.is_floating_point():
            differs &= ~(_isnan(part_a) & _isnan(part_b))
        if not differs.any():
            continue
        # Indexed as integers: not every device can index 8-bit floating point.
        part_a, part_b = (_bits(part)[differs].view(part.dtype) for part in (part_a, part_b))
        differing += part_a.numel()
        gap = (part_a.double() - part_b.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        max_abs = max(max_abs, gap.max().item())
        max_ulps = max(max_ulps, int(ulp_distance(part_a, part_b).max().item()))
    return Comparison(elements, differing, max_abs, max_ulps)


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable values of the dtype apart each pair of elements is: 0 equal, 1 neighbours, ...

    +0 and -0 are 0 apart, infinity is the neighbour of the largest finite value, two NaNs are 0 apart. A NaN
    and a number, and distances beyond int64, are `torch.iinfo(torch.int64).max` apart. Integers: |a - b|.

    Args:
        a, b: as `bits_equal`.

    Returns:
        int64 of their shape, on `a`'s device.

    Raises:
        PipelineError: when shapes or dtypes differ, or the dtype is none of those that `bits_equal` takes.
    """
    _require_same(a, b)
    b = b.to(a.device)
    key_a, key_b = _ordered(a), _ordered(b)
    distance = key_a - key_b
    # Subtraction wrapped round where the operands' signs differ and the result's is not the first one's.
    wrapped = ((key_a ^ key_b) & (key_a ^ distance)) < 0
    distance = distance.abs().masked_fill(wrapped | (distance == torch.iinfo(torch.int64).min), _UNCOUNTABLE)
    if a.is_floating_point():
        nan_a, nan_b = _isnan(a), _isnan(b)
        distance = distance.masked_fill(nan_a ^ nan_b, _UNCOUNTABLE).masked_fill(nan_a & nan_b, 0)
    return distance


def row_ulps(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """The largest difference, in units in the last place of the largest magnitude of its row (the last dimension).

    What another order of summation moves is a fraction of the summands, not of a sum that happens to be near zero.

    Args:
        reference, candidate: floating point, of equal shape and dtype.

    Returns:
        0 where bits agree or both are NaN; infinity where only one is finite, or only one NaN.
    """
    _require_same(reference, candidate)
    if not reference.numel():
        return 0.0
    one, other = reference.double(), candidate.to(reference.device).double()
    one, other = (x.unsqueeze(0) if x.ndim == 0 else x for x in (one, other))
    same = (one == other) | (one.isnan() & other.isnan())
    both = one.isfinite() & other.isfinite()
    largest = one.abs().where(one.isfinite(), 0.0).amax(-1, keepdim=True)
    info = torch.finfo(reference.dtype)
    step = torch.exp2(torch.log2(largest.clamp(min=info.tiny)).floor()) * info.eps
    distance = ((one - other).abs() / step).where(both, float("inf")).masked_fill(same, 0.0)
    return float(distance.max())


def relative_error(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """``‖candidate − reference‖ / ‖reference‖`` in float64; 0 for two zeros."""
    _require_same(reference, candidate)
    distance = float((candidate.to(reference.device).double() - reference.double()).norm())
    size = float(reference.double().norm())
    return distance / size if size else distance


@torch.no_grad()
def lpips_per_frame(
    reference: torch.Tensor,
    candidate: torch.Tensor,
    *,
    batch_size: int = 8,
    weights: str | os.PathLike[str] | None = None,
) -> torch.Tensor:
    """LPIPS (AlexNet, v0.1) of each frame: 0 for identical frames, 0.05 hard to see, 0.5 another picture.

    Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", CVPR 2018.

    Args:
        reference, candidate: [batch, frames, 3, height, width] or [frames, 3, height, width], floating point
            in [0, 1], at least 31 pixels high and wide: what the pipeline returns for `output_type="pt"`.
        batch_size: frames that run through AlexNet at once.
        weights: a safetensors file of the state of `lpips.LPIPS(net="alex")`; the file shipped with h3opt if
            None.

    Returns:
        float32 [batch * frames] on the CPU. A frame with NaN in it has LPIPS NaN, which no bound accepts.

    Raises:
        PipelineError: when shapes or dtypes differ, or these are not videos in [0, 1] of sufficient size.
        CheckpointError: when the weights are missing, truncated or not LPIPS'.
        MissingDependencyError: when `lpips` is not installed.
    """
    _require_same(reference, candidate)
    frames = [_video_frames(video) for video in (reference, candidate)]
    network = _lpips_network(_weights_path(weights), reference.device)
    values = []
    for start in range(0, frames[0].shape[0], batch_size):
        pair = [part[start : start + batch_size].to(reference.device, torch.float32) for part in frames]
        for part in pair:
            if part.amin() < 0 or part.amax() > 1:
                raise PipelineError(
                    f"video values must lie in [0, 1], found [{part.amin():.3g}, {part.amax():.3g}]; "
                    'pass what the pipeline returns for output_type="pt"'
                )
        values.append(network(*pair, normalize=True).flatten().cpu())
    return torch.cat(values)


def check_lpips() -> None:
    """Load LPIPS as :func:`lpips_per_frame` will on the CPU, so that what it lacks is said before any work.

    Raises:
        CheckpointError: when the weights are missing, truncated or not LPIPS'.
        MissingDependencyError: when `lpips` is not installed.
    """
    _lpips_network(_weights_path(None), torch.device("cpu"))


def psnr_db(reference: torch.Tensor, candidate: torch.Tensor, peak: float = 1.0) -> float:
    """Peak signal-to-noise ratio, 10 log10(peak² / mean squared error) in dB; infinite for equal tensors.

    Args:
        reference, candidate: floating point, of one shape and dtype.
        peak: the largest value a sample can have.

    Raises:
        PipelineError: when shapes or dtypes differ, or the tensors are empty.
    """
    _require_same(reference, candidate)
    if reference.numel() == 0:
        raise PipelineError("the PSNR of empty tensors is not defined; pass at least one frame")
    squares = sum(
        (part_a.double() - part_b.double()).square().sum().item() for part_a, part_b in _chunks(reference, candidate)
    )
    mean = squares / reference.numel()
    return math.inf if mean == 0 else 10 * math.log10(peak**2 / mean)


def audio_snr_db(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Signal-to-noise ratio of each channel, 10 log10(sum reference² / sum (candidate - reference)²) in dB.

    Infinite for an equal channel, silent or not; minus infinity where a silent reference got noise.

    Args:
        reference, candidate: [batch, channels, samples] or [channels, samples], of one shape and dtype.

    Returns:
        float64 [batch * channels] on the CPU.

    Raises:
        PipelineError: when shapes or dtypes differ, or these are not channels of samples.
    """
    _require_same(reference, candidate)
    if reference.ndim not in (2, 3) or reference.numel() == 0 or not reference.is_floating_point():
        raise PipelineError(
            "audio must be floating point [batch, channels, samples] or [channels, samples], "
            f"got {reference.dtype} {list(reference.shape)}"
        )
    signal = reference.detach().cpu().double().flatten(0, -2)
    noise = candidate.detach().cpu().double().flatten(0, -2) - signal
    signal_power, noise_power = signal.square().sum(-1), noise.square().sum(-1)
    # 0 / 0, a silent channel that stayed silent, is a perfect match and not NaN.
    ratio = torch.where(noise_power == 0, math.inf, signal_power / noise_power)
    return 10 * ratio.log10()


def seam_visibility(video: torch.Tensor, rows: Sequence[int], columns: Sequence[int], step: int = 16) -> float:
    """How much more a picture changes across the borders of tiles than across other places: 1 where nothing shows.

    The mean absolute difference of neighbouring pixels over one border, divided by the mean over all other lines
    at multiples of `step`: a decoder whose smallest patch is `step` pixels changes there too, seams or not. The
    worst border counts, rows and columns apart, so that one visible seam is not averaged away.

    Args:
        video: [batch, frames, 3, height, width] or [frames, 3, height, width], floating point.
        rows, columns: where borders are: the pixel below, or to the right of, each.
        step: of the lines compared with, in pixels; 1 for all lines.

    Returns:
        the worst ratio; infinite where the rest is flat and a border is not, 1 where all is flat.

    Raises:
        PipelineError: there is no border, one lies outside the frame, or no other line is left to compare with.
    """
    if video.ndim not in (4, 5) or video.numel() == 0 or not video.is_floating_point():
        raise PipelineError(f"seams are looked for in floating point videos, got {video.dtype} {list(video.shape)}")
    if not rows and not columns:
        raise PipelineError("a picture of one tile has no seams; pass at least one border")
    worst = 0.0
    for dim, borders in ((-2, sorted(set(rows))), (-1, sorted(set(columns)))):
        length = video.shape[dim]
        others = [line for line in range(step, length, step) if line not in borders]
        if not borders:
            continue
        if borders[0] < 1 or borders[-1] >= length or not others:
            raise PipelineError(
                f"borders {borders} and a line at a multiple of {step} besides must lie within {length} pixels; "
                "pass borders inside the frame, or a smaller step"
            )
        elsewhere = sum(_change(video, line, dim) for line in others) / len(others)
        for line in borders:
            change = _change(video, line, dim)
            flat = 1.0 if change == 0 else math.inf
            worst = max(worst, change / elsewhere if elsewhere else flat)
    return worst


def _change(video: torch.Tensor, line: int, dim: int) -> float:
    before, after = (video.select(dim, at).double() for at in (line - 1, line))
    return (after - before).abs().mean().item()


def _require_same(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape != b.shape:
        raise PipelineError(f"cannot compare shapes {list(a.shape)} and {list(b.shape)}; pass equal requests")
    if a.dtype != b.dtype:
        raise PipelineError(f"cannot compare {a.dtype} with {b.dtype}; cast one of them first")


def _chunks(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    flat_a, flat_b = a.detach().reshape(-1), b.detach().reshape(-1)
    for start in range(0, flat_a.numel(), _CHUNK):
        part = flat_a[start : start + _CHUNK]
        yield part, flat_b[start : start + _CHUNK].to(part.device)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _INTEGERS:
        return tensor
    if tensor.dtype not in _BITS:
        raise PipelineError(f"cannot compare bits of {tensor.dtype}; view it as an integer type of its size first")
    return tensor.detach().view(_BITS[tensor.dtype])


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """int64 keys in the order of the values, consecutive for neighbouring values; both zeros have key 0."""
    bits = _bits(tensor)
    if tensor.dtype in _INTEGERS:
        return bits.to(torch.int64)
    magnitude = (bits & torch.iinfo(bits.dtype).max).to(torch.int64)
    return torch.where(bits < 0, -magnitude, magnitude)


def _isnan(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() if tensor.dtype.itemsize == 1 else tensor).isnan()


def _video_frames(video: torch.Tensor) -> torch.Tensor:
    """[batch * frames, 3, height, width], or the error that says what is wrong with `video`."""
    shape = list(video.shape)
    if video.ndim not in (4, 5) or shape[-3] != 3 or video.numel() == 0 or not video.is_floating_point():
        raise PipelineError(
            "a video must be floating point [batch, frames, 3, height, width] or [frames, 3, height, width], "
            f"got {video.dtype} {shape}"
        )
    if min(shape[-2:]) < LPIPS_MIN_SIZE:
        raise PipelineError(
            f"LPIPS needs frames of at least {LPIPS_MIN_SIZE}x{LPIPS_MIN_SIZE} pixels, "
            f"got {shape[-2]}x{shape[-1]}; generate a larger video"
        )
    return video.detach().flatten(0, -4)


def _weights_path(weights: str | os.PathLike[str] | None) -> Path:
    if weights is not None:
        return Path(weights)
    return Path(str(files("h3opt.reference") / "weights" / "lpips_alexnet.safetensors"))


@functools.lru_cache(maxsize=2)
def _lpips_network(weights: Path, device: torch.device) -> Any:
    try:
        import lpips
    except ImportError as error:
        raise MissingDependencyError(
            f"LPIPS needs the packages lpips and torchvision ({error}); pip install lpips torchvision"
        ) from error
    state = _read_weights(weights)
    # Building AlexNet draws initial weights, which must not move the caller's random state, and torchvision
    # warns about how lpips asks for it.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = lpips.LPIPS(net="alex", pretrained=False, pnet_rand=True, verbose=False)
    expected = network.state_dict()
    # The scaling constants are part of the class, and `lins` is a second name of the heads.
    needed = {name for name in expected if name.startswith(("net.", "lin")) and not name.startswith("lins.")}
    if wrong := sorted(needed ^ state.keys()):
        raise CheckpointError(f"{weights} lacks, or should not have, {', '.join(wrong)}; {_REPAIR}")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{weights}: {name} is {list(tensor.shape)}, LPIPS needs {list(expected[name].shape)}; {_REPAIR}"
            )
    network.load_state_dict(state, strict=False)
    return network.eval().requires_grad_(False).to(device)


_REPAIR = "reinstall h3opt, or make the file again with python -m h3opt.reference.lpips_weights"


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"the LPIPS weights {path} are missing; {_REPAIR}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read the LPIPS weights {path} ({error}); {_REPAIR}") from error
