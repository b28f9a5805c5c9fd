"""What conversations do not use, in what order media of several columns are shown, and texts that may be mistakes: said
by `energon convert`, by direct reading, and by `energon lint`; never in silence.
"""

from __future__ import annotations

import html
import json
import shlex
import tarfile
from pathlib import Path
from typing import Any

import pytest
from commands import answer, energon, output_of
from delivered import delivered
from sources import convert, picture, refused, write_pictures

ALL = ("--split-ratio", "1,0,0")
ASKED = {"role": "user", "content": "Who wrote it?"}
SAID = {"role": "assistant", "content": "Mann, in Munich."}
TALK = {"messages": [ASKED, SAID]}
PAIR = {"question": "Who wrote it?", "answer": "Mann, in Munich."}
UNUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a persona": ({**TALK, "persona": "You like cats."}, "persona"),
    "a prompt of the system by no known name": ({**TALK, "system_prompt_text": "Be kind."}, "system_prompt_text"),
    "a second one": ({**TALK, "system": "Be kind.", "system_prompt": "Be brief."}, "system_prompt"),
    "turns in another language": ({**TALK, "messages_de": [{"role": "user", "content": "Wer?"}]}, "messages_de"),
    "codes": ({**TALK, "audio_codes": [1, 5]}, "audio_codes"),
    "a translation": ({**TALK, "translation": "Guten Tag."}, "translation"),
    "knowledge": ({**TALK, "knowledge": "The Magic Mountain is of 1924."}, "knowledge"),
    "what was retrieved": ({**TALK, "ctxs": [{"text": "The Magic Mountain is of 1924."}]}, "ctxs"),
    "texts": ({**TALK, "texts": ["The Magic Mountain is of 1924."]}, "texts"),
    "a long caption": ({**TALK, "caption": "A man who writes at a desk"}, "caption"),
    "an answer": ({**TALK, "answer": "Hesse"}, "answer"),
    "tokens": ({**PAIR, "answer_speech_tokens": [1, 2, 3]}, "answer_speech_tokens"),
    "a flag": ({**PAIR, "hidden": True}, "hidden"),
    "an explanation": ({**PAIR, "explanation": "Because he said so later."}, "explanation"),
    "other answers": ({**PAIR, "answers": ["Mann", "Hesse"]}, "answers"),
    "of one pair in a list": ({"qas": [{**PAIR, "explanation": "Because he said so."}]}, "explanation (of pairs)"),
}
USED: dict[str, dict[str, Any]] = {
    "metadata": {
        **TALK,
        "id": "a",
        "source": "web",
        "language": "en",
        "score": 3,
        "num_tokens": 9,
        "width": 16,
        "split": "train",
    },
    "what a turn says": {**TALK, "prompt": "Who wrote it?"},
    "a context": {**PAIR, "context": "The Magic Mountain is of 1924."},
    "choices": {**PAIR, "options": ["Mann, in Munich.", "Hesse"]},
    "pairs": {"qas": [{**PAIR, "id": 3}], "context": "The Magic Mountain is of 1924."},
    "tools and a system prompt": {**TALK, "system": "Be kind.", "tools": [{"name": "f", "parameters": {}}]},
    "nothing": {**TALK, "persona": None, "knowledge": "", "ctxs": []},
}


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("form", UNUSED)
def test_unused_columns_are_named_by_both_doors(form: str, tmp_path: Path, caplog: Any) -> None:
    row, name = UNUSED[form]
    path = written(tmp_path, [row] * 3)
    assert len(delivered(path)) == 3
    (warning,) = [one for one in caplog.messages if "do not use" in one]  # once, for all samples
    assert warning.startswith(f"{path}: conversations do not use {name}. To have")
    bare = name.removesuffix(" (of pairs)")
    assert f"  not used{', of pairs' * (bare != name)}: {bare}\n" in convert(path, tmp_path / "out", *ALL)


@pytest.mark.parametrize("form", USED)
def test_what_is_used_or_known_is_not_named(form: str, tmp_path: Path, caplog: Any) -> None:
    assert len(delivered(written(tmp_path, [USED[form]] * 2))) == 2
    assert not [one for one in caplog.messages if "do not use" in one]


def test_a_column_that_is_filled_later_is_named_then(tmp_path: Path, caplog: Any) -> None:
    delivered(written(tmp_path, [TALK, {**TALK, "persona": ""}, {**TALK, "persona": "You like cats."}]))
    assert sum("do not use persona" in one for one in caplog.messages) == 1


def test_convert_names_keys_of_turns_that_only_templates_may_use(tmp_path: Path) -> None:
    turns = [{**ASKED, "documents": ["A"]}, {**SAID, "loss_type": "none", "weight": 1, "name": "bot", "note": None}]
    told = convert(written(tmp_path, [{"messages": turns}]), tmp_path / "out", *ALL)
    assert "  for chat templates only, of turns: documents, loss_type\n" in told


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("wt", 0, "no answer to learn"), ("prefix", True, "prefix=True"), ("partial", True, "partial=True")],
)
def test_answers_that_are_none_to_be_learned(key: str, value: Any, words: str, tmp_path: Path) -> None:
    assert words in refused(written(tmp_path, [{"messages": [ASKED, {**SAID, key: value}]}]), tmp_path / "out", *ALL)


def test_a_unit_is_asked_for_as_its_message_says(tmp_path: Path) -> None:
    path = written(tmp_path, [{"question": "How long?", "answer": "5", "unit": "cm"}])
    _, _, remedy = refused(path, tmp_path / "out", *ALL).partition("--question ")
    convert(path, tmp_path / "out", *ALL, "--question", shlex.split(remedy)[0].rstrip("."))
    (sample,) = delivered(tmp_path / "out")
    assert [turn["content"] for turn in sample.messages] == ["How long? (in cm)", "5"]


# Order ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "is_said"),
    [
        (("image", "reference"), True),
        (("cam_front", "cam_left"), True),
        (("content", "style"), True),
        (("image_1", "image_2"), False),
    ],
)
def test_the_order_of_images_in_columns_is_said(
    columns: tuple[str, str], is_said: bool, tmp_path: Path, caplog: Any
) -> None:
    write_pictures(tmp_path, ["a.png", "b.png"])
    row = {**PAIR, columns[0]: "a.png", columns[1]: "b.png"}
    told = convert(written(tmp_path, [row] * 2), tmp_path / "out", *ALL)
    assert (f"  images in the order {', '.join(columns)} (for another, " in told) is is_said
    for sample in delivered(tmp_path / "out"):
        assert [image.shape[-2] for image in sample.images] == [16, 17]  # rows of a.png and b.png
    parts = ", ".join(f"{name}.png" for name in columns)
    said = [one for one in caplog.messages if "shown in this order" in one]
    assert [one.startswith(f"{tmp_path / 'out'}: a question has the images of {parts}, ") for one in said] == (
        [True] * is_said
    )


# Texts ----------------------------------------------------------------------------------------------------------------


def answered(*answers: str, image: bool) -> list[dict[str, Any]]:
    beside = {"image": "a.png"} if image else {}
    return [{"question": f"Who wrote {n}?", "answer": answer, **beside} for n, answer in enumerate(answers)]


@pytest.mark.parametrize("image", [False, True])
def test_missing_values_and_entities_are_counted(image: bool, tmp_path: Path) -> None:
    """Of conversations and of a VQASample; `none` and a bare & are words."""
    write_pictures(tmp_path, ["a.png"])
    escaped = html.escape('Mann & "Sons"')
    assert escaped == "Mann &amp; &quot;Sons&quot;"
    rows = answered("Mann", "N/A", " None", "nan", "none", escaped, "A & B; &c", "a null b", image=image)
    path = written(tmp_path, rows)
    told = convert(path, tmp_path / "out", *ALL)
    key = " (key 000000001)" * image
    assert "3 samples with an answer that may be a missing value (N/A, None, null, nan), learned as it st" in told
    assert f":\n  {path}, line 2{key}\n" in told
    assert "1 sample with entities or tags of HTML in a text (&amp;, <br>)" in told
    linted = energon("lint", tmp_path / "out").output
    assert "3 samples with an answer that may be a missing value" in linted
    assert "1 sample with entities or tags of HTML in a text (&amp;, <br>): train/" in linted
    if not image:
        assert "3 samples with an answer that may be a missing value" in energon("lint", path).output
        assert delivered(path)[5].messages[1]["content"] == escaped  # no text is changed


def test_entities_in_questions_count_and_missing_values_there_do_not(tmp_path: Path) -> None:
    rows = [{"question": "None", "answer": "a"}, {"question": "A &lt; B?", "answer": "yes"}]
    told = convert(written(tmp_path, rows), tmp_path / "out", *ALL)
    assert "missing value" not in told
    assert "1 sample with entities or tags of HTML" in told


@pytest.mark.parametrize(
    ("text", "is_counted"),
    [
        ("<p>A dog</p><box>[[1, 2, 3, 4]]</box>", False),  # as InternVL writes places
        ("a <b and b> c", False),
        ("```html\n<b>bold</b>\n```", False),
        ("<table><tr><td><b>1</b></td></tr></table>", False),
        ("A <b>red</b> bag", True),
        ("soft<br/>warm", True),
        ('see <a href="https://example.org">this</a>', True),
        ('<span class="x">size</span>', True),
    ],
)
@pytest.mark.parametrize("image", [False, True])
def test_tags_of_html_are_counted_where_no_page_is_meant(
    text: str, is_counted: bool, image: bool, tmp_path: Path
) -> None:
    write_pictures(tmp_path, ["a.png"])
    told = convert(written(tmp_path, answered("Mann", text, image=image)), tmp_path / "out", *ALL)
    assert ("1 sample with entities or tags of HTML" in told) is is_counted


def test_counts_are_those_of_shards_that_were_made_before(tmp_path: Path) -> None:
    path = written(tmp_path, answered("Mann", "N/A", image=False))
    first = answer("convert", path, tmp_path / "out", *ALL, "--no-progress")
    again = answer("convert", path, tmp_path / "out", *ALL, "--no-progress")
    assert again["num_reused"] == 1
    assert first["missing"] == again["missing"] == [f"{path}, line 2"]
    assert first["empty"] == first["escaped"] == []


def test_a_prompt_that_all_rows_share_is_the_question(tmp_path: Path) -> None:
    write_pictures(tmp_path, ["a.png"])
    rows = [{"image": "a.png", "prompt": "Read it.", "markdown": f"# The {n}th of some titles"} for n in range(5)]
    told = convert(written(tmp_path, rows), tmp_path / "out", *ALL)
    assert "  context from prompt\n  answers from markdown\n" in told


def test_a_table_names_what_its_type_has_no_field_for(tmp_path: Path, caplog: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": picture(n, "PNG"), "path": f"{n}.png"} for n in range(3)]
    columns = {"image": images, "caption": [f"red {n}" for n in range(3)], "taken_by": ["A", "B", "C"], "id": [1, 2, 3]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    assert len(delivered(tmp_path / "x.parquet")) == 3
    said = [one for one in caplog.messages if "does not use" in one]
    assert ["a CaptioningSample does not use taken_by: for other fields" in one for one in said] == [True]


@pytest.mark.parametrize("workers", [0, 3])
def test_tars_name_what_their_json_has(workers: int, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "tars").mkdir()
    (tmp_path / "a.json").write_text(json.dumps({**TALK, "persona": "You like cats."}))
    with tarfile.open(tmp_path / "tars/s.tar", "w") as archive:
        for number in range(12):
            archive.add(tmp_path / "a.json", f"{number}.json")
    output_of("prepare", tmp_path / "tars", *ALL, "--sample-type", "CrudeSample", "--no-progress")
    assert len(delivered(tmp_path / "tars", num_workers=workers)) == 12
    assert sum(f"{tmp_path / 'tars'}: conversations do not use persona" in one for one in caplog.messages) == 1


def test_keys_of_later_pairs_are_seen(tmp_path: Path, caplog: Any) -> None:
    rows = [{"qas": [PAIR]}, {"qas": [{**PAIR, "explanation": None}]}]
    later = {"qas": [PAIR, {**PAIR, "explanation": "Because he said so."}]}
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars/s.tar", "w") as archive:
        for number, row in enumerate([*rows, later, later]):
            (tmp_path / "a.json").write_text(json.dumps(row))
            archive.add(tmp_path / "a.json", f"{number}.json")
    output_of("prepare", tmp_path / "tars", *ALL, "--sample-type", "CrudeSample", "--no-progress")
    assert len(delivered(tmp_path / "tars")) == 4
    assert sum("do not use explanation (of pairs)" in one for one in caplog.messages) == 1


def test_a_box_is_named_once(tmp_path: Path, caplog: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    image = {"bytes": picture(0, "PNG"), "path": None}
    rows = pyarrow.Table.from_pylist([{**TALK, "image": image, "bbox": [10, 20, 30, 40]}] * 2)
    pytest.importorskip("pyarrow.parquet").write_table(rows, tmp_path / "x.parquet")
    assert len(delivered(tmp_path / "x.parquet")) == 2
    assert ["a place in its image (10, 20, 30, 40)" in one for one in caplog.messages if "bbox" in one] == [True]


def test_the_number_of_a_choice_is_used(tmp_path: Path, caplog: Any) -> None:
    """By the turns that convert writes beside it (ScienceQA)."""
    rows = [{"question": "Who?", "choices": ["Mann", "Hesse"], "answer": at, "solution": "It is so."} for at in (0, 1)]
    out = tmp_path / "out"
    convert(written(tmp_path, rows), out, *ALL)
    assert [one.messages[1]["content"] for one in delivered(out)] == ["A", "B"]
    assert [f"{out}: conversations do not use solution. " in one for one in caplog.messages if "not use" in one] == [
        True
    ]
