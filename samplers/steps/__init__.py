"""Step rules: one file each. A rule turns a sigma grid into the scalars (A, B, std) of every step."""
