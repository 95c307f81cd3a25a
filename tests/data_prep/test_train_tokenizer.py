"""The kinds of vocabularies that the stage trains, and the memory that its sample may take."""

import itertools
import os
import random
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sentencepiece import SentencePieceProcessor
from support.corpora import Texts, make_corpus
from support.pieces import train_pieces
from support.stage_runs import run_stage

from data_prep import train_tokenizer
from data_prep.settings import MixtureConfig, TokenizerConfig
from data_prep.train_tokenizer import bytes_per_line, draw_sample
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.shards import lines_per_language
from pipeline.artifacts.tokenizer import copy_tokenizer, load_tokenizer
from pipeline.config.recipe import Recipe
from pipeline.errors import ArtifactError, ConfigError, DataError

GENERATOR = random.Random(1)
WORDS = {
    code: ["".join(GENERATOR.choices(letters, k=GENERATOR.randint(2, 7))) for _ in range(60)]
    for code, letters in {"de": "abcdeäöü", "zh": "的一是不了人我在有他"}.items()
}


def lines_of(code: str, count: int) -> list[str]:
    return [" ".join(GENERATOR.choices(WORDS[code], k=8)) for _ in range(count)]


TEXTS: Texts = {"train": {"de-zh": {"de": lines_of("de", 800), "zh": lines_of("zh", 800)}}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_corpus(tmp_path_factory.mktemp("corpora") / "corpus", TEXTS)


def train(corpus: Artifact, out_dir: Path, config: TokenizerConfig) -> Artifact:
    mixture = MixtureConfig(targets=tuple(code[:2] for code in config.target_languages))
    recipe = Recipe(name="test", tokenizer=config, mixture=mixture)
    return run_stage("train_tokenizer", out_dir, {"corpus": corpus}, recipe)


def test_characters_are_pieces_of_one_character_and_a_vocabulary_of_all_of_them(
    corpus: Artifact, tmp_path: Path
) -> None:
    made = train(corpus, tmp_path / "out", TokenizerConfig(kind="characters"))
    tokenizer = load_tokenizer(made.directory)
    found = set("".join(line for side in TEXTS["train"]["de-zh"].values() for line in side))
    pieces = [tokenizer.piece(index) for index in range(4, made.statistics["pieces"])]
    assert sorted(filter(None, pieces)) == sorted(found - {" "} | {"▁"})
    line = TEXTS["train"]["de-zh"]["zh"][0]
    assert len(tokenizer.encode(line)) == len(line) + 1
    assert tokenizer.decode(tokenizer.encode(line)) == line


@pytest.mark.parametrize(
    ("signs", "size", "setting", "further", "advised"),
    [
        (300, 500, "vocabulary_size", {}, {"byte_fallback", "character_coverage"}),
        (300, 500, "vocabulary_size", {"character_coverage": 0.9995}, set()),
        (300, 620, "vocabulary_size", {"byte_fallback": True}, {"character_coverage"}),
        (300, 700, "vocabulary_size", {}, None),
        (90, 150, "target", {}, {"byte_fallback", "character_coverage"}),
    ],
)
def test_a_vocabulary_of_mostly_single_characters_is_said_with_settings_that_help(
    tmp_path: Path, signs: int, size: int, setting: str, further: Any, advised: set[str] | None
) -> None:
    every = [chr(0x4E00 + index) for index in range(signs)]
    words = [a + b for a, b in itertools.product(every[:40], every[40:60])] + every
    lines = ["".join(GENERATOR.choices(words, k=12)) for _ in range(3000)] + ["".join(every)]
    texts: Texts = {"train": {"de-zh": {"de": lines_of("de", 3001), "zh": lines}}}
    corpus = make_corpus(tmp_path / "corpus", texts)
    config = TokenizerConfig(vocabulary_size=size, **further)
    if setting == "target":
        config = TokenizerConfig(
            vocabulary_size=60, target_languages=("zh",), target_vocabulary_size=size
        )
    made = train(corpus, tmp_path / "out", config)
    models = sorted(made.directory.glob("*.model"))
    processor = SentencePieceProcessor(model_file=str(models[-1]))
    single = sum(len(processor.id_to_piece(index)) == 1 for index in range(4, size))
    of_text = size - 4 - 256 * config.byte_fallback
    assert (2 * single > of_text) == (advised is not None)
    warnings = [line for line in made.manifest.summary if line.startswith("warning")]
    assert len(warnings) == (advised is not None)
    for name in (setting, "sample_lines", f"{single} of {of_text} pieces of text") * len(warnings):
        assert name in warnings[0]
    for name in ("byte_fallback", "character_coverage") * len(warnings):
        assert (name in warnings[0]) == (name in (advised or ()))


def test_characters_of_the_sample_are_counted_as_the_vocabulary_writes_them(tmp_path: Path) -> None:
    lines = [unicodedata.normalize("NFD", line) for line in lines_of("de", 100)]
    corpus = make_corpus(tmp_path / "corpus", {"train": {"de-zh": {"de": lines, "zh": lines}}})
    made = train(corpus, tmp_path / "out", TokenizerConfig(vocabulary_size=60))
    assert made.statistics["characters"] == {"sample": 8, "covered": 8}  # abcdeäöü


def test_fewer_characters_are_the_most_frequent_ones(corpus: Artifact, tmp_path: Path) -> None:
    made = train(corpus, tmp_path / "out", TokenizerConfig(kind="characters", vocabulary_size=12))
    assert made.statistics["pieces"] == 12
    characters = made.statistics["characters"]
    assert (characters["sample"], characters["covered"]) == (18, 7)  # the space is the eighth


def test_byte_level_bpe_has_its_size_and_knows_every_text(corpus: Artifact, tmp_path: Path) -> None:
    made = train(corpus, tmp_path / "out", TokenizerConfig(kind="byte_bpe", vocabulary_size=300))
    assert (made.statistics["pieces"], made.statistics["size"]) == (300, 302)
    characters = made.statistics["characters"]
    assert characters["covered"] == characters["sample"]
    copy_tokenizer(made.directory, tmp_path / "copy")
    tokenizer = load_tokenizer(tmp_path / "copy")
    for text in ("", "  ab  Ж \U0001f680", TEXTS["train"]["de-zh"]["zh"][0]):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.fingerprint == load_tokenizer(made.directory).fingerprint


@pytest.mark.parametrize("kind", ["sentencepiece", "characters"])
def test_with_fallback_no_text_is_unknown(kind: str, corpus: Artifact, tmp_path: Path) -> None:
    settings = {"kind": kind, "byte_fallback": True, "vocabulary_size": 300}
    made = train(corpus, tmp_path / "out", TokenizerConfig.model_validate(settings))
    tokenizer = load_tokenizer(made.directory)
    ids = tokenizer.encode("Ж \U0001f680")
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids) == "Ж \U0001f680"


def test_the_sample_is_as_large_as_its_memory_allows_and_still_drawn_by_temperature(
    corpus: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_tokenizer, "MEMORY_AT_LEAST", 0)
    monkeypatch.setattr(train_tokenizer, "MEMORY_PER_LINE", 0)
    monkeypatch.setattr(train_tokenizer, "MEMORY_PER_BYTE", 1000)
    mean = bytes_per_line(corpus, lines_per_language(corpus))
    texts = TEXTS["train"]["de-zh"]
    assert mean == {
        code: sum(len(line.encode()) + 1 for line in lines) / 800 for code, lines in texts.items()
    }
    config = TokenizerConfig(memory_bytes=2**24)
    sample = draw_sample(corpus, config=config)
    assert sample.quotas["de"] == sample.quotas["zh"] < 800
    one_more = 1000 * (sample.quotas["de"] + 1) * (mean["de"] + mean["zh"])
    assert sample.predicted_bytes <= 2**24 < one_more
    drawn = sum(len(line.encode()) + 1 for line in sample)
    assert drawn * 1000 == pytest.approx(sample.predicted_bytes, rel=0.1)
    fewer = draw_sample(corpus, config=config.model_copy(update={"sample_lines": 100}))
    assert fewer.quotas == {"de": 50, "zh": 50}


@pytest.mark.parametrize(
    ("setting", "value", "per_line"),
    [("memory_bytes", 2**24, 2**24), ("sample_lines", 1, 200)],
)
def test_a_setting_for_no_line_is_refused(
    corpus: Artifact, monkeypatch: pytest.MonkeyPatch, setting: str, value: int, per_line: int
) -> None:
    monkeypatch.setattr(train_tokenizer, "MEMORY_PER_LINE", per_line)
    with pytest.raises(ConfigError, match=f"{setting} = {value:,} has no room for a line of ev"):
        draw_sample(corpus, config=TokenizerConfig(**{setting: value}))


@pytest.mark.parametrize("code", ["de", "zh"])
def test_training_text_that_no_manifest_lists_is_refused(corpus: Artifact, code: str) -> None:
    listed = {name: one for name, one in corpus.manifest.files.items() if f"/{code}." not in name}
    manifest = corpus.manifest.model_copy(update={"files": listed})
    with pytest.raises(ArtifactError, match=rf"has no file 'train/.*/{code}\.txt'\. Restore"):
        draw_sample(replace(corpus, manifest=manifest), config=TokenizerConfig())


def test_memory_allowed_predicted_and_taken_are_told(corpus: Artifact, tmp_path: Path) -> None:
    made = train(corpus, tmp_path / "out", TokenizerConfig(vocabulary_size=100))
    memory = made.statistics["memory"]
    assert memory["allowed"] == TokenizerConfig().memory_bytes
    assert 0 < memory["predicted"] < 2**25
    assert made.manifest.summary[2].startswith("training was to take ")


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_pieces_are_the_same_again_and_on_fewer_cores(model_type: str, tmp_path: Path) -> None:
    """For words of which the unigram trainer learns other pieces with 1, 2 and 16 threads."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdeäöü", k=draw.randint(3, 9))) for _ in range(1500)]
    lines = [" ".join(draw.choices(words, k=6)) for _ in range(3000)]
    corpus = make_corpus(tmp_path / "corpus", {"train": {"de-en": {"de": lines, "en": lines}}})
    config = TokenizerConfig.model_validate({"vocabulary_size": 400, "model_type": model_type})
    cores = os.sched_getaffinity(0)
    digests = [train(corpus, tmp_path / "all cores", config).digest]
    try:
        os.sched_setaffinity(0, {min(cores)})
        digests += [train(corpus, tmp_path / f"one core, {again}", config).digest for again in "ab"]
    finally:
        os.sched_setaffinity(0, cores)
    assert len(set(digests)) == 1


SPLIT = TokenizerConfig(
    vocabulary_size=40, target_languages=("zh",), target_vocabulary_size=24, model_type="bpe"
)


def alone(lines: list[str], size: int) -> SentencePieceProcessor:
    """What SentencePiece makes of one side's lines."""
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    settings = {"model_type": "bpe", "normalization_rule_name": "identity", **ids}
    return SentencePieceProcessor(model_proto=train_pieces(lines, size=size, **settings))


@pytest.mark.parametrize("code", ["zh", "zho", "zh_Hans"])
def test_target_languages_have_first_pieces_of_their_own(
    code: str, corpus: Artifact, tmp_path: Path
) -> None:
    split = SPLIT.model_copy(update={"target_languages": (code,)})
    made = train(corpus, tmp_path / "out", split)
    assert (made.statistics["pieces"], made.statistics["size"]) == (40 + 24 - 4, 40 + 24 - 4 + 2)
    copy_tokenizer(made.directory, tmp_path / "copy")
    tokenizer = load_tokenizer(tmp_path / "copy")
    assert tokenizer.output_size == 24
    sides = TEXTS["train"]["de-zh"]
    source, target = alone(sides["de"], 40), alone(sides["zh"], 24)
    for de, zh in zip(sides["de"][:50], sides["zh"][:50], strict=True):
        assert tokenizer.encode(zh, language="zh") == target.encode(zh)
        shifted = [one if one == 3 else one + 20 for one in source.encode(de)]
        assert tokenizer.encode(de, language="de") == shifted
        assert tokenizer.decode(tokenizer.encode(de, language="de")) == de
        assert tokenizer.decode(tokenizer.encode(zh, language="zh")) == zh
    mixed = [*tokenizer.encode("ab", language="de"), *tokenizer.encode("的", language="zh")]
    assert tokenizer.decode(mixed) == "ab 的"
    named = [tokenizer.piece(index) for index in range(60)]
    assert named[4:] == [target.id_to_piece(i) for i in range(4, 24)] + [
        source.id_to_piece(i) for i in range(4, 40)
    ]
    whole = train(corpus, tmp_path / "whole", SPLIT.model_copy(update={"target_languages": ()}))
    assert tokenizer.fingerprint != load_tokenizer(whole.directory).fingerprint
    with pytest.raises(ValueError, match="say which one"):
        tokenizer.encode("ab")
    tokenizer.refuse_to_write("zh")
    with pytest.raises(ConfigError, match=r"into zh only, not into de\. Leave it out"):
        tokenizer.refuse_to_write("de")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target_languages": ("zh", "fra")}, "names 'fra', and .* has no such language"),
        ({"target_languages": ("deu", "zh")}, "names all languages"),
        (
            {"target_vocabulary_size": 3000, "model_type": "unigram"},
            r"tokenizer.target_vocabulary_size = 3000 is too large",
        ),
        (
            {"kind": "byte_bpe", "vocabulary_size": 200, "target_languages": ()},
            r"200 is too small: .* Set more\.$",
        ),
        *(
            (
                {"kind": "characters", "byte_fallback": True, "vocabulary_size": size},
                rf"vocabulary_size = {size} is too small: the bytes .* need 260\. Set more\.$",
            )
            for size in (40, 259)
        ),
        ({"vocabulary_size": 5}, r"5 is too small: .* Set more, or a lower character_coverage\.$"),
    ],
)
def test_vocabularies_that_the_corpus_does_not_allow_are_refused(
    corpus: Artifact, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        train(corpus, tmp_path / "out", SPLIT.model_copy(update=settings))


def test_a_side_without_training_lines_is_named(tmp_path: Path) -> None:
    texts: Texts = {
        "train": {"de-fr": {"de": ["ab"], "fr": ["cd"]}},
        "test": {"de-zh": {"de": ["ab"], "zh": ["的"]}},
    }
    corpus = make_corpus(tmp_path / "corpus", texts)
    with pytest.raises(DataError, match=r"no training lines in zh, which need pieces"):
        train(corpus, tmp_path / "out", SPLIT)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        *(
            ({"mixture": {"targets": targets}}, r"Let mixture\.targets name")
            for targets in ((), ("de",), ("de", "zh"))
        ),
        (
            {"mixture": {"targets": ("zh",)}, "batches": {"tag_is_label": True}},
            "tag_is_label is true",
        ),
        ({"tokenizer": {"kind": "bytes", "target_languages": ("de",)}}, "same for all languages"),
        ({"tokenizer": {"kind": "byte_bpe", "byte_fallback": True}}, "Leave it out"),
        ({"tokenizer": {"kind": "bytes", "byte_fallback": True}}, "Leave it out"),
    ],
)
def test_contradictory_settings_are_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Recipe.model_validate({"name": "x", "tokenizer": SPLIT, **sections})


def test_a_missing_or_damaged_target_model_is_named(corpus: Artifact, tmp_path: Path) -> None:
    made = train(corpus, tmp_path / "out", SPLIT)
    path = made.file("sentencepiece.target.model")
    path.write_bytes(b"damaged")
    with pytest.raises(ArtifactError, match=r"sentencepiece\.target\.model is not a"):
        load_tokenizer(made.directory)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"sentencepiece\.target\.model"):
        load_tokenizer(made.directory)
