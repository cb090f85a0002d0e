"""Every line lies in one range: that in which it begins."""

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.beam.ranges import ByteRange, byte_ranges, lines_of
from experiments.tasks.clicks.raw import format as raw_format


def texts(path, range_bytes, block_bytes):
    found = []
    for span in byte_ranges([path], range_bytes):
        blocks = list(lines_of(span, "raw file", block_bytes))
        line = 1
        for text, first in blocks:
            assert first == line
            line += 1 if text is None else text.count(b"\n")
        found.append([text for text, _ in blocks])
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("ranges") / "file"


lines = st.lists(st.text("a\t\r", max_size=9).map(str.encode), min_size=1, max_size=9)


@pytest.mark.long
@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(lines=lines, ends=st.booleans(), range_bytes=st.integers(1, 30), block=st.integers(1, 40))
def test_ranges_of_any_size_read_in_blocks_of_any_size_are_the_lines_of_the_file(
    file, lines, ends, range_bytes, block
):
    content = b"\n".join(lines) + b"\n" * ends
    file.write_bytes(content)
    whole = content if content.endswith(b"\n") or not content else content + b"\n"
    found = texts(file, range_bytes, block)
    assert b"".join(text for texts_ in found for text in texts_) == whole
    begins = {0, *(i + 1 for i, byte in enumerate(content) if byte == ord("\n"))}
    for number, range_texts in enumerate(found):
        own = range(number * range_bytes, min((number + 1) * range_bytes, len(content)))
        expected = len(begins & set(own)) if content else 0
        assert sum(text.count(b"\n") for text in range_texts) == expected


def test_a_gzip_file_is_one_range(file):
    file.write_bytes(gzip.compress(b"a\nb\n"))
    assert byte_ranges([file], 1) == [ByteRange(0, 0, str(file))]
    assert texts(file, 1, 1 << 20) == [[b"a\nb\n"]]


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("range_bytes", [1, 3, 7, 1000])
@pytest.mark.parametrize("block", [2, 1000])
def test_what_is_longer_than_a_row_is_named_and_the_lines_after_it_are_read(
    file, monkeypatch, compress, range_bytes, block
):
    monkeypatch.setattr("experiments.beam.ranges.MAX_LINE_BYTES", 5)
    assert raw_format.MAX_LINE_BYTES == 1 << 20
    file.write_bytes(compress(b"a\n" + b"x" * 2000 + b"\nb\nc"))
    found = [text for range_ in texts(file, range_bytes, block) for text in range_]
    if block == 2:  # a line that lies in one block whole is no danger to memory
        assert found.count(None) == 1
        at = found.index(None)
        assert b"".join(found[:at]), b"".join(found[at + 1 :]) == (b"a\n", b"b\nc\n")
