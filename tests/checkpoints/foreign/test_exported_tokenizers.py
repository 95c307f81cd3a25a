"""Exported tokenizers give our ids in transformers, line by line, in every script."""

import gzip
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.exported_models import own_sentencepiece, own_tokenizer
from transformers import M2M100Tokenizer, NllbTokenizer

from pipeline.checkpoints.foreign.layouts import chosen_layout, entries_of
from pipeline.checkpoints.foreign.written_folder import write_vocabulary

pytestmark = pytest.mark.slow

BIBLE = Path(__file__).parents[4] / "shared" / "data" / "bible"
PIECES = 3000
TRAINED_LINES, TEST_LINES = 60, 200
"""Of each of 25 languages."""
CASES = {
    "M2M100Tokenizer, unigram": ((), "unigram"),
    "M2M100Tokenizer, bpe": ((), "bpe"),
    "NllbTokenizer, unigram": (("chr",), "unigram"),
    "NllbTokenizer, bpe": (("chr",), "bpe"),
}
"""Languages beside those of the corpus, which M2M-100 has all; kind of SentencePiece model."""


def sides() -> dict[str, Path]:
    """Language → a folder of the corpus in which it is."""
    folders = {folder.name.removeprefix("en-"): folder for folder in sorted(BIBLE.glob("en-*"))}
    return {**folders, "en": folders["de"]}


def lines_of(split: str, count: int) -> list[str]:
    """The first lines of a split in every language."""
    lines: list[str] = []
    for code, folder in sides().items():
        with gzip.open(folder / f"{split}.{code}.gz", "rt", encoding="utf-8") as stream:
            lines += [line.rstrip("\n") for line in islice(stream, count)]
    return lines


@pytest.mark.skipif(not BIBLE.is_dir(), reason="the Bible corpus is not beside the repository")
@pytest.mark.parametrize("case", CASES)
def test_ids_are_ours_on_5000_lines_in_all_scripts(case: str, tmp_path: Path) -> None:
    """The vocabulary lacks some characters of the lines."""
    more, kind = CASES[case]
    model = own_sentencepiece(lines_of("valid", TRAINED_LINES), size=PIECES, model_type=kind)
    ours = own_tokenizer(sorted({*sides(), *more}), model)
    layout = chosen_layout(entries_of(ours, tmp_path))
    assert layout.of_hundred == (not more)
    write_vocabulary(tmp_path, model, layout, max_length=1024)
    tokenizer_type: Any = NllbTokenizer if more else M2M100Tokenizer
    theirs = tokenizer_type.from_pretrained(tmp_path)
    lines = lines_of("test", TEST_LINES)
    assert len(lines) == 5000
    built = ours.build()
    for line, expected in zip(lines, built.encode_batch(lines), strict=True):
        found = [
            layout.rows[index] for index in theirs(line, add_special_tokens=False)["input_ids"]
        ]
        assert found == expected, line
    assert built.unk_id in {index for line in lines for index in built.encode(line)}
    for code in ours.description.languages:
        index = theirs.convert_tokens_to_ids(layout.token_of[code])
        assert layout.rows[index] == built.language_token_id(code)
