"""A directory is written by one process at a time, and a killed process leaves no lock behind."""

import contextlib
import fcntl
import os
import pathlib
import socket
import warnings

from yggdrax.checkpoint.errors import CheckpointLocked, CheckpointWarning, CheckpointWriteError

__all__ = ["LOCK_NAME", "DirectoryLock"]

LOCK_NAME = ".yggdrax-lock"

_held_descriptors: set[int] = set()


def _close_inherited() -> None:
    # A forked child shares the lock; without this it would keep it after its parent was killed.
    for descriptor in list(_held_descriptors):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held_descriptors.clear()


def _identity() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


os.register_at_fork(after_in_child=_close_inherited)


class DirectoryLock:
    """An exclusive lock on a directory, held until :meth:`release` or the end of the process.

    The kernel holds the lock (``flock``) and drops it when the process dies, by ``kill -9`` as
    well. The file that carries it stays and means nothing by itself: a copied directory is not
    locked.
    """

    def __init__(self, directory: pathlib.Path):
        """Takes the lock.

        Args:
          directory: an existing directory.

        Raises:
          CheckpointLocked: somebody else holds it.
          CheckpointWriteError: the directory cannot be written.
        """
        path = directory / LOCK_NAME
        try:
            self._descriptor: int | None = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644
            )
        except OSError as error:
            if path.is_symlink():  # whatever it points to is not ours to write
                raise CheckpointWriteError(
                    f"{path} is a symbolic link, and the lock is a file. Remove the link."
                ) from error
            raise CheckpointWriteError(
                f"{directory} cannot be written ({error.strerror}). To restore from it only, "
                f"open it with Checkpointer(..., read_only=True)."
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            if holder == _identity():
                holder = "another Checkpointer of this process"
            raise CheckpointLocked(
                f"{directory} is being written by {holder or 'another process'}. Wait for it, "
                f"close that Checkpointer, choose another directory, or open this one with "
                f"read_only=True."
            ) from None
        except OSError as error:
            warnings.warn(
                f"{directory} is on a file system without locks ({error.strerror}): a second "
                f"process that writes there would not be noticed.",
                CheckpointWarning,
                stacklevel=3,
            )
        _held_descriptors.add(self._descriptor)
        # The message for the next one; a full disk must not keep anybody from opening.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, _identity().encode(), 0)

    def release(self) -> None:
        """Gives the lock back; a second call does nothing."""
        if self._descriptor is not None:
            _held_descriptors.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
