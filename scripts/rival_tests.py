"""Runs the tests of megatron-energon, from a checkout of its public repository, on the drop-in of this package.

    scripts/rival-tests                                       a checkout is made of its repository, in .cache
    scripts/rival-tests --source ~/megatron-energon           of a folder, or of any URL that git knows
    scripts/rival-tests -k test_dataset.py --verbose          some

Nothing of that repository becomes a part of this one. `rival-tests.txt` lists the tests that fail, with the reason, and
which of them count as failed; a test that fails and is not in the list, and one in the list that passes, end this with
status 1.

Each file runs in a process of its own, by unittest, which is what its tests are written for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = "https://github.com/NVIDIA/Megatron-Energon"
LIST = HERE / "rival-tests.txt"

RUNNER = """
import json, os, sys, unittest
sys.path.insert(0, os.getcwd())
from energon_bridge.compat import install
install(trust_remote_code=True)  # in processes that are spawned, too, which run this file again

class Result(unittest.TextTestResult):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = {}
    def startTest(self, test):
        super().startTest(test)
        self.seen[test.id().split(".", 2)[-1]] = "passed"
    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.seen[test.id().split(".", 2)[-1]] = f"failed: {err[0].__name__}: {err[1]}"
    addError = addFailure
    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.seen[test.id().split(".", 2)[-1]] = f"skipped: {reason}"
    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.seen[test.id().split(".", 2)[-1]] = f"failed: {err[0].__name__}: {err[1]}"

def main(name, wanted, out):
    loader = unittest.TestLoader()
    if wanted:
        loader.testNamePatterns = [f"*{wanted}*"]
    try:
        suite = loader.loadTestsFromName(f"tests.{name}")
    except Exception as error:
        suite, seen = None, {"import": f"failed: {type(error).__name__}: {error}"}
    if loader.errors:
        suite, seen = None, {"import": "failed: " + loader.errors[0].strip().splitlines()[-1]}
    if suite is not None:
        seen = unittest.TextTestRunner(resultclass=Result, verbosity=2).run(suite).seen
    with open(out, "w") as file:
        json.dump(seen, file)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def checkout(source: str) -> Path:
    """Return a folder with the repository: the source itself, or a copy of what git has there."""
    folder = Path(source).expanduser()
    if (folder / "tests").is_dir():
        return folder.resolve()
    target = HERE.parent / ".cache" / "megatron-energon"
    if not target.is_dir():
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", source, str(target)], check=True)
    return target


def excluded() -> dict[str, str]:
    """Return the tests that are left out, by file and name, with the reason of each."""
    found: dict[str, str] = {}
    reason = ""
    for line in LIST.read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if line.startswith(" "):
            found[line.strip()] = reason
        else:
            reason = line.strip()
    return found


def run_file(folder: Path, name: str, wanted: str, *, verbose: bool, seconds: float) -> dict[str, str]:
    """Run the tests of one file and return what became of each."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "seen.json"
        environment = os.environ | {"PYTHONPATH": str(HERE.parent), "TMPDIR": scratch}
        runner = Path(scratch) / "runner.py"
        runner.write_text(RUNNER)
        command = [sys.executable, str(runner), name, wanted, str(out)]
        shown = None if verbose else subprocess.DEVNULL
        try:
            subprocess.run(
                command, cwd=folder, env=environment, timeout=seconds, check=False, stdout=shown, stderr=shown
            )
        except subprocess.TimeoutExpired:
            return {"": f"failed: took more than {seconds:.0f} s"}
        if not out.exists():
            return {"": "failed: the process ended"}
        seen: dict[str, str] = json.loads(out.read_text())
        return seen


def main() -> int:
    """Run them and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=REPOSITORY, help="a checkout, or where git clones one from")
    parser.add_argument("-k", dest="only", default="", help="part of the name of a file, or file.py::part of a test")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a file")
    parser.add_argument("--verbose", action="store_true", help="show what the tests print")
    arguments = parser.parse_args()
    folder = checkout(arguments.source)
    file_part, _, test_part = arguments.only.partition("::")
    reasons = excluded()
    counts: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    wrong = []
    for path in sorted((folder / "tests").glob("test_*.py")):
        if file_part not in path.name:
            continue
        seen = run_file(folder, path.stem, test_part, verbose=arguments.verbose, seconds=arguments.timeout)
        for test, outcome in seen.items():
            name = f"{path.name}::{test}"
            reason = reasons.get(name) or reasons.get(f"{path.name}::*")
            passed = not outcome.startswith("failed")
            if reason is not None:
                counts["left out"] += 1
                left_out[reason] += 1
                if passed:
                    wrong.append(f"{name} passes now: take it from {LIST.name}")
            else:
                counts["passed" if passed else "failed"] += 1
                if not passed:
                    wrong.append(f"{name} {outcome.splitlines()[0][:300]}")
        print(f"{path.name}: {Counter(outcome.split(':')[0] for outcome in seen.values())}", flush=True)
    for line in wrong:
        print(line)
    for reason, number in left_out.most_common():
        print(f"left out, {number}: {reason}")
    still_open = sum(number for reason, number in left_out.items() if reason.startswith("OPEN"))
    total = counts["passed"] + counts["failed"] + still_open
    share = counts["passed"] / max(1, total)
    print(
        f"{counts['passed']} passed, {counts['failed']} failed, {still_open} are open: {share:.0%} of those that look "
        f"at neither inner parts, nor the random order, nor torchvision; {counts['left out'] - still_open} are left out"
    )
    ordered = sum(number for reason, number in left_out.items() if reason.startswith(("ORDER", "BUG")))
    print(f"with those of ORDER and BUG counted as failed: {counts['passed'] / max(1, total + ordered):.0%}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
