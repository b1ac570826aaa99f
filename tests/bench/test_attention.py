"""What the attention suite says: errors over the limit per kind of data and length, for every library of the device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from h3opt.bench import attention as suite
from h3opt.bench.attention import AttentionBench, AttentionError, AttentionSpeed, bench_attention
from h3opt.cli.app import main
from h3opt.kernels.data_kinds import ATTENTION_KINDS


@pytest.fixture(scope="module")
def result() -> AttentionBench:
    return bench_attention("cpu", (64, 96), chunk=32)


def test_every_kind_and_length_is_measured_for_every_variant(result: AttentionBench) -> None:
    variants = {one.variant for one in result.errors}
    assert "definition, one call" in variants and "flash bf16" in variants
    found = {(one.tokens, one.kind, one.variant) for one in result.errors}
    assert found == {(tokens, kind, variant) for tokens in (64, 96) for kind in ATTENTION_KINDS for variant in variants}
    assert all(one.failure is None for one in result.errors) and result.speeds == []


def test_the_definition_is_near_the_limit_of_its_operands(result: AttentionBench) -> None:
    by_name = {(one.variant, one.kind, one.tokens): one for one in result.errors}
    for one in result.errors:
        assert one.ratio is not None and one.limit is not None and one.limit > 0
        if one.variant.startswith("definition"):  # above it are the rounded probabilities, on few keys
            assert 0.95 < one.ratio < 1.6, one
        if one.variant == "flash bf16":
            assert one.error < by_name["definition, chunked", one.kind, one.tokens].error * 1.05, one


def test_a_library_that_fails_leaves_the_others_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(q, k, v):
        raise RuntimeError("no such shape\nand more")

    variants = suite._variants
    monkeypatch.setattr(suite, "_variants", lambda *args: {"broken FP8": fails, **variants(*args)})
    found = bench_attention("cpu", (32,), kinds=("zero_mean",))
    assert [one.failure for one in found.errors][:2] == ["RuntimeError: no such shape", None]
    assert "broken FP8: RuntimeError: no such shape" in str(found)


def test_tables_line_up_and_name_rates() -> None:
    errors = [AttentionError(name, "drift", 19456, 0.05, 0.1) for name in ("fa3 FP8, one call", "fa3 FP8, chunked")]
    speeds = [AttentionSpeed("fa3 FP8, chunked", 19456, 11.6, 900.0)]
    bench = AttentionBench("NVIDIA H200", 128, 4, 56, errors, speeds)
    table = bench.markdown().splitlines()[2:]
    assert len({line.count("|") for line in table}) == 1
    assert "| drift | 0.1000 (2.00) | 0.1000 (2.00) |" in table and "| TFLOP/s | – | 900 |" in table
    assert len({len(line) for line in str(bench).splitlines()[3:]}) == 1


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The exit code of the installed command."""
    monkeypatch.setattr(sys, "argv", ["h3opt", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code


def test_the_command_writes_a_table_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    markdown, figures = tmp_path / "attention.md", tmp_path / "attention.json"
    command = ["bench", "--suite", "attention", "--device", "cpu", "--tokens", "512"]
    assert run(monkeypatch, *command, "--markdown", str(markdown), "--json", str(figures)) == 0
    assert "512 tokens" in markdown.read_text("utf-8") and "| clusters |" in markdown.read_text("utf-8")
    assert {one["tokens"] for one in json.loads(figures.read_text("utf-8"))["errors"]} == {512}


@pytest.mark.parametrize("tokens", ["many", "0", "", "64,-1"])
def test_lengths_that_are_none_are_refused(
    tokens: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "bench", "--suite", "attention", "--device", "cpu", "--tokens", tokens) == 2
    assert "is not a list of lengths" in capsys.readouterr().err
