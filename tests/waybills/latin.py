"""Layouts of waybills in English."""

from random import Random

from tests.waybills import numbers, words
from tests.waybills.paper import Paper


def parcel(draw: Random) -> tuple[Paper, str]:
    paper, number = Paper(800, 1200, draw.randint(0, 50)), numbers.parcel(draw)
    family = draw.choice((("sans", "bold"), ("wide", "wide-bold")))
    y = 30.0
    for line in (words.person(draw).upper(), words.phone(draw), *words.address(draw)):
        y = paper.text(30, y, line, family[0], 22)
    paper.text(480, 30, f"{words.weight(draw)} LBS", family[1], 34)
    paper.text(680, 30, f"{draw.randint(1, 3)} OF 3", family[1], 28)
    y = paper.text(30, y + 20, "SHIP TO:", family[1], 26)
    for line in (words.person(draw), words.one_of(draw, words.FIRMS), *words.address(draw)):
        y = paper.text(90, y, line.upper(), family[0], 30)
    paper.rule(y + 10, 6)
    paper.squares(40, y + 30, 180, draw)
    route = f"{draw.choice(('GA', 'IL', 'TX', 'OR'))} {numbers.digits(draw, 3)} 9-0{draw.randint(1, 9)}"
    paper.text(280, y + 40, route, family[1], 56)
    paper.bars(280, y + 120, 380, 90, draw)
    y += 230
    paper.rule(y, 8)
    service = draw.choice(("GROUND", "NEXT DAY AIR", "2ND DAY AIR", "STANDARD", "EXPRESS SAVER"))
    paper.text(30, y + 14, service, family[1], 52)
    paper.text(700, y + 10, draw.choice(("1", "2", "3", "P")), family[1], 70)
    written = numbers.grouped(number, 2, 3, 3, 2, 4) if draw.random() < 0.8 else number
    paper.text(30, y + 90, f"TRACKING #: {written}", family[0], draw.choice((26, 30, 34)))
    paper.rule(y + 140, 3)
    paper.bars(70, y + 160, 660, 190, draw, number)
    paper.rule(y + 370, 8)
    y = paper.text(30, y + 390, f"BILLING: {draw.choice(('P/P', 'F/C', 'T/P'))}", family[0], 24)
    paper.text(30, y, f"REF 1: {words.one_of(draw, words.GOODS)} {numbers.digits(draw, 5)}", family[0], 24)
    return paper, number


def express(draw: Random) -> tuple[Paper, str]:
    paper, number = Paper(800, 1150, draw.randint(0, 50)), numbers.express(draw)
    month = words.one_of(draw, words.MONTHS)
    y = 24.0
    origin = f"ORIGIN ID:{words.one_of(draw, 'LAXA JFKA ORDA')} {words.phone(draw)}"
    for line in (origin, words.person(draw), words.one_of(draw, words.FIRMS), *words.address(draw)):
        y = paper.text(24, y, line.upper(), "narrow", 24)
    right = paper.text(500, 24, f"SHIP DATE: {draw.randint(10, 28)}{month}26", "narrow", 24)
    right = paper.text(500, right, f"ACTWGT: {words.weight(draw)} LB", "narrow", 24)
    paper.text(500, right, f"CAD: {numbers.digits(draw, 9)}/INET4", "narrow", 24)
    paper.rule(y + 6, 4)
    paper.text(24, y + 16, "TO", "bold", 24)
    y += 14
    for line in (words.person(draw), words.one_of(draw, words.FIRMS), *words.address(draw)):
        y = paper.text(84, y, line.upper(), "sans", 34)
    paper.text(84, y, words.phone(draw), "narrow", 24)
    paper.text(420, y, f"REF: {numbers.digits(draw, 6)}", "narrow", 24)
    paper.bars(40, y + 50, 480, 110, draw)
    paper.squares(600, y + 40, 150, draw)
    y += 200
    paper.rule(y, 6)
    paper.text(30, y + 24, draw.choice(("TRK#", "TRK #", "TRACKING NO.")), "bold", 24)
    paper.text(220, y + 12, numbers.grouped(number, 4), draw.choice(("bold", "mono")), 42)
    paper.text(640, y + 14, draw.choice(("0201", "0215", "0663")), "sans", 26)
    service = draw.choice(("PRIORITY OVERNIGHT", "STANDARD OVERNIGHT", "2DAY", "INTL ECONOMY"))
    paper.text(420, y + 74, service, "bold", 30)
    area = f"{draw.choice(('XH', 'NA', 'WZ'))} {draw.choice(('PNSA', 'LUKA', 'BVYA'))}"
    paper.text(30, y + 110, area, "bold", 80)
    paper.text(560, y + 130, numbers.digits(draw, 5), "bold", 54)
    paper.bars(40, y + 230, 720, 200, draw, number)
    return paper, number


def postal(draw: Random) -> tuple[Paper, str]:
    paper = Paper(1000, 720, draw.randint(0, 60))
    countries = ("GB", "DE", "US", "SG", "FR", "CN", "NL")
    number = numbers.postal(draw, ("RR", "RB", "CP", "EE", "LX", "UA"), countries)
    kind = draw.choice(("REGISTERED", "SMALL PACKET", "PRIORITY PARCEL", "RECOMMANDÉ"))
    paper.text(30, 20, kind, "bold", 40)
    paper.text(640, 26, "POSTAGE PAID", "serif", 32)
    paper.rule(80)
    y = paper.text(30, 92, "FROM:", "bold", 22)
    for line in (words.person(draw), *words.address(draw)):
        y = paper.text(30, y, line, "serif", 24)
    y = paper.text(30, y + 12, "TO:", "bold", 26)
    for line in (words.person(draw), *words.address(draw)):
        y = paper.text(30, y, line, "serif", 32)
    paper.upright_rule(430, 84, 400)
    paper.bars(460, 100, 500, 150, draw, number)
    written = numbers.grouped(number, 2, 3, 3, 3, 2) if draw.random() < 0.7 else number
    paper.text(500, 264, written, draw.choice(("bold", "mono", "wide")), draw.choice((30, 36, 40)))
    paper.text(460, 330, f"Weight: {words.weight(draw)} kg", "sans", 24)
    paper.text(700, 330, f"Date: 2026-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}", "sans", 24)
    paper.rule(420)
    paper.text(30, 432, "CUSTOMS DECLARATION", "bold", 26)
    paper.text(860, 430, "CN 22", "bold", 28)
    for row in range(draw.randint(2, 3)):
        y = 480 + 50 * row
        paper.text(30, y, words.one_of(draw, words.GOODS), "sans", 24)
        paper.text(430, y, str(draw.randint(1, 9)), "sans", 24)
        paper.text(600, y, f"{words.weight(draw)} kg", "sans", 24)
        paper.text(800, y, f"USD {draw.randint(1, 300)}.00", "sans", 24)
        paper.rule(y - 8, 1)
    paper.text(30, 650, "I certify that this declaration is correct.", "serif", 22)
    return paper, number


def logistic(draw: Random) -> tuple[Paper, str]:
    paper, number = Paper(800, 1100, draw.randint(0, 50)), numbers.container(draw)
    paper.text(30, 24, "FROM", "bold", 22)
    paper.text(420, 24, "TO", "bold", 22)
    y = 54.0
    sides = [(words.one_of(draw, words.FIRMS), *words.address(draw)) for _ in range(2)]
    for ours, theirs in zip(*sides, strict=True):
        paper.text(30, y, ours, "sans", 25)
        y = paper.text(420, y, theirs, "sans", 25)
    paper.upright_rule(400, 20, y)
    paper.rule(y + 6)
    paper.text(30, y + 16, "SSCC", "bold", 26)
    is_apart, is_shown = draw.random() < 0.7, draw.random() < 0.6
    written = f"(00) {numbers.grouped(number, 1, 7, 9, 1)}" if is_apart and is_shown else number
    paper.text(30, y + 48, written, draw.choice(("wide", "sans", "mono")), 34)
    y += 110
    paper.rule(y)
    for left, top, label, value in (
        (30, y, "CONTENT", "0" + numbers.digits(draw, 13)),
        (420, y, "COUNT", str(draw.randint(1, 200))),
        (30, y + 90, "BEST BEFORE", f"{draw.randint(10, 28)}.{draw.randint(1, 12):02}.2027"),
        (420, y + 90, "BATCH", f"{draw.choice('ABCDEF')}{numbers.digits(draw, 5)}"),
    ):
        paper.text(left, top + 10, label, "bold", 22)
        paper.text(left, top + 38, value, "wide", 30)
    y += 185
    paper.rule(y)
    paper.bars(60, y + 24, 680, 170, draw)
    paper.centered(y + 200, f"(02)0{numbers.digits(draw, 13)}(37){draw.randint(10, 99)}", "sans", 26)
    paper.bars(60, y + 250, 680, 170, draw, f"(00){number}")
    paper.centered(y + 426, f"(00){number}", "sans", 28)
    return paper, number
