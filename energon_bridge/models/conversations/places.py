"""Places of images, videos and sounds in questions, in the spellings of other lists than LLaVA's.

    <image 1>, <image_00>, <|image_1|>, <image-1>, [IMG_2]          by their numbers, which count from 0 or 1
    <ImageHere>, <Image>, [IMG], <image_placeholder>, <|image|>,    in their order
    <sound>, <speech>, <Video>, {image}, __IMAGE__, %IMAGE%, …      <img></img>, <img><ImageHere></img>: the tags too
    (image 1), @image1, <fig1>                                      only with numbers

A number that comes again refers back, and stays text. Where `<image>`, or parts, are the places, all others are text.
Places that do not fit the media, words in angle brackets that look like places, and names of files in brackets or on
lines of their own are errors: all media would stand in front of the question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from energon_bridge.core.errors import SampleError

Medium = Literal["image", "video", "audio"]

_KINDS: Mapping[str, Medium] = {
    **dict.fromkeys(("image", "img", "picture", "pic", "photo", "fig"), "image"),
    **dict.fromkeys(("video", "vid"), "video"),
    **dict.fromkeys(("audio", "sound", "speech"), "audio"),
}
_WHAT = r"(?:here|placeholder|token|pad|soft[ _]?token|context|feature|patch)"
_WORDS = "image|img|picture|pic|photo|video|vid|audio|sound|speech"
_WORD = rf"({_WORDS})[ _-]?{_WHAT}?[ _#:-]*([0-9]{{1,3}})?"
_NUMBERED = rf"({_WORDS})[ _#:-]*([0-9]{{1,3}})"
_OPEN = r"<(?:img|\|?(?:vision|audio|image|video|im)_(?:start|bos|begin)\|?)>"
_CLOSE = r"<(?:/img|\|?(?:vision|audio|image|video|im)_(?:end|eos)\|?)>"
_NO_MARKDOWN = r"(?!(?<=!)\[[^\]\n]*\]\()"  # ![image](a.png)
_SPELLED = re.compile(
    rf"\n?(?:{_OPEN}(?=<[^<>/]{{1,30}}>{_CLOSE}))?(?:<<\s*{_WORD}\s*>>|<\|?\s*{_WORD}\s*\|?>|\[\[{_WORD}\]\]|{_NO_MARKDOWN}\[{_WORD}\]"
    rf"|\{{\{{ ?{_WORD} ?\}}\}}|\{{ ?{_WORD} ?\}}|<start_of_(image)>()|__{_WORD}__|%{_WORD}%|\${_WORD}\$|##{_WORD}##"
    rf"|\({_NUMBERED}\)|(?<!\w)@{_NUMBERED}(?!\w)|<(fig)(?:ure)?[ _-]?([0-9]{{1,3}})>)(?:{_CLOSE})?\n?",
    re.IGNORECASE,
)
_WRAPPED = re.compile(rf"{_OPEN}(<(?:image|video|audio)>){_CLOSE}|<(<(?:image|video|audio)>)>")
_FILE = (
    r"[^\s<>\[\](){}]{1,200}\.(?:jpe?g|png|webp|gif|bmp|tiff?|heic|avif|mp4|mkv|mov|avi|webm|wav|mp3|flac|ogg|opus|m4a)"
)
_LIKE_PLACES = re.compile(
    r"<(?!/)\|?[^<>\n=]{0,24}(?:image|img|picture|photo|video|audio|sound|speech|visual|vision|frame|media|placeholder|clip|im_patch)"
    r"[^<>\n=]{0,24}\|?>|<(?:image|img|video|audio)\s[^<>\n]{0,200}>|!\[[^\]\n]{0,200}\]\([^)\n]{0,200}\)"
    rf"|[<\[{{](?:\w+[:=] ?)?{_FILE}[>\]}}]|\A[ \t]*{_FILE}[ \t]*$|^[ \t]*{_FILE}\s*\Z"
    r"|\{\{? ?(?:image|img|video|audio)_?(?:path|url|file|name) ?\}"
    r"|(?-i:\b(?:IMAGE|IMG|VIDEO|AUDIO)_(?:PLACEHOLDER|TOKEN)\b)",
    re.IGNORECASE | re.MULTILINE,
)
_ALSO_TEXT = re.compile(r"[^<]|<(?:<|fig|(?:img|picture|pic|photo|sound|speech|vid)>)", re.IGNORECASE)
"""Spellings that may as well be text, such as tags of HTML: they are, if a sample has no medium for them."""


class MediaPlace(NamedTuple):
    """A placeholder in a text, from `start` to before `end` with the line breaks around it, and its number, if any."""

    start: int
    end: int
    kind: Medium
    number: int | None
    written: str


def spelled(text: str) -> list[MediaPlace]:
    """Return the places in a text, those of LLaVA too, in their order."""
    lower = text.lower() if any(map(text.__contains__, "<[{(_%$#@")) else ""
    if not any(map(lower.__contains__, _KINDS)):  # which takes a tenth of the time
        return []
    found = []
    for match in _SPELLED.finditer(text):
        word = [group for group in match.groups() if group is not None][:1]
        number = match.groups()
        digits = next((group for group in number if group and group.isdigit()), None)
        kind = _KINDS[word[0].lower()]
        found.append(
            MediaPlace(match.start(), match.end(), kind, None if digits is None else int(digits), match[0].strip("\n"))
        )
    return found


def ends_in_place(text: str) -> bool:
    """Return whether a text ends with a place, as choices that are pictures do."""
    return text.endswith((">", "]", "}")) and any(place.end == len(text) for place in spelled(text))


def by_place(media: Any) -> Any:
    """Return media that are named by their places, MiniCPM's `{"<image_00>": …}`, as a list; others as they are."""
    places = {name: spelled(name) for name in media if isinstance(name, str)} if isinstance(media, Mapping) else {}
    numbers = {name: found[0].number for name, found in places.items() if [one.written for one in found] == [name]}
    if not numbers or len(numbers) < len(media) or None in numbers.values():
        return media
    return [media[name] for name in sorted(numbers, key=lambda name: numbers[name] or 0)]


def unwrapped(text: str) -> str:
    """Return a text without the tags that some lists write around `<image>`: a family's template has its own."""
    return _WRAPPED.sub(lambda match: match[1] or match[2], text) if "><" in text or "<<" in text else text


def looks_placed(text: str, kind: Medium) -> bool:
    """Return whether a text has a place for a medium in another spelling, or something like one."""
    return any(place.kind == kind for place in spelled(text)) or _LIKE_PLACES.search(text) is not None


def respelled(texts: Sequence[str], there: Mapping[Medium, int]) -> list[str | list[dict[str, Any]]]:
    """Return questions whose places are parts with the numbers of their media; those without places as they are.

    Args:
        texts: The questions of a conversation, in their order.
        there: How many media have no place, by kind; of other kinds, what looks like a place is a text.

    Raises:
        SampleError: The places do not fit the media.
    """
    found = list(map(spelled, texts))
    indices: dict[tuple[int, int], int] = {}
    for kind, wanted in there.items():
        places = [(at, one) for at, of_text in enumerate(found) for one in of_text if one.kind == kind]
        if not wanted:
            places = [(at, one) for at, one in places if not _ALSO_TEXT.match(one.written)]
        if places:
            indices |= _numbered(places, kind, wanted)
        elif wanted and (like := next(filter(None, map(_LIKE_PLACES.search, texts)), None)) is not None:
            raise SampleError(
                f"a text has {like[0]!r}, which looks like a place, and none of the {wanted} {kind}s has one: write "
                f"'<{kind}>' where each stands"
            )
    return [_in_parts(text, at, found[at], indices, there) for at, text in enumerate(texts)]


def _numbered(places: Sequence[tuple[int, MediaPlace]], kind: Medium, wanted: int) -> dict[tuple[int, int], int]:
    """Return the number of the medium of each place, by its text and start; places that refer back have none."""
    numbers = [place.number for _, place in places]
    first: dict[int, tuple[int, int]] = {}
    if None in numbers:
        first = {number: (at, place.start) for number, (at, place) in enumerate(places)}
    else:
        for at, place in places:
            assert place.number is not None
            first.setdefault(place.number, (at, place.start))
        base = 0 if 0 in first else 1
        first = {number - base: place for number, place in first.items()}
    if sorted(first) != list(range(wanted)) or len({number is None for number in numbers}) > 1:
        written = ", ".join(dict.fromkeys(place.written for _, place in places))
        raise SampleError(
            f"the text has {len(first)} {kind} places ({written[:200]}) but the sample has {wanted} {kind}s: give "
            f"each a place, numbered from 0 or 1 if they have numbers, or write '<{kind}>'"
        )
    return {place: number for number, place in first.items()}


def _in_parts(
    text: str,
    at: int,
    places: Sequence[MediaPlace],
    indices: Mapping[tuple[int, int], int],
    there: Mapping[Medium, int],
) -> str | list[dict[str, Any]]:
    if not any((at, place.start) in indices for place in places):
        return text
    parts: list[dict[str, Any]] = []
    done = 0
    for place in places:
        index = indices.get((at, place.start))
        is_own = place.kind not in there and place.written == f"<{place.kind}>"
        if index is None and not is_own:
            continue
        parts += [{"type": "text", "text": text[done : place.start]}] * (place.start > done)
        parts.append({"type": place.kind} | ({} if index is None else {"index": index}))
        done = place.end
    return [*parts, *[{"type": "text", "text": text[done:]}] * (done < len(text))]
