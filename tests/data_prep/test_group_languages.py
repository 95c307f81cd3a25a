"""Language groups by family, by family and embeddings, and from the paper's table."""

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.corpora import bytes_of, writing
from support.stage_runs import run_stage
from support.tiny_models import tiny_spec

from data_prep import group_languages
from data_prep.group_languages import Cluster, cosine_distance, merge_closest
from data_prep.settings import GroupsConfig, LanguagesConfig
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.tokenizer import TokenizerFiles, load_tokenizer
from pipeline.checkpoints.checkpoint import write_spec
from pipeline.config.recipe import Recipe
from pipeline.errors import ArtifactError, ConfigError
from pipeline.languages import FAMILIES
from pipeline.model.moe.language_groups import read_groups

COUNTS = {"de-en": 40, "en-nl": 10, "en-ru": 30, "en-uk": 10, "en-fr": 35, "el-en": 5, "en-fi": 20}
CODES = ("de", "el", "en", "fi", "fr", "nl", "ru", "uk")


def make_shards(directory: Path, counts: dict[str, int]) -> Artifact:
    with writing(directory, "shards", "make_shards") as writer:
        writer.statistics["pairs"] = {pair: {"train": count} for pair, count in counts.items()}
    return open_artifact(directory, kind="shards")


def make_checkpoint(
    directory: Path, codes: tuple[str, ...] = CODES, *, embedding: str = "learned"
) -> Artifact:
    with writing(directory, "checkpoint", "pretrain") as writer:
        write_spec(writer, tiny_spec(width=64, model={"embedding": {"input": embedding}}))
        tokenizer_dir = writer.path("tokenizer/tokenizer.json").parent
        TokenizerFiles(bytes_of(codes)).write(tokenizer_dir)
    return open_artifact(directory, kind="checkpoint")


def group(
    tmp_path: Path,
    config: GroupsConfig,
    *,
    counts: dict[str, int] = COUNTS,
    checkpoint: Artifact | None = None,
    families: dict[str, str] | None = None,
) -> Artifact:
    recipe = Recipe(name="test", groups=config, languages=LanguagesConfig(family=families or {}))
    artifacts = {"shards": make_shards(tmp_path / "shards", counts)}
    artifacts |= {"checkpoint": checkpoint} if checkpoint else {}
    return run_stage("group_languages", tmp_path / "groups", artifacts, recipe)


def embeddings(codes: tuple[str, ...] = CODES, *, seed: int = 0) -> dict[str, list[float]]:
    generator = np.random.default_rng(seed)
    return {code: generator.normal(size=6).tolist() for code in codes}


def replace_embeddings(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Artifact, vectors: dict[str, list[float]]
) -> None:
    """Give the checkpoint an embedding matrix in which only language tokens have values."""
    tokenizer = load_tokenizer(checkpoint.directory / "tokenizer")
    weight = torch.zeros(tokenizer.size, 6, dtype=torch.float64)
    for code, vector in vectors.items():
        weight[tokenizer.language_token_id(code)] = torch.tensor(vector, dtype=torch.float64)

    def read(artifact: Artifact, name: str) -> torch.Tensor:
        assert (artifact, name) == (checkpoint, "embedding.weight")
        return weight

    monkeypatch.setattr(group_languages, "read_tensor", read)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """A dense model of all languages, with embeddings of their tokens."""
    made = make_checkpoint(tmp_path / "checkpoint")
    replace_embeddings(monkeypatch, made, embeddings())
    return made


def partition(groups: dict[str, int]) -> set[frozenset[str]]:
    return {
        frozenset(code for code in groups if groups[code] == number)
        for number in set(groups.values())
    }


def brute_force_partition(
    start: list[set[str]],
    vectors: dict[str, list[float]],
    sizes: dict[str, int],
    *,
    size_limit: float,
) -> set[frozenset[str]]:
    """The rules of the paper in plain arithmetic, every embedding computed from the languages."""

    def mean(codes: set[str]) -> list[float]:
        total = sum(sizes[code] for code in codes)
        width = len(next(iter(vectors.values())))
        return [sum(sizes[code] * vectors[code][d] for code in codes) / total for d in range(width)]

    def distance(first: set[str], second: set[str]) -> float:
        a, b = mean(first), mean(second)
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return 1 - dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))

    left = [set(codes) for codes in start]
    while True:
        allowed = [
            (distance(first, second), i, j)
            for (i, first), (j, second) in combinations(enumerate(left), 2)
            if sum(sizes[code] for code in first | second) < size_limit
        ]
        if not allowed:
            return {frozenset(codes) for codes in left}
        _, i, j = min(allowed)
        joint = left[i] | left[j]
        left = [codes for k, codes in enumerate(left) if k not in (i, j)] + [joint]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 100), min_size=2, max_size=9),
    st.integers(0, 2**32 - 1),
    st.floats(0.01, 1),
)
def test_merging_agrees_with_brute_force(sizes: list[int], seed: int, share: float) -> None:
    names = [f"l{index}" for index in range(len(sizes))]
    vectors = dict(
        zip(names, np.random.default_rng(seed).normal(size=(len(names), 4)), strict=True)
    )
    clusters = [
        Cluster((name,), (name,), size, vectors[name])
        for name, size in zip(names, sizes, strict=True)
    ]
    limit = share * sum(sizes)
    merged, reasons = merge_closest(clusters, size_limit=limit)
    expected = brute_force_partition(
        [{name} for name in names],
        {name: vector.tolist() for name, vector in vectors.items()},
        dict(zip(names, sizes, strict=True)),
        size_limit=limit,
    )
    assert {frozenset(cluster.languages) for cluster in merged} == expected
    assert len(reasons) == len(names) - len(merged) + 1
    # Whatever is left over could not be merged any further.
    assert all(a.size + b.size >= limit for a, b in combinations(merged, 2))
    assert sum(cluster.size for cluster in merged) == sum(sizes)


def test_equally_close_groups_merge_in_alphabetical_order() -> None:
    same = np.ones(3)
    clusters = [Cluster((name,), (name,), 1, same) for name in ("d", "b", "c", "a")]
    merged, _ = merge_closest(clusters, size_limit=3)
    assert [cluster.name for cluster in merged] == ["a + b", "c + d"]
    again, _ = merge_closest(clusters[::-1], size_limit=3)
    assert [cluster.name for cluster in again] == ["a + b", "c + d"]


def test_a_joint_size_equal_to_the_limit_is_too_large() -> None:
    clusters = [Cluster((name,), (name,), 2, np.ones(3)) for name in "ab"]
    assert len(merge_closest(clusters, size_limit=4)[0]) == 2
    assert len(merge_closest(clusters, size_limit=4.5)[0]) == 1


def test_a_vector_without_direction_is_at_distance_one() -> None:
    assert cosine_distance(np.zeros(3), np.ones(3)) == 1
    assert cosine_distance(np.array([2.0, 0]), np.array([0, 5.0])) == 1
    assert cosine_distance(np.array([2.0, 0]), np.array([3.0, 0])) == 0


@pytest.mark.parametrize("share", [1e-6, 0.3, 0.5, 0.75, 1.0])
def test_groups_agree_with_brute_force(share: float, checkpoint: Artifact, tmp_path: Path) -> None:
    made = group(tmp_path, GroupsConfig(max_group_share=share), checkpoint=checkpoint)
    # English, the pivot, counts as the largest of the others; the corpus has 150 sentences.
    sizes = {"de": 40, "nl": 10, "ru": 30, "uk": 10, "fr": 35, "el": 5, "fi": 20, "en": 40}
    families = [{"de", "en", "nl"}, {"el"}, {"fr"}, {"ru", "uk"}, {"fi"}]
    expected = brute_force_partition(families, embeddings(), sizes, size_limit=share * 150)
    assert partition(read_groups(made)) == expected
    document = made.read_json("groups.json")
    assert len(document["names"]) == len(expected)
    assert len(document["reasons"]) == len(families) - len(expected) + 1


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_synthetic_lines_change_none(share: float, checkpoint: Artifact, tmp_path: Path) -> None:
    config = GroupsConfig(max_group_share=share)
    more = {"de+back-fr": 500, "en-fi+distilled": 500}
    found = []
    for name, counts in {"natural": COUNTS, "both": COUNTS | more}.items():
        made = group(tmp_path / name, config, counts=counts, checkpoint=checkpoint)
        found.append(made.read_json("groups.json"))
    assert found[0] == found[1]


def test_the_share_is_of_the_sentence_pairs_and_not_of_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's 15 million of 56: groups of 7 and 8 reach the limit of 15, 7 and 7 do not."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    replace_embeddings(monkeypatch, checkpoint, {code: [1.0, 0, 0, 0, 0, 0] for code in CODES})
    for fr_count, merged in ((8, False), (7, True)):
        directory = tmp_path / str(fr_count)
        counts = {"de-en": 49 - fr_count, "en-fr": fr_count, "en-fi": 7}
        made = group(directory, GroupsConfig(), counts=counts, checkpoint=checkpoint)
        groups = read_groups(made)
        assert (groups["fr"] == groups["fi"]) is merged


def test_a_language_without_text_has_a_group(checkpoint: Artifact, tmp_path: Path) -> None:
    counts = {"de-en": 10, "en-ru": 10, "fi-ru": 0, "el-ru": 0}
    made = group(tmp_path, GroupsConfig(), counts=counts, checkpoint=checkpoint)
    assert sorted(read_groups(made)) == ["de", "el", "en", "fi", "ru"]


def test_embeddings_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a dense model"):
        group(tmp_path, GroupsConfig())


@pytest.mark.parametrize("embedding", ["one_hot", "frozen"])
def test_embeddings_that_are_not_learned_are_refused(embedding: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", embedding=embedding)
    with pytest.raises(ConfigError, match=f"embedding.input = '{embedding}', and languages are"):
        group(tmp_path, GroupsConfig(), checkpoint=checkpoint)


@pytest.mark.parametrize(("known", "named"), [(CODES[:-1], "uk"), (CODES[2:], "de, el")])
def test_a_missing_language_is_refused(known: tuple[str, ...], named: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", known)
    with pytest.raises(ConfigError, match=rf"checkpoint does not know {named}, which the shards"):
        group(tmp_path, GroupsConfig(), checkpoint=checkpoint)


def test_groups_by_typology_are_the_families(tmp_path: Path) -> None:
    made = group(tmp_path, GroupsConfig(method="typology"))
    groups = read_groups(made)
    for family, codes in FAMILIES.items():
        numbers = {groups[code] for code in codes if code in groups}
        assert len(numbers) <= 1
        if numbers:
            assert made.read_json("groups.json")["names"][numbers.pop()] == family
    assert len(set(groups.values())) == 5


RARE = {"de-en": 9, "chr-en": 4, "cop-en": 4, "chy-en": 2}


def test_each_language_of_unknown_family_is_a_group_of_its_own_and_named(tmp_path: Path) -> None:
    made = group(tmp_path, GroupsConfig(method="typology"), counts=RARE)
    alone = {f"unknown ({code})": [code] for code in ("chr", "chy", "cop")}
    assert made.statistics["groups"] == {"Germanic": ["de", "en"], **alone}
    reasons = made.read_json("groups.json")["reasons"]
    assert reasons[1] == (
        "unknown (chr) is a group of its own: its family is not known, and languages.family says "
        "it."
    )
    assert made.manifest.summary[0] == "5 languages in 4 groups"
    assert made.manifest.summary[-1] == (
        "no family is known of chr, chy, cop: each began as a group of its own; set "
        'languages.family = { chr = "…" } in the recipe'
    )


def test_the_recipe_says_what_family_a_language_has(tmp_path: Path) -> None:
    families = {"chr_Cher": "Iroquoian", "cop": "Afro-Asiatic", "chy": "Algic", "fr": "Romance"}
    made = group(tmp_path, GroupsConfig(method="typology"), counts=RARE, families=families)
    found = {"Afro-Asiatic": ["cop"], "Algic": ["chy"], "Germanic": ["de", "en"]}
    assert made.statistics["groups"] == {**found, "Iroquoian": ["chr"]}
    assert made.manifest.summary[2:] == ("languages.family names fr, which no pair here has",)


def test_a_family_for_what_is_no_language_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'cherokee' is the name .*. Write 'chr'"):
        group(tmp_path, GroupsConfig(method="typology"), families={"cherokee": "Iroquoian"})


@pytest.mark.parametrize(
    ("config", "families", "said"),
    [
        ({"method": "typology"}, {"de": "A", "deu": "B"}, "family gives de both 'A' and 'B'"),
        ({"method": "paper", "extend": {"fr_FR": 1, "fr": 2}}, {}, "extend gives fr both 1 and 2"),
    ],
)
def test_two_spellings_of_a_language_with_different_values_are_refused(
    config: dict[str, Any], families: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        group(tmp_path, GroupsConfig(**config), families=families)


def test_unknown_families_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = ("chr", "chy", "cop", "de", "en")
    checkpoint = make_checkpoint(tmp_path / "checkpoint", codes)
    vectors = embeddings(codes) | {"chr": [1.0, 0, 0, 0, 0, 0], "chy": [1.0, 0.1, 0, 0, 0, 0]}
    replace_embeddings(monkeypatch, checkpoint, vectors)
    config = GroupsConfig(max_group_share=0.4)
    made = group(tmp_path, config, counts=RARE, checkpoint=checkpoint)
    # Of 19 sentences 0.4 is 7.6: chr and chy together have 6, cop and either of them 8.
    expected = [("de", "en"), ("chr", "chy"), ("cop",)]
    assert partition(read_groups(made)) == {*map(frozenset, expected)}
    assert "no family is known of chr, chy, cop" in made.manifest.summary[-1]


@pytest.mark.parametrize(
    ("method", "second", "groups"),
    [
        ("typology", "zh_Hant", {"Germanic": ["en"], "Sino-Tibetan": ["zh", "zh_Hant"]}),
        ("typology", "pt_BR", {"Germanic": ["en"], "Romance": ["pt", "pt_BR"]}),
        ("paper", "pt_BR", {"group 3": ["en", "pt", "pt_BR"]}),
    ],
)
def test_scripts_and_regions_of_a_language_are_in_one_group(
    method: Any, second: str, groups: dict[str, list[str]], tmp_path: Path
) -> None:
    counts = {f"en-{second[:2]}": 3, f"en-{second}": 3}
    made = group(tmp_path, GroupsConfig(method=method), counts=counts)
    assert made.statistics["groups"] == groups


def test_the_paper_s_groups_count_from_zero_and_leave_no_gap(tmp_path: Path) -> None:
    groups = read_groups(group(tmp_path / "all", GroupsConfig(method="paper")))
    expected = {"fi": 0, "ru": 1, "uk": 1, "de": 2, "en": 2, "fr": 2, "nl": 2, "el": 3}
    assert groups == expected
    made = group(tmp_path, GroupsConfig(method="paper"), counts={"de-en": 9, "el-en": 9})
    assert read_groups(made) == {"de": 0, "en": 0, "el": 1}
    assert made.read_json("groups.json")["names"] == ["group 3", "group 4"]


@pytest.mark.parametrize("code", ["tl", "tgl", "tl_Latn"])
def test_the_paper_s_table_takes_additions(code: str, tmp_path: Path) -> None:
    counts = COUNTS | {"en-tl": 7}
    with pytest.raises(ConfigError, match=r"'tl' is in none .* nearest codes"):
        group(tmp_path, GroupsConfig(method="paper"), counts=counts)
    extended = GroupsConfig(method="paper", extend={code: 1, "ita": 2, "de": 3, "xx": 4})
    made = group(tmp_path / "more", extended, counts=counts)
    assert read_groups(made)["tl"] == 0
    assert made.manifest.summary[-1] == "groups.extend names ita, xx, which no pair here has"


def test_an_addition_to_no_group_of_the_paper_is_refused() -> None:
    with pytest.raises(ValidationError, match="1 to 4"):
        GroupsConfig(method="paper", extend={"tl": 5})


def test_groups_with_gaps_are_refused(tmp_path: Path) -> None:
    with writing(tmp_path / "groups", "groups", "group_languages") as writer:
        writer.write_json("groups.json", {"groups": {"de": 0, "en": 2}})
    with pytest.raises(ArtifactError, match=r"\[0, 2\]"):
        read_groups(open_artifact(tmp_path / "groups", kind="groups"))
