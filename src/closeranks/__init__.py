"""Distributed training for PyTorch that closes ranks when a worker falls."""

__version__ = "0.1.0"
