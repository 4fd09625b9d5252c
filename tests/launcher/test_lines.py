from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baguarun.launcher.lines import MAX_LINE_BYTES, PARTIAL_LINE_S, PROGRESS_INTERVAL_S, ConsoleLines

P = b"[a:0] "


def feed_all(lines: ConsoleLines, *pieces: bytes) -> bytes:
    return b"".join(lines.feed(piece, 0.0) for piece in pieces) + lines.finish()


def test_every_whole_line_gets_the_prefix_and_the_last_one_its_newline():
    assert feed_all(ConsoleLines(P), b"one\n\ntwo\nthree") == b"[a:0] one\n[a:0] \n[a:0] two\n[a:0] three\n"


@given(st.lists(st.binary(max_size=12)), st.data())
def test_lines_do_not_depend_on_where_the_reads_were_cut(words, data):
    text = b"\n".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert feed_all(ConsoleLines(P), *pieces) == feed_all(ConsoleLines(P), text)


@given(st.lists(st.binary(max_size=12).map(lambda word: word.replace(b"\n", b"").replace(b"\r", b""))))
def test_without_carriage_returns_the_console_has_every_byte(words):
    text = b"".join(word + b"\n" for word in words)
    assert feed_all(ConsoleLines(b""), text) == text


def test_windows_line_ends_are_line_ends_also_when_split():
    assert feed_all(ConsoleLines(P), b"one\r", b"\ntwo\r\n") == b"[a:0] one\n[a:0] two\n"


def test_a_redrawn_line_is_shown_in_its_last_state():
    assert feed_all(ConsoleLines(P), b"\r 10%\r 50%", b"\r100%\ndone\n") == b"[a:0] 100%\n[a:0] done\n"


def test_a_progress_bar_is_shown_now_and_then():
    lines = ConsoleLines(P)
    assert lines.feed(b"\r 10%\r 20%", 0.0) == b""
    assert lines.overdue(PROGRESS_INTERVAL_S / 2) == b""
    assert lines.overdue(PROGRESS_INTERVAL_S) == b"[a:0]  20%\n"
    assert lines.feed(b"\r 30%", 1.5) == b""
    assert lines.overdue(1.5 + PROGRESS_INTERVAL_S) == b"[a:0]  30%\n"
    # The newline that ends the bar adds no empty line.
    assert lines.feed(b"\nnext\n", 9.0) == b"[a:0] next\n"


def test_the_last_words_before_a_hang_are_shown():
    lines = ConsoleLines(P)
    assert lines.feed(b"loading the data ...", 0.0) == b""
    assert lines.overdue(PARTIAL_LINE_S / 2) == b""
    assert lines.overdue(PARTIAL_LINE_S) == b"[a:0] loading the data ...\n"
    assert not lines.waiting
    assert lines.feed(b" done\n", 100.0) == b"[a:0]  done\n"


def test_a_line_without_end_is_cut_and_never_inside_a_character():
    text = "é漢🎉".encode() * MAX_LINE_BYTES
    lines = ConsoleLines(P)
    shown = (
        b"".join(lines.feed(text[at : at + 1000], 0.0) for at in range(0, len(text), 1000)) + lines.finish()
    )
    rows = shown.splitlines()
    assert all(row.startswith(P) and len(row) <= MAX_LINE_BYTES + len(P) for row in rows)
    assert b"".join(row.removeprefix(P) for row in rows) == text
    for row in rows:
        row.decode()


def test_bytes_that_are_no_text_pass_unchanged():
    garbage = bytes(byte for byte in range(256) if byte not in b"\r\n") * 1000
    rows = feed_all(ConsoleLines(P), garbage).splitlines()
    assert len(rows) > 1
    assert b"".join(row.removeprefix(P) for row in feed_all(ConsoleLines(P), garbage).split(b"\n")) == garbage
