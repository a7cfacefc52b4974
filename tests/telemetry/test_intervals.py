"""Spans of time."""

from telemetry.intervals import length, union


def test_time_that_is_covered_twice_counts_once():
    assert length(union([(0, 4), (2, 6), (3, 5), (8, 9)])) == 7
