"""Keyed randomness: golden values, so that no version of anything changes an order, and the laws of permutations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from strategies import keys

from energon_bridge.core.order.rng import MASK64, Permutation, below, draws, fold, key_of, mix64, shuffled


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((), 13020603013274838756),
        (("leaf", 0, "abc"), 10402755943129306033),
        ((1,), 5915387701535359156),
        (("1",), 2719341880981614277),
        ((b"1",), 1523786683038013815),
        (("ab", "c"), 6617615575610711863),
        (("a", "bc"), 1773184913906934406),
        ((-3, 2**70), 2203549626662373946),
    ],
)
def test_key_of_is_fixed(parts: tuple[int | str | bytes, ...], expected: int) -> None:
    assert key_of(*parts) == expected


@given(st.lists(st.integers() | st.text() | st.binary(), max_size=4), st.lists(st.integers() | st.text(), max_size=4))
def test_key_of_tells_parts_apart(a: list[int | str | bytes], b: list[int | str]) -> None:
    same = [(type(x), x) for x in a] == [(type(x), x) for x in b]
    assert (key_of(*a) == key_of(*b)) == same


@pytest.mark.parametrize(
    ("key", "numbers", "expected"),
    [
        (0, (0,), 12035550249420947055),
        (1, (2, 3), 411002803395772997),
        (MASK64, (-1,), 7136257342804621622),
        (5, (), 5),
    ],
)
def test_fold_is_fixed(key: int, numbers: tuple[int, ...], expected: int) -> None:
    assert fold(key, *numbers) == expected


def test_mix64_below_shuffled_and_permutation_are_fixed() -> None:
    assert [mix64(x) for x in (0, 1, MASK64)] == [0, 6238072747940578789, 13029008266876403067]
    assert below(7, 10, 6).tolist() == [2, 0, 5, 3, 2, 1, 2, 1, 0, 2]
    assert below(7, 3, 2**32 - 1).tolist() == [1674306019, 72105174, 3868737663]
    assert shuffled(7, 10).tolist() == [1, 8, 5, 7, 0, 9, 4, 6, 3, 2]
    small, large = Permutation(10, 7), Permutation(10**9, 7)
    assert [small.at(place) for place in range(10)] == [9, 2, 8, 7, 6, 4, 1, 3, 0, 5]
    assert [large.at(place) for place in (0, 1, 10**9 - 1)] == [534312685, 991893417, 570236318]
    assert large.place_of(0) == 53860031


@given(keys, st.lists(st.integers(-1, 2**40), max_size=3), st.lists(st.integers(-1, 2**40), max_size=3))
def test_fold_goes_number_by_number(key: int, a: list[int], b: list[int]) -> None:
    assert fold(key, *a, *b) == fold(fold(key, *a), *b)
    assert 0 <= fold(key, *a) <= MASK64
    if len(a) == len(b):
        assert (fold(key, *a) == fold(key, *b)) == (a == b)


def test_draws_are_those_of_splitmix64() -> None:
    """The first three are published as the outputs of SplitMix64 for the seed 0."""
    assert draws(0, 4).tolist() == [16294208416658607535, 7960286522194355700, 487617019471545679, 17909611376780542444]
    assert draws(MASK64, 2).tolist() == [16490336266968443936, 16834447057089888969]


@given(keys, st.integers(0, 50))
def test_draws_agree_with_the_arithmetic_of_python(key: int, n: int) -> None:
    assert draws(key, n).tolist() == [mix64((i * 0x9E3779B97F4A7C15 + key) & MASK64) for i in range(1, n + 1)]


@given(keys, st.integers(0, 100), st.integers(1, 2**32 - 1))
def test_below_stays_below(key: int, n: int, bound: int) -> None:
    numbers = below(key, n, bound)
    assert numbers.shape == (n,)
    assert numbers.dtype == np.int64
    assert all(0 <= number < bound for number in numbers.tolist())


@given(keys, st.integers(0, 300))
def test_shuffled_is_a_permutation(key: int, n: int) -> None:
    assert sorted(shuffled(key, n).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [*range(1, 20), 64, 255, 257, 4097])
def test_permutation_is_a_bijection_with_its_inverse(n: int) -> None:
    for key in (0, 1, MASK64):
        permutation = Permutation(n, key)
        numbers = [permutation.at(place) for place in range(n)]
        assert sorted(numbers) == list(range(n))
        assert [permutation.place_of(number) for number in numbers] == list(range(n))
        assert permutation.at_many(np.arange(n)).tolist() == numbers


@given(st.integers(1, 2**50), keys, st.data())
def test_permutation_of_any_size_inverts_itself(n: int, key: int, data: st.DataObject) -> None:
    permutation = Permutation(n, key)
    places = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    numbers = permutation.at_many(np.array(places, dtype=np.int64))
    assert numbers.tolist() == [permutation.at(place) for place in places]
    assert [permutation.place_of(number) for number in numbers.tolist()] == places


def test_permutations_of_different_keys_have_little_in_common() -> None:
    """Every number is about equally often at every place, over keys; five standard deviations are allowed."""
    n, trials = 16, 4000
    seen = np.zeros((n, n))
    for key in range(trials):
        seen[np.arange(n), Permutation(n, fold(3, key)).at_many(np.arange(n))] += 1
    assert np.abs(seen - trials / n).max() < 5 * (trials / n) ** 0.5
