"""The parameters of the papers' systems, to the last one."""

from typing import Any

import pytest

from pipeline.model.parameters import count_parameters
from pipeline.model.settings import ModelConfig

BODY: dict[str, Any] = {
    **{"encoder_layers": 6, "decoder_layers": 6, "width": 512, "feed_forward_width": 2048},
    **{"num_heads": 8, "norm": "post"},
}
BODY_PARAMETERS = 44_138_496


def parameters(vocabulary: int, **settings: Any) -> int:
    model = ModelConfig.model_validate({**BODY, **settings})
    return count_parameters(model, vocabulary_size=vocabulary, num_groups=0)["total"]


@pytest.mark.parametrize("vocabulary", [300, 32_000])
def test_a_plain_model_has_its_body_and_a_row_per_token(vocabulary: int) -> None:
    assert parameters(vocabulary) == BODY_PARAMETERS + 512 * vocabulary


def test_a_one_hot_model_has_its_body_and_two_scales() -> None:
    assert parameters(300, embedding={"input": "one_hot"}) == BODY_PARAMETERS + 2


@pytest.mark.parametrize(
    ("front", "more"),
    [
        ({"kind": "msc"}, 123_264),
        ({"kind": "msc", "kernels": (0, 0, 1, 1, 3, 5, 5, 7)}, 90_496),
        ({"kind": "ada_msha"}, 102_720 + 384),
        ({"kind": "ada_msha", "language_vector": True}, 102_720 + 768),
        ({"kind": "ada_msha", "max_scale": 6}, 147_840 + 448),
        ({"kind": "ada_msha", "max_scale": 4}, 65_792 + 320),
        ({"kind": "ncf"}, 9 * 512 * 512 + 3 * 512 + 4),
        ({"kind": "wsf"}, 0),
    ],
)
def test_a_front_adds_what_the_papers_say(front: dict[str, Any], more: int) -> None:
    assert parameters(300, front=front) == BODY_PARAMETERS + 512 * 300 + more


@pytest.mark.parametrize("front", [{"kind": "ada_msha"}, {"kind": "ncf"}, {"kind": "wsf"}])
def test_the_parameters_of_a_front_are_a_part_of_their_own(front: dict[str, Any]) -> None:
    plain, fronted = (
        count_parameters(
            ModelConfig.model_validate({**BODY, "moe": {"num_experts": 4}, "front": one}),
            vocabulary_size=300,
            num_groups=0,
        )
        for one in ({"kind": "subwords"}, front)
    )
    more = {"ada_msha": 103_104, "ncf": 9 * 512 * 512 + 3 * 512 + 4, "wsf": 0}[front["kind"]]
    assert plain["front"] == 0
    assert fronted["front"] == more
    for part in plain.keys() - {"front", "total", "active"}:
        assert plain[part] == fronted[part], part
    assert fronted["total"] - plain["total"] == fronted["active"] - plain["active"] == more
