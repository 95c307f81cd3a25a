"""Checkpoints of models with language modules: folded, pruned, grown from a plain one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exported_models import own_checkpoint
from support.stored_checkpoints import byte_spec, make_checkpoint, set_to, stored, weights_of
from support.tiny_models import EVERYWHERE, random_batch, tiny_model, tiny_spec
from torch import Tensor

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.places import replaced_dir
from pipeline.batching.batch import Batch
from pipeline.checkpoints.assembly.rules import PARTS, AssemblyPlan
from pipeline.checkpoints.assembly.writing import RECEIPT_FILE
from pipeline.checkpoints.checkpoint import load_model, own_source
from pipeline.checkpoints.exporting import FORMATS, Export, Format, export_checkpoint
from pipeline.checkpoints.pruning import fold_checkpoint, prune_languages
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.config.settings import Route
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Translator
from pipeline.errors import EXIT_USER_ERROR, CheckpointError, ConfigError
from pipeline.model.parameters import named_slices, num_parameters
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer

KINDS: dict[str, dict[str, Any]] = {
    "low_rank": {"kind": "low_rank", "rank": 3, "within": EVERYWHERE, "shared": True},
    "language_experts": {"kind": "language_experts", "shared": True},
    "clsr": {"kind": "clsr", "gate_width": 4, "shared_projection": "none"},
}


def spec_of(kind: str, **changes: object) -> ModelSpec:
    return byte_spec(model={"language_modules": KINDS[kind] | changes})


def trained_model(kind: str) -> Transformer:
    model = tiny_model(spec_of(kind)).eval()
    torch.manual_seed(1)
    for entry in named_slices(model):
        if entry.name.endswith(".flat"):
            entry.value.normal_(0, 0.3)
    return model


def logits(model: Transformer, batch: Batch, route: Route = "specific") -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(batch, route=route).logits_LV
    return found


def loaded(directory: Path) -> Transformer:
    return load_model(open_artifact(directory, kind="checkpoint"))


# ---------------------------------------------------------------- fold


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["low_rank", "language_experts"])
def test_a_folded_checkpoint_computes_the_shared_route(kind: str, tmp_path: Path) -> None:
    model = trained_model(kind)
    make_checkpoint(tmp_path / "whole", model)
    folded = fold_checkpoint(tmp_path / "whole", out_dir=tmp_path / "folded")
    plain = byte_spec()
    assert loaded(tmp_path / "folded").spec == plain
    assert set(stored(tmp_path / "folded")) == {e.name for e in named_slices(tiny_model(plain))}
    assert (folded.before, folded.after) == (num_parameters(model.spec), num_parameters(plain))
    assert folded.matrices == (2 * (4 + 2) + 2 * (8 + 2) if kind == "low_rank" else 0)
    batch = random_batch(plain, sentences=6, seed=1)
    found, expected = logits(loaded(tmp_path / "folded"), batch), logits(model, batch, "shared")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(found, logits(model, batch), atol=1e-2)


def test_fold_and_prune_are_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = str(make_checkpoint(tmp_path / "whole", trained_model("low_rank")))
    fold = ["checkpoint", "fold", whole, "--out", str(tmp_path / "folded")]
    prune = ["checkpoint", "prune", whole, "--languages", "de", "fr"]
    assert cli.main(fold) == 0
    assert cli.main([*prune, "--out", str(tmp_path / "pruned")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "32 matrices folded" in said[0]
    assert "the modules of de fr" in said[1]
    out = tmp_path / "folded"
    replaced_dir(out).mkdir()  # as if killed before it removed an earlier model
    assert cli.main(fold) == cli.main([*prune, "--out", str(tmp_path / "pruned")]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"mmnmt checkpoint fold: already done, {out} is up to date."
    assert not replaced_dir(out).exists()
    assert cli.main([*prune[:-1], "--out", str(tmp_path / "pruned")]) == EXIT_USER_ERROR
    (out / "model.json").write_text("{}", encoding="utf-8")
    assert cli.main(fold) == EXIT_USER_ERROR
    said = capsys.readouterr().err.splitlines()
    assert "exists already" in said[0]
    assert f"{out / 'model.json'} has 2 bytes" in said[1]
    assert cli.main(["checkpoint", "inspect", str(tmp_path / "pruned")]) == 0
    assert "language modules" in capsys.readouterr().out


# ---------------------------------------------------------------- prune


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kept_languages_translate_as_before_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    model = trained_model(kind)
    whole = make_checkpoint(tmp_path / "whole", model)
    prune_languages(whole, languages=["ru", "de"], out_dir=tmp_path / "pruned")
    names = set(stored(whole)) - set(stored(tmp_path / "pruned"))
    assert names
    assert all({"en", "fr"} & set(name.split(".")) for name in names)
    assert not any({"en", "fr"} & set(name.split(".")) for name in stored(tmp_path / "pruned"))
    batch = random_batch(model.spec, sentences=6, seed=1)
    codes = model.spec.languages
    of_kept = {
        "source_language_B": torch.full_like(batch.source_language_B, codes.index("de")),
        "target_language_B": torch.full_like(batch.target_language_B, codes.index("ru")),
    }
    batch = Batch(**{**vars(batch), **of_kept})
    assert torch.equal(logits(loaded(tmp_path / "pruned"), batch), logits(model, batch))


def test_routes_and_modules_that_a_checkpoint_lacks_are_named(tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path / "whole", trained_model("low_rank"))
    prune_languages(whole, languages=["deu", "rus_Cyrl"], out_dir=tmp_path / "pruned")
    pruned = open_artifact(tmp_path / "pruned", kind="checkpoint")
    with pytest.raises(ConfigError, match=r"no language module for fr. .* or use the shared"):
        Translator(pruned, DecodingConfig()).language("fr")
    Translator(pruned, DecodingConfig(route="shared")).language("fr")
    plain = make_checkpoint(tmp_path / "plain", tiny_model(byte_spec()))
    with pytest.raises(ConfigError, match="has one route"):
        Translator(open_artifact(plain, kind="checkpoint"), DecodingConfig(route="shared"))
    clsr = make_checkpoint(tmp_path / "clsr", trained_model("clsr"))
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="no route that all languages share"):
        fold_checkpoint(clsr, out_dir=out)
    with pytest.raises(ConfigError, match=r"no module for the language 'xx'\. Choose"):
        prune_languages(whole, languages=["xx"], out_dir=out)
    experts = make_checkpoint(tmp_path / "moe", tiny_model(tiny_spec(moe=MoEConfig(num_experts=2))))
    fix = r"name a checkpoint that has \(model\.language_modules\)"
    for directory, more in (
        (plain, ""),
        (experts, ", or pass --experts or --keep-mass to prune its experts"),
    ):
        with pytest.raises(ConfigError, match=rf"no language modules to prune: {fix}{more}\.$"):
            prune_languages(directory, languages=["de"], out_dir=out)


# ---------------------------------------------------------------- grow


def growing(directory: Path, spec: ModelSpec) -> AssemblyPlan:
    source = own_source(open_artifact(directory, kind="checkpoint"))
    return AssemblyPlan(spec, dict.fromkeys(PARTS, source), UpcyclingConfig(), source.tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_grown_language_modules_leave_the_function_as_it_was(kind: str, tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", tiny_model(byte_spec()))
    spec = spec_of(kind)
    plan = growing(dense, spec)
    rules = {entry.rule for entry in plan.assignments}
    assert rules == {"copied", "language of dense" if kind == "language_experts" else "fresh"}
    grown = tiny_model(spec, seed=9)
    for entry, value in zip(named_slices(grown), plan.values(plan.assignments), strict=True):
        entry.value.copy_(value)
    batch = random_batch(spec, sentences=6, seed=1)
    expected = logits(tiny_model(byte_spec()), batch)
    for route in ("specific", "shared") if kind != "clsr" else ("specific",):
        torch.testing.assert_close(logits(grown, batch, route), expected, rtol=0, atol=1e-6)


def test_shared_maps_of_clsr_grow_from_the_output_they_replace(tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", tiny_model(byte_spec()))
    plan = growing(dense, spec_of("clsr", shared_projection="per_sublayer"))
    origins = {entry.target: (entry.source, entry.rule) for entry in plan.assignments}
    layer = "decoder.layers.1"
    assert origins[f"{layer}.cross_attention_routing.shared.weight"] == (
        f"{layer}.cross_attention.output.weight",
        "language of dense",
    )
    assert origins[f"{layer}.feed_forward_routing.shared.weight"] == (None, "fresh")


@pytest.mark.parametrize("kind", ["low_rank", "language_experts"])
def test_a_declaration_grows_language_modules_with_a_receipt(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("dense"), tiny_model(byte_spec()))
    modules = "\n".join(f"{name} = {json.dumps(value)}" for name, value in KINDS[kind].items())
    Path("grown.toml").write_text(f"{DECLARED}\n[model.language_modules]\n{modules}\n")
    assert cli.main(["upcycle", "grown.toml", "--out", "grown"]) == 0
    made = open_artifact(Path("grown"), kind="checkpoint")
    receipt = made.read_json(RECEIPT_FILE)
    rules = {entry["target"]: entry["rule"] for entry in receipt["tensors"]}
    assert set(rules) == {entry.name for entry in named_slices(tiny_model(spec_of(kind)))}
    assert set(rules.values()) == {
        "copied",
        "language of dense" if kind == "language_experts" else "fresh",
    }
    assert receipt["function_check"]["largest"] < 1e-6
    with pytest.raises(CheckpointError, match="would be lost"):
        _ = growing(Path("grown"), byte_spec()).assignments


DECLARED = """
[sources]
dense = "dense"
[parts]
embeddings = "dense"
encoder = "dense"
decoder = "dense"
"""


# ---------------------------------------------------------------- other tools


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_averaged_and_compared_module_by_module(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained_model(kind)
    name = next(n for n in weights_of(model) if ".ru." in n and n.endswith((".vertical", "weight")))
    value = weights_of(model)[name]
    first = str(make_checkpoint(tmp_path / "first", model))
    second = str(make_checkpoint(tmp_path / "second", model, change=set_to(name, value + 2)))
    mean = str(tmp_path / "mean")
    assert cli.main(["checkpoint", "average", first, second, "--out", mean]) == 0
    found = stored(tmp_path / "mean")
    assert set(found) == set(weights_of(model))
    torch.testing.assert_close(found[name], value + 1, rtol=0, atol=1e-6)
    other = next(n for n in found if n.endswith(name.partition(".ru.")[2]) and ".de." in n)
    torch.testing.assert_close(found[other], weights_of(model)[other], rtol=0, atol=1e-7)
    capsys.readouterr()
    assert cli.main(["checkpoint", "diff", first, mean]) == 0
    said = capsys.readouterr().out
    assert name in said
    assert other not in said


@pytest.mark.parametrize(
    ("kind", "to"),
    [*(("low_rank", to) for to in FORMATS), ("language_experts", FORMATS[0]), ("clsr", FORMATS[0])],
)
def test_an_export_names_the_way_to_fold_modules(kind: str, to: Format, tmp_path: Path) -> None:
    whole = own_checkpoint(tmp_path / "whole", language_modules=KINDS[kind]).origin
    with pytest.raises(CheckpointError, match=r"\(model.language_modules\)") as caught:
        export_checkpoint(whole, out_dir=tmp_path / "out", export=Export(to=to))
    assert not (tmp_path / "out").exists()
    command = re.search("`mmnmt (checkpoint fold .*) --out DIR`", str(caught.value))
    if kind == "clsr":  # has no shared route, so that nothing can be folded
        assert command is None
        assert "model.language_modules.shared" in str(caught.value)
    else:
        assert command is not None
        assert cli.main([*command[1].split(), "--out", str(tmp_path / "folded")]) == 0
        assert loaded(tmp_path / "folded").spec.model.language_modules is None
        if to == "hf-m2m100":
            export_checkpoint(tmp_path / "folded", out_dir=tmp_path / "out", export=Export(to=to))
