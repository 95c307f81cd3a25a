"""Confusion matrices of languages: sums of the directions' counts, and their shares in a table."""

from collections import Counter
from dataclasses import replace

from support.example_evaluation import PROFILES, evaluation

from pipeline.evaluation.comparison_tables import MATRIX_LANGUAGES, comparison_sections
from pipeline.evaluation.confusion import confuse_languages
from pipeline.evaluation.scores import Evaluation

MANY = {f"l{number:02}": 1 for number in range(MATRIX_LANGUAGES + 4)}
FOUND = {"de-en": {"en": 9, "de": 1}, "en-de": {"de": 10}, "fr-de": {"de": 6, "fr": 3, "none": 1}}


def told(found: dict[str, dict[str, int]]) -> Evaluation:
    """Every system has these outcomes, in the directions that are named."""
    example = evaluation()
    systems = tuple(
        replace(
            system,
            directions={
                name: replace(one, outcomes={"language": found[name]} if name in found else {})
                for name, one in system.directions.items()
            },
        )
        for system in example.systems
    )
    return replace(
        example, systems=systems, confusion=confuse_languages(systems, profiles=PROFILES)
    )


def test_counts_of_a_familys_directions_into_a_language_are_summed() -> None:
    names = [str(one.direction) for one in PROFILES]
    found = {name: {"en": place + 1, "none": 2} for place, name in enumerate(names)}
    confusion = told(found).confusion
    assert confusion.keys() == {"language"}
    for families in confusion["language"].values():
        for family, targets in families.items():
            for target, counts in targets.items():
                members = [
                    found[str(one.direction)]
                    for one in PROFILES
                    if one.family == family and one.direction.target == target
                ]
                assert counts == sum(map(Counter, members), Counter())
    assert sum(map(len, families.values())) == len(
        {(one.family, one.direction.target) for one in PROFILES}
    )


def test_the_matrix_shows_shares_of_the_lines_asked_for_where_any_was_missed() -> None:
    whole = told(FOUND)
    (section,) = [
        one for one in comparison_sections(whole) if one.title == "Languages that came out"
    ]
    matrices = {table.title: table for table in section.tables[1:]}
    matrix = matrices["dense, Any → En: languages found, % of lines"]
    assert matrix.head == ("Asked for", "de", "en")
    assert matrix.rows == (("en", "10.0", "90.0"),)
    assert not any("En → Any" in title for title in matrices), "nothing was missed there"


def test_languages_that_are_found_seldom_are_summed_up() -> None:
    (section,) = [
        one
        for one in comparison_sections(told({"de-en": {"en": 80, **MANY}}))
        if one.title == "Languages that came out"
    ]
    matrix = section.tables[1]
    assert len(matrix.head) == 1 + MATRIX_LANGUAGES + 1
    assert matrix.head[-1] == "others"
    assert matrix.rows[0][matrix.head.index("en")] == "80.0"
    assert matrix.rows[0][-1] == "5.0"
