"""Every check of the audit has a planted bug to catch, and passes without one.

The bugs are those that happened, or nearly, in programs for private training. Each names the check
that has to catch it: a check that is taken out, or blunted, turns a test red.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, RootKey, dpsgd
from dpsgd.audit.audit import audit_program
from dpsgd.audit.runtime.flow import GIVEN, LEAVES
from dpsgd.audit.samplers.checks import sampler_checks
from samplers import Poisson

pytestmark = [pytest.mark.mutants, pytest.mark.usefixtures("unoptimised")]

POISSON = Poisson(200, 10, 2)


def loss_fn(params, example):
    logit = jnp.dot(params["w"], example["x"]) + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"])


@pytest.fixture(scope="module")
def report():
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(200, 100)).astype(np.float32),
        "y": rng.integers(0, 2, 200).astype(np.float32),
    }
    params = {"w": jnp.full(100, 0.1), "b": jnp.zeros(())}
    mechanism = Mechanism(POISSON, noise_multiplier=1.0, l2_clip_norm=0.5)
    root = RootKey.from_insecure_seed(0)
    return audit_program(dpsgd(loss_fn, optax.sgd(0.1)), mechanism, params, data, root=root)


def test_without_a_bug_the_same_audit_passes(report):
    assert report.passed, report.lines()


def test_every_check_of_the_audit_has_a_bug_to_catch(report):
    wanted = {
        # whose bugs are in test_noise_mutants.py
        "noise is what key, step and place give, in every leaf",
        "other attempts and roots have other keys",
        # in dpsgd/audit/runtime/test_flow.py
        LEAVES,
        GIVEN,
        # in dpsgd/audit/runtime/test_sums.py
        "an example moves the sum by at most C",
        "an example just above C is clipped",
        "a lower C clips to it",
        "an example is clipped wherever it lies",
        "examples are clipped one by one: sums add up",
        "neighbours of a full batch differ by at most C",
        "padding is inert",
        "a NaN example moves the sum by at most C",
        "huge examples move the sum by at most C each",
        "the rows that are drawn are those that are read",
        "the program is given the scales of the configuration",
        # in dpsgd/audit/runtime/test_blocks.py and dpsgd/noise
        "blocks train on the batches that are drawn",
        "blocks are given the keys, scales and steps of the run",
        "noise has the bands and the columns that were claimed",
    }
    of_sampler = {check.name for check in sampler_checks(POISSON, POISSON, seed=1)}
    assert {check.name for check in report.checks} - of_sampler == wanted
