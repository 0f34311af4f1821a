"""The tasks of examples/real and their scorers."""

from __future__ import annotations

from examples.real.tasks import Products, Sums, number


def test_sums_and_their_scorer() -> None:
    sums = Sums(9)
    assert len(sums) == 100
    assert (sums[37].prompt[1]["content"], sums[37].answer) == ("What is 3 + 7?", "10")
    products = Products(9)
    assert len(products) == 64
    assert (products[0].answer, products[63].prompt[-1]["content"], products[63].answer) == ("4", "What is 9 times 9?", "81")
    assert [number("", said, "1010") for said in ("1,010", "5 + 5 = 1010.", "1010 or 11", "ten", "")] == [1, 1, 0, 0, 0]
