"""The embedded text-to-image model: its architecture, its training pictures and its pre-training stages."""
