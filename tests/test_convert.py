"""`jaxrnn.convert` and torch: weights and states both ways, files, refusals."""

import jax
import ml_dtypes
import numpy as np
import pytest
from convert_runs import B, H, I, T, assert_identical, draw, redrawn, run
from flax import nnx
from tolerance import assert_close

import jaxrnn
from jaxrnn import cells, convert

INTEROP = "{} is in the extra `interop`"

# kind of torch's module, its options, our cell
MODULES = {
    "lstm_1": ("LSTM", {}, cells.lstm()),
    "lstm_2_both_ways": ("LSTM", {"num_layers": 2, "bidirectional": True}, cells.lstm()),
    "lstm_3": ("LSTM", {"num_layers": 3}, cells.lstm()),
    "lstm_3_both_ways": ("LSTM", {"num_layers": 3, "bidirectional": True}, cells.lstm()),
    "lstm_1_projected": ("LSTM", {"proj_size": 2}, cells.lstm(proj_size=2)),
    "lstm_2_projected_both_ways": (
        "LSTM",
        {"num_layers": 2, "bidirectional": True, "proj_size": 2},
        cells.lstm(proj_size=2),
    ),
    "lstm_2_no_bias": ("LSTM", {"num_layers": 2, "bias": False}, cells.lstm(use_bias=False)),
    "gru_1": ("GRU", {}, cells.gru()),
    "gru_3_both_ways": ("GRU", {"num_layers": 3, "bidirectional": True}, cells.gru()),
    "gru_2_no_bias": ("GRU", {"num_layers": 2, "bias": False}, cells.gru(use_bias=False)),
    "tanh_2_both_ways": ("RNN", {"num_layers": 2, "bidirectional": True}, cells.elman()),
    "relu_1": ("RNN", {"nonlinearity": "relu"}, cells.elman(activation="relu")),
    "tanh_1_no_bias": ("RNN", {"bias": False}, cells.elman(use_bias=False)),
}


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason=INTEROP.format("torch"))


def make_module(torch, name, seed=0):
    kind, options, cell = MODULES[name]
    torch.manual_seed(seed)
    module = getattr(torch.nn, kind)(I, H, batch_first=True, **options)
    for parameter in module.parameters():
        parameter.data.normal_()
    return module, cell, options.get("bidirectional", False)


def make_params(name="lstm_2_projected_both_ways", seed=0):
    """Parameters of one row of `MODULES`, without torch."""
    _, options, cell = MODULES[name]
    layers, both = options.get("num_layers", 1), options.get("bidirectional", False)
    layer = jaxrnn.RNN(cell, I, H, num_layers=layers, bidirectional=both, rngs=nnx.Rngs(0))
    return redrawn(np.random.default_rng(seed), layer.parameters())


def run_torch(torch, module, x, state):
    """Outputs and final state; both of them and the initial one in torch's form."""
    given = tuple(map(torch.tensor, state)) if isinstance(state, tuple) else torch.tensor(state)
    with torch.no_grad():
        return module(torch.tensor(x), given)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", MODULES)
def test_equals_torch(torch, name):
    """Outputs and states of torch's weights here, and of ours there."""
    module, cell, both = make_module(torch, name)
    module.double()
    params = convert.from_torch(module.state_dict())
    rng = np.random.default_rng(1)
    x = draw(rng, B, T, I)
    entries = module.num_layers * (1 + both)
    sizes = {"h": module.proj_size or H, "c": H}
    given = tuple(draw(rng, entries, B, sizes[field]) for field in cell.state_names)
    given = given if len(given) > 1 else given[0]

    state = convert.state_from_torch(cell.state_type, given, bidirectional=both)
    y, final = run(cell, params, x, state)
    want_y, want_final = run_torch(torch, module, x, given)
    assert_close(y, want_y.numpy(), np.float64, size=T * H)
    want = convert.state_from_torch(cell.state_type, want_final, bidirectional=both)
    assert_close(final, want, np.float64, size=T * H)
    assert_identical(convert.state_to_torch(state), given)

    other, *_ = make_module(torch, name, seed=1)
    ours = redrawn(rng, params)
    weights = convert.to_torch(ours)
    other.double().load_state_dict({key: torch.from_numpy(a) for key, a in weights.items()})
    want_y, _ = run_torch(torch, other, x, given)
    assert_close(run(cell, ours, x, state)[0], want_y.numpy(), np.float64, size=T * H)


def test_float32_to_the_sixth_digit(torch):
    module, cell, both = make_module(torch, "lstm_2_both_ways")
    x = draw(np.random.default_rng(1), B, T, I, dtype=np.float32)
    y, final = run(cell, convert.from_torch(module.state_dict()), x)
    want_y, want_final = module(torch.tensor(x))
    want_final = convert.state_from_torch(cells.LSTMState, want_final, bidirectional=both)
    assert_close((y, final), (want_y.detach().numpy(), want_final), np.float32, size=T * H)
    np.testing.assert_allclose(y, want_y.detach().numpy(), rtol=0, atol=1e-6)


def swapped(params, names, one, other):
    """The gates at two places exchanged in some arrays."""
    order = list(range(params["w_x"].shape[1]))
    order[one], order[other] = other, one
    return params | {name: params[name][..., order, :] for name in names}


# What was done wrong elsewhere: flax#3746, haste#3, flax#5594, keras#15915.
WRONG_WAYS = {
    "lstm_gates_i_g_f_o": ("lstm_1", lambda p, w: swapped(p, ["w_x", "r", "b"], 1, 2)),
    "lstm_one_bias": ("lstm_1", lambda p, w: p | {"b": w["bias_ih_l0"].numpy().reshape(4, H)}),
    "lstm_transposed": ("lstm_1", lambda p, w: p | {"r": p["r"].swapaxes(0, 2)}),
    "gru_gates_z_r_n": ("gru_1", lambda p, w: swapped(p, ["w_x", "r", "b"], 0, 1)),
    "gru_summed_bias": (
        "gru_1",
        lambda p, w: p | {"b": p["b"].at[2].add(p["b_hn"]), "b_hn": 0 * p["b_hn"]},
    ),
    "gru_without_b_hn": ("gru_1", lambda p, w: p | {"b_hn": 0 * p["b_hn"]}),
}


@pytest.mark.parametrize("wrong", WRONG_WAYS)
def test_wrong_ways_are_far_off(torch, wrong):
    name, change = WRONG_WAYS[wrong]
    module, cell, _ = make_module(torch, name)
    x = draw(np.random.default_rng(1), B, T, I, dtype=np.float32)
    right = convert.from_torch(module.state_dict())["layer_0"]["forward"]
    want = module(torch.tensor(x))[0].detach().numpy()
    far = run(cell, {"layer_0": {"forward": change(right, module.state_dict())}}, x)[0]
    assert np.abs(far - want).max() > 0.1


@pytest.mark.parametrize("name", MODULES)
def test_there_and_back_is_exact(name):
    params = make_params(name)
    weights = convert.to_torch(params, prefix="rnn.")
    assert all(a.flags.c_contiguous and a.flags.writeable for a in weights.values())
    assert_identical(convert.from_torch(weights | {"head.weight": 0}, prefix="rnn."), params)


def test_eleven_layers_stay_in_order():
    params = {f"layer_{k}": make_params("gru_1", seed=k)["layer_0"] for k in range(11)}
    for k in range(1, 11):
        params[f"layer_{k}"]["forward"]["w_x"] = params[f"layer_{k}"]["forward"]["r"] + 1
    assert_identical(convert.from_torch(convert.to_torch(params)), params)


def test_weights_are_copies(torch):
    """Or a module that trains on would change ours."""
    module, *_ = make_module(torch, "gru_1")
    params = convert.from_torch(module.state_dict())
    before = np.array(params["layer_0"]["forward"]["b_hn"])
    for parameter in module.parameters():
        parameter.data.zero_()
    np.testing.assert_array_equal(params["layer_0"]["forward"]["b_hn"], before)


def test_bfloat16(torch):
    module, *_ = make_module(torch, "lstm_1")
    weights = module.bfloat16().state_dict()
    w_x = convert.from_torch(weights)["layer_0"]["forward"]["w_x"]
    assert w_x.dtype == ml_dtypes.bfloat16
    want = weights["weight_ih_l0"].float().numpy().reshape(4, H, I).transpose(2, 0, 1)
    np.testing.assert_array_equal(w_x.astype(np.float32), want)


def test_safetensors(tmp_path):
    library = pytest.importorskip("safetensors.numpy", reason=INTEROP.format("safetensors"))
    params, path = make_params(), tmp_path / "model.safetensors"
    head = np.zeros((2, 2), np.float32)
    library.save_file(convert.to_torch(params, prefix="rnn.") | {"head": head}, path)
    assert_identical(convert.from_torch(path, prefix="rnn."), params)
    assert_identical(convert.from_torch(str(path), prefix="rnn."), params)
    with pytest.raises(ValueError, match=r"no tensor's name starts with 'lstm.', the names are"):
        convert.from_torch(path, prefix="lstm.")


@pytest.mark.parametrize("name", ["model.pt", "model.bin", "model.npz"])
def test_pickles_are_refused_unread(tmp_path, name):
    with pytest.raises(ValueError, match=f"should be in a .safetensors file, got {name}"):
        convert.from_torch(tmp_path / name)


def test_a_layer_loads_parameters():
    layer = jaxrnn.LSTM(I, H, num_layers=2, rngs=nnx.Rngs(0))
    params = redrawn(np.random.default_rng(0), layer.parameters())
    layer.load_parameters(convert.from_torch(convert.to_torch(params)))
    assert_identical(layer.parameters(), params)
    x = draw(np.random.default_rng(1), B, T, I, dtype=np.float32)
    assert_close(layer(x), run(cells.lstm(), params, x), np.float32, size=T * H)

    half = jaxrnn.LSTM(I, H, num_layers=2, param_dtype="bfloat16", rngs=nnx.Rngs(0))
    half.load_parameters(params)
    assert_identical(half.parameters(), jax.tree.map(lambda a: a.astype("bfloat16"), params))


def test_refusals_of_a_layer():
    layer = jaxrnn.LSTM(I, H, num_layers=2, rngs=nnx.Rngs(0))
    before = layer.parameters()
    with pytest.raises(ValueError, match=r"missing: layer_1\.forward\.b, layer_1\.forward\.r, "):
        layer.load_parameters({"layer_0": before["layer_0"]})
    other = jaxrnn.GRU(I, H, num_layers=2, rngs=nnx.Rngs(0)).parameters()
    with pytest.raises(ValueError, match=r"unexpected: layer_0\.forward\.b_hn, layer_1\."):
        layer.load_parameters(other)
    other = jaxrnn.LSTM(I + 1, H, num_layers=2, rngs=nnx.Rngs(0)).parameters()
    with pytest.raises(ValueError, match=r"`layer_0\.forward\.w_x` should be \(3, 4, 4\), got"):
        layer.load_parameters(other)
    assert_identical(layer.parameters(), before)


def lstm_weights(**changes):
    """An LSTM's state dict of 5 inputs and 16 features, with some tensors replaced or gone."""
    shapes = {"weight_ih_l0": (64, 5), "weight_hh_l0": (64, 16)}
    shapes |= {"bias_ih_l0": (64,), "bias_hh_l0": (64,)} | changes
    return {name: np.zeros(shape) for name, shape in shapes.items() if shape is not None}


REFUSED = {
    "shape": (
        {"weight_hh_l0": (64, 12)},
        {"kind": "lstm"},
        r"`weight_hh_l0` should be \[4H, H\] = \(64, 16\), got \(64, 12\)",
    ),
    "no_kind_has_it": (
        {"weight_hh_l0": (64, 12)},
        {},
        r"`weight_hh_l0` should be \[4H, H\] of an LSTM, .*, got \(64, 12\)",
    ),
    "inputs_of_the_next_layer": (
        {name.replace("0", "1"): a.shape for name, a in lstm_weights().items()},
        {},
        r"`weight_ih_l1` should be \[4H, I\] = \(64, 16\), got \(64, 5\)",
    ),
    "axes": ({"weight_ih_l0": (64,)}, {}, r"`weight_ih_l0` should be \[4H, I\], got shape \(64,\)"),
    "bias": ({"bias_hh_l0": (48,)}, {}, r"`bias_hh_l0` should be \[4H\] = \(64,\), got \(48,\)"),
    "missing": (
        {"bias_hh_l0": None, "weight_hh_l0": None},
        {},
        "torch.nn.LSTM, GRU or RNN; missing: bias_hh_l0, weight_hh_l0$",
    ),
    "unexpected": ({"head": (2,), "body": (2,)}, {}, "GRU or RNN; unexpected: body, head$"),
    "half_a_direction": (
        {"weight_ih_l0_reverse": (64, 5)},
        {},
        "missing: bias_hh_l0_reverse, bias_ih_l0_reverse, weight_hh_l0_reverse$",
    ),
    "unknown_kind": ({}, {"kind": "mgu"}, "kind should be one of lstm, gru, elman, got 'mgu'"),
    "other_kind": ({}, {"kind": "gru"}, r"`weight_ih_l0` should be \[3H, I\] = \(63, 5\), got"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_of_torch_weights(name):
    changes, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        convert.from_torch(lstm_weights(**changes), **options)


def test_refusals_of_our_parameters():
    def one(**params):
        return {"layer_0": {"forward": params}}

    lstm = make_params("lstm_1")["layer_0"]["forward"]
    gru = make_params("gru_1")["layer_0"]["forward"]
    refused = [
        (one(w_x=gru["w_x"], r=gru["r"], b=gru["b"]), "needs a `layer_0.forward.b_hn`"),
        (one(**lstm, v=lstm["b"][:3]), "a plain lstm cell at layer_0.forward; unexpected: v"),
        (one(w_x=lstm["w_x"][:, :2], r=lstm["r"]), "gates for torch.nn, got 2"),
        (one(w_x=lstm["w_x"], v=lstm["b"]), "takes cells with `w_x` and `r`, layer_0.forward has"),
        (
            one(**lstm | {"r": lstm["r"][:2]}),
            r"forward.r` should be \[S, G, H\] = \(4, 4, 4\), got",
        ),
        ({"layer_1": {"forward": lstm}}, "a stack; missing: layer_0; unexpected: layer_1"),
        ({"layer_0": {"backward": lstm}}, "missing: forward; unexpected: backward"),
        ({}, "missing: layer_0"),
        (
            {"layer_0": {"forward": lstm}, "layer_1": {"forward": lstm}},
            r"_1.forward.w_x` .* = \(4, ",
        ),
    ]
    for params, message in refused:
        with pytest.raises(ValueError, match=message):
            convert.to_torch(params)


def test_refusals_of_states():
    h, c = np.zeros((2, B, H)), np.zeros((3, B, H))
    with pytest.raises(ValueError, match="should be 2 arrays, h, c, got 1"):
        convert.state_from_torch(cells.LSTMState, h)
    with pytest.raises(ValueError, match="first axis of `c`"):
        convert.state_from_torch(cells.LSTMState, (h, c))
    with pytest.raises(ValueError, match="first axis of `h`"):
        convert.state_from_torch(cells.GRUState, c, bidirectional=True)
    with pytest.raises(ValueError, match=r"`h` should be \[L D, B, H\], got shape \(2, 4\)"):
        convert.state_from_torch(cells.GRUState, h[0])
