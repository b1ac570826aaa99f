"""Examples that a pass must rewrite, examples it must leave alone, and wrong versions of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import rms_norm

from h3opt.kernels import data_kinds


@dataclass(frozen=True)
class Example:
    """A function as a model would spell it, and arguments to call it with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Decline:
    """An example that differs from a matching one in a single condition, and must be left alone because of it."""

    why: str
    build: Callable[[Draw], Example]


SPECIAL_VALUES = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0)


@dataclass
class Draw:
    """Sizes and a source of data for an example; property tests draw one per case.

    Attributes:
        batch, tokens, rows, channels, heads, head_dim: sizes; ``channels`` is even.
        dtype: of every floating point tensor.
        kind: of the data, see :mod:`h3opt.kernels.data_kinds`.
        magnitude: what the data is multiplied by: the standard deviation of zero-mean data.
        special: whether to plant NaN, infinities, signed zeros and subnormals.
        strided: whether tensors are non-contiguous views.
        device: where tensors are.
        seed: of the data.
    """

    batch: int = 1
    tokens: int = 7
    rows: int = 6
    channels: int = 16
    heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    kind: str = "zero_mean"
    magnitude: float = 1.0
    special: bool = False
    strided: bool = False
    device: str = "cpu"
    seed: int = 0
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    @property
    def unit_scale(self) -> bool:
        """Whether the data is what a pass that is not Exact states its error for: finite and of ordinary size.

        All kinds of data count but ``nan_row``.
        """
        return not self.special and self.kind != "nan_row" and 0.1 <= self.magnitude <= 1

    def tensor(self, *shape: int) -> torch.Tensor:
        """Data of ``shape``, with the draw's kind, dtype, magnitude, special values and strides."""
        return self._finish(data_kinds.draw(self.kind, self._storage(shape), self._generator))

    def attention(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K and V, ``[batch, tokens, heads, head_dim]`` each, that belong together as the draw's kind has them."""
        shape = (self.batch, self.tokens, self.heads, self.head_dim)
        q, k, v = data_kinds.draw_attention(self.kind, self._storage(shape), self._generator)
        return self._finish(q), self._finish(k), self._finish(v)

    def _storage(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], 2 * shape[-1]) if self.strided else shape

    def _finish(self, data: torch.Tensor) -> torch.Tensor:
        data = data * self.magnitude
        if self.special and data.numel():
            flat = data.view(-1)
            specials = (*SPECIAL_VALUES, torch.finfo(self.dtype).smallest_normal / 4)
            where = torch.randint(0, flat.numel(), (len(specials),), generator=self._generator)
            flat[where] = torch.tensor(specials)
        data = data.to(self.dtype)
        return (data[..., ::2] if self.strided else data).to(self.device)

    def index(self, rows: int, tokens: int) -> torch.Tensor:
        """int64 row numbers ``[tokens]`` below ``rows``."""
        return torch.randint(0, rows, (tokens,), generator=self._generator).to(self.device)

    def modulation(self) -> tuple[torch.Tensor, ...]:
        """``x [batch, tokens, channels], weight [channels], scale [rows, channels], shift [rows, channels], index``."""
        return (
            self.tensor(self.batch, self.tokens, self.channels),
            self.tensor(self.channels),
            self.tensor(self.rows, self.channels),
            self.tensor(self.rows, self.channels),
            self.index(self.rows, self.tokens),
        )

    def rotary(self) -> tuple[torch.Tensor, ...]:
        """``x [batch, tokens, heads, head_dim], weight [head_dim], cos and sin [tokens, 3/4 head_dim]``."""
        turning = self.head_dim * 3 // 4
        return (
            self.tensor(self.batch, self.tokens, self.heads, self.head_dim),
            self.tensor(self.head_dim),
            self.tensor(self.tokens, turning),
            self.tensor(self.tokens, turning),
        )


def norm_and_modulate(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """RMSNorm and AdaLN modulation of what :meth:`Draw.modulation` draws, as MiniMax-H3 writes them."""
    normed = rms_norm(x, (x.shape[-1],), weight, 1e-5)
    return normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)


def norm_and_rotate(x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RMSNorm of each head and rotary embedding of what :meth:`Draw.rotary` draws, as MiniMax-H3 spells them."""
    rotary = cos.shape[-1]
    normed = rms_norm(x, (x.shape[-1],), weight, 1e-5)
    turned, passed = normed[..., :rotary], normed[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    quarter_turn = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos[None, :, None] + quarter_turn * sin[None, :, None], passed), dim=-1)
