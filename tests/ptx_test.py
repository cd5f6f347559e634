"""The writer of PTX by its text, and the emulator of its programs by definitions of its own.

Numbers are checked against exact fractions and tables of a format's values, matrices against plain
products in the fragments of the PTX ISA, and each fault that the emulator is to find is made once.
"""

import fractions
import functools
import itertools
import math
from typing import Any

import jax
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from nvfp4_pallas.kernels.ptx import Mem, Ptx
from tests.base import TestCase
from tests.ptx_emulator import Memory, PtxError, run

Fraction = fractions.Fraction
THREADS = 128
LANES = range(32)


def of_type(shape, dtype: Any = np.uint32):
  return jax.ShapeDtypeStruct(shape, dtype)


def each(write, *columns, results=1):
  """Runs write(p, *registers) on every row of uint32 columns; returns `results` columns."""
  size = len(columns[0])
  blocks = -(-size // THREADS)
  columns = [np.resize(np.asarray(c, np.uint32), blocks * THREADS) for c in columns]
  names = [f"x{i}" for i in range(len(columns))]
  p = Ptx((*names, "y"))
  row = p.mad(p.program, THREADS, p.new("r", "mov.u32", "%tid.x"))
  x = [p.load("global.nc", Mem(p.address(p.pointer(name), row, 4)))[0] for name in names]
  y = write(p, *x)
  y = [y] if results == 1 else y
  for i, value in enumerate(y):
    p.store("global", Mem(p.address(p.pointer("y"), row * results + i, 4)), [value])
  inputs = dict(zip(names, columns, strict=True))
  memory = Memory(inputs, {"y": of_type((blocks * THREADS, results))})
  run(p, memory, programs=range(blocks), threads=THREADS)
  out = memory.array("y")[:size]
  return out[:, 0] if results == 1 else out


def op(name, kinds, result="r", *extra):
  """A function for `each`: one instruction, with operands of these kinds."""

  def write(p, *x):
    x = [p.as_f32(v) if kind == "f" else v for v, kind in zip(x, kinds, strict=True)]
    return p.new(result, name, *x, *extra)

  return write


def bits(x: Any):
  return np.asarray(x, np.float32).view(np.uint32)


class WriterTest(TestCase):
  def test_text(self):
    p = Ptx(("x",))
    (value,) = p.load("global.nc", Mem(p.address(p.pointer("x"), p.program, 4), 8), kind="f")
    with p.loop() as loop:
      loop.leave_if(value > 1.5)
      p.set(value, value * 2.0)
    with p.when(p.program.eq(0), unless=True):
      p.store("shared", Mem(p.smem), [value, value])
    p.emit("trap", when=p.program < 3, unless=True)
    self.assertEqual(
      p.text(),
      """{
.reg .b32 r<2>;
.reg .f32 f<2>;
.reg .b64 d<2>;
.reg .pred p<3>;
mov.b64 d0, $0;
mov.b32 r0, $1;
mov.b32 r1, $2;
mad.wide.u32 d1, r1, 4, d0;
ld.global.nc.f32 f0, [d1+8];
L1:
setp.gt.f32 p0, f0, 0f3FC00000;
@p0 bra.uni L2;
mul.f32 f1, f0, 0f40000000;
mov.f32 f0, f1;
bra.uni L1;
L2:
setp.eq.u32 p1, r1, 0;
@p1 bra.uni L3;
st.shared.v2.f32 [r0], {f0, f0};
L3:
setp.lt.u32 p2, r1, 3;
@!p2 trap;
}""",
    )
    self.assertEqual(p.parameters, ("x", "smem", "program"))

  @parameterized.parameters(
    (lambda p, x: x * 3, "mul.lo.u32 r2, r1, 3;"),
    (lambda p, x: x * 8, "shl.b32 r2, r1, 3;"),
    (lambda p, x: x // 8, "shr.u32 r2, r1, 3;"),
    (lambda p, x: x // 7, "div.u32 r2, r1, 7;"),
    (lambda p, x: x % 8, "and.b32 r2, r1, 7;"),
    (lambda p, x: x % 7, "rem.u32 r2, r1, 7;"),
    (lambda p, x: x ^ "0x80008000", "xor.b32 r2, r1, 0x80008000;"),
    (lambda p, x: x.above(-1), "setp.gt.s32 p0, r1, -1;"),
    (lambda p, x: ~(x < 2), "not.pred p1, p0;"),
    (lambda p, x: (x < 2) & (x < 3), "and.pred p2, p0, p1;"),
    (lambda p, x: p.select(x < 2, 1.0, 0.0), "selp.f32 f0, 0f3F800000, 0f00000000, p0;"),
    (lambda p, x: p.f32(-math.inf), "mov.f32 f0, 0fFF800000;"),
    (lambda p, x: p.permute(x, 0, 0x41), "prmt.b32 r2, r1, 0, 0x0041;"),
    (lambda p, x: p.pack("bf16", p.as_f32(x), 0.0), "cvt.rn.bf16x2.f32 r2, 0f00000000, f0;"),
    (lambda p, x: p.max_of([x, p.smem, p.program]), "max.u32 r3, r2, r1;"),
  )
  def test_operators(self, write, line):
    p = Ptx(())
    write(p, p.program)
    self.assertEqual(p.text().splitlines()[-2], line)

  def test_nothing_to_do(self):
    p = Ptx(())
    count = len(p.instructions)
    self.assertIs(p.program << 0, p.program)
    self.assertIs(p.program * 1, p.program)
    self.assertLen(p.instructions, count)


# Numbers.

WORDS = [0, 1, 2, 5, 31, 32, 33, 0x7F, 0xFF, 0x8000, 0xFFFF, 0x12345678, 0x7FFFFFFF, 0x80000000]
WORDS += [0xFFFFFFFE, 0xFFFFFFFF, 0xDEADBEEF]
PAIRS = np.array(list(itertools.product(WORDS, WORDS)), np.uint64).T


def signed(x):
  return x - 2**32 if x >> 31 else x


class IntegerTest(TestCase):
  @parameterized.parameters(
    ("add.u32", lambda a, b: a + b),
    ("sub.u32", lambda a, b: a - b),
    ("mul.lo.u32", lambda a, b: a * b),
    ("mul.hi.u32", lambda a, b: a * b >> 32),
    ("min.u32", min),
    ("max.u32", max),
    ("min.s32", lambda a, b: min(a, b, key=signed)),
    ("max.s32", lambda a, b: max(a, b, key=signed)),
    ("and.b32", lambda a, b: a & b),
    ("or.b32", lambda a, b: a | b),
    ("xor.b32", lambda a, b: a ^ b),
    ("shl.b32", lambda a, b: a << min(b, 32)),
    ("shr.u32", lambda a, b: a >> min(b, 32)),
    ("shr.s32", lambda a, b: signed(a) >> min(b, 31)),
  )
  def test_binary(self, name, function):
    want = [function(int(a), int(b)) % 2**32 for a, b in PAIRS.T]
    np.testing.assert_array_equal(each(op(name, "rr"), *PAIRS), want)

  @parameterized.parameters(("div.u32", lambda a, b: a // b), ("rem.u32", lambda a, b: a % b))
  def test_divide(self, name, function):
    a, b = PAIRS[:, PAIRS[1] > 0]
    want = [function(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(each(op(name, "rr"), a, b), want)

  @parameterized.parameters(
    ("not.b32", lambda a: ~a),
    ("popc.b32", int.bit_count),
    ("clz.b32", lambda a: 32 - a.bit_length()),
    ("bfind.u32", lambda a: a.bit_length() - 1),
  )
  def test_unary(self, name, function):
    want = [function(a) % 2**32 for a in WORDS]
    np.testing.assert_array_equal(each(op(name, "r"), WORDS), want)

  @parameterized.product(name=("lt", "le", "gt", "ge", "eq", "ne"), type_=("u32", "s32"))
  def test_compare(self, name, type_):
    def write(p, a, b):
      return p.select(p.new("p", f"setp.{name}.{type_}", a, b), a, b)

    view = signed if type_ == "s32" else int
    compare = {"lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__"}
    compare |= {"eq": "__eq__", "ne": "__ne__"}
    want = [
      a if getattr(view(int(a)), compare[name])(view(int(b))) else b for a, b in PAIRS.T.tolist()
    ]
    np.testing.assert_array_equal(each(write, *PAIRS), want)

  def test_64_bits(self):
    def write(p, a, b):
      wide = p.new("d", "mad.wide.u32", a, b, p.new("d", "cvt.u64.u32", b))
      wide = p.new("d", "add.u64", wide, p.new("d", "mul.wide.u32", a, a))
      low, high = p.registers("r", 2)
      p.emit("mov.b64", [low, high], wide)
      again = p.new("d", "mov.b64", [low, high])
      same = p.new("p", "setp.eq.u64", wide, again)
      return [p.new("r", "cvt.u32.u64", again), high, p.select(same, 1, 0)]

    out = each(write, *PAIRS, results=3)
    for (a, b), (low, high, same) in zip(PAIRS.T.tolist(), out.tolist(), strict=True):
      self.assertEqual((high << 32 | low, same), ((a * b + b + a * a) % 2**64, 1))

  def test_predicates(self):
    def write(p, a, b):
      x, y = a < b, a.eq(b)
      value = p.u32(0)
      for i, q in enumerate((x & y, x | y, x ^ y, ~x)):
        p.set(value, value + 2**i, when=q)
      p.emit("add.u32", value, value, 16, when=x, unless=True)
      return value

    want = [
      sum(2**i for i, q in enumerate((False, a <= b, a <= b, a >= b, a >= b)) if q)
      for a, b in PAIRS.T
    ]
    np.testing.assert_array_equal(each(write, *PAIRS), want)

  @parameterized.parameters(0x3210, 0x7654, 0x4140, 0x5410, 0x7632, 0xFBD9, 0x89AB, 0xCDEF, 0x0880)
  def test_prmt(self, selector):
    r = np.random.default_rng(0)
    a, b = r.integers(0, 2**32, (2, 64))

    def byte(a, b, digit):
      x = (a | b << 32) >> 8 * (digit & 7) & 255
      return 255 * (x >> 7) if digit & 8 else x

    want = [
      sum(byte(x, y, selector >> 4 * k & 15) << 8 * k for k in range(4))
      for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(each(lambda p, a, b: p.permute(a, b, selector), a, b), want)
    got = each(lambda p, a, b: p.new("r", "prmt.b32", a, b, p.u32(selector)), a, b)
    np.testing.assert_array_equal(got, want)

    def in_place(p, a, b):
      p.emit("prmt.b32", a, a, b, hex(selector))
      return a

    np.testing.assert_array_equal(each(in_place, a, b), want)

  def test_lop3(self):
    a, b, c = 0xFF00FF00, 0xF0F0F0F0, 0xCCCCCCCC

    def write(p, a, b, c):
      return [p.new("r", "lop3.b32", a, b, c, table) for table in range(256)]

    (out,) = each(write, [a], [b], [c], results=256)
    for table in range(256):
      want = sum(
        (table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in LANES
      )
      self.assertEqual(out[table], want)


@functools.cache
def magnitudes(name):
  """The finite values of a format that are not negative, in the order of their bits."""
  if name == "e4m3":
    return np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
  dtype, end = {"bf16": (ml_dtypes.bfloat16, 0x7F80), "f16": (np.float16, 0x7C00)}[name]
  return np.arange(end, dtype=np.uint16).view(dtype).astype(np.float64)


def to_nearest(x, name):
  """The bits of the nearest value of a format, by a search among all of them; NaN are positive."""
  values = magnitudes(name)
  beyond = 2 * values[-1] - values[-2]  # rounding happens as if there were no end
  values = np.append(values, beyond)
  x = np.asarray(x, np.float64)
  between = (values[1:] + values[:-1]) / 2
  code = np.searchsorted(between, np.abs(x))
  tie = np.isin(np.abs(x), between)
  code = np.where(tie, code + code % 2, code)
  if name == "e4m3":
    code = np.minimum(code, len(values) - 2)  # saturates
    return np.where(np.isnan(x), 0x7F, code | np.signbit(x) << 7)
  return np.where(np.isnan(x), 0x7FFF, code | np.signbit(x) << 15)


def hard_f32(name):
  """float32 at, and next to, all values of a format and all points between two of them."""
  values = magnitudes(name)
  points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
  points = np.concatenate([points, np.nextafter(points, np.float32(math.inf))])
  points = np.concatenate([points, np.nextafter(points[points > 0], np.float32(0))])
  special = np.array([448, 449, 464, 465, 65504, 65519.99, 65520, 3.3961e38, 3e38, math.inf])
  points = np.concatenate([points, special.astype(np.float32), [np.float32(math.nan)]])
  return np.concatenate([points, -points])


class ConversionTest(TestCase):
  @parameterized.parameters(
    ("cvt.rn.bf16x2.f32", "bf16", 16),
    ("cvt.rn.f16x2.f32", "f16", 16),
    ("cvt.rn.satfinite.e4m3x2.f32", "e4m3", 8),
  )
  def test_from_f32(self, name, format_, width):
    x = hard_f32(format_)
    x = x[: len(x) // 2 * 2]
    word = each(op(name, "ff"), bits(x[0::2]), bits(x[1::2]))  # the high half is the first operand
    np.testing.assert_array_equal(word & 2**width - 1, to_nearest(x[1::2], format_))
    np.testing.assert_array_equal(word >> width, to_nearest(x[0::2], format_))

  def test_bf16_like_ml_dtypes(self):
    x = hard_f32("bf16")
    x = x[~np.isnan(x)]
    word = each(op("cvt.rn.bf16x2.f32", "ff"), bits(x), bits(x))
    np.testing.assert_array_equal(word >> 16, x.astype(ml_dtypes.bfloat16).view(np.uint16))

  def test_every_e4m3(self):
    word = np.arange(2**16)
    got = each(lambda p, x: p.e4m3_to_f16(p.halves(x)[0]), word)
    values = np.append(magnitudes("e4m3"), np.nan)
    values = np.concatenate([values, -values])
    want = to_nearest(values, "f16")  # exact
    np.testing.assert_array_equal(got & 0xFFFF, want[word & 0xFF])
    np.testing.assert_array_equal(got >> 16, want[word >> 8])

  def test_every_f16(self):
    """To float32, exactly; and two of them to E4M3."""
    words = np.arange(2**16)
    values = words.astype(np.uint16).view(np.float16).astype(np.float64)
    got = each(lambda p, x: p.f16_to_f32(p.halves(x)[0]), words).view(np.float32)
    np.testing.assert_array_equal(got, values)
    other = np.roll(words, 77)
    got = each(lambda p, x: p.widen(p.f16_to_e4m3(x)), words | other << 16)
    want = to_nearest(values, "e4m3")
    np.testing.assert_array_equal(got & 0xFF, want)
    np.testing.assert_array_equal(got >> 8, np.roll(want, 77))

  def test_integers(self):
    words = np.array(WORDS)
    got = each(op("cvt.rn.f32.u32", "r", "f"), words)
    np.testing.assert_array_equal(got.view(np.float32), words.astype(np.float32))
    got = each(op("cvt.rn.f32.s32", "r", "f"), words)
    np.testing.assert_array_equal(
      got.view(np.float32), words.astype(np.uint32).view(np.int32).astype(np.float32)
    )


F32 = np.array(
  [
    *(0.0, 1.0, 1.5, 3.0, 2.0**-149, 3 * 2.0**-149, 2.0**-126, 2.0**-126 - 2.0**-149, 2.0**-75),
    *(1 + 2.0**-23, 1 - 2.0**-24, 2.0**-24, 2.0**-24 + 2.0**-47, 1 / 3, 0.7, 2.0**64, 2.0**-60),
    *(2.0**127, float(np.finfo(np.float32).max), 16777215.0),
  ],
  np.float32,
)
F32 = np.concatenate([F32, -F32])


def exactly(value: Fraction | int, rounding: str, zero: float) -> float:
  """A fraction as float32, by a search of its neighbours; `zero` is the result for 0."""
  if value == 0:
    return zero

  def at(ordinal):  # the magnitude with these bits; infinity as the number after the last
    if ordinal == 0x7F800000:
      return Fraction(2**128)
    return Fraction(float(np.uint32(ordinal).view(np.float32)))

  magnitude = abs(value)
  low, high = 0, 0x7F800000
  if magnitude >= at(high):
    low, high = high - 1, high
  else:
    while high - low > 1:
      middle = (low + high) // 2
      low, high = (middle, high) if at(middle) <= magnitude else (low, middle)
  up = {"rn": None, "rz": False, "rp": value > 0, "rm": value < 0}[rounding]
  if at(low) == magnitude:
    ordinal = low
  elif up is None:
    twice = 2 * magnitude - at(low) - at(high)
    ordinal = high if twice > 0 or (twice == 0 and high % 2 == 0) else low
  else:
    ordinal = high if up else low
  return math.copysign(float(np.uint32(ordinal).view(np.float32)), value)


class FloatTest(TestCase):
  @parameterized.parameters(
    *itertools.product(("add", "sub", "mul", "fma"), (".rn", ".rz", ".rp", ".rm")),
    *itertools.product(("add", "sub", "mul"), ("",)),
  )
  def test_rounding(self, name, rounding):
    r = np.random.default_rng(0)
    count = 3 if name == "fma" else 2
    x = F32[r.integers(0, len(F32), (count, 600))]
    if count == 3:  # where the third operand nearly cancels the product, or ties
      with np.errstate(over="ignore"):
        x[2, :200] = -(x[0, :200] * x[1, :200])
        x[2, 200:300] = np.float32(2.0**-25) * x[0, 200:300] * x[1, 200:300]
    x = x[:, np.isfinite(x).all(0)]
    instruction = f"{name}{rounding}.f32"
    got = each(op(instruction, "f" * count, "f"), *bits(x)).view(np.float32)
    rounding = rounding[1:] or "rn"
    for a, got_one in zip(x.T.astype(np.float64), got, strict=True):
      product = Fraction(a[0]) * Fraction(a[1])
      parts = {
        "mul": (product,),
        "fma": (product, Fraction(a[-1])),
        "add": (Fraction(a[0]), Fraction(a[1])),
        "sub": (Fraction(a[0]), -Fraction(a[1])),
      }[name]
      signs = {
        "mul": (a[0] * a[1],),
        "fma": (math.copysign(1, a[0]) * math.copysign(1, a[1]), a[-1]),
        "add": (a[0], a[1]),
        "sub": (a[0], -a[1]),
      }[name]
      negative = [math.copysign(1, s) < 0 for s in signs]
      minus_zero = all(negative) or any(negative) and rounding == "rm"
      want = np.float32(exactly(sum(parts), rounding, -0.0 if minus_zero else 0.0))
      self.assertEqual(bits(got_one), bits(want), f"{instruction} {a}: {got_one}, want {want}")

  @parameterized.parameters(
    ((1 + 2.0**-12, 1 + 2.0**-12, 2.0**-100), 1 + 2.0**-11 + 2.0**-23),
    (
      (2.0**-75 * (1 + 2.0**-23), 2.0**-75 * (1 - 2.0**-23), 2.0**-127 + 2.0**-149),
      2.0**-127 + 2.0**-149,
    ),
  )
  def test_fma_beside_a_tie(self, x, want):
    """Float64's sum is in the middle of two values of float32, the exact one is not."""
    got = each(op("fma.rn.f32", "fff", "f"), *(bits([v]) for v in x))
    self.assertEqual(got.view(np.float32).item(), want)

  def test_ftz(self):
    tiny = 2.0**-127
    x, y = [tiny, -tiny, 2.0**-100, 1.0], [1.0, 0.0, -(2.0**-27), tiny]
    got = each(op("fma.rn.ftz.f32", "fff", "f"), bits(x), bits(y), bits([0, 0, 0, -tiny]))
    np.testing.assert_array_equal(got, bits([0.0, 0.0, -0.0, 0.0]))
    got = each(op("mul.rn.f32", "ff", "f"), bits(x), bits(y))
    np.testing.assert_array_equal(got, bits([tiny, -0.0, -(2.0**-127), tiny]))

  def test_nan_is_canonical(self):
    inf = math.inf
    x, y = bits([inf, 0.0, inf, -math.nan]), bits([-inf, -inf, inf, 1.0])
    nan = np.uint32(0x7FFFFFFF)
    add, mul = (each(op(f"{name}.f32", "ff", "f"), x, y) for name in ("add", "mul"))
    np.testing.assert_array_equal(add, [nan, bits(-inf), bits(inf), nan])
    np.testing.assert_array_equal(mul, [bits(-inf), nan, bits(inf), nan])
    fma = each(op("fma.rn.f32", "fff", "f"), x, y, bits([1.0, 1.0, -inf, 1.0]))
    np.testing.assert_array_equal(fma, [bits(-inf), nan, nan, nan])

  @parameterized.parameters("min", "max")
  def test_extremum(self, name):
    nan, choose = math.nan, {"min": min, "max": max}[name]
    values = [nan, 0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 2.0**-149]
    a, b = np.array(list(itertools.product(values, values)), np.float32).T
    key = lambda x: (float(x), math.copysign(1, x))

    def want(x, y, wins):
      if math.isnan(x) or math.isnan(y):
        return nan if wins or math.isnan(x) == math.isnan(y) else y if math.isnan(x) else x
      return choose(x, y, key=key)

    for suffix in ("", ".NaN"):
      got = each(op(f"{name}{suffix}.f32", "ff", "f"), bits(a), bits(b))
      expected = bits([want(x, y, suffix) for x, y in zip(a, b, strict=True)])
      expected[expected == bits(nan)] = 0x7FFFFFFF
      np.testing.assert_array_equal(got, expected)

  @parameterized.parameters("lt", "le", "gt", "ge", "eq", "ne")
  def test_compare(self, name):
    values = [math.nan, 0.0, -0.0, 1.0, -1.0, math.inf]
    a, b = np.array(list(itertools.product(values, values)), np.float32).T
    compare = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
    compare |= {"eq": "equal", "ne": "not_equal"}
    ordered = ~np.isnan(a) & ~np.isnan(b)
    result = getattr(np, compare[name])(a, b)
    for suffix, want in (("", result & ordered), ("u", result | ~ordered)):
      write = lambda p, a, b, op=f"setp.{name}{suffix}.f32": p.select(p.new("p", op, a, b), 1, 0)
      np.testing.assert_array_equal(each(write, bits(a), bits(b)), want)

  def test_signs(self):
    x = bits([1.0, -0.0, math.nan, -math.inf])
    np.testing.assert_array_equal(each(op("abs.f32", "f", "f"), x), x & 0x7FFFFFFF)
    np.testing.assert_array_equal(each(op("neg.f32", "f", "f"), x), x ^ 0x80000000)

  def test_approximations(self):
    inf, nan = math.inf, 0x7FFFFFFF
    x = [0.0, -0.0, 1.0, -2.0, 0.5, inf, -inf, 2.0**-127, 2.0**127, 10.5, -130.0]
    want = {
      "ex2.approx.ftz.f32": [1, 1, 2, 0.25, 2**0.5, inf, 0, 1, inf, 2**10.5, 0],
      "lg2.approx.f32": [-inf, -inf, 0, 0, -1, inf, 0, -127, 127, math.log2(10.5), 0],
      "rcp.approx.ftz.f32": [inf, -inf, 1, -0.5, 2, 0, -0.0, inf, 0, 1 / 10.5, -1 / 130],
    }
    for name, values in want.items():
      expected = bits(values)
      if name == "lg2.approx.f32":
        expected[[3, 6, 10]] = nan
      np.testing.assert_array_equal(each(op(name, "f", "f"), bits(x)), expected, name)


def values_of(format_):
  """Numbers that are hard to multiply and add, of both signs."""
  all_ = magnitudes(format_)
  one = np.searchsorted(all_, 1.0)
  normal = np.searchsorted(all_, {"bf16": 2.0**-126, "f16": 2.0**-14}[format_])
  picked = [0, 1, 2, 3, 5, normal - 1, normal, one - 1, one, one + 1, one + 2, len(all_) - 1]
  r = np.random.default_rng(0)
  picked = [*picked, *np.flatnonzero(np.frexp(all_)[0] == 0.5)[::5], *r.integers(0, len(all_), 9)]
  return np.concatenate([all_[picked], -all_[picked]])


DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def pair(format_, low, high):
  """Values of a format of 16 bits as the halves of words."""
  low, high = (
    np.asarray(v).astype(DTYPES[format_]).view(np.uint16).astype(np.uint32) for v in (low, high)
  )
  return low | high << 16


class HalvesTest(TestCase):
  """The reference works on fractions, rounds them to odd float64, and those by a search."""

  def check(self, name, format_, function, *x):
    """Of the low halves; the high ones have the operands in another order."""
    other = [np.roll(a, 1) for a in x]
    words = (pair(format_, a, b) for a, b in zip(x, other, strict=True))
    got = each(op(f"{name}.{format_}x2", "r" * len(x)), *words)

    def want(columns):
      values = [function(*map(float, row)) for row in zip(*columns, strict=True)]
      return to_nearest(values, format_)

    np.testing.assert_array_equal(got & 0xFFFF, want(x))
    np.testing.assert_array_equal(got >> 16, want(other))

  @parameterized.parameters("bf16", "f16")
  def test_multiply(self, format_):
    values = values_of(format_)
    a, b = np.array(list(itertools.product(values, values))).T
    self.check("mul.rn", format_, lambda a, b: a * b, a, b)  # exact in float64

  @parameterized.parameters("bf16", "f16")
  def test_multiply_random(self, format_):
    r = np.random.default_rng(0)
    a, b = r.integers(0, 2**16, (2, 2**14)).astype(np.uint16)
    got = each(op(f"mul.rn.{format_}x2", "rr"), a, b)
    with np.errstate(all="ignore"):
      a, b = (x.view(DTYPES[format_]).astype(np.float64) for x in (a, b))
      want = to_nearest(a * b, format_)
    np.testing.assert_array_equal(got & 0xFFFF, want)

  @parameterized.product(operation=(("add", 1), ("sub", -1)), format_=("bf16", "f16"))
  def test_add(self, operation, format_):
    name, sign = operation
    values = values_of(format_)
    a, b = np.array(list(itertools.product(values, values))).T

    def function(a, b):
      zero = a if math.copysign(1, a) == math.copysign(1, sign * b) else 0.0
      return odd(Fraction(a) + sign * Fraction(b)) or (zero if a == 0 == b else 0.0)

    self.check(f"{name}.rn", format_, function, a, b)

  @parameterized.parameters("bf16", "f16")
  def test_fma(self, format_):
    r, values = np.random.default_rng(0), values_of(format_)
    a, b, c = values[r.integers(0, len(values), (3, 2000))]
    with np.errstate(over="ignore"):
      near = -(a * b).astype(np.float32).astype(DTYPES[format_]).astype(np.float64)
    c[:500] = np.where(np.isfinite(near[:500]), near[:500], 1.0)
    # Products in the middle of two values, and very little more or less.
    step = {"bf16": 2.0**-7, "f16": 2.0**-10}[format_]
    a[500:600], b[500:600] = 1 + step * r.integers(0, 9, 100), 1.5
    c[500:600] = 2.0**-24 * r.choice([-1, 0, 1], 100)

    def function(a, b, c):
      value = odd(Fraction(a) * Fraction(b) + Fraction(c))
      minus = [math.copysign(1, a) * math.copysign(1, b) < 0, math.copysign(1, c) < 0]
      return value or (-0.0 if all(minus) else 0.0)

    self.check("fma.rn", format_, function, a, b, c)

  @parameterized.product(
    name=("min", "max"), nan=("", ".NaN"), sign=("", ".xorsign.abs"), format_=("bf16", "f16")
  )
  def test_extremum(self, name, nan, sign, format_):
    values = [math.nan, -math.nan, 0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, 2.0**-24]
    a, b = np.array(list(itertools.product(values, values))).T
    choose = {"min": min, "max": max}[name]

    def want(x, y):
      if (math.isnan(x) and math.isnan(y)) or (nan and (math.isnan(x) or math.isnan(y))):
        return math.nan
      xor = math.copysign(1, x) * math.copysign(1, y)
      if sign:
        x, y = abs(x), abs(y)
      if math.isnan(x) or math.isnan(y):
        value = y if math.isnan(x) else x
      else:
        value = choose(x, y, key=lambda v: (v, math.copysign(1, v)))
      return math.copysign(value, xor) if sign else value

    self.check(f"{name}{nan}{sign}", format_, want, a, b)

  @parameterized.parameters("bf16", "f16")
  def test_signs(self, format_):
    x = np.array([0x80003F80, 0xFFFF7F80, 0x00018001], np.uint32)
    np.testing.assert_array_equal(each(op(f"abs.{format_}x2", "r"), x), x & 0x7FFF7FFF)
    np.testing.assert_array_equal(each(op(f"neg.{format_}x2", "r"), x), x ^ 0x80008000)

  @parameterized.product(
    form=(("gt", "u32", 0xFFFF), ("leu", "u32", 0xFFFF), ("gt", None, None)),
    format_=("bf16", "f16"),
  )
  def test_set(self, form, format_):
    name, result, true = form
    values = [math.nan, 0.0, -0.0, 1.0, -1.0, math.inf, 2.0**-24]
    a, b = np.array(list(itertools.product(values, values))).T
    instruction = f"set.{name}.{result or f'{format_}x2'}.{format_}x2"
    got = each(op(instruction, "rr"), pair(format_, a, b), pair(format_, b, a))
    low, high = (a > b, b > a) if name == "gt" else (~(a > b), ~(b > a))
    true = true or {"bf16": 0x3F80, "f16": 0x3C00}[format_]
    np.testing.assert_array_equal(got, low * true | high * true << 16)

  def test_halves_of_words(self):
    got = each(lambda p, x: p.pair(*p.halves(x)[::-1]), WORDS)
    words = np.array(WORDS)
    np.testing.assert_array_equal(got, words >> 16 | (words & 0xFFFF) << 16)


def odd(value: Fraction) -> float:
  """A fraction as float64 from which a search among fewer bits and their midpoints goes right."""
  y = float(value)
  if Fraction(y) == value:
    return y
  down, up = (math.nextafter(y, way) for way in (-math.inf, math.inf))
  other = up if Fraction(y) < value else down
  return next(x for x in (y, other) if np.float64(x).view(np.uint64) % 2)


# Lanes and matrices.


def one_warp(write, *columns, results=1):
  """Like `each`, for the 32 rows of one warp."""
  names = [f"x{i}" for i in range(len(columns))]
  p = Ptx((*names, "y"))
  lane = p.new("r", "mov.u32", "%laneid")
  x = [p.load("global", Mem(p.address(p.pointer(name), lane, 4)))[0] for name in names]
  y = write(p, *x)
  for i, value in enumerate([y] if results == 1 else y):
    p.store("global", Mem(p.address(p.pointer("y"), lane * results + i, 4)), [value])
  inputs = {name: np.asarray(c, np.uint32) for name, c in zip(names, columns, strict=True)}
  memory = Memory(inputs, {"y": of_type((32, results))})
  run(p, memory, threads=32, smem_bytes=4096)
  out = memory.array("y")
  return out[:, 0] if results == 1 else out


class LanesTest(TestCase):
  @parameterized.product(
    mode=("up", "down", "bfly", "idx"),
    segment=(32, 8),
    count=(0, 1, 5, 31),
    immediate=(True, False),
  )
  def test_shuffle(self, mode, segment, count, immediate):
    mask = 32 - segment << 8
    clamp = mask | (0 if mode == "up" else 31)
    x = np.arange(32) * 7 + 100

    def write(p, x):
      by = count if immediate else p.u32(count)
      return p.new("r", f"shfl.sync.{mode}.b32", x, by, clamp, "0xffffffff")

    def source(lane):
      first = lane // segment * segment
      j = {
        "up": lane - count,
        "down": lane + count,
        "bfly": lane ^ count,
        "idx": first + count % segment,
      }[mode]
      inside = j >= first if mode == "up" else j < first + segment
      return j if inside else lane

    np.testing.assert_array_equal(one_warp(write, x), [x[source(i)] for i in LANES])

  def test_shuffle_by_lane(self):
    lanes = np.random.default_rng(0).integers(0, 64, 32)
    x = np.arange(32) + 100
    np.testing.assert_array_equal(
      one_warp(lambda p, x, k: p.from_lane(x, k), x, lanes), x[lanes % 32]
    )

  def test_reductions(self):
    x = np.random.default_rng(0).integers(0, 2**32, 32)

    def write(p, x):
      ops = ("add.u32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32")
      values = [p.new("r", f"redux.sync.{name}", x, "0xffffffff") for name in ops]
      small = x < 2**31
      values.append(p.new("r", "vote.sync.ballot.b32", small, "0xffffffff"))
      for name in ("any", "all"):
        vote = p.new("p", f"vote.sync.{name}.pred", small, "0xffffffff")
        values.append(p.select(vote, 1, 0))
      values.append(p.count_lanes(small))
      return values

    out = one_warp(write, x, results=12)
    self.assertTrue((out == out[0]).all())
    small = x < 2**31
    s = [signed(int(v)) % 2**32 for v in (min(x.tolist(), key=signed), max(x.tolist(), key=signed))]
    want = [x.sum() % 2**32, x.min(), x.max(), *s]
    want += [f.reduce(x) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)]
    want += [sum(2**i for i in LANES if small[i]), small.any(), small.all(), small.sum()]
    np.testing.assert_array_equal(out[0], want)

  def test_some_lanes_are_not_known(self):
    with self.assertRaisesRegex(NotImplementedError, "some lanes"):
      one_warp(lambda p, x: p.new("r", "redux.sync.add.u32", x, "0x0000ffff"), np.arange(32))


def fragment_places(name):
  """(row, column) of value i of a lane, from the PTX ISA's description of mma.m16n8k16."""

  def place(lane, i):
    group, thread = lane // 4, lane % 4
    if name == "a":
      row = group if i < 2 or 4 <= i < 6 else group + 8
      return row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)
    if name == "b":
      return thread * 2 + (i & 1) + (8 if i >= 2 else 0), group
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)

  count = {"a": 8, "b": 4, "c": 4}[name]
  return np.array([[place(lane, i) for i in range(count)] for lane in LANES])


def fragment_words(matrix, name, format_="bf16"):
  """Registers [count, 32] that hold a matrix."""
  rows, columns = np.moveaxis(fragment_places(name), -1, 0)
  halves = np.ascontiguousarray(matrix[rows, columns].astype(DTYPES[format_]))
  return halves.view(np.uint32).T


class MatrixTest(TestCase):
  def test_movmatrix(self):
    x = np.arange(64, dtype=np.uint16).reshape(8, 8)
    words = np.ascontiguousarray(x).view(np.uint32).ravel()  # two of a row in each lane
    got = one_warp(lambda p, x: p.transpose(x), words)
    np.testing.assert_array_equal(got, np.ascontiguousarray(x.T).view(np.uint32).ravel())

  @parameterized.product(in_place=(True, False), format_=("bf16", "f16"))
  def test_mma(self, in_place, format_):
    r = np.random.default_rng(0)
    a, b, c = (r.integers(-8, 9, s).astype(np.float32) for s in ((16, 16), (16, 8), (16, 8)))
    rows, columns = np.moveaxis(fragment_places("c"), -1, 0)

    def write(p, *x):
      acc = [p.as_f32(v) for v in x[6:]]
      if in_place:
        p.mma(format_, acc, list(x[:4]), list(x[4:6]))
        return acc
      out = p.registers("f", 4)[::-1]
      name = f"mma.sync.aligned.m16n8k16.row.col.f32.{format_}.{format_}.f32"
      p.emit(name, out, list(x[:4]), list(x[4:6]), acc)
      return out

    words = [*fragment_words(a, "a", format_), *fragment_words(b, "b", format_)]
    out = one_warp(write, *words, *bits(c[rows, columns]).T, results=4)
    got = np.zeros((16, 8), np.float32)
    got[rows, columns] = out.view(np.float32)
    np.testing.assert_array_equal(got, a @ b + c)

  def test_mma_rounds_once(self):
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    a[:, :3], b[0], b[1], b[2] = 1, 2.0**20, 2.0**-20, math.inf
    a[1:, 2] = 0  # row 0 has infinity, the others inf * 0
    words = [*fragment_words(a, "a"), *fragment_words(b, "b"), *[bits(np.full(32, -(2.0**20)))] * 4]

    def write(p, *x):
      acc = [p.as_f32(v) for v in x[6:]]
      p.mma("bf16", acc, list(x[:4]), list(x[4:6]))
      return acc

    out = one_warp(write, *words, results=4)
    self.assertEqual(set(out[:4, :2].ravel()), {bits(math.inf).item()})
    self.assertEqual(set(out[4:].ravel()), {0x7FFFFFFF})
    words[0] = np.where(np.arange(32) % 4 == 1, 0, words[0])
    words[4] = np.where(np.arange(32) % 4 == 1, 0, words[4])
    out = one_warp(write, *words, results=4)
    np.testing.assert_array_equal(out.view(np.float32), 2.0**-20)

  @parameterized.product(count=(1, 2, 4), transposed=(True, False))
  def test_ldmatrix_and_stmatrix(self, count, transposed):
    """Row i of matrix n is where lane 8 n + i says; lane t gets two elements of row t // 4."""
    r = np.random.default_rng(0)
    matrices = r.integers(0, 2**16, (count, 8, 8)).astype(np.uint16)
    rows = np.full(32, 2**20)  # lanes that name no row
    rows[: 8 * count] = r.permutation(64)[: 8 * count] * 16
    form = f"sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"

    def write(p, at, *words):
      at = p.smem + at
      p.emit(f"stmatrix.{form}", Mem(at), list(words))
      loaded = p.registers("r", count)
      p.emit(f"ldmatrix.{form}", loaded, Mem(at))
      plain = p.registers("r", 4)
      p.emit("ld.shared.v4.u32", plain, Mem(at), when=p.new("r", "mov.u32", "%laneid") < 8 * count)
      return [*loaded, *plain]

    seen = matrices.transpose(0, 2, 1) if transposed else matrices
    words = np.ascontiguousarray(seen).view(np.uint32).reshape(count, 32)
    out = one_warp(write, rows, *words, results=count + 4)
    np.testing.assert_array_equal(out[:, :count].T, words)
    stored = np.ascontiguousarray(out[: 8 * count, count:]).view(np.uint16)
    np.testing.assert_array_equal(stored.reshape(count, 8, 8), matrices)


def descriptor(p, address):
  """Of B [n, 64], K-major with the 128-byte swizzle."""
  low = p.new("r", "and.b32", address >> 4, 0x3FFF)
  return p.new("d", "mov.b64", [low, p.u32(1 << 30 | 1024 >> 4)])


def swizzled(b, format_):
  """[n, 64] numbers of 16 bits as bytes: 16-byte chunks of row n change places by n % 8."""
  rows = np.ascontiguousarray(b.astype(DTYPES[format_])).view(np.uint8).reshape(len(b), 8, 16)
  out = np.empty_like(rows)
  for n in range(len(b)):
    for chunk in range(8):
      out[n, chunk ^ n % 8] = rows[n, chunk]
  return out


def result_fragments(x):
  """A warp's 16 rows of a result, as its lanes have them."""
  rows, columns = np.moveaxis(fragment_places("c"), -1, 0)
  return np.concatenate([x[rows, columns + 8 * j] for j in range(x.shape[1] // 8)], 1)


class WgmmaTest(TestCase):
  def program(self, n, change=None, format_="bf16"):
    """y = x + a b, in two products, with B copied to shared memory by plain stores."""
    p = Ptx(("a", "b", "x", "y"))
    thread = p.new("r", "mov.u32", "%tid.x")
    a = [p.load("global", Mem(p.address(p.pointer("a"), thread, 32), 16 * i), 4) for i in range(2)]
    acc = []
    for i in range(0, n // 2, 4):
      at = Mem(p.address(p.pointer("x"), thread, 2 * n), 4 * i)
      acc += p.load("global", at, 4, kind="f")
    for i in range(0, n * 8, THREADS):
      at = thread + i
      with p.scope() as scope:
        scope.leave_if(p.new("p", "vote.sync.all.pred", at >= n * 8, "0xffffffff"))
        chunk = p.load("global", Mem(p.address(p.pointer("b"), at, 16)), 4)
        p.store("shared", Mem(p.smem + at * 16), chunk)
    p.emit("fence.proxy.async.shared::cta")
    if change != "no barrier":
      p.sync(THREADS)
    if change != "no fence":
      p.emit("wgmma.fence.sync.aligned")
    true = p.program.eq(0)
    for i in range(2):
      at = descriptor(p, p.smem + 32 * i)
      name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{format_}.{format_}"
      if change == "one warp less":
        with p.when(p.from_lane(thread, 0) < 96):
          p.emit(name, acc, a[i], at, true, 1, 1, 0)
      else:
        p.emit(name, acc, a[i], at, true, 1, 1, 0)
      p.emit("wgmma.commit_group.sync.aligned")
    if change == "A changes":
      p.set(a[1][2], 0)
    if change == "early":
      p.emit("wgmma.wait_group.sync.aligned", 1)
      with p.when(true):
        p.store("global", Mem(p.address(p.pointer("y"), thread, 2 * n)), acc[:4])
    if change == "B changes":
      p.store("shared", Mem(p.smem + thread * 16), [0])
    if change == "accumulators change":
      p.set(acc[0], 1.0)
    p.emit("wgmma.wait_group.sync.aligned", 1 if change == "one group" else 0)
    for i in range(0, n // 2, 4):
      at = Mem(p.address(p.pointer("y"), thread, 2 * n), 4 * i)
      p.store("global", at, acc[i : i + 4])
    return p

  def memory(self, n, format_="bf16"):
    r = np.random.default_rng(n)
    a, b = r.integers(-4, 5, (64, 32)), r.integers(-4, 5, (n, 64))
    x = r.integers(-9, 10, (64, n)).astype(np.float32)
    # Warp w has rows 16 w to 16 w + 15; 8 columns of the result are like one of mma's.
    words = np.stack(
      [
        [
          fragment_words(a[16 * w : 16 * w + 16, 16 * k : 16 * k + 16], "a", format_)
          for k in range(2)
        ]
        for w in range(4)
      ]
    )
    inputs = {
      "a": words.transpose(0, 3, 1, 2),
      "b": swizzled(b, format_),
      "x": np.concatenate([result_fragments(x[16 * w : 16 * w + 16]) for w in range(4)]),
    }
    want = x + a.astype(np.float32) @ b[:, :32].T.astype(np.float32)
    return Memory(inputs, {"y": of_type((THREADS, n // 2), np.float32)}), want

  @parameterized.product(n=(8, 40, 64), format_=("bf16", "f16"), reverse=(True, False))
  def test_product(self, n, format_, reverse):
    memory, want = self.memory(n, format_)
    run(self.program(n, format_=format_), memory, smem_bytes=128 * n, reverse=reverse)
    got = memory.array("y").reshape(4, 32, n // 2)
    for w in range(4):
      np.testing.assert_array_equal(got[w], result_fragments(want[16 * w : 16 * w + 16]))

  def test_sums_in_flight_are_poison(self):
    p, (memory, _) = self.program(16, "early"), self.memory(16)
    last = max(i for i, x in enumerate(p.instructions) if x.op.startswith("wgmma.wait"))
    p.instructions = p.instructions[: last + 1]
    run(p, memory, smem_bytes=2048)
    self.assertTrue(np.isnan(memory.array("y")[:, :4]).all())

  @parameterized.parameters(
    ("no barrier", "race"),
    ("no fence", "changed since the last wgmma.fence"),
    ("A changes", "registers of A changed"),
    ("B changes", "race|an operand changed"),
    ("accumulators change", "accumulators changed"),
    ("one warp less", "waits for the wgmma of instruction .*3 of 4 warps"),
    ("one group", "wgmma in flight"),
  )
  def test_faults(self, change, message):
    memory, _ = self.memory(16)
    with self.assertRaisesRegex(PtxError, message):
      run(self.program(16, change), memory, smem_bytes=2048)


class SharedWgmmaTest(TestCase):
  """Both operands in shared memory, and the right one with rows that are k."""

  COLUMNS, STEPS = 128, 2

  def multiply(self, change=None, **signs):
    """y = a b; a [64, 32] as rows of 64, b [32, 128] as two parts of 64 columns."""
    r = np.random.default_rng(0)
    a, b = r.integers(-4, 5, (64, 64)), r.integers(-4, 5, (16 * self.STEPS, self.COLUMNS))
    image = np.concatenate([swizzled(x, "f16").ravel() for x in (a, b[:, :64], b[:, 64:])])
    p = Ptx(("x", "y"))
    for start in range(0, image.nbytes // 16, THREADS):
      at = p.thread + start
      chunk = p.load("global", Mem(p.address(p.pointer("x"), at, 16)), 4)
      p.store("shared", Mem(p.smem + at * 16), chunk)
    p.sync(THREADS)
    acc = [p.f32(0.0) for _ in range(self.COLUMNS // 2)]
    true = p.program.eq(0)
    p.emit("wgmma.fence.sync.aligned")
    for i in range(self.STEPS):
      left = descriptor(p, p.smem + 32 * i)
      part = b[:, :64].size * 2
      low = (((p.smem + (a.size * 2 + i * 16 * 128)) & 0x3FFFF) >> 4) | (part >> 4) << 16
      right = p.new("d", "mov.b64", [low, 1 << 30 | 64])
      name = f"wgmma.mma_async.sync.aligned.m64n{self.COLUMNS}k16.f32.f16.f16"
      p.emit(name, acc, left, right, true, signs.get("a", 1), signs.get("b", 1), 0, 1)
    p.emit("wgmma.commit_group.sync.aligned")
    if change is not None:
      p.store("shared", Mem(p.smem + p.thread * 16, change), [0x3C003C00])
    p.emit("wgmma.wait_group.sync.aligned", 0)
    for i in range(0, len(acc), 4):
      at = Mem(p.address(p.pointer("y"), p.thread, 4 * len(acc)), 4 * i)
      p.store("global", at, acc[i : i + 4])
    memory = Memory({"x": image}, {"y": of_type((THREADS, len(acc)), np.float32)})
    run(p, memory, smem_bytes=image.nbytes)
    return memory.array("y").reshape(4, 32, -1), a[:, : 16 * self.STEPS] @ b

  @parameterized.parameters({}, {"a": -1}, {"b": -1})
  def test_product(self, **signs):
    got, want = self.multiply(**signs)
    for warp in range(4):
      of_warp = want[16 * warp : 16 * warp + 16].astype(np.float32)
      expected = result_fragments(of_warp) * np.prod([*signs.values()])
      np.testing.assert_array_equal(got[warp], expected)

  @parameterized.parameters(0, 64 * 128, 64 * 128 + 32 * 128)
  def test_operands_change(self, place):
    with self.assertRaisesRegex(PtxError, "race|an operand changed"):
      self.multiply(place)


class ByteWgmmaTest(TestCase):
  """E4M3, 32 of k at a time: the left operand in registers, or in shared memory."""

  COLUMNS = 16

  @parameterized.parameters(True, False)
  def test_product(self, in_registers):
    r = np.random.default_rng(0)
    e4m3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    finite = np.flatnonzero(np.abs(e4m3.astype(np.float32)) <= 4).astype(np.uint8)
    a, b = r.choice(finite, (64, 128)), r.choice(finite, (self.COLUMNS, 128))
    rows = [np.concatenate([a, b])[i].reshape(8, 16)[np.arange(8) ^ i % 8] for i in range(64 + 16)]
    p = Ptx(("x", "a", "y"))
    for start in range(0, (64 + self.COLUMNS) * 8, THREADS):
      chunk = p.load("global", Mem(p.address(p.pointer("x"), p.thread + start, 16)), 4)
      p.store("shared", Mem(p.smem + (p.thread + start) * 16), chunk)
    registers = p.load("global", Mem(p.address(p.pointer("a"), p.thread, 16)), 4)
    p.emit("fence.proxy.async.shared::cta")
    p.sync(THREADS)
    acc = [p.f32(0.0) for _ in range(self.COLUMNS // 2)]
    left = registers if in_registers else descriptor(p, p.smem)
    p.emit("wgmma.fence.sync.aligned")
    name = f"wgmma.mma_async.sync.aligned.m64n{self.COLUMNS}k32.f32.e4m3.e4m3"
    p.emit(name, acc, left, descriptor(p, p.smem + 64 * 128), p.program.eq(0), 1, 1)
    p.emit("wgmma.commit_group.sync.aligned")
    p.emit("wgmma.wait_group.sync.aligned", 0)
    for i in range(0, len(acc), 4):
      p.store(
        "global", Mem(p.address(p.pointer("y"), p.thread, 4 * len(acc)), 4 * i), acc[i : i + 4]
      )
    # A lane has four bytes of k of two rows, and those 16 on.
    of_lanes = np.stack(
      [
        a[16 * w + g + 8 * (j % 2), 4 * c + 16 * (j // 2) : 4 * c + 16 * (j // 2) + 4]
        for w in range(4)
        for g in range(8)
        for c in range(4)
        for j in range(4)
      ]
    )
    inputs = {"x": np.stack(rows), "a": of_lanes.reshape(THREADS, 16)}
    memory = Memory(inputs, {"y": of_type((THREADS, len(acc)), np.float32)})
    run(p, memory, smem_bytes=(64 + self.COLUMNS) * 128)
    want = e4m3[a[:, :32]].astype(np.float32) @ e4m3[b[:, :32]].astype(np.float32).T
    for warp, got in enumerate(memory.array("y").reshape(4, 32, -1)):
      np.testing.assert_array_equal(got, result_fragments(want[16 * warp : 16 * warp + 16]))

  def test_transposed(self):
    p = Ptx(("x",))
    acc = [p.f32(0.0) for _ in range(8)]
    d = descriptor(p, p.smem)
    name = "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3"
    p.emit(name, acc, d, d, p.program.eq(0), 1, 1, 0, 1)
    with self.assertRaises(NotImplementedError):
      run(p, Memory({"x": np.zeros(4, np.uint32)}), smem_bytes=4096)


# Memory and hazards.


class MemoryTest(TestCase):
  def load(self, offset, inputs=None, size=4, count=1, space="global", **settings):
    """One thread in a warp loads from x."""
    inputs = inputs or {"x": np.arange(64, dtype=np.uint32)}
    p = Ptx(("x",))
    lane = p.new("r", "mov.u32", "%laneid")
    base = p.pointer("x") if space == "global" else p.smem
    p.load(space, Mem(base, offset), count, size, when=lane.eq(5))
    run(p, Memory(inputs, **settings), threads=32, smem_bytes=256)

  def test_out_of_bounds(self):
    self.load(252)
    with self.assertRaisesRegex(PtxError, "byte 256 of x, which has 256 bytes: out of bounds by 1"):
      self.load(256)
    with self.assertRaisesRegex(PtxError, "byte -4 of x.*out of bounds by 4"):
      self.load(-4)
    with self.assertRaisesRegex(PtxError, "out of bounds"):
      self.load(2**30)
    two = {"x": np.zeros(100, np.uint8), "z": np.zeros(4, np.uint8)}
    with self.assertRaisesRegex(PtxError, "byte 100 of x"):
      self.load(100, two)
    with self.assertRaisesRegex(PtxError, "byte -4 of z.* ld.global.u32 r3, .d0.508.;"):
      self.load(508, two)
    self.load(508 + 4, two)

  def test_out_of_shared_memory(self):
    self.load(252, space="shared")
    with self.assertRaisesRegex(PtxError, "lane 0 touches byte 256 of shared memory"):
      self.load(256, space="shared")
    with self.assertRaisesRegex(PtxError, "byte -4 of shared memory"):
      self.load(-4, space="shared")

  @parameterized.parameters((2, 4, 1), (8, 4, 4), (4, 4, 2), (1, 2, 1))
  def test_misaligned(self, offset, size, count):
    for space in ("global", "shared"):
      with self.assertRaisesRegex(PtxError, "not a multiple"):
        self.load(offset, size=size, count=count, space=space)

  def test_readable(self):
    inputs = {"x": np.zeros((4, 16), np.float32)}
    readable = {"x": np.array([True, True, False, True])[:, None]}
    self.load(64, inputs, readable=readable)
    with self.assertRaisesRegex(PtxError, "byte 128 of x, .*not readable"):
      self.load(128, inputs, readable=readable)

  def test_addresses_have_64_bits(self):
    p = Ptx(("x",))
    low, high = p.registers("r", 2)
    p.emit("mov.b64", [low, high], p.pointer("x"))
    p.load("global", Mem(p.new("d", "cvt.u64.u32", low)))
    with self.assertRaisesRegex(PtxError, "out of bounds"):
      run(p, Memory({"x": np.zeros(4)}), threads=32)

  def store(self, memory, space="global", value=None, blocks=1, at=None):
    p = Ptx(("x",))
    lane = p.new("r", "mov.u32", "%laneid")
    value = lane if value is None else value(p, lane)
    where = lane * 4 if at is None else at(p, lane)
    if space == "global":
      p.store(space, Mem(p.address(p.pointer("x"), where, 1)), [value])
    else:
      p.store(space, Mem(p.smem + where), [value])
    run(p, memory, threads=32, programs=range(blocks), smem_bytes=256)

  def test_inputs_are_not_written(self):
    with self.assertRaisesRegex(PtxError, "byte 0 of x, which is an input"):
      self.store(Memory({"x": np.zeros(32, np.uint32)}))

  def test_in_place(self):
    memory = Memory(in_place={"x": np.full(40, 7, np.uint32)})
    self.store(memory)
    np.testing.assert_array_equal(memory.array("x"), [*range(32)] + [7] * 8)
    np.testing.assert_array_equal(memory.written("x"), [True] * 32 + [False] * 8)

  def test_outputs_start_as_poison(self):
    memory = Memory(outputs={"x": of_type((40,), np.uint16)})
    np.testing.assert_array_equal(memory.array("x"), 0xEEEE)
    p = Ptx(("x",))
    p.load("global", Mem(p.pointer("x")))
    with self.assertRaisesRegex(PtxError, "byte 0 of x, which was never written"):
      run(p, memory, threads=32)

  @parameterized.parameters("global", "shared")
  def test_lanes_store_to_one_address(self, space):
    memory = lambda: Memory(outputs={"x": of_type((32,))})
    self.store(memory(), space, at=lambda p, lane: p.u32(0), value=lambda p, lane: p.u32(3))
    with self.assertRaisesRegex(PtxError, "different values to one address"):
      self.store(memory(), space, at=lambda p, lane: (lane >> 1) * 4)

  def test_blocks(self):
    memory = lambda: Memory(outputs={"x": of_type((64,))})
    self.store(memory(), blocks=2, at=lambda p, lane: (lane + p.program * 32) * 4)
    with self.assertRaisesRegex(PtxError, "byte 124 of x, which block 0 wrote"):
      self.store(memory(), blocks=2, at=lambda p, lane: (lane + p.program * 31) * 4)
    both = memory()
    for _ in range(2):  # launches follow each other
      self.store(both)

  @parameterized.product(space=("global", "shared"), size=(1, 2, 4), count=(1, 2, 4))
  def test_sizes(self, space, size, count):
    nbytes = size * count
    x = np.random.default_rng(0).integers(0, 256, (32, count, size)).astype(np.uint8)
    p = Ptx(("x", "y"))
    lane = p.new("r", "mov.u32", "%laneid")
    odd_lanes = (lane & 1).ne(0)
    source, target = (Mem(p.address(p.pointer(n), lane, nbytes)) for n in "xy")
    values = p.load("global", source, count, size)
    if space == "shared":
      at = Mem(p.smem + lane * nbytes)
      p.store("shared", at, [v | 0xFF << 24 if size < 4 else v for v in values], size)
      values = p.load("shared", at, count, size)
    again = [p.u32(0xFFFFFFFF) for _ in range(count)]
    p.load_into(again, "global", source, size, when=odd_lanes)
    for value, other in zip(values, again, strict=True):
      p.set(value, other, when=odd_lanes)
    p.store("global", target, values[::-1], size, when=odd_lanes)
    memory = Memory({"x": x}, {"y": of_type(x.shape, np.uint8)})
    run(p, memory, threads=32, smem_bytes=32 * nbytes)
    np.testing.assert_array_equal(memory.array("y")[1::2], x[1::2, ::-1])
    np.testing.assert_array_equal(memory.array("y")[0::2], 0xEE)

  def test_cache_hints(self):
    p = Ptx(("x", "y"))
    policy = p.new("d", "createpolicy.fractional.L2::evict_first.b64", 1.0)
    x = p.registers("r", 4)
    name = "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32"
    p.emit(name, x, Mem(p.pointer("x")), policy)
    p.emit("st.global.L1::no_allocate.v4.u32", Mem(p.pointer("y")), x)
    memory = Memory({"x": np.arange(4, dtype=np.uint32)}, {"y": of_type((4,))})
    run(p, memory, threads=32)
    np.testing.assert_array_equal(memory.array("y"), range(4))


class HazardTest(TestCase):
  def exchange(self, sync=True, again=None, barriers=None):
    """Threads give each other words through shared memory, twice."""
    p = Ptx(("y",))
    thread = p.new("r", "mov.u32", "%tid.x")
    mine, other = (Mem(p.smem + t * 4) for t in (thread, thread ^ 64))
    p.store("shared", mine, [thread * 3])
    if sync:
      p.sync(THREADS)
    (first,) = p.load("shared", other)
    if again is not None:
      if again:
        p.sync(THREADS)
      p.store("shared", mine, [first])
      p.sync(THREADS)
      (first,) = p.load("shared", other)
    p.store("global", Mem(p.address(p.pointer("y"), thread, 4)), [first])
    return p

  def emulate(self, program, **settings):
    memory = Memory(outputs={"y": of_type((THREADS,))})
    run(program, memory, smem_bytes=8192, **settings)
    return memory.array("y")

  @parameterized.parameters(True, False)
  def test_bar_sync(self, reverse):
    thread = np.arange(THREADS)
    emulate = functools.partial(self.emulate, reverse=reverse)
    np.testing.assert_array_equal(emulate(self.exchange()), (thread ^ 64) * 3)
    np.testing.assert_array_equal(emulate(self.exchange(again=True)), thread * 3)
    with self.assertRaisesRegex(PtxError, "race: warp . writes byte .*, read by warp"):
      emulate(self.exchange(sync=False))
    with self.assertRaisesRegex(PtxError, "race: warp . reads byte .*, written by warp"):
      emulate(self.exchange(again=False))
    np.testing.assert_array_equal(  # without looking for races one order of turns can go right
      emulate(self.exchange(again=False), races=False).shape, (THREADS,)
    )

  def half_barriers(self, number):
    """Warps 0 and 2, and 1 and 3, exchange words."""
    p = Ptx(("y",))
    thread = p.new("r", "mov.u32", "%tid.x")
    p.store("shared", Mem(p.smem + thread * 4), [thread])
    p.emit("bar.sync", p.from_lane((thread >> 5) & 1, 0) + 1, 64)
    (x,) = p.load("shared", Mem(p.smem + (thread ^ number) * 4))
    p.store("global", Mem(p.address(p.pointer("y"), thread, 4)), [x])
    return p

  def test_named_barriers(self):
    np.testing.assert_array_equal(self.emulate(self.half_barriers(64)), np.arange(THREADS) ^ 64)
    with self.assertRaisesRegex(PtxError, "race"):
      self.emulate(self.half_barriers(32))

  def test_bar_arrive_and_red(self):
    p = Ptx(("y",))
    thread = p.new("r", "mov.u32", "%tid.x")
    with p.when(p.from_lane(thread, 0) >= 64):
      p.store("shared", Mem(p.smem + thread * 4), [thread])
      p.emit("bar.arrive", 1, THREADS)
    value = p.u32(0)
    with p.when(p.from_lane(thread, 0) < 64):
      p.emit("bar.sync", 1, THREADS)
      p.load_into([value], "shared", Mem(p.smem + (thread + 64) * 4))
    found = p.new("p", "bar.red.or.pred", 0, THREADS, thread.eq(77))
    p.store("global", Mem(p.address(p.pointer("y"), thread, 4)), [p.select(found, value, 999)])
    want = np.where(np.arange(THREADS) < 64, np.arange(THREADS) + 64, 0)
    np.testing.assert_array_equal(self.emulate(p), want)

  def test_divergence(self):
    p = Ptx(())
    with p.when(p.new("r", "mov.u32", "%laneid") < 5):
      p.u32(0)
    with self.assertRaisesRegex(PtxError, "lanes of the warp disagree.*@!p0 bra.uni L1;"):
      run(p, Memory())
    p = Ptx(())
    p.emit("bar.sync", 0, 128, when=p.new("r", "mov.u32", "%laneid") < 5)
    with self.assertRaisesRegex(PtxError, "disagree"):
      run(p, Memory())

  def test_a_register_never_written(self):
    p = Ptx(("y",))
    p.load("shared", Mem(p.register("r")))
    with self.assertRaisesRegex(PtxError, "multiple of 4"):
      self.emulate(p)
    p = Ptx(("y",))
    with p.when(p.register("p")):
      p.u32(0)
    with self.assertRaisesRegex(PtxError, "disagree"):
      self.emulate(p)

  def test_hangs(self):
    p = Ptx(())
    with p.when(p.from_lane(p.new("r", "mov.u32", "%tid.x"), 0).ne(0)):
      p.sync(THREADS)
    with self.assertRaisesRegex(PtxError, "hangs: warp 1 waits for barrier 0, where 3 of 4 warps"):
      run(p, Memory())
    p = Ptx(())
    p.emit("bar.arrive", 1, 2 * THREADS)
    with self.assertRaisesRegex(PtxError, "ends at barrier 1, where 4 of 8 warps"):
      run(p, Memory())
    p = Ptx(())
    with p.loop():
      p.u32(0)
    with self.assertRaisesRegex(PtxError, "more than 1000 instructions"):
      run(p, Memory(), limit=1000)

  def test_unknown(self):
    for name in ("sin.approx.f32", "mul.f64", "setp.lt.f64", "mma.sync.aligned.m8n8k4"):
      p = Ptx(())
      p.emit(name, p.register("f"), p.register("f"), p.register("f"))
      with self.assertRaisesRegex(NotImplementedError, name):
        run(p, Memory())

  @parameterized.parameters(
    ("add.u32", "f", 1, 2), ("mul.f32", "f", 1.0, 2), ("add.u32", "r", "%laneid", 2)
  )
  def test_operands_that_ptxas_refuses(self, name, kind, *args):
    p = Ptx(())
    p.emit(name, p.register(kind), *args)
    with self.assertRaises(TypeError):
      run(p, Memory())

  def test_counts(self):
    p = Ptx(())
    i = p.u32(0)
    with p.loop() as loop:
      loop.leave_if(i >= 5)
      p.set(i, i + 1)
    result = run(p, Memory(), programs=range(3), threads=64)
    self.assertEqual(result.counts["add.u32"], 5 * 3 * 2)
    self.assertEqual(result.counts["setp.ge.u32"], 6 * 3 * 2)
    self.assertEqual(result.instructions, (3 + 12 + 15 + 0) * 6)


class CopyTest(TestCase):
  """A warp, or several, reads what bulk copies bring."""

  BYTES = 512

  def program(self, fault=None, expect=BYTES, tiles=3, bulk=True):
    p = Ptx(("x", "y"))
    thread = p.new("r", "mov.u32", "%tid.x")
    first = thread.eq(0)
    barrier, nbytes = Mem(p.smem, 2 * self.BYTES), self.BYTES
    arrivals = 1 if bulk else 32
    p.emit("mbarrier.init.shared::cta.b64", barrier, arrivals, when=first)
    p.emit("fence.mbarrier_init.release.cluster")
    if fault != "unknown barrier":
      p.sync(THREADS)
    if fault == "written before":
      p.store("shared", Mem(p.smem + thread * 4), [thread])
    phase = p.u32(0)
    for tile in range(tiles):
      buffer = Mem(p.smem, tile % 2 * nbytes)
      source = p.address(p.pointer("x"), p.u32(tile), nbytes)
      with p.when(p.from_lane(thread, 0).eq(0)):
        if bulk:
          at = p.new("r", "add.u32", p.smem, buffer.offset)
          name = "mbarrier.arrive.expect_tx.shared::cta.b64"
          p.emit(name, "_", barrier, expect, when=first)
          if fault == "arrives twice":
            p.emit("mbarrier.arrive.shared::cta.b64", "_", barrier, when=first)
          name = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
          p.emit(name, Mem(at), Mem(source), nbytes, barrier, when=first)
        else:
          lane = Mem(p.smem + thread * 16, buffer.offset)
          source = Mem(p.new("d", "add.u64", source, p.new("d", "mul.wide.u32", thread, 16)))
          p.emit("cp.async.cg.shared.global", lane, source, 16)
          if fault != "nothing arrives":
            p.emit("cp.async.mbarrier.arrive.noinc.shared::cta.b64", barrier)
      if fault == "reads early":
        p.load("shared", buffer)
      if fault != "no wait":
        with p.loop() as polling:
          name = "mbarrier.try_wait.parity.shared::cta.b64"
          ready = p.new("p", name, barrier, phase)
          if fault == "no loop":
            polling.leave_if(p.program.eq(0))
          polling.leave_if(ready)
      if fault == "writes":
        p.store("shared", buffer, [5])
      (x,) = p.load("shared", Mem(p.smem + thread * 4, buffer.offset))
      at = p.address(p.pointer("y"), thread + tile * THREADS, 4)
      p.store("global", Mem(at), [x])
      p.set(phase, phase ^ 1)
      if fault != "no release" and tile % 2:
        p.sync(THREADS)
    return p

  def check(self, program, reverse=False, tiles=3):
    x = np.random.default_rng(0).integers(0, 2**32, (4, THREADS)).astype(np.uint32)
    memory = Memory({"x": x}, {"y": of_type((4, THREADS))})
    run(program, memory, smem_bytes=2 * self.BYTES + 8, reverse=reverse)
    np.testing.assert_array_equal(memory.array("y")[:tiles], x[:tiles])

  @parameterized.product(bulk=(True, False), reverse=(True, False))
  def test_copies(self, bulk, reverse):
    self.check(self.program(bulk=bulk), reverse)

  @parameterized.parameters(
    ("unknown barrier", "race: another warp made the mbarrier|no mbarrier at byte 1024"),
    ("arrives twice", "1 arrivals, but 0 are missing"),
    ("reads early", "race: warp . reads byte .*, written by a copy of the mbarrier at byte 1024"),
    ("no wait", "race|arrivals"),
    ("no loop", "race: warp . reads"),
    ("writes", "race: warp . writes"),
    ("written before", "race: warp . writes byte .*, written by a copy"),
    ("no release", "race: warp 0 overwrites byte .*, read by warp"),
  )
  def test_faults(self, fault, message):
    with self.assertRaisesRegex(PtxError, message):
      self.check(self.program(fault))

  def test_a_copy_to_where_others_have_written(self):
    with self.assertRaisesRegex(PtxError, "race: warp 0 overwrites byte .*, written by warp"):
      self.check(self.program("written before"), reverse=True)

  @parameterized.product(arrives=(True, False), reverse=(True, False))
  def test_arrivals_synchronise(self, arrives, reverse):
    """Threads give each other words; an mbarrier takes the place of bar.sync."""
    p = Ptx(("y",))
    thread = p.new("r", "mov.u32", "%tid.x")
    barrier = Mem(p.smem, 512)
    p.emit("mbarrier.init.shared::cta.b64", barrier, THREADS, when=thread.eq(0))
    p.sync(THREADS)
    if arrives:
      p.store("shared", Mem(p.smem + thread * 4), [thread * 3])
    p.emit("mbarrier.arrive.shared::cta.b64", "_", barrier)
    if not arrives:
      p.store("shared", Mem(p.smem + thread * 4), [thread * 3])
    with p.loop() as polling:
      polling.leave_if(p.new("p", "mbarrier.try_wait.parity.shared::cta.b64", barrier, 0))
    (x,) = p.load("shared", Mem(p.smem + (thread ^ 64) * 4))
    p.store("global", Mem(p.address(p.pointer("y"), thread, 4)), [x])
    memory = Memory(outputs={"y": of_type((THREADS,))})
    start = functools.partial(run, p, memory, smem_bytes=520, reverse=reverse)
    if arrives:
      start()
      np.testing.assert_array_equal(memory.array("y"), (np.arange(THREADS) ^ 64) * 3)
    else:
      with self.assertRaisesRegex(PtxError, "race"):
        start()

  def test_wrong_expectations(self):
    with self.assertRaisesRegex(PtxError, "hangs: .*528 bytes expected, 512 copied, 16 too few"):
      self.check(self.program(expect=528))
    with self.assertRaisesRegex(PtxError, "hangs: .*256 bytes expected, 512 copied, 256 too many"):
      self.check(self.program(expect=256))
    with self.assertRaisesRegex(PtxError, "hangs: .*32 of 32 arrivals missing"):
      self.check(self.program("nothing arrives", bulk=False))

  def test_the_end(self):
    with self.assertRaisesRegex(PtxError, "ends with copies in flight"):
      p = self.program(tiles=1)
      stop = next(i for i, x in enumerate(p.instructions) if x.op.startswith("mbarrier.try_wait"))
      p.instructions = p.instructions[: stop - 1]
      self.check(p)

  @parameterized.parameters((8, 0, 16), (0, 8, 16), (0, 0, 24), (0, 0, 4096), (4096, 0, 16))
  def test_addresses(self, target, source, nbytes):
    p = Ptx(("x",))
    first = p.new("r", "mov.u32", "%tid.x").eq(0)
    barrier = Mem(p.smem, 1024)
    p.emit("mbarrier.init.shared::cta.b64", barrier, 1, when=first)
    p.emit(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
      Mem(p.smem, target),
      Mem(p.pointer("x"), source),
      nbytes,
      barrier,
      when=first,
    )
    with self.assertRaisesRegex(PtxError, "multiple of 16|out of bounds|of shared memory"):
      run(p, Memory({"x": np.zeros(64, np.uint32)}), threads=32, smem_bytes=1032)

  @parameterized.parameters(True, False)
  def test_copies_of_what_loads_may_not_read(self, read_all):
    x = np.arange(4 * THREADS, dtype=np.uint32).reshape(4, THREADS)
    settings = {"readable": {"x": np.arange(4)[:, None] != 1}, "copies_read_all": read_all}
    memory = Memory({"x": x}, {"y": of_type((4, THREADS))}, **settings)
    start = functools.partial(run, self.program(), memory, smem_bytes=2 * self.BYTES + 8)
    if read_all:
      start()
      np.testing.assert_array_equal(memory.array("y")[:3], x[:3])
    else:
      with self.assertRaisesRegex(PtxError, "the copy touches byte 512 of x"):
        start()


if __name__ == "__main__":
  absltest.main()
