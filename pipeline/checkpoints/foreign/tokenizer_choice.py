"""TODO: docstring."""

from dataclasses import dataclass

from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.batching.settings import TagScheme
from pipeline.checkpoints.foreign.model_folder import ModelFolder
from pipeline.checkpoints.foreign.tokenizer_config import tokenizer_config
from pipeline.checkpoints.foreign.vocabularies import (
    m2m100_tokenizer,
    mbart50_tokenizer,
    nllb_tokenizer,
)
from pipeline.errors import CheckpointError

CLASSES = "M2M100Tokenizer, NllbTokenizer, MBart50Tokenizer"


@dataclass(frozen=True)
class FolderTokenizer:
    """A folder's tokenizer under our names, and where its model expects the language tokens."""

    files: TokenizerFiles
    tag_scheme: TagScheme = "src-tgt"


def folder_tokenizer(folder: ModelFolder, *, usual_class: str, size: int) -> FolderTokenizer:
    """The tokenizer of a folder; ``size`` is the number of rows of the model's embedding.

    ``usual_class``: what transformers takes for the family where the folder names none.

    Raises:
        CheckpointError: it is of a class that is not known, or its files are not as they should be.
    """
    config = tokenizer_config(folder, usual_class=usual_class)
    match config.tokenizer_class:
        case "M2M100Tokenizer":
            return FolderTokenizer(m2m100_tokenizer(folder, size=size))
        case "NllbTokenizer":
            return FolderTokenizer(
                nllb_tokenizer(folder, config, size=size),
                "src-suffix-tgt" if config.legacy_behaviour else "src-tgt",
            )
        case "MBart50Tokenizer":
            return FolderTokenizer(mbart50_tokenizer(folder, config, size=size))
        case "MBartTokenizer":
            raise CheckpointError(
                f"{folder.origin} has an MBartTokenizer, mBART-25's, whose decoder starts from the "
                "language's token instead of end-of-sentence: name a checkpoint of mBART-50."
            )
    raise CheckpointError(
        f"{folder.origin} has a tokenizer of the class {config.tokenizer_class!r}, of which no ids "
        f"are known: name a folder with one of {CLASSES}."
    )
