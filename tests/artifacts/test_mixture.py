"""Sampling probabilities, and what they mean for the planned training."""

import math
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.corpora import writing
from support.stage_runs import run_stage
from support.tiny_training import changed, make_inputs, make_recipe

from data_prep import mix
from data_prep.settings import MixtureConfig
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import directions_of
from pipeline.artifacts.shards import Phase, read_mixture
from pipeline.batching.feed import TrainingData
from pipeline.batching.settings import BatchesConfig
from pipeline.config.recipe import Recipe
from pipeline.errors import ArtifactError, ConfigError
from pipeline.temperature_sampling import temperature_probabilities
from pipeline.training.settings import OptimizerConfig, TrainingConfig

COUNTS = {"de-en": 800, "en-fr": 200, "en-yi": 4}
TOKENS = {
    "de-en": {"de": 16_000, "en": 12_000},
    "en-fr": {"en": 2_000, "fr": 3_000},
    "en-yi": {"en": 40, "yi": 24},
}


def mixture(
    tmp_path: Path,
    *,
    sampling_temperature: float = 2.0,
    updates: int = 50,
    micro_batches: int = 8,
    **settings: Any,
) -> Artifact:
    with writing(tmp_path / "shards", "shards", "make_shards") as writer:
        pairs = {pair: {"train": count, "valid": 1} for pair, count in COUNTS.items()}
        writer.statistics["pairs"] = pairs | {"de-fr": {"train": 0, "valid": 0}}
        writer.statistics |= {"tokens": TOKENS, "emptied": ["de-fr"]}
    recipe = Recipe(
        name="test",
        mixture=MixtureConfig(sampling_temperature=sampling_temperature, **settings),
        batches=BatchesConfig(micro_batches=micro_batches, tokens=100),
        optimizer=OptimizerConfig(warmup_updates=5),
        training=TrainingConfig(updates=updates),
    )
    shards = open_artifact(tmp_path / "shards", kind="shards")
    return run_stage("mix", tmp_path / "mixture", {"shards": shards}, recipe)


def test_the_mixture_is_read_as_it_was_computed(tmp_path: Path) -> None:
    roots = {pair: math.sqrt(count) for pair, count in COUNTS.items()}
    expected = {pair: root / sum(roots.values()) for pair, root in roots.items()}
    (phase,) = read_mixture(mixture(tmp_path)).phases
    assert phase.probabilities == pytest.approx(expected)
    assert (phase.from_update, phase.forward) == (1, {})


def test_expected_epochs_spend_the_tokens_of_all_updates(tmp_path: Path) -> None:
    made = mixture(tmp_path)
    epochs = made.statistics["expected_epochs"]
    # Mean tokens of the longer side, and 2: 22, 17 and 12.
    sizes = {"de-en": 22, "en-fr": 17, "en-yi": 12}
    spent = sum(epochs[pair] * count * sizes[pair] for pair, count in COUNTS.items())
    assert spent == pytest.approx(50 * 8 * 100)
    drawn = {pair: epochs[pair] * count for pair, count in COUNTS.items()}
    shares = {pair: count / sum(drawn.values()) for pair, count in drawn.items()}
    assert shares == pytest.approx(read_mixture(made).phases[0].probabilities)
    assert made.statistics["expected_sentences"] == pytest.approx(sum(drawn.values()))


@pytest.mark.parametrize("tokens", [60, 120])
def test_training_draws_fewer_sentences_than_expected_by_its_padding(
    tokens: int, tmp_path: Path
) -> None:
    """The summary said "about", where batches of sentences of many lengths held 1.6 times less."""
    recipe = changed(make_recipe(), "batches", tokens=tokens)
    made = make_inputs(tmp_path, recipe=recipe)
    mixed = read_mixture(made.mixture)
    planner = TrainingData(made.shards, mixed, recipe.batches, seed=1).planner
    steps = islice(planner.steps((0, 0)), recipe.training.updates)
    drawn = sum(len(batch.line_B) for step in steps for batch in step.micro_batches)
    assert drawn < made.mixture.statistics["expected_sentences"]
    assert "would draw at most" in made.mixture.manifest.summary[0]


def test_how_long_training_will_be_is_told_but_makes_no_other_mixture(tmp_path: Path) -> None:
    short = mixture(tmp_path / "short")
    long = mixture(tmp_path / "long", updates=100, micro_batches=4 * 8)
    assert long.statistics["expected_sentences"] == pytest.approx(
        8 * short.statistics["expected_sentences"]
    )
    assert "100 updates of the recipe would draw at most" in long.manifest.summary[0]
    assert (long.digest, long.manifest.key) == (short.digest, short.manifest.key)


@pytest.mark.parametrize("updates", [50_000, 7_000_000])
def test_how_often_little_text_would_be_drawn_is_written_in_full(
    tmp_path: Path, updates: int
) -> None:
    made = mixture(tmp_path, updates=updates)
    times = made.statistics["expected_epochs"]["en-yi"]
    assert times > 999.5
    assert f"each of en-yi {times:,.0f} times" in made.manifest.summary[0]


def test_the_summary_has_the_pairs_most_and_least_repeated_or_left_out(tmp_path: Path) -> None:
    made = mixture(tmp_path)
    epochs = {pair: f"{number:.3g}" for pair, number in made.statistics["expected_epochs"].items()}
    sentences = made.statistics["expected_sentences"]
    assert made.manifest.summary == (
        f"3 pairs with 1,004 training lines; 50 updates of the recipe would draw at most "
        f"{sentences:,.0f} sentence pairs, fewer by the padding of batches: each of en-yi "
        f"{epochs['en-yi']} times, each of de-en {epochs['de-en']} times",
        "temperature 2 over pairs, by their sentences",
        "left out, no training data left: de-fr",
    )


PAIRS = {"de-en": {"probability": 1.0}}
HALF = {"de-en": {"probability": 0.5}}
OF_DE_EN: list[Any] = [{"probability": 1.5}, {"probability": "1"}, {"share": 1.0}, 1.0]
OF_DE_EN += [{"probability": 1.0, "forward": 2}]
PHASES: list[Any] = [{}, [1], [{"pairs": PAIRS}]]
PHASES += [[{"from_update": begin, "pairs": PAIRS}] for begin in (True, 1)]
PHASES += [[{"from_update": 5, "pairs": pairs}] for pairs in (HALF, {"en-fr": PAIRS["de-en"]})]
REFUSED: list[Any] = [{"pairs": {}}, {"pairs": []}, {"pairs": HALF}]
REFUSED += [{"pairs": {"de-en": value}} for value in OF_DE_EN]
REFUSED += [{"phases": phases} for phases in PHASES]


@pytest.mark.parametrize(("mixed", "trained"), [(1, 2), (2, 1)])
def test_a_mixture_of_other_lines_is_refused(mixed: int, trained: int, tmp_path: Path) -> None:
    """Text grew or shrank, shards were made again and the mixture was not: its shares are old."""
    old, new = (make_inputs(tmp_path / name, times=n) for name, n in (("a", mixed), ("b", trained)))
    with pytest.raises(ConfigError, match=r"more or fewer training lines of de-en.*Run mix on"):
        TrainingData(new.shards, read_mixture(old.mixture), make_recipe().batches, seed=1)


@pytest.mark.parametrize("content", REFUSED)
def test_a_mixture_of_other_content_is_refused(tmp_path: Path, content: Any) -> None:
    content = {"pairs": PAIRS, **content}
    with writing(tmp_path / "mixture", "mixture", "mix") as writer:
        writer.write_json("mixture.json", content)
    with pytest.raises(ArtifactError, match=r"mixture\.json is not as mix writes it"):
        read_mixture(open_artifact(tmp_path / "mixture", kind="mixture"))


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([math.nan, 0.5, 0.5], "{'de-en': nan}"),
        ([0.5, -0.5, 1.0], "{'en-fr': -0.5}"),
        ([0.5, 0.5, math.inf], "{'en-yi': inf}"),
        ([0, 0, 0], "{'de-en': 0, 'en-fr': 0, 'en-yi': 0}"),
        ([0.5, torch.tensor(0.25), 0.25], "{'en-fr': tensor(0.2500)}"),
    ],
)
def test_shares_of_another_formula_that_cannot_be_drawn_are_refused(
    shares: list[Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dict(zip(COUNTS, shares, strict=True))
    monkeypatch.setattr(mix, "temperature_probabilities", lambda *_, **__: made)
    with pytest.raises(ConfigError, match=re.escape(f"returned {told}. Return finite numbers")):
        mixture(tmp_path)
    assert not (tmp_path / "mixture").exists()


@pytest.mark.parametrize("number", [int, np.float32])
def test_shares_of_another_formula_may_be_any_numbers_with_any_sum(
    number: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dict(zip(COUNTS, map(number, [1, 3, 0]), strict=True))
    monkeypatch.setattr(mix, "temperature_probabilities", lambda *_, **__: made)
    (phase,) = read_mixture(mixture(tmp_path)).phases
    assert phase.probabilities == {"de-en": 0.25, "en-fr": 0.75, "en-yi": 0.0}


def test_no_pair_is_repeated_more_often_than_allowed_and_the_held_are_named(tmp_path: Path) -> None:
    """All text is seen S / 1,004 times on average; 4 lines of 1,004 would have a share of 6 %."""
    made = mixture(tmp_path, max_upsampling=3)
    statistics = made.statistics
    mean_epochs = statistics["expected_sentences"] / 1004
    assert statistics["expected_epochs"]["en-yi"] == pytest.approx(3 * mean_epochs)
    assert statistics["expected_epochs"]["en-fr"] < 3 * mean_epochs
    held = "held at 3 times the share they would have at temperature 1: en-yi"
    assert made.manifest.summary[2] == held


@pytest.mark.parametrize(("most", "held"), [(1, "en-fr, en-yi"), (1.62, "en-fr, en-yi")])
def test_a_pair_is_held_by_what_others_lose(most: float, held: str, tmp_path: Path) -> None:
    """At temperature 2, en-fr has 1.598 times its share; what en-yi loses would make it 1.66."""
    made = mixture(tmp_path, max_upsampling=most)
    mean_epochs = made.statistics["expected_sentences"] / 1004
    assert made.statistics["expected_epochs"]["en-fr"] == pytest.approx(most * mean_epochs)
    assert made.manifest.summary[2].endswith(f"temperature 1: {held}")


def test_by_tokens_at_temperature_1_every_line_is_seen_equally_often(tmp_path: Path) -> None:
    found = mixture(tmp_path, sampling_temperature=1, sampling_unit="tokens")
    proportional = {pair: count / 1004 for pair, count in COUNTS.items()}
    assert read_mixture(found).phases[0].probabilities == pytest.approx(proportional)
    assert found.manifest.summary[1] == "temperature 1 over pairs, by their target tokens"


def test_by_tokens_a_uniform_mixture_draws_as_many_tokens_of_every_pair(tmp_path: Path) -> None:
    found = mixture(tmp_path, sampling_temperature=math.inf, sampling_unit="tokens")
    probabilities = read_mixture(found).phases[0].probabilities
    per_draw = {pair: sum(TOKENS[pair].values()) / (2 * COUNTS[pair]) for pair in COUNTS}
    drawn = [probabilities[pair] * per_draw[pair] for pair in COUNTS]
    assert drawn == pytest.approx([drawn[0]] * 3)


def test_over_directions_each_is_weighed_by_the_tokens_of_its_target(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sampling_over": "directions", "sampling_unit": "tokens"}
    (phase,) = read_mixture(mixture(tmp_path, **settings)).phases
    drawn = {}
    for pair, count in COUNTS.items():
        first, second = pair.split("-")
        probability, forward = phase.probabilities[pair], phase.forward[pair]
        drawn[second, pair] = probability * forward * TOKENS[pair][second] / count
        drawn[first, pair] = probability * (1 - forward) * TOKENS[pair][first] / count
    roots = {(code, pair): math.sqrt(TOKENS[pair][code]) for code, pair in drawn}
    factor = sum(drawn.values()) / sum(roots.values())
    assert drawn == pytest.approx({name: root * factor for name, root in roots.items()})


def test_over_directions_by_sentences_both_are_as_over_pairs(tmp_path: Path) -> None:
    (over_pairs,) = read_mixture(mixture(tmp_path / "pairs")).phases
    (found,) = read_mixture(mixture(tmp_path / "ways", sampling_over="directions")).phases
    assert found.probabilities == pytest.approx(over_pairs.probabilities)
    assert found.forward == pytest.approx(dict.fromkeys(COUNTS, 0.5))


def test_phases_draw_the_pairs_they_name_and_share_the_updates(tmp_path: Path) -> None:
    phases = [
        {"pairs": ["en-deu", "eng_Latn-fr", "en-de"]},
        {"from_update": 21},
        {"from_update": 46, "pairs": ["ji-en"], "sampling_temperature": 1},
        {"from_update": 1000},
    ]
    made = mixture(tmp_path, phases=phases)
    found = read_mixture(made).phases
    assert [phase.from_update for phase in found] == [1, 21, 46, 1000]
    two = temperature_probabilities({"de-en": 800, "en-fr": 200}, sampling_temperature=2)
    assert found[0].probabilities == pytest.approx(two | {"en-yi": 0.0})
    assert found[1] == Phase(21, found[3].probabilities)
    assert found[2].probabilities == {"de-en": 0, "en-fr": 0, "en-yi": 1}
    sizes = {"de-en": 22, "en-fr": 17, "en-yi": 12}
    drawn = dict.fromkeys(COUNTS, 0.0)
    for phase, updates in zip(found, (20, 25, 5, 0), strict=True):
        shares = phase.probabilities
        sentences = updates * 8 * 100 / sum(shares[pair] * sizes[pair] for pair in shares)
        drawn = {pair: drawn[pair] + shares[pair] * sentences for pair in drawn}
    epochs = {pair: drawn[pair] / COUNTS[pair] for pair in drawn}
    assert made.statistics["expected_epochs"] == pytest.approx(epochs)
    assert made.manifest.summary[2:5] == (
        "from update 21: 3 pairs, temperature 2",
        "from update 46: 1 pair, temperature 1",
        "from update 1,000: 3 pairs, temperature 2",
    )


@pytest.mark.parametrize(("own", "stated"), [({}, "2"), ({"sampling_temperature": 1.5}, "1.5")])
def test_the_summary_states_the_temperature_of_the_first_phase(
    own: dict[str, float], stated: str, tmp_path: Path
) -> None:
    summary = mixture(tmp_path, phases=[own, {"from_update": 9}]).manifest.summary
    assert f"temperature {stated} over pairs, by their sentences" in summary


def test_a_phase_of_a_pair_without_training_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names 'de-fr', and the shards have no training lines"):
        mixture(tmp_path, phases=[{"pairs": ["de-fr"]}])


@pytest.mark.parametrize("begins", [[2], [1, 1], [1, 9, 5]])
def test_phases_begin_at_the_first_update_and_ascend(begins: list[int]) -> None:
    with pytest.raises(ValueError, match="phases begin at updates"):
        MixtureConfig.model_validate({"phases": [{"from_update": begin} for begin in begins]})


@pytest.mark.parametrize("code", ["en", "eng", "en_Latn"])
def test_only_directions_into_targets_are_drawn_by_the_sizes_of_pairs(
    code: str, tmp_path: Path
) -> None:
    plain = read_mixture(mixture(tmp_path / "plain"))
    made = mixture(tmp_path / "into", targets=[code])
    found = read_mixture(made)
    assert found.phases[0].probabilities == plain.phases[0].probabilities
    assert found.phases[0].forward == {"de-en": 1.0, "en-fr": 0.0, "en-yi": 0.0}
    assert "into en only" in made.manifest.summary[1:]
    drawn = {str(way) for pair in COUNTS for way in directions_of(pair) if found.draws(way)}
    assert drawn == {"de-en", "fr-en", "yi-en"}
    assert all(plain.draws(way) for pair in COUNTS for way in directions_of(pair))


@pytest.mark.parametrize("sampling_over", ["pairs", "directions"])
@pytest.mark.parametrize(("code", "pair"), [("de", "de-en"), ("fr", "en-fr")])
def test_targets_may_suit_only_the_pairs_that_phases_draw(
    code: str, pair: str, sampling_over: str, tmp_path: Path
) -> None:
    phases = [{"pairs": [pair]}, {"from_update": 9, "pairs": [pair]}]
    made = mixture(tmp_path, targets=[code], phases=phases, sampling_over=sampling_over)
    found = read_mixture(made)
    drawn = {str(way) for one in COUNTS for way in directions_of(one) if found.draws(way)}
    assert drawn == {f"en-{code}"}


def test_targets_weigh_directions_as_in_a_mixture_of_both(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sampling_over": "directions", "sampling_unit": "tokens"}
    (both,) = read_mixture(mixture(tmp_path / "both", **settings)).phases
    (into,) = read_mixture(mixture(tmp_path / "into", targets=["en"], **settings)).phases
    into_english = {
        pair: probability * (both.forward[pair] if pair == "de-en" else 1 - both.forward[pair])
        for pair, probability in both.probabilities.items()
    }
    total = sum(into_english.values())
    expected = {pair: share / total for pair, share in into_english.items()}
    assert into.probabilities == pytest.approx(expected)


def test_all_languages_as_targets_are_as_none(tmp_path: Path) -> None:
    every = mixture(tmp_path / "every", targets=["de", "en", "fr", "yi"], sampling_unit="tokens")
    none = mixture(tmp_path / "none", sampling_unit="tokens")
    assert read_mixture(every) == read_mixture(none)


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (["en", "it"], "names 'it', and the .* no such language. Choose from de, en, fr, yi"),
        (["German"], "the name of a language .* Write 'de'"),
        (["fr"], "mixture.targets fr leaves no direction of de-en"),
    ],
)
def test_targets_of_no_pair_are_refused(tmp_path: Path, targets: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        mixture(tmp_path, targets=targets)
