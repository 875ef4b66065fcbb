"""One step of training: a pure function, compiled once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxrnn.train.optimizer import global_norm
from jaxrnn.train.state import TrainState


class StepMetrics(NamedTuple):
    """What one step tells, float32 [] each; they stay on the device until someone asks.

    `nll` is the sum over the window's tokens of the negative log-likelihood, in nats, and
    `tokens` their number; the norms are those of the gradients before the clip and of the
    parameters before the update.
    """

    nll: jax.Array
    tokens: jax.Array
    gradient_norm: jax.Array
    parameter_norm: jax.Array
    learning_rate: jax.Array


TrainStep = Callable[[TrainState, Any], tuple[TrainState, StepMetrics]]


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    padded: bool,
) -> TrainStep:
    """Returns `train_step(state, batch) -> (state, metrics)`, jitted, with the state donated.

    Args:
        graphdef: the model without its parameters.
        optimizer: what turns gradients into updates.
        schedule: the optimizer's learning rate, for the metrics.
        padded: windows other than an epoch's last may end in padding, which the carried state must
            not go through. It costs a mask in the time loop.
    """

    def train_step(state: TrainState, batch) -> tuple[TrainState, StepMetrics]:
        tokens = jnp.sum(batch.mask, dtype=jnp.float32)

        def mean_loss(params):
            nll, carry = window_loss(graphdef, params, state, batch, padded)
            return nll / jnp.maximum(tokens, 1.0), (nll, carry)

        gradients, (nll, carry) = jax.grad(mean_loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        updates = jax.tree.map(lambda u: (u * state.rate_scale).astype(u.dtype), updates)
        metrics = StepMetrics(
            nll=nll.astype(jnp.float32),
            tokens=tokens,
            gradient_norm=global_norm(gradients),
            parameter_norm=global_norm(state.params),
            learning_rate=jnp.asarray(schedule(state.step), jnp.float32) * state.rate_scale,
        )
        return state._replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            carry=carry,
        ), metrics

    return jax.jit(train_step, donate_argnums=0)


def window_loss(graphdef: nnx.GraphDef, params, state: TrainState, batch, padded: bool):
    """Returns a window's summed loss [] and the recurrent state for the next window.

    The state comes in from the window before, or is the initial one where `batch.starts`; no
    gradient goes back through it (truncated backpropagation).
    """
    model = nnx.merge(graphdef, params)
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    initial = model.initialize_state(batch.inputs.shape[1])
    carry = jax.tree.map(lambda i, c: jnp.where(batch.starts, i, c), initial, state.carry)
    return model.loss(
        batch.inputs,
        batch.targets,
        jax.lax.stop_gradient(carry),
        mask=batch.mask,
        lengths=jnp.sum(batch.mask, axis=0) if padded else None,
        deterministic=False,
        rngs=nnx.Rngs(dropout=key),
    )
