"""Tests of passes beyond the generic ones: further rules, options, loud heads, memory layouts."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import h3opt
from h3opt.device import Device
from h3opt.kernels.ops import attention
from h3opt.metrics.bits import bits_equal, relative_error
from h3opt.pass_api.base import GraphFacts
from h3opt.pass_api.examples import Draw, Example, norm_and_rotate
from h3opt.pass_api.registry import make_pass
from h3opt.pass_api.testing import check_pass, rewrite, semantic, with_replacement
from h3opt.passes import attention_backend
from h3opt.reference import tiny_pipeline


def cast_heads(draw: Draw) -> Example:
    def model(x, weight, cos, sin, scale):
        return attention.quantize_heads(norm_and_rotate(x, weight, cos, sin), scale)

    return Example(model, (*draw.rotary(), torch.rand(draw.heads) * 100))


@pytest.mark.parametrize("draw", [Draw(), Draw(dtype=torch.bfloat16, tokens=5, batch=2, seed=1), Draw(special=True)])
def test_norm_rope_and_cast_fuse_to_the_same_codes(draw: Draw) -> None:
    example = cast_heads(draw)
    graph = semantic(example)
    fused, outcome = rewrite(make_pass("fused_qk_cast"), graph)  # type: ignore[arg-type]
    assert outcome.matched == 1
    assert "head_norm_rope_quantize" in fused.code and "rms_norm" not in fused.code.replace("head_norm", "")
    assert bits_equal(graph(*example.args), fused(*example.args))


def test_a_fused_cast_with_another_scale_is_seen() -> None:
    def doubled(x, shape, weight, eps, cos, sin, dim, half, rotary, end, scale):
        normed = torch.ops.h3opt.head_norm_rope_quantize_v2
        squeezed = (torch.ops.aten.squeeze.dims(angles, [0, 2]) for angles in (cos, sin))
        return normed(x, weight, *squeezed, scale * 2.0, eps, False)

    example = cast_heads(Draw())
    graph = semantic(example)
    wrong, outcome = rewrite(with_replacement(make_pass("fused_qk_cast"), doubled), graph)  # type: ignore[arg-type]
    assert outcome.matched == 1
    assert not bits_equal(graph(*example.args), wrong(*example.args))


@pytest.mark.parametrize(
    "options",
    [
        {"scales": "dynamic"},
        {"smooth_k": True},
        {"rotate": True},
        {"rotate": True, "smooth_k": True},
        {"rotate": True, "scales": "dynamic"},
        {"chunk": 3},
        {"chunk": 1},
        {"backend": "fa3"},
    ],
)
def test_fp8_attention_keeps_its_promise_with_every_option(options: dict[str, object]) -> None:
    check_pass(make_pass("fp8_attention", options))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"smooth_k": 1}, {"scales": "static"}, {"backend": "fa2"}, {"rotate": 1}])
def test_fp8_attention_refuses_other_options(options: dict[str, object]) -> None:
    with pytest.raises(Exception, match="must be one of"):
        make_pass("fp8_attention", options)


def quantized(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: int) -> tuple:
    scales = [attention.dynamic_head_scale(one, True) for one in (q, k)]
    codes, v_scale, v_mean = attention.quantize_values(v, chunk)
    return *map(attention.quantize_heads, (q, k), scales), codes, *scales, v_scale, v_mean, chunk


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: int) -> torch.Tensor:
    return attention.fp8_attention(*quantized(q, k, v, chunk), torch.float32, "triton")


def test_rotated_heads_are_declined_unless_they_have_a_power_of_two_of_channels() -> None:
    one = make_pass("fp8_attention", {"rotate": True})
    for head_dim, matched in ((16, 1), (24, 0)):
        _, found = rewrite(one, semantic(one.example(Draw(head_dim=head_dim))))  # type: ignore[attr-defined, arg-type]
        assert found.matched == matched
    assert "power of two" in str(found.near_misses[0].why)


@pytest.mark.parametrize("draw", [Draw(), Draw(dtype=torch.bfloat16, tokens=5, batch=2, seed=1), Draw(special=True)])
def test_norm_rope_rotation_and_cast_fuse_to_the_same_codes(draw: Draw) -> None:
    def model(x, weight, cos, sin, scale):
        return attention.quantize_heads(attention.hadamard(norm_and_rotate(x, weight, cos, sin)), scale)

    args = (*draw.rotary(), torch.rand(draw.heads) * 100)
    graph = semantic(Example(model, args))
    fused, found = rewrite(make_pass("fused_qk_cast"), graph)  # type: ignore[arg-type]
    assert found.matched == 1 and "hadamard" not in fused.code
    assert bits_equal(graph(*args), fused(*args))


def test_cudnn_is_refused_on_cuda_because_its_sums_are_not_accurate() -> None:
    device = Device(type="cuda", name="NVIDIA H200", capability=(9, 0))
    assert "not accurate" in str(attention.missing("cudnn", device, fp8=True))


@pytest.mark.parametrize("tokens", [1, 5, 24, 25, 61])
@pytest.mark.parametrize("offset", [0.0, 2.0])
def test_chunks_of_keys_and_a_shorter_last_one_add_up(tokens: int, offset: float) -> None:
    draw = Draw(tokens=tokens, heads=2, head_dim=32)
    q, k, v = (draw.tensor(1, draw.tokens, draw.heads, draw.head_dim) for _ in range(3))
    v = v + offset * draw.tensor(draw.head_dim)
    expected = attention.attention_definition(q, k, v, "flash")
    whole, chunked = (relative_error(expected, attend(q, k, v, chunk)) for chunk in (1000, 24))
    assert chunked < 0.07 and chunked < 1.3 * whole + 1e-6


@pytest.mark.parametrize("place", range(3))
def test_a_bad_token_reaches_what_it_reaches_without_fp8(place: int) -> None:
    """NaN in Q stays in its token, in K it takes the queries of its head, in V its channel of its head."""
    draw = Draw(tokens=40, heads=2, head_dim=16)
    heads_of = [draw.tensor(1, draw.tokens, draw.heads, draw.head_dim) for _ in range(3)]
    clean = attend(*heads_of, chunk=16)
    heads_of[place][0, 20, 1, 3] = torch.nan
    found, exact = attend(*heads_of, chunk=16), attention.attention_definition(*heads_of, "flash")
    assert found.isnan().any() and torch.equal(found.isnan(), exact.isnan())
    assert relative_error(clean[~found.isnan()], found[~found.isnan()]) < 0.03


def test_an_infinite_value_makes_its_channel_of_its_head_nan_and_no_other() -> None:
    draw = Draw(tokens=40, heads=2, head_dim=16)
    q, k, v = (draw.tensor(1, draw.tokens, draw.heads, draw.head_dim) for _ in range(3))
    v[0, 20, 1, 3] = torch.inf
    found = attend(q, k, v, chunk=16)
    assert found[0, :, 1, 3].isnan().all() and found.isfinite().sum() == found.numel() - 40


def test_a_chunk_must_be_a_positive_number_of_keys() -> None:
    for chunk in (0, -1, 1.5, True):
        with pytest.raises(Exception, match="positive number of keys"):
            make_pass("fp8_attention", {"chunk": chunk})


def test_smoothing_k_helps_where_k_has_an_offset() -> None:
    """A mean that all keys share does not move softmax, but uses up the range of e4m3."""
    draw = Draw(tokens=64, heads=2, head_dim=32)
    q, k, v = (draw.tensor(1, draw.tokens, draw.heads, draw.head_dim) for _ in range(3))
    k = k + 40.0 * draw.tensor(draw.head_dim)
    expected = attention.attention_definition(q, k, v, "flash")

    def error(key: torch.Tensor) -> float:
        return relative_error(expected, attend(q, key, v, chunk=24))

    assert error(k - k.mean(1, keepdim=True)) < error(k) / 2


def test_the_scale_of_a_norm_bounds_its_heads_and_wastes_no_range() -> None:
    x, weight = torch.randn(1, 500, 3, 64) * 9, torch.rand(64) + 0.5
    scale = attention.norm_head_scale(x, weight)
    torch.testing.assert_close(scale, (448 / (weight.max() * 8)).expand(3))
    loud = torch.zeros(1, 1, 3, 64)
    loud[..., weight.argmax()] = 1.0  # the row that reaches the bound
    for heads in (x, loud):
        largest = (torch.rms_norm(heads, (64,), weight, 1e-5).abs() * scale[:, None]).max()
        assert largest <= 448.0
    assert largest > 447.0


def test_output_quantize_neither_saturates_a_loud_head_nor_loses_a_quiet_one() -> None:
    draw = Draw(tokens=40, heads=3, head_dim=16)
    q, k, v = (draw.tensor(1, draw.tokens, draw.heads, draw.head_dim) for _ in range(3))
    v = v * torch.tensor([100.0, 1.0, 3.0])[:, None]
    operands = quantized(q, k, v, chunk=24)
    expected = attention.fp8_attention(*operands, torch.float32, "triton")
    out, scale = attention.fp8_attention_quantized(*operands, "triton")
    dequantized = (out.float() * scale).unflatten(2, (3, 16))
    for head in range(3):
        assert relative_error(expected[:, :, head], dequantized[:, :, head]) < 0.05
    assert out.float().abs().max() < 448.0


@pytest.mark.parametrize("name", ["gated_residual", "norm_modulate"])
def test_a_result_that_eager_would_lay_out_otherwise_is_left_alone(name: str) -> None:
    """Strides are not bits, but what reads them may sum in the order of memory."""
    instance = make_pass(name)
    example = instance.example(Draw(channels=8))  # type: ignore[attr-defined]
    turned = tuple(arg.mT.contiguous().mT if arg.ndim == 3 else arg for arg in example.args)
    graph, outcome = rewrite(instance, semantic(Example(example.function, turned)))  # type: ignore[arg-type]
    with torch.no_grad():
        expected = example.function(*turned)
        result = graph(*turned)
    for reference, candidate in zip(tree_leaves(expected), tree_leaves(result), strict=True):
        assert bits_equal(reference, candidate) and reference.stride() == candidate.stride()
    assert outcome.matched == 0 or expected.is_contiguous()


def test_attention_backend_expects_none_where_no_library_has_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder in float32, as it is released, keeps torch's attention: no shortfall, and the report says why."""
    sdpa = torch.ops.aten.scaled_dot_product_attention.default
    with FakeTensorMode():
        heads = torch.empty(1, 2, 7, 64, device="cuda")
    facts = {
        dtype: GraphFacts("vae.block", {"vae.block": 1}, {sdpa: 1}, results={sdpa: [heads.to(dtype)]})
        for dtype in (torch.float32, torch.bfloat16)
    }
    instance = make_pass("attention_backend")
    assert [instance.expect(facts[dtype]) for dtype in facts] == [0, 1]  # type: ignore[attr-defined]
    monkeypatch.setattr(
        attention_backend, "unserved", lambda heads: "not in 32 bits" if heads.dtype is torch.float32 else None
    )
    vae = tiny_pipeline(dtype=torch.float32).vae
    z = torch.randn(1, 24, 7, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = vae.decode(z, return_dict=False)[0]
        with h3opt.optimize(vae, ["attention_backend"], "cpu") as opt:
            assert bits_equal(expected, vae.decode(z, return_dict=False)[0])
            entry = opt.report["attention_backend"]
    assert entry.matched == entry.expected == 0 and "not in 32 bits" in str(entry.near_misses)


def test_attention_backend_takes_what_fp8_attention_leaves() -> None:
    """Attention of the refiner and the video decoder, while other passes rewrite the operators around it."""
    sdpa = torch.ops.aten.scaled_dot_product_attention.default
    passes = tuple(map(make_pass, ("fp8_attention", "attention_backend", "vae_fused_qkv", "vae_residual_norm")))
    expected_sites = {
        region: passes[1].expect(GraphFacts(region, {region: 1}, {sdpa: 1}, passes=passes))  # type: ignore[attr-defined]
        for region in ("transformer.block", "transformer.refiner", "vae.block")
    }
    assert expected_sites == {"transformer.block": 0, "transformer.refiner": 1, "vae.block": 1}
    vae = tiny_pipeline(dtype=torch.bfloat16).vae
    z = torch.randn(1, 24, 7, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = vae.decode(z, return_dict=False)[0]
        with h3opt.optimize(vae, passes, "cpu") as opt:
            actual = vae.decode(z, return_dict=False)[0]
            report, ran = opt.report, opt._session.operators_run()
    entry, blocks = report["attention_backend"], len(vae.decoder.transformer_blocks)
    assert entry.matched == entry.expected == blocks and not entry.refused
    assert report["fp8_attention"].matched == 0 and ran["attention"] >= blocks and not ran["fp8_attention"]
    assert relative_error(expected.float(), actual.float()) < 0.02
