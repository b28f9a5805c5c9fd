"""Expressions such as `aesthetic > 5 and language in ["en", "de"]`, over arrays with one entry per sample.

Filters keep the samples for which one is true; costs of balance are the numbers that one gives.

A subset of Python's grammar: column names, numbers, strings, True and False, comparisons (chained ones too), `in` and
`not in` a literal list, `and`, `or`, `not`, + - * / // %, parentheses and the functions of `functions.py`. A name that
is none in Python is written in backquotes; dates are compared with texts such as "2024-01-31 18:00". Nothing is
executed: the syntax tree is walked, so an expression from a file is data. NaN compares false, except with `!=`.
"""

from __future__ import annotations

import ast
import keyword
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import NoReturn

import numpy as np

from energon_bridge.core.errors import ConfigurationError, EmptyDatasetError, MetadataError, did_you_mean
from energon_bridge.core.format.dataset import PreparedDataset
from energon_bridge.core.format.foreign import ForeignDataset
from energon_bridge.core.format.join import JoinedDataset
from energon_bridge.core.format.jsonl import JsonlDataset
from energon_bridge.tools.columns.functions import FUNCTIONS
from energon_bridge.tools.columns.stored import column_of, read_columns

_MOST_CHARACTERS = 4000
_LARGEST = 2.0**62
_COMPARISONS: dict[type[ast.cmpop], Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def column_names(text: str) -> tuple[str, ...]:
    """Return the columns that an expression names, sorted; raises ConfigurationError if it cannot be parsed."""
    nodes = [*ast.walk(_parse(text))]
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    names = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in functions}
    return tuple(sorted(map(_unquoted, names)))


def checked_expression(text: str) -> str:
    """Return an expression without spaces around it; raises ConfigurationError if it cannot be parsed."""
    _parse(text)
    return text.strip()


def all_of(texts: Sequence[str]) -> str:
    """Return one expression that holds if all of them do; empty if there are none."""
    distinct = list(dict.fromkeys(text.strip() for text in texts))
    return distinct[0] if len(distinct) == 1 else " and ".join(f"({text})" for text in distinct)


def evaluate(text: str, columns: Mapping[str, np.ndarray], *, num_samples: int) -> np.ndarray:
    """Return which samples an expression keeps: bool, shape (num_samples,).

    Columns have shape (num_samples,) and hold bools, integers, floats, strings or dates (datetime64). Raises
    ConfigurationError.
    """
    kept = _value(text, columns)
    if kept.dtype.kind != "b":
        raise ConfigurationError(
            f"filter {text!r}: gives {_kind(kept)}, expected true or false. Add a comparison, as in `{text.strip()} > "
            "0`."
        )
    return np.array(np.broadcast_to(kept, (num_samples,)))


def evaluate_number(
    text: str, columns: Mapping[str, np.ndarray], *, num_samples: int, samples: np.ndarray | None = None
) -> np.ndarray:
    """Return the number that an expression, such as `width * height / 196`, gives for each sample, as floats.

    Shapes are those of `evaluate`; `samples` are their numbers, for errors. Raises ConfigurationError, also for a
    negative or infinite number.
    """
    value = _value(text, columns)
    if value.dtype.kind not in "bif":
        raise ConfigurationError(f"expression {text!r}: gives {_kind(value)}, expected numbers.")
    numbers = np.array(np.broadcast_to(value, (num_samples,)), dtype=np.float64)
    wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))
    if wrong.size:
        number = wrong[0] if samples is None else samples[wrong[0]]
        raise ConfigurationError(
            f"expression {text!r}: gives {numbers[wrong[0]]} for sample {number}, expected a number of at least 0."
        )
    return numbers


def evaluate_value(text: str, columns: Mapping[str, np.ndarray], *, num_samples: int) -> np.ndarray:
    """Return the number or text that an expression gives for each sample; raises ConfigurationError, also for NaN."""
    value = _value(text, columns)
    if value.dtype.kind == "M":
        raise ConfigurationError(f"expression {text!r}: gives a date, expected a number or a text.")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise ConfigurationError(f"expression {text!r}: gives NaN or infinity for some samples.")
    return np.broadcast_to(value, (num_samples,))


def _value(text: str, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN compare as Python's do
            return _Evaluation(text, columns).value(_parse(text))
    except RecursionError:
        raise ConfigurationError(
            f"expression {text[:60]!r}...: nested too deeply. Use fewer parentheses and `not`s, or compute a column "
            "instead."
        ) from None


def _parse(text: str) -> ast.expr:
    if len(text) > _MOST_CHARACTERS:
        raise ConfigurationError(
            f"expression {text[:60]!r}...: has {len(text)} characters, expected at most {_MOST_CHARACTERS}. "
            f"Compute a column instead."
        )
    try:
        return ast.parse(_QUOTED.sub(_as_identifier, text.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigurationError(
            f"expression {text!r}: cannot be parsed: {error}. Write one like `aesthetic > 5 and tokens < 4096`; "
            "names with spaces or signs are in backquotes, as in `my column` > 5."
        ) from None


_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`([^`]+)`")
_IDENTIFIER = re.compile(r"__column_((?:[0-9a-f]{2})+)__")


def _as_identifier(match: re.Match[str]) -> str:
    """Return an identifier for a name in backquotes; of a text in quotes, the text."""
    return match[0] if match[1] is None else f"__column_{match[1].encode().hex()}__"


def _unquoted(name: str) -> str:
    """Return the name of a column that an identifier stands for."""
    match = _IDENTIFIER.fullmatch(name)
    return name if match is None else bytes.fromhex(match[1]).decode()


class _Evaluation:
    """Walks the syntax tree of an expression; values are arrays of one entry per sample, or of none for constants."""

    def __init__(self, text: str, columns: Mapping[str, np.ndarray]) -> None:
        self._text = text
        self._columns = columns

    def value(self, node: ast.expr) -> np.ndarray:
        match node:
            case ast.Name(id=name):
                return self._column(_unquoted(name))
            case ast.Constant(value=bool() | int() | float() | str() as constant):
                value = np.asarray(constant)
                return value if value.dtype.kind in "bifU" else self._refuse(node, "is too large a number")
            case ast.BoolOp(op=op, values=values):
                return reduce(partial(self._joined, op), values[1:], self._truth(values[0]))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return np.logical_not(self._truth(operand))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                number = self._number(operand)
                return np.negative(number) if isinstance(sign, ast.USub) else number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._arithmetic(node, left, op, right)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                return self._called(node, name, [self._number(part) for part in args])
            case ast.Compare(left=left, ops=ops, comparators=rights):
                kept: np.ndarray = np.asarray(True)
                for comparison, right in zip(ops, rights, strict=True):
                    kept = np.logical_and(kept, self._compare(left, comparison, right))
                    left = right
                return kept
        return self._refuse(node, "is not allowed")

    def _joined(self, op: ast.boolop, first: np.ndarray, node: ast.expr) -> np.ndarray:
        """Return `known and node` or `known or node`, of which, as in Python, only undecided samples need the second.

        So `width > 0 and height / width < 2` never divides by 0.
        """
        undecided = first if isinstance(op, ast.And) else np.logical_not(first)
        columns = {name: one for name, one in self._columns.items() if one.size}
        rest = {name: one[np.broadcast_to(undecided, one.shape)] for name, one in columns.items()}
        value = _Evaluation(self._text, {**self._columns, **rest})._truth(node)
        if first.ndim == 0:
            return value if undecided else first
        joined = first.copy()
        joined[undecided] = value
        return joined

    def _column(self, name: str) -> np.ndarray:
        if name in self._columns:
            return self._columns[name]
        names = ", ".join(map(_quoted, sorted(self._columns))) or "none"
        meant = did_you_mean(name, [*map(_quoted, self._columns)])
        raise ConfigurationError(f"expression {self._text!r}: no column {name!r}.{meant} Columns: {names}.")

    def _truth(self, node: ast.expr) -> np.ndarray:
        value = self.value(node)
        return value if value.dtype.kind == "b" else self._refuse(node, f"is {_kind(value)}, expected true or false")

    def _number(self, node: ast.expr) -> np.ndarray:
        value = self.value(node)
        if value.dtype.kind not in "bif":
            self._refuse(node, f"is {_kind(value)}, expected a number")
        return value.astype(np.int64) if value.dtype.kind == "b" else value

    def _arithmetic(self, node: ast.expr, left: ast.expr, op: ast.operator, right: ast.expr) -> np.ndarray:
        first = self._number(left)
        second = self._number(right)
        if isinstance(op, ast.Div | ast.FloorDiv | ast.Mod) and bool(np.any(second == 0)):
            self._refuse(right, "is a divisor that is 0 for some samples")
        integers = first.dtype.kind == "i" and second.dtype.kind == "i"
        if integers and not isinstance(op, ast.Div):  # numpy's integers wrap around silently
            size = _ARITHMETIC[type(op)] if isinstance(op, ast.Mult) else operator.add
            if float(size(_magnitude(first), _magnitude(second))) > _LARGEST:
                self._refuse(node, "exceeds 64 bits for some samples")
        return np.asarray(_ARITHMETIC[type(op)](first, second))

    def _called(self, node: ast.expr, name: str, values: list[np.ndarray]) -> np.ndarray:
        try:
            return FUNCTIONS[name](*values)
        except (TypeError, ValueError) as error:
            return self._refuse(node, f"cannot be computed: {error}")

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> np.ndarray:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple):
                self._refuse(right, "is not a list: write one after `in`, as in `language in ['en', 'de']`")
            is_in: np.ndarray = np.asarray(False)
            for item in right.elts:
                is_in = np.logical_or(is_in, self._compare(left, ast.Eq(), item))
            return is_in if isinstance(op, ast.In) else np.logical_not(is_in)
        if type(op) not in _COMPARISONS:
            self._refuse(right, "is compared with `is`: use == or !=")
        first = self.value(left)
        second = self.value(right)
        if "M" in (first.dtype.kind, second.dtype.kind):
            return np.asarray(_COMPARISONS[type(op)](self._date(left, first), self._date(right, second)))
        if (first.dtype.kind == "U") != (second.dtype.kind == "U"):
            self._refuse(right, f"is {_kind(second)}, compared with {_kind(first)}")
        return np.asarray(_COMPARISONS[type(op)](first, second))

    def _date(self, node: ast.expr, value: np.ndarray) -> np.ndarray:
        if value.dtype.kind == "M":
            return value
        if value.ndim or value.dtype.kind != "U" or not _DATE.fullmatch(str(value)):
            self._refuse(node, "is compared with a date: write one as '2024-01-31' or '2024-01-31 18:00:00'")
        try:
            return np.asarray(np.datetime64(str(value)))
        except ValueError:
            return self._refuse(node, "is no date of the calendar")

    def _refuse(self, node: ast.expr, why: str) -> NoReturn:
        said = _IDENTIFIER.sub(lambda match: _quoted(_unquoted(match[0])), ast.unparse(node))
        raise ConfigurationError(
            f"expression {self._text!r}: `{said}` {why}. Use columns, numbers, strings, comparisons, "
            f"`in` with a list, and, or, not, + - * / // %, and {', '.join(FUNCTIONS)}."
        )


_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?)?")


def _quoted(name: str) -> str:
    """Return a name of a column as an expression has it."""
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"`{name}`"


def _magnitude(value: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(value.astype(np.float64)).max(initial=0.0))


def _kind(value: np.ndarray) -> str:
    return {"b": "true or false", "i": "a number", "f": "a number", "U": "a string", "M": "a date"}.get(
        value.dtype.kind, "no number"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Expressions over the columns of datasets filter, weigh and group samples: what the core asks for by the registry.


_REMEDIES = {
    "tokens": "--processor MODEL (or --encoder MODULE:ENCODER)",
    "bytes": "--bytes",
    "sound_seconds": "--sound-seconds",
    "width": "--image-size",
    "height": "--image-size",
}
"""The flag of `energon columns add` that makes a column, by the column's name."""


def kept_samples(
    dataset: PreparedDataset | JoinedDataset, text: str, start: int, stop: int, *, where: str
) -> np.ndarray:
    """Return the numbers of the samples in [start, stop) that a filter keeps, ascending, int32 or int64.

    Raises ConfigurationError for a wrong expression or column, MetadataError for a column of other shards or a dataset
    that can have none, and EmptyDatasetError if nothing is kept.
    """
    numbers = start + np.flatnonzero(
        _evaluated(evaluate, dataset, text, slice(start, stop), where=where, use="filtered")
    )
    if not numbers.size:
        raise EmptyDatasetError(f"{dataset.path}: none of its {stop - start} samples passes the filter {text!r}")
    return numbers.astype(np.int32) if stop <= np.iinfo(np.int32).max else numbers


def numbers_of_samples(
    dataset: PreparedDataset | JoinedDataset,
    text: str,
    *,
    where: str,
    samples: np.ndarray | None = None,
    use: str,
    counts: bool = False,
) -> np.ndarray:
    """Return the number that an expression of columns gives for each sample, floats of shape (dataset.num_samples,).

    `samples` are the numbers of those that matter (default: all); others, which a filter or subset leaves out, get 0,
    and the expression may be undefined for them. `use` and `counts` (the weights of a blend are shares of it) are for
    the errors.

    Raises ConfigurationError for a wrong expression or column, MetadataError for a column of other shards or a dataset
    that can have none.
    """
    chosen = slice(None) if samples is None else samples
    numbers = np.zeros(dataset.num_samples)
    evaluated = partial(evaluate_number, samples=samples)
    numbers[chosen] = _evaluated(evaluated, dataset, text, chosen, where=where, use=use, counts=counts)
    return numbers


def values_of_samples(dataset: PreparedDataset | JoinedDataset, text: str, samples: np.ndarray) -> np.ndarray:
    """Return what an expression of columns gives for samples, by their numbers: numbers or texts, of the same shape.

    Raises ConfigurationError for a wrong expression or column, MetadataError for a dataset that can have none.
    """
    return _evaluated(evaluate_value, dataset, text, samples, where=dataset.path, use="grouped by them")


def _evaluated(
    how: Callable[..., np.ndarray],
    dataset: PreparedDataset | JoinedDataset,
    text: str,
    chosen: slice | np.ndarray,
    *,
    where: str,
    use: str,
    counts: bool = False,
) -> np.ndarray:
    """Return what an expression of columns gives for the chosen samples; `how` is an `evaluate…` function."""
    if isinstance(dataset, (JoinedDataset, JsonlDataset)):
        what = "a join" if isinstance(dataset, JoinedDataset) else "a JSONL file"
        raise MetadataError(f"{where}: {what} has no columns and cannot be {use}: {text}")
    names = column_names(text)
    hint = ""
    columns: dict[str, np.ndarray]
    if isinstance(dataset, ForeignDataset):
        all_columns: Mapping[str, object] = dict.fromkeys(dataset.columns)
        columns = {name: dataset.read_values(name)[chosen] for name in names if name in all_columns}
    else:
        all_columns = added = read_columns(dataset.store)
        columns = {name: column_of(dataset, name, added)[chosen] for name in names if name in added}
        hint = "" if added else f" Add one: energon columns add {dataset.path} --help"
    missing = next((name for name in names if name not in all_columns), None)
    if missing is not None and (counts or (missing in _REMEDIES and not isinstance(dataset, ForeignDataset))):
        of_blend = f" The weights of its blend are shares of `{text}`." if counts else ""
        how_to_add = _REMEDIES.get(missing, f"{missing} --of MODULE:FUNCTION")
        hint = f"{of_blend} Add it: energon columns add {dataset.path} {how_to_add}"
    missing_at = _without_value(dataset, columns, is_filter=how is evaluate)
    columns = {name: np.asarray(values) for name, values in columns.items()}
    if len(columns) < len(all_columns):  # for the error, which lists them
        columns |= {name: np.empty(0) for name in all_columns.keys() - columns.keys()}
    try:
        values = how(text, columns, num_samples=np.arange(dataset.num_samples)[chosen].size)
    except ConfigurationError as error:
        raise ConfigurationError(f"{dataset.path}: {error}{hint}") from error
    return values if missing_at is None else values & ~missing_at


def _without_value(
    dataset: PreparedDataset, columns: Mapping[str, np.ndarray], *, is_filter: bool
) -> np.ndarray | None:
    """Return which samples have no value in one of some columns, None if all have: a filter leaves them out.

    Raises ConfigurationError if it is no filter, but something that needs a value of each sample.
    """
    masks = {name: np.ma.getmaskarray(values) for name, values in columns.items() if np.ma.isMaskedArray(values)}
    masks = {name: mask for name, mask in masks.items() if mask.any()}
    if not masks:
        return None
    if not is_filter:
        name, mask = next(iter(masks.items()))
        raise ConfigurationError(
            f"{dataset.path}: the column {name!r} has no value in {np.count_nonzero(mask)} of {mask.size} rows, so it "
            "can only be used in a filter, which leaves these out. Write values to all rows."
        )
    return np.asarray(np.logical_or.reduce([*masks.values()]))
