"""A tiny COMET model with random weights, laid out as COMET's own are."""

from pathlib import Path
from typing import Any

import torch
import yaml

WORDS = "<s> <pad> </s> <unk> a the cat dog sat on mat Haus Buch . , <mask>".split()
SHAPE = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}


def write_encoder(folder: Path) -> Path:
    """Configuration and tokenizer of a random XLM-R encoder; no weights."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<s>", WORDS.index("<s>")), ("</s>", WORDS.index("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ends
    )
    peers: Any = transformers
    peers.XLMRobertaTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = peers.XLMRobertaConfig(
        vocab_size=len(WORDS), num_hidden_layers=2, max_position_embeddings=64, **SHAPE
    )
    config.save_pretrained(folder)
    return folder


def settings(encoder: str) -> dict[str, Any]:
    """Hyperparameters of a RegressionMetric."""
    return {
        "class_identifier": "regression_metric",
        "encoder_model": "XLM-RoBERTa",
        "pretrained_model": encoder,
        "hidden_sizes": [6],
        "layer": "mix",
        "layer_transformation": "sparsemax",
        "pool": "avg",
        "dropout": 0.1,
        "train_data": [],
        "validation_data": [],
    }


def write_model(folder: Path) -> Path:
    """``hparams.yaml``, ``checkpoints/model.ckpt`` and ``encoder``; needs unbabel-comet."""
    from comet.models import RegressionMetric

    encoder = write_encoder(folder / "encoder")
    known = settings(str(encoder))
    arguments = {name: value for name, value in known.items() if name != "class_identifier"}
    torch.manual_seed(5)
    model = RegressionMetric(**arguments, load_pretrained_weights=False, local_files_only=True)
    write_checkpoint(folder, {"state_dict": model.state_dict(), "hyper_parameters": arguments})
    (folder / "hparams.yaml").write_text(yaml.safe_dump(known), encoding="utf-8")
    return folder


def write_checkpoint(folder: Path, contents: dict[str, Any]) -> None:
    path = folder / "checkpoints" / "model.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"pytorch-lightning_version": "2.0.0", **contents}, path)
