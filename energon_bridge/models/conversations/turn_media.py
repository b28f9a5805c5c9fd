"""Images, videos and sounds of turns: where each stands, and what of turns is refused.

A text has a place for an image, video or sound as `<image>`, `<video>` or `<audio>`, a list of parts as a part of
that type. In an answer, and in a text that is a part, these words are text: they are only taken for that if every
image, video and sound has a place elsewhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from energon_bridge.core.errors import SampleError
from energon_bridge.core.format.media import is_base64
from energon_bridge.models.conversations.parts import (
    KEYS,
    MAPPING,
    MEDIA,
    PLACES,
    URIS,
    RawTurn,
    check_no_file,
    check_text_part,
    is_file,
    medium_by_name,
    names_file,
    names_medium,
    own_payload,
    part_kind,
    part_payload,
    part_text,
    short,
    unknown_part,
)
from energon_bridge.models.conversations.places import Medium as Medium, respelled, spelled, unwrapped
from energon_bridge.models.conversations.questions import CHOICES, CONTEXTS, texts_in
from energon_bridge.models.conversations.segments import check_unseen, part_options
from energon_bridge.models.conversations.turns import (
    CONVERSATIONS,
    KNOWN,
    ROLES,
    SAYING,
    SEVERAL,
    content_of,
    find_pair,
    form_of,
    has_pairs,
    is_learned,
    role_name,
    without,
)
from energon_bridge.models.conversations.withheld import NESTED, is_rejecting, learned_if, may_be_unlearned

_THOUGHTS = re.compile(
    r"think|(inner_)?thoughts?|cot|chain_of_thought|scratchpad|(inner_)?monologue|analysis|rationale|deliberation"
    r"|(reasoning|thinking|thought)_(text|trace|details|steps|process|chain)|thinking_content"
)
"""Keys with what an answer thought: no template writes them."""
_ASIDE = ("channel", "type", "kind")
"""Keys that may say that a turn is no answer: gpt-oss' `channel: analysis`."""
_UNSAID = ("refusal", "audio")  # no template writes these
_INLINE = re.compile(r"<(?:img|image|video|audio)>([^<>]+)</(?:img|image|video|audio)>")  # of Qwen-VL, Qwen-Audio
_OWN_KEYS = frozenset({"role", "from", "content", "value"})
_CUT: tuple[Medium, ...] = ("video", "audio")


def unseen_medium(entry: Mapping[str, Any]) -> str | None:
    """Return the complaint about an entry without media that has a column naming one, so asks about it; else None.

    A context stands for itself, as the transcript of a video does. Beside turns, ids of videos and sounds are metadata.
    """
    has_turns = form_of(entry) is not None
    contexts = {name for name in entry if name.lower() in CONTEXTS and entry[name]}
    is_about = has_turns or (not contexts and (find_pair(entry) is not None or has_pairs(entry)))
    said = {*(find_pair(entry) or ()), *SEVERAL}
    for name, value in entry.items():
        found = _NAMES_MEDIUM.fullmatch(name.lower())
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, Mapping) and {"bytes", "path"}.issuperset(first):  # of a table
            first = first.get("bytes") or first.get("path")
        elif isinstance(first, Mapping) and name not in (*NESTED, *CONVERSATIONS, *SEVERAL):  # `multi_modal_data`
            inner = (one for key, one in first.items() if (names_file(name) or names_file(key)) and is_file(one))
            first = next((text for text in texts_in([*inner]) if names_medium(text) or text.startswith(URIS)), None)
        if isinstance(first, bytes) or is_base64(first) or (isinstance(first, str) and first.startswith(URIS)):
            return f"`{name}` has a file in it, which is no part of the sample: convert the list (energon convert)"
        if is_about and _are_pixels(name, value):
            return f"`{name}` seems to be an image in numbers, which is no part of the sample: write it as a file"
        if names_medium(first) and (found or names_file(name) or (name not in said and _is_path(name, first))):
            return (
                f"`{name}` names a file ({short(first)}) that is no part of the sample, and the question would be "
                "learned without it: convert the list (energon convert), or call the column image, video or audio and "
                f"add an auxiliary store to the mix; or leave it out (energon convert with --ignore {name})"
            )
        is_id = isinstance(value, str | int) and not isinstance(value, bool) and value not in ("", -1)
        if found and is_id and is_about and (not has_turns or found[1] in _OF_IMAGES):
            return (
                f"`{name}` ({short(value)}) seems to name what the question is about, and the sample has no image, "
                f"video or sound: add a column image, video or audio with its file, or leave this one out (energon "
                f"convert with --ignore {name})"
            )
    names = () if contexts else (*CONVERSATIONS, *SEVERAL)
    pairs = (one for name in names if isinstance(entry.get(name), list) for one in entry[name])
    unseen = next((one for pair in pairs if isinstance(pair, Mapping) and (one := unseen_medium(pair))), None)
    return unseen and unseen.partition(", or leave this one out")[0]


def _are_pixels(name: str, value: Any) -> bool:
    depth = 0
    while isinstance(value, list | tuple) and value:
        depth, value = depth + 1, value[0]
    return depth > 1 and isinstance(value, int | float) and (names_file(name) or "pixel" in name.lower())


def _is_path(name: str, text: str) -> bool:
    """Return whether a column's text that names a file is no sentence, no choice, and not the entry's own name."""
    return " " not in text and name.lower() not in (*CHOICES, *NAMES)


NAMES = ("id", "key", "uid", "name", "source")
"""Columns with the name of an entry, which may look like that of a file."""


def check_other_media(entry: Mapping[str, Any]) -> None:
    """Raise SampleError for a column with a file that beside other media would not be seen.

    Its name has a number (`image_2`), or the entry names its media, and other files in other columns of files.
    """
    taken = {_base(text) for name in _TAKEN for text in texts_in(entry.get(name))}
    for name, value in entry.items():
        files = (_base(one) for one in texts_in(value) if names_medium(one) and "://" not in one)
        is_other = bool(taken) and name not in _TAKEN and names_file(name) and any(one not in taken for one in files)
        if is_other or (_SIBLING.fullmatch(name.lower()) and value and is_file(value)):
            raise SampleError(
                f"`{name}` has a file that would not be seen: list all files in `images`, `videos` or `audios`, or "
                f"leave it out (energon convert with --ignore {name})"
            )


def _base(path: str) -> str:
    return path.rpartition("/")[2]


_TAKEN = ("image", "images", "video", "videos", "audio", "audios")
_SIBLING = re.compile(r"(image|img|picture|photo|video|audio|sound)s?_?\d+(_?(path|name|file|url))?")
_OF_IMAGES = ("image", "img", "picture", "photo", "coco", "flickr", "vg")
_NAMES_MEDIUM = re.compile(
    rf"({'|'.join(_OF_IMAGES)}|video|vid|clip|youtube|yt|audio|audiocap|sound)s?_?(?:ids?|names?|uids?)"
)


def placed(turns: Sequence[RawTurn], there: Mapping[Medium, int]) -> list[RawTurn]:
    """Return turns whose places fit the media of a sample; `there` counts those that are not in its parts.

    `<image>` stands for a video where there are only videos, as in the lists of LLaVA-Video.

    Raises:
        SampleError: A text may or may not be a place.
    """
    turns = _respelled(_unwrapped(turns, there), there)
    places, literal, answered = _counted(turns)
    if not (places or literal or answered):
        return list(turns)
    if not places["video"] and not there.get("image") and 0 < places["image"] == there.get("video"):
        turns = [_as_videos(turn) for turn in turns]
        places, literal, answered = _counted(turns)
        answered["video"] += answered.pop("image", 0)
    for kind in MEDIA:
        count = places[kind]
        wanted = there.get(kind, 0)
        if (answered[kind] and (count != wanted or not count)) or (literal[kind] and wanted and not count):
            where = "an answer" if answered[kind] else "a text part"
            raise SampleError(
                f"{where} contains the placeholder '<{kind}>', and the questions have {count} for {wanted} {kind}s, so "
                f'it may be a place or a text: write places as parts {{"type": "{kind}"}}, and texts as parts '
                '{"type": "text", "text": …}'
            )
    return list(turns)


def check_turns(turns: Sequence[RawTurn]) -> None:
    """Check that turns are understood, and that there is something to learn.

    Raises:
        SampleError: It says what is wrong.
    """
    learned: list[bool] = []
    counts: Counter[str] = Counter()
    for turn in turns:
        name = role_name(turn)
        content = None if name is None else content_of(turn)
        says = name is not None and any(turn.get(key) for key in SAYING)
        if not isinstance(content, str | list | tuple) and not (content is None and says):
            raise SampleError(f"a turn must have role and content, or from and value, got {short(turn)}. {KEYS}")
        if name is None or name not in ROLES:
            raise SampleError(f"the role {name!r} of a turn is not known: write {', '.join(KNOWN)}")
        role = ROLES[name]
        has_text = isinstance(content, str) or says or any(part_kind(part) == "text" for part in content or ())
        learned.append(is_learned(role, turn) and role == "assistant" and has_text)
        if unsaid := next((key for key in _UNSAID if turn.get(key) and not content), None):
            raise SampleError(
                f"a turn has no content but {unsaid}={short(turn[unsaid])}: write what it says as content"
            )
        for part in content if isinstance(content, list | tuple) else (content or "",):
            kind = part_kind(part)
            text = part_text(part) if kind == "text" else None
            if kind is None or (kind == "text" and text is None):
                raise unknown_part(part)
            if text is not None:
                check_text_part(part)
                inline = _INLINE.search(text) if role != "assistant" and "</" in text else None
                if inline is not None and (medium_by_name(inline[1]) is not None or inline[1].strip().isdigit()):
                    kind = next(kind for kind in MEDIA if kind[:2] == inline[0][1:3])
                    raise SampleError(
                        f"a text names {'a' if kind == 'video' else 'an'} {kind} as {short(inline[0])}, which would "
                        f"be seen as text: write '<{kind}>' there, and its path in `{kind}s`"
                    )
                continue
            assert kind != "text"
            payload = part_payload(part, kind)
            if isinstance(payload, MAPPING):
                check_unseen(payload, f"the {kind} of a part")
            part_options(part, kind)
            if part.get("index") not in (None, counts[kind]):
                raise SampleError(
                    f"a part has the index {part['index']!r} and is {kind} {counts[kind]} of the conversation: list "
                    f"the {kind}s in the order of their places"
                )
            counts[kind] += 1
        if turn.keys() <= _OWN_KEYS and len(turn) == 2:
            continue
        _check_one_meaning(turn)
        if marked := next((key for key in turn if _is_judged_wrong(key, turn[key])), None):
            raise SampleError(
                f"a turn of {name!r} has {marked}={turn[marked]!r}, and was rejected: take the turn out, or the key"
            )
        if role == "assistant":
            if aside := next((key for key in turn if may_be_unlearned(key, turn[key])), None):
                raise SampleError(
                    f"an answer has {aside}={turn[aside]!r}, and may be none to be learned: write weight: 0 into "
                    "answers that are not, or leave the key out"
                )
            _check_reasoning(turn)
            continue
        places = _counted([turn])[0]
        for key in turn.keys() - _OWN_KEYS:
            check_no_file(key, turn[key], role)
            if _WHICH.fullmatch(key.lower()) and turn[key] not in (None, 0, "0", [], [0]) and not any(places.values()):
                raise SampleError(
                    f"a turn of {role!r} has {key}={turn[key]!r}, and all images would be shown in the first question: "
                    "write '<image>' into each turn"
                )
        if any(places[one] for one in _CUT):
            check_unseen(without(turn, *_OWN_KEYS), f"the turn of {role!r}")
    for key in _ORDERS:
        numbers = [number for turn in turns if type(number := turn.get(key)) is int]
        if len(numbers) == len(turns) and numbers != sorted(numbers):
            raise SampleError(f"the turns are not in their order, which `{key}` says ({short(numbers)}): sort them")
    _check_branches(turns)
    if not any(learned):
        said = any(ROLES[str(role_name(turn))] == "assistant" for turn in turns)
        why = "keys of its turns (weight, loss, train, …) leave out what would be learned, or its answers have no text"
        flagged = f": {why}" if said else ""
        raise SampleError(f"the conversation has no answer to learn{flagged}")


def _check_one_meaning(turn: RawTurn) -> None:
    """Raise SampleError for a turn with two roles, two texts, or a text that corrects it."""
    roles = {ROLES[name] for key in ("role", "from") if (name := str(turn.get(key)).strip().lower()) in ROLES}
    if len(roles) > 1:
        raise SampleError(f"a turn has role={turn['role']!r} and from={turn['from']!r}: write one of them")
    said = content_of(turn)
    for key, value in turn.items() if isinstance(said, str) else ():
        is_other = isinstance(value, str) and value.strip() and value not in said and said not in value
        if (is_other and key in ("value", "text")) or (value and value != said and _CORRECTED.fullmatch(key.lower())):
            raise SampleError(
                f"a turn has the content {short(said)} and another text in `{key}` ({short(value)}), which would not "
                "be learned: write the right one as content, and leave the other out"
            )


_CORRECTED = re.compile(
    r"(?:edited|corrected|revised|rewritten|improved)_(?:text|content|value|answer|response|message)"
    r"|(?:text|content|value|answer|response|message)_(?:edited|corrected|revised|rewritten|improved)|correction"
)
"""Keys with the text that an annotator wrote in place of a turn's."""


def _check_branches(turns: Sequence[RawTurn]) -> None:
    """Raise SampleError for turns that are branches of a tree: by the one that each answers, or those that follow."""
    ids = [next((turn[key] for key in _IDS if turn.get(key) is not None), None) for turn in turns]
    for number, turn in enumerate(turns):
        key = next((key for key in (*_PARENTS, *_CHILDREN) if turn.get(key)), None)
        if key is None:
            continue
        is_branch = turn[key] in ids and turn[key] != ids[number - 1] if key in _PARENTS else _branches(turn[key])
        if is_branch:
            raise SampleError(
                f"the turns are a tree, of which `{key}` tells the branches ({short(turn[key])}), and would be learned "
                "one after another: write a conversation for each way through it"
            )


def _branches(value: Any) -> bool:
    """Return whether a turn is followed by several others, or has turns inside."""
    return isinstance(value, list | tuple) and (len(value) > 1 or any(isinstance(one, MAPPING) for one in value))


_IDS = ("id", "message_id", "turn_id", "uuid", "node_id")
_PARENTS = ("parent", "parent_id", "parent_message_id", "parent_uuid", "reply_to", "in_reply_to")
_CHILDREN = ("children", "replies", "children_ids")


def _is_judged_wrong(key: str, value: Any) -> bool:
    return (key == "label" and value is False) or (learned_if(key) is None and is_rejecting(key, value, ()))


def _check_reasoning(turn: RawTurn) -> None:
    """Raise SampleError for reasoning where no template writes it, unless the content has it, too."""
    if aside := next((key for key in _ASIDE if str(turn.get(key)).lower() in _THINKING), None):
        raise SampleError(
            f"a turn has {aside}={turn[aside]!r}, and would be learned as an answer: write it as reasoning_content of "
            "the answer that follows, or leave it out"
        )
    said = "\n".join(texts_in([content_of(turn), *map(turn.get, SAYING)]))
    texts = {key: _thoughts_in(value) for key, value in turn.items() if _THOUGHTS.fullmatch(key.lower())}
    if lost := next((key for key, some in texts.items() if any(one.strip() not in said for one in some)), None):
        raise SampleError(
            f"an answer has reasoning in `{lost}` ({short(turn[lost])}), which would not be learned: call it "
            "reasoning_content, or leave it out"
        )


def _thoughts_in(value: Any) -> list[str]:
    """Return the texts of reasoning: one, or those in a list of objects (OpenRouter's `reasoning_details`)."""
    ones = value if isinstance(value, list | tuple) else [value]
    return texts_in([[one.get("text"), one.get("summary")] if isinstance(one, MAPPING) else one for one in ones])


_WHICH = re.compile(r"(?:image|img|picture|photo|video|audio|sound)s?_?(?:index|idx|indices|indexes|no|num|number)")
"""Keys of turns that say which of several files each is about."""
_ORDERS = ("turn", "turn_id", "turn_index", "turn_idx", "turn_number")
_THINKING = ("analysis", "commentary", "thinking", "thought", "thoughts", "reasoning", "think")


def check_places(turns: Sequence[RawTurn], there: Mapping[Medium, int]) -> None:
    """Check that media beside turns have places in them; without any, the first question is theirs.

    Raises:
        SampleError: They have not.
    """
    places = _counted(placed(turns, there))[0]
    asks = any(ROLES.get(role_name(turn) or "") == "user" for turn in turns)
    for kind in MEDIA:
        count = places[kind]
        wanted = there.get(kind, 0)
        if count != wanted and (count or not asks):
            raise SampleError(mismatch(kind, count, wanted))


def mismatch(kind: str, places: int, there: int) -> str:
    """Return the complaint about a wrong number of images, videos or sounds."""
    return f"the text has {places} {kind} placeholders '<{kind}>' but the sample has {there} {kind}s"


def _counted(turns: Sequence[RawTurn]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Count by kind: parts without a medium of their own, placeholders in texts, and placeholders in answers."""
    places: Counter[str] = Counter()
    literal: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    for turn in turns:
        content = content_of(turn) if isinstance(turn, MAPPING) else None
        if isinstance(content, str):
            if "<" in content and (written := PLACES.findall(content)):
                is_answer = ROLES.get(role_name(turn) or "") == "assistant"
                (answered if is_answer else places).update(written)
        elif isinstance(content, list | tuple):
            for part in content:
                kind = part_kind(part)
                if kind == "text":
                    literal.update(PLACES.findall(part_text(part) or ""))
                elif kind is not None and own_payload(part) is None:
                    places[kind] += 1
    return places, literal, answered


def _respelled(turns: Sequence[RawTurn], there: Mapping[Medium, int]) -> Sequence[RawTurn]:
    """Return turns in which other spellings of placeholders (`[IMG]`) are parts, for media without a placeholder."""
    media = [kind for kind in MEDIA if there.get(kind)]
    texts = {
        number: text
        for number, turn in enumerate(turns)
        if isinstance(turn, MAPPING)
        and isinstance(text := content_of(turn), str)
        and (media or "<" in text)  # without media, all others are texts
        and ROLES.get(role_name(turn) or "") != "assistant"
    }
    has_places: set[str | None] = {kind for text in texts.values() if "<" in text for kind in PLACES.findall(text)}
    if has_places.issuperset(media) and (media or not any(map(spelled, texts.values()))):
        return turns
    in_parts = [part for turn in turns if isinstance(turn, MAPPING) for part in _parts_of(turn)]
    has_places.update(map(part_kind, in_parts))
    if "image" in has_places and not there.get("image"):
        has_places.add("video")  # LLaVA-Video
    wanted: dict[Medium, int] = {kind: there.get(kind, 0) for kind in MEDIA if kind not in has_places}
    if any(wanted.values()) and (said := next((one for one in in_parts if _says_place(one, wanted)), None)):
        raise SampleError(
            f"a text part has a place ({short(part_text(said))}), and the media have none: write places as parts "
            '{"type": "image"}, {"type": "video"} or {"type": "audio"}'
        )
    found = respelled(list(texts.values()), wanted)
    changed = dict(zip(texts, found, strict=True))
    return [
        {**without(turn, "content", "value"), "content": changed[number]}
        if isinstance(changed.get(number), list)
        else turn
        for number, turn in enumerate(turns)
    ]


def _unwrapped(turns: Sequence[RawTurn], there: Mapping[Medium, int]) -> Sequence[RawTurn]:
    """Return turns without tags around the places of questions."""
    if not any(there.values()):
        return turns
    made: list[RawTurn] = []
    for turn in turns:
        said = content_of(turn) if isinstance(turn, MAPPING) else None
        is_asked = isinstance(said, str) and ROLES.get(role_name(turn) or "") != "assistant"
        bare = unwrapped(said) if is_asked else said
        made.append(turn if bare == said else {**without(turn, "content", "value"), "content": bare})
    return made


def _parts_of(turn: RawTurn) -> Sequence[Any]:
    content = content_of(turn)
    return content if isinstance(content, list | tuple) else ()


def _says_place(part: Any, wanted: Mapping[Medium, int]) -> bool:
    text = part_text(part) if part_kind(part) == "text" else None
    is_other = (place for place in spelled(text or "") if place.written != f"<{place.kind}>")
    return any(wanted.get(place.kind) for place in is_other)


def _as_videos(turn: RawTurn) -> RawTurn:
    name = "content" if isinstance(turn.get("content"), str) else "value"
    text = turn.get(name)
    if not isinstance(text, str) or ROLES.get(role_name(turn) or "") == "assistant":
        return turn
    return {**turn, name: text.replace("<image>", "<video>")}
