"""Everything a pass author needs, from one import.

A pass is a file with one class, derived from one of the three kinds and registered::

    from h3opt.pass_api import Exact, GraphPass, Rule, register

Patterns and guards that several passes share are in :mod:`h3opt.pass_api.patterns` and :mod:`h3opt.pass_api.guards`;
operators and their kernels in :mod:`h3opt.kernels`; what a pass may know about the pipeline in :mod:`h3opt.pipeline`.
"""

from __future__ import annotations

from h3opt.device import Device
from h3opt.graph.matcher import Match, Rule
from h3opt.pass_api import guards, patterns
from h3opt.pass_api.base import FormatPass, GraphFacts, GraphPass, Mutant, Pass, Plan, SchedulePass
from h3opt.pass_api.examples import Decline, Draw, Example, norm_and_rotate
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
    "ReversedMergeQueue",
    "Rounding",
    "Rule",
    "SchedulePass",
    "TilePass",
    "guards",
    "norm_and_rotate",
    "patterns",
    "register",
    "with_replacement",
    "without_guards",
]
