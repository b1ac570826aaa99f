"""Select a profile: by name, by path, or by the GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import torch

from h3opt.errors import DeviceError, H3OptError, PassOptionError, ProfileError, nearest
from h3opt.pass_api.base import Pass
from h3opt.pass_api.registry import list_passes, make_pass
from h3opt.profiles.messages import escape_unprintable, quote_clipped
from h3opt.profiles.parse import MAX_BYTES, parse_profile
from h3opt.profiles.schema import PassRow, Profile


def load_profile(name_or_path: str | os.PathLike[str]) -> Profile:
    """Read a profile.

    A row of a pass that is not installed is accepted: it may be meant for another machine, and ``optimize`` refuses it
    if the row is selected.

    Args:
        name_or_path: the name of a shipped profile (``"h200"``), or a YAML file. A string is a path when it holds a
            path separator or ends in .yaml or .yml; an ``os.PathLike`` always is.

    Raises:
        ProfileError: there is no such profile, the file cannot be read, :func:`~h3opt.profiles.parse.parse_profile`
            refuses the text, or a pass refuses the options of a row.
    """
    if isinstance(name_or_path, str) and not _looks_like_path(name_or_path):
        profile = _load_shipped(name_or_path)
    else:
        path = Path(name_or_path)
        profile = parse_profile(_read_file(path), escape_unprintable(str(path)))
    _check_options(profile)
    return profile


def make_row_pass(profile: Profile, row: PassRow) -> Pass:
    """Create the pass of a row of ``profile`` with the options of the row.

    Raises:
        ProfileError: there is no such pass, or it refuses the options; the message names file, line and field.
    """
    try:
        return make_pass(row.name, row.options)
    except H3OptError as error:
        field = "options" if isinstance(error, PassOptionError) else "pass"
        raise ProfileError(f"{profile.locate(row, field)}: {error}") from error


def list_profiles() -> list[Profile]:
    """Return all shipped profiles, sorted by name.

    Raises:
        ProfileError: a shipped file is damaged.
    """
    return [_load_shipped(name) for name in _shipped_files()]


def detect_profile(device: torch.device | str | None = None) -> tuple[Profile, str | None]:
    """Select the shipped profile for a device.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ...; ``None`` is the current CUDA device where there is one, else
            the CPU.

    Returns:
        The profile, and a sentence for the user when it is not an exact fit, else ``None``.

    Raises:
        DeviceError: the device is absent, or neither a CPU nor an NVIDIA GPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"{device!r} is not a device torch knows. Write 'cpu', 'cuda' or 'cuda:0'.") from error
    if device.type == "cpu":
        return _load_shipped("cpu"), None
    if device.type != "cuda":
        raise DeviceError(
            f"There are no profiles for {device.type!r} devices. Use 'cpu' or 'cuda', or name a profile yourself."
        )
    # ROCm devices are called "cuda" too, and their gfx numbers would pass for NVIDIA capabilities.
    if torch.version.hip is not None:
        raise DeviceError("There are no profiles for AMD GPUs. Name a profile yourself, or use a CUDA build of torch.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise DeviceError(
            f"torch sees {count} CUDA devices, so there is no '{device}'. Use another index, or device='cpu'."
        )
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return match_profile(list_profiles(), name, capability)


def match_profile(profiles: Iterable[Profile], name: str, capability: tuple[int, int]) -> tuple[Profile, str | None]:
    """Select the CUDA profile that fits a GPU best.

    The first choice is a profile with a ``device.match`` entry that occurs in ``name`` as whole words, in any case; of
    several, the longest entry. So "NVIDIA H200 NVL" is an H200; "NVIDIA GH200 480GB" is not, and is matched by
    capability, because some GH200 carry the memory of an H100 and some that of an H200.

    The second choice is the highest capability at or below that of the GPU; of several, the profile with most measured
    rows, then the first by name. A GPU older than every profile gets the profile of the lowest capability.

    Args:
        profiles: the candidates.
        name: as ``torch.cuda.get_device_name`` returns it.
        capability: (major, minor).

    Returns:
        The profile, and a notice when it is not an exact fit, else ``None``.

    Raises:
        ProfileError: ``profiles`` has none for CUDA.
    """
    candidates = sorted((p for p in profiles if p.device.type == "cuda"), key=_by_measurements)
    if not candidates:
        raise ProfileError("None of the profiles is for CUDA. Add one with 'device: {type: cuda, ...}'.")
    version = f"{capability[0]}.{capability[1]}"

    lengths = [(max((len(m) for m in p.device.match if _has_words(name, m)), default=0), p) for p in candidates]
    length, named = max(lengths, key=lambda pair: pair[0])
    if length:
        if named.device.sm == capability:
            return named, None
        return named, (
            f"{name!r} reports capability {version}, but profile {named.name!r}, which names it, is for "
            f"{named.device.capability}: using that profile."
        )

    below = [p for p in candidates if p.device.sm <= capability]
    if below:
        nearest_below = max(below, key=lambda p: p.device.sm)
        return nearest_below, (
            f"No profile names {name!r} (capability {version}): using {nearest_below.name!r}, the nearest at "
            "or below that capability. Its rows were chosen for another GPU."
        )
    lowest = min(candidates, key=lambda p: p.device.sm)
    return lowest, (
        f"No profile is for capability {version} or lower ({name!r}): using {lowest.name!r}, the lowest "
        "there is. Passes that need newer hardware will decline."
    )


def _looks_like_path(name: str) -> bool:
    separators = os.sep + (os.altsep or "")
    return any(s in name for s in separators) or name.lower().endswith((".yaml", ".yml"))


def _shipped_files() -> dict[str, Traversable]:
    files = (f for f in resources.files("h3opt.configs").iterdir() if f.name.endswith(".yaml"))
    return {f.name.removesuffix(".yaml"): f for f in sorted(files, key=lambda f: f.name)}


def _load_shipped(name: str) -> Profile:
    files = _shipped_files()
    if name not in files:
        raise ProfileError(
            f"There is no profile {quote_clipped(name)}{nearest(name[:80], files)}. Shipped: {', '.join(files)}. "
            "For a file of your own, give its path, ending in .yaml."
        )
    return parse_profile(files[name].read_bytes(), str(files[name]))


def _read_file(path: Path) -> bytes:
    shown = escape_unprintable(str(path))
    try:
        if path.is_dir():
            raise ProfileError(f"{shown}: is a directory. Name the .yaml file in it.")
        if not path.exists():
            shipped = _shipped_files()
            raise ProfileError(
                f"{shown}: there is no such file. Check the path, or name a shipped profile"
                f"{nearest(path.stem[:80], shipped)}: {', '.join(shipped)}."
            )
        # Reading a pipe would block, and reading a device might never end.
        if not path.is_file():
            raise ProfileError(f"{shown}: is not a regular file. Name a .yaml file.")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL or a lone surrogate in the path
        reason = (error.strerror if isinstance(error, OSError) else None) or "the path is malformed"
        raise ProfileError(f"{shown}: cannot be read ({reason}). Check the path and its permissions.") from error


def _check_options(profile: Profile) -> None:
    known = {cls.name for cls in list_passes()}
    for row in profile.passes:
        if row.name in known:
            make_row_pass(profile, row)


def _by_measurements(profile: Profile) -> tuple[int, str]:
    """Return the sort key among profiles that fit equally well: most measurements first, then the name."""
    return -sum(row.measured for row in profile.passes), profile.name


def _has_words(name: str, words: str) -> bool:
    return re.search(rf"(?<![0-9a-z]){re.escape(words)}(?![0-9a-z])", name, re.IGNORECASE) is not None
