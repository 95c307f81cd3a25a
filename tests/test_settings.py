"""Every number of every settings table has a range, and whoever leaves it is told which."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.config.recipe import Recipe, load_recipe
from pipeline.config.settings import Settings, describe_validation, number, whole
from pipeline.errors import ConfigError
from pipeline.jobs.plan import Plan
from pipeline.model.spec import ModelSpec

ABSURD = 10**30

WRONG: Mapping[str, float] = {
    "negative": -1,
    "NaN": math.nan,
    "infinite": math.inf,
    "negative infinite": -math.inf,
    "absurd": ABSURD,
    "zero": 0,
}

ZERO_IS_SENSIBLE = {
    "seed": "a name for a random choice like any other",
    "valid_phrases": "no validation set",
    "test_phrases": "no test set",
    "max_valid_lines": "no validation set",
    "max_test_lines": "no test set",
    "final_learning_rate": "decays to nothing",
    "warmup_updates": "no warm-up",
    "betas": "no memory of earlier gradients",
    "weight_decay": "none",
    "clip_norm": "no clipping",
    "label_smoothing": "none",
    "gpus_per_process": "computes on the CPU",
    "balance_weight": "no balance loss",
    "router_z_weight": "no z-loss",
    "dropout": "none",
    "attention_dropout": "none",
    "moe_dropout": "none",
    "expert_output_masking": "none",
    "router_jitter": "none",
    "resource_thresholds": "no pair is low",
    "synthetic_share": "natural pairs alone",
    "min_score": "only certain translations",
    "min_round_trip": "every round trip is kept",
    "mask_ratio": "copies",
    "noise_std": "copies",
    "length_penalty": "scores are sums",
    "max_length_ratio": "max_extra_length alone decides",
    "max_extra_length": "max_length_ratio alone decides",
    "pad_id": "an id like any other",
    "lone_ids": "ids like any other",
    "language_token_ids": "ids like any other",
    "layer": "the first",
    "layers_before": "before all layers",
    "scales": "the token alone",
    "language_groups": "groups are numbered from 0",
    "skip_nonfinite_after": "nothing is left out",
    "patience": "training never ends early",
    "average_last": "the weights of the best validation",
    "top_k": "from all tokens",
    "alignment_layer": "the first",
    "converter_layers": "none",
}
INFINITE_IS_SENSIBLE = {"sampling_temperature": "uniform"}
ABSURD_IS_SENSIBLE = {"sampling_temperature": "as good as uniform"}
NEGATIVE_IS_SENSIBLE = {
    "length_penalty": "favours short hypotheses",
    "min_score": "scores are log-probabilities",
}
CHECKED_TOGETHER = {"language_groups": "numbered without gaps, which bounds them"}

BASES: dict[type[Settings], dict[str, Any]] = {
    Recipe: {"name": "test"},
    Plan: {"name": "test", "stages": {"a": {"run": "clean"}}},
    ModelSpec: {"model": {}, "vocabulary_size": 9, "pad_id": 0, "languages": ["de", "en"]},
}
"""What is needed beside the number under test."""

DICT_KEY = "a"


class Kind(str):
    """Of a table that is told from others in its place, which a refusal does not name."""

    __slots__ = ()


@dataclass(frozen=True)
class Numeric:
    """Where a number lies: names of tables and settings, list indices as numbers."""

    root: type[Settings]
    path: tuple[str | int, ...]
    whole: bool
    values: int = 1
    """Of a fixed-length list."""

    @property
    def setting(self) -> str:
        return str(next(part for part in reversed(self.path) if part_names_a_setting(part)))

    @property
    def where(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def told(self) -> str:
        """Where, as a refusal says it: without kinds, and entries of a list as items from 1."""
        where = ".".join(str(part) for part in self.path if not isinstance(part, Kind))
        name, _, number = where.rpartition(".")
        return f"{name} (item {int(number) + 1})" if number.isdigit() else where

    def document(self, value: object) -> dict[str, Any]:
        """The settings with this number set, everything else as it may be."""
        entry: Any = value
        for index, part in reversed(list(enumerate(self.path))):
            if isinstance(part, Kind):
                entry = {"kind": str(part), **entry}
                continue
            entry = (
                [entry if i == part else i + 1 for i in range(self.values)]
                if isinstance(part, int)
                else {part: entry}
            )
            if index and self.path[index - 1] == "stages":
                entry[DICT_KEY] = entry[DICT_KEY] | {"run": "clean"}
        return {**BASES[self.root], **entry}


def part_names_a_setting(part: str | int) -> bool:
    return isinstance(part, str) and part != DICT_KEY


def numbers_of(root: type[Settings]) -> Iterator[Numeric]:
    for name, field in root.model_fields.items():
        yield from _numbers(field.annotation, root, (name,), 1)


def _numbers(
    annotation: Any, root: type[Settings], path: tuple[str | int, ...], values: int
) -> Iterator[Numeric]:
    if annotation in (int, float):
        yield Numeric(root, path, annotation is int, values)
    elif isinstance(annotation, type) and issubclass(annotation, Settings):
        kind = annotation.model_fields.get("kind")
        inside = path if kind is None else (*path, Kind(kind.default))
        for name, field in annotation.model_fields.items():
            yield from _numbers(field.annotation, root, (*inside, name), values)
    elif get_origin(annotation) in (Union, UnionType):
        for entry in get_args(annotation):
            yield from _numbers(entry, root, path, values)
    elif get_origin(annotation) is dict:
        yield from _numbers(get_args(annotation)[1], root, (*path, DICT_KEY), values)
    elif get_origin(annotation) is tuple:
        entries = get_args(annotation)
        count = len([entry for entry in entries if entry is not ...])
        for index in range(count):
            yield from _numbers(entries[index], root, (*path, index), count)
    elif hasattr(annotation, "__metadata__"):  # Annotated
        yield from _numbers(get_args(annotation)[0], root, path, values)


NUMBERS = [entry for root in BASES for entry in numbers_of(root)]


def is_sensible(entry: Numeric, kind: str) -> bool:
    match kind:
        case "zero":
            return entry.setting in ZERO_IS_SENSIBLE
        case "infinite":
            return entry.setting in INFINITE_IS_SENSIBLE
        case "negative":
            return entry.setting in NEGATIVE_IS_SENSIBLE
        case "absurd":
            return entry.setting in ABSURD_IS_SENSIBLE
    return False


def refusal(entry: Numeric, value: object) -> str | None:
    """The sentence that refuses a value; None where it is accepted."""
    try:
        entry.root.model_validate(entry.document(value))
    except ValidationError as error:
        return describe_validation(error, entry.root)
    return None


def test_the_sweep_finds_the_numbers_there_are() -> None:
    found = {entry.where for entry in NUMBERS}
    assert len(found) >= 70
    assert found >= {
        "training.updates",
        "optimizer.betas.1",
        "corpus.cldr.train_pairs.a",
        "model.moe.evaluation_capacity_factor",
        "stages.a.processes",
        "vocabulary_size",
    }
    names = {entry.setting for entry in NUMBERS}
    for allowed in (
        *(ZERO_IS_SENSIBLE, INFINITE_IS_SENSIBLE, ABSURD_IS_SENSIBLE),
        *(NEGATIVE_IS_SENSIBLE, CHECKED_TOGETHER),
    ):
        assert set(allowed) <= names, "an exception for a setting that no longer exists"


def fault_of_refusal(entry: Numeric, kind: str) -> str | None:
    """What is wrong with how a number takes a value out of its range; None if nothing is."""
    said = refusal(entry, WRONG[kind])
    if is_sensible(entry, kind):
        return None
    if said is None:
        return f"{entry.where} accepts {WRONG[kind]}"
    kind_of_number = "a whole number" if entry.whole else "a number"
    if entry.setting in CHECKED_TOGETHER:
        is_named, has_range = entry.setting in said, True
    else:
        is_named = entry.told in said
        has_range = f"Choose {kind_of_number} " in said
    is_told = is_named and has_range and "\n" not in said
    return None if is_told else f"{entry.where}: {said}"


@pytest.mark.parametrize("kind", WRONG)
def test_a_number_out_of_range_is_refused_with_its_name_and_range(kind: str) -> None:
    faults = [fault_of_refusal(entry, kind) for entry in NUMBERS]
    assert not list(filter(None, faults))


@pytest.mark.parametrize(
    "value",
    ["5", True, [], {}, "x" * 10_000, 1 << 20_000],
    ids=["text", "true", "list", "table", "long text", "long number"],
)
def test_text_and_truth_values_are_no_numbers(value: object) -> None:
    taken = {
        entry.where: refusal(entry, value)
        for entry in NUMBERS
        if entry.setting not in CHECKED_TOGETHER
    }
    assert not [where for where, said in taken.items() if said is None or len(said) >= 300]


@settings(derandomize=True, deadline=None)
@given(entry=st.sampled_from(NUMBERS), value=st.integers() | st.floats())
def test_a_number_is_kept_as_it_is_or_refused_in_a_line(entry: Numeric, value: float) -> None:
    try:
        entry.root.model_validate(entry.document(value))
    except ValidationError as error:
        said = describe_validation(error, entry.root)
        assert said
        assert "\n" not in said


def test_ranges_are_told_in_words() -> None:
    class Example(Settings):
        count: Any = 1

    cases = {
        whole(1, 10_000): "a whole number from 1 to 10,000",
        number(least=0, below=1): "a number from 0 and less than 1",
        number(above=0, most=1): "a number of more than 0 and at most 1",
        number(least=-2.5, most=1): "a number from -2.5 to 1",
    }
    for validator, words in cases.items():
        with pytest.raises(ValueError, match=f"^Choose {words}$"):
            validator.func("no number", lambda value: value)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[model]\nwidth = 10\nnum_heads = 4", "width 10 is not a multiple of num_heads 4"),
        ("[model]\nwidth = 65536\nmax_positions = 1000000", "width 65,536 times max_positions"),
        ("[model.moe]\nnum_experts = 2\ntop_k = 3", "top_k 3 exceeds num_experts 2"),
        ("[model]\nencoder_layers = 2\ndecoder_layers = 3\n[model.moe]\nevery = 4", "moe.every 4"),
        ("[model.moe]\ntop_k = 1", "the router learns nothing"),
        *(
            (
                f"[model.moe]\nevery = 1\n[model.language_modules]\nkind = '{kind}'",
                f"so that no layer would have the {kind} of model.language_modules",
            )
            for kind in ("low_rank", "language_experts")
        ),
        *(
            (
                f'[model]\n{layers}[model.moe]\nevery = {every}\ndecoder_router = "language_group"',
                "so that no router would be 'language_group'",
            )
            for layers, every in (("decoder_layers = 3\n", 4), ("encoder_layers = 24\n", 13))
        ),
        ("[optimizer]\nlearning_rate = 1e-6", "final_learning_rate 1e-05 exceeds learning_rate"),
        ("[training]\nupdates = 4000", "warmup_updates 4,000 is not below training.updates 4,000"),
        ("[training]\nresource_thresholds = [5, 5]", "resource_thresholds [5, 5] do not ascend"),
        ("[training]\nresource_thresholds = [5, 6, 6]", "[5, 6, 6] do not ascend"),
        ('[training]\nbest_by = "extremely_low"', "has three numbers"),
        ('[training]\nbest_by = "low"\naverage_last = 2', "best_by is low, which chooses"),
        ('[training]\nbest_by_route = "shared"\naverage_last = 2', "best_by_route is shared,"),
        ("[[mixture.phases]]\nfrom_update = 5", "phases begin at updates [5]"),
        ('[batches]\ntag_is_label = true\ntag_scheme = "tgt"', "forces no tag on the decoder"),
        ("[decoding]\nmax_length_ratio = 0\nmax_extra_length = 0", "no hypothesis could have"),
        (
            '[groups]\nmethod = "typology"\nmax_group_share = 0.5',
            "no effect with method 'typology'",
        ),
        ('[groups]\nmethod = "paper"\nmax_group_share = 0.2', "max_group_share has no effect with"),
        ("[groups]\nextend = { chr = 4 }", "extend has no effect with method 'embeddings'"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(
    text: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(text, tmp_path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def loaded(text: str, folder: Path) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(str(path))


@pytest.mark.parametrize(
    "text",
    [
        '[model.moe]\ntop_k = 1\ncombine_weights = "probability"',
        "[model.moe]\ntop_k = 1\nnum_experts = 1",
        '[optimizer]\nlearning_rate = 1e-6\nschedule = "inverse_sqrt"',
        '[optimizer]\nschedule = "inverse_sqrt"\n[training]\nupdates = 10',
        "[mixture]\nsampling_temperature = inf",
        "[optimizer]\nwarmup_updates = 0\n[training]\nupdates = 1",
        "[groups]\nmax_group_share = 0.5",
        '[groups]\nmethod = "typology"\nmax_group_share = 0.26785714285714285',
    ],
)
def test_settings_that_work_together_are_accepted(text: str, tmp_path: Path) -> None:
    assert loaded(text, tmp_path)


def test_a_stored_model_of_a_shape_one_would_not_train_can_still_be_described() -> None:
    spec = {**BASES[ModelSpec], "model": {"moe": {"num_experts": 4, "top_k": 1}}}
    assert ModelSpec.model_validate(spec).model.moe is not None


def test_a_wrong_name_in_a_table_that_has_others_in_its_place_is_told_from_its_own_names() -> None:
    wrong = {"name": "test", "model": {"language_modules": {"kind": "clsr", "gate_widht": 4}}}
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate(wrong)
    assert "Did you mean 'gate_width'?" in describe_validation(caught.value, Recipe)


def test_many_wrong_settings_make_one_short_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"And 997 more\.$") as caught:
        loaded("[loss]\n" + "".join(f"k{i} = 1\n" for i in range(1000)), tmp_path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"clean": {"drop_copies": True, "pivot": "en"}}, None),
        ({"upcycling": {"kept_experts": []}, "tokenizer": {"seed": 1}}, None),
        ({"clean": {"drop_copies": "true"}, "groups": {"pivot": "en"}}, None),
        ({"clean": {"language_model": ""}, "model": {"embedding": {"one_hot": "one_scale"}}}, None),
        ({"evaluation": {"word_accuracy": False, "word_side": "source"}}, None),
        ({"corpus": {"pivot": "de"}, "tests": {"pivot": "en"}}, "tests.pivot is en, and corpus"),
        ({"clean": {"pivot": "fr"}}, "clean.pivot is fr, and corpus.pivot, .* is en. Set corpus"),
        ({"clean": {"joined_pairs": ["de-en"]}}, "names 'de-en', which has the pivot"),
        ({"decoding": {"utility": "comet"}}, "'utility' is no setting any more"),
        ({"decoding": {"utility": "chrf", "comet": "m"}}, "'utility'"),
        ({"clean": {"drop_copies": False}}, "drop_copies = false is gone, and had another result"),
        ({"loss": {"gate_weight": 2.0}}, "gate_weight = 2.0 is gone, and had another result"),
    ],
)
def test_a_setting_that_is_gone_is_read_at_its_default_only(
    tree: dict[str, Any], message: str | None
) -> None:
    if message is None:
        assert Recipe.model_validate({"name": "old", **tree}) == Recipe(name="old")
        return
    with pytest.raises(ValidationError, match=message):
        Recipe.model_validate({"name": "old", **tree})


@pytest.mark.parametrize(
    ("section", "noted", "today"),
    [
        (
            "clean",
            {"identify_languages": "fasttext", "language_model": "a.bin"},
            {"identify_languages": "a.bin"},
        ),
        (
            "evaluation",
            {"word_accuracy": True, "word_side": "source"},
            {"word_accuracy": "source"},
        ),
        ("evaluation", {"word_accuracy": True}, {"word_accuracy": "target"}),
        (
            "model",
            {"embedding": {"input": "one_hot", "one_hot": "two_scales"}},
            {"embedding": {"input": "one_hot_two_scales"}},
        ),
        (
            "model",
            {"front": {"kind": "ada_msha", "weights": "logits", "scaled": "after"}},
            {"front": {"kind": "ada_msha"}},
        ),
        (
            "model",
            {"language_modules": {"kind": "low_rank", "within": "both", "cross_attention": False}},
            {
                "language_modules": {
                    "kind": "low_rank",
                    "within": ["feed_forward", "self_attention"],
                }
            },
        ),
    ],
)
def test_two_settings_that_became_one_are_read(
    section: str, noted: dict[str, Any], today: dict[str, Any]
) -> None:
    one, other = (
        Recipe.model_validate({"name": "old", section: found}) for found in (noted, today)
    )
    assert one == other


@pytest.mark.parametrize("noted", [{}, {"language_model": ""}])
def test_a_language_model_without_a_path_is_refused_by_the_word_that_was_given(
    noted: dict[str, Any],
) -> None:
    tree = {"name": "old", "clean": {"identify_languages": "fasttext", **noted}}
    with pytest.raises(ValidationError, match="identify_languages names 'fasttext'"):
        Recipe.model_validate(tree)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("langdetec", "Did you mean 'langdetect'?"),
        ("none", "Did you mean 'no'?"),
        ("", "Choose from no, langdetect, or the path of a fastText model, ./model.bin."),
    ],
)
def test_a_misspelled_identifier_is_no_path_of_a_model(name: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"identify_languages names '{name}'") as caught:
        loaded(f'[clean]\nidentify_languages = "{name}"', tmp_path)
    assert str(caught.value).endswith(f". {fix}")


def test_a_pivot_of_a_stage_may_repeat_that_of_the_corpus() -> None:
    tree = {"name": "old", "corpus": {"pivot": "de"}}
    repeated = {name: {"pivot": "de"} for name in ("tests", "clean", "groups")}
    assert Recipe.model_validate({**tree, **repeated}) == Recipe.model_validate(tree)
