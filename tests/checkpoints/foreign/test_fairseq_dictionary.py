"""A dictionary of fairseq's and its SentencePiece model give the ids that a look-up gives."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
from fairseq_files import Files, vocabulary_files
from support.foreign_models import LINES, SPECIALS, pieces_of, sentencepiece_model

from pipeline.artifacts.tokenizer import language_token
from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary, read_dictionary
from pipeline.errors import CheckpointError, ConfigError

TEXTS = [*LINES, "не́что unbekanntes ₿ 漢字", "", "  two  spaces "]


def write(directory: Path, lines: Sequence[str]) -> FairseqVocabulary:
    (directory / "dict.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (directory / "spm.model").write_bytes(sentencepiece_model())
    return FairseqVocabulary(directory / "dict.txt", directory / "spm.model")


def ordinary() -> list[str]:
    return [piece for piece in pieces_of(sentencepiece_model()) if piece not in SPECIALS]


@pytest.mark.parametrize(("mark", "end"), [("", "\n"), ("\ufeff", "\n"), ("\ufeff", "\r\n")])
def test_ids_are_those_of_a_look_up_of_the_pieces(mark: str, end: str, tmp_path: Path) -> None:
    files = vocabulary_files(tmp_path)
    path = files.vocabulary.dictionary
    path.write_bytes((mark + path.read_text("utf-8").replace("\n", end)).encode())
    tokenizer = files.vocabulary.tokenizer(size=files.size, style="underscores").build()
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    for text in TEXTS:
        expected = [
            files.symbols.get(piece, SPECIALS["<unk>"])
            for piece in processor.encode(text, out_type=str)
        ]
        assert tokenizer.encode(text) == expected
    assert tokenizer.decode(tokenizer.encode(LINES[0])) == LINES[0]
    specials = tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id
    assert specials == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("spelling", "languages", "scheme"),
    [
        ("__{}__", ("de", "en"), "underscores"),
        ("[{}]", ("de_DE", "en_XX"), "brackets"),
        ("LANG_TOK_{}", ("DE", "EN"), "lang_tok"),
        ("<2{}>", ("de", "en"), "angle"),
        ("{}", ("deu_Latn", "eng_Latn"), "plain"),
    ],
)
def test_language_tokens_are_known_by_their_spelling(
    spelling: str, languages: Sequence[str], scheme: str, tmp_path: Path
) -> None:
    files = vocabulary_files(tmp_path, spelling=spelling, languages=languages)
    found = files.vocabulary.tokenizer(size=files.size, style="underscores")
    assert found.description.languages == ("de", "en")
    assert found.description.language_token_scheme == scheme
    tokenizer = found.build()
    for code, language in zip(("de", "en"), languages, strict=True):
        assert tokenizer.language_token_id(code) == files.symbols[spelling.format(language)]


def test_every_scheme_spells_a_token_as_it_is_read(tmp_path: Path) -> None:
    del tmp_path
    spelled = [
        language_token("de", scheme) for scheme in ("underscores", "angle", "brackets", "lang_tok")
    ]
    assert spelled == ["__de__", "<2de>", "[de]", "LANG_TOK_DE"]


def test_languages_that_the_dictionary_lacks_follow_in_the_task_s_order(tmp_path: Path) -> None:
    files = vocabulary_files(tmp_path, languages=("fr",))
    languages = ["ru", "fr", "de"]
    found = files.vocabulary.tokenizer(
        size=files.size + 2, languages=languages, style="underscores"
    )
    tokenizer = found.build()
    expected = [files.size, files.symbols["__fr__"], files.size + 1]
    assert [tokenizer.language_token_id(code) for code in languages] == expected


@pytest.mark.parametrize("named", [(), ("ru", "de", "ru", "en")])
def test_a_language_that_is_listed_twice_has_one_token(
    named: tuple[str, ...], tmp_path: Path
) -> None:
    files = vocabulary_files(tmp_path, languages=())
    chosen = replace(files.vocabulary, languages=named)
    found = chosen.tokenizer(
        size=files.size + 3, languages=["ru", "ru", "de", "en", "de"], style="underscores"
    )
    ids = [found.build().language_token_id(code) for code in ("ru", "de", "en")]
    assert ids == [files.size, files.size + 1, files.size + 2]


def test_languages_that_are_named_go_before_those_of_the_checkpoint(tmp_path: Path) -> None:
    files = vocabulary_files(tmp_path, languages=())
    chosen = FairseqVocabulary(
        files.vocabulary.dictionary, files.vocabulary.sentencepiece, ("en", "de")
    )
    found = chosen.tokenizer(size=files.size + 2, languages=["de", "en"], style="brackets")
    tokenizer = found.build()
    assert tokenizer.language_token_id("en") == files.size
    assert tokenizer.language_token_id("de") == files.size + 1
    assert found.description.language_token_scheme == "brackets"


def test_words_that_fill_up_and_tokens_of_tasks_are_no_languages(tmp_path: Path) -> None:
    lines = [f"{piece} 1" for piece in ordinary()]
    lines += ["__dae__ 1", "__lm__ 1", "__en__ 1", "madeupword0000 0", "madeupword0001 0"]
    vocabulary = write(tmp_path, lines)
    found = vocabulary.tokenizer(size=4 + len(lines) + 3, style="underscores")
    assert found.description.languages == ("en",)
    assert found.build().size == 4 + len(lines) + 3


def test_a_symbol_that_overwrites_has_the_later_id(tmp_path: Path) -> None:
    content = b"a 3\n<s> 1 #fairseq:overwrite\nb 2\na 9 #fairseq:overwrite\n"
    symbols, size = read_dictionary(content, tmp_path)
    assert symbols == SPECIALS | {"<s>": 5, "b": 6, "a": 7}
    assert size == 8


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a 1\nb\n", "Line 2 of .* is 'b'"),
        ("a 1\n\nb 2\n", "Line 2 of"),
        ("a 1\nb two\n", "Line 2 of .* is 'b two'"),
        ("a 1\nb 1.5\n", "Line 2 of"),
        ("a 1\na 2\n", "Line 2 of .* repeats 'a'"),
        ("<pad> 1\n", "Line 1 of .* repeats '<pad>'"),
    ],
)
def test_a_broken_line_is_named(content: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        read_dictionary(content.encode(), tmp_path)


def test_a_line_is_ended_by_nothing_but_a_line_break(tmp_path: Path) -> None:
    symbols, _ = read_dictionary("a\u2028b 1\r\nc d 2".encode(), tmp_path)
    assert symbols == SPECIALS | {"a\u2028b": 4, "c d": 5}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["the@@ 9", "re 8", "LANG_TOK_EN 7"], "subword-nmt"),
        (["▁nothing 9", "▁of 8", "__en__ 1"], "of one checkpoint"),
    ],
)
def test_a_dictionary_of_others_is_refused(lines: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        write(tmp_path, lines).tokenizer(size=7, style="underscores")


@pytest.mark.parametrize(
    ("difference", "languages", "words"),
    [
        *((difference, ("de", "en"), "model has {} embeddings") for difference in (-1, 100)),
        (0, (), "--languages de en"),
    ],
)
def test_a_dictionary_of_another_model_or_without_languages_is_refused(
    difference: int, languages: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    files = vocabulary_files(tmp_path, languages=languages)
    size = files.size + difference
    with pytest.raises(CheckpointError, match=words.format(size)):
        files.vocabulary.tokenizer(size=size, style="underscores")


@pytest.mark.parametrize("name", ["dict.txt", "spm.model"])
def test_a_missing_or_foreign_file_is_named(name: str, tmp_path: Path) -> None:
    files = vocabulary_files(tmp_path)
    path = tmp_path / name
    for spoil in (lambda: path.write_bytes(b"\xff\xfe\x00"), path.unlink):
        spoil()
        with pytest.raises(CheckpointError, match=name):
            files.vocabulary.tokenizer(size=files.size, style="underscores")


def test_an_empty_sentencepiece_model_is_refused(tmp_path: Path) -> None:
    files = vocabulary_files(tmp_path)
    files.vocabulary.sentencepiece.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"spm\.model is not a SentencePiece model"):
        files.vocabulary.tokenizer(size=files.size, style="underscores")


@pytest.mark.parametrize("named", [{"dictionary"}, {"sentencepiece"}, {"languages"}])
def test_one_file_without_the_other_is_refused(named: set[str]) -> None:
    dictionary = Path("dict.txt") if "dictionary" in named else None
    model = Path("spm.model") if "sentencepiece" in named else None
    with pytest.raises(ConfigError, match="is missing"):
        FairseqVocabulary.of_options(dictionary, model, ["de"] if "languages" in named else [])
    assert FairseqVocabulary.of_options(None, None, []) is None


def test_two_scripts_of_a_language_stay_two(tmp_path: Path) -> None:
    files: Files = vocabulary_files(tmp_path, languages=("zho_Hans", "zho_Hant", "eng_Latn"))
    found = files.vocabulary.tokenizer(size=files.size, style="underscores")
    assert found.description.languages == ("en", "zh", "zh_Hant")
