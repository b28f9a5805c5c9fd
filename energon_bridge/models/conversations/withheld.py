"""Samples and turns that are not to be learned, as columns beside them, or keys in them, say.

    split, subset, phase, …: test, minival, …; is_test: true    held out, where other rows are not
    split, partition: 1, 2, …                                   likewise, beside rows with 0 (CelebA)
    is_rejected, is_precanned, deleted, foil, …: true           rejected: VizWiz, OpenAssistant, FOIL
    is_valid, is_correct, is_match, review_result, keep, …: false
    passed, success, resolved: false; correct: 0; reward: -1    of rollouts, beside their turns or answers
    answer, status, state, verdict, review, feedback: reject, … Prodigy, Argilla
    quality: bad
    weight, loss, train, …: 0, false                            in a turn: it is not learned (`learned_if`)

Beside a sample each is an error that names the column. Tables are looked at as a whole when they are opened
(`tools/convert/table_dataset.py`); of lists and tars, each sample is compared with the first of its file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

# Held out -------------------------------------------------------------------------------------------------------------

_SPLITS = re.compile(
    r"(.*_)?splits?(_.*)?|(sub|data)?sets?(_name|_type)?|ds_type|partition(_name)?|usage|phase|fold|train_(or_|val_)?test"
)
_HELD = r"test|testing|val|validation|eval|evaluation|dev"
_FLAGS = re.compile(
    rf"(?:(?:is|for|in|used?_(?:in|for|as))_(train|training|{_HELD}|held_?out)"
    rf"(?:_(?:set|split|image|sample|example|row|data))?|held_?out|holdout|{_HELD})"
)
_NUMBERED = ("split", "partition", "split_id", "partition_id", "data_split")
_TRUTH = {"true": True, "1": True, "1.0": True, "yes": True, "false": False, "0": False, "0.0": False, "no": False}


@lru_cache(maxsize=256)
def split_columns(columns: tuple[str, ...]) -> list[str]:
    """Return the columns that may say of which split each row is: names (`split`), and flags (`is_test`)."""
    lower = {column.lower().replace(" ", "_").replace("-", "_"): column for column in columns}
    named = sorted(filter(_SPLITS.fullmatch, lower), key=lambda name: "split" not in name)
    return [lower[name] for name in (*named, *filter(_FLAGS.fullmatch, lower))]


def is_held_out(column: str, value: Any) -> bool | None:
    """Return whether a row is held out, as its value in one of `split_columns` says; None: that says nothing.

    Of splits with numbers, 0 is the one to be learned.
    """
    flag = _FLAGS.fullmatch(column.lower().replace(" ", "_").replace("-", "_"))
    if flag is None and isinstance(value, list | tuple) and value:  # several splits of a row
        said = {is_held_out(column, one) for one in value}
        return said.pop() if len(said) == 1 else False
    if flag is None:
        is_number = column.lower() in _NUMBERED and str(value) in ("0", "1", "2", "3")
        return str(value) != "0" if is_number else says_held_out(value) if isinstance(value, str) else None
    if re.fullmatch(_HELD, flag[0]) and str(value).strip().lower() not in ("true", "false"):
        return None  # `val` may be short for a value
    is_set = _truth(value)
    return None if is_set is None else is_set is not (flag[1] or "").startswith("train")


def says_held_out(name: object) -> bool:
    """Whether a path or another text says, in whatever spelling, that something is for validation or tests."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(name)).lower()
    return _HELD_OUT.search(words) is not None


_HELD_OUT = re.compile(
    r"(?<![a-z])((mini|dev)?(test|eval|evaluation|evaluate|val|valid|validation|validate|dev)"
    r"(s|set|data|split|ing|dev|mini|std)?|held[-_ ]?out|holdout)(?![a-z])"
)


NESTED = ("metadata", "meta", "info", "extra_info")


def held_out_by(entry: Mapping[str, Any]) -> tuple[str, Any, bool] | None:
    """Return the column by which an entry says whether it is held out, its value, and whether it is; None: it does not.

    It may be one inside of metadata (`metadata.split`).
    """
    for column in split_columns(tuple(entry)):
        if f"{column}_name" in entry:  # the class of a number
            continue
        if (held_out := is_held_out(column, entry[column])) is not None:
            return column, entry[column], held_out
    for name in NESTED:
        if isinstance(inner := entry.get(name), Mapping) and (said := held_out_by(inner)) is not None:
            return f"{name}.{said[0]}", *said[1:]
    return None


def first_held_out(entries: Iterable[Mapping[str, Any]]) -> bool | None:
    """Return whether all first entries say that they are held out; None: none says of which split it is."""
    said = [one[2] for entry in entries if (one := held_out_by(entry)) is not None]
    return all(said) if said else None


def fault_of_split(said: tuple[str, Any, bool] | None, held_out: bool | None) -> str | None:
    """Return the complaint about an entry that is held out among others that are not, or the reverse.

    `said` is what `held_out_by` found in it, `held_out` what the first entries of its file say.
    """
    if said is None or held_out is None or said[2] is held_out:
        return None
    others = "held out" if held_out else "to be learned"
    return (
        f"`{said[0]}` is {said[1]!r}, and other rows are {others}. Write the rows of each split into a list or table "
        f"of their own; or take all rows alike, with --ignore {said[0].partition('.')[0]} (energon convert)."
    )


# Rejected, and not learned --------------------------------------------------------------------------------------------

_VERDICTS = (
    "answer",
    *(_CLASSES := ("status", "state", "verdict", "review", "feedback")),
    *(f"{name}_name" for name in _CLASSES),
)
"""Columns; of numbers of classes, the name is in another (`status_name`)."""
_REJECTED = ("reject", "rejected", "ignore", "ignored", "discard", "discarded", "thumbs_down", "downvote")
_QUALITY = ("bad", "unusable", "rejected", "garbage", "spam")
_IF_SET = re.compile(
    r"(?:(?:is|was|to_be)_)?(?:rejected|deleted|discarded|removed|precanned|unusable|excluded?|skip(?:ped)?|ignored?"
    r"|dropped|cancel{1,2}ed|corrupt(?:ed)?|broken|incorrect|foil|mismatch(?:ed)?|hallucinat(?:ed|ion|ory))"
    r"|discard|is_(?:invalid|bad|wrong)|has_hallucinations?"
)
_IF_NOT_SET = re.compile(
    r"is_valid|review_result|(?:is_)?(?:usable|correct|accepted|approved|kept|included|good|passed|success(?:ful)?|solved|resolved)|keep|use|include"
    r"|is_safe|(?:is_)?match(?:ed|ing)?"
)
_REWARDS = re.compile(r"(?:(?:final|total|mean|avg|outcome|task|episode|verifier)_)?reward(?:_score|_value)?")
"""Numbers that say how good an answer is: not above 0, and it is a bad one."""
_WEIGHTS = re.compile(
    r"(?:(?:sample|example|row|data|train|training|loss|turn|message)_)?(?:weight|wt)|loss(?:_scale)?|(?:loss|train|training)_mask"
)
"""Numbers that say how much a sample or turn counts for the loss: 0, and it is not learned."""
_LEARNED_IF_SET = re.compile(
    rf"{_WEIGHTS.pattern}|(?:(?:is|to_be|to|do|should(?:_be)?|use(?:_(?:in|for|as))?|for|with|has|in|include(?:_in)?|compute"
    r"|calc(?:ulate)?|apply|enable|needs?|requires?|contributes?_to|counts?_(?:in|for))_)?"
    r"(?:train(?:ing|ed|able)?|learn(?:ed|able)?|loss|supervised?)(?:_on)?(?:_(?:this_)?(?:turn|message))?"
)
_LEARNED_IF_NOT_SET = re.compile(
    r"(?:is_)?(?:mask|masked|ignore|ignored|exclude|excluded|skip|skipped)(?:_(?:in_|from_|for_)?(?:loss|train|training))?"
    r"|(?:no|mask|zero|omit|disable|without|not|do_?nt|do_not|un)_?(?:loss|train(?:ed|ing)?|learn(?:ed)?)(?:_on)?"
    r"|loss_(?:masked|ignored?)"
)


@lru_cache(maxsize=4096)
def learned_if(key: str) -> bool | None:
    """Return the value, as a bool, that a key of a turn has in those that are learned; None: it does not say that."""
    name = _snake(key)
    if _LEARNED_IF_NOT_SET.fullmatch(name):
        return False
    return True if _LEARNED_IF_SET.fullmatch(name) else None


@lru_cache(maxsize=4096)
def is_weight(key: str) -> bool:
    """Return whether a key of a turn is a number, 0 or 1, that may stand in every turn."""
    return _WEIGHTS.fullmatch(_snake(key)) is not None


def may_be_unlearned(key: str, value: Any) -> bool:
    """Return whether a key of an answer seems to say that it is none to be learned, in no word that is honoured."""
    is_set = _truth(value)
    if is_set is None or value is None:
        return False
    name = _snake(key)
    wanted = True if _ASIDE_IF_SET.fullmatch(name) else False if _ASIDE_IF_NOT_SET.fullmatch(name) else None
    return is_set is wanted or name in _UNSURE_MASKS


_ASIDE_IF_SET = re.compile(
    r"(?:is_)?(?:hidden|invisible|prefix|partial|prefill|prefilled|deprecated|superseded|frozen|input|history|context)(?:_only)?"
)
_ASIDE_IF_NOT_SET = re.compile(r"(?:is_)?(?:visible|target|label|output|active|requires_grad)")
_UNSURE_MASKS = ("label_mask", "labels_mask", "target_mask", "assistant_mask")
"""Of these, both 0 and 1 are in use for what is learned."""


def _snake(name: str) -> str:
    """Return a name in small letters, with a bar between its words: `isValid`, `is valid`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[ -]", "_", name).lower()


def is_rejecting(column: str, value: Any, beside: Iterable[str] | None = None) -> bool:
    """Return whether a value of a column says that annotators rejected the sample, or that it is not to be learned.

    A number in `correct` may be that of a choice, unless none of the columns `beside` it has choices.
    """
    if not may_reject(column):
        return False
    name = _snake(column)
    if name in _VERDICTS or name.endswith("quality"):
        known = _REJECTED if name in _VERDICTS else _QUALITY
        return isinstance(value, str) and value.strip().lower() in known
    if name == "answer_confidence":  # of VQAv2, VizWiz
        return value == "no"
    if _REWARDS.fullmatch(name):
        return isinstance(value, int | float) and value <= 0
    is_set = _truth(value)
    may_count = beside is None or any(_OF_CHOICES.fullmatch(one.lower()) for one in beside)
    if name == "correct" and may_count and str(value).strip().lower() not in ("true", "false"):
        return False
    return is_set is not None and is_set is (_IF_SET.fullmatch(name) is not None)


_OF_CHOICES = re.compile(
    r".*(?:choice|option|candidate|ending|alternative)s?.*|(?:op|sol|answer|ans)?_?[a-j1-9]|answers|responses|captions|texts"
)


@lru_cache(maxsize=4096)
def may_reject(column: str) -> bool:
    """Return whether a column may say that samples are rejected, or not to be learned."""
    name = _snake(column)
    return (
        name in (*_VERDICTS, "answer_confidence")
        or name.endswith("quality")
        or any(names.fullmatch(name) for names in (_IF_SET, _IF_NOT_SET, _REWARDS))
        or (_FLAGS.fullmatch(name) is None and _LEARNED_IF_SET.fullmatch(name) is not None)
    )


def fault_of_verdict(entry: Mapping[str, Any], taken: Collection[str]) -> str | None:
    """Return the complaint about an entry that was rejected where it was annotated; `taken` columns are no verdicts."""
    name = next((name for name, value in entry.items() if name not in taken and is_rejecting(name, value, entry)), None)
    if name is None:
        return None
    other = " (or is it one of the validation set?)" if name.lower() == "is_valid" else ""
    said = "is not to be learned" if learned_if(name) else "was rejected by those who annotated it"
    return (
        f"`{name}` is {entry[name]!r}: the sample {said}{other}. To take all alike, --ignore {name} (energon convert)."
    )


def accepted(ones: Sequence[Any], taken: Collection[str] = ("answer",)) -> list[Any]:
    """Return the captions or answers of several annotators that none of them marked as rejected."""
    return [one for one in ones if not isinstance(one, Mapping) or fault_of_verdict(one, taken) is None]


def _truth(value: Any) -> bool | None:
    return _TRUTH.get(str(value).strip().lower())
