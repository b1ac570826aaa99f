"""What people read: tables of passes, profiles, reports and verdicts."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from h3opt.compiler.report import Report
from h3opt.environment import versions
from h3opt.pass_api.promises import Exact
from h3opt.pass_api.registry import list_passes
from h3opt.profiles.schema import Profile
from h3opt.profiles.selection import list_profiles
from h3opt.verification.difference import CONFIDENCE
from h3opt.verification.faults import FAULTS, Finding
from h3opt.verification.noise_floors import multiple_digits, multiple_words
from h3opt.verification.verdict import Verdict

MARKERS = ("<!-- passes:start -->", "<!-- passes:end -->")
"""Between these lines README.md holds :func:`passes_markdown`."""


def passes_markdown() -> str:
    """The pass table of the README, from the registry."""
    lines = ["| pass | kind | promise | what it does |", "|---|---|---|---|"]
    lines += [f"| `{cls.name}` | {cls.kind} | {cls.promise} | {cls.summary()} |" for cls in list_passes()]
    return "\n".join(lines)


def passes_table() -> Table:
    """All registered passes."""
    table = _table("pass", "kind, promise, what it does")
    for cls in list_passes():
        after = f"; runs after {', '.join(cls.after)}" if cls.after else ""
        table.add_row(cls.name, f"{cls.kind}, {cls.promise}{after}\n{cls.summary()}")
    return table


def passes_data() -> list[dict[str, Any]]:
    """The same as JSON-ready types."""
    return [
        {
            "name": cls.name,
            "kind": cls.kind,
            "promise": str(cls.promise),
            "after": list(cls.after),
            "does": cls.summary(),
        }
        for cls in list_passes()
    ]


def profiles_table() -> Table:
    """All shipped profiles."""
    table = _table("profile", "device", "executor", "passes on", "measured")
    for profile in list_profiles():
        device = profile.device
        name = "CPU" if device.type == "cpu" else f"{', '.join(device.match)} (SM {device.capability})"
        on = sum(row.enabled for row in profile.passes)
        measured = sum(row.measured for row in profile.passes)
        table.add_row(
            profile.name,
            name,
            profile.executor,
            f"{on} of {len(profile.passes)}",
            f"{measured} of {len(profile.passes)}" if measured else "evidence: none",
        )
    return table


def profile_table(profile: Profile) -> Table:
    """The rows of one profile."""
    table = _table("pass", "on", "options", "when", "evidence or reason")
    for row in profile.passes:
        evidence = "none"
        if row.evidence is not None:
            found = row.evidence
            evidence = f"{found.gain}; {found.result} ({found.device}, {found.date})"
        condition = row.when.to_dict() if row.when is not None else {}
        table.add_row(
            row.name,
            "on" if row.enabled else "off",
            ", ".join(f"{name}={value}" for name, value in row.options.items()) or "–",
            ", ".join(f"{name} {value}" for name, value in condition.items()) or "always",
            evidence if row.enabled else f"{row.reason}; evidence: {evidence}",
        )
    return table


def report_table(report: Report) -> Table:
    """What each pass did, without a comparison."""
    table = _table("pass", "kind", "sites", "promise", "state")
    for entry in report:
        state = (
            Text(f"declined: {entry.declined}", style="yellow") if entry.declined else f"{entry.state}; {entry.proof}"
        )
        table.add_row(entry.name, entry.kind, entry.counts, str(entry.promise), state)
    return table


def verdict_table(verdict: Verdict) -> Table:
    """What each pass did to picture and sound, in LPIPS, decibels and noise floors.

    Reasons to decline are in :func:`verdict_lines`.
    """
    table = _table("pass", "kind", "sites", "promise", "measured", "floor", "ok?", "s")
    table.padding = (0, 1, 0, 0)
    styles = {True: ("held", "green"), False: ("BROKEN", "bold red"), None: ("declined", "yellow")}
    for one in verdict.passes:
        word, style = styles[one.held]
        table.add_row(
            one.name,
            one.kind,
            one.counts,
            _short(str(one.promise)),
            "–" if one.declined else _short(str(one.difference)).removeprefix("LPIPS "),
            "–" if one.declined or one.difference.equal or one.of_floor is None else multiple_digits(one.of_floor),
            Text(word, style=style),
            f"{one.seconds:.1f}" if one.seconds < 10 else f"{one.seconds:.0f}",
        )
    for column in table.columns[3:5]:  # in a narrow window these take two lines, but do not break inside a word
        column.no_wrap, column.min_width = False, 11 if column.header == "promise" else 10
    table.columns[-1].justify, table.columns[-1].no_wrap, table.columns[-1].min_width = "right", True, 3
    return table


def verdict_lines(verdict: Verdict) -> list[str]:
    """What stands below the table: who declined, and the comparisons with the unmodified pipeline."""
    lines = [f"{one.name} declined: {one.declined}" for one in verdict.passes if one.declined]
    rows = [("captured, no pass on", str(verdict.capture))]
    if verdict.exact_set is not None:
        of_all = sum(isinstance(one.promise, Exact) for one in verdict.passes)
        apart = of_all - len(verdict.exact_names)
        others = f"; {apart} more on top of passes that are not Exact" if apart else ""
        named = f"Exact passes on ({len(verdict.exact_names)})"
        rows.append((named, f"{verdict.exact_set} (video and audio{others})"))
    hint = f" ({verdict.floor_hint})" if verdict.floor_hint else ""
    rows.append(("all passes on", ", ".join([str(verdict.all_passes), *verdict.floor_words]) + hint))
    rows += [(floor.label, floor.summary) for floor in verdict.floors]
    lines.append("measured: LPIPS and sound against the generation without the pass; floor: in noise floors")
    lines += ["", "against the unmodified pipeline:", *(f"  {name:22}{found}" for name, found in rows)]
    lines.append(
        f"one generation: {verdict.reference_seconds:.1f} s unmodified, {verdict.optimized_seconds:.1f} s optimized "
        f"(warm), on {verdict.report.device}"
    )
    lines.append(", ".join(f"{package} {version}" for package, version in versions().items()))
    lines += verdict.report.notices
    lines += _in_floors(verdict)
    lines += _over_clips(verdict)
    lines += [f"leaving out {one.name}: {one.left_out_failed or one.left_out}" for one in verdict.passes if one.tried]
    lines += [f"{one.name} alone: {one.alone_failed or one.alone}" for one in verdict.passes if one.tried_alone]
    lines += [f"the unmodified pipeline itself has {one}" for one in _by_clip(verdict, verdict.reference_faults)]
    lines += [f"FAULT: {one}" for one in _by_clip(verdict, verdict.faults)]
    lines += [f"{one.name} first moved {one.culprit}" for one in verdict.passes if one.culprit is not None]
    if not verdict.held:
        blamed = "no pass, but there are faults" if verdict.faults else "the capture itself, with no pass on"
        lines.append(f"promise broken by: {', '.join(verdict.broken) or blamed}")
    lines.append(f"output moved by: {', '.join(verdict.moved) or 'no pass'}")
    return lines


def _in_floors(verdict: Verdict) -> list[str]:
    """Each pass that moved anything, in all floors that were measured if the table's column is not all of them."""
    if len(verdict.of_floors) == ("ulp" in verdict.of_floors):
        return []
    return [
        f"{one.name} moved " + ", ".join(multiple_words(name, found) for name, found in one.of_floors.items())
        for one in verdict.passes
        if one.floor_words
    ]


def _over_clips(verdict: Verdict) -> list[str]:
    """Worst, mean and bound over several clips, everything on."""
    found = []
    for name, words, digits in (("lpips", "LPIPS", 4), ("audio_snr_db", "audio dB", 1)):
        if name in verdict.spread:
            one = verdict.spread[name]
            bound = "" if one.bound is None else f", no worse than {one.bound:.{digits}f} with confidence {CONFIDENCE}"
            found.append(
                f"{words} over {one.clips} clips: worst {one.worst:.{digits}f}, mean {one.mean:.{digits}f}{bound}"
            )
    return found


def _by_clip(verdict: Verdict, faults: list[tuple[int, Finding]]) -> list[str]:
    """Findings, one line for each clip and name."""
    lines = []
    for (clip, name), group in groupby(faults, lambda fault: (fault[0], fault[1].name)):
        first, *more = (finding for _, finding in group)
        where = f' in "{verdict.settings[clip].prompt}", seed {verdict.settings[clip].seed}'
        lines.append(f"{name}: {FAULTS[name]}{where}: {first.where}{f' and {len(more)} more' if more else ''}")
    return lines


def _short(text: str) -> str:
    """A promise or a difference for a narrow column: the decibels are those of the sound."""
    return text.replace(", audio ", ", ")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(
            column, overflow="fold", no_wrap=column in ("pass", "kind", "promise", "sites", "profile", "on")
        )
    return table
