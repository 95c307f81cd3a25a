"""Checkpoints are looked into, compared, averaged and pruned; figures are checked by hand."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_models import EOS_ID, random_batch, random_examples, tiny_model, tiny_spec
from torch import Tensor, nn

from pipeline import artifacts, checkpoint, cli
from pipeline.artifacts import new_artifact, open_artifact
from pipeline.batches import Batch, collate
from pipeline.checkpoint import (
    Piece,
    Progress,
    load_model,
    read_spec,
    write_model_files,
    write_pieces,
    write_weights,
)
from pipeline.checkpoint_tools import (
    PruningPlan,
    TensorDifference,
    average_checkpoints,
    average_states,
    diff,
    inspect,
    inspection_text,
    plan_pruning,
    prune_experts,
    verify,
)
from pipeline.config import MoEConfig
from pipeline.errors import ArtifactError, CheckpointError, ConfigError
from pipeline.model.moe import MixtureOfExperts
from pipeline.model.router import Routing
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from pipeline.routing_statistics import ROUTING_FILE, RoutingCounter, RoutingStatistics
from pipeline.tokenizer import TokenizerDescription, write_tokenizer
from pipeline.weights import named_slices

SPEC = tiny_spec(moe=MoEConfig(num_experts=6, every=2), groups=2)
LAYERS = ("encoder.layers.1", "decoder.layers.1")
LANGUAGES = ("de", "en", "fr", "ru")

Weights = dict[str, Tensor]


def weights_of(model: Transformer) -> Weights:
    return {entry.name: entry.value.clone() for entry in named_slices(model)}


def make_checkpoint(
    directory: Path,
    model: Transformer,
    *,
    change: Callable[[Weights], Weights] = dict,
    routing: RoutingStatistics | None = None,
    token_scheme: str = "underscores",
    statistics: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint of a model, its tensors changed on the way; two weight files."""
    description = TokenizerDescription.model_validate(
        {
            "kind": "bytes",
            "languages": sorted(model.spec.languages),
            "language_token_scheme": token_scheme,
        }
    )
    tokenizer_dir = directory.parent / f"tokenizer of {directory.name}"
    tokenizer_dir.mkdir()
    write_tokenizer(tokenizer_dir, description=description, model=None)
    tensors = list(change(weights_of(model)).items())
    with new_artifact(
        directory, kind="checkpoint", stage="pretrain", config={}, inputs={}
    ) as writer:
        for part in range(2):
            write_weights(writer.directory / "weights", tensors[part::2], part=part)
        write_model_files(writer, spec=model.spec, tokenizer_dir=tokenizer_dir)
        if routing is not None:
            writer.write_json(ROUTING_FILE, routing.to_json())
        writer.statistics.update(statistics or {})
    return directory


def stored(directory: Path) -> Weights:
    """All tensors of a checkpoint, read without the code under test."""
    found: Weights = {}
    for path in directory.glob("weights/*"):
        found |= load_file(path)
    return found


def set_to(name: str, value: Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, name: value}


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


# ---------------------------------------------------------------- inspect


def test_an_inspected_checkpoint_tells_shape_parameters_and_where_it_comes_from(
    tmp_path: Path,
) -> None:
    model = tiny_model(SPEC)
    made = make_checkpoint(
        tmp_path / "model", model, statistics={"update": 700, "perplexity": 12.5}
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
    assert found["dtypes"] == {"F32": len(weights_of(model))}
    assert found["files"] == {
        path.relative_to(made).as_posix(): path.stat().st_size
        for path in made.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert "tensors" not in found


def test_tensors_are_listed_where_asked_for_with_shape_type_and_file(tmp_path: Path) -> None:
    half = torch.zeros(40, 16, dtype=torch.bfloat16)
    made = make_checkpoint(
        tmp_path / "model", tiny_model(SPEC), change=set_to("embedding.weight", half)
    )
    found = inspect(made, tensors=True)
    entries = {entry["name"]: entry for entry in found["tensors"]}
    assert {name: entry["shape"] for name, entry in entries.items()} == {
        name: tuple(value.shape) for name, value in weights_of(tiny_model(SPEC)).items()
    }
    assert found["dtypes"]["BF16"] == 1
    entry = entries["embedding.weight"]
    assert entry["dtype"] == "BF16"
    assert "embedding.weight" in load_file(made / entry["file"])


def make_state(
    directory: Path, pieces: Iterable[Piece], *, update: int = 3, parts: int = 1
) -> Path:
    listed = list(pieces)
    with new_artifact(
        directory, kind="training_state", stage="pretrain", config={}, inputs={}
    ) as writer:
        for part in range(parts):
            write_pieces(writer.directory / "optimizer", iter(listed[part::parts]), part=part)
        writer.write_json("progress.json", Progress(update=update, cursor=(1, 2)).to_json())
        writer.statistics["update"] = update
    return directory


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
    with new_artifact(
        tmp_path / "corpus", kind="corpus", stage="clean", config={}, inputs={}
    ) as writer:
        writer.write_json("text.json", "hello")
        writer.statistics["pairs"] = {"de-en": {"train": 1}}
    found = inspect(tmp_path / "corpus")
    assert (found["kind"], list(found["files"])) == ("corpus", ["text.json"])
    assert inspection_text(found).startswith(f"{tmp_path / 'corpus'}: corpus made by clean, ")
    assert "all 1 files (8 bytes) of this corpus" in verify(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "nowhere does not exist"), ("empty", "empty has no manifest")]
)
def test_what_is_no_artifact_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    for look in (inspect, verify):
        with pytest.raises(ArtifactError, match=message):
            look(tmp_path / name)


@pytest.mark.parametrize("file", ["model.json", "weights/part-00001-000.safetensors"])
def test_a_damaged_file_is_named_when_it_is_inspected(tmp_path: Path, file: str) -> None:
    made = make_checkpoint(tmp_path / "model", tiny_model(SPEC))
    flip(made / file, 3)
    with pytest.raises(ArtifactError, match=file):
        inspect(made)


# ---------------------------------------------------------------- verify


def test_verifying_names_the_file_and_the_chunk_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "CHUNK_BYTES", 4096)
    made = make_checkpoint(tmp_path / "model", tiny_model(SPEC))
    files = inspect(made)["files"]
    assert f"all {len(files)} files ({sum(files.values()):,} bytes)" in verify(made)
    flip(made / "weights/part-00000-000.safetensors", 2 * 4096 + 17)
    with pytest.raises(ArtifactError, match=r"part-00000-000.safetensors is damaged in chunk 2 "):
        verify(made)


@pytest.mark.parametrize("file", ["model.json", "tokenizer/tokenizer.json"])
def test_verifying_looks_at_every_file(tmp_path: Path, file: str) -> None:
    made = make_checkpoint(tmp_path / "model", tiny_model(SPEC))
    (made / file).unlink()
    with pytest.raises(ArtifactError, match=f"{file} is missing"):
        verify(made)


# ---------------------------------------------------------------- diff


def test_checkpoints_of_the_same_values_are_identical_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_checkpoint(tmp_path / "a", tiny_model(SPEC), statistics={"update": 1})
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1000)
    second = make_checkpoint(tmp_path / "b", tiny_model(SPEC))
    assert len(list(first.glob("weights/*"))) < len(list(second.glob("weights/*")))
    found = diff(first, second)
    assert found.identical
    count = len(weights_of(tiny_model(SPEC)))
    assert found.lines() == [f"identical: {count} tensors, settings and tokenizer"]


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
    assert found.settings == (
        "model.feed_forward_width: 32 → 24",
        "model.moe.num_experts: 6 → 7",
    )
    assert found.other_tokenizer
    assert found.only_in_first == ()
    assert found.only_in_second == tuple(
        f"{layer}.feed_forward.experts.6.{linear}.{part}"
        for layer in sorted(LAYERS)
        for linear in ("down", "up")
        for part in ("bias", "weight")
    )
    shape = "encoder.layers.0.feed_forward.up.weight: float32 (32, 16) → float32 (24, 16)"
    assert shape in found.lines()
    assert "tokenizer: another one" in found.lines()
    assert diff(second, first).only_in_first == found.only_in_second


def test_another_type_of_number_is_a_difference_even_with_the_same_values(tmp_path: Path) -> None:
    name = "decoder.final_norm.bias"
    kinds = (torch.float32, torch.bfloat16)
    first, second = (
        make_checkpoint(
            tmp_path / str(kind),
            tiny_model(SPEC),
            change=set_to(name, torch.ones(16, dtype=kind)),
        )
        for kind in kinds
    )
    found = diff(first, second)
    assert found.shapes == (f"{name}: float32 (16,) → bfloat16 (16,)",)
    assert found.values == ()
    assert not found.identical


@pytest.mark.parametrize(
    "file", ["weights/part-00001-000.safetensors", "model.json", "tokenizer/tokenizer.json"]
)
def test_a_damaged_checkpoint_is_not_compared(tmp_path: Path, file: str) -> None:
    first = make_checkpoint(tmp_path / "a", tiny_model(SPEC))
    second = make_checkpoint(tmp_path / "b", tiny_model(SPEC))
    flip(second / file, (second / file).stat().st_size - 1)
    with pytest.raises(ArtifactError, match=f"b/{file} is damaged"):
        diff(first, second)


# ---------------------------------------------------------------- average


def test_an_average_is_the_mean_in_double_precision_rounded_once(tmp_path: Path) -> None:
    models = [tiny_model(SPEC, seed=seed) for seed in (1, 2, 3)]
    large = torch.full((16,), 2.0**25)
    biases = [large, torch.ones(16), -large]  # float32 would lose the one
    name = "decoder.final_norm.bias"
    made = [
        make_checkpoint(
            tmp_path / f"m{index}", model, change=set_to(name, bias), statistics={"update": index}
        )
        for index, (model, bias) in enumerate(zip(models, biases, strict=True))
    ]
    average_checkpoints(made, out_dir=tmp_path / "mean")
    mean, parts = stored(tmp_path / "mean"), [stored(path) for path in made]
    assert set(mean) == set(parts[0])
    for tensor, found in mean.items():
        assert found.dtype == torch.float32
        doubles = [part[tensor].numpy().astype(np.float64) for part in parts]
        expected = (np.stack(doubles).sum(0) / 3).astype(np.float32)
        assert np.array_equal(found.numpy(), expected), tensor
    assert torch.equal(mean[name], torch.full((16,), 1 / 3))


def test_an_average_is_a_checkpoint_that_records_what_it_was_made_from(tmp_path: Path) -> None:
    made = [make_checkpoint(tmp_path / f"m{seed}", tiny_model(SPEC, seed=seed)) for seed in (1, 2)]
    average_checkpoints(made, out_dir=tmp_path / "mean")
    mean = open_artifact(tmp_path / "mean", kind="checkpoint")
    assert mean.manifest.stage == "average"
    assert mean.statistics["averaged"] == 2
    assert [record.digest for record in mean.manifest.inputs.values()] == [
        open_artifact(path, kind="checkpoint").digest for path in made
    ]
    assert read_spec(mean) == SPEC
    batch = random_batch(SPEC, sentences=2, seed=1)
    assert load_model(mean).eval()(batch).logits_LV.isfinite().all()
    verify(tmp_path / "mean")


def test_the_mean_of_one_checkpoint_is_itself_and_nothing_is_overwritten_unasked(
    tmp_path: Path,
) -> None:
    made = make_checkpoint(tmp_path / "m", tiny_model(SPEC))
    average_checkpoints([made], out_dir=tmp_path / "mean")
    assert diff(made, tmp_path / "mean").identical
    with pytest.raises(ArtifactError, match="mean exists already"):
        average_checkpoints([made], out_dir=tmp_path / "mean")
    average_checkpoints([made, made], out_dir=tmp_path / "mean", overwrite=True)
    assert diff(made, tmp_path / "mean").identical


@pytest.mark.parametrize(
    ("other", "scheme", "message"),
    [
        (tiny_spec(vocabulary=41), "underscores", "vocabulary_size: 40 → 41"),
        (tiny_spec(feed_forward_width=24), "underscores", "model.feed_forward_width: 32 → 24"),
        (tiny_spec(), "angle", "another tokenizer"),
    ],
)
def test_models_that_differ_are_not_averaged(
    tmp_path: Path, other: ModelSpec, scheme: str, message: str
) -> None:
    first = make_checkpoint(tmp_path / "a", tiny_model(tiny_spec()))
    second = make_checkpoint(tmp_path / "b", tiny_model(other), token_scheme=scheme)
    with pytest.raises(CheckpointError, match=f"b is not of the same model .*{message}"):
        average_checkpoints([first, second], out_dir=tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_a_tensor_that_the_model_does_not_account_for_is_refused(tmp_path: Path) -> None:
    made = make_checkpoint(
        tmp_path / "a", tiny_model(SPEC), change=set_to("surplus", torch.ones(2))
    )
    with pytest.raises(CheckpointError, match="'surplus' that its model"):
        average_checkpoints([made, made], out_dir=tmp_path / "mean")


def cut(model: Transformer, *, seed: int) -> list[Piece]:
    """The model's values as master pieces cut at random places, in random order, with moments."""
    generator = np.random.default_rng(seed)
    pieces = []
    for entry in named_slices(model):
        flat = entry.value.flatten().clone()
        middle = int(generator.integers(1, len(flat)))
        for start, stop in ((0, middle), (middle, len(flat))):
            pieces.append(Piece("master", entry.name, start, flat[start:stop]))
            pieces.append(Piece("exp_avg", entry.name, start, torch.full((stop - start,), 9.0)))
    return [pieces[index] for index in generator.permutation(len(pieces))]


def make_run(run_dir: Path, models: Mapping[int, Transformer]) -> Path:
    """A run folder with a state per update, and the last model's weights as the best."""
    for update, model in models.items():
        directory = run_dir / "states" / f"update-{update:07d}"
        make_state(directory, cut(model, seed=update), update=update, parts=2)
    make_checkpoint(run_dir / "best", list(models.values())[-1])
    return run_dir


def test_the_last_states_of_a_run_are_averaged_by_their_master_weights(tmp_path: Path) -> None:
    models = {update: tiny_model(SPEC, seed=update) for update in (8, 9, 10, 100)}
    run_dir = make_run(tmp_path / "moe.run", models)
    (run_dir / "states" / "update-0000200").mkdir()  # not finished
    average_states(run_dir, last=3, out_dir=tmp_path / "mean")
    mean = stored(tmp_path / "mean")
    parts = [weights_of(models[update]) for update in (9, 10, 100)]
    assert set(mean) == set(parts[0])
    for tensor, found in mean.items():
        expected = sum(part[tensor].double() for part in parts) / 3
        torch.testing.assert_close(found.double(), expected, rtol=1e-7, atol=1e-12)
    made = open_artifact(tmp_path / "mean", kind="checkpoint")
    assert made.statistics["averaged_updates"] == [9, 10, 100]
    assert sorted(record.kind for record in made.manifest.inputs.values()) == [
        "checkpoint",
        *["training_state"] * 3,
    ]
    average_states(run_dir, last=1, out_dir=tmp_path / "one")
    batch = random_batch(SPEC, sentences=2, seed=1)
    one = load_model(open_artifact(tmp_path / "one", kind="checkpoint"))
    assert torch.equal(one.eval()(batch).logits_LV, models[100].eval()(batch).logits_LV)


def test_more_states_than_a_run_keeps_are_refused_with_how_many_there_are(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "moe.run", {1: tiny_model(SPEC)})
    with pytest.raises(ArtifactError, match=r"moe.run holds 1 training states where 2 are wanted"):
        average_states(run_dir, last=2, out_dir=tmp_path / "mean")
    with pytest.raises(ArtifactError, match=r"moe holds 0 training states.*name the run folder"):
        average_states(tmp_path / "moe", last=1, out_dir=tmp_path / "mean")


def test_a_state_that_lacks_values_is_refused(tmp_path: Path) -> None:
    model = tiny_model(SPEC)
    run_dir = make_run(tmp_path / "moe.run", {1: model})
    pieces = [
        piece
        for piece in cut(model, seed=1)
        if piece.tensor != "encoder.layers.0.feed_forward.up.weight" or piece.start == 0
    ]
    make_state(run_dir / "states" / "update-0000002", pieces)
    with pytest.raises(CheckpointError, match=r"update-0000002 has \d+ of the 512 values wanted"):
        average_states(run_dir, last=2, out_dir=tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


# ---------------------------------------------------------------- prune-experts


def moe_layers(model: Transformer) -> dict[str, MixtureOfExperts]:
    modules = dict(model.named_modules())
    found = {layer: modules[f"{layer}.feed_forward"] for layer in LAYERS}
    return {name: module for name, module in found.items() if isinstance(module, MixtureOfExperts)}


def with_idle_experts(spec: ModelSpec, idle: Mapping[str, Sequence[int]]) -> Transformer:
    """A model some experts of which are never chosen, whatever the tokens.

    The first entry of every hidden state is 1 as the norm's bias makes it, and the routers' rows
    of idle experts look at nothing but that.
    """
    model = tiny_model(spec)
    modules: dict[str, nn.Module] = dict(model.named_modules())
    with torch.no_grad():
        for layer, moe in moe_layers(model).items():
            norm = modules[f"{layer}.feed_forward_norm"]
            assert isinstance(norm, nn.LayerNorm)
            norm.weight[0], norm.bias[0] = 0, 1
            for weight in moe.router.parameters():  # (E, D) or (G, E, D)
                weight[..., idle[layer], :] = 0
                weight[..., idle[layer], 0] = -50
    return model.eval()


def batches_by_target(spec: ModelSpec) -> list[tuple[int, Batch]]:
    """Batches of one target language each, with the language; the last has none into it."""
    examples = random_examples(spec, sentences=48, seed=5)
    return [
        (language, collate([e for e in examples if e.target_language == language], eos_id=EOS_ID))
        for language in range(len(spec.languages) - 1)
    ]


def count_routes(
    model: Transformer,
) -> tuple[RoutingStatistics, dict[tuple[str, str], Counter[int]]]:
    """Statistics as a run would store them, and the same routes counted one by one."""
    counter = RoutingCounter(model.spec)
    routes: dict[tuple[str, str], Counter[int]] = {}
    for language, batch in batches_by_target(model.spec):
        with torch.no_grad():
            records = model(batch).routing
        counter.add(records, language=language)
        for layer, record in zip(LAYERS, records, strict=True):
            key = (layer, model.spec.languages[language])
            routes.setdefault(key, Counter()).update(record.expert_NC.flatten().tolist())
    return counter.result(), routes


IDLE = {"encoder.layers.1": [1, 4], "decoder.layers.1": [0, 5]}


@pytest.mark.parametrize("groups", [0, 2])
def test_without_experts_that_are_never_chosen_a_model_computes_the_same(
    tmp_path: Path, groups: int
) -> None:
    spec = tiny_spec(moe=MoEConfig(num_experts=6, every=2), groups=groups)
    model = with_idle_experts(spec, IDLE)
    routing, routes = count_routes(model)
    whole = make_checkpoint(tmp_path / "whole", model, routing=routing)
    assert all(len(chosen) > 2 for chosen in routes.values())
    plan = prune_experts(
        whole, languages=["de", "en", "fr"], experts=4, out_dir=tmp_path / "pruned"
    )
    assert [entry.experts for entry in plan.layers] == [(0, 2, 3, 5), (1, 2, 3, 4)]
    assert plan.kept_mass == 1.0
    pruned = load_model(open_artifact(tmp_path / "pruned", kind="checkpoint")).eval()
    assert pruned.spec == tiny_spec(moe=MoEConfig(num_experts=4, every=2), groups=groups)
    for _, batch in batches_by_target(spec):
        expected, found = model(batch), pruned(batch)
        torch.testing.assert_close(found.logits_LV, expected.logits_LV, rtol=1e-5, atol=1e-6)
        for entry, old, new in zip(plan.layers, expected.routing, found.routing, strict=True):
            assert torch.equal(torch.tensor(entry.experts)[new.expert_NC], old.expert_NC)


def restrict(model: Transformer, plan: PruningPlan) -> None:
    """Make the whole model route among the kept experts only, by masking its probabilities."""
    for entry in plan.layers:
        kept = torch.zeros(6)
        kept[list(entry.experts)] = 1

        def mask(_module: nn.Module, _args: Any, routing: Routing, kept: Tensor = kept) -> Routing:
            weight_NC, expert_NC = (routing.probability_NE * kept).topk(2, dim=-1)
            weight_NC = weight_NC / weight_NC.sum(-1, keepdim=True)
            return replace(routing, weight_NC=weight_NC, expert_NC=expert_NC)

        moe_layers(model)[entry.layer].router.register_forward_hook(mask)


@pytest.mark.parametrize("experts", [2, 3, 5])
def test_a_pruned_model_is_the_whole_one_restricted_to_the_kept_experts(
    tmp_path: Path, experts: int
) -> None:
    model = tiny_model(SPEC).eval()
    routing, _ = count_routes(model)
    whole = make_checkpoint(tmp_path / "whole", model, routing=routing)
    plan = prune_experts(whole, languages=["fr"], experts=experts, out_dir=tmp_path / "pruned")
    pruned = load_model(open_artifact(tmp_path / "pruned", kind="checkpoint")).eval()
    batch = random_batch(SPEC, sentences=5, seed=8)
    unrestricted = model(batch).logits_LV
    restrict(model, plan)
    torch.testing.assert_close(
        pruned(batch).logits_LV, model(batch).logits_LV, rtol=1e-5, atol=1e-6
    )
    assert not torch.allclose(pruned(batch).logits_LV, unrestricted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("languages", [["fr"], ["en", "de"], ["en", "de", "en"]])
def test_the_most_routed_experts_are_kept_and_their_share_is_that_of_single_routes(
    tmp_path: Path, languages: list[str]
) -> None:
    model = tiny_model(SPEC).eval()
    routing, routes = count_routes(model)
    whole = make_checkpoint(tmp_path / "whole", model, routing=routing)
    plan = prune_experts(whole, languages=languages, experts=3, out_dir=tmp_path / "pruned")
    kept = total = 0
    for entry in plan.layers:
        counts: Counter[int] = sum(
            (routes[entry.layer, code] for code in set(languages)), Counter()
        )
        by_mass = sorted(range(6), key=counts.__getitem__, reverse=True)
        assert entry.experts == tuple(sorted(by_mass[:3]))
        kept_here = sum(counts[expert] for expert in entry.experts)
        assert entry.kept_mass == pytest.approx(kept_here / counts.total(), rel=1e-12)
        kept, total = kept + kept_here, total + counts.total()
    assert plan.kept_mass == pytest.approx(kept / total, rel=1e-12)
    made = open_artifact(tmp_path / "pruned", kind="checkpoint")
    assert made.statistics == {
        "kept_mass": plan.kept_mass,
        "layers": {
            entry.layer: {"experts": list(entry.experts), "kept_mass": entry.kept_mass}
            for entry in plan.layers
        },
    }
    assert (
        made.manifest.inputs["checkpoint"].digest == open_artifact(whole, kind="checkpoint").digest
    )
    assert not made.has(ROUTING_FILE)
    assert plan.lines()[-1] == f"3 experts per layer keep {kept / total:.4f} of all routes"


def test_tensors_of_kept_experts_are_those_of_their_old_ids(tmp_path: Path) -> None:
    model = with_idle_experts(SPEC, IDLE)
    whole = make_checkpoint(tmp_path / "whole", model, routing=count_routes(model)[0])
    prune_experts(whole, languages=["de", "en", "fr"], experts=4, out_dir=tmp_path / "pruned")
    before, after = stored(whole), stored(tmp_path / "pruned")
    layer, kept = "decoder.layers.1.feed_forward", [1, 2, 3, 4]
    for new, old in enumerate(kept):
        for inner in ("up.weight", "up.bias", "down.weight", "down.bias"):
            found = after[f"{layer}.experts.{new}.{inner}"]
            assert torch.equal(found, before[f"{layer}.experts.{old}.{inner}"])
    router = f"{layer}.router"
    assert torch.equal(after[f"{router}.weight"], before[f"{router}.weight"][kept])
    assert torch.equal(after[f"{router}.group_weight"], before[f"{router}.group_weight"][:, kept])
    unchanged = [name for name in before if ".experts." not in name and ".router." not in name]
    assert all(torch.equal(after[name], before[name]) for name in unchanged)
    experts = 4 * 4 * 2
    assert len(after) == len(unchanged) + experts + 3


def statistics_of(routed_LGE: Any) -> RoutingStatistics:
    routed = np.asarray(routed_LGE, dtype=np.float64)
    return RoutingStatistics(
        layers=tuple(f"decoder.layers.{index}" for index in range(routed.shape[0])),
        languages=LANGUAGES[: routed.shape[1]],
        tokens_LG=routed.sum(-1) / 2,
        entropy_LG=np.zeros(routed.shape[:2]),
        routed_LGE=routed,
        kept_LGE=routed,
    )


@pytest.mark.parametrize(
    ("share", "experts"),
    [(0.6, 1), (0.61, 2), (0.8, 2), (0.81, 3), (0.9, 3), (0.91, 4), (1.0, 4)],
)
def test_the_share_to_keep_decides_by_the_layer_that_needs_most_experts(
    share: float, experts: int
) -> None:
    routing = statistics_of([[[0, 7, 3, 0]], [[6, 1, 2, 1]], [[10, 0, 0, 0]]])
    plan = plan_pruning(routing, languages=["de"], top_k=1, keep_mass=share)
    assert plan.num_experts == experts
    shares = {1: [0.7, 0.6, 1.0], 2: [1.0, 0.8, 1.0], 3: [1.0, 0.9, 1.0], 4: [1.0, 1.0, 1.0]}
    assert [entry.kept_mass for entry in plan.layers] == shares[experts]
    at_least_two = plan_pruning(routing, languages=["de"], top_k=2, keep_mass=share)
    assert at_least_two.num_experts == max(experts, 2)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(
        st.lists(st.integers(0, 20), min_size=5, max_size=5).filter(any), min_size=1, max_size=3
    ),
    share=st.floats(0.01, 1.0),
    top_k=st.integers(1, 5),
)
def test_the_number_of_experts_that_keeps_a_share_is_the_smallest(
    counts: list[list[int]], share: float, top_k: int
) -> None:
    plan = plan_pruning(
        statistics_of([[row] for row in counts]), languages=["de"], top_k=top_k, keep_mass=share
    )

    def enough(number: int) -> bool:
        best = (sum(sorted(row, reverse=True)[:number]) / sum(row) for row in counts)
        return number >= top_k and all(kept >= share for kept in best)

    assert plan.num_experts == next(number for number in range(1, 6) if enough(number))


def test_experts_of_equal_mass_are_kept_by_the_lower_id() -> None:
    plan = plan_pruning(statistics_of([[[2, 5, 2, 2]]]), languages=["de"], top_k=1, experts=2)
    assert plan.layers[0].experts == (0, 1)
    assert plan.layers[0].kept_mass == pytest.approx(7 / 11)
    counts = [3, 7] * 40
    plan = plan_pruning(statistics_of([[counts]]), languages=["de"], top_k=1, experts=50)
    assert plan.layers[0].experts == (*range(20), *range(21, 80, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 1}, "--experts 1 does not fit .* choose 2 to 4"),
        ({"experts": 5}, "--experts 5 does not fit .* choose 2 to 4"),
        ({"keep_mass": 0.0}, "--keep-mass 0.0 is no share"),
        ({"keep_mass": 1.1}, "--keep-mass 1.1 is no share"),
        ({"keep_mass": float("nan")}, "--keep-mass nan is no share"),
        ({"languages": ["fra"], "experts": 2}, "no language 'fra': choose from fr"),
        ({"languages": ["de", "en"], "experts": 2}, "No routes of translations into 'en'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    routing = statistics_of(
        [[[1, 2, 3, 4], [1, 0, 0, 0], [1, 1, 1, 1]], [[1] * 4, [0] * 4, [1] * 4]]
    )
    with pytest.raises(ConfigError, match=message):
        plan_pruning(routing, **{"languages": ["de"], "top_k": 2, **options})


def test_a_checkpoint_without_routing_statistics_is_refused_with_the_remedy(
    tmp_path: Path,
) -> None:
    whole = make_checkpoint(tmp_path / "whole", tiny_model(SPEC))
    with pytest.raises(ArtifactError, match=r"whole has no routing.json.*fine-tune it"):
        prune_experts(whole, languages=["de"], experts=2, out_dir=tmp_path / "pruned")
    dense = make_checkpoint(tmp_path / "dense", tiny_model(tiny_spec()))
    with pytest.raises(ConfigError, match="dense has no experts to prune"):
        prune_experts(dense, languages=["de"], experts=2, out_dir=tmp_path / "pruned")


def test_statistics_of_another_model_are_refused(tmp_path: Path) -> None:
    routing = statistics_of(np.ones((2, 4, 6)))
    whole = make_checkpoint(tmp_path / "whole", tiny_model(SPEC), routing=routing)
    with pytest.raises(ArtifactError, match=r"routing.json was counted on another model"):
        prune_experts(whole, languages=["de"], experts=2, out_dir=tmp_path / "pruned")


# ---------------------------------------------------------------- from the command line


def test_a_checkpoint_is_averaged_pruned_and_compared_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_idle_experts(SPEC, IDLE)
    whole = str(make_checkpoint(tmp_path / "whole", model, routing=count_routes(model)[0]))
    mean, pruned = str(tmp_path / "mean"), str(tmp_path / "pruned")
    options = ["--languages", "de", "fr", "--keep-mass", "1", "--out", pruned]
    assert cli.main(["checkpoint", "prune-experts", whole, *options]) == 0
    assert "4 experts per layer keep 1.0000 of all routes" in capsys.readouterr().out
    assert cli.main(["checkpoint", "average", whole, whole, "--out", mean]) == 0
    assert capsys.readouterr().out == f"{mean}: the mean of 2 checkpoints\n"
    assert cli.main(["checkpoint", "diff", whole, mean]) == 0
    assert capsys.readouterr().out.startswith("identical: ")
    assert cli.main(["checkpoint", "diff", whole, pruned]) == 0
    assert "model.moe.num_experts: 6 → 4" in capsys.readouterr().out.splitlines()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] == ".") == []


def test_the_states_of_a_run_are_averaged_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "moe.run", {3: tiny_model(SPEC)})
    options = ["--run", str(run_dir), "--last", "1", "--out", str(tmp_path / "mean")]
    assert cli.main(["checkpoint", "average", *options]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mean'}: the mean of 1 training states\n"
    assert diff(run_dir / "best", tmp_path / "mean").identical
