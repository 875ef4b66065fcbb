"""WikiText-2, word level: one LSTM, adaptive softmax tied to the embedding.

    python -m jaxrnn.train --config configs/wikitext.py --config.data.dir=FOLDER

FOLDER holds wikitext-2/{train,valid,test}.txt; without it the text is downloaded.

Seen: validation perplexity 103.5, test 97.4, in 69 minutes on 2 CPU cores
(docs/results/wikitext-2-cpu.md).
"""

from ml_collections import ConfigDict

from jaxrnn.train.config import get_default_config


def get_config() -> ConfigDict:
    """Returns the defaults with what differs."""
    config = get_default_config()
    config.data.batch_size = 20
    config.data.bptt = 35
    config.model.hidden_features = 384
    config.model.dropout_embedding = 0.2
    config.model.dropout_output = 0.4
    config.optimizer.learning_rate = 2e-3
    config.optimizer.schedule = "cosine"
    config.run.epochs = 10
    return config
