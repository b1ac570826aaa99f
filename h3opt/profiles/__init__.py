"""GPU profiles: which passes run on which GPU, with which options, and what was measured to decide it.

A profile is one YAML file. h3opt ships one per GPU (package ``h3opt.configs``); a user may write another. The head of
``configs/h200.yaml`` shows every key with a comment. The schema is strict: a key that nobody reads, a value of the
wrong type or a row that can never be picked is a :class:`~h3opt.errors.ProfileError` that names file, line and field.

YAML is read as YAML 1.2 reads it, because 1.1 has surprises: only ``true`` and ``false`` are booleans (``on``, ``off``,
``yes`` and ``no`` are text), ``1e-3`` is a number, and a date is text until the schema says otherwise. Tags, aliases,
duplicate keys and second documents are refused, so that no file can build objects or expand beyond its own size.
"""

from __future__ import annotations

from h3opt.profiles.parse import parse_profile
from h3opt.profiles.schema import Condition, DeviceMatch, Evidence, PassRow, Profile, Span
from h3opt.profiles.selection import detect_profile, list_profiles, load_profile, match_profile

__all__ = [
    "Condition",
    "DeviceMatch",
    "Evidence",
    "PassRow",
    "Profile",
    "Span",
    "detect_profile",
    "list_profiles",
    "load_profile",
    "match_profile",
    "parse_profile",
]
