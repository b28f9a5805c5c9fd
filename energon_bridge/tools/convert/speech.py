"""Speech with its text, of NeMo's manifests, other lists and Kaldi's folders: conversations about a sound.

    manifest.json, .jsonl      a line each: `audio_filepath` (relative to the manifest), `duration`, `offset`, `text`
    list.tsv, .csv, .jsonl     columns of Common Voice (`path`, `sentence`), FLEURS and the like (`_NAMES`)
    FOLDER/…/*.trans.txt       `UTTERANCE WORDS…`, of LibriSpeech: the sound lies beside it
    FOLDER/wav.scp             `RECORDING PATH`; a command (`… |`) is never run
    FOLDER/segments            `UTTERANCE RECORDING BEGIN END`; without it, recordings are utterances
    FOLDER/text                `UTTERANCE WORDS…`
    FOLDER/utt2spk             `UTTERANCE SPEAKER`; no speaker that it names is in two splits

The question is the same for all, the answer is the text. A sound with an `offset` becomes a file of its own: only that
part of the recording is decoded and copied, sample by sample as it is. Integers become FLAC, those of more than 16 bits
with 24; floats WAV. What codecs with losses (MP3) give becomes FLAC of 24 bits, or WAV if any sample is beyond 1, where
FLAC clips. A sound without an `offset` is copied as it is, and must be as long as `duration` says.

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
from energon_bridge.models.av.av_decoder import is_lossless
from energon_bridge.models.av.media_file import import_av
from energon_bridge.models.conversations.parts import PLACES, medium_by_name
from energon_bridge.models.conversations.questions import template_columns, with_texts
from energon_bridge.models.conversations.segments import part_meaning, segment_meaning
from energon_bridge.models.conversations.turns import CONVERSATIONS, doubts_of, find_pair
from energon_bridge.tools.convert.lists import LineEntries, ListedEntries, TableSource
from energon_bridge.tools.convert.rows import (
    LOOKED_AT,
    FileRef,
    Layout,
    Row,
    RowSample,
    Source,
    is_filled,
    located,
    media_file,
    media_folder,
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
_QUESTIONS = ("question", "instruction", "prompt", "query", "problem")
_SPEAKERS = ("speaker", "speaker_id", "spk_id", "client_id")
_SOUNDS = (".flac", ".wav", ".mp3", ".ogg", ".opus", ".m4a")


@dataclass(frozen=True, slots=True)
class SoundPart(FileRef):
    """A part of a sound file, from `begin` for `seconds` (None: to its end); or all of it, if `whole`."""

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
                f"{self.path}: has {length:.2f} s of sound, but its list names a start of {self.begin:.2f} and an end "
                f"of {end:.2f} s. Correct them."
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
            return as_file(clip.numpy(), rate, is_exact=is_lossless(sound))
        except Exception as error:  # codecs raise anything
            raise SourceError(f"{self.path}: its part cannot be written: {type(error).__name__}: {error}") from error

    def size(self) -> int:
        """Return the size of what `read` returns. Raises SourceError."""
        return FileRef.size(self) if self.whole else len(self.read())

    def mark(self) -> str:
        """Return what changes if the part does."""
        return f"{FileRef.mark(self)} {self.begin} {self.seconds} {self.whole}"


def as_file(samples: np.ndarray, rate: int, *, is_exact: bool) -> bytes:
    """Return samples (channels, samples) as a FLAC file: integers of 32 bits with 24, others with 16.

    Floats become a WAV file with float32, as training reads them; or FLAC of 24 bits, if not exact and in its range.
    """
    is_wav = samples.dtype.kind == "f"
    if is_wav and not is_exact:
        steps = np.rint(samples * 2.0**23)
        is_wav = not np.all((steps >= -(2**23)) & (steps < 2**23))
        samples = samples if is_wav else steps.astype(np.int32) << 8
    elif samples.dtype == np.uint8:
        samples = (samples.astype(np.int16) - 128) << 8
    samples = samples.astype(np.float32) if is_wav else samples
    sample_format = "flt" if is_wav else "s32" if samples.dtype == np.int32 else "s16"
    av = import_av()
    file = io.BytesIO()
    with av.open(file, "w", format="wav" if is_wav else "flac") as out:
        layout = {1: "mono", 2: "stereo"}.get(len(samples), f"{len(samples)} channels")
        stream = out.add_stream("pcm_f32le" if is_wav else "flac", rate=rate, layout=layout)
        stream.codec_context.format = sample_format
        for start in range(0, samples.shape[1], rate):
            piece = np.ascontiguousarray(samples[:, start : start + rate].T).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(piece, format=sample_format, layout=layout)
            frame.sample_rate = rate
            frame.pts = start
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSample(RowSample):
    """A sample whose sound is FLAC or WAV: its samples say which, once they are decoded."""

    def sizes(self) -> list[tuple[str, int]]:
        """Return its parts, named by what they are, with their sizes in bytes; raises SourceError."""
        is_copied = all(not isinstance(content, SoundPart) or content.whole for _, content in self.parts)
        return RowSample.sizes(self) if is_copied else [(name, len(data)) for name, data in self.read()[0]]

    def read(self) -> tuple[list[tuple[str, bytes]], Mapping[str, str]]:
        """Return its parts, named by what they are, and the accesses of its fields."""
        parts, fields = RowSample.read(self)
        new = {name: f"{name[:-4]}wav" for name, data in parts if name.endswith("flac") and data[:4] == b"RIFF"}
        return [(new.get(name, name), data) for name, data in parts], {n: new.get(of, of) for n, of in fields.items()}


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
        there = [str(one.get(self._file)) for one in _first(entries, LOOKED_AT)]
        there = [name for name in there if os.path.exists(self._media / name)]
        if there and all(os.path.relpath(self._media / name, self._media).startswith("..") for name in there):
            with located(self.where):
                media_file(there[0], self._media)  # says that it leads out, before others are said not to be there

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
            other = entry.get("audio")
            if isinstance(other, str) and os.path.basename(other) not in ("", os.path.basename(entry[self._file])):
                raise SourceError(f"`{self._file}` and `audio` name different files ({other}): leave one column out.")
            values = {
                name: value for name, value in entry.items() if name not in (*_TAKEN, "audio", self._file, self.text)
            }
            row = Row(where=where, values=values, files={"audios": (sound,)}, named={self._file: [entry[self._file]]})
            if any(name in entry for name in CONVERSATIONS) or find_pair(entry) is not None:
                return row
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
            own = next((name for name in _QUESTIONS if isinstance(entry.get(name), str) and entry[name].strip()), None)
            if self.prompt == PROMPT and own is not None:
                raise SourceError(
                    f"`{own}` ({shown(entry[own])}) may be the question about the sound, which would be {PROMPT!r}: "
                    f"--prompt '{{{own}}}' asks it, another --prompt asks that."
                )
            self._name_mark(text)
            asked = [{"type": "audio"}, {"type": "text", "text": _asked(self.prompt, entry)}]
            values["messages"] = [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
            return row

    def sample(self, number: int, layout: Layout) -> RowSample:
        """Return a sample to be read; raises SkipSample for one that is not preferred, or is no speech."""
        entry, where = self.entries.entry(number)
        if str(entry.get(self.text)).strip() in _NO_SPEECH:
            raise SkipSample(f"{where}: `{self.text}` is {entry[self.text]!r}: no speech")
        sample = super().sample(number, layout)
        for name in entry:  # other channels than the first are refused without a look
            if name not in layout.ignored and part_meaning(name) == "channel" and str(entry[name]).strip() == "0":
                with located(where):
                    _check_only_channel(name, sample)
        return SpeechSample(**{name: getattr(sample, name) for name in RowSample.__slots__})

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


def _check_only_channel(name: str, sample: RowSample) -> None:
    """Raise SourceError if the first channel of a sound is named, and it has others."""
    for _, part in sample.parts:
        channels = None
        if not isinstance(part, SoundPart):
            continue
        with suppress(DecodeError, OSError), AVDecoder.open(part.path) as sound:  # reading it says what is wrong
            channels = sound.get_metadata(get_video=False, get_audio_duration=False).audio_channels
        if channels is not None and channels > 1:
            raise SourceError(
                f"`{name}` is 0, and {part.path} has {channels} channels, which are not cut to it: do so beforehand, "
                f"or learn the text with all of them (energon convert with --ignore {name})."
            )


def _is_translated(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of a manifest says that its text is in another language than its sound (Canary)."""
    source, target = (entry.get(f"{name}_lang") for name in ("source", "target"))
    task = " ".join(str(entry.get(name, "")) for name in ("taskname", "task"))
    return bool(source and target and source != target) or "translat" in task.lower()


_NO_PATH = re.compile(r"\|\s*$|^\||^-$|:\d+$")
"""Kaldi's extended filenames that are no paths."""


def _first(entries: ListedEntries | LineEntries, count: int = _LOOKED_AT) -> list[Mapping[str, Any]]:
    found = []
    for number in range(min(count, len(entries))):
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
        for _, name, text in _lines(path):
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
    texts = {name: rest for _, name, rest in _lines(folder / "text")}
    recordings = {name: rest for _, name, rest in _lines(folder / "wav.scp")}
    relative = (path for path in recordings.values() if not (os.path.isabs(path) or _NO_PATH.search(path)))
    media = media_folder(_root_of(folder, next(relative, "")), media)
    listed = "segments" if (folder / "segments").exists() else "wav.scp"
    places: dict[str, dict[str, Any] | SourceError] = {name: {_FILE: path} for name, path in recordings.items()}
    if listed == "segments":
        path = folder / listed
        places = {name: _segment(rest, recordings, f"{path}, line {at} (id {name})") for at, name, rest in _lines(path)}
    told = {name: rest for _, name, rest in _lines(folder / "utt2spk")} if (folder / "utt2spk").exists() else {}
    said_by = {name: {_SPEAKERS[0]: told[name]} for name in places if name in told}
    if told and (lost := [name for name in places if name not in told]):
        _logger.warning("%s: utt2spk has no speaker of %d utterances, such as %s", folder, len(lost), lost[0])
    entries = [
        of if isinstance(of, SourceError) else {"id": name, **of, "text": texts.get(name), **said_by.get(name, {})}
        for name, of in places.items()
    ]
    found = ListedEntries(folder, entries, unit="utterance", first=1, is_utf8=False)
    source = SpeechSource(folder / listed, found, media, "Kaldi folder", prompt)
    if rest := len(texts.keys() - places.keys()):
        source.left_out += (f"texts of {rest:,} utterance{'s' * (rest > 1)} that {listed} does not list",)
    return source


def _root_of(folder: Path, name: str) -> Path:
    """Return what paths are relative to: the folder, or that from where a recipe runs, above its `data/train`."""
    return next((one for one in (folder, *folder.absolute().parents[:2]) if (one / name).is_file()), folder)


def _lines(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the number of each line, its first word, and the rest as it stands, as Kaldi cuts. Raises SourceError."""
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
            yield number, name, rest


_LINE = re.compile(r"[ \t\r\f\v]*([^ \t\r\f\v]*)[ \t\r\f\v]*(.*?)[ \t\r\f\v]*\Z", re.DOTALL)
"""Blanks are those of C's `isspace`: others, such as U+3000, belong to a text."""


def _segment(rest: str, recordings: Mapping[str, str], where: str) -> dict[str, Any] | SourceError:
    """Return where a segment lies, or what is wrong with it, which is said when its row is read."""
    recording, *times = rest.split()[:4] or [""]
    if recording not in recordings:
        return SourceError(f"{where}: recording {recording!r} is not in wav.scp. Correct it, or leave the line out.")
    with suppress(ValueError, IndexError):
        begin, end = float(times[0]), float(times[1])
        if begin >= 0 and (begin < end < math.inf or end == -1):  # -1: to the end of the recording
            place = {_FILE: recordings[recording], "offset": begin, "duration": None if end == -1 else end - begin}
            return place | ({"channel": times[2]} if len(times) > 2 else {})
    return SourceError(f"{where}: start and end are {' '.join(times[:2])[:60]!r}, expected seconds, in that order.")
