"""Bayesian networks, likelihoods, priors and prediction against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st
from flax import linen, nnx

from yggdrax import targets
from yggdrax.particles import init_model_state, init_particles, particle_grads
from yggdrax.targets import BayesianNetwork, LinenNetwork, likelihoods, predict, priors

RANDOM = np.random.RandomState(0)
X = jnp.asarray(RANDOM.randn(5, 3), jnp.float32)


class MLP(nnx.Module):
    def __init__(self, outputs=1, *, rngs):
        self.hidden = nnx.Linear(3, 7, rngs=rngs)
        self.output = nnx.Linear(7, outputs, rngs=rngs)

    def __call__(self, x):
        return self.output(nnx.relu(self.hidden(x)))


class LinenMLP(linen.Module):
    norm: bool = False

    @linen.compact
    def __call__(self, x, train: bool = False):
        x = linen.Dense(7, name="hidden")(x)
        if self.norm:
            x = linen.BatchNorm(use_running_average=not train, name="norm")(x)
        return linen.Dense(1, name="output")(linen.relu(x))


def test_linen_and_nnx_give_the_same_density_and_gradient():
    nnx_target = BayesianNetwork(MLP, num_data=50)
    linen_target = BayesianNetwork(LinenNetwork(LinenMLP(), X[:1]), num_data=50)
    particles = init_particles(jax.random.key(0), nnx_target, 3)
    batch = (X, jnp.arange(5.0))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4),
        jax.jit(particle_grads, static_argnums=0)(nnx_target, particles, batch),
        jax.jit(particle_grads, static_argnums=0)(linen_target, particles, batch),
    )
    drawn = init_particles(jax.random.key(0), linen_target, 3)
    assert jax.tree.structure(drawn) == jax.tree.structure(particles)


def test_linen_batch_statistics_are_carried():
    target = BayesianNetwork(LinenNetwork(LinenMLP(norm=True), X[:1]), num_data=5)
    particles = init_particles(jax.random.key(0), target, 2)
    state = init_model_state(jax.random.key(0), target, 2)
    step = jax.jit(lambda p, s: particle_grads(target, p, (X, jnp.arange(5.0)), model_state=s))
    _, new = step(particles, state)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), state, new)
    assert jax.tree.all(moved) and set(new) == {"batch_stats"}
    assert predict(target, particles, X, model_state=new).members.shape == (2, 5, 1)
    with pytest.raises(ValueError, match="model_state that init_model_state or the last step"):
        predict(target, particles, X)


class NoisyLinen(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        x = linen.Dropout(0.5, deterministic=not train)(linen.Dense(1)(x))
        return x + jax.random.normal(self.make_rng("noise"), x.shape) if train else x


def test_linen_noise_of_any_stream_has_a_key_for_each_member():
    target = BayesianNetwork(LinenNetwork(NoisyLinen(), X[:1]), num_data=5)
    one = init_particles(jax.random.key(0), target, 1)
    twins = jax.tree.map(lambda v: jnp.repeat(v, 2, axis=0), one)
    batch = (X, jnp.arange(5.0))
    slopes = particle_grads(target, twins, batch, key=jax.random.key(1))["params"]["Dense_0"][
        "bias"
    ]
    assert slopes[0] != slopes[1]
    with pytest.raises(ValueError, match=r"draws random numbers .*: pass key="):
        particle_grads(target, twins, batch)
    with pytest.raises(ValueError, match="do not fit these inputs") as caught:
        particle_grads(target, twins, (X[:, :1], jnp.arange(5.0)), key=jax.random.key(1))
    assert "inputs x of shape (5, 1)" in "".join(caught.value.__notes__)
    assert predict(target, twins, X).members.shape == (2, 5, 1)


def test_linen_without_its_statistics_is_refused_with_the_remedy():
    target = BayesianNetwork(LinenNetwork(LinenMLP(norm=True), X[:1]), num_data=5)
    particle = target.init(jax.random.key(0))
    with pytest.raises(ValueError, match="pass the model_state"):
        target.apply(particle, {}, (X, jnp.arange(5.0)))


def test_a_network_with_several_outputs_is_refused():
    class Two(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(X.shape[1], 1, rngs=rngs)

        def __call__(self, x):
            return self.linear(x), x

    target = BayesianNetwork(Two, num_data=5)
    with pytest.raises(TypeError, match=r"must return one array, .* not tuple"):
        target(target.init(jax.random.key(0)), (X, jnp.arange(5.0)))


def test_a_built_module_serves_as_template_and_members_come_from_the_prior():
    module = MLP(rngs=nnx.Rngs(0))
    before = np.asarray(module.hidden.kernel[...])
    target = BayesianNetwork(module, prior=priors.GaussianPrior(scale=2.0), num_data=5)
    particles = init_particles(jax.random.key(0), target, 400)
    kernel = np.asarray(particles["params"]["hidden"]["kernel"])
    # 8400 draws with standard deviation 2 / sqrt(3), known to 0.8 %.
    assert kernel.std() == pytest.approx(2 / np.sqrt(3), rel=0.04)
    jax.jit(lambda p: particle_grads(target, p, (X, jnp.arange(5.0))))(particles)
    np.testing.assert_array_equal(before, module.hidden.kernel[...])


def test_an_unknown_collection_is_refused_by_name_or_carried():
    class Counter(nnx.Variable):
        pass

    class Counting(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(3, 1, rngs=rngs)
            self.seen = Counter(jnp.zeros(()))

        def __call__(self, x):
            self.seen[...] = self.seen[...] + x.shape[0]
            return self.linear(x)

    with pytest.raises(ValueError, match=r"collection Counter.*mutable=\(Counter,\)"):
        BayesianNetwork(Counting, num_data=5)
    target = BayesianNetwork(Counting, num_data=5, mutable=(Counter,))
    particles = init_particles(jax.random.key(0), target, 2)
    state = init_model_state(jax.random.key(0), target, 2)
    step = jax.jit(lambda p, s: particle_grads(target, p, (X, jnp.arange(5.0)), model_state=s))
    _, new = step(particles, state)
    assert new["seen"].tolist() == [5.0, 5.0]


def test_linen_refuses_an_unknown_collection_and_a_bare_module():
    class Odd(linen.Module):
        @linen.compact
        def __call__(self, x):
            self.variable("memory", "last", jnp.zeros, ())
            return linen.Dense(1)(x)

    with pytest.raises(ValueError, match="collection memory"):
        LinenNetwork(Odd(), X[:1])
    with pytest.raises(TypeError, match=r"LinenNetwork\(module, example_input\)"):
        BayesianNetwork(LinenMLP())


def _member_density(particle, x, y):
    """Gaussian posterior of the MLP, by SciPy in float64."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), particle["params"])
    hidden = np.maximum(np.asarray(x) @ params["hidden"]["kernel"] + params["hidden"]["bias"], 0)
    outputs = (hidden @ params["output"]["kernel"] + params["output"]["bias"])[:, 0]
    log_precision = float(particle["log_noise_precision"])
    prior = 0.0
    for layer, fan_in in (("hidden", 3), ("output", 7)):
        prior += st.norm(0, fan_in**-0.5).logpdf(params[layer]["kernel"]).sum()
        prior += st.norm(0, 1).logpdf(params[layer]["bias"]).sum()
    prior += st.gamma(1, scale=10).logpdf(np.exp(log_precision)) + log_precision
    return prior, st.norm(outputs, np.exp(-0.5 * log_precision)).logpdf(y).sum()


def test_the_log_posterior_term_by_term():
    target = BayesianNetwork(MLP, num_data=50)
    particle = target.init(jax.random.key(3))
    y = np.arange(5.0)
    prior, likelihood = _member_density(particle, X, y)
    value = float(jax.jit(target)(particle, (X, jnp.asarray(y, jnp.float32))))
    assert value == pytest.approx(prior + 10 * likelihood, rel=1e-5)


def test_data_kept_in_the_target_serve_when_no_batch_is_given():
    y = jnp.arange(5.0)
    kept = BayesianNetwork(MLP, data=(X, y))
    given = BayesianNetwork(MLP, num_data=5)
    particle = kept.init(jax.random.key(0))
    assert float(kept(particle)) == float(given(particle, (X, y)))
    with pytest.raises(ValueError, match="no batch was given"):
        given(particle)


RATE = np.array([[0.3], [-1.0], [2.0]])
LIKELIHOODS = {
    "gaussian": (
        likelihoods.GaussianNoise(),
        {"log_noise_precision": 0.7},
        RATE,
        [0.5, -1.0, 1.0],
        lambda o, y: st.norm(o[:, 0], np.exp(-0.35)).logpdf(y),
    ),
    "known precision": (
        likelihoods.GaussianNoise(precision=4.0),
        {},
        RATE,
        [0.5, -1.0, 1.0],
        lambda o, y: st.norm(o[:, 0], 0.5).logpdf(y),
    ),
    "heteroscedastic": (
        likelihoods.HeteroscedasticGaussian(),
        {},
        np.array([[0.3, -1.0], [1.0, 0.5], [0.0, 2.0]]),
        [0.5, -1.0, 1.0],
        lambda o, y: st.norm(o[:, 0], np.exp(o[:, 1] / 2)).logpdf(y),
    ),
    "bernoulli": (
        likelihoods.Bernoulli(),
        {},
        RATE,
        [1, 0, 1],
        lambda o, y: st.bernoulli(1 / (1 + np.exp(-o[:, 0]))).logpmf(y),
    ),
    "categorical": (
        likelihoods.Categorical(3),
        {},
        np.array([[0.0, 1.0, 2.0], [1.0, 0.0, -1.0], [0.0, 0.0, 0.0]]),
        [2, 1, 0],
        lambda o, y: (o - np.log(np.exp(o).sum(1, keepdims=True)))[np.arange(3), y],
    ),
    "poisson": (
        likelihoods.Poisson(),
        {},
        RATE,
        [0, 1, 9],
        lambda o, y: st.poisson(np.exp(o[:, 0])).logpmf(y),
    ),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods_against_scipy(name):
    likelihood, extra, outputs, y, reference = LIKELIHOODS[name]
    extra = {key: jnp.asarray(value, jnp.float32) for key, value in extra.items()}
    y = np.asarray(y)
    likelihood.check(outputs.shape, y.shape)
    likelihood.validate_labels(y)
    value = likelihood.log_prob(extra, jnp.asarray(outputs, jnp.float32), jnp.asarray(y))
    np.testing.assert_allclose(value, reference(outputs, y), rtol=2e-5)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "words"),
    [
        (likelihoods.GaussianNoise(), (5, 2), (5,), r"\(5,\) or \(5, 1\), not \(5, 2\)"),
        (likelihoods.GaussianNoise(), (5, 1), (5, 2), r"not \(5, 1\)"),
        (likelihoods.HeteroscedasticGaussian(), (5, 1), (5,), r"must return \(5, 2\)"),
        (likelihoods.Bernoulli(), (5, 2), (5,), r"not \(5, 2\)"),
        (likelihoods.Categorical(3), (5, 1), (5,), r"\(5, 3\), not \(5, 1\)"),
        (likelihoods.Poisson(), (5, 4), (5,), r"not \(5, 4\)"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(likelihood, outputs, y, words):
    with pytest.raises(ValueError, match=words):
        likelihood.check(outputs, y)


@pytest.mark.parametrize(
    ("likelihood", "y", "words"),
    [
        (likelihoods.GaussianNoise(), [0.0, np.nan], "finite"),
        (likelihoods.Bernoulli(), [0, 2], "labels must be 0 or 1; found values from 0 to 2"),
        (likelihoods.Categorical(3), [0, 3], "from 0 to 2; found values from 0 to 3"),
        (likelihoods.Categorical(3), [0.0, 1.0], "of type float64"),
        (likelihoods.Poisson(), [0.5], "counts must be 0, 1, 2"),
    ],
)
def test_labels_outside_their_range_are_refused(likelihood, y, words):
    with pytest.raises(ValueError, match=words):
        likelihood.validate_labels(np.asarray(y))


def test_network_whose_output_does_not_fit_is_refused_when_called():
    target = BayesianNetwork(lambda rngs: MLP(2, rngs=rngs), num_data=5)
    particle = target.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"not \(5, 2\)"):
        target(particle, (X, jnp.arange(5.0)))
    with pytest.raises(ValueError, match="same rows"):
        target(particle, (X, jnp.arange(4.0)))
    with pytest.raises(ValueError, match="0 rows"):
        target(particle, (X[:0], jnp.zeros((0, 2))))


def test_student_t_prior_is_the_integral_over_the_precision():
    weights = {"w": jnp.array([0.3, -0.8, 1.1])}
    prior = priors.StudentTPrior(concentration=1.5, rate=0.7)
    precision = np.exp(np.linspace(-25, 8, 200_001))
    square = float(jnp.sum(weights["w"] ** 2))
    joint = (precision / (2 * np.pi)) ** 1.5 * np.exp(-0.5 * precision * square)
    joint *= st.gamma(1.5, scale=1 / 0.7).pdf(precision) * precision
    integral = np.trapezoid(joint, np.log(precision))
    assert float(prior.log_prob(weights)) == pytest.approx(np.log(integral), rel=1e-5)
    assert np.isfinite(float(prior.log_prob({"w": jnp.zeros(3)})))


def test_centred_prior_warns_of_its_spike_and_bounds_remove_it():
    params = {"w": jnp.zeros(100)}
    with pytest.warns(targets.SpikeWarning, match="has a spike at zero weights"):
        spiked = priors.CentredGaussianPrior()
    heights = [float(spiked.log_prob(params, {"log_prior_precision": v})) for v in (0.0, 2.0, 3.0)]
    assert heights[2] > heights[1] + 30 > heights[0] + 60
    bounded = priors.CentredGaussianPrior(bounds=(0.01, 100.0))
    far = [bounded.log_prob(params, {"log_prior_precision": jnp.array(v)}) for v in (30.0, 60.0)]
    assert float(far[1]) < float(far[0])


def test_bounded_precision_carries_its_log_jacobian():
    prior = priors.CentredGaussianPrior(concentration=2.0, rate=0.5, bounds=(0.2, 5.0))
    leaf = jnp.linspace(-25, 25, 4001)
    one_weight = jnp.array(0.4)
    joint = jax.vmap(lambda v: prior.log_prob(one_weight, {"log_prior_precision": v}))(leaf)
    total = np.trapezoid(np.exp(joint), leaf)
    precision = np.linspace(0.2, 5.0, 20_001)
    expected = st.norm(0, precision**-0.5).pdf(0.4) * st.gamma(2, scale=2).pdf(precision)
    assert total == pytest.approx(np.trapezoid(expected, precision), rel=1e-4)


def test_priors_composed_by_leaf():
    params = {"hidden": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}, "other": jnp.ones(1)}

    class Laplace:
        """Stands for a distribution of another library."""

        def log_prob(self, value):
            return -jnp.abs(value) - jnp.log(2.0)

    prior = priors.LeafPriors({"hidden": Laplace(), "hidden/bias": priors.GaussianPrior()})
    normal = st.norm.logpdf(1.0)
    assert float(prior.log_prob(params)) == pytest.approx(8 * (-1 - np.log(2)) + 3 * normal, 1e-5)
    with pytest.raises(ValueError, match=r"\['hiden'\]"):
        priors.LeafPriors({"hiden": Laplace()}).log_prob(params)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: likelihoods.GaussianNoise(rate=-1.0), "rate must be positive, not -1.0"),
        (lambda: likelihoods.Categorical(1), "at least 2, not 1"),
        (lambda: priors.GaussianPrior(scale=0.0), "scale must be positive, not 0.0"),
        (lambda: priors.StudentTPrior(rate=0.0), "must be positive"),
        (lambda: priors.CentredGaussianPrior(bounds=(2.0, 1.0)), "two rising positive numbers"),
        (lambda: BayesianNetwork(MLP, data=(X, jnp.zeros(4))), "same rows"),
        (lambda: BayesianNetwork(MLP, data=(X, jnp.zeros(5)), num_data=7), "data has 5 rows"),
    ],
)
def test_bad_arguments_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
