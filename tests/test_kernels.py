"""The fused kernels in Pallas' interpreter: the same function as the scan and the oracles.

The interpreter fills what a kernel has not written with NaN, and so would a wrong index show.
"""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
import user_cells
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from table import B, H, T
from tolerance import assert_close

import jaxrnn
import jaxrnn.linen
from jaxrnn import cells, recurrence
from jaxrnn.recurrence import fused
from pallas_kernels import targets
from pallas_kernels.step import tiles as step_tiles

PARTS = ("y", "final", "dparams", "dx", "dstate")
CELLS = [name for name, row in table.CELLS.items() if row.cell.step is None]


@contextlib.contextmanager
def interpreted(family: str, monkeypatch):
    """Kernels run in the interpreter; "step" where a matrix would fit on the chip, too."""
    with targets.compiling_for("interpreter"), monkeypatch.context() as patch:
        if family == "step":
            patch.setattr(fused.walk_tiles, "resident_fits", lambda *_: False)
        yield


def families(name: str) -> tuple[str, ...]:
    if not table.CELLS[name].cell.h_gates:
        return ("elementwise",)
    return ("step",) if name == "lstm_projected" else ("resident", "step")


def covering() -> list[tuple[str, str, str]]:
    """Cell, feature, family: every pair of these two and two, or all of it."""
    rows = []
    for i, (name, feature) in enumerate(table.covering(CELLS)):
        found = families(name)
        chosen = found if table.WHOLE_TABLE else (found[i % len(found)],)
        rows += [(name, feature, family) for family in chosen]
    return rows


def pallas_calls(jaxpr) -> list[str]:
    """Names of the kernels in a jaxpr, those inside loops included."""
    names = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            names.append(eqn.params["name"] or eqn.params["name_and_src_info"].name)
        for inner in jaxprs_in_params(eqn.params):
            names += pallas_calls(inner)
    return names


def named(parts):
    return dict(zip(PARTS, parts, strict=True))


# Equations and gradients.


@pytest.mark.parametrize(("name", "feature", "family"), covering())
def test_kernels_are_the_oracles(name, feature, family, monkeypatch):
    problem = table.problem(name, feature, np.float32)

    def compute(params, x, state, dy, dfinal):
        p = problem._replace(params=params, x=x, state=state, dy=dy, dfinal=dfinal)
        return table.by_library(p, implementation="pallas")

    with interpreted(family, monkeypatch), table.quick_compile():
        traced = jax.jit(compute).trace(*problem[1:6])
        got = traced.lower().compile()(*problem[1:6])
    kernels = pallas_calls(traced.jaxpr.jaxpr)
    assert {kernel.split("_")[0] for kernel in kernels} == {family}
    assert_close(named(got), named(table.by_oracle(problem)), np.float32, size=T * H)


# Case C19, a covering set: sizes that are no multiple of any tile, and one of each that is.
SIZES = [
    ("lstm", 1, 33, 5),
    ("gru", 7, 16, 4),
    ("elman_tanh", 16, 3, 5),
    ("lstm", 48, 1, 3),
    ("gru", 100, 33, 3),
    ("elman_relu", 128, 16, 2),
    ("lstm", 650, 3, 3),
    ("layer_norm_lstm", 100, 3, 3),
    ("gru", 1024, 1, 2),
    ("sru", 1, 3, 5),
    ("sru", 100, 33, 5),
    ("sru", 650, 16, 3),
]


def compare_with_scan(cell, hidden, batch, steps, dtype, **how):
    """Values and gradients by kernels, beside those of the scan in float32."""
    rng = np.random.default_rng(0)
    params = cell.init_params(jax.random.key(0), hidden, hidden, jnp.float32)
    params = jax.tree.map(lambda a: a + 0.1 * rng.normal(size=a.shape).astype(a.dtype), params)
    x = rng.normal(size=(steps, batch, hidden)).astype(np.float32)
    state = jax.tree.map(
        lambda a: rng.normal(size=a.shape).astype(np.float32),
        cell.init_state(params, batch, jnp.float32),
    )
    lengths = rng.integers(0, steps + 1, batch)
    resets = rng.random((steps, batch)) < 0.3

    def compute(implementation, dtype):
        def run(params, x, state):
            y, final = recurrence(
                cell,
                params,
                x,
                state,
                lengths=lengths,
                resets=resets,
                dtype=dtype,
                implementation=implementation,
                **how,
            )
            return y.astype(jnp.float32), final

        @jax.jit
        def both(params, x, state):
            results, pull = jax.vjp(run, params, x, state)
            return named([*results, *pull(jax.tree.map(jnp.cos, results))])

        with table.quick_compile():
            return both(params, x, state)

    got = compute("pallas", dtype)
    assert_close(got, compute("xla", "float32"), dtype, size=steps * hidden)


@pytest.mark.parametrize(("name", "hidden", "batch", "steps"), SIZES)
def test_sizes_that_fit_no_tile(name, hidden, batch, steps, monkeypatch):
    with interpreted("", monkeypatch):
        compare_with_scan(table.CELLS[name].cell, hidden, batch, steps, np.float32)


def test_steps_that_fill_no_body_of_the_loop(monkeypatch):
    plan = step_tiles.step
    monkeypatch.setattr(step_tiles, "step", lambda *a: plan(*a)._replace(unroll=3))
    with interpreted("step", monkeypatch):
        compare_with_scan(cells.lstm(), 20, 3, 7, np.float32, reverse=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["resident", "step"])
def test_half_precision(family, dtype, monkeypatch):
    with interpreted(family, monkeypatch):
        compare_with_scan(cells.gru(), 24, 5, 6, dtype)


def test_half_precision_without_a_matmul(monkeypatch):
    with interpreted("", monkeypatch):
        compare_with_scan(cells.sru(), 24, 5, 6, "bfloat16")


# A user's own cell.


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("peephole", "resident"),
        ("peephole", "step"),
        ("minimal", "resident"),
        ("minimal", "step"),
        ("projected", "step"),
    ],
)
def test_a_users_own_cell(name, family, monkeypatch):
    with interpreted(family, monkeypatch):
        compare_with_scan(user_cells.ALL[name], 20, 3, 5, np.float32)


# Projected outputs.


@pytest.mark.parametrize(
    ("hidden", "out", "batch", "steps", "dtype"),
    [(20, 7, 3, 5, "float32"), (7, 40, 17, 4, "float32"), (48, 24, 5, 6, "bfloat16")],
)
def test_a_projection(hidden, out, batch, steps, dtype, monkeypatch):
    """Wider and narrower than H; a launch of its own, forward and backward."""
    with interpreted("", monkeypatch):
        compare_with_scan(cells.lstm(proj_size=out), hidden, batch, steps, dtype)


def test_a_projection_of_normalized_gates(monkeypatch):
    with interpreted("", monkeypatch):
        compare_with_scan(
            cells.lstm(layer_norm=True, proj_size=9), 20, 3, 5, np.float32, reverse=True
        )


def test_launches_of_a_projection(monkeypatch):
    cell = cells.lstm(proj_size=7)
    params = cell.init_params(jax.random.key(0), H, H, jnp.float32)

    def loss(x):
        return recurrence(cell, params, x, implementation="pallas")[0].sum()

    with interpreted("", monkeypatch):
        jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.zeros((T, B, H)))
    kernels = [f"step_projected_lstm_{name}" for name in ("forward", "forward_projection")]
    kernels += [f"step_projected_lstm_{name}" for name in ("backward_of_h", "backward")]
    assert pallas_calls(jaxpr.jaxpr) == kernels


# What surrounds the layer.


@pytest.mark.parametrize("family", ["resident", "step"])
def test_padding_full_of_nan(family, monkeypatch):
    """Case C02."""
    problem = table.problem("gru", "lengths", np.float32)
    spoiled = problem.x.copy()
    spoiled[np.arange(T)[:, None] >= table.LENGTHS] = np.nan
    with interpreted(family, monkeypatch):
        want = table.by_library(problem, implementation="pallas")
        got = table.by_library(problem._replace(x=spoiled), implementation="pallas")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_chunks_and_checkpoint(monkeypatch):
    with interpreted("resident", monkeypatch):
        compare_with_scan(cells.lstm(), 12, 3, 7, np.float32, remat="chunk")


@pytest.mark.parametrize("family", ["resident", "step"])
@pytest.mark.parametrize("in_axes", [(None, 0), (0, 0)], ids=["inputs", "ensemble"])
def test_vmap(in_axes, family, monkeypatch):
    cell, rng = cells.gru(), np.random.default_rng(0)
    params = jax.vmap(lambda key: cell.init_params(key, H, H, jnp.float32))(
        jax.random.split(jax.random.key(0), 2)
    )
    if in_axes[0] is None:
        params = jax.tree.map(lambda a: a[0], params)
    x = rng.normal(size=(2, T, B, H)).astype(np.float32)

    def gradients(implementation):
        def loss(params, x):
            return recurrence(cell, params, x, implementation=implementation)[0].sum()

        return jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), in_axes)(params, x)

    with interpreted(family, monkeypatch):
        got = gradients("pallas")
    assert_close(got, gradients("xla"), np.float32, size=T * H)


@pytest.mark.parametrize("family", ["resident", "step", "elementwise"])
def test_a_sharded_batch_is_not_gathered(family, monkeypatch):
    """Interpreted; compiled for GPUs, and inside shard_map, see test_gpu_compile.py."""
    cell = cells.sru() if family == "elementwise" else cells.lstm()
    params = cell.init_params(jax.random.key(0), H, H, jnp.float32)
    x = jax.random.normal(jax.random.key(1), (T, 8, H))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "data")))

    def loss(params, x):
        y, _ = recurrence(cell, params, x, lengths=jnp.arange(8) % T, implementation="pallas")
        return (y**2).sum()

    gradients = jax.value_and_grad(loss, argnums=(0, 1))
    with interpreted(family, monkeypatch):
        want = jax.jit(gradients)(params, x)
        compiled = jax.jit(gradients).lower(params, sharded).compile()
    assert_close(compiled(params, sharded), want, np.float32, size=T * 8 * H)
    text = compiled.as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text
    assert f"f32[{T},2,{H}]" in text, "a device should have two of the eight rows"


# What can run, and what is said.


def test_the_gpu_decides():
    for gpu, hidden, dtype, family in (
        ("h200", 128, "bfloat16", "resident"),
        ("h200", 129, "bfloat16", "step"),
        ("a100", 128, "float16", "resident"),
        ("a100", 64, "float32", "resident"),
        ("a100", 128, "float32", "step"),
    ):
        told = jaxrnn.explain(cells.lstm(), hidden, hidden, dtype=dtype, gpu=gpu)
        assert (told.implementation, told.family) == ("pallas", family), (gpu, hidden, dtype)
        assert "never run on a GPU" in str(told)


def test_the_default_is_the_scan_where_there_is_no_gpu():
    problem = table.problem("lstm", "plain", np.float32)
    jaxpr = jax.make_jaxpr(lambda x: recurrence(cells.lstm(), problem.params, x)[0])(problem.x)
    assert not pallas_calls(jaxpr.jaxpr)
    told = jaxrnn.explain(cells.lstm(), H, H)
    assert told.implementation == "xla"
    assert "no GPU" in str(told)
    assert jaxrnn.explain(cells.lstm(), H, H, implementation="xla", gpu="h200").family is None


def test_the_default_is_the_kernels_on_a_gpu(monkeypatch):
    problem = table.problem("lstm", "plain", np.float32)

    def kernels(**options):
        def run(x):
            return recurrence(cells.lstm(), problem.params, x, **options)[0]

        with interpreted("resident", monkeypatch):
            return pallas_calls(jax.make_jaxpr(run)(problem.x).jaxpr)

    assert kernels() == ["resident_lstm_forward"]
    assert kernels(implementation="xla") == []
    assert kernels(autodiff=True) == []


def refused(match, cell, dtype="float32", hidden=H):
    params = cell.init_params(jax.random.key(0), hidden, hidden, jnp.float32)
    x = jnp.zeros((T, B, hidden), jnp.float32)
    with targets.compiling_for("interpreter"):
        assert jaxrnn.supported(cell, hidden, hidden, dtype) is not None
        with pytest.raises(NotImplementedError, match=match):
            recurrence(cell, params, x, dtype=dtype, implementation="pallas")
        # By default it runs all the same.
        recurrence(cell, params, x, dtype=dtype)


def gates_with_an_array(pre, state, vectors):
    return pre["a"] * jnp.asarray(np.arange(1.0, H + 1, dtype=np.float32)), {}


def gates_that_slice(pre, state, vectors):
    return jnp.concatenate([pre["a"][:, :1], pre["a"][:, 1:]], axis=1), {}


def test_a_name_raises_with_the_reason(x64):
    refused("a step of its own", cells.gru(reset_after=False))
    weights = cells.sru().loop_weights
    without_matmul = cells.sru()._replace(loop_weights=lambda p: weights(p)._replace(p=jnp.eye(H)))
    refused("projects its output", without_matmul)
    refused("not in float64", cells.lstm(), "float64")
    refused("arrays of shape", cells.elman()._replace(gates=gates_with_an_array))
    refused("concatenate, slice", cells.elman()._replace(gates=gates_that_slice))
    problem = table.problem("lstm", "plain", np.float32)
    with pytest.raises(NotImplementedError, match="no GPU here"):
        recurrence(cells.lstm(), problem.params, problem.x, implementation="pallas")
    with pytest.raises(ValueError, match="autodiff"):
        recurrence(cells.lstm(), problem.params, problem.x, implementation="pallas", autodiff=True)
    with pytest.raises(ValueError, match="no GPU is called 'h300'"):
        jaxrnn.explain(cells.lstm(), H, H, gpu="h300")


def test_explain_takes_a_layer():
    from flax import nnx

    layer = jaxrnn.SRU(32, 64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    told = jaxrnn.explain(layer, gpu="a100")
    assert told.family == "elementwise"
    assert "bfloat16" in told.reason
    assert jaxrnn.explain(jaxrnn.linen.LSTM(256), gpu="h200").family == "step"


def test_tf32_only_by_name():
    plan = partial(fused.plan, cells.lstm(), *fused_types(cells.lstm()), "float32")
    with targets.compiling_for("h200"):
        assert plan().precision == "highest"
        with jax.default_matmul_precision("tensorfloat32"):
            assert plan().precision == "tf32"


def fused_types(cell):
    params = cell.init_params(jax.random.key(0), H, H, jnp.float32)
    return cell.loop_weights(params), H, cell.init_state(params, B, jnp.float32)


def test_no_steps(monkeypatch):
    problem = table.problem("lstm", "lengths", np.float32)
    with interpreted("resident", monkeypatch):
        y, state = recurrence(
            cells.lstm(), problem.params, problem.x[:0], problem.state, implementation="pallas"
        )
    assert y.shape == (0, B, H)
    np.testing.assert_array_equal(state.h, problem.state.h)
