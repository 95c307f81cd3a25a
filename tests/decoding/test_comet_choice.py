"""Tests of choices by COMET in pipeline/decoding/minimum_bayes_risk.py."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.comet_models import stub_package, write_stub_model
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import Direction
from pipeline.decoding.hypotheses import Translation
from pipeline.decoding.minimum_bayes_risk import Candidates, CometChoice
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import ConfigError


@pytest.fixture(autouse=True)
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with stub_package(tmp_path / "stub", monkeypatch):
        yield


def model_of(folder: Path, *, near: str) -> str:
    """A model that prefers translations as long as the source or the reference."""
    return str(write_stub_model(folder / "model", hyper_parameters={"near": near}))


def candidates_of(source: str, lengths: Sequence[int], scores: Sequence[float]) -> Candidates:
    hypotheses = [Translation((row,), score) for row, score in enumerate(scores)]
    return Candidates(source, hypotheses, ["x" * length for length in lengths])


def chosen(choice: CometChoice, *of_sources: Candidates) -> list[int]:
    return [one.tokens[0] for one in choice.choose(of_sources)]


def test_a_model_without_references_chooses_each_sources_best(tmp_path: Path) -> None:
    choice = CometChoice(model_of(tmp_path, near="src"), against_others=False)
    first = candidates_of("abc", [1, 3, 9, 3], [0, -2, 0, -1])
    assert chosen(choice, first, candidates_of("abcdefgh", [1, 3, 9], [0, 0, 0])) == [3, 2]


def test_a_candidate_is_scored_against_all_others_as_often_as_they_occur(tmp_path: Path) -> None:
    choice = CometChoice(model_of(tmp_path, near="ref"), against_others=True)
    # Mean distances to the others: 1 → (0+3+8)/3, 4 → (3+3+5)/3, 9 → (8+8+5)/3; a tie of 1 and 4.
    one = candidates_of("a", [9, 4, 1, 1], [0, -2, -3, -1])
    # Without its repetition, 1 is farther from the others: (3+8)/2, 4 → (3+5)/2.
    assert chosen(choice, one, candidates_of("a", [1, 4, 9], [0, 0, 0])) == [3, 1]


def test_a_model_that_needs_references_cannot_rerank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model that needs references, and choose"):
        CometChoice(model_of(tmp_path, near="ref"), against_others=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"choose": "mbr"}, "compares n_best hypotheses, and n_best is 1"),
        ({"choose": "rerank", "comet": "model"}, r"compares n_best hypotheses, and n_best is 1"),
        ({"choose": "rerank", "n_best": 2}, "comet names the model of"),
        ({"comet": "model"}, "comet names the model of"),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DecodingConfig(**settings)


@pytest.mark.parametrize(("choose", "near"), [("rerank", "src"), ("mbr", "ref")])
def test_a_translator_asks_the_model_about_its_list(tmp_path: Path, choose: Any, near: str) -> None:
    model = tiny_model(byte_spec(max_positions=32), seed=3)
    checkpoint = open_artifact(make_checkpoint(tmp_path / "dense", model), kind="checkpoint")
    jobs = [Job(Direction("de", "en"), line, "ab" * line) for line in range(1, 4)]
    listing = DecodingConfig(beam_size=6, n_best=6, max_length_ratio=0.5, max_extra_length=6)
    told = {"choose": choose, "comet": model_of(tmp_path, near=near)}
    translated = Translator(checkpoint, listing.model_copy(update=told)).translate(jobs)
    moved = 0
    for job, listed, found in zip(
        jobs, Translator(checkpoint, listing).translate(jobs), translated, strict=True
    ):
        assert listed.details is not None
        texts = [one.text for one in listed.details.n_best]
        against = [job.text] if choose == "rerank" else texts
        distance = [sum(abs(len(text) - len(other)) for other in against) for text in texts]
        assert distance[texts.index(found.text)] == min(distance)
        moved += found.text != listed.text
    assert moved
