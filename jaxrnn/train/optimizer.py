"""The optimizer and its learning rate, from the config's `optimizer` group."""

import jax
import jax.numpy as jnp
import optax

from jaxrnn.train.config import Config
from jaxrnn.train.state import Progress, TrainState


def make_schedule(config: Config, total_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step.

    Args:
        config: the `optimizer` group.
        total_steps: steps of the whole run, at whose end the rate is `final_fraction` of its peak.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    decay_steps = max(total_steps - warmup, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, alpha=config.final_fraction),
        "linear": optax.linear_schedule(peak, config.final_fraction * peak, decay_steps),
    }[config.schedule]
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def make_optimizer(config: Config, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns the chain: clip by the global norm, then the update rule at the scheduled rate."""
    clip = clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    if config.name == "adamw":
        rule = optax.adamw(schedule, config.b1, config.b2, weight_decay=config.weight_decay)
        return optax.chain(clip, rule)
    if config.name == "adam":
        rule = optax.adam(schedule, config.b1, config.b2)
    else:
        rule = optax.sgd(schedule, config.momentum or None)
    decay = optax.add_decayed_weights(config.weight_decay)
    return optax.chain(clip, decay if config.weight_decay else optax.identity(), rule)


def cut_rate(config: Config, state: TrainState, progress: Progress) -> TrainState:
    """Divides the learning rate where validation has not improved for long enough."""
    if config.plateau_factor == 1.0 or not progress.cut_due(config.plateau_patience):
        return state
    return state._replace(rate_scale=state.rate_scale / config.plateau_factor)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales gradients down to a global norm of at most `max_norm`, measured in float32.

    Optax measures in the gradients' own dtype, where a hundred values of 1e3 in float16 are
    infinite.
    """

    def update(updates, state, params=None):
        del params
        norm = global_norm(updates)
        # Not `min(1, max_norm / norm)`: all-zero gradients stay zero.
        scale = jnp.where(norm > max_norm, max_norm / norm, 1.0)
        return jax.tree.map(lambda u: (u * scale).astype(u.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def global_norm(tree) -> jax.Array:
    """Returns the square root of the sum of all squares in a tree, float32 []."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares))
