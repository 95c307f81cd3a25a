"""Pieces drawn anew: the same in every process, and as often as the papers say."""

import io
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from pipeline.artifacts.vocabularies import DrawnPieces

LINES = [
    "the cat sat on the mat",
    "the dog sat on the cat and the mat",
    "ein Hund und eine Katze",
    "Привет мир, привет",
]
UNKNOWN = ["the 猫 sat", "", "  two  spaces ", "cat"]


def processor(model_type: str, **options: Any) -> SentencePieceProcessor:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 5),
        model_writer=model,
        model_type=model_type,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("bpe", {"vocab_size": 60}),
        ("bpe", {"vocab_size": 330, "byte_fallback": True}),
        ("bpe", {"vocab_size": 70, "split_by_whitespace": False}),
        ("char", {"vocab_size": 60}),
    ],
)
def test_with_no_merge_left_out_pieces_are_sentencepieces_own(
    model_type: str, options: dict[str, Any]
) -> None:
    model = processor(model_type, **options)
    for line in LINES + UNKNOWN:
        assert DrawnPieces(model).draw(line, alpha=0.0, nbest=2, seed=1) == model.encode(line)


def test_with_all_merges_left_out_pieces_are_characters() -> None:
    model = processor("bpe", vocab_size=60)
    drawn = DrawnPieces(model).draw(LINES[0], alpha=1.0, nbest=2, seed=1)
    assert "".join(map(model.id_to_piece, drawn)) == "▁" + LINES[0].replace(" ", "▁")
    assert {len(model.id_to_piece(index)) for index in drawn} == {1}


def test_a_merge_is_left_out_as_often_as_asked() -> None:
    """Of a word of one merge: its only pair stays in two with the rate."""
    model = processor("bpe", vocab_size=60)
    word = next(
        piece
        for piece in map(model.id_to_piece, range(model.get_piece_size()))
        if len(piece) == 2 and piece[0] == "▁"
    )
    drawn = DrawnPieces(model)
    split = sum(
        len(drawn.draw(word[1:], alpha=0.3, nbest=2, seed=seed)) == 2 for seed in range(2000)
    )
    assert abs(split / 2000 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 2000)


def test_segmentations_come_in_proportion_to_their_probabilities_power() -> None:
    model = processor("unigram", vocab_size=60)
    drawn, draws, alpha = DrawnPieces(model), 4000, 0.2
    best = model.nbest_encode_as_ids(LINES[0], 6)
    powers = [math.exp(alpha * sum(map(model.get_score, ids))) for ids in best]
    counts = Counter(
        tuple(drawn.draw(LINES[0], alpha=alpha, nbest=6, seed=seed)) for seed in range(draws)
    )
    assert set(counts) == set(map(tuple, best))
    for ids, power in zip(best, powers, strict=True):
        share = power / sum(powers)
        spread = math.sqrt(share * (1 - share) / draws)
        assert abs(counts[tuple(ids)] / draws - share) < 4 * spread


DRAW = """
import sys
from sentencepiece import SentencePieceProcessor
from pipeline.artifacts.vocabularies import DrawnPieces
drawn = DrawnPieces(SentencePieceProcessor(model_file=sys.argv[1]))
print([drawn.draw(line, alpha=0.2, nbest=64, seed=n) for n, line in enumerate(sys.argv[2:])])
"""


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_another_process_draws_the_same(model_type: str, tmp_path: Path) -> None:
    """SentencePiece's own draws differ there, whatever its seed."""
    model = processor(model_type, vocab_size=60)
    (tmp_path / "model").write_bytes(model.serialized_model_proto())
    lines = LINES * 5
    here = [
        DrawnPieces(model).draw(line, alpha=0.2, nbest=64, seed=n) for n, line in enumerate(lines)
    ]
    there = subprocess.run(
        [sys.executable, "-c", DRAW, str(tmp_path / "model"), *lines],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert there.stdout.strip() == str(here)
    assert here != [model.encode(line) for line in lines]
