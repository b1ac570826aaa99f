"""How the products of FP8 layers are summed is chosen per layer, and a wrong choice is refused in words."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest
from conftest import build

from h3opt.errors import PassOptionError
from h3opt.pass_api.fp8 import PROJECTIONS, FP8BlocksPass, FP8Linear
from h3opt.pass_api.registry import make_pass
from h3opt.pipeline.view import PipelineView

NAMES = ("fp8_linear", "vae_fp8_linear")


def fp8(name: str, accumulate: Any = None, **options: Any) -> FP8BlocksPass:
    made = make_pass(name, options if accumulate is None else {"accumulate": accumulate, **options})
    assert isinstance(made, FP8BlocksPass)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_precise_unless_it_is_told_otherwise(name: str) -> None:
    assert {fp8(name).accumulate_of(layer) for layer in PROJECTIONS} == {"precise"}
    assert {fp8(name, "fast").accumulate_of(layer) for layer in PROJECTIONS} == {"fast"}
    mixed = fp8(name, {"attn.to_q": "fast", "ff.net.2": "precise"})
    assert [layer for layer in PROJECTIONS if mixed.accumulate_of(layer) == "fast"] == ["attn.to_q"]


@pytest.mark.parametrize("name", NAMES)
def test_a_mapping_is_one_option_in_any_order_that_can_be_hashed_written_and_read(name: str) -> None:
    one = fp8(name, {"attn.to_q": "fast", "ff.net.2": "fast"})
    other = fp8(name, {"ff.net.2": "fast", "attn.to_q": "fast"})
    assert one == other and hash(one) == hash(other) != hash(fp8(name))
    assert make_pass(name, json.loads(json.dumps(one.options()))) == one


@pytest.mark.parametrize(
    ("accumulate", "why"),
    [
        ("slow", "accumulate must be precise or fast, got 'slow' for every layer"),
        ({"ff.net.2": "slow"}, r"got 'slow' for ff\.net\.2"),
        ({"ff.net.3": "fast"}, r"accumulate has 'ff\.net\.3', which is none of the layers"),
        (3, "refuses its options"),
    ],
)
def test_what_is_no_choice_is_refused(accumulate: Any, why: str) -> None:
    with pytest.raises(PassOptionError, match=why):
        fp8("fp8_linear", accumulate)
    with pytest.raises(PassOptionError, match="none of the layers"):
        fp8("fp8_linear", {"attn.to_q": "fast"}, layers=["ff.net.2"])


def test_installed_layers_sum_as_their_pass_says() -> None:
    view = PipelineView.of(build())
    with ExitStack() as undo:
        fp8("fp8_linear", {"ff.net.2": "fast"}).install(view, undo)
        block = view.transformer.transformer_blocks[0]  # type: ignore[union-attr]
        choices = {layer: block.get_submodule(layer) for layer in PROJECTIONS}
        assert all(isinstance(layer, FP8Linear) for layer in choices.values())
        assert {path for path, layer in choices.items() if layer.accumulate == "fast"} == {"ff.net.2"}
