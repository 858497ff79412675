"""Import and help time of the command line: median of 5 fresh interpreters, start of the interpreter subtracted.

Prints seconds and the ratio to the interpreter's own start. The tests assert what is imported, never seconds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 5
CASES = {
    "import flowrl_img": (["-c", "import flowrl_img"], 0.1),
    "flowrl-img --help": (["-m", "flowrl_img", "--help"], 1.0),
    "flowrl-img recipes list": (["-m", "flowrl_img", "recipes", "list"], None),
}


def seconds(arguments: list[str]) -> float:
    """Median wall time of `python arguments`."""
    times = []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first run fills the file cache


def main() -> None:
    start = seconds(["-c", "pass"])
    print(f"{'interpreter start':<26}{start:7.3f} s")
    for name, (arguments, target) in CASES.items():
        took = seconds(arguments) - start
        wanted = "" if target is None else f"   target below {target} s"
        print(f"{name:<26}{took:7.3f} s {took / start:7.1f} x start{wanted}")


if __name__ == "__main__":
    main()
