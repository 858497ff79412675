"""RL fine-tuning of diffusion and flow-matching image generators."""

__version__ = "0.1.0"
