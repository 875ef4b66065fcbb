"""Writes text with a trained language model.

    python -m jaxrnn.generate --checkpoint runs/wikitext-2-lstm --prompt "the game was"

Words are drawn one at a time from the model's distribution, narrowed by --top-k and --top-p and
sharpened by a --temperature below 1; --greedy takes the likeliest word instead. The same seed
writes the same text.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from flax import nnx

from jaxrnn.train.errors import UserError, one_sentence
from jaxrnn.train.loading import Trained, load


class Sampling(NamedTuple):
    """How a word is drawn.

    Attributes:
        temperature: divides the logarithms of the probabilities; 0 takes the likeliest word.
        top_k: how many of the likeliest words may be drawn; 0: all.
        top_p: the smallest set of likeliest words that has this probability may be drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class Text(NamedTuple):
    """What was written, and how fast.

    Attributes:
        ids: ids of the new words.
        seconds: how long each took.
    """

    ids: list[int]
    seconds: list[float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; `arguments` are those of the command line if None."""
    options = _parser().parse_args(arguments)
    logging.set_verbosity(logging.ERROR)
    with one_sentence():
        temperature = 0.0 if options.greedy else options.temperature
        sampling = Sampling(temperature, options.top_k, options.top_p)
        trained = load(options.checkpoint)
        text = generate(trained, options.prompt, options.length, sampling, options.seed)
    print(trained.vocabulary.decode([*_encode(trained, options.prompt), *text.ids]))
    print(
        f"\n{len(text.ids) / sum(text.seconds):,.0f} tokens/s, median latency of a token "
        f"{statistics.median(text.seconds) * 1e3:.2f} ms"
    )


def generate(trained: Trained, prompt: str, length: int, sampling: Sampling, seed: int = 0) -> Text:
    """Goes on with a text.

    Args:
        trained: what `load` returned.
        prompt: words with spaces between; may be empty.
        length: how many words to write.
        sampling: how a word is drawn.
        seed: seed of the draws.

    Raises:
        UserError: a word of the prompt is not in the vocabulary; the message has similar ones.
    """
    ids = _encode(trained, prompt)
    graphdef, params = nnx.split(trained.model)
    key, state = jax.random.key(seed), trained.model.initialize_state(1)
    # The model reads <eos> first, as it did in training.
    word, text = jnp.int32(trained.vocabulary.eos), Text([], [])
    step = make_step(graphdef, sampling).lower(params, state, word, key).compile()
    for i in range(len(ids) + length):
        start = time.perf_counter()
        state, drawn = step(params, state, word, jax.random.fold_in(key, i))
        drawn.block_until_ready()
        if i < len(ids):
            word = jnp.int32(ids[i])
        else:
            word = drawn
            text.ids.append(int(drawn))
            text.seconds.append(time.perf_counter() - start)
    return text


def make_step(graphdef: nnx.GraphDef, sampling: Sampling) -> jax.stages.Wrapped:
    """Returns `step(params, state, word, key) -> (state, next word)`, jitted."""

    @jax.jit
    def step(params, state, word, key):
        model = nnx.merge(graphdef, params)
        features, state = model.features(word[None, None], state, deterministic=True)
        return state, draw(model.log_probs(features)[0, 0], sampling, key)

    return step


def draw(log_probs: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """Draws one word.

    Args:
        log_probs: logarithms of the words' probabilities, [V].
        sampling: how.
        key: random key.

    Returns:
        its id, int32 [].
    """
    if sampling.temperature == 0:
        return jnp.argmax(log_probs).astype(jnp.int32)
    logits = log_probs / sampling.temperature
    if sampling.top_k:
        kept, _ = jax.lax.top_k(logits, min(sampling.top_k, logits.size))
        logits = jnp.where(logits >= kept[-1], logits, -jnp.inf)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, descending=True)
        probability = jax.nn.softmax(ordered)
        # A word stays if those before it have not reached top_p yet, so the first one always does.
        before = jnp.cumsum(probability) - probability
        least = jnp.min(jnp.where(before < sampling.top_p, ordered, jnp.inf))
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _encode(trained: Trained, prompt: str) -> list[int]:
    try:
        return trained.vocabulary.encode(prompt.split()).tolist()
    except ValueError as error:
        raise UserError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrnn.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", required=True, help="directory of a training run")
    add("--prompt", default="", help="words to go on from, with spaces between")
    add("--length", type=_number(int, 1), default=100, help="words to write (100)")
    add("--temperature", type=_number(float, 0), default=1.0, help="below 1: safer words (1.0)")
    add("--top-k", type=_number(int, 0), default=0, help="draw from so many words; 0: all (0)")
    add("--top-p", type=_number(float, 0, 1), default=1.0, help="draw from this probability (1.0)")
    add("--greedy", action="store_true", help="take the likeliest word")
    add("--seed", type=_number(int, 0), default=0, help="seed of the draws (0)")
    return parser


def _number(kind: type, least: float, most: float = float("inf")) -> Callable[[str], float]:
    """Returns a parser of a number within bounds, with a message that states them."""

    def parse(text: str) -> float:
        bounds = f"at least {least}" if most == float("inf") else f"from {least} to {most}"
        wanted = f"should be {'a whole number' if kind is int else 'a number'} {bounds}"
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{wanted}, got {text!r}") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{wanted}, got {text!r}")
        return value

    return parse


if __name__ == "__main__":
    main()
