"""The oracles against numerical derivatives, against torch.nn, and against their own promises."""

import numpy as np
import oracles
import oracles_elementwise as elementwise
import oracles_gated as gated
import pytest
from tolerance import assert_close

T, B, H = 5, 3, 4


def gates(count):
    """Shapes of the usual parameters; a letter is a size."""
    return {"w_x": f"I{count}H", "r": f"H{count}H", "b": f"{count}H"}


SRU = {"w_x": "I3H", "v": "2H", "b": "2H"}
SQUARE_SRU = SRU | {"w_x": "H3H"}
FACTORED_SRU = SRU | {"w_x": "P3H"}
GAINS = {"gain_x": "3H", "gain_h": "3H"}

CELLS = {
    "elman_tanh": (oracles.elman("tanh"), gates(1)),
    "elman_relu": (oracles.elman("relu"), gates(1)),
    "lstm": (oracles.lstm(), gates(4)),
    "lstm_projected": (oracles.lstm(), gates(4) | {"p": "HH"}),
    "lstm_peepholes": (oracles.lstm(), gates(4) | {"v": "3H"}),
    "lstm_coupled": (oracles.lstm(), gates(3) | {"v": "2H"}),
    "lstm_clipped": (oracles.lstm(clip=0.4), gates(4)),
    "layer_norm_lstm": (
        oracles.layer_norm_lstm(),
        gates(4) | {"gain_x": "4H", "gain_h": "4H", "gain_c": "H", "b_c": "H"},
    ),
    "gru": (oracles.gru(), gates(3) | {"b_hn": "H"}),
    "gru_reset_before": (oracles.gru(reset_after=False), gates(3)),
    "layer_norm_gru": (gated.layer_norm_gru(), gates(3) | GAINS | {"b_hn": "H"}),
    "mgu": (gated.mgu(), gates(2) | {"b_hn": "H"}),
    "mgu_reset_before": (gated.mgu(reset_after=False), gates(2)),
    "slstm_sigmoid": (gated.slstm("sigmoid"), gates(4)),
    "slstm_exp": (gated.slstm("exp"), gates(4)),
    "sru": (oracles.sru(1.7), SQUARE_SRU),
    "sru_projected": (oracles.sru(1.7), SRU | {"w_highway": "IH"}),
    "sru_layer_norm": (
        elementwise.sru_of_features(1.7),
        SQUARE_SRU | {"gain_x": "H", "b_x": "H"},
    ),
    "sru_factored": (elementwise.sru_of_features(1.7), FACTORED_SRU | {"w_proj": "HP"}),
    "sru_layer_norm_factored": (
        elementwise.sru_of_features(1.7),
        FACTORED_SRU | {"w_proj": "IP", "w_highway": "PH", "gain_x": "I", "b_x": "I"},
    ),
    "indrnn_relu": (elementwise.indrnn("relu"), {"w_x": "I1H", "u": "H", "b": "1H"}),
    "indrnn_tanh": (elementwise.indrnn("tanh"), {"w_x": "I1H", "u": "H", "b": "1H"}),
    "qrnn": (elementwise.qrnn(), {"w_x": "I3H", "b": "3H"}),
    "qrnn_window": (elementwise.qrnn(window=2), {"w_x": "I6H", "b": "3H"}),
    "min_gru": (elementwise.min_gru(), {"w_x": "I2H", "b": "2H"}),
    "min_lstm": (elementwise.min_lstm(), {"w_x": "I3H", "b": "3H"}),
}


def make_params(name, inputs, rng):
    sizes = {"I": inputs, "H": H, "P": 2}
    return {
        key: rng.normal(size=[sizes.get(n) or int(n) for n in shape])
        for key, shape in CELLS[name][1].items()
    }


def make_state(cell, rng):
    """Random; the normalizer ``n`` of the sLSTM is 1 at least."""
    state = {key: rng.normal(size=(B, H)) for key in cell.state_names}
    return state | {key: 1.0 + np.abs(a) for key, a in state.items() if key == "n"}


def make_problem(name, seed=0):
    """A layer with holes in the mask, resets on real and on masked steps, and one empty row."""
    rng = np.random.default_rng(seed)
    cell, layout = CELLS[name]
    inputs = H if layout.get("w_proj", layout["w_x"])[0] == "H" else 3
    args = (make_params(name, inputs, rng), rng.normal(size=(T, B, inputs)), make_state(cell, rng))
    mask = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], bool)
    resets = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 0]], bool)
    options = {"mask": mask, "resets": resets, "restart": make_state(cell, rng)}
    cotangents = (rng.normal(size=(T, B, H)), make_state(cell, rng))
    return cell, args, options, cotangents


def numerical(function, value):
    """Derivative by complex step (Squire and Trapp 1998): no subtraction, so exact to rounding."""
    value = np.asarray(value, np.complex128)
    slope = np.zeros(value.shape)
    for index in np.ndindex(value.shape):
        moved = value.copy()
        moved[index] += 1e-30j
        slope[index] = np.imag(function(moved)) / 1e-30
    return slope


def inner(y, final, dy, dfinal):
    parts = zip(oracle_leaves(final), oracle_leaves(dfinal), strict=True)
    return np.sum(y * dy) + sum(np.sum(a * b) for a, b in parts)


def oracle_leaves(value):
    """The arrays of a state or of nested tuples of them."""
    found = []
    oracles.tree(found.append, value)
    return found


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("name", CELLS)
def test_adjoints_equal_numerical_derivatives(name, reverse):
    cell, (params, x, state), options, (dy, dfinal) = make_problem(name)
    got = oracles.gradients(cell, params, x, state, dy, dfinal, reverse=reverse, **options)

    def total(params=params, x=x, state=state, restart=options["restart"]):
        given = options | {"restart": restart}
        return inner(*oracles.run(cell, params, x, state, reverse=reverse, **given), dy, dfinal)

    want = oracles.Gradients(
        params={
            k: numerical(lambda v, k=k: total(params=params | {k: v}), params[k]) for k in params
        },
        x=numerical(lambda v: total(x=v), x),
        state={k: numerical(lambda v, k=k: total(state=state | {k: v}), state[k]) for k in state},
        restart={
            k: numerical(
                lambda v, k=k: total(restart=options["restart"] | {k: v}), state[k] * 0 + r
            )
            for k, r in options["restart"].items()
        },
    )
    assert_close(got, want, np.float64, size=T * H)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_adjoints_equal_central_differences(name):
    """The plain textbook check as well: real arithmetic, nothing clever."""
    cell, (params, x, state), options, (dy, dfinal) = make_problem(name)
    got = oracles.gradients(cell, params, x, state, dy, dfinal, **options)
    # Truncation and cancellation balance at a step of eps^(1/3) and leave eps^(2/3), which is
    # 4e-11: some thirty times below float32's eps, whose tolerance is used.
    step = float(np.finfo(np.float64).eps) ** (1 / 3)
    for key, value in params.items():
        want = np.zeros_like(value)
        for index in np.ndindex(value.shape):
            totals = []
            for sign in (1, -1):
                moved = value.copy()
                moved[index] += sign * step
                result = oracles.run(cell, params | {key: moved}, x, state, **options)
                totals.append(inner(*result, dy, dfinal))
            want[index] = (totals[0] - totals[1]) / (2 * step)
        assert_close({key: got.params[key]}, {key: want}, np.float32)


@pytest.mark.parametrize("forget_gate", ["sigmoid", "exp"])
def test_the_stabilizer_of_the_slstm_cancels(forget_gate):
    """The outputs are those of equations 8 to 14 of Beck et al. (2024), which have no ``m``."""
    cell, (params, x, state), _, _ = make_problem(f"slstm_{forget_gate}")
    start = {key: np.zeros_like(a) for key, a in state.items()}
    y, final = oracles.run(cell, params, x, start | {"m": np.full((B, H), -1e30)})
    h, c, n = (start[key] for key in ("h", "c", "n"))
    for t in range(T):
        pre = np.einsum("bi,igh->gbh", x[t], params["w_x"])
        i, f, z, o = pre + np.einsum("bi,igh->gbh", h, params["r"]) + params["b"][:, None]
        f = np.exp(f) if forget_gate == "exp" else 1 / (1 + np.exp(-f))
        c, n = f * c + np.exp(i) * np.tanh(z), f * n + np.exp(i)
        h = c / n / (1 + np.exp(-o))
        assert_close(y[t], h, np.float64, size=T * H)
    got = {key: final[key] * np.exp(final["m"]) for key in ("c", "n")}
    assert_close(got, {"c": c, "n": n}, np.float64, size=T * H)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradients_of_stacks_equal_numerical_derivatives(bidirectional):
    cell = oracles.lstm()
    rng = np.random.default_rng(1)
    names = oracles.DIRECTIONS if bidirectional else ("forward",)
    params = {
        f"layer_{layer}": {
            n: make_params("lstm", 3 if layer == 0 else H * len(names), rng) for n in names
        }
        for layer in range(2)
    }

    def states():
        one = [tuple(make_state(cell, rng) for _ in names) for _ in range(2)]
        return tuple(entry if bidirectional else entry[0] for entry in one)

    x, first, restarts, dfinals = rng.normal(size=(T, B, 3)), states(), states(), states()
    dy = rng.normal(size=(T, B, H * len(names)))
    options = {
        "mask": oracles.mask_of_lengths([5, 0, 3], T),
        "resets": rng.random((T, B)) < 0.3,
        "restarts": restarts,
    }
    got = oracles.gradients_layers(cell, params, x, first, dy, dfinals, **options)

    def total(params=params, x=x):
        return inner(*oracles.run_layers(cell, params, x, first, **options), dy, dfinals)

    def replaced(layer, direction, key, value):
        inside = params[layer][direction] | {key: value}
        return params | {layer: params[layer] | {direction: inside}}

    assert_close(got.x, numerical(lambda v: total(x=v), x), np.float64, size=2 * T * H)
    for layer, direction in [("layer_0", "forward"), ("layer_1", names[-1])]:
        for key in ("r", "b"):
            want = numerical(
                lambda v, where=(layer, direction, key): total(params=replaced(*where, v)),
                params[layer][direction][key],
            )
            assert_close(got.params[layer][direction][key], want, np.float64, size=2 * T * H)
    assert_close(oracles.tree(np.shape, got.state), oracles.tree(np.shape, first))
    assert_close(oracles.tree(np.shape, got.restart), oracles.tree(np.shape, first))


@pytest.mark.parametrize("reverse", [False, True])
def test_padding_does_not_matter(reverse):
    cell, (params, x, state), options, (dy, dfinal) = make_problem("lstm")
    hidden = ~options["mask"]
    dirty_x, dirty_dy = x.copy(), dy.copy()
    dirty_x[hidden], dirty_dy[hidden] = np.nan, np.inf
    options |= {"reverse": reverse}
    y, final = oracles.run(cell, params, dirty_x, state, **options)
    assert np.all(y[hidden] == 0.0)
    assert_close((y, final), oracles.run(cell, params, x, state, **options), np.float64)
    got = oracles.gradients(cell, params, dirty_x, state, dirty_dy, dfinal, **options)
    want = oracles.gradients(cell, params, x, state, dy, dfinal, **options)
    assert_close(got, want, np.float64)
    # Row 2 has no real step.
    np.testing.assert_array_equal(final["c"][2], state["c"][2])
    np.testing.assert_array_equal(got.state["c"][2], dfinal["c"][2])
    assert np.all(got.x[:, 2] == 0.0)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_reset_parts_two_sequences(reverse):
    """Also where a hole in the mask lies at the boundary."""
    cell, (params, x, state), options, _ = make_problem("gru")
    restart = options["restart"]
    mask = np.ones((T, B), bool)
    mask[2] = False
    resets = np.zeros((T, B), bool)
    resets[3] = True
    starts = (restart, state) if reverse else (state, restart)
    whole, final = oracles.run(
        cell, params, x, state, mask=mask, resets=resets, restart=restart, reverse=reverse
    )
    early, early_final = oracles.run(cell, params, x[:2], starts[0], reverse=reverse)
    late, late_final = oracles.run(cell, params, x[3:], starts[1], reverse=reverse)
    assert_close((whole[:2], whole[3:]), (early, late), np.float64)
    assert_close(final, early_final if reverse else late_final, np.float64)


def test_a_masked_step_ignores_its_own_reset():
    cell, (params, x, state), options, _ = make_problem("lstm")
    real = options | {"resets": options["resets"] & options["mask"]}
    assert np.any(real["resets"] != options["resets"])
    for reverse in (False, True):
        got = oracles.run(cell, params, x, state, reverse=reverse, **options)
        want = oracles.run(cell, params, x, state, reverse=reverse, **real)
        assert_close(got, want, np.float64)


def from_torch(module, layer, direction):
    """A torch layer's weights in this file's layout."""
    suffix = f"_l{layer}" + ("_reverse" if direction == "backward" else "")
    w_x, r, b_x, b_h = (
        getattr(module, kind + suffix).detach().numpy()
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    gates = len(b_x) // H
    b_x, b_h = b_x.reshape(gates, H), b_h.reshape(gates, H).copy()
    params = {
        "w_x": w_x.reshape(gates, H, -1).transpose(2, 0, 1),
        "r": r.reshape(gates, H, -1).transpose(2, 0, 1),
    }
    if gates == 3:
        params["b_hn"] = b_h[2].copy()
        b_h[2] = 0.0
    return params | {"b": b_x + b_h}


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one_way", "both_ways"])
@pytest.mark.parametrize(
    ("kind", "options", "cell"),
    [
        ("LSTM", {}, oracles.lstm()),
        ("GRU", {}, oracles.gru()),
        ("RNN", {"nonlinearity": "tanh"}, oracles.elman("tanh")),
        ("RNN", {"nonlinearity": "relu"}, oracles.elman("relu")),
    ],
    ids=["lstm", "gru", "tanh", "relu"],
)
def test_equals_torch(kind, options, cell, bidirectional):
    """Two layers, padded rows, given initial state: outputs, final states and dx."""
    torch = pytest.importorskip("torch", reason="torch is in the extra `interop`")
    torch.manual_seed(0)
    names = oracles.DIRECTIONS if bidirectional else ("forward",)
    module = getattr(torch.nn, kind)(3, H, 2, bidirectional=bidirectional, **options).double()
    params = {f"layer_{k}": {n: from_torch(module, k, n) for n in names} for k in range(2)}
    rng = np.random.default_rng(2)
    lengths, x = [5, 2, 4], rng.normal(size=(T, B, 3))
    start = {key: rng.normal(size=(2 * len(names), B, H)) for key in cell.state_names}

    def states_of(flat):
        each = [{key: flat[key][k] for key in flat} for k in range(2 * len(names))]
        return tuple(zip(each[::2], each[1::2], strict=True)) if bidirectional else tuple(each)

    input_ = torch.tensor(x, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(input_, lengths, enforce_sorted=False)
    given = tuple(torch.tensor(start[key]) for key in cell.state_names)
    y, final = module(packed, given if kind == "LSTM" else given[0])
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, total_length=T)
    final = final if kind == "LSTM" else (final,)
    final = {key: a.detach().numpy() for key, a in zip(cell.state_names, final, strict=True)}
    dy = rng.normal(size=tuple(y.shape))
    (y * torch.tensor(dy)).sum().backward()

    mask = oracles.mask_of_lengths(lengths, T)
    got = oracles.run_layers(cell, params, x, states_of(start), mask=mask)
    assert_close(got, (y.detach().numpy(), states_of(final)), np.float64, size=2 * T * H)
    nothing = oracles.tree(np.zeros_like, states_of(start))
    back = oracles.gradients_layers(cell, params, x, states_of(start), dy, nothing, mask=mask)
    assert_close(back.x, input_.grad.numpy(), np.float64, size=2 * T * H)
    for layer, direction in [(k, n) for k in range(2) for n in names]:
        suffix = f"_l{layer}" + ("_reverse" if direction == "backward" else "")
        want = getattr(module, "weight_hh" + suffix).grad.numpy()
        want = want.reshape(-1, H, H).transpose(2, 0, 1)
        got_r = back.params[f"layer_{layer}"][direction]["r"]
        assert_close(got_r, want, np.float64, size=2 * T * H)


def test_assert_close_names_the_leaf():
    with pytest.raises(AssertionError, match=r"a\.b"):
        assert_close({"a": {"b": np.ones(2)}}, {"a": {"b": np.ones(2) * 1.01}})
    with pytest.raises(AssertionError, match="leaves"):
        assert_close({"a": np.ones(2)}, {"b": np.ones(2)})
    with pytest.raises(AssertionError, match="value"):
        assert_close(np.full(2, 1e-30), np.zeros(2))
