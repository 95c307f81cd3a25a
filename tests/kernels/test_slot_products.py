"""Products with a matrix per slot, in every arrangement of rows, against a product per row."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pipeline.kernels import slot_products
from pipeline.kernels.expert_products import ExpertWeights
from pipeline.kernels.products import Activation, activate
from pipeline.kernels.slot_products import (
    BLOCK_ROWS,
    ArrangedRows,
    BlockedRows,
    RowRuns,
    Run,
    SentenceSlots,
    Which,
    add_low_rank,
    arranged_rows,
    fits_grouped_products,
    row_feed_forward,
    row_products,
    sort_rows,
    unsort_rows,
)

SLOTS, INPUTS, RANK, OUTPUTS = 5, 24, 8, 16
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Mixture:
    """Sentences of a batch: the length and both slots of each."""

    lengths: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]

    def slots(self, *, is_pair: bool = True) -> SentenceSlots:
        sentence_N = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        first_B = torch.tensor(self.first)
        return SentenceSlots(sentence_N, first_B, torch.tensor(self.second) if is_pair else first_B)


MIXTURES = {
    "mixed": Mixture((3, 1, 4, 2, 5), (1, 0, 4, 1, 0), (2, 2, 0, 1, 4)),
    "one direction": Mixture((3, 2), (3, 3), (1, 1)),
    "of several blocks": Mixture(
        (BLOCK_ROWS + 3, 2 * BLOCK_ROWS, 1, BLOCK_ROWS - 1), (4, 1, 1, 4), (0, 3, 0, 0)
    ),
    "every slot in its turn": Mixture((1,) * 10, (0, 1, 2, 3, 4) * 2, (4, 3, 2, 1, 0) * 2),
}


def arranged(slots: SentenceSlots, form: str) -> tuple[ArrangedRows, ArrangedRows]:
    """Rows by first and by second slots; ``counted``: as if matrices were large."""

    def arrange(which: Which) -> ArrangedRows:
        if form == "runs":
            return slots.row_runs(which, num_slots=SLOTS)
        if form == "sorted":
            return slots.sorted_rows(which, num_slots=SLOTS)
        size = 2**40 if form == "counted" else 0
        return slots.blocked_rows(which, num_slots=SLOTS, matrix_bytes=size)

    return arrange("first"), arrange("second")


def values(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def with_gradients(run: Function, inputs: list[Tensor]) -> list[Tensor]:
    """The result and the gradients of all inputs."""
    given = [value.detach().clone().requires_grad_() for value in inputs]
    y = run(*given)
    slope = torch.arange(y.numel()).view_as(y).cos().to(y.dtype)
    return [y.detach(), *torch.autograd.grad((y * slope).sum(), given)]


def assert_equal(run: Function, expected: Function, inputs: list[Tensor]) -> None:
    """Equal but for rounding, with gradients of zero for slots without rows."""
    is_half = inputs[0].dtype == torch.bfloat16
    expected_values = with_gradients(expected, inputs)
    for ours, theirs in zip(with_gradients(run, inputs), expected_values, strict=True):
        assert ours.dtype == theirs.dtype
        scale = 1 + float(theirs.abs().max()) if theirs.numel() else 1
        atol = (3e-2 if is_half else 1e-5) * scale
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
        if len(theirs) == SLOTS:
            is_idle_S = (theirs == 0).flatten(1).all(-1)
            assert ours[is_idle_S].count_nonzero() == 0


def by_row(x_NI: Tensor, weight_SOI: Tensor, slot_N: Tensor) -> Tensor:
    """x Wᵀ with the matrix of every row's slot, in float32."""
    return torch.einsum("ni,noi->no", x_NI.float(), weight_SOI.float()[slot_N])


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
MIXED = pytest.mark.parametrize("mixture", MIXTURES)
FORMS = pytest.mark.usefixtures("form")


@pytest.fixture(params=["runs", "sorted", "blocked", "counted"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let products arrange rows in a form, as if the device preferred it."""
    kind: str = request.param
    monkeypatch.setattr(slot_products, "arranged_rows", lambda *given: arranged(given[2], kind))
    return kind


@MIXED
@DTYPES
@pytest.mark.parametrize("is_pair", [True, False], ids=["pair-wise", "language-wise"])
def test_low_rank_matrices_of_arranged_rows_are_a_product_per_row(
    form: str, mixture: str, dtype: torch.dtype, is_pair: bool
) -> None:
    slots = MIXTURES[mixture].slots(is_pair=is_pair)
    num_rows = len(slots.sentence_N)
    inputs = [
        values(num_rows, OUTPUTS, seed=1, dtype=dtype),
        values(num_rows, INPUTS, seed=2, dtype=dtype),
        values(SLOTS, OUTPUTS, RANK, seed=3, dtype=dtype),
        values(SLOTS, RANK, INPUTS, seed=4, dtype=dtype),
    ]
    first, second = arranged(slots, form)
    assert (first is second) == (not is_pair)

    def expected(y: Tensor, x: Tensor, vertical: Tensor, flat: Tensor) -> Tensor:
        first_N, second_N = (slot_B[slots.sentence_N] for slot_B in (slots.first_B, slots.second_B))
        return (y + by_row(by_row(x, flat, second_N), vertical, first_N)).to(dtype)

    assert_equal(
        lambda y, x, vertical, flat: add_low_rank(y, x, vertical, flat, slots), expected, inputs
    )


@FORMS
@MIXED
@DTYPES
def test_products_of_arranged_rows_are_a_product_per_row(mixture: str, dtype: torch.dtype) -> None:
    slots = MIXTURES[mixture].slots()
    inputs = [
        values(len(slots.sentence_N), INPUTS, seed=1, dtype=dtype),
        values(SLOTS, OUTPUTS, INPUTS, seed=2, dtype=dtype),
    ]
    assert_equal(
        lambda x, weight: row_products(x, weight, slots),
        lambda x, weight: by_row(x, weight, slots.first_B[slots.sentence_N]).to(dtype),
        inputs,
    )


@FORMS
@MIXED
@DTYPES
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_feed_forwards_of_arranged_rows_are_a_product_per_row(
    mixture: str, dtype: torch.dtype, activation: Activation
) -> None:
    slots = MIXTURES[mixture].slots()
    inputs = [
        values(len(slots.sentence_N), INPUTS, seed=1, dtype=dtype),
        values(SLOTS, OUTPUTS, INPUTS, seed=2, dtype=dtype),
        values(SLOTS, OUTPUTS, seed=3, dtype=dtype),
        values(SLOTS, INPUTS, OUTPUTS, seed=4, dtype=dtype),
        values(SLOTS, INPUTS, seed=5, dtype=dtype),
    ]

    def serve(x: Tensor, *weights: Tensor) -> Tensor:
        given = ExpertWeights(*weights)
        return row_feed_forward(x, given, slots, activation=activation)

    def expected(x: Tensor, *weights: Tensor) -> Tensor:
        up, up_bias, down, down_bias = (weight.float() for weight in weights)
        slot_N = slots.first_B[slots.sentence_N]
        hidden = activate(by_row(x, up, slot_N) + up_bias[slot_N], activation)
        return (by_row(hidden, down, slot_N) + down_bias[slot_N]).to(dtype)

    assert_equal(serve, expected, inputs)


@FORMS
def test_a_batch_without_rows_has_gradients_of_zero() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    slots = SentenceSlots(nothing, nothing, nothing)
    weight = values(SLOTS, OUTPUTS, INPUTS, seed=1, dtype=torch.float32)
    y = row_products(torch.zeros(0, INPUTS), weight, slots)
    assert y.shape == (0, OUTPUTS)
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0


@FORMS
def test_a_row_that_is_not_a_number_stays_with_its_slot() -> None:
    slots = MIXTURES["mixed"].slots()
    x = values(len(slots.sentence_N), INPUTS, seed=1, dtype=torch.float32).detach()
    x[0] = torch.nan
    weight = values(SLOTS, OUTPUTS, INPUTS, seed=2, dtype=torch.float32)
    row_products(x, weight, slots).sum().backward()
    assert weight.grad is not None
    is_finite_S = weight.grad.isfinite().all(-1).all(-1)
    assert is_finite_S.tolist() == [True, False, True, True, True]


def test_the_host_takes_the_most_blocks_or_asks_for_the_number_where_matrices_are_large() -> None:
    slots = MIXTURES["of several blocks"].slots()
    bound, counted = (arranged(slots, form)[0] for form in ("blocked", "counted"))
    assert isinstance(bound, BlockedRows)
    assert isinstance(counted, BlockedRows)
    assert (len(bound.slot_P), counted.slot_P.tolist()) == (4 + 4, [1, 1, 1, 4, 4, 4])
    alone, _ = arranged(MIXTURES["one direction"].slots(), "counted")
    assert alone == RowRuns((Run(0, 5, 3),), SLOTS)
    x = torch.zeros(5, INPUTS)
    assert (
        arranged_rows(x, [x.new_zeros(SLOTS, 1, INPUTS)], MIXTURES["one direction"].slots())[0]
        == alone
    )


def test_a_slot_that_does_not_exist_is_refused() -> None:
    """Its rows would go through the matrix of another one."""
    sentence_N = torch.tensor([0, 0, 1])
    for slot in (-(2**31), SLOTS):
        first_B = torch.tensor([1, slot])
        with pytest.raises(RuntimeError, match="nonzero"):
            SentenceSlots(sentence_N, first_B, first_B).sorted_rows("first", num_slots=SLOTS)


def test_rows_sorted_by_slot_and_back_are_the_rows_and_so_is_their_gradient() -> None:
    slots = MIXTURES["mixed"].slots()
    rows = slots.sorted_rows("first", num_slots=SLOTS)
    x = torch.randn(len(slots.sentence_N), 3, dtype=torch.float64, requires_grad=True)
    in_order = sort_rows(x, rows)
    assert torch.equal(slots.first_B[slots.sentence_N].sort(stable=True)[1], rows.order_N)
    assert torch.equal(in_order, x[rows.order_N])
    assert torch.equal(unsort_rows(in_order, rows), x)
    assert torch.autograd.gradcheck(lambda given: sort_rows(given, rows), x)
    assert torch.autograd.gradcheck(lambda given: unsort_rows(given, rows), x)


@pytest.mark.parametrize(
    ("slots", "rank", "is_grouped"), [(1023, 32, True), (1024, 32, False), (9, 20, False)]
)
def test_grouped_products_take_fewer_than_1024_slots_and_rows_of_16_bytes(
    slots: int, rank: int, is_grouped: bool
) -> None:
    x, weight = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((8, 16), (slots, rank, 16))
    )
    assert fits_grouped_products(x, [weight]) == is_grouped
