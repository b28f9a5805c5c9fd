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
    context, options, A, B, …                 what else belongs to a question (`questions`)
    chosen, rejected…; kto_tag, label         preferences, which are no conversation to learn (`preferred` makes one)

`energon convert` and the training script read conversations by these functions, so that one refuses what the other
could not learn.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Literal

from energon_bridge.core.errors import SampleError, SkipSample
from energon_bridge.core.format.media import is_base64, kind_by_name
from energon_bridge.models.conversations.places import Medium as Medium, respelled, spelled, unwrapped
from energon_bridge.models.conversations.questions import (
    CHOICES,
    CONTEXTS,
    AnswersAs,
    answers_of_several,
    choice_pair,
    composed,
    first_answer,
    not_said,
    texts_in,
    texts_of,
    unknown_texts,
)
from energon_bridge.models.conversations.segments import check_unseen, is_option, part_options

MEDIA: tuple[Medium, ...] = ("image", "video", "audio")
RawTurn = Mapping[str, Any]
"""A turn as the sample has it, in any dialect; `conversation.Turn` is what is read from it."""

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
KNOWN_BESIDE = frozenset(
    (
        *(*BESIDE_PAIRS, *SYSTEMS, "inputs", "functions", "objects", "files", "kto_tag", "label"),
        *("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images"),
        *(f"{kind}{ending}" for kind in ("image", "img", "video", "audio", "sound") for ending in ("", "s")),
    )
)
"""Names that never are texts of a question."""

_PAIRS_OF = ("texts", "dialog", "dialogs", "dialogue", "qa_pairs", "qas", "qa")
_ASKED_AND_SAID = ("questions", "answers")
SEVERAL = (*_PAIRS_OF, *_ASKED_AND_SAID)
"""Columns of several questions with their answers."""
_CALLS = ("function_call", "tool_call")
_RESULTS = ("observation", "tool_response", "function", "ipython")
_KNOWN = ("system", "user", "assistant", "tool")
ROLES: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in _KNOWN},
        **{"developer": "system", "human": "user"},
        **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "bot", "model", *_CALLS), "assistant"),
        **dict.fromkeys(_RESULTS, "tool"),
    }
)
"""The role that each name of a role in data stands for."""

PARTS: Mapping[str, Literal["text"] | Medium] = MappingProxyType(
    {
        **dict.fromkeys(("text", "input_text", "output_text"), "text"),
        **dict.fromkeys(("image", "image_url", "input_image"), "image"),
        **dict.fromkeys(("video", "video_url", "input_video"), "video"),
        **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    }
)
"""The kind of medium, or text, that each `type` of a message's part stands for."""

WEIGHTS = ("weight", "loss", "loss_scale")
FLAGS: Mapping[str, bool] = MappingProxyType(
    {
        **dict.fromkeys((*WEIGHTS, "train", "training", "train_on_turn"), True),
        **dict.fromkeys(("mask", "masked"), False),
    }
)
"""Keys that say whether a turn is learned, and the value of those that are."""
_DETAILS = ("train_detail", "training_detail")

_SAYING = ("tool_calls", "reasoning_content", "thinking", "reasoning")  # in place of a content
_THOUGHTS = ("think", "thought", "thoughts", "cot", "chain_of_thought", "thinking_content", "reasoning_text")
_UNSAID = ("refusal", "audio")  # no template writes these
_PAYLOADS = ("url", "path", "src", "value", "source", "data", "bytes")
_HINTS = ("type", "index", "detail", "format", "media_type", "mime_type", "cache_control")
_OBJECTS = ("<ref-object>", "<bbox>")  # of ms-swift
_INLINE = re.compile(r"<(?:img|image|video|audio)>([^<>]+)</(?:img|image|video|audio)>")  # of Qwen-VL, Qwen-Audio
_PLACES = re.compile(r"<(image|video|audio)>")
_OWN_KEYS = frozenset({"role", "from", "content", "value"})
_CUT: tuple[Medium, ...] = ("video", "audio")
_SOUNDS = ("aac", "aif", "aiff", "amr", "flac", "m4a", "mp3", "mka", "oga", "ogg", "opus", "wav", "wma")
_SHOWN = 200
MAPPING = (dict, Mapping)  # in this order: an abstract class takes long to say what is one


def read_turns(entry: Mapping[str, Any], answers_as: AnswersAs | None = None) -> list[RawTurn] | None:
    """Return the turns of an entry in one form; None if it is no conversation.

    Raises:
        SampleError: It is one that is not understood, has preferences, or texts that belong to its questions, or may.
    """
    entry = _with_pairs(with_turns(entry))
    name = _named(entry)
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
                f"`{lost[0]}` has a text beside `{name}` ({_short(entry[lost[0]])}) that belongs to a question, and no "
                f"turn has it: write it into its turn, or convert the list with --ignore {' --ignore '.join(lost)}"
            )
        turns = known_turns(_listed(entry, name))
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
                f"`{unknown[0]}` has a text beside `{pair[0]}` and `{pair[1]}` ({_short(entry[unknown[0]])}), which "
                f"may belong to the question: convert the list with --ignore {unknown[0]}, or with the text of the "
                f"question, as --question '{{{unknown[0]}}}\\n{{{pair[0]}}}'"
            )
        turns = _turns_of_pair(entry, pair, answers_as)
    if entry.get("objects") and (mark := next((one for one in _OBJECTS if one in str(turns)), None)):
        raise SampleError(
            f"has `objects` for the places {mark!r} in its texts, which would be learned as they are: write the names "
            "and boxes into the texts, as the model has them"
        )
    return turns


def _said_by(turn: RawTurn) -> list[str]:
    """Return the texts of a turn, without places."""
    content = _content(turn) if isinstance(turn, MAPPING) else None
    parts = content if isinstance(content, list | tuple) else [content]
    texts = (part_text(part) or "" for part in parts if part_kind(part) == "text")
    return [_PLACES.sub("", text).strip() for text in texts]


def not_in_turns(entry: Mapping[str, Any]) -> list[str]:
    """Return the columns beside turns that are known to belong to questions, and whose texts no turn has."""
    return not_said(entry, [entry[name] for name in CONVERSATIONS if name in entry])


def with_turns(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry whose turns are a list with a known name; what lies beside them as JSON text is parsed, too.

    Raises SampleError if a text is no list of turns.
    """
    name = _named(entry)
    if name is None:
        pairs = _pairs_of(entry)
        return entry if pairs is None or pairs[0] != _PAIRS_OF[0] else _with_pairs(entry)
    if not isinstance(entry[name], str) or not entry[name].lstrip().startswith(("[", "{")):
        return entry
    lists = {key: json.loads(value) for key, value in entry.items() if key != name and _is_json_list(value)}
    return {**entry, **lists, name: list(_listed(entry, name))}


def has_pairs(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry has several pairs in place of turns: a list of them, or a list of questions."""
    return _pairs_of(entry) is not None or _questions_of(entry) is not None


def _with_pairs(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry with its pairs as its turns, and what is beside them in the first. Raises SampleError."""
    listed = _pairs_of(entry)
    asked = _questions_of(entry)
    if _named(entry) is not None or (listed is None and asked is None):
        return entry
    taken = (listed[0],) if listed is not None else _ASKED_AND_SAID
    pairs = list(listed[1]) if listed is not None else []
    rest = _without(entry, *taken)
    if listed is None and asked is not None:
        said = answers_of_several(entry.get(_ASKED_AND_SAID[1], entry.get("answer")))
        if said is None or len(said) != len(asked):
            found = _short(entry.get(_ASKED_AND_SAID[1], entry.get("answer")))
            raise SampleError(f"has {len(asked)} `{_ASKED_AND_SAID[0]}` and other answers than one for each: {found}")
        pairs = [{"question": one, "answer": answer} for one, answer in zip(asked, said, strict=True)]
        for name in [name for name in CHOICES if _is_list_for(rest.get(name), len(pairs))]:
            pairs = [{**pair, name: choices} for pair, choices in zip(pairs, rest.pop(name), strict=True)]
    contexts = {name: rest.pop(name) for name in list(rest) if name.lower() in CONTEXTS and name not in pairs[0]}
    return {**rest, CONVERSATIONS[-1]: [{**contexts, **pairs[0]}, *pairs[1:]]}


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
        name = _role_name(turn)
        if name in _CALLS:
            calls = _calls(_content(turn))
            if before in _CALLS and _goes_with(turn, known[-1]):
                known[-1] = {**known[-1], "tool_calls": [*known[-1]["tool_calls"], *calls]}
            else:
                known.append(
                    {**_without(turn, "from", "value"), "role": "assistant", "content": "", "tool_calls": calls}
                )
        elif name in _RESULTS:
            known.append({**_without(turn, "from", "value"), "role": "tool", "content": _content(turn)})
        elif name is not None and _has_call(turn):
            calls = _calls(turn["function_call"])
            known.append({**_without(turn, "function_call"), "content": _content(turn) or "", "tool_calls": calls})
        else:
            known += [turn] if name is not None else _pair_turn(turn)
        before = name
    return known


def typed_turns(turns: Sequence[Any]) -> Sequence[Any]:
    """Return turns without those of NeMo, whose `type` says what their value is: parts of one turn, in their order.

    Those of one role that follow each other are one turn, with spaces between, as NeMo's prompts have them.
    """
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
        kept = _without(turn, "type", "value", "content", *options)
        part: dict[str, Any] = {"type": "text", "text": content}
        if kind in MEDIA:
            part = {"type": kind, kind: content, **options}
        last = made[-1] if made else {}
        if isinstance(last.get("content"), list) and _without(last, "content") == kept:
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
    if not isinstance(kind, str) or _role_name(turn) is None:
        return None
    return PARTS.get(kind) if isinstance(turn.get("value", turn.get("content")), str) else None


def _goes_with(turn: RawTurn, before: RawTurn) -> bool:
    """Return whether a call may stand in the turn of the one before: both are learned or not, and no key is lost."""
    kept = _without(turn, "from", "value", "role", "content", *FLAGS)
    is_same = is_learned("assistant", turn) == is_learned("assistant", before)
    return is_same and all(before.get(name) == value for name, value in kept.items())


def is_learned(role: str, turn: Mapping[str, Any]) -> bool:
    """Return whether the keys of a turn leave it to be learned. Raises SampleError for what cannot be honoured."""
    if details := next((name for name in _DETAILS if turn.get(name)), None):
        raise SampleError(f"a turn has {details}={turn[details]!r}, but turns are learned as a whole or not"[:500])
    said: list[bool] = []
    for name, meaning in FLAGS.items():
        value = turn.get(name)
        if value is None:
            continue
        # Numbers are weights. For a mask, both 0 and 1 are in use for what is learned.
        if not isinstance(value, bool) and (not meaning or value not in (0, 1)):
            choices = "0 or 1, true or false" if meaning else "true (left out of the loss) or false"
            raise SampleError(
                f"a turn of {role!r} has {name}={value!r}, which cannot be honoured: give {choices}"[:500]
            )
        said.append(bool(value) is meaning)
        if said[-1] and meaning and role != "assistant" and name not in WEIGHTS:  # those are written with every turn
            raise SampleError(
                f"a turn of {role!r} has {name}={value!r}, but only answers are learned: give the key to turns of the "
                "assistant only"
            )
    return all(said)


def is_blank(value: Any) -> bool:
    """Return whether a text says nothing, or none of several."""
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(one, str) and not one.strip() for one in texts)


def has_empty_answer(entry: Mapping[str, Any]) -> bool:
    """Return whether an answer that would be learned is an empty text. Raises SampleError as `read_turns`."""
    for turn in read_turns(entry) or ():
        role = ROLES.get(_role_name(turn) or "")
        content = _content(turn)
        if role == "assistant" and is_learned(role, turn) and not any(turn.get(key) for key in _SAYING):
            parts = [content or ""] if content is None or isinstance(content, str) else content
            if not any(part_kind(part) != "text" or (part_text(part) or "").strip() for part in parts):
                return True
    return False


def system_prompt(entry: Mapping[str, Any]) -> Any:
    """Return the system prompt beside the turns or the pair of an entry."""
    return next((entry[name] for name in SYSTEMS if entry.get(name)), None)


def read_tools(entry: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools beside the turns or the pair of an entry; `functions` are those of OpenAI's first form.

    Raises:
        SampleError: They are no JSON schemas, or stand under another name.
    """
    if tools := listed_tools(entry.get("tools")):
        return tools
    functions = listed_tools(entry.get("functions"), "functions")
    if functions is None and (other := next((one for one in entry if _has_tools(one, entry[one])), None)):
        raise SampleError(f"`{other}` has tools ({_short(entry[other])}), which would not be shown: call it `tools`")
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


def _named(entry: Mapping[str, Any]) -> str | None:
    return next((name for name in CONVERSATIONS if entry.get(name) is not None), None)


def _is_said(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(_role_name(turn) is not None for turn in value)
    )


def _as_turns(value: Any, role: str) -> list[RawTurn]:
    return known_turns(value) if isinstance(value, list) else [{"role": role, "content": value}]


def _listed(entry: Mapping[str, Any], name: str) -> Sequence[Any]:
    turns = _parsed(entry[name], f"`{name}`")
    if isinstance(turns, Mapping):
        turns = next((turns[inner] for inner in CONVERSATIONS if inner in turns), turns)
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes) or not turns:
        raise SampleError(f"`{name}`: expected a list of turns, found {_short(turns)}")
    return turns


def _turns_of_pair(
    entry: Mapping[str, Any], pair: tuple[str, str], answers_as: AnswersAs | None = None
) -> list[RawTurn]:
    asked = entry[pair[0]]
    answer = entry[pair[1]]
    if not _is_said(answer):
        answer = first_answer(answer)
    if isinstance(asked, str):
        asked, letter = composed(entry, pair, answers_as)
        answer = letter or answer
    if answer is None:
        raise SampleError(f"`{pair[1]}`: the answer is {_short(entry[pair[1]])}, and no text or choice")
    turns: list[RawTurn] = []
    if isinstance(system_prompt(entry), str):
        turns.append({"role": "system", "content": system_prompt(entry)})
    history = _parsed(entry.get("history") or [], "`history`")
    if not isinstance(history, Sequence) or isinstance(history, str | bytes):
        raise SampleError(f"`history`: expected a list of pairs, found {_short(history)}")
    for earlier in history:
        pair_turns = known_turns([earlier])
        if len(pair_turns) != 2 and _role_name(earlier) is None:
            raise SampleError(f"`history`: expected pairs of texts, found {_short(earlier)}")
        turns += pair_turns
    return [*turns, *_as_turns(asked, "user"), *_as_turns(answer, "assistant")]


def _pair_turn(turn: Any) -> list[RawTurn]:
    """Return the two turns of a pair; anything else as it is."""
    if isinstance(turn, Mapping) and (pair := find_pair(turn)) is not None:
        for name in turn.keys() - {*pair}:
            _check_no_file(name, turn[name], "user")
        return _turns_of_pair(turn, pair)
    if isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn):
        return [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return [turn]


def _has_call(turn: RawTurn) -> bool:
    call = turn.get("function_call")
    return call is not None and isinstance(call, MAPPING) and not turn.get("tool_calls")


def _role_name(turn: Any) -> str | None:
    name = (turn.get("role") or turn.get("from")) if isinstance(turn, MAPPING) else None
    return name.strip().lower() if isinstance(name, str) else None


def _content(turn: RawTurn) -> Any:
    return turn["content"] if turn.get("content") is not None else turn.get("value")


def _calls(value: Any) -> list[dict[str, Any]]:
    """Return calls in OpenAI's form: JSON of `{"name", "arguments"}`, or of a list of these."""
    parsed = _parsed(value, "a call")
    calls = []
    for one in parsed if isinstance(parsed, list) else [parsed]:
        call = one.get("function", one) if isinstance(one, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise SampleError(f"a call must be JSON with name and arguments, got {_short(one)}")
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
        raise SampleError(f"{what}: expected JSON, found {_short(value)} ({error})") from error


def _without(turn: RawTurn, *names: str) -> dict[str, Any]:
    return {name: value for name, value in turn.items() if name not in names}


def _short(value: Any) -> str:
    return repr(value)[:_SHOWN]


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
    kept = _without(entry, *names)
    chosen = entry["chosen"] if "chosen" in names else None
    if chosen is None:
        return kept  # without tags, or rejected answers
    answer = _as_turns([chosen] if isinstance(chosen, Mapping) else chosen, "assistant")
    asked = next((pair for pair in PAIRS if _is_said(kept.get(pair[0]))), None)
    name = _named(kept)
    if ROLES.get(_role_name(answer[0]) or "") in ("user", "system"):  # the question is in it
        turns = answer
    elif name is not None:
        turns = [*known_turns(_listed(kept, name)), *answer]
    elif asked is not None:
        turns = _turns_of_pair({**kept, asked[1]: answer}, asked)
    else:
        raise SampleError(f"the question of the `chosen` answer is not found in {', '.join(kept) or 'nothing'}")
    return {**_without(kept, *CONVERSATIONS, *(asked or ()), *BESIDE_PAIRS[: 3 * (name is None)]), "messages": turns}


def num_rejected(entry: Mapping[str, Any]) -> int:
    """Return how many rejected answers `preferred` leaves out of an entry."""
    return sum(name in ("rejected", "rejected_response", "rejected_messages") for name in _preferences(entry))


_TAGS = ("kto_tag", "label")
_CHOICES = ("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images")


def _preferences(entry: Mapping[str, Any]) -> list[str]:
    choices = [
        name for name in _CHOICES if isinstance(value := entry.get(name), str | list | tuple | Mapping) and value
    ]
    if _named(entry) is not None or find_pair(entry) is not None:
        return choices + [name for name in _TAGS if _flag(name, entry.get(name)) is not None]
    is_asked = len(choices) > 1 or any(_is_said(entry.get(asked)) for asked, _ in PAIRS)
    return choices if "chosen" in choices and is_asked else []


def _flag(name: str, value: Any) -> bool | None:
    """Return a tag of preference as a bool; None if it is none, as a number in `label` that means something else."""
    numbers = {} if name == "label" else {"1": True, "0": False}
    return {"true": True, "false": False, **numbers}.get(str(value).strip().lower())


# Media ----------------------------------------------------------------------------------------------------------------
#
# A text has a place for an image, video or sound as `<image>`, `<video>` or `<audio>`, a list of parts as a part of
# that type. In an answer, and in a text that is a part, these words are text: they are only taken for that if every
# image, video and sound has a place elsewhere.


def medium_by_name(name: str) -> Medium | None:
    """Return the kind of medium in a part of a sample, by its name: `0.jpg`, `videos.0.mp4`, `audios.0.mp4`."""
    kind = kind_by_name(name)
    return av_medium_by_name(name) if kind == "av" else kind


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return the key by which the media of a sample are sorted: `2.jpg` before `10.jpg`."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def av_medium_by_name(name: str) -> Medium:
    """Return `video` or `audio` for a part of a sample with such a name, else None."""
    first, _, rest = name.lower().partition(".")
    return (
        "audio"
        if first in ("audio", "audios", "sound", "sounds") or (rest or first).rpartition(".")[2] in _SOUNDS
        else "video"
    )


def part_kind(part: Any) -> Literal["text"] | Medium | None:
    """Return the kind of a message's part: text or a medium; None if it is not understood."""
    if isinstance(part, str):
        return "text"
    if not isinstance(part, Mapping):
        return None
    if part.get("type") is not None:
        return PARTS.get(part["type"]) if isinstance(part["type"], str) else None
    return next((PARTS[name] for name in part if name in PARTS and part[name] is not None), None)


def part_text(part: Any) -> str | None:
    """Return the text of a part that is one."""
    text = part if isinstance(part, str) else part["text"] if part.get("text") is not None else part.get("value")
    return text if isinstance(text, str) else None


def part_payload(part: Mapping[str, Any], kind: Medium) -> Any:
    """Return the content, path or URL in a part of an image, video or sound; None for a placeholder.

    Raises:
        SampleError: It has several, or something that is not understood.
    """
    names = (f"{kind}_url", kind, f"input_{kind}", *_PAYLOADS)
    given = {name: value for name, value in part.items() if value is not None and not (name == "text" and not value)}
    payloads = [name for name in names if name in given]
    other = [name for name in given if name not in (*names, *_HINTS) and not is_option(name, kind)]
    if len(payloads) > 1 or other:
        raise SampleError(
            f"a part of a message is not understood, for its {', '.join(other or payloads)}: {_short(part)}. Write it "
            f'as {{"type": "{kind}", "{kind}": PATH}}'
        )
    return given[payloads[0]] if payloads else None


def unseen_medium(entry: Mapping[str, Any]) -> str | None:
    """Return the complaint about an entry without media that has a column naming one, so asks about it; else None.

    A context stands for itself, as the transcript of a video does. Beside turns, ids of videos and sounds are metadata.
    """
    has_turns = _named(entry) is not None
    contexts = {name for name in entry if name.lower() in CONTEXTS and entry[name]}
    is_about = has_turns or (not contexts and (find_pair(entry) is not None or has_pairs(entry)))
    for name, value in entry.items():
        found = _NAMES_MEDIUM.fullmatch(name.lower())
        first = value[0] if isinstance(value, list) and value else value
        if is_base64(first) or (isinstance(first, str) and first.startswith(_URIS)):
            return f"`{name}` has a file in it, which is no part of the sample: convert the list (energon convert)"
        is_file = isinstance(value, str) and kind_by_name(value) is not None
        if is_file and (found or _NAMES_FILE.fullmatch(name.lower()) or (name in contexts and " " not in str(value))):
            return (
                f"`{name}` names a file ({_short(value)}) that is no part of the sample, and the question would be "
                "learned without it: convert the list (energon convert), or call the column image, video or audio and "
                "add an auxiliary store to the mix"
            )
        is_id = isinstance(value, str | int) and not isinstance(value, bool) and value not in ("", -1)
        if found and is_id and is_about and (not has_turns or found[1] in _OF_IMAGES):
            return (
                f"`{name}` ({_short(value)}) seems to name what the question is about, and the sample has no image, "
                f"video or sound: add a column image, video or audio with its file, or leave this one out (energon "
                f"convert with --ignore {name})"
            )
    names = () if contexts else (*CONVERSATIONS, *SEVERAL)
    pairs = (one for name in names if isinstance(entry.get(name), list) for one in entry[name])
    unseen = next((one for pair in pairs if isinstance(pair, Mapping) and (one := unseen_medium(pair))), None)
    return unseen and unseen.partition(", or leave this one out")[0]


_URIS = ("data:image/", "data:video/", "data:audio/")
_OF_IMAGES = ("image", "img", "picture", "photo", "coco", "flickr", "vg")
_NAMES_MEDIUM = re.compile(rf"({'|'.join(_OF_IMAGES)}|video|vid|youtube|yt|audio|audiocap|sound)s?_?ids?")
_NAMES_FILE = re.compile(
    r"(image|img|picture|photo|video|audio|sound|speech|wav)s?_?(file_?)?(path|name|file|url)?s?|file_?(path|name)?"
    r"|attachments?|media|files"
)


def placed(turns: Sequence[RawTurn], there: Mapping[Medium, int]) -> list[RawTurn]:
    """Return turns whose places fit the media of a sample; `there` counts those that are not in its parts.

    `<image>` stands for a video where there are only videos, as in the lists of LLaVA-Video.

    Raises:
        SampleError: A text may or may not be a place.
    """
    turns = _respelled(_unwrapped(turns, there), there)
    places, literal, answered = _counted(turns)
    if not (places or literal or answered):
        return list(turns)
    if not places["video"] and not there.get("image") and 0 < places["image"] == there.get("video"):
        turns = [_as_videos(turn) for turn in turns]
        places, literal, answered = _counted(turns)
        answered["video"] += answered.pop("image", 0)
    for kind in MEDIA:
        count = places[kind]
        wanted = there.get(kind, 0)
        if (answered[kind] and (count != wanted or not count)) or (literal[kind] and wanted and not count):
            where = "an answer" if answered[kind] else "a text part"
            raise SampleError(
                f"{where} contains the placeholder '<{kind}>', and the questions have {count} for {wanted} {kind}s, so "
                f'it may be a place or a text: write places as parts {{"type": "{kind}"}}, and texts as parts '
                '{"type": "text", "text": …}'
            )
    return list(turns)


def check_turns(turns: Sequence[RawTurn]) -> None:
    """Check that turns are understood, and that there is something to learn.

    Raises:
        SampleError: It says what is wrong.
    """
    learned: list[bool] = []
    counts: Counter[str] = Counter()
    for turn in turns:
        name = _role_name(turn)
        content = None if name is None else _content(turn)
        says = name is not None and any(turn.get(key) for key in _SAYING)
        if not isinstance(content, str | list | tuple) and not (content is None and says):
            raise SampleError(f"a turn must have role and content, or from and value, got {_short(turn)}")
        if name is None or name not in ROLES:
            raise SampleError(f"the role {name!r} of a turn is not known: write {', '.join(_KNOWN)}")
        role = ROLES[name]
        learned.append(is_learned(role, turn) and role == "assistant")
        if unsaid := next((key for key in _UNSAID if turn.get(key) and not content), None):
            raise SampleError(
                f"a turn has no content but {unsaid}={_short(turn[unsaid])}: write what it says as content"
            )
        for part in content if isinstance(content, list | tuple) else (content or "",):
            kind = part_kind(part)
            text = part_text(part) if kind == "text" else None
            if kind is None or (kind == "text" and text is None):
                raise SampleError(f"a part of a message is not understood: {_short(part)}")
            if text is not None:
                inline = _INLINE.search(text) if role != "assistant" and "</" in text else None
                if inline is not None and medium_by_name(inline[1]) is not None:
                    kind = next(kind for kind in MEDIA if kind[:2] == inline[0][1:3])
                    raise SampleError(
                        f"a text names {'a' if kind == 'video' else 'an'} {kind} as {_short(inline[0])}, which would "
                        f"be seen as text: write '<{kind}>' there, and its path in `{kind}s`"
                    )
                continue
            assert kind != "text"
            payload = part_payload(part, kind)
            if isinstance(payload, MAPPING):
                check_unseen(payload, f"the {kind} of a part")
            part_options(part, kind)
            if part.get("index") not in (None, counts[kind]):
                raise SampleError(
                    f"a part has the index {part['index']!r} and is {kind} {counts[kind]} of the conversation: list "
                    f"the {kind}s in the order of their places"
                )
            counts[kind] += 1
        if turn.keys() <= _OWN_KEYS:
            continue
        if role == "assistant":
            _check_reasoning(turn)
            continue
        for key in turn.keys() - _OWN_KEYS:
            _check_no_file(key, turn[key], role)
        if any(_counted([turn])[0][one] for one in _CUT):
            check_unseen(_without(turn, *_OWN_KEYS), f"the turn of {role!r}")
    if not any(learned):
        said = any(ROLES[str(_role_name(turn))] == "assistant" for turn in turns)
        flagged = ": keys of its turns (weight, loss, train, …) leave out what would be learned" if said else ""
        raise SampleError(f"the conversation has no answer to learn{flagged}")


def _check_reasoning(turn: RawTurn) -> None:
    """Raise SampleError for reasoning under a key that no template writes, unless the content has it, too."""
    said = "\n".join(texts_in(_content(turn)))
    texts = {key: text.strip() for key in _THOUGHTS if isinstance(text := turn.get(key), str)}
    if lost := next((key for key, text in texts.items() if text not in said), None):
        raise SampleError(
            f"an answer has reasoning in `{lost}` ({_short(turn[lost])}), which would not be learned: call it "
            "reasoning_content, or leave it out"
        )


def _check_no_file(name: str, value: Any, role: str) -> None:
    """Raise SampleError for a key of a turn, or of a pair, with an image, video or sound, which would not be seen."""
    if value and _NAMES_FILE.fullmatch(name.lower()) and _is_file(value):
        raise SampleError(
            f"a turn of {role!r} has a file in `{name}` ({_short(value)}), which would not be seen: list the files of "
            f"all turns in `images`, `videos` or `audios` beside them, or write it as a part of its content"
        )


def _is_file(value: Any) -> bool:
    """Return whether a value names a medium, or has one: a path, a URL, base64, bytes; of a list or object, any."""
    if isinstance(value, list | tuple | Mapping):
        return any(map(_is_file, value.values() if isinstance(value, Mapping) else value))
    if not isinstance(value, str):
        return isinstance(value, bytes)
    return value.startswith(_URIS) or is_base64(value) or kind_by_name(value.partition("?")[0]) is not None


def check_places(turns: Sequence[RawTurn], there: Mapping[Medium, int]) -> None:
    """Check that media beside turns have places in them; without any, the first question is theirs.

    Raises:
        SampleError: They have not.
    """
    places = _counted(placed(turns, there))[0]
    asks = any(ROLES.get(_role_name(turn) or "") == "user" for turn in turns)
    for kind in MEDIA:
        count = places[kind]
        wanted = there.get(kind, 0)
        if count != wanted and (count or not asks):
            raise SampleError(mismatch(kind, count, wanted))


def mismatch(kind: str, places: int, there: int) -> str:
    """Return the complaint about a wrong number of images, videos or sounds."""
    return f"the text has {places} {kind} placeholders '<{kind}>' but the sample has {there} {kind}s"


def _counted(turns: Sequence[RawTurn]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Count by kind: parts without a medium of their own, placeholders in texts, and placeholders in answers."""
    places: Counter[str] = Counter()
    literal: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    for turn in turns:
        content = _content(turn) if isinstance(turn, MAPPING) else None
        if isinstance(content, str):
            if "<" in content and (written := _PLACES.findall(content)):
                is_answer = ROLES.get(_role_name(turn) or "") == "assistant"
                (answered if is_answer else places).update(written)
        elif isinstance(content, list | tuple):
            for part in content:
                kind = part_kind(part)
                if kind == "text":
                    literal.update(_PLACES.findall(part_text(part) or ""))
                elif kind is not None and own_payload(part) is None:
                    places[kind] += 1
    return places, literal, answered


def own_payload(part: Mapping[str, Any]) -> Any:
    """Return the image, video or sound that a part has itself; None for a placeholder, or the path or URL of one.

    Sounds may be in base64, as in OpenAI's `input_audio`, or samples with their rate.

    Raises:
        SampleError: The base64 is damaged.
    """
    payload = part.get(part.get("type", ""))
    if isinstance(payload, Mapping) and part_kind(part) == "audio":
        data = payload.get("data") or payload.get("bytes")
        if isinstance(data, str):
            try:
                return base64.b64decode(data, validate=True)
            except binascii.Error as error:
                raise SampleError(f"a part of a message has a sound whose base64 is damaged: {error}") from error
        return payload if "array" in payload else data
    return None if isinstance(payload, str | Mapping) else payload


def _respelled(turns: Sequence[RawTurn], there: Mapping[Medium, int]) -> Sequence[RawTurn]:
    """Return turns in which other spellings of placeholders (`[IMG]`) are parts, for media without a placeholder."""
    media = [kind for kind in MEDIA if there.get(kind)]
    texts = {
        number: text
        for number, turn in enumerate(turns)
        if isinstance(turn, MAPPING)
        and isinstance(text := _content(turn), str)
        and (media or "<" in text)  # without media, all others are texts
        and ROLES.get(_role_name(turn) or "") != "assistant"
    }
    has_places: set[str | None] = {kind for text in texts.values() if "<" in text for kind in _PLACES.findall(text)}
    if has_places.issuperset(media) and (media or not any(map(spelled, texts.values()))):
        return turns
    in_parts = [part for turn in turns if isinstance(turn, MAPPING) for part in _parts_of(turn)]
    has_places.update(map(part_kind, in_parts))
    if "image" in has_places and not there.get("image"):
        has_places.add("video")  # LLaVA-Video
    wanted: dict[Medium, int] = {kind: there.get(kind, 0) for kind in MEDIA if kind not in has_places}
    if any(wanted.values()) and (said := next((one for one in in_parts if _says_place(one, wanted)), None)):
        raise SampleError(
            f"a text part has a place ({_short(part_text(said))}), and the media have none: write places as parts "
            '{"type": "image"}, {"type": "video"} or {"type": "audio"}'
        )
    found = respelled(list(texts.values()), wanted)
    changed = dict(zip(texts, found, strict=True))
    return [
        {**_without(turn, "content", "value"), "content": changed[number]}
        if isinstance(changed.get(number), list)
        else turn
        for number, turn in enumerate(turns)
    ]


def _unwrapped(turns: Sequence[RawTurn], there: Mapping[Medium, int]) -> Sequence[RawTurn]:
    """Return turns without tags around the places of questions."""
    if not any(there.values()):
        return turns
    made: list[RawTurn] = []
    for turn in turns:
        said = _content(turn) if isinstance(turn, MAPPING) else None
        is_asked = isinstance(said, str) and ROLES.get(_role_name(turn) or "") != "assistant"
        bare = unwrapped(said) if is_asked else said
        made.append(turn if bare == said else {**_without(turn, "content", "value"), "content": bare})
    return made


def _parts_of(turn: RawTurn) -> Sequence[Any]:
    content = _content(turn)
    return content if isinstance(content, list | tuple) else ()


def _says_place(part: Any, wanted: Mapping[Medium, int]) -> bool:
    text = part_text(part) if part_kind(part) == "text" else None
    is_other = (place for place in spelled(text or "") if place.written != f"<{place.kind}>")
    return any(wanted.get(place.kind) for place in is_other)


def _as_videos(turn: RawTurn) -> RawTurn:
    name = "content" if isinstance(turn.get("content"), str) else "value"
    text = turn.get(name)
    if not isinstance(text, str) or ROLES.get(_role_name(turn) or "") == "assistant":
        return turn
    return {**turn, name: text.replace("<image>", "<video>")}
