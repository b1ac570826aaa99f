"""Run a saved call again, to see whether a pass that broke its promise still changes the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from h3opt.device import Device
from h3opt.errors import CheckpointError, DeviceError
from h3opt.pass_api.base import GraphPass, Pass
from h3opt.pass_api.registry import make_pass
from h3opt.pipeline.view import PipelineView
from h3opt.verification.bisection import call_submodules
from h3opt.verification.evidence import BITS_EQUAL, CallEvidence, describe_difference, read_evidence, tensors_in

OpenPipeline = Callable[[torch.dtype, str], Any]
"""``open_pipeline(dtype, device)``: returns the pipeline that was verified."""

_MISFIT = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What a call raises when the saved arguments are not those of the rule or the module."""


@dataclass(frozen=True)
class ReplayResult:
    """The result of :func:`replay_evidence`.

    Attributes:
        evidence: the evidence.
        then: the difference at the time of the verification, in words.
        now: the difference today, with the saved inputs, in words.
        differs: whether there is a difference today.
    """

    evidence: CallEvidence
    then: str
    now: str
    differs: bool

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-ready types."""
        return {
            "pass": self.evidence.name,
            "module": self.evidence.module,
            "call": self.evidence.call,
            "site": self.evidence.site,
            "then": self.then,
            "now": self.now,
            "moves": self.differs,
        }

    def __str__(self) -> str:
        evidence = self.evidence
        where = f"{evidence.module}, call {evidence.call}"
        if evidence.kind == "site":
            where += f", at {evidence.site}"
        return f"{evidence.name} in {where}\nthen: {self.then}\nnow:  {self.now}"


def replay_evidence(folder: Path, open_pipeline: OpenPipeline, device: str | None = None) -> ReplayResult:
    """Run the saved call again, without the pass and with it, with the passes as they are now.

    Args:
        folder: a folder that :func:`h3opt.verification.evidence.write_evidence` wrote.
        open_pipeline: called only where a module has to run; the site of a rule needs no pipeline.
        device: where to run; ``None`` for the type of device of the verification.

    Raises:
        CheckpointError: the evidence is missing, truncated, or does not fit the pass or the pipeline.
        DeviceError: the device is not available.
        H3OptError: the pass, or an option of the pass, is not known any more.
    """
    evidence = read_evidence(folder)
    tested = make_pass(evidence.name, evidence.options)
    device = device or _device_of(evidence, folder)
    evidence.inputs = {name: tensor.to(device) for name, tensor in evidence.inputs.items()}
    if evidence.kind == "site":
        expected, actual = _call_rule(evidence, tested, folder)
    else:
        expected, actual = _call_module(evidence, tested, folder, open_pipeline, device)
    now = describe_difference(expected, actual)
    return ReplayResult(evidence, evidence.difference, now, now != BITS_EQUAL)


def _call_rule(evidence: CallEvidence, tested: Pass, folder: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs of the pattern and of the replacement of a rule."""
    if not isinstance(tested, GraphPass) or evidence.rule >= len(tested.rules()):
        raise CheckpointError(
            f"{folder} is about rule {evidence.rule} of {tested.name}, which has no such rule any more. Verify again."
        )
    rule = tested.rules()[evidence.rule]
    _, kwargs = evidence.call_arguments()
    try:
        with torch.no_grad():
            return tensors_in(rule.pattern(**kwargs)), tensors_in(rule.replacement(**kwargs))
    except _MISFIT as error:
        raise CheckpointError(
            f"{folder} does not fit the rule of {tested.name} ({_first_line(error)}). Verify again."
        ) from error


def _call_module(
    evidence: CallEvidence, tested: Pass, folder: Path, open_pipeline: OpenPipeline, device: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs of the module without the pass and with it."""
    others = [make_pass(name, options) for name, options in evidence.others]
    view = PipelineView.of(open_pipeline(evidence.dtype, device))
    arguments = evidence.call_arguments()
    try:
        expected, actual = (
            tensors_in(call_submodules(view, passes, evidence.module, arguments)[0])
            for passes in (others, [*others, tested])
        )
    except _MISFIT as error:
        raise CheckpointError(
            f"{folder} does not fit this pipeline ({_first_line(error)}). Give the --model it was written with, and "
            "no other --dtype."
        ) from error
    return expected, actual


def _device_of(evidence: CallEvidence, folder: Path) -> str:
    try:
        Device.of(evidence.device)
    except DeviceError as error:
        raise DeviceError(
            f"{folder} was found on {evidence.device}, which is not available here. Replay it where it is, or give "
            "another --device."
        ) from error
    return evidence.device


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
