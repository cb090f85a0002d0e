"""What generated display ads are like: exponents, medians and missing rates of the real rows."""

from __future__ import annotations

import numpy as np

from experiments.tasks.clicks.criteo import display
from experiments.tasks.clicks.schema import DISPLAY_ADS, DISPLAY_CARDINALITIES
from experiments.tasks.clicks.synthetic.planted import Category, Chunk, Count, Population
from experiments.tasks.clicks.synthetic.text import Log, decimal, hexadecimal, token

# Exponents of Zipf's law that fit how the real rows spread over the most frequent values.
_ZIPF = (
    *(2.0, 1.1, 1.0, 1.0, 2.6, 2.1, 0.8, 2.3, 3.9, 1.1, 0.9, 1.0, 0.9),
    *(1.9, 1.0, 1.0, 1.6, 1.0, 1.8, 0.9, 1.0, 2.4, 1.7, 1.1, 1.6, 1.1),
)
# Log-logistic (scale, shape) of I1..I13, from their medians and upper tenths.
_INTEGERS = (
    *((1.5, 0.82), (4.5, 1.69), (6.5, 0.86), (4.5, 0.63), (2789.0, 1.14), (32.0, 0.98)),
    *((3.5, 1.03), (7.5, 0.69), (38.0, 0.87), (1.12, 0.28), (1.8, 0.55), (0.42, 0.83)),
    (4.5, 0.68),
)

POPULATION = Population(
    integers={
        name: Count(scale, shape, least=-1 if name == "I2" else 0)
        for name, (scale, shape) in zip(DISPLAY_ADS.integers, _INTEGERS, strict=True)
    },
    categories={
        name: Category(cardinality, exponent)
        for name, cardinality, exponent in zip(
            DISPLAY_ADS.categories, DISPLAY_CARDINALITIES, _ZIPF, strict=True
        )
    },
    missing=(
        dict.fromkeys(("I1", "I10"), 0.45),
        {"I3": 0.21},
        dict.fromkeys(("I4", "I13"), 0.22),
        {"I5": 0.026},
        {"I6": 0.22},
        dict.fromkeys(("I7", "I9", "I11"), 0.043),
        {"I8": 0.0005},
        {"I12": 0.77},
        dict.fromkeys(("C3", "C4", "C12", "C16", "C21", "C24"), 0.034),
        {"C6": 0.12},
        dict.fromkeys(("C19", "C20", "C25", "C26"), 0.44),
        {"C22": 0.76},
    ),
    pairs=(("C6", "C17"), ("C14", "C20"), ("C2", "C5"), ("C23", "C8")),
    shares=(0.65, 0.27, 0.08),
    label_rate=0.256,
    bayes_auc=0.80,
)


def _fields(chunk: Chunk) -> list[np.ndarray]:
    fields = [(chunk.label + np.uint8(ord("0")))[:, None]]
    for value, absent in zip(chunk.integers, chunk.integers_missing, strict=True):
        sign = (value < 0) * np.uint8(ord("-"))
        characters = np.column_stack([sign, decimal(np.abs(value), 7)])
        fields.append(np.where(absent[:, None], np.uint8(0), characters))
    for feature, rank in enumerate(chunk.ranks):
        characters = hexadecimal(token(rank, feature), "x")
        fields.append(np.where(rank[:, None] > 0, characters, np.uint8(0)))
    return fields


DISPLAY = Log(POPULATION, display.FORMAT, token, _fields)
