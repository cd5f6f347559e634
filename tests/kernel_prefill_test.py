"""The kernels for whole query tiles, PTX run by an emulator, on what kernel_tail_test.py has."""

import dataclasses

import numpy as np
from absl.testing import absltest, parameterized

from nvfp4_pallas.kernels import whole_attend
from tests import cases, kernel_tail_test, whole_emulation
from tests.kernel_tail_test import SHORT, variant
from tests.tail_emulation import spec_of


class FusedTest(kernel_tail_test.TailTest):
  """Without a workspace."""

  cuts = False
  read_path = "nvfp4_dequant"
  most_rows = whole_attend.QUERY_ROWS

  def emulate(self, built, spec, *, config=None, **options):
    del config
    if spec.read_path == "nvfp4_dequant":
      spec = dataclasses.replace(spec, read_path=self.read_path)
    return whole_emulation.emulate(built, spec, **options)

  def width_of(self, built, config):
    del config
    return whole_attend.QUERY_ROWS // (built.q.shape[1] // built.cache.num_kv_heads)

  @parameterized.parameters(False, True)
  def test_many_items_in_one_block(self, reverse):
    """So many that everybody goes around the item feed several times."""
    case = variant(SHORT, q_lens=(1,) * 24, kv_lens=(3,) * 24, group=1)
    built = cases.build(case)
    out, lse = self.emulate(built, spec_of(built), blocks=1, reverse=reverse)
    self.check_close(out, lse, built, spec_of(built), self.width_of(built, None))

  def test_query_tiles_far_before_the_first_key(self):
    self.check(variant(SHORT, q_lens=(200,), kv_lens=(3,)))

  @parameterized.product(window=(64, 100, 128), hidden=(0, 1, 63, 64, 65, 127, 128, 129))
  def test_what_a_window_hides_of_tiles(self, window, hidden):
    self.check(variant(SHORT, q_lens=(1,), kv_lens=(window + hidden,)), window=window)

  def test_more_padding_rows_than_blocks(self):
    built = cases.build(SHORT, padding_rows=40)
    out, lse = self.emulate(built, spec_of(built))
    self.check_close(out, lse, built, spec_of(built), self.width_of(built, None))
    self.assertTrue(np.isneginf(lse[-40:]).all())

  def spread_faults(self, expected):
    """Beside the tokens 2 and 3 of the second sequence, which is one query tile."""
    expected[9:15, 2:, 32:48] = True
    expected[9:15, :2, 80:96] = True


class DenseTest(FusedTest):
  """With one."""

  read_path = "nvfp4_repack"

  def spread_faults(self, expected):
    """Also where no row sees the key, but its tile."""
    super().spread_faults(expected)
    expected[15:17, :2, :16] = True


if __name__ == "__main__":
  absltest.main()
