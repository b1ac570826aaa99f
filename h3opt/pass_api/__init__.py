"""The interface for pass authors: every name that a pass needs, from one import.

A pass is a file with a class that is derived from :class:`FormatPass`, :class:`GraphPass` or :class:`SchedulePass` and
registered::

    from h3opt.pass_api import Exact, GraphPass, Rule, register

Patterns and guards that several passes share are in :mod:`h3opt.pass_api.patterns` and :mod:`h3opt.pass_api.guards`,
operators and their kernels in :mod:`h3opt.kernels`, the pipeline as a pass sees it in :mod:`h3opt.pipeline`.
"""

from __future__ import annotations

from h3opt.device import Device
from h3opt.graph.matcher import Match, Rule
from h3opt.pass_api import guards, patterns
from h3opt.pass_api.base import FormatPass, GraphFacts, GraphPass, Mutant, Pass, Plan, QuantizedBlocks, SchedulePass
from h3opt.pass_api.examples import Decline, Draw, Example, norm_and_modulate, norm_and_rotate
from h3opt.pass_api.fp8 import FP8BlocksPass, FP8Linear
from h3opt.pass_api.promises import Exact, Perceptual, Promise, Rounding
from h3opt.pass_api.registry import register
from h3opt.pass_api.testing import ReversedMergeQueue, with_replacement, without_guards
from h3opt.pass_api.tile_pass import TilePass
from h3opt.pipeline.view import PipelineView

__all__ = [
    "Decline",
    "Device",
    "Draw",
    "Exact",
    "Example",
    "FP8BlocksPass",
    "FP8Linear",
    "FormatPass",
    "GraphFacts",
    "GraphPass",
    "Match",
    "Mutant",
    "Pass",
    "Perceptual",
    "PipelineView",
    "Plan",
    "Promise",
    "QuantizedBlocks",
    "ReversedMergeQueue",
    "Rounding",
    "Rule",
    "SchedulePass",
    "TilePass",
    "guards",
    "norm_and_modulate",
    "norm_and_rotate",
    "patterns",
    "register",
    "with_replacement",
    "without_guards",
]
