"""Derive every random generator of the project from a name."""

import hashlib

import torch


def derive_seed(*parts: str | int) -> int:
    """Derive a 63-bit seed from names and numbers, the same on every machine, rank and run."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def named_generator(*parts: str | int) -> torch.Generator:
    """Return a CPU generator seeded by :func:`derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(*parts))
