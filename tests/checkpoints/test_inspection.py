"""Artifacts are looked into, verified and compared; figures are checked by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.corpora import writing
from support.stored_checkpoints import (
    LAYERS,
    SPEC,
    Weights,
    flip,
    make_checkpoint,
    make_state,
    set_to,
    weights_of,
)
from support.tiny_models import tiny_model, tiny_spec

from pipeline.checkpoints import weights
from pipeline.checkpoints.inspection import TensorDifference, diff, inspect, inspection_text, verify
from pipeline.checkpoints.resharding import Piece
from pipeline.errors import ArtifactError
from pipeline.model.settings import MoEConfig

# ---------------------------------------------------------------- inspect


def test_an_inspected_checkpoint_tells_parameters_and_origin(tmp_path: Path) -> None:
    model = tiny_model(SPEC)
    made = make_checkpoint(
        tmp_path / "model",
        model,
        change=set_to("embedding.weight", torch.zeros(40, 16, dtype=torch.bfloat16)),
        statistics={"update": 700, "perplexity": 12.5},
    )
    found = inspect(made)
    assert (found["kind"], found["stage"]) == ("checkpoint", "pretrain")
    assert found["statistics"] == {"update": 700, "perplexity": 12.5}
    assert found["model"] == SPEC.model_dump(mode="json")
    parameters = found["parameters"]
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert parameters["total"] == sum(p.numel() for p in model.parameters())
    assert parameters["experts"] == experts
    assert parameters["active"] == parameters["total"] - experts * 4 // 6
    assert found["dtypes"] == {"F32": len(weights_of(model)) - 1, "BF16": 1}
    assert found["files"] == {
        path.relative_to(made).as_posix(): path.stat().st_size
        for path in made.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert "tensors" not in found
    entries = {entry["name"]: entry for entry in inspect(made, tensors=True)["tensors"]}
    assert {name: entry["shape"] for name, entry in entries.items()} == {
        name: tuple(value.shape) for name, value in weights_of(model).items()
    }
    assert entries["embedding.weight"]["dtype"] == "BF16"
    assert "embedding.weight" in load_file(made / entries["embedding.weight"]["file"])


def test_an_inspected_training_state_counts_pieces_values_and_holes(tmp_path: Path) -> None:
    pieces = [
        Piece("master", "a.b", 0, torch.ones(5)),
        Piece("master", "a.b", 3, torch.ones(4)),  # two of its values are there twice
        Piece("master", "c", 0, torch.ones(2)),
        Piece("exp_avg", "a.b", 0, torch.ones(3)),
        Piece("exp_avg", "a.b", 5, torch.ones(2)),
    ]
    found = inspect(make_state(tmp_path / "state", pieces, parts=2))
    assert found["progress"]["update"] == 3
    assert found["pieces"] == {
        "master": {"pieces": 3, "tensors": 2, "values": 9, "missing": 0},
        "exp_avg": {"pieces": 2, "tensors": 1, "values": 5, "missing": 2},
    }


def test_what_is_inspected_can_be_read_on_a_terminal(tmp_path: Path) -> None:
    made = make_checkpoint(
        tmp_path / "model", tiny_model(SPEC), statistics={"update": 700, "layers": {"x": 1}}
    )
    text = inspection_text(inspect(made, tensors=True))
    lines = [line.split() for line in text.splitlines()]
    for line in (
        "update = 700",
        "model.moe.num_experts = 6",
        "languages = de en fr ru",
        "embedding.weight 40×16 F32 weights/part-00000-000.safetensors",
    ):
        assert line.split() in lines
    assert not [line for line in lines if line[:1] == ["layers"]]
    pieces = [Piece("master", "a", 0, torch.ones(5000))]
    text = inspection_text(inspect(make_state(tmp_path / "state", pieces)))
    assert "update = 3" in text
    assert ["master", "1", "1", "5,000", "0"] in [line.split() for line in text.splitlines()]


def test_any_kind_of_artifact_can_be_inspected_and_verified(tmp_path: Path) -> None:
    with writing(tmp_path / "corpus", "corpus", "clean") as writer:
        writer.write_json("text.json", "hello")
        writer.statistics["pairs"] = {"de-en": {"train": 1}}
    found = inspect(tmp_path / "corpus")
    assert (found["kind"], list(found["files"])) == ("corpus", ["text.json"])
    assert inspection_text(found).startswith(f"{tmp_path / 'corpus'}: corpus made by clean, ")
    assert "this corpus artifact with 1 file (8 bytes) is" in verify(tmp_path / "corpus")


@pytest.mark.parametrize("file", ["model.json", "weights/part-00001-000.safetensors"])
def test_what_is_no_artifact_or_is_damaged_is_named(tmp_path: Path, file: str) -> None:
    made = make_checkpoint(tmp_path / "model", tiny_model(SPEC))
    flip(made / file, 3)
    with pytest.raises(ArtifactError, match=file):
        inspect(made)
    (tmp_path / "empty").mkdir()
    (tmp_path / "hf.pt").touch()
    for name, words in (
        ("nowhere", "nowhere does not exist"),
        ("empty", "empty has no manifest"),
        ("hf.pt", "mmnmt checkpoint import .*hf.pt --dictionary"),
    ):
        for look in (inspect, verify):
            with pytest.raises(ArtifactError, match=words):
                look(tmp_path / name)


# ---------------------------------------------------------------- verify


def test_verifying_looks_at_every_file_and_names_the_one_that_differs(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "model", tiny_model(SPEC))
    files = inspect(made)["files"]
    assert f"with {len(files)} files ({sum(files.values()):,} bytes)" in verify(made)
    for file in ("model.json", "tokenizer/tokenizer.json"):
        (made / file).rename(tmp_path / "aside")
        with pytest.raises(ArtifactError, match=f"{file} is missing"):
            verify(made)
        (tmp_path / "aside").rename(made / file)
    flip(made / "weights/part-00000-000.safetensors", 2 * 4096 + 17)
    with pytest.raises(ArtifactError, match=r"part-00000-000.safetensors is damaged"):
        verify(made)


# ---------------------------------------------------------------- diff


def test_checkpoints_of_the_same_values_are_identical_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_checkpoint(tmp_path / "a", tiny_model(SPEC), statistics={"update": 1})
    monkeypatch.setattr(weights, "SHARD_BYTES", 1000)
    second = make_checkpoint(tmp_path / "b", tiny_model(SPEC))
    assert len(list(first.glob("weights/*"))) < len(list(second.glob("weights/*")))
    found = diff(first, second)
    assert found.identical
    count = len(weights_of(tiny_model(SPEC)))
    assert found.lines() == [f"identical: {count} tensors, settings and tokenizer"]


def test_nan_equals_itself_and_another_type_is_a_difference(tmp_path: Path) -> None:
    name = next(iter(weights_of(tiny_model(SPEC))))
    shape = weights_of(tiny_model(SPEC))[name].shape
    a, b = (
        make_checkpoint(
            tmp_path / side, tiny_model(SPEC), change=set_to(name, torch.full(shape, value))
        )
        for side, value in (("a", torch.nan), ("b", 1.0))
    )
    assert diff(a, a).identical
    assert [entry.name for entry in diff(a, b).values] == [name]
    value = torch.ones(shape, dtype=torch.bfloat16)
    c = make_checkpoint(tmp_path / "c", tiny_model(SPEC), change=set_to(name, value))
    kinds = f"{name}: float32 {tuple(shape)} → bfloat16 {tuple(shape)}"
    assert (diff(b, c).shapes, diff(b, c).values) == ((kinds,), ())
    assert not diff(b, c).identical


def test_values_that_differ_are_measured_per_tensor(tmp_path: Path) -> None:
    name, bias = "decoder.layers.1.feed_forward.experts.3.up.weight", "decoder.final_norm.bias"
    values = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    other = values.clone()
    other[4, 5] += 3
    other[0, 1] -= 4

    def first_values(weights: Weights) -> Weights:
        return {**weights, name: values, bias: torch.zeros(16)}

    def second_values(weights: Weights) -> Weights:
        return {**weights, name: other, bias: torch.ones(16)}

    first = make_checkpoint(tmp_path / "a", tiny_model(SPEC), change=first_values)
    second = make_checkpoint(tmp_path / "b", tiny_model(SPEC), change=second_values)
    found = diff(first, second)
    norm = float(np.sqrt((values.numpy().astype(np.float64) ** 2).sum()))
    by_name = {entry.name: entry for entry in found.values}
    assert set(by_name) == {name, bias}
    assert by_name[name].max_absolute == pytest.approx(4, rel=1e-6)
    assert by_name[name].relative_norm == pytest.approx(5 / norm, rel=1e-6)
    assert by_name[bias] == TensorDifference(bias, 1.0, float("inf"))
    assert "0 settings" in found.lines()[-1]
    assert f"2 of {found.compared} with other values" in found.lines()[-1]


def test_settings_tokenizers_shapes_and_single_tensors_are_compared(tmp_path: Path) -> None:
    wider = tiny_spec(moe=MoEConfig(num_experts=7, every=2), groups=2, feed_forward_width=24)
    first = make_checkpoint(tmp_path / "a", tiny_model(SPEC))
    second = make_checkpoint(tmp_path / "b", tiny_model(wider), token_scheme="angle")
    found = diff(first, second)
    assert found.settings == ("model.feed_forward_width: 32 → 24", "model.moe.num_experts: 6 → 7")
    assert found.other_tokenizer
    assert found.only_in_one == tuple(
        f"{layer}.feed_forward.experts.6.{linear}.{part}: only in the second"
        for layer in sorted(LAYERS)
        for linear in ("down", "up")
        for part in ("bias", "weight")
    )
    shape = "encoder.layers.0.feed_forward.up.weight: float32 (32, 16) → float32 (24, 16)"
    assert shape in found.lines()
    assert "tokenizer: another one" in found.lines()
    turned = (line.replace("second", "first") for line in found.only_in_one)
    assert diff(second, first).only_in_one == tuple(turned)


@pytest.mark.parametrize(
    "file", ["weights/part-00001-000.safetensors", "model.json", "tokenizer/tokenizer.json"]
)
def test_a_damaged_checkpoint_is_not_compared(tmp_path: Path, file: str) -> None:
    first = make_checkpoint(tmp_path / "a", tiny_model(SPEC))
    second = make_checkpoint(tmp_path / "b", tiny_model(SPEC))
    flip(second / file, (second / file).stat().st_size - 1)
    with pytest.raises(ArtifactError, match=f"b/{file} is damaged"):
        diff(first, second)
