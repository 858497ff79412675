"""Several CPU processes behind `accelerate launch --cpu --num_processes N`.

accelerate starts torchrun for several GPUs, but for several CPU processes it only does so through MPI: without a host
file it starts one process and says nothing. Its traces are recognised here, and torchrun is started in its place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

__all__ = ["dropped_processes", "processes_asked", "restart_dropped_processes"]


def restart_dropped_processes(script: str, arguments: Sequence[str]) -> None:
    """Replace this process by torchrun with the number of processes that was asked for; return if none was dropped."""
    import psutil

    count = dropped_processes(os.environ, lambda: psutil.Process(os.getppid()).cmdline())
    if count > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        os.execv(sys.executable, [sys.executable, *launcher, script, *arguments])


def dropped_processes(environment: Mapping[str, str], parent_command: Callable[[], Sequence[str]]) -> int:
    """Processes that accelerate was asked for and did not start; 0 if nothing was dropped.

    accelerate leaves MASTER_ADDR for more than one process; a launcher that starts them sets WORLD_SIZE too.
    Raises ValueError when the number stands nowhere on the command line that started this process.
    """
    on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    if not on_cpu or "MASTER_ADDR" not in environment or "WORLD_SIZE" in environment:
        return 0
    count = processes_asked(parent_command())
    if count is None:
        raise ValueError(
            "accelerate started one CPU process where its configuration asks for several: "
            "give --num_processes N on the command line, or use torchrun --nproc_per_node N scripts/train.py"
        )
    return count


def processes_asked(command: Sequence[str]) -> int | None:
    """N of `--num_processes N`, in any of accelerate's spellings; None if it is not there."""
    for word, following in zip(command, [*command[1:], ""]):
        flag, _, value = word.replace("-", "_").partition("=")
        if flag == "__num_processes":
            value = value or following
            return int(value) if value.isdecimal() else None
    return None
