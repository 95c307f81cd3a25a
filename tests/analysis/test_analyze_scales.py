"""Scales chosen, counted by a loop over lines, tokens, heads, and queries, keys and values."""

import math
import random
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from routed_models import TEXTS, routed_checkpoint, routed_corpus
from support.corpora import make_corpus
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model

from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Direction
from pipeline.batching.batch import Packing
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Translator
from pipeline.errors import EXIT_USER_ERROR
from pipeline.extensions.analysis.analyze_scales import (
    ScaleCounter,
    count_scales,
    divergence,
    mean_scale,
)
from pipeline.extensions.byte_front_ends import AdaMshaConfig
from pipeline.extensions.byte_front_ends.ada_msha import choose_scales

PARTS = ("query", "key", "value")


@torch.inference_mode()
def choices_by_hand(translator: Translator, direction: Direction, lines: list[str]) -> Counter[int]:
    """Count the choices of the front end of a pre-norm model, vector by vector."""
    model, tokenizer = translator.model, translator.tokenizer
    front: Any = model.front
    layer: Any = model.encoder.layers[0]
    attention, heads = layer.self_attention, model.spec.model.num_heads
    tag = tokenizer.language_token_id(direction.source)
    lid_D = model.embedding.rows(torch.tensor([tag]))[0]
    found: Counter[int] = Counter()
    for line in filter(str.strip, lines):
        ids = torch.tensor([tag, *tokenizer.encode(line), tokenizer.eos_id])
        language_B = torch.zeros(1, dtype=torch.int64)
        tokens = model.tokens_of(Packing.from_lengths([len(ids)]), language_B, language_B)
        x_TD = model.encoder.enter(model.embedding(ids), tokens, model.positions_TD)
        x_TD = layer.self_attention_norm(x_TD)
        for part in PARTS:
            state_TD = getattr(attention, part)(x_TD)
            weight = front.router.weight[0]
            for t in range(len(ids)):
                for head, x_K in enumerate(state_TD[t].chunk(heads)):
                    lid = [lid_D.chunk(heads)[head]] if front.config.language_vector else []
                    logits = (weight @ torch.cat([x_K, *lid])).tolist()
                    best = sorted(range(len(logits)), key=lambda scale: -logits[scale])
                    found.update(best[: front.config.top_k])
    return found


@pytest.mark.parametrize(
    "front",
    [
        {},
        {"language_vector": False, "top_k": 1, "reading": "code"},
        {"top_k": 3},
    ],
)
def test_choices_are_those_of_a_loop_and_leave_the_model_as_it_was(
    tmp_path: Path, front: dict[str, Any]
) -> None:
    checkpoint = routed_checkpoint(tmp_path, **front)
    texts = {"de": ["Ein Satz.", "", "日本"], "en": ["A sentence.", "x", "y"]}
    corpus = make_corpus(tmp_path / "corpus", {"test": {"de-en": texts}})
    translator = Translator(checkpoint, DecodingConfig())
    directions = [Direction("de", "en"), Direction("en", "de")]
    found = count_scales(translator, corpus, directions)
    for direction, lines in zip(directions, texts.values(), strict=True):
        scales, by_hand = found[str(direction)], choices_by_hand(translator, direction, lines)
        spec = translator.model.spec.model
        top_k = spec.front.top_k  # type: ignore[attr-defined]
        assert by_hand.total() == scales["tokens"] * len(PARTS) * spec.num_heads * top_k
        expected = [by_hand[scale] / by_hand.total() for scale in range(len(scales["share"]))]
        assert scales["share"] == pytest.approx(expected, abs=1e-12)
        assert (scales["weighted_share"] == scales["share"]) == (top_k == 1)
    assert not translator.model.front.router._forward_hooks  # type: ignore[union-attr]


def test_weights_are_summed_where_their_scales_were_chosen() -> None:
    config = AdaMshaConfig(max_scale=3, top_k=2)
    logits = torch.randn(5, 3, 2, 4, generator=torch.Generator().manual_seed(1))
    counter = ScaleCounter(config)
    counter(torch.nn.Identity(), None, logits)
    scale, weight = choose_scales(logits, config)
    sums = [weight[scale == one].sum().item() for one in range(4)]
    assert counter.weight_S.tolist() == pytest.approx(sums)


def relative_entropy(one: list[float], other: list[float]) -> float:
    return sum(p * math.log2(p / q) for p, q in zip(one, other, strict=True) if p)


def test_the_divergence_is_the_mean_relative_entropy_to_the_middle_and_0_or_1_at_its_ends() -> None:
    generator = random.Random(1)
    for _ in range(20):
        rows = [[generator.choice([0.0, generator.random()]) for _ in range(5)] for _ in range(2)]
        one, other = (
            [value / sum(row) for value in row] if sum(row) else [0.2] * 5 for row in rows
        )
        middle = [(p + q) / 2 for p, q in zip(one, other, strict=True)]
        expected = (relative_entropy(one, middle) + relative_entropy(other, middle)) / 2
        assert divergence(one, other) == pytest.approx(expected, abs=1e-12)
    assert divergence([0.3, 0.7], [0.3, 0.7]) == 0
    assert divergence([1.0, 0.0], [0.0, 1.0]) == 1
    assert mean_scale([0.5, 0.0, 0.5]) == 1


# ---------------------------------------------------------------- the stage


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("scales")
    checkpoint, corpus = routed_checkpoint(folder), routed_corpus(folder)
    named = ["--checkpoint", str(checkpoint.directory), "--corpus", str(corpus.directory)]
    assert cli.main(["analyze", "scales", *named, "--out", str(folder / "out")]) == 0
    return open_artifact(folder / "out", kind="analysis")


def test_the_document_has_every_direction_and_pair(analysed: Artifact) -> None:
    document = analysed.read_json("scales.json")
    assert list(document["directions"]) == ["de-en", "en-de", "en-ru", "ru-en"]
    assert [one["lines"] for one in document["directions"].values()] == [3, 4, 2, 2]
    for found in document["directions"].values():
        assert len(found["share"]) == 4
        assert sum(found["share"]) == pytest.approx(1)
        assert found["mean"] == pytest.approx(sum(i * s for i, s in enumerate(found["share"])))
    assert list(document["pairs"]) == ["de-en", "en-ru"]
    one, other = (document["directions"][name]["share"] for name in ("de-en", "en-de"))
    assert document["pairs"]["de-en"]["divergence"] == divergence(one, other) > 0
    of_pair = TEXTS["de-en"]
    lines = [line for line in zip(of_pair["de"], of_pair["en"], strict=True) if all(line)]
    german, in_english = (sum(len(line[i].strip().encode()) for line in lines) for i in (0, 1))
    assert len(lines) < len(of_pair["de"])
    assert document["pairs"]["de-en"]["length_ratio"] == german / in_english


def test_every_pair_has_a_picture_of_both_directions(analysed: Artifact) -> None:
    for pair in ("de-en", "en-ru"):
        root = ElementTree.parse(analysed.file(f"scales-{pair}.svg")).getroot()
        classes = [one.get("class", "") for one in root.iter()]
        assert sum(one.startswith("upright") for one in classes) == 2
        names = {one.text for one in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {" → ".join(pair.split("-")), " → ".join(reversed(pair.split("-")))} <= names


def test_what_has_no_scales_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_checkpoint(tmp_path / "plain", tiny_model(byte_spec()))
    corpus = routed_corpus(tmp_path)
    routed = routed_checkpoint(tmp_path / "routed")
    empty = make_corpus(tmp_path / "empty", {"test": {"de-en": {"de": [""], "en": [" "]}}})
    for model, given, said in [
        (plain, corpus, "front end is 'subwords', which has no scales"),
        (routed.directory, empty, "are all empty"),
    ]:
        named = ["--checkpoint", str(model), "--corpus", str(given.directory)]
        assert cli.main(["analyze", "scales", *named, "--out", str(tmp_path / "out")]) == (
            EXIT_USER_ERROR
        )
        error = capsys.readouterr().err
        assert said in error
        assert error.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()
