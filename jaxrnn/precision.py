"""Mixed precision: which dtype is used where, and the scale of a float16 loss.

The state of a recurrence, all sums and the optimizer's state are float32 under every policy.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike


class Policy(NamedTuple):
    """Dtypes of a model.

    Attributes:
        param: of the parameters.
        compute: of the matmuls and the activations.
        output: of what the model hands to its loss.
    """

    param: DTypeLike = jnp.float32
    compute: DTypeLike = jnp.float32
    output: DTypeLike = jnp.float32

    def __str__(self) -> str:
        """``param=float32,compute=bfloat16,output=bfloat16``, which `policy` reads."""
        return ",".join(f"{part}={jnp.dtype(dtype).name}" for part, dtype in self._asdict().items())

    @property
    def needs_loss_scale(self) -> bool:
        """Whether small gradients would be lost: float16 has five bits of exponent."""
        return any(jnp.dtype(dtype) == jnp.float16 for dtype in self)


FLOAT32 = Policy()
DTYPES = ("float32", "bfloat16", "float16")


def policy(text: str) -> Policy:
    """Returns the policy that a text describes.

    Args:
        text: "float32", "bfloat16" or "float16", which is of the arithmetic and the output with
            float32 parameters; or parts, as in "compute=bfloat16,output=float32", where parts
            that are not named are float32.

    Raises:
        ValueError: it is neither.
    """
    if text in DTYPES:
        return Policy(compute=jnp.dtype(text), output=jnp.dtype(text))
    parts = {}
    for part in text.split(","):
        name, _, dtype = (word.strip() for word in part.partition("="))
        if name not in Policy._fields or name in parts or dtype not in DTYPES:
            raise ValueError(
                f"a policy should be one of {', '.join(DTYPES)}, or parts like "
                f"param=float32,compute=bfloat16,output=float32, got {text!r}"
            )
        parts[name] = jnp.dtype(dtype)
    return Policy(**parts)


class LossScale(NamedTuple):
    """The factor of a loss whose gradients would vanish in float16, found while training.

    After `GROWTH_INTERVAL` finite steps it doubles; a step with a gradient that is not finite
    halves it and is skipped (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). It stays
    between 1 and `LARGEST`.

    Attributes:
        scale: float32 [].
        finite_steps: int32 [], since it changed last.
        skipped: int32 [], steps skipped so far.
    """

    scale: Array
    finite_steps: Array
    skipped: Array

    @classmethod
    def initial(cls, scale: float) -> "LossScale":
        """Returns that of a new run."""
        return cls(jnp.float32(scale), jnp.int32(0), jnp.int32(0))

    def after(self, finite: Array) -> "LossScale":
        """Returns that of the next step.

        Args:
            finite: bool [], whether all gradients of this step were finite.
        """
        grows = finite & (self.finite_steps + 1 >= GROWTH_INTERVAL)
        factor = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5)
        return LossScale(
            scale=jnp.clip(self.scale * factor, 1.0, LARGEST),
            finite_steps=jnp.where(finite & ~grows, self.finite_steps + 1, 0),
            skipped=self.skipped + jnp.where(finite, 0, 1),
        )


GROWTH_INTERVAL = 2000
LARGEST = 2.0**24


def all_finite(tree: Any) -> Array:
    """Whether every value of every leaf is finite, bool []."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def keep_if(condition: Array, new: Any, old: Any) -> Any:
    """``new`` where the condition, bool [], holds, else ``old``, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def in_float32(tree: Any) -> Any:
    """A tree in float32 (float64 stays), in which sums are taken."""
    return jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), tree)
