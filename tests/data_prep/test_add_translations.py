"""Text and its machine translations as training pairs, from translated files to batches."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sacrebleu.metrics.chrf import CHRF
from support.corpora import Texts, make_corpus, writing
from support.plain_rules import plain_visible
from support.stage_runs import run_stage

from data_prep.clean import BLOCK_LINES
from data_prep.settings import MixtureConfig, SyntheticConfig
from pipeline import cli
from pipeline.artifacts.artifact import Artifact, InputRecord, new_artifact, open_artifact
from pipeline.artifacts.corpus import (
    emptied_pairs,
    languages,
    line_counts,
    provenance_name,
    read_lines,
    scores_name,
    translated_name,
)
from pipeline.artifacts.segmenters import Segmenters
from pipeline.artifacts.shards import lines_per_language, open_shard, read_mixture
from pipeline.artifacts.tokenizer import load_tokenizer
from pipeline.batching.feed import TrainingData
from pipeline.batching.settings import TagScheme
from pipeline.config.recipe import Recipe
from pipeline.errors import EXIT_USER_ERROR, ArtifactError, ConfigError, DataError
from pipeline.evaluation.scores import pivot_of

Line = tuple[str, Mapping[str, Any]]
"""A line, and the record of its translation."""

NATURAL: Texts = {
    "train": {
        "de-en": {
            "de": ["Haus", "ein Baum", "Straße am See", "der Weg"],
            "en": ["house", "a tree", "lake road", "the way"],
        },
        "en-fr": {"en": ["water", "old tree"], "fr": ["eau", "vieil arbre"]},
    },
    "valid": {"de-en": {"de": ["Prüfung"], "en": ["exam"]}},
    "test": {"de-en": {"de": ["Der Himmel ist blau!"], "en": ["The sky is blue."]}},
}


def translation(text: str, *, score: float = -0.5, **more: Any) -> Mapping[str, Any]:
    return {"text": text, "score": score, "truncated": False, "split": 0, "invalid": 0, **more}


def translated_text(
    directory: Path,
    texts: Mapping[str, Mapping[str, Sequence[Line]]],
    *,
    source: str = "en",
    with_source: bool = True,
) -> Artifact:
    """The output of translate_text: target → file → lines with their translations."""
    record = InputRecord(kind="checkpoint", path="/model", digest="ab" * 32)
    given: Any = {"inputs": {"checkpoint": record}}
    with new_artifact(directory, kind="translated_text", stage="x", config={}, **given) as writer:
        for target, files in texts.items():
            for name, lines in files.items():
                written = {
                    translated_name(target, name): [about["text"] for _, about in lines],
                    scores_name(target, name): [
                        json.dumps({key: value for key, value in about.items() if key != "text"})
                        for _, about in lines
                    ],
                }
                if with_source:
                    written[translated_name(source, name)] = [line for line, _ in lines]
                for path, content in written.items():
                    text = "".join(f"{line}\n" for line in content)
                    writer.path(path).write_text(text, encoding="utf-8")
        writer.statistics["directions"] = {
            f"{source}-{target}": sum(map(len, files.values())) for target, files in texts.items()
        }
    return open_artifact(directory, kind="translated_text")


def added(
    corpus: Artifact,
    out_dir: Path,
    *,
    use: str = "back_translation",
    back: Mapping[str, Artifact] = {},
    **more: Any,
) -> Artifact:
    """The corpus with translations, given by name, or as settings."""
    settings = {key: value for key, value in more.items() if key.startswith("min_")}
    systems = {f"translations/{key}": one for key, one in more.items() if key not in settings}
    backs = {f"back/{key}": one for key, one in back.items()}
    return run_stage(
        "add_translations",
        out_dir,
        {"corpus": corpus, **systems, **backs},
        synthetic={"use": use, **settings},
    )


def provenance(corpus: Artifact, pair: str) -> list[dict[str, Any]]:
    text = corpus.file(provenance_name(pair)).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def corpus(tmp_path: Path) -> Artifact:
    return make_corpus(tmp_path / "corpus", NATURAL)


@pytest.mark.parametrize("use", ["back_translation", "distillation"])
@pytest.mark.parametrize("min_score", [None, -1.0])
def test_lines_and_translations_are_paired_as_a_loop_over_them_does(
    corpus: Artifact, tmp_path: Path, use: str, min_score: float | None
) -> None:
    generator = random.Random(3)

    def drawn(target: str) -> Line:
        line = generator.choice(["", " \u200b", "one\ttwo", *(f"line {n}" for n in range(20))])
        words = ["", "\u00ad", *(f"{target} {n}" for n in range(20))]
        return line, translation(
            generator.choice(words),
            score=-generator.randrange(30) / 10,
            truncated=generator.random() < 0.1,
            invalid=int(generator.random() < 0.1),
        )

    names = {"one": ["a.txt", "deep/b.txt", "empty.txt"], "two": ["a.txt"]}
    given = {
        system: {
            target: {
                name: [drawn(target) for _ in range(0 if name == "empty.txt" else 50)]
                for name in files
            }
            for target in ("de", "nl")
        }
        for system, files in names.items()
    }
    for of_system in given.values():  # a file has the same lines in all targets
        for name, lines in of_system["de"].items():
            others = of_system["nl"][name]
            both = zip(lines, others, strict=True)
            of_system["nl"][name] = [(line, about) for (line, _), (_, about) in both]
    systems: dict[str, Any] = {
        name: translated_text(tmp_path / name, of) for name, of in given.items()
    }
    made = added(corpus, tmp_path / "out", use=use, min_score=min_score, **systems)
    mark = {"back_translation": "+back", "distillation": "+distilled"}[use]
    for target in ("de", "nl"):
        expected, origins = [], []
        for system in ("one", "two"):
            for name in names[system]:
                for line, about in given[system][target][name]:
                    is_whole = not about["truncated"] and not about["invalid"]
                    is_good = min_score is None or about["score"] >= min_score
                    has_text = all(plain_visible(one).strip() for one in (line, about["text"]))
                    if has_text and is_whole and is_good:
                        expected.append((line, about["text"]))
                        origin = {"system": system, "direction": f"en-{target}"}
                        origins.append({**origin, "score": about["score"]})
        machine = f"{target}{mark}"
        pair = "-".join(sorted(("en", machine)))
        found = [read_lines(made, "train", pair, side) for side in ("en", machine)]
        assert list(zip(*found, strict=True)) == expected
        assert provenance(made, pair) == origins
        assert sum(made.statistics["synthetic"][pair].values()) == len(expected) > 20
        assert made.statistics["characters"][pair]["train"] == {
            "en": sum(len(line) for line, _ in expected),
            machine: sum(len(text) for _, text in expected),
        }
    assert made.statistics["systems"] == dict.fromkeys(("one", "two"), "ab" * 32)
    assert languages(made) == ["de", "en", "fr", "nl"]
    for split, pairs in NATURAL.items():
        for pair, sides in pairs.items():
            for code, text in sides.items():
                assert read_lines(made, split, pair, code) == text
    made.check()


TRANSLATED = {
    "de": {
        "a.txt": [
            ("a lake", translation("ein See")),
            ("EXAM", translation("Test")),
            ("the sky", translation("der Himmel ist blau")),
            ("okay", translation("okay")),
            ("a road", translation("eine Straße")),
            ("a road", translation("eine Straße")),
        ]
    }
}


@pytest.fixture
def augmented(corpus: Artifact, tmp_path: Path) -> Artifact:
    return added(corpus, tmp_path / "out", moe=translated_text(tmp_path / "text", TRANSLATED))


def test_cleaning_leaves_no_held_out_line_on_any_side(augmented: Artifact, tmp_path: Path) -> None:
    settings = {"max_length_ratio": 9}
    cleaned = run_stage("clean", tmp_path / "clean", {"corpus": augmented}, clean=settings)
    assert read_lines(cleaned, "train", "de+back-en", "en") == ["a lake", "a road"]
    assert read_lines(cleaned, "train", "de+back-en", "de+back") == ["ein See", "eine Straße"]
    dropped = cleaned.statistics["dropped"]["de+back-en"]
    assert dropped["held_out_overlap"] == 2
    assert (dropped["copy"], dropped["duplicate"]) == (1, 1)
    assert line_counts(cleaned, "train") == {"de-en": 4, "de+back-en": 2, "en-fr": 2}
    assert pivot_of(cleaned) == "en"


@pytest.mark.parametrize("processes", [1, 2])
def test_cleaning_keeps_the_origin_of_every_line_that_it_keeps(
    corpus: Artifact, tmp_path: Path, processes: int
) -> None:
    generator = random.Random(5)
    lines = [f"line {number}" for number in range(3 * BLOCK_LINES)]
    given = {
        target: {
            "a.txt": [
                (line, translation(generator.choice([line, f"{target} {line}"]), score=-number))
                for number, line in enumerate(lines)
            ]
        }
        for target in ("de", "nl")
    }
    made = added(corpus, tmp_path / "out", moe=translated_text(tmp_path / "text", given))
    cleaned = run_stage(
        "clean", tmp_path / "clean", {"corpus": made}, processes=processes, clean={}
    )
    for target, pair in (("de", "de+back-en"), ("nl", "en-nl+back")):
        kept = read_lines(cleaned, "train", pair, "en")
        expected = [line for line, about in given[target]["a.txt"] if about["text"] != line]
        assert len(lines) > len(kept) > BLOCK_LINES
        assert kept == expected
        assert provenance(cleaned, pair) == [
            {"system": "moe", "direction": f"en-{target}", "score": -lines.index(line)}
            for line in kept
        ]
    assert not [name for name in cleaned.names("provenance/") if "back" not in name]
    cleaned.check()


def with_provenance(corpus: Artifact, directory: Path, texts: Mapping[str, str]) -> Artifact:
    """A corpus with other origins: pair → text of their file."""
    with writing(directory, "corpus", "add_translations") as writer:
        for name in corpus.names():
            if not name.startswith("provenance/"):
                writer.take_over(name, corpus)
        for pair, text in texts.items():
            writer.path(provenance_name(pair)).write_text(text, encoding="utf-8")
        writer.statistics |= corpus.statistics
    return open_artifact(directory, kind="corpus")


def test_text_of_no_origin_is_clean(augmented: Artifact, corpus: Artifact, tmp_path: Path) -> None:
    """Natural pairs, and pairs that an earlier version made."""
    old = with_provenance(augmented, tmp_path / "old", {})
    cleaned = [
        run_stage("clean", tmp_path / f"clean-{one.directory.name}", {"corpus": one})
        for one in (augmented, old, corpus)
    ]
    files = [
        {name: record for name, record in one.manifest.files.items() if "provenance" not in name}
        for one in cleaned
    ]
    assert files[0] == files[1] == cleaned[1].manifest.files
    assert cleaned[0].statistics == cleaned[1].statistics
    assert cleaned[0].has("provenance/de+back-en.jsonl")
    assert cleaned[2].names("provenance/") == []


def test_origins_of_other_numbers_of_lines_are_refused(augmented: Artifact, tmp_path: Path) -> None:
    cut = with_provenance(augmented, tmp_path / "cut", {"de+back-en": "{}\n"})
    with pytest.raises(ArtifactError, match=r"de\+back-en\.jsonl differ in their number of lines"):
        run_stage("clean", tmp_path / "clean", {"corpus": cut})


ENGLISH = "The ministers of both countries met in the capital to talk about the new border."
GERMAN = "Die Minister beider Länder trafen sich in der Hauptstadt, um über die Grenze zu reden."


@pytest.mark.parametrize("use", ["back_translation", "distillation"])
def test_a_side_in_another_language_is_dropped(corpus: Artifact, tmp_path: Path, use: str) -> None:
    """The side counts as its language, whatever its mark."""
    lines = [
        (ENGLISH, translation(GERMAN)),
        (ENGLISH[4:], translation("They discussed roads, bridges and the price of electricity.")),
        (GERMAN[4:], translation(GERMAN[4:].replace("Minister", "Könige"))),
        ("Short one", translation("He has it")),
    ]
    text = translated_text(tmp_path / "text", {"de": {"a.txt": lines}})
    made = added(corpus, tmp_path / "out", use=use, moe=text)
    settings = {"identify_languages": "langdetect"}
    cleaned = run_stage("clean", tmp_path / "clean", {"corpus": made}, clean=settings)
    (pair,) = (name for name in line_counts(cleaned, "train") if "+" in name)
    machine = next(side for side in pair.split("-") if "+" in side)
    assert read_lines(cleaned, "train", pair, "en") == [ENGLISH, "Short one"]
    assert read_lines(cleaned, "train", pair, machine) == [GERMAN, "He has it"]
    assert cleaned.statistics["dropped"][pair]["wrong_language"] == 2
    sides = cleaned.statistics["dropped_sides"][pair]["wrong_language"]
    assert sides == {machine: 1, "en": 1}
    assert len(provenance(cleaned, pair)) == 2


def with_backs(
    folder: Path, texts: Mapping[str, Mapping[str, Sequence[Line]]], seed: int
) -> dict[str, Artifact]:
    """A translation back of every target's text, with words lost and exchanged."""
    generator = random.Random(seed)

    def worn(line: str) -> str:
        words = [generator.choice([word, word, word, "xyz", ""]) for word in line.split()]
        return " ".join(words)

    return {
        target: translated_text(
            folder / f"back-{target}",
            {
                "en": {
                    name: [(about["text"], translation(worn(line))) for line, about in lines]
                    for name, lines in files.items()
                }
            },
            source=target,
        )
        for target, files in texts.items()
    }


@pytest.mark.parametrize("least", [None, 40.0])
def test_lines_that_do_not_survive_the_round_trip_are_left_out_by_sacrebleus_score(
    corpus: Artifact, tmp_path: Path, least: float | None
) -> None:
    lines = [f"the {size} house, by lake (no. {n})" for n in range(9) for size in ("big", "old")]
    texts = {
        target: {
            name: [(line, translation(f"{target} {line}")) for line in lines]
            for name in ("a.txt", "deep/b.txt")
        }
        for target in ("de", "nl")
    }
    backs = with_backs(tmp_path, texts, seed=3)
    made = added(
        corpus,
        tmp_path / "out",
        moe=translated_text(tmp_path / "text", texts),
        back={f"moe@{target}": back for target, back in backs.items()},
        min_round_trip=least,
    )
    scorer = CHRF(word_order=2)
    for target, pair in (("de", "de+back-en"), ("nl", "en-nl+back")):
        worn = [
            line
            for name in ("a.txt", "deep/b.txt")
            for line in backs[target].file(translated_name("en", name)).read_text().splitlines()
        ]
        scores = [
            scorer.sentence_score(back, [line]).score
            for back, line in zip(worn, lines * 2, strict=True)
        ]
        kept = [place for place, score in enumerate(scores) if least is None or score >= least]
        assert read_lines(made, "train", pair, "en") == [(lines * 2)[place] for place in kept]
        assert [one["round_trip"] for one in provenance(made, pair)] == pytest.approx(
            [scores[place] for place in kept], abs=1e-9
        )
        assert (len(kept) == 36) == (least is None)
        assert len(kept) > 9
    left_out = 72 - sum(map(sum, (of.values() for of in made.statistics["synthetic"].values())))
    assert (f"below min_round_trip {left_out}" in made.manifest.summary[-1]) == (least is not None)
    assert set(made.statistics["back"]) == {"moe@de", "moe@nl"}


def test_a_round_trip_of_other_translations_is_refused(corpus: Artifact, tmp_path: Path) -> None:
    text = translated_text(tmp_path / "text", TRANSLATED)
    back = with_backs(tmp_path, TRANSLATED, seed=1)["de"]
    changed = {"de": {"a.txt": [*TRANSLATED["de"]["a.txt"][1:], ("x", translation("y"))]}}
    shorter = {"de": {"a.txt": TRANSLATED["de"]["a.txt"][1:]}}
    refused: list[tuple[dict[str, Artifact], str]] = [
        ({}, r"en-de of moe need one round trip, and --back names none\..*moe@de"),
        ({"moe": back, "moe@de": back}, r"names several \(moe, moe@de\)"),
        ({"moe": back, "moe@2": back}, r"names moe@2, and no system of that name"),
        ({"moe": back, "web": back}, r"names web, and no system of that name has tr.* are moe\."),
        *(
            (
                {"moe": with_backs(tmp_path / name, texts, seed=1)["de"]},
                r"back-de does not translate the lines that .*text has in de\. Run .* text/de\.",
            )
            for name, texts in (("changed", changed), ("shorter", shorter))
        ),
    ]
    for given, said in refused:
        with pytest.raises(DataError, match=said):
            added(corpus, tmp_path / "out", moe=text, back=given, min_round_trip=1)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValidationError, match="min_round_trip"):
        SyntheticConfig(min_round_trip=101)


def test_what_cannot_be_paired_is_refused_in_one_sentence(corpus: Artifact, tmp_path: Path) -> None:
    old = translated_text(tmp_path / "old", TRANSLATED, with_source=False)
    with pytest.raises(ArtifactError, match=r"without the lines that they translate. Run trans"):
        added(corpus, tmp_path / "out", moe=old)
    text = translated_text(tmp_path / "text", TRANSLATED)
    with pytest.raises(DataError, match=r"of moe is kept \(left out: below min_score 6\)\. Lower"):
        added(corpus, tmp_path / "out", moe=text, min_score=-0.1)
    for names in ((), ("a.txt",)):
        empty = translated_text(tmp_path / f"empty{len(names)}", {"de": dict.fromkeys(names, ())})
        with pytest.raises(DataError, match=r"is kept \(the text has no lines\)\. Translate other"):
            added(corpus, tmp_path / "out", moe=empty)
    text = translated_text(
        tmp_path / "other", TRANSLATED | {"nl": {"a.txt": [("a lake", translation(""))] * 6}}
    )
    made = added(corpus, tmp_path / "once", moe=text)
    assert emptied_pairs(made) == {"en-nl+back"}
    before = {name: made.file(name).read_bytes() for name in made.names()}
    said = r"has translations already \(de\+back-en, en-nl\+back\)\. Add all"
    with pytest.raises(DataError, match=said):
        added(made, tmp_path / "twice", moe=text)
    assert {name: made.file(name).read_bytes() for name in made.names()} == before
    assert not (tmp_path / "out").exists()


def test_the_corpus_cannot_be_its_own_output(
    corpus: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = translated_text(tmp_path / "text", TRANSLATED)
    for out in (corpus, text):
        arguments = ["--corpus", str(corpus.directory), "--translations", f"moe={text.directory}"]
        more = ["--out", str(out.directory), "--overwrite"]
        assert cli.main(["add_translations", *arguments, *more]) == EXIT_USER_ERROR
        assert str(out.directory) in capsys.readouterr().err
        out.check()


def prepared(corpus: Artifact, folder: Path, *, segmenters: Mapping[str, str] = {}) -> Artifact:
    """Shards of a corpus."""
    tokenizer = {"kind": "bytes", "segmenters": segmenters}
    sections: Any = {"tokenizer": tokenizer, "shards": {"max_tokens": 40}}
    made = run_stage("train_tokenizer", folder / "tokenizer", {"corpus": corpus}, **sections)
    inputs = {"corpus": corpus, "tokenizer": made}
    return run_stage("make_shards", folder / "shards", inputs, **sections)


@pytest.mark.parametrize("use", ["back_translation", "distillation"])
@pytest.mark.parametrize("scheme", ["src-tgt", "tgt", "src-suffix-tgt"])
def test_a_translation_is_trained_on_in_one_direction_behind_one_tag_as_a_source(
    corpus: Artifact, tmp_path: Path, use: str, scheme: TagScheme
) -> None:
    text = translated_text(tmp_path / "text", TRANSLATED)
    shards = prepared(added(corpus, tmp_path / "out", use=use, moe=text), tmp_path)
    sections: Any = {
        "batches": {"tokens": 60, "micro_batches": 2, "window_steps": 3, "tag_scheme": scheme},
        "mixture": {"synthetic_share": 0.5},
    }
    made = run_stage("mix", tmp_path / "mixture", {"shards": shards}, **sections)
    batches = Recipe.model_validate({"name": "test", **sections}).batches
    data = TrainingData(shards, read_mixture(made), batches, seed=1)
    tokenizer = data.tokenizer
    assert tokenizer.languages == ("de", "en", "fr")
    data.check(max_positions=64)
    assert {str(way) for way, _ in data.validation(budget=60)} == {"de-en", "en-de"}
    is_source = use == "back_translation"
    lines = {(line, about["text"]) for line, about in TRANSLATED["de"]["a.txt"]}
    expected = {(other, line) if is_source else (line, other) for line, other in lines}
    tags = {code: tokenizer.language_token_id(code) for code in tokenizer.languages}
    names = sorted(line_counts(shards, "train"))
    synthetic = next(index for index, name in enumerate(names) if "+" in name)
    found, drawn, natural_ways = set(), 0, set()
    for step in islice(data.planner.steps((0, 0)), 12):
        for plan in step.micro_batches:
            batch = data.train.batch(plan)
            sources = batch.source_N.split(batch.source.bound_B.diff().tolist())
            targets = batch.target_N.split(batch.target.bound_B.diff().tolist())
            for index, pair in enumerate(batch.pair_B.tolist()):
                source, target = sources[index].tolist(), targets[index].tolist()
                way = tuple(
                    tokenizer.languages[side[index]]
                    for side in (batch.source_language_B, batch.target_language_B)
                )
                tag = source.count(tokenizer.bos_id)
                assert tokenizer.bos_id not in target
                if pair != synthetic:
                    assert tag == 0
                    natural_ways.add(way)
                    continue
                drawn += 1
                assert way == (("de", "en") if is_source else ("en", "de"))
                assert tag == is_source
                begin = [tags[way[0 if scheme == "src-tgt" else 1]]]
                begin = [] if scheme == "src-suffix-tgt" else begin
                if is_source:
                    begin.append(tokenizer.bos_id)
                assert source[: len(begin)] == begin
                found.add((tokenizer.decode(source), tokenizer.decode(target)))
    assert drawn > 20
    assert found == expected
    assert natural_ways == {("de", "en"), ("en", "de"), ("en", "fr"), ("fr", "en")}


@pytest.mark.parametrize("kind", ["sentencepiece", "characters", "byte_bpe", "bytes"])
def test_the_tag_is_one_token_of_every_vocabulary_that_text_never_encodes_to(
    corpus: Artifact, tmp_path: Path, kind: str
) -> None:
    """The vocabulary may be older than the translations."""
    alphabet = "abcdefghijklmnopqrstuvwxyzäöüß"
    words = [f"{one}{other}" * 3 for one in alphabet for other in alphabet]
    train = {**NATURAL["train"], "de-en": {"de": words, "en": words[::-1]}}
    old = make_corpus(tmp_path / "old", {"train": train})
    sections: Any = {
        "tokenizer": {"kind": kind, "vocabulary_size": 60 if kind == "sentencepiece" else 300},
        "shards": {"max_tokens": 60},
    }
    tokenizer = run_stage("train_tokenizer", tmp_path / "tokenizer", {"corpus": old}, **sections)
    given = [("<s> a road", translation("<s> eine straße"))]
    text = translated_text(tmp_path / "text", {"de": {"a.txt": given}})
    made = added(corpus, tmp_path / "out", moe=text)
    inputs = {"corpus": made, "tokenizer": tokenizer}
    shards = run_stage("make_shards", tmp_path / "shards", inputs, **sections)
    own = load_tokenizer(shards.directory / "tokenizer")
    machine, human = (open_shard(shards, "train", "de+back-en", side) for side in ("de+back", "en"))
    assert len(machine) == 1
    assert machine[0][0] == own.bos_id
    assert own.bos_id not in machine[0][1:].tolist() + human[0].tolist()
    assert own.decode(machine[0].tolist()) == own.decode(machine[0][1:].tolist())
    assert machine[0][1:].tolist() != []


def test_words_of_a_tagged_source_begin_a_token_later(augmented: Artifact, tmp_path: Path) -> None:
    segmenters = {"de": "characters"}
    shards = prepared(augmented, tmp_path, segmenters=segmenters)
    tokenizer = load_tokenizer(shards.directory / "tokenizer")
    shard = open_shard(shards, "train", "de+back-en", "de+back", has_begins=True)
    assert shard.begins is not None
    lines = read_lines(augmented, "train", "de+back-en", "de+back")
    expected = Segmenters(tokenizer, segmenters).begins("de", lines)
    assert shard.begins.tolist() == [
        int(flag) for of_line in expected for flag in (False, *of_line.tolist())
    ]


def test_machine_written_lines_count_for_no_language(augmented: Artifact) -> None:
    assert lines_per_language(augmented) == {"de": 4, "en": 4 + 2 + 6, "fr": 2}


def mixed(folder: Path, tokens: Mapping[str, Mapping[str, int]], **settings: Any) -> Artifact:
    """A mixture of pairs with ten training lines each, and 100 where the pair is synthetic."""
    with writing(folder / "shards", "shards", "make_shards") as writer:
        writer.statistics["pairs"] = {pair: {"train": 10 + 90 * ("+" in pair)} for pair in tokens}
        writer.statistics["tokens"] = tokens
    shards = open_artifact(folder / "shards", kind="shards")
    return run_stage("mix", folder / "mixture", {"shards": shards}, mixture=settings)


TOKENS = {
    "de-en": {"de": 50, "en": 90},
    "de+back-en": {"de+back": 500, "en": 700},
    "en-fr": {"en": 30, "fr": 20},
    "en-fr+distilled": {"en": 600, "fr+distilled": 400},
}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("over", ["pairs", "directions"])
def test_synthetic_pairs_have_their_share_by_size(tmp_path: Path, share: float, over: str) -> None:
    settings: Any = {"synthetic_share": share, "sampling_over": over, "sampling_temperature": 2.0}
    (phase,) = read_mixture(mixed(tmp_path, TOKENS, **settings)).phases
    found = phase.probabilities
    assert found["de+back-en"] + found["en-fr+distilled"] == pytest.approx(share)
    assert found["de+back-en"] == pytest.approx(found["en-fr+distilled"])
    assert found["de-en"] == pytest.approx(found["en-fr"]) == pytest.approx((1 - share) / 2)
    if share:
        assert phase.forward["de+back-en"] == phase.forward["en-fr+distilled"] == 1.0
    assert math.fsum(found.values()) == pytest.approx(1)


def test_without_a_share_synthetic_pairs_are_drawn_by_size_one_way(tmp_path: Path) -> None:
    tokens = {**TOKENS, "en-ru+back": {"en": 9, "ru+back": 9}}
    made = mixed(tmp_path, tokens, sampling_temperature=1.0)
    (phase,) = read_mixture(made).phases
    expected = {pair: (100 if "+" in pair else 10) / 320 for pair in tokens}
    assert phase.probabilities == pytest.approx(expected)
    ways = {"de+back-en": 1.0, "en-fr+distilled": 1.0, "en-ru+back": 0.0}
    assert phase.forward == ways


def test_a_phase_of_natural_pairs_alone_ignores_the_share(tmp_path: Path) -> None:
    phases = [{}, {"from_update": 9, "pairs": ["de-en", "en-fr"]}]
    made = mixed(tmp_path, TOKENS, synthetic_share=0.4, phases=phases)
    first, last = read_mixture(made).phases
    assert first.probabilities["de+back-en"] == pytest.approx(0.2)
    assert last.probabilities == pytest.approx(
        {"de-en": 0.5, "en-fr": 0.5, "de+back-en": 0.0, "en-fr+distilled": 0.0}
    )


def test_a_share_without_synthetic_pairs_or_beside_a_bound_is_refused(tmp_path: Path) -> None:
    natural = {pair: sides for pair, sides in TOKENS.items() if "+" not in pair}
    with pytest.raises(ConfigError, match=r"synthetic_share is 0\.5, .* Add some \(mmnmt add_tr"):
        mixed(tmp_path, natural, synthetic_share=0.5)
    with pytest.raises(ValidationError, match="would change the share that synthetic_share sets"):
        MixtureConfig(synthetic_share=0.5, max_upsampling=2)


def test_targets_that_a_synthetic_pair_is_not_trained_into_are_refused(tmp_path: Path) -> None:
    said = r"targets en leaves no direction of en-fr\+distilled\. Add a target .* \(fr\), or leave"
    with pytest.raises(ConfigError, match=said):
        mixed(tmp_path, TOKENS, targets=["en"])
