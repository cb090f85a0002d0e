"""The Kaggle format of Criteo Display Ads: 46M clicks and non-clicks of a week, in their order.

40 columns: label (0 or 1), I1..I13 (integers, I2 may be negative), C1..C26 (eight hexadecimal
digits); an empty field is a missing value. The publishers' test.txt has no column of labels. The
split is chronological, 80/10/10.
"""

from __future__ import annotations

from experiments.tasks.clicks.raw.format import RawFormat
from experiments.tasks.clicks.raw.kinds import Hexadecimal, Integer, Label
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.splits import Split

FORMAT = RawFormat(
    schema=DISPLAY_ADS,
    columns={
        "label": Label(),
        **dict.fromkeys(DISPLAY_ADS.integers, Integer()),
        **dict.fromkeys(DISPLAY_ADS.categories, Hexadecimal()),
    },
    label="label",
    summary="label, I1-I13, C1-C26",
    file_name="train.txt",
    split=Split("chronological"),
    hints={39: "the unlabelled test file has no label column; `dpsgd score` reads it"},
    unlabelled={"I1-I13, C1-C26": ["label"]},
)
prepare = FORMAT.prepare
read = FORMAT.read
