"""Promises about the package as a whole."""

import ast
import doctest
import importlib
import importlib.metadata
import json
import pathlib
import pkgutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import yggdrax

ROOT = pathlib.Path(yggdrax.__file__).parent
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(ROOT)], "yggdrax.")
    if not module.name.endswith("__main__")
)

# part -> the parts it may import (its own is always allowed).
ALLOWED = {
    "typing": set(),
    "status": {"typing"},
    "geometry": {"typing", "status"},
    "sharding": {"typing"},
    "processes": {"typing"},
    "kernels": {"sharding", "typing", "status"},
    "stein": {"sharding", "geometry", "kernels", "typing", "status"},
    "transform": {"sharding", "stein", "kernels", "geometry", "typing", "status"},
    "targets": {"typing", "status"},
    "data": {"typing", "status"},
    "particles": {"sharding", "targets", "typing", "status"},
    "diagnostics": {"stein", "kernels", "typing", "status"},
    "checkpoint": {"processes", "typing", "status"},
    "export": {"typing", "status"},
    "plots": {"typing", "status"},
    "unroll": {"transform", "particles", "diagnostics", "stein", "kernels", "typing", "status"},
}
LIBRARIES = {
    "optax": {"transform", "unroll", "experiment"},
    "flax": {"targets", "particles", "experiment"},
    "orbax": {"checkpoint"},
    "matplotlib": {"plots"},
}


def imports(path: pathlib.Path) -> set[str]:
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []  # read by type checkers alone
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            if node.module == "yggdrax":
                found |= {f"yggdrax.{alias.name}" for alias in node.names}
    return found


def part(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_imports_run_one_way():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        here = part(path)
        for name in imports(path):
            steps = name.split(".")
            if steps[0] == "yggdrax" and here in ALLOWED and len(steps) > 1:
                if steps[1] != here and steps[1] not in ALLOWED[here]:
                    wrong.append(f"{here} imports {name}")
            elif steps[0] in LIBRARIES and here not in LIBRARIES[steps[0]]:
                wrong.append(f"{here} imports {name}")
    assert not wrong


def test_every_part_has_a_place_in_the_order():
    parts = {part(path) for path in ROOT.rglob("*.py")}
    assert parts - {"__init__", "__main__", "experiment"} == set(ALLOWED)


def test_importing_changes_no_global_state():
    code = """
import json, os, sys
before = dict(os.environ)
import jax
config = {k: str(v) for k, v in jax.config.values.items()}
import yggdrax
optional = {"optax", "flax", "orbax", "matplotlib", "jax_finufft", "sklearn", "absl", "tqdm"}
loaded = sorted(optional & set(sys.modules) - {"flax"})
for name in yggdrax.__all__:
    getattr(yggdrax, name)
after = {k: str(v) for k, v in jax.config.values.items()}
extras = {"matplotlib", "jax_finufft", "sklearn", "ml_collections", "tqdm", "arviz"}
print(json.dumps({
    "environment": before == dict(os.environ),
    "config": sorted(k for k in after if after[k] != config.get(k, after[k])),
    "eager": loaded,
    "extras": sorted(extras & set(sys.modules)),
}))
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(output) == {"environment": True, "config": [], "eager": [], "extras": []}


def test_all_public_names_exist_and_have_docstrings():
    for name in yggdrax.__all__:
        assert getattr(yggdrax, name).__doc__, name
    assert set(yggdrax.__all__) <= set(dir(yggdrax))
    with pytest.raises(AttributeError, match="no attribute 'svdg'"):
        yggdrax.svdg  # noqa: B018


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    result = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0


def test_a_reduced_matrix_product_is_right_above_16384_rows():
    # jaxlib 0.10.2 computes this wrongly on CPUs, which is why pyproject.toml excludes it.
    # tests/test_optimised.py repeats this as users compile it.
    x = np.random.default_rng(0).normal(size=(20_000, 8)).astype(np.float32)
    m = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
    value = jax.jit(jax.vmap(lambda row: jnp.sum((m @ row) ** 2)))(x)
    np.testing.assert_allclose(value, ((x @ m.T) ** 2).sum(1), rtol=1e-4)


def test_benchmark_names_hide_no_installed_module():
    # A script's folder comes first on sys.path: a file named like a dependency would hide it.
    taken = {*importlib.metadata.packages_distributions(), *sys.stdlib_module_names}
    names = {path.stem for path in (ROOT.parent / "examples" / "benchmarks").glob("*.py")}
    assert names
    assert not names & taken
