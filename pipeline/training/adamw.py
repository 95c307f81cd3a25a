"""AdamW as PyTorch has it, without loading PyTorch's compiler.

``torch.optim`` wraps what its optimizers do so that ``torch.compile`` leaves it alone, and loads
the compiler to do so: a second at the start of every process, for what is never compiled here.
This class calls the same functions without the wrapping (torch 2.13; where a version has none,
they are what they are).
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

_ADD_PARAM_GROUP = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_STEP = inspect.unwrap(torch.optim.AdamW.step)


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, bit for bit."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _ADD_PARAM_GROUP(self, param_group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; ``closure`` computes the loss anew."""
        with torch.no_grad():
            loss: float | None = _STEP(self, closure)
        return loss
