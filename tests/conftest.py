"""Fixtures shared by all tests."""

import jax
import pytest


@pytest.fixture
def x64():
    """Runs one test with 64-bit types; the global setting is restored afterwards."""
    with jax.enable_x64(True):
        yield
