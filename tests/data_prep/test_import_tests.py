"""Test sets from outside, in the layouts they come in, become a corpus that can be translated."""

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raw_trees import Raw, run_import, write

from data_prep.import_tests import describe_file
from data_prep.settings import CorpusConfig, OutsideTestsConfig
from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import directions, line_counts, read_lines
from pipeline.config.recipe import Recipe
from pipeline.errors import EXIT_USER_ERROR, ConfigError, DataError

BIBLE = Path(__file__).parents[3] / "shared" / "data" / "bible"


def imported(out_dir: Path, raw: Raw, **settings: object) -> Artifact:
    of_corpus: dict[str, object] = {"pivot": "en", "regions": "joined"}
    of_corpus |= {name: settings.pop(name) for name in of_corpus if name in settings}
    corpus = CorpusConfig.model_validate(of_corpus)
    recipe = Recipe(name="test", corpus=corpus, tests=OutsideTestsConfig.model_validate(settings))
    artifact = run_import("import_tests", out_dir, raw, recipe)
    artifact.check()
    return artifact


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return tmp_path / "raw"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "corpus"


def lines(language: str, split: str, number: int) -> str:
    return "".join(f"{split} {i} {language}\n" for i in range(number))


def flores(root: Path, languages: Sequence[str], *, dev: int = 2, devtest: int = 3) -> Path:
    write(root, {"README": "about", "metadata_dev.tsv": "a\tb\n"})
    for code in languages:
        write(
            root,
            {
                f"dev/{code}.dev": lines(code, "dev", dev),
                f"devtest/{code}.devtest": lines(code, "devtest", devtest),
            },
        )
    return root


def ntrex(root: Path, languages: Sequence[str], *, number: int = 3) -> Path:
    write(root, {"LANGUAGES.tsv": "x", "NTREX-128/newstest2019-src.eng.txt": lines("en", "", 3)})
    for code in languages:
        name = f"NTREX-128/newstest2019-ref.{code}.txt"
        write(root, {name: lines(code, "", number)})
    return root


def test_flores_becomes_valid_and_test_lines_of_pivot_pairs(raw: Path, out: Path) -> None:
    corpus = imported(out, flores(raw, ["eng_Latn", "deu_Latn", "zho_Hans", "heb_Hebr"]))
    assert line_counts(corpus, "test") == {"de-en": 3, "en-he": 3, "en-zh": 3}
    assert line_counts(corpus, "valid") == {"de-en": 2, "en-he": 2, "en-zh": 2}
    assert line_counts(corpus, "train") == {}
    assert read_lines(corpus, "test", "en-zh", "zh") == [f"devtest {i} zho_Hans" for i in range(3)]
    assert read_lines(corpus, "valid", "en-zh", "en") == ["dev 0 eng_Latn", "dev 1 eng_Latn"]
    assert corpus.statistics["layout"] == "FLORES-200"
    assert corpus.manifest.summary == (
        "FLORES-200: 3 test lines and 2 valid lines of 4 languages, in 3 pairs (6 test directions)",
        "files not read: of other names 2",
    )
    assert not (out / "languages").exists()


def test_the_folder_of_one_split_is_enough_and_may_be_compressed(out: Path) -> None:
    corpus = imported(out, {"eng_Latn.devtest.gz": "one\n", "deu_Latn.devtest": "eins\n"})
    assert line_counts(corpus, "valid") == {}
    assert read_lines(corpus, "test", "de-en", "en") == ["one"]


def test_a_split_with_the_pivot_only_is_not_read(raw: Path, out: Path) -> None:
    """Though its file may be damaged, or be the only one with lines."""
    damaged = {"dev/eng_Latn.dev": "x\0\n" * 30}
    write(raw, {f"devtest/{code}.devtest": "a\n" for code in ("eng_Latn", "deu_Latn")} | damaged)
    made = imported(out, raw)
    assert made.statistics["pairs"] == {"de-en": {"train": 0, "valid": 0, "test": 1}}
    assert made.manifest.summary[0].startswith("FLORES-200: 1 test line and 0 valid lines of 2")
    assert made.manifest.summary[-1] == "files not read: of other languages 1"
    write(raw, {f"devtest/{code}.devtest": "" for code in ("eng_Latn", "deu_Latn")})
    with pytest.raises(DataError, match="has no lines"):
        imported(out.with_name("again"), raw)


def test_ntrex_becomes_test_lines_and_its_source_is_the_english_side(raw: Path, out: Path) -> None:
    found = ["deu", "eng-US", "eng-GB", "fra", "fra-CA", "zho-CN", "aze-Latn"]
    corpus = imported(out, ntrex(raw, found))
    assert line_counts(corpus, "test") == {"az-en": 3, "de-en": 3, "en-fr": 3, "en-zh": 3}
    assert read_lines(corpus, "test", "en-fr", "en") == [f" {i} en" for i in range(3)]
    assert read_lines(corpus, "test", "en-fr", "fr") == [f" {i} fra" for i in range(3)]
    assert corpus.statistics["other_versions"] == [
        "newstest2019-ref.eng-GB.txt",
        "newstest2019-ref.eng-US.txt",
        "newstest2019-ref.fra-CA.txt",
    ]
    assert "newstest2019-ref.fra-CA.txt" in " ".join(corpus.manifest.summary)


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        *(("zho-TW", "zho-TW"), ("zh_HK", "zho-TW"), ("zh-CN", "zho-CN"), ("fr-CA", "fra-CA")),
        *(("fr", "fra"), ("twi", "twi"), ("eng-US", "eng-US")),
    ],
)
def test_a_language_asked_for_by_region_or_variety_is_the_file_read(
    raw: Path, out: Path, wanted: str, name: str
) -> None:
    found = ["eng-US", "deu", "fra", "fra-CA", "zho-CN", "zho-TW", "aka", "twi"]
    corpus = imported(out, ntrex(raw, found), languages=("de", wanted), pivot="de")
    (pair,) = line_counts(corpus, "test")
    (code,) = set(pair.split("-")) - {"de"}
    assert read_lines(corpus, "test", pair, code) == [f" {i} {name}" for i in range(3)]


def test_regions_are_languages_of_their_own_where_the_corpus_keeps_them_apart(
    raw: Path, out: Path
) -> None:
    corpus = imported(out, ntrex(raw, ["por", "por-BR", "deu"]), regions="apart")
    assert line_counts(corpus, "test") == {"de-en": 3, "en-pt": 3, "en-pt_BR": 3}
    assert read_lines(corpus, "test", "en-pt_BR", "pt_BR") == [f" {i} por-BR" for i in range(3)]
    assert corpus.statistics["other_versions"] == []


@pytest.mark.parametrize(
    ("pairs", "code", "spellings"),
    [
        (["en-pt", "fr-pt_BR"], "pt", ["pt", "pt_BR"]),
        (["de-zh_TW", "en-zh_HK", "fr-zh_TW"], "zh", ["zh_HK", "zh_TW"]),
    ],
)
def test_all_spellings_of_a_language_are_noted(
    pairs: list[str], code: str, spellings: list[str], out: Path
) -> None:
    files = {f"x.{pair}.{one}": f"{one}\n" for pair in pairs for one in pair.split("-")}
    found = imported(out, files).statistics["languages"]
    assert found[code] == {"spellings": spellings}


def test_pairs_of_two_regions_are_two_pairs_where_the_corpus_keeps_them_apart(out: Path) -> None:
    pairs = {"en-es": ("en", "es"), "en-es_MX": ("en", "es_MX")}
    files = {f"x.{pair}.{one}": f"{one}\n" for pair, of in pairs.items() for one in of}
    corpus = imported(out, files, regions="apart", languages=("en", "es-MX", "es"))
    assert line_counts(corpus, "test") == {"en-es": 1, "en-es_MX": 1}


def test_pairs_of_files_become_their_pairs_and_no_others(out: Path) -> None:
    files: dict[str, str | bytes] = {
        **{"newstest2014.de-en.de": "eins\n", "newstest2014.de-en.en": "one\n"},
        **{"newsdev2014.de-en.de": "zwei\n", "newsdev2014.de-en.en": "two\n"},
        "zero-shot/newstest2014.ru-fr.fr": "trois\n",
        "zero-shot/newstest2014.ru-fr.ru": "три\n",
    }
    corpus = imported(out, files)
    assert line_counts(corpus, "test") == {"de-en": 1, "fr-ru": 1}
    assert line_counts(corpus, "valid") == {"de-en": 1}
    assert read_lines(corpus, "test", "fr-ru", "ru") == ["три"]


@pytest.mark.parametrize(
    ("names", "pair"),
    [
        (("news.de-en.DE", "news.de-en.EN"), "de-en"),
        (("news.en-zh_CN.zh_cn.gz", "news.en-zh_CN.en"), "en-zh"),
    ],
)
def test_the_ending_of_a_file_may_be_written_in_other_letters_than_its_pair(
    names: tuple[str, str], pair: str, out: Path
) -> None:
    corpus = imported(out, dict.fromkeys(names, "1\n"))
    assert line_counts(corpus, "test") == {pair: 1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eng_Latn.dev", ("FLORES-200", "valid", "eng_Latn")),
        ("eng.devtest", ("FLORES-200", "test", "eng")),
        ("zho_Hant.devtest.gz", ("FLORES-200", "test", "zho_Hant")),
        ("newstest2019-ref.srp-Latn.txt", ("NTREX-128", "test", "srp-Latn")),
        ("newstest2019-src.eng.txt", ("NTREX-128", "test", "eng")),
        ("wmt.zh_CN-en.zh_CN", ("pairs", "test", "zh_CN")),
        ("my-valid-set.de-en.en", ("pairs", "valid", "en")),
        ("flores.devtest.de-en.en.gz", ("pairs", "test", "en")),
        *((name, None) for name in ("newstest2019-ref-2.spa.txt", "newstest.de-en.fr", "train.en")),
        *((name, None) for name in ("newstest.de-en.src.sgm", "metadata_dev.tsv", "english.dev")),
    ],
)
def test_a_file_is_what_its_name_says(name: str, expected: tuple[str, str, str] | None) -> None:
    found = describe_file(Path(name))
    assert (found and (found.layout, found.split, found.spelling)) == expected


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.sampled_from(["deu", "eng", "fra", "rus", "zho"]), min_size=2, unique=True),
    st.booleans(),
)
def test_all_directions_or_those_of_the_pivot_are_made(
    tmp_path_factory: pytest.TempPathFactory, codes: list[str], every: bool
) -> None:
    directory = tmp_path_factory.mktemp("tests")
    short = {"deu": "de", "eng": "en", "fra": "fr", "rus": "ru", "zho": "zh"}
    pivot = short[codes[0]]
    raw, ways = flores(directory / "raw", codes), "all" if every else "pivot"
    corpus = imported(directory / "out", raw, pivot=pivot, directions=ways)
    expected = {
        (one, other)
        for one, other in itertools.permutations([short[code] for code in codes], 2)
        if every or pivot in (one, other)
    }
    assert {(one.source, one.target) for one in directions(corpus, "test")} == expected
    for one in directions(corpus, "test"):
        sides = [read_lines(corpus, "test", one.pair, code) for code in (one.source, one.target)]
        assert [[line.split()[1] for line in side] for side in sides] == [["0", "1", "2"]] * 2
        assert [short[side[0].split()[2]] for side in sides] == [one.source, one.target]


def test_a_second_script_of_a_language_is_a_language_of_its_own(raw: Path, out: Path) -> None:
    """Also one that the registry does not have."""
    corpus = imported(out, flores(raw, ["eng_Latn", "zho_Hans", "zho_Hant", "kmb_Latn"]))
    assert line_counts(corpus, "test") == {"en-kmb": 3, "en-zh": 3, "en-zh_Hant": 3}
    assert read_lines(corpus, "test", "en-zh", "zh")[0] == "devtest 0 zho_Hans"


@pytest.mark.parametrize(
    ("wanted", "spelling"), [("zh", "zho_Hans"), ("zho_Hant", "zho_Hant"), ("cmn_Hans", "zho_Hans")]
)
def test_a_language_is_asked_for_in_any_spelling_and_its_only_script_needs_no_mention(
    raw: Path, out: Path, wanted: str, spelling: str
) -> None:
    flores(raw, ["eng_Latn", "zho_Hans", "zho_Hant", "deu_Latn"])
    corpus = imported(out, raw, languages=("en", wanted))
    assert line_counts(corpus, "test") == {"en-zh": 3}
    assert read_lines(corpus, "test", "en-zh", "zh")[0] == f"devtest 0 {spelling}"
    assert "of other languages 4" in " ".join(corpus.manifest.summary)


def test_of_pairs_only_those_of_two_wanted_languages_are_read(raw: Path, out: Path) -> None:
    for pair in ("de-en", "de-fr"):
        write(raw, {f"x.{pair}.{code}": f"{code}\n" for code in pair.split("-")})
    corpus = imported(out, raw, languages=("de", "eng"))
    assert line_counts(corpus, "test") == {"de-en": 1}


def test_a_line_that_is_no_text_in_one_language_is_left_out_of_all(raw: Path, out: Path) -> None:
    codes = ["eng_Latn", "deu_Latn", "fra_Latn"]
    flores(raw, codes, devtest=40)
    content = lines("deu_Latn", "devtest", 40).encode().split(b"\n")
    content[7], content[9] = b"b\xffse", b"\0"
    write(raw, {"devtest/deu_Latn.devtest": b"\n".join(content)})
    write(raw, {"dev/fra_Latn.dev": "\ufeffeins\u2028zwei\r\n \u200b\n"})
    corpus = imported(out, raw)
    expected = [i for i in range(40) if i not in (7, 9)]
    for pair in ("de-en", "en-fr"):
        for code in pair.split("-"):
            found = read_lines(corpus, "test", pair, code)
            assert [int(line.split()[1]) for line in found] == expected
    assert read_lines(corpus, "valid", "en-fr", "fr") == ["eins zwei", " \u200b"]
    assert corpus.statistics["pairs"]["en-fr"] == {"train": 0, "valid": 2, "test": 38}
    counts = corpus.statistics["counts"]
    assert (counts["quarantined"], counts["lines_without_text"]) == (2, 1)
    quarantine = corpus.file("quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in quarantine] == [
        {"file": "devtest/deu_Latn.devtest", "line": 8, "reason": "invalid_utf8"},
        {"file": "devtest/deu_Latn.devtest", "line": 10, "reason": "nul"},
    ]
    assert (
        "left out: 2 lines in all languages, into quarantine.jsonl (invalid_utf8 in de 1, "
        "nul in de 1)" in corpus.manifest.summary
    )


def test_a_line_above_the_limit_goes(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CorpusConfig, "max_line_bytes", 100)
    corpus = imported(out, {"eng.devtest": "a\n" + "b" * 200 + "\n", "deu.devtest": "a\nb\n"})
    assert read_lines(corpus, "test", "de-en", "de") == ["a"]


def test_a_file_that_is_not_utf8_at_all_is_refused_by_its_name(raw: Path, out: Path) -> None:
    flores(raw, ["eng_Latn", "deu_Latn", "rus_Cyrl"], devtest=50)
    write(raw, {"devtest/rus_Cyrl.devtest": "строка\n".encode("cp1251") * 50})
    with pytest.raises(DataError, match=r"rus_Cyrl\.devtest: 50 of 50 lines") as error:
        imported(out, raw)
    assert "deu_Latn" not in str(error.value)


TWO = ("eng_Latn", "deu_Latn")


@pytest.mark.parametrize(
    ("languages", "files", "said"),
    [
        (TWO, {"newstest2019-src.eng.txt": "a\n"}, r"NTREX-128 .*, FLORES-200 "),
        (TWO, {"more/deu_Latn.dev": "x\n"}, "both the valid text of deu_Latn"),
        (
            (*TWO, "fra_Latn"),
            {"devtest/fra_Latn.devtest": lines("fra_Latn", "devtest", 5)},
            r"deu_Latn.devtest has 3 .*fra_Latn\.devtest has 5",
        ),
        (("deu_Latn", "fra_Latn"), {}, "no file of the pivot 'en' among de, fr"),
        (
            (),
            dict.fromkeys(
                [f"{s}-ref.{code}.txt" for s in ("news1", "news2") for code in ("deu", "eng")], "a"
            ),
            "several test sets, news1, news2",
        ),
        ((), {"one.de-en.de": "a\n", "two.de-en.de": "a\n"}, "several test sets, one, two"),
        ((), {"x.de-en.de": "a\n", "y.de-en.en": "b\n"}, "several test sets, x, y"),
        ((), {"x.de-en.de": "a\n"}, r"x\.de-en\.de has no counterpart in en"),
        ((), {"x.de-deu.de": "a\n"}, "pairs a language with itself"),
        *(
            ((), files, r"holds no test sets\. .*FLORES-200.*use import_corpus")
            for files in ({}, {"en-de/test.en": "a\n"}, {"notes.txt": "a"})
        ),
    ],
)
def test_folders_that_cannot_be_read_are_told(
    raw: Path, out: Path, languages: Sequence[str], files: dict[str, str | bytes], said: str
) -> None:
    raw.mkdir()
    if languages:
        flores(raw, languages)
    with pytest.raises((ConfigError, DataError), match=said):
        imported(out, write(raw, files))
    assert not out.exists()


def test_a_file_that_is_a_link_to_nothing_is_told(raw: Path, out: Path) -> None:
    flores(raw, ["eng_Latn", "deu_Latn"])
    (raw / "devtest" / "fra_Latn.devtest").symlink_to(raw / "nowhere")
    with pytest.raises(DataError, match=r"fra_Latn\.devtest is a link to nothing\. Restore its"):
        imported(out, raw)


def test_a_language_that_is_not_there_is_named_with_the_nearest(raw: Path, out: Path) -> None:
    flores(raw, ["eng_Latn", "deu_Latn"])
    with pytest.raises(ConfigError, match=r"asks for es, but no file is in it.*: de, en"):
        imported(out, raw, languages=("en", "es"))
    with pytest.raises(ConfigError, match=r"no pair of the languages .*en.*\. Add the other"):
        imported(out, raw, languages=("en",))


def test_a_file_where_a_folder_is_wanted_and_empty_files_are_refused(raw: Path, out: Path) -> None:
    flores(raw, ["eng_Latn", "deu_Latn"], dev=0, devtest=0)
    with pytest.raises(DataError, match="has no lines"):
        imported(out, raw)
    with pytest.raises(DataError, match="is not a folder"):
        imported(out, raw / "README")


def test_the_command_may_take_a_recipe(
    raw: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flores(raw, ["eng_Latn", "deu_Latn", "fra_Latn"])
    assert cli.main(["import_tests", "--raw", str(raw), "--out", str(out)]) == 0
    assert "mmnmt import_tests: FLORES-200: 3 test lines" in capsys.readouterr().out
    assert cli.main(["import_tests", "--raw", str(raw), "--out", str(out)]) == 0
    assert "already done" in capsys.readouterr().err
    recipe = raw.parent / "recipe.toml"
    recipe.write_text('[tests]\ndirections = "all"\n', encoding="utf-8")
    given = ["import_tests", "--recipe", str(recipe), "--raw", str(raw)]
    assert cli.main([*given, "--out", str(out)]) == EXIT_USER_ERROR
    assert cli.main([*given, "--out", f"{out}-all"]) == 0
    assert "de-fr" in line_counts(open_artifact(Path(f"{out}-all"), kind="corpus"), "test")


@pytest.mark.skipif(not BIBLE.is_dir(), reason="no Bible corpus beside the repository")
def test_real_lines_in_many_scripts_come_out_as_they_went_in(raw: Path, out: Path) -> None:
    names = {"de": "deu_Latn", "he": "heb_Hebr", "my": "mya_Mymr", "zh": "zho_Hans"}
    for code, spelling in names.items():
        text = gzip.decompress((BIBLE / f"en-{code}" / f"test.{code}.gz").read_bytes())
        write(raw, {f"devtest/{spelling}.devtest": text})
    english = gzip.decompress((BIBLE / "en-de" / "test.en.gz").read_bytes())
    write(raw, {"devtest/eng_Latn.devtest": english})
    corpus = imported(out, raw)
    for code, spelling in names.items():
        pair = "-".join(sorted(("en", code)))
        expected = (raw / f"devtest/{spelling}.devtest").read_text(encoding="utf-8")
        assert read_lines(corpus, "test", pair, code) == expected.removesuffix("\n").split("\n")
        assert read_lines(corpus, "test", pair, "en") == english.decode().split("\n")[:-1]
