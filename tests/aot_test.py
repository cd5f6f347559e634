"""The kernels compile for the GPU, within their bounds, and append is in place. No GPU is needed.

Skipped where JAX's CUDA compiler can neither be found nor downloaded.
"""

import collections
import dataclasses
import math
import os
import pathlib
import re
import sys
from unittest import mock

from absl.testing import absltest, parameterized

from benchmarks import aot, aot_calls, aot_cases
from benchmarks.sass import Code, alu
from tests.base import TestCase

# Of sm_100 one of each kind: the commands compile the others, which differ by numbers alone.
LEFT_OUT = (
  "sm100/prefill_a4q_1_level",
  "sm100/prefill_a4q_window",
  "sm100/prefill_a4q_window_soft_cap",
  "sm100/prefill_a4q_group_5_page_64",
  "sm100/prefill_a4q_group_7",
  "sm100/chunk_a4q",
  "sm100/tail_a4q",
  "sm100/tail_a4q_64",
  "sm100/tail_a4q_group_7",
  "sm100/decode_a4q",
)
TESTED = [case for case in aot_cases.CASES if case.name not in LEFT_OUT]


class CompileTest(TestCase):
  @parameterized.named_parameters((case.name, case) for case in TESTED)
  def test_case(self, case):
    try:
      report = aot.compile_case(case)
    except aot.MissingError as error:
      self.skipTest(str(error))
    self.assertEqual(aot.verdict(case, report), "ok")
    if case.name.startswith("engine/"):  # each layer's cache is appended to where it lies
      self.assertIn("input_output_alias=", report.hlo)
      self.assertNotRegex(report.hlo, r" copy\(| copy-start\(")
    if case.name.endswith(("layers", "steps")):
      return  # scans: that no call in place is torn, the verdict says
    kernel = case.name.partition("/")[0]
    if kernel in ("pack", "unpack", "append"):
      # What the compiler wrote rounds nothing twice, or less than exactly.
      compiled = re.sub(r"// begin inline asm.*?// end inline asm", "", report.ptx, flags=re.DOTALL)
      self.assertNotRegex(compiled, r"div\.(full|approx)|rcp|fma\.|\.ftz")
      self.assertEqual(report.hlo.count("custom-call("), 1)
      self.assertNotIn(" fusion(", report.hlo)
    if case.name == "append/large":
      self.assertRegex(report.ptx, r"mad\.wide\.u32 d\d+, r\d+, 8, d\d+;")  # codes of a block
    if kernel == "decode":
      # Two kernels, and nothing beside them but what prepares an A4Q q.
      self.assertEqual(report.hlo.count("custom-call("), 2)
      if case.name != "decode/a4q":
        self.assertNotRegex(report.hlo, r" (fusion|copy|copy-start|convert|broadcast)\(")
    if kernel == "short":
      self.assertEqual(report.hlo.count("custom-call("), 2)
      self.assertEqual(report.ops["HGMMA"], 0)
    if kernel == "tail":
      self.assertEqual(report.hlo.count("custom-call("), 2)
      # What the program has: S at the start, of the next tile and again, of each operand; O.
      operands = 2 if case.name == "tail/a4q" else 1
      self.assertEqual(report.ops["HGMMA"], 3 * 8 * operands + 8)
    if kernel in ("wide", "fused", "dense"):
      launches = {"fused": 1, "wide": 2, "dense": 3 if "a8q" in case.name else 2}[kernel]
      self.assertEqual(report.hlo.count("custom-call("), launches)
      if kernel == "fused":  # Q is quantised in the kernel; the counter begins at 0
        self.assertNotRegex(report.hlo, r" (fusion|convert)\(")
        self.assertEqual(re.findall(r"= (\S+) copy\(", report.hlo), ["s32[1]{0}"])
      self.check_products(case.name, report.ops)
    if kernel == "sm100":
      self.check_fp4(case.name, report)
    if kernel in ("layer", "mesh"):  # XLA's own kernels are about pages; none of these is copied
      self.check_no_copy_of_pages(report.hlo)
      self.check_between_devices(case.name, report.hlo)
      return
    if case.donate:
      hlo = report.hlo
      if case.name.startswith("append/recent"):
        # The kernel makes `starts` anew, which is 64 numbers; nothing else is copied.
        hlo, copies = re.subn(r"%copy\S* = s32\[64\]\{0\} copy\(", "", hlo)
        self.assertEqual(copies, 1)
      self.check_in_place(hlo, by_kernel=kernel != "definition")

  def check_no_copy_of_pages(self, hlo):
    pages = rf"\[\d+,\d+,{aot_calls.PAGE_SIZE},\d+\]"
    self.assertIn("input_output_alias=", hlo)
    self.assertRegex(hlo, rf"u8{pages}")
    self.assertNotRegex(hlo, rf"{pages}\S* copy(-start)?\(")

  def check_between_devices(self, name, hlo):
    """Over pages the largest lse, then weights and outs in one sum; else nothing."""
    self.assertNotRegex(hlo, "all-gather|all-to-all|collective-permute|reduce-scatter")
    sizes = [
      math.prod(int(n) for n in shape.split(","))
      for shape in re.findall(r"= f32\[([\d,]+)\]\S* all-reduce(?:-start)?\(", hlo)
    ]
    lse, out = 64 * 32, 64 * 32 * aot_calls.HEAD_DIM
    self.assertEqual(sizes, [lse, lse + out] if name == "mesh/pages" else [])
    self.assertLen(re.findall(r" all-reduce(?:-start)?\(", hlo), len(sizes))

  def check_products(self, name, ops):
    """Of the first tile and of the next: S, of each operand; O, and O of the last one."""
    levels = 2 if name.endswith("a4q") else 1
    k_dim = 256 if "dim_256" in name else 64 if "64" in name else 128
    small = "256" in name or name == "fused/masks" or name.startswith("wide/")
    tile = 32 if "256_masks" in name else 64 if small else 128
    products = 2 * k_dim // 16 * levels, 2 * tile // 16
    if "a8q" in name:
      self.assertEqual(ops["QGMMA"], products[0] // 2)
      self.assertEqual(ops["HGMMA"], products[1])
    else:
      self.assertEqual(ops["HGMMA"], sum(products))

  def test_what_is_left_out(self):
    self.assertContainsSubset(LEFT_OUT, {case.name for case in aot_cases.CASES})

  def check_fp4(self, name, report):
    """Of a key tile: S by FP4 products, 64 columns each, O by BF16 ones, 16 keys of a half each."""
    levels, k_dim = (1, 64) if "64" in name else (2, 128)
    wanted = {"UTCOMMA.4X": levels * k_dim // 64, "UTCHMMA": 2 * 128 // 16}
    (kernel,) = report.kernels
    self.assertEqual(kernel.code.with_modifiers("UTCOMMA", "UTCHMMA"), wanted)
    product = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X"
    self.assertEqual(kernel.ptx.count(product), wanted["UTCOMMA.4X"])
    self.assertEqual(kernel.ptx.count("tcgen05.mma."), sum(wanted.values()))
    # Scales to tensor memory, those of 64 columns at once: of each level of Q, and of K.
    copies = kernel.ptx.count("tcgen05.cp.cta_group::1.32x128b.warpx4 ")
    self.assertEqual(copies, (levels + 1) * k_dim // 64)
    self.assertEqual(kernel.ptx.count("tcgen05.cp."), copies)
    self.check_bf16(kernel.ptx, wanted["UTCHMMA"])
    self.assertNotIn("e2m1x2", kernel.ptx)  # nothing converts E2M1

  def check_bf16(self, ptx, count):
    """kind::f16 is float16's too: a constant, the instruction descriptor, says which it is."""
    product = r"tcgen05\.mma\.cta_group::1\.kind::f16 \[%r\d+\], a_desc, b_desc, (%r\d+),"
    descriptors = re.findall(product, ptx)
    self.assertLen(descriptors, count)
    for register in set(descriptors):
      (value,) = re.findall(rf"mov\.b32 \t{register}, (\d+);", ptx)
      # Bits 4-5: of the sum, 1 is float32. Bits 7-9 and 10-12: of the operands, 1 is bfloat16.
      types = int(value) >> 4 & 3, int(value) >> 7 & 7, int(value) >> 10 & 7
      self.assertEqual(types, (1, 1, 1))

  def check_in_place(self, hlo, by_kernel):
    self.assertIn("input_output_alias=", hlo)
    self.assertNotRegex(hlo, r" copy\(| copy-start\(| bitcast-convert\(")
    if by_kernel:
      self.assertIn("output_to_operand_aliasing=", hlo)
      self.assertNotIn(" fusion(", hlo)
    else:  # bytes of 8-bit floats are reinterpreted for free and scattered in place
      self.assertRegex(hlo, r"= u8\[512,8,64,\d+\]\S* bitcast\(")


class ReportTest(TestCase):
  def report(self, registers=40, spills=0):
    kernel = aot.Kernel("k", registers, spills, 0, "", "")
    return aot.AotReport((kernel,), "", 0.0)

  def test_verdict(self):
    case = aot_cases.Case("k", lambda: (print, ()), max_registers=40)
    self.assertEqual(aot.verdict(case, self.report()), "ok")
    self.assertStartsWith(aot.verdict(case, self.report(registers=41)), "FAIL")
    self.assertStartsWith(aot.verdict(case, self.report(spills=8)), "FAIL")
    serialised = aot.Kernel("k", 40, 0, 0, "", "", serialised=True)
    verdict = aot.verdict(case, aot.AotReport((serialised,), "", 0.0))
    self.assertEqual(verdict, "FAIL serialised wgmma")
    case = dataclasses.replace(case, max_instructions=1)
    two = aot.Kernel("k", 40, 0, 0, "", "/*0000*/ FADD R1, R1, R1 ;\n/*0010*/ EXIT ;")
    self.assertStartsWith(aot.verdict(case, aot.AotReport((two,), "", 0.0)), "FAIL")

  def test_counts_instructions(self):
    sass = """
      2:-:-:Y:01        /*00c0*/                   LD.E.128 R4, desc[UR4][R16.64]
      -:-:-:Y:01        /*00d0*/              @!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24
      -:-:-:Y:01        /*00e0*/              @UP1 UMOV UR4, 0x0
      -:-:-:Y:01        /*00f0*/                   NOP
    """
    kernel = aot.Kernel("k", 1, 0, 0, "", sass)
    self.assertEqual(kernel.ops, {"LD": 1, "HGMMA": 1, "UMOV": 1})

  LOOP = """
    .L_x_0:
      -:-:-:Y:01        /*0010*/                   LDS R4, [R2]
    .L_x_1:
      -:-:-:Y:01        /*0020*/                   LOP3.LUT R4, R4, 0xf, RZ, 0xc0, !PT
      -:-:-:Y:01        /*0030*/                   HMMA.16816.F32 R8, R4, R6, R8
      -:-:-:Y:01        /*0040*/                   NOP
    .L_x_2:
      -:-:-:Y:01        /*0050*/                   F2FP.F16.F32.PACK_AB R4, R5, R4
      -:-:-:Y:01        /*0060*/              @!P1 BRA `(.L_x_2)
      -:-:-:Y:01        /*0070*/               @P0 BRA `(.L_x_1)
      -:-:-:Y:01        /*0080*/                   HMMA.16816.F32 R8, R4, R6, R8
      -:-:-:Y:01        /*0090*/               @P2 BRA `(.L_x_1)
      -:-:-:Y:01        /*00a0*/               @P3 BRA `(.L_x_0)
      -:-:-:Y:01        /*00b0*/                   BRA `(.L_x_3)
    .L_x_3:
      -:-:-:Y:01        /*00c0*/                   EXIT
  """

  def test_finds_the_inner_loop(self):
    """The shortest loop with both tensor core instructions in it."""
    loop = Code.parse(self.LOOP).inner_loop()
    self.assertEqual(loop, {"LOP3": 1, "HMMA": 2, "F2FP": 1, "BRA": 3})
    self.assertEqual(alu(collections.Counter(loop)), 3)
    straight = "\n".join(line for line in self.LOOP.splitlines() if "BRA" not in line)
    self.assertIsNone(Code.parse(straight).inner_loop())
    self.assertIsNone(Code.parse("").inner_loop())

  def test_verdict_of_the_loop(self):
    report = aot.AotReport((aot.Kernel("k", 40, 0, 0, "", self.LOOP),), "", 0.0)
    case = aot_cases.Case(
      "k", lambda: (print, ()), max_registers=40, loop_values=2, max_loop=(3.5, 1.5)
    )
    self.assertEqual(aot.of_loop(case, report), (3.5, 1.5))
    self.assertEqual(aot.verdict(case, report), "ok")
    for bounds in ((3.4, 1.5), (3.5, 1.4)):
      tighter = dataclasses.replace(case, max_loop=bounds)
      self.assertStartsWith(aot.verdict(tighter, report), "FAIL more than")

  def test_missing_tool(self):
    with (
      mock.patch.dict(os.environ, {"PATH": "", "CUDA_HOME": "", "CUDA_PATH": "", "CUDA_ROOT": ""}),
      mock.patch.object(aot.importlib.util, "find_spec", return_value=None),
      self.assertRaisesRegex(aot.MissingError, "nvdisasm is missing.*triton"),
    ):
      aot._find_tool("nvdisasm")

  def test_plugins_are_kept_for_each_python(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    with (
      mock.patch.object(aot, "_installed_roots", lambda version: []),
      mock.patch.object(aot, "_download") as download,
    ):
      plugin, _ = aot._find_plugin(folder)
    version, root = download.call_args.args
    self.assertEqual(root, folder / f"jax-cuda13-{version}-{sys.implementation.cache_tag}")
    self.assertEqual(plugin, root / aot.PLUGIN)

  def test_unknown_name(self):
    self.assertEqual(aot.main(["pack", "no_such_kernel"]), 2)


if __name__ == "__main__":
  absltest.main()
