"""One step of training: a pure function, compiled once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrnn.data import Batch
from jaxrnn.models.language_model import Counts
from jaxrnn.parallel import EVERYWHERE, sharded_gradients
from jaxrnn.precision import all_finite, keep_if
from jaxrnn.train.optimizer import global_norm
from jaxrnn.train.state import CARRY, STATE, TrainState

# Where the lanes are in a batch.
LANES = PartitionSpec(None, "data")
BATCH: Any = Batch._make([LANES, LANES, LANES, EVERYWHERE])


class StepMetrics(NamedTuple):
    """What one step tells, float32 [] each; they stay on the device until someone asks.

    `nll` is the sum over the window's tokens of the negative log-likelihood, in nats, and
    `tokens` their number; the norms are those of the gradients before the clip and of the
    parameters before the update. `skipped` is 1 where the gradients were not finite under a loss
    scale and nothing was updated; `loss_scale` is the one that the step used, 0 for none.
    """

    nll: jax.Array
    tokens: jax.Array
    gradient_norm: jax.Array
    parameter_norm: jax.Array
    learning_rate: jax.Array
    loss_scale: jax.Array
    skipped: jax.Array


TrainStep = Callable[[TrainState, Any], tuple[TrainState, StepMetrics]]


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    mesh: Mesh,
    *,
    padded: bool,
    bptt: int = 0,
    micro_batches: int = 1,
) -> TrainStep:
    """Returns `train_step(state, batch) -> (state, metrics)`, jitted, with the state donated.

    Args:
        graphdef: the model without its parameters.
        optimizer: what turns gradients into updates.
        schedule: the optimizer's learning rate, for the metrics.
        mesh: the devices, whose axis "data" shares the lanes.
        padded: windows other than an epoch's last may end in padding, which the carried state must
            not go through. It costs a mask in the time loop.
        bptt: scales the update with the length of the window, as length / bptt (Merity et al.
            2017, arXiv:1708.02182, section 5); 0 does not.
        micro_batches: into how many a device cuts its lanes, to save memory.
    """

    def objective(params: Any, rows: Any, shared: Any, numbers: jax.Array) -> Any:
        batch, carry = rows
        key, counts, scale = shared
        model = nnx.merge(graphdef, params)
        initial = model.initialize_state(batch.inputs.shape[1])
        carry = jax.tree.map(lambda i, c: jnp.where(batch.starts, i, c), initial, carry)
        value, (nll, carry) = model.objective(
            batch.inputs,
            batch.targets,
            carry,
            mask=batch.mask,
            counts=counts,
            lengths=jnp.sum(batch.mask, axis=0) if padded else None,
            rngs=nnx.Rngs(dropout=key),
            rows=numbers,
        )
        return value * scale, (nll, jax.lax.stop_gradient(carry))

    gradients_of = sharded_gradients(
        objective,
        mesh,
        row_specs=(BATCH, CARRY),
        state_specs=CARRY,
        micro_batches=micro_batches,
    )

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        counts = Counts.of(batch.mask)
        scale = 1.0 if state.loss_scale is None else state.loss_scale.scale
        shared = (key, counts, jnp.float32(scale))
        gradients, nll, carry = gradients_of(state.params, (batch, state.carry), shared)
        # In this order: sum over devices (in float32, done), unscale, finite, clip, update.
        gradients = jax.tree.map(lambda g: g / scale, gradients)
        rate = state.rate_scale
        if bptt:
            rate = rate * jnp.max(jnp.sum(batch.mask, axis=0)) / bptt
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        updates = jax.tree.map(lambda u: (u * rate).astype(u.dtype), updates)
        after = state._replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            carry=carry,
        )
        metrics = StepMetrics(
            nll=nll,
            tokens=counts.tokens,
            gradient_norm=global_norm(gradients),
            parameter_norm=global_norm(state.params),
            learning_rate=jnp.asarray(schedule(state.step), jnp.float32) * rate,
            loss_scale=jnp.float32(0.0 if state.loss_scale is None else scale),
            skipped=jnp.float32(0),
        )
        if state.loss_scale is None:
            return after, metrics
        finite = all_finite(gradients)
        skipped = state._replace(carry=keep_if(all_finite(carry), carry, state.carry))
        after = keep_if(finite, after, skipped)._replace(loss_scale=state.loss_scale.after(finite))
        return after, metrics._replace(skipped=jnp.where(finite, 0.0, 1.0))

    # Said, not inferred: what comes out has to be what goes in, or the second step compiles again.
    shardings = tuple(NamedSharding(mesh, spec) for spec in STATE)
    out = TrainState._make(shardings), NamedSharding(mesh, EVERYWHERE)
    return jax.jit(train_step, donate_argnums=0, out_shardings=out)
