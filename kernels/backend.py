"""Which body of an op runs: the PyTorch reference or Triton. Decided per call, from the device and FLOWRL_KERNELS.

FLOWRL_KERNELS=auto   Triton for CUDA tensors where a driver is usable, else the reference; the reason is logged once.
FLOWRL_KERNELS=torch  the reference, everywhere.
FLOWRL_KERNELS=triton Triton or an error. With TRITON_INTERPRET=1 (set before the first kernel call) also on the CPU.

float64 always runs the reference, which is exact there; Triton bodies compute in float32.
"""

from __future__ import annotations

import functools
import logging
import os

import torch

__all__ = ["use_triton"]

logger = logging.getLogger(__name__)
CHOICES = ("auto", "torch", "triton")


def use_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the Triton body should run for tensors on `device` computed in `dtype`.

    Raises ValueError for an unknown FLOWRL_KERNELS and RuntimeError if Triton is demanded but cannot run.
    """
    choice = os.environ.get("FLOWRL_KERNELS", "auto").lower()
    if choice not in CHOICES:
        raise ValueError(f"FLOWRL_KERNELS={choice!r} is not one of {', '.join(CHOICES)}")
    if choice == "torch":
        return False
    obstacle = _obstacle(device, dtype)
    if obstacle is None:
        return True
    if choice == "triton":
        raise RuntimeError(
            f"FLOWRL_KERNELS=triton, but {obstacle}. Use FLOWRL_KERNELS=auto, or set TRITON_INTERPRET=1 to interpret "
            "float32 kernels on the CPU"
        )
    _log_once(obstacle)
    return False


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton cannot run here, or None."""
    if dtype == torch.float64:
        return "float64 inputs are computed by the reference alone"
    if interpreting():
        return _import_obstacle()
    if device.type != "cuda":
        return f"the tensors are on {device.type}, which has no Triton kernels here"
    return driver_obstacle()


def interpreting() -> bool:
    """True if Triton is asked to interpret its kernels, and FLOWRL_KERNELS=triton asks for Triton."""
    return os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("FLOWRL_KERNELS", "").lower() == "triton"


def _import_obstacle() -> str | None:
    """Why Triton cannot be imported, or None."""
    try:
        import triton.backends
        import triton.runtime  # noqa: F401
    except Exception as error:  # a broken install raises anything, and all of it is reported
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    return None


@functools.cache
def driver_obstacle() -> str | None:
    """Why no Triton driver is usable on this machine, or None. One usable driver is enough; several are no fault."""
    if (obstacle := _import_obstacle()) is not None:
        return obstacle
    from triton.backends import backends
    from triton.runtime import driver

    usable, reasons = {}, []
    for name, backend in backends.items():
        try:
            if backend.driver.is_active():
                usable[name] = backend.driver
        except Exception as error:  # one broken driver must not hide another that works
            reasons.append(f"{name} raised {type(error).__name__}: {error}")
    if not usable:
        return "; ".join(["no Triton driver is usable on this machine", *reasons])
    if len(usable) > 1 and "TRITON_DEFAULT_BACKEND" not in os.environ:
        # Triton does not choose between several by itself; take the one that PyTorch was built for.
        wanted = "amd" if torch.version.hip else "nvidia"
        driver.set_active(usable.get(wanted, next(iter(usable.values())))())
    return None


@functools.cache
def _log_once(obstacle: str) -> None:
    logger.info("kernels: PyTorch reference in use, because %s", obstacle)
