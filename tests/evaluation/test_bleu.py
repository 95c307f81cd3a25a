"""BLEU is sacreBLEU's, from statistics that are kept per line."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import sacrebleu
import sacrebleu.tokenizers.tokenizer_spm as sacrebleu_models
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from support.bible_lines import bible_lines
from support.example_evaluation import place_flores_model

from pipeline.artifacts.corpus import Direction
from pipeline.errors import ConfigError
from pipeline.evaluation import bleu
from pipeline.evaluation.bleu import Bleu, BleuTokenizerOption, bleu_tokenizer
from pipeline.evaluation.scores import LineStatistics, TranslatedLines

TEXTS = {
    "13a": (
        ["The cat sat on the mat.", "", "It's 5,000 km away!", "He did not go home today."],
        ["The cat is on the mat.", "Not empty.", "It is 5,000 km away!", "He did not go home."],
    ),
    "zh": (["我们明天去北京。", "他 said 你好"], ["我们后天去北京。", "他说你好"]),
    "ja-mecab": (["私は学生です。", "猫が好きだ"], ["彼は学生です。", "犬が好きだ"]),
    "char": (["나는 학교에 간다", "물"], ["나는 집에 간다", "물을 마신다"]),
}


def line_statistics(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenizer: str
) -> LineStatistics:
    lines = TranslatedLines(Direction("de", "xx"), hypotheses, references, [])
    return Bleu("13a", {"xx": tokenizer}).line_statistics(lines)


def corpus_bleu(found: LineStatistics) -> float:
    return Bleu("13a", {}).of_corpus(found.rows)


@pytest.mark.parametrize("tokenizer", TEXTS)
def test_the_score_from_line_statistics_equals_sacrebleus_corpus_score(tokenizer: str) -> None:
    hypotheses, references = TEXTS[tokenizer]
    found = line_statistics(hypotheses, references, tokenizer=tokenizer)
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenizer)
    assert corpus_bleu(found) == expected.score
    assert f"|tok:{tokenizer}" in found.signature


words = st.lists(st.sampled_from("a cat the dog sat . , 12".split()), max_size=7).map(" ".join)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=6), st.data())
def test_any_selection_of_lines_can_be_scored_from_its_statistics(
    pairs: list[tuple[str, str]], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(pairs))), min_size=1, max_size=8))
    rows = line_statistics([one for one, _ in pairs], [two for _, two in pairs], tokenizer="13a")
    hypotheses = [pairs[line][0] for line in chosen]
    references = [pairs[line][1] for line in chosen]
    expected = sacrebleu.corpus_bleu(hypotheses, [references])
    assert corpus_bleu(LineStatistics(rows.rows[chosen])) == expected.score


def peers_statistics(
    hypotheses: list[str], references: list[str], *, tokenizer: str
) -> list[list[int]]:
    """sacreBLEU's own, line by line."""
    peer = BLEU(tokenize=tokenizer)
    found: list[list[int]] = peer._extract_corpus_statistics(hypotheses, [references])
    return found


def test_line_statistics_and_signature_are_sacrebleus_in_24_languages() -> None:
    """Each line is scored against the next one of its language, which shares words with it."""
    for code, texts in bible_lines(60).items():
        references = texts[1:] + texts[:1]
        tokenizer = bleu_tokenizer(code, option="per-language")
        found = line_statistics(texts, references, tokenizer=tokenizer)
        assert found.rows.tolist() == peers_statistics(texts, references, tokenizer=tokenizer), code
        peer = BLEU(tokenize=tokenizer)
        peer.corpus_score(texts, [references])
        assert found.signature == str(peer.get_signature())


@pytest.mark.parametrize("tokenizer", ["13a", "zh", "char"])
def test_line_statistics_are_sacrebleus_of_odd_lines(tokenizer: str) -> None:
    odd = ["", " ", "a", "a a a a a", "\u00a0a\u2028b \r", "&quot;x&amp;", "12,5 1.000-2", "我我我"]
    hypotheses = [one for one in odd for _ in odd]
    references = [one for _ in odd for one in odd]
    found = line_statistics(hypotheses, references, tokenizer=tokenizer)
    assert found.rows.tolist() == peers_statistics(hypotheses, references, tokenizer=tokenizer)


def test_the_bleu_tokenizer_follows_the_target_language_unless_one_is_asked_for() -> None:
    tokenizers = {
        **dict.fromkeys(("de", "pt_BR", "th"), "13a"),
        **{"zh": "zh", "zh_Hant": "zh", "zh_TW": "zh", "ja": "ja-mecab"},
    }
    assert {one: bleu_tokenizer(one, option="per-language") for one in tokenizers} == tokenizers
    assert {bleu_tokenizer(code, option="13a") for code in ("de", "zh", "ja", "ko")} == {"13a"}


def test_a_missing_korean_tokenizer_is_replaced_by_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class WithoutMecab(BLEU):
        def __init__(self, tokenize: str) -> None:
            if tokenize == "ko-mecab":
                raise RuntimeError("Korean tokenization requires extra dependencies")
            super().__init__(tokenize=tokenize)

    monkeypatch.setattr(bleu, "BLEU", WithoutMecab)
    found = Bleu.into(["de", "ko"], option="per-language")
    assert found.tokenizers == {"de": "13a", "ko": "char"}
    assert found.caveats() == [
        "BLEU into ko: tokenizer char replaces ko-mecab, which cannot be loaded here."
    ]


@pytest.mark.parametrize(
    ("code", "option", "fix"),
    [
        ("ja_JP", "per-language", "Run pip install 'sacrebleu[ja]'."),
        ("de", "flores200", "Run once where it can be downloaded, point SACREBLEU to "),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_one_sentence_with_its_own_fix(
    monkeypatch: pytest.MonkeyPatch, code: str, option: BleuTokenizerOption, fix: str
) -> None:
    def fail(tokenize: str) -> None:
        raise RuntimeError(f"\n{tokenize} lacks something.\n\n    Get it\n")

    monkeypatch.setattr(bleu, "BLEU", fail)
    with pytest.raises(ConfigError) as refused:
        bleu_tokenizer(code, option=option)
    assert f"lacks something. Get it). {fix}" in str(refused.value)


@pytest.mark.parametrize("codes", [["de", "th"], ["km_Khmr", "my", "zh"]])
def test_a_score_that_cannot_part_words_is_warned_of(codes: list[str]) -> None:
    (warning,) = Bleu.into(codes, option="per-language").caveats()
    assert (
        f"BLEU into {', '.join(code for code in codes if code not in ('de', 'zh'))} takes"
        in warning
    )
    assert "spbleu" in warning
    assert not Bleu.into(["de", "en", "zh", "ja"], option="per-language").caveats()


@pytest.mark.parametrize("option", ["flores101", "flores200"])
def test_a_flores_tokenizer_that_is_at_hand_is_used_and_not_fetched(
    option: BleuTokenizerOption, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model of our own in its place: what counts is which file is read."""
    texts = [line for lines in TEXTS["13a"] for line in lines if line]
    place_flores_model(tmp_path, texts, option, monkeypatch)
    assert bleu_tokenizer("zh", option=option) == option
    found = line_statistics(texts, texts[::-1], tokenizer=option)
    assert found.rows.tolist() == peers_statistics(texts, texts[::-1], tokenizer=option)
    assert f"|tok:{option}|" in found.signature


def test_an_unavailable_flores_tokenizer_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(sacrebleu_models, "SACREBLEU_DIR", str(tmp_path))
    monkeypatch.setattr(sacrebleu_models, "download_file", refuse)
    with pytest.raises(ConfigError, match=r"flores200.*no route to host.*bleu_tokenizer"):
        bleu_tokenizer("de", option="flores200")
