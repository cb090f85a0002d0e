"""The hash of texts, in Python integers: it shares no line with the fast one."""

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
