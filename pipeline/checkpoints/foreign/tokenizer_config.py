"""What a folder says of its tokenizer: ``tokenizer_config.json`` and the files that go with it.

Which of transformers' tokenizers a folder has, and how its language tokens are placed.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from pipeline.checkpoints.foreign.model_folder import Described, ModelFolder
from pipeline.errors import CheckpointError

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
FAST_TOKENIZER_FILE = "tokenizer.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"

_SCRIPT, _REGION = "_[A-Z][a-z]{3}", "_(?:[A-Z]{2}|[0-9]{3})"
_LANGUAGE = re.compile(
    rf"(?P<plain>[a-z]{{2,3}}(?:{_SCRIPT}(?:{_REGION})?|{_REGION}))"
    rf"|__(?P<underscored>[a-z]{{2,3}}(?:{_SCRIPT})?(?:{_REGION})?)__"
    r"|LANG_TOK_(?P<prefixed>[A-Z]{2,3}(?:_[A-Z]{2,4})?)",
    re.ASCII,
)
"""Language tokens: ``eng_Latn``, ``en_XX``, ``por_Latn_BR``; those that a model of fairseq had are
exported as they were, ``__en__`` and ``LANG_TOK_EN``."""


class AddedToken(Described):
    """A token that is no piece of the vocabulary."""

    content: str
    id: int | None = None
    """Where the file names it; elsewhere it is the key."""


Token = str | AddedToken


class TokenizerConfig(Described):
    """``tokenizer_config.json``; everything has the default that transformers has for it."""

    tokenizer_class: str | None = None
    bos_token: Token = "<s>"
    pad_token: Token = "<pad>"
    eos_token: Token = "</s>"
    unk_token: Token = "<unk>"
    added_tokens_decoder: dict[int, AddedToken] = Field(default_factory=dict)
    additional_special_tokens: tuple[Token, ...] | None = None
    legacy_behaviour: bool = False
    language_codes: Literal["m2m100"] = "m2m100"
    """WMT 21's models have others."""
    sp_model_kwargs: dict[str, Any] | None = None

    def specials(self) -> dict[str, str]:
        """How the four specials are written."""
        return {
            "bos": _content(self.bos_token),
            "pad": _content(self.pad_token),
            "eos": _content(self.eos_token),
            "unk": _content(self.unk_token),
        }


class _FastTokenizer(Described):
    """``tokenizer.json`` of the tokenizers library."""

    added_tokens: tuple[AddedToken, ...] = ()


class _SpecialTokens(Described):
    """``special_tokens_map.json``."""

    additional_special_tokens: tuple[Token, ...] = ()


def tokenizer_config(folder: ModelFolder, *, usual_class: str) -> TokenizerConfig:
    """What a folder says of its tokenizer.

    A class that ends in ``Fast`` is the one without: it has the same ids. ``usual_class``: what
    the family has where the folder names none.

    Raises:
        CheckpointError: it asks SentencePiece for something that we do not.
    """
    found = TokenizerConfig()
    if folder.has(TOKENIZER_CONFIG_FILE):
        found = folder.described(TokenizerConfig, TOKENIZER_CONFIG_FILE)
    if found.sp_model_kwargs:
        raise CheckpointError(
            f"{folder.origin / TOKENIZER_CONFIG_FILE} has sp_model_kwargs = "
            f"{found.sp_model_kwargs!r}, and pieces are always the most probable ones here: "
            "name a checkpoint without them."
        )
    name = (found.tokenizer_class or usual_class).removesuffix("Fast")
    return found.model_copy(update={"tokenizer_class": name})


def added_tokens(folder: ModelFolder, config: TokenizerConfig) -> dict[str, int]:
    """Ids of tokens that are no pieces, as the folder's files give them; empty where none does.

    transformers writes them in one of three places: newer versions into ``tokenizer_config.json``,
    older ones into ``added_tokens.json``, the tokenizers library into ``tokenizer.json``.
    """
    if config.added_tokens_decoder:
        return {token.content: index for index, token in config.added_tokens_decoder.items()}
    if folder.has(ADDED_TOKENS_FILE):
        found = folder.read_object(ADDED_TOKENS_FILE)
        return {token: index for token, index in found.items() if isinstance(index, int)}
    if folder.has(FAST_TOKENIZER_FILE):
        tokens = folder.described(_FastTokenizer, FAST_TOKENIZER_FILE).added_tokens
        return {token.content: token.id for token in tokens if token.id is not None}
    return {}


def language_tokens(
    folder: ModelFolder, config: TokenizerConfig, *, published: Sequence[str], first_id: int
) -> dict[str, int]:
    """Each language's token → its id.

    Ids are those that the folder's files give; where none does, they follow ``first_id`` in the
    order of the folder's list, or in that of the published models.
    """
    given = added_tokens(folder, config)
    found = {token: index for token, index in given.items() if _LANGUAGE.fullmatch(token)}
    if found:
        # Of two spellings of one code the first has it: files that sort ids as text change nothing.
        return dict(sorted(found.items(), key=lambda entry: entry[1]))
    listed: Sequence[Token] = config.additional_special_tokens or ()
    if not listed and folder.has(SPECIAL_TOKENS_FILE):
        listed = folder.described(_SpecialTokens, SPECIAL_TOKENS_FILE).additional_special_tokens
    order = [token for token in map(_content, listed) if _LANGUAGE.fullmatch(token)]
    return {token: first_id + index for index, token in enumerate(order or published)}


def language_of_token(token: str) -> str | None:
    """Return the language within a token, ``en`` of ``__en__``; None if it is no such token."""
    found = _LANGUAGE.fullmatch(token)
    return found[found.lastgroup] if found and found.lastgroup else None


def _content(token: Token) -> str:
    return token if isinstance(token, str) else token.content
