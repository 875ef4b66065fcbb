"""Recurrent layers for Flax NNX. They hold parameters and call `recurrence`."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrnn import cells
from jaxrnn._typing import Array, ArrayLike, DTypeLike, Initializer, Params
from jaxrnn.cells.base import Cell
from jaxrnn.recurrence import checks
from jaxrnn.recurrence.api import Remat
from jaxrnn.recurrence.attention import SRUPlusPlusLayer, SRUPlusPlusState
from jaxrnn.recurrence.choice import Implementation
from jaxrnn.recurrence.stack import Merge, Sizes, Stack


class LayerOptions(TypedDict, total=False):
    """What every recurrent layer takes.

    Attributes:
        num_layers: layers in the stack.
        bidirectional: a second set of layers from the last step to the first.
        merge: of the two directions' outputs: "concat" (side by side), "sum", "mean", "product".
        residual: every layer but the first adds its input to its output.
        dropout: rate between the layers of a stack, a new mask each call.
        input_dropout: rate on the input of the first layer.
        output_dropout: rate on the output of the last layer.
        variational: these three have one mask for all steps of a row (Gal & Ghahramani 2016).
        recurrent_dropout: rate on ``h`` before ``h @ R``, one mask for all steps of a row (Gal &
            Ghahramani 2016, arXiv:1512.05287).
        update_dropout: rate on what a step adds to the state, ``g`` or ``n``, a new mask each step
            (Semeniuta et al. 2016, arXiv:1603.05118).
        weight_dropout: rate on the entries of R, one mask a call (Merity et al. 2017,
            arXiv:1708.02182).
        zoneout: rate at which the state's values stay as they were, one for all fields or a tuple
            with one for each, ``(h, c)`` of the LSTM; evaluation takes the mean (Krueger et al.
            2017, arXiv:1606.01305).
        gradient_clip: bound of the cotangents of the gates' pre-activations: see
            `jaxrnn.recurrence`.
        time_major: arrays are ``[T, B, ...]`` rather than ``[B, T, ...]``.
        dtype: of the matmuls and the output; None is the common dtype of input and parameters.
        param_dtype: of the parameters.
        implementation: "xla", "pallas", "associative" or None: see `jaxrnn.recurrence`.
        remat: "none", "gates", "chunk" or None: see `jaxrnn.recurrence`.
    """

    num_layers: int
    bidirectional: bool
    merge: Merge
    residual: bool
    dropout: float
    input_dropout: float
    output_dropout: float
    variational: bool
    recurrent_dropout: float
    update_dropout: float
    weight_dropout: float
    zoneout: float | tuple[float, ...]
    gradient_clip: float | None
    time_major: bool
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    implementation: Implementation | None
    remat: Remat | None


class CellOptions(TypedDict, total=False):
    """Biases and initializers, of every built-in cell.

    Attributes:
        use_bias: whether there are biases.
        kernel_init: initializer of the input matrices.
        recurrent_init: initializer of the recurrent parameters.
        bias_init: initializer of the biases.
    """

    use_bias: bool
    kernel_init: Initializer
    recurrent_init: Initializer
    bias_init: Initializer


class Options(LayerOptions, CellOptions, total=False):
    """`LayerOptions` and `CellOptions`."""


class LSTMOptions(Options, total=False):
    """`Options`, and those of `jaxrnn.cells.lstm`.

    Attributes:
        proj_size: size of a projected output.
        peepholes: gates that see the cell state.
        coupled: the input gate is what the forget gate leaves.
        layer_norm: layer normalization.
        cell_clip: bound of the cell state.
        forget_bias: initial bias of the forget gate, 1 by default.
    """

    proj_size: int | None
    peepholes: bool
    coupled: bool
    layer_norm: bool
    cell_clip: float | None
    forget_bias: float


class GRUOptions(Options, total=False):
    """`Options`, and those of `jaxrnn.cells.gru`.

    Attributes:
        reset_after: the reset gate is applied after the recurrent matmul, or before it.
        layer_norm: layer normalization.
    """

    reset_after: bool
    layer_norm: bool


class ElmanOptions(Options, total=False):
    """`Options`, and that of `jaxrnn.cells.elman`.

    Attributes:
        activation: "tanh" or "relu".
    """

    activation: Literal["tanh", "relu"]


class SRUOptions(Options, total=False):
    """`Options`, and those of `jaxrnn.cells.sru`.

    Attributes:
        layer_norm: normalization of the input.
        proj_size: size of a factor that the input matrices share.
        highway_bias: initial bias of the reset gate.
        rescale: whether the highway is scaled to keep the variance of the layers equal.
    """

    layer_norm: bool
    proj_size: int | None
    highway_bias: float
    rescale: bool


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cell options and layer options, apart."""
    for_layer = {k: v for k, v in options.items() if k in LayerOptions.__annotations__}
    return {k: v for k, v in options.items() if k not in for_layer}, for_layer


class RNN(nnx.Module):
    """A stack of recurrent layers of any cell.

    Args:
        cell: from `jaxrnn.cells` or your own.
        in_features: I.
        hidden_features: H, or a tuple with one for each layer.
        rngs: ``params`` for the initial parameters, ``dropout`` for the masks.
        **options: see `LayerOptions`.

    Attributes:
        layer_0, layer_1, ...: the parameters, ``layer_0.forward["w_x"]`` and so on.
    """

    def __init__(
        self,
        cell: Cell,
        in_features: int,
        hidden_features: Sizes,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        **options: Any,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.stack = Stack(cell, **options).check()
        self.deterministic = False
        # The parameters' key comes first: one seed, the same parameters with and without dropout.
        params = self.stack.init_params(rngs.params(), in_features, hidden_features, param_dtype)
        self.rngs = nnx.data(rngs.fork() if self.stack.is_random else None)
        for name, layer in params.items():
            setattr(self, name, as_modules(layer))

    def __call__(
        self,
        x: Array,
        state: tuple[Any, ...] | None = None,
        *,
        lengths: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        resets: ArrayLike | None = None,
        reset_state: tuple[Any, ...] | None = None,
        return_states: bool = False,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
        rows: ArrayLike | None = None,
    ) -> tuple[Any, ...]:
        """Runs the layers over whole sequences.

        Args:
            x: ``[B, T, I]`` (``[T, B, I]`` with ``time_major``), floating point; or one sequence
                ``[T, I]``, and then nothing else has a batch axis either.
            state: a tuple over layers, as `initialize_state` or an earlier call gave it.
            lengths: integers ``[B]``: the real steps at the front of each row.
            mask: bool ``[B, T]``, True at real steps.
            resets: bool or integers ``[B, T]``, true where a new sequence begins.
            reset_state: what a reset restores, like ``state``; None is the initial state.
            return_states: also return the states after all steps.
            deterministic: no dropout; None is the attribute that ``eval()`` and ``train()`` set.
            rngs: of this call's dropout, in the place of the layer's own.
            rows: integers ``[B]``, the rows' numbers in the whole batch, where devices share it:
                dropout then depends on these, not on how they are shared.

        Returns:
            outputs ``[B, T, S]`` (twice S with two directions side by side), 0 at masked steps,
            and the state after each row's last real step. With ``return_states`` a third, the
            states after all steps: like the state, with leaves ``[B, T, ...]``.

        Raises:
            ValueError: for shapes that do not fit.
            TypeError: for integer inputs.
        """
        check_features(x, self.in_features)
        return self.stack.apply(
            self.parameters(),
            x,
            state,
            lengths=lengths,
            mask=mask,
            resets=resets,
            reset_state=reset_state,
            return_states=return_states,
            key=self._dropout_key(deterministic, rngs),
            rows=rows,
        )

    def step(
        self, x: Array, state: tuple[Any, ...], resets: ArrayLike | None = None
    ) -> tuple[Array, tuple[Any, ...]]:
        """One step of a stream, without dropout.

        Args:
            x: ``[B, I]``.
            state: a tuple over layers, as `initialize_state` or an earlier call gave it.
            resets: bool or integers ``[B]``, true where a new sequence begins with this step.

        Returns:
            ``[B, S]`` and the next state.
        """
        check_features(x, self.in_features)
        return self.stack.step(self.parameters(), x, state, resets)

    def initialize_state(self, batch: int) -> tuple[Any, ...]:
        """The state that a sequence starts from, a tuple over layers."""
        return self.stack.init_state(self.parameters(), batch)

    def parameters(self) -> dict[str, Any]:
        """The parameters as nested dicts of arrays."""
        layers = [f"layer_{index}" for index in range(self.stack.num_layers)]
        return {name: as_arrays(getattr(self, name)) for name in layers}

    def load_parameters(self, params: Params) -> None:
        """Takes over parameters of the same names and shapes, from `jaxrnn.convert` for example.

        They are cast to the dtypes of the layer's own. Where one does not fit, nothing changes.

        Args:
            params: nested dicts of arrays, as `parameters` gives them.

        Raises:
            ValueError: for names that are missing or unexpected, and for other shapes.
        """
        own, given = (
            {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
            for leaves in map(jax.tree.leaves_with_path, (self.parameters(), params))
        )
        names = {"missing": own.keys() - given, "unexpected": given.keys() - own}
        lists = [f"{word}: {', '.join(sorted(which))}" for word, which in names.items() if which]
        if lists:
            raise ValueError(f"the names are not those of the layer; {'; '.join(lists)}")
        for name, value in own.items():
            if jnp.shape(given[name]) != value.shape:
                raise ValueError(f"`{name}` should be {value.shape}, got {jnp.shape(given[name])}")
        cast = jax.tree.map(lambda a, b: jnp.array(b, a.dtype), self.parameters(), params)
        nnx.update(self, cast)

    def _dropout_key(self, deterministic: bool | None, rngs: nnx.Rngs | None) -> Array | None:
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic or not self.stack.is_random:
            return None
        rngs = rngs or self.rngs
        if rngs is None:
            raise ValueError("dropout needs random numbers: pass rngs=nnx.Rngs(dropout=key)")
        return rngs.dropout()


def check_features(x: Array, in_features: int) -> None:
    """Refuses inputs that are no features, or not as many as the layer has weights for."""
    checks.floating(x)
    if jnp.shape(x)[-1:] != (in_features,):
        raise ValueError(
            f"the last axis of x should be in_features = {in_features}, got shape {jnp.shape(x)}"
        )


def as_modules(tree: Any) -> Any:
    """Nested dicts of arrays as `nnx.Dict` of `nnx.Param`."""
    if isinstance(tree, dict):
        return nnx.Dict({name: as_modules(leaf) for name, leaf in tree.items()})
    return nnx.Param(tree)


def as_arrays(tree: Any) -> Any:
    """The inverse of `as_modules`."""
    if isinstance(tree, nnx.Dict):
        return {name: as_arrays(leaf) for name, leaf in tree.items()}
    return tree[...]


class LSTM(RNN):
    """Long short-term memory: `jaxrnn.cells.lstm` in an `RNN`.

    Args:
        in_features: I.
        hidden_features: H, or a tuple with one for each layer.
        rngs: ``params`` for the initial parameters, ``dropout`` for the masks.
        **options: see `LayerOptions`, `CellOptions` and `LSTMOptions`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Sizes,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[LSTMOptions],
    ):
        for_cell, for_layer = split_options(options)
        cell = cells.lstm(**for_cell)
        super().__init__(cell, in_features, hidden_features, rngs=rngs, **for_layer)


class GRU(RNN):
    """Gated recurrent unit: `jaxrnn.cells.gru` in an `RNN`.

    Args:
        in_features: I.
        hidden_features: H, or a tuple with one for each layer.
        rngs: ``params`` for the initial parameters, ``dropout`` for the masks.
        **options: see `LayerOptions`, `CellOptions` and `GRUOptions`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Sizes,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[GRUOptions],
    ):
        for_cell, for_layer = split_options(options)
        cell = cells.gru(**for_cell)
        super().__init__(cell, in_features, hidden_features, rngs=rngs, **for_layer)


class Elman(RNN):
    """Simple recurrent network: `jaxrnn.cells.elman` in an `RNN`.

    Args:
        in_features: I.
        hidden_features: H, or a tuple with one for each layer.
        rngs: ``params`` for the initial parameters, ``dropout`` for the masks.
        **options: see `LayerOptions`, `CellOptions` and `ElmanOptions`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Sizes,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[ElmanOptions],
    ):
        for_cell, for_layer = split_options(options)
        cell = cells.elman(**for_cell)
        super().__init__(cell, in_features, hidden_features, rngs=rngs, **for_layer)


class SRU(RNN):
    """Simple recurrent unit: `jaxrnn.cells.sru` in an `RNN`.

    Args:
        in_features: I.
        hidden_features: H, or a tuple with one for each layer.
        rngs: ``params`` for the initial parameters, ``dropout`` for the masks.
        **options: see `LayerOptions`, `CellOptions` and `SRUOptions`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Sizes,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[SRUOptions],
    ):
        for_cell, for_layer = split_options(options)
        cell = cells.sru(**for_cell)
        super().__init__(cell, in_features, hidden_features, rngs=rngs, **for_layer)


class SRUPlusPlus(nnx.Module):
    """SRU with attention in the place of its projection (Lei 2021, arXiv:2102.12459).

    A step attends to itself and to the ``memory`` real steps before it of its own sequence, in
    earlier calls too: one call equals any split of it into shorter ones. Equations and parameters:
    `jaxrnn.recurrence.attention`.

    Args:
        in_features: I.
        hidden_features: H.
        attention_features: D, of queries, keys and values; the paper has H / 4 or less.
        memory: M, how many steps back a step sees.
        heads: attention heads.
        highway_bias: initial bias of the reset gate.
        rescale: whether the highway is scaled to keep the variance of the layers equal.
        time_major, dtype, param_dtype, implementation, remat: see `LayerOptions`.
        rngs: ``params`` for the initial parameters.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        attention_features: int,
        *,
        memory: int,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        **options: Any,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.layer = SRUPlusPlusLayer(attention_features, memory, **options).check()
        self.weights = as_modules(
            self.layer.init_params(rngs.params(), in_features, hidden_features, param_dtype)
        )

    def __call__(
        self,
        x: Array,
        state: SRUPlusPlusState | None = None,
        *,
        lengths: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        resets: ArrayLike | None = None,
    ) -> tuple[Array, SRUPlusPlusState]:
        """Runs the layer; arguments and results as of `RNN`, with one state instead of a tuple."""
        check_features(x, self.in_features)
        flags = {"lengths": lengths, "mask": mask, "resets": resets}
        return self.layer.apply(as_arrays(self.weights), x, state, **flags)

    def step(
        self, x: Array, state: SRUPlusPlusState, resets: ArrayLike | None = None
    ) -> tuple[Array, SRUPlusPlusState]:
        """One step of a stream: ``x [B, I] -> y [B, H]`` and the next state; ``resets [B]``."""
        check_features(x, self.in_features)
        return self.layer.step(as_arrays(self.weights), x, state, resets)

    def initialize_state(self, batch: int) -> SRUPlusPlusState:
        """The state that a sequence starts from."""
        return self.layer.init_state(as_arrays(self.weights), batch)
