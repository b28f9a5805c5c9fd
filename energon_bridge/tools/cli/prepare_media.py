"""`energon prepare-media PATH`: metadata of media files, for a prepared dataset or a plain folder."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.tools.check.media import media_task, prepare_media
from energon_bridge.tools.cli.output import json_option
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


@click.command("prepare-media")
@click.argument("path", type=click.Path())
@progress_option
@workers_option
@engine_options
@task_options
@media_options
@tmp_option
@json_option
def command(
    path: str,
    progress: bool,
    num_workers: int,
    engine: str,
    address: str | None,
    task: str | None,
    finish: bool,
    media_metadata_by_glob: str | None,
    media_metadata_by_header: bool,
    media_metadata_by_extension: bool,
) -> dict[str, Any]:
    """Store metadata of the media files at PATH without decoding them: sizes of images, durations of videos and sound.

    PATH is a prepared dataset, whose key index the metadata is added to, or any folder of files, which can then be an
    auxiliary store of a crude dataset. One of the three filters says which files are media.

    Example:  energon prepare-media /data/videos --media-metadata-by-extension
    """
    media = media_filter(media_metadata_by_glob, media_metadata_by_header, media_metadata_by_extension)
    if media is None:
        raise ConfigurationError("give one of --media-metadata-by-glob, -by-header and -by-extension.")
    workers = choose_engine(engine, address, num_workers)
    one_task = chosen_task(task, finish=finish)
    with shard_progress("Reading media", enabled=progress) as advance:
        if one_task is not None:
            count = media_task(path, media, one_task, num_workers=workers, progress=advance)
        else:
            indexed = prepare_media(path, media, num_workers=workers, finish=finish, progress=advance)
    if one_task is not None:
        click.echo(f"Task {one_task}: read {count:,} shards or portions of files. After all tasks, run --finish.")
        return {"task": str(one_task), "shards": count}
    report_media(indexed)
    return asdict(indexed)
