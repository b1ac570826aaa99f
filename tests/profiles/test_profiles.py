"""Profiles: all shipped files are valid; a wrong file is refused with file, line, field and what to write."""

from __future__ import annotations

import os
import pickle
import textwrap
import time
from importlib import resources
from pathlib import Path

import pydantic
import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from h3opt import optimize, profiles
from h3opt.errors import DeviceError, H3OptError, ProfileError
from h3opt.profiles.parse import parse_profile
from h3opt.profiles.schema import Profile
from h3opt.profiles.selection import detect_profile, list_profiles, load_profile, make_row_pass, match_profile
from h3opt.reference import tiny_pipeline

SHIPPED = [
    "a100", "b200", "b300", "cpu", "gb10", "h100", "h200", "r200", "rtx_4090", "rtx_5090", "rtx_pro_6000",
]  # fmt: skip

GOOD = """\
name: mine
device: {type: cuda, match: [H200], capability: "9.0"}
passes:
  - pass: my_norm
    options: {eps: 1e-6, keep: [0, 49]}
    evidence:
      device: NVIDIA H200
      versions: {torch: "2.11.0"}
      date: 2026-01-31
      command: h3opt bench
      gain: none
      promise: exact
      result: 0 elements differ
  - pass: my_norm
    when: {tokens: "<4096", world_size: 1}
    enabled: false
    reason: too short to gain
"""


def read(text: str) -> Profile:
    return parse_profile(textwrap.dedent(text), "x.yaml")


def error(text: str | bytes) -> str:
    with pytest.raises(ProfileError) as caught:
        parse_profile(text, "x.yaml")
    message = str(caught.value)
    assert "\n" not in message
    return message


def with_row(row: str) -> str:
    """A profile with a single row, which starts on line 4."""
    return "name: x\ndevice: {type: cpu}\npasses:\n" + textwrap.indent(textwrap.dedent(row), "  ")


# ---------------------------------------------------------------------------------------------------- shipped


def test_the_shipped_profiles_are_these_in_order_of_name() -> None:
    assert [p.name for p in list_profiles()] == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_bears_the_name_of_its_file(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name == Path(profile.path).stem
    assert profile.probe is True and profile.executor == "direct" and profile.on_shortfall == "error"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_says_of_each_pass_whether_it_was_measured(name: str) -> None:
    profile = load_profile(name)
    data = yaml.safe_load(Path(profile.path).read_text("utf-8"))
    assert all("evidence" in row for row in data["passes"])
    assert all(
        row.measured is (raw["evidence"] != "none") for row, raw in zip(profile.passes, data["passes"], strict=True)
    )


def test_all_shipped_profiles_speak_of_the_same_passes() -> None:
    assert len({frozenset(row.name for row in p.passes) for p in list_profiles()}) == 1


def test_what_needs_fp8_hardware_is_off_where_there_is_none() -> None:
    for profile in list_profiles():
        if profile.device.type == "cuda" and profile.device.sm < (8, 9):
            off = {row.name for row in profile.passes if not row.enabled}
            assert {"fp8_linear", "vae_fp8_linear", "quant_producer_fusion"} <= off


def test_the_example_at_the_head_of_h200_is_a_valid_profile() -> None:
    text = (resources.files("h3opt.configs") / "h200.yaml").read_text("utf-8")
    lines = [line[4:] for line in text.splitlines() if line.startswith("#   ")]
    profile = parse_profile("\n".join(lines), "example")
    assert profile.name == "my_h200" and [row.measured for row in profile.passes] == [True, False]


# ---------------------------------------------------------------------------------------------------- reading


def test_defaults_are_the_cautious_choices() -> None:
    profile = read("name: x\ndevice: {type: cpu}\npasses: []\n")
    assert (profile.executor, profile.scope, profile.on_shortfall, profile.probe) == (
        "direct", "block", "error", True,
    )  # fmt: skip


def test_on_and_off_are_read_bare_and_quoted() -> None:
    for text, value in (("on", True), ("off", False), ("'on'", True), ('"off"', False)):
        assert read(f"name: x\ndevice: {{type: cpu}}\nprobe: {text}\npasses: []\n").probe is value


def test_scalars_are_those_of_yaml_1_2() -> None:
    options = "{a: yes, b: 1e-3, c: 2026-01-31, d: 010, e: 1:30, f: -.5, g: true, h: ~, i: 7}"
    (row,) = read(with_row(f"- pass: a\n  options: {options}\n")).passes
    assert list(row.options.values()) == ["yes", 1e-3, "2026-01-31", "010", "1:30", -0.5, True, None, 7]


def test_a_row_knows_its_file_and_line() -> None:
    profile = read(GOOD)
    first, second = profile.passes
    assert (first.path, first.line, second.line) == ("x.yaml", 4, 14)
    assert profile.locate(first) == "x.yaml:5: passes[0].options"
    assert profile.locate(first, "options.keep") == "x.yaml:5: passes[0].options.keep"
    assert profile.locate(second, "pass") == "x.yaml:14: passes[1].pass"
    assert profile.locate(second, "") == "x.yaml:14: passes[1]"
    assert profile.locate(second, "options.keep") == "x.yaml:14: passes[1].options.keep"  # not there: the row


def test_a_profile_is_frozen_and_survives_pickling() -> None:
    profile = read(GOOD)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        profile.name = "other"
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        profile.passes[0].enabled = False
    copy = pickle.loads(pickle.dumps(profile))
    assert copy == profile and copy.locate(copy.passes[1], "when") == "x.yaml:15: passes[1].when"


def test_equality_is_of_content_not_of_place() -> None:
    assert read(GOOD) == parse_profile("# shifted\n" + GOOD, "y.yaml")
    assert read(GOOD) != read(GOOD.replace("0, 49", "0, 48"))


# --------------------------------------------------------------------------------------------------- refusals

BAD_FIELDS = {
    # what is wrong: (text, start of the message, what the rest must hold)
    "unknown key": ("name: x\nexecuter: direct\n", "x.yaml:2: executer: unknown key", "'executor'"),
    "unknown key in a row": (
        with_row("- pass: a\n  optoins: {}\n"),
        "x.yaml:5: passes[0].optoins: unknown key",
        "'options'",
    ),
    "unknown key in when": (
        with_row("- pass: a\n  when:\n    token: 3\n"),
        "x.yaml:6: passes[0].when.token: unknown key",
        "'tokens'",
    ),
    "merge key": (with_row("- pass: a\n  <<: {}\n"), "x.yaml:5: passes[0]['<<']: unknown key", ""),
    "duplicate key": ("name: x\nname: y\n", "x.yaml:2: name: is given twice, first on line 1", "Remove one."),
    "duplicate option": (
        with_row("- pass: a\n  options:\n    k: 1\n    k: 2\n"),
        "x.yaml:7: passes[0].options.k: is given twice, first on line 6",
        "",
    ),
    "duplicate row": (
        with_row("- pass: a\n- pass: b\n- pass: a\n"),
        "x.yaml:6: passes[2].when: pass 'a' already has a row with the same condition, passes[0]",
        "Remove one",
    ),
    "duplicate row spelled otherwise": (
        with_row("- {pass: a, when: {tokens: '>=5'}}\n- pass: a\n  when: {tokens: '>4'}\n"),
        "x.yaml:6: passes[1].when: pass 'a' already has a row with the same condition",
        "",
    ),
    "row that never wins": (
        with_row("- pass: a\n  when: {tokens: '>4096'}\n- pass: a\n"),
        "x.yaml:5: passes[0].when: the row always gives way to passes[1]",
        "Put the wider condition first",
    ),
    "list for a mapping": (
        with_row("- pass: a\n  options: [1]\n"),
        "x.yaml:5: passes[0].options: must be a mapping, found a list. Write 'options: {name: value}'.",
        "",
    ),
    "mapping for a list": (
        "name: x\ndevice: {type: cpu}\npasses: {a: 1}\n",
        "x.yaml:3: passes: must be a list, found a mapping",
        "",
    ),
    "text for a mapping": (
        "name: x\ndevice: cpu\npasses: []\n",
        "x.yaml:2: device: must be a mapping, found the text 'cpu'",
        "",
    ),
    "text for a row": (
        with_row("- norm_modulate\n"),
        "x.yaml:4: passes[0]: must be a mapping, found the text 'norm_modulate'",
        "",
    ),
    "yes for true": (
        with_row("- pass: a\n  enabled: yes\n"),
        "x.yaml:5: passes[0].enabled: must be true or false, found the text 'yes'",
        "",
    ),
    "1 for true": (
        with_row("- pass: a\n  enabled: 1\n"),
        "x.yaml:5: passes[0].enabled: must be true or false, found the number 1",
        "",
    ),
    "true for on": (
        "name: x\ndevice: {type: cpu}\nprobe: true\npasses: []\n",
        "x.yaml:3: probe: must be on or off, found true",
        "",
    ),
    "number for text": (
        "name: x\ndevice:\n  type: cuda\n  match: [A]\n  capability: 9.0\npasses: []\n",
        "x.yaml:5: device.capability: must be text, found the number 9.0",
        "Write 'capability: \"9.0\"'.",
    ),
    "capability of another form": (
        "name: x\ndevice: {type: cuda, match: [A], capability: sm90}\npasses: []\n",
        "x.yaml:2: device.capability: cannot be the text 'sm90'",
        "",
    ),
    "entry of another type": (
        "name: x\ndevice:\n  type: cuda\n  match:\n  - A\n  - 7\n  capability: '9.0'\npasses: []\n",
        "x.yaml:6: device.match[1]: must be text, found the number 7",
        "Write 'match: [H200]'.",
    ),
    "not one of the choices": (
        "name: x\ndevice: {type: cpu}\nexecutor: eager\npasses: []\n",
        "x.yaml:3: executor: must be direct or inductor, found the text 'eager'",
        "",
    ),
    "missing key": (
        with_row("- pass: a\n- enabled: true\n"),
        "x.yaml:5: passes[1].pass: is missing. Write 'pass: norm_modulate'.",
        "",
    ),
    "empty value": (
        with_row("- pass: a\n  when:\n    tokens:\n"),
        "x.yaml:6: passes[0].when.tokens: is empty. Write 'tokens: \">=4096\"'.",
        "",
    ),
    "empty text": (
        with_row("- pass: a\n  reason: ' '\n"),
        "x.yaml:5: passes[0].reason: must not be empty",
        "",
    ),
    "pass name of another form": (with_row("- pass: A b\n"), "x.yaml:4: passes[0].pass: cannot be", "'A b'"),
    "off without a reason": (
        with_row("- pass: a\n  enabled: false\n"),
        "x.yaml:4: passes[0].reason: is needed where enabled is false. Write 'reason: ",
        "",
    ),
    "cuda without match": (
        "name: x\ndevice: {type: cuda, capability: '9.0'}\npasses: []\n",
        "x.yaml:2: device.match: is needed for type cuda",
        "",
    ),
    "cpu with a capability": (
        "name: x\ndevice: {type: cpu, capability: '9.0'}\npasses: []\n",
        "x.yaml:2: device.capability: has no meaning for type cpu. Remove it.",
        "",
    ),
    "condition of another form": (
        with_row("- pass: a\n  when: {tokens: '=> 5'}\n"),
        "x.yaml:5: passes[0].when.tokens: must be a whole number or a range",
        "found the text '=> 5'",
    ),
    "condition nothing fulfils": (
        with_row("- pass: a\n  when: {world_size: 4..2}\n"),
        "x.yaml:5: passes[0].when.world_size: must be a range that some number",
        "",
    ),
    "condition that is a list": (
        with_row("- pass: a\n  when: {world_size: [1, 2]}\n"),
        "x.yaml:5: passes[0].when.world_size: must be a whole number or a range",
        "found a list",
    ),
    "evidence of another form": (
        with_row("- pass: a\n  evidence: yes\n"),
        "x.yaml:5: passes[0].evidence: must be none or a mapping, found the text 'yes'",
        "Write 'evidence: none'.",
    ),
    "evidence without torch": (
        GOOD.replace('torch: "2.11.0"', 'triton: "3"'),
        "x.yaml:8: passes[0].evidence.versions.torch: must name the version of torch",
        "",
    ),
    "version that is a number": (
        GOOD.replace('"2.11.0"', "2.11"),
        "x.yaml:8: passes[0].evidence.versions.torch: must be text, found the number 2.11",
        "",
    ),
    "date of another form": (
        GOOD.replace("2026-01-31", "31.1.2026"),
        "x.yaml:9: passes[0].evidence.date: must be a date YYYY-MM-DD, found the text '31.1.2026'",
        "",
    ),
    "date that is none": (
        GOOD.replace("2026-01-31", "2026-02-30"),
        "x.yaml:9: passes[0].evidence.date: must be a date that exists",
        "",
    ),
    "evidence with a key missing": (
        GOOD.replace("      gain: none\n", ""),
        "x.yaml:6: passes[0].evidence.gain: is missing",
        "",
    ),
    "too many rows": (
        with_row("".join(f"- pass: p{i}\n" for i in range(600))),
        "x.yaml:3: passes: has more than 512 entries",
        "",
    ),
    "key that is a number": ("1: x\n", "x.yaml:1: document: a key must be text, found the number 1", ""),
    "key that is a list": (
        with_row("- pass: a\n  options:\n    ? [b]\n    : c\n"),
        "x.yaml:6: passes[0].options: a key must be text, found a list",
        "",
    ),
    "infinite option": (
        with_row("- pass: a\n  options: {x: .inf}\n"),
        "x.yaml:5: passes[0].options.x: '.inf' is not finite",
        "",
    ),
    "huge option": (
        with_row(f"- pass: a\n  options: {{x: {'9' * 5000}}}\n"),
        "x.yaml:5: passes[0].options.x: does not fit 64 bits",
        "",
    ),
    "half a surrogate pair": (
        with_row('- pass: a\n  options: {x: "\\ud800"}\n'),
        "x.yaml:5: passes[0].options.x: holds half a surrogate pair",
        "",
    ),
    "python tag": (
        with_row("- pass: a\n  options:\n    x: !!python/object/apply:os.system ['true']\n"),
        "x.yaml:6: passes[0].options.x: tags ('tag:yaml.org,2002:python/object/apply:os.system')",
        "are not read. Remove the tag.",
    ),
    "plain tag": (with_row("- pass: !!str a\n"), "x.yaml:4: passes[0].pass: tags", "Remove the tag."),
    "alias": (
        with_row("- pass: a\n  options: {x: &b [1], y: *b}\n"),
        "x.yaml:5: passes[0].options.y: aliases (*name) are not read",
        "Write the value out.",
    ),
    "nesting": (
        with_row(f"- pass: a\n  options: {{x: {'[' * 5000}{']' * 5000}}}\n"),
        "x.yaml:5: passes[0].options: is nested deeper",
        "",
    ),
    "empty file": ("", "x.yaml:1: document: is empty", "'name', 'device' and 'passes'"),
    "comments alone": ("# nothing\n\n", "x.yaml:1: document: is empty", ""),
    "list": ("- a\n", "x.yaml:1: document: must be a mapping, found a list", ""),
    "text": ("# head\nh200\n", "x.yaml:2: document: must be a mapping, found the text 'h200'", ""),
    "two documents": (GOOD + "---\nname: y\n", "x.yaml:18: document: a second one starts here", ""),
    "syntax": ("name: x\ndevice: {type: cpu\npasses: []\n", "x.yaml:3: YAML syntax: ", "brackets"),
    "bare >=": (
        with_row("- pass: a\n  when:\n    tokens: >=4096\n"),
        "x.yaml:6: YAML syntax: while scanning a block scalar",
        "in quotes",
    ),
    "tab": ("name: x\ndevice:\n\ttype: cpu\n", "x.yaml:3: YAML syntax: ", "spaces only"),
    "escape out of range": ('name: "\\U00110000"\n', "x.yaml:1: YAML syntax: ", "out of range"),
    "control character": ("name: x\ndevice: \x07\n", "x.yaml:2: the character U+0007 is not allowed", ""),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_a_bad_profile_is_refused_at_its_line_and_field(case: str) -> None:
    text, start, rest = BAD_FIELDS[case]
    message = error(text)
    assert message.startswith(start) and rest in message


def test_of_several_problems_the_first_by_line_is_told_and_the_rest_counted() -> None:
    text = "name: 7\ndevice: {type: tpu}\nprobe: no\npasses:\n  - pass: a\n    pass: b\n"
    assert error(text) == (
        "x.yaml:1: name: must be text, found the number 7. Write 'name: h200'. (3 more problems in this file)"
    )
    assert error("name: x\nname: y\ndevice: {type: cpu}\n").endswith("(1 more problem in this file)")


def test_bytes_that_are_not_utf8_are_refused_at_their_line() -> None:
    assert error(b"name: x\ndevice: \xff\n") == "x.yaml:2: byte 0xff is not UTF-8 text. Save the file as UTF-8."
    assert "x.yaml:1: byte 0xff" in error(GOOD.encode("utf-16"))


def test_a_byte_order_mark_and_windows_line_ends_are_read() -> None:
    assert parse_profile(GOOD.replace("\n", "\r\n").encode("utf-8-sig"), "x.yaml") == read(GOOD)


def test_a_hostile_file_is_refused_quickly() -> None:
    laughs = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]\n" for i in range(1, 20))
    many = 250 * 1024
    hostile = [
        laughs,
        "[" * many,
        "{a: " * (many // 4),
        "- " * (many // 2),
        "? " * (many // 2),
        "a: b: " * 999,
    ]
    hostile.append(with_row("".join(f"- {{pass: p{i}}}\n" for i in range(4000))))
    started = time.monotonic()
    for text in hostile:
        error(text)
    error(b" " * (1 << 20))
    assert time.monotonic() - started < 10


# ---------------------------------------------------------------------------------------------------- finding


def test_a_file_is_loaded_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    assert load_profile(file) == load_profile(str(file)) == read(GOOD)
    monkeypatch.chdir(tmp_path)
    assert load_profile("mine.yaml").passes[0].path == "mine.yaml"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{pass: tile_batch, options: {max_tiles: -1}}", "refuses its options"),
        ("{pass: tile_batch, enabled: false, reason: slow, options: {max_tile: 2}}", "did you mean 'max_tiles'"),
        ("{pass: tile_batch, when: {tokens: '>=9000'}, options: {max_tiles: many}}", "refuses its options"),
    ],
    ids=["on", "off", "not always"],
)
def test_options_that_a_pass_refuses_are_refused_where_the_profile_is_loaded(
    row: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\ndevice: {{type: cpu}}\npasses:\n  - pass: norm_modulate\n  - {row}\n")
    with pytest.raises(ProfileError, match=rf"mine\.yaml:5: passes\[1\]\.options: Pass 'tile_batch' .*{says}"):
        load_profile(file)


def test_a_row_of_a_pass_that_is_not_installed_here_can_be_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ndevice: {type: cpu}\npasses:\n  - pass: of_my_cluster\n    options: {nodes: 8}\n")
    assert load_profile(file).passes[0].options == {"nodes": 8}


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [("max_tiles: 0", "options", "Pass 'tile_batch' refuses"), ("tiles: 2", "options", "has no option 'tiles'")],
)
def test_a_row_is_refused_alike_where_it_is_loaded_and_where_it_is_used(
    options: str, field: str, says: str, tmp_path: Path
) -> None:
    """``parse_profile`` does not check options: ``optimize`` refuses them in the words of ``load_profile``."""
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\ndevice: {{type: cpu}}\npasses:\n  - pass: tile_batch\n    options: {{{options}}}\n")
    unchecked = parse_profile(file.read_bytes(), str(file))
    vae = tiny_pipeline(dtype=torch.float32).vae
    for refuse in (lambda: load_profile(file), lambda: optimize(vae, profile=unchecked)):
        with pytest.raises(ProfileError, match=rf"mine\.yaml:5: passes\[0\]\.{field}: .*{says}"):
            refuse()


def test_a_row_of_an_unknown_pass_is_refused_where_it_is_used(tmp_path: Path) -> None:
    profile = parse_profile("name: mine\ndevice: {type: cpu}\npasses:\n  - pass: of_my_cluster\n", "mine.yaml")
    with pytest.raises(ProfileError, match=r"mine\.yaml:4: passes\[0\]\.pass: There is no pass called"):
        make_row_pass(profile, profile.passes[0])


def load_error(name: str | os.PathLike[str]) -> str:
    with pytest.raises(ProfileError) as caught:
        load_profile(name)
    return str(caught.value)


def test_an_unknown_name_brings_the_nearest_and_the_list() -> None:
    message = load_error("h20")
    assert message.startswith("There is no profile 'h20' (did you mean 'h200'?).")
    assert ", ".join(SHIPPED) in message and "its path" in message


def test_a_missing_file_is_called_missing(tmp_path: Path) -> None:
    message = load_error(tmp_path / "h201.yaml")
    assert message.startswith(f"{tmp_path / 'h201.yaml'}: there is no such file.")
    assert "'h200'" in message and ", ".join(SHIPPED) in message
    assert "there is no such file" in load_error("configs/nothing")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert load_error(tmp_path) == f"{tmp_path}: is a directory. Name the .yaml file in it."
    assert "not a regular file" in load_error("/dev/null")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "not a regular file" in load_error(tmp_path / "pipe.yaml")
    (tmp_path / "big.yaml").write_bytes(b"#" * (1 << 20))
    assert "larger than 256 KiB" in load_error(tmp_path / "big.yaml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(GOOD)
    file.chmod(0)
    assert "cannot be read" in load_error(file)


# ------------------------------------------------------------------------------------------------- conditions

SPANS = [
    # written, numbers in it, numbers not in it, canonical spelling
    ("4096", [4096], [4095, 4097], 4096),
    ("'4096'", [4096], [4095, 4097], 4096),
    ("'>=4096'", [4096, 10**9], [4095], ">=4096"),
    ("'> 4096'", [4097], [4096], ">=4097"),
    ("<=4096", [1, 4096], [4097], "1..4096"),
    ("<4096", [1, 4095], [4096], "1..4095"),
    ("4096..40000", [4096, 40000], [4095, 40001], "4096..40000"),
    ("'>=0'", [1, 2], [], ">=1"),
]


@pytest.mark.parametrize("written, inside, outside, canonical", SPANS)
def test_a_range_holds_where_it_says(written: str, inside: list[int], outside: list[int], canonical: int | str) -> None:
    when = read(with_row(f"- pass: a\n  when: {{tokens: {written}}}\n")).passes[0].when
    assert all(when.holds(n, 1) for n in inside) and not any(when.holds(n, 1) for n in outside)
    assert when.to_dict() == {"tokens": canonical}


@pytest.mark.parametrize(
    "written",
    ["0", "-1", "'<1'", "'>='", "4 096", "1.5", "1e3", "true", "'1..'", "'>=1..2'", "9999999999", "٣"],
)
def test_a_range_of_another_form_is_refused(written: str) -> None:
    assert "passes[0].when.tokens: must be" in error(with_row(f"- pass: a\n  when: {{tokens: {written}}}\n"))


ROWS = """
- pass: a
  options: {k: base}
- pass: b
  when: {tokens: ">=100"}
- pass: a
  when: {tokens: ">=100"}
  options: {k: long}
- pass: a
  when: {tokens: "50..200", world_size: 8}
  options: {k: eight}
"""


@pytest.mark.parametrize(
    "tokens, world_size, picked",
    [
        (10, 1, ["a base"]),
        (None, 1, ["a base"]),
        (None, 8, ["a base"]),
        (100, 1, ["a long", "b -"]),
        (100, 8, ["a eight", "b -"]),
        (50, 8, ["a eight"]),
        (201, 8, ["a long", "b -"]),
    ],
)
def test_the_last_row_that_holds_is_picked_for_each_pass(
    tokens: int | None, world_size: int, picked: list[str]
) -> None:
    rows = read(with_row(ROWS)).rows_for(tokens, world_size)
    assert [f"{row.name} {row.options.get('k', '-')}" for row in rows] == picked


def test_a_row_that_is_off_is_picked_too_with_its_reason() -> None:
    (row,) = read(GOOD).rows_for(100, 1)
    assert not row.enabled and row.reason == "too short to gain"
    (row,) = read(GOOD).rows_for(100, 2)
    assert row.enabled


# -------------------------------------------------------------------------------------------------- detection

GPUS = [
    # name, capability, profile, exact
    ("NVIDIA H200", (9, 0), "h200", True),
    ("NVIDIA H200 NVL", (9, 0), "h200", True),
    ("NVIDIA H100 80GB HBM3", (9, 0), "h100", True),
    ("NVIDIA H100 PCIe", (9, 0), "h100", True),
    ("NVIDIA GH200 480GB", (9, 0), "h100", False),
    ("NVIDIA H20", (9, 0), "h100", False),
    ("NVIDIA A100-SXM4-80GB", (8, 0), "a100", True),
    ("NVIDIA A800-SXM4-80GB", (8, 0), "a100", False),
    ("NVIDIA A10", (8, 6), "a100", False),
    ("NVIDIA B200", (10, 0), "b200", True),
    ("NVIDIA GB200", (10, 0), "b200", True),
    ("NVIDIA B300 SXM6 AC", (10, 3), "b300", True),
    ("NVIDIA R200", (10, 7), "r200", True),
    ("NVIDIA Thor", (11, 0), "r200", False),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), "rtx_pro_6000", True),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", (12, 0), "rtx_pro_6000", True),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), "rtx_4090", False),
    ("NVIDIA GeForce RTX 5090", (12, 0), "rtx_5090", True),
    ("NVIDIA GeForce RTX 5080", (12, 0), "rtx_5090", False),
    ("NVIDIA GeForce RTX 4090", (8, 9), "rtx_4090", True),
    ("NVIDIA L40S", (8, 9), "rtx_4090", False),
    ("NVIDIA GB10", (12, 1), "gb10", True),
    ("nvidia gb10", (12, 1), "gb10", True),
    ("NVIDIA X1000", (99, 0), "gb10", False),
    ("Tesla T4", (7, 5), "a100", False),
]


@pytest.mark.parametrize("name, capability, expected, exact", GPUS)
def test_a_gpu_gets_the_profile_that_fits(name: str, capability: tuple[int, int], expected: str, exact: bool) -> None:
    # Without evidence, which will come with measurements and decides between profiles of one capability.
    bare = [
        p.model_copy(update={"passes": tuple(r.model_copy(update={"evidence": None}) for r in p.passes)})
        for p in list_profiles()
    ]
    profile, notice = match_profile(bare, name, capability)
    assert (profile.name, notice is None) == (expected, exact)
    if notice is not None:
        assert name in notice and f"'{expected}'" in notice


def gpu(name: str, capability: str, row: str = "[]") -> Profile:
    return read(f"name: {name}\ndevice: {{type: cuda, match: [{name}], capability: '{capability}'}}\npasses: {row}\n")


def test_of_profiles_of_one_capability_the_measured_one_is_picked() -> None:
    evidence = "{device: d, versions: {torch: v}, date: 2026-01-31, command: c, gain: g, promise: p, result: r}"
    measured = gpu("zz", "9.0", f"[{{pass: a, evidence: {evidence}}}]")
    assert match_profile([gpu("aa", "9.0"), measured], "NVIDIA Q", (9, 0))[0] is measured


def test_the_longest_name_wins_and_a_capability_that_disagrees_is_told() -> None:
    profile = read("name: ti\ndevice: {type: cuda, match: [aa Ti], capability: '9.0'}\npasses: []\n")
    assert match_profile([gpu("aa", "9.0"), profile], "NVIDIA AA Ti", (9, 0)) == (profile, None)
    profile_for_gpu, notice = match_profile([profile], "NVIDIA AA Ti", (8, 0))
    assert profile_for_gpu is profile and notice is not None and "capability 8.0" in notice and "9.0" in notice


def test_without_a_cuda_profile_matching_says_so() -> None:
    with pytest.raises(ProfileError, match="None of the profiles is for CUDA"):
        match_profile([load_profile("cpu")], "NVIDIA H200", (9, 0))


def test_the_cpu_gets_the_cpu_profile() -> None:
    assert detect_profile("cpu") == detect_profile(torch.device("cpu")) == (load_profile("cpu"), None)


def test_detection_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: f"NVIDIA {'B200' if d.index == 1 else 'H200'}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (10, 0) if d.index == 1 else (9, 0))
    assert detect_profile()[0].name == "h200"
    assert detect_profile("cuda:1")[0].name == "b200"
    with pytest.raises(DeviceError, match="2 CUDA devices, so there is no 'cuda:2'"):
        detect_profile("cuda:2")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(DeviceError, match="AMD"):
        detect_profile("cuda")


def test_a_device_that_is_absent_or_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    assert detect_profile()[0].name == "cpu"
    for device, message in (("cuda", "0 CUDA devices"), ("meta", "'meta'"), ("gpu", "'gpu' is not a device")):
        with pytest.raises(DeviceError, match=message):
            detect_profile(device)


# ------------------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_survives_the_round_trip(name: str) -> None:
    profile = load_profile(name)
    assert parse_profile(yaml.safe_dump(profile.to_dict()), "x.yaml") == profile


# PyYAML writes text like 1e5 bare, as YAML 1.1 takes it for text; YAML 1.2 and h3opt do not.
words = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Z")), min_size=1, max_size=12).filter(
    lambda text: text.strip() and text.strip("0123456789eE+-.") != ""
)
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        words,
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, object]:
    span = st.integers(1, 9) | st.sampled_from([">=4", "<=7", "2..5", ">3", "<6"])
    row = st.fixed_dictionaries(
        {"pass": st.from_regex(r"[a-z]{4,8}", fullmatch=True), "reason": words},
        optional={
            "enabled": st.booleans(),
            "options": st.dictionaries(words, values, max_size=3),
            "when": st.fixed_dictionaries({}, optional={"tokens": span, "world_size": span}),
            "evidence": st.just("none")
            | st.fixed_dictionaries(
                dict.fromkeys(("device", "command", "gain", "promise", "result"), words)
                | {"versions": st.fixed_dictionaries({"torch": words}), "date": st.dates().map(str)}
            ),
        },
    )
    return {
        "name": draw(st.from_regex(r"[a-z][a-z_]{0,9}", fullmatch=True).filter(lambda s: s not in ("true", "null"))),
        "device": draw(st.sampled_from([{"type": "cpu"}, {"type": "cuda", "match": ["A"], "capability": "9.0"}])),
        "executor": draw(st.sampled_from(["direct", "inductor"])),
        "probe": draw(st.sampled_from(["on", "off"])),
        "passes": draw(st.lists(row, max_size=4, unique_by=lambda r: r["pass"])),
    }


@settings(max_examples=60, deadline=None)
@given(documents())
def test_any_profile_survives_the_round_trip(document: dict[str, object]) -> None:
    profile = parse_profile(yaml.safe_dump(document, allow_unicode=True), "x.yaml")
    data = profile.to_dict()
    again = parse_profile(yaml.safe_dump(data), "y.yaml")
    assert again == profile and again.to_dict() == data


def refuses_or_reads(source: bytes | str) -> None:
    try:
        parse_profile(source, "x.yaml")
    except ProfileError as refusal:
        assert str(refusal).startswith("x.yaml")
        str(refusal).encode("utf-8")  # nothing that a terminal cannot show


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
@example(b"\xef\xbb\xbf")
def test_arbitrary_bytes_raise_nothing_else(source: bytes) -> None:
    refuses_or_reads(source)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60) | st.text("[]{}:,-?&*!|>'\"%@`#~ \t\n\\aU01.", max_size=60))
@example('"\\U00110000"')
@example("%YAML 1." + "1" * 5000 + "\n---\na: 1")
@example("!<%ff> a")
@example("a: &a\n  *a : *a")
@example("\ud800")
def test_arbitrary_text_raises_nothing_else(source: str) -> None:
    refuses_or_reads(source)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_profile_raises_nothing_else(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(GOOD)))
    end = data.draw(st.integers(start, min(start + 30, len(GOOD))))
    refuses_or_reads(
        GOOD[:start] + data.draw(st.text(max_size=10) | st.sampled_from(["~", "[]", "{}", "1", ": "])) + GOOD[end:]
    )


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([*Profile.model_fields, "x"]), values) | values)
def test_arbitrary_data_raises_nothing_else(data: object) -> None:
    refuses_or_reads(yaml.safe_dump(data))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
@example("\0")
@example("a/\0.yaml")
@example("\ud800.yaml")
@example("/" + "a" * 5000)
@example("")
@example("..")
def test_an_arbitrary_name_raises_nothing_else(name: str) -> None:
    if name not in SHIPPED:
        with pytest.raises(ProfileError) as caught:
            load_profile(name)
        str(caught.value).encode("utf-8")


def test_errors_are_of_the_project() -> None:
    assert issubclass(ProfileError, H3OptError)
    assert set(profiles.__all__) <= set(dir(profiles))
