"""The Criteo Sponsored Search Conversion Log: 16M clicks on product advertisements in 90 days.

23 columns, sorted by time; the task is to predict *Sale*. All features are categories: opaque
identifiers, the number of clicks in a week, the words of a product's title as one value, and the
time of the click as the hour of its week (the second itself says next to nothing about the next
click). -1, or an empty field, is a missing value. The split is random: 80 % of the rows
train, as in one of the papers; the others are halved, so that a learning rate can be chosen on
validation rows and the test rows stay out of it.

Left out unless asked for: SalesAmountInEuro and time_delay_for_conversion, which are known only
after a sale and are -1 without one, and product_price, which goes with the outcome as well (0.0
where nothing was sold, in the published rows). A model that sees them reads the answer.
"""

from __future__ import annotations

from experiments.tasks.clicks.raw.format import RawFormat
from experiments.tasks.clicks.raw.kinds import HourOfWeek, Integer, Label, RawKind, Text
from experiments.tasks.clicks.schema import SPONSORED_SEARCH
from experiments.tasks.splits import Split

_IDENTIFIER = Text(missing="-1")
_COLUMNS: dict[str, RawKind] = {
    "Sale": Label(),
    "SalesAmountInEuro": Text(missing="-1.0"),
    "time_delay_for_conversion": _IDENTIFIER,
    "click_timestamp": HourOfWeek(missing=-1),
    "nb_clicks_1week": Integer(missing=-1),
    "product_price": _IDENTIFIER,
    "product_age_group": _IDENTIFIER,
    "device_type": _IDENTIFIER,
    "audience_id": _IDENTIFIER,
    "product_gender": _IDENTIFIER,
    "product_brand": _IDENTIFIER,
    **{f"product_category_{i}": _IDENTIFIER for i in range(1, 8)},
    "product_country": _IDENTIFIER,
    "product_id": _IDENTIFIER,
    "product_title": _IDENTIFIER,
    "partner_id": _IDENTIFIER,
    "user_id": _IDENTIFIER,
}
_AFTER_A_SALE = ("Sale", "SalesAmountInEuro", "time_delay_for_conversion", "product_price")

FORMAT = RawFormat(
    schema=SPONSORED_SEARCH,
    columns=_COLUMNS,
    label="Sale",
    summary="Sale, two outcomes, time, clicks, price, 17 identifiers",
    file_name="CriteoSearchData",
    split=Split("random"),
    hints={},
    # Columns known only after a sale are absent together, with or without the price.
    unlabelled={
        "two outcomes, time, clicks, price, 17 identifiers": _AFTER_A_SALE[:1],
        "time, clicks, price, 17 identifiers": _AFTER_A_SALE[:3],
        "time, clicks, 17 identifiers": _AFTER_A_SALE,
    },
)
