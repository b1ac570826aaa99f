"""LPIPS of video frames, with the weights that are shipped with h3opt."""

from __future__ import annotations

import functools
import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from h3opt.errors import CheckpointError, MissingDependencyError, PipelineError
from h3opt.metrics.bits import require_same
from h3opt.metrics.video import frames_of

LPIPS_MIN_SIZE = 31
"""Smallest frame height and width in pixels for which the last layer of AlexNet has an output."""

_REPAIR = "reinstall h3opt, or make the file again with python -m h3opt.reference.lpips_weights"


@torch.no_grad()
def lpips_per_frame(
    reference: torch.Tensor,
    candidate: torch.Tensor,
    *,
    batch_size: int = 8,
) -> torch.Tensor:
    """Compute LPIPS (AlexNet, v0.1) of each frame: 0 for identical frames, 0.05 hard to see, 0.5 another picture.

    Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", CVPR 2018.

    Args:
        reference, candidate: ``[batch, frames, 3, height, width]`` or ``[frames, 3, height, width]``, floating point
            in [0, 1], at least 31 pixels high and wide: what the pipeline returns for ``output_type="pt"``.
        batch_size: frames in a forward pass of AlexNet.

    Returns:
        float32 ``[batch * frames]`` on the CPU. A frame that contains NaN has LPIPS NaN, which is within no bound.

    Raises:
        PipelineError: shapes or dtypes differ, or these are not videos in [0, 1] of sufficient size.
        CheckpointError: the weights are missing, truncated or not those of LPIPS.
        MissingDependencyError: ``lpips`` is not installed.
    """
    require_same(reference, candidate)
    frames = [frames_of(video) for video in (reference, candidate)]
    height, width = reference.shape[-2:]
    if min(height, width) < LPIPS_MIN_SIZE:
        raise PipelineError(
            f"LPIPS needs frames of at least {LPIPS_MIN_SIZE}x{LPIPS_MIN_SIZE} pixels, "
            f"got {height}x{width}; generate a larger video"
        )
    network = _lpips_network(_weights_path(), reference.device)
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
    """Load LPIPS on the CPU, so that a missing package or file is reported before a long computation.

    Raises:
        CheckpointError: the weights are missing, truncated or not those of LPIPS.
        MissingDependencyError: ``lpips`` is not installed.
    """
    _lpips_network(_weights_path(), torch.device("cpu"))


def _weights_path() -> Path:
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
    # Constructing AlexNet draws initial weights, which must not change the random state of the caller; torchvision
    # warns about deprecated arguments that lpips passes.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = lpips.LPIPS(net="alex", pretrained=False, pnet_rand=True, verbose=False)
    expected = network.state_dict()
    # The constants of the scaling layer are part of the class, and `lins` is a second name for the `lin` layers.
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


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"the LPIPS weights {path} are missing; {_REPAIR}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read the LPIPS weights {path} ({error}); {_REPAIR}") from error
