"""Rows that belong together (of a speaker, a product, a picture), and splits that part none of them.

Groups are dealt out in the order of hashes of their values, so that a split part gets as near to its share of the
samples as whole groups allow, and one group at least. What a source had in earlier runs keeps its part: what has been
added since is dealt out by what the parts lack.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from energon_bridge.core.errors import ConfigurationError, SourceError
from energon_bridge.core.order.rng import key_of
from energon_bridge.core.prepare.split import SplitRule
from energon_bridge.tools.convert.rows import LOOKED_AT, Source, first_rows, is_filled, is_media_column

_LOOKED_AT = 10_000
_THINGS = (
    "sku|speaker|spk|patient|subject|person|user|client|author|product|article|item|object|scene|session|recording|"
    "series|study|group|family"
)
_OF_KINDS = "(?!.*(class|category|categories|label|lang|type|dataset|source|split))"
_ENDING = "[-_ ]?(u?id|key|name|no|nr|number)"
_NAMES = re.compile(rf"{_OF_KINDS}(.*[-_ ])?(u?id|uuid|{_THINGS})({_ENDING})?")
"""Columns by whose values rows may belong together: what has an id, not what sorts rows into a few kinds."""
_OF_ALL = re.compile(rf"{_OF_KINDS}(.*[-_ ])?((speaker|spk|patient|client|sku)|({_THINGS}){_ENDING})")
_MOST = 10_000
_LONGEST = 100


def note_groups(content: Mapping[str, Any], groups: dict[str, set[str]]) -> None:
    """Add what a sample says of its speaker, product and the like, by the name of the column; at most 10,000 of each.

    Columns that may number the rows of a dataset, or sort them into kinds, are left out: others have the same values.
    """
    for name, value in content.items():
        if isinstance(value, str | int) and _OF_ALL.fullmatch(name.lower()) and value != "":
            found = groups.setdefault(name, set())
            if len(found) < _MOST and len(str(value)) <= _LONGEST:
                found.add(str(value))


def values_of(source: Source, column: str) -> Iterator[object]:
    """Yield the value of a column in each row; None where there is none, or the row cannot be read."""
    if (read := getattr(source, "column", None)) is not None:
        yield from read(column)
        return
    for number in range(len(source)):
        value = None
        with suppress(SourceError):  # said when it is converted
            row = source.row(number)
            value = row.values.get(column, row.named.get(column))
        yield value


@lru_cache(maxsize=1)  # for a look before the conversion, and for its plan
def groups_in(source: Source, column: str | None) -> Sequence[object] | None:
    """Return the group of each row: the value of a column, else what the source has (speakers); None: it has none.

    Raises ConfigurationError if the column has no two values.
    """
    if column is None:
        return getattr(source, "groups", None)
    groups = list(values_of(source, column))
    said = {str(one) for one in groups if is_filled(one)}
    if len(said) < 2:
        columns = dict.fromkeys(name for row in first_rows(source) for name in (*row.files, *row.values))
        raise ConfigurationError(
            f"--split-by {column}: {'all rows have one value' if said else 'no row has a value'} there, and a split "
            f"needs two. Name another column; there are {', '.join(columns)}."
        )
    return groups


def split_groups(groups: Sequence[object], rule: SplitRule, runs: np.ndarray) -> dict[str, np.ndarray]:
    """Assign sample numbers to split parts by ratio, those of a group to one part; a row without a group is its own.

    `runs` (rows,) is the run that found each sample, from 0; a group stays in the part that its first run gave it.
    """
    keys = [key_of("row", n) if not is_filled(one) else key_of(str(one)) for n, one in enumerate(groups)]
    _, of = np.unique(np.array(keys, np.uint64), return_inverse=True)
    begun = np.full(of.max() + 1, len(runs))
    np.minimum.at(begun, of, runs)
    shares = sorted((share, name) for name, share in rule.ratios if share)
    total = sum(share for share, _ in shares)
    part_of = np.full(len(begun), len(shares) - 1)
    for run in range(int(runs.max()) + 1):
        sizes = np.bincount(of[runs <= run], minlength=len(begun))
        new = np.flatnonzero(begun == run)
        for part, (share, _) in enumerate(shares[:-1]):
            there = int(sizes[(begun < run) & (part_of == part)].sum())
            chosen = _chosen(sizes[new], float(share / total) * int(sizes.sum()) - there, len(shares) - part - 1, there)
            part_of[new[chosen]] = part
            new = np.delete(new, chosen)
    places = {name: place for place, (_, name) in enumerate(shares)}
    return {name: np.flatnonzero(part_of[of] == places[name]) for name, share in rule.ratios if share}


def _chosen(sizes: np.ndarray, wanted: float, later: int, there: int) -> list[int]:
    """Return the places of groups with about so many samples: the first that fit, or the smallest if the part has none.

    One group stays for each of the `later` parts.
    """
    chosen: list[int] = []
    for place, size in enumerate(sizes.tolist()):
        if wanted <= 0.5 or len(sizes) - len(chosen) <= later:
            break
        if size <= 2 * wanted:
            chosen.append(place)
            wanted -= size
    return chosen or ([int(sizes.argmin())] if not there and len(sizes) > later else [])


def parted_groups(source: Source, parts: Sequence[np.ndarray], *, are_told: bool) -> list[tuple[str, int]]:
    """Return columns that look like groups, with how many of their values rows of several split parts share.

    Of lists only, and of these the first rows of each part; `parts` are the numbers of their samples. If the lists tell
    the parts (`are_told`), each may number its rows from 0, and name other files alike: such columns are left out.
    """
    entry = getattr(source, "entry", None)
    if entry is None:
        return []
    of_parts = [list(_entries(entry, numbers[: _LOOKED_AT // len(parts)].tolist())) for numbers in parts]
    files = {name for row in first_rows(source) for name in row.named}
    found = []
    for name in dict.fromkeys(name for some in of_parts for one in some[:LOOKED_AT] for name in one):
        is_file = name in files or is_media_column(name)
        if (are_told and is_file) or not (is_file or _NAMES.fullmatch(name.lower())):
            continue
        seen = [Counter(str(one[name]) for one in some if is_filled(one.get(name))) for some in of_parts]
        shared = {one for at, some in enumerate(seen) for one in some if any(one in other for other in seen[:at])}
        recurs = not are_told or any(count > 1 for some in seen for count in some.values())
        if shared and recurs and len(set().union(*seen)) > 2:
            found.append((name, len(shared)))
    return found


def _entries(read: Callable[[int], Mapping[str, Any]], numbers: Sequence[int]) -> Iterator[Mapping[str, Any]]:
    for number in numbers:
        with suppress(SourceError):  # said when it is converted
            yield read(number)
