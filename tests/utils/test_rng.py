"""Keyed generators: the numbers depend only on the key."""

import itertools

import numpy as np

from utils.rng import Stream, keyed_generator, keyed_uniforms


def draw(*key, count: int = 4) -> tuple[int, ...]:
    return tuple(keyed_generator(*key).integers(0, 2**63, count).tolist())


def test_numbers_follow_from_every_part_of_the_key_and_from_nothing_else():
    first = draw(3, Stream.AUGMENT, 5, 7)
    draw(3, Stream.AUGMENT, 5, 8, count=100)
    np.random.seed(0)  # noqa: NPY002  the global state must not matter
    assert draw(3, Stream.AUGMENT, 5, 7) == first
    keys = itertools.product((0, 1, 2**40), (Stream.PERMUTATION, Stream.AUGMENT), (0, 1), (0, 1), (0, 2**40))
    numbers = [draw(*key) for key in keys]
    assert len(set(numbers)) == len(numbers)
    assert draw(-1, Stream.INIT) != draw(1, Stream.INIT)


def test_neighboring_keys_share_no_numbers():
    """A counter's stream must not be a shifted copy of its neighbor's."""
    streams = [draw(0, Stream.AUGMENT, 0, position, count=2000) for position in range(8)]
    assert len(set(itertools.chain.from_iterable(streams))) == 16_000


def test_numbers_are_the_same_on_every_machine():
    """Compared with Philox set up by hand: seed and stream are the key, the counters are above the word that counts
    draws."""
    bits = np.random.Philox(key=[11, int(Stream.MULTI_SCALE)], counter=[0, 2, 3, 4])
    by_hand = np.random.Generator(bits).random(5)
    np.testing.assert_array_equal(keyed_generator(11, Stream.MULTI_SCALE, 2, 3, 4).random(5), by_hand)


def test_rows_of_uniform_numbers_depend_only_on_their_own_key():
    places = [(2, 5), (2, 6), (2, 7), (2, 2**40), (3, 2**40 + 1), (0, 0), (2, 5)]
    rows = keyed_uniforms(11, Stream.AUGMENT, places, 10)
    assert rows.shape == (7, 10)
    for place, row in zip(places, rows):
        np.testing.assert_array_equal(keyed_uniforms(11, Stream.AUGMENT, [place], 10), [row])
    assert len({number for row in rows[:-1] for number in row.tolist()}) == 60
    by_hand = np.random.Philox(key=[11, int(Stream.AUGMENT)], counter=[5 * 3, 2, 0, 0])
    np.testing.assert_array_equal(np.random.Generator(by_hand).random(10), rows[0])
