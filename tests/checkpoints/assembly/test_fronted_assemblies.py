"""Assemblies with a front: bodies of subword models become byte models, dense ones get experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpora import bytes_of, writing
from support.exported_models import own_checkpoint
from support.fronted_models import FRONTS, fronted_byte_spec
from support.stored_checkpoints import byte_spec, make_checkpoint, stored
from support.tiny_models import random_batch, tiny_model

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.checkpoints.checkpoint import load_model, read_spec, read_tokenizer
from pipeline.cli import main
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import marks_of_vocabulary

pytestmark = pytest.mark.slow

MOE = MoEConfig(num_experts=4, every=2)

FROM_SUBWORDS = """
tokenizer = "bytes"
[sources]
subwords = "subwords"
[parts]
embeddings = "fresh"
encoder = "subwords"
decoder = "subwords"
[model]
front = {front}
"""
EXPERTS = """
[sources]
dense = "dense"
[parts]
embeddings = "dense"
encoder = "dense"
decoder = "dense"
[experts]
num_experts = 4
every = 2
decoder_router = "{router}"
[upcycling]
mask_ratio = 0.0
"""
TABLES = {
    "msc": '{ kind = "msc", kernels = [0, 3, 5, 7] }',
    "msha": '{ kind = "msha", scales = [0, 3] }',
    "ada-msha +lid": '{ kind = "ada_msha", language_vector = true, max_scale = 4 }',
    "ncf": '{ kind = "ncf" }',
    "wsf": '{ kind = "wsf", layers = 1 }',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def byte_tokenizer(path: Path, languages: tuple[str, ...]) -> None:
    description = bytes_of(languages)
    with writing(path, "tokenizer", "train_tokenizer") as writer:
        TokenizerFiles(description).write(writer.directory)


def made_of(text: str) -> dict[str, Any]:
    Path("assembly.toml").write_text(text, encoding="utf-8")
    assert main(["upcycle", "assembly.toml", "--out", "made"]) == 0
    entries = open_artifact(Path("made"), kind="checkpoint").read_json("receipt.json")["tensors"]
    return {entry["target"]: entry for entry in entries}


@pytest.mark.parametrize("front", TABLES)
def test_the_body_of_a_subword_model_becomes_a_byte_model_with_a_fresh_front(
    folder: Path, front: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own_checkpoint(folder / "subwords")
    byte_tokenizer(folder / "bytes", ("de", "en", "fr"))
    receipt = made_of(FROM_SUBWORDS.format(front=TABLES[front]))
    printed = capsys.readouterr().out
    before, after = stored(folder / "subwords"), stored(folder / "made")
    fresh = {name for name, entry in receipt.items() if entry["rule"] == "fresh"}
    of_front = {name for name in after if name.startswith("front.")}
    assert fresh == {"embedding.weight"} | of_front
    for name in set(after) - fresh:
        assert receipt[name]["rule"] == "copied"
        assert torch.equal(after[name], before[name]), name
    made = open_artifact(Path("made"), kind="checkpoint")
    spec, tokenizer = read_spec(made), read_tokenizer(made)
    assert tokenizer.decode(tokenizer.encode("Sätze")) == "Sätze"
    assert spec.vocabulary_size == 4 + 256 + 3
    assert spec.model.front.kind == FRONTS[front]["kind"]
    marks = marks_of_vocabulary(spec.model, tokenizer)
    assert all(getattr(spec, name) == value for name, value in marks.items())
    assert "not used of" in printed, "its embeddings stay behind"
    assert ("front" in printed.partition("tensors:")[0]) == bool(of_front)
    output = load_model(made).eval()(random_batch(spec, sentences=2, seed=1))
    assert output.logits_LV.isfinite().all()


@pytest.mark.parametrize(
    ("front", "router"),
    [
        *((front, "token") for front in ("ada-msha", "ncf", "wsf", "converter layers")),
        *((front, "language_group") for front in ("ada-msha +lid", "converter layers")),
    ],
)
def test_a_dense_model_with_a_front_gets_experts(folder: Path, front: str, router: str) -> None:
    if front == "converter layers":
        spec = fronted_byte_spec({"kind": "subwords"}, model={"converter_layers": 1})
    else:
        spec = fronted_byte_spec(FRONTS[front])
    model = tiny_model(spec)
    make_checkpoint(folder / "dense", model)
    text = EXPERTS.format(router=router)
    if router == "language_group":
        with writing(folder / "groups", "groups", "group_languages") as writer:
            numbers = {code: number % 2 for number, code in enumerate(model.spec.languages)}
            writer.write_json("groups.json", {"groups": numbers})
        text = 'groups = "groups"\n' + text
    receipt = made_of(text)
    before, after = stored(folder / "dense"), stored(folder / "made")
    for name in after:
        if name.startswith("front."):
            assert receipt[name]["rule"] == "copied"
            assert torch.equal(after[name], before[name]), name
    fresh = {name for name, entry in receipt.items() if entry["rule"] == "fresh"}
    assert fresh
    assert all(".feed_forward.router." in name for name in fresh)
    made = open_artifact(Path("made"), kind="checkpoint")
    assert made.read_json("receipt.json")["function_check"]["largest"] < 1e-5
    batch = random_batch(model.spec, sentences=3, seed=2)
    found = load_model(made).eval()(batch).logits_LV
    torch.testing.assert_close(found, model.eval()(batch).logits_LV, rtol=1e-4, atol=1e-5)


def test_experts_of_a_model_with_a_front_can_be_doubled(folder: Path) -> None:
    """Ada-MSHA's own experts, of which there are five, are not counted among them."""
    spec = fronted_byte_spec(FRONTS["ada-msha"], moe=MOE.model_copy(update={"num_experts": 2}))
    make_checkpoint(folder / "dense", tiny_model(spec))
    receipt = made_of(EXPERTS.format(router="token"))
    rules = {entry["rule"] for name, entry in receipt.items() if name.startswith("front.")}
    assert rules == {"copied"}
    assert "rows of more experts" in {entry["rule"] for entry in receipt.values()}


def test_the_language_vectors_follow_the_tokens_of_a_language_more(folder: Path) -> None:
    model = tiny_model(fronted_byte_spec(FRONTS["ada-msha +lid"]))
    make_checkpoint(folder / "dense", model)
    text = EXPERTS.format(router="token").partition("[experts]")[0]
    made_of(text + '[languages]\nbe = "ru"\n')
    made = open_artifact(Path("made"), kind="checkpoint")
    spec, tokenizer = read_spec(made), read_tokenizer(made)
    assert spec.languages == ("be", *model.spec.languages)
    expected = tuple(tokenizer.language_token_id(code) for code in spec.languages)
    assert spec.language_token_ids == expected
    table = stored(folder / "made")["embedding.weight"]
    of_be, of_ru = expected[0], expected[spec.languages.index("ru")]
    assert torch.equal(table[of_be], table[of_ru])
    assert made.read_json("receipt.json")["function_check"]["largest"] < 1e-5


@pytest.mark.parametrize("case", ["lost", "words of pieces", "no front to keep"])
def test_fronts_that_cannot_be_made_are_refused(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words = {
        "lost": (FROM_SUBWORDS.format(front=TABLES["msc"]), "front.mixture"),
        "words of pieces": (
            FROM_SUBWORDS.format(front=TABLES["wsf"]).replace('"bytes"', '"subwords"'),
            "Use a vocabulary of bytes or characters",
        ),
        "no front to keep": (
            EXPERTS.format(router="token") + '[model.front]\nkind = "ncf"\n',
            "model.front",
        ),
    }[case]
    if case == "words of pieces":
        own_checkpoint(folder / "subwords")
    else:
        make_checkpoint(folder / "subwords", tiny_model(fronted_byte_spec(FRONTS["ncf"])))
        make_checkpoint(folder / "dense", tiny_model(byte_spec()))
        byte_tokenizer(folder / "bytes", ("de", "en"))
    Path("assembly.toml").write_text(text, encoding="utf-8")
    assert main(["upcycle", "assembly.toml", "--out", "made"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert ("would be lost" in error) == (case == "lost")
    assert not Path("made").exists()
