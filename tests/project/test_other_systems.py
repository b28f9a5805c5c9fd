"""Reading without worker processes asks for nothing that only Linux has: so it works on macOS, as far as one can tell.

What a Mac lacks is taken away before the package is imported: calls and constants of the standard library, `/proc`,
`/dev/shm` and `prctl`.
"""

from __future__ import annotations

from forked import run_program
from paths import REPOSITORY

LINUX_ONLY = {
    "os": "memfd_create preadv pwritev pipe2 eventfd pidfd_open posix_fadvise posix_fallocate fdatasync "
    "copy_file_range splice sched_getaffinity sched_setaffinity RWF_NOWAIT O_TMPFILE O_DIRECT O_PATH",
    "socket": "SOCK_SEQPACKET SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED TCP_USER_TIMEOUT TCP_KEEPIDLE",
    "select": "epoll",
    "signal": "sigtimedwait pidfd_send_signal",
    "mmap": "MADV_REMOVE MADV_HUGEPAGE MADV_POPULATE_WRITE MAP_POPULATE",
    "resource": "prlimit",
}
ELSEWHERE = """
import ctypes, errno, importlib, os, sys

for name in [name for name in sys.modules if name.partition(".")[0] == "energon_bridge"]:
    del sys.modules[name]  # of the process that this is a fork of

import numpy, torch, torch.distributed  # their own business

for module, names in {missing!r}.items():
    for name in names.split():
        vars(importlib.import_module(module)).pop(name, None)
Library = ctypes.CDLL


class WithoutPrctl(Library):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError("dlsym(RTLD_DEFAULT, prctl): symbol not found")
        return super().__getattr__(name)


def deny(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str):
        if arguments[0].startswith(("/proc/", "/dev/shm", "/sys/")):
            raise FileNotFoundError(errno.ENOENT, "no such file or directory", arguments[0])


ctypes.CDLL = WithoutPrctl
sys.addaudithook(deny)
"""
IMPORTS = """
import pkgutil

import energon_bridge

failed = []
for module in pkgutil.walk_packages(energon_bridge.__path__, "energon_bridge."):
    if not module.name.endswith((".__main__", "._tar", "._pixels")):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "torchtitan":  # it is installed by those who train with it
                failed.append((module.name, repr(error)))
        except Exception as error:
            failed.append((module.name, repr(error)))
assert not failed, failed
"""
LOADS = """
from pathlib import Path

from PIL import Image

from energon_bridge import CaptioningSample, ShardWriter, WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.core.errors import NotProvidedError

Image.new("RGB", (32, 24), "red").save("red.png")
with ShardWriter("red", sample_type=CaptioningSample) as out:
    for number in range(100):
        out.write({"image": Path("red.png"), "caption": f"red, number {number}"})


def make_loader(num_workers):
    config = WorkerConfig(num_workers=num_workers)
    return get_savable_loader(get_train_dataset("red", batch_size=4, worker_config=config))


loader = make_loader(0)
for step, batch in zip(range(3), loader):
    assert batch.image.shape == (4, 3, 24, 32)
state = loader.save_state_rank()
expected = next(iter(loader)).caption
loader = make_loader(0)
loader.restore_state_rank(state)
assert next(iter(loader)).caption == expected
try:
    next(iter(make_loader(2)))
except NotProvidedError as error:
    assert "num_workers=0" in str(error)
else:
    raise AssertionError("two workers started without memfd_create")
"""


def run(program, folder):
    result = run_program(
        ["-c", ELSEWHERE.format(missing=LINUX_ONLY) + program], folder, {"PYTHONPATH": str(REPOSITORY)}
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_module_imports(tmp_path):
    run(IMPORTS, tmp_path)


def test_this_process_loads_and_resumes_and_workers_are_refused_by_name(tmp_path):
    run(LOADS, tmp_path)
