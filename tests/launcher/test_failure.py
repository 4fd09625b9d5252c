from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest

from baguarun.contract import Failure
from baguarun.launcher.failure import cause_from_output, format_report, read_error_file

GOLDEN = Path(__file__).with_name("golden")

TRACEBACK = textwrap.dedent(
    """\
    Traceback (most recent call last):
      File "train.py", line 3, in <module>
        step()
    ValueError: loss is nan
    """
)


def failure(**changes) -> Failure:
    values = {
        "generation": 2,
        "node": "gpu-7",
        "rank": 13,
        "local_rank": 5,
        "pid": 4242,
        "exit_code": 1,
        "signal": None,
        "timestamp_s": 1795177986.25,
    }
    return Failure(**{**values, **changes})


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (
            "exception",
            failure(
                message="ValueError: loss is nan",
                traceback=TRACEBACK,
                log_path="/logs/job/generation-2/rank-13",
            ),
        ),
        ("sigkill", failure(exit_code=None, signal=9)),
        ("unknown_signal", failure(exit_code=None, signal=63, log_path="/logs/a b")),
        ("silent_exit", failure(exit_code=7)),
        (
            "hostile_text",
            failure(
                message="E: {x} %s\nsecond line", traceback="%d {y} \x1b[0m\n\n  é漢\n", timestamp_s=0.0005
            ),
        ),
    ],
)
def test_the_report_reads_as_agreed(name, case):
    assert format_report(case, "digits-1") == (GOLDEN / f"report_{name}.txt").read_text()


def test_the_report_says_what_became_of_the_job() -> None:
    report = format_report(failure(), "digits-1", "after 3 of 3 restarts")
    assert report.startswith("baguarun: job digits-1 failed after 3 of 3 restarts. The first failure")


def test_an_error_that_is_all_there_is_to_say_is_said_once() -> None:
    cause = cause_from_output("", "no data\n")
    report = format_report(failure(message=cause.message, traceback=cause.traceback), "digits-1")
    assert report.count("no data") == 1


def test_the_last_traceback_of_the_output_is_the_cause():
    first = TRACEBACK.replace("loss is nan", "old news")
    cause = cause_from_output("", f"starting\n{first}recovered\n{TRACEBACK}")
    assert cause.message == "ValueError: loss is nan"
    assert cause.traceback == TRACEBACK.rstrip()


@pytest.mark.parametrize(
    "link",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_a_chain_of_exceptions_is_kept_whole(link):
    first = TRACEBACK.replace("loss is nan", "the reason")
    cause = cause_from_output("", f"noise\n{first}\n{link}\n\n{TRACEBACK}")
    assert cause.message == "ValueError: loss is nan"
    assert cause.traceback == f"{first}\n{link}\n\n{TRACEBACK}".rstrip()


def test_the_rank_that_torch_puts_in_front_is_taken_off():
    prefixed = "".join(f"[rank13]: {line}\n" for line in TRACEBACK.splitlines())
    assert cause_from_output("", prefixed).traceback == TRACEBACK.rstrip()


def test_a_message_of_several_lines_is_kept():
    cause = cause_from_output("", TRACEBACK + "size mismatch for fc.weight\n\n")
    assert cause.message == "ValueError: loss is nan"
    assert cause.traceback.endswith("ValueError: loss is nan\nsize mismatch for fc.weight")


def test_a_traceback_is_found_in_stdout_when_the_script_sends_everything_there():
    assert cause_from_output(TRACEBACK, "warning: something\n").message == "ValueError: loss is nan"


def test_a_fatal_error_of_the_interpreter_counts_as_a_traceback():
    cause = cause_from_output("", 'hm\nFatal Python error: Segmentation fault\n\n  File "a.py", line 1\n')
    assert cause.message == "Fatal Python error: Segmentation fault"
    assert cause.traceback.startswith("Fatal") and cause.traceback.endswith("line 1")


def test_without_a_traceback_the_last_words_have_to_do():
    words = "".join(f"line {i}\n\n" for i in range(30))
    cause = cause_from_output("", words + "sh: 1: nope: not found\n")
    assert cause.message == "sh: 1: nope: not found"
    assert cause.traceback.splitlines() == [f"line {i}" for i in range(21, 30)] + ["sh: 1: nope: not found"]
    assert cause_from_output("progress\n", "") == cause_from_output("", "\n\n")


def test_a_traceback_cut_off_at_its_head_still_yields_its_end():
    cause = cause_from_output("", TRACEBACK.partition("\n")[2])
    assert cause.message == "ValueError: loss is nan"


def test_an_endless_traceback_is_shortened_in_the_middle():
    deep = (
        "Traceback (most recent call last):\n"
        + '  File "a.py", line 1, in f\n' * 900
        + "RecursionError: deep\n"
    )
    lines = cause_from_output("", deep).traceback.splitlines()
    assert len(lines) == 201
    assert lines[100] == "... 702 lines left out ..."
    assert lines[-1] == "RecursionError: deep"


def write(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    os.utime(path, (1000.5, 1000.5))
    return str(path)


def test_the_file_that_torch_records_an_exception_in_is_read(tmp_path):
    extra = {"py_callstack": TRACEBACK, "timestamp": "1000"}
    content = {"message": {"message": "ValueError: loss is nan", "extraInfo": extra}}
    recorded = read_error_file(write(tmp_path / "error.json", content))
    assert recorded is not None
    cause, written_s = recorded
    assert (cause.message, cause.traceback) == ("ValueError: loss is nan", TRACEBACK.rstrip())
    assert written_s == 1000.5


def test_an_error_file_with_a_plain_message_is_read(tmp_path):
    recorded = read_error_file(write(tmp_path / "error.json", {"message": "out of cheese\n"}))
    assert recorded is not None
    assert (recorded[0].message, recorded[0].traceback) == ("out of cheese", "")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "3", '{"message": 3}', '{"other": "x"}', '{"message": null}']
)
def test_an_error_file_that_is_none_is_left_alone(tmp_path, content):
    assert read_error_file(write(tmp_path / "error.json", content)) is None
    assert read_error_file(str(tmp_path / "absent.json")) is None
    assert read_error_file("") is None


def test_an_error_file_with_odd_parts_is_read_as_far_as_it_goes(tmp_path):
    recorded = read_error_file(write(tmp_path / "error.json", {"message": {"message": "x", "extraInfo": []}}))
    assert recorded is not None
    assert recorded[0].message == "x"
