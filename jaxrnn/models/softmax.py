"""Losses over a large vocabulary, exact, without the logits of a whole window in memory."""

import itertools
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxrnn._typing import Array, DTypeLike
from pallas_kernels.varying import vary_together

# Logits that stand in memory at once. Smaller chunks read the table more often, larger ones leave
# the cache. Measured on 2 CPU cores; see docs/results/.
CHUNK_LOGITS = 2**19


def weighted_nll(
    features: Array, table: Array, bias: Array, targets: Array, weights: Array
) -> Array:
    """``sum_n weights[n] (logsumexp(z[n]) - z[n, targets[n]])``, ``z = features @ table.T + bias``.

    Logits are made chunk by chunk of tokens, never all at once. Where a gradient is asked for, the
    same pass makes it, since the loss is a sum: three matmuls a chunk and no logits computed
    twice. Tokens of weight 0 are left out of all work.

    Args:
        features: ``[N, E]``.
        table: ``[V, E]``.
        bias: ``[V]``.
        targets: integers ``[N]`` below V; any value where the weight is 0.
        weights: ``[N]``. They are data: their gradient is not computed and taken as 0.

    Returns:
        the sum, in nats, float32 ``[]``.
    """
    return _weighted_nll(*vary_together(features, table, bias, targets, weights))


@jax.custom_vjp
def _weighted_nll(features, table, bias, targets, weights):
    return _chunked(features, table, bias, targets, weights, gradients=False)[0]


def _forward(features, table, bias, targets, weights):
    return _chunked(features, table, bias, targets, weights, gradients=True)


def _backward(gradients, cotangent):
    scaled = jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients)
    return (*scaled, None, None)


_weighted_nll.defvjp(_forward, _backward)


def _chunked(features, table, bias, targets, weights, *, gradients):
    tokens, vocabulary = features.shape[0], table.shape[0]
    chunk = min(tokens, max(16, CHUNK_LOGITS // vocabulary))
    padding = -tokens % chunk
    order = jnp.pad(jnp.argsort(weights == 0, stable=True), (0, padding))
    count = jnp.sum(weights != 0)

    def body(index, carry):
        total, grads = carry
        rows = lax.dynamic_slice_in_dim(order, index * chunk, chunk)
        inside = index * chunk + jnp.arange(chunk) < count
        weight = jnp.where(inside, weights[rows], 0).astype(jnp.float32)
        x = features[rows].astype(table.dtype)
        target = jnp.where(weight != 0, targets[rows], 0)
        z = matmul(x, table.T) + bias
        shifted = z - jnp.max(z, axis=-1, keepdims=True)
        exponentials = jnp.exp(shifted)
        normalizer = jnp.sum(exponentials, axis=-1)
        at_target = jnp.take_along_axis(shifted, target[:, None], axis=-1)[:, 0]
        total = total + jnp.sum(weight * (jnp.log(normalizer) - at_target))
        if gradients:
            # d/dz = weight * (softmax(z) - onehot(target))
            dz = exponentials * (weight / normalizer)[:, None]
            dz = dz.at[jnp.arange(chunk), target].add(-weight).astype(table.dtype)
            dfeatures, dtable, dbias = grads
            grads = (
                dfeatures.at[rows].add(matmul(dz, table).astype(dfeatures.dtype)),
                dtable + matmul(dz.T, x),
                dbias + jnp.sum(dz, axis=0, dtype=jnp.float32),
            )
        return total, grads

    grads = None
    if gradients:
        grads = (
            jnp.zeros_like(features),
            jnp.zeros_like(table, jnp.float32),
            jnp.zeros_like(bias, jnp.float32),
        )
    chunks = (count + chunk - 1) // chunk
    nothing, _ = vary_together(jnp.float32(0), features)
    total, grads = lax.fori_loop(0, chunks, body, (nothing, grads))
    if gradients:
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, (features, table, bias))
    return total, grads


matmul = partial(jnp.matmul, preferred_element_type=jnp.float32)


class WordVectors(nnx.Module):
    r"""One vector a word, smaller for rare words: adaptive input representations.

    Words are sorted by falling frequency and cut into groups. The vectors of group i have
    ``features / div_value**i`` values and a projection to ``features``, as in Baevski & Auli
    (2019), arXiv:1809.10853, and, for an output layer, Grave et al. (2017), arXiv:1609.04309.
    Without cutoffs there is one plain table.

    Args:
        vocabulary_size: V.
        features: E.
        cutoffs: first word id of each group after the first, rising; those beyond a small
            vocabulary cut nothing.
        div_value: by which each group's vectors are smaller than the group's before; 1 is no
            projection at all.
        param_dtype: of the parameters.
        rngs: ``params``.

    Attributes:
        cuts: first word id of each group, and V.

    Raises:
        ValueError: the cutoffs do not rise.
    """

    def __init__(
        self,
        vocabulary_size: int,
        features: int,
        *,
        cutoffs: Sequence[int] = (),
        div_value: float = 1.0,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.cuts = (0, *(c for c in cutoffs if c < vocabulary_size), vocabulary_size)
        if any(a >= b for a, b in itertools.pairwise(self.cuts)):
            raise ValueError(f"cutoffs should be rising word ids above 0, got {tuple(cutoffs)}")
        if div_value < 1:
            raise ValueError(f"div_value should be at least 1, got {div_value}")
        counts = [b - a for a, b in itertools.pairwise(self.cuts)]
        sizes = [max(1, round(features / div_value**i)) for i in range(len(counts))]
        self.tables = nnx.List(
            [new_table(rngs, n, d, param_dtype) for n, d in zip(counts, sizes, strict=True)]
        )
        shapes = [(size, features) for size in sizes[1:]] if div_value > 1 else []
        self.projections = nnx.List(
            [nnx.Param(lecun(rngs.params(), shape, param_dtype)) for shape in shapes]
        )

    def embed(self, ids: Array, dtype: DTypeLike) -> Array:
        """Word ids ``[...]`` to vectors ``[..., E]``."""
        vectors = self.tables[0][...][jnp.minimum(ids, self.cuts[1] - 1)].astype(dtype)
        for index in range(1, len(self.tables)):
            first, end = self.cuts[index], self.cuts[index + 1]
            inside = (ids >= first) & (ids < end)
            rows = self.tables[index][...][jnp.where(inside, ids - first, 0)].astype(dtype)
            if self.projections:
                rows = rows @ self.projections[index - 1][...].astype(dtype)
            vectors = jnp.where(inside[..., None], rows, vectors)
        return vectors

    def groups(self, features: Array) -> list[tuple[Array, Array]]:
        """For each group: features ``[..., d]`` and the table ``[n, d]`` to multiply them with."""
        dtype = features.dtype
        inputs = [features] * len(self.tables)
        for index, projection in enumerate(self.projections):
            inputs[index + 1] = matmul(features, projection[...].astype(dtype).T).astype(dtype)
        return [(x, t[...].astype(dtype)) for x, t in zip(inputs, self.tables, strict=True)]


class Softmax(nnx.Module):
    r"""The probability of each word, full or adaptive (Grave et al. 2017, arXiv:1609.04309).

    Over the groups of a `WordVectors`: :math:`p(w) = p_{head}(w)` for words of the first group,
    and :math:`p_{head}(group)\, p_{group}(w)` for the rest. Only the tokens of a group pay for
    it, so that a step costs a few times the head instead of the vocabulary. It is a normalized
    distribution over all words: the loss is exact. With one group it is the full softmax.

    Args:
        words: the words' vectors; the embedding's for a tied model.
        features: E.
        param_dtype: of the parameters.
        rngs: ``params``.
    """

    def __init__(
        self,
        words: WordVectors,
        features: int,
        *,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.words = words
        tails = len(words.cuts) - 2
        self.bias = nnx.Param(jnp.zeros((words.cuts[-1],), param_dtype))
        self.group_table = nnx.data(
            new_table(rngs, tails, features, param_dtype) if tails else None
        )
        self.group_bias = nnx.data(nnx.Param(jnp.zeros((tails,), param_dtype)) if tails else None)

    def loss(self, features: Array, targets: Array, weights: Array) -> Array:
        """The weighted sum of the negative log-likelihood.

        Args:
            features: ``[N, E]``.
            targets: word ids ``[N]``.
            weights: ``[N]``; 0 leaves a token out.

        Returns:
            nats, float32 ``[]``.
        """
        head, *tails = self._groups(features)
        cuts = self.words.cuts
        in_head, total = targets, jnp.float32(0)
        for index, tail in enumerate(tails):
            first, end = cuts[index + 1], cuts[index + 2]
            inside = (targets >= first) & (targets < end)
            total += weighted_nll(*tail, targets - first, weights * inside)
            in_head = jnp.where(inside, cuts[1] + index, in_head)
        return total + weighted_nll(*head, in_head, weights)

    def log_probs(self, features: Array) -> Array:
        """``[..., E] -> [..., V]`` log-probabilities, float32."""
        head, *tails = (
            jax.nn.log_softmax(matmul(x, table.T) + bias)
            for x, table, bias in self._groups(features)
        )
        first = self.words.cuts[1]
        parts = [head[..., first + index, None] + tail for index, tail in enumerate(tails)]
        return jnp.concatenate([head[..., :first], *parts], axis=-1)

    def _groups(self, features: Array) -> list[tuple[Array, Array, Array]]:
        """(features, table, bias) of the head, with an entry for each other group, and of those."""
        (x, table), *tails = self.words.groups(features)
        bias, *tail_biases = jnp.split(self.bias[...], self.words.cuts[1:-1])
        if self.group_table is not None and self.group_bias is not None:
            table = jnp.concatenate([table, self.group_table[...].astype(table.dtype)])
            bias = jnp.concatenate([bias, self.group_bias[...]])
        return [(x, table, bias), *((*t, b) for t, b in zip(tails, tail_biases, strict=True))]


lecun = nnx.initializers.lecun_normal()


def new_table(rngs: nnx.Rngs, words: int, features: int, dtype: DTypeLike) -> nnx.Param:
    """A table of word vectors, uniform in (-0.1, 0.1) as is usual for language models."""
    return nnx.Param(jax.random.uniform(rngs.params(), (words, features), dtype, -0.1, 0.1))
