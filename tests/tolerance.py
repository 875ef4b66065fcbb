"""How close two results have to be, derived from the arithmetic that made them.

Two effects are added up. Values that are stored in a dtype are rounded to it a few times on the way
(operands, gates, state, output); those errors average out in a sum, so they do not grow with its
length relative to the result, and ``ROUNDINGS`` of them are allowed. A sum of ``size`` terms adds
rounding of its own, in the dtype that it is accumulated in, which is float32 at least; errors of
random sign grow with the square root of the number of terms, and ``SPREAD`` standard deviations
of them are allowed.

The absolute part is in units of the largest entry of the array: a small entry is a difference of
larger terms and inherits their errors. An array of zeros therefore has to be matched exactly, which
is what masked outputs and gradients promise.
"""

from typing import Any

import ml_dtypes
import numpy as np

ROUNDINGS = 8
SPREAD = 4


def tolerance(dtype: Any, size: int = 1) -> dict[str, float]:
    """Relative and absolute tolerance, the latter for arrays whose largest entry is 1.

    Args:
        dtype: The least precise dtype that values are kept in on the way.
        size: How many terms are summed into one entry: the width of the matmul, times the number of
            steps where a loop hands errors on.

    Returns:
        ``{"rtol": ..., "atol": ...}``, the arguments of ``numpy.testing.assert_allclose``.
    """
    stored = float(ml_dtypes.finfo(np.dtype(dtype)).eps)
    accumulated = min(stored, float(np.finfo(np.float32).eps))
    bound = ROUNDINGS * stored + SPREAD * accumulated * float(size) ** 0.5
    return {"rtol": bound, "atol": bound}


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """``{path: array}`` of nested dicts, tuples, lists and named tuples; None is an empty tree."""
    if value is None:
        return {}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif isinstance(value, (tuple, list)):
        value = dict(enumerate(value))
    if not hasattr(value, "items"):
        return {path or "value": value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found.update(leaves(item, f"{path}.{key}" if path else str(key)))
    return found


def assert_close(
    got: Any, want: Any, dtype: Any = np.float32, size: int = 1, scale: float | None = None
) -> None:
    """Compare two trees of arrays leaf by leaf and name the leaf that differs.

    Args:
        got: Arrays, or dicts, tuples and named tuples of them.
        want: The same names; a named tuple and a dict with its fields count as the same.
        dtype: Passed to ``tolerance``.
        size: Passed to ``tolerance``.
        scale: The size of the terms behind an entry; None takes each wanted array's largest entry.
    """
    got, want = leaves(got), leaves(want)
    assert sorted(got) == sorted(want), f"got leaves {sorted(got)}, want {sorted(want)}"
    bound = tolerance(dtype, size)
    for name, expected in want.items():
        actual = np.asarray(got[name]).astype(np.float64)
        expected = np.asarray(expected).astype(np.float64)
        assert actual.shape == expected.shape, f"{name}: {actual.shape}, want {expected.shape}"
        finite = np.abs(expected[np.isfinite(expected)])
        unit = scale if scale is not None else float(finite.max(initial=0.0))
        np.testing.assert_allclose(
            actual, expected, rtol=bound["rtol"], atol=bound["atol"] * unit, err_msg=name
        )
