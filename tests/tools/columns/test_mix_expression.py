"""Filter expressions: what they keep is what Python says of each sample; anything else in them is refused."""

from __future__ import annotations

import numpy as np
import pytest

from energon_bridge.core.errors import ConfigurationError
from energon_bridge.tools.columns.expression import column_names, evaluate

COLUMNS = {
    "tokens": np.array([10, 4096, 5000, 0, -7], dtype=np.int64),
    "aesthetic": np.array([5.5, 9.0, float("nan"), 4.0, 6.0]),
    "language": np.array(["en", "de", "fr", "en", ""]),
    "checked": np.array([True, False, True, True, False]),
}


@pytest.mark.parametrize(
    "text",
    [
        "aesthetic > 5 and tokens < 4096",
        "0 < tokens <= 4096",
        "not checked or language == 'en'",
        "language in ['en', 'de'] and not tokens == 0",
        "language not in ('en', '')",
        "tokens in []",
        "aesthetic != aesthetic",
        "(tokens + 6) % 4 == 0",
        "-tokens // 3 < 2 and tokens / 2 >= -3.5",
        "tokens * 2 - 1 > aesthetic",
        "checked + checked == 2",
        "tokens != 0 and 12 / tokens > 2",
        "tokens == 0 or 12 // tokens == 1 or checked",
        "not (tokens == 0 or 5 % tokens == 1) and True",
        "checked and tokens > 0 and (12 / tokens > 1 or tokens / 12 > 1)",
        "True and tokens > 3",
        "1 > 2 or tokens > 3",
        "aesthetic * 1e308 > 1",
        "True",
        "1 > 2",
    ],
)
def test_an_expression_keeps_what_python_keeps(text: str) -> None:
    rows = [{name: column[row].item() for name, column in COLUMNS.items()} for row in range(5)]
    expected = [eval(text, {}, row) for row in rows]
    kept = evaluate(text, COLUMNS, num_samples=5)
    assert kept.dtype == np.bool_
    assert kept.tolist() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokns > 1", "Did you mean 'tokens'"),
        ("__import__('os').system('true')", "not allowed"),
        ("tokens.size > 1", "not allowed"),
        ("tokens[0] > 1", "not allowed"),
        ("tokens ** 2 > 1", "not allowed"),
        ("[x for x in tokens]", "not allowed"),
        ("(lambda: checked)()", "not allowed"),
        ("tokens", "expected true or false"),
        ("tokens and checked", "expected true or false"),
        ("language + 'x' == 'enx'", "expected a number"),
        ("language > 5", "compared with"),
        ("tokens is 5", "use == or !="),
        ("language in tokens", "is not a list"),
        ("1 / tokens > 0", "is 0 for some samples"),
        ("tokens * 4611686018427387904 > 0", "exceeds 64 bits"),
        ("tokens < 99999999999999999999", "too large"),
        ("tokens >", "cannot be parsed"),
        ("", "cannot be parsed"),
        ("not " * 900 + "checked", "nested too deeply|cannot be parsed"),
        ("checked or " * 400 + "checked", "expected at most 4000"),
    ],
)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("(", r"\(")):
        evaluate(text, COLUMNS, num_samples=5)


def test_the_columns_of_an_expression_are_known_before_they_are_read() -> None:
    assert column_names("tokens > 5 and (language in ['en'] or tokens < aesthetic)") == (
        "aesthetic",
        "language",
        "tokens",
    )


NAMED = {
    "my col": np.array([1, 2, 3]),
    "a-b": np.array([3, 2, 1]),
    "class": np.array(["x", "`", "z"]),
    "1st": np.array([True, False, True]),
    "größe (px)": np.array([0, 5, 7]),
    "plain": np.array([1, 1, 2]),
}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("`my col` > 1", [False, True, True]),
        ("`a-b` == `my col`", [False, True, False]),
        ("`class` in ['x', '`'] and not `1st`", [False, True, False]),
        ("`class` == '`' or `class` == \"`a-b`\"", [False, True, False]),
        ("`größe (px)` / 5 >= 1 and `plain` == 1", [False, True, False]),
    ],
)
def test_columns_of_any_name_are_named_in_backquotes(text: str, kept: list[bool]) -> None:
    assert evaluate(text, NAMED, num_samples=3).tolist() == kept
    assert {*column_names(text)} <= NAMED.keys()


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("my col > 1", "in backquotes, as in `my column` > 5"),
        ("class == 'x'", "in backquotes"),
        ("my_col > 1", "Did you mean '`my col`'?"),
        ("a - b > 1", "Columns: `1st`, `a-b`, `class`, `größe (px)`, `my col`, plain"),
        ("`my col` == 'x'", "`'x'` is a string, compared with a number"),
        ("`my col`.x > 1", "``my col`.x` is not allowed"),
    ],
)
def test_errors_show_names_as_an_expression_has_them(text: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        evaluate(text, NAMED, num_samples=3)
    assert remedy in str(error.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("day > 5", "`5` is compared with a date: write one as '2024-01-31'"),
        ("day > '31.01.2024'", "`'31.01.2024'` is compared with a date"),
        ("day > '2024-1-5'", "is compared with a date"),
        ("day > '2024-02-30'", "`'2024-02-30'` is no date of the calendar"),
        ("day", "gives a date, expected true or false"),
        ("day + 1 > 2", "`day` is a date, expected a number"),
    ],
)
def test_dates_are_compared_with_dates_only(text: str, complaint: str) -> None:
    columns = {"day": np.array(["2024-01-31", "2024-02-01"], "datetime64[us]")}
    with pytest.raises(ConfigurationError) as error:
        evaluate(text, columns, num_samples=2)
    assert complaint in str(error.value)
    assert evaluate("'2024-01-31' < day and day in ['2024-02-01']", columns, num_samples=2).tolist() == [False, True]
