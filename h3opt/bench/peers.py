"""The alternatives that h3opt is compared with."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.errors import MissingDependencyError, PipelineError, nearest
from h3opt.pipeline.minimax_h3 import ADALN_PROJECTION, decoder_blocks, transformer_blocks


@dataclass(frozen=True)
class Peer:
    """One alternative to h3opt.

    Attributes:
        name: shown in the tables, and given to ``--peers``.
        build: makes the model to measure from the unmodified model, which stays as it is.
        package: the Python package that ``build`` imports, if there is one.
    """

    name: str
    build: Callable[[Any], Any]
    package: str | None = None

    def set_up(self, model: Any) -> Any:
        """Make the model to measure.

        Raises:
            MissingDependencyError: the package is not installed.
        """
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            raise MissingDependencyError(f"{self.name} needs {self.package}. Run `pip install {self.package}`.")
        return self.build(model)


def choose_peers(names: Iterable[str], peers: Sequence[Peer]) -> list[Peer]:
    """Return the peers with these names, in the order of ``names``.

    Raises:
        PipelineError: there is no peer of that name.
    """
    known = {peer.name: peer for peer in peers}
    chosen = []
    for name in names:
        if name not in known:
            raise PipelineError(f"There is no peer {name!r}{nearest(name, known)}. Use {' or '.join(known)}.")
        chosen.append(known[name])
    return chosen


def share_weights(model: Any) -> Any:
    """Copy a module tree; the copy's parameters and buffers are the original tensors, not copies of them."""
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, tensors)


def _compile_transformer(transformer: Any) -> Any:
    """Use diffusers' ``compile_repeated_blocks`` on a copy that shares the weights."""
    model = share_weights(transformer)
    model.compile_repeated_blocks(fullgraph=True)
    return model


def _quantize_with_torchao(transformer: Any) -> Any:
    """Use torchao's row-wise dynamic FP8 on all linear layers but AdaLN's, with ``compile_repeated_blocks``."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    model = share_weights(transformer)
    quantize_(
        transformer_blocks(model),
        Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
        filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and ADALN_PROJECTION not in name,
    )
    model.compile_repeated_blocks(fullgraph=True)
    return model


def _compile_decoder(vae: Any) -> Any:
    """Compile each decoder block with ``torch.compile`` in a copy of the video VAE that shares the weights."""
    model = share_weights(vae)
    for block in decoder_blocks(model):
        block.compile(fullgraph=True)
    return model


TRANSFORMER_PEERS = (
    Peer("compile", _compile_transformer),
    Peer("torchao fp8 + compile", _quantize_with_torchao, package="torchao"),
)
"""The peers of the transformer; they get the transformer."""

DECODE_PEERS = (Peer("compile", _compile_decoder),)
"""The peers of the video decoder; they get the video VAE."""

TRANSFORMER_PEER_NAMES = tuple(peer.name for peer in TRANSFORMER_PEERS)
DECODE_PEER_NAMES = tuple(peer.name for peer in DECODE_PEERS)
