"""What the rows of a query tile see, and where their results belong. PTX.

A query tile is up to some number of consecutive tokens of a sequence, and its rows for a KV head
are the query heads of that head, token by token.
"""

from __future__ import annotations

from collections.abc import Callable

from nvfp4_pallas.kernels.ptx import Ptx, Reg


class QueryTile:
  """Where a walk is; registers.

  Attributes:
    seq, kv_len, q_len: the sequence, its keys, and how many of them are new tokens.
    head: the KV head.
    first_token, tokens: of the query tile, counted in the sequence's new ones.
    position: of its first token among the sequence's keys, signed.
    first_tile, count: the tiles of keys to attend to.
  """

  _p: Ptx
  _q_begin: Reg  # of the sequence, in q
  seq: Reg
  kv_len: Reg
  q_len: Reg
  head: Reg
  first_token: Reg
  tokens: Reg
  position: Reg
  first_tile: Reg
  count: Reg

  def _describe(self, *, group: int, kv_heads: int, causal: bool, window: int | None) -> None:
    self._group, self._kv_heads = group, kv_heads
    self._causal, self._window = causal, window

  # What rows see: the keys up to their own, or all, and of those a window.

  def unseen_by(self, row: Reg) -> Callable[[Reg], Reg]:
    """Which keys a row does not see; past the last row, what the last one does not.

    So that no row has scores of keys that hold anything.
    """
    position = self.position + self.row_or_last(row) // self._group
    newest = position if self._causal else self.kv_len - 1
    if self._window is None:
      return lambda key: key.above(newest)
    before = self._window - 1
    return lambda key: key.above(newest) | (position - before).above(key)

  def unseen_by_all(self) -> Callable[[Reg], Reg]:
    """Which keys no row sees."""
    end = self.kv_len
    if self._causal:
      end = self._p.new("r", "min.s32", end, self.position + self.tokens)
    if self._window is None:
      return lambda key: (key + 1).above(end)
    oldest = self.position - (self._window - 1)  # of what the first row sees
    return lambda key: (key + 1).above(end) | oldest.above(key)

  def is_partial(self, key: Reg, tile: int) -> Reg:
    """Whether the `tile` keys from a key on have some that some row does not see."""
    newest = self.position if self._causal else self.kv_len - 1  # of what the first row sees
    partial = (key + (tile - 1)).above(newest)
    if self._window is None:
      return partial
    latest = self.position + self.tokens - self._window  # where the last row's window begins
    return partial | latest.above(key)

  # Where it is.

  def pair(self) -> Reg:
    """The number of the sequence and its KV head."""
    return self._p.mad(self.seq, self._kv_heads, self.head)

  # Where results belong.

  def is_row(self, row: Reg) -> Reg:
    """Whether the query tile has the row."""
    return row < self.tokens * self._group

  def row_or_last(self, row: Reg) -> Reg:
    return self._p.minimum(row, self.tokens * self._group - 1)

  def q_row(self, row: Reg) -> Reg:
    """Which row of q and out, counted in query heads, a row is."""
    token = row // self._group
    head = row - token * self._group + self.head * self._group
    return (self._q_begin + self.first_token + token) * (self._kv_heads * self._group) + head
