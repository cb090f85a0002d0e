"""The cost of an uneven tree is that of its worst leaf, or of a worse one."""

from accounting import MultistageProfile
from accounting.profiles.worst_leaf import WorstLeafProfile, lowest_paths

DELTA = 1e-5


def test_the_worst_leaf_of_an_uneven_tree_governs():
    paths = ((10, 40), (10, 25), (10, 30))
    worst = WorstLeafProfile(2.0, 5, (2, 5), paths)
    assert lowest_paths(paths) == ((10, 25),)
    assert worst.epsilon(DELTA) == MultistageProfile(2.0, 5, (2, 5), (10, 25)).epsilon(DELTA)
    assert worst.delta(1.0) == MultistageProfile(2.0, 5, (2, 5), (10, 25)).delta(1.0)


def test_paths_of_which_neither_is_below_the_other_all_count():
    paths = ((4, 9), (9, 4))
    worst = WorstLeafProfile(2.0, 5, (1, 2), paths).epsilon(DELTA)
    each = [MultistageProfile(2.0, 5, (1, 2), path).epsilon(DELTA) for path in paths]
    assert abs(each[0].upper - each[1].upper) > 0.01
    assert worst.upper == max(bound.upper for bound in each)
    assert worst.lower == max(bound.lower for bound in each)


def test_very_many_kinds_of_leaves_cost_as_much_as_the_smallest_sizes():
    paths = tuple((5 + i, 30 - i) for i in range(12))
    worst = WorstLeafProfile(2.0, 5, (1, 2), paths).epsilon(DELTA)
    smallest = MultistageProfile(2.0, 5, (1, 2), (5, 19)).epsilon(DELTA)
    assert worst.upper == smallest.upper
    assert worst.lower == MultistageProfile(2.0, 5, (1, 2), (5, 30)).epsilon(DELTA).lower
