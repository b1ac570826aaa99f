"""Facts about a graph, and which layers the format passes declare as FP8."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from h3opt.kernels import ops
from h3opt.pass_api.base import FormatPass, GraphFacts, QuantizedBlocks
from h3opt.pass_api.promises import Perceptual
from h3opt.pass_api.registry import make_pass

QKV = ("attn.to_q", "attn.to_k", "attn.to_v")


@dataclass(frozen=True)
class OtherFormat(FormatPass):
    """A format pass of a third party: no pass knows the name."""

    kind_of_block: str = "transformer.block"
    layers: tuple[str, ...] = ()
    excluded: int = 0
    name = "other_format"
    promise = Perceptual(lpips=1.0)

    def mutants(self):
        return ()

    def install(self, view, undo):
        return 0

    def expect(self, view):
        return 0

    def quantized_blocks(self):
        return QuantizedBlocks(self.kind_of_block, frozenset(self.layers), self.excluded)


def facts(region: str, holds: int, quantizations: int, *passes: object) -> GraphFacts:
    kind = "vae.block" if region.startswith("vae") else "transformer.block"
    return GraphFacts(region, {kind: holds}, {ops.quantize_rows: quantizations}, passes=passes)  # type: ignore[arg-type]


def test_a_format_pass_declares_nothing_unless_it_quantizes_activations():
    declared = make_pass("fp8_linear", {"layers": ["ff.net.2"], "keep_first": 1, "keep_last": 2}).quantized_blocks()
    assert declared == QuantizedBlocks("transformer.block", frozenset({"ff.net.2"}), 3)
    assert make_pass("vae_fp8_linear").quantized_blocks().kind == "vae.block"
    assert FormatPass.quantized_blocks(OtherFormat()) is None


def test_facts_ask_every_format_pass_that_is_on():
    two = facts("transformer", 4, 2, OtherFormat(layers=QKV), make_pass("fp8_linear", {"layers": ["ff.net.2"]}))
    assert two.quantized_layers("transformer.block") == {*QKV, "ff.net.2"}
    assert (
        two.quantized_layers("vae.block") == frozenset()
        and facts("transformer", 4, 2).quantized("transformer.block") == ()
    )


def test_excluded_blocks_are_subtracted_in_a_graph_of_the_whole_model_only():
    blocks = QuantizedBlocks("transformer.block", frozenset(QKV), 3)
    assert facts("transformer", 8, 0).count(blocks) == 5
    assert facts("transformer.block", 1, 0).count(blocks) == 1
    assert facts("transformer", 2, 0).count(blocks) == 0


@pytest.mark.parametrize("format_pass", ["fp8_linear", "other"])
def test_the_fusion_expects_what_any_format_declares(format_pass):
    """A format under another name counts like ``fp8_linear``: the fusion knows formats by what they declare."""

    def chosen(*layers: str) -> FormatPass:
        return OtherFormat(layers=layers) if format_pass == "other" else make_pass("fp8_linear", {"layers": layers})

    fusion = make_pass("quant_producer_fusion")
    both_feed_forward = ("ff.net.0.proj", "ff.net.2")
    cases = {
        (*QKV, "attn.to_out.0", *both_feed_forward): (4, 3),  # the attention output has no producer to fuse with
        (*QKV, *both_feed_forward): (3, 3),
        ("attn.to_q", *both_feed_forward): (3, 2),  # to_k and to_v read the norm unquantized
        both_feed_forward: (2, 2),
    }
    for layers, (quantizations, fused) in cases.items():
        assert fusion.expect(facts("transformer.block", 1, quantizations, chosen(*layers))) == fused, layers
    excluded = OtherFormat(layers=("attn.to_out.0", "ff.net.2"), excluded=2)
    assert fusion.expect(facts("transformer", 5, 6, excluded)) == 3


def test_the_fused_norms_of_the_decoder_depend_on_what_any_format_declares():
    fusion, norm = make_pass("quant_producer_fusion"), make_pass("vae_residual_norm")
    for layers, fused in ((QKV, 1), (("attn.to_q",), 0), ((*QKV, "ff.net.2"), 2)):
        declared = OtherFormat("vae.block", layers)
        assert fusion.expect(facts("vae.block", 1, 2, declared)) == fused
        assert fusion.expect(facts("vae.block", 1, 0, declared)) == 0, "a block that keeps the format of the model"
    cast = {torch.ops.aten.to.dtype: 1}
    for quantizations, passes, expected in (
        (2, (OtherFormat("vae.block", QKV), fusion), 2),
        (2, (OtherFormat("vae.block", QKV),), 3),
        (0, (OtherFormat("vae.block", QKV), fusion), 3),
        (2, (OtherFormat("vae.block", QKV[:1]), fusion), 3),
    ):
        operators = {ops.quantize_rows: quantizations, **cast}
        assert norm.expect(GraphFacts("vae.block", {"vae.block": 1}, operators, passes=passes)) == expected
