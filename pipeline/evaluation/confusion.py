"""Which languages came out where which were asked for: the confusion matrix of languages."""

from collections import Counter
from collections.abc import Sequence

from pipeline.evaluation.directions import DirectionProfile, Family
from pipeline.evaluation.scores import Confusion, SystemScores


def confuse_languages(
    systems: Sequence[SystemScores], *, profiles: Sequence[DirectionProfile]
) -> Confusion:
    """Lines of all directions of a family into a target language, by the language found.

    Of every score that tells languages apart; directions that it does not cover have no lines.
    """
    found: dict[str, dict[str, dict[Family, dict[str, dict[str, int]]]]] = {}
    for system in systems:
        for profile in profiles:
            outcomes = system.directions[str(profile.direction)].outcomes
            for column, counts in outcomes.items():
                families = found.setdefault(column, {}).setdefault(system.name, {})
                targets = families.setdefault(profile.family, {})
                target = profile.direction.target
                sums = Counter(targets.get(target, {})) + Counter(counts)
                targets[target] = dict(sorted(sums.items()))
    return found
