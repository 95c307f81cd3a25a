"""The page that adds a language to NLLB does what it says, on a small NLLB that is made here.

Its recipe and its declaration as they stand there, made shorter.
"""

import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exported_models import automatic_tokenizer
from support.foreign_families import nllb_folder
from support.foreign_models import model_of, our_logits, sentencepiece_model, their_logits
from support.forked import run_line
from support.page_commands import ROOT, named_blocks
from support.raw_trees import write
from support.served import serving
from transformers import M2M100ForConditionalGeneration, NllbTokenizer

from pipeline.artifacts.artifact import open_artifact
from pipeline.checkpoints.foreign.hugging_face_tokenizer import chosen_layout, entries_of
from pipeline.checkpoints.importing import open_model
from pipeline.cli import main

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "tutorials" / "add_a_language.md"
SHORTER = {
    "vocabulary_size = 4000": "vocabulary_size = 90",
    "tokens = 2000": "tokens = 200\nevaluation_tokens = 400",
    "micro_batches = 16": "micro_batches = 2",
    "warmup_updates = 200": "warmup_updates = 1",
    "updates = 4000": "updates = 4",
    "validate_every = 500": "validate_every = 4",
    "checkpoint_every = 500": "checkpoint_every = 4",
}
SEARCH = "\n[decoding]\nbeam_size = 2\nmax_length_ratio = 0.1\nmax_extra_length = 4\n"
WORDS = {
    "en": "old new white black big small house dog village river road forest",
    "ru": "старый новый белый чёрный большой маленький дом пёс село река путь лес",
    "myv": "ташто од ашо раужо покш вишка кудо киска веле лей ки вирь",
}
EXPORTED = {"en": "eng_Latn", "ru": "rus_Cyrl", "myv": "myv_Cyrl"}


def phrases(code: str) -> list[str]:
    """Two adjectives and a noun; line n means the same in all languages."""
    words = WORDS[code].split()
    return [
        f"{one} {other} {noun}"
        for one, other in itertools.permutations(words[:6], 2)
        for noun in words[6:]
    ]


def write_pair(folder: Path, pair: str) -> None:
    """Of 180 phrases, 174 train, 3 validate and 3 test."""
    for code in pair.split("-"):
        lines = [f"{line}\n" for line in phrases(code)]
        parts = {"train": lines[6:], "valid": lines[:3], "test": lines[3:6]}
        write(folder / pair, {f"{split}.{code}": "".join(some) for split, some in parts.items()})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every command of the page has succeeded."""
    folder = tmp_path_factory.mktemp("erzya")
    lines = [*phrases("en"), *phrases("ru")]
    pieces = sentencepiece_model(lines=lines, vocabulary=110, specials={"model_type": "bpe"})
    nllb_folder(folder / "nllb", sentencepiece=pieces)
    for pair in ("en-myv", "myv-ru", "en-ru"):
        write_pair(folder / "pairs", pair)
    for name, text in named_blocks(PAGE, "toml").items():
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        (folder / name).write_text(text, encoding="utf-8")
    with (folder / "erzya.toml").open("a", encoding="utf-8") as recipe:
        recipe.write(SEARCH)
    for line in named_blocks(PAGE, "bash")["walk"].splitlines():
        if " serve " not in line:  # the server has a test of its own
            run_line(line, folder)
    return folder


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder as the current one."""
    monkeypatch.chdir(made)
    return made


def test_rows_of_nllb_stay_and_new_text_has_pieces_of_its_own(place: Path) -> None:
    nllb, untrained = open_model(place / "nllb"), open_model(place / "runs" / "untrained")
    old, new = nllb.tokenizer.build(), untrained.tokenizer.build()
    before, after = (one.tensors.read("embedding.weight") for one in (nllb, untrained))
    assert torch.equal(after[: old.size], before)
    row = after[new.language_token_id("myv")]
    assert torch.equal(row, before[old.language_token_id("ru")])
    tokens = {
        code: [sum(map(len, one.encode_batch(phrases(code)))) for one in (old, new)]
        for code in WORDS
    }
    assert tokens["myv"][1] < tokens["myv"][0]
    assert tokens["en"][1] == tokens["en"][0]
    receipt = open_artifact(place / "runs" / "untrained", kind="checkpoint").read_json(
        "receipt.json"
    )
    assert receipt["function_check"]["largest"] < 1e-5


def test_all_directions_are_scored_before_and_after(place: Path) -> None:
    scores = open_artifact(place / "runs" / "evaluation", kind="evaluation").read_json(
        "scores.json"
    )
    found = {tuple(one["direction"].values()) for one in scores["directions"]}
    assert found == set(itertools.permutations(WORDS, 2))


@pytest.mark.parametrize("into", ["ru", "myv"])
def test_the_exported_folder_gives_our_logits_by_the_names_of_languages(
    into: str, place: Path
) -> None:
    folder, ours = place / "hf-erzya", open_model(place / "runs" / "tuned")
    options = {"src_lang": EXPORTED["en"], "tgt_lang": EXPORTED[into]}
    kind: Any = NllbTokenizer
    model_kind: Any = M2M100ForConditionalGeneration
    tokenizer, peer = kind.from_pretrained(folder, **options), model_kind.from_pretrained(folder)
    automatic = automatic_tokenizer(folder, **options)
    rows = chosen_layout(entries_of(ours.tokenizer, folder)).rows
    own = ours.tokenizer.build()
    for line in phrases(into):
        found = tokenizer(text_target=line)["input_ids"]
        expected = [own.language_token_id(into), *own.encode(line), own.eos_id]
        assert [rows[index] for index in found] == expected
        assert automatic(text_target=line)["input_ids"] == found
    pairs = list(zip(phrases("en")[3:9], phrases(into)[3:9], strict=True))
    logits = our_logits(model_of(ours), own, pairs, scheme="src-tgt", into=into)
    for mine, theirs in zip(logits, their_logits(peer.eval(), tokenizer, pairs), strict=True):
        scale = mine.abs().max()
        torch.testing.assert_close(theirs / scale, mine[:, list(rows)] / scale, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("place")
def test_the_server_of_the_page_answers_in_the_new_language() -> None:
    (line,) = (one for one in named_blocks(PAGE, "bash")["walk"].splitlines() if " serve " in one)
    program, serve, *arguments = shlex.split(line)
    assert (program, serve, arguments[-2]) == ("mmnmt", "serve", "--port")
    with serving(*arguments[:-2]) as (server, _):
        answer = server.post(q="old house", source="en", target="myv")
        assert answer.status == 200
        assert "translatedText" in answer.json()


@pytest.mark.usefixtures("place")
def test_the_same_declaration_with_experts_is_made_and_exported() -> None:
    text = Path("add_myv.toml").read_text(encoding="utf-8") + named_blocks(PAGE, "toml")["experts"]
    Path("with_experts.toml").write_text(text, encoding="utf-8")
    assert main(["upcycle", "with_experts.toml", "--out", "runs/experts"]) == 0
    assert main(["export", "runs/experts", "--to", "hf-nllb-moe", "--out", "hf-experts"]) == 0
    back = open_model(Path("hf-experts"))
    assert back.spec.model.moe is not None
    assert back.spec.model.moe.num_experts == 8
    assert back.tokenizer.description.language_token("myv") == "myv_Cyrl"


def test_text_without_english_goes_the_same_way(place: Path) -> None:
    write_pair(place / "no-english", "myv-ru")
    recipe = ["--recipe", "erzya.toml"]
    for line in (
        "import_corpus --raw no-english --out runs/ru-corpus",
        "clean --corpus runs/ru-corpus --out runs/ru-clean",
        "train_tokenizer --corpus runs/ru-clean --base runs/nllb-tokenizer --out runs/ru-tokenizer",
        "translate --corpus runs/ru-clean --checkpoint runs/tuned --out runs/ru-lines",
        "evaluate --corpus runs/ru-clean --systems after=runs/ru-lines --out runs/ru-evaluation",
    ):
        assert main([*line.split(), *recipe]) == 0, line
