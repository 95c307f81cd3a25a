"""Folders that are not what they say, or hold what our models lack: one sentence, nothing left."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.folder_listing import names_in
from support.foreign_families import (
    VOCABULARY_FILE,
    mbart50_folder,
    nllb_folder,
    nllb_moe_folder,
)
from support.foreign_models import m2m100_folder, sentencepiece_model
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model
from torch import Tensor
from transformers import (
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
)

from pipeline.checkpoints.checkpoint import open_checkpoint
from pipeline.checkpoints.importing import import_checkpoint, open_foreign, open_model
from pipeline.cli import main
from pipeline.config.settings import shown
from pipeline.errors import ArtifactError, CheckpointError
from pipeline.model.settings import MoEConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.encoder.layers.1.final_layer_norm.weight"


@pytest.fixture(scope="module")
def nllb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign") / "nllb"
    nllb_folder(folder)
    return folder


@pytest.fixture
def folder(nllb: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    copy.mkdir()
    for path in nllb.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_a_file_of_a_folder_is_answered_with_the_folder(folder: Path) -> None:
    said = refusal(folder / WEIGHTS)
    assert said.endswith(f"is part of a checkpoint of Hugging Face's. Name its folder, {folder}.")


@pytest.mark.parametrize("moe", [None, MoEConfig(num_experts=4, every=2)], ids=["dense", "moe"])
def test_a_checkpoint_of_ours_needs_no_import(moe: MoEConfig | None, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "ours", tiny_model(byte_spec(moe=moe)))
    assert "is a checkpoint of mmnmt, which needs no import" in refusal(tmp_path / "ours")


@pytest.mark.parametrize("content", ['{"name": "app", "icons": []}', "none"])
def test_a_manifest_of_other_software_in_a_folder_is_passed_over(
    content: str, folder: Path
) -> None:
    expected = open_model(folder).spec
    (folder / "manifest.json").write_text(content)
    assert open_model(folder).spec == expected
    with pytest.raises(ArtifactError, match="is a model of other software"):
        open_checkpoint(folder)


def refusal(folder: Path) -> str:
    """What an import says; it leaves nothing beside the folder."""
    before = names_in(folder.parent)
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(folder, out_dir=folder.parent / "imported")
    assert names_in(folder.parent) == before
    said = str(caught.value)
    assert "\n" not in said
    return said


def edit_json(path: Path, **changes: object) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


# ---------------------------------------------------------------- tensors


def test_tensors_that_do_not_fit_are_all_reported_with_the_number_of_parameters(
    folder: Path,
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.decoder.layers.0.fc1.bias"]
        tensors[NORM] = torch.zeros(5)
        tensors["model.encoder.layers.7.fc1.bias"] = torch.zeros(32)
        tensors["model.adapter.weight"] = torch.zeros(2)

    source = open_foreign(folder)
    expected = sum(
        torch.Size(source.tensors.shape(name)).numel() for name in source.tensors.names()
    )
    edit_tensors(folder, spoil)
    said = refusal(folder)
    assert f"holds {expected - 32 + 32 - 16 + 5:,} parameters" in said
    assert f"described there has {expected:,};" in said
    assert "unknown (1): model.adapter.weight" in said
    assert "missing (1): decoder.layers.0.feed_forward.up.bias" in said
    assert "beyond the model (1): encoder.layers.7.feed_forward.up.bias" in said
    assert f"of another shape (1): {NORM} [5] instead of [16]" in said


@pytest.mark.parametrize(("experts", "said"), [(5, "beyond the model"), (8, "missing")])
def test_another_number_of_experts_is_reported(experts: int, said: str, tmp_path: Path) -> None:
    nllb_moe_folder(tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", num_experts=experts)
    told = refusal(tmp_path / "model")
    assert said in told
    assert f"router.classifier.weight [6, 16] instead of [{experts}, 16]" in told


def test_a_tied_embedding_saved_once_or_again_under_any_of_its_names_is_one_tensor(
    folder: Path,
) -> None:
    shared = "model.shared.weight"
    names = [shared, "lm_head.weight", "model.encoder.embed_tokens.weight"]
    once = open_foreign(folder).tensors
    value = once.read("embedding.weight")

    def save_twice(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[name] = value.clone()

    edit_tensors(folder, save_twice)
    twice = open_foreign(folder).tensors
    assert twice.names() == once.names()
    assert torch.equal(twice.read("embedding.weight"), value)

    edit_tensors(folder, lambda tensors: tensors.pop(shared))
    assert torch.equal(open_foreign(folder).tensors.read("embedding.weight"), value)

    edit_tensors(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    said = refusal(folder)
    assert "lm_head.weight" in said
    assert "their values differ" in said


def test_tensors_in_several_files_are_those_of_one(folder: Path, tmp_path: Path) -> None:
    peer = nllb_folder(tmp_path / "sharded")
    (tmp_path / "sharded" / WEIGHTS).unlink()
    peer.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    one, several = open_foreign(folder).tensors, open_foreign(tmp_path / "sharded").tensors
    assert one.names() == several.names()
    for name in one.names():
        assert torch.equal(one.read(name), several.read(name)), name


@pytest.mark.parametrize("kept", [1, 3])
def test_parts_without_their_index_are_named(kept: int, folder: Path) -> None:
    whole = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    for number in range(kept):
        save_file({NORM: whole[NORM]}, folder / f"model-0000{number + 1}-of-00003.safetensors")
    said = refusal(folder)
    assert f"has model-00001-of-00003.safetensors, but no {INDEX}, which lists all files" in said


def test_an_index_of_older_weights_beside_the_whole_model_is_passed_over(folder: Path) -> None:
    """As transformers does: it writes a model in one file without removing an older index."""
    older = load_file(folder / WEIGHTS)
    save_file(older | {NORM: older[NORM] + 1}, folder / "model-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: "model-1.safetensors"}}))
    loaded = M2M100ForConditionalGeneration.from_pretrained(folder).state_dict()[NORM]
    ours = open_foreign(folder).tensors.read("encoder.layers.1.feed_forward_norm.weight")
    assert torch.equal(ours, loaded)


@pytest.mark.parametrize("name", [WEIGHTS, VOCABULARY_FILE])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    writer = os.open(folder / name, os.O_RDWR)  # with a writer, a reader goes on and fails
    os.write(writer, b"no weights")
    assert f"{name} is a pipe or a device" in refusal(folder)
    os.close(writer)


@pytest.mark.parametrize(
    "outside", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "a\0b"]
)
def test_an_index_that_names_a_file_outside_of_the_folder_is_refused(
    outside: str, folder: Path
) -> None:
    (folder / WEIGHTS).unlink()
    save_file({NORM: torch.zeros(16)}, folder.parent / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: outside}}))
    said = refusal(folder)
    assert f"names {shown(outside)}, which is no file of the folder" in said


def test_missing_and_pickled_weights_are_refused_with_a_way_out(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: "model-1.safetensors"}}))
    said = refusal(folder)
    assert "model-1.safetensors cannot be read" in said
    assert said.endswith("). Restore it from where it was published.")
    (folder / INDEX).unlink()
    said = refusal(folder)
    assert "has only pickled weights" in said
    assert said.endswith(f"(transformers: model.save_pretrained({str(folder)!r})).")


@pytest.mark.parametrize(
    "content", [b"", struct.pack("<Q", 22) + b'{"__metadata__": "a"} ', b"\xff" * 8]
)
def test_weights_that_are_no_safetensors_are_refused(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    said = refusal(folder)
    assert f"{WEIGHTS} cannot be read as safetensors" in said
    assert said.endswith("). Restore it from where it was published.")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.full((16,), torch.nan), f"{NORM} has values that are not finite numbers"),
        (torch.full((16,), torch.inf), "Name another checkpoint, or fetch this one again."),
        (torch.ones(16, dtype=torch.int8), "has the type torch.int8"),
    ],
    ids=["nan", "inf", "int8"],
)
def test_nan_inf_and_quantized_weights_are_refused(value: Tensor, said: str, folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({NORM: value}))
    assert said in refusal(folder)
    edit_json(folder / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    assert "is quantized (quantization_config: bitsandbytes)" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_float_types_stay_as_they_are(dtype: torch.dtype, folder: Path) -> None:
    value = open_foreign(folder).tensors.read("encoder.layers.1.feed_forward_norm.weight")
    edit_tensors(folder, lambda every: every.update({k: v.to(dtype) for k, v in every.items()}))
    found = open_foreign(folder).tensors.read("encoder.layers.1.feed_forward_norm.weight")
    assert torch.equal(found, value.to(dtype))


@pytest.mark.parametrize("lacks_model", [False, True])
def test_an_adapter_beside_or_without_its_model_is_refused(lacks_model: bool, folder: Path) -> None:
    """transformers loads the adapter with the model, so that the model is another one."""
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    if lacks_model:
        (folder / "config.json").unlink()
        (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    said = refusal(folder)
    assert "has an adapter (adapter_config.json), which is not read. Merge it" in said


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "t5"}, "the unknown model_type 't5'"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "nllb-moe"}, "described there has"),
        ({"pad_token_id": 0}, "pad_token_id = 0"),
        ({"eos_token_id": 5, "decoder_start_token_id": 5}, "eos_token_id = (1, 5) in its model's"),
        ({"decoder_start_token_id": 0}, "decoder_start_token_id = 0"),
        ({"decoder_ffn_dim": 64}, "encoder_ffn_dim = 32 and decoder_ffn_dim = 64; only equal"),
        ({"decoder_attention_heads": 4}, "decoder_attention_heads = 4; only equal"),
        ({"activation_function": "swish"}, "activation_function = swish (Input should be 'relu'"),
        ({"d_model": "wide"}, "d_model = wide (Input should be a valid integer"),
        ({"d_model": 15}, "width 15 is not a multiple of num_heads 2"),
        ({"vocab_size": 90}, "an id lies beyond size 90"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_is_not_this_model_s_is_refused_by_what_it_says(
    changes: dict[str, Any], said: str, folder: Path
) -> None:
    (folder / "generation_config.json").unlink()  # it would contradict some of the changes
    edit_json(folder / "config.json", **changes)
    assert said in refusal(folder)


def test_the_start_of_translations_is_what_generate_takes(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "generation_config.json", decoder_start_token_id=0)
    assert "decoder_start_token_id = 0; only 2 is supported" in refusal(folder)
    mbart50_folder(tmp_path / "mbart")
    edit_json(tmp_path / "mbart" / "config.json", decoder_start_token_id=None)
    edit_json(tmp_path / "mbart" / "generation_config.json", decoder_start_token_id=None)
    assert "decoder_start_token_id = None; only 2" in refusal(tmp_path / "mbart")
    edit_json(tmp_path / "mbart" / "generation_config.json", decoder_start_token_id=2)
    open_foreign(tmp_path / "mbart")


def test_a_bias_of_the_logits_and_mbart_25_are_refused(tmp_path: Path) -> None:
    mbart50_folder(tmp_path / "model")
    open_foreign(tmp_path / "model")
    edit_tensors(tmp_path / "model", lambda tensors: tensors["final_logits_bias"].add_(1))
    assert "final_logits_bias that is not zero" in refusal(tmp_path / "model")
    path = tmp_path / "model" / VOCABULARY_FILE
    MBartTokenizer(str(path)).save_pretrained(tmp_path / "model")
    assert "the MBartTokenizer of mBART-25" in refusal(tmp_path / "model")


@pytest.mark.parametrize("is_there", [True, False])
def test_an_mbart_50_that_names_no_tokenizer_is_none_of_mbart_25(
    is_there: bool, tmp_path: Path
) -> None:
    mbart50_folder(tmp_path)
    expected = open_foreign(tmp_path).tokenizer
    edit_json(tmp_path / "config.json", tokenizer_class=None)
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class=None)
    if not is_there:
        (tmp_path / "tokenizer_config.json").unlink()
    assert open_foreign(tmp_path).tokenizer == expected


# ---------------------------------------------------------------- vocabularies


@pytest.mark.parametrize("name", ["model.safetensors", VOCABULARY_FILE, "config.json"])
def test_a_pointer_of_git_lfs_in_place_of_a_file_is_named(name: str, folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    (folder / name).write_text(pointer)
    assert f"{name} is only a pointer of Git LFS. Run git lfs pull" in refusal(folder)


@pytest.mark.parametrize("rows", [7, 100])
def test_an_import_says_how_many_rows_of_the_embedding_have_no_token(
    rows: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_, out = ["checkpoint", "import", str(folder), "--out"], str(tmp_path / "ours")

    def unused(*more: str) -> int:
        assert main([*import_, out, *more]) == 0
        found = re.search(r"warning: ([\d,]+) of [\d,]+ rows of", capsys.readouterr().out)
        return int(found[1].replace(",", "")) if found else 0

    before = unused()
    size = json.loads((folder / "config.json").read_text())["vocab_size"]

    def lengthen(tensors: dict[str, Tensor]) -> None:
        for name, value in tensors.items():
            if len(value) == size:
                tensors[name] = torch.cat([value, value[:rows]])

    edit_tensors(folder, lengthen)
    edit_json(folder / "config.json", vocab_size=size + rows)
    assert unused("--overwrite") == before + rows


def test_a_folder_without_its_sentencepiece_model_is_refused(folder: Path) -> None:
    (folder / VOCABULARY_FILE).unlink()
    assert f"{VOCABULARY_FILE} cannot be read" in refusal(folder)
    (folder / "tokenizer.json").write_text("{}")
    said = refusal(folder)
    assert "has its vocabulary only in tokenizer.json" in said
    assert f"Put the {VOCABULARY_FILE}" in said


def test_a_vocabulary_that_is_none_or_has_specials_elsewhere_is_refused(folder: Path) -> None:
    elsewhere = sentencepiece_model(specials={"pad_id": 0, "unk_id": 3})
    for content, words in (
        (b"", f"{VOCABULARY_FILE} is not a SentencePiece model"),
        (b"no model", f"{VOCABULARY_FILE} is not a SentencePiece model"),
        (elsewhere, "begins with the pieces <pad> <s> </s>"),
    ):
        (folder / VOCABULARY_FILE).write_bytes(content)
        assert words in refusal(folder)


def test_an_empty_vocabulary_of_m2m100_is_refused(tmp_path: Path) -> None:
    m2m100_folder(tmp_path / "m2m100")
    (tmp_path / "m2m100" / VOCABULARY_FILE).write_bytes(b"")
    assert f"{VOCABULARY_FILE} is not a SentencePiece model" in refusal(tmp_path / "m2m100")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pad_token": "<unk>"}, "two pieces, specials or languages have one id"),
        ({"pad_token": "<nothing>"}, "pad Input should be a valid integer"),
        ({"tokenizer_class": "T5Tokenizer"}, "a tokenizer of the unknown class 'T5Tokenizer'"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "class 'PreTrainedTokenizerFast'"),
        ({"sp_model_kwargs": {"enable_sampling": True}}, "sp_model_kwargs"),
        ({"added_tokens_decoder": {"9999": {"content": "deu_Latn"}}}, "an id lies beyond size"),
        (
            {"added_tokens_decoder": {"70": {"content": "deu_Latn"}, "1": {"content": "eng_Latn"}}},
            "two pieces, specials or languages have one id",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_tokenizer_that_cannot_be_numbered_is_refused(
    changes: dict[str, Any], said: str, folder: Path
) -> None:
    edit_json(folder / "tokenizer_config.json", **changes)
    assert said in refusal(folder)


@pytest.mark.parametrize(
    ("make", "kind"), [(nllb_folder, NllbTokenizer), (m2m100_folder, M2M100Tokenizer)]
)
def test_words_that_were_added_to_a_vocabulary_are_refused(
    make: Callable[[Path], Any], kind: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make(folder)
    tokenizer = kind.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<formal>"]})
    tokenizer.save_pretrained(folder)
    open_foreign(folder)  # text that spells out a special token is text here
    tokenizer.add_tokens(["Satz"])
    assert "Satz" in tokenizer.tokenize("Das ist ein Satz.")
    tokenizer.save_pretrained(folder)
    assert "has the added token 'Satz'" in refusal(folder)
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder={})  # an older library's
    assert "has the added token 'Satz'" in refusal(folder)


def test_special_ids_are_read_from_the_folder(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    added = json.loads(path.read_text())["added_tokens_decoder"]
    added["0"], added["2"] = added["2"], added["0"]
    edit_json(path, added_tokens_decoder=added)
    theirs = NllbTokenizer.from_pretrained(folder)
    said = refusal(folder)
    assert (
        "eos_token_id = (1, 2) in its model's configuration, but its tokenizer has (1, 0)" in said
    )
    edit_json(folder / "config.json", eos_token_id=0, bos_token_id=2, decoder_start_token_id=0)
    edit_json(folder / "generation_config.json", decoder_start_token_id=0)
    ours = open_foreign(folder).tokenizer.build()
    specials = [ours.bos_id, ours.pad_id, ours.eos_id, ours.unk_id]
    assert specials == theirs.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>"])
    assert (ours.eos_id, ours.bos_id) == (0, 2)


@pytest.mark.parametrize("name", ["NllbTokenizer", "NllbTokenizerFast"])
def test_the_model_s_configuration_may_name_the_tokenizer(name: str, folder: Path) -> None:
    tokens = NllbTokenizer.from_pretrained(folder).get_added_vocab()
    edit_json(folder / "tokenizer_config.json", tokenizer_class=None)
    assert "tokenizer_config.json names no tokenizer_class, so the kind of" in refusal(folder)
    (folder / "tokenizer_config.json").unlink()
    assert "tokenizer_config.json is missing, so the kind of the tokenizer is" in refusal(folder)
    edit_json(folder / "config.json", tokenizer_class=name)
    ours = open_foreign(folder).tokenizer.build()
    assert ours.language_token_id("de") == tokens["deu_Latn"]
