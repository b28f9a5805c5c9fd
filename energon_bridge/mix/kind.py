"""Which kind of thing a path names: a prepared dataset, a JSONL file, or the YAML file of another mix.

A reference inside a mix is told apart by its name, so that a mix of a thousand datasets asks the storage nothing; only
`.yaml` names are looked up. The path that a caller gives is looked at closely, for errors that say what is wrong.
Source of the rules: reference section 1.1.
"""

from __future__ import annotations

from enum import StrEnum

from energon_bridge.errors import DatasetNotFoundError, MetadataError, NotPreparedError
from energon_bridge.format.nvmeta import INDEX_SQLITE, INFO_JSON, INFO_YAML, meta_path, not_prepared
from energon_bridge.mix.paths import split_path
from energon_bridge.rows.dataset import has_tables, is_table
from energon_bridge.storage import open_store


class DatasetKind(StrEnum):
    """What a path of a mix names."""

    PREPARED = "prepared"  # or tables, which are opened like it
    JSONL = "jsonl"
    METADATASET = "metadataset"


def kind_of_reference(path: str, *, where: str) -> DatasetKind:
    """Tell the kind of an absolute path inside a mix; raises DatasetNotFoundError or MetadataError naming `where`."""
    if path.endswith(".jsonl"):
        return DatasetKind.JSONL
    if not path.endswith((".yaml", ".yml")):
        return DatasetKind.PREPARED
    if _is_file(path):
        _refuse_yml(path, where=f"{where}: {path}")
        return DatasetKind.METADATASET
    if _is_folder(path):
        return DatasetKind.PREPARED
    raise DatasetNotFoundError(f"{where}: {path}: no such file. Paths are relative to the file that contains them.")


def kind_of_source(path: str) -> DatasetKind:
    """Tell the kind of an absolute path that a caller wants to train on.

    Raises DatasetNotFoundError, NotPreparedError or MetadataError, each saying what to do.
    """
    named_as_file = path.endswith((".jsonl", ".yaml", ".yml"))
    store = open_store(path)
    if is_table(path):
        return DatasetKind.PREPARED
    # A web server answers for folders as it does for files, so the metadata is looked for first.
    if not named_as_file and (store.exists(meta_path(INFO_JSON)) or store.exists(meta_path(INFO_YAML))):
        return DatasetKind.PREPARED
    if _is_file(path):
        if path.endswith(".jsonl"):
            return DatasetKind.JSONL
        if path.endswith(".yaml"):
            return DatasetKind.METADATASET
        _refuse_yml(path, where=path)
        if not _is_folder(path):
            raise MetadataError(
                f"{path}: expected the folder of a prepared dataset, a .jsonl file or the .yaml file of a mix, found "
                f"another file. For a tar, give the folder that `energon prepare` was run on."
            )
    if named_as_file and (store.exists(meta_path(INFO_JSON)) or store.exists(meta_path(INFO_YAML))):
        return DatasetKind.PREPARED
    store.check_root()
    if store.exists(meta_path(INDEX_SQLITE)):
        raise NotPreparedError(
            f"{path}: a folder of files with a media index, which can only be the `aux` of a dataset. To train on its "
            f"tars, run `energon prepare {path}`."
        )
    if has_tables(path):
        return DatasetKind.PREPARED
    raise not_prepared(path)


def _refuse_yml(path: str, *, where: str) -> None:
    if path.endswith(".yml"):
        raise MetadataError(f"{where}: the name of a mix must end in .yaml, not .yml. Rename it.")


def _is_file(path: str) -> bool:
    folder, name = split_path(path)
    return bool(name) and open_store(folder).exists(name)


def _is_folder(path: str) -> bool:
    try:
        open_store(path).check_root()
    except DatasetNotFoundError:
        return False
    return True
