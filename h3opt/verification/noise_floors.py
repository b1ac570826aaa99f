"""Measure how far the unmodified pipeline moves without h3opt, so that the change of a pass can be compared with it.

| floor | comparison |
|---|---|
| ``ulp`` | inputs of the transformer and of the video decoder moved by one unit in the last place, with unmoved |
| ``compile`` | the repeated blocks compiled by Inductor, as diffusers' ``compile_repeated_blocks`` does, with eager |
| ``cache`` | compiled with an empty Inductor cache, with compiled from the cache that the first run filled |
| ``attention`` | one of torch's attention libraries, with another |
| ``seed`` | each clip, with the clip of the next seed: two different draws, so this is a ceiling and no floor |

Compilation for a floor has a code object of its own, so that the user's compiled graphs are not dropped or recompiled;
a cache folder of its own, so that a cold cache is empty; and no autotuning, which may choose another kernel in every
process. A floor that cannot be measured reports the reason.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from h3opt import _torch_private as private
from h3opt.errors import PassOptionError, nearest
from h3opt.pipeline.generation import GenerationSettings, Media
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.region import Region
from h3opt.pipeline.view import PipelineView
from h3opt.verification.difference import Difference

AUTOTUNING = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
}
"""Options of Inductor for all compilation in this module."""


Run = Callable[[str, Sequence[GenerationSettings]], list[Media]]
"""``run(what, requests)`` generates with the unmodified pipeline; ``what`` is shown as progress."""


@dataclass(frozen=True)
class FloorKind:
    """The words for one kind of floor.

    Attributes:
        what: completes "0.4 of …".
        how: what is compared.
        ceiling: whether it is an upper bound for a change instead.
    """

    what: str
    how: str
    ceiling: bool = False


FLOORS = {
    "ulp": FloorKind("the noise floor", "inputs moved by one ulp"),
    "compile": FloorKind("what compiling alone does", "blocks compiled by Inductor against eager"),
    "cache": FloorKind("what a warm cache does", "compiled with a cold cache against a warm one"),
    "attention": FloorKind("what another attention library does", "one attention library against another"),
    "seed": FloorKind("the distance to the next seed", "a ceiling: each clip against the next seed's", ceiling=True),
}
"""Name of a floor → the words for it, in the order of measurement."""


@dataclass(frozen=True)
class Floor:
    """The result for one floor.

    Attributes:
        name: a key of :data:`FLOORS`.
        difference: the worst of each measure over the clips; ``None`` if the floor could not be measured.
        absent: the reason why it could not be measured.
        facts: conditions of the measurement: libraries, autotuning, hits in the compiler's cache.
    """

    name: str
    difference: Difference | None
    absent: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> FloorKind:
        """The words for this kind of floor."""
        return FLOORS[self.name]

    @property
    def label(self) -> str:
        """The head of a table row: ``noise floor``, ``compile floor``, ``seed ceiling``."""
        return "noise floor" if self.name == "ulp" else f"{self.name} {'ceiling' if self.kind.ceiling else 'floor'}"

    @property
    def summary(self) -> str:
        """The difference and how it was measured, or the reason why it was not."""
        if self.difference is None:
            return f"not measured: {self.absent}"
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items() if name not in AUTOTUNING)
        return f"{self.difference} (h3opt off, {self.kind.how}{'; ' if facts else ''}{facts})"

    def to_dict(self) -> dict[str, Any]:
        """The floor as JSON-ready types, except for numbers that are not finite."""
        return {
            "name": self.name,
            "how": self.kind.how,
            "ceiling": self.kind.ceiling,
            "absent": self.absent,
            "facts": dict(self.facts),
            "difference": self.difference.to_dict() if self.difference else None,
        }


def choose_floors(names: Iterable[str], ulp: bool) -> list[str]:
    """Return the names of the floors to measure, in the order of measurement.

    Args:
        names: names of :data:`FLOORS`, in any order.
        ulp: whether a pass may move bits: it is judged by the ``ulp`` floor, which is then always measured.

    Raises:
        PassOptionError: there is no such floor.
    """
    if isinstance(names, str):
        raise PassOptionError(f"floors is one name, not a list. Write floors=[{names!r}].")
    requested = list(names)
    for name in requested:
        if name not in FLOORS:
            raise PassOptionError(
                f"There is no floor called {name!r}{nearest(str(name), FLOORS)}. Use {', '.join(FLOORS)}."
            )
    return [name for name in FLOORS if name in requested or (ulp and name == "ulp")]


def count_generations(names: Sequence[str], requests: Sequence[GenerationSettings]) -> int:
    """Count the generations that :func:`measure_floors` makes if every floor can be measured."""
    runs = {"ulp": 1, "compile": 1, "cache": 1 if "compile" in names else 2, "attention": 2}
    count = sum(runs.get(name, 0) for name in names) * len(requests)
    return count + (len(_further(requests)) if "seed" in names else 0)


def measure_floors(
    names: Sequence[str],
    view: PipelineView,
    requests: Sequence[GenerationSettings],
    reference: Sequence[Media],
    run: Run,
) -> list[Floor]:
    """Measure floors on an unmodified pipeline, which is unmodified again at the end.

    Args:
        names: the result of :func:`choose_floors`.
        view: the pipeline.
        requests: the clips to generate.
        reference: what the unmodified pipeline generated, one item for each request.
        run: generates clips.
    """
    with _Compiler(dataclasses.replace(view, scope="block")) as compiler:
        measured = []
        for name in names:
            try:
                left, right, facts = _measure(name, view, requests, reference, run, compiler)
            except _CannotMeasure as reason:
                measured.append(Floor(name, None, str(reason)))
            else:
                measured.append(Floor(name, Difference.worst(map(Difference.between, left, right)), None, facts))
    return measured


def _measure(
    name: str,
    view: PipelineView,
    requests: Sequence[GenerationSettings],
    reference: Sequence[Media],
    run: Run,
    compiler: _Compiler,
) -> tuple[Sequence[Media], Sequence[Media], dict[str, Any]]:
    """Two lists of clips to compare, and the conditions under which they were generated."""

    def generated(what: str) -> list[Media]:
        return run(what, requests)

    if name == "ulp":
        with ExitStack() as undo:
            perturb_inputs(view, undo)
            return reference, generated("noise floor"), {}
    if name == "compile":
        media, facts = compiler.cold(generated)
        return reference, media, {"graphs": facts["graphs"], **AUTOTUNING}
    if name == "cache":
        cold, cold_facts = compiler.cold(generated)
        warm, warm_facts = compiler.warm(generated)
        hits, graphs = warm_facts["hits"], warm_facts["graphs"]
        if cold_facts["hits"] or not hits:
            raise _CannotMeasure(
                f"Inductor's cache served {cold_facts['hits']} graphs when empty and {hits} when filled, so nothing "
                "was cold or nothing warm; look for TORCHINDUCTOR_FORCE_DISABLE_CACHES and remote caches"
            )
        return cold, warm, {"cold": f"0 of {cold_facts['graphs']}", "warm": f"{hits} of {graphs} cached", **AUTOTUNING}
    if name == "attention":
        return _two_libraries(view, generated)
    further = _further(requests)
    by_request = dict(zip((*requests, *further), (*reference, *run("next seed", further)), strict=True))
    return reference, [by_request[_next_seed(request)] for request in requests], {}


def multiples(difference: Difference, floors: Iterable[Floor]) -> dict[str, float]:
    """Name of a measured floor → ``difference`` as a multiple of it; see :meth:`Difference.over`."""
    return {floor.name: difference.over(floor.difference) for floor in floors if floor.difference is not None}


_SMALLEST, _LARGEST = 0.01, 1000.0  # outside this range the digits of a multiple carry no information


def multiple_words(name: str, multiple: float) -> str:
    """A multiple for a sentence.

    For example ``0.4 of what compiling alone does``, ``12 times the noise floor``, ``far above the noise floor``.
    """
    what = FLOORS[name].what
    if not math.isfinite(multiple):
        return "beyond any noise floor" if name == "ulp" else f"beyond any multiple of {what}"
    if _SMALLEST <= multiple <= _LARGEST:
        digits = multiple_digits(multiple)
        return f"{digits} {'of' if float(digits) < 1 else 'times'} {what}"
    return f"far {'above' if multiple > _LARGEST else 'below'} {what}"


def multiple_digits(multiple: float) -> str:
    """A multiple for a narrow table column: ``0.4``, ``120``, ``>1000``; JSON has the exact figure."""
    if 0 < multiple < _SMALLEST:
        return f"<{_SMALLEST:g}"
    return f">{_LARGEST:g}" if multiple > _LARGEST else f"{float(f'{multiple:.2g}'):g}"


def floor_hint(difference: Difference, floors: Sequence[Floor]) -> str:
    """A hint to measure another floor, if only ``ulp`` was measured and ``difference`` is far above it; else empty.

    In float32 one ulp moves the output very little, so that any change is far above it.
    """
    if [floor.name for floor in floors] == ["ulp"] and multiples(difference, floors).get("ulp", 0.0) > _LARGEST:
        return f"--floors compile says {FLOORS['compile'].what}"
    return ""


class _CannotMeasure(Exception):
    """The reason why a floor cannot be measured here."""


def perturb_inputs(view: PipelineView, undo: ExitStack) -> None:
    """Move the inputs of the transformer and of the video decoder by one ulp of their blocks' dtype in every call."""
    for module in (view.transformer, getattr(view.vae, "decoder", None)):  # rounding in the decoder counts too
        if module is not None:
            wrap_calls(module, UlpPerturbation(next(iter(module.transformer_blocks.parameters())).dtype), undo)


class UlpPerturbation:
    """A call wrapper that moves the latents that a module reads by one ulp of ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("hidden_states", "audio_hidden_states"):
            if name in kwargs:
                kwargs[name] = kwargs[name] * (1 + torch.finfo(self.dtype).eps)
        if args:
            args = (args[0] * (1 + torch.finfo(self.dtype).eps), *args[1:])
        return proceed(*args, **kwargs)


class _Compiler:
    """Runs generations with the repeated blocks compiled by Inductor, in a cache folder that starts empty."""

    def __init__(self, view: PipelineView) -> None:
        self._regions = view.regions()
        self._cold: tuple[list[Media], dict[str, int]] | None = None
        self._failed: _CannotMeasure | None = None
        self._undo = ExitStack()

    def __enter__(self) -> _Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def cold(self, generated: Callable[[str], list[Media]]) -> tuple[list[Media], dict[str, int]]:
        """The clips, compiled with an empty cache, and the counts of graphs and of cache hits."""
        if self._failed is not None:
            raise self._failed
        if self._cold is None:
            self._folder = self._undo.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            try:
                self._cold = self._run(generated, "compiled")
            except _CannotMeasure as reason:  # the other floor that compiles has the same reason
                self._failed = reason
                raise
        return self._cold

    def warm(self, generated: Callable[[str], list[Media]]) -> tuple[list[Media], dict[str, int]]:
        """The same with the cache that :meth:`cold` filled."""
        return self._run(generated, "compiled, warm cache")

    def _run(self, generated: Callable[[str], list[Media]], what: str) -> tuple[list[Media], dict[str, int]]:
        compiled = [module for region in self._regions for module in region.modules if _compiled_already(module)]
        if compiled:
            raise _CannotMeasure(
                f"{len(compiled)} blocks are compiled already, so there is no eager pipeline to compare with; "
                "load it anew"
            )
        with ExitStack() as undo:
            for region in self._regions:
                _compile(region, undo)
            undo.enter_context(_cache_in(self._folder))
            before = private.compile_counts()
            try:
                media = generated(what)
            except private.CompileFailed as failure:
                raise _CannotMeasure(_compile_failure(failure)) from failure
            facts = {name: count - before[name] for name, count in private.compile_counts().items()}
        if not facts["graphs"]:
            raise _CannotMeasure("nothing was compiled; look for TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE")
        return media, facts


def _compile(region: Region, undo: ExitStack) -> None:
    def call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return private.module_call(module, args, kwargs)

    # Dynamo keeps graphs per code object; ``module.compile()`` would share it with the user's own compiled modules.
    name = f"floor_{region.name.replace('.', '_')}"
    own = types.FunctionType(call.__code__.replace(co_name=name), call.__globals__, name)
    compiled = torch.compile(own, fullgraph=True, options=dict(AUTOTUNING))
    for module in region.modules:

        def entry(proceed: Any, *args: Any, module: torch.nn.Module = module, **kwargs: Any) -> Any:
            return compiled(module, args, kwargs)

        wrap_calls(module, entry, undo, innermost=True)


def _compiled_already(module: torch.nn.Module) -> bool:
    slot = getattr(module, "_compiled_call_impl", None)
    return getattr(slot, "compiled", slot) is not None  # a wrapper of h3opt keeps the original call


def _compile_failure(failure: BaseException) -> str:
    inner = getattr(failure, "inner_exception", failure)
    if type(inner).__name__ == "InvalidCxxCompiler":
        return "Inductor finds no C++ compiler; install g++ or clang, or name one in CXX"
    lines = str(inner).strip().splitlines() or [""]
    return f"Inductor does not compile the blocks here ({type(inner).__name__}: {lines[0]})"


@contextmanager
def _cache_in(folder: str) -> Iterator[None]:
    """Keep the caches of Inductor and Triton in ``folder``; their caches in memory are emptied before and after."""
    places = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    before = {name: os.environ.get(name) for name in places}
    private.forget_compiled()
    os.environ.update(places)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        private.forget_compiled()


_LIBRARIES = {
    "cpu": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
    "cuda": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
}


def _two_libraries(
    view: PipelineView, generated: Callable[[str], list[Media]]
) -> tuple[list[Media], list[Media], dict[str, Any]]:
    """Clips of the first two libraries that accept every call."""
    generated_by: dict[str, list[Media]] = {}
    refused = []
    for backend in _LIBRARIES.get(view.device.type, ()):
        library = _Library(backend)
        with ExitStack() as undo:
            for module in (view.transformer, getattr(view.vae, "decoder", None)):
                if module is not None:
                    wrap_calls(module, library.wrap_calls, undo)
            try:
                media = generated(f"attention: {library.name}")
            except _Refused as reason:
                refused.append(f"{library.name} ({reason})")
                continue
        if not library.calls:
            raise _CannotMeasure("no attention goes through torch's scaled_dot_product_attention")
        generated_by[library.name] = media
        if len(generated_by) == 2:
            first, second = generated_by
            return generated_by[first], generated_by[second], {"libraries": f"{first} and {second}"}
    accepting = f"only {', '.join(generated_by)}" if generated_by else "no library"
    raise _CannotMeasure(f"{accepting} takes its calls on {view.device.name}; refused: {'; '.join(refused) or 'none'}")


class _Refused(Exception):
    """A library does not accept a call."""


class _Library(TorchFunctionMode):
    """Sends every ``scaled_dot_product_attention`` to the same library."""

    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.backend, self.calls = backend, 0
        self.name = backend.name.lower().removesuffix("_attention")

    def wrap_calls(self, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        """Active inside components of the pipeline only: text encoders pass masks that few libraries accept."""
        with self:
            return proceed(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        try:
            with sdpa_kernel(self.backend):
                return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            raise _Refused(str(error).strip().partition("\n")[0]) from error


def _next_seed(request: GenerationSettings) -> GenerationSettings:
    return dataclasses.replace(request, seed=request.seed + 1)


def _further(requests: Sequence[GenerationSettings]) -> list[GenerationSettings]:
    """The requests with next seeds that are not among ``requests``."""
    return [following for request in requests if (following := _next_seed(request)) not in requests]
