"""The questions of `energon prepare` on a terminal: ratio, sample type, and the part for each field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from energon_bridge.core.errors import ConfigurationError, FieldMapError
from energon_bridge.core.format.field_map import FieldMap, check_kinds, describe_fields
from energon_bridge.core.format.media import kind_by_name
from energon_bridge.core.prepare.split import SplitRule, parse_ratio
from energon_bridge.core.samples import sample_type_by_name, sample_type_names
from energon_bridge.tools.check.dataset_yaml import FirstSample, check_found, render_dataset_yaml

_CRUDE = "CrudeWebdataset"
_SHOWN_SAMPLES = 2
_MAX_TEXT = 25
_MAX_ITEMS = 3


def ask_ratio(*, shuffle: bool) -> SplitRule:
    """Ask for the shares of train, val and test until the answer makes sense."""
    while True:
        text = click.prompt('Shares of train, val and test, like "8,1,1" or "0.8, 0.1, 0.1"', default="8,1,1")
        try:
            return parse_ratio(text, shuffle=shuffle)
        except ConfigurationError as error:
            click.echo(str(error))


def show_first_samples(shard: str, samples: Sequence[FirstSample]) -> None:
    """Print keys, parts and shortened JSON of the first samples, and the part types of the first shard."""
    for sample in samples[:_SHOWN_SAMPLES]:
        click.echo(f"Sample {sample.key!r} of {shard} has the parts {', '.join(sample.parts)}.")
        if "json" in sample.parts:
            try:
                content = json.loads(sample.parts["json"])
            except ValueError as error:
                click.echo(f"Cannot read its json part: {error}")
            else:
                click.echo(json.dumps(shorten(content), indent=2, ensure_ascii=False))
    click.echo(f"Part types in the first shard: {', '.join(_part_names(samples))}")


def shorten(value: Any) -> Any:
    """Shorten long strings and lists of parsed JSON, so that its structure is visible."""
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else value[:_MAX_TEXT] + "..."
    if isinstance(value, list):
        return [shorten(item) for item in value[:_MAX_ITEMS]] + ["..."] * (len(value) > _MAX_ITEMS)
    if isinstance(value, dict):
        return {key: shorten(item) for key, item in value.items()}
    return value


def ask_dataset_yaml(samples: Sequence[FirstSample], *, exists: bool, name: str) -> bytes | None:
    """Ask whether to write a dataset.yaml, and for its sample type and field map; None if not."""
    question = f"There is a {name}. Write a new one?" if exists else f"Write a {name}?"
    if not click.confirm(question, default=not exists):
        return None
    names = [*sample_type_names(), _CRUDE]
    for number, type_name in enumerate(names):
        note = " (the parts as they are, for cookers)" if type_name == _CRUDE else ""
        click.echo(f"{number:>3}  {type_name}{note}")
    proposed = names.index(_propose_type(samples))
    question = "Number of the sample type"
    chosen = names[click.prompt(question, type=click.IntRange(0, len(names) - 1), default=proposed)]
    if chosen == _CRUDE:
        return render_dataset_yaml(chosen, None)
    return render_dataset_yaml(chosen, ask_field_map(sample_type_by_name(chosen), samples))


def ask_field_map(sample_type: type, samples: Sequence[FirstSample]) -> dict[str, str]:
    """Ask for the part of each field of a sample type; an empty answer leaves an optional field out."""
    parts = _part_names(samples)
    click.echo(f"Choose the part for each field of {sample_type.__name__}. Parts: {', '.join(parts)}.")
    click.echo("Write json[caption] for a value inside a part, and jpg,png for the first of several that exists.")
    proposed = _propose_fields(sample_type, samples)
    fields: dict[str, str] = {}
    for name, required, kind in describe_fields(sample_type):
        first, *others = [part for part in proposed.get(name, []) if part not in fields.values()] or [""]
        while True:
            label = f"{name} ({kind}{'' if required else ', optional'}{_also(others)})"
            default = first or (None if required else "")
            access = click.prompt(label, type=str, default=default, show_default=bool(default)).strip()
            if not access and not required:
                break
            try:
                _check(name, access, sample_type, samples)
            except FieldMapError as error:
                click.echo(str(error))
                continue
            fields[name] = access
            break
    return fields


def _propose_type(samples: Sequence[FirstSample]) -> str:
    """Return the first sample type whose required fields use every part of the samples, one each.

    A JSON part beside at least two others may be left over: it says where they are from.
    """
    parts = _accesses(samples)
    has_json = any(part.endswith("json") for part in _part_names(samples))
    for name in sample_type_names() if len(parts) > has_json else ():
        required = {field for field, needed, _ in describe_fields(sample_type_by_name(name)) if needed}
        proposed = _propose_fields(sample_type_by_name(name), samples)
        if proposed.keys() >= required and sorted(fits[0] for fits in proposed.values()) == parts:
            return name
    return _CRUDE


def _accesses(samples: Sequence[FirstSample]) -> list[str]:
    """Return the parts that are not JSON; those of images are one access (`jpg,png`) if no sample has two of them."""
    parts = [part for part in _part_names(samples) if not part.endswith("json")]
    images = [part for part in parts if kind_by_name(part) == "image"]
    if any(len(sample.parts.keys() & images) > 1 for sample in samples):
        return parts
    return sorted({",".join(images) if part in images else part for part in parts})


def _propose_fields(sample_type: type, samples: Sequence[FirstSample]) -> dict[str, list[str]]:
    """Return the parts that fit each required field, the proposed one first: that with the field's name, or the first.

    No part is proposed for two fields. JSON parts never are: only the user knows which value inside one is meant.
    Of optional fields, the label gets a class.
    """
    fields: dict[str, list[str]] = {}
    parts = set(_accesses(samples))
    for name, required, _ in describe_fields(sample_type):
        taken = {fits[0] for fits in fields.values()}
        free = parts - taken if required else {"cls"} & parts - taken if name == "label" else set()
        free -= {part for part in free if name == "image" and kind_by_name(part) == "av"}
        ordered = sorted(free, key=lambda part: (part != name, part))
        if fits := [part for part in ordered if _fits(name, part, sample_type, samples)]:
            fields[name] = fits
    return fields


def _also(parts: Sequence[str]) -> str:
    return f"; {', '.join(parts)} would fit, too" if parts else ""


def _fits(name: str, part: str, sample_type: type, samples: Sequence[FirstSample]) -> bool:
    try:
        _check(name, part, sample_type, samples)
    except FieldMapError:
        return False
    return True


def _check(name: str, access: str, sample_type: type, samples: Sequence[FirstSample]) -> None:
    check_kinds(FieldMap({name: access}, where="field map"), sample_type, where="field map")
    check_found({name: access}, samples, shard="the first shard", where="field map")


def _part_names(samples: Sequence[FirstSample]) -> list[str]:
    return sorted({part for sample in samples for part in sample.parts})
