"""Questions, windows over their passages, answers as characters, and their scores."""

import json
import string
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_xlmr import TOKENS, pieces_model

from pipeline.errors import ArtifactError, ConfigError
from pipeline.extensions.tasks import TasksConfig
from pipeline.extensions.tasks.questions import (
    NO_ANSWER,
    Answer,
    Question,
    Window,
    best_span,
    cut_passage,
    exact_match,
    normalized,
    read_questions,
    token_span,
    windows_of,
    word_f1,
)
from pipeline.extensions.tasks.token_classifier import TaskFiles
from pipeline.extensions.tasks.xlmr import Located, Pieces

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "qa"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")
CONFIG = TasksConfig(max_tokens=128)
SHARED = 128 // 3
CONTEXT = "The house of Anna in Bonn is big."


def document(**changes: object) -> dict[str, Any]:
    answer = {"text": "Anna", "answer_start": 13, **changes}
    asked = {"id": "q1", "question": "Whose?", "answers": [answer]}
    return {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [asked]}]}]}


def written(folder: Path, content: object) -> Path:
    path = folder / "made.en.train.json"
    path.write_text(json.dumps(content))
    return path


def all_questions() -> dict[Path, list[Question]]:
    paths = sorted([*DATA.glob("xquad/*.json.gz"), *DATA.glob("tydiqa/*.goldp.json")])
    return {path: read_questions(path) for path in paths}


@pytest.mark.slow
@needs_data
def test_every_answer_of_the_sample_is_mapped_to_tokens_and_back_to_its_characters() -> None:
    """With a piece per character, an answer's borders are those of pieces, whatever its script."""
    files = all_questions()
    questions = [replace(one, question="?") for group in files.values() for one in group]
    assert len(questions) == 12 * 1190 + 4
    contexts = sorted({one.context for one in questions})
    pieces = Pieces(pieces_model(contexts, vocabulary=6000, kind="char"), origin=Path())
    config = TasksConfig(max_tokens=672)
    answered = set()
    for number, window in windows_of(questions, pieces, config):
        first, last = window.labelled.labels
        if first != NO_ANSWER:
            start, stop = window.characters(int(first), int(last))
            answer = questions[number].answers[0]
            assert (start, stop) == (answer.start, answer.stop)
            answered.add(number)
    assert len(answered) == len(questions)


def test_an_answers_tokens_are_the_fewest_that_cover_it() -> None:
    located = Located(np.arange(6), np.array([0, 3, 3, 5, 9, 10]), np.array([3, 3, 5, 9, 10, 12]))
    assert token_span(located, Answer("x", 3)) == (2, 2)
    assert token_span(located, Answer("xxx", 4)) == (2, 3)
    assert token_span(located, Answer("x" * 12, 0)) == (0, 5)
    assert token_span(located, Answer("x", 40)) is None


def test_windows_overlap_by_a_third_and_cover_every_token_in_order() -> None:
    size = 500
    located = Located(np.arange(size) + 1000, np.arange(size), np.arange(size) + 1)
    answer = Answer("xxxxx", 130)
    windows = cut_passage(np.array([7, 8]), located, answer, CONFIG)
    room = 128 - 2 - 4
    assert [len(one.labelled.ids) for one in windows[:-1]] == [128] * (len(windows) - 1)
    assert [int(one.begin[0]) for one in windows] == [
        n * (room - SHARED) for n in range(len(windows))
    ]
    assert windows[-1].end[-1] == size
    for one in windows:
        assert one.labelled.ids[:5].tolist() == [0, 7, 8, 2, 2]
        first, last = one.labelled.labels
        if first != NO_ANSWER:
            assert one.characters(first, last) == (130, 135)
            assert one.labelled.ids[first] == 1130
    assert sum(one.labelled.labels[0] != NO_ANSWER for one in windows) == 1
    inside = cut_passage(np.array([7, 8]), located, Answer("xxxxx", 100), CONFIG)
    assert [one.labelled.labels[0] != NO_ANSWER for one in inside[:3]] == [True, True, False]


def test_a_context_that_just_fits_has_one_window_and_one_token_more_two() -> None:
    room = 128 - 2 - 4
    for size, count in ((1, 1), (room, 1), (room + 1, 2), (0, 1)):
        located = Located(np.arange(size), np.arange(size), np.arange(size) + 1)
        assert len(cut_passage(np.array([7, 8]), located, None, CONFIG)) == count


def test_a_long_question_is_cut_to_a_sixth_of_a_window() -> None:
    located = Located(np.arange(5), np.arange(5), np.arange(5) + 1)
    (window,) = cut_passage(np.arange(100), located, None, CONFIG)
    assert window.first == 128 // 6 + 3


def test_the_likeliest_span_is_that_of_a_search_through_all() -> None:
    generator = torch.Generator().manual_seed(5)
    begin = np.array([0, 2, 4, 4, 6, 8, 10, 12])
    end = np.array([2, 4, 4, 6, 8, 10, 12, 14])
    window = Window(None, 3, begin, end)  # type: ignore[arg-type]
    for _ in range(200):
        starts, ends = torch.randn(2, 14, generator=generator)
        places = [place for place in range(3, 11) if place != 5]
        expected = max(
            (float(starts[i] + ends[j]), i, j) for i in places for j in places if i <= j < i + 3
        )
        assert best_span(starts, ends, window, longest=3) == pytest.approx(expected)


def test_a_window_of_nothing_but_space_has_no_span() -> None:
    nothing = Window(None, 3, np.array([2]), np.array([2]))  # type: ignore[arg-type]
    assert best_span(torch.zeros(5), torch.zeros(5), nothing, longest=3) is None


def test_characters_are_found_whatever_the_text_is_normalised_to() -> None:
    pieces = Pieces(pieces_model([*TOKENS, "½ é один"] * 20), origin=Path())
    text = "  один  cafe\u0301 ½\n x😀y\u3000the "
    located = pieces.locate(text)
    words = [text[b:e] for b, e in zip(located.begin, located.end, strict=True) if b < e]
    assert "".join(words) == "".join(text.split())
    assert located.ids.tolist() == pieces.encode(text).tolist()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"answer_start": 14}, "'Anna', which is not at character 14 of its context"),
        ({"answer_start": -20}, "not at character -20"),
        ({"answer_start": 10**9}, "is not at character"),
        ({"text": "anna"}, "the answer 'anna'"),
        ({"text": ""}, "is not at character 13"),
        ({"text": 3}, "is not a file of questions"),
        ({"answer_start": None}, "is not a file of questions"),
    ],
    ids=str,
)
def test_an_answer_that_is_not_in_its_context_is_one_sentence(
    tmp_path: Path, changes: dict[str, object], complaint: str
) -> None:
    path = written(tmp_path, document(**changes))
    with pytest.raises(ArtifactError, match=complaint) as raised:
        read_questions(path)
    assert "\n" not in str(raised.value)


def test_other_files_than_squads_are_refused(tmp_path: Path) -> None:
    for content, complaint in (
        ([], "is not a file of questions"),
        ({"data": []}, "has no question"),
        ({"data": [{"paragraphs": [{"context": "x"}]}]}, "qas"),
    ):
        with pytest.raises(ArtifactError, match=complaint):
            read_questions(written(tmp_path, content))
    twice = document()
    twice["data"] *= 2
    with pytest.raises(ArtifactError, match="question 'q1' occurs twice"):
        read_questions(written(tmp_path, twice))
    unanswered = document()
    unanswered["data"][0]["paragraphs"][0]["qas"][0]["answers"] = []
    with pytest.raises(ArtifactError, match="has no answer"):
        read_questions(written(tmp_path, unanswered))


def test_space_around_an_answer_is_no_part_of_it(tmp_path: Path) -> None:
    (one,) = read_questions(written(tmp_path, document(text=" Anna ", answer_start=12)))
    assert one.answers == (Answer("Anna", 13),)


def test_files_are_found_by_language_and_split(tmp_path: Path) -> None:
    for name in ("xquad.de.train.json", "a.b.en.dev.json.gz", "xquad.zh_Hant.test.json", "x.json"):
        (tmp_path / name).write_text("")
    files = TaskFiles.questions(tmp_path)
    found = {split: files.languages(split) for split in ("train", "dev", "test")}
    assert found == {"train": ["de"], "dev": ["en"], "test": ["zh_Hant"]}
    with pytest.raises(ConfigError, match="has no files NAME"):
        TaskFiles.questions(tmp_path / "empty")


def squad_words(text: str) -> list[str]:
    """SQuAD v1.1's own normalisation."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


@pytest.mark.parametrize(
    "text",
    [
        *("The  House, of the A-Team", "an Anna's", "", "thesis the"),
        *("Die „Große“ Stadt", "the Москва", "লাল কেল্লা।", "서울의 (수도)"),
    ],
)
def test_answers_of_every_language_are_normalised_as_squads(text: str) -> None:
    assert normalized(text) == squad_words(text)


def test_foreign_articles_and_punctuation_are_kept_as_squad_keeps_them() -> None:
    assert normalized("Die „Große“ Stadt.") == ["die", "„große“", "stadt"]
    assert word_f1("das Haus", ["Haus"]) == pytest.approx(2 / 3)
    assert exact_match("中国。", ["中国"]) == 0


def test_an_answer_scores_by_the_right_one_that_it_is_closest_to() -> None:
    right = ["the big house", "house of Anna"]
    assert exact_match("Big house!", right) == 1
    assert word_f1("Big house!", right) == 1
    words, wanted = Counter(["house", "of", "bonn"]), Counter(["house", "of", "anna"])
    overlap = sum((words & wanted).values())
    expected = 2 * (overlap / 3) * (overlap / 3) / (2 * overlap / 3)
    assert word_f1("house of Bonn", right) == pytest.approx(expected)
    assert exact_match("house of Bonn", right) == 0
    assert word_f1("", right) == 0
    assert exact_match("the", ["a"]) == 1
