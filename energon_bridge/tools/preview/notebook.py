"""Samples and batches in notebooks: tables with small pictures of their images.

Captions and keys come from the web, so they are escaped and shortened, and pictures are re-encoded from decoded values.
A table is bounded in size, whatever a batch holds, and nothing here raises, as in `texts.py`.
"""

from __future__ import annotations

import base64
import html
import io
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

from energon_bridge.core.samples.sample import meta_field
from energon_bridge.core.samples.showing import counted
from energon_bridge.tools.preview.texts import MOST_FIELDS, shortened, shown_fields, title_of, value_text

_MOST_ROWS = 8
_MOST_TEXT = 60
_MOST_TEXT_IN_CELL = 200
_SIDE = 96
"""Pixels of the longer side of a picture."""
_MOST_PIXELS = 1 << 26
"""Images with more values than this are named, not shown."""
_PICTURE_DTYPES = frozenset({"uint8", "float16", "bfloat16", "float32", "float64"})


def html_of(record: Any, names: Iterable[str]) -> str:
    """Return a table of a sample or of the first rows of a batch, with pictures of its images."""
    fields = [(name, value) for name, value in shown_fields(record, names) if value is not None][:MOST_FIELDS]
    keys = meta_field(record, "__key__")
    rows = len(keys) if isinstance(keys, list) else None
    head = f"<b>{_escaped(type(record).__name__)}</b> ({_escaped(title_of(record))})"
    if rows is None:
        body = "".join(f"<tr><th>{_escaped(name)}</th><td>{_cell(value)}</td></tr>" for name, value in fields)
        return f"{head}<table>{body}</table>"
    lines = [f"<tr><th>key</th>{''.join(f'<th>{_escaped(name)}</th>' for name, _ in fields)}</tr>"]
    lines += [f"<tr><td></td>{''.join(f'<td>{_escaped(value_text(value))}</td>' for _, value in fields)}</tr>"]
    for row in range(min(rows, _MOST_ROWS)):
        cells = "".join(f"<td>{_cell(entry) if has else ''}</td>" for has, entry in _entries(fields, row, rows))
        lines.append(f"<tr><td>{_escaped(shortened(str(keys[row]), _MOST_TEXT))}</td>{cells}</tr>")
    more = f"and {counted(rows - _MOST_ROWS, 'more row')}" if rows > _MOST_ROWS else ""
    return f"{head}<table>{''.join(lines)}</table>{more}"


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
        return _escaped(shortened(value, _MOST_TEXT_IN_CELL))
    if isinstance(value, (list, tuple)) and value and all(isinstance(entry, (str, int, float)) for entry in value[:4]):
        return _escaped(shortened(reprlib.repr(list(value)), _MOST_TEXT_IN_CELL))
    return _escaped(shortened(value_text(value), _MOST_TEXT_IN_CELL))


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
    """Return an image of Pillow, numpy (H, W, C) or torch (C, H, W) as a small Pillow image; None for anything else.

    Floats are shown as they are if they lie in [0, 1], and otherwise from their least to their largest value.
    """
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
        low = float(pixels.min())
        high = float(pixels.max())
        if low < 0 or high > 1:  # normalised: shown from its darkest to its brightest value
            pixels = (pixels - low) / max(high - low, 1e-12)
        pixels = (255 * pixels).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
