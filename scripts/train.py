"""`accelerate launch [its options] scripts/train.py [RECIPE] [key=value ...]`: the arguments of `flowrl-img train`."""

import sys

from flowrl_img.cli import main
from flowrl_img.launch import restart_dropped_processes

if __name__ == "__main__":
    try:
        restart_dropped_processes(__file__, sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    main(["train", *sys.argv[1:]])
