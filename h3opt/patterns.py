"""Chains of operators that several passes look for, as MiniMax-H3 spells them, and the conditions they share."""

from __future__ import annotations

import torch

aten = torch.ops.aten
