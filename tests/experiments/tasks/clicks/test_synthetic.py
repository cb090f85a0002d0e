"""Generated rows are reproducible by chunk, look like the real ones, and have a known optimum."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from experiments.tasks.clicks.store import Store, StoreError
from experiments.tasks.clicks.synthetic.planted import CHUNK, generate
from experiments.tasks.clicks.synthetic.rows import LOGS, token, write_raw, write_store
from experiments.tasks.splits import chronological_split, random_split

DISPLAY, SEARCH = LOGS.values()


LOGS_LONG = [DISPLAY, pytest.param(SEARCH, marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=LOGS_LONG, ids=LOGS)
def log(request):
    return request.param


@pytest.fixture(scope="module")
def chunk(log):
    return generate(log.population, 7, 0)


def slow_auc(score, label):
    positive, negative = score[label][:, None], score[~label][None, :]
    return ((positive > negative) + 0.5 * (positive == negative)).mean()


def assert_same_rows(one, two):
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.long
def test_a_chunk_is_a_function_of_seed_and_number_in_any_order(log, chunk):
    population = log.population
    later = generate(population, 7, 3)
    assert_same_rows(generate(population, 7, 0), chunk)
    assert_same_rows(generate(population, 7, 3), later)
    assert_same_rows(generate(population, 7, 3, 100), [x[..., :100] for x in later])
    assert (later.ranks != chunk.ranks).mean() > 0.5
    assert (generate(population, 8, 0).ranks != chunk.ranks).mean() > 0.5


@pytest.mark.long
def test_more_rows_only_append(tmp_path):
    for rows in (66_000, 70_000):
        write_store(tmp_path / str(rows), rows, 2)
    fewer, more = (Store.open(tmp_path / rows) for rows in ("66000", "70000"))
    first = fewer.load("train")
    for name, column in more.load("train").items():
        np.testing.assert_array_equal(column[:52_800], first[name])
    write_raw(tmp_path / "fewer", 3_000, 2)
    write_raw(tmp_path / "more", 5_000, 2)
    assert (tmp_path / "more").read_bytes().startswith((tmp_path / "fewer").read_bytes())


@pytest.mark.parametrize("rows", [3_000, pytest.param(CHUNK + 400, marks=pytest.mark.long)])
def test_preparing_the_raw_file_equals_writing_the_store(log, rows, tmp_path):
    raw = write_raw(tmp_path / "raw.txt", rows, 7, log=log)
    summary = write_store(tmp_path / "direct", rows, 7, log=log, hash_seed=11)
    direct = Store.open(tmp_path / "direct")
    assert summary == raw
    prepared = replace(log.format, hash_seed=11).prepare(
        tmp_path / "raw.txt", tmp_path / "prepared"
    )
    assert prepared.schema == direct.schema
    assert prepared.sha256 == direct.sha256
    assert prepared.splits == direct.splits
    assert direct.source["bayes_auc"] == summary.bayes_auc


def test_missing_rates_match_publication_and_groups_go_together(log, chunk):
    """Six standard deviations each: a false alarm has a probability below 1e-7 in all."""
    absent = dict(zip(log.population.integers, chunk.integers_missing, strict=True))
    absent |= {n: r == 0 for n, r in zip(log.population.categories, chunk.ranks, strict=True)}
    expected = dict.fromkeys(absent, 0.0)
    for group in log.population.missing:
        expected |= group
        rarest_first = sorted(group, key=group.get)
        for rarer, other in itertools.pairwise(rarest_first):
            assert not (absent[rarer] & ~absent[other]).any()
    for name, rate in expected.items():
        assert abs(absent[name].mean() - rate) <= 6 * math.sqrt(rate * (1 - rate) / CHUNK), name


def test_values_follow_zipf_with_the_real_cardinalities(log, chunk):
    """Six standard deviations of a binomial, on three cumulative probabilities per column."""
    for ranks, (cardinality, exponent) in zip(
        chunk.ranks, log.population.categories.values(), strict=True
    ):
        ranks = ranks[ranks > 0]
        assert ranks.max() <= cardinality
        power = 1 - exponent
        for rank in (1, 2, 100):
            if rank < cardinality:
                if power == 0:
                    probability = math.log(rank + 1) / math.log(cardinality + 1)
                else:
                    probability = ((rank + 1) ** power - 1) / ((cardinality + 1) ** power - 1)
                error = 6 * math.sqrt(probability * (1 - probability) / len(ranks)) + 1e-12
                assert abs((ranks <= rank).mean() - probability) <= error, cardinality


def test_only_columns_with_a_common_latent_are_dependent():
    """Chi-square of independence on 4 x 4 quartiles, 9 degrees of freedom.

    Below 60 for independent columns but for a probability of 2e-9.
    """
    chunk = generate(DISPLAY.population, 7, 0)

    def chi_square(one, two):
        a, b = (chunk.ranks[i] for i in (one, two))
        both = (a > 0) & (b > 0)
        quartiles = [
            np.argsort(np.argsort(x[both], kind="stable")) * 4 // both.sum() for x in (a, b)
        ]
        table = np.bincount(quartiles[0] * 4 + quartiles[1], minlength=16)
        expected = both.sum() / 16
        return ((table - expected) ** 2 / expected).sum()

    assert chi_square(2, 14) > 1_000  # C3 and C15
    assert chi_square(2, 11) < 60  # C3 and C12: the other latent


@pytest.mark.long
def test_distinct_ranks_have_distinct_tokens():
    ranks = np.concatenate([np.arange(1, 1 << 17), np.arange(10_000_000, 10_131_228)])
    for feature in (0, 2, 25):
        tokens = token(ranks.astype(np.int32), feature)
        assert len(np.unique(tokens)) == len(ranks)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.long) for s in (1, 2))])
def test_every_seed_has_the_target_label_rate_and_bayes_auc(log, seed, tmp_path):
    summary = write_store(tmp_path / "s", 2 * CHUNK, seed, log=log)
    assert summary.rows == 2 * CHUNK
    assert abs(summary.label_rate - log.population.label_rate) < 0.01
    assert abs(summary.bayes_auc - log.population.bayes_auc) < 0.01
    assert abs(summary.test_bayes_auc - log.population.bayes_auc) < 0.03


def test_labels_are_drawn_with_the_planted_probabilities(chunk):
    """Each tenth of the probabilities, and all, within six standard deviations."""
    probability = chunk.probability / 2**16
    tenths = np.array_split(np.argsort(probability), 10)
    for rows in (*tenths, np.arange(CHUNK)):
        p = probability[rows]
        deviation = math.sqrt((p * (1 - p)).sum())
        assert abs((chunk.label[rows] - p).sum()) < 6 * deviation


def test_the_reported_auc_counts_ties_of_probabilities(log, tmp_path):
    summary = write_store(tmp_path / "s", 3_000, 7, log=log)
    rows = generate(log.population, 7, 0, 3_000)
    assert summary.bayes_auc == pytest.approx(slow_auc(rows.probability, rows.label), abs=1e-12)
    if log is DISPLAY:
        test = np.arange(chronological_split(3_000)["test"][0], 3_000)
    else:
        test = random_split({"label": np.arange(3_000)}, 0)["test"]["label"]
    test_auc = slow_auc(rows.probability[test], rows.label[test])
    assert summary.test_bayes_auc == pytest.approx(test_auc, abs=1e-12)
    assert summary.label_rate == rows.label.mean()


def test_outcomes_of_the_raw_search_log_follow_from_the_label(tmp_path):
    write_raw(tmp_path / "log.tsv", 3_000, 0, log=SEARCH)
    for line in (tmp_path / "log.tsv").read_text().splitlines():
        sale, amount, delay, _, _, price, *_ = line.split("\t")
        assert (sale, amount, delay, price) == ("0", "-1.0", "-1", "0.0") or (
            sale == "1" and float(amount) > 0 and int(delay) >= 0 and float(price) > 0
        )


@pytest.mark.long
def test_planted_probabilities_beat_every_other_score(log, chunk):
    """Adding up log-odds per value, learned on the first rows, comes close to but not above."""
    train, test = chunk, generate(log.population, 7, 1)
    score = np.zeros(CHUNK)
    prior = train.label.mean()
    for ranks, unseen in zip(train.ranks, test.ranks, strict=True):
        top = np.minimum(ranks, 999), np.minimum(unseen, 999)
        clicks = np.bincount(top[0], train.label, minlength=1000)
        shown = np.bincount(top[0], minlength=1000)
        rate = (clicks + 50 * prior) / (shown + 50)
        score += np.log(rate / (1 - rate))[top[1]]
    some = slice(0, 5_000)
    best = slow_auc(test.probability[some], test.label[some])
    learned = slow_auc(score[some], test.label[some])
    assert 0.68 < learned < best - 0.02


def test_existing_files_bad_counts_and_bad_seeds_are_refused(tmp_path):
    (tmp_path / "train.txt").write_text("mine")
    for write in (write_raw, write_store):
        with pytest.raises(StoreError, match="exists already"):
            write(tmp_path / "train.txt", 10, 0)
        with pytest.raises(ValueError, match="number of rows must be at least 1, got 0"):
            write(tmp_path / "new", 0, 0)
        with pytest.raises(ValueError, match="must be at least 0, got -1"):
            write(tmp_path / "new", 10, -1)
    with pytest.raises(StoreError, match="cannot be written"):
        write_raw(tmp_path / "train.txt" / "x", 10, 0)
    assert (tmp_path / "train.txt").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["train.txt"]
