"""What a table of unknown columns seems to be: the nearest sample type, and the column of each of its fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from energon_bridge.format.media_kinds import kind_by_name
from energon_bridge.prepare.sources.base import Layout, Row

CONVERSATIONS = ("messages", "conversations", "conversation")
_CAPTIONS = ("caption", "text", "txt", "captions", "description", "alt", "alt_text", "title", "prompt")
_QUESTIONS = ("question", "query", "instruction", "context")
_ANSWERS = ("answers", "answer", "response", "output")
_LABELS = ("label", "labels", "class", "category", "target", "label_name", "class_name")


def propose_layout(rows: Sequence[Row]) -> Layout:
    """Propose how rows become samples, from the names and values of their columns."""
    files = list(dict.fromkeys(name for row in rows for name in row.files))
    values = list(dict.fromkeys(name for row in rows for name in row.values))
    if _named(values, CONVERSATIONS) or len(files) > 1 or not _are_images(rows):
        lists = {name for name in files if any(isinstance(row.files.get(name), tuple) for row in rows)}
        return Layout(sample_type="CrudeSample", bare=frozenset(files if len(files) == 1 else lists & {"images"}))
    if not files:
        text = _named(values, ("text", "content", "caption"))
        if text is None:
            return Layout(sample_type="CrudeSample")
        return Layout(sample_type="TextSample", fields={"text": text})
    image = {"image": files[0]}
    bare = frozenset(files)
    question, caption = _named(values, _QUESTIONS), _named(values, _CAPTIONS)
    label = _named(values, _LABELS)
    if question is not None:
        answers = _named(values, _ANSWERS)
        fields = {**image, "context": question} | ({"answers": answers} if answers else {})
        return Layout(sample_type="VQASample", fields=fields, bare=bare)
    if caption is not None:
        access = caption + ("[0]" if any(isinstance(row.values.get(caption), list) for row in rows) else "")
        return Layout(sample_type="CaptioningSample", fields={**image, "caption": access}, bare=bare)
    if label is not None:
        numbered = all(str(row.values.get(label, "0")).lstrip("-").isdigit() for row in rows)
        fields = {**image, ("label" if numbered else "label_name"): label}
        if numbered and (name := _named(values, ("label_name", "class_name"))) and name != label:
            fields["label_name"] = name
        return Layout(sample_type="ImageClassificationSample", fields=fields, bare=bare)
    return Layout(sample_type="ImageSample", fields=image, bare=bare)


def _named(columns: Iterable[str], names: Sequence[str]) -> str | None:
    lower = {column.lower(): column for column in reversed(list(columns))}
    return next((lower[name] for name in names if name in lower), None)


def _are_images(rows: Sequence[Row]) -> bool:
    """Whether each file column holds single images."""
    return all(
        not isinstance(content, tuple) and kind_by_name(f"x.{content.extension}") == "image"
        for row in rows
        for content in row.files.values()
    )
