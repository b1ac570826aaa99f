"""The VAE at real geometry: the released sizes without weights, and weights of the dtypes that loading gives."""

from __future__ import annotations

import torch

from h3opt.reference import full_vae
from h3opt.reference.random_weights import loaded_dtype
from h3opt.reference.tiny import VAE_CONFIG


def test_on_the_meta_device_it_has_the_released_size_and_no_weights() -> None:
    vae = full_vae(device="meta")
    assert all(parameter.is_meta for parameter in vae.parameters())
    decoder = sum(parameter.numel() for parameter in vae.decoder.parameters())
    assert 2.4e9 < decoder < 2.43e9 and len(vae.decoder.transformer_blocks) == 36


@torch.no_grad()
def test_its_weights_have_the_dtypes_of_a_loaded_model_and_decode() -> None:
    state = torch.random.get_rng_state()
    vae, again = (full_vae(device="cpu", **VAE_CONFIG) for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    for name, parameter in vae.named_parameters():
        assert parameter.dtype == loaded_dtype(vae, name, torch.bfloat16) and not parameter.requires_grad
    assert vae.decoder.rope.inv_freq.dtype == torch.float32
    z = torch.randn(1, 24, 7, 2, 2, generator=torch.Generator().manual_seed(0))
    found = vae.decode(z, return_dict=False)[0]
    assert found.dtype == torch.bfloat16 and found.isfinite().all() and found.float().std() > 0
    assert torch.equal(found, again.decode(z, return_dict=False)[0])
