"""Vocabularies, language tokens and tags, and the stage that trains them."""

import itertools
import pickle
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.corpora import Texts, bytes_of, make_corpus
from support.pieces import train_pieces
from support.stage_runs import run_stage

from data_prep import train_tokenizer
from data_prep.settings import TokenizerConfig
from data_prep.train_tokenizer import draw, sample_quotas
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.tokenizer import (
    Tokenizer,
    TokenizerDescription,
    TokenizerFiles,
    copy_tokenizer,
    load_tokenizer,
    tags,
)
from pipeline.artifacts.vocabularies import ByteVocabulary
from pipeline.config.recipe import Recipe
from pipeline.errors import ArtifactError, ConfigError, DataError, Interrupted
from pipeline.temperature_sampling import temperature_probabilities

LETTERS = {
    "de": "abcdefghijklmnopqrstuvwxyzäöüß",
    "en": "abcdefghijklmnopqrstuvwxyz",
    "ru": "абвгдежзийклмнопрстуфхцчшщъыьэюя",
    "zh": "的一是不了人我在有他这为之大来以个中上们",
}


def sentences(code: str, count: int, *, seed: int = 0) -> list[str]:
    """Sentences of made-up words that come back, so that there are pieces to learn."""
    generator = random.Random(f"{code} {seed}")
    words = ["".join(generator.choices(LETTERS[code], k=k)) for k in (2, 3, 4, 5, 6, 7) * 20]
    return [" ".join(generator.choices(words, k=generator.randint(3, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    train = {
        f"{min(code, 'en')}-{max(code, 'en')}": {
            code: sentences(code, count),
            "en": sentences("en", count, seed=count),
        }
        for code, count in (("de", 400), ("ru", 200), ("zh", 50))
    }
    zero_shot = {"de-ru": {"de": sentences("de", 5), "ru": sentences("ru", 5)}}
    return make_corpus(
        tmp_path_factory.mktemp("corpora") / "corpus", {"train": train, "test": zero_shot}
    )


def train(corpus: Artifact, out_dir: Path, config: TokenizerConfig) -> Artifact:
    recipe = Recipe(name="test", tokenizer=config)
    return run_stage("train_tokenizer", out_dir, {"corpus": corpus}, recipe)


ENGLISH = TokenizerDescription(
    kind="sentencepiece", languages=("en",), language_token_scheme="angle"
)
SMALL = TokenizerConfig(vocabulary_size=300)


@pytest.fixture(scope="module")
def trained(corpus: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return train(corpus, tmp_path_factory.mktemp("trained") / "tokenizer", SMALL)


@pytest.fixture(scope="module")
def subwords(trained: Artifact) -> Tokenizer:
    return load_tokenizer(trained.directory)


def bytes_tokenizer(languages: tuple[str, ...] = ("de", "en", "zh")) -> Tokenizer:
    return TokenizerFiles(bytes_of(languages)).build()


def train_model(**ids: int) -> bytes:
    given = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, **ids}
    return train_pieces(sentences("en", 100), size=60, **given)


KNOWN = st.text(st.sampled_from("".join(LETTERS.values())), min_size=1)


@given(st.lists(KNOWN, min_size=1, max_size=6))
def test_text_of_known_characters_survives_encoding(subwords: Tokenizer, words: list[str]) -> None:
    text = " ".join(words)
    assert subwords.decode(subwords.encode(text)) == text


@pytest.mark.parametrize("kind", ["subwords", "bytes"])
def test_special_token_text_is_text(kind: str, subwords: Tokenizer) -> None:
    tokenizer = subwords if kind == "subwords" else bytes_tokenizer()
    controls = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}
    for text in ("</s>", "<s>", "<pad>", "<unk>", "__de__", "<2de>", "a </s> __zh__ b"):
        ids = tokenizer.encode(text)
        assert len(ids) > 1
        assert not controls & set(ids)
        assert all(tokenizer.language_of_token(index) is None for index in ids)


def test_decoding_drops_specials_and_language_tokens(subwords: Tokenizer) -> None:
    text = sentences("ru", 1)[0]
    specials = [subwords.pad_id, subwords.bos_id, subwords.unk_id, subwords.language_token_id("zh")]
    ids = [*specials, *subwords.encode(text), subwords.eos_id, subwords.language_token_id("de")]
    assert subwords.decode(ids) == text


def test_a_batch_is_encoded_as_its_sentences_are(subwords: Tokenizer) -> None:
    lines = ["", *sentences("de", 20), *sentences("zh", 20)]
    assert subwords.encode_batch(lines) == [subwords.encode(line) for line in lines]


def test_language_tokens_follow_the_vocabulary_in_alphabetical_order(subwords: Tokenizer) -> None:
    assert subwords.languages == ("de", "en", "ru", "zh")
    ids = [subwords.language_token_id(code) for code in subwords.languages]
    assert (ids, subwords.size) == ([300, 301, 302, 303], 304)
    found = [subwords.language_of_token(index) for index in range(299, 305)]
    assert found == [None, *subwords.languages, None]


def test_an_unknown_language_is_refused_with_the_nearest_codes() -> None:
    with pytest.raises(ConfigError, match=r"'dee'.*nearest codes are: de"):
        bytes_tokenizer().language_token_id("dee")


def test_special_ids_are_those_of_the_model() -> None:
    model = train_model(unk_id=0, pad_id=1, eos_id=5, bos_id=7)
    tokenizer = TokenizerFiles(ENGLISH, model).build()
    found = (tokenizer.unk_id, tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id)
    assert found == (0, 1, 5, 7)
    line = sentences("en", 1)[0]
    assert tokenizer.decode([7, *tokenizer.encode(line), 5, 1]) == line


def test_a_model_without_a_padding_piece_of_its_own_is_refused() -> None:
    # Protocol buffers merge what is appended: field 48 of field 2 names the padding piece.
    unknown = bytes([48 << 3 & 0x7F | 2 | 0x80, 48 >> 4, 5]) + b"<unk>"
    as_unknown = train_model() + bytes([2 << 3 | 2, len(unknown)]) + unknown
    for model in (train_model(pad_id=-1), as_unknown):
        with pytest.raises(ArtifactError, match="four distinct ids"):
            TokenizerFiles(ENGLISH, model).build()


def test_unsorted_or_repeated_languages_are_refused() -> None:
    for languages in (("en", "de"), ("de", "de")):
        with pytest.raises(ValueError, match="sorted"):
            bytes_tokenizer(languages)


def test_the_fingerprint_tells_languages_schemes_and_models_apart() -> None:
    descriptions = [
        ENGLISH.model_copy(update={"languages": (code,), "language_token_scheme": scheme})
        for code, scheme in itertools.product(("de", "en"), ("underscores", "angle"))
    ]
    models = [train_model(), train_model(pad_id=1, bos_id=0)]
    found = {
        TokenizerFiles(*both).build().fingerprint
        for both in itertools.product(descriptions, models)
    }
    assert len(found) == 8


def test_a_pickled_tokenizer_encodes_alike(subwords: Tokenizer) -> None:
    for tokenizer in (subwords, bytes_tokenizer()):
        again = pickle.loads(pickle.dumps(tokenizer))
        for line in sentences("ru", 20):
            assert again.encode(line) == tokenizer.encode(line)
        assert again.fingerprint == tokenizer.fingerprint


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json does not describe"):
        load_tokenizer(tmp_path)
    TokenizerFiles(ENGLISH).write(tmp_path)
    with pytest.raises(ArtifactError, match=r"sentencepiece\.model cannot be read"):
        load_tokenizer(tmp_path)
    TokenizerFiles(ENGLISH, b"damaged").write(tmp_path)
    with pytest.raises(ArtifactError, match=r"sentencepiece\.model is not a SentencePiece model"):
        load_tokenizer(tmp_path)


def test_tags_put_both_languages_or_the_target_alone_where_the_scheme_says() -> None:
    tokenizer = bytes_tokenizer()
    de, zh = ByteVocabulary.size, ByteVocabulary.size + 2
    both = tags(tokenizer, "src-tgt", source="de", target="zh")
    assert (both.source_prefix, both.decoder_prompt) == ((de,), (tokenizer.eos_id, zh))
    target = tags(tokenizer, "tgt", source="de", target="zh")
    assert (target.source_prefix, target.decoder_prompt) == ((zh,), (tokenizer.eos_id,))
    with pytest.raises(ConfigError, match="'ru'"):
        tags(tokenizer, "tgt", source="ru", target="zh")


def test_statistics_count_what_was_drawn_and_covered(trained: Artifact) -> None:
    statistics = trained.statistics
    assert statistics["train_lines"] == {"de": 400, "en": 650, "ru": 200, "zh": 50}
    assert statistics["sampled_lines"] == statistics["train_lines"]
    assert (statistics["pieces"], statistics["size"]) == (300, 304)
    distinct = len(set("".join(LETTERS.values())))
    assert statistics["characters"] == {"sample": distinct, "covered": distinct}
    assert statistics["language_tokens"]["en"] == {"token": "__en__", "id": 301}
    assert trained.manifest.summary[:2] == (
        "300 pieces and 4 language tokens",
        f"sampled 1,300 of 1,300 training lines of 4 languages; the vocabulary has {distinct} of "
        f"their {distinct} different characters",
    )


def test_a_language_of_which_nothing_was_sampled_is_named(tmp_path: Path) -> None:
    texts: Texts = {
        "train": {"de-en": {"de": sentences("de", 200), "en": sentences("en", 200)}},
        "test": {"de-ru": {"de": ["a"], "ru": ["б"]}},
    }
    made = train(make_corpus(tmp_path / "corpus", texts), tmp_path / "out", SMALL)
    assert made.manifest.summary[-1] == "no text was sampled of: ru"


@pytest.mark.parametrize("kind", ["sentencepiece", "characters", "byte_bpe", "bytes"])
@pytest.mark.parametrize("normalization", ["nfc", "plain"])
def test_training_text_and_text_to_translate_are_normalized_alike_except_by_bytes(
    kind: str, normalization: str, tmp_path: Path
) -> None:
    composed = [f"{line} é AB" for line in sentences("en", 100)]
    decomposed = [unicodedata.normalize("NFD", line).replace(" ", "\t") for line in composed]
    wide = [line.replace("AB", "ＡＢ\u00ad") for line in composed]
    made = make_corpus(
        tmp_path / "corpus", {"train": {"de-en": {"de": decomposed + wide, "en": composed * 2}}}
    )
    size = 400 if kind == "byte_bpe" else 60
    settings = {"kind": kind, "normalization": normalization, "vocabulary_size": size}
    config = TokenizerConfig.model_validate(settings)
    tokenizer = load_tokenizer(train(made, tmp_path / "out", config).directory)
    for typed, is_plain in ((decomposed[0], True), (wide[0], normalization == "plain")):
        read = tokenizer.decode(tokenizer.encode(typed))
        kept = kind in ("byte_bpe", "bytes") or not is_plain
        assert read == (typed if kept else composed[0])
        assert tokenizer.unk_id not in tokenizer.encode(typed)


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_a_vocabulary_too_large_is_refused_with_the_largest_possible(
    model_type: str, corpus: Artifact, tmp_path: Path
) -> None:
    config = TokenizerConfig.model_validate({"vocabulary_size": 30_000, "model_type": model_type})
    with pytest.raises(ConfigError, match=r"allows at most \d+") as refusal:
        train(corpus, tmp_path / "large", config)
    largest = int(str(refusal.value).split("allows at most ")[1].split(".")[0])
    fitting = config.model_copy(update={"vocabulary_size": largest})
    assert train(corpus, tmp_path / "fits", fitting).statistics["pieces"] == largest
    assert not (tmp_path / "large").exists()


def test_a_vocabulary_below_its_characters_is_refused(corpus: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is too small"):
        train(corpus, tmp_path / "out", TokenizerConfig(vocabulary_size=20))


def test_a_corpus_without_training_lines_is_refused(tmp_path: Path) -> None:
    made = make_corpus(tmp_path / "corpus", {"test": {"de-en": {"de": ["a"], "en": ["b"]}}})
    with pytest.raises(DataError, match="0 training lines"):
        train(made, tmp_path / "out", SMALL)


def test_a_stop_request_while_lines_are_read_is_no_failure_of_the_corpus(
    corpus: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted_lines(_path: Path) -> Iterator[str]:
        yield "one line"
        raise Interrupted("SIGTERM received")

    monkeypatch.setattr(train_tokenizer, "iterate_lines", interrupted_lines)
    with pytest.raises(Interrupted):
        train(corpus, tmp_path / "out", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_byte_tokenizer_is_its_description_alone(corpus: Artifact, tmp_path: Path) -> None:
    made = train(corpus, tmp_path / "bytes", TokenizerConfig(kind="bytes"))
    assert made.names() == ["tokenizer.json"]
    assert made.manifest.summary == (
        "260 pieces and 4 language tokens; bytes need no training, nothing was read",
    )
    tokenizer = load_tokenizer(made.directory)
    assert tokenizer.size == 4 + 256 + 4
    copy_tokenizer(made.directory, tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").fingerprint == tokenizer.fingerprint


@given(
    st.dictionaries(st.text("abc", min_size=1), st.integers(0, 10_000), min_size=1),
    st.floats(0.001, 50),
    st.integers(1, 20_000),
)
def test_quotas_fill_the_budget_and_exceed_no_language(
    totals: dict[str, int], sampling_temperature: float, sample_lines: int
) -> None:
    assume(any(totals.values()))
    settings = {"sampling_temperature": sampling_temperature}
    quotas = sample_quotas(totals, sample_lines=sample_lines, **settings)
    assert all(0 <= quotas[code] <= totals[code] for code in quotas)
    available = min(sample_lines, sum(totals.values()))
    assert available - len(totals) <= sum(quotas.values()) <= available
    # Languages that still have lines share the rest in proportion to their probabilities.
    partial = [code for code in quotas if quotas[code] < totals[code]]
    for first, second in itertools.combinations(partial, 2):
        both = {code: totals[code] for code in (first, second)}
        shares = temperature_probabilities(both, **settings)
        assert quotas[first] * shares[second] == pytest.approx(
            quotas[second] * shares[first], abs=1.001
        )


def test_drawn_lines_are_as_many_as_wanted_and_in_order() -> None:
    for wanted in (0, 1, 7, 20):
        lines = [str(number) for number in range(20)]
        drawn = list(draw(iter(lines), total=20, wanted=wanted, generator=random.Random(1)))
        assert len(drawn) == wanted
        assert drawn == sorted(drawn, key=int)


def test_every_subset_is_drawn_equally_often() -> None:
    generator = random.Random(3)
    counts = dict.fromkeys(itertools.combinations("abcd", 2), 0)
    for _ in range(6000):
        first, second = draw(iter("abcd"), total=4, wanted=2, generator=generator)
        counts[first, second] += 1
    # Six subsets, 1000 each; the standard deviation is sqrt(6000 / 6 · 5 / 6) = 29.
    assert all(abs(count - 1000) < 5 * 29 for count in counts.values())


def test_a_sample_is_of_the_whole_corpus(corpus: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TokenizerConfig(sample_lines=200, sampling_temperature=1)
    sample = train_tokenizer.draw_sample(corpus, config=config)
    lines = list(sample)
    assert len(lines) == sum(sample.quotas.values())
    texts = sentences("de", 400)
    positions = [texts.index(line) for line in lines if line in set(texts)]
    assert len(positions) == sample.quotas["de"] == 61
    assert positions[-1] > 300 > 100 > positions[0]
    assert list(sample) == lines
    monkeypatch.setattr(train_tokenizer, "SEED", 2)
    assert list(train_tokenizer.draw_sample(corpus, config=config)) != lines
