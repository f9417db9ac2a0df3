"""The kernels of attention, with dropout or without, as Triton source. Imports `attention_draws` and `kernel` of codegen only.

After Dao et al., FlashAttention (2022) and FlashAttention-2 (2023): scores are computed block by block and never stored, the
softmax's maximum and sum are kept as a block is added, and the backward computes the probabilities again from each row's sum.
What drops is drawn once, by a kernel of its own, as one bit for each score: random numbers are most of the work that libraries do
in such kernels, in the forward and again in the backward.
"""

from __future__ import annotations

import re

from codegen.attention_draws import HEAD, PRECISION
from codegen.kernel import WAIT

_TILE = '''@triton.jit
def _tile(base, row, stride, ROWS: tl.constexpr, D: tl.constexpr):
    return base + ((row + tl.arange(0, ROWS))[:, None] * stride + tl.arange(0, D)[None, :])


'''

_SHARE = f'''@triton.jit
def _kept(p):
    return ((1.0 - p) * {1 << PRECISION}.0 + 0.5).to(tl.int32).to(tl.float32) * {2.0 ** -PRECISION!r}


@triton.jit
def _inverse(kept):
    return tl.where(kept == 0, 0.0, 1.0 / kept)


'''

_WORDS_BY_QUERY = '''@triton.jit
def _words(words, row, column, queries, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    m = row + tl.arange(0, ROWS)
    n = column // 32 + tl.arange(0, COLUMNS // 32)
    return tl.load(words + (n[None, :] * queries + m[:, None]))


'''

_DROP_BY_QUERY = _WORDS_BY_QUERY + '''@triton.jit
def _drop(x, words, row, column, queries, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    word = _words(words, row, column, queries, ROWS, COLUMNS)
    word = tl.reshape(tl.broadcast_to(word[:, :, None], (ROWS, COLUMNS // 32, 32)), (ROWS, COLUMNS))
    at = (tl.arange(0, COLUMNS) & 31)[None, :]
    return tl.where(((word >> (at & 7)) & (1 << (at & 24))) != 0, x, 0.0)


'''

_DROP_HALVES = _WORDS_BY_QUERY + '''@triton.jit
def _drop(x, words, row, column, queries, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    word = _words(words, row, column, queries, ROWS, COLUMNS)[:, :, None, None] << (7 - tl.arange(0, 8))[None, None, None, :]
    word = tl.reshape(tl.broadcast_to(word, (ROWS, COLUMNS // 32, 4, 8)), (ROWS, COLUMNS))
    byte = (tl.arange(0, 4) * 0x1111 + 0xcc88)[None, None, :, None]
    byte = tl.reshape(tl.broadcast_to(byte, (ROWS, COLUMNS // 32, 4, 8)), (ROWS, COLUMNS))
    return tl.inline_asm_elementwise("{ .reg .b32 m; prmt.b32 m, $2, $3, $4; and.b32 $0, $1, m; }", "=r,r,r,r,r,r",
                                     [x, word, byte], x.dtype, True, 2)


'''
"""Drops numbers of 16 bits, two in a register: one instruction makes both masks, of the signs of bytes that a number's bit leads.
A choice between each number and 0 takes four times as many: the compiler takes the halves apart for it."""

_DROP_BY_KEY = '''@triton.jit
def _drop(x, words, row, column, queries, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    m = row + tl.arange(0, ROWS)
    n = column // 32 + tl.arange(0, COLUMNS // 32)
    word = tl.load(words + (n[:, None] * queries + m[None, :]))
    word = tl.reshape(tl.broadcast_to(word[:, None, :], (COLUMNS // 32, 32, ROWS)), (COLUMNS, ROWS))
    at = (tl.arange(0, COLUMNS) & 31)[:, None]
    return tl.where(((word >> (at & 7)) & (1 << (at & 24))) != 0, x, 0.0)


'''

_ENTRY = '''@triton.jit
def {name}({parameters}, B0: tl.constexpr, B1: tl.constexpr,
           D: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr):
    ''' + WAIT + '''
    block = tl.program_id(0) // group
'''
"""How the kernels that attend begin: several heads' programs lie side by side."""

_BY_ROWS = _ENTRY + '''    block = queries // B0 - 1 - block if CAUSAL else block
    head = tl.program_id(1) * group + tl.program_id(0) % group
    row = block * B0
    b = (head // heads).to(tl.int64)
    h = head % heads
    factor = {scale} * 1.4426950408889634
    k += b * kb + h * kh
    v += b * vb + h * vh
    words += head.to(tl.int64) * (queries * (keys // 32))
    tile = tl.load(_tile(q + b * qb + h * qh, row, qt, B0, D))
'''
"""For a block of queries of one head. Of causal attention the longest blocks go first."""

FORWARD = HEAD + _TILE + _SHARE + _DROP_HALVES + '''@triton.jit
def _add(acc, total, top, q, k, v, words, row, column, kt, vt, queries, factor, B0: tl.constexpr, B1: tl.constexpr,
         D: tl.constexpr, MASKED: tl.constexpr):
    scores = tl.dot(q, tl.trans(tl.load(_tile(k, column, kt, B1, D))))
    values = tl.load(_tile(v, column, vt, B1, D))
    if MASKED:
        scores = tl.where((row + tl.arange(0, B0))[:, None] >= (column + tl.arange(0, B1))[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * factor)
    p = tl.exp2(scores * factor - higher[:, None])
    shrunk = tl.exp2(top - higher)
    total = total * shrunk + tl.sum(p, 1)
    p = _drop(p.to(values.dtype), words, row, column, queries, B0, B1)
    return tl.dot(p, values, acc * shrunk[:, None]), total, higher


''' + _BY_ROWS + '''    acc = tl.full([B0, D], 0.0, tl.float32)
    total = tl.full([B0], 0.0, tl.float32)
    top = tl.full([B0], float("-inf"), tl.float32)
    whole = row // B1 * B1 if CAUSAL else keys
    for column in tl.range(0, whole, B1, num_stages=STAGES):
        acc, total, top = _add(acc, total, top, tile, k, v, words, row, column, kt, vt, queries, factor, B0, B1, D, False)
    if CAUSAL:
        for column in tl.range(whole, row + B0, B1, num_stages=STAGES):
            acc, total, top = _add(acc, total, top, tile, k, v, words, row, column, kt, vt, queries, factor, B0, B1, D, True)
    tl.store(sums + head.to(tl.int64) * queries + row + tl.arange(0, B0), top + tl.log2(total))
    acc = acc * (_inverse(_kept(p)) / total)[:, None]
    tl.store(_tile(out + b * ob + h * oh, row, ot, B0, D), acc.to(out.dtype.element_ty))
'''
"""``sums``: log2 of each row's sum of exponentials, [batch * heads, queries]."""

QUERIES = HEAD + _TILE + _SHARE + _DROP_BY_QUERY + '''@triton.jit
def _add(acc, q, g, top, delta, k, v, words, row, column, kt, vt, queries, factor, B0: tl.constexpr, B1: tl.constexpr,
         D: tl.constexpr, MASKED: tl.constexpr):
    keys = tl.load(_tile(k, column, kt, B1, D))
    values = tl.load(_tile(v, column, vt, B1, D))
    p = tl.exp2(tl.dot(q, tl.trans(keys)) * factor - top[:, None])
    if MASKED:
        p = tl.where((row + tl.arange(0, B0))[:, None] >= (column + tl.arange(0, B1))[None, :], p, 0.0)
    kept = _drop(p, words, row, column, queries, B0, B1)
    grown = kept * tl.dot(g, tl.trans(values)) - p * delta[:, None]
    return tl.dot(grown.to(keys.dtype), keys, acc)


''' + _BY_ROWS + '''    share = _kept(p)
    g = tl.load(_tile(grad + b * gb + h * gh, row, gt, B0, D))
    made = tl.load(_tile(out + b * ob + h * oh, row, ot, B0, D))
    rows = head.to(tl.int64) * queries + row + tl.arange(0, B0)
    delta = tl.sum(made.to(tl.float32) * g.to(tl.float32), 1) * share
    top = tl.load(sums + rows)
    tl.store(common + rows[:, None] * 2 + tl.arange(0, 2)[None, :], tl.join(top, delta))
    acc = tl.full([B0, D], 0.0, tl.float32)
    whole = row // B1 * B1 if CAUSAL else keys
    for column in tl.range(0, whole, B1, num_stages=STAGES):
        acc = _add(acc, tile, g, top, delta, k, v, words, row, column, kt, vt, queries, factor, B0, B1, D, False)
    if CAUSAL:
        for column in tl.range(whole, row + B0, B1, num_stages=STAGES):
            acc = _add(acc, tile, g, top, delta, k, v, words, row, column, kt, vt, queries, factor, B0, B1, D, True)
    acc = acc * ({scale} * _inverse(share))
    tl.store(_tile(dq + b * db + h * dh, row, dt, B0, D), acc.to(dq.dtype.element_ty))
'''
"""The gradient of queries; ``common``: of each row what ``sums`` tells, and what gradients of its probabilities have in common,
[batch * heads, queries, 2]."""

KEYS = HEAD + _TILE + _SHARE + _DROP_BY_KEY + '''@triton.jit
def _add(dk, dv, k, v, q, grad, common, words, row, column, qt, gt, queries, factor, B0: tl.constexpr, B1: tl.constexpr,
         D: tl.constexpr, MASKED: tl.constexpr):
    tile = tl.load(_tile(q, row, qt, B0, D))
    g = tl.load(_tile(grad, row, gt, B0, D))
    m = row + tl.arange(0, B0)
    top, delta = tl.split(tl.load(common + m[:, None] * 2 + tl.arange(0, 2)[None, :]))
    scores = tl.dot(k, tl.trans(tile))
    grown = tl.dot(v, tl.trans(g))
    p = tl.exp2(scores * factor - top[None, :])
    if MASKED:
        p = tl.where(m[None, :] >= (column + tl.arange(0, B1))[:, None], p, 0.0)
    kept = _drop(p, words, row, column, queries, B0, B1)
    dv = tl.dot(kept.to(g.dtype), g, dv)
    grown = kept * grown - p * delta[None, :]
    return tl.dot(grown.to(tile.dtype), tile, dk), dv


''' + _ENTRY + '''    head = tl.program_id(1) * group + tl.program_id(0) % group
    column = block * B1
    b = (head // heads).to(tl.int64)
    h = head % heads
    factor = {scale} * 1.4426950408889634
    share = _inverse(_kept(p))
    q += b * qb + h * qh
    grad += b * gb + h * gh
    common += head.to(tl.int64) * (queries * 2)
    words += head.to(tl.int64) * (queries * (keys // 32))
    tile = tl.load(_tile(k + b * kb + h * kh, column, kt, B1, D))
    values = tl.load(_tile(v + b * vb + h * vh, column, vt, B1, D))
    dk_sum = tl.full([B1, D], 0.0, tl.float32)
    dv_sum = tl.full([B1, D], 0.0, tl.float32)
    whole = 0
    tl.assume(queries >= B0)
    if CAUSAL:
        whole = column // B0 * B0
        for turn in tl.range(0, (B1 + B0 - 1) // B0, num_stages=STAGES):
            row = whole + turn * B0
            dk_sum, dv_sum = _add(dk_sum, dv_sum, tile, values, q, grad, common, words, row, column, qt, gt, queries,
                                  factor, B0, B1, D, True)
        whole += (B1 + B0 - 1) // B0 * B0
    for row in tl.range(whole, queries, B0, num_stages=STAGES):
        dk_sum, dv_sum = _add(dk_sum, dv_sum, tile, values, q, grad, common, words, row, column, qt, gt, queries,
                              factor, B0, B1, D, False)
    dk_sum = dk_sum * ({scale} * share)
    tl.store(_tile(dk + b * db + h * dh, column, dt, B1, D), dk_sum.to(dk.dtype.element_ty))
    tl.store(_tile(dv + b * eb + h * eh, column, et, B1, D), (dv_sum * share).to(dv.dtype.element_ty))
'''
"""The gradients of keys and values. The compiler knows that the first loop runs: if it might not, its end would be a place where
sums come from elsewhere, and ptxas would let no two products of the kernel overlap (C7515). Both products of keys and values come
before what needs them, and what a row's numbers have in common lies in pairs: both take fewer instructions."""

_DROPS = (
    (_SHARE, ""),
    (_DROP_BY_QUERY, ""),
    (_DROP_HALVES, ""),
    (_DROP_BY_KEY, ""),
    ("    p = _drop(p.to(values.dtype), words, row, column, queries, B0, B1)\n", ""),
    ("return tl.dot(p, values,", "return tl.dot(p.to(values.dtype), values,"),
    ("    kept = _drop(p, words, row, column, queries, B0, B1)\n", ""),
    ("    words += head.to(tl.int64) * (queries * (keys // 32))\n", ""),
    ("    share = _kept(p)\n", ""),
    ("    share = _inverse(_kept(p))\n", ""),
    ("kept * tl.dot(g, tl.trans(values)) - p * delta[:, None]", "p * (tl.dot(g, tl.trans(values)) - delta[:, None])"),
    ("kept * grown - p * delta[None, :]", "p * (grown - delta[None, :])"),
    ("kept.to(", "p.to("),
    ("_inverse(_kept(p)) / total", "1.0 / total"),
    ("({scale} * _inverse(share))", "{scale}"),
    ("({scale} * share)", "{scale}"),
    ("(dv_sum * share)", "dv_sum"),
    (", 1) * share", ", 1)"),
    (" words,", ""),
    ("vt, queries,", "vt,"),
    ("gt, queries,", "gt,"),
)
"""What a kernel says of dropping, and what it says instead where nothing drops."""


def without_drops(text: str) -> str:
    """The kernel ``text`` for where nothing drops: it takes neither words nor a share."""
    for part, instead in _DROPS:
        text = text.replace(part, instead)
    return text


_SUMS = r"""    {gradient}_low = \2
    tl.store(\1, {gradient}_low)
    place = (b * (tl.num_programs(0) // group) + block) * columns + h * D + tl.arange(0, D)
    total = tl.dot(tl.trans({gradient}_low), tl.full([{rows}, 16], 1.0, {gradient}_low.dtype))
    first = tl.arange(0, 16)[None, :]
    tl.store({gradient}_partial + (place[:, None] + first * 0), total, mask=first == 0)
"""
"""What stands in place of a gradient's last step: each program leaves a row of partial sums, [batch * blocks, columns]. They are
a product with ones, which sums what is rounded in float32: on an H200 that takes half the time of sums of what registers hold,
and less than half of that of loading it again."""

_LOOP = "    whole = row // B1 * B1 if CAUSAL else keys\n"


def with_sums(text: str, gradient: str) -> str:
    """The kernel ``text`` that leaves sums of what it stores as ``gradient`` ("dq"), too. What is said of `KEYS` then holds for
    `QUERIES`, too: the compiler has to know that the loop runs."""
    text = text.replace(_LOOP, "    tl.assume(keys >= B1)\n" + _LOOP)
    lines = _SUMS.replace("{gradient}", gradient).replace("{rows}", "B0" if gradient == "dq" else "B1")
    return re.sub(rf"    tl\.store\((_tile\({gradient} .*?\)), (.*)\)\n", lines, text)
