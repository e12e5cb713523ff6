"""The page and the plot of the benchmark show the record."""

import re
import xml.etree.ElementTree as ET

import pytest

from loadtest.bench import page, plots, summary
from loadtest.bench.plan import IN_PROCESS, Selection
from loadtest.bench.summary import Sample

NAMESPACE = "{http://www.w3.org/2000/svg}"
CONDITIONS = {
    "machine": {"cpu": "a CPU", "cores": 2, "python": "3.11"},
    "date": "2026-01-02T03:04:05",
    "command": "python -m loadtest.bench --record bench",
    "commit": "abc",
    "packages": {"numpy": "1"},
    "tools": {"wrk": "4.1"},
    "environment": {"MALLOC": "7"},
    "rounds": 2,
    "seconds": 1,
    "load_before": 0.1,
    "notes": ["without gRPC: no network"],
    "targets": [{"what": "cpu: throughput", "got": 0.96, "wanted": "≥ 0.97", "met": False}],
    "noise": {"rate": {"median": 1.01, "min": 0.97, "max": 1.04}},
}


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


def widths(text: str) -> list[float]:
    """Return the widths of the bars, which are the filled rectangles of the plot's paths."""
    found = []
    for path in ET.fromstring(text).iter(f"{NAMESPACE}path"):
        steps = re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.get("d"))
        if len(steps) == 4 and any(colour in path.get("style", "") for colour in plots.COLOURS.values()):
            found.append(max(float(x) for x, _ in steps) - min(float(x) for x, _ in steps))
    return found


def test_throughput_is_drawn_to_scale(rows):
    def halved(rate: dict[str, float]) -> dict[str, float]:
        return {name: value / 2 for name, value in rate.items()}

    slow = [row | {"rate": halved(row["rate"])} if row["path"] == "ensemble" else row for row in rows]
    text = plots.throughput(slow)
    bars = widths(text)

    assert len(bars) == 8, "five paths of the small photo, three of the other"
    assert bars[1] == pytest.approx(bars[0] / 2, rel=1e-3)
    texts = {each.text for each in ET.fromstring(text).iter(f"{NAMESPACE}text")}
    assert {"images/s", "in process: 200", "180 (0.90)", "90 (0.90)", "gateway, 32 in flight"} <= texts


def test_row_has_its_numbers(rows):
    cpu = next(row for row in rows if (row["path"], row["concurrency"], row["again"]) == ("cpu", 32, True))

    assert summary.cells(cpu) == [
        *("cpu", "small", "fp32", "wrk http 32 again", "180.0", "175.0..185.0", "0.900", "10.0", "20.0"),
        *("40.5", "0.23", "8.25", "1.000", "412"),
    ]
    assert len(summary.HEADINGS) == len(summary.cells(rows[0]))
    assert summary.cells(rows[0])[6] == ""


def test_readme_takes_the_table_in_its_place(rows, tmp_path):
    section = page.readme_section({**CONDITIONS, "rows": rows})
    path = tmp_path / "README.md"
    path.write_text(f"before\n\n{page.MARK}old:\n\n| old |\n| --- |\n\nafter | it\n")

    assert page.with_section(path, section) == f"before\n\n{section}\nafter | it\n"
    assert "| 640x427 | `cpu` | 180 | 0.900 | 8.25 | 10.0 | 40 |" in section
    assert "| 1920x1080 | in process | 200 | 1 | 8.25 | 10.0 |  |" in section
    assert "0 of 1 targets are met. The A/A ratio was 1.01." in section
    path.write_text("nothing")
    with pytest.raises(ValueError, match=r"README.md: expected 1 place .* got 0"):
        page.with_section(path, section)


def test_cost_of_an_image_predicts_the_rate_of_all_cores(rows):
    section = page.capacity_section({**CONDITIONS, "rows": rows})

    assert section.startswith(page.MARK)
    assert "| `cpu` | 640x427 | fp32 | 8.25 | 121 | 242 | 180 | 0.74 |" in section
    assert "in process" not in section


def test_page_says_what_the_record_says(rows):
    text = page.render({**CONDITIONS, "rows": rows}, {"recovery": {"command": "python -m loadtest.x"}})

    for told in (
        "| machine | a CPU, 2 cores, 2026-01-02 |",
        "- without gRPC: no network\n",
        "| cpu: throughput | ≥ 0.97 | 0.96 (missed) |",
        "| command | `python -m loadtest.bench --record bench` |",
        "| rate | 1.01 | 0.97..1.04 |",
        "| [recovery.json](../loadtest/results/recovery.json) | `python -m loadtest.x` | [supervision.md]",
    ):
        assert told in text
    assert text.count("| small |") == sum(row["photo"] == "small" for row in rows)
