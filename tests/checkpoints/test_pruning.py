"""Models without some of their experts, against the whole one restricted to the rest."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.folder_listing import names_in
from support.sigmoid_router import SigmoidRouter
from support.stored_checkpoints import LANGUAGES, LAYERS, SPEC, make_checkpoint, stored
from support.tiny_models import EOS_ID, random_batch, random_examples, tiny_model, tiny_spec
from torch import Tensor, nn

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact
from pipeline.batching.batch import Batch, collate
from pipeline.checkpoints.checkpoint import load_model
from pipeline.checkpoints.pruning import PruningPlan, plan_pruning, prune_experts
from pipeline.errors import EXIT_USER_ERROR, ArtifactError, ConfigError
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.moe.routing import Routing
from pipeline.model.moe.routing_statistics import ROUTING_FILE, RoutingCounter, RoutingStatistics
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer


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
def test_without_experts_that_are_never_chosen_a_model_has_its_other_tensors_and_computes_the_same(
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
    before, after = stored(whole), stored(tmp_path / "pruned")
    layer, kept = "decoder.layers.1.feed_forward", [1, 2, 3, 4]
    for new_id, old_id in enumerate(kept):
        for inner in ("up.weight", "up.bias", "down.weight", "down.bias"):
            value = after[f"{layer}.experts.{new_id}.{inner}"]
            assert torch.equal(value, before[f"{layer}.experts.{old_id}.{inner}"])
    for name in [name for name in before if name.startswith(f"{layer}.router.")]:
        assert torch.equal(after[name], before[name].index_select(-2, torch.tensor(kept)))
    unchanged = [name for name in before if ".experts." not in name and ".router." not in name]
    assert all(torch.equal(after[name], before[name]) for name in unchanged)
    routers = 2 + (groups > 0)
    assert len(after) == len(unchanged) + 4 * 4 * 2 + routers


class BiasedRouter(SigmoidRouter):
    """A router as the guide adds one, with a tensor of one dimension, too."""

    def __init__(self, moe: MoEConfig, spec: ModelSpec) -> None:
        super().__init__(moe, spec)
        self.bias = nn.Parameter(torch.empty(moe.num_experts))


def test_other_routers_keep_the_kept_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_router(spec: ModelSpec, moe: MoEConfig, **_: object) -> nn.Module:
        return BiasedRouter(moe, spec)

    monkeypatch.setattr("pipeline.model.moe.layer.build_router", build_router)
    model = tiny_model(tiny_spec(moe=MoEConfig(num_experts=6, every=2)))
    whole = make_checkpoint(tmp_path / "whole", model, routing=count_routes(model)[0])
    plan = prune_experts(whole, languages=["de"], experts=4, out_dir=tmp_path / "pruned")
    load_model(open_artifact(tmp_path / "pruned", kind="checkpoint"))
    before, after = stored(whole), stored(tmp_path / "pruned")
    for entry in plan.layers:
        router, kept = f"{entry.layer}.feed_forward.router", list(entry.experts)
        for name in ("weight", "bias"):
            assert torch.equal(after[f"{router}.{name}"], before[f"{router}.{name}"][kept])
        preference = before[f"{router}.preference"]  # a row per language
        assert torch.equal(after[f"{router}.preference"], preference[:, kept])


def restrict(model: Transformer, plan: PruningPlan) -> None:
    """Make the whole model route among the kept experts only, by masking its probabilities."""
    for entry in plan.layers:
        kept = torch.zeros(6)
        kept[list(entry.experts)] = 1

        def mask(_module: nn.Module, _args: Any, routing: Routing, kept: Tensor = kept) -> Routing:
            weight_NC, expert_NC = (routing.probability_NE * kept).topk(2, dim=-1)
            weight_NC = weight_NC / weight_NC.sum(-1, keepdim=True)
            return replace(routing, made_weight_NC=weight_NC, expert_NC=expert_NC)

        moe_layers(model)[entry.layer].router.register_forward_hook(mask)


@pytest.mark.parametrize("experts", [2, 5])
def test_a_pruned_model_is_the_whole_one_restricted(tmp_path: Path, experts: int) -> None:
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


def test_a_pruned_checkpoint_records_the_models_codes(tmp_path: Path) -> None:
    model = tiny_model(SPEC).eval()
    whole = make_checkpoint(tmp_path / "whole", model, routing=count_routes(model)[0])
    for number, languages in enumerate((["de", "fr"], ["deu", "de", "fra_Latn"])):
        out = tmp_path / f"pruned-{number}"
        prune_experts(whole, languages=languages, experts=3, out_dir=out)
        config = open_artifact(out, kind="checkpoint").manifest.config
        assert config["prune_experts"] == {"languages": ["de", "fr"], "experts": 3}


@pytest.mark.parametrize("languages", [["fr"], ["en", "de", "en"]])
def test_the_most_routed_experts_are_kept(tmp_path: Path, languages: list[str]) -> None:
    model = tiny_model(SPEC).eval()
    routing, routes = count_routes(model)
    whole = make_checkpoint(tmp_path / "whole", model, routing=routing)
    plan = prune_experts(whole, languages=languages, experts=3, out_dir=tmp_path / "pruned")
    kept = total = 0
    for entry in plan.layers:
        counts: Counter[int] = sum((routes[entry.layer, one] for one in set(languages)), Counter())
        by_mass = sorted(range(6), key=counts.__getitem__, reverse=True)
        assert entry.experts == tuple(sorted(by_mass[:3]))
        kept_here = sum(counts[expert] for expert in entry.experts)
        assert entry.kept_mass == pytest.approx(kept_here / counts.total(), rel=1e-12)
        kept, total = kept + kept_here, total + counts.total()
    assert plan.kept_mass == pytest.approx(kept / total, rel=1e-12)
    made = open_artifact(tmp_path / "pruned", kind="checkpoint")
    layers = {
        entry.layer: {"experts": list(entry.experts), "kept_mass": entry.kept_mass}
        for entry in plan.layers
    }
    assert made.statistics == {"kept_mass": plan.kept_mass, "layers": layers}
    assert (
        made.manifest.inputs["checkpoint"].digest == open_artifact(whole, kind="checkpoint").digest
    )
    assert not made.has(ROUTING_FILE)
    assert plan.lines()[-1] == f"3 experts per layer keep {kept / total:.4f} of all routes"


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
    ("share", "experts"), [(0.6, 1), (0.61, 2), (0.8, 2), (0.81, 3), (0.9, 3), (0.91, 4), (1.0, 4)]
)
def test_the_layer_that_needs_most_experts_decides(share: float, experts: int) -> None:
    routing = statistics_of([[[0, 7, 3, 0]], [[6, 1, 2, 1]], [[10, 0, 0, 0]]])
    plan = plan_pruning(routing, languages=["de"], top_k=1, keep_mass=share)
    assert plan.num_experts == experts
    shares = {1: [0.7, 0.6, 1.0], 2: [1.0, 0.8, 1.0], 3: [1.0, 0.9, 1.0], 4: [1.0, 1.0, 1.0]}
    assert [entry.kept_mass for entry in plan.layers] == shares[experts]
    at_least_two = plan_pruning(routing, languages=["de"], top_k=2, keep_mass=share)
    assert at_least_two.num_experts == max(experts, 2)


COUNTS = st.lists(st.integers(0, 20), min_size=5, max_size=5).filter(any)


@settings(max_examples=60, deadline=None)
@given(st.lists(COUNTS, min_size=1, max_size=3), st.floats(0.01, 1.0), st.integers(1, 5))
def test_the_least_number_keeps_a_share(counts: list[list[int]], share: float, top_k: int) -> None:
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
        ({"experts": 1}, "--experts 1 does not fit .* Choose 2 to 4"),
        ({"experts": 5}, "--experts 5 does not fit .* Choose 2 to 4"),
        ({"keep_mass": 0.0}, "--keep-mass 0.0 is no share"),
        ({"keep_mass": 1.1}, "--keep-mass 1.1 is no share"),
        ({"keep_mass": float("nan")}, "--keep-mass nan is no share"),
        ({"languages": ["eng"], "experts": 2}, "No routes of translations into 'en'"),
        ({"languages": ["nld"], "experts": 2}, "no language 'nld'. Choose from de, "),
        ({"languages": ["German"], "experts": 2}, "is the name of a language .*Write 'de'"),
        ({"languages": ["de", "en"], "experts": 2}, "No routes of translations into 'en'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    routing = statistics_of(
        [[[1, 2, 3, 4], [1, 0, 0, 0], [1, 1, 1, 1]], [[1] * 4, [0] * 4, [1] * 4]]
    )
    with pytest.raises(ConfigError, match=message):
        plan_pruning(routing, **{"languages": ["de"], "top_k": 2, **options})


def test_checkpoints_without_experts_or_their_own_statistics_are_refused(tmp_path: Path) -> None:
    other = statistics_of(np.ones((2, 4, 6)))
    make_checkpoint(tmp_path / "whole", tiny_model(SPEC))
    make_checkpoint(tmp_path / "dense", tiny_model(tiny_spec()))
    make_checkpoint(tmp_path / "counted", tiny_model(SPEC), routing=other)
    for name, error, words in (
        ("whole", ArtifactError, r"whole has no routing.json.*fine-tune this one"),
        ("dense", ConfigError, "dense has no experts to prune"),
        ("counted", ArtifactError, r"routing.json was counted on another model"),
    ):
        with pytest.raises(error, match=words):
            prune_experts(tmp_path / name, languages=["de"], experts=2, out_dir=tmp_path / "pruned")


@pytest.mark.slow
def test_a_checkpoint_is_averaged_pruned_and_compared_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_idle_experts(SPEC, IDLE)
    whole = str(make_checkpoint(tmp_path / "whole", model, routing=count_routes(model)[0]))
    mean, pruned = str(tmp_path / "mean"), str(tmp_path / "pruned")
    options = ["--languages", "de", "fr", "--keep-mass", "1", "--out", pruned]
    assert cli.main(["checkpoint", "prune", whole, *options]) == 0
    assert "4 experts per layer keep 1.0000 of all routes" in capsys.readouterr().out
    average = ["checkpoint", "average", "--out", mean, whole]
    assert cli.main(average) == 0
    assert capsys.readouterr().out == f"{mean}: the mean of 1 checkpoint\n"
    assert cli.main(average) == cli.main(["checkpoint", "prune", whole, *options]) == 0
    assert capsys.readouterr().err.count("already done") == 2
    assert cli.main([*average, pruned]) == cli.main([*average[:-1], pruned]) == EXIT_USER_ERROR
    options[-3] = "0.9"
    assert cli.main(["checkpoint", "prune", whole, *options]) == EXIT_USER_ERROR
    assert capsys.readouterr().err.count("exists already") == 2
    assert cli.main(["checkpoint", "diff", whole, mean]) == 0
    assert capsys.readouterr().out.startswith("identical: ")
    assert cli.main(["checkpoint", "diff", whole, pruned]) == 0
    assert "model.moe.num_experts: 6 → 4" in capsys.readouterr().out.splitlines()
    assert not [name for name in names_in(tmp_path) if name[0] == "."]
