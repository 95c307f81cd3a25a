"""Tests of pipeline/decoding/line_filter.py: pipes, single lines, unreadable lines, all ends."""

import json
import os
import re
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
from sentencepiece import SentencePieceProcessor
from support.exported_models import own_checkpoint, own_sentencepiece
from support.foreign_models import LINES
from support.forked import start_command
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import attend_to_source, tiny_model, tiny_spec

from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Direction, Hypothesis
from pipeline.cli.ending import EXIT_BROKEN_PIPE, EXIT_KEYBOARD
from pipeline.decoding import line_filter
from pipeline.decoding.hypotheses import Translation
from pipeline.decoding.line_filter import BATCH_LINES, find_direction
from pipeline.decoding.minimum_bayes_risk import expected_utility
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import EXIT_USER_ERROR, ConfigError

LANGUAGES = ("de", "en", "fr", "ru")
MAX_POSITIONS = 40
SETTINGS: Mapping[str, float] = {"beam_size": 2, "max_length_ratio": 0.3, "max_extra_length": 6}
DECODING = DecodingConfig.model_validate(SETTINGS)
SECONDS = 120.0
"""Time limit of one answer: loading torch takes most of it on a busy machine."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    model = tiny_model(byte_spec(max_positions=MAX_POSITIONS))
    attend_to_source(model, factor=6)
    directory = make_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint", model)
    settings = "".join(f"{name} = {value}\n" for name, value in SETTINGS.items())
    recipe = directory.parent / "recipe.toml"
    recipe.write_text(f"[decoding]\n{settings}", encoding="utf-8")
    return open_artifact(directory, kind="checkpoint")


@pytest.fixture(scope="module")
def translated(checkpoint: Artifact) -> Callable[[str], str]:
    """Translate a line from German into English without the filter."""
    translator = Translator(checkpoint, DECODING)

    def translate(text: str) -> str:
        (found,) = translator.translate([Job(Direction("de", "en"), 0, text)])
        return found.text.translate(dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85"), " "))

    return translate


def arguments(checkpoint: Artifact, *, source: str = "de", target: str = "en") -> list[str]:
    recipe = checkpoint.directory.parent / "recipe.toml"
    model = ["--checkpoint", str(checkpoint.directory), "--recipe", str(recipe)]
    return ["translate", *model, "--from", source, "--to", target]


INVALID = re.compile(
    r"mmnmt translate: The translations of ([\d,]+) of [\d,]+ lines? had ([\d,]+) sequences? of "
    r"bytes that are not UTF-8, which were dropped\.\n"
)
AT_LIMIT = re.compile(r"mmnmt translate: [^\n]* permit: its end may be cut off\.\n")
"""Remarks at the end: a model without training writes any bytes, and does not end."""
AS_EMPTY = "It is translated as an empty line."


def apart_from_untrained(error: str) -> str:
    return INVALID.sub("", AT_LIMIT.sub("", error))


def errors(capsys: pytest.CaptureFixture[str]) -> str:
    return apart_from_untrained(capsys.readouterr().err)


Piped: TypeAlias = Callable[..., tuple[int, list[str]]]
"""Run the filter; return its exit code and output lines."""


@pytest.fixture
def piped(checkpoint: Artifact, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Piped:
    of_module = checkpoint

    def run(
        data: bytes,
        *,
        source: str = "de",
        target: str = "en",
        more: Sequence[str] = (),
        checkpoint: Artifact | None = None,
    ) -> tuple[int, list[str]]:
        (tmp_path / "input").write_bytes(data)
        command = arguments(checkpoint or of_module, source=source, target=target)
        with (tmp_path / "input").open() as given, (tmp_path / "output").open("w") as written:
            monkeypatch.setattr("sys.stdin", given)
            monkeypatch.setattr("sys.stdout", written)
            code = cli.main([*command, *more])
        output = (tmp_path / "output").read_bytes().decode()
        assert output == "" or output.endswith("\n")
        return code, output.split("\n")[:-1]

    return run


@pytest.mark.parametrize("at_once", [3, 256])
def test_one_line_comes_out_per_line_in_order_however_many_are_translated_at_once(
    piped: Piped, translated: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(line_filter, "BATCH_LINES", at_once)
    lines = ["Ein kurzer Satz.", "", "Ja", "  ", "Der zweite Satz ist länger.", *"abcdefg"]
    code, found = piped("\n".join(lines).encode())
    assert (code, found) == (0, [translated(line) for line in lines])
    assert found[1] == found[3] == ""
    assert len(set(found)) > len(lines) / 2


def test_no_line_of_the_output_can_be_taken_for_two(
    piped: Piped, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def broken(_: Translator, jobs: Sequence[Job]) -> list[Hypothesis]:
        asked.extend(job.text for job in jobs)
        return [Hypothesis(f"{job.text}\n\u2028\x85\r\v{job.text}") for job in jobs]

    monkeypatch.setattr(Translator, "translate", broken)
    code, found = piped("a\u2028b\nc\rd\r\n".encode())
    assert (code, found) == (0, ["a b     a b", "c d     c d"])
    assert sorted(asked) == ["a b", "c d"]


def test_bytes_that_are_no_utf_8_are_dropped_and_counted(
    piped: Piped, checkpoint: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["Ein kurzer Satz.", "Ja", "", "Der zweite Satz ist länger."]
    piped("\n".join(lines).encode())
    said = INVALID.search(capsys.readouterr().err)
    translator = Translator(checkpoint, DECODING)
    found = translator.translate(
        [Job(Direction("de", "en"), number, line) for number, line in enumerate(lines)]
    )
    counts = [one.invalid for one in found]
    assert said is not None
    assert said.groups() == (str(sum(map(bool, counts))), str(sum(counts)))
    assert sum(counts) > 0


def test_long_lines_are_split_and_joined_and_that_is_said_once(
    piped: Piped, translated: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = ["Der erste Satz ist kurz.", "Der zweite ist es auch!"]
    data = "\n".join(["Ja", " ".join(sentences), "Nein", " ".join(sentences * 2)])
    code, found = piped(data.encode())
    assert code == 0
    parts = [translated(sentence).strip() for sentence in sentences]
    assert found[1] == " ".join(part for part in parts if part)
    assert found[3] == " ".join(part for part in parts * 2 if part)
    assert errors(capsys).splitlines() == [
        "mmnmt translate: 2 of 4 lines exceeded the model's 38 tokens: split into"
        " 6 parts, at sentence ends if possible, translated, and joined again."
    ]


def test_a_line_that_cannot_be_read_stands_as_an_empty_one_and_is_named(
    piped: Piped, translated: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    long = b"x" * (1024 * 1024 + 1)
    data = b"\n".join([b"Ja", b"b\xffse", long, b"Nein"])
    code, found = piped(data)
    assert code == EXIT_USER_ERROR
    assert found == [translated("Ja"), "", "", translated("Nein")]
    assert errors(capsys).splitlines() == [
        f"mmnmt translate: Line 2 is not UTF-8 (invalid start byte at byte 1). {AS_EMPTY}",
        f"mmnmt translate: Line 3 is longer than 1,048,576 bytes. {AS_EMPTY}",
    ]


def test_of_many_lines_that_cannot_be_read_the_first_are_named_and_all_counted(
    piped: Piped, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = piped(b"\xff\n" * 500)
    assert (code, found) == (EXIT_USER_ERROR, [""] * 500)
    said = errors(capsys).splitlines()
    assert len(said) == line_filter.NAMED_PROBLEMS + 1
    assert "500 of 500 lines could not be read" in said[-1]


@pytest.mark.parametrize(
    ("typed", "plain"), [("3\thours\u00a0ago", "3 hours ago"), ("Ma\u0308rz", "März")]
)
def test_text_is_read_as_people_type_it_and_unknown_characters_are_told_in_one_line(
    piped: Piped, typed: str, plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vocabulary has no rule of its own, as those of earlier versions."""
    vocabulary = own_sentencepiece(["3 hours ago", "18. März 2020"] * 20)
    size = SentencePieceProcessor(model_proto=vocabulary).get_piece_size() + len(LANGUAGES)
    spec = tiny_spec(vocabulary=size, max_positions=MAX_POSITIONS)
    model = tiny_model(spec.model_copy(update={"pad_id": 0}))
    made = make_checkpoint(tmp_path / "checkpoint", model, sentencepiece=vocabulary)
    (tmp_path / "recipe.toml").write_text("[decoding]\nmax_extra_length = 6\n", encoding="utf-8")
    lines = [plain, typed, *(f"{plain} ж" for _ in range(40)), "\ufeff\u00ad\u200b"]
    checkpoint = open_artifact(made, kind="checkpoint")
    data = "\n".join(lines).encode()
    code, found = piped(data, more=["--n-best", "2"], checkpoint=checkpoint)
    assert (code, len(found)) == (0, 43)
    assert found[1] == found[0] != found[2]
    assert json.loads(found[-1])["n_best"] == []
    assert errors(capsys) == (
        "mmnmt translate: 40 of 43 lines have characters that the model's vocabulary does not "
        "have. The model cannot tell these apart.\n"
    )


@pytest.mark.parametrize("at_once", [1, 256])
def test_details_make_every_line_an_object_whose_text_is_the_translation(
    piped: Piped, translated: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(line_filter, "BATCH_LINES", at_once)
    lines = ["Ein kurzer Satz.", "", "Ja"]
    asked = ["--n-best", "2", "--word-scores", "--alignments"]
    code, found = piped("\n".join(lines).encode(), more=asked)
    assert code == 0
    records = [json.loads(line) for line in found]
    texts = [" ".join(record["text"].splitlines()) for record in records]
    assert texts == [translated(line) for line in lines]
    for record in (records[0], records[2]):
        first, second = record["n_best"]
        assert (first["text"], first["score"]) == (record["text"], record["score"])
        assert first["score"] >= second["score"]
        assert [pair[1] for pair in record["alignment"]] == list(range(len(record["words"])))
    assert records[0]["source_words"] == lines[0].split()
    assert records[1]["n_best"] == []


def test_minimum_bayes_risk_prints_the_one_text_that_it_chooses_from_the_list(piped: Piped) -> None:
    data = b"Ein kurzer Satz.\n\nJa\n"
    sampled = [f"--set=decoding.{one}" for one in ("search=sampling", "n_best=8", "top_k=3")]
    code, listed = piped(data, more=sampled)
    assert code == 0
    expected = []
    for line in listed:
        texts = [one["text"] for one in json.loads(line)["n_best"]]
        utility = expected_utility(texts) if texts else []
        best = texts[utility.index(max(utility))] if texts else ""
        expected.append(" ".join(best.splitlines()))
    chosen = piped(data, more=[*sampled, "--set=decoding.choose=mbr"])
    assert chosen == (0, expected)


def test_a_translation_begins_with_what_stands_behind_the_tab(
    piped: Piped, translated: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    data = "Ja\tYes, \nNein\nSo\t" + "x" * 40 + "\nDoch\tab"
    code, found = piped(data.encode(), more=["--prefixes", "--banned", "ba"])
    assert code == EXIT_USER_ERROR
    assert found[0].startswith("Yes, ")
    assert found[1:3] == [translated("Nein"), ""]
    assert found[3].startswith("ab")
    assert errors(capsys).splitlines() == [
        "mmnmt translate: Line 3 has a prefix of 40 tokens, of which the model takes 37. "
        + AS_EMPTY
    ]


@pytest.mark.parametrize(("must", "letters"), [("abcdefghij", 30), ("ab", 36)])
def test_a_prefix_for_which_the_phrases_of_all_lines_leave_no_room_is_named(
    piped: Piped, capsys: pytest.CaptureFixture[str], must: str, letters: int
) -> None:
    data = f"Ja\tYes, \nSo\t{'x' * letters}\nDoch\n"
    code, found = piped(data.encode(), more=["--prefixes", "--must", must])
    assert (code, found[1]) == (EXIT_USER_ERROR, "")
    assert found[0].startswith("Yes, ")
    assert must in found[0]
    assert must in found[2]
    assert errors(capsys) == (
        f"mmnmt translate: Line 2 must have {len(must) + letters} tokens in its translation, of "
        f"which the model takes 37. {AS_EMPTY}\n"
    )


@pytest.mark.parametrize(("phrases", "number"), [("ab\n\n", 1), ("\nx\ty\n", 2)])
def test_phrases_of_a_line_that_is_sampled_are_refused(
    piped: Piped,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    phrases: str,
    number: int,
) -> None:
    (tmp_path / "phrases").write_text(phrases, encoding="utf-8")
    more = ["--must-file", str(tmp_path / "phrases"), "--set=decoding.search=sampling"]
    code, found = piped(b"Ja\nNein\n", more=more)
    assert (code, found[number - 1]) == (EXIT_USER_ERROR, "")
    assert all(found[: number - 1] + found[number:])
    assert errors(capsys) == (
        f"mmnmt translate: Line {number} must have phrases, which only beam search finds. "
        f"{AS_EMPTY}\n"
    )


def test_a_translation_has_the_phrases_of_all_lines_and_of_its_own(
    piped: Piped,
    translated: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = tmp_path / "phrases"
    wanted.write_text(
        "\ufeffab ba\tx\n\u2060\t\u200e\n" + "x" * 40 + "\n\n\nab\nab\n", encoding="utf-8"
    )
    data = "Ja\nNein\nSo\nDoch\n\n \n\u200b\n".encode()
    more = ["--must-file", str(wanted)]
    code, found = piped(data, more=more)
    assert code == EXIT_USER_ERROR
    assert "ab ba" in found[0]
    assert "x" in found[0]
    assert found[1:] == [translated("Nein"), "", translated("Doch"), "", "", ""]
    assert errors(capsys).splitlines() == [
        "mmnmt translate: Line 3 must have 40 tokens in its translation, of which the model takes "
        f"37. {AS_EMPTY}",
        *(
            f"mmnmt translate: Line {n} is empty, and its translation must have phrases. {AS_EMPTY}"
            for n in (6, 7)
        ),
    ]
    code, found = piped(data, more=["--must", "ab", *more])
    assert all("ab" in line for line in (found[0], found[1], found[3]))


@pytest.mark.parametrize(
    ("phrases", "at_once", "translated_lines", "said"),
    [
        ("ab\n", 1, 1, "has fewer lines than the input, which goes on after line 1"),
        ("ab\n", 256, 1, "has fewer lines than the input, which goes on after line 1"),
        ("", 1, 0, "has fewer lines than the input, which goes on after line 0"),
        ("ab\n\n\nx\n", 1, 3, "has more lines than the input"),
        ("\n\n\n\n", 256, 3, "has more lines than the input"),
    ],
)
def test_a_file_of_phrases_with_another_number_of_lines_is_refused(
    piped: Piped,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    phrases: str,
    at_once: int,
    translated_lines: int,
    said: str,
) -> None:
    monkeypatch.setattr(line_filter, "BATCH_LINES", at_once)
    (tmp_path / "phrases").write_text(phrases, encoding="utf-8")
    more = ["--must-file", str(tmp_path / "phrases")]
    code, found = piped(b"Ja\nNein\nSo\n", more=more)
    assert (code, len(found)) == (EXIT_USER_ERROR, translated_lines)
    error = errors(capsys)
    assert f"The file of required phrases {said}" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("banned", ["e", "\u00fc"])
def test_a_banned_phrase_is_in_no_translation_in_whatever_pieces(
    tmp_path: Path, banned: str
) -> None:
    """The vocabulary has it by itself, behind a space and within longer pieces."""
    own_checkpoint(tmp_path / "checkpoint")
    checkpoint = open_artifact(tmp_path / "checkpoint", kind="checkpoint")
    translator = Translator(checkpoint, DecodingConfig(n_best=5, max_length_ratio=1))
    jobs = [Job(Direction("en", "de"), number, line) for number, line in enumerate(LINES[:6])]

    def texts(translator: Translator) -> list[str]:
        found = [one.details for one in translator.translate(jobs)]
        return [one.text for details in found if details for one in details.n_best]

    assert any(banned in text for text in texts(translator))
    settings = translator.config.model_copy(update={"banned": (banned,)})
    assert not any(banned in text for text in texts(Translator(checkpoint, settings)))


@pytest.mark.parametrize("written", [b" ", b"  ", b"\xff", b""])
def test_a_translation_without_text_has_no_words(
    checkpoint: Artifact, monkeypatch: pytest.MonkeyPatch, written: bytes
) -> None:
    settings = {"word_scores": True, "alignments": True}
    translator = Translator(checkpoint, DECODING.model_copy(update=settings))
    first = translator.tokenizer.encode("a")[-1] - ord("a")
    found = Translation(tuple(first + byte for byte in written), -1.0)
    monkeypatch.setattr(translator, "search", lambda sources: [[found] for _ in sources])
    (line,) = translator.translate([Job(Direction("de", "en"), 0, "Ja")])
    assert line.details is not None
    assert (line.text.strip(), line.details.words, line.details.alignment) == ("", (), ())
    assert line.details.source_words == ("Ja",)


@pytest.mark.parametrize("most", [1, 3, 4])
def test_a_list_of_hypotheses_has_each_text_once_even_if_it_has_one_only(
    piped: Piped, checkpoint: Artifact, most: int
) -> None:
    lines = ["Ein kurzer Satz.", "Ja", "Nein", "Der zweite Satz ist l\u00e4nger."]
    more = ["--set=decoding.beam_size=8", f"--n-best={most}"]
    code, found = piped("\n".join(lines).encode(), more=more)
    assert code == 0
    settings = DECODING.model_copy(update={"beam_size": 8, "n_best": 8})
    translator = Translator(checkpoint, settings)
    jobs = [Job(Direction("de", "en"), number, line) for number, line in enumerate(lines)]
    repeated = 0
    for line, source in zip(found, translator.sources(jobs), strict=True):
        (every,) = translator.search([source])
        texts = [translator.tokenizer.decode(one.tokens) for one in every]
        distinct = dict.fromkeys(" ".join(text.split()) for text in texts)
        listed = [" ".join(one["text"].split()) for one in json.loads(line)["n_best"]]
        assert listed == [*distinct][:most]
        repeated += len(texts) - len(distinct)
    assert repeated > 0


@pytest.mark.parametrize("text", ["Yes", "ab\u2028c"])
def test_a_translation_of_which_the_model_is_certain_is_in_its_list(
    piped: Piped, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    certain = [Hypothesis(text, -0.0), Hypothesis("")]
    monkeypatch.setattr(Translator, "translate", lambda *_: certain)
    code, found = piped(b"Ja\n\n", more=["--n-best", "1"])
    told = [json.loads(line) for line in found]
    assert (code, [one["n_best"] for one in told]) == (
        0,
        [[{"text": " ".join(text.splitlines()), "score": 0.0}], []],
    )


@pytest.mark.parametrize("data", ["\tYes, ", "  \tYes, "])
def test_the_translation_of_an_empty_line_is_its_prefix(piped: Piped, data: str) -> None:
    found = piped(data.encode(), more=["--prefixes"])
    assert found == (0, ["Yes, "])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--must", " "], "the required phrase ' ': it is empty"),
        (["--must-file", "nowhere"], "nowhere cannot be read"),
        (["--n-best", "3"], "n_best 3 exceeds beam_size 2"),
        (["--banned", " "], "the banned phrase ' ': it is empty"),
        (["--banned", "%", "--must", "95%"], "The required phrase '95%' has a banned one in it"),
        (["--must", "abc", "--banned", "b"], "The required phrase 'abc' has a banned one in it"),
    ],
)
def test_what_a_filter_cannot_be_asked_for_is_refused_in_one_sentence(
    piped: Piped, capsys: pytest.CaptureFixture[str], more: Sequence[str], said: str
) -> None:
    code, found = piped(b"Ja\n", more=more)
    assert (code, found) == (EXIT_USER_ERROR, [])
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_nothing_in_gives_nothing_out(piped: Piped) -> None:
    assert piped(b"") == (0, [])


@pytest.mark.parametrize(
    ("source", "target"), [("deu_Latn", "eng"), ("ger", "en-GB"), ("DE", "eng_Latn")]
)
def test_languages_are_understood_in_all_their_spellings(
    piped: Piped, translated: Callable[[str], str], source: str, target: str
) -> None:
    found = piped(b"Ja\n", source=source, target=target)
    assert found == (0, [translated("Ja")])


def test_a_language_that_the_model_has_by_that_very_code_is_that_language(tmp_path: Path) -> None:
    """Though ``iw`` is the registry's ``he``."""
    model = tiny_model(byte_spec().model_copy(update={"languages": ("en", "fr", "iw", "ru")}))
    directory = make_checkpoint(tmp_path / "checkpoint", model)
    translator = Translator(open_artifact(directory, kind="checkpoint"), DECODING)
    assert find_direction(translator, source="iw", target="rus") == Direction("iw", "ru")


def test_any_two_languages_of_the_model_make_a_direction(checkpoint: Artifact) -> None:
    translator = Translator(checkpoint, DECODING)
    for source in LANGUAGES:
        for target in LANGUAGES:
            if source != target:
                direction = find_direction(translator, source=source, target=target)
                (found,) = translator.translate([Job(direction, 0, "Ja")])
                assert found.score < 0


@pytest.mark.parametrize("target", ["dx", "zh-CN", "not a language", ""])
def test_an_unknown_language_is_refused_before_anything_is_read(
    piped: Piped, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    found = piped(b"Ja\n", source="en", target=target)
    assert found == (EXIT_USER_ERROR, [])
    (said,) = errors(capsys).splitlines()
    assert f"This model does not know the language {target!r}. Choose from de, en, fr, ru" in said


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("de", "deu_Latn", "--from de and --to deu_Latn are one language"),
        ("en", "German", "'German' .*'de'"),
        ("Russian", "en", "'Russian' .*'ru'"),
    ],
)
def test_one_language_twice_and_names_of_languages_are_refused_with_the_models_code(
    checkpoint: Artifact, source: str, target: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        find_direction(Translator(checkpoint, DECODING), source=source, target=target)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("fra", r"--to de is not in decoding.targets \(fra, en\)"),
        ("xx", "targets names 'xx', and the m"),
    ],
)
def test_a_target_that_the_recipe_leaves_out_is_refused(
    checkpoint: Artifact, asked: str, said: str
) -> None:
    decoding = DECODING.model_copy(update={"targets": (asked, "en")})
    with pytest.raises(ConfigError, match=said):
        find_direction(Translator(checkpoint, decoding), source="en", target="de")


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_closed_stream_is_said_in_a_sentence(
    checkpoint: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stream: str,
) -> None:
    monkeypatch.setattr(f"sys.__{stream}__", None)
    assert cli.main(arguments(checkpoint)) == EXIT_USER_ERROR
    assert "Standard input or output is closed" in capsys.readouterr().err


class Conversation:
    """The filter in a process of its own, to which lines are written one by one."""

    def __init__(self, checkpoint: Artifact, folder: Path) -> None:
        for name in ("stdin", "stdout"):
            os.mkfifo(folder / name)
        self.process = start_command(arguments(checkpoint), streams=folder)
        self.stdin = (folder / "stdin").open("wb")
        self.stdout = (folder / "stdout").open("rb")
        self._errors, self._answer = folder / "stderr", b""

    def write(self, data: bytes) -> None:
        self.stdin.write(data)
        self.stdin.flush()

    def read_line(self) -> str:
        """Return the next line of output; fail if it does not come in time."""
        deadline = time.monotonic() + SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            while b"\n" not in self._answer:
                assert selector.select(deadline - time.monotonic()), "no answer in time"
                chunk = os.read(self.stdout.fileno(), 4096)
                assert chunk, "the output ended"
                self._answer += chunk
        line, self._answer = self._answer.split(b"\n", 1)
        return line.decode()

    def end(self) -> tuple[int | None, str]:
        """Exit code and what is said of the input, after that has ended."""
        self.stdin.close()
        self.process.join(SECONDS)
        return self.process.exitcode, apart_from_untrained(self._errors.read_text(encoding="utf-8"))


@pytest.fixture
def talk(checkpoint: Artifact, tmp_path: Path) -> Iterator[Conversation]:
    talk = Conversation(checkpoint, tmp_path)
    yield talk
    talk.process.kill()
    talk.stdin.close()
    talk.stdout.close()


@pytest.mark.slow
def test_whoever_writes_a_line_and_waits_is_answered(
    talk: Conversation, translated: Callable[[str], str]
) -> None:
    for text in ("Ja", "Ein Satz.", "", "Noch ein Satz"):
        talk.write(f"{text}\n".encode())
        assert talk.read_line() == translated(text)
    talk.write(b"schlecht \xff\n")
    assert talk.read_line() == ""
    talk.write(b"".join(b"%d\n" % i for i in range(BATCH_LINES + 9)))
    answers = [talk.read_line() for _ in range(BATCH_LINES + 9)]
    assert answers[:3] == [translated(text) for text in "012"]
    talk.write(b"kein Ende")
    talk.stdin.close()
    assert talk.read_line() == translated("kein Ende")
    code, said = talk.end()
    assert code == EXIT_USER_ERROR
    assert said == (
        f"mmnmt translate: Line 5 is not UTF-8 (invalid start byte at byte 9). {AS_EMPTY}\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, EXIT_KEYBOARD)]
)
def test_a_signal_ends_it_at_once_and_what_was_answered_stays(
    talk: Conversation, translated: Callable[[str], str], number: int, code: int
) -> None:
    talk.write(b"Ja\n")
    assert talk.read_line() == translated("Ja")
    assert talk.process.pid is not None
    os.kill(talk.process.pid, number)
    talk.process.join(SECONDS)
    ended, said = talk.end()
    assert ended == code
    assert "Traceback" not in said


@pytest.mark.slow
def test_it_ends_when_nobody_reads_any_more(talk: Conversation) -> None:
    talk.write(b"Ja\n")
    talk.read_line()
    talk.stdout.close()
    talk.write(b"Nein\n")
    assert talk.end() == (EXIT_BROKEN_PIPE, "")
