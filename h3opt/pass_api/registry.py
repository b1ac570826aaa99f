"""The registry of passes: those shipped with h3opt, and those that installed packages add by an entry point."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from h3opt.errors import PassDefinitionError, PassOptionError, UnknownPassError, nearest
from h3opt.pass_api.base import FormatPass, GraphPass, Pass, SchedulePass
from h3opt.pass_api.promises import Exact, Perceptual, Rounding

ENTRY_POINT_GROUP = "h3opt.passes"
"""The entry point group in which another package names the modules that register passes."""

_KINDS = ("format", "graph", "schedule")
_registered: dict[str, type[Pass]] = {}
_renamed: dict[str, type[Pass]] = {}  # by former name
_loaded: set[str] = set()

PassClass = TypeVar("PassClass", bound=type[Pass])


def register(cls: PassClass) -> PassClass:
    """Class decorator that registers a pass under its ``name``.

    Raises:
        PassDefinitionError: the class does not follow the protocol, or the name is taken.
    """
    problem = _problem_with(cls)
    if problem:
        raise PassDefinitionError(f"{cls.__module__}.{cls.__qualname__} {problem}")
    for name in (cls.name, *cls.former_names):
        known = _registered.get(name) or _renamed.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise PassDefinitionError(
                f"The pass name {name!r} is taken by {known.__module__}.{known.__qualname__}. Choose another name."
            )
    _registered[cls.name] = cls
    _renamed.update(dict.fromkeys(cls.former_names, cls))
    return cls


def list_passes() -> list[type[Pass]]:
    """Return all registered pass classes, sorted by kind and then name.

    Raises:
        PassDefinitionError: a pass module, shipped or installed, cannot be imported.
    """
    _load()
    return sorted(_registered.values(), key=sort_key)


def sort_key(item: Pass | type[Pass]) -> tuple[int, str]:
    """Return the sort key for formats before graph passes before schedules, and by name within a kind."""
    return _KINDS.index(item.kind), item.name


def current_name(name: str) -> str:
    """Resolve a former name of a pass, with a DeprecationWarning; other names, also unknown names, come back as is."""
    _load()
    if name in _registered or name not in _renamed:
        return name
    current = _renamed[name].name
    warnings.warn(
        f"The pass {name!r} is now called {current!r}. Write {current!r}: the old name works in this version only.",
        DeprecationWarning,
        stacklevel=3,
    )
    return current


def find_pass(name: str) -> type[Pass]:
    """Return the pass class called ``name``, now or formerly.

    Raises:
        UnknownPassError: there is none; the message gives the nearest name.
    """
    name = current_name(name)
    if name not in _registered:
        raise UnknownPassError(
            f"There is no pass called {name!r}{nearest(name, _registered)}. `h3opt passes` lists them all."
        )
    return _registered[name]


def make_pass(name: str, options: Mapping[str, Any] | None = None) -> Pass:
    """Create the pass called ``name`` with ``options`` set.

    Raises:
        UnknownPassError: there is no such pass.
        PassOptionError: the pass has no such option, or refuses the value.
    """
    cls = find_pass(name)
    known = {field.name: field for field in dataclasses.fields(cls)}
    for option in options or {}:
        if option not in known:
            listed = f"Its options are: {', '.join(known)}." if known else "It has no options."
            raise PassOptionError(f"Pass {name!r} has no option {option!r}{nearest(option, known)}. {listed}")
    try:
        return cls(**dict(options or {}))
    except (TypeError, ValueError) as error:
        raise PassOptionError(f"Pass {name!r} refuses its options: {error}. See `h3opt explain {name}`.") from error


def _load() -> None:
    """Import every pass module that is not imported yet: importing registers the passes in it."""
    package = importlib.import_module("h3opt.passes")
    names = [f"h3opt.passes.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    for name in names:
        _import_once(name, f"The shipped pass module {name}")
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        _import_once(entry.value, f"The pass package {entry.name!r} ({entry.value})")


def _import_once(module: str, what: str) -> None:
    if module in _loaded:
        return
    try:
        importlib.import_module(module.split(":")[0])
    except PassDefinitionError:
        raise
    except Exception as error:
        raise PassDefinitionError(f"{what} cannot be imported: {error!r}. Mend it or uninstall it.") from error
    _loaded.add(module)


def _problem_with(cls: type) -> str | None:
    """Return how a class violates the protocol of passes and what to do, or ``None``."""
    if not issubclass(cls, (FormatPass, GraphPass, SchedulePass)):
        return "is not a FormatPass, GraphPass or SchedulePass. Derive it from one of them."
    if not isinstance(getattr(cls, "name", None), str) or not cls.name.isidentifier():
        return "has no usable name. Set name = 'my_pass', a Python identifier."
    if not isinstance(getattr(cls, "promise", None), (Exact, Rounding, Perceptual)):
        return "makes no promise. Set promise = Exact(), Rounding(ulps=...) or Perceptual(lpips=...)."
    if issubclass(cls, GraphPass) and cls.promise == Rounding(None):
        return "promises rounding without a bound at its sites. Set promise = Rounding(ulps=...)."
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[union-attr]
        return "is not a frozen dataclass. Decorate it with @dataclass(frozen=True) below @register."
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        return f"leaves out {missing}. Every pass defines them (see h3opt.pass_api.base)."
    if not cls.summary():
        return "has no docstring. Say in its first line what it does and why that is faster."
    if issubclass(cls, SchedulePass) and not cls.happens_before:
        return "states no ordering. Set happens_before to the orderings it relies on or adds."
    return None
