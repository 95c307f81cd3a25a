"""Checkpoints of models with a front: averaged, inspected, compared, pruned, refused by exports."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.fronted_models import FRONTS, fronted_byte_spec
from support.stored_checkpoints import LANGUAGES, LAYERS, make_checkpoint, stored
from support.tiny_models import random_batch, tiny_model

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact
from pipeline.checkpoints.averaging import average_checkpoints
from pipeline.checkpoints.checkpoint import load_model, read_spec
from pipeline.checkpoints.inspection import diff, inspect, verify
from pipeline.checkpoints.pruning import prune_experts
from pipeline.model.moe.routing_statistics import RoutingStatistics
from pipeline.model.settings import MoEConfig

pytestmark = pytest.mark.slow

MOE = MoEConfig(num_experts=6, every=2)


def even_routes() -> RoutingStatistics:
    """All experts serve all languages alike but for the last two, which serve none."""
    shape = len(LAYERS), len(LANGUAGES)
    routed_LGE = np.tile([2.0, 2.0, 2.0, 2.0, 0.0, 0.0], (*shape, 1))
    of_tokens = {"tokens_LG": np.full(shape, 4.0), "entropy_LG": np.ones(shape)}
    of_experts = {"routed_LGE": routed_LGE, "kept_LGE": routed_LGE}
    return RoutingStatistics(layers=LAYERS, languages=LANGUAGES, **of_tokens, **of_experts)


@pytest.mark.parametrize("front", ["msc", "ada-msha +lid", "wsf"])
def test_models_with_a_front_are_averaged_and_compared(tmp_path: Path, front: str) -> None:
    spec = fronted_byte_spec(FRONTS[front], moe=MOE)
    models = [tiny_model(spec, seed=seed) for seed in (1, 2)]
    made = [make_checkpoint(tmp_path / f"m{n}", model) for n, model in enumerate(models)]
    average_checkpoints(made, out_dir=tmp_path / "mean")
    mean, (one, other) = stored(tmp_path / "mean"), map(stored, made)
    for name, value in mean.items():
        expected = ((one[name].double() + other[name].double()) / 2).float()
        assert torch.equal(value, expected), name
    assert read_spec(open_artifact(tmp_path / "mean", kind="checkpoint")) == spec
    verify(tmp_path / "mean")
    in_front = sum(value.numel() for name, value in one.items() if name.startswith("front."))
    assert inspect(tmp_path / "mean")["parameters"]["front"] == in_front
    assert (in_front > 0) == (front != "wsf")
    loaded = load_model(open_artifact(made[0], kind="checkpoint")).eval()
    batch = random_batch(spec, sentences=3, seed=1)
    assert torch.equal(loaded(batch).logits_LV, models[0].eval()(batch).logits_LV)
    changed = {entry.name for entry in diff(*made).values if entry.name.startswith("front.")}
    assert changed == {name for name in one if name.startswith("front.")}


@pytest.mark.parametrize("front", ["ada-msha", "ncf"])
def test_pruning_experts_leaves_those_of_the_front(tmp_path: Path, front: str) -> None:
    spec = fronted_byte_spec(FRONTS[front], moe=MOE, groups=2)
    whole = make_checkpoint(tmp_path / "whole", tiny_model(spec), routing=even_routes())
    plan = prune_experts(whole, languages=LANGUAGES, experts=4, out_dir=tmp_path / "pruned")
    assert plan.kept_mass == 1.0
    before, after = stored(whole), stored(tmp_path / "pruned")
    assert sum(".feed_forward.experts.4." in name for name in after) == 0
    for name in before:
        if name.startswith("front."):
            assert torch.equal(before[name], after[name]), name
    load_model(open_artifact(tmp_path / "pruned", kind="checkpoint"))


@pytest.mark.parametrize("to", ["hf-m2m100", "hf-nllb-moe", "ctranslate2"])
def test_an_export_names_the_front_that_no_format_has(
    tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = fronted_byte_spec(FRONTS["ada-msha +lid"], moe=MOE if to == "hf-nllb-moe" else None)
    made = make_checkpoint(tmp_path / "model", tiny_model(spec))
    call = ["export", str(made), "--to", to, "--out", str(tmp_path / "out")]
    assert cli.main(call) == 2
    said = capsys.readouterr().err
    assert "model.front" in said
    assert "ada_msha" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
