"""On a Hopper GPU: FP8 attention against float64, on the kinds of data that networks have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h3opt.device import Device
from h3opt.kernels.ops import hopper_attention
from h3opt.kernels.ops.attention import ALL_KEYS, quantize_values
from h3opt.kernels.ops.hopper_attention import hopper_fp8_attention
from h3opt.kernels.ops.registry import E4M3, E4M3_MAX, SCALE_AMAX_MIN, launch

pytestmark = pytest.mark.gpu

HEAD_DIM = 128
KINDS = ("zero mean", "offset 0.3", "offset 2", "drift", "clusters", "peaked", "flat", "tails", "channels", "ramp")
FACTOR = 1.15  # of the error that quantization alone has: e4m3 probabilities, and tensor cores that sum 512 keys


@pytest.fixture(autouse=True)
def _needs_hopper():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    reason = hopper_attention.missing(Device.of("cuda"))
    if reason is not None:
        pytest.skip(reason)


def operands_of(kind: str, tokens: int, heads: int, batch: int = 1) -> list[Tensor]:
    """q, k and v of a kind of data: bf16 [batch, tokens, heads, 128]."""
    random = torch.Generator("cuda").manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device="cuda")

    q, k, v = (normal(batch, tokens, heads, HEAD_DIM) for _ in range(3))
    position = torch.linspace(0, 1, tokens, device="cuda")[:, None, None]
    if kind.startswith("offset"):
        v = v + float(kind.split()[1]) * normal(heads, HEAD_DIM)
    elif kind == "drift":  # along the tokens
        v = v + 2 * torch.sin(25 * position) * normal(HEAD_DIM)
    elif kind == "clusters":  # runs of 64 tokens that are alike
        cluster = torch.arange(tokens, device="cuda") // 64 * 7919 % 23
        direction = 0.35 * normal(23, heads, HEAD_DIM)[cluster]
        q, k, v = q + direction, k + direction, v + 1.5 * normal(23, heads, HEAD_DIM)[cluster]
    elif kind == "peaked":
        q = q * 3
    elif kind == "flat":
        q = q * 0.05
    elif kind == "tails":
        q, k, v = (x * torch.rand(x.shape, generator=random, device="cuda").clamp(min=1e-3) ** -0.4 for x in (q, k, v))
    elif kind == "channels":
        v[..., ::32] *= 100
        k[..., 5] *= 8
    elif kind == "ramp":  # logits that grow in the order of computation: the reference of P is raised again and again
        k = k * (6 - 5.9 * position)
    return [x.bfloat16() for x in (q, k, v)]


def cast_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and the scale of each head, 448 over its largest finite magnitude."""
    x = x.float()
    amax = torch.where(x.isfinite(), x, torch.zeros_like(x)).abs().amax((0, 1, 3))
    scale = E4M3_MAX / amax.clamp(min=SCALE_AMAX_MIN)
    return (x * scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def arguments_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    (q, q_scale), (k, k_scale), (v, v_scale, v_mean) = cast_heads(q), cast_heads(k), quantize_values(v, ALL_KEYS)
    return q, k, v, q_scale, k_scale, v_scale, v_mean


def exact(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Attention in float64 of some query rows: [batch, rows, heads, 128]."""
    out = [
        (q[:, rows, head].double() @ k[:, :, head].double().mT * HEAD_DIM**-0.5).softmax(-1) @ v[:, :, head].double()
        for head in range(q.shape[2])
    ]
    return torch.stack(out, 2)


def errors(kind: str, tokens: int, heads: int = 4) -> tuple[float, float]:
    """Relative error of the kernel, and that of exact attention on codes (each head of v by its own scale) in bf16."""
    q, k, v = operands_of(kind, tokens, heads)
    rows = torch.arange(0, tokens, max(tokens // 256, 1), device="cuda")
    reference = exact(q, k, v, rows)
    dequantized = [codes.float() / scale[:, None] for codes, scale in map(cast_heads, (q, k, v))]
    limit = relative(exact(*dequantized, rows).bfloat16(), reference)
    return relative(hopper_fp8_attention(*arguments_of(q, k, v))[:, rows], reference), limit


def relative(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("tokens", (2048, 19484))
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_that_of_quantization(kind, tokens):
    error, limit = errors(kind, tokens)
    assert error <= FACTOR * limit, f"{error / limit:.3f} times the limit {limit:.5f}"


@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", (1, 63, 129, 257))
def test_odd_lengths(tokens):
    check_length(tokens, tokens)


@pytest.mark.parametrize(
    ("queries", "keys"), [(65, 65), (127, 127), (191, 191), (383, 383), (577, 577), (1000, 1000), (999, 130), (3, 515)]
)
def test_more_lengths_and_queries_of_another_number_than_keys(queries, keys):
    check_length(queries, keys)


def check_length(queries: int, keys: int) -> None:
    """Two samples of three heads against float64 on what the codes say, and every row finite."""
    q, k, v = operands_of("offset 0.3", max(queries, keys), 3, batch=2)
    arguments = arguments_of(q[:, :queries], k[:, :keys], v[:, :keys])
    q_codes, k_codes, v_codes, q_scale, k_scale, v_scale, v_mean = arguments
    said = (q_codes.double() / q_scale[:, None], k_codes.double() / k_scale[:, None])
    value = v_codes.double() / v_scale[..., None] + v_mean
    reference = exact(*said, value, torch.arange(queries, device="cuda"))
    found = hopper_fp8_attention(*arguments)
    assert found.isfinite().all() and relative(found, reference) < 0.06
    assert torch.equal(found, hopper_fp8_attention(*arguments))


@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", (1, 65, 300))
def test_tiles_of_v_equal_their_definition(tokens):
    codes = torch.randint(0, 256, (2, tokens, 5, HEAD_DIM), dtype=torch.uint8, device="cuda").view(E4M3)
    v_tiles = launch("attention_tiles", "value_tiles", codes)
    assert torch.equal(v_tiles, hopper_attention.value_tiles_definition(codes))


@pytest.mark.parametrize("place", (0, 77, 699))
def test_nan_in_a_query_stays_in_that_row_and_head(place):
    q, k, v = operands_of("offset 0.3", 700, 3)
    clean = hopper_fp8_attention(*arguments_of(q, k, v))
    q[0, place, 1, 5] = torch.nan
    found = hopper_fp8_attention(*arguments_of(q, k, v))
    assert found[0, place, 1].isnan().all()
    found[0, place, 1] = clean[0, place, 1]
    assert found.isfinite().all()
    # Rows that share the warp with the NaN take the slow path, which may choose another reference for P: close only.
    assert torch.equal(found[:, :, ::2], clean[:, :, ::2]) and relative(found, clean.double()) < 0.06


@pytest.mark.parametrize("place", (0, 300, 699))
def test_nan_in_a_key_makes_the_head_nan_and_no_other(place):
    q, k, v = operands_of("zero mean", 700, 3)
    k[0, place, 1, 5] = torch.nan
    found = hopper_fp8_attention(*arguments_of(q, k, v))
    assert found[:, :, 1].isnan().all() and found[:, :, ::2].isfinite().all()


@pytest.mark.parametrize("kind", ("zero mean", "peaked"))  # peaked: most probabilities are zero, and 0 · NaN is NaN
@pytest.mark.parametrize("place", (0, 300, 699))
def test_nan_in_a_value_makes_the_channel_of_the_head_nan_and_no_other(kind, place):
    q, k, v = operands_of(kind, 700, 3)
    v[0, place, 1, 5] = torch.nan
    found = hopper_fp8_attention(*arguments_of(q, k, v)).isnan()
    assert found[:, :, 1, 5].all() and int(found.sum()) == 700


def test_infinite_queries_and_keys_are_the_largest_codes():
    q, k, v = operands_of("zero mean", 300, 2)
    q[0, 7, 0, 3], k[0, 9, 1, 4] = torch.inf, -torch.inf
    assert hopper_fp8_attention(*arguments_of(q, k, v)).isfinite().all()


def test_a_constant_value_and_zeros_are_exact():
    q, k, v = operands_of("peaked", 700, 3)
    assert (hopper_fp8_attention(*arguments_of(q, k, torch.full_like(v, 3))) == 3).all()
    assert (hopper_fp8_attention(*arguments_of(q, k, torch.zeros_like(v))) == 0).all()
    zero = torch.zeros_like(q)
    mean = v.float().mean(1, keepdim=True).expand(v.shape)
    assert relative(hopper_fp8_attention(*arguments_of(zero, zero, v)), mean.double()) < 0.01


def test_strided_operands_and_a_given_result():
    q, k, v = operands_of("offset 0.3", 301, 3, batch=2)
    arguments = arguments_of(q, k, v)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in arguments[:3]]
    out = torch.full(q.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    assert hopper_fp8_attention(*strided, *arguments[3:], out=out) is out
    assert torch.equal(out, hopper_fp8_attention(*arguments))


def test_each_sample_of_a_batch_is_the_sample_alone():
    q, k, v = operands_of("clusters", 515, 3, batch=3)
    arguments = arguments_of(q, k, v)
    together = hopper_fp8_attention(*arguments)
    for sample in range(3):
        alone = [x[sample : sample + 1] for x in arguments[:3]], [x[sample : sample + 1] for x in arguments[5:]]
        assert torch.equal(hopper_fp8_attention(*alone[0], *arguments[3:5], *alone[1])[0], together[sample])


def test_the_work_is_put_on_the_current_stream():
    arguments = arguments_of(*operands_of("offset 0.3", 4096, 8))
    expected = hopper_fp8_attention(*arguments)
    stream = torch.cuda.Stream()
    late = [torch.zeros_like(x) for x in arguments[:3]]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # on another stream, the kernels would read the zeros
        for target, source in zip(late, arguments[:3], strict=True):
            target.copy_(source)
        found = hopper_fp8_attention(*late, *arguments[3:])
    stream.synchronize()
    assert torch.equal(found, expected)


def test_a_cuda_graph_replays_with_new_operands():
    first, second = (arguments_of(*operands_of(kind, 700, 3)) for kind in ("offset 0.3", "drift"))
    static = [x.clone() for x in first]
    hopper_fp8_attention(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = hopper_fp8_attention(*static)
    for target, source in zip(static, second, strict=True):
        target.copy_(source)
    graph.replay()
    assert torch.equal(found, hopper_fp8_attention(*second))
