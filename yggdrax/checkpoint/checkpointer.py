"""The public class: which steps to save, which to keep, which one to restore."""

import os
import pathlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, SupportsIndex

from yggdrax.checkpoint import folder as folders
from yggdrax.checkpoint.errors import CheckpointDamaged, CheckpointWriteError, NoCheckpoint
from yggdrax.checkpoint.folder import Manifest
from yggdrax.checkpoint.guard import KnownDamage, nothing_here, one_at_a_time, warn_caller
from yggdrax.checkpoint.keep import KeepPolicy
from yggdrax.checkpoint.lock import DirectoryLock
from yggdrax.checkpoint.manifest import compare, describe, snapshot
from yggdrax.checkpoint.options import resolve_directory, save_policy, step_number
from yggdrax.checkpoint.settings import current_settings, differences
from yggdrax.checkpoint.state import difference, read_state
from yggdrax.checkpoint.together import save_together, spread_snapshot
from yggdrax.checkpoint.values import check_config, fingerprint, json_copy, numbers
from yggdrax.checkpoint.writer import BackgroundWrite
from yggdrax.processes import Group, ProcessLost

__all__ = ["Checkpointer"]


class Checkpointer:
    """Saves states of a run into a directory and restores them bit for bit.

    A state is any pytree of JAX and NumPy arrays, random keys (typed or legacy), numbers and
    strings. It should hold everything that the next step needs: particles, optimizer state, key,
    step, position in the data. What comes back is indistinguishable from what was saved: values,
    dtypes, weak types, container types and key implementations, so a jitted step that ran before
    does not compile again.

    A step appears under its number only when it is whole and on the disk, so a kill at any moment
    loses no more than the steps since the last completed save. Nothing is deleted that this class
    did not write: stray and damaged folders are skipped, or moved aside when their name is needed,
    with a warning. Directories are on a local or mounted file system. Threads may share one
    Checkpointer; their calls wait for each other.

    With several processes (``jax.distributed``) all make the same calls with the same directory,
    which all of them see. Each writes and reads the shards that it holds, whatever the number of
    processes was before; a save is then whole before :meth:`save` returns.

    Example:
      >>> import tempfile
      >>> import jax, jax.numpy as jnp
      >>> directory = tempfile.mkdtemp()
      >>> state = {"key": jax.random.key(1), "x": jnp.arange(3.0)}
      >>> with Checkpointer(directory) as checkpointer:
      ...     checkpointer.save(7, state, metrics={"loss": 0.5})
      True
      >>> with Checkpointer(directory) as checkpointer:
      ...     again = checkpointer.restore(state)
      ...     checkpointer.restored_step
      7
      >>> again["x"].tolist()
      [0.0, 1.0, 2.0]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_every: int | Callable[[int], bool] = 1,
        keep_latest: int | None = 3,
        keep_every: int | None = None,
        best: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        keep_best: int = 1,
        config: Mapping[str, Any] | None = None,
        asynchronous: bool = True,
        read_only: bool = False,
    ):
        """Opens a directory, creates it if needed, and locks it against other writers.

        Args:
          directory: the run's checkpoint directory. ``~`` and relative paths are resolved here,
            once.
          save_every: :meth:`save` skips steps that are not a multiple of it; or a function of the
            step that says whether to save.
          keep_latest: how many of the newest steps to keep; None keeps all.
          keep_every: steps that are a multiple of it are kept as well.
          best: name of a metric; the ``keep_best`` steps with its best values are kept besides
            the latest ones. Steps whose value is NaN are never the best.
          best_mode: whether the smallest (``"min"``) or the largest (``"max"``) value is best.
          keep_best: how many of the best to keep.
          config: configuration of the run in JSON types. It is saved with its fingerprint, and
            :meth:`restore` refuses a checkpoint of another configuration, naming the field.
          asynchronous: write in the background while the program computes. The state is copied
            before :meth:`save` returns, so it may be donated at once. An error of the writer is
            raised by the next call of any method, :meth:`close` at the latest.
          read_only: only restore. No lock is taken and nothing is created, so it may be used
            while another process writes.

        Raises:
          ValueError: an option out of range, a URL, or the folder of a single step.
          CheckpointLocked: another process or Checkpointer writes to the directory.
          CheckpointWriteError: the directory cannot be created or written.
        """
        self._root = resolve_directory(directory)
        self._due = save_policy(save_every)
        self._keep = KeepPolicy(keep_latest, keep_every, best, best_mode, keep_best)
        self._config = None if config is None else json_copy(config, "config")
        self._asynchronous = asynchronous
        self._write: BackgroundWrite | None = None
        self._notes: list[str] = []
        self._noted: set[str] = set()
        self._damaged = KnownDamage(self._root)
        self._calls = threading.RLock()
        self._lock: DirectoryLock | None = None
        self._read_only = read_only
        self._group = Group("checkpoint")
        self._closed = False
        self.restored_step: int | None = None
        """The step of the last :meth:`restore`; None before."""
        if os.path.isfile(self._root / folders.MANIFEST):
            raise ValueError(
                f"{self._root} is the folder of one step. Open {self._root.parent} and restore "
                f"step {int(self._root.name) if self._root.name.isdigit() else '...'}."
            )
        if not read_only:
            self._group.lead(self._take_directory)

    def _take_directory(self) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointWriteError(
                f"{self._root} cannot be created: {error.strerror}. Choose another directory."
            ) from error
        self._lock = DirectoryLock(self._root)
        weakref.finalize(self, self._lock.release)
        folders.clean_scratch(self._root)

    @property
    def directory(self) -> pathlib.Path:
        """The absolute path of the run's checkpoint directory."""
        return self._root

    @one_at_a_time
    def save(
        self,
        step: SupportsIndex,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves the state after ``step`` steps, if it is due.

        Waits for the previous save if that is still being written. The arrays are copied to host
        memory before it returns.

        Args:
          step: number of steps completed, at least 0, larger than that of any whole checkpoint
            in the directory.
          state: any pytree of arrays, keys, numbers and strings.
          metrics: numbers by name, for ``best`` and for :meth:`info`.
          metadata: anything else in JSON types; :meth:`metadata` returns it.
          force: save even if ``save_every`` says no.

        Returns:
          True if the state is being saved or was written. False if it is not due, or if this
          very state is already saved under this step.

        Raises:
          ValueError: a step below the newest saved one; the newest one with other values; a
            donated array.
          TypeError: a leaf that cannot be saved, by name; values that are not JSON.
          CheckpointMismatch: the newest step has another configuration, by field; or the step is
            there and holds another tree.
          CheckpointWriteError: this save (``asynchronous=False``) or the previous one failed.
          RuntimeError: closed or opened with ``read_only=True``.
        """
        number = step_number(step)
        self._check_open()
        if self._read_only:
            raise RuntimeError(f"{self._root} was opened with read_only=True; it saves nothing.")
        if not force and not self._due(number):
            if self._write is not None and not self._write.running():
                self.wait()
            return False
        self.wait()
        values = numbers(metrics or {})
        self._keep.check_metrics(values)
        notes = json_copy(metadata or {}, "metadata")
        several = self._group.count > 1
        newest = self.latest_step()
        if newest is not None and number < newest:
            raise ValueError(
                f"Step {number} is below the newest one in {self._root}, which is {newest}. To go "
                f"on from an older step call rewind({number}) first, or start the run in a new "
                f"directory."
            )
        if newest is not None and self._config is not None:
            path = folders.step_folder(self._root, newest)
            check_config(folders.read_manifest(path).config, self._config, path)
        entries, arrays = spread_snapshot(state) if several else snapshot(state)
        if number == newest:
            path = folders.step_folder(self._root, number)
            name = difference(self._group, path, entries, arrays)
            if name is not None:
                raise ValueError(
                    f"Step {number} is already saved in {self._root} with another value of {name}. "
                    f"To replace it call rewind({number - 1}) first, or use another directory."
                )
            return False
        moved = self._group.lead(lambda: folders.make_room(self._root, number))
        if moved is not None:
            self._damaged.forget(number)
            self._note(moved)
        manifest = Manifest(
            step=number,
            entries=entries,
            files={},
            metrics=values,
            metadata=notes,
            config=self._config,
            settings=current_settings(),
            time=time.time(),
        )

        damaged = self._damaged.steps()

        def write() -> None:
            try:
                if several:
                    save_together(self._group, self._root, manifest, arrays)
                else:
                    folders.write_step(self._root, manifest, arrays)
            except ProcessLost:
                raise
            except Exception as error:  # Orbax and TensorStore raise many types
                folders.clean_scratch(self._root)
                raise CheckpointWriteError(
                    f"Step {number} could not be written to {self._root}: {error}. The state in "
                    f"memory and the earlier checkpoints are untouched; make room or repair the "
                    f"permissions and save again."
                ) from error
            self._notes += self._group.lead(lambda: self._keep.apply(self._root, damaged, number))

        if several:
            write()
            return True
        self._write = BackgroundWrite(write, f"saving step {number} to {self._root}")
        if not self._asynchronous:
            self.wait()
        return True

    @one_at_a_time
    def restore(self, like: Any, step: SupportsIndex | None = None) -> Any:
        """Returns a saved state, in the containers of ``like`` and placed where ``like`` is.

        Everything is compared with ``like`` first: names, container types, shapes and dtypes.
        Values, weak types and key implementations are those that were saved. A leaf of ``like``
        that is a JAX array decides devices and sharding, one that is a NumPy array asks for
        NumPy; with ``jax.ShapeDtypeStruct`` (as from ``jax.eval_shape``) arrays go to the default
        device.

        Args:
          like: the state as the program would start with, concrete or abstract.
          step: which one; the newest whole one if None. A damaged one is then skipped with a
            warning, and the next older one is used.

        Returns:
          The state.

        Raises:
          NoCheckpoint: there is none, or not that one.
          CheckpointMismatch: names the first entry that differs and shows both sides.
          CheckpointDamaged: the step that was asked for is damaged.
          CheckpointError: a later version of yggdrax wrote it.
        """
        self._check_open()
        self.wait()
        expected = describe(like)
        if step is not None:
            return self._restore_step(step_number(step), like, expected)
        number = self.latest_step()
        while number is not None:
            try:
                return self._restore_step(number, like, expected)
            except CheckpointDamaged:
                number = self.latest_step()  # an older one; warns of the one it skips
        raise NoCheckpoint(self._nothing_here())

    @one_at_a_time
    def latest_step(self) -> int | None:
        """Returns the newest whole step on the disk, or None.

        Waits for a step that is still being written. Files are checked for presence and size
        here, their contents in :meth:`restore`.

        Raises:
          CheckpointWriteError: the last save failed.
        """
        self._check_open()
        self.wait()
        return self._group.lead(self._newest)

    def _newest(self) -> int | None:
        steps = reversed(folders.numbered_folders(self._root))
        return next((step for step in steps if self._read_manifest(step) is not None), None)

    @one_at_a_time
    def steps(self) -> list[int]:
        """Returns all whole steps on the disk, ascending, like :meth:`latest_step`."""
        self._check_open()
        self.wait()
        numbered = folders.numbered_folders(self._root)
        return [number for number in numbered if self._read_manifest(number) is not None]

    @one_at_a_time
    def metadata(self, step: SupportsIndex | None = None) -> dict[str, Any]:
        """Returns the ``metadata`` given to :meth:`save`.

        Args:
          step: which one; the newest whole one if None.

        Raises:
          NoCheckpoint: there is none, or not that one.
        """
        return self._manifest(step).metadata

    @one_at_a_time
    def info(self, step: SupportsIndex | None = None) -> dict[str, Any]:
        """Returns what else was recorded with a step, in JSON types.

        Args:
          step: which one; the newest whole one if None.

        Returns:
          ``step``, ``time`` (seconds since 1970), ``metrics``, ``config``, ``fingerprint``,
          ``settings`` (machine, versions, options), ``format_version``, ``leaves`` (name to type
          and shape), ``bytes`` (on the disk).

        Raises:
          NoCheckpoint: there is none, or not that one.
        """
        manifest = self._manifest(step)
        return {
            "step": manifest.step,
            "time": manifest.time,
            "metrics": manifest.metrics,
            "config": manifest.config,
            "fingerprint": None if manifest.config is None else fingerprint(manifest.config),
            "settings": manifest.settings,
            "format_version": manifest.version,
            "leaves": {e.name: str(e) for e in manifest.entries if e.kind != "node"},
            "bytes": sum(manifest.files.values()),
        }

    @one_at_a_time
    def rewind(self, step: SupportsIndex) -> None:
        """Deletes the whole steps above ``step``, so that a run can go on from an older one.

        Args:
          step: the newest step to keep; -1 keeps none.

        Raises:
          CheckpointWriteError: a step could not be deleted.
          RuntimeError: closed or opened with ``read_only=True``.
        """
        number = step_number(step, least=-1)
        self._check_open()
        if self._read_only:
            raise RuntimeError(f"{self._root} was opened with read_only=True; it deletes nothing.")
        self.wait()
        self._group.lead(lambda: self._delete_above(number))

    def _delete_above(self, number: int) -> None:
        for newer in [saved for saved in self.steps() if saved > number][::-1]:
            try:
                kept = folders.delete_step(self._root, newer)
            except OSError as error:
                raise CheckpointWriteError(
                    f"Step {newer} could not be deleted from {self._root}: {error}"
                ) from error
            if kept is not None:
                raise CheckpointWriteError(f"{kept} Move it away by hand.")

    @one_at_a_time
    def wait(self) -> None:
        """Blocks until nothing is being written, and raises what the writer raised.

        Raises:
          CheckpointWriteError: the last save failed.
        """
        if self._write is not None:
            self._write.join()  # a Ctrl-C here leaves the write where it can be waited for again
            write, self._write = self._write, None
            write.raise_error()
        notes, self._notes = self._notes, []
        for note in notes:
            self._note(note)

    @one_at_a_time
    def close(self) -> None:
        """Finishes the last save and gives the directory free; a second call does nothing.

        Raises:
          CheckpointWriteError: the last save failed.
        """
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> "Checkpointer":
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes. An error on its way out of the block is not replaced by one of the writer."""
        try:
            self.close()
        except CheckpointWriteError as late:
            if error is None:
                raise
            error.add_note(f"Besides, {late}")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"This Checkpointer of {self._root} is closed; open a new one.")

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            warn_caller(text)

    def _read_manifest(self, number: int) -> Manifest | None:
        """Returns the manifest of a whole step; a damaged one is said to be skipped, once."""
        if number in self._damaged:
            self._note(f"{self._damaged.why(number)}. This step is skipped.")
            return None
        try:
            return folders.read_manifest(folders.step_folder(self._root, number))
        except CheckpointDamaged as error:
            self._note(f"{error}. This step is skipped.")
            return None

    def _manifest(self, step: SupportsIndex | None) -> Manifest:
        self._check_open()
        self.wait()
        number = self.latest_step() if step is None else step_number(step)
        if number is None or number not in folders.numbered_folders(self._root):
            raise NoCheckpoint(self._nothing_here(number))
        return folders.read_manifest(folders.step_folder(self._root, number))

    def _nothing_here(self, step: int | None = None) -> str:
        if step is not None:
            return f"There is no step {step} in {self._root}; there are {self.steps()}."
        return nothing_here(self._root)

    def _restore_step(self, number: int, like: Any, expected: list[Any]) -> Any:
        if number not in folders.numbered_folders(self._root):
            raise NoCheckpoint(self._nothing_here(number))
        path = folders.step_folder(self._root, number)
        try:
            manifest = folders.read_manifest(path)
            check_config(manifest.config, self._config, path)
            compare(manifest.entries, expected, str(path))
            state = read_state(self._group, path, manifest, like)
        except CheckpointDamaged as error:
            self._damaged.add(number, str(error))
            raise
        self.restored_step = number
        changed = differences(manifest.settings, current_settings())
        if changed:
            self._note(
                f"{path} was saved under other settings ({'; '.join(changed)}). The state is "
                f"equal bit for bit, but the steps that follow may round differently."
            )
        return state
