"""Who may import whom. The arrows of the design, read off the sources."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("jaxrnn", "pallas_kernels")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# What a room may import of this house, and which packages from outside the standard library.
# The longest matching name counts. "numpy" is everyone's.
ROOMS = {
    "jaxrnn/cells": ({"jaxrnn._typing", "jaxrnn.cells"}, {"jax"}),
    "jaxrnn/_typing.py": (set(), {"jax"}),
    "jaxrnn/regularization.py": ({"jaxrnn._typing"}, {"jax"}),
    "jaxrnn/recurrence": (
        {
            "jaxrnn._typing",
            "jaxrnn.cells",
            "jaxrnn.precision",
            "jaxrnn.recurrence",
            "jaxrnn.regularization",
        },
        {"jax"},
    ),
    "jaxrnn/recurrence/fused.py": (
        {"jaxrnn._typing", "jaxrnn.cells", "jaxrnn.recurrence", "pallas_kernels"},
        {"jax"},
    ),
    "jaxrnn/recurrence/api.py": (
        {"jaxrnn._typing", "jaxrnn.cells", "jaxrnn.recurrence", "pallas_kernels.varying"},
        {"jax"},
    ),
    "jaxrnn/recurrence/choice.py": (
        {"jaxrnn._typing", "jaxrnn.cells", "jaxrnn.recurrence", "pallas_kernels.targets"},
        {"jax"},
    ),
    "jaxrnn/nnx.py": ({"jaxrnn._typing", "jaxrnn.cells", "jaxrnn.recurrence"}, {"jax", "flax"}),
    "jaxrnn/linen.py": ({"jaxrnn._typing", "jaxrnn.cells", "jaxrnn.recurrence"}, {"jax", "flax"}),
    "jaxrnn/models": (
        {
            "jaxrnn._typing",
            "jaxrnn.cells",
            "jaxrnn.nnx",
            "jaxrnn.models",
            "jaxrnn.precision",
            "jaxrnn.recurrence",
            "jaxrnn.regularization",
        },
        {"jax", "flax"},
    ),
    "jaxrnn/models/softmax.py": (
        {"jaxrnn._typing", "pallas_kernels.varying"},
        {"jax", "flax"},
    ),
    "jaxrnn/precision.py": ({"jaxrnn._typing"}, {"jax"}),
    "jaxrnn/parallel": (
        {
            "jaxrnn._typing",
            "jaxrnn.cells",
            "jaxrnn.parallel",
            "jaxrnn.precision",
            "jaxrnn.recurrence",
        },
        {"jax"},
    ),
    "jaxrnn/convert": (
        {"jaxrnn._typing", "jaxrnn.cells", "jaxrnn.convert"},
        {"jax", "safetensors"},
    ),
    "jaxrnn/data": ({"jaxrnn.data"}, None),
    "pallas_kernels": ({"pallas_kernels"}, {"jax"}),
}

# The one file or room that may import a heavy package.
ONLY_IN = {
    "orbax": ("jaxrnn/train/checkpoint.py",),
    "tensorflow_datasets": ("jaxrnn/data/wikitext.py",),
    "grain": ("jaxrnn/data",),
    "array_record": ("jaxrnn/data",),
    # The two commands run a trained model, so they split and merge it.
    "flax": (
        "jaxrnn/nnx.py",
        "jaxrnn/linen.py",
        "jaxrnn/models",
        "jaxrnn/train",
        "jaxrnn/evaluate.py",
        "jaxrnn/generate.py",
    ),
    "optax": ("jaxrnn/train",),
    "matplotlib": ("jaxrnn/train",),
    "jax.experimental.pallas": ("pallas_kernels/backend.py",),
    "pallas_kernels": (
        "jaxrnn/recurrence/api.py",
        "jaxrnn/recurrence/choice.py",
        "jaxrnn/recurrence/fused.py",
        "jaxrnn/models/softmax.py",
        "pallas_kernels",
    ),
    # The commands stand above the trainer; `jaxrnn.load` is its only way in, and lazy.
    "jaxrnn.train": (
        "jaxrnn/train",
        "jaxrnn/evaluate.py",
        "jaxrnn/generate.py",
        "jaxrnn/__init__.py",
    ),
    "torch": (),
    "tensorflow": (),
    "keras": (),
    "configs": (),
    "scripts": (),
    "tests": (),
}


def within(name, room):
    """Whether a dotted name or a path lies in another."""
    return name == room or name.startswith((f"{room}.", f"{room}/"))


def imports(path):
    """Full names of all that a file imports, inside functions too."""
    here = path.relative_to(ROOT).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(part for part in (origin, node.module) if part)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_may(path):
    name = path.relative_to(ROOT).as_posix()
    wrong = []
    for target, rooms in ONLY_IN.items():
        if not any(within(name, room) for room in rooms):
            wrong += [i for i in imports(path) if within(i, target)]
    rooms = [room for room in ROOMS if within(name, room)]
    if rooms:
        house, outside = ROOMS[max(rooms, key=len)]
        for imported in imports(path):
            if imported.startswith(PACKAGES):
                # `from jaxrnn import cells` is an import of jaxrnn.cells.
                if not any(within(imported, allowed) for allowed in house):
                    wrong.append(imported)
            elif outside is not None:
                top = imported.split(".")[0]
                if top not in outside | {"numpy"} and top not in sys.stdlib_module_names:
                    wrong.append(imported)
    assert not wrong, f"{name} may not import {sorted(wrong)}"


def test_the_files_are_found():
    """Or the test above would pass over nothing."""
    names = {path.relative_to(ROOT).as_posix() for path in FILES}
    assert {"jaxrnn/cells/base.py", "jaxrnn/linen.py", "pallas_kernels/__init__.py"} <= names
    assert "jax.lax" in imports(ROOT / "jaxrnn/recurrence/xla.py")


HEAVY = (
    "optax",
    "orbax",
    "tensorflow_datasets",
    "tensorflow",
    "matplotlib",
    "triton",
    "grain",
    "jax.experimental.pallas",
    "torch",
    "safetensors",
    "ml_collections",
    "absl.flags.argparse_flags",
    "jaxrnn.train",
    "jaxrnn.data",
    "jaxrnn.models",
    "pallas_kernels.backend",
)


def test_importing_the_library_is_light():
    """Flax itself brings some packages along; what it brings is not ours to forbid."""
    program = (
        "import sys, jax, flax.nnx, flax.linen; before = set(sys.modules)\n"
        "import jaxrnn, jaxrnn.linen\n"
        "print('\\n'.join(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert "jaxrnn.linen" in loaded
    assert not [name for name in loaded for heavy in HEAVY if within(name, heavy)]
