"""`energon columns`: numbers and texts by sample, beside the indexes, that filters read instead of samples."""

from __future__ import annotations

from typing import Any

import click

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.core.storage import open_store
from energon_bridge.tools.cli.output import count_of, listed, print_json, print_table
from energon_bridge.tools.cli.prepare_options import (
    choose_engine,
    chosen_task,
    engine_options,
    progress_option,
    shard_progress,
    task_options,
    workers_option,
)
from energon_bridge.tools.cli.run_options import encoder_of_model, load_encoder, named
from energon_bridge.tools.columns.making import (
    COMPARED,
    HASH_MADE_OF,
    ModelTokens,
    TokenCount,
    add_column,
    content_bytes,
    duplicates,
    hashes,
    image_size,
    remove_column,
    sound_seconds,
    turned_image_size,
)
from energon_bridge.tools.columns.stored import SIZE_MADE_OF, TURNED_SIZE_MADE_OF, read_columns


@click.group("columns")
def command() -> None:
    """Columns of a dataset: a number or a text for each sample, which filters use without reading any.

    \b
    energon columns add data/captions --image-size
    energon columns add data/captions words --of mine:count_words
    energon columns list data/captions
    """


@command.command("add")
@click.argument("path")
@click.argument("name", required=False)
@click.option("--of", "function", default=None, metavar="MODULE:FUNCTION", help="Call this with each decoded sample.")
@click.option("--raw", is_flag=True, help="With --of: call it with a dict of the sample's parts as bytes.")
@click.option(
    "--encoder", default=None, metavar="MODULE:ENCODER", help="Count the tokens that this task encoder makes."
)
@click.option(
    "--processor", default=None, metavar="MODEL", help="Count `tokens`, `image_tokens`, … of a model, folder or name."
)
@click.option("--image-size", "size", is_flag=True, help="`width` and `height` of the first image, of its header.")
@click.option("--autorotate", is_flag=True, help="With --image-size: as decoders with autorotate turn images.")
@click.option("--sound-seconds", "heard", is_flag=True, help="`sound_seconds` of all sounds, of their headers.")
@click.option("--hash", "hashed", is_flag=True, help="`hash` of media and texts, not ids, and `media_hash`.")
@click.option("--bytes", "counted", is_flag=True, help="`bytes` of all parts.")
@click.option("--missing", default=None, help="Value of samples that fail. [default: the first one stops]")
@click.option("--trust-remote-code", is_flag=True, help="Run the sample_loader that comes with a dataset.")
@workers_option
@engine_options
@task_options
@progress_option
def add(
    path: str,
    name: str | None,
    function: str | None,
    raw: bool,
    encoder: str | None,
    processor: str | None,
    size: bool,
    autorotate: bool,
    heard: bool,
    hashed: bool,
    counted: bool,
    missing: str | None,
    trust_remote_code: bool,
    num_workers: int,
    engine: str,
    address: str | None,
    task: str | None,
    finish: bool,
    progress: bool,
) -> None:
    """Compute the column NAME of the dataset at PATH, of all its samples; only new and changed shards the next time.

    \b
    energon columns add data/captions --image-size
    energon columns add data/captions tokens --encoder mine:encoder
    energon columns add data/chats --processor Qwen/Qwen2.5-VL-7B-Instruct
    energon columns add data/captions words --of mine:count_words
    energon columns add data/captions --hash --task 3/16    a share of the shards, then once --finish
    """
    one_task = chosen_task(task, finish=finish)
    chosen: list[tuple[str | None, Any, str, bool]] = []
    if function is not None:
        chosen.append((name, named(function, "--of", "mine:count_words"), function, raw))
    if encoder is not None:
        chosen.append((name or "tokens", TokenCount(load_encoder(encoder)), f"tokens of {encoder}", False))
    model = None if processor is None else encoder_of_model(processor)
    if model is not None:
        chosen.append((None, ModelTokens(model), f"tokens of {processor}", False))
    if autorotate and not size:
        raise ConfigurationError("--autorotate is for --image-size: leave it out.")
    for flag, of, made_of, fixed in (
        (size and not autorotate, image_size, SIZE_MADE_OF, None),
        (size and autorotate, turned_image_size, TURNED_SIZE_MADE_OF, None),
        (heard, sound_seconds, "sound_seconds of the content", "sound_seconds"),
        (hashed, hashes, HASH_MADE_OF, None),
        (counted, content_bytes, "bytes of the content", "bytes"),
    ):
        if flag:
            chosen.append((fixed, of, made_of, True))
    if len(chosen) != 1:
        raise ConfigurationError(
            "give exactly one of --of, --encoder, --processor, --image-size, --sound-seconds, --hash and --bytes."
        )
    column, call, made_of, as_bytes = chosen[0]
    workers = choose_engine(engine, address, num_workers)
    with shard_progress("Computing", enabled=progress) as advance:
        added = add_column(
            path,
            column,
            call,
            made_of=made_of,
            raw=as_bytes,
            missing=None if missing is None else _number(missing),
            decoder=None if model is None else model.decoder,
            num_workers=workers,
            trust_remote_code=trust_remote_code,
            task=one_task,
            finish=finish,
            progress=advance,
        )
    if one_task is not None:
        done = count_of(added.num_samples, "sample")
        click.echo(f"Task {one_task}: {done} done. After all tasks, run this with --finish.")
    else:
        again = added.num_samples - added.num_computed
        before = f", {again:,} of them known before" if again else ""
        click.echo(f"Added {listed(added.names)} of {count_of(added.num_samples, 'sample')}{before}.")
        if hashed:
            click.echo(COMPARED)
    if added.num_missing:
        click.echo(
            f"{count_of(added.num_missing, 'sample')} failed and got {missing}. The first: {added.first_missing}"
        )


@command.command("list")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_columns(path: str, as_json: bool) -> None:
    """Show the columns of the dataset at PATH.

    \b
    energon columns list data/captions --json
    """
    columns = read_columns(open_store(path))
    if as_json:
        print_json(
            [
                {"name": name, "kind": _kind(column.values), "samples": column.num_samples, "made_of": column.made_of}
                for name, column in columns.items()
            ]
        )
        return
    if not columns:
        click.echo(f"No columns. Add one: energon columns add {path} --image-size")
        return
    rows = [(name, _kind(column.values), column.made_of, f"{column.num_samples:,}") for name, column in columns.items()]
    print_table(("column", "kind", "made of", "samples"), rows, left=3)


@command.command("remove")
@click.argument("path")
@click.argument("name")
def remove(path: str, name: str) -> None:
    """Remove the column NAME of the dataset at PATH.

    \b
    energon columns remove data/captions words
    """
    remove_column(path, name)
    click.echo(f"Removed {name}.")


@command.command("duplicates")
@click.argument("path")
@click.option("--column", default="hash", show_default=True, help="Samples of one value in it are duplicates.")
def show_duplicates(path: str, column: str) -> None:
    """Count exact duplicates in the dataset at PATH by its column of hashes.

    \b
    energon columns add data/captions --hash
    energon columns duplicates data/captions
    """
    groups = duplicates(path, column)
    if not groups:
        click.echo(f"No duplicates. {COMPARED}" if column == "hash" else "No duplicates.")
        return
    of_equal = f"{count_of(len(groups), 'group')} of equal ones"
    click.echo(f"{count_of(sum(groups), 'sample')} in {of_equal}, the largest has {groups[0]:,}.")
    if column == "hash":
        click.echo(f"Their names: energon lint {path} --duplicates")


def _kind(values: tuple[str, ...] | None) -> str:
    return "number" if values is None else f"text ({len(values):,} different)"


def _number(text: str) -> float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
