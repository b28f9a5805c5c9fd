"""Writing `dataset.yaml`: the sample type of a dataset, and its field map, checked against the first samples."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from energon_bridge.core.errors import FieldAccessError, FieldMapError
from energon_bridge.core.format.documents import dump_yaml
from energon_bridge.core.format.field_map import FieldMap, check_fields, describe_fields, parse_access
from energon_bridge.core.format.tar import parse_sample
from energon_bridge.core.format.tar_index import scan_tar
from energon_bridge.core.samples import CrudeSample, sample_type_by_name
from energon_bridge.core.storage import Store

# megatron-energon does not export this type; its readers find it in its module.
_MODULES = {"VQAOCRSample": "megatron.energon.flavors.vqa_and_ocr"}


def render_dataset_yaml(sample_type: str, field_map: Mapping[str, str] | None) -> bytes:
    """Write the content of a dataset.yaml that this package and Megatron Energon read.

    `sample_type` is a class name such as `CaptioningSample` or `CrudeWebdataset`. Raises UnknownArgumentError for an
    unknown one and FieldMapError for a field map that does not fit it.
    """
    cls = sample_type_by_name(sample_type)
    if issubclass(cls, CrudeSample):
        if field_map:
            raise FieldMapError(
                f"{sample_type} takes no field map, since cookers read its parts: leave out --field-map."
            )
        return dump_yaml({"__module__": "megatron.energon", "__class__": "CrudeWebdataset"})
    if not field_map:
        fields = ", ".join(f'"{name}": "<part>"' for name, required, _ in describe_fields(cls) if required)
        raise FieldMapError(f"{sample_type} needs a field map: --field-map '{{{fields}}}'.")
    check_fields(FieldMap(field_map, where="--field-map"), cls, where="--field-map")
    module = _MODULES.get(cls.__name__, "megatron.energon")
    return dump_yaml({"sample_type": {"__module__": module, "__class__": cls.__name__}, "field_map": dict(field_map)})


def parse_field_map(text: str) -> dict[str, str]:
    """Read a field map written as JSON, like `{"image": "jpg"}`; raises FieldMapError."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise FieldMapError(
            f'--field-map is not valid JSON: {error}. Expected something like {{"image": "jpg"}}.'
        ) from error
    if not isinstance(value, dict) or not all(isinstance(access, str) for access in value.values()):
        raise FieldMapError(f"--field-map: expected an object with text values, found {text}.")
    return value


# ---------------------------------------------------------------------------------------------------------------------
# The first samples of a shard, before it has an index.


_MAX_SAMPLES = 50
_MOST_NAMED = 20
_JSON = ("json", "jsn")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSample:
    """The key of a sample and its parts as raw bytes."""

    key: str
    parts: dict[str, bytes]


def check_found(
    field_map: Mapping[str, str], samples: Sequence[FirstSample], *, shard: str, where: str = "--field-map"
) -> None:
    """Check that the first samples have each field of a map; the FieldMapError lists the parts they have."""
    for field, access in field_map.items():
        options = parse_access(access, where=where, field=field)
        if samples and not any(_may_have(sample, part, steps) for sample in samples for part, steps in options):
            raise FieldMapError(
                f"{where}, field `{field}`: nothing at {access!r} in the first {len(samples)} samples of {shard}. "
                f"They have {_describe(samples)}. Name one of these, such as `jpg,png` or `json[caption]`."
            )


def _may_have(sample: FirstSample, part: str, steps: tuple[str, ...]) -> bool:
    """Return whether an access may find something in a sample; only JSON parts are parsed."""
    if part not in sample.parts:
        return False
    if not steps or not part.endswith(_JSON):
        return True
    try:
        value = json.loads(sample.parts[part])
    except ValueError:
        return True  # decoding it will report the error
    try:
        FieldMap({"value": part + "".join(f"[{step}]" for step in steps)})({part: value})
    except FieldAccessError:
        return False
    return True


def _describe(samples: Sequence[FirstSample]) -> str:
    """Name the parts of some samples, with the keys inside of JSON."""
    named: dict[str, None] = {}
    for sample in samples:
        for part, data in sample.parts.items():
            named[part] = None
            if part.endswith(_JSON) and len(named) < _MOST_NAMED:
                with contextlib.suppress(ValueError):
                    value = json.loads(data)
                    named |= dict.fromkeys(f"{part}[{key}]" for key in value) if isinstance(value, dict) else {}
    names = list(named)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return "the parts " + ", ".join(names[:_MOST_NAMED]) + more


def read_first_samples(store: Store, shard: str) -> list[FirstSample]:
    """Read up to 50 samples from the start of a shard; raises CorruptShardError."""
    scan = scan_tar(store, shard)
    samples = []
    for start, end in pairwise(scan.offsets[: _MAX_SAMPLES + 1]):
        data = store.read_range(shard, start, end - start)
        key, parts = parse_sample(data, where=store.url(shard), follow=scan.follow(store, shard))
        samples.append(FirstSample(key=key, parts={name: bytes(data) for name, data in parts.items()}))
    return samples
