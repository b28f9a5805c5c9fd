"""Reads and writes the configuration of a run: YAML and `section.key=value` overrides.

Values are converted to the type of their field. That matters for numbers: YAML 1.1 reads `1e-4` as a string, and a
learning rate must not become one. The error for an unknown key names the nearest match.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import date
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import yaml

from energon_bridge.core.errors import ConfigurationError, UnknownArgumentError, call_settings, did_you_mean
from energon_bridge.core.format.documents import tabs_hint
from energon_bridge.core.storage import write_file
from energon_bridge.training.config import DataConfig, ModelConfig, RunConfig

PACKAGE_CONFIGS = Path(__file__).resolve().parent.parent / "configs"
"""The configurations that the package brings, which are those of the checkout's folder `configs`."""

_PLAIN = (int, float, str, bool)
_INPUTS: Mapping[str, Sequence[str]] = {
    "data": ("path", "trust_remote_code", "dataset_config", "split_config"),
    "model": [f.name for f in fields(ModelConfig)],
    "validation": ("limit_batches",),
}
_SET_BY_TRAINING = (
    *("seed", "replica_loading", "masked_microbatches", "validate_each_dataset"),
    *("repeat", "virtual_epoch_length", "decoder_seq_length"),
)
"""Settings of the data module that have other keys, or none: training decides how long it lasts."""
_CALLED = {
    "batch_size": "data.micro_batch_size",
    "max_sound_seconds": "data.max_sound_seconds",
    "max_steps": "train.max_steps",
    "on_mismatch": "data.on_mismatch=adapt",
    "seq_length": "data.seq_length",
    "today": "data.today",
    "trust_remote_code": "data.trust_remote_code=true",
    "video_sound": "data.video_sound",
}
"""Arguments that error messages name, and their keys in a configuration."""


def load_config(path: str | Path | None, overrides: Sequence[str] = (), *, inputs: bool = False) -> RunConfig:
    """Read a configuration file and apply overrides.

    Args:
        path: A YAML file, see `find_config`; None starts from the defaults.
        overrides: `section.key=value` texts; later ones win.
        inputs: Take only what says which data and model it has, whatever is wrong, and the defaults for the rest.

    Raises:
        ConfigurationError: The file cannot be read, or values are wrong: all of them are named.
        UnknownArgumentError: A key does not exist, and nothing else is wrong.
    """
    call_settings(_CALLED)
    values = {} if path is None else _read(find_config(path))
    wrong: list[tuple[str, ConfigurationError]] = []
    for text in overrides:
        try:
            _override(values, text)
        except ConfigurationError as error:
            wrong.append((text.partition("=")[0], error))
    if inputs:
        sections = {name: values[name] for name in _INPUTS if isinstance(values.get(name), dict)}
        values = {name: {k: v for k, v in one.items() if k in _INPUTS[name]} for name, one in sections.items()}
    try:
        config: RunConfig = _build(RunConfig, values, prefix="", where=str(path), wrong=wrong)
    except ConfigurationError as error:  # of values that do not go together; not of the defaults for wrong ones
        lines = [line for line in str(error).split("\n") if not any(name in line for name, _ in wrong)]
        wrong += [("", ConfigurationError(line)) for line in lines]
        inputs = False
    if inputs and "path" in values.get("data", {}):
        return config
    if len(wrong) == 1:
        raise wrong[0][1]
    if wrong:
        raise ConfigurationError("\n".join(str(error) for _, error in wrong))
    return config


def find_config(path: str | Path) -> Path:
    """Return the path, or for `configs/NAME.yaml` that is not there, the package's own configuration of that name."""
    path = Path(path)
    own = PACKAGE_CONFIGS.parent / path
    return own if path.parts[:1] == ("configs",) and not path.exists() and own.exists() else path


def dump_config(config: RunConfig) -> str:
    """Return a configuration as YAML that `load_config` reads back to an equal one."""
    values = asdict(config)
    values["data"] |= values["data"].pop("settings")
    return yaml.safe_dump(values, sort_keys=False)


def write_config(config: RunConfig, path: Path) -> None:
    """Write a configuration atomically, so that no reader ever sees half of it."""
    write_file(path, (dump_config(config).encode(),))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        values = yaml.safe_load(text)
    except OSError as error:
        own = (file.relative_to(PACKAGE_CONFIGS.parent).as_posix() for file in PACKAGE_CONFIGS.rglob("*.yaml"))
        hint = did_you_mean(path.as_posix(), [*own])
        raise ConfigurationError(f"cannot read the configuration {path}: {error.strerror}.{hint}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not valid YAML: {error}{tabs_hint(error, text)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must be a mapping of sections, got {type(values).__name__}")
    return values


def _override(values: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise ConfigurationError(f"override {text!r} must have the form section.key=value")
    *sections, name = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UnknownArgumentError(f"override {text!r}: {section!r} is a value, not a section")
        values = inner
    values[name] = _Text(raw)


class _Text(str):
    """The value of an override, not parsed yet: its field decides how."""

    __slots__ = ()


def data_settings() -> dict[str, Any]:
    """Return the types of the settings that a file may have besides the fields of `DataConfig`.

    They are those of the data module that are plain values; it gets them by name, as they are.
    """
    from energon_bridge.trainers.datamodule import EnergonMultiModalDataModule  # takes seconds to import

    hints = typing.get_type_hints(EnergonMultiModalDataModule.__init__)
    elsewhere = {"return", *_fields(DataConfig), *_SET_BY_TRAINING}
    return {name: hint for name, hint in hints.items() if name not in elsewhere and _is_plain(hint)}


def _is_plain(hint: Any) -> bool:
    plain = {*_PLAIN, NoneType, dict[str, Any]}
    return typing.get_origin(hint) is Literal or {*(typing.get_args(hint) or (hint,))} <= plain


def _fields(cls: type) -> list[str]:
    """Return the keys of a section that are fields of its class."""
    return [f.name for f in fields(cls) if f.name != "settings"]


def _build(
    cls: type, values: Mapping[str, Any], *, prefix: str, where: str, wrong: list[tuple[str, ConfigurationError]]
) -> Any:
    """Make a section of its values; those that are wrong go to `wrong`, and their defaults are taken."""
    types = typing.get_type_hints(cls)
    own = _fields(cls)
    passed = data_settings() if cls is DataConfig and not {*values} <= {*own} else {}
    kwargs: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        at = _where_set(name, value, where)
        try:
            if key in passed:
                settings[key] = _convert(value, passed[key], name=name, where=at)
            elif key not in own:
                raise UnknownArgumentError(f"{at}: there is no configuration key {name!r}.{key_hint(name)}")
            elif not is_dataclass(types[key]):
                kwargs[key] = _convert(value, types[key], name=name, where=at)
            elif isinstance(value, dict) or value is None:
                kwargs[key] = _build(types[key], value or {}, prefix=f"{name}.", where=where, wrong=wrong)
            else:
                raise ConfigurationError(f"{at}: {name} is a section and needs keys below it, got {value!r}")
        except ConfigurationError as error:
            wrong.append((name if key in own or key in passed else prefix, error))
    return cls(**kwargs, **({"settings": settings} if settings else {}))


def _where_set(name: str, value: Any, where: str) -> str:
    """Return where a value was set: in an override, which is named, or in the file."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return f"override {name}={value}" if isinstance(value, _Text) else where


def key_hint(name: str) -> str:
    """Return the sentence to say about a key that does not exist: the nearest ones, or all that do."""
    keys = _all_keys(RunConfig)
    # The right key in the wrong section is as common as a typo.
    elsewhere = [key for key in keys if key.rpartition(".")[2] == name.rpartition(".")[2]]
    hint = did_you_mean(name, elsewhere, cutoff=0.0) or did_you_mean(name, keys, cutoff=0.5)
    if name.startswith("validation.") and elsewhere == ["data.path"]:
        hint += " Validation reads its split part `val`; a mix has other data under splits: val."
    return hint or f" Known keys: {', '.join(keys)}"


def _all_keys(cls: type, prefix: str = "") -> list[str]:
    types = typing.get_type_hints(cls)
    keys: list[str] = []
    for name in [*_fields(cls), *(data_settings() if cls is DataConfig else ())]:
        keys.append(f"{prefix}{name}")
        if is_dataclass(types.get(name)):
            keys += _all_keys(types[name], f"{prefix}{name}.")
    return keys


def _convert(value: Any, hint: Any, *, name: str, where: str) -> Any:
    if typing.get_origin(hint) is tuple:
        return _convert_names(value, name=name, where=where)
    if typing.get_origin(hint) is Literal:
        if (text := str(value)) in typing.get_args(hint):
            return text
        raise ConfigurationError(f"{where}: {name} must be one of {', '.join(typing.get_args(hint))}, got {text!r}")
    accepted = typing.get_args(hint) or (hint,)
    if dict[str, Any] in accepted:
        return _convert_mapping(value, name=name, where=where)
    if isinstance(value, date):  # what YAML makes of 2026-01-31
        value = value.isoformat()
    if isinstance(value, _Text):
        if str not in accepted or value in ("null", "~"):
            value = _parsed(value, name)
        else:
            value = str(value)
    if value is None and NoneType in accepted:
        return None
    if (converted := _of_type(value, accepted)) is not None:
        return converted
    wanted = " or ".join("null" if t is NoneType else t.__name__ for t in accepted)
    raise ConfigurationError(f"{where}: {name} must be {wanted}, got {value!r} ({type(value).__name__})")


def _of_type(value: Any, accepted: Sequence[Any]) -> bool | str | int | float | None:
    """Return a value of one of the accepted types, None if it is of another one; text may be a number."""
    if bool in accepted or isinstance(value, bool):
        return value if bool in accepted and isinstance(value, bool) else None
    if str in accepted:
        return value if isinstance(value, str) else None
    number = _number(value) if isinstance(value, (int, float, str)) else None
    if int in accepted and number is not None and number.is_integer():
        return int(value) if isinstance(value, int) else int(number)
    return number if float in accepted else None


def _convert_names(value: Any, *, name: str, where: str) -> tuple[str, ...]:
    """Return a list of strings; null is an empty list."""
    value = _parsed(value, name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ConfigurationError(f"{where}: {name} must be a list of strings, got {value!r} ({type(value).__name__})")
    return tuple(value)


def _convert_mapping(value: Any, *, name: str, where: str) -> dict[str, Any] | None:
    """Return a mapping of any values; null is none."""
    value = _parsed(value, name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where}: {name} must be a mapping, got {value!r} ({type(value).__name__})")
    return {key: _parsed(one, f"{name}.{key}") for key, one in value.items()}


def _parsed(value: Any, name: str) -> Any:
    """Return a value of a file as it is, and that of an override as YAML."""
    try:
        return yaml.safe_load(value) if isinstance(value, _Text) else value
    except yaml.YAMLError as error:
        raise ConfigurationError(f"override {name}={value}: the value is not valid YAML") from error


def _number(value: int | float | str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None
