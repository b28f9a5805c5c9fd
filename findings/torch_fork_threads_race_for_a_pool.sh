#!/usr/bin/env bash
# torch 2.13.0: in a forked process whose parent called `torch.set_num_threads`, the first operations of several threads
# may raise "Invalid thread pool!".
#
# Each thread takes over the number of threads at its first operation, and for that asks for a pool of the process. In a
# fork the first to ask replaces the pool of the parent, without a lock: another one, at the same moment, finds none and
# raises a RuntimeError (an internal assert), whatever the operation is. It strikes workers that decode or load on
# threads of their own, now and then. One call of `torch.set_num_threads` before the threads start is enough, as
# torch's DataLoader does in its workers; a fork of a parent that never set the number is not affected.
#
# Seen with torch 2.13.0, Python 3.11 (300 forks with eight threads each):
#   forks in which a thread raised: 80 to 112; with set_num_threads in the fork: 0; number never set by the parent: 0
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.2.6"
cd "$folder"
cat >forks.py <<'PYTHON'
import os
import sys
import threading

import torch

in_parent, in_fork = (argument == "set" for argument in sys.argv[1:])
if in_parent:
    torch.set_num_threads(2)
torch.arange(9).sort()


def raised():
    """Whether one of eight threads raises at its first operation."""
    together, errors = threading.Barrier(8), []

    def operate():
        together.wait()
        try:
            torch.arange(9).sort()
        except RuntimeError as error:
            assert "Invalid thread pool" in str(error), error
            errors.append(error)

    threads = [threading.Thread(target=operate) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return bool(errors)


count = 0
for _ in range(300):
    pid = os.fork()
    if not pid:
        if in_fork:
            torch.set_num_threads(2)
        os._exit(raised())
    count += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
print(count)
PYTHON
race=$("$folder/env/bin/python" forks.py set -)
mended=$("$folder/env/bin/python" forks.py set set)
never=$("$folder/env/bin/python" forks.py - -)
echo "forks in which a thread raised: $race; with set_num_threads in the fork: $mended; number never set by the parent: $never"
[ "$race" -gt 0 ] && [ "$mended" -eq 0 ] && [ "$never" -eq 0 ] || { echo "the behaviour has changed" >&2; exit 1; }
