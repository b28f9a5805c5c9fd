"""`energon convert SOURCE OUT`: inspects the source, proposes how to turn it into a dataset, and writes it.

On a terminal each proposal is a question that Enter accepts; elsewhere the proposals and flags apply as they are.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np

from energon_bridge.core.errors import ConfigurationError, SampleError, SkipSample, SourceError
from energon_bridge.core.format.field_map import describe_fields
from energon_bridge.core.format.media import MAX_PIXELS
from energon_bridge.core.format.tar import parse_sample
from energon_bridge.core.format.tar_index import index_name
from energon_bridge.core.prepare.split import SplitRule, parse_ratio
from energon_bridge.core.samples import CrudeSample, sample_type_by_name
from energon_bridge.core.storage import open_store
from energon_bridge.models.conversations.parts import Medium, medium_by_name
from energon_bridge.models.conversations.questions import AnswersAs, filled, template_columns
from energon_bridge.models.conversations.turns import find_pair, read_turns
from energon_bridge.models.conversations.withheld import first_held_out
from energon_bridge.tools.check.media import TO_LEAVE_OUT_LONG, TO_SCALE_DOWN
from energon_bridge.tools.cli.assistant import shorten
from energon_bridge.tools.cli.output import count_of, format_bytes, json_option
from energon_bridge.tools.cli.prepare_options import (
    choose_engine,
    chosen_task,
    engine_options,
    progress_option,
    shard_progress,
    task_options,
    workers_option,
)
from energon_bridge.tools.columns.stored import read_columns
from energon_bridge.tools.convert.conversations import by_options, is_conversation
from energon_bridge.tools.convert.conversion import (
    check_first_files,
    convert,
    convert_task,
    message_of,
    stopped,
    without_repeated,
)
from energon_bridge.tools.convert.finish import SKIPPED, Converted, shards_before
from energon_bridge.tools.convert.group_splits import groups_in, parted_groups
from energon_bridge.tools.convert.hub import download, is_hub, stream
from energon_bridge.tools.convert.lists import (
    answers_of,
    asking_column,
    check_beside,
    check_captions,
    check_media_meant,
    check_whole,
    media_order,
    other_text,
    propose_layout,
    text_of_media,
    unused,
)
from energon_bridge.tools.convert.options import ConvertOptions
from energon_bridge.tools.convert.rows import Layout, Row, Source, check_layout, first_rows, is_filled
from energon_bridge.tools.convert.shard_plan import propose_samples_per_shard, sample_at, split_numbers
from energon_bridge.tools.convert.sources import KINDS, open_source
from energon_bridge.tools.convert.speech import PROMPT
from energon_bridge.tools.convert.split_rows import by_own_split

_SHOWN = 3
_KEPT = ("WebDataset", "mix")  # whose samples stay as they are
_WITHOUT_TURNS = (*_KEPT, "folder", "COCO")
_WITH_TEXTS = ("WebDataset", "folder of pairs")  # which --question makes conversations
_LOOKED_AT = 20  # samples, for the media that they have
_LOOKED_AHEAD = 1000
_OMNI = "qwen2.5_omni_instruct"
_KEY = "__key__"
_TRAINED = ("CaptioningSample", "ImageClassificationSample", "VQASample")
_TOLD = (
    "Leave the column out with --ignore COLUMN, or write the text of the question: --question '{COLUMN}\\n{question}'."
)
_DOUBTFUL = (
    "an answer that may be a missing value (N/A, None, null, nan), learned as it stands (to leave one out, take it out "
    "of the source)",
    "entities or tags of HTML in a text (&amp;, <br>), learned as they stand (unescape or remove them in the source)",
    "tokens of models in a text (<|im_end|>, <image>), which models that know them do not read as letters, or training "
    "refuses (take them out of the source, or write them with a space inside)",
    f"a picture far larger than others of its shard. {TO_SCALE_DOWN}",
    f"a picture of more than {MAX_PIXELS:,} pixels, which training refuses to decode. To scale such down: energon "
    f"convert --max-pixels {MAX_PIXELS} --overwrite, or fewer",
)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@click.command("convert")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(KINDS), default=None, help="What the source is, if it is not recognised.")
@click.option("--media", type=click.Path(path_type=Path), help="Folder that paths are relative to. [default: beside]")
@click.option("--prompt", default=None, help=f"Of speech: the question about each sound. [default: {PROMPT}]")
@click.option("--stream", "streaming", is_flag=True, help="Of the hub: read parquet files by ranges; no download.")
@click.option("--sample-type", default=None, help="Class name: CaptioningSample, CrudeSample, ...")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="FIELD=COLUMN",
    help="Column of a field: caption=captions[0], 'caption={title}: {text}'.",
)
@click.option("--split-ratio", default=None, help="Shares of train, val and test, by sample: 99,1,0.")
@click.option(
    "--split-by", default=None, metavar="COLUMN", help="Rows with one value of this column are in one split part."
)
@click.option("--shuffle", type=int, default=None, metavar="SEED", help="Shuffle the samples of each split part.")
@click.option("--samples-per-shard", type=click.IntRange(min=1), default=None, help="Samples in each shard, exactly.")
@click.option(
    "--bytes-per-shard", default=None, metavar="SIZE", help="No larger shards: 500M, 1Gi. Looks at all first."
)
@click.option("--max-pixels", type=click.IntRange(min=1), default=None, help="Scale down images that have more pixels.")
@click.option("--quality", type=click.IntRange(1, 100), default=None, help="Encode JPEG and WebP images again.")
@click.option("--keys", type=click.Choice(["keep", "number"]), default="keep", help="Keys of a WebDataset's samples.")
@click.option("--on-error", type=click.Choice(["stop", "skip"]), default="stop", help="What samples that fail do.")
@click.option("--ignore", "ignored", multiple=True, metavar="COLUMN", help="A column that is left out.")
@click.option("--question", default=None, metavar="TEXT", help="Text of a question: '{passage}\\n{question}'.")
@click.option(
    "--answers-as",
    type=click.Choice(["letter", "text", "index", "number"]),
    help="What answers to choices are; an index counts from 0, a number from 1. [default: by the first rows]",
)
@click.option("--preferred", is_flag=True, help="Of lists of preferences (DPO, KTO), take the preferred answers only.")
@click.option("--media-metadata/--no-media-metadata", default=True, help="Write down sizes and lengths of media.")
@click.option("--checksums", is_flag=True, help="Keep checksums of all samples and parts, which readers compare.")
@click.option("--dry-run", is_flag=True, help="Look at the first samples only, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace what is in OUT.")
@click.option("--ask/--no-ask", default=None, help="Ask about the proposals. [default: on a terminal]")
@workers_option
@engine_options
@task_options
@progress_option
@json_option
def command(
    source: Path,
    out: Path,
    kind: str | None,
    media: Path | None,
    prompt: str | None,
    streaming: bool,
    sample_type: str | None,
    fields: tuple[str, ...],
    split_ratio: str | None,
    split_by: str | None,
    shuffle: int | None,
    samples_per_shard: int | None,
    bytes_per_shard: str | None,
    max_pixels: int | None,
    quality: int | None,
    keys: str,
    on_error: str,
    ignored: tuple[str, ...],
    question: str | None,
    answers_as: AnswersAs | None,
    preferred: bool,
    media_metadata: bool,
    checksums: bool,
    dry_run: bool,
    overwrite: bool,
    ask: bool | None,
    num_workers: int,
    engine: str,
    address: str | None,
    task: str | None,
    finish: bool,
    progress: bool,
) -> dict[str, Any] | None:
    """Make a prepared dataset in the folder OUT of SOURCE.

    SOURCE is a JSON, JSONL, CSV or TSV file that names media files (conversations of LLaVA, ShareGPT and OpenAI, COCO
    captions, NeMo manifests, any table), a folder of pictures with captions beside them, a folder for each class or
    with metadata for each split, parquet files, a Hugging Face dataset on disk or of the hub (hf://OWNER/NAME), a
    folder of Kaldi, or a WebDataset to be sharded or shuffled again.
    Media are copied as they are, unless --max-pixels or --quality says otherwise.

    Run again after a kill, it continues; if the source grew at its end, it adds shards of the new samples.

    \b
    energon convert llava.json data/llava --media images
    energon convert photos data/photos --split-ratio 9,1,0 --dry-run
    energon convert metadata.csv data/faces --field caption=description
    energon convert tars data/shuffled --shuffle 1 --bytes-per-shard 1Gi
    energon convert photos data/small --max-pixels 1000000
    energon convert hf://OWNER/NAME data/name --stream
    energon convert big.parquet data/big --task $SLURM_ARRAY_TASK_ID/16
    """
    one_task = chosen_task(task, finish=finish)
    fields, key = _without_key(fields)
    if out.absolute() == source.absolute():
        raise ConfigurationError(f"{out}: this is the source itself. Write to another folder.")
    limit = _size(bytes_per_shard) if bytes_per_shard is not None else None
    if streaming:
        _check_streaming(source, shuffle, limit)
        opened = stream(source)
    else:
        source = download(source) if is_hub(source) else source
        answer = None if sample_type is not None else _given_fields(fields).get("answers")
        is_numbered = keys == "number"
        opened = open_source(
            source, kind=kind, media=media, numbered=is_numbered, num_workers=num_workers, prompt=prompt, answer=answer
        )
        if answer is not None and getattr(opened, "prompt", None) is not None:
            fields = tuple(text for text in fields if not text.startswith("answers="))
    asking = (_is_terminal() and not task and not finish) if ask is None else ask
    shown = opened.where if "://" in opened.where else source  # `Path` leaves one slash
    click.echo(f"{shown}: {opened.kind}, {count_of(len(opened), 'sample')}.")
    in_splits = bool(opened.split_parts)
    told_by = None
    if not in_splits and split_ratio is None and opened.kind != "mix":
        given = _given_fields(fields).values()
        taken = {*ignored, *(name for one in given for name in template_columns(one) or [one.partition("[")[0]])}
        opened, told_by = by_own_split(opened, source, taken)
    if opened.left_out:
        click.echo(f"Left out: {', '.join(opened.left_out)}.")
    check_first_files(opened, ignored)
    of_rows = Layout(sample_type="CrudeSample", ignored=ignored, question=question, answers_as=answers_as)
    layout = replace(_layout(opened, sample_type, fields, of_rows, asking=asking), preferred=preferred, key=key)
    if key is not None:
        _check_key(opened, key)
    if not in_splits and len(opened.split_parts) < 2 and opened.kind not in _KEPT:
        layout = replace(layout, held_out=first_held_out(row.values for row in first_rows(opened)))
    check_layout(layout)
    asked = None if opened.kind in _WITH_TEXTS and layout.question else question
    flags = {"--preferred": preferred, "--ignore": ignored, "--question": asked, "--answers-as": answers_as}
    if opened.kind.startswith(_WITHOUT_TURNS) and (
        flag := next((name for name, value in flags.items() if value), None)
    ):
        raise ConfigurationError(f"{flag} is for lists and tables, but {shown} is a {opened.kind}: leave it out.")
    rule = _rule(opened, split_ratio, asking=asking)
    if split_by is not None and rule is None:
        told = told_by or "the source"
        raise ConfigurationError(f"--split-by is for ratios, but {told} tells the splits: leave it out, or give both.")
    if samples_per_shard is None and limit is None:
        samples_per_shard = propose_samples_per_shard(opened, layout)
        if asking:
            samples_per_shard = click.prompt("Samples in a shard", default=samples_per_shard, type=click.IntRange(1))
    options = ConvertOptions(
        layout=layout,
        split=rule,
        split_by=split_by,
        shuffle=shuffle,
        samples_per_shard=samples_per_shard,
        bytes_per_shard=limit,
        media=media_metadata,
        checksums=checksums,
        skip_errors=on_error == "skip",
        max_pixels=max_pixels,
        quality=quality,
    )
    _show(opened, options, told_by)
    if dry_run:
        looked_at = min(_LOOKED_AHEAD if hasattr(opened, "entry") else _SHOWN, len(opened))  # of lists, for their files
        layout = without_repeated(opened, options, looked_at).layout
        if (bad := _failing(opened, layout, range(looked_at), options)) and not options.skip_errors:
            raise stopped(*bad, is_all=looked_at == len(opened))
        _show_some(bad, f"Skipped {count_of(len(bad), 'sample')}", f"which a run names in {out}/{SKIPPED}")
        which = "at all" if looked_at == len(opened) else "only at the first"
        click.echo(
            f"A dry run: it looked {which} {looked_at:,} samples, and wrote nothing to {out}. Whether all media can be "
            "opened, a run says."
        )
        return None
    doing = choose_engine(engine, address, num_workers)
    with shard_progress("Converting samples", enabled=progress) as advance:
        if one_task is not None:
            if overwrite:
                raise ConfigurationError(f"--overwrite cannot be used with --task: remove {out}, then start the tasks.")
            count = convert_task(opened, out, options, one_task, num_workers=doing, progress=advance)
            click.echo(f"Task {one_task}: {count_of(count, 'shard')} done. After all tasks, run this with --finish.")
            return {"task": str(one_task), "shards": count}
        before = {*shards_before(out)}
        done = convert(opened, out, options, num_workers=doing, overwrite=overwrite, finish=finish, progress=advance)
    _report(out, done, options)
    if before and (added := done.shard_counts.keys() - before) and done.num_reused:
        _report_grown(out, len(added))
    return asdict(done)


def _check_streaming(source: Path, shuffle: int | None, limit: int | None) -> None:
    if not is_hub(source):
        raise ConfigurationError(f"{source}: --stream is for datasets of the hub, hf://OWNER/NAME. Leave it out.")
    if shuffle is not None or limit is not None:
        raise ConfigurationError(
            "--stream reads files in order: --shuffle or --bytes-per-shard would read them many times. Leave out "
            "--stream, or use --samples-per-shard and shuffle the dataset afterwards."
        )


def _is_terminal() -> bool:
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except ValueError:  # it was closed
        return False


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise ConfigurationError(f"--bytes-per-shard {text!r}: expected a size like 500M, 1G or 1Gi.")
    return size


def _layout(
    source: Source, sample_type: str | None, fields: tuple[str, ...], of_rows: Layout, *, asking: bool
) -> Layout:
    """Return the layout that the source proposes, changed by flags and answers to questions.

    `of_rows` has what flags say of all rows: ignored columns, the template of a question, what answers are.
    """
    if source.kind in _WITH_TEXTS and of_rows.question and not (sample_type or fields):
        if named := template_columns(of_rows.question):
            raise ConfigurationError(f"--question names {named[0]!r}, but a {source.kind} has no columns.")
        return replace(of_rows, bare=source.propose().bare)
    if source.kind in _KEPT:
        return _chosen_layout(source, source.propose(), sample_type, fields, asking=asking)
    rows = first_rows(source)
    if sample_type is None:
        check_captions(rows)
        check_media_meant(rows, "convert without them: --sample-type CrudeSample")
        kept = [by_options(row, replace(of_rows, question=None, answers_as=None)) for row in rows]
        check_whole(kept, "learn the texts alone: --sample-type TextSample --field text=COLUMN.")
    columns = {name for row in rows for name in (*row.files, *row.values)}
    for column in (*of_rows.ignored, *template_columns(of_rows.question or "")):
        if column not in columns:
            flag = "--ignore" if column in of_rows.ignored else "--question"
            raise ConfigurationError(
                f"{flag} names {column!r}, but the first rows have no such column; they have "
                f"{', '.join(sorted(columns))}."
            )
    proposed = source.propose()
    text = ""
    if of_rows.question is not None and fields and sample_type is None:
        sample_type = "VQASample"
    if of_rows.question is not None and sample_type is not None and not _is_crude(sample_type):
        fields = (*fields, f"context={of_rows.question}")
        text = "" if of_rows.question in columns else of_rows.question
        of_rows = replace(of_rows, question=None)
    if of_rows.question is not None:
        of_rows = replace(of_rows, answers_as=of_rows.answers_as or answers_of(rows))
    if of_rows.ignored or of_rows.question:
        proposed = propose_layout([by_options(row, of_rows) for row in rows])
    layout = _chosen_layout(source, proposed, sample_type, fields, text, asking=asking)
    if of_rows.question is not None and hasattr(source, "prompt"):
        raise ConfigurationError("--question is not for lists of speech: write the question about sounds as --prompt")
    if of_rows.question is not None and not layout.is_crude:  # by an answer to a question of ours
        raise ConfigurationError(f"--question makes conversations, which a {layout.sample_type} is not.")
    given = of_rows.answers_as or (answers_of(rows) if layout.is_crude else None)
    layout = replace(layout, ignored=of_rows.ignored, question=of_rows.question, answers_as=given)
    check_beside(rows, layout, _TOLD)
    return layout


def _chosen_layout(
    source: Source, proposed: Layout, sample_type: str | None, fields: tuple[str, ...], text: str = "", *, asking: bool
) -> Layout:
    """Return a layout with the given type and fields; one that is `text` is that, not the name of a column."""
    name = sample_type or proposed.sample_type
    if sample_type is None and asking:
        name = click.prompt("Sample type", default=name)
    cls = sample_type_by_name(name)
    given = _given_fields(fields)
    templates = {f"{field}_composed": one for field, one in given.items() if one == text or template_columns(one)}
    given |= {field: f"{field}_composed" for field in given if f"{field}_composed" in templates}
    if _is_crude(name):
        return Layout(sample_type="CrudeSample", fields=given, bare=proposed.bare)
    rows = first_rows(source)
    files = list(dict.fromkeys(column for row in rows for column in row.files))
    guess = proposed.fields if name == proposed.sample_type else _guessed(source, proposed, cls, files)
    described = describe_fields(cls)
    chosen = {field: column for field, column in guess.items() if any(field == one for one, _, _ in described)} | given
    if asking:
        chosen |= _asked_fields([one for one in described if one[0] not in given], chosen)
    wanted = {column.partition("[")[0] for column in chosen.values()}
    columns = {*files, *(column for row in rows for column in row.values)}
    if source.kind not in _KEPT:  # whose fields name parts
        _check_columns({field: one for field, at in chosen.items() if (one := templates.get(at, at)) != text}, columns)
    first_file = next((column for column in files if column in wanted), None)
    return replace(
        proposed,
        sample_type=cls.__name__,
        fields=chosen,
        templates=templates,
        bare=proposed.bare or (frozenset([first_file]) if first_file is not None else frozenset()),
    )


def _is_crude(sample_type: str) -> bool:
    return issubclass(sample_type_by_name(sample_type), CrudeSample)


def _guessed(source: Source, proposed: Layout, cls: type, files: list[str]) -> dict[str, str]:
    """Guess the fields of a type that was not proposed: of conversations, the first image and the first answer."""
    fields = dict(proposed.fields)
    names = {name for name, _, _ in describe_fields(cls)}
    if "image" in names and "image" not in fields and files:
        column = "images" if "images" in files else files[0]
        first = next(row.files[column] for row in first_rows(source) if column in row.files)
        fields["image"] = f"{column}[0]" if isinstance(first, tuple) else column
    columns = {name for row in first_rows(source) for name in row.values}
    fields |= {name: name for name in names & columns if name not in fields}
    row = first_rows(source, 1)[0]
    for column, text in (("conversations", "value"), ("messages", "content")):
        turns = row.values.get(column)
        if isinstance(turns, list) and {"caption", "context"} & names:
            roles = [str(turn.get("from", turn.get("role"))) for turn in turns]
            asks = next((n for n, role in enumerate(roles) if role in ("human", "user")), 0)
            says = next((n for n, role in enumerate(roles) if role in ("gpt", "assistant")), len(roles) - 1)
            fields |= {"caption": f"{column}[{says}][{text}]", "context": f"{column}[{asks}][{text}]"}
    return fields


def _rule(source: Source, split_ratio: str | None, *, asking: bool) -> SplitRule | None:
    if split_ratio is not None:
        return parse_ratio(split_ratio)
    if source.split_parts:
        return None
    proposed = "9,1,0" if len(source) < 10_000 else "99,1,0"
    return parse_ratio(click.prompt("Shares of train, val and test", default=proposed) if asking else proposed)


def _show(source: Source, options: ConvertOptions, told_by: str | None) -> None:
    layout = options.layout
    click.echo(f"Sample type: {layout.sample_type}")
    for field, column in layout.fields.items():
        click.echo(f"  {field} from {repr(layout.templates[column]) if column in layout.templates else column}")
    if (prompt := getattr(source, "prompt", None)) is not None:
        click.echo(f"  conversations about sounds, each with the question {prompt!r} (--prompt gives another)")
        if (text := getattr(source, "text", None)) is not None:
            click.echo(f"  answers from {text} (--field answers=COLUMN takes others)")
    rows = first_rows(source) if layout.is_crude and source.kind not in _KEPT else ()
    if rows and layout.question is None and not any(is_conversation(row.values) for row in rows):
        click.echo("  all columns as they are, and no fields: training needs a cooker, or another --sample-type")
        if (asked := asking_column(rows)) is not None:
            click.echo(f"  to make conversations: --question '{{{asked}}}'")
        elif (found := text_of_media(rows)) is not None:
            click.echo(f"  to ask for {found[0]}: --question '{found[1]}'")
    if rows and layout.question is not None:
        with suppress(SampleError):  # its sample says so
            values = rows[0].values
            click.echo(f"  answer from {filled(layout.question, values, find_pair(values), layout.answers_as)[1]}")
    looked_at = first_rows(source) if source.kind not in _KEPT else []
    if layout.key is not None:
        click.echo(f"  keys from {layout.key}, with _ for dots")
    is_dealt = options.split is not None and sum(bool(ratio) for _, ratio in options.split.ratios) > 1
    groups = groups_in(source, options.split_by) if is_dealt else None
    by = [options.split_by or getattr(source, "grouped_by", None) or ""] * (groups is not None)
    told = unused(looked_at, layout, [*template_columns(getattr(source, "prompt", None) or layout.key or ""), *by])
    for what, names in told:
        click.echo(f"  {what}: {', '.join(names)}")
    lists = {name for row in looked_at for name, of in row.files.items() if isinstance(of, tuple) and of[1:]}
    several = [name for access in layout.fields.values() if (name := access.removesuffix("[0]")) in lists]
    if several:
        click.echo(f"  only the first file of {', '.join(several)} is used; to keep all: --sample-type CrudeSample")
    more = several + [name for name in dict(told).get("not used", ()) if any(name in row.files for row in looked_at)]
    if more and "context" in layout.fields and "answers" in layout.fields:
        click.echo(f"  to show {', '.join(more)}, too: leave out --field, with the answers in a column `answer`")
    for medium, names in media_order(looked_at, layout):
        click.echo(f"  {medium}s in the order {', '.join(names)} (for another, write one list `{medium}s`)")
    if "context" in layout.fields and "answers" not in layout.fields and layout.sample_type == "VQASample":
        click.echo("  no column seems to have the answers, which training needs: --field answers=COLUMN")
    if told_apart := other_text(looked_at, layout):
        click.echo(f"  to take {told_apart[0]} instead: {told_apart[1]}")
    elif "caption" in layout.fields and not source.kind.startswith(_WITHOUT_TURNS):
        column = layout.fields["caption"]
        answers = shlex.quote(f"answers={layout.templates.get(column, column)}")
        click.echo(f"  no question is asked; to ask one: --question 'Describe the picture.' --field {answers}")
    if layout.sample_type == "ImageSample":
        click.echo("  no text: training needs one, or an encoder of yours")
        if texts := _text_columns(looked_at, dict(told).get("not used", ())):
            flags = f"--sample-type CaptioningSample --field caption={texts[0]}"
            click.echo(f"  columns that look like captions: {', '.join(texts)}; to take one: {flags}")
    if options.split is None:
        parts = ", ".join(f"{name} {count:,}" for name, count in source.split_parts)
    else:
        parts = ", ".join(f"{name} {float(ratio):g}" for name, ratio in options.split.ratios if ratio)
    if groups is not None:
        what = "speakers" if options.split_by is None else f"values of {options.split_by}"
        named = [str(one) for one in groups if is_filled(one)]
        parts += f", by {len({*named}):,} {what}: none is in two splits"
        if alone := len(groups) - len(named):
            first = sample_at(source, layout, [*map(is_filled, groups)].index(False)).where
            parts += f" (but {count_of(alone, 'sample')} without one, such as {first}, dealt out by number)"
    column = told_by.partition("the column ")[2] if told_by and "," in parts else ""  # of one part, ratios do alone
    ignored = f" --ignore {column}" * bool(column)
    click.echo(f"Split: {parts}" + f", as {told_by} says (--split-ratio{ignored} gives another)" * bool(told_by))
    if groups is None:
        _show_parted(source, options.split, ignored)
    if options.reencodes:
        click.echo("Sizes are before scaling images down.")
    for number in range(min(_SHOWN, len(source))):
        try:
            sample = source.sample(number, layout)
            parts = ", ".join(f"{name} ({format_bytes(size)})" for name, size in sample.sizes())
        except (SourceError, SkipSample) as error:
            if not options.skip_errors and isinstance(error, SourceError):
                ahead = range(number, min(_LOOKED_AHEAD, len(source)))
                bad = _failing(source, layout, ahead, options)
                raise stopped(*bad, is_all=ahead.stop == len(source)) from error
            click.echo(f"Sample {number} is skipped: {error}")
            continue
        click.echo(f"Sample {sample.key}: {parts}")
        values = source.row(number).values
        if values:
            click.echo("  " + str(shorten(values)))


def _failing(source: Source, layout: Layout, numbers: Iterable[int], options: ConvertOptions) -> list[str]:
    """Return what is wrong with samples, of which none is read; with `skip_errors`, also why they are left out."""
    bad: list[str] = []
    for number in numbers:
        sample = sample_at(source, layout, number)
        try:
            sample.sizes()
        except (SourceError, SampleError, SkipSample) as error:
            if options.skip_errors or not isinstance(error, SkipSample):
                bad.append(message_of(sample, error))
    return bad


def _show_parted(source: Source, rule: SplitRule | None, ignored: str) -> None:
    """Print which speakers, products and the like are in several splits, and what keeps each in one."""
    if rule is None:
        numbers = np.split(np.arange(len(source)), np.cumsum([count for _, count in source.split_parts])[:-1])
    else:
        numbers = [*split_numbers(len(source), rule).values()]
    for column, count in parted_groups(source, numbers, are_told=rule is None):
        remedy = f"--split-by {column} keeps each in one"
        if rule is None:
            remedy = f"to deal them out anew, each to one: --split-ratio 9,1,0 --split-by {column}{ignored}"
        click.echo(f"  {count_of(count, 'value')} of {column} in several splits: {remedy}")


def _asked_fields(described: Sequence[tuple[str, bool, str]], proposed: Mapping[str, str]) -> dict[str, str]:
    """Ask for the columns of fields, of optional ones only if a column is proposed."""
    return {
        field: click.prompt(f"Column of {field} ({kind})", default=proposed.get(field), type=str)
        for field, required, kind in described
        if required or field in proposed
    }


def _without_key(fields: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
    """Return the fields without that of keys, and the column or template of these as a template."""
    key = _given_fields(fields).get(_KEY)
    others = tuple(text for text in fields if not text.startswith(f"{_KEY}="))
    return others, key if key is None or template_columns(key) else f"{{{key}}}"


def _check_key(source: Source, key: str) -> None:
    if source.kind in _KEPT:
        raise ConfigurationError(f"--field {_KEY}: samples of a {source.kind} keep their keys, or get --keys number.")
    rows = first_rows(source)
    _check_columns({_KEY: key}, {column for row in rows for column in (*row.files, *row.values)})


def _given_fields(fields: tuple[str, ...]) -> dict[str, str]:
    """Return the column of each field that `--field` names."""
    given: dict[str, str] = {}
    for text in fields:
        field, equals, column = text.partition("=")
        if not equals or not field or not column:
            raise ConfigurationError(f"--field {text!r}: expected FIELD=COLUMN, like caption=description.")
        given[field] = column
    return given


def _check_columns(chosen: Mapping[str, str], columns: set[str]) -> None:
    """Raise ConfigurationError for a field of a column, or of a template with one, that is not there."""
    for field, text in chosen.items():
        for column in template_columns(text) or [text.partition("[")[0]]:
            if column not in columns:
                named = f" as {column!r}" if template_columns(text) else ""
                raise ConfigurationError(
                    f"--field {field}={text}: the first rows have no such column{named}; they have "
                    f"{', '.join(sorted(columns))}."
                )


def _report(out: Path, done: Converted, options: ConvertOptions) -> None:
    for part, shards in done.split_parts.items():
        if shards:
            count = sum(done.shard_counts[shard] for shard in shards)
            click.echo(f"{part}: {count_of(count, 'sample')} in {count_of(len(shards), 'shard')}")
    for part, ratio in options.split.ratios if options.split is not None else ():
        if ratio and not done.split_parts.get(part):
            click.echo(f"{part}: no samples, because its share is too small. Set a larger one with --split-ratio.")
    if options.layout.preferred:
        click.echo(f"Left out {count_of(done.num_rejected, 'rejected answer')} of samples with a preferred one.")
    if done.num_reused:
        click.echo(f"Unchanged: {count_of(done.num_reused, 'shard')}.")
    _report_doubtful(out, done, options)
    total = count_of(sum(done.shard_counts.values()), "sample")
    click.echo(f"Done: {total} in {count_of(len(done.shard_counts), 'shard')} in {out}.")
    _report_next(out, done, options.layout)


def _report_grown(out: Path, added: int) -> None:
    """Print what new shards mean for runs and mixes that have the dataset."""
    click.echo(
        f'{out} grew by {count_of(added, "shard")}: runs from before resume on it with on_mismatch="adapt" '
        "(training: data.on_mismatch=adapt) only, begin its epoch again and drop those of its samples that wait in "
        "packs; new samples in a dataset of their own, in a mix, cost them nothing."
    )
    if names := ", ".join(read_columns(open_store(out))):
        click.echo(f"Mixes that use its columns ({names}) stop until you add these again: energon columns add {out} …")


def _report_doubtful(out: Path, done: Converted, options: ConvertOptions) -> None:
    """Print which samples were skipped or say nothing, and which files cannot be opened."""
    count = count_of(len(done.empty), "sample")
    if options.layout.is_crude:
        empty = f"{count} with an empty answer, from which a model learns to say nothing"
        remedy = 'to leave one out, take it out of the list, or give its turn "weight": 0'
    else:
        what = "caption" if "caption" in options.layout.fields else "text or answer"
        empty = f"{count} with an empty {what}: training skips and counts those that have no text to learn"
        remedy = "an encoder of your own gets them; to leave one out, take it out of the source"
    doubtful = zip((done.missing, done.escaped, done.marked, done.large, done.too_large), _DOUBTFUL, strict=True)
    for many, title, rest in (
        (done.skipped, f"Skipped {count_of(len(done.skipped), 'sample')}", f"all in {out}/{SKIPPED}"),
        (done.empty, f"{empty} ({remedy})", "which --json lists"),
        *((many, f"{count_of(len(many), 'sample')} with {what}", "which --json lists") for many, what in doubtful),
    ):
        _show_some(many, title, rest)
    if done.num_long:
        click.echo(f"{count_of(done.num_long, 'sound')} of more than 30 s. {TO_LEAVE_OUT_LONG}.")
    if done.num_unread:
        others = done.num_unread - done.num_unread_images
        each = (done.num_unread_images, "image"), (others, "video or sound file")
        said = " and ".join(f"{count_of(count, noun)} cannot be opened" for count, noun in each if count)
        needs = [*done.needed, *["PyAV: pip install 'energon-bridge[video]'"] * (others and find_spec("av") is None)]
        remedy = "" if options.skip_errors else " --overwrite --on-error skip leaves them out."
        click.echo(f"{said}: energon lint {out} names them.{remedy}")
        for one in needs:
            click.echo(f"  Some may need a package. {one}, then energon prepare-media {out}")


def _show_some(many: Sequence[str], title: str, rest: str) -> None:
    for message in [f"{title}:", *(f"  {one}" for one in many[:5])] if many else ():
        click.echo(message)
    if len(many) > 5:
        click.echo(f"  … and {len(many) - 5:,} more, {rest}")


def _report_next(out: Path, done: Converted, layout: Layout) -> None:
    """Print what to do with the dataset."""
    media: set[Medium | None] | None = {"image"} if layout.sample_type in _TRAINED else None
    if layout.is_crude:
        shard, count = next(iter(done.shard_counts.items()))
        media = _media_of_conversations(out, shard, min(count, _LOOKED_AT))
    if media is None:
        click.echo(f"Look at it: energon preview {out}")
        return
    click.echo(f"Try it with a tiny model: {train_line(out, media)}")
    if _twin(media) == _OMNI:
        click.echo("The processor of this model needs torchvision.")
    elif "image" in media and "video" not in media:
        click.echo(
            "Others for images: configs/tiny/idefics3_instruct.yaml (tiles), mllama_instruct.yaml (cross-attention)"
        )


def _media_of_conversations(out: Path, shard: str, count: int) -> set[Medium | None] | None:
    """Return the kinds of media of the first samples of a shard, if they are conversations."""
    store = open_store(out)
    offsets = np.frombuffer(store.read_range(index_name(shard), 0, 8 * (count + 1)), "<u8").tolist()
    media: set[Medium | None] = set()
    for start, end in pairwise(offsets):
        _, parts = parse_sample(store.read_range(shard, start, end - start), where=store.url(shard))
        try:
            values = json.loads(bytes(parts.get("json", b"")))
            if not isinstance(values, dict) or read_turns(values) is None:
                return None
        except (ValueError, SampleError):
            return None
        media.update(map(medium_by_name, parts))
    return media


def _twin(media: Collection[Medium | None]) -> str:
    """Return the configuration of a tiny model that takes these media."""
    if "audio" not in media:
        return "qwen2.5_vl_instruct"
    return _OMNI if {"image", "video"} & set(media) else "qwen2_audio_instruct"


def train_line(out: Path, media: Collection[Medium | None]) -> str:
    """Return the command that trains a tiny model on a converted dataset."""
    config = f"configs/tiny/{_twin(media)}.yaml"
    return f"python -m energon_bridge.training --config {config} data.path={os.fspath(out)}"


def _text_columns(rows: Sequence[Row], columns: Iterable[str]) -> list[str]:
    """Return those of some columns that have several words in most rows."""
    said = {name: [str(row.values.get(name) or "").strip() for row in rows] for name in columns}
    return [name for name, texts in said.items() if 2 * sum(" " in one for one in texts) > len(texts)]
