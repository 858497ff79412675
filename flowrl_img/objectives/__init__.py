"""Objectives: pure functions of moments and advantages, one file each. See docs/extending.md."""
