"""Models built of the layers."""

from jaxrnn.models.language_model import LanguageModel
from jaxrnn.models.softmax import Softmax, WordVectors, weighted_nll

__all__ = ["LanguageModel", "Softmax", "WordVectors", "weighted_nll"]
