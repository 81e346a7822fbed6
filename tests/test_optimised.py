"""Tests of accuracy, and some long runs, compiled with what most tests leave out."""

import os
import pathlib
import subprocess
import sys

TESTS = (
    "test_structure.py::test_a_reduced_matrix_product_is_right_above_16384_rows",
    "stein/test_exact.py::test_accurate_at_the_fixed_point_in_float32",
    "stein/test_exact.py::test_two_heaps_far_apart_in_float32",
    "stein/test_exact.py::test_equals_the_materialised_form_for_every_block_size[300]",
    "stein/test_fourier.py::test_the_error_stays_below_rtol_whatever_the_shape_and_the_bandwidth",
    "stein/test_tree_acceptance.py::test_the_measured_error_is_below_rtol_and_falls_with_it[imq-3]",
    "test_transform.py::test_a_mixture_is_found_from_far_away",
    "test_transform.py::test_a_skewed_target_tells_the_sign_of_the_score",
)


def test_what_users_compile_is_as_accurate():
    here = pathlib.Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(here / test) for test in TESTS)],
        cwd=here.parent,
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
