"""Checkpoints: what the next step needs, saved so that a resumed run equals an unbroken one.

Example:
  >>> import tempfile
  >>> import jax.numpy as jnp
  >>> directory = tempfile.mkdtemp()
  >>> with Checkpointer(directory, save_every=10) as checkpointer:
  ...     saved = [checkpointer.save(step, {"x": jnp.full(2, step)}) for step in range(21)]
  ...     checkpointer.latest_step()
  20
  >>> sum(saved)
  3
  >>> with Checkpointer(directory) as checkpointer:
  ...     state = checkpointer.restore({"x": jnp.zeros(2, jnp.int32)})
  >>> state["x"].tolist()
  [20, 20]
"""

from yggdrax.checkpoint.checkpointer import Checkpointer
from yggdrax.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointLocked,
    CheckpointMismatch,
    CheckpointWarning,
    CheckpointWriteError,
    NoCheckpoint,
)

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointLocked",
    "CheckpointMismatch",
    "CheckpointWarning",
    "CheckpointWriteError",
    "Checkpointer",
    "NoCheckpoint",
]
