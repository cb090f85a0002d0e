"""Table of cases: model, batch, timed programs, and bars."""

from __future__ import annotations

import itertools
from typing import Any

from experiments.benchmarks.case import Case

CASES: list[Case] = []


def add(
    area: str, name: str, measure: str, *, of: dict[str, Any] | None = None, **rest: Any
) -> None:
    """Adds a case to the table; `of` is part of its name and setting."""
    words = [name, *(f"{key} {value}" for key, value in (of or {}).items())]
    setting = {**(of or {}), **rest.pop("setting", {})}
    CASES.append(Case(area, ", ".join(words).replace("_", " "), measure, setting, **rest))


# ---------------------------------------------------------------------- steps: step, tables, noise

DP, ORDINARY, SPARSE = "DP step", "ordinary step", "step without privacy, tables by sparse SGD"
BY_SGD, BY_MOMENTUM = "DP step, tables lazy by SGD", "DP step, tables lazy by momentum 0.9"
DENSE_SGD = "DP step, all by SGD"
LAZIES = BY_SGD, BY_MOMENTUM
GRADIENT, CLIPPED = "gradient", "clipped gradient"
LARGE = {"table_rows": 2**20, "hidden": (598, 598, 598)}
SIZES: dict[str, dict[str, Any]] = {
    "1M": {"table_rows": 2**11, "hidden": (256, 256)},
    "8M": {"table_rows": 2**15, "hidden": (598, 598, 598)},
    "85M": LARGE,
}
STEP_BARS = {("85M", 1024): 2.5, ("85M", 8192): 1.3}
"""DP step / ordinary step on a CPU, by size and batch; these have the other bars, too."""
TINY = {"table_rows": 2**6, "hidden": (8,), "batch_size": 64, "rounds": 1}

for (size, model), batch_size in itertools.product(SIZES.items(), (256, 1024, 8192)):
    step_bar = STEP_BARS.get((size, batch_size))
    add(
        "step", f"step, size {size}, batch size {batch_size}", "steps.steps",
        setting={
            **model, "batch_size": batch_size, "block_steps": 1, "rounds": 5,
            "kinds": (ORDINARY, DP, GRADIENT, CLIPPED),
            "ratios": (
                (DP, ORDINARY, f"<= {step_bar}" if step_bar else ""),
                (CLIPPED, GRADIENT, "<= 1.15" if step_bar else ""),
                (f"memory, {CLIPPED}", f"memory, {GRADIENT}", "<= 1.3" if step_bar else ""),
            ),
        },
        quick=TINY if (size, batch_size) == ("1M", 256) else None,
    )  # fmt: skip

for batch_size, bar in ((1024, 1.35), (8192, 1.2)):  # as training runs steps: not one by one
    add(
        "step", f"blocks, size 1M, batch size {batch_size}", "steps.steps",
        setting={
            **SIZES["1M"], "batch_size": batch_size, "kinds": (ORDINARY, DP),
            "ratios": ((DP, ORDINARY, f"<= {bar}"),),
        },
    )  # fmt: skip
add(
    "step", "streamed rows", "steps.streamed", quick={**TINY, "rows": 512}, seconds=180,
    setting={"batch_size": 8192, "rounds": 5, "bar": "<= 1.15"},
)  # fmt: skip
add(
    "step", "interactions", "steps.steps", quick=TINY,
    setting={
        **SIZES["1M"], "batch_size": 1024, "block_steps": 1, "rounds": 5, "kinds": (DP,),
        "interactions": ("none", "dot", "cross"),
        "ratios": tuple((f"{DP}, {name}", f"{DP}, none", "<= 2") for name in ("dot", "cross")),
    },
)  # fmt: skip

TABLE_RATIOS = tuple((DP, kind, ">= 6") for kind in LAZIES)
TABLE_RATIOS += tuple((DENSE_SGD, kind, "") for kind in LAZIES)
PRICES = tuple((kind, SPARSE, "<= 2") for kind in LAZIES)
add(
    "tables", "steps", "steps.steps", quick=TINY, seconds=200,
    setting={
        **LARGE, "batch_size": 1024, "rounds": 5, "kinds": (SPARSE, DP, DENSE_SGD, *LAZIES),
        "ratios": TABLE_RATIOS + PRICES,
    },
)  # fmt: skip
FEW = {"table_rows": (2**4, 2**6), "hidden": (8,), "batch_size": 64, "rounds": 1}
add(
    "tables", "sizes", "steps.sizes", quick=FEW, seconds=120,
    setting={"table_rows": (2**11, 2**16, 2**20), "rounds": 5, "lazy": LAZIES},
)  # fmt: skip
for table_rows in (2**11, 2**12, 2**13):
    add(
        "tables", "crossover", "steps.steps", of={"table_rows": table_rows},
        setting={
            "hidden": (8,), "batch_size": 1024, "rounds": 5, "kinds": (DP, DENSE_SGD, *LAZIES),
            "ratios": tuple((dense, kind, "") for dense in (DP, DENSE_SGD) for kind in LAZIES),
        },
        quick=TINY if table_rows == 2**11 else None,
    )  # fmt: skip
add(
    "tables", "large", "steps.sizes", seconds=600, opt_in=True,
    quick={**FEW, "dense_rows": (2**4, 2**6)},
    setting={
        "table_rows": (2**15, 2**24), "rounds": 5, "lazy": LAZIES, "dense": DP,
        "dense_rows": (2**15, 2**20), "bar": ">= 50",
    },
)  # fmt: skip
SMALL_RUN = {"model": "tiny", "rows": 2_000, "batch_size": 50, "audit": False}
add(
    "tables", "epoch", "runs.whole_run", quick=SMALL_RUN, seconds=600,
    setting={"model": "large", "rows": 4_600_000, "batch_size": 1024, "tables": "lazy"},
)  # fmt: skip
add(
    "noise", "noise", "steps.noise", quick={"size": 2**20, "rounds": 1}, seconds=200,
    setting={"size": 85_000_000, "rounds": 5},
)  # fmt: skip

# ----------------------------------------------------------------------- a GPU, there or described

GPU_BARS = {1024: 1.1, 8192: 1.1, 65_536: 1.15}
"""DP step / ordinary step on an H200, 85M parameters, by batch."""
BLOCKS = {"block_steps": 64, "rounds": 7}
SHORT = {**TINY, "block_steps": 2}
AUDITED = {
    "poisson": ("", "accumulate"), "balls-and-bins": ("",), "shuffle": ("",),
    "deterministic": ("",),
}  # fmt: skip
for sampler, overflow in [(name, mode) for name, modes in AUDITED.items() for mode in modes]:
    add(
        "gpu", f"audit, {sampler}{overflow and ', '}{overflow}", "runs.audit", seconds=20,
        setting={"model": "small", "sampler": sampler, "overflow": overflow, "rows": 1000,
                 "batch_size": 64},
        quick={},
    )  # fmt: skip
for batch_size, bar in GPU_BARS.items():
    add(
        "gpu", f"steps, batch size {batch_size}", "steps.steps", seconds=65,
        setting={
            **LARGE, **BLOCKS, "batch_size": batch_size, "kinds": (ORDINARY, DP),
            "ratios": ((DP, ORDINARY, f"<= {bar}"),),
        },
        quick=SHORT if batch_size == 8192 else None,
    )  # fmt: skip
for table_rows in (2**20, 2**24):
    add(
        "gpu", "tables", "steps.steps", of={"table_rows": table_rows},
        setting={
            "hidden": LARGE["hidden"], **BLOCKS, "batch_size": 1024, "together": False,
            "kinds": (SPARSE, DP, DENSE_SGD, *LAZIES), "ratios": TABLE_RATIOS + PRICES,
        },
        quick=SHORT if table_rows == 2**20 else None,
    )  # fmt: skip
add(
    "gpu", "run", "runs.whole_run", quick=SMALL_RUN,
    setting={"model": "large", "rows": 800_000, "batch_size": 8192, "audit": True},
)  # fmt: skip
SMALL = {"table_rows": 2**9, "hidden": (128,)}
for size, model, tables, most_kernels in (
    ("0.2M", SMALL, "dense", 40),
    ("85M", LARGE, "dense", 55),
    ("85M", LARGE, "lazy", 55),
):
    add(
        "gpu_program", f"block, size {size}, {tables}", "gpu_program.block",
        setting={
            **model, "tables": tables, "batch_size": 1024, "most_kernels": most_kernels,
        },
    )  # fmt: skip

# --------------------------------------------------------------------------------- runs and audits

for model, epochs in (("small", 4), ("medium", 1)):
    add(
        "train", "train", "runs.train", of={"model": model, "epochs": epochs}, seconds=200,
        setting={"rows": 125_000, "rounds": 3},  # of which 4 in 5 train
        quick={"rows": 10_000, "rounds": 1} if model == "small" else None,
    )  # fmt: skip
for model, tables, bar in (("small", "dense", 5), ("large", "lazy", 10), ("large", "dense", 40)):
    add(
        "audit", f"audit, {model}, {tables} tables", "runs.audit",
        setting={"model": model, "tables": tables, "sampler": "poisson", "bar": f"<= {bar}"},
        quick={} if model == "small" else None,
    )  # fmt: skip

# -------------------------------------------------------------------------------- batches and data

EVERY = "Deterministic", "Shuffle", "Poisson", "BallsAndBins"
ROWS, FEWER = 46_000_000, {"rows": 1_000_000}
for sampler, (batch_size, bar) in itertools.product(EVERY, {1024: 0.2, 65_536: 2}.items()):
    add(
        "samplers", "draw", "data.draw", of={"sampler": sampler, "batch_size": batch_size},
        setting={"rows": ROWS, "batches": 100, "bar": f"<= {bar}"}, seconds=10, quick=FEWER,
    )  # fmt: skip
for sampler in EVERY:
    add(
        "samplers", "waiting", "data.waiting", of={"sampler": sampler}, seconds=75,
        setting={"batch_size": 1024, "rows": ROWS}, quick=FEWER,
    )  # fmt: skip
TERABYTE = {"rows": 4_373_472_329, "batch_size": 65_536, "num_shards": 64}
"""Rows of Criteo's terabyte click logs, of 24 days."""
for task, sampler in [("draw", name) for name in EVERY] + [("cost", name) for name in EVERY[2:]]:
    add("scale", "shards", "data.shards", of={"what": task, "sampler": sampler}, setting=TERABYTE)
for runner in ("here", "beam"):
    for format in ("criteo-display", "criteo-search"):
        add(
            "scale", "beam, store", "data.stores", of={"way": runner, "format": format},
            setting={"rows": 1_000_000}, quick={"rows": 2_000},
        )  # fmt: skip
    add(
        "scale", "beam, batches", "data.batches", of={"way": runner},
        setting={"rows": 1_000_000}, quick={"rows": 2_000},
    )  # fmt: skip

for model, batch_size in itertools.product(
    ("linear", "small", "wide-and-deep", "large"), (1024, 8192)
):
    add(
        "epoch", "epoch", "runs.epoch", of={"model": model, "batch_size": batch_size}, seconds=30,
        quick={"rows": 20_000} if (model, batch_size) == ("linear", 1024) else None,
    )  # fmt: skip

# ------------------------------------------------------------------------- accounting and the code

for sigma, bar in ((0.5, 1.5), (0.1, 20.0)):
    add(
        "accounting", "interval", "accounting.interval", of={"sigma": sigma},
        setting={"bar": f"<= {bar}", "rounds": 3}, quick={"rounds": 1},
    )  # fmt: skip
add(
    "accounting", "calibration", "accounting.calibration",
    setting={"rounds": 3}, quick={"rounds": 1},
)  # fmt: skip
for bins, epochs in itertools.product((100, 1_000, 10_000), (1, 10, 100)):
    add(
        "accounting", "advantage", "accounting.advantage", of={"bins": bins, "epochs": epochs},
        seconds=5, quick={} if bins * epochs == 100 else None,
    )  # fmt: skip
add("size", "size", "size.size", quick={}, seconds=5)
