import logging
import os
import re
import sys

import pytest

from telemetry.progress import progress_bar


def draw(steps):
    handler = logging.StreamHandler(sys.stdout)
    logging.root.addHandler(handler)
    try:
        with progress_bar(3, 3 + steps, rank=0) as bar:
            for step in range(steps):
                logging.warning("line %d", step)
                bar.update()
    finally:
        logging.root.removeHandler(handler)


def test_lines_alone_where_stdout_is_no_terminal(capsys):
    draw(4)
    assert capsys.readouterr().out == "line 0\nline 1\nline 2\nline 3\n"


def test_a_bar_below_the_lines_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda stream: (80, 24))
    draw(4)
    out = capsys.readouterr().out
    for step in range(4):
        assert f"line {step}\n" in out
    assert re.search(r"43%.*3/7 \[", out) and re.search(r"100%.*7/7 \[.*steps/s", out)
    assert out.endswith("\n")  # What comes next has a line of its own.


def test_other_ranks_draw_nothing(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with progress_bar(0, 2, rank=1) as bar:
        bar.update()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_the_cursor_stays(capsys, monkeypatch):
    """A process may end by os._exit in the midst of it."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    draw(1)
    assert "\033[?25l" not in capsys.readouterr().out
