"""What tests of several devices share: how their drivers are called, and the bugs that are planted.

It imports nothing that counts devices: drivers say how many there are before.
"""

import json
import subprocess
import sys

LAZY_BUGS = [
    "rows are caught up with the keys of local ones",
    "rows are flushed with the keys of local ones",
    "a device knows of its own look ups alone",
    "small tables are not summed",
    "small tables are summed twice",
    "gradients are not summed",
    "gradients are summed twice",
    "every device adds noise to its sums",
    "foreign rows are read",
    "foreign rows are written",
]


def driven(driver, tier):
    """What a driver has found, in a process of its own."""
    made = subprocess.run(
        [sys.executable, driver, tier],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert made.returncode == 0, made.stderr[-2_000:]
    return json.loads(made.stdout.splitlines()[-1])
