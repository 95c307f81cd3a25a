"""Named entities: files to labelled sentences, and logits to tags."""

from collections.abc import Mapping, Sequence

from pipeline.batching.labelled import Labelled, collate_tags
from pipeline.config import Recipe
from pipeline.errors import ArtifactError
from pipeline.settings import shown
from pipeline.tasks.data import LabelledData
from pipeline.tasks.entities import OUTSIDE, Sentence, read_entities
from pipeline.tasks.files import Found
from pipeline.tasks.pieces import Pieces
from pipeline.tasks.training import chosen_files
from pipeline.tasks.windows import cut_sentence


def read_training(
    files: Found, languages: tuple[str, ...]
) -> tuple[dict[str, list[Sentence]], dict[str, list[Sentence]], tuple[str, ...]]:
    """Sentences to train on, to validate on, and the tags of the former.

    Raises:
        ArtifactError: a file is broken, or has a tag that no training file has.
    """
    train = {code: read_entities(files[code]["train"], language=code) for code in languages}
    dev = chosen_files(files, languages, "dev")
    valid = {code: read_entities(splits["dev"], language=code) for code, splits in dev.items()}
    tags = tags_of(train)
    for code, sentences in valid.items():
        unknown = {tag for one in sentences for tag in one.tags} - set(tags)
        if unknown:
            raise ArtifactError(
                f"{dev[code]['dev']} has the tag {shown(min(unknown))!r}, which no training file "
                "has: correct it, or train on text that has it."
            )
    return train, valid, tags


def tags_of(sentences: Mapping[str, Sequence[Sentence]]) -> tuple[str, ...]:
    """All tags, ``O`` first."""
    found = {tag for group in sentences.values() for one in group for tag in one.tags}
    return (OUTSIDE, *sorted(found - {OUTSIDE}))


def tagging_data(
    train: Mapping[str, Sequence[Sentence]],
    valid: Mapping[str, Sequence[Sentence]],
    tags: tuple[str, ...],
    *,
    pieces: Pieces,
    recipe: Recipe,
    languages: Sequence[str],
) -> LabelledData:
    """What a tagger is trained on."""
    limit = recipe.tasks.max_tokens

    def labelled(groups: Mapping[str, Sequence[Sentence]]) -> dict[str, list[Labelled]]:
        return {
            code: [part for one in group for part in label(one, tags, pieces, max_tokens=limit)]
            for code, group in groups.items()
        }

    return LabelledData(
        labelled(train), labelled(valid), recipe, languages=languages, collate=collate_tags
    )


def label(
    sentence: Sentence, tags: Sequence[str], pieces: Pieces, *, max_tokens: int
) -> list[Labelled]:
    """A sentence as a tagger is given it, in one part or several.

    Tags that the model does not know count as ``O``: they are what it is to be scored on, not what
    it is given.
    """
    number = {tag: index for index, tag in enumerate(tags)}
    numbers = [number.get(tag, 0) for tag in sentence.tags]
    return cut_sentence(sentence.tokens, numbers, pieces, max_tokens=max_tokens)
