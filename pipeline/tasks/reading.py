"""Questions about passages: files to windows that point to their answers."""

from collections.abc import Mapping, Sequence

from pipeline.batching.labelled import Labelled, collate_spans
from pipeline.config import Recipe, TasksConfig
from pipeline.errors import ConfigError
from pipeline.tasks.data import LabelledData
from pipeline.tasks.files import Found
from pipeline.tasks.pieces import Located, Pieces
from pipeline.tasks.questions import Question, read_questions
from pipeline.tasks.training import chosen_files
from pipeline.tasks.windows import Window, check_windows, cut_passage


def reading_data(
    files: Found, *, pieces: Pieces, recipe: Recipe, languages: tuple[str, ...]
) -> LabelledData:
    """What a reader is trained on.

    Raises:
        ConfigError or ArtifactError: the settings leave no windows, or a file is broken.
    """
    check_windows(recipe.tasks)
    if recipe.loss.label_smoothing:
        raise ConfigError(
            f"loss.label_smoothing is {recipe.loss.label_smoothing}, and the labels of a reader "
            "are places in a passage, which it has no meaning for: set it to 0."
        )
    train = {code: read_questions(files[code]["train"]) for code in languages}
    dev = chosen_files(files, languages, "dev")
    valid = {code: read_questions(splits["dev"]) for code, splits in dev.items()}

    def labelled(groups: Mapping[str, Sequence[Question]]) -> dict[str, list[Labelled]]:
        return {
            code: [window.labelled for _, window in windows_of(group, pieces, recipe.tasks)]
            for code, group in groups.items()
        }

    return LabelledData(
        labelled(train), labelled(valid), recipe, languages=languages, collate=collate_spans
    )


def windows_of(
    questions: Sequence[Question],
    pieces: Pieces,
    config: TasksConfig,
    *,
    with_answers: bool = True,
) -> list[tuple[int, Window]]:
    """All windows in the order of the questions, each with the place of its question.

    Of several right answers the first is learnt.
    """
    located: dict[str, Located] = {}  # most contexts have several questions
    found = []
    for number, one in enumerate(questions):
        if one.context not in located:
            located[one.context] = pieces.locate(one.context)
        answer = one.answers[0] if with_answers else None
        asked = pieces.encode(one.question)
        windows = cut_passage(asked, located[one.context], answer, config)
        found += [(number, window) for window in windows]
    return found
