"""Routing statistics per MoE layer, target language and expert, stored with a checkpoint.

Legend: L MoE layers (encoder first), G target languages, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.model.moe.layer import has_experts
from pipeline.model.moe.routing import RoutingRecord
from pipeline.model.spec import ModelSpec

ROUTING_FILE = "routing.json"


@dataclass(frozen=True)
class RoutingStatistics:
    """Routing counts over a set of real tokens.

    Attributes:
        layers: names of the MoE layers, for example ``decoder.layers.1``.
        languages: codes of the target languages.
        tokens_LG: number of routed tokens.
        entropy_LG: entropy of the router's probabilities, summed over tokens, in nats.
        routed_LGE: routes per expert before capacity.
        kept_LGE: routes per expert after capacity.
    """

    layers: tuple[str, ...]
    languages: tuple[str, ...]
    tokens_LG: npt.NDArray[np.float64]
    entropy_LG: npt.NDArray[np.float64]
    routed_LGE: npt.NDArray[np.float64]
    kept_LGE: npt.NDArray[np.float64]

    def summary(self) -> dict[str, dict[str, float]]:
        """Return share dropped, mean entropy (nats) and max/mean load of each layer."""
        routed_LE, kept_LE = self.routed_LGE.sum(1), self.kept_LGE.sum(1)
        tokens_L = np.maximum(self.tokens_LG.sum(1), 1)
        return {
            layer: {
                "dropped": float(1 - kept_LE[i].sum() / max(routed_LE[i].sum(), 1)),
                "entropy": float(self.entropy_LG[i].sum() / tokens_L[i]),
                "max_load": float(routed_LE[i].max() / max(routed_LE[i].mean(), 1e-9)),
            }
            for i, layer in enumerate(self.layers)
        }

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        return {
            "layers": list(self.layers),
            "languages": list(self.languages),
            "tokens": self.tokens_LG.tolist(),
            "entropy": self.entropy_LG.tolist(),
            "routed": self.routed_LGE.tolist(),
            "kept": self.kept_LGE.tolist(),
        }

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Read the counts from a JSON object.

        Raises:
            ValueError: a table is missing, has the wrong shape, or holds values that are no counts.
        """
        if not isinstance(values, dict):
            raise ValueError("no table")
        statistics = cls(
            layers=_names(values, "layers"),
            languages=_names(values, "languages"),
            tokens_LG=_counts(values, "tokens"),
            entropy_LG=_counts(values, "entropy"),
            routed_LGE=_counts(values, "routed"),
            kept_LGE=_counts(values, "kept"),
        )
        shape = (len(statistics.layers), len(statistics.languages))
        routed_shape = statistics.routed_LGE.shape
        if (
            {statistics.tokens_LG.shape, statistics.entropy_LG.shape, routed_shape[:2]} != {shape}
            or len(routed_shape) != 3
            or statistics.kept_LGE.shape != routed_shape
        ):
            raise ValueError("the shapes of the counts differ")
        return statistics


def _names(values: dict[str, Any], name: str) -> tuple[str, ...]:
    found = values.get(name)
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise ValueError(f"{name} is no list of names")
    return tuple(found)


def _counts(values: dict[str, Any], name: str) -> npt.NDArray[np.float64]:
    try:
        counts = np.array(values.get(name), dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is no table of numbers") from error
    if not (counts >= 0).all() or np.isinf(counts).any():
        raise ValueError(f"{name} has numbers that are no counts")
    return counts


def moe_layer_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of a model's MoE layers, in the order of its routing records."""
    sides = (("encoder", spec.model.encoder_layers), ("decoder", spec.model.decoder_layers))
    return tuple(
        f"{side}.layers.{layer}"
        for side, count in sides
        for layer in range(count)
        if has_experts(spec.model, layer)
    )


class RoutingCounter:
    """Sum of routing records, in one tensor so that one collective sums it over ranks."""

    def __init__(self, spec: ModelSpec) -> None:
        self._layers, self._languages = moe_layer_names(spec), spec.languages
        self.num_experts = spec.model.moe.num_experts if spec.model.moe else 0
        shape = (len(self._layers), len(self._languages), 2 + 2 * self.num_experts)
        self.sums = torch.zeros(shape, dtype=torch.float64)

    def add(self, routing: Sequence[RoutingRecord], *, language: int) -> None:
        """Count one batch of sentences into one target language; the host waits once for it."""
        rows = []
        for layer, record in enumerate(routing):
            probability_NE = record.probability_NE
            self.sums[layer, language, 0] += len(probability_NE)
            # Clamped: a probability of 0 would contribute 0 · log 0 = NaN instead of 0.
            entropy = -(probability_NE * probability_NE.clamp_min(1e-30).log()).sum()
            counts: list[Tensor] = [entropy.view(1), record.routed_E, record.kept_E]
            rows.append(torch.cat([count.double() for count in counts]))
        if rows:
            self.sums[:, language, 1:] += torch.stack(rows).cpu()

    def result(self) -> RoutingStatistics:
        """Return the statistics of all batches counted so far."""
        sums, experts = self.sums.numpy(), self.num_experts
        return RoutingStatistics(
            layers=self._layers,
            languages=self._languages,
            tokens_LG=sums[:, :, 0],
            entropy_LG=sums[:, :, 1],
            routed_LGE=sums[:, :, 2 : 2 + experts],
            kept_LGE=sums[:, :, 2 + experts :],
        )
