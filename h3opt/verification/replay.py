"""Run again what moved first when a promise broke."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from h3opt.errors import CheckpointError
from h3opt.verification.evidence import _EQUAL, Evidence, _device_of, compared, read_evidence, tensors_in


@dataclass(frozen=True)
class Replay:
    """What a replay saw.

    Attributes:
        evidence: what was replayed.
        then: how far the pass moved the saved tensors, in words.
        now: how far it moves what comes out of the saved inputs today.
        moves: whether it still does.
    """

    evidence: Evidence
    then: str
    now: str
    moves: bool

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types."""
        one = self.evidence
        return {
            "pass": one.name,
            "module": one.module,
            "call": one.call,
            "site": one.site,
            "then": self.then,
            "now": self.now,
            "moves": self.moves,
        }

    def __str__(self) -> str:
        one = self.evidence
        where = f"{one.module}, call {one.call}" + (f", at {one.site}" if one.kind == "site" else "")
        return f"{one.name} in {where}\nthen: {self.then}\nnow:  {self.now}"


def replay(folder: Path, pipe: Callable[[torch.dtype, str], Any], device: str | None = None) -> Replay:
    """Run what :func:`write_evidence` saved again, with the passes as they are now.

    Args:
        folder: written by a verification that broke a promise.
        pipe: makes the pipeline it was written for, of a dtype and on a device; called only where a module has to run.
        device: where to run; ``None`` for the type of device it was found on.

    Raises:
        CheckpointError: the evidence is missing, truncated or not evidence.
        DeviceError: there is no such device here.
        H3OptError: the pass, or an option of it, is not known any more.
    """
    from h3opt.pass_api.base import GraphPass
    from h3opt.pass_api.registry import make_pass
    from h3opt.pipeline.view import PipelineView
    from h3opt.verification.bisection import call_submodules

    evidence = read_evidence(folder)
    moved = make_pass(evidence.name, evidence.options)
    device = device or _device_of(evidence, folder)
    evidence.inputs = {name: tensor.to(device) for name, tensor in evidence.inputs.items()}
    args, kwargs = evidence.call_arguments()
    if evidence.kind == "site":
        if not isinstance(moved, GraphPass) or evidence.rule >= len(moved.rules()):
            raise CheckpointError(
                f"{folder} is about rule {evidence.rule} of {moved.name}, which has none such any more. Verify again."
            )
        rule = moved.rules()[evidence.rule]
        try:
            with torch.no_grad():
                expected, found = (tensors_in(side(**kwargs)) for side in (rule.pattern, rule.replacement))
        except (IndexError, RuntimeError, TypeError) as error:  # other arguments than the rule has, or other sizes
            raise CheckpointError(
                f"{folder} does not fit the rule of {moved.name} ({str(error).splitlines()[0]}). Verify again."
            ) from error
    else:
        others = [make_pass(name, options) for name, options in evidence.others]
        view = PipelineView.of(pipe(evidence.dtype, device))
        try:
            expected, found = (
                tensors_in(call_submodules(view, passes, evidence.module, (args, kwargs))[0])
                for passes in (others, [*others, moved])
            )
        except (AttributeError, RuntimeError, TypeError) as error:  # no such module, other sizes, another dtype
            raise CheckpointError(
                f"{folder} does not fit this pipeline ({str(error).splitlines()[0]}). Give the --model it was "
                "written with, and no other --dtype."
            ) from error
    now = compared(expected, found)
    return Replay(evidence, evidence.moved, now, now != _EQUAL)
