"""Routes and encoder states by language, against a loop over lines."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.corpora import Texts, make_corpus
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model
from torch import nn

from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Direction, directions
from pipeline.batching.batch import Packing
from pipeline.decoding.hypotheses import Translation, forced_pass
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import EXIT_USER_ERROR
from pipeline.extensions.analysis.analyze_languages import (
    MAX_LINES,
    SHARES,
    compare,
    count_routes,
    encode_parallel_lines,
    outlines,
)
from pipeline.extensions.analysis.report import analysis_sections
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.moe.routing import Routing
from pipeline.model.settings import MoEConfig

GERMAN = ["Brot", "Ja, ein Haus.", "", "Wasser", "Grüße", "x" * 70]
ENGLISH = ["Bread", "Yes, a house.", "nothing", "Water", "Greetings", "too long"]
FRENCH = ["Pain", "Oui, une maison.", "rien", "Eau", "Salutations", "long"]
SHARED = [0, 1, 3, 4]
"""Lines that all languages have; one of the others is empty, one too long for the model."""
TRAINED = {"de-en": {"de": ["Ja"], "en": ["Yes"]}, "en-fr": {"en": ["Yes"], "fr": ["Oui"]}}
TEXTS: Texts = {
    "train": TRAINED,
    "test": {
        "de-en": {"de": GERMAN, "en": ENGLISH},
        "en-fr": {"en": ENGLISH, "fr": FRENCH},
        "de-fr": {"de": GERMAN, "fr": FRENCH},
        "en-ru": {"en": ENGLISH, "ru": [""] * len(ENGLISH)},
    },
}
OF = {"de": GERMAN, "en": ENGLISH, "fr": FRENCH}


def checkpoint_of(directory: Path, *, experts: int) -> Artifact:
    moe = MoEConfig(num_experts=experts, every=1, top_k=2) if experts else None
    model = tiny_model(byte_spec(moe=moe, max_positions=40))
    return open_artifact(
        make_checkpoint(directory / f"checkpoint_{experts}", model), kind="checkpoint"
    )


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return checkpoint_of(tmp_path_factory.mktemp("moe"), experts=4)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return checkpoint_of(tmp_path_factory.mktemp("dense"), experts=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus", TEXTS)


def routes_by_hand(translator: Translator, direction: Direction) -> npt.NDArray[np.int64]:
    """Count the experts that every router chooses, line by line."""
    model, tokenizer = translator.model, translator.tokenizer
    layers = [one for one in model.modules() if isinstance(one, MixtureOfExperts)]
    counts_LE = np.zeros((len(layers), layers[0].config.num_experts), dtype=np.int64)

    def counter(layer: int) -> Callable[[nn.Module, object, Routing], None]:
        def count(router: nn.Module, inputs: object, routing: Routing) -> None:  # noqa: ARG001
            for choices in routing.expert_NC.tolist():
                for expert in choices:
                    counts_LE[layer, expert] += 1

        return count

    hooks = [one.router.register_forward_hook(counter(i)) for i, one in enumerate(layers)]
    for line in range(len(GERMAN)):
        source, target = OF[direction.source][line], OF[direction.target][line]
        if source and target and max(len(source), len(target)) < 40:
            translation = Translation(tuple(tokenizer.encode(target)), 0.0)
            sources = translator.sources([Job(direction, line, source)])
            forced_pass(model, sources, [translation], eos_id=tokenizer.eos_id)
    for hook in hooks:
        hook.remove()
    return counts_LE


def test_routes_are_those_of_the_routers_line_by_line(moe: Artifact, corpus: Artifact) -> None:
    translator = Translator(moe, DecodingConfig())
    found = count_routes(translator, corpus, directions(corpus, "test"))
    assert {*found} == {"de-en", "en-de", "en-fr", "fr-en", "de-fr", "fr-de"}
    for name, counts in found.items():
        direction = Direction(*name.split("-"))
        assert counts["lines"] == len(SHARED) + (direction.pair == "en-fr") * 2
        assert counts["routed"] == routes_by_hand(translator, direction).tolist()


@torch.inference_mode()
def test_states_are_means_over_the_tokens_of_a_line_alone(
    dense: Artifact, corpus: Artifact
) -> None:
    translator = Translator(dense, DecodingConfig())
    model = translator.model.eval()
    found = encode_parallel_lines(translator, corpus, directions(corpus, "test"))
    assert sorted(found.lines) == sorted(ENGLISH[line] for line in SHARED)
    assert {code: str(one) for code, one in found.directions.items()} == {
        "de": "de-en",
        "en": "en-de",
        "fr": "fr-en",
    }
    for code, state_PD in found.state_PD.items():
        direction = found.directions[code]
        for line, state_D in zip(found.lines, state_PD, strict=True):
            job = Job(direction, 0, OF[code][ENGLISH.index(line)])
            (source,) = translator.sources([job])
            ids_N, packing = torch.tensor(source.tokens), Packing.from_lengths([len(source.tokens)])
            languages = torch.tensor([source.source_language, source.target_language]).split(1)
            x_ND, _ = model.encode(
                ids_N, model.embedding(ids_N), packing, model.tokens_of(packing, *languages)
            )
            assert state_D == pytest.approx(sum(x_ND.numpy()) / len(x_ND), abs=1e-5)


def test_likeness_is_that_of_a_loop_over_lines() -> None:
    generator = np.random.default_rng(1)
    one, other = generator.normal(size=(2, 5, 3)) + 0.5
    cosines = {
        (i, j): float(one[i] @ other[j] / np.sqrt((one[i] @ one[i]) * (other[j] @ other[j])))
        for i in range(5)
        for j in range(5)
    }
    found = compare(one, other)
    assert found["same"] == pytest.approx(sum(cosines[i, i] for i in range(5)) / 5)
    different = [cosine for (i, j), cosine in cosines.items() if i != j]
    assert found["different"] == pytest.approx(sum(different) / 20)
    forth = sum(max(range(5), key=lambda j: cosines[i, j]) == i for i in range(5))
    back = sum(max(range(5), key=lambda i: cosines[i, j]) == j for j in range(5))
    assert 0 < forth + back < 10
    assert found["retrieved"] == pytest.approx((forth + back) / 10)
    assert compare(one, 3 * one)["retrieved"] == 1


def test_no_more_lines_are_encoded_than_the_limit(dense: Artifact, tmp_path: Path) -> None:
    texts = [str(number) for number in range(MAX_LINES + 5)]
    corpus = make_corpus(tmp_path / "many", {"test": {"de-en": {"de": texts, "en": texts}}})
    translator = Translator(dense, DecodingConfig())
    every = directions(corpus, "test")
    found = encode_parallel_lines(translator, corpus, every)
    assert len({*found.lines}) == MAX_LINES
    assert encode_parallel_lines(translator, corpus, every).lines == found.lines


# ---------------------------------------------------------------- outlines


def test_outlines_hold_their_shares_of_a_normal_distribution() -> None:
    """That of a share is a circle: its density is 1 - share of the highest one.

    The kernels widen the distribution, by N ** (-1 / 3) of its variance.
    """
    number = 1500
    xy = np.random.default_rng(1).normal(size=(number, 2))
    found = outlines(xy.tolist())
    for share, segments in zip(SHARES, found, strict=True):
        radius = np.sqrt(-2 * np.log(1 - share) * (1 + number ** (-1 / 3)))
        lengths = np.linalg.norm(np.array(segments).reshape(-1, 2) - xy.mean(axis=0), axis=1)
        assert lengths.mean() == pytest.approx(radius, rel=0.05)
        assert np.abs(lengths / radius - 1).max() < 0.25


def test_an_outline_is_closed() -> None:
    xy = np.random.default_rng(2).normal(size=(60, 2)) * [3.0, 1.0]
    for segments in outlines(xy.tolist()):
        ends = Counter(end for segment in segments for end in segment)
        assert len(segments) > 10
        assert {count % 2 for count in ends.values()} == {0}, "every end begins another segment"


def test_points_that_are_few_or_on_a_line_have_no_outline() -> None:
    assert outlines([]) == []
    assert outlines([[1.0, 2.0], [2.0, 1.0]]) == []
    assert outlines([[1.0, 1.0]] * 9) == []
    assert outlines([[float(x), 2.0 * x + 1.0] for x in range(9)]) == []


# ---------------------------------------------------------------- the stage


def analyzed(checkpoint: Artifact, corpus: Artifact, out: Path) -> Artifact:
    command = ["analyze", "languages", "--checkpoint", str(checkpoint.directory)]
    assert cli.main([*command, "--corpus", str(corpus.directory), "--out", str(out)]) == 0
    return open_artifact(out, kind="analysis")


def test_the_report_sets_zero_shot_directions_against_those_into_english(
    moe: Artifact, corpus: Artifact, tmp_path: Path
) -> None:
    made = analyzed(moe, corpus, tmp_path / "out")
    pictures = {path.name for path in made.directory.glob("*.svg")}
    families = ("into_pivot", "out_of_pivot", "zero_shot")
    assert pictures == {*(f"experts-{family}.svg" for family in families), "states.svg"}
    document = made.read_json("languages.json")
    assert document["directions"]["de-fr"]["family"] == "zero_shot"
    assert {code: len(points) for code, points in document["points"].items()} == {
        "de": 4,
        "en": 4,
        "fr": 4,
    }
    outlined = {code for code, shares in document["outlines"].items() if all(shares)}
    assert outlined == {"de", "en", "fr"}
    assert 'class="outline s2"' in made.file("states.svg").read_text(encoding="utf-8")
    [section] = analysis_sections({"mine": made})
    assert [one.title for one in section.figures][:3] == ["Any → En", "En → Any", "Zero-shot"]
    states, overlaps = section.tables
    assert [row.texts[0] for row in states.rows] == ["de", "en", "fr"]
    assert [row.texts[0] for row in overlaps.rows] == ["de", "fr"]


def test_a_dense_model_and_a_single_line_leave_pictures_out_and_say_so(
    dense: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts: Texts = {"test": {"de-en": {"de": ["Brot"], "en": ["Bread"]}}}
    made = analyzed(dense, make_corpus(tmp_path / "one", texts), tmp_path / "out")
    assert "the model has no experts" in capsys.readouterr().out
    assert not [*made.directory.glob("*.svg")]
    [section] = analysis_sections({"mine": made})
    assert "No tokens go to experts." in section.lead
    [table] = section.tables
    assert [row.texts[2:] for row in table.rows] == [("", "100.0"), ("", "100.0")]


def test_what_gives_nothing_to_compare_is_refused_in_one_sentence(
    dense: Artifact,
    corpus: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart: Texts = {
        "test": {
            "de-en": {"de": ["Brot"], "en": ["Bread"]},
            "en-fr": {"en": ["Water"], "fr": ["Eau"]},
        }
    }
    options = ["--out", str(tmp_path / "out"), "--checkpoint", str(dense.directory), "--corpus"]
    long: Texts = {"test": {"de-en": {code: ["Brot " * 500] for code in ("de", "en")}}}
    for name, texts in {"apart": apart, "long": long}.items():
        given = make_corpus(tmp_path / name, texts)
        assert cli.main(["analyze", "languages", *options, str(given.directory)]) == EXIT_USER_ERROR
        assert re.search(
            r"no test line of 'en' that fits into the model's \d+ tokens", capsys.readouterr().err
        )
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    assert cli.main(["analyze", "languages", *options, str(corpus.directory)]) == EXIT_USER_ERROR
    assert "pip install 'mmnmt[analysis]'" in capsys.readouterr().err
