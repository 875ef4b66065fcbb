"""Recurrent layers for Flax linen. They hold parameters and call `recurrence`."""

import dataclasses
from dataclasses import KW_ONLY
from typing import Any, Literal

import jax.numpy as jnp
from flax import linen as nn

from jaxrnn import cells
from jaxrnn._typing import Array, ArrayLike, DTypeLike, Initializer
from jaxrnn.cells.base import Cell
from jaxrnn.recurrence import checks
from jaxrnn.recurrence.api import Remat
from jaxrnn.recurrence.attention import SRUPlusPlusLayer, SRUPlusPlusState
from jaxrnn.recurrence.choice import Implementation
from jaxrnn.recurrence.stack import Merge, Sizes, Stack


class Layers(nn.Module):
    """What every layer of this module has: the options and the calls of `jaxrnn.nnx.RNN`.

    Parameters lie as in `jaxrnn.nnx`: ``variables["params"]["layer_0"]["forward"]["w_x"]``.

    Attributes:
        num_layers, bidirectional, merge, residual, dropout, input_dropout, output_dropout,
        variational, recurrent_dropout, update_dropout, weight_dropout, zoneout, gradient_clip,
        time_major, dtype, param_dtype, implementation, remat: see `jaxrnn.nnx.LayerOptions`.
        deterministic: no dropout; here or at the call, not both. Where it is given in neither
            place, dropout is active and takes its masks from the "dropout" random numbers.
    """

    _: KW_ONLY
    num_layers: int = 1
    bidirectional: bool = False
    merge: Merge = "concat"
    residual: bool = False
    dropout: float = 0.0
    input_dropout: float = 0.0
    output_dropout: float = 0.0
    variational: bool = False
    recurrent_dropout: float = 0.0
    update_dropout: float = 0.0
    weight_dropout: float = 0.0
    zoneout: float | tuple[float, ...] = 0.0
    gradient_clip: float | None = None
    time_major: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    implementation: Implementation | None = None
    remat: Remat | None = None
    deterministic: bool | None = None

    def the_cell(self) -> Cell:
        """The cell of every layer."""
        raise NotImplementedError

    def the_hidden_features(self) -> Sizes:
        """H, or one for each layer."""
        raise NotImplementedError

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
        rows: ArrayLike | None = None,
    ) -> tuple[Any, ...]:
        """Runs the layers over whole sequences; arguments and results as in `jaxrnn.nnx.RNN`."""
        return self.stack.apply(
            self._parameters(x),
            x,
            state,
            lengths=lengths,
            mask=mask,
            resets=resets,
            reset_state=reset_state,
            return_states=return_states,
            key=self._dropout_key(deterministic),
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
        return self.stack.step(self._parameters(x), x, state, resets)

    def initialize_state(self, batch: int) -> tuple[Any, ...]:
        """The state that a sequence starts from, a tuple over layers.

        It may be learned, so it needs the parameters:
        ``layer.apply(variables, batch, method="initialize_state")``.
        """
        names = [f"layer_{index}" for index in range(self.num_layers)]
        if self.scope is None or not all(self.has_variable("params", name) for name in names):
            raise ValueError(
                "initialize_state needs the parameters: call it as "
                'layer.apply(variables, batch, method="initialize_state")'
            )
        params = {name: self.get_variable("params", name) for name in names}
        return self.stack.init_state(params, batch)

    @property
    def stack(self) -> Stack:
        """The layers as pure functions."""
        options = {name: getattr(self, name) for name in Stack._fields if name != "cell"}
        return Stack(self.the_cell(), **options).check()

    @nn.compact
    def _parameters(self, x: Array) -> dict[str, Any]:
        checks.floating(x)
        stack, features, params = self.stack, jnp.shape(x)[-1], {}
        for index, size in enumerate(stack.sizes(self.the_hidden_features())):
            name = f"layer_{index}"
            params[name] = self.param(name, stack.init_layer, features, size, self.param_dtype)
            features = stack.output_features(params[name], features)
        return params

    def _dropout_key(self, deterministic: bool | None) -> Array | None:
        if deterministic is not None or self.deterministic is not None:
            deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        if deterministic or not self.stack.is_random:
            return None
        return self.make_rng("dropout")


class RNN(Layers):
    """A stack of recurrent layers of any cell.

    Attributes:
        cell: from `jaxrnn.cells` or your own.
        hidden_features: H, or a tuple with one for each layer.
    """

    cell: Cell
    hidden_features: Sizes

    def the_cell(self) -> Cell:
        """The cell of every layer."""
        return self.cell

    def the_hidden_features(self) -> Sizes:
        """H, or one for each layer."""
        return self.hidden_features


class BuiltIn(Layers):
    """A stack of one of the built-in cells.

    Attributes:
        hidden_features: H, or a tuple with one for each layer.
        use_bias, kernel_init, recurrent_init, bias_init: see `jaxrnn.nnx.CellOptions`; None is the
            cell's own.
    """

    hidden_features: Sizes
    _: KW_ONLY
    use_bias: bool = True
    kernel_init: Initializer | None = None
    recurrent_init: Initializer | None = None
    bias_init: Initializer | None = None

    def the_hidden_features(self) -> Sizes:
        """H, or one for each layer."""
        return self.hidden_features

    def cell_options(self) -> dict[str, Any]:
        """What was said about the cell: all fields that are not of every layer."""
        others = {field.name for field in dataclasses.fields(Layers)} | {"hidden_features"}
        names = [field.name for field in dataclasses.fields(self) if field.name not in others]
        options = {name: getattr(self, name) for name in names}
        return {name: value for name, value in options.items() if value is not None}


class LSTM(BuiltIn):
    """Long short-term memory: `jaxrnn.cells.lstm` in a stack.

    Attributes:
        proj_size, peepholes, coupled, layer_norm, cell_clip, forget_bias: see
            `jaxrnn.nnx.LSTMOptions`.
    """

    _: KW_ONLY
    proj_size: int | None = None
    peepholes: bool = False
    coupled: bool = False
    layer_norm: bool = False
    cell_clip: float | None = None
    forget_bias: float = 1.0

    def the_cell(self) -> Cell:
        """The cell of every layer."""
        return cells.lstm(**self.cell_options())


class GRU(BuiltIn):
    """Gated recurrent unit: `jaxrnn.cells.gru` in a stack.

    Attributes:
        reset_after, layer_norm: see `jaxrnn.nnx.GRUOptions`.
    """

    _: KW_ONLY
    reset_after: bool = True
    layer_norm: bool = False

    def the_cell(self) -> Cell:
        """The cell of every layer."""
        return cells.gru(**self.cell_options())


class Elman(BuiltIn):
    """Simple recurrent network: `jaxrnn.cells.elman` in a stack.

    Attributes:
        activation: "tanh" or "relu".
    """

    _: KW_ONLY
    activation: Literal["tanh", "relu"] = "tanh"

    def the_cell(self) -> Cell:
        """The cell of every layer."""
        return cells.elman(**self.cell_options())


class SRU(BuiltIn):
    """Simple recurrent unit: `jaxrnn.cells.sru` in a stack.

    Attributes:
        layer_norm, proj_size, highway_bias, rescale: see `jaxrnn.nnx.SRUOptions`.
    """

    _: KW_ONLY
    layer_norm: bool = False
    proj_size: int | None = None
    highway_bias: float = 0.0
    rescale: bool = True

    def the_cell(self) -> Cell:
        """The cell of every layer."""
        return cells.sru(**self.cell_options())


class SRUPlusPlus(nn.Module):
    """SRU with attention in the place of its projection; see `jaxrnn.SRUPlusPlus`.

    Attributes:
        hidden_features: H.
        attention_features: D.
        memory: M, how many steps back a step sees.
        heads, highway_bias, rescale, time_major, dtype, param_dtype, implementation, remat: see
            `jaxrnn.SRUPlusPlus`.
    """

    hidden_features: int
    attention_features: int
    _: KW_ONLY
    memory: int
    heads: int = 1
    highway_bias: float = 0.0
    rescale: bool = True
    time_major: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    implementation: Implementation | None = None
    remat: Remat | None = None

    @property
    def layer(self) -> SRUPlusPlusLayer:
        """The layer as pure functions."""
        options = {name: getattr(self, name) for name in SRUPlusPlusLayer._fields}
        return SRUPlusPlusLayer(**options).check()

    def __call__(
        self,
        x: Array,
        state: SRUPlusPlusState | None = None,
        *,
        lengths: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        resets: ArrayLike | None = None,
    ) -> tuple[Array, SRUPlusPlusState]:
        """Runs the layer; arguments and results as in `jaxrnn.SRUPlusPlus`."""
        flags = {"lengths": lengths, "mask": mask, "resets": resets}
        return self.layer.apply(self._parameters(x), x, state, **flags)

    def step(
        self, x: Array, state: SRUPlusPlusState, resets: ArrayLike | None = None
    ) -> tuple[Array, SRUPlusPlusState]:
        """One step of a stream: ``x [B, I] -> y [B, H]`` and the next state; ``resets [B]``."""
        return self.layer.step(self._parameters(x), x, state, resets)

    def initialize_state(self, batch: int) -> SRUPlusPlusState:
        """The state that a sequence starts from; as an ``nn.apply`` method, like `Layers`'."""
        return self.layer.init_state(self.get_variable("params", "weights"), batch)

    @nn.compact
    def _parameters(self, x: Array) -> dict[str, Any]:
        checks.floating(x)
        sizes = (jnp.shape(x)[-1], self.hidden_features, self.param_dtype)
        return self.param("weights", self.layer.init_params, *sizes)
