"""Learns to write Shakespeare, character by character, and writes some.

    python examples/shakespeare.py --data input.txt

The text is Tiny Shakespeare, 1.1 million characters
(https://github.com/karpathy/char-rnn/blob/master/data/tinyshakespeare/input.txt); the last tenth
is for validation.

It shows truncated backpropagation through time: the text is cut into lanes that are read side by
side, window by window, each window starting from the state in which the one before ended, and
gradients stop there. And it shows `layer.step`, which writes one character at a time.

Expect, with the defaults, on 2 cores of a shared CPU machine (2026-12-01): 2.52 bits per character
of the validation text, where counting pairs of characters gives 3.59 and counting single ones 4.83;
55 s of CPU time. The sample has words, names and the form of a play, and no sense.
"""

import argparse
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxrnn import LSTM

LANES, WINDOW = 64, 64


class Writer(nnx.Module):
    """An embedding, an LSTM and a linear layer.

    Args:
        characters: V.
        hidden_features: of the LSTM.
        rngs: of the parameters.
    """

    def __init__(self, characters: int, hidden_features: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(characters, 64, rngs=rngs)
        self.lstm = LSTM(64, hidden_features, rngs=rngs)
        self.head = nnx.Linear(hidden_features, characters, rngs=rngs)

    def __call__(self, ids: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """From characters ``[B, T]`` to logits of the next ones ``[B, T, V]``, and the state."""
        y, state = self.lstm(self.embed(ids), state)
        return self.head(y), state

    def step(self, ids: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The same for one step: ``[B]`` to ``[B, V]``."""
        y, state = self.lstm.step(self.embed(ids), state)
        return self.head(y), state


def window_loss(model: Writer, window: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """The mean negative log-likelihood of a window ``[B, T + 1]`` in nats, and the state."""
    logits, state = model(window[:, :-1], state)
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean(), state


@nnx.jit
def train_step(
    model: Writer, optimizer: nnx.Optimizer, window: jax.Array, state: Any
) -> tuple[jax.Array, Any]:
    """Changes the model by one step; returns the loss and the state for the next window."""
    # The state is an argument that is not differentiated, so no gradient reaches the last window.
    compute = nnx.value_and_grad(window_loss, has_aux=True)
    (loss, state), gradients = compute(model, window, state)
    optimizer.update(model, gradients)
    return loss, state


evaluate_window = nnx.jit(window_loss)
next_character = nnx.jit(Writer.step)


def lanes(ids: np.ndarray, rows: int) -> np.ndarray:
    """Cuts a text into ``[rows, N]``; each row goes on where the one above ends."""
    length = (len(ids) - 1) // rows
    starts = length * np.arange(rows)[:, None]
    return ids[starts + np.arange(length + 1)]


def windows(rows: np.ndarray) -> Iterator[jax.Array]:
    """Cuts lanes into windows ``[B, WINDOW + 1]``; each begins with the last character before."""
    for start in range(0, rows.shape[1] - WINDOW, WINDOW):
        yield jnp.array(rows[:, start : start + WINDOW + 1])


def write(model: Writer, count: int, first: int, key: jax.Array) -> list[int]:
    """Draws characters one at a time, each fed back in to draw the next."""
    ids = [first]
    state = model.lstm.initialize_state(1)
    for step_key in jax.random.split(key, count):
        logits, state = next_character(model, jnp.array(ids[-1:]), state)
        ids.append(int(jax.random.categorical(step_key, logits[0])))
    return ids[1:]


def count_bits(train: np.ndarray, validation: np.ndarray, size: int) -> tuple[float, float]:
    """Bits per character of counting single characters, and of counting pairs of them."""
    pairs = np.zeros((size, size))
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    singles = pairs.sum(axis=0) / pairs.sum()
    # Where a pair is rare, the single characters speak: one count is spread over them.
    given = (pairs + singles) / (pairs.sum(axis=1, keepdims=True) + 1)
    unigram = -np.log2(singles[validation[1:]]).mean()
    bigram = -np.log2(given[validation[:-1], validation[1:]]).mean()
    return float(unigram), float(bigram)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains, prints the results and returns them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=pathlib.Path, required=True, help="the text, input.txt")
    parser.add_argument("--steps", type=int, default=700, help="windows to train on")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and the sample")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps should be at least 1, got {options.steps}")
    if not options.data.is_file():
        raise SystemExit(f"there is no file {options.data}: name the text, input.txt, with --data")

    text = options.data.read_text("utf-8")
    characters, ids = np.unique(list(text), return_inverse=True)
    border = len(ids) * 9 // 10
    unigram, bigram = count_bits(ids[:border], ids[border:], len(characters))

    model = Writer(len(characters), 128, rngs=nnx.Rngs(options.seed))
    rate = optax.cosine_decay_schedule(1e-2, options.steps)
    update = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    optimizer = nnx.Optimizer(model, update, wrt=nnx.Param)

    start = time.perf_counter()
    losses = []
    reading = iter(())
    state = None
    for step in range(1, options.steps + 1):
        window = next(reading, None)
        if window is None:  # At the end of the lanes, and in the beginning.
            reading = windows(lanes(ids[:border], LANES))
            window, state = next(reading), model.lstm.initialize_state(LANES)
        loss, state = train_step(model, optimizer, window, state)
        losses.append(loss)
        if step % 20 == 0 or step == options.steps:
            bits, seconds = float(loss) / np.log(2), time.perf_counter() - start
            line = f"step {step}/{options.steps}  {bits:.2f} bits per character  {seconds:.0f} s"
            print(f"\r{line}", end="", flush=True)
    print()

    state = model.lstm.initialize_state(LANES)
    nll = []
    for window in windows(lanes(ids[border:], LANES)):
        loss, state = evaluate_window(model, window, state)
        nll.append(float(loss))
    bits = float(np.mean(nll) / np.log(2))
    print(f"validation: {bits:.3f} bits per character")
    print(f"counting pairs of characters: {bigram:.3f}; single characters: {unigram:.3f}")

    newline = int(np.flatnonzero(characters == "\n")[0])
    written = write(model, 400, newline, jax.random.key(options.seed))
    sample = "".join(characters[written])
    print(f"\n{sample}")
    return {
        "bits": bits,
        "unigram_bits": unigram,
        "bigram_bits": bigram,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "sample": sample,
    }


if __name__ == "__main__":
    main()
