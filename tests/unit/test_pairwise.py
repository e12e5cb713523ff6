"""Pairwise tables leave no pair out."""

from tests.pairwise import pairs, pairwise, possible


def test_table_has_every_possible_pair():
    """Far fewer rows than the product have all its pairs; impossible rows are never in it."""
    options = {"layout": "ab", "type": "cde", "size": (1, 2, None), "more": (True, False)}

    def is_possible(row) -> bool:
        return not (row["type"] == "e" and row["size"] == 2)

    rows, product = pairwise(options, is_possible), possible(options, is_possible)

    assert set().union(*map(pairs, rows)) == set().union(*map(pairs, product))
    assert all(map(is_possible, rows))
    assert len(rows) <= 10 < len(product)
