"""Stage the files of a dataset, so that none is visible until all are complete.

Files are written to a separate folder (`.nv-meta.staging` in a local dataset, so that moving them is a rename) and
moved when everything has been written; the file that declares the dataset prepared comes last. A failure before that
leaves the dataset unchanged; the next run clears the folder of a killed one.

In a local dataset `moves.json` in that folder says that everything has been written. The next run completes the moves
of a run that was killed among them, so that it never finds files of two states:

    {"withdraw": [paths in the dataset that are deleted first], "moves": [[name in the folder, path in the dataset]]}
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Sequence

from energon_bridge.core.errors import ConfigurationError, EnergonError, MetadataError
from energon_bridge.core.format.key_index import settle_key_index
from energon_bridge.core.format.nvmeta import INDEX_SQLITE, META_FOLDER, leads_out, meta_path
from energon_bridge.core.storage import LocalStore, Store, cannot_write, write_file

STAGING_FOLDER = ".nv-meta.staging"
_MOVES = "moves.json"


def forget(store: Store, folder: str, suffix: str) -> None:
    """Remove a folder in which tasks or a stopped run kept their results, files of that suffix; it may be missing."""
    if isinstance(store, LocalStore):
        shutil.rmtree(store.url(folder), ignore_errors=True)
        return
    for name, _ in store.list(suffix):
        if name.startswith(f"{folder}/"):
            store.delete(name)


class Staging:
    """Collects files for a store and moves them there in the order they were announced; a context manager."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files: list[tuple[str, str]] = []
        self._lock = -1
        self._is_moving = False
        if not isinstance(store, LocalStore):
            self._folder = tempfile.mkdtemp(prefix="energon-prepare-")
            return
        self._folder = os.path.join(store.root, STAGING_FOLDER)
        try:
            os.makedirs(self._folder, exist_ok=True)
            self._lock = os.open(self._folder, os.O_RDONLY)
        except OSError as error:
            raise cannot_write(store.root, error, " into the dataset's folder") from error
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
            raise cannot_write(path, error, f" {len(data):,} bytes for {rel}") from error

    def commit(self, *, withdraw: Sequence[str] = ()) -> None:
        """Move all files into the dataset, those of `.nv-meta` last.

        The files `withdraw` are deleted before those of `.nv-meta` move, so that nobody reads old ones beside new ones.
        """
        files = sorted(self._files, key=lambda file: file[1].startswith(f"{META_FOLDER}/"))
        if isinstance(self._store, LocalStore):
            moves = [[os.path.basename(path), rel] for path, rel in files]
            self._write_moves(json.dumps({"withdraw": list(withdraw), "moves": moves}).encode())
            self._is_moving = True
        self._move(files, withdraw)
        self._is_moving = False

    def _write_moves(self, data: bytes) -> None:
        path = os.path.join(self._folder, _MOVES)
        try:
            write_file(path, (data,))
        except OSError as error:
            raise cannot_write(path, error) from error

    def _move(self, files: Sequence[tuple[str, str]], withdraw: Sequence[str]) -> None:
        waiting = list(withdraw)
        for path, rel in files:
            while waiting and rel.startswith(f"{META_FOLDER}/"):
                self._store.delete(waiting.pop())
            self._store.put_file(path, rel)

    def _complete(self) -> None:
        """Complete the moves of a run that was killed among them."""
        path = os.path.join(self._folder, _MOVES)
        if not os.path.exists(path):
            return
        try:
            with open(path, "rb") as file:
                kept = json.load(file)
            files = [(os.path.join(self._folder, str(int(name))), str(rel)) for name, rel in kept["moves"]]
            withdraw = frozenset(kept["withdraw"])
            if any(leads_out(rel) for _, rel in files):
                raise ValueError("a place in it leads out of the dataset")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise MetadataError(f"{path}: not a list of moves ({error}). Delete it and prepare again.") from error
        left = [(path, rel) for path, rel in files if os.path.exists(path)]
        self._move(left, [rel for _, rel in left if rel in withdraw])

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_moving:  # else the next run completes the moves
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)

    def _claim(self) -> None:
        """Take the lock of the staging folder (the kernel frees it when a process dies) and clear what is in it."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigurationError(
                f"{self._folder}: another `energon prepare` is running on this dataset. Wait for it to finish."
            ) from None
        except OSError:
            pass  # a file system without locks
        try:
            settle_key_index(os.path.join(self._store.root, meta_path(INDEX_SQLITE)))
            self._complete()
        except EnergonError:
            os.close(self._lock)
            raise
        for entry in os.scandir(self._folder):
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
