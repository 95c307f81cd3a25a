"""Reduce language-group routers to one group, for formats without groups.

A language-group router averages W x and W_g x (MMNMT, eq. 1). For one group g that is an ordinary
router with W' = (W + W_g) / 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pipeline.checkpoints.checkpoint import ModelSource
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.weights import Tensors
from pipeline.errors import ConfigError
from pipeline.languages import find_code
from pipeline.model.spec import ModelSpec


@dataclass(frozen=True)
class OneGroupTensors:
    """The tensors of a model with language-group routers, reduced to one group."""

    tensors: Tensors
    group: int
    group_weights: Mapping[str, str]
    """Name of a router's weight → name of the stacked weights of its groups."""

    @property
    def origin(self) -> Path:
        """Return the checkpoint that holds the tensors."""
        return self.tensors.origin

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(set(self.tensors.names()) - set(self.group_weights.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.tensors.shape(name)

    def read(self, name: str) -> Tensor:
        """Return one tensor; a router has the weight of the group."""
        value = self.tensors.read(name)
        if name not in self.group_weights:
            return value
        return (value + self.tensors.read(self.group_weights[name])[self.group]) / 2


def of_one_group(source: ModelSource, group: int) -> ModelSource:
    """Return the model that translates into the languages of one group only."""
    assert source.spec.model.moe is not None
    moe = source.spec.model.moe.model_copy(update={"decoder_router": "token", "num_groups": None})
    model = source.spec.model.model_copy(update={"moe": moe})
    spec = source.spec.model_copy(update={"model": model, "language_groups": None})
    of_groups = tensor_shapes(source.spec).keys() - tensor_shapes(spec).keys()
    weights = {name.removesuffix("group_weight") + "weight": name for name in of_groups}
    tensors = OneGroupTensors(source.tensors, group, weights)
    return ModelSource(spec, source.tokenizer, tensors, source.record)


def chosen_group(origin: Path, spec: ModelSpec, choice: str) -> int:
    """Return the group that ``--target-group`` names by its number or by a language.

    Raises:
        ConfigError: The model has no groups, or no such group or language.
    """
    if spec.language_groups is None:
        raise ConfigError(f"{origin} has no language groups. Leave out --target-group.")
    if choice.isdecimal():
        if int(choice) >= spec.num_groups:
            raise ConfigError(
                f"--target-group {choice}: {origin} has the groups {described_groups(spec)}. Name "
                "one of them."
            )
        return int(choice)
    code = find_code(choice, spec.languages)
    if code is None:
        raise ConfigError(
            f"--target-group {choice}: {origin} has no such language. Name one of "
            f"{', '.join(spec.languages)}, or the number of a group."
        )
    return spec.language_groups[spec.languages.index(code)]


def languages_of_group(spec: ModelSpec, group: int) -> list[str]:
    """Return the codes of the languages of a group."""
    groups = spec.language_groups or ()
    return [code for code, own in zip(spec.languages, groups, strict=True) if own == group]


def described_groups(spec: ModelSpec) -> str:
    """Return the groups with their languages, as in ``0 (de, en), 1 (ru)``."""
    return ", ".join(
        f"{group} ({', '.join(languages_of_group(spec, group))})"
        for group in range(spec.num_groups)
    )
