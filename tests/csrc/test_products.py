"""The C library's matrices.

Panels hold the file's values, and each instruction set gives the same bits.
"""

import ctypes
import subprocess

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.backends.panels import PackedMatrix, RawMatrix
from forerun.csrc.build import VARIANT_FLAGS
from forerun.csrc.library import library, variants
from forerun.zoo.formats import LIBRARY_FORMATS, WideType, format_number
from forerun.zoo.wide_rows import wide_rows
from tests.support.compiling import CROSS, QEMU, compiled, cross_library, needs_cross
from tests.support.native import native_settings

restored = pytest.fixture(autouse=True)(native_settings)

WIDE = [type.name for type in WideType]
FORMATS = [*(type.name for type in LIBRARY_FORMATS), *WIDE]
FLOATS = {"F16", "BF16", "F32"}
# Where the float16 fields of a block are, in float16 units.
HALVES = {
    "Q4_K": (0, 1),
    "Q5_K": (0, 1),
    "Q6_K": (104,),
    "Q4_0": (0,),
    "Q4_1": (0, 1),
    "Q5_0": (0,),
    "Q5_1": (0, 1),
}
HALVES |= {
    "Q8_0": (0,),
    "Q3_K": (54,),
    "Q2_K": (40, 41),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "IQ1_M": (),
}
HALVES |= {name: (0,) for name in WIDE if name != "IQ1_M"}
EXPONENTS = [0, 1, 2, *range(100, 140)]  # of MXFP4; below 2 they are of subnormal numbers


def kind(name):
    return gguf.GGMLQuantizationType[name]


def step(name):
    """How many inputs a block of a format has, in panels."""
    return 8 if name in FLOATS else gguf.GGML_QUANT_SIZES[kind(name)][0]


def random_rows(name, outputs, inputs, seed):
    """Rows as in a file: random codes, and scales that are no NaN."""
    rng = np.random.default_rng(seed)
    if name in FLOATS:
        floats = rng.standard_normal((outputs, inputs), dtype=np.float32)
        return quantize(floats, kind(name)).reshape(outputs, -1).view(np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[kind(name)]
    rows = rng.integers(0, 256, (outputs, inputs // block, size), dtype=np.uint8)
    for at in HALVES[name]:
        scales = (rng.standard_normal(rows.shape[:2]) * 0.02).astype(np.float16)
        rows[:, :, 2 * at : 2 * at + 2] = scales[:, :, None].view(np.uint8)
    if name == "MXFP4":
        rows[:, :, 0] = rng.choice(EXPONENTS, rows.shape[:2])
    if name == "IQ1_M":  # whose scale lies in the high halves of four bytes
        rows[:, :, 55] = rows[:, :, 55] & 0x8F | 0x20
    return rows.reshape(outputs, -1)


def raw(name, rows):
    if name in WIDE:
        return RawMatrix(wide_rows(rows, kind(name)), WideType[name])
    return RawMatrix(rows, kind(name))


def packed(name, rows):
    return PackedMatrix(raw(name, rows))


def products(matrix, x):
    results = {}
    for variant in variants():
        library().fr_select(variant.encode())
        assert library().fr_variant() == variant.encode()
        results[variant] = matrix(torch.from_numpy(x)).numpy()
    assert "plain" in results
    return results


def same_bits(one, other):
    return one.shape == other.shape and (one.view(np.uint32) == other.view(np.uint32)).all()


def rounded(x):
    """The inputs as records hold them, in float64."""
    blocks = x.reshape(x.shape[0], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest))
    scale = (largest / np.float32(127)).astype(np.float64)
    return (np.rint(blocks * inverse).astype(np.float64) * scale).reshape(x.shape)


@st.composite
def cases(draw):
    name = draw(st.sampled_from(FORMATS))
    inputs = step(name) * draw(st.integers(1, 40 if step(name) < 256 else 5))
    return (
        name,
        draw(st.integers(1, 35)),
        inputs,
        draw(st.integers(1, 40)),
        draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("inputs", [32, 64, 256, 288, 512, 576, 896, 1536, 8960])
def test_panels_hold_the_files_values_and_take_at_most_a_twentieth_more(name, inputs):
    if inputs % step(name):
        number = format_number(WideType[name] if name in WIDE else kind(name))
        assert library().fr_panel_bytes(number, 8, inputs, None) == 0
        return
    rows = random_rows(name, 11, inputs, inputs)
    expected = dequantize(rows, kind(name))
    matrix = packed(name, rows)
    assert same_bits(matrix.floats().numpy(), expected)
    stored = raw(name, rows)
    for some in (matrix.floats([10, 3]), stored.chosen([10, 3]).floats()):
        assert same_bits(some.numpy(), expected[[10, 3]])
    values = np.zeros(inputs, dtype=np.float32)
    for row, wanted in zip(stored.rows, expected, strict=True):
        assert not library().fr_values(
            format_number(stored.type), row.ctypes.data, row.nbytes, inputs, values.ctypes.data
        )
        assert same_bits(values, wanted)
    assert library().fr_unpack(ctypes.byref(matrix.argument), 11, values.ctypes.data) == -1
    if name not in FLOATS | {"Q3_K", "Q2_K"}:
        stored = raw(name, random_rows(name, 64, inputs, 0))
        assert PackedMatrix(stored).nbytes <= 1.05 * stored.nbytes


@settings(max_examples=200, deadline=None)
@given(cases())
def test_products_are_near_the_exact_ones_and_the_same_on_every_variant(case):
    name, outputs, inputs, rows, seed = case
    weights = random_rows(name, outputs, inputs, seed)
    matrix = packed(name, weights)
    values = dequantize(weights, kind(name)).astype(np.float64)
    x = np.random.default_rng(seed).standard_normal((rows, inputs), dtype=np.float32)
    x[:, : inputs // 3] *= 100
    results = products(matrix, x)
    inputs_read = x.astype(np.float64) if name in FLOATS else rounded(x)
    error = np.abs(results["plain"] - inputs_read @ values.T)
    # Q4_0's minimum is added apart from its codes, so the bound counts all that is added.
    bound = np.abs(inputs_read) @ (np.abs(values) + np.abs(values).max(1, keepdims=True)).T
    assert (error <= 1e-6 * bound).all()
    for variant, result in results.items():
        assert same_bits(result, results["plain"]), variant


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_a_row_has_the_same_bits_beside_any_others(case, data):
    name, outputs, inputs, rows, seed = case
    matrix = packed(name, random_rows(name, outputs, inputs, seed))
    x = np.random.default_rng(seed).standard_normal((rows, inputs), dtype=np.float32)
    row = data.draw(st.integers(0, rows - 1))
    other = np.random.default_rng(seed + 1).standard_normal(
        (data.draw(st.integers(1, 16)), inputs), dtype=np.float32
    )
    at = data.draw(st.integers(0, len(other) - 1))
    other[at] = x[row]
    for one, two in zip(
        products(matrix, x).values(), products(matrix, other).values(), strict=True
    ):
        assert same_bits(one[row], two[at])


def fma(a, b, c):
    """a x b + c, rounded once: the sum of doubles is rounded to odd first."""
    product = a.astype(np.float64) * b
    c = np.float64(c)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    odd = bits + np.where((error > 0) == (total > 0), 1, -1)
    return np.where((error != 0) & (bits % 2 == 0), odd, bits).view(np.float64).astype(np.float32)


def with_halves(name, rows, values):
    """Rows whose float16 fields are these."""
    rows = rows.reshape(len(rows), -1, gguf.GGML_QUANT_SIZES[kind(name)][1]).copy()
    for at, value in zip(HALVES[name], values, strict=True):
        rows[:, :, 2 * at : 2 * at + 2] = np.float16([value]).view(np.uint8)
    return dequantize(rows.reshape(len(rows), -1), kind(name)).reshape(len(rows), -1, 32)


def in_the_written_order(name, rows, x):
    """The products, float by float as the head of products.c has them."""
    block, size = gguf.GGML_QUANT_SIZES[kind(name)]
    units = rows.reshape(len(rows), -1, size)
    if name == "MXFP4":
        d = np.ldexp(np.float32(1), units[:, :, 0].astype(int) - 128)
        codes = dequantize(rows, kind(name)).reshape(*d.shape, 32) / d[:, :, None]
        return summed(name, x, codes, d)
    if name in WIDE:
        wide = wide_rows(rows, kind(name)).reshape(len(rows), -1, 146)
        d = np.repeat(wide[:, :, :2].copy().view(np.float16).astype(np.float32) / 8, 8, 2)
        codes = dequantize(rows, kind(name)).reshape(*d.shape, 32) / d[..., None]
        return summed(name, x, codes.reshape(len(rows), -1, 32), d.reshape(len(rows), -1))
    halves = [
        units[:, :, 2 * at : 2 * at + 2].copy().view(np.float16)[:, :, 0] for at in HALVES[name]
    ]
    d, m = (np.repeat(each.astype(np.float32), block // 32, 1) for each in (halves * 2)[:2])
    codes = with_halves(name, rows, (1, 0)[: len(halves)])
    least = None
    if len(halves) == 2:
        least = with_halves(name, rows, (0, 1))
    if name in ("Q4_K", "Q5_K"):
        scales = gguf.quants.Q4_K.get_scale_min(units[:, :, 4:16].reshape(-1, 12))[0].reshape(
            len(rows), -1
        )
        codes = codes / np.maximum(scales, 1)[:, :, None]
        d = d * scales.astype(np.float32)
        m = m * least[:, :, 0]
    if name == "IQ4_XS":
        scales = signed_scales(units)
        codes = codes / np.where(scales, scales, 1)[:, :, None]
        d = d * scales
    return summed(name, x, codes, d, m, least)


def signed_scales(units):
    """The scales of the blocks of IQ4_XS."""
    high = units[:, :, 2:4].copy().view(np.uint16) >> 2 * np.arange(8) & 3
    low = np.repeat(units[:, :, 4:8], 2, 2) >> np.tile([0, 4], 4) & 15
    return (low + 16 * high - np.float32(32)).astype(np.float32).reshape(len(units), -1)


def summed(name, x, codes, d, m=None, least=None):
    """The sums over blocks of codes, with their scales, and of minimums."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    q = np.rint(blocks * (np.float32(127) / largest))
    scale = (largest / np.float32(127))[:, :, 0]
    f = np.zeros((len(x), len(codes)), dtype=np.float32)
    for b in range(blocks.shape[1]):
        by = scale[:, b, None]
        f = fma((q[:, b].astype(np.float64) @ codes[:, b].T).astype(np.float32) * by, d[:, b], f)
        if name == "Q2_K":
            f = fma(
                (32 * (q[:, b].astype(np.float64) @ least[:, b].T)).astype(np.float32) * by,
                m[:, b] / 32,
                f,
            )
        elif least is not None:
            f = fma(by * q[:, b].sum(1, keepdims=True), m[:, b], f)
    return f


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in FLOATS])
def test_products_have_the_written_order(name):
    inputs = 2 * step(name) + (320 if step(name) < 256 else 0)
    rows = random_rows(name, 19, inputs, 7)
    x = np.random.default_rng(7).standard_normal((11, inputs), dtype=np.float32)
    expected = in_the_written_order(name, rows, x)
    for variant, found in products(packed(name, rows), x).items():
        assert same_bits(found, expected), variant


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "F32"])
def test_rows_that_do_not_fit_the_cache_at_once(name):
    matrix = packed(name, random_rows(name, 9, 8192, 1))
    x = np.random.default_rng(1).standard_normal((70, 8192), dtype=np.float32)
    whole = products(matrix, x)
    single = [products(matrix, x[i : i + 1]) for i in range(70)]
    for variant, found in whole.items():
        assert (found == np.concatenate([own[variant] for own in single])).all()


def test_extreme_codes_do_not_overflow():
    """Every code and input at its largest, with each sign: the int16 sums of AVX2 are full then."""
    x = np.ones((4, 256), dtype=np.float32)
    x[1] = -1
    x[2, ::2] = -1
    for name in set(FORMATS) - FLOATS:
        for byte in (0, 0x80, 0x7F, 0xFF):
            rows = random_rows(name, 8, 256, 3)
            blocks = rows.reshape(8, -1, gguf.GGML_QUANT_SIZES[kind(name)][1])
            scales = [b for at in HALVES[name] for b in (2 * at, 2 * at + 1)]
            scales += {"MXFP4": [0], "IQ1_M": [49, 51, 53, 55]}.get(name, [])
            blocks[:, :, np.setdiff1d(range(blocks.shape[2]), scales)] = byte
            exact = rounded(x) @ dequantize(rows, kind(name)).astype(np.float64).T
            for variant, found in products(packed(name, rows), x).items():
                assert np.allclose(found, exact, rtol=1e-5, atol=1e-3), (name, byte, variant)


def test_inputs_that_are_no_numbers():
    """NaN and infinity make their own row NaN and no other.

    Tiny inputs and zeros give zeros. All variants agree.
    """
    x = np.ones((5, 288), dtype=np.float32)
    x[1, 280] = np.nan
    x[2, 3] = -np.inf
    x[3] = 0
    x[4] = 1e-40
    for out in products(packed("Q4_0", random_rows("Q4_0", 8, 288, 5)), x).values():
        assert np.isfinite(out[0]).all() and np.isnan(out[1:3]).all() and (out[3:] == 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_that_do_not_fit_are_refused(name):
    stored = raw(name, random_rows(name, 8, step(name), 0))
    number = format_number(stored.type)
    inputs = stored.inputs
    rows = stored.rows
    panels = np.zeros(library().fr_panel_bytes(number, 9, inputs, None) + 64, dtype=np.uint8)
    place = panels.ctypes.data + -panels.ctypes.data % 64

    def pack(size=rows.nbytes, outputs=8, inputs=inputs, number=number):
        return library().fr_pack_all(number, rows.ctypes.data, size, outputs, inputs, place)

    assert pack() == 0
    panels[:] = 0
    wrongs = {
        "size": (rows.nbytes - 1, 0),
        "outputs": (9, 0, -8, 2**31 - 1),
        "number": (-1, format_number(WideType.IQ3_S) + 1),
    }
    for name, values in (wrongs | {"inputs": (2 * inputs, inputs - 1, 0, -inputs)}).items():
        for value in values:
            assert pack(**{name: value}) == -1, (name, value)
    assert not panels.any()
    for size, count in ((rows.nbytes // 8 - 1, inputs), (rows.nbytes, inputs - 1)):
        assert library().fr_values(number, rows.ctypes.data, size, count, place) == -1


@pytest.mark.slow
@needs_cross
def test_every_variant_of_aarch64_gives_the_same_bits(tmp_path, shared_folder):
    library = cross_library(shared_folder)
    program = compiled(tmp_path, "product", CROSS, library, ("-Werror",))
    for index, name in enumerate(FORMATS):
        inputs = 576 if step(name) < 256 else 512
        rows = 1 + index % 7  # pairs for i8mm, an odd row, and more than it multiplies at once
        stored = raw(name, random_rows(name, 13, inputs, index))
        weights = stored.rows
        x = np.random.default_rng(index).standard_normal((rows, inputs), dtype=np.float32)
        expected = products(PackedMatrix(stored), x)["plain"].tobytes()
        sizes = map(str, (format_number(stored.type), 13, inputs, rows, weights.nbytes))
        arguments = list(sizes)
        for variant in VARIANT_FLAGS["aarch64"]:
            command = [*QEMU, program, variant, *arguments]
            done = subprocess.run(
                command, input=weights.tobytes() + x.tobytes(), capture_output=True, check=True
            )
            assert done.stdout == expected, (name, variant)
