"""The loss of a whole text under given parameters, with a recurrent state of its own."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxrnn.parallel import EVERYWHERE, put
from jaxrnn.train.state import CARRY
from jaxrnn.train.step import BATCH


class Score(NamedTuple):
    """The loss of a text in nats, summed over its tokens, and their number."""

    nll: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nll / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinity where that is too large for a float."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """Returns e to a loss in nats a token; infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def make_evaluate(graphdef: nnx.GraphDef, mesh: Mesh) -> Callable[..., Score]:
    """Returns `evaluate(params, batches) -> Score`, whose step is compiled once.

    It carries a recurrent state of its own from window to window, so it can run between training
    steps and changes none of them.

    Args:
        graphdef: the model without its parameters.
        mesh: the devices, whose axis "data" shares the lanes.
    """

    def on_device(params, carry, batch):
        model = nnx.merge(graphdef, params)
        initial = model.initialize_state(batch.inputs.shape[1])
        carry = jax.tree.map(lambda i, c: jnp.where(batch.starts, i, c), initial, carry)
        nll, carry = model.loss(
            batch.inputs, batch.targets, carry, mask=batch.mask, deterministic=True
        )
        return carry, *lax.psum((nll, jnp.sum(batch.mask)), "data")

    eval_step = jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(EVERYWHERE, CARRY, BATCH),
            out_specs=(CARRY, EVERYWHERE, EVERYWHERE),
        )
    )

    def evaluate(params, batches: Iterable) -> Score:
        model, carry, sums = nnx.merge(graphdef, params), None, []
        for batch in batches:
            if carry is None:
                carry = put(mesh, model.initialize_state(batch.inputs.shape[1]), CARRY)
            carry, *window = eval_step(params, carry, batch)
            sums.append(window)
        # Summed in float64 on the host: float32 would lose the fourth digit of a long text.
        nll, tokens = np.sum(np.asarray(jax.device_get(sums), np.float64), axis=0)
        return Score(float(nll), int(tokens))

    return evaluate
