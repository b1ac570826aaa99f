"""Generic checks that every pass gets without writing a test, and what its examples draw their data from.

Third-party passes use them the same way::

    from h3opt.testing import Draw, check_pass
    def test_my_pass():
        check_pass(MyPass())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn.functional import rms_norm

from h3opt.errors import PassFailedError
from h3opt.graph.canonicalize import canonicalize
from h3opt.graph.matcher import Rule
from h3opt.graph.nodes import copy_graph
from h3opt.graph.rewriter import Outcome, apply_rules
from h3opt.graph.tracing import trace
from h3opt.metrics.bits import bits_equal, relative_error, row_ulps
from h3opt.promises import Exact, Perceptual, Rounding
from h3opt.protocol import Decline, Example, GraphPass
from h3opt.tiles import Lane

SPECIAL_VALUES = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0)


@dataclass
class Draw:
    """Sizes and a source of data for an example; property tests draw one per case.

    Attributes:
        batch, tokens, rows, channels, heads, head_dim: sizes; ``channels`` is even.
        dtype: of every floating point tensor.
        magnitude: standard deviation of the data.
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
        """Whether the data is what a pass that is not Exact states its error for: finite and of ordinary size."""
        return not self.special and 0.1 <= self.magnitude <= 1

    def tensor(self, *shape: int) -> torch.Tensor:
        """Normal data of ``shape``, with the draw's dtype, magnitude, special values and strides."""
        storage = (*shape[:-1], 2 * shape[-1]) if self.strided else shape
        data = torch.randn(storage, generator=self._generator) * self.magnitude
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


def norm_and_turn(x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RMSNorm of each head and rotary embedding of what :meth:`Draw.rotary` draws, as MiniMax-H3 spells them."""
    rotary = cos.shape[-1]
    normed = rms_norm(x, (x.shape[-1],), weight, 1e-5)
    turned, passed = normed[..., :rotary], normed[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    quarter_turn = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos[None, :, None] + quarter_turn * sin[None, :, None], passed), dim=-1)


def semantic(example: Example) -> GraphModule:
    """The canonical semantic graph of an example."""
    return canonicalize(trace(example.function, example.args))


def rewrite(graph_pass: GraphPass, graph: GraphModule) -> tuple[GraphModule, Outcome]:
    """Apply a pass to a copy of ``graph``, without probe or expectation."""
    module = copy_graph(graph)
    return module, apply_rules(tuple(graph_pass.rules()), module)


def broken_promise(graph_pass: GraphPass, draw: Draw) -> str | None:
    """Run a pass's example with and without the pass; returns how its promise was broken, or ``None``."""
    example = graph_pass.example(draw)
    graph = semantic(example)
    rewritten, outcome = rewrite(graph_pass, graph)
    if outcome.matched != 1:
        near = f" ({outcome.near_misses[0]})" if outcome.near_misses else ""
        return f"fired {outcome.matched} times on its example, not once{near}"
    with torch.no_grad():
        before, after = _tensors(graph(*example.args)), _tensors(rewritten(*example.args))
    for number, (reference, candidate) in enumerate(zip(before, after, strict=True)):
        promise = graph_pass.promise
        if isinstance(promise, Exact) and not (comparison := bits_equal(reference, candidate)):
            return f"output {number}: {comparison}"
        allowed = promise.ulps or 0 if isinstance(promise, Rounding) and draw.unit_scale else math.inf
        if allowed < math.inf and (distance := row_ulps(reference, candidate)) > allowed:
            return f"output {number}: {distance:.1f} ulps of its row, promised are {allowed}"
        if isinstance(promise, Perceptual) and promise.site_error is not None and draw.unit_scale:
            error = relative_error(reference, candidate)
            if not error <= promise.site_error:
                return f"output {number}: relative error {error:.3f}, promised is {promise.site_error:g}"
    return None


def accepted(graph_pass: GraphPass, decline: Decline, draw: Draw) -> bool:
    """Whether a pass wrongly rewrites an example it must leave alone."""
    return rewrite(graph_pass, semantic(decline.build(draw)))[1].matched > 0


def fires_again(graph_pass: GraphPass, draw: Draw) -> bool:
    """Whether a second run of a pass finds something in what the first one made."""
    once, _ = rewrite(graph_pass, semantic(graph_pass.example(draw)))
    return rewrite(graph_pass, once)[1].matched > 0


def rewired(original: GraphPass, replacement: Callable[..., Any], rule: int = 0) -> GraphPass:
    """A mutant of ``original`` whose rule number ``rule`` has another replacement."""
    rules = list(original.rules())
    rules[rule] = Rule(rules[rule].pattern, replacement, rules[rule].guard, rules[rule].index_into)
    return _with_rules(original, rules)


def unguarded(original: GraphPass) -> GraphPass:
    """A mutant of ``original`` that takes every site its patterns find."""
    return _with_rules(original, [Rule(r.pattern, r.replacement, None, r.index_into) for r in original.rules()])


def check_pass(graph_pass: GraphPass, draws: Sequence[Draw] | None = None) -> None:
    """All generic checks of a graph pass on fixed draws: a minute's answer to whether it is right.

    Raises:
        AssertionError: with what is wrong.
    """
    draws = draws or [
        Draw(),
        Draw(dtype=torch.bfloat16, tokens=5, channels=20, magnitude=100.0),
        Draw(dtype=torch.float16, batch=2, strided=True, seed=1),
        Draw(special=True, seed=2),
    ]
    for draw in draws:
        problem = broken_promise(graph_pass, draw)
        assert problem is None, f"{graph_pass.name} with {draw}: {problem}"
        assert not fires_again(graph_pass, draw), f"{graph_pass.name} fires on its own result"
    for decline in graph_pass.declines():
        assert not accepted(graph_pass, decline, draws[0]), f"{graph_pass.name} must leave alone: {decline.why}"
    assert graph_pass.mutants(), f"{graph_pass.name} has no mutant"
    for mutant in graph_pass.mutants():
        assert survives(mutant.instance, draws) is False, f"the mutant lives: {mutant.why}"  # type: ignore[arg-type]


def survives(mutant: GraphPass, draws: Sequence[Draw]) -> bool:
    """Whether no check on ``draws`` tells a mutant from a right pass."""
    try:
        wrong = any(broken_promise(mutant, draw) or fires_again(mutant, draw) for draw in draws)
        return not wrong and not any(accepted(mutant, decline, draws[0]) for decline in mutant.declines())
    except PassFailedError:  # the engine itself turned its graph down
        return False


class LastFirst(Lane):
    """For mutants of passes that schedule tiles: merging waits for the end and then goes backwards."""

    def __init__(self) -> None:
        self.merges: list[Callable[[], Sequence[torch.Tensor]]] = []

    def run(self, merge: Callable[[], Sequence[torch.Tensor]], device: torch.device) -> None:
        self.merges.append(merge)

    def finish(self) -> None:
        while self.merges:
            self.merges.pop()()


def _with_rules(original: GraphPass, rules: Sequence[Rule]) -> GraphPass:
    cls = type(original)
    mutant = type(f"{cls.__name__}Mutant", (cls,), {"rules": lambda self: tuple(rules)})
    return mutant(**original.options())


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [one for item in result for one in _tensors(item)]
