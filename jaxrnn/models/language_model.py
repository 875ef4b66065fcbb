"""A recurrent language model."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

from jaxrnn import cells
from jaxrnn._typing import Array, DTypeLike
from jaxrnn.cells.base import Cell
from jaxrnn.models.softmax import Softmax, WordVectors
from jaxrnn.nnx import RNN
from jaxrnn.recurrence.api import Remat
from jaxrnn.regularization import dropout, embedding_dropout

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


class LanguageModel(nnx.Module):
    """Embedding, a stack of recurrent layers, and a softmax over the vocabulary.

    Dropout as in Zaremba et al. (2014), arXiv:1409.2329, or, of the recurrent part and of words, as
    in Merity et al. (2017), arXiv:1708.02182. Tied embedding and softmax as in Press & Wolf (2017),
    arXiv:1608.05859. Arrays are time-major.

    Args:
        vocabulary_size: V; word ids are to be sorted by falling frequency for "adaptive".
        cell: a name of `CELLS`, or a `jaxrnn.Cell`.
        embed_features: E.
        hidden_features: H; where it is not E, a tied model projects the last output to E.
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
        dtype: of the arithmetic; None is the parameters'.
        param_dtype: of the parameters.
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
        hidden_features: int = 256,
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
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
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
        self.dtype = dtype or param_dtype
        if softmax not in ("adaptive", "full"):
            raise ValueError(f'softmax should be "adaptive" or "full", got {softmax!r}')
        kept: dict[str, Any] = {"param_dtype": param_dtype, "rngs": rngs}
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
            dtype=self.dtype,
            implementation=implementation,
            remat=remat,
            **kept,
        )
        # Random numbers come with each call, so that a step is a function of its key alone.
        self.rnn.rngs = nnx.data(None)
        self.projection = nnx.data(None)
        if tied and hidden_features != embed_features:
            shape = (hidden_features, embed_features)
            self.projection = nnx.Param(glorot(rngs.params(), shape, param_dtype))
        features = embed_features if tied else hidden_features
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
    ) -> tuple[Array, tuple[Any, ...]]:
        """What the softmax reads.

        Args:
            inputs: word ids ``[T, B]``.
            state: recurrent state, or None for the initial one.
            lengths: real steps of each lane ``[B]``, where the state must not go on behind them.
            deterministic: no dropout.
            rngs: ``dropout``, of this call.

        Returns:
            ``[T, B, E]`` and the state for the next window.
        """
        active = not deterministic
        x = self.embedding.embed(inputs, self.dtype)
        if active and self.dropout_words > 0:
            key = dropout_key(rngs)
            x = embedding_dropout(key, self.dropout_words, inputs, x, self.vocabulary_size)
        if active and self.dropout_embedding > 0:
            key = dropout_key(rngs)
            x = dropout(key, self.dropout_embedding, x, per_row=self.variational)
        x, final = self.rnn(x, state, lengths=lengths, deterministic=deterministic, rngs=rngs)
        if active and self.dropout_output > 0:
            x = dropout(dropout_key(rngs), self.dropout_output, x, per_row=self.variational)
        if self.projection is not None:
            x = x @ self.projection[...].astype(x.dtype)
        return x, final

    def loss(
        self,
        inputs: Array,
        targets: Array,
        state: tuple[Any, ...] | None = None,
        *,
        mask: Array | None = None,
        lengths: Array | None = None,
        deterministic: bool,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Array, tuple[Any, ...]]:
        """The summed negative log-likelihood of the targets, over the whole vocabulary.

        Args:
            inputs: word ids ``[T, B]``.
            targets: word ids ``[T, B]``.
            state: recurrent state, or None for the initial one.
            mask: bool ``[T, B]``, False at targets that do not count.
            lengths: as in `features`.
            deterministic: no dropout.
            rngs: ``dropout``, of this call.

        Returns:
            nats, float32 ``[]``, and the state for the next window.
        """
        x, state = self.features(
            inputs, state, lengths=lengths, deterministic=deterministic, rngs=rngs
        )
        x = x.reshape(-1, x.shape[-1])
        weights = jnp.ones(x.shape[0]) if mask is None else mask.reshape(-1).astype(jnp.float32)
        nll = self.softmax.loss(x, targets.reshape(-1), weights)
        return nll, state

    def log_probs(self, features: Array) -> Array:
        """``[..., E] -> [..., V]`` log-probabilities of the next word, float32."""
        return self.softmax.log_probs(features)


glorot = nnx.initializers.glorot_uniform()


def dropout_key(rngs: nnx.Rngs | None) -> Array:
    """The next key of the dropout stream."""
    if rngs is None:
        raise ValueError("dropout needs random numbers: pass rngs=nnx.Rngs(dropout=key)")
    return rngs.dropout()
