"""One knob, everything else derived and checked."""

from __future__ import annotations

import pytest

from baguarun.elastic.membership.job import JobSpec, NodeOffer
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.errors import UsageError


def test_a_detection_time_below_etcds_shortest_lease_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"detect_timeout_s=0.4: .*at least 0.5 s.*--detect-timeout 0.5"):
        MembershipSettings(detect_timeout_s=0.4)


def test_not_a_number_is_refused() -> None:
    with pytest.raises(UsageError):
        MembershipSettings(detect_timeout_s=float("nan"))


@pytest.mark.parametrize("detect_timeout_s", [0.5, 1.0, 2.0, 2.9, 5.0, 60.0])
def test_derived_times_are_in_their_order(detect_timeout_s: float) -> None:
    settings = MembershipSettings(detect_timeout_s=detect_timeout_s)
    assert 2 <= settings.lease_ttl_s <= max(2, detect_timeout_s)
    assert 2 * settings.keepalive_interval_s < settings.lease_ttl_s
    assert settings.keepalive_interval_s < settings.gap_s < settings.lease_ttl_s
    assert settings.loss_settle_s < settings.join_settle_s < settings.first_settle_s < detect_timeout_s
    assert settings.verdict_s > settings.lease_ttl_s


def test_the_default_settles_are_those_promised() -> None:
    settings = MembershipSettings()
    assert settings.lease_ttl_s == 5
    assert settings.first_settle_s == pytest.approx(1.0)
    assert settings.join_settle_s == pytest.approx(0.3)
    assert settings.loss_settle_s == pytest.approx(0.05)


def test_names_that_would_break_the_keys_are_refused() -> None:
    with pytest.raises(UsageError, match="job_id='a/b'"):
        JobSpec(job_id="a/b", min_nodes=1, max_nodes=1, max_restarts=0, digest="", summary="")
    with pytest.raises(UsageError, match="node_id=''"):
        NodeOffer(node_id="", name="n", address="a", slots=1)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2, 1)])
def test_impossible_node_counts_are_refused(low: int, high: int) -> None:
    with pytest.raises(UsageError, match=f"min_nodes={low}: want 1 <= min_nodes <= max_nodes={high}"):
        JobSpec(job_id="j", min_nodes=low, max_nodes=high, max_restarts=0, digest="", summary="")
