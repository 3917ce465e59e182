"""Cables of the lab carry what they are shaped to, and nothing while they are cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.hosts import Hosts
from lab.link_rate import measure_rate

MEGABIT = 1e6
RATES = {"100mbit": 100 * MEGABIT, "200mbit": 200 * MEGABIT, "1000mbit": 1000 * MEGABIT}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as three:
        yield three


def check_rate(hosts: Hosts, source: int, destination: int, rate: float) -> None:
    """Headers take a few percent; half a second's worth is sent."""
    measured = measure_rate(hosts, source, destination, int(rate / 8 / 2))
    assert 0.7 * rate < measured < 1.05 * rate


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("others", ["quick", "shaped"])
def test_a_cable_carries_what_it_is_shaped_to_in_each_direction(hosts: Hosts, rate: str, others: str) -> None:
    for other in (0, 2):
        hosts.shape(other, "10gbit" if others == "quick" else rate)
    hosts.shape(1, rate)
    check_rate(hosts, 0, 1, RATES[rate])
    check_rate(hosts, 1, 2, RATES[rate])


def test_the_slowest_cable_on_the_way_counts(hosts: Hosts) -> None:
    hosts.shape(0, "200mbit")
    hosts.shape(1, "100mbit")
    check_rate(hosts, 0, 1, RATES["100mbit"])
    check_rate(hosts, 1, 0, RATES["100mbit"])


def test_red_twin_a_cable_that_is_not_shaped() -> None:
    with Hosts(2) as two, pytest.raises(AssertionError):
        check_rate(two, 0, 1, RATES["100mbit"])


def test_nothing_passes_a_cable_that_is_cut_until_it_is_healed(hosts: Hosts) -> None:
    for host in range(3):
        hosts.shape(host, "1000mbit")
    hosts.cut(1)
    for source, destination in ((0, 1), (1, 2)):
        with pytest.raises(ConnectionError, match=r"No route|unreachable|timed out"):
            measure_rate(hosts, source, destination, 1000, patience=1.0)
    check_rate(hosts, 2, 0, RATES["1000mbit"])  # the others' cables are as they were
    hosts.heal(1)
    check_rate(hosts, 0, 1, RATES["1000mbit"])
    check_rate(hosts, 1, 2, RATES["1000mbit"])
