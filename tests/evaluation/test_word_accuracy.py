"""Word accuracy equals a brute-force count, and alignments are those of a simple model."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import Texts, make_corpus, make_translations

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.artifacts.vocabularies import Decoded
from pipeline.evaluation.scores import DirectionProfile, WordAccuracy, WordCounts
from pipeline.evaluation.word_accuracy import (
    FERTILITY,
    FREQUENCY,
    ITERATIONS,
    LENGTH,
    SEEN,
    UNKNOWN,
    Aligner,
    Matches,
    Trait,
    WordInputs,
    by_kind,
    count_source_words,
    count_words,
    fertilities,
    join_words,
    word_tasks,
    words_of_language,
)

LINES = [
    ("das Haus".split(), "the house".split()),
    ("das Buch".split(), "the book".split()),
    ("ein Buch".split(), "a book".split()),
    ("ein rotes Haus".split(), "a red house".split()),
    ([], ["nothing"]),
    (["nichts"], []),
]


def prior(i: int | None, sources: int, j: int, targets: int) -> float:
    """fast_align's, of Dyer et al. (2013), with its constants; None: of no source word."""
    if i is None:
        return 0.08

    def weight(place: int) -> float:
        return math.exp(-4.0 * abs((place + 1) / sources - (j + 1) / targets))

    return 0.92 * weight(i) / sum(map(weight, range(sources)))


def learned_by_hand() -> dict[tuple[str | None, str], float]:
    table: dict[tuple[str | None, str], float] = defaultdict(lambda: 1.0)
    for _ in range(ITERATIONS):
        counts: dict[tuple[str | None, str], float] = defaultdict(float)
        for source, target in LINES:
            if not source:
                continue
            for j, word in enumerate(target):
                places = [None, *range(len(source))]
                words = [None, *source]
                weights = [
                    prior(i, len(source), j, len(target)) * table[one, word]
                    for i, one in zip(places, words, strict=True)
                ]
                for one, weight in zip(words, weights, strict=True):
                    counts[one, word] += weight / sum(weights)
        totals: dict[str | None, float] = defaultdict(float)
        for (one, _), count in counts.items():
            totals[one] += count
        table = defaultdict(float, {key: n / totals[key[0]] for key, n in counts.items()})
    return table


def test_probabilities_are_those_of_expectation_maximization_by_hand() -> None:
    aligner, expected = Aligner(LINES), learned_by_hand()
    assert len(expected) > 15
    for (source, target), probability in expected.items():
        wanted = max(probability, UNKNOWN)
        assert aligner.probability(source or "", target) == pytest.approx(wanted, rel=1e-9)


def test_words_of_a_known_dictionary_are_found_in_any_order() -> None:
    generator = random.Random(1)
    dictionary = {f"s{number}": f"t{number}" for number in range(40)}

    def line() -> tuple[list[str], list[str], dict[int, int]]:
        source = generator.sample([*dictionary], k=generator.randint(3, 9))
        order = list(range(len(source)))
        if generator.random() < 0.3:
            first = generator.randrange(len(order) - 1)
            order[first], order[first + 1] = order[first + 1], order[first]
        return source, [dictionary[source[i]] for i in order], dict(enumerate(order))

    aligner = Aligner([line()[:2] for _ in range(300)])
    right = total = 0
    for _ in range(50):
        source, target, order = line()
        found = {j: i for i, j in aligner.align(source, target)}
        right += sum(found.get(j) == i for j, i in order.items())
        total += len(order)
    assert right / total > 0.98


def test_nothing_is_aligned_without_words_on_both_sides() -> None:
    aligner = Aligner(LINES)
    assert aligner.align([], ["the"]) == []
    assert aligner.align(["das"], []) == []
    assert Aligner([]).align(["unknown", "words"], ["on", "diagonals"]) == [(0, 0), (1, 1)]


TRAINING = ["the cat sat", "the cat ran", "the end"]
REFERENCES = ["the cat sat on the mat", "a dog ran", "", "extraordinarily the"]
SYSTEMS = {
    "ours": ["the the the cat", "a dog", "surplus", "extraordinarily"],
    "theirs": ["", "a dog ran ran", "", "the the"],
}
EVERY_KIND = {
    SEEN: ("unseen", "seen"),
    FREQUENCY: ("0", "1", "2", "3", "4", "5–9", "10–99", "100–999", "1000 and more"),
    FERTILITY: ("1", "2", "3", "4", "5 and more"),
    LENGTH: ("1–3", "4–7", "8–11", "12–15", "16 and more"),
}


@pytest.mark.parametrize("trait", EVERY_KIND, ids=lambda trait: trait.name)
def test_kinds_are_named_by_their_values_and_meet_at_the_cutoffs(trait: Trait) -> None:
    assert trait.kinds == EVERY_KIND[trait]
    for place, cutoff in enumerate(trait.cutoffs):
        for value, kind in ((cutoff - 1, trait.kinds[place]), (cutoff, trait.kinds[place + 1])):
            matches = Matches(Counter(["w"]), Counter(), Counter())
            counts = by_kind({"x": matches}, {trait: lambda _, value=value: value})[trait.name]  # type: ignore[misc]
            assert [name for name, systems in counts.items() if systems["x"].shared] == [kind]


def position_by_position(
    hypothesis: Sequence[str], reference: Sequence[str]
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """compare-mt's loop: a word of the output takes the first of the reference's that is free."""
    free = list(reference)
    shared: Counter[str] = Counter()
    for word in hypothesis:
        if word in free:
            free.remove(word)
            shared[word] += 1
    return shared, Counter(reference), Counter(hypothesis)


texts = st.lists(st.sampled_from(["a", "b", "cc", "ddddd"]), max_size=8).map(" ".join)


@given(st.lists(st.tuples(texts, texts), max_size=4))
def test_words_are_shared_as_they_are_when_matched_one_by_one(pairs: list[tuple[str, str]]) -> None:
    counts = [position_by_position(*map(str.split, pair)) for pair in pairs]
    expected = [sum(column, Counter[str]()) for column in zip(*counts, strict=True)]
    expected = expected or [Counter[str]()] * 3
    found = count_words([one.split() for one, _ in pairs], [two.split() for _, two in pairs])
    assert [found.shared, found.reference, found.hypothesis] == expected


def test_the_f_measure_is_of_precision_and_recall() -> None:
    counts = WordCounts(shared=3, reference=4, hypothesis=10)
    precision, recall = 3 / 10, 3 / 4
    assert counts.f_measure == pytest.approx(200 * precision * recall / (precision + recall))
    assert WordCounts(0, 4, 0).f_measure == 0.0
    assert WordCounts(0, 0, 0).f_measure is None


def test_every_kind_has_the_words_with_its_values() -> None:
    matches = count_words(["a bb ccc ccc".split()], ["a bb bb dddd".split()])
    found = by_kind({"x": matches}, {LENGTH: len})
    assert found["length"]["1–3"] == {"x": WordCounts(2, 3, 4)}
    assert found["length"]["4–7"] == {"x": WordCounts(0, 1, 0)}
    assert found["length"]["16 and more"] == {"x": WordCounts(0, 0, 0)}
    assert found.keys() == {"length"}


class Halves:
    """Pieces of two characters, each word begun by a mark of its own where it is odd."""

    size, pad_id, bos_id, eos_id, unk_id = 6, 0, 1, 2, 3

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        mark = {0: [], 1: [4]}
        return [[*mark[len(line) % 2], *[5] * ((len(line) + 1) // 2)] for line in lines]

    def places_batch(self, lines: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        raise AssertionError(lines)

    def decode(self, ids: list[int]) -> Decoded:
        return Decoded("".join(str(index) for index in ids))

    def piece(self, index: int) -> str | None:
        return "\u2581" if index == 4 else "xx"


def test_fertility_is_the_number_of_pieces_without_the_mark_of_a_space() -> None:
    tokenizer = Tokenizer(Halves(), language_ids={}, size=6, fingerprint="")
    found = fertilities(tokenizer, ["abcd", "abc", "a", "ab"], language="de")
    assert found == {"abcd": 2, "abc": 2, "a": 1, "ab": 1}


def corpus(path: Path, *, training: Sequence[str]) -> Artifact:
    test, train = ({"de-en": {"de": [*lines], "en": [*lines]}} for lines in (REFERENCES, training))
    return make_corpus(path, {"test": test, "train": train})


def translations(path: Path, lines: Sequence[str]) -> Artifact:
    return make_translations(path, {"de-en": lines})


def counted(
    given: Artifact,
    systems: Mapping[str, Artifact],
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    side: Literal["source", "target"] = "target",
    max_lines: int = 100,
) -> WordAccuracy:
    """The words of one direction, in tokens of 13a."""
    tokenizers = {"en": "13a", "de": "13a"}
    inputs = WordInputs(given, systems, given, None, tokenizers, side=side, max_lines=max_lines)
    profile = DirectionProfile(Direction("de", "en"), "into_pivot", "low", 1, 4)
    tasks = word_tasks(inputs, [profile])
    results = [words_of_language(one) for one in tasks]
    groups = groups or {name: (name,) for name in systems}
    return join_words(results, tasks, profiles=[profile], groups=groups)


def scored(tmp_path: Path, *, training: Sequence[str], max_lines: int = 100) -> WordAccuracy:
    systems = {name: translations(tmp_path / name, lines) for name, lines in SYSTEMS.items()}
    return counted(corpus(tmp_path / "corpus", training=training), systems, max_lines=max_lines)


def by_brute_force(name: str, *, low: int, high: int, training: Sequence[str]) -> WordCounts:
    """Of the words that the training lines have at least ``low`` and less than ``high`` times."""
    trained = Counter(word for line in training for word in line.split())
    sums = [0, 0, 0]
    for hypothesis, reference in zip(SYSTEMS[name], REFERENCES, strict=True):
        counted = position_by_position(hypothesis.split(), reference.split())
        for place, counts in enumerate(counted):
            sums[place] += sum(n for word, n in counts.items() if low <= trained[word] < high)
    return WordCounts(*sums)


RANGES: Mapping[str, tuple[str, int, int]] = {
    **{str(count): ("frequency", count, count + 1) for count in range(4)},
    "5–9": ("frequency", 5, 10),
    **{"unseen": ("seen", 0, 1), "seen": ("seen", 1, 10**9)},
}


@pytest.mark.parametrize("max_lines", [100, 3, 1])
def test_words_by_training_frequency_are_those_that_brute_force_finds(
    tmp_path: Path, max_lines: int
) -> None:
    found = scored(tmp_path, training=TRAINING, max_lines=max_lines)
    read = TRAINING[:max_lines]
    assert found.training_lines == {"en": len(read)}
    assert found.families["into_pivot"] == found.directions["de-en"]
    for kind, (trait, low, high) in RANGES.items():
        for name in SYSTEMS:
            expected = by_brute_force(name, low=low, high=high, training=read)
            assert found.directions["de-en"][trait][kind][name] == expected, (kind, name)
    assert by_brute_force("ours", low=0, high=1, training=read).shared > 0


def test_word_counts_of_runs_are_summed(tmp_path: Path) -> None:
    systems = {f"x@{seed}": one for seed, one in enumerate(SYSTEMS.values())}
    paths = {name: translations(tmp_path / name, lines) for name, lines in systems.items()}
    given = corpus(tmp_path / "corpus", training=TRAINING)
    merged, apart = (
        counted(given, paths, groups=groups).directions["de-en"]["length"]
        for groups in ({"x": tuple(systems)}, None)
    )
    for kind, counts in merged.items():
        assert counts["x"] == sum(apart[kind].values(), start=WordCounts(0, 0, 0))


class Fixed(Aligner):
    """Alignments as compare-mt reads them from files, line after line."""

    def __init__(self, lines: Mapping[tuple[str, str], str]) -> None:
        self.lines = lines

    def align(self, source: Sequence[str], target: Sequence[str]) -> list[tuple[int, int]]:
        pairs = self.lines[" ".join(source), " ".join(target)].split()
        return [(int(i), int(j)) for i, j in (pair.split("-") for pair in pairs)]


def source_words_as_compare_mt(
    source: list[str], hypothesis: list[str], reference: list[str], ours: str, theirs: str
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Its loop over ``i-j``: (both, of the reference, of the output), by source word."""
    left = list(reference)
    both, of_reference, of_output = Counter[str](), Counter[str](), Counter[str]()
    for pair in ours.split():
        i, _, j = pair.partition("-")
        of_output[source[int(i)]] += 1
        if hypothesis[int(j)] in left:
            left.remove(hypothesis[int(j)])
            both[source[int(i)]] += 1
    for pair in theirs.split():
        of_reference[source[int(pair.partition("-")[0])]] += 1
    return both, of_reference, of_output


lines_of_words = st.lists(st.sampled_from(["a", "b", "cc"]), min_size=1, max_size=5)


@given(lines_of_words, lines_of_words, lines_of_words, st.data())
def test_source_words_are_counted_as_compare_mt_counts_them(
    source: list[str], hypothesis: list[str], reference: list[str], data: st.DataObject
) -> None:
    def drawn(target: list[str]) -> str:
        pairs = [f"{i}-{j}" for i in range(len(source)) for j in range(len(target))]
        return " ".join(data.draw(st.lists(st.sampled_from(pairs), unique=True)))

    ours = drawn(hypothesis)
    theirs = ours if hypothesis == reference else drawn(reference)
    one, *others = (" ".join(words) for words in (source, hypothesis, reference))
    aligner = Fixed(dict(zip([(one, other) for other in others], (ours, theirs), strict=True)))
    found = count_source_words([source], [hypothesis], [reference], aligner=aligner)
    expected = source_words_as_compare_mt(source, hypothesis, reference, ours, theirs)
    assert (found.shared, found.reference, found.hypothesis) == expected


def test_source_words_of_a_corpus_are_grouped_by_their_own_traits(tmp_path: Path) -> None:
    """By hand: ``ein Haus`` is right twice, ``Krankenwagen`` and ``neu`` are wrong once each."""
    dictionary = {"ein": "a", "Haus": "house", "Krankenwagen": "ambulance", "neu": "new"}
    sources = [*("ein Haus", "Haus neu", "ein Krankenwagen", "neu ein", "Krankenwagen Haus")] * 6
    texts = {"de": sources, "en": [" ".join(map(dictionary.get, s.split())) for s in sources]}  # type: ignore[arg-type]
    tested = {"de": ["ein Haus", "Krankenwagen neu"], "en": ["a house", "ambulance new"]}
    splits: Texts = {"train": {"de-en": texts}, "test": {"de-en": tested}}
    systems = {"ours": translations(tmp_path / "ours", ["a house", "house"])}
    found = counted(make_corpus(tmp_path / "corpus", splits), systems, side="source")
    assert found.side == "source"
    assert found.training_lines == {"de": 30}
    lengths = found.directions["de-en"]["length"]
    assert lengths["1–3"]["ours"].reference == 2  # ein, neu
    assert lengths["4–7"]["ours"] == WordCounts(1, 1, 1)  # Haus
    assert lengths["12–15"]["ours"].shared == 0  # Krankenwagen
    assert lengths["12–15"]["ours"].reference == 1
    assert found.directions["de-en"]["seen"]["unseen"]["ours"] == WordCounts(0, 0, 0)


def test_without_training_lines_words_are_told_apart_by_length_alone(tmp_path: Path) -> None:
    found = scored(tmp_path, training=[])
    assert found.training_lines == {}
    assert found.directions["de-en"].keys() == {"length"}
    assert found.directions["de-en"]["length"]["12–15"]["ours"] == WordCounts(1, 1, 1)


@pytest.mark.parametrize("pair", ["de-en+distilled", "de-en+back"])
def test_a_word_of_a_machine_in_the_training_lines_is_seen(tmp_path: Path, pair: str) -> None:
    sides = {"de": REFERENCES, "en": REFERENCES}
    trained = dict.fromkeys(pair.split("-"), REFERENCES)
    corpus = make_corpus(tmp_path / "corpus", {"test": {"de-en": sides}, "train": {pair: trained}})
    systems = {"ours": translations(tmp_path / "ours", SYSTEMS["ours"])}
    found = counted(corpus, systems)
    assert found.training_lines == {"en": len(REFERENCES)}
    words = sum(len(line.split()) for line in REFERENCES)
    assert found.directions["de-en"]["seen"]["seen"]["ours"].reference == words


def test_lines_of_other_languages_are_not_counted(tmp_path: Path) -> None:
    sides = {"de": REFERENCES, "en": REFERENCES}
    trained = {"de": REFERENCES[:1], "fr": REFERENCES[:1]}
    splits: Texts = {"test": {"de-en": sides}, "train": {"de-fr": trained}}
    systems = {"ours": translations(tmp_path / "ours", SYSTEMS["ours"])}
    found = counted(make_corpus(tmp_path / "corpus", splits), systems)
    assert found.training_lines == {"en": 0}
    assert found.directions["de-en"]["seen"]["seen"]["ours"] == WordCounts(0, 0, 0)
