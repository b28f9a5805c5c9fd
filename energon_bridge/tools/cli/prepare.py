"""`energon prepare PATH`: by flags alone, or as an assistant that asks for what they leave open."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from energon_bridge.core.errors import ConfigurationError, MetadataError, NotPreparedError
from energon_bridge.core.format.jsonl import index_jsonl, is_jsonl
from energon_bridge.core.format.key_index import NEW_KEYS
from energon_bridge.core.format.nvmeta import INFO_JSON, meta_path, prepared_within, read_info, refuse_meta_path
from energon_bridge.core.prepare.indexing import Prepared, prepare_dataset, rebuild_index, scan_task
from energon_bridge.core.prepare.split import SplitRule, find_shards, parse_patterns, parse_ratio
from energon_bridge.core.samples import CrudeSample, sample_type_by_name
from energon_bridge.core.storage import Store, open_store
from energon_bridge.models.conversations.parts import medium_by_name
from energon_bridge.models.conversations.withheld import says_held_out
from energon_bridge.tools.check.dataset_yaml import (
    check_found,
    parse_field_map,
    read_first_samples,
    render_dataset_yaml,
)
from energon_bridge.tools.cli.assistant import ask_dataset_yaml, ask_field_map, ask_ratio, show_first_samples
from energon_bridge.tools.cli.output import count_of, json_option, listed
from energon_bridge.tools.cli.prepare_options import (
    choose_engine,
    chosen_task,
    engine_options,
    media_filter,
    media_options,
    progress_option,
    report_media,
    shard_progress,
    task_options,
    tmp_option,
    workers_option,
)


@click.command("prepare")
@click.argument("path", type=click.Path())
@progress_option
@click.option("--split-ratio", default=None, help="Shares of train, val and test: 8,1,1 or 0.8,0.1,0.1.")
@click.option(
    "--split-parts",
    multiple=True,
    metavar="NAME:PATTERN",
    help="Split by a regular expression that matches shard paths, instead of by ratio; can be given several times.",
)
@click.option("--exclude", default=None, metavar="PATTERN", help="Leave out tars whose path contains this pattern.")
@click.option("--sample-type", default=None, help="Class name: CaptioningSample, CrudeWebdataset, ...")
@click.option("--field-map", default=None, metavar="JSON", help='Parts of the fields: \'{"image": "jpg,png"}\'.')
@workers_option
@engine_options
@task_options
@click.option("--shuffle-tars", is_flag=True, help="Shuffle the tars (always alike) before splitting by ratio.")
@click.option("--tar-index-only", is_flag=True, help="Only write the indexes of a prepared dataset again.")
@click.option("--key-index/--no-key-index", default=True, help="Write index.sqlite, which looks samples up by key.")
@click.option("--checksums", is_flag=True, help="Keep checksums of all samples and parts, which readers compare.")
@click.option("--fix-duplicates", is_flag=True, hidden=True, help="Of megatron-energon; refused.")
@click.option("--force-overwrite", is_flag=True, help="Prepare again without asking.")
@click.option("--skip-dataset-yaml", is_flag=True, help="Write no dataset.yaml.")
@click.option("--dataset-yaml-name", default="dataset.yaml", show_default=True, help="Name of the file to write.")
@media_options
@tmp_option
@click.option("--non-interactive", is_flag=True, help="Never ask.")
@click.option("--trust-remote-code", is_flag=True, help="Of a mix: open datasets that bring code of their own.")
@json_option
def command(
    path: str,
    progress: bool,
    split_ratio: str | None,
    split_parts: tuple[str, ...],
    exclude: str | None,
    sample_type: str | None,
    field_map: str | None,
    num_workers: int,
    engine: str,
    address: str | None,
    task: str | None,
    finish: bool,
    shuffle_tars: bool,
    tar_index_only: bool,
    key_index: bool,
    checksums: bool,
    fix_duplicates: bool,
    force_overwrite: bool,
    skip_dataset_yaml: bool,
    dataset_yaml_name: str,
    media_metadata_by_glob: str | None,
    media_metadata_by_header: bool,
    media_metadata_by_extension: bool,
    non_interactive: bool,
    trust_remote_code: bool,
) -> dict[str, Any] | None:
    """Prepare the WebDataset tars below PATH (a folder or URL) for training, or the joins of the mix PATH (a .yaml).

    Writes a .tar.idx next to every tar, and .nv-meta with the samples per shard, the split, the sample type and the
    key index, in the formats of Megatron Energon. Either all of it is written or nothing changes.

    Tars that have not changed since PATH was prepared are not read again (--tar-index-only reads all of them).

    With --checksums the tars are read whole, and CRC-32 of all samples and parts kept, also of tars that are added
    later. Training compares some of them, `energon lint --deep` all.

    Of a .jsonl file, its index is written beside it. Of a mix (a .yaml), the joins of all splits are looked up once,
    and kept in PATH.cache.

    \b
    energon prepare /data/captions                      asks what it needs to know
    energon prepare /data/captions --non-interactive --split-ratio 8,1,1
            --sample-type CaptioningSample --field-map '{"image": "jpg", "caption": "txt"}'
    energon prepare mix.yaml
    energon prepare /data/captions --task 3/16          a share of the tars, then once --finish
    """
    if fix_duplicates:
        raise ConfigurationError(f"--fix-duplicates: tars are never changed. For new, unique keys: {NEW_KEYS}")
    chosen = chosen_task(task, finish=finish)
    media = media_filter(media_metadata_by_glob, media_metadata_by_header, media_metadata_by_extension)
    if is_jsonl(path) or path.endswith(".yaml"):
        if any((split_ratio, split_parts, sample_type, tar_index_only, media, chosen, finish, checksums)):
            what = "a JSONL file" if is_jsonl(path) else "a mix"
            raise ConfigurationError(f"{path} is {what}: these options are for the folder of a dataset.")
        if is_jsonl(path):
            return _prepare_jsonl(path)
        _prepare_mix(path, num_workers=num_workers, trust=trust_remote_code, progress=progress)
        return None
    workers = choose_engine(engine, address, num_workers)
    if chosen is not None:
        if split_ratio or split_parts or sample_type or tar_index_only or media:
            raise ConfigurationError("--task only scans tars: use these options with --finish, or with prepare-media.")
        with shard_progress("Looking into tars", enabled=progress) as advance:
            count = scan_task(path, chosen, exclude=exclude, num_workers=workers, checksums=checksums, progress=advance)
        click.echo(f"Task {chosen}: {count_of(count, 'tar')} done. After all tasks, run --finish.")
        return {"task": str(chosen), "shards": count}
    if tar_index_only:
        _check_index_only(checksums=checksums, finish=finish, media=media is not None)
        with shard_progress("Indexing shards", enabled=progress) as advance:
            prepared = rebuild_index(path, num_workers=workers, key_index=key_index, progress=advance)
        click.echo(f"Indexed {_counted(prepared)}.")
        return asdict(prepared)
    _check_combinations(split_ratio, split_parts, sample_type, field_map, skip_dataset_yaml=skip_dataset_yaml)
    if os.path.isfile(path):
        raise ConfigurationError(
            f"{path}: this is a file, but `energon prepare` takes a folder of tars. Convert it first: "
            f"energon convert {path} OUT"
        )
    store = open_store(path)
    store.check_root()
    refuse_meta_path(store.root, path)
    _confirm_overwrite(store, force=force_overwrite, non_interactive=non_interactive)
    shards = find_shards(store, exclude=exclude)
    if not force_overwrite:
        _refuse_datasets_within(store, shards)
    named = f"; the first is {shards[0]}, the last is {shards[-1]}" if len(shards) > 1 else f": {shards[0]}"
    click.echo(f"Found {count_of(len(shards), 'tar file')}{named}.")
    rule = _split_rule(split_ratio, split_parts, shuffle=shuffle_tars, non_interactive=non_interactive)
    if split_ratio is not None and (held_out := [name for name in shards if says_held_out(name)]):
        click.echo(
            f"Warning: {held_out[0]} seems to be held out, and --split-ratio deals out shards whatever their names: "
            "use --split-parts to take them by their names."
        )
    dataset_yaml = None
    if not skip_dataset_yaml:
        dataset_yaml = _dataset_yaml(
            store, shards[0], dataset_yaml_name, sample_type, field_map, non_interactive=non_interactive
        )
    with shard_progress("Indexing shards", enabled=progress) as advance:
        prepared = prepare_dataset(
            path,
            split=rule,
            exclude=exclude,
            num_workers=workers,
            key_index=key_index,
            dataset_yaml=dataset_yaml,
            dataset_yaml_name=dataset_yaml_name,
            media=media,
            finish=finish,
            checksums=checksums,
            progress=advance,
        )
    if prepared.media is not None:
        report_media(prepared.media)
    _report(store, prepared, dataset_yaml_name)
    _report_empty(rule, prepared, len(shards))
    return asdict(prepared)


def _prepare_jsonl(path: str) -> dict[str, int]:
    """Write the index of a JSONL file."""
    count = index_jsonl(path)
    click.echo(f"Found {count_of(count, 'sample')}.")
    click.echo(f"Done: wrote {path}.idx.")
    return {"samples": count}


def _check_index_only(*, checksums: bool, finish: bool, media: bool) -> None:
    """Raise ConfigurationError for options that have no effect with --tar-index-only."""
    if checksums:
        raise ConfigurationError("--tar-index-only makes existing checksums again by itself: leave out --checksums.")
    if finish:
        raise ConfigurationError("--tar-index-only reads all tars itself: leave out --finish.")
    if media:
        raise ConfigurationError(
            "--tar-index-only keeps existing media metadata; to read it again, use `energon prepare-media`."
        )


def _report_empty(rule: SplitRule, prepared: Prepared, num_shards: int) -> None:
    """Print which parts of the split have no shard, though they have a share."""
    for part, ratio in rule.ratios:
        if ratio and not prepared.split_parts.get(part):
            click.echo(
                f"{part}: empty, because its share of {count_of(num_shards, 'shard')} is less than one. Prepare again "
                "with a larger share (--split-ratio … --force-overwrite), or let `energon convert` split by sample."
            )


def _prepare_mix(path: str, *, num_workers: int, trust: bool, progress: bool) -> None:
    from energon_bridge.tools.check.joins import mix_joins, prepare_join, remove_unused  # imports torch

    joins = mix_joins(path)
    indexes = set()
    for split_part, join in joins:
        with shard_progress(f"Joining {split_part}", enabled=progress) as advance:
            prepared = prepare_join(join, num_workers=num_workers, trust_remote_code=trust, progress=advance)
        click.echo(
            f"{split_part}: Joined {prepared.num_rows:,} of {prepared.num_samples:,} samples of {prepared.primary}."
        )
        indexes.add(prepared.index)
    for name in remove_unused(path, indexes):
        click.echo(f"Removed {name}, which no split uses.")
    if not joins:
        click.echo(f"{path} has no joins: nothing to prepare.")


def _check_combinations(
    split_ratio: str | None,
    split_parts: tuple[str, ...],
    sample_type: str | None,
    field_map: str | None,
    *,
    skip_dataset_yaml: bool,
) -> None:
    if split_ratio is not None and split_parts:
        raise ConfigurationError("--split-ratio and --split-parts exclude each other: use one.")
    if field_map is not None and sample_type is None:
        raise ConfigurationError("--field-map needs --sample-type, the class with its fields.")
    if skip_dataset_yaml and sample_type is not None:
        raise ConfigurationError("--skip-dataset-yaml and --sample-type exclude each other.")


def _confirm_overwrite(store: Store, *, force: bool, non_interactive: bool) -> None:
    try:
        read_info(store)
    except NotPreparedError:
        return
    except MetadataError as error:  # a damaged preparation counts too: preparing again repairs it
        click.echo(str(error))
    if force:
        return
    if non_interactive:
        raise ConfigurationError(f"{store.root}: already prepared. Use --force-overwrite to prepare it again.")
    if not click.confirm("The dataset has been prepared before. Prepare it again?"):
        raise ConfigurationError(f"{store.root}: left as it is.")


def _refuse_datasets_within(store: Store, shards: Sequence[str]) -> None:
    infos = [name for name, _ in store.list(INFO_JSON) if name.endswith(f"/{meta_path(INFO_JSON)}")]
    roots = [name.removesuffix(meta_path(INFO_JSON)) for name in infos]
    if roots := [root[:-1] for root in roots if any(shard.startswith(root) for shard in shards)]:
        raise ConfigurationError(
            f"{store.root}: {prepared_within(roots)} --force-overwrite makes one dataset of all tars instead."
        )


def _split_rule(
    split_ratio: str | None, split_parts: tuple[str, ...], *, shuffle: bool, non_interactive: bool
) -> SplitRule:
    if split_parts:
        return parse_patterns(split_parts)
    if split_ratio is not None:
        return parse_ratio(split_ratio, shuffle=shuffle)
    if non_interactive:
        raise ConfigurationError("--non-interactive needs --split-ratio or --split-parts.")
    return ask_ratio(shuffle=shuffle)


def _dataset_yaml(
    store: Store, first_shard: str, name: str, sample_type: str | None, field_map: str | None, *, non_interactive: bool
) -> bytes | None:
    """Return the content of the dataset.yaml to write; None keeps the existing one."""
    fields = parse_field_map(field_map) if field_map is not None else None
    if sample_type is not None:
        cls = sample_type_by_name(sample_type)
        if fields is not None or non_interactive or issubclass(cls, CrudeSample):
            content = render_dataset_yaml(sample_type, fields)
            if fields:
                check_found(fields, read_first_samples(store, first_shard), shard=first_shard)
            return content
    elif non_interactive:
        if not store.exists(meta_path(name)):
            click.echo(f"Writing no {name}: for one, give --sample-type and --field-map.")
        return None
    samples = read_first_samples(store, first_shard)
    show_first_samples(first_shard, samples)
    if sample_type is not None:
        return render_dataset_yaml(sample_type, ask_field_map(cls, samples))
    return ask_dataset_yaml(samples, exists=store.exists(meta_path(name)), name=name)


def _counted(prepared: Prepared) -> str:
    return f"{count_of(prepared.num_samples, 'sample')} in {count_of(len(prepared.shard_counts), 'shard')}"


def _report(store: Store, prepared: Prepared, dataset_yaml_name: str) -> None:
    for part, shards in prepared.split_parts.items():
        count = sum(prepared.shard_counts[shard] for shard in shards)
        click.echo(f"{part}: {count_of(count, 'sample')} in {count_of(len(shards), 'shard')}")
    click.echo(f"Found the part types {', '.join(prepared.part_names[:10])}{' ...' * (len(prepared.part_names) > 10)}.")
    spelt = Counter(name.lower() for name in prepared.part_names)
    if alike := [name for name in prepared.part_names if spelt[name.lower()] > 1]:
        click.echo(f"Warning: {listed(alike)} are different parts: name all of them in field maps and cookers.")
    kinds = {medium_by_name(f"x.{name}") for name in prepared.part_names}
    if "audio" in kinds and {"txt", "json"}.intersection(prepared.part_names) == {"txt"}:
        flags = f"{shlex.quote(str(store.root))} OUT --question 'Transcribe the speech.'"
        click.echo(f"To make conversations of the sounds and their texts: energon convert {flags}")
    if not store.exists(meta_path(dataset_yaml_name)):
        click.echo(f"Write {store.url(meta_path(dataset_yaml_name))} before you load the dataset.")
    click.echo(f"Done: {_counted(prepared)}.")
