"""Tables and sentences about passes, profiles, reports and verdicts."""

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
"""README.md contains the output of :func:`passes_markdown` between these lines."""


def passes_markdown() -> str:
    """Render the registered passes as the Markdown table of the README."""
    lines = ["| pass | kind | promise | what it does |", "|---|---|---|---|"]
    lines += [f"| `{cls.name}` | {cls.kind} | {cls.promise} | {cls.summary()} |" for cls in list_passes()]
    return "\n".join(lines)


def passes_table() -> Table:
    """Render the registered passes for the console."""
    table = _table("pass", "kind, promise, what it does")
    for cls in list_passes():
        after = f"; runs after {', '.join(cls.after)}" if cls.after else ""
        table.add_row(cls.name, f"{cls.kind}, {cls.promise}{after}\n{cls.summary()}")
    return table


def passes_data() -> list[dict[str, Any]]:
    """The registered passes as JSON-ready types."""
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
    """Render the shipped profiles."""
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
    """Render the rows of a profile."""
    table = _table("pass", "on", "options", "when", "evidence or reason")
    for row in profile.passes:
        evidence = "none"
        if row.evidence is not None:
            measured = row.evidence
            evidence = f"{measured.gain}; {measured.result} ({measured.device}, {measured.date})"
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
    """Render what each pass did, without a comparison of clips."""
    table = _table("pass", "kind", "sites", "promise", "state")
    for entry in report:
        without = entry.declined or entry.idle
        state = Text(f"{entry.state}: {without}", style="yellow") if without else f"{entry.state}; {entry.proof}"
        table.add_row(entry.name, entry.kind, entry.counts, str(entry.promise), state)
    return table


def verdict_table(verdict: Verdict) -> Table:
    """Render the change of picture and sound by each pass, in LPIPS, decibels and multiples of the noise floor.

    :func:`verdict_lines` has the reasons of passes that declined.
    """
    table = _table("pass", "kind", "sites", "promise", "measured", "floor", "ok?", "s")
    table.padding = (0, 1, 0, 0)
    styles = {True: ("held", "green"), False: ("BROKEN", "bold red"), None: ("declined", "yellow")}
    for entry in verdict.passes:
        word, style = ("IDLE", "bold red") if entry.idle else styles[entry.held]
        floor = entry.of_floor
        unmeasured = entry.declined or entry.idle or entry.difference.equal
        table.add_row(
            entry.name,
            entry.kind,
            entry.counts,
            _shorten(str(entry.promise)),
            "–" if entry.declined or entry.idle else _shorten(str(entry.difference)).removeprefix("LPIPS "),
            "–" if unmeasured or floor is None else multiple_digits(floor),
            Text(word, style=style),
            f"{entry.seconds:.1f}" if entry.seconds < 10 else f"{entry.seconds:.0f}",
        )
    for column in table.columns[3:5]:  # in a narrow window these may take two lines, but must not break inside a word
        column.no_wrap, column.min_width = False, 11 if column.header == "promise" else 10
    table.columns[-1].justify, table.columns[-1].no_wrap, table.columns[-1].min_width = "right", True, 3
    return table


def verdict_lines(verdict: Verdict) -> list[str]:
    """The sentences below the table: passes that declined, and the comparisons with the unmodified pipeline."""
    lines = [f"{entry.name} declined: {entry.declined}" for entry in verdict.passes if entry.declined]
    lines += [f"{entry.name} was idle, so nothing was verified: {entry.idle}" for entry in verdict.passes if entry.idle]
    rows = [("captured, no pass on", str(verdict.capture))]
    if verdict.exact_set is not None:
        exact = sum(isinstance(entry.promise, Exact) for entry in verdict.passes)
        later = exact - len(verdict.exact_names)
        others = f"; {later} more on top of passes that are not Exact" if later else ""
        label = f"Exact passes on ({len(verdict.exact_names)})"
        rows.append((label, f"{verdict.exact_set} (video and audio{others})"))
    hint = f" ({verdict.floor_hint})" if verdict.floor_hint else ""
    rows.append(("all passes on", ", ".join([str(verdict.all_passes), *verdict.floor_words]) + hint))
    rows += [(floor.label, floor.summary) for floor in verdict.floors]
    lines.append("measured: LPIPS and sound against the generation without the pass; floor: in noise floors")
    lines += ["", "against the unmodified pipeline:", *(f"  {label:22}{text}" for label, text in rows)]
    lines.append(
        f"one generation: {verdict.reference_seconds:.1f} s unmodified, {verdict.optimized_seconds:.1f} s optimized "
        f"(warm), on {verdict.report.device}"
    )
    lines.append(", ".join(f"{package} {version}" for package, version in versions().items()))
    lines += verdict.report.notices
    lines += _floor_lines(verdict)
    lines += _spread_lines(verdict)
    lines += [
        f"leaving out {entry.name}: {entry.left_out_failed or entry.left_out}"
        for entry in verdict.passes
        if entry.tried
    ]
    lines += [
        f"{entry.name} alone: {entry.alone_failed or entry.alone}" for entry in verdict.passes if entry.tried_alone
    ]
    lines += [f"the unmodified pipeline itself has {line}" for line in _fault_lines(verdict, verdict.reference_faults)]
    lines += [f"FAULT: {line}" for line in _fault_lines(verdict, verdict.faults)]
    lines += [f"{entry.name} first moved {entry.culprit}" for entry in verdict.passes if entry.culprit is not None]
    if not verdict.held:
        blamed = "no pass, but there are faults" if verdict.faults else "the capture itself, with no pass on"
        if not verdict.together_held:
            blamed = f"all passes together, which may move {verdict.together}"
        lines.append(f"promise broken by: {', '.join(verdict.broken) or blamed}")
    lines.append(f"output moved by: {', '.join(verdict.moved) or 'no pass'}")
    return lines


def _floor_lines(verdict: Verdict) -> list[str]:
    """The change of each pass in multiples of all floors, if more than the noise floor was measured."""
    if len(verdict.of_floors) == ("ulp" in verdict.of_floors):
        return []
    return [
        f"{entry.name} moved " + ", ".join(multiple_words(name, multiple) for name, multiple in entry.of_floors.items())
        for entry in verdict.passes
        if entry.floor_words
    ]


def _spread_lines(verdict: Verdict) -> list[str]:
    """Worst value, mean and bound over several clips, with all passes."""
    lines = []
    for name, words, digits in (("lpips", "LPIPS", 4), ("audio_snr_db", "audio dB", 1)):
        if name in verdict.spread:
            spread = verdict.spread[name]
            line = f"{words} over {spread.clips} clips: worst {spread.worst:.{digits}f}, mean {spread.mean:.{digits}f}"
            if spread.bound is not None:
                line += f", no worse than {spread.bound:.{digits}f} with confidence {CONFIDENCE}"
            lines.append(line)
    return lines


def _fault_lines(verdict: Verdict, faults: list[tuple[int, Finding]]) -> list[str]:
    """A line for each clip and name of a fault."""
    lines = []
    for (clip, name), group in groupby(faults, lambda fault: (fault[0], fault[1].name)):
        first, *more = (finding for _, finding in group)
        where = f' in "{verdict.settings[clip].prompt}", seed {verdict.settings[clip].seed}'
        lines.append(f"{name}: {FAULTS[name]}{where}: {first.where}{f' and {len(more)} more' if more else ''}")
    return lines


def _shorten(text: str) -> str:
    """Shorten a promise or a difference for a narrow column, where decibels always mean the sound."""
    return text.replace(", audio ", ", ")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(
            column, overflow="fold", no_wrap=column in ("pass", "kind", "promise", "sites", "profile", "on")
        )
    return table
