"""The page and the plots: what a reader sees is what the record has."""

import xml.etree.ElementTree as ET

import pytest

from loadtest.bench import page, summary, svg
from loadtest.bench.plan import IN_PROCESS, Selection
from loadtest.bench.sample import Sample

NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def rows():
    """Rows of a run of two rounds, in which every path has 90 % of the limit's 200 images/s."""
    return summary.rows(
        {
            cell: [Sample(rate, 10, 20, 40.5, 8.25, 412) for rate in (least, least + 10)]
            for cell in Selection().cells()
            for least in [195 if cell.path == IN_PROCESS else 175]
        }
    )


def test_scales_place_values():
    """Ends on ends; the middle of a linear scale is the mean, of a logarithmic one the geometric mean."""
    linear, logarithmic = svg.linear((0, 10), (100, 200)), svg.logarithmic((1, 100), (300, 100))

    assert [linear(value) for value in (0, 5, 10)] == [100, 150, 200]
    assert [round(logarithmic(value), 6) for value in (1, 10, 100)] == [300, 200, 100]


@pytest.mark.parametrize(
    ("high", "expected"),
    [(247, [0, 50, 100, 150, 200]), (9, [0, 2, 4, 6, 8]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1])],
)
def test_ticks_are_round(high, expected):
    """Steps of 1, 2 or 5, none beyond the data."""
    assert svg.ticks(high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(3, 30, [2, 5, 10, 20, 50]), (10, 100, [10, 20, 50, 100]), (7, 7, [5, 10])]
)
def test_logarithmic_ticks_enclose(low, high, expected):
    """From the last below the data to the first above."""
    assert svg.log_ticks(low, high) == expected


def test_names_do_not_stand_on_each_other():
    """Those too close move down in their order; the others stay."""
    assert svg.apart({"a": 100, "b": 95, "c": 300}) == {"b": 95, "a": 95 + svg.LINE, "c": 300}


@pytest.mark.parametrize("draw", [svg.throughput, svg.latency])
def test_plots_are_small_and_fit_both_themes(rows, draw):
    """Well-formed, titled for who cannot see them, within their frame."""
    text = draw(rows)
    root = ET.fromstring(text)

    assert root.find(f"{NAMESPACE}title").text
    assert "prefers-color-scheme: dark" in text
    assert len(text) < 30_000
    width, height = map(float, root.get("viewBox").split()[2:])
    for each in root.iter():
        assert all(0 <= float(each.get(name, 0)) <= width for name in ("x", "x1", "x2", "cx"))
        assert all(0 <= float(each.get(name, 0)) <= height for name in ("y", "y1", "y2", "cy"))


def test_throughput_is_drawn_to_scale(rows):
    """Bars are as long as their images/s, the limit stands where its own are."""
    root = ET.fromstring(svg.throughput(rows))
    bars = [float(rect.get("width")) for rect in root.iter(f"{NAMESPACE}rect")]
    (limit, _) = [line for line in root.iter(f"{NAMESPACE}line") if line.get("class") == "limit"]

    assert bars == pytest.approx([bars[0]] * 6), "four paths of the small photo, two of the other"
    assert bars[0] / (float(limit.get("x1")) - svg.LABELS) == pytest.approx(180 / 200, abs=1e-3)
    texts = [text.text for text in root.iter(f"{NAMESPACE}text")]
    assert {"images/s", "in process: 200", "180 (0.90)", "gateway, 32 at once"} <= {*texts}


def test_latency_names_its_lines(rows):
    """Both axes have their unit, every line its name."""
    texts = {text.text for text in ET.fromstring(svg.latency(rows)).iter(f"{NAMESPACE}text")}

    lines = {f"{path} {percentile}" for path in ("cpu", "ensemble") for percentile in ("p50", "p99")}
    assert {"ms", "requests in flight", "in flight / limit", "8", *lines} <= texts


def test_row_has_its_numbers(rows):
    """Nothing that was measured is left out; what has no limit has none."""
    cpu = next(row for row in rows if (row["path"], row["concurrency"], row["again"]) == ("cpu", 32, True))

    assert summary.cells(cpu) == [
        *("cpu", "small", "fp32", "wrk http 32 again", "180.0", "175.0..185.0", "0.900", "10.0", "20.0"),
        *("40.5", "0.23", "8.25", "1.000", "412"),
    ]
    assert len(summary.HEADINGS) == len(summary.cells(rows[0]))
    assert summary.cells(rows[0])[6] == ""


def test_readme_takes_the_table_in_its_place(rows):
    """Before and after stay; a README without the mark is refused."""
    record = {
        "machine": {"cpu": "a CPU", "cores": 2},
        "date": "2026-01-02T03:04:05",
        "command": "nereid bench",
        "targets": [{"met": True}, {"met": False}],
        "noise": {"rate": {"median": 1.02}},
        "rows": rows,
    }
    section = page.readme_section(record)
    text = f"before\n\n{page.MARK}old:\n\n| old |\n| --- |\n\nafter | it\n"

    assert page.in_readme(text, section) == f"before\n\n{section}\nafter | it\n"
    assert "| 640x427 | `cpu` | 180 | 0.900 | 8.25 | 10.0 | 40 |" in section
    assert "| 1920x1080 | in process | 200 | 1 | 8.25 | 10.0 |  |" in section
    assert "1 of its 2 targets are met" in section
    assert "gave 1.02 times itself" in section
    with pytest.raises(ValueError, match="0 places"):
        page.in_readme("nothing", section)


def test_page_says_what_the_record_says(rows):
    """Conditions, notes, targets met and missed, noise, and a row per measurement."""
    ratio = {"median": 1.01, "min": 0.97, "max": 1.04}
    record = {
        "machine": {"cpu": "a CPU", "cores": 2, "python": "3.11"},
        **{
            "date": "2026-01-02T03:04:05",
            "command": "nereid bench",
            "commit": "abc",
            "packages": {"numpy": "1"},
        },
        **{
            "tools": {"wrk": "4.1"},
            "environment": {"MALLOC": "7"},
            "rounds": 2,
            "seconds": 1,
            "load_before": 0.1,
        },
        "notes": ["without gRPC: no network"],
        "targets": [{"what": "cpu: throughput", "got": 0.96, "wanted": "≥ 0.97", "met": False}],
        "noise": {"rate": ratio},
        "rows": rows,
    }
    others = {
        "memory": {**record, "rows": [{"instances": 1}]},
        "swap": {**record, "rows": [], "publish_s": 6},
        "trials": {**record, "rows": []},
        "pieces": {"command": "python -m loadtest.x"},
    }

    text = page.render(record, others)

    for told in (
        "| machine | a CPU, 2 cores, 2026-01-02 |",
        "- without gRPC: no network\n",
        "| cpu: throughput | ≥ 0.97 | 0.96 | no |",
        "| rate | 1.01 | 0.97..1.04 |",
        "| [pieces.json](../loadtest/results/pieces.json) | `python -m loadtest.x` |",
    ):
        assert told in text
    assert "## Cold start" not in text, "it was not measured"
    assert text.count("| small |") == sum(row["photo"] == "small" for row in rows)
