"""Training as a PyTorch user writes it without a framework: the peer of an update.

Weights in bfloat16, master weights and sums of gradients in float32, PyTorch's fused AdamW, and one
pass per micro-batch.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pipeline.batching.batch import Batch
from pipeline.model.transformer import Transformer
from pipeline.training.losses import training_loss
from pipeline.training.settings import LossConfig


def plain_loop(
    model: Transformer, loss: LossConfig, *, learning_rate: float, clip_norm: float
) -> Callable[[Sequence[Batch]], None]:
    """Return a function that makes one update from micro-batches on the model's device."""
    parameters: list[Tensor] = [*model.train().parameters()]
    masters: list[Tensor] = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    sums = [torch.zeros_like(master) for master in masters]
    for master, total in zip(masters, sums, strict=True):
        master.grad = total
    optimizer = torch.optim.AdamW(masters, lr=learning_rate, fused=True)

    def update(batches: Sequence[Batch]) -> None:
        labels = sum(batch.num_labels for batch in batches)
        torch._foreach_zero_(sums)
        for batch in batches:
            (training_loss(model, batch, loss).objective / labels).backward()
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_add_(sums, gradients)
            model.zero_grad(set_to_none=True)
        nn.utils.clip_grad_norm_(masters, clip_norm)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)

    return update
