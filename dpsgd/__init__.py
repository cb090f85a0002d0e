"""What is done with a batch? Clipping, noise and the update, as one compiled program."""

from dpsgd.algorithm import Algorithm, Mechanism, TrainState, dpsgd
from dpsgd.clipping import Diagnostics, clipped_grad
from dpsgd.guarantee import Guarantee
from dpsgd.keys import RootKey
from dpsgd.loop import Block, train, train_blocks
from dpsgd.memory import explain
from dpsgd.modules import split_module

__all__ = [
    "Algorithm",
    "Block",
    "Diagnostics",
    "Guarantee",
    "Mechanism",
    "RootKey",
    "TrainState",
    "clipped_grad",
    "dpsgd",
    "explain",
    "split_module",
    "train",
    "train_blocks",
]
