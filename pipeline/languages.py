"""The language registry: one code per language, its family, and the paper's table of groups.

Codes are those of OPUS-100: two letters of ISO 639-1 where they exist, else three of ISO 639-3;
Norwegian (``no``, ``nb``, ``nn``) and Serbo-Croatian (``sh``) keep the codes OPUS-100 gives them.
Names and scripts come from Unicode CLDR through Babel, which is imported only where they are asked
for: training and decoding need neither.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.errors import ConfigError

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
"""Family → codes, as in Ethnologue; OPUS-100's 95 languages are in 22 of them (mmnmt.md §4)."""

PAPER_GROUPS: dict[int, tuple[str, ...]] = {
    1: tuple(
        "as az bn br cy et fa fi ga gd gu hi hu id kk kn ku ky mg ml mr ms ne or pa ps se si ta te "
        "tg tk tr tt ug ur uz".split()
    ),
    2: tuple("am ar be bg bs cs ha he hr ka mk mt pl ru sh sk sl sr uk".split()),
    3: tuple("af ca da de en eo es fr fy gl is it li nb nl nn no oc pt ro sv wa yi".split()),
    4: tuple("el eu ig ja km ko lt lv my rw sq th vi xh zh zu".split()),
}
"""Group → codes: the result of the paper's clustering on OPUS-100 (mmnmt.md §4)."""

ALIASES: dict[str, str] = {
    alias: code
    for code, aliases in (
        line.split(":")
        for line in """
af:afr ak:aka,fat,tw,twi am:amh an:arg ar:ara,arb as:asm ay:aym,ayr az:aze,azj ba:bak be:bel bg:bul
bho:bh,bih bm:bam bn:ben bo:bod,tib br:bre bs:bos ca:cat co:cos cs:ces,cze cv:chv
cy:cym,wel da:dan de:deu,ger dv:div dz:dzo ee:ewe el:ell,gre en:eng eo:epo es:spa et:ekk,est
eu:baq,eus fa:fas,per,pes,prs ff:ful,fuc,fuv fi:fin fj:fij fo:fao fr:fra,fre fy:fry ga:gle gd:gla
gl:glg gn:grn,gug gu:guj gv:glv ha:hau he:heb,iw hi:hin hr:hrv,scr ht:hat hu:hun hy:arm,hye ia:ina
id:in,ind ig:ibo io:ido is:ice,isl it:ita ja:jpn jv:jav,jw ka:geo,kat kg:kng,kon ki:kik kk:kaz
km:khm kn:kan ko:kor kr:kau,knc ks:kas ku:kmr,kur kv:kom,kpv kw:cor ky:kir la:lat lb:ltz lg:lug
li:lim ln:lin lo:lao lt:lit lv:lav,lvs mg:mlg,plt mi:mao,mri mk:mac,mkd ml:mal mn:khk,mon mr:mar
ms:may,msa,zsm mt:mlt my:bur,mya nb:nob ne:nep,npi nl:dut,nld nn:nno no:nor nr:nbl nso:ns ny:nya
oc:oci om:gaz,orm or:ori,ory os:oss pa:pan pl:pol ps:pbt,pbu,pus pt:por qu:que,quy,quz rm:roh rn:run
ro:mo,mol,ron,rum ru:rus rw:kin sa:san sc:srd,src sd:snd se:sme sh:hbs si:sin sk:slk,slo sl:slv
sm:smo sn:sna so:som sq:alb,als,sqi sr:scc,srp ss:ssw st:sot su:sun sv:swe sw:swa,swh ta:tam te:tel
tg:tgk th:tha ti:tir tk:tuk tl:fil,tgl tn:tsn tr:tur ts:tso tt:tat ug:uig uk:ukr ur:urd
uz:uzb,uzn ve:ven vi:vie vo:vol wa:wln wo:wol xh:xho yi:ji,ydd,yid yo:yor zh:chi,cmn,zho zu:zul
""".split()
    )
    for alias in aliases.split(",")
}
"""Withdrawn, three-letter and single-variety codes (as in NLLB) → the registry's code."""

_FAMILY_OF = {code: family for family, codes in FAMILIES.items() for code in codes}
_SUBTAGS = re.compile(r"(?P<language>[a-z]{2,3})(?:_[a-z]{4})?(?:_(?:[a-z]{2}|[0-9]{3}))?")
_CLDR_CODES = {"sh": "sr_Latn"}


@dataclass(frozen=True)
class Language:
    """A language: code, English name, family, and the ISO 15924 code of its usual script."""

    code: str
    name: str
    family: str
    script: str


def canonical(code: str) -> str:
    """The registry's code for any usual spelling: ``iw``, ``deu_Latn``, ``zh-CN``, ``de_DE``.

    Raises:
        ConfigError: no such language; names the nearest codes.
    """
    spelling = code.strip().lower().replace("-", "_")
    subtags = _SUBTAGS.fullmatch(spelling)
    stem = subtags["language"] if subtags else spelling
    found = ALIASES.get(stem, stem)
    if found not in _FAMILY_OF:
        near = ", ".join(nearest_codes(stem, [*_FAMILY_OF, *ALIASES]))
        raise ConfigError(
            f"There is no language {code!r} in pipeline/languages.py (nearest codes: "
            f"{near or 'none'}): correct the code, or add it to a family there."
        )
    return found


def family(code: str) -> str:
    """The family of a language; ConfigError as in ``canonical``."""
    return _FAMILY_OF[canonical(code)]


def language(code: str) -> Language:
    """Look a language up; ConfigError as in ``canonical``. Needs Babel."""
    found = canonical(code)
    return Language(
        code=found, name=_english_name(found), family=_FAMILY_OF[found], script=_usual_script(found)
    )


def nearest_codes(code: str, candidates: Iterable[str]) -> list[str]:
    """Up to three candidates spelled most like ``code``, the nearest first."""
    return difflib.get_close_matches(code.lower(), sorted(set(candidates)), n=3, cutoff=0.5)


def _english_name(code: str) -> str:
    from babel import Locale

    return str(Locale("en").languages[code])


def _usual_script(code: str) -> str:
    from babel.core import get_global

    tag = _CLDR_CODES.get(code, code)
    return str(get_global("likely_subtags").get(tag, tag).split("_")[1])
