"""What h3opt needs to know of a device: its name, compute capability and number formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from h3opt.errors import DeviceError


@dataclass(frozen=True)
class Device:
    """One compute device.

    Attributes:
        type: ``"cpu"`` or ``"cuda"``.
        name: the vendor's name, e.g. ``"NVIDIA H200"``; ``"cpu"`` for a CPU.
        capability: CUDA compute capability as ``(major, minor)``; ``(0, 0)`` for a CPU.
    """

    type: str
    name: str
    capability: tuple[int, int] = (0, 0)

    @property
    def has_fp8(self) -> bool:
        """Whether float8 e4m3 values can be computed with: a CPU emulates them, CUDA needs SM89 (Ada, Hopper)."""
        return self.type == "cpu" or self.capability >= (8, 9)

    @classmethod
    def of(cls, device: torch.device | str) -> Device:
        """Describe ``device``.

        Raises:
            DeviceError: the device is neither a CPU nor a CUDA device, or CUDA is not available.
        """
        device = torch.device(device)
        if device.type == "cpu":
            return cls("cpu", "cpu")
        if device.type != "cuda":
            raise DeviceError(
                f"h3opt has no support for device type {device.type!r}. Move the pipeline to a CUDA device or the CPU."
            )
        if not torch.cuda.is_available():
            raise DeviceError("CUDA is not available here. Install a CUDA build of torch, or use the CPU.")
        return cls("cuda", torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a device's tensor in host memory; one that is there already comes back itself.

    All threads touch the fresh pages first. The driver's copy alone would fault them in one by one: on the host of an
    H200, 2 GiB arrive at 1.15 GiB/s that way, and at 6.2 GiB/s so.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.zeros_like(tensor, device="cpu").copy_(tensor)
