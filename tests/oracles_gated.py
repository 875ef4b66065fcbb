"""Oracles of further cells with a matmul inside the loop. See oracles.py for the conventions."""

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
)


def mgu_step(params: Arrays, x: np.ndarray, state: Arrays):
    """The minimal gated unit as flax.linen.MGUCell has it.

    f = sigmoid(W_f x + R_f h + b_f);  n = tanh(W_n x + b_n + f (R_n h + b_hn));
    h' = (1 - f) n + f h.
    """
    h = state["h"]
    from_x = matmul(x, params["w_x"]) + params.get("b", 0.0)
    from_h = matmul(h, params["r"])
    f = sigmoid(from_x[:, 0] + from_h[:, 0])
    candidate = from_h[:, 1] + params.get("b_hn", 0.0)
    n = np.tanh(from_x[:, 1] + f * candidate)
    after = (1.0 - f) * n + f * h

    def backward(doutput, dafter):
        dh = doutput + dafter["h"]
        dn = dh * (1.0 - f) * (1.0 - n**2)
        df = (dh * (h - n) + dn * candidate) * f * (1.0 - f)
        d_from_x = np.stack([df, dn], axis=1)
        d_from_h = np.stack([df, dn * f], axis=1)
        dparams = {
            "w_x": matmul_to_weight(x, d_from_x),
            "r": matmul_to_weight(h, d_from_h),
            "b": d_from_x.sum(0),
            "b_hn": (dn * f).sum(0),
        }
        dbefore = {"h": matmul_to_input(d_from_h, params["r"]) + dh * f}
        return dparams, matmul_to_input(d_from_x, params["w_x"]), dbefore

    return after, {"h": after}, backward


def mgu_reset_before_step(params: Arrays, x: np.ndarray, state: Arrays):
    """Zhou et al. (2016) as printed.

    f = sigmoid(W_f x + R_f h + b_f);  n = tanh(W_n x + R_n (f h) + b_n);  h' = (1 - f) h + f n.
    """
    h = state["h"]
    r_gate, r_candidate = params["r"][:, :1], params["r"][:, 1:]
    from_x = matmul(x, params["w_x"]) + params.get("b", 0.0)
    f = sigmoid(from_x[:, 0] + matmul(h, r_gate)[:, 0])
    gated = f * h
    n = np.tanh(from_x[:, 1] + matmul(gated, r_candidate)[:, 0])
    after = (1.0 - f) * h + f * n

    def backward(doutput, dafter):
        dh = doutput + dafter["h"]
        dn = dh * f * (1.0 - n**2)
        dgated = matmul_to_input(dn[:, None], r_candidate)
        df = (dh * (n - h) + dgated * h) * f * (1.0 - f)
        dr_gate = matmul_to_weight(h, df[:, None])
        dr_candidate = matmul_to_weight(gated, dn[:, None])
        dpre = np.stack([df, dn], axis=1)
        dparams = {
            "w_x": matmul_to_weight(x, dpre),
            "r": np.concatenate([dr_gate, dr_candidate], axis=1),
            "b": dpre.sum(0),
        }
        through_gate = matmul_to_input(df[:, None], r_gate)
        dbefore = {"h": dh * (1.0 - f) + dgated * f + through_gate}
        return dparams, matmul_to_input(dpre, params["w_x"]), dbefore

    return after, {"h": after}, backward


def slstm_step(forget_gate: str, params: Arrays, x: np.ndarray, state: Arrays):
    """The stabilized sLSTM of Beck et al. (2024), equations 8 to 17, one head.

    With i, f, z, o the four columns of W x + R h + b, and log F = f or log sigmoid(f):
    m' = max(log F + m, i);  I = exp(i - m');  F = exp(log F + m - m');
    c' = F c + I tanh(z);  n' = F n + I;  h' = sigmoid(o) c' / n'.
    """
    h, c, n, m = (state[name] for name in ("h", "c", "n", "m"))
    pre = matmul(x, params["w_x"]) + matmul(h, params["r"]) + params.get("b", 0.0)
    log_i, z, o = pre[:, 0], np.tanh(pre[:, 2]), sigmoid(pre[:, 3])
    log_f = pre[:, 1] if forget_gate == "exp" else np.log(sigmoid(pre[:, 1]))
    kept = log_f + m
    keeps = np.real(kept) > np.real(log_i)
    m_after = np.where(keeps, kept, log_i)
    i, f = np.exp(log_i - m_after), np.exp(kept - m_after)
    c_after = f * c + i * z
    n_after = f * n + i
    content = c_after / n_after
    after = o * content

    def backward(doutput, dafter):
        dh = doutput + dafter["h"]
        dc = dafter["c"] + dh * o / n_after
        dn = dafter["n"] - dh * o * content / n_after
        # Of the exponents, first with m' held fixed, then what comes through m'.
        d_log_i = (dc * z + dn) * i
        d_kept = (dc * c + dn * n) * f
        dm_after = dafter["m"] - d_log_i - d_kept
        d_log_i = d_log_i + np.where(keeps, 0.0, dm_after)
        d_kept = d_kept + np.where(keeps, dm_after, 0.0)
        slope = 1.0 if forget_gate == "exp" else 1.0 - sigmoid(pre[:, 1])
        dpre = np.stack(
            [d_log_i, d_kept * slope, dc * i * (1.0 - z**2), dh * content * o * (1.0 - o)], axis=1
        )
        dparams = {
            "w_x": matmul_to_weight(x, dpre),
            "r": matmul_to_weight(h, dpre),
            "b": dpre.sum(0),
        }
        dbefore = {
            "h": matmul_to_input(dpre, params["r"]),
            "c": dc * f,
            "n": dn * f,
            "m": d_kept,
        }
        return dparams, matmul_to_input(dpre, params["w_x"]), dbefore

    return after, {"h": after, "c": c_after, "n": n_after, "m": m_after}, backward


def layer_norm_gru_step(params: Arrays, x: np.ndarray, state: Arrays):
    """The GRU with layer normalization of Ba et al. (2016), each gate on its own.

    r, z = sigmoid(gain_x N(W x) + gain_h N(R h) + b);
    n = tanh(gain_x N(W_n x) + b_n + r (gain_h N(R_n h) + b_hn));  h' = (1 - z) n + z h.
    """
    h = state["h"]
    normed_x, x_adjoint = normalized(matmul(x, params["w_x"]))
    normed_h, h_adjoint = normalized(matmul(h, params["r"]))
    from_x = params["gain_x"] * normed_x + params.get("b", 0.0)
    from_h = params["gain_h"] * normed_h
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
        d_wx = x_adjoint(d_from_x * params["gain_x"])
        d_rh = h_adjoint(d_from_h * params["gain_h"])
        dparams = {
            "w_x": matmul_to_weight(x, d_wx),
            "r": matmul_to_weight(h, d_rh),
            "b": d_from_x.sum(0),
            "b_hn": (dn * r).sum(0),
            "gain_x": (d_from_x * normed_x).sum(0),
            "gain_h": (d_from_h * normed_h).sum(0),
        }
        dbefore = {"h": matmul_to_input(d_rh, params["r"]) + dh * z}
        return dparams, matmul_to_input(d_wx, params["w_x"]), dbefore

    return after, {"h": after}, backward


def mgu(reset_after: bool = True) -> Oracle:
    """The MGU cell; gates f, n."""
    return Oracle(mgu_step if reset_after else mgu_reset_before_step, ("h",))


def slstm(forget_gate: str = "sigmoid") -> Oracle:
    """The sLSTM cell; gates i, f, z, o. Before the first step ``m`` is very negative."""
    return Oracle(partial(slstm_step, forget_gate), ("h", "c", "n", "m"))


def layer_norm_gru() -> Oracle:
    """The layer-normalized GRU; gates r, z, n."""
    return Oracle(layer_norm_gru_step, ("h",))
