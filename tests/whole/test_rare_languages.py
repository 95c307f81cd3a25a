"""Languages that no registry has go through every stage of data preparation, and into reports."""

from pathlib import Path

import pytest
from support.raw_trees import run_import, write
from support.stage_runs import run_stage

from data_prep.settings import GroupsConfig, LanguagesConfig, TokenizerConfig
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import languages, line_counts, read_lines
from pipeline.artifacts.shards import read_mixture
from pipeline.config.recipe import Recipe
from pipeline.evaluation.scores import describe_directions
from pipeline.languages import language
from pipeline.model.moe.language_groups import read_groups

RECIPE = Recipe(
    name="test",
    tokenizer=TokenizerConfig(vocabulary_size=110, sample_lines=1000),
    groups=GroupsConfig(method="typology"),
    languages=LanguagesConfig(family={"cop": "Afro-Asiatic", "syr": "Afro-Asiatic"}),
)
WORDS = {
    "eng_Latn": "the house of my father is by the river and we go there in summer",
    "chr_Cher": "ᎾᏍᎩ ᎠᏓᏁᎸ ᎡᏙᏓ ᎤᏤᎵ ᎡᏉᏂ ᎾᎥ ᎠᎴ ᎣᎩᏁᎦ ᎪᎩ ᎨᏒ",
    "cop_Copt": "ⲡⲏⲓ ⲛⲧⲉ ⲡⲁⲓⲱⲧ ϧⲁⲧⲉⲛ ⲫⲓⲁⲣⲟ ⲟⲩⲟϩ ⲧⲉⲛϣⲉ ⲉⲙⲁⲩ",
    "syr_Syrc": "ܒܝܬܐ ܕܐܒܝ ܥܠ ܢܗܪܐ ܘܐܙܠܝܢܢ ܠܬܡܢ ܒܩܝܛܐ",
    "zho_Hans": "我父亲的房子在河边 我们夏天去那里",
    "zho_Hant": "我父親的房子在河邊 我們夏天去那裡",
}


def line(spelling: str, number: int) -> str:
    """The words of a language turned round, and a number: no line twice."""
    words = WORDS[spelling].split()
    return " ".join(words[number % len(words) :] + words[: number % len(words)] + [str(number)])


def write_tree(root: Path) -> Path:
    files = {
        f"eng_Latn-{spelling}/{split}.{side}": "".join(
            f"{line(side, start + i)}\n" for i in range(count)
        )
        for number, spelling in enumerate(sorted(WORDS.keys() - {"eng_Latn"}))
        for split, start, count in (("train", 100, 30 + number), ("valid", 0, 3), ("test", 50, 4))
        for side in ("eng_Latn", spelling)
    }
    return write(root, files)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    root = tmp_path_factory.mktemp("rare")

    def run(name: str, out: str, **artifacts: Artifact) -> Artifact:
        return run_stage(name, root / out, artifacts, RECIPE)

    corpus = run_import("import_corpus", root / "corpus", write_tree(root / "raw"), RECIPE)
    cleaned = run("clean", "clean", corpus=corpus)
    tokenizer = run("train_tokenizer", "tokenizer", corpus=cleaned)
    shards = run("make_shards", "shards", corpus=cleaned, tokenizer=tokenizer)
    return {
        "corpus": corpus,
        "clean": cleaned,
        "tokenizer": tokenizer,
        "shards": shards,
        "mixture": run("mix", "mixture", shards=shards),
        "groups": run("group_languages", "groups", shards=shards),
    }


CODES = ["chr", "cop", "en", "syr", "zh", "zh_Hant"]


def test_the_corpus_knows_their_scripts_and_how_they_were_spelled(
    made: dict[str, Artifact],
) -> None:
    assert languages(made["corpus"]) == CODES
    found = made["corpus"].statistics["languages"]
    assert {code: entry["script"] for code, entry in found.items()} == {
        "chr": "Cher",
        "cop": "Copt",
        "en": "Latn",
        "syr": "Syrc",
        "zh": "Hans",
        "zh_Hant": "Hant",
    }
    assert found["chr"]["spellings"] == ["chr_Cher"]


def test_no_line_of_theirs_is_lost(made: dict[str, Artifact]) -> None:
    expected = {"chr-en": 30, "cop-en": 31, "en-syr": 32, "en-zh": 33, "en-zh_Hant": 34}
    for name in ("corpus", "clean", "shards"):
        assert line_counts(made[name], "train") == expected
    assert read_lines(made["clean"], "train", "chr-en", "chr")[0] == line("chr_Cher", 100)
    assert read_lines(made["clean"], "train", "en-zh_Hant", "zh_Hant")[0] == line("zho_Hant", 100)


def test_they_have_tokens_probabilities_and_groups(made: dict[str, Artifact]) -> None:
    tokens = made["tokenizer"].statistics["language_tokens"]
    assert {code: entry["token"] for code, entry in tokens.items()} == {
        code: f"__{code}__" for code in CODES
    }
    assert made["shards"].statistics["unknown_share"]["chr"] == 0
    assert list(read_mixture(made["mixture"]).phases[0].probabilities) == list(
        line_counts(made["shards"], "train")
    )
    assert sorted(read_groups(made["groups"])) == CODES
    assert made["groups"].statistics["groups"] == {
        "Afro-Asiatic": ["cop", "syr"],
        "Germanic": ["en"],
        "Sino-Tibetan": ["zh", "zh_Hant"],
        "unknown (chr)": ["chr"],
    }


def test_reports_have_their_directions_and_names(made: dict[str, Artifact]) -> None:
    profiles = describe_directions(made["clean"], thresholds=(10, 40))
    assert {str(one.direction): one.family for one in profiles}["en-chr"] == "out_of_pivot"
    names = [language(code).name for code in languages(made["clean"])]
    expected = ["Cherokee", "Coptic", "English", "Syriac", "Chinese", "Traditional Chinese"]
    assert names == expected


def test_every_stage_sums_itself_up_in_one_to_five_lines(made: dict[str, Artifact]) -> None:
    for artifact in made.values():
        assert 1 <= len(artifact.manifest.summary) <= 5
    assert made["corpus"].manifest.summary == (
        "read 195 lines of 5 pairs, kept 195 (train 160, valid 15, test 20)",
    )
    assert made["tokenizer"].manifest.summary[0] == "110 pieces and 6 language tokens"
    assert made["tokenizer"].manifest.summary[1].startswith("sampled 320 of 320 training lines")
    assert made["mixture"].manifest.summary[0].startswith("5 pairs with 160 training lines; ")
