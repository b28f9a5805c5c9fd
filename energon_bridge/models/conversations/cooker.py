"""Conversations in crude datasets, cooked without a cooker of one's own.

A sample has a part `json` (a line of a `.jsonl` file is one) with the turns, in any of the forms that `turns.py` knows,
`system` and `tools` beside them, and its images, videos and sounds in one of these places, in the order of their
placeholders:

    {"image": NAME} or {"images": [NAME, …]}   in the auxiliary store `images` of the dataset, if it has one, else
    {"video": NAME} or {"videos": [NAME, …]}   among the sample's own parts; likewise `videos`, `audios`
    {"type": "image", "image": NAME}           in a part of a turn: in the auxiliary store
    nothing of the kind                        all image parts of the sample, `0.jpg`, `1.jpg`, …, `10.jpg`, all
                                               videos, and all sounds, `0.wav` or `audios.0.mp4`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from energon_bridge.core.encoder.cooking import Cooker, basic_sample_keys
from energon_bridge.core.errors import EnergonError, SampleError, SkipSample
from energon_bridge.core.format.jsonl import PART, is_jsonl, parse_line
from energon_bridge.core.format.tar import parse_sample
from energon_bridge.core.format.tar_index import index_name
from energon_bridge.core.samples import SourceInfo
from energon_bridge.core.storage import open_store
from energon_bridge.core.stores import FileStore
from energon_bridge.models.conversations.conversation import own_media, with_segments
from energon_bridge.models.conversations.parts import MEDIA, Medium, RawTurn, own_payload, part_kind, part_payload
from energon_bridge.models.conversations.places import by_place
from energon_bridge.models.conversations.questions import is_unanswered, texts_in
from energon_bridge.models.conversations.turn_media import check_other_media, check_turns, unseen_medium
from energon_bridge.models.conversations.turns import (
    CONVERSATIONS,
    PAIRS,
    find_pair,
    read_tools,
    read_turns,
    system_prompt,
    with_turns,
)
from energon_bridge.models.conversations.unused import name_unused
from energon_bridge.models.conversations.withheld import fault_of_split, fault_of_verdict, first_held_out, held_out_by
from energon_bridge.models.families import ChatSample


def cook_conversation(sample: Mapping[str, Any], **stores: FileStore) -> ChatSample:
    """Make a `ChatSample` from a crude sample.

    Raises:
        SkipSample: It is a question without an answer, as SQuAD 2 has them.
        SampleError: There are no turns, they are not understood, or a named image, video or sound cannot be found.
    """
    content = sample.get("json")
    content = with_turns(content) if isinstance(content, Mapping) else content
    turns = read_turns(content) if isinstance(content, Mapping) else None
    if turns is None and isinstance(content, Mapping) and is_unanswered(content):
        raise SkipSample("has a question without an answer: `answers` is empty")
    if turns is None:
        inside = (
            f", and its json has {', '.join(map(str, content)) or 'nothing'}" if isinstance(content, Mapping) else ""
        )
        parts = ", ".join(name for name in sample if not name.startswith("__"))
        raise SampleError(
            f"a crude sample must have a part 'json' with turns as {' or '.join(CONVERSATIONS)}, or a question and its "
            f"answer as {' and '.join(PAIRS[0])}, …; this one has the parts {parts or 'none'}{inside}"
        )
    assert isinstance(content, Mapping)
    check_turns(turns)
    _check_withheld(sample, content)
    extensions = [name.rpartition(".")[2].lower() for name in (*sample, *texts_in(content.get("images")))]
    media = with_segments(content, {kind: _media(kind, sample, content, turns, stores) for kind in MEDIA}, extensions)
    if any(media.values()):
        check_other_media(content)
    elif unseen := unseen_medium(content):
        raise SampleError(unseen)
    elif document := next((name for name in sample if name.lower().rpartition(".")[2] in _DOCUMENTS), None):
        raise SampleError(
            f"the part `{document}` of the sample is no image, video or sound, and the question would be learned "
            "without it: make images of it, or leave it out"
        )
    name_unused(sample, content)
    return ChatSample(
        **basic_sample_keys(sample),
        messages=turns,
        images=media["image"],
        videos=media["video"] or None,
        audios=media["audio"] or None,
        tools=read_tools(content),
        system=system_prompt(content),
    )


_DOCUMENTS = ("pdf", "gz", "nii", "dcm", "docx", "pptx", "djvu", "svg")
"""Endings of the names of parts that questions are about, and models do not see."""
COOKERS = (Cooker(cook_conversation),)


def _check_withheld(sample: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Raise SampleError for a sample that is held out among others in its file, or was rejected by annotators.

    Tables were looked at when they were opened.
    """
    sources: Sequence[SourceInfo] = sample.get("__sources__") or ()
    if any(source.shard_name.endswith((".parquet", ".arrow")) for source in sources):
        return
    fault = fault_of_verdict(content, find_pair(content) or ())
    if fault is None and len(sources) == 1 and (said := held_out_by(content)) is not None:
        fault = fault_of_split(said, _first_says(sources[0].dataset_path, sources[0].shard_name))
    if fault is not None:
        raise SampleError(fault)


_LOOKED_AT = 16


@lru_cache(maxsize=1024)
def _first_says(path: str, shard: str) -> bool | None:
    """Return whether the first samples of a file say that they are held out; None: they say nothing of it."""
    store = open_store(path.rpartition("/")[0] if is_jsonl(path) else path)
    size = min(8 * (_LOOKED_AT + 1), store.size(index_name(shard)))
    places = np.frombuffer(store.read_range(index_name(shard), 0, size), "<u8").tolist()
    entries: list[Any] = []
    for start, end in pairwise(places):
        data = store.read_range(shard, start, end - start)
        with suppress(EnergonError):  # named when it is loaded
            part = data if is_jsonl(path) else parse_sample(data, where=shard)[1].get(PART, b"{}")
            entries.append(parse_line(memoryview(part)))
    return first_held_out(entry for entry in entries if isinstance(entry, Mapping))


def _media(
    kind: Medium, sample: Mapping[str, Any], content: Any, turns: Sequence[RawTurn], stores: Mapping[str, FileStore]
) -> Any:
    """Return the media that the JSON of a sample names, itself or in its turns, or the sample's own parts."""
    named = by_place(content.get(f"{kind}s") or content.get(kind))
    own = [] if named else own_media(sample, kind)
    if not named and (f"{kind}s" in stores or not own):
        parts = (part for turn in turns if isinstance(turn.get("content"), list) for part in turn["content"])
        of_kind = (part for part in parts if part_kind(part) == kind and own_payload(part) is None)
        named = [name for part in of_kind if (name := part_payload(part, kind)) is not None]
    if not named:
        return own
    return [_found(kind, name, sample, stores) for name in (named if isinstance(named, list) else [named])]


def _found(kind: Medium, name: Any, sample: Mapping[str, Any], stores: Mapping[str, FileStore]) -> Any:
    if not isinstance(name, str):
        raise SampleError(
            f"the {kind} of the sample is {str(name)[:200]}: expected its name (of several, one list of names), and a "
            "segment of it beside the turns, as segment: [begin, end]; or convert the list (energon convert)"
        )
    store = stores.get(f"{kind}s")
    if store is not None:
        return store.get(name, sample)
    if name not in sample:
        raise SampleError(
            f"the {kind} {name[:200]!r} is not a part of the sample, and the dataset has no auxiliary store '{kind}s' "
            f"to look it up in: convert the list (energon convert), or add aux: {{{kind}s: …}} to the mix"
        )
    return sample[name]
