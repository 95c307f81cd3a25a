"""Sampling probabilities, and what they mean for the planned training."""

import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import mix
from pipeline.artifacts.artifact import Artifact, new_artifact, open_artifact
from pipeline.artifacts.mixture import lines_per_language, read_mixture, temperature_probabilities
from pipeline.config import BatchesConfig, MixtureConfig, OptimizerConfig, Recipe, TrainingConfig
from pipeline.errors import ArtifactError, DataError
from pipeline.stages import STAGES, StageCall

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
) -> Artifact:
    with new_artifact(
        tmp_path / "shards", kind="shards", stage="make_shards", config={}, inputs={}
    ) as writer:
        pairs = {pair: {"train": count, "valid": 1} for pair, count in COUNTS.items()}
        writer.statistics["pairs"] = pairs | {"de-fr": {"train": 0, "valid": 0}}
        writer.statistics |= {"tokens": TOKENS, "emptied": ["de-fr"]}
    recipe = Recipe(
        name="test",
        mixture=MixtureConfig(sampling_temperature=sampling_temperature),
        batches=BatchesConfig(micro_batches=micro_batches, tokens=100),
        optimizer=OptimizerConfig(warmup_updates=5),
        training=TrainingConfig(updates=updates),
    )
    stage = STAGES["mix"]
    mix.run(
        StageCall(
            stage=stage,
            recipe=recipe,
            artifacts={"shards": open_artifact(tmp_path / "shards", kind="shards")},
            raw={},
            out_dir=tmp_path / "mixture",
            records={},
            config=recipe.sections(stage.sections),
        )
    )
    return open_artifact(tmp_path / "mixture", kind="mixture")


counts_of_pairs = st.dictionaries(
    st.text("abc", min_size=1), st.integers(1, 10**9), min_size=1, max_size=8
)


@given(counts_of_pairs, st.integers(1, 6))
def test_probabilities_follow_the_formula(counts: dict[str, int], temperature: int) -> None:
    found = temperature_probabilities(counts, sampling_temperature=temperature)
    total = sum(counts.values())
    weights = {name: float(Fraction(n, total)) ** (1 / temperature) for name, n in counts.items()}
    expected = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    assert found == pytest.approx(expected, rel=1e-9)
    assert math.fsum(found.values()) == pytest.approx(1, abs=1e-12)


@given(counts_of_pairs)
def test_infinite_temperature_is_uniform(counts: dict[str, int]) -> None:
    found = temperature_probabilities(counts, sampling_temperature=math.inf)
    assert found == pytest.approx(dict.fromkeys(counts, 1 / len(counts)))


def test_extreme_temperatures_and_counts_stay_finite() -> None:
    counts = {"large": 10**300, "small": 1}
    assert temperature_probabilities(counts, sampling_temperature=5e-324) == {
        "large": 1.0,
        "small": 0.0,
    }
    flat = temperature_probabilities(counts, sampling_temperature=1e300)
    assert flat == pytest.approx({"large": 0.5, "small": 0.5})


def test_nothing_is_drawn_from_what_is_empty() -> None:
    found = temperature_probabilities({"full": 5, "empty": 0}, sampling_temperature=math.inf)
    assert found == {"full": 1.0, "empty": 0.0}
    for nothing in ({}, {"empty": 0}):
        with pytest.raises(DataError, match="nothing to draw from"):
            temperature_probabilities(nothing, sampling_temperature=5)


def test_the_mixture_is_read_as_it_was_computed(tmp_path: Path) -> None:
    roots = {pair: math.sqrt(count) for pair, count in COUNTS.items()}
    expected = {pair: root / sum(roots.values()) for pair, root in roots.items()}
    assert read_mixture(mixture(tmp_path)) == pytest.approx(expected)


def test_expected_epochs_spend_the_tokens_of_all_updates(tmp_path: Path) -> None:
    made = mixture(tmp_path)
    epochs = made.statistics["expected_epochs"]
    # Mean tokens of the longer side, and 2: 22, 17 and 12.
    sizes = {"de-en": 22, "en-fr": 17, "en-yi": 12}
    spent = sum(epochs[pair] * count * sizes[pair] for pair, count in COUNTS.items())
    assert spent == pytest.approx(50 * 8 * 100)
    drawn = {pair: epochs[pair] * count for pair, count in COUNTS.items()}
    shares = {pair: count / sum(drawn.values()) for pair, count in drawn.items()}
    assert shares == pytest.approx(read_mixture(made))
    assert made.statistics["expected_sentences"] == pytest.approx(sum(drawn.values()))


def test_how_long_training_will_be_is_told_but_makes_no_other_mixture(tmp_path: Path) -> None:
    short = mixture(tmp_path / "short")
    long = mixture(tmp_path / "long", updates=100, micro_batches=4 * 8)
    assert long.statistics["expected_sentences"] == pytest.approx(
        8 * short.statistics["expected_sentences"]
    )
    assert "100 updates of the recipe would draw about" in long.manifest.summary[0]
    assert (long.digest, long.manifest.key) == (short.digest, short.manifest.key)


def test_the_table_lists_every_training_pair_the_largest_first(tmp_path: Path) -> None:
    rows = mixture(tmp_path).statistics["table"]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == list(COUNTS)
    assert "| 800 |" in rows[2]


def test_the_summary_has_the_pairs_most_and_least_repeated_and_those_left_out(
    tmp_path: Path,
) -> None:
    made = mixture(tmp_path)
    epochs = {pair: f"{number:.3g}" for pair, number in made.statistics["expected_epochs"].items()}
    sentences = made.statistics["expected_sentences"]
    assert made.manifest.summary == (
        f"3 pairs with 1,004 training lines; 50 updates of the recipe would draw about "
        f"{sentences:,.0f} sentence pairs: each of en-yi {epochs['en-yi']} times, each of de-en "
        f"{epochs['de-en']} times",
        "left out, no training data left: de-fr",
    )


def test_proportional_sampling_gives_every_pair_the_same_epochs(tmp_path: Path) -> None:
    statistics = mixture(tmp_path, sampling_temperature=1).statistics
    epochs = list(statistics["expected_epochs"].values())
    assert epochs == pytest.approx([epochs[0]] * 3)


def test_a_pivot_counts_in_each_of_its_pairs(tmp_path: Path) -> None:
    mixture(tmp_path)
    shards = open_artifact(tmp_path / "shards", kind="shards")
    assert lines_per_language(shards) == {"de": 800, "en": 1004, "fr": 200, "yi": 4}


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ({"de-en": {"probability": 0.5}, "en-fr": {"probability": 0.4}}, "sum to 0.9, not to 1"),
        ({"de-en": {"probability": 1.5}, "en-fr": {"probability": -0.5}}, "'de-en' no probability"),
        ({"de-en": {"probability": "1"}}, "'de-en' no probability from 0 to 1"),
        ({"de-en": {"share": 1.0}}, "'de-en' no probability from 0 to 1"),
        ({"de-en": 1.0}, "'de-en' no probability from 0 to 1"),
        ({}, "sum to 0, not to 1"),
        ([], "sum to 0, not to 1"),
    ],
)
def test_a_mixture_of_other_content_is_refused(tmp_path: Path, pairs: object, reason: str) -> None:
    with new_artifact(
        tmp_path / "mixture", kind="mixture", stage="mix", config={}, inputs={}
    ) as writer:
        writer.write_json("mixture.json", {"pairs": pairs})
    with pytest.raises(ArtifactError, match=reason):
        read_mixture(open_artifact(tmp_path / "mixture", kind="mixture"))
