"""``h3opt.optimize``: install passes on a pipeline in place, with a handle to uninstall them again."""

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
    """Install passes on a MiniMax-H3 pipeline, or on one of its models, in place.

    A second call on the same pipeline replaces what the first call installed. Graphs are captured at the first
    generation; after it, ``report`` has the number of sites of each pass and the results of probes.

    Args:
        target: a diffusers MiniMax-H3 pipeline with components loaded, its transformer, or one of its VAEs.
        passes: pass names or instances, in any order; ``None`` for the passes that the profile turns on, ``[]`` for
            none. A pass given by name takes its options from the row of the profile, if there is one.
        profile: a shipped name, a path, a :class:`~h3opt.profiles.schema.Profile`, or ``"auto"`` to choose by the
            device.
        executor: ``"direct"`` or ``"inductor"``; overrides the profile, as the next three arguments do.
        scope: ``"block"`` or ``"model"``: what a captured graph spans.
        on_shortfall: ``"error"`` or ``"warn"``: what happens if a pass matches fewer sites than it expects.
        probe: whether Exact and Rounding rewrites are checked on this machine.
        tokens: length of the packed sequence, for profile rows that depend on it, see
            :func:`h3opt.pipeline.sequence_length.sequence_length`. Without it such rows do not apply.
        world_size: number of GPUs, for profile rows that depend on it.
        restorable: ``False`` frees weights that FP8 replaces instead of keeping them in host memory, 40 GB for H3's
            transformer. The pipeline then cannot be restored or optimized again, nor used in a ``with`` block.

    Returns:
        a handle with ``report`` and ``restore()``; it is a context manager too.

    Raises:
        H3OptError: a pass, an option or the profile is bad, or a pass refused. The pipeline is unmodified; with
            ``restorable=False`` a note on the error says if weights are lost.
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
    """Resolve the arguments of :func:`optimize` without a change to the pipeline.

    Returns:
        a session, and the passes to install in it.

    Raises:
        H3OptError: an argument is unknown or contradicts another.
    """
    chosen, notice = _choose_profile(profile, PipelineView.of(target))
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
    """Uninstall the sessions of these components, and install them again if the body fails, or always.

    With ``restorable=False`` the body may have freed weights that the sessions need; then they are not installed again.

    Args:
        view: the components.
        always_back: install the sessions again when the body succeeds too.

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
    """The handle of an optimized pipeline. Leaving the ``with`` block, or :meth:`restore`, uninstalls the passes."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def report(self) -> Report:
        """What each pass has done so far."""
        return self._session.report()

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that were asked for, in running order."""
        return self._session.passes

    def restore(self) -> None:
        """Uninstall all passes; the pipeline is unmodified again, bit for bit. A second call does nothing.

        Raises:
            PipelineError: the pipeline was optimized with ``restorable=False``; it stays as it is.
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


def check_choices(settings: dict[str, str]) -> None:
    """Check values of ``executor``, ``scope`` and ``on_shortfall``.

    Raises:
        PassOptionError: a value is not a choice.
    """
    choices = {"executor": tuple(EXECUTORS), "scope": ("block", "model"), "on_shortfall": ("error", "warn")}
    for name, chosen in settings.items():
        if chosen not in choices[name]:
            listed = " or ".join(repr(choice) for choice in choices[name])
            raise PassOptionError(
                f"{name}={chosen!r} is not a choice{nearest(str(chosen), choices[name])}. Use {listed}."
            )


def _choose_profile(profile: str | Profile, view: PipelineView) -> tuple[Profile, str | None]:
    if isinstance(profile, Profile):
        return profile, None
    if profile == "auto":
        return detect_profile(view.weights_device)
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
    for item in passes:
        if isinstance(item, Pass):
            instances.append(item)
            continue
        if not isinstance(item, str):
            if isinstance(item, type):
                raise PassOptionError(f"{item!r} is not a pass. Make an instance: {item.__name__}().")
            raise PassOptionError(f"{item!r} is not a pass. Give its name or an instance.")
        name = current_name(item)
        chosen = rows.get(name)
        instances.append(make_pass(name) if chosen is None else make_row_pass(profile, chosen))
    return instances
