"""Fixtures shared by all tests."""

import atexit
import gc
import os
import shutil
import tempfile

# Most of what the tests spend is compilation, much of it of the same graphs: the processes of one
# run, those that tests start among them, share what they have compiled. The folder goes with the
# run, so that nothing stale is ever loaded. Set before jax is imported, which reads it then.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.mkdtemp(prefix="yggdrax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)

# Most of a compilation is the optimisation of its code, which the short runs of the tests do not
# earn back. tests/test_optimised.py repeats the tests of accuracy as a user's program is compiled.
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    )

import jax
import pytest

# The caches of a long run are millions of objects, which no collection will free.
gc.set_threshold(50_000, 20, 50)


# What takes long for one test, or for the fixture of one file, comes first: in the end the
# processes of a run share short tests, and none waits for the other or makes such a fixture again.
LONG = ("test_optimised", "test_eight", "test_processes", "test_notebooks", "test_kill")


def pytest_collection_modifyitems(items):
    """Long files first; otherwise the order stays."""
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.fixture
def x64():
    """Runs one test with 64-bit types; the global setting is restored afterwards."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def optimised():
    """For a test that runs longer than it compiles: left to ``tests/test_optimised.py``."""
    if "optimization_level=0" in os.environ["XLA_FLAGS"]:
        pytest.skip("runs in tests/test_optimised.py, compiled as users compile it")
