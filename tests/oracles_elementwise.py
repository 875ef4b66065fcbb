"""Oracles of the cells without a matmul inside the loop. See oracles.py for the conventions."""

from functools import partial

import numpy as np
from oracles import (
    Arrays,
    Oracle,
    matmul,
    matmul_to_input,
    matmul_to_weight,
    normalized,
    sigmoid,
    sru_step,
)


def indrnn_step(activation: str, params: Arrays, x: np.ndarray, state: Arrays):
    """Li et al. (2018): h' = act(W x + u h + b), u a vector."""
    h, u = state["h"], params["u"]
    pre = matmul(x, params["w_x"])[:, 0] + u * h + params.get("b", np.zeros((1, 1)))[0]
    after = np.tanh(pre) if activation == "tanh" else np.where(np.real(pre) > 0, pre, 0.0)

    def backward(doutput, dafter):
        slope = 1.0 - after**2 if activation == "tanh" else np.where(pre > 0, 1.0, 0.0)
        dpre = (doutput + dafter["h"]) * slope
        dparams = {
            "w_x": matmul_to_weight(x, dpre[:, None]),
            "u": (dpre * h).sum(0),
            "b": dpre.sum(0)[None],
        }
        return dparams, matmul_to_input(dpre[:, None], params["w_x"]), {"h": dpre * u}

    return after, {"h": after}, backward


def qrnn_step(window: int, params: Arrays, x: np.ndarray, state: Arrays):
    """Bradbury et al. (2016), fo-pooling over a convolution of ``window`` steps.

    z_t = tanh(W_z x_t + V_z x_{t-1} + b_z);  f_t, o_t = sigmoid(likewise);
    c_t = f_t c_{t-1} + (1 - f_t) z_t;  h_t = o_t c_t.
    The columns of w_x are W_z, W_f, W_o, V_z, V_f, V_o; the state has the V x_{t-1}.
    """
    c = state["c"]
    columns = matmul(x, params["w_x"])
    pre = columns[:, :3] + params.get("b", 0.0)
    later = ("z1", "f1", "o1")[: 3 * (window - 1)]
    if later:
        pre = pre + np.stack([state[name] for name in later], axis=1)
    z, f, o = np.tanh(pre[:, 0]), sigmoid(pre[:, 1]), sigmoid(pre[:, 2])
    c_after = f * c + (1.0 - f) * z
    carried = {name: columns[:, 3 + k] for k, name in enumerate(later)}

    def backward(doutput, dafter):
        dc = dafter["c"] + doutput * o
        dpre = np.stack(
            [
                dc * (1.0 - f) * (1.0 - z**2),
                dc * (c - z) * f * (1.0 - f),
                doutput * c_after * o * (1.0 - o),
            ],
            axis=1,
        )
        dcolumns = np.concatenate([dpre, *(dafter[name][:, None] for name in later)], axis=1)
        dparams = {"w_x": matmul_to_weight(x, dcolumns), "b": dpre.sum(0)}
        dbefore = {"c": dc * f} | {name: dpre[:, k] for k, name in enumerate(later)}
        return dparams, matmul_to_input(dcolumns, params["w_x"]), dbefore

    return o * c_after, {"c": c_after} | carried, backward


def min_gru_step(params: Arrays, x: np.ndarray, state: Arrays):
    """Feng et al. (2024): z = sigmoid(W_z x + b_z);  h' = (1 - z) h + z (W_n x + b_n)."""
    h = state["h"]
    pre = matmul(x, params["w_x"]) + params.get("b", 0.0)
    z, n = sigmoid(pre[:, 0]), pre[:, 1]
    after = (1.0 - z) * h + z * n

    def backward(doutput, dafter):
        dh = doutput + dafter["h"]
        dpre = np.stack([dh * (n - h) * z * (1.0 - z), dh * z], axis=1)
        dparams = {"w_x": matmul_to_weight(x, dpre), "b": dpre.sum(0)}
        return dparams, matmul_to_input(dpre, params["w_x"]), {"h": dh * (1.0 - z)}

    return after, {"h": after}, backward


def min_lstm_step(params: Arrays, x: np.ndarray, state: Arrays):
    """Feng et al. (2024): f, i = sigmoid(W x + b);  h' = (f h + i (W_n x + b_n)) / (f + i)."""
    h = state["h"]
    pre = matmul(x, params["w_x"]) + params.get("b", 0.0)
    f, i, n = sigmoid(pre[:, 0]), sigmoid(pre[:, 1]), pre[:, 2]
    total = f + i
    after = (f * h + i * n) / total

    def backward(doutput, dafter):
        dh = doutput + dafter["h"]
        # d after / d f = (h (f + i) - (f h + i n)) / (f + i)^2, and so for i.
        df = dh * i * (h - n) / total**2
        di = dh * f * (n - h) / total**2
        dpre = np.stack([df * f * (1.0 - f), di * i * (1.0 - i), dh * i / total], axis=1)
        dparams = {"w_x": matmul_to_weight(x, dpre), "b": dpre.sum(0)}
        return dparams, matmul_to_input(dpre, params["w_x"]), {"h": dh * f / total}

    return after, {"h": after}, backward


def sru_of_features_step(alpha: float, params: Arrays, x: np.ndarray, state: Arrays):
    """The SRU whose matrices see P^T (gain_x N(x) + b_x), or without the one or the other.

    A highway without a matrix carries x.
    """
    normed, norm_adjoint = normalized(x) if "gain_x" in params else (x, lambda d: d)
    gained = params.get("gain_x", 1.0) * normed + params.get("b_x", 0.0)
    fed = gained @ params["w_proj"] if "w_proj" in params else gained
    size, width = fed.shape[1], x.shape[1]
    inner = {name: params[name] for name in ("w_x", "v", "b", "w_highway") if name in params}
    if "w_highway" not in params:
        # The plain SRU gets both side by side, and matrices that pick the one and the other.
        fed = np.concatenate([fed, x], axis=1)
        inner["w_x"] = np.pad(inner["w_x"], ((0, width), (0, 0), (0, 0)))
        inner["w_highway"] = np.eye(size + width, width, -size)
    output, after, inner_backward = sru_step(alpha, inner, fed, state)

    def backward(doutput, dafter):
        dparams, dfed, dbefore = inner_backward(doutput, dafter)
        dparams["w_x"] = dparams["w_x"][:size]
        dgained = dfed[:, :size]
        if "w_proj" in params:
            dparams["w_proj"] = gained.T @ dgained
            dgained = dgained @ params["w_proj"].T
        dparams |= {"gain_x": (dgained * normed).sum(0), "b_x": dgained.sum(0)}
        dx = norm_adjoint(dgained * params.get("gain_x", 1.0))
        return dparams, dx if "w_highway" in params else dx + dfed[:, size:], dbefore

    return output, after, backward


def indrnn(activation: str = "relu") -> Oracle:
    """The IndRNN cell with ``"relu"`` or ``"tanh"``."""
    return Oracle(partial(indrnn_step, activation), ("h",))


def qrnn(window: int = 1) -> Oracle:
    """The QRNN cell; columns z, f, o."""
    names = ("c",) if window == 1 else ("c", "z1", "f1", "o1")
    return Oracle(partial(qrnn_step, window), names)


def min_gru() -> Oracle:
    """The minGRU cell; columns z, n."""
    return Oracle(min_gru_step, ("h",))


def min_lstm() -> Oracle:
    """The minLSTM cell; columns f, i, n."""
    return Oracle(min_lstm_step, ("h",))


def sru_of_features(alpha: float = 1.0) -> Oracle:
    """The SRU with layer norm or a projection of its input, as its parameters say."""
    return Oracle(partial(sru_of_features_step, alpha), ("c",))
