"""The file that a dataset brings in its `.nv-meta`: from the parts of a sample to the fields of its type."""

from __future__ import annotations


def sample_loader(raw: dict) -> dict:
    return {
        "__key__": raw["__key__"],
        "image": raw["png"],
        "context": f"What is shown in {raw['__key__']}?",
        "answers": raw["txt"].split(),
        "answer_weights": None,
    }


def part_filter(part: str) -> bool:
    return part in ("png", "txt")
