"""DPM-Solver++ 2M as published: second order up to the last step but one.

Equal to diffusers' DPMSolverMultistepScheduler (midpoint, flow prediction, final sigma 0) on the same levels, and to
the dpm2 solver of DiffusionNFT's code (arXiv 2509.16117). `dpm2` says why it is not the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flowrl_img.samplers.solvers.dpm2 import DPM2
from flowrl_img.samplers.solvers.table import SolverTable

__all__ = ["DPM2Published"]


@dataclass(frozen=True)
class DPM2Published:
    """`DPM2` with a first-order last step only."""

    name: ClassVar[str] = "dpm2_published"

    def coefficients(self, sigmas: Tensor) -> SolverTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps."""
        return DPM2(first_order_end=1).coefficients(sigmas)
