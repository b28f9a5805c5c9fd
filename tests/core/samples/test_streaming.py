"""Writing past the caches gives what numpy gives, wherever memory begins and ends, and refuses what does not fit."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from energon_bridge.core.samples import streaming

WAYS = {"numpy": (streaming.divide_with_numpy, streaming.copy_with_numpy)}
if streaming.STREAMS:
    WAYS["compiled"] = (streaming.divide, streaming.copy)


@pytest.fixture(params=sorted(WAYS))
def way(request):
    return WAYS[request.param]


def test_floats_are_the_pixels_divided_by_255_exactly(way):
    pixels = np.arange(256, dtype=np.uint8).reshape(8, 32)
    out = np.full((8, 32), np.nan, dtype=np.float32)
    way[0](pixels, out)
    exact = (pixels.astype(np.float64) / 255).astype(np.float32)
    assert np.array_equal(out, exact)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 31, 64, 65, 100, 257])
def test_nothing_beside_the_output_is_written(way, size):
    divide, copy = way
    pixels = np.random.default_rng(size).integers(0, 256, size + 3, dtype=np.uint8)
    for start in range(20):  # addresses that are multiples of the width of a register, and others
        for write, kind in ((divide, np.float32), (copy, np.uint8)):
            memory = np.full(size + 40, 77, dtype=kind)
            write(pixels[3:], memory[start : start + size])
            expected = pixels[3:] / np.float32(255) if kind is np.float32 else pixels[3:]
            assert np.array_equal(memory[start : start + size], expected)
            assert (memory[:start] == 77).all()
            assert (memory[start + size :] == 77).all()


@pytest.mark.parametrize("kind", [np.bool_, np.int64, np.float64])
def test_numbers_of_any_type_are_copied(way, kind):
    numbers = np.random.default_rng(0).integers(0, 2, (5, 7, 3)).astype(kind)
    out = np.empty_like(numbers)
    way[1](numbers, out)
    assert np.array_equal(out, numbers)
    for source in (numbers.tobytes(), memoryview(numbers.tobytes())):
        raw = bytearray(len(source))
        way[1](source, memoryview(raw))
        assert raw == source


def test_the_numpy_way_leaves_the_buffer_of_numpy_as_it_was():
    before = np.getbufsize()
    streaming.divide_with_numpy(np.zeros(8, dtype=np.uint8), np.empty(8, dtype=np.float32))
    assert np.getbufsize() == before


def test_several_threads_write_at_once(way):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 100_000), dtype=np.uint8)
    out = np.zeros((4, 100_000), dtype=np.float32)
    threads = [threading.Thread(target=way[0], args=rows) for rows in zip(pixels, out, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(out, pixels / np.float32(255))


@pytest.mark.skipif(not streaming.STREAMS, reason="the compiled part is not there")
def test_what_does_not_fit_is_refused():
    pixels, floats = np.zeros(64, dtype=np.uint8), np.zeros(64, dtype=np.float32)
    read_only = np.zeros(64, dtype=np.float32)
    read_only.flags.writeable = False
    for write, pair in (
        (streaming.divide, (pixels, floats[:63])),
        (streaming.divide, (pixels, pixels)),
        (streaming.divide, (floats, floats)),
        (streaming.divide, (pixels, np.zeros(257, dtype=np.uint8)[1:].view(np.float32))),  # unaligned
        (streaming.divide, (pixels, read_only)),
        (streaming.divide, (pixels[::2], floats[:32])),
        (streaming.divide, (pixels[:32], floats[::2])),
        (streaming.copy, (pixels, pixels[:63])),
        (streaming.copy, (pixels, floats)),
    ):
        with pytest.raises((ValueError, BufferError)):
            write(*pair)
    for arguments in ((), (pixels,), (pixels, floats, floats), (None, floats), (pixels, None)):
        with pytest.raises(TypeError):
            streaming.divide(*arguments)
    assert not floats.any()
