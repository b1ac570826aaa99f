"""Perceptual promises are what was measured on the trained reference, with a margin: neither broken nor arbitrary."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sample_verdict import verdict as shown

from h3opt.errors import PipelineError
from h3opt.pass_api.promises import Perceptual
from h3opt.pass_api.registry import find_pass, list_passes, make_pass
from h3opt.pipeline.generation import reference_pipeline
from h3opt.verification.calibration import LPIPS_MARGIN, SNR_MARGIN_DB, Calibration, calibrations
from h3opt.verification.difference import Difference
from h3opt.verification.verify import verify

PERCEPTUAL = [cls.name for cls in list_passes() if isinstance(cls.promise, Perceptual)]
PROMPTS = ["a red circle moves right over grey, a low hum", "a blue square moves down over checks, slow beeps"]


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[str, Calibration]]:
    """Every Perceptual pass, over two prompts; on a CPU FP8 attention is emulated."""
    pipe = reference_pipeline(torch.float32)
    passes = [make_pass(name).test_instance() for name in PERCEPTUAL]
    found = verify(pipe, PROMPTS, passes, "cpu", on_reference=True, progress=lambda *_: None)
    yield {one.name: one for one in calibrations(found)}


@pytest.mark.parametrize("name", PERCEPTUAL)
def test_the_promise_allows_the_worst_that_was_measured(measured: dict[str, Calibration], name: str) -> None:
    one = measured[name]
    assert not one.measured.equal, "the pass did something"
    promise = find_pass(name).promise
    assert isinstance(promise, Perceptual) and one.promise == promise.on_reference and one.clips == 2
    assert one.kept, str(one)


@pytest.mark.parametrize("name", PERCEPTUAL)
def test_the_promise_is_no_looser_than_that_with_its_margin(measured: dict[str, Calibration], name: str) -> None:
    assert not measured[name].loose, str(measured[name])


# --- the arithmetic ----------------------------------------------------------------------------------------------


def calibration(lpips: float, snr: float, promise: Perceptual) -> Calibration:
    return Calibration("x", promise, Difference(1, int(snr < math.inf), lpips, 40.0, snr), 4)


@pytest.mark.parametrize(
    ("lpips", "snr", "suggested"),
    [
        (0.00615, 51.9, Perceptual(0.013, 45.0)),
        (0.015, 46.0, Perceptual(0.03, 40.0)),
        (0.0000451, math.inf, Perceptual(0.000091, None)),
        (0.0, 129.2, Perceptual(0.0, 123.0)),
        (0.6, -2.5, Perceptual(1.2, -9.0)),
    ],
)
def test_a_promise_should_be_the_worst_with_its_margin(lpips: float, snr: float, suggested: Perceptual) -> None:
    assert (LPIPS_MARGIN, SNR_MARGIN_DB) == (2.0, 6.0)
    found = calibration(lpips, snr, dataclasses.replace(suggested, site_error=0.1))
    assert found.suggested == dataclasses.replace(suggested, site_error=0.1), "which pipelines do not measure"
    assert found.kept and not found.loose and str(found).endswith(": calibrated")


@pytest.mark.parametrize(
    ("promise", "kept", "loose"),
    [
        (Perceptual(0.0099, 40.0), False, False),
        (Perceptual(0.01, 46.0), True, False),
        (Perceptual(0.039, 35.0), True, False),
        (Perceptual(0.041, 46.0), True, True),
        (Perceptual(0.02, 47.0), False, False),
        (Perceptual(0.02, 33.0), True, True),
        (Perceptual(0.02, None), False, False),
    ],
)
def test_a_promise_is_broken_calibrated_or_too_loose(promise: Perceptual, kept: bool, loose: bool) -> None:
    found = calibration(0.01, 46.0, promise)
    assert (found.kept, found.loose) == (kept, loose)


def test_decibels_are_not_promised_of_sound_that_keeps_its_bits() -> None:
    assert calibration(0.01, math.inf, Perceptual(0.02, 40.0)).loose
    assert not calibration(0.01, math.inf, Perceptual(0.02, None)).loose


def test_a_verdict_is_calibrated_from_and_nan_is_not() -> None:
    (one,) = calibrations(shown())
    assert (one.name, one.clips, one.promise) == ("fp8_linear", 2, Perceptual(0.03, 40))
    data: dict[str, Any] = json.loads(json.dumps(one.to_dict()))
    assert data["suggested"] == "LPIPS ≤ 0.025, audio ≥ 55 dB" and data["kept"] and data["loose"]
    broken = dataclasses.replace(shown().passes[1], difference=Difference(1, 0, math.nan))
    with pytest.raises(PipelineError, match="fp8_linear makes NaN"):
        calibrations(shown(passes=[broken]))
