"""Languages without spaces are named where words are parted by them, and nowhere else."""

from typing import Any

import pytest
from support.tiny_models import tiny_spec

from pipeline.languages import parts_words_by_spaces, usual_script
from pipeline.model.spec import ModelSpec
from pipeline.stages.pretrain import unspaced_lines, unspaced_notes

LINES = {"de-en": 1000, "en-zh": 30, "de-zh": 4, "en-th": 1, "en-zho_latn": 7}


def spec_of(front: dict[str, Any]) -> ModelSpec:
    return tiny_spec(model={"front": front}).model_copy(update={"lone_ids": (0,)})


def lines_under(front: dict[str, Any]) -> dict[str, int]:
    return unspaced_lines(spec_of(front), LINES)


def test_they_are_counted_over_all_pairs_and_said_in_one_sentence() -> None:
    found = lines_under({"kind": "wsf", "layers": 1})
    assert found == {"th": 1, "zh": 34}
    (text,) = unspaced_notes(spec_of({"kind": "wsf", "layers": 1}), LINES)
    assert "between words of th (1 line), zh (34 lines): " in text
    assert "\n" not in text
    assert not text.endswith(".")


def test_a_language_with_a_segmenter_is_none_of_them() -> None:
    spec = spec_of({"kind": "wsf", "layers": 1})
    assert unspaced_lines(spec, LINES, segmented={"zh", "de"}) == {"th": 1}
    assert unspaced_notes(spec, LINES, segmented={"zh", "th"}) == ()


@pytest.mark.parametrize("front", [{"kind": "subwords"}, {"kind": "ncf"}])
def test_other_fronts_have_nothing_to_do_with_words(front: dict[str, Any]) -> None:
    assert lines_under(front) == {}
    assert unspaced_notes(spec_of(front), LINES) == ()


def test_the_languages_are_those_whose_usual_script_is_written_without_spaces() -> None:
    scripts = {code: usual_script(code) for code in "bo dz ja km lo my shn th yue zh".split()}
    assert set(scripts.values()) == {
        *("Tibt", "Jpan", "Khmr", "Laoo", "Mymr", "Thai", "Hant", "Hans")
    }
    assert not any(parts_words_by_spaces(code) for code in scripts)
    others = [*"de en ko vi am hi ar ka mn".split(), "zh_Latn", "a name of other software"]
    assert all(parts_words_by_spaces(code) for code in others)
    assert not parts_words_by_spaces("zho_Hant")
    assert not parts_words_by_spaces("nod_Lana")
