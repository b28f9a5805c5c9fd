"""Read files on a mounted file system by position, through a bounded pool of open descriptors.

The stores of a mix share one pool, so that the open files of a process do not grow with the number of datasets. If the
process runs out of descriptors, the pool closes half of its own, repeatedly if needed.

Only regular files are opened: a pipe would block forever, and a device might never end. A pool that is confined to a
folder also refuses symbolic links that lead out of it.

Invariant: a descriptor is closed only when no read uses it. The pool drops its reference, and the descriptor closes
with the last one, so a slow read in another thread never sees a reused descriptor number.

Invariant: a range is returned only if, after it was read, the file had the size and modification time of its first use,
or those that `LocalStore.expect` named. (A write changes the time before the bytes.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import stat
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from energon_bridge.core.errors import DatasetNotFoundError, ShardMissingError, StorageError
from energon_bridge.core.storage.forks import PerProcess
from energon_bridge.core.storage.stalls import Stalls, Way, is_in_memory, way_to
from energon_bridge.core.storage.store import Rooted, changed_file, short_read

_OPEN = os.O_RDONLY | os.O_NONBLOCK  # opening a pipe would block
_LARGE = 64 << 20
"""Bytes of a read from which the file's size is asked first."""
_FILES = (".arrow", ".csv", ".json", ".jsonl", ".parquet", ".tsv", ".yaml", ".yml")
_PROBED = 32 << 10
"""Local reads from this size on check whether they go to the disk; the check adds 1 us to the 10 of a small read."""
DEFAULT_OPEN_FILES = 96
"""Open descriptors of a pool: the two loaders of a process, for training and validation, stay below 256."""


class _OpenFile:
    """An open descriptor of a regular file, below a folder if one is given; it lives as long as it is referenced."""

    __slots__ = ("descriptor", "has_name", "path", "size", "time")

    def __init__(self, path: str, inside: str | None = None) -> None:
        self.descriptor = -1  # __del__ also runs when the next line raises
        self.descriptor = os.open(path, _OPEN)
        status = os.fstat(self.descriptor)
        self.path = path
        self.size = status.st_size
        self.time = status.st_mtime_ns
        self.has_name = status.st_nlink > 0  # some file systems in user space count no names
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, a device or a socket"
            raise OSError(errno.EINVAL, f"{kind}, not a file")
        os.set_blocking(self.descriptor, True)
        if inside is not None:
            real_path = _real_path(self.descriptor, path)
            if os.path.commonpath((inside, real_path)) != inside:
                raise OSError(errno.EXDEV, f"a symbolic link leads out of the folder, to {real_path}")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the interpreter's end `os` may be gone
        if self.descriptor >= 0:
            close(self.descriptor)

    def check(self) -> None:
        """Raise CorruptShardError if the file has changed since it was opened; call it after each read (1 us)."""
        try:
            status = os.fstat(self.descriptor)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read any more: {error}") from error
        if status.st_mtime_ns != self.time or status.st_size != self.size:
            raise changed_file(
                self.path, f"written to since it was opened: {self.size} bytes then, {status.st_size} now"
            )
        if self.has_name and not status.st_nlink:
            raise changed_file(self.path, "replaced or deleted while it was open")


class FileTimes:
    """The modification times of files in nanoseconds, by number; 0 on other machines, where copies have their own."""

    __slots__ = ("_times",)

    def __init__(self, times: Iterable[int]) -> None:
        self._times = array("q", times)

    def __getitem__(self, number: int) -> int:
        return self._times[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return _times_here, (self._times, socket.gethostname())


def _times_here(times: array[int], host: str) -> FileTimes:
    return FileTimes(times if host == socket.gethostname() else [0] * len(times))


class OpenFiles:
    """The descriptors of the last files read, at most `limit`; shared by stores, threads and forks, and picklable."""

    __slots__ = ("_files", "_inside", "_limit", "_lock", "_pid", "_seen", "stalls")

    def __init__(
        self, limit: int = DEFAULT_OPEN_FILES, inside: str | None = None, stalls: Stalls | None = None
    ) -> None:
        self._limit = limit
        self.stalls = Stalls() if stalls is None else stalls
        self._inside = None if inside is None else os.path.realpath(inside)
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._seen: dict[str, tuple[int, int]] = {}  # size and modification time of each file ever opened or expected
        self._lock = PerProcess(threading.Lock)  # forks read the same descriptors, by position

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, (self._limit, self._inside, self.stalls)

    def __len__(self) -> int:
        return len(self._files)

    def open(self, path: str) -> _OpenFile:
        """Return the open file of an absolute path.

        Raises:
            OSError: It cannot be opened.
            CorruptShardError: It has changed since it was first opened, or is not as expected.
        """
        with self._lock():
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
        file = self.open_once(path)
        with self._lock():
            self.check(path, file.size, file.time)
            self._seen[path] = file.size, file.time
            self._files[path] = file
            self._files.move_to_end(path)
            while len(self._files) > self._limit:
                self._files.popitem(last=False)
        return file

    def expect(self, path: str, size: int, time: int) -> None:
        """Refuse a file that has another size, or another modification time (0: any), once it is opened."""
        with self._lock():
            self._seen.setdefault(path, (size, time))

    def check(self, path: str, size: int, time: int) -> None:
        """Raise CorruptShardError unless a file has the size and modification time (0: any) that it is expected to."""
        first_size, first = self._seen.get(path, (size, 0))
        if size != first_size or first not in (0, time):
            how = f"replaced or written to since the run began: {first_size} bytes then, {size} now"
            raise changed_file(path, how)

    def open_once(self, path: str) -> _OpenFile:
        """Open a file without keeping it; if the process is out of descriptors, close others first."""
        while True:
            try:
                return _OpenFile(path, self._inside)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._let_go():
                    raise

    def _let_go(self) -> int:
        """Close the half of the files that were read longest ago, and keep fewer from now on; return their number."""
        with self._lock():
            count = -(-len(self._files) // 2)
            for _ in range(count):
                self._files.popitem(last=False)
            self._limit = max(1, min(self._limit, len(self._files)))
        return count


def _real_path(descriptor: int, path: str) -> str:
    """Return the path of an open file with links resolved."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # exactly the file that is open
    except OSError:
        return os.path.realpath(path)


class LocalStore(Rooted):
    """A folder of the local (or network-mounted) file system; thread-safe, fork-safe and picklable."""

    __slots__ = ("_files", "_way", "root")

    def __init__(self, root: str | os.PathLike[str], *, files: OpenFiles | None = None) -> None:
        given = os.fspath(root)
        absolute = os.path.abspath(os.path.expanduser(given))
        self.root = given if given == absolute else absolute  # reuses the caller's string: a mix has thousands
        self._files = OpenFiles() if files is None else files
        self._way: Way | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.root, self._files)

    def check_root(self) -> None:
        if not os.path.isdir(self.root):
            mistake = f"no such {'file' if self.root.endswith(_FILES) else 'folder'}. Check the path."
            if os.path.exists(self.root):
                mistake = "is a file, not a folder. Give one that `energon prepare` or `energon convert` made."
            raise DatasetNotFoundError(f"{self.root}: {mistake}")

    def size(self, rel: str) -> int:
        return self.stamp(rel)[0]

    def stamp(self, rel: str) -> tuple[int, int]:
        """Return size and modification time (ns) of a file, for `expect`; raises what `size` raises."""
        try:
            status = os.stat(f"{self.root}/{rel}")
        except OSError as error:
            raise self._cannot_open(rel, error) from error
        return status.st_size, status.st_mtime_ns

    def expect(self, rel: str, size: int, time: int) -> None:
        self._files.expect(f"{self.root}/{rel}", size, time)

    def check(self, rel: str) -> None:
        self._files.check(f"{self.root}/{rel}", *self.stamp(rel))

    def exists(self, rel: str) -> bool:
        return os.path.isfile(f"{self.root}/{rel}")

    def read(self, rel: str) -> bytes:
        if self._way_to_files() == "helper":
            return self._files.stalls.run(lambda: self._read(rel), lambda: self.url(rel))
        return self._read(rel)

    def _way_to_files(self) -> Way:
        """Return how files are read here (`stalls.way_to`), found out once."""
        way = self._way
        if way is None:
            way = self._way = "direct" if self._files.stalls.seconds is None else way_to(self.root)
        return way

    def _read(self, rel: str) -> bytes:
        try:
            file = self._files.open_once(f"{self.root}/{rel}")
            with open(file.descriptor, "rb", buffering=0, closefd=False) as reader:
                return reader.read()
        except OSError as error:
            raise self._cannot_open(rel, error) from error

    def read_range(self, rel: str, offset: int, length: int) -> bytes:
        way = self._way or self._way_to_files()
        file = None if way == "helper" else self._open(rel)
        at_once = file is not None and (way == "direct" or length < _PROBED)
        if file is not None and (at_once or is_in_memory(file.descriptor, offset + length - 1)):
            return self._read_open(file, rel, offset, length)
        return self._files.stalls.run(
            lambda: self._read_open(file or self._open(rel), rel, offset, length),
            lambda: f"{self.url(rel)}: {length} bytes at offset {offset}",
        )

    def read_ranges(self, rel: str, offsets: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        if self._way_to_files() == "helper":
            return [self.read_range(rel, offset, length) for offset, length in zip(offsets, lengths, strict=True)]
        file = self._open(rel)
        descriptor = file.descriptor
        pread = os.pread
        blocks = []
        at_once = _LARGE if self._way == "direct" else _PROBED - 1
        for offset, length in zip(offsets, lengths, strict=True):
            try:
                here = length <= at_once or (length <= _LARGE and is_in_memory(descriptor, offset + length - 1))
                block = pread(descriptor, length, offset) if here else b""
            except (OSError, ValueError, OverflowError):
                block = b""
            if len(block) != length:  # `read_range` reads the rest or raises the error
                block = self.read_range(rel, offset, length)
            blocks.append(block)
        file.check()
        return blocks

    def _open(self, rel: str) -> _OpenFile:
        try:
            return self._files.open(f"{self.root}/{rel}")
        except OSError as error:
            raise self._cannot_open(rel, error) from error

    def _read_open(self, file: _OpenFile, rel: str, offset: int, length: int) -> bytes:
        try:
            return self._read_all(file, rel, offset, length)
        finally:
            file.check()  # also a short read: the change is the reason

    def _read_all(self, file: _OpenFile, rel: str, offset: int, length: int) -> bytes:
        try:
            if length > _LARGE:  # Python would allocate whatever a damaged index claims
                got = max(0, min(length, os.fstat(file.descriptor).st_size - offset))
                if got < length:
                    raise short_read(self.url(rel), offset=offset, expected=length, got=got)
            data = os.pread(file.descriptor, length, offset)
            if len(data) == length:
                return data
            # One pread gives at most 2 GiB, and network file systems may return less.
            pieces = [data]
            got = len(data)
            while got < length:
                data = os.pread(file.descriptor, length - got, offset + got)
                if not data:
                    raise short_read(self.url(rel), offset=offset, expected=length, got=got)
                pieces.append(data)
                got += len(data)
            return b"".join(pieces)
        except StorageError:
            raise
        except (OSError, ValueError, OverflowError) as error:  # the last two for numbers below 0 or beyond 2^63
            raise StorageError(f"{self.url(rel)}: cannot read {length} bytes at offset {offset}: {error}") from error

    def list(self, suffix: str | tuple[str, ...] = "") -> list[tuple[str, int]]:
        self.check_root()
        files: list[tuple[str, int]] = []
        visited: set[tuple[int, int]] = set()
        for folder, subfolders, names in os.walk(self.root, followlinks=True):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in visited:
                subfolders.clear()  # a link back to a folder above
                continue
            visited.add((status.st_dev, status.st_ino))
            relative = os.path.relpath(folder, self.root).replace(os.sep, "/")
            prefix = "" if relative == "." else relative + "/"
            for name in names:
                if name.endswith(suffix):
                    files.append((prefix + name, self.size(prefix + name)))
        files.sort()
        return files

    def write(self, rel: str, data: bytes) -> None:
        """Write `rel` as a whole: readers see the old content or the new, never a part."""
        path = os.path.join(self.root, rel)
        try:
            write_file(path, (data,))
        except OSError as error:
            raise cannot_write(path, error, f" {len(data):,} bytes") from error

    def put_file(self, path: str, rel: str) -> None:
        """Move a local file to `rel`, replacing any file there as a whole."""
        target = os.path.join(self.root, rel)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            try:
                os.replace(path, target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                temporary = f"{target}.{os.getpid()}.tmp"
                shutil.copyfile(path, temporary)
                os.replace(temporary, target)
        except OSError as error:
            raise cannot_write(target, error) from error

    def delete(self, rel: str) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.root, rel))
        except OSError as error:
            raise StorageError(f"{self.url(rel)}: cannot delete: {error}") from error

    def _cannot_open(self, rel: str, error: OSError) -> Exception:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return StorageError(f"{self.url(rel)}: cannot open: {error}")
        try:
            self.check_root()
        except DatasetNotFoundError as missing:
            return missing
        return ShardMissingError(f"{self.url(rel)}: no such file.")


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def _is_full(error: BaseException) -> bool:
    """Return whether an error of the system, of sqlite or of a library in Rust says that there is no room."""
    if type(error).__module__ == "sqlite3":
        return "disk" in str(error)
    code = _OS_ERROR.search(str(error))
    return (int(code[1]) if code else getattr(error, "errno", None)) in _NO_ROOM


def cannot_write(path: str | os.PathLike[str], error: BaseException, doing: str = "") -> StorageError:
    """Return the error for a path that could not be written; of a full disk, with what is free there."""
    said = f"{os.fspath(path)}: cannot write{doing}: {error}"
    if not _is_full(error):
        return StorageError(said)
    folder, free = _free(path)
    return StorageError(
        f"{said}. Is the disk full, or is there a limit on file sizes? {folder} has {free:,} bytes free: make room, or "
        "write elsewhere."
    )


def no_room(error: BaseException, paths: Iterable[str | os.PathLike[str]], doing: str = "") -> StorageError | None:
    """Return the error for an exception that came of a full disk; None if it did not.

    It names the first of `paths` on the fullest of their disks.
    """
    cause: BaseException | None = error
    while cause is not None and not _is_full(cause):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    named = [name] if isinstance(name := getattr(cause, "filename", None), str) else []
    of_disks: dict[int, str | os.PathLike[str]] = {}  # what is free on one disk may change between two looks
    for path in named or paths:
        of_disks.setdefault(os.stat(_folder(path)).st_dev, path)
    return cannot_write(min(of_disks.values(), key=lambda path: _free(path)[1]), cause, doing)


def _folder(path: str | os.PathLike[str]) -> str:
    """Return the folder in which a path would be, or the nearest above it that is there."""
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _free(path: str | os.PathLike[str]) -> tuple[str, int]:
    """Return the nearest folder of a path that is there, and the bytes free in it."""
    folder = _folder(path)
    found = os.statvfs(folder)
    return folder, found.f_bavail * found.f_frsize


def write_file(path: str | os.PathLike[str], pieces: Iterable[bytes]) -> None:
    """Write a file as a whole: readers see the old content or the new, never a part. Raises OSError."""
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # The name is unique even if processes on several machines, whose ids may be equal, write at the same time.
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.writelines(pieces)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _reopen(root: str, files: OpenFiles) -> LocalStore:
    return LocalStore(root, files=files)
