"""`accelerate launch [its options] scripts/train.py [RECIPE] [key=value ...]`: the arguments of `flowrl-img train`."""

import sys

from flowrl_img.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
