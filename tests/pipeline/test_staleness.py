"""A cached result is used while its tensors are the same objects and unmodified, and never afterwards."""

from __future__ import annotations

import pytest
import torch

from h3opt.pipeline.staleness import TensorCache, TensorSnapshot, content_key, is_unmodified, mutation_version


@pytest.mark.parametrize("inference", [False, True])
def test_a_write_in_place_is_seen(inference: bool) -> None:
    with torch.inference_mode(inference):
        tensor = torch.zeros(3)
        since = mutation_version(tensor)
        assert is_unmodified(tensor, since)
        tensor[1] = 1
        assert not is_unmodified(tensor, since)


def test_a_snapshot_matches_the_same_unmodified_tensors_in_order() -> None:
    first, second = torch.zeros(2), torch.zeros(2)
    snapshot = TensorSnapshot([first, second])
    assert snapshot.matches([first, second])
    for others in ([second, first], [first], [first, second, first], [first, second.clone()], []):
        assert not snapshot.matches(others)
    second.add_(1)
    assert not snapshot.matches([first, second])


def test_a_cache_knows_tensors_by_identity_and_forgets_modified_tensors() -> None:
    cache: TensorCache[str] = TensorCache()
    tensor = torch.zeros(2)
    cache.put(tensor, "first")
    assert cache.get(tensor) == "first" and cache.get(tensor.clone()) is None
    tensor.add_(1)
    assert cache.get(tensor) is None
    cache.put(tensor, "second")
    assert cache.get(tensor) == "second" == cache.first() and len(cache) == 1
    cache.clear()
    assert cache.get(tensor) is None


def test_a_cache_keeps_the_results_that_were_put_last() -> None:
    cache: TensorCache[int] = TensorCache()
    tensors = [torch.zeros(1) for _ in range(5)]
    for number, tensor in enumerate(tensors):
        cache.put(tensor, number)
    cache.keep_last(8)
    assert len(cache) == 5
    cache.keep_last(2)
    assert [cache.get(tensor) for tensor in tensors] == [None, None, None, 3, 4]


def test_a_content_key_is_that_of_the_bits() -> None:
    assert content_key(torch.zeros(2)) == content_key(torch.zeros(2)) != content_key(-torch.zeros(2))
    assert content_key(torch.zeros(2)) != content_key(torch.zeros(4, dtype=torch.bfloat16))
