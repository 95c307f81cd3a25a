"""Launches on a GPU, counted on the meta device: budgets, and that counts are right."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from small_recipes import small_recipe
from support.tiny_models import EVERYWHERE, tiny_spec
from torch import Tensor

from pipeline.config.recipe import Recipe, load_recipe
from pipeline.errors import ConfigError
from pipeline.estimates.devices import DEVICES
from pipeline.estimates.launches import (
    META,
    Counted,
    LaunchCounter,
    count_decoding_step,
    count_training,
)
from pipeline.kernels.attention import Spans, attend_packed
from pipeline.kernels.logits import summed_cross_entropy
from pipeline.kernels.products import meta_stands_for
from pipeline.kernels.slot_products import copied_to
from pipeline.model.sublayer import FeedForward
from pipeline.model.tokens import Tokens

MOE = {"num_experts": 4, "every": 2}
CAPACITY = {**MOE, "dispatch": "capacity", "batch_prioritized": True}
BY_GROUP = {**MOE, "decoder_router": "language_group"}
FORMS: dict[str, dict[str, Any]] = {
    "dropless": MOE,
    "capacity": CAPACITY,
    "language groups": BY_GROUP,
}
MORE_THAN_DENSE = 28
"""Launches that experts, their router and placement may add to a layer."""
SHARED = 6
"""Launches for what all MoE layers of an encoder or decoder count with."""
DENSE, EXPERTS = 800, 1050
"""Most launches of a pass of the papers' models."""


def counted(recipe: Recipe, *, vocabulary_size: int = 100) -> Counted:
    moe = recipe.model.moe
    by_group = moe is not None and moe.decoder_router == "language_group"
    return count_training(recipe, vocabulary_size=vocabulary_size, num_groups=3 if by_group else 0)


@pytest.mark.parametrize(
    ("moe", "loss"),
    [
        (None, {}),
        (MOE, {"label_smoothing": 0.1, "router_z_weight": 0.1}),
        (CAPACITY, {"label_smoothing": 0.1, "router_z_weight": 0.1}),
        (BY_GROUP, {}),
    ],
    ids=["dense", *FORMS],
)
def test_no_count_grows_with_tokens_experts_or_smoothing_and_nothing_waits(
    moe: dict[str, Any] | None, loss: dict[str, Any]
) -> None:
    few = counted(small_recipe(moe=moe, **loss))
    many = counted(small_recipe(moe=moe, tokens=4096, **loss))
    assert few.kinds == many.kinds
    assert not few.host_waits
    other = {**loss, "label_smoothing": 0.0 if loss else 0.1}
    assert len(few.launches) == len(counted(small_recipe(moe=moe, **other)).launches) > 0
    assert sum(launch.bytes for launch in few.launches) < sum(x.bytes for x in many.launches)
    if moe is not None:
        more_experts = counted(small_recipe(moe={**moe, "num_experts": 16}, **loss))
        assert few.kinds == more_experts.kinds


def test_a_loss_over_the_papers_vocabulary_launches_very_few_operators() -> None:
    logits_LV = torch.empty(4096, 64000, device=META, dtype=torch.bfloat16, requires_grad=True)
    labels_L = torch.zeros(4096, device=META, dtype=torch.int64)
    with LaunchCounter() as counter:
        summed_cross_entropy(logits_LV, labels_L)[0].backward()
    assert 0 < len(counter.counted.launches) <= 120


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moe", "most"),
    [
        ("dense_opus100", None, DENSE),
        ("moe_opus100", {}, EXPERTS),
        ("moe_opus100", {"dispatch": "dropless"}, EXPERTS),
        ("moe_opus100", {"batch_prioritized": False}, EXPERTS),
    ],
    ids=str,
)
def test_the_papers_models_launch_few_operators_and_no_more_for_shared_passes(
    name: str, moe: dict[str, Any] | None, most: int
) -> None:
    settings = {"model": {"moe": moe}} if moe else {}
    recipe = load_recipe(name, {**settings, "training": {"expert_parallel_size": 1}})
    with meta_stands_for(DEVICES["h100"].capability):
        alone, shared = (
            count_training(recipe, vocabulary_size=64101, num_groups=0, per_pass=per_pass)
            for per_pass in (1, 8)
        )
    assert alone.kinds == shared.kinds
    assert not alone.host_waits
    assert not shared.host_waits
    assert 500 < len(alone.launches) <= most
    if name == "dense_opus100":  # where no device is named
        found = count_training(recipe, vocabulary_size=64000, num_groups=0)
        assert 500 < len(found.launches) <= DENSE


@pytest.mark.parametrize("form", FORMS)
def test_experts_add_a_bounded_number_of_launches_to_a_layer(form: str) -> None:
    """Some launches are shared by the layers of a side."""
    more_than_dense = []
    for layers in (2, 6):
        dense = counted(small_recipe(layers=(layers, layers)))
        moe = counted(small_recipe(moe=FORMS[form], layers=(layers, layers)))
        more_than_dense.append(len(moe.launches) - len(dense.launches))
    few, many = more_than_dense
    each = (many - few) / 4
    assert 0 < each <= MORE_THAN_DENSE
    assert 0 <= few - 2 * each <= 2 * SHARED


@pytest.mark.parametrize("form", FORMS)
def test_no_operator_of_training_lacks_bfloat16_on_gpus(form: str) -> None:
    """Fake tensors accept the operator; PyTorch 2.11 refused it on an H200."""
    launches = counted(small_recipe(moe=FORMS[form])).launches
    operators = {launch.operator for launch in launches}
    assert {"combine_rows", "_grouped_mm"} <= operators
    assert "_embedding_bag_per_sample_weights_backward" not in operators


EIGHT = {"num_experts": 8, "every": 2}


@pytest.mark.parametrize("device", ["a100", "h100"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_rank_reads_its_share_of_the_experts_and_computes_as_many_rows(
    ranks: int, device: str
) -> None:
    """Closed form: R routes of width D through E / ranks experts of hidden width F, two layers.

    A layer has two products, each with two gradients.
    """
    recipe = small_recipe(moe=EIGHT, ranks=ranks)
    with meta_stands_for(DEVICES[device].capability):
        launches = counted(recipe).launches
    products = [one for one in launches if one.operator in ("_grouped_mm", "bmm", "baddbmm")]
    routes, width, hidden, held = 2 * (8 * 32 + 8 * 31), 32, 64, 8 // ranks
    assert [launch.multiply_adds for launch in products] == [routes * width * hidden] * 12
    if device == "h100":
        values = routes * width + routes * hidden + held * width * hidden
        bounds = 4 * held
        assert [launch.bytes for launch in products] == [2 * values + bounds] * 12


MORE_THAN_ON_ONE_RANK = 11
"""Launches of a layer that count, split and join the rows that ranks exchange, both ways."""


def test_an_exchange_adds_a_bounded_number_of_launches_to_a_layer() -> None:
    recipes = (
        small_recipe(moe=EIGHT),
        small_recipe(moe=EIGHT, ranks=2),
        small_recipe(moe=EIGHT, ranks=4),
        small_recipe(moe=EIGHT, ranks=2, tokens=4096),
        small_recipe(moe={**EIGHT, "num_experts": 32}, ranks=2),
    )
    alone, two, four, more_tokens, more_experts = map(counted, recipes)
    layers = 2
    assert 0 < len(two.launches) - len(alone.launches) <= layers * MORE_THAN_ON_ONE_RANK
    assert two.kinds == four.kinds == more_tokens.kinds == more_experts.kinds


@pytest.mark.parametrize("per_pass", [1, 2])
def test_the_papers_experts_on_eight_ranks_wait_once_per_layer_and_pass(per_pass: int) -> None:
    """12 waits per micro-batch, and 6 if two share a pass (``micro_batches_per_pass``)."""
    recipe = load_recipe("moe_opus100")
    assert recipe.training.expert_parallel_size == 8
    found = count_training(recipe, vocabulary_size=64000, num_groups=0, per_pass=per_pass)
    assert len(found.host_waits) == 12
    assert len(found.exchanged) == 4 * 12
    assert len(found.launches) <= 1_160


FRONTS: dict[str, dict[str, Any]] = {
    "msc": {"kind": "msc"},
    "msha": {"kind": "msha", "scales": (0, 2, 3, 4)},
    "ada-msha": {"kind": "ada_msha"},
    "ada-msha +lid": {"kind": "ada_msha", "language_vector": True},
    "ada-msha +lid, one scale more": {
        **{"kind": "ada_msha", "language_vector": True, "max_scale": 6}
    },
    "ncf": {"kind": "ncf"},
    "wsf": {"kind": "wsf", "layers": 2},
}
MORE_THAN_PLAIN = 64
"""Launches that a front may add to a micro-batch, however many layers there are."""


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_a_front_adds_as_few_launches_to_a_deep_encoder_as_to_a_shallow_one_and_no_wait(
    front: str,
) -> None:
    more = {}
    for depth, dtype in ((4, torch.float32), (4, torch.bfloat16), (6, torch.bfloat16)):
        recipes = (small_recipe(front=one, layers=(depth, depth)) for one in (None, FRONTS[front]))
        plain, fronted = (
            count_training(recipe, vocabulary_size=300, num_groups=0, dtype=dtype)
            for recipe in recipes
        )
        more[depth, dtype] = len(fronted.launches) - len(plain.launches)
        assert 0 < more[depth, dtype] <= MORE_THAN_PLAIN
        assert len(fronted.host_waits) == len(plain.host_waits) == 0
    assert more[4, torch.bfloat16] == more[6, torch.bfloat16]


@pytest.mark.parametrize("precision", ["auto", "float32"])
def test_a_decoding_step_on_a_grid_waits_for_nothing(precision: str) -> None:
    """Padded products of experts in single precision have a shape that the host must know.

    With them, a search of its own waits for what is done, and for the copy of what it keeps.
    """

    def step(moe: dict[str, Any] | None) -> Counted:
        recipe = small_recipe(moe=moe)
        decoding = recipe.decoding.model_copy(update={"precision": precision})
        recipe = recipe.model_copy(update={"decoding": decoding})
        return count_decoding_step(recipe, vocabulary_size=100, num_groups=0)

    dense, moe = step(None), step(MOE)
    assert dense.host_waits == ()
    assert len(moe.host_waits) == (3 if precision == "float32" else 0)


def test_a_step_of_a_search_launches_few_operators_beside_its_layers() -> None:
    def launches(layers: int) -> int:
        recipe = small_recipe(layers=(1, layers))
        return len(count_decoding_step(recipe, vocabulary_size=100, num_groups=0).launches)

    with meta_stands_for(DEVICES["h100"].capability):
        few, many = launches(2), launches(6)
    # Six products, two attentions, and three norms with the sums before them.
    assert many - few == 4 * 11
    assert few - 2 * 11 <= 67


def test_products_are_counted_as_their_shapes_say() -> None:
    x_ND = torch.empty(6, 8, device=META, dtype=torch.bfloat16, requires_grad=True)
    weight_FD = torch.empty(16, 8, device=META, dtype=torch.bfloat16, requires_grad=True)
    with LaunchCounter() as mode:
        F.linear(x_ND, weight_FD).sum().backward()
    products = [launch for launch in mode.counted.launches if launch.multiply_adds]
    assert [launch.multiply_adds for launch in products] == [6 * 8 * 16] * 3
    assert products[0].bytes == 2 * (6 * 8 + 8 * 16 + 6 * 16)


@pytest.mark.parametrize("head_width", [8, 160, 512])
def test_attention_is_one_launch_each_way_and_views_none(head_width: int) -> None:
    x = torch.empty(2, 4, 16, head_width, device=META, dtype=torch.bfloat16, requires_grad=True)
    with LaunchCounter() as mode:
        y = F.scaled_dot_product_attention(x, x.detach(), x.detach(), dropout_p=0.1, is_causal=True)
        y.transpose(1, 2).detach().view(2, 16, 4, head_width)
        torch.autograd.grad(y, x, torch.empty_like(y))
    assert [launch.operator for launch in mode.counted.launches] == [
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    ]
    assert [launch.blocks for launch in mode.counted.launches] == [2 * 4, 2 * 4]


def test_packed_attention_has_a_block_per_head_and_tiles_of_a_sentence() -> None:
    """Sentences of at most 200 queries and 300 keys: 2 tiles of queries by 3 of keys."""
    x = torch.empty(3 * 300, 4, 16, device=META, dtype=torch.bfloat16)
    bound_B = torch.empty(4, device=META, dtype=torch.int32)
    span_N = torch.empty(len(x), device=META, dtype=torch.int32)
    with torch.no_grad(), LaunchCounter() as mode:
        queries, keys = (Spans(bound_B, longest, span_N) for longest in (200, 300))
        attend_packed(x, x, x, queries=queries, keys=keys)
    (attention,) = mode.counted.launches
    assert attention.kind == "attention"
    assert attention.blocks == 3 * 4 * 2 * 3


def test_a_fused_kernel_is_one_launch_that_moves_its_tensors_once() -> None:
    x = torch.empty(8, 16, device=META, dtype=torch.bfloat16)
    with LaunchCounter() as mode:
        mode.launched("residual_norm", (x, torch.empty_like(x), None, 16), {"num_warps": 4})
    assert mode.counted.kinds == {"fused kernel": 1}
    assert mode.counted.launches[0].bytes == 2 * 8 * 16 * 2


COPIES: dict[str, Any] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "Boolean index": lambda x: x[x > 0],
    "bool": lambda x: bool((x > 0).any()),
    "tensor": lambda _: torch.tensor([1, 2], device=META),
    "as_tensor": lambda _: torch.as_tensor([1, 2], device=META),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "to": lambda _: torch.zeros(2).to(META),
    "copy_": lambda x: x.copy_(torch.zeros(5)),
    "to, not pinned": lambda _: torch.zeros(2).to(META, non_blocking=True),
    "copy_, not pinned": lambda x: x.copy_(torch.zeros(5), non_blocking=True),
    "index on the host": lambda x: x[torch.zeros(3, dtype=torch.int64)],
    "list as index": lambda x: x[[0, 1]],
    "index_put_ with an index on the host": lambda x: x.index_put_(
        (torch.zeros(5, dtype=torch.int64),), x.clone()
    ),
    "index_put_ with a mask": lambda x: x.index_put_((x > 0,), x.clone()),
    "index_put_ with a mask and a number of the device": lambda x: x.index_put_((x > 0,), x.sum()),
    "index_put_ with a mask that adds": lambda x: x.index_put_(
        (x > 0,), torch.zeros(()), accumulate=True
    ),
    "matrix of Booleans on the host": lambda x: (
        x.expand(5, 5).contiguous().__setitem__(torch.ones(5, 5) > 0, x[:1])
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_the_host_waits_for_is_counted_instead_of_failing(name: str) -> None:
    x: Tensor = torch.empty(5, device=META)
    with LaunchCounter() as mode:
        COPIES[name](x)
    assert len(mode.counted.host_waits) == 1


OTHERS: dict[str, Any] = {
    "copied_to": lambda _: copied_to(META, torch.zeros(2)),
    "index_put_ with a mask and a number": lambda x: x.index_put_((x > 0,), torch.zeros(())),
    "index_put_": lambda x: x.index_put_((x.long(),), x.clone()),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 1.0),
    "arange": lambda _: torch.arange(2, device=META),
    "on the host": lambda _: torch.tensor([1, 2]),
    "as_tensor of a tensor": lambda x: torch.as_tensor(x, device=META),
    "number": lambda x: x + 1.0,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_host_does_not_wait_for_is_not_counted(name: str) -> None:
    x: Tensor = torch.empty(5, device=META)
    with LaunchCounter() as mode:
        OTHERS[name](x)
    assert not mode.counted.host_waits


def test_copies_for_which_the_host_does_not_wait_come_from_pinned_memory() -> None:
    """CUDA copies from other memory as if the copy were blocking; none can be pinned here."""
    values, device = mock.Mock(spec=Tensor), torch.device("cuda")
    copied_to(device, values)
    values.pin_memory.return_value.to.assert_called_once_with(device, non_blocking=True)
    values.to.assert_not_called()


@pytest.mark.parametrize("count", [torch.bincount, torch.unique, torch.unique_consecutive])
def test_an_operator_whose_shape_depends_on_values_fails(count: Any) -> None:
    """It would wait for the device, and its shape is unknown."""
    with LaunchCounter(), pytest.raises((NotImplementedError, RuntimeError)):
        count(torch.empty(5, dtype=torch.int64, device=META))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_of_logits_in_16_bits_are_multiplied_as_those_of_a_multiple_of_64(
    dtype: torch.dtype,
) -> None:
    few, odd, even = (
        sum(
            launch.multiply_adds
            for launch in count_training(
                small_recipe(), vocabulary_size=size, num_groups=0, dtype=dtype
            ).launches
        )
        for size in (64, 101, 128)
    )
    assert few < odd
    assert (odd == even) == (dtype == torch.bfloat16)


WAITS = {("language experts", "a100"): 2}
"""Times that the host asks for the number of blocks: once per side, where matrices are large."""
MODULES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "LMS, rank 20": ("+lms", {"rank": 20}, {"a100": 1550, "h100": 1550}),
    "LMS, both": ("+lms", {"within": EVERYWHERE}, {"a100": 3300, "h100": 2600}),
    "LMS + FD": ("+lms_fd", {}, {"a100": 3450, "h100": 3050}),
    "CLSR*": ("+clsr", {"tables": "per_sublayer"}, {"a100": 2300, "h100": 2200}),
    "language experts": ("+language_experts_fd", {}, {"a100": 2350, "h100": 2250}),
}
"""Language modules → overlay, settings and the most launches; two passes for distillation."""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["a100", "h100"])
@pytest.mark.parametrize("kind", MODULES)
def test_language_modules_launch_few_operators_for_any_mixture_and_hardly_wait(
    kind: str, device: str
) -> None:
    """The meta device has no values: what runs there cannot depend on the languages of a batch.

    Two kinds launch more than 2,600 operators. Fuse distillation passes a micro-batch by both
    routes, and its divergence is 550 of them. Before Hopper there are no grouped products for the
    matrices of languages: each of the twice as many sublayers of "both" copies rows into blocks
    instead.
    """
    overlay, settings, most = MODULES[kind]
    recipe = load_recipe(f"dense_iwslt14{overlay}", {"model": {"language_modules": settings}})
    with meta_stands_for(DEVICES[device].capability):
        found = count_training(recipe, vocabulary_size=100, num_groups=0, num_languages=9)
        if device == "h100":
            more = count_training(recipe, vocabulary_size=100, num_groups=0, num_languages=16)
            assert found.kinds == more.kinds
    assert len(found.launches) <= most[device]
    assert len(found.host_waits) == WAITS.get((kind, device), 0)


@pytest.mark.parametrize("fails", [lambda x_ND: x_ND.bincount(), lambda x_ND: x_ND + on_host(1)])
def test_a_module_of_ones_own_that_fails_without_values_is_told(
    fails: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = FeedForward.forward

    def failing(self: FeedForward, x_ND: Tensor, tokens: Tokens) -> Any:
        fails(x_ND[:, 0].long())
        return forward(self, x_ND, tokens)

    monkeypatch.setattr(FeedForward, "forward", failing)
    recipe = Recipe(name="test", model=tiny_spec().model)
    with pytest.raises(ConfigError, match=r"^A pass of training cannot be estimated"):
        count_training(recipe, vocabulary_size=40, num_groups=0)
    with pytest.raises(ConfigError, match=r"^A step of decoding cannot be estimated"):
        count_decoding_step(recipe, vocabulary_size=40, num_groups=0)


def on_host(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.int64)
