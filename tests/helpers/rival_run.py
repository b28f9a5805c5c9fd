"""Run programs by an interpreter with megatron-energon: `python rival_run.py PROGRAM ARGUMENTS...`, or `-c CODE`.

Without arguments it reads them, a JSON list a line, runs each program in a fork that need not import the package again,
and answers with a line: the exit code, the output and the errors.

A process ends without the interpreter's own end, where that package (7.4.1) may hang: an unfinished iterator waits
for a lock of the watchdog, whose thread is gone by then. One that hangs before is ended and run again, twice at most.
"""

import faulthandler
import gc
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback

SECONDS = 120
"""No program takes a tenth of it."""


def run(arguments):
    """Run a program, and end this process."""
    code = 0
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "-c", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            sys.path[0] = os.path.dirname(sys.argv[0])
            runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve():
    """Run the programs that come by standard input."""
    import megatron.energon  # noqa: F401
    import torch.utils.data._utils

    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.1  # its workers do not end by themselves: five seconds each
    gc.freeze()  # it collects garbage every few samples: not among all that was imported
    for line in sys.stdin:
        for _ in range(3):
            code, output, errors = run_forked(json.loads(line))
            if not errors.startswith("Timeout (") and "\nTimeout (" not in errors:
                break
        print(json.dumps([code, output, errors]), flush=True)  # noqa: T201


def run_forked(arguments):
    """Run a program in a fork; return its exit code, output and errors, which end with its stacks where it hung."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = os.fork()
        if not process:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            run(arguments)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        output.seek(0)
        errors.seek(0)
        return code, output.read(), errors.read()


if __name__ == "__main__":
    if sys.argv[1:]:
        run(sys.argv[1:])
    serve()
