"""`recurrence`: every cell, every feature and every way to a gradient against the oracles."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
import user_cells
from jax.extend.core import jaxprs_in_params
from table import B, H, I, T
from tolerance import assert_close, leaves

from jaxrnn import cells, recurrence
from jaxrnn.cells import GRUState, LSTMState
from jaxrnn.recurrence import chunks, sequence

PARTS = ("y", "final", "dparams", "dx", "dstate")
LSTM = cells.lstm()


def named(parts):
    return dict(zip(PARTS, parts, strict=True))


def assert_same_bits(got, want):
    got, want = leaves(got), leaves(want)
    assert list(got) == list(want)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


# Equations and gradients.


def compare(name, feature, dtype):
    problem = table.problem(name, feature, dtype)
    hows = table.ways(name, feature)

    @jax.jit
    def compute(params, x, state, dy, dfinal):
        p = problem._replace(params=params, x=x, state=state, dy=dy, dfinal=dfinal)
        return {how: table.by_library(p, **options) for how, options in hows.items()}

    with table.quick_compile():
        got = compute(*problem[1:6])
    want = named(table.by_oracle(problem))
    # Layer norm divides by the deviation of a row and subtracts its mean: the terms behind a small
    # gradient are as large as those of the others.
    largest = max(float(np.max(np.abs(leaf))) for leaf in leaves(want).values())
    scale = largest if problem.row.cell.whole_rows else None
    for how, parts in got.items():
        assert_close({how: named(parts)}, {how: want}, dtype, size=T * H, scale=scale)


@pytest.mark.parametrize(("name", "feature"), table.covering(table.CELLS))
def test_values_and_gradients_are_the_oracles(name, feature, x64):
    compare(name, feature, np.float64)


@pytest.mark.parametrize("name", table.CELLS)
def test_values_and_gradients_in_float32(name):
    compare(name, "mask_resets", np.float32)


@pytest.mark.parametrize("cell", user_cells.ALL.values(), ids=user_cells.ALL)
def test_the_rule_holds_for_a_users_own_cell(cell, x64):
    rng = np.random.default_rng(0)
    params = cell.init_params(jax.random.key(0), I, H, jnp.float64)
    state = jax.tree.map(
        lambda a: rng.normal(size=a.shape), cell.init_state(params, B, jnp.float64)
    )
    x = rng.normal(size=(T, B, I))

    def run(params, x, state, **how):
        return recurrence(cell, params, x, state, mask=table.MASK, resets=table.RESETS, **how)

    @jax.jit
    def compute():
        cotangents = jax.tree.map(
            lambda a: jnp.cos(jnp.arange(1, 1 + a.size, dtype=a.dtype)).reshape(a.shape),
            jax.eval_shape(run, params, x, state),
        )
        parts = {}
        for how, options in table.HOW.items():
            results, pull = jax.vjp(functools.partial(run, **options), params, x, state)
            parts[how] = named([*results, *pull(cotangents)])
        return parts

    with table.quick_compile():
        parts = compute()
    want = parts.pop("autodiff")
    if "start" in params:
        assert np.abs(want["dparams"]["start"]).min() > 0  # a reset's gradient arrives there
    for how, got in parts.items():
        assert_close({how: got}, {how: want}, np.float64, size=T * H)


# Padding: cases C01, C02, C04, C05. One program a cell and way serves all of them.

PROGRAMS = [
    ("lstm", "none"),
    ("lstm", "gates"),
    ("lstm", "chunk"),
    ("lstm", "autodiff"),
    ("gru", "gates"),
    ("gru_reset_before", "none"),
    ("sru_projected", "none"),
]


@functools.cache
def program(name, how):
    """A compiled function of x, state and lengths: results and all gradients."""
    problem = table.problem(name, "lengths", np.float32)

    def run(x, state, lengths):
        p = problem._replace(x=x, state=state, options={"lengths": lengths})
        return named(table.by_library(p, **table.HOW[how]))

    return problem, jax.jit(run)


@pytest.mark.parametrize(("name", "how"), PROGRAMS)
def test_a_row_without_real_steps_is_left_alone(name, how):
    """C01."""
    problem, run = program(name, how)
    for lengths in ([4, 0, 2], [0, 0, 0]):
        got = run(problem.x, problem.state, np.array(lengths, np.int32))
        for row in np.flatnonzero(np.equal(lengths, 0)):
            assert not np.any(got["y"][:, row])
            assert not np.any(got["dx"][:, row])
            for part, given in (("final", problem.state), ("dstate", problem.dfinal)):
                jax.tree.map(
                    lambda a, b, row=row: np.testing.assert_array_equal(a[row], b[row]),
                    got[part],
                    given,
                )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(got["dparams"]))


@pytest.mark.parametrize(("name", "how"), PROGRAMS)
def test_what_lies_in_the_padding_changes_nothing(name, how):
    """C02, C05."""
    problem, run = program(name, how)
    lengths = np.array([7, 2, 0], np.int32)
    padding = np.arange(T)[:, None] >= lengths
    x = np.where(padding[:, :, None], np.float32(0), problem.x)
    want = run(x, problem.state, lengths)
    assert not np.any(want["y"][padding])
    assert not np.any(want["dx"][padding])
    assert np.all(np.any(want["dx"][~padding], axis=-1))
    for junk in (np.nan, 1e30, np.inf, -np.inf):
        x[padding] = junk
        assert_same_bits(run(x, problem.state, lengths), want)


def test_all_ways_agree_over_random_lengths():
    """C04."""
    rng = np.random.default_rng(4)
    problem, run = program("lstm", "none")
    for case in range(30):
        lengths = rng.integers(0, T + 1, B).astype(np.int32)
        lengths[case % B] = (0, T)[case % 2]
        args = (problem.x, problem.state, lengths)
        want = run(*args)
        for how in ("gates", "chunk", "autodiff"):
            got = program("lstm", how)[1](*args)
            assert jax.tree.structure(got) == jax.tree.structure(want)
            assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, want)
            assert_close(got, want, np.float32, size=T * H)
    for _ in range(20):
        assert_same_bits(run(*args), want)


# Resets: case C15.


@pytest.mark.parametrize("reverse", [False, True])
def test_a_reset_makes_two_sequences(reverse, x64):
    problem = table.problem("lstm", "plain")
    params, dy = problem.params, problem.dy[:6]
    x, at, lengths = problem.x[:6], 3, np.array([5, 6, 2])
    resets = np.zeros((6, B), bool)
    resets[at, 0] = True

    def gradients(x, dy, dfinal, lengths, resets=None):
        def run(params, x):
            return recurrence(LSTM, params, x, lengths=lengths, resets=resets, reverse=reverse)

        (y, final), pull = jax.vjp(run, params, x)
        return y, final, *pull((dy, dfinal))

    @jax.jit
    def compute():
        whole = [
            gradients(x, dy, problem.dfinal, lengths, flags)
            for flags in (resets, resets.astype(np.int32) * 2)
        ]
        untouched = gradients(x[:, 1:], dy[:, 1:], rows(problem.dfinal, 1, 3), lengths[1:])
        last = rows(problem.dfinal, 0, 1)
        nothing = jax.tree.map(jnp.zeros_like, last)
        pieces = [
            gradients(x[:at, :1], dy[:at, :1], last if reverse else nothing, np.array([3])),
            gradients(x[at:, :1], dy[at:, :1], nothing if reverse else last, np.array([2])),
        ]
        return whole, untouched, pieces

    def rows(state, start, stop):
        return jax.tree.map(lambda a: a[start:stop], state)

    with table.quick_compile():
        whole, untouched, pieces = compute()
    assert_same_bits(whole[0], whole[1])
    y, final, dparams, dx = whole[0]
    first, second = pieces
    close = functools.partial(assert_close, dtype=np.float64, size=T * H)
    close(y, np.concatenate([np.concatenate([first[0], second[0]]), untouched[0]], axis=1))
    close(dx, np.concatenate([np.concatenate([first[3], second[3]]), untouched[3]], axis=1))
    close(rows(final, 0, 1), (first if reverse else second)[1])
    close(rows(final, 1, 3), untouched[1])
    close(dparams, jax.tree.map(lambda *a: sum(a), first[2], second[2], untouched[2]))


def test_a_boundary_in_reverse_is_found_across_a_hole():
    resets = np.array([[0, 0, 0, 1, 0]], bool).T
    mask = np.array([[1, 1, 0, 1, 1]], bool).T
    moved = np.asarray(sequence.resets_in_reverse(jnp.asarray(resets), jnp.asarray(mask)))
    assert moved[mask].tolist() == [False, True, False, False]
    moved = np.asarray(sequence.resets_in_reverse(jnp.asarray(resets), None))
    assert moved[:, 0].tolist() == [False, False, True, False, False]


# What is kept and where the matmuls are, read off the program.


def eqns(jaxpr, name):
    """All equations of a primitive, in inner programs too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from eqns(inner, name)


def stacked_shapes(loop):
    """Shapes of what a scan keeps of every step; its carries have one shape inside and outside."""
    inside = [v.aval.shape for v in loop.params["jaxpr"].jaxpr.outvars]
    outside = [v.aval.shape for v in loop.outvars]
    return [o for i, o in zip(inside, outside, strict=True) if o != i]


def test_nothing_is_kept_when_no_gradient_is_asked_for():
    problem = table.problem("lstm", "lengths", np.float32)

    def run(params, x):
        return recurrence(LSTM, params, x, lengths=table.LENGTHS)

    (loop,) = eqns(jax.make_jaxpr(run)(problem.params, problem.x).jaxpr, "scan")
    assert len(loop.outvars) == 2 + 1
    assert stacked_shapes(loop) == [(T, B, H)]


# LSTM: i, f, g, o and h, c. GRU: r, z, hn and h; its n is a column of x_pre, which is there anyway.
@pytest.mark.parametrize(
    ("name", "remat", "kept"),
    [("lstm", "none", 6), ("lstm", "gates", 2), ("gru", "none", 4), ("gru", "gates", 1)],
)
def test_weight_gradients_are_single_matmuls_after_the_loop(name, remat, kept):
    problem = table.problem(name, "plain", np.float32)
    cell, gates = problem.row.cell, problem.params["r"].shape[1]

    def loss(params, x):
        return recurrence(cell, params, x, remat=remat)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(problem.params, problem.x).jaxpr
    forward, backward = eqns(jaxpr, "scan")
    assert len(stacked_shapes(forward)) == 1 + kept
    (product,) = eqns(backward.params["jaxpr"].jaxpr, "dot_general")
    assert [v.aval.shape for v in product.invars] == [(B, gates * H), (H, gates * H)]
    bodies = [loop.params["jaxpr"].jaxpr for loop in (forward, backward)]
    in_loops = sum(len(list(eqns(body, "dot_general"))) for body in bodies)
    # Outside: x @ w, dw, dx, dr, and h @ r once more where the gates are computed again.
    outside = len(list(eqns(jaxpr, "dot_general"))) - in_loops
    assert outside == {"none": 4, "gates": 5}[remat]


def test_a_projection_above_the_cache_size_is_made_in_pieces(monkeypatch):
    problem = table.problem("gru", "mask_resets", np.float32)

    def run(x):
        return recurrence(problem.row.cell, problem.params, x, problem.state, **problem.options)

    want = run(problem.x)
    monkeypatch.setattr(chunks, "CPU_CACHE_BYTES", 2 * B * 3 * H * 4)
    weight_bytes = sum(p.nbytes for p in jax.tree.leaves(problem.params))
    assert chunks.that_stays_in_cache(T, T * B * 3 * H * 4, weight_bytes) == 3
    assert chunks.that_stays_in_cache(T, T * B * 3 * H * 4, T * B * 3 * H * 4) == T
    loops = list(eqns(jax.make_jaxpr(run)(problem.x).jaxpr, "scan"))
    assert [loop.params["length"] for loop in loops] == [2, 3, 1]
    assert_close(run(problem.x), want, np.float32, size=T * H)


def test_no_steps_leave_the_state():
    problem = table.problem("lstm", "lengths", np.float32)
    for remat in ("none", "gates", "chunk"):

        def final(state, remat=remat):
            return recurrence(LSTM, problem.params, problem.x[:0], state, remat=remat)[1].h.sum()

        y, state = recurrence(LSTM, problem.params, problem.x[:0], problem.state, remat=remat)
        assert y.shape == (0, B, H)
        assert_same_bits(state, problem.state)
        assert np.all(jax.grad(final)(problem.state).h == 1)


# Dtypes: cases C06 and C10.

FLOATS = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", [None, *FLOATS])
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_the_dtype_option_decides(x_dtype, dtype):
    problem = table.problem("lstm", "lengths", np.float32)
    x = jnp.asarray(problem.x, x_dtype)
    for state_dtype in (*FLOATS, None):
        state = None
        if state_dtype is not None:
            state = jax.tree.map(lambda a, d=state_dtype: jnp.asarray(a, d), problem.state)

        def loss(params, x, state=state):
            y, final = recurrence(
                LSTM, params, x, state, lengths=table.LENGTHS, dtype=dtype, remat="gates"
            )
            return y.astype(jnp.float32).sum(), (y, final)

        (dparams, dx), (y, final) = jax.eval_shape(
            jax.grad(loss, argnums=(0, 1), has_aux=True), problem.params, x
        )
        assert y.dtype == (dtype or "float32")
        assert {leaf.dtype.name for leaf in final} == {"float32"}
        assert {leaf.dtype.name for leaf in jax.tree.leaves(dparams)} == {"float32"}
        assert dx.dtype == x_dtype
    jaxpr = jax.make_jaxpr(loss)(problem.params, x).jaxpr
    operands = {v.aval.dtype.name for e in eqns(jaxpr, "dot_general") for v in e.invars}
    assert operands == {dtype or "float32"}


def test_a_state_of_another_dtype_is_cast():
    problem = table.problem("gru", "lengths", np.float32)
    state = GRUState(np.round(problem.state.h))
    want = recurrence(problem.row.cell, problem.params, problem.x, state)
    for dtype in (jnp.bfloat16, jnp.int32):
        given = GRUState(jnp.asarray(state.h, dtype))
        assert_same_bits(recurrence(problem.row.cell, problem.params, problem.x, given), want)


@pytest.mark.parametrize("wide", [False, True])
def test_float64_inputs_do_not_widen_parameters(wide):
    problem = table.problem("lstm", "plain", np.float32)
    x = problem.x.astype(np.float64)

    def loss(params):
        y, final = recurrence(LSTM, params, x)
        return y.sum(), (y, final)

    with jax.enable_x64(wide):
        params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), problem.params)
        dparams, results = jax.eval_shape(jax.grad(loss, has_aux=True), params)
    wanted = "float64" if wide else "float32"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(results)} == {wanted}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(dparams)} == {"float32"}


@pytest.mark.parametrize("how", ["gates", "chunk"])
def test_sums_over_time_are_not_kept_in_half_precision(how):
    """The gradients of bias and vectors are sums of T B terms."""
    steps, batch, features = 3000, 1, 2
    cell = cells.sru()
    params = cell.init_params(jax.random.key(0), features, features, jnp.float32)
    x = jnp.abs(jax.random.normal(jax.random.key(1), (steps, batch, features)))

    def gradient(dtype):
        def loss(params):
            y, _ = recurrence(cell, params, x, dtype=dtype, **table.HOW[how])
            return y.astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss))(params)

    got, want = gradient(jnp.bfloat16), gradient(jnp.float32)
    assert_close(got, want, jnp.bfloat16)


# What is refused.


def refused(error, match, **changes):
    problem = table.problem("lstm", "plain", np.float32)
    arguments = {"params": problem.params, "x": problem.x} | changes
    with pytest.raises(error, match=match):
        recurrence(LSTM, **arguments)


def test_bad_arguments_are_named():
    zeros = np.zeros((B, H), np.float32)
    refused(ValueError, r"x should be \[T, B, I\]", x=np.zeros((T, I), np.float32))
    refused(TypeError, "embedding", x=np.zeros((T, B, I), np.int32))
    refused(ValueError, r"lengths should be \[B\] = \(3,\)", lengths=np.zeros(4, int))
    refused(TypeError, "lengths should be integers", lengths=np.zeros(B))
    refused(ValueError, r"mask should be \[T, B\] = \(7, 3\)", mask=np.ones((B, T), bool))
    refused(TypeError, "mask should be booleans", mask=np.ones((T, B)))
    refused(ValueError, r"resets should be \[T, B\]", resets=np.ones((T + 1, B), bool))
    refused(ValueError, "LSTMState", state=GRUState(zeros))
    refused(ValueError, "LSTMState", state=zeros)
    refused(
        ValueError,
        r"state\.c of lstm .* \(3, 4\), got \(3, 5\)",
        state=LSTMState(zeros, np.zeros((B, 5))),
    )
    refused(ValueError, '"none", "gates", "chunk"', remat="all")
    refused(ValueError, '"xla"', implementation="cuda")


def test_a_state_may_be_a_plain_tuple_or_a_pair_of_another_name():
    problem = table.problem("lstm", "lengths", np.float32)
    plain = tuple(problem.state)
    look_alike = types.SimpleNamespace(h=plain[0], c=plain[1])
    final = jax.eval_shape(lambda s: recurrence(LSTM, problem.params, problem.x, s)[1], plain)
    assert isinstance(final, LSTMState)
    refused(ValueError, "LSTMState", state=look_alike)
