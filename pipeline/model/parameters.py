"""How many parameters a model has: in all, active per token, and per part."""

from pipeline.config import ModelConfig
from pipeline.model.spec import placeholder_spec
from pipeline.model.transformer import shape_of_model


def count_parameters(
    model: ModelConfig, *, vocabulary_size: int, num_groups: int
) -> dict[str, int]:
    """Parameters by part, built on the meta device.

    ``active`` are those one token meets: of the experts of a layer only ``top_k`` count.
    """
    spec = placeholder_spec(model, vocabulary_size=vocabulary_size, num_groups=num_groups)
    parts = dict.fromkeys(("embeddings", "encoder", "decoder", "experts", "routers"), 0)
    for name, parameter in shape_of_model(spec).named_parameters():
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
