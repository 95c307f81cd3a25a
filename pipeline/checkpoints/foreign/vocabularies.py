"""Vocabularies of Hugging Face's tokenizers: a SentencePiece model numbered in their way.

Language tokens keep their ids, and the codes that ``languages.py`` has for them: ``eng_Latn`` and
``en_XX`` are ``en``. Text that looks like a special or a language token stays text here.
"""

from collections.abc import Iterable, Mapping, Sequence
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
