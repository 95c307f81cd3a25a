"""Read the tokenizers of Hugging Face's folders, and assign the ids of exported vocabularies.

Language tokens keep their ids; their codes follow ``languages.py``: ``eng_Latn`` and
``en_XX`` are ``en``. Text that looks like a special or a language token stays text here;
transformers takes it for the token.

``M2M100Tokenizer`` numbers pieces by ``vocab.json``. ``NllbTokenizer`` and ``MBart50Tokenizer``
shift the ids of the SentencePiece model by one: fairseq puts four specials before the pieces,
``<s> <pad> </s> <unk>``, where SentencePiece has three, ``<unk> <s> </s>``. Language tokens follow
the pieces, in the order of transformers' lists.

Hugging Face's M2M-100 counts positions from the id of padding + 1, ours count from 2 as fairseq's
do. In an export, padding must therefore be 1, and the rows of the embedding are put into fairseq's
order:

- ``M2M100Tokenizer``: specials, pieces, the hundred languages of M2M-100 in its order,
  spare rows. Rows of languages that a model lacks are zeros.
- ``NllbTokenizer``, where language tokens are free: specials, pieces, the model's own languages,
  spare rows. An imported model keeps its tokens; others get NLLB's codes (``nllb_token``).

Spare rows are ids of ours without a token, which imported models can have. They take part in the
softmax.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BeforeValidator, Field, ValidationError
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from pipeline.artifacts.tokenizer import (
    LanguageTokenScheme,
    TokenizerDescription,
    TokenizerFiles,
    language_token,
)
from pipeline.artifacts.vocabularies import Numbering
from pipeline.batching.settings import TagScheme
from pipeline.checkpoints.foreign.files import RESTORE, Described, ModelFolder
from pipeline.config.settings import shown
from pipeline.errors import CheckpointError
from pipeline.languages import (
    UNKNOWN_SCRIPT,
    distinct_codes,
    iso_639_3,
    parse_tag,
    written_script,
)

SENTENCEPIECE_FILE = "sentencepiece.bpe.model"
VOCABULARY_FILE = "vocab.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
FAST_TOKENIZER_FILE = "tokenizer.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
GENERATION_FILE = "generation_config.json"

CLASSES = "M2M100Tokenizer, NllbTokenizer, MBart50Tokenizer"
SPECIALS = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
"""Name → spelling of the specials, in the order of their ids in fairseq and in exports."""
SENTENCEPIECE_SPECIALS = ("<unk>", "<s>", "</s>")
"""The pieces that a SentencePiece model has before its ordinary pieces."""
SHIFT = 1
"""The id of an ordinary piece minus its index in the SentencePiece model (NLLB, mBART-50)."""

M2M100_LANGUAGES = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu "
    "ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr "
    "ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk "
    "ur uz vi wo xh yi yo zh zu"
).split()
"""Languages of M2M-100, in the order of their ids, which follow the ids of the pieces."""
NLLB_LANGUAGES = (
    "ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab "
    "arb_Arab ars_Arab ary_Arab arz_Arab asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn "
    "bak_Cyrl bam_Latn ban_Latn bel_Cyrl bem_Latn ben_Beng bho_Deva bjn_Arab bjn_Latn bod_Tibt "
    "bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn cjk_Latn ckb_Arab crh_Latn cym_Latn "
    "dan_Latn deu_Latn dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn est_Latn eus_Latn "
    "ewe_Latn fao_Latn pes_Arab fij_Latn fin_Latn fon_Latn fra_Latn fur_Latn fuv_Latn gla_Latn "
    "gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn "
    "hun_Latn hye_Armn ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn jpn_Jpan kab_Latn "
    "kac_Latn kam_Latn kan_Knda kas_Arab kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn "
    "kea_Latn khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn kon_Latn kor_Hang kmr_Latn lao_Laoo "
    "lvs_Latn lij_Latn lim_Latn lin_Latn lit_Latn lmo_Latn ltg_Latn ltz_Latn lua_Latn lug_Latn "
    "luo_Latn lus_Latn mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn mkd_Cyrl plt_Latn mlt_Latn "
    "mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr nld_Latn nno_Latn nob_Latn npi_Deva "
    "nso_Latn nus_Latn nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn "
    "por_Latn prs_Arab pbt_Arab quy_Latn ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng "
    "scn_Latn shn_Mymr sin_Sinh slk_Latn slv_Latn smo_Latn sna_Latn snd_Arab som_Latn sot_Latn "
    "spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn szl_Latn tam_Taml "
    "tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn "
    "tso_Latn tuk_Latn tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab "
    "uzn_Latn vec_Latn vie_Latn war_Latn wol_Latn xho_Latn ydd_Hebr yor_Latn yue_Hant zho_Hans "
    "zho_Hant zul_Latn"
).split()
"""Languages of NLLB-200, in the order of their ids."""
MBART50_LANGUAGES = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT "
    "lv_LV my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL "
    "hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN "
    "th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
).split()
"""Languages of mBART-50, in the order of their ids."""

_SCRIPT, _REGION = "_[A-Z][a-z]{3}", "_(?:[A-Z]{2}|[0-9]{3})"
_LANGUAGE = re.compile(
    rf"(?P<plain>[a-z]{{2,3}}(?:{_SCRIPT}(?:{_REGION})?|{_REGION}))"
    rf"|__(?P<underscored>[a-z]{{2,3}}(?:{_SCRIPT})?(?:{_REGION})?)__"
    r"|LANG_TOK_(?P<prefixed>[A-Z]{2,3}(?:_[A-Z]{2,4})?)"
    r"|\[(?P<bracketed>[a-z]{2,3}(?:_[A-Za-z]{2,4})?)\]"
    r"|<2(?P<angled>[a-z]{2,3}(?:_[A-Za-z]{2,4})?)>",
    re.ASCII,
)
"""Language tokens: ``eng_Latn``, ``en_XX``, ``por_Latn_BR``; and ``__en__``, ``LANG_TOK_EN``,
``[en_XX]`` and ``<2en>``, which the export of a model that came from fairseq keeps."""


def _content(token: object) -> object:
    return token.get("content") if isinstance(token, dict) else token


Token = Annotated[str, BeforeValidator(_content)]
"""A token's spelling, which files also have within a description of the token."""


class TokenizerConfig(Described):
    """``tokenizer_config.json``, with the defaults of transformers."""

    tokenizer_class: str | None = None
    bos_token: Token = "<s>"
    pad_token: Token = "<pad>"
    eos_token: Token = "</s>"
    unk_token: Token = "<unk>"
    mask_token: Token | None = "<mask>"
    added_tokens_decoder: dict[int, Token] = Field(default_factory=dict)
    additional_special_tokens: tuple[Token, ...] | None = None
    legacy_behaviour: bool = False
    language_codes: Literal["m2m100"] = "m2m100"
    """The list of languages; the list of WMT 21's models is not supported."""
    sp_model_kwargs: dict[str, Any] | None = None

    def specials(self) -> dict[str, str]:
        """Return the spelling of the four specials."""
        return {name: getattr(self, f"{name}_token") for name in SPECIALS}


class _AddedToken(Described):
    content: str
    id: int


class _FastTokenizer(Described):
    """``tokenizer.json`` of the tokenizers library."""

    added_tokens: tuple[_AddedToken, ...] = ()


class _SpecialTokens(Described):
    """``special_tokens_map.json``."""

    additional_special_tokens: tuple[Token, ...] = ()


class Generation(Described):
    """``generation_config.json``."""

    decoder_start_token_id: int | None = None
    suppress_tokens: tuple[int, ...] | None = None


class FolderTokenizer(NamedTuple):
    """The tokenizer of a folder, and how its model is to be read with it."""

    files: TokenizerFiles
    tag_scheme: TagScheme
    """Where the model expects the language tokens."""
    absent_rows: tuple[int, ...] = ()
    """Rows of the folder's embedding that the tokenizer has no ids for."""


def folder_tokenizer(folder: ModelFolder, *, usual_class: str, size: int) -> FolderTokenizer:
    """Read the tokenizer of a folder.

    Args:
        folder: The folder of the model.
        usual_class: transformers' tokenizer of the family, for a folder that names none.
        size: Rows of the model's embedding; spare rows have no token.

    Raises:
        CheckpointError: Its class is not known, or a file is missing or invalid.
    """
    config = _tokenizer_config(folder, usual_class=usual_class)
    _refuse_added_words(folder, config)
    # A class …Fast has the same ids as the class without.
    match (config.tokenizer_class or "").removesuffix("Fast"):
        case "M2M100Tokenizer":
            return _m2m100_tokenizer(folder, config, size=size)
        case "NllbTokenizer":
            files = _shifted_tokenizer(folder, config, size=size, published=NLLB_LANGUAGES)
            is_suffix = config.legacy_behaviour
            return FolderTokenizer(files, "src-suffix-tgt" if is_suffix else "src-tgt")
        case "MBart50Tokenizer":
            files = _shifted_tokenizer(folder, config, size=size, published=MBART50_LANGUAGES)
            return FolderTokenizer(files, "src-tgt")
        case "MBartTokenizer":
            raise CheckpointError(
                f"{folder.origin} has the MBartTokenizer of mBART-25: its decoder starts from the "
                "language's token instead of end-of-sentence. Name a checkpoint of mBART-50."
            )
    raise CheckpointError(
        f"{folder.origin} has a tokenizer of the unknown class {config.tokenizer_class!r}. Name a "
        f"folder with one of {CLASSES}."
    )


def _tokenizer_config(folder: ModelFolder, *, usual_class: str) -> TokenizerConfig:
    """Read ``tokenizer_config.json``, with the class of the family if it names none."""
    found = TokenizerConfig()
    if folder.has(TOKENIZER_CONFIG_FILE):
        found = folder.described(TokenizerConfig, TOKENIZER_CONFIG_FILE)
    is_told = found.tokenizer_class or usual_class != "M2M100Tokenizer"
    if not is_told and not folder.has(VOCABULARY_FILE):  # NLLB has M2M-100's model_type
        problem = "names no tokenizer_class" if folder.has(TOKENIZER_CONFIG_FILE) else "is missing"
        raise CheckpointError(
            f"{folder.origin / TOKENIZER_CONFIG_FILE} {problem}, so the kind of the tokenizer is "
            f"unknown. {RESTORE}"
        )
    if found.sp_model_kwargs:
        raise CheckpointError(
            f"{folder.origin / TOKENIZER_CONFIG_FILE} has sp_model_kwargs = "
            f"{found.sp_model_kwargs!r}, but text is always split into its most probable pieces "
            "here. Name a checkpoint without them."
        )
    return found.model_copy(update={"tokenizer_class": found.tokenizer_class or usual_class})


def _m2m100_tokenizer(
    folder: ModelFolder, config: TokenizerConfig, *, size: int
) -> FolderTokenizer:
    vocabulary = folder.read_object(VOCABULARY_FILE)
    model = folder.read_bytes(SENTENCEPIECE_FILE)
    pieces = pieces_of(model, folder.origin / SENTENCEPIECE_FILE)
    first = len(vocabulary)
    zeros = _suppressed_rows_of_zeros(folder)
    published = {f"__{code}__": index for index, code in enumerate(M2M100_LANGUAGES, first)}
    absent = [index for index in published.values() if index in zeros]
    added = {
        token: row
        for token, row in _added_tokens(folder, config).items()
        if language_of_token(token) and token not in published
    }
    # If no file lists the published tokens, transformers 4.57 gives an added one a row of theirs.
    rows = {token: row for token, row in published.items() if row not in added.values()} | added
    written = {language_of_token(token) or token: token for token in rows}
    files = numbered(
        folder.origin,
        model,
        size=size - len(absent),
        specials={name: vocabulary.get(piece) for name, piece in SPECIALS.items()},
        pieces=[vocabulary.get(piece) for piece in pieces],
        languages={
            code: rows[token] - sum(index < rows[token] for index in absent)
            for code, token in written.items()
            if rows[token] not in absent
        },
        written=written,
    )
    return FolderTokenizer(files, "src-tgt", tuple(absent))


def _suppressed_rows_of_zeros(folder: ModelFolder) -> set[int]:
    """Return the ids that an export has for languages that its model lacks.

    ``generate`` leaves them out of the softmax, too. A suppressed language with another row is
    known: somebody does not want it in translations.
    """
    if not folder.has(GENERATION_FILE):
        return set()
    suppressed = folder.described(Generation, GENERATION_FILE).suppress_tokens or ()
    names = [name for name in folder.tensors.names() if name.endswith("shared.weight")]
    if not suppressed or not names:
        return set()
    rows = dict(enumerate(torch.atleast_1d(folder.tensors.read(names[0]))))
    return {index for index in suppressed if index in rows and not rows[index].any()}


def _shifted_tokenizer(
    folder: ModelFolder, config: TokenizerConfig, *, size: int, published: Sequence[str]
) -> TokenizerFiles:
    """Read a tokenizer of NLLB or mBART-50; ``published`` are the languages of that family."""
    if not folder.has(SENTENCEPIECE_FILE) and folder.has(FAST_TOKENIZER_FILE):
        raise CheckpointError(
            f"{folder.origin} has its vocabulary only in {FAST_TOKENIZER_FILE}. Put the "
            f"{SENTENCEPIECE_FILE} that it was made from next to it."
        )
    model = folder.read_bytes(SENTENCEPIECE_FILE)
    pieces = pieces_of(model, folder.origin / SENTENCEPIECE_FILE)
    first = len(SENTENCEPIECE_SPECIALS)
    if tuple(pieces[:first]) != SENTENCEPIECE_SPECIALS:
        raise CheckpointError(
            f"{folder.origin / SENTENCEPIECE_FILE} begins with the pieces "
            f"{' '.join(pieces[:first])}, not with {' '.join(SENTENCEPIECE_SPECIALS)}. Name a "
            "folder with the model's own vocabulary."
        )
    in_fairseq = {token: index for index, token in enumerate(SPECIALS.values())}
    ids = in_fairseq | _added_tokens(folder, config)
    tokens = _language_tokens(folder, config, published=published, first_id=len(pieces) + SHIFT)
    written = {language_of_token(token) or token: token for token in tokens}
    return numbered(
        folder.origin,
        model,
        size=size,
        specials={name: ids.get(token) for name, token in config.specials().items()},
        pieces=[None if index < first else index + SHIFT for index in range(len(pieces))],
        languages={spelling: tokens[token] for spelling, token in written.items()},
        written=written,
    )


def _added_tokens(folder: ModelFolder, config: TokenizerConfig) -> dict[str, int]:
    """Return the ids of tokens that are no pieces; empty if no file of the folder has them.

    transformers writes them in three places: newer versions into ``tokenizer_config.json``,
    older ones into ``added_tokens.json``, the tokenizers library into ``tokenizer.json``.
    """
    if config.added_tokens_decoder:
        return {token: index for index, token in config.added_tokens_decoder.items()}
    if folder.has(ADDED_TOKENS_FILE):
        found = folder.read_object(ADDED_TOKENS_FILE)
        return {token: index for token, index in found.items() if isinstance(index, int)}
    if folder.has(FAST_TOKENIZER_FILE):
        tokens = folder.described(_FastTokenizer, FAST_TOKENIZER_FILE).added_tokens
        return {token.content: token.id for token in tokens}
    return {}


def _listed_tokens(folder: ModelFolder, config: TokenizerConfig) -> Sequence[str]:
    """Return the additional special tokens that a file of the folder lists."""
    if not config.additional_special_tokens and folder.has(SPECIAL_TOKENS_FILE):
        return folder.described(_SpecialTokens, SPECIAL_TOKENS_FILE).additional_special_tokens
    return config.additional_special_tokens or ()


def _refuse_added_words(folder: ModelFolder, config: TokenizerConfig) -> None:
    """Raise CheckpointError if words were added, at which transformers splits any text."""
    special = {*SPECIALS.values(), *config.specials().values(), config.mask_token}
    special |= set(_listed_tokens(folder, config))
    for token in _added_tokens(folder, config):
        if token not in special and language_of_token(token) is None:
            raise CheckpointError(
                f"{folder.origin} has the added token {shown(token)!r}, at which transformers "
                "splits text before its pieces, but text is only split into pieces here. Name a "
                "checkpoint without added words."
            )


def _language_tokens(
    folder: ModelFolder, config: TokenizerConfig, *, published: Sequence[str], first_id: int
) -> dict[str, int]:
    """Return language token → id.

    The folder's files give the ids; without them, ids follow ``first_id`` in the order of the
    folder's list, or of the published models. Before 4.34, transformers gave the ids of only those
    listed tokens that a user had added.
    """
    given = _added_tokens(folder, config)
    found = {token: index for token, index in given.items() if _LANGUAGE.fullmatch(token)}
    order = [token for token in _listed_tokens(folder, config) if _LANGUAGE.fullmatch(token)]
    if not found:
        order = order or [*published]
    ids = {token: first_id + index for index, token in enumerate(order)} | found
    # Of two spellings of one code the first has it: files that sort ids as text change nothing.
    return dict(sorted(ids.items(), key=lambda entry: entry[1]))


def language_of_token(token: str) -> str | None:
    """Return the language within a token, ``en`` of ``__en__``; None if it is no such token."""
    found = _LANGUAGE.fullmatch(token)
    return found[found.lastgroup] if found and found.lastgroup else None


def numbered(
    origin: Path,
    model: bytes,
    *,
    size: int,
    specials: Mapping[str, object],
    pieces: Sequence[object],
    languages: Mapping[str, object],
    scheme: LanguageTokenScheme = "underscores",
    written: Mapping[str, str] | None = None,
) -> TokenizerFiles:
    """Return a SentencePiece model with the ids of other software.

    Args:
        origin: The folder or file that an error names.
        model: The SentencePiece model.
        size: Rows of the model's embedding.
        specials: The ids of ``bos``, ``pad``, ``eos`` and ``unk``.
        pieces: The id of each piece, in the order of ``model``; None if it has none.
        languages: The id of each language's token, by the spelling of the language there.
        scheme: How tokens of languages are spelled.
        written: Spelling of a language → its token, for tokens that are not spelled by ``scheme``.

    Raises:
        CheckpointError: Ids are missing, collide or lie beyond ``size``.
    """
    codes = model_codes(languages)
    tokens = {codes[spelling]: index for spelling, index in languages.items()}
    try:
        numbering = Numbering.model_validate(
            {**specials, "size": size, "pieces": tuple(pieces), "language_tokens": tokens}
        )
        description = TokenizerDescription(
            kind="sentencepiece",
            languages=tuple(sorted(codes.values())),
            language_token_scheme=scheme,
            numbering=numbering,
            token_spellings={
                codes[spelling]: written[spelling] if written else language_token(spelling, scheme)
                for spelling in languages
            },
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = " ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])
        raise CheckpointError(
            f"The vocabulary of {origin} does not fit its model ({what}). Restore its files from "
            "where they were published."
        ) from error
    return TokenizerFiles(description, model)


def model_codes(spellings: Iterable[str]) -> dict[str, str]:
    """Return spelling → our code, of languages that a model tells apart.

    If the registry has one code for two of them, for example ``fa`` for NLLB's ``pes_Arab`` and
    ``prs_Arab``, the first gets it, and the second keeps its own: ``prs``. Of ``por_Latn_BR`` and
    ``por_Latn``, the spelling without a region gets it, and the other is ``pt_BR``.
    """
    found: dict[str, str] = {}
    joined = distinct_codes(spellings)
    apart = distinct_codes(joined, regions="apart")
    regional = {one: parse_tag(one).region is not None for one in joined}
    for spelling in sorted(joined, key=lambda one: (one != joined[one], regional[one])):
        taken = set(found.values())
        names = (joined[spelling], apart[spelling], spelling.partition("_")[0], spelling)
        found[spelling] = next((name for name in names if name not in taken), spelling)
    return found


def load_pieces(model: bytes, path: Path) -> SentencePieceProcessor:
    """Load a SentencePiece model; raise CheckpointError, which names ``path``, if it is none."""
    try:
        if not model:  # SentencePiece accepts an empty model, and then fails in every call
            raise RuntimeError("it is empty")
        return SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise CheckpointError(f"{path} is not a SentencePiece model. {RESTORE}") from error


def pieces_of(model: bytes, path: Path) -> list[str]:
    """Return the pieces of a SentencePiece model, in its order."""
    processor = load_pieces(model, path)
    return [processor.id_to_piece(index) for index in range(processor.get_piece_size())]


_NLLB_OF_FAIRSEQ = re.compile(r"__([a-z]{3}_[A-Z][a-z]{3})__")
"""fairseq's spelling of NLLB's tokens: ``__eng_Latn__`` for ``eng_Latn`` of transformers."""


@dataclass(frozen=True)
class Entries:
    """The meaning of each id of a tokenizer of ours.

    Attributes:
        specials: Ids of bos, pad, eos and unk, in the order of SPECIALS.
        pieces: Piece → id without specials, in the order of ids.
        unknown_pieces: Number of pieces of the SentencePiece model that have no id.
        languages: Code of a language → id, in the order of ids.
        tokens: Code of a language → its token.
        spare: Ids without a token.
        origin: The checkpoint that an error names.
        given: Languages with tokens that were imported with the model.
    """

    specials: tuple[int, ...]
    pieces: dict[str, int]
    unknown_pieces: int
    languages: dict[str, int]
    tokens: dict[str, str]
    spare: list[int]
    origin: Path
    given: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Layout:
    """The ids of an exported vocabulary: specials, pieces, languages, spare rows.

    Attributes:
        pieces: Pieces, from id 4 on.
        language_tokens: Language tokens, after the pieces.
        token_of: Code of a language of the model → its token.
        rows: Our id for each exported id; None: the model has none, and the row is zeros.
        num_spare: Number of rows after the languages.
        of_hundred: True: ``M2M100Tokenizer``; False: ``NllbTokenizer``.
    """

    pieces: tuple[str, ...]
    language_tokens: tuple[str, ...]
    token_of: Mapping[str, str]
    rows: tuple[int | None, ...]
    num_spare: int
    of_hundred: bool

    @property
    def absent(self) -> list[int]:
        """Return the ids that the model must never predict."""
        return [index for index, row in enumerate(self.rows) if row is None]

    def rearranged(self, weight_VD: Tensor) -> Tensor:
        """Return our embedding with its rows in this order."""
        index = torch.tensor([0 if row is None else row for row in self.rows])
        arranged_VD = weight_VD[index]
        arranged_VD[self.absent] = 0
        return arranged_VD


def entries_of(files: TokenizerFiles, origin: Path) -> Entries:
    """Return the meaning of each id of a tokenizer.

    Raises:
        CheckpointError: Its vocabulary is no single SentencePiece model, or a piece is spelled like
            a special or a language token.
    """
    is_single = files.target_model is None
    if files.model is None or files.description.kind == "byte_bpe" or not is_single:
        kind = "vocabulary of bytes (tokenizer.kind)" if is_single else "vocabulary per side"
        raise CheckpointError(
            f"{origin} has a {kind}, which no format can express. Name a checkpoint with a single "
            "SentencePiece vocabulary."
        )
    tokenizer, description = files.build(), files.description
    processor = SentencePieceProcessor(model_proto=files.model)
    numbering = description.numbering
    ids = list(range(processor.get_piece_size())) if numbering is None else numbering.pieces
    specials = (tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id)
    known = sorted(
        (own, processor.id_to_piece(index))
        for index, own in enumerate(ids)
        if own is not None and own not in specials
    )
    languages = sorted(description.languages, key=tokenizer.language_token_id)
    tokens = {code: description.language_token(code) for code in languages}
    language_ids = {code: tokenizer.language_token_id(code) for code in languages}
    used = {*specials, *language_ids.values(), *(own for own, _ in known)}
    pieces = {piece: own for own, piece in known}
    _refuse_clash(origin, pieces, [*SPECIALS.values(), *tokens.values()])
    lacking = (index for index, own in enumerate(ids) if own is None)
    return Entries(
        specials=specials,
        pieces=pieces,
        unknown_pieces=sum(
            not (processor.is_control(i) or processor.is_unknown(i)) for i in lacking
        ),
        languages=language_ids,
        tokens=tokens,
        spare=[index for index in range(tokenizer.size) if index not in used],
        origin=origin,
        given=frozenset(description.token_spellings),
    )


def chosen_layout(entries: Entries) -> Layout:
    """Return M2M-100's layout if it has all languages with the same tokens, else NLLB's.

    Raises:
        CheckpointError: A token is also a piece, or belongs to another language, too.
    """
    hundred = {
        code: f"__{spelling}__" for spelling, code in distinct_codes(M2M100_LANGUAGES).items()
    }
    of_hundred = set(entries.languages) <= set(hundred) and all(
        entries.tokens[code] == hundred[code] for code in entries.given
    )
    language_rows: list[int | None]
    if of_hundred:
        tokens = hundred
        language_rows = [entries.languages.get(code) for code in tokens]
    else:
        tokens = nllb_layout_tokens(entries)
        language_rows = [*entries.languages.values()]
    _refuse_clash(entries.origin, entries.pieces, tokens.values())
    return Layout(
        pieces=tuple(entries.pieces),
        language_tokens=tuple(tokens.values()),
        token_of={code: tokens[code] for code in entries.languages},
        rows=(*entries.specials, *entries.pieces.values(), *language_rows, *entries.spare),
        num_spare=len(entries.spare),
        of_hundred=of_hundred,
    )


def nllb_layout_tokens(entries: Entries) -> dict[str, str]:
    """Return code → token of ``NllbTokenizer``: imported tokens, else NLLB's codes.

    A language that was added to an imported model follows the style of the model's tokens.

    Raises:
        CheckpointError: Two languages have one token.
    """
    known = {code: _NLLB_OF_FAIRSEQ.sub(r"\1", entries.tokens[code]) for code in entries.given}
    in_nllb_form = not known or not set(NLLB_LANGUAGES).isdisjoint(known.values())
    tokens: dict[str, str] = {}
    for code in entries.languages:
        own = nllb_token(code) if in_nllb_form else entries.tokens[code]
        token = known.get(code, own)
        if token in tokens.values():
            other = next(one for one, used in tokens.items() if used == token)
            raise CheckpointError(
                f"{entries.origin} has the languages {other!r} and {code!r}, which would share the "
                f"token {token!r}. Export it --to ctranslate2."
            )
        tokens[code] = token
    return tokens


def nllb_token(code: str) -> str:
    """Return NLLB's code of a language: ISO 639-3 and script, ``eng_Latn``.

    The 202 languages of NLLB-200 have their published codes. Others have the ISO 639-3 code if the
    registry knows it, the script that the code names or CLDR gives (``Zzzz`` if neither does), and
    the region if the code has one: ``cos_Latn``, ``srp_Latn``, ``por_Latn_BR``.
    """
    published = _nllb_spellings()
    if code in published:
        return published[code]
    tag = parse_tag(code)
    usual = published.get(tag.language) or iso_639_3(tag.language)
    parts = (usual.partition("_")[0], written_script(code) or UNKNOWN_SCRIPT, tag.region)
    return "_".join(filter(None, parts))


@cache
def _nllb_spellings() -> Mapping[str, str]:
    """Return our code → NLLB's."""
    return {code: spelling for spelling, code in model_codes(NLLB_LANGUAGES).items()}


def _refuse_clash(origin: Path, pieces: Iterable[str], reserved: Iterable[str]) -> None:
    clashing = sorted(set(pieces) & set(reserved))
    if clashing:
        raise CheckpointError(
            f"The vocabulary of {origin} has a piece {clashing[0]!r}, which other software takes "
            "for a special or a language token. Name a checkpoint without such a piece."
        )
