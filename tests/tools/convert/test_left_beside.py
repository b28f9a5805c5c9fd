"""What tools and sets write beside texts, under other names or in other places: learned, or refused by its name."""

from __future__ import annotations

import base64
import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from commands import output_of
from delivered import delivered
from sources import convert, converted, picture, refused, write_pictures
from tar_builder import write_tar

from energon_bridge.core.errors import SourceError
from energon_bridge.models.conversations.conversation import in_parts, read_conversation

ALL = ("--split-ratio", "1,0,0")
ANSWER = {"role": "assistant", "content": "x"}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}


def talk(**beside: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "What?"}, ANSWER], **beside}


def turn(role: str = "user", **keys: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "What?"}, ANSWER]
    return {"messages": [{**one, **keys} if one["role"] == role else one for one in turns]}


def written(folder: Path, rows: Any, name: str = "rows.jsonl") -> Path:
    write_pictures(folder, ["a.png", "b.png"])
    path = folder / name
    path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["system_message", "system_instruction", "systemPrompt"])
def test_system_prompts_under_other_names_are_learned(tmp_path: Path, name: str) -> None:
    rows = [talk(**{name: "Be kind."}), {"question": "What?", "answer": "x", name: "Be kind."}]
    path = written(tmp_path, rows)
    convert(path, tmp_path / "out", *ALL)
    for source in (path, tmp_path / "out"):
        for sample in delivered(source):
            turns = [(one["role"], one["content"]) for one in sample.messages if one["role"] != "system"]
            systems = [one["content"] for one in sample.messages if one["role"] == "system"] or [sample.system]
            assert (systems, turns) == (["Be kind."], [("user", "What?"), ("assistant", "x")])


INLINE = base64.b64encode(picture(0)).decode()
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image of a turn, as of Ollama": (turn(images=[INLINE]), "a turn of 'user' has a file in `images`"),
    "its path": (turn(image="a.png"), "a turn of 'user' has a file in `image` ('a.png')"),
    "an object": (turn(attachments=[{"path": "a.png"}]), "a turn of 'user' has a file in `attachments`"),
    "an image of a pair": (
        {"qas": [{"question": "What?", "answer": "x", "image": "a.png"}]},
        "a turn of 'user' has a file in `image`",
    ),
    "an id in a pair, as of Visual Genome": (
        {"id": 1, "qas": [{"question": "What?", "answer": "x", "image_id": 1, "qa_id": 2}]},
        "`image_id` (1) seems to name what the question is about",
    ),
    "tools": (talk(available_tools=[TOOL]), "`available_tools` has tools"),
    "tools as JSON": (talk(tool_definitions=json.dumps([TOOL])), "call it `tools`"),
    "two conversations": (talk(conversations=[{"from": "human", "value": "Why?"}]), "--ignore conversations"),
    "reasoning": (turn("assistant", thought="It is so."), "call it reasoning_content"),
    "reasoning by another name": (turn("assistant", analysis="It is so."), "reasoning in `analysis`"),
    "reasoning of OpenRouter": (
        turn("assistant", reasoning_details=[{"type": "reasoning.text", "text": "It is so."}]),
        "reasoning in `reasoning_details`",
    ),
    "reasoning as an answer, as of gpt-oss": (turn("assistant", channel="analysis"), "a turn has channel='analysis'"),
    "which turns are learned": (talk(loss_mask=[0, 1]), "`loss_mask` is [0, 1] beside 2 turns"),
    "that answers are not, as of NeMo": (talk(mask="Assistant"), "`mask` is 'Assistant' beside 2 turns"),
    "which parts are, as of Axolotl": (
        {
            "messages": [
                talk()["messages"][0],
                {"role": "assistant", "content": [{"type": "text", "text": "x", "train": 0}]},
            ]
        },
        "a text part has train=0",
    ),
    "a pair that is wrong": (
        {"qas": [{"question": "What?", "answer": "x", "is_correct": False}]},
        "a pair has is_correct=False, and was rejected",
    ),
    "an answer that is wrong": (turn("assistant", label=False), "a turn of 'assistant' has label=False"),
    "a hidden answer": (turn("assistant", hidden=True), "an answer has hidden=True"),
    "no loss, in camel case": (turn("assistant", useLoss=False), "no answer to learn"),
    "branches": (
        {
            "messages": [
                {**one, "id": n, "parent": at}
                for n, at, one in ((1, None, talk()["messages"][0]), (2, 1, ANSWER), (3, 1, ANSWER))
            ]
        },
        "the turns are a tree, of which `parent` tells the branches (1)",
    ),
    "two texts": (turn("assistant", value="y"), "another text in `value` ('y')"),
    "two roles": (turn("assistant", **{"from": "human"}), "role='assistant' and from='human'"),
    "earlier turns": (talk(history=[["Hello?", "Yes."]]), "--ignore history"),
    "knowledge of a pair": (
        {"qas": [{"question": "What?", "answer": "x", "facts": ["The moon is made of cheese."]}]},
        "a pair has a text in `facts`",
    ),
    "a short premise, as of COPA": (
        {"question": "cause", "premise": "She ran.", "choice1": "p", "choice2": "q", "label": 0},
        "--ignore premise",
    ),
    "choices, as of M4-Instruct": (talk(choice_list=["a dog", "a cat"]), "--ignore choice_list"),
    "turns that say another order": (
        {
            "messages": [
                {"role": "assistant", "content": "x", "turn": 1},
                {"role": "user", "content": "What?", "turn": 0},
            ]
        },
        "the turns are not in their order, which `turn` says",
    ),
    "numbers between tags": (
        {"messages": [{"role": "user", "content": "<image>1</image> What?"}, ANSWER]},
        "a text names an image as '<image>1</image>'",
    ),
    "an image in numbers": (
        {"question": "What?", "answer": "x", "pixels": [[[1, 2, 3]] * 4] * 4},
        "`pixels` seems to be an image in numbers",
    ),
    "which image a turn is about": (turn(image_index=1), "has image_index=1, and all images would be shown"),
    "a sound in a text": (
        {"messages": [{"role": "user", "content": "<audio>a.wav</audio> What?"}, ANSWER]},
        "write '<audio>' there, and its path in `audios`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_turn_has_is_refused(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    entry, message = REFUSED[name]
    path = written(tmp_path, [entry])
    assert message in refused(path, tmp_path / "out", *ALL)
    with pytest.raises(Exception, match="skipped"):
        delivered(path)
    assert message.partition("--ignore")[0] in caplog.text


KEPT: dict[str, dict[str, Any]] = {
    "ids of pairs beside an image": {
        "image": "a.png",
        "qas": [{"question": "What?", "answer": "x", "image_id": 1}],
    },
    "ids of pairs beside a text": {"story": "What?", "qas": [{"question": "What?", "answer": "x", "video_id": 1}]},
    "what tools were used": talk(
        tools_used=["f"], tool_count=1, functions_json="{", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]
    ),
    "the same twice": talk(conversations=[{"from": "human", "value": "What?"}, {"from": "gpt", "value": "x"}]),
    "a thought that is in the answer": turn("assistant", thought="x", cot=None),
    "reasoning twice": turn(
        "assistant", reasoning="It is so.", reasoning_details=[{"type": "reasoning.text", "text": "It is so."}]
    ),
    "no choices": talk(choice_list="NA"),
    "that questions are not learned": talk(mask="User"),
    "the first image": turn(image_index=0, image_indices=[]),
    "numbers of turns": talk(loss=[0.5, 1.5], ids=[0, 1]),
    "no image": turn(images=[], image=None, attachments="none"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_says_nothing_new_is_left_beside(tmp_path: Path, name: str) -> None:
    convert(written(tmp_path, [KEPT[name]]), tmp_path / "out", *ALL)
    (sample,) = delivered(tmp_path / "out")
    assert [one.get("content", one.get("value")) for one in sample.messages] == ["What?", "x"]


@pytest.mark.parametrize(("column", "verdict"), [("answer", "reject"), ("answer", "ignore"), ("status", "discarded")])
def test_rejected_annotations_are_left_out_or_taken_on_request(tmp_path: Path, column: str, verdict: str) -> None:
    """Prodigy's answers; Argilla's status."""
    rows = [{"image": "a.png", "caption": f"{n}.", column: said} for n, said in enumerate(["accept", verdict])]
    path = written(tmp_path, rows)
    assert f"line 2: `{column}` is {verdict!r}" in refused(path, tmp_path / "out", *ALL)
    convert(path, tmp_path / "accepted", *ALL, "--on-error", "skip")
    convert(path, tmp_path / "all", *ALL, "--ignore", column)
    captions = [[one.caption for one in delivered(tmp_path / name)] for name in ("accepted", "all")]
    assert captions == [["0."], ["0.", "1."]]
    asked = [
        {"question": "Accept or reject?", "answer": "reject"},
        {"image": "a.png", "question": "?", "answer": "ignore"},
    ]
    for number, row in enumerate(asked):
        convert(written(tmp_path, [row]), tmp_path / f"asked{number}", *ALL)


def test_answers_of_several_models_are_not_those_of_annotators(tmp_path: Path) -> None:
    answers = [{"answer": "worse", "rank": 2}, {"answer": "better", "rank": 1}]
    path = written(tmp_path, [{"prompt": "Why?", "answers": answers}])
    assert "training needs a cooker" in convert(path, tmp_path / "out", *ALL)


@pytest.mark.parametrize("listed", ['["A red one.", "B."]', "['A red one.', 'B.']"])
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_captions_that_are_a_list_in_a_text(tmp_path: Path, listed: str, form: str) -> None:
    if form == "csv":
        path = written(tmp_path, 'image,captions\na.png,"' + listed.replace('"', '""') + '"\n', "rows.csv")
    else:
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = tmp_path / "rows.parquet"
        rows = [{"image": {"bytes": picture(0), "path": "a.jpg"}, "captions": listed}]
        parquet.write_table(arrow.Table.from_pylist(rows), path)
        assert [sample.caption for sample in delivered(path)] == ["A red one."]
    convert(path, tmp_path / "out", *ALL)
    assert [sample.caption for sample in delivered(tmp_path / "out")] == ["A red one."]


@pytest.mark.parametrize(
    ("column", "split"),
    [
        *(("split", name) for name in ("testdev", "testmini", "devtest", "minival", "teststd", "validate")),
        *((name, "test") for name in ("set_name", "phase", "split_type", "fold")),
    ],
)
def test_rows_of_tests_in_the_words_of_public_sets(tmp_path: Path, column: str, split: str) -> None:
    """GQA, MathVista, FLORES, Detectron, VQAv2; TextVQA's column."""
    text = f"image,mode,caption,{column}\na.png,RGB,One.,train\nb.png,RGB,Two.,{split}\n"
    told = refused(written(tmp_path, text, "rows.csv"), tmp_path / "out", *ALL)
    assert f"row 3: `{column}` is {split!r}, and other rows are to be learned" in told


@pytest.mark.parametrize("split", ["restval", "trainval", "attest", "valued", "contest"])
def test_other_words_are_no_splits(tmp_path: Path, split: str) -> None:
    text = f"image,caption,split\na.png,One.,train\nb.png,Two.,{split}\n"
    convert(written(tmp_path, text, "rows.csv"), tmp_path / "out", *ALL)
    assert len(delivered(tmp_path / "out")) == 2


def test_blanks_behind_bars_belong_to_them(tmp_path: Path) -> None:
    """Flickr30k's results.csv."""
    text = 'image_name| comment_number| comment\na.png| 0| Two men.\nb.png| 1| "One | two."\n'
    convert(written(tmp_path, text, "results.csv"), tmp_path / "out", *ALL)
    assert [sample.caption for sample in delivered(tmp_path / "out")] == ["Two men.", "One | two."]


def test_quotes_are_text_where_none_stand_around_fields(tmp_path: Path) -> None:
    """Tables of Common Voice, as CorporaCreator writes them (`quoting=csv.QUOTE_NONE`)."""
    texts = ['"Hello.', 'She said "Bye"', '"Zero", she said.', "Yes.", '"All of it."', 'and "so on"', '"']
    written(tmp_path, "", "rows.tsv")
    for number, names in enumerate((["image", "caption", "votes"], ["image", "caption"])):
        with (tmp_path / "rows.tsv").open("w", newline="") as file:
            out = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None, lineterminator="\n")
            out.writerow(names)
            out.writerows(["a.png", text, "2"][: len(names)] for text in texts)
        assert "TSV (quotes are text), 7 samples" in convert(tmp_path / "rows.tsv", tmp_path / f"{number}", *ALL)
        assert [sample.caption for sample in delivered(tmp_path / f"{number}")] == texts


def test_a_quote_too_few_loses_its_row_only(tmp_path: Path) -> None:
    """Other fields of the TSV need the quotes around them, so they are none of the texts."""
    good = ['a.png\t"She ""said""."\t1', "b.png\tBye.\t4", 'a.png\t"Two\nlines,\t\ta tab"\t5']
    bad = ['a.png\t"Hello.\t2', 'b.png\t"Zero", she said.\t4']
    rows = [good[0], bad[0], good[1], bad[1], good[2]]
    path = written(tmp_path, "".join(f"{row}\n" for row in ("image\tcaption\tvotes", *rows)), "rows.tsv")
    assert "line 3: a field begins with a quote that ends in line 5, but" in refused(path, tmp_path / "out", *ALL)
    assert "Skipped 2 samples" in convert(path, tmp_path / "out", *ALL, "--on-error", "skip")
    kept = ['She "said".', "Bye.", "Two\nlines,\t\ta tab"]
    assert [sample.caption for sample in delivered(tmp_path / "out")] == kept
    path = written(tmp_path, 'image,caption\na.png,One.\nb.png,"Two.\na.png,Three.\nb.png,"Four."\n', "rows.csv")
    assert "Skipped 1 sample" in convert(path, tmp_path / "csv", *ALL, "--on-error", "skip")
    assert [sample.caption for sample in delivered(tmp_path / "csv")] == ["One.", "Three.", "Four."]


def test_boxes_are_no_captions(tmp_path: Path) -> None:
    write_pictures(tmp_path / "in", ["a.png", "b.png", "c.png"])
    for name, text in {"a": "0 0.5 0.5 0.1 0.1\n", "b": "", "c": "1 0.5 0.5 0.1 0.1\n7 0.2 0.5 0.1 0.1"}.items():
        (tmp_path / f"in/{name}.txt").write_text(text)
    assert "numbers only" in refused(tmp_path / "in", tmp_path / "out", *ALL)
    convert(tmp_path / "in", tmp_path / "out", *ALL, "--sample-type", "CaptioningSample")
    (tmp_path / "in/b.txt").write_text("1 2 3 4 5 " * 200 + "and so on")
    convert(tmp_path / "in", tmp_path / "more", *ALL)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{INLINE}"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": INLINE}},
    ],
)
def test_files_in_parts_of_a_list_that_is_not_converted(
    tmp_path: Path, part: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    turns = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}, ANSWER]
    path = written(tmp_path, [{"messages": turns}])
    with pytest.raises(Exception, match="skipped"):
        delivered(path)
    assert "convert the list (energon convert)" in caplog.text
    convert(path, tmp_path / "out", *ALL)
    (sample,) = delivered(tmp_path / "out")
    assert len(sample.images) == 1


def test_what_is_said_in_a_sound_with_its_times_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whisper's segments, beside turns that do not say them."""
    path = written(tmp_path, [talk(segments=[{"start": 0.0, "end": 1.0, "text": "Hello there."}])])
    assert "--ignore segments" in refused(path, tmp_path / "out", *ALL)
    with pytest.raises(Exception, match="skipped"):
        delivered(path)
    assert "`segments` has a text beside `messages`" in caplog.text


def table(folder: Path, row: dict[str, Any]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([row]), folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.parametrize("ending", ["pdf", "nii.gz"])
def test_documents_that_a_question_is_about(ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pdf and Nifti of the datasets library; a tar."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    data = gzip.compress(b"x") if ending.endswith("gz") else b"%PDF-1.4"
    row = {"question": "What?", "answer": "x", "paper": {"bytes": data, "path": f"a.{ending}"}}
    parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    assert "`paper`: " in refused(tmp_path / "rows.parquet", tmp_path / "out", *ALL)
    write_tar(tmp_path / "tars/a.tar", [("0.json", json.dumps(talk()).encode()), (f"0.{ending}", data)])
    output_of("prepare", tmp_path / "tars", *ALL, "--sample-type", "CrudeWebdataset")
    for path in (tmp_path / "rows.parquet", tmp_path / "tars"):
        caplog.clear()
        with pytest.raises(Exception, match="skipped"):
            delivered(path)
        assert "is no image, video or sound, and the question would be learned without it" in caplog.text


def shown(number: int) -> dict[str, Any]:
    return {"bytes": picture(number), "path": f"{number}.jpg"}  # as high as 16 + number


@pytest.mark.parametrize(
    ("columns", "wrong"),
    [
        (("query_image", "choice_image_0", "choice_image_1"), "choice_image_0, choice_image_1, query_image"),
        (("before", "after"), "after, before"),
        (("after", "before"), "after, before"),  # in the order of the alphabet, but not of the words
        (("back", "front"), "back, front"),
        (("post_event", "pre_event"), "post_event, pre_event"),
        (("one", "two", "three"), "one, three, two"),
        (("first_image", "second_image"), ""),
        (("image_2", "image_10", "image_1"), ""),  # numbered: 1, 2, 10
        (("left_image", "right_image"), ""),
        (("image", "image_2"), ""),
    ],
)
def test_pictures_in_several_columns_are_shown_in_their_order_or_not_at_all(
    tmp_path: Path, columns: tuple[str, ...], wrong: str
) -> None:
    row = {"question": "What changed?", "answer": "x", **{name: shown(n) for n, name in enumerate(columns)}}
    path = table(tmp_path, row)
    if wrong:
        assert f"in the order of the names, {wrong}" in refused(path, tmp_path / "out", *ALL)
        with pytest.raises(SourceError, match=wrong):
            delivered(path)
        left_out = [flag for name in columns[1:] for flag in ("--ignore", name)]
        convert(path, tmp_path / "out", *ALL, *left_out)
        columns = columns[:1]
    else:
        convert(path, tmp_path / "out", *ALL)
    numbered = {"image_2": 1, "image_10": 2, "image_1": 0} if "image_10" in columns else {}
    order = sorted(range(len(columns)), key=lambda n: numbered.get(columns[n], n))
    for source in (tmp_path / "out", path) if not wrong else (tmp_path / "out",):
        (sample,) = delivered(source)
        images = sample.images if len(order) > 1 else [sample.image]
        assert [image.shape[1] for image in images] == [16 + n for n in order]


def test_the_path_of_a_picture_beside_it_is_only_its_name(tmp_path: Path) -> None:
    """RealWorldQA; a path beside other contents is a file that is missing."""
    row = {"image": shown(0), "question": "What is it?", "answer": "x", "image_path": "1.webp"}
    path = table(tmp_path, row)
    convert(path, tmp_path / "out", *ALL)
    assert [(one.context, one.image.shape[1]) for one in delivered(tmp_path / "out")] == [("What is it?", 16)]
    path = table(tmp_path, {**row, "image_path": None, "video_path": "1.mp4"})
    assert "1.mp4" in refused(path, tmp_path / "other", *ALL)


@pytest.mark.parametrize(
    "column",
    [
        *("image_1", "left_image", "question_image", "video_path", "image_left", "img_before_1"),
        *("Figure_path", "chart_file", "doc_key", "filename", "scan"),
    ],
)
def test_questions_are_not_learned_without_the_files_that_columns_name(
    column: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "a.mp4" if column == "video_path" else "a.png"
    rows = {"pair": {"question": "What?", "answer": "x", column: name}, "turns": talk(**{column: [name]})}
    for form, row in rows.items():
        caplog.clear()
        with pytest.raises(Exception, match="skipped"):
            delivered(written(tmp_path, [row], f"{form}.jsonl"))
        assert f"`{column}` names a file ('{name}') that is no part of the sample" in caplog.text
        out = tmp_path / f"{form} alone"
        convert(tmp_path / f"{form}.jsonl", out, *ALL, "--ignore", column)
        assert len(delivered(out)) == 1


@pytest.mark.parametrize("column", ["clips", "before", "reference"])
def test_files_beside_a_question_may_have_any_name(
    column: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, [{"question": "What?", "answer": "x", column: ["a.mp4", "b.mp4"]}])
    with pytest.raises(Exception, match="skipped"):
        delivered(path)
    assert f"`{column}` names a file ('a.mp4') that is no part of the sample" in caplog.text
    said = {"image_format": "png", "options": ["x", "a.png"], "source": "a.mp4", "audio_codec": "flac"}
    assert len(delivered(written(tmp_path, [{"question": "What?", "answer": "x", **said}], "said.jsonl"))) == 1
    said = {"answers": ["a.png"], "note": "as in a.png", "code_path": "src/index.ts"}
    assert len(delivered(written(tmp_path, [{"question": "Which?", **said}], "named.jsonl"))) == 1


@pytest.mark.parametrize(
    "beside", [{"multi_modal_data": {"image": ["a.png"]}}, {"media": [{"type": "image", "path": "a.png"}]}]
)
@pytest.mark.parametrize("form", ["turns", "pair"])
def test_files_inside_of_objects_beside_a_question_are_not_left_out(
    beside: dict[str, Any], form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = talk() if form == "turns" else {"question": "What?", "answer": "x"}
    path = written(tmp_path, [{**row, **beside}])
    complaint = f"`{next(iter(beside))}` names a file ('a.png') that is no part of the sample"
    assert complaint in refused(path, tmp_path / "out", *ALL)
    with pytest.raises(Exception, match="skipped"):
        delivered(path)
    assert complaint in caplog.text
    said = {"metadata": {"image": "a.png"}, "stats": {"image": 1}, "sources": [{"name": "a.png"}]}
    assert len(delivered(written(tmp_path, [{**row, **said}], "said.jsonl"))) == 1


@pytest.mark.parametrize("said", [{"crop": [0, 0, 9, 9]}, {"bbox": [0, 0, 9, 9]}, {"page": 2}, {"caption": "a cat"}])
def test_what_an_object_of_a_file_says_of_it_is_not_lost(said: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(1, "PNG"))
    file = {"path": "a.png", **said}
    part = {"role": "user", "content": [{"type": "image", "image": file}, {"type": "text", "text": "What?"}]}
    for name, row in {"list": talk(images=[file]), "part": {"messages": [part, ANSWER]}}.items():
        message = refused(written(tmp_path, [row], f"{name}.jsonl"), tmp_path / "out", *ALL)
        assert f"`images`: {next(iter(said))} of a file would be lost: write it beside `images`." in message
    file |= {**dict.fromkeys(said), "id": 1, "width": 16}
    convert(written(tmp_path, [talk(images=[file])], "known.jsonl"), tmp_path / "known", *ALL)
    assert len(delivered(tmp_path / "known")[0].images) == 1


def test_files_beside_named_images_of_a_list_that_is_not_converted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"question": "What?", "answer": "x", "image": "a.png"}
    written(tmp_path, [{**asked, "reference_image": "b.png"}, {**asked, "image_path": "images/a.png"}])
    mix = tmp_path / "mix.yaml"
    leaf = {"path": "./rows.jsonl", "aux": {"images": f"filesystem://{tmp_path}"}}
    mix.write_text(
        json.dumps({"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": leaf}})
    )
    samples = delivered(mix)
    assert {tuple(image.shape[-2:] for image in one.images) for one in samples} == {((16, 16),)}
    assert {one.__restore_key__ for one in samples} == {samples[1].__restore_key__}  # another in place of the first
    assert "`reference_image` has a file that would not be seen" in caplog.text


def test_numbered_images_beside_a_list_of_images_are_refused(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "<image>What?"}, ANSWER], "image": "a.png", "image_2": "b.png"}
    path = written(tmp_path, [row])
    assert "`image_2` has a file that would not be seen" in refused(path, tmp_path / "out", *ALL)
    convert(path, tmp_path / "out", *ALL, "--ignore", "image_2")
    assert [len(one.images) for one in delivered(tmp_path / "out")] == [1]


@pytest.mark.parametrize("column", ["solution_image", "answer_image", "target_img"])
@pytest.mark.parametrize("beside", [{}, {"image": "a.png"}])
def test_pictures_of_answers_are_not_shown_with_the_question(
    column: str, beside: dict[str, str], tmp_path: Path
) -> None:
    path = written(tmp_path, [{**beside, column: "b.png", "question": "What?", "answer": "x"}])
    said = f"the file in `{column}` seems to belong to the answer, and the question would show it"
    assert said in refused(path, tmp_path / "out", *ALL)
    convert(path, tmp_path / "out", *ALL, "--ignore", column)
    (sample,) = delivered(tmp_path / "out")
    assert not beside or sample.image.shape[-2:] == (16, 16)  # of a.png


@pytest.mark.parametrize("column", ["mask", "thumbnail", "depth_map"])
def test_pictures_that_a_question_may_not_be_about(column: str, tmp_path: Path) -> None:
    """Masks are drawn from the image."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    asked = {"question": "What?", "answer": "x"}
    path = written(tmp_path, [{"image": "a.png", column: "b.png", **asked}])
    table = tmp_path / "table.parquet"
    pictures = {"image": {"bytes": picture(0), "path": "0.jpg"}, column: {"bytes": picture(1), "path": "1.jpg"}}
    parquet.write_table(arrow.Table.from_pylist([{**pictures, **asked}]), table)
    said = f"images in the columns image, {column}, and would be shown all of them"
    assert said in refused(path, tmp_path / "out", *ALL)
    with pytest.raises(SourceError, match=said):
        delivered(table)
    convert(path, tmp_path / "out", *ALL, "--ignore", column)
    (sample,) = delivered(tmp_path / "out")
    assert sample.image.shape[-2:] == (16, 16)  # of a.png, not the 17 rows of b.png
    alone = {column: "b.png", **asked}
    convert(written(tmp_path, [alone]), tmp_path / "alone", *ALL)
    assert len(delivered(tmp_path / "alone")) == 1


def test_frames_in_a_column_of_videos_are_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    frames = [{"bytes": picture(number), "path": None} for number in range(2)]
    row = {"video": frames, "question": "What?", "answer": "x"}
    parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    assert "`video` is images" in refused(tmp_path / "rows.parquet", tmp_path / "out", *ALL)
    with pytest.raises(SourceError, match="`video` is images, which would be shown as such"):
        delivered(tmp_path / "rows.parquet")


def test_choices_that_are_pictures_stand_on_lines_of_their_own(tmp_path: Path) -> None:
    """MMMU: the line break behind a picture belongs to it, the one between two choices does not."""
    names = ["a.png", "b.png"]
    row = {"question": "Which?", "options": "['<image 1>', '<image 2>']", "answer": "B", "images": names}
    convert(written(tmp_path, [row]), tmp_path / "out", *ALL)
    (sample,) = delivered(tmp_path / "out")
    turns = in_parts(read_conversation(sample)).turns
    shown = "".join(part.text if part.kind == "text" else "IMAGE" for part in turns[0].parts)
    assert shown.startswith("Which?\nA. IMAGE\nB. IMAGE\nAnswer with")


def test_masks_in_tars_are_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As datasets of segmentation name them: `0.jpg`, `0.mask.png`, and here the turns in `0.json`."""
    for number, name in enumerate(("whole", "told")):
        content = {**talk(), "images": ["jpg"]} if name == "told" else talk()
        parts = [("0.jpg", picture(0)), ("0.mask.png", picture(1, "PNG")), ("0.json", json.dumps(content).encode())]
        write_tar(tmp_path / f"{number}" / "a.tar", parts)
        output_of("prepare", tmp_path / f"{number}", *ALL, "--sample-type", "CrudeWebdataset")
    with pytest.raises(Exception, match="skipped"):
        delivered(tmp_path / "0")
    assert "the sample has the images jpg, mask.png, and all of them would be shown" in caplog.text
    (sample,) = delivered(tmp_path / "1")
    assert [image.shape[-2:] for image in sample.images] == [(16, 16)]


@pytest.mark.parametrize("order", [1, -1])
def test_pictures_of_a_tar_are_shown_in_their_order_or_not_at_all(
    order: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the parts stand in the order of the alphabet, as webdataset writes them."""
    asked = talk()
    for number, content in enumerate((asked, {**asked, "images": ["before.jpg", "after.jpg"]})):
        pictures = [("0.before.jpg", picture(0)), ("0.after.jpg", picture(1))][::order]
        parts = [*pictures, ("0.json", json.dumps(content).encode())]
        write_tar(tmp_path / f"{number}" / "a.tar", parts)
        output_of("prepare", tmp_path / f"{number}", *ALL, "--sample-type", "CrudeWebdataset")
    with pytest.raises(Exception, match="skipped"):
        delivered(tmp_path / "0")
    assert "in the order of their names, after.jpg, before.jpg: list them" in caplog.text
    (sample,) = delivered(tmp_path / "1")
    assert [image.shape[1] for image in sample.images] == [16, 17]


def test_files_beside_turns_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pictures = {name: {"bytes": picture(0), "path": "0.jpg"} for name in ("image", "mask")}
    parquet.write_table(arrow.Table.from_pylist([talk(**pictures)]), tmp_path / "rows.parquet")
    assert "`mask` has bytes" in refused(tmp_path / "rows.parquet", tmp_path / "out", *ALL)
    with pytest.raises(Exception, match="skipped"):
        delivered(tmp_path / "rows.parquet")
    assert "`mask` has bytes" in caplog.text
    convert(tmp_path / "rows.parquet", tmp_path / "out", *ALL, "--ignore", "mask")
    assert [len(one.images) for one in delivered(tmp_path / "out")] == [1]


def test_captions_that_are_json_of_questions_are_refused(tmp_path: Path) -> None:
    """RLHF-V's column `text` has the question, the chosen answer and the rejected one."""
    texts = [{"question": "What?", "chosen": "x", "rejected": "y"}, {"messages": talk()["messages"]}]
    for text in texts:
        for beside in ({"image": "a.png"}, {}):
            path = written(tmp_path, [{**beside, "text": json.dumps(text)}])
            assert f"`text` is JSON with {', '.join(text)}" in refused(path, tmp_path / "out", *ALL)
    menu = json.dumps({"menu": [{"name": "Tea", "price": "3"}]})
    convert(written(tmp_path, [{"image": "a.png", "text": menu}]), tmp_path / "out", *ALL)
    assert [one.caption for one in delivered(tmp_path / "out")] == [menu]


def test_choices_do_not_hide_that_a_video_is_missing(tmp_path: Path) -> None:
    """Video-MME, whose answers are letters, so that question and answer are made into turns."""
    asked = {"question": "What?", "options": ["A. tea", "B. milk"], "answer": "A"}
    path = written(tmp_path, [{"video_id": f"00{number}", **asked} for number in range(3)])
    assert "`video_id` ('000') seems to name what the question is about" in refused(path, tmp_path / "out", *ALL)


def test_names_of_videos_that_are_not_there_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """TVQA names its clips without an extension."""
    row = {"question": "Who talks?", "a0": "Ann", "a1": "Bo", "answer_idx": 0, "vid_name": "s01e01_seg02", "ts": "1-2"}
    path = written(tmp_path, [row])
    said = "`vid_name` ('s01e01_seg02') seems to name what the question is about"
    assert said in refused(path, tmp_path / "out", *ALL)
    with pytest.raises(Exception, match="skipped"):
        delivered(path)
    assert said in caplog.text
    convert(path, tmp_path / "out", *ALL, "--ignore", "vid_name", "--ignore", "ts")


FOLDERS: list[tuple[str, str, str]] = [
    ("images", "masks", "images and masks"),
    ("JPEGImages", "SegmentationClass", "JPEGImages and SegmentationClass"),
    ("input", "target", "input and target"),
    ("rgb", "depth", "depth and rgb"),
    ("left", "noisy", "noisy"),
]


@pytest.mark.parametrize(("first", "second", "named"), FOLDERS)
def test_folders_of_images_and_what_was_drawn_from_them_are_no_classes(
    first: str, second: str, named: str, tmp_path: Path
) -> None:
    write_pictures(tmp_path / "in", [f"{folder}/{n}.png" for folder in (first, second) for n in range(3)])
    told = refused(tmp_path / "in", tmp_path / "out", *ALL)
    assert f"{named} seem to be no classes" in told
    for kind in ("classes", "pairs"):
        convert(tmp_path / "in", tmp_path / kind, *ALL, "--kind", kind)
        assert len(delivered(tmp_path / kind)) == 6


def test_classes_may_have_names_of_kinds_of_files(tmp_path: Path) -> None:
    """Faces with and without a mask, whose files have names of their own."""
    write_pictures(tmp_path / "in", [f"{folder}/{folder}{n}.png" for folder in ("mask", "no_mask") for n in range(3)])
    convert(tmp_path / "in", tmp_path / "out", *ALL)
    assert {one.label_name for one in delivered(tmp_path / "out")} == {"mask", "no_mask"}


def test_options_of_parts_beside_a_question_are_said_to_be_unused(tmp_path: Path) -> None:
    path = written(tmp_path, [{"image": "a.png", "question": "What?", "answer": "x", "system": "s", "fps": 2}])
    assert "not used: fps" in convert(path, tmp_path / "out", *ALL)
    path = written(tmp_path, [talk(label=3, objects=[])])
    assert "not used: label" in convert(path, tmp_path / "others", *ALL)


def test_answers_that_are_numbers_of_classes_are_their_names(tmp_path: Path) -> None:
    """A ClassLabel of the `datasets` library, whose int2str gives these."""
    arrow = pytest.importorskip("pyarrow")
    names = ["no", "yes"]
    features = {"info": {"features": {"answer": {"_type": "ClassLabel", "names": names}}}}
    rows = arrow.Table.from_pylist(
        [{"image": {"bytes": picture(0), "path": "0.jpg"}, "question": "Is it?", "answer": at} for at in (1, 0, 1)]
    ).replace_schema_metadata({"huggingface": json.dumps(features)})
    pytest.importorskip("pyarrow.parquet").write_table(rows, tmp_path / "rows.parquet")
    for path in (tmp_path / "rows.parquet", converted(tmp_path / "rows.parquet", tmp_path / "out", *ALL)):
        assert [one.answers for one in delivered(path)] == [["yes"], ["no"], ["yes"]]


YES_NO = {"_type": "ClassLabel", "names": ["no", "yes"]}
ASKED = "Answer with the option's letter from the given choices directly."
OF_CLASSES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "pair": ({"prompt": "Is it?", "response": 1}, {"response": YES_NO}, ["Is it?", "yes"]),
    "choices": (
        {"question": "Is it?", "choices": [0, 1], "answer": "yes"},
        {"choices": {"_type": "List", "feature": YES_NO}},
        [f"Is it?\nA. no\nB. yes\n{ASKED}", "B"],
    ),
    "letters": (
        {"question": "Is it?", "A": 1, "B": 0, "answer": "B"},
        {"A": YES_NO, "B": YES_NO},
        [f"Is it?\nA. yes\nB. no\n{ASKED}", "B"],
    ),
    "context": ({"question": "Is it?", "hint": 1, "answer": "so"}, {"hint": YES_NO}, ["yes\nIs it?", "so"]),
    "list of pairs": (
        {"qa": [{"question": "Is it?", "answer": 1}, {"question": "Now?", "answer": 0}]},
        {"qa": [{"question": {"_type": "Value", "dtype": "string"}, "answer": YES_NO}]},
        ["Is it?", "yes", "Now?", "no"],
    ),
    "pair of lists": (
        {"qas": {"question": ["Is it?", "Now?"], "answer": [1, 0]}},
        {"qas": {"_type": "Sequence", "feature": {"question": None, "answer": YES_NO}}},
        ["Is it?", "yes", "Now?", "no"],
    ),
    "roles": (
        {"messages": [{"role": 1, "content": "Is it?"}, {"role": 0, "content": "yes"}]},
        {"messages": {"_type": "List", "feature": {"role": {**YES_NO, "names": ["assistant", "user"]}}}},
        ["Is it?", "yes"],
    ),
    "answers": (
        {"question": "Is it?", "answers": [1]},
        {"answers": {"_type": "List", "feature": YES_NO}},
        ["Is it?", "yes"],
    ),
}


@pytest.mark.parametrize("form", OF_CLASSES)
def test_numbers_of_classes_in_texts_are_their_names(form: str, tmp_path: Path) -> None:
    """A ClassLabel of the `datasets` library, whose int2str gives these."""
    arrow = pytest.importorskip("pyarrow")
    row, features, said = OF_CLASSES[form]
    meta = {"huggingface": json.dumps({"info": {"features": features}})}
    rows = arrow.Table.from_pylist([row] * 3).replace_schema_metadata(meta)
    pytest.importorskip("pyarrow.parquet").write_table(rows, tmp_path / "rows.parquet")
    for path in (tmp_path / "rows.parquet", converted(tmp_path / "rows.parquet", tmp_path / "out", *ALL)):
        assert [[turn["content"] for turn in one.messages] for one in delivered(path)] == [said] * 3


def test_names_of_classes_are_captions_and_fill_templates(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    meta = {"huggingface": json.dumps({"info": {"features": {"caption": YES_NO, "topic": YES_NO}}})}
    image = {"bytes": picture(0), "path": None}
    rows = arrow.Table.from_pylist([{"image": image, "caption": at, "topic": 1 - at} for at in (1, 0)])
    path = tmp_path / "rows.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(rows.replace_schema_metadata(meta), path)
    for source in (path, converted(path, tmp_path / "out", *ALL, "--ignore", "topic")):
        assert [one.caption for one in delivered(source)] == ["yes", "no"]
    filled = converted(path, tmp_path / "filled", *ALL, "--field", "caption={topic}: {caption}")
    assert [one.caption for one in delivered(filled)] == ["no: yes", "yes: no"]


def test_answers_that_are_numbers_become_texts_on_request(tmp_path: Path) -> None:
    write_pictures(tmp_path, ["0.jpg"])
    path = written(tmp_path, [{"image": "0.jpg", "question": "How many?", "answer": 3}])
    assert "--field 'answers={answer}' makes a text of it" in refused(path, tmp_path / "out", *ALL)
    out = converted(path, tmp_path / "out", *ALL, "--field", "answers={answer}")
    assert [one.answers for one in delivered(out)] == [["3"]]


def test_questions_without_answers_are_named(tmp_path: Path) -> None:
    """As of ScreenSpot, whose answers are boxes."""
    write_pictures(tmp_path, ["0.jpg"])
    path = written(tmp_path, [{"image": "0.jpg", "instruction": "close it", "bbox": [1, 2, 3, 4]}])
    assert "no column seems to have the answers, which training needs" in convert(path, tmp_path / "out", *ALL)
