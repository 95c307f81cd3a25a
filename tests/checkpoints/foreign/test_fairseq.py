"""A state dict laid out as fairseq's is the model that another library computes of its values."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq_files import (
    LEARNED,
    POSITIONS,
    PRE_NORM,
    TIED,
    Files,
    as_fairseq,
    peer_config,
    peer_logits,
    peer_translations,
    settings,
    vocabulary_files,
    write_checkpoint,
)
from support.foreign_models import (
    LINES,
    PAIRS,
    assert_same_logits,
    logits_of,
    model_of,
    our_translations,
    spread,
)
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    FSMTConfig,
    FSMTForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
)

from pipeline import cli
from pipeline.artifacts.tokenizer import load_tokenizer
from pipeline.checkpoints.importing import open_foreign
from pipeline.errors import EXIT_USER_ERROR, CheckpointError


@dataclass(frozen=True)
class Kind:
    """A Transformer of fairseq, and who else computes it."""

    config: Any
    model: Any
    ours: dict[str, Any]
    theirs: dict[str, Any]


KINDS = {
    "pre-norm, sinusoids": Kind(
        M2M100Config, M2M100ForConditionalGeneration, TIED | PRE_NORM, {"scale_embedding": True}
    ),
    "mRASP2": Kind(
        MBartConfig,
        MBartForConditionalGeneration,
        {**TIED, **PRE_NORM, **LEARNED, "no_scale_embedding": True, "layernorm_embedding": True},
        {"scale_embedding": False},
    ),
    "post-norm, learned positions, gelu": Kind(
        BartConfig,
        BartForConditionalGeneration,
        {**TIED, **LEARNED, "layernorm_embedding": True, "activation_fn": "gelu"},
        {"scale_embedding": True, "activation_function": "gelu"},
    ),
    "post-norm, sinusoids, output of its own": Kind(
        FSMTConfig,
        FSMTForConditionalGeneration,
        {},
        {"scale_embedding": True, "tie_word_embeddings": False},
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return vocabulary_files(tmp_path_factory.mktemp("vocabulary"))


def make_peer(kind: Kind, files: Files) -> Any:
    peer = spread(kind.model(peer_config(kind.config, size=files.size, **kind.theirs)), eos_id=2)
    if isinstance(peer, FSMTForConditionalGeneration):
        untie_output(peer)
    return peer


def untie_output(peer: Any) -> None:
    """One table for both inputs, another for the output; sinusoids, which are parameters there."""
    encoder, decoder = peer.model.encoder, peer.model.decoder
    decoder.output_projection.weight = torch.nn.Parameter(decoder.embed_tokens.weight.clone())
    decoder.embed_tokens.weight = encoder.embed_tokens.weight
    for stack in (encoder, decoder):
        stack.embed_positions.make_weight(POSITIONS + 2, encoder.embed_tokens.embedding_dim, 1)


@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_another_library_s(name: str, files: Files, tmp_path: Path) -> None:
    peer = make_peer(KINDS[name], files)
    args = settings(**KINDS[name].ours, encoder_layerdrop=0.2)  # belongs to training
    path = write_checkpoint(tmp_path / "model.pt", as_fairseq(peer), args)
    source = open_foreign(path, vocabulary=files.vocabulary)
    expected = peer_logits(peer, source.tokenizer.build(), PAIRS)
    assert_same_logits(logits_of(source, PAIRS), expected)


@pytest.fixture(scope="module")
def mrasp2(files: Files) -> Any:
    return make_peer(KINDS["mRASP2"], files)


def test_translations_are_those_of_a_library_token_for_token(
    mrasp2: Any, files: Files, tmp_path: Path
) -> None:
    args = settings(**KINDS["mRASP2"].ours)
    path = write_checkpoint(tmp_path / "model.pt", as_fairseq(mrasp2), args)
    source = open_foreign(path, vocabulary=files.vocabulary)
    tokenizer = source.tokenizer.build()
    model = model_of(source, dtype=torch.float64)
    found = our_translations(model, tokenizer, LINES, beams=5, limit=20)
    expected = peer_translations(mrasp2.double(), tokenizer, LINES, beams=5, limit=20)
    mrasp2.float()
    assert found == expected
    assert len(set(found)) > len(LINES) // 2, "sentences are told apart"


def test_a_file_is_imported_and_translated_with_on_the_command_line(
    mrasp2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = settings(**KINDS["mRASP2"].ours)
    vocabulary = vocabulary_files(
        tmp_path / "vocabulary", spelling="LANG_TOK_{}", languages=("DE", "EN", "RU")
    ).vocabulary
    path = write_checkpoint(tmp_path / "12e12d.pt", as_fairseq(mrasp2), args)
    out = tmp_path / "imported"
    named = [f"--{name}={file}" for name, file in vocabulary.files().items()]
    command = ["checkpoint", "import", str(path), *named, "--out", str(out)]
    assert cli.main(command) == 0
    assert "3 languages" in capsys.readouterr().out
    assert cli.main(command) == 0
    assert f"already done, {out} is up to date" in capsys.readouterr().err
    assert cli.main([*command, "--languages", "de", "en"]) == EXIT_USER_ERROR
    assert "exists already" in capsys.readouterr().err
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[decoding]\nbeam_size = 1\nstopping = "huggingface"\nmax_length_ratio = 0.0\n'
        "max_extra_length = 20\n"
    )
    (tmp_path / "input").write_text("\n".join(LINES), encoding="utf-8")
    with (tmp_path / "input").open() as given, (tmp_path / "output").open("w") as written:
        monkeypatch.setattr("sys.stdin", given)
        monkeypatch.setattr("sys.stdout", written)
        named = ["--checkpoint", str(out), "--recipe", str(recipe)]
        assert cli.main(["translate", *named, "--from", "en", "--to", "de"]) == 0
    tokenizer = load_tokenizer(out / "tokenizer")
    expected = peer_translations(mrasp2, tokenizer, LINES, beams=1, limit=20)
    found = (tmp_path / "output").read_text(encoding="utf-8").splitlines()
    assert found == [tokenizer.decode(tokens) for tokens in expected]


def test_a_checkpoint_without_its_vocabulary_is_one_sentence_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    command = ["checkpoint", "import", str(tmp_path / "model.pt"), "--out", str(tmp_path / "out")]
    assert cli.main(command) == EXIT_USER_ERROR
    said = capsys.readouterr().err.strip()
    assert "--dictionary" in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["nowhere.pt", "nowhere"])
def test_a_path_that_does_not_exist_is_said_to(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["checkpoint", "import", str(tmp_path / name), "--out", str(tmp_path / "out")]
    assert cli.main(command) == EXIT_USER_ERROR
    assert f"{name} does not exist. Name a checkpoint." in capsys.readouterr().err


@pytest.fixture(scope="module")
def pre_norm(files: Files) -> Any:
    return make_peer(KINDS["pre-norm, sinusoids"], files)


@pytest.mark.parametrize(
    "name",
    [
        "encoder.layers.0.self_attn.in_proj_weight",
        "decoder.layers.1.layer_norms.2.bias",
        "decoder.embed_out",
    ],
)
def test_names_of_fairseq_before_0_10_are_refused_with_the_way_to_rename_them(
    name: str, pre_norm: Any, files: Files, tmp_path: Path
) -> None:
    weights = as_fairseq(pre_norm) | {name: torch.zeros(3)}
    path = write_checkpoint(tmp_path / "old.pt", weights, settings(**TIED, **PRE_NORM))
    with pytest.raises(CheckpointError, match=f"{name}, as fairseq before 0.10 .* save it again"):
        open_foreign(path, vocabulary=files.vocabulary)


def sections(args: Namespace) -> dict[str, object]:
    return {"_name": None, "model": {"_name": "transformer", **vars(args)}, "task": {}}


def namespace_in_sections(args: Namespace) -> dict[str, object]:
    return {"common": {"seed": 1}, "model": args, "task": {"_name": "translation"}}


def nested(args: Namespace) -> dict[str, object]:
    """Settings as the dataclass of fairseq 0.12 nests them."""
    flat = vars(args)
    sides = {
        side: {
            name.removeprefix(f"{side}_"): value
            for name, value in flat.items()
            if name.startswith(f"{side}_")
        }
        for side in ("encoder", "decoder")
    }
    rest = {name: value for name, value in flat.items() if not name.startswith(tuple(sides))}
    return {"model": rest | sides, "task": None}


@pytest.mark.parametrize("form", [sections, namespace_in_sections, nested])
def test_settings_by_sections_are_those_of_a_command_line(
    form: Callable[[Namespace], dict[str, object]], pre_norm: Any, files: Files, tmp_path: Path
) -> None:
    args = settings(**TIED, **PRE_NORM)
    older = write_checkpoint(tmp_path / "args.pt", as_fairseq(pre_norm), args)
    newer = write_checkpoint(tmp_path / "cfg.pt", as_fairseq(pre_norm), None, cfg=form(args))
    expected = open_foreign(older, vocabulary=files.vocabulary)
    assert open_foreign(newer, vocabulary=files.vocabulary).spec == expected.spec


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"encoder_langtok": "src", "decoder_langtok": True}, "src-tgt"),
        ({"encoder_langtok": "tgt", "decoder_langtok": False}, "tgt"),
        ({"encoder_langtok": "src", "langtoks": {"main": ("tgt", None)}}, "tgt"),
        ({"langtoks": {"mono_dae": ("src", "tgt")}, "langtoks_specs": ["main"]}, "src-tgt"),
    ],
)
def test_tags_stand_where_the_task_put_them(
    change: dict[str, Any], wanted: str, pre_norm: Any, files: Files, tmp_path: Path
) -> None:
    args = settings(**TIED, **PRE_NORM, **change)
    path = write_checkpoint(tmp_path / "model.pt", as_fairseq(pre_norm), args)
    assert open_foreign(path, vocabulary=files.vocabulary).spec.tag_scheme == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"adaptive_softmax_cutoff": [100, 200]},
        {"cross_self_attention": True},
        {"no_token_positional_embeddings": True},
        {"quant_noise_pq": 0.1},
        {"activation_fn": "gelu_fast"},
        {"decoder_attention_heads": 4},
        {"decoder_ffn_embed_dim": 64},
        {"decoder_embed_dim": 8},
        {"decoder_normalize_before": False},
        {"decoder_learned_pos": True},
        {"encoder_layers_to_keep": "0,1"},
        {"encoder_langtok": "tgt", "decoder_langtok": True},
        {"task": "translation_from_pretrained_bart"},
        {"encoder_layers": -1},
        {"encoder_attention_heads": 3, "decoder_attention_heads": 3},
    ],
)
def test_what_our_model_lacks_is_refused_by_its_name(
    change: dict[str, Any], pre_norm: Any, files: Files, tmp_path: Path
) -> None:
    args = settings(**(TIED | PRE_NORM | change))
    path = write_checkpoint(tmp_path / "model.pt", as_fairseq(pre_norm), args)
    name = next(iter(change)).replace("encoder_attention_heads", "num_heads")
    with pytest.raises(CheckpointError, match=name) as caught:
        open_foreign(path, vocabulary=files.vocabulary)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("encoder.embed_tokens.weight", 1.0, "share_all_embeddings"),
        ("decoder.version", -2.0, r"decoder\.version"),
    ],
)
def test_embeddings_that_differ_and_stacks_without_a_final_norm_are_refused(
    name: str, value: float, words: str, pre_norm: Any, files: Files, tmp_path: Path
) -> None:
    weights = as_fairseq(pre_norm)
    weights[name] = weights[name] + value
    path = write_checkpoint(tmp_path / "model.pt", weights, settings(**TIED, **PRE_NORM))
    with pytest.raises(CheckpointError, match=words):
        open_foreign(path, vocabulary=files.vocabulary)


def test_missing_and_unknown_tensors_are_named(pre_norm: Any, files: Files, tmp_path: Path) -> None:
    weights = as_fairseq(pre_norm)
    weights["encoder.layers.0.adapter.weight"] = weights.pop("encoder.layers.0.fc1.weight")
    path = write_checkpoint(tmp_path / "model.pt", weights, settings(**TIED, **PRE_NORM))
    with pytest.raises(CheckpointError, match="adapter") as caught:
        open_foreign(path, vocabulary=files.vocabulary)
    assert "encoder.layers.0.feed_forward.up.weight" in str(caught.value)


def test_settings_that_are_missing_are_named(pre_norm: Any, files: Files, tmp_path: Path) -> None:
    args = settings(**TIED, **PRE_NORM)
    del args.encoder_layers
    for given, words in ((args, "encoder_layers = no such"), (None, "no settings of a model")):
        path = write_checkpoint(tmp_path / "model.pt", as_fairseq(pre_norm), given)
        with pytest.raises(CheckpointError, match=words):
            open_foreign(path, vocabulary=files.vocabulary)


def test_a_file_needs_its_vocabulary(pre_norm: Any, files: Files, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model.pt", as_fairseq(pre_norm), settings(**TIED))
    with pytest.raises(CheckpointError, match="--dictionary"):
        open_foreign(path)
    (tmp_path / "config.json").write_text('{"model_type": "m2m_100"}')
    with pytest.raises(CheckpointError, match="Leave out --dictionary"):
        open_foreign(tmp_path, vocabulary=files.vocabulary)
