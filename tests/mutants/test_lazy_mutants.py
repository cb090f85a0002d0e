"""Planted bugs of lazy tables: the audit says which table is wrong, and in which way.

Most are planted into one program, each in a table of its own, so that all but compiling is shared;
what the host hands to that program is spoiled by itself.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planting import Bug, forget, plant, planted

from dpsgd import LazyTables, Mechanism, RootKey, dpsgd
from dpsgd.audit import late
from dpsgd.audit.checks import FALSE_ALARM, Several
from dpsgd.audit.late import APART, FLUSHED, GRID, LAW, MOVED, late_checks
from dpsgd.audit.program import AuditedProgram
from dpsgd.audit.sums import sum_checks
from dpsgd.training import lazy
from samplers import BallsAndBins

pytestmark = [pytest.mark.mutants, pytest.mark.usefixtures("unoptimised")]

N, B, STEPS, WIDTH = 200, 20, 100, 4
ROWS = "dpsgd.tables.rows:"
STEP = "dpsgd.training.lazy:LazyStep.__call__"

OF_TABLES = {
    "none": None,
    "never flushed": Bug(
        f"{ROWS}flushed_table",
        "values, momentum = caught_up(",
        "due = how['leaf'] != {leaf}\n        values, momentum = caught_up(",
        FLUSHED,
    ),
}
