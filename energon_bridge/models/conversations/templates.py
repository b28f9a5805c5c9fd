"""What a chat template of transformers writes for a conversation, and which of its text are the answers.

If the template marks text (`{% generation %}`), exactly that is learned, as `apply_chat_template` of transformers tells
with `return_assistant_tokens_mask=True`. Otherwise an answer is what the template adds after the prompt: the rendering
up to the answer minus the rendering before it with `add_generation_prompt=True`, without trailing white space. Both
must be prefixes of the rendering of the whole conversation.

A template that writes the date, by `strftime_now`, has that of the run (`RunDay`), at midnight.

A conversation may begin with an answer. Its prompt is what the template writes before any text of it; a template that
refuses such conversations gets an empty question in front.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from functools import lru_cache, partial, wraps
from itertools import groupby
from os.path import commonprefix
from typing import Any, NamedTuple

from energon_bridge.core.errors import ConfigurationError, SampleError, UnfitSampleError
from energon_bridge.models.conversations.texts import tokenize

_logger = logging.getLogger(__name__)
PROBE = "a text"
_SHOWN = 200
_MARKER = re.compile(r"<\|[^<>\s{}]+\|>|</s>|<\w+_of_turn>")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # transformers fills the first two from any of them
BEFORE_ALL = ("system", "developer")
_CLOCK = "strftime_now"
_DATES = tuple(f"%{letter}" for letter in "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ")

Messages = Sequence[Mapping[str, Any]]


class TextSpan(NamedTuple):
    """Characters from `start` to before `end`."""

    start: int
    end: int


@dataclass(slots=True)
class RunDay:
    """The day that templates write as today's. It belongs to the run: its states have it, and all ranks agree on it.

    Args:
        today: The day; until the run begins, that on which the encoder was made.
        given: Whether the user has set it, so that no state changes it.
        settled: Whether it stays: it is given, a state has it, or all ranks have agreed on it.
    """

    today: date
    given: bool = False
    settled: bool = False

    @classmethod
    def of(cls, today: date | str | None) -> RunDay:
        """Return the day of a setting; None: that of the clock. Raises ConfigurationError."""
        if today is None:
            return cls(date.today())
        try:
            day = date.fromisoformat(today) if isinstance(today, str) else date(today.year, today.month, today.day)
        except (AttributeError, ValueError) as error:
            raise ConfigurationError(f"today must be a date such as '2026-01-31', got {today!r}") from error
        return cls(day, given=True, settled=True)

    def settle(self, day: date) -> None:
        """Take over the day of a state, or of all ranks."""
        self.today = day
        self.settled = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """A chat template, rendered by a tokenizer's `apply_chat_template`.

    Args:
        tokenizer: Of the transformers interface.
        options: Further arguments of it.
        roles: The names of the roles of questions and answers.
        day: What it writes as today's date.
    """

    tokenizer: Any
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    roles: tuple[str, str] = ("user", "assistant")
    day: RunDay = field(default_factory=partial(RunDay.of, None))
    known: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def marks(self) -> bool:
        """Whether the template marks what is learned."""
        return _marks(self.source)

    @property
    def writes_date(self) -> bool:
        """Whether the template asks for the date."""
        return writes_date(self.source)

    @property
    def _dated(self) -> str:
        return dated(self.source, self.day.today) if self.writes_date else self.source

    def uses(self, name: str) -> bool:
        """Return whether the template mentions a key of messages, or an argument."""
        return any(_mentions(self.source, one) for one in (_REASONING if name in _REASONING else (name,)))

    def text(self, messages: Messages, tools: Any = None, **options: Any) -> str:
        """Return the rendering. Raises SampleError if the template refuses the messages."""
        with _template_errors(lines_before=self.writes_date):
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._dated,
                tokenize=False,
                **({"tools": tools} if tools else {}),
                **{**self.options, **options},
            )
        return text

    def answers(self, messages: Messages, tools: Any, numbers: Sequence[int]) -> tuple[str, list[TextSpan]]:
        """Return the rendering, and the spans of it that are learned.

        Args:
            messages: The conversation.
            tools: For the template.
            numbers: The messages to learn: all answers, or some.

        Raises:
            SampleError: The template refuses the conversation, or marks nothing.
            UnfitSampleError: It cannot be told which text the answers are.
        """
        find = self._marked if self.marks else self._compared
        first = next(n for n, message in enumerate(messages) if message["role"] not in BEFORE_ALL)
        try:
            return find(messages, tools, numbers)
        except SampleError:
            if messages[first]["role"] != self.roles[1]:
                raise
            question = {"role": self.roles[0], "content": self._as_content(self.roles[0], "")}
            try:
                return find(
                    [*messages[:first], question, *messages[first:]],
                    tools,
                    [number + (number >= first) for number in numbers],
                )
            except SampleError:
                pass  # the complaint about the conversation as it is says more
            raise

    def check_ends(self, text: str, spans: Sequence[TextSpan], media: Iterable[str | None] = ()) -> None:
        """Warn if the last answer does not end with a special token; `media` has those that end nothing."""
        names = {
            *getattr(self.tokenizer, "all_special_tokens", ()),
            *getattr(self.tokenizer, "added_tokens_encoder", ()),
        }
        special = tuple(names.difference(media))
        end = spans[-1].end if spans else 0
        if not special or text[:end].rstrip().endswith(special):
            return
        behind = next((token for token in special if text.startswith(token, end)), None)
        what = "ends answers without a special token" if behind is None else f"ends what it marks before {behind!r}"
        remedy = "write {{ eos_token }} behind them" if behind is None else "put {% endgeneration %} behind that token"
        _logger.warning("the chat template %s, so the model does not learn to end its answers: %s", what, remedy)

    # Marks ------------------------------------------------------------------------------------------------------------

    def _marked(self, messages: Messages, tools: Any, numbers: Sequence[int]) -> tuple[str, list[TextSpan]]:
        text, spans = self._rendered_marks(messages, tools)
        if not spans:
            raise SampleError("the chat template marks no answer in the conversation")
        answers = self._answers_in(messages)
        if list(numbers) == answers:
            return text, spans
        kept: list[TextSpan] = []
        begin = 0
        runs = [(wanted, list(run)) for wanted, run in groupby(answers, key=set(numbers).__contains__)]
        for (wanted, _), following in zip(runs, [*runs[1:], None], strict=True):
            end = len(spans)
            if following is not None:
                end = self._marks_before(messages, following[1][0], tools, text, spans)
            kept += spans[begin:end] if wanted else []
            begin = end
        return text, kept

    def _marks_before(self, messages: Messages, number: int, tools: Any, text: str, spans: list[TextSpan]) -> int:
        """Return the number of spans that the template marks as learned before an answer."""
        before, marks = self._rendered_marks(messages[:number], tools)
        end = marks[-1].end if marks else 0
        if marks != spans[: len(marks)] or before[:end] != text[:end]:
            raise UnfitSampleError(
                f"the chat template writes the turns before message {number + 1} differently if more follow, so which "
                "marks belong to which turn cannot be told: learn all answers of the conversation, or give it to a "
                "template that writes a turn the same wherever it stands"
            )
        return len(marks)

    def _rendered_marks(self, messages: Messages, tools: Any) -> tuple[str, list[TextSpan]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        with _template_errors(lines_before=self.writes_date):
            (text,), (marks,) = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self._dated,
                return_assistant_tokens_mask=True,
                **{**getattr(self.tokenizer, "special_tokens_map", {}), **self.options},
            )
        return text, sorted(TextSpan(*mark) for mark in marks)

    # Beginnings -------------------------------------------------------------------------------------------------------

    def _compared(self, messages: Messages, tools: Any, numbers: Sequence[int]) -> tuple[str, list[TextSpan]]:
        """Find each answer by comparing two renderings: up to its prompt, and up to its end. The rest is the answer."""
        whole = self.text(messages, tools)
        answers = self._answers_in(messages)
        spans = []
        for number in numbers:
            prompt = self._prompt(messages, number, tools)
            is_last = number + 1 == len(messages)
            until = whole if is_last else self.text(messages[: number + 1], tools)
            until = until.rstrip()  # white space after a turn is not part of the answer
            if not (until.startswith(prompt) and whole.startswith(until)):
                raise UnfitSampleError(
                    f"the chat template cannot be used for training on answer {answers.index(number) + 1} of "
                    f"{len(answers)}: the rendering of a conversation must start with that of the turns up to the "
                    "answer, and this with the prompt for it (add_generation_prompt=True). The prompt is "
                    f"{_end_of(prompt)!r}, up to the answer {_end_of(until)!r}, the conversation {_end_of(whole)!r}. "
                    "Mark the answers in the template with {% generation %}, or set ChatConfig(learn='last')"
                )
            spans.append(TextSpan(len(prompt), len(until)))
        return whole, spans

    def _prompt(self, messages: Messages, number: int, tools: Any) -> str:
        if number:
            return self.text(messages[:number], tools, add_generation_prompt=True)
        # Nothing stands before it, and templates do not render nothing: what they write before any first answer.
        until = self.text(messages[:1], tools)
        header = self.text(messages[:1], tools, add_generation_prompt=True)[len(until) :]
        role = self.roles[1]
        firsts = [[{"role": role, "content": self._as_content(role, text)}] for text in ("x", "y")]
        opening = commonprefix([self.text(first, tools) for first in firsts])  # noqa: RUF071 by characters
        if header not in opening:
            raise UnfitSampleError(
                "the chat template cannot be used for training on a conversation that begins with an answer: it writes "
                f"{_end_of(opening)!r} in front of it, without the prompt for an answer, {header!r}"
            )
        return opening[: opening.rindex(header) + len(header)]

    def _answers_in(self, messages: Messages) -> list[int]:
        return [number for number, message in enumerate(messages) if message["role"] == self.roles[1]]

    # Forms ------------------------------------------------------------------------------------------------------------
    #
    # A template may take texts or lists of parts, and the arguments of a call as an object or as its JSON. Which, a
    # rendering of a probe tells, once for each process.

    def takes_parts(self, role: str) -> bool:
        """Return whether the content of a role may be a list of parts, rather than a text."""
        if role not in self.known:
            text = self._probed(role, [{"type": "text", "text": PROBE}])
            self.known[role] = PROBE in text and "'text'" not in text and '"text"' not in text
            if not self.known[role] and role != self.roles[0] and PROBE not in self._probed(role, PROBE):
                self.known[role] = self.takes_parts(self.roles[0])  # it has no such turns: the probe tells nothing
        return self.known[role]

    def called(self, calls: Any) -> Any:
        """Return the calls of a message, the arguments in a form that the template takes.

        Raises:
            SampleError: They are no calls, or their arguments no JSON where the template needs an object.
        """
        if isinstance(calls, str | bytes):
            calls = parsed(calls, "tool_calls")
        if isinstance(calls, Mapping):
            calls = [calls]
        if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
            raise SampleError(f"tool_calls must be a list of calls, got {calls!r}"[:500])
        return [self._with_arguments(call) for call in calls]

    def _with_arguments(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function")
        if isinstance(function, Mapping):
            return {**call, "function": self._with_arguments(function)}
        arguments = call.get("arguments")
        if isinstance(arguments, str) and self._takes_arguments() == "object":
            return {**call, "arguments": parsed(arguments or "{}", "arguments of a tool call")}
        if isinstance(arguments, Mapping) and self._takes_arguments() == "text":
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return call

    def _takes_arguments(self) -> str:
        """Return the form of arguments that a template needs: an `object`, its `text`, or `any` of the two."""
        key = "arguments of {}"
        text = '{"probe": "probed"}'
        forms: dict[str, Any] = {"object": {"probe": "probed"}, "text": text}
        for form, arguments in forms.items():
            if key.format(form) not in self.known:
                shown = self._probed("tool", PROBE, arguments)
                # A text must stand there as it is, neither quoted again nor taken apart; no object as Python has it.
                self.known[key.format(form)] = (
                    text in shown if form == "text" else "probed" in shown and "{'" not in shown
                )
        takes = [form for form in forms if self.known[key.format(form)]]
        return takes[0] if len(takes) == 1 else "any"

    def _probed(self, role: str, content: Any, arguments: Any = None) -> str:
        """Return a conversation with a turn of a role; an empty text if the template fails at it."""
        user, assistant = self.roles
        turns = [{"role": role, "content": content}]
        if role != user:
            turns.insert(role in BEFORE_ALL, {"role": user, "content": self._as_content(user, "q")})
        if role not in (user, assistant, *BEFORE_ALL):
            function = {"name": "probe", "arguments": {} if arguments is None else arguments}
            calls = [{"id": "call12345", "type": "function", "function": function}]
            turns.insert(1, {"role": assistant, "content": self._as_content(assistant, ""), "tool_calls": calls})
            turns[-1] |= {"tool_call_id": "call12345", "name": "probe"}
        try:
            return self.text(turns, add_generation_prompt=True)
        except Exception:  # a template that does not take this form may raise anything
            return ""

    def _as_content(self, role: str, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.takes_parts(role) else text


def check_markers(text: str, tokenizer: Any) -> None:
    """Raise ConfigurationError if a marker of a template, as `<|im_end|>`, is several tokens: letters, to the model."""
    markers = dict.fromkeys(_MARKER.findall(text))
    if missing := [one for one in markers if len(tokenize(tokenizer, [one])[0]) > 1]:
        raise ConfigurationError(
            f"the template writes {' and '.join(missing)}, which the tokenizer does not know: the model would learn it "
            f"letter by letter. Add it with tokenizer.add_tokens({missing}, special_tokens=True) and "
            "model.resize_token_embeddings(len(tokenizer)), or set a template of tokens that the tokenizer has"
        )


def control_tokens(tokenizer: Any, template: str, media: Iterable[str | None]) -> re.Pattern[str] | None:
    """Return what finds a tokenizer's control tokens in a text: those that begin and end texts, and the template's."""
    own = {getattr(tokenizer, f"{name}_token", None) for name in ("bos", "eos", "pad")}
    names = {*getattr(tokenizer, "all_special_tokens", ())}
    names |= {str(one) for one in getattr(tokenizer, "added_tokens_decoder", {}).values() if one.special}
    names = {name for name in names.difference(media) if name in own or name in template}
    return re.compile("|".join(map(re.escape, sorted(names)))) if names else None


# Dates ----------------------------------------------------------------------------------------------------------------


def writes_date(source: str) -> bool:
    """Return whether a template asks for the date."""
    return _mentions(source, _CLOCK)


@lru_cache(maxsize=64)
def dated(source: str, day: date) -> str:
    """Return a template in which `strftime_now` is a macro that writes a day, at midnight.

    transformers takes no function as an argument of a template, so the template itself gets one, in a line that
    writes nothing: the line break behind a block is no text (`trim_blocks`).
    """
    then = datetime(day.year, day.month, day.day)
    found = {*_DATES, *re.findall(r"%[-_0^#]?[A-Za-z]", source)}
    codes = [("%%", "\0"), *((code, then.strftime(code)) for code in sorted(found)), ("\0", "%")]
    return (
        f"{{%- macro {_CLOCK}(format) -%}}{{%- set text = namespace(it=format) -%}}"
        f"{{%- for code, shown in {codes!r} -%}}{{%- set text.it = text.it | replace(code, shown) -%}}{{%- endfor -%}}"
        f"{{{{ text.it }}}}{{%- endmacro %}}\n{source}"
    )


# Texts that are only written ------------------------------------------------------------------------------------------
#
# A template that does nothing with the texts of a conversation but write them has the same around any texts. Whether it
# does, a rendering tells in which texts refuse all else, and in which nothing takes a text that would look into it.


class _ReadError(Exception):
    """Raised while a template is watched: it looked into a text, so what it writes depends on the content."""


class _Opaque(str):
    """Stands for an unknown text that is not empty: it may be joined with others; any other use raises `_ReadError`."""

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: str) -> str:
        return _joined((self, other))

    def __radd__(self, other: str) -> str:
        return _joined((other, self))


def _refused(*_: Any, **__: Any) -> Any:
    raise _ReadError


for _name in vars(str).keys() - vars(_Opaque).keys() - {"__new__", "__getattribute__"}:
    setattr(_Opaque, _name, _refused)

_OF_TYPES = frozenset({"defined", "undefined", "none", "string", "number", "mapping", "iterable", "sequence"})
"""Jinja tests that look at the type of a value, not at its content."""


def _joined(pieces: Iterable[str]) -> str:
    pieces = list(pieces)
    whole = "".join(pieces)
    return _Opaque(whole) if any(isinstance(piece, _Opaque) for piece in pieces) else whole


def _opaque(value: Any) -> Any:
    """Return messages in which each text is an `_Opaque`."""
    if isinstance(value, list):
        return [_opaque(one) for one in value]
    if isinstance(value, Mapping):
        texts = ("content", "text")
        return {k: _Opaque(v) if k in texts and v and isinstance(v, str) else _opaque(v) for k, v in value.items()}
    return value


def _is_plain(value: Any) -> bool:
    from jinja2 import Undefined

    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in (str, int, float, bool, type(None)) or isinstance(value, Undefined)


def _of_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Jinja filter or test that raises `_ReadError` for an `_Opaque` text."""

    @wraps(function)
    def checked(*given: Any, **options: Any) -> Any:
        own = given[hasattr(function, "jinja_pass_arg") :]
        return function(*given, **options) if all(map(_is_plain, (*own, *options.values()))) else _refused()

    return checked


def _of_types(function: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(function)(lambda *given: function(*("" if isinstance(one, _Opaque) else one for one in given)))


@lru_cache(maxsize=64)
def _watched(source: str) -> Any:
    """Return a compiled template for opaque texts. Raises _ReadError if it may write more than its arguments say."""
    from jinja2 import nodes
    from jinja2.runtime import Macro
    from jinja2.utils import Namespace
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template(source)
    environment: Any = compiled.environment.overlay()
    tree = environment.parse(source)
    formats = (one for one in tree.find_all(nodes.Mod) if not isinstance(getattr(one.right, "value", None), int))
    if any(_mentions(source, name) for name in ("random", "lipsum")) or not environment.sandboxed:
        raise _ReadError
    if tree.find(nodes.Concat) is not None or any(formats):  # which make plain texts of any
        raise _ReadError

    class Watching(type(environment)):  # type: ignore[misc]
        concat = staticmethod(_joined)

        def call(self, context: Any, obj: Any, /, *given: Any, **options: Any) -> Any:
            keeps = isinstance(obj, Macro) or (isinstance(obj, type) and issubclass(obj, Namespace))
            named = [value for name, value in options.items() if not name.startswith("_")]  # else, jinja's own
            if not keeps and not all(map(_is_plain, (*given, *named))):
                raise _ReadError
            return super().call(context, obj, *given, **options)

    environment.__class__ = Watching
    environment.filters = {
        name: one if name in ("length", "count") else _of_plain(one) for name, one in environment.filters.items()
    }
    environment.tests = {
        name: _of_types(one) if name in _OF_TYPES else _of_plain(one) for name, one in environment.tests.items()
    }
    return environment.from_string(source)


@dataclass(frozen=True, slots=True)
class _Watcher:
    """Stands for a tokenizer, and renders opaque texts."""

    tokenizer: Any

    def apply_chat_template(self, messages: Messages, *, chat_template: str, tokenize: bool, **options: Any) -> str:
        given = {"tools": None, "documents": None, "add_generation_prompt": False} | self.tokenizer.special_tokens_map
        return "".join([_watched(chat_template).render(messages=_opaque(messages), **(given | options))])


def only_written(template: ChatTemplate, messages: Messages, numbers: Sequence[int]) -> bool:
    """Return whether a template only writes the texts of a conversation and finds answers as `answers` does.

    False, too, where that is not known.
    """
    from transformers import PreTrainedTokenizerBase

    own = getattr(template.tokenizer.apply_chat_template, "__func__", None)
    if own is not PreTrainedTokenizerBase.apply_chat_template:
        return False
    watched = replace(template, tokenizer=_Watcher(template.tokenizer))
    watched.known.update(template.known)
    try:
        return watched.answers(messages, None, numbers) == template.answers(messages, None, numbers)
    except Exception:  # a template may raise anything; and transformers may compile templates in another way
        return False


def template_source(tokenizer: Any, template: Any = None, kind: str = "default") -> Any:
    """Return a template, or the tokenizer's own; of several, that of a kind, if there is one."""
    source = template or getattr(tokenizer, "chat_template", None)
    return source.get(kind) if isinstance(source, Mapping) else source


def parsed(text: str | bytes, what: str) -> Any:
    """Return a JSON text as a value. Raises SampleError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise SampleError(f"the {what} are not valid JSON: {error}: {text!r}"[:500]) from error


@lru_cache(maxsize=64)
def _marks(source: str) -> bool:
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None


@lru_cache(maxsize=4096)
def _mentions(source: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", source) is not None


def _end_of(text: str) -> str:
    return text if len(text) <= _SHOWN else f"…{text[-_SHOWN:]}"


@contextmanager
def _template_errors(*, lines_before: int) -> Iterator[None]:
    """Turn the errors of a template into ours; line numbers in messages do not count `lines_before` before it."""
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        yield
    except TemplateSyntaxError as error:
        raise ConfigurationError(
            f"the chat template has an error in line {error.lineno - lines_before}: {error}"
        ) from error
    except (TemplateError, TypeError) as error:
        raise SampleError(f"the chat template rejects the conversation: {error}") from error
