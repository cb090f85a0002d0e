"""Every format that `dpsgd prepare` reads trains, by the command, whatever columns it has."""

import random

import pytest

from experiments.cli import main

ROWS = 120
PRIVATE = ["--noise-multiplier", "1"]
RUNS = {
    "private": PRIVATE,
    "non-private": ["--non-private"],
    "lazy-tables": [*PRIVATE, "--tables", "lazy"],
}
NUMBERS = ["age", "price"]
CATEGORIES = ["city", "device"]
COLUMNS = {
    "numbers": {"--numbers": NUMBERS},
    "categories": {"--categories": CATEGORIES},
    "both": {"--numbers": NUMBERS, "--categories": CATEGORIES},
}


def csv(folder, columns, ending="csv"):
    draw = random.Random(0)
    rows = [
        [i % 2, draw.randrange(80), f"{draw.random():.3f}", f"c{i % 9}", f"d{i % 3}"]
        for i in range(ROWS)
    ]
    lines = [["clicked", *NUMBERS, *CATEGORIES], *rows]
    mark = {"csv": ",", "tsv": "\t"}.get(ending, ",")
    (folder / f"rows.{ending}").write_text(
        "".join(mark.join(map(str, line)) + "\n" for line in lines)
    )
    options = [word for name, values in COLUMNS[columns].items() for word in [name, *values]]
    return ["csv", folder / f"rows.{ending}", folder / "store", "--label", "clicked", *options]


def tsv(folder, columns):
    return csv(folder, columns, "tsv")


def parquet(folder, columns):
    arrow = pytest.importorskip("pyarrow.csv")
    from pyarrow import parquet as written

    words = csv(folder, columns)
    written.write_table(arrow.read_csv(words[1]), folder / "rows.parquet")
    return [*words[:1], folder / "rows.parquet", *words[2:]]


def tfds(folder, columns):
    pytest.importorskip("array_record", reason="array_record has no wheel here")
    import numpy as np
    import tensorflow_datasets as tfds

    from experiments.tasks.clicks.tfds.builders import LocalInfo

    class Visits(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        name = "visits"

        def _info(self):
            kinds = dict.fromkeys(NUMBERS, np.float32)
            kinds |= dict.fromkeys(CATEGORIES, tfds.features.Text())
            features = tfds.features.FeaturesDict(kinds | {"label": np.bool_})
            return LocalInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i in range(ROWS):
                texts = dict.fromkeys(CATEGORIES, f"c{i % 9}")
                yield i, dict.fromkeys(NUMBERS, i % 7) | texts | {"label": i % 2 == 0}

    Visits(data_dir=folder / "data", file_format="array_record").download_and_prepare()
    read = {name for names in COLUMNS[columns].values() for name in names}
    left_out = [name for name in NUMBERS + CATEGORIES if name not in read]
    options = ["--leave-out", *left_out] if left_out else []
    return ["tfds", folder / "data" / "visits" / "1.0.0", folder / "store", *options]


def synthetic(folder, like):
    return ["synthetic", folder / "store", "--like", like, "--num-rows", 10 * ROWS]


def raw(folder, like):
    file = folder / "rows.txt"
    assert main(["prepare", *map(str, [*synthetic(folder, like), "--raw"])]) == 0
    (folder / "store").rename(file)
    return [like, file, folder / "store"]


def outcomes(folder, like):
    return [*raw(folder, like), "--include", "SalesAmountInEuro"]


FORMATS = {
    "csv-numbers": (csv, "numbers"),
    "csv-categories": (csv, "categories"),
    "csv-both": (csv, "both"),
    "criteo-search": (raw, "criteo-search"),
    "criteo-display": (raw, "criteo-display"),
    "criteo-search-outcomes": (outcomes, "criteo-search"),
    "synthetic-display": (synthetic, "criteo-display"),
    "synthetic-search": (synthetic, "criteo-search"),
    **{f"{make.__name__}-{k}": (make, k) for make in (tsv, parquet, tfds) for k in COLUMNS},
}
QUICK = {
    *[("private", name) for name in ("csv-numbers", "csv-both", "criteo-search")],
    ("lazy-tables", "csv-numbers"),
}
CASES = [
    pytest.param(name, run, marks=[] if (run, name) in QUICK else pytest.mark.long)
    for name in FORMATS
    for run in RUNS
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Returns the store of a format, which is prepared once."""
    made = {}

    def store(name):
        if name not in made:
            make, kind = FORMATS[name]
            folder = tmp_path_factory.mktemp(name)
            assert main(["prepare", *map(str, make(folder, kind))]) == 0
            made[name] = folder / "store"
        return made[name]

    return store


@pytest.mark.long
@pytest.mark.parametrize(("name", "run"), CASES)
def test_every_format_trains(name, run, stores, tmp_path, capsys):
    words = ["train", str(stores(name)), "sampler:poisson", "--batch-size", "20", "--epochs", "1"]
    words += ["--hidden", "2", "--embedding-dim", "2", "--max-buckets", "4", *RUNS[run]]
    status = main([*words, "--out", str(tmp_path / "run")])
    out, err = capsys.readouterr()
    if run == "lazy-tables" and name.endswith("numbers"):
        assert status == 2
        assert "the loss has no tables" in err
        return
    assert status == 0, err
    assert ("NO GUARANTEE: no noise was added" in out) == (run == "non-private")
    assert ("audit: passed" in out) == (run != "non-private")
    assert ("lazy tables" in out) == (run == "lazy-tables")
