"""The command line: thin over the public API, quick to start, and without tracebacks for errors a user can mend."""

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
    """Entry point: run a command; errors of ours become one line and exit code 2, interruptions one line and 130."""
    terminated: list[int] = []
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # the interpreter's last collection looks through everything once more: three seconds
    try:
        with _quiet(), _terminable(terminated), _uncollected_imports():
            code = app(standalone_mode=False)  # what typer.Exit was raised with, else None
            if code == 130:  # typer has caught it, and says nothing
                raise KeyboardInterrupt
    except H3OptError as error:
        errors.print("error: " + " ".join([str(error), *getattr(error, "__notes__", [])]), style="red", soft_wrap=True)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        errors.print("interrupted")  # pipelines are restored and partial files gone on the way here
        sys.exit(143 if terminated else 130)
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's usage errors
            if message := error.format_message():  # without arguments the help is all there is to say
                errors.print(f"error: {message}", style="red", soft_wrap=True)
            sys.exit(error.exit_code)
        raise
    sys.exit(code or 0)


@contextlib.contextmanager
def _uncollected_imports() -> Iterator[None]:
    """Importing makes a million objects and no garbage; looking through them again and again takes three seconds."""
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
def _quiet() -> Iterator[None]:
    """Keep other packages' chatter off the screen; warnings of ours stay."""
    from h3opt.errors import H3OptWarning

    for package, level in (("diffusers", "critical"), ("transformers", "error")):
        os.environ.setdefault(f"{package.upper()}_VERBOSITY", level)  # read when it is imported, later
        logging.getLogger(package).setLevel(level.upper())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", H3OptWarning)
        warnings.showwarning = lambda message, *_, **__: errors.print(f"warning: {message}", style="yellow")
        yield


@contextlib.contextmanager
def _terminable(terminated: list[int]) -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, with everything tidied up; by itself it would end Python at once."""

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
