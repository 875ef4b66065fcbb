"""The language model and its losses, against plain softmaxes in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerance import assert_close

from jaxrnn.models import LanguageModel, language_model, softmax, weighted_nll
from jaxrnn.train import config

VOCABULARY, STEPS, BATCH = 61, 5, 3
MODELS = {
    "full": {"softmax": "full"},
    "full, untied": {"softmax": "full", "tied": False},
    "adaptive": {"cutoffs": (20, 40), "div_value": 2.0},
    "adaptive, whole vectors": {"cutoffs": (20, 40), "div_value": 1.0},
    "adaptive, untied": {"cutoffs": (20, 40), "tied": False},
    "adaptive, projected": {"cutoffs": (20, 40), "hidden_features": 12},
}


def build(seed=0, **options):
    options = {"embed_features": 8, "hidden_features": 8} | options
    model = LanguageModel(VOCABULARY, **options, rngs=nnx.Rngs(seed))
    graphdef, params = nnx.split(model)
    rng = np.random.default_rng(seed)
    # Away from the small initial values, so that no term is lost in another.
    params = jax.tree.map(lambda a: a + jnp.asarray(rng.normal(size=a.shape) / 3, a.dtype), params)
    return graphdef, params


def tokens(seed=1):
    rng = np.random.default_rng(seed)
    inputs, targets = rng.integers(0, VOCABULARY, (2, STEPS, BATCH))
    return jnp.asarray(inputs), jnp.asarray(targets)


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("chunk_logits", [2**20, 200])
def test_weighted_nll_is_the_softmax_loss(monkeypatch, chunk_logits):
    """Values and gradients, in one chunk and in several with a ragged last one."""
    monkeypatch.setattr(softmax, "CHUNK_LOGITS", chunk_logits)
    rng = np.random.default_rng(0)
    n, v, e = 37, 11, 5
    x, table, bias = (rng.normal(size=s) for s in ((n, e), (v, e), (v,)))
    targets, weights = rng.integers(0, v, n), rng.random(n) * (rng.random(n) < 0.6)

    p = log_softmax(x @ table.T + bias)
    want = -(weights * p[np.arange(n), targets]).sum()
    dz = weights[:, None] * (np.exp(p) - np.eye(v)[targets])
    want_gradients = (dz @ table, dz.T @ x, dz.sum(0))

    arguments = [jnp.asarray(a, jnp.float32) for a in (x, table, bias)]
    got, gradients = jax.jit(jax.value_and_grad(weighted_nll, argnums=(0, 1, 2)))(
        *arguments, jnp.asarray(targets), jnp.asarray(weights, jnp.float32)
    )
    assert_close(got, want, jnp.float32, n)
    assert_close(gradients, want_gradients, jnp.float32, n)


def test_tokens_of_weight_zero_may_have_any_target():
    x, table, bias = jnp.ones((4, 3)), jnp.ones((5, 3)), jnp.zeros(5)
    nll, dx = jax.value_and_grad(weighted_nll)(
        x, table, bias, jnp.array([1, -7, 99, 2]), jnp.array([1.0, 0.0, 0.0, 1.0])
    )
    assert_close(nll, 2 * np.log(5), jnp.float32, 5)
    assert not dx[1:3].any()
    assert not weighted_nll(x, table, bias, jnp.zeros(4, int), jnp.zeros(4))


@pytest.mark.parametrize("name", MODELS)
def test_loss_is_the_sum_of_log_probs_and_these_are_normalized(name):
    graphdef, params = build(**MODELS[name])
    inputs, targets = tokens()
    mask = jnp.asarray(np.random.default_rng(2).random((STEPS, BATCH)) < 0.7)

    def loss(params):
        return nnx.merge(graphdef, params).loss(inputs, targets, mask=mask, deterministic=True)[0]

    def plain(params):
        model = nnx.merge(graphdef, params)
        log_probs = model.log_probs(model.features(inputs)[0])
        return -jnp.sum(jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0] * mask)

    got, gradients = jax.jit(jax.value_and_grad(loss))(params)
    want, want_gradients = jax.jit(jax.value_and_grad(plain))(params)
    assert_close(got, want, jnp.float32, VOCABULARY)
    assert_close(
        nnx.to_pure_dict(gradients), nnx.to_pure_dict(want_gradients), jnp.float32, VOCABULARY
    )

    model = nnx.merge(graphdef, params)
    log_probs = model.log_probs(model.features(inputs)[0])
    assert log_probs.shape == (STEPS, BATCH, VOCABULARY)
    total = np.exp(np.asarray(log_probs, np.float64)).sum(-1)
    assert_close(jnp.asarray(total, jnp.float32), np.ones_like(total), jnp.float32, VOCABULARY)


def test_adaptive_log_probs_are_head_times_group():
    """Against NumPy, from the parameters alone."""
    graphdef, params = build(**MODELS["adaptive"])
    model = nnx.merge(graphdef, params)
    x = np.random.default_rng(3).normal(size=(4, 8))
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(params))
    words, out = p["embedding"], p["softmax"]
    head_table = np.concatenate([words["tables"][0], out["group_table"]])
    head = log_softmax(x @ head_table.T + np.concatenate([out["bias"][:20], out["group_bias"]]))
    parts = [head[:, :20]]
    for index, (first, end) in enumerate(((20, 40), (40, VOCABULARY))):
        features = x @ words["projections"][index].T
        logits = features @ words["tables"][index + 1].T + out["bias"][first:end]
        parts.append(head[:, 20 + index, None] + log_softmax(logits))
    got = model.log_probs(jnp.asarray(x, jnp.float32))
    assert_close(got, np.concatenate(parts, -1), jnp.float32, VOCABULARY)


def test_logits_of_a_window_never_stand_in_memory_at_once():
    """Temporaries of loss and gradient stay under the size of all logits."""
    n, v, e = 4096, 8192, 4
    shapes = [(n, e), (v, e), (v,), (n,)]
    x, table, bias, weights = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    targets = jax.ShapeDtypeStruct((n,), jnp.int32)
    step = jax.jit(jax.value_and_grad(weighted_nll, argnums=(0, 1, 2)))
    compiled = step.lower(x, table, bias, targets, weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n * v * 4 / 8


def test_words_of_each_group_are_embedded_by_their_table():
    graphdef, params = build(**MODELS["adaptive"])
    words = nnx.merge(graphdef, params).embedding
    got = words.embed(jnp.array([0, 19, 20, 39, 40, 60]), jnp.float32)
    tables = [np.asarray(t[...], np.float64) for t in words.tables]
    for index, projection in enumerate(words.projections):
        tables[index + 1] = tables[index + 1] @ np.asarray(projection[...], np.float64)
    assert_close(got, np.concatenate(tables)[[0, 19, 20, 39, 40, 60]], jnp.float32, 8)


@pytest.mark.parametrize("cell", ["elman", "gru", "lstm", "sru"])
def test_state_passes_from_window_to_window(cell):
    graphdef, params = build(cell=cell, softmax="full", num_layers=2)
    model = nnx.merge(graphdef, params)
    inputs, _ = tokens()
    whole, final = model.features(inputs)
    first, state = model.features(inputs[:2])
    second, state = model.features(inputs[2:], state)
    assert_close(jnp.concatenate([first, second]), whole, jnp.float32, 16)
    assert_close(state, final, jnp.float32, 16)
    # With lengths the state stops where a lane does.
    lengths = jnp.full(BATCH, 2)
    assert_close(
        model.features(inputs, lengths=lengths)[1], model.features(inputs[:2])[1], jnp.float32, 16
    )


def test_dropout_draws_from_the_key_of_the_call():
    rates = {"dropout_embedding": 0.5, "dropout_layers": 0.5, "dropout_output": 0.5}
    graphdef, params = build(softmax="full", num_layers=2, **rates)
    model = nnx.merge(graphdef, params)
    inputs, targets = tokens()

    def loss(seed=None):
        rngs = None if seed is None else nnx.Rngs(dropout=seed)
        return model.loss(inputs, targets, deterministic=seed is None, rngs=rngs)[0]

    assert loss(0) == loss(0)
    assert loss(0) != loss(1)
    assert loss() not in (loss(0), loss(1))
    with pytest.raises(ValueError, match="dropout needs random numbers"):
        model.loss(inputs, targets, deterministic=False)


@pytest.mark.parametrize(
    "option", ["dropout_words", "dropout_recurrent", "dropout_weights", "zoneout", "variational"]
)
def test_each_regularization_acts_in_training_alone(option):
    base = {"dropout_embedding": 0.5} if option == "variational" else {}
    on = base | {option: True if option == "variational" else 0.5}
    inputs, targets = tokens()

    def losses(options):
        model = nnx.merge(*build(softmax="full", **options))
        rngs = nnx.Rngs(dropout=0)
        train = model.loss(inputs, targets, deterministic=False, rngs=rngs)[0]
        return train, model.loss(inputs, targets, deterministic=True)[0]

    (train, evaluation), (plain_train, plain) = losses(on), losses(base)
    assert train != plain_train
    assert (evaluation == plain) == (option != "zoneout")  # which takes the mean


def test_the_trainer_knows_the_cells():
    assert language_model.CELLS.keys() == set(config.CELLS)
    inputs, targets = tokens()
    for name in language_model.CELLS:
        model = nnx.merge(*build(cell=name, softmax="full"))
        assert jnp.isfinite(model.loss(inputs, targets, deterministic=True)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softmax": "sampled"}, 'softmax should be "adaptive" or "full"'),
        ({"cell": "lstn"}, "cell should be one of elman, gru, .*, sru, got 'lstn'"),
        ({"cutoffs": (40, 20)}, "cutoffs should be rising"),
        ({"div_value": 0.5}, "div_value should be at least 1"),
        ({"dropout_output": 1.5}, "dropout_output should be between 0 and 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
