"""Fused kernels of a training pass, in Triton.

:func:`pipeline.kernels.launching.launch` loads this module and launches its functions. They read
and write 16-bit or float32 values and compute in float32. No kernel uses atomics, so results do not
depend on the order in which programs run. An argument that is None leaves its part out.

- Offsets that grow with the number of rows have 64 bits.
- Numbers that change between calls are listed in ``do_not_specialize``: otherwise Triton compiles a
  second kernel for 1 and a third for multiples of 16.
- Hints to the compiler are the alignments of pointers and strides, which it sees by itself.

Legend: N tokens (rows); P programs that share the rows; B sentences, M key tokens, K head width.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Start of a maximum: finite, as the difference of two infinities is not a number."""
NOTHING = tl.constexpr(float("-inf"))
"""Logit of a column that there is not."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def mix(bits):
    """Return a one-to-one hash of 32 bits (lowbias32), as in :mod:`pipeline.kernels.noise`."""
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def key_of(seed, site, row):
    """Return the part of the random bits that a row shares."""
    return mix(
        mix(seed.to(tl.uint32) + site.to(tl.uint32) * 0x1B873593) ^ (row.to(tl.uint32) * 0x85EBCA6B)
    )


@triton.jit
def is_kept(key, column, threshold):
    """Return whether dropout keeps values; the threshold is an int32 with the bits of a uint32."""
    return mix(key ^ (column.to(tl.uint32) * 0xC2B2AE35)) >= threshold.to(tl.uint32)


@triton.jit(do_not_specialize=["site", "threshold"])
def residual_forward(
    y, x, bias, weight, shift, seed_N, row_N, total, normed, mean_N, deviation_N,
    site, threshold, scale, epsilon,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write x + dropout(y + bias) and its norm, one row per program.

    ``deviation_N`` gets the reciprocals of the standard deviations.
    """
    n = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < WIDTH
    offset = n * WIDTH + column
    value = tl.load(y + offset, mask=is_inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=is_inside, other=0.0).to(tl.float32)
    if seed_N is not None:
        key = key_of(tl.load(seed_N + n), site, tl.load(row_N + n))
        value = tl.where(is_kept(key, column, threshold), value * scale, 0.0)
    if x is not None:
        value += tl.load(x + offset, mask=is_inside, other=0.0).to(tl.float32)
    # The norm sees the sum as the backward pass will, which reads it rounded.
    value = value.to(y.dtype.element_ty).to(tl.float32)
    if total is not None:
        tl.store(total + offset, value.to(total.dtype.element_ty), mask=is_inside)
    if normed is not None:
        value = tl.where(is_inside, value, 0.0)
        mean = tl.sum(value, 0) / WIDTH
        centered = tl.where(is_inside, value - mean, 0.0)
        deviation = 1.0 / tl.sqrt(tl.sum(centered * centered, 0) / WIDTH + epsilon)
        gain = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
        result = centered * deviation * gain
        result += tl.load(shift + column, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(normed + offset, result.to(normed.dtype.element_ty), mask=is_inside)
        if mean_N is not None:
            tl.store(mean_N + n, mean)
            tl.store(deviation_N + n, deviation)


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def residual_backward(
    sums, d_total, d_normed, total, weight, mean_N, deviation_N, seed_N, row_N, dx, dy,
    rows, site, threshold, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SUMS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and y, and sums over the rows of a program.

    ``sums`` is (3, P, WIDTH) for the gradients of the norm's weight and shift and of the bias.
    ``dx`` is None without a norm: it equals ``d_total``. ``dy`` is None without dropout: it equals
    the gradient of x.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    is_inside = column < WIDTH
    weight_sum = tl.zeros([BLOCK], tl.float32)
    shift_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    # Neighboring programs read neighboring rows. A bounded number of programs bounds the sums.
    for n in range(program, rows, programs):
        offset = n * WIDTH + column
        gradient = tl.zeros([BLOCK], tl.float32)
        if d_normed is not None:
            d_norm = tl.load(d_normed + offset, mask=is_inside, other=0.0).to(tl.float32)
            value = tl.load(total + offset, mask=is_inside, other=0.0).to(tl.float32)
            deviation = tl.load(deviation_N + n)
            unit = tl.where(is_inside, (value - tl.load(mean_N + n)) * deviation, 0.0)
            gain = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
            scaled = d_norm * gain
            along = (tl.sum(scaled, 0) + unit * tl.sum(scaled * unit, 0)) / WIDTH
            gradient += (scaled - along) * deviation
            weight_sum += d_norm * unit
            shift_sum += d_norm
        if d_total is not None:
            gradient += tl.load(d_total + offset, mask=is_inside, other=0.0).to(tl.float32)
        if dx is not None:
            tl.store(dx + offset, gradient.to(dx.dtype.element_ty), mask=is_inside)
        if dy is not None:
            key = key_of(tl.load(seed_N + n), site, tl.load(row_N + n))
            gradient = tl.where(is_kept(key, column, threshold), gradient * scale, 0.0)
            tl.store(dy + offset, gradient.to(dy.dtype.element_ty), mask=is_inside)
        if SUMS_BIAS:
            bias_sum += gradient
    place = program * WIDTH + column
    part = programs.to(tl.int64) * WIDTH
    if d_normed is not None:
        tl.store(sums + place, weight_sum, mask=is_inside)
        tl.store(sums + part + place, shift_sum, mask=is_inside)
    if SUMS_BIAS:
        tl.store(sums + 2 * part + place, bias_sum, mask=is_inside)


@triton.jit(do_not_specialize=["programs"])
def add_sums(sums, result, programs, WIDTH: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the sums of all programs, (G, P, WIDTH) → (G, WIDTH), in a fixed order."""
    group = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, programs, PART):
        program = first + tl.arange(0, PART)
        offset = (group * programs + program[:, None]) * WIDTH + column[None, :]
        mask = (program < programs)[:, None] & is_inside[None, :]
        total += tl.sum(tl.load(sums + offset, mask=mask, other=0.0), 0)
    place = result + group * WIDTH + column
    tl.store(place, total.to(result.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["rows"])
def activation_backward(
    dy, value, dx, sums, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Write the gradient of an activation's input, and its sums over the rows of a program.

    ``value`` is the output of a ReLU or the input of a GELU; the sums are (P, WIDTH).
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for n in range(program, rows, tl.num_programs(0)):
        offset = n * WIDTH + column
        gradient = tl.load(dy + offset, mask=is_inside, other=0.0).to(tl.float32)
        x = tl.load(value + offset, mask=is_inside, other=0.0).to(tl.float32)
        if ACTIVATION == "relu":
            gradient = tl.where(x > 0, gradient, 0.0)
        else:
            share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
            density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
            gradient *= share + x * density
        tl.store(dx + offset, gradient.to(dx.dtype.element_ty), mask=is_inside)
        total += gradient
    tl.store(sums + program * WIDTH + column, total, mask=is_inside)


@triton.jit
def cross_entropy(
    logits, labels_N, gradient, losses_2N, width, stride, d_stride, smoothing,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the smoothed and the plain loss of a row and, over the logits, its gradient.

    Columns from the vocabulary on are padding: their gradient is 0. ``gradient`` may be ``logits``
    or None. The row is read twice; the second time it comes from the L2 cache, which holds the
    rows of all running programs. Blocks are full, so that loads need no masks, except for the last.
    """
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * stride
    column = tl.arange(0, BLOCK)
    label = tl.load(labels_N + n)
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain_sum = tl.zeros([BLOCK], tl.float32)
    of_label = tl.zeros([BLOCK], tl.float32)
    FULL: tl.constexpr = VOCABULARY // BLOCK * BLOCK
    for first in range(0, FULL, BLOCK):
        x = tl.load(row + first + column).to(tl.float32)
        higher = tl.maximum(peak, x)
        total = total * tl.exp(peak - higher) + tl.exp(x - higher)
        peak = higher
        plain_sum += x
        # Picked out of the block: a load of its own might come after another thread's store.
        of_label += tl.where(first + column == label, x, 0.0)
    is_inside = FULL + column < VOCABULARY
    if FULL < VOCABULARY:
        x = tl.load(row + FULL + column, mask=is_inside, other=0.0).to(tl.float32)
        higher = tl.maximum(peak, x)
        grown = total * tl.exp(peak - higher) + tl.exp(x - higher)
        total = tl.where(is_inside, grown, total)
        peak = tl.where(is_inside, higher, peak)
        plain_sum += x
        of_label += tl.where(FULL + column == label, x, 0.0)
    top = tl.max(peak, 0)
    normalizer = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    plain = normalizer - tl.sum(of_label, 0)
    uniform = normalizer - tl.sum(plain_sum, 0) / VOCABULARY
    # Without smoothing, the mean may be infinite: logits of padding are as low as numbers go.
    smoothed = tl.where(smoothing == 0.0, plain, (1.0 - smoothing) * plain + smoothing * uniform)
    tl.store(losses_2N + n, smoothed)
    tl.store(losses_2N + tl.num_programs(0) + n, plain)
    if gradient is not None:
        d_row = gradient + n * d_stride
        for first in range(0, FULL, BLOCK):
            x = tl.load(row + first + column).to(tl.float32)
            d = tl.exp(x - normalizer) - smoothing / VOCABULARY
            d = tl.where(first + column == label, d - (1.0 - smoothing), d)
            tl.store(d_row + first + column, d.to(gradient.dtype.element_ty))
        for first in range(FULL, width, BLOCK):
            is_real = first + column < VOCABULARY
            x = tl.load(row + first + column, mask=is_real, other=0.0).to(tl.float32)
            d = tl.exp(x - normalizer) - smoothing / VOCABULARY
            d = tl.where(first + column == label, d - (1.0 - smoothing), d)
            d = tl.where(is_real, d, 0.0).to(gradient.dtype.element_ty)
            tl.store(d_row + first + column, d, mask=first + column < width)


@triton.jit
def scale_rows(x, factor, columns, stride, BLOCK: tl.constexpr):
    """Multiply x by a factor on the device; a factor of 1 reads and writes nothing."""
    row = x + tl.program_id(0).to(tl.int64) * stride
    by = tl.load(factor).to(tl.float32)
    for first in range(0, tl.where(by == 1.0, 0, columns), BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(row + column, mask=column < columns).to(tl.float32) * by
        tl.store(row + column, value.to(x.dtype.element_ty), mask=column < columns)


@triton.jit
def head_rows(x, first, stride, head, limit, K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """Return pointers to a tile of one head, (ROWS, BK), and the mask of those that exist."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BK)
    mask = (first + row < limit)[:, None]
    if BK != K:
        mask = mask & (column < K)[None, :]
    start = x + first * stride.to(tl.int64) + head * K
    return start + (row[:, None] * stride + column[None, :]), mask


@triton.jit
def head_tile(x, first, stride, head, limit, K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """Return a tile of one head, (ROWS, BK), with zeros where there is none."""
    tile, mask = head_rows(x, first, stride, head, limit, K, ROWS, BK)
    return tl.load(tile, mask=mask, other=0.0)


@triton.jit
def noise_key(seed_N, row_N, i, exists, site):
    """Return the part of the random bits that the keys of a query share."""
    seed = tl.load(seed_N + i, mask=exists, other=0)
    return key_of(seed, site, tl.load(row_N + i, mask=exists, other=0))


@triton.jit
def keys_of(i, exists, sentence_N, bound_B, key_bound_B, CAUSAL: tl.constexpr):
    """Return the first key of each query's sentence, and the end of the keys that it sees."""
    sentence = tl.load(sentence_N + i, mask=exists, other=0)
    low = tl.load(key_bound_B + sentence, mask=exists, other=0)
    high = tl.load(key_bound_B + sentence + 1, mask=exists, other=0)
    if CAUSAL:
        start = tl.load(bound_B + sentence, mask=exists, other=0)
        high = tl.where(exists, tl.minimum(high, low + i - start + 1), 0)
    return low, high


@triton.jit(do_not_specialize=["queries", "site", "threshold"])
def attention_forward(
    q, k, v, sentence_N, bound_B, key_bound_B, seed_N, row_N, context, normalizer_NH,
    queries, q_stride, k_stride, v_stride, scale, kept_scale, site, threshold,
    HEADS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Write the context of a tile of BN packed queries for one head.

    The tile visits the keys from its first to its last sentence, BM at a time. Normalizers are
    logarithms with base 2.
    """
    head = tl.program_id(1)
    first = tl.program_id(0) * BN
    i = first + tl.arange(0, BN)
    exists = i < queries
    low, high = keys_of(i, exists, sentence_N, bound_B, key_bound_B, CAUSAL)
    start = tl.min(tl.where(exists, low, LARGEST), 0)
    stop = tl.max(high, 0)
    query = head_tile(q, first, q_stride, head, queries, K, BN, BK)
    if seed_N is not None:
        key_N = noise_key(seed_N, row_N, i, exists, site + head)
    peak = tl.full([BN], LOWEST, tl.float32)
    total = tl.zeros([BN], tl.float32)
    result = tl.zeros([BN, BK], tl.float32)
    for m in range(start, stop, BM):
        j = m + tl.arange(0, BM)
        key = head_tile(k, m, k_stride, head, stop, K, BM, BK)
        value = head_tile(v, m, v_stride, head, stop, K, BM, BK)
        is_seen = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
        score = tl.where(is_seen, score, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        shrink = tl.exp2(peak - higher)
        weight = tl.exp2(score - higher[:, None])
        total = total * shrink + tl.sum(weight, 1)
        if seed_N is not None:
            column = j[None, :] - low[:, None]
            weight = tl.where(is_kept(key_N[:, None], column, threshold), weight, 0.0)
        weight = weight.to(value.dtype)
        result = result * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")
        peak = higher
    total = tl.where(total == 0.0, 1.0, total)
    result *= (kept_scale / total)[:, None]
    stride = tl.full([], HEADS * K, tl.int32)
    tile, mask = head_rows(context, first, stride, head, queries, K, BN, BK)
    tl.store(tile, result.to(context.dtype.element_ty), mask=mask)
    tl.store(normalizer_NH + i * HEADS + head, peak + tl.log2(total), mask=exists)


@triton.jit(do_not_specialize=["queries", "site", "threshold"])
def attention_backward_queries(
    q, k, v, sentence_N, bound_B, key_bound_B, seed_N, row_N, context, normalizer_NH, d_context,
    inner_NH, dq, queries, q_stride, k_stride, v_stride, dq_stride, scale, kept_scale, site,
    threshold,
    HEADS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a tile of queries, and each query's context · d_context for the keys.

    It visits the same keys as :func:`attention_forward`.
    """
    head = tl.program_id(1)
    first = tl.program_id(0) * BN
    i = first + tl.arange(0, BN)
    exists = i < queries
    low, high = keys_of(i, exists, sentence_N, bound_B, key_bound_B, CAUSAL)
    start = tl.min(tl.where(exists, low, LARGEST), 0)
    stop = tl.max(high, 0)
    stride = tl.full([], HEADS * K, tl.int32)
    query = head_tile(q, first, q_stride, head, queries, K, BN, BK)
    result = head_tile(context, first, stride, head, queries, K, BN, BK)
    d_result = head_tile(d_context, first, stride, head, queries, K, BN, BK)
    inner = tl.sum(d_result.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(inner_NH + i * HEADS + head, inner, mask=exists)
    normalizer = tl.load(normalizer_NH + i * HEADS + head, mask=exists, other=0.0)
    if seed_N is not None:
        key_N = noise_key(seed_N, row_N, i, exists, site + head)
    gradient = tl.zeros([BN, BK], tl.float32)
    for m in range(start, stop, BM):
        j = m + tl.arange(0, BM)
        key = head_tile(k, m, k_stride, head, stop, K, BM, BK)
        value = head_tile(v, m, v_stride, head, stop, K, BM, BK)
        is_seen = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
        weight = tl.where(is_seen, tl.exp2(score - normalizer[:, None]), 0.0)
        d_weight = tl.dot(d_result, tl.trans(value), input_precision="ieee") * kept_scale
        if seed_N is not None:
            column = j[None, :] - low[:, None]
            d_weight = tl.where(is_kept(key_N[:, None], column, threshold), d_weight, 0.0)
        d_score = weight * (d_weight - inner[:, None])
        gradient += tl.dot(d_score.to(key.dtype), key, input_precision="ieee")
    tile, mask = head_rows(dq, first, dq_stride, head, queries, K, BN, BK)
    tl.store(tile, (gradient * scale).to(dq.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["keys", "site", "threshold"])
def attention_backward_keys(
    q, k, v, sentence_M, bound_B, key_bound_B, seed_N, row_N, normalizer_NH, d_context, inner_NH,
    dk, dv, keys, q_stride, k_stride, v_stride, dk_stride, dv_stride, scale, kept_scale, site,
    threshold,
    HEADS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of BM keys and values, from the queries that see them."""
    head = tl.program_id(1)
    first = tl.program_id(0) * BM
    j = first + tl.arange(0, BM)
    exists = j < keys
    sentence = tl.load(sentence_M + j, mask=exists, other=0)
    key_start = tl.load(key_bound_B + sentence, mask=exists, other=0)
    # The queries that see a key, from low to high.
    low = tl.load(bound_B + sentence, mask=exists, other=0)
    high = tl.load(bound_B + sentence + 1, mask=exists, other=0)
    if CAUSAL:
        low += j - key_start
    start = tl.min(tl.where(exists, low, LARGEST), 0)
    stop = tl.max(high, 0)
    stride = tl.full([], HEADS * K, tl.int32)
    key = head_tile(k, first, k_stride, head, keys, K, BM, BK)
    value = head_tile(v, first, v_stride, head, keys, K, BM, BK)
    d_key = tl.zeros([BM, BK], tl.float32)
    d_value = tl.zeros([BM, BK], tl.float32)
    column = j - key_start
    for n in range(start, stop, BN):
        i = n + tl.arange(0, BN)
        is_query = i < stop
        query = head_tile(q, n, q_stride, head, stop, K, BN, BK)
        d_result = head_tile(d_context, n, stride, head, stop, K, BN, BK)
        normalizer = tl.load(normalizer_NH + i * HEADS + head, mask=is_query, other=0.0)
        inner = tl.load(inner_NH + i * HEADS + head, mask=is_query, other=0.0)
        # Scores are transposed, keys by queries, so that products take them out of registers.
        is_seen = (i[None, :] >= low[:, None]) & (i[None, :] < high[:, None])
        score = tl.dot(key, tl.trans(query), input_precision="ieee") * (scale * LOG2_E)
        weight = tl.where(is_seen, tl.exp2(score - normalizer[None, :]), 0.0)
        used = weight
        if seed_N is not None:
            key_N = noise_key(seed_N, row_N, i, is_query, site + head)
            kept = is_kept(key_N[None, :], column[:, None], threshold)
            used = tl.where(kept, weight, 0.0)
        d_value += tl.dot(used.to(d_result.dtype), d_result, input_precision="ieee")
        d_weight = tl.dot(value, tl.trans(d_result), input_precision="ieee") * kept_scale
        if seed_N is not None:
            d_weight = tl.where(kept, d_weight, 0.0)
        d_score = weight * (d_weight - inner[None, :])
        d_key += tl.dot(d_score.to(query.dtype), query, input_precision="ieee")
    dk_tile, mask = head_rows(dk, first, dk_stride, head, keys, K, BM, BK)
    dv_tile, mask = head_rows(dv, first, dv_stride, head, keys, K, BM, BK)
    tl.store(dk_tile, (d_key * scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv_tile, (d_value * kept_scale).to(dv.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["columns", "excluded"])
def best_of_parts(
    logits, best_RP, peak_RP, total_RP, columns, stride, excluded, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the best logit of a part of a row, and what the normalizer needs.

    ``excluded`` is a column that only the normalizer counts.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = logits_of(logits + row * stride, column, columns, stride)
    peak = tl.max(x, 0)
    part = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peak_RP + part, peak)
    tl.store(total_RP + part, tl.sum(tl.exp(x - tl.where(peak == NOTHING, 0.0, peak)), 0))
    tl.store(best_RP + part, tl.max(tl.where(column == excluded, NOTHING, x), 0))


@triton.jit
def logits_of(row, column, columns, stride):
    """Return the logits of some columns of a row, in float32; -inf behind the last one."""
    # What lies between the columns and the next row is read, too, as aligned accesses are wide.
    x = tl.load(row + column, mask=column < stride, other=NOTHING).to(tl.float32)
    return tl.where(column < columns, x, NOTHING)


@triton.jit(do_not_specialize=["parts", "columns", "excluded"])
def best_of_rows(
    logits, best_RP, peak_RP, total_RP, best_RC, column_RC, normalizer_R,
    parts, columns, stride, excluded,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the best logits of a row, their columns, and log Σ e^x.

    The ``WIDTH`` best are in as many parts with the best maxima. Of equal logits, and of parts with
    equal maxima, the first is the better one.
    """
    row = tl.program_id(0).to(tl.int64)
    p, i = tl.arange(0, PARTS), tl.arange(0, CHOSEN)
    peak = tl.load(peak_RP + row * parts + p, mask=p < parts, other=NOTHING)
    total = tl.load(total_RP + row * parts + p, mask=p < parts, other=0.0)
    top = tl.max(peak, 0)
    total = tl.sum(tl.where(p < parts, total * tl.exp(peak - top), 0.0), 0)
    tl.store(normalizer_R + row, top + tl.log(total))
    best_P = tl.load(best_RP + row * parts + p, mask=p < parts, other=NOTHING)
    is_left, chosen = p < parts, tl.full([CHOSEN], PARTS, tl.int32)
    for c in tl.static_range(WIDTH):
        best = tl.max(tl.where(is_left, best_P, NOTHING), 0)
        place = tl.min(tl.where(is_left & (best_P == best), p, PARTS), 0)
        chosen = tl.where(i == c, place, chosen)
        is_left = is_left & (p != place)
    # A part that there is not lies behind the last column.
    column = chosen[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = logits_of(logits + row * stride, column, columns, stride)
    x = tl.where(column == excluded, NOTHING, x)
    for c in tl.static_range(WIDTH):
        best = tl.max(tl.max(x, 1), 0)
        place = tl.min(tl.min(tl.where(x == best, column, columns - 1), 1), 0)
        tl.store(best_RC + row * WIDTH + c, best)
        tl.store(column_RC + row * WIDTH + c, place)
        x = tl.where(column == place, NOTHING, x)


@triton.jit(do_not_specialize=["entries", "b_stride", "j_stride"])
def list_seen(
    is_seen_BJS, made, entry_BS, number_B, entries, b_stride, j_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the entries that any row of a sentence sees, in order, and their number."""
    b = tl.program_id(0).to(tl.int64)
    stop, number = tl.load(made).to(tl.int32), 0
    for first in range(0, stop, BLOCK):
        s = first + tl.arange(0, BLOCK)
        is_seen = tl.zeros([BLOCK], tl.int32)
        for j in tl.static_range(ROWS):
            row = is_seen_BJS + b * b_stride + j * j_stride
            is_seen |= (tl.load(row + s, mask=s < stop, other=0) != 0).to(tl.int32)
        place = number + tl.cumsum(is_seen, 0) - 1
        tl.store(entry_BS + b * entries + place, s, mask=is_seen != 0)
        number += tl.sum(is_seen, 0)
    tl.store(number_B + b, number)


@triton.jit(do_not_specialize=["b_stride", "j_stride"])
def attend_step(
    query_RD, new_key_RD, new_value_RD, key_BHSK, value_BHSK, is_seen_BJS,
    made, entry_BS, number_B, context_RD,
    entries, q_stride, k_stride, v_stride, b_stride, j_stride, scale,
    ROWS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr,
    BJ: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Write the contexts of a sentence's rows for one head, over cached keys and values.

    New keys and values, one of each row, are the last of ``made`` entries; they are stored first.
    A sentence's entries are the first ``number_B``, of a list if there is one.
    """
    sentence, head = tl.program_id(0), tl.program_id(1)
    j, k, s = tl.arange(0, BJ), tl.arange(0, BK), tl.arange(0, BS)
    is_row = (j < ROWS)[:, None] & (k < K)[None, :]
    row = (sentence * ROWS + j)[:, None].to(tl.int64)
    column = head * K + k[None, :]
    query = tl.load(query_RD + row * q_stride + column, mask=is_row, other=0.0)
    grid = (sentence * HEADS + head).to(tl.int64) * entries * K
    if new_key_RD is not None:
        new_place = grid + (tl.load(made).to(tl.int32) - ROWS + j)[:, None] * K + k[None, :]
        new_key = tl.load(new_key_RD + row * k_stride + column, mask=is_row, other=0.0)
        new_value = tl.load(new_value_RD + row * v_stride + column, mask=is_row, other=0.0)
        tl.store(key_BHSK + new_place, new_key, mask=is_row)
        tl.store(value_BHSK + new_place, new_value, mask=is_row)
        tl.debug_barrier()  # threads read what others have stored
    stop = tl.load(number_B + sentence)
    peak = tl.full([BJ], LOWEST, tl.float32)
    total = tl.zeros([BJ], tl.float32)
    result = tl.zeros([BJ, BK], tl.float32)
    for first in range(0, stop, BS):
        exists = first + s < stop
        entry = first + s
        if entry_BS is not None:
            listed = entry_BS + sentence.to(tl.int64) * entries
            entry = tl.load(listed + entry, mask=exists, other=0)
        place = grid + entry[:, None] * K + k[None, :]
        mask = exists[:, None] & (k < K)[None, :]
        key = tl.load(key_BHSK + place, mask=mask, other=0.0)
        value = tl.load(value_BHSK + place, mask=mask, other=0.0)
        is_seen = (j < ROWS)[:, None] & exists[None, :]
        if is_seen_BJS is not None:
            seen = is_seen_BJS + sentence.to(tl.int64) * b_stride + j[:, None] * j_stride
            is_seen = tl.load(seen + entry[None, :], mask=is_seen, other=0) != 0
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
        score = tl.where(is_seen, score, LOWEST)
        higher = tl.maximum(peak, tl.max(score, 1))
        shrink = tl.exp2(peak - higher)
        weight = tl.where(is_seen, tl.exp2(score - higher[:, None]), 0.0)
        total = total * shrink + tl.sum(weight, 1)
        weight = weight.to(value.dtype)
        result = result * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")
        peak = higher
    total = tl.where(total == 0.0, 1.0, total)
    result = (result / total[:, None]).to(context_RD.dtype.element_ty)
    tl.store(context_RD + row * (HEADS * K) + column, result, mask=is_row)
