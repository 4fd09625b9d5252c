"""What is chosen without a network: interfaces by NCCL's and Gloo's rules, settings, addresses, digests."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.net import native

_PARTS = [*native.CORE, *(native.ROOT / "cpp_ext" / "net" / name for name in ("distance.cc", "host_map.cc"))]

HOST = """
lo 127.0.0.1 8 up
eth0 10.0.0.5 24 up
eth1 10.1.0.5 16 up
eth10 10.2.0.5 16 up
docker0 172.17.0.1 16 up
virbr0 192.168.122.1 24 up
wlan0 10.9.0.5 24 down
lo ::1 128 up
eth0 [2001:db8::5]:0 64 up
eth1 [fe80::5]:0 64 up
"""


def probe(*words: str, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    ours = ("BAGUA_NET_", "NCCL_", "GLOO_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    program = native.program(Path(__file__).parent / "probe.cpp", parts=_PARTS)
    return subprocess.run(
        [str(program), *words], input=given, capture_output=True, text=True, env={**kept, **environment}
    )


def chosen(rules: str = "nccl", given: str = HOST, **environment: str) -> list[str]:
    done = probe("choose", rules, given=given, **environment)
    assert done.returncode == 0, done.stderr
    return [line.split()[0] for line in done.stdout.splitlines()]


def refusal(rules: str = "nccl", given: str = HOST, **environment: str) -> str:
    done = probe("choose", rules, given=given, **environment)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("eth", ["eth0", "eth1", "eth10"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("=eth1,eth0", ["eth0", "eth1"]),
        ("^eth", ["lo", "docker0", "virbr0"]),
        ("^eth1", ["lo", "eth0", "docker0", "virbr0"]),
        ("^=eth1", ["lo", "eth0", "eth10", "docker0", "virbr0"]),
        ("^docker,lo", ["eth0", "eth1", "eth10", "virbr0"]),
        ("lo", ["lo"]),
        ("eth0:1,docker0", ["eth0", "docker0"]),
        ("=eth0:2", ["eth0"]),
    ],
)
def test_nccl_socket_ifname_follows_nccls_rules(names: str, expected: list[str]) -> None:
    assert chosen(NCCL_SOCKET_IFNAME=names) == expected


@pytest.mark.parametrize("names", ["wlan0", "=eth", "nosuch", "^lo,eth,docker,virbr,wlan"])
def test_names_that_leave_nothing_are_an_error_that_lists_what_there_is(names: str) -> None:
    assert refusal(NCCL_SOCKET_IFNAME=names).startswith(
        f"NCCL_SOCKET_IFNAME={names} leaves no interface of the wanted address family; there are: "
        "lo 127.0.0.1:0, eth0 10.0.0.5:0"
    )


def host(*names: str) -> str:
    return "\n".join(line for line in HOST.splitlines() if line.split()[:1] and line.split()[0] in names)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (HOST + "ib0 10.5.0.1 24 up\nib1 10.5.1.1 24 up\n", ["ib0", "ib1"]),
        (HOST, ["eth0", "eth1", "eth10"]),
        (host("lo", "docker0", "virbr0"), ["docker0"]),
        (host("lo", "virbr0"), ["lo"]),
        (host("virbr0"), ["virbr0"]),
    ],
)
def test_without_names_the_order_is_nccls(given: str, expected: list[str]) -> None:
    assert chosen(given=given) == expected


def test_the_root_s_network_comes_before_other_interfaces() -> None:
    assert chosen(NCCL_COMM_ID="10.1.200.1:5000") == ["eth1"]
    assert chosen(NCCL_COMM_ID="10.77.0.1:5000") == ["eth0", "eth1", "eth10"]


@pytest.mark.parametrize("root", ["node-1:5000", "node-1", "10.1.200.1:http", "[::1"])
def test_a_root_by_a_name_is_no_preference(root: str) -> None:
    assert chosen(NCCL_COMM_ID=root) == ["eth0", "eth1", "eth10"]
    assert chosen("gloo", NCCL_COMM_ID=root) == ["eth0", "eth1", "eth10"]


def test_the_family_decides_which_address_an_interface_has() -> None:
    done = probe("choose", "nccl", given=HOST, NCCL_SOCKET_FAMILY="AF_INET6")
    assert done.stdout == "eth0 [2001:db8::5]:0\neth1 [fe80::5]:0\n"
    done = probe("choose", "nccl", given=HOST, NCCL_SOCKET_FAMILY="AF_INET", NCCL_SOCKET_IFNAME="=eth0")
    assert done.stdout == "eth0 10.0.0.5:0\n"
    assert chosen(given="lo ::1 128 up", NCCL_SOCKET_FAMILY="AF_INET6", NCCL_SOCKET_IFNAME="lo") == ["lo"]


def test_gloo_s_names_are_whole_and_keep_their_order() -> None:
    assert chosen("gloo", GLOO_SOCKET_IFNAME="eth10,eth0") == ["eth10", "eth0"]
    assert refusal("gloo", GLOO_SOCKET_IFNAME="eth0,eth").startswith(
        "GLOO_SOCKET_IFNAME names eth, which is no usable interface; there are: lo"
    )
    assert chosen("gloo", NCCL_SOCKET_IFNAME="=eth1") == ["eth1"]


@pytest.mark.parametrize("names", [",", ",,"])
def test_gloo_s_names_must_name_something(names: str) -> None:
    wants = f"GLOO_SOCKET_IFNAME={names} names no interface; there are: lo"
    assert refusal("gloo", GLOO_SOCKET_IFNAME=names).startswith(wants)


@pytest.mark.root
def test_hosts_that_hide_their_boot_are_told_apart_by_their_names() -> None:
    hide = "mount --bind /dev/null /proc/sys/kernel/random/boot_id && hostname $1 && exec $2 host"
    program = native.program(Path(__file__).parent / "probe.cpp", parts=_PARTS)
    found = [
        subprocess.run(
            ["unshare", "--mount", "--uts", "sh", "-ec", hide, "sh", name, str(program)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name in ("one", "one", "two")
    ]
    assert found[0] and found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("name", "found", "want"),
    [
        ("BAGUA_NET_NSTREAMS", "0", "a whole number from 1 to 64"),
        ("BAGUA_NET_NSTREAMS", "65", "a whole number from 1 to 64"),
        ("BAGUA_NET_NSTREAMS", "4 ", "a whole number from 1 to 64"),
        ("BAGUA_NET_CHUNK_BYTES", "64k", "a whole number from 4096 to 1048576"),
        ("BAGUA_NET_PEER_TIMEOUT_S", "-1", "seconds from 0.1 to 86400"),
        ("BAGUA_NET_CONNECT_TIMEOUT_S", "nan", "seconds from 0.1 to 86400"),
        ("BAGUA_NET_HELLO_TIMEOUT_S", "1e9", "seconds from 0.1 to 86400"),
        ("NCCL_SOCKET_FAMILY", "ipv6", "AF_INET or AF_INET6"),
    ],
)
def test_a_setting_out_of_range_is_an_error_that_says_what_is_wanted(
    name: str, found: str, want: str
) -> None:
    assert refusal(**{name: found}) == f"{name}={found}: want {want}"


def test_the_speed_is_the_driver_s_or_nccl_s_guess(tmp_path: Path) -> None:
    for name, text in {"fast": "100000\n", "unknown": "-1\n", "empty": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(text)
    (tmp_path / "pci0").mkdir()
    (tmp_path / "fast" / "device").symlink_to(tmp_path / "pci0")
    assert probe("speed", str(tmp_path), "fast").stdout == f"100000 {tmp_path / 'pci0'}"
    for name in ("unknown", "empty", "missing"):
        assert probe("speed", str(tmp_path), name).stdout == "10000 "


@pytest.mark.parametrize(
    ("text", "understood"),
    [
        ("10.0.0.1:80", "10.0.0.1:80"),
        ("10.0.0.1", "10.0.0.1:0"),
        ("::1", "[::1]:0"),
        ("[2001:db8::1]:443", "[2001:db8::1]:443"),
        ("[fe80::1%lo]:1", "[fe80::1]:1"),
    ],
)
def test_addresses_are_understood(text: str, understood: str) -> None:
    assert probe("address", text).stdout == understood


@pytest.mark.parametrize(
    "text", ["", "localhost", "10.0.0.1:x", "10.0.0.1:65536", "[::1", "[::1]80", "[fe80::1%no]:1"]
)
def test_texts_that_are_no_address_are_errors_that_quote_them(text: str) -> None:
    done = probe("address", text)
    assert done.returncode == 1
    assert f'"{text}"' in done.stderr


@pytest.mark.parametrize("key_size", [0, 1, 63, 64, 65, 200])
def test_the_digest_is_hmac_sha256(key_size: int) -> None:
    rng = random.Random(key_size)
    for size in (0, 1, 55, 56, 63, 64, 65, 119, 120, 1000):
        key, message = rng.randbytes(key_size), rng.randbytes(size)
        expected = hmac.new(key, message, hashlib.sha256).hexdigest()
        assert probe("hmac", key.hex(), message.hex()).stdout == expected


_BEGIN = 26
"""Observations until half a second of sending has gone by."""


class StreamProbe:
    """A link's choice of streams, observed every 20 ms of its own time while all in use are full."""

    def __init__(self, of: int = 4) -> None:
        self.of = of
        self.lines: list[str] = []
        self.now_ms = 0

    def observe(
        self, times: int, *, queueing_us: int, rate: float = 1e6, measured_ms: int = 0, state: str = "free"
    ) -> None:
        for _ in range(times):
            self.now_ms += 20
            self.lines.append(f"{self.now_ms} {queueing_us} {state} {rate} {measured_ms}")

    def begin(self) -> None:
        """Until there is a trial of all."""
        self.observe(_BEGIN - 1, queueing_us=20_000, rate=1e5, measured_ms=200)
        self.observe(1, queueing_us=20_000, rate=1e6, measured_ms=200)

    def try_all(self, rate: float) -> None:
        """To its end, measured."""
        self.observe(4, queueing_us=20_000, rate=0)
        self.observe(1, queueing_us=20_000, rate=rate, measured_ms=200)

    def prove(self, rate: float) -> None:
        """Measures one stream again, after a trial."""
        self.try_all(rate)

    def rest(self, seconds: float) -> None:
        """With nothing to send."""
        self.now_ms += int(1e3 * seconds)

    def resume(self, *, trip_us: int) -> None:
        """Something to send again after a long rest."""
        self.lines.append(f"{self.now_ms} {trip_us} resume 0 0")

    def used(self) -> list[int]:
        done = probe("streams", str(self.of), given="\n".join(self.lines))
        assert done.returncode == 0, done.stderr
        return [int(word) for word in done.stdout.split()]

    def tried(self) -> list[int]:
        """`used()` since the first trial began."""
        return self.used()[_BEGIN - 1 :]


def test_all_streams_are_used_where_one_is_held_back_without_a_queue() -> None:
    link = StreamProbe()
    link.observe(10, queueing_us=300)
    assert link.used()[0] == 1
    assert link.used()[-1] == 4


def test_one_sign_between_others_is_not_enough() -> None:
    link = StreamProbe()
    for _ in range(10):
        link.observe(3, queueing_us=300)
        link.observe(1, queueing_us=9_000)
    assert set(link.used()) == {1}


def test_a_stream_with_a_limited_buffer_does_not_count_as_held_back() -> None:
    link = StreamProbe()
    link.observe(50, queueing_us=300, state="limited")
    assert set(link.used()) == {1}


def test_all_streams_are_used_where_the_kernel_s_buffer_is_too_small_for_one() -> None:
    link = StreamProbe()
    link.observe(10, queueing_us=6_000, state="held")
    assert link.used()[0] == 1
    assert link.used()[-1] == 4


def test_all_streams_are_used_again_at_once_after_a_look_at_one_with_too_small_a_buffer() -> None:
    link = StreamProbe()
    link.observe(10, queueing_us=300)
    link.observe(1100, queueing_us=15_000, state="held")
    used = link.used()
    looked = used.index(1, 9)
    assert used[looked : looked + 9] == [1] * 8 + [4]


def test_a_link_of_several_streams_is_measured_once_its_window_has_grown() -> None:
    link = StreamProbe()
    link.observe(20, queueing_us=20_000, rate=1e5, measured_ms=200)
    assert set(link.used()) == {1}
    link.observe(10, queueing_us=20_000, rate=1e6, measured_ms=200)
    assert 4 in link.used()


def test_all_streams_are_tried_twice_and_kept_where_they_move_more() -> None:
    link = StreamProbe()
    link.begin()
    for _ in range(2):
        link.try_all(1.6e6)
        link.prove(1e6)
    link.observe(900, queueing_us=20_000, rate=1.6e6, measured_ms=200)
    used = link.tried()
    assert used[:21] == ([4] * 5 + [1] * 5) * 2 + [4]
    assert set(used[20:]) == {4}


@pytest.mark.parametrize("proofs", [0, 1])
def test_all_streams_are_left_where_one_moves_as_much_once_others_are_gone(proofs: int) -> None:
    link = StreamProbe()
    link.begin()
    for _ in range(proofs):
        link.try_all(1.6e6)
        link.prove(1e6)
    link.try_all(1.6e6)
    link.prove(1.6e6)
    link.observe(20, queueing_us=20_000, rate=1.6e6, measured_ms=200)
    used = link.tried()
    assert used[: 10 * proofs + 5] == ([4] * 5 + [1] * 5) * proofs + [4] * 5
    assert set(used[10 * proofs + 5 :]) == {1}


def test_all_streams_are_left_where_they_move_more_only_once() -> None:
    link = StreamProbe()
    link.begin()
    link.try_all(1.6e6)
    link.prove(1e6)
    link.try_all(1e6)
    link.observe(20, queueing_us=20_000, rate=1e6, measured_ms=200)
    assert link.tried() == [4] * 5 + [1] * 5 + [4] * 5 + [1] * 21


def test_all_streams_are_used_after_a_rest_until_windows_have_grown() -> None:
    link = StreamProbe()
    link.observe(3, queueing_us=20_000)
    link.rest(2)
    link.resume(trip_us=40_000)
    # Windows that grow leave the line empty: that is no sign of a stream that is held back.
    link.observe(11, queueing_us=300)
    link.observe(5, queueing_us=20_000)
    assert link.used() == [1] * 3 + [4] * 11 + [1] * 5


def test_one_stream_goes_on_after_a_rest_on_a_short_way() -> None:
    link = StreamProbe()
    link.observe(3, queueing_us=20_000)
    link.rest(2)
    link.resume(trip_us=300)
    link.observe(5, queueing_us=20_000)
    assert set(link.used()) == {1}


def test_all_streams_rest_in_the_end_where_others_keep_the_queue_short() -> None:
    link = StreamProbe()
    link.observe(10, queueing_us=300)
    link.observe(1100, queueing_us=15_000)
    used = link.used()
    assert set(used[9:900]) == {4}
    assert used[-1] == 1


def test_all_streams_are_tried_and_left_where_they_move_the_same_and_ever_less_often() -> None:
    link = StreamProbe()
    link.begin()
    link.observe(45_000, queueing_us=20_000, rate=1e6, measured_ms=200)
    used = link.tried()
    begun = [0, *(k for k in range(1, len(used)) if used[k] > 1 and used[k - 1] == 1)]
    assert [used[k] for k in begun] == [4, *(2 for _ in begun[1:])]
    assert used[0] == 4
    assert used[-1] == 1
    pauses = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert pauses
    assert pauses == sorted(pauses)
    assert pauses[-1] > 1.5 * pauses[0]


def test_all_streams_are_tried_again_where_all_have_helped() -> None:
    link = StreamProbe()
    link.begin()
    link.observe(20, queueing_us=20_000, rate=1e6, measured_ms=200)
    link.observe(10, queueing_us=300)
    link.observe(1_100, queueing_us=15_000)
    link.observe(20_000, queueing_us=15_000, rate=1e6, measured_ms=200)
    used = link.tried()
    assert used[40] == 4
    later = [used[k] for k in range(40, len(used)) if used[k] > 1 and used[k - 1] == 1]
    assert later == [4, 2]


def test_a_rest_does_not_end_a_trial() -> None:
    link = StreamProbe()
    link.begin()
    link.observe(4, queueing_us=20_000, rate=0, measured_ms=0)
    link.rest(10)
    link.observe(1, queueing_us=20_000, rate=1.6e6, measured_ms=100)
    link.observe(1, queueing_us=20_000, rate=1.6e6, measured_ms=200)
    link.observe(4, queueing_us=20_000, rate=0, measured_ms=0)
    link.rest(10)
    link.observe(1, queueing_us=20_000, rate=1e6, measured_ms=100)
    link.observe(1, queueing_us=20_000, rate=1e6, measured_ms=200)
    assert link.tried() == [4] * 6 + [1] * 6 + [4]


def test_time_with_nothing_to_send_brings_no_trial() -> None:
    link = StreamProbe()
    link.begin()
    link.observe(20, queueing_us=20_000, rate=1e6, measured_ms=200)
    link.rest(3600)
    link.observe(2_000, queueing_us=20_000, rate=1e6, measured_ms=200)
    assert set(link.tried()[20:]) == {1}
    link.observe(2_000, queueing_us=20_000, rate=1e6, measured_ms=200)
    assert 2 in link.tried()[20:]


def test_streams_rest_again_in_front_of_a_full_line() -> None:
    link = StreamProbe()
    link.observe(10, queueing_us=300)
    link.observe(20, queueing_us=45_000)
    used = link.used()
    assert used[9] == 4
    assert used[-1] == 1


def test_a_link_of_one_stream_has_no_choice() -> None:
    link = StreamProbe(of=1)
    link.observe(10, queueing_us=300)
    link.observe(10, queueing_us=45_000, measured_ms=200)
    assert set(link.used()) == {1}


Measured = tuple[int, float]
"""Of one member's link: microseconds of a round trip, megabits per second."""


def all_reduces(calls: list[tuple[int, list[Measured]]], way: str = "") -> list[str]:
    """What every member makes of each call, its bytes and what is measured then: 1 goes directly."""
    lines = [
        " ".join([str(size), *(f"{trip} {int(rate * 125_000)}" for trip, rate in members)])
        for size, members in calls
    ]
    environment = {"BAGUA_NET_ALL_REDUCE": way} if way else {}
    done = probe("distance", str(len(calls[0][1])), given="\n".join(lines), **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


_MB = 1_000_000


@pytest.mark.parametrize(
    ("trip_us", "rate_mbit", "size", "directly"),
    [
        (20_000, 1000, 8 * _MB, True),
        (20_000, 1000, 32 * _MB, False),
        (20_000, 100, 8 * _MB, False),
        (20_000, 100, _MB, True),
        (20_000, 8000, 32 * _MB, True),
        (400, 8000, 100_000, False),
        (400, 1000, 8 * _MB, False),
    ],
)
def test_all_reduces_go_directly_where_the_way_is_long_for_the_speed(
    trip_us: int, rate_mbit: float, size: int, directly: bool
) -> None:
    decided = all_reduces([(size, [(trip_us, rate_mbit)] * 4)] * 6)
    assert decided == ["0000"] * 3 + [str(int(directly)) * 4] * 3, "once all have heard of all"


@pytest.mark.parametrize(("members", "most_mb"), [(3, 5), (5, 30), (9, 80)])
def test_the_longer_a_ring_the_more_is_gained_directly(members: int, most_mb: int) -> None:
    for size_mb in (5, 30, 80):
        calls = [(size_mb * _MB, [(40_000, 1000.0)] * members)] * members
        assert all_reduces(calls)[-1] == str(int(size_mb <= most_mb)) * members


def test_one_slow_link_is_what_all_go_by_and_from_the_same_call_on() -> None:
    for slow in range(5):
        links = [(20_000, 1000.0)] * 5
        links[slow] = (20_000, 10.0)
        assert all_reduces([(8 * _MB, links)] * 12) == ["00000"] * 12
    assert all_reduces([(8 * _MB, [(20_000, 1000.0)] * 5)] * 12) == ["00000"] * 4 + ["11111"] * 8


def test_hosts_in_two_places_that_are_far_apart_keep_to_the_ring_that_crosses_once() -> None:
    near, far = (200, 100_000.0), (20_000, 100_000.0)
    places = [near, near, near, far, near, near, near, far]
    assert all_reduces([(8 * _MB, places)] * 16) == ["0" * 8] * 16
    alike = [far, far, far, near] * 2
    assert all_reduces([(8 * _MB, alike)] * 16) == ["0" * 8] * 7 + ["1" * 8] * 9


@given(data=st.data(), members=st.integers(2, 7))
@settings(max_examples=30, deadline=None)
def test_members_never_go_different_ways_whatever_each_measures(data: st.DataObject, members: int) -> None:
    measured = st.tuples(st.integers(0, 2_000_000), st.floats(0, 100_000))
    call = st.tuples(st.integers(65_537, 1 << 28), st.lists(measured, min_size=members, max_size=members))
    decided = all_reduces(data.draw(st.lists(call, min_size=1, max_size=40)))
    assert set(decided) <= {"0" * members, "1" * members}


def test_a_line_that_became_slow_is_left_in_the_end() -> None:
    calls = [(8 * _MB, [(20_000, 1000.0)] * 3)] * 4 + [(8 * _MB, [(20_000, 50.0)] * 3)] * 30
    decided = all_reduces(calls)
    assert decided[3] == "111" and decided[-1] == "000"


def test_whoever_says_the_way_has_it_from_the_first_call_on() -> None:
    slow_and_near = [(8 * _MB, [(100, 10.0)] * 3)] * 3
    fast_and_far = [(8 * _MB, [(20_000, 8000.0)] * 3)] * 3
    assert all_reduces(slow_and_near, "direct") == ["111"] * 3
    assert all_reduces(fast_and_far, "ring") == ["000"] * 3
    assert all_reduces([(8 * _MB, [(20_000, 8000.0)] * 2)] * 3, "direct") == ["00"] * 3, "two are a ring"
    refused = probe("distance", "3", given="", BAGUA_NET_ALL_REDUCE="tree")
    assert refused.returncode == 1
    assert refused.stderr == "BAGUA_NET_ALL_REDUCE=tree: want auto, ring or direct"
