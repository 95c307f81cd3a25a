"""A tiny random XLM-R in a folder of Hugging Face's, and text for it to learn from."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import XLMRobertaConfig, XLMRobertaModel

from pipeline.extensions.tasks.xlmr import PIECES_FILE, Pieces
from support.pieces import train_pieces

TOKENS = ("Anna", "Bonn", "lives", "in", "sees", "the", "big", "house", "of", "Acme", "and", ",")
NAMES = {"Anna": "B-PER", "Bonn": "B-LOC", "Acme": "B-ORG"}
SPREAD = 0.3


def pieces_model(lines: Sequence[str], *, vocabulary: int = 120, kind: str = "unigram") -> bytes:
    """A SentencePiece model as XLM-R's: unk, bos and eos first, no padding."""
    return train_pieces(lines, size=vocabulary, model_type=kind)


def tiny_config(vocabulary_size: int, **changes: object) -> XLMRobertaConfig:
    settings: dict[str, object] = {
        "vocab_size": vocabulary_size,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 66,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "initializer_range": SPREAD,
        **changes,
    }
    return XLMRobertaConfig(**settings)  # type: ignore[no-untyped-call]


def write_xlmr(
    folder: Path, *, model: bytes | None = None, safe: bool = True, **changes: object
) -> Path:
    """A folder with a random encoder, whose norms and biases are random too."""
    model = model or pieces_model([" ".join(TOKENS)] * 20)
    folder.mkdir(parents=True)
    (folder / PIECES_FILE).write_bytes(model)
    torch.manual_seed(1)
    size = Pieces(model, origin=folder).size
    config = tiny_config(size, **changes)
    encoder = XLMRobertaModel(config, add_pooling_layer=False)  # type: ignore[no-untyped-call]
    randomize(encoder)
    encoder.save_pretrained(folder, safe_serialization=safe)
    return folder


def randomize(model: torch.nn.Module) -> None:
    """Biases and norms are 0 and 1 in a fresh model: a wrong one would not be seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * SPREAD)


def write_entities(folder: Path, languages: Sequence[str], *, sentences: int = 30) -> Path:
    """Sentences of a few words, three of which are always names."""
    generator = random.Random(1)
    for code in languages:
        (folder / code).mkdir(parents=True)
        for split, count in (("train", sentences), ("dev", 8), ("test", 8)):
            text = ""
            for _ in range(count):
                words = generator.choices(TOKENS, k=generator.randint(2, 9))
                text += "".join(f"{word}\t{NAMES.get(word, 'O')}\n" for word in words) + "\n"
            (folder / code / f"{split}.tsv").write_text(text)
    return folder


def write_questions(folder: Path, languages: Sequence[str], *, questions: int = 24) -> Path:
    """Contexts whose only name is the answer, wherever it stands."""
    generator = random.Random(2)
    folder.mkdir(parents=True)
    plain = [word for word in TOKENS if word not in NAMES]
    for code in languages:
        for split, count in (("train", questions), ("dev", 6), ("test", 6)):
            paragraphs = []
            for number in range(count):
                words = generator.choices(plain, k=generator.randint(4, 30))
                place, name = generator.randrange(len(words)), generator.choice(list(NAMES))
                words[place] = name
                start = len(" ".join(words[:place])) + (place > 0)
                answer = {"text": name, "answer_start": start}
                question = {"id": f"{code}-{number}", "question": "of", "answers": [answer]}
                paragraphs.append({"context": " ".join(words), "qas": [question]})
            document = {"version": "1.1", "data": [{"paragraphs": paragraphs}]}
            path = folder / f"made.{code}.{split}.json"
            path.write_text(json.dumps(document))
    return folder
