"""Module calls go through wrappers in order, and modules are as before when the last wrapper is gone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from h3opt.pipeline.hooks import Wrapper, is_observed, wrap_calls


def logger(name: str, log: list[str]) -> Wrapper:
    def wrapper(proceed: Any, *args: Any, **kwargs: Any) -> Any:
        log.append(f"{name} in")
        result = proceed(*args, **kwargs)
        log.append(f"{name} out")
        return result

    return wrapper


def names(module: torch.nn.Module, log: list[str]) -> list[str]:
    """The wrappers that a call runs through, the outermost first."""
    log.clear()
    module(torch.ones(1))
    return [entry.removesuffix(" in") for entry in log if entry.endswith(" in")]


def test_a_later_wrapper_is_outside_and_an_innermost_wrapper_is_inside_all() -> None:
    module, log = torch.nn.Identity(), []  # type: ignore[var-annotated]
    with ExitStack() as undo:
        for name, innermost in (("a", False), ("b", True), ("c", False), ("d", True)):
            wrap_calls(module, logger(name, log), undo, innermost)
        assert names(module, log) == ["c", "a", "b", "d"]
    assert names(module, log) == [] and module._compiled_call_impl is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_wrappers_come_off_in_any_order(order: tuple[int, ...]) -> None:
    module, log, stacks = torch.nn.Identity(), [], [ExitStack() for _ in range(3)]  # type: ignore[var-annotated]
    for number, stack in enumerate(stacks):
        wrap_calls(module, logger(str(number), log), stack)
    left = ["2", "1", "0"]
    for number in order:
        stacks[number].close()
        left.remove(str(number))
        assert names(module, log) == left
    assert module._compiled_call_impl is None


def test_equal_wrappers_are_told_apart() -> None:
    class Equal:
        def __init__(self, added: int) -> None:
            self.added = added

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

        def __call__(self, proceed: Any, x: torch.Tensor) -> Any:
            return proceed(x) + self.added

    module, first, second = torch.nn.Identity(), ExitStack(), ExitStack()
    wrap_calls(module, Equal(1), first)
    wrap_calls(module, Equal(10), second)
    second.close()
    assert module(torch.zeros(1)).item() == 1
    first.close()


def test_a_compiled_call_stays_inside_the_wrappers_and_comes_back() -> None:
    module, log = torch.nn.Identity(), []  # type: ignore[var-annotated]
    compiled = logger("compiled", log)
    module._compiled_call_impl = lambda x: compiled(lambda y: y, x)  # type: ignore[assignment]
    before = module._compiled_call_impl
    with ExitStack() as undo:
        wrap_calls(module, logger("wrapper", log), undo)
        assert names(module, log) == ["wrapper", "compiled"]
    assert module._compiled_call_impl is before


def test_a_wrapper_may_change_arguments_and_results() -> None:
    module = torch.nn.Identity()
    with ExitStack() as undo:
        wrap_calls(module, lambda proceed, x: proceed(x + 1) * 2, undo)
        assert module(torch.ones(1)).item() == 4


def test_hooks_and_outer_wrappers_observe_a_module_and_innermost_wrappers_do_not() -> None:
    module = torch.nn.Linear(1, 1)
    assert not is_observed(module)
    with ExitStack() as undo:
        wrap_calls(module, logger("graph", []), undo, innermost=True)
        assert not is_observed(module)
        wrap_calls(module, logger("wrapper", []), undo)
        assert is_observed(module)
    assert not is_observed(module)
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *args: None)
        assert is_observed(module)
        handle.remove()
    module.forward = module.forward  # type: ignore[method-assign]
    assert is_observed(module)
    del module.forward
    assert not is_observed(module)
