"""Raw trees: which folders are pairs, under which codes, and what selection never looks at."""

from pathlib import Path

import pytest

from data_prep.readers.section import LeftOut
from data_prep.readers.tree import PairFolder, find_pairs
from pipeline.errors import ConfigError, DataError


def tree(root: Path, *files: str) -> Path:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    return root


def pair_files(folder: str, split: str = "train") -> tuple[str, str]:
    first, second = folder.rsplit("/", 1)[-1].split("-")
    return f"{folder}/{split}.{first}", f"{folder}/{split}.{second}"


def found(root: Path, *wanted: str) -> list[PairFolder]:
    return find_pairs([root], wanted=wanted, max_line_bytes=100, counts=LeftOut())


@pytest.mark.parametrize(
    ("folder", "pair"),
    [
        ("en-chr", "chr-en"),
        ("eng_Latn-cop_Copt", "cop-en"),
        ("EN-syr", "en-syr"),
        ("en-zh_Hant_TW", "en-zh"),
        ("es_419-en", "en-es"),
        ("xx-yyy", "xx-yyy"),
        ("zho_Hans-zho_Hant", "zh-zh_Hant"),
        ("srp_Cyrl-srp_Latn", "sr-sr_Latn"),
    ],
)
def test_any_well_formed_code_names_a_pair(tmp_path: Path, folder: str, pair: str) -> None:
    [one] = found(tree(tmp_path, *pair_files(folder)))
    assert one.pair == pair
    names = [path.name for path in one.files["train"]]
    assert names == [f"train.{spelling}" for spelling in one.spellings]


def test_two_scripts_of_one_language_are_two_languages(tmp_path: Path) -> None:
    root = tree(
        tmp_path, *pair_files("eng_Latn-zho_Hans"), *pair_files("fra_Latn-zho_Hant", "test")
    )
    assert [folder.pair for folder in found(root)] == ["en-zh", "fr-zh_Hant"]
    assert [folder.pair for folder in found(root, "fr", "zh_Hant")] == ["fr-zh_Hant"]
    assert [folder.pair for folder in found(root, "eng", "zho_Hans")] == ["en-zh"]


def test_one_script_needs_no_mention(tmp_path: Path) -> None:
    root = tree(tmp_path, *pair_files("eng_Latn-zho_Hant"))
    assert [folder.pair for folder in found(root)] == ["en-zh"]
    assert [folder.pair for folder in found(root, "en", "zh")] == ["en-zh"]


def test_one_script_in_several_spellings_is_one_language(tmp_path: Path) -> None:
    root = tree(tmp_path, *pair_files("de-en"), *pair_files("deu_Latn-fr"), *pair_files("pt_BR-en"))
    assert [folder.pair for folder in found(root)] == ["de-en", "de-fr", "en-pt"]


def test_regions_of_one_language_are_languages_where_they_are_kept_apart(tmp_path: Path) -> None:
    """Whichever way the files of en-pt_BR call their side."""
    root = tree(
        tmp_path,
        *pair_files("en-pt"),
        *("en-pt_BR/train.en", "en-pt_BR/train.pt", "en-pt_BR/test.en", "en-pt_BR/test.pt_br"),
    )
    folders = find_pairs(
        [root], wanted=("en", "pt-BR"), regions="apart", max_line_bytes=100, counts=LeftOut()
    )
    assert [(folder.pair, set(folder.files)) for folder in folders] == [
        ("en-pt_BR", {"train", "test"})
    ]
    with pytest.raises(DataError, match="different text of the pair en-pt: join them"):
        found(root)


@pytest.mark.parametrize(
    "odd",
    [
        ("en-fr/train.en",),  # a side missing
        ("en-fr/notes.txt",),  # no text
        ("fr-fra/train.fr",),  # with itself
        ("en-fr/train.en", "en-fr/train.fr", "fr-en/test.en", "fr-en/test.fr"),  # twice
    ],
)
def test_a_folder_that_is_not_selected_stops_nothing(tmp_path: Path, odd: tuple[str, ...]) -> None:
    root = tree(tmp_path, *pair_files("de-en"), *odd)
    with pytest.raises(DataError):
        found(root)
    assert [folder.pair for folder in found(root, "de", "en")] == ["de-en"]


def test_what_was_not_selected_is_counted(tmp_path: Path) -> None:
    root = tree(tmp_path, *pair_files("de-en"), *pair_files("en-fr"), "ids/x.ids")
    counts = LeftOut()
    find_pairs([root], wanted=["de", "en"], max_line_bytes=100, counts=counts)
    assert counts == {"pairs_not_selected": 1, "folders_ignored": 1}
    assert counts.names == {"folders_ignored": ["ids"]}


def test_a_wanted_language_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    root = tree(tmp_path, *pair_files("chr-en"), *pair_files("de-en"))
    with pytest.raises(ConfigError, match=r"asks for chs, which no pair .*that are there: chr\)"):
        found(root, "chs", "de", "en")
    with pytest.raises(ConfigError, match=r"'cherokee' is the name .*. Write 'chr'"):
        found(root, "cherokee", "en")
    with pytest.raises(
        ConfigError, match=r"asks for chr, de, which .* correct corpus\.languages, or add"
    ):
        found(root, "chr", "de")


def test_a_raw_path_that_is_no_folder_is_told_the_layout(tmp_path: Path) -> None:
    (tmp_path / "corpus.tar").write_text("x")
    with pytest.raises(DataError, match=r"corpus\.tar is no folder: name a tree with folders like"):
        found(tmp_path / "corpus.tar")
