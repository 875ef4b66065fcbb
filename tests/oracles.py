"""Recurrent networks in float64 NumPy, written from the papers, with hand-written gradients.

Nothing here imports jaxrnn. The library's reference loop and its kernels share one set of gate
equations, so comparing them with each other cannot show a wrong equation; comparing them with this
file can. A cell is one function, ``step(params, x, state) -> (output, state, backward)``, and one
driver applies it over time with masks, resets and reversal.

Shapes (T time, B batch, I inputs, H hidden): x is time-major ``[T, B, I]``, ``mask`` and
``resets`` are boolean ``[T, B]``, a state is ``{name: [B, H]}``. Parameters are laid out as in the
library. The forward functions also take complex numbers, for exact numerical derivatives in tests.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
Step = Callable[[Arrays, np.ndarray, Arrays], tuple[np.ndarray, Arrays, Callable]]


class Oracle(NamedTuple):
    """A cell: its step and the names of the arrays that it carries from step to step."""

    step: Step
    state_names: tuple[str, ...]


class Gradients(NamedTuple):
    """Cotangents of everything that ``run`` or ``run_layers`` depends on."""

    params: Any
    x: np.ndarray
    state: Any
    restart: Any


def exact(a: Any) -> np.ndarray:
    """The same values in double precision; complex stays complex."""
    a = np.asarray(a)
    return np.asarray(a, np.result_type(a.dtype, np.float64))


def tree(function: Callable, value: Any) -> Any:
    """Apply a function to every array of nested dicts and tuples; named tuples become dicts."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: tree(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(tree(function, item) for item in value)
    return function(value)


# Pieces of the cells. A matmul weight is [inputs, gates, outputs].


def sigmoid(a: np.ndarray) -> np.ndarray:
    """The logistic function, by way of tanh, which does not overflow."""
    return 0.5 * (np.tanh(0.5 * a) + 1.0)


def matmul(a: np.ndarray, w: np.ndarray) -> np.ndarray:
    """``[B, I]`` times ``[I, G, H]`` gives ``[B, G, H]``."""
    return np.einsum("bi,igh->bgh", a, w)


def matmul_to_input(d: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Cotangent of the ``[B, I]`` operand of ``matmul``."""
    return np.einsum("bgh,igh->bi", d, w)


def matmul_to_weight(a: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Cotangent of the ``[I, G, H]`` operand of ``matmul``."""
    return np.einsum("bi,bgh->igh", a, d)


# The cells. ``backward(doutput, dafter)`` takes the cotangents of the output [B, H] and of the
# state after the step, and returns those of the parameters, of x and of the state before the step.


def elman_step(activation: str, params: Arrays, x: np.ndarray, state: Arrays):
    """Elman (1990): h' = act(W x + R h + b)."""
    h = state["h"]
    pre = matmul(x, params["w_x"]) + matmul(h, params["r"]) + params.get("b", 0.0)
    pre = pre[:, 0]
    after = np.tanh(pre) if activation == "tanh" else np.where(np.real(pre) > 0, pre, 0.0)

    def backward(doutput, dafter):
        slope = 1.0 - after**2 if activation == "tanh" else np.where(pre > 0, 1.0, 0.0)
        dpre = ((doutput + dafter["h"]) * slope)[:, None]
        dparams = {
            "w_x": matmul_to_weight(x, dpre),
            "r": matmul_to_weight(h, dpre),
            "b": dpre.sum(0),
        }
        dbefore = {"h": matmul_to_input(dpre, params["r"])}
        return dparams, matmul_to_input(dpre, params["w_x"]), dbefore

    return after, {"h": after}, backward


def lstm_gate_adjoint(gates, c: np.ndarray, dc: np.ndarray, do: np.ndarray) -> np.ndarray:
    """Cotangent of the four columns, from those of c' and of sigmoid(o)."""
    i, f, g, o = gates
    columns = [
        dc * g * i * (1.0 - i),
        dc * c * f * (1.0 - f),
        dc * i * (1.0 - g**2),
        do * o * (1.0 - o),
    ]
    return np.stack(columns, axis=1)


def lstm_step(clip: float, params: Arrays, x: np.ndarray, state: Arrays):
    """Hochreiter and Schmidhuber (1997) with the forget gate of Gers et al. (2000).

    With i, f, g, o the four columns of W x + R h + b:
    c' = sigmoid(f) c + sigmoid(i) tanh(g), not beyond the clip;  h' = sigmoid(o) tanh(c').
    With "v", peepholes of Gers and Schmidhuber (2000): i + v_i c, f + v_f c, o + v_o c'. With three
    columns, f, g, o, the input gate is 1 - sigmoid(f) (Greff et al. 2017). With "p", of Sak et al.
    (2014), h' = (sigmoid(o) tanh(c')) P.
    """
    h, c = state["h"], state["c"]
    pre = matmul(x, params["w_x"]) + matmul(h, params["r"]) + params.get("b", 0.0)
    coupled = pre.shape[1] == 3
    v = list(params.get("v", np.zeros((2 if coupled else 3, c.shape[1]))))
    columns = [pre[:, k] for k in range(pre.shape[1])]
    pre_i, pre_f, pre_g, pre_o = ([None] if coupled else []) + columns
    v_i, v_f, v_o = ([None] if coupled else []) + v
    f = sigmoid(pre_f + v_f * c)
    i = 1.0 - f if coupled else sigmoid(pre_i + v_i * c)
    g = np.tanh(pre_g)
    unclipped = f * c + i * g
    inside = np.abs(np.real(unclipped)) < clip
    c_after = np.where(inside, unclipped, clip * np.sign(np.real(unclipped)))
    o = sigmoid(pre_o + v_o * c_after)
    squashed = np.tanh(c_after)
    output = o * squashed
    h_after = output @ params["p"] if "p" in params else output

    def backward(doutput, dafter):
        dh = doutput + dafter["h"]
        dout = dh @ params["p"].T if "p" in params else dh
        dpre_o = dout * squashed * o * (1.0 - o)
        dc = dafter["c"] + dout * o * (1.0 - squashed**2) + dpre_o * v_o
        dc = np.where(inside, dc, 0.0)
        slope = f * (1.0 - f)
        dpre_f = (dc * (c - g) if coupled else dc * c) * slope
        dpre_i = None if coupled else dc * g * i * (1.0 - i)
        dgates = [dpre_i, dpre_f, dc * i * (1.0 - g**2), dpre_o]
        dpre = np.stack([d for d in dgates if d is not None], axis=1)
        dparams = {
            "w_x": matmul_to_weight(x, dpre),
            "r": matmul_to_weight(h, dpre),
            "b": dpre.sum(0),
        }
        if "p" in params:
            dparams["p"] = output.T @ dh
        dc_before = dc * f + dpre_f * v_f
        dpeepholes = [dpre_f * c, dpre_o * c_after]
        if not coupled:
            dc_before = dc_before + dpre_i * v_i
            dpeepholes.insert(0, dpre_i * c)
        if "v" in params:
            dparams["v"] = np.stack([d.sum(0) for d in dpeepholes])
        dbefore = {"h": matmul_to_input(dpre, params["r"]), "c": dc_before}
        return dparams, matmul_to_input(dpre, params["w_x"]), dbefore

    return h_after, {"h": h_after, "c": c_after}, backward


def normalized(a: np.ndarray):
    """``(a - mean) / sqrt(var + 1e-5)`` over the last axis, and its adjoint."""
    deviation = a - a.mean(-1, keepdims=True)
    scale = 1.0 / np.sqrt((deviation * deviation).mean(-1, keepdims=True) + 1e-5)
    value = deviation * scale

    def backward(d):
        along = (d * value).mean(-1, keepdims=True)
        return scale * (d - d.mean(-1, keepdims=True) - value * along)

    return value, backward


def layer_norm_lstm_step(params: Arrays, x: np.ndarray, state: Arrays):
    """Layer normalization of Ba et al. (2016) in the LSTM, each gate on its own.

    The four columns are gain_x N(W x) + gain_h N(R h) + b;
    c' = sigmoid(f) c + sigmoid(i) tanh(g);  h' = sigmoid(o) tanh(gain_c N(c') + b_c).
    """
    h, c = state["h"], state["c"]
    from_x, x_adjoint = normalized(matmul(x, params["w_x"]))
    from_h, h_adjoint = normalized(matmul(h, params["r"]))
    pre = params["gain_x"] * from_x + params["gain_h"] * from_h + params.get("b", 0.0)
    i, f, g, o = sigmoid(pre[:, 0]), sigmoid(pre[:, 1]), np.tanh(pre[:, 2]), sigmoid(pre[:, 3])
    c_after = f * c + i * g
    content, c_adjoint = normalized(c_after)
    squashed = np.tanh(params["gain_c"] * content + params["b_c"])
    h_after = o * squashed

    def backward(doutput, dafter):
        dh = doutput + dafter["h"]
        dsquash = dh * o * (1.0 - squashed**2)
        dc = dafter["c"] + c_adjoint(dsquash * params["gain_c"])
        dpre = lstm_gate_adjoint((i, f, g, o), c, dc, dh * squashed)
        d_from_x = x_adjoint(dpre * params["gain_x"])
        d_from_h = h_adjoint(dpre * params["gain_h"])
        dparams = {
            "w_x": matmul_to_weight(x, d_from_x),
            "r": matmul_to_weight(h, d_from_h),
            "b": dpre.sum(0),
            "gain_x": (dpre * from_x).sum(0),
            "gain_h": (dpre * from_h).sum(0),
            "gain_c": (dsquash * content).sum(0),
            "b_c": dsquash.sum(0),
        }
        dbefore = {"h": matmul_to_input(d_from_h, params["r"]), "c": dc * f}
        return dparams, matmul_to_input(d_from_x, params["w_x"]), dbefore

    return h_after, {"h": h_after, "c": c_after}, backward


def gru_step(params: Arrays, x: np.ndarray, state: Arrays):
    """GRU of Cho et al. (2014) with the reset gate applied after the matmul (torch.nn, cuDNN).

    r = sigmoid(W_r x + R_r h + b_r);  z = sigmoid(W_z x + R_z h + b_z);
    n = tanh(W_n x + b_n + r (R_n h + b_hn));  h' = (1 - z) n + z h.
    """
    h = state["h"]
    from_x = matmul(x, params["w_x"]) + params.get("b", 0.0)
    from_h = matmul(h, params["r"])
    r = sigmoid(from_x[:, 0] + from_h[:, 0])
    z = sigmoid(from_x[:, 1] + from_h[:, 1])
    candidate = from_h[:, 2] + params.get("b_hn", 0.0)
    n = np.tanh(from_x[:, 2] + r * candidate)
    after = (1.0 - z) * n + z * h

    def backward(doutput, dafter):
        dh = doutput + dafter["h"]
        dn = dh * (1.0 - z) * (1.0 - n**2)
        dz = dh * (h - n) * z * (1.0 - z)
        dr = dn * candidate * r * (1.0 - r)
        d_from_x = np.stack([dr, dz, dn], axis=1)
        d_from_h = np.stack([dr, dz, dn * r], axis=1)
        dparams = {
            "w_x": matmul_to_weight(x, d_from_x),
            "r": matmul_to_weight(h, d_from_h),
            "b": d_from_x.sum(0),
            "b_hn": (dn * r).sum(0),
        }
        dbefore = {"h": matmul_to_input(d_from_h, params["r"]) + dh * z}
        return dparams, matmul_to_input(d_from_x, params["w_x"]), dbefore

    return after, {"h": after}, backward


def gru_reset_before_step(params: Arrays, x: np.ndarray, state: Arrays):
    """GRU of Cho et al. (2014) as printed: the reset gate is applied to h before its matmul.

    r, z as above;  n = tanh(W_n x + R_n (r h) + b_n);  h' = (1 - z) n + z h.
    """
    h = state["h"]
    r_gates, r_candidate = params["r"][:, :2], params["r"][:, 2:]
    from_x = matmul(x, params["w_x"]) + params.get("b", 0.0)
    from_h = matmul(h, r_gates)
    r = sigmoid(from_x[:, 0] + from_h[:, 0])
    z = sigmoid(from_x[:, 1] + from_h[:, 1])
    gated = r * h
    n = np.tanh(from_x[:, 2] + matmul(gated, r_candidate)[:, 0])
    after = (1.0 - z) * n + z * h

    def backward(doutput, dafter):
        dh = doutput + dafter["h"]
        dn = dh * (1.0 - z) * (1.0 - n**2)
        dz = dh * (h - n) * z * (1.0 - z)
        dgated = matmul_to_input(dn[:, None], r_candidate)
        dr = dgated * h * r * (1.0 - r)
        dgates = np.stack([dr, dz], axis=1)
        dpre = np.stack([dr, dz, dn], axis=1)
        dr_gates = matmul_to_weight(h, dgates)
        dr_candidate = matmul_to_weight(gated, dn[:, None])
        dparams = {
            "w_x": matmul_to_weight(x, dpre),
            "r": np.concatenate([dr_gates, dr_candidate], axis=1),
            "b": dpre.sum(0),
        }
        dbefore = {"h": matmul_to_input(dgates, r_gates) + dgated * r + dh * z}
        return dparams, matmul_to_input(dpre, params["w_x"]), dbefore

    return after, {"h": after}, backward


def sru_step(alpha: float, params: Arrays, x: np.ndarray, state: Arrays):
    """SRU of Lei et al. (2018), with the scaled highway connection of its section 3.2.

    u = W x;  f = sigmoid(W_f x + v_f c + b_f);  r = sigmoid(W_r x + v_r c + b_r);
    c' = f c + (1 - f) u;  h = r c' + (1 - r) alpha x,
    where x is multiplied by ``w_highway`` if its size is not H.
    """
    c = state["c"]
    v_f, v_r = params["v"]
    b_f, b_r = params.get("b", (0.0, 0.0))
    pre = matmul(x, params["w_x"])
    u = pre[:, 0]
    f = sigmoid(pre[:, 1] + v_f * c + b_f)
    r = sigmoid(pre[:, 2] + v_r * c + b_r)
    c_after = f * c + (1.0 - f) * u
    highway = x @ params["w_highway"] if "w_highway" in params else x
    output = r * c_after + (1.0 - r) * alpha * highway

    def backward(doutput, dafter):
        dc_after = dafter["c"] + doutput * r
        df = dc_after * (c - u) * f * (1.0 - f)
        dr = doutput * (c_after - alpha * highway) * r * (1.0 - r)
        dhighway = doutput * (1.0 - r) * alpha
        dpre = np.stack([dc_after * (1.0 - f), df, dr], axis=1)
        dparams = {
            "w_x": matmul_to_weight(x, dpre),
            "v": np.stack([(df * c).sum(0), (dr * c).sum(0)]),
            "b": np.stack([df.sum(0), dr.sum(0)]),
        }
        dx = matmul_to_input(dpre, params["w_x"])
        if "w_highway" in params:
            dparams["w_highway"] = x.T @ dhighway
            dx = dx + dhighway @ params["w_highway"].T
        else:
            dx = dx + dhighway
        return dparams, dx, {"c": dc_after * f + df * v_f + dr * v_r}

    return output, {"c": c_after}, backward


def elman(activation: str = "tanh") -> Oracle:
    """The Elman cell with ``"tanh"`` or ``"relu"``."""
    return Oracle(partial(elman_step, activation), ("h",))


def lstm(clip: float = np.inf) -> Oracle:
    """The LSTM cell; gates i, f, g, o, or f, g, o. The parameters tell its other options."""
    return Oracle(partial(lstm_step, clip), ("h", "c"))


def layer_norm_lstm() -> Oracle:
    """The layer-normalized LSTM."""
    return Oracle(layer_norm_lstm_step, ("h", "c"))


def gru(reset_after: bool = True) -> Oracle:
    """The GRU cell; gates r, z, n."""
    return Oracle(gru_step if reset_after else gru_reset_before_step, ("h",))


def sru(alpha: float = 1.0) -> Oracle:
    """The SRU cell; columns u, f, r."""
    return Oracle(partial(sru_step, alpha), ("c",))


# The time loop.


def mask_of_lengths(lengths: Any, steps: int) -> np.ndarray:
    """``[B]`` lengths to a ``[T, B]`` mask that is True at the real steps."""
    return np.arange(steps)[:, None] < np.asarray(lengths)[None, :]


def zero_state(cell: Oracle, batch: int, hidden: int) -> Arrays:
    """The state of zeros."""
    return {name: np.zeros((batch, hidden)) for name in cell.state_names}


def _walk(cell: Oracle, params, x, state, mask, resets, restart, reverse, hold):
    """Run the loop and also return, in the order walked, what the way back needs."""
    params, x, state = tree(exact, params), exact(x), tree(exact, state)
    steps, batch = x.shape[:2]
    live_all = np.ones((steps, batch), bool) if mask is None else np.asarray(mask, bool)
    resets = np.zeros((steps, batch), bool) if resets is None else np.asarray(resets, bool)
    restart = tree(np.zeros_like, state) if restart is None else tree(exact, restart)
    # Padding may hold anything; it is taken out before any arithmetic sees it.
    x = np.where(live_all[:, :, None], x, 0.0)
    outputs: list[Any] = [None] * steps
    tape = []
    # Walking backwards, a reset at t parts t from the next real step below it, not t from t + 1,
    # and that next step may lie beyond a hole: the row remembers the boundary until it gets there.
    pending = np.zeros(batch, bool)
    for t in reversed(range(steps)) if reverse else range(steps):
        live = live_all[t]
        fresh = live & (pending if reverse else resets[t])
        pending = np.where(live, resets[t], pending)
        live, fresh = live[:, None], fresh[:, None]
        before = {name: np.where(fresh, restart[name], state[name]) for name in state}
        output, after, backward = cell.step(params, x[t], before)
        held = {name: exact(share[t]) for name, share in (hold or {}).items()}
        after |= {k: share * before[k] + (1.0 - share) * after[k] for k, share in held.items()}
        output = after.get("h", output)
        state = {name: np.where(live, after[name], state[name]) for name in state}
        outputs[t] = np.where(live, output, 0.0)
        tape.append((t, live, fresh, held, backward))
    return np.stack(outputs), state, tape


def run(
    cell: Oracle,
    params,
    x,
    state,
    *,
    mask=None,
    resets=None,
    restart=None,
    reverse=False,
    hold=None,
) -> tuple[np.ndarray, Arrays]:
    """One layer in one direction.

    Args:
        cell: The cell.
        params: Its parameters.
        x: ``[T, B, I]``.
        state: The state before the first step that is walked.
        mask: ``[T, B]``, True at real steps; None means all.
        resets: ``[T, B]``, True where a new sequence begins at that step.
        restart: The state that a reset restores; None means zeros.
        reverse: Walk from the last step to the first; outputs stay in the order of the inputs.
        hold: ``{name: [T, B, H]}``, the share of its old value that a part of the state keeps:
            zoneout of Krueger et al. (2017), after which h is the output.

    Returns:
        The outputs ``[T, B, H]``, exactly 0 at masked steps, and the final state.
    """
    outputs, state, _ = _walk(cell, params, x, state, mask, resets, restart, reverse, hold)
    return outputs, state


def gradients(
    cell: Oracle,
    params,
    x,
    state,
    dy,
    dfinal,
    *,
    mask=None,
    resets=None,
    restart=None,
    reverse=False,
    hold=None,
) -> Gradients:
    """Cotangents of ``run``'s arguments, given those of its outputs and of its final state."""
    _, _, tape = _walk(cell, params, x, state, mask, resets, restart, reverse, hold)
    params, dy, dstate = tree(exact, params), exact(dy), tree(exact, dfinal)
    dparams = tree(np.zeros_like, params)
    drestart = tree(np.zeros_like, dstate)
    dx = np.zeros(np.shape(x))
    for t, live, fresh, held, backward in reversed(tape):
        dafter = {name: np.where(live, dstate[name], 0.0) for name in dstate}
        doutput = np.where(live, dy[t], 0.0)
        if "h" in dafter:
            dafter["h"], doutput = dafter["h"] + doutput, np.zeros_like(doutput)
        dheld = {name: share * dafter[name] for name, share in held.items()}
        dafter |= {name: (1.0 - share) * dafter[name] for name, share in held.items()}
        dparams_t, dx_t, dbefore = backward(doutput, dafter)
        dbefore |= {name: dbefore[name] + d for name, d in dheld.items()}
        for name in dparams:
            dparams[name] = dparams[name] + dparams_t[name]
        dx[t] = np.where(live, dx_t, 0.0)
        for name in dstate:
            drestart[name] = drestart[name] + np.where(fresh, dbefore[name], 0.0)
            through = np.where(fresh, 0.0, dbefore[name])
            dstate[name] = np.where(live, through, dstate[name])
    return Gradients(dparams, dx, dstate, drestart)


# Stacks. Parameters are {"layer_0": {"forward": {...}, "backward": {...}}, ...}. A state is a tuple
# over layers; an entry is one direction's state, or the pair (forward, backward).

DIRECTIONS = ("forward", "backward")


def _directions(params, layer: int) -> list[str]:
    return [name for name in DIRECTIONS if name in params[f"layer_{layer}"]]


def _pick(states, layer: int, direction: str, names: list[str]):
    if states is None:
        return None
    return states[layer] if len(names) == 1 else states[layer][names.index(direction)]


def _inputs_of_layers(cell, params, x, states, options, restarts):
    """Every layer's input and final state, and last the top layer's output."""
    inputs, finals = [exact(x)], []
    for layer in range(len(params)):
        names = _directions(params, layer)
        results = [
            run(
                cell,
                params[f"layer_{layer}"][name],
                inputs[-1],
                _pick(states, layer, name, names),
                restart=_pick(restarts, layer, name, names),
                reverse=name == "backward",
                **options,
            )
            for name in names
        ]
        inputs.append(np.concatenate([outputs for outputs, _ in results], axis=-1))
        finals.append(results[0][1] if len(names) == 1 else tuple(final for _, final in results))
    return inputs, tuple(finals)


def run_layers(cell: Oracle, params, x, states, *, mask=None, resets=None, restarts=None):
    """A stack of layers, each in one direction or in both.

    Args:
        cell: The cell of every layer and direction.
        params: ``{"layer_0": {"forward": {...}, "backward": {...}}, ...}``.
        x: ``[T, B, I]``.
        states: A tuple over layers, laid out like the parameters.
        mask: ``[T, B]`` or None.
        resets: ``[T, B]`` or None.
        restarts: What resets restore, laid out like ``states``; None means zeros.

    Returns:
        The top layer's outputs ``[T, B, D * H]`` and the final states.
    """
    options = {"mask": mask, "resets": resets}
    inputs, finals = _inputs_of_layers(cell, params, x, states, options, restarts)
    return inputs[-1], finals


def gradients_layers(
    cell: Oracle, params, x, states, dy, dfinals, *, mask=None, resets=None, restarts=None
) -> Gradients:
    """Cotangents of ``run_layers``' arguments, given those of its outputs and final states."""
    options = {"mask": mask, "resets": resets}
    inputs, _ = _inputs_of_layers(cell, params, x, states, options, restarts)
    dparams, dstates, drestarts = {}, [], []
    dy = exact(dy)
    for layer in reversed(range(len(params))):
        names = _directions(params, layer)
        parts = [
            gradients(
                cell,
                params[f"layer_{layer}"][name],
                inputs[layer],
                _pick(states, layer, name, names),
                dy_part,
                _pick(dfinals, layer, name, names),
                restart=_pick(restarts, layer, name, names),
                reverse=name == "backward",
                **options,
            )
            for name, dy_part in zip(names, np.split(dy, len(names), axis=-1), strict=True)
        ]
        dparams[f"layer_{layer}"] = {
            name: part.params for name, part in zip(names, parts, strict=True)
        }
        one = len(names) == 1
        dstates.append(parts[0].state if one else tuple(part.state for part in parts))
        drestarts.append(parts[0].restart if one else tuple(part.restart for part in parts))
        dy = np.sum([part.x for part in parts], axis=0)
    return Gradients(dparams, dy, tuple(reversed(dstates)), tuple(reversed(drestarts)))
