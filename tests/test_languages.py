"""The language registry against the paper's tables, and against Babel's CLDR."""

import subprocess
import sys

import pytest
from babel.core import get_global

from pipeline.errors import ConfigError
from pipeline.languages import (
    ALIASES,
    FAMILIES,
    PAPER_GROUPS,
    Language,
    canonical,
    codes_one_edit_away,
    distinct_codes,
    family,
    find_code,
    language,
    nearest_codes,
    own_name,
    parts_words_by_spaces,
    without_region,
)

PAPER_FAMILIES = """
Germanic: af da de en fy is li nb nl nn no sv yi; Celtic: br cy ga gd;
Slavic: be bg bs cs hr mk pl ru sk sl sr uk sh; Baltic: lt lv;
Indo-Iranian: as bn fa gu hi ku mr ne or pa ps si tg ur; Greek: el;
Romance: ca es fr gl it oc pt ro wa; Albanian: sq; Afro-Asiatic: am ar ha he mt;
Turkic: az kk ky tk tr tt ug uz; Constructed: eo; Uralic: et fi hu se; isolate: eu;
Austronesian: id mg ms; Niger-Congo: ig rw xh zu; Japonic: ja; Kartvelian: ka;
Austroasiatic: km vi; Dravidian: kn ml ta te; Koreanic: ko; Sino-Tibetan: my zh; Tai-Kadai: th
"""
M2M_100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl "
    "gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml "
    "mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th "
    "tl tn tr uk ur uz vi wo xh yi yo zh zu"
).split()
BIBLE = "cs da de el en es fi fr he hu ja ko lv mg ml my nl pl pt ru sr sv tl vi zh".split()
OPUS_100_WITHOUT_TESTS = "an dz hy mn yo".split()


def paper_families() -> dict[str, str]:
    entries = (entry.split(":") for entry in PAPER_FAMILIES.split(";"))
    return {code: name.strip() for name, codes in entries for code in codes.split()}


def test_the_95_languages_of_opus_100_have_the_paper_s_22_families() -> None:
    expected = paper_families()
    assert len(expected) == 95
    assert {code: family(code) for code in expected} == expected
    assert len(set(expected.values())) == 22


def test_each_language_of_opus_100_is_in_exactly_one_paper_group() -> None:
    listed = [code for codes in PAPER_GROUPS.values() for code in codes]
    assert sorted(listed) == sorted(paper_families())
    assert [len(PAPER_GROUPS[group]) for group in (1, 2, 3, 4)] == [37, 19, 23, 16]


def test_no_language_is_in_two_families() -> None:
    listed = [code for codes in FAMILIES.values() for code in codes]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("codes", [M2M_100, BIBLE, OPUS_100_WITHOUT_TESTS])
def test_the_languages_of_known_corpora_and_models_have_a_family(codes: list[str]) -> None:
    assert all(family(code) in FAMILIES for code in codes)


def test_m2m_100_has_one_hundred_different_languages() -> None:
    assert len({canonical(code) for code in M2M_100}) == 100


@pytest.mark.parametrize(
    "pair",
    (
        "iw=he in=id ji=yi fil=tl tgl_Latn=tl zh_cn=zh zh-CN=zh zh_tw=zh zho_Hant=zh deu_Latn=de "
        "eng_Latn=en de_DE=de es_419=es EN=en zh_Hans_CN=zh nob_Latn=nb nno_Latn=nn no=no nb=nb "
        "sh=sh ns=nso"
    ).split(),
)
def test_usual_spellings_lead_to_one_code(pair: str) -> None:
    spelling, code = pair.split("=")
    assert canonical(spelling) == code


def test_aliases_agree_with_those_of_cldr() -> None:
    ours_differ = {"tl": "fil", "sh": "sr"}
    cldr = get_global("language_aliases")
    compared = {alias: code for alias, code in ALIASES.items() if alias in cldr}
    assert len(compared) > 150
    for alias, code in compared.items():
        assert cldr[alias].split("_")[0] == ours_differ.get(code, code)


@pytest.mark.parametrize(
    ("code", "found", "name", "script"),
    [
        ("chr", "chr", "Cherokee", "Cher"),
        ("chr_Cher_US", "chr_US", "Cherokee (United States)", "Cher"),
        ("COP", "cop", "Coptic", "Copt"),
        ("syr-Syrc", "syr", "Syriac", "Syrc"),
        ("qfr", "qfr", "qfr", "Zzzz"),
        ("qfr_Arab", "qfr_Arab", "qfr_Arab", "Arab"),
    ],
)
def test_any_well_formed_code_is_a_language_of_unknown_family(
    code: str, found: str, name: str, script: str
) -> None:
    assert language(code) == Language(found, name, "unknown", script)
    assert canonical(code) == found.split("_")[0]
    assert family(code) == "unknown"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        *(
            ("de", "Deutsch"),
            ("ar", "العربية"),
            ("zh_Hant", "中文 (繁體)"),
            ("deu_Latn", "Deutsch"),
        ),
        *(("chr", "ᏣᎳᎩ"), ("prs", "دری"), ("twi_Latn", "Twi"), ("cop", "Coptic")),
        *(("qfr", "qfr"), ("a language", "a language")),
    ],
)
def test_a_language_has_its_own_name_if_cldr_knows_it(code: str, name: str) -> None:
    assert own_name(code) == name


@pytest.mark.parametrize("code", ["d", "", "de en", "de_", "d3", "zh_Hant_TW_x", "1a"])
def test_what_is_no_code_is_refused_with_how_codes_are_written(code: str) -> None:
    with pytest.raises(ConfigError, match=r"is no language code\. Write two or three letters"):
        canonical(code)


def test_what_is_nearly_a_code_is_refused_with_the_nearest_codes() -> None:
    with pytest.raises(ConfigError, match=r"'gerx'.*nearest codes: .*\bger\b"):
        canonical("gerx")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("German", "de"),
        ("ukrainian", "uk"),
        ("Portugese", "pt"),  # a letter is missing
        ("Filipino", "tl"),
        ("Simplified  Chinese", "zh_Hans"),
    ],
)
def test_the_english_name_of_a_language_is_refused_with_its_code(name: str, code: str) -> None:
    with pytest.raises(ConfigError, match=rf"is the name of a language .*. Write '{code}'"):
        canonical(name)
    assert canonical(code)


@pytest.mark.parametrize(
    ("spellings", "codes"),
    [
        (["zho_Hans", "zho_Hant"], ["zh", "zh_Hant"]),
        (["zho_Hant"], ["zh"]),
        (["zho_Hant", "zh_TW"], ["zh", "zh"]),
        (["zh_cn", "zh_tw"], ["zh", "zh_Hant"]),
        (["zh", "zho_Hant"], ["zh", "zh_Hant"]),
        (["srp_Cyrl", "srp_Latn", "hrv_Latn"], ["sr", "sr_Latn", "hr"]),
        (["srp_Latn", "eng_Latn"], ["sr", "en"]),
        (["de", "deu_Latn", "de_AT"], ["de", "de", "de"]),
        (["ace_Arab", "ace_Latn"], ["ace_Arab", "ace"]),
        (["xyz_Arab", "xyz_Latn", "xyz"], ["xyz_Arab", "xyz_Latn", "xyz"]),
        (["pt_BR", "pt_PT"], ["pt", "pt"]),
        (["pes_Arab", "prs_Arab"], ["fa", "fa"]),
    ],
)
def test_two_scripts_in_one_corpus_are_two_codes_and_one_script_is_none(
    spellings: list[str], codes: list[str]
) -> None:
    assert distinct_codes(spellings) == dict(zip(spellings, codes, strict=True))


def test_codes_of_a_corpus_mean_the_same_when_they_are_read_again() -> None:
    codes = set(distinct_codes(["zho_Hans", "zho_Hant", "srp_Latn", "srp_Cyrl"]).values())
    assert {find_code(code, codes) for code in codes} == codes
    assert distinct_codes(codes) == {code: code for code in codes}


@pytest.mark.parametrize(
    ("spelling", "codes", "found"),
    [
        *(("zho_Hant", "zh zh_Hant", "zh_Hant"), ("zho_Hant", "zh", "zh")),
        *(("prs_Arab", "fa prs", "prs"), ("pes_Arab", "fa prs", "fa"), ("prs_Arab", "fa", "fa")),
        *(("zh_Hans", "zh zh_Hant", "zh"), ("iw", "he", "he"), ("chr_Cher", "chr en", "chr")),
        *(("fr", "de", None), ("pt-br", "pt pt_BR", "pt_BR"), ("por_BR", "pt pt_BR", "pt_BR")),
        *(("pt", "pt pt_BR", "pt"), ("pt-PT", "pt pt_BR", "pt"), ("pt-br", "pt", "pt")),
        *(("zh_Hant", "zh zh_TW", "zh_TW"), ("zh_TW", "zh zh_Hant", "zh_Hant")),
        *(("zho-TW", "zh_Hant zh", "zh_Hant"), ("zh_HK", "zh zh_Hant", "zh_Hant")),
        *(("zh_HK", "zh zh_TW", "zh_TW"), ("zh_HK", "zh", "zh"), ("zh-CN", "zh_Hant zh", "zh")),
        *(("pa_PK", "pa pa_Arab", "pa_Arab"), ("pan-IN", "pa pa_Arab", "pa")),
        *(("uz_AF", "uz uz_Arab", "uz_Arab"), ("sr_ME", "sr sr_Latn", "sr_Latn")),
        *(("zh", "zho_Hant zho_Hans", "zho_Hans"), ("fr-CA", "fra fra-CA", "fra-CA")),
        *(("fr-CH", "fra fra-CA", "fra"), ("twi", "aka_Latn twi_Latn", "twi_Latn")),
        *(("aka", "aka_Latn twi_Latn", "aka_Latn"), ("prs", "pes_Arab prs_Arab", "prs_Arab")),
        *(("zh_Hant", "x_of_its_own zh", "zh"), ("zh", "zh_Hant", None)),
        ("sr_Latn_RS", "sr_RS sr_Latn_RS", "sr_Latn_RS"),
    ],
)
def test_a_spelling_is_found_among_the_codes_of_a_model(
    spelling: str, codes: str, found: str | None
) -> None:
    assert find_code(spelling, codes.split()) == found


@pytest.mark.parametrize(
    "given",
    ["zh_CN zh_TW", "zho-CN zho-TW zho-HK", "pa_IN pa_PK", "az_AZ az_IR", "sr_Latn_RS sr_RS"],
)
def test_a_spelling_is_found_under_the_code_that_its_corpus_gives_it(given: str) -> None:
    spellings = given.split()
    codes = distinct_codes(spellings)
    assert len(set(codes.values())) == 2
    assert {spelling: find_code(spelling, codes.values()) for spelling in spellings} == codes


@pytest.mark.parametrize(
    ("spellings", "codes"),
    [
        (["pt", "pt-br"], ["pt", "pt_BR"]),
        (["pt_PT", "por_BR"], ["pt_PT", "pt_BR"]),
        (["pt-br", "en"], ["pt", "en"]),
        (["pt-br", "pt_BR"], ["pt", "pt"]),
        (["zh", "zh-cn", "zh-tw"], ["zh", "zh_CN", "zh_TW"]),
        (["zho_Hans", "zho_Hant"], ["zh", "zh_Hant"]),
        (["zho_Hant_TW", "zh"], ["zh_TW", "zh"]),
        (["sr_Latn_RS", "sr_RS", "sr"], ["sr_Latn_RS", "sr_RS", "sr"]),
        (["es_419", "es"], ["es_419", "es"]),
    ],
)
def test_regions_of_one_corpus_can_be_codes_of_their_own(
    spellings: list[str], codes: list[str]
) -> None:
    assert distinct_codes(spellings, regions="apart") == dict(zip(spellings, codes, strict=True))
    found = set(codes)
    assert {find_code(code, found) for code in found} == found


def test_a_code_without_its_region_is_the_one_that_tables_know() -> None:
    codes = ["pt", "pt_BR", "es_419", "zh_Hant", "sr_Latn_RS", "chr"]
    assert list(map(without_region, codes)) == ["pt", "pt", "es", "zh_Hant", "sr_Latn", "chr"]


@pytest.mark.parametrize(
    ("code", "name", "script"),
    [
        *(("pt_BR", "Brazilian Portuguese", "Latn"), ("fr_CA", "Canadian French", "Latn")),
        *(("zh_TW", "Chinese (Taiwan)", "Hant"), ("zh_CN", "Chinese (China)", "Hans")),
        *(("sr_Latn_RS", "Serbian (Latin, Serbia)", "Latn"), ("de", "German", "Latn")),
        *(("sr", "Serbian", "Cyrl"), ("sh", "Serbo-Croatian", "Latn"), ("zh", "Chinese", "Hans")),
        *(("he", "Hebrew", "Hebr"), ("ur", "Urdu", "Arab"), ("ja", "Japanese", "Jpan")),
        *(("fa", "Persian", "Arab"), ("prs_Arab", "Dari", "Arab"), ("ak", "Akan", "Latn")),
        *(("twi", "Twi", "Latn"), ("zh_Hant", "Traditional Chinese", "Hant")),
        ("ace_Arab", "Acehnese (Arabic)", "Arab"),
    ],
)
def test_a_language_has_its_usual_name_and_script_and_the_family_of_all_its_forms(
    code: str, name: str, script: str
) -> None:
    found = language(code)
    assert (found.name, found.script) == (name, script)
    assert found.family == family(code) == family(code.partition("_")[0])
    assert code.startswith(("prs", "twi")) or found.code == code
    assert parts_words_by_spaces(code) == (code[:2] not in ("zh", "ja"))


def test_a_recipe_s_family_goes_before_the_registry_s() -> None:
    assert family("chr", {"chr": "Iroquoian"}) == family("chr_Cher", {"chr": "Iroquoian"})
    assert family("la", {"la": "Romance"}) == "Romance"
    assert family("de", {"la": "Romance"}) == "Germanic"


def test_codes_one_edit_away_are_those_with_one_letter_more_less_or_other() -> None:
    assert codes_one_edit_away("frx") == ["fr", "fy"]
    assert "de" in codes_one_edit_away("dee")
    assert "de" not in codes_one_edit_away("de")
    assert codes_one_edit_away("qxq") == []


def test_nearest_codes_come_nearest_first_and_only_from_the_candidates() -> None:
    assert nearest_codes("deu", ["de", "fr", "el"]) == ["de"]
    assert nearest_codes("dd", ["de", "fr"]) == ["de"]
    assert nearest_codes("sw", ["es", "sv", "sw_Arab"]) == ["sw_Arab"]
    assert nearest_codes("zh_Hant", ["zh", "ha"]) == ["zh"]
    assert nearest_codes("qq", ["de", "fr"]) == []


def test_every_language_has_a_name_and_a_script() -> None:
    for codes in FAMILIES.values():
        for code in codes:
            found = language(code)
            assert found.name not in ("", code)
            assert len(found.script) == 4


def test_codes_and_families_need_no_babel() -> None:
    program = (
        "import sys; from pipeline.languages import canonical, family; "
        "canonical('deu_Latn'); family('de'); sys.exit('babel' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
