"""How far the unmodified pipeline moves by itself: what a change has to be compared with before it is called one.

| floor | what is compared |
|---|---|
| ``ulp`` | inputs of the transformer and of the video decoder moved by one unit in the last place |
| ``compile`` | the repeated blocks compiled by Inductor, as diffusers' ``compile_repeated_blocks`` does, with eager |
| ``cache`` | compiled with an empty Inductor cache, with compiled from the cache that left behind |
| ``attention`` | one of torch's attention libraries with another |
| ``seed`` | each clip with that of the next seed: two different draws, so a ceiling and no floor |

What is compiled is compiled for the floor alone: in a code object of its own, so that nobody else's graphs are dropped
or recompiled, in a cache folder of its own, so that it is cold when that is said, and without autotuning, which may
pick another kernel in every process. A floor that cannot be measured here says why.
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
"""Inductor's options for everything that is compiled here."""


Run = Callable[[str, Sequence[GenerationSettings]], list[Media]]
"""``run(what, clips)``: generate with the unmodified pipeline; ``what`` is for a progress bar."""


@dataclass(frozen=True)
class FloorKind:
    """A floor in words.

    Attributes:
        what: completes "0.4 of …".
        how: what was compared.
        ceiling: whether it bounds a change from above instead.
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
"""Name of every floor → its words, in the order they are measured."""


@dataclass(frozen=True)
class Floor:
    """One floor, measured or not.

    Attributes:
        name: a key of :data:`FLOORS`.
        difference: the worst of each measure over the clips; ``None`` if it could not be measured.
        absent: why not.
        facts: what it was measured with: libraries, autotuning, what the compiler's cache served.
    """

    name: str
    difference: Difference | None
    absent: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> FloorKind:
        """Its words."""
        return FLOORS[self.name]

    @property
    def label(self) -> str:
        """For a table's row: ``noise floor``, ``compile floor``, ``seed ceiling``."""
        return "noise floor" if self.name == "ulp" else f"{self.name} {'ceiling' if self.kind.ceiling else 'floor'}"

    @property
    def found(self) -> str:
        """What was measured, or why nothing was, with how."""
        if self.difference is None:
            return f"not measured: {self.absent}"
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items() if name not in AUTOTUNING)
        return f"{self.difference} (h3opt off, {self.kind.how}{'; ' if facts else ''}{facts})"

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types, but for what is not finite."""
        return {
            "name": self.name,
            "how": self.kind.how,
            "ceiling": self.kind.ceiling,
            "absent": self.absent,
            "facts": dict(self.facts),
            "difference": self.difference.to_dict() if self.difference else None,
        }


def choose_floors(names: Iterable[str], ulp: bool) -> list[str]:
    """The floors asked for, in the order they are measured.

    Args:
        names: of :data:`FLOORS`, in any order.
        ulp: whether a pass may move bits, which is judged by that floor, asked for or not.

    Raises:
        PassOptionError: there is no such floor.
    """
    if isinstance(names, str):
        raise PassOptionError(f"floors is one name, not a list. Write floors=[{names!r}].")
    asked = list(names)
    for name in asked:
        if name not in FLOORS:
            raise PassOptionError(
                f"There is no floor called {name!r}{nearest(str(name), FLOORS)}. Use {', '.join(FLOORS)}."
            )
    return [name for name in FLOORS if name in asked or (ulp and name == "ulp")]


def generations(names: Sequence[str], clips: Sequence[GenerationSettings]) -> int:
    """How many generations :func:`measure_floors` makes if every floor can be measured."""
    runs = {"ulp": 1, "compile": 1, "cache": 1 if "compile" in names else 2, "attention": 2}
    found = sum(runs.get(name, 0) for name in names) * len(clips)
    return found + (len(_further(clips)) if "seed" in names else 0)


def measure_floors(
    names: Sequence[str],
    view: PipelineView,
    clips: Sequence[GenerationSettings],
    reference: Sequence[Media],
    run: Run,
) -> list[Floor]:
    """Measure floors on a pipeline that nothing is installed on; it is left as it was found.

    Args:
        names: what :func:`choose_floors` gave.
        view: the pipeline.
        clips: what to generate.
        reference: the unmodified pipeline's, one a clip.
        run: generates.
    """
    with _Compiler(dataclasses.replace(view, scope="block")) as compiler:
        measured = []
        for name in names:
            try:
                one, other, facts = _measure(name, view, clips, reference, run, compiler)
            except _CannotMeasure as why:
                measured.append(Floor(name, None, str(why)))
            else:
                measured.append(Floor(name, Difference.worst(map(Difference.between, one, other)), None, facts))
    return measured


def _measure(
    name: str,
    view: PipelineView,
    clips: Sequence[GenerationSettings],
    reference: Sequence[Media],
    run: Run,
    compiler: _Compiler,
) -> tuple[Sequence[Media], Sequence[Media], dict[str, Any]]:
    """Two sets of clips to compare, and what they were made with."""

    def generated(what: str) -> list[Media]:
        return run(what, clips)

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
    further = _further(clips)
    known = dict(zip((*clips, *further), (*reference, *run("next seed", further)), strict=True))
    return reference, [known[_next_seed(clip)] for clip in clips], {}


def multiples(difference: Difference, floors: Iterable[Floor]) -> dict[str, float]:
    """``difference`` as a multiple of each floor that could be measured; see :meth:`Difference.over`."""
    return {one.name: difference.over(one.difference) for one in floors if one.difference is not None}


_LEAST, _MOST = 0.01, 1000.0  # digits of a multiple beyond these say nothing


def multiple_words(name: str, multiple: float) -> str:
    """For a sentence: ``0.4 of what compiling alone does``, ``12 times the noise floor``, ``far above the noise
    floor``."""
    what = FLOORS[name].what
    if not math.isfinite(multiple):
        return "beyond any noise floor" if name == "ulp" else f"beyond any multiple of {what}"
    if _LEAST <= multiple <= _MOST:
        digits = multiple_digits(multiple)
        return f"{digits} {'of' if float(digits) < 1 else 'times'} {what}"
    return f"far {'above' if multiple > _MOST else 'below'} {what}"


def multiple_digits(multiple: float) -> str:
    """For a table: ``0.4``, ``120``; ``>1000`` is all that a narrow column has room for, and JSON has the figure."""
    if 0 < multiple < _LEAST:
        return f"<{_LEAST:g}"
    return f">{_MOST:g}" if multiple > _MOST else f"{float(f'{multiple:.2g}'):g}"


def floor_hint(difference: Difference, floors: Sequence[Floor]) -> str:
    """What else to measure where ``difference`` is far above one ulp and nothing else was; empty elsewhere.

    In float32 one ulp moves next to nothing, and anything at all is far above it.
    """
    if [one.name for one in floors] == ["ulp"] and multiples(difference, floors).get("ulp", 0.0) > _MOST:
        return f"--floors compile says {FLOORS['compile'].what}"
    return ""


class _CannotMeasure(Exception):
    """Why a floor cannot be measured here."""


def perturb_inputs(view: PipelineView, undo: ExitStack) -> None:
    """Move what enters the transformer, and the video decoder, by one ulp of its blocks' dtype in every call."""
    for module in (view.transformer, getattr(view.vae, "decoder", None)):  # decoding rounds too
        if module is not None:
            wrap_calls(module, UlpPerturbation(next(iter(module.transformer_blocks.parameters())).dtype), undo)


class UlpPerturbation:
    """Moves what enters the transformer, or the video decoder, by one ulp of its dtype in every call."""

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
        """The clips, compiled with an empty cache, and how many graphs there were and came from the cache."""
        if self._failed is not None:
            raise self._failed
        if self._cold is None:
            self._folder = self._undo.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            try:
                self._cold = self._run(generated, "compiled")
            except _CannotMeasure as why:  # nor can another floor
                self._failed = why
                raise
        return self._cold

    def warm(self, generated: Callable[[str], list[Media]]) -> tuple[list[Media], dict[str, int]]:
        """The same once more, with the cache as :meth:`cold` left it."""
        return self._run(generated, "compiled, warm cache")

    def _run(self, generated: Callable[[str], list[Media]], what: str) -> tuple[list[Media], dict[str, int]]:
        taken = [module for region in self._regions for module in region.modules if _compiled_already(module)]
        if taken:
            raise _CannotMeasure(
                f"{len(taken)} blocks are compiled already, so there is no eager pipeline to compare with; load it anew"
            )
        with ExitStack() as undo:
            for region in self._regions:
                _compile(region, undo)
            undo.enter_context(_cache_in(self._folder))
            before = private.compile_counts()
            try:
                media = generated(what)
            except private.CompileFailed as failure:
                raise _CannotMeasure(_why_not(failure)) from failure
            facts = {name: count - before[name] for name, count in private.compile_counts().items()}
        if not facts["graphs"]:
            raise _CannotMeasure("nothing was compiled; look for TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE")
        return media, facts


def _compile(region: Region, undo: ExitStack) -> None:
    def call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return private.module_call(module, args, kwargs)

    # Dynamo keeps graphs per code object; ``module.compile()`` would share one with the user's own compiled modules.
    name = f"floor_{region.name.replace('.', '_')}"
    own = types.FunctionType(call.__code__.replace(co_name=name), call.__globals__, name)
    compiled = torch.compile(own, fullgraph=True, options=dict(AUTOTUNING))
    for module in region.modules:

        def entry(proceed: Any, *args: Any, module: torch.nn.Module = module, **kwargs: Any) -> Any:
            return compiled(module, args, kwargs)

        wrap_calls(module, entry, undo, innermost=True)


def _compiled_already(module: torch.nn.Module) -> bool:
    slot = getattr(module, "_compiled_call_impl", None)
    return getattr(slot, "compiled", slot) is not None  # what h3opt put there holds what it found


def _why_not(failure: BaseException) -> str:
    inner = getattr(failure, "inner_exception", failure)
    if type(inner).__name__ == "InvalidCxxCompiler":
        return "Inductor finds no C++ compiler; install g++ or clang, or name one in CXX"
    lines = str(inner).strip().splitlines() or [""]
    return f"Inductor does not compile the blocks here ({type(inner).__name__}: {lines[0]})"


@contextmanager
def _cache_in(folder: str) -> Iterator[None]:
    """Keep Inductor's and Triton's caches in ``folder``; what is in memory is forgotten before and after."""
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
    """Clips by the first two libraries that take every call."""
    found: dict[str, list[Media]] = {}
    refused = []
    for backend in _LIBRARIES.get(view.device.type, ()):
        library = _Library(backend)
        with ExitStack() as undo:
            for module in (view.transformer, getattr(view.vae, "decoder", None)):
                if module is not None:
                    wrap_calls(module, library.around, undo)
            try:
                media = generated(f"attention: {library.name}")
            except _Refused as why:
                refused.append(f"{library.name} ({why})")
                continue
        if not library.calls:
            raise _CannotMeasure("no attention goes through torch's scaled_dot_product_attention")
        found[library.name] = media
        if len(found) == 2:
            one, other = found
            return found[one], found[other], {"libraries": f"{one} and {other}"}
    there = f"only {', '.join(found)}" if found else "no library"
    raise _CannotMeasure(f"{there} takes its calls on {view.device.name}; refused: {'; '.join(refused) or 'none'}")


class _Refused(Exception):
    """A library does not take a call."""


class _Library(TorchFunctionMode):
    """Sends every ``scaled_dot_product_attention`` to one library."""

    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.backend, self.calls = backend, 0
        self.name = backend.name.lower().removesuffix("_attention")

    def wrap_calls(self, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        """Only inside a component of the pipeline: text encoders pass masks that few libraries take."""
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


def _next_seed(clip: GenerationSettings) -> GenerationSettings:
    return dataclasses.replace(clip, seed=clip.seed + 1)


def _further(clips: Sequence[GenerationSettings]) -> list[GenerationSettings]:
    """The clips of next seeds that are not generated anyway."""
    return [following for clip in clips if (following := _next_seed(clip)) not in clips]
