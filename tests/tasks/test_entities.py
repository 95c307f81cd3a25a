"""Files of named entities, sentences cut for a model, and their F1 against seqeval's."""

import gzip
import random
from pathlib import Path

import numpy as np
import pytest
from support.tiny_xlmr import TOKENS, pieces_model

from pipeline.errors import ArtifactError, ConfigError, DataError
from pipeline.extensions.tasks.named_entities import (
    Sentence,
    entities,
    entity_scores,
    label,
    read_entities,
)
from pipeline.extensions.tasks.token_classifier import TaskFiles
from pipeline.extensions.tasks.xlmr import BOS, EOS, UNKNOWN, Pieces

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "ner"
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")


def written(folder: Path, text: str, name: str = "train.tsv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_sentences_end_at_empty_lines_and_at_the_end_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "\nAnna\tB-PER\nsees\tO\r\n\n\n\nBonn\tB-LOC")
    assert read_entities(path, "en") == [
        Sentence(("Anna", "sees"), ("B-PER", "O")),
        Sentence(("Bonn",), ("B-LOC",)),
    ]


def test_wikianns_language_before_every_token_is_taken_away(tmp_path: Path) -> None:
    path = written(tmp_path, "de:Anna\tB-PER\n\nde:de:x\tO\n")
    tokens = [one.tokens for one in read_entities(path, "de")]
    assert tokens == [("Anna",), ("de:x",)]
    for spelling in ("pt-BR", "PT_br"):
        path = written(tmp_path, f"{spelling}:Anna\tB-PER\n{spelling}:x\tO\n")
        assert read_entities(path, "pt_BR")[0].tokens == ("Anna", "x")
    mixed = written(tmp_path, "de:Anna\tB-PER\nsees\tO\n")
    assert read_entities(mixed, "de")[0].tokens == ("de:Anna", "sees")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("Bonn", "is 'Bonn' where a token, a tab and its tag are wanted"),
        ("Bonn B-LOC", "a token, a tab and its tag"),
        ("Bonn\tB-LOC\tx", "a token, a tab and its tag"),
        ("# sent_id = 1", "a token, a tab and its tag"),
        ("\tB-LOC", "a token, a tab and its tag"),
        ("Bonn\tLOC", "the tag 'LOC'"),
        ("Bonn\t", "the tag ''"),
        ("Bonn\tB-", "the tag 'B-'"),
    ],
)
def test_a_broken_line_is_one_sentence_that_names_it(
    tmp_path: Path, line: str, complaint: str
) -> None:
    path = written(tmp_path, f"Anna\tB-PER\n\n{line}\n")
    with pytest.raises(ArtifactError, match=complaint) as raised:
        read_entities(path, "en")
    assert str(raised.value).startswith(f"Line 3 of {path}")
    assert "\n" not in str(raised.value)


def test_files_that_hold_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="has no sentence"):
        read_entities(written(tmp_path, "\n\n"), "en")
    bad = tmp_path / "train"
    bad.write_bytes(b"Anna\tO\nB\xff\tO\n")
    with pytest.raises(ArtifactError, match=r"Line 2 of .* is not UTF-8"):
        read_entities(bad, "en")
    half = tmp_path / "train.gz"
    half.write_bytes(gzip.compress(b"Anna\tO\n" * 100)[:-12])
    with pytest.raises(DataError, match="is not a complete gzip file"):
        read_entities(half, "en")


def test_a_split_is_found_under_the_names_it_is_published_under(tmp_path: Path) -> None:
    names = {"de": "train", "en": "en_ewt-ud-train.iob2", "sr": "train.tsv.gz", "zh": "constrain"}
    for code, name in names.items():
        (tmp_path / code).mkdir()
        (tmp_path / code / name).write_text("")
    (tmp_path / "README").mkdir()
    (tmp_path / "README" / "text").write_text("")
    files = TaskFiles.entities(tmp_path)
    assert files.languages("train") == ["de", "en", "sr"]
    assert files.languages("test") == []
    assert files.trained_languages(("srp", "de_Latn")) == ("de", "sr")
    (tmp_path / "sr").rename(tmp_path.with_name("sr"))
    (tmp_path / "sr").symlink_to(tmp_path.with_name("sr"))
    assert TaskFiles.entities(tmp_path).languages("train") == ["de", "en", "sr"]
    (tmp_path / "de" / "train.gz").write_text("")
    with pytest.raises(ConfigError, match="are both train of de"):
        TaskFiles.entities(tmp_path)
    for folder in ("de", "nowhere"):
        with pytest.raises(ConfigError, match="has no files LANGUAGE/train"):
            TaskFiles.entities(tmp_path / folder)


@needs_data
def test_all_of_the_sample_is_read_with_the_entities_its_readme_counts() -> None:
    counts = {"ceb": 49, "da": 310, "de": 402, "en": 191, "hr": 519, "pt": 449, "ru": 409}
    counts |= {"sk": 378, "sr": 660, "sv": 68, "tl": 23, "zh": 609}
    sentences = TaskFiles.entities(DATA).read_tests(read_entities)
    found = {
        code: sum(len(list(entities(one.tags))) for one in of_language)
        for code, of_language in sentences.items()
    }
    assert found == counts


def test_every_word_is_labelled_once_at_its_first_piece_however_a_sentence_is_cut() -> None:
    pieces = Pieces(pieces_model([" ".join(TOKENS)] * 20), origin=Path())
    generator = random.Random(3)
    for max_tokens in (4, 9, 16, 200):
        tokens = generator.choices([*TOKENS, "\u200b", "Bonn" * 20], k=30)
        tags = generator.choices(TAGS, k=30)
        sentence = Sentence(tuple(tokens), tuple(tags))
        parts = label(sentence, TAGS, pieces, max_tokens=max_tokens)
        assert all(len(one.ids) <= max_tokens for one in parts)
        assert [TAGS[tag] for one in parts for tag in one.labels] == tags
        assert all(one.ids[0] == BOS and one.ids[-1] == EOS for one in parts)
        firsts = [(pieces.encode(token).tolist() or [UNKNOWN])[0] for token in tokens]
        assert np.concatenate([one.ids[one.rows] for one in parts]).tolist() == firsts
    assert len(label(sentence, TAGS, pieces, max_tokens=20000)) == 1


def test_entities_are_those_that_seqeval_finds_in_any_tags_and_f1_is_its_f1() -> None:
    metrics = pytest.importorskip("seqeval.metrics", reason="seqeval is an extra: dev")
    generator = random.Random(4)
    from seqeval.metrics.sequence_labeling import get_entities

    for _ in range(300):
        lengths = [generator.randint(1, 12) for _ in range(4)]
        wanted, given = ([generator.choices(TAGS, k=n) for n in lengths] for _ in range(2))
        for tags in wanted:
            expected = [(kind, start, stop + 1) for kind, start, stop in get_entities(tags)]
            assert list(entities(tags)) == expected
        found = entity_scores(wanted, given)
        assert found["f1"] == pytest.approx(100 * metrics.f1_score(wanted, given))
        assert found["precision"] == pytest.approx(100 * metrics.precision_score(wanted, given))
        assert found["recall"] == pytest.approx(100 * metrics.recall_score(wanted, given))


def test_f1_of_nothing_found_and_nothing_there_is_zero() -> None:
    assert entity_scores([["O"]], [["O"]])["f1"] == 0
    assert entity_scores([["B-PER"]], [["O"]]) == {"f1": 0, "precision": 0, "recall": 0}
