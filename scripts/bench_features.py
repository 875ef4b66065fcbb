"""What each feature of a layer costs: `python scripts/bench.py --features`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

# B, T, I, H of all of them.
SIZE = (32, 128, 256, 256)
RATE = 0.3


class Feature(NamedTuple):
    """A layer beside the plain LSTM: its options, and what its call gets.

    Attributes:
        options: of `jaxrnn.linen.LSTM`.
        given: names of the arrays of `flags` that the call gets.
        at_most: the target for the ratio to the plain LSTM's training step; None has none.
    """

    options: Mapping[str, Any] = MappingProxyType({})
    given: tuple[str, ...] = ()
    at_most: float | None = 1.15


FEATURES = {
    "lengths": Feature(given=("lengths",)),
    "mask": Feature(given=("mask",)),
    "resets": Feature(given=("resets",)),
    "lengths, mask and resets": Feature(given=("lengths", "mask", "resets"), at_most=None),
    "zoneout (h and c)": Feature({"zoneout": 0.1}),
    "variational dropout (input and output)": Feature(
        {"variational": True, "input_dropout": RATE, "output_dropout": RATE}
    ),
    "recurrent dropout of h": Feature({"recurrent_dropout": RATE}),
    "recurrent dropout of updates": Feature({"update_dropout": RATE}),
    "weight drop": Feature({"weight_dropout": RATE}),
    "dropout (input and output)": Feature(
        {"input_dropout": RATE, "output_dropout": RATE}, at_most=None
    ),
    "gradient clip": Feature({"gradient_clip": 1.0}, at_most=None),
    "layer norm": Feature({"layer_norm": True}, at_most=1.4),
    "projection to 128": Feature({"proj_size": 128}, at_most=None),
    "peepholes": Feature({"peepholes": True}, at_most=None),
}


def flags(size: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """Lengths from half of T up, a mask with a tenth of holes, resets at one step in fifty."""
    rng = np.random.default_rng(0)
    batch, steps, _, _ = size
    return {
        "lengths": rng.integers(steps // 2, steps + 1, batch).astype(np.int32),
        "mask": rng.random((batch, steps)) < 0.9,
        "resets": rng.random((batch, steps)) < 0.02,
    }


def training_step(feature: Feature, size: tuple[int, int, int, int]) -> Callable[[], Any]:
    """A compiled training step; all masks are drawn inside of it, from a key that changes."""
    import jax
    import jax.numpy as jnp

    from jaxrnn import linen

    batch, steps, inputs, hidden = size
    layer = linen.LSTM(hidden, **feature.options)
    k_params, k_x, k_dy = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(k_x, (batch, steps, inputs))
    dy = jax.random.normal(k_dy, (batch, steps, feature.options.get("proj_size", hidden)))
    given = {name: jnp.asarray(flags(size)[name]) for name in feature.given}
    params = layer.init({"params": k_params, "dropout": k_params}, x[:, :1])
    count = 0

    @jax.jit
    def step(params: Any, x: Any, dy: Any, given: Any, count: Any) -> Any:
        rngs = {"dropout": jax.random.fold_in(k_params, count)}

        def loss(params: Any, x: Any) -> Any:
            y, _ = layer.apply(params, x, **given, rngs=rngs)
            return jnp.sum(y * dy)

        return jax.value_and_grad(loss, argnums=(0, 1))(params, x)

    def call() -> Any:
        nonlocal count
        count += 1
        return jax.block_until_ready(step(params, x, dy, given, count))

    return call


def measured(measure: Callable[..., Any], repeats: int, size: Any = SIZE) -> dict[str, Any]:
    """Ratios to the plain LSTM's training step, each taken in turns with it.

    Args:
        measure: `bench.measure_calls`.
        repeats: timed calls of each.
        size: B, T, I, H.

    Returns:
        for each feature the two medians in milliseconds, the median of paired ratios, the target.
    """
    from statistics import median

    plain = training_step(Feature(), size)
    found = {}
    for name, feature in FEATURES.items():
        calls = {"plain": plain, "feature": training_step(feature, size)}
        seconds = measure(calls, repeats)
        pairs = zip(seconds["feature"], seconds["plain"], strict=True)
        found[name] = {
            "plain_ms": median(seconds["plain"]) * 1e3,
            "median_ms": median(seconds["feature"]) * 1e3,
            "ratio": median(a / b for a, b in pairs),
            "at_most": feature.at_most,
        }
    return found
