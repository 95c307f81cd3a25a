"""CTranslate2 computes and finds with an exported model what this project does."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ctranslate2
import pytest
from sentencepiece import SentencePieceProcessor
from support.exported_models import BEYOND, HUNDRED, own_checkpoint
from support.foreign_models import LINES, PAIRS, logits_of, model_of
from support.raw_trees import unpack_stored_run

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.tokenizer import tags
from pipeline.checkpoints.checkpoint import ModelSource, own_source
from pipeline.checkpoints.exporting import Export, export_checkpoint
from pipeline.checkpoints.foreign import export_to_ctranslate2
from pipeline.checkpoints.foreign.export_to_ctranslate2 import filled_specification
from pipeline.decoding.beam_search import beam_search
from pipeline.decoding.hypotheses import Source
from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import CheckpointError, ConfigError

VARIANTS: dict[str, dict[str, Any]] = {
    "as pretrained": {},
    "gelu, not scaled": {"languages": BEYOND, "activation": "gelu", "scale_embedding": False},
    "post-norm": {"norm": "post", "positions": "learned", "embedding_norm": True},
    "target's tag, untied": {"tag_scheme": "tgt", "embedding": {"output": "untied"}},
}


class CTranslate2Rule:
    """CTranslate2's, of ``src/decoding.cc``: done when ``beam_size`` have ended; the tag counts."""

    forces_end_at_limit = False

    def counted_length(self, length: int, *, prompt_length: int) -> int:
        return length + prompt_length - 1

    def is_done(self, *, worst_ended: float, best_running: float) -> bool:
        del worst_ended, best_running
        return True


class Peer:
    def __init__(self, directory: Path, source: ModelSource) -> None:
        self.pieces = SentencePieceProcessor(model_file=str(directory / "sentencepiece.model"))
        self.translator = ctranslate2.Translator(str(directory), inter_threads=1, intra_threads=1)
        self.forced = source.spec.tag_scheme == "src-tgt"

    def source(self, line: str, direction: Direction) -> list[str]:
        tag = direction.source if self.forced else direction.target
        return [f"__{tag}__", *self.pieces.encode(line, out_type=str), "</s>"]

    def translate(self, lines: list[str], direction: Direction, **options: Any) -> list[Any]:
        prefix = [[f"__{direction.target}__"]] * len(lines) if self.forced else None
        options |= {"target_prefix": prefix, "return_scores": True}
        sources = [self.source(line, direction) for line in lines]
        found: list[Any] = self.translator.translate_batch(sources, **options)
        return found

    def text(self, result: Any) -> str:
        return str(self.pieces.decode(result.hypotheses[0][self.forced :]))


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelSource, Peer]:
    folder = tmp_path_factory.mktemp("ctranslate2")
    source = own_checkpoint(folder / "checkpoint", **VARIANTS[request.param])
    export_checkpoint(source.origin, out_dir=folder / "out", export=Export(to="ctranslate2"))
    return source, Peer(folder / "out", source)


def test_probabilities_of_tokens_are_ours(exported: tuple[ModelSource, Peer]) -> None:
    source, peer = exported
    direction = Direction("en", "de")
    logits = logits_of(source, PAIRS)
    for ours_LV, (line, translation) in zip(logits, PAIRS, strict=True):
        target = peer.pieces.encode(translation, out_type=str)
        prompt = ["__de__"] if peer.forced else []
        scored = peer.translator.score_batch([peer.source(line, direction)], [prompt + target])
        found = scored[0].log_probs[len(prompt) :]
        tokenizer = source.tokenizer.build()
        ids = [*tokenizer.encode(translation), tokenizer.eos_id]
        expected = ours_LV.log_softmax(-1)[range(len(ids)), ids].tolist()
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("change", [(" ", "\t"), (" ", "\u202f"), ("ä", "a\u0308")])
def test_text_as_people_type_it_has_the_pieces_that_it_has_here(
    exported: tuple[ModelSource, Peer], change: tuple[str, str]
) -> None:
    source, peer = exported
    ours = source.tokenizer.build()
    for line in LINES:
        typed = peer.pieces.encode(line.replace(*change))
        assert typed == peer.pieces.encode(line) == ours.encode(line.replace(*change))


def test_greedy_translations_are_ours(exported: tuple[ModelSource, Peer]) -> None:
    source, peer = exported
    direction = Direction("en", "de")
    ours = searched(source, LINES, direction, beams=1, limit=20)
    limit = 20 + peer.forced
    theirs = peer.translate(LINES, direction, beam_size=1, max_decoding_length=limit)
    names = [peer.pieces.id_to_piece(index) for index in range(peer.pieces.get_piece_size())]
    names += [f"__{code}__" for code in source.spec.languages]
    prompt = ["__de__"] if peer.forced else []
    assert [found.hypotheses[0] for found in theirs] == [
        prompt + [names[token] for token in tokens] for tokens, _ in ours
    ]


@pytest.mark.slow
def test_a_trained_model_translates_its_test_set_as_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All directions of a stored run's corpus, under CTranslate2's own stopping rule."""
    monkeypatch.setattr("pipeline.decoding.beam_search.stopping_rule", lambda _: CTranslate2Rule())
    unpack_stored_run(tmp_path)
    run = tmp_path / "run"
    source = own_source(open_artifact(run / "dense", kind="checkpoint"))
    export_checkpoint(run / "dense", out_dir=tmp_path / "out", export=Export(to="ctranslate2"))
    peer, tokenizer = Peer(tmp_path / "out", source), source.tokenizer.build()
    for pair in sorted((run / "clean" / "test").iterdir()):
        one, other = pair.name.split("-")
        for direction in (Direction(one, other), Direction(other, one)):
            lines = (pair / f"{direction.source}.txt").read_text("utf-8").splitlines()
            ours = searched(source, lines, direction, beams=4, limit=60)
            theirs = peer.translate(lines, direction, beam_size=4, max_decoding_length=61)
            assert [peer.text(found) for found in theirs] == [
                tokenizer.decode(tokens) for tokens, _ in ours
            ]
            assert [found.scores[0] for found in theirs] == pytest.approx(
                [score for _, score in ours], abs=1e-3
            )


def test_without_the_package_a_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ctranslate2", None)
    with pytest.raises(ConfigError, match=r"pip install 'mmnmt\[export\]'"):
        export_to_ctranslate2.installed_package()


def searched(
    source: ModelSource, lines: list[str], direction: Direction, *, beams: int, limit: int
) -> list[tuple[tuple[int, ...], float]]:
    """Tokens and score of the best hypothesis of each line."""
    tokenizer = source.tokenizer.build()
    found = tags(
        tokenizer, source.spec.tag_scheme, source=direction.source, target=direction.target
    )
    sources = [
        Source(
            tokens=[*found.source_prefix, *tokenizer.encode(line), tokenizer.eos_id],
            prompt=found.decoder_prompt,
            source_language=tokenizer.languages.index(direction.source),
            target_language=tokenizer.languages.index(direction.target),
        )
        for line in lines
    ]
    config = DecodingConfig(
        beam_size=beams, stopping="huggingface", max_length_ratio=0.0, max_extra_length=limit
    )
    best = beam_search(model_of(source), sources, config, eos_id=tokenizer.eos_id)
    return [(one.tokens, one.score) for one in best]


def test_the_languages_of_a_model_are_in_no_fixed_list(tmp_path: Path) -> None:
    assert "chr" in BEYOND
    assert "chr" not in HUNDRED
    source = own_checkpoint(tmp_path / "checkpoint", languages=BEYOND)
    export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to="ctranslate2"))
    peer = Peer(tmp_path / "out", source)
    found = peer.translate(LINES, Direction("en", "chr"), beam_size=1, max_decoding_length=5)
    assert {one.hypotheses[0][0] for one in found} == {"__chr__"}


@pytest.mark.parametrize("name", ["encoder.layers.0.scale", "decoder.gate.weight"])
def test_a_tensor_of_a_variant_is_not_left_out_in_silence(name: str, tmp_path: Path) -> None:
    source = own_checkpoint(tmp_path / "checkpoint")
    filled_specification(ctranslate2, source)
    tensors = Mock(wraps=source.tensors)
    tensors.names.return_value = [*source.tensors.names(), name]
    with pytest.raises(CheckpointError, match=f"has the tensor {name}, for which no format"):
        filled_specification(ctranslate2, replace(source, tensors=tensors))
