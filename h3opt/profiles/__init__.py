"""GPU profiles: which passes run on which GPU, with which options, and the measurements behind this choice.

A profile is a YAML file. h3opt ships a profile for each supported GPU (package ``h3opt.configs``); a user can write
others. The head of ``configs/h200.yaml`` shows every key with a comment. The schema is strict: an unknown key, a value
of the wrong type or a row that can never be selected is a :class:`~h3opt.errors.ProfileError` that names file, line and
field.

YAML is read by the rules of YAML 1.2, because those of 1.1 surprise: only ``true`` and ``false`` are booleans (``on``,
``off``, ``yes`` and ``no`` are text), ``1e-3`` is a number, and a date is text until the schema converts it. Tags,
aliases, duplicate keys and second documents are refused, so that no file can construct objects or grow in memory
beyond its size.
"""

from __future__ import annotations

from h3opt.profiles.parse import parse_profile
from h3opt.profiles.schema import Condition, DeviceMatch, Measurement, PassRow, Profile, Span
from h3opt.profiles.selection import detect_profile, list_profiles, load_profile, match_profile

__all__ = [
    "Condition",
    "DeviceMatch",
    "Measurement",
    "PassRow",
    "Profile",
    "Span",
    "detect_profile",
    "list_profiles",
    "load_profile",
    "match_profile",
    "parse_profile",
]
