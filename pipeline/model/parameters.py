"""How many parameters a model has: in all, active per token, and per part."""

import torch

from pipeline.config import ModelConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer


def count_parameters(
    model: ModelConfig, *, vocabulary_size: int, num_groups: int
) -> dict[str, int]:
    """Parameters by part, built on the meta device.

    ``active`` are those one token meets: of the experts of a layer only ``top_k`` count.
    """
    groups = tuple(range(num_groups)) if num_groups else None
    spec = ModelSpec(
        model=model,
        vocabulary_size=vocabulary_size,
        pad_id=0,
        languages=tuple(f"l{index}" for index in range(max(num_groups, 1))),
        language_groups=groups,
    )
    with torch.device("meta"):
        transformer = Transformer(spec)
    parts = dict.fromkeys(("embeddings", "encoder", "decoder", "experts", "routers"), 0)
    for name, parameter in transformer.named_parameters():
        parts[_part(name)] += parameter.numel()
    total = sum(parts.values())
    idle = 0
    if model.moe is not None:
        idle = parts["experts"] * (model.moe.num_experts - model.moe.top_k)
        idle //= model.moe.num_experts
    return {"total": total, "active": total - idle, **parts}


def _part(name: str) -> str:
    if ".experts." in name:
        return "experts"
    if ".router." in name:
        return "routers"
    first = name.split(".")[0]
    return {"embedding": "embeddings", "front": "encoder"}.get(first, first)
