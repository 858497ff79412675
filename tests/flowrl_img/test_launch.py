import subprocess
import sys
from pathlib import Path

import pytest

from flowrl_img.launch import dropped_processes, processes_asked

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"
DROPPED = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}
COMMAND = ["python", "accelerate", "launch", "--cpu", "--num_processes", "2", "scripts/train.py", "pico"]


@pytest.mark.parametrize(
    ("command", "count"),
    [
        (COMMAND, 2),
        (["accelerate", "launch", "--num_processes=3", "train.py"], 3),
        (["accelerate", "launch", "--num-processes", "4", "train.py"], 4),
        (["accelerate", "launch", "train.py"], None),
        (["accelerate", "launch", "--num_processes"], None),
        (["accelerate", "launch", "--num_processes", "many"], None),
    ],
)
def test_the_number_of_processes_is_read_from_the_command(command, count):
    assert processes_asked(command) == count


def test_processes_that_accelerate_dropped_are_counted():
    assert dropped_processes(DROPPED, lambda: COMMAND) == 2


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"ACCELERATE_USE_CPU": "True"},
        {"MASTER_ADDR": "127.0.0.1"},
        {**DROPPED, "WORLD_SIZE": "2"},
        {**DROPPED, "ACCELERATE_USE_CPU": "False"},
    ],
    ids=str,
)
def test_nothing_is_restarted_where_nothing_was_dropped(environment):
    assert dropped_processes(environment, lambda: COMMAND) == 0


def test_a_number_that_stands_in_a_configuration_file_alone_is_asked_for():
    with pytest.raises(ValueError, match="give --num_processes N on the command line"):
        dropped_processes(DROPPED, lambda: ["accelerate", "launch", "train.py"])


def test_accelerate_launch_on_cpu_starts_as_many_processes_as_asked():
    """The two launchers and two interpreters with torch take most of the time."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", str(SCRIPT)]
    run = subprocess.run(
        [*command, "pico", "rollout.groups=8", "--dry-run"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("48 pictures in each of 2") == 1
