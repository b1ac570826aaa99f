"""Write HTML pages: a report to look at and listen to, and a blind vote. Each page is a single file."""

from __future__ import annotations

import base64
import math
import tempfile
from pathlib import Path
from typing import Any

from h3opt.errors import MissingDependencyError, PipelineError
from h3opt.files import atomic_write, check_writable
from h3opt.metrics.bits import bits_equal
from h3opt.metrics.lpips import lpips_per_frame
from h3opt.metrics.video import frames_of
from h3opt.pipeline.generation import Media
from h3opt.render.figures import (
    check_figures,
    frame_png,
    heat_png,
    largest_difference,
    latent_chart,
    lpips_chart,
    spectrograms,
    waveforms,
)
from h3opt.render.media import write_mp4
from h3opt.verification.difference import CONFIDENCE
from h3opt.verification.faults import FAULTS
from h3opt.verification.noise_floors import multiple_digits
from h3opt.verification.verdict import Verdict

_FRAMES, _FRAME_WIDTH = 9, 480  # shown side by side; a page of full-size frames would be hundreds of megabytes


def check_page(path: Path) -> None:
    """Create the folder of a page, and check before the work that the page can be written after it.

    Raises:
        PipelineError: the folder cannot be created, or the file cannot be written.
        MissingDependencyError: a package that pages need is not installed.
    """
    check_figures()
    _template("report.html")
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"Pages need PyAV ({error}). Run pip install 'h3opt[report]'.") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipelineError(f"{path.parent} cannot be made: {error.strerror}. Give another path.") from error
    if not path.is_dir():  # check_output_files reports a directory
        check_writable(path)


def write_report(path: Path, verdict: Verdict) -> None:
    """Write the report page; it appears whole or not at all.

    Args:
        path: the HTML file; the folder exists.
        verdict: the result of :func:`h3opt.verify`. The page shows the clip that changed most.

    Raises:
        PipelineError: the file cannot be written, or the clips differ in length or size.
        MissingDependencyError: jinja2, matplotlib, Pillow or PyAV is not installed.
    """
    reference, optimized = verdict.reference, verdict.optimized
    bits_equal(reference.audio, optimized.audio)  # raises for sound of another length
    equal = bool(bits_equal(reference.video, optimized.video))
    count = frames_of(reference.video).shape[0]
    lpips = [0.0] * count if equal else lpips_per_frame(reference.video, optimized.video).tolist()
    rate = reference.sampling_rate
    data = verdict.to_dict()
    _write(
        path,
        "report.html",
        {
            "verdict": verdict,
            "data": data,
            "settings": verdict.settings[verdict.shown],
            "media": [("unmodified", _mp4(reference)), ("optimized", _mp4(optimized))],
            "frames": _frames(reference, optimized, lpips),
            "heat_scale": largest_difference(reference.video, optimized.video, _shown_frames(lpips)),
            "charts": {
                "lpips": _png(lpips_chart(lpips, verdict.floors)),
                "waveforms": _png(waveforms(reference.audio, optimized.audio, rate)),
                "spectrograms": _png(spectrograms(reference.audio, optimized.audio, rate)),
                "latents": _png(latent_chart(*verdict.traces)) if verdict.traces else None,
            },
            "worst_frame": _worst_frame(lpips),
            "faults": FAULTS,
            "confidence": CONFIDENCE,
            "multiple_digits": multiple_digits,
        },
    )


def write_blind(path: Path, verdict: Verdict) -> None:
    """Write a page that shows pairs in random order and counts votes; it appears whole or not at all.

    Pairs whose bits are equal are left out: nobody can vote on them.

    Args:
        path: the HTML file; the folder exists.
        verdict: the result of :func:`h3opt.verify`; every clip is a pair.

    Raises:
        PipelineError: the file cannot be written, or the clips of a pair differ in length or size.
        MissingDependencyError: jinja2 or PyAV is not installed.
    """
    pairs = verdict.pairs or [(verdict.reference, verdict.optimized)]
    shown = []
    for settings, (reference, optimized) in zip(verdict.settings, pairs, strict=True):
        if all([bits_equal(reference.video, optimized.video), bits_equal(reference.audio, optimized.audio)]):
            continue
        label = f"{settings.prompt} (seed {settings.seed})"
        shown.append({"label": label, "unmodified": _mp4(reference), "optimized": _mp4(optimized)})
    _write(path, "blind.html", {"pairs": shown, "equal": len(pairs) - len(shown), "confidence": CONFIDENCE})


def _write(path: Path, template: str, values: dict[str, Any]) -> None:
    text = _template(template).render(values)
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _template(name: str) -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError(f"Pages need jinja2 ({error}). Run pip install 'h3opt[report]'.") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("h3opt.render"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def _shown_frames(lpips: list[float]) -> list[int]:
    """The numbers of evenly spaced frames and of the worst frame."""
    last = len(lpips) - 1
    even = {round(number * last / (_FRAMES - 1)) for number in range(_FRAMES)}
    return sorted(even | {_worst_frame(lpips)})


def _worst_frame(lpips: list[float]) -> int:
    return max(range(len(lpips)), key=lambda frame: math.inf if math.isnan(lpips[frame]) else lpips[frame])


def _frames(reference: Media, optimized: Media, lpips: list[float]) -> list[dict[str, Any]]:
    left, right = frames_of(reference.video), frames_of(optimized.video)
    chosen = _shown_frames(lpips)
    full = largest_difference(reference.video, optimized.video, chosen)
    return [
        {
            "number": frame,
            "lpips": lpips[frame] if math.isfinite(lpips[frame]) else None,
            "unmodified": _png(frame_png(left[frame], _FRAME_WIDTH)),
            "optimized": _png(frame_png(right[frame], _FRAME_WIDTH)),
            "heat": _png(heat_png(left[frame], right[frame], full, _FRAME_WIDTH)),
        }
        for frame in chosen
    ]


def _mp4(media: Media) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clip.mp4"
        write_mp4(file, media.video, media.audio, media.sampling_rate)
        return "data:video/mp4;base64," + base64.b64encode(file.read_bytes()).decode("ascii")


def _png(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")
