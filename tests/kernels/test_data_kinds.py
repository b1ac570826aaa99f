"""Each kind of data has the structure that its name says, at any shape, and leaves the global generators alone."""

from __future__ import annotations

import pytest
import torch

from h3opt.kernels.data_kinds import ATTENTION_KINDS, FINITE_KINDS, KINDS, draw, draw_attention

SHAPE = (1, 4096, 2, 64)


def data(kind: str, *shape: int) -> torch.Tensor:
    return draw(kind, shape or SHAPE, torch.Generator().manual_seed(0))


def offsets(x: torch.Tensor) -> torch.Tensor:
    """Mean over standard deviation along the tokens, per channel."""
    return x.mean(1).abs() / x.std(1)


@pytest.mark.parametrize("shape", [(2, 9, 4), (1, 1, 3, 8), (5, 6), (7,), (0, 4), (1, 0, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_every_shape_and_repeats_itself(kind: str, shape: tuple[int, ...]) -> None:
    before = torch.get_rng_state()
    first, second = data(kind, *shape), data(kind, *shape)
    assert first.shape == shape and first.dtype == torch.float32
    assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))
    assert torch.equal(before, torch.get_rng_state())
    assert kind == "nan_row" or first.isfinite().all()


def test_zero_mean_is_what_a_generator_gives() -> None:
    assert torch.equal(data("zero_mean", 3, 5), torch.randn(3, 5, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("zero_mean", 0, 0.02), ("offset_0.3", 0.1, 0.4), ("offset_2", 0.8, 2)]
)
def test_channels_have_offsets_of_the_named_size(kind: str, low: float, high: float) -> None:
    assert low <= offsets(data(kind)).median() <= high


def test_drift_is_slow_and_large() -> None:
    windows = data("drift").unflatten(1, (64, 64)).mean(2)
    steps, range_of = windows.diff(dim=1).abs().median(), windows.amax(1) - windows.amin(1)
    assert range_of.median() > 2 and steps < 0.5


def test_tokens_of_a_cluster_share_a_mean_that_the_next_does_not_have() -> None:
    means = data("clusters").unflatten(1, (64, 64)).mean(2)
    assert 1.2 < means.std(1).median() < 1.8
    assert torch.allclose(means[:, 0], means[:, 23], atol=1.0)  # the clusters come round


def test_heavy_tails_have_unit_variance_and_far_outliers() -> None:
    x = data("heavy_tails")
    assert 0.8 < x.std() < 1.3 and x.abs().max() > 12


def test_few_channels_are_a_hundred_times_the_rest() -> None:
    sizes = data("outlier_channels").std((0, 1, 2))
    assert (sizes > 50).sum() == 2 and (sizes < 2).sum() == 62


def test_one_token_is_nan() -> None:
    x = data("nan_row")
    assert x.isnan().any((2, 3)).sum() == 1 and x.isnan().sum() == 2 * 64


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no kind of data 'normal'; use one of zero_mean"):
        data("normal")


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_operands_of_attention_have_the_structure_of_their_kind(kind: str) -> None:
    q, k, v = draw_attention(kind, SHAPE, torch.Generator().manual_seed(0))
    weights = (q[0, ::64, 0] @ k[0, :, 0].T / 8).softmax(-1)
    largest = float(weights.amax(-1).median())
    if kind != "heavy_tails":  # some of its queries are far larger than others
        assert {"peaked": largest > 0.1, "flat": largest < 1.1 / 4096}.get(kind, largest < 0.05), largest
    if kind.startswith("offset"):
        assert offsets(v).median() > 0.1 and offsets(k).median() < 0.02
    if kind == "outlier_channels":
        assert k.std((0, 1, 2)).max() > 50 and v.std((0, 1, 2)).max() > 50


def test_nan_is_in_one_query_alone() -> None:
    q, k, v = draw_attention("nan_row", SHAPE, torch.Generator().manual_seed(0))
    assert q.isnan().any((2, 3)).sum() == 1 and k.isfinite().all() and v.isfinite().all()


def test_the_names_nest() -> None:
    assert set(FINITE_KINDS) < set(ATTENTION_KINDS) < set(KINDS)
