"""What a training step reads and returns, and what a checkpoint therefore holds."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxrnn.models import LanguageModel
from jaxrnn.parallel import EVERYWHERE, put
from jaxrnn.precision import LossScale, in_float32

# Where the lanes are in the carried state: devices share them.
CARRY = PartitionSpec("data")


class TrainState(NamedTuple):
    """All that the next training step depends on, besides its batch.

    Attributes:
        step: int32 [], steps done.
        params: nested dict of parameters.
        opt_state: the optimizer's state.
        carry: the recurrent state that this window hands to the next, batch first.
        key: uint32, the data of the run's random key; never changes, a step folds its number in.
        rate_scale: float32 [], what plateaus have left of the scheduled learning rate.
        loss_scale: that of a float16 loss, else None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    carry: Any
    key: jax.Array
    rate_scale: jax.Array
    loss_scale: LossScale | None = None


# Where the parts of a state are on the devices.
STATE: Any = TrainState._make([EVERYWHERE] * len(TrainState._fields))._replace(carry=CARRY)


@dataclasses.dataclass
class Progress:
    """What the loop on the host remembers between steps; saved beside the `TrainState`.

    Losses are in nats a token. `epoch` and `window` are the data position: the next window to
    train on. The sums run since the last record and since the start of the epoch; `seconds` is the
    time spent so far, over all restarts.
    """

    step: int = 0
    epoch: int = 0
    window: int = 0
    interval_nll: float = 0.0
    interval_tokens: int = 0
    epoch_nll: float = 0.0
    epoch_tokens: int = 0
    best_loss: float | None = None
    best_step: int = 0
    best_epoch: float = 0.0
    epochs_since_best: int = 0
    epochs_since_cut: int = 0
    skipped_steps: int = 0
    seconds: float = 0.0

    def advance(self, position: tuple[int, int] | None) -> bool:
        """Counts a step, after which `position` comes next; returns whether an epoch ended."""
        assert position is not None  # A stream over `batches` has one.
        epoch_over = position[0] > self.epoch
        self.step += 1
        self.epoch, self.window = position
        return epoch_over

    def observe(self, loss: float, epoch: float) -> bool:
        """Takes a validation loss, in nats a token; returns whether it is the best so far.

        Args:
            loss: the validation loss.
            epoch: epochs done, as a number with a fraction.
        """
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step, self.best_epoch = loss, self.step, epoch
            self.epochs_since_best = self.epochs_since_cut = 0
            return True
        self.epochs_since_best += 1
        self.epochs_since_cut += 1
        return False

    def cut_due(self, patience: int) -> bool:
        """Tells whether the learning rate is to be cut now, and then counts anew."""
        due = self.epochs_since_cut >= patience
        if due:
            self.epochs_since_cut = 0
        return due


def initial_state(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    batch_size: int,
    seed: int,
    loss_scale: float = 0.0,
) -> TrainState:
    """Returns the state before the first step.

    Args:
        model: a language model; its parameters are taken as they are.
        optimizer: the optimizer whose state is made.
        mesh: where it is put.
        batch_size: lanes of the carried state, of all devices.
        seed: seed of the run's random key.
        loss_scale: the first loss scale; 0: there is none.
    """
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(in_float32(params)),
        carry=model.initialize_state(batch_size),
        key=jax.random.key_data(jax.random.key(seed)),
        rate_scale=jnp.ones((), jnp.float32),
        loss_scale=LossScale.initial(loss_scale) if loss_scale else None,
    )
    return put(mesh, state, STATE)
