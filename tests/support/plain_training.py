"""Updates by plain PyTorch in one process: the reference of every topology."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.batching.batch import Batch
from pipeline.batching.settings import BatchesConfig
from pipeline.config.recipe import Recipe
from pipeline.model.parameters import initialize_weights, named_slices
from pipeline.model.settings import ModelConfig, MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import Regularization
from pipeline.model.transformer import Transformer
from pipeline.seeds import derive_seed
from pipeline.training.settings import LossConfig, OptimizerConfig
from support.tiny_models import perturb_vectors, random_batch, tiny_model

UPDATES = 3
MICRO_BATCHES = 4
LEARNING_RATE = 0.5
BALANCE_WEIGHT = 0.1
IDLE_EXPERT = 7

MOE = MoEConfig(num_experts=8, every=2)


@dataclass
class Trained:
    """Weights of all experts, and per update the gradient's norm and the summed cross entropy."""

    weights: dict[str, Tensor]
    norms: list[float]
    cross_entropies: list[float]
    balances: list[float]


def make_recipe(
    model: ModelConfig, *, clip_norm: float = 0.5, loss: LossConfig | None = None
) -> Recipe:
    return Recipe(
        name="test",
        model=model,
        batches=BatchesConfig(micro_batches=MICRO_BATCHES),
        optimizer=OptimizerConfig(clip_norm=clip_norm),
        loss=loss or LossConfig(balance_weight=BALANCE_WEIGHT),
    )


def micro_batches(spec: ModelSpec, update: int) -> list[Batch]:
    """Micro-batches of very different sizes, each in a target language of its own."""
    batches = []
    for index in range(MICRO_BATCHES):
        batch = random_batch(
            spec, sentences=1 + 2 * index, seed=100 * update + index, longest=4 + 3 * index
        )
        language = torch.full_like(batch.target_language_B, index % len(spec.languages))
        batches.append(replace(batch, target_language_B=language))
    return batches


def set_weights(model: Transformer) -> None:
    """Initial weights under which no token ever chooses one of the experts."""
    initialize_weights(model, seed=1)
    perturb_vectors(model, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("feed_forward_norm.bias"):
            parameter.data.fill_(1.0)
        elif name.endswith(".feed_forward.router.weight"):
            parameter.data[IDLE_EXPERT] = -1.0
        elif name.endswith(".router.group_weight"):
            parameter.data[:, IDLE_EXPERT] = -1.0


def dropout_seeds(update: int, indices: Sequence[int]) -> list[int]:
    return [derive_seed("dropout", 1, update, index) for index in indices]


def plain_training(
    spec: ModelSpec,
    *,
    clip_norm: float = 0.5,
    dropout: float = 0.0,
    updates: int = UPDATES,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> tuple[Trained, Tensor]:
    """One process, plain PyTorch; also returns how many routes each expert got in all."""
    model = tiny_model(spec, regularization=Regularization(dropout, dropout))
    set_weights(model)
    model.train()
    parameters = list(model.parameters())
    if make_optimizer is not None:
        optimizer = make_optimizer(parameters)
    else:
        optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    trained = Trained({}, [], [], [])
    routed_E = torch.zeros(1 if spec.model.moe is None else spec.model.moe.num_experts)
    for update in range(updates):
        batches = micro_batches(spec, update)
        total_labels = sum(len(batch.labels_L) for batch in batches)
        optimizer.zero_grad()
        objectives, cross_entropies, balances = [], [], []
        for batch, seed in zip(batches, dropout_seeds(update, range(MICRO_BATCHES)), strict=True):
            output = model(batch.keyed(seed))
            cross_entropy = F.cross_entropy(output.logits_LV, batch.labels_L, reduction="sum")
            balance = torch.zeros(())
            for record in output.routing:
                balance = balance + record.balance_loss
                routed_E += record.routed_E
            weighted = balance * len(batch.labels_L)
            objectives.append(cross_entropy + BALANCE_WEIGHT * weighted)
            cross_entropies.append(cross_entropy.item())
            balances.append(weighted.item())
        (sum(objectives, torch.zeros(())) / total_labels).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        trained.norms.append(norm.item())
        trained.cross_entropies.append(sum(cross_entropies))
        trained.balances.append(sum(balances))
        optimizer.step()
    trained.weights = {entry.name: entry.value.clone() for entry in named_slices(model)}
    return trained, routed_E
