"""Wide rows hold the values of the file's rows, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, dequantize
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from forerun.backends.panels import RawMatrix
from forerun.zoo.formats import WIDENED, loaded_type, row_bytes
from forerun.zoo.wide_rows import wide_rows


@pytest.mark.parametrize("type", WIDENED)
@given(st.integers(0, 2**32 - 1))
@np.errstate(invalid="ignore")
def test_any_bytes_keep_their_values(type: Type, seed: int) -> None:
    """All bytes are valid. Scales may be infinite or no numbers, which they stay."""
    block_inputs, block_bytes = GGML_QUANT_SIZES[type]
    rows = np.random.default_rng(seed).integers(0, 256, (9, 3 * block_bytes), np.uint8)
    expected = dequantize(rows, type)
    stored = RawMatrix(wide_rows(rows, type), WIDENED[type])
    assert stored.inputs == 3 * block_inputs
    assert stored.rows.shape == (9, row_bytes(loaded_type(type), stored.inputs))
    values = stored.floats().numpy()
    is_number = ~np.isnan(expected)
    assert (np.isnan(values) == ~is_number).all()
    assert (values.view(np.uint32) == expected.view(np.uint32))[is_number].all()


@pytest.mark.parametrize("type", WIDENED)
def test_all_places_of_a_table_are_kept(type: Type) -> None:
    """Each of the up to 2,048 groups of a table occurs, with all signs."""
    block_bytes = GGML_QUANT_SIZES[type][1]
    rows = np.random.default_rng(0).integers(0, 256, (2000, block_bytes), np.uint8)
    rows[:, -2:] = rows[:, -2:] & 0x3F  # the scale of TQ, and a part of that of IQ1_M
    rows[:, :2] = rows[:, :2] & 0x3F  # the scale of all others
    stored = RawMatrix(wide_rows(rows, type), WIDENED[type])
    assert (stored.floats().numpy() == dequantize(rows, type)).all()
