"""Where the time of a training step goes.

    python scripts/breakdown.py --config configs/wikitext.py --data-dir FOLDER [--json FILE]

Times four nested pieces of the step of a config, alternating in one process, and prints medians:
the recurrent layers, the model up to the softmax, the whole loss (each forward and backward), and
the training step with its optimizer. The difference of two rows is what the second one adds.
"""

import argparse
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrnn.data import Windows
from jaxrnn.train.build import make_corpus, make_devices, make_model
from jaxrnn.train.config import load_config
from jaxrnn.train.optimizer import make_optimizer, make_schedule
from jaxrnn.train.state import initial_state
from jaxrnn.train.step import make_train_step


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="a config file or name")
    parser.add_argument("--data-dir", default="", help="folder with the corpus")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls of each piece (30)")
    parser.add_argument("--json", help="write the medians there too")
    options = parser.parse_args()
    config = load_config(options.config)
    config.data.dir = options.data_dir
    medians = measure(config, options.repeats)
    tokens = config.data.batch_size * config.data.bptt
    before = 0.0
    print(f"{'piece':<28}{'ms':>8}{'adds ms':>9}{'of the step':>13}")
    for name, seconds in medians.items():
        share = (seconds - before) / medians["training step"]
        print(f"{name:<28}{seconds * 1e3:>8.1f}{(seconds - before) * 1e3:>9.1f}{share:>12.0%}")
        before = seconds
    print(f"{tokens / medians['training step']:,.0f} tokens/s, {tokens} tokens a step")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(medians, file, indent=2)


def measure(config, repeats: int) -> dict[str, float]:
    """Median seconds of each piece, in the order in which they contain each other."""
    corpus = make_corpus(config.data)
    model = make_model(config, len(corpus.vocabulary), config.run.seed)
    graphdef, params = nnx.split(model)
    params = jax.tree.map(jnp.copy, params)  # The training step takes the model's own arrays.
    schedule = make_schedule(config.optimizer, 10_000)
    optimizer = make_optimizer(config.optimizer, schedule)
    data = config.data
    windows = Windows(corpus.train, data.batch_size, data.bptt, eos=corpus.vocabulary.eos)
    mesh = make_devices(config)
    train_step = make_train_step(graphdef, optimizer, schedule, mesh, padded=data.random_bptt)
    state = initial_state(model, optimizer, mesh, data.batch_size, config.run.seed)
    initial = model.initialize_state(data.batch_size)
    embedded = jnp.ones((data.bptt, data.batch_size, config.model.embed_features))

    def layers(params, batch, key):
        del batch
        model = nnx.merge(graphdef, params)
        rngs = nnx.Rngs(dropout=key)
        return jnp.sum(model.rnn(embedded, initial, deterministic=False, rngs=rngs)[0])

    def features(params, batch, key):
        model = nnx.merge(graphdef, params)
        rngs = nnx.Rngs(dropout=key)
        return jnp.sum(model.features(batch.inputs, initial, deterministic=False, rngs=rngs)[0])

    def loss(params, batch, key):
        return nnx.merge(graphdef, params).loss(
            batch.inputs,
            batch.targets,
            initial,
            mask=batch.mask,
            deterministic=False,
            rngs=nnx.Rngs(dropout=key),
        )[0]

    pieces = {
        "recurrent layers": jax.jit(jax.grad(layers)),
        "model up to the softmax": jax.jit(jax.grad(features)),
        "loss": jax.jit(jax.grad(loss)),
    }
    times = {name: [] for name in [*pieces, "training step"]}
    for index in range(repeats + 2):
        print(f"\r{index}/{repeats + 2}", end="", file=sys.stderr, flush=True)
        batch = jax.device_put(windows[index % len(windows)])
        for name, piece in pieces.items():
            start = time.perf_counter()
            jax.block_until_ready(piece(params, batch, jax.random.key(index)))
            times[name].append(time.perf_counter() - start)
        start = time.perf_counter()
        state, metrics = train_step(state, batch)
        jax.block_until_ready((state, metrics))
        times["training step"].append(time.perf_counter() - start)
    print(file=sys.stderr)
    # The first two calls compile and warm up.
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


if __name__ == "__main__":
    main()
