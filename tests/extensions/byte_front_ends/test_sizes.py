"""Parameters of fronts by part; ``whole/test_byte_rows`` has the totals of the papers' systems."""

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


def test_a_one_hot_model_has_its_body_and_two_scales() -> None:
    assert parameters(300, embedding={"input": "one_hot"}) == BODY_PARAMETERS + 2


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
