"""Public callables take the parameters of megatron-energon, by the same names and in the same places."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked
from paths import TESTS

from energon_bridge.compat import install, table
from energon_bridge.compat.surface import modules

SIGNATURES: dict[str, list[tuple[str, str, bool]]] = json.loads(
    (TESTS / "fixtures" / "energon-7.4.1-signatures.json").read_text()
)
INNER = "what wrappers, datasets and loaders call of one another, and no program does"
MADE_BY_ITSELF = "made where it is needed, not by programs"
REFUSED = "cannot be made by a program, which an error says"
BY_PLACE = "called by the package, by place"
# Patterns of names that differ, and why that is no loss. A name that fits no pattern takes what it takes there.
DIFFERENT = {
    r"(wrappers\..*|flavors\.base_dataset:SavableDataset|.*Factory|.*DataLoader)\."
    r"(as_file_store|assert_can_restore|build|can_restore_sample|config|len_(rank|worker)|next_id|reset_state_(deep|own)|"
    r"restore_(sample|state)|sample_filter|save_state|worker_has_samples)": INNER,
    r"worker:WorkerConfig\.(assert_worker|worker_.*)|savable_loader:(Basic|Savable)DataLoader": INNER,
    r".*Webdataset|.*WebdatasetFactory(\.load_sample)?|metadataset\.loader_interface:DatasetLoaderInterface": REFUSED,
    r"cache\.base:Lazy|cache\.no_cache:DirectLazy|.*:IJsonlIndexReader\..*": MADE_BY_ITSELF,
    r".*Preparator\.iter_dataset_content|media\.extractor:MediaFilterConfig\..*": MADE_BY_ITSELF,
    r"media\.metadata:MediaMetadataBase.*": MADE_BY_ITSELF,
    r"task_encoder\.base:(AugmentTaskEncoder|TaskEncoder)\..*": "as the tests of encoders and hooks have them",
    r"cache\.base:FileStoreDecoder\.decode|.*:SampleDecoder\.decode|bracecollapse:collapse": BY_PLACE,
    r"flavors\.base_dataset:Sample\.from_joined|epathlib\.epath:EPath\.open": BY_PLACE,
    r"task_encoder\.base:Batch\.derive_from": "one method for samples and batches: it takes `base_sample` of both",
    r".*:JsonlFileStore": "there is no filter of its samples and no cache to size",
    r".*:(traverse_metadataset|.*\.traverse)": "keywords for classes that read mixes, which there are none of",
    r".*:(DuplicateSampleKeyError|SkipSample)": "exceptions without parameters of their own",
}


@pytest.mark.rival
def test_the_fixture_is_that_of_the_package(run_rival: Callable[..., str]) -> None:
    assert json.loads(run_rival(Path(__file__).with_name("rival_signatures.py"))) == SIGNATURES


def differences(function: Any, theirs: list[tuple[str, str, bool]], *, bound: bool) -> list[str]:
    """Return how calls that fit the one signature do not fit the other."""
    ours = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
    kinds = {one.kind for one in ours}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    names = {one.name for one in ours if one.kind.name in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")}
    places = [one.name for one in ours if one.kind.name.startswith("POSITIONAL")]
    wrong, place = [], 0
    for name, kind, _ in theirs:
        by_place = kind.startswith("POSITIONAL")
        if name.startswith("_"):
            continue
        if kind in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY") and name not in names and not takes_all:
            wrong.append(f"takes no {name}")
        if by_place and inspect.Parameter.VAR_POSITIONAL not in kinds and places[place : place + 1] != [name]:
            wrong.append(f"has {places[place : place + 1]} in the place of {name}")
        if kind.startswith("VAR") and not any(one.name == kind for one in kinds):
            wrong.append(f"takes no {name} of any number")
        place += by_place
    known = {name for name, _, _ in theirs}
    needed = [one.name for one in ours if one.default is one.empty and not one.kind.name.startswith("VAR")]
    return wrong + [f"needs {name}" for name in needed if name not in known]


def compare() -> tuple[int, dict[str, Any]]:
    install()
    count, wrong = 0, {}
    for where, theirs in SIGNATURES.items():
        module, _, rest = where.partition(":")
        name, _, method = rest.partition(".")
        if name not in modules().get(module, ()) or table.describe(name, module).kind not in ("ours", "adapter"):
            continue
        value = getattr(importlib.import_module(f"megatron.energon.{module}"), name)
        if isinstance(value, enum.EnumMeta) and not method:  # its call is Python's, and takes other names since 3.12
            continue
        own = inspect.getattr_static(value, method, None) if method else value
        function = getattr(own, "__func__", own)
        if method and own is not None and not callable(function):  # a hook that is chosen when it is looked up
            function = getattr(value, method)
        count += 1
        try:
            found = differences(function, theirs, bound=bool(method) and not isinstance(own, staticmethod))
        except (TypeError, ValueError) as error:
            found = [f"is {own!r}: {error}"]
        if found:
            wrong[where] = found
    return count, wrong


def test_callables_take_what_they_take_there() -> None:
    count, wrong = run_forked(1, lambda _: compare())[0]
    assert count > 350
    unknown = {where: found for where, found in wrong.items() if not any(re.fullmatch(p, where) for p in DIFFERENT)}
    assert not unknown
    unused = [pattern for pattern in DIFFERENT if not any(re.fullmatch(pattern, where) for where in wrong)]
    assert not unused
