"""Fused kernels of experts, in Triton, for rows on the GPU that computes them.

They read and write 16-bit or float32 values and compute in float32. None uses atomics, so that
results do not depend on the order in which programs run. Each has a plain form of operators in
:mod:`pipeline.kernels.expert_products` or :mod:`pipeline.kernels.placement`.

Legend: N tokens, C choices per token, E experts, R rows sorted by expert, W their width.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, import-not-found"
# Triton reads annotations itself: they mark constants, and tensors have none.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def add_expert_biases(
    y_RW, bias_EW, expert_R, num_rows,
    WIDTH: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add each row's bias in place, and apply ReLU; a block of rows and columns per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    expert = tl.load(expert_R + row, mask=row < num_rows, other=0).to(tl.int64)
    place = row[:, None] * WIDTH + column[None, :]
    bias = tl.load(bias_EW + expert[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    value = tl.load(y_RW + place, mask=mask, other=0.0).to(tl.float32) + bias.to(tl.float32)
    if RELU:
        value = tl.where(value < 0, 0.0, value)  # what is not a number stays so
    tl.store(y_RW + place, value.to(y_RW.dtype.element_ty), mask=mask)


@triton.jit
def expert_bias_gradients(
    d_y_RW, y_RW, bound_E, sum_EW,
    WIDTH: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum gradients over the rows of each expert, which a program visits for a block of columns.

    With ReLU, whose results are ``y_RW``, gradients are overwritten by those of its inputs before.
    """
    expert = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(bound_E + expert).to(tl.int64)
    last = tl.load(bound_E + expert + 1).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < last)[:, None] & (column < WIDTH)[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        gradient = tl.load(d_y_RW + place, mask=mask, other=0.0)
        if RELU:
            result = tl.load(y_RW + place, mask=mask, other=0.0)
            gradient = tl.where(result <= 0, 0.0, gradient)
            tl.store(d_y_RW + place, gradient, mask=mask)
        total += tl.sum(gradient.to(tl.float32), 0)
    at = sum_EW + expert.to(tl.int64) * WIDTH + column
    tl.store(at, total.to(sum_EW.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def combine_rows(
    y_RW, weight_NC, row_NC, sum_NW,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the rows of a token, weighted if there are weights; a token per program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        route = token * CHOICES + choice
        row = tl.load(row_NC + route).to(tl.int64)
        value = tl.load(y_RW + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        if weight_NC is not None:
            value *= tl.load(weight_NC + route).to(tl.float32)
        total += value
    tl.store(sum_NW + token * WIDTH + column, total.to(sum_NW.dtype.element_ty), mask=mask)


@triton.jit
def combine_rows_backward(
    d_sum_NW, y_RW, weight_NC, row_NC, d_y_RW, d_weight_NC,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a token's rows and weights; a token per program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    d_sum = tl.load(d_sum_NW + token * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    for choice in tl.static_range(CHOICES):
        route = token * CHOICES + choice
        place = tl.load(row_NC + route).to(tl.int64) * WIDTH + column
        value = tl.load(y_RW + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_weight_NC + route, tl.sum(d_sum * value, 0))
        d_y = d_sum * tl.load(weight_NC + route).to(tl.float32)
        tl.store(d_y_RW + place, d_y.to(d_y_RW.dtype.element_ty), mask=mask)
