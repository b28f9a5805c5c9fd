"""Speech with its text, of NeMo's manifests, other lists and Kaldi's folders: conversations about a sound.

    manifest.json, .jsonl      a line each: `audio_filepath` (relative to the manifest), `duration`, `offset`, `text`
    list.tsv, .csv, .jsonl     columns of Common Voice (`path`, `sentence`), FLEURS and the like (`_NAMES`)
    FOLDER/…/*.trans.txt       `UTTERANCE WORDS…`, of LibriSpeech: the sound lies beside it
    FOLDER/wav.scp             `RECORDING PATH`; a command (`… |`) is never run
    FOLDER/segments            `UTTERANCE RECORDING BEGIN END`; without it, recordings are utterances
    FOLDER/text                `UTTERANCE WORDS…`
    FOLDER/utt2spk             `UTTERANCE SPEAKER`; no speaker that it names is in two splits

The question is the same for all, the answer is the text. A sound with an `offset` becomes a file of its own, FLAC: only
that part of the recording is decoded and copied, sample by sample as it is; samples of more than 16 bits stay 24, and
those of codecs with losses become 16. A sound without one is copied as it is, and must be as long as `duration` says.

GigaSpeech's `<COMMA>`, `<PERIOD>`, … are punctuation, and a segment of its `<SIL>`, `<MUSIC>`, … is no speech: skipped.
Marks of other corpora in brackets (`[noise]`, `{laugh}`, `<unk>`) are learned as they stand; a warning names one.
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from energon_bridge.core.errors import DecodeError, SkipSample, SourceError
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.av.media_file import import_av
from energon_bridge.models.conversations.parts import PLACES, medium_by_name
from energon_bridge.models.conversations.questions import template_columns, with_texts
from energon_bridge.models.conversations.segments import segment_meaning
from energon_bridge.models.conversations.turns import CONVERSATIONS, doubts_of, find_pair
from energon_bridge.tools.convert.lists import LineEntries, ListedEntries, TableSource
from energon_bridge.tools.convert.rows import (
    FileRef,
    Layout,
    Row,
    RowSample,
    Source,
    is_filled,
    located,
    media_file,
    shown,
)
from energon_bridge.tools.convert.splits import folder_split, part_order

TRANSCRIPTS = ".trans.txt"
"""How LibriSpeech's files of texts end."""
PROMPT = "Transcribe the speech."
"""The question about each sound, if none is given."""
_FILE = "audio_filepath"
_TAKEN = ("audio_filepath", "offset", "duration", "text")
_TOLERANCE = 0.2
"""Seconds by which a file may differ from its `duration`, or end before a part of it does."""
_LOOKED_AT = 20
_NAMES = (
    ("audio_filepath", "text"),
    *((file, "text") for file in ("wav", "wav_path", "wav_filename")),
    *(
        (file, text)
        for file in ("path", "file", "file_name", "filename", "wav", "wav_path", "wav_filename", "audio", "audio_path")
        for text in ("sentence", "transcription", "transcript", "raw_transcription")
    ),
)
"""Columns of a sound and of what is said in it; `text` is that only beside those of lists of speech."""
_SPEAKERS = ("speaker", "speaker_id", "spk_id", "client_id")
_SOUNDS = (".flac", ".wav", ".mp3", ".ogg", ".opus", ".m4a")


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
            with located(self.path):
                raise SourceError(str(error)) from error

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
    """Entries with a sound and its text, in columns of these names, as conversations.

    `text` is the column of the texts.
    """

    def __init__(
        self,
        path: Path,
        entries: ListedEntries | LineEntries,
        media: Path | None,
        kind: str,
        prompt: str,
        *,
        names: tuple[str, str] = _NAMES[0],
    ) -> None:
        super().__init__(path, entries, media, kind)
        self.prompt = prompt
        self._file, self.text = names
        self._is_named = False

    @cached_property
    def grouped_by(self) -> str | None:
        """The column of the speakers; None: there is none."""
        first = _first(self.entries)
        return next((name for name in _SPEAKERS if any(entry.get(name) for entry in first)), None)

    @cached_property
    def groups(self) -> Sequence[object] | None:
        """The speaker of each entry, so that none is in two splits; None: unknown, or it is one."""
        found = [] if self.grouped_by is None else list(self.column(self.grouped_by))
        return found if len({str(one) for one in found if is_filled(one)}) > 1 else None

    def _row(self, entry: Mapping[str, Any], where: str) -> Row:
        with located(where):
            sound = self._sound(entry)
            values = {
                name: value for name, value in entry.items() if name not in (*_TAKEN, "audio", self._file, self.text)
            }
            if any(name in entry for name in CONVERSATIONS) or find_pair(entry) is not None:
                return Row(
                    where=where, values=values, files={"audios": (sound,)}, named={self._file: [entry[self._file]]}
                )
            text = _punctuated(entry.get(self.text))
            if not isinstance(text, str) or (text.strip() and not any(map(str.isalnum, text))):  # NeMo's `-`: none
                raise SourceError(f"`{self.text}` is {shown(text)}, expected what is said in the sound.")
            if place := PLACES.search(text):
                raise SourceError(
                    f"`{self.text}` has {place[0]!r}, which is a place for media in conversations. Take it out of the "
                    f"list, or write it with a space inside, '< {place[1]}>'."
                )
            if self.prompt == PROMPT and (_is_translated(entry) or "translation" in self.text):
                raise SourceError(
                    f"the text is a translation ({shown(text)}), and the question {PROMPT!r}: give another, such as "
                    "--prompt 'Translate the speech into German.', for a list of one language."
                )
            self._name_mark(text)
            asked = [{"type": "audio"}, {"type": "text", "text": _asked(self.prompt, entry)}]
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
            values["messages"] = turns
            return Row(where=where, values=values, files={"audios": (sound,)}, named={self._file: [entry[self._file]]})

    def sample(self, number: int, layout: Layout) -> RowSample:
        """Return a sample to be read; raises SkipSample for one that is not preferred, or is no speech."""
        entry, where = self.entries.entry(number)
        if str(entry.get(self.text)).strip() in _NO_SPEECH:
            raise SkipSample(f"{where}: `{self.text}` is {entry[self.text]!r}: no speech")
        return super().sample(number, layout)

    def _name_mark(self, text: str) -> None:
        """Log a mark that a text has, once."""
        is_told = self._is_named or text in _NO_SPEECH or doubts_of(text, learned=True)  # doubts are counted at the end
        mark = None if is_told else _MARK.search(text)
        if mark is not None:
            self._is_named = True
            _logger.warning(
                "%s: texts have marks such as %r, and they are learned as they stand: if they are not said, take them "
                "out of the list",
                *(self.where, mark[0]),
            )

    def _sound(self, entry: Mapping[str, Any]) -> SoundPart:
        path = entry.get(self._file)
        if not isinstance(path, str):
            raise SourceError(f"`{self._file}` is {str(path)[:60]!r}, expected the path of one sound.")
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


_PUNCTUATION = {"COMMA": ",", "PERIOD": ".", "QUESTIONMARK": "?", "EXCLAMATIONPOINT": "!"}
_PUNCTUATION_MARK = re.compile(rf"\s*<({'|'.join(_PUNCTUATION)})>")
_NO_SPEECH = ("<SIL>", "<MUSIC>", "<NOISE>", "<OTHER>")
_MARK = re.compile(r"\[[A-Za-z_-]{2,20}\]|<[A-Za-z_/|-]{2,20}>|\{[A-Za-z_-]{2,20}\}")
_logger = logging.getLogger(__name__)


def _punctuated(text: Any) -> Any:
    """Return a text with the punctuation that GigaSpeech's tags stand for; anything else as it is."""
    if not isinstance(text, str) or "<" not in text:
        return text
    return _PUNCTUATION_MARK.sub(lambda tag: _PUNCTUATION[tag[1]], text).strip()


def _is_translated(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of a manifest says that its text is in another language than its sound (Canary)."""
    source, target = (entry.get(f"{name}_lang") for name in ("source", "target"))
    task = " ".join(str(entry.get(name, "")) for name in ("taskname", "task"))
    return bool(source and target and source != target) or "translat" in task.lower()


_NO_PATH = re.compile(r"\|\s*$|^\||^-$|:\d+$")
"""Kaldi's extended filenames that are no paths."""


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


def as_speech(
    source: Source, media: Path | None, prompt: str, *, by_names: bool, answer: str | None = None
) -> SpeechSource | None:
    """Return a list as one of speech, if its first entries are of a NeMo manifest or, `by_names`, as of others.

    `answer` is another column of texts than the usual one.
    """
    if type(source) is not TableSource or not (first := _first(source.entries)):
        return None
    if all(_FILE in entry for entry in first):
        names = (_FILE, answer or "text")
        return SpeechSource(Path(source.where), source.entries, media, "NeMo manifest", prompt, names=names)
    if not by_names or any(
        find_pair(entry) is not None or not entry.keys().isdisjoint(CONVERSATIONS) for entry in first
    ):
        return None
    for file, text in _NAMES:
        if all(medium_by_name(str(entry.get(file))) == "audio" and isinstance(entry.get(text), str) for entry in first):
            kind = f"{source.kind} of speech (`{file}`, `{text}`)"
            names = (file, answer or text)
            return SpeechSource(Path(source.where), source.entries, media, kind, prompt, names=names)
    return None


def open_librispeech(root: Path, media: Path | None, prompt: str) -> SpeechSource:
    """Open a folder of LibriSpeech, or several, whose names tell their splits; raises SourceError."""
    found: list[tuple[str, dict[str, Any]]] = []
    for path in sorted(root.rglob(f"*{TRANSCRIPTS}")):
        part = folder_split(path.relative_to(root).as_posix().lower())
        for name, text in _lines(path):
            sounds = [sound for end in _SOUNDS if (sound := path.with_name(name + end)).exists()]
            file = os.path.relpath(sounds[0] if sounds else path.with_name(name + _SOUNDS[0]), root)
            entry = {"id": name, _FILE: file, "text": text, _SPEAKERS[0]: name.partition("-")[0]}
            found.append(("" if part is None else part[0], entry))
    found.sort(key=lambda one: part_order(one[0]))
    parts = Counter(part for part, _ in found)
    if "" in parts and len(parts) > 1:
        raise SourceError(
            f"{root}: the names of some folders tell a split (dev-clean), and of others none: rename them."
        )
    entries = ListedEntries(root, [entry for _, entry in found], unit="utterance", first=1, is_utf8=False)
    source = SpeechSource(root / f"*{TRANSCRIPTS}", entries, media, "LibriSpeech folder", prompt)
    source.split_parts = () if "" in parts else tuple(parts.items())
    return source


# Kaldi ---------------------------------------------------------------------------------------------------------------


def open_kaldi(folder: Path, media: Path | None, prompt: str) -> SpeechSource:
    """Open a folder of Kaldi; raises SourceError if a file is missing or cannot be read."""
    texts = dict(_lines(folder / "text"))
    recordings = dict(_lines(folder / "wav.scp"))
    media = media or _root_of(folder, next(iter(recordings.values()), ""))
    listed = "segments" if (folder / "segments").exists() else "wav.scp"
    if listed == "segments":
        places = {name: _segment(rest, recordings) for name, rest in _lines(folder / "segments")}
    else:
        places = {name: {_FILE: path} for name, path in recordings.items()}
    told = dict(_lines(folder / "utt2spk")) if (folder / "utt2spk").exists() else {}
    said_by = {name: {_SPEAKERS[0]: told[name]} for name in places if name in told}
    entries = [{"id": name, **of, "text": texts.get(name), **said_by.get(name, {})} for name, of in places.items()]
    found = ListedEntries(folder, entries, unit="utterance", first=1, is_utf8=False)
    source = SpeechSource(folder / listed, found, media, "Kaldi folder", prompt)
    if rest := len(texts.keys() - places.keys()):
        source.left_out += (f"texts of {rest:,} utterance{'s' * (rest > 1)} that {listed} does not list",)
    return source


def _root_of(folder: Path, name: str) -> Path:
    """Return what paths are relative to: the folder, or that from where a recipe runs, above its `data/train`."""
    above = (folder, *folder.absolute().parents[:2]) if name and not os.path.isabs(name) else (folder,)
    return next((one for one in above if (one / name).is_file()), folder)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first word of each line, and the rest as it stands, as Kaldi cuts them. Raises SourceError."""
    try:
        text = path.read_text("utf-8", "surrogateescape")  # a bad line fails alone, as an entry
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot read it: {error}. A folder of Kaldi has wav.scp and text.") from error
    seen: set[str] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        name, rest = _LINE.findall(line)[0]
        if name in seen:
            raise SourceError(f"{path}, line {number}: {name!r} is there twice. Give it another name.")
        if name:
            seen.add(name)
            yield name, rest


_LINE = re.compile(r"[ \t\r\f\v]*([^ \t\r\f\v]*)[ \t\r\f\v]*(.*?)[ \t\r\f\v]*\Z", re.DOTALL)
"""Blanks are those of C's `isspace`: others, such as U+3000, belong to a text."""


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
