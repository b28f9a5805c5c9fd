"""Says what failed, each sample once: in the log, at a rate that no bad dataset can exceed, and in a quarantine file.

One log serves all loaders of a dataset in a process. What it has said is not part of a state: a run that is resumed
in a new process says it again, and a quarantine file, which is read before it is added to, does not.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from energon_bridge.stream.policy import ErrorPolicy
from energon_bridge.stream.quarantine import Named, known_in, quarantine_file, write_reports
from energon_bridge.stream.report import Report

logger = logging.getLogger(__name__)

_REMEMBERED = 200_000
"""Failures that are told from new ones; a run with more of them has other worries."""


class FailureLog:
    """Says each failure once.

    Args:
        policy: How much is logged, and where the quarantine file is.
    """

    def __init__(self, policy: ErrorPolicy) -> None:
        self._policy = policy
        self._said: set[tuple[str, int, str, int]] = set()
        self._kinds: Counter[tuple[str, str, str]] = Counter()
        self._quarantined: dict[Path, set[Named]] = {}
        self._losses: set[tuple[str, str]] = set()

    def write(self, reports: Sequence[Report], rank: int, ranks: int) -> None:
        """Say what is new among some failures of a rank.

        Raises:
            StorageError: The quarantine file cannot be written.
        """
        fresh = []
        for report in reports:
            first = report.places[0]
            name = (first.dataset, first.index, report.hook, report.members)
            if name in self._said or len(self._said) >= _REMEMBERED:
                continue
            self._said.add(name)
            fresh.append(report)
            self._log(report)
        if fresh and self._policy.quarantine is not None:
            self._quarantine(quarantine_file(self._policy.quarantine, rank, ranks), fresh)

    def failures(self, dataset: str) -> str:
        """Return what failed in a dataset and how often, as far as this process has seen it."""
        kinds = [(n, f"{n} in {kind[1]} with {kind[2]}") for kind, n in self._kinds.items() if kind[0] == dataset]
        return ", ".join(text for _, text in sorted(kinds, reverse=True)[:5])

    def kinds(self) -> list[tuple[str, str, str, int]]:
        """Return dataset, hook and exception type of what failed, and how many different samples; most often first."""
        return [(*kind, number) for kind, number in self._kinds.most_common()]

    def is_new(self, dataset: str, cause: str) -> bool:
        """Return whether nobody has asked before about what a dataset loses by a cause."""
        before = len(self._losses)
        self._losses.add((dataset, cause))
        return len(self._losses) > before

    def _log(self, report: Report) -> None:
        self._kinds[report.kind] += 1
        number = self._kinds[report.kind]
        if number <= self._policy.messages:
            last = "; further ones of the kind are only counted" if number == self._policy.messages else ""
            logger.warning("skipped %s that failed in %s: %s%s", report.what, report.hook, report, last)
            if report.trace and number == 1:  # each worker sends one
                logger.debug("the first failure of its kind:\n%s", report.trace)
        elif str(number).strip("0") == "1":
            dataset, hook, error = report.kind
            logger.warning("%s: %d have failed in %s with %s, the last one %s", dataset, number, hook, error, report)

    def _quarantine(self, file: Path, reports: Sequence[Report]) -> None:
        known = self._quarantined.get(file)
        if known is None:
            known = self._quarantined[file] = known_in(file)
        lines = []
        for report in reports:
            name = (report.places[0].dataset, report.places[0].index, report.hook)
            if name not in known:
                known.add(name)
                lines.append(report)
        if lines:
            write_reports(file, lines)
