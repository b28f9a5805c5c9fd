"""Stage the files of a dataset, so that none is visible until all are complete.

Files are written to a separate folder (`.nv-meta.staging` in a local dataset, so that moving them is a rename) and
moved when everything has been written; the file that declares the dataset prepared comes last. A failure before that
leaves the dataset unchanged; the next run clears the folder of a killed one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from types import TracebackType

from energon_bridge.errors import ConfigurationError, StorageError
from energon_bridge.storage import LocalStore, Store

try:
    import fcntl
except ImportError:  # not on Windows, where two runs at once are not detected
    fcntl = None  # type: ignore[assignment]

STAGING_FOLDER = ".nv-meta.staging"


class Staging:
    """Collects files for a store and moves them there in the order they were announced; a context manager."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files: list[tuple[str, str]] = []
        self._lock = -1
        if not isinstance(store, LocalStore):
            self._folder = tempfile.mkdtemp(prefix="energon-prepare-")
            return
        self._folder = os.path.join(store.root, STAGING_FOLDER)
        try:
            os.makedirs(self._folder, exist_ok=True)
            self._lock = os.open(self._folder, os.O_RDONLY)
        except OSError as error:
            raise StorageError(f"{store.root}: cannot write into the dataset's folder: {error}") from error
        self._claim()

    def path(self, rel: str) -> str:
        """Announce the file `rel` of the dataset and return the local path to write it to."""
        path = os.path.join(self._folder, str(len(self._files)))
        self._files.append((path, rel))
        return path

    def add(self, rel: str, data: bytes) -> None:
        """Stage `rel` with this content."""
        path = self.path(rel)
        try:
            with open(path, "wb") as file:
                file.write(data)
        except OSError as error:
            raise StorageError(f"{path}: cannot write {len(data)} bytes for {rel}: {error}") from error

    def commit(self) -> None:
        """Move all files into the dataset."""
        for path, rel in self._files:
            self._store.put_file(path, rel)

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)

    def _claim(self) -> None:
        """Take the lock of the staging folder (the kernel frees it when a process dies) and clear what is in it."""
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise ConfigurationError(
                    f"{self._folder}: another `energon prepare` is running on this dataset. Wait for it to finish."
                ) from None
            except OSError:
                pass  # a file system without locks
        for entry in os.scandir(self._folder):
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
