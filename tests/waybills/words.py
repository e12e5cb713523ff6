"""Invented people, addresses and goods, in English and Chinese."""

from random import Random

FIRST = (
    "Anna Ben Clara David Emma Felix Grace Hugo Ida Jonas Karen Liam Mia Noah Olivia Paul Rosa Simon Tara Zoe"
)
LAST = "Adams Baker Castillo Dietrich Evans Fischer Gomez Hughes Ivanov Jensen Keller Lopez Moore Novak Reed"
STREETS = (
    "Oak Street|Station Road|Mill Lane|5th Avenue|Harbour View|King Street|Lindenweg|Rue Pasteur|Elm Court"
)
CITIES = "Springfield IL 62704|Portland OR 97201|Leeds LS1 4AP|Austin TX 73301|Boston MA 02108|Reno NV 89501"
FIRMS = "Acme Tools Ltd|Northwind Traders|Blue River Books|Global Parts Inc|Sunrise Optics|Hill & Sons GmbH"
GOODS = "BOOKS|SPARE PARTS|CLOTHES|TOYS|TEA|PHONE CASE|DOCUMENTS|SHOES|SAMPLES|COSMETICS"
SURNAMES = "王李张刘陈杨赵黄周吴徐孙胡朱高林何郭马罗"
GIVEN = "伟芳娜敏静丽强磊军洋勇艳杰娟涛明超霞平刚桂英建华文辉玲红志梅"
TOWNS = (
    "北京市朝阳区|上海市浦东新区|广东省深圳市南山区|浙江省杭州市西湖区|江苏省南京市鼓楼区|四川省成都市武侯区|"
    "湖北省武汉市洪山区|陕西省西安市雁塔区|福建省厦门市思明区|山东省青岛市市南区"
)
ROADS = "建国路|人民路|科技园南路|文三路|中山北路|天府大道|珞喻路|高新一路|软件园二路|香港中路"
CHINESE_GOODS = "服装|书籍|手机配件|茶叶|文件|化妆品|玩具|鞋子|电子产品|食品"
MONTHS = "JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC"


def one_of(draw: Random, words: str) -> str:
    """Return one of the words that `|` separates, or spaces if there is none."""
    return draw.choice(words.split("|") if "|" in words else words.split())


def person(draw: Random) -> str:
    return f"{one_of(draw, FIRST)} {one_of(draw, LAST)}"


def address(draw: Random) -> tuple[str, str]:
    return f"{draw.randint(1, 999)} {one_of(draw, STREETS)}", one_of(draw, CITIES)


def phone(draw: Random) -> str:
    return f"({draw.randint(201, 989)}) 555-{draw.randint(0, 9999):04}"


def weight(draw: Random) -> str:
    return f"{draw.uniform(0.1, 30):.{draw.choice((1, 2))}f}"


def chinese_person(draw: Random) -> str:
    return draw.choice(SURNAMES) + "".join(draw.choice(GIVEN) for _ in range(draw.randint(1, 2)))


def chinese_phone(draw: Random) -> str:
    return f"1{draw.choice('3578')}{draw.randint(0, 999_999_999):09}"


def chinese_address(draw: Random) -> str:
    house = f"{draw.randint(1, 399)}号{draw.randint(1, 30)}栋{draw.randint(101, 2805)}室"
    return f"{one_of(draw, TOWNS)}{one_of(draw, ROADS)}{house}"
