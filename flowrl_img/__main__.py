"""`python -m flowrl_img`: the same as `flowrl-img`."""

from flowrl_img.cli import main

main()
