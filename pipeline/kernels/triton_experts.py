"""Fused kernels of routing, placement and experts, in Triton.

They read and write 16-bit or float32 values and compute in float32. None uses atomics, so that
results do not depend on the order in which programs run. Each has a plain form of operators in
:mod:`pipeline.kernels.routing`, :mod:`~pipeline.kernels.placement` or
:mod:`~pipeline.kernels.expert_products`.

Programs of routing and placement have a block of one micro-batch each: the grid is (P, M).

Legend: N tokens, M micro-batches, P blocks of the longest one, C choices per token, E experts,
R rows sorted by expert, W their width, K = 2: sums of probabilities, numbers of first choices.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, import-not-found"
# Triton reads annotations itself: they mark constants, and tensors have none.

import triton
import triton.language as tl

LARGEST, LOWEST = tl.constexpr(2**31 - 1), tl.constexpr(-(2**31))


@triton.jit
def micro_batch(rows_M, num_tokens, m, MICRO_BATCHES: tl.constexpr):
    """Return the first token and the number of tokens of micro-batch m; None: there is one only."""
    first = tl.full([], 0, tl.int64)
    rows = num_tokens
    if rows_M is not None:
        i = tl.arange(0, triton.next_power_of_2(MICRO_BATCHES))
        rows_I = tl.load(rows_M + i, mask=i < MICRO_BATCHES, other=0)
        first = tl.sum(tl.where(i < m, rows_I, 0), 0)
        rows = tl.sum(tl.where(i == m, rows_I, 0), 0)
    return first, rows


@triton.jit
def block_of_tokens(rows_M, num_tokens, MICRO_BATCHES: tl.constexpr, TOKENS: tl.constexpr):
    """Return the numbers of this program's tokens, and which of them exist."""
    first, rows = micro_batch(rows_M, num_tokens, tl.program_id(1), MICRO_BATCHES)
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    return first + i, i < rows


@triton.jit(do_not_specialize=["num_tokens"])
def choose_experts(
    logits_NE, rows_M, probability_NE, expert_NC, chosen_NC, claim_N, sum_MPKE, num_tokens,
    RENORMALIZED: tl.constexpr, MICRO_BATCHES: tl.constexpr, EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write softmax, best experts, and their logits (``RENORMALIZED``) or probabilities.

    The first of equal logits is chosen first, and NaN counts as the largest number. Ascending
    ``claim_N`` sorts tokens by micro-batch, then by the probability of their best expert, highest
    first.
    """
    n, exists = block_of_tokens(rows_M, num_tokens, MICRO_BATCHES, TOKENS)
    e = tl.arange(0, BLOCK)
    mask = exists[:, None] & (e < EXPERTS)[None, :]
    place = n[:, None] * EXPERTS + e[None, :]
    logit = tl.load(logits_NE + place, mask=mask, other=float("-inf"))
    exponential = tl.exp(logit - tl.max(logit, 1)[:, None])
    probability = tl.where(mask, exponential / tl.sum(exponential, 1)[:, None], 0.0)
    tl.store(probability_NE + place, probability, mask=mask)
    # As integers, numbers are in the order of their bits, negative ones in the reverse order.
    bits = logit.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ LARGEST, bits)
    order = tl.where(logit == 0, 0, order)
    order = tl.where(logit != logit, LARGEST, order)
    order = tl.where((e < EXPERTS)[None, :], order, LOWEST)
    sums = sum_MPKE + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 2 * EXPERTS + e
    tl.store(sums, tl.sum(probability, 0), mask=e < EXPERTS)
    for c in tl.static_range(CHOICES):
        is_best = order == tl.max(order, 1)[:, None]
        expert = tl.min(tl.where(is_best, e[None, :], EXPERTS - 1), 1)
        is_chosen = e[None, :] == expert[:, None]
        order = tl.where(is_chosen, LOWEST, order)
        chosen = tl.sum(tl.where(is_chosen, logit if RENORMALIZED else probability, 0.0), 1)
        tl.store(expert_NC + n * CHOICES + c, expert, mask=exists)
        tl.store(chosen_NC + n * CHOICES + c, chosen, mask=exists)
        if c == 0:
            firsts = tl.sum(tl.where(is_chosen & exists[:, None], 1.0, 0.0), 0)
            tl.store(sums + EXPERTS, firsts, mask=e < EXPERTS)
    top_bits = tl.max(probability, 1).to(tl.int32, bitcast=True) & LARGEST
    claim = (tl.program_id(1).to(tl.int64) << 32) + (top_bits ^ LARGEST).to(tl.int64)
    tl.store(claim_N + n, claim, mask=exists)


@triton.jit(do_not_specialize=["num_tokens", "blocks"])
def average_balance(
    sum_MPKE, rows_M, weight_M, loss, d_probability_ME, num_tokens, blocks,
    MICRO_BATCHES: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the balance loss and its gradient in the probabilities of each micro-batch's tokens.

    One program adds the blocks of :func:`choose_experts`.
    """
    e = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for m in range(MICRO_BATCHES):
        probability = tl.zeros([BLOCK], tl.float32)
        firsts = tl.zeros([BLOCK], tl.float32)
        for start in range(0, blocks, ROWS):
            p = start + tl.arange(0, ROWS)
            mask = (p < blocks)[:, None] & (e < EXPERTS)[None, :]
            place = sum_MPKE + (m * blocks + p)[:, None] * 2 * EXPERTS + e[None, :]
            probability += tl.sum(tl.load(place, mask=mask, other=0.0), 0)
            firsts += tl.sum(tl.load(place + EXPERTS, mask=mask, other=0.0), 0)
        _, rows = micro_batch(rows_M, num_tokens, m, MICRO_BATCHES)
        rows = tl.maximum(rows, 1).to(tl.float32)
        gradient = firsts / rows * (EXPERTS / rows)
        if weight_M is not None:
            gradient *= tl.load(weight_M + m)
        tl.store(d_probability_ME + m * EXPERTS + e, gradient, mask=e < EXPERTS)
        total += gradient * probability
    tl.store(loss, tl.sum(total, 0))


@triton.jit(do_not_specialize=["num_tokens"])
def choose_experts_backward(
    probability_NE, expert_NC, rows_M, d_probability_ME, d_chosen_NC, d_loss, d_logits_NE,
    num_tokens,
    RENORMALIZED: tl.constexpr, MICRO_BATCHES: tl.constexpr, EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of logits from the gradients of chosen values and of the balance loss."""
    n, exists = block_of_tokens(rows_M, num_tokens, MICRO_BATCHES, TOKENS)
    e = tl.arange(0, BLOCK)
    mask = exists[:, None] & (e < EXPERTS)[None, :]
    place = n[:, None] * EXPERTS + e[None, :]
    probability = tl.load(probability_NE + place, mask=mask, other=0.0)
    d_probability = tl.zeros([TOKENS, BLOCK], tl.float32)
    if d_loss is not None:
        row = d_probability_ME + tl.program_id(1) * EXPERTS + e
        d_probability += (tl.load(row, mask=e < EXPERTS, other=0.0) * tl.load(d_loss))[None, :]
    d_chosen = tl.zeros([TOKENS, BLOCK], tl.float32)
    if d_chosen_NC is not None:
        for c in tl.static_range(CHOICES):
            expert = tl.load(expert_NC + n * CHOICES + c, mask=exists, other=0)
            value = tl.load(d_chosen_NC + n * CHOICES + c, mask=exists, other=0.0)
            d_chosen += tl.where(e[None, :] == expert[:, None], value[:, None], 0.0)
    if not RENORMALIZED:
        d_probability += d_chosen
    d_logit = probability * (d_probability - tl.sum(probability * d_probability, 1)[:, None])
    if RENORMALIZED:
        d_logit += d_chosen
    tl.store(d_logits_NE + place, d_logit, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def kept_softmax(
    logits_NC, is_dropped_NC, weight_NC, num_tokens,
    CHOICES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the softmax over a token's routes that were not dropped, and 0 for the others."""
    n = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.arange(0, BLOCK)
    mask = (n < num_tokens)[:, None] & (c < CHOICES)[None, :]
    place = n[:, None] * CHOICES + c[None, :]
    is_kept = mask & (tl.load(is_dropped_NC + place, mask=mask, other=1) == 0)
    logit = tl.load(logits_NC + place, mask=is_kept, other=float("-inf"))
    exponential = tl.exp(logit - tl.max(logit, 1)[:, None])
    exponential = tl.where(is_kept, exponential, 0.0)
    weight = tl.where(is_kept, exponential / tl.sum(exponential, 1)[:, None], 0.0)
    tl.store(weight_NC + place, weight, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def order_claims(
    claim_N, rows_M, order_N, num_tokens,
    MICRO_BATCHES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write tokens by ascending claims, or by position if these are equal, of each micro-batch.

    Each token counts the tokens of its micro-batch that come before it. This is one launch, where a
    sort of a few thousand tokens is several.
    """
    first, rows = micro_batch(rows_M, num_tokens, tl.program_id(1), MICRO_BATCHES)
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # The micro-batch, which these tokens share, makes room for their positions, which differ: one
    # comparison of 64 bits takes fewer instructions than several of 32 bits.
    claim = (tl.load(claim_N + first + i, mask=i < rows, other=0) << 32) + i
    before = tl.zeros([TOKENS, BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        j = start + tl.arange(0, BLOCK)
        other = (tl.load(claim_N + first + j, mask=j < rows, other=LARGEST) << 32) + j
        before += (other[None, :] < claim[:, None]).to(tl.int32)
    place = tl.sum(before, 1)
    tl.store(order_N + first + place, first + i, mask=i < rows)


@triton.jit
def tokens_in_order(order_N, n, exists):
    """Return the tokens at places n of the order in which they claim rows."""
    return n if order_N is None else tl.load(order_N + n, mask=exists, other=0)


@triton.jit(do_not_specialize=["num_tokens", "length"])
def count_routes(
    expert_NC, order_N, rows_M, count_EX, num_tokens, length,
    MICRO_BATCHES: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the routes of each expert in a block of tokens; X is (M, C, P) and one more value."""
    n, exists = block_of_tokens(rows_M, num_tokens, MICRO_BATCHES, TOKENS)
    token = tokens_in_order(order_N, n, exists)
    e = tl.arange(0, BLOCK)
    for c in tl.static_range(CHOICES):
        expert = tl.load(expert_NC + token * CHOICES + c, mask=exists, other=EXPERTS)
        count = tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
        x = (tl.program_id(1) * CHOICES + c) * tl.num_programs(0) + tl.program_id(0)
        tl.store(count_EX + e * (length + 1) + x, count, mask=e < EXPERTS)


@triton.jit(do_not_specialize=["length"])
def sum_before(count_EX, length, BLOCK: tl.constexpr):
    """Replace an expert's counts by the sums of those before them, and append their sum."""
    row = count_EX + tl.program_id(0) * (length + 1)
    before = 0
    for start in range(0, length, BLOCK):
        x = start + tl.arange(0, BLOCK)
        count = tl.load(row + x, mask=x < length, other=0)
        tl.store(row + x, before + tl.cumsum(count, 0) - count, mask=x < length)
        before += tl.sum(count, 0)
    tl.store(row + length, before)


@triton.jit(do_not_specialize=["num_tokens", "length"])
def place_routes(
    expert_NC, order_N, rows_M, capacity_M, count_EX, route_R, token_R, expert_R, row_NC,
    is_dropped_NC, bound_E, count_KE, num_tokens, length,
    MICRO_BATCHES: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the row of each route, from the numbers of routes in blocks before its own.

    With ``count_KE``, which gets kept and routed routes per expert, dropped routes follow all kept
    routes in the same order, and have no row: theirs is the number of kept routes.
    """
    n, exists = block_of_tokens(rows_M, num_tokens, MICRO_BATCHES, TOKENS)
    token = tokens_in_order(order_N, n, exists)
    e = tl.arange(0, BLOCK)
    of_expert = count_EX + e * (length + 1)
    of_micro_batch = CHOICES * tl.num_programs(0)
    total = tl.load(of_expert + length, mask=e < EXPERTS, other=0)
    stop = tl.cumsum(total, 0)
    is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    kept = tl.zeros([BLOCK], tl.int32)
    kept_ahead = tl.zeros([BLOCK], tl.int32)  # in micro-batches before this one
    if count_KE is not None:
        for m in range(MICRO_BATCHES):
            part = of_expert + m * of_micro_batch
            begin = tl.load(part, mask=e < EXPERTS, other=0)
            end = tl.load(part + of_micro_batch, mask=e < EXPERTS, other=0)
            served = tl.minimum(end - begin, tl.load(capacity_M + m).to(tl.int32))
            kept += served
            kept_ahead += tl.where(m < tl.program_id(1), served, 0)
        kept_ahead += tl.cumsum(kept, 0) - kept
        if is_first:
            tl.store(count_KE + e, kept, mask=e < EXPERTS)
            tl.store(count_KE + EXPERTS + e, total, mask=e < EXPERTS)
    elif is_first:
        tl.store(bound_E + e, stop - total, mask=e < EXPERTS)
        tl.store(bound_E + e + 1, stop, mask=e == EXPERTS - 1)
    num_kept = tl.sum(kept, 0)
    for c in tl.static_range(CHOICES):
        route = token * CHOICES + c
        expert = tl.load(expert_NC + route, mask=exists, other=EXPERTS)
        is_of = (expert[:, None] == e[None, :]).to(tl.int32)
        # In the expert's rows: the place of the block's first route, then of each.
        x = (tl.program_id(1) * CHOICES + c) * tl.num_programs(0) + tl.program_id(0)
        first = tl.load(of_expert + x, mask=e < EXPERTS, other=0)
        place = first[None, :] + tl.cumsum(is_of, 0) - 1
        row = tl.sum(is_of * ((stop - total)[None, :] + place), 1)
        if capacity_M is not None:
            capacity = tl.load(capacity_M + tl.program_id(1)).to(tl.int32)
            x = tl.program_id(1) * of_micro_batch
            start = tl.load(of_expert + x, mask=e < EXPERTS, other=0)
            ahead = tl.sum(is_of * (place - start[None, :]), 1)
            tl.store(is_dropped_NC + route, ahead >= capacity, mask=exists)
            if count_KE is not None:
                before = tl.sum(is_of * kept_ahead[None, :], 1) + tl.minimum(ahead, capacity)
                row = tl.where(ahead >= capacity, num_kept + row - before, before)
        if count_KE is not None:
            tl.store(row_NC + route, tl.minimum(row, num_kept), mask=exists)
        else:
            tl.store(row_NC + route, row, mask=exists)
            tl.store(expert_R + row, expert, mask=exists)
        tl.store(route_R + row, route, mask=exists)
        tl.store(token_R + row, token, mask=exists)


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

    With ReLU, whose results are ``y_RW``, the gradients of its inputs overwrite them before.
    """
    expert = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(bound_E + expert).to(tl.int64)
    last = tl.load(bound_E + expert + 1).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], tl.float32)  # a sum over rows in each turn would wait for warps
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < last)[:, None] & (column < WIDTH)[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        gradient = tl.load(d_y_RW + place, mask=mask, other=0.0)
        if RELU:
            result = tl.load(y_RW + place, mask=mask, other=0.0)
            gradient = tl.where(result <= 0, 0.0, gradient)
            tl.store(d_y_RW + place, gradient, mask=mask)
        total += gradient.to(tl.float32)
    at = sum_EW + expert.to(tl.int64) * WIDTH + column
    tl.store(at, tl.sum(total, 0).to(sum_EW.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def combine_rows(
    y_RW, weight_NC, row_NC, sum_NW, num_rows,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the rows of a token, weighted if there are weights; a token per program.

    Routes without a row have the number of rows, and add nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        route = token * CHOICES + choice
        row = tl.load(row_NC + route).to(tl.int64)
        mask = column < tl.where(row < num_rows, WIDTH, 0)
        value = tl.load(y_RW + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        if weight_NC is not None:
            value *= tl.load(weight_NC + route).to(tl.float32)
        total += value
    place = sum_NW + token * WIDTH + column
    tl.store(place, total.to(sum_NW.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def combine_rows_backward(
    d_sum_NW, y_RW, weight_NC, row_NC, d_y_RW, d_weight_NC, num_rows,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a token's rows and weights; a token per program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    given = d_sum_NW + token * WIDTH + column
    d_sum = tl.load(given, mask=column < WIDTH, other=0.0).to(tl.float32)
    for choice in tl.static_range(CHOICES):
        route = token * CHOICES + choice
        row = tl.load(row_NC + route).to(tl.int64)
        place = row * WIDTH + column
        mask = column < tl.where(row < num_rows, WIDTH, 0)
        value = tl.load(y_RW + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_weight_NC + route, tl.sum(d_sum * value, 0))
        d_y = d_sum * tl.load(weight_NC + route).to(tl.float32)
        tl.store(d_y_RW + place, d_y.to(d_y_RW.dtype.element_ty), mask=mask)
