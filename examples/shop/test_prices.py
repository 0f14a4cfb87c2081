from prices import average, total


def test_total_with_discount():
    assert total([1000, 500], discount_percent=10) == 1350


def test_average():
    assert average([1000, 500]) == 750


def test_average_of_nothing():
    assert average([]) == 0
