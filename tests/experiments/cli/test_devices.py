"""Where a run computes: what cannot be is said in one line, by its option."""

import pytest

from experiments.cli.devices import DevicesConfig

TOGETHER = {"coordinator": "host0:1234", "num_processes": 4, "process_id": 3}


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_devices": 8, "shard_rows_from": "512MB"}, {"shard_rows_from": "never"}, TOGETHER],
)
def test_what_can_be_is_taken(settings):
    DevicesConfig(**settings).check_devices()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_devices": 0}, "--num-devices must be at least 1, got 0"),
        ({"shard_rows_from": "some"}, "--shard-rows-from must be a size such as 8GB or 512MiB"),
        ({"num_processes": 2}, "--coordinator, --num-processes and --process-id are given togeth"),
        ({**TOGETHER, "process_id": None}, "are given together"),
        ({**TOGETHER, "coordinator": "host0"}, "--coordinator must be HOST:PORT, got host0"),
        ({**TOGETHER, "coordinator": ":80"}, "--coordinator must be HOST:PORT"),
        ({**TOGETHER, "coordinator": "a:65536"}, "--coordinator must be HOST:PORT"),
        ({**TOGETHER, "num_processes": 0}, "--num-processes must be at least 1"),
        ({**TOGETHER, "process_id": 4}, r"--process-id must lie in \[0, 4\), got 4"),
        ({"watchdog_seconds": 0.0}, "--watchdog-seconds must be finite and > 0"),
    ],
)
def test_what_cannot_be_is_named_by_its_option(settings, message):
    with pytest.raises(ValueError, match=f"^{message}" if message[0] == "-" else message):
        DevicesConfig(**settings).check_devices()
