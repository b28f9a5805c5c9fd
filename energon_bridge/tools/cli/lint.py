"""`energon lint PATH`: reads and decodes every sample; exit code 1 if one does not load."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import combinations

import click

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.parallel import Task, Workers
from energon_bridge.tools.check.lint import (
    LEAVE_OUT,
    Problem,
    lint_dataset,
    lint_encoded,
    lint_mix,
    lint_parts,
    lint_splits,
    makes_packs,
)
from energon_bridge.tools.check.media import TO_LEAVE_OUT_LONG, TO_SCALE_DOWN
from energon_bridge.tools.cli.output import count_of, print_json
from energon_bridge.tools.cli.prepare_options import (
    choose_engine,
    chosen_task,
    config_options,
    engine_options,
    progress_option,
    shard_progress,
)
from energon_bridge.tools.cli.quarantine import print_excludes
from energon_bridge.tools.cli.run_options import load_encoder

_MAX_SHOWN = 100
_MAX_NAMED = 10
_TAKEN = f"The field map takes all alike. To leave one out, {LEAVE_OUT}."
_SURPRISES = {
    "blank": (
        "an empty text",
        "Training skips and counts a sample without a text to learn; from an empty answer a model learns to say "
        f"nothing. To leave one out, {LEAVE_OUT}.",
    ),
    "missing": (
        "an answer that may be a missing value (N/A, None, null, nan)",
        f"It is learned as it stands. To leave one out, {LEAVE_OUT}.",
    ),
    "escaped": (
        "entities or tags of HTML in a text (&amp;, <br>)",
        "They are learned as they stand: unescape or remove them in the source.",
    ),
    "marked": (
        "tokens of models in a text (<|im_end|>, <image>)",
        "Models that know them do not read them as letters, or training refuses: take them out of the source.",
    ),
    "raw": ("an image that no decoder takes", "It stays bytes, and a batch of it and others fails as a whole."),
    "turned": ("an image that its EXIF or XMP turns", "Training turns them with data.autorotate=true only."),
    "unopened": ("a video or sound, not opened", "To check them: pip install 'energon-bridge[video]'"),
    "silent": (
        "a sound in which nothing is heard",
        f"The model learns its answer without it. To leave one out, {LEAVE_OUT}.",
    ),
    "cancelled": (
        "a sound whose channels cancel each other",
        "Their mean, which the model hears, is nearly silent: write it with one channel.",
    ),
    "loud": ("a sound whose samples lie beyond [-1, 1]", "They are taken as they are: scale them."),
    "long": ("a sound of more than 30 s", f"{TO_LEAVE_OUT_LONG}."),
    "large": ("a picture far larger than others of its shard", f"{TO_SCALE_DOWN}."),
    "rejected": ("a key beside its fields by which annotators rejected it", _TAKEN),
    "held_out": ("a key beside its fields that says it is held out, unlike others of its shard", _TAKEN),
    "changed": (
        "a key beside its fields that says its media are turned, mirrored or faster",
        "That is not applied: if it should be, change its file beforehand.",
    ),
}
"""The message, with the remedy, for each list of keys in a `ShardReport`."""


@dataclass(slots=True, kw_only=True)
class _Problems:
    """The problems so far; they are printed as they are found, but for JSON."""

    quiet: bool
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bad: set[tuple[str, str, str | None, str]] = field(default_factory=set)
    shown: int = 0
    remedies: Counter[str] = field(default_factory=Counter)

    def add(self, problem: Problem) -> None:
        self.bad.add(_identity(problem))
        self.remedies[problem.remedy] += 1
        self.shown += 1
        if self.quiet:
            self.problems.append(problem)
        elif self.shown <= _MAX_SHOWN:
            click.echo(str(problem))

    def warn(self, warning: str) -> None:
        self.warnings.append(warning)
        if not self.quiet:
            click.echo(f"Warning: {warning}")


@click.command("lint")
@click.argument("path", type=click.Path())
@click.option("--split-parts", default=None, help="Parts to check, separated by commas. Default: all.")
@config_options
@click.option("--encoder", default=None, metavar="MODULE:ENCODER", help="Run this task encoder over all samples, too.")
@click.option("--processor", default=None, metavar="MODEL", help="The same with conversations as this model gets them.")
@click.option("--deep", is_flag=True, help="Compare the checksums of all parts, too (energon prepare --checksums).")
@click.option("--duplicates", is_flag=True, help="Name samples of equal content, too; by `hash` columns if there.")
@click.option("--excludes", is_flag=True, help="Print entries for `exclude` of each dataset's split.yaml instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: ok, checked, samples, empty, warnings, problems.")
@click.option("--parallel", default=1, show_default=True, type=click.IntRange(min=1), help="Number of processes.")
@engine_options
@click.option("--task", default=None, metavar="NUMBER/COUNT", help="Check one share of the shards: 0/16 to 15/16.")
@click.option("--trust-remote-code", is_flag=True, help="Run the sample_loader that comes with a dataset.")
@progress_option
def command(
    path: str,
    split_parts: str | None,
    dataset_config: str,
    split_config: str,
    encoder: str | None,
    processor: str | None,
    deep: bool,
    duplicates: bool,
    excludes: bool,
    as_json: bool,
    parallel: int,
    engine: str,
    address: str | None,
    task: str | None,
    trust_remote_code: bool,
    progress: bool,
) -> None:
    """Check the dataset at PATH (a folder, a .jsonl file, a mix, or a URL of one) sample by sample.

    Every index is compared with .info.json, every sample is read and decoded as in training; excluded samples are left
    out. Whatever does not load is named with dataset, split part, shard, key and part, and the exit code is 1. Of a
    mix, the datasets of all splits are checked, its joins are looked up, and so are the shards of its `aux` stores.

    \b
    energon lint /data/captions --split-parts train,val --parallel 8
    energon lint mix.yaml --encoder mine:encoder --json
    energon lint /data/captions --duplicates
    energon lint /data/captions --task 3/16
    """
    one_task = chosen_task(task, finish=False)
    encodes = encoder or processor
    if one_task is not None and (encodes is not None or duplicates):
        raise ConfigurationError("--task checks shards: run --encoder, --processor and --duplicates without it.")
    made = load_encoder(encoder, processor)
    parts = tuple(part.strip() for part in split_parts.split(",")) if split_parts else ()
    problems = _Problems(quiet=as_json or excludes)
    opened, empty = _opened(path, parts, dataset_config, split_config, problems, trust=trust_remote_code)
    datasets = [dataset for dataset, _ in opened]
    workers = choose_engine(engine, address, parallel)
    if deep and (bare := [dataset for dataset in datasets if not dataset.has_checksums]):
        raise ConfigurationError(
            f"{bare[0].path} has no checksums for --deep: energon prepare {bare[0].path} --checksums --force-overwrite"
        )
    checked = 0
    groups: dict[str, dict[str, set[str]]] = {}
    for dataset, of_splits in opened:
        with shard_progress(f"Checking {dataset.split_part or path}", enabled=progress) as advance:
            checked += _check(
                dataset,
                problems,
                advance,
                [groups.setdefault(split, {}) for split in of_splits],
                workers=workers,
                task=one_task,
                deep=deep,
                cooks=encodes is None,
            )
    _warn_of_groups(groups, problems)
    if encodes is not None and makes_packs(made):
        problems.warn(
            f"Packs and batches of {encodes} were not tried, only its samples. To make some: energon preview {path} "
            f"--encoder {encodes} --packing-buffer-size 100 --batch-size 1"
        )
    for split in _splits(path, datasets, parts) if encodes is not None else ():
        count, failed = lint_encoded(
            path,
            split,
            made,
            num_workers=parallel if parallel > 1 else 0,
            dataset_config=dataset_config,
            split_config=split_config,
            trust_remote_code=trust_remote_code,
        )
        if not problems.quiet:
            click.echo(f"{split}: {encodes} encodes {count_of(count, 'sample')}, {len(failed):,} fail.")
        for problem in failed:
            problems.add(problem)
    if duplicates:
        _find_duplicates(datasets, problems, workers)
    total = sum(dataset.num_samples - len(dataset.excluded) for dataset in datasets)
    if one_task is not None:
        total = sum(_samples_of_task(dataset, one_task) for dataset in datasets)
    if excludes:
        _print_excludes(problems.problems, as_json=as_json)
    else:
        _report(problems, checked, total, empty, as_json=as_json)
    if problems.bad:
        sys.exit(1)


def _opened(
    path: str, parts: tuple[str, ...], dataset_config: str, split_config: str, problems: _Problems, *, trust: bool
) -> tuple[list[tuple[PreparedDataset, list[str]]], list[str]]:
    """Return the split parts to check, with the splits that have them, and the names of the empty ones.

    What is wrong with their files is a problem.
    """
    empty: list[str] = []
    if path.endswith(".yaml"):
        if (dataset_config, split_config) != ("dataset.yaml", "split.yaml"):
            raise ConfigurationError(
                f"{path} is a mix, which names these files for each dataset: leave the options out."
            )
        datasets, failed, doubts = lint_mix(path, split_parts=parts, trust_remote_code=trust)
    else:
        parts_of_one, empty = lint_parts(
            path,
            split_parts=parts,
            split_config=split_config,
            dataset_config=dataset_config,
            trust_remote_code=trust,
        )
        datasets = [(one, [one.split_part]) for one in parts_of_one]
        failed, doubts = lint_splits(path, split_config=split_config, dataset_config=dataset_config)
    for doubt in doubts:
        problems.warn(doubt)
    for problem in failed:
        problems.add(problem)
    for part in empty if not problems.quiet else ():
        click.echo(f"The split part {part!r} is empty.")
    return datasets, empty


def _check(
    dataset: PreparedDataset,
    problems: _Problems,
    advance: Callable[[int, int], object],
    groups: list[dict[str, set[str]]],
    *,
    workers: Workers,
    task: Task | None,
    deep: bool,
    cooks: bool,
) -> int:
    """Check the shards of a split part, or those of a task; return the number of samples."""
    checked = 0
    surprises: dict[str, list[str]] = {name: [] for name in _SURPRISES}
    count = len(dataset.shard_names if task is None else task.of(dataset.shard_names))
    reports = lint_dataset(dataset, num_workers=workers, task=task, deep=deep, conversations=cooks)
    for number, report in enumerate(reports, start=1):
        checked += report.num_checked
        for name, keys in surprises.items():
            keys += [f"{report.shard}/{key}" for key in report.named.get(name, ())]
        for problem in report.problems:
            problems.add(problem)
        for name, values in report.groups.items():
            for of_split in groups:
                of_split.setdefault(name, set()).update(values)
        advance(number, count)
    for name, keys in surprises.items():
        if keys:
            what, remedy = _SURPRISES[name]
            where = f"{dataset.path}, {dataset.split_part or 'all'}"
            samples = count_of(len(keys), "sample")
            rest = f" and {len(keys) - _MAX_NAMED:,} more" * (len(keys) > _MAX_NAMED)
            problems.warn(f"{where}: {samples} with {what}: {', '.join(keys[:_MAX_NAMED])}{rest}. {remedy}")
    return checked


def _warn_of_groups(groups: dict[str, dict[str, set[str]]], problems: _Problems) -> None:
    """Warn of speakers, products and the like that several splits have: a model is tested on what it has learned."""
    for (split, of_one), (other, of_other) in combinations(groups.items(), 2):
        for name in sorted(of_one.keys() & of_other.keys()):
            if shared := of_one[name] & of_other[name]:
                problems.warn(
                    f"{count_of(len(shared), 'value')} of {name} in {split} and in {other}, such as {min(shared)!r}. "
                    f"To have none in both, convert all of it at once, with --split-ratio 9,1,0 --split-by {name}."
                )


def _find_duplicates(datasets: list[PreparedDataset], problems: _Problems, workers: Workers) -> None:
    from energon_bridge.tools.columns.making import COMPARED, find_equal_samples

    leaks, repeats, shared = find_equal_samples(datasets, num_workers=workers)
    for problem in (*leaks, *repeats):
        problems.add(problem)
    if shared:
        others = count_of(shared, "sample")
        problems.warn(f"{others} with the media of an earlier one of the same split part, and another text or JSON.")
    if not problems.quiet:
        found = count_of(len(leaks) + len(repeats), "duplicate") if leaks or repeats else "No duplicates"
        between = f", {len(leaks):,} of them of another split part" if leaks else ""
        click.echo(f"{found}{between}. {COMPARED}")


def _samples_of_task(dataset: PreparedDataset, task: Task) -> int:
    """Return the number of samples in the shards of a task that are not excluded."""
    shards = task.of(range(len(dataset.shard_names)))
    names = {dataset.shard_names[shard] for shard in shards}
    excluded = sum(shard in names for shard, _ in dataset.excluded)
    return int(dataset.shard_counts[list(shards)].sum()) - excluded


def _splits(path: str, datasets: list[PreparedDataset], parts: tuple[str, ...]) -> list[str]:
    if not path.endswith(".yaml"):
        return [dataset.split_part or "val" for dataset in datasets]
    from energon_bridge.core.mix import metadataset_splits, resolve_path

    return list(parts) or metadataset_splits(resolve_path(path, base=os.getcwd(), where="PATH"))


def _print_excludes(problems: list[Problem], *, as_json: bool) -> None:
    """Print the bad samples of tars as entries; on stderr, how many problems no entry leaves out."""
    entries: dict[str, dict[str, None]] = {}
    others = 0
    for one in problems:
        if one.key is not None and one.shard.endswith(".tar"):
            entries.setdefault(one.dataset, {})[f"{one.shard}/{one.key}"] = None
        else:
            others += 1
    print_excludes({dataset: [*names] for dataset, names in entries.items()}, as_json=as_json)
    if others:
        click.echo(
            f"{count_of(others, 'problem')} of other kinds: energon lint without --excludes names them.", err=True
        )


def _report(problems: _Problems, checked: int, total: int, empty: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "ok": not problems.bad,
                "checked": checked,
                "samples": total,
                "empty": empty,
                "warnings": problems.warnings,
                "problems": [asdict(problem) for problem in problems.problems],
            }
        )
        return
    if problems.shown > _MAX_SHOWN:
        click.echo(f"... and {problems.shown - _MAX_SHOWN} more.")
    if not problems.bad:
        click.echo("The one sample loads." if checked == 1 else f"All {checked:,} samples load.")
        return
    where = f" in {count_of(checked, 'sample')}"
    if checked < total:  # shards that cannot be read
        where = f"; {checked:,} of {count_of(total, 'sample')} could be checked"
    for remedy, count in problems.remedies.items():
        if remedy:
            click.echo(f"{count_of(count, 'problem')}: {remedy}")
    click.echo(f"Failed: {count_of(len(problems.bad), 'problem')}{where}.")


def _identity(problem: Problem) -> tuple[str, str, str | None, str]:
    """Identify a bad sample, so that one with two broken parts counts once."""
    return problem.dataset, problem.shard, problem.key, "" if problem.key is not None else problem.message
