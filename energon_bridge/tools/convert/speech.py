"""Speech with its text, of NeMo's manifests and Kaldi's folders: conversations about a sound.

    manifest.json, .jsonl      a line each: `audio_filepath` (relative to the manifest), `duration`, `offset`, `text`
    FOLDER/wav.scp             `RECORDING PATH`; a command (`… |`) is never run
    FOLDER/segments            `UTTERANCE RECORDING BEGIN END`; without it, recordings are utterances
    FOLDER/text                `UTTERANCE WORDS…`

The question is the same for all, the answer is the text. A sound with an `offset` becomes a file of its own, FLAC: only
that part of the recording is decoded and copied, sample by sample as it is; samples of more than 16 bits stay 24, and
those of codecs with losses become 16. A sound without one is copied as it is, and must be as long as `duration` says.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from energon_bridge.core.errors import DecodeError, SourceError
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.av.media_file import import_av
from energon_bridge.models.conversations.questions import template_columns, with_texts
from energon_bridge.models.conversations.segments import segment_meaning
from energon_bridge.models.conversations.turns import BESIDE_PAIRS, CONVERSATIONS, PAIRS, find_pair
from energon_bridge.tools.convert.lists import LineEntries, ListedEntries, TableSource
from energon_bridge.tools.convert.rows import FileRef, Layout, Row, Source, located, media_file, shown

PROMPT = "Transcribe the speech."
"""The question about each sound, if none is given."""
_FILE = "audio_filepath"
_TAKEN = ("audio_filepath", "offset", "duration", "text")
_TOLERANCE = 0.2
"""Seconds by which a file may differ from its `duration`, or end before a part of it does."""
_LOOKED_AT = 20


@dataclass(frozen=True, slots=True)
class SoundPart(FileRef):
    """A part of a sound file, from `begin` for `seconds` (None: to its end), as FLAC; or all of it, if `whole`."""

    begin: float
    seconds: float | None
    whole: bool

    def read(self) -> bytes:
        """Return its bytes. Raises SourceError."""
        FileRef.size(self)  # says that it is not there
        try:
            with AVDecoder.open(self.path, audio_format="native") as sound:
                return self._read(sound)
        except DecodeError as error:
            raise SourceError(f"{self.path}: {error}") from error

    def _read(self, sound: AVDecoder) -> bytes:
        first, last = sound.get_time_range(video=False, audio=True)  # of a file's own clock
        length = last - first
        end = length if self.seconds is None else self.begin + self.seconds
        if not self.begin < min(end, length) or end > length + _TOLERANCE:
            raise SourceError(
                f"{self.path}: has {length:.2f} s of sound, but offset and duration name {self.begin:.2f} to {end:.2f} "
                "s of it. Correct them."
            )
        if self.whole and end >= length - _TOLERANCE:
            return FileRef.read(self)
        if self.whole:
            raise SourceError(
                f"{self.path}: has {length:.2f} s of sound, and `duration` is {self.seconds:.2f} s. If the text is of "
                'its beginning, say so with "offset": 0; if it is of all, correct the duration.'
            )
        (clip,), _ = sound.get_audio_clips([(first + self.begin, math.inf if self.seconds is None else first + end)])
        rate = sound.get_audio_samples_per_second()
        if (lost := min(end, length) - self.begin - clip.shape[1] / rate) > _TOLERANCE:
            raise SourceError(f"{self.path}: lacks {lost:.2f} s of {self.begin:.2f} to {end:.2f} s. Is it cut off?")
        try:
            return as_flac(clip.numpy(), rate)
        except Exception as error:  # codecs raise anything
            raise SourceError(f"{self.path}: cannot be written as FLAC: {type(error).__name__}: {error}") from error

    def size(self) -> int:
        """Return the size of what `read` returns. Raises SourceError."""
        return FileRef.size(self) if self.whole else len(self.read())

    def mark(self) -> str:
        """Return what changes if the part does."""
        return f"{FileRef.mark(self)} {self.begin} {self.seconds} {self.whole}"


def as_flac(samples: np.ndarray, rate: int) -> bytes:
    """Return samples (channels, samples) as a FLAC file: integers of 32 bits with 24, all others with 16 bits."""
    if samples.dtype.kind == "f":
        samples = np.clip(np.rint(samples * 32768), -32768, 32767).astype(np.int16)
    elif samples.dtype == np.uint8:
        samples = (samples.astype(np.int16) - 128) << 8
    av = import_av()
    form = "s32" if samples.dtype == np.int32 else "s16"
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as out:
        layout = {1: "mono", 2: "stereo"}.get(len(samples), f"{len(samples)} channels")
        stream = out.add_stream("flac", rate=rate, layout=layout)
        stream.codec_context.format = form
        packed = np.ascontiguousarray(samples.T).reshape(1, -1)
        for start in range(0, samples.shape[1], rate):
            piece = packed[:, start * len(samples) : (start + rate) * len(samples)]
            frame = av.AudioFrame.from_ndarray(piece, format=form, layout=layout)
            frame.sample_rate = rate
            frame.pts = start
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


# Rows ----------------------------------------------------------------------------------------------------------------


class SpeechSource(TableSource):
    """Entries with `audio_filepath` and `text`, as conversations."""

    def __init__(
        self, path: Path, entries: ListedEntries | LineEntries, media: Path | None, kind: str, prompt: str
    ) -> None:
        super().__init__(path, entries, media, kind)
        self.prompt = prompt
        if (unused := _unused(entries)) is not None:
            self.left_out = (unused,)

    def _row(self, entry: Mapping[str, Any], where: str) -> Row:
        with located(where):
            sound = self._sound(entry)
            values = {name: value for name, value in entry.items() if name not in _TAKEN}
            if any(name in entry for name in CONVERSATIONS) or find_pair(entry) is not None:
                return Row(where=where, values=values, files={"audios": (sound,)}, named={_FILE: [entry[_FILE]]})
            text = entry.get("text")
            if not isinstance(text, str):
                raise SourceError(f"`text` is {str(text)[:60]!r}, expected what is said in the sound.")
            if self.prompt == PROMPT and _is_translated(entry):
                raise SourceError(
                    f"the text is a translation ({shown(text)}), and the question {PROMPT!r}: give another, such as "
                    "--prompt 'Translate the speech into German.', for a list of one language."
                )
            asked = [{"type": "audio"}, {"type": "text", "text": _asked(self.prompt, entry)}]
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
            values["messages"] = turns
            return Row(where=where, values=values, files={"audios": (sound,)}, named={_FILE: [entry[_FILE]]})

    def _sound(self, entry: Mapping[str, Any]) -> SoundPart:
        path = entry.get(_FILE)
        if not isinstance(path, str):
            raise SourceError(f"`{_FILE}` is {str(path)[:60]!r}, expected the path of one sound.")
        if _NO_PATH.search(path):
            raise SourceError(
                f"{path[:200]!r} is a command, a stream or a place in an archive of Kaldi, and none is run or opened "
                "here. Write the sounds to files (wav-copy does), and their paths to wav.scp."
            )
        file = media_file(path, self._media)
        assert isinstance(file, FileRef)
        begin = _seconds(entry, "offset")
        seconds = _seconds(entry, "duration")
        whole = begin is None
        if whole and {*map(segment_meaning, entry)} & {"range", "begin"}:
            seconds = None  # of that segment, to which training cuts the sound
        return SoundPart(file.path, file.extension if whole else "flac", begin or 0.0, seconds, whole)

    def propose(self) -> Layout:
        """Return crude samples, which are conversations."""
        return Layout(sample_type="CrudeSample", bare=frozenset(["audios"]))


def _is_translated(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of a manifest says that its text is in another language than its sound (Canary)."""
    source, target = (entry.get(f"{name}_lang") for name in ("source", "target"))
    task = " ".join(str(entry.get(name, "")) for name in ("taskname", "task"))
    return bool(source and target and source != target) or "translat" in task.lower()


_NO_PATH = re.compile(r"\|\s*$|^\||^-$|:\d+$")
"""Kaldi's extended filenames that are no paths."""


def _unused(entries: ListedEntries | LineEntries) -> str | None:
    """Return which columns of the first rows say nothing to a model."""
    named = {"id", *_TAKEN, *BESIDE_PAIRS, *CONVERSATIONS, *(name for pair in PAIRS for name in pair)}
    rest = dict.fromkeys(name for entry in _first(entries) for name in entry if name not in named)
    return f"the columns {', '.join(rest)} (no part of a conversation)" if rest else None


def _first(entries: ListedEntries | LineEntries) -> list[Mapping[str, Any]]:
    found = []
    for number in range(min(_LOOKED_AT, len(entries))):
        with suppress(SourceError):
            found.append(entries.entry(number)[0])
    return found


def _seconds(entry: Mapping[str, Any], name: str) -> float | None:
    value = entry.get(name)
    if value is None or value == "":
        return None
    with suppress(ValueError, TypeError):
        if 0 <= (seconds := float(value)) < float("inf"):
            return seconds
    raise SourceError(f"`{name}` is {str(value)[:60]!r}, expected seconds.")


def _asked(prompt: str, entry: Mapping[str, Any]) -> str:
    """Return the question about a sound, with the texts of columns in braces. Raises SourceError if one has none."""
    columns = template_columns(prompt)
    if lost := next(
        (name for name in columns if not isinstance(entry.get(name), str | int) or entry[name] == ""), None
    ):
        raise SourceError(f"--prompt needs a text in `{lost}`, which is {str(entry.get(lost))[:60]!r}.")
    return with_texts(prompt, {name: str(entry[name]) for name in columns}) if columns else prompt


def as_speech(source: Source, media: Path | None, prompt: str) -> SpeechSource | None:
    """Return a list as a NeMo manifest, if its first entries are of one."""
    if type(source) is not TableSource or not (first := _first(source.entries)):
        return None
    if not all(_FILE in entry for entry in first):
        return None
    return SpeechSource(Path(source.where), source.entries, media, "NeMo manifest", prompt)


# Kaldi ---------------------------------------------------------------------------------------------------------------


def open_kaldi(folder: Path, media: Path | None, prompt: str) -> SpeechSource:
    """Open a folder of Kaldi; raises SourceError if a file is missing or cannot be read."""
    texts = dict(_lines(folder / "text"))
    recordings = dict(_lines(folder / "wav.scp"))
    listed = "segments" if (folder / "segments").exists() else "wav.scp"
    if listed == "segments":
        places = {name: _segment(rest, recordings) for name, rest in _lines(folder / "segments")}
    else:
        places = {name: {_FILE: path} for name, path in recordings.items()}
    entries = [{"id": name, **place, "text": texts.get(name)} for name, place in places.items()]
    found = ListedEntries(folder, entries, unit="utterance", first=1, is_utf8=False)
    source = SpeechSource(folder / listed, found, media, "Kaldi folder", prompt)
    if rest := len(texts.keys() - places.keys()):
        source.left_out += (f"texts of {rest:,} utterance{'s' * (rest > 1)} that {listed} does not list",)
    return source


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first word of each line, and the rest. Raises SourceError."""
    try:
        text = path.read_text("utf-8", "surrogateescape")  # a bad line fails alone, as an entry
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot read it: {error}. A folder of Kaldi has wav.scp and text.") from error
    seen: set[str] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        name, _, rest = line.strip().replace("\t", " ").partition(" ")
        if name in seen:
            raise SourceError(f"{path}, line {number}: {name!r} is there twice. Give it another name.")
        if name:
            seen.add(name)
            yield name, rest.strip()


def _segment(rest: str, recordings: Mapping[str, str]) -> dict[str, Any]:
    """Return where a segment lies; what is wrong with it is said when its row is read."""
    recording, *times = rest.split()[:4]
    place = {_FILE: recordings.get(recording, f"{recording} is not in wav.scp"), "offset": times[0] if times else "?"}
    place |= {"channel": times[2]} if len(times) > 2 else {}
    with suppress(ValueError, IndexError):
        begin = float(times[0])
        end = float(times[1])
        return place if end == -1 else {**place, "duration": end - begin}  # -1: to the end of the recording
    return {**place, "duration": rest}
