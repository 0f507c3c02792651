"""Tests of the samples of a step that are logged."""

import pytest

from mcore_rl.rollouts.collector import logged_places


@pytest.mark.parametrize(
    ("total", "group", "count", "expected"),
    [
        (64, 8, 4, [0, 1, 32, 33]),
        (64, 8, 5, [0, 1, 16, 17, 40]),
        (64, 8, 1, [0]),
        (6, 1, 3, [0, 2, 4]),
        (4, 2, 9, [0, 1, 2, 3]),
        (6, 3, 6, [0, 1, 2, 3, 4, 5]),
        (6, 3, 5, [0, 1, 2, 3, 4]),
        (8, 8, 4, [0, 1, 2, 3]),
        (0, 8, 4, []),
        (8, 4, 0, []),
    ],
)
def test_logged_places_have_two_samples_of_each_chosen_prompt(total, group, count, expected):
    assert logged_places(total, group, count) == expected
