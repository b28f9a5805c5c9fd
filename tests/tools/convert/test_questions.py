"""What stands beside a question is learned with it, as the code that evaluates these sets writes it, or refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import output_of, refusal_of
from sources import converted, members, meta, refused, write_pictures

pytest.importorskip("transformers")

from energon_bridge import TaskEncoder, WorkerConfig, get_loader, get_val_dataset
from energon_bridge.core.encoder.decoder import SampleDecoder
from energon_bridge.core.errors import EmptyDatasetError, SampleError, SourceError
from energon_bridge.models.conversations.conversation import read_conversation
from energon_bridge.models.conversations.cooker import COOKERS, cook_conversation
from energon_bridge.models.conversations.layout import MultiModalSampleConfig
from energon_bridge.models.conversations.sample_encoders import encode_vqa

LETTER = "Answer with the option's letter from the given choices directly."


def llava_mmbench(question: str, options: Sequence[str], hint: str | None = None) -> str:
    """Return the prompt of LLaVA's `model_vqa_mmbench.py` (with --single-pred-prompt)."""
    if hint is not None:
        question = hint + "\n" + question
    for option_char, option in zip("ABCDE", options, strict=False):
        question = question + "\n" + option_char + ". " + option
    return question + "\n" + LETTER


def listed(folder: Path, entries: Sequence[Mapping[str, Any]], name: str = "list.json") -> Path:
    write_pictures(folder, ["a.png", "b.png"])
    path = folder / name
    path.write_text(json.dumps(entries) if name.endswith(".json") else "\n".join(map(json.dumps, entries)))
    return path


class Read(TaskEncoder[Any, Any, Any, Any]):
    """Delivers the texts of conversations."""

    decoder = SampleDecoder()
    cookers = COOKERS

    def encode_sample(self, sample: Any) -> Any:
        return sample

    def batch(self, samples: Any) -> Any:
        return [[turn.text for turn in read_conversation(sample).turns] for sample in samples]


def learned(path: Path) -> list[list[str]]:
    workers = WorkerConfig(num_workers=0)
    dataset = get_val_dataset(path, split_part="train", batch_size=1, worker_config=workers, task_encoder=Read())
    return [texts for batch in get_loader(dataset) for texts in batch]


QA = ["p", "q", "r", "s"]
SETS: dict[str, tuple[list[dict[str, Any]], list[list[str]]]] = {
    "dolly": (
        [{"instruction": "When?", "context": "It opened in 1999.", "response": "In 1999.", "category": "closed_qa"}],
        [["When?\nIt opened in 1999.", "In 1999."]],
    ),
    "RACE": (
        [{"example_id": "h1.txt", "article": "Tom is five.", "question": "How old?", "options": QA, "answer": "B"}],
        [[llava_mmbench("How old?", QA, "Tom is five."), "B"]],
    ),
    "MMBench": (
        [
            {
                **{"index": 1, "image": "a.png", "question": "Which?", "hint": "Look.", "A": "p", "B": "q", "C": None},
                **{"D": None, "answer": "A", "category": "a b", "l2-category": "c", "source": "s", "split": "dev"},
            }
        ],
        [[llava_mmbench("Which?", QA[:2], "Look."), "A"]],
    ),
    "OmniMedVQA": (
        [
            {
                **{"image_path": "a.png", "question": "Which?", "gt_answer": "q", "question_type": "Modality"},
                **{f"option_{letter}": text for letter, text in zip("ABCD", QA, strict=True)},
            }
        ],
        [[llava_mmbench("Which?", QA), "B"]],
    ),
    "AI2D": (
        [{"image": "a.png", "question": "Which?", "options": QA, "answer": answer} for answer in ("0", "2")],
        [[llava_mmbench("Which?", QA), answer] for answer in "AC"],
    ),
    "ScienceQA": (
        [
            {
                **{"image": "a.png", "question": "Which?", "hint": "Look.", "choices": QA, "answer": 0, "task": "x"},
                **{
                    "grade": "grade2",
                    "skill": "Identify the x in y",
                    "lecture": "",
                    "solution": "It is long and so on.",
                },
            }
        ],
        [[llava_mmbench("Which?", QA, "Look."), "A"]],
    ),
    "ARC": (
        [
            {"id": "a", "question": "Why?", "choices": {"text": QA, "label": list("ABCD")}, "answerKey": "D"},
            {"id": "b", "question": "Why?", "choices": {"text": QA, "label": list("1234")}, "answerKey": "2"},
        ],
        [[llava_mmbench("Why?", QA), "D"], [llava_mmbench("Why?", QA), "B"]],
    ),
    "OpenBookQA": (
        [{"question_stem": "Why?", "choices": {"text": QA, "label": list("ABCD")}, "answerKey": "D", "fact1": "So."}],
        [[llava_mmbench("Why?", QA, "So."), "D"]],
    ),
    "MedQA": (
        [{"question": "Why?", "options": dict(zip("ABCD", QA, strict=True)), "answer": "r", "answer_idx": "C"}],
        [[llava_mmbench("Why?", QA), "C"]],
    ),
    "MedMCQA": (
        [{"question": "Why?", "opa": "p", "opb": "q", "opc": "r", "opd": "s", "cop": cop} for cop in (3, 0)],
        [[llava_mmbench("Why?", QA), "D"], [llava_mmbench("Why?", QA), "A"]],
    ),
    "MMMU": (
        [{"question": "Why?", "options": "['p', \"q\"]", "image_1": "a.png", "answer": "B", "subfield": "x"}],
        [[llava_mmbench("Why?", QA[:2]), "B"]],
    ),
    "HellaSwag": (
        [{"ctx": "He sits.", "endings": QA, "label": "0", "activity_label": "Roofs", "source_id": "a b", "ind": 3}],
        [[llava_mmbench("He sits.", QA), "A"]],
    ),
    "SQuAD": (
        [
            {
                "title": "A",
                "context": "A long text.",
                "question": "Who?",
                "answers": {"text": ["I"], "answer_start": [0]},
            }
        ],
        [["A long text.\nWho?", "I"]],
    ),
    "columns of choices, the answer by the name of one": (
        [{"question": "Why?", "option_a": "p", "option_b": "q", "answer": "option_b"}],
        [[llava_mmbench("Why?", QA[:2]), "B"]],
    ),
    "answers with their texts": (
        [{"question": "Why?", "choices": QA, "answer": answer} for answer in ("(B) q", "c", "D. s", "p", "B.")],
        [[llava_mmbench("Why?", QA), answer] for answer in "BCDAB"],
    ),
    "an answer in words of its own": (
        [{"question": "Why?", "choices": ["red", "blue"], "answer": "It is blue, since it is night."}],
        [["Why?\nA. red\nB. blue", "It is blue, since it is night."]],
    ),
    "numbers from 1, as the last row shows": (
        [{"question": "Why?", "choices": QA, "answer": answer} for answer in (1, 2, 4)],
        [[llava_mmbench("Why?", QA), answer] for answer in "ABD"],
    ),
    "choices that are numbers": (
        [{"question": "Why?", "choices": ["12", "11", "10"], "answer": answer} for answer in ("12", "10")],
        [[llava_mmbench("Why?", ["12", "11", "10"]), answer] for answer in "AC"],
    ),
    "choices that are in the question": (
        [{"question": "Why?\nA. p\nB. q", "choices": QA[:2], "answer": "B"}],
        [["Why?\nA. p\nB. q\n" + LETTER, "B"]],
    ),
    "a row of all": (
        [
            {
                "instruction": "Say hi to me now",
                "input": "",
                "output": "hi you",
                "text": "### Say hi to me now\n### hi you",
            }
        ],
        [["Say hi to me now", "hi you"]],
    ),
}
ONE_ROW_SAYS_IT = ("RACE", "dolly", "ARC", "OpenBookQA", "MedQA", "SQuAD", "answers with their texts")


@pytest.mark.parametrize("name", SETS)
def test_what_belongs_to_a_question_is_learned_with_it(tmp_path: Path, name: str) -> None:
    entries, expected = SETS[name]
    assert learned(converted(listed(tmp_path, entries), tmp_path / "out", "--split-ratio", "1,0,0")) == expected


@pytest.mark.parametrize("name", [name for name in SETS if "image" not in str(SETS[name]) and name != "MedQA"])
def test_tables_that_are_read_without_converting_are_learned_alike(tmp_path: Path, name: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    entries, expected = SETS[name]
    parquet.write_table(arrow.Table.from_pylist(entries), tmp_path / "rows.parquet")
    assert learned(tmp_path / "rows.parquet") == expected


@pytest.mark.parametrize("name", ONE_ROW_SAYS_IT)
def test_lines_that_are_read_without_converting_are_learned_alike(tmp_path: Path, name: str) -> None:
    entries, expected = SETS[name]
    assert learned(listed(tmp_path, entries, "rows.jsonl")) == expected


def test_whether_numbers_count_from_0_or_1_is_not_guessed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = [{"question": "Why?", "choices": QA, "answer": 1}]
    source = listed(tmp_path, entries)
    message = refused(source, tmp_path / "out")
    assert "it may mean p or q" in message
    assert "--answers-as index" in message
    for given, letter in (("index", "B"), ("number", "A")):
        out = converted(source, tmp_path / given, "--answers-as", given, "--split-ratio", "1,0,0")
        assert learned(out) == [[llava_mmbench("Why?", QA), letter]]
    with pytest.raises(EmptyDatasetError):
        learned(listed(tmp_path, entries, "rows.jsonl"))
    assert "it may mean p or q" in caplog.text
    mixed = [{"question": "Why?", "choices": QA, "answer": answer} for answer in (0, 4)]
    assert "0 in one row, which counts from 0, and 4 in another" in refused(listed(tmp_path, mixed), tmp_path / "out")
    none = [{"question": "Why?", "choices": QA, "answer": answer} for answer in ("A", "E")]
    assert "'E', with 4 choices in choices: it is none of these" in refused(listed(tmp_path, none), tmp_path / "out")


UNKNOWN = {"question": "When?", "answer": "In 1999.", "note": "The line opened in 1999."}


def test_an_unknown_text_beside_a_question_stops_a_conversion(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = listed(tmp_path, [UNKNOWN])
    message = refused(source, tmp_path / "out")
    assert "the column `note` beside `question` has a text ('The line opened in 1999.')" in message
    assert r"--question '{note}\n{question}'" in message
    ignored = converted(source, tmp_path / "ignored", "--ignore", "note", "--split-ratio", "1,0,0")
    assert learned(ignored) == [["When?", "In 1999."]]
    (data,) = members(ignored).values()
    assert "note" not in json.loads(data)
    told = converted(source, tmp_path / "told", "--question", r"{note}\n\n{question}", "--split-ratio", "1,0,0")
    assert learned(told) == [["The line opened in 1999.\n\nWhen?", "In 1999."]]
    assert "--question names 'nte', but the first rows have no such column" in refused(
        source, tmp_path / "out", "--question", "{nte}"
    )
    with pytest.raises(EmptyDatasetError):
        learned(listed(tmp_path, [UNKNOWN], "rows.jsonl"))
    assert "`note` has a text beside `question` and `answer`" in caplog.text


def test_the_unit_of_an_answer_is_not_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = {"question": "How heavy, in kg?", "answer": "12", "unit": "kg"}
    assert learned(listed(tmp_path, [said], "said.jsonl")) == [["How heavy, in kg?", "12"]]
    lost = listed(tmp_path, [{**said, "question": "How heavy?"}], "lost.jsonl")
    with pytest.raises(EmptyDatasetError):
        learned(lost)
    assert "`unit` has a text beside `question` and `answer` ('kg')" in caplog.text
    assert "the column `unit` beside `question`" in refused(lost, tmp_path / "out")


THOUGHT = "Since it opened in 1999."


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking", "complex_cot", "thinking_trajectory"])
@pytest.mark.parametrize("form", ["pair", "turns", "image"])
def test_reasoning_beside_an_answer_is_not_lost(tmp_path: Path, name: str, form: str) -> None:
    entry: dict[str, Any] = {"messages": TURNS} if form == "turns" else {"question": "When?", "answer": "In 1999."}
    entry |= {"image": "a.png"} if form == "image" else {}
    source = listed(tmp_path, [{**entry, name: THOUGHT}])
    assert f"`{name}`" in refused(source, tmp_path / "out")
    with pytest.raises(SampleError, match=f"`{name}` has "):
        read_conversation({"json": {**entry, name: THOUGHT}})
    out = converted(source, tmp_path / "out", "--ignore", name, "--split-ratio", "1,0,0")
    assert all(THOUGHT not in data.decode("latin-1") for data in members(out).values())
    kind = {"question": "When?", "answer": f"<think>{THOUGHT}</think>In 1999."}
    for there in ({**kind, name: THOUGHT}, {**entry, name: "temporal"}):
        assert read_conversation({"json": there}).turns[1].text.endswith("In 1999.")


def test_what_most_annotators_say_is_learned_where_they_are_counted(tmp_path: Path) -> None:
    asked = {"question": "What?"}
    counted = [{"answer": "a", "count": 1}, {"answer": "b", "count": 9}, {"answer": "a", "count": 3}]
    assert learned(listed(tmp_path, [{**asked, "answers": counted}], "counted.jsonl")) == [["What?", "b"]]
    blank = [{"answer": "", "count": 9}, {"answer": "b", "count": 1}]
    for answers in (blank, ["", " ", "b", "c", "c", "b"]):
        assert read_conversation({"json": {**asked, "answers": answers}}).turns[1].text == "b"
    for votes, best in (([1, 9], "b"), ([9, 1], "a"), ([1, 1], "a"), (["1", "9"], "a"), ([1, 9, 9], "a")):
        entry = {**asked, "answers": ["a", "b"], "votes": votes}
        if best == "a":
            assert read_conversation({"json": entry}).turns[1].text == "a"
            continue
        with pytest.raises(SampleError, match="`votes` has the most for 'b' of several answers, and 'a' would"):
            read_conversation({"json": entry})
        for beside in ({}, {"image": "a.png"}):
            assert "`votes` has the most for 'b'" in refused(listed(tmp_path, [{**entry, **beside}]), tmp_path / "out")


@pytest.mark.parametrize("answer", ['["a", "b"]', "['a', 'b']", "['a' 'b']"])
def test_a_list_of_answers_in_a_text_is_not_learned_with_its_brackets(tmp_path: Path, answer: str) -> None:
    entry = {"question": "Who?", "answer": answer}
    with pytest.raises(SampleError, match="`answer` is a list in a text"):
        read_conversation({"json": entry})
    as_it_is = ("--sample-type", "CrudeSample", "--question", "{question}", "--split-ratio", "1,0,0")
    for name, beside in {"texts": {}, "images": {"image": "a.png"}}.items():
        source = listed(tmp_path, [{**entry, **beside}], f"{name}.json")
        assert "`answer` is a list in a text" in refused(source, tmp_path / name)
        assert learned(converted(source, tmp_path / name, *as_it_is)) == [["Who?", answer]]
    one = listed(tmp_path, [{"question": "Who?", "answers": answer}], "one.jsonl")
    assert learned(one) == [["Who?", "a"]]
    asked = listed(tmp_path, [{"question": "List them.", "answer": answer}], "asked.jsonl")
    assert learned(asked) == [["List them.", answer]]


def test_an_unknown_text_beside_a_question_is_refused_in_tables(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([UNKNOWN] * 3), tmp_path / "rows.parquet")
    with pytest.raises(SourceError, match=r"column `note` beside `question` .* \(energon convert\) with --ignore note"):
        learned(tmp_path / "rows.parquet")


def test_short_texts_are_told_from_categories(tmp_path: Path) -> None:
    entry = {"question": "Q?", "answer": "A"}
    wrong = [{**entry, "wrong": text} for text in ("wet socks", "dry socks", "no socks", "old socks")]
    assert "the column `wrong` beside a question" in refused(listed(tmp_path, wrong), tmp_path / "out")
    kinds = [{**entry, "sort": text, "serial": f"x-{n}"} for n, text in enumerate(["wet socks", "dry socks"] * 2)]
    output = output_of("convert", listed(tmp_path, kinds), tmp_path / "out", "--no-ask", "--no-progress")
    assert "not used: sort, serial" in output


def test_convert_says_how_to_show_all_pictures(tmp_path: Path) -> None:
    source = listed(tmp_path, [{"image_1": "a.png", "image_2": "b.png", "answer": "A cat."}])
    flags = ("--question", "What is it?", "--no-ask", "--no-progress", "--split-ratio", "1,0,0")
    output = output_of("convert", source, tmp_path / "one", *flags, "--field", "answers=answer")
    assert "not used: image_2\n  to show image_2, too: leave out --field, with the answers in a column" in output
    assert "to show" not in output_of("convert", source, tmp_path / "all", *flags)
    assert [name.partition(".")[2] for name in members(tmp_path / "all")] == ["image_1.png", "image_2.png", "json"]


def test_convert_says_which_text_of_a_picture_was_taken(tmp_path: Path) -> None:
    source = listed(tmp_path, [{"image": "a.png", "question": "Q?", "answer": "A", "caption": "A cat on a mat."}])
    output = output_of("convert", source, tmp_path / "out", "--no-ask", "--no-progress", "--split-ratio", "1,0,0")
    assert "not used: caption" in output
    flags = "--sample-type CaptioningSample --field caption=caption"
    assert f"to take caption instead: {flags}" in output
    other = converted(source, tmp_path / "other", *flags.split(), "--split-ratio", "1,0,0")
    assert meta(other)["sample_type"]["__class__"] == "CaptioningSample"


def test_a_typed_question_may_not_lose_its_choices(tmp_path: Path) -> None:
    entry = {"image": "a.png", "question": "Q?", "choices": QA, "right": "B"}
    source = listed(tmp_path, [entry])
    typed = ("--sample-type", "MultiChoiceVQASample", "--field", "context=question", "--ignore", "right")
    message = refusal_of("convert", source, tmp_path / "out", *typed, "--no-ask")
    assert "without correct_choice_idx does not say which choice is right" in message
    fields = ("--field", "context=question", "--field", "correct_choice_idx=right")
    out = converted(source, tmp_path / "out", "--sample-type", "MultiChoiceVQASample", *fields)
    (data,) = [data for name, data in members(out).items() if name.endswith("json")]
    assert json.loads(data)["right"] == 1
    asked = [{"image": "a.png", "question": "Q?", "options": QA, "answer": "p"}]
    vqa = ("--sample-type", "VQASample", "--field", "context=question", "--field", "answers=answer")
    assert "the column `options` beside" in refused(listed(tmp_path, asked), tmp_path / "vqa", *vqa)


def test_a_context_that_is_no_text_is_refused(tmp_path: Path) -> None:
    entries = [{"question": "Q?", "answer": "A", "context": {"title": ["a"], "rows": [["b"]]}}]
    assert "`context` belongs to the question, and is not understood" in refused(
        listed(tmp_path, entries), tmp_path / "o"
    )
    with pytest.raises(SampleError, match="is not understood"):
        read_conversation({"json": entries[0]})


def test_what_stands_beside_turns_must_be_in_them(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "It opened in 1999. When?"}, {"role": "assistant", "content": "In 1999."}]
    known = {"messages": turns, "context": "It opened in 1999.", "source": "a set of texts"}
    assert learned(converted(listed(tmp_path, [known]), tmp_path / "known", "--split-ratio", "1,0,0"))
    lost = listed(tmp_path, [{**known, "context": "The line opened late."}])
    assert "the column `context` beside a question has a text" in refused(lost, tmp_path / "out")
    out = converted(lost, tmp_path / "out", "--ignore", "context", "--split-ratio", "1,0,0")
    assert learned(out) == [["It opened in 1999. When?", "In 1999."]]


TURNS = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "In 1999."}]
BESIDE_TURNS: dict[str, dict[str, Any]] = {
    "context": {"context": "The line opened in 1999."},
    "hint": {"hint": "Look at the date."},
    "passage": {"Passage": ["The line opened.", "It was late."]},
    "Chinese": {"context": "这条线路于1999年开通。"},
    "formula": {"hint": "x/2=3"},
    "options": {"options": ["in 1998", "in 1999"]},
    "numbers": {"choices": [12, 13]},
    "objects": {"choices": {"text": ["red", "blue"], "label": ["A", "B"]}},
    "nested": {"choices": [["red"], ["blue"]]},
    "letters": {"A": "red", "B": "blue", "C": None},
    "context and odd choices": {"choices": [["red"]], "story": "It was late."},
    "transcript": {"transcript": "The line opened in May."},
    "speech": {"asr": [{"start": 0.5, "end": 1.5, "text": "It opened"}]},
    "subtitles": {"video_subtitles": ["It opened"]},
}


@pytest.mark.parametrize("turns", ["messages", "conversations"])
@pytest.mark.parametrize("name", BESIDE_TURNS)
def test_lines_with_texts_beside_turns_are_refused(
    tmp_path: Path, name: str, turns: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry = {turns: TURNS, **BESIDE_TURNS[name]}
    ignored = [flag for column in BESIDE_TURNS[name] for flag in ("--ignore", column)]
    source = listed(tmp_path, [entry], "rows.jsonl")
    with pytest.raises(EmptyDatasetError):
        learned(source)
    assert f"beside `{turns}`" in caplog.text
    assert "convert the list with --ignore" in caplog.text
    assert "with --ignore" in refused(source, tmp_path / "out")
    assert learned(converted(source, tmp_path / "out", *ignored, "--split-ratio", "1,0,0")) == [["When?", "In 1999."]]


def test_metadata_beside_turns_needs_no_flag(tmp_path: Path) -> None:
    beside = {
        **{"id": "a-1", "source": "a set of texts", "category": "questions of time", "lang": "en", "score": 0.5},
        **{"tools": [], "timestamp": "2020-01-01 10:00:00", "license": "cc by 4.0 or later", "split": "train"},
        **{"options": {"temperature": 0.5, "stop": ["</s>"]}, "context": {"user": "u_17"}, "hint": "", "A": None},
        **{"document": "docs/a_17.pdf", "story": "https://example.com/stories", "choices": "[]"},
        **{"evidence": ["id_7", "When?"], "transcript": "IN 1999", "asr": None, "subtitle": ""},
    }
    source = listed(tmp_path, [{"messages": TURNS, **beside}], "rows.jsonl")
    out = converted(source, tmp_path / "out", "--split-ratio", "1,0,0")
    assert learned(source) == learned(out) == [["When?", "In 1999."]]


def test_columns_that_a_template_leaves_out_stay_out(tmp_path: Path) -> None:
    entry = {"question": "When?", "context": "The line opened in 1999.", "answer": "In 1999."}
    out = converted(
        listed(tmp_path, [entry]), tmp_path / "out", "--question", "Say: {question}", "--split-ratio", "1,0,0"
    )
    assert learned(out) == [["Say: When?", "In 1999."]]


BOOK = {"title": "A Calendar of the Family", "authorName": "Sandra Boynton", "genre": "Calendars"}
SEVERAL: dict[str, tuple[dict[str, Any], list[str]]] = {
    "OCR-VQA": (
        {"questions": ["Who wrote this?", "Which genre?"], "answers": ["Sandra Boynton", "Calendars"], **BOOK},
        ["Who wrote this?", "Sandra Boynton", "Which genre?", "Calendars"],
    ),
    "OCR-VQA in a CSV": (
        {"questions": "['Whose?', \"It's a book?\"]", "answers": "['Tom', 'Yes']", **BOOK},
        ["Whose?", "Tom", "It's a book?", "Yes"],
    ),
    "VisDial": (
        {"dialog": [{"question": "is he young", "answer": "no"}, {"question": "a cat", "answer": "yes"}]},
        ["is he young", "no", "a cat", "yes"],
    ),
    "lists of pairs": ({"qa_pairs": {"question": ["a?", "b?"], "answer": ["c", "d"]}}, ["a?", "c", "b?", "d"]),
    "q and a": ({"qas": [{"q": "a?", "a": "b"}]}, ["a?", "b"]),
    "CoQA": (
        {
            **{"source": "wiki", "story": "It is old. It has books.", "questions": ["When?", "is it old?"]},
            "answers": {"input_text": ["1475", "yes"], "answer_start": [1, 2], "answer_end": [3, 4]},
        },
        ["It is old. It has books.\nWhen?", "1475", "is it old?", "yes"],
    ),
    "QuAC": (
        {
            **{"context": "A long text.", "questions": ["Who?", "When?"]},
            "answers": {"texts": [["I", "me"], ["now"]], "answer_starts": [[1, 2], [2]]},
        },
        ["A long text.\nWho?", "I", "When?", "now"],
    ),
    "RACE": (
        {
            **{"article": "Tom is five.", "questions": ["How old?", "Who?"], "answers": ["B", "A"]},
            "options": [["four", "five"], ["Tom", "Tim"]],
        },
        [
            *(llava_mmbench("How old?", ["four", "five"], "Tom is five."), "B"),
            *(llava_mmbench("Who?", ["Tom", "Tim"]), "A"),
        ],
    ),
}


@pytest.mark.parametrize("image", [True, False])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_questions_with_their_answers_are_turns_of_one_conversation(
    tmp_path: Path, name: str, image: bool
) -> None:
    row, texts = SEVERAL[name]
    source = listed(tmp_path, [{**row, **({"image": "a.png"} if image else {})}] * 2, "list.jsonl")
    output = output_of("convert", source, tmp_path / "out", "--no-ask", "--no-progress", "--split-ratio", "1,0,0")
    assert learned(tmp_path / "out") == [texts] * 2
    assert image or learned(source) == [texts] * 2
    unused = output.partition("not used: ")[2].partition("\n")[0]
    assert unused == {"OCR-VQA": "title, authorName, genre", "CoQA": "source"}.get(name.partition(" in")[0], "")
    assert sum(one.endswith("png") for one in members(tmp_path / "out")) == 2 * image


def test_questions_without_an_answer_for_each_are_refused(tmp_path: Path) -> None:
    for beside in ({"answer": "c"}, {"answers": ["c"]}, {"answers": None}, {"answers": ["c", 5]}):
        source = listed(tmp_path, [{"image": "a.png", "questions": ["a?", "b?"], **BOOK, **beside}])
        assert "has 2 `questions` and other answers than one for each" in refused(source, tmp_path / "out")


CONTEXTS_IN_PARTS: dict[str, tuple[Any, str]] = {
    "HotpotQA": (
        {"title": ["A Mag", "B Mag"], "sentences": [["A was.", " It ended."], ["B was."]]},
        "A Mag\nA was. It ended.\nB Mag\nB was.",
    ),
    "HotpotQA's own file": (
        [["A Mag", ["A was.", " It ended."]], ["B Mag", ["B was."]]],
        "A Mag\nA was. It ended.\nB Mag\nB was.",
    ),
    "objects": ([{"title": "A Mag", "text": "A was."}, {"text": "B was."}], "A Mag\nA was.\nB was."),
    "MuSiQue": ([{"idx": 0, "title": "A", "paragraph_text": "A was.", "is_supporting": True}], "A\nA was."),
    "MS MARCO": ({"is_selected": [0, 1], "passage_text": ["A was.", "B was."], "url": ["u", "v"]}, "A was.\nB was."),
    "PubMedQA": ({"contexts": ["A was.", "B was."], "labels": ["AIM", "END"], "meshes": ["Cells"]}, "A was.\nB was."),
}


@pytest.mark.parametrize("name", CONTEXTS_IN_PARTS)
def test_contexts_in_parts_are_their_texts_behind_their_titles(tmp_path: Path, name: str) -> None:
    context, text = CONTEXTS_IN_PARTS[name]
    source = listed(tmp_path, [{"question": "Which?", "answer": "A", "context": context}], "rows.jsonl")
    out = converted(source, tmp_path / "out", "--split-ratio", "1,0,0")
    assert learned(source) == learned(out) == [[f"{text}\nWhich?", "A"]]


def test_questions_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    row = {"id": "1", "context": "A long text.", "question": "Who?", "answers": {"text": ["I"], "answer_start": [0]}}
    none = {**row, "id": "2", "answers": {"text": [], "answer_start": []}}
    source = listed(tmp_path, [row, none], "rows.jsonl")
    output = output_of("convert", source, tmp_path / "out", "--no-ask", "--no-progress", "--split-ratio", "1,0,0")
    assert "Skipped 1 sample:" in output
    assert "line 2 (id 2): has a question without an answer: `answers` is empty" in output
    assert learned(tmp_path / "out") == [["A long text.\nWho?", "I"]]


def test_pictures_in_tables_may_be_base64(tmp_path: Path) -> None:
    """As MMBench's TSV files have them; the prompt is LLaVA's."""
    picture = next(iter(write_pictures(tmp_path, ["a.jpg"]).values()))
    row = {"index": "1", "question": "Which?", "hint": "Look.", "A": "p", "B": "q", "answer": "B", "split": "dev"}
    columns = {**row, "image": base64.b64encode(picture).decode(), "category": "a b"}
    (tmp_path / "dev.tsv").write_text("\t".join(columns) + "\n" + "\t".join(columns.values()) + "\n")
    out = converted(tmp_path / "dev.tsv", tmp_path / "out", "--split-ratio", "1,0,0")
    assert learned(out) == [[llava_mmbench("Which?", QA[:2], "Look."), "B"]]
    assert members(out)["000000000.jpg"] == picture


ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "OpenAssistant": (
        {"message_id": "a", "parent_id": None, "text": "Write it.", "role": "prompter", "message_tree_id": "t"},
        "the same `parent_id` and `message_tree_id`",
    ),
    "a row per message": (
        {"conversation_id": "a", "turn": 0, "from": "human", "value": "Hello to you"},
        "the same `conversation_id`",
    ),
    "role and content": ({"role": "user", "content": "Hello to you", "turn": 1}, "the same conversation"),
    "a tree": ({"tree_state": "x", "prompt": {"text": "Hi", "replies": [{"text": "Ho"}]}}, "several `replies` to each"),
    "AudioCaps": ({"audiocap_id": "1", "youtube_id": "a", "caption": "A bird sings."}, "add a column image, video or"),
}


@pytest.mark.parametrize("name", ALONE)
def test_rows_that_are_a_part_of_what_was_said_are_refused(tmp_path: Path, name: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    row, complaint = ALONE[name]
    source = listed(tmp_path, [row, row])
    assert complaint in refused(source, tmp_path / "out")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    with pytest.raises(SourceError, match=complaint):
        learned(tmp_path / "rows.parquet")
    column = next((one for one in ("text", "value", "content", "caption") if one in row), None)
    if column is not None:
        told = ("--sample-type", "TextSample", "--field", f"text={column}")
        converted(source, tmp_path / "told", *told, "--split-ratio", "1,0,0")


def test_texts_with_other_roles_are_texts(tmp_path: Path) -> None:
    source = listed(tmp_path, [{"text": "Once upon a time.", "role": "narrator"}, {"text": "x", "role": "king"}])
    assert meta(converted(source, tmp_path / "out"))["sample_type"]["__class__"] == "TextSample"


@pytest.mark.parametrize(
    ("beside", "complaint"),
    [
        ({"image_id": 17}, r"`image_id` \(17\) seems to name what the question is about"),
        ({"video_id": "v_a"}, "`video_id` .* seems to name"),
        ({"audio_id": "a.wav"}, "`audio_id` names a file"),
        ({"context": "a.wav"}, "`context` names a file"),
        ({"picture": ["/9j/" + "A" * 60]}, "`picture` has a file in it"),
    ],
)
def test_questions_about_media_that_are_not_there_are_refused(beside: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SampleError, match=complaint):
        cook_conversation({"__key__": "a", "json": {"question": "What is it?", "answer": "It.", **beside}})
    seen = {"__key__": "a", "json": {"question": "What is it?", "answer": "It.", **beside}, "0.png": b"p"}
    if "context" not in beside:
        assert cook_conversation(seen).images == [b"p"]


def test_ids_beside_a_transcript_or_turns_are_metadata() -> None:
    transcript = {"video_id": "v_a", "context": "He says it.", "question": "Who?", "answer": "He."}
    for content in (transcript, {"video_id": "v_a", "messages": TURNS}, {"image_id": "", "messages": TURNS}):
        assert cook_conversation({"__key__": "a", "json": content}).messages
    with pytest.raises(SampleError, match="`image_id`"):  # of SVIT
        cook_conversation({"__key__": "a", "json": {"image_id": "233", "messages": TURNS}})


def test_objects_by_name_are_refused_shortly(tmp_path: Path) -> None:
    """As in the problems.json of ScienceQA and the dataset.json of OCR-VQA, which have all splits."""
    problems = {str(n): {"question": "Which?", "answer": 0, "split": "test"} for n in range(1000)}
    (tmp_path / "problems.json").write_text(json.dumps(problems))
    said = refused(tmp_path / "problems.json", tmp_path / "out")
    assert (
        "found an object with 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …. Write its objects as a list, those of each split" in said
    )
    assert len(said) < 500


@pytest.mark.parametrize("column", ["comment", "caption_str"])
def test_captions_of_flickr30k_and_textcaps(tmp_path: Path, column: str) -> None:
    source = listed(tmp_path, [{"image_name": "a.png", "comment_number": 0, column: "A dog runs."}])
    fields = meta(converted(source, tmp_path / "out", "--split-ratio", "1,0,0"))["field_map"]
    assert fields["caption"] == f"json[{column}]"


def test_of_several_captions_the_first_is_taken(tmp_path: Path) -> None:
    """Those of TextCaps."""
    source = listed(tmp_path, [{"image_name": "a.png", "caption_str": ["A sign.", "A red sign."]}] * 2)
    fields = meta(converted(source, tmp_path / "out", "--split-ratio", "1,0,0"))["field_map"]
    assert fields["caption"] == "json[caption_str][0]"


def test_tables_of_speech_say_how_to_ask_for_their_texts(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    rows = [{"client_id": "x", "path": "a.wav", "caption": "Hello to you all", "locale": "en"}]
    output = output_of("convert", listed(tmp_path, rows), tmp_path / "out", "--no-ask", "--no-progress", "--dry-run")
    assert "to ask for caption: --question 'Describe the sound.'\n" in output


def test_sounds_with_texts_beside_them_say_how_to_ask_for_these(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.wav").write_bytes(b"RIFF")
        (tmp_path / f"{name}.txt").write_text("Hello to you all")
    output = output_of("convert", tmp_path, tmp_path / "out", "--no-ask", "--no-progress", "--dry-run")
    assert "to ask for txt: --question 'Transcribe the speech.'\n" in output


def test_flags_of_questions_are_refused_where_there_are_none(tmp_path: Path) -> None:
    write_pictures(tmp_path / "photos", ["cat/a.png", "dog/b.png"])
    for flags in (("--ignore", "label"), ("--question", "{label}"), ("--answers-as", "index")):
        assert refused(tmp_path / "photos", tmp_path / "out", *flags)


# Columns of public sets, as their files have them; what is learned is the set's own question and answer.
PUBLIC: dict[str, tuple[dict[str, Any], list[str]]] = {
    "GQA": (
        {
            **{
                "id": "1",
                "question": "Is it overcast?",
                "answer": "no",
                "fullAnswer": "No, it is clear.",
            },
            **{
                "semantic": [{"operation": "select", "argument": "scene of it", "dependencies": []}],
                "isBalanced": True,
            },
            **{"semanticStr": "select: scene->verify weather: overcast [0]", "groups": {"local": "06-weather_s"}},
            **{"types": {"detailed": "weatherVerify"}, "entailed": "", "equivalent": ""},
        },
        ["Is it overcast?", "no"],
    ),
    "TextVQA": (
        {
            **{"question": "what is the brand?", "question_tokens": ["what", "is", "the", "brand"]},
            **{"answers": ["nous les gosses", "dakota"], "image_classes": ["Belt", "Headphones"], "set_name": "train"},
            "ocr_tokens": ["DAKOTA", "DIGITAL"],
        },
        ["what is the brand?", "nous les gosses"],
    ),
    "MetaMathQA": (
        {
            "query": "Solve x+1=2.",
            "original_question": "Solve x plus 1 equals 2.",
            "response": "x is 1",
            "type": "AnsAug",
        },
        ["Solve x+1=2.", "x is 1"],
    ),
    "HellaSwag": (
        {
            **{
                "ind": 4,
                "activity_label": "Removing ice from car",
                "ctx_a": "The man writes over the snow.",
                "ctx_b": "then",
            },
            **{"ctx": "The man writes over the snow. then", "endings": QA, "source_id": "x~v_1", "split": "train"},
            "label": "0",
        },
        [llava_mmbench("The man writes over the snow. then", QA), "A"],
    ),
    "MMMU without choices": (
        {"question": "How many?", "options": "[]", "answer": "24", "question_type": "open"},
        ["How many?", "24"],
    ),
    "MMBench of lmms-lab": (  # lmms-eval leaves "nan" out
        {
            "question": "Which?",
            "hint": "nan",
            "A": "p",
            "B": "q",
            "C": "nan",
            "D": "nan",
            "answer": "A",
            "comment": "nan",
        },
        [llava_mmbench("Which?", QA[:2]), "A"],
    ),
    "AI2D of letters": (
        {"question": "Which of the letters is it?", "options": QA, "answer": "B"},
        [llava_mmbench("Which of the letters is it?", QA), "B"],
    ),
    "NExT-QA": (
        {"question": "how", "answer": 0, "frame_count": 9, "type": "CH", "qid": 6, "a0": "p", "a1": "q", "a2": "r"},
        [llava_mmbench("how", QA[:3]), "A"],
    ),
    "BoolQ": (  # the words of lm-evaluation-harness
        {"question": "is it big", "passage": "It is a big country.", "answer": True},
        ["It is a big country.\nis it big", "yes"],
    ),
    "NQ-open": ({"question": "where was it", "answer": ["Fernie", "Fernie Resort"]}, ["where was it", "Fernie"]),
    "MATH": (
        {"problem": "Solve x=1.", "level": "Level 5", "type": "Algebra", "solution": "It is 1."},
        ["Solve x=1.", "It is 1."],
    ),
    "Aya": (
        {"inputs": "Say it.", "targets": "It.", "language": "English", "language_code": "eng", "user_id": "a"},
        ["Say it.", "It."],
    ),
    "OpenOrca": (
        {"id": "n", "system_prompt": "", "question": "What is it?", "response": "It."},
        ["What is it?", "It."],
    ),
    "VideoChat2": (
        {"QA": [{"i": "Answer shortly.", "q": "What is it?", "a": "It."}, {"i": "", "q": "Now?", "a": "Yes."}]},
        ["Answer shortly.", "What is it?", "It.", "Now?", "Yes."],
    ),
    "captions of VideoChat2": (
        {"QA": [{"i": "Describe it.", "q": "", "a": "It."}]},
        ["Describe it.", "It."],
    ),
    "PixMo docs": (
        {"questions": {"question": ["What is it?", "Now?"], "answer": ["It.", "Yes."]}},
        ["What is it?", "It.", "Now?", "Yes."],
    ),
    "pairs in `questions`": (
        {"questions": [{"question": "What is it?", "answer": "It."}]},
        ["What is it?", "It."],
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_columns_of_public_sets_need_no_flags(name: str, tmp_path: Path) -> None:
    row, texts = PUBLIC[name]
    source = listed(tmp_path, [row], "list.jsonl")
    assert learned(source) == [texts]
    assert learned(converted(source, tmp_path / "out", "--split-ratio", "1,0,0")) == [texts]


@pytest.mark.parametrize("form", ["VQAv2", "ChartQA", "POPE", "gt_answer", "TextVQA"])
def test_answers_of_sets_about_images(form: str, tmp_path: Path) -> None:
    said = [
        {"answer": text, "answer_confidence": "yes", "answer_id": at} for at, text in enumerate(["nets", "net", "net"])
    ]
    row = {"question": "What is it?", "multiple_choice_answer": "net", "answers": said}
    if form == "ChartQA":
        row = {"query": "What is it?", "label": ["net"], "human_or_machine": 0}
    if form == "gt_answer":
        row = {"question": "What is it?", "gt_answer": "net"}
    if form == "POPE":
        row = {"question_id": 1, "text": "What is it?", "label": "net"}
    if form == "TextVQA":
        row = {"question": "What is it?", "answers": ["nets", *["net"] * 8, "nets"]}
        assert learned(listed(tmp_path, [row], "list.jsonl")) == [["What is it?", "net"]]
    out = converted(listed(tmp_path, [{"image": "a.png", **row}]), tmp_path / "out", "--split-ratio", "1,0,0")
    workers = WorkerConfig(num_workers=0)
    if form == "TextVQA":
        (sample,) = get_loader(get_val_dataset(out, split_part="train", batch_size=None, worker_config=workers))
        assert encode_vqa(sample, MultiModalSampleConfig()).first_answer == "net"
        return
    (batch,) = get_loader(get_val_dataset(out, split_part="train", batch_size=1, worker_config=workers))
    assert (batch.context, batch.answers[0][0]) == (["What is it?"], "net")


def test_a_template_without_choices_has_them_behind_it(tmp_path: Path) -> None:
    rows = [
        {"premise": "The man broke his toe.", "choice1": "p", "choice2": "q", "question": "cause", "label": label}
        for label in (1, 0)
    ]
    source = listed(tmp_path, rows)
    template = "{premise}\\n{question}"
    assert f"--question '{template}'" in refused(source, tmp_path / "out")
    out = converted(source, tmp_path / "out", "--question", template, "--split-ratio", "1,0,0")
    asked = llava_mmbench("The man broke his toe.\ncause", QA[:2])
    assert learned(out) == [[asked, "B"], [asked, "A"]]
    words = converted(
        source, tmp_path / "words", "--question", "{premise} {choice1} or {choice2}?", "--split-ratio", "1,0,0"
    )
    assert learned(words) == [["The man broke his toe. p or q?", "q"], ["The man broke his toe. p or q?", "p"]]


def test_all_unknown_columns_are_named_with_a_question_that_has_each_text_once(tmp_path: Path) -> None:
    facts = {
        "fact1": "Beads are formed here.",
        "fact2": "Beads of water fall.",
        "combinedfact": "Water falls as beads.",
    }
    source = listed(tmp_path, [{"question": "What falls?", "answer": "Water", **facts}])
    said = refused(source, tmp_path / "out")
    assert "--ignore fact2 --ignore combinedfact" in said
    assert "--question '{fact1}\\n{fact2}\\n{combinedfact}\\n{question}'" in said
    whole = listed(
        tmp_path, [{"question": "How long?", "query": "Answer in metres.\nQuestion: How long?", "answer": "1"}]
    )
    assert "--question '{query}'" in refused(whole, tmp_path / "out")


def test_arrays_as_numpy_prints_them_are_lists(tmp_path: Path) -> None:
    """A table of numpy arrays that pandas wrote as CSV: Python would take `'p' 'q'` for one text."""
    numpy = pytest.importorskip("numpy")
    printed = str(numpy.array(["p", "it's q", "r" * 40, "s" * 40], dtype=object))
    assert "," not in printed
    assert "\n" in printed
    rows = [{"question": "What?", "choices": printed, "answer": "B"}]
    (first, second), *_ = learned(converted(listed(tmp_path, rows), tmp_path / "out", "--split-ratio", "1,0,0"))
    assert first == f"What?\nA. p\nB. it's q\nC. {'r' * 40}\nD. {'s' * 40}\n{LETTER}"
    assert second == "B"


@pytest.mark.parametrize("image", [{}, {"image": "a.png"}])
@pytest.mark.parametrize("written", ["['p', 'q', 'q']", '["p", "q", "q"]', "['p' 'q' 'q']"])
def test_answers_as_text_of_a_list_are_a_list(written: str, image: dict[str, str], tmp_path: Path) -> None:
    source = listed(tmp_path, [{**image, "question": "What?", "answers": written}])
    out = converted(source, tmp_path / "out", "--split-ratio", "1,0,0")
    if image:
        workers = WorkerConfig(num_workers=0)
        (batch,) = get_loader(get_val_dataset(out, split_part="train", batch_size=1, worker_config=workers))
        assert batch.answers == [["p", "q", "q"]]
    else:
        assert learned(out) == [["What?", "q"]]


@pytest.mark.parametrize("nothing", ["nan", "<noinput>", float("nan"), None, ""])
def test_what_pandas_and_alpaca_write_for_nothing_is_nothing(nothing: Any, tmp_path: Path) -> None:
    rows = [{"instruction": "Sing.", "input": nothing, "output": "La.", "system": nothing}]
    assert learned(converted(listed(tmp_path, rows), tmp_path / "out", "--split-ratio", "1,0,0")) == [["Sing.", "La."]]


def test_lists_that_are_answers_stay_texts(tmp_path: Path) -> None:
    rows = [{"question": "List them.", "answer": "['p', 'q']"}]
    assert learned(converted(listed(tmp_path, rows), tmp_path / "out", "--split-ratio", "1,0,0")) == [
        ["List them.", "['p', 'q']"]
    ]


@pytest.mark.parametrize("name", ["system", "system_prompt", "system_message", "systemInstruction", "inputs"])
def test_what_belongs_to_a_pair_is_learned_beside_an_image_too(tmp_path: Path, name: str) -> None:
    """As without an image: a `VQASample` would leave it out."""
    row = {"question": "Which?", "answer": "Red.", name: "Answer in one word, please."}
    texts = {("image",): None, (): None}
    for beside in texts:
        folder = tmp_path / f"of{len(beside)}"
        folder.mkdir()
        source = listed(folder, [{**row, **dict.fromkeys(beside, "a.png")}])
        texts[beside] = learned(converted(source, folder / "out", "--split-ratio", "1,0,0"))
    assert texts["image",] == texts[()]
    assert any(row[name] in text for text in texts["image",][0])


@pytest.mark.parametrize("choices", [{"a": {"rawText": "one"}, "b": {"rawText": "two"}}, {"a": "one", "b": ["two"]}])
@pytest.mark.parametrize("image", [{"image": "a.png"}, {}])
def test_choices_that_are_not_understood_are_refused(
    tmp_path: Path, choices: dict[str, Any], image: dict[str, str]
) -> None:
    """As TQA has them; without them, the model learns the letter of a choice that it does not see."""
    source = listed(tmp_path, [{**image, "question": "Which?", "choices": choices, "answer": "b"}])
    assert "`choices`: expected a list of up to 26 choices" in refused(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("choices", "answer"),
    [(["a cat", "a dog"], "A box."), (["no", "yes"], "unknown"), (["on", "off"], "It is wrong. A button is missing.")],
)
def test_an_answer_that_names_no_choice_is_refused(tmp_path: Path, choices: list[str], answer: str) -> None:
    """Visual7W lists the wrong choices only; its answers begin with an article, which is no letter of a choice."""
    source = listed(tmp_path, [{"image": "a.png", "question": "Which?", "choices": choices, "answer": answer}])
    assert f"{answer!r}, with 2 choices in choices: it is none of these" in refused(source, tmp_path / "out")


@pytest.mark.parametrize("answer", ["A because it purrs.", "The answer is A", "A cat is an animal.", "So it is: Off."])
def test_an_answer_in_words_of_its_own_stays(tmp_path: Path, answer: str) -> None:
    row = {"image": "a.png", "question": "Which?", "choices": ["cat", "off"], "answer": answer}
    out = converted(listed(tmp_path, [row]), tmp_path / "out", "--split-ratio", "1,0,0")
    assert learned(out) == [["Which?\nA. cat\nB. off", answer]]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"image": "a.png", "subject": "How large?", "label": 1}, "`label` may be about the image and the text in"),
        ({"text": "How large is it?", "answer": "B"}, "beside `text` has a text"),
        ({"text": "How large is it?", "label": 1}, "beside `text` has a text"),
        ({"image": "a.png", "caption": "How large is it", "answer": "B"}, "beside `caption` has a text"),
    ],
)
def test_choices_beside_what_is_not_called_a_question_are_refused(
    tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    """GeoQA calls its question `subject`; the number of a choice, or the text alone, would be learned without them."""
    rows = [{**row, "choices": [f"{at}0", f"{at}5"]} for at in range(3)]
    message = refused(listed(tmp_path, rows), tmp_path / "out")
    assert said in message
    assert "--ignore choices" in message


def test_choices_that_are_the_same_in_all_rows_are_names_of_classes(tmp_path: Path) -> None:
    rows = [{"image": "a.png", "choices": ["small", "large"], "label": at % 2} for at in range(4)]
    out = converted(listed(tmp_path, rows), tmp_path / "out", "--split-ratio", "1,0,0")
    assert "ImageClassification" in (out / ".nv-meta/dataset.yaml").read_text()
