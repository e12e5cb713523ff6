"""Layouts of waybills in Chinese."""

from random import Random

from tests.waybills import numbers, words
from tests.waybills.paper import Paper


def courier(draw: Random) -> tuple[Paper, str]:
    paper, number = Paper(800, 1180, draw.randint(0, 50)), numbers.courier(draw)
    paper.text(30, 24, draw.choice(("海燕速运", "北极星快递", "蓝鲸物流")), "chinese", 46)
    paper.text(600, 30, draw.choice(("标快", "特快", "陆运包裹")), "chinese", 40)
    paper.rule(94, 4)
    paper.bars(60, 110, 680, 130, draw, number)
    label = draw.choice(("运单号", "运单号码", "快递单号")) + draw.choice(("：", " ", ":"))
    written = numbers.grouped(number, 2, 4) if draw.random() < 0.4 else number
    paper.text(120, 250, label + written, "chinese", 32)
    paper.rule(304)
    area = draw.choice(("755", "021", "010", "571")) + draw.choice("WABC")
    paper.text(40, 316, f"{area}-{draw.choice('ABCDEF')}{draw.randint(1, 99):02}", "bold", 76)
    paper.rule(410)
    y = _side(paper, draw, 424, "收", "收件人", 32)
    paper.rule(y + 8)
    y = _side(paper, draw, y + 20, "寄", "寄件人", 26)
    paper.rule(y + 8)
    left = paper.text(40, y + 20, f"托寄物：{words.one_of(draw, words.CHINESE_GOODS)}", "chinese", 26)
    left = paper.text(40, left, f"重量：{words.weight(draw)}kg", "chinese", 26)
    fee, payment = draw.randint(10, 60), draw.choice(("寄付月结", "到付", "寄付现结"))
    left = paper.text(40, left, f"运费：{fee}元 {payment}", "chinese", 26)
    date = f"2026-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
    paper.text(40, left, f"打印时间：{date} {draw.randint(8, 20):02}:{draw.randint(0, 59):02}", "chinese", 24)
    paper.squares(600, y + 24, 150, draw)
    paper.text(430, y + 20, "签收：", "chinese", 26)
    request = draw.choice(("请当面验收后签字", "如有破损请拒收", "轻拿轻放 谢谢配合"))
    paper.text(40, y + 180, request, "chinese", 24)
    return paper, number


def postal(draw: Random) -> tuple[Paper, str]:
    paper = Paper(900, 900, draw.randint(0, 60))
    number = numbers.postal(draw, ("EA", "EB", "EV", "LB", "RX", "CX"), ("CN",))
    paper.text(30, 22, draw.choice(("国际特快专递邮件", "挂号信函", "国内快递包裹")), "chinese", 44)
    paper.bars(420, 90, 440, 110, draw, number)
    paper.text(30, 120, draw.choice(("邮件号：", "邮件号码：", "运单号：")), "chinese", 28)
    written = numbers.grouped(number, 2, 3, 3, 3, 2) if draw.random() < 0.6 else number
    paper.text(430, 208, written, draw.choice(("mono", "bold", "chinese")), 36)
    if draw.random() < 0.4:
        paper.text(30, 160, number, "sans", 26)
    paper.rule(266)
    y = _side(paper, draw, 280, "寄", "寄件人", 26)
    paper.rule(y + 6)
    y = _side(paper, draw, y + 16, "收", "收件人", 30)
    paper.rule(y + 6)
    paper.text(30, y + 20, f"内件品名：{words.one_of(draw, words.CHINESE_GOODS)}", "chinese", 26)
    paper.text(460, y + 20, f"实际重量：{words.weight(draw)}千克", "chinese", 26)
    paper.text(30, y + 64, f"资费：{draw.randint(10, 200)}.00元", "chinese", 26)
    month, day = draw.randint(1, 12), draw.randint(1, 28)
    paper.text(460, y + 64, f"日期：2026年{month}月{day}日", "chinese", 26)
    paper.text(30, y + 108, f"邮编：{draw.randint(100_000, 699_999)}", "chinese", 26)
    paper.text(460, y + 108, "收寄人员签章", "chinese", 26)
    return paper, number


def _side(paper: Paper, draw: Random, y: float, mark: str, label: str, size: int) -> float:
    """Print a person with phone and address; returns the y below."""
    name, phone = words.chinese_person(draw), words.chinese_phone(draw)
    if draw.random() < 0.5:
        paper.block(30, y, mark, size + 8)
        left = 110.0
        y = paper.text(left, y, f"{name}  {phone}", "chinese", size)
    else:
        left = 40.0
        paper.text(left, y, f"{label}：{name}", "chinese", size)
        y = paper.text(left + 11 * size, y, f"电话：{phone}", "chinese", size)
    whole = words.chinese_address(draw)
    y = paper.text(left, y + 4, whole[:16], "chinese", size)
    return paper.text(left, y, whole[16:], "chinese", size) if whole[16:] else y
