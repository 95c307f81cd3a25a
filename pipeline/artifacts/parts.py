"""The part of a corpus that a stage reads: the files of some splits, and what counts them.

A stage that reads training lines alone is not to run again where test lines change. It declares
the splits it reads (``stages.Input.splits``), is given no more of the corpus than these, and its
manifest has the digest of that part. So what the digest leaves out cannot reach the result.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.artifacts.manifest import Manifest, json_digest

OTHER_LANGUAGES = "other_languages"
"""Statistic of a part: languages of the corpus that no pair with lines in the part has."""

_KEPT_STATISTICS = ("emptied", "imported")
"""Of a corpus: they are of its training lines."""


def part_of(manifest: Manifest, splits: Sequence[str]) -> Manifest:
    """Return a corpus's manifest with the files and statistics of some splits alone."""
    folders = tuple(f"{split}/" for split in splits)
    files = {name: record for name, record in manifest.files.items() if name.startswith(folders)}
    statistics = _statistics_of(manifest.statistics, splits)
    return manifest.model_copy(update={"files": files, "statistics": statistics})


def digest_of_part(manifest: Manifest, splits: Sequence[str]) -> str:
    """SHA-256 of all that a stage can read of these splits; without splits, of the artifact."""
    if not splits:
        return manifest.digest
    part = part_of(manifest, splits)
    return json_digest(
        {
            "kind": part.kind,
            "format_version": part.format_version,
            "files": {name: record.model_dump() for name, record in part.files.items()},
            "statistics": part.statistics,
        }
    )


def _statistics_of(statistics: Mapping[str, Any], splits: Sequence[str]) -> dict[str, Any]:
    """As they are where they are not those of a corpus: who reads them refuses them."""
    pairs = statistics.get("pairs")
    if not isinstance(pairs, dict) or not all(isinstance(one, dict) for one in pairs.values()):
        return dict(statistics)
    counts = {
        pair: {split: of_pair[split] for split in splits if of_pair.get(split)}
        for pair, of_pair in pairs.items()
    }
    counts = {pair: of_pair for pair, of_pair in counts.items() if of_pair}
    kept = {name: statistics[name] for name in _KEPT_STATISTICS if name in statistics}
    return {**kept, "pairs": counts, OTHER_LANGUAGES: sorted(_codes(pairs) - _codes(counts))}


def _codes(pairs: Mapping[str, object]) -> set[str]:
    return {code for pair in pairs for code in pair.split("-")}
