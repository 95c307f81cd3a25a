"""Vocabularies of Hugging Face's tokenizers: a SentencePiece model numbered in their way.

Language tokens keep their ids, and the codes that ``languages.py`` has for them: ``eng_Latn`` and
``en_XX`` are ``en``. Text that looks like a special or a language token stays text here.

Vocabularies whose ids are a SentencePiece model's, moved by one: NLLB's and mBART-50's.

fairseq puts four specials before the pieces, ``<s> <pad> </s> <unk>``, where SentencePiece has
three, ``<unk> <s> </s>``: every ordinary piece has its id there and one. Language tokens follow the
pieces, and ``<mask>`` follows them, which nothing has here. Their orders are those of transformers'
``NllbTokenizer`` and ``MBart50Tokenizer``.

SentencePiece models with their pieces in another order.

A model is a protocol buffer: a series of fields, each a key and a value. Pieces are its field 1,
one after the other, and their ids are their order; everything else stays byte for byte. (Field
numbers: ``sentencepiece_model.proto`` of google/sentencepiece.)

Tokenizer files as Hugging Face's M2M100Tokenizer and NllbTokenizer read them.

Their ids of a text are ours, renumbered by a :class:`Layout`. Where a text has a special or a
language token written out, theirs takes it for one, and ours for text.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from sentencepiece import SentencePieceProcessor

from pipeline.artifacts.tokenizer import (
    LanguageTokenScheme,
    Numbering,
    TokenizerDescription,
    TokenizerFiles,
    language_token,
)
from pipeline.checkpoints.foreign.model_folder import ModelFolder
from pipeline.checkpoints.foreign.tokenizer_config import (
    FAST_TOKENIZER_FILE,
    TokenizerConfig,
    added_tokens,
    language_of_token,
    language_tokens,
)
from pipeline.errors import CheckpointError
from pipeline.languages import distinct_codes

SENTENCEPIECE_FILE = "sentencepiece.bpe.model"
M2M100_SPECIALS = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
M2M100_LANGUAGES = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu "
    "ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr "
    "ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk "
    "ur uz vi wo xh yi yo zh zu"
).split()
"""In the order of their ids, which follow those of the pieces (fairseq's M2M-100)."""


def m2m100_tokenizer(folder: ModelFolder, *, size: int) -> TokenizerFiles:
    """Of ``M2M100Tokenizer``: pieces numbered by ``vocab.json``, then a hundred languages.

    ``size`` is the number of rows of the embedding, some of which nothing has.

    Raises:
        CheckpointError: a file is missing or does not hold what it should.
    """
    vocabulary = folder.read_object("vocab.json")
    model = folder.read_bytes(SENTENCEPIECE_FILE)
    specials = {name: vocabulary.get(piece) for name, piece in M2M100_SPECIALS.items()}
    return numbered(
        folder.origin,
        model,
        size=size,
        specials=specials,
        pieces=[vocabulary.get(piece) for piece in pieces_of(model, folder.origin)],
        languages={code: len(vocabulary) + i for i, code in enumerate(M2M100_LANGUAGES)},
    )


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
    """A SentencePiece model with the ids of other software; languages by their spelling there.

    ``written``: spelling → token, where tokens are not written by ``scheme``.

    Raises:
        CheckpointError: ids are missing, collide or lie beyond ``size``.
    """
    codes = model_codes(languages)
    tokens = {codes[spelling]: index for spelling, index in languages.items()}
    try:
        numbering = Numbering.model_validate(
            {**specials, "size": size, "pieces": tuple(pieces), "language_tokens": tokens}
        )
        description = TokenizerDescription(
            kind="sentencepiece",
            languages=tuple(sorted(tokens)),
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
            f"The vocabulary of {origin} cannot be numbered as its model is ({what}): restore its "
            "files from where they were published."
        ) from error
    return TokenizerFiles(description, model)


def model_codes(spellings: Iterable[str]) -> dict[str, str]:
    """Spelling → our code, of languages that a model tells apart.

    Where the registry has one code for two of them (NLLB's ``pes_Arab`` and ``prs_Arab`` are
    ``fa``), the first has it, and the others what they are called there: ``prs``.
    """
    found: dict[str, str] = {}
    for spelling, code in distinct_codes(spellings).items():
        taken = set(found.values())
        names = (code, spelling.partition("_")[0], spelling)
        found[spelling] = next(name for name in names if name not in taken)
    return found


def pieces_of(model: bytes, origin: Path, *, name: str = SENTENCEPIECE_FILE) -> list[str]:
    """The pieces of a SentencePiece model, in its order; ``name`` is its file's in ``origin``."""
    try:
        processor = SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise CheckpointError(
            f"{origin / name} is not a SentencePiece model: restore it from where it was published."
        ) from error
    return [processor.id_to_piece(index) for index in range(processor.get_piece_size())]


SPECIAL_IDS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
"""As fairseq numbers them, where the folder's files say nothing else."""
PIECES_BEFORE = ("<unk>", "<s>", "</s>")
"""What SentencePiece has before its ordinary pieces."""
OFFSET = 1
"""Id of an ordinary piece, less its place in the SentencePiece model."""
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
"""In the order of their ids (NLLB-200)."""
MBART50_LANGUAGES = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT "
    "lv_LV my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL "
    "hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN "
    "th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
).split()
"""In the order of their ids (mBART-50)."""


def nllb_tokenizer(folder: ModelFolder, config: TokenizerConfig, *, size: int) -> TokenizerFiles:
    """Of ``NllbTokenizer``: 202 languages; ``size`` is the number of rows of the embedding.

    Raises:
        CheckpointError: a file is missing or does not hold what it should.
    """
    return _aligned(folder, config, size=size, published=NLLB_LANGUAGES)


def mbart50_tokenizer(folder: ModelFolder, config: TokenizerConfig, *, size: int) -> TokenizerFiles:
    """Of ``MBart50Tokenizer``: 52 languages; ``size`` is the number of rows of the embedding.

    Raises:
        CheckpointError: a file is missing or does not hold what it should.
    """
    return _aligned(folder, config, size=size, published=MBART50_LANGUAGES)


def _aligned(
    folder: ModelFolder, config: TokenizerConfig, *, size: int, published: Sequence[str]
) -> TokenizerFiles:
    if not folder.has(SENTENCEPIECE_FILE) and folder.has(FAST_TOKENIZER_FILE):
        raise CheckpointError(
            f"{folder.origin} has its vocabulary in {FAST_TOKENIZER_FILE} alone: put the "
            f"{SENTENCEPIECE_FILE} that it was made from beside it."
        )
    model = folder.read_bytes(SENTENCEPIECE_FILE)
    pieces = pieces_of(model, folder.origin)
    if tuple(pieces[: len(PIECES_BEFORE)]) != PIECES_BEFORE:
        raise CheckpointError(
            f"{folder.origin / SENTENCEPIECE_FILE} begins with the pieces "
            f"{' '.join(pieces[: len(PIECES_BEFORE)])}, and ids can be moved by one from "
            f"{' '.join(PIECES_BEFORE)} alone: name a folder with the model's own vocabulary."
        )
    ids: Mapping[str, int] = SPECIAL_IDS | added_tokens(folder, config)
    tokens = language_tokens(folder, config, published=published, first_id=len(pieces) + OFFSET)
    written = {language_of_token(token) or token: token for token in tokens}
    return numbered(
        folder.origin,
        model,
        size=size,
        specials={name: ids.get(token) for name, token in config.specials().items()},
        pieces=[
            None if index < len(PIECES_BEFORE) else index + OFFSET for index in range(len(pieces))
        ],
        languages={spelling: tokens[token] for spelling, token in written.items()},
        written=written,
    )


_PIECES = 1
_CONTROL_TYPE = b"\x18\x03"
"""Field 3 of a piece, its type: control."""
_NO_SCORE = b"\x15" + bytes(4)
"""Field 2 of a piece: 0.0."""


def with_pieces(model: bytes, pieces: Sequence[str]) -> bytes:
    """The same model with unknown, ``<s>``, ``</s>`` and then these pieces, and no others.

    Args:
        pieces: some or all of its ordinary pieces.
    """
    processor = SentencePieceProcessor(model_proto=model)
    found = list(_fields(model))
    stored = [value for number, value in found if number == _PIECES]
    rest = b"".join(value for number, value in found if number != _PIECES)
    chosen = [
        stored[processor.unk_id()],
        _control("<s>"),
        _control("</s>"),
        *(stored[processor.piece_to_id(piece)] for piece in pieces),
    ]
    return b"".join(chosen) + rest


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The number of each field, and the field with its key."""
    start = 0
    while start < len(message):
        key, position = _varint(message, start)
        match key & 7:
            case 0:
                _, position = _varint(message, position)
            case 1:
                position += 8
            case 2:
                length, position = _varint(message, position)
                position += length
            case 5:
                position += 4
            case wire_type:
                raise ValueError(f"wire type {wire_type}")
        yield key >> 3, message[start:position]
        start = position


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    number = shift = 0
    while True:
        byte = message[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position


def _control(piece: str) -> bytes:
    """Field 1 with a short piece of the type control."""
    text = piece.encode()
    body = bytes([0x0A, len(text)]) + text + _NO_SCORE + _CONTROL_TYPE
    return bytes([0x0A, len(body)]) + body
