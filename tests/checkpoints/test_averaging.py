"""Means of checkpoints and of training states, against sums in double precision."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from support.corpora import writing
from support.stored_checkpoints import (
    SPEC,
    byte_spec,
    make_checkpoint,
    make_state,
    set_to,
    stored,
    weights_of,
)
from support.tiny_models import random_batch, tiny_model, tiny_spec

from pipeline import cli
from pipeline.artifacts.artifact import new_artifact, open_artifact
from pipeline.checkpoints.averaging import average_checkpoints, average_states
from pipeline.checkpoints.checkpoint import load_model
from pipeline.checkpoints.inspection import diff, verify
from pipeline.checkpoints.resharding import Piece
from pipeline.errors import EXIT_USER_ERROR, ArtifactError, CheckpointError
from pipeline.model.parameters import named_slices
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer


def test_an_average_is_the_mean_in_doubles_rounded_once(tmp_path: Path) -> None:
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
    artifact = open_artifact(tmp_path / "mean", kind="checkpoint")
    assert artifact.manifest.stage == "average"
    assert artifact.statistics["averaged"] == 3
    assert [record.digest for record in artifact.manifest.inputs.values()] == [
        open_artifact(path, kind="checkpoint").digest for path in made
    ]
    assert load_model(artifact).spec == SPEC
    verify(tmp_path / "mean")
    with pytest.raises(ArtifactError, match="mean exists already"):
        average_checkpoints(made, out_dir=tmp_path / "mean")
    average_checkpoints(made[:1], out_dir=tmp_path / "mean", overwrite=True)
    assert diff(made[0], tmp_path / "mean").identical


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
    with pytest.raises(CheckpointError, match=r"beyond the model \(1\): surplus"):
        average_checkpoints([made], out_dir=tmp_path / "mean")


@pytest.mark.parametrize("copied", [False, True])
def test_a_checkpoint_and_its_copy_are_not_averaged(tmp_path: Path, copied: bool) -> None:
    made = [make_checkpoint(tmp_path / f"m{seed}", tiny_model(SPEC, seed=seed)) for seed in (1, 2)]
    again = tmp_path / "m1" / ".." / "m2"
    if copied:
        again = Path(shutil.copytree(made[1], tmp_path / "copy"))
    said = f"{again.name} is the same checkpoint as {made[1]}. Name checkpoints of one model, and"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        average_checkpoints([*made, again], out_dir=tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


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
    for update, model in models.items():
        directory = run_dir / "states" / f"update-{update:07d}"
        make_state(directory, cut(model, seed=update), update=update, parts=2)
    make_checkpoint(run_dir / "best", list(models.values())[-1])
    return run_dir


@pytest.mark.slow
def test_the_last_states_of_a_run_are_averaged_by_their_master_weights(tmp_path: Path) -> None:
    models = {update: tiny_model(SPEC, seed=update) for update in (8, 9, 10, 100)}
    run_dir = make_run(tmp_path / "moe.run", models)
    (run_dir / "states" / "update-0000200").mkdir()  # not finished
    for copy in ("update-0000010-copy", "update-0000100.old"):  # of a user
        shutil.copytree(run_dir / "states" / copy[:14], run_dir / "states" / copy)
    average_states(run_dir, last=3, out_dir=tmp_path / "mean")
    mean = stored(tmp_path / "mean")
    parts = [weights_of(models[update]) for update in (9, 10, 100)]
    assert set(mean) == set(parts[0])
    for tensor, found in mean.items():
        expected = sum(part[tensor].double() for part in parts) / 3
        torch.testing.assert_close(found.double(), expected, rtol=1e-7, atol=1e-12)
    made = open_artifact(tmp_path / "mean", kind="checkpoint")
    assert made.statistics["averaged_updates"] == [9, 10, 100]
    kinds = sorted(record.kind for record in made.manifest.inputs.values())
    assert kinds == ["checkpoint", *["training_state"] * 3]
    average_states(run_dir, last=1, out_dir=tmp_path / "one")
    batch = random_batch(SPEC, sentences=2, seed=1)
    one = load_model(open_artifact(tmp_path / "one", kind="checkpoint"))
    assert torch.equal(one.eval()(batch).logits_LV, models[100].eval()(batch).logits_LV)


def test_a_mean_never_replaces_its_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_checkpoint(tmp_path / "a", tiny_model(SPEC))
    before = stored(made)
    for out, relation in ((made, "is"), (made / "weights" / "mean", "lies within")):
        options = ["average", str(made), "--out", str(out), "--overwrite"]
        assert cli.main(["checkpoint", *options]) == EXIT_USER_ERROR
        assert f"{relation} the input checkpoints/0" in capsys.readouterr().err
    assert stored(made).keys() == before.keys()
    verify(made)


@pytest.mark.parametrize("verb", ["average", "tokenizer", "export"])
def test_no_command_replaces_an_artifact_of_another_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    made = make_checkpoint(tmp_path / "a", tiny_model(byte_spec()))
    out = tmp_path / "corpus"
    with writing(out, "corpus", "clean") as writer:
        writer.path("text").write_text("text")
    command = {
        "average": ["checkpoint", "average", str(made)],
        "tokenizer": ["checkpoint", "import", str(made), "--tokenizer"],
        "export": ["export", str(made), "--to", "ctranslate2"],
    }[verb]
    for flags in ([], ["--overwrite"]):
        assert cli.main([*command, "--out", str(out), *flags]) == EXIT_USER_ERROR
        said = capsys.readouterr().err
        assert f"{out} holds a corpus artifact made by clean, which a" in said
        assert "--overwrite" not in said
    assert (out / "text").read_text() == "text"


def test_a_mean_keeps_a_model_it_replaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_checkpoint(tmp_path / "a", tiny_model(SPEC))
    out = tmp_path / "trained"
    trained = {"ds_config": {"zero_optimization": {"stage": 1}}}
    with new_artifact(
        out, kind="checkpoint", stage="pretrain", config=trained, inputs={}
    ) as writer:
        writer.path("weights").write_text("of many days")
    command = ["checkpoint", "average", str(made), "--out", str(out), "--overwrite"]
    assert cli.main(command) == 0
    assert f"the model trained before is kept as {out}.before-1" in capsys.readouterr().err
    assert (tmp_path / "trained.before-1" / "weights").read_text() == "of many days"
    verify(out)


def test_states_that_are_missing_or_lack_values_are_refused(tmp_path: Path) -> None:
    model = tiny_model(SPEC)
    run_dir = make_run(tmp_path / "moe.run", {1: model})
    name = "encoder.layers.0.feed_forward.up.weight"
    pieces = [one for one in cut(model, seed=1) if one.tensor != name or one.start == 0]
    make_state(run_dir / "states" / "update-0000002", pieces)
    (tmp_path / "moe").mkdir()
    for run, last, error, words in (
        (tmp_path / "lost.run", 1, ArtifactError, r"lost.run does not exist\. Name OUT.run"),
        (tmp_path / "no" / "x", 9, ArtifactError, r"no/x does not exist\. Name OUT.run"),
        (run_dir, 3, ArtifactError, r"moe.run holds 2 training states, not 3"),
        (tmp_path / "moe", 1, ArtifactError, r"moe holds 0 training states.*Name the run di"),
        (run_dir, 2, CheckpointError, r"update-0000002 .* it has \d+ of 512 values"),
    ):
        with pytest.raises(error, match=words):
            average_states(run, last=last, out_dir=tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_states_are_averaged_by_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "moe.run", {3: tiny_model(SPEC)})
    for out in (tmp_path / "mean", tmp_path / "moe"):  # also under the name of the run's result
        options = ["--run", str(run_dir), "--last", "1", "--out", str(out)]
        assert cli.main(["checkpoint", "average", *options]) == 0
        assert capsys.readouterr().out == f"{out}: the mean of 1 training state\n"
        assert diff(run_dir / "best", out).identical
