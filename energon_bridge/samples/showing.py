"""Shows samples and batches to people: as a text of a few lines, and as a table with small pictures for notebooks.

Captions and keys come from the web, so they are escaped and shortened, and pictures are re-encoded from decoded values.
Both forms are bounded in size, whatever a batch holds, and neither ever raises: properties of users' classes may raise
anything, so every `except` here is broad.
"""

from __future__ import annotations

import base64
import html
import io
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

_WIDTH = 120
_MOST_FIELDS = 24
_MOST_ROWS = 8
_MOST_TEXT = 60
_MOST_TEXT_IN_CELL = 200
_SIDE = 96
"""Pixels of the longer side of a picture."""
_MOST_PIXELS = 1 << 26
"""Images with more values than this are named, not shown."""


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 shard`, `1,000 shards`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def described(head: str, lines: Iterable[str]) -> str:
    """Return a heading with its parts below, indented."""
    return "\n  ".join([head, *(line.replace("\n", "\n  ") for line in lines)])


def text_of(record: Any, names: Iterable[str]) -> str:
    """Return the text of a sample or batch with those fields, without meta fields."""
    title, parts = _title(record), []
    for name, value in _shown(record, names):
        if value is not None:
            parts.append(f"{name} {value_text(value)}")
    more = [f"and {len(parts) - _MOST_FIELDS} more fields"] if len(parts) > _MOST_FIELDS else []
    parts = parts[:_MOST_FIELDS] + more
    kind = type(record).__name__
    if not parts:
        return f"{kind}({title})"
    line = f"{kind}({title}: {', '.join(parts)})"
    return line if len(line) <= _WIDTH else described(f"{kind}({title}:", [",\n".join(parts)]) + ")"


def value_text(value: Any) -> str:
    """Describe a value: dtype and shape of arrays, the beginning of a text, types and number of anything else."""
    try:
        return _value_text(value)
    except Exception:  # a property of a user's class
        return type(value).__name__


def html_of(record: Any, names: Iterable[str]) -> str:
    """Return a table of a sample or of the first rows of a batch, with pictures of its images."""
    fields = [(name, value) for name, value in _shown(record, names) if value is not None][:_MOST_FIELDS]
    keys = _meta(record, "__key__")
    rows = len(keys) if isinstance(keys, list) else None
    head = f"<b>{_escaped(type(record).__name__)}</b> ({_escaped(_title(record))})"
    if rows is None:
        body = "".join(f"<tr><th>{_escaped(name)}</th><td>{_cell(value)}</td></tr>" for name, value in fields)
        return f"{head}<table>{body}</table>"
    lines = [f"<tr><th>key</th>{''.join(f'<th>{_escaped(name)}</th>' for name, _ in fields)}</tr>"]
    lines += [f"<tr><td></td>{''.join(f'<td>{_escaped(value_text(value))}</td>' for _, value in fields)}</tr>"]
    for row in range(min(rows, _MOST_ROWS)):
        cells = "".join(f"<td>{_cell(entry) if found else ''}</td>" for found, entry in _entries(fields, row, rows))
        lines.append(f"<tr><td>{_escaped(_cut(str(keys[row]), _MOST_TEXT))}</td>{cells}</tr>")
    more = f"and {counted(rows - _MOST_ROWS, 'more row')}" if rows > _MOST_ROWS else ""
    return f"{head}<table>{''.join(lines)}</table>{more}"


def _title(record: Any) -> str:
    """Return the title: the key of a sample, or the number of rows and of real rows of a batch."""
    keys = _meta(record, "__key__")
    if not isinstance(keys, list):
        return value_text(keys) if isinstance(keys, str) else "no key"
    valid = _meta(record, "__valid__")
    real = len(keys)
    try:
        if valid is not None and str(getattr(valid, "device", "cpu")) == "cpu":
            real = int(valid.sum())
    except Exception:  # a hook may have put anything there, and what is shown in a debugger or a log must not raise
        real = len(keys)
    return f"batch of {len(keys)}" + (f", {real} of them valid" if real != len(keys) else "")


def _meta(record: Any, name: str) -> Any:
    return record.get(name) if isinstance(record, dict) else getattr(record, name, None)


def _shown(record: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        if not (name.startswith("__") and name.endswith("__")):
            try:
                yield name, record[name] if isinstance(record, dict) else getattr(record, name)
            except AttributeError:  # an unset slot
                continue


def _value_text(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    if isinstance(value, str):
        return repr(_cut(value, _MOST_TEXT))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return counted(len(value), "byte")
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return _array_text(value)
    kind = type(value).__name__
    if isinstance(value, dict):
        return f"{kind} of {_cut(', '.join(map(str, list(value)[:8])), _MOST_TEXT)}" if value else f"empty {kind}"
    if isinstance(value, (list, tuple, set, frozenset)):
        kinds = {type(entry).__name__ for entry in value}
        if not kinds:
            return f"empty {kind}"
        return f"{len(value)} x {kinds.pop() if len(kinds) == 1 else '(' + ', '.join(sorted(kinds)[:4]) + ')'}"
    if hasattr(value, "mode") and hasattr(value, "size") and hasattr(value, "convert"):
        return f"{value.mode} image {value.size[0]} x {value.size[1]}"
    return str(kind)


def _array_text(value: Any) -> str:
    device = str(getattr(value, "device", "cpu"))
    where = "" if device == "cpu" else f" on {device}"
    return f"{str(value.dtype).rpartition('.')[2]}[{', '.join(map(str, value.shape))}]{where}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


def _entries(fields: Iterable[tuple[str, Any]], row: int, rows: int) -> Iterator[tuple[bool, Any]]:
    """Yield for each field whether it has an entry for a row, and the entry."""
    for _, value in fields:
        try:
            length = len(value) if isinstance(value, (list, tuple)) else value.shape[0]
            yield (True, value[row]) if length == rows else (False, None)
        except Exception:  # not a column of rows
            yield False, None


def _cell(value: Any) -> str:
    """Return the markup of a value: a picture of an image, the beginning of a text, else a description."""
    picture = _picture(value)
    if picture:
        return f'<img alt="" src="data:image/png;base64,{picture}">'
    if isinstance(value, str):
        return _escaped(_cut(value, _MOST_TEXT_IN_CELL))
    if isinstance(value, (list, tuple)) and value and all(isinstance(entry, (str, int, float)) for entry in value[:4]):
        return _escaped(_cut(reprlib.repr(list(value)), _MOST_TEXT_IN_CELL))
    return _escaped(_cut(value_text(value), _MOST_TEXT_IN_CELL))


def _picture(value: Any) -> str:
    """Return an image of Pillow, numpy (H, W, C) or torch (C, H, W) as a small PNG in base64; "" for anything else."""
    try:
        image = as_image(value)
        if image is None:
            return ""
        image.thumbnail((_SIDE, _SIDE))
        image.save(buffer := io.BytesIO(), "png")
    except Exception:  # not an image that can be shown
        return ""
    return base64.b64encode(buffer.getvalue()).decode()


def as_image(value: Any) -> Any:
    import numpy as np
    from PIL import Image

    if isinstance(value, Image.Image):
        return value.convert("RGB") if value.width * value.height <= _MOST_PIXELS else None
    if not hasattr(value, "shape") or len(value.shape) not in (2, 3) or 0 in value.shape:
        return None
    shape = tuple(value.shape)
    if len(shape) == 2 and min(shape) < 8:  # a table rather than a picture
        return None
    if int(np.prod(shape)) > _MOST_PIXELS or str(value.dtype).rpartition(".")[2] not in _PICTURE_DTYPES:
        return None
    if hasattr(value, "detach"):
        if len(shape) == 3:
            value = value.permute(1, 2, 0)
        value = value.detach().float().cpu().numpy() if value.dtype.is_floating_point else value.detach().cpu().numpy()
    if value.ndim == 3 and value.shape[2] not in (1, 3, 4):
        return None
    pixels = np.asarray(value)
    step = max(1, max(pixels.shape[:2]) // (4 * _SIDE))
    pixels = pixels[::step, ::step]
    if pixels.dtype != np.uint8:
        pixels = np.nan_to_num(pixels.astype(np.float32))
        low, high = float(pixels.min()), float(pixels.max())
        if low < 0 or high > 1:  # normalised: shown from its darkest to its brightest value
            pixels = (pixels - low) / max(high - low, 1e-12)
        pixels = (255 * pixels).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")


_PICTURE_DTYPES = frozenset({"uint8", "float16", "bfloat16", "float32", "float64"})
