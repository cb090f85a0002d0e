"""What a generated search log is like: cardinalities and missing counts of the whole real log.

Real: cardinalities, missing counts, the rate of sales. Chosen, for want of a published figure: how
values spread (Zipf's exponents), what predicts a sale and how well, and that the coarser category
of a product is there wherever a finer one is. Rows are not in the order of time. The outcome
columns are what the label makes them; the best AUC is that of a predictor that does not read them.
"""

from __future__ import annotations

import numpy as np

from experiments.tasks.clicks.criteo import search
from experiments.tasks.clicks.schema import SEARCH_CARDINALITIES, SPONSORED_SEARCH
from experiments.tasks.clicks.synthetic.planted import Category, Chunk, Population
from experiments.tasks.clicks.synthetic.text import (
    Log,
    decimal,
    hexadecimal,
    text_hash,
    token,
    where,
)

_ROWS = 15_995_634
_SALES = 1_732_721
_MISSING_PRODUCT = {
    "product_country": 3_834_802,
    "product_id": 3_828_338,
    "product_title": 6_208_174,
    "product_brand": 7_241_560,
    "product_category_1": 6_142_756,
    "product_category_2": 6_151_249,
    "product_category_3": 7_342_676,
    "product_category_4": 10_494_308,
    "product_category_5": 14_595_054,
    "product_category_6": 15_717_150,
    "product_category_7": 15_995_414,
}
_MISSING: tuple[dict[str, int], ...] = (
    _MISSING_PRODUCT,
    {"product_age_group": 11_760_058, "product_gender": 11_654_195},
    {"audience_id": 11_502_018},
    {"nb_clicks_1week": 6_744_427},
    {"device_type": 3_032},
)
# Hours and users are about even; everything else has frequent values.
_ZIPF = {"click_timestamp": 0.0, "user_id": 0.0}

POPULATION = Population(
    integers={},
    categories={
        name: Category(cardinality, _ZIPF.get(name, 1.0))
        for name, cardinality in SEARCH_CARDINALITIES.items()
    },
    missing=tuple({name: count / _ROWS for name, count in group.items()} for group in _MISSING),
    pairs=(
        ("device_type", "product_country"),
        ("partner_id", "product_gender"),
        ("audience_id", "product_age_group"),
    ),
    shares=(0.92, 0.0, 0.08),
    label_rate=_SALES / _ROWS,
    bayes_auc=0.80,
)

_TITLE_WORDS = 6
_THURSDAY = 1_596_067_200
"""30 July 2020, 0 h UTC: a week before the published rows."""
_WEEKS = 13


def _identifier(rank: np.ndarray, feature: int) -> np.ndarray:
    """Return 32 hexadecimal digits; the first eight tell ranks apart."""
    words = (hexadecimal(token(rank, 64 * i + feature), "X") for i in range(4))
    return np.concatenate(list(words), axis=1)


def _title(rank: np.ndarray, feature: int) -> np.ndarray:
    """Return one to six identifiers with spaces between them; the first tells ranks apart."""
    parts = [_identifier(rank, feature)]
    for i in range(1, _TITLE_WORDS):
        word = np.pad(_identifier(rank, feature + 1024 * i), ((0, 0), (1, 0)))
        word[:, 0] = ord(" ")
        parts.append(np.where((rank % _TITLE_WORDS >= i)[:, None], word, np.uint8(0)))
    return np.concatenate(parts, axis=1)


def _value(rank: np.ndarray, feature: int) -> np.ndarray:
    match SPONSORED_SEARCH.categories[feature]:
        case "click_timestamp" | "nb_clicks_1week":
            return (rank - 1).astype(np.uint64)
        case "product_title":
            return text_hash(_title(rank, feature))
        case _:
            return text_hash(_identifier(rank, feature))


def _fields(chunk: Chunk) -> list[np.ndarray]:
    ranks = dict(zip(SPONSORED_SEARCH.categories, chunk.ranks, strict=True))
    sale, visits = chunk.label, ranks["nb_clicks_1week"]
    # What no feature tells: seconds, weeks, amounts. One number per row that its ranks determine.
    noise = token(ranks["user_id"], 99).astype(np.int64) ^ token(ranks["product_id"], 98)
    point = np.full((len(sale), 1), ord("."), np.uint8)
    euros = decimal(noise // 128 % 999 + 1, 3), point, decimal(noise % 99 + 1, 2)
    amount = np.concatenate(euros, axis=1)
    hours = ranks["click_timestamp"].astype(np.int64) - 1
    seconds = noise // 64 % 3600 + 604_800 * (noise // 4096 % _WEEKS)
    written = {
        "Sale": (sale + np.uint8(ord("0")))[:, None],
        "SalesAmountInEuro": where(sale, amount, b"-1.0"),
        "time_delay_for_conversion": where(sale, decimal(noise // 32 % (30 * 86_400), 7), b"-1"),
        "click_timestamp": decimal(_THURSDAY + 3600 * hours + seconds, 10),
        "nb_clicks_1week": where(visits > 0, decimal(visits - 1, 4), b"-1"),
        "product_price": where(sale, amount, b"0.0"),
    }
    for feature, (name, rank) in enumerate(ranks.items()):
        if name not in written:
            characters = (_title if name == "product_title" else _identifier)(rank, feature)
            written[name] = where(rank > 0, characters, b"-1")
    return [written[name] for name in search.FORMAT.columns]


SEARCH = Log(POPULATION, search.FORMAT, _value, _fields)
