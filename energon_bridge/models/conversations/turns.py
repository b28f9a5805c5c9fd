"""Conversations as lists have them: which of their forms are known, and what each turn means.

    messages, conversations, conversation     turns: `role` and `content`, or `from` and `value`; `{human, assistant}`
                                              is two turns, and so is a list of two texts; or JSON text of such a list
    texts, dialog, qa_pairs                   pairs: the_cauldron, FineVision, Docmatix, VisDial
    questions, answers                        lists of as many texts, also beside a story or a list of choices: OCR-VQA,
                                              CoQA, QuAC, RACE
    instruction, input, output; query,        a question and its answer, with `system` and earlier pairs as `history`:
    response; and the other PAIRS             Alpaca, LLaMA-Factory, ms-swift
    function_call, tool_call                  turns with the JSON of calls: the assistant's `tool_calls`
    observation, tool_response, function      turns with the result of a call: the role `tool`
    answers as JSON of calls, beside `tools`  likewise: xLAM
    contents, or turns with `parts`           Gemini; `data`, a list of texts in turn, is UltraChat's
    context, options, A, B, …                 what else belongs to a question (`questions`)
    chosen, rejected…; kto_tag, label         preferences, which are no conversation to learn (`preferred` makes one)

`energon convert` and the training script read conversations by these functions, so that one refuses what the other
could not learn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from types import MappingProxyType
from typing import Any, Literal

from energon_bridge.core.errors import SampleError, SkipSample
from energon_bridge.models.conversations.parts import (
    MAPPING,
    MEDIA,
    PARTS,
    PLACES,
    RawTurn,
    check_no_file,
    part_kind,
    part_text,
    short,
)
from energon_bridge.models.conversations.places import Medium as Medium, spelled
from energon_bridge.models.conversations.questions import (
    CHOICES,
    CONTEXTS,
    AnswersAs,
    answers_of_several,
    choice_pair,
    composed,
    doubt_of_answer,
    first_answer,
    is_missing,
    lost_thoughts,
    not_said,
    question_with,
    texts_in,
    texts_of,
    unknown_texts,
)
from energon_bridge.models.conversations.segments import is_option
from energon_bridge.models.conversations.withheld import is_rejecting, is_weight, learned_if

CONVERSATIONS = ("messages", "conversations", "conversation")
PAIRS = (
    *(("instruction", "output"), ("instruction", "response"), ("query", "response"), ("question", "answer")),
    *(("question", "response"), ("prompt", "completion"), ("prompt", "response"), ("human", "assistant")),
    *(("user", "assistant"), ("human", "gpt"), ("input", "output")),
    *(("query", "answer"), ("problem", "solution"), ("problem", "answer"), ("q", "a")),
    *(("instruction", "outputs"), ("inputs", "outputs"), ("inputs", "targets")),
)
SYSTEMS = ("system", "system_prompt", "system_message", "system_instruction", "systemPrompt", "systemInstruction")
"""Columns of the system prompt beside turns or a pair."""
BESIDE_PAIRS = ("input", "history", "system", "tools")
"""Columns that belong to a pair without being part of its question (`questions` has those)."""
KNOWN_BESIDE = {
    *(*BESIDE_PAIRS, *SYSTEMS, "inputs", "functions", "objects", "files", "kto_tag", "label"),
    *("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images"),
    *(f"{kind}{ending}" for kind in ("image", "img", "video", "audio", "sound") for ending in ("", "s")),
}
"""Names that never are texts of a question."""

_PAIRS_OF = ("texts", "dialog", "dialogs", "dialogue", "qa_pairs", "qas", "qa", "questions")
_ASKED_AND_SAID = ("questions", "answers")
SEVERAL = (*_PAIRS_OF, _ASKED_AND_SAID[1], "QA")
"""Columns of several questions with their answers."""
_CALLS = ("function_call", "tool_call")
_RESULTS = ("observation", "tool_response", "function", "ipython")
KNOWN = ("system", "user", "assistant", "tool")
ROLES: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in KNOWN},
        **{"developer": "system", "human": "user"},
        **dict.fromkeys(("gpt", "chatgpt", "chatbot", "bard", "bing", "bot", "model", *_CALLS), "assistant"),
        **dict.fromkeys(_RESULTS, "tool"),
    }
)
"""The role that each name of a role in data stands for."""

_DETAILS = ("train_detail", "training_detail")

SAYING = ("tool_calls", "reasoning_content", "thinking", "reasoning")  # in place of a content


def read_turns(entry: Mapping[str, Any], answers_as: AnswersAs | None = None) -> list[RawTurn] | None:
    """Return the turns of an entry in one form; None if it is no conversation.

    Raises:
        SampleError: It is one that is not understood, has preferences, or texts that belong to its questions, or may.
    """
    entry = _with_pairs(with_turns(entry))
    name = form_of(entry)
    pair = find_pair(entry)
    if name is None and pair is None and not has_preferences(entry):
        return None
    if has_preferences(entry):
        raise SampleError(
            f"has preferences ({', '.join(_preferences(entry))}), which are not learned: to learn only the preferred "
            "answers, convert the list with --preferred; a column that means something else needs another name"
        )
    if name is not None:
        if lost := not_in_turns(entry):
            raise SampleError(
                f"`{lost[0]}` has a text beside `{name}` ({short(entry[lost[0]])}) that may belong to a question, and "
                f"no turn has it: write it into its turn, or convert the list with --ignore {' --ignore '.join(lost)}"
            )
        turns = known_turns(_listed(entry, name))
        if (lost_thought := lost_thoughts(without(entry, name), [entry[name]])) is not None:
            raise SampleError(lost_thought)
        _check_flags_beside(entry, turns)
        for other in (other for other in CONVERSATIONS if other != name and entry.get(other)):
            said = "\n".join(text for turn in turns for text in _said_by(turn))
            if any(text not in said for turn in known_turns(_listed(entry, other)) for text in _said_by(turn)):
                raise SampleError(
                    f"`{other}` says something else than `{name}` beside it, and only `{name}` would be learned: "
                    f"convert the list with --ignore {other}, or --ignore {name}"
                )
    else:
        assert pair is not None
        if unknown := unknown_texts(entry, KNOWN_BESIDE, pair):
            raise SampleError(
                f"`{unknown[0]}` has a text beside `{pair[0]}` and `{pair[1]}` ({short(entry[unknown[0]])}), which "
                f"may belong to the question: convert the list with --ignore {unknown[0]}, or with the text of the "
                f"question, as --question '{question_with(unknown[:1], pair[0])}'"
            )
        if doubt := doubt_of_answer(entry, pair):
            raise SampleError(doubt)
        turns = _turns_of_pair(entry, pair, answers_as)
    return turns


def _check_flags_beside(entry: Mapping[str, Any], turns: Sequence[RawTurn]) -> None:
    """Raise SampleError for what says beside the turns which of them are learned: a list, or NeMo's `mask`."""
    for name, value in entry.items():
        is_list = isinstance(value, list | tuple) and len(value) > 1 and {*map(str, value)} <= {*_TRUE_OR_NOT}
        is_role = isinstance(value, str) and ROLES.get(value.lower()) == "assistant"
        if (is_list or is_role) and (name == "weights" or learned_if(name) is not None):
            raise SampleError(
                f"`{name}` is {short(value)} beside {len(turns)} turns, and says which are learned: write it into the "
                "turns, as weight: 0 or 1, or leave it out (energon convert with --ignore)"
            )


_TRUE_OR_NOT = ("0", "1", "0.0", "1.0", "True", "False")


def _said_by(turn: RawTurn) -> list[str]:
    """Return the texts of a turn, without places."""
    content = content_of(turn) if isinstance(turn, MAPPING) else None
    parts = content if isinstance(content, list | tuple) else [content]
    texts = (part_text(part) or "" for part in parts if part_kind(part) == "text")
    return [PLACES.sub("", text).strip() for text in texts]


def not_in_turns(entry: Mapping[str, Any]) -> list[str]:
    """Return the columns beside turns that are known to belong to questions, and whose texts no turn has."""
    said = [entry[name] for name in CONVERSATIONS if name in entry]
    whole = "\n".join(text for one in said for text in texts_in(one)) if any(map(entry.get, _EARLIER)) else ""
    earlier = (name for name in _EARLIER if not is_missing(entry.get(name)))
    return [
        *not_said(entry, said),
        *(name for name in earlier if not all(text in whole for text in texts_in(entry[name]))),
    ]


_EARLIER = ("history", "input", "inputs")


def with_turns(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry whose turns are a list with a known name; what lies beside them as JSON text is parsed, too.

    Raises SampleError if a text is no list of turns.
    """
    entry = of_programs(entry)
    name = form_of(entry)
    if name is None:
        pairs = _pairs_of(entry)
        return entry if pairs is None or pairs[0] != _PAIRS_OF[0] else _with_pairs(entry)
    if not isinstance(entry[name], str) or not entry[name].lstrip().startswith(("[", "{")):
        return entry
    lists = {key: json.loads(value) for key, value in entry.items() if key != name and _is_json_list(value)}
    return {**entry, **lists, name: list(_listed(entry, name))}


def has_pairs(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry has several pairs in place of turns: a list of them, or a list of questions."""
    return _pairs_of(_of_videochat2(entry)) is not None or _questions_of(entry) is not None


def _with_pairs(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry with its pairs as its turns, and what is beside them in the first. Raises SampleError."""
    entry = _of_videochat2(entry)
    listed = _pairs_of(entry)
    asked = _questions_of(entry)
    if form_of(entry) is not None or (listed is None and asked is None):
        return entry
    taken = (listed[0],) if listed is not None else _ASKED_AND_SAID
    pairs = list(listed[1]) if listed is not None else []
    rest = without(entry, *taken)
    if listed is None and asked is not None:
        said = answers_of_several(entry.get(_ASKED_AND_SAID[1], entry.get("answer")))
        if said is None or len(said) != len(asked):
            found = short(entry.get(_ASKED_AND_SAID[1], entry.get("answer")))
            raise SampleError(f"has {len(asked)} `{_ASKED_AND_SAID[0]}` and other answers than one for each: {found}")
        pairs = [{"question": one, "answer": answer} for one, answer in zip(asked, said, strict=True)]
        for name in [name for name in CHOICES if _is_list_for(rest.get(name), len(pairs))]:
            pairs = [{**pair, name: choices} for pair, choices in zip(pairs, rest.pop(name), strict=True)]
    contexts = {name: rest.pop(name) for name in list(rest) if name.lower() in CONTEXTS and name not in pairs[0]}
    return {**rest, CONVERSATIONS[-1]: [{**contexts, **pairs[0]}, *pairs[1:]]}


def _of_videochat2(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry with `QA` as pairs: `i` is the system prompt, or without `q`, as of captions, the question."""
    pairs = entry.get("QA")
    if not isinstance(pairs, list) or not all(isinstance(one, Mapping) and "a" in one for one in pairs):
        return entry
    asked = [
        {**without(one, "i"), "system": one.get("i")} if one.get("q") else {**without(one, "i"), "q": one.get("i")}
        for one in pairs
    ]
    return {**without(entry, "QA"), "qa": asked}


def _pairs_of(entry: Mapping[str, Any]) -> tuple[str, Sequence[Mapping[str, Any]]] | None:
    """Return the column of an entry with a list of pairs, or lists of their texts by name, and the pairs."""
    for name in _PAIRS_OF:
        pairs = entry.get(name)
        if isinstance(pairs, Mapping) and _asked(pairs) and len({*map(_length, pairs.values())}) == 1:
            pairs = [dict(zip(pairs, one, strict=True)) for one in zip(*pairs.values(), strict=True)]
        if isinstance(pairs, list) and pairs and all(isinstance(one, Mapping) and _asked(one) for one in pairs):
            return (name, pairs) if name == _PAIRS_OF[0] or find_pair(entry) is None else None
    return None


def _questions_of(entry: Mapping[str, Any]) -> list[str] | None:
    """Return the list of questions of an entry; None if it has none, or no answers."""
    asked = entry.get(_ASKED_AND_SAID[0])
    if (
        asked is None
        or not any(name in entry for name in (_ASKED_AND_SAID[1], "answer"))
        or find_pair(entry) is not None
    ):
        return None
    return texts_of(asked) or None


def _is_list_for(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(isinstance(one, list) for one in value)


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else None


def _asked(turn: Mapping[str, Any]) -> bool:
    return any(asked in turn and answer in turn for asked, answer in PAIRS)


def _is_json_list(value: Any) -> bool:
    if not isinstance(value, str) or not value.startswith("["):
        return False
    try:
        return isinstance(json.loads(value), list)
    except ValueError:
        return False


def find_pair(entry: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the names of an entry's question and answer, texts or turns, if it is a known pair."""
    pair = next((pair for pair in PAIRS if all(_is_said(entry.get(name)) for name in pair)), None)
    if pair == ("q", "a") and "b" in entry:  # a choice
        pair = None
    return choice_pair(entry) if pair is None else pair


def known_turns(turns: Sequence[Any]) -> list[RawTurn]:
    """Return turns with pairs taken apart, and calls and their results as `tool_calls` and the role `tool`.

    Raises:
        SampleError: A call is not understood.
    """
    known: list[RawTurn] = []
    before = None  # the name of the role before
    for turn in typed_turns(turns):
        name = role_name(turn)
        if name in _CALLS:
            calls = _calls(content_of(turn))
            if before in _CALLS and _goes_with(turn, known[-1]):
                known[-1] = {**known[-1], "tool_calls": [*known[-1]["tool_calls"], *calls]}
            else:
                known.append(
                    {**without(turn, "from", "value"), "role": "assistant", "content": "", "tool_calls": calls}
                )
        elif name in _RESULTS:
            known.append({**without(turn, "from", "value"), "role": "tool", "content": content_of(turn)})
        elif name is not None and _has_call(turn):
            calls = _calls(turn["function_call"])
            known.append({**without(turn, "function_call"), "content": content_of(turn) or "", "tool_calls": calls})
        else:
            known += [turn] if name is not None else _pair_turn(turn)
        before = name
    return known


def typed_turns(turns: Sequence[Any]) -> Sequence[Any]:
    """Return turns without those of NeMo, whose `type` says what their value is: parts of one turn, in their order.

    Those of one role that follow each other are one turn, with spaces between, as NeMo's prompts have them.
    """
    turns = [_of_gemini(turn) for turn in turns]
    if not any(_turn_kind(turn) not in (None, "text") for turn in turns):
        return turns
    made: list[dict[str, Any]] = []
    for turn in turns:
        kind = _turn_kind(turn)
        content = turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else None
        if kind is None and not isinstance(content, str):
            made.append(turn)
            continue
        options = {name: one for name, one in turn.items() if kind in MEDIA and is_option(name, kind)}
        kept = without(turn, "type", "value", "content", *options)
        part: dict[str, Any] = {"type": "text", "text": content}
        if kind in MEDIA:
            part = {"type": kind, kind: content, **options}
        last = made[-1] if made else {}
        if isinstance(last.get("content"), list) and without(last, "content") == kept:
            if part["type"] == "text":
                part["text"] = f" {content}"
            elif last["content"][-1]["type"] == "text":
                last["content"][-1]["text"] += " "
            else:
                last["content"].append({"type": "text", "text": " "})
            last["content"].append(part)
        else:
            made.append({**kept, "content": [part]})
    return made


def _turn_kind(turn: Any) -> Literal["text"] | Medium | None:
    """Return the kind of a NeMo turn's value, by its `type`; None for a turn without one."""
    kind = turn.get("type") if isinstance(turn, MAPPING) else None
    if not isinstance(kind, str) or role_name(turn) is None:
        return None
    return PARTS.get(kind) if isinstance(turn.get("value", turn.get("content")), str) else None


def _goes_with(turn: RawTurn, before: RawTurn) -> bool:
    """Return whether a call may stand in the turn of the one before: both are learned or not, and no key is lost."""
    kept = {
        name: value
        for name, value in without(turn, "from", "value", "role", "content").items()
        if learned_if(name) is None
    }
    is_same = is_learned("assistant", turn) == is_learned("assistant", before)
    return is_same and all(before.get(name) == value for name, value in kept.items())


def is_learned(role: str, turn: Mapping[str, Any]) -> bool:
    """Return whether the keys of a turn leave it to be learned. Raises SampleError for what cannot be honoured."""
    if details := next((name for name in _DETAILS if turn.get(name)), None):
        raise SampleError(f"a turn has {details}={turn[details]!r}, but turns are learned as a whole or not"[:500])
    said: list[bool] = []
    for name, value in turn.items():
        meaning = None if value is None else learned_if(name)
        if meaning is None:
            continue
        # Numbers are weights. For a mask, both 0 and 1 are in use for what is learned.
        if not isinstance(value, bool) and (not meaning or value not in (0, 1)):
            choices = "0 or 1, true or false" if meaning else "true (left out of the loss) or false"
            raise SampleError(
                f"a turn of {role!r} has {name}={value!r}, which cannot be honoured: give {choices}"[:500]
            )
        said.append(bool(value) is meaning)
        if said[-1] and meaning and role != "assistant" and not is_weight(name):  # those are written with every turn
            raise SampleError(
                f"a turn of {role!r} has {name}={value!r}, but only answers are learned: give the key to turns of the "
                "assistant only"
            )
    return all(said)


def doubts_of(value: Any, *, learned: bool = True) -> set[Doubt]:
    """Return what is doubtful about a text, or about all of several; nothing of another value.

    One that is not `learned`, but shown, may be empty, or say `None`.
    """
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(one, str) for one in texts):
        return set()
    found: set[Doubt] = {"escaped"} if any(map(_has_html, texts)) else set()
    if any(_has_mark(one, learned) for one in texts):
        found.add("marked")
    if learned and not any(map(str.strip, texts)):
        found.add("blank")
    return found | ({"missing"} if learned and all(one.strip() in MISSING for one in texts) else set())


def _has_html(text: str) -> bool:
    """Return whether a text has an entity of HTML, or, if it is no page of it, a tag."""
    found = ESCAPED.search(text)
    return found is not None and (found[0].startswith("&") or _PAGE.search(text) is None)


def _has_mark(text: str, learned: bool) -> bool:
    """Return whether a text has a token of models; places of media are some only where they are learned."""
    for place in reversed(spelled(text)) if "<" in text and not learned else ():
        text = text[: place.start] + text[place.end :]
    return MARK.search(text) is not None


def doubts_of_turns(entry: Mapping[str, Any]) -> set[Doubt]:
    """Return what is doubtful about the answers of a conversation that are learned, or about its texts (`escaped`).

    Raises SampleError as `read_turns`.
    """
    found: set[Doubt] = set()
    for turn in read_turns(entry) or ():
        role = ROLES.get(role_name(turn) or "")
        content = content_of(turn)
        parts = [content or ""] if content is None or isinstance(content, str) else content
        text = "".join(part_text(part) or "" if part_kind(part) == "text" else " . " for part in parts)
        is_answer = role == "assistant" and is_learned(role, turn) and not any(turn.get(key) for key in SAYING)
        found |= doubts_of(text, learned=is_answer)
    return found


LEARNED = ("caption", "text", "answers", "label_name")
SHOWN = ("context",)
"""Fields of sample types with texts that are learned, or shown."""
Doubt = Literal["blank", "missing", "escaped", "marked"]
"""What a text is that may be a mistake: empty, a missing value that was made a text, with entities of HTML, tokens."""
MARK = re.compile(r"<(?:[|｜][\w▁-]{1,40}[|｜]|/?s|pad|unk|[be]os|(?:start|end)_of_(?:turn|text)|image|video|audio)>")
"""Control tokens of models, and places of media."""
MISSING = frozenset(("N/A", "n/a", "NA", "#N/A", "<NA>", "None", "null", "NULL", "nan", "NaN"))
"""What Python, pandas, JSON, SQL and spreadsheets write for a missing value."""
ESCAPED = re.compile(
    r"&(?:amp|quot|apos|lt|gt|nbsp|#\d{1,6}|#x[0-9a-fA-F]{1,5});"
    r"|</?(?:b|i|u|em|strong|br|span|div|font|li|ul|ol|h[1-6])(?:\s+[\w-]+\s*=[^<>]{0,200})?\s?/?>|<a\s+href"
)
"""Entities of HTML, and tags that no model has as marks."""
_PAGE = re.compile(r"```|<(?:html|head|body|svg|table|!doctype)", re.IGNORECASE)


def system_prompt(entry: Mapping[str, Any]) -> Any:
    """Return the system prompt beside the turns or the pair of an entry."""
    said = next((entry[name] for name in SYSTEMS if entry.get(name) and not is_missing(entry[name])), None)
    return said.get("parts", said) if isinstance(said, Mapping) else said


def read_tools(entry: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools beside the turns or the pair of an entry; `functions` are those of OpenAI's first form.

    Raises:
        SampleError: They are no JSON schemas, or stand under another name.
    """
    if tools := listed_tools(entry.get("tools")):
        return tools
    functions = listed_tools(entry.get("functions"), "functions")
    if functions is None and (other := next((one for one in entry if _has_tools(one, entry[one])), None)):
        raise SampleError(f"`{other}` has tools ({short(entry[other])}), which would not be shown: call it `tools`")
    return functions and [{"type": "function", "function": one} for one in functions]


def _has_tools(name: str, value: Any) -> bool:
    """Return whether a column of another name than `tools` and `functions` has schemas of tools."""
    if not value or not any(word in name.lower() for word in ("tool", "function")) or name in CONVERSATIONS:
        return False
    with suppress(SampleError):
        tools = (tool.get("function", tool) for tool in listed_tools(value) or () if isinstance(tool, Mapping))
        return any(isinstance(tool, Mapping) and _SCHEMA & tool.keys() for tool in tools)
    return False


_SCHEMA = {"parameters", "input_schema"}


def listed_tools(tools: Any, name: str = "tools") -> list[Any] | None:
    """Return tools: a list, or JSON of one or of each. Raises SampleError for anything else."""
    try:
        if isinstance(tools, str | bytes):
            tools = json.loads(tools) if tools.strip() else None
        if not tools:
            return None
        listed = [tools] if isinstance(tools, Mapping) else tools
        if isinstance(listed, list | tuple):
            parsed = [json.loads(tool) if isinstance(tool, str | bytes) else tool for tool in listed]
            if all(isinstance(tool, Mapping) or callable(tool) for tool in parsed):
                return parsed
    except ValueError as error:
        raise SampleError(f"the {name} are not valid JSON: {error}: {tools!r}"[:500]) from error
    raise SampleError(f"{name} must be a list of JSON schemas, or JSON of one, got {tools!r}"[:500])


def form_of(entry: Mapping[str, Any]) -> str | None:
    """Return which of CONVERSATIONS an entry has."""
    return next((name for name in CONVERSATIONS if entry.get(name) is not None), None)


def _is_said(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(role_name(turn) is not None for turn in value)
    )


def _as_turns(value: Any, role: str) -> list[RawTurn]:
    return known_turns(value) if isinstance(value, list) else [{"role": role, "content": value}]


def _listed(entry: Mapping[str, Any], name: str) -> Sequence[Any]:
    turns = _parsed(entry[name], f"`{name}`")
    if isinstance(turns, Mapping):
        turns = next((turns[inner] for inner in CONVERSATIONS if inner in turns), turns)
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes) or not turns:
        raise SampleError(f"`{name}`: expected a list of turns, found {short(turns)}")
    return turns


def _turns_of_pair(
    entry: Mapping[str, Any], pair: tuple[str, str], answers_as: AnswersAs | None = None
) -> list[RawTurn]:
    asked = entry[pair[0]]
    answer = entry[pair[1]]
    if not _is_said(answer) or (pair[1].lower() == "answers" and texts_of(answer)):
        answer = first_answer(texts_of(answer) or answer)
    if isinstance(asked, str):
        asked, letter = composed(entry, pair, answers_as)
        answer = letter or answer
    if answer is None:
        raise SampleError(f"`{pair[1]}`: the answer is {short(entry[pair[1]])}, and no text or choice")
    turns: list[RawTurn] = []
    if isinstance(system_prompt(entry), str):
        turns.append({"role": "system", "content": system_prompt(entry)})
    history = _parsed(entry.get("history") or [], "`history`")
    if not isinstance(history, Sequence) or isinstance(history, str | bytes):
        raise SampleError(f"`history`: expected a list of pairs, found {short(history)}")
    for earlier in history:
        pair_turns = known_turns([earlier])
        if len(pair_turns) != 2 and role_name(earlier) is None:
            raise SampleError(f"`history`: expected pairs of texts, found {short(earlier)}")
        turns += pair_turns
    calls = _calls_in(answer) if entry.get("tools") or entry.get("functions") else None
    said = [{"role": "assistant", "content": "", "tool_calls": calls}] if calls else _as_turns(answer, "assistant")
    return [*turns, *_as_turns(asked, "user"), *said]


def _calls_in(answer: Any) -> list[dict[str, Any]] | None:
    """Return the calls of tools that an answer is, as JSON of `{"name", "arguments"}` or a list of these; else None."""
    if not isinstance(answer, str) or not answer.lstrip().startswith(("[", "{")):
        return None
    with suppress(ValueError, RecursionError):
        parsed = json.loads(answer)
        ones = parsed if isinstance(parsed, list) else [parsed]
        if ones and all(isinstance(one, Mapping) and one.keys() == {"name", "arguments"} for one in ones):
            return _calls(ones)
    return None


def _pair_turn(turn: Any) -> list[RawTurn]:
    """Return the two turns of a pair; anything else as it is."""
    if isinstance(turn, Mapping) and (pair := find_pair(turn)) is not None:
        flags = {}
        for name in turn.keys() - {*pair}:
            check_no_file(name, turn[name], "user")
            if learned_if(name) is not None:
                flags[name] = turn[name]
            elif is_rejecting(name, turn[name], turn):
                raise SampleError(f"a pair has {name}={turn[name]!r}, and was rejected: take the pair out, or the key")
        if unknown := unknown_texts(turn, KNOWN_BESIDE, pair):
            raise SampleError(
                f"a pair has a text in `{unknown[0]}` ({short(turn[unknown[0]])}), which may belong to its question, "
                "and would not be learned: write it into the question or the answer, or take the key out"
            )
        if doubt := doubt_of_answer(turn, pair):
            raise SampleError(f"in a list of pairs, {doubt}, where it is a column; in a pair, take the key out")
        *before, answer = _turns_of_pair(turn, pair)
        return [*before, {**flags, **answer}]
    if isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn):
        return [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return [turn]


def _has_call(turn: RawTurn) -> bool:
    call = turn.get("function_call")
    return call is not None and isinstance(call, MAPPING) and not turn.get("tool_calls")


def role_name(turn: Any) -> str | None:
    """Return the name of the role of a turn, as it is written, in small letters."""
    name = (turn.get("role") or turn.get("from")) if isinstance(turn, MAPPING) else None
    return name.strip().lower() if isinstance(name, str) else None


def content_of(turn: RawTurn) -> Any:
    """Return what a turn says: text, parts, or None."""
    return turn["content"] if turn.get("content") is not None else turn.get("value")


def _calls(value: Any) -> list[dict[str, Any]]:
    """Return calls in OpenAI's form: JSON of `{"name", "arguments"}`, or of a list of these."""
    parsed = _parsed(value, "a call")
    calls = []
    for one in parsed if isinstance(parsed, list) else [parsed]:
        call = one.get("function", one) if isinstance(one, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise SampleError(f"a call must be JSON with name and arguments, got {short(one)}")
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
            arguments = _parsed(arguments, "the arguments of a call")
        calls.append({"type": "function", "function": {"name": call["name"], "arguments": arguments}})
    return calls


def _parsed(value: Any, what: str) -> Any:
    if not isinstance(value, str | bytes):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise SampleError(f"{what}: expected JSON, found {short(value)} ({error})") from error


def without(turn: RawTurn, *names: str) -> dict[str, Any]:
    """Return a turn, or an entry, without some of its keys."""
    return {name: value for name, value in turn.items() if name not in names}


# Of other programs ----------------------------------------------------------------------------------------------------
#
# Gemini       contents: turns with parts, each a text, inlineData or fileData, in either spelling
# UltraChat    data: texts of a user and an assistant in turn


def of_programs(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry whose turns are Gemini's or UltraChat's with `messages`; any other as it is."""
    turns, texts = entry.get("contents"), entry.get("data")
    if isinstance(turns, list) and turns and all(isinstance(one, Mapping) and "parts" in one for one in turns):
        return {**without(entry, "contents"), "messages": turns}
    if {*entry} == {"id", "data"} and isinstance(texts, list) and all(isinstance(one, str) for one in texts):
        said = zip(cycle(("user", "assistant")), texts)
        return {"id": entry["id"], "messages": [{"role": role, "content": text} for role, text in said]}
    return entry


def _of_gemini(turn: Any) -> Any:
    """Return a turn with Gemini's `parts` as its content; any other as it is."""
    parts = turn.get("parts") if isinstance(turn, MAPPING) and turn.get("content") is None else None
    return {**without(turn, "parts"), "content": [*map(_part_of_gemini, parts)]} if isinstance(parts, list) else turn


def _part_of_gemini(part: Any) -> Any:
    given = _bare(part)
    file = _bare(given.get("inlinedata")) or _bare(given.get("filedata"))
    mime = str(file.get("mimetype"))
    if (kind := mime.partition("/")[0]) not in MEDIA:
        return part
    where = f"data:{mime};base64,{file['data']}" if "data" in file else file.get("fileuri")
    return {**without(given, "inlinedata", "filedata"), "type": kind, kind: where}


def _bare(part: Any) -> dict[str, Any]:
    """Return what a part has, with names that are the same in both spellings; nothing of what is no object."""
    given = part.items() if isinstance(part, Mapping) else ()
    return {name.replace("_", "").lower(): value for name, value in given if value is not None}


# Preferences ----------------------------------------------------------------------------------------------------------
#
# Lists for DPO have a chosen and a rejected answer, lists for KTO a tag for the whole entry. Learning all of their
# texts would teach the rejected ones, so only what is preferred can be taken, and only on request.


def has_preferences(entry: Mapping[str, Any], *, tags_only: bool = False) -> bool:
    """Return whether an entry marks which of its answers is preferred, or has a tag of preference on its only one."""
    return any(name in _TAGS or not tags_only for name in _preferences(entry))


def preferred(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry with its preferred answer only; one without preferences as it is.

    Raises:
        SkipSample: Its answer is not preferred.
        SampleError: Its preferred answer is not understood.
    """
    names = _preferences(entry)
    tag = next((name for name in names if name in _TAGS), None)
    if tag is not None and not _flag(tag, entry[tag]):
        raise SkipSample(f"left out by --preferred: `{tag}` is {entry[tag]!r}")
    kept = without(entry, *names)
    chosen = entry["chosen"] if "chosen" in names else None
    if chosen is None:
        return kept  # without tags, or rejected answers
    answer = _as_turns([chosen] if isinstance(chosen, Mapping) else chosen, "assistant")
    asked = next((pair for pair in PAIRS if _is_said(kept.get(pair[0]))), None)
    name = form_of(kept)
    if ROLES.get(role_name(answer[0]) or "") in ("user", "system"):  # the question is in it
        turns = answer
    elif name is not None:
        turns = [*known_turns(_listed(kept, name)), *answer]
    elif asked is not None:
        turns = _turns_of_pair({**kept, asked[1]: answer}, asked)
    else:
        raise SampleError(f"the question of the `chosen` answer is not found in {', '.join(kept) or 'nothing'}")
    return {**without(kept, *CONVERSATIONS, *(asked or ()), *BESIDE_PAIRS[: 3 * (name is None)]), "messages": turns}


def num_rejected(entry: Mapping[str, Any]) -> int:
    """Return how many rejected answers `preferred` leaves out of an entry."""
    return sum(name in ("rejected", "rejected_response", "rejected_messages") for name in _preferences(entry))


_TAGS = ("kto_tag", "label")
_CHOICES = ("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images")


def _preferences(entry: Mapping[str, Any]) -> list[str]:
    choices = [
        name for name in _CHOICES if isinstance(value := entry.get(name), str | list | tuple | Mapping) and value
    ]
    if form_of(entry) is not None or find_pair(entry) is not None:
        return choices + [name for name in _TAGS if _flag(name, entry.get(name)) is not None]
    is_asked = len(choices) > 1 or any(_is_said(entry.get(asked)) for asked, _ in PAIRS)
    return choices if "chosen" in choices and is_asked else []


def _flag(name: str, value: Any) -> bool | None:
    """Return a tag of preference as a bool; None if it is none, as a number in `label` that means something else."""
    numbers = {} if name == "label" else {"1": True, "0": False}
    return {"true": True, "false": False, **numbers}.get(str(value).strip().lower())
