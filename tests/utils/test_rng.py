"""Keyed generators: the numbers depend only on the key. The reference is Philox set up by hand, whose key is seed and
stream; the counters are above the word that counts draws."""

import itertools

import numpy as np

from utils.rng import Stream, keyed_generator, keyed_uniforms


def test_numbers_follow_from_the_key_and_neighbors_share_none():
    """A counter's stream must not be a shifted copy of its neighbor's."""
    keys = itertools.product((0, 2**40), (Stream.PERMUTATION, Stream.AUGMENT), (0, 1), (0, 1, 2**40))
    numbers = []
    for seed, stream, *counters in keys:
        np.random.seed(0)  # noqa: NPY002  the global state must not matter
        drawn = keyed_generator(seed, stream, *counters).integers(0, 2**63, 500)
        by_hand = np.random.Generator(np.random.Philox(key=[seed, int(stream)], counter=[0, *counters, 0]))
        np.testing.assert_array_equal(drawn, by_hand.integers(0, 2**63, 500))
        numbers += drawn.tolist()
    assert len(set(numbers)) == len(numbers)
    assert keyed_generator(-1, Stream.INIT).random() != keyed_generator(1, Stream.INIT).random()


def test_rows_of_uniform_numbers_depend_only_on_their_own_key():
    places = [(2, 5), (2, 6), (2, 7), (2, 2**40), (3, 2**40 + 1), (0, 0), (2, 5)]
    rows = keyed_uniforms(11, Stream.AUGMENT, places, 10)
    assert rows.shape == (7, 10)
    for (epoch, number), row in zip(places, rows):
        by_hand = np.random.Philox(key=[11, int(Stream.AUGMENT)], counter=[number * 3, epoch, 0, 0])
        np.testing.assert_array_equal(np.random.Generator(by_hand).random(10), row)
