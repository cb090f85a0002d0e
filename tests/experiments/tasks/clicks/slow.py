"""A slow reader and a slow hash of texts, which share no line with the fast ones."""

import numpy as np

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def split_mix(x: int) -> int:
    """Finalise as SplitMix64 does, in Python integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def text_hash(text: bytes) -> int:
    state = len(text) * GOLDEN & WORD
    for at in range(0, len(text), 8):
        state = split_mix(state ^ int.from_bytes(text[at : at + 8], "little"))
    return state


def edited(data: bytes, kind: str, where: float, byte: int) -> bytes:
    """Returns bytes with one put, inserted, deleted, or all of them cut or repeated somewhere."""
    at = int(where * len(data))
    return {
        "put": data[:at] + bytes([byte]) + data[at + 1 :],
        "insert": data[:at] + bytes([byte]) + data[at:],
        "delete": data[:at] + data[at + 1 :],
        "cut": data[:at],
        "double": data[:at] + data[at // 2 :],
    }[kind]


def slow_columns(rows, schema, value, label=None, hash_seed=0):
    """What rows, dictionaries, are in a store; `value` says what a column has there, or None."""
    numbers = [[value(name, row[name]) for name in schema.integers] for row in rows]
    shape = len(rows), len(schema.integers)
    missing = np.array([[x is None for x in row] for row in numbers], bool).reshape(shape)
    x = np.array([[float(x or 0) for x in row] for row in numbers], float).reshape(shape)
    columns = {
        "integers": np.copysign(np.log1p(np.abs(x)), x).astype(np.float32),
        "integers_missing": missing,
        "categories": np.zeros((len(rows), len(schema.categories)), np.int32),
    }
    for j, name in enumerate(schema.categories):
        values = [value(name, row[name]) for row in rows]
        ids = schema.hash(np.array([x or 0 for x in values], np.uint64), j, hash_seed)
        columns["categories"][:, j] = np.where([x is None for x in values], 0, ids)
    if label is not None:
        columns["label"] = np.array([int(row[label]) for row in rows], np.uint8)
    return columns


def assert_same(got, expected):
    """Compares columns bit for bit."""
    assert set(got) == set(expected)
    for name, column in expected.items():
        assert (got[name].dtype, got[name].shape) == (column.dtype, column.shape)
        assert np.ascontiguousarray(got[name]).tobytes() == column.tobytes(), name
