"""Weights and training state by name, and what can be made of them without training."""
