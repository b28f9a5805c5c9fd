"""`energon convert` of NeMo's manifests and Kaldi's folders: sounds cut as soundfile reads them, and their texts."""

from __future__ import annotations

import io
import json
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import answer, energon, output_of, refusal_of
from delivered import delivered
from PIL import Image

pytest.importorskip("av")
soundfile = pytest.importorskip("soundfile")

RATE = 16000


def written(
    path: Path, seconds: float, *, seed: int = 3, channels: int = 1, rate: int = RATE, loud: float = 1 / 8, **form: str
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).standard_normal((round(seconds * rate), channels)) * loud
    soundfile.write(path, noise, rate, **form)
    return path


def lines(path: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def sound_in(talk: Any) -> tuple[np.ndarray, int]:
    """Return the sound of a conversation, (samples, channels), as soundfile reads it."""
    (decoder,) = talk.audios
    return soundfile.read(io.BytesIO(decoder.stream), always_2d=True)


def said(talk: Any) -> tuple[str, str]:
    (question, answer) = talk.messages
    place, text = question["content"]
    assert place == {"type": "audio"}
    return text["text"], answer["content"]


def convert(source: Path, out: Path, *flags: object) -> str:
    return output_of("convert", source, out, "--split-ratio", "1,0,0", "--no-progress", *flags)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.jsonl"])
def test_a_nemo_manifest(tmp_path: Path, name: str) -> None:
    long = written(tmp_path / "clips/long.wav", 5)
    short = written(tmp_path / "clips/short.flac", 1.5, seed=4)
    manifest = lines(
        tmp_path / name,
        [
            {"audio_filepath": "clips/long.wav", "offset": 1.25, "duration": 2.5, "text": "one", "lang": "en"},
            {"audio_filepath": "clips/short.flac", "duration": 1.5, "text": "two", "pnc": "yes"},
            {"audio_filepath": "clips/long.wav", "offset": 0, "duration": 0.5, "text": "three"},
            {"audio_filepath": "clips/long.wav", "offset": "4.0", "text": "four"},
        ],
    )
    told = convert(manifest, tmp_path / "out")
    assert "NeMo manifest, 4 samples" in told
    assert "not used: lang, pnc\n" in told
    assert "question 'Transcribe the speech.' (--prompt gives another)" in told
    talks = delivered(tmp_path / "out")
    assert [said(one) for one in talks] == [
        ("Transcribe the speech.", text) for text in ("one", "two", "three", "four")
    ]
    wanted = [(long, 20000, 40000), (short, 0, None), (long, 0, 8000), (long, 64000, None)]
    for talk, (path, first, frames) in zip(talks, wanted, strict=True):
        expected, rate = soundfile.read(path, start=first, frames=-1 if frames is None else frames, always_2d=True)
        got, got_rate = sound_in(talk)
        assert got_rate == rate
        assert np.array_equal(got, expected)
    assert talks[1].audios[0].stream == short.read_bytes()  # as it is
    sizes = [len(one.audios[0].stream) for one in talks]
    assert sizes[0] < long.stat().st_size * 0.6
    assert sizes[2] < long.stat().st_size * 0.2


@pytest.mark.parametrize("form", ["NeMo", "Common Voice", "lists"])
def test_answers_from_another_column(tmp_path: Path, form: str) -> None:
    sound = written(tmp_path / "train/a.wav", 0.5)
    usual, file = ("text", "audio_filepath") if form == "NeMo" else ("sentence", "path")
    rows = [{file: str(sound), usual: "eins", "normalized": "one", "translation": "uno"}]
    source = lines(tmp_path / "train.jsonl", rows)
    if form == "lists":
        lines(tmp_path / "test.jsonl", rows)
        source = tmp_path / "lists"
        source.mkdir()
        for name in ("train.jsonl", "test.jsonl"):
            (tmp_path / name).rename(source / name)
    flags = ("--media", str(tmp_path)) if form == "lists" else ("--split-ratio", "1,0,0")
    for column, prompt in ((None, ()), ("normalized", ()), ("translation", ("--prompt", "Translate it."))):
        chosen = () if column is None else ("--field", f"answers={column}")
        told = output_of("convert", source, tmp_path / str(column), "--no-progress", *flags, *chosen, *prompt)
        assert f"answers from {column or usual} (--field answers=COLUMN takes others)" in told
        talks = delivered(tmp_path / str(column))
        assert [said(one)[1] for one in talks] == [rows[0][column or usual]]
    untold = refusal_of("convert", source, tmp_path / "out", "--no-progress", *flags, "--field", "answers=translation")
    assert "the text is a translation ('uno')" in untold
    gone = refusal_of("convert", source, tmp_path / "out", "--no-progress", *flags, "--field", "answers=gone")
    assert "`gone` is null, expected what is said in the sound" in gone


def test_marks_of_gigaspeech(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the README of SpeechColab/GigaSpeech: four tags are punctuation, four are segments without speech."""
    written(tmp_path / "a.wav", 0.5)
    texts = [
        "AS THEY <COMMA> DO <PERIOD>",
        "<MUSIC>",
        "HOW <QUESTIONMARK> SO <EXCLAMATIONPOINT>",
        "<SIL>",
        "<OTHER>",
        "<NOISE>",
    ]
    manifest = lines(tmp_path / "m.json", [{"audio_filepath": "a.wav", "text": text} for text in texts])
    told = convert(manifest, tmp_path / "out")
    assert "Skipped 4 samples:" in told
    assert "`text` is '<MUSIC>': no speech" in told
    assert [said(one)[1] for one in delivered(tmp_path / "out")] == ["AS THEY, DO.", "HOW? SO!"]
    assert "marks such as" not in caplog.text
    other = lines(
        tmp_path / "o.json", [{"audio_filepath": "a.wav", "text": f"so {mark}"} for mark in ("[noise]", "{laugh}")]
    )
    convert(other, tmp_path / "other")
    assert [said(one)[1] for one in delivered(tmp_path / "other")] == ["so [noise]", "so {laugh}"]
    assert caplog.text.count("texts have marks such as '[noise]'") == 1


@pytest.mark.parametrize(
    ("ending", "form", "channels", "loud", "near", "stored"),
    [
        ("wav", {"subtype": "PCM_16"}, 2, 1 / 8, 0, ("FLAC", "PCM_16")),
        ("wav", {"subtype": "PCM_24"}, 1, 1 / 8, 0, ("FLAC", "PCM_24")),
        ("wav", {"subtype": "PCM_U8"}, 1, 1 / 8, 0, ("FLAC", "PCM_16")),
        ("flac", {"subtype": "PCM_24"}, 2, 1 / 8, 0, ("FLAC", "PCM_24")),
        ("wav", {"subtype": "FLOAT"}, 1, 1e-4, 0, ("WAV", "FLOAT")),
        ("wav", {"subtype": "FLOAT"}, 2, 1 / 2, 0, ("WAV", "FLOAT")),
        ("aiff", {"subtype": "FLOAT"}, 3, 1 / 2, 0, ("WAV", "FLOAT")),
        ("wav", {"subtype": "DOUBLE"}, 1, 1 / 2, 0, ("WAV", "FLOAT")),
        ("ogg", {"subtype": "VORBIS"}, 1, 1 / 8, 2**-20, ("FLAC", "PCM_24")),
        ("ogg", {"subtype": "VORBIS"}, 1, 1 / 2, 2**-20, ("WAV", "FLOAT")),
        ("mp3", {}, 1, 1 / 8, 2**-18, ("FLAC", "PCM_24")),
        ("mp3", {}, 2, 1 / 2, 2**-16, ("WAV", "FLOAT")),
    ],
)
def test_parts_of_all_kinds_of_sounds(
    tmp_path: Path,
    ending: str,
    form: dict[str, str],
    channels: int,
    loud: float,
    near: float,
    stored: tuple[str, str],
) -> None:
    """Two decoders differ in the last bits of what has losses; all else is equal, also beyond 1 and if quiet."""
    path = written(tmp_path / f"long.{ending}", 6, channels=channels, rate=24000, loud=loud, **form)
    lines(tmp_path / "m.json", [{"audio_filepath": path.name, "offset": 2.5, "duration": 1.25, "text": "a"}] * 2)
    shown = convert(tmp_path / "m.json", tmp_path / "out")
    (decoder,) = delivered(tmp_path / "out")[0].audios
    expected, _ = soundfile.read(path, start=60000, frames=30000, always_2d=True, dtype="float32")
    (heard,) = decoder.get_audio_clips([(0, 1.25)])[0]
    got, rate = soundfile.read(io.BytesIO(decoder.stream), always_2d=True, dtype="float32")
    for sound in (got, heard.numpy().T):
        assert (rate, sound.shape) == (24000, expected.shape)
        assert np.abs(sound - expected).max() <= near
    told = soundfile.info(io.BytesIO(decoder.stream))
    assert (told.format, told.subtype) == stored
    with tarfile.open(tmp_path / "out/train/00000.tar") as tar:
        (ends,) = {name.rpartition(".")[2] for name in tar.getnames() if not name.endswith(".json")}
    assert ends == stored[0].lower()[: len(ends)]
    assert f"Sample 000000000: 0.{ends} (" in shown


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"duration": 3.0}, '"offset": 0'),
        ({"duration": 9.0}, "5.00 s of sound, but its list names a start of 0.00 and an end of 9.00 s"),
        ({"offset": 6, "duration": 1}, "a start of 6.00 and an end of 7.00 s"),
        ({"offset": 1, "duration": 0}, "a start of 1.00 and an end of 1.00 s"),
        ({"offset": -1, "duration": 1}, "`offset` is '-1', expected seconds"),
        ({"offset": 1, "duration": "long"}, "`duration` is 'long', expected seconds"),
        ({"text": None}, "`text` is null, expected what is said"),
        ({"text": "-"}, "`text` is '-', expected what is said"),
        ({"audio_filepath": ["a.wav", "b.wav"]}, "expected the path of one sound"),
        ({"audio_filepath": "gone.wav"}, "gone.wav: cannot read"),
        ({"audio_filepath": "text.wav"}, "text.wav"),
        ({"audio_filepath": "sox a.wav -t wav - |"}, "none is run"),
        ({"audio_filepath": "a.ark:1234"}, "a place in an archive"),
    ],
)
def test_what_is_wrong_is_named_and_counted(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    written(tmp_path / "a.wav", 5)
    (tmp_path / "text.wav").write_text("no sound")
    good = {"audio_filepath": "a.wav", "text": "x"}
    lines(tmp_path / "m.json", [good, {**good, **entry}, good])
    told = refusal_of("convert", tmp_path / "m.json", tmp_path / "out", "--split-ratio", "1,0,0")
    assert message in told.replace("\n", " ")
    assert "line 2" in told
    told = convert(tmp_path / "m.json", tmp_path / "out", "--on-error", "skip")
    assert "Skipped 1 sample" in told
    assert len(delivered(tmp_path / "out")) == 2


def test_a_manifest_of_one_sound_is_one_object(tmp_path: Path) -> None:
    written(tmp_path / "a.wav", 1)
    manifest = lines(tmp_path / "one.json", [{"audio_filepath": "a.wav", "duration": 1.0, "text": "one"}])
    assert "NeMo manifest, 1 sample" in convert(manifest, tmp_path / "out")
    ((_, answer),) = map(said, delivered(tmp_path / "out"))
    assert answer == "one"


@pytest.mark.parametrize("columns", [{}, {"id": "a"}])
def test_one_conversation_is_one_object_too(tmp_path: Path, columns: dict[str, str]) -> None:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    one = lines(tmp_path / "one.json", [{**columns, "messages": turns}])
    convert(one, tmp_path / "out")
    (talk,) = delivered(tmp_path / "out")
    assert [turn["content"] for turn in talk.messages] == ["Hello", "Hi"]
    listed = lines(tmp_path / "listed.json", [{"conversations": [{"conversations": turns}, {"conversations": turns}]}])
    convert(listed, tmp_path / "two")
    assert len(delivered(tmp_path / "two")) == 2


def test_a_folder_with_a_manifest_asks_for_it(tmp_path: Path) -> None:
    """Its sounds alone would be samples without a text."""
    written(tmp_path / "in/wavs/a.wav", 2)
    lines(tmp_path / "in/train_manifest.json", [{"audio_filepath": "wavs/a.wav", "text": "x"}] * 2)
    assert "convert the folder, or the list train_manifest.json" in refusal_of(
        "convert", tmp_path / "in", tmp_path / "o"
    )


def test_questions_of_a_manifest_and_of_the_flag(tmp_path: Path) -> None:
    written(tmp_path / "a.wav", 2)
    entry = {"audio_filepath": "a.wav", "duration": 2, "text": "hello"}
    lines(tmp_path / "m.json", [{**entry, "question": "Who speaks?", "answer": "Ann"}, entry])
    convert(tmp_path / "m.json", tmp_path / "out", "--prompt", "What is said?")
    asked, given = delivered(tmp_path / "out")
    assert [turn["content"] for turn in asked.messages] == ["Who speaks?", "Ann"]
    assert len(asked.audios) == 1
    assert said(given) == ("What is said?", "hello")
    lines(tmp_path / "n.jsonl", [{"text": "no sound"}])
    assert "--prompt is for speech" in refusal_of("convert", tmp_path / "n.jsonl", tmp_path / "o", "--prompt", "x")


def test_questions_may_have_columns(tmp_path: Path) -> None:
    entries = [
        {"audio_filepath": f"{n}.wav", "text": f"t{n}", "lang": lang} for n, lang in enumerate(("German", "Thai"))
    ]
    for entry in entries:
        written(tmp_path / entry["audio_filepath"], 1.0)
    manifest = lines(tmp_path / "m.json", entries)
    convert(manifest, tmp_path / "out", "--prompt", "Transcribe the {lang} speech.")
    assert sorted(said(one) for one in delivered(tmp_path / "out")) == [
        ("Transcribe the German speech.", "t0"),
        ("Transcribe the Thai speech.", "t1"),
    ]
    told = refusal_of("convert", manifest, tmp_path / "o", "--prompt", "In {language}?", "--split-ratio", "1,0,0")
    assert "--prompt needs a text in `language`, which is 'None'" in told
    told = refusal_of("convert", manifest, tmp_path / "o", "--question", "In {lang}?", "--split-ratio", "1,0,0")
    assert "write the question about sounds as --prompt" in told


@pytest.mark.parametrize("column", ["instruction", "prompt", "question"])
def test_a_question_beside_a_text_is_not_replaced_by_the_usual_one(tmp_path: Path, column: str) -> None:
    """As manifests of speech models have them: the text is the answer to it, and no transcript."""
    written(tmp_path / "a.wav", 1.0)
    manifest = lines(tmp_path / "m.json", [{"audio_filepath": "a.wav", "text": "A man.", column: "Who speaks?"}])
    told = refusal_of("convert", manifest, tmp_path / "o", "--split-ratio", "1,0,0")
    assert f"`{column}` ('Who speaks?') may be the question about the sound" in told
    for number, (prompt, asked) in enumerate({f"{{{column}}}": "Who speaks?", "Say it.": "Say it."}.items()):
        convert(manifest, tmp_path / f"{number}", "--prompt", prompt)
        assert list(map(said, delivered(tmp_path / f"{number}"))) == [(asked, "A man.")]


@pytest.mark.parametrize("column", ["path", "audio_filepath"])
def test_a_second_sound_is_not_left_out_in_silence(tmp_path: Path, column: str) -> None:
    for name in ("a.wav", "b.wav"):
        written(tmp_path / name, 1.0)
    entry = {column: "a.wav", "audio": "b.wav", ("sentence" if column == "path" else "text"): "A man."}
    told = refusal_of("convert", lines(tmp_path / "m.jsonl", [entry]), tmp_path / "o", "--split-ratio", "1,0,0")
    assert f"`{column}` and `audio` name different files (b.wav)" in told
    same = lines(tmp_path / "n.jsonl", [{**entry, "audio": other} for other in ("clips/a.wav", "", None)])
    convert(same, tmp_path / "out")
    assert [len(talk.audios) for talk in delivered(tmp_path / "out")] == [1, 1, 1]


def test_sounds_that_are_asked_about_are_no_images(tmp_path: Path) -> None:
    """ClothoAQA's table."""
    written(tmp_path / "a.wav", 1.0)
    (tmp_path / "qa.csv").write_text("file_name,QuestionText,answer\na.wav,Is it loud?,yes\n")
    command = ("convert", tmp_path / "qa.csv", tmp_path / "out", "--split-ratio", "1,0,0")
    told = refusal_of(*command, "--question", "{QuestionText}", "--field", "answers=answer")
    assert "`file_name` is audio, but the image of a VQASample is no audio." in told
    assert "--question '{QuestionText}', its answer is" in refusal_of(*command, "--field", "question=QuestionText")
    assert "  to make conversations: --question '{QuestionText}'\n" in output_of(*command, "--no-ask", "--dry-run")
    convert(tmp_path / "qa.csv", tmp_path / "out", "--question", "{QuestionText}")
    (sample,) = delivered(tmp_path / "out")
    texts = [one if isinstance(one, str) else one[-1]["text"] for one in (m["content"] for m in sample.messages)]
    assert texts == ["Is it loud?", "yes"]
    assert len(sample.audios) == 1


def test_the_name_of_a_class_is_the_answer_and_said(tmp_path: Path) -> None:
    """ESC-50's table."""
    written(tmp_path / "a.wav", 1.0)
    (tmp_path / "esc.csv").write_text("filename,fold,target,category\na.wav,1,0,dog\n")
    told = convert(tmp_path / "esc.csv", tmp_path / "out", "--question", "What do you hear?")
    assert "  answer from category\n" in told
    (sample,) = delivered(tmp_path / "out")
    assert "dog" in str(sample.messages[-1]["content"])


def test_a_question_without_columns_beside_fields_is_a_text(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "x.csv").write_text("file_name,category\na.png,dog\n")
    convert(tmp_path / "x.csv", tmp_path / "out", "--question", "What is it?", "--field", "answers=category")
    (sample,) = delivered(tmp_path / "out")
    assert (sample.context, sample.answers) == ("What is it?", ["dog"])


@pytest.mark.parametrize("keys", [{"source_lang": "en", "target_lang": "de"}, {"taskname": "s2t_translation"}])
def test_translations_ask_for_a_question(keys: dict[str, str], tmp_path: Path) -> None:
    """Canary's manifests."""
    written(tmp_path / "a.wav", 0.5)
    manifest = lines(tmp_path / "m.json", [{"audio_filepath": "a.wav", "duration": 0.5, "text": "Hallo.", **keys}])
    told = refusal_of("convert", manifest, tmp_path / "out", "--no-progress")
    assert "the text is a translation ('Hallo.'), and the question 'Transcribe the speech.'" in told
    convert(manifest, tmp_path / "out", "--prompt", "Translate the speech into German.")
    assert [said(one) for one in delivered(tmp_path / "out")] == [("Translate the speech into German.", "Hallo.")]
    same = {"source_lang": "de", "target_lang": "de", "taskname": "asr"}
    lines(manifest, [{"audio_filepath": "a.wav", "duration": 0.5, "text": "Hallo.", **same}])
    convert(manifest, tmp_path / "same")
    assert [said(one) for one in delivered(tmp_path / "same")] == [("Transcribe the speech.", "Hallo.")]


def kaldi(folder: Path, *, segments: bool) -> None:
    folder.mkdir(parents=True)
    for number in (1, 2):
        written(folder / f"wav/rec{number}.wav", 4, seed=number)
    (folder / "wav.scp").write_text("rec1 wav/rec1.wav\nrec2  wav/rec2.wav\n")
    if segments:
        (folder / "segments").write_text("utt1 rec1 0.5 1.75\nutt2 rec1 2.00 -1\nutt3\trec2 0 4\n")
        (folder / "text").write_text("utt1 HELLO THERE\nutt2 GOOD  BYE\nutt3 é\nutt9 NOT LISTED\n")
    else:
        (folder / "text").write_text("rec1 ONE\nrec2 TWO\n")


def test_a_kaldi_folder_with_segments(tmp_path: Path) -> None:
    kaldi(tmp_path / "data", segments=True)
    told = convert(tmp_path / "data", tmp_path / "out")
    assert "Kaldi folder, 3 samples" in told
    assert "texts of 1 utterance that segments does not list" in told
    talks = delivered(tmp_path / "out")
    assert [said(one)[1] for one in talks] == ["HELLO THERE", "GOOD  BYE", "é"]
    for talk, (name, first, frames) in zip(
        talks, [("rec1", 8000, 20000), ("rec1", 32000, -1), ("rec2", 0, -1)], strict=True
    ):
        expected, _ = soundfile.read(tmp_path / f"data/wav/{name}.wav", start=first, frames=frames, always_2d=True)
        assert np.array_equal(sound_in(talk)[0], expected)


def test_kaldi_texts_stay_as_they_stand_behind_the_first_blanks(tmp_path: Path) -> None:
    """As `SplitStringOnFirstSpace` of Kaldi's util/text-utils.cc cuts a line: at the first of C's blanks, and trims."""
    kaldi(tmp_path / "data", segments=True)
    texts = {"utt1": "A\tB  C", "utt2": "\u3000D\u3000E\u3000", "utt3": "F\u00a0"}
    (tmp_path / "data/text").write_text("".join(f"{name} \t {text} \t\r\n" for name, text in texts.items()), newline="")
    convert(tmp_path / "data", tmp_path / "out")
    assert [said(one)[1] for one in delivered(tmp_path / "out")] == list(texts.values())


def test_kaldi_folders_of_splits_and_without_segments(tmp_path: Path) -> None:
    kaldi(tmp_path / "data/train", segments=True)
    kaldi(tmp_path / "data/dev", segments=False)
    told = output_of("convert", tmp_path / "data", tmp_path / "out", "--no-progress")
    assert "Split: train 3, val 2" in told
    assert [said(one)[1] for one in delivered(tmp_path / "out", "val")] == ["ONE", "TWO"]
    assert len(delivered(tmp_path / "out", "train")) == 3


def test_a_text_in_latin_1_is_one_utterance_that_fails(tmp_path: Path) -> None:
    kaldi(tmp_path / "data", segments=True)
    (tmp_path / "data/text").write_bytes(b"utt1 caf\xe9\nutt2 caf\xc3\xa9\nutt3 tea\n")
    told = refusal_of("convert", tmp_path / "data", tmp_path / "out", "--no-progress", "--num-workers", 1)
    assert "utterance 1 (id utt1): " in told
    assert "write it as UTF-8 (iconv -f WINDOWS-1252 -t UTF-8)" in told
    assert "Skipped 1 sample" in convert(tmp_path / "data", tmp_path / "out", "--on-error", "skip")
    assert [said(one)[1] for one in delivered(tmp_path / "out")] == ["café", "tea"]


def test_a_channel_of_a_recording_is_refused(tmp_path: Path) -> None:
    kaldi(tmp_path / "data", segments=True)
    (tmp_path / "data/segments").write_text("utt1 rec1 0.5 1.75 0\nutt2 rec1 2.00 -1 1\n")
    told = refusal_of("convert", tmp_path / "data", tmp_path / "out", "--no-progress", "--num-workers", 1)
    assert "`channel` is 1, which seems to be a channel of the audio" in told
    assert "2 samples" in convert(tmp_path / "data", tmp_path / "out", "--ignore", "channel")


@pytest.mark.parametrize("channels", [1, 2])
def test_the_first_channel_is_refused_if_there_are_others(tmp_path: Path, channels: int) -> None:
    written(tmp_path / "a.wav", 2, channels=channels)
    entry = {"audio_filepath": "a.wav", "offset": 0.5, "duration": 1, "text": "hello", "channel_selector": 0}
    (tmp_path / "list.json").write_text(json.dumps(entry) + "\n" + json.dumps(entry | {"offset": 0.75}) + "\n")
    if channels == 2:
        told = refusal_of("convert", tmp_path / "list.json", tmp_path / "out", "--no-progress", "--num-workers", 1)
        assert "line 1: `channel_selector` is 0" in told
        assert "a.wav has 2 channels" in told
        assert "2 samples" in convert(tmp_path / "list.json", tmp_path / "out", "--ignore", "channel_selector")
    else:
        assert "2 samples" in convert(tmp_path / "list.json", tmp_path / "out")


def test_what_kaldi_cannot_give_is_named(tmp_path: Path) -> None:
    kaldi(tmp_path / "data", segments=True)
    (tmp_path / "data/wav.scp").write_text("rec1 flac -c -d rec1.flac |\nrec2 wav/rec2.wav\n")
    (tmp_path / "data/segments").write_text("utt1 rec1 0.5 1.75\nutt2 rec7 0 1\nutt3 rec2 0 4\nutt4 rec2 2\n")
    (tmp_path / "data/text").write_text("utt1 A\nutt2 B\nutt3 C\nutt4 D\n")
    told = convert(tmp_path / "data", tmp_path / "out", "--on-error", "skip")
    assert "Skipped 3 samples" in told
    for words in (
        "(id utt1): 'flac -c -d rec1.flac |' is a command",
        f"{tmp_path}/data/segments, line 2 (id utt2): recording 'rec7' is not in wav.scp",
        f"{tmp_path}/data/segments, line 4 (id utt4): start and end are '2', expected seconds",
    ):
        assert words in told
    assert [said(one)[1] for one in delivered(tmp_path / "out")] == ["C"]
    (tmp_path / "data/text").unlink()
    assert "has wav.scp and text" in energon("convert", tmp_path / "data", tmp_path / "o").output


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        ("rec1 2 x", "line 3 (id utt2): start and end are '2 x', expected seconds"),
        ("rec1 2 1.5", "line 3 (id utt2): start and end are '2 1.5', expected seconds, in that order"),
        ("rec1 -2 1", "line 3 (id utt2): start and end are '-2 1'"),
        ("rec1 0 nan", "line 3 (id utt2): start and end are '0 nan'"),
        ("", "line 3 (id utt2): recording '' is not in wav.scp"),
        ("rec1 2 9", "rec1.wav: has 4.00 s of sound, but its list names a start of 2.00 and an end of 9.00 s"),
    ],
)
def test_times_of_segments_have_kaldis_names(tmp_path: Path, segment: str, message: str) -> None:
    kaldi(tmp_path / "data", segments=True)
    (tmp_path / "data/segments").write_text(f"utt1 rec1 0.5 1.75\n\nutt2 {segment}\n")
    told = refusal_of("convert", tmp_path / "data", tmp_path / "out", "--no-progress", "--num-workers", 1)
    assert message in told
    assert "--media" not in told
    assert "Skipped 1 sample" in convert(tmp_path / "data", tmp_path / "out", "--on-error", "skip")
    assert [said(one)[1] for one in delivered(tmp_path / "out")] == ["HELLO THERE"]


def speakers_of(out: Path) -> dict[str, set[str]]:
    """Return the speakers of each split, by what they say: `SPEAKER says NUMBER`."""
    return {part: {said(one)[1].split()[0] for one in delivered(out, part)} for part in ("train", "val")}


def utterances(folder: Path, speakers: int, each: int) -> Iterator[tuple[str, str, str]]:
    """Write sounds, and yield the path, text and speaker of each; speakers take turns."""
    for number in range(speakers * each):
        name = f"s{number % speakers}"
        written(folder / f"{name}-{number}.wav", 0.2, seed=number)
        yield f"{name}-{number}.wav", f"{name} says {number}", name


@pytest.mark.parametrize("form", ["kaldi", "nemo", "tsv", "librispeech"])
def test_no_speaker_is_in_two_splits(tmp_path: Path, form: str) -> None:
    source = folder = tmp_path / "data"
    found = list(utterances(folder, 6, 5))
    if form == "kaldi":
        (folder / "wav.scp").write_text("".join(f"u{n} {path}\n" for n, (path, _, _) in enumerate(found)))
        (folder / "text").write_text("".join(f"u{n} {text}\n" for n, (_, text, _) in enumerate(found)))
        (folder / "utt2spk").write_text("".join(f"u{n} {name}\n" for n, (_, _, name) in enumerate(found)))
    elif form == "nemo":
        entries = [{"audio_filepath": path, "text": text, "speaker": name} for path, text, name in found]
        source = lines(folder / "manifest.jsonl", entries)
    elif form == "tsv":
        source = folder / "validated.tsv"
        rows = ["client_id\tpath\tsentence\n", *(f"{name}\t{path}\t{text}\n" for path, text, name in found)]
        source.write_text("".join(rows))
    else:
        by_speaker: dict[str, list[str]] = {}
        for path, text, name in found:
            by_speaker.setdefault(name, []).append(f"{Path(path).stem} {text}\n")
        for name, texts in by_speaker.items():
            (folder / f"{name}.trans.txt").write_text("".join(texts))
    told = output_of("convert", source, tmp_path / "out", "--split-ratio", "2,1,0", "--no-progress")
    assert "by 6 speakers: none is in two splits" in told
    speakers = speakers_of(tmp_path / "out")
    assert {part: len(names) for part, names in speakers.items()} == {"train": 4, "val": 2}
    assert speakers["train"] | speakers["val"] == {f"s{number}" for number in range(6)}
    texts = {said(one)[1] for part in ("train", "val") for one in delivered(tmp_path / "out", part)}
    assert texts == {text for _, text, _ in found}


@pytest.mark.parametrize("form", ["kaldi", "tsv", "nemo"])
def test_samples_without_a_speaker_are_told(tmp_path: Path, form: str) -> None:
    """They are dealt out one by one, and may be of any speaker: the promise is for the others."""
    source = folder = tmp_path / "data"
    found = list(utterances(folder, 4, 5))
    flags: tuple[str, ...] = ()
    if form == "kaldi":
        (folder / "wav.scp").write_text("".join(f"u{n} {path}\n" for n, (path, _, _) in enumerate(found)))
        (folder / "text").write_text("".join(f"u{n} {text}\n" for n, (_, text, _) in enumerate(found)))
        told = [f"u{n} {name}\n" for n, (_, _, name) in enumerate(found) if n % 5]
        (folder / "utt2spk").write_text("".join(told))
    elif form == "tsv":
        source = folder / "validated.tsv"
        rows = [f"{name if n % 5 else ''}\t{path}\t{text}\n" for n, (path, text, name) in enumerate(found)]
        source.write_text("".join(["client_id\tpath\tsentence\n", *rows]))
    else:
        entries = [
            {"audio_filepath": path, "text": text, "speaker": name if n % 5 else None}
            for n, (path, text, name) in enumerate(found)
        ]
        source, flags = lines(folder / "manifest.jsonl", entries), ("--split-by", "speaker")
    told = output_of("convert", source, tmp_path / "out", "--split-ratio", "1,1,0", "--no-progress", *flags)
    assert f"by 4 {'values of speaker' if flags else 'speakers'}: none is in two splits (but 4 samples without" in told


@pytest.mark.parametrize("form", ["kaldi", "lists", "column"])
def test_speakers_of_several_given_splits_are_told(tmp_path: Path, form: str) -> None:
    """Of folders or lists of splits, and of a column that tells them; the remedy deals them out anew."""
    folder = tmp_path / "data"
    found = {part: list(utterances(folder / part, 4 if part == "train" else 3, 2)) for part in ("train", "dev")}
    rows = [
        {"audio_filepath": f"{part}/{path}", "text": text, "speaker": name, "id": n, "split": part}
        for part, of in found.items()
        for n, (path, text, name) in enumerate(of)
    ]
    source = folder
    if form == "kaldi":
        for part, of in found.items():
            (folder / part / "wav.scp").write_text("".join(f"u{n} {path}\n" for n, (path, _, _) in enumerate(of)))
            (folder / part / "text").write_text("".join(f"u{n} {text}\n" for n, (_, text, _) in enumerate(of)))
            (folder / part / "utt2spk").write_text("".join(f"u{n} {name}\n" for n, (_, _, name) in enumerate(of)))
    elif form == "lists":
        for part in found:
            plain = [{k: v for k, v in row.items() if k != "split"} for row in rows if row["split"] == part]
            lines(folder / f"{part}.jsonl", plain)
    else:
        source = lines(folder / "all.jsonl", rows)
    told = output_of("convert", source, tmp_path / "out", "--no-progress")
    remedy = "--split-ratio 9,1,0 --split-by speaker" + " --ignore split" * (form == "column")
    assert f"  3 values of speaker in several splits: to deal them out anew, each to one: {remedy}\n" in told
    assert told.count("in several splits") == 1
    told = output_of("convert", source, tmp_path / "anew", "--no-progress", *remedy.split())
    assert "by 4 values of speaker: none is in two splits" in told
    assert "speaker" not in told.partition("not used: ")[2].partition("\n")[0]
    speakers = speakers_of(tmp_path / "anew")
    assert speakers["train"] | speakers["val"] == {"s0", "s1", "s2", "s3"}
    assert not speakers["train"] & speakers["val"]


def test_speakers_of_kaldi_are_in_the_samples(tmp_path: Path) -> None:
    kaldi(tmp_path / "data", segments=True)
    (tmp_path / "data/utt2spk").write_text("utt1 anna\nutt3 bert\n")
    convert(tmp_path / "data", tmp_path / "out")
    with tarfile.open(tmp_path / "out/train/00000.tar") as tar:
        texts = [tar.extractfile(one).read() for one in tar if one.name.endswith(".json")]  # type: ignore[union-attr]
    assert [json.loads(text).get("speaker") for text in texts] == ["anna", None, "bert"]


def test_speakers_stay_in_their_split_when_a_list_grows(tmp_path: Path) -> None:
    found = list(utterances(tmp_path, 8, 3))
    flags = ("--split-ratio", "2,1,0", "--no-progress")
    entries = [{"audio_filepath": path, "text": text, "speaker": name} for path, text, name in found]
    source = lines(tmp_path / "manifest.jsonl", entries[:13])
    output_of("convert", source, tmp_path / "out", *flags)
    before = speakers_of(tmp_path / "out")
    lines(source, entries)
    assert "Unchanged: 2 shards." in output_of("convert", source, tmp_path / "out", *flags)
    after = speakers_of(tmp_path / "out")
    assert {part: names & {f"s{n}" for n in range(8)} for part, names in after.items()} == before
    assert sum(len(delivered(tmp_path / "out", part)) for part in after) == len(found)


@pytest.mark.parametrize(
    ("file", "text", "suffix"),
    [
        ("path", "sentence", "tsv"),
        ("file", "transcription", "csv"),
        ("wav", "text", "csv"),
        ("file_name", "transcript", "jsonl"),
        ("audio", "raw_transcription", "json"),
    ],
)
def test_lists_of_speech_are_known_by_their_columns(tmp_path: Path, file: str, text: str, suffix: str) -> None:
    found = list(utterances(tmp_path, 2, 2))
    source = tmp_path / f"list.{suffix}"
    if suffix.startswith("json"):
        entries = [{file: path, text: words, "lang_id": 4} for path, words, _ in found]
        source.write_text(json.dumps(entries) if suffix == "json" else "\n".join(map(json.dumps, entries)))
    else:
        mark = "\t" if suffix == "tsv" else ","
        rows = [mark.join((file, text, "lang_id")), *(mark.join((path, words, "4")) for path, words, _ in found)]
        source.write_text("\n".join(rows) + "\n")
    told = convert(source, tmp_path / "out", "--prompt", "What is said?")
    assert f"of speech (`{file}`, `{text}`), 4 samples" in told
    talks = delivered(tmp_path / "out")
    assert [said(one) for one in talks] == [("What is said?", words) for _, words, _ in found]
    told = convert(source, tmp_path / "table", "--kind", "table")
    assert f"to ask for {text}: --question 'Transcribe the speech.'" in told
    assert f"'{text}': '{found[0][1]}'" in told
    for talk, (path, _, _) in zip(talks, found, strict=True):
        expected, _ = soundfile.read(tmp_path / path, always_2d=True)
        assert np.array_equal(sound_in(talk)[0], expected)


def test_a_sound_that_is_named_twice_is_one(tmp_path: Path) -> None:
    """The rows of FLEURS."""
    found = list(utterances(tmp_path, 1, 2))
    rows = [{"path": path, "audio": path, "transcription": words} for path, words, _ in found]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    convert(tmp_path / "list.jsonl", tmp_path / "out", "--split-ratio", "1,0,0")
    assert [said(one)[1] for one in delivered(tmp_path / "out")] == [words for _, words, _ in found]


def test_texts_about_sounds_are_no_speech(tmp_path: Path) -> None:
    """As of AudioCaps, and of a folder whose `text` may say what is heard."""
    found = list(utterances(tmp_path, 1, 3))
    for file, text in (("audio", "caption"), ("file_name", "text")):
        source = tmp_path / f"{text}.csv"
        source.write_text(f"{file},{text}\n" + "".join(f"{path},{words}\n" for path, words, _ in found))
        told = convert(source, tmp_path / f"out {text}")
        assert "CSV, 3 samples" in told
        what = "Describe the sound." if text == "caption" else "Transcribe the speech."
        assert f"to ask for {text}: --question '{what}'" in told


def test_folders_of_librispeech(tmp_path: Path) -> None:
    """Two for training, one for validation; a sound that is missing is one sample that fails."""
    wanted: dict[str, list[str]] = {"train": [], "val": []}
    for subset in ("dev-clean", "train-clean-100", "train-other-500"):
        folder = tmp_path / "LibriSpeech" / subset / "84/121123"
        texts = [f"{subset.upper()} WORD {number}" for number in range(3)]
        wanted["val" if "dev" in subset else "train"] += texts
        for number in range(3):
            written(folder / f"84-121123-{number:04d}.flac", 0.3, seed=number)
        rows = "".join(f"84-121123-{number:04d} {text}\n" for number, text in enumerate(texts))
        (folder / "84-121123.trans.txt").write_text(rows)
    told = output_of("convert", tmp_path / "LibriSpeech", tmp_path / "out", "--no-progress")
    assert "LibriSpeech folder, 9 samples" in told
    assert "Split: train 6, val 3" in told
    assert {part: [said(one)[1] for one in delivered(tmp_path / "out", part)] for part in wanted} == wanted
    (folder / "84-121123-0001.flac").unlink()
    assert "84-121123-0001.flac: cannot read" in refusal_of(
        "convert", tmp_path / "LibriSpeech", tmp_path / "out2", "--no-progress", "--num-workers", 1
    )
    told = output_of("convert", tmp_path / "LibriSpeech", tmp_path / "out2", "--no-progress", "--on-error", "skip")
    assert "Skipped 1 sample" in told


def test_hours_of_sound_are_shown_where_lengths_are_known(tmp_path: Path) -> None:
    found = list(utterances(tmp_path, 2, 3))
    source = tmp_path / "list.csv"
    source.write_text("path,sentence\n" + "".join(f"{path},{words}\n" for path, words, _ in found))
    hours = sum(soundfile.info(tmp_path / path).duration for path, _, _ in found) / 3600
    convert(source, tmp_path / "out", "--no-media-metadata")
    assert "hours:        unknown, of sound (`energon prepare-media" in output_of("info", tmp_path / "out")
    for command in (("columns", "add", tmp_path / "out", "--sound-seconds"), _LENGTHS):
        output_of(*(tmp_path / "out" if word == "OUT" else word for word in command))
        assert answer("info", tmp_path / "out")["hours"] == {"sound": pytest.approx(hours)}
    assert f"hours:        {hours:,.4g} of sound" in output_of("info", tmp_path / "out")


_LENGTHS = ("prepare-media", "OUT", "--media-metadata-by-extension")


@pytest.mark.parametrize("where", ["data", "data/train"])
def test_recipes_of_kaldi_name_files_from_where_they_run(tmp_path: Path, where: str) -> None:
    for part in ("train", "dev"):
        folder = tmp_path / "data" / part
        folder.mkdir(parents=True)
        written(tmp_path / f"wavs/{part}.wav", 1)
        (folder / "wav.scp").write_text(f"{part} wavs/{part}.wav\n")
        (folder / "text").write_text(f"{part} words of {part}\n")
    output_of("convert", tmp_path / where, tmp_path / "out", "--no-progress")
    parts = ("train", "val") if where == "data" else ("train",)
    told = [said(one)[1] for part in parts for one in delivered(tmp_path / "out", part)]
    assert told == ["words of train", "words of dev"][: len(parts)]


def test_what_says_nothing_or_is_cut_off(tmp_path: Path) -> None:
    written(tmp_path / "a.flac", 3)
    whole = (tmp_path / "a.flac").read_bytes()
    (tmp_path / "half.flac").write_bytes(whole[: len(whole) // 2])
    texts = {"a.flac": "a"}
    entries = [{"audio_filepath": name, "text": text} for name, text in texts.items()]
    entries += [{"audio_filepath": "a.flac", "text": text} for text in ("", "  ", "<image> b")]
    entries += [{"audio_filepath": "half.flac", "text": "half"}]
    told = convert(lines(tmp_path / "m.json", entries), tmp_path / "out", "--on-error", "skip")
    assert "Skipped 2 samples:" in told
    assert "line 4: `text` has '<image>', which is a place for media in conversations" in told
    assert "line 5: " in told
    assert "is cut off" in told
    assert "2 samples with an empty answer" in told
    assert [said(one)[1].strip() for one in delivered(tmp_path / "out")] == ["a", "", ""]


def test_sounds_longer_than_many_models_hear_are_told_with_what_leaves_them_out(tmp_path: Path) -> None:
    for name, seconds in (("long", 30.5), ("short", 29.5)):
        written(tmp_path / f"{name}.wav", seconds, rate=8000)
    rows = [{"audio_filepath": f"{name}.wav", "text": name} for name in ("short", "long", "short")]
    manifest = lines(tmp_path / "m.jsonl", rows)
    told = convert(manifest, tmp_path / "out")
    assert "1 sound of more than 30 s. Many models hear 30 s" in told
    assert "1 sample with a sound of more than 30 s: train/00000.tar/000000001" in output_of("lint", tmp_path / "out")
    output_of("columns", "add", tmp_path / "out", "--sound-seconds")
    mix = tmp_path / "mix.yaml"
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
    mix.write_text(f"{head}    path: out\n    filter: sound_seconds <= 30\n")
    assert [said(one)[1] for one in delivered(mix)] == ["short", "short"]


def test_absolute_paths_of_kaldi_ask_for_a_folder_that_has_all(tmp_path: Path) -> None:
    sounds = [written(tmp_path / f"sounds/{name}/a.wav", 0.5) for name in ("anna", "bert")]
    data = tmp_path / "recipe/data"
    data.mkdir(parents=True)
    (data / "wav.scp").write_text("".join(f"u{n} {path}\n" for n, path in enumerate(sounds)))
    (data / "text").write_text("u0 ONE\nu1 TWO\n")
    told = refusal_of("convert", data, tmp_path / "out", "--no-progress")
    assert f"--media {tmp_path}. " in told
    told = refusal_of("convert", data, tmp_path / "out", "--no-progress", "--media", tmp_path / "sounds/anna")
    assert f"--media {tmp_path}/sounds. " in told
    for number, media in enumerate((tmp_path, tmp_path / "sounds", "/")):
        convert(data, tmp_path / f"out{number}", "--media", media)
        assert [said(one)[1] for one in delivered(tmp_path / f"out{number}")] == ["ONE", "TWO"]


@pytest.mark.parametrize("form", ["kaldi", "nemo"])
def test_absolute_paths_beside_relative_ones_are_told_of_too(tmp_path: Path, form: str) -> None:
    sounds = [written(tmp_path / f"sounds/{name}.wav", 0.5) for name in ("anna", "bert")]
    source = tmp_path / "a/b/c/recipe"
    source.mkdir(parents=True)
    for names in (["sounds/anna.wav", str(sounds[1])], [str(sounds[0]), "sounds/bert.wav"]):
        if form == "kaldi":
            (source / "wav.scp").write_text("".join(f"u{n} {name}\n" for n, name in enumerate(names)))
            (source / "text").write_text("u0 ONE\nu1 TWO\n")
        else:
            rows = [{"audio_filepath": name, "text": text} for name, text in zip(names, ("ONE", "TWO"), strict=True)]
            source = lines(tmp_path / "a/b/c/recipe/m.jsonl", rows)
        told = refusal_of("convert", source, tmp_path / "out", "--no-progress")
        assert f"leads out of {tmp_path}/a/b/c/recipe. Name a folder that has all files" in told
        assert f"--media {tmp_path}. " in told
        convert(source, tmp_path / f"out {names[0][0]}", "--media", tmp_path)
        assert [said(one)[1] for one in delivered(tmp_path / f"out {names[0][0]}")] == ["ONE", "TWO"]


def test_a_recipe_of_kaldi_may_begin_with_an_absolute_path(tmp_path: Path) -> None:
    data = tmp_path / "data/train"
    data.mkdir(parents=True)
    one = written(tmp_path / "wavs/one.wav", 0.5)
    written(tmp_path / "wavs/two.wav", 0.5)
    (data / "wav.scp").write_text(f"u0 {one}\nu1 wavs/two.wav\n")
    (data / "text").write_text("u0 ONE\nu1 TWO\n")
    convert(data, tmp_path / "out")
    assert [said(one)[1] for one in delivered(tmp_path / "out")] == ["ONE", "TWO"]


def test_a_sound_that_cannot_be_opened_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"RIFF    WAVE")
    entry = {"audio_filepath": "a.wav", "offset": 0, "duration": 1, "text": "a"}
    told = refusal_of("convert", lines(tmp_path / "m.jsonl", [entry]), tmp_path / "out", "--no-progress")
    assert told.count("a.wav") == 1
    assert f"m.jsonl, line 1: {tmp_path}/a.wav cannot be opened" in told


def test_marks_that_are_counted_are_not_told_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "a.wav", 0.5)
    rows = [{"audio_filepath": "a.wav", "text": text} for text in ("so <unk> it", "so<br>it", "a [noise]")]
    told = convert(lines(tmp_path / "m.jsonl", rows), tmp_path / "out")
    assert "1 sample with tokens of models" in told
    assert "1 sample with entities or tags of HTML" in told
    assert "texts have marks such as '[noise]'" in caplog.text


def test_speech_in_tables_is_asked_for_by_a_question(tmp_path: Path) -> None:
    """As `datasets` writes its `Audio`: a struct of bytes and a path."""
    arrow = pytest.importorskip("pyarrow")
    found = list(utterances(tmp_path, 1, 3))
    sounds = [{"bytes": (tmp_path / path).read_bytes(), "path": Path(path).name} for path, _, _ in found]
    rows = arrow.table({"audio": sounds, "text": [words for _, words, _ in found], "speaker_id": [1, 2, 3]})
    source = tmp_path / "rows.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(rows, source)
    told = convert(source, tmp_path / "crude")
    remedy = re.search("to ask for text: (.*)", told)
    assert remedy is not None
    convert(source, tmp_path / "out", *shlex.split(remedy[1]))
    talks = delivered(tmp_path / "out")
    texts = [[turn["content"] for turn in talk.messages] for talk in talks]
    assert texts == [["Transcribe the speech.", words] for _, words, _ in found]
    for talk, (path, _, _) in zip(talks, found, strict=True):
        assert np.array_equal(sound_in(talk)[0], soundfile.read(tmp_path / path, always_2d=True)[0])


@pytest.mark.parametrize("form", ["folder", "tars", "prepared"])
def test_sounds_with_texts_beside_them_become_conversations_about_them(tmp_path: Path, form: str) -> None:
    """By the command that is proposed."""
    source = tmp_path / "pairs"
    texts = {f"u{number}": f"Hello {number}, ça va?" for number in range(4)}
    for number, (name, text) in enumerate(texts.items()):
        written(source / f"{name}.wav", 0.5, seed=number)
        (source / f"{name}.txt").write_text(f"{text}\n")
    if form != "folder":
        with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for path in sorted(source.iterdir()):
                tar.add(path, path.name)
        (tmp_path / "tars").mkdir()
        (tmp_path / "0.tar").rename(tmp_path / "tars/0.tar")
        source = tmp_path / "tars"
    if form == "prepared":
        flags = ("--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset")
        proposed = re.search(rf"energon convert {source} OUT (.*)", output_of("prepare", source, *flags))
    else:
        proposed = re.search("to ask for txt: (.*)", convert(tmp_path / "pairs", tmp_path / "out", "--dry-run"))
    assert proposed is not None
    told = convert(source, tmp_path / "out", *shlex.split(proposed[1]))
    assert "configs/tiny/qwen2_audio_instruct.yaml" in told
    talks = delivered(tmp_path / "out")
    for talk, (name, text) in zip(talks, texts.items(), strict=True):
        assert [turn["content"] for turn in talk.messages] == ["Transcribe the speech.", text]
        assert np.array_equal(sound_in(talk)[0], soundfile.read(tmp_path / f"pairs/{name}.wav", always_2d=True)[0])
    told = convert(source, tmp_path / "out", "--question", "What is said?", "--overwrite")
    assert [talk.messages[0]["content"] for talk in delivered(tmp_path / "out")] == ["What is said?"] * 4
    assert "Unchanged" not in told


def test_what_cannot_be_asked_about_is_refused(tmp_path: Path) -> None:
    """A text in another encoding, samples with JSON, columns that are not there."""
    for name, text in (("a", b"good"), ("b", b"caf\xe9")):
        written(tmp_path / f"tar/{name}.wav", 0.5)
        (tmp_path / f"tar/{name}.txt").write_bytes(text)
    with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted((tmp_path / "tar").iterdir()):
            tar.add(path, path.name)
    asked = ("--no-progress", "--question")
    for source in (tmp_path / "0.tar", tmp_path / "tar"):
        told = refusal_of("convert", source, tmp_path / "out", *asked, "What?")
        assert "is not UTF-8" in told
        assert "Write it as such" in told
        told = refusal_of("convert", source, tmp_path / "out", *asked, "What, in {language}?")
        assert "language" in told
    (tmp_path / "tar/b.txt").rename(tmp_path / "tar/b.json")
    (tmp_path / "tar/b.json").write_text("{}")
    told = refusal_of("convert", tmp_path / "tar", tmp_path / "out", *asked, "What?")
    assert "b.wav: has the parts wav, json; --question asks about images, videos or sounds with one text" in told


def test_utterances_without_a_speaker_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of Kaldi's folders, whether or not samples are dealt out to splits by speakers."""
    found = list(utterances(tmp_path, 3, 2))
    (tmp_path / "wav.scp").write_text("".join(f"u{n} {tmp_path}/{path}\n" for n, (path, _, _) in enumerate(found)))
    (tmp_path / "text").write_text("".join(f"u{n} {text}\n" for n, (_, text, _) in enumerate(found)))
    speakers = "".join(f"u{n} {who}\n" for n, (_, _, who) in enumerate(found) if n not in (2, 4))
    (tmp_path / "utt2spk").write_text(speakers)
    told = convert(tmp_path, tmp_path / "out")
    said_of = [message for message in caplog.messages if "utt2spk" in message]
    assert said_of == [f"{tmp_path}: utt2spk has no speaker of 2 utterances, such as u2"]
    assert "without one" not in told
    told = output_of("convert", tmp_path, tmp_path / "two", "--split-ratio", "1,1,0", "--no-progress")
    assert f"(but 2 samples without one, such as {tmp_path}, utterance 3 (id u2), dealt out by number)" in told
