"""Assembling a mixture of experts from the modules of trained models."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stored_checkpoints import byte_spec
from support.tiny_models import random_batch, tiny_model
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, new_artifact, open_artifact
from pipeline.artifacts.tokenizer import TokenizerDescription, write_tokenizer
from pipeline.checkpoints.assembly import rules
from pipeline.checkpoints.assembly.rules import Assignment, Blueprint, Part, part_of, plan_assembly
from pipeline.checkpoints.checkpoint import (
    load_model,
    read_spec,
    read_tokenizer,
    write_model_files,
)
from pipeline.checkpoints.names import named_slices
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.checkpoints.weights import TensorFiles, write_weights
from pipeline.config.recipe import Recipe
from pipeline.errors import CheckpointError, ConfigError
from pipeline.model.initial_values import initialize
from pipeline.model.settings import ModelConfig, MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from pipeline.registry import STAGES
from pipeline.stage import StageCall
from pipeline.stages import upcycle

MOE = MoEConfig(num_experts=4, every=2)
DENSE = byte_spec()
TOKEN_ROUTED = byte_spec(moe=MOE)
GROUP_ROUTED = byte_spec(moe=MOE, groups=2)
PARTS: tuple[Part, ...] = ("embeddings", "encoder", "decoder")

COPY = UpcyclingConfig(mask_ratio=0.0)


def make_checkpoint(
    directory: Path,
    model: Transformer,
    *,
    change: Callable[[dict[str, Tensor]], object] | None = None,
) -> Artifact:
    """A checkpoint of a model, its tensors changed before they are written."""
    directory.mkdir(parents=True, exist_ok=True)
    description = TokenizerDescription(
        kind="bytes",
        languages=model.spec.languages,
        language_token_scheme="underscores",
    )
    write_tokenizer(directory, description=description, model=None)
    tensors = {entry.name: entry.value.clone() for entry in named_slices(model)}
    if change is not None:
        change(tensors)
    with new_artifact(
        directory / "checkpoint", kind="checkpoint", stage="pretrain", config={}, inputs={}
    ) as writer:
        write_weights(writer.directory / "weights", tensors.items())
        write_model_files(writer, spec=model.spec, tokenizer_dir=directory)
    return open_artifact(directory / "checkpoint", kind="checkpoint")


def files_of(
    *, embeddings: Artifact, encoder: Artifact | None, decoder: Artifact | None
) -> dict[Part, TensorFiles | None]:
    given: dict[Part, Artifact | None] = {
        "embeddings": embeddings,
        "encoder": encoder,
        "decoder": decoder,
    }
    return {part: TensorFiles(a, "weights/") if a else None for part, a in given.items()}


def assembled(
    spec: ModelSpec, sources: Mapping[Part, TensorFiles | None], config: UpcyclingConfig
) -> tuple[list[Assignment], dict[str, Tensor]]:
    blueprint = Blueprint(spec, sources, config)
    return blueprint.plan, {
        entry.target: blueprint.value(entry).clone() for entry in blueprint.plan
    }


def model_of(spec: ModelSpec, tensors: dict[str, Tensor]) -> Transformer:
    model = tiny_model(spec, seed=99)
    for entry in named_slices(model):
        entry.value.copy_(tensors[entry.name])
    return model.eval()


def logits(model: Transformer, spec: ModelSpec) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(random_batch(spec, sentences=6, seed=5)).logits_LV
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_checkpoint(tmp_path_factory.mktemp("dense"), tiny_model(DENSE, seed=1))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_checkpoint(tmp_path_factory.mktemp("moe"), tiny_model(TOKEN_ROUTED, seed=2))


@pytest.fixture(scope="module")
def moe_lgr(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_checkpoint(tmp_path_factory.mktemp("lgr"), tiny_model(GROUP_ROUTED, seed=3))


# ---------------------------------------------------------------- what is assembled


@pytest.mark.parametrize("worth", [1, 2**40], ids=["compiled", "plain"])
def test_tensors_and_the_norms_of_their_differences_do_not_depend_on_compiled_loops(
    dense: Artifact, monkeypatch: pytest.MonkeyPatch, worth: int
) -> None:
    monkeypatch.setattr(rules, "WORTH_COMPILING", worth)
    sources = files_of(embeddings=dense, encoder=dense, decoder=dense)
    blueprint = Blueprint(TOKEN_ROUTED, sources, UpcyclingConfig(seed=3))
    for entry in blueprint.plan:
        value, norm = blueprint.value_and_norm(entry)
        assert torch.equal(value, blueprint.value(entry))
        match entry.rule:
            case "copied":
                assert norm == 0.0
            case "expert of dense":
                source = TensorFiles(dense, "weights/").read(entry.source or "")
                assert norm == pytest.approx((value - source).norm().item(), rel=1e-5)
            case _:
                assert norm == pytest.approx(value.norm().item(), rel=1e-5)


@pytest.mark.parametrize("spec", [TOKEN_ROUTED, GROUP_ROUTED], ids=["token", "group"])
def test_experts_that_are_copies_of_the_dense_layer_compute_what_it_computed(
    dense: Artifact, spec: ModelSpec
) -> None:
    sources = files_of(embeddings=dense, encoder=dense, decoder=dense)
    _, tensors = assembled(spec, sources, COPY)
    torch.testing.assert_close(
        logits(model_of(spec, tensors), spec), logits(load_model(dense), DENSE)
    )


def test_masked_experts_compute_something_else(dense: Artifact) -> None:
    sources = files_of(embeddings=dense, encoder=dense, decoder=dense)
    _, tensors = assembled(TOKEN_ROUTED, sources, UpcyclingConfig(mask_ratio=0.1))
    difference = logits(model_of(TOKEN_ROUTED, tensors), TOKEN_ROUTED) - logits(
        load_model(dense), DENSE
    )
    assert difference.abs().max() > 1e-3


def test_every_tensor_has_one_rule_and_the_value_that_the_rule_says(
    dense: Artifact, moe_lgr: Artifact
) -> None:
    """Enc(dense)-Dec(MoE-LGR): system 12 of the paper's Table 2."""
    config = UpcyclingConfig(mask_ratio=0.3, seed=7)
    sources = files_of(embeddings=dense, encoder=dense, decoder=moe_lgr)
    plan, tensors = assembled(GROUP_ROUTED, sources, config)
    names = [entry.name for entry in named_slices(tiny_model(GROUP_ROUTED))]
    assert [entry.target for entry in plan] == names
    assert list(tensors) == names
    dense_files, lgr_files = sources["encoder"], sources["decoder"]
    assert dense_files is not None
    assert lgr_files is not None
    seen = set()
    for entry in plan:
        value = tensors[entry.target]
        seen.add((entry.part, entry.rule))
        if entry.part == "decoder":
            assert torch.equal(value, lgr_files.read(entry.target))
        elif entry.rule == "copied":
            assert torch.equal(value, dense_files.read(entry.target))
        elif entry.rule == "expert of dense":
            layer, _, rest = entry.target.partition(".experts.")
            whole = dense_files.read(f"{layer}.{rest.split('.', 1)[1]}")
            kept = value != 0
            assert torch.equal(value[kept], whole[kept])
            assert kept.any()
        else:
            assert entry.target.endswith(".router.weight")
            fresh = initialize(entry.target, value.shape, spec=GROUP_ROUTED, seed=7)
            assert torch.equal(value, fresh)
    assert seen == {
        ("embeddings", "copied"),
        ("encoder", "copied"),
        ("encoder", "expert of dense"),
        ("encoder", "fresh"),
        ("decoder", "copied"),
    }


def test_a_part_without_a_source_starts_fresh(dense: Artifact) -> None:
    sources = files_of(embeddings=dense, encoder=dense, decoder=None)
    plan, tensors = assembled(TOKEN_ROUTED, sources, UpcyclingConfig(seed=4))
    decoder = [entry for entry in plan if entry.part == "decoder"]
    assert decoder
    for entry in decoder:
        assert (entry.rule, entry.source) == ("fresh", None)
        value = tensors[entry.target]
        expected = initialize(entry.target, value.shape, spec=TOKEN_ROUTED, seed=4)
        assert torch.equal(value, expected)


def test_group_routers_grafted_on_a_token_router_leave_the_function_unchanged(
    moe: Artifact,
) -> None:
    sources = files_of(embeddings=moe, encoder=moe, decoder=moe)
    plan, tensors = assembled(GROUP_ROUTED, sources, UpcyclingConfig(mask_ratio=0.5))
    assert {entry.rule for entry in plan} == {"copied", "group router of token router"}
    torch.testing.assert_close(
        logits(model_of(GROUP_ROUTED, tensors), GROUP_ROUTED),
        logits(load_model(moe), TOKEN_ROUTED),
    )


def test_group_routers_can_start_fresh_instead(moe: Artifact) -> None:
    sources = files_of(embeddings=moe, encoder=moe, decoder=moe)
    config = UpcyclingConfig(graft_group_routers="fresh")
    _, tensors = assembled(GROUP_ROUTED, sources, config)
    name = "decoder.layers.1.feed_forward.router.group_weight"
    first, second = tensors[name]
    assert not torch.equal(first, second)
    bound = GROUP_ROUTED.model.width**-0.5
    assert tensors[name].abs().max() <= bound
    assert torch.equal(
        tensors[name.replace("group_weight", "weight")],
        TensorFiles(moe, "weights/").read(name.replace("group_weight", "weight")),
    )


# ---------------------------------------------------------------- what is refused


def test_fewer_experts_than_the_source_has_must_be_named(moe: Artifact) -> None:
    sources = files_of(embeddings=moe, encoder=moe, decoder=None)
    fewer = byte_spec(moe=MOE.model_copy(update={"num_experts": 2}))
    with pytest.raises(CheckpointError, match=r"has 4 experts per layer and the model 2\. Name"):
        plan_assembly(fewer, sources, COPY)


def test_the_experts_that_are_named_stay_with_their_rows_of_the_router(moe: Artifact) -> None:
    sources = files_of(embeddings=moe, encoder=moe, decoder=moe)
    fewer = byte_spec(moe=MOE.model_copy(update={"num_experts": 2}))
    config = UpcyclingConfig(mask_ratio=0.5, kept_experts=(3, 1))
    plan, tensors = assembled(fewer, sources, config)
    whole = TensorFiles(moe, "weights/")
    layer = "decoder.layers.1.feed_forward"
    assert {entry.rule for entry in plan} == {"copied", "rows of kept experts"}
    for new, old in enumerate((3, 1)):
        for tensor in ("up.weight", "down.bias"):
            value = tensors[f"{layer}.experts.{new}.{tensor}"]
            assert torch.equal(value, whole.read(f"{layer}.experts.{old}.{tensor}"))
    router = whole.read(f"{layer}.router.weight")
    assert torch.equal(tensors[f"{layer}.router.weight"], router[[3, 1]])


def test_more_experts_than_the_source_has_are_masked_copies(moe: Artifact) -> None:
    """The first copy of each is as it was; what is masked of the others is their own."""
    sources = files_of(embeddings=moe, encoder=moe, decoder=moe)
    more = byte_spec(moe=MOE.model_copy(update={"num_experts": 10}))
    config = UpcyclingConfig(mask_ratio=0.3)
    plan, tensors = assembled(more, sources, config)
    whole = TensorFiles(moe, "weights/")
    layer = "encoder.layers.1.feed_forward"
    made = []
    for expert in range(10):
        value = tensors[f"{layer}.experts.{expert}.up.weight"]
        origin = whole.read(f"{layer}.experts.{expert % 4}.up.weight")
        kept = value != 0
        assert torch.equal(value[kept], origin[kept])
        assert kept.all() == (expert < 4)
        made.append(kept.numpy().tobytes())
    assert len(set(made[4:])) == 6
    router = tensors[f"{layer}.router.weight"]
    expected = whole.read(f"{layer}.router.weight")
    assert torch.equal(router, expected[[index % 4 for index in range(10)]])
    rules = {entry.rule for entry in plan}
    assert rules == {"copied", "expert of expert", "rows of more experts"}


def test_routers_that_a_source_has_can_start_fresh(moe: Artifact) -> None:
    sources = files_of(embeddings=moe, encoder=moe, decoder=moe)
    plan, tensors = assembled(TOKEN_ROUTED, sources, UpcyclingConfig(token_routers="fresh"))
    fresh = {entry.target for entry in plan if entry.rule == "fresh"}
    assert fresh == {f"{side}.layers.1.feed_forward.router.weight" for side in PARTS[1:]}
    for name in fresh:
        expected = initialize(name, tensors[name].shape, spec=TOKEN_ROUTED, seed=1)
        assert torch.equal(tensors[name], expected)


def test_a_tensor_that_would_be_lost_is_an_error_that_names_it(moe: Artifact) -> None:
    sources = files_of(embeddings=moe, encoder=moe, decoder=None)
    with pytest.raises(
        CheckpointError, match=r"29 tensors of the encoder of .* would be lost \(encoder.layers.1"
    ):
        plan_assembly(byte_spec(moe=MOE, layers=1), sources, COPY)


def test_experts_cannot_become_a_dense_layer(moe: Artifact) -> None:
    sources = files_of(embeddings=moe, encoder=moe, decoder=moe)
    with pytest.raises(CheckpointError, match=r"nothing for encoder.layers.1.feed_forward.up"):
        plan_assembly(DENSE, sources, COPY)


def test_a_layer_the_source_does_not_have_is_an_error_that_names_it(dense: Artifact) -> None:
    sources = files_of(embeddings=dense, encoder=dense, decoder=dense)
    with pytest.raises(CheckpointError, match=r"nothing for encoder.layers.2.*\[model\]"):
        plan_assembly(byte_spec(moe=MOE, layers=3), sources, COPY)


@pytest.mark.parametrize(
    "spec",
    [
        byte_spec(moe=MOE, feed_forward_width=48),
        byte_spec(moe=MOE, width=32),
    ],
    ids=["width of the feed-forward", "width of the model"],
)
def test_a_source_of_another_size_is_an_error_that_names_both_shapes(
    dense: Artifact, spec: ModelSpec
) -> None:
    sources = files_of(embeddings=dense, encoder=dense, decoder=dense)
    with pytest.raises(CheckpointError, match=r"has shape \(\d+, 16\), .* needs \(\d+, \d+\)"):
        plan_assembly(spec, sources, COPY)


def test_routers_of_another_number_of_groups_are_refused(moe_lgr: Artifact) -> None:
    sources = files_of(embeddings=moe_lgr, encoder=moe_lgr, decoder=moe_lgr)
    spec = byte_spec(moe=MOE, groups=4)
    with pytest.raises(CheckpointError, match=r"shape \(2, 4, 16\), .* needs \(4, 4, 16\)"):
        plan_assembly(spec, sources, COPY)


def test_a_tensor_of_no_part_is_refused() -> None:
    assert part_of("encoder.final_norm.bias") == "encoder"
    assert part_of("embedding.weight") == "embeddings"
    with pytest.raises(CheckpointError, match=r"language_module.weight belongs to no part"):
        part_of("language_module.weight")


# ---------------------------------------------------------------- the stage


def upcycle_call(
    out_dir: Path,
    model: ModelConfig,
    artifacts: dict[str, Artifact],
    config: UpcyclingConfig | None = None,
) -> StageCall:
    recipe = Recipe(name="tiny", model=model, upcycling=config or UpcyclingConfig())
    stage = STAGES["upcycle"]
    return StageCall(
        stage=stage,
        recipe=recipe,
        artifacts=artifacts,
        raw={},
        out_dir=out_dir,
        records={name: artifact.as_input for name, artifact in artifacts.items()},
        config=recipe.sections(stage.sections),
    )


def make_groups(directory: Path, numbers: dict[str, int]) -> Artifact:
    with new_artifact(
        directory, kind="groups", stage="group_languages", config={}, inputs={}
    ) as writer:
        writer.write_json("groups.json", {"groups": numbers})
    return open_artifact(directory, kind="groups")


def test_the_stage_writes_a_checkpoint_and_its_receipt_and_prints_it(
    dense: Artifact, moe_lgr: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifacts = {"embeddings": dense, "encoder": dense, "decoder": moe_lgr}
    upcycle.run(upcycle_call(tmp_path / "made", GROUP_ROUTED.model, artifacts))
    made = open_artifact(tmp_path / "made", kind="checkpoint")
    assert read_spec(made) == GROUP_ROUTED
    assert load_model(made).spec == GROUP_ROUTED
    assert {name: r.digest for name, r in made.manifest.inputs.items()} == {
        name: artifact.digest for name, artifact in artifacts.items()
    }
    document = made.read_json("receipt.json")
    receipt = document["tensors"]
    targets = [entry["target"] for entry in receipt]
    assert targets == [entry.name for entry in named_slices(tiny_model(GROUP_ROUTED))]
    assert made.statistics["tensors"] == len(targets)
    summary, *_, check = made.manifest.summary
    fresh = sum(entry["rule"] == "fresh" for entry in receipt)
    assert f"{len(targets)} tensors: " in summary
    assert f", {fresh} fresh" in summary
    assert json.loads(json.dumps(document)) == document
    assert "logits of a fixed batch" in check
    printed = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    name = dense.directory.name
    assert any(row.startswith(f"encoder experts {name} 16 ") for row in rows), rows
    assert any(row.startswith("encoder routers") and row.endswith("fresh") for row in rows)


def test_converter_layers_are_added_to_the_same_weights_and_taken_away_again(
    dense: Artifact, tmp_path: Path
) -> None:
    """Their language tokens are those of the vocabulary, which the source does not note."""
    model = DENSE.model.model_copy(update={"converter_layers": 1})
    upcycle.run(upcycle_call(tmp_path / "told", model, dict.fromkeys(PARTS, dense)))
    told = open_artifact(tmp_path / "told", kind="checkpoint")
    tokenizer = read_tokenizer(told)
    tokens = tuple(tokenizer.language_token_id(code) for code in DENSE.languages)
    spec = DENSE.model_copy(update={"model": model, "language_token_ids": tokens})
    assert read_spec(told) == spec
    expected = tiny_model(spec, seed=1)
    for one, other in zip(named_slices(load_model(told)), named_slices(expected), strict=True):
        assert one.name == other.name
        assert torch.equal(one.value, other.value)
    assert torch.equal(logits(load_model(told), spec), logits(expected, spec))
    assert not torch.allclose(logits(expected, spec), logits(load_model(dense), DENSE))

    upcycle.run(upcycle_call(tmp_path / "plain", DENSE.model, dict.fromkeys(PARTS, told)))
    plain = load_model(open_artifact(tmp_path / "plain", kind="checkpoint"))
    assert torch.equal(logits(plain, DENSE), logits(load_model(dense), DENSE))


def test_a_fresh_group_routed_decoder_takes_its_groups_from_the_groups_given(
    dense: Artifact, tmp_path: Path
) -> None:
    numbers = dict(zip(DENSE.languages, (1, 0, 1, 1), strict=True))
    artifacts = {
        "embeddings": dense,
        "encoder": dense,
        "groups": make_groups(tmp_path / "groups", numbers),
    }
    upcycle.run(upcycle_call(tmp_path / "made", GROUP_ROUTED.model, artifacts))
    made = open_artifact(tmp_path / "made", kind="checkpoint")
    assert read_spec(made).language_groups == (1, 0, 1, 1)


def test_groups_other_than_those_the_decoder_was_trained_with_are_refused(
    dense: Artifact, moe_lgr: Artifact, tmp_path: Path
) -> None:
    artifacts = {
        "embeddings": dense,
        "encoder": dense,
        "decoder": moe_lgr,
        "groups": make_groups(
            tmp_path / "groups", dict(zip(DENSE.languages, (1, 0, 1, 0), strict=True))
        ),
    }
    with pytest.raises(ConfigError, match="leave the groups out"):
        upcycle.run(upcycle_call(tmp_path / "made", GROUP_ROUTED.model, artifacts))
    assert not (tmp_path / "made").exists()


def test_sources_of_another_vocabulary_are_refused(dense: Artifact, tmp_path: Path) -> None:
    spec = DENSE.model_copy(update={"languages": ("de", "en", "fr", "zh")})
    other = make_checkpoint(tmp_path / "other", tiny_model(spec))
    artifacts = {"embeddings": dense, "encoder": dense, "decoder": other}
    with pytest.raises(ConfigError, match=r"The tokenizers of .* differ"):
        upcycle.run(upcycle_call(tmp_path / "made", TOKEN_ROUTED.model, artifacts))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 4}, "num_heads: 2 → 4"),
        ({"norm": "post"}, "norm: pre → post"),
        ({"activation": "gelu"}, "activation: relu → gelu"),
        ({"positions": "learned"}, "positions: sinusoidal → learned"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_recipe_that_would_compute_something_else_with_the_same_tensors_is_refused(
    dense: Artifact, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    model = TOKEN_ROUTED.model.model_copy(update=change)
    artifacts = {"embeddings": dense, "encoder": dense, "decoder": dense}
    with pytest.raises(ConfigError, match=words):
        upcycle.run(upcycle_call(tmp_path / "made", model, artifacts))


def test_sources_may_have_started_from_other_initial_values(
    dense: Artifact, tmp_path: Path
) -> None:
    model = TOKEN_ROUTED.model.model_copy(update={"initialization": "fairseq"})
    artifacts = {"embeddings": dense, "encoder": dense}
    upcycle.run(upcycle_call(tmp_path / "made", model, artifacts))
    made = open_artifact(tmp_path / "made", kind="checkpoint")
    assert read_spec(made).model.initialization == "fairseq"


def test_sources_trained_with_other_tags_are_refused(dense: Artifact, tmp_path: Path) -> None:
    spec = DENSE.model_copy(update={"tag_scheme": "tgt"})
    other = make_checkpoint(tmp_path / "other", tiny_model(spec))
    artifacts = {"embeddings": dense, "encoder": dense, "decoder": other}
    with pytest.raises(ConfigError, match="tag_scheme: tgt → src-tgt"):
        upcycle.run(upcycle_call(tmp_path / "made", TOKEN_ROUTED.model, artifacts))


def test_a_damaged_source_leaves_no_checkpoint(dense: Artifact, tmp_path: Path) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        tensors["decoder.layers.1.feed_forward.down.bias"] = torch.zeros(17)

    other = make_checkpoint(tmp_path / "other", tiny_model(DENSE), change=widen)
    call = upcycle_call(
        tmp_path / "made",
        TOKEN_ROUTED.model,
        {"embeddings": dense, "encoder": dense, "decoder": other},
    )
    with pytest.raises(CheckpointError, match=r"down.bias \[17\] instead of \[16\]"):
        upcycle.run(call)
    assert list(tmp_path.glob("*made*")) == []
    upcycle.run(replace(call, artifacts={**call.artifacts, "decoder": dense}))
    assert open_artifact(tmp_path / "made", kind="checkpoint").has("receipt.json")
