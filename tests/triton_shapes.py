"""Batches that the tests of the Triton kernel share, and numerics for them."""

import dataclasses

from tests import cases

# Whole key tiles that all rows see, and tiles of queries that end in different ones.
LONG = cases.Case("long", (1, 0, 40), (300, 5, 170), 1, 2, head_dim=128, page_size=64)
DENSE = dataclasses.replace(LONG, name="dense", q_lens=(70, 3, 9), kv_lens=(200, 130, 64))
