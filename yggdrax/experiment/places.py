"""Where the arrays of a run are: on one device, or split over a mesh of all of them."""

import contextlib
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from yggdrax.experiment.config import ConfigError, ExperimentConfig
from yggdrax.experiment.problem import RunState
from yggdrax.typing import PyTree

__all__ = ["Places"]

_AXIS = "particles"


class Places:
    """Puts a run's state and data on the devices that its configuration asks for.

    The particles, their model states and what the optimizer keeps for each of them are split over
    the devices of all processes; everything else is on every device.

    Raises:
      ConfigError: for several processes without a mesh, or particles that do not divide.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        """Builds the mesh."""
        self.mesh: Mesh | None = None
        self._size = config.num_particles
        if config.mesh == "none":
            if jax.process_count() > 1:
                raise ConfigError("several processes need a mesh: set mesh to 'automatic'")
            return
        devices = jax.device_count()
        if config.num_particles % devices:
            raise ConfigError(
                f"num_particles must be a multiple of the {devices} devices of the mesh, not "
                f"{config.num_particles!r}"
            )
        self.mesh = jax.make_mesh((devices,), (_AXIS,), axis_types=(AxisType.Auto,))

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """What a run is inside of, so that new arrays are on the mesh."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def initial(self, make, key) -> RunState:
        """``make(key)``, compiled so that no device ever holds all particles."""
        if self.mesh is None:
            return jax.jit(make)(key)
        shapes = jax.eval_shape(make, key)
        particles = {leaf.shape for leaf in jax.tree.leaves(shapes.particles)}
        each = (shapes.particles, shapes.model_state)
        members = {id(leaf) for leaf in jax.tree.leaves(each)}

        def place(leaf):
            split = id(leaf) in members or leaf.shape in particles
            return self._sharding(_AXIS) if split else self._sharding()

        return jax.jit(make, out_shardings=jax.tree.map(place, shapes))(key)

    def data(self, tree: PyTree) -> PyTree:
        """Data of which every device has all."""
        if self.mesh is None:
            return tree
        return jax.tree.map(self._replicate, tree)

    def _replicate(self, leaf: Any) -> jax.Array:
        values = np.asarray(leaf)
        return jax.make_array_from_callback(
            values.shape, self._sharding(), lambda index: values[index]
        )

    def _sharding(self, *axes: str) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def host(self, state: RunState) -> RunState:
        """The state in the memory of this host, all particles of all processes.

        For the report and ``particles.npz`` of a finished run, once; every process must call it.
        """
        if self.mesh is None or jax.process_count() == 1:
            return state
        from jax.experimental import multihost_utils

        def fetch(leaf):
            if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                data = multihost_utils.process_allgather(jax.random.key_data(leaf), tiled=True)
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            return multihost_utils.process_allgather(leaf, tiled=True)

        return jax.tree.map(fetch, state)
