"""Named seeds: every random choice of the project draws from a generator derived from its name."""

import hashlib

import torch


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed from names and numbers; the same on every machine, rank and run."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def named_generator(*parts: str | int) -> torch.Generator:
    """A CPU generator seeded by :func:`derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(*parts))
