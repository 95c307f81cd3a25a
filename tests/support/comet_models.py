"""A tiny COMET model with random weights, laid out as COMET's own are."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
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


STUB = '''
import torch

class Stub(torch.nn.Module):
    """Score: its weight times the characters of the translation, or how near they are to others."""

    def __init__(
        self,
        pretrained_model,
        load_pretrained_weights,
        local_files_only,
        scale=1.0,
        near="",
    ):
        super().__init__()
        assert local_files_only and not load_pretrained_weights
        if pretrained_model == "stranger/encoder":
            raise OSError("We couldn't connect to the hub.\\nMore of it.")
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.scale, self.near, self.device = scale, near, "cpu"

    def prepare_for_inference(self, samples):
        lengths = [len(one["mt"]) for one in samples]
        if self.near:
            lengths = [-abs(n - len(one[self.near])) for n, one in zip(lengths, samples)]
        return {"mt": torch.tensor(lengths, dtype=torch.float)}

    def requires_references(self):
        return self.near == "ref"

    def transfer_batch_to_device(self, batch, device, number):
        return batch

    def predict_step(self, batch):
        return {"scores": self.scale * self.weight * batch["mt"]}

str2model = {"stub_metric": Stub}
'''


@contextmanager
def stub_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package ``comet`` in a folder, before all others, that knows one small model."""
    package = folder / "comet"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "models.py").write_text(STUB, encoding="utf-8")
    information = folder / "unbabel_comet-9.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: unbabel-comet\nVersion: 9.9\n", encoding="utf-8")
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(package.parent))
    hidden = {name: one for name, one in sys.modules.items() if name.split(".")[0] == "comet"}
    for name in hidden:
        del sys.modules[name]
    yield
    for name in ("comet", "comet.models"):
        sys.modules.pop(name, None)
    sys.modules.update(hidden)


def write_stub_model(folder: Path, *, encoder: str = "encoder", **contents: Any) -> Path:
    """``contents`` stand in the checkpoint beside, or instead of, the one weight."""
    weights = {"weight": torch.tensor(0.01)}
    write_checkpoint(folder, {"state_dict": weights, "hyper_parameters": {"scale": 2.0}} | contents)
    told = {"class_identifier": "stub_metric", "pretrained_model": encoder, "loss": "mse"}
    (folder / "hparams.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    return folder
