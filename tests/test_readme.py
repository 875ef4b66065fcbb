"""The examples of the README are run, except the one that needs a trained model."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    layers, cell, _, kernels = blocks
    exec(kernels, {})
    names = {}
    exec(layers, names)
    assert names["y"].shape == (8, 100, 512)
    assert not names["y"][3].any()
    exec(cell, names)
    assert names["layer"](names["jnp"].ones((2, 3, 64)))[0].shape == (2, 3, 256)
