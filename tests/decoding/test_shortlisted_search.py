"""Beam search restricted to shortlists."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.readable_artifacts import Shelf, build_shelf
from support.searched_models import model_of, source_of
from support.tiny_models import EOS_ID, PAD_ID, random_examples, tiny_model, tiny_spec
from torch import Tensor

from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.settings import ShortlistConfig
from pipeline.artifacts.shortlist import Shortlist, direction_name
from pipeline.artifacts.tokenizer import load_tokenizer
from pipeline.decoding.beam_search import Search, beam_search
from pipeline.decoding.hypotheses import Source, Translation
from pipeline.decoding.quantization import quantize
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Stream, Translator
from pipeline.errors import ArtifactError, ConfigError
from pipeline.model.transformer import Transformer

VOCABULARY = 60
CONFIG = DecodingConfig(beam_size=3, n_best=1, max_length_ratio=1.0, max_extra_length=4)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return build_shelf(tmp_path_factory.mktemp("shelf"))


def listed_sources(count: int = 7) -> list[Source]:
    """Sources with lists of 14 pieces each, end-of-sentence and padding among them."""
    rng = np.random.default_rng(1)
    spec = tiny_spec(vocabulary=VOCABULARY)
    usable = np.setdiff1d(np.arange(VOCABULARY), [PAD_ID, EOS_ID])
    return [
        replace(
            source_of(example),
            pieces=np.sort([PAD_ID, EOS_ID, *rng.choice(usable, 12, replace=False)]),
        )
        for example in random_examples(spec, sentences=count, seed=1)
    ]


def with_every_other_piece_at_minus_infinity(
    model: Transformer, source: Source, config: DecodingConfig = CONFIG
) -> Translation:
    """Search for one sentence over the whole vocabulary, its logits outside its list removed."""
    assert source.pieces is not None
    is_listed = torch.zeros(VOCABULARY, dtype=torch.bool)
    is_listed[torch.from_numpy(source.pieces)] = True
    project = model.project

    def masked(x_RD: Tensor) -> Tensor:
        return project(x_RD).masked_fill(~is_listed, -torch.inf)

    with mock.patch.object(model, "project", masked):
        (found,) = beam_search(model, [replace(source, pieces=None)], config, eos_id=EOS_ID)
    return found


def assert_alike(found: Sequence[Translation], expected: Sequence[Translation]) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-4)


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_search_finds_what_one_without_the_other_pieces_finds(kind: str, beam_size: int) -> None:
    model = model_of(kind, vocabulary=VOCABULARY)  # type: ignore[arg-type]
    config = CONFIG.model_copy(update={"beam_size": beam_size})
    sources = listed_sources()
    found = beam_search(model, sources, config, eos_id=EOS_ID)
    expected = [with_every_other_piece_at_minus_infinity(model, one, config) for one in sources]
    assert_alike(found, expected)
    for source, translation in zip(sources, found, strict=True):
        assert source.pieces is not None
        assert {*translation.tokens} <= {*source.pieces.tolist()}


def test_8_bit_projections_onto_a_list_are_those_of_the_whole_layer() -> None:
    model = model_of("dense", vocabulary=VOCABULARY)
    quantize(model)
    sources = listed_sources()
    found = beam_search(model, sources, CONFIG, eos_id=EOS_ID)
    assert_alike(found, [with_every_other_piece_at_minus_infinity(model, one) for one in sources])


def test_one_hot_embeddings_without_a_table_are_restricted_too() -> None:
    embedding: dict[str, object] = {"embedding": {"input": "one_hot", "output": "tied"}}
    model = tiny_model(tiny_spec(vocabulary=VOCABULARY, width=64, model=embedding))
    sources = listed_sources(3)
    found = beam_search(model, sources, CONFIG, eos_id=EOS_ID)
    assert_alike(found, [with_every_other_piece_at_minus_infinity(model, one) for one in sources])


def test_forced_banned_and_required_tokens_hold_within_the_list() -> None:
    model = model_of("dense", vocabulary=VOCABULARY)
    free = listed_sources(4)
    sources = []
    for source in free:
        assert source.pieces is not None
        inner = [int(piece) for piece in source.pieces if piece > EOS_ID]
        sources.append(
            replace(source, prefix=(inner[0],), banned=((inner[1],),), required=((inner[2],),))
        )
    found = beam_search(model, sources, CONFIG, eos_id=EOS_ID)
    assert_alike(found, [with_every_other_piece_at_minus_infinity(model, one) for one in sources])
    for source, translation in zip(sources, found, strict=True):
        assert translation.tokens[0] == source.prefix[0]
        assert source.banned[0][0] not in translation.tokens
        assert source.required[0][0] in translation.tokens


def test_a_list_of_all_pieces_restricts_nothing() -> None:
    model = model_of("dense", vocabulary=VOCABULARY)
    sources = [replace(one, pieces=np.arange(VOCABULARY)) for one in listed_sources()]
    free = [replace(one, pieces=None) for one in sources]
    found = beam_search(model, sources, CONFIG, eos_id=EOS_ID)
    expected = beam_search(model, free, CONFIG, eos_id=EOS_ID)
    assert found == expected


def test_sentences_that_join_and_leave_a_search_keep_their_lists() -> None:
    model = model_of("dense", vocabulary=VOCABULARY).eval()
    sources = listed_sources(9)
    with torch.inference_mode():
        search = Search(model, sources[:5], CONFIG, eos_id=EOS_ID)
        found = search.step()
        later = Search(model, sources[5:], CONFIG, eos_id=EOS_ID)
        begun = later.step()
        shift = search.join(later)
        found |= {shift + index: one for index, one in begun.items()}
        search.drop([2])
        while search.active:
            found |= search.step()
    rows = {row: row for row in (0, 1, 3, 4)} | {shift + row: 5 + row for row in range(4)}
    assert found.keys() == rows.keys()
    for row, source in rows.items():
        expected = with_every_other_piece_at_minus_infinity(model, sources[source])
        assert_alike(found[row], [expected])


def test_a_list_has_translations_common_pieces_the_sentence_s_own_and_the_given(
    shelf: Shelf,
) -> None:
    tokenizer = load_tokenizer(shelf.path("tokenizer"))
    shortlist = Shortlist(shelf.path("shortlist"), tokenizer)
    direction = Direction("de", "en")
    stored = (shelf.path("shortlist") / direction_name(direction)).read_bytes()
    rows = np.frombuffer(stored, "<i4").reshape(-1, 1 + ShortlistConfig().translations)
    tokens = tokenizer.encode("gut", language="de")
    unheard = tokenizer.size - 1
    found = shortlist.pieces(direction, [*tokens, unheard], given=[unheard - 1])
    expected = {tokenizer.eos_id, tokenizer.pad_id, *tokens, unheard, unheard - 1}
    expected |= {int(n) for row in rows if row[0] in {-1, *tokens} for n in row[1:] if n >= 0}
    assert found.tolist() == sorted(expected)
    whole = shortlist.pieces(Direction("de", "fr"), tokens, given=[])
    assert whole.tolist() == list(range(tokenizer.size))


def test_translators_and_streams_heed_the_shortlist_and_the_phrases_beside_it(
    shelf: Shelf,
) -> None:
    decoding = {"beam_size": 2, "max_extra_length": 8, "shortlist": str(shelf.path("shortlist"))}
    translator = Translator(shelf.open("dense"), DecodingConfig.model_validate(decoding))
    direction = Direction("de", "en")
    texts = ["Hallo", "gut", "", "Morgen und Abend"]
    jobs = [Job(direction, line, text) for line, text in enumerate(texts)]
    together = translator.translate(jobs)
    assert [translator.translate([job])[0].text for job in jobs] == [one.text for one in together]
    for source in translator.sources(jobs):
        assert source.pieces is not None
        assert len(source.pieces) < translator.tokenizer.size / 2
    stream = Stream(translator)
    stream.add(jobs[:2])
    found = dict(stream.step())
    stream.add(jobs[2:])
    while stream.is_busy:
        found |= dict(stream.step())
    assert [found[job].text for job in jobs] == [one.text for one in together]
    phrase = "\N{SNOWMAN}"  # its bytes are in no training line
    (constrained,) = translator.translate([replace(jobs[0], prefix=phrase, required=("Ж",))])
    assert constrained.text.startswith(phrase)
    assert "Ж" in constrained.text


def test_a_shortlist_of_another_vocabulary_or_of_none_is_refused(shelf: Shelf) -> None:
    tokenizer = load_tokenizer(shelf.path("pieces"))
    with pytest.raises(ConfigError, match="another vocabulary"):
        Shortlist(shelf.path("shortlist"), tokenizer)
    with pytest.raises(ArtifactError):
        Shortlist(shelf.path("mixture"), tokenizer)
    with pytest.raises(ArtifactError):
        Shortlist(Path("nowhere"), tokenizer)


def test_sampling_takes_no_shortlist() -> None:
    with pytest.raises(ValidationError, match="beam search alone"):
        DecodingConfig(search="sampling", shortlist="lists")
