"""Scores of translations: BLEU, chrF++ and language accuracy, per direction and averaged.

- BLEU and chrF++ are sacreBLEU's own: its sufficient statistics are kept per sentence, and the
  corpus score is what sacreBLEU computes from their sum.
- The BLEU tokenizer follows the target language; one that cannot be loaded has a named fallback.
- Language accuracy is the share of lines that langdetect assigns to the target language, once
  plain and once with its prior restricted to the languages of the corpus.
- Averages are arithmetic means over directions: towards the pivot, away from it, other trained
  directions and zero-shot ones, each over all directions and per resource group.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
from langdetect.lang_detect_exception import LangDetectException
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from pipeline.artifacts import Artifact
from pipeline.corpus import (
    Direction,
    Resource,
    directions,
    emptied_pairs,
    line_counts,
    read_hypotheses,
    read_lines,
    resource_of,
)
from pipeline.errors import ConfigError

Counts = npt.NDArray[np.int32]
Hits = npt.NDArray[np.bool_]

Family = Literal["into_pivot", "out_of_pivot", "other", "zero_shot", "no_training_data"]
"""Trained towards the pivot, away from it, trained without it, and not trained at all: because the
corpus never had training text of the pair, or because none of it was left."""
Group = Literal["all", Resource]
BleuTokenizerOption = Literal["per-language", "13a", "flores200"]

FAMILIES: tuple[Family, ...] = get_args(Family)
GROUPS: tuple[Group, ...] = get_args(Group)

LANGUAGE_TOKENIZERS = {
    "zh": ("zh",),
    "ja": ("ja-mecab", "char"),
    "ko": ("ko-mecab", "char"),
}
"""Target language, in any script → sacreBLEU tokenizers, the first that loads is taken; all others:
13a."""

PROFILE_LANGUAGES = {"zh-cn": "zh", "zh-tw": "zh"}
"""langdetect profile → language code, where the two differ."""


# Directions


@dataclass(frozen=True)
class DirectionProfile:
    """What is known of a direction before any system translates it."""

    direction: Direction
    family: Family
    resource: Resource | None
    """By the training lines of the pair; None where it has none."""
    training_lines: int
    test_lines: int


def find_pivot(training_pairs: Iterable[str]) -> str | None:
    """The one language that is in every training pair, or None.

    A single pair has two such languages: it is English if English is one of them, else None.
    """
    pairs = set(training_pairs)
    membership = Counter(code for pair in pairs for code in pair.split("-"))
    candidates = [code for code, count in membership.items() if count == len(pairs)]
    if len(candidates) == 1:
        return candidates[0]
    return "en" if "en" in candidates else None


def describe_directions(corpus: Artifact, *, thresholds: tuple[int, int]) -> list[DirectionProfile]:
    """All directions that have test lines, sorted, each with its family and resource group."""
    training, test = line_counts(corpus, "train"), line_counts(corpus, "test")
    pivot, emptied = find_pivot(training), emptied_pairs(corpus)
    return [
        _describe(
            direction,
            pivot=pivot,
            training_lines=training.get(direction.pair, 0),
            emptied=direction.pair in emptied,
            test_lines=test[direction.pair],
            thresholds=thresholds,
        )
        for direction in directions(corpus, "test")
    ]


def _describe(
    direction: Direction,
    *,
    pivot: str | None,
    training_lines: int,
    emptied: bool,
    test_lines: int,
    thresholds: tuple[int, int],
) -> DirectionProfile:
    family: Family = "other"
    if training_lines == 0:
        family = "no_training_data" if emptied else "zero_shot"
    elif direction.target == pivot:
        family = "into_pivot"
    elif direction.source == pivot:
        family = "out_of_pivot"
    return DirectionProfile(
        direction=direction,
        family=family,
        resource=resource_of(training_lines, thresholds=thresholds) if training_lines else None,
        training_lines=training_lines,
        test_lines=test_lines,
    )


# BLEU and chrF++


def bleu_tokenizer(language: str, *, option: BleuTokenizerOption) -> str:
    """Name of the sacreBLEU tokenizer for a target language, the fallback where it is needed.

    Raises:
        ConfigError: none of the tokenizers can be loaded.
    """
    usual = LANGUAGE_TOKENIZERS.get(language.split("_")[0], ("13a",))
    wanted = usual if option == "per-language" else (option,)
    failure: Exception | None = None
    for name in wanted:
        try:
            BLEU(tokenize=name)
        except Exception as error:  # sacreBLEU raises whatever its tokenizers' loaders raise
            failure = error
        else:
            return name
    raise ConfigError(
        f"sacreBLEU's tokenizer {wanted[-1]!r} cannot be loaded ({failure}): run once where it can "
        "be downloaded, point SACREBLEU to a folder that holds it, or set "
        "evaluation.bleu_tokenizer to 'per-language'."
    ) from failure


@dataclass(frozen=True)
class LineStatistics:
    """sacreBLEU's sufficient statistics, one row per sentence, and the signatures."""

    bleu: Counts
    """(lines, 10): lengths of hypothesis and reference, matches of order 1–4, totals of 1–4."""
    chrf: Counts
    """(lines, 24): n-grams of hypothesis, of reference, in both; characters 1–6, then words 1–2."""
    bleu_signature: str
    chrf_signature: str


def line_statistics(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenizer: str
) -> LineStatistics:
    """BLEU and chrF++ statistics of every line.

    Args:
        hypotheses: one per line.
        references: as many, in the same order.
        tokenizer: sacreBLEU's name of the BLEU tokenizer.
    """
    assert len(hypotheses) == len(references) > 0
    # The per-sentence statistics have no public name in sacreBLEU 2.x; its own significance tests
    # call the same method.
    bleu, chrf = BLEU(tokenize=tokenizer, force=True), _chrf()
    bleu_rows = bleu._extract_corpus_statistics(hypotheses, [references])
    chrf_rows = chrf._extract_corpus_statistics(hypotheses, [references])
    return LineStatistics(
        bleu=np.array(bleu_rows, dtype=np.int32),
        chrf=np.array(chrf_rows, dtype=np.int32),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


def corpus_bleu(statistics: Counts) -> float:
    """BLEU in 0–100 from the statistics of the lines, as sacreBLEU computes it."""
    totals = statistics.sum(axis=0, dtype=np.int64).tolist()
    return float(BLEU()._compute_score_from_stats(totals).score)


def corpus_chrf(statistics: Counts) -> float:
    """chrF++ in 0–100 from the statistics of the lines, as sacreBLEU computes it."""
    totals = statistics.sum(axis=0, dtype=np.int64).tolist()
    return float(_chrf()._compute_score_from_stats(totals).score)


def _chrf() -> Any:
    return CHRF(word_order=2)


# Language accuracy


@lru_cache(maxsize=1)
def _profiles() -> Any:
    """langdetect's profiles in sorted order: its own loader takes the file system's order."""
    factory = DetectorFactory()
    paths = sorted(Path(PROFILES_DIRECTORY).iterdir())
    factory.load_json_profile(
        [path.read_text(encoding="utf-8") for path in paths if not path.name.startswith(".")]
    )
    return factory


def detectable_languages() -> frozenset[str]:
    """Codes of the languages langdetect knows."""
    names: list[str] = _profiles().get_lang_list()
    return frozenset(PROFILE_LANGUAGES.get(name, name) for name in names)


class LanguageDetector:
    """langdetect with a fixed seed and, where candidates are given, a prior over them alone.

    Args:
        candidates: languages to choose from, with equal prior; those langdetect does not know are
            left out; None: all it knows.
        seed: of langdetect's random walk; every text starts from it, so order does not matter.
    """

    def __init__(self, candidates: Iterable[str] | None, *, seed: int) -> None:
        self._seed = seed
        self._prior = None if candidates is None else _prior(frozenset(candidates))

    def detect(self, text: str) -> str | None:
        """The most probable language of a text; None where it holds nothing to go by."""
        detector = _profiles().create()
        detector.seed = self._seed
        if self._prior is not None:
            detector.set_prior_map(self._prior)
        detector.append(text)
        try:
            found: str = detector.detect()
        except LangDetectException:
            return None
        return PROFILE_LANGUAGES.get(found, found)

    def hits(self, texts: Sequence[str], *, language: str) -> Hits:
        """Which of the texts are detected as the language, (lines,) booleans."""
        found = {text: self.detect(text) == language for text in dict.fromkeys(texts)}
        return np.array([found[text] for text in texts], dtype=np.bool_)


def _prior(candidates: frozenset[str]) -> dict[str, float]:
    """Equal weight per language, shared among a language's profiles."""
    names: list[str] = _profiles().get_lang_list()
    languages = {name: PROFILE_LANGUAGES.get(name, name) for name in names}
    profiles_per_language = Counter(languages.values())
    prior = {
        name: 1.0 / profiles_per_language[language]
        for name, language in languages.items()
        if language in candidates
    }
    if not prior:
        raise ConfigError(
            f"langdetect knows none of the languages {', '.join(sorted(candidates))}: "
            "set evaluation.language_accuracy to false."
        )
    return prior


@dataclass(frozen=True)
class LanguageHits:
    """Lines detected as the target language, (lines,) booleans each."""

    plain: Hits
    restricted: Hits


def language_hits(
    texts: Sequence[str], *, language: str, candidates: frozenset[str], seed: int
) -> LanguageHits:
    """Detect every line twice: among all languages, and among the candidates."""
    return LanguageHits(
        plain=LanguageDetector(None, seed=seed).hits(texts, language=language),
        restricted=LanguageDetector(candidates, seed=seed).hits(texts, language=language),
    )


# Scores


@dataclass(frozen=True)
class LanguageAccuracy:
    """Percent of lines in the target language; plain, and with the prior restricted."""

    plain: float
    restricted: float


@dataclass(frozen=True)
class Scores:
    """Scores in 0–100; no language accuracy where langdetect does not know the target."""

    bleu: float
    chrf: float
    language_accuracy: LanguageAccuracy | None


@dataclass(frozen=True)
class DirectionScores:
    """What one system reached in one direction."""

    scores: Scores
    lines: int
    empty: int
    """Hypotheses without text."""
    truncated: int
    """Hypotheses cut at the maximum length."""
    bleu_signature: str
    chrf_signature: str


@dataclass(frozen=True)
class SystemScores:
    """What one system reached, direction (``de-en``) by direction and averaged."""

    name: str
    directions: Mapping[str, DirectionScores]
    averages: Mapping[Family, Mapping[Group, Scores]]


@dataclass(frozen=True)
class ReferenceAccuracy:
    """Language accuracy of the references: what langdetect allows a perfect system."""

    directions: Mapping[str, LanguageAccuracy]
    averages: Mapping[Family, Mapping[Group, LanguageAccuracy]]


@dataclass(frozen=True)
class Evaluation:
    """All scores of an evaluation, systems in the order they were given."""

    pivot: str | None
    thresholds: tuple[int, int]
    directions: tuple[DirectionProfile, ...]
    language_names: Mapping[str, str]
    """Code → English name, of all languages of the corpus."""
    tokenizers: Mapping[str, str]
    """Target language → BLEU tokenizer."""
    systems: tuple[SystemScores, ...]
    references: ReferenceAccuracy | None
    undetectable: tuple[str, ...]
    """Target languages langdetect does not know; left out of language accuracy."""
    warnings: tuple[str, ...]


def accuracy(hits: LanguageHits) -> LanguageAccuracy:
    """Percent of hits."""
    return LanguageAccuracy(
        plain=100.0 * float(hits.plain.mean()), restricted=100.0 * float(hits.restricted.mean())
    )


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Arithmetic means over directions; language accuracy over those that have one."""
    known = [one.language_accuracy for one in scores if one.language_accuracy is not None]
    return Scores(
        bleu=_mean([one.bleu for one in scores]),
        chrf=_mean([one.chrf for one in scores]),
        language_accuracy=mean_accuracy(known) if known else None,
    )


def mean_accuracy(values: Sequence[LanguageAccuracy]) -> LanguageAccuracy:
    """Arithmetic means over directions."""
    return LanguageAccuracy(
        plain=_mean([one.plain for one in values]),
        restricted=_mean([one.restricted for one in values]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


Value = TypeVar("Value")


def by_group(
    values: Mapping[str, Value], *, profiles: Sequence[DirectionProfile]
) -> dict[Family, dict[Group, list[Value]]]:
    """Values of directions by family and resource group; groups without a value are left out."""
    found: dict[Family, dict[Group, list[Value]]] = {}
    for profile in profiles:
        name = str(profile.direction)
        if name not in values:
            continue
        groups = found.setdefault(profile.family, {})
        groups.setdefault("all", []).append(values[name])
        if profile.resource is not None:
            groups.setdefault(profile.resource, []).append(values[name])
    return found


def average_scores(
    scores: Mapping[str, Scores], *, profiles: Sequence[DirectionProfile]
) -> dict[Family, dict[Group, Scores]]:
    """Mean scores per family and resource group."""
    return {
        family: {group: mean_scores(values) for group, values in groups.items()}
        for family, groups in by_group(scores, profiles=profiles).items()
    }


def average_accuracy(
    values: Mapping[str, LanguageAccuracy], *, profiles: Sequence[DirectionProfile]
) -> dict[Family, dict[Group, LanguageAccuracy]]:
    """Mean language accuracy per family and resource group."""
    return {
        family: {group: mean_accuracy(found) for group, found in groups.items()}
        for family, groups in by_group(values, profiles=profiles).items()
    }


# One direction at a time: what a worker does, and so free of slow imports


@dataclass(frozen=True)
class Detection:
    """How the language of a line is detected."""

    candidates: frozenset[str]
    """Languages of the corpus that langdetect knows."""
    seed: int

    def hits(self, texts: Sequence[str], *, target: str) -> LanguageHits | None:
        """Lines in the target language; None where langdetect does not know it."""
        if target not in self.candidates:
            return None
        return language_hits(texts, language=target, candidates=self.candidates, seed=self.seed)


@dataclass(frozen=True)
class ScoringTask:
    """One direction of one system."""

    system: str
    corpus: Artifact
    translations: Artifact
    direction: Direction
    tokenizer: str
    detection: Detection | None


@dataclass(frozen=True)
class ReferenceTask:
    """The references of one direction, whose language is to be detected."""

    corpus: Artifact
    direction: Direction
    detection: Detection


@dataclass(frozen=True)
class ScoredDirection:
    """What a worker sends back."""

    scores: DirectionScores
    statistics: LineStatistics
    hits: LanguageHits | None


def score_direction(task: ScoringTask) -> ScoredDirection:
    """Score one direction of one system."""
    target = task.direction.target
    hypotheses = read_hypotheses(task.translations, task.direction)
    texts = [hypothesis.text for hypothesis in hypotheses]
    references = read_lines(task.corpus, "test", task.direction.pair, target)
    statistics = line_statistics(texts, references, tokenizer=task.tokenizer)
    hits = None if task.detection is None else task.detection.hits(texts, target=target)
    scores = DirectionScores(
        scores=Scores(
            bleu=corpus_bleu(statistics.bleu),
            chrf=corpus_chrf(statistics.chrf),
            language_accuracy=None if hits is None else accuracy(hits),
        ),
        lines=len(texts),
        empty=sum(not text.strip() for text in texts),
        truncated=sum(hypothesis.truncated for hypothesis in hypotheses),
        bleu_signature=statistics.bleu_signature,
        chrf_signature=statistics.chrf_signature,
    )
    return ScoredDirection(scores=scores, statistics=statistics, hits=hits)


def detect_references(task: ReferenceTask) -> LanguageHits | None:
    """Detect the language of the references of one direction."""
    target = task.direction.target
    references = read_lines(task.corpus, "test", task.direction.pair, target)
    return task.detection.hits(references, target=target)
