"""Prices of a small shop, in cents."""


def total(prices, discount_percent=0):
    """The sum of the prices, less a discount, rounded to whole cents."""
    amount = sum(prices)
    return amount - amount * discount_percent // 100


def average(prices):
    """The average price, rounded down; 0 for an empty list."""
    return total(prices) // len(prices)
