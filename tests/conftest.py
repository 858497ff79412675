"""Fixtures shared by the tests of all rooms."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class GoldenCase:
    """One run of a reference implementation. Example: `case["x"]`, `case.check("mean", mean)`."""

    scalars: dict[str, Any]
    tensors: dict[str, Any]
    tolerance: dict[str, tuple[float, float]]

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    def check(self, name: str, actual: Any) -> None:
        """Assert |actual - stored| <= atol + rtol |stored|, with the tolerance stored beside the numbers."""
        import torch

        rtol, atol = self.tolerance[name]
        torch.testing.assert_close(actual.double(), self.tensors[name].double(), rtol=rtol, atol=atol)


@pytest.fixture(scope="session")
def golden() -> Callable[[str, str], GoldenCase]:
    """golden(file, case): one case of tests/golden/<file>.safetensors."""

    def load(file: str, case: str) -> GoldenCase:
        from safetensors import safe_open

        with safe_open(GOLDEN / f"{file}.safetensors", framework="pt") as stored:
            facts = json.loads(stored.metadata()["cases"])[case]
            names = [key for key in stored.keys() if key.startswith(f"{case}/")]  # noqa: SIM118 - not a mapping
            tensors = {key.removeprefix(f"{case}/"): stored.get_tensor(key) for key in names}
        return GoldenCase(facts["scalars"], tensors, {k: (v[0], v[1]) for k, v in facts["tolerance"].items()})

    return load
