"""Random weights that behave, and the dtype each one has after `from_pretrained(torch_dtype=...)`.

The MiniMax-H3 classes initialise several parameters to zero or to one (biases, LayerScale, register tokens),
which hides mistakes: a rewrite that drops a bias changes nothing when the bias is zero. Here every parameter
is drawn, at a scale that keeps activations of order one through any number of layers.
"""

from __future__ import annotations

import torch
from torch import nn


def loaded_dtype(model: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that `from_pretrained(torch_dtype=dtype)` gives the floating point tensor `name` of `model`.

    diffusers keeps a tensor in float32 when one *dotted component* of its name is listed in the class'
    `_keep_in_fp32_modules` (the loader does not match substrings, whatever the comments in the model files
    say: `diffusers.models.model_loading_utils.load_model_dict_into_meta`).
    """
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    return torch.float32 if set(name.split(".")) & set(kept) else dtype


def cast_as_loaded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast `model` in place to what `from_pretrained(torch_dtype=dtype)` would have given; returns it.

    Only tensors of the state dict are cast. Buffers that are computed instead of loaded (rotary frequencies)
    stay float32, which `model.to(dtype)` would get wrong.
    """
    loaded = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in loaded and tensor.is_floating_point():
            tensor.data = tensor.data.to(loaded_dtype(model, name, dtype))
    return model


@torch.no_grad()
def fill_random(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Draw every parameter of `model` in place; returns it. `generator` lives on the parameters' device.

    Matrices and convolutions: normal with variance 1 / fan-in. Norm weights: around 1. LayerScale (`scale1`,
    `scale2`): around 0.2, so that the residual stream neither dies nor explodes. Biases and the rest: small.
    Weight norm's `weight_g` keeps its initial value, which is the norm of the tensor it scales.
    """
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "weight_g":
            continue
        mean, std = 0.0, 0.05
        if parameter.ndim >= 2:
            std = parameter[0].numel() ** -0.5
        elif leaf in ("scale1", "scale2"):
            mean = 0.2
        elif leaf in ("alpha", "beta"):
            std = 0.1
        elif leaf == "weight":
            mean, std = 1.0, 0.1
        parameter.normal_(mean, std, generator=generator)
    return model
