"""Run a program by an interpreter with megatron-energon: `python rival_run.py PROGRAM ARGUMENTS...`.

The process ends without the interpreter's own end, where that package (7.4.1) may hang: an unfinished iterator waits
for a lock of the watchdog, whose thread is gone by then.
"""

import multiprocessing
import os
import runpy
import sys

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()
    sys.stdout.flush()
    os._exit(0)
