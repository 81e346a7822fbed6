"""Fixtures shared by all tests."""

import atexit
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

import jax
import pytest


@pytest.fixture
def x64():
    """Runs one test with 64-bit types; the global setting is restored afterwards."""
    with jax.enable_x64(True):
        yield
