"""scripts/bench.py --features: that each feature trains, at a size that times nothing."""

import jax
import numpy as np
import pytest
import table

from scripts import bench, bench_features

SIZE = (2, 4, 3, 8)


@pytest.fixture(autouse=True)
def quick_compile():
    with table.quick_compile():
        yield


def test_each_feature_is_measured(monkeypatch):
    monkeypatch.setattr(bench, "PAUSE_SECONDS", 0)
    chosen = ("zoneout (h and c)", "lengths, mask and resets", "layer norm", "projection to 128")
    features = {name: bench_features.FEATURES[name] for name in chosen}
    monkeypatch.setattr(bench_features, "FEATURES", features)
    found = bench_features.measured(bench.measure_calls, 1, SIZE)
    assert list(found) == list(chosen)
    assert all(row["ratio"] > 0 for row in found.values())


@pytest.mark.parametrize("name", bench_features.FEATURES)
def test_features_act(name):
    """What is random differs from call to call, and all gradients are finite."""
    call = bench_features.training_step(bench_features.FEATURES[name], SIZE)
    (first, grads), (second, _) = call(), call()
    random = any(word in name for word in ("dropout", "drop", "zoneout"))
    assert (float(first) != float(second)) == random
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
