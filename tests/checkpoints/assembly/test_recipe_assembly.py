"""Assembling a mixture of experts from the modules of trained models."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpora import writing
from support.sigmoid_router import SigmoidRouter
from support.stored_checkpoints import byte_spec, make_checkpoint, set_to
from support.tiny_models import random_batch, tiny_model
from torch import Tensor, nn

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.checkpoints.assembly.rules import PARTS, AssemblyPlan, Assignment, part_of
from pipeline.checkpoints.checkpoint import load_model, own_source, read_spec, read_tokenizer
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.checkpoints.weights import TensorFiles
from pipeline.config.recipe import Recipe
from pipeline.errors import CheckpointError, ConfigError
from pipeline.model.moe.router import build_router
from pipeline.model.moe.routing import Routing
from pipeline.model.parameters import initialize, named_slices
from pipeline.model.settings import ModelConfig, MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.tokens import Tokens
from pipeline.model.transformer import Transformer
from pipeline.registry import STAGES
from pipeline.stage import StageCall
from pipeline.stages import upcycle

MOE = MoEConfig(num_experts=4, every=2)
DENSE = byte_spec()
TOKEN_ROUTED = byte_spec(moe=MOE)
GROUP_ROUTED = byte_spec(moe=MOE, groups=2)

COPY = UpcyclingConfig(mask_ratio=0.0)
FEWER = MOE.model_copy(update={"num_experts": 2})


def checkpoint_of(directory: Path, model: Transformer, **options: Any) -> Artifact:
    return open_artifact(make_checkpoint(directory, model, **options), kind="checkpoint")


def planned(
    spec: ModelSpec, parts: Sequence[Artifact | None], config: UpcyclingConfig
) -> AssemblyPlan:
    named = zip(PARTS, parts, strict=True)
    sources = {part: own_source(artifact) for part, artifact in named if artifact is not None}
    return AssemblyPlan(spec, sources, config, sources["embeddings"].tokenizer)


def assembled(
    spec: ModelSpec, parts: Sequence[Artifact | None], config: UpcyclingConfig
) -> tuple[list[Assignment], dict[str, Tensor]]:
    plan = planned(spec, parts, config)
    names = [entry.target for entry in plan.assignments]
    return plan.assignments, dict(zip(names, plan.values(plan.assignments), strict=True))


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
    return checkpoint_of(tmp_path_factory.mktemp("a") / "dense", tiny_model(DENSE, seed=1))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return checkpoint_of(tmp_path_factory.mktemp("b") / "moe", tiny_model(TOKEN_ROUTED, seed=2))


@pytest.fixture(scope="module")
def moe_lgr(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return checkpoint_of(tmp_path_factory.mktemp("c") / "lgr", tiny_model(GROUP_ROUTED, seed=3))


# ---------------------------------------------------------------- what is assembled


@pytest.mark.parametrize("spec", [TOKEN_ROUTED, GROUP_ROUTED], ids=["token", "group"])
def test_experts_that_are_copies_of_the_dense_layer_compute_what_it_computed(
    dense: Artifact, spec: ModelSpec
) -> None:
    parts = [dense, dense, dense]
    _, tensors = assembled(spec, parts, COPY)
    torch.testing.assert_close(
        logits(model_of(spec, tensors), spec), logits(load_model(dense), DENSE)
    )


def test_every_tensor_has_one_rule_and_the_value_that_the_rule_says(
    dense: Artifact, moe_lgr: Artifact
) -> None:
    """Enc(dense)-Dec(MoE-LGR): system 12 of the paper's Table 2."""
    config = UpcyclingConfig(mask_ratio=0.3, seed=7)
    parts = [dense, dense, moe_lgr]
    plan, tensors = assembled(GROUP_ROUTED, parts, config)
    names = [entry.name for entry in named_slices(tiny_model(GROUP_ROUTED))]
    assert [entry.target for entry in plan] == names
    assert list(tensors) == names
    dense_files, lgr_files = (TensorFiles(source, "weights/") for source in (dense, moe_lgr))
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
    of_encoder = {("encoder", rule) for rule in ("copied", "expert of dense", "fresh")}
    assert seen == {("embeddings", "copied"), ("decoder", "copied"), *of_encoder}


def test_a_part_without_a_source_starts_fresh(dense: Artifact) -> None:
    parts = [dense, dense, None]
    plan, tensors = assembled(TOKEN_ROUTED, parts, UpcyclingConfig(seed=4))
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
    parts = [moe, moe, moe]
    plan, tensors = assembled(GROUP_ROUTED, parts, UpcyclingConfig())
    assert {entry.rule for entry in plan} == {"copied", "group router of token router"}
    torch.testing.assert_close(
        logits(model_of(GROUP_ROUTED, tensors), GROUP_ROUTED), logits(load_model(moe), TOKEN_ROUTED)
    )


def test_group_routers_can_start_fresh_instead(moe: Artifact) -> None:
    config = UpcyclingConfig(graft_group_routers="fresh")
    plan, tensors = assembled(GROUP_ROUTED, [moe, moe, moe], config)
    name = "decoder.layers.1.feed_forward.router.group_weight"
    assert [entry.target for entry in plan if entry.rule == "fresh"] == [name]
    expected = initialize(name, tensors[name].shape, spec=GROUP_ROUTED, seed=1)
    assert torch.equal(tensors[name], expected)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("source", "spec", "settings", "told"),
    [
        ("moe", GROUP_ROUTED, {"mask_ratio": 0.5}, r"mask_ratio is 0\.5, .* default is 0\.1\)"),
        ("moe", TOKEN_ROUTED, {"mask_ratio": 0.0}, r"mask_ratio is 0\.0, .* default is 0\.1\)"),
        ("dense", DENSE, {"method": "per_neuron"}, "method is 'per_neuron', .* is 'elementwise'"),
        (
            "dense",
            GROUP_ROUTED,
            {"graft_group_routers": "fresh"},
            "graft_group_routers is 'fresh', .* 'copy'",
        ),
    ],
)
def test_a_setting_that_changes_nothing_is_refused(
    source: str,
    spec: ModelSpec,
    settings: dict[str, Any],
    told: str,
    request: pytest.FixtureRequest,
) -> None:
    parts, config = [request.getfixturevalue(source)] * 3, UpcyclingConfig(**settings)
    with pytest.raises(ConfigError, match=rf"^upcycling\.{told}"):
        assembled(spec, parts, config)


@pytest.mark.parametrize(
    "settings", [{"method": "noise", "mask_ratio": 0.2}, {"noise_std": 0.5}], ids=str
)
def test_a_setting_that_the_method_does_not_read_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is 0\.[25], and method is '(noise|elem.*)', which"):
        UpcyclingConfig(**settings)
    assert UpcyclingConfig(method="noise", noise_std=0.5).noise_std == 0.5


def test_more_experts_than_the_source_has_are_masked_copies(moe: Artifact) -> None:
    """The first copy of each is as it was; what is masked of the others is their own."""
    more = byte_spec(moe=MOE.model_copy(update={"num_experts": 10}))
    config = UpcyclingConfig(mask_ratio=0.3)
    plan, tensors = assembled(more, [moe, moe, moe], config)
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


def test_more_experts_lengthen_other_routers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_router(spec: ModelSpec, moe: MoEConfig, **_: object) -> nn.Module:
        router = SigmoidRouter(moe, spec)
        router.bias = nn.Parameter(torch.empty(moe.num_experts))
        return router

    monkeypatch.setattr("pipeline.model.moe.layer.build_router", build_router)
    model = tiny_model(byte_spec(moe=MOE))
    source = checkpoint_of(tmp_path / "moe", model)
    more = byte_spec(moe=MOE.model_copy(update={"num_experts": 6}))
    _, tensors = assembled(more, [source, source, source], COPY)
    before = {entry.name: entry.value for entry in named_slices(model)}
    rows = [0, 1, 2, 3, 0, 1]
    for router in ("encoder", "decoder"):
        name = f"{router}.layers.1.feed_forward.router"
        for inner in ("weight", "bias"):
            assert torch.equal(tensors[f"{name}.{inner}"], before[f"{name}.{inner}"][rows])
        preference = before[f"{name}.preference"]  # a row per language
        assert torch.equal(tensors[f"{name}.preference"], preference[:, rows])


class TableRouter(SigmoidRouter):
    """Has a table of integers, as a router by hashes does."""

    table_of_today: Tensor

    def __init__(self, moe: MoEConfig, spec: ModelSpec) -> None:
        super().__init__(moe, spec)
        table = torch.zeros(len(self.table_of_today), dtype=torch.int64)
        self.table = nn.Parameter(table, requires_grad=False)

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:
        return self.table_of_today if name == "table" else torch.randn(shape, generator=generator)

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Routing:
        return super().forward(x_ND + 0 * self.preference[self.table].sum(), tokens)


@pytest.mark.parametrize("table", [[1, 0, 2], [3]])
def test_a_router_with_integers_is_made_of_a_dense_model(
    table: list[int], dense: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableRouter, "table_of_today", torch.tensor(table), raising=False)
    monkeypatch.setattr(
        "pipeline.model.moe.layer.build_router", lambda spec, moe, **_: TableRouter(moe, spec)
    )
    spec = byte_spec(moe=MOE)
    upcycle.run(upcycle_call(tmp_path / "out", spec.model, dict.fromkeys(PARTS, dense)))
    made = load_model(open_artifact(tmp_path / "out", kind="checkpoint"))
    tables = [entry.value for entry in named_slices(made) if entry.name.endswith(".table")]
    assert tables
    for found in tables:
        assert found.tolist() == table


@pytest.mark.parametrize("languages", [("aa", "de", "en", "fr"), ("en", "fr", "ru", "zh")])
def test_rows_of_a_router_for_other_languages_are_refused(
    languages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = byte_spec(moe=MOE)
    other = spec.model_copy(update={"languages": languages})
    source = checkpoint_of(tmp_path / "plain", tiny_model(spec))
    assembled(other, [source, source, source], UpcyclingConfig())  # its rows are of experts
    monkeypatch.setattr(
        "pipeline.model.moe.layer.build_router", lambda spec, moe, **_: SigmoidRouter(moe, spec)
    )
    source = checkpoint_of(tmp_path / "own", tiny_model(spec))
    assembled(spec, [source, source, source], UpcyclingConfig())
    with pytest.raises(CheckpointError, match=r"preference has a row per language, .* fresh\.$"):
        assembled(other, [source, source, source], UpcyclingConfig())


@pytest.mark.parametrize(
    ("source", "spec", "words"),
    [
        ("moe", byte_spec(moe=FEWER), r"has 4 experts per layer and the model 2\. Prune .*before"),
        ("moe", byte_spec(moe=MOE, layers=1), r"29 tensors of the encoder of .* lost \(encoder"),
        ("moe", DENSE, r"nothing for encoder.layers.1.feed_forward.up"),
        ("dense", byte_spec(moe=MOE, layers=3), r"nothing for encoder.layers.2.*\[model\]"),
        ("dense", byte_spec(moe=MOE, feed_forward_width=48), r"\(\d+, 16\), .* needs \(48, 16\)"),
        ("dense", byte_spec(moe=MOE, width=32), r"has shape \(\d+, 16\), .* needs \(\d+, 32\)"),
        ("moe_lgr", byte_spec(moe=MOE, groups=4), r"shape \(2, 4, 16\), .* needs \(4, 4, 16\)"),
    ],
    ids=str,
)
def test_a_source_that_does_not_fit_is_an_error_that_names_the_tensor(
    source: str, spec: ModelSpec, words: str, request: pytest.FixtureRequest
) -> None:
    artifact: Artifact = request.getfixturevalue(source)
    with pytest.raises(CheckpointError, match=words):
        assembled(spec, [artifact] * 3, COPY)


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ("router", "router.preference. It has another router there: keep its decoder_router"),
        ("gate", 'router.weight. Experts are made only of feed-forwards of kind "dense"'),
    ],
)
def test_what_a_variant_lacks_is_named_by_its_cause(
    kept: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources with plain routers for one's own router, or with one's own feed-forward."""
    own = MOE.model_copy(update={"combine_weights": "probability"})
    if kept == "router":
        monkeypatch.setattr(
            "pipeline.model.moe.layer.build_router",
            lambda spec, moe, side: (
                SigmoidRouter(moe, spec) if moe == own else build_router(spec, moe, side=side)
            ),
        )
    else:
        monkeypatch.setattr(
            "pipeline.model.building.dense_feed_forward",
            lambda model: nn.ModuleDict({"gate": nn.Linear(model.width, model.width)}),
        )
    before = byte_spec(moe=MOE) if kept == "router" else DENSE
    source = checkpoint_of(tmp_path / "source", tiny_model(before))
    with pytest.raises(CheckpointError, match=re.escape(words)):
        assembled(byte_spec(moe=own), [source] * 3, COPY)


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
    with writing(directory, "groups", "group_languages") as writer:
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


def test_converter_layers_are_added_and_taken_away_again(dense: Artifact, tmp_path: Path) -> None:
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


def test_a_fresh_group_routed_decoder_takes_given_groups(dense: Artifact, tmp_path: Path) -> None:
    numbers = dict(zip(DENSE.languages, (1, 0, 1, 1), strict=True))
    groups = make_groups(tmp_path / "groups", numbers)
    artifacts = {"embeddings": dense, "encoder": dense, "groups": groups}
    model = GROUP_ROUTED.model.model_copy(update={"initialization": "fairseq"})  # not the sources'
    upcycle.run(upcycle_call(tmp_path / "made", model, artifacts))
    spec = read_spec(open_artifact(tmp_path / "made", kind="checkpoint"))
    assert (spec.language_groups, spec.model.initialization) == ((1, 0, 1, 1), "fairseq")


def test_sources_of_other_models_are_refused(
    dense: Artifact, moe_lgr: Artifact, tmp_path: Path
) -> None:
    groups = make_groups(tmp_path / "groups", dict(zip(DENSE.languages, (1, 0, 1, 0), strict=True)))
    languages = DENSE.model_copy(update={"languages": ("de", "en", "fr", "zh")})
    tags = DENSE.model_copy(update={"tag_scheme": "tgt"})
    languages_of = checkpoint_of(tmp_path / "languages", tiny_model(languages))
    tags_of = checkpoint_of(tmp_path / "tags", tiny_model(tags))
    for changes, words in (
        ({"decoder": moe_lgr, "groups": groups}, "leave the groups out"),
        ({"decoder": languages_of}, r"The tokenizers of .* differ"),
        ({"decoder": tags_of}, "tag_scheme: tgt → src-tgt"),
    ):
        call = upcycle_call(
            tmp_path / "made",
            (GROUP_ROUTED if "groups" in changes else TOKEN_ROUTED).model,
            {"embeddings": dense, "encoder": dense, **changes},
        )
        with pytest.raises(ConfigError, match=words):
            upcycle.run(call)
        assert not (tmp_path / "made").exists()


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
    with pytest.raises(ConfigError, match=words):
        upcycle.run(upcycle_call(tmp_path / "made", model, dict.fromkeys(PARTS, dense)))


def test_a_damaged_source_leaves_no_checkpoint(dense: Artifact, tmp_path: Path) -> None:
    widen = set_to("decoder.layers.1.feed_forward.down.bias", torch.zeros(17))
    other = checkpoint_of(tmp_path / "other", tiny_model(DENSE), change=widen)
    parts = {"embeddings": dense, "encoder": dense, "decoder": other}
    call = upcycle_call(tmp_path / "made", TOKEN_ROUTED.model, parts)
    with pytest.raises(CheckpointError, match=r"down.bias \[17\] instead of \[16\]"):
        upcycle.run(call)
    assert list(tmp_path.glob("*made*")) == []
    upcycle.run(replace(call, artifacts={**call.artifacts, "decoder": dense}))
    assert open_artifact(tmp_path / "made", kind="checkpoint").has("receipt.json")
