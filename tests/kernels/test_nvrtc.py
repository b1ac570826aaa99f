"""The CUDA source compiles without a GPU, with the registers and the memory that the speed depends on."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from h3opt.device import Device
from h3opt.errors import DeviceError, MissingDependencyError
from h3opt.kernels.cuda_kernels import nvrtc
from h3opt.kernels.ops import hopper_attention

H200 = Device("cuda", "NVIDIA H200", (9, 0))


@pytest.fixture
def compiler():
    """`cuda.bindings.nvrtc`, or a skip where it or the library is not installed."""
    library = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        library.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    return library


def kernel_of(text: str, folder: Path) -> nvrtc.Kernel:
    """A kernel of a source of one's own."""
    kernel = nvrtc.Kernel("source.cu", "f", "sm_90a", threads=32, shared_bytes=0)
    kernel.source = folder / "source.cu"
    kernel.source.write_text(text)
    return kernel


def test_the_attention_kernel_compiles_to_128_registers_and_no_local_memory(compiler):
    code, log = hopper_attention.KERNEL.compiled
    assert code.startswith(b"\x7fELF") and b"fp8_attention" in code
    assert re.search(r"\b0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", log), log
    assert re.search(r"Used 128 registers", log), log  # of 65,536 with 512 threads; setmaxnreg then moves them
    assert "warning" not in log and "setmaxnreg" not in log, log
    assert hopper_attention.missing(H200) is None


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(compiler, tmp_path):
    kernel = kernel_of('extern "C" __global__ void f() { undeclared(); }', tmp_path)
    with pytest.raises(DeviceError, match='identifier "undeclared" is undefined'):
        _ = kernel.compiled
    assert "undeclared" in kernel.missing


def test_a_missing_package_is_a_reason(monkeypatch, tmp_path):
    def not_installed(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", not_installed)
    nvrtc._bindings.cache_clear()
    kernel = kernel_of("", tmp_path)
    with pytest.raises(MissingDependencyError, match="pip install cuda-bindings"):
        _ = kernel.compiled
    assert "cuda-bindings" in kernel.missing
    nvrtc._bindings.cache_clear()


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_other_gpus_are_declined(capability):
    reason = hopper_attention.missing(Device("cuda", "another", capability))
    assert reason is not None and "needs Hopper" in reason


def operands(batch=1, tokens=5, heads=2, head_dim=128):
    codes = torch.zeros(batch, tokens, heads, head_dim).to(torch.float8_e4m3fn)
    ones = torch.ones(heads)
    return [codes, codes, codes, ones, ones, torch.ones(batch, 1, heads), torch.zeros(batch, 1, heads, head_dim)]


@pytest.mark.parametrize(
    ("position", "value", "named"),
    [
        (0, torch.zeros(1, 5, 2, 128), "q as"),
        (1, torch.zeros(1, 5, 3, 128).to(torch.float8_e4m3fn), "k as"),
        (2, torch.zeros(1, 4, 2, 128).to(torch.float8_e4m3fn), "v as"),
        (3, torch.ones(2, dtype=torch.float64), "q_scale as"),
        (5, torch.ones(1, 2, 2), "v_scale as"),
        (6, torch.zeros(1, 2, 128), "v_mean as"),
    ],
)
def test_operands_of_another_dtype_or_shape_are_refused(position, value, named):
    arguments = operands()
    arguments[position] = value
    with pytest.raises(DeviceError, match=named):
        hopper_attention.hopper_fp8_attention(*arguments)


def test_heads_of_another_width_and_no_keys_are_refused_and_no_queries_give_no_rows():
    with pytest.raises(DeviceError, match="128"):
        hopper_attention.hopper_fp8_attention(*operands(head_dim=64))
    with pytest.raises(DeviceError, match="no keys"):
        hopper_attention.hopper_fp8_attention(operands()[0], *operands(tokens=0)[1:])
    empty = hopper_attention.hopper_fp8_attention(*operands(tokens=0))
    assert empty.shape == (1, 0, 2, 128) and empty.dtype == torch.bfloat16


def test_value_tiles_hold_each_code_where_the_kernels_source_says():
    codes = torch.arange(128 * 128, dtype=torch.int32).remainder(251).to(torch.uint8).view(1, 128, 1, 128)
    tile = hopper_attention.value_tiles_definition(codes.view(torch.float8_e4m3fn))[0, 0, 0].flatten()
    for key in range(0, 128, 5):
        h, b, q, e = key // 16, key // 8 % 2, key // 2 % 4, key % 2
        for channel in (0, 1, 7, 8, 77, 127):
            place = 128 * channel + ((16 * h + 4 * q + 2 * b + e) ^ (16 * (channel % 8)))
            assert tile[place] == codes[0, key, 0, channel]
