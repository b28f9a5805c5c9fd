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
