"""The YAML dialect of metadata files, and brace expressions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from energon_bridge.core.errors import MetadataError
from energon_bridge.core.format.documents import parse_document
from energon_bridge.core.format.nvmeta import collapse_braces, expand_braces

# --- the YAML dialect ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("Yes", True),
        ("no", False),
        ("on", "on"),
        ("off", "off"),
        ("null", None),
        ("~", None),
        ("", None),
        ("010", 10),
        ("1_000", 1000),
        ("-7", -7),
        ("1e5", 100000.0),
        ("1e-4", 1e-4),
        (".5", 0.5),
        ("1.", 1.0),
        ("0x10", "0x10"),
        ("nan", "nan"),
        ("2024-01-02", "2024-01-02"),
        ("12:30", "12:30"),
        ("1.2.3", "1.2.3"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("s_{000..009}.tar", "s_{000..009}.tar"),
        ("[1, two, 3.0]", [1, "two", 3.0]),
        ("{a: 1, 2: b}", {"a": 1, "2": "b"}),
    ],
)
def test_scalars_mean_what_energon_means(text: str, value: Any):
    parsed = parse_document(f"key: {text}\n".encode(), where="f.yaml")["key"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_anchors_aliases_and_merge_keys_work():
    text = b"base: &base {a: 1, b: [x]}\nother: *base\nmerged: {<<: *base, a: 2}\nword: &w hello\nagain: *w\n"
    assert parse_document(text, where="f.yaml") == {
        "base": {"a": 1, "b": ["x"]},
        "other": {"a": 1, "b": ["x"]},
        "merged": {"a": 2, "b": ["x"]},
        "word": "hello",
        "again": "hello",
    }


def test_a_key_that_is_merged_and_given_again_does_not_stand_twice():
    text = b"top:\n  deep:\n    one: &one {x: 1, y: 1}\n    two: &two {<<: *one, x: 2}\nlast: {<<: *two, y: 3}\n"
    parsed = parse_document(text, where="f.yaml")
    assert parsed["top"]["deep"]["two"] == {"x": 2, "y": 1}
    assert parsed["last"] == {"x": 2, "y": 3}


def bomb(levels: int) -> bytes:
    """Return YAML whose aliases multiply by ten per level."""
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines).encode()


@pytest.mark.parametrize("text", ["a:\n\tb: 1\n", "a:\n  b:\n\t c: x\n", "a:\r\n\tb: 1\r\n"])
def test_a_tab_that_indents_is_named(text: str) -> None:
    with pytest.raises(MetadataError, match=r"^mix.yaml: cannot be parsed: (.|\n)*YAML takes no tabs .*: use spaces$"):
        parse_document(text.encode(), where="mix.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "empty"),
        (b"# only a comment\n", "empty"),
        (b"a: [1", "cannot be parsed"),
        (b"a: 1\na: 2\n", "'a' occurs twice"),
        (b"? [a, b]\n: 1\n", "a key must be a plain word"),
        (b"a: *nowhere\n", "'nowhere' is undefined"),
        (b"a: &a [*a]\n", "something that contains it"),
        (b"a: !!python/object/apply:os.getcwd []\n", "python/object"),
        (b"a: !!set {b, c}\n", "yaml.org,2002:set"),
        (b"\xff\xfe\xff", "cannot be parsed"),
        (b"a: 1\n---\nb: 2\n", "more than one document"),
        (bomb(9), "too large"),
        (b"a: " + b"9" * 5000, "cannot be parsed"),
    ],
)
def test_what_is_no_plain_yaml_is_refused_by_name(text: bytes, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("energon_bridge.core.format.documents._MAX_NODES", 100_000)
    with pytest.raises(MetadataError, match=message) as caught:
        parse_document(text, where="/data/.nv-meta/f.yaml")
    assert "/data/.nv-meta/f.yaml" in str(caught.value)


# --- brace expressions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("x.tar", ["x.tar"]),
        ("x_{0..2}.tar", ["x_0.tar", "x_1.tar", "x_2.tar"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{0..6..3}", ["0", "3", "6"]),
        ("{a..c}", ["a", "b", "c"]),
        ("{a,b}{1,2}", ["a1", "a2", "b1", "b2"]),
        ("x{,_b}", ["x", "x_b"]),
        ("{a,b{1..2}}", ["a", "b1", "b2"]),
        ("{single}", ["{single}"]),
        ("a,b", ["a,b"]),
        (r"a\{b\,c", ["a{b,c"]),
        (r"\\", ["\\"]),
        ("", [""]),
        ("python{2.{5..7},3.{2,3}}", ["python2.5", "python2.6", "python2.7", "python3.2", "python3.3"]),
        ("{a..g..2}", ["a", "c", "e", "g"]),
        ("{2..-1}", ["2", "1", "0", "-1"]),
        (r"{1\{2,3}", ["1{2", "3"]),
    ],
)
def test_braces_expand_like_in_bash(pattern: str, names: list[str]):
    assert expand_braces(pattern) == names


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["{a", "a}", "{a,{b}", "x{0..2"], "unmatched"),
        (["{0..99999999999}", "{0..9999}{0..9999}"], r"more than 2,000,000 names"),
    ],
)
def test_unmatched_braces_and_too_many_names_are_errors(patterns: list[str], message: str):
    for pattern in patterns:
        with pytest.raises(ValueError, match=message):
            expand_braces(pattern)


def alternatives(parts: list[tuple[str, list[str]]]) -> tuple[str, list[str]]:
    return "{" + ",".join(text for text, _ in parts) + "}", [name for _, names in parts for name in names]


def one_after_the_other(pair: tuple[tuple[str, list[str]], tuple[str, list[str]]]) -> tuple[str, list[str]]:
    first, second = pair
    return first[0] + second[0], [left + right for left in first[1] for right in second[1]]


@given(
    st.recursive(
        st.sampled_from(
            [
                *((text, [text]) for text in ("a", "b7", "")),
                ("{01..03}", ["01", "02", "03"]),
                ("{b..d}", ["b", "c", "d"]),
                ("\\,", [","]),
            ]
        ),
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map(alternatives), st.tuples(inner, inner).map(one_after_the_other)
        ),
        max_leaves=6,
    )
)
def test_braces_expand_wherever_they_are(case: tuple[str, list[str]]):
    pattern, names = case
    assert expand_braces(pattern) == names


@settings(max_examples=50)
@given(st.lists(st.from_regex(r"[ab{},\\]{0,2}[0-9]{1,2}[._]?[0-9]{0,2}(\.tar)?", fullmatch=True), max_size=12))
def test_collapsing_can_always_be_undone(names: list[str]):
    assert [name for pattern in collapse_braces(names) for name in expand_braces(pattern)] == names


@pytest.mark.parametrize(
    ("names", "collapsed"),
    [
        ([], []),
        (["x.tar"], ["x.tar"]),
        ([f"s_{n:03d}.tar" for n in range(120)], ["s_{000..119}.tar"]),
        ([f"s_{n}.tar" for n in range(8, 12)], ["s_{8..9}.tar", "s_{10..11}.tar"]),
        (["s_1.tar", "s_3.tar"], ["s_1.tar", "s_3.tar"]),
        (["s_2.tar", "s_1.tar"], ["s_2.tar", "s_1.tar"]),
        (["a1b1", "a1b2", "a2b3"], ["a1b{1..2}", "a2b3"]),
        (["a1b1", "a1b2", "a2b2", "a3b2"], ["a1b{1..2}", "a{2..3}b2"]),
        (["a1b1", "a1b2", "a1b2"], ["a1b{1..2}", "a1b2"]),
        (["a01_b1", "a1_b2"], ["a01_b1", "a1_b2"]),
    ],
)
def test_runs_collapse_as_energon_writes_them(names: list[str], collapsed: list[str]):
    assert collapse_braces(names) == collapsed
