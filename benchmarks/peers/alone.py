"""No communication: what a step takes that exchanges nothing; the twin that shows that an exchange is seen."""

from __future__ import annotations

import on_torch

on_torch.train(*on_torch.build())
