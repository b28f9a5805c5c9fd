"""What each public name of megatron-energon is here: our own, an adapter, a name that raises when used, and so on.

`describe` classifies a name of a module, `resolve` returns its object, and `render` the table of
docs/reference/compat.md. Each name of `surface` has exactly one entry; a test fails if one is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, NoReturn, TypeVar

import energon_bridge
from energon_bridge.compat.surface import VERSION, modules
from energon_bridge.core.errors import NotProvidedError

NameKind = Literal["ours", "adapter", "value", "state", "refused", "type variable"]

OURS = {*energon_bridge.__all__, "EnergonMultiModalDataModule"}
"""Our public names; a star import leaves the data module out, because it brings Lightning."""
_OURS = "energon_bridge"
_HERE = "energon_bridge.compat"


@dataclass(frozen=True, slots=True, kw_only=True)
class NameEntry:
    """The entry of a name: `target` is our object as `module:attribute`, `advice` the text of a refusal."""

    kind: NameKind
    target: str = ""
    advice: str = ""


# Ours under the same name, but not among the names of `energon_bridge` itself; or under another one.
_ELSEWHERE = {
    "BasicDataLoader": "energon_bridge:SavableDataLoader",
    "DirectLazy": "energon_bridge.core.stores.cache:DirectLazy",
    "DuplicateSampleKeyError": "energon_bridge.core.errors:DuplicateKeyError",
    "FileStoreDecoder": "energon_bridge.core.stores.file_store:Decoder",
    "MediaMetadataBase": "energon_bridge.core.format.media:MediaMetadata",
    "add_source_info": "energon_bridge.core.samples:add_source_info",
    "collapse": "energon_bridge.core.format.nvmeta:collapse_braces",
    "main": "energon_bridge.tools.cli.main:main",
    "AVData": "energon_bridge.models.av:AVData",
    "AVMetadata": "energon_bridge.core.format.media:AVMetadata",
    "EmptyDatasetError": "energon_bridge.core.errors:EmptyDatasetError",
    "FieldAccessError": "energon_bridge.core.errors:FieldAccessError",
    "ImageMetadata": "energon_bridge.core.format.media:ImageMetadata",
    "JsonlFileStore": "energon_bridge.core.stores:JsonlFileStore",
    "VQAOCRSample": "energon_bridge.core.samples:VQAOCRSample",
    "WebdatasetFileStore": "energon_bridge.core.stores:WebdatasetFileStore",
    "get_clips_uniform": "energon_bridge.models.av:get_clips_uniform",
    "get_single_frames_uniform": "energon_bridge.models.av:get_single_frames_uniform",
}

_ADAPTERS = {
    "encoders": "DatasetBlendMode DefaultTaskEncoder",
    "build_hooks": "get_train_dataset get_val_dataset get_val_datasets",
    "loading": "WorkerConfig get_loader get_savable_loader log_exception reraise_exception",
    "factories": """
        DatasetLoader DatasetLoaderInterface LoadedDataset LoadedDatasetList Metadataset MetadatasetV2
        TraversedDatasetReference get_dataset_from_config load_dataset traverse_metadataset
    """,
    "epath": "DEFAULT_PROFILE_NAME EPath NVDATASET_CACHE_DIR",
    "dataset_classes": "BaseCoreDatasetFactory BaseWebdatasetFactory CrudeJsonlDatasetFactory",
    "preparing": """
        JsonlPreparator MediaFilterConfig MediaFilterStrategy WebdatasetPreparator prepare_filesystem_dataset
        prepare_metadataset
    """,
    "preview": "default_get_batch_keys format_sample_compact format_sample_detailed pprint",
    "wrapped": """
        BatchDataset BlendDataset ConcatDataset EpochizeDataset FilterDataset GcDataset GroupBatchDataset IterMapDataset
        LimitDataset LogSampleDataset MapDataset MixBatchDataset PackingDataset RepeatDataset SavableDataset
        ShuffleBufferDataset WatchdogDataset
    """,
    "transforms": "CustomTransform MergeTransform",
    "mixins": "ExtendableDataclassMixin PinMemoryMixin get_source_info",
    "hook_marks": """
        get_cooker_need_cache get_cooker_need_primary get_failure_tolerance get_stateless stateless
    """,
    "fork_hooks": """
        DataclassForkMixin ForkMixin after_in_child_fork_hook after_in_parent_fork_hook before_fork_hook
    """,
    "exceptions": "FatalSampleError SYSTEM_EXCEPTIONS SampleException",
    "cache_pool": "FileStoreCachePool MockLazy",
    "dataset_info": """
        EnergonDatasetType IJsonlIndexReader check_dataset_info_present get_dataset_info get_dataset_type
    """,
    "decoders": "AVDecoder AVProbeIndex AVProbeIndexEntry AV_DECODE_AVAILABLE DEFAULT_DECODER SampleDecoder",
}
_ADAPTER_OF = {name: f"{_HERE}.{module}:{name}" for module, names in _ADAPTERS.items() for name in names.split()}

_COMMANDS = {
    "tools.info": "info",
    "tools.lint": "lint",
    "tools.prepare": "prepare",
    "tools.prepare_media": "prepare_media",
}
"""Commands that exist here under the same name, by module."""

_VALUES: dict[str, str] = {
    "IJSONL_SUFFIX": ".idx",
    "INDEX_SQLITE_FILENAME": "index.sqlite",
    "INDEX_UUID_FILENAME": "index.uuid",
    "INFO_JSON_FILENAME": ".info.json",
    "INFO_YAML_FILENAME": ".info.yaml",
    "ITAR_SUFFIX": ".idx",
    "MAIN_FOLDER_NAME": ".nv-meta",
    "SPLIT_YAML_FILENAME": "split.yaml",
    "__version__": f"{VERSION}+energon-bridge.{energon_bridge.__version__}",
}

_STATES = (
    *("FlexState", "SavableCheckpoint", "SavableDataLoaderState", "SavableDatasetCheckpoint"),
    *("SavableDatasetState", "SliceState", "SystemRngState"),
)

# Dataset classes by sample type; a `dataset.yaml` may name them, or a class derived from them.
_FACTORIES = (
    "DefaultDecoderWebdatasetFactory",
    "DefaultGenericWebdatasetFactory",
    "JoinedWebdatasetFactory",
    "StandardWebdatasetFactory",
)
OLDER = {"VideoData": "annotate with energon_bridge.models.av.AVDecoder, which videos are since version 6"}
"""Names that older versions have, and programs import for annotations; what to use instead."""
_STATE_ADVICE = "states of megatron-energon unpickle to it, and loaders refuse them by name: begin with `start_at=`"


@cache
def describe(name: str, module: str) -> NameEntry:
    """Return the object of a public name of a module (relative to `megatron.energon`).

    Raises:
        KeyError: The tables have no entry for it, which is a bug.
    """
    if name == "command" and module == "tools.preview":
        return NameEntry(kind="adapter", target=f"{_HERE}.preview:command")
    if name == "command" and module in _COMMANDS:
        return NameEntry(kind="ours", target=f"energon_bridge.tools.cli.{_COMMANDS[module]}:command")
    if name in _VALUES:
        return NameEntry(kind="value", target=repr(_VALUES[name]))
    if name in _STATES:
        return NameEntry(kind="state", advice=_STATE_ADVICE)
    if name in _ADAPTER_OF:
        return NameEntry(kind="adapter", target=_ADAPTER_OF[name])
    if name in OURS:
        return NameEntry(kind="ours", target=f"{_OURS}:{name}")
    if name in _ELSEWHERE:
        return NameEntry(kind="ours", target=_ELSEWHERE[name])
    if _is_factory(name):
        return NameEntry(kind="adapter", target=f"{_HERE}.dataset_classes:BaseWebdatasetFactory")
    if name == "DefaultCrudeJsonlDatasetFactory":
        return NameEntry(kind="adapter", target=f"{_HERE}.dataset_classes:CrudeJsonlDatasetFactory")
    if name in ADVICE:
        return NameEntry(kind="refused", advice=ADVICE[name])
    if name in ("F", "P", "T", "TMetadata", "TType", "TTransform", "V") or name.startswith("T_"):
        return NameEntry(kind="type variable")
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        advice = MODULE_ADVICE.get(".".join(parts[:length]))
        if advice is not None:
            return NameEntry(kind="refused", advice=advice)
    raise KeyError(f"{module}.{name}")


def resolve(name: str, module: str) -> Any:
    """Return the object that a name of a module refers to."""
    if name not in _names(module):
        return getattr(energon_bridge, name)
    entry = describe(name, module)
    if entry.kind == "value":
        return _VALUES[name]
    if entry.kind == "type variable":
        return TypeVar(name)  # each of those modules makes its own
    if entry.kind == "state":
        return _state(name)
    if entry.kind == "refused" and name.startswith("command") and module.startswith("tools."):
        return refused_command(f"{module}.{name}", entry.advice)
    if entry.kind == "refused":
        return _refuse(name, entry.advice)
    target, _, attribute = entry.target.partition(":")
    value = getattr(import_module(target), attribute)
    return _factory(name, value) if _is_factory(name) else value


def older(name: str) -> Any:
    """Return a class for a name of an older version; it raises when used."""
    return _refuse(name, OLDER[name])


@cache
def _names(module: str) -> frozenset[str]:
    return frozenset(modules()[module])


def _is_factory(name: str) -> bool:
    return name in _FACTORIES or name.endswith("Webdataset")


@cache
def _factory(name: str, base: type) -> type:
    """Return the dataset class of a name: derived from the base class, with its sample type if the name implies one."""
    from energon_bridge.core.samples import sample_type_by_name

    attributes = {} if name in _FACTORIES else {"__sample_type__": sample_type_by_name(name)}
    return type(name, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **attributes})


@cache
def _state(name: str) -> type:
    return state_class(name, next(module for module, names in modules().items() if name in names))


@cache
def _refuse(name: str, advice: str) -> Any:
    """Return a class or a function, depending on the case of the name, that raises when used."""
    return refused_class(name, advice) if name[:1].isupper() else refused_function(name, advice)


_AS_THERE = ""
_MEANING = {
    "ours": "`{target}`",
    "adapter": _AS_THERE,
    "value": _AS_THERE,
    "state": "{advice}",
    "refused": "refused",
    "type variable": _AS_THERE,
}


def _entries() -> dict[str, tuple[NameEntry, str]]:
    """Return the entry of every name and what it is here; a name stands with its modules where they differ in it."""
    by_name: dict[str, dict[str, tuple[NameEntry, str]]] = {}
    for module, names in modules().items():
        for name in names:
            entry = describe(name, module)
            meaning = _MEANING[entry.kind].format(target=entry.target.replace(":", "."), advice=entry.advice)
            same = entry.target == f"{_OURS}:{name}"
            by_name.setdefault(name, {})[module] = entry, _AS_THERE if same else meaning
    found: dict[str, tuple[NameEntry, str]] = {}
    for name, by_module in sorted(by_name.items(), key=lambda item: (item[0].lower(), item[0])):
        differs = len({meaning for _, meaning in by_module.values()}) > 1
        found |= {f"{module}.{name}" if differs else name: known for module, known in by_module.items()}
    return found


def refused() -> dict[str, str]:
    """Return what to use instead of each name that is refused."""
    return {name: entry.advice for name, (entry, _) in _entries().items() if entry.kind == "refused"}


def render() -> str:
    """Return in Markdown a table of what is known here by another name.

    Names that mean the same are in a row. Left out are those of our own, adapters, values and type variables, which
    programs use as they did, and refused ones.
    """
    rows: dict[str, list[str]] = {}
    for name, (entry, meaning) in _entries().items():
        if entry.kind != "refused" and meaning != _AS_THERE:
            rows.setdefault(meaning, []).append(f"`{name}`")
    ordered = sorted(rows.items(), key=lambda row: (-len(row[1]), row[0]))
    lines = [f"|{', '.join(names)}|{meaning}|" for meaning, names in ordered]
    return "\n".join(["|names|here|", "|---|---|", *lines, ""])


# ---------------------------------------------------------------------------------------------------------------------
# What to use instead.
#
# Each text completes the sentence "NAME of megatron-energon has no counterpart in energon_bridge: …". A name without a
# text of its own gets that of the innermost module it belongs to.


WRAPPERS_ADVICE = (
    "a dataset only describes what to load: put MapDataset, FilterDataset, BatchDataset and their like around it, or "
    "say what becomes of samples by hooks of a task encoder"
)

ADVICE = {
    # Dataset wrappers
    "BaseWrapperDataset": WRAPPERS_ADVICE,
    "GcFreezeError": "garbage is collected as Python does it, and nothing is frozen that could be missing",
    "SavableSampleBuffer": "what waits to be packed or batched is in the loader's state as references",
    "SampleIndex": "ask the task encoder's current_sample_index",
    "get_sample_restore_key": "read sample.__restore_key__",
    "gc_init_worker": "garbage is collected as Python does it",
    # Loading
    "CacheFileLazy": "a FileStoreCachePool makes its own lazies: get_lazy and to_cache return them",
    "FileCacheLazy": "a FileStoreCachePool makes its own lazies: get_lazy and to_cache return them",
    "FileStoreWrapper": "derive from energon_bridge.FileStore and give it `read` and `get_path`",
    "SavableDatasetWrapper": "loaders keep their state themselves: save_state_rank",
    "SimpleSavableDatasetWrapper": "loaders keep their state themselves: save_state_rank",
    "WebdatasetMeta": "energon_bridge.core.format.dataset.open_dataset reads the metadata of a dataset",
    "ImageDecoderType": "annotate with str; SampleDecoder refuses a form that does not exist",
    "AVDecoderType": "annotate with str; SampleDecoder refuses a form that does not exist",
    "FeatureBatcher": "annotate with Callable[[list], Any]",
    "MediaMetadataType": "a store's get_media_metadata returns an ImageMetadata or an AVMetadata",
    "State": "states are plain dicts: save_state_rank",
    "add_sample_restore_key": "restore keys are made where samples are drawn; leave __restore_key__ as it is",
    "set_sample_restore_key": "restore keys are made where samples are drawn; leave __restore_key__ as it is",
    "legacy_handler": "pass handler= or error_policy= of energon_bridge.get_train_dataset",
    "ErrorContext": "pass error_policy= of energon_bridge.get_train_dataset; failures are judged there",
    "handle_restore_errors": "restoring reads no sample, so none can fail",
    "deserialize_media_metadata": "a store's get_media_metadata reads it",
    "serialize_media_metadata": "`energon prepare-media` writes it",
}

MODULE_ADVICE = {
    "av": "use energon_bridge.models.av.AVDecoder, which SampleDecoder makes of videos and sound",
    "cli": "run the command `energon`",
    "dataset_config": "get_train_dataset reads dataset.yaml",
    "deprecation": "use the standard warnings module",
    "epathlib": "URLs are opened by fsspec, which has its own configuration",
    "eyaml": "use the yaml package",
    "flavors.jsonl": "open the .jsonl file with get_train_dataset; `energon prepare FILE.jsonl` writes its index",
    "flavors.webdataset": "energon_bridge.core.format reads datasets and `energon prepare` writes them",
    "flavors.webdataset.aggregator_pool": "use concurrent.futures",
    "flavors.webdataset.tar_patcher": "for new keys, write samples again: `energon convert SOURCE OUT --keys number`",
    "fork_hook": "use before_fork_hook and its kin, or os.register_at_fork",
    "local_copy": "data is read by ranges from where it lies, and no copy is made",
    "media": "energon_bridge.tools.check.media.prepare_media and `energon prepare-media` write media metadata",
    "metadataset": "pass the path of the YAML file, or the same as a dict, to get_train_dataset",
    "module_loader": "a dataset's own code runs with trust_remote_code=True",
    "retry_stream": "reads are retried where the storage says so",
    "rng": "Python's, numpy's and torch's generators are seeded for each sample before a hook runs: draw from them",
    "savable": "loaders keep their state themselves: save_state_rank",
    "tools": "run the command `energon`",
    "tools.analyze_debug": "run `energon analyze-debug`; `energon which` names the samples of any step",
    "tools.checkpoint": "states fit any number of ranks as they are, and `energon checkpoint` shows what they say",
    "tools.mount": "run `energon mount`",
    "transforms": "give MergeTransform transforms of torchvision itself",
    "typed_converter": "read your own configuration with a library for it",
    "wrappers": WRAPPERS_ADVICE,
    "watchdog": "pass get_savable_loader(watchdog_timeout_seconds=…)",
}


# ---------------------------------------------------------------------------------------------------------------------
# Names that raise when used.
#
# Without a counterpart here, they can be imported. Modules may use such a class on import: in annotations, with type
# arguments, in `isinstance` and as a base. Creating an object, or using an attribute, raises NotProvidedError, which
# says what to use instead. States of megatron-energon's loaders unpickle to empty objects, which a loader rejects with
# an error that names them.


PACKAGE = "megatron.energon"


def not_provided(name: str, advice: str) -> NotProvidedError:
    """Build the error for the use of a name; `advice` says what to use instead."""
    return NotProvidedError(f"{name} of megatron-energon has no counterpart in energon_bridge: {advice}.")


class NoSuchPart(NotProvidedError, AttributeError):  # noqa: N818 - never caught by this name
    """An internal attribute of megatron-energon was accessed, perhaps by `hasattr`."""


class Refusing(type):
    """The class of classes that can be named but not used."""

    __advice__: str
    __named__: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise not_provided(cls.__named__, cls.__advice__)

    def __getattr__(cls, name: str) -> NoReturn:
        refusal = not_provided(f"{cls.__named__}.{name}", cls.__advice__)
        if name.startswith("__"):  # typing, inspect and others look for these
            raise AttributeError(str(refusal))
        raise NoSuchPart(str(refusal)) if name.startswith("_") else refusal

    def __getitem__(cls, arguments: Any) -> Any:
        return cls


def refused_class(name: str, advice: str, **attributes: Any) -> type:
    """Return a class that raises when used, except for the given `attributes`."""
    namespace = {"__module__": PACKAGE, "__qualname__": name, "__named__": name, "__advice__": advice, **attributes}
    return Refusing(name, (), namespace)


def refused_function(name: str, advice: str) -> Callable[..., NoReturn]:
    """Return a function that raises when called."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise not_provided(name, advice)

    refused.__name__ = refused.__qualname__ = name
    refused.__module__ = PACKAGE
    refused.__doc__ = f"Not provided: {advice}."
    return refused


def refused_command(name: str, advice: str) -> Any:
    """Return a click command that raises when run, alone or in a group, whatever its arguments."""
    import click  # importing `megatron.energon` does not need it

    class RefusedCommand(click.Command):
        def main(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise not_provided(name, advice)

        def invoke(self, ctx: click.Context) -> NoReturn:
            raise click.ClickException(str(not_provided(name, advice)))

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return RefusedCommand(name, context_settings=settings, help=f"Not provided: {advice}.")


class ForeignState(dict[Any, Any]):
    """A state of megatron-energon, without its content; loaders reject it with an error that names it.

    A dict, since some of megatron-energon's states are, and pickles add their entries one by one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def state_class(name: str, module: str) -> type[ForeignState]:
    """Return the class that one kind of state unpickles to."""
    return type(name, (ForeignState,), {"__module__": f"{PACKAGE}.{module}", "__qualname__": name})
