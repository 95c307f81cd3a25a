"""Vocabularies whose ids are a SentencePiece model's, moved by one: NLLB's and mBART-50's.

fairseq puts four specials before the pieces, ``<s> <pad> </s> <unk>``, where SentencePiece has
three, ``<unk> <s> </s>``: every ordinary piece has its id there and one. Language tokens follow the
pieces, and ``<mask>`` follows them, which nothing has here. Their orders are those of transformers'
``NllbTokenizer`` and ``MBart50Tokenizer``.
"""

from collections.abc import Mapping, Sequence

from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.checkpoints.foreign.model_folder import ModelFolder
from pipeline.checkpoints.foreign.tokenizer_config import (
    FAST_TOKENIZER_FILE,
    TokenizerConfig,
    added_tokens,
    language_of_token,
    language_tokens,
)
from pipeline.checkpoints.foreign.vocabularies import SENTENCEPIECE_FILE, numbered, pieces_of
from pipeline.errors import CheckpointError

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
