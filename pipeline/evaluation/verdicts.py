"""Where an evaluation can tell systems apart at all: where its baseline translates.

A model that does not translate yet, and one that gives the same few outputs to every source, still
have scores, and these differ. Such differences say nothing about translation, so the reports give
no verdict on them: "not decided".

- A verdict on a direction needs a baseline that translates in it.
- A verdict on an average needs a baseline that translates on average over the same directions.
- A system that does not translate is the best one (bold) by no score.
"""

from collections.abc import Mapping, Sequence

from pipeline.evaluation.averages import by_group
from pipeline.evaluation.directions import DirectionProfile, Family, Group
from pipeline.evaluation.scores import Quality, SystemScores, Verdicts

LEAST_BLEU = 5.0
LEAST_DISTINCT = 50.0
"""Distinct outputs, in percent of the distinct sources."""

RULE = (
    f"A system translates where it has at least {LEAST_BLEU:g} BLEU and at least half as many "
    "distinct outputs as there are distinct sources."
)


def quality(*, bleu: float, distinct: float) -> Quality:
    """Judge a direction or an average by its BLEU and by the share of distinct outputs."""
    translates = bleu >= LEAST_BLEU and distinct >= LEAST_DISTINCT
    return Quality(bleu=bleu, distinct=distinct, translates=translates)


def distinct_share(outputs: Sequence[str], sources: Sequence[str]) -> float:
    """Return the distinct outputs in percent of the distinct sources; white space is ignored."""
    return 100.0 * _distinct(outputs) / max(_distinct(sources), 1)


def _distinct(texts: Sequence[str]) -> int:
    return len({" ".join(text.split()) for text in texts})


def judge(
    systems: Sequence[SystemScores], *, baseline: str, profiles: Sequence[DirectionProfile]
) -> Verdicts:
    """Judge every system in every direction and on average over every group of directions."""
    directions: dict[str, dict[str, Quality]] = {
        str(profile.direction): {
            one.name: one.directions[str(profile.direction)].quality for one in systems
        }
        for profile in profiles
    }
    averages: dict[Family, dict[Group, Mapping[str, Quality]]] = {
        family: {group: _mean(members) for group, members in groups.items()}
        for family, groups in by_group(directions, profiles=profiles).items()
    }
    return Verdicts(baseline=baseline, directions=directions, averages=averages)


def _mean(members: Sequence[Mapping[str, Quality]]) -> dict[str, Quality]:
    """Judge systems by the arithmetic means of their directions."""
    return {
        name: quality(
            bleu=sum(one[name].bleu for one in members) / len(members),
            distinct=sum(one[name].distinct for one in members) / len(members),
        )
        for name in members[0]
    }
