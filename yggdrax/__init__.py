"""Particle inference for JAX: Stein variational gradient descent as an Optax transformation.

.. code-block:: python

    import optax, yggdrax as yg

    target = yg.Banana()
    particles = yg.init_particles(jax.random.key(0), target, 200)
    tx = optax.chain(yg.svgd("median"), optax.adam(0.1))
    opt_state = tx.init(particles)
    grads = yg.particle_grads(target, particles)
    updates, opt_state = tx.update(grads, opt_state, particles)
    particles = optax.apply_updates(particles, updates)

Names are loaded when they are first touched; importing the package changes no global state.
"""

import importlib

__version__ = "0.1.0"

# The whole public API: name -> module that defines it.
_EXPORTS = {
    # kernels and bandwidths
    "RBF": "kernels",
    "IMQ": "kernels",
    "Radial": "kernels",
    "MedianRule": "kernels",
    "BandwidthRule": "kernels",
    # the sum over all pairs
    "exact_phi": "stein.exact",
    "Exact": "stein.exact",
    "Fourier": "stein.fourier",
    "Tree": "stein.tree",
    "build_svgd_topology": "stein.phi",
    "svgd_phi_from_topology": "stein.phi",
    "svgd_phi": "stein.phi",
    "Auto": "stein.auto",
    "explain": "stein.explain",
    # the transformation
    "svgd": "transform",
    "SvgdState": "transform",
    "RunningScale": "stein.metric",
    "get_state": "transform",
    "check": "transform",
    "Status": "status",
    "StatusError": "status",
    # targets and particles
    "Target": "targets",
    "Gaussian": "targets",
    "Mixture": "targets",
    "Banana": "targets",
    "Funnel": "targets",
    "LogisticRegression": "targets",
    "BayesianNetwork": "targets",
    "LogDensity": "targets",
    "LinenNetwork": "targets",
    "Whitened": "targets",
    "predict": "targets",
    "init_particles": "particles",
    "init_model_state": "particles",
    "particle_grads": "particles",
    "shard_particles": "sharding",
    # whole runs
    "sample": "unroll",
    "unrolled": "unroll",
    # judging and keeping
    "ksd_squared": "diagnostics",
    "mmd_squared": "diagnostics",
    "save_npz": "export",
    "load_npz": "export",
    "to_arviz": "export",
    "Checkpointer": "checkpoint",
}

__all__ = sorted(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    """Loads the module of a public name when it is first touched."""
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"yggdrax.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'yggdrax' has no attribute {name!r}")


def __dir__():
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
