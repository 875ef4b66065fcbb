"""A recurrent language model."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx

from jaxrnn import cells
from jaxrnn._typing import Array
from jaxrnn.cells.base import Cell
from jaxrnn.models.softmax import Softmax, WordVectors
from jaxrnn.nnx import RNN
from jaxrnn.precision import FLOAT32, Policy
from jaxrnn.recurrence.api import Remat
from jaxrnn.regularization import (
    activation_penalty,
    dropout,
    embedding_dropout,
    temporal_activation_penalty,
)

CELLS: dict[str, Callable[..., Cell]] = {
    "elman": cells.elman,
    "gru": cells.gru,
    "indrnn": cells.indrnn,
    "lstm": cells.lstm,
    "mgu": cells.mgu,
    "min_gru": cells.min_gru,
    "min_lstm": cells.min_lstm,
    "qrnn": cells.qrnn,
    "slstm": cells.slstm,
    "sru": cells.sru,
}


class Counts(NamedTuple):
    """Over how many a loss is a mean, of all devices and micro-batches: numbers ``[]``."""

    tokens: Array
    pairs: Array

    @classmethod
    def of(cls, mask: Array) -> "Counts":
        """The real steps of a mask ``[T, B]``, and the pairs of neighbours among them."""
        pairs = mask[1:] & mask[:-1]
        return cls(*(jnp.sum(flags, dtype=jnp.float32) for flags in (mask, pairs)))


class Outputs(NamedTuple):
    """Of the last layer: ``[T, B, H]`` before and after its dropout; the next window's state."""

    raw: Array
    dropped: Array
    state: tuple[Any, ...]


class LanguageModel(nnx.Module):
    """Embedding, a stack of recurrent layers, and a softmax over the vocabulary.

    Dropout as in Zaremba et al. (2014), arXiv:1409.2329, or, of the recurrent part and of words, as
    in Merity et al. (2017), arXiv:1708.02182. Tied embedding and softmax as in Press & Wolf (2017),
    arXiv:1608.05859. Arrays are time-major.

    Args:
        vocabulary_size: V; word ids are to be sorted by falling frequency for "adaptive".
        cell: a name of `CELLS`, or a `jaxrnn.Cell`.
        embed_features: E.
        hidden_features: H, or a tuple with one for each layer; where the last is not E, a tied
            model projects its output to E.
        num_layers: recurrent layers.
        dropout_embedding: dropout rate on the embedding.
        dropout_layers: dropout rate between recurrent layers.
        dropout_output: dropout rate on the last layer's output.
        dropout_words: rate at which whole words are dropped from the embedding.
        dropout_recurrent: rate on ``h`` before the recurrent matmul.
        dropout_weights: rate on the entries of the recurrent matrix.
        zoneout: rate at which values of the state stay as they were.
        variational: the dropout of embedding, layers and output has one mask for all steps.
        tied: the softmax uses the embedding.
        softmax: "adaptive" or "full".
        cutoffs: first word id of each group of rare words, for the adaptive softmax (and, where
            tied, the embedding).
        div_value: by which the vectors of each such group are smaller than those before.
        activation_penalty: weight of the mean square of the dropped outputs in the training loss
            (AR of Merity et al. 2017, arXiv:1708.01009).
        temporal_penalty: weight of the mean square of neighbouring outputs' differences (TAR).
        policy: dtypes.
        implementation: of the time loop: see `jaxrnn.recurrence`.
        remat: see `jaxrnn.recurrence`.
        rngs: ``params``.

    Raises:
        ValueError: options that do not fit.
    """

    def __init__(
        self,
        vocabulary_size: int,
        *,
        cell: str | Cell = "lstm",
        embed_features: int = 256,
        hidden_features: int | tuple[int, ...] = 256,
        num_layers: int = 1,
        dropout_embedding: float = 0.0,
        dropout_layers: float = 0.0,
        dropout_output: float = 0.0,
        dropout_words: float = 0.0,
        dropout_recurrent: float = 0.0,
        dropout_weights: float = 0.0,
        zoneout: float = 0.0,
        variational: bool = False,
        tied: bool = True,
        softmax: Literal["adaptive", "full"] = "adaptive",
        cutoffs: Sequence[int] = (2000, 10000),
        div_value: float = 4.0,
        activation_penalty: float = 0.0,
        temporal_penalty: float = 0.0,
        policy: Policy = FLOAT32,
        implementation: Any = None,
        remat: Remat | None = None,
        rngs: nnx.Rngs,
    ):
        if isinstance(cell, str):
            if cell not in CELLS:
                raise ValueError(f"cell should be one of {', '.join(CELLS)}, got {cell!r}")
            cell = CELLS[cell]()
        self.dropout_words = dropout_words
        self.dropout_embedding = dropout_embedding
        self.dropout_output = dropout_output
        for name in ("words", "embedding", "output"):
            rate = getattr(self, f"dropout_{name}")
            if not 0 <= rate <= 1:
                raise ValueError(f"dropout_{name} should be between 0 and 1, got {rate}")
        self.vocabulary_size = vocabulary_size
        self.variational = variational
        self.policy = policy
        self.activation_penalty = activation_penalty
        self.temporal_penalty = temporal_penalty
        if softmax not in ("adaptive", "full"):
            raise ValueError(f'softmax should be "adaptive" or "full", got {softmax!r}')
        kept: dict[str, Any] = {"param_dtype": policy.param, "rngs": rngs}
        groups: dict[str, Any] = (
            {"cutoffs": cutoffs, "div_value": div_value} if softmax == "adaptive" else {}
        )
        self.embedding = WordVectors(
            vocabulary_size, embed_features, **(groups if tied else {}), **kept
        )
        self.rnn = RNN(
            cell,
            embed_features,
            hidden_features,
            num_layers=num_layers,
            dropout=dropout_layers,
            recurrent_dropout=dropout_recurrent,
            weight_dropout=dropout_weights,
            zoneout=zoneout,
            variational=variational,
            time_major=True,
            dtype=policy.compute,
            implementation=implementation,
            remat=remat,
            **kept,
        )
        # Random numbers come with each call, so that a step is a function of its key alone.
        self.rnn.rngs = nnx.data(None)
        self.projection = nnx.data(None)
        last = self.rnn.stack.sizes(hidden_features)[-1]
        if tied and last != embed_features:
            shape = (last, embed_features)
            self.projection = nnx.Param(glorot(rngs.params(), shape, policy.param))
        features = embed_features if tied else last
        words = None if tied else WordVectors(vocabulary_size, features, **groups, **kept)
        self.softmax = Softmax(words or self.embedding, features, **kept)

    def initialize_state(self, batch: int) -> tuple[Any, ...]:
        """The recurrent state that a text starts from."""
        return self.rnn.initialize_state(batch)

    def features(
        self,
        inputs: Array,
        state: tuple[Any, ...] | None = None,
        *,
        lengths: Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        rows: Array | None = None,
    ) -> tuple[Array, tuple[Any, ...]]:
        """What the softmax reads.

        Args:
            inputs: word ids ``[T, B]``.
            state: recurrent state, or None for the initial one.
            lengths: real steps of each lane ``[B]``, where the state must not go on behind them.
            deterministic: no dropout.
            rngs: ``dropout``, of this call.
            rows: integers ``[B]``, the lanes' numbers in the whole batch, where devices or
                micro-batches share it: dropout then depends on these, not on how they are shared.

        Returns:
            ``[T, B, E]`` and the state for the next window.
        """
        how: Any = {"lengths": lengths, "deterministic": deterministic, "rngs": rngs, "rows": rows}
        outputs = self.outputs(inputs, state, **how)
        return self.project(outputs.dropped), outputs.state

    def outputs(
        self,
        inputs: Array,
        state: tuple[Any, ...] | None = None,
        *,
        lengths: Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        rows: Array | None = None,
    ) -> Outputs:
        """What the last layer makes; arguments as of `features`."""
        active = not deterministic
        x = self.embedding.embed(inputs, self.policy.compute)
        if active and self.dropout_words > 0:
            key = dropout_key(rngs)
            x = embedding_dropout(key, self.dropout_words, inputs, x, self.vocabulary_size)
        if active and self.dropout_embedding > 0:
            key = dropout_key(rngs)
            x = dropout(key, self.dropout_embedding, x, per_row=self.variational, rows=rows)
        y, final = self.rnn(
            x, state, lengths=lengths, deterministic=deterministic, rngs=rngs, rows=rows
        )
        dropped = y
        if active and self.dropout_output > 0:
            key = dropout_key(rngs)
            dropped = dropout(key, self.dropout_output, y, per_row=self.variational, rows=rows)
        return Outputs(y, dropped, final)

    def project(self, y: Array) -> Array:
        """``[..., H] -> [..., E]``, in the dtype of the policy's output."""
        if self.projection is not None:
            y = y @ self.projection[...].astype(y.dtype)
        return y.astype(self.policy.output)

    def loss(
        self,
        inputs: Array,
        targets: Array,
        state: tuple[Any, ...] | None = None,
        *,
        mask: Array | None = None,
        lengths: Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        rows: Array | None = None,
    ) -> tuple[Array, tuple[Any, ...]]:
        """The summed negative log-likelihood of the targets, over the whole vocabulary.

        Args:
            inputs: word ids ``[T, B]``.
            targets: word ids ``[T, B]``.
            state: recurrent state, or None for the initial one.
            mask: bool ``[T, B]``, False at targets that do not count.
            lengths: as of `features`.
            deterministic: no dropout.
            rngs: ``dropout``, of this call.
            rows: as of `features`.

        Returns:
            nats, float32 ``[]``, and the state for the next window.
        """
        how: Any = {"lengths": lengths, "deterministic": deterministic, "rngs": rngs, "rows": rows}
        outputs = self.outputs(inputs, state, **how)
        return self.nll(outputs.dropped, targets, mask), outputs.state

    def objective(
        self,
        inputs: Array,
        targets: Array,
        state: tuple[Any, ...] | None,
        *,
        mask: Array,
        counts: Counts,
        lengths: Array | None = None,
        rngs: nnx.Rngs | None = None,
        rows: Array | None = None,
    ) -> tuple[Array, tuple[Array, tuple[Any, ...]]]:
        """What training minimizes: the mean loss of a token, and the penalties of the activations.

        Args:
            inputs: word ids ``[T, B]``.
            targets: word ids ``[T, B]``.
            state: recurrent state, or None for the initial one.
            mask: bool ``[T, B]``, False at targets that do not count.
            counts: over how many the means are; those of `mask`, or of all devices' masks, and then
                the sum over the devices is the objective.
            lengths: as of `features`.
            rngs: ``dropout``, of this call.
            rows: as of `features`.

        Returns:
            the objective, float32 ``[]``, and (the summed loss, the state for the next window).
        """
        how: Any = {"lengths": lengths, "deterministic": False, "rngs": rngs, "rows": rows}
        outputs = self.outputs(inputs, state, **how)
        nll = self.nll(outputs.dropped, targets, mask)
        objective = nll / jnp.maximum(counts.tokens, 1)
        if self.activation_penalty:
            penalty = activation_penalty(outputs.dropped, mask, counts.tokens)
            objective += self.activation_penalty * penalty
        if self.temporal_penalty:
            penalty = temporal_activation_penalty(outputs.raw, mask, count=counts.pairs)
            objective += self.temporal_penalty * penalty
        return objective, (nll, outputs.state)

    def nll(self, y: Array, targets: Array, mask: Array | None = None) -> Array:
        """The summed loss of ``targets [T, B]`` after the last layer's outputs ``[T, B, H]``."""
        x = self.project(y)
        x = x.reshape(-1, x.shape[-1])
        weights = jnp.ones(x.shape[0]) if mask is None else mask.reshape(-1).astype(jnp.float32)
        return self.softmax.loss(x, targets.reshape(-1), weights)

    def log_probs(self, features: Array) -> Array:
        """``[..., E] -> [..., V]`` log-probabilities of the next word, float32."""
        return self.softmax.log_probs(features)


glorot = nnx.initializers.glorot_uniform()


def dropout_key(rngs: nnx.Rngs | None) -> Array:
    """The next key of the dropout stream."""
    if rngs is None:
        raise ValueError("dropout needs random numbers: pass rngs=nnx.Rngs(dropout=key)")
    return rngs.dropout()
