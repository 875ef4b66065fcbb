"""The examples of the README and of the pages for users are run, top to bottom."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def blocks(page):
    text = (ROOT / page).read_text("utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_examples_of_the_readme():
    """Except the one that needs a trained model."""
    layers, cell, *rest = blocks("README.md")
    for block in rest:
        if "jaxrnn.load(" not in block:
            exec(block, {})
    names = {}
    exec(layers, names)
    assert names["y"].shape == (8, 100, 512)
    assert not names["y"][3].any()
    exec(cell, names)
    assert names["layer"](names["jnp"].ones((2, 3, 64)))[0].shape == (2, 3, 256)


@pytest.mark.parametrize("page", ["docs/features.md", "docs/moving.md", "docs/kernels.md"])
def test_the_examples_of_a_page(page):
    names = {}
    for block in blocks(page):
        exec(block, names)
    assert names
