"""`energon prepare-media PATH`, and the filters of media files that `energon prepare` takes as well."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import click

from energon_bridge.cli.engines import engine_options, task_of, task_options, workers_of, workers_option
from energon_bridge.cli.output import json_option
from energon_bridge.cli.progress import shard_progress
from energon_bridge.errors import ConfigurationError
from energon_bridge.format.media import MediaFilter
from energon_bridge.prepare.media import IndexedMedia, media_task, prepare_media

Command = TypeVar("Command", bound=Callable[..., Any])

_SHOWN = 5


def media_options(command: Command) -> Command:
    """Add the three filters of media files to a command."""
    for option in (
        click.option(
            "--media-metadata-by-extension", is_flag=True, help="Look into the media files that their extensions tell."
        ),
        click.option(
            "--media-metadata-by-header", is_flag=True, help="Look into the media files that their first bytes tell."
        ),
        click.option(
            "--media-metadata-by-glob",
            default=None,
            metavar="PATTERNS",
            help="Look into the media files whose names match one of these: '*.jpg,*.png'.",
        ),
    ):
        command = option(command)
    return command


def _use_folder(context: click.Context, _: click.Parameter, folder: str | None) -> None:
    if folder is not None:
        before = tempfile.tempdir
        context.call_on_close(lambda: setattr(tempfile, "tempdir", before))
        tempfile.tempdir = folder


tmp_option = click.option(
    "--tmp-path",
    type=click.Path(exists=True, file_okay=False, writable=True),
    callback=_use_folder,
    expose_value=False,
    help="Folder for temporary files: the index of a dataset behind a URL, what is sorted. [default: the system's]",
)


def media_filter(by_glob: str | None, by_header: bool, by_extension: bool) -> MediaFilter | None:
    """Return the filter that the options choose, None without any."""
    if (by_glob is not None) + by_header + by_extension > 1:
        raise ConfigurationError("the --media-metadata-by-… options exclude each other: use one.")
    if by_glob is not None:
        return MediaFilter(strategy="GLOB", patterns=by_glob)
    if by_header:
        return MediaFilter(strategy="HEADER")
    return MediaFilter(strategy="EXTENSION") if by_extension else None


def report_media(found: IndexedMedia) -> None:
    """Report how many media files were read, and which could not be."""
    click.echo(f"Done: stored metadata for {found.num_files:,} files.")
    if found.failed:
        shown = ", ".join(found.failed[:_SHOWN]) + (", ..." if len(found.failed) > _SHOWN else "")
        click.echo(f"{len(found.failed):,} files could not be read: {shown}")


@click.command("prepare-media")
@click.argument("path", type=click.Path())
@click.option("--progress/--no-progress", default=True, help="Show a progress bar.")
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
    workers, one = workers_of(engine, address, num_workers), task_of(task, finish=finish)
    with shard_progress("Reading media", enabled=progress) as advance:
        if one is not None:
            count = media_task(path, media, one, num_workers=workers, progress=advance)
        else:
            found = prepare_media(path, media, num_workers=workers, finish=finish, progress=advance)
    if one is not None:
        click.echo(f"Task {one}: read {count:,} shards or portions of files. After all tasks, run --finish.")
        return {"task": str(one), "shards": count}
    report_media(found)
    return asdict(found)
