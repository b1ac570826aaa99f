"""The report page and the blind vote: structure everywhere, behaviour in a real browser where there is one."""

from __future__ import annotations

import base64
import dataclasses
import html
import html.parser
import io
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import BROWSER, NO_BROWSER, Page, chromium
from PIL import Image
from sample_verdict import FLOORS, MOVED, REFUSED, clip, verdict

from h3opt.compiler.report import Report
from h3opt.errors import MissingDependencyError, PipelineError
from h3opt.pipeline.generation import GenerationSettings, Media
from h3opt.render.figures import lpips_chart
from h3opt.render.page import check_page, write_blind, write_report
from h3opt.verification.difference import Difference
from h3opt.verification.faults import Finding
from h3opt.verification.noise_floors import Floor


class Structure(html.parser.HTMLParser):
    """Elements, and whether all that open close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pages")
    write_report(folder / "report.html", verdict())
    write_blind(folder / "blind.html", verdict())
    return folder / "report.html", folder / "blind.html"


# --- structure -------------------------------------------------------------------------------------------------


def test_pages_are_whole_need_no_other_file_and_take_no_markup_from_prompts(pages):
    for file in pages:
        text = file.read_text(encoding="utf-8")
        page = Structure(text)
        assert page.open == [] and "alert(1)</script>" not in text
        for _, attributes in page.elements:
            for name in ("src", "href"):
                value = attributes.get(name) or "#"
                assert value.startswith(("data:image/png;base64,", "data:video/mp4;base64,", "#")), value[:60]
        assert not re.search(r"https?://|@import|url\(", text)
        assert any("default-src 'none'" in (one.get("content") or "") for one in page.all("meta"))
        assert [one.get("lang") for one in page.all("html")] == ["en"] and len(page.all("h1")) == 1


def test_the_report_says_all_it_must(pages):
    page = Structure(pages[0].read_text(encoding="utf-8"))
    words = " ".join(page.text.split())
    for expected in (
        "all promises held", "A <b>fox</b>", "seed 0", "LPIPS 0.0123", "worst frame 0.03", "0.88 of the noise floor",
        "fp8_linear", "LPIPS ≤ 0.03, audio ≥ 40 dB", "needs <SM89>", "declined", "noise floor", "A notice.",
        "executor direct", "torch", "diffusers", "Student t", "None that the unmodified clip does not have",
        "Neighbouring cells", "matmul precision",
    ):  # fmt: skip
        assert expected in words, expected
    videos = page.all("video")
    assert [one["aria-label"] for one in videos] == ["unmodified clip", "optimized clip"]
    assert all("controls" in one for one in videos)
    assert all(one.get("alt") is not None for one in page.all("img"))
    assert all("scope" in one for one in page.all("th"))


def test_every_floor_is_shown_measured_or_not(pages):
    text = pages[0].read_text(encoding="utf-8")
    words = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text.partition('id="frame-data"')[0])).split())
    for expected in (
        "0.88 of the noise floor; 0.88 of what compiling alone does; 0.031 of the distance to the next seed",
        "of noise floor of compile floor of attention floor of seed ceiling",
        "0.6 0.4 – 0.03",
        "compile floor blocks compiled by Inductor against eager LPIPS 0.0300, audio 60.0 dB",
        f"attention floor one attention library against another not measured: {REFUSED}",
        "compile floor graphs 5, max autotune False",
    ):
        assert expected in words, expected
    (alt,) = [one["alt"] or "" for one in Structure(text).all("img") if "LPIPS of each frame" in (one.get("alt") or "")]
    assert "over the noise floor as a band; compile floor 0.03; seed ceiling 0.4; the worst is frame" in alt


def test_the_chart_draws_floors_and_leaves_those_far_above_to_the_legend():
    frames = [0.01, 0.02, math.nan]
    bare, band, lines = (Image.open(io.BytesIO(lpips_chart(frames, FLOORS[:count]))) for count in (0, 1, 3))
    above = Image.open(io.BytesIO(lpips_chart(frames, FLOORS)))
    pictures = [one.convert("RGB").tobytes() for one in (bare, band, lines, above)]
    assert len(set(pictures)) == 4, "each floor shows"
    shade = (0xC8, 0xD5, 0xDD)
    assert [shade in {colour for _, colour in one.convert("RGB").getcolors(1 << 20)} for one in (bare, band)] == [
        False,
        True,
    ]
    assert band_top(lines) == band_top(above), "a ceiling does not press the frames onto the axis"


def band_top(chart: Image.Image) -> int:
    """The highest row of the noise floor's band at the chart's left."""
    chart = chart.convert("RGB")
    return next(y for y in range(chart.height) if chart.getpixel((chart.width // 4, y)) == (0xC8, 0xD5, 0xDD))


def test_frames_heat_maps_and_clips_are_what_they_say(pages):
    text = pages[0].read_text(encoding="utf-8")
    frames = json.loads(re.search(r'id="frame-data">(.*?)</script>', text, re.S).group(1))  # type: ignore[union-attr]
    numbers = [one["number"] for one in frames]
    assert numbers[0] == 0 and numbers[-1] == 47 and len(numbers) >= 9
    for name, expected in (("unmodified", clip(0)), ("optimized", clip(1))):
        picture = image(frames[3][name])
        assert picture.size == (96, 64)
        level = picture.getpixel((5, 5))[0] / 255
        assert level == pytest.approx(expected.video[0, numbers[3], 0, 5, 5].item(), abs=0.01)
    heat = image(frames[3]["heat"]).convert("L")
    difference = (clip(1).video - clip(0).video)[0, numbers[3], 0].abs()
    hot, cold = difference[0].argmax().item(), difference[0].argmin().item()
    assert heat.getpixel((hot, 0)) > heat.getpixel((cold, 0)) + 50
    for one in Structure(text).all("video"):
        data = base64.b64decode((one["src"] or "").partition(",")[2])
        import av  # here, so that tests without video are found where it is missing

        with av.open(io.BytesIO(data)) as container:
            assert {stream.codec_context.name for stream in container.streams} == {"h264", "aac"}


def image(source: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("RGB")


def test_a_broken_promise_a_fault_and_nan_are_shown(tmp_path):
    video = clip(1).video.clone()
    video[0, 5, :, 3:9, 3:9] = math.nan
    broken = dataclasses.replace(verdict().passes[1], held=False)
    found = verdict(
        1,
        optimized=Media(video, clip(1).audio, 16000),
        passes=[broken],
        all_passes=dataclasses.replace(MOVED, lpips=math.nan, psnr_db=math.nan, audio_snr_db=-math.inf),
        faults=[(0, Finding("nan", "video, frames 5-5", 108, 0))],
    )
    write_report(tmp_path / "r.html", found)
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    words = " ".join(Structure(text).text.split())
    assert "PSNR not a number dB" in words and "audio SNR -∞ dB" in words
    assert "promise broken by fp8_linear" in words and "nan: video, frames 5-5" in words and "BROKEN" in words
    frames = json.loads(re.search(r'id="frame-data">(.*?)</script>', text, re.S).group(1))  # type: ignore[union-attr]
    (worst,) = [one for one in frames if one["number"] == 5]
    assert worst["lpips"] is None and image(worst["optimized"]).getpixel((5, 5)) == (255, 0, 255)


def test_what_is_far_above_one_ulp_is_said_in_words(tmp_path):
    tiny = [Floor("ulp", Difference(5, 7, 1e-9, 150.0, 150.0))]
    fp8 = dataclasses.replace(verdict().passes[1], of_floors={"ulp": 2.7e9})
    write_report(tmp_path / "r.html", verdict(1, floors=tiny, passes=[fp8]))
    words = " ".join(Structure((tmp_path / "r.html").read_text(encoding="utf-8")).text.split())
    assert "That is far above the noise floor: --floors compile says what compiling alone does." in words
    assert ">1000" in words and "e+0" not in words.partition("Environment")[0]


def test_what_a_pass_does_alone_has_a_column_where_it_was_asked_for(tmp_path, pages):
    one, other, _ = verdict().passes
    alone = [
        dataclasses.replace(one, alone_failed="nothing to do: it builds on <b>"),
        dataclasses.replace(other, alone=MOVED),
    ]
    write_report(tmp_path / "r.html", verdict(1, passes=alone))
    (here, there) = (Structure(file.read_text(encoding="utf-8")) for file in (tmp_path / "r.html", pages[0]))
    assert " ".join(here.text.split()).count("alone") == 1 + there.text.count("alone")
    assert "nothing to do: it builds on <b>" in here.text
    assert " ".join(here.text.split()).count(str(MOVED)) > 2


def test_one_fault_and_the_verdict_does_not_hold():
    assert verdict(1).held and not verdict(1, faults=[(0, Finding("seam", "column 48", 12.7, 3))]).held


def test_capture_that_moves_bits_breaks_the_verdict_of_the_direct_executor_alone():
    assert not verdict(1, capture=MOVED).held
    assert verdict(1, capture=MOVED, report=Report("cpu", "cpu", "inductor", "block")).held


def test_equal_clips_make_a_report_and_nothing_to_vote_on(tmp_path):
    same = verdict(1, pairs=[(clip(0), clip(0))], optimized=clip(0), all_passes=Difference(), traces=None)
    write_report(tmp_path / "r.html", same)
    assert "equal bit for bit" in Structure((tmp_path / "r.html").read_text(encoding="utf-8")).text
    write_blind(tmp_path / "b.html", same)
    page = Structure((tmp_path / "b.html").read_text(encoding="utf-8"))
    assert "nothing to vote on" in page.text and page.all("script") == []


def test_the_blind_page_does_not_show_which_is_which(pages):
    words = Structure(pages[1].read_text(encoding="utf-8")).text
    assert "Left is better" in words and "was better" not in words


# --- files -----------------------------------------------------------------------------------------------------


def test_a_page_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "r.html").write_text("old")
    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_report(tmp_path / "r.html", verdict(1))
    assert (tmp_path / "r.html").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def interrupted(self: Path, text: str, encoding: str) -> None:
    self.write_bytes(text.encode(encoding)[:1000])
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["video", "audio"])
@pytest.mark.parametrize("write", [write_report, write_blind])
def test_media_of_different_length_make_no_page(kind, write, tmp_path):
    whole = clip(1)
    tensor = whole.video[:, :-3] if kind == "video" else whole.audio[..., :-300]
    short = dataclasses.replace(whole, **{kind: tensor})
    with pytest.raises(PipelineError, match="cannot compare shapes"):
        write(tmp_path / "page.html", verdict(1, optimized=short, pairs=[(clip(0), short)]))
    assert list(tmp_path.iterdir()) == []


def test_a_place_for_a_page_is_made_or_refused_before_the_work(tmp_path):
    check_page(tmp_path / "new" / "report.html")
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PipelineError, match="cannot be made"):
        check_page(tmp_path / "file" / "report.html")


def test_a_name_no_page_can_have_is_refused_before_the_work(tmp_path):
    (tmp_path / "r.html").write_text("old")
    check_page(tmp_path / "r.html")
    for name in ("/dev/null", str(tmp_path / ("a" * 240 + ".html"))):
        with pytest.raises(PipelineError, match=r"Give"):
            check_page(Path(name))
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("r.html", "old")]


@pytest.mark.parametrize("package", ["jinja2", "matplotlib", "av"])
def test_a_missing_package_is_named_before_the_work(package, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    if package == "matplotlib":
        monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        check_page(tmp_path / "report.html")


# --- in a browser ----------------------------------------------------------------------------------------------

in_browser = pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as page:
        yield page


@in_browser
def test_both_clips_play_together_from_the_keyboard(browser, pages):
    browser.size(1280, 900)
    browser.open(pages[0])
    codecs = browser.js("document.createElement('video').canPlayType('video/mp4; codecs=\"avc1.64001f, mp4a.40.2\"')")
    if not codecs:
        pytest.skip("this browser was built without H.264 and AAC")
    browser.wait("clips.every(clip => clip.readyState >= 2)")
    assert browser.js("clips.map(clip => [clip.videoWidth, clip.videoHeight])") == [[96, 64], [96, 64]]
    browser.press("p")
    browser.wait("clips.every(clip => clip.currentTime > 0.2)")
    assert browser.js("clips.map(clip => clip.error)") == [None, None] and browser.js("at('media-error').hidden")
    assert browser.js("clips.map(clip => clip.muted)") == [False, True]
    browser.press("s")
    assert browser.js("clips.map(clip => clip.muted)") == [True, False]
    browser.press("p")
    assert browser.js("clips.every(clip => clip.paused)")


@in_browser
def test_a_long_word_in_a_prompt_does_not_widen_a_page(browser, tmp_path):
    write_report(tmp_path / "long.html", verdict(1, settings=[GenerationSettings(prompt="long" * 999)]))
    browser.size(390, 800)
    browser.open(tmp_path / "long.html")
    assert browser.js("document.documentElement.scrollWidth") <= 390


@in_browser
def test_frames_are_compared_side_by_side_flickering_and_by_difference(browser, pages):
    browser.open(pages[0])
    assert browser.js("[left.alt, right.alt, at('right-figure').hidden]") == [
        "frame 0, unmodified", "frame 0, optimized", False,
    ]  # fmt: skip
    browser.js("slider.focus()")
    browser.press("ArrowRight")
    assert browser.js("left.alt") == f"frame {browser.js('frames[1].number')}, unmodified"
    browser.press("3")
    assert browser.js("[left.alt.includes('difference'), at('right-figure').hidden]") == [True, True]
    browser.press("2")
    for name in ("optimized", "unmodified"):
        browser.wait(f"left.alt.endsWith({name!r})", 3)
    assert browser.js("document.querySelector('[data-view=flicker]').getAttribute('aria-pressed')") == "true"
    browser.press("1")
    shown = browser.js("left.alt")
    time.sleep(0.7)
    assert browser.js("left.alt") == shown, "side by side does not flicker"


@in_browser
def test_every_control_is_reached_by_tab_and_shows_it(browser, pages):
    browser.open(pages[0])
    reached = []
    for _ in range(25):
        browser.press("Tab")
        reached.append(browser.js("document.activeElement.id || document.activeElement.dataset.view || ''"))
    for control in ("play", "sound", "side", "flicker", "heat", "frame", "video-unmodified", "video-optimized"):
        assert control in reached, control
    browser.js("at('play').focus({focusVisible: true})")
    assert browser.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@in_browser
@pytest.mark.parametrize("number", [0, 1], ids=["report", "blind"])
def test_a_small_screen_needs_no_sideways_scrolling(browser, pages, number):
    browser.size(340, 700)
    browser.open(pages[number])
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    small = browser.js(
        "[...document.querySelectorAll('button')].filter(b => b.offsetParent && b.offsetHeight < 44).length"
    )
    assert small == 0, "a finger needs 44 pixels"
    browser.size(1280, 900)


@in_browser
def test_votes_by_keyboard_end_in_a_result_that_counts_them_right(browser, pages):
    browser.open(pages[1])
    assert browser.js("at('progress').textContent").startswith("Pair 1 of 2: A <b>fox</b>")
    browser.press("2")
    browser.press("u")
    assert browser.js("votes.length") == 0
    better = browser.js("order.map(one => one.leftIs === 'optimized' ? '1' : '2')")
    for key in better:
        browser.press(key)
    summary = browser.js("at('summary').textContent")
    assert "better 2 times, the unmodified one 0 times" in summary and "100.0 %" in summary
    assert "between 15.8 % and 100.0 %" in summary, "0.025 ** (1 / 2)"
    assert browser.js("document.activeElement.id") == "result"
    browser.js("at('again').click()")
    browser.press("0")
    browser.press("0")
    assert "no share to bound" in browser.js("at('summary').textContent")


@in_browser
def test_order_and_sides_are_drawn_anew(browser, pages):
    browser.open(pages[1])
    draws = browser.js(
        "(() => { const seen = new Set(); for (let i = 0; i < 200; i++) { begin(); seen.add(JSON.stringify(order)); }"
        " return seen.size; })()"
    )
    assert draws == 8, "two orders of two pairs, two sides each"


@in_browser
def test_the_bound_is_that_of_clopper_and_pearson(browser, pages):
    from scipy.stats import binomtest

    browser.open(pages[1])
    for wins, of in ((0, 5), (5, 5), (8, 10), (13, 40), (250, 400)):
        low, high = browser.js(f"binomialBound({wins}, {of}, 0.95)")
        expected = binomtest(wins, of).proportion_ci(0.95, "exact")
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-6)
        assert browser.js(f"signTest({wins}, {of})") == pytest.approx(binomtest(wins, of).pvalue, rel=1e-6)
