"""Writing `dataset.yaml`: the sample type of a dataset and the parts that its fields come from."""

from __future__ import annotations

import json
from collections.abc import Mapping

from energon_bridge.errors import FieldMapError
from energon_bridge.format.documents import dump_yaml
from energon_bridge.format.field_map import FieldMap, check_fields, describe_fields
from energon_bridge.samples import CrudeSample, sample_type_by_name

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
