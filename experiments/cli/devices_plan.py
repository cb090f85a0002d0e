"""`dpsgd plan devices`: what a run would hold, send and take on several devices."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tyro

from accounting.checks import check_count
from dpsgd.sizes import bytes_of
from experiments.cli import tasks
from experiments.cli.config import OfSizes
from experiments.cli.console import Console, counted, sized
from experiments.cli.devices import rows_from
from experiments.cli.options import naming, run_options

if TYPE_CHECKING:
    from dpsgd.engine.planning import Rates, StepPlan
    from dpsgd.runs.spec import RunSpec
    from samplers import BatchSampler


@dataclass(frozen=True, kw_only=True)
class PlanDevices(tasks.OfTask, OfSizes):
    """Print what a run would hold, send and take on several devices, none of which is needed here.

    The program of the run is compiled for as many devices as are asked for, which this machine's
    processor stands in for: bytes and exchanges are read in it. Times are a prediction from rates
    that are stated below; nothing is timed. --task NAME says whose step, as for `dpsgd train`.
    """

    what: tyro.conf.Positional[Literal["devices"]] = tyro.MISSING
    """What is planned."""
    num_devices: int
    """Devices, of all hosts together."""
    num_hosts: int = 1
    """Hosts, with equally many devices each."""
    shard_rows_from: str | None = None
    """As for `dpsgd train`: size from which on a parameter is sharded by its rows. By default
    those of 64MiB, where the whole state would take more than half of a device."""
    bands: int = 1
    """Steps over which noise is correlated, as for `dpsgd train`: it keeps the noise of all but
    one."""
    device_memory: str = "141GB"
    """Of each device; by default an H200's."""
    memory_bandwidth: str = "4.3TB"
    """Assumed of each device's memory, a second."""
    tflops: float = 130.0
    """Assumed of each device's matrix products: 10^12 operations a second."""
    link_bandwidth: str = "450GB"
    """Assumed between devices of a host, a second, for each device and direction: NVLink's."""
    network_bandwidth: str = "50GB"
    """Assumed between hosts, a second, for each device and direction: an InfiniBand adapter's of
    400 Gb/s for each device."""
    latency_us: float = 20.0
    """Microseconds that every exchange is assumed to take at least."""
    overhead_us: float = 100.0
    """Microseconds of a step that are assumed to be no device's to share: some 60 kernels begin."""

    def __post_init__(self) -> None:
        for name in ("num_devices", "num_hosts", "bands"):
            with naming(self):
                check_count(name, getattr(self, name))
        if self.num_devices % self.num_hosts:
            raise ValueError(
                f"--num-devices must be a multiple of --num-hosts, got {self.num_devices} and "
                f"{self.num_hosts}"
            )
        if not self.tflops > 0:
            raise ValueError(f"--tflops must be > 0, got {self.tflops}")
        for option, value in {"latency": self.latency_us, "overhead": self.overhead_us}.items():
            if value < 0:
                raise ValueError(f"--{option}-us must be >= 0, got {value}")

    def rates(self) -> Rates:
        """Returns what is assumed."""
        from dpsgd.engine.planning import Rates

        found = {}
        for name in ("memory", "link", "network"):
            option, given = f"--{name}-bandwidth", getattr(self, f"{name}_bandwidth")
            found[name] = float(bytes_of(given, option))
            if not found[name]:
                raise ValueError(f"{option} must be > 0, got {given}")
        seconds = {"latency": 1e-6 * self.latency_us, "overhead": 1e-6 * self.overhead_us}
        return Rates(**found, arithmetic=1e12 * self.tflops, **seconds)


def command(words: Sequence[str]) -> type:
    """Returns what can be asked of the task and the sampler that words name."""
    options = run_options("optimizer", "data_on", "microbatch_size")
    return tasks.command(PlanDevices, words, options=options, place=False)


def run(config: PlanDevices) -> None:
    """Answers `dpsgd plan devices`."""
    from dpsgd.runs.resolve import build_sampler

    spec, population = config.spec(noise_multiplier=1.0), config.population()
    with naming(config):
        sampler = build_sampler(spec, population)
    rates, memory = config.rates(), bytes_of(config.device_memory, "--device-memory")
    with Console() as console:
        console.progress("compiling the step")
        plan = _planned(config, spec, sampler, memory)
        _show(console, config, plan, rates, memory)


def _planned(config: PlanDevices, spec: RunSpec, sampler: BatchSampler, memory: int) -> StepPlan:
    """Returns the plan of the run that is asked for, compiled for devices that are not there."""
    import jax

    with contextlib.suppress(RuntimeError):  # the devices of this process are chosen already
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.num_devices)
    if (found := len(jax.devices("cpu"))) < config.num_devices:
        raise ValueError(f"this process has {counted(found, 'device')}: plan in one of its own")
    from dpsgd import BandedToeplitz, Independent, Mechanism
    from dpsgd.engine.feed import Layout
    from dpsgd.engine.placement import Placement
    from dpsgd.engine.planning import StepPlan
    from dpsgd.engine.programs import shapes_of_rows
    from dpsgd.runs.optimizer import algorithm_of

    task = tasks.without_data(config)
    algorithm = algorithm_of(task.loss, spec, sampler.num_steps)
    # Any coefficients: what is kept, and the program, depend on their number alone.
    noise = BandedToeplitz([0.5**j for j in range(config.bands)]) if config.bands > 1 else None
    mechanism = Mechanism(sampler, 1.0, 1.0, noise or Independent())
    params = jax.eval_shape(lambda: task.init(0))
    rows = shapes_of_rows(task.generated(1), sampler.num_examples)
    state = jax.eval_shape(lambda params: algorithm.init(params, mechanism, rows), params)
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(rows))
    data_on = spec.data_on or ("host" if size > memory / 2 else "device")
    devices = tuple(jax.devices("cpu")[: config.num_devices])
    placement = Placement(devices, rows_from(config.shard_rows_from)).fitting(state, memory)
    layout = Layout.of(sampler, rows, data_on=data_on, placement=placement)
    return StepPlan.of(task.loss, algorithm, mechanism, state, rows, layout)


def _show(console: Console, config: PlanDevices, plan: StepPlan, rates: Rates, memory: int) -> None:
    """Prints a plan."""
    hosts, devices = config.num_hosts, config.num_devices
    console.line(
        f"{plan.num_params:,} parameters, batches of b = {plan.expected_batch_size:,.0f}, "
        f"{counted(devices, 'device')} on {counted(hosts, 'host')}; "
        + (f"sharded by rows: {', '.join(plan.sharded)}" if plan.sharded else "nothing sharded")
    )
    held = [[name, sized(size)] for name, size in plan.held.items() if size]
    console.table(["on each device", "bytes"], [*held, ["together", sized(plan.total)]])
    if plan.total > memory:
        console.line(f"that is MORE than a device has, {sized(memory)}")
    console.line("")
    table = [
        [f"{kind}{where}", f"{len(sizes):,}", sized(sum(sizes)), sized(max(sizes))]
        for (kind, where), sizes in _exchanges(plan).items()
    ]
    if table:
        console.table(["exchanged in each step", "times", "bytes", "largest"], table)
    else:
        console.line("nothing is exchanged")
    console.line("")
    b, places = plan.expected_batch_size, plan.places
    parts = f", in {plan.num_shards:,} data shards" if plan.num_shards > 1 else ""
    console.line(
        f"a batch takes {places:,} places{parts}, {places // devices:,} on each device: "
        f"{places / b - 1:.1%} of b are padding"
    )
    computing = plan.seconds(rates)
    exchanging = plan.exchange_seconds(rates, hosts)
    console.line(
        f"predicted: {1e3 * computing:.3g} ms computing and {1e3 * exchanging:.3g} ms exchanging a "
        f"step, {b / (computing + exchanging):,.3g} examples a second; efficiency "
        f"{plan.efficiency(rates, hosts):.0%} (of as many devices that train by themselves on "
        "their share of a batch)"
    )
    console.line(
        f"assumed, and not measured: memory {config.memory_bandwidth}/s, {config.tflops:g} "
        f"TFLOP/s, {config.link_bandwidth}/s between devices, "
        + (f"{config.network_bandwidth}/s between hosts, " if hosts > 1 else "")
        + f"{config.latency_us:g} us an exchange, and that nothing overlaps; bytes and exchanges "
        "are those of the program compiled for processors"
    )


def _exchanges(plan: StepPlan) -> dict[tuple[str, str], list[int]]:
    """Returns the sizes of what a step exchanges, by its kind and by where it stands."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in plan.exchanged:
        if one.depth:
            where = " (in a loop of the step)" if one.depth > 1 else ""
            found.setdefault((one.kind, where), []).append(one.size)
    return found
