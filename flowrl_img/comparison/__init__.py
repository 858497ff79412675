"""Algorithms at equal cost on the embedded model: what is run, the journal of it, what is measured, the report."""
