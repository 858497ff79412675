"""Solvers: one file each. A solver turns a sigma grid into the scalars of every step, for rollouts without log-prob."""
