"""Tracking numbers with true check digits, computed apart from the package's own rules."""

from random import Random

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def digits(draw: Random, count: int) -> str:
    return "".join(draw.choice("0123456789") for _ in range(count))


def postal(draw: Random, services: tuple[str, ...], countries: tuple[str, ...]) -> str:
    serial = digits(draw, 8)
    total = sum(int(digit) * weight for digit, weight in zip(serial, (8, 6, 4, 2, 3, 5, 9, 7), strict=True))
    check = {0: 5, 1: 0}.get(total % 11, 11 - total % 11)
    return f"{draw.choice(services)}{serial}{check}{draw.choice(countries)}"


def parcel(draw: Random) -> str:
    alphabet = "0123456789" + (LETTERS if draw.random() < 0.5 else "")
    body = "".join(draw.choice(alphabet) for _ in range(6))
    body += draw.choice(("01", "02", "03", "12", "13", "42", "68", "90")) + digits(draw, 7)
    total = 0
    for index, character in enumerate(body):
        value = int(character) if character.isdigit() else (LETTERS.index(character) + 2) % 10
        total += value * (1 + index % 2)
    return f"1Z{body}{(10 - total % 10) % 10}"


def container(draw: Random) -> str:
    body = draw.choice("0123") + draw.choice(("0614141", "4012345", "6901234", "5412345")) + digits(draw, 9)
    odd, even = sum(map(int, body[::2])), sum(map(int, body[1::2]))
    return body + str(-(3 * odd + even) % 10)


def express(draw: Random) -> str:
    body = draw.choice("4789") + digits(draw, 10)
    total = sum(int(digit) * (3, 1, 7)[index % 3] for index, digit in enumerate(body))
    return body + str(total % 11 % 10)


def courier(draw: Random) -> str:
    return f"SF{draw.choice('1367')}{digits(draw, 12)}"


def grouped(number: str, *sizes: int) -> str:
    """Return a number with a space between groups; the last size repeats."""
    groups, start = [], 0
    while start < len(number):
        size = sizes[min(len(groups), len(sizes) - 1)]
        groups.append(number[start : start + size])
        start += size
    return " ".join(groups)
