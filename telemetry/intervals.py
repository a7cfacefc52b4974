"""Spans of time: what several of them cover together, and what one covers and others do not."""

Intervals = list[tuple[float, float]]


def union(intervals: Intervals) -> Intervals:
    """What any of the intervals covers, as intervals in order that do not touch."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def without(a: Intervals, b: Intervals) -> Intervals:
    """What `a` covers and `b` does not. Both are unions."""
    left, at = [], 0
    for begin, end in a:
        while at < len(b) and b[at][1] <= begin:
            at += 1
        i = at
        while i < len(b) and b[i][0] < end:
            if b[i][0] > begin:
                left.append((begin, b[i][0]))
            begin = max(begin, b[i][1])
            i += 1
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Intervals) -> float:
    """Of a union."""
    return sum(end - begin for begin, end in intervals)
