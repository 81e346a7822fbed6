"""The engine that chooses: what it chooses, and that no choice costs accuracy."""

import functools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import yggdrax as yg
from tests.reference import error, phi
from yggdrax.kernels import IMQ, RBF, Radial
from yggdrax.status import Status
from yggdrax.stein import auto, nufft
from yggdrax.stein.auto import Auto
from yggdrax.stein.exact import Exact
from yggdrax.stein.fourier import Fourier

pytest.importorskip("jax_finufft")

N, D = 6000, 2
ROWS = np.arange(0, N, 60)


def jaxpr(engine, n, d, dtype=jnp.float32, kernel=RBF()):  # noqa: B008
    x = jax.ShapeDtypeStruct((n, d), dtype)
    tx = yg.svgd(0.5, kernel=kernel, engine=engine)
    return str(jax.make_jaxpr(tx.update)(x, jax.eval_shape(tx.init, x), x))


@pytest.mark.parametrize(
    ("n", "d", "kernel", "engine"),
    [
        (100, 1, RBF(), "auto"),
        (1000, 3, RBF(), "auto"),
        (20_000, 4, RBF(), "auto"),
        (2000, 1000, RBF(), "auto"),
        (20_000, 2, Radial(lambda u: 1 / (1 + u) ** 2), "auto"),
        (20_000, 2, RBF(), Auto(rtol=1e-7)),  # below what float32 transforms reach
    ],
)
def test_where_shape_decides_the_graph_is_that_of_the_exact_engine(n, d, kernel, engine):
    assert jaxpr(engine, n, d, kernel=kernel) == jaxpr("exact", n, d, kernel=kernel)


def test_elsewhere_the_graph_is_another():
    assert jaxpr("auto", 20_000, 2) != jaxpr("exact", 20_000, 2)


@functools.cache
def compiled():
    return jax.jit(lambda x, s, h: Auto().stein(x, s, h, RBF()))


@functools.cache
def exact():
    return jax.jit(lambda x, s, h: Exact().stein(x, s, h, RBF()).phi)


def cloud():
    return np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)


def inputs():
    x = cloud()
    rng = np.random.default_rng(1)
    outlier = x.copy()
    outlier[7] = 1e6
    heaps = x + np.where(rng.random((N, 1)) < 0.5, -5e5, 5e5).astype(np.float32)
    clusters = (3 * rng.standard_normal((20, D))[rng.integers(0, 20, N)] + 0.1 * x).astype("f4")
    lattice = np.stack(np.meshgrid(np.arange(75.0), np.arange(80.0)), -1).reshape(-1, 2)
    return {
        # name: particles, bandwidth, whether the transforms serve
        "normal": (x, 0.4, True),
        "a quarter of the bandwidth": (x, 0.1, True),
        "a huge bandwidth": (x, 1e15, True),
        "a tiny bandwidth": (x, 1e-3, False),
        "an outlier": (outlier, 0.4, False),
        "two heaps": (heaps, 1.0, False),
        "clusters": (clusters, 0.2, True),
        "far from the origin": (x + 1e4, 0.4, True),
        "all equal": (np.ones_like(x), 1.0, True),
        "sixty per cent equal": (np.where(rng.random((N, 1)) < 0.6, 1, x), 0.4, True),
        "a lattice": (lattice.astype(np.float32), 3.0, True),
        "a line": (x * np.array([1, 0], np.float32), 0.3, True),
    }


@pytest.mark.parametrize("name", list(inputs()))
def test_every_input_keeps_the_accuracy_whoever_serves(name):
    x, h, transforms = inputs()[name]
    s = (1 - (x - x.mean(0))).astype(np.float32)
    value, status = compiled()(x, s, jnp.float32(h))
    # No choice is a fault: nothing is flagged.
    assert int(status) == 0
    assert yg.explain(x, h).engine == ("fourier" if transforms else "exact")
    other = exact()(x, s, jnp.float32(h))
    if transforms:
        assert not np.array_equal(value, other)
    else:
        # The same sum in another program: equal to rounding.
        assert np.linalg.norm(value - other) <= 1e-6 * np.linalg.norm(other)
    assert error(value, x, s, float(np.float32(h)), rows=ROWS) < 1e-3
    assert compiled()._cache_size() == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_particle_that_is_not_finite_is_flagged(bad):
    x = cloud()
    x[3, 1] = bad
    value, status = compiled()(x, -x, jnp.float32(0.4))
    assert np.isnan(np.asarray(value)).all() or not np.isfinite(np.asarray(value[3])).any()
    assert int(status) & Status.NONFINITE


def test_a_batch_equals_the_loop_and_runs_one_of_the_candidates():
    x = jnp.stack([cloud(), 2 * cloud() + 1])
    widths = jnp.array([0.4, 1e-3], jnp.float32)
    batched = jax.jit(jax.vmap(lambda x, h: Auto().stein(x, -x, h, RBF()).phi))
    together = batched(x, widths)
    for i in range(2):
        # The same code on the same numbers; the loop's body is compiled apart.
        np.testing.assert_allclose(together[i], compiled()(x[i], -x[i], widths[i]).phi, rtol=1e-5)
    # A batched choice would be a select between two (2, N, d) results, both of them computed.
    graph = batched.trace(x, widths).jaxpr
    assert "while" in str(graph) or "scan" in str(graph)
    assert f"f32[2,{N},{D}] = select_n" not in str(graph)


@pytest.mark.slow  # each sum's own adjoint is tested beside it; this compiles both, twice
def test_the_gradient_is_that_of_what_was_computed(x64):
    x = jnp.asarray(cloud()[:4000], jnp.float64)
    weights = jnp.cos(jnp.arange(4000.0))[:, None] * jnp.array([1.0, -0.5])

    @jax.jit
    def loss(x, h):
        return jnp.sum(weights * Auto(rtol=1e-9).stein(x, -x, h, RBF()).phi)

    step = 1e-5
    # Central differences of a sum that is itself right to 1e-9.
    for h in (0.5, 1e-3):
        slope = jax.grad(loss, argnums=1)(x, jnp.float64(h))
        delta = step * h
        difference = (loss(x, h + delta) - loss(x, h - delta)) / (2 * delta)
        np.testing.assert_allclose(slope, difference, rtol=2e-5, atol=1e-9)


def test_without_the_library_the_exact_sum_serves_and_says_so_once(monkeypatch):
    nufft.missing.cache_clear()
    monkeypatch.setitem(sys.modules, "jax_finufft", None)
    auto._say_what_is_missing.cache_clear()
    with pytest.warns(UserWarning, match=r"yggdrax\[nufft\]"):
        assert Auto().choose(20_000, 2, np.float32, RBF()) == Exact()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Auto().choose(20_000, 2, np.float32, RBF()) == Exact()
        # Nothing is missing where it would not be used.
    auto._say_what_is_missing.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Auto().choose(20_000, 5, np.float32, RBF()) == Exact()
    nufft.missing.cache_clear()


def test_a_library_that_does_not_load_is_as_good_as_missing(monkeypatch, tmp_path):
    (tmp_path / "jax_finufft.py").write_text("raise ImportError('libx.so: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_finufft", raising=False)
    nufft.missing.cache_clear()
    auto._say_what_is_missing.cache_clear()
    with pytest.warns(UserWarning, match=r"cannot be imported \(libx.so"):
        assert Auto().choose(20_000, 2, np.float32, RBF()) == Exact()
    with pytest.raises(ImportError, match=r"libx.so.*yggdrax\[nufft\]"):
        Fourier().stein(jnp.zeros((3, 1)), jnp.zeros((3, 1)), 1.0, RBF())
    nufft.missing.cache_clear()


def test_the_check_values_hold_for_one_and_three_particles():
    assert float(Auto().stein(jnp.ones((1, 2)), jnp.full((1, 2), 3.0), 1.0, RBF()).phi[0, 1]) == 3
    x = jnp.array([[0.0], [1.0], [3.0]])
    value = Auto().stein(x, -x, jnp.float32(1), RBF()).phi
    np.testing.assert_allclose(value, phi(x, -x, 1.0), rtol=1e-6)


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="rtol must lie between"):
        Auto(rtol=0.5)
    with pytest.raises(ValueError, match="check_every"):
        Auto(check_every=-1)


def test_the_explanation_names_engine_reason_and_numbers():
    text = str(yg.explain(cloud()))
    assert "fourier with" in text
    assert "times cheaper than the exact sum" in text
    assert "N = 6000, d = 2" in text
    assert "four" not in str(yg.explain(cloud(), engine="exact"))
    assert "asked for by name" in str(yg.explain(cloud(), engine="exact"))
    assert yg.explain(cloud(), 1e-3).reason.startswith("the extent asks for more than")
    # Two heaps of a quarter of a thousand bandwidths, in one dimension: modes enough, few pairs.
    assert yg.explain({"w": np.zeros((5, 300)), "b": np.zeros((5, 2))}, 1.0).engine == "exact"
    with pytest.raises(ValueError, match="unknown bandwidth"):
        yg.explain(cloud(), "mean")
    bad = cloud()
    bad[0] = np.nan
    assert yg.explain(bad, 1.0).engine == "none"


def test_few_pairs_within_reach_make_the_exact_sum_cheaper():
    # 400 far-apart heaps: at 0.25 % of the pairs the tiles that are passed over count.
    rng = np.random.default_rng(2)
    x = (rng.integers(0, 20, (N, D)) * 40 + rng.standard_normal((N, D))).astype(np.float32)
    engine = Auto().choose(N, D, np.dtype("float32"), IMQ())
    assert engine.reaches(D, np.dtype("float32"), IMQ())[-1] > 0
    seen = yg.explain(x, 1.0)
    assert seen.engine == "exact"
    value, status = compiled()(x, -x, jnp.float32(1))
    assert int(status) == 0
    assert error(value, x, -x, 1.0, rows=ROWS) < 1e-3
