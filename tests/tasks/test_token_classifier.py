"""XLM-R in our code against Hugging Face's, and what a folder must hold to be read as one."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_xlmr import TOKENS, pieces_model, randomize, tiny_config, write_xlmr
from torch import Tensor
from transformers import (
    XLMRobertaForQuestionAnswering,
    XLMRobertaForTokenClassification,
    XLMRobertaTokenizer,
)

from pipeline.batching.batch import Labelled, collate_spans, collate_tags
from pipeline.errors import CheckpointError, ConfigError
from pipeline.extensions.language_modules import LowRankConfig
from pipeline.extensions.tasks import TasksConfig
from pipeline.extensions.tasks.token_classifier import (
    HeadKind,
    TaskFiles,
    TaskSpec,
    TokenClassifier,
)
from pipeline.extensions.tasks.xlmr import BOS, EOS, PAD, PIECES_FILE, Pieces, Pretrained
from pipeline.model.sublayer import Regularization

TAGS = ("O", "B-PER", "I-PER")
SENTENCES = [[0, 5, 9, 11, 2], [0, 7, 2], [0, 4, 4, 13, 12, 8, 2]]
NOTHING = np.zeros(0, dtype=np.int64)


def built(folder: Path, head: HeadKind, *, seed: int = 1) -> TokenClassifier:
    pretrained = Pretrained(folder)
    spec = TaskSpec(
        head=head,
        encoder=pretrained.spec(("de", "en")),
        tags=TAGS if head == "tagger" else (),
        tasks=TasksConfig(),
    )
    model = spec.build()
    pretrained.fill(model, spec.encoder, seed=seed)
    return model.eval()


def saved_with_head(folder: Path, kind: type, *, safe: bool) -> torch.nn.Module:
    """Hugging Face's model with a head, saved in a folder with its pieces."""
    model = pieces_model([" ".join(TOKENS)] * 20)
    folder.mkdir()
    (folder / PIECES_FILE).write_bytes(model)
    torch.manual_seed(3)
    num_labels = len(TAGS) if kind is XLMRobertaForTokenClassification else 2
    config = tiny_config(Pieces(model, origin=folder).size, num_labels=num_labels)
    theirs: torch.nn.Module = kind(config).eval()
    randomize(theirs)
    theirs.save_pretrained(folder, safe_serialization=safe)  # type: ignore[operator]
    return theirs


def padded() -> tuple[Tensor, Tensor]:
    ids = torch.full((len(SENTENCES), max(map(len, SENTENCES))), PAD)
    for row, sentence in enumerate(SENTENCES):
        ids[row, : len(sentence)] = torch.tensor(sentence)
    return ids, (ids != PAD).long()


def set_head(model: TokenClassifier, theirs: torch.nn.Linear) -> None:
    with torch.no_grad():
        model.head.weight.copy_(theirs.weight)
        model.head.bias.copy_(theirs.bias)


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_a_taggers_logits_are_hugging_faces(tmp_path: Path, safe: bool) -> None:
    theirs = saved_with_head(tmp_path / "xlmr", XLMRobertaForTokenClassification, safe=safe)
    ours = built(tmp_path / "xlmr", "tagger")
    set_head(ours, theirs.classifier)  # type: ignore[arg-type]
    rows = [np.arange(1, len(one) - 1) for one in SENTENCES]
    batch = collate_tags(
        [Labelled(np.array(s), r, r * 0) for s, r in zip(SENTENCES, rows, strict=True)], [0, 1, 0]
    )
    ids, mask = padded()
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask).logits
        found = ours(batch).logits_LV
    wanted = torch.cat([expected[row, r] for row, r in enumerate(rows)])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_readers_logits_are_hugging_faces(tmp_path: Path) -> None:
    theirs = saved_with_head(tmp_path / "xlmr", XLMRobertaForQuestionAnswering, safe=True)
    ours = built(tmp_path / "xlmr", "reader")
    set_head(ours, theirs.qa_outputs)  # type: ignore[arg-type]
    labels = np.zeros(2, dtype=np.int64)
    batch = collate_spans([Labelled(np.array(s), NOTHING, labels) for s in SENTENCES], [1, 0, 0])
    ids, mask = padded()
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask)
        starts, ends = ours(batch).logits_LV.chunk(2)
    real = mask.bool()
    torch.testing.assert_close(starts[real], expected.start_logits[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ends[real], expected.end_logits[real], rtol=1e-5, atol=1e-5)
    assert (starts[~real] < -1e30).all(), "padding is never the place of an answer"


@pytest.mark.parametrize("head", ["tagger", "reader"])
def test_both_routes_of_fuse_distillation_draw_different_numbers(
    tmp_path: Path, head: HeadKind
) -> None:
    """Before training, they compute the same but for dropout."""
    write_xlmr(tmp_path / "xlmr")
    pretrained = Pretrained(tmp_path / "xlmr")
    encoder = pretrained.spec(("de", "en"), LowRankConfig(rank=2, shared=True))
    spec = TaskSpec(head=head, encoder=encoder, tags=TAGS, tasks=TasksConfig())
    model = spec.build(regularization=Regularization(dropout=0.5))
    pretrained.fill(model, encoder, seed=1)
    labels = np.array([1, 2])
    examples = [Labelled(np.array(one), np.array([1, 2]), labels) for one in SENTENCES]
    collate = collate_tags if head == "tagger" else collate_spans
    batch = collate(examples, [0, 1, 0]).keyed(7)
    specific, again, shared = (
        model.train()(batch, route=route).logits_LV for route in ("specific", "specific", "shared")
    )
    assert torch.equal(specific, again)
    assert not torch.allclose(specific, shared, rtol=0.01)
    specific, shared = (
        model.eval()(batch, route=route).logits_LV for route in ("specific", "shared")
    )
    torch.testing.assert_close(specific, shared)


def test_pieces_are_numbered_as_hugging_faces_tokenizer_numbers_them(tmp_path: Path) -> None:
    model = pieces_model([*TOKENS, "größer als один"] * 20)
    (tmp_path / PIECES_FILE).write_bytes(model)
    theirs = XLMRobertaTokenizer(str(tmp_path / PIECES_FILE))
    ours = Pieces(model, origin=tmp_path)
    for text in ("Anna lives in Bonn", "größer als один", "  two  spaces ", "unseen ☃ 漢字", ""):
        assert [BOS, *ours.encode(text).tolist(), EOS] == theirs(text)["input_ids"]
    assert ours.size == len(theirs)


def test_a_head_starts_from_its_seed_and_the_encoder_from_the_folder(tmp_path: Path) -> None:
    write_xlmr(tmp_path / "xlmr")
    one, same, other = (built(tmp_path / "xlmr", "tagger", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)
    assert torch.equal(one.embedding.weight, other.embedding.weight)
    assert one.head.weight.std().item() == pytest.approx(0.02, rel=0.4)


def broken(folder: Path, **config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model_type": "bert"}, "type bert, and tasks are trained on an XLM-R"),
        ({"model_type": None}, "tasks are trained on an XLM-R"),
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps = 1e-12"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"vocab_size": 9}, "vocab_size 9"),
        ({"num_attention_heads": 3}, "describes no valid model"),
        ({"num_hidden_layers": 0}, "describes no valid model"),
        ({"num_hidden_layers": 3}, "no tensor encoder.layer.2"),
        ({"intermediate_size": 40}, "of the shape .*config.json describes"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
    ],
    ids=str,
)
def test_a_folder_that_is_no_such_xlm_r_is_refused(
    tmp_path: Path, config: dict[str, object], complaint: str
) -> None:
    folder = broken(write_xlmr(tmp_path / "xlmr"), **config)
    with pytest.raises(CheckpointError, match=complaint):
        built(folder, "tagger")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    path = write_xlmr(tmp_path / "xlmr") / "model.safetensors"
    tensors = load_file(path)
    tensors["encoder.layer.1.output.dense.weight"][0, 0] = value
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"not finite numbers.* or fetch this one again"):
        built(tmp_path / "xlmr", "tagger")


def test_a_folder_without_weights_or_pieces_is_refused(tmp_path: Path) -> None:
    folder = write_xlmr(tmp_path / "xlmr")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        built(folder, "tagger")
    (folder / PIECES_FILE).write_bytes(b"no model")
    with pytest.raises(CheckpointError, match="is not a SentencePiece model"):
        built(folder, "tagger")
    (folder / PIECES_FILE).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        built(folder, "tagger")


@pytest.mark.parametrize("name", ["", "config.json", "nowhere"])
def test_what_is_no_folder_of_a_model_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_xlmr(tmp_path / "xlmr")
    if not name:  # as the folder of a trained tagger
        (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"is no folder with config\.json\. Name the folder"):
        built(folder / name, "tagger")


def test_pickled_weights_that_cannot_be_read_are_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = write_xlmr(tmp_path / "xlmr", safe=False)
    path = folder / "pytorch_model.bin"
    torch.save({"a": torch.nn.Linear(2, 2)}, path)
    with pytest.raises(CheckpointError, match=r"torch\.save\(model\.state_dict\(\), FILE\)"):
        built(folder, "tagger")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(CheckpointError, match="only a pointer of Git LFS"):
        built(folder, "tagger")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match="has an adapter"):
        built(folder, "tagger")


FINDERS = [
    pytest.param(TaskFiles.entities, "{}/train.tsv", id="entities"),
    pytest.param(TaskFiles.questions, "made.{}.train.json", id="questions"),
]
"""How files of a task are found, and the name of a file by language."""


def touched(folder: Path, name: str, spellings: tuple[str, ...]) -> list[Path]:
    paths = [folder / name.format(spelling) for spelling in spellings]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return paths


@pytest.mark.parametrize(("find", "name"), FINDERS)
def test_a_files_language_is_any_well_formed_code(
    find: Callable[[Path], TaskFiles], name: str, tmp_path: Path
) -> None:
    spellings = ("EN", "de", "es_419", "pt-BR", "srp", "uz_Cyrl_UZ", "zh-CN", "zh_Hant")
    paths = touched(tmp_path, name, spellings)
    touched(tmp_path, "{}/text", (".cache", "README"))
    touched(tmp_path, "{}/train", (".cache",))
    touched(tmp_path, "{}.json", ("infos", "train"))
    codes = ["de", "en", "es_419", "pt_BR", "srp", "uz_Cyrl_UZ", "zh_CN", "zh_Hant"]
    files = find(tmp_path)
    assert files.languages("train") == codes
    found = {files.path(code, "train") for code in codes}
    assert found == set(paths)
    wanted = ("eng", "pt_br", "ES-419", "zho_TW")
    assert files.trained_languages(wanted) == ("en", "es_419", "pt_BR", "zh_Hant")
    touched(tmp_path, name, ("pt_BR",))
    with pytest.raises(ConfigError, match="are both train of pt_BR"):
        find(tmp_path)


@pytest.mark.parametrize(("find", "name"), FINDERS)
@pytest.mark.parametrize("spelling", ["zh-classical", "map-bms", "German"])
def test_a_file_of_a_split_and_of_no_language_is_refused(
    find: Callable[[Path], TaskFiles], name: str, spelling: str, tmp_path: Path
) -> None:
    path, _ = touched(tmp_path, name, (spelling, "de"))
    with pytest.raises(ConfigError) as refused:
        find(tmp_path)
    assert str(refused.value).startswith(f"{path}: '{spelling}' is ")
    assert ". Write " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_text_in_a_language_that_modules_leave_out_is_refused(tmp_path: Path) -> None:
    pretrained = Pretrained(write_xlmr(tmp_path / "xlmr"))
    modules = LowRankConfig(languages=("deu",))
    spec = pretrained.spec(("de",), modules)
    assert spec.languages == spec.languages_with_modules == ("de",)
    with pytest.raises(ConfigError, match=r"text in en to train on, .*languages leaves that out"):
        pretrained.spec(("de", "en"), modules)
