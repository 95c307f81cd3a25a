"""Stage group_languages: form language groups by family, by embeddings, or from the paper.

Reads shards, for the corpus sizes, and for embeddings a dense checkpoint. Makes groups
(``groups.json``: language → group, the names of the groups, and a reason for each decision).
"""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from data_prep.settings import GroupsConfig
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import is_synthetic, languages, line_counts
from pipeline.artifacts.tokenizer import load_tokenizer, tokenizer_folder
from pipeline.checkpoints.checkpoint import stated_spec
from pipeline.checkpoints.weights import read_tensor
from pipeline.errors import ArtifactError, ConfigError
from pipeline.languages import (
    PAPER_GROUPS,
    UNKNOWN_FAMILY,
    family,
    find_code,
    nearest_codes,
    without_region,
)
from pipeline.model.moe.language_groups import GROUPS_NAME
from pipeline.stage import StageCall
from pipeline.terminal import LISTED, counted, listed

EMBEDDING_NAME = "embedding.weight"

Vector = npt.NDArray[np.float64]
Value = TypeVar("Value", str, int)


@dataclass(frozen=True)
class Grouping:
    """Groups in the order of their numbers, and one sentence per decision."""

    members: dict[str, tuple[str, ...]]
    """Name → languages."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Cluster:
    """Group while groups are merged: families, languages, size and embedding."""

    families: tuple[str, ...]
    languages: tuple[str, ...]
    size: int
    """Training sentences of its languages."""
    embedding: Vector

    @property
    def name(self) -> str:
        """Return the name of the group, which lists its families."""
        return " + ".join(self.families)


def run(call: StageCall) -> None:
    """Group the languages of the shards by the method of the recipe."""
    config, shards = call.recipe.groups, call.artifacts["shards"]
    families = families_of(languages(shards), given=call.recipe.languages.family)
    match config.method:
        case "typology":
            grouping = by_family(families)
        case "paper":
            grouping = by_paper(languages(shards), extend=config.extend)
        case "embeddings":
            checkpoint = call.artifacts.get("checkpoint")
            sizes = language_sizes(shards, pivot=call.recipe.corpus.pivot)
            grouping = by_embeddings(
                shards, checkpoint, families=families, sizes=sizes, config=config
            )
    with call.new_artifact() as writer:
        groups = {code: n for n, codes in enumerate(grouping.members.values()) for code in codes}
        document = {"groups": groups, "names": [*grouping.members], "reasons": grouping.reasons}
        writer.write_json(GROUPS_NAME, document)
        writer.statistics |= {
            "groups": {name: list(codes) for name, codes in grouping.members.items()}
        }
        unknown = [code for code, name in families.items() if name.startswith(UNKNOWN_FAMILY)]
        writer.summary += summary(grouping, unknown=[] if config.method == "paper" else unknown)
        family_of, extend = call.recipe.languages.family, config.extend
        # One table may serve several corpora.
        for setting, table in (("languages.family", [*family_of]), ("groups.extend", [*extend])):
            if absent := [name for name in table if find_code(name, groups) is None]:
                writer.summary.append(f"{setting} names {listed(absent)}, which no pair here has")


def families_of(codes: Iterable[str], *, given: Mapping[str, str]) -> dict[str, str]:
    """Return language → family; a language of unknown family gets a family of its own.

    ``given``, language in any usual spelling → family, overrides the registry.
    """
    found = sorted(codes)
    named = by_code(given, found, setting="languages.family")
    families = {code: family(code, named) for code in found}
    return {
        code: f"{UNKNOWN_FAMILY} ({code})" if name == UNKNOWN_FAMILY else name
        for code, name in families.items()
    }


def by_code(
    given: Mapping[str, Value], codes: Collection[str], *, setting: str
) -> dict[str, Value]:
    """Return code → value of a setting; ConfigError if two spellings of a language disagree."""
    found: dict[str, Value] = {}
    for spelling, value in given.items():
        code = find_code(spelling, codes) or spelling
        if found.setdefault(code, value) != value:
            raise ConfigError(
                f"{setting} gives {code} both {found[code]!r} and {value!r}. Leave one out."
            )
    return found


def by_family(families: Mapping[str, str]) -> Grouping:
    """Make one group per family, in alphabetical order."""
    members = _collect(families)
    return Grouping(
        members,
        tuple(
            f"{name} is a group of its own: its family is not known, and languages.family says it."
            if name.startswith(f"{UNKNOWN_FAMILY} (")
            else f"{name} is a family."
            for name in members
        ),
    )


def by_paper(codes: Collection[str], *, extend: Mapping[str, int]) -> Grouping:
    """Take the paper's groups for OPUS-100, with additions; ConfigError for a language in none."""
    table = {code: group for group, listed in PAPER_GROUPS.items() for code in listed}
    table |= by_code(extend, codes, setting="groups.extend")
    names = {}
    for code in codes:
        group = table.get(code, table.get(without_region(code)))
        if group is None:
            nearest = ", ".join(nearest_codes(code, table)) or "none"
            raise ConfigError(
                f"Language {code!r} is in none of the paper's groups. Its nearest codes there are: "
                f"{nearest}. Put it into a group, for example groups.extend = {{ {code} = 1 }}."
            )
        names[code] = f"group {group}"
    members = _collect(names)
    return Grouping(members, tuple(f"{name} is the paper's." for name in members))


def by_embeddings(
    shards: Artifact,
    checkpoint: Artifact | None,
    *,
    families: Mapping[str, str],
    sizes: Mapping[str, int],
    config: GroupsConfig,
) -> Grouping:
    """Merge families by their embeddings in a dense model (MMNMT, §4.1, eqs. 2 and 3)."""
    if checkpoint is None:
        raise ConfigError(
            "groups.method = 'embeddings' needs a dense model. Give its checkpoint as input "
            "'checkpoint', or set groups.method to 'typology' or 'paper'."
        )
    embeddings = language_embeddings(checkpoint, languages(shards))
    clusters = [
        join([Cluster((name,), (code,), sizes[code], embeddings[code]) for code in codes])
        for name, codes in _collect(families).items()
    ]
    corpus_size = sum(natural_lines(shards).values())
    # Round: 15/56 of 56 sentences, for example, is exactly 15.
    limit = round(config.max_group_share * corpus_size, 6)
    merged, reasons = merge_closest(clusters, size_limit=limit)
    return Grouping({cluster.name: cluster.languages for cluster in merged}, tuple(reasons))


def natural_lines(shards: Artifact) -> dict[str, int]:
    """Return pair → training sentences, without pairs that have a side written by a machine."""
    counts = line_counts(shards, "train")
    return {pair: count for pair, count in counts.items() if not is_synthetic(pair)}


def language_sizes(shards: Artifact, *, pivot: str) -> dict[str, int]:
    """Return language → training sentences; the pivot counts as the largest other one."""
    sizes = dict.fromkeys(languages(shards), 0)
    for pair, count in natural_lines(shards).items():
        for code in pair.split("-"):
            sizes[code] += count
    pivot = find_code(pivot, sizes) or pivot
    if pivot in sizes:
        sizes[pivot] = max((size for code, size in sizes.items() if code != pivot), default=0)
    return sizes


def language_embeddings(checkpoint: Artifact, codes: Collection[str]) -> dict[str, Vector]:
    """Return language → embedding [width] of its token in a trained model."""
    kind = stated_spec(checkpoint).model.embedding.input
    if kind != "learned":  # other embeddings say nothing about a language
        raise ConfigError(
            f"{checkpoint.directory} has model.embedding.input = {kind!r}, and languages are "
            "grouped by learned embeddings. Name a checkpoint that has some, or set groups.method "
            "to 'typology' or 'paper'."
        )
    tokenizer = load_tokenizer(tokenizer_folder(checkpoint))
    if lacking := [code for code in codes if code not in tokenizer.languages]:
        raise ConfigError(
            f"{checkpoint.directory} does not know {listed(lacking)}, which the shards have. Name "
            "a checkpoint that does, or set groups.method to 'typology' or 'paper'."
        )
    weight = read_tensor(checkpoint, EMBEDDING_NAME)
    if weight.dim() != 2 or len(weight) != tokenizer.size:
        raise ArtifactError(
            f"{checkpoint.directory} has embeddings of shape {tuple(weight.shape)} where its "
            f"tokenizer has {tokenizer.size} ids. Name a checkpoint of a single run."
        )
    return {code: weight[tokenizer.language_token_id(code)].double().numpy() for code in codes}


def merge_closest(
    clusters: Sequence[Cluster], *, size_limit: float
) -> tuple[list[Cluster], list[str]]:
    """Merge the two closest clusters with a joint size below the limit, until there are none.

    Distance is cosine distance to 12 decimals; ties go to the alphabetically first names. Return
    the clusters by name, and a sentence for each merge and for the end.
    """
    left = sorted(clusters, key=lambda cluster: cluster.name)
    reasons = []
    while candidates := [
        (round(cosine_distance(first.embedding, second.embedding), 12), first, second)
        for first, second in combinations(left, 2)
        if first.size + second.size < size_limit
    ]:
        distance, first, second = min(
            candidates, key=lambda found: (found[0], found[1].name, found[2].name)
        )
        joint = join((first, second))
        reasons.append(
            f"{first.name} and {second.name} merge: their distance {distance:.6f} is the smallest, "
            f"and {joint.size} sentences together are below {size_limit:g}."
        )
        left = sorted(
            [cluster for cluster in left if cluster not in (first, second)] + [joint],
            key=lambda cluster: cluster.name,
        )
    reasons.append(f"No two of {len(left)} groups stay below {size_limit:g} sentences together.")
    return left, reasons


def join(clusters: Sequence[Cluster]) -> Cluster:
    """Join clusters: E_G = Σ (T_i / T_G) E_i, the embeddings weighted by size."""
    return Cluster(
        families=tuple(sorted({name for cluster in clusters for name in cluster.families})),
        languages=tuple(sorted(code for cluster in clusters for code in cluster.languages)),
        size=sum(cluster.size for cluster in clusters),
        embedding=weighted_mean(
            [cluster.embedding for cluster in clusters],
            weights=[cluster.size for cluster in clusters],
        ),
    )


def weighted_mean(vectors: Sequence[Vector], *, weights: Sequence[int]) -> Vector:
    """Return Σ w v / Σ w; the plain mean if all weights are 0 (no training text)."""
    shares = np.asarray(weights if sum(weights) else [1] * len(vectors), dtype=np.float64)
    mean: Vector = (shares / shares.sum()) @ np.stack(vectors)
    return mean


def cosine_distance(first: Vector, second: Vector) -> float:
    """Return 1 - cos; 1 for a zero vector, which has no direction."""
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    return 1.0 - float(first @ second) / norms if norms else 1.0


def summary(grouping: Grouping, *, unknown: Sequence[str]) -> list[str]:
    """Summarize the languages of each group, and languages of unknown family."""
    members = grouping.members
    number = sum(map(len, members.values()))
    lines = [
        f"{counted(number, 'language')} in {counted(len(members), 'group')}",
        "; ".join(f"{name}: {listed(codes)}" for name, codes in list(members.items())[:LISTED]),
    ]
    if len(members) > LISTED:
        lines[1] += f"; and {counted(len(members) - LISTED, 'more group')}"
    if unknown:
        lines.append(
            f"no family is known of {listed(unknown)}: each began as a group of its own; set "
            f'languages.family = {{ {unknown[0]} = "…" }} in the recipe'
        )
    return lines


def _collect(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Invert language → name into name → languages, both sorted."""
    return {
        name: tuple(sorted(code for code, given in names.items() if given == name))
        for name in sorted(set(names.values()))
    }


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("group_languages"))
