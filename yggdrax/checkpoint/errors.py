"""What can go wrong with a checkpoint, one class for each thing a caller may want to catch."""

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointLocked",
    "CheckpointMismatch",
    "CheckpointWarning",
    "CheckpointWriteError",
    "NoCheckpoint",
]


class CheckpointError(Exception):
    """Base of all errors of this package."""


class CheckpointMismatch(CheckpointError, ValueError):
    """What is saved is not what the program expects; nothing was assigned."""


class CheckpointDamaged(CheckpointError, OSError):
    """A step folder is incomplete, or its contents are not what was written."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be written; those already there are untouched."""


class CheckpointLocked(CheckpointError, RuntimeError):
    """Another process, or another Checkpointer, writes to the same directory."""


class NoCheckpoint(CheckpointError, FileNotFoundError):
    """There is no whole checkpoint where one was asked for."""


class CheckpointWarning(UserWarning):
    """Something was skipped or moved aside, or the machine differs from the one that saved."""
