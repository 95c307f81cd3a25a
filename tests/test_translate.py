"""The translate stage, from a tiny checkpoint of bytes to translations."""

import json
import os
import re
import shutil
import signal
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from pydantic import TypeAdapter
from support.corpora import make_corpus, writing
from support.folder_listing import names_in
from support.forked import run_command
from support.lock_holders import elsewhere, leave
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import attend_to_source, tiny_model

from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import (
    Details,
    Direction,
    Hypothesis,
    directions,
    read_hypotheses,
    text_name,
)
from pipeline.artifacts.locks import lock_path
from pipeline.artifacts.vocabularies import SPECIALS, ByteVocabulary
from pipeline.config.recipe import load_recipe, parse_overrides
from pipeline.config.settings import Route
from pipeline.decoding.beam_search import beam_search
from pipeline.decoding.hypotheses import Source, Translation
from pipeline.decoding.minimum_bayes_risk import expected_utility
from pipeline.decoding.sentences import UNKNOWN
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.distributed.world import World
from pipeline.errors import EXIT_RUN_AGAIN, EXIT_USER_ERROR, ConfigError
from pipeline.model.settings import MoEConfig
from pipeline.stages.translate import (
    DoneLines,
    Selection,
    Tally,
    WorkingTime,
    lengths_over_ranks,
    summarize,
)
from pipeline.stages.translate_text import find_directions

LANGUAGES = ("de", "en", "fr")
MAX_POSITIONS = 40
LINES = {
    "de-en": {
        "de": ["Ein kurzer Satz.", "", "Ja", "Der zweite Satz ist etwas länger.", "x" * 100],
        "en": ["A short sentence.", "Empty.", "Yes", "The second one is longer.", "x y z"],
    },
    "en-fr": {
        "en": ["Bread", "  ", "We are going home now."],
        "fr": ["Du pain", "Rien", "Nous rentrons maintenant."],
    },
}
NUM_LINES = 2 * (5 + 3)
DECODING = "beam_size = 2\nmax_length_ratio = 0.3\nmax_extra_length = 6\n"


@dataclass(frozen=True)
class Bench:
    """A checkpoint, a corpus and a recipe in a folder."""

    directory: Path
    checkpoint: Artifact
    corpus: Artifact

    def command(self, out: str, *more: str, decoding: str = DECODING) -> list[str]:
        """Arguments of ``mmnmt`` that translate the corpus."""
        recipe_path = self.directory / "recipe.toml"
        recipe_path.write_text(f"[decoding]\n{decoding}tokens = 100\n", encoding="utf-8")
        inputs = {"checkpoint": self.checkpoint.directory, "corpus": self.corpus.directory}
        named = [part for name, path in inputs.items() for part in (f"--{name}", str(path))]
        out_options = ["--out", str(self.directory / out)]
        return ["translate", "--recipe", str(recipe_path), *named, *out_options, *more]

    def run(self, out: str, *more: str, decoding: str = DECODING) -> int:
        return cli.main(self.command(out, *more, decoding=decoding))

    def found(self, out: str) -> dict[str, list[Hypothesis]]:
        """Direction → hypotheses of a finished run."""
        artifact = self.made(out)
        artifact.check()
        return {str(one): read_hypotheses(artifact, one) for one in directions(self.corpus, "test")}

    def made(self, out: str) -> Artifact:
        return open_artifact(self.directory / out, kind="translations")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    moe = MoEConfig(num_experts=4)
    spec = byte_spec(moe=moe, groups=2, languages=3, max_positions=MAX_POSITIONS)
    model = tiny_model(spec.model_copy(update={"language_groups": (0, 1, 1)}))
    attend_to_source(model, factor=6)
    made = make_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint", model)
    return open_artifact(made, kind="checkpoint")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    return make_corpus(folder, {"test": LINES}, trained=dict.fromkeys(LINES, 9))


@pytest.fixture
def bench(checkpoint: Artifact, corpus: Artifact, tmp_path: Path) -> Bench:
    return Bench(tmp_path, checkpoint, corpus)


@pytest.fixture(scope="module")
def whole(
    checkpoint: Artifact, corpus: Artifact, tmp_path_factory: pytest.TempPathFactory
) -> Bench:
    """A bench whose output ``out`` is finished; no test may change it."""
    bench = Bench(tmp_path_factory.mktemp("whole"), checkpoint, corpus)
    assert bench.run("out") == 0
    return bench


def assert_same(found: dict[str, list[Hypothesis]], expected: dict[str, list[Hypothesis]]) -> None:
    """Texts equal, scores up to what another cut into batches rounds differently."""
    assert found.keys() == expected.keys()
    for direction, hypotheses in expected.items():
        pairs = zip(found[direction], hypotheses, strict=True)
        for one, other in pairs:
            assert (one.text, one.split) == (other.text, other.split)
            assert one.score == pytest.approx(other.score, abs=2e-4)


# ---------------------------------------------------------------- the stage


@pytest.mark.slow
def test_every_line_is_translated_as_if_it_were_alone_and_kept_in_order(whole: Bench) -> None:
    found = whole.found("out")
    assert set(found) == {"de-en", "en-de", "en-fr", "fr-en"}
    translator = Translator(whole.checkpoint, DecodingConfig(**tomllib.loads(DECODING)))
    expected = {
        name: [
            translator.translate([Job(Direction(*name.split("-")), line, text)])[0]
            for line, text in enumerate(LINES["-".join(sorted(name.split("-")))][name[:2]])
        ]
        for name in found
    }
    assert_same(found, expected)
    texts = [one.text for lines in found.values() for one in lines if one.text]
    assert len(set(texts)) > NUM_LINES / 2


def test_empty_lines_stay_empty_and_too_long_ones_are_translated_in_parts_and_say_so(
    whole: Bench,
) -> None:
    found = whole.found("out")
    assert found["de-en"][1] == found["en-fr"][1] == Hypothesis("")
    assert [one.split for one in found["de-en"]] == [0, 0, 0, 0, 4]
    assert not any(one.truncated for lines in found.values() for one in lines)


def test_a_long_line_is_what_its_sentences_are_joined(checkpoint: Artifact) -> None:
    translator = Translator(checkpoint, DecodingConfig(beam_size=2, max_extra_length=6))
    sentences = ["Das ist der erste Satz.", "Und hier der zweite!", "Ja?"]

    def translated(text: str) -> Hypothesis:
        return translator.translate([Job(Direction("de", "en"), 0, text)])[0]

    alone = [translated(sentence) for sentence in sentences]
    joined = translated("  ".join(sentences))
    assert joined.text == " ".join(one.text.strip() for one in alone if one.text.strip())
    assert (joined.split, joined.truncated) == (3, False)


@pytest.mark.parametrize("typed", ["  Ein Satz.", "Ein Satz.\u3000 "])
def test_white_space_around_a_line_changes_nothing(typed: str, checkpoint: Artifact) -> None:
    translator = Translator(checkpoint, DecodingConfig(beam_size=2, max_extra_length=6))
    jobs = [
        Job(Direction("de", "en"), line, text) for line, text in enumerate((typed, "Ein Satz."))
    ]
    one, other = translator.translate(jobs)
    assert one == other
    assert translator.lengths(jobs) == [9, 9]


def test_the_score_of_a_split_line_is_the_mean_over_its_tokens(
    checkpoint: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = Translator(checkpoint, DecodingConfig())

    def answered(_: object, sources: Sequence[Source]) -> object:
        longest_first = [Translation((7, 7, 7), -2.0), Translation((7,), -1.0)]
        return [[one] for one in longest_first[: len(sources)]]

    monkeypatch.setattr(Translator, "search", answered)
    text = "Ein ziemlich langer erster Satz. Und ein zweiter."
    (found,) = translator.translate([Job(Direction("de", "en"), 0, text)])
    assert found.score == pytest.approx((4 * -2.0 + 2 * -1.0) / 6, abs=1e-4)


def test_a_line_that_just_fits_is_translated_whole_and_one_token_more_is_not(
    checkpoint: Artifact,
) -> None:
    translator = Translator(checkpoint, DecodingConfig(beam_size=2))
    fits, longer = (
        translator.translate([Job(Direction("de", "en"), 0, "x" * length)])[0]
        for length in (MAX_POSITIONS - 2, MAX_POSITIONS - 1)
    )
    assert (fits.split, longer.split) == (0, 2)
    assert not fits.truncated
    assert not longer.truncated


def test_only_a_character_that_does_not_fit_by_itself_is_truncated_and_says_so(
    checkpoint: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = Translator(checkpoint, DecodingConfig(beam_size=1))
    monkeypatch.setattr(translator, "max_tokens", 2)
    (found,) = translator.translate([Job(Direction("de", "en"), 0, "ab 中")])
    assert (found.split, found.truncated) == (2, True)


def test_the_parts_of_long_lines_are_batched_within_the_budget(
    checkpoint: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = DecodingConfig(beam_size=2, tokens=200, max_length_ratio=0.1, max_extra_length=2)
    translator = Translator(checkpoint, decoding)
    sizes: list[tuple[int, int]] = []

    def recorded(_: object, sources: Sequence[Source]) -> object:
        sizes.append((len(sources), max(len(source.tokens) for source in sources)))
        return [[Translation((), -1.0)] for _ in sources]

    monkeypatch.setattr(Translator, "search", recorded)
    translator.translate([Job(Direction("de", "en"), 0, "Ein Satz. " * 100)])
    assert sum(count for count, _ in sizes) == 100
    assert all(count * longest * 2 <= 200 for count, longest in sizes)
    assert len(sizes) < 50


def test_a_line_is_tagged_with_both_languages_and_ended(bench: Bench) -> None:
    decoding = DecodingConfig(beam_size=2)
    translator = Translator(bench.checkpoint, decoding)
    text = "Ein Satz"
    german, english = (ByteVocabulary.size + LANGUAGES.index(code) for code in ("de", "en"))
    eos_id = ByteVocabulary.eos_id
    (piece_ids,) = ByteVocabulary().encode_batch([text])
    source = Source(
        tokens=[german, *piece_ids, eos_id],
        prompt=(eos_id, english),
        source_language=LANGUAGES.index("de"),
        target_language=LANGUAGES.index("en"),
    )
    (expected,) = beam_search(translator.model, [source], translator.config, eos_id=eos_id)
    (found,) = translator.translate([Job(Direction("de", "en"), 0, text)])
    assert found.score == round(expected.score, 4)
    assert found.text == translator.tokenizer.decode(expected.tokens)


def test_the_statistics_and_the_summary_count_lines_empty_and_cut_ones(whole: Bench) -> None:
    found, manifest = whole.found("out"), whole.made("out").manifest
    every = [one for lines in found.values() for one in lines]
    invalid = {name: sum(one.invalid for one in lines) for name, lines in found.items()}
    assert sum(invalid.values()) > 10, "a model without training writes anything"
    assert manifest.statistics == {
        "lines": NUM_LINES,
        "empty": sum(not one.text for one in every),
        "truncated": 0,
        "split": 1,
        "invalid": sum(one.invalid > 0 for one in every),
        "unknown": 0,
        "at_limit": sum(one.at_limit for one in every),
        "invalid_sequences": {name: count for name, count in invalid.items() if count},
        "directions": {"de-en": 5, "en-de": 5, "en-fr": 3, "fr-en": 3},
        "skipped_directions": [],
    }
    lines, split, at_limit, of_bytes = manifest.summary
    assert lines.startswith(f"{NUM_LINES} lines in 4 directions translated; ")
    assert split.startswith("1 line too long for the model: ")
    assert at_limit.startswith(f"{manifest.statistics['at_limit']} translations as long as ")
    most_first = sorted(invalid, key=lambda name: (-invalid[name], name))
    by_direction = ", ".join(f"{name} {invalid[name]}" for name in most_first if invalid[name])
    assert of_bytes.endswith(": " + by_direction)


def test_broken_bytes_are_dropped_and_counted_in_every_part_of_a_line(
    checkpoint: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off, overlong, of a surrogate, out of range, and a start without what follows."""
    broken = [b"a\xe4\xb8", b"\xc0\xafb", b"\xed\xa0\x80", b"\xf5c", b"\xe4d\xc3\xa9\xef\xbf\xbd"]
    kept, sequences = ["a", "b", "", "c", "d\u00e9\ufffd"], [1, 2, 3, 1, 1]
    written = iter(broken)

    def answered(_: object, sources: Sequence[Source]) -> object:
        rows = [[byte + len(SPECIALS) for byte in next(written)] for _ in sources]
        return [[Translation(tuple(row), -1.0)] for row in rows]

    monkeypatch.setattr(Translator, "search", answered)
    translator = Translator(checkpoint, DecodingConfig(tokens=1))
    jobs = [Job(Direction("de", "en"), number, f"Satz {number}") for number in range(5)]
    found = [(one.text, one.invalid) for one in translator.translate(jobs)]
    assert found == list(zip(kept, sequences, strict=True))
    written = iter(broken)
    (whole,) = translator.translate([replace(jobs[0], text="Ein sehr langer Satz. " * 5)])
    assert (whole.split, whole.invalid) == (5, sum(sequences))


@pytest.mark.parametrize("search", ["beam", "sampling"])
@pytest.mark.parametrize(("ratio", "most"), [(0.0, 3), (0.5, 8)])
def test_a_translation_as_long_as_the_settings_permit_is_marked(
    checkpoint: Artifact, monkeypatch: pytest.MonkeyPatch, search: str, ratio: float, most: int
) -> None:
    """Ten source tokens: 8 letters, the language and end-of-sentence."""
    settings = {"max_length_ratio": ratio, "max_extra_length": 3, "search": search}
    translator = Translator(checkpoint, DecodingConfig.model_validate(settings))
    job = Job(Direction("de", "en"), 0, "Ein Satz")
    (found,) = translator.search(translator.sources([job]))
    assert len(found[0].tokens) <= most - 1
    for length in range(most):
        row = Translation(tuple(range(len(SPECIALS) + 97, len(SPECIALS) + 97 + length)), -1.0)
        monkeypatch.setattr(Translator, "search", lambda *_, row=row: [[row]])
        (hypothesis,) = translator.translate([job])
        assert hypothesis.at_limit == (length == most - 1)


def test_bytes_have_three_times_the_length_of_pieces_unless_a_recipe_says_otherwise(
    checkpoint: Artifact,
) -> None:
    for text, ratio in [
        ("", 6.0),
        ("decoding.beam_size=2", 6.0),
        ("decoding.max_length_ratio=2", 2),
    ]:
        overrides = parse_overrides(["tokenizer.kind=bytes", *filter(None, [text])])
        assert load_recipe(None, overrides).decoding.max_length_ratio == ratio
        without = load_recipe(None, parse_overrides([*filter(None, [text])])).decoding
        assert without.max_length_ratio == 2.0
        assert Translator(checkpoint, without).config.max_length_ratio == ratio


def test_lines_with_unknown_characters_and_long_ones_are_counted_and_told(tmp_path: Path) -> None:
    tally = Tally([Direction("de", "en")])
    for unknown in (0, 2, 0, 1):
        hypothesis = Hypothesis("x", unknown=unknown, at_limit=unknown == 2)
        tally.add(Direction("de", "en"), vars(hypothesis))
    with writing(tmp_path / "out", "translations") as writer:
        writer.statistics.update(tally.statistics())
        summarize(writer, Selection((Direction("de", "en"),), skipped=()))
    assert writer.summary[1:] == [
        "2 lines with characters that the model's vocabulary does not have",
        "1 translation as long as decoding.max_length_ratio, decoding.max_extra_length and the "
        "model's positions permit: the end may be cut off",
    ]


def test_translations_of_before_lines_were_split_are_still_read(tmp_path: Path) -> None:
    with writing(tmp_path / "old", "translations") as writer:
        line = {"text": "Ja", "score": -0.5, "truncated": True}
        path = writer.path("hypotheses/de-en.jsonl")
        path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    old = open_artifact(tmp_path / "old", kind="translations")
    assert read_hypotheses(old, Direction("de", "en")) == [Hypothesis("Ja", -0.5, truncated=True)]


# ---------------------------------------------------------------- details


def details_in(path: Path) -> list[Details]:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [TypeAdapter(Details).validate_json(line) for line in lines]


@pytest.mark.slow
def test_asked_for_details_stand_in_files_of_their_own_over_an_interruption(
    bench: Bench, whole: Bench, stop_after: Callable[[int], None]
) -> None:
    decoding = DECODING + "n_best = 2\nword_scores = true\nalignments = true\n"
    stop_after(3)
    assert bench.run("out", decoding=decoding) == EXIT_RUN_AGAIN
    stop_after(10**6)
    assert bench.run("out", decoding=decoding) == 0
    found, artifact = bench.found("out"), bench.made("out")
    assert_same(found, whole.found("out"))
    assert all(one.details is None for lines in found.values() for one in lines)
    assert artifact.names("details") == [f"details/{name}.jsonl" for name in sorted(found)]
    assert whole.made("out").names("details") == []
    for name, lines in found.items():
        best = [one.n_best[:1] for one in details_in(artifact.file(f"details/{name}.jsonl"))]
        assert [one[0].text for one in best if one] == [
            line.text for line, one in zip(lines, best, strict=True) if one
        ]
        assert not any(line.text for line, one in zip(lines, best, strict=True) if not one)
    details = details_in(artifact.file("details/de-en.jsonl"))
    for text, one, told in zip(LINES["de-en"]["de"], found["de-en"], details, strict=True):
        if not text:
            assert told == Details()
            continue
        assert len(told.n_best) == 2
        assert (told.n_best[0].text, told.n_best[0].score) == (one.text, one.score)
        assert told.n_best[0].score >= told.n_best[1].score
        words = "".join("".join(word.text for word in told.words).split())
        assert words.replace(UNKNOWN, "") == "".join(one.text.split())
        assert [word for _, word in told.alignment] == list(range(len(told.words)))
        assert all(0 <= word < len(told.source_words) for word, _ in told.alignment)
        assert "".join(told.source_words) == "".join(text.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "decoding",
    [
        "beam_size = 6\nn_best = 6\n",
        'search = "sampling"\nn_best = 8\ntop_k = 3\nsampling_temperature = 0.7\n',
    ],
)
def test_minimum_bayes_risk_on_two_ranks_chooses_from_the_list_of_one(
    bench: Bench, decoding: str
) -> None:
    decoding += "max_length_ratio = 0.3\nmax_extra_length = 6\n"
    assert bench.run("listed", decoding=decoding) == 0
    chosen = decoding + 'choose = "mbr"\n'
    ended = run_command(bench.command("out", "--processes", "2", decoding=chosen))
    assert ended.returncode == 0, ended.stderr
    found, listed, chosen_later = bench.found("out"), bench.made("listed"), 0
    for name, lines in bench.found("listed").items():
        for first, one, told in zip(
            lines, found[name], details_in(listed.file(f"details/{name}.jsonl")), strict=True
        ):
            if not one.split and told.n_best:
                texts = [candidate.text for candidate in told.n_best]
                utility, index = expected_utility(texts), texts.index(one.text)
                assert utility[index] == max(utility)
                scores = [other.score for other in told.n_best if other.text == one.text]
                assert one.score in [pytest.approx(score, abs=2e-4) for score in scores]
                chosen_later += one.text != first.text
    assert chosen_later > 2
    assert bench.made("out").names("details") == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("n_best = 3", "n_best 3 exceeds beam_size 2"),
        ('choose = "mbr"', "compares n_best hypotheses, and n_best is 1"),
        ("top_p = 1.5", "top_p"),
        ('banned = ["  "]', "the banned phrase '  ': it is empty"),
        ("alignments = true\nalignment_layer = 2", "the model has 2 decoder layers"),
        ('pivot = "zu"', "does not know the language 'zu'"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_in_one_sentence(
    bench: Bench, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert bench.run("out", decoding=f"{DECODING}{line}\n") == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_no_translation_has_a_banned_phrase(bench: Bench, whole: Bench) -> None:
    texts = [one.text for lines in whole.found("out").values() for one in lines]
    letters = sorted(Counter("".join(texts)).most_common(2))
    banned = [letter for letter, _ in letters]
    assert bench.run("out", decoding=f"{DECODING}banned = {json.dumps(banned)}\n") == 0
    found = [one.text for lines in bench.found("out").values() for one in lines]
    assert any(found)
    assert not {letter for text in found for letter in text} & {*banned}


# ---------------------------------------------------------------- which directions


def bench_of(bench: Bench, pairs: Sequence[str]) -> Bench:
    """Return a bench of a corpus of two test lines per pair and no training lines."""
    texts = {
        pair: {code: [f"{code} eins", f"{code} zwei"] for code in pair.split("-")} for pair in pairs
    }
    return replace(
        bench, corpus=make_corpus(bench.directory / "-".join(["tests", *pairs]), {"test": texts})
    )


def test_directions_the_model_does_not_know_are_left_out_and_listed(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    other = bench_of(bench, ["de-en", "de-zu", "de-fr"])
    assert other.run("out") == 0
    translations = other.made("out")
    translations.check()
    assert translations.statistics["directions"] == dict.fromkeys(
        ["de-en", "de-fr", "en-de", "fr-de"], 2
    )
    assert translations.statistics["skipped_directions"] == ["de-zu", "zu-de"]
    assert translations.names("hypotheses") == [
        f"hypotheses/{name}.jsonl" for name in ("de-en", "de-fr", "en-de", "fr-de")
    ]
    assert "2 directions skipped" in translations.manifest.summary[-1]
    said = capsys.readouterr().out
    assert "de-zu, zu-de" in said
    assert all(f"mmnmt translate: {line}\n" in said for line in translations.manifest.summary)


@pytest.mark.parametrize(
    ("plain", "spelling", "code"), [("zh", "zho_Hant", "zh_Hant"), ("pt", "pt-BR", "pt_BR")]
)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_test_sets_of_one_script_or_region_are_not_translated_into_another(
    plain: str,
    spelling: str,
    code: str,
    is_mixed: bool,
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = byte_spec(languages=3)
    spec = spec.model_copy(update={"languages": tuple(sorted(("en", plain, code)))})
    made = make_checkpoint(bench.directory / "model", tiny_model(spec))
    pair = f"en-{plain}"
    with writing(bench.directory / "tests", "corpus") as writer:
        for language in ("en", plain):
            writer.path(text_name("test", pair, language)).write_text("uno\n", encoding="utf-8")
        writer.statistics["pairs"] = {pair: {"test": 1}}
        writer.statistics["languages"] = {plain: {"spellings": [spelling, *[plain] * is_mixed]}}
    corpus = open_artifact(bench.directory / "tests", kind="corpus")
    other = replace(bench, corpus=corpus, checkpoint=open_artifact(made, kind="checkpoint"))
    assert other.run("out") == (0 if is_mixed else EXIT_USER_ERROR)
    said = f"calls '{plain}' what the model knows as '{code}'"
    assert (said in capsys.readouterr().err) is not is_mixed


@pytest.mark.parametrize(
    ("route", "others"), [("specific", []), ("shared", ["de-fr", "fr-de"])], ids=str
)
def test_languages_without_modules_are_left_out_where_the_route_needs_one(
    route: Route, others: list[str], bench: Bench, tmp_path: Path
) -> None:
    modules = {"kind": "low_rank", "rank": 2, "shared": True, "languages": ("de", "en")}
    spec = byte_spec(languages=3, model={"language_modules": modules})
    made = make_checkpoint(tmp_path / "modules", tiny_model(spec))
    checkpoint = open_artifact(made, kind="checkpoint")
    other = replace(bench_of(bench, ["de-en", "de-fr"]), checkpoint=checkpoint)
    assert other.run("out", decoding=DECODING + f'route = "{route}"\n') == 0
    taken = sorted(["de-en", "en-de", *others])
    assert [*other.made("out").statistics["directions"]] == taken
    translator = Translator(checkpoint, DecodingConfig(route=route))
    found = {str(one) for one in find_directions(translator, "de", targets=[])}
    assert found == {name for name in taken if name.startswith("de")}


@pytest.mark.parametrize("code", ["en", "eng", "en_Latn"])
def test_only_directions_into_the_targets_asked_for_are_translated(
    code: str, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    other = bench_of(bench, ["de-en", "de-fr", "en-fr"])
    assert other.run("out", decoding=DECODING + f'targets = ["{code}"]\n') == 0
    statistics = other.made("out").statistics
    assert list(statistics["directions"]) == ["de-en", "fr-en"]
    assert statistics["skipped_directions"] == ["de-fr", "en-de", "en-fr", "fr-de"]
    capsys.readouterr()
    for unknown in ("zu", "ita"):
        refused = DECODING + f'targets = ["{code}", "{unknown}"]\n'
        assert other.run("none", decoding=refused) == EXIT_USER_ERROR
        assert f"decoding.targets names '{unknown}', and the model" in capsys.readouterr().err
    two = DECODING + 'targets = ["en", "fra"]\n'
    one_pair = bench_of(bench, ["de-en"])
    assert one_pair.run("one", decoding=two) == 0
    assert "decoding.targets names fr, into which the corpus has no" in capsys.readouterr().out
    refused = DECODING + 'targets = ["fr"]\n'
    assert one_pair.run("none", decoding=refused) == EXIT_USER_ERROR
    assert "decoding.targets names fr, and none of" in capsys.readouterr().err


@pytest.mark.parametrize(("pivot", "code"), [("en", "en"), ("deu_Latn", "de")])
def test_lines_of_two_other_languages_go_through_the_pivot_and_all_others_do_not(
    bench: Bench, pivot: str, code: str
) -> None:
    other = bench_of(bench, ["de-en", "de-fr", "en-fr"])
    assert other.run("direct") == 0
    assert other.run("through", decoding=DECODING + f'pivot = "{pivot}"\n') == 0
    direct, through = other.found("direct"), other.found("through")
    one, two = sorted({*LANGUAGES} - {code})
    translator = Translator(bench.checkpoint, DecodingConfig(**tomllib.loads(DECODING)))
    for source, target in ((one, two), (two, one)):
        onward = Direction(code, target)
        halfway = direct[f"{source}-{code}"]
        jobs = [Job(onward, line, step.text) for line, step in enumerate(halfway)]
        name = f"{source}-{target}"
        expected = translator.translate(jobs)
        assert [line.text for line in through[name]] == [line.text for line in expected]
        assert [line.invalid for line in through[name]] == [
            first.invalid + last.invalid for first, last in zip(halfway, expected, strict=True)
        ]
        assert [line.unknown for line in through[name]] == [line.unknown for line in halfway]
        assert through.pop(name) != direct.pop(name)
    assert_same(through, direct)


def test_phrases_are_wanted_of_translations_and_not_of_what_they_go_through(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DecodingConfig(pivot="en", required=("ab",), banned=("c",))
    translator, seen = Translator(bench.checkpoint, config), list[Source]()
    searched = Translator._source

    def source(self: Translator, part: Any) -> Source:
        seen.append(found := searched(self, part))
        return found

    monkeypatch.setattr(Translator, "_source", source)
    (line,) = translator.translate([Job(Direction("de", "fr"), 0, "ja")])
    into, onward = seen[0], seen[-1]
    assert "ab" in line.text
    assert "c" not in line.text
    assert not into.required
    assert not into.banned
    assert onward.required
    assert onward.banned


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        (
            "ha is sw yo zu",
            r"knows none of 10 test directions .* and 5 more.*it knows de, en, fr",
        ),
        ("", "has no test lines"),
    ],
)
def test_a_corpus_without_a_direction_to_translate_is_refused_in_one_sentence(
    bench: Bench, capsys: pytest.CaptureFixture[str], codes: str, said: str
) -> None:
    other = bench_of(bench, [f"de-{code}" for code in codes.split()])
    assert other.run("out") == EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line)
    assert not (bench.directory / "out").exists()


@pytest.mark.parametrize("beam_size", [1, 3])
def test_batches_hold_every_line_once_within_the_budget(bench: Bench, beam_size: int) -> None:
    decoding = DecodingConfig(beam_size=beam_size, tokens=120)
    translator = Translator(bench.checkpoint, decoding)
    jobs = [Job(Direction("de", "en"), line, "y" * (7 * line % 38)) for line in range(50)]
    batches = translator.cut(jobs)
    assert sorted(job.line for batch in batches for job in batch) == list(range(50))
    for batch in batches:
        longest = max(len(job.text) for job in batch) + 2
        assert len(batch) == 1 or len(batch) * longest * beam_size <= 120
    assert len(batches) < 50 / (2 if beam_size == 1 else 1)


def test_half_precision_translates_in_half_precision(bench: Bench) -> None:
    decoding = DecodingConfig(precision="bfloat16", beam_size=2)
    translator = Translator(bench.checkpoint, decoding)
    assert {one.dtype for one in translator.model.parameters()} == {torch.bfloat16}
    (found,) = translator.translate([Job(Direction("de", "en"), 0, "Ja")])
    assert found.score < 0


@pytest.mark.parametrize(
    ("work", "lines", "told"),
    [
        ("begin_search", 1, "1 sentence"),
        ("begin_search", 3, "3 sentences"),
        ("_forced_passes", 1, "1 sentence"),
        ("_forced_passes", 3, "3 sentences"),
    ],
)
def test_a_gpu_without_memory_gives_up_kept_grids_and_then_says_what_to_set(
    checkpoint: Artifact, monkeypatch: pytest.MonkeyPatch, work: str, lines: int, told: str
) -> None:
    translator = Translator(checkpoint, DecodingConfig(word_scores=True))
    jobs = [Job(Direction("de", "en"), line, "abc") for line in range(lines)]
    expected, act = translator.translate(jobs), getattr(translator, work)
    kept: list[Any] = translator._grids._free

    def act_beside_grids(*given: Any) -> Any:
        if kept:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return act(*given)

    monkeypatch.setattr(translator, work, act_beside_grids)
    kept.append("a grid of an earlier batch")
    assert translator.translate(jobs) == expected
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    monkeypatch.setattr(translator, work, full)
    with pytest.raises(ConfigError, match=f"for {told} at a time. Set decoding.tokens to less"):
        translator.translate(jobs)


def test_an_unknown_language_is_named_with_its_nearest(bench: Bench) -> None:
    translator = Translator(bench.checkpoint, DecodingConfig())
    message = r"does not know the language 'deu'\. Choose from de, en, fr\. Did you mean 'de'\?"
    with pytest.raises(ConfigError, match=message):
        translator.translate([Job(Direction("en", "deu"), 0, "Yes")])
    with pytest.raises(ConfigError, match="does not know the language 'zz'"):
        translator.translate([Job(Direction("zz", "en"), 0, "Yes")])


# ---------------------------------------------------------------- interruption and ranks


def record_translated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the (direction, line) of everything that is translated from now on."""
    translated: list[tuple[str, int]] = []
    whole = Translator.translate

    def record(self: Translator, jobs: Sequence[Job]) -> list[Hypothesis]:
        translated.extend((str(job.direction), job.line) for job in jobs)
        return whole(self, jobs)

    monkeypatch.setattr(Translator, "translate", record)
    return translated


@pytest.mark.slow
@pytest.mark.parametrize("is_torn", [False, True], ids=["stopped", "killed within a line"])
def test_an_interrupted_run_goes_on_and_translates_nothing_twice(
    bench: Bench,
    whole: Bench,
    stop_after: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    is_torn: bool,
) -> None:
    """The time of all attempts counts, and a file of the user's outlives the run."""
    translated = record_translated(monkeypatch)
    stop_after(3)
    assert bench.run("out") == EXIT_RUN_AGAIN
    assert not (bench.directory / "out").exists()
    assert 0 < len(translated) < NUM_LINES
    folder = bench.directory / "out.run"
    again: list[tuple[str, int]] = []
    if is_torn:
        path = folder / "rank-00000.jsonl"
        content = path.read_bytes()
        path.write_bytes(content[:-7])
        torn = json.loads(content.splitlines()[-1])
        again.append((torn["direction"], torn["line"]))
        (folder / "notes.txt").write_text("mine")
    assert 0 < float((folder / "seconds.json").read_text(encoding="utf-8")) < 100
    (folder / "seconds.json").write_text("1000.0", encoding="utf-8")
    stop_after(10**6)
    clock = time.monotonic()
    assert bench.run("out") == 0
    elapsed = time.monotonic() - clock
    assert 1000 + elapsed / 2 < bench.made("out").manifest.run.wall_seconds < 1000 + elapsed
    assert Counter(translated) == Counter({*translated}) + Counter(again)
    assert len({*translated}) == NUM_LINES
    assert_same(bench.found("out"), whole.found("out"))
    kept = [".made-by-mmnmt", "notes.txt"] if is_torn else None
    assert (names_in(folder) if folder.exists() else None) == kept


@pytest.mark.parametrize("foreign", [None, "chunk-of-mine.txt"])
def test_a_run_that_ended_while_its_lines_were_removed_removes_the_rest_when_found_done(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    foreign: str | None,
) -> None:
    def end(done: DoneLines) -> None:
        if (bench.directory / "out").exists():  # else it begins
            (done.directory / "identity.json").unlink()
            raise SystemExit(9)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(DoneLines, "remove", end)
        bench.run("out")
    folder = bench.directory / "out.run"
    assert (folder / "rank-00000.jsonl").is_file()
    if foreign:
        (folder / foreign).write_text("mine")
    assert bench.run("out") == 0
    said = capsys.readouterr().err
    assert "already done" in said
    assert (names_in(folder) if folder.exists() else None) == (
        [".made-by-mmnmt", foreign] if foreign else None
    )
    assert f"{folder} is removed but for {foreign}" in said or not foreign


@pytest.mark.slow
def test_a_run_whose_lock_another_process_takes_keeps_no_more_translations(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = lock_path(bench.directory / "out")
    translated = record_translated(monkeypatch)
    recorded = Translator.translate
    first: list[tuple[str, int]] = []

    def take_lock(self: Translator, jobs: Sequence[Job]) -> list[Hypothesis]:
        if translated and not first:
            first.extend(translated)
            leave(lock, elsewhere(), generation=2)
        return recorded(self, jobs)

    with monkeypatch.context() as patch:
        patch.setattr(Translator, "translate", take_lock)
        assert bench.run("out") == EXIT_USER_ERROR
    assert "it is being written by process 1 on node7" in capsys.readouterr().err
    assert not (bench.directory / "out").exists()
    kept = (bench.directory / "out.run" / "rank-00000.jsonl").read_text(encoding="utf-8")
    assert len(kept.splitlines()) == len(first)
    shutil.rmtree(lock)
    translated.clear()
    assert bench.run("out") == 0
    assert len(translated) == NUM_LINES - len(first)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [60, 400])
def test_an_interrupted_run_goes_on_in_batches_of_another_size(
    bench: Bench,
    whole: Bench,
    stop_after: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
) -> None:
    """A plan passes --overwrite, and a command of the user's own does not."""
    translated = record_translated(monkeypatch)
    stop_after(3)
    assert bench.run("out") == EXIT_RUN_AGAIN
    kept = {*translated}
    assert 0 < len(kept) < NUM_LINES
    stop_after(10**6)
    translated.clear()
    option = [] if tokens == 60 else ["--overwrite"]
    assert bench.run("out", "--set", f"decoding.tokens={tokens}", *option) == 0
    assert kept.isdisjoint(translated)
    assert len(translated) == NUM_LINES - len(kept)
    assert_same(bench.found("out"), whole.found("out"))
    translated.clear()
    assert bench.run("out", "--overwrite", "--if-stale") == 0
    assert translated == [], "up to date in any size of batches"


@pytest.mark.slow
def test_what_was_translated_with_other_settings_is_replaced_only_on_demand(
    bench: Bench,
    whole: Bench,
    stop_after: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = DECODING.replace("beam_size = 2", "beam_size = 1")
    stop_after(3)
    assert bench.run("out", decoding=other) == EXIT_RUN_AGAIN
    (bench.directory / "out.run" / "seconds.json").write_text("1000.0", encoding="utf-8")
    stop_after(10**6)
    kept = (bench.directory / "out.run" / "rank-00000.jsonl").read_bytes()
    capsys.readouterr()
    assert bench.run("out") == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert "other settings or inputs (settings.decoding.beam_size: 1 → 2)" in said
    assert "--overwrite" in said
    assert (bench.directory / "out.run" / "rank-00000.jsonl").read_bytes() == kept
    assert bench.run("out", "--overwrite") == 0
    run = bench.made("out").manifest.run
    assert run.wall_seconds < 1000, "the time of what was thrown away does not count"
    assert_same(bench.found("out"), whole.found("out"))
    assert not (bench.directory / "out.run").exists()


@pytest.mark.parametrize("content", ["notes.txt", "states/update-0000001/manifest.json"])
def test_a_run_folder_that_is_not_of_translations_is_left_alone(
    bench: Bench, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = bench.directory / "out.run" / content
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert bench.run("out", "--overwrite") == EXIT_USER_ERROR
    assert "Name another --out, or move the folder away" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert names_in(path.parent) == [path.name]


@pytest.mark.parametrize("content", ["", "null", "[1]", "seven", "nan", "inf", "-3"])
def test_a_damaged_record_of_time_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "seconds.json"
    path.write_text(content, encoding="utf-8")
    assert WorkingTime(path, since=time.monotonic()).seconds < 1


@pytest.mark.slow
def test_two_ranks_translate_what_one_does_even_when_one_began(
    bench: Bench, whole: Bench, stop_after: Callable[[int], None]
) -> None:
    stop_after(2)
    assert bench.run("out") == EXIT_RUN_AGAIN
    ended = run_command(bench.command("out", "--processes", "2"))
    assert ended.returncode == 0, ended.stderr
    assert_same(bench.found("out"), whole.found("out"))


def test_every_rank_encodes_its_share_alone_and_all_cut_the_same_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ByCharacters:
        def lengths(self, jobs: Sequence[Job]) -> list[int]:
            return [len(job.text) for job in jobs]

    jobs = [Job(Direction("de", "en"), line, "x" * (7 * line % 11)) for line in range(11)]
    shares = [ByCharacters().lengths(jobs[rank::3]) for rank in range(3)]
    for rank in range(3):
        encoded: list[list[int]] = []

        def gathered(share: list[int], into: list[list[int]] = encoded) -> list[list[int]]:
            into.append(share)
            return shares

        monkeypatch.setattr("pipeline.stages.translate.gather_objects", gathered)
        world = World(rank, 3, rank, 3, "", 0)
        found = lengths_over_ranks(cast(Translator, ByCharacters()), jobs, world)
        assert found == [len(job.text) for job in jobs]
        assert encoded == [shares[rank]]


def test_a_signal_keeps_what_is_translated(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Translator.translate
    translated = record_translated(monkeypatch)

    def signalled(self: Translator, jobs: Sequence[Job]) -> list[Hypothesis]:
        os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, jobs)

    recorded = Translator.translate
    monkeypatch.setattr(Translator, "translate", signalled)
    assert bench.run("out") == EXIT_RUN_AGAIN
    kept = (bench.directory / "out.run" / "rank-00000.jsonl").read_text(encoding="utf-8")
    assert len(kept.splitlines()) > 0
    monkeypatch.setattr(Translator, "translate", recorded)
    assert bench.run("out") == 0
    assert len(translated) == NUM_LINES - len(kept.splitlines())
