"""The three promises, and how a report puts them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from h3opt.pass_api.promises import Exact, Perceptual, Rounding
from h3opt.verification.difference import Difference
from h3opt.verification.verify import holds

SAME = Difference()
CLOSE = Difference(10, 10, lpips=0.001, psnr_db=60.0, audio_snr_db=60.0)
FAR = Difference(1000, 1000, lpips=0.4, psnr_db=12.0, audio_snr_db=5.0)
ONE_BIT = Difference(1, 0, lpips=0.0, psnr_db=150.0)


@pytest.mark.parametrize(
    ("promise", "text"),
    [
        (Exact(), "exact"),
        (Rounding(), "rounding, 1 ulp"),
        (Rounding(8), "rounding, 8 ulp"),
        (Rounding(None), "rounding, noise floor"),
        (Perceptual(0.05), "LPIPS ≤ 0.05"),
        (Perceptual(0.25, 10.0), "LPIPS ≤ 0.25, audio ≥ 10 dB"),
    ],
)
def test_a_promise_reads_as_words(promise, text):
    assert str(promise) == text


def test_promises_are_values():
    assert Exact() == Exact() and Rounding(2) == Rounding(2) != Rounding(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rounding(2).ulps = 3  # type: ignore[misc]


@pytest.mark.parametrize(("difference", "held"), [(SAME, True), (ONE_BIT, False), (CLOSE, False)])
def test_exact_allows_no_bit(difference, held):
    assert holds(Exact(), difference, floor=FAR) is held


@pytest.mark.parametrize(
    ("difference", "floor", "held"),
    [
        (SAME, None, True),
        (CLOSE, CLOSE, True),
        (CLOSE, FAR, True),
        (FAR, CLOSE, False),
        (CLOSE, SAME, False),
        (dataclasses.replace(CLOSE, audio_snr_db=59.0), CLOSE, False),
        (dataclasses.replace(CLOSE, lpips=0.002), CLOSE, False),
        (CLOSE, None, False),
    ],
)
def test_rounding_stays_within_the_noise_floor(difference, floor, held):
    assert holds(Rounding(), difference, floor) is held


@pytest.mark.parametrize(
    ("promise", "difference", "held"),
    [
        (Perceptual(0.05), SAME, True),
        (Perceptual(0.05), dataclasses.replace(CLOSE, audio_differing=0), True),
        (Perceptual(0.05), dataclasses.replace(FAR, audio_differing=0), False),
        (Perceptual(0.05), CLOSE, False),  # no limit on sound: it says that it does not touch sound
        (Perceptual(0.5, audio_snr_db=5.0), FAR, True),
        (Perceptual(0.5, audio_snr_db=10.0), FAR, False),
        (Perceptual(0.05, audio_snr_db=60.0), CLOSE, True),
        (Perceptual(0.05, audio_snr_db=60.1), CLOSE, False),
    ],
)
def test_perceptual_holds_picture_and_sound_to_their_limits(promise, difference, held):
    assert holds(promise, difference, floor=None) is held


@pytest.mark.parametrize("promise", [Exact(), Rounding(), Perceptual(1.0, -100.0), Perceptual(1.0)])
def test_no_promise_holds_for_a_picture_that_is_not_a_number(promise):
    broken = Difference(5, 0, lpips=math.nan, psnr_db=math.nan)
    assert not holds(promise, broken, floor=FAR)


def test_no_limit_on_sound_holds_for_sound_that_is_not_a_number():
    broken = Difference(0, 5, audio_snr_db=math.nan)
    assert not holds(Perceptual(1.0, audio_snr_db=-100.0), broken, floor=FAR)


def test_the_worst_of_several_clips_counts():
    worst = Difference.worst([SAME, CLOSE, FAR])
    assert worst == FAR
    assert Difference.worst([SAME, SAME]).equal and not Difference.worst([SAME, ONE_BIT]).equal


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_clip_that_is_not_a_number_is_the_worst_in_any_order(order):
    clips = [Difference(5, 5, lpips=math.nan, psnr_db=math.nan, audio_snr_db=math.nan), CLOSE]
    worst = Difference.worst([clips[number] for number in order])
    assert math.isnan(worst.lpips)
    assert not holds(Perceptual(1.0, audio_snr_db=0.0), worst, floor=None)
    assert math.isnan(worst.audio_snr_db) and math.isnan(worst.psnr_db)
