"""Docs, command line and versions cannot disagree."""

import inspect
import json
import re
import tomllib
from dataclasses import fields

import pytest
import typer.main
from jsonschema import Draft202012Validator

from loadtest import reading_accuracy, reading_speed, record, recovery, rollout_simulation
from loadtest.attack import __main__ as attack
from loadtest.attack import files
from loadtest.bench import __main__ as benchmark
from loadtest.bench import page as benchmarks
from loadtest.gpu_check import claims as gpu_claims
from loadtest.gpu_check.__main__ import SECTIONS
from loadtest.torture import __main__ as torture
from nereid.backends.routing.assignment import parse_route
from nereid.cli.main import app
from nereid.gateway.failures import STATUS_BY_CODE
from nereid.gateway.http.operations import OPERATIONS
from nereid.gateway.settings import GatewaySettings
from nereid.insight.drift.recording import SIGNALS
from nereid.vision.imaging.preprocess_settings import PARAMETERS, PRESETS
from tests import prose
from tests.conftest import ROOT
from tests.tables import cases
from tools import commands_page, metrics_page

GROUP = typer.main.get_command(app)
COMMANDS = commands_page.commands(GROUP)
PAGES = {str(path.relative_to(ROOT)): path for path in prose.pages(ROOT)}


def test_commands_page_lists_every_command():
    page = (ROOT / "docs" / "commands.md").read_text()
    assert re.findall("^\\| `nereid (.*?)` \\|", page, re.M) == [*COMMANDS]


def test_metrics_page_is_what_the_code_exports():
    assert metrics_page.TARGET.read_text() == metrics_page.render()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name):
    command = COMMANDS[name]

    assert command.help
    assert [parameter.name for parameter in command.params if not parameter.help] == []


def unknown_words(line: str) -> list[str]:
    """Return the words after `nereid` that name no command, no command of its group, or no option of it."""
    words = line.partition(" -- ")[0].split()
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), "")
    is_option = words[0].startswith("-")
    if not is_option and (not name or (hasattr(COMMANDS[name], "commands") and words[1:])):
        return words[:2]
    command = GROUP if is_option else COMMANDS[name]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", PAGES)
def test_shell_lines_name_real_commands(root, page):
    """The commands of records, which may be outdated, do not count."""
    text = prose.page_text(PAGES[page])
    for path in (root / "loadtest" / "results").glob("*.json"):
        text = text.replace(f"`{json.loads(path.read_text())['command']}`", "")
    targets = re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE)

    named = re.findall(r"(?:\$ |`|bin/|^|&& )nereid ([\w-][^`\n]*)", text, re.MULTILINE)
    assert [word for line in named for word in unknown_words(line)] == []
    assert named or page != "README.md", "the README shows the command line"
    assert set(re.findall(r"(?:`|^|\$ )make ([a-z-]+)", text, re.MULTILINE)) <= set(targets)
    for module in re.findall(r"python3? -m ((?:nereid|loadtest|tools|tests|clients|ops)\b[\w.]*)", text):
        path = root / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for file in re.findall(r"(?:python3?|pytest|node|sh) ((?:clients|deploy|tests|loadtest)/[\w./-]+)", text):
        assert (root / file).exists(), file


def test_measured_numbers_are_the_recorded_ones():
    for path, text in benchmarks.pages().items():
        assert path.read_text() == text, f"{path.name}; fix: make docs"


def test_every_record_is_on_a_page(root):
    for path in (root / "loadtest" / "results").glob("*.json"):
        name = "benchmarks.md" if path.stem == benchmarks.NAME else benchmarks.ELSEWHERE[path.stem]
        assert f"results/{path.name})" in (root / "docs" / name).read_text(), path.name


def test_recorded_benchmark_can_be_repeated(root):
    recorded = json.loads((root / "loadtest" / "results" / "bench.json").read_text())
    options = recorded["command"].removeprefix("python -m loadtest.bench ")

    assert f"$(BIN)/python -m loadtest.bench {options}\n" in (root / "Makefile").read_text()
    known = {f"--{name.replace('_', '-')}" for name in inspect.signature(benchmark.bench).parameters}
    assert {word for word in options.split() if word.startswith("--")} <= known


def noticed(faults):
    """Return the table of the faults that made requests fail."""
    return record.table(torture.COLUMNS, [row for row in faults if row["failed"]])


def exceeded(memory):
    """Return the soak test's memory limits that were exceeded, with the size before and after."""
    return ", ".join(
        f"{row['what'].removeprefix('memory, ')} {row['start']:.1f} → {row['end']:.1f} MB"
        for row in memory
        if not row["is_good"]
    )


@cases(
    recovery=("recovery", recovery.COLUMNS, "rows", "server.md"),
    rollout=("rollout_simulation", rollout_simulation.COLUMNS, "rows", "rollouts.md"),
    accuracy=("reading_accuracy", reading_accuracy.COLUMNS, "rows", "reading.md"),
    kinds=("reading_accuracy", reading_accuracy.KIND_COLUMNS, "rows", "reading.md"),
    speed=("reading_speed", reading_speed.COLUMNS, "rows", "reading.md"),
    soak=("soak", exceeded, "memory", "performance.md"),
    chaos=("chaos", noticed, "faults", "performance.md"),
    attack=("attack", attack.COLUMNS, "steady", "security.md"),
    files=("mutated_files", files.COLUMNS, "rows", "security.md"),
    pages=("mutated_pages", files.COLUMNS, "rows", "security.md"),
    fuzz=("attack", "{cases:,} random requests".format_map, "fuzz", "security.md"),
)
def test_page_has_the_recorded_numbers(name, columns, part, page, root):
    recorded = json.loads((root / "loadtest" / "results" / f"{name}.json").read_text())
    text = " ".join((root / "docs" / page).read_text().split())

    rows = recorded[part]
    shown = columns(rows) if callable(columns) else record.table(columns, rows)
    assert " ".join(shown.split()) in text
    assert benchmarks.conditions(recorded) in text
    in_makefile = recorded["command"] in (root / "Makefile").read_text()
    assert in_makefile or benchmarks.command_text(recorded) in text


def test_page_has_the_claims_about_the_gpu():
    text = gpu_claims.PAGE.read_text()

    assert gpu_claims.render(json.loads(gpu_claims.RECORD.read_text())) == text
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.M)
    assert rows == [(name, f"{limit_s:g}") for name, limit_s in SECTIONS.items()]


@pytest.mark.parametrize("name", commands_page.FILES)
def test_published_schema_is_the_one_in_use(name, root):
    published = (root / "docs" / f"{name}.schema.json").read_text()

    assert published == commands_page.json_schema(name)
    Draft202012Validator.check_schema(json.loads(published))


def test_every_field_of_a_route_is_documented(root):
    text = (root / "docs" / "routing.md").read_text()

    for definition in json.loads(commands_page.json_schema("route"))["$defs"].values():
        for field in definition["properties"]:
            assert f"`{field}`" in text, field
    example = re.search(r"^```json\n(.*?)^```", text, re.M | re.S)
    assert parse_route(example[1].encode()).shadows[0].percent == 20


def test_every_signal_of_drift_is_documented(root):
    text = (root / "docs" / "drift.md").read_text()

    assert set(re.findall(r"^\| `(\w+)` \| (?:responses|images) \|", text, re.M)) == set(SIGNALS)


def test_every_preprocessing_parameter_is_documented(root):
    text = (root / "docs" / "backends.md").read_text().split("\n## The `onnxruntime` backend")[0]
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}

    assert named == PARAMETERS | set(PRESETS)


def test_each_covered_attack_has_a_test(root):
    page = (root / "docs" / "security.md").read_text()
    covered = page.partition("## Attacks that are covered")[2].partition("\n## ")[0]
    rows = [line for line in covered.splitlines() if line.startswith("| ")][1:]
    named = [re.findall(r"`(tests/\S+)`", row) for row in rows]

    assert len(named) > 5
    assert [row for row, names in zip(rows, named, strict=True) if not names] == []
    assert [name for names in named for name in names if not (root / name).is_file()] == []


def test_changelog_has_this_version(root):
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]

    assert f"## [{version}]" in (root / "CHANGELOG.md").read_text()


def test_every_page_is_in_the_index_and_on_the_site(root):
    pages = {path.name for path in (root / "docs").glob("*.md")} - {"README.md"}

    assert pages <= set(re.findall(r"\]\(([\w-]+\.md)[#)]", (root / "docs" / "README.md").read_text()))
    assert pages <= set(re.findall(r"^ +- ([\w-]+\.md)$", (root / "mkdocs.yml").read_text(), re.MULTILINE))


def test_links_lead_somewhere():
    broken = []
    for page, source in PAGES.items():
        for link in prose.links(prose.page_text(source)):
            path, _, anchor = link.partition("#")
            target = source.parent / path if path else source
            if re.match(r"[a-z]+:", link):
                continue
            if not target.exists() or (anchor and anchor not in prose.headings(target.read_text())):
                broken.append(f"{page}: {link}")

    assert not broken, "\n".join(broken)


def test_pages_named_in_code_exist(root):
    """Upstream pages, which have capital letters, folders or an address, do not count."""
    anchors = {page.name: prose.headings(page.read_text()) | {""} for page in (root / "docs").glob("*.md")}
    named = [
        (str(file.relative_to(root)), page, anchor)
        for file in sorted((root / "nereid").rglob("*.py"))
        for page, anchor in re.findall(r"(?<![\w/])docs/([a-z_-]+\.md)(?:#([\w-]+))?", file.read_text())
    ]

    assert len(named) > 5
    assert [name for name in named if name[2] not in anchors.get(name[1], ())] == []


def named(section: str) -> set[str]:
    """Return the code spans in the first two cells of each row."""
    cells = ["|".join(row.split("|")[1:3]) for row in re.findall(r"^\|.*\|$", section, re.M)]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def section(title: str) -> str:
    """Return a section of the page of the gateway."""
    page = (ROOT / "docs" / "gateway.md").read_text()
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


def test_every_operation_is_documented():
    assert {f"{endpoint.method} {endpoint.path}" for endpoint in OPERATIONS} <= named(section("Operations"))


def test_every_error_is_documented():
    rows = re.findall(r"^\| ([\d, ]+) \| (.*?) \|", section("Errors"), re.M)
    errors = {code: statuses for statuses, cell in rows for code in re.findall(r"`(\w+)`", cell)}

    assert {*errors} == {*STATUS_BY_CODE}
    assert [code for code, statuses in errors.items() if str(STATUS_BY_CODE[code]) not in statuses] == []


def test_every_setting_is_documented():
    assert named(section("Settings")) - {"classify"} == {setting.name for setting in fields(GatewaySettings)}
