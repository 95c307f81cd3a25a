"""chrF++ is sacreBLEU's, from statistics that are kept per line."""

import pytest
import sacrebleu
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.chrf import CHRF
from support.bible_lines import bible_lines

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation.chrf import Chrf, pairwise_chrf
from pipeline.evaluation.scores import TranslatedLines

DIRECTION = Direction("de", "en")


words = st.lists(st.sampled_from("a cat the dog sat . , 12".split()), max_size=7).map(" ".join)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=6), st.data())
def test_any_selection_of_lines_can_be_scored_from_its_statistics(
    pairs: list[tuple[str, str]], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(pairs))), min_size=1, max_size=8))
    hypotheses, references = [one for one, _ in pairs], [two for _, two in pairs]
    lines = TranslatedLines(DIRECTION, hypotheses, references, [])
    rows = Chrf().line_statistics(lines).rows[chosen]
    expected = sacrebleu.corpus_chrf(
        [hypotheses[line] for line in chosen], [[references[line] for line in chosen]], word_order=2
    )
    assert Chrf().of_corpus(rows) == pytest.approx(expected.score, abs=1e-9)


def peers_statistics(hypotheses: list[str], references: list[str]) -> list[list[int]]:
    """sacreBLEU's own, line by line."""
    peer = CHRF(word_order=2)
    found: list[list[int]] = peer._extract_corpus_statistics(hypotheses, [references])
    return found


def test_line_statistics_and_signature_are_sacrebleus_in_24_languages() -> None:
    """Each line is scored against the next one of its language, which shares words with it."""
    for code, texts in bible_lines(60).items():
        references = texts[1:] + texts[:1]
        lines = TranslatedLines(DIRECTION, texts, references, [])
        found = Chrf().line_statistics(lines)
        assert found.rows.tolist() == peers_statistics(texts, references), code
    peer = CHRF(word_order=2)
    peer.corpus_score(texts, [references])
    assert found.signature == str(peer.get_signature())


characters = st.sampled_from(["a", "b", ".", "(", "'", "é", "\u0301", "我", "\U0001f600", "\ud800"])
spaces = st.sampled_from([" ", "  ", "\t", "\u00a0", "\u2028", "\u200b", "\x1f", "\r"])
texts = st.lists(st.one_of(characters, spaces), max_size=25).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
@example([("", ""), ("", "a b"), ("a b", "")])
@example([("a" * 300, "a" * 200), ("(hi)", "(hi )")])
def test_line_statistics_are_sacrebleus_whatever_the_characters(
    pairs: list[tuple[str, str]],
) -> None:
    hypotheses, references = [one for one, _ in pairs], [two for _, two in pairs]
    lines = TranslatedLines(DIRECTION, hypotheses, references, [])
    rows = Chrf().line_statistics(lines).rows
    assert rows.tolist() == peers_statistics(hypotheses, references)


def pairwise_by_sacrebleu(texts: list[str]) -> list[list[float]]:
    """sacreBLEU's score of every text (rows) with every text as its reference (columns)."""
    peer = CHRF(word_order=2)
    return [[peer.sentence_score(one, [other]).score for other in texts] for one in texts]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(texts, words), min_size=1, max_size=6))
@example([""])
@example(["", "", "a b"])
@example(["the cat sat.", "the cat sat.", "a cat sat", "(hi)"])
@example(["a" * 300, "a" * 200, "ab" * 100])
@example(["我们明天去。", "我们后天去北京。", "Мы идём домой.", "نحن ذاهبون", "हम घर जा रहे हैं"])
def test_the_scores_of_all_pairs_are_sacrebleus_sentence_scores(texts: list[str]) -> None:
    for found, expected in zip(pairwise_chrf(texts), pairwise_by_sacrebleu(texts), strict=True):
        assert found.tolist() == pytest.approx(expected, abs=1e-9)
