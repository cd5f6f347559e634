"""The attention kernel in Triton: a query tile over paged keys, for prefill and decode.

    S = cap(Q' K^T * sm_scale * k_global_scale)      -inf where a row does not see a key
    P = exp(S - max)      O = P V * v_global_scale / sum(P)      lse = max + log sum(P)

over tiles of KEYS keys with a running maximum (online softmax, arXiv:2205.14135). A program has one
query tile, one KV head and one split of the keys. Row r of a tile is query head
`head * GROUP + r % GROUP` of the tile's token `r // GROUP`.

For A4Q a tile of q is quantised here, and Q' K^T is a product of FP4 operands for each of its
levels: codes and E4M3 block scales of K go into it as they lie in the cache (`tl.dot_scaled`). The
block scales of the next tile are fetched while this one is computed: they are too narrow for the
compiler's own asynchronous copies.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_pallas.kernels.triton_fp4 import decode, encode
from nvfp4_pallas.kernels.triton_keys import (
  codes_tile,
  first_half,
  rows_of_pool,
  scale_tile,
  to_second_half,
  unit,
  wide_tile,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def find_tile(cu_q_lens, tile, num_seqs, WIDTH: tl.constexpr, SEQS: tl.constexpr):
  """(sequence, how many of its tokens come before the tile) of a ragged batch that is cut into
  tiles of WIDTH tokens; for a tile that is not needed the last sequence and all its tokens, or
  more."""
  s = tl.arange(0, SEQS)
  known = s < num_seqs
  begin = tl.load(cu_q_lens + s, mask=known, other=0)
  end = tl.load(cu_q_lens + s + 1, mask=known, other=0)
  tiles = (end - begin + (WIDTH - 1)) // WIDTH
  seq = tl.sum((known & (tl.cumsum(tiles, 0) <= tile)).to(tl.int32), 0)
  seq = tl.minimum(seq, num_seqs - 1)
  return seq, (tile - tl.sum(tl.where(s < seq, tiles, 0), 0)) * WIDTH


@triton.jit
def clear(out, lse, row, these, V_DIM: tl.constexpr):
  """The result of rows that see no key."""
  at = out + row[:, None] * V_DIM + tl.arange(0, V_DIM)[None, :]
  tl.store(at, tl.zeros((row.shape[0], V_DIM), out.dtype.element_ty), mask=these[:, None])
  tl.store(lse + row, tl.full((row.shape[0],), NEG_INF, tl.float32), mask=these)


@triton.jit
def triton_attend(
  q,  # [tokens, HEADS * GROUP, DIM]
  k_data,  # K's pool, and so on: cache.py
  k_scales,
  v_data,
  v_scales,
  k_global,  # float32 [HEADS]
  v_global,
  page_table,  # int32 [num_seqs, max_pages]
  kv_lens,
  cu_q_lens,
  tokens,
  num_seqs,
  max_pages,
  num_pages,
  out,  # [SPLITS, tokens, HEADS * GROUP, V_DIM]
  lse,  # [SPLITS, tokens, HEADS * GROUP]
  Q_LEVELS: tl.constexpr,  # of A4Q; 0 for a bfloat16 Q
  K_FORMAT: tl.constexpr,
  V_FORMAT: tl.constexpr,
  HEADS: tl.constexpr,
  GROUP: tl.constexpr,
  DIM: tl.constexpr,
  V_DIM: tl.constexpr,
  PAGE: tl.constexpr,
  CAUSAL: tl.constexpr,
  WINDOW: tl.constexpr,  # 0 for none
  SM_SCALE: tl.constexpr,
  SOFT_CAP: tl.constexpr,  # 0 for none
  SPLITS: tl.constexpr,
  SEQS: tl.constexpr,  # a power of two, num_seqs or more; 0: tile t is the one token of sequence t
  ROWS: tl.constexpr,
  KEYS: tl.constexpr,
):
  WIDTH: tl.constexpr = ROWS // GROUP
  tile = tl.num_programs(0) - 1 - tl.program_id(0)  # when causal, the last tiles take longest
  head = tl.program_id(1)
  split = tl.program_id(2)
  if SEQS == 0:
    seq = tile
    before = 0
  else:
    seq, before = find_tile(cu_q_lens, tile, num_seqs, WIDTH, SEQS)
  kv_len = tl.load(kv_lens + seq)
  q_begin = tl.load(cu_q_lens + seq)
  q_len = tl.load(cu_q_lens + seq + 1) - q_begin
  count = tl.minimum(tl.maximum(q_len - before, 0), WIDTH)  # of tokens
  position = kv_len - q_len + before  # of the first one in its sequence

  r = tl.arange(0, ROWS)
  token = r // GROUP
  real = token < count
  # Rows of q and out: far from the first one, and near each other.
  first_row = (q_begin + before).to(tl.int64) * (HEADS * GROUP) + head * GROUP
  near = token * (HEADS * GROUP) + r % GROUP
  q_row = q + first_row * DIM + near[:, None] * DIM
  if Q_LEVELS > 0:
    x = tl.load(q_row + tl.arange(0, DIM)[None, :], mask=real[:, None], other=0.0)
    x = x.to(tl.bfloat16).to(tl.float32)
    q0, q0_scale = encode(x, ROWS, DIM)
    if Q_LEVELS == 2:
      q1, q1_scale = encode(x - decode(q0, q0_scale, ROWS, DIM), ROWS, DIM)
  else:
    at = q_row + first_half(K_FORMAT, DIM)[None, :]
    q0 = tl.load(at, mask=real[:, None], other=0.0).to(tl.bfloat16)
    at += to_second_half(K_FORMAT, DIM)
    q1 = tl.load(at, mask=real[:, None], other=0.0).to(tl.bfloat16)

  # Which keys each row sees, and all of a tile of them.
  newest = tl.zeros((ROWS,), tl.int32) + (kv_len - 1)
  key_end = kv_len
  all_see_end = kv_len
  if CAUSAL:
    newest = tl.minimum(position + token, kv_len - 1)
    key_end = tl.minimum(position + count, kv_len)
    all_see_end = tl.minimum(position + 1, kv_len)
  key_end = tl.where(count > 0, tl.maximum(key_end, 0), 0)
  oldest = position + token - (WINDOW - 1)  # with a window
  key_begin = 0
  all_see_begin = 0
  if WINDOW > 0:
    key_begin = tl.minimum(tl.maximum(position - (WINDOW - 1), 0), key_end)
    all_see_begin = tl.maximum(position + count - WINDOW, 0)
  # Splits are runs of the sequence's key tiles: they depend on nothing but its length.
  per_split = ((kv_len + (KEYS - 1)) // KEYS + (SPLITS - 1)) // SPLITS
  begin = tl.maximum(key_begin // KEYS, split * per_split)
  end = tl.minimum((key_end + (KEYS - 1)) // KEYS, (split + 1) * per_split)
  end = tl.maximum(begin, end)
  full_end = tl.minimum(tl.maximum(all_see_end // KEYS, begin), end)
  full_begin = tl.minimum(tl.maximum((all_see_begin + (KEYS - 1)) // KEYS, begin), full_end)

  to_log2 = tl.load(k_global + head) * (SM_SCALE * LOG2_E)  # so that exp2 gives P
  if Q_LEVELS == 0:
    to_log2 *= unit(K_FORMAT)
  row_max = tl.full((ROWS,), NEG_INF, tl.float32)
  row_sum = tl.zeros((ROWS,), tl.float32)
  out0 = tl.zeros((ROWS, V_DIM // 2), tl.float32)
  out1 = tl.zeros((ROWS, V_DIM // 2), tl.float32)

  page_row = page_table + seq.to(tl.int64) * max_pages
  key = begin * KEYS + tl.arange(0, KEYS)
  live = (key >= key_begin) & (key < key_end)
  row = rows_of_pool(key, page_row, max_pages, num_pages, head, HEADS, PAGE)
  k_scale = scale_tile(k_scales, row, live, K_FORMAT, DIM)
  v_scale = scale_tile(v_scales, row, live, V_FORMAT, V_DIM)
  # First tiles that rows see a part of, then those that all rows see whole, then parts again.
  for phase in tl.static_range(0 if WINDOW > 0 else 1, 3):
    if phase == 0:
      phase_begin, phase_end = begin, full_begin
    elif phase == 1:
      phase_begin, phase_end = full_begin, full_end
    else:
      phase_begin, phase_end = full_end, end
    for key_tile in range(phase_begin, phase_end):
      key = (key_tile + 1) * KEYS + tl.arange(0, KEYS)
      live = (key >= key_begin) & (key < key_end)
      row = rows_of_pool(key, page_row, max_pages, num_pages, head, HEADS, PAGE)
      next_k_scale = scale_tile(k_scales, row, live, K_FORMAT, DIM)
      next_v_scale = scale_tile(v_scales, row, live, V_FORMAT, V_DIM)

      key = key_tile * KEYS + tl.arange(0, KEYS)
      live = (key >= key_begin) & (key < key_end)
      row = rows_of_pool(key, page_row, max_pages, num_pages, head, HEADS, PAGE)
      if Q_LEVELS > 0:
        k = codes_tile(k_data, row, DIM)
        s = tl.dot_scaled(q0, q0_scale, "e2m1", k, k_scale, "e2m1")
        if Q_LEVELS == 2:
          s = tl.dot_scaled(q1, q1_scale, "e2m1", k, k_scale, "e2m1", acc=s)
      else:
        k0, k1 = wide_tile(k_data, k_scale, row, live, K_FORMAT, DIM, phase != 1)
        s = tl.dot(q1, tl.trans(k1), tl.dot(q0, tl.trans(k0)))
      s *= to_log2
      if SOFT_CAP > 0:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        s = 1.0 - 2.0 / (tl.exp2(s * (2.0 / SOFT_CAP)) + 1.0)
        s *= SOFT_CAP * LOG2_E
      if phase != 1:
        visible = key[None, :] <= newest[:, None]
        if WINDOW > 0:
          visible &= key[None, :] >= oldest[:, None]
        s = tl.where(visible, s, NEG_INF)

      new_max = tl.maximum(row_max, tl.max(s, 1))
      # A row that has seen nothing yet has maximum -inf; 0 in its place keeps exp2 from NaN.
      anchor = tl.where(new_max == NEG_INF, 0.0, new_max) if phase != 1 else new_max
      shrink = tl.exp2(row_max - anchor)
      p = tl.exp2(s - anchor[:, None])
      row_sum = row_sum * shrink + tl.sum(p, 1)
      row_max = new_max
      p = p.to(tl.bfloat16)
      v0, v1 = wide_tile(v_data, v_scale, row, live, V_FORMAT, V_DIM, phase != 1)
      out0 = tl.dot(p, v0, out0 * shrink[:, None])
      out1 = tl.dot(p, v1, out1 * shrink[:, None])
      k_scale = next_k_scale
      v_scale = next_v_scale

  sums = tl.where(row_sum == 0.0, 1.0, row_sum)  # of a row that sees no key, whose out is 0
  factor = (tl.load(v_global + head) * unit(V_FORMAT) / sums)[:, None]
  first_of_split = split.to(tl.int64) * tokens * (HEADS * GROUP)
  first_row += first_of_split
  at = out + first_row * V_DIM + near[:, None] * V_DIM + first_half(V_FORMAT, V_DIM)[None, :]
  tl.store(at, (out0 * factor).to(out.dtype.element_ty), mask=real[:, None])
  at += to_second_half(V_FORMAT, V_DIM)
  tl.store(at, (out1 * factor).to(out.dtype.element_ty), mask=real[:, None])
  tl.store(lse + first_row + near, row_max * LN_2 + tl.log(row_sum), mask=real)

  # Rows that belong to nobody are the last ones: tile t clears those among its own numbers.
  real_tokens = tl.load(cu_q_lens + num_seqs)
  if (tile + 1) * WIDTH > real_tokens:
    token += tile * WIDTH
    padding = (token >= real_tokens) & (token < tokens) & (r < WIDTH * GROUP)
    first_row = first_of_split + (tile * WIDTH).to(tl.int64) * (HEADS * GROUP) + head * GROUP
    clear(out + first_row * V_DIM, lse + first_row, near, padding, V_DIM)
