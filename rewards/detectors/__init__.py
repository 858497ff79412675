"""Detectors by file name; each file exports one class that finds objects and, where it can, names their colours."""
