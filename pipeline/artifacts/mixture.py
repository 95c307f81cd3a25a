"""Read mixtures (how often each pair is drawn) and language groups.

``mixture.json`` has ``pairs``: pair → ``train_lines``, ``probability`` and, where directions are
drawn by their own sizes, ``forward``: the share of its draws that go from its first language to its
second. Later phases stand under ``phases``, each as ``{"from_update": n, "pairs": …}``.

``groups.json`` has ``groups``: language → number of its language group, for language-group routers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, is_synthetic, languages, line_counts
from pipeline.config.settings import shown
from pipeline.errors import ArtifactError, DataError

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


def temperature_probabilities(
    counts: Mapping[str, int], *, sampling_temperature: float
) -> dict[str, float]:
    """Return p_i ∝ (n_i / Σn)^(1/T) (MMNMT, §5.1): T = 1 is proportional, T = ∞ uniform.

    A count of zero has probability zero at every temperature.

    Raises:
        DataError: Every count is zero.
    """
    largest = max(counts.values(), default=0)
    if largest <= 0:
        raise DataError("Every pair has 0 training lines. Use a corpus with training text.")
    # Divide by the largest count: all logarithms are then at most 0, and no power overflows.
    weights = {
        name: math.exp((math.log(count) - math.log(largest)) / sampling_temperature)
        if count
        else 0.0
        for name, count in counts.items()
    }
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def capped_shares(
    shares: Mapping[str, float], counts: Mapping[str, int], *, max_upsampling: float
) -> dict[str, float]:
    """Limit each share to ``max_upsampling`` times its part of all counts.

    The excess goes to the other shares in proportion: min(c_i, λ s_i) with c_i = max_upsampling ·
    n_i / Σn, and the λ for which they sum to 1.

    Args:
        shares: Name → share; they sum to 1, and are 0 where the count is.
        counts: Name → count.
        max_upsampling: At least 1, or no such shares exist.
    """
    total = sum(counts.values())
    caps = {name: max_upsampling * (counts[name] / total) for name in shares}
    drawn = [name for name, share in shares.items() if share > 0]
    # Sort by the λ at which each share meets its cap: capped shares come first.
    ascending = sorted(drawn, key=lambda name: (caps[name] / shares[name], name))
    kept, open_shares = 1.0, math.fsum(shares[name] for name in drawn)
    capped = dict.fromkeys(shares, 0.0)
    for place, name in enumerate(ascending):
        scale = kept / open_shares
        if caps[name] >= scale * shares[name]:
            capped |= {other: scale * shares[other] for other in ascending[place:]}
            break
        capped[name] = caps[name]
        kept -= caps[name]
        open_shares = math.fsum(shares[other] for other in ascending[place + 1 :])
    whole = math.fsum(capped.values())
    return {name: share / whole for name, share in capped.items()}


def read_mixture(artifact: Artifact) -> Mixture:
    """Return the phases of a mixture.

    Raises:
        ArtifactError: The file holds something else, or probabilities do not sum to 1.
    """
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
    if not isinstance(begin, int) or isinstance(begin, bool) or not 1 <= begin < 2**63:
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
    raise ArtifactError(f"{artifact.file(MIXTURE_NAME)} {problem}. Run stage 'mix' again.")


GROUPS_NAME = "groups.json"


def read_groups(artifact: Artifact) -> dict[str, int]:
    """Return language → group, numbered from 0 without gaps.

    Raises:
        ArtifactError: The file holds something else, or the numbers have gaps.
    """
    document = artifact.read_json(GROUPS_NAME)
    groups = document.get("groups") if isinstance(document, dict) else None
    if not isinstance(groups, dict) or not groups or not all(map(_is_number, groups.values())):
        raise ArtifactError(
            f"{artifact.file(GROUPS_NAME)} does not give languages a group each. Run stage "
            "'group_languages' again."
        )
    numbers = set(groups.values())
    if numbers != set(range(len(numbers))):
        raise ArtifactError(
            f"{artifact.file(GROUPS_NAME)} numbers its groups {shown(sorted(numbers))}, where 0 "
            f"to {len(numbers) - 1} is wanted. Run stage 'group_languages' again."
        )
    return dict(sorted(groups.items()))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
