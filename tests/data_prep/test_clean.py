"""Clean: each rule drops what it should and nothing else, whatever the number of workers."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.corpora import make_corpus, writing
from support.plain_rules import plain_clean
from support.stage_runs import run_stage

from data_prep.settings import CleanConfig
from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Split, emptied_pairs, imported_lines, line_counts, read_lines
from pipeline.artifacts.raw_input import RawInput
from pipeline.errors import DataError
from pipeline.evaluation.scores import describe_directions

Texts = dict[Split, list[tuple[str, str]]]
GOOD = [("Haus", "house"), ("Baum", "tree"), ("Straße", "road"), ("Wasser", "water")]


def corpus_of(directory: Path, pairs: dict[str, Texts]) -> Artifact:
    texts: dict[Split, Any] = {}
    for pair, splits in pairs.items():
        for split, lines in splits.items():
            sides = zip(pair.split("-"), zip(*lines, strict=True), strict=True)
            texts.setdefault(split, {})[pair] = {code: list(side) for code, side in sides}
    return make_corpus(directory, texts)


def cleaned(
    corpus: Artifact, *, processes: int = 1, tests: Any = None, **settings: Any
) -> Artifact:
    return run_stage(
        "clean",
        corpus.directory.with_name(f"clean{processes}"),
        {"corpus": corpus, **{f"tests/{name}": one for name, one in (tests or {}).items()}},
        processes=processes,
        clean=settings,
    )


def train_lines(corpus: Artifact, pair: str) -> list[tuple[str, str]]:
    sides = (read_lines(corpus, "train", pair, code) for code in pair.split("-"))
    return list(zip(*sides, strict=True))


def dropped_by(corpus: Artifact, pair: str) -> dict[str, int]:
    """Rule → lines, of the rules that dropped any."""
    return {rule: count for rule, count in corpus.statistics["dropped"][pair].items() if count}


INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u202a\u202e\u2060\u2066\u2069\ufeff\ufe0f"


BROKEN = {
    "empty": [("", "nothing"), ("nichts", " \u3000\t"), (INVISIBLE, "nothing")],
    "too_long": [("ä" * 101, "a" * 30)],
    "control_characters": [
        *(("Klin\x07gel", "bell"), ("Zei\rle", "line"), ("Zei\x85le", "line")),
        ("Zeile", "li\u2028ne"),
    ],
    "copy": [("Hotel", "Hotel "), ("Ho\u200btel", "\u200eHotel\u200f")],
    "length_ratio": [("Au", "a very long translation"), ("eine sehr lange Übersetzung", "oh")],
    "duplicate": [("Baum", "tree"), ("Ba\u00adum", "\ufefftree")],
    "held_out_overlap": [
        *(("PRÜFUNG eins!", "something else"), ("etwas anderes", "Exam: one.")),
        ("Prü\u200bfung ei\u2060ns", "something else"),
        ("etwas anderes", "\u202aexam one\u202c"),
    ],
}
"""Rule → lines that break it. Invisible characters hide nothing."""


@pytest.mark.parametrize(
    ("rule", "line"), [(rule, line) for rule, lines in BROKEN.items() for line in lines]
)
def test_each_rule_drops_its_line_and_keeps_the_others(
    tmp_path: Path, rule: str, line: tuple[str, str]
) -> None:
    good = [*GOOD, ("ein\tTab", "a\ttab"), ("ä" * 100, "a" * 100)]
    corpus = corpus_of(
        tmp_path / "corpus",
        {"de-en": {"train": [*good, line], "test": [("Prüfung eins", "exam one")]}},
    )
    result = cleaned(corpus, max_characters=100)
    assert train_lines(result, "de-en") == good
    characters = result.statistics["characters"]["de-en"]["train"]
    german, english = ("".join(side) for side in zip(*good, strict=True))
    assert characters == {"de": len(german), "en": len(english)}
    assert dropped_by(result, "de-en") == {rule: 1}
    assert result.statistics["pairs"]["de-en"] == {"train": len(good), "test": 1}


def test_lines_are_limited_in_bytes_whatever_their_characters(tmp_path: Path) -> None:
    """``é`` has two bytes, ``अ`` three: 9 bytes each, and one more character is too long."""
    kept = [("é" * 4 + "e", "e" * 9), ("अ" * 3, "abc")]
    dropped = [("é" * 5, "e" * 9), ("अ" * 3, "a" * 10)]
    corpus = corpus_of(tmp_path / "corpus", {"de-en": {"train": [*kept, *dropped]}})
    result = cleaned(corpus, max_bytes=9, max_length_ratio=100)
    assert train_lines(result, "de-en") == kept
    assert result.statistics["dropped"]["de-en"]["too_long"] == 2


def test_a_dense_script_is_not_taken_for_a_bad_ratio(tmp_path: Path) -> None:
    lines = [(f"sentence number {number} of many", f"第{number}") for number in range(10, 20)]
    corpus = corpus_of(tmp_path / "corpus", {"en-zh": {"train": [*lines, ("three", "三三三三三")]}})
    result = cleaned(corpus)
    assert train_lines(result, "en-zh") == lines
    assert result.statistics["dropped"]["en-zh"]["length_ratio"] == 1


def test_a_line_held_out_in_another_pair_is_dropped_in_its_own_language_only(
    tmp_path: Path,
) -> None:
    corpus = corpus_of(
        tmp_path / "corpus",
        {
            "de-en": {"train": [("ein Land", "a land"), ("der Rat", "council")]},
            "de-fr": {"valid": [("Der Rat.", "le conseil")], "train": [("rot", "a land")]},
            "en-fr": {"test": [("other", "un"), ("A LAND", "un pays")], "train": GOOD},
        },
    )
    result = cleaned(corpus)
    pairs = {"de-en": [], "de-fr": ["rot"], "en-fr": [line[0] for line in GOOD]}
    for pair, kept in pairs.items():
        assert [line[0] for line in train_lines(result, pair)] == kept
    sides = result.statistics["dropped_sides"]["de-en"]["held_out_overlap"]
    assert sides == {"de": 1, "en": 1}


def test_a_held_out_line_of_punctuation_drops_nothing(tmp_path: Path) -> None:
    corpus = corpus_of(
        tmp_path / "corpus",
        {"de-en": {"train": [*GOOD, ("…?", "...!?")], "test": [("!!!", "???")]}},
    )
    assert len(train_lines(cleaned(corpus), "de-en")) == 5


def test_held_out_text_is_copied_byte_for_byte(tmp_path: Path) -> None:
    odd: Texts = {"train": GOOD, "valid": [("", "x\ry")], "test": [("same", "same"), ("\x85", "")]}
    corpus = corpus_of(tmp_path / "corpus", {"de-en": odd, "de-fr": {"test": [("eins", "un")]}})
    result = cleaned(corpus)
    names = corpus.names("valid/") + corpus.names("test/")
    assert len(names) == 6
    for name in names:
        assert result.manifest.files[name] == corpus.manifest.files[name]
    assert result.statistics["pairs"]["de-fr"] == {"test": 1}


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    pairs: dict[str, Texts] = {
        pair: {"train": GOOD * 2 + [(f"Wort {pair}", f"word {pair}")], "test": [("Haus", "haus")]}
        for pair in ("de-en", "de-fr", "de-nl")
    }
    corpus = corpus_of(tmp_path / "corpus", pairs)
    one, two = cleaned(corpus), cleaned(corpus, processes=2)
    assert one.digest == two.digest
    assert samples_of(one) == samples_of(two) != []
    assert one.statistics == two.statistics
    assert one.manifest.summary == two.manifest.summary
    assert dropped_by(one, "de-en") == {"duplicate": 4, "held_out_overlap": 1}


@pytest.mark.slow
def test_a_pair_stays_in_the_resource_group_it_was_imported_in(tmp_path: Path) -> None:
    large = [(f"Haus {number}", f"house {number}") for number in range(6)]
    corpus = corpus_of(
        tmp_path / "corpus",
        {"de-en": {"train": large * 2, "test": GOOD}, "en-fr": {"train": large, "test": GOOD}},
    )
    result = cleaned(corpus)
    assert line_counts(result, "train") == {"de-en": 6, "en-fr": 6}
    assert imported_lines(result) == imported_lines(corpus) == {"de-en": 12, "en-fr": 6}
    assert imported_lines(cleaned(result, processes=2)) == {"de-en": 12, "en-fr": 6}
    found = describe_directions(result, thresholds=(6, 12))
    assert {one.direction.pair: (one.resource, one.training_lines) for one in found} == {
        "de-en": ("high", 6),
        "en-fr": ("low", 6),
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_a_pair_that_vanishes_is_left_without_training_data_and_said_with_its_rules(
    tmp_path: Path, processes: int
) -> None:
    corpus = corpus_of(
        tmp_path / "corpus",
        {"de-en": {"train": GOOD}, "de-fr": {"train": [("", "un"), ("oui", "oui")]}},
    )
    result = cleaned(corpus, processes=processes)
    assert line_counts(result, "train") == {"de-en": 4}
    assert emptied_pairs(result) == {"de-fr"}
    assert result.manifest.summary[-1] == "no training data left: de-fr (empty: 1, copy: 1)"


def test_a_corpus_of_which_nothing_is_left_is_refused_with_its_rules(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "corpus", {"de-fr": {"train": [("", "un"), ("oui", "oui")]}})
    with pytest.raises(DataError, match=r"no training lines left \(empty: 1, copy: 1\)"):
        cleaned(corpus)
    assert not (tmp_path / "clean1").exists()


def test_pairs_that_import_found_empty_stay_so(tmp_path: Path) -> None:
    with writing(tmp_path / "corpus", "corpus") as writer:
        writer.statistics |= {"pairs": {"de-fr": {"train": 0, "test": 0}}, "emptied": ["de-fr"]}
    result = cleaned(open_artifact(tmp_path / "corpus", kind="corpus"))
    assert emptied_pairs(result) == {"de-fr"}
    assert result.manifest.summary[-1] == "no training data left: de-fr"


def test_the_summary_says_what_was_dropped_by_rule_and_by_side(tmp_path: Path) -> None:
    train = [*GOOD, ("", "one"), ("", ""), ("a" * 101, "b"), ("Hotel", "Hotel"), GOOD[0]]
    corpus = corpus_of(tmp_path / "corpus", {"de-en": {"train": train, "valid": [("eins", "one")]}})
    assert cleaned(corpus, max_characters=100).manifest.summary == (
        "read 9 training lines of 1 pair, kept 4; 1 validation and test line as they were",
        "dropped: empty 2 (de 2, en 1), too_long 1 (de 1), copy 1, duplicate 1",
        "most from: de-en 55.6%",
    )


RUSSIAN = [(f"sentence {word}", f"предложение {word}") for word in ("a", "b", "c", "d")]


def test_a_line_whose_sides_are_exchanged_is_dropped_where_scripts_tell(tmp_path: Path) -> None:
    swapped = ("совсем другое", "quite another")
    mixed = ("the word слово", "слово the word")
    train = [*RUSSIAN, swapped, mixed, ("42", "№ 42"), ("Москва", "Москва!")]
    corpus = corpus_of(tmp_path / "corpus", {"en-ru": {"train": train}})
    result = cleaned(corpus)
    assert train_lines(result, "en-ru") == [line for line in train if line != swapped]
    assert result.statistics["dropped"]["en-ru"]["swapped"] == 1


def test_the_script_that_import_found_goes_before_the_usual_one(tmp_path: Path) -> None:
    """Serbian in Latin letters: no line of it is exchanged with an English one."""
    train = [("a sentence", "rečenica"), ("Нови Сад", "Novi Sad")]
    corpus = corpus_of(tmp_path / "usual", {"en-sr": {"train": train}})
    with writing(tmp_path / "corpus", "corpus") as writer:
        for name in corpus.names():
            writer.take_over(name, corpus)
        scripts = {code: {"script": "Latn"} for code in ("en", "sr")}
        writer.statistics |= {**corpus.statistics, "languages": scripts}
    result = cleaned(open_artifact(tmp_path / "corpus", kind="corpus"))
    assert train_lines(result, "en-sr") == train
    assert result.statistics["languages"]["sr"] == {"script": "Latn"}


def test_joiners_that_are_spelling_stay_in_the_text(tmp_path: Path) -> None:
    train = [("می\u200cروم", "I go"), ("ක්\u200dෂ", "ksha")]
    corpus = corpus_of(tmp_path / "corpus", {"en-fa": {"train": [(b, a) for a, b in train]}})
    assert [fa for _, fa in train_lines(cleaned(corpus), "en-fa")] == [fa for fa, _ in train]


def test_a_training_set_of_one_line_is_kept(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "corpus", {"de-en": {"train": [("ja", "certainly not, no")]}})
    assert train_lines(cleaned(corpus), "de-en") == [("ja", "certainly not, no")]


ODD = ["\u00ad", "\u200b", "\ufe0f", "\u0301", "\x07", "\x85", "\u2028", "\t", "é", "ﬁ", "２", "ſ"]


def odd_lines(alphabets: tuple[str, str], *, seed: int, count: int) -> list[tuple[str, str]]:
    """Lines that repeat, copy, exchange and end in all manners, from few words."""
    generator = random.Random(seed)
    words = [
        ["".join(generator.choices(letters, k=generator.randint(1, 7))) for _ in range(12)]
        for letters in alphabets
    ]
    lines = []
    for _ in range(count):
        sides = [" ".join(generator.choices(side, k=generator.randint(0, 6))) for side in words]
        if generator.random() < 0.4:
            place = generator.randint(0, len(sides[0]))
            sides[0] = sides[0][:place] + generator.choice(ODD) + sides[0][place:]
        if generator.random() < 0.1:
            sides.reverse()
        if generator.random() < 0.1:
            sides[1] = sides[0]
        lines.append((sides[0].capitalize(), sides[1] + generator.choice(["", ".", " !"])))
    return lines


@pytest.mark.parametrize(
    ("pair", "alphabets", "scripts"),
    [
        ("de-en", ("aäbß", "abc"), ({"Latn"}, {"Latn"})),
        ("en-ru", ("abc", "бяй"), ({"Latn"}, {"Cyrl"})),
        ("en-hi", ("abc", "कखिु\u094d"), ({"Latn"}, {"Deva"})),
        ("en-he", ("abc", "אבש\u05b8"), ({"Latn"}, {"Hebr"})),
        ("en-ko", ("abc", "가\u1112\u1161한"), ({"Latn"}, {"Hang", "Hani"})),
    ],
)
def test_every_line_is_judged_as_the_rules_say_one_character_at_a_time(
    tmp_path: Path, pair: str, alphabets: tuple[str, str], scripts: tuple[set[str], set[str]]
) -> None:
    lines = odd_lines(alphabets, seed=3, count=3000)
    held_out = odd_lines(alphabets, seed=3, count=40)
    corpus = corpus_of(tmp_path / "corpus", {pair: {"train": lines, "test": held_out}})
    sides = ([line[0] for line in held_out], [line[1] for line in held_out])
    config = CleanConfig(max_characters=30)
    broken = plain_clean(lines, held_out=sides, scripts=scripts, config=config)
    result = cleaned(corpus, max_characters=30)
    kept = [line for line, rule in zip(lines, broken, strict=True) if rule is None]
    assert train_lines(result, pair) == kept
    counts = Counter(rule for rule in broken if rule is not None)
    assert dropped_by(result, pair) == counts
    assert len(counts) >= 6


def samples_of(corpus: Artifact) -> list[dict[str, Any]]:
    text = corpus.file("dropped_samples.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_ten_lines_of_each_rule_are_kept_with_their_places(tmp_path: Path) -> None:
    corpus = corpus_of(
        tmp_path / "corpus",
        {
            "de-en": {"train": [*GOOD, *[(f"gleich {n}", f"gleich {n}") for n in range(50)]]},
            "de-fr": {"train": [*GOOD, ("", "vide"), *[("même", "même")] * 30, ("x" * 900, "y")]},
        },
    )
    result = cleaned(corpus, max_characters=800)
    found = samples_of(result)
    assert Counter(row["rule"] for row in found) == {"copy": 10, "empty": 1, "too_long": 1}
    for row in found:
        line = train_lines(corpus, row["pair"])[row["line"] - 1]
        text = [row["text"][code] for code in row["pair"].split("-")]
        assert text == [side[:300] for side in line]
    assert [row["sides"] for row in found if row["rule"] == "empty"] == [["de"]]
    assert [row["sides"] for row in found if row["rule"] == "copy"] == [[]] * 10


@pytest.mark.slow
def test_samples_are_drawn_evenly_from_all_that_a_rule_dropped(tmp_path: Path) -> None:
    """Not the first ten: each tenth of the corpus is drawn from about as often as the others."""
    tenths: Counter[int] = Counter()
    for number in range(20):
        pair = f"d{chr(ord('a') + number)}-en"
        lines = [(f"gleich {line}", f"gleich {line}") for line in range(400)]
        corpus = corpus_of(tmp_path / f"{number}" / "corpus", {pair: {"train": [*lines, GOOD[0]]}})
        tenths.update((row["line"] - 1) // 40 for row in samples_of(cleaned(corpus)))
    assert tenths.total() == 200
    assert max(tenths.values()) < 40
    assert min(tenths.values()) > 5


def leaks_of(corpus: Artifact) -> Any:
    return json.loads(corpus.file("held_out_leaks.json").read_text("utf-8"))


def test_leaks_are_counted_per_pair_and_held_out_set_of_every_pair_and_corpus(
    tmp_path: Path,
) -> None:
    corpus = corpus_of(
        tmp_path / "corpus",
        {
            "de-en": {
                "train": [*GOOD, ("der Rat", "council"), ("Dorf", "A village")],
                "test": [("der Rat!", "the council")],
            },
            "de-fr": {"train": [("Der Rat", "conseil"), ("oui", "si")], "valid": [("Haus", "m")]},
        },
    )
    flores = corpus_of(
        tmp_path / "flores", {"en-sw": {"test": [("a village", "kijiji"), ("house", "nyumba")]}}
    )
    result = cleaned(corpus, tests={"flores": flores})
    assert leaks_of(result) == {
        "sets": {"de-fr/valid": 1, "de-en/test": 1, "flores:en-sw/test": 2},
        "pairs": {
            "de-en": {"de-fr/valid": 1, "de-en/test": 1, "flores:en-sw/test": 2},
            "de-fr": {"de-en/test": 1},
        },
    }
    assert train_lines(result, "de-en") == GOOD[1:]
    assert train_lines(result, "de-fr") == [("oui", "si")]


def test_leaks_are_counted_where_they_are_not_dropped(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "corpus", {"de-en": {"train": GOOD, "test": [("Haus", "x")]}})
    result = cleaned(corpus, drop_held_out_overlap=False)
    assert train_lines(result, "de-en") == GOOD
    assert leaks_of(result)["pairs"] == {"de-en": {"de-en/test": 1}}
    said = "held-out lines in training text, most: de-en 1 of de-en/test"
    assert result.manifest.summary[-1] == said


@pytest.mark.parametrize(
    ("plain", "name", "code"),
    [("zh", "test.en-zh_TW.zh_TW", "zh_Hant"), ("pt", "newstest2019-ref.por-BR.txt", "pt_BR")],
)
def test_a_test_set_of_one_script_or_region_is_kept_out_of_the_lines_of_that(
    plain: str, name: str, code: str, tmp_path: Path
) -> None:
    lines = [("one", "uno"), ("two", "dos")]
    pairs: dict[str, Texts] = {f"en-{one}": {"train": lines} for one in (plain, code)}
    (raw := tmp_path / "raw").mkdir()
    (raw / name).write_text("uno!\n", "utf-8")
    english = "newstest2019-src.eng.txt" if name.startswith("news") else f"{name[:-5]}en"
    (raw / english).write_text("else\n", "utf-8")
    tests = run_stage("import_tests", tmp_path / "tests", {}, raw=RawInput((raw,)))
    assert line_counts(tests, "test") == {f"en-{plain}": 1}, "the only one has the plain code"
    result = cleaned(corpus_of(tmp_path / "corpus", pairs), tests={"x": tests})
    assert train_lines(result, f"en-{plain}") == lines
    assert train_lines(result, f"en-{code}") == lines[1:]
    alone = corpus_of(tmp_path / "one" / "corpus", {f"en-{plain}": {"train": lines}})
    assert train_lines(cleaned(alone, tests={"x": tests}), f"en-{plain}") == lines[1:]


@pytest.mark.parametrize(("plain", "code"), [("pt", "pt_BR"), ("es", "es_MX")])
def test_a_test_set_of_regions_that_are_joined_is_kept_out_of_the_lines_of_each(
    plain: str, code: str, tmp_path: Path
) -> None:
    (raw := tmp_path / "raw").mkdir()
    for pair in (("en", plain), ("fr", code)):
        for one in pair:
            (raw / f"x.{'-'.join(pair)}.{one}").write_text(f"{one} text\n", "utf-8")
    tests = run_stage("import_tests", tmp_path / "tests", {}, raw=RawInput((raw,)))
    lines = [("one", f"{plain} text"), ("two", f"{code} text"), ("three", "dos")]
    pairs: dict[str, Texts] = {f"en-{one}": {"train": lines} for one in (plain, code)}
    result = cleaned(corpus_of(tmp_path / "corpus", pairs), tests={"x": tests})
    assert [train_lines(result, pair) for pair in pairs] == [lines[2:]] * 2


def test_the_command_takes_more_corpora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = corpus_of(tmp_path / "corpus", {"de-en": {"train": GOOD}})
    more = corpus_of(tmp_path / "more", {"en-fr": {"test": [("HOUSE", "maison")]}})
    out = tmp_path / "clean"
    arguments = ["clean", "--recipe", "smoke", "--corpus", str(corpus.directory)]
    arguments += ["--out", str(out), "--tests", f"flores={more.directory}"]
    assert cli.main(arguments) == 0
    result = open_artifact(out, kind="corpus")
    assert train_lines(result, "de-en") == GOOD[1:]
    assert leaks_of(result)["sets"] == {"flores:en-fr/test": 1}
    assert result.manifest.inputs["tests/flores"].digest == more.digest
    assert "de-en 1 of flores:en-fr/test" in capsys.readouterr().out


@pytest.mark.slow
def test_wrong_languages_are_dropped_where_asked_for_and_counted(tmp_path: Path) -> None:
    sentence = (
        "Der Rat hat gestern beschlossen, die 3 Schulen neu zu bauen.",
        "The council decided yesterday to build the 3 schools anew.",
    )
    wrong = (sentence[1].replace("council", "board"), "The board has decided to build them again.")
    cherokee = ("ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ", "quite another language than that of the others")
    corpus = corpus_of(
        tmp_path / "corpus",
        {
            "de-en": {"train": [*GOOD, sentence, wrong, ("Rat", "council"), sentence]},
            "chr-en": {"train": [cherokee, GOOD[0]]},
        },
    )
    assert len(train_lines(cleaned(corpus), "de-en")) == 7
    result = cleaned(corpus, processes=2, identify_languages="langdetect")
    assert train_lines(result, "de-en") == [*GOOD, sentence, ("Rat", "council")]
    assert dropped_by(result, "de-en") == {"duplicate": 1, "wrong_language": 1}
    assert result.statistics["dropped_sides"]["de-en"]["wrong_language"] == {"de": 1, "en": 0}
    assert result.statistics["language_not_known"] == {"chr-en": {"chr": 2}, "de-en": {}}
