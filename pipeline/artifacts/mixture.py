"""Read mixtures: how often each pair is drawn.

``mixture.json`` has ``pairs``: pair → ``train_lines``, ``probability`` and, where directions are
drawn by their own sizes, ``forward``: the share of its draws that go from its first language to its
second. Later phases stand under ``phases``, each as ``{"from_update": n, "pairs": …}``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, is_count, is_synthetic, languages, line_counts
from pipeline.config.settings import shown

MIXTURE_NAME = "mixture.json"
SUM_TOLERANCE = 1e-6
"""Deviation from 1 allowed for a sum of probabilities, which are written with all their digits."""


@dataclass(frozen=True)
class Phase:
    """Probabilities that hold from an update on.

    Attributes:
        from_update: The first update of the phase, counted from 1.
        probabilities: Pair → probability that a sentence pair drawn is of this pair.
        forward: Pair → share of its draws from its first language to its second; a pair that is not
            in it is drawn in both directions equally often, epoch by epoch in turn.
    """

    from_update: int
    probabilities: Mapping[str, float]
    forward: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Mixture:
    """Phases of a training, ascending; the first begins at update 1, and all have all pairs."""

    phases: tuple[Phase, ...]

    @classmethod
    def constant(cls, probabilities: Mapping[str, float]) -> "Mixture":
        """Return a mixture of one phase that draws both directions of every pair equally often."""
        return cls((Phase(1, probabilities),))

    def draws(self, direction: Direction) -> bool:
        """Return whether any phase draws this direction."""
        pair = direction.pair
        unwanted = 0.0 if pair.startswith(f"{direction.source}-") else 1.0
        return any(phase.forward.get(pair) != unwanted for phase in self.phases)


def lines_per_language(artifact: Artifact) -> dict[str, int]:
    """Return the training lines of every language of a corpus or shards, over all pairs.

    A line counts once in each of its pairs, so lines of a pivot count several times. Lines that a
    machine wrote do not count.
    """
    totals = dict.fromkeys(languages(artifact), 0)
    for pair, count in line_counts(artifact, "train").items():
        for code in pair.split("-"):
            if not is_synthetic(code):
                totals[code] += count
    return totals


def read_mixture(artifact: Artifact) -> Mixture:
    """Return the phases of a mixture."""
    document = artifact.read_json(MIXTURE_NAME)
    first = document if isinstance(document, dict) else {}
    later = first.get("phases", [])
    if not isinstance(later, list) or not all(isinstance(entry, dict) for entry in later):
        _refuse(artifact, "has no list of tables under 'phases'")
    phases = tuple(_read_phase(artifact, entry) for entry in ({**first, "from_update": 1}, *later))
    begins = [phase.from_update for phase in phases]
    if begins != sorted(set(begins)):
        _refuse(artifact, f"has phases from updates {begins}, which do not ascend")
    if any(phase.probabilities.keys() != phases[0].probabilities.keys() for phase in phases):
        _refuse(artifact, "has phases of different pairs")
    return Mixture(phases)


def _read_phase(artifact: Artifact, document: Mapping[str, Any]) -> Phase:
    begin, pairs = document.get("from_update"), document.get("pairs")
    if not begin or not is_count(begin):
        _refuse(artifact, "has a phase that does not say from which update on")
    entries = dict(sorted(pairs.items())) if isinstance(pairs, dict) else {}
    probabilities = {
        name: _share(artifact, name, entry, "probability") for name, entry in entries.items()
    }
    total = math.fsum(probabilities.values())
    if not math.isclose(total, 1, abs_tol=SUM_TOLERANCE):
        _refuse(artifact, f"has probabilities that sum to {total:g}, not to 1")
    forward = {
        name: _share(artifact, name, entry, "forward")
        for name, entry in entries.items()
        if "forward" in entry
    }
    return Phase(begin, probabilities, forward)


def _share(artifact: Artifact, name: str, entry: object, key: str) -> float:
    share = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        _refuse(artifact, f"gives pair {shown(name)!r} no {key} from 0 to 1")
    return float(share)


def _refuse(artifact: Artifact, problem: str) -> NoReturn:
    raise artifact.refusal(f"{artifact.file(MIXTURE_NAME)} {problem}")
