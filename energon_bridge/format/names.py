"""How a tar member's name becomes a sample key and a part name.

The key is the folder plus the base name up to its first dot, the part is the rest: `a/b.c/x.seg.png` has key `a/b.c/x`
and part `seg.png`. Names without a dot in the base name belong to no sample, and neither do names that start with a
component like `__meta__`. Same rules as Megatron Energon 7.4 (reference section 1.2); its pattern is the format.
"""

from __future__ import annotations

import re

_MEMBER = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_IGNORED = re.compile(r"__[^/]*__($|/)")


def split_member_name(name: str) -> tuple[str, str] | None:
    """Split a member name into (key, part); None if the member belongs to no sample."""
    if name.startswith("__") and _IGNORED.match(name):
        return None
    folder_end = name.rfind("/") + 1
    dot = name.find(".", folder_end)
    if dot < 0:
        return None
    if dot > folder_end and "\n" not in name:
        return name[:dot], name[dot + 1 :]
    match = _MEMBER.match(name)  # hidden files in folders and line ends: only the pattern itself says
    return (match.group(1), match.group(2)) if match else None
