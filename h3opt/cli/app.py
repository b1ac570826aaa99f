"""The ``h3opt`` command: a thin layer over the public API that starts quickly and prints errors as one line."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator

import typer

from h3opt.cli.bench import bench
from h3opt.cli.console import errors
from h3opt.cli.demo import demo
from h3opt.cli.inspect import explain, passes, profiles
from h3opt.cli.run import run
from h3opt.cli.verify import replay, verify
from h3opt.errors import H3OptError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Faster MiniMax-H3, with proof."
)
for command in (demo, run, verify, replay, bench, explain, passes, profiles):
    app.command()(command)


def main() -> None:
    """Run a command.

    An error of h3opt is printed as one line, and the exit code is 2. An interruption is one line and exit code 130,
    or 143 for SIGTERM. Other exceptions are bugs and keep their traceback.
    """
    terminated: list[int] = []
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # without it, the interpreter's last collection takes three seconds
    try:
        with _other_packages_quiet(), _sigterm_as_interrupt(terminated), _collector_paused():
            code = app(standalone_mode=False)  # the code of typer.Exit, else None
            if code == 130:  # typer caught the interruption and printed nothing
                raise KeyboardInterrupt
    except H3OptError as error:
        errors.print("error: " + " ".join([str(error), *getattr(error, "__notes__", [])]), style="red", soft_wrap=True)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        errors.print("interrupted")  # by now, pipelines are restored and partial files are removed
        sys.exit(143 if terminated else 130)
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's usage errors
            if message := error.format_message():  # empty where the help was printed instead
                errors.print(f"error: {message}", style="red", soft_wrap=True)
            sys.exit(error.exit_code)
        raise
    sys.exit(code or 0)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector: imports make a million objects and no garbage, and collections take three seconds.

    Commands turn it on again when the work begins; at the end it is as it was before.
    """
    collecting, threshold, frozen = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        gc.set_threshold(*threshold)
        (gc.enable if collecting else gc.disable)()


@contextlib.contextmanager
def _other_packages_quiet() -> Iterator[None]:
    """Hide log messages and warnings of other packages; h3opt's own warnings are shown as one line."""
    from h3opt.errors import H3OptWarning

    for package, level in (("diffusers", "critical"), ("transformers", "error")):
        os.environ.setdefault(f"{package.upper()}_VERBOSITY", level)  # read when the package is imported later
        logging.getLogger(package).setLevel(level.upper())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", H3OptWarning)
        warnings.showwarning = lambda message, *_, **__: errors.print(f"warning: {message}", style="yellow")
        yield


@contextlib.contextmanager
def _sigterm_as_interrupt(terminated: list[int]) -> Iterator[None]:
    """End a command at SIGTERM as at Ctrl-C, so that pipelines are restored and partial files removed."""

    def interrupt(number: int, frame: object) -> None:
        terminated.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
