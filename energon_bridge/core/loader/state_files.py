"""Reads states from files: JSON, `torch.save`, checkpoints that hold a state somewhere inside.

Accepted: a state itself, a list of states of several ranks, Megatron's `{"dataloader_state_dict": state}`, a
Lightning checkpoint with the state of our data module, and any other nesting of dicts and lists. Tensors of a
checkpoint are not read, and no code in a file is run: JSON, or `torch.load` with `weights_only=True`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from energon_bridge.core.errors import StateError, StateFormatError
from energon_bridge.core.loader.saved_run import FORMAT, OF_MEGATRON_ENERGON, State, read

_MAX_DEPTH = 8
_USUAL = "dataloader_state_dict"
_OF_MODULE = {"global_step", "train"}


def read_states(paths: Sequence[str | os.PathLike[str]]) -> list[State]:
    """Return the states in some files, in the order of the files and without duplicates.

    Raises:
        StateFormatError: A file cannot be read, is damaged, or holds no state; the message names the file.
        StateVersionError, OrderVersionError: A state was written by another version.
    """
    states: list[State] = []
    for path in paths:
        found = list(_states_in(_load(os.fspath(path)), _MAX_DEPTH))
        if not found:
            raise StateFormatError(
                f"{os.fspath(path)}: contains no state of energon_bridge (nothing with format {FORMAT!r}). Pass a file "
                "written from save_state_rank, save_state_global or state_dict, or a checkpoint that contains it"
            )
        for state in found:
            try:
                read(state)
            except StateError as error:
                raise type(error)(f"{os.fspath(path)}: {error}") from error
            if state not in states:
                states.append(state)
    return states


def _load(path: str) -> Any:
    """Return the content of a file."""
    try:
        with open(path, "rb") as file:
            start = file.read(64).lstrip()
    except OSError as error:
        reason = "it is a folder; pass the files in it" if os.path.isdir(path) else error.strerror
        folder, suffix = os.path.dirname(path) or ".", os.path.splitext(path)[1]
        if isinstance(error, FileNotFoundError) and os.path.isdir(folder):
            there = sorted(name for name in os.listdir(folder) if suffix and name.endswith(suffix))
            reason = f"{reason}. In {folder} are: {', '.join(there[-5:])}" if there else reason
        raise StateFormatError(f"{path}: cannot be read as a state: {reason}") from error
    if start[:1] in (b"{", b"["):
        try:
            with open(path, encoding="utf-8") as text:
                return json.load(text)
        except ValueError as error:
            raise StateFormatError(f"{path}: damaged: it begins like JSON but is not valid ({error})") from error
    import torch  # imported only here, since JSON needs no torch

    try:
        # On the meta device the tensors of a checkpoint have shapes and no content: they are not read.
        return torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # foreign bytes can make torch raise anything
        if foreign := re.search(r"megatron\.energon[\w.]*\.(\w+)", str(error)):
            raise StateFormatError(f"{path}: {OF_MEGATRON_ENERGON.format(foreign[1])}") from error
        raise StateFormatError(
            f"{path}: neither JSON nor a torch.save file that loads with weights_only=True. It is damaged, another "
            f"kind of file, or contains objects that would run code ({type(error).__name__}: {_first_line(error)}). "
            "States of energon_bridge are plain values; save them in a file of their own"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def _states_in(value: Any, depth: int) -> Iterator[State]:
    """Yield the states inside nested dicts and lists, beginning with the keys of Megatron and our data module."""
    if depth == 0:
        return
    if isinstance(value, dict):
        if value.get("format") == FORMAT:
            yield value
            return
        # Lightning keeps a second copy of an iterator's state among its loops.
        of_module = [item["train"] for item in value.values() if isinstance(item, dict) and item.keys() == _OF_MODULE]
        inside = of_module or ([value[_USUAL]] if _USUAL in value else list(value.values()))
    elif isinstance(value, (list, tuple)):
        inside = list(value)
    else:
        return
    for item in inside:
        if isinstance(item, (dict, list, tuple)):
            yield from _states_in(item, depth - 1)
