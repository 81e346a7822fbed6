"""A NumPyro model as a target: its potential energy comes in, its parameters go out.

    python -m pip install 'yggdrax[benchmarks]'
    python examples/07_numpyro_model.py

NumPyro maps constrained parameters to unconstrained ones and accounts for the Jacobian; particles
are the unconstrained dictionary. A plain function becomes a target in the same way:
``yg.LogDensity(function, init)``, see 03_own_target.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import yggdrax as yg

try:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import initialize_model
except ImportError as error:
    raise ImportError(
        "this example needs NumPyro: python -m pip install 'yggdrax[benchmarks]'"
    ) from error


def model(x, y=None):
    """A line with unknown noise: the scale is positive, so it is sampled as its logarithm."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 10.0))
    offset = numpyro.sample("offset", dist.Normal(0.0, 10.0))
    scale = numpyro.sample("scale", dist.HalfNormal(5.0))
    numpyro.sample("y", dist.Normal(offset + slope * x, scale), obs=y)


def main() -> None:
    """Samples the posterior by SVGD and prints it in the model's own parameters."""
    random = np.random.RandomState(0)
    x = jnp.linspace(-1.0, 1.0, 100)
    y = 2.0 - 3.0 * x + 0.5 * jnp.asarray(random.randn(100), jnp.float32)

    info = initialize_model(jax.random.key(0), model, model_args=(x, y))
    # The potential is -log p of the unconstrained parameters, log-Jacobian included. Particles
    # start around zero: a scale near 1 instead of one so small that the first gradients are huge.
    origin = jax.tree.map(jnp.zeros_like, info.param_info.z)
    target = yg.LogDensity(lambda z: -info.potential_fn(z), init=origin)

    optimizer = optax.chain(yg.svgd("median"), optax.adam(optax.cosine_decay_schedule(0.1, 2000)))
    run = yg.sample(target, jax.random.key(1), 100, 2000, optimizer=optimizer)
    yg.check(run.opt_state)
    posterior = jax.vmap(info.postprocess_fn)(run.particles)
    for name in ("offset", "slope", "scale"):
        print(f"{name:6s} {posterior[name].mean():7.3f} +- {posterior[name].std():.3f}")


if __name__ == "__main__":
    main()
