"""What h3opt is compared with."""

from __future__ import annotations

PEERS = {"compile": "compile", "torchao fp8 + compile": "torchao"}
"""The peers by the names they have in the table."""
