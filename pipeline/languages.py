"""Know languages: codes, families, scripts, and the scripts that a text is written in.

Codes follow OPUS-100: two letters of ISO 639-1 where they exist, else three of ISO 639-3;
Norwegian (``no``, ``nb``, ``nn``) and Serbo-Croatian (``sh``) keep the codes OPUS-100 gives them.
Any other well-formed code stands for itself; its family is unknown until the recipe names it. A
language with two scripts has the plain code for its usual script and ``zh_Hant`` for the other; the
language of a region, where a corpus keeps regions apart, is ``pt_BR``.

Scripts have the codes of ISO 15924 (``Latn``, ``Cher``). A letter belongs to the script that its
Unicode name begins with, CHEROKEE LETTER A to Cherokee. Names and scripts come from Unicode CLDR
through Babel, which is imported on first use: training and decoding need neither.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pipeline.errors import ConfigError, nearest_names

FAMILIES: dict[str, tuple[str, ...]] = {
    family: tuple(codes.split())
    for family, codes in {
        "Germanic": "af da de en fo fy is lb li nb nl nn no sv yi",
        "Celtic": "br cy ga gd gv kw",
        "Slavic": "be bg bs cs dsb hr hsb mk pl ru rue sh sk sl sr uk",
        "Baltic": "lt ltg lv",
        "Indo-Iranian": "as bho bn ckb dv fa gu hi ks ku mai mr ne or os pa ps sa sd si tg ur",
        "Greek": "el",
        "Romance": "an ast ca co es fr fur gl it lmo oc pt rm ro sc scn vec wa",
        "Italic": "la",
        "Albanian": "sq",
        "Armenian": "hy",
        "Afro-Asiatic": "am ar ha he kab mt om so ti",
        "Turkic": "az ba crh cv kk ky sah tk tr tt ug uz",
        "Constructed": "eo ia io vo",
        "Uralic": "et fi hu kv se",
        "isolate": "eu",
        "Austronesian": "ceb fj haw id ilo jv mg mi ms sm su tl war",
        "Niger-Congo": (
            "ak bm ee ff ig kg ki lg ln nr nso ny rn rw sn ss st sw tn ts ve wo xh yo zu"
        ),
        "Japonic": "ja",
        "Kartvelian": "ka",
        "Austroasiatic": "km vi",
        "Dravidian": "kn ml ta te",
        "Koreanic": "ko",
        "Sino-Tibetan": "bo dz my yue zh",
        "Tai-Kadai": "lo shn th",
        "Mongolic": "mn",
        "Creole": "ht pap tpi",
        "Quechuan": "qu",
        "Aymaran": "ay",
        "Tupian": "gn",
        "Nilo-Saharan": "kr luo",
    }.items()
}
"""Family → codes, as in Ethnologue; OPUS-100's 95 languages are in 22 of them (MMNMT, §4.1)."""

UNKNOWN_FAMILY = "unknown"
UNKNOWN_SCRIPT = "Zzzz"
"""ISO 15924's code for an unknown script."""

PAPER_GROUPS: dict[int, tuple[str, ...]] = {
    1: tuple(
        "as az bn br cy et fa fi ga gd gu hi hu id kk kn ku ky mg ml mr ms ne or pa ps se si ta te "
        "tg tk tr tt ug ur uz".split()
    ),
    2: tuple("am ar be bg bs cs ha he hr ka mk mt pl ru sh sk sl sr uk".split()),
    3: tuple("af ca da de en eo es fr fy gl is it li nb nl nn no oc pt ro sv wa yi".split()),
    4: tuple("el eu ig ja km ko lt lv my rw sq th vi xh zh zu".split()),
}
"""Language group → codes: the paper's clustering of OPUS-100 (MMNMT, table 5)."""

ALIASES: dict[str, str] = {
    alias: code
    for code, aliases in (
        line.split(":")
        for line in """
af:afr ak:aka,fat,tw,twi am:amh an:arg ar:ara,arb as:asm ay:aym,ayr az:aze,azj ba:bak be:bel bg:bul
bho:bh,bih bm:bam bn:ben bo:bod,tib br:bre bs:bos ca:cat co:cos cs:ces,cze cv:chv
cy:cym,wel da:dan de:deu,ger dv:div dz:dzo ee:ewe el:ell,gre en:eng eo:epo es:spa et:est,ekk
eu:eus,baq fa:fas,per,pes,prs ff:ful,fuc,fuv fi:fin fj:fij fo:fao fr:fra,fre fy:fry ga:gle gd:gla
gl:glg gn:grn,gug gu:guj gv:glv ha:hau he:heb,iw hi:hin hr:hrv,scr ht:hat hu:hun hy:hye,arm ia:ina
id:in,ind ig:ibo io:ido is:isl,ice it:ita ja:jpn jv:jav,jw ka:kat,geo kg:kon,kng ki:kik kk:kaz
km:khm kn:kan ko:kor kr:kau,knc ks:kas ku:kur,kmr kv:kom,kpv kw:cor ky:kir la:lat lb:ltz lg:lug
li:lim ln:lin lo:lao lt:lit lv:lav,lvs mg:mlg,plt mi:mri,mao mk:mkd,mac ml:mal mn:mon,khk mr:mar
ms:msa,may,zsm mt:mlt my:mya,bur nb:nob ne:nep,npi nl:nld,dut nn:nno no:nor nr:nbl nso:ns ny:nya
oc:oci om:orm,gaz or:ori,ory os:oss pa:pan pl:pol ps:pus,pbt,pbu pt:por qu:que,quy,quz rm:roh rn:run
ro:mo,ron,mol,rum ru:rus rw:kin sa:san sc:srd,src sd:snd se:sme sh:hbs si:sin sk:slk,slo sl:slv
sm:smo sn:sna so:som sq:sqi,alb,als sr:srp,scc ss:ssw st:sot su:sun sv:swe sw:swa,swh ta:tam te:tel
tg:tgk th:tha ti:tir tk:tuk tl:tgl,fil tn:tsn tr:tur ts:tso tt:tat ug:uig uk:ukr ur:urd
uz:uzb,uzn ve:ven vi:vie vo:vol wa:wln wo:wol xh:xho yi:ji,yid,ydd yo:yor zh:zho,chi,cmn zu:zul
aa:aar ab:abk ae:ave av:ava bi:bis ce:che ch:cha cr:cre cu:chu ho:hmo hz:her ie:ile ii:iii ik:ipk
iu:iku kj:kua kl:kal lu:lub mh:mah na:nau nd:nde ng:ndo nv:nav oj:oji pi:pli sg:sag to:ton ty:tah
za:zha
""".split()
    )
    for alias in aliases.split(",")
}
"""Withdrawn, three-letter and single-variety codes (as in NLLB) → the registry's code. The first
three-letter code of each language is its ISO 639-3 code."""

UNSPACED_LANGUAGES = frozenset("bo dz gan ja km lo lzh my shn th wuu yue zh".split())
UNSPACED_SCRIPTS = frozenset("Hani Hans Hant Jpan Khmr Lana Laoo Mymr Thai Tibt".split())
"""Scripts that are written without white space between words."""

Regions = Literal["joined", "apart"]
"""Whether ``pt`` and ``pt-br`` count as one language (``joined``) or as two (``apart``)."""

_FAMILY_OF = {code: family for family, codes in FAMILIES.items() for code in codes}
_SUBTAGS = re.compile(
    r"(?P<language>[a-z]{2,3})(?:_(?P<script>[a-z]{4}))?(?:_(?P<region>[a-z]{2}|[0-9]{3}))?"
)
_REGION = re.compile(r"_(?:[A-Z]{2}|[0-9]{3})$")
_CLDR_CODES = {"sh": "sr_Latn"}
_NAMED_APART = {"fat": "fat", "prs": "fa_AF", "tw": "tw", "twi": "tw"}
"""First subtag → CLDR's code, where models know it as well as the code that stands for both."""


@dataclass(frozen=True)
class Language:
    """A language of the registry."""

    code: str
    name: str
    """English name."""
    family: str
    script: str
    """ISO 15924 code: the code's own script or the usual one; ``UNKNOWN_SCRIPT`` without either."""


@dataclass(frozen=True)
class LanguageTag:
    """The parts of a spelling: the registry's code, and script and region if given."""

    language: str
    """The registry's code."""
    script: str | None
    """ISO 15924 spelling, for example ``Hant``."""
    region: str | None
    """Region, for example ``BR`` or ``419``; None if the spelling names none."""


def parse_tag(code: str) -> LanguageTag:
    """Parse any usual spelling, for example ``iw``, ``deu_Latn``, ``zh-CN`` or ``chr_Cher``.

    Raises:
        ConfigError: the spelling is not a language code. The message suggests the code of a
            language of this English name, or else the nearest codes.
    """
    if tag := _tag(code):
        return tag
    if named := code_of_name(code):
        raise _named_instead(code, named)
    near = ", ".join(nearest_codes(code.strip(), [*_FAMILY_OF, *ALIASES]))
    raise ConfigError(
        f"{code!r} is no language code. Write two or three letters of ISO 639 and, where it "
        f"matters, script and region, for example de, chr, zh_Hant, es_419 (nearest codes: "
        f"{near or 'none'})."
    )


def _named_instead(name: str, code: str) -> ConfigError:
    return ConfigError(
        f"{name!r} is the name of a language where its code is wanted. Write {code!r}."
    )


@lru_cache(maxsize=4096)
def _tag(code: str) -> LanguageTag | None:
    """Parse a spelling; return None if it is not a language code."""
    subtags = _SUBTAGS.fullmatch(code.strip().lower().replace("-", "_"))
    if subtags is None:
        return None
    stem, script, region = subtags["language"], subtags["script"], subtags["region"]
    return LanguageTag(
        language=ALIASES.get(stem, stem),
        script=script and script.capitalize(),
        region=region and region.upper(),
    )


def canonical(code: str) -> str:
    """Return the code of a language for any usual spelling, without script and region.

    A language outside the registry keeps the code it is given.
    """
    return parse_tag(code).language


def distinct_codes(spellings: Iterable[str], *, regions: Regions = "joined") -> dict[str, str]:
    """Map spellings of one corpus to codes; two scripts stay two languages.

    A single script of a language is not named: ``zho_Hant`` is ``zh``. Together with ``zho_Hans``,
    the usual script of Chinese, it is ``zh_Hant``. Needs Babel if a language has several spellings.
    Regions ``apart`` are kept apart, too, for example ``pt`` and ``pt_BR``.
    """
    tags = {spelling: parse_tag(spelling) for spelling in spellings}
    apart = regions == "apart"
    variants: dict[str, set[LanguageTag]] = defaultdict(set)
    for tag in tags.values():
        variants[tag.language].add(tag)
    codes = {}
    for tag in tags.values():
        several = len(variants[tag.language]) > 1
        scripts = {_script_of_tag(other) for other in variants[tag.language]} if several else set()
        if several and apart and tag.region is not None:
            codes[tag] = _code_with_region(tag)
        else:
            codes[tag] = _code_with_script(tag) if len(scripts) > 1 else tag.language
    return {spelling: codes[tag] for spelling, tag in tags.items()}


def find_code(spelling: str, codes: Collection[str]) -> str | None:
    """Return the code of a corpus or model that a spelling means; None if there is none.

    ``zh_TW`` means ``zh_Hant`` if the codes have it, else ``zh``: scripts are read as
    ``distinct_codes`` does. Among codes of one script, the same region decides, then the same
    letters: ``prs_Arab`` means ``prs`` if the codes have it, else ``fa``. Needs Babel if the codes
    have several variants. Codes that are not language codes are ignored.
    """
    asked = parse_tag(spelling)
    tags = {code: tag for code in codes if (tag := _tag(code)) and tag.language == asked.language}
    if spelling in tags or not tags:
        return spelling if tags else None
    if [*tags.values()] == [LanguageTag(asked.language, script=None, region=None)]:
        return next(iter(tags))
    script, usual = _script_of_tag(asked), usual_script(asked.language)

    def fits(tag: LanguageTag) -> bool:
        is_same = _script_of_tag(tag) == script
        if tag.region not in (None, asked.region):  # zh_TW among the codes also stands for zh_Hant
            return is_same and script != usual
        return is_same or tag.script is None

    def distance(code: str) -> tuple[bool | int | str, ...]:
        tag = tags[code]
        script_differs, region_differs = _script_of_tag(tag) != script, tag.region != asked.region
        letters_differ = _letters(code) != _letters(spelling)
        return script_differs, region_differs, tag.region is not None, letters_differ, code

    return min((code for code in tags if fits(tags[code])), key=distance, default=None)


def meant_code(spelling: str, codes: Collection[str]) -> str:
    """Return which of the codes a spelling in a setting means, or the spelling if it means none."""
    found = None if spelling in codes or _tag(spelling) is None else find_code(spelling, codes)
    return found or spelling


def meant_pair(name: str, codes: Collection[str]) -> str:
    """Return the name of a pair or direction in these codes; marks, for example ``+back``, stay."""
    sides = (side.partition("+") for side in name.split("-"))
    return "-".join(meant_code(code, codes) + plus + mark for code, plus, mark in sides)


def codes_of_setting(
    spellings: Iterable[str], codes: Collection[str], *, setting: str, place: str
) -> dict[str, str]:
    """Return spelling → code of the languages that a setting names; the codes are of ``place``.

    Raises:
        ConfigError: A spelling means none of them.
    """
    found = {spelling: meant_code(spelling, codes) for spelling in spellings}
    for spelling, code in found.items():
        if code not in codes:
            refusal = f"{setting} names {spelling!r}, and {place} has no such language."
            raise unknown_language(spelling, sorted(codes), refusal)
    return found


def family(code: str, families: Mapping[str, str] | None = None) -> str:
    """Return the family of a language, ``UNKNOWN_FAMILY`` if neither recipe nor registry has one.

    ``families``, code → family of the recipe, takes precedence over the registry.
    """
    found = canonical(code)
    named = families or {}
    return named.get(code) or named.get(found) or _FAMILY_OF.get(found, UNKNOWN_FAMILY)


def language(code: str) -> Language:
    """Look up a language by any usual spelling. Needs Babel."""
    tag = parse_tag(code)
    found = _code_with_script(tag) if tag.script else tag.language
    found = _code_with_region(tag) if tag.region else found
    return Language(
        code=found,
        name=_english_name(_NAMED_APART.get(_letters(code), found)),
        family=family(found),
        script=_script_of_tag(tag) or UNKNOWN_SCRIPT,
    )


def own_name(code: str) -> str:
    """Return the name of a language in that language, ``Deutsch`` for ``de``. Needs Babel.

    Returns its English name if CLDR has no other, and the code itself if CLDR has none.
    """
    from babel import Locale, UnknownLocaleError

    try:
        found = language(code)
        locale = Locale.parse(_CLDR_CODES.get(found.code, found.code))
    except ConfigError:
        return code
    except (UnknownLocaleError, ValueError):
        return found.name
    if _letters(code) in _NAMED_APART:
        return str(locale.languages.get(_NAMED_APART[_letters(code)], found.name))
    return locale.get_display_name(locale) or found.name


def iso_639_3(code: str) -> str:
    """Return the three-letter code of ISO 639-3 for a language, or its code if none is known."""
    found = canonical(code)
    aliases = (alias for alias, known in ALIASES.items() if known == found and len(alias) == 3)
    return found if len(found) == 3 else next(aliases, found)


def without_region(code: str) -> str:
    """Remove the region of a corpus's code: ``pt_BR`` becomes ``pt``.

    For tables that know languages but not regions.
    """
    return _REGION.sub("", code)


def is_known(code: str) -> bool:
    """Return whether the registry or CLDR knows the language of a code. Needs Babel."""
    found = canonical(code)
    return found in _FAMILY_OF or found in _cldr_names()


def usual_script(code: str) -> str | None:
    """Return the ISO 15924 code of a language's usual script; None if CLDR has none."""
    found = canonical(code)
    return _likely_script(_CLDR_CODES.get(found, found))


@lru_cache(maxsize=4096)
def written_script(code: str) -> str | None:
    """Return the script a spelling names, its region's, or the usual one; None if unknown."""
    return _script_of_tag(parse_tag(code))


def parts_words_by_spaces(code: str) -> bool:
    """Return whether a language is written with spaces between words.

    The script that the code names decides, else the language's usual script; unknown codes count as
    spaced.
    """
    tag = _tag(code)
    if tag is None:  # a model of other software may have codes of its own
        return True
    if tag.script is not None:
        return tag.script not in UNSPACED_SCRIPTS
    return tag.language not in UNSPACED_LANGUAGES


def unknown_language(code: str, codes: Sequence[str], refusal: str) -> ConfigError:
    """Return the refusal of a language, perhaps its name, that is none of ``codes``.

    ``refusal`` is the sentence that says who does not know the language.
    """
    named = code_of_name(code)
    if named is not None and (meant := find_code(named, codes)):
        return _named_instead(code, meant)
    near = nearest_codes(code, codes)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{refusal} Choose from {', '.join(codes)}.{hint}")


def nearest_codes(code: str, candidates: Iterable[str]) -> list[str]:
    """Return up to three candidates spelled most like ``code``, the nearest first.

    Another spelling of the same language, if ``code`` is known to be one: es is no mistyped sw.
    """
    tag, tags = _tag(code), {one: _tag(one) for one in candidates}
    if tag is not None and is_known(tag.language):
        same = [one for one, other in tags.items() if other and other.language == tag.language]
        return nearest_names(code.lower(), same, most=3, cutoff=0.0)
    return nearest_names(code.lower(), tags, most=3, cutoff=0.5)


@lru_cache(maxsize=1024)
def code_of_name(name: str) -> str | None:
    """Return the code of a language by its English name, ``de`` for German. Needs Babel.

    One wrong letter of eight is allowed. Returns None if CLDR has no language of that name.
    """
    codes = {known.casefold(): code for code, known in _cldr_names().items()}
    near = nearest_names(" ".join(name.split()).casefold(), codes, cutoff=0.85)
    return ALIASES.get(codes[near[0]], codes[near[0]]) if near else None


def codes_one_edit_away(code: str) -> list[str]:
    """Return the registry's languages with a code one edit away, sorted."""
    found = {
        ALIASES.get(known, known)
        for known in (*_FAMILY_OF, *ALIASES)
        if _is_one_edit(known, canonical(code))
    }
    return sorted(found & _FAMILY_OF.keys() - {canonical(code)})


def _is_one_edit(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    if len(long) == len(short):
        return sum(a != b for a, b in zip(short, long, strict=True)) == 1
    return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))


def _letters(code: str) -> str:
    """Return the first subtag as it is spelled: ``twi`` of ``twi_Latn``, where the code is ak."""
    return re.split("[-_]", code.strip().lower())[0]


def _script_of_tag(tag: LanguageTag) -> str | None:
    """Return the script of a tag, of its region, or else the usual script of the language."""
    if tag.script is not None:
        return tag.script
    regional = _likely_script(f"{tag.language}_{tag.region}") if tag.region else None
    return regional or usual_script(tag.language)


def _code_with_script(tag: LanguageTag) -> str:
    """Return the plain code for the language's usual script, else the code with its script."""
    script = _script_of_tag(tag)
    if script is None or script == usual_script(tag.language):
        return tag.language
    return f"{tag.language}_{script}"


def _code_with_region(tag: LanguageTag) -> str:
    """Return the code with its region, and with a script other than the region's usual one."""
    of_region = LanguageTag(tag.language, script=None, region=tag.region)
    if tag.script is None or tag.script == _script_of_tag(of_region):
        return f"{tag.language}_{tag.region}"
    return f"{tag.language}_{tag.script}_{tag.region}"


def _cldr_names() -> Mapping[str, str]:
    from babel import Locale

    names: Mapping[str, str] = Locale("en").languages
    return names


def _english_name(code: str) -> str:
    """Return CLDR's name with script and region if the code has them; else the code itself."""
    names = _cldr_names()
    if code in names or "_" not in code:
        return names.get(code, code)
    from babel import Locale

    english = Locale("en")
    found, *subtags = code.split("_")
    known = [english.scripts.get(one) or english.territories.get(one, one) for one in subtags]
    return f"{names[found]} ({', '.join(known)})" if found in names else code


def _likely_script(tag: str) -> str | None:
    from babel.core import get_global

    found: Mapping[str, str] = get_global("likely_subtags")
    if tag in found:
        return found[tag].split("_")[1]
    return tag.split("_")[1] if re.fullmatch("[a-z]+_[A-Z][a-z]{3}", tag) else None


_LETTERS_OF = {
    "Hans": frozenset({"Hani"}),
    "Hant": frozenset({"Hani"}),
    "Jpan": frozenset({"Hira", "Kana", "Hani"}),
    "Kore": frozenset({"Hang", "Hani"}),
}
"""Scripts of ISO 15924 that use the letters of other scripts."""

_DECISIVE_LETTERS = {"Jpan": frozenset({"Hira", "Kana"}), "Kore": frozenset({"Hang"})}
"""Scripts of ISO 15924 → letters without which a text is in none of their languages."""

_UNICODE_NAMES = {
    "BENGALI": "Beng",
    "CANADIAN SYLLABICS": "Cans",
    "CJK": "Hani",
    "CUNEIFORM": "Xsux",
    "DUPLOYAN": "Dupl",
    "EGYPTIAN HIEROGLYPH": "Egyp",
    "FULLWIDTH LATIN": "Latn",
    "HALFWIDTH HANGUL": "Hang",
    "HALFWIDTH KATAKANA": "Kana",
    "HENTAIGANA": "Hira",
    "IDEOGRAPHIC": "Hani",
    "LISU": "Lisu",
    "MANDAIC": "Mand",
    "MEETEI MAYEK": "Mtei",
    "MIAO": "Plrd",
    "NUSHU": "Nshu",
    "OLD TURKIC": "Orkh",
    "ORIYA": "Orya",
    "TAI THAM": "Lana",
    "WARANG CITI": "Wara",
}
"""Unicode's names of scripts that CLDR names differently."""

_LONGEST_NAME = 3
"""Number of words in the longest name of a script."""


def letters_of(script: str) -> frozenset[str]:
    """Return the scripts that a script takes letters from: kana and Han for ``Jpan``."""
    return _LETTERS_OF.get(script, frozenset({script}))


def can_be_written(letters: Collection[str], script: str | None) -> bool:
    """Return whether a text can be in a language of a script: one without Hangul is not Korean.

    ``letters`` are the scripts of the text's letters. An unknown script fits every text.
    """
    if script is None:
        return True
    return not (_DECISIVE_LETTERS.get(script) or letters_of(script)).isdisjoint(letters)


def count_scripts(text: str) -> Counter[str]:
    """Count the letters of each script in a text."""
    found: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if script := script_of_character(character):
            found[script] += count
    return found


@lru_cache(maxsize=2**16)
def script_of_character(character: str) -> str | None:
    """Return the script of a letter; None for other characters and letters of all scripts."""
    if not character.isalpha():
        return None
    words = unicodedata.name(character, "").replace("-", " ").split()
    names = (" ".join(words[:length]) for length in range(min(_LONGEST_NAME, len(words)), 0, -1))
    return next((_scripts()[name] for name in names if name in _scripts()), None)


def has_letter_of(text: str, scripts: frozenset[str]) -> bool:
    """Return whether a text has a letter of any of the scripts; stop at the first."""
    return any(script_of_character(character) in scripts for character in text)


@lru_cache(maxsize=1)
def _scripts() -> dict[str, str]:
    """Map the first words of Unicode character names to scripts."""
    from babel import Locale

    named = {
        name.upper().replace("’", "").replace("-", " "): script
        for script, name in Locale("en").scripts.items()
    }
    return named | _UNICODE_NAMES
