from __future__ import annotations

import pytest

from baguarun.errors import UsageError
from baguarun.launcher.command_line import Given, read_command_line, read_environment
from baguarun.launcher.options import OPTIONS


def test_the_public_options_are_these_and_no_others() -> None:
    listed = {option.name for option in OPTIONS if not option.refusal}
    assert listed == {
        *("nproc-per-node", "bind", "algorithm", "bagua-net", "timeline", "role"),
        *("nnodes", "store", "job-id", "standalone", "local-addr", "node-name", "node-rank"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-conf", "master-addr", "master-port"),
        *(
            "elastic",
            "spares",
            "hang-timeout",
            "on-hang",
            "max-restarts",
            "detect-timeout",
            "join-timeout",
            "shutdown-timeout",
        ),
        *("module", "no-python"),
        *("log-dir", "tee", "redirects", "local-ranks-filter", "metrics-port"),
        *("monitor-interval", "start-method", "run-path"),
    }
    assert {option.alias for option in OPTIONS if option.alias} == {"rdzv-id", "numa-binding"}
    assert {option.short for option in OPTIONS if option.short} == {"m", "t", "r"}


def test_every_option_of_torchrun_is_known() -> None:
    run = pytest.importorskip("torch.distributed.run")
    known = {f"--{name}" for option in OPTIONS for name in (option.name, option.alias) if name}
    theirs = {
        string.replace("_", "-")
        for action in run.get_args_parser()._actions
        for string in action.option_strings
        if string.startswith("--") and string != "--help"
    }
    assert theirs - known == set()


def test_every_variable_of_torchrun_is_read() -> None:
    run = pytest.importorskip("torch.distributed.run")
    from torch.distributed.argparse_util import check_env, env

    read = {variable for option in OPTIONS for variable in option.variables}
    theirs = {
        f"PET_{action.dest.upper()}"
        for action in run.get_args_parser()._actions
        if isinstance(action, env | check_env)
    }
    assert theirs - read == set()


def test_options_end_at_the_script() -> None:
    line = read_command_line(["--nnodes", "2", "train.py", "--nnodes", "3", "--help", "-m"])
    assert line.given == {"nnodes": Given("2", "--nnodes")}
    assert line.script == "train.py"
    assert line.script_args == ("--nnodes", "3", "--help", "-m")


def test_a_double_dash_of_the_script_stays_with_the_script() -> None:
    line = read_command_line(["train.py", "--", "--x", "--"])
    assert line.script_args == ("--", "--x", "--")


def test_a_double_dash_before_the_script_ends_the_options() -> None:
    line = read_command_line(["--standalone", "--", "--odd-name.py", "1"])
    assert (line.script, line.script_args) == ("--odd-name.py", ("1",))


@pytest.mark.parametrize(
    "words",
    [["--nproc-per-node", "4"], ["--nproc_per_node", "4"], ["--nproc-per-node=4"], ["--nproc_per_node=4"]],
)
def test_both_spellings_and_both_ways_to_give_a_value_are_one(words: list[str]) -> None:
    assert read_command_line([*words, "x.py"]).given["nproc-per-node"].text == "4"


def test_the_last_of_a_repeated_flag_wins() -> None:
    assert read_command_line(["--role=a", "--role", "b", "x.py"]).given["role"].text == "b"


@pytest.mark.parametrize("words", [["-t", "3"], ["-t3"], ["-t=3"], ["--tee", "3"]])
def test_short_flags_take_their_value_apart_or_attached(words: list[str]) -> None:
    line = read_command_line([*words, "x.py"])
    assert line.given["tee"].text == "3"
    assert line.script == "x.py"


def test_a_word_of_two_letters_is_a_value_even_if_its_second_is_a_short_flag() -> None:
    assert read_command_line(["--log-dir", "tm", "x"]).given["log-dir"].text == "tm"


def test_a_value_may_be_empty_or_start_with_a_dash_or_hold_anything() -> None:
    assert read_command_line(["--max-restarts", "-1", "x"]).given["max-restarts"].text == "-1"
    assert read_command_line(["--log-dir", "a b'\"$(x)", "x"]).given["log-dir"].text == "a b'\"$(x)"
    assert read_command_line(["--log-dir=", "x"]).given["log-dir"].text == ""


@pytest.mark.parametrize("words", [["--nnodes"], ["--nnodes", "--standalone", "x.py"], ["-t", "-r", "x.py"]])
def test_a_missing_value_names_the_flag_and_the_form(words: list[str]) -> None:
    with pytest.raises(UsageError, match=r"want a value after it: --(nnodes N\|MIN:MAX|tee 0-3)"):
        read_command_line(words)


def test_a_switch_takes_no_value() -> None:
    with pytest.raises(UsageError, match="--standalone=1: want --standalone without a value"):
        read_command_line(["--standalone=1", "x.py"])


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--nodes", "--nnodes"),
        ("--nproc-per-nod=2", "--nproc-per-node"),
        ("--max_restart", "--max-restarts"),
        ("--rdzv_endpont=x:1", "--rdzv-endpoint"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_flag(word: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown flag; did you mean {meant}\?"):
        read_command_line([word, "x.py"])


@pytest.mark.parametrize("word", ["--qqqqqqqq", "-z", "-mfoo"])
def test_an_unknown_flag_is_named(word: str) -> None:
    with pytest.raises(UsageError, match=f"^{word}: unknown flag"):
        read_command_line([word, "x.py"])


@pytest.mark.parametrize("words", [["-h"], ["--help"], ["--nnodes", "2", "--help", "x.py"]])
def test_help_is_wanted_only_before_the_script(words: list[str]) -> None:
    assert read_command_line(words).help_wanted


def test_our_variable_beats_torchruns_and_an_empty_one_is_none() -> None:
    both = {"BAGUARUN_NNODES": "2", "PET_NNODES": "3"}
    assert read_environment(both)["nnodes"] == Given("2", "BAGUARUN_NNODES")
    assert read_environment({**both, "BAGUARUN_NNODES": ""})["nnodes"] == Given("3", "PET_NNODES")
    assert read_environment({"BAGUARUN_NNODES": ""}) == {}


def test_torchruns_job_id_variable_has_torchruns_name() -> None:
    assert read_environment({"PET_RDZV_ID": "j"})["job-id"].text == "j"


def test_a_switch_in_the_environment_is_on_or_off() -> None:
    assert "standalone" in read_environment({"PET_STANDALONE": "1"})
    assert "standalone" not in read_environment({"PET_STANDALONE": "0"})
    assert "standalone" not in read_environment({"BAGUARUN_STANDALONE": "no", "PET_STANDALONE": "1"})
    with pytest.raises(UsageError, match="PET_STANDALONE=maybe: want 1 or 0"):
        read_environment({"PET_STANDALONE": "maybe"})
