"""Install passes on a pipeline in place, and take every one of them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from h3opt.compiler.executors import EXECUTORS
from h3opt.compiler.report import Report
from h3opt.compiler.session import Session, session_of
from h3opt.errors import PassOptionError, PipelineError, ProfileError, nearest
from h3opt.pass_api.base import Pass
from h3opt.pass_api.ordering import in_order
from h3opt.pass_api.registry import current_name, make_pass
from h3opt.pipeline.view import PipelineView
from h3opt.profiles.schema import PassRow, Profile
from h3opt.profiles.selection import detect_profile, load_profile, make_row_pass


def optimize(
    target: Any,
    passes: Iterable[str | Pass] | None = None,
    profile: str | Profile = "auto",
    *,
    executor: str | None = None,
    scope: str | None = None,
    on_shortfall: str | None = None,
    probe: bool | None = None,
    tokens: int | None = None,
    world_size: int = 1,
    restorable: bool = True,
) -> Optimized:
    """Make a MiniMax-H3 pipeline, or one of its models, run through h3opt. It is changed in place.

    Calling it again on the same pipeline replaces what the earlier call installed. Graphs are captured at the first
    generation: what is only known then (how often a pass fired, a shortfall, a probe) is in ``report`` after it.

    Args:
        target: a diffusers MiniMax-H3 pipeline with components loaded, its transformer, or one of its VAEs.
        passes: pass names or instances, in any order; ``None`` for what the profile turns on, ``[]`` for none. A name
            takes its options from the profile's row for it, if there is one.
        profile: a shipped name, a path, a :class:`~h3opt.profiles.schema.Profile`, or ``"auto"`` to go by the device.
        executor: ``"direct"`` or ``"inductor"``; overrides the profile, as the next three do.
        scope: ``"block"`` or ``"model"``: what one graph spans.
        on_shortfall: ``"error"`` or ``"warn"``.
        probe: whether rewrites are proven again on this machine.
        tokens: length of the packed sequence, for profile rows that depend on it.
        world_size: number of GPUs, likewise.
        restorable: ``False`` frees weights that FP8 replaces instead of keeping them in host memory, 40 GB of H3's
            transformer. The pipeline then cannot be restored or optimized again, nor used in a ``with`` block.

    Returns:
        A handle with ``report`` and ``restore()``; also a context manager.

    Raises:
        H3OptError: and the pipeline is as it was; with ``restorable=False`` a note says if weights are gone already.
    """
    session, instances = prepare(
        target,
        passes,
        profile,
        executor=executor,
        scope=scope,
        on_shortfall=on_shortfall,
        probe=probe,
        tokens=tokens,
        world_size=world_size,
        restorable=restorable,
    )
    with temporarily_uninstalled(session.view):
        session.install(instances)
    return Optimized(session)


def prepare(
    target: Any,
    passes: Iterable[str | Pass] | None,
    profile: str | Profile,
    *,
    executor: str | None = None,
    scope: str | None = None,
    on_shortfall: str | None = None,
    probe: bool | None = None,
    tokens: int | None = None,
    world_size: int = 1,
    restorable: bool = True,
) -> tuple[Session, tuple[Pass, ...]]:
    """Resolve what :func:`optimize` was asked for, and touch nothing yet.

    Returns:
        A session, and the passes to install in it.

    Raises:
        H3OptError: anything asked for is unknown or contradictory.
    """
    view = PipelineView.of(target)
    chosen, notice = _choose_profile(profile, view)
    settings = {
        "executor": executor or chosen.executor,
        "scope": scope or chosen.scope,
        "on_shortfall": on_shortfall or chosen.on_shortfall,
    }
    check_choices(settings)
    session = Session(
        PipelineView.of(target, settings["scope"], restorable),
        profile=chosen.name,
        executor=settings["executor"],
        on_shortfall=settings["on_shortfall"],
        probe=chosen.probe if probe is None else probe,
    )
    if notice:
        session.notices.append(notice)
    return session, in_order(_choose_passes(passes, chosen, tokens, world_size))


@contextmanager
def temporarily_uninstalled(view: PipelineView, always_back: bool = False) -> Iterator[None]:
    """Take off what is installed on these components, and put it back if the body fails (or in any case).

    Not where the body may have freed the weights that it would need: a note on the error says so.

    Raises:
        PipelineError: a component belongs to another optimized pipeline, or to one that cannot be restored.
    """
    earlier = {session for module in view.modules if (session := session_of(module)) is not None}
    for session in earlier:
        session.check_restorable()
        if session.view.pipe is not None and session.view.pipe is not view.pipe:
            raise PipelineError(
                "A component of this pipeline is part of another optimized pipeline. Call restore() on that one "
                "first, or give each pipeline its own copy."
            )
    for session in earlier:
        session.uninstall()
    back = True
    try:
        yield
        back = always_back
    finally:
        if back and view.restorable:
            for session in earlier:
                session.install(session.passes)


class Optimized:
    """A pipeline with passes installed. Leave the ``with`` block, or call :meth:`restore`, to take them back."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def report(self) -> Report:
        """What each pass did so far."""
        return self._session.report()

    @property
    def active(self) -> bool:
        """Whether the passes are still installed."""
        return self._session.installed

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes asked for, in the order they run."""
        return self._session.passes

    def restore(self) -> None:
        """Give back the unmodified pipeline, bit for bit. A second call does nothing.

        Raises:
            PipelineError: it was optimized with ``restorable=False``; it stays as it is.
        """
        self._session.check_restorable()
        self._session.uninstall()

    def __enter__(self) -> Optimized:
        self._session.check_restorable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def _choose_profile(profile: str | Profile, view: PipelineView) -> tuple[Profile, str | None]:
    if isinstance(profile, Profile):
        return profile, None
    if profile == "auto":
        return detect_profile(next(view.modules[0].parameters()).device)
    return load_profile(profile), None


def _choose_passes(
    passes: Iterable[str | Pass] | None, profile: Profile, tokens: int | None, world_size: int
) -> list[Pass]:
    if isinstance(passes, str):
        raise PassOptionError(f"passes is one name, not a list. Write passes=[{passes!r}].")
    rows: dict[str, PassRow] = {}
    for row in profile.rows_for(tokens, world_size):
        name = current_name(row.name)
        if name in rows:
            raise ProfileError(
                f"{profile.locate(row, 'pass')}: {row.name!r} and {rows[name].name!r} are names of the same pass. "
                "Keep the rows of one name."
            )
        rows[name] = row
    if passes is None:
        passes = [name for name, row in rows.items() if row.enabled]
    instances = []
    for one in passes:
        if isinstance(one, Pass):
            instances.append(one)
            continue
        if not isinstance(one, str):
            hint = f"Make an instance: {one.__name__}()." if isinstance(one, type) else "Give its name or an instance."
            raise PassOptionError(f"{one!r} is not a pass. {hint}")
        name = current_name(one)
        chosen = rows.get(name)
        instances.append(make_pass(name) if chosen is None else make_row_pass(profile, chosen))
    return instances


def check_choices(settings: dict[str, str]) -> None:
    choices = {"executor": tuple(EXECUTORS), "scope": ("block", "model"), "on_shortfall": ("error", "warn")}
    for name, chosen in settings.items():
        if chosen not in choices[name]:
            listed = " or ".join(repr(choice) for choice in choices[name])
            raise PassOptionError(
                f"{name}={chosen!r} is not a choice{nearest(str(chosen), choices[name])}. Use {listed}."
            )
