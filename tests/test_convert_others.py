"""`jaxrnn.convert` and Flax, Keras and the package `sru`: weights and states both ways."""

import importlib
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_runs import B, H, I, T, assert_identical, draw, redrawn, run
from flax import linen, nnx
from table import quick_compile
from tolerance import assert_close

from jaxrnn import cells, convert

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
INTEROP = "{} is in the extra `interop`"


def make_stack(cell, layers=1, directions=1, in_features=I, seed=0):
    """Random parameters of a stack, in double precision where that is on."""
    rng, params = np.random.default_rng(seed), {}
    for index in range(layers):
        shapes = jax.eval_shape(
            lambda rows=in_features: cell.init_params(
                jax.random.key(0), rows, H, jnp.result_type(float)
            )
        )
        names = ("forward", "backward")[:directions]
        params[f"layer_{index}"] = {name: redrawn(rng, shapes) for name in names}
        in_features = directions * H
    return params


# Flax

FLAX_CELLS = {
    "linen.LSTMCell": cells.lstm(),
    "linen.OptimizedLSTMCell": cells.lstm(),
    "linen.GRUCell": cells.gru(),
    "linen.MGUCell": cells.mgu(),
    "linen.SimpleCell": cells.elman(),
    "nnx.LSTMCell": cells.lstm(),
    "nnx.OptimizedLSTMCell": cells.lstm(),
    "nnx.GRUCell": cells.gru(),
    "nnx.SimpleCell": cells.elman(),
}


def without_b_hn(params):
    """As ``nnx.GRUCell`` has it."""
    return jax.tree.map_with_path(lambda path, a: 0 * a if path[-1].key == "b_hn" else a, params)


def make_flax(name, dtype=None):
    """A cell of Flax whose kernels are 0: orthogonal ones take long to compile."""
    shell, cell = name.split(".")
    zeros = jax.nn.initializers.zeros
    options = {"kernel_init": zeros, "recurrent_kernel_init": zeros}
    if shell == "linen":
        return getattr(linen, cell)(H, **options)
    # Its SimpleCell computes in float32 unless told otherwise.
    return getattr(nnx, cell)(I, H, dtype=dtype, rngs=nnx.Rngs(0), **options)


def run_flax(name, tree, x, carry):
    """Outputs and last carry of Flax's own loop over a cell."""
    cell = make_flax(name, x.dtype)
    if name.startswith("linen"):
        layer = linen.RNN(cell, return_carry=True)
        final, y = jax.jit(layer.apply)({"params": {"cell": tree}}, x, initial_carry=carry)
    else:
        nnx.update(cell, tree)
        final, y = nnx.RNN(cell, return_carry=True)(x, initial_carry=carry)
    return y, final


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FLAX_CELLS)
def test_equals_flax(name):
    """Outputs and states of our weights there; back again they are the same."""
    cell = FLAX_CELLS[name]
    params = make_stack(cell)
    if name == "nnx.GRUCell":
        params = without_b_hn(params)
    rng = np.random.default_rng(1)
    x = draw(rng, B, T, I)
    state = (cell.state_type(*(jnp.asarray(draw(rng, B, H)) for _ in cell.state_names)),)
    (tree,), (carry,) = convert.to_flax(params, name), convert.state_to_flax(state)
    with quick_compile():
        want_y, want_carry = run_flax(name, tree, x, carry)
    y, final = run(cell, params, x, state)
    assert_close(y, want_y, np.float64, size=T * H)
    want_final = convert.state_from_flax(cell.state_type, want_carry)
    assert_close(final, want_final, np.float64, size=T * H)
    assert_identical(convert.from_flax(tree), params)
    assert_identical(convert.state_from_flax(cell.state_type, carry), state)


@pytest.mark.parametrize("name", FLAX_CELLS)
def test_the_trees_are_those_of_flax(name):
    """Names and shapes, and what a user has at hand is taken as it is."""
    cell = make_flax(name)
    if name.startswith("linen"):
        x = jnp.zeros((B, I))
        carry = cell.initialize_carry(jax.random.key(0), x.shape)
        shapes = jax.eval_shape(cell.init, jax.random.key(0), carry, x)["params"]
        tree = want = redrawn(np.random.default_rng(0), shapes)
    else:
        tree = nnx.state(cell, nnx.Param)
        want = nnx.to_pure_dict(tree)
    (got,) = convert.to_flax(convert.from_flax(tree), name)
    assert_identical(got, want)


@pytest.mark.parametrize("cell", [cells.lstm(), cells.gru()], ids=["lstm", "gru"])
def test_flax_layers_and_directions(cell):
    params = make_stack(cell, layers=2, directions=2)
    name = "linen.LSTMCell" if cell is cells.lstm() else "linen.GRUCell"
    trees = convert.to_flax(params, name)
    assert [len(pair) for pair in trees] == [2, 2]
    assert_identical(convert.from_flax(*trees), params)
    x = draw(np.random.default_rng(1), B, T, I, dtype=np.float32)
    _, final = run(cell, params, x)
    carries = convert.state_to_flax(final)
    got = convert.state_from_flax(cell.state_type, *carries, bidirectional=True)
    assert_identical(got, final)
    if name == "linen.LSTMCell":
        assert_identical(carries[1][0], (final[1][0].c, final[1][0].h))


def test_flax_gets_zeros_for_biases_that_are_not():
    params = make_stack(cells.gru(use_bias=False))
    (tree,) = convert.to_flax(params, "linen.GRUCell")
    biases = {name: jnp.zeros(H) for name in ("ir", "iz", "in", "hn")}
    assert_identical({name: tree[name]["bias"] for name in biases}, biases)


def test_refusals_of_flax():
    gru = make_stack(cells.gru())
    message = r"nnx.GRUCell has no bias .* \(flax#5594\), .*`layer_0.forward.b_hn`, which is not 0"
    with pytest.raises(ValueError, match=message):
        convert.to_flax(gru, "nnx.GRUCell")
    with pytest.raises(ValueError, match=r"nnx.LSTMCell takes .* lstm, layer_0.forward has gru"):
        convert.to_flax(gru, "nnx.LSTMCell")
    with pytest.raises(ValueError, match=r"one of linen.LSTMCell, .* got 'LSTMCell'"):
        convert.to_flax(gru, "LSTMCell")
    with pytest.raises(ValueError, match=r"no projection, but there is a `layer_0.forward.p`"):
        convert.to_flax(make_stack(cells.lstm(proj_size=2)), "nnx.LSTMCell")
    with pytest.raises(ValueError, match=r"needs a `layer_0.forward.b_hn`"):
        convert.to_flax(make_stack(cells.gru(reset_after=False)), "linen.GRUCell")
    (tree,) = convert.to_flax(gru, "linen.GRUCell")
    with pytest.raises(ValueError, match=r"those of a linen.GRUCell; missing: hn.bias, hn.kernel$"):
        convert.from_flax({name: leaves for name, leaves in tree.items() if name != "hn"})
    with pytest.raises(ValueError, match=r"not those of linen.*, they are cell.hn.bias, cell.hn.k"):
        convert.from_flax({"cell": tree})
    with pytest.raises(ValueError, match=r"`iz.bias` should be \[H\] = \(4,\), got \(3,\)"):
        convert.from_flax(tree | {"iz": tree["iz"] | {"bias": np.zeros(3)}})
    wide = {"dense_i": {"kernel": np.zeros((3, 12)), "bias": np.zeros(12)}}
    with pytest.raises(ValueError, match=r"`dense_h.kernel` should be \[H, 3H\] = \(4, 12\), got"):
        convert.from_flax(wide | {"dense_h": {"kernel": np.zeros((4, 8))}})
    with pytest.raises(ValueError, match="the layers of a stack should be of one cell"):
        convert.from_flax(tree, *convert.to_flax(make_stack(cells.lstm()), "linen.LSTMCell"))


# Keras

# Keras' layer, its options, directions, our cell
KERAS_LAYERS = {
    "lstm_both_ways": ("LSTM", {}, 2, cells.lstm()),
    "lstm_no_bias": ("LSTM", {"use_bias": False}, 1, cells.lstm(use_bias=False)),
    "gru_reset_after_both_ways": ("GRU", {"reset_after": True}, 2, cells.gru()),
    "gru_reset_before": ("GRU", {"reset_after": False}, 1, cells.gru(reset_after=False)),
    "gru_no_bias_both_ways": ("GRU", {"use_bias": False}, 2, cells.gru(use_bias=False)),
    "simple": ("SimpleRNN", {}, 1, cells.elman()),
    "relu_both_ways": ("SimpleRNN", {"activation": "relu"}, 2, cells.elman(activation="relu")),
}


@pytest.fixture(scope="module")
def keras(tmp_path_factory):
    """Keras on JAX; its settings are read, and its home written to, when it is imported."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("KERAS_BACKEND", "jax")
        patch.setenv("KERAS_HOME", str(tmp_path_factory.mktemp("keras")))
        warnings.simplefilter("ignore")  # of packages that it brings along
        return pytest.importorskip("keras", reason=INTEROP.format("keras"))


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
@pytest.mark.parametrize("name", KERAS_LAYERS)
def test_equals_keras(keras, name):
    """Two layers: outputs and states of our weights there, of its weights here.

    In single precision: Keras' matmuls on JAX have no other.
    """
    kind, options, directions, cell = KERAS_LAYERS[name]
    params = make_stack(cell, layers=2, directions=directions)
    rng = np.random.default_rng(1)
    x = draw(rng, B, T, I, dtype=np.float32)
    states = [
        tuple(
            cell.state_type(*(jnp.asarray(draw(rng, B, H)) for _ in cell.state_names))
            for _ in range(directions)
        )
        for _ in range(2)
    ]
    state = tuple(pair if directions == 2 else pair[0] for pair in states)

    weights, given = convert.to_keras(params), convert.state_to_keras(state)
    want_y, want_states = x, []
    # Orthogonal matrices take long to compile.
    options = options | {"kernel_initializer": "zeros", "recurrent_initializer": "zeros"}
    for index in range(2):
        layer = getattr(keras.layers, kind)(H, return_sequences=True, return_state=True, **options)
        if directions == 2:
            layer = keras.layers.Bidirectional(layer)
        layer.build(want_y.shape)
        layer.set_weights(weights[index])
        assert_identical(layer.get_weights(), weights[index])
        start = [jnp.asarray(array) for array in given[index]]
        call = jax.jit(lambda x, start, layer=layer: layer(x, initial_state=start))
        with quick_compile():
            want_y, *final = call(want_y, start)
        want_states.append(final)
    assert_identical(convert.from_keras(*weights), params)
    assert_identical(convert.state_from_keras(cell.state_type, *given), state)
    y, final = run(cell, params, x, state)
    assert_close(y, want_y, np.float32, size=2 * T * H)
    want_final = convert.state_from_keras(cell.state_type, *want_states)
    assert_close(final, want_final, np.float32, size=2 * T * H)


def test_keras_gates_stand_elsewhere():
    """Of a GRU, z is before r: keras#15915."""
    params = make_stack(cells.gru())
    ours = params["layer_0"]["forward"]
    kernel, recurrent, bias = convert.to_keras(params)[0]
    want = np.concatenate([ours["w_x"][:, gate] for gate in (1, 0, 2)], axis=1)
    np.testing.assert_array_equal(kernel, want)
    np.testing.assert_array_equal(recurrent[:, :H], ours["r"][:, 1])
    np.testing.assert_array_equal(bias[1], [0] * 2 * H + list(ours["b_hn"]))


def test_refusals_of_keras():
    kernel, recurrent, bias = convert.to_keras(make_stack(cells.gru()))[0]
    with pytest.raises(ValueError, match=r"weights of layer 1 should be kernel.* got 1 arrays"):
        convert.from_keras([kernel, recurrent, bias], [kernel])
    with pytest.raises(ValueError, match=r"`layer 0 recurrent_kernel` should be \[H, 4H\] of an"):
        convert.from_keras([kernel, recurrent[:, :8], bias])
    with pytest.raises(ValueError, match=r"`layer 0 kernel` should be \[I, 3H\] = \(3, 12\), got"):
        convert.from_keras([kernel[:, :8], recurrent])
    with pytest.raises(ValueError, match=r"bias` should be \[2, 3H\] = \(2, 12\), got \(1, 12\)"):
        convert.from_keras([kernel, recurrent, bias[:1]])
    with pytest.raises(ValueError, match=r"`layer 0 kernel` should be \[I, G H\], got shape"):
        convert.from_keras([bias[0], recurrent])
    with pytest.raises(ValueError, match="Keras has no projection"):
        convert.to_keras(make_stack(cells.lstm(proj_size=2)))
    with pytest.raises(ValueError, match=r"should be h, c of one direction or of two, got .1. arr"):
        convert.state_from_keras(cells.LSTMState, [bias])


# SRU

SRU_LAYERS = {
    "one_way": {"num_layers": 3},
    "both_ways": {"num_layers": 2, "bidirectional": True},
    "scaled": {"num_layers": 2, "rescale": True, "highway_bias": -1.0},
    "scaled_both_ways": {"num_layers": 2, "bidirectional": True, "rescale": True},
    "layer_norm": {"num_layers": 2, "layer_norm": True},
    "projected": {"num_layers": 2, "projection_size": 2, "rescale": True},
}


@pytest.fixture(scope="module")
def sru():
    """The package, without the compiled C++ that its Python loop does not need."""
    torch = pytest.importorskip("torch", reason=INTEROP.format("torch"))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tools for extensions
        extension = importlib.import_module("torch.utils.cpp_extension")
        patch.setattr(extension, "load", lambda **_: None)
        patch.setattr(torch.jit, "script", lambda function: function)
        return pytest.importorskip("sru", reason=INTEROP.format("sru"))


def sru_options(options):
    """The package's options as those of our converter, and our cell."""
    given = {
        "rescale": options.get("rescale", False),
        "highway_bias": options.get("highway_bias", 0.0),
    }
    cell = cells.sru(
        layer_norm=options.get("layer_norm", False),
        proj_size=options.get("projection_size"),
        **given,
    )
    return given, cell, options.get("bidirectional", False)


def check_sru(weights, options, x, c0, y, c):
    """Outputs and final states equal, and the weights come back."""
    given, cell, both = sru_options(options)
    params = convert.from_sru(weights, bidirectional=both, **given)
    state = convert.state_from_sru(c0, bidirectional=both)
    got_y, final = run(cell, params, x.swapaxes(0, 1), state)
    assert_close(got_y, y.swapaxes(0, 1), np.float64, size=T * H)
    assert_close(convert.state_to_sru(final), c, np.float64, size=T * H)
    assert_identical(convert.state_to_sru(state), c0)
    # Up to the scale of the highway, which is divided out and multiplied in again.
    assert_close(convert.to_sru(params, **given), weights, np.float64)


@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore:Running SRU on CPU with grad_enabled=True")
@pytest.mark.parametrize("name", SRU_LAYERS)
def test_equals_sru(sru, name):
    torch, options = importlib.import_module("torch"), SRU_LAYERS[name]
    torch.manual_seed(0)
    # In layers of no more inputs than projection_size the package has no projection.
    module = sru.SRU(I, H, **options).double()
    module.reset_parameters()  # makes scale_x anew, in double precision
    for parameter in module.parameters():
        parameter.data.normal_()
    x = torch.randn(T, B, I).double()
    width = H * (1 + options.get("bidirectional", False))
    c0 = torch.randn(options["num_layers"], B, width).double()
    y, c = (a.detach().numpy() for a in module(x, c0))
    weights = {name: a.numpy() for name, a in module.state_dict().items()}
    check_sru(weights, options, x.numpy(), c0.numpy(), y, c)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "one_way",
            {"highway_bias": -1.0, "rescale": True, "layer_norm": True, "projection_size": 2},
        ),
        ("both_ways", {"bidirectional": True}),
    ],
)
def test_equals_recorded_sru(name, options):
    """Without the package; fixtures/README.md tells how this was recorded."""
    with np.load(FIXTURES / "sru.npz", allow_pickle=False) as recorded:
        arrays = {
            key.removeprefix(f"{name}/"): recorded[key]
            for key in recorded
            if key.startswith(f"{name}/")
        }
    x, c0, y, c = (arrays.pop(key) for key in ("x", "c0", "y", "c"))
    check_sru(arrays, options, x, c0, y, c)


@pytest.mark.parametrize("in_features", [I, H], ids=["with_matrix", "without"])
def test_sru_there_and_back_is_exact(in_features):
    """Without a scale; the prefix is put on and taken off."""
    params = make_stack(cells.sru(), layers=3, in_features=in_features)
    weights = convert.to_sru(params, rescale=False, prefix="enc.")
    assert all(a.flags.c_contiguous and a.flags.writeable for a in weights.values())
    weights["head"] = np.zeros(2)
    assert_identical(convert.from_sru(weights, rescale=False, prefix="enc."), params)


def test_sru_of_two_directions_on_as_many_inputs():
    """I = H: the package has a matrix and our cell has none; I = 2H: the other way around."""
    params = make_stack(cells.sru(), directions=2, in_features=H)
    weights = convert.to_sru(params, highway_bias=-1.0)
    assert_identical(
        convert.from_sru(weights, bidirectional=True, highway_bias=-1.0),
        params,
    )
    weights["rnn_lst.0.weight"] = weights["rnn_lst.0.weight"] + 1
    with pytest.raises(ValueError, match=r"highway of `rnn_lst.0.weight`, .* none that jaxrnn's"):
        convert.from_sru(weights, bidirectional=True, highway_bias=-1.0)
    params = make_stack(cells.sru(), directions=2, in_features=2 * H)
    with pytest.raises(ValueError, match=r"highway of layer_0.forward, .* none that the package"):
        convert.to_sru(params)


def test_refusals_of_sru():
    weights = convert.to_sru(make_stack(cells.sru()))
    with pytest.raises(ValueError, match=r"`rnn_lst.0.scale_x` is 1.732, but .* rescale=False"):
        convert.from_sru(weights, rescale=False)
    with pytest.raises(ValueError, match=r"the layer highway_bias=0.0$"):
        convert.from_sru(weights, highway_bias=2.0)
    unscaled = convert.to_sru(make_stack(cells.sru()), rescale=False)
    with pytest.raises(ValueError, match=r"is 1, but .* the layer rescale=False$"):
        convert.from_sru(unscaled)
    with pytest.raises(ValueError, match=r"weight_c` should be \[2 D H\], got shape \(8, 1\)"):
        convert.from_sru(weights | {"rnn_lst.0.weight_c": np.zeros((8, 1))})
    with pytest.raises(ValueError, match=r"bias` should be \[2 H\] = \(8,\), got \(12,\)"):
        convert.from_sru(weights | {"rnn_lst.0.bias": np.zeros(12)})
    with pytest.raises(ValueError, match=r"weight` should be \[I, 4H\] = \(3, 16\), got \(3, 12\)"):
        convert.from_sru(weights | {"rnn_lst.0.weight": np.zeros((3, 12))})
    del weights["rnn_lst.0.bias"]
    with pytest.raises(ValueError, match=r"an sru.SRU; missing: rnn_lst.0.bias; unexpected: head$"):
        convert.from_sru(weights | {"head": np.zeros(2)})
    with pytest.raises(ValueError, match=r"SRU cell at layer_0.forward; missing: v; unexpected: r"):
        convert.to_sru(make_stack(cells.elman()))
    params = make_stack(cells.sru(layer_norm=True), directions=2)
    with pytest.raises(ValueError, match=r"share a layer_norm.weight, `layer_0.backward.gain_x`"):
        convert.to_sru(params)
