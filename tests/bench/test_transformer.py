"""What a benchmark says: tables whose columns line up, a chart, JSON; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import build

from h3opt.bench.harness import Variant
from h3opt.bench.peers import TRANSFORMER_PEERS, Peer, choose_peers
from h3opt.bench.table import Table
from h3opt.bench.transformer import TransformerBench, _first_delta, _Forward, bench_transformer
from h3opt.errors import DeviceError, MissingDependencyError, PipelineError
from h3opt.reference import full_inputs, full_transformer
from h3opt.reference.tiny import TRANSFORMER_CONFIG
from h3opt.render.charts import write_bench_chart

TINY_CONFIG = {name: value for name, value in TRANSFORMER_CONFIG.items() if name != "num_layers"}
SPENT = {"attention": 20.0, "gemm": 19.0, "h3opt": 0.0, "other": 9.5}


def variant(name: str, *rounds: float, **figures: object) -> Variant:
    found = {
        "install_seconds": 0.1,
        "first_call_seconds": 1.5,
        "peak_gib": 19.4,
        "differing": 0,
        "error": 0.0,
        "block_error": 0.0,
        "spent": SPENT,
    }
    return Variant(name, list(rounds), **{**found, **figures})  # type: ignore[arg-type]


@pytest.fixture
def bench() -> TransformerBench:
    fused = variant("+ norm_modulate", 40.0, 42.0, 41.0, spent={**SPENT, "h3opt": 1.0, "other": 1.0}, gib_moved=3.0)
    fused.kernels = {"norm_modulate_kernel": (3, 4)}
    broken = Variant("compile", failure="RuntimeError: out of memory")
    variants = [variant("eager", 50.0, 48.0, 49.0), broken, variant("h3opt, no pass", 50.0), fused]
    return TransformerBench("NVIDIA H200", 1, "544x960x124", 19484, 4.2, 750.0, 1e13, 1.4e13, variants, {})


def test_every_row_of_a_table_has_the_columns_of_its_head(bench: TransformerBench) -> None:
    for table in (bench.table().markdown(), bench.kernels_table().markdown()):
        widths = {line.count("|") for line in table.splitlines()}
        assert len(widths) == 1, table


def test_a_variant_is_compared_by_its_median_and_one_that_failed_says_why(bench: TransformerBench) -> None:
    rows = bench.table().markdown().splitlines()
    assert "| + norm_modulate | 41.0 | 41.00 | 1.195 | – | – |" in rows[-1]
    assert "RuntimeError: out of memory" in rows[3]
    assert "attention" in bench.kernels_table().markdown() and "20.00 (500)" in bench.kernels_table().markdown()
    assert "1.00 (77%)" in bench.kernels_table().markdown()  # 3 GiB in a millisecond, of 4.2 TB/s


def test_a_kernel_that_did_not_run_as_often_as_its_graph_has_it_is_named(bench: TransformerBench) -> None:
    assert str(bench).endswith("+ norm_modulate: norm_modulate_kernel ran 3 times, not 4")


def test_it_goes_into_json_and_a_chart(bench: TransformerBench, tmp_path: Path) -> None:
    assert json.loads(json.dumps(bench.to_dict()))["variants"][3]["milliseconds"] == 41.0
    write_bench_chart(tmp_path / "chart.png", bench)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(PipelineError, match=r"cannot write .*chart\.png \(No such file or directory\); name a file"):
        write_bench_chart(tmp_path / "missing" / "chart.png", bench)
    assert [file.name for file in tmp_path.iterdir()] == ["chart.png"]


def test_structured_input_of_the_first_block_is_the_same_for_every_variant() -> None:
    transformer = full_transformer(layers=1, device="cpu", **TINY_CONFIG)
    inputs = full_inputs("64x96x124", device="cpu", config=transformer.config)
    seen: list[torch.Tensor] = []
    transformer.transformer_blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    forward = _Forward(transformer, inputs)

    with torch.no_grad():
        plain, first, second = (_first_delta(forward, kind) for kind in (None, "offset_2", "offset_2"))
    assert torch.equal(first, second) and not torch.equal(plain, first)
    offsets = [(one[0].float().mean(0).abs() / one[0].float().std(0)).median() for one in seen]
    assert offsets[0] < 0.5 < offsets[1]
    sizes = [float(one.float().square().mean().sqrt()) for one in seen]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_the_error_on_structured_input_has_a_column(bench: TransformerBench) -> None:
    bench.variants[0].structured_error = 0.0123
    row = next(line for line in bench.markdown().splitlines() if line.startswith("| eager |"))
    assert row.endswith("| 0.0000 | 0.0123 |") and "0.0123" in str(bench)


def test_it_refuses_a_peer_nobody_knows_and_a_cpu() -> None:
    transformer = build().transformer
    with pytest.raises(DeviceError, match="CUDA"):
        bench_transformer(transformer, {}, ["norm_modulate"])
    with pytest.raises(PipelineError, match=r"no peer 'compil' \(did you mean 'compile'\?\)"):
        bench_transformer(transformer, {}, ["norm_modulate"], peers=["compil"])


def test_a_peer_whose_package_is_missing_says_what_to_install() -> None:
    peer = Peer("nothing", lambda model: model, package="no_such_package")
    with pytest.raises(MissingDependencyError, match=r"nothing needs no_such_package\. Run `pip install"):
        peer.set_up(None)
    assert Peer("torch", lambda model: model, package="torch").set_up(7) == 7
    assert [peer.name for peer in choose_peers(["torchao fp8 + compile", "compile"], TRANSFORMER_PEERS)] == [
        "torchao fp8 + compile",
        "compile",
    ]


def test_a_table_is_rendered_twice_from_one_structure() -> None:
    table = Table(("variant", "milliseconds of work"), [["eager", "12.5"], ["x", "a long message of a failure"]])
    assert table.markdown().splitlines() == [
        "| variant | milliseconds of work |",
        "| --- | --- |",
        "| eager | 12.5 |",
        "| x | a long message of a failure |",
    ]
    text = Table(("variant", "milliseconds of work", "n"), [["eager", "12.5", "7"], ["x", "no compiler"]])
    assert str(text).splitlines() == [
        "         milliseconds",
        "variant       of work  n",
        "eager            12.5  7",
        "x        no compiler",
    ]
    assert text.markdown().splitlines()[-1] == "| x | no compiler |  |"
