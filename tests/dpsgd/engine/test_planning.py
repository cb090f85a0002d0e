"""What is planned for several devices is what their program holds and sends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpsgd.engine.planning import Collective, Rates

ROOT = Path(__file__).parents[3]

PLANS = """
import json, os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, optax
jax.config.update("jax_num_cpu_devices", 8)
from dpsgd import Mechanism, dpsgd
from dpsgd.engine.feed import Layout
from dpsgd.engine.placement import Placement
from dpsgd.engine.planning import StepPlan
from samplers import Deterministic

def loss(params, example):
    row = params["table"][example["id"]]
    return (row @ params["out"] - example["y"]) ** 2

params = {"table": jnp.zeros((1024, 32)), "out": jnp.zeros(32)}
rows = {"id": jnp.zeros(500, jnp.int32), "y": jnp.zeros(500)}
algorithm = dpsgd(loss, optax.adam(0.1))
mechanism = Mechanism(Deterministic(500, 50), 1.0, 1.0)
found = []
for count, data_on, rows_from in ((8, "device", None), (2, "host", None), (8, "device", 2**16)):
    placement = Placement(tuple(jax.devices()[:count]), rows_from)
    layout = Layout.of(mechanism.sampler, rows, placement=placement, data_on=data_on)
    state = jax.eval_shape(algorithm.init, params)
    plan = StepPlan.of(loss, algorithm, mechanism, state, rows, layout)
    program = layout.program(algorithm, mechanism, state, rows).memory_analysis()
    found.append({
        "num_params": plan.num_params, "updated": plan.updated, "held": plan.held,
        "arguments": program.argument_size_in_bytes, "temporary": program.temp_size_in_bytes,
        "exchanged": plan.exchanged, "places": plan.places, "flops": plan.flops,
        "sharded": plan.sharded,
    })

def fitted(rows, memory, given=None):
    table = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    state = jax.eval_shape(algorithm.init, {"table": table, "out": jnp.zeros(2**20)})
    return Placement(tuple(jax.devices()), given).fitting(state, memory).shard_rows_from

state = 3 * 4 * (2**22 * 16 + 2**20) + 8  # with two moments, and two counts of steps
print(json.dumps([found, {
    "roomy": fitted(2**22, 2 * state), "full": fitted(2**22, 2 * state - 1),
    "given": fitted(2**22, 1, 2**30), "odd": fitted(2**22 + 1, 1), "small": fitted(2**16, 1),
}]))
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, "-c", PLANS],
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def plans(found):
    return found[0]


@pytest.mark.long
def test_bytes_of_a_device_are_those_of_its_program(plans):
    for plan in plans:
        held = dict(plan["held"])
        assert held.pop("gradients and activations") == plan["temporary"]
        # Of the blocks that wait, one is an argument; keys, scales and what is watched are more.
        held["blocks of batches"] /= 3
        assert 0 <= plan["arguments"] - sum(held.values()) < 2_000


@pytest.mark.long
def test_replicated_parameters_are_added_up_once_a_step(plans):
    for plan, places in zip(plans[:2], (56, 50), strict=True):
        assert plan["num_params"] == plan["updated"] == 1024 * 32 + 32
        assert plan["held"]["parameters"] == 4 * plan["num_params"]
        assert plan["places"] == places
        diagnostics = 4 * 4
        assert plan["exchanged"] == [["all-reduce", 4 * plan["num_params"] + diagnostics, 1]]


@pytest.mark.long
def test_a_table_that_is_sharded_lies_and_travels_in_parts(plans):
    plan, table = plans[2], 4 * 1024 * 32
    assert plan["sharded"] == ["['table']"]
    assert plan["held"]["parameters"] == table / 8 + 4 * 32
    assert 2 * table / 8 < plan["held"]["optimizer's state"] < 2 * (table / 8 + 4 * 32) + 64
    assert plan["updated"] == 1024 * 32 / 8 + 32
    assert plan["num_params"] == 1024 * 32 + 32
    assert all(size < table / 4 for _, size, _ in plan["exchanged"])


@pytest.mark.long
def test_tables_are_sharded_by_default_where_a_state_would_fill_half_of_a_device(found):
    assert found[1] == {"roomy": None, "full": 2**26, "given": 2**30, "odd": None, "small": None}


@pytest.mark.long
def test_the_operations_of_an_example_are_those_of_its_gradient(plans):
    # A product of 32 numbers, and both factors' gradients, twice each; little else.
    assert 6 * 32 - 32 <= plans[0]["flops"] <= 6 * 32 + 64


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
