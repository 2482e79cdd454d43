# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Check sums: what they are, by plain integers of Python, and that they notice what changes in the data."""

import struct

import torch

from diffusers_dlo.coding.check_sum import CheckSums, as_text
from tests.coding.images import patterns, random_bits


ROW = 1 << 18
"""Words of a row."""
MODULUS = 1 << 64
SUMS = CheckSums(torch.device("cpu"))


def signed(number: int) -> int:
    number %= MODULUS
    return number - MODULUS if number >> 63 else number


def odd_number(index: int, seed: int) -> int:
    """What a place is multiplied by, without torch."""
    mixed = signed(index * -7046029254386353131 + seed * 1442695040888963407)
    mixed = signed((mixed ^ (mixed >> 30)) * -4658895280553007687)
    mixed = signed((mixed ^ (mixed >> 27)) * -7723592293110705685)
    return (mixed ^ (mixed >> 31)) | 1


def reference(words: dict[int, int], nbytes: int) -> str:
    """The check sum of `nbytes` bytes that are zeros, but for some words, by their numbers."""
    total = nbytes
    for index, word in words.items():
        total += word * odd_number(index % ROW, 1) * odd_number(index // ROW, 2)
    return f"{total % MODULUS:016x}"


def check_sum(data: torch.Tensor) -> str:
    return as_text(SUMS.queue(data))


def test_it_is_the_sum_that_is_said() -> None:
    for seed, nbytes in enumerate((0, 4, 8, 252, 256, 260, 4096)):
        data = random_bits(nbytes, seed)
        words = struct.unpack(f"<{nbytes // 4}i", data.numpy().tobytes())
        assert check_sum(data) == reference(dict(enumerate(words)), nbytes), nbytes
    lowest = {0: -(1 << 31), 1: -1, 2: (1 << 31) - 1, 5: 1}
    data = torch.zeros(6, dtype=torch.int32)
    data[list(lowest)] = torch.tensor(list(lowest.values()), dtype=torch.int32)
    assert check_sum(data.view(torch.uint8)) == reference(lowest, 24)


def test_it_is_the_same_sum_in_every_row() -> None:
    """Rows are added up sixteen at a time, and what is left of one by itself."""
    for rows, more in ((1, 0), (1, -64), (1, 64), (15, 3), (16, 0), (16, 1), (17, 0), (32, 5), (33, -1)):
        count = rows * ROW + more
        places = {0, 1, ROW - 65, min(ROW, count - 1), count // 2, min(16 * ROW, count - 1), count - 2, count - 1}
        words = {place: (-1) ** i * (0x12345678 + i) for i, place in enumerate(sorted(places))}
        data = torch.zeros(count, dtype=torch.int32)
        data[list(words)] = torch.tensor(list(words.values()), dtype=torch.int32)
        assert check_sum(data.view(torch.uint8)) == reference(words, 4 * count), (rows, more)


def test_sums_that_checkpoints_hold_already() -> None:
    """They may never change: what is written in a file is compared with them."""
    assert check_sum(torch.empty(0, dtype=torch.uint8)) == "0000000000000000"
    assert check_sum(torch.zeros(256, dtype=torch.uint8)) == "0000000000000100"
    assert check_sum(torch.full((4,), 255, dtype=torch.uint8)) == "c4fd1d2f62cbe4fb"
    assert check_sum(patterns()) == "2c346c0455cfeea8"
    assert check_sum(patterns().repeat(40)) == "f72fea25fd092c5c"


def test_each_bit_is_noticed() -> None:
    data, seen = random_bits(256), set()
    for bit in range(8 * 256):
        changed = data.clone()
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(check_sum(changed))
    assert len(seen) == 8 * 256 and check_sum(data) not in seen


def test_each_bit_is_noticed_anywhere() -> None:
    """By what it adds to the sum: a bit of a word, times what the place of the word is multiplied by."""
    data = random_bits(4 * (2 * ROW + 1000), 1)
    before = check_sum(data)
    for byte in (0, 3, 4 * ROW - 1, 4 * ROW, 8 * ROW + 17, data.numel() - 1):
        for bit in (0, 7):
            data[byte] ^= 1 << bit
            assert check_sum(data) != before, (byte, bit)
            data[byte] ^= 1 << bit
    assert check_sum(data) == before


def test_swapped_words_and_rows_are_noticed() -> None:
    data = random_bits(4 * (2 * ROW + 8), 2)
    before, words = check_sum(data), data.view(torch.int32)
    for a, b in ((0, 1), (0, ROW), (ROW - 1, ROW), (5, 2 * ROW + 7), (ROW + 3, ROW + 4)):
        words[[a, b]] = words[[b, a]]
        assert check_sum(data) != before, (a, b)
        words[[a, b]] = words[[b, a]]
    assert check_sum(torch.cat([data[4 * ROW : 8 * ROW], data[: 4 * ROW], data[8 * ROW :]])) != before


def test_lengths_are_noticed() -> None:
    """Also where what is there more, or no more, is zeros."""
    sums = [check_sum(torch.zeros(256 * n, dtype=torch.uint8)) for n in range(20)]
    assert len(set(sums)) == 20
    data = random_bits(4096, 3)
    padded = torch.cat([data, torch.zeros(256, dtype=torch.uint8)])
    assert len({check_sum(data), check_sum(padded), check_sum(data[:-256]), check_sum(padded.roll(256))}) == 4


def test_where_the_data_lies_makes_no_difference() -> None:
    data = random_bits(2048, 4)
    for offset in (*range(9), 255, 256):
        around = random_bits(2048 + 512, 5)
        around[offset : offset + 2048] = data
        kept = around.clone()
        assert check_sum(around[offset : offset + 2048]) == check_sum(data), offset
        assert torch.equal(around, kept)


def test_numbers_of_places_are_odd_and_differ() -> None:
    """Seen through the sums: a word of one adds the number of its place."""
    data = torch.zeros(3000, dtype=torch.int32)
    numbers = []
    for place in range(3000):
        data[place] = 1
        numbers.append((int(check_sum(data.view(torch.uint8)), 16) - 12000) % MODULUS)
        data[place] = 0
    assert all(number % 2 for number in numbers) and len(set(numbers)) == 3000
