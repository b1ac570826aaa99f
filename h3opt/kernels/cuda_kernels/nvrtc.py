"""CUDA sources of this folder: compiled by NVRTC at run time, loaded by the driver, launched on torch's current stream.

Both libraries are called through ``cuda.bindings``, which torch's CUDA wheels depend on, and are imported on first use.
A source includes no header, so no CUDA toolkit is needed. Compiling takes about a second: once per process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h3opt.errors import DeviceError, H3OptError, MissingDependencyError


class Kernel:
    """One kernel of a CUDA source: compiled at its first use in a process, loaded at its first use on a device.

    The first use of a device must lie outside of the capture of a CUDA graph, as it must for a Triton kernel.

    Args:
        source: name of the file in this folder.
        name: name of the kernel, which the source declares ``extern "C"``.
        architecture: what it is compiled for, e.g. ``"sm_90a"``.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
    """

    def __init__(self, source: str, name: str, architecture: str, threads: int, shared_bytes: int) -> None:
        self.source, self.name, self.architecture = Path(__file__).with_name(source), name, architecture
        self.threads, self.shared_bytes = threads, shared_bytes
        self._loaded: dict[int, tuple[Any, Any]] = {}

    @functools.cached_property
    def missing(self) -> str | None:
        """Why the kernel cannot be compiled here; ``None`` if it can."""
        try:
            _ = self.compiled
        except H3OptError as error:
            return str(error).rstrip(".")
        return None

    @functools.cached_property
    def compiled(self) -> tuple[bytes, str]:
        """Machine code (a cubin) and the compiler's log, which states registers and spills. Needs no GPU.

        Raises:
            MissingDependencyError: ``cuda.bindings`` is not installed.
            DeviceError: NVRTC cannot be loaded, or does not compile the source.
        """
        options = (f"--gpu-architecture={self.architecture}", "--std=c++17", "--ptxas-options=-v")
        return _compile(self.source, options)

    def launch(self, grid: tuple[int, int, int], *arguments: Tensor | int | RowsOfHeads) -> None:
        """Launch on the current stream of the first tensor's device.

        Tensors are passed as pointers, numbers as int32, and `RowsOfHeads` as tensor maps.

        Raises:
            MissingDependencyError: as `compiled`.
            DeviceError: as `compiled`, or the driver does not load or launch the kernel.
        """
        driver = _bindings("driver")
        device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
        stream = torch.cuda.current_stream(device).cuda_stream
        context, function = self._on(device)
        _check(driver, driver.cuCtxPushCurrent(context))
        try:
            values, types = zip(*map(_packed, arguments), strict=True)
            launched = driver.cuLaunchKernel(
                function, *grid, self.threads, 1, 1, self.shared_bytes, stream, (values, types), 0
            )
            _check(driver, launched)
        finally:
            _check(driver, driver.cuCtxPopCurrent())

    def _on(self, device: torch.device) -> tuple[Any, Any]:
        """The primary context of a device, which torch uses, and the kernel loaded there."""
        if device.index not in self._loaded:
            driver, (code, _) = _bindings("driver"), self.compiled
            ordinal = _check(driver, driver.cuDeviceGet(device.index))
            context = _check(driver, driver.cuDevicePrimaryCtxRetain(ordinal))
            _check(driver, driver.cuCtxPushCurrent(context))
            try:
                module = _check(driver, driver.cuModuleLoadData(code))
                function = _check(driver, driver.cuModuleGetFunction(module, self.name.encode()))
                shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _check(driver, driver.cuFuncSetAttribute(function, shared, self.shared_bytes))
            finally:
                _check(driver, driver.cuCtxPopCurrent())
            self._loaded[device.index] = context, function
        return self._loaded[device.index]


@dataclass(frozen=True)
class RowsOfHeads:
    """Boxes of rows of one head, which Hopper's copy engine (TMA) loads with the 128-byte swizzle.

    Attributes:
        data: contiguous [batch, tokens, heads, 128] of one byte each; rows past the last token are loaded as zeros.
        rows: tokens of a box, 256 at most.
    """

    data: Tensor
    rows: int

    def tensor_map(self) -> Any:
        """The description that a kernel takes. A device's context must be current."""
        driver, (batch, tokens, heads, width) = _bindings("driver"), self.data.shape
        sizes, box = (width, heads, tokens, batch), (width, 1, self.rows, 1)
        steps = (width, width * heads, width * heads * tokens)  # in bytes, from the second dimension on
        encoded = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(sizes),
            self.data.data_ptr(),
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(step) for step in steps],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return _check(driver, encoded)


def _packed(argument: Tensor | int | RowsOfHeads) -> tuple[Any, Any]:
    """A kernel argument and its C type; a tensor map is copied from where it lies, which has no type."""
    if isinstance(argument, RowsOfHeads):
        return argument.tensor_map(), None
    return (argument.data_ptr(), ctypes.c_void_p) if isinstance(argument, Tensor) else (argument, ctypes.c_int32)


def _compile(source: Path, options: tuple[str, ...]) -> tuple[bytes, str]:
    nvrtc = _bindings("nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the library is loaded by the first call
        raise MissingDependencyError(
            f"NVRTC, CUDA's compiler at run time, cannot be loaded: {error}. Run `pip install nvidia-cuda-nvrtc`."
        ) from error
    program = _check(nvrtc, nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(_check(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
        _check(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode(errors="replace")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise DeviceError(
                f"NVRTC does not compile {source.name} ({result.name}): {text.strip()}. Install a newer NVRTC, at "
                "least that of CUDA 12.8."
            )
        code = bytearray(_check(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(code), text


@functools.cache
def _bindings(library: str) -> Any:
    try:
        return importlib.import_module(f"cuda.bindings.{library}")
    except ImportError as error:
        raise MissingDependencyError(
            f"h3opt's CUDA kernels need the package cuda-bindings ({error}). Run `pip install cuda-bindings`."
        ) from error


def _check(library: Any, returned: tuple[Any, ...]) -> Any:
    """The value of a call of ``cuda.bindings``, which returns its status first."""
    status, *values = returned
    if status:
        raise DeviceError(
            f"CUDA reports {status.name} for a kernel compiled at run time. Update the driver, or name another backend."
        )
    return values[0] if values else None
