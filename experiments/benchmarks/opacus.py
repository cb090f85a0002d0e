"""Opacus with ghost clipping, in an interpreter of its own: PyTorch is no dependency of ours."""

from __future__ import annotations

import json
import subprocess
from typing import NamedTuple

from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import ModelConfig

# The same model on data of the same shapes; a JSON line of CPU seconds for each size.
_PROGRAM = """
import importlib.metadata, json, statistics, sys, time
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

rows, features, dim, dense, hidden, batch, rounds = json.loads(sys.argv[1])
torch.set_num_threads(1)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(rows, dim)
        widths = [features * dim + dense, *hidden]
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(m, n) for m, n in zip(widths, widths[1:]))
        self.logit = torch.nn.Linear(widths[-1], 1)

    def forward(self, ids, x):
        x = torch.cat([self.table(ids).flatten(1), x], dim=1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.logit(x)[:, 0]

ids = torch.randint(0, rows, (batch, features))
x, y = torch.randn(batch, dense), torch.randint(0, 2, (batch,)).float()

def seconds(private):
    model, loss_fn = Model(), torch.nn.BCEWithLogitsLoss(reduction="mean")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if private:
        model = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="mean")
        optimizer = DPOptimizerFastGradientClipping(
            optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=batch)
        loss_fn = DPLossFastGradientClipping(model, optimizer, loss_fn, loss_reduction="mean")
    spent = []
    for _ in range(rounds + 1):
        begin = time.process_time()
        optimizer.zero_grad()
        loss_fn(model(ids, x), y).backward()
        optimizer.step()
        spent.append(time.process_time() - begin)
    return statistics.median(spent[1:])

print(json.dumps([importlib.metadata.version("opacus"), seconds(False), seconds(True)]))
"""


class Opacus(NamedTuple):
    """CPU seconds of the peer's steps.

    Attributes:
      version: Of Opacus.
      plain: Of its step without privacy, dense Adam.
      private: Of its step with ghost clipping.
    """

    version: str
    plain: float
    private: float


def opacus(python: str, config: ModelConfig, batch_size: int, rounds: int) -> Opacus:
    """Returns what Opacus takes, measured by the interpreter `python`, which must have it.

    Raises:
      RuntimeError: if it cannot be measured there, with the last line of what it said.
    """
    sizes = DISPLAY_ADS.table_sizes(config.max_buckets)
    dense = 2 * len(DISPLAY_ADS.integers)
    task = [sum(sizes), len(sizes), config.embedding_dim, dense, config.hidden, batch_size, rounds]
    command = [python, "-W", "ignore", "-c", _PROGRAM, json.dumps(task)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason"])[-1]
        raise RuntimeError(f"{python} could not run Opacus (status {result.returncode}): {reason}")
    return Opacus(*json.loads(result.stdout))
