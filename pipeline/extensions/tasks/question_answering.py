"""Files of questions in SQuAD v1.1's JSON: XQuAD, MLQA, TyDiQA-GoldP.

``data[].paragraphs[].{context, qas[].{id, question, answers[].{text, answer_start}}}``;
``answer_start`` counts characters.

Exact match and F1 of answers by SQuAD v1.1's normalizer.

TyDiQA-GoldP and XQuAD are scored so, whatever the language (Clark et al. 2020, §6.1; Artetxe et al.
2020): lower case, without the punctuation of ASCII and without the English articles.

Questions about passages: files to windows that point to their answers.
"""

from collections.abc import Mapping, Sequence

from pipeline.batching.labelled import Labelled, collate_spans
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError
from pipeline.extensions.tasks.data import LabelledData
from pipeline.extensions.tasks.files import Found
from pipeline.extensions.tasks.questions import Question, read_questions
from pipeline.extensions.tasks.settings import TasksConfig
from pipeline.extensions.tasks.training import chosen_files
from pipeline.extensions.tasks.windows import Window, check_windows, cut_passage
from pipeline.extensions.tasks.xlmr import Located, Pieces


def reading_data(
    files: Found, *, pieces: Pieces, recipe: Recipe, languages: tuple[str, ...]
) -> LabelledData:
    """What a reader is trained on.

    Raises:
        ConfigError or ArtifactError: the settings leave no windows, or a file is broken.
    """
    tasks = recipe.section_of(TasksConfig)
    check_windows(tasks)
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
            code: [window.labelled for _, window in windows_of(group, pieces, tasks)]
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
