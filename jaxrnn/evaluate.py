"""Prints the validation and test perplexity of a trained language model.

    python -m jaxrnn.evaluate --checkpoint runs/wikitext-2-lstm [--data-dir FOLDER]

The perplexity is e to the mean negative log-likelihood of a token, over the whole vocabulary, and
each text is read once from its beginning to its end.
"""

import argparse
from collections.abc import Sequence

from absl import logging
from flax import nnx

from jaxrnn.parallel import make_mesh
from jaxrnn.train.build import make_corpus
from jaxrnn.train.errors import UserError, one_sentence
from jaxrnn.train.evaluation import Score, make_evaluate
from jaxrnn.train.loading import Trained, load
from jaxrnn.train.streams import eval_stream


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; `arguments` are those of the command line if None."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrnn.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", required=True, help="directory of a training run")
    parser.add_argument(
        "--data-dir", default="", help="folder with the corpus; where training found it by default"
    )
    options = parser.parse_args(arguments)
    logging.set_verbosity(logging.ERROR)
    with one_sentence():
        trained = load(options.checkpoint)
        scores = evaluate(trained, options.data_dir)
        print(f"{trained.corpus}, parameters of step {trained.progress.step:,}")
        for split, score in scores.items():
            print(f"{split:<10} perplexity {score.perplexity:>10,.2f} over {score.tokens:,} tokens")


def evaluate(trained: Trained, data_dir: str = "") -> dict[str, Score]:
    """Returns the scores of "validation" and "test".

    Args:
        trained: what `load` returned.
        data_dir: folder with the corpus; empty: where training found it.

    Raises:
        UserError: the corpus is missing, or not the one that the model was trained on.
    """
    config = trained.config.data.copy_and_resolve_references()
    config.dataset = trained.corpus
    config.dir = data_dir or config.dir
    corpus = make_corpus(config)
    if corpus.vocabulary != trained.vocabulary:
        raise UserError(
            f"the model was trained on {trained.corpus} with {len(trained.vocabulary):,} words, "
            f"and {corpus.source} has {len(corpus.vocabulary):,} other ones; give the folder of "
            "that text with --data-dir"
        )
    graphdef, params = nnx.split(trained.model)
    mesh = make_mesh(data=1)
    score = make_evaluate(graphdef, mesh)
    return {
        name: score(params, eval_stream(config, corpus, split, mesh))
        for name, split in (("validation", "valid"), ("test", "test"))
    }


if __name__ == "__main__":
    main()
