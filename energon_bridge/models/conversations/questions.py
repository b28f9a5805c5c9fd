"""What belongs to a question: the columns beside it and its answer, and the text that they make with it.

    lecture, article, passage, document, context, …, hint     paragraphs before a question, after an `instruction`
    options, choices, endings, …; A to J, option_a, opa, …    lines `A. …` behind it, and what LLaVA asks for then

The forms are those that training on these sets uses: dolly's context stands behind the instruction, as Alpaca's input
does; choices and hints as LLaVA writes MMBench, AI2D, MMMU and ScienceQA. With choices, the letter of the right one is
learned, whether a list has the letter, the text, or a number; whether numbers count from 0 or 1 is never guessed.

Beside turns, the text of a video's or recording's sound (`_OF_SOUNDS`) is one of a question, unless a turn says it.
A `unit` may be that of the answer. A text in any other column may belong to the question, too: `unknown_texts` names
it.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from string import ascii_uppercase
from typing import Any, Literal, NamedTuple

from energon_bridge.core.errors import SampleError
from energon_bridge.models.conversations.places import ends_in_place
from energon_bridge.models.conversations.withheld import accepted

AnswersAs = Literal["letter", "text", "index", "number"]
"""How answers to choices are given; an index counts from 0, a number from 1."""

CONTEXTS = (
    *("lecture", "background", "fact1", "article", "passage", "passages", "paragraph", "paragraphs", "document"),
    *("documents", "story", "support", "evidence", "dialogue", "context", "contexts", "hint"),
)
"""Columns with a text that stands before the question, in that order."""
CHOICES = (
    *("options", "choices", "candidates", "endings", "alternatives", "answer_choices", "answer_options"),
    *("multiple_choices", "possible_answers", "choice_list", "choices_list", "option_list", "options_list"),
    *("mc_options", "mc_choices", "candidate_answers", "answer_candidates"),
)
"""Columns of lists of choices."""
_SERIES = re.compile(r"(options?|choices?|opt|op|ending|sol|alternative|answer|ans|a(?=\d)|)[_ ]?([a-j]|\d)")
_LABEL = re.compile(r"(option|choice)?[_ ]?([a-j]|\d+)|texts?|labels?")
_ASKED = ("question", "question_stem", "query", "problem", "prompt", "instruction", "input", "ctx", "goal", "sentence")
_RIGHT = (
    *("answer", "answerkey", "answer_key", "answer_idx", "answer_index", "answer_id", "correct_answer", "correct"),
    *("correct_choice_idx", "correct_choice", "correct_option", "correct_index", "correct_idx", "cop", "label"),
    *("target", "gold", "ground_truth", "gt", "solution_idx", "gt_answer", "answer_letter", "answer_label"),
)
_SAID = ("answer", "output", "response", "completion", "assistant", "gpt", "answers")
_SPOKEN = ("sentence", "transcription", "raw_transcription", "transcript", "normalized_text")
TOLD = ("text", *_SPOKEN, "caption", "caption_1")
"""Columns of what is said in media or of them, the answer to a question about them if no other column has one."""
_LETTER = "Answer with the option's letter from the given choices directly."  # of LLaVA 1.5

_ASKS_LETTER = re.compile(
    r"\b(option|choice|answer|correct)\w*\b[^.?!\n]*\bletter|\bletters?\b[^.?!\n]*\b(option|choice|answer)",
    re.IGNORECASE,
)

_OF_ANSWERS = {
    *("explanation", "explanations", "exp", "rationale", "rationales", "solution", "reasoning"),
    *("reasoning_content", "thinking", "thought", "cot", "cot_content", "chain_of_thought", "direct_answers"),
    *("multiple_choice_answer", "answer_start", "full_answer", "answers", "answer"),
}
_METADATA = {
    *("id", "idx", "index", "key", "uid", "uuid", "guid", "hash", "md5", "sha1", "sha256", "source", "src"),
    *("origin", "dataset", "dataset_name", "category", "categories", "subcategory", "type", "kind", "task"),
    *("subject", "subjects", "subfield", "topic", "topics", "domain", "field", "split", "licence", "license"),
    *("copyright", "language", "lang", "locale", "author", "annotator", "annotators", "worker", "date", "time"),
    *("created", "timestamp", "model", "generator", "difficulty", "level", "grade", "score", "scores", "rating"),
    *("quality", "tag", "tags", "keyword", "keywords", "name", "title", "caption", "captions", "alt", "alt_text"),
    *("file", "filename", "file_name", "files", "path", "url", "urls", "link", "year", "version", "status"),
    *("meta", "metadata", "format", "size", "skill", "skills", "group", "extra_info", "img_type"),
    *("topic_difficulty", "question_concept", "concept", "comment_count", "country", "state", "city", "email"),
    *("original_question", "semantic", "semantic_str", "program", "groups", "types", "annotations", "entailed"),
    *("speaker", "duration", "equivalent", "operation", "operation/reasoning", "answer_from", "ocr", "ocr_info"),
    *("image_classes", "metamap_phrases", "language_code", "lang_code", "country_code", "width", "height"),
}
_ENDINGS = re.compile(
    r".*[_-](id|idx|index|url|source|category|type|split|licen[cs]e|lang|language|date|time|model|name|path|file|key"
    r"|hash|tag|score|label|level|topic|domain|format|version|count|token)s?"
)
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_ANY_LETTER = re.compile(r"[^\W\d_]")
_UNITS = ("unit", "units")
_NEVER_NAMES = ("premise", "hypothesis", "claim", "statement", "scenario", "situation", *_UNITS)
"""Columns of texts that a question is about, or of the unit of its answer, however short."""
_OF_SOUNDS = re.compile(
    r"(?:(?:video|audio|speech|asr|whisper|full|auto)_)*(?:asr|transcripts?|transcriptions?|subtitles?|narrations?"
    r"|closed_captions?)(?:_(?:texts?|en))?"
)
"""Columns of what is said in a video or sound."""
_WORDS = 4
"""A text of fewer may be the name of a category."""


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of a question: their columns, how a list calls each, their letters and texts.

    `written`: a text that has all of them, in a form of its own; there are no others then.
    """

    columns: tuple[str, ...]
    labels: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    written: str = ""

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters that they are shown with."""
        own = [label.upper() for label in self.labels]
        is_own = all(len(one) == 1 and one in ascii_uppercase for one in own)
        return tuple(own) if is_own else tuple(ascii_uppercase[: len(own)])

    @property
    def lines(self) -> str:
        """The choices as text, a line each. The line break behind a picture belongs to it, so that needs another."""
        shown = zip(self.letters, self.texts, strict=True)
        return self.written or "\n".join(f"{a}. {text}" + "\n" * ends_in_place(text) for a, text in shown)


# Choices --------------------------------------------------------------------------------------------------------------


def options_of(entry: Mapping[str, Any]) -> Options | None:
    """Return the choices of an entry; None if it has none. Raises SampleError for what is not understood."""
    names = _named(tuple(entry))
    for column in names.choices:
        if (listed := _listed(column, entry[column])) is not None:
            return listed
    series: dict[str, dict[str, tuple[str, Any]]] = {}
    for column, start, key in names.series:
        if _is_plain(entry[column]) and not is_missing(entry[column]):
            series.setdefault(start, {})[key] = (column, entry[column])
    for found in series.values():
        keys = sorted(found)
        if len(keys) > 1 and keys[0] in ("a", "0", "1") and keys[1] in ("b", "1", "2"):
            columns = tuple(found[key][0] for key in keys)
            return _options(columns, keys, [found[key][1] for key in keys])
    return None


class _Named(NamedTuple):
    """Columns by kind, judging by name: contexts, lists of choices, series of choices (`option_a`, ...), unknown."""

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    series: tuple[tuple[str, str, str], ...]
    unknown: tuple[str, ...]


@lru_cache(maxsize=256)
def _named(columns: tuple[str, ...]) -> _Named:
    lower = {column.lower(): column for column in columns}
    contexts = tuple(lower[name] for name in CONTEXTS if name in lower)
    choices = tuple(column for column in columns if column.lower() in CHOICES)
    matches = ((column, _SERIES.fullmatch(column.lower())) for column in columns)
    series = tuple((one, match[1], match[2]) for one, match in matches if match and (match[1] or one.isupper()))
    unknown = tuple(column for column in columns if column not in contexts and not is_metadata(column))
    return _Named(contexts, choices, series, unknown)


def _listed(column: str, value: Any) -> Options | None:
    """Return the choices in a column: a list, objects of label and text, texts by label, or a text that has them."""
    if isinstance(value, str):
        inner = value.strip()
        parsed = from_text(inner) if inner[:1] in ("[", "{") and inner[-1:] in ("]", "}") else None
        if parsed is None:
            is_none = inner.lower() in ("", "na", "n/a", "none", "null")  # NA: of M4-Instruct
            return None if is_none else Options((column,), written=inner)
        value = parsed
    if value is None or (hasattr(value, "__len__") and not len(value)):
        return None
    labels: list[Any] | None = None
    texts: Any = value
    if isinstance(value, Mapping):
        lower = {str(name).lower(): one for name, one in value.items()}
        texts = lower.get("text", lower.get("texts"))
        labels = lower.get("label", lower.get("labels"))
        if not isinstance(texts, list | tuple):
            filled = {name: one for name, one in value.items() if _is_plain(one) or isinstance(one, dict | list)}
            labels = list(filled)
            texts = list(filled.values())
    elif isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value):
        pairs = [_labelled(one) for one in value]
        labels = [label for label, _ in pairs]
        texts = [text for _, text in pairs]
    if not isinstance(texts, list | tuple) or not all(map(_is_plain, texts)) or len(texts) > len(ascii_uppercase):
        raise SampleError(f"`{column}`: expected a list of up to 26 choices, found {str(value)[:200]!r}")
    if not texts:
        return None
    if labels is None or len(labels) != len(texts) or None in labels:
        labels = list(ascii_uppercase[: len(texts)])
    return _options((column,), labels, texts)


def _options(columns: tuple[str, ...], labels: Sequence[Any], texts: Sequence[Any]) -> Options:
    """Return choices, without the letters that their texts may begin with."""
    made = Options(columns, tuple(str(one).strip() for one in labels), tuple(str(one).strip() for one in texts))
    marked = [
        re.fullmatch(rf"\(?{a}[).:]\s*(.+)", one, re.DOTALL) for a, one in zip(made.letters, made.texts, strict=True)
    ]
    return replace(made, texts=tuple(match[1] for match in marked if match)) if all(marked) else made


def _labelled(choice: Mapping[str, Any]) -> tuple[Any, Any]:
    lower = {str(name).lower(): one for name, one in choice.items()}
    label = next((lower[name] for name in ("label", "key", "letter", "option", "id", "index") if name in lower), None)
    names = ("text", "value", "content", "choice", "answer", "option")
    return label, next((lower[name] for name in names if name in lower and lower[name] != label), None)


def from_text(text: str) -> Any:
    """Return a list or an object written as JSON or, as in MMMU, by Python or numpy; None if it is neither."""
    for read in (json.loads, _of_numpy, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


_STRING = r"""(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
_PRINTED = re.compile(rf"\[\s*{_STRING}(?:\s+{_STRING})+\s*\]")


def _of_numpy(text: str) -> list[Any]:
    """Return an array of texts as numpy prints it, without commas, which Python takes for one text; else ValueError."""
    if _PRINTED.fullmatch(text) is None:
        raise ValueError
    return [ast.literal_eval(one) for one in re.findall(_STRING, text)]


def is_missing(value: Any) -> bool:
    """Return whether a value is null: None, or what tables of floats have for it, also as text."""
    return value is None or value in ("nan", "<noinput>") or (isinstance(value, float) and value != value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _is_plain(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, str) and bool(value.strip()))


# Answers --------------------------------------------------------------------------------------------------------------


def choice_pair(entry: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the columns of a question and its answer where the answer is no text: of choices, or of several."""
    asked = _column(entry, _ASKED, lambda value: isinstance(value, str) and bool(value.strip()))
    if asked is None:
        return None
    if first_answer(entry.get("answers")) is not None:
        return asked, "answers"
    try:
        options = options_of(entry)
    except SampleError:
        return None
    if options is None and (isinstance(entry.get("answer"), bool) or first_answer(entry.get("answer")) is not None):
        return asked, "answer"
    right = None if options is None else _column(entry, _RIGHT, lambda value: _is_plain(only(value)))
    return None if right is None or right == asked else (asked, right)


def first_answer(value: Any) -> str | None:
    """Return the answer of most annotators who gave one, the first of those (TextVQA, SQuAD); None: there is none."""
    if isinstance(value, bool):  # of BoolQ
        return "yes" if value else "no"
    if said := said_by_annotators(value):
        return said[0]
    texts = value.get("text") if isinstance(value, Mapping) else value
    if isinstance(texts, list | tuple) and texts and all(isinstance(one, str) for one in texts):
        filled_in = [one for one in texts if one.strip()] or [*texts]
        return max(filled_in, key=filled_in.count)
    return texts if isinstance(texts, str) else None


def doubt_of_answer(entry: Mapping[str, Any], pair: Sequence[str]) -> str | None:
    """Return the complaint about a question and its answer that may be wrong, or one of several; else None.

    WikiQA's wrong answers have a `label` of 0. A list of answers that is text may be that of annotators, or the answer.
    Reasoning beside an answer would not be learned, nor would what `votes` beside several say.
    """
    answer = entry.get(pair[1])
    if (lost := lost_thoughts(entry, [entry.get(name) for name in pair])) is not None:
        return lost
    if (better := _better_by_votes(entry, answer)) is not None:
        return f"{better}: write that first, or alone; or leave the numbers out (energon convert with --ignore)"
    if pair[1] == "answer" and isinstance(answer, str) and texts_of(answer) and not _asks_list(entry.get(pair[0])):
        return (
            f"`answer` is a list in a text ({answer[:100]!r}), and would be learned with its brackets. If one of these "
            "is to be learned, call the column answers; for the text as it is, convert the list with --sample-type "
            f"CrudeSample --question '{{{pair[0]}}}'"
        )
    value = entry.get("label")
    if isinstance(value, bool) or str(value) not in ("0", "0.0") or "label" in pair:
        return None
    with suppress(SampleError):
        if options_of({name: one for name, one in entry.items() if name not in pair}) is not None:
            return None
    return (
        f"`label` is {value!r} beside `{pair[0]}` and `{pair[1]}`, so the answer may be wrong: leave such rows out; if "
        "it says something else, convert the list with --ignore label"
    )


def lost_thoughts(entry: Mapping[str, Any], said: Sequence[Any]) -> str | None:
    """Return the complaint about reasoning in a column, which no text `said` has, and which would not be learned."""
    names = [name for name in entry if _THOUGHTS.fullmatch(name.lower()) and _is_long(entry[name])]
    if not names:
        return None
    whole = "\n".join(text for one in said for text in texts_in(one))
    name = next((name for name in names if not all(text in whole for text in texts_in(entry[name]))), None)
    return name and (
        f"`{name}` has reasoning ({str(entry[name])[:100]!r}), which would not be learned with the answer: write it as "
        f"reasoning_content into the turn of the assistant, or convert the list with --ignore {name}"
    )


_THOUGHTS = re.compile(
    r"(?:\w+_)?(?:reasoning|thinking|thought|cot)(?:_(?:contents?|texts?|traces?|steps|process|chains?|trajector(?:y|ies)))?"
    r"|think|(?:inner_)?thoughts|chain_of_thoughts?|scratchpad"
)
_VOTES = re.compile(
    r"(?:(?:answers?|num|vote)_?)*(?:votes?|counts?|freq(?:uenc(?:y|ies))?|scores?|weights?|confidences?)"
)


def _better_by_votes(entry: Mapping[str, Any], answers: Any) -> str | None:
    """Return which of several answers has more votes in a list beside them than the one that would be learned."""
    if not isinstance(answers, list) or len(answers) < 2 or (first := first_answer(answers)) not in answers:
        return None
    for name in filter(lambda name: _VOTES.fullmatch(name.lower()), entry):
        votes = entry[name]
        if not isinstance(votes, list) or len(votes) != len(answers) or not all(map(_is_number, votes)):
            continue
        best = votes.index(max(votes))
        if votes[best] > max(vote for vote, one in zip(votes, answers, strict=True) if one == first):
            return f"`{name}` has the most for {answers[best]!r} of several answers, and {first!r} would be learned"
    return None


def _asks_list(question: Any) -> bool:
    return not isinstance(question, str) or _ASKS_LIST.search(question) is not None


_ASKS_LIST = re.compile(r"\blists?\b|\barrays?\b|json|python|\bprint|列表|数组", re.IGNORECASE)


def is_unanswered(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry has a question, and a list of answers that is empty (SQuAD 2), or all are rejected."""
    asked = _column(entry, _ASKED, lambda value: isinstance(value, str) and bool(value.strip()))
    said = entry.get("answers")
    if isinstance(said, Mapping):
        said = said.get("text")
    return asked is not None and isinstance(said, list) and not accepted(said)


def said_by_annotators(value: Any) -> list[str] | None:
    """Return the texts of VQAv2's and VizWiz' answers, what most annotators say first; None for anything else.

    Those that annotators are not confident of (`answer_confidence: no`), or rejected, are left out.
    """
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, Mapping) for one in value):
        return None
    if any(name in one for one in value for name in ("rank", "score", "rating")):  # of several models
        return None
    if not all(isinstance(one.get("answer"), str) for one in value):
        return None
    texts = [one["answer"] for one in accepted(value)]
    counts = Counter[str]()
    for one in accepted(value):
        votes = next((one[name] for name in _COUNTS if _is_number(one.get(name))), 1)
        counts[one["answer"]] += votes
    return sorted(texts, key=lambda text: (not text.strip(), -counts[text]))


_COUNTS = ("count", "votes", "num_votes", "vote_count", "freq", "frequency")
"""Keys of how many annotators gave an answer."""


def answers_of_several(value: Any) -> list[str] | None:
    """Return the answers to several questions, of each its first; None if they are none."""
    if isinstance(value, Mapping):  # CoQA, QuAC
        value = next((value[name] for name in ("input_text", "texts", "text") if name in value), None)
    elif (texts := texts_of(value)) is not None:
        return texts
    found = [one if isinstance(one, str) else first_answer(one) for one in value] if isinstance(value, list) else [None]
    texts = [one for one in found if one is not None]
    return texts if len(texts) == len(found) else None


def texts_of(value: Any) -> list[str] | None:
    """Return a list of texts, also one that is written as JSON or by Python; None for anything else."""
    if isinstance(value, str) and value.strip()[:1] == "[":
        value = from_text(value.strip())
    return value if isinstance(value, list) and all(isinstance(one, str) for one in value) else None


def captions_of(value: Any) -> list[str] | None:
    """Return the captions of several annotators that are not rejected: texts, or objects of a `caption`; else None."""
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(one, Mapping) and "caption" in one for one in value)
    ):
        value = [one["caption"] for one in accepted(value, ())]
    return texts_of(value)


def only(value: Any) -> Any:
    """Return the entry of a list of length 1; anything else as it is."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _column(entry: Mapping[str, Any], names: Sequence[str], fits: Any) -> str | None:
    lower = {column.lower(): column for column in reversed(list(entry))}
    return next((lower[name] for name in names if name in lower and fits(entry[lower[name]])), None)


def _meanings(value: Any, options: Options) -> dict[AnswersAs, int]:
    """Return the number of the choice that an answer means, by each way of reading it (letter, index, ...)."""
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
    labels = [label.upper() for label in options.labels]
    letters = options.letters
    found: dict[AnswersAs, int] = {}
    columns = [column.lower() for column in options.columns]
    if len(columns) > 1 and text.lower() in columns:
        found["letter"] = columns.index(text.lower())
    bare = re.fullmatch(r"\(?(\w+)[).:]?", text)
    if bare is not None and bare[1].upper() in labels:
        found["letter"] = labels.index(bare[1].upper())
    elif bare is not None and bare[1].upper() in letters:
        found["letter"] = letters.index(bare[1].upper())
    same = [number for number, one in enumerate(options.texts) if one.casefold() == text.casefold()]
    if len(same) == 1:
        found["text"] = same[0]
    for number, (letter, one) in enumerate(zip(letters, options.texts, strict=True)):
        if re.fullmatch(rf"\(?{letter}[).:]+\s*{re.escape(one)}\.?", text, re.IGNORECASE):
            found["letter"] = number
    if re.fullmatch(r"\d{1,2}", text) and (len(columns) > 1 or not any(label.isdigit() for label in labels)):
        number = int(text)
        count = len(options.texts)
        found |= {"index": number} if number < count else {}
        found |= {"number": number - 1} if 0 < number <= count else {}
    return found


def answers_as(entries: Iterable[tuple[Mapping[str, Any], str]]) -> AnswersAs | None:
    """Return the way in which the answers of entries are given (`AnswersAs`), if only one way fits all of them.

    Raises:
        SampleError: One counts from 0, another from 1.
    """
    fitting: set[AnswersAs] | None = None
    rows: list[dict[AnswersAs, int]] = []
    alone: dict[AnswersAs, Any] = {}  # an answer that only means this
    for entry, right in entries:
        options = options_of(entry)
        answer = only(entry.get(right))
        if options is None or options.written or not _is_plain(answer):
            continue
        rows.append(_meanings(answer, options))
        found = set(rows[-1])
        fitting = found if fitting is None else fitting & found
        alone |= dict.fromkeys(found, answer) if len(found) == 1 else {}
    if "index" in alone and "number" in alone:
        raise SampleError(
            f"answers to choices are {alone['index']!r} in one row, which counts from 0, and {alone['number']!r} in "
            "another, as many as there are choices, which counts from 1: write the letters of the right choices"
        )
    if not fitting or any(len({row[name] for name in fitting}) > 1 for row in rows):
        return None
    return min(fitting)


def chosen(value: Any, options: Options, column: str, given: AnswersAs | None = None) -> int | None:
    """Return the number of the choice that an answer names, from 0; None for an answer in words of its own.

    Raises:
        SampleError: It may be several of them, or none.
    """
    found = _meanings(value, options)
    if given in found:
        return found[given]
    if given in ("index", "number"):
        found = {name: number for name, number in found.items() if name not in ("index", "number")}
    elif "index" in found and column.lower().endswith(("idx", "index")):
        found.pop("number", None)
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    shown = f"`{column}` is {value!r}, with {len(options.texts)} choices in {', '.join(options.columns)}"
    if found:
        raise SampleError(
            f"{shown}: it may mean {' or '.join(sorted({options.texts[one] for one in found.values()}))}. Write the "
            "letter of the right choice; or convert the list, and say what numbers mean: --answers-as index (from 0) "
            "or --answers-as number (from 1)"
        )
    said = str(value)
    is_own = any(_is_in(said, one) for one in options.texts) or re.search(
        rf"\b[{''.join(options.letters)}]\b", _ARTICLE.sub("", said)
    )
    if not isinstance(value, str) or not is_own or not said.strip("0123456789. "):
        raise SampleError(f"{shown}: it is none of these. Write its letter, its text or its number")
    return None


_ARTICLE = re.compile(r"(?:(?<=[.!?] )|^)[AI] (?!is\b|was\b|and\b|or\b|because\b|since\b)(?=\w)")


def _is_in(said: str, choice: str) -> bool:
    """Return whether an answer has the text of a choice in it; a short one only as a word: `no` is not in `unknown`."""
    word = re.escape(choice) if len(choice) > 3 else rf"(?<![A-Za-z0-9]){re.escape(choice)}(?![A-Za-z0-9])"
    return re.search(word, said, re.IGNORECASE) is not None


# Texts ----------------------------------------------------------------------------------------------------------------


def columns_of(entry: Mapping[str, Any]) -> list[str]:
    """Return the columns beside a question that are known to belong to it, and are filled."""
    options = options_of(entry)
    names = _named(tuple(entry)).contexts
    contexts = [name for name in names if entry[name] not in ("", [], {}) and not is_missing(entry[name])]
    return [*contexts, *(options.columns if options is not None else ())]


def composed(entry: Mapping[str, Any], pair: tuple[str, str], given: AnswersAs | None = None) -> tuple[str, str | None]:
    """Return a question with what belongs to it, and its answer; None: it is not one of choices.

    Raises:
        SampleError: A context or a choice is not understood, or it is not clear which choice is right.
    """
    asked = entry[pair[0]]
    answer = None
    beside = {name: value for name, value in entry.items() if name not in pair}
    contexts = [_context(name, beside[name]) for name in _named(tuple(beside)).contexts]
    contexts = [text for text in contexts if text and text not in asked]
    is_behind = pair[0] == "instruction"
    question = "\n".join(filter(None, [asked, *contexts] if is_behind else [*contexts, asked]))
    more = entry.get("input") or entry.get("inputs")  # of Alpaca, of M3IT
    if isinstance(more, str) and more and not is_missing(more) and pair[0] not in ("input", "inputs"):
        question = f"{question}\n{more}" if question else more
    options = options_of(beside)
    if options is None:
        return question, answer
    if not _has_lines(asked, options):
        question = f"{question}\n{options.lines}"
    if options.written:
        return question, answer
    right = only(entry[pair[1]])
    number = chosen(right, options, pair[1], given) if _is_plain(right) else None
    if number is None:
        return question, answer
    if _ASKS_LETTER.search(asked) is None:
        question = f"{question}\n{_LETTER}"
    return question, options.letters[number]


_COLUMN = re.compile(r"\{([^{}]+)\}")


def template_columns(template: str) -> list[str]:
    """Return the columns in a template of a question."""
    return list(dict.fromkeys(_COLUMN.findall(template)))


def name_column(column: str) -> str:
    """Return the column with the names of the classes whose numbers are in another."""
    return "label_name" if column == "label" else f"{column}_name"


def named_value(entry: Mapping[str, Any], column: str) -> Any:
    """Return a value of an entry; of the number of a class, its name."""
    value = entry.get(column)
    return entry.get(name_column(column), value) if isinstance(value, int) else value


def with_texts(template: str, texts: Mapping[str, str]) -> str:
    """Return a template with the texts of its columns."""
    return _COLUMN.sub(lambda match: texts[match[1]], template.replace("\\n", "\n"))


def filled(
    template: str, entry: Mapping[str, Any], pair: tuple[str, str] | None, given: AnswersAs | None = None
) -> tuple[str, str, str | None]:
    """Return a question by a template, the column of its answer, and the right one of its choices.

    Choices that the template leaves out stand behind it; where it shows them without letters, the right text is said.

    Raises:
        SampleError: A column has no text, there is no answer, or it is not clear which choice is right.
    """
    right = pair[1] if pair is not None else _column(entry, (*_SAID, *_RIGHT), _is_plain)
    if right is None:
        free = {name: value for name, value in entry.items() if name not in template_columns(template)}
        right = _column(free, TOLD, _is_plain)
    if right is None:
        raise SampleError(f"there is no answer to the question: {', '.join(entry)}")
    names = (f"{right}_name", *(("category",) if right == "target" else ()))  # of the number of a class; of ESC-50
    if pair is None:
        right = next((name for name in names if _is_plain(entry.get(name))), right)
    columns = template_columns(template)
    texts = {}
    for column in columns:
        value = named_value(entry, column)
        listed = (
            _listed(column, value) if isinstance(value, list | tuple | Mapping) and column.lower() in CHOICES else None
        )
        texts[column] = listed.lines if listed else str(value) if _is_plain(value) else _context(column, value)
    question = with_texts(template, texts)
    options = options_of(entry)
    if options is None:
        return question, right, None
    is_shown = set(options.columns) <= set(columns)
    if not is_shown and not _has_lines(question, options):
        question = f"{question}\n{options.lines}"
    if options.written or not _is_plain(only(entry[right])):
        return question, right, None
    number = chosen(only(entry[right]), options, right, given)
    if number is None:
        return question, right, None
    if not _has_lines(question, options):
        return question, right, options.texts[number]
    if not is_shown and _ASKS_LETTER.search(question) is None:
        question = f"{question}\n{_LETTER}"
    return question, right, options.letters[number]


def _context(column: str, value: Any) -> str:
    texts = [] if is_missing(value) else _paragraphs(value)
    if texts is None:
        raise SampleError(
            f"`{column}` belongs to the question, and is not understood: expected a text, found {str(value)[:200]!r}. "
            "Write it as one, or convert the list with --question or --ignore"
        )
    return "\n".join(text.strip() for text in texts if text.strip())


_TEXTS = ("text", "sentences", "paragraph_text", "passage_text", "contexts", "content")
_BESIDE_TEXTS = (*_TEXTS, "title", "labels", "meshes")


def _paragraphs(value: Any) -> list[str] | None:
    """Return the texts of a context, each behind its title: texts, objects of both, or lists of both; None: no texts.

    `[title, sentences]` and `{title, sentences}` are of HotpotQA, `passage_text` of MS MARCO, `contexts` of PubMedQA.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        texts = next((value[name] for name in _TEXTS if name in value), None)
        titles = value.get("title")
        others = (name for name in value if name not in _BESIDE_TEXTS and not is_metadata(str(name)))
        if texts is None or any(_is_long(value[name]) for name in others):
            return None
        if isinstance(texts, list | tuple) and isinstance(titles, list | tuple) and len(texts) == len(titles):
            return _paragraphs(list(zip(titles, texts, strict=True)))
        if isinstance(titles, str):
            return _paragraphs([(titles, texts)])
        return _paragraphs(texts) if not titles else None
    if not isinstance(value, list | tuple):
        return None
    found: list[str] = []
    for one in value:
        if isinstance(one, list | tuple) and len(one) == 2 and isinstance(one[0], str):
            texts = [one[1]] if isinstance(one[1], str) else one[1]
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
                return None
            found += [one[0], _joined(texts)]
        elif isinstance(one, str):
            found.append(one)
        elif isinstance(one, Mapping) and (texts := _paragraphs(one)) is not None:
            found += texts
        else:
            return None
    return found


def _joined(sentences: Sequence[str]) -> str:
    """Return sentences as one text; those of HotpotQA have the space before them."""
    return "".join(one if one[:1].isspace() or not at else f" {one}" for at, one in enumerate(sentences))


def _has_lines(asked: str, options: Options) -> bool:
    """Return whether a question already shows its choices."""
    if options.written:
        return options.written in asked
    pairs = zip(options.letters, options.texts, strict=True)
    return all(re.search(rf"\(?\b{letter}\s?[).:]+\s*{re.escape(text)}", asked) for letter, text in pairs)


def unknown_texts(entry: Mapping[str, Any], known: Collection[str], pair: tuple[str, str] | None = None) -> list[str]:
    """Return the columns whose texts, of some words, may belong to a question, beside those that are known."""
    found = [
        name
        for name in _named(tuple(entry)).unknown
        if name not in known
        and (pair is None or name not in pair)
        and (_is_long(entry[name]) or (name.lower() in _NEVER_NAMES and any(texts_in(entry[name]))))
    ]
    if not found:
        return found
    options = options_of(entry)
    said = [str(entry[name]) for name in pair or ()]
    found = [name for name in found if options is None or name not in options.columns]
    found = [name for name in found if not all(any(text in one for one in said) for text in texts_in(entry[name]))]
    return [name for name in found if not said or not all(one in str(entry[name]) for one in said)]  # Alpaca's `text`


def not_said(entry: Mapping[str, Any], said: Sequence[Any]) -> list[str]:
    """Return the columns known to belong to a question whose text is in none of the texts `said` in the turns.

    Ids, paths and URLs are no such texts, nor are settings (`options: {"temperature": 0, "stop": ["."]}`).
    """
    names = _named(tuple(entry))
    heard = [name for name in names.unknown if _OF_SOUNDS.fullmatch(name.lower())]
    timed = {name: said_in for name in entry if name not in heard and (said_in := _timed_texts(entry[name]))}
    if not (names.contexts or names.choices or names.series or heard or timed):
        return []
    texts = {name: [one for one in texts_in(entry[name]) if not _is_id(one)] for name in names.contexts}
    lists = [{name: entry[name]} for name in names.choices if not _are_settings(entry[name])]
    for columns in (*lists, {name: entry[name] for name, *_ in names.series}):
        texts |= _choices_in(columns)
    whole = "\n".join(text for one in said for text in texts_in(one))
    lost = [name for name, of in texts.items() if not all(text in whole for text in of)]
    words = _spoken(whole)
    timed_lost = (name for name, of in timed.items() if not _are_in(words, of))
    return [*lost, *(name for name in heard if not _are_in(words, entry[name])), *timed_lost]


def _timed_texts(value: Any) -> list[str]:
    """Return what is said in a sound, by its list of sentences or words with their times (Whisper, WhisperX)."""
    ones = value if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping) else ()
    if not ones or "role" in ones[0] or _TIMES.isdisjoint(ones[0]):
        return []
    return [text for one in ones for key in ("text", "word") if isinstance(text := one.get(key), str)]


_TIMES = frozenset(("start", "begin", "start_time", "begin_time", "timestamp", "offset", "start_ms"))


def _are_in(words: str, value: Any) -> bool:
    return is_missing(value) or all(_spoken(one) in words for one in texts_in(value))


def _spoken(text: str) -> str:
    """Return a text without capitals and punctuation, which transcripts may lack."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _choices_in(columns: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the texts of choices by their columns; of what is not understood, all texts."""
    try:
        options = options_of(columns)
    except SampleError:
        return {name: texts_in(value) for name, value in columns.items()}
    return {} if options is None else dict.fromkeys(options.columns, list(options.texts) or [options.written])


def _is_id(text: str) -> bool:
    return _is_name(text) and (text.isascii() or "://" in text) and ("=" not in text or "://" in text)


def _are_settings(value: Any) -> bool:
    return isinstance(value, Mapping) and not any(_LABEL.fullmatch(str(key).lower()) for key in value)


def is_metadata(column: str) -> bool:
    """Return whether a column is known to say something of a sample, or of its answer, and not to be part of it."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|[ -]", "_", column).lower()  # fullAnswer, l2-category
    return column.startswith("__") or name in _METADATA or name in _OF_ANSWERS or bool(_ENDINGS.fullmatch(name))


def is_silent(column: str, value: Any) -> bool:
    """Return whether a column is known to say something of a sample, and nothing that a model could learn."""
    name = column.lower()
    are_tokens = name.endswith(("token", "tokens")) and value is not None and not _is_number(value)  # no count of them
    is_told = name in _OF_ANSWERS or are_tokens or _is_long(value)
    return column.startswith("__") or (is_metadata(column) and not is_told)


def question_with(columns: Sequence[str], asked: str) -> str:
    """Return the template of a question with other columns: before it, and units of its answer behind it."""
    units = [name for name in columns if name.lower() in _UNITS]
    before = [f"{{{name}}}" for name in columns if name not in units]
    return "\\n".join([*before, f"{{{asked}}}" + "".join(f" (in {{{name}}})" for name in units)])


def texts_in(value: Any) -> list[str]:
    """Return all texts in a value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [text for one in value for text in texts_in(one)]
    return [value.strip()] if isinstance(value, str) else []


def short_text(value: Any) -> str | None:
    """Return the value if it is a text of few words; None for numbers, names of files and the like."""
    text = value.strip() if isinstance(value, str) and not is_missing(value) and _ANY_LETTER.search(value) else ""
    return text if text and not _is_name(text) and not _is_long(text) else None


def _is_name(text: str) -> bool:
    """Return whether a text is nothing, or an id, a path or a URL."""
    return " " not in text and (not text or any(one.isdigit() or one in "/_" for one in text))


def _is_long(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_long, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_long, value)) or sum(short_text(one) is not None for one in value) > 1
    if not isinstance(value, str) or "://" in value[:10]:
        return False
    is_long = len(value.split()) >= _WORDS or len(_CJK.findall(value)) >= 2 * _WORDS
    return is_long and _ANY_LETTER.search(value) is not None  # a box is no text
