"""How long exchanges between devices take is planned by their sizes and the rates of links."""

import pytest

from dpsgd.engine.planning import Collective, Rates


@pytest.mark.parametrize(
    ("kind", "rings"), [("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1)]
)
def test_exchanges_go_round_within_hosts_and_between_them(kind, rings):
    rates = Rates(link=8e9, network=1e9, latency=0.5)
    one = Collective(kind, 8_000_000_000, 1)
    assert rates.exchange_seconds(one, 8, 1) == pytest.approx(0.5 + rings * 7 / 8)
    assert rates.exchange_seconds(one, 2, 2) == pytest.approx(0.5 + rings * 8 / 2)
    assert rates.exchange_seconds(one, 16, 2) == pytest.approx(0.5 + rings * (7 / 8 + 0.5))


def test_every_device_sends_the_others_their_parts():
    rates = Rates(link=8e9, network=1e9, latency=0.5)
    one = Collective("all-to-all", 8_000_000_000, 1)
    assert rates.exchange_seconds(one, 8, 1) == pytest.approx(0.5 + 7 / 8)
    assert rates.exchange_seconds(one, 16, 2) == pytest.approx(0.5 + 7 / 16 + 8 * 8 / 16)
