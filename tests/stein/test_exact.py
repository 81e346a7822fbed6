"""The exact sum against the float64 double loop of tests/reference.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import yggdrax as yg
from tests import reference
from yggdrax.kernels import IMQ, RBF, Radial
from yggdrax.stein.exact import Exact, exact_phi

P = np.array([[1, 2], [10, 5], [7, 3], [2, -1.0]])


def cloud(n, d=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)), rng.normal(size=(n, d))


@pytest.mark.parametrize(
    ("x", "s", "h", "expected"),
    [
        ([0, 1, 3], [0, -1, -3], 1.0, [-0.42657177, -0.35671525, -0.94377924]),
        ([0, 1, 3], [0, 0, 0], 1.0, [-0.21328588, 0.11195336, 0.10133252]),
        ([0, 1, 3], [0, -1, -3], 0.5**0.5, [-0.36824967, -0.13081686, -0.98143754]),
        ([0, 1, 3], [0, 0, 0], 0.5**0.5, [-0.24549978, 0.22083211, 0.02466767]),
    ],
)
def test_check_values_in_one_dimension(x64, x, s, h, expected):
    x, s = (jnp.array(v, jnp.float64)[:, None] for v in (x, s))
    np.testing.assert_allclose(exact_phi(x, s, h)[:, 0], expected, atol=1e-8)


@pytest.mark.parametrize(
    ("h", "expected"),
    [
        (
            0.70710678,
            [
                [-0.2500454, -0.49992055],
                [-2.50000057, -1.24999943],
                [-1.75000904, -0.75000509],
                [-0.49998865, 0.2499092],
            ],
        ),
        (
            2.7868776,
            [
                [-0.71754315, -0.39429793],
                [-3.21628251, -1.54742693],
                [-2.90389757, -1.3353565],
                [-0.75526803, -0.1284304],
            ],
        ),
    ],
)
def test_check_values_in_two_dimensions(x64, h, expected):
    np.testing.assert_allclose(exact_phi(jnp.asarray(P), jnp.asarray(-P), h), expected, atol=1e-7)


@pytest.mark.parametrize("n", [7, 64, 300, 1001])
def test_equals_the_materialised_form_for_every_block_size(x64, n):
    x, s = cloud(n)
    expected = reference.phi(x, s, 0.7)
    for block_size in (None, 1, 13, 64, 4096):
        value = exact_phi(jnp.asarray(x), jnp.asarray(s), 0.7, block_size=block_size)
        worst = np.abs(value - expected).max() / np.abs(expected).max()
        assert worst < 1e-13, block_size


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("h", [1e-3, 0.05, 0.7, 1e15])
def test_both_kernels_over_all_bandwidths(x64, kernel, h):
    # 3000 particles: several sorted tiles, some of them out of each other's reach.
    x, s = cloud(3000)
    value = jax.jit(exact_phi, static_argnames="kernel")(
        jnp.asarray(x), jnp.asarray(s), h, kernel=kernel
    )
    assert reference.error(value, x, s, h, kernel=kernel, rows=range(0, 3000, 30)) < 1e-13


@pytest.mark.parametrize(("n", "d"), [(4096, 20), (2049, 3), (5000, 30)])
def test_several_tiles_leave_nobody_out(n, d):
    x, s = (np.asarray(v, np.float32) for v in cloud(n, d))
    value = jax.jit(exact_phi)(jnp.asarray(x), jnp.asarray(s), float(d) ** 0.5)
    # float32 rounding, far below the share of one tile.
    assert reference.error(value, x, s, d**0.5, rows=range(0, n, 50)) < 2e-6


def test_a_users_profile_gives_the_same_sum(x64):
    x, s = (jnp.asarray(v) for v in cloud(50))
    own = exact_phi(x, s, 0.5, kernel=Radial(lambda u: (1 + u) ** -0.5))
    np.testing.assert_allclose(own, exact_phi(x, s, 0.5, kernel=IMQ()), rtol=1e-12)


def test_one_particle_gets_its_score():
    value = exact_phi(jnp.array([[3.0, 4.0]]), jnp.array([[1.0, -2.0]]), 0.5)
    np.testing.assert_array_equal(value, [[1.0, -2.0]])


def test_far_from_the_origin_in_float32():
    # From raw dot products the distance would be all noise, and the repulsion 0.
    x = 1e4 + jnp.array([[0.0], [1.0]])
    value = exact_phi(x, jnp.zeros_like(x), 0.5**0.5)
    np.testing.assert_allclose(value[:, 0], [-0.367879, 0.367879], rtol=1e-5)


@pytest.mark.parametrize("n", [1000, 5000])
def test_two_heaps_far_apart_in_float32(n):
    # The product form of the repulsion is 13 % wrong here; 1000 particles make one tile over both.
    x, _ = cloud(n)
    x = (x + np.where(np.arange(n) % 2, 5e5, -5e5)[:, None]).astype(np.float32)
    s = np.ones_like(x)
    value = exact_phi(jnp.asarray(x), jnp.asarray(s), 1.0)
    # float32 rounding of a sum over some 1000 neighbours.
    assert reference.error(value, x, s, 1.0, rows=range(0, n, 25)) < 2e-6


def test_accurate_at_the_fixed_point_in_float32():
    # S = -x on N(0, I): attraction and repulsion cancel to a few per cent of either.
    x = np.asarray(jax.random.normal(jax.random.key(0), (32768, 3)))
    value = np.asarray(jax.jit(exact_phi)(jnp.asarray(x), -jnp.asarray(x), 0.5), np.float64)
    rows = np.random.default_rng(1).choice(len(x), 200, replace=False)
    expected = reference.phi(x, -x, 0.5, rows=rows)
    assert np.linalg.norm(value[rows] - expected) < 1e-5 * np.linalg.norm(expected)


def test_equal_particles_get_bit_equal_updates():
    x = jnp.array([0.0, 0, 0, 0, 1])[:, None]
    value = np.asarray(exact_phi(x, -x, 1e-15))
    np.testing.assert_allclose(value[:, 0], [0, 0, 0, 0, -0.2], atol=1e-12)
    value = np.asarray(exact_phi(x, -x, 0.5))[:4, 0]
    assert np.isfinite(value).all() and len(set(value.tolist())) == 1


def test_underflowing_kernel_leaves_the_score():
    x = jax.random.normal(jax.random.key(0), (512, 1000))
    value = jax.jit(exact_phi)(x, -x, 0.1)
    np.testing.assert_allclose(value, -x / 512, rtol=1e-5)


def test_permuting_the_input_permutes_the_output(x64):
    x, s = cloud(2500)
    order = np.random.default_rng(3).permutation(2500)
    straight = exact_phi(jnp.asarray(x), jnp.asarray(s), 0.2)
    permuted = exact_phi(jnp.asarray(x[order]), jnp.asarray(s[order]), 0.2)
    np.testing.assert_allclose(permuted, straight[order], atol=1e-14)


def test_networks_are_summed_leaf_by_leaf(x64):
    rng = np.random.default_rng(0)
    shapes = {"a": (30, 20, 11), "b": (30,), "c": (30, 0), "d": (30, 300)}
    x = {k: jnp.asarray(rng.normal(size=v)) for k, v in shapes.items()}
    s = {k: jnp.asarray(rng.normal(size=v)) for k, v in shapes.items()}
    flat = [np.concatenate([np.asarray(t[k]).reshape(30, -1) for k in t], 1) for t in (x, s)]
    value = exact_phi(x, s, 20.0)
    joined = np.concatenate([np.asarray(value[k]).reshape(30, -1) for k in shapes], 1)
    np.testing.assert_allclose(joined, reference.phi(*flat, 20.0), atol=1e-13)
    jaxpr = str(jax.make_jaxpr(exact_phi)(x, s, 20.0))
    assert "[30,521]" not in jaxpr, "the leaves were concatenated"


@pytest.mark.parametrize("kernel", [RBF(), IMQ()], ids=["rbf", "imq"])
@pytest.mark.parametrize(("n", "block_size", "h"), [(40, None, 0.7), (90, 32, 0.7), (90, 32, 0.05)])
def test_gradients_agree_with_central_differences(x64, kernel, n, block_size, h):
    rng = np.random.default_rng(1)
    x, s = cloud(n)
    x[:8] = x[0]  # coincident particles
    u = jnp.asarray(rng.normal(size=x.shape))

    @jax.jit
    def loss(x, s, h):
        return jnp.sum(u * exact_phi(x, s, h, block_size=block_size, kernel=kernel))

    at = (jnp.asarray(x), jnp.asarray(s), jnp.asarray(h))
    directions = (rng.normal(size=x.shape), rng.normal(size=x.shape), 1.0)
    gradient = jax.grad(loss, (0, 1, 2))(*at)
    for i, direction in enumerate(directions):
        step = 1e-6 * jnp.asarray(direction)
        plus, minus = (
            loss(*(v + sign * step if j == i else v for j, v in enumerate(at))) for sign in (1, -1)
        )
        derivative = jnp.sum(gradient[i] * direction)
        # Central differences err by step^2 and by rounding / step.
        assert abs((plus - minus) / 2e-6 - derivative) < 1e-6 * max(1, abs(derivative)), i


def test_gradient_on_a_tree_of_leaves(x64):
    rng = np.random.default_rng(0)
    x = {"a": jnp.asarray(rng.normal(size=(6, 300))), "b": jnp.asarray(rng.normal(size=(6, 3)))}
    s = jax.tree.map(lambda v: -v, x)

    def loss(x):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(exact_phi(x, s, 15.0)))

    gradient = jax.grad(loss)(x)
    for name in x:
        step = jnp.zeros_like(x[name]).at[2, 1].set(1e-5)
        difference = (loss({**x, name: x[name] + step}) - loss({**x, name: x[name] - step})) / 2e-5
        np.testing.assert_allclose(gradient[name][2, 1], difference, rtol=1e-6, atol=1e-10)


def test_second_derivatives_by_reverse_over_reverse(x64):
    x, s = (jnp.asarray(v) for v in cloud(6, 2))

    def loss(h):
        return jnp.sum(jnp.square(exact_phi(x, s, h)))

    first = jax.grad(loss)
    second = jax.grad(first)(0.8)
    np.testing.assert_allclose(second, (first(0.8 + 1e-5) - first(0.8 - 1e-5)) / 2e-5, rtol=1e-7)


def test_forward_mode_is_refused():
    x = jnp.ones((3, 2))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda v: exact_phi(v, -v, 1.0), (x,), (x,))


def test_memory_is_bounded_at_a_hundred_thousand_particles():
    x = jax.ShapeDtypeStruct((100_000, 3), jnp.float32)

    def gradient(x, s, h):
        return jax.grad(lambda x: jnp.sum(exact_phi(x, s, h) ** 2))(x)

    for function in (exact_phi, gradient):
        compiled = jax.jit(function).lower(x, x, 0.5).compile()
        # One (1024, 512) tile takes 2 MB; a kernel matrix of all rows would take 40 GB.
        assert compiled.memory_analysis().temp_size_in_bytes < 100e6


def test_vmap_equals_the_loop_and_keeps_one_branch(x64):
    # One member of the batch needs differences, so all use them: another rounding than in the loop.
    x = jax.random.normal(jax.random.key(0), (3, 40, 2))
    h = jnp.array([0.5, 0.01, 5.0])
    batched = jax.vmap(lambda x, h: exact_phi(x, -x, h))
    loop = jnp.stack([exact_phi(a, -a, b) for a, b in zip(x, h, strict=True)])
    np.testing.assert_allclose(batched(x, h), loop, rtol=1e-11, atol=1e-15)
    assert bool((jnp.abs(batched(x, h)).max((1, 2)) > 0).all())
    # A batched predicate would turn the branch between the two forms into a select of both.
    assert " cond[" in str(jax.make_jaxpr(batched)(x, h))


def test_new_values_never_compile_again():
    calls = []

    @jax.jit
    def phi(x, h):
        calls.append(1)
        return exact_phi(x, -x, h)

    for i in range(4):
        phi(jax.random.normal(jax.random.key(i), (60, 2)), 10.0 ** (i - 2))
    assert len(calls) == 1 and phi._cache_size() == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_types_are_summed_in_float32(dtype):
    x = jax.random.normal(jax.random.key(0), (500, 2)).astype(dtype)
    value = exact_phi(x, -x, 0.5)
    wide = exact_phi(x.astype(jnp.float32), -x.astype(jnp.float32), 0.5)
    assert value.dtype == dtype
    np.testing.assert_array_equal(value, wide.astype(dtype))


def test_nan_and_infinity_never_give_finite_wrong_numbers():
    x = np.asarray(jax.random.normal(jax.random.key(0), (3000, 2)))
    for bad in (np.nan, np.inf):
        spoiled = x.copy()
        spoiled[7] = bad
        value = np.asarray(exact_phi(jnp.asarray(spoiled), jnp.asarray(-x), 0.1))
        assert not np.isfinite(value[7]).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((jnp.zeros((0, 2)), jnp.zeros((0, 2)), 1.0), "no particles"),
        ((jnp.zeros((3, 2)), jnp.zeros((3, 1)), 1.0), r"\(3, 1\) against \(3, 2\)"),
        ((jnp.zeros((3, 2)), {"a": jnp.zeros((3, 2))}, 1.0), "different trees"),
        ((jnp.zeros((3, 2)), jnp.zeros((3, 2)), -1.0), "bandwidth must be positive.*-1.0"),
        ((jnp.zeros((3, 2)), jnp.zeros((3, 2)), float("nan")), "bandwidth must be positive.*nan"),
        (({"a": jnp.zeros(3), "b": jnp.zeros(4)},) * 2 + (1.0,), r"\['a'\] has 3, \['b'\] has 4"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        exact_phi(*arguments)


def test_integer_leaves_are_refused_by_name():
    x = {"w": jnp.zeros((3, 2)), "steps": jnp.zeros((3,), jnp.int32)}
    with pytest.raises(TypeError, match=r"\['steps'\] has dtype int32"):
        exact_phi(x, x, 1.0)


@pytest.mark.parametrize("block_size", [0, -3, 2.5, True])
def test_block_size_is_validated(block_size):
    with pytest.raises(ValueError, match="block_size must be a positive integer"):
        Exact(block_size)
    with pytest.raises(ValueError, match="block_size must be a positive integer"):
        yg.exact_phi(jnp.zeros((3, 2)), jnp.zeros((3, 2)), 1.0, block_size=block_size)


def test_unknown_kernels_are_refused():
    x = jnp.zeros((3, 2))
    with pytest.raises(ValueError, match="unknown kernel 'laplace'"):
        exact_phi(x, x, 1.0, kernel="laplace")
    with pytest.raises(TypeError, match="Radial"):
        exact_phi(x, x, 1.0, kernel=jnp.exp)
